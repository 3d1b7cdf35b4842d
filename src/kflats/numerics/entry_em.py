"""k-flats EM for the Manhattan distance and other entrywise powers (MESSI, sections 2.1 and E.1, "distance functions").

    minimise over flats S_c = span V_c, labels c(i) and coordinates u_i:

        sum_i  w_i sum_j | a_i - u_i V_c(i) |_j^p ,          0 < p <= 2.

MESSI writes ||x - x'||_1 for a row x and "its projection" x'. The orthogonal projection is not the nearest point of
a flat in this norm, and nothing that is stored asks for it: here the coordinates are minimised as well.

M-step: entrywise low rank of every cluster, some iterations from where it stands (``entrywise_admm`` for p = 1,
``entrywise_irls`` else; p = 2 is the SVD). E-step: the flat whose *orthogonal projection* is nearest in the entrywise
sum is a row's candidate, since solving k small problems a row would cost a hundred such products. The row moves only
if it is really better off there: at coordinates refitted for it (p = 1) or the projection's. Neither step raises the
sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.entry_state import EntryState, entry_sums, projected, projected_sums
from kflats.numerics.entrywise import SINGLE, SMALL, entrywise_low_rank
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Progress
from kflats.numerics.loss import Power
from kflats.numerics.rows import (
    BLOCK,
    Rows,
    TensorRows,
    as_rows,
    check_finite,
    check_spread,
    check_weights,
    row_factors,
)

_SPREAD = 1e6  # as in ``entrywise``


@dataclass(frozen=True)
class EntryPower:
    """sum_j |a - u V|_j^p, 0 < p <= 2: single entries may be wrong; 1 is the Manhattan distance.

    Raises:
        KflatsError: another p.

    >>> EntryPower(1.0).name
    'entries 1'
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 < self.p <= 2:
            raise KflatsError(f"entries to the power p={self.p!r} cannot be minimised here", hint="0 < p <= 2")

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"entries {self.p:g}"


@dataclass(frozen=True)
class EntryFlats:
    """``labels`` (n,), ``coordinates`` (n, j) of every row in its flat's orthonormal basis of ``bases`` (j, d);
    ``objective``: the sum at the start and after every iteration, falling. ``converged``: False if a limit ended it."""

    labels: Tensor
    coordinates: Tensor
    bases: tuple[Tensor, ...]
    objective: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """The sum reached."""
        return self.objective[-1]


