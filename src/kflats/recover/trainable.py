"""The parameters of a model that train, and the state that training restores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.model.weights import factored_layers

CHOICES = ("all", "bases", "coordinates", "factors")


@contextmanager
def only(model: nn.Module, train: str) -> Iterator[list[nn.Parameter]]:
    """Inside, only the chosen parameters have ``requires_grad``; afterwards every flag is as it was before.

    Args:
        train: "bases" (the second factor of every factored layer), "coordinates" (the first), "factors"
            (both), or "all": every parameter that asks for gradients now.

    Yields:
        The parameters that train.

    Raises:
        KflatsError: no factored layer for factors to train, codes for bases to train, or nothing left to train.

    >>> model = nn.Linear(2, 3)
    >>> with only(model, "all") as chosen:
    ...     len(chosen)
    2
    """
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
                cause="it is stored as integers by a codec; only their scales and levels can be trained",
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
def unchanged_on_failure(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields copies of ``parameters``; after an exception the parameters have these values again."""
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
    """Afterwards the global random states of Python, numpy and torch are as they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
