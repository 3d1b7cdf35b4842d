"""Text files: UTF-8, one sentence a line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kflats.common.errors import KflatsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The lines of a UTF-8 text file that are not blank, without surrounding white space.

    Raises:
        KflatsError: the file is missing, empty, binary, or in another encoding.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KflatsError(
            f"the texts file {path} cannot be read: {error.strerror}", hint="give a UTF-8 file, one sentence a line"
        ) from error
    return _sentences(data, str(path))


def packaged_texts(name: str) -> tuple[str, ...]:
    """Sentences of the package: ``"count"`` (encyclopedic, to count tokens) or ``"judge"`` (everyday, to compare on).

    >>> len(set(packaged_texts("judge")) & set(packaged_texts("count")))
    0
    """
    if name not in ("count", "judge"):
        raise KflatsError(f"kflats has no texts called {name!r}", hint="count or judge")
    return _sentences((files("kflats") / "data" / f"{name}.txt").read_bytes(), f"{name}.txt")


def check_texts(texts: object) -> None:
    """Raise KflatsError unless ``texts`` is a collection: for one string, a path, or a value without items."""
    if isinstance(texts, str | bytes):
        raise KflatsError(
            "texts must be a sequence of strings, not one string", hint="[text]", command="a file of texts"
        )
    if isinstance(texts, os.PathLike):
        path = os.fspath(texts)
        raise KflatsError(
            f"texts must be strings, not the path {path!r}",
            hint="kflats.common.texts.read_texts(path), which gives its lines",
            command="a file of texts",
        )
    if not isinstance(texts, Iterable):
        raise KflatsError(f"texts must be a sequence of strings, not {type(texts).__name__}", hint="a list of strings")


def batched_texts(texts: Iterable[str], count: int = 512) -> Iterator[list[str]]:
    """``texts`` in lists of ``count``; a generator is read no further than needed.

    Raises:
        KflatsError: ``texts`` is no collection, or holds a value that is not a string.

    >>> list(batched_texts(iter("abc"), 2))
    [['a', 'b'], ['c']]
    """
    check_texts(texts)
    stream = iter(texts)
    while batch := list(islice(stream, count)):
        if wrong := [text for text in batch if not isinstance(text, str)]:
            raise KflatsError(f"a text must be a string, not {type(wrong[0]).__name__}", hint="a list of strings")
        yield batch


def check_known(counts: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer knows the texts: ``counts`` (ids,) says how often each id occurred.

    Warns if more than half of the tokens are the unknown token.

    Raises:
        KflatsError: all of them are the unknown token.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Byte-level tokenizers know every text, and name their end token as the unknown token.
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    others = {getattr(tokenizer, name, None) for name in names}
    if not isinstance(unknown, int) or unknown >= len(counts) or unknown in others:
        return
    special = [i for i in {unknown, *getattr(tokenizer, "all_special_ids", ())} if 0 <= i < len(counts)]
    lost, known = int(counts[unknown]), int(counts.sum() - counts[special].sum())
    if lost and not known:
        raise KflatsError(
            "the tokenizer knows no word of the texts",
            cause="another language or script, or the tokenizer of another model",
            hint="texts in the language of the model's training",
        )
    if lost > known:
        warnings.warn(
            f"{lost:,} of {lost + known:,} words of the texts are unknown to the tokenizer: another language, "
            "or the tokenizer of another model?",
            stacklevel=3,
        )


def _sentences(data: bytes, where: str) -> tuple[str, ...]:
    if b"\0" in data:
        raise KflatsError(
            f"{where} is not a text file: it has zero bytes",
            cause="a binary file (Parquet, a checkpoint), or UTF-16",
            hint="give a UTF-8 file, one sentence a line",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KflatsError(
            f"{where} is not UTF-8 (byte {error.start})",
            cause="another encoding, or a binary file",
            hint="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
    sentences = tuple(stripped for line in text.split("\n") if (stripped := line.strip()))
    if not sentences:
        raise KflatsError(f"{where} has no text", cause="an empty file", hint="give one sentence a line")
    return sentences
