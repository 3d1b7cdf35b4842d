"""Importance of the rows of a token table: what texts count, a prior of the vocabulary, and both with gradients.

An importance turns what was measured of a weight (``Measured``) into a ``Weighting`` of the objective, here
row weights w_i of sum_i w_i dist(a_i, S)^2. It is the largest lever on an embedding table: frequent tokens
have small norms, so methods that count every row the same starve just the rows that texts are made of. What
linear layers need, activations and Fisher information, is in ``sensitivity``.

Every importance has ``needs``, the fields of ``Measured`` that a pass over calibration data must fill;
``needs_texts`` and ``needs_tokenizer`` say what those that weigh tokens read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.importance.measured import Measured
from kflats.importance.protocol import Importance
from kflats.importance.sensitivity import KroneckerFisher, is_number
from kflats.importance.weighting import Weighting, WeightingForm


@dataclass(frozen=True)
class Uniform(Importance):
    """Every row counts the same: plain SVD, MESSI as published.

    >>> Uniform().weigh(Measured(3)).kinds
    frozenset()
    """

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm()

    def weigh(self, measured: Measured) -> Weighting:
        """Nothing is weighed: errors count as they are."""
        return Weighting()


@dataclass(frozen=True)
class TokenCounts(Importance):
    """w_i = n^p ((1 - s) counted_i + s prior_i + floor / n)^p: how often texts read the row.

    ``counted`` are the texts' token shares, ``prior`` the Zipf prior's (even where there is none); both
    sum to 1.

    Args:
        power: p. At 1 the objective is the expected squared error of a token of such texts; 0.5 cares
            more for rare tokens and carries better to other domains and smaller sizes; 0 is ``Uniform``.
        smoothing: s in [0, 1], how much of the share comes from the prior: what the texts have not shown yet.
        floor: least share of a row in units of the even share 1 / n, so that no row starves. Above zero.

    Needs texts and the model's tokenizer.

    >>> TokenCounts(power=1, smoothing=0, floor=1).weigh(Measured(2, torch.tensor([3, 0]))).left.tolist()
    [3.0, 1.0]
    """

    power: float = 0.5
    smoothing: float = 0.5
    floor: float = 0.3

    needs_texts: ClassVar[bool] = True
    needs_tokenizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.power, self.floor, "TokenCounts")
        if not is_number(self.smoothing, 0, 1):
            raise KflatsError(f"TokenCounts cannot smooth by {self.smoothing!r}", hint="a share from 0 to 1")

    @property
    def reads_prior(self) -> bool:
        """Whether the prior has a share."""
        return self.smoothing > 0

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal")

    def weigh(self, measured: Measured) -> Weighting:
        """(n,) float64 row weights; raises KflatsError without counts."""
        if measured.counts is None:
            raise KflatsError(
                "TokenCounts has nothing to count",
                cause="no texts were given",
                hint="texts=... and tokenizer=..., or ZipfPrior(), which needs no texts",
            )
        counts = measured.counts.to(torch.float64)
        total = float(counts.sum())
        if total <= 0:
            raise KflatsError("the texts hold no token of this model", hint="other texts, or ZipfPrior()")
        n = len(counts)
        prior = torch.full_like(counts, 1.0) if measured.prior is None else measured.prior.to(torch.float64) * n
        share = (1 - self.smoothing) * counts * (n / total) + self.smoothing * prior
        return _for_head((share + self.floor) ** self.power, measured)


@dataclass(frozen=True)
class ZipfPrior(Importance):
    """w_i = (prior_i * n + floor)^power with prior_i ~ 1 / (rank_i + 2.7) (Zipf-Mandelbrot): no texts needed.

    rank_i is the place of token i in the frequency-ordered run of the vocabulary, not its id; see
    ``statistics.zipf_prior``. Choose it when there is no text at all: texts, even few, are better.

    >>> ZipfPrior(power=1, floor=0.5).weigh(Measured(2, prior=torch.tensor([0.75, 0.25]))).left.tolist()
    [2.0, 1.0]
    """

    power: float = 0.5
    floor: float = 0.3

    needs_tokenizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.power, self.floor, "ZipfPrior")

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal")

    def weigh(self, measured: Measured) -> Weighting:
        """(n,) float64 row weights; raises KflatsError without a prior."""
        if measured.prior is None:
            raise KflatsError(
                "ZipfPrior needs the model's tokenizer",
                cause="a row's number alone does not say how common its token is",
                hint="pass tokenizer=..., or Uniform()",
            )
        prior = measured.prior.to(torch.float64)
        return _for_head((prior * len(prior) + self.floor) ** self.power, measured)


@dataclass(frozen=True)
class TokenFisher(Importance):
    """trace(S^{1/2} E' diag(w) E S^{1/2}): rows by how often texts read them, columns by how the loss minds errors.

    w are the weights of ``TokenCounts``, scaled so that they sum to 1; S is the Gram of the gradients of the
    embedding's outputs, summed over the positions of a sample (as in ``KroneckerFisher``). A Fisher information of rows
    knows only the tokens that the calibration data happens to hold; counts, smoothed, know all, and errors are still in
    units of the loss, to be compared with those of other layers.

    Args:
        power, smoothing, floor: as ``TokenCounts``.
        damping: share of S's mean diagonal that is added to it; then S is scaled back to its own trace, so that a
            table's errors count no more beside those of other layers.

    Needs texts, the model's tokenizer, and calibration data (the texts will do).
    """

    power: float = 0.5
    smoothing: float = 0.5
    floor: float = 0.3
    damping: float = 1.0

    needs: ClassVar[frozenset[str]] = frozenset({"fisher_gram", "output_gram"})
    needs_texts: ClassVar[bool] = True
    needs_tokenizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._counts()
        KroneckerFisher(damping=self.damping)

    def _counts(self) -> TokenCounts:
        return TokenCounts(self.power, self.smoothing, self.floor)

    @property
    def reads_prior(self) -> bool:
        """Whether the prior has a share."""
        return self.smoothing > 0

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal", right="full", loss_units=True)

    def weigh(self, measured: Measured) -> Weighting:
        """Row weights and a right metric; raises KflatsError without counts or gradients."""
        columns = KroneckerFisher(damping=self.damping).weigh(measured)
        rows = self._counts().weigh(measured).left
        assert rows is not None
        right = None if columns.right is None else columns.right / (1.0 + self.damping)
        return Weighting(left=rows / rows.sum(), right=right, loss_units=True)


def _for_head(weights: Tensor, measured: Measured) -> Weighting:
    # A tied head compares every row with every hidden state: its share is even over all rows.
    return Weighting(left=weights / weights.mean() + 1.0 if measured.head else weights)


def _check(power: float, floor: float, name: str) -> None:
    if not is_number(power, 0, 4):
        raise KflatsError(f"{name} cannot use power {power!r}", hint="a number, 0 (uniform) to 1 (as counted)")
    if not is_number(floor, 0) or floor == 0:
        raise KflatsError(f"{name} needs a floor above zero, not {floor!r}", hint="without one, unseen rows starve")
