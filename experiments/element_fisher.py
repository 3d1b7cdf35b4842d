"""Claim: a weight for every element (FWSVD's limitation 2) is no better than one for every row and column: at uniform
rank 127 of 384 in all 36 linear layers of MiniLM, sentence embeddings stay as near to the original's either way.

    minimise over U (n, r), V (r, d):   sum_ij F_ij (A - U V)_ij^2,     F_ij = mean_s (dL_s / dA_ij)^2

No closed form: the problem is not convex, and NP-hard already for rank 1 (Gillis & Glineur 2011). With V held,
every row of U is a least-squares problem of its own, and the other way round (Srebro & Jaakkola, ICML 2003,
section 2). Each step is damped (proximal), so that elements of almost no weight cannot drag a row far away, and is
taken only where it lowers that row's share: the objective never rises. It starts from ``TwoSided``, the SVD weighted by
F's row and column sums.

    python experiments/element_fisher.py --write experiments/results
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any

import torch
from _results import markdown, parsed, publish
from torch import Tensor

from kflats.calibration.counting import text_batches
from kflats.calibration.objectives import Projections
from kflats.common.errors import KflatsError
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity, load_tokenizer
from kflats.io import load_model
from kflats.model.weights import find_weights
from kflats.numerics.svd import truncated_svd

_BATCH = 2**22  # numbers in the largest temporary: memory of this size is kept and reused between batches
_LINES = 8


@dataclass(frozen=True)
class Elementwise:
    """``coordinates`` (n, r), orthonormal ``basis`` (r, d), the ``objective`` at the start and after every
    iteration, falling, and whether it ``converged`` before the iteration limit."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def weighted_low_rank(
    matrix: Tensor,
    elements: Tensor,
    coordinates: Tensor,
    basis: Tensor,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 20,
    proximal: float = 1e-4,
) -> Elementwise:
    """A local minimum near the factors given.

    Args:
        matrix: (n, d).
        elements: F (n, d) >= 0. Rows and columns of zeros keep the start's factors.
        coordinates, basis: the start, (n, r) and (r, d): ``truncated_svd`` with F's row and column sums.
        tolerance: stop when an iteration lowers the objective by less than this share.
        proximal: weight of the change of a row's coordinates, in units of its least-squares problem's mean eigenvalue.

    An iteration costs 2 n d r^2. Choose it where F is far from rank one; else the start is nearly as good.

    Raises:
        KflatsError: element weights that are negative or not finite.

    >>> a, f = torch.tensor([[1.0, 2.0], [2.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> found = weighted_low_rank(a, f, torch.ones(2, 1), torch.ones(1, 2), max_iterations=100, tolerance=0)
    >>> (found.coordinates @ found.basis).round(decimals=2).tolist()      # 9 does not count, 4 fits the others
    [[1.0, 2.0], [2.0, 4.0]]
    """
    weights, dtype = elements.detach().to(torch.float64), matrix.dtype
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise KflatsError("element weights must be finite and not negative", cause="an importance measure went wrong")
    scale = float(weights.max())
    weights = weights / scale
    a = matrix.to(torch.float64)
    u, v = _orthonormal(coordinates.to(torch.float64), basis.to(torch.float64))
    history = [_objective(a, weights, u, v)]
    best, converged = (u, v), False
    for _ in range(max_iterations):
        u = _improved(a, weights, u, v, proximal, dtype)
        turned, held = _orthonormal(v.T, u.T)
        v = _improved(a.T, weights.T, turned, held, proximal, dtype).T
        u, v = _orthonormal(held.T, v)
        found = _objective(a, weights, u, v)
        fell = history[-1] - found
        if fell > 0:
            best = u, v
            history.append(found)
        if fell <= tolerance * history[-1]:
            converged = True
            break
    u, v = best
    return Elementwise(u.to(dtype), v.to(dtype), tuple(scale * h for h in history), converged)


