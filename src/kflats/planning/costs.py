"""The costs of one weight: the bytes of each rank, as the budget counts them, and whether a rank may be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from kflats.importance.weighting import Weighting
from kflats.methods import SVD, Method
from kflats.methods.protocol import largest_rank
from kflats.model.weights import Weight
from kflats.planning.calibration_data import CalibrationData
from kflats.recipe.recipe import Recipe

_FEW = 10  # outputs of a small head
_LOPSIDED = 10  # inputs to an output


@dataclass(frozen=True)
class WeightCosts:
    """One weight and its costs, in the bytes that the budget counts.

    Args:
        named: whether its own name was given, and not a pattern.
        counts_labels: whether the budget counts row labels.
        note: for the plan.
        counted: bytes of its codes, if they have one size and were counted because their bound did not fit.
    """

    weight: Weight
    recipe: Recipe
    named: bool
    counts_labels: bool
    note: str = ""
    counted: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix that the method is given."""
        n, d = self.weight.shape
        return (d, n) if self.recipe.matrix_rows == "out_features" else (n, d)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored number."""
        return self.recipe.torch_dtype(self.weight.dtype).itemsize

    @property
    def full(self) -> int:
        """The largest rank."""
        return min(self.shape)

    @property
    def dense(self) -> int:
        """Bytes of the weight as it is."""
        n, d = self.shape
        return self.weight.nbytes if self.counts_labels else n * d * self.itemsize

    @property
    def low_rank(self) -> Method:
        """The method that turns ranks into bytes: other methods are given the bytes of a pair."""
        return self.recipe.method if self.recipe.method.produces == "pair" else SVD()

    def cost(self, rank: int) -> int:
        """Bytes of a pair of ``rank``, without a bias."""
        index = 0 if self.counts_labels else self.low_rank.index_bytes(self.shape)
        return self.low_rank.cost(self.shape, rank, self.itemsize) - index

    def is_choice(self, rank: int) -> bool:
        """Whether the bytes of ``rank`` are enough for the method, and fewer numbers than the weight's are stored."""
        n, d = self.shape
        numbers = self.low_rank.cost(self.shape, rank, 1) - self.low_rank.index_bytes(self.shape)
        return self.cost(rank) >= self.least and numbers < n * d

    @property
    def is_small_head(self) -> bool:
        """A linear layer of a few outputs, classes perhaps, from many inputs."""
        n, d = self.weight.shape
        return self.weight.places[0].role in ("linear", "conv1d") and 1 < d <= _FEW and n >= _LOPSIDED * d

    def rank_within(self, nbytes: int) -> int:
        """The largest rank that ``nbytes`` hold, 0 if there is none."""
        return largest_rank(self.cost, self.full, nbytes)

    @property
    def least(self) -> int:
        """The least bytes that codec and method can be given."""
        recipe = self.recipe
        return recipe.codec.min_bytes(recipe.method, self.shape, self.itemsize, counts_labels=self.counts_labels)

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes of its codes if they do not depend on its share, else None: a bound until they are counted."""
        if self.counted is not None:
            return self.counted
        return self.recipe.codec.fixed_bytes(self.recipe.method, self.shape, self.itemsize)


def bias_bytes(weight: Weight, recipe: Recipe, weighting: Weighting, counts_labels: bool) -> int:
    """Bytes of a bias that the layer gains because its inputs are centred; 0 if it has or needs none."""
    if weighting.mean is None or weight.bias or weight.places[0].role == "embedding":
        return 0
    n, d = weight.shape
    return d * (weight.nbytes // (n * d) if counts_labels else recipe.torch_dtype(weight.dtype).itemsize)


def gained_bias_bytes(item: WeightCosts, data: CalibrationData) -> int:
    """Bytes of the bias that the layer of ``item`` gains under its importance; 0 for most."""
    if not item.recipe.importance.needs:
        return 0
    return bias_bytes(item.weight, item.recipe, data.weigh(item.weight, item.recipe), item.counts_labels)
