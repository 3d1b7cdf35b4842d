"""The run-time form of a model's coded layers, and what its folder says that forms lose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

from kflats.common.errors import KflatsWarning
from kflats.common.run_forms import FormLoss, RunForm, check_run_form
from kflats.common.schema import decode
from kflats.matrices.layers import FactoredConv2d, FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import CodedMatrix
from kflats.model.weights import described_models, factored_layers

_Multiplying: TypeAlias = FactoredLinear | FactoredHead | FactoredConv2d

LOSSES = "forms"
"""The entry of a folder's description that holds what forms lose."""


def set_run_form_(model: nn.Module, form: RunForm) -> int:
    """The form of all coded linear layers, convolutions and tied heads is ``form``; returns how many layers these are.
    Embeddings keep rows in all forms but "compact".

    Raises:
        KflatsError: an unknown form.
    """
    check_run_form(form)
    for layer in _with_forms(model):
        layer.run_form = form
    return len(_multiplying(model))


@contextmanager
def running_as(model: nn.Module, form: RunForm) -> Iterator[None]:
    """All layers in this form, and in their own forms again afterwards."""
    forms = [(layer, layer.run_form) for layer in _with_forms(model)]
    set_run_form_(model, form)
    try:
        yield
    finally:
        for layer, own in forms:
            layer.run_form = own


def warn_without_effect(model: nn.Module, form: RunForm) -> None:
    """Warn, for the caller's caller, of a form that changes nothing."""
    if form != "dense" and not coded_layers(model):
        why = "because no layer in codes multiplies"
        warnings.warn(KflatsWarning(f"the run-time form {form} changes nothing, {why}"), stacklevel=3)


def coded_layers(model: nn.Module) -> list[_Multiplying]:
    """The layers whose form makes a difference."""
    return [layer for layer in _multiplying(model) if layer.matrix.kind == CodedMatrix.kind]


def known_losses(model: nn.Module) -> tuple[FormLoss, ...]:
    """What each form loses, as the folder that ``model`` was loaded from says; none where nobody measured it.

    Raises:
        KflatsError: a damaged description.
    """
    for _, note in described_models(model):
        losses: tuple[FormLoss, ...] = decode(tuple[FormLoss, ...], note.get(LOSSES, []), LOSSES)
        return losses
    return ()


def forget_losses_(model: nn.Module) -> None:
    """Call this where weights change: what was measured is then of other weights."""
    for part, note in described_models(model):
        part.config.quantization_config = {key: value for key, value in note.items() if key != LOSSES}


def _with_forms(model: nn.Module) -> list[_Multiplying | FactoredEmbedding]:
    return [layer for _, layer in factored_layers(model) if isinstance(layer, _Multiplying | FactoredEmbedding)]


def _multiplying(model: nn.Module) -> list[_Multiplying]:
    return [layer for _, layer in factored_layers(model) if isinstance(layer, _Multiplying)]