def _improved(a: Tensor, weights: Tensor, u: Tensor, v: Tensor, proximal: float, dtype: torch.dtype) -> Tensor:
    """``u`` with every row moved to its weighted least squares under orthonormal ``v``, where that is lower.

    Normal equations are formed in ``dtype``, their right side and what is gained in float64.
    """
    rank = len(v)
    out = u.clone()
    table = v.to(dtype)
    for start in range(0, len(a), max(1, _BATCH // (rank * rank))):
        here = slice(start, start + max(1, _BATCH // (rank * rank)))
        f = weights[here]
        f = f / f.amax(1, keepdim=True).clamp_min(torch.finfo(f.dtype).tiny)  # rows are apart: so are their scales
        rest = a[here] - u[here] @ v
        step = _solved(_normal(f.to(dtype), table), ((f * rest) @ v.T).to(dtype), proximal).to(torch.float64)
        better = (f * (rest - step @ v).square()).sum(1) < (f * rest.square()).sum(1)
        out[here] += torch.where(better.unsqueeze(1), step, 0.0)
    return out


def _normal(weights: Tensor, v: Tensor) -> Tensor:
    """(c, r, r) matrices sum_j f_ij v_j v_j' for the rows f_i (c, d) of ``weights``, v_j the columns of ``v`` (r, d).

    Products of lines of v, eight lines against those that follow, turn all of them into a few large
    multiplications of half the work.
    """
    rank, d = v.shape
    found = torch.empty(len(weights), rank, rank, dtype=v.dtype, device=v.device)
    for first in range(0, rank, _LINES):
        lines = v[first : first + _LINES]
        pairs = (lines.unsqueeze(1) * v[first:]).reshape(-1, d)
        part = (weights @ pairs.T).view(len(weights), len(lines), -1)
        found[:, first : first + _LINES, first:] = part
        found[:, first:, first : first + _LINES] = part.transpose(1, 2)
    return found


def _solved(grams: Tensor, target: Tensor, proximal: float) -> Tensor:
    """(H + lambda I)^-1 g for a batch, lambda in units of each H's mean eigenvalue; ``grams`` are overwritten."""
    diagonal = grams.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))  # no weight at all: g is 0, and so is the answer
    while True:
        diagonal.add_(proximal * mean)
        factor, failed = torch.linalg.cholesky_ex(grams)
        if not bool(failed.any()):
            return torch.cholesky_solve(target.unsqueeze(2), factor).squeeze(2)
        proximal = max(10 * proximal, torch.finfo(grams.dtype).eps)  # held back more, until rounding is outweighed


def _orthonormal(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with the rows of ``v`` orthonormal: least squares are then as well posed as F lets them be."""
    q, t = torch.linalg.qr(v.T)
    return u @ t.T, q.T


def _objective(a: Tensor, weights: Tensor, u: Tensor, v: Tensor) -> float:
    return float((weights * (a - u @ v).square()).sum())


def element_fisher(model: torch.nn.Module, layers: dict[str, torch.nn.Linear], batches: list) -> dict[str, Tensor]:
    """F (n, d) of each layer, inputs by outputs: one backward pass for each sample, label-free."""
    sums = {name: torch.zeros(layer.weight.shape, dtype=torch.float64) for name, layer in layers.items()}
    for first, batch in enumerate(batches):
        loss = Projections().losses(model, batch, first).sum()
        gradients = torch.autograd.grad(loss, [layer.weight for layer in layers.values()])
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += gradient.double().square()
    return {name: total.T / len(batches) for name, total in sums.items()}


def low_rank(way: str, a: Tensor, fisher: Tensor, rank: int) -> Tensor:
    """``a`` (n, d) at ``rank``, by one of the three ways."""
    rows, columns = fisher.sum(1), fisher.sum(0)
    floored = columns.clamp_min(1e-4 * float(columns.mean())) / columns.sum()
    found = truncated_svd(a, rank) if way == "SVD" else truncated_svd(a, rank, left=rows, right=floored)
    if way == "a weight for every element":
        return (lambda fit: fit.coordinates @ fit.basis)(weighted_low_rank(a, fisher, found.coordinates, found.basis))
    return found.coordinates @ found.basis


QUICK = {"samples": 2, "rank": 20}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=64, help="texts that F is measured on")
    parser.add_argument("--rank", type=int, default=127)
    asked = parsed(parser, argv, QUICK)
    folder = packaged_model()
    original, tokenizer, texts = load_model(folder).eval(), load_tokenizer(folder), list(packaged_texts("count"))
    names = [w.name for w in find_weights(original) if ".encoder." in f".{w.name}" and w.places[0].role == "linear"]
    layers = {name: original.get_submodule(name) for name in names}
    batches = text_batches(texts[: asked.samples], tokenizer, batch=1, max_length=128)
    fisher = element_fisher(original, layers, batches)
    rows: list[dict[str, Any]] = []
    for way in ("SVD", "a weight for every row and column", "a weight for every element"):
        model, left, total = copy.deepcopy(original), 0.0, 0.0
        for name, f in fisher.items():
            weight = model.get_submodule(name).weight
            a = weight.detach().T.contiguous()
            made = low_rank(way, a, f, asked.rank)
            left, total = left + float((f * (a - made).square()).sum()), total + float((f * a.square()).sum())
            weight.data.copy_(made.T)
        near = fidelity(original, model, tokenizer, list(packaged_texts("judge")), counted=texts)
        rows.append({"weighted by": way, "error": left / total, "mean": near.mean_cosine, "p5": near.p5_cosine})
        print(rows[-1], flush=True)
    lines = [[row["weighted by"], *(f"{row[key]:.4f}" for key in ("error", "mean", "p5"))] for row in rows]
    body = (
        f"{len(names)} linear layers of all-MiniLM-L6-v2 at rank {asked.rank}, by gradients of {asked.samples} "
        "packaged sentences without labels; cosines of other packaged sentences to the original's.\n\n"
        + markdown(["weighted by", "element-weighted error", "mean cosine", "5th percentile"], lines)
    )
    title = "A weight for every element beside a weight for every row and column"
    publish("element_fisher", title, body, {"rows": rows}, asked)


if __name__ == "__main__":
    main()
