"""Sums over a calibration set for one weight, and the statistics that follow from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kflats.calibration.hooks import LayerCall
from kflats.calibration.measurements import Sums
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Measured
from kflats.model.weights import Weight
from kflats.numerics.gram import mirror_
from kflats.numerics.statistics import (
    COLUMN,
    ROW,
    Moments,
    Products,
    add_lookup_squares,
    add_squares,
    add_tied_squares,
    gradient_rows,
    nearest_product,
    wide,
)

GRADIENTS = frozenset({ROW, COLUMN, "output_gram", "fisher_gram"})
WIDEST = 16384
"""Outputs of a layer from which on errors of different outputs count apart: the Gram of a head of 128,000 words would
take 131 GB."""
_UNFOLDED = 1 << 23  # numbers of a convolution's unfolded input at once


class Inputs:
    """The rows of the last input. Query, key and value layers read one tensor, and share one product of it."""

    def __init__(self) -> None:
        self.products = Products()
        self._entered: Tensor | None = None
        self._rows: Tensor | None = None

    def rows(self, entered: Tensor, call: LayerCall) -> Tensor:
        """(P, n) inputs of one call without padding, as a copy, because later layers may overwrite the tensor."""
        if entered is not self._entered or self._rows is None:
            x = call.x
            self._entered, self._rows = entered, wide(x.flatten(0, 1).clone() if call.mask is None else x[call.mask])
        return self._rows

    def forget(self) -> None:
        """Free the tensors of a batch."""
        self._entered = self._rows = None


def _kept(weight: Weight, needs: frozenset[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The sums that ``needs`` take, by name: lengths of vectors, and sides of Grams."""
    n, d = weight.shape
    roles = {place.role for place in weight.places}
    lookup, fisher, outputs = "embedding" in roles, "fisher_gram" in needs, "output_gram" in needs
    inputs = bool(needs & {"input_gram", "input_mean"})
    # A tied head: its inputs are (d,), its outputs (n,).
    tied = "head" in roles and bool(needs & {"input_gram", "output_gram"})
    apart = outputs and (d > WIDEST or "experts" in roles)
    vectors = {
        ROW: (n, ROW in needs),
        COLUMN: (d, COLUMN in needs),
        "reads": (n, lookup),
        "fisher_reads": (n, lookup and fisher),
        "logits": (n, tied and outputs),
        "output squares": (d, apart),
    }
    grams = {
        "inputs": (n, inputs and not lookup),
        "outputs": (d, outputs and not apart),
        "hidden": (d, tied),
        "fisher": (n + 1, fisher and not lookup),
    }
    lengths, sides = ({key: size for key, (size, kept) in of.items() if kept} for of in (vectors, grams))
    return lengths, sides


