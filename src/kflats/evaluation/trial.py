"""One run of a model shows what its code does with weights beside calling the layers that hold them.

``model.weights`` finds in the code of classes what reads a weight. Code may reach one in ways that it does not see: a
layer in a variable, a list or an argument, a lambda, ``named_parameters()``. A layer of factors has no dense tensor to
be read, and its tensors have other shapes. A model that changes its own weights when it runs would be saved changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kflats.common.errors import KflatsError, first_line
from kflats.evaluation.running import Batch, evaluating, run
from kflats.io.mapped import Watched

_ATTRIBUTES = ("device", "grad", "is_cuda", "is_meta", "layout", "ndim", "requires_grad")
_SAME: frozenset[object] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        torch.Tensor.dim,
        torch.Tensor.get_device,
        torch.Tensor.is_floating_point,
        torch.is_floating_point,
    }
)
"""What factors have in common with the tensor that they stand for."""
_TYPE: object = getattr(torch.Tensor, "dtype").__get__  # noqa: B009 - mypy takes it for the value


@dataclass(frozen=True)
class Trial:
    """What a run has shown; by default nothing.

    Args:
        read: names of parameters whose numbers or shape were read outside of the calls of the layers that hold them.
        typed: names of those whose type was read there.
        written: names of parameters that the run would have changed.
        failed: why the model could not be run.
    """

    read: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()
    written: tuple[str, ...] = ()
    failed: KflatsError | None = None


def tried(model: nn.Module, batch: Batch) -> Trial:
    """Run ``model`` on ``batch`` in eval mode, without gradients. Nothing is written into its parameters.

    Limit: this is one run. What another branch of the code reads is not seen, nor what a layer reads of itself where
    its ``forward`` is called in place of the layer.

    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    ...     def forward(self, x):
    ...         first, second = self.layers
    ...         return first(x) @ second.weight
    >>> sorted(tried(Two(), {"x": torch.ones(1, 3)}).read)
    ['layers.1.weight']
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    reads = _Reads()
    watched = Watched({name: table.detach() for name, table in named.items() if not table.is_meta})
    failed: KflatsError | None = None
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(reads.following(model))
        stack.enter_context(watched)
        stack.enter_context(reads)
        try:
            run(model, batch)
        except Exception as error:  # whatever the model's own code raises for inputs that are not enough for it
            failed = KflatsError(
                f"{type(model).__name__} cannot be run on these inputs alone: {first_line(error)[:200]}",
                cause="a model that reads several things at once, or texts that it cannot read",
            )
    written = tuple(sorted(watched.written))
    read, typed = (frozenset(n for n, p in named.items() if id(p) in of) for of in (reads.read, reads.typed))
    return Trial(read, typed, written, None if written else failed)


class _Reads(TorchFunctionMode):
    """Notes the parameters (ids) that are given to an operation of torch while none of their own layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.typed = set[int](), set[int]()
        self._running: list[nn.Module] = []

    def following(self, model: nn.Module) -> ExitStack:
        """Know inside which layer runs."""
        stack = ExitStack()
        for module in model.modules():
            if module._parameters:
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        return stack

    def _enter(self, module: nn.Module, _: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SAME:
            own = self._running[-1]._parameters.values() if self._running else ()
            for value in _tensors((*args, *kwargs.values())):
                if isinstance(value, nn.Parameter) and not any(value is held for held in own):
                    (self.typed if func == _TYPE else self.read).add(id(value))
        return func(*args, **kwargs)


def _tensors(values: tuple[object, ...]) -> Iterator[Tensor]:
    """Those given as arguments, or in a list."""
    for value in values:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor):
                yield one
