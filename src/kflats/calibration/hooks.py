"""Forward hooks that record the input of each layer and the gradient of its output.

The parameters are frozen while the hooks run. Backward then computes gradients of activations only: two thirds of the
usual work, and no memory for gradients of weights.

The axis of a layer's activations that holds the samples, its ``SampleLayout``, is found by running a model on two
samples and on three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kflats.calibration.experts import ExpertCall, watched_experts
from kflats.common.errors import KflatsError
from kflats.evaluation.running import (
    Batch,
    BatchValue,
    ModelOutput,
    batch_size,
    decoder_positions,
    device_of,
    evaluating,
    is_encoder_decoder,
    take,
    widened,
)
from kflats.matrices.kept_rows import no_kept_rows
from kflats.matrices.layers import Patches
from kflats.model.weights import Weight, embedding_scale, module_of, pretrained_models
from kflats.numerics.statistics import wide


@dataclass(frozen=True)
class SampleLayout:
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


ALONE = SampleLayout(None)
_COLUMNS = 32  # of an input, by which runs of a model are compared


def by_sample(x: Tensor, samples: int, trailing: int) -> Tensor:
    """(B, T, ...) with ``trailing`` axes after the positions, of an activation that a layout fits."""
    return x.reshape(samples, -1, *x.shape[x.ndim - trailing :])


def places(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[nn.Module, Weight, str]]:
    """(module, weight, role) once per module and weight, however many names a module has."""
    seen = set()
    for weight in weights:
        for place in weight.places:
            module = module_of(model, place)
            if module is None:
                raise KflatsError(f"the model has no {place.name!r}", cause="weights of another model")
            if place.role == "parameter":
                raise KflatsError(
                    f"{place.name} cannot be measured",
                    cause="it is a parameter that no layer of its own multiplies by",
                    hint="Uniform(), which measures nothing",
                )
            if getattr(module, "groups", 1) != 1:
                raise KflatsError(
                    f"{place.name} is a grouped convolution, which is not supported",
                    cause="each group has a matrix of its own",
                )
            key = id(module), weight.name if place.role == "experts" else ""
            if key not in seen:
                seen.add(key)
                yield module, weight, place.role


def entering(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """The input of a layer: its first argument, by position or by name."""
    entered = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(entered, Tensor)
    return entered


def find_layouts(
    model: nn.Module, weights: Sequence[Weight], batch: Batch, forward: Callable[[dict[str, BatchValue]], ModelOutput]
) -> dict[int, SampleLayout]:
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
            # Copies: later layers may overwrite them. A part of the columns: inputs of all layers are kept.
            entered = entering(args, kwargs).detach()
            step = max(1, entered.shape[-1] // _COLUMNS) if entered.is_floating_point() and entered.ndim else 1
            seen.setdefault(id(module), []).append(entered[..., ::step].clone())

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
        layouts |= dict.fromkeys(shared, SampleLayout(1, repeated=True))
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
    modules: Iterable[nn.Module], batch: Batch, forward: Callable[[dict[str, BatchValue]], ModelOutput]
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


def _layout(two: list[Tensor], three: list[Tensor], role: str, length: int) -> SampleLayout:
    layouts = {_rows(a, b, role, length) for a, b in zip(two, three, strict=False)}
    return layouts.pop() if len(two) == len(three) and len(layouts) == 1 else ALONE


def _rows(a: Tensor, b: Tensor, role: str, length: int) -> SampleLayout:
    """The layout of a layer's input, which is ``a`` for two samples and ``b`` for three."""
    axes = 1 if role in ("embedding", "conv2d") else 2
    if min(a.ndim, b.ndim) < axes or a.shape[1:] != b.shape[1:] or 2 * len(b) != 3 * len(a):
        return ALONE
    rows = len(a) // 2
    if role == "experts" and rows != length:  # they may be given a part of the tokens, another one in each batch
        return ALONE
    return SampleLayout(0 if rows == length > 1 else rows) if rows and _alike(a, b[: len(a)]) else ALONE


def text_length(batch: Batch) -> int:
    """Positions of a batch's text: the second axis of its ids, or of the first tensor that has one."""
    named = [batch.get("input_ids"), *batch.values()]
    return next((t.shape[1] for t in named if isinstance(t, Tensor) and t.ndim > 1), 1)


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # The check of the loss refuses NaN. Half precision rounds differently in a larger batch.
    return torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2 * float(a.abs().max()), equal_nan=True)


