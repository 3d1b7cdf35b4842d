"""Models whose linear layers multiply integers in recorded graphs, and are right on every CPU.

For each token x, with integers K, steps b and scales s as in the run-time form int8 (``kflats.matrices.running``):

    a = max |x s|,    y = a (b / 127 (round(127 x s / a) K)),    |K_2i| + |K_2i+1| <= 128 where their signs are equal

s is the .7th power of the steps of a code with error feedback, where the run-time form takes their square root.

onnxruntime multiplies unsigned bytes by signed ones fastest, so the inputs are recorded as round(127 x s / a) + 128,
with 128 as their zero point: QuantizeLinear, one pass over x s / a. On x86 CPUs without VNNI units its kernels add
the products of inputs 2i and 2i + 1 in 16 bits, and limit the sum in silence (``pmaddubsw`` in QgemmU8X8KernelAvx2,
QgemvU8S8KernelAvx2 and qgemm_kernel_sse41 of MLAS: they read four inputs from a multiple of four on). Products of two
signs make no large sum. So K may end at 127, and only two neighbours of one sign are limited, to a sum of 128: 255 *
128 = 32640 lies below the limit, 32767.

On CPUs with AMX onnxruntime 1.21 to 1.24 computes wrong sums of matrices whose number of outputs is no multiple of 16
(github.com/microsoft/onnxruntime/issues/26324 shows it for a convolution), unless there are at most 16. Such matrices
get outputs of zeros, which are cut off again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.release import needed
from kflats.matrices.base import Matrix
from kflats.matrices.coded import from_integers
from kflats.matrices.layers import FactoredConv2d, FactoredHead, FactoredLinear
from kflats.matrices.running import LEAST, RoundedMatrix, steps_to
from kflats.model.swap import Swaps
from kflats.model.weights import Weight, dense_weight, factored_layers, find_weights, is_parameter

LIMIT, SAFE = 127, 63
"""The largest integer of inputs and of K; sums of two neighbours may exceed it by 1, by rounding. Integers up to the
second need no look at their neighbours."""
SCALE_POWER = 0.7
"""Of the steps of columns, as scales of inputs: ``benchmarks/integer_scales.py``, on sentences of CoLA (dev) and
paragraphs of WikiText-2 (valid). From .5 to 1 it matters little."""
_MIDDLE = 128
_STEP = 1.0 / LIMIT
_OUTPUTS = 16
_SMALL_TABLE = 100_000  # numbers: an embedding of fewer is quicker and hardly larger as it is
_UINT8, _FLOAT = 2, 1  # of onnx.TensorProto


@torch.library.custom_op("kflats::rounded", mutates_args=())
def rounded(rows: Tensor) -> Tensor:
    """uint8, 127 times ``rows`` up to 1, rounded, and 128 more. In a file: QuantizeLinear."""
    return ((rows.nan_to_num() / _STEP).round().clamp(-_MIDDLE, LIMIT) + _MIDDLE).to(torch.uint8)


@rounded.register_fake
def _as_rows(rows: Tensor) -> Tensor:
    return torch.empty_like(rows, dtype=torch.uint8)


@torch.library.custom_op("kflats::integer_matmul", mutates_args=())
def integer_matmul(whole: Tensor, numbers: Tensor) -> Tensor:
    """``(*b, in)`` uint8 less 128, times ``(in, out)`` int8: float32, exact. In a file: MatMulInteger."""
    return ((whole.double() - _MIDDLE) @ numbers.double()).float()


@integer_matmul.register_fake
def _as_outputs(whole: Tensor, numbers: Tensor) -> Tensor:
    return whole.new_empty(*whole.shape[:-1], numbers.shape[1], dtype=torch.float32)


def paired_steps(rows: Tensor) -> Tensor:
    """(m, in) -> (m,), a step of each row by which inputs 2i and 2i + 1 of one sign sum to 128 at most: that of the
    largest such sum, or, where this loses less, that of ``SAFE`` for the largest number. A row of equal numbers is
    exact by the second.

    >>> paired_steps(torch.tensor([[3.0, -3.1, 2.1], [2.0, 2.0, 2.0]])).mul(126).round().tolist()
    [3.0, 4.0]
    """
    sizes = rows.abs().amax(1).clamp_min(LEAST)
    unit = rows / sizes.unsqueeze(1)  # squares of small numbers would be 0
    pairs = torch.nn.functional.pad(unit, (0, rows.shape[1] % 2)).unflatten(1, (-1, 2))
    sums = torch.maximum(pairs.clamp_min(0).sum(2), pairs.clamp_max(0).sum(2).neg()).amax(1)
    finer, safe = sums.clamp_min(LEAST) / LIMIT, steps_to(SAFE, unit)
    lost = [(unit - (unit / of.unsqueeze(1)).round() * of.unsqueeze(1)).square().sum(1) for of in (finer, safe)]
    return (torch.where(lost[0] <= lost[1], finer, safe) * sizes).clamp_min(LEAST / LIMIT)


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """What ``torch.onnx.export`` writes for the operators of this module, and for GELU in the form that onnxruntime
    recognises and computes in one pass."""
    op = needed("onnxscript", "kflats[onnx]", "export to ONNX").opset18

    def middle() -> object:
        return op.Cast(op.Constant(value_int=_MIDDLE), to=_UINT8)

    def quantized(rows: object) -> object:
        # Not with the sizes as steps along an axis, which would save the division: OpenVINO 2026.4 does not read that.
        return op.QuantizeLinear(rows, op.Constant(value_float=_STEP), middle())

    def product(whole: object, numbers: object) -> object:
        return op.Cast(op.MatMulInteger(whole, numbers, middle()), to=_FLOAT)

    def gelu(self: object, approximate: str = "none") -> object:  # by torch's name, which its exporter looks for
        def number(value: float) -> object:
            return op.CastLike(op.Constant(value_float=value), self)

        if approximate == "tanh":
            inner = op.Add(self, op.Mul(number(0.044715), op.Mul(self, op.Mul(self, self))))
            part = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi)), inner))
        else:
            part = op.Erf(op.Div(self, number(math.sqrt(2))))
        return op.Mul(number(0.5), op.Mul(self, op.Add(part, number(1.0))))

    return {
        torch.ops.kflats.rounded.default: quantized,
        torch.ops.kflats.integer_matmul.default: product,
        torch.ops.aten.gelu.default: gelu,
    }


class Joint:
    """The products of layers that read one tensor, which is rounded once, when the first of them is called.

    Args:
        products: of each layer, with equal scales.
        scales: (in,), by which inputs are multiplied; None: all of them are 1.
    """

    def __init__(self, products: Sequence[RoundedMatrix], scales: Tensor | None) -> None:
        self.products, self.scales = products, scales
        self._numbers = [_padded_outputs(product.numbers) for product in products]
        self._steps = [_padded_outputs(product.steps * _STEP) for product in products]
        self._read: Tensor | None = None
        self._version: int | None = None
        self._rounded: tuple[Tensor, Tensor]

    def output(self, x: Tensor, index: int) -> Tensor:
        """``(*b, in)`` -> ``(*b, out)`` of a layer. A token with NaN or infinity has no finite output."""
        # The model may write into ``x`` between two calls, which its version shows; an inference tensor has none.
        version = None if x.is_inference() else x._version
        if version is None or x is not self._read or version != self._version:
            rows = x if self.scales is None else x * self.scales
            largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
            # onnxruntime's maximum skips NaN, its sum does not. A row of zeros gives 0 / 0, and any integer times 0.
            sizes = largest + rows.sum(-1, keepdim=True) * 0.0
            self._read, self._version = x, version
            self._rounded = rounded(rows / sizes), sizes
        whole, sizes = self._rounded
        # The steps first: onnxruntime multiplies by them as it writes the sums.
        products = integer_matmul(whole, self._numbers[index]) * self._steps[index]
        outputs = len(self.products[index].steps)
        if products.shape[-1] > outputs:
            products = products[..., :outputs]
        out: Tensor = products * sizes
        return out


def _padded_outputs(numbers: Tensor) -> Tensor:
    """``(..., out)``, integers or steps, with outputs of zeros behind them, where their number asks for it."""
    missing = -numbers.shape[-1] % _OUTPUTS if numbers.shape[-1] > _OUTPUTS else 0
    return numbers if missing == 0 else torch.nn.functional.pad(numbers, (0, missing))


class Integers(nn.Module):
    """Layer ``index`` of a ``Joint``: ``(*b, in)`` -> ``(*b, out)``."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``kflats.matrices.running.Product``."""
        out = self.joint.output(x, self.index)
        return out if bias is None else out + bias


