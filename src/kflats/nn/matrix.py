"""Matrix: the one noun. Every method makes one, every layer eats one.

A ``Matrix`` stands for a dense (n, d) matrix M that is never formed. Row i is what enters a
layer: a token of an embedding table, an input neuron of a linear layer.

The first factor is always called ``weight``: under that name a torch state dict carries a
layer's matrix, so a checkpoint of factors collides with the dense shape (a loud size mismatch)
wherever kflats is not imported, instead of leaving random weights in place.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.errors import KflatsError


class Matrix(nn.Module):
    """A factored (n, d) matrix: see the module's text. ``shape`` is ``(n, d)``."""

    kind: str
    shape: tuple[int, int]
    weight: nn.Parameter

    @abstractmethod
    def rows(self, index: Tensor) -> Tensor:
        """``(*b,)`` integers -> ``(*b, d)``: the rows of M at ``index``."""

    @abstractmethod
    def vecmat(self, x: Tensor) -> Tensor:
        """``(*b, n)`` -> ``(*b, d)``: x @ M, what a linear layer computes."""

    @abstractmethod
    def matvec(self, x: Tensor) -> Tensor:
        """``(*b, d)`` -> ``(*b, n)``: x @ M.T, what a tied output head computes."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The whole (n, d) matrix, for tests, export and error reports."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """JSON-able geometry: with it ``matrix_from_spec`` builds an empty matrix of the same shapes."""

    def tensors(self) -> dict[str, Tensor]:
        """What a file stores, by name: factors, and labels where there are any."""
        found: dict[str, Tensor] = {"weight": self.weight}
        for name in ("basis", "labels"):
            if isinstance(value := getattr(self, name, None), Tensor):
                found[name] = value
        return found

    @property
    def num_values(self) -> int:
        """Stored floating-point numbers (labels not counted)."""
        return sum(t.numel() for t in self.tensors().values() if t.is_floating_point())

    @property
    def nbytes(self) -> int:
        """Stored bytes, labels included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def refresh(self) -> None:
        """Recompute what is derived from stored tensors (call after loading into them)."""


class LowRankMatrix(Matrix):
    """M = weight @ basis with weight (n, r), basis (r, d): one flat, all that an SVD gives.

    Stores r (n + d) numbers.

    >>> m = LowRankMatrix(torch.ones(4, 1), torch.tensor([[1.0, 2.0]]))
    >>> m.rows(torch.tensor([3])).tolist()
    [[1.0, 2.0]]
    """

    kind = "low_rank"

    def __init__(self, weight: Tensor, basis: Tensor) -> None:
        super().__init__()
        if weight.ndim != 2 or basis.ndim != 2 or weight.shape[1] != basis.shape[0]:
            raise KflatsError(
                f"factors of shapes {tuple(weight.shape)} and {tuple(basis.shape)} cannot be multiplied",
                cause="the first must be (n, r), the second (r, d)",
            )
        self.shape = (weight.shape[0], basis.shape[1])
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)

    def rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight) @ self.basis

    def vecmat(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.basis

    def matvec(self, x: Tensor) -> Tensor:
        return (x @ self.basis.T) @ self.weight.T

    def dense(self) -> Tensor:
        return self.weight @ self.basis

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "shape": list(self.shape), "rank": self.basis.shape[0]}


@dataclass(frozen=True)
class Band:
    """``rows`` rows that keep the first ``rank`` coordinates of flat ``flat``.

    ``flat=None`` is the band of rows kept exactly: rank d, no basis. Uniform k-flats are k bands of
    one rank; nested ranks are several bands on one flat.
    """

    rows: int
    rank: int
    flat: int | None


