"""Offers: the ways to store one weight, each with its bytes and what it loses, from which a budget chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kflats.allocate.allocate import Curve
from kflats.allocate.calibration import Data
from kflats.allocate.prices import Priced, bias_bytes
from kflats.allocate.rates import Option, measured_options
from kflats.methods import PAIRS, SVD, Best
from kflats.numerics.rows import TensorRows
from kflats.swap.places import dense_weight


@dataclass(frozen=True)
class Offers:
    """Ways to store one weight, ``bias`` bytes of each being for a bias that the layer gains; ``whole``: the error if
    nothing were stored."""

    options: tuple[Option, ...]
    bias: int
    whole: float


def offers(model: nn.Module, item: Priced, data: Data) -> Offers:
    """All that the budget may choose from for one weight."""
    weighting, table = data.weigh(item.weight, item.recipe), dense_weight(model, item.weight)
    bias = bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)
    errors = data.curve(table, item.weight, item.recipe, weighting).clamp_min(0)
    if item.recipe.is_coded or is_best(item):
        turned = item.recipe.rows == "outputs"
        rows, there = TensorRows(table.T if turned else table), weighting.transposed() if turned else weighting
        dtype = getattr(torch, item.weight.dtype)
        pairs = item.weight.places[0].role == "conv2d"
        made = measured_options(rows, there.to(table.device), item.recipe, dtype, errors, pairs_only=pairs)
        return Offers(made, bias, float(errors[0]))
    svd, pair = isinstance(item.recipe.method, SVD), isinstance(item.recipe.method, PAIRS)
    options = []
    for rank in filter(item.is_choice, range(1, item.full + 1)):
        note = f"rank {rank} of {item.full}" if pair else f"the bytes of rank {rank} of {item.full}"
        judged = "relative error" if svd else "relative error of an SVD" if pair else ""
        options.append(Option(item.recipe, item.cost(rank), float(errors[rank]), note, judged))
    return Offers(tuple(options), bias, float(errors[0]))


def curve_of(item: Priced, offers: Offers, relative: bool) -> Curve:
    """Place 0 is a weight of which nothing is stored, which is no choice."""
    unit = offers.whole if relative and offers.whole > 0 else 1.0
    errors = torch.tensor([offers.whole, *(option.error for option in offers.options)], dtype=torch.float64) / unit
    costs = torch.tensor([0, *(option.nbytes + offers.bias for option in offers.options)])
    return Curve(item.weight.name, errors, costs, item.dense)


def is_best(item: Priced) -> bool:
    """Whether kflats chooses how the weight is stored."""
    return isinstance(item.recipe.method, Best)
