"""The least bits of any code for Gaussian coordinates of known variances (reverse water-filling).

With variances s_ir = w_i lambda_r, row weights times the spectrum, and a water level t,

    D(t) = mean min(t, s_ir),      R(t) = mean 1/2 log2 max(1, s_ir / t)     bits per weight

(Cover and Thomas, Elements of Information Theory, 10.3.3). No code needs less for a Gaussian of these variances. A real
table is not Gaussian: its rows differ in norm, and a code that knows each row's norm may need less.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.rows import check_weights

_GROUPS = 512
"""Row weights are taken in so many groups of like size and equal count: R changes by less than .001 bits."""
_HALVINGS = 80


def water_level(variances: Tensor, bits: float) -> float:
    """t with R(t) = ``bits`` for the given variances."""
    return _solve(variances.to(torch.float64).flatten(), bits, _rate, falling=True)


def bound_bits(spectrum: Tensor, share: float, weights: Tensor | None = None) -> float:
    """Least bits per weight for an error of ``share`` of the whole: sum min(t, s) = share * sum s.

    Args:
        spectrum: (d,) lambda_r >= 0, in any unit; zeros count as weights that need no bits.
        weights: (n,) w_i; None: all alike.

    >>> bound_bits(torch.ones(4), 0.25)
    1.0
    """
    if not 0 < share <= 1:
        raise KflatsError(f"an error of {share!r} of the whole is not possible", hint="a share above 0, at most 1")
    variances = _variances(spectrum, weights)
    variances = variances / variances.sum()
    level = _solve(variances, share, lambda v, t: float(v.clamp_max(t).sum()), falling=False)
    return round(_rate(variances, level), 9)


def bound_error(spectrum: Tensor, bits: float, weights: Tensor | None = None) -> float:
    """Least share of the whole squared error at ``bits`` per weight; the inverse of ``bound_bits``.

    >>> round(bound_error(torch.ones(4), 1.0), 9)
    0.25
    """
    if not bits >= 0:
        raise KflatsError(f"{bits!r} bits per weight are not possible", hint="a number from 0")
    variances = _variances(spectrum, weights)
    variances = variances / variances.sum()
    return float(variances.clamp_max(water_level(variances, bits)).sum())


def _variances(spectrum: Tensor, weights: Tensor | None) -> Tensor:
    spectrum = spectrum.to(torch.float64)
    if spectrum.ndim != 1 or bool((spectrum < 0).any()) or not float(spectrum.sum()) > 0:
        raise KflatsError("a spectrum must be a vector of numbers from 0, not all 0", hint="eigenvalues of a Gram")
    if weights is None:
        return spectrum
    check_weights(weights, len(weights))
    ordered = weights.to(torch.float64).sort().values
    groups = torch.stack([part.mean() for part in ordered.tensor_split(min(_GROUPS, len(ordered)))])
    return (groups.unsqueeze(1) * spectrum).flatten()


def _rate(variances: Tensor, level: float) -> float:
    return float((variances / level).clamp_min(1.0).log2().mean()) / 2


def _solve(variances: Tensor, wanted: float, measure: Callable[[Tensor, float], float], *, falling: bool) -> float:
    high = math.log(float(variances.max()))
    low = high - 200.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = measure(variances, math.exp(middle)) < wanted
        low, high = (low, middle) if below == falling else (middle, high)
    return math.exp((low + high) / 2)
