"""FlatsMatrix: rows near several flats; each row is stored as its few coordinates in one flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import (
    Matrix,
    check_rows,
    check_shape,
    copy_trainable,
    distinct,
    inverse_of,
    is_recording,
    refresh_after_load,
    with_rows,
)

MAX_BANDS = 65536  # labels are at most uint16


@dataclass(frozen=True)
class RankGroup:
    """``rows`` rows that keep the first ``rank`` coordinates of flat ``flat``.

    ``flat=None`` is the band of rows kept exactly: rank d, no basis. Uniform k-flats are k bands of
    one rank; nested ranks are several bands on one flat.
    """

    rows: int
    rank: int
    flat: int | None


def label_dtype(bands: int) -> torch.dtype:
    """The smallest unsigned type that holds ``bands`` labels.

    Raises:
        KflatsError: more than 65536 bands.

    >>> label_dtype(256), label_dtype(257)
    (torch.uint8, torch.uint16)
    """
    if bands <= 256:
        return torch.uint8
    if bands <= MAX_BANDS:
        return torch.uint16
    raise KflatsError(f"{bands} bands are more than {MAX_BANDS}", hint="fewer flats")


def order_dtype(columns: int) -> torch.dtype:
    """The smallest signed type that numbers ``columns`` columns (torch indexes by signed integers only).

    >>> order_dtype(32768), order_dtype(32769)
    (torch.int16, torch.int32)
    """
    return torch.int16 if columns <= 2**15 else torch.int32


def weight_shape(bands: Sequence[RankGroup]) -> tuple[int, ...]:
    """Shape of the compact coordinates: (n, j) when every band has rank j, else one-dimensional.

    >>> weight_shape([RankGroup(2, 3, 0), RankGroup(5, 3, 1)]), weight_shape([RankGroup(2, 3, 0), RankGroup(5, 1, 0)])
    ((7, 3), (11,))
    """
    if len({band.rank for band in bands}) == 1:
        return sum(band.rows for band in bands), bands[0].rank
    return (sum(band.rows * band.rank for band in bands),)


def starts_of(bands: Sequence[RankGroup]) -> list[int]:
    """The first place of each band in band order, and the number of places.

    >>> starts_of([RankGroup(2, 3, 0), RankGroup(5, 1, 0)])
    [0, 2, 7]
    """
    return [0, *accumulate(band.rows for band in bands)]


def tables_of(weight: Tensor, bands: Sequence[RankGroup]) -> list[Tensor]:
    """Coordinates of each band, (rows, rank): views of ``weight``, which has ``weight_shape(bands)``."""
    if weight.ndim == 2:
        return list(torch.split(weight, [band.rows for band in bands]))
    parts = torch.split(weight, [band.rows * band.rank for band in bands])
    return [part.view(band.rows, band.rank) for part, band in zip(parts, bands, strict=True)]


def bases_of(basis: Tensor, bands: Sequence[RankGroup], flat_ranks: Sequence[int]) -> list[Tensor | None]:
    """Basis of each band, (rank, d): a prefix of its flat's, a view of ``basis``; None for exact rows."""
    flats = torch.split(basis, list(flat_ranks)) if flat_ranks else ()
    bases: list[Tensor | None] = []
    for band in bands:
        whole = None if band.flat is None else flats[band.flat]
        bases.append(whole if whole is None or whole.shape[0] == band.rank else whole[: band.rank])
    return bases


def check_geometry(n: int, d: int, bands: Sequence[RankGroup], flat_ranks: Sequence[int]) -> None:
    """Refuse bands that cannot describe an (n, d) matrix, before any memory is allocated.

    Raises:
        KflatsError: no bands, too many, rows that do not add up, a rank or flat that does not exist.
    """
    check_shape(n, d)
    problem = ""
    if not bands:
        problem = "no bands"
    elif len(bands) > MAX_BANDS or len(flat_ranks) > MAX_BANDS:
        problem = f"{len(bands)} bands on {len(flat_ranks)} flats, at most {MAX_BANDS} can be labelled"
    elif any(not 0 <= rank <= d for rank in flat_ranks):
        problem = f"a flat rank outside 0..{d}"
    elif any(band.rows < 0 for band in bands) or sum(band.rows for band in bands) != n:
        problem = f"bands hold {sum(band.rows for band in bands)} rows of {n}"
    else:
        problem = next(filter(None, (_band_problem(band, d, flat_ranks) for band in bands)), "")
    if problem:
        raise KflatsError(f"impossible flats: {problem}", cause="a damaged or hand-edited file")