@dataclass
class LayerCall:
    """One call of a layer that holds a weight, in one forward pass.

    ``x`` is the layer's input: (B, T, n) with samples first; of a lookup (B, T) row indices, -1 for a row without
    a gradient; of a convolution the whole input. ``g`` is the gradient of each sample's own loss by the layer's
    output, (B, T, d); None until backward reaches the layer. ``mask`` is (B, T) bool, True at tokens and False at
    padding; None without padding.

    Of experts a call is that of one ``expert``: T is the largest number of tokens of a sample that it is given, and d
    the number of its own outputs.
    """

    weight: str
    role: str
    module: nn.Module
    samples: int
    x: Tensor
    mask: Tensor | None
    g: Tensor | None = None
    expert: int = 0

    def inputs(self, start: int, end: int) -> Tensor:
        """(end - start, T, n): the inputs of samples ``start`` to ``end``."""
        if self.role != "conv2d":
            return self.x[start:end]
        step = len(self.x) // self.samples
        assert isinstance(self.module, nn.Conv2d)
        cut = Patches.of(self.module)
        patches = cut.inside(cut.padded(wide(self.x[start * step : end * step])))
        return patches.reshape(end - start, -1, patches.shape[-1])


@contextmanager
def frozen(model: nn.Module, layers: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Eval mode without gradients of parameters, and without caches of keys and states; on exit, modes, types, settings
    and ``requires_grad`` are as they were before.

    Parameters in float16 are float32 inside, and float16 autocast is off: gradients of single samples underflow and
    overflow float16. Those of ``layers`` are float32 while the layer runs, so that one layer at a time takes memory.
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    # A cache takes memory, and xLSTM's is written in place, where backward still needs it.
    configs = {id(part.config): part.config for _, part in pretrained_models(model)}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    kind = device_of(model).type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.float16
    # A caller's inference mode would forbid gradients here.
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values() if p is not None}
    own = {id(p) for layer in layers for p in layer.parameters()} - outside
    with (
        evaluating(model),
        no_kept_rows(),  # statistics do not depend on what a worker read before
        torch.inference_mode(False),
        _widened_while_called(layers, own),
        widened(model, torch.float16, changed=False, without=own),
        torch.autocast(kind, enabled=autocast),
    ):
        try:
            for p, _ in before:
                p.requires_grad_(False)
            for config in caching:
                config.use_cache = False
            yield
        finally:
            for config in caching:
                config.use_cache = True
            for p, required in before:
                p.requires_grad_(required)


@contextmanager
def _widened_while_called(layers: Sequence[nn.Module], own: Set[int]) -> Iterator[None]:
    """Inside, parameters of ``layers`` in float16 are float32 in calls of the layer: those whose ids are in ``own``."""
    narrow = {
        id(layer): [
            (module, key, p)
            for module in layer.modules()
            for key, p in module._parameters.items()
            if p is not None and p.dtype == torch.float16 and id(p) in own
        ]
        for layer in layers
    }

    def widen(layer: nn.Module, args: object) -> None:
        # New objects: a recorded graph keeps those of its own call. A parameter of two modules stays one.
        wide = {id(p): nn.Parameter(p.detach().float(), requires_grad=False) for _, _, p in narrow[id(layer)]}
        for module, key, p in narrow[id(layer)]:
            module._parameters[key] = wide[id(p)]

    def restore(layer: nn.Module, args: object, output: object) -> None:
        for module, key, p in narrow[id(layer)]:
            module._parameters[key] = p

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(widen).remove)
            stack.callback(layer.register_forward_hook(restore, always_call=True).remove)
            stack.callback(restore, layer, None, None)  # torch calls no hook after a KeyboardInterrupt
        yield


