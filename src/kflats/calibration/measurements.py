"""The statistics of a calibration set, in memory and in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, table, visible
from kflats.common.hashing import sha256
from kflats.common.schema import Json, check_version
from kflats.importance.protocol import Measured
from kflats.io.atomic import replaced
from kflats.io.mapped import mapped_tensors, read_header

FIELDS = ("counts", "row_fisher", "column_fisher", "input_gram", "input_mean", "output_gram", "fisher_gram")
"""The statistics that can be measured (``Measured`` says what they are)."""
_VERSION = 2


@dataclass(frozen=True)
class Statistics:
    """The statistics of some weights of one model, measured on one calibration set.

    Args:
        measured: the statistics by weight name.
        samples: number of samples of the set.
        objective: type and fields of the objective (``objectives.describe``); {} if no gradients were needed.
        fingerprint: a digest of the names and shapes of the model's parameters.
        unreached: weights that no sample reached, or on which no loss depends; their statistics are zero.

    Printing gives a table.
    """

    measured: Mapping[str, Measured]
    samples: int
    objective: Mapping[str, Json] = field(default_factory=dict)
    fingerprint: str = ""
    unreached: tuple[str, ...] = ()

    def of(self, weight: str) -> Measured:
        """The statistics of one weight; raises KflatsError if no weight has that name."""
        if weight in self.measured:
            return self.measured[weight]
        near = get_close_matches(weight, self.measured, n=3, cutoff=0.4) or list(self.measured)[:3]
        raise KflatsError(f"nothing was measured of {weight!r}", hint=f"measure it too; there are {', '.join(near)}")

    def check(self, model: nn.Module) -> None:
        """Raises KflatsError unless ``model`` has the parameters of the measured model."""
        if self.fingerprint and self.fingerprint != fingerprint(model):
            raise KflatsError(
                f"the statistics are of another model than this {type(model).__name__}",
                cause="other parameters, by name or shape; or a model that is compressed already",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, replaced in one step; ``load`` reads it back.

        Raises:
            KflatsError: a folder that cannot be written, a full disk; an earlier file is untouched then.
        """
        weights: list[Json] = []
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for i, (name, one) in enumerate(self.measured.items()):
            kept = {key: value for key in FIELDS if (value := getattr(one, key)) is not None}
            for key, value in kept.items():
                stored = value.detach().cpu().contiguous()
                # safetensors refuses two names for one piece of memory.
                place = stored.untyped_storage().data_ptr()
                tensors[f"{i}.{key}"] = stored.clone() if place in seen and stored.numel() else stored
                seen.add(place)
            numbers = {key: getattr(one, key) for key in ("rows", "columns", "samples", "positions", "head")}
            weights.append({"name": name, **numbers})
        note = json.dumps(
            {
                "version": _VERSION,
                "weights": weights,
                "samples": self.samples,
                "objective": dict(self.objective),
                "fingerprint": self.fingerprint,
                "unreached": list(self.unreached),
            }
        )
        with replaced(path) as aside:
            save_file(tensors, aside, metadata={"kflats_statistics": note, "sha256": _digest(note, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mapped: bool = False) -> Statistics:
        """The statistics in a file that ``save`` wrote.

        Args:
            mapped: their tensors stay on disk and are read-only: writing into them ends the process.

        Raises:
            KflatsError: no such file, a file of another kind or version, or one that was changed.
        """
        try:
            with Path(path).open("rb") as file:
                metadata, _ = read_header(file, Path(path))
            tensors = mapped_tensors(path)
        except (OSError, KflatsError) as error:
            raise KflatsError(
                f"the statistics {path} cannot be read: {error}",
                hint="a file that Statistics.save or --statistics wrote",
            ) from error
        if (text := metadata.get("kflats_statistics")) is None:
            raise KflatsError(f"{path} holds no statistics", cause="a file of another kind")
        if metadata.get("sha256") != _digest(text, tensors):
            raise KflatsError(
                f"the statistics {path} cannot be read: they do not have their checksum", hint="measure again"
            )
        note = json.loads(text)
        check_version(note["version"], _VERSION, "statistics")
        measured = {}
        for i, numbers in enumerate(note["weights"]):
            found: dict[str, Any] = {key: tensors[f"{i}.{key}"] for key in FIELDS if f"{i}.{key}" in tensors}
            if not mapped:
                found = {key: tensor.clone() for key, tensor in found.items()}
            name = numbers.pop("name")
            measured[name] = Measured(**numbers, **found)
        return cls(measured, note["samples"], note["objective"], note["fingerprint"], tuple(note["unreached"]))

    def __str__(self) -> str:
        rows = []
        for name, one in self.measured.items():
            fields = ", ".join(key.replace("_", " ") for key in FIELDS if getattr(one, key) is not None)
            state = "never reached: zero" if name in self.unreached else f"{one.positions:,}"
            rows.append([visible(name), f"{one.rows} x {one.columns}", fields, state])
        about = f"{self.samples:,} samples" + (f", {self.objective['type']}" if self.objective else "")
        return plain(table(["weight", "shape", "measured", "positions"], rows, left=3)) + "\n\n" + about


@dataclass
class Sums:
    """Sums over samples for one weight, float64, before they are divided into means. Two of them add entry by entry."""

    tensors: dict[str, Tensor]
    counts: dict[str, int]

    def add_(self, other: Sums) -> None:
        """Add ``other`` in place."""
        for key, value in other.tensors.items():
            self.tensors[key] += value
        for name, count in other.counts.items():
            self.counts[name] += count


def merge(blocks: Iterable[tuple[int, dict[str, Sums]]]) -> dict[str, Sums]:
    """The sums of all blocks by weight name: a left fold in the order of the blocks, ((b0 + b1) + b2) + ...

    Each block holds a fixed number of samples and is summed alone, and the order of the fold is fixed. So the bits of
    the result do not depend on which process sums which block, if all processes have the same kind of processor and
    the same number of threads. The fold reads one block at a time: memory holds the total and one block.

    Args:
        blocks: (index, sums by weight name), by increasing index. The first is used up.

    Raises:
        KflatsError: no blocks, or blocks out of order.

    >>> import torch
    >>> blocks = [(i, {"words": Sums({"reads": torch.tensor([1.0, i])}, {"samples": 1})}) for i in range(3)]
    >>> merge(blocks)["words"]
    Sums(tensors={'reads': tensor([3., 3.])}, counts={'samples': 3})
    """
    total: dict[str, Sums] = {}
    last = -1
    for index, sums in blocks:
        if index <= last:
            raise KflatsError(
                f"block {index} of the statistics comes after block {last}",
                hint="merge blocks by increasing index, each once",
            )
        if last >= 0 and total.keys() != sums.keys():
            raise KflatsError(
                f"block {index} of the statistics has other weights than those before", hint="blocks of equal weights"
            )
        last = index
        for name in sums:
            if name in total:
                total[name].add_(sums[name])
            else:
                total[name] = sums[name]
        del sums  # before the next block is summed
    if not total:
        raise KflatsError("there are no blocks of statistics to merge", cause="an empty share of a calibration set")
    return total


def fingerprint(model: nn.Module) -> str:
    """A digest of the names and shapes of all parameters.

    >>> fingerprint(nn.Linear(2, 3)) == fingerprint(nn.Linear(2, 3)), fingerprint(nn.Linear(2, 3))[:4]
    (True, '...')
    """
    shapes = sorted((name, list(p.shape)) for name, p in model.named_parameters(remove_duplicate=False))
    return sha256([json.dumps(shapes)])


def _digest(note: str, tensors: Mapping[str, Tensor]) -> str:
    return sha256([note, *(part for name in sorted(tensors) for part in (name, tensors[name]))])
