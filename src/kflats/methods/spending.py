"""Bytes that a fit of several flats leaves unused, given to its ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from kflats.common.errors import KflatsError
from kflats.methods.problem import Problem, refuse_bytes
from kflats.numerics.allocation import fill
from kflats.numerics.flats import FlatsFit
from kflats.numerics.gram import cluster_grams, top_eigenvectors


def too_few(problem: Problem, k: int) -> KflatsError:
    """The error for a budget that does not hold k flats of rank 1."""
    n, d = problem.rows.shape
    least = (n + k * d) * problem.itemsize + n * (k > 1)
    return refuse_bytes(problem, least, f"{k} flat{'s' * (k > 1)} of rank 1")


def spent(problem: Problem, fit: FlatsFit, *, uniform: bool) -> FlatsFit:
    """The fit with higher ranks, where flats without rows, or labels of a single group, need not be stored."""
    rows, k = problem.rows, len(fit.bases)
    n, d = rows.shape
    counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1).cpu()
    used = counts[:k].nonzero().squeeze(1).tolist()
    exact = int(counts[k])
    if not used or (len(used) == k and k + bool(exact) > 1):
        return fit
    # One flat that holds all rows becomes a low-rank pair, without labels.
    numbers = problem.values(1 if len(used) == 1 and not exact else max(len(used) + bool(exact), 2)) - exact * d
    costs = counts[used] + d
    spectra = fit.spectra[used]
    if uniform:
        ranks = [min(numbers // int(costs.sum()), n, d)] * len(used)
    else:
        ranks = list(fill(spectra, costs, numbers).ranks)
    if all(rank <= len(fit.bases[c]) for rank, c in zip(ranks, used, strict=True)):
        return fit
    grams = cluster_grams(rows, fit.labels, k, problem.row_weights)
    bases = list(fit.bases)
    for rank, c in zip(ranks, used, strict=True):
        bases[c] = top_eigenvectors(grams[c], rank)[1].to(rows.dtype)
    error = float(sum(spectrum[rank:].sum() for rank, spectrum in zip(ranks, spectra, strict=True)))
    history = fit.objective + ((error,) if error < fit.error else ())
    return replace(fit, bases=tuple(bases), objective=history)
