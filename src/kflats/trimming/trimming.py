"""Vocabulary trimming: keep the N commonest tokens, in the tokenizer and in the model.

Removed words are segmented into kept pieces. A text whose tokens are all kept is segmented as before, and the outputs
of the model for it stay the same.

Token tables are those that ``get_input_embeddings`` and ``get_output_embeddings`` name, and all modules that share
their parameters. Biases of heads follow; ids in configs (begin, end, padding, tokens that generation avoids) are
numbered anew. Another tensor of the vocabulary's size is refused.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kflats.calibration.counting import count_tokens, zipf_prior
from kflats.common.errors import KflatsError, is_whole
from kflats.common.texts import Tokenizer, check_texts, required
from kflats.evaluation.outputs import load_tokenizer, weight_file_bytes
from kflats.evaluation.running import check_finite, evaluating, explained, last_hidden_state
from kflats.io import copy_companions, load_model, new_folder, resolve_model, save_model, weights_folder
from kflats.io.atomic import write_json
from kflats.io.sources import static_folder
from kflats.model.weights import factored_layers, is_sentence_transformer, pretrained_models, vocabulary_end
from kflats.report.model_card import hub_name, rewrite_, trimmed_card
from kflats.report.report import TrimReport, resegmented, stored_bytes
from kflats.trimming.vocabulary import Vocabulary, choose, mentioned, read, reduced

_LISTS = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
)  # ids in configs under other names than _token_id
_CHECKED = 24  # ids that both models read in the end
_OTHER_MODEL = "a model that reads texts alone, such as the text encoder of this one"


TRIM_FILE = "kflats_trimming.json"
_FORMS = frozenset(
    ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")
    + ("sentencepiece.model", "tokenizer.model", "tekken.json", "bpe.codes", "dict.txt", "unigram.json")
)
"""Files that hold another form of a vocabulary; beside a new tokenizer.json they are old."""
_TRIED = 500  # texts and removed words that the tokenizer is tried on in the end


@dataclass(frozen=True)
class Trimmed:
    """A model and a tokenizer with fewer entries.

    Args:
        model, tokenizer: the new ones; the original ones are unchanged.
        kept: (entries,) int64, the old id of every new one, ascending but for added tokens at the end.
        report: sizes, and how many tokens of the texts changed.
    """

    model: Any
    tokenizer: Tokenizer
    kept: Tensor
    report: TrimReport


def trim(
    model: nn.Module,
    tokenizer: Tokenizer | None = None,
    *,
    keep: int,
    texts: Iterable[str] | None = None,
    eval_texts: Iterable[str] | None = None,
) -> Trimmed:
    """``model`` and ``tokenizer`` with the ``keep`` commonest entries of the vocabulary.

        keep the entries with the largest counts in texts;  bytes of a token table: keep x d x bytes of a number

    Kept whatever their counts: special and added tokens, ids that configs name, fallback bytes, and single characters,
    with which everything else is spelled; of a BPE also what the merging of a kept entry passes through. Where counts
    are equal, and without texts, the order of the vocabulary decides, which is that of frequency in what the tokenizer
    was trained on. Token tables, tied or not, heads, their biases and the ids in configs follow.

    Choose it for a multilingual vocabulary of which one language is used, and in front of ``compress_``. For one
    language as such it is a poor bargain: a rare word's one vector becomes several others', and texts become longer.

    Limit: a text whose tokens are all kept gives the same outputs; others change as ``report`` says.

    Args:
        model: a transformers model, or a SentenceTransformer.
        tokenizer: its fast tokenizer (WordPiece, Unigram, BPE, byte-level or with byte fallback, or word-level, whose
            removed words become unknown). None: the SentenceTransformer's own.
        keep: entries of the new vocabulary, special ones included.
        texts: the texts whose tokens are counted.
        eval_texts: the texts that the report is measured on; None: ``texts``, on which fewer tokens change.

    Raises:
        KflatsError: a tokenizer that is not fast, or of another model; ``keep`` beyond the vocabulary or below what
            must stay; a model whose vocabulary has places that are not known; a tokenizer class that does not load
            the smaller vocabulary as it is.

    The segmentation of a removed word: Wu et al., arXiv:1609.08144 (WordPiece); Kudo, ACL 2018, eq. 7 (Unigram);
    Sennrich et al., ACL 2016, algorithm 1 (BPE).

    >>> from transformers import BertConfig, BertModel, BertTokenizer
    >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b", "ab", "ba", "##ab"]
    >>> sizes = dict(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    >>> tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    >>> small = trim(BertModel(BertConfig(vocab_size=12, **sizes)), tokenizer, keep=10, texts=["ab ab aba"])
    >>> small.tokenizer.tokenize("ab ba aba"), small.model.config.vocab_size
    (['ab', 'b', '##a', 'ab', '##a'], 10)
    """
    if not is_whole(keep, 1):
        raise KflatsError(f"{keep!r} is not a number of entries to keep", hint="a whole number, at least 1")
    tokenizer = required(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    state = _state_of(tokenizer)
    counted, shown = _held(texts), _held(eval_texts)
    tables = _find_tables(model)
    vocabulary = read(state)
    entries = sum(token is not None for token in vocabulary.tokens)
    if len(vocabulary.tokens) > tables.rows:
        raise KflatsError(
            f"the tokenizer has ids up to {len(vocabulary.tokens) - 1}, but the table has {tables.rows} rows",
            hint="the tokenizer of the model's own folder",
        )
    if keep > entries:
        raise KflatsError(f"{keep:,} entries are more than the {entries:,} of the vocabulary", hint="fewer entries")
    counts = torch.zeros(tables.rows, dtype=torch.int64)
    if counted is not None:
        with _as_it_was(tokenizer):
            counts = count_tokens(counted, tokenizer, tables.rows)
    named = tables.required | mentioned(state) | frozenset(int(i) for i in tokenizer.all_special_ids)
    stays = frozenset(i for i in named if i < len(vocabulary.tokens) and vocabulary.tokens[i] is not None)
    stays |= vocabulary.fixed
    chosen = choose(vocabulary, stays, _order(vocabulary, counts, tokenizer), keep)
    smaller_state, old = reduced(state, chosen)
    # Rows of no token that a config names (a padding id beyond the vocabulary) come last, as they did.
    kept = (*old, *sorted(i for i in named - stays if i < tables.rows))
    small = _cut(model, tables, kept)
    new = {i: row for row, i in enumerate(kept)}
    after = _find_tables(small)
    smaller = _loaded(tokenizer, smaller_state, new, [*(counted or ())[:_TRIED], *_removed(vocabulary, new)])
    _use_(small, smaller)
    evaluated = counted if shown is None else shown
    with _as_it_was(tokenizer), _as_it_was(smaller):
        segmentation = None if evaluated is None else resegmented(tokenizer, smaller, evaluated, new)
    report = TrimReport(
        entries=(tables.rows, len(kept)),
        required=len(stays),
        table_bytes=(tables.nbytes, after.nbytes),
        model_bytes=(stored_bytes(model), stored_bytes(small)),
        segmentation=segmentation,
        counted=shown is None,
    )
    return Trimmed(small, smaller, torch.tensor(kept), report)


def trim_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: int,
    texts: Iterable[str] | None = None,
    eval_texts: Iterable[str] | None = None,
    force: bool = False,
) -> TrimReport:
    """``trim`` from a model folder (or hub name) into a new one, which loads like any other, without kflats.

    Pooling, prompts and whatever else is neither weight nor vocabulary are copied; other forms of the vocabulary
    (``vocab.txt``, a SentencePiece model) are left out, since they would still be the old one. The model card says what
    was done and keeps the original's, and ``kflats_trimming.json`` records the report and the old ids. ``out`` appears
    whole or not at all.

    Args:
        source: a local folder or a hub name. out: the folder to be.
        keep, texts, eval_texts: as ``trim``.
        force: replace an existing folder that kflats wrote and nobody changed since.

    Raises:
        KflatsError: as ``trim``; ``out`` exists, overlaps the original or is written by another run, a full
            disk, a folder without a model.
    """
    folder = resolve_model(source)
    if static_folder(folder) is not None:
        raise KflatsError(
            "trim is not supported with a static model", hint="kflats compress, or the library that made the model"
        )
    with new_folder(out, force, [folder]) as aside:
        loaded = load_model(folder)
        _find_tables(loaded)  # a model without token tables is refused as such, not for want of a tokenizer
        tokenizer = load_tokenizer(folder)
        trimmed = trim(loaded, tokenizer, keep=keep, texts=texts, eval_texts=eval_texts)
        inner = aside / weights_folder(folder).relative_to(folder)
        save_model(trimmed.model, inner)
        write_vocabulary(trimmed, folder, aside)
        files = (weight_file_bytes(folder), weight_file_bytes(aside))
        rewrite_(aside, lambda original: trimmed_card(trimmed.report, files, hub_name(source), original))
    return trimmed.report


def write_vocabulary(trimmed: Trimmed, source: Path, aside: Path) -> None:
    """Tokenizer, record and companions of a trimmed model in ``aside``, where its weights are already."""
    inner = aside / weights_folder(source).relative_to(source)
    trimmed.tokenizer.save_pretrained(inner)
    written = set(aside.rglob("*"))
    copy_companions(source, aside)
    for path in {*aside.iterdir(), *inner.iterdir()} - written:
        if path.name in _vocabulary_files(trimmed.tokenizer):
            path.unlink()
    write_json(inner / TRIM_FILE, "kflats-trimming", 1, report=asdict(trimmed.report), kept=trimmed.kept.tolist())


def _held(texts: Iterable[str] | None) -> Sequence[str] | None:
    """Texts are read more than once."""
    if texts is None:
        return None
    check_texts(texts)
    return tuple(texts)


def _order(vocabulary: Vocabulary, counts: Tensor, tokenizer: Tokenizer) -> list[int]:
    """All ids, the commonest first; by the vocabulary's own order where counts are equal."""
    size = len(vocabulary.tokens)
    try:
        with _as_it_was(tokenizer):
            prior = zipf_prior(tokenizer, len(counts)).tolist()
    except KflatsError:  # characters only: no words to rank
        prior = [0.0] * len(counts)
    rows = [row for row in range(size) if vocabulary.tokens[row] is not None]
    by_row = counts.tolist()
    return sorted(rows, key=lambda row: (-by_row[row], -prior[row], row))


def _removed(vocabulary: Vocabulary, new: dict[int, int]) -> list[str]:
    gone = [row for row in sorted(vocabulary.own) if row not in new]
    return [vocabulary.bare(row) for row in gone[:: max(1, len(gone) // _TRIED)]]


def _vocabulary_files(tokenizer: Tokenizer) -> frozenset[str]:
    """Names of files that hold a vocabulary: ``tokenizer.json``, and those that are old beside a new one."""
    return _FORMS | set(tokenizer.vocab_files_names.values())


def _state_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """A fast tokenizer as its ``tokenizer.json``."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise KflatsError(
            f"{type(tokenizer).__name__} cannot be trimmed: it is no fast tokenizer",
            cause="it has no tokenizer.json: it is in Python, or a SentencePiece model that could not be converted",
            hint="transformers.AutoTokenizer with the package 'tokenizers' (and 'sentencepiece' to convert)",
        )
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


def _loaded(tokenizer: Tokenizer, state: dict[str, Any], new: dict[int, int], tried: Sequence[str]) -> Any:
    """A tokenizer of the same class from the trimmed ``state``, loaded as users will load it, and tested on ``tried``.

    Raises:
        KflatsError: the class loads another vocabulary, or segments ``tried`` otherwise.
    """
    from tokenizers import Tokenizer

    expected = Tokenizer.from_str(json.dumps(state))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            if path.name in _vocabulary_files(tokenizer):
                path.unlink()
        (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        _renumber_settings(folder / "tokenizer_config.json", new)
        smaller = type(tokenizer).from_pretrained(folder, local_files_only=True)
    smaller.name_or_path = tokenizer.name_or_path
    for name in ("name_or_path", "local_files_only", "is_local"):  # of where it was loaded from, not of what it is
        if name in tokenizer.init_kwargs:
            smaller.init_kwargs[name] = tokenizer.init_kwargs[name]
        else:
            smaller.init_kwargs.pop(name, None)
    expected.no_truncation()
    expected.no_padding()
    same = smaller.get_vocab() == expected.get_vocab(with_added_tokens=True)
    if same and tried:
        ids = [encoding.ids for encoding in expected.encode_batch(list(tried))]
        with _as_it_was(smaller):
            same = smaller(list(tried), verbose=False)["input_ids"] == ids
    if not same:
        raise KflatsError(
            f"{type(tokenizer).__name__} does not load the smaller vocabulary unchanged",
            hint="a folder whose tokenizer_config.json names PreTrainedTokenizerFast",
        )
    return smaller


def _use_(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Make ``tokenizer`` that of a SentenceTransformer; other models hold no tokenizer."""
    if not is_sentence_transformer(model):
        return
    first: Any = next(model.children())
    processor = getattr(first, "processor", None)
    if processor is None:  # older sentence-transformers
        first.tokenizer = tokenizer
    elif hasattr(processor, "backend_tokenizer"):
        first.processor = tokenizer
    else:
        processor.tokenizer = tokenizer


@contextmanager
def _as_it_was(tokenizer: Tokenizer) -> Iterator[None]:
    """Restore the truncation and padding of the backend at the end: every call of the tokenizer changes them."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
        backend.no_padding() if padding is None else backend.enable_padding(**padding)


def _renumber_settings(path: Path, new: dict[int, int]) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(added := settings.get("added_tokens_decoder"), dict):
        settings["added_tokens_decoder"] = {str(new[int(i)]): token for i, token in added.items() if int(i) in new}
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Tables:
    """The tensors of a model that have a row for each entry of its vocabulary.

    Args:
        rows: the number of entries.
        tables: parameters (rows, d). biases: parameters and buffers (rows,) or (1, rows).
        required: ids that the model or its configs mention.
    """

    rows: int
    tables: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    required: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors; shared ones count once."""
        return sum(t.numel() * t.element_size() for t in (*self.tables, *self.biases))


def _find_tables(model: nn.Module) -> _Tables:
    """The token tables of ``model`` and of the transformers models inside it.

    Raises:
        KflatsError: no token table, several vocabularies, factored tables, or tensors of the vocabulary's size that
            are neither tables nor biases of heads.
    """
    parts = [part for _, part in pretrained_models(model)]
    if any(True for _ in factored_layers(model)):
        raise KflatsError("a compressed model cannot be trimmed", hint="trim the original first, then compress")
    own: dict[int, Tensor] = {}
    for part in parts:
        source, head = vocabulary_end(part, "get_input_embeddings"), vocabulary_end(part, "get_output_embeddings")
        for end, kind in ((source, nn.Embedding), (head, nn.Linear)):
            if isinstance(end, kind):
                own[id(end.weight)] = end.weight
    if not any(isinstance(vocabulary_end(part, "get_input_embeddings"), nn.Embedding) for part in parts):
        raise KflatsError(f"{type(model).__name__} has no token embeddings", hint="a text model of transformers")
    sizes = {table.shape[0] for table in own.values()}
    if len(sizes) > 1:
        raise KflatsError(
            f"the model has token tables of {', '.join(map(str, sorted(sizes)))} rows",
            cause="several vocabularies, or a head that predicts something else than tokens",
        )
    rows = sizes.pop()
    tables = tuple(own.values())
    biases = {id(tensor): tensor for tensor in _biases(model, rows, {id(table) for table in tables})}
    left = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if rows in tensor.shape and id(tensor) not in own and id(tensor) not in biases
    ]
    if left:
        raise KflatsError(
            f"{left[0]!r} has a side of {rows} as the vocabulary, and is no token table and no bias of one",
            cause="a table of another use whose rows are tokens",
            hint="another model; please report this architecture",
        )
    return _Tables(rows, tables, tuple(biases.values()), frozenset(_required(model, tables, rows)))


def _cut(model: nn.Module, found: _Tables, kept: Sequence[int]) -> nn.Module:
    """A copy of ``model`` whose vocabulary is the ``kept`` ids, numbered 0, 1, ...; the model itself stays.

    All other parameters are copied, and shared parameters stay shared. Then both models read the same kept tokens, and
    their outputs are compared.

    Raises:
        KflatsError: the outputs differ, because the model keeps token ids in a place that is not known here.
    """
    index = torch.tensor(kept, dtype=torch.int64)
    new = {old: row for row, old in enumerate(kept)}
    memo: dict[int, Any] = {}
    for tensor in found.tables:
        memo[id(tensor)] = _like(tensor, tensor.detach().index_select(0, index.to(tensor.device)))
    for tensor in found.biases:
        memo[id(tensor)] = _like(tensor, tensor.detach().index_select(tensor.ndim - 1, index.to(tensor.device)))
    # deepcopy takes the new tensors from the memo: ties hold, and no old table is copied.
    smaller = copy.deepcopy(model, memo)
    tables = {id(memo[id(tensor)]) for tensor in found.tables}
    for module in smaller.modules():
        _resize_(module, tables, found.rows, len(kept), new)
    for config in _configs(smaller):
        _renumber_(config, found.rows, len(kept), new)
    _check_same(model, smaller, kept)
    return smaller


def _biases(model: nn.Module, rows: int, tables: set[int]) -> Iterator[Tensor]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            long = tensor is not None and tensor.ndim in (1, 2) and tensor.numel() == rows == tensor.shape[-1]
            if tensor is not None and long and "bias" in name and (weight is None or id(weight) in tables):
                yield tensor


def _required(model: nn.Module, tables: Sequence[Tensor], rows: int) -> Iterator[int]:
    """Ids that padding, configs and positions need."""
    own = {id(table) for table in tables}
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if not isinstance(padding, int) or isinstance(padding, bool) or not 0 <= padding < rows:
            continue
        if any(id(p) in own for p in module._parameters.values()):
            yield padding
        elif "position" in name.lower() or "position" in type(module).__name__.lower():
            # RoBERTa and others number positions from the padding id on: it must not move.
            yield from range(padding + 1)
    for config in _configs(model):
        for name, value in vars(config).items():
            if _holds_ids(name):
                yield from (i for i in _flat(value) if 0 <= i < rows)


def _resize_(module: nn.Module, tables: set[int], rows: int, size: int, new: dict[int, int]) -> None:
    """Set the sizes and the padding id of ``module`` to those of its new tables."""
    weight = module._parameters.get("weight")
    held = module.__dict__
    if id(weight) in tables:
        held.update({name: size for name in ("num_embeddings", "out_features") if held.get(name) == rows})
    if held.get("vocab_size") == rows:
        held["vocab_size"] = size
    if isinstance(held.get("padding_idx"), int) and (weight is None or id(weight) in tables):
        held["padding_idx"] = new.get(held["padding_idx"], held["padding_idx"])


def _configs(model: nn.Module) -> Iterable[Any]:
    """The configs of all transformers models in ``model``, and the configs inside them, each once."""
    parts = [part for _, part in pretrained_models(model)]
    waiting = [part.config for part in parts] + [getattr(part, "generation_config", None) for part in parts]
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return configs.values()


def _holds_ids(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids", "_token_index")) or name in _LISTS


def _flat(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _flat(inner)


def _renumber_(config: Any, rows: int, size: int, new: dict[int, int]) -> None:
    def renumbered(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return new.get(value, value)  # an id outside the table stays, such as -1
        return [renumbered(inner) for inner in value] if isinstance(value, list | tuple) else value

    if getattr(config, "vocab_size", None) == rows:
        config.vocab_size = size
    for name, value in list(vars(config).items()):
        if _holds_ids(name) and value is not None:
            setattr(config, name, renumbered(value))


def _like(tensor: Tensor, rows: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return rows
    parameter = nn.Parameter(rows, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _check_same(original: nn.Module, smaller: nn.Module, kept: Sequence[int]) -> None:
    """Raise if the models give different states or logits for the same kept tokens, evenly spaced ones."""
    rows = sorted({int(i) for i in torch.linspace(0, len(kept) - 1, min(_CHECKED, len(kept))).tolist()})
    name, part = next(pair for pair in pretrained_models(original) if vocabulary_end(pair[1], "get_input_embeddings"))
    before, logits = _outputs(part, [kept[row] for row in rows])
    after, new_logits = _outputs(smaller.get_submodule(name), rows)
    if logits is not None and new_logits is not None:
        before = torch.cat([before, logits[..., torch.tensor(kept)]], dim=-1)
        after = torch.cat([after, new_logits], dim=-1)
    check_finite(before)
    tolerance = 1e-3 if next(part.parameters()).dtype in (torch.float32, torch.float64) else 0.05
    if not float((before - after).abs().max()) <= tolerance * max(float(before.abs().max()), 1e-6):
        raise KflatsError(
            f"{type(part).__name__} gives other outputs after its vocabulary was cut",
            hint="the original model, which is unchanged; please report this architecture",
        )


def _outputs(model: Any, ids: list[int]) -> tuple[Tensor, Tensor | None]:
    """Last hidden states, and the head's logits of them."""
    inputs = {"input_ids": torch.tensor([ids], device=next(model.parameters()).device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with explained(model, _OTHER_MODEL), evaluating(model), torch.inference_mode():
        hidden = last_hidden_state(model, inputs)
        head = vocabulary_end(model, "get_output_embeddings")
        fits = isinstance(head, nn.Linear) and head.in_features == hidden.shape[-1]
        logits = head(hidden).float().cpu() if head is not None and fits else None
    return hidden.float().cpu(), logits
