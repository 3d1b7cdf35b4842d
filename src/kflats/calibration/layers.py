"""A model as a chain of layers, measured one layer after another, so that the sums of one layer are in memory:

    h_0 = before(batch),    h_k+1 = layer_k(h_k),    loss = after(h_L)

One forward pass writes the inputs h_k of all layers to disk. Each layer is then run again, the last one first. Its
backward pass begins with the gradient by its output, and gives the gradient by its input for the layer before it. So
every layer is run twice, however many passes its sums take, and its numbers are read from disk in order. What is
outside of the layers (tables, heads) is measured at the end, with the layers left out.

The numbers are those of a pass through the whole model: each layer computes the same from the same inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.running import Batch
from kflats.io.mapped import MAPPED_TYPES, Spill
from kflats.model.weights import Weight, module_of

Losses: TypeAlias = Callable[[Batch, int], Tensor | None]
"""Runs the model on a batch, whose first sample has this number; the losses, or None if no gradients are needed."""
Step: TypeAlias = Callable[[Batch, int], None]
"""Runs a part of the model forward and backward on a batch, whose first sample has this number."""


@dataclass(frozen=True)
class Pass:
    """Weights that are measured together. ``what``: its name in progress. ``step``: runs the part of the model that
    holds them; None: all of it is run."""

    what: str
    weights: Sequence[Weight]
    step: Step | None = None


def longest_list(model: nn.Module) -> tuple[nn.Module, ...]:
    """The layers of the ``nn.ModuleList`` with the most numbers; () where no list has two different layers.

    >>> len(longest_list(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})))
    3
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(set(m)) == len(m) > 1]
    most = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return () if most is None else tuple(most)


@dataclass
class _OnDisk:
    """A tensor in a mapped file, or on its way there, and the device that it came from."""

    mapped: Tensor
    device: torch.device

    def copy(self) -> Tensor:
        """On its device: a layer may write into its input, and what is mapped is read-only."""
        return self.mapped.to(self.device, copy=True)


@dataclass
class _Trace:
    """What one batch brought to the layers.

    ``states``: h_0 .. h_L. ``calls``: the other arguments of each layer. ``gradient``: by the output of the layer that
    is run next; by h_0 in the end.
    """

    states: list[_OnDisk] = field(default_factory=list)
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = field(default_factory=list)
    gradient: _OnDisk | None = None


class _HiddenState:
    """Stands in arguments where the state comes in."""


_STATE = _HiddenState()


