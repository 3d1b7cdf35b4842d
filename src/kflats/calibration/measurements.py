"""What a pass over a calibration set found, kept: in memory, in one safetensors file, and back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, table, visible
from kflats.common.hashing import sha256
from kflats.importance.measured import Measured
from kflats.io.atomic_files import replaced
from kflats.io.write_errors import explain

FIELDS: dict[str, str] = {
    "counts": "n",
    "row_fisher": "n",
    "column_fisher": "d",
    "input_gram": "nn",
    "input_mean": "n",
    "output_gram": "dd",
    "fisher_gram": "nn",
    "fisher_mean": "n",
}
"""What can be measured, by its shape; an embedding's input and Fisher Grams are diagonals, (n,)."""
_VERSION = 1
_ASYMMETRY = 1e-5  # of the largest entry: what rounding may do


@dataclass(frozen=True)
class Statistics:
    """What was measured of some weights of one model, on one calibration set.

    Args:
        measured: by weight name.
        samples: how many samples the set had.
        objective: whose loss: its type and fields (``objectives.describe``); {} where no gradients were needed.
        fingerprint: of the model: the names and shapes of its parameters.
        unreached: weights that no sample reached, or that no loss depends on: what was measured of them is zero.

    Printing gives a table.
    """

    measured: Mapping[str, Measured]
    samples: int
    objective: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    unreached: tuple[str, ...] = ()

    def of(self, weight: str) -> Measured:
        """What was measured of one weight; raises KflatsError where there is none of that name."""
        if weight in self.measured:
            return self.measured[weight]
        near = get_close_matches(weight, self.measured, n=3, cutoff=0.4) or list(self.measured)[:3]
        raise KflatsError(
            f"nothing was measured of {weight!r}",
            cause="statistics of another model, or of other weights",
            hint=f"measure it too; there are {', '.join(near)}",
        )

    def check(self, model: nn.Module) -> None:
        """Raises KflatsError unless ``model`` has the parameters of the one that was measured."""
        if self.fingerprint and self.fingerprint != fingerprint(model):
            raise KflatsError(
                f"the statistics are of another model than this {type(model).__name__}",
                cause="other parameters, by name or shape; or a model that is compressed already",
                hint="measure again",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, replaced in one step; ``load`` reads it back.

        Raises:
            KflatsError: a folder that cannot be written, a full disk; an earlier file is untouched then.
        """
        weights: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for i, (name, one) in enumerate(self.measured.items()):
            kept = {key: value for key in FIELDS if (value := getattr(one, key)) is not None}
            # Copies: safetensors refuses two names for one tensor.
            tensors |= {f"{i}.{key}": value.detach().cpu().clone().contiguous() for key, value in kept.items()}
            numbers = {key: getattr(one, key) for key in ("rows", "columns", "samples", "positions", "head")}
            weights.append({"name": name, "fields": sorted(kept), **numbers})
        note = {
            "version": _VERSION,
            "weights": weights,
            "samples": self.samples,
            "objective": dict(self.objective),
            "fingerprint": self.fingerprint,
            "unreached": list(self.unreached),
        }
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as aside:
                save_file(tensors, aside, metadata={"kflats_statistics": json.dumps(note)})
        except (OSError, SafetensorError) as error:
            explain(error, path)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """What ``save`` wrote, every name, shape and number checked.

        Raises:
            KflatsError: no such file, a damaged one, or one of another kind.
        """
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("kflats_statistics")
                if text is None:
                    raise KflatsError(f"{path} holds no statistics", cause="a file of another kind")
                return _decoded(json.loads(text), file)
        except FileNotFoundError as error:
            raise KflatsError(
                f"there is no {path}", hint="a file that kflats wrote with --statistics or Statistics.save"
            ) from error
        except OSError as error:
            raise KflatsError(
                f"{path} cannot be read: {error.strerror or error}", hint="a file that Statistics.save wrote"
            ) from error
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, KflatsError):
                raise
            raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or hand-edited file") from error

    def __str__(self) -> str:
        rows = []
        for name, one in self.measured.items():
            found = ", ".join(key.replace("_", " ") for key in FIELDS if getattr(one, key) is not None)
            state = "never reached: zero" if name in self.unreached else f"{one.positions:,}"
            rows.append([visible(name), f"{one.rows} x {one.columns}", found, state])
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
                cause="sums in floating point depend on their order",
                hint="merge blocks by increasing index, each once",
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


def shape_of(key: str, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of one measured field for a weight (n, d)."""
    return tuple({"n": rows, "d": columns}[letter] for letter in FIELDS[key])


def _decoded(note: Any, file: Any) -> Statistics:
    if not isinstance(note, dict) or note.get("version") != _VERSION:
        raise ValueError(f"statistics of version {note.get('version') if isinstance(note, dict) else note!r}")
    measured = {}
    for i, about in enumerate(note["weights"]):
        name, rows, columns = str(about["name"]), _count(about["rows"]), _count(about["columns"])
        tensors = {}
        for key in about["fields"]:
            if key not in FIELDS:
                raise ValueError(f"{name} has an unknown field {key!r}")
            shape = tuple(file.get_slice(f"{i}.{key}").get_shape())
            if shape != shape_of(key, rows, columns) and not (
                key in ("input_gram", "fisher_gram") and shape == (rows,)
            ):
                raise ValueError(f"{key} of {name} has shape {shape}")
            tensors[key] = _sound(file.get_tensor(f"{i}.{key}"), key, name)
        measured[name] = Measured(
            rows,
            head=about["head"] is True,
            samples=_count(about["samples"]),
            positions=_count(about["positions"]),
            columns=columns,
            **tensors,
        )
    unreached = tuple(note["unreached"])
    if not set(unreached) <= set(measured) or not isinstance(note["objective"], dict):
        raise ValueError("its description does not fit its tensors")
    return Statistics(measured, _count(note["samples"]), note["objective"], str(note["fingerprint"]), unreached)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no count")
    return value


def _sound(values: Tensor, key: str, name: str) -> Tensor:
    """Finite, of the type that is measured, and what sums of squares can be: Grams symmetric, no diagonal negative."""
    if values.is_floating_point() == (key == "counts"):
        raise ValueError(f"{key} of {name} is of type {str(values.dtype).removeprefix('torch.')}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{key} of {name} holds NaN or infinity")
    squares = values.diagonal() if key.endswith("_gram") and values.ndim == 2 else values
    if not key.endswith("_mean") and bool((squares < 0).any()):
        raise ValueError(f"{key} of {name} holds sums of squares below zero")
    if squares is not values and not torch.equal(values, values.T):
        scale = float(values.abs().max())
        if float((values - values.T).abs().max()) > _ASYMMETRY * scale:
            raise ValueError(f"{key} of {name} is not symmetric")
    return values