class FlatsMatrix(Matrix):
    """Rows near k flats: row i is ``coordinates_i @ basis[flat of i][:rank of i]`` (MESSI, section 2).

    Args:
        weight: coordinates, compact, in *band order* (rows of band 0, then band 1, ...; inside a band
            by row number): (n, j) when all bands have rank j, else one-dimensional. Never the paper's
            n x kj matrix of zeros, so "zeros stay zero" in fine-tuning holds by construction.
        basis: (sum of flat ranks, d), the flats' bases one below the other.
        labels: (n,) unsigned integers, the band of each row.
        bands: what each label means.
        flat_ranks: rows of ``basis`` that belong to each flat.

    Stores sum(rows * rank) + sum(flat ranks) * d numbers and one label a row. Band order makes the
    tied head slices plus one permutation; ``position`` (row -> place in band order) is derived.

    >>> m = FlatsMatrix(torch.tensor([[2.0], [3.0]]), torch.eye(2), torch.tensor([1, 0], dtype=torch.uint8),
    ...                 (Band(1, 1, 0), Band(1, 1, 1)), (1, 1))
    >>> m.dense().tolist()      # row 0 lies on the second axis, row 1 on the first
    [[0.0, 3.0], [2.0, 0.0]]
    """

    kind = "flats"

    def __init__(
        self, weight: Tensor, basis: Tensor, labels: Tensor, bands: tuple[Band, ...], flat_ranks: tuple[int, ...]
    ) -> None:
        super().__init__()
        n, d = labels.shape[0], basis.shape[1]
        check_geometry(n, d, bands, flat_ranks)
        self.uniform = len({band.rank for band in bands}) == 1
        size = sum(band.rows * band.rank for band in bands)
        expected = (n, bands[0].rank) if self.uniform else (size,)
        if tuple(weight.shape) != expected or basis.shape[0] != sum(flat_ranks):
            raise KflatsError(
                f"coordinates {tuple(weight.shape)} and basis {tuple(basis.shape)} do not fit the bands",
                cause=f"expected {expected} and {(sum(flat_ranks), d)}",
            )
        self.shape, self.bands, self.flat_ranks = (n, d), tuple(bands), tuple(flat_ranks)
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)
        self.labels: Tensor
        self.position: Tensor
        self.register_buffer("labels", labels)
        self.register_buffer("position", torch.empty(n, dtype=torch.int32, device=labels.device), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())
        self.refresh()

    def refresh(self) -> None:
        """Recompute ``position`` from ``labels``; refuse labels that contradict the bands."""
        if self.labels.is_meta:
            return
        labels = self.labels.to(torch.int64)
        counts = torch.bincount(labels, minlength=len(self.bands)).tolist()
        if counts != [band.rows for band in self.bands]:
            raise KflatsError(
                f"row labels do not match the bands (found {counts[:8]}, expected {[b.rows for b in self.bands][:8]})",
                cause="a damaged or mixed-up file",
                hint="restore the file or compress again",
            )
        position = torch.empty_like(labels)
        position[torch.argsort(labels, stable=True)] = torch.arange(len(labels), device=labels.device)
        self.position = position.to(torch.int32)

    def _slices(self) -> list[tuple[int, int, Band]]:
        """(first, end, band) of each band in band order."""
        found, start = [], 0
        for band in self.bands:
            found.append((start, start + band.rows, band))
            start += band.rows
        return found

    def _tables(self) -> list[Tensor]:
        """Coordinates of each band, (rows, rank): views of ``weight``."""
        if self.uniform:
            return list(self.weight.split([band.rows for band in self.bands]))
        parts = self.weight.split([band.rows * band.rank for band in self.bands])
        return [part.view(band.rows, band.rank) for part, band in zip(parts, self.bands, strict=True)]

    def _bases(self) -> list[Tensor | None]:
        """Basis of each band, (rank, d): a prefix of its flat's; None for exact rows."""
        flats = self.basis.split(list(self.flat_ranks))
        return [None if band.flat is None else flats[band.flat][: band.rank] for band in self.bands]

    def rows(self, index: Tensor) -> Tensor:
        place = F.embedding(index.reshape(-1), self.position.unsqueeze(1)).squeeze(1)
        found, out = [], []
        for (start, end, _), table, basis in zip(self._slices(), self._tables(), self._bases(), strict=True):
            here = ((place >= start) & (place < end)).nonzero().squeeze(1)
            coordinates = F.embedding(place[here] - start, table)
            found.append(here)
            out.append(coordinates if basis is None else coordinates @ basis)
        where = torch.empty_like(place, dtype=torch.int64)
        order = torch.cat(found)
        where[order] = torch.arange(order.shape[0], device=order.device)
        return F.embedding(where, torch.cat(out)).reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        ordered = torch.zeros_like(x).index_copy(-1, self.position.to(torch.int64), x)
        total = x.new_zeros(*x.shape[:-1], self.shape[1])
        for (start, end, _), table, basis in zip(self._slices(), self._tables(), self._bases(), strict=True):
            part = ordered[..., start:end] @ table
            total = total + (part if basis is None else part @ basis)
        return total

    def matvec(self, x: Tensor) -> Tensor:
        bases = self._bases()
        parts = [
            (x if basis is None else x @ basis.T) @ table.T for table, basis in zip(self._tables(), bases, strict=True)
        ]
        return torch.cat(parts, dim=-1).index_select(-1, self.position)

    def dense(self) -> Tensor:
        parts = [t if b is None else t @ b for t, b in zip(self._tables(), self._bases(), strict=True)]
        return torch.cat(parts).index_select(0, self.position)

    def spec(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "bands": [[band.rows, band.rank, band.flat] for band in self.bands],
            "flat_ranks": list(self.flat_ranks),
        }


