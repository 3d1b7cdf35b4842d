"""What is summed of one weight while a calibration set passes, and what it comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kflats.capture import Use
from kflats.errors import KflatsError
from kflats.measured import Measured
from kflats.measurements import shape_of
from kflats.numerics.fisher import (
    COLUMN,
    ELEMENT,
    ROW,
    add_lookup_squares,
    add_squares,
    add_tied_squares,
    lower_gram,
    mirrored,
    nearest_product,
    wide,
)
from kflats.places import Weight

GRADIENTS = frozenset({ROW, COLUMN, ELEMENT, "output_gram"})
_SQUARES = (ROW, COLUMN, ELEMENT)
_UNFOLDED = 1 << 23  # numbers of a convolution's unfolded input at once


class Shared:
    """The last input's Gram: queries, keys and values are given one tensor, and one product serves all three."""

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self._found: tuple[Tensor, Tensor, int] | None = None

    def gram(self, given: Tensor, use: Use) -> tuple[Tensor, Tensor, int]:
        """(lower Gram, sum, number) of the positions that ``use`` sees, padding left out."""
        if given is not self._given or self._found is None:
            x = use.inputs(0, use.samples)
            rows = wide(x.flatten(0, 1) if use.mask is None else x[use.mask])
            self._given, self._found = given, (lower_gram(rows), rows.sum(0), len(rows))
        return self._found

    def forget(self) -> None:
        """After a batch: tensors are not kept alive for it."""
        self._given = self._found = None


