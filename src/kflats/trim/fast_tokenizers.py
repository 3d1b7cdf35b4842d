"""Fast tokenizers: read as their ``tokenizer.json``, and loaded from a changed one as users will load it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from kflats.common.errors import KflatsError
from kflats.model.weights import is_sentence_transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMS = frozenset(
    ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")
    + ("sentencepiece.model", "tokenizer.model", "tekken.json", "bpe.codes", "dict.txt", "unigram.json")
)


def vocabulary_files(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of files that hold a vocabulary: ``tokenizer.json``, and those that are old beside a new one."""
    return _FORMS | set(tokenizer.vocab_files_names.values())


def state_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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


def loaded(tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], new: dict[int, int], tried: Sequence[str]) -> Any:
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
            if path.name in vocabulary_files(tokenizer):
                path.unlink()
        (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        _renumber_settings(folder / "tokenizer_config.json", new)
        made = type(tokenizer).from_pretrained(folder, local_files_only=True)
    made.name_or_path = tokenizer.name_or_path
    for name in ("name_or_path", "local_files_only", "is_local"):  # of where it was loaded from, not of what it is
        if name in tokenizer.init_kwargs:
            made.init_kwargs[name] = tokenizer.init_kwargs[name]
        else:
            made.init_kwargs.pop(name, None)
    expected.no_truncation()
    expected.no_padding()
    same = made.get_vocab() == expected.get_vocab(with_added_tokens=True)
    if same and tried:
        ids = [encoding.ids for encoding in expected.encode_batch(list(tried))]
        with as_it_was(made):
            same = made(list(tried), verbose=False)["input_ids"] == ids
    if not same:
        raise KflatsError(
            f"{type(tokenizer).__name__} does not load the smaller vocabulary unchanged",
            cause="the class numbers or normalises its entries in its own way",
            hint="trim PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer) in its place, with the "
            "names of the special tokens",
            command="a folder whose tokenizer_config.json names PreTrainedTokenizerFast",
        )
    return made


def use_(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
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
def as_it_was(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
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
