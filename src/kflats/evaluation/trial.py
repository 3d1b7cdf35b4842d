"""One run of a model shows what its code does with weights beside calling the layers that hold them.

``model.weights`` finds in the code of classes what reads a weight. Code may reach one in ways that it does not see: a
layer in a variable, a list or an argument, a lambda, ``named_parameters()``. A layer of factors has no dense tensor to
be read, and its tensors have other shapes. A model that changes its own weights when it runs would be saved changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kflats.common.errors import KflatsError, first_line
from kflats.evaluation.running import Batch, collate, device_of, drawn_samples, evaluating, modalities_of, run
from kflats.io.mapped import Watched, has_memory
from kflats.matrices.base import Matrix
from kflats.model.weights import compute_dtype, pretrained_models

_ATTRIBUTES = ("device", "grad", "is_cuda", "is_meta", "layout", "ndim", "requires_grad")
_SAME: frozenset[object] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        torch.Tensor.dim,
        torch.Tensor.get_device,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.is_floating_point,
    }
)
"""What factors have in common with the tensor that they stand for."""
_TYPE: object = getattr(torch.Tensor, "dtype").__get__  # noqa: B009 - mypy takes it for the value


_LIKE: frozenset[object] = frozenset({torch.Tensor.to, torch.Tensor.type_as})
"""Of what they are given beside the tensor itself, these read type and device."""


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
    """Run ``model`` on ``batch`` in eval mode, without gradients. Afterwards it is as it was, and so is the batch:
    nothing is written into parameters, and attributes, buffers and the state of torch's draws are put back.

    Limits: this is one run. What another branch of the code reads is not seen, nor what another thread reads, nor what
    the model has kept from an earlier run. A layer whose ``forward`` is called in place of the layer counts as read.
    What is changed inside an attribute (a list that grows) stays changed.

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
    reads, failed = _Reads(), None
    inputs = _own(batch, compute_dtype(model))
    named = dict(model.named_parameters(remove_duplicate=False))
    with _kept(model) as kept, reads.following(model), reads:
        try:
            run(model, inputs)
        except Exception as error:  # whatever the model's own code raises for inputs that are not enough for it
            failed = KflatsError(
                f"{type(model).__name__} cannot be run on these inputs alone: {first_line(error)[:200]}",
                cause="a model that reads several things at once, or texts that it cannot read",
            )
    written = tuple(sorted(kept.written))
    read, typed = (frozenset(n for n, p in named.items() if id(p) in of) for of in (reads.read, reads.typed))
    return Trial(read, typed, written, None if written else failed)


def tried_on_drawn(model: nn.Module) -> Trial:
    """As ``tried``, on drawn inputs: of the transformers model that ``model`` is, or that it holds, whose config says
    what it reads. Of other models nothing is shown.

    Raises:
        KflatsError: as ``drawn_samples``.
    """
    name, inner = next(pretrained_models(model), ("", None))
    if inner is None or not modalities_of(inner):
        return Trial()
    with _kept(inner) as kept:  # finding out what it reads together runs it, too
        batch = collate(drawn_samples(inner, 1), 0, device_of(inner))
    found = Trial(written=tuple(sorted(kept.written))) if kept.written else tried(inner, batch)
    if not name:
        return found
    read, typed = (frozenset(f"{name}.{one}" for one in of) for of in (found.read, found.typed))
    return Trial(read, typed, tuple(f"{name}.{one}" for one in found.written), found.failed)


def _own(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Copies of a batch's tensors; numbers as ``dtype`` where that is half precision."""
    half = dtype in (torch.float16, torch.bfloat16)

    def copied(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.to(dtype if half and value.is_floating_point() else value.dtype, copy=True)

    return {name: copied(value) for name, value in batch.items()}


@dataclass
class _Kept:
    """``written``: names of parameters that a run would have changed."""

    written: set[str] = field(default_factory=set)


@contextmanager
def _kept(model: nn.Module) -> Iterator[_Kept]:
    """Inside, ``model`` is in eval mode and may do what it wants; afterwards it is as it was."""
    kept = _Kept()
    named = dict(model.named_parameters(remove_duplicate=False))
    data = {name: p.data for name, p in named.items() if has_memory(p)}
    watched = Watched({name: table.detach() for name, table in data.items()})
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(module.__dict__)) for module in modules]
    entries = [(held, dict(held)) for module, _ in before for held in (module._parameters, module._modules)]
    clones: dict[int, Tensor] = {}
    devices = sorted({p.device.index or 0 for p in named.values() if p.device.type == "cuda"})

    def put_back() -> None:
        for held, entry in entries:
            held.clear()
            held.update(entry)  # type: ignore[arg-type]
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)

    with ExitStack() as stack:
        stack.callback(put_back)  # also after an interruption
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        # What dynamo has traced inside of a mode, it would run, or refuse, outside of it.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, _ in before:
            if module._buffers and not isinstance(module, Matrix):
                entries.append((module._buffers, dict(module._buffers)))  # type: ignore[arg-type]
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = clones.setdefault(id(buffer), buffer.clone())
        stack.enter_context(watched)
        try:
            yield kept
        finally:
            now = dict(model.named_parameters(remove_duplicate=False))
            changed = {n for n, p in named.items() if now.get(n) is not p}
            for name, table in data.items():
                if named[name].data_ptr() != table.data_ptr():  # ``parameter.data = ...``
                    changed.add(name)
                    named[name].data = table
            kept.written |= watched.written | changed


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
                # Hooks of others run outside of the two: they read the layer as other code does.
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True, prepend=True).remove)
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
                    type_alone = func == _TYPE or (func in _LIKE and value is not args[0])
                    (self.typed if type_alone else self.read).add(id(value))
        return func(*args, **kwargs)


def _tensors(values: tuple[object, ...]) -> Iterator[Tensor]:
    """Those given as arguments, or in a list."""
    for value in values:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor):
                yield one