def label_dtype(bands: int) -> torch.dtype:
    """The smallest unsigned type that holds ``bands`` labels."""
    if bands <= 256:
        return torch.uint8
    if bands <= 65536:
        return torch.uint16
    raise KflatsError(f"{bands} bands are more than 65536", hint="use fewer flats")


def check_geometry(n: int, d: int, bands: tuple[Band, ...], flat_ranks: tuple[int, ...]) -> None:
    """Refuse bands that cannot describe an (n, d) matrix, before any memory is allocated."""
    problem = ""
    if not bands or n < 1 or d < 1:
        problem = "no bands or an empty shape"
    elif sum(band.rows for band in bands) != n or any(band.rows < 0 for band in bands):
        problem = f"bands hold {sum(band.rows for band in bands)} rows of {n}"
    elif any(not 0 <= rank <= d for rank in flat_ranks):
        problem = f"a flat rank outside 0..{d}"
    else:
        for band in bands:
            if band.flat is None and band.rank != d:
                problem = f"exact rows must have rank {d}, not {band.rank}"
            elif band.flat is not None and not (
                0 <= band.flat < len(flat_ranks) and 0 <= band.rank <= flat_ranks[band.flat]
            ):
                problem = f"band {band} names no stored basis"
    if problem:
        raise KflatsError(f"impossible flats: {problem}", cause="a damaged or hand-edited file")


def matrix_from_spec(spec: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str = "meta") -> Matrix:
    """An empty Matrix of the geometry that ``Matrix.spec`` wrote; every number is checked first."""
    try:
        kind = spec["kind"]
        n, d = (_count(v) for v in spec["shape"])
        if kind == LowRankMatrix.kind:
            rank = _count(spec["rank"])
            if not 0 <= rank <= min(n, d):
                raise KflatsError(f"rank {rank} does not fit shape {(n, d)}", cause="a damaged or hand-edited file")
            return LowRankMatrix(
                torch.empty(n, rank, dtype=dtype, device=device), torch.empty(rank, d, dtype=dtype, device=device)
            )
        if kind == FlatsMatrix.kind:
            flat_ranks = tuple(_count(r) for r in spec["flat_ranks"])
            bands = tuple(Band(_count(r), _count(k), None if f is None else _count(f)) for r, k, f in spec["bands"])
        else:
            raise KflatsError(f"unknown kind of matrix {kind!r}", cause="a file of a newer kflats", hint="upgrade kflats")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, KflatsError):
            raise
        raise KflatsError(f"unreadable matrix description: {error!r}", cause="a damaged or hand-edited file") from error
    check_geometry(n, d, bands, flat_ranks)
    uniform = len({band.rank for band in bands}) == 1
    size = (n, bands[0].rank) if uniform else (sum(band.rows * band.rank for band in bands),)
    empty = FlatsMatrix(
        torch.empty(size, dtype=dtype, device="meta"),
        torch.empty(sum(flat_ranks), d, dtype=dtype, device="meta"),
        torch.empty(n, dtype=label_dtype(len(bands)), device="meta"),
        bands,
        flat_ranks,
    )
    return empty if str(device) == "meta" else empty.to_empty(device=device)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise KflatsError(f"expected a whole number >= 0, found {value!r}", cause="a damaged or hand-edited file")
    return value
