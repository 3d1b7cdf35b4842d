"""Where a layer's activations keep their samples: found by running a model on two samples and on three."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kflats.calibration.running import batch_size, take
from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import Batch, BatchValue
from kflats.model.weights import Weight, submodule


@dataclass(frozen=True)
class Layout:
    """Where samples are in an activation.

    ``axis`` holds them; or, with ``rows`` of each sample one after another, axis 0 does (as many as the batch's text
    has positions where ``rows`` is 0). None: they cannot be told apart.
    """

    axis: int | None
    rows: int | None = None

    def fits(self, x: Tensor, batch: Batch, samples: int) -> bool:
        """Whether an activation of this batch can have this layout."""
        if self.axis is None or x.ndim <= self.axis:
            return False
        each = 1 if self.rows is None else self.rows or text_length(batch)
        return x.shape[self.axis] == samples * each

    def batched(self, x: Tensor, samples: int, trailing: int) -> Tensor:
        """(B, T, ...) with ``trailing`` axes after the positions."""
        tail = x.shape[x.ndim - trailing :]
        return (x.movedim(self.axis, 0) if self.axis else x).reshape(samples, -1, *tail)


ALONE = Layout(None)


def places(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[nn.Module, Weight, str]]:
    """(module, weight, role) once per module and weight, however many names a module has."""
    seen = set()
    for weight in weights:
        for place in weight.places:
            module = submodule(model, place.name)
            if module is None:
                raise KflatsError(f"the model has no {place.name!r}", cause="weights of another model")
            if getattr(module, "groups", 1) != 1:
                raise KflatsError(
                    f"{place.name} is a grouped convolution, whose weight is no single matrix",
                    cause="each group has a matrix of its own",
                )
            if id(module) not in seen:
                seen.add(id(module))
                yield module, weight, place.role


def entering(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """A layer's input, however it was passed."""
    given = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(given, Tensor)
    return given


def find_layouts(
    model: nn.Module, weights: Sequence[Weight], batch: Batch, forward: Callable[[dict[str, BatchValue]], object]
) -> dict[int, Layout]:
    """Where each layer's input keeps its samples, by module id, found by running two samples and three.

    The third repeats the second. The axis that grows by one holds samples; one that grows by T holds samples and
    positions; where none does, or numbers differ (a table of positions that all samples share, an expert that sees
    some tokens), samples cannot be told apart. Layers that were not reached are not in the answer.
    """
    samples = batch_size(batch)
    second = min(1, samples - 1)
    runs = []
    for index in ([0, second], [0, second, second]):
        seen: dict[int, list[Tensor]] = {}
        with ExitStack() as stack, torch.no_grad():
            for module, _, _ in places(model, weights):

                def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, seen: Any = seen) -> None:
                    # Copies: a layer behind may overwrite them.
                    seen.setdefault(id(module), []).append(entering(args, kwargs).detach().clone())

                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            forward(take(batch, torch.tensor(index)))
        runs.append(seen)
    modules = {id(module): role for module, _, role in places(model, weights)}
    length = text_length(batch)
    return {key: _layout(two, runs[1].get(key, []), modules[key], length) for key, two in runs[0].items()}


def _layout(two: list[Tensor], three: list[Tensor], role: str, length: int) -> Layout:
    found = set()
    for a, b in zip(two, three, strict=False):
        positions = {"embedding": a.ndim, "conv2d": 1}.get(role, a.ndim - 1)
        found.add(_axis(a, b, positions, length) if a.ndim == b.ndim else ALONE)
    return found.pop() if len(two) == len(three) and len(found) == 1 else ALONE


def _axis(a: Tensor, b: Tensor, positions: int, length: int) -> Layout:
    grown = [i for i in range(a.ndim) if a.shape[i] != b.shape[i]]
    if len(grown) != 1 or grown[0] >= positions:
        return ALONE
    axis = grown[0]
    before, after = a.shape[axis], b.shape[axis]
    if before % 2 or after * 2 != before * 3 or not _alike(a, b.narrow(axis, 0, before)):
        return ALONE
    rows = before // 2
    if rows == 1:
        return Layout(axis)
    return Layout(0, 0 if rows == length else rows) if axis == 0 else ALONE


def text_length(batch: Batch) -> int:
    """Positions of a batch's text: the second axis of its ids, or of the first tensor that has one."""
    named = [batch.get("input_ids"), *batch.values()]
    return next((t.shape[1] for t in named if isinstance(t, Tensor) and t.ndim > 1), 1)


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # NaN is for the loss to be refused for; half precision differs with the batch.
    return torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2 * float(a.abs().max()), equal_nan=True)
