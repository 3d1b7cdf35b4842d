"""The report of a trimmed vocabulary: its sizes, and how many tokens of a text changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.texts import batched_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Resegmented:
    """Texts under two tokenizers, special tokens not counted.

    Args:
        texts: how many.
        texts_changed: how many are segmented differently in any place.
        tokens_before, tokens_after: how many tokens they are. A text costs time by its tokens.
        tokens_changed: tokens of the original's segmentation that the new one does not have in that place.
        unknown_before, unknown_after: unknown tokens among them.
    """

    texts: int
    texts_changed: int
    tokens_before: int
    tokens_after: int
    tokens_changed: int
    unknown_before: int
    unknown_after: int


@dataclass(frozen=True)
class TrimReport:
    """The report of a trimmed vocabulary: sizes in entries and bytes, and how many tokens of the texts changed.

    ``table_bytes`` are those of token tables, heads and their biases, shared ones counted once; ``model_bytes`` all
    that the model stores. Each pair is (before, after). ``required`` entries stay for any counts.
    ``segmentation`` is None without texts; ``counted`` says whether it is measured on the counted texts, of which fewer
    tokens change than of others.
    """

    entries: tuple[int, int]
    required: int
    table_bytes: tuple[int, int]
    model_bytes: tuple[int, int]
    segmentation: Resegmented | None = None
    counted: bool = True

    @property
    def saved(self) -> int:
        """Bytes that the model stores no longer."""
        return self.model_bytes[0] - self.model_bytes[1]

    def __str__(self) -> str:
        before, after = self.entries
        rows = [["vocabulary entries", f"{before:,}", f"{after:,}", share(after, before)]]
        for name, (old, new) in (("token tables, heads", self.table_bytes), ("whole model", self.model_bytes)):
            rows.append([name, size(old), size(new), share(new, old)])
        segmented = self.segmentation
        if segmented is not None:
            tokens = segmented.tokens_before, segmented.tokens_after
            rows.append(["tokens of the texts", f"{tokens[0]:,}", f"{tokens[1]:,}", share(tokens[1], tokens[0])])
            rows.append(["unknown tokens", f"{segmented.unknown_before:,}", f"{segmented.unknown_after:,}", ""])
        lines = [plain(table(["", "before", "after", "ratio"], rows)), ""]
        lines.append(f"{self.required:,} entries stay in any case: special and added tokens, single characters, bytes")
        if segmented is not None:
            lines.append(
                f"segmented anew: {share(segmented.tokens_changed, segmented.tokens_before)} of the tokens, in "
                f"{share(segmented.texts_changed, segmented.texts)} of {segmented.texts:,} texts"
                + (" (those that were counted; other texts change more)" if self.counted else "")
            )
        return "\n".join(lines)


def resegmented(
    before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase, texts: Iterable[str], kept: Mapping[int, int]
) -> Resegmented:
    """Compare two fast tokenizers on ``texts``.

    Args:
        before, after: the tokenizers. texts: streamed.
        kept: the new id of every old id that stays.

    Raises:
        KflatsError: no texts, or a value that is not a text.
    """
    totals: Counter[str] = Counter()
    for batch in batched_texts(texts):
        for (old, places), (new, goals) in zip(_read(before, batch), _read(after, batch), strict=True):
            moved = [kept.get(i, -1) for i in old]
            same = len(old) if moved == new else _same(moved, places, new, goals)
            totals["texts"] += 1
            totals["texts_changed"] += moved != new
            totals["tokens_before"] += len(old)
            totals["tokens_after"] += len(new)
            totals["tokens_changed"] += len(old) - same
            totals["unknown_before"] += old.count(before.unk_token_id) if before.unk_token_id is not None else 0
            totals["unknown_after"] += new.count(after.unk_token_id) if after.unk_token_id is not None else 0
    if not totals["texts"]:
        raise KflatsError("the report of trimming needs texts", cause="an empty file or list")
    return Resegmented(**{name: totals[name] for name in Resegmented.__dataclass_fields__})


def _same(old: list[int], places: list[Any], new: list[int], goals: list[Any]) -> int:
    """Number of tokens that both segmentations have at the same offsets."""
    first = Counter(zip(old, map(tuple, places), strict=True))
    return (first & Counter(zip(new, map(tuple, goals), strict=True))).total()


def _read(tokenizer: PreTrainedTokenizerBase, batch: list[str]) -> Iterator[tuple[list[int], list[Any]]]:
    encoded = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
