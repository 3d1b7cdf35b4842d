"""How a device multiplies integers: by which operator of torch, and up to which integers its sums are exact.

Three kinds are in use. CPUs with units for sums of products of 8 bits (VNNI, AMX) and GPUs of CUDA have
``torch._int_mm``, which is exact to 127. On CPUs without them it takes 9 to 42 times as long as a product of floats,
or, with AVX-512, adds pairs of products in 16 bits, of which integers to 63 are left. There FBGEMM multiplies integers:
it takes the inputs as unsigned numbers, whose pairs fit into 16 bits up to 90, 2 x (2 x 90) x 90 = 32,400, and takes .7
to .9 of the time of float32 from a sentence on (``benchmarks/products.py``). FBGEMM is in torch's own builds for x86,
which name its quantized tensors deprecated (pytorch issue 184982): where a later torch has none, the operators of the
other CPUs are tried. Where oneDNN, which has ``torch._int_mm``, is kept from units of the CPU, FBGEMM is exact to 127.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.machine import cpu_units

INTEGER_DEVICES = ("cpu", "cuda")
"""The kinds of device on which torch multiplies integers."""
_PROBES = ((1, 384, 384), (1, 8, 3), (5, 60, 8), (17, 64, 48), (33, 384, 384), (64, 384, 64))
"""Rows, inputs and outputs of the products by which a device is tried: they reach its different kernels."""
_ONE_ENGINE = Lock()
_FEWEST, _UNIT = 32, 8
"""CUDA multiplies more than 16 rows of integers, and inputs and outputs that are multiples of 8."""
_MULTIPLIED = {"cpu": 2**18, "cuda": 2**27}
"""Inputs or outputs at a time. On a CPU a block of outputs then stays in the cache, and memory of a much larger new
tensor takes longer to get from the system than to fill. On a GPU each call costs time: half a gigabyte of sums."""


class Packed(Protocol):
    """Integers of a matrix, as a kernel wants them."""

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        """Write the products of (rows, in) integers, and the matrix, into ``sums``, (rows, out), each in its type."""


@dataclass(frozen=True)
class IntegerKernel:
    """An operator of torch that multiplies integers.

    Args:
        pack: (in, out) int8 as the operator wants them.
        most: the largest integer of inputs and of the matrix.
        whole, sums: the types of inputs and of sums. Floats need not be whole: the operator rounds them to the nearest.
    """

    pack: Callable[[Tensor, int], Packed]
    most: int
    whole: torch.dtype
    sums: torch.dtype

    def packed(self, numbers: Tensor) -> Packed:
        """(in, out) int8, a new tensor."""
        return self.pack(numbers, self.most)

    def rounded(self, rows: Tensor) -> Tensor:
        """(rows, in) floats up to ``most``, which may be written into, as the operator takes them."""
        if self.whole == torch.float32:
            return rows.to(torch.float32)
        # A row of a transposed batch keeps strides that torch calls contiguous, and that torch 2.13 multiplies wrongly.
        return rows.round_().to(self.whole, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Plain:
    """For ``torch._int_mm`` on a CPU."""

    numbers: Tensor

    @classmethod
    def of(cls, numbers: Tensor, most: int) -> _Plain:
        return cls(numbers)

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        if whole.stride() != (whole.shape[1], 1):  # those of a new tensor, see ``IntegerKernel.rounded``
            whole = whole.reshape(-1).view(whole.shape)
        # No public operator: a build, or a later torch, may lack it.
        torch._int_mm(whole, self.numbers, out=sums)


@dataclass(frozen=True)
class _Padded:
    """For ``torch._int_mm`` on a GPU: filled up with zeros, output by output."""

    numbers: Tensor

    @classmethod
    def of(cls, numbers: Tensor, most: int) -> _Padded:
        inputs, outputs = numbers.shape
        return cls(F.pad(numbers.T, (0, -inputs % _UNIT, 0, -outputs % _UNIT)).contiguous().T)

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        (rows, inputs), outputs = whole.shape, sums.shape[1]
        if rows >= _FEWEST and self.numbers.shape == (inputs, outputs):
            torch._int_mm(whole, self.numbers, out=sums)
            return
        filled = F.pad(whole, (0, len(self.numbers) - inputs, 0, max(0, _FEWEST - rows)))
        sums.copy_(torch._int_mm(filled, self.numbers)[:rows, :outputs])


@dataclass(frozen=True)
class _Fbgemm:
    """For the operator of FBGEMM that rounds inputs to a scale and a zero point, here 1 and ``most``."""

    packed: torch.ScriptObject
    most: int

    @classmethod
    def of(cls, numbers: Tensor, most: int) -> _Fbgemm:
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise NotImplementedError("FBGEMM is missing in this build of torch")
        with _engine("fbgemm"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            rows = torch._make_per_tensor_quantized_tensor(numbers.T.contiguous(), 1.0, 0)
            return cls(torch.ops.quantized.linear_prepack(rows, None), most)

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        sums.copy_(multiply(whole, 1.0, self.most, self.packed))


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """Inside, operators of torch pack matrices for this engine, in all threads. One thread at a time is inside: another
    would put back what this one has set."""
    with _ONE_ENGINE:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def _candidates(kind: str) -> list[IntegerKernel]:
    """What may multiply integers on such a device, the fastest first."""
    if kind == "cuda":
        return [IntegerKernel(_Padded.of, 127, torch.int8, torch.int32)]
    plain = [IntegerKernel(_Plain.of, most, torch.int8, torch.int32) for most in (127, 63)]
    fbgemm = [IntegerKernel(_Fbgemm.of, most, torch.float32, torch.float32) for most in (127, 90)]
    # oneDNN may be kept from units that the CPU has (ONEDNN_MAX_CPU_ISA); FBGEMM has them all the same.
    return [plain[0], *fbgemm, plain[1]] if cpu_units() else fbgemm + plain


@cache
def integer_kernel(kind: str = "cpu") -> IntegerKernel:
    """The operator for such a device. Its products of the largest integers were compared with exact ones: torch says
    nothing where a sum in 16 bits is limited to 32767.

    Args:
        kind: of device, "cpu" or "cuda".

    Raises:
        KflatsError: another device; one whose products are wrong, or on which torch has no such product.

    >>> integer_kernel().most in (127, 90, 63)
    True
    """
    hint = "the run-time form bfloat16 or dense"
    if kind not in INTEGER_DEVICES:
        raise KflatsError(f"the run-time form int8 is not supported on {kind}", hint=hint)
    for kernel in _candidates(kind):
        if all(_is_exact(kernel, shape, kind) for shape in _PROBES):
            return kernel
    raise KflatsError(
        f"the run-time form int8 is not supported on this {'CPU' if kind == 'cpu' else 'GPU'} because its products of "
        "integers are wrong or missing",
        hint=hint,
    )


def integer_limit(kind: str = "cpu") -> int:
    """The largest integer of the form int8 on such a device: 127; 90 on CPUs without units for sums of products of 8
    bits, or 63 where FBGEMM is missing.

    Args, Raises: as ``integer_kernel``.

    >>> integer_limit() in (127, 90, 63)
    True
    """
    return integer_kernel(kind).most


def rows_at_once(inputs: int, outputs: int, kind: str) -> int:
    """How many rows to multiply at a time."""
    return max(1, _MULTIPLIED[kind] // max(1, inputs, outputs))


def _is_exact(kernel: IntegerKernel, shape: tuple[int, int, int], kind: str) -> bool:
    """Whether products of its largest integers are exact, of one sign and of drawn signs; not where there are none."""
    (m, k, n), draws = shape, torch.Generator().manual_seed(0)
    for least in (0, 1):
        left, right = (
            (torch.randint(least, 2, of, generator=draws) * 2 - 1).mul(kernel.most).to(torch.int8)
            for of in ((m, k), (k, n))
        )
        sums = torch.empty(m, n, dtype=kernel.sums, device=kind)
        try:
            kernel.packed(right.to(kind)).sums_(sums, left.to(kind, kernel.whole))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError):
            return False
        if not torch.equal(sums.cpu().to(torch.int32), left.to(torch.int32) @ right.to(torch.int32)):
            return False
    return True
