"""The Protocol of importances: a frozen value that turns the statistics of a weight into a weighting of its errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, check_value


@dataclass(frozen=True)
class Measured:
    """The statistics of one (n, d) weight; None for those that were not measured.

    Args:
        rows: n.
        counts: (n,) how often each row was read in the texts.
        prior: (n,) a guess of the same from the vocabulary alone (``counting.zipf_prior``), summing to 1.
        head: whether the matrix is an output head too, which uses every row for every token.
        row_fisher: (n,) I_i = sum_j mean_s (dL_s / dM_ij)^2, L_s the loss of sample s alone (FWSVD, eq. 3 and 5).
        column_fisher: (d,) the same summed over rows.
        input_gram: (n, n) mean over positions of x x', x what enters the layer; or (n,), its diagonal, where
            inputs are one-hot (embeddings).
        input_mean: (n,) mean over positions of x.
        fisher_gram: (n + 1, n + 1) sum_s D_s D_s' / sum ||g_t||^2, D_s = sum_t [x_t; 1] g_t' the gradient of L_s by
            the weight, and by the bias in its last row; or (n,) sum ||g_t||^2 of each row, where inputs are one-hot.
        output_gram: (d, d) mean over samples of sum_t g_t g_t', g_t the gradient of L_s at position t's output; or
            (d,), its diagonal, of a layer with more than 16,384 outputs.
        samples, positions: numbers of both.
        columns: d.
    """

    rows: int
    counts: Tensor | None = None
    prior: Tensor | None = None
    head: bool = False
    row_fisher: Tensor | None = None
    column_fisher: Tensor | None = None
    input_gram: Tensor | None = None
    input_mean: Tensor | None = None
    fisher_gram: Tensor | None = None
    output_gram: Tensor | None = None
    samples: int = 0
    positions: int = 0
    columns: int = 0

    def kept_by(self, keep: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Measured:
        """The same statistics, with the tensors that ``keep`` gives for its own, by name.

        >>> Measured(1, counts=torch.ones(1)).kept_by(lambda own: {name: t + 1 for name, t in own.items()}).counts
        tensor([2.])
        """
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        first = {id(value): name for name, value in reversed(own.items())}  # two statistics may be one tensor
        kept = keep({name: own[name] for name in first.values()})
        changes: dict[str, Any] = {name: kept[first[id(value)]] for name, value in own.items()}
        return replace(self, **changes)


Side = Literal["identity", "diagonal", "full"]
"""One side of a weighting: the identity, a weight for each row (or column), or a full matrix that couples them."""


@dataclass(frozen=True)
class WeightingForm:
    """The kind of a ``Weighting``, without its numbers.

    >>> WeightingForm(left="diagonal", right="full").kinds == {"rows", "right"}
    True
    >>> WeightingForm(left="diagonal").transposed()
    WeightingForm(left='identity', right='diagonal', loss_units=False)
    """

    left: Side = "identity"
    right: Side = "identity"
    loss_units: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that a method must take: "rows" (row weights), "left" (a metric that couples rows), "right" (a
        metric of columns)."""
        left = {"identity": set(), "diagonal": {"rows"}, "full": {"left"}}[self.left]
        return frozenset(left | ({"right"} if self.right != "identity" else set()))

    def transposed(self) -> WeightingForm:
        """The form for M.T."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True)
class Weighting:
    """How much the errors E = M - M^ (n, d) of one weight count.

        || L E R ||_F^2  =  trace(R' E' L' L E R)

    Args:
        left: L' L, (n, n), or (n,) where it is diagonal: the row weights. None: identity.
        right: R R', (d, d), or (d,) where it is diagonal. None: identity.
        mean: (n,) the mean input; the layer's bias takes the error of its output, mean' E.
        loss_units: whether values are in units of a loss, so that errors of different weights may be added.

    >>> Weighting(left=torch.ones(3)).kinds
    frozenset({'rows'})
    """

    left: Tensor | None = None
    right: Tensor | None = None
    mean: Tensor | None = None
    loss_units: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in (self.left, self.right, self.mean) if t is not None)

    @property
    def form(self) -> WeightingForm:
        """The kind of this weighting."""
        return WeightingForm(_side(self.left), _side(self.right), self.loss_units)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that a method must take: as ``WeightingForm.kinds``."""
        return self.form.kinds

    @property
    def row_weights(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same.

        Raises:
            KflatsError: the left side couples rows.
        """
        if self.left is not None and self.left.ndim == 2:
            raise KflatsError(
                "a full left metric has no row weights", cause="it couples rows", hint="the diagonal of the metric"
            )
        return self.left

    def uncoupled(self) -> Weighting:
        """The weighting with row weights alone on the left side: of a full metric its diagonal."""
        return replace(self, left=self.left.diagonal()) if self.left is not None and self.left.ndim == 2 else self

    def transposed(self) -> Weighting:
        """The weighting of M.T, for ``matrix_rows="out_features"``.

        ``mean`` stays: it belongs to the layer's inputs on either side.
        """
        return replace(self, left=self.right, right=self.left)

    def to(self, device: torch.device | str) -> Weighting:
        """The same tensors on another device."""
        left, right, mean = (
            None if value is None else value.to(device) for value in (self.left, self.right, self.mean)
        )
        return replace(self, left=left, right=right, mean=mean)


def _side(metric: Tensor | None) -> Side:
    return "identity" if metric is None else "diagonal" if metric.ndim == 1 else "full"


@runtime_checkable
class Importance(Protocol):
    """Whose error counts. A value without data: ``weigh`` is given the statistics.

    A new importance is a frozen dataclass that inherits from this class, implements ``form`` and ``weigh``, and names
    in the class variables what it reads.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of ``Measured`` that a pass over calibration data must fill."""
    needs_tokenizer: ClassVar[bool] = False
    """Whether rows must be tokens of the model's own tokenizer (``Measured.prior``)."""

    @property
    def needs_texts(self) -> bool:
        """Whether texts are counted (``Measured.counts``)."""
        return False

    @property
    def reads_prior(self) -> bool:
        """Whether the Zipf prior of the vocabulary changes the weighting."""
        return self.needs_tokenizer

    @abstractmethod
    def form(self, *, one_hot: bool) -> WeightingForm:
        """The kind of the weighting that ``weigh`` makes, known before anything is measured.

        Args:
            one_hot: whether the weight is an embedding, whose inputs are one-hot vectors with a diagonal Gram matrix.
        """

    @abstractmethod
    def weigh(self, measured: Measured) -> Weighting:
        """The weighting of one weight's errors.

        Raises:
            KflatsError: a statistic in ``needs`` was not measured, or holds NaN.
        """


def check_importance(value: object) -> None:
    """Refuse what is not an importance.

    Raises:
        KflatsError: a class in place of a value, or another value.
    """
    check_value(value, Importance, "an importance", "weigh and form", "Uniform(), TokenCounts(), KroneckerFisher()")
