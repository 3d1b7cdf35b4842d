"""Forward hooks that record the input of each layer and the gradient of its output.

The parameters are frozen while the hooks run. Backward then computes gradients of activations only: two thirds of the
usual work, and no memory for gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.calibration.layouts import ALONE, Layout, by_sample, entering, inputs_repeated, places
from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import BatchValue, device_of, evaluating, widened
from kflats.evaluation.running import batch_size, decoder_positions, is_encoder_decoder
from kflats.model.weights import Weight, embedding_scale
from kflats.numerics.statistics import wide


@dataclass
class LayerCall:
    """One call of a layer that holds a weight, in one forward pass.

    ``x`` is the layer's input: (B, T, n) with samples first; of a lookup (B, T) row indices, -1 for a row without
    a gradient; of a convolution the whole input. ``g`` is the gradient of each sample's own loss by the layer's
    output, (B, T, d); None until backward reaches the layer. ``mask`` is (B, T) bool, True at tokens and False at
    padding; None without padding.
    """

    weight: str
    role: str
    module: nn.Module
    samples: int
    x: Tensor
    mask: Tensor | None
    g: Tensor | None = None

    def inputs(self, start: int, end: int) -> Tensor:
        """(end - start, T, n): the inputs of samples ``start`` to ``end``."""
        if self.role != "conv2d":
            return self.x[start:end]
        step = len(self.x) // self.samples
        patches = unfolded(self.module, self.x[start * step : end * step])
        return patches.reshape(end - start, -1, patches.shape[-1])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients of parameters; on exit, modes, types and ``requires_grad`` are as they were before.

    Parameters in float16 are float32 inside, and float16 autocast is off: gradients of single samples underflow and
    overflow float16.
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    kind = device_of(model).type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.float16
    # A caller's inference mode would forbid gradients here.
    with (
        evaluating(model),
        torch.inference_mode(False),
        widened(model, torch.float16),
        torch.autocast(kind, enabled=autocast),
    ):
        try:
            for p, _ in before:
                p.requires_grad_(False)
            yield
        finally:
            for p, required in before:
                p.requires_grad_(required)


class ActivationRecorder:
    """Hooks on every layer that holds one of the weights, while ``attached`` lasts.

    Args:
        model, weights: the weights to record.
        on_input: called at each call of a layer, with the call and the input tensor as the layer received it.
        on_gradients: called once per batch and weight, when the gradients of all its calls have arrived.
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
        layouts: Mapping[int, Layout],
        gradients: frozenset[str],
        one_sample: bool = False,
    ) -> None:
        self.without_layout: set[str] = set()
        self._model, self._weights, self._layouts = model, weights, layouts
        self._on_input, self._on_gradients = on_input, on_gradients
        self._gradients, self._one_sample = gradients, one_sample
        self._calls: dict[str, list[LayerCall]] = {}
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
            for module, weight, role in modules:
                hook = self._hook(weight, role)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if is_encoder_decoder(self._model):
                encoder_decoder: Any = self._model
                stack.callback(encoder_decoder.get_encoder().register_forward_hook(self._on_encoded).remove)
            try:
                yield
            finally:
                self._calls.clear()
                self._batch = {}

    def start(self, batch: dict[str, BatchValue]) -> None:
        """Call before the forward pass of ``batch``."""
        self._calls.clear()
        self._batch, self._samples, self._encoded = batch, batch_size(batch), None

    def finish(self) -> None:
        """Call after backward: reports the weights of which some call received no gradient."""
        for weight, calls in self._calls.items():
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
            connected = output
            if not output.requires_grad:
                # No earlier layer requires gradients. Adding a zero that does gives the output one.
                if self._anchor.device != output.device:
                    self._anchor = self._anchor.detach().to(output.device).requires_grad_()
                connected = output + self._anchor.to(output.dtype)
            self._calls.setdefault(name, []).append(call)
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

    def _arrived(self, call: LayerCall, g: Tensor) -> None:
        if call.role == "conv2d":
            call.g = g.flatten(2).mT.reshape(self._samples, -1, g.shape[1])
        else:
            call.g = by_sample(g, self._samples, trailing=1)
            if call.role == "embedding":
                call.g, call.x = _as_read(call.module, call.g, call.x)
        waiting = self._calls[call.weight]
        if len(waiting) == 1:
            del self._calls[call.weight]
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


def unfolded(module: nn.Module, x: Tensor) -> Tensor:
    """(B, positions, in * kh * kw): the input patch of a convolution at each output position."""
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(wide(x), module._reversed_padding_repeated_twice, mode=mode)
    return F.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride).mT
