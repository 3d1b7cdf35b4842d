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
from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.entrywise_admm import admm
from kflats.numerics.entrywise_irls import irls
from kflats.numerics.factors import Factors
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Progress
from kflats.numerics.loss import Power
from kflats.numerics.refit import refit_l1
from kflats.numerics.rows import BLOCK, Rows, TensorRows, as_rows, check_finite, check_spread, check_weights
from kflats.numerics.svd import truncated_svd

INNER = 40
"""Iterations of the low-rank solver in one M-step."""

QUICK = 1.02
"""What divides ADMM's threshold every iteration: in so few, falling as slowly as for a whole fit ends higher."""

_SPREAD = 1e6  # as in ``entrywise``
_REFIT = 1e-2  # tolerance of the coordinates that a row would have in another flat


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

    Choose it where single entries are wrong and the table has several flats. It costs tens of times what distances
    do, mostly in the M-step, and only equal ranks are offered. Limit: candidates are judged by projections, so a row
    whose projection misleads stays where it is.

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
    mass = torch.ones(n, dtype=torch.float64) if weights is None else weights.to(torch.float64) / weights.max()
    counted = (mass > 0).nonzero().squeeze(1).to(table.device)
    back = mass[counted].pow(1 / p).to(table)
    scaled = table[counted] * back.unsqueeze(1)
    unit = float(scaled.abs().mean(dtype=torch.float64)) or 1.0
    inside = TensorRows(scaled / unit)
    state = min(
        (_begun(inside, source, k, rank, p, start, restarts, seed) for source in _sources(inside, k, rank, p)),
        key=_reached,
    )
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
    labels[counted], coordinates[counted] = state.labels, state.coordinates * (unit / back).unsqueeze(1)
    idle = (mass <= 0).nonzero().squeeze(1).to(table.device)
    if len(idle):
        labels[idle] = projected_sums(TensorRows(table[idle]), state.bases, p).argmin(1)
        coordinates[idle] = _projected(table[idle], labels[idle], state.bases)
    scale = unit**p * (1.0 if weights is None else float(weights.max()))
    kept = labels.to(torch.uint8 if k <= 256 else torch.int16)
    return EntryFlats(kept, coordinates, state.bases, tuple(scale * value for value in history), converged)


def _sources(rows: TensorRows, k: int, rank: int, p: float) -> list[TensorRows]:
    """What flats are first looked for in: the rows, and the rows cleaned by one low rank that holds all k flats."""
    n, d = rows.shape
    together = k * rank
    if k == 1 or p == 2 or 2 * together > min(n, d):
        return [rows]
    found = entrywise_low_rank(rows, together, p=min(p, 0.5))
    return [rows, TensorRows(found.coordinates @ found.basis)]


def _begun(
    rows: TensorRows, source: TensorRows, k: int, rank: int, p: float, start: str, restarts: int, seed: int
) -> _State:
    k = min(k, rows.shape[0])
    first = fit_flats(source, k, rank=rank, error=Power(1.0), start=start, restarts=restarts, seed=seed)
    return _State(rows, first.labels.to(torch.int64), first.bases, p)


def _reached(state: _State) -> float:
    return state.total


def projected_sums(rows: Rows, bases: tuple[Tensor, ...], p: float) -> Tensor:
    """(n, k) float64: sum_j |a - V_c' V_c a|_j^p of every row and flat."""
    found = []
    for _, block in rows.blocks(BLOCK):
        rests = [torch.addmm(block, block @ v.T, v, alpha=-1).abs_() for v in bases]
        found.append(torch.stack([(r if p == 1 else r.pow_(p)).sum(1, dtype=torch.float64) for r in rests], 1))
    return torch.cat(found)


def _projected(table: Tensor, labels: Tensor, bases: tuple[Tensor, ...]) -> Tensor:
    out = table.new_empty(len(table), len(bases[0]))
    for c, basis in enumerate(bases):
        out[labels == c] = table[labels == c] @ basis.T
    return out


class _State:
    """Labels, coordinates and orthonormal bases on their way, and what every row costs, for entries of size 1."""

    def __init__(self, rows: TensorRows, labels: Tensor, bases: tuple[Tensor, ...], p: float) -> None:
        self.rows, self.table, self.p = rows, rows.matrix, p
        self.labels, self.bases = labels, bases
        self.coordinates = self.table.new_empty(len(labels), len(bases[0]))
        self.costs = torch.empty(len(labels), dtype=torch.float64, device=labels.device)
        for c, basis in enumerate(bases):
            inside = labels == c
            if bool(inside.any()):
                self.coordinates[inside] = self._made(self.table[inside], basis)
                self._judge_(c)

    @property
    def total(self) -> float:
        return float(self.costs.sum())

    def fit_(self, tolerance: float) -> None:
        """M-step: every cluster's low rank, from its own factors."""
        bases = list(self.bases)
        for c, basis in enumerate(bases):
            inside = (self.labels == c).nonzero().squeeze(1)
            if not len(inside):
                continue
            part, begun = TensorRows(self.table[inside]), Factors(self.coordinates[inside], basis)
            if len(inside) <= len(basis):  # so few rows lie on a flat of their own
                held = torch.linalg.qr(torch.cat([part.matrix, basis]).T).Q.T[: len(basis)]
                found = Factors(part.matrix @ held.T, held)
            elif self.p == 2:
                svd = truncated_svd(part, len(basis))
                found = Factors(svd.coordinates, svd.basis)
            elif self.p == 1:
                found = admm(part, begun, 1.0, tolerance / 10, INNER, None, shrink=QUICK)
            else:
                found = irls(part, begun, self.p, tolerance / 10, INNER, None)
            if found.error(part, self.p) >= float(self.costs[inside].sum()):
                continue
            q, r = torch.linalg.qr(found.basis.T)
            bases[c], self.coordinates[inside] = q.T.contiguous(), found.coordinates @ r.T
            self.bases = tuple(bases)
            self._judge_(c)

    def move_(self) -> None:
        """E-step: rows go to the flat whose projection is nearest, if that lowers what they cost."""
        sums = projected_sums(self.rows, self.bases, self.p)
        candidates = sums.argmin(1)
        for c, basis in enumerate(self.bases):
            movers = ((candidates == c) & (self.labels != c)).nonzero().squeeze(1)
            if not len(movers):
                continue
            block = self.table[movers]
            made = self._made(block, basis)
            costs = self._costs(block, made, basis)
            better = costs < self.costs[movers]
            going = movers[better]
            self.labels[going], self.coordinates[going], self.costs[going] = c, made[better], costs[better]

    def _made(self, block: Tensor, basis: Tensor) -> Tensor:
        """Coordinates in a flat: least in the sum for p = 1, the projection's else."""
        return refit_l1(block, basis=basis, tolerance=_REFIT).coordinates if self.p == 1 else block @ basis.T

    def _judge_(self, c: int) -> None:
        inside = self.labels == c
        self.costs[inside] = self._costs(self.table[inside], self.coordinates[inside], self.bases[c])

    def _costs(self, block: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
        rest = torch.addmm(block, coordinates, basis, alpha=-1).abs_()
        return (rest if self.p == 1 else rest.pow_(self.p)).sum(1, dtype=torch.float64)
