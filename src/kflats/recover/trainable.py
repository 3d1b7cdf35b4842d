"""What training may change in a model, and what it must leave as it found it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.layers import FactoredEmbedding
from kflats.model.weights import factored_layers

CHOICES = ("all", "bases", "coordinates", "factors")
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def only(model: nn.Module, train: str) -> Iterator[list[nn.Parameter]]:
    """Inside, just the chosen parameters ask for gradients; afterwards every flag is what it was.

    Args:
        train: "bases" (the second factor of every factored layer), "coordinates" (the first), "factors"
            (both), or "all": every parameter that asks for gradients now.

    Yields:
        The parameters that train.

    Raises:
        KflatsError: another word, no factored layer where factors should train, codes where bases should, or nothing
            left to train.

    >>> model = nn.Linear(2, 3)
    >>> with only(model, "all") as chosen:
    ...     len(chosen)
    2
    """
    if train not in CHOICES:
        raise KflatsError(f"train={train!r} is not known", hint=f"one of: {', '.join(CHOICES)}")
    before = [(p, p.requires_grad) for p in model.parameters()]
    if train == "all":
        chosen = [p for p, wanted in before if wanted]
    else:
        names = {"bases": ("basis",), "coordinates": ("weight",), "factors": ("weight", "basis")}[train]
        matrices = [layer.matrix for _, layer in factored_layers(model) if layer.owns_matrix]
        if not matrices:
            raise KflatsError(
                f"the model has no factored layer of which {train} could train",
                cause="it was not compressed, or was loaded as an ordinary model",
                hint="compress it first, or train='all' (--train all)",
                command="compress it first, or --train all",
            )
        chosen = [p for matrix in matrices for name, p in matrix.named_parameters() if name in names]
        if not chosen and all(isinstance(matrix, CodedMatrix) for matrix in matrices):
            raise KflatsError(
                f"the model's codes have no {train} that could train",
                cause="it is stored as integers by a codec; their scales and levels are what can be learned",
                hint="train='all' or 'coordinates' (--train all), or kflats.restore_(model) and recover before coding",
                command="--train all",
            )
    if not sum(p.numel() for p in chosen):
        raise KflatsError("nothing is left to train", cause="every parameter was frozen (requires_grad=False)")
    try:
        for p, _ in before:
            p.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        yield chosen
    finally:
        for p, wanted in before:
            p.requires_grad_(wanted)
            p.grad = None


@contextmanager
def widened(model: nn.Module) -> Iterator[bool]:
    """Inside, everything stored in 16 bits is float32; afterwards it is rounded back to its own type.

    Adam's steps are smaller than what 16 bits resolve beside a weight, and its epsilon is 0 there.

    Yields:
        Whether anything was widened.
    """
    parameters = [(p, p.dtype) for p in model.parameters() if p.dtype in _HALF]
    buffers = [
        (module, name, buffer.dtype)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in _HALF
    ]
    tables = [m for m in model.modules() if isinstance(m, FactoredEmbedding) and m.out_dtype in _HALF]
    outs = [table.out_dtype for table in tables]
    try:
        for p, _ in parameters:
            p.data = p.data.float()
        for module, name, _ in buffers:
            _cast(module, name, torch.float32)
        for table in tables:
            table.out_dtype = torch.float32
        yield bool(parameters)
    finally:
        for p, dtype in parameters:
            p.data = p.data.to(dtype)
        for module, name, dtype in buffers:
            _cast(module, name, dtype)
        for table, out in zip(tables, outs, strict=True):
            table.out_dtype = out


@contextmanager
def unchanged_on_failure(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields copies of ``parameters`` as they are; after an exception they are put back."""
    start = [p.detach().clone() for p in parameters]
    try:
        yield start
    except BaseException:
        put_back(parameters, start)
        raise


def put_back(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Set every parameter to its value."""
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn inside, the global random states of Python, numpy and torch return."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _cast(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    buffer = module._buffers[name]
    assert buffer is not None
    module._buffers[name] = buffer.to(dtype)