def in_integers_(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Let the linear layers and tied heads of ``model`` multiply integers, in place; not to be saved afterwards.

    Layers of codes give integers as the run-time form int8 does, with other scales, and with limited pairs. Dense
    linear layers and large dense tables (GPT-2's Conv1D and tied heads among them) are rounded to the nearest, with a
    step for each output or row. Parameters that no layer of their own multiplies by stay as they are. Layers that
    read one tensor share their scales, the geometric mean, so that it is rounded once.

    Args:
        model: in float32 on the CPU.
        run: runs ``model`` once, with any inputs.

    Returns:
        The names of layers that multiply by floats as before: factored ones without codes, and all convolutions.

    Raises:
        KflatsError: a weight with NaN or infinity.
    """
    rounded = list[tuple[Matrix, Tensor]]()
    weights = find_weights(model)
    with Swaps(model, just_found=True) as swaps:
        for weight in weights:
            role, size = weight.places[0].role, weight.shape[0] * weight.shape[1]
            dense = role == "conv2d" or is_parameter(role)  # stay floats in the graph
            if not dense and (role != "embedding" or len(weight.places) > 1 or size >= _SMALL_TABLE):
                matrix, rows = _round_(swaps, weight)
                if role != "embedding" or len(weight.places) > 1:  # multiplied by
                    rounded.append((matrix, rows))
    layers = {name: layer for name, layer in factored_layers(model) if isinstance(layer, FactoredLinear | FactoredHead)}
    parts = dict[str, tuple[Tensor, Tensor] | None]()
    for name, layer in layers.items():
        dense_rows = [rows for matrix, rows in rounded if layer.matrix is matrix]
        if dense_rows:
            parts[name] = dense_rows[0], torch.ones(dense_rows[0].shape[1])
        else:
            parts[name] = layer.matrix.scaled(transposed=layer.transposed, power=SCALE_POWER)
    floats = [name for name, part in parts.items() if part is None]
    inputs: dict[str, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(_keeper(inputs, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[str]] = {}
    for name in layers:
        if parts[name] is not None:
            groups.setdefault(id(inputs.get(name, layers[name])), []).append(name)
    for names in groups.values():
        found = {name: part for name in names if (part := parts[name]) is not None}
        scales = torch.stack([own.log() for _, own in found.values()]).mean(0).exp()
        shared = None if bool((scales == 1).all()) else scales
        joint = Joint([RoundedMatrix.of(rows, scales, paired_steps) for rows, _ in found.values()], shared)
        for index, name in enumerate(found):
            layers[name].register_module("recorded", Integers(joint, index))
    others = nn.Linear | nn.Conv2d | FactoredConv2d
    return (*floats, *(name for name, module in model.named_modules() if isinstance(module, others)))


def _keeper(inputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
    def keep(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        inputs.setdefault(name, given[0] if given else named["input"])

    return keep


def _round_(swaps: Swaps, weight: Weight) -> tuple[Matrix, Tensor]:
    """Integers with a step for each row of a table, or each output of a layer; and the rows or outputs before."""
    table = weight.places[0].role == "embedding"
    rows = dense_weight(swaps.model, weight).float()
    rows = rows if table else rows.T
    if not bool(torch.isfinite(rows).all()):
        raise KflatsError(
            f"{weight.name!r} holds NaN or infinity, which no integers stand for",
            cause="a damaged file, or a training that diverged",
        )
    steps = steps_to(LIMIT, rows)
    integers = (rows / steps.unsqueeze(1)).round().to(torch.int64)
    matrix = from_integers([integers], None, steps, scales="row")
    swaps.swap_(weight, matrix, matrix_rows="in_features" if table else "out_features")
    return matrix, rows
