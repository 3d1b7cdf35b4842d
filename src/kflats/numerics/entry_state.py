"""The two steps of k-flats EM under powers of entries (``entry_em``), on rows that are scaled already."""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.entrywise_admm import admm
from kflats.numerics.entrywise_irls import irls
from kflats.numerics.factors import Factors
from kflats.numerics.refit import refit_l1
from kflats.numerics.rows import BLOCK, Rows, TensorRows
from kflats.numerics.svd import truncated_svd

INNER = 40
"""Iterations of the low-rank solver in one M-step."""

QUICK = 1.02
"""What divides ADMM's threshold every iteration: in so few, falling as slowly as for a whole fit ends higher."""

_REFIT = 1e-2  # tolerance of the coordinates that a row would have in another flat


def projected_sums(rows: Rows, bases: tuple[Tensor, ...], p: float) -> Tensor:
    """(n, k) float64: sum_j |a - V_c' V_c a|_j^p of every row and flat."""
    found = []
    for _, block in rows.blocks(BLOCK):
        rests = [torch.addmm(block, block @ v.T, v, alpha=-1).abs_() for v in bases]
        found.append(torch.stack([(r if p == 1 else r.pow_(p)).sum(1, dtype=torch.float64) for r in rests], 1))
    return torch.cat(found)


def projected(table: Tensor, labels: Tensor, bases: tuple[Tensor, ...]) -> Tensor:
    """(n, j): rows' projections, in coordinates of the flats that they are labelled with."""
    out = table.new_empty(len(table), len(bases[0]))
    for c, basis in enumerate(bases):
        out[labels == c] = table[labels == c] @ basis.T
    return out


def entry_sums(table: Tensor, labels: Tensor, coordinates: Tensor, bases: tuple[Tensor, ...], p: float) -> Tensor:
    """(n,) float64: sum_j |a - u V_c|_j^p of every row and what is stored of it."""
    out = torch.empty(len(table), dtype=torch.float64, device=table.device)
    for c, basis in enumerate(bases):
        inside = labels == c
        made = coordinates[inside].to(torch.float64) @ basis.to(torch.float64)
        out[inside] = (table[inside].to(torch.float64) - made).abs_().pow_(p).sum(1)
    return out


class EntryState:
    """Labels, coordinates and orthonormal bases on their way, and what every row costs, for entries of size 1; the
    ``factors`` (n,) that rows were scaled by."""

    def __init__(
        self, rows: TensorRows, labels: Tensor, bases: tuple[Tensor, ...], p: float, factors: Tensor | None = None
    ) -> None:
        self.rows, self.table, self.p = rows, rows.matrix, p
        self.roots = None if factors is None else factors.sqrt().unsqueeze(1)
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
        """The sum reached."""
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
                found = self._l1(part, begun, inside, tolerance / 10)
            else:
                found = irls(part, begun, self.p, tolerance / 10, INNER, None)
            if found.error(part, self.p) >= float(self.costs[inside].sum()):
                continue
            q, r = torch.linalg.qr(found.basis.T)
            bases[c], self.coordinates[inside] = q.T.contiguous(), found.coordinates @ r.T
            self.bases = tuple(bases)
            self._judge_(c)

    def _l1(self, part: TensorRows, begun: Factors, inside: Tensor, tolerance: float) -> Factors:
        if self.roots is None:
            return admm(part, begun, 1.0, tolerance, INNER, None, shrink=QUICK)
        root = self.roots[inside]  # the power of weights that ADMM takes its rows in
        part, begun = TensorRows(part.matrix / root), Factors(begun.coordinates / root, begun.basis)
        found = admm(part, begun, 1.0, tolerance, INNER, None, shrink=QUICK, sizes=root)
        return Factors(found.coordinates * root, found.basis)

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
