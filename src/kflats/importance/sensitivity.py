"""Importances by activations and by Fisher information.

    RowFisher        sum_i  I_i ||e_i||^2                        FWSVD (Hsu et al., ICLR 2022, eq. 5-6)
    TwoSided         sum_ij r_i c_j E_ij^2                       the Fisher information's rank-one part
    InputGram        E ||x'E||^2 = trace(E' G E)                 the error of the layer's output
    KroneckerFisher  trace(S^{1/2} E' G E S^{1/2})               that error, weighted by the loss's gradients

with E = M - M^ the error of the matrix, G the inputs' Gram, S the Gram of the outputs' gradients. All but
InputGram are in units of the loss: their values may be compared between layers, and a budget may be shared by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, NoGradientSignalError, check_arguments, is_number
from kflats.importance.protocol import Importance, Measured, Weighting, WeightingForm
from kflats.numerics.large_matrices import all_finite, factorize_, stripes, symmetric, zero_matrix

Unreached = Literal["refuse", "uniform"]
"""For a weight that no gradient reached: an error, or the same weight for every row."""

_NEGATIVE = 1e-5  # share of the trace: no metric has a direction that is more negative
_LEFT_OVER = 1e-3  # share of a Gram's trace
_ROUNDING = 1e-5  # share of a mean square, above the rounding of products in float32


@dataclass(frozen=True)
class RowFisher(Importance):
    """w_i = I_i / d: the mean Fisher information of row i's entries (FWSVD, eq. 5-6).

    Rows are input neurons (or tokens). Rows of weight zero are allowed: nothing is divided by weights. Choose it to
    compare with the paper; ``KroneckerFisher`` loses less at equal bytes.

    Needs gradients of a task's loss, or of random projections, which need no labels.

    Args:
        unreached: for a weight that no gradient reached: "refuse", an error; or "uniform", every row counts the same.
    """

    unreached: Unreached = "refuse"

    needs: ClassVar[frozenset[str]] = frozenset({"row_fisher"})

    def __post_init__(self) -> None:
        _check(self, self.unreached)

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal", loss_units=True)

    def weigh(self, measured: Measured) -> Weighting:
        """Row weights; raises KflatsError without a measured Fisher, or if all of it is zero."""
        fisher = _measured(measured.row_fisher, "RowFisher", "row_fisher")
        if not _reached(fisher, self.unreached):
            return Weighting()
        return Weighting(left=fisher.to(torch.float64) / max(measured.columns, 1), loss_units=True)


@dataclass(frozen=True)
class TwoSided(Importance):
    """F_ij ~ r_i c_j / sum F with r, c the Fisher information's row and column sums: closed form, both sides.

    A Fisher matrix is nearly of rank one, so this nearly solves the problem with a weight for every entry, in the time
    of an SVD.

    Args:
        unreached: for a weight that no gradient reached: "refuse", an error; or "uniform", every row counts the same.
        floor: the least column weight, as a share of their mean.
    """

    unreached: Unreached = "refuse"
    floor: float = 1e-4

    needs: ClassVar[frozenset[str]] = frozenset({"row_fisher", "column_fisher"})

    def __post_init__(self) -> None:
        _check(self, self.unreached, floor=self.floor)

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal", right="diagonal", loss_units=True)

    def weigh(self, measured: Measured) -> Weighting:
        """Row and column weights."""
        rows = _measured(measured.row_fisher, "TwoSided", "row_fisher").to(torch.float64)
        columns = _measured(measured.column_fisher, "TwoSided", "column_fisher").to(torch.float64)
        if not _reached(rows, self.unreached):
            return Weighting()
        return Weighting(left=rows, right=_floored(columns, self.floor) / columns.sum(), loss_units=True)


@dataclass(frozen=True)
class InputGram(Importance):
    """E ||x'E||^2: the mean squared error of the layer's output ("whitening", activation-aware SVD).

    Args:
        centred: x is measured around its mean, and the bias corrects the mean's error.
        damping: share of the Gram's mean diagonal that is added to the diagonal, for directions that few samples show.
        unreached: for a weight that no input reached: "refuse", an error; or "uniform", every row counts the same.

    Needs only forward passes. Its values are not in units of a loss, so layers cannot be compared by them.
    """

    centred: bool = True
    damping: float = 1e-3
    unreached: Unreached = "refuse"

    needs: ClassVar[frozenset[str]] = frozenset({"input_gram"})

    def __post_init__(self) -> None:
        _check(self, self.unreached, damping=self.damping)

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal" if one_hot else "full")

    def weigh(self, measured: Measured) -> Weighting:
        """A left metric (row weights for one-hot inputs), and the mean where it is centred."""
        gram = _measured(measured.input_gram, "InputGram", "input_gram")
        if not _reached(gram, self.unreached):
            return Weighting()
        mean = measured.input_mean if self.centred and gram.ndim == 2 else None
        return Weighting(left=_input_side(gram, mean, mean, self.damping), mean=mean)


@dataclass(frozen=True)
class KroneckerFisher(Importance):
    """trace(S^{1/2} E' G E S^{1/2}): Fisher information with its correlations, F ~ G (x) S.

        G = sum_s D_s D_s' / sum_s ||g_s||^2      D_s = sum_t x_t g_t'      S = mean_s sum_t g_t g_t'

    The last row of G is that of the bias, which reads a constant input:

        min over b of  trace([E; b]' G [E; b])  =  trace(E' (G_11 - G_12 G_21 / G_22) E)    at  b = -(G_21 / G_22) E

    D_s is the gradient of sample s by the weight. Its positions t add before squaring: an error of a layer often points
    the same way at all positions, and later layers add these errors up. G counts that. (K-FAC's G,
    sum ||g_t||^2 x_t x_t', leaves the cross terms of positions out.) trace(G) trace(S) is the layer's Fisher
    information, and G's diagonal is that of ``RowFisher``.

    Args:
        centred: the bias, which reads a constant input, takes the part of the error that it can take.
        damping: share of each Gram's mean diagonal that is added to its diagonal, for directions that few samples show:
            where a Gram has more than three rows for each sample, as many times this share (``damping_for``).
        unreached: for a weight that no gradient reached: "refuse", an error; or "uniform", every row counts the same.

    Choose it for linear layers: with a budget shared by loss it lost least of the closed forms on task models and the
    encoder, and its values can be compared between layers.
    Limit: of a layer with more than 16,384 outputs, such as the head of a large vocabulary, S is its diagonal.
    """

    centred: bool = True
    damping: float = 1e-3
    unreached: Unreached = "refuse"

    needs: ClassVar[frozenset[str]] = frozenset({"fisher_gram", "output_gram"})

    def __post_init__(self) -> None:
        _check(self, self.unreached, damping=self.damping)

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal" if one_hot else "full", right="full", loss_units=True)

    def weigh(self, measured: Measured) -> Weighting:
        """Metrics on both sides."""
        gram = _measured(measured.fisher_gram, "KroneckerFisher", "fisher_gram")
        outputs = _measured(measured.output_gram, "KroneckerFisher", "output_gram")
        if not (_reached(gram, self.unreached) and _reached(outputs, self.unreached)):
            return Weighting()
        left, mean = self._inputs(gram, measured.samples)
        if left.ndim == 2 and bool((left.diagonal() < 0).any()):
            left, mean = self._inputs(_nearest_gram(gram), measured.samples)
        if not _reached(left, self.unreached):  # every input is the same, and the bias takes all of the error
            return Weighting()
        damping = damping_for(self.damping, len(outputs), measured.samples)
        right = _damped(outputs, damping)
        if not _is_gram(right):
            right = _damped(_nearest_gram(outputs), damping)
        return Weighting(left=left, right=right, mean=mean, loss_units=True)

    def _inputs(self, gram: Tensor, samples: int) -> tuple[Tensor, Tensor | None]:
        """The left metric, and the mean where it is centred."""
        if gram.ndim == 1:
            return _input_side(gram, None, None, self.damping), None
        wide = gram.to(torch.float64)
        cross = wide[:-1, -1]
        # The small number leaves the bias alone where no loss depends on it, as on that of attention's keys.
        mean = cross / (max(float(wide[-1, -1]), 0.0) + _ROUNDING) if self.centred else None
        damping = damping_for(self.damping, len(gram) - 1, samples)
        return _input_side(wide[:-1, :-1], cross, mean, damping), mean


def damping_for(damping: float, size: int, samples: int) -> float:
    """The share of its mean diagonal that is added to the diagonal of a (size, size) Gram of gradients.

    Gradients of a sample often point one way at all positions. The Gram of few samples then has few directions, and a
    method would spend all bytes on these. 0 samples: their number is unknown, and counts as enough.

    >>> damping_for(0.05, 384, 512), damping_for(0.05, 1536, 32)
    (0.05, 0.8)
    """
    return damping * max(1.0, size / (3 * samples)) if samples else damping


def _check(importance: Importance, unreached: str, **shares: float) -> None:
    check_arguments(importance, unreached=(unreached in ("refuse", "uniform"), "refuse or uniform"))
    check_arguments(importance, **{name: (is_number(value, 0), "a share, 0 or more") for name, value in shares.items()})


def _measured(value: Tensor | None, who: str, what: str) -> Tensor:
    if value is None:
        raise KflatsError(
            f"{who} needs the {what.replace('_', ' ')}, which was not measured",
            cause="there is no calibration data, or the statistics were measured for another importance",
            hint="texts, or statistics measured for this importance",
        )
    if not all_finite(value):
        raise KflatsError(
            f"the measured {what.replace('_', ' ')} holds NaN or infinity",
            cause="the loss is not finite, or squares overflow half precision",
            hint="measure with the model in float32",
        )
    return value.detach()


def _reached(value: Tensor, unreached: Unreached) -> bool:
    if bool(value.any()):
        return True
    if unreached == "refuse":
        raise NoGradientSignalError(
            "the calibration data does not reach this weight: all its statistics are zero",
            cause="the layer does not run on this data, or the loss does not depend on it",
            hint="other calibration data, or leave the weight out",
        )
    return False


def _floored(values: Tensor, floor: float) -> Tensor:
    return values.clamp_min(floor * float(values.mean()))


def _input_side(gram: Tensor, cross: Tensor | None, mean: Tensor | None, damping: float) -> Tensor:
    """The left metric: of a full Gram without what the bias takes of it, ``cross`` (n,) times the ``mean`` input (n,),
    if there is a mean."""
    gram = gram.to(torch.float64)
    if gram.ndim == 1:  # one-hot inputs of an embedding, which has no bias
        return _floored(gram, damping)
    if cross is not None and mean is not None:
        # For inputs that hardly vary (the first [CLS]) the difference is rounding of either sign.
        centred, cross, mean = zero_matrix(len(gram), len(gram), device=gram.device), cross.to(gram), mean.to(gram)
        for part in stripes(gram):
            centred[part] = gram[part] - torch.outer(cross[part], mean)
        centred.diagonal().add_(_ROUNDING * gram.diagonal())
        left_over = float(centred.diagonal().sum()) / max(float(gram.diagonal().sum()), 1e-300)
        damped = _damped(centred, damping)
        # A check takes one more matrix: only where so little is left that rounding is a part of it.
        return damped if left_over > _LEFT_OVER or _is_gram(damped) else _damped(_nearest_gram(damped), damping)
    return _damped(gram, damping)


def _is_gram(metric: Tensor) -> bool:
    """Whether no direction of a metric is negative by more than rounding."""
    if metric.ndim == 1:
        return True
    shifted = zero_matrix(len(metric), len(metric), device=metric.device).copy_(metric)
    shifted.diagonal().add_(_NEGATIVE * float(metric.diagonal().sum()))
    return factorize_(shifted)


def _nearest_gram(measured: Tensor) -> Tensor:
    """The Gram nearest to a measured one, in float64. Sums of products in float32 may have a negative direction where
    their terms cancel, as those of gradients before a batch normalisation do."""
    gram = measured.to(torch.float64)
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    nearest: Tensor = (vectors * values.clamp_min(0.0)) @ vectors.T
    return nearest


def _damped(gram: Tensor, damping: float) -> Tensor:
    gram = gram.to(torch.float64)
    if gram.ndim == 1:
        return gram + damping * gram.mean()
    damped = symmetric(gram)
    damped.diagonal().add_(damping * float(damped.diagonal().mean()))
    return damped
