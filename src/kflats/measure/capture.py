"""What passes through a model's weights: what enters each use of one, and the gradient of what leaves it.

Parameters are frozen meanwhile, so that backward computes gradients of activations only: two thirds of its usual
work, and no memory for gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.errors import KflatsError
from kflats.evaluate.encoding import evaluating
from kflats.measure.layouts import ALONE, Layout, entering, places
from kflats.measure.running import batch_size, decoder_positions, is_encoder_decoder
from kflats.numerics.fisher import wide
from kflats.swap.places import Weight
from kflats.swap.roles import embedding_scale


@dataclass
class Use:
    """One use of a weight in one forward pass.

    ``x`` is (B, T, n), samples in front; (B, T) row indices of a lookup, -1 where no gradient reaches the row; a
    convolution's whole input. ``g`` is the gradient of each sample's own loss, (B, T, d), None until it arrives.
    ``mask`` is (B, T) bool of what is no padding, None where nothing is.
    """

    weight: str
    role: str
    module: nn.Module
    samples: int
    x: Tensor
    mask: Tensor | None
    g: Tensor | None = None

    def inputs(self, start: int, end: int) -> Tensor:
        """(end - start, T, n): what enters, of some samples."""
        if self.role != "conv2d":
            return self.x[start:end]
        step = len(self.x) // self.samples
        found = unfolded(self.module, self.x[start * step : end * step])
        return found.reshape(end - start, -1, found.shape[-1])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode, gradients of activations only; modes, ``requires_grad`` and ``grad`` afterwards as before."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    # Another's inference mode would forbid any gradient here.
    with evaluating(model), torch.inference_mode(False):
        try:
            for p, _ in before:
                p.requires_grad_(False)
            yield
        finally:
            for p, required in before:
                p.requires_grad_(required)


class Tap:
    """Hooks on every place of some weights, for as long as ``attached`` lasts.

    Args:
        model, weights: what to watch.
        entered: called at each use, with the tensor that entered as the model has it.
        left: called once a batch and weight, when the gradients of all its uses have arrived.
        layouts: of ``find_layouts``. alone: batches hold one sample, layouts do not matter.
        gradients: names of the weights that want gradients.

    ``late`` collects weights that were used by a layer without a layout; nothing more is told of those.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        entered: Callable[[Use, Tensor], None],
        left: Callable[[str, list[Use]], None],
        layouts: Mapping[int, Layout],
        gradients: frozenset[str],
        alone: bool = False,
    ) -> None:
        self.late: set[str] = set()
        self._model, self._weights, self._layouts = model, weights, layouts
        self._entered, self._left, self._gradients, self._alone = entered, left, gradients, alone
        self._uses: dict[str, list[Use]] = {}
        self._batch: dict[str, Any] = {}
        self._samples = 0
        self._encoded: int | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._encoder, self._decoder = (_inside(model, part) for part in ("encoder", "decoder"))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks for as long as this lasts, whatever happens inside."""
        with ExitStack() as stack:
            for module, weight, role in places(self._model, self._weights):
                hook = self._hook(weight, role)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if is_encoder_decoder(self._model):
                made: Any = self._model
                stack.callback(made.get_encoder().register_forward_hook(self._on_encoded).remove)
            try:
                yield
            finally:
                self._uses.clear()
                self._batch = {}

    def start(self, batch: dict[str, Any]) -> None:
        """Before a batch."""
        self._uses.clear()
        self._batch, self._samples, self._encoded = batch, batch_size(batch), None

    def finish(self) -> None:
        """After its backward: hand over the uses that had to wait for each other."""
        for weight, uses in self._uses.items():
            arrived = [use for use in uses if use.g is not None]
            if arrived:
                self._left(weight, arrived)
        self._uses.clear()
        self._anchor.grad = None

    def _hook(self, weight: Weight, role: str) -> Callable[..., Tensor | None]:
        name = weight.name

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            given = entering(args, kwargs)
            layout = ALONE if self._alone else self._layouts.get(id(module), ALONE)
            if not (self._alone or layout.fits(given, self._batch, self._samples)):
                self.late.add(name)
            if name in self.late:
                return None
            x = given.detach()  # shares the version of what entered
            if role == "conv2d":
                use = Use(name, role, module, self._samples, x, None)
            else:
                batched = layout.batched(x, self._samples, trailing=0 if role == "embedding" else 1)
                use = Use(name, role, module, self._samples, batched, self._mask(module, x, batched))
            self._entered(use, given)
            if name not in self._gradients or not torch.is_grad_enabled():
                return None
            connected = output
            if not output.requires_grad:
                # Nothing before this layer asks for gradients: a zero that does.
                if self._anchor.device != output.device:
                    self._anchor = self._anchor.detach().to(output.device).requires_grad_()
                connected = output + self._anchor.to(output.dtype)
            self._uses.setdefault(name, []).append(use)
            version = x._version

            def arrived(g: Tensor) -> None:
                if x._version != version:
                    raise KflatsError(
                        f"what enters {name} is overwritten in place before its gradient arrives",
                        hint="a model without in-place operations behind this layer, or leave the weight out",
                    )
                self._arrived(use, g.detach(), layout)

            connected.register_hook(arrived)
            return None if connected is output else connected

        return hook

    def _arrived(self, use: Use, g: Tensor, layout: Layout) -> None:
        if use.role == "conv2d":
            use.g = g.flatten(2).mT.reshape(self._samples, -1, g.shape[1])
        else:
            use.g = layout.batched(g, self._samples, trailing=1)
            if use.role == "embedding":
                use.g, use.x = _as_read(use.module, use.g, use.x)
        waiting = self._uses[use.weight]
        if len(waiting) == 1:
            del self._uses[use.weight]
            self._left(use.weight, waiting)

    def _mask(self, module: nn.Module, raw: Tensor, x: Tensor) -> Tensor | None:
        """(B, T) bool of the positions that are no padding, None where that is all."""
        shape = x.shape[:2]
        if is_encoder_decoder(self._model):
            text = self._batch.get("input_ids")
            read = self._batch.get("decoder_input_ids", self._batch.get("labels"))
            encoder = isinstance(text, Tensor) and text.shape == shape and self._reads_encoder(module, raw)
            if not encoder and isinstance(read, Tensor) and read.shape == shape:
                return _padding(decoder_positions(self._batch, torch.ones(shape, device=x.device)), shape)
        return _padding(self._batch.get("attention_mask"), shape)

    def _reads_encoder(self, module: nn.Module, x: Tensor) -> bool:
        # Both sequences may have one length. A table may be read by both sides, a decoder reads the encoder's output.
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
    made: Any = getattr(model, f"get_{part}")()
    return {id(module) for module in made.modules()}


def unfolded(module: nn.Module, x: Tensor) -> Tensor:
    """(B, positions, in * kh * kw): what enters a convolution at each place it looks at."""
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(wide(x), module._reversed_padding_repeated_twice, mode=mode)
    return F.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride).mT
