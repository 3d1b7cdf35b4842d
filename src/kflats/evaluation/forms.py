"""Run-time forms of a whole model: what each loses, how fast each is here, and the choice among them."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from kflats.common.errors import KflatsError, is_number
from kflats.common.formatting import announce, number, share
from kflats.common.run_forms import FormLoss, RunAs, RunForm, check_run_form
from kflats.common.texts import Tokenizer
from kflats.evaluation.latency import DRAWN_SHAPES, TorchModel, latencies
from kflats.evaluation.outputs import Judge, Outputs
from kflats.evaluation.running import device_of, modality_of
from kflats.matrices.integer_kernels import integer_limit
from kflats.matrices.running import MOST_INPUTS
from kflats.model.run_as import coded_layers, known_losses, running_as, set_run_form_, warn_without_effect
from kflats.model.weights import described_models

MOST_LOSS = 0.002
"""What "auto" allows a form to lose more than "dense": a fifth of what ``compress`` allows a model to lose. int8 loses
.001 to .002 with integers to 127, and .003 to .004 with integers to 90 (``benchmarks/run_forms.py``)."""
_MEASURED: tuple[RunForm, ...] = ("dense", "bfloat16", "int8")
_SHAPES = ((1, 20), (32, 30))
_TURNS, _SECONDS = 9, 2.0
_fastest_here: dict[object, RunForm] = {}


def run_as_(model: nn.Module, form: RunAs, *, most_loss: float = MOST_LOSS, quiet: bool = False) -> int:
    """Choose how the coded linear layers, convolutions and tied heads of ``model`` multiply. What is stored stays as it
    is, bit for bit: for ``save``, ``restore_`` and training.

    | form | multiplies by | memory beside the codes, bytes a number |
    | --- | --- | --- |
    | "dense" (the default) | the matrix in the type of its inputs | 4 in float32 |
    | "bfloat16" | the matrix in bfloat16, its inputs rounded too | 2 |
    | "int8" | integers; the inputs of each token are rounded to 8 bits | 1 |
    | "compact" | codes that are decoded in every call | 0 |

    Choose "bfloat16" on CPUs where it is faster than float32; not all CPUs with units for it are such. Choose
    "int8" for little time, on one core .4 to 1 of float32's and .4 to .7 under ``torch.compile``, by the CPU
    (``benchmarks/latency.py``), where a cosine .001 to .002 lower is allowed, or .003 to .004 on CPUs without VNNI
    units. Choose "compact" where memory is short; one sentence then takes four to seven times as long. On CPUs
    with matrix units for bfloat16 (AMX) no form is as fast in batches on one core as the whole model in that type:
    ``model.bfloat16()``.

    A form is made at the first call. Graphs for files (export, ONNX), graphs of ``torch.compile`` with gradients or
    autocast, and calls whose gradients reach the codes' scales use the codes in every form, and int8 refuses such
    gradients; call a model under ``torch.inference_mode()`` to run it. In int8 a convolution multiplies patches of
    its image (``docs/matrix-and-layers.md``). Embeddings decode the rows that are asked for, and keep up to 8 MB of
    them in all forms but "compact". Layers of floating-point factors are multiplied by as they are.

    "auto" chooses the fastest form on this machine, of those that lose at most ``most_loss`` more than "dense". What
    forms lose is measured by ``kflats compress`` and ``kflats compare --card``, and is read from the folder that
    ``model`` was loaded from. Times are measured once in a process for all models of the same layers, with one text of
    20 tokens and 32 of 30, and the choice is printed. It takes some seconds and a copy of the model for each form. Two
    machines may choose two forms, whose outputs differ.

    Args:
        model: with factored layers. Saved folders keep the form of each layer.
        form: see above.
        most_loss: with "auto": see above; the loss is that of docs/proof.md.
        quiet: with "auto": print nothing.

    Returns:
        The number of layers whose form it is now.

    Warns:
        KflatsWarning: no layer has codes that it multiplies by, so that forms are alike.

    Raises:
        KflatsError: an unknown form; "auto" for a model whose folder does not say what forms lose. In "int8", a call
            that asks for gradients, or on another device than a CPU or a GPU of CUDA.

    >>> import kflats, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
    >>> recipe = kflats.Recipe(kflats.KeepDense(), codec=kflats.Integer(bits=8))
    >>> _ = kflats.compress_(model, {"linear": recipe}, keep="30%", quiet=True)
    >>> x = torch.randn(4, 64)
    >>> near = model(x)
    >>> run_as_(model, "int8"), bool((model(x) - near).norm() < 0.04 * near.norm())
    (1, True)
    """
    check_run_form(form, auto=True)
    chosen = fastest(model, known_losses(model), most_loss, quiet=quiet) if form == "auto" else form
    warn_without_effect(model, chosen)
    return set_run_form_(model, chosen)


def form_losses(
    judge: Judge, compressed: nn.Module, tokenizer: Tokenizer | None = None, known: Outputs | None = None
) -> tuple[FormLoss, ...]:
    """What ``compressed`` loses in each form that this machine has; none for a model without coded layers.

    Args:
        judge: knows the original's outputs. compressed, tokenizer: as for ``Judge``.
        known: the outputs of ``compressed`` as it is; None: not known.
    """
    losses, own = [], {layer.run_form for layer in coded_layers(compressed)}
    for form in _MEASURED if own else ():
        integers = integers_of(compressed) if form == "int8" else None
        if form != "int8" or integers is not None:
            with running_as(compressed, form):
                made = known if known is not None and own == {form} else judge(compressed, tokenizer)
            losses.append(FormLoss(form, made.loss, made.tail_loss, integers))
    return tuple(losses)


def fastest(model: nn.Module, losses: tuple[FormLoss, ...], most_loss: float, *, quiet: bool = False) -> RunForm:
    """The fastest form of ``model`` here, of those that lose at most ``most_loss`` more than "dense"; see ``run_as_``.

    Raises:
        KflatsError: no losses, a ``most_loss`` that is no number from 0 on, or a model that does not run on drawn
            inputs.
    """
    if not is_number(most_loss, 0):
        raise KflatsError(f"most_loss={most_loss!r} is no loss", hint="a number from 0 on, such as .002")
    if not coded_layers(model):
        return "dense"
    known = {one.form: one for one in losses}
    if "dense" not in known:
        raise KflatsError(
            "the run-time form auto is not supported for this model, because nothing says what its forms lose",
            cause="its folder was written without a proof, or its weights were changed after it",
            hint="kflats compare ORIGINAL DIR --card measures it in a folder; or name a form",
        )
    more = {form: max(0.0, one.loss - known["dense"].loss) for form, one in known.items() if _is_here(model, one)}
    allowed: list[RunForm] = [form for form in more if form == "dense" or more[form] <= most_loss]
    threads = torch.get_num_threads()
    shapes = tuple((layer.matrix.shape, layer.weight.dtype) for layer in coded_layers(model))
    key = (type(model), shapes, tuple(allowed), threads, device_of(model).type)
    if key not in _fastest_here:
        times = _times(model, allowed)
        _fastest_here[key] = min(times, key=times.__getitem__)
        shown = ", ".join(f"{form} {share(time)}" for form, time in times.items())
        announce(f"time of each run-time form, dense = 100 %, {threads} threads: {shown}", quiet=quiet)
    form = _fastest_here[key]
    announce(f"run-time form: {form}, which loses {number(more[form])} more than dense", quiet=quiet)
    return form


def integers_of(model: nn.Module) -> int | None:
    """Where the integers of int8 end on the device of the coded layers of ``model``; None where it has no such form,
    for layers on several kinds of device, and for a layer of more inputs than integers can add up."""
    layers = coded_layers(model)
    if any(layer.matrix.shape[1 if layer.transposed else 0] > MOST_INPUTS for layer in layers):
        return None
    kinds = {layer.weight.device.type for layer in layers} or {device_of(model).type}
    try:
        return integer_limit(kinds.pop()) if len(kinds) == 1 else None
    except KflatsError:
        return None


def _is_here(model: nn.Module, one: FormLoss) -> bool:
    """Whether the form computes here what it computed where its loss was measured."""
    return one.form != "int8" or one.integers == integers_of(model)


def _times(model: nn.Module, forms: list[RunForm]) -> dict[RunForm, float]:
    """Times as multiples of those of the first form: the geometric mean over shapes.

    Forms that fail at a shape which the first form runs are left out.

    Raises:
        KflatsError: the first form does not run on drawn inputs.
    """
    if len(forms) == 1:
        return dict.fromkeys(forms, 1.0)
    runner: nn.Module = next((part for part, _ in described_models(model)), model)
    contestants = []
    for form in forms:
        contestants.append(TorchModel(form, copy.deepcopy(runner)))
        set_run_form_(contestants[-1].model, form)
    shapes = _SHAPES if modality_of(runner) == "input_ids" else DRAWN_SHAPES
    timed, reasons = latencies(contestants, runner, shapes=shapes, turns=_TURNS, seconds=_SECONDS)
    each = {form: [one.ratio for one in timed if one.name == form] for form in forms}
    count = len(each[forms[0]])
    if count == 0:
        raise KflatsError(
            "the run-time form auto is not supported for this model, because it does not run on drawn inputs",
            cause="; ".join(f"{where}: {why}" for where, why in reasons.items()),
            hint="name a form",
        )
    return {form: math.prod(ratios) ** (1 / count) for form, ratios in each.items() if len(ratios) == count}
