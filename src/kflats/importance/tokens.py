"""Importances of the rows of a token table: counts of texts, a prior of the vocabulary, and both with gradients.

An importance turns ``Measured`` into a ``Weighting``, here row weights w_i of sum_i w_i dist(a_i, S)^2. Row weights
change an embedding table most: frequent tokens have small norms, so with equal weights just the rows that texts use
lose most. Importances of linear layers are in ``sensitivity``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, check_arguments, is_number
from kflats.importance.protocol import Importance, Measured, Weighting, WeightingForm
from kflats.importance.sensitivity import KroneckerFisher, damping_for


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
        """The identity on both sides."""
        return Weighting()


@dataclass(frozen=True)
class TokenCounts(Importance):
    """w_i = n^p ((1 - s) counted_i + s prior_i + floor / n)^p: how often texts use the row's token.

    ``counted`` are the texts' token shares, ``prior`` those of the Zipf prior (1 / n without a prior); both sum to 1.

    Args:
        power: p. At 1 the objective is the expected squared error of a token of these texts; 0.5 gives rare tokens more
            weight and is better for other domains and smaller sizes; 0 is ``Uniform``.
        smoothing: s in [0, 1], the share of the prior, for tokens that the texts do not hold. At 1 no texts are needed.
        floor: the least share of a row in units of 1 / n, above zero.

    Needs texts and the model's tokenizer.

    >>> TokenCounts(power=1, smoothing=0, floor=1).weigh(Measured(2, torch.tensor([3, 0]))).left.tolist()
    [3.0, 1.0]
    """

    power: float = 0.5
    smoothing: float = 0.5
    floor: float = 0.3

    needs_tokenizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_arguments(
            self,
            power=(is_number(self.power, 0, 4), "a number from 0 (uniform) to 4; 1 is as counted"),
            floor=(is_number(self.floor, 0) and self.floor > 0, "a number above zero"),
            smoothing=(is_number(self.smoothing, 0, 1), "a share from 0 to 1"),
        )

    @property
    def needs_texts(self) -> bool:
        """Whether counts have a share."""
        return self.smoothing < 1

    @property
    def reads_prior(self) -> bool:
        """Whether the prior has a share."""
        return self.smoothing > 0

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal")

    def weigh(self, measured: Measured) -> Weighting:
        """(n,) float64 row weights; raises KflatsError without counts or, if they have no share, without a prior."""
        counts, prior, n = measured.counts, measured.prior, measured.rows
        if prior is None and not self.needs_texts:
            raise KflatsError(
                "the Zipf prior needs the model's tokenizer",
                cause="the frequency of a token does not follow from its row number",
                hint="tokenizer=..., or Uniform()",
            )
        share = self.smoothing * (torch.ones(n, dtype=torch.float64) if prior is None else prior.to(torch.float64) * n)
        if self.needs_texts:
            if counts is None:
                raise KflatsError("TokenCounts needs texts to count", hint="texts and a tokenizer, or ZipfPrior()")
            total = float(counts.to(torch.float64).sum())
            if total <= 0:
                raise KflatsError("the texts hold no token of this model", hint="other texts, or ZipfPrior()")
            share = (1 - self.smoothing) * counts.to(torch.float64) * (n / total) + share
        return _for_head((share + self.floor) ** self.power, measured)


def ZipfPrior(power: float = 0.5, floor: float = 0.3) -> TokenCounts:
    """w_i = (prior_i * n + floor)^power with prior_i ~ 1 / (rank_i + 2.7) (Zipf-Mandelbrot): no texts needed.

    rank_i is the position of token i in the part of the vocabulary that is ordered by frequency, not its id; see
    ``calibration.counting.zipf_prior``. Choose it without texts.

    >>> ZipfPrior(power=1, floor=0.5).weigh(Measured(2, prior=torch.tensor([0.75, 0.25]))).left.tolist()
    [2.0, 1.0]
    """
    return TokenCounts(power, smoothing=1.0, floor=floor)


@dataclass(frozen=True)
class TokenFisher(TokenCounts):
    """trace(S^{1/2} E' diag(w) E S^{1/2}): rows by token counts, columns by gradients of the loss.

    w are the weights of ``TokenCounts``, scaled to the sum 1; S is the Gram of the gradients of the embedding's
    outputs, summed over the positions of a sample (as in ``KroneckerFisher``). Row weights by Fisher information are
    zero for tokens that the calibration data does not hold; smoothed counts are not. Errors are in units of the loss
    and may be compared with those of other layers.

    Args:
        power, smoothing, floor: as ``TokenCounts``.
        damping: share of S's mean diagonal that is added to its diagonal; then S is scaled back to its trace, so that
            damping does not raise a table's errors beside those of other layers.

    Needs the model's tokenizer, texts unless ``smoothing`` is 1, and calibration data (the texts will do).
    """

    damping: float = 1.0

    needs: ClassVar[frozenset[str]] = frozenset({"fisher_gram", "output_gram"})

    def __post_init__(self) -> None:
        super().__post_init__()
        KroneckerFisher(damping=self.damping)  # checks the damping

    def form(self, *, one_hot: bool) -> WeightingForm:
        """As ``Importance.form``."""
        return WeightingForm(left="diagonal", right="full", loss_units=True)

    def weigh(self, measured: Measured) -> Weighting:
        """Row weights and a right metric; raises KflatsError without counts or gradients."""
        columns = KroneckerFisher(damping=self.damping).weigh(measured)
        rows = super().weigh(measured).left
        assert rows is not None
        added = damping_for(self.damping, measured.columns, measured.samples)
        right = None if columns.right is None else columns.right / (1.0 + added)
        return Weighting(left=rows / rows.sum(), right=right, loss_units=True)


def _for_head(weights: Tensor, measured: Measured) -> Weighting:
    # A tied head multiplies every row by every hidden state, so its rows have equal weights.
    return Weighting(left=weights / weights.mean() + 1.0 if measured.head else weights)
