"""Coded layers, and flats, in graphs of ``torch.compile``: operators that the compiler does not look into.

A graph of plain operators decodes the integers in every call, multiplies the bases of all flats for each row, and takes
its compiler minutes. Where no gradient passes, it holds one operator instead, which runs the layer as outside of
graphs: the layer keeps its run-time form, and makes it anew after its scales have changed. In the form int8 one
operator gives the scales, and another is the product of integers. Plain operators round its inputs and scale its sums,
and the compiler joins them with those before and after. They make all sums at once, so that wide heads are one operator
too. Graphs for training and for files (``torch.export``) hold plain operators.

An operator takes tensors. So each layer has a number in a tensor, which no graph contains: graphs of equal layers are
one graph. The parameters of its matrix are arguments too, so that the compiler sees what the outputs depend on. Others
than the layer's own are used where it gives them: by ``torch.func.functional_call``, or because they change inside of
the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kflats.matrices.base import Matrix, is_exporting
from kflats.matrices.integer_kernels import INTEGER_DEVICES, integer_kernel
from kflats.matrices.running import LEAST, IntegerProduct, check_width


class Numbered(Protocol):
    """A layer that graphs call by its number."""

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """``(*b, in)`` inputs, ``(*b, 1)`` places of rows, or images -> outputs, a new tensor with its own strides."""

    def integers(self) -> IntegerProduct | None:
        """The product of the form int8; None where the layer has no such form."""

    def with_tensors(self, tensors: Sequence[Tensor]) -> Numbered:
        """This layer, or one like it if its matrix has other parameters than these."""


_LAYERS: WeakValueDictionary[int, Numbered] = WeakValueDictionary()
_NUMBERS = count()


def numbered(layer: Numbered) -> Tensor:
    """A number for ``layer``, as long as it is in use."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


# CUDA graphs would replay its kernels without asking whether scales have changed.
@torch.library.custom_op("kflats::computed", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def computed(
    given: Tensor,
    bias: Tensor | None,
    layer: Tensor,
    tensors: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """What the layer of this number computes, of this shape, in ``dtype``."""
    return _LAYERS[int(layer)].with_tensors(tensors).computed(given, bias)


@computed.register_fake
def _as_computed(
    given: Tensor,
    bias: Tensor | None,
    layer: Tensor,
    tensors: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return given.new_empty(shape, dtype=dtype)


def _product(layer: Tensor, tensors: Sequence[Tensor]) -> IntegerProduct:
    product = _LAYERS[int(layer)].with_tensors(tensors).integers()
    assert product is not None
    return product


# Both are called for each layer of each call: defined so, they take 20 us less than ``custom_op``.
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
_CONSTANTS, _SUMS = "kflats::integer_constants", "kflats::integer_sums_"
torch.library.define(_CONSTANTS, "(Tensor layer, Tensor[] tensors, int length) -> Tensor", tags=_TAGS)
torch.library.define(_SUMS, "(Tensor(a!) sums, Tensor whole, Tensor layer, Tensor[] tensors) -> ()", tags=_TAGS)


@torch.library.impl(_CONSTANTS, INTEGER_DEVICES)
def _integer_constants(layer: Tensor, tensors: Sequence[Tensor], length: int) -> Tensor:
    """A copy of ``IntegerProduct.constants`` of a layer."""
    return _product(layer, tensors).constants.clone()


@torch.library.register_fake(_CONSTANTS)  # type: ignore[untyped-decorator]
def _as_constants(layer: Tensor, tensors: Sequence[Tensor], length: int) -> Tensor:
    return tensors[0].new_empty(length, dtype=torch.float32)  # a matrix of integers has a scale at least


@torch.library.impl(_SUMS, INTEGER_DEVICES)
def _integer_sums_(sums: Tensor, whole: Tensor, layer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write (rows, in) integers times those of a layer into ``sums``, (rows, out): memory that the graph uses again.
    New memory of this size takes long to get from the system."""
    _product(layer, tensors).packed.sums_(sums, whole)


@torch.library.register_fake(_SUMS)  # type: ignore[untyped-decorator]
def _no_sums_(sums: Tensor, whole: Tensor, layer: Tensor, tensors: Sequence[Tensor]) -> None:
    pass


def _integer_types(kind: str) -> tuple[torch.dtype, torch.dtype]:
    """The types of inputs and sums of the kernel for such a device: a constant of the graph."""
    kernel = integer_kernel(kind)
    return kernel.whole, kernel.sums


# As ``torch.compiler.assume_constant_result`` does, which imports the compiler: that takes seconds.
_integer_types.__dict__["_dynamo_marked_constant"] = True


def multiplied_as_integers(
    x: Tensor, bias: Tensor | None, layer: Tensor, tensors: Sequence[Tensor], inputs: int, outputs: int
) -> Tensor:
    """What ``IntegerProduct`` computes, ``(*b, in)`` -> ``(*b, out)``: the product of integers, and plain operators."""
    check_width(x, inputs)
    constants = torch.ops.kflats.integer_constants(layer, tensors, inputs + outputs + 1)
    rows = x.reshape(-1, inputs) * constants[:inputs]
    largest = rows.abs().amax(1, keepdim=True).clamp_min(LEAST)
    of_whole, of_sums = _integer_types(x.device.type)
    whole = (rows / (largest / constants[-1])).round().to(of_whole)
    sums = rows.new_empty(len(rows), outputs, dtype=of_sums)
    torch.ops.kflats.integer_sums_(sums, whole, layer, tensors)
    # Of at most four tensors, so that inductor computes it where it is used, without a pass of its own.
    out: Tensor = sums.to(torch.float32) * largest * constants[inputs:-1]
    out = out if bias is None else out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], outputs)


WIDEST = 2**14
"""Outputs of a layer in int8 that is more than one operator: its sums take as much memory again as its outputs."""


def is_one_operator(matrix: Matrix) -> bool:
    """Whether the graph that is recorded calls a layer of ``matrix`` by its number: in calls without derivatives."""
    # ``is_compiling`` would be true while any thread compiles.
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return False
    return matrix.one_operator and not torch.is_grad_enabled() and forward_ad._current_level < 0
