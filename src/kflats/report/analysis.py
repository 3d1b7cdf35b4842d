"""The report of one compressed weight: its errors by flat, by importance and by row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from kflats.importance.protocol import Weighting
from kflats.matrices.registry import CodedMatrix, DenseMatrix, FlatsMatrix, InterpolativeMatrix, LowRankMatrix, Matrix
from kflats.methods.matrix_error import norm_error, row_errors, weighted_error
from kflats.methods.protocol import Factored
from kflats.numerics.flats import squared_norms
from kflats.numerics.rows import Rows
from kflats.numerics.svd import truncated_svd
from kflats.recipe.plan import Decision
from kflats.recipe.recipe import to_json
from kflats.report.report import BandReport, FrequencyBin, NormError, WeightReport

_BINS = (100, 1000, 10000)
_CUT_OFF = "the fit reached its limit of iterations (max_iterations)"


def analyse(decision: Decision, rows: Rows, factored: Factored, weighting: Weighting, tails: Tensor) -> WeightReport:
    """Measure ``factored`` against its ``rows`` under ``weighting``.

    Args:
        tails: the squared error of the weighted SVD of every rank.
    """
    matrix, weight = factored.matrix, decision.weight
    n, d = rows.shape
    w = _row_weights(weighting, n)
    dist2 = row_errors(rows, matrix)
    norm2 = squared_norms(rows).cpu().to(torch.float64)
    by_rows = weighting.kinds <= {"rows"}
    error = _ratio(w @ dist2, w @ norm2) if by_rows else weighted_error(rows, matrix, weighting).relative
    eigenvalues = (tails[:-1] - tails[1:]).clamp_min(0)
    total = float(eigenvalues.sum())
    itemsize = weight.nbytes // (n * d) if decision.recipe.is_coded else matrix.weight.element_size()
    rank = min(factored.nbytes // itemsize // (n + d), len(eigenvalues))
    labels, bands = _bands(matrix)
    ranks = torch.tensor([float(rank) for _, rank in bands])[labels]
    stored = "integers" if decision.recipe.is_coded else "factors"
    if decision.recipe.is_cast:
        stored = str(decision.recipe.torch_dtype(weight.dtype)).removeprefix("torch.")
    return replace(
        left_dense(decision),
        bytes_after=factored.nbytes,
        memory_bytes=matrix.memory_bytes,
        values_after=matrix.num_values,
        error=error,
        error_unweighted=_ratio(dist2.sum(), norm2.sum()),
        svd_error=_ratio(tails[rank], tails[0]),
        spectrum=tuple(float(v) / total if total else 0.0 for v in eigenvalues),
        bands=tuple(
            BandReport(
                flat,
                rank,
                int((labels == b).sum()),
                _ratio(w[labels == b].sum(), w.sum()),
                _ratio(dist2[labels == b].sum(), norm2[labels == b].sum()),
            )
            for b, (flat, rank) in enumerate(() if isinstance(matrix, DenseMatrix) else bands)
        ),
        frequency=_bins(w, dist2, norm2, ranks),
        seconds=factored.seconds,
        note="; ".join(filter(None, (decision.note, "" if factored.converged else _CUT_OFF))),
        matrix_rows=decision.recipe.matrix_rows,
        condition=matrix.condition if isinstance(matrix, InterpolativeMatrix) else None,
        own=_own(factored, rows, weighting, rank),
        stored=stored,
    )


def left_dense(decision: Decision) -> WeightReport:
    """The report of a weight that stays dense; its note is the reason."""
    weight = decision.weight
    return WeightReport(
        name=weight.name,
        places=tuple(place.name for place in weight.places),
        shape=weight.shape,
        dtype=weight.dtype,
        method=to_json(decision.recipe.method),
        importance=to_json(decision.recipe.importance),
        codec=to_json(decision.recipe.codec),
        bytes_before=weight.nbytes,
        bytes_after=weight.nbytes,
        memory_bytes=weight.nbytes,
        values_after=weight.shape[0] * weight.shape[1],
        error=0.0,
        error_unweighted=0.0,
        svd_error=0.0,
        note=decision.note,
        stored="dense",
    )


def stored_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that a file of ``model`` holds, those of its state dict; shared tensors once."""
    return list({id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}.values())


def stored_bytes(model: nn.Module) -> int:
    """Bytes that a file of ``model`` holds."""
    return sum(t.numel() * t.element_size() for t in stored_tensors(model))


def stored_numbers(model: nn.Module) -> int:
    """Numbers that a file of ``model`` holds."""
    return sum(t.numel() for t in stored_tensors(model))


def _bands(matrix: Matrix) -> tuple[Tensor, list[tuple[int | None, int]]]:
    """The band of each row (n,), and the flat and the rank of each band."""
    if isinstance(matrix, FlatsMatrix):
        return matrix.labels.cpu().to(torch.int64), [(band.flat, band.rank) for band in matrix.bands]
    one = torch.zeros(matrix.shape[0], dtype=torch.int64)
    if isinstance(matrix, CodedMatrix):
        labels = matrix.tensors().get("labels")
        used = [how.used for how in matrix.readings]
        return one if labels is None else labels.cpu().to(one), list(zip(matrix.geometry.flat_of, used, strict=True))
    return one, [(0, matrix.weight.shape[1])]


def _row_weights(weighting: Weighting, n: int) -> Tensor:
    """The weight of each row (n,), float64; of a full metric its diagonal."""
    if weighting.left is None:
        return torch.ones(n, dtype=torch.float64)
    weights = weighting.left.diagonal() if weighting.left.ndim == 2 else weighting.left
    return weights.detach().cpu().to(torch.float64)


def _own(factored: Factored, rows: Rows, weighting: Weighting, rank: int) -> NormError | None:
    """The error in the norm that the method minimises, and the error of the SVD of ``rank`` in that norm."""
    norm = factored.norm
    if norm is None:
        return None
    error = norm_error(rows, factored.matrix, norm, weighting.row_weights).relative
    if rank < 1:
        return NormError(norm.name, error, 1.0)
    svd = truncated_svd(rows, rank, left=weighting.row_weights)
    best = norm_error(rows, LowRankMatrix(svd.coordinates, svd.basis), norm, weighting.row_weights)
    return NormError(norm.name, error, best.relative)


def _bins(w: Tensor, dist2: Tensor, norm2: Tensor, ranks: Tensor) -> tuple[FrequencyBin, ...]:
    order = torch.argsort(w, descending=True, stable=True)
    edges = [0, *(edge for edge in _BINS if edge < len(w)), len(w)]
    parts = [(f"{first + 1:,}-{end:,}", order[first:end]) for first, end in itertools.pairwise(edges)]
    return tuple(
        FrequencyBin(label, len(part), float(ranks[part].mean()), _ratio(dist2[part].sum(), norm2[part].sum()))
        for label, part in parts
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) > 0 else 0.0