class Accumulator:
    """The sums over the samples of one block for one weight; ``measured`` turns them into means."""

    def __init__(self, weight: Weight, needs: frozenset[str], device: torch.device, inputs: Inputs) -> None:
        self.weight, self.needs, self._from = weight, needs, inputs
        self._positions = self._head_positions = 0
        self._fisher_total = 0.0
        lengths, sides = _kept(weight, needs)
        self._vectors = {key: torch.zeros(n, dtype=torch.float64, device=device) for key, n in lengths.items()}
        self._squares = {key: self._vectors[key] for key in (ROW, COLUMN) if key in needs}
        shared = {"inputs": inputs.products, "hidden": inputs.products}
        self._moments = {key: Moments(n, shared.get(key), device) for key, n in sides.items()}

    @staticmethod
    def nbytes(weight: Weight, needs: frozenset[str]) -> int:
        """An upper bound of the bytes that the sums take."""
        lengths, sides = _kept(weight, needs)
        grams = (Moments.nbytes(n, 2 if key == "fisher" else 1) for key, n in sides.items())
        return 8 * sum(lengths.values()) + sum(grams)

    @property
    def wants_gradients(self) -> bool:
        """Whether a backward pass is needed."""
        return bool(self.needs & GRADIENTS)

    def add_input(self, call: LayerCall, entered: Tensor) -> None:
        """Add the input of one call, in forward."""
        if call.role == "embedding":
            ids = call.x.flatten() if call.mask is None else call.x[call.mask]
            self._vectors["reads"] += torch.bincount(ids, minlength=self.weight.shape[0])
            self._positions += ids.numel()
        elif call.role == "head":
            self._head_positions += _count(call)
            if "hidden" in self._moments:
                self._moments["hidden"].add(self._from.rows(entered, call))
        else:
            self._positions += _count(call)
            if "inputs" in self._moments:
                for rows in self._rows(entered, call):
                    self._moments["inputs"].add(rows)

    def add_gradients(self, calls: list[LayerCall]) -> None:
        """Add one batch's gradients, of all calls of the weight together: their positions add before squaring."""
        if "reads" in self._vectors:
            self._add_table(calls)
            return
        samples, expert = calls[0].samples, calls[0].expert
        width = _gradient(calls[0]).shape[2]
        part = slice(expert * width, (expert + 1) * width)  # of the outputs: those of one expert, or all
        squares = {key: sums[part] if key == COLUMN else sums for key, sums in self._squares.items()}
        step = samples
        if calls[0].role == "conv2d":
            each = sum(_gradient(call).shape[1] for call in calls) * self.weight.shape[0]
            step = max(1, _UNFOLDED // max(1, each))
        for start in range(0, samples, step):
            end = min(start + step, samples)
            g = _joined([_gradient(call)[start:end] for call in calls])
            if self._squares or "fisher" in self._moments:
                x = _joined([call.inputs(start, end) for call in calls])
                if self._squares:
                    add_squares(squares, x, g)
                if "fisher" in self._moments:
                    # The bias is the weight's last row: it reads a constant input. Experts gain none.
                    constant = x.new_full((*x.shape[:2], 1), float(calls[0].role != "experts"))
                    with_bias = torch.cat([wide(x), constant], 2)
                    self._moments["fisher"].add(*gradient_rows(with_bias, g))
                    self._fisher_total += float(wide(g).square().sum(dtype=torch.float64))
            if "outputs" in self._moments:
                self._moments["outputs"].add(_reached(g.flatten(0, 1)))
            if "output squares" in self._vectors:
                self._vectors["output squares"][part] += wide(g).square().sum((0, 1), dtype=torch.float64)

    def sums(self, samples: int) -> Sums:
        """The sums of the block of ``samples`` samples; the accumulator cannot be used afterwards."""
        tensors = self._vectors | {"fisher_total": torch.tensor(self._fisher_total, dtype=torch.float64)}
        for key, one in self._moments.items():
            tensors[f"{key} gram"], tensors[f"{key} sum"] = one.finish()
        places = {"positions": self._positions, "head_positions": self._head_positions}
        return Sums(tensors, {"samples": samples} | places)

    def _rows(self, entered: Tensor, call: LayerCall) -> Iterator[Tensor]:
        """(P, n) inputs of a call; those of a convolution a few samples at a time."""
        if call.role != "conv2d":
            yield self._from.rows(entered, call)
            return
        step = max(1, _UNFOLDED // max(1, call.inputs(0, 1).numel()))
        for start in range(0, call.samples, step):
            yield call.inputs(start, min(start + step, call.samples)).flatten(0, 1)

    def _add_table(self, calls: list[LayerCall]) -> None:
        read = [call for call in calls if call.role == "embedding"]
        heads = [call for call in calls if call.role == "head"]
        d, samples = self.weight.shape[1], calls[0].samples
        like = _gradient(calls[0])
        index = torch.cat([call.x for call in read], 1) if read else like.new_zeros(samples, 0, dtype=torch.int64)
        g = torch.cat([wide(_gradient(call)) for call in read], 1) if read else wide(like.new_zeros(samples, 0, d))
        if self._squares and not heads:
            add_lookup_squares(self._squares, index, g)
        elif self._squares:
            hidden = torch.cat([call.x for call in heads], 1)
            add_tied_squares(self._squares, index, g, hidden, torch.cat([_gradient(call) for call in heads], 1))
        if "outputs" in self._moments:
            self._moments["outputs"].add(_reached(g[index >= 0]))
        if "fisher_reads" in self._vectors:
            size = g[index >= 0].square().sum(1, dtype=torch.float64)
            self._vectors["fisher_reads"].index_add_(0, index[index >= 0], size)
            self._fisher_total += float(size.sum())
        if "logits" in self._vectors:
            for call in heads:
                self._vectors["logits"] += torch.linalg.vector_norm(wide(_gradient(call)), dim=(0, 1)).square()


def measured(weight: Weight, needs: frozenset[str], sums: Sums) -> Measured:
    """The means of ``sums`` over all blocks; ``sums`` are changed in place.

    Raises:
        KflatsError: a sum that is not finite.
    """
    tensors, counts = sums.tensors, sums.counts
    samples, positions = max(counts["samples"], 1), max(counts["positions"], 1)
    means = {key: tensors[key].div_(samples) for key in (ROW, COLUMN) if key in tensors}
    if "reads" in tensors:
        shares = tensors["reads"] / positions
        means |= {key: shares for key in ("input_gram", "input_mean") if key in needs}
        if "counts" in needs:
            means["counts"] = tensors["reads"].to(torch.int64)
    elif "inputs gram" in tensors:
        means |= {"input_gram": _gram(sums, "inputs", positions), "input_mean": tensors["inputs sum"].div_(positions)}
        if weight.places[0].role == "experts":  # no bias that could take the mean
            means["input_mean"].zero_()
    total = float(tensors["fisher_total"]) or 1.0
    if "fisher gram" in tensors:
        means["fisher_gram"] = _gram(sums, "fisher", total)
    elif "fisher_reads" in tensors:
        means["fisher_gram"] = tensors["fisher_reads"] / total
    if "outputs gram" in tensors:
        means["output_gram"] = _gram(sums, "outputs", samples)
    elif "output squares" in tensors:
        means["output_gram"] = tensors["output squares"].div_(samples)
    if "hidden gram" in tensors:
        _tie(means, sums)
    for key, value in means.items():
        # The sum of numbers that are not all finite is not finite, and it needs no copy.
        if not bool(torch.isfinite(value.sum())):
            raise KflatsError(
                f"the {key.replace('_', ' ')} of {weight.name} holds NaN or infinity",
                cause="activations or gradients that overflow half precision",
                hint="measure with the model in float32",
            )
    n, d = weight.shape
    head = any(place.role == "head" for place in weight.places)
    seen = counts["positions"] or counts["head_positions"]
    kept = {key: value.cpu() for key, value in means.items()}
    return Measured(n, head=head, samples=counts["samples"], positions=seen, columns=d, **kept)


def _gram(sums: Sums, key: str, count: float) -> Tensor:
    gram = sums.tensors[f"{key} gram"]
    mirror_(gram)
    return gram.div_(count)


def _tie(means: dict[str, Tensor], sums: Sums) -> None:
    """Both roles of a tied table in one Gram for each side."""
    tensors, counts = sums.tensors, sums.counts
    hidden = _gram(sums, "hidden", max(counts["head_positions"], 1))
    if "logits" in tensors:
        reads = means.get("fisher_gram", tensors["reads"] / max(counts["positions"], 1))
        pairs = [(reads, means["output_gram"]), (tensors["logits"] / max(counts["samples"], 1), hidden)]
        left, means["output_gram"] = nearest_product(pairs)
        means |= dict.fromkeys(means.keys() & {"input_gram", "fisher_gram"}, left)
    elif "input_gram" in means:
        # ||e' h||^2 summed over hidden states, by its mean over directions: each is the head's output error.
        means["input_gram"] = means["input_gram"] + hidden.diagonal().mean()


def _joined(parts: list[Tensor]) -> Tensor:
    """(B, T, d) activations of all calls of one weight, their positions side by side."""
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _gradient(call: LayerCall) -> Tensor:
    assert call.g is not None
    return call.g


def _count(call: LayerCall) -> int:
    """The number of positions of a call, without padding."""
    if call.role == "conv2d":
        return call.samples * call.inputs(0, 1).shape[1]
    return call.x.shape[:2].numel() if call.mask is None else int(call.mask.sum())


def _reached(g: Tensor) -> Tensor:
    """A copy of the rows that are not zero: a loss that reads one position has few gradients in the last layer."""
    g = wide(g)
    kept = torch.linalg.vector_norm(g, dim=1) != 0  # a row whose square underflows adds nothing to the Gram
    return g.clone() if bool(kept.all()) else g[kept]