class Chain:
    """The layers of one model.

    Args:
        model: ``frozen``. layers: of one list of it. gradients: whether gradients are measured.
        losses: as ``Losses``. spill: where the inputs of layers go.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], gradients: bool, losses: Losses, spill: Spill
    ) -> None:
        self._model, self._layers, self._gradients = model, tuple(layers), gradients
        self._losses, self._spill = losses, spill
        self._slot: int | str = 0
        self._wrapped: list[type[Any] | None] = [None] * len(layers)
        self._traces: dict[int, _Trace] = {}

    def holds(self, batch: Batch, weights: Sequence[Weight], losses: Losses) -> bool:
        """Whether the layers are a chain: each is called once, in order, with the output of the one before; nothing
        else reads an output but the last one's; no other argument depends on the numbers of the model; all of them can
        be kept in files; and no weight is of two layers.

        Gradients show what depends on what, also where none are measured.

        Args:
            batch: one to try. losses: of it, with gradients in any case.
        """
        uses = Counter(id(module) for layer in self._layers for module in layer.modules())
        if max(uses.values()) > 1 or any(self._home(weight) is None for weight in weights):
            return False
        inner = {id(p) for layer in self._layers for p in layer.parameters()}
        outer = [p for p in self._model.parameters() if id(p) not in inner and p.is_floating_point()]
        entered, states = list[Tensor](), list[Tensor]()
        fits = True

        def enter(k: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
            nonlocal fits
            state = self._find_state(args, kwargs, states[-1] if k else None)
            leaves = list(_leaves((args, kwargs)))
            others = [leaf for leaf in leaves if leaf is not state]
            fits &= k == len(states) and state is not None and not any(leaf.requires_grad for leaf in others)
            fits &= all(leaf.dtype in MAPPED_TYPES for leaf in leaves)
            if state is None:
                return torch.zeros(())
            entered.append(state.detach().requires_grad_())
            return entered[-1].clone()  # a layer may write into its input

        def leave(k: int, state: Tensor) -> Tensor:
            states.append(state.detach().requires_grad_())
            return states[-1]

        try:
            for p in outer:
                p.requires_grad_()
            with self._watched(enter, leave, gradients=True), torch.enable_grad():
                given = losses(batch, 0)
            if not fits or len(states) != len(self._layers) or given is None:
                return False
            if not given.requires_grad:  # nothing reads any output
                return True
            # Nothing reads what a layer is given or computes inside, but through the last output.
            found = torch.autograd.grad(given.sum(), [*entered, *states[:-1]], allow_unused=True)
            return all(gradient is None for gradient in found) and self._leaves_out(
                states[-1].detach(), given, lambda: losses(batch, 0)
            )
        except (_NoChain, KflatsError, RuntimeError, TypeError, ValueError, IndexError):
            return False  # it is measured in passes through the whole model
        finally:
            for p in outer:
                p.requires_grad_(False)

    def _leaves_out(self, last: Tensor, given: Tensor, run: Callable[[], Tensor | None]) -> bool:
        """Whether the model without its layers gives the losses that it has, and calls no module inside a layer.

        Args:
            last: the output of the last layer. given: the losses. run: runs the model once more.
        """
        called: list[nn.Module] = []
        with ExitStack() as stack, self._left_out(last, []):
            for module in (module for layer in self._layers for module in layer.modules()):
                stack.callback(module.register_forward_hook(lambda module, *_: called.append(module)).remove)
            again = run()
        return again is not None and not called and torch.equal(again, given)

    def passes(
        self,
        blocks: Mapping[int, list[tuple[int, Batch]]],
        weights: Sequence[Weight],
        groups: Callable[[Sequence[Weight]], Iterator[list[Weight]]],
    ) -> Iterator[Pass]:
        """Groups of weights in the order in which they are measured.

        Args:
            blocks: the batches that are run here, each with the number of its first sample.
            weights: all that are measured.
            groups: divides weights by the memory that their sums take.
        """
        items = [item for block in blocks.values() for item in block]
        self.start(items)
        homes = {weight.name: self._home(weight) for weight in weights}
        count = len(self._layers)
        for k in reversed(range(count)):
            inside = list(groups([weight for weight in weights if homes[weight.name] == k]))
            arrived: dict[int, _OnDisk] = {}

            def step(batch: Batch, first: int, k: int = k, arrived: dict[int, _OnDisk] = arrived) -> None:
                gradient = self._run_layer(k, first)
                if gradient is not None and first not in arrived:
                    arrived[first] = self._kept(gradient)

            for group in inside:
                yield Pass(f"measuring layer {count - k} of {count}", group, step)
            if not inside and self._gradients:
                for first, batch in items:
                    step(batch, first)
            for first, gradient in arrived.items():
                self._traces[first].gradient = gradient
        for group in groups([weight for weight in weights if homes[weight.name] == -1]):
            yield Pass("measuring tables and heads", group, self._run_ends)

    def start(self, items: Iterable[tuple[int, Batch]]) -> None:
        """Run the model on batches, each with the number of its first sample, and keep what its layers are given."""
        for first, batch in items:
            self._traces[first] = self._traced(batch, first)

    def enter(self, items: Iterable[tuple[int, Batch]]) -> None:
        """As ``start``, but without the states between layers. Where the other arguments of layers do not depend on
        them, as the first batch shows, layers are not computed, and h_0 stands for h_L too."""
        left_out: bool | None = None
        for first, batch in items:
            trace = None if left_out is False else self._entered(batch, first)
            if left_out is None:
                whole = self._traced(batch, first)
                left_out = trace is not None and _same(trace.calls, whole.calls)
            if not left_out or trace is None:
                trace = self._traced(batch, first)
                trace = replace(trace, states=[trace.states[0], trace.states[-1]])
            self._traces[first] = trace

    def state(self, k: int, first: int) -> Tensor:
        """A copy of h_k of a batch that was run."""
        return self._traces[first].states[k].copy()

    def first_state(self, first: int) -> Tensor:
        """h_0 of a batch that was run, on disk."""
        return self._traces[first].states[0].mapped

    def entered(self, batch: Batch, first: int) -> Tensor:
        """h_0 of a batch that was run, as the model computes it now: what is before the layers may have changed."""
        entered = list[Tensor]()
        with self._left_out(self.state(-1, first), entered):
            self._losses(batch, first)
        return entered[-1]

    def _entered(self, batch: Batch, first: int) -> _Trace | None:
        """h_0 and the other arguments of all layers, each of which gives what it is given; None if the model does not
        run so."""
        trace = _Trace()
        try:
            with self._keeping() as kept:

                def seen(state: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
                    if not trace.states:
                        trace.states.append(kept(state))  # as it is now: what follows may write into it
                    trace.calls.append(_mapped((args, kwargs), lambda leaf: _STATE if leaf is state else kept(leaf)))

                with self._left_out(None, [], seen):
                    self._losses(batch, first)
        except (KflatsError, RuntimeError, TypeError, ValueError, IndexError):
            return None
        return trace if trace.states else None

    def output(self, k: int, first: int, state: Tensor) -> Tensor:
        """What layer k gives for ``state`` in place of h_k of a batch, with its other arguments as they were."""
        args, kwargs = _mapped(self._traces[first].calls[k], lambda leaf: state if leaf is _STATE else leaf.copy())
        return _state_of(self._layers[k](*args, **kwargs))

    def _home(self, weight: Weight) -> int | None:
        """The layer that a weight is in, -1 for none, None for several."""
        modules = [module_of(self._model, place) for place in weight.places]
        homes = {self._homes.get(id(module), -1) for module in modules}
        return homes.pop() if len(homes) == 1 else None

    @property
    def _homes(self) -> dict[int, int]:
        return {id(module): k for k, layer in enumerate(self._layers) for module in layer.modules()}

    @contextmanager
    def _keeping(self) -> Iterator[Callable[[Tensor], _OnDisk]]:
        """What puts arguments of one batch on disk, each once: all of them at the end, in one file."""
        # By object and version: a model may write into an argument between two layers. The original is kept, so that no
        # other tensor takes its id.
        stored: dict[tuple[int, int], tuple[Tensor, _OnDisk]] = {}

        def kept(leaf: Tensor) -> _OnDisk:
            key = id(leaf), 0 if leaf.is_inference() else leaf._version
            if key not in stored:
                stored[key] = leaf, _OnDisk(leaf.detach().to("cpu", copy=True), leaf.device)
            return stored[key][1]

        yield kept
        leaves = [leaf for _, leaf in stored.values()]
        for number, mapped in self._spill.kept({str(n): leaf.mapped for n, leaf in enumerate(leaves)}).items():
            leaves[int(number)].mapped = mapped

    def _traced(self, batch: Batch, first: int) -> _Trace:
        with self._keeping() as kept:
            return self._traced_with(kept, batch, first)

    def _traced_with(self, kept: Callable[[Tensor], _OnDisk], batch: Batch, first: int) -> _Trace:
        trace, last = _Trace(), list[Tensor]()

        def enter(k: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
            state = kwargs[self._slot] if isinstance(self._slot, str) else args[self._slot]
            assert isinstance(state, Tensor)
            trace.states.append(self._kept(state))
            trace.calls.append(_mapped((args, kwargs), lambda leaf: _STATE if leaf is state else kept(leaf)))
            return state.detach()

        def leave(k: int, state: Tensor) -> Tensor:
            is_last = k == len(self._layers) - 1
            if is_last:  # now: what follows may write into it
                trace.states.append(self._kept(state))
            last[:] = [state.detach().requires_grad_(self._gradients and is_last)]
            return last[0]

        with self._watched(enter, leave, self._gradients):
            losses = self._losses(batch, first)
        if self._gradients:
            gradient = None
            if losses is not None and losses.requires_grad:
                (gradient,) = torch.autograd.grad(losses.sum(), last, allow_unused=True)
            gradient = torch.zeros_like(last[0]) if gradient is None else gradient
            trace.gradient = self._kept(gradient)
        return trace

    def _kept(self, tensor: Tensor) -> _OnDisk:
        return _OnDisk(self._spill.kept({"tensor": tensor})["tensor"], tensor.device)

    def _run_layer(self, k: int, first: int) -> Tensor | None:
        """Run a layer forward and backward; the gradient by its input."""
        with torch.set_grad_enabled(self._gradients):
            own = self.state(k, first).requires_grad_(self._gradients)
            output = self.output(k, first, own.clone())
            gradient = self._traces[first].gradient
            if gradient is None:
                return None
            output.backward(gradient.copy())
        return own.grad

    def _run_ends(self, batch: Batch, first: int) -> None:
        """Run what is before and after the layers, forward and backward."""
        trace, entered = self._traces[first], list[Tensor]()
        last = trace.states[-1].copy().requires_grad_(self._gradients)
        with torch.set_grad_enabled(self._gradients), self._left_out(last, entered):
            losses = self._losses(batch, first)
            if losses is None or trace.gradient is None:
                return
            roots = [(losses.sum(), None), (entered[-1], trace.gradient.copy())]
            roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
            if roots:
                torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])

    @contextmanager
    def _watched(
        self,
        enter: Callable[[int, tuple[object, ...], dict[str, object]], Tensor],
        leave: Callable[[int, Tensor], Tensor],
        gradients: bool,
    ) -> Iterator[None]:
        """Inside, ``enter`` sees the arguments of each layer and gives its input, ``leave`` sees its output and gives
        what the next one reads. With ``gradients`` an objective may run the model without them, too: that is not
        watched."""

        def before(k: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
            if gradients and not torch.is_grad_enabled():
                return None
            state = enter(k, args, kwargs)
            if isinstance(self._slot, str):
                return args, {**kwargs, self._slot: state}
            return (*args[: self._slot], state, *args[self._slot + 1 :]), kwargs

        def after(k: int, output: object) -> object:
            if gradients and not torch.is_grad_enabled():
                return None
            state = leave(k, _state_of(output))
            self._wrapped[k] = None if isinstance(output, Tensor) else type(output)
            return _wrapped(state, self._wrapped[k])

        with ExitStack() as stack:
            for k, layer in enumerate(self._layers):
                first = layer.register_forward_pre_hook(
                    lambda module, args, kwargs, k=k: before(k, args, kwargs), with_kwargs=True
                )
                second = layer.register_forward_hook(lambda module, args, output, k=k: after(k, output))
                stack.callback(first.remove)
                stack.callback(second.remove)
            yield

    @contextmanager
    def _left_out(
        self,
        last: Tensor | None,
        entered: list[Tensor],
        seen: Callable[[Tensor, tuple[object, ...], dict[str, object]], None] | None = None,
    ) -> Iterator[None]:
        """Inside, the first layer gives ``last``, and the others what they are given; so does the first for None.
        ``entered`` receives h_0, ``seen`` the state and all arguments of each layer."""

        def first(state: Tensor) -> Tensor:
            if torch.is_grad_enabled() or not self._gradients:  # an objective may run the model without, too
                entered.append(state)
            return state if last is None else last

        replaced = {
            id(layer): _Stub(layer, first if k == 0 else lambda state: state, self._slot, self._wrapped[k], seen)
            for k, layer in enumerate(self._layers)
        }
        held = [
            (module, key, inner)
            for module in list(self._model.modules())
            for key, inner in module._modules.items()
            if id(inner) in replaced
        ]
        try:
            for module, key, inner in held:
                module._modules[key] = replaced[id(inner)]
            yield
        finally:
            for module, key, inner in held:
                module._modules[key] = inner

    def _find_state(self, args: tuple[object, ...], kwargs: dict[str, object], before: Tensor | None) -> Tensor | None:
        """The state among the arguments of a layer. The second layer's input is the first one's output: its place among
        the arguments is that of all states."""
        named: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
        if before is None:  # the first layer: as transformers calls them all
            found = next((item for item in named if isinstance(item[1], Tensor) and item[1].is_floating_point()), None)
        else:
            found = next((item for item in named if item[1] is before), None)
            if found is not None and found[0] != self._slot:
                raise _NoChain
        if found is None or not isinstance(found[1], Tensor):
            return None
        self._slot = found[0]
        return found[1]


class _NoChain(Exception):
    """The layers are no chain."""


class _Stub(nn.Module):
    """In place of a layer: its attributes, and ``change`` in place of its computation."""

    def __init__(
        self,
        layer: nn.Module,
        change: Callable[[Tensor], Tensor],
        slot: int | str,
        wrapped: type[Any] | None,
        seen: Callable[[Tensor, tuple[object, ...], dict[str, object]], None] | None,
    ) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _change=change, _slot=slot, _wrapped=wrapped, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The changed state, as the layer would give it."""
        state = kwargs[self._slot] if isinstance(self._slot, str) else args[self._slot]
        if self._seen is not None:
            self._seen(state, args, kwargs)
        return _wrapped(self._change(state), self._wrapped)


def _state_of(output: object) -> Tensor:
    """The state in what a layer gives: a tensor, or a tuple or list with nothing else in it."""
    inner = output[0] if isinstance(output, tuple | list) and len(output) == 1 else output
    if not isinstance(inner, Tensor):
        raise _NoChain
    return inner


def _wrapped(state: Tensor, kind: type[Any] | None) -> Any:
    return state if kind is None else kind((state,))


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """``tree`` with its tensors, those on disk, and the mark of the state, changed."""
    if isinstance(tree, Tensor | _OnDisk | _HiddenState):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(one, change) for one in tree)
    if isinstance(tree, dict):
        return {key: _mapped(one, change) for key, one in tree.items()}
    return tree


def _same(one: Any, other: Any) -> bool:
    """Whether two trees hold the same, numbers of tensors too."""
    if isinstance(one, _OnDisk) and isinstance(other, _OnDisk):
        return one.mapped.dtype == other.mapped.dtype and torch.equal(one.mapped, other.mapped)
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _leaves(tree: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    _mapped(tree, found.append)
    yield from found
