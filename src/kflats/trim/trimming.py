"""Vocabulary trimming: keep the N commonest tokens, in the tokenizer and in the model.

Removed words are segmented into kept pieces. A text whose tokens are all kept is segmented as before, and the outputs
of the model for it stay the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kflats.calibration.counting import count_tokens, zipf_prior
from kflats.common.errors import KflatsError
from kflats.common.texts import check_texts
from kflats.evaluation.comparing import load_tokenizer, weight_file_bytes
from kflats.io import copy_companions, load_model, new_folder, resolve_model, save_model, weights_folder
from kflats.report.analysis import stored_bytes
from kflats.report.model_card import hub_name, rewrite_, trimmed_card
from kflats.report.trimmed import TrimReport, resegmented
from kflats.trim.cutting import cut, find_tables
from kflats.trim.fast_tokenizers import as_it_was, loaded, state_of, use_, vocabulary_files
from kflats.trim.vocabulary import Vocabulary, choose, mentioned, read, reduced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIM_FILE = "kflats_trimming.json"
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
    tokenizer: PreTrainedTokenizerBase
    kept: Tensor
    report: TrimReport


def trim(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    keep: int,
    texts: Iterable[str] | None = None,
    eval_texts: Iterable[str] | None = None,
    alphabet: str = "all",
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
        alphabet: "all" single characters stay, or those that are "seen" in the texts: other scripts then become the
            unknown token, or bytes.

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
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise KflatsError(f"{keep!r} is not a number of entries to keep", hint="a whole number, at least 1")
    if alphabet not in ("all", "seen"):
        raise KflatsError(f"no alphabet is called {alphabet!r}", hint="all or seen")
    if alphabet == "seen" and texts is None:
        raise KflatsError("alphabet 'seen' is not supported without texts", hint="give texts, or alphabet 'all'")
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise KflatsError(
            "the model cannot be trimmed without its tokenizer",
            hint="tokenizer=..., that of the model's folder",
            command="a folder with a tokenizer.json",
        )
    state = state_of(tokenizer)
    counted, shown = _held(texts), _held(eval_texts)
    found = find_tables(model)
    vocabulary = read(state)
    entries = sum(token is not None for token in vocabulary.tokens)
    if len(vocabulary.tokens) > found.rows:
        raise KflatsError(
            f"the tokenizer has ids up to {len(vocabulary.tokens) - 1}, but the table has {found.rows} rows",
            cause="a tokenizer of another model",
            hint="the tokenizer of the model's own folder",
        )
    if keep > entries:
        raise KflatsError(f"{keep:,} entries are more than the {entries:,} of the vocabulary", hint="fewer entries")
    counts = torch.zeros(found.rows, dtype=torch.int64)
    if counted is not None:
        with as_it_was(tokenizer):
            counts = count_tokens(counted, tokenizer, found.rows)
    named = found.required | mentioned(state) | frozenset(int(i) for i in tokenizer.all_special_ids)
    required = frozenset(i for i in named if i < len(vocabulary.tokens) and vocabulary.tokens[i] is not None)
    required |= _spelling(vocabulary, counts if alphabet == "seen" else None)
    chosen = choose(vocabulary, required, _order(vocabulary, counts, tokenizer), keep)
    made, old = reduced(state, chosen)
    # Rows of no token that a config names (a padding id beyond the vocabulary) come last, as they did.
    kept = (*old, *sorted(i for i in named - required if i < found.rows))
    small = cut(model, found, kept)
    new = {i: row for row, i in enumerate(kept)}
    after = find_tables(small)
    smaller = loaded(tokenizer, made, new, [*(counted or ())[:_TRIED], *_removed(vocabulary, new)])
    use_(small, smaller)
    evaluated = counted if shown is None else shown
    with as_it_was(tokenizer), as_it_was(smaller):
        segmentation = None if evaluated is None else resegmented(tokenizer, smaller, evaluated, new)
    report = TrimReport(
        entries=(found.rows, len(kept)),
        required=len(required),
        table_bytes=(found.nbytes, after.nbytes),
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
    alphabet: str = "all",
    force: bool = False,
) -> TrimReport:
    """``trim`` from a model folder (or hub name) into a new one, which loads like any other, without kflats.

    Pooling, prompts and whatever else is neither weight nor vocabulary are copied; other forms of the vocabulary
    (``vocab.txt``, a SentencePiece model) are left out, since they would still be the old one. The model card says what
    was done and keeps the original's, and ``kflats_trimming.json`` records the report and the old ids. ``out`` appears
    whole or not at all.

    Args:
        source: a local folder or a hub name. out: the folder to be.
        keep, texts, eval_texts, alphabet: as ``trim``.
        force: replace an existing folder that kflats wrote and nobody changed since.

    Raises:
        KflatsError: as ``trim``; ``out`` exists, overlaps the original or is written by another run, a full
            disk, a folder without a model.
    """
    folder = resolve_model(source)
    with new_folder(out, force, [folder]) as aside:
        loaded, tokenizer = load_model(folder), load_tokenizer(folder)
        made = trim(loaded, tokenizer, keep=keep, texts=texts, eval_texts=eval_texts, alphabet=alphabet)
        inner = aside / weights_folder(folder).relative_to(folder)
        save_model(made.model, inner)
        write_vocabulary(made, folder, aside)
        files = (weight_file_bytes(folder), weight_file_bytes(aside))
        rewrite_(aside, lambda original: trimmed_card(made.report, files, hub_name(source), original))
    return made.report


def write_vocabulary(made: Trimmed, source: Path, aside: Path) -> None:
    """Tokenizer, record and companions of a trimmed model in ``aside``, where its weights are already."""
    inner = aside / weights_folder(source).relative_to(source)
    made.tokenizer.save_pretrained(inner)
    written = set(aside.rglob("*"))
    copy_companions(source, aside)
    for path in {*aside.iterdir(), *inner.iterdir()} - written:
        if path.name in vocabulary_files(made.tokenizer):
            path.unlink()
    record = {"format": "kflats-trimming", "version": 1, "report": asdict(made.report), "kept": made.kept.tolist()}
    (inner / TRIM_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")


def _held(texts: Iterable[str] | None) -> Sequence[str] | None:
    """Texts are read more than once."""
    if texts is None:
        return None
    check_texts(texts)
    return tuple(texts)


def _spelling(vocabulary: Vocabulary, counts: Tensor | None) -> frozenset[int]:
    """Ids that spell the removed words: single characters, and entries that single characters do not spell.

    With ``counts`` only the characters of counted tokens; a byte-level alphabet stays complete.
    """
    fixed = set(vocabulary.fixed)
    if counts is None:
        seen = set(vocabulary.characters)
    else:
        seen = {c for row in counts.nonzero().flatten().tolist() for c in vocabulary.bare(row)}
        seen |= _BYTES if set(vocabulary.characters) >= _BYTES else set()
    for character in seen & set(vocabulary.characters):
        fixed.update(vocabulary.characters[character])
    fixed.update(row for row in vocabulary.unspelled() if set(vocabulary.bare(row)) <= seen or counts is None)
    return frozenset(fixed)


def _byte_level() -> set[str]:
    """The 256 characters that stand for bytes in byte-level BPE: printing ones for themselves, others from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {chr(b) for b in shown} | {chr(256 + i) for i in range(256 - len(shown))}


_BYTES = _byte_level()


def _order(vocabulary: Vocabulary, counts: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids, the commonest first; by the vocabulary's own order where counts are equal."""
    size = len(vocabulary.tokens)
    try:
        with as_it_was(tokenizer):
            prior = zipf_prior(tokenizer, len(counts)).tolist()
    except KflatsError:  # characters only: no words to rank
        prior = [0.0] * len(counts)
    rows = [row for row in range(size) if vocabulary.tokens[row] is not None]
    by_row = counts.tolist()
    return sorted(rows, key=lambda row: (-by_row[row], -prior[row], row))


def _removed(vocabulary: Vocabulary, new: dict[int, int]) -> list[str]:
    gone = [row for row in sorted(vocabulary.own) if row not in new]
    return [vocabulary.bare(row) for row in gone[:: max(1, len(gone) // _TRIED)]]
