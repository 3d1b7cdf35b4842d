"""What an importance is: a frozen value that turns the statistics of a weight into a weighting of its errors."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from kflats.common.arguments import check_value
from kflats.importance.measured import Measured
from kflats.importance.weighting import Weighting, WeightingForm


@runtime_checkable
class Importance(Protocol):
    """Whose error counts. A value without data: ``weigh`` is given the statistics.

    A new importance is a frozen dataclass that inherits from this class, implements ``form`` and ``weigh``, and names
    in the class variables what it reads.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of ``Measured`` that a pass over calibration data must fill."""
    needs_texts: ClassVar[bool] = False
    """Whether texts are counted (``Measured.counts``)."""
    needs_tokenizer: ClassVar[bool] = False
    """Whether rows must be tokens of the model's own tokenizer (``Measured.prior``)."""

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

    def uncentred(self) -> Importance:
        """The same importance with inputs around zero, for a layer that must not gain a bias."""
        return self


def check_importance(value: object) -> None:
    """Refuse what is not an importance.

    Raises:
        KflatsError: a class in place of a value, or another value.
    """
    check_value(value, Importance, "an importance", "weigh and form", "Uniform(), TokenCounts(), KroneckerFisher()")