class ActivationRecorder:
    """Hooks on every layer that holds one of the weights, while ``attached`` lasts.

    Args:
        model, weights: the weights to record.
        on_input: called at each call of a layer, with the call and the input tensor as the layer received it.
        on_gradients: called once per batch and weight (of experts: and expert), when the gradients of all its calls
            have arrived.
        layouts: from ``find_layouts``. one_sample: every batch holds one sample, so layouts are not needed.
        gradients: names of the weights whose output gradients are recorded.

    ``without_layout`` collects the names of weights whose layer received an input that its layout does not fit. Such
    weights are not recorded any further.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        on_input: Callable[[LayerCall, Tensor], None],
        on_gradients: Callable[[str, list[LayerCall]], None],
        layouts: Mapping[int, SampleLayout],
        gradients: frozenset[str],
        one_sample: bool = False,
    ) -> None:
        self.without_layout: set[str] = set()
        self._model, self._weights, self._layouts = model, weights, layouts
        self._on_input, self._on_gradients = on_input, on_gradients
        self._gradients, self._one_sample = gradients, one_sample
        self._calls: dict[tuple[str, int], list[LayerCall]] = {}
        self._batch: dict[str, BatchValue] = {}
        self._samples = 0
        self._encoded: int | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._encoder, self._decoder = (_inside(model, part) for part in ("encoder", "decoder"))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are removed on exit, after exceptions too."""
        modules = list(places(self._model, self._weights))
        repeated = [module for module, _, _ in modules if self._layouts.get(id(module), ALONE).repeated]
        with ExitStack() as stack:
            stack.enter_context(inputs_repeated(repeated, lambda: self._samples))
            experts: dict[nn.Module, dict[str, str]] = {}
            for module, weight, role in modules:
                if role == "experts":
                    experts.setdefault(module, {})[weight.name.rpartition(".")[2]] = weight.name
                else:
                    hook = self._hook(weight, role)
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            for module, names in experts.items():
                stack.enter_context(watched_experts(module, partial(self._expert_called, module, names)))
            if is_encoder_decoder(self._model):
                encoder_decoder: Any = self._model
                stack.callback(encoder_decoder.get_encoder().register_forward_hook(self._on_encoded).remove)
            try:
                yield
            finally:
                self._calls.clear()
                self._batch = {}

    def start(self, batch: dict[str, BatchValue], samples: int) -> None:
        """Call before the forward pass of ``batch``, which counts as so many ``samples``."""
        self._calls.clear()
        mask = batch.get("attention_mask")
        if samples == 1 and isinstance(mask, Tensor):
            batch = {**batch, "attention_mask": mask.reshape(1, -1)}
        self._batch, self._samples, self._encoded = batch, samples, None

    def finish(self) -> None:
        """Call after backward: reports the weights of which some call received no gradient."""
        for (weight, _), calls in self._calls.items():
            arrived = [call for call in calls if call.g is not None]
            if arrived:
                self._on_gradients(weight, arrived)
        self._calls.clear()
        self._anchor.grad = None

    def _hook(self, weight: Weight, role: str) -> Callable[..., Tensor | None]:
        name = weight.name

        def hook(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> Tensor | None:
            entered = entering(args, kwargs)
            layout = ALONE if self._one_sample else self._layouts.get(id(module), ALONE)
            if not (self._one_sample or layout.fits(entered, self._batch, self._samples)):
                self.without_layout.add(name)
            if name in self.without_layout:
                return None
            x = entered.detach()  # shares the version counter of the input
            if role == "conv2d":
                call = LayerCall(name, role, module, self._samples, x, None)
            else:
                batched = by_sample(x, self._samples, trailing=0 if role == "embedding" else 1)
                call = LayerCall(name, role, module, self._samples, batched, self._mask(module, x, batched))
            self._on_input(call, entered)
            if name not in self._gradients or not torch.is_grad_enabled():
                return None
            # A view would lose its hook where the model writes into it, as in y = linear(x); y += x.
            connected = self._connected(output.clone() if output._is_view() else output)
            self._calls.setdefault((name, 0), []).append(call)
            version = x._version

            def arrived(g: Tensor) -> None:
                if x._version != version:
                    raise KflatsError(
                        f"the input of {name} is overwritten in place before its gradient arrives",
                        hint="a model without in-place operations behind this layer, or leave the weight out",
                    )
                self._arrived(call, g.detach())

            connected.register_hook(arrived)
            return None if connected is output else connected

        return hook

    def _connected(self, output: Tensor) -> Tensor:
        """``output`` with a gradient: where no earlier layer requires one, a zero that does is added."""
        if output.requires_grad:
            return output
        if self._anchor.device != output.device:
            self._anchor = self._anchor.detach().to(output.device).requires_grad_()
        return output + self._anchor.to(output.dtype)

    def _expert_called(self, module: nn.Module, names: Mapping[str, str], call: ExpertCall) -> Tensor:
        """Record one expert's product; its output, which backward reaches."""
        name, hidden, output = names.get(call.key), call.hidden, call.output
        layout = ALONE if self._one_sample else self._layouts.get(id(module), ALONE)
        if name is not None and not (self._one_sample or layout.fits(hidden, self._batch, self._samples)):
            self.without_layout.add(name)
        if name is None or name in self.without_layout:
            return output
        batched = by_sample(hidden, self._samples, trailing=1)
        mask, tokens = self._mask(module, hidden, batched), call.tokens
        x, place = _by_token(call.x.detach(), tokens // batched.shape[1], self._samples)
        kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.flatten()[tokens]
        there = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        there.view(-1)[place] = kept
        entry = LayerCall(name, "experts", module, self._samples, x, there, expert=call.expert)
        self._on_input(entry, x)
        if name not in self._gradients or not torch.is_grad_enabled():
            return output
        connected = self._connected(output)
        self._calls.setdefault((name, call.expert), []).append(entry)

        def arrived(g: Tensor) -> None:
            spread = g.new_zeros(x.shape[0] * x.shape[1], g.shape[1])
            spread[place] = g.detach()
            self._arrived(entry, spread)

        connected.register_hook(arrived)
        return connected

    def _arrived(self, call: LayerCall, g: Tensor) -> None:
        if call.role == "conv2d":
            call.g = g.flatten(2).mT.reshape(self._samples, -1, g.shape[1])
        else:
            call.g = by_sample(g, self._samples, trailing=1)
            if call.role == "embedding":
                call.g, call.x = _as_read(call.module, call.g, call.x)
        waiting = self._calls[call.weight, call.expert]
        if len(waiting) == 1:
            del self._calls[call.weight, call.expert]
            self._on_gradients(call.weight, waiting)

    def _mask(self, module: nn.Module, raw: Tensor, x: Tensor) -> Tensor | None:
        """(B, T) bool, True at tokens; None without padding."""
        shape = x.shape[:2]
        if is_encoder_decoder(self._model):
            text = self._batch.get("input_ids")
            read = self._batch.get("decoder_input_ids", self._batch.get("labels"))
            encoder = isinstance(text, Tensor) and text.shape == shape and self._reads_encoder(module, raw)
            if not encoder and isinstance(read, Tensor) and read.shape == shape:
                return _padding(decoder_positions(self._batch, torch.ones(shape, device=x.device)), shape)
        return _padding(self._batch.get("attention_mask"), shape)

    def _reads_encoder(self, module: nn.Module, x: Tensor) -> bool:
        # Shapes do not tell the two sequences apart where both have one length. The encoder and the decoder may share a
        # table, and the decoder's cross attention reads the encoder's output.
        storage = x.untyped_storage().data_ptr()
        ids = self._batch.get("input_ids")
        if storage == self._encoded or (isinstance(ids, Tensor) and storage == ids.untyped_storage().data_ptr()):
            return True
        return id(module) in self._encoder and id(module) not in self._decoder

    def _on_encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if not isinstance(output, Tensor) else output
        self._encoded = states.untyped_storage().data_ptr()


def _by_token(rows: Tensor, sample: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """(B, T, n) the ``rows`` of each sample, then zeros; and the place of each row in it, flattened.

    Args:
        sample: of each row, increasing.

    >>> _by_token(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 2]), 3)[0].squeeze(2).tolist()
    [[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]]
    """
    counts = torch.bincount(sample, minlength=samples)
    longest = int(counts.max())
    first = counts.cumsum(0) - counts
    place = sample * longest + torch.arange(len(sample), device=sample.device) - first[sample]
    spread = rows.new_zeros(samples * longest, rows.shape[1])
    spread[place] = rows
    return spread.reshape(samples, longest, -1), place


def _padding(mask: object, shape: torch.Size) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.shape != shape:
        return None
    kept = mask != 0
    return None if bool(kept.all()) else kept


def _as_read(module: nn.Module, g: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    scale = embedding_scale(module)
    if scale is not None:
        g = g * scale
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        index = index.masked_fill(index == padding, -1)  # torch gives that row no gradient
    return g, index


def _inside(model: nn.Module, part: str) -> set[int]:
    if not is_encoder_decoder(model):
        return set()
    inner: Any = getattr(model, f"get_{part}")()
    return {id(module) for module in inner.modules()}
