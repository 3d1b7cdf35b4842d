"""What the experiments on compression without training data share: methods by name, at equal bytes, and errors.

Names of methods: "SVD"; "ellipsoid 1" (the lp-SVD through Lewis weights, p = 1); "entrywise 1" (the sum of |A - UV|^p
minimised directly); "subspace 1" (the sum of distances^q of rows to one
subspace), "subspace huber 2 median" (other losses); "l1-pca flips", "l1-pca fixed point", "l1-pca together"; "robust
pca" (the SVD of its low-rank part); "flats" (kflats' default); "float16 (50% saved)"; "magnitude csr", "random bitmap",
"synflow values" (a mask, and the format that its bytes are counted in). " + zipf" or " + counts" behind a name weighs
the rows.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from baselines.l1_bit_flipping import greedy_bit_flipping
from baselines.l1_fixed_point import fixed_point
from baselines.magnitude import magnitude_mask
from baselines.random_mask import random_mask
from baselines.robust_pca import principal_component_pursuit
from baselines.sparse import FORMATS, entries_that_fit
from baselines.synflow import synflow_masks
from torch import Tensor, nn

from kflats import Flats
from kflats.importance.protocol import Measured, Weighting
from kflats.methods.protocol import Problem
from kflats.model.weights import Weight, dense_weight
from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.loss import Power, from_name
from kflats.numerics.robust_svd import Ellipsoid, Lewis, robust_svd
from kflats.numerics.rows import Rows, TensorRows
from kflats.numerics.subspace import robust_subspace
from kflats.numerics.svd import truncated_svd

RATES = (0.15, 0.28, 0.41)
"""Compression as the paper counts it: the share of the bytes that is saved."""

POWERS = ("1", "1.25", "1.5", "1.75")
FAMILIES = [
    *(f"ellipsoid {p}" for p in POWERS),
    *(f"entrywise {p}" for p in POWERS),
    *(f"subspace {p}" for p in POWERS),
]
"""At p = 2 each of the three is the SVD."""

HALF = "float16 (50% saved)"
"""No approximation at all but of numbers: what every rate up to 50 % has to be compared with."""

L1_PCA = ["l1-pca flips", "l1-pca fixed point", "l1-pca together"]
PRUNED = [f"{choice} {form}" for choice in ("magnitude", "random") for form in FORMATS]
SYNFLOW = [f"synflow {form}" for form in FORMATS]


def rank_at(shape: tuple[int, int], rate: float) -> int:
    """The largest rank whose two factors take at most 1 - ``rate`` of the matrix's bytes."""
    n, d = shape
    return int((1 - rate) * n * d / (n + d) + 1e-9)


@dataclass(frozen=True)
class Approximation:
    """``matrix`` (n, d), what storing it takes, and what there is to remark."""

    matrix: Tensor
    nbytes: int
    note: str = ""


def low_rank(
    name: str, matrix: Tensor, ranks: Sequence[int], weights: Tensor | None = None
) -> Iterator[tuple[Tensor, str]]:
    """The approximation of each rank, dense, and a remark where an iteration did not converge. ``matrix``: n >= d."""
    family, _, rest = name.partition(" ")
    if family == "l1-pca":
        find = {"flips": greedy_bit_flipping, "fixed point": fixed_point}.get(rest)
        nested = None if find is None else find(matrix, max(ranks))
        for rank in ranks:
            found = fixed_point(matrix, rank, together=True) if nested is None else nested
            basis = found.basis[:rank]
            yield matrix @ basis.T @ basis, _remark(found)
        return
    if family == "robust":
        pursuit = principal_component_pursuit(matrix)
        matrix = pursuit.low_rank
    once = _Once()
    for rank in ranks:
        if family in ("SVD", "robust"):
            made = truncated_svd(matrix, rank, left=weights)
            yield made.coordinates @ made.basis, _remark(pursuit) if family == "robust" else ""
        elif family == "ellipsoid":
            lp = robust_svd(matrix, rank, float(rest), ellipsoid=once, weights=weights)
            yield lp.coordinates @ lp.basis, _remark(lp.ellipsoid)
        elif family == "entrywise":
            direct = entrywise_low_rank(matrix, rank, p=float(rest), weights=weights)
            yield direct.coordinates @ direct.basis, _remark(direct)
        elif family == "subspace":
            loss = from_name(rest) if " " in rest else Power(float(rest))
            flat = robust_subspace(matrix, rank, loss, weights=weights)
            yield flat.coordinates @ flat.basis, _remark(flat)
        else:
            raise ValueError(f"no method is called {name!r}")


class _Once:
    """The Lewis ellipsoid of one matrix, which does not depend on the rank."""

    found: Ellipsoid | None = None

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        self.found = self.found or Lewis().fit(matrix, p)
        return self.found


def _remark(found: Any) -> str:
    return "" if getattr(found, "converged", True) else "stopped before it converged"


def is_mask(name: str) -> bool:
    """Whether a name means pruning."""
    return name.split()[0] in ("magnitude", "random", "synflow")


@dataclass(frozen=True)
class Known:
    """What is known besides the matrices: row weights by name; of an embedding, what flows on from each column."""

    row_weights: Mapping[str, Tensor] = field(default_factory=dict)
    column_flow: Tensor | None = None
    inputs: tuple[int, ...] = ()


