"""What a factorization did to one weight: errors by flat, by importance and by row, for the report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kflats.methods import Factored, row_errors
from kflats.nn.matrix import FlatsMatrix, LowRankMatrix, Matrix
from kflats.numerics.assign import squared_norms
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.rows import Rows
from kflats.plan import Decision, to_json
from kflats.report import BandReport, FrequencyBin, WeightReport, WorstRow

_BINS = (100, 1000, 10000)
_WORST = 12


def analyse(
    decision: Decision,
    rows: Rows,
    factored: Factored,
    weights: Tensor | None,
    names: Sequence[str] | None = None,
) -> WeightReport:
    """Measure ``factored`` against its ``rows`` under ``weights``; ``names`` are tokens by row."""
    matrix, weight = factored.matrix, decision.weight
    n, d = rows.shape
    w = torch.ones(n, dtype=torch.float64) if weights is None else weights.detach().cpu().to(torch.float64)
    dist2 = row_errors(rows, matrix)
    norm2 = squared_norms(rows).cpu().to(torch.float64)
    gram = cluster_grams(rows, torch.zeros(n, dtype=torch.uint8, device=rows.device), 1, w.to(rows.device))[0]
    spectrum = top_eigenvectors(gram, 1)[0].cpu()
    total = float(spectrum.sum())
    rank = min(matrix.nbytes // matrix.weight.element_size() // (n + d), d)
    labels, bands = _bands(matrix)
    ranks = torch.tensor([float(rank) for _, rank in bands])[labels]
    return WeightReport(
        name=weight.name,
        places=tuple(place.name for place in weight.places),
        shape=weight.shape,
        dtype=weight.dtype,
        method=_json(decision.recipe.method),
        importance=_json(decision.recipe.importance),
        codec=_json(decision.recipe.codec),
        bytes_before=weight.nbytes,
        bytes_after=matrix.nbytes,
        values_after=matrix.num_values,
        error=_ratio(w @ dist2, w @ norm2),
        error_unweighted=_ratio(dist2.sum(), norm2.sum()),
        svd_error=_ratio(spectrum[rank:].sum(), spectrum.sum()),
        spectrum=tuple(float(v) / total if total else 0.0 for v in spectrum),
        bands=tuple(
            BandReport(
                flat,
                rank,
                int((labels == b).sum()),
                _ratio(w[labels == b].sum(), w.sum()),
                _ratio(dist2[labels == b].sum(), norm2[labels == b].sum()),
            )
            for b, (flat, rank) in enumerate(bands)
        ),
        frequency=_bins(w, dist2, norm2, ranks),
        worst=_worst(w, dist2, norm2, names),
        objective=tuple(float(v) for v in factored.objective),
        seconds=factored.seconds,
        note=decision.note,
    )


def stored_bytes(model: nn.Module) -> int:
    """Bytes that a file of ``model`` holds: its state, shared tensors once, derived buffers not."""
    held = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in held.values())


def _bands(matrix: Matrix) -> tuple[Tensor, list[tuple[int | None, int]]]:
    if isinstance(matrix, FlatsMatrix):
        return matrix.labels.cpu().to(torch.int64), [(band.flat, band.rank) for band in matrix.bands]
    assert isinstance(matrix, LowRankMatrix)
    return torch.zeros(matrix.shape[0], dtype=torch.int64), [(0, matrix.basis.shape[0])]


def _bins(w: Tensor, dist2: Tensor, norm2: Tensor, ranks: Tensor) -> tuple[FrequencyBin, ...]:
    order = torch.argsort(w, descending=True, stable=True)
    edges = [0, *(edge for edge in _BINS if edge < len(w)), len(w)]
    found = []
    for first, end in itertools.pairwise(edges):
        part = order[first:end]
        found.append(
            FrequencyBin(
                f"{first + 1:,}-{end:,}",
                len(part),
                float(ranks[part].mean()),
                _ratio(dist2[part].sum(), norm2[part].sum()),
            )
        )
    return tuple(found)


def _worst(w: Tensor, dist2: Tensor, norm2: Tensor, names: Sequence[str] | None) -> tuple[WorstRow, ...]:
    relative = torch.where(norm2 > 0, dist2 / norm2.clamp_min(1e-300), torch.zeros_like(dist2))
    found = relative.topk(min(_WORST, len(relative))).indices.tolist()
    return tuple(
        WorstRow(row, names[row] if names is not None else "", float(w[row]), float(relative[row])) for row in found
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) > 0 else 0.0


def _json(value: Any) -> dict[str, Any]:
    return to_json(value)
