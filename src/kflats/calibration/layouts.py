"""The axis of a layer's activations that holds the samples, found by running a model on two samples and on three."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import Batch, BatchValue
from kflats.evaluation.running import batch_size, take
from kflats.model.weights import Weight, submodule


@dataclass(frozen=True)
class Layout:
    """The place of the samples in an activation: axis 0, with ``rows`` rows of each sample one after another.

    ``rows`` is 0 if a sample has as many rows as the batch's text has positions, and None if the samples cannot be told
    apart. ``repeated``: the layer reads one row of ids for all samples (a table of positions), which is repeated for
    each sample while statistics are measured.
    """

    rows: int | None
    repeated: bool = False

    def fits(self, x: Tensor, batch: Batch, samples: int) -> bool:
        """Whether an activation of this batch can have this layout."""
        return self.rows is not None and x.ndim > 0 and x.shape[0] == samples * (self.rows or text_length(batch))


ALONE = Layout(None)


def by_sample(x: Tensor, samples: int, trailing: int) -> Tensor:
    """(B, T, ...) with ``trailing`` axes after the positions, of an activation that a layout fits."""
    return x.reshape(samples, -1, *x.shape[x.ndim - trailing :])


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
                    f"{place.name} is a grouped convolution, which is not supported",
                    cause="each group has a matrix of its own",
                )
            if id(module) not in seen:
                seen.add(id(module))
                yield module, weight, place.role


def entering(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """The input of a layer: its first argument, by position or by name."""
    entered = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(entered, Tensor)
    return entered


def find_layouts(
    model: nn.Module, weights: Sequence[Weight], batch: Batch, forward: Callable[[dict[str, BatchValue]], object]
) -> dict[int, Layout]:
    """The layout of each layer's input, by module id, found by running the model on two samples and on three.

    The third sample repeats the second. If axis 0 grows by half, it holds samples. Otherwise, or if the numbers differ
    (a table of positions that all samples share, an expert that sees some tokens), samples cannot be told apart. Layers
    that were not reached are not in the result.
    """
    second = min(1, batch_size(batch) - 1)
    roles = {id(module): (module, role) for module, _, role in places(model, weights)}
    runs: list[dict[int, list[Tensor]]] = []
    for index in ([0, second], [0, second, second]):
        seen: dict[int, list[Tensor]] = {}

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, seen: Any = seen) -> None:
            # Copies: later layers may overwrite them.
            seen.setdefault(id(module), []).append(entering(args, kwargs).detach().clone())

        with ExitStack() as stack, torch.no_grad():
            for module, _ in roles.values():
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            forward(take(batch, torch.tensor(index)))
        runs.append(seen)
    length = text_length(batch)
    layouts = {key: _layout(two, runs[1].get(key, []), roles[key][1], length) for key, two in runs[0].items()}
    shared = {
        key: roles[key][0]
        for key, layout in layouts.items()
        if layout == ALONE
        and roles[key][1] == "embedding"
        and all(len(ids) == 1 and ids.ndim == 2 for ids in runs[0][key])
    }
    if shared and _same_when_repeated(shared.values(), take(batch, torch.tensor([0, second])), forward):
        layouts |= dict.fromkeys(shared, Layout(1, repeated=True))
    return layouts


@contextmanager
def inputs_repeated(modules: Iterable[nn.Module], samples: Callable[[], int]) -> Iterator[None]:
    """Inside, each module's ids (1, T) are repeated for ``samples()`` samples where gradients are recorded.

    Without gradients an objective may run the model on another number of samples.
    """

    def repeat(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        ids = entering(args, kwargs)
        wide = ids.expand(samples(), *ids.shape[1:]) if len(ids) == 1 and torch.is_grad_enabled() else ids
        return ((wide, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): wide})

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(repeat, with_kwargs=True).remove)
        yield


def _same_when_repeated(
    modules: Iterable[nn.Module], batch: Batch, forward: Callable[[dict[str, BatchValue]], object]
) -> bool:
    """Whether the losses of two samples stay as they are."""
    with torch.enable_grad():
        before = forward(dict(batch))
        try:
            with inputs_repeated(modules, lambda: 2):
                after = forward(dict(batch))
        except RuntimeError:  # the model reads the shape of what the table gives
            return False
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape == after.shape and _alike(before, after)


def _layout(two: list[Tensor], three: list[Tensor], role: str, length: int) -> Layout:
    layouts = {_rows(a, b, role, length) for a, b in zip(two, three, strict=False)}
    return layouts.pop() if len(two) == len(three) and len(layouts) == 1 else ALONE


def _rows(a: Tensor, b: Tensor, role: str, length: int) -> Layout:
    """The layout of a layer's input, which is ``a`` for two samples and ``b`` for three."""
    axes = 1 if role in ("embedding", "conv2d") else 2
    if min(a.ndim, b.ndim) < axes or a.shape[1:] != b.shape[1:] or 2 * len(b) != 3 * len(a):
        return ALONE
    rows = len(a) // 2
    return Layout(0 if rows == length > 1 else rows) if rows and _alike(a, b[: len(a)]) else ALONE


def text_length(batch: Batch) -> int:
    """Positions of a batch's text: the second axis of its ids, or of the first tensor that has one."""
    named = [batch.get("input_ids"), *batch.values()]
    return next((t.shape[1] for t in named if isinstance(t, Tensor) and t.ndim > 1), 1)


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # The check of the loss refuses NaN. Half precision rounds differently in a larger batch.
    return torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2 * float(a.abs().max()), equal_nan=True)
