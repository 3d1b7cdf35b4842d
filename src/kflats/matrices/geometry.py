"""The sizes of a FlatsMatrix without its numbers: bands, and the limits of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kflats.common.errors import KflatsError

MAX_BANDS = 65536  # labels are at most uint16
MAX_SIDE = 2**31 - 1  # places of rows are int32
MAX_VALUES = 2**46  # of the dense matrix: far beyond any model, and its bytes still fit 64 bits


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
    found: list[Tensor | None] = []
    for band in bands:
        whole = None if band.flat is None else flats[band.flat]
        found.append(whole if whole is None or whole.shape[0] == band.rank else whole[: band.rank])
    return found


def check_shape(n: int, d: int) -> None:
    """Refuse an (n, d) that no matrix of a model has, before any memory is allocated."""
    if n < 1 or d < 1 or n > MAX_SIDE or d > MAX_SIDE or n * d > MAX_VALUES:
        raise KflatsError(f"impossible matrix shape {(n, d)}", cause="a damaged or hand-edited file")


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
