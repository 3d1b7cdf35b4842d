"""The run-time form of a model's coded layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kflats.common.run_forms import RunForm, check_run_form
from kflats.matrices.layers import FactoredHead, FactoredLinear
from kflats.model.weights import factored_layers


def run_as_(model: nn.Module, form: RunForm) -> int:
    """Choose how the coded linear layers and tied heads of ``model`` multiply. What is stored stays as it is, bit for
    bit: for ``save``, ``restore_`` and training.

    | form | multiplies by | memory beside the codes, bytes a number |
    | --- | --- | --- |
    | "dense" (the default) | the matrix in the type of its inputs | 4 in float32 |
    | "bfloat16" | the matrix in bfloat16, its inputs rounded too | 2 |
    | "int8" | integers; the inputs of each token are rounded to 8 bits | 1 |
    | "compact" | codes that are decoded in every call | 0 |

    Choose "bfloat16" on CPUs with units for it, where it takes about .6 of the time of the original in float32. Choose
    "int8" where bfloat16 units are missing and a cosine .001 to .002 lower is allowed. Choose "compact" where memory is
    short; one sentence then takes four times as long.

    A form is made at the first call. Recorded graphs (``torch.compile``, export), and calls whose gradients reach the
    codes' scales, use the codes in every form; call a model under ``torch.inference_mode()`` to run it. Embeddings read
    their rows from the codes. Layers of floating-point factors are multiplied by as they are.

    Args:
        model: with factored layers. Saved folders keep the form of each layer.
        form: see above.

    Returns:
        The number of layers whose form it is now.

    Raises:
        KflatsError: an unknown form. In "int8", a call that asks for gradients, or on another device than the CPU.

    >>> import kflats, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
    >>> recipe = kflats.Recipe(kflats.KeepDense(), codec=kflats.Integer(bits=8))
    >>> _ = kflats.compress_(model, {"linear": recipe}, keep="30%", quiet=True)
    >>> x = torch.randn(4, 64)
    >>> near = model(x)
    >>> run_as_(model, "int8"), bool((model(x) - near).norm() < 0.04 * near.norm())
    (1, True)
    """
    check_run_form(form)
    layers = _multiplying(model)
    for layer in layers:
        layer.run_form = form
    return len(layers)


@contextmanager
def running_dense(model: nn.Module) -> Iterator[None]:
    """All layers dense, and in their own forms again afterwards: training needs the gradients that int8 lacks."""
    forms = [(layer, layer.run_form) for layer in _multiplying(model)]
    run_as_(model, "dense")
    try:
        yield
    finally:
        for layer, form in forms:
            layer.run_form = form


def _multiplying(model: nn.Module) -> list[FactoredLinear | FactoredHead]:
    return [layer for _, layer in factored_layers(model) if isinstance(layer, FactoredLinear | FactoredHead)]