def approximations(
    name: str, matrix: Tensor, rates: Sequence[float], known: Known, seed: int = 0
) -> Iterator[Approximation]:
    """``matrix`` (n, d), float32, at each rate of compression; wide matrices are taken transposed (the paper's
    remark 8), so that rows are the longer side.
    """
    n, d = matrix.shape
    if is_mask(name):
        choice, form = name.split()
        for rate in rates:
            entries = entries_that_fit(form, n, d, int((1 - rate) * n * d * 4))
            if choice == "random":
                mask = random_mask(matrix, entries, seed)
            else:
                flow = known.column_flow if choice == "synflow" else None
                mask = magnitude_mask(matrix if flow is None else matrix * flow, entries)
            yield Approximation(torch.where(mask, matrix, 0.0), FORMATS[form](n, d, entries))
        return
    if name == HALF:
        yield from (Approximation(matrix.half().float(), 2 * n * d) for _ in rates)
        return
    method, _, weighed = name.partition(" + ")
    weights = known.row_weights[weighed] if weighed else None
    if method == "flats":
        for rate in rates:
            problem = Problem(TensorRows(matrix), int((1 - rate) * n * d * 4), 4, Weighting(left=weights), seed=seed)
            held = Flats().fit(problem).matrix
            nbytes = sum(t.numel() * t.element_size() for t in held.tensors().values())
            yield Approximation(held.dense().detach(), nbytes)
        return
    tall = matrix.T.contiguous() if n < d else matrix
    ranks = [rank_at((n, d), rate) for rate in rates]
    for rank, (made, note) in zip(ranks, low_rank(method, tall, ranks, weights), strict=True):
        yield Approximation(made.T if n < d else made, rank * (n + d) * 4, note)


def norms(x: Tensor) -> Tensor:
    """(3,) sum of |entries|, sum of row lengths, sum of squares."""
    x = x.double()
    return torch.stack([x.abs().sum(), torch.linalg.vector_norm(x, dim=1).sum(), x.square().sum()])


def errors(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Of approximations b of matrices a, (a, b) each: entrywise l1, l2,1 and Frobenius, relative to those of zeros."""
    lost, full = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for a, b in pairs:
        lost += norms(a - b)
        full += norms(a)
    l1, l21, squares = (lost / full).tolist()
    return {"l1": l1, "l21": l21, "frobenius": squares**0.5}


def swap_described_(model: nn.Module, weight: Weight, matrix: Tensor) -> None:
    """Overwrite a weight by an approximation of the same shape: what the model then says is what factors would."""
    with torch.no_grad():
        table = model.get_submodule(weight.name).weight
        embedding = weight.places[0].role == "embedding"
        table.copy_((matrix if embedding else matrix.T).reshape(table.shape))


def compressed(
    model: nn.Module,
    weights: Sequence[Weight],
    name: str,
    rates: Sequence[float],
    known: Known,
    seed: int = 0,
) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """For each rate a copy of ``model`` with all ``weights`` approximated, and its errors and bytes.

    Each matrix gets the same rate; SynFlow shares the bytes of a network's matrices out itself.
    """
    before = [dense_weight(model, w).float() for w in weights]
    if name.startswith("synflow") and known.column_flow is None:
        made = [_synflow(model, weights, name.split()[1], rate, known.inputs) for rate in rates]
    else:
        made = zip(*(approximations(name, a, rates, known, seed) for a in before), strict=True)
    for rate, level in zip(rates, made, strict=True):
        copied = copy.deepcopy(model)
        for weight, b in zip(weights, level, strict=True):
            swap_described_(copied, weight, b.matrix)
        found = errors(zip(before, (b.matrix for b in level), strict=True))
        nbytes, full = sum(b.nbytes for b in level), sum(a.numel() * 4 for a in before)
        notes = sorted({b.note for b in level} - {""})
        yield copied, {"rate": rate, "kept": nbytes / full, **found, "note": "; ".join(notes)}


def _synflow(
    model: nn.Module, weights: Sequence[Weight], form: str, rate: float, inputs: Sequence[int]
) -> list[Approximation]:
    shapes = {f"{w.name}.weight": w.shape for w in weights}
    budget = int((1 - rate) * 4 * sum(n * d for n, d in shapes.values()))

    def sizes(left: Mapping[str, int]) -> list[int]:
        return [FORMATS[form](*shapes[name], entries) for name, entries in left.items()]

    most = sum(entries_that_fit(form, n, d, int((1 - rate) * 4 * n * d)) for n, d in shapes.values())
    masks = synflow_masks(model, list(shapes), inputs, lambda left: sum(sizes(left)) <= budget, entries=most)
    found = []
    for weight, mask in zip(weights, masks.values(), strict=True):
        flat = mask.flatten(1).T
        nbytes = FORMATS[form](*weight.shape, int(mask.sum()))
        found.append(Approximation(torch.where(flat, dense_weight(model, weight).float(), 0.0), nbytes))
    return found


def row_weights_of(tokenizer: Any, rows: int, texts: Sequence[str] | None) -> dict[str, Tensor]:
    """What " + zipf" (no text at all) and, where there are texts, " + counts" (public ones, none of the task's) weigh
    rows by."""
    from kflats.calibration.counting import count_tokens, zipf_prior
    from kflats.importance import TokenCounts, ZipfPrior

    counts = None if texts is None else count_tokens(texts, tokenizer, rows)
    measured = Measured(rows, counts, zipf_prior(tokenizer, rows))
    found = {"zipf": ZipfPrior().weigh(measured).left}
    if texts is not None:
        found["counts"] = TokenCounts().weigh(measured).left
    return {name: weights for name, weights in found.items() if weights is not None}


def options(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """Where finished parts are kept, which methods and rates, and (unless another group of options has it) the seed."""
    parser.add_argument("--parts", type=Path, required=True, help="where finished parts are kept, to go on from")
    parser.add_argument("--finished", action="store_true", help="tables of the finished parts alone: nothing is run")
    parser.add_argument("--methods", help="comma-separated names (see experiments/_robust.py); default: all")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="shares of the bytes that are saved")
    if seed:
        parser.add_argument("--seed", type=int, default=0)