class Sums:
    """Float64 sums of one weight, filled use by use; ``measured`` divides them."""

    def __init__(self, weight: Weight, needs: frozenset[str], device: torch.device) -> None:
        self.weight, self.needs = weight, needs
        roles = {place.role for place in weight.places}
        self.lookup, self.head = "embedding" in roles, "head" in roles
        self.samples = self.positions = self._head_positions = 0
        self._device = device
        self._squares = {key: self._zeros(key) for key in _SQUARES if key in needs}
        n, d = weight.shape
        self._inputs = self._mean = self._outputs = None
        if "input_gram" in needs:
            self._inputs = self._new(n) if self.lookup else self._new(n, n)
        if needs & {"input_mean", "input_gram"} and not self.lookup:
            self._mean = self._new(n)
        self._reads = self._new(n) if self.lookup else None
        if "output_gram" in needs:
            self._outputs = self._new(d, d)
        # A tied head: its inputs are (d,), its outputs (n,).
        tied = self.head and needs & {"input_gram", "output_gram"}
        self._hidden = self._new(d, d) if tied else None
        self._logits = self._new(n) if tied and "output_gram" in needs else None

    @property
    def wants_gradients(self) -> bool:
        """Whether a backward pass is needed."""
        return bool(self.needs & GRADIENTS)

    def enter(self, use: Use, given: Tensor, shared: Shared) -> None:
        """A use of the weight, in forward."""
        count = int(use.mask.sum()) if use.mask is not None else None
        if use.role == "embedding":
            assert self._reads is not None
            ids = use.x.flatten() if use.mask is None else use.x[use.mask]
            self._reads += torch.bincount(ids, minlength=len(self._reads))
            self.positions += ids.numel()
        elif use.role == "head":
            if self._hidden is not None:
                gram, _, number = shared.gram(given, use)
                self._hidden += gram
                self._head_positions += number
        elif use.role == "conv2d":
            self._enter_convolution(use)
        elif self._inputs is not None:
            gram, total, number = shared.gram(given, use)
            self._inputs += gram
            assert self._mean is not None
            self._mean += total
            self.positions += number
        else:
            if self._mean is not None:
                self._mean += wide(use.x.flatten(0, 1) if use.mask is None else use.x[use.mask]).sum(0)
            self.positions += use.x.shape[:2].numel() if count is None else count

    def leave(self, uses: list[Use]) -> None:
        """The gradients of one batch, all uses together: positions of all of them add before squaring."""
        if self.lookup:
            self._leave_table(uses)
            return
        samples = uses[0].samples
        step = samples
        if uses[0].role == "conv2d":
            each = sum(_gradient(use).shape[1] for use in uses) * self.weight.shape[0]
            step = max(1, _UNFOLDED // max(1, each))
        for start in range(0, samples, step):
            end = min(start + step, samples)
            g = torch.cat([_gradient(use)[start:end] for use in uses], 1) if len(uses) > 1 else _gradient(uses[0])
            g = g if len(uses) > 1 else g[start:end]
            if self._squares:
                parts = [use.inputs(start, end) for use in uses]
                add_squares(self._squares, torch.cat(parts, 1) if len(parts) > 1 else parts[0], g)
            if self._outputs is not None:
                self._outputs += lower_gram(g.flatten(0, 1))

    def measured(self) -> Measured:
        """The means; raises KflatsError where a sum is not finite."""
        n, d = self.weight.shape
        found: dict[str, Any] = {key: value / max(self.samples, 1) for key, value in self._squares.items()}
        positions = max(self.positions, 1)
        if self._inputs is not None:
            found["input_gram"] = (
                self._reads / positions if self._reads is not None else mirrored(self._inputs) / positions
            )
        if self._mean is not None:
            found["input_mean"] = self._mean / positions
        elif self._reads is not None and self.needs & {"input_mean", "input_gram"}:
            found["input_mean"] = self._reads / positions
        if self._outputs is not None:
            found["output_gram"] = mirrored(self._outputs) / max(self.samples, 1)
        if "counts" in self.needs and self._reads is not None:
            found["counts"] = self._reads.to(torch.int64)
        if self._hidden is not None:
            self._tie(found, mirrored(self._hidden) / max(self._head_positions, 1))
        for key, value in found.items():
            if not bool(torch.isfinite(value).all()):
                raise KflatsError(
                    f"the {key.replace('_', ' ')} of {self.weight.name} holds NaN or infinity",
                    cause="activations or gradients that overflow half precision",
                    hint="measure with the model in float32",
                )
        found = {key: value.cpu() for key, value in found.items()}
        seen = self.positions + (self._head_positions if not self.positions else 0)
        return Measured(n, head=self.head, samples=self.samples, positions=seen, columns=d, **found)

    def _enter_convolution(self, use: Use) -> None:
        each = use.inputs(0, 1)
        self.positions += use.samples * each.shape[1]
        if self._mean is None:
            return
        step = max(1, _UNFOLDED // max(1, each.numel()))
        for start in range(0, use.samples, step):
            rows = use.inputs(start, min(start + step, use.samples)).flatten(0, 1)
            if self._inputs is not None:
                self._inputs += lower_gram(rows)
            self._mean += rows.sum(0)

    def _leave_table(self, uses: list[Use]) -> None:
        read = [use for use in uses if use.role == "embedding"]
        heads = [use for use in uses if use.role == "head"]
        d, samples = self.weight.shape[1], uses[0].samples
        like = _gradient(uses[0])
        index = torch.cat([use.x for use in read], 1) if read else like.new_zeros(samples, 0, dtype=torch.int64)
        g = torch.cat([wide(_gradient(use)) for use in read], 1) if read else wide(like.new_zeros(samples, 0, d))
        if self._squares and not heads:
            add_lookup_squares(self._squares, index, g)
        elif self._squares:
            hidden = torch.cat([use.x for use in heads], 1)
            add_tied_squares(self._squares, index, g, hidden, torch.cat([_gradient(use) for use in heads], 1))
        if self._outputs is not None:
            self._outputs += lower_gram(g[index >= 0])
        if self._logits is not None:
            for use in heads:
                self._logits += torch.linalg.vector_norm(wide(_gradient(use)), dim=(0, 1)).square()

    def _tie(self, found: dict[str, Any], hidden: Tensor) -> None:
        """Both roles of a tied table in one Gram a side."""
        if self._logits is not None and self._outputs is not None:
            reads = (self._reads if self._reads is not None else torch.zeros_like(self._logits)) / max(
                self.positions, 1
            )
            pairs = [(reads, found["output_gram"]), (self._logits / max(self.samples, 1), hidden)]
            found["input_gram"], found["output_gram"] = nearest_product(pairs)
            if "input_gram" not in self.needs:
                del found["input_gram"]
        else:
            # ||e' h||^2 summed over hidden states, by its mean over directions: each is the head's output error.
            found["input_gram"] = found["input_gram"] + hidden.diagonal().mean()

    def _zeros(self, key: str) -> Tensor:
        return self._new(*shape_of(key, *self.weight.shape))

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _gradient(use: Use) -> Tensor:
    assert use.g is not None
    return use.g
