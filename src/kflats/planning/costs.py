"""Prices: what each rank of a weight costs in the bytes that a budget counts, and whether it is a choice at all."""

from __future__ import annotations

from dataclasses import dataclass

from kflats.importance.weighting import Weighting
from kflats.methods import SVD, Method
from kflats.model.weights import Weight
from kflats.recipe.recipe import Recipe

_FEW = 10  # outputs of a small head
_LOPSIDED = 10  # inputs to an output


@dataclass(frozen=True)
class WeightCosts:
    """One weight with its prices, in the bytes that the budget counts."""

    weight: Weight
    recipe: Recipe
    named: bool
    counts_labels: bool
    note: str = ""
    counted: int | None = None
    """Bytes of its codes, where those have one size and were counted because its bound did not fit."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix that the method is given."""
        n, d = self.weight.shape
        return (d, n) if self.recipe.matrix_rows == "out_features" else (n, d)

    @property
    def itemsize(self) -> int:
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
        """The method whose ranks measure bytes: methods that do not make a pair are given the bytes of one."""
        return self.recipe.method if self.recipe.method.produces == "pair" else SVD()

    def cost(self, rank: int) -> int:
        """Bytes of a pair of ``rank``, without a bias."""
        index = 0 if self.counts_labels else self.low_rank.index_bytes(self.shape)
        return self.low_rank.cost(self.shape, rank, self.itemsize) - index

    def is_choice(self, rank: int) -> bool:
        """Whether the method can live on the bytes of ``rank``, and stores fewer numbers than the weight has."""
        n, d = self.shape
        numbers = self.low_rank.cost(self.shape, rank, 1) - self.low_rank.index_bytes(self.shape)
        return self.cost(rank) >= self.least and numbers < n * d

    @property
    def is_small_head(self) -> bool:
        """A linear layer of a few outputs, classes perhaps, from many inputs."""
        n, d = self.weight.shape
        return self.weight.places[0].role in ("linear", "conv1d") and 1 < d <= _FEW and n >= _LOPSIDED * d

    def rank_within(self, nbytes: int) -> int:
        """The largest rank that ``nbytes`` hold; 0 for none."""
        return next((r for r in range(self.full, 0, -1) if self.cost(r) <= nbytes), 0)

    @property
    def least(self) -> int:
        """The least bytes that the method can live on."""
        recipe = self.recipe
        return recipe.codec.min_bytes(recipe.method, self.shape, self.itemsize, counts_labels=self.counts_labels)

    @property
    def whole(self) -> int | None:
        """The bytes it takes where that is one known number, whatever its share: a bound until they are counted."""
        if self.counted is not None:
            return self.counted
        return self.recipe.codec.fixed_bytes(self.recipe.method, self.shape, self.itemsize)


def bias_bytes(weight: Weight, recipe: Recipe, weighting: Weighting, counts_labels: bool) -> int:
    """What a bias costs that the layer gains because its inputs are centred; 0 where it has one, or needs none."""
    if weighting.mean is None or weight.bias or weight.places[0].role == "embedding":
        return 0
    n, d = weight.shape
    return d * (weight.nbytes // (n * d) if counts_labels else recipe.torch_dtype(weight.dtype).itemsize)