def entry_flats(
    matrix: Tensor | Rows,
    k: int,
    rank: int,
    error: EntryPower | None = None,
    *,
    weights: Tensor | None = None,
    start: str = "auto",
    restarts: int = 1,
    tolerance: float = 1e-3,
    max_iterations: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> EntryFlats:
    """Flats S_1..S_k of dimension ``rank`` that minimise the entrywise sum above.

    Args:
        matrix: (n, d), a tensor or any ``Rows``; held in memory, with residuals of the same size.
        error: the power p, by default the Manhattan distance.
        weights: (n,) w_i >= 0; rows of weight 0 go to the flat whose projection is nearest and judge nothing.
        start, restarts: of the fit to sums of distances (``Power(1)``) that this one begins from.
        tolerance: stop when an iteration lowers the sum by less than this share of it.

    Choose it where single entries are wrong and the table has several flats. It takes longer than distances do, whose
    fit it begins from, and only equal ranks are offered. Limit: candidates are judged by projections, so a row whose
    projection misleads stays where it is.

    Raises:
        KflatsError: whatever ``fit_flats`` refuses, another error than powers of entries, no iterations.

    >>> a = torch.cat([torch.ones(50, 8), torch.eye(8)[:1].repeat(50, 1)])
    >>> a[0, 3] = 10.0    # one wrong entry
    >>> round(entry_flats(a, 2, 1).error, 1)
    9.0
    """
    error = error or EntryPower()
    if not isinstance(error, EntryPower):
        raise KflatsError(f"{error!r} is no power of entries", hint="EntryPower(1), or fit_flats(error=...)")
    if not 0 <= tolerance < 1 or max_iterations < 1:
        raise KflatsError("tolerance lies in [0, 1), max_iterations starts at 1")
    rows, p = as_rows(matrix), float(error.p)
    n = rows.shape[0]
    if not 1 <= k <= n:
        raise KflatsError(f"{k} flats do not fit {n} rows", hint=f"choose k in 1..{n}")
    check_finite(rows)
    check_weights(weights, n)
    table = torch.cat([block for _, block in rows.blocks(BLOCK)])
    check_spread(table.to(torch.float64).square().sum(1), weights, _SPREAD)
    # w sum |r|^p = sum |w^(1/p) r|^p: rows are scaled, flats stay where they are.
    mass = torch.ones(n, dtype=torch.float64) if weights is None else row_factors(weights.cpu(), 1 / p)
    counted = (mass > 0).nonzero().squeeze(1).to(table.device)
    alive = mass[counted.cpu()]
    inner = table.to(_type_for(table[counted], alive))
    back = alive.to(inner)
    scaled = inner[counted] * back.unsqueeze(1)
    unit = float(scaled.abs().mean(dtype=torch.float64)) or 1.0
    inside = TensorRows(scaled / unit)
    plain, factors = (inside, None) if weights is None else (TensorRows(table[counted]), back)
    sources = _sources(plain, k, rank, p, factors)
    search = _Search(min(k, len(scaled)), rank, p, start, restarts, seed)
    state = min((_begun(inside, source, search, factors) for source in sources), key=_reached)
    history, converged = [state.total], False
    for iteration in range(max_iterations):
        state.fit_(tolerance)
        state.move_()
        if progress:
            progress("em", iteration, state.total)
        fell = history[-1] - state.total
        if fell > 0:
            history.append(state.total)
        if fell <= tolerance * history[-1]:
            converged = True
            break
    labels = torch.empty(n, dtype=torch.int64, device=table.device)
    coordinates = torch.empty(n, rank, dtype=table.dtype, device=table.device)
    labels[counted], coordinates[counted] = state.labels, (state.coordinates * (unit / back).unsqueeze(1)).to(table)
    bases = tuple(basis.to(table) for basis in state.bases)
    idle = (mass <= 0).nonzero().squeeze(1).to(table.device)
    if len(idle):
        labels[idle] = projected_sums(TensorRows(table[idle]), bases, p).argmin(1)
        coordinates[idle] = projected(table[idle], labels[idle], bases)
    scale = unit**p * (1.0 if weights is None else float(weights.max()))
    objective = tuple(scale * value for value in history)
    if inner.dtype != table.dtype:  # a small p makes much of what the narrower type rounds
        reached = float(
            (
                entry_sums(table, labels, coordinates, bases, p)
                * (1.0 if weights is None else weights.to(table.device))
            ).sum()
        )
        objective = (*(value for value in objective if value > reached), reached)
    kept = labels.to(torch.uint8 if k <= 256 else torch.int16)
    return EntryFlats(kept, coordinates, bases, objective, converged)


def _type_for(table: Tensor, factors: Tensor) -> torch.dtype:
    """What scaled rows are worked on in: the table's type, but float64 where they spread too far for float32."""
    lengths = torch.linalg.vector_norm(table.to(torch.float64), dim=1) * factors.to(table.device)
    spread = float(lengths.max() / lengths.median().clamp_min(torch.finfo(torch.float64).tiny))
    wide = spread > SINGLE or float(factors.min()) < SMALL
    return torch.float64 if wide else table.dtype


def _sources(rows: TensorRows, k: int, rank: int, p: float, factors: Tensor | None) -> list[TensorRows]:
    """What flats are first looked for in: the rows, and the rows cleaned by one low rank that holds all k flats."""
    n, d = rows.shape
    together = k * rank
    if k == 1 or p == 2 or 2 * together > min(n, d):
        return [rows]
    low = min(p, 0.5)
    found = entrywise_low_rank(rows, together, p=low, weights=None if factors is None else factors.pow(low))
    return [rows, TensorRows(found.coordinates @ found.basis)]


@dataclass(frozen=True)
class _Search:
    """``k`` flats of dimension ``rank`` under entries to the power ``p``; ``start``, ``restarts`` and ``seed`` are of
    the fit to sums of distances that comes first."""

    k: int
    rank: int
    p: float
    start: str
    restarts: int
    seed: int


def _begun(rows: TensorRows, source: TensorRows, search: _Search, factors: Tensor | None) -> EntryState:
    """Flats under sums of distances of the ``source``: not scaled, its rows weigh what the others are scaled by."""
    first = fit_flats(
        source,
        search.k,
        rank=search.rank,
        error=Power(1.0),
        weights=factors,
        start=search.start,
        restarts=search.restarts,
        seed=search.seed,
    )
    bases = tuple(basis.to(rows.dtype) for basis in first.bases)
    return EntryState(rows, first.labels.to(torch.int64), bases, search.p, factors)


def _reached(state: EntryState) -> float:
    return state.total