def _band_problem(band: RankGroup, d: int, flat_ranks: Sequence[int]) -> str:
    if band.flat is None:
        return "" if band.rank == d else f"exact rows must have rank {d}, not {band.rank}"
    if not (0 <= band.flat < len(flat_ranks) and 0 <= band.rank <= flat_ranks[band.flat]):
        return f"{band} names no stored basis"
    return ""


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

    Raises:
        KflatsError: tensors that do not fit the bands, or labels that contradict them.

    >>> m = FlatsMatrix(torch.tensor([[2.0], [3.0]]), torch.eye(2), torch.tensor([1, 0], dtype=torch.uint8),
    ...                 (RankGroup(1, 1, 0), RankGroup(1, 1, 1)), (1, 1))
    >>> m.dense().tolist()      # row 0 lies on the second axis, row 1 on the first
    [[0.0, 3.0], [2.0, 0.0]]
    """

    kind = "flats"
    one_operator = True

    def __init__(
        self, weight: Tensor, basis: Tensor, labels: Tensor, bands: Sequence[RankGroup], flat_ranks: Sequence[int]
    ) -> None:
        super().__init__()
        if basis.ndim != 2 or labels.ndim != 1 or labels.is_floating_point():
            raise KflatsError(
                f"a basis {tuple(basis.shape)} and labels {tuple(labels.shape)} of {labels.dtype} make no flats",
                cause="the basis must be (ranks, d), and the labels (n,) whole numbers",
            )
        n, d = labels.shape[0], basis.shape[1]
        check_geometry(n, d, bands, flat_ranks)
        expected = weight_shape(bands)
        if tuple(weight.shape) != expected or basis.shape[0] != sum(flat_ranks):
            raise KflatsError(
                f"coordinates {tuple(weight.shape)} and basis {tuple(basis.shape)} do not fit the bands",
                cause=f"expected {expected} and {(sum(flat_ranks), d)}",
            )
        self.bands, self.flat_ranks = tuple(bands), tuple(flat_ranks)
        self.uniform = len(expected) == 2
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)
        self.ready = False
        self.labels: Tensor
        self.position: Tensor
        self.register_buffer("labels", labels)
        self.register_buffer("position", torch.empty(n, dtype=torch.int32, device=labels.device), persistent=False)
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d): a row for each label."""
        return self.position.shape[0], self.basis.shape[1]

    def refresh(self) -> None:
        """Compute ``position`` from ``labels`` again; refuse labels that contradict the bands."""
        if self.labels.is_meta:
            return
        labels = self.labels.to(torch.int64)
        counts = torch.bincount(labels, minlength=len(self.bands)).tolist() if bool((labels >= 0).all()) else []
        if counts != [band.rows for band in self.bands]:
            raise KflatsError(
                f"row labels do not match the bands ({counts[:8]} rows instead of {[b.rows for b in self.bands][:8]})",
                hint="restore the file, or compress again",
            )
        self.position = inverse_of(torch.argsort(labels, stable=True)).to(torch.int32)
        self.ready = True

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As ``Matrix.rows``. Rows are sorted by rank group, so each basis is multiplied once; a recorded graph
        multiplies all bases."""
        self._check_filled()
        place = self.position.index_select(0, index.reshape(-1))
        look_up = self._recorded_rows if is_recording() else self._sorted_rows
        return look_up(place, dtype or self.weight.dtype).reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        """As ``Matrix.vecmat``: x times the coordinates of each rank group, summed inside each flat, then times all
        bases at once."""
        self._check_filled()
        ordered = x.index_select(-1, inverse_of(self.position))
        parts = torch.split(ordered, [band.rows for band in self.bands], dim=-1)
        inner: list[list[Tensor]] = [[] for _ in self.flat_ranks]
        products: list[Tensor] = []
        for part, band, table in zip(parts, self.bands, tables_of(self.weight, self.bands), strict=True):
            product = part @ table.to(x.dtype)
            if band.flat is None:
                products.append(product)
            else:
                inner[band.flat].append(F.pad(product, (0, self.flat_ranks[band.flat] - band.rank)))
        # Bands that share a flat add up in its coordinates; then one product brings all flats back.
        empty = [x.new_zeros(*x.shape[:-1], rank) for rank in self.flat_ranks]
        flats = [sum(shares[1:], shares[0]) if shares else zero for shares, zero in zip(inner, empty, strict=True)]
        if flats:
            products.append(torch.cat(flats, dim=-1) @ self.basis.to(x.dtype))
        return sum(products[1:], products[0])

    def matvec(self, x: Tensor) -> Tensor:
        """As ``Matrix.matvec``: x times all bases at once, then times the coordinates of each rank group."""
        self._check_filled()
        inner = torch.split(x @ self.basis.T.to(x.dtype), list(self.flat_ranks), dim=-1) if self.flat_ranks else ()
        parts = [
            (x if band.flat is None else inner[band.flat][..., : band.rank]) @ table.T.to(x.dtype)
            for band, table in zip(self.bands, tables_of(self.weight, self.bands), strict=True)
        ]
        return torch.cat(parts, dim=-1).index_select(-1, self.position)

    def dense(self) -> Tensor:
        """As ``Matrix.dense``: the coordinates of each rank group times its basis, in the order of the rows."""
        self._check_filled()
        bases = bases_of(self.basis, self.bands, self.flat_ranks)
        tables = tables_of(self.weight, self.bands)
        parts = [table if basis is None else table @ basis for table, basis in zip(tables, bases, strict=True)]
        return torch.cat(parts).index_select(0, self.position)

    def spec(self) -> JsonObject:
        """Kind, shape, the rank groups as (rows, rank, flat), and the rank of each flat."""
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "bands": [[band.rows, band.rank, band.flat] for band in self.bands],
            "flat_ranks": list(self.flat_ranks),
        }

    def resized(self, n: int) -> FlatsMatrix:
        """As ``Matrix.resized``; new rows join the most populated band, at the mean of its coordinates."""
        check_rows(n)
        self._check_filled()
        labels = self.labels.to(torch.int64)
        largest = max(range(len(self.bands)), key=lambda c: self.bands[c].rows)
        extra = labels.new_full((max(0, n - labels.shape[0]),), largest)
        counts = torch.bincount(torch.cat([labels[:n], extra]), minlength=len(self.bands)).tolist()
        # Inside a band rows stand by row number: dropped rows are its last, and new rows follow its last.
        tables = [
            with_rows(table.detach(), count) if count else table.detach()[:0]
            for table, count in zip(tables_of(self.weight, self.bands), counts, strict=True)
        ]
        resized = FlatsMatrix(
            torch.cat(tables) if self.uniform else torch.cat([table.reshape(-1) for table in tables]),
            self.basis.detach().clone(),
            torch.cat([labels[:n], extra]).to(self.labels.dtype),
            tuple(RankGroup(count, band.rank, band.flat) for count, band in zip(counts, self.bands, strict=True)),
            self.flat_ranks,
        )
        return copy_trainable(self, resized)

    def _sorted_rows(self, place: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) places in band order -> (t, d) rows: one gather and one product for each band that has some of them."""
        values, inverse = distinct(place)
        starts = starts_of(self.bands)
        cuts = torch.searchsorted(values, torch.tensor(starts, device=values.device, dtype=values.dtype)).tolist()
        used = [c for c in range(len(self.bands)) if cuts[c] < cuts[c + 1]] or [0]
        bases = bases_of(self.basis, [self.bands[c] for c in used], self.flat_ranks)
        tables, parts = tables_of(self.weight, self.bands), []
        for c, basis in zip(used, bases, strict=True):
            wide = tables[c].index_select(0, values[cuts[c] : cuts[c + 1]] - starts[c]).to(dtype)
            parts.append(wide if basis is None else wide @ basis.to(dtype))
        if all(basis is None for basis in bases):
            # Only exact rows: the bases still get a gradient, of zeros, as data-parallel training wants.
            parts.append(self.basis[:0].to(dtype))
        return F.embedding(inverse, torch.cat(parts))

    def _recorded_rows(self, place: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) places in band order -> (t, d) rows, in plain operators whose sizes are known.

        Each row is the sum of its rows in all bands: numbers in its own band, zeros in the others.
        """
        starts, bases = starts_of(self.bands)[:-1], bases_of(self.basis, self.bands, self.flat_ranks)
        tables = tables_of(self.weight, self.bands)
        out = self.basis.new_zeros(place.shape[0], self.shape[1], dtype=dtype)
        for band, start, table, basis in zip(self.bands, starts, tables, bases, strict=True):
            if band.rows:
                here = place - start
                own = ((here >= 0) & (here < band.rows)).unsqueeze(1)
                wide = torch.where(own, table.index_select(0, here.clamp(0, band.rows - 1)).to(dtype), 0.0)
                out = out + (wide if basis is None else wide @ basis.to(dtype))
        return out

    def _check_filled(self) -> None:
        self._check_ready()
        # Code that resizes embeddings by writing into ``weight`` would cut rows of the last band.
        if tuple(self.weight.shape) != weight_shape(self.bands):
            raise KflatsError(
                f"the coordinates, now {tuple(self.weight.shape)}, were resized without their labels",
                hint="resize the original model, then compress it",
            )
