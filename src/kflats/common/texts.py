"""Text files: one sentence a line, UTF-8. What importance counts and what a comparison judges on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib.resources import files
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
    """Sentences that come with kflats: ``"count"`` (encyclopedic, to count) or ``"judge"`` (everyday, to judge on).

    >>> len(set(packaged_texts("judge")) & set(packaged_texts("count")))
    0
    """
    if name not in ("count", "judge"):
        raise KflatsError(f"kflats brings no texts called {name!r}", hint="count or judge")
    return _sentences((files("kflats") / "data" / f"{name}.txt").read_bytes(), f"{name}.txt")


def check_texts(texts: object) -> None:
    """Raises KflatsError for what is no collection of texts: one string, a path, or nothing that has items."""
    if isinstance(texts, str | bytes):
        raise KflatsError("texts must be a sequence of strings, not one string", hint="[text]")
    if isinstance(texts, os.PathLike):
        path = os.fspath(texts)
        raise KflatsError(
            f"texts are expected, not the path {path!r}", hint="kflats.common.texts.read_texts(path): its lines"
        )
    if not isinstance(texts, Iterable):
        raise KflatsError(f"texts are expected, not {type(texts).__name__}", hint="a list of strings")


def check_known(counts: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether a tokenizer knows what it read: ``counts`` (ids,) says how often it gave each id.

    Warns where over half of the words and pieces are the unknown token's.

    Raises:
        KflatsError: all of them are.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Byte-level tokenizers know everything, and call their end mark the unknown token.
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    others = {getattr(tokenizer, name, None) for name in names}
    if not isinstance(unknown, int) or unknown >= len(counts) or unknown in others:
        return
    special = [i for i in {unknown, *getattr(tokenizer, "all_special_ids", ())} if 0 <= i < len(counts)]
    lost, known = int(counts[unknown]), int(counts.sum() - counts[special].sum())
    if lost and not known:
        raise KflatsError(
            "the texts hold no word that the tokenizer knows",
            cause="another language or script, or the tokenizer of another model",
            hint="texts of the kind that the model was trained on",
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
    found = tuple(stripped for line in text.split("\n") if (stripped := line.strip()))
    if not found:
        raise KflatsError(f"{where} has no text", cause="an empty file", hint="give one sentence a line")
    return found
