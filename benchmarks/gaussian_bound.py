"""The least bits of any code for Gaussian coordinates of known variances (reverse water-filling).

With variances s_ir = w_i lambda_r, row weights times the spectrum, and a water level t,

    D(t) = mean min(t, s_ir),      R(t) = mean 1/2 log2 max(1, s_ir / t)     bits per weight

(Cover and Thomas, Elements of Information Theory, 10.3.3). No code needs less for a Gaussian of these variances. A real
table is not Gaussian: its rows differ in norm, and a code that knows each row's norm may need less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.coding.frame import water_level

_GROUPS = 512
"""Row weights are taken in this number of groups of like size and equal count: R changes by less than .001 bits."""


def bound_bits(spectrum: Tensor, share: float, weights: Tensor | None = None) -> float:
    """Least bits per weight for an error of ``share`` of the whole: sum min(t, s) = share * sum s.

    Args:
        spectrum: (d,) lambda_r >= 0, in any unit; zeros count as weights that need no bits.
        weights: (n,) w_i; None: all alike.

    >>> bound_bits(torch.ones(4), 0.25)
    1.0
    """
    variances = _variances(spectrum, weights).sort().values
    # With the k least variances below t: sum of those + (m - k) t = share. The right k gives the largest t.
    above = torch.arange(len(variances), 0, -1)
    level = ((share - variances.cumsum(0) + variances) / above).max()
    return round(float((variances / level).clamp_min(1.0).log2().mean()) / 2, 9)


def bound_error(spectrum: Tensor, bits: float, weights: Tensor | None = None) -> float:
    """Least share of the whole squared error at ``bits`` per weight; the inverse of ``bound_bits``.

    >>> round(bound_error(torch.ones(4), 1.0), 9)
    0.25
    """
    variances = _variances(spectrum, weights)
    return float(variances.clamp_max(water_level(variances, bits)).sum())


def _variances(spectrum: Tensor, weights: Tensor | None) -> Tensor:
    """All variances, in units of their sum."""
    variances = spectrum.to(torch.float64)
    if weights is not None:
        ordered = weights.to(torch.float64).sort().values
        groups = torch.stack([part.mean() for part in ordered.tensor_split(min(_GROUPS, len(ordered)))])
        variances = (groups.unsqueeze(1) * variances).flatten()
    return variances / variances.sum()
