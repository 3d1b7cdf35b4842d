"""Run-time forms: how a layer of codes multiplies, apart from how it is stored.

A form is made from the codes when a layer is first called, and is never saved. Dense forms take the time of the
original layer. In "int8" the inputs x of each token are rounded too:

    x W'  ~  diag(a) K_x K_w' diag(b),      K_x = round(x diag(s) / a),      K_w = round(diag(1/b) W diag(1/s))

with one a for each token and one b for each output, so that integers end at 127, or earlier
(``matrices.integer_kernels``). The scales s move size from inputs into the matrix (SmoothQuant: Xiao et al.,
arXiv:2211.10438). A code with error feedback has steps that are small where inputs are large: s is their square root.
Other codes know nothing of inputs, which are often large where the matrix is small: s is the square root of the root
mean square of a column (``evening_scales``).

``benchmarks/run_forms.py`` measures what this leaves out. To round the matrix with feedback could gain less than .001
of cosine, for the matrix has 8 bits. To subtract the mean of the inputs first, which only compression knows, gains
at most .0003 for codes with error feedback.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.matrices.integer_kernels import IntegerKernel, Packed, integer_kernel, rows_at_once

LEAST = 1e-30
"""A row or an output of less is rounded to zeros."""
MOST_INPUTS = 2**17
"""Inputs of a product of integers up to 127: its sums stay in 32 bits."""
_AT_ONCE = 2**16
"""Numbers that are rounded at a time, so that no copies of the whole matrix are made."""
_WIDENED = 2**20
"""Numbers of a matrix in bfloat16 that are in float32 at a time."""
_ROWS = 4
"""Rows from which on that pays."""


Operator: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Inputs, a factor (out, in), and a bias (out,) -> their product."""


class Product(Protocol):
    """A matrix that is ready to multiply."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(*b, in)`` -> ``(*b, out)``, in x's type, plus ``bias`` (out,)."""


@dataclass(frozen=True)
class DenseProduct:
    """``factors``: (out, in) each, the first one applied first."""

    factors: tuple[Tensor, ...]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``Product``. In another type than x's the bias is added after, unrounded."""
        return self.by((F.linear, F.linear), x, bias, rows=x.numel() // max(1, x.shape[-1]))

    def by(
        self, operators: Sequence[Operator], x: Tensor, bias: Tensor | None, *, rows: int, channels: int = -1
    ) -> Tensor:
        """``x`` through all factors, by an operator for each.

        Args:
            operators: as many as factors, or more. Each gives the product with a factor, plus a bias where it is given.
            rows: how many vectors each factor is multiplied by.
            channels: the dimension of outputs.
        """
        *first, last = self.factors
        used = operators[: len(self.factors)]
        if _widens(last, rows):
            used = [_in_float32(multiply, channels) for multiply in used]
        *before, multiply = used
        own = last.dtype == x.dtype
        out = x if own else x.to(last.dtype)
        for factor, operator in zip(first, before, strict=True):
            out = operator(out, factor, None)
        if own:
            return multiply(out, last, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))
        out = multiply(out, last, None).to(x.dtype)
        return out if bias is None else out.add_(_along(bias, channels))


def _along(bias: Tensor, channels: int) -> Tensor:
    """(out,) of such a shape that it is added along the dimension ``channels``, counted from the end."""
    return bias.view(-1, *(1,) * (-1 - channels))


def _widens(factor: Tensor, rows: int) -> bool:
    """Whether products of so many rows in bfloat16 are slow where ``factor`` is: on x86 CPUs without AVX-512 torch
    takes five to nine times as long for them as for those in float32 (``benchmarks/products.py``)."""
    return factor.dtype == torch.bfloat16 and rows >= _ROWS and factor.device.type == "cpu" and _lacks_bfloat16()


@cache
def _lacks_bfloat16() -> bool:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def _in_float32(multiply: Operator, channels: int) -> Operator:
    """The product of bfloat16 with the same numbers, multiplied and summed in float32, and rounded at the end."""

    def product(x: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
        wide, rows = x.to(torch.float32), max(1, _WIDENED // max(1, factor.shape[1]))
        parts = [multiply(wide, part.to(torch.float32), None) for part in factor.split(rows)]
        out = torch.cat(parts, dim=channels) if len(parts) > 1 else parts[0]
        return (out if bias is None else out.add_(_along(bias, channels))).to(torch.bfloat16)

    return product


def evening_scales(weight: Tensor) -> Tensor:
    """(in,) scales of inputs for a matrix (out, in) that says nothing of them; inputs that it drops keep theirs.

    >>> evening_scales(torch.tensor([[4.0, 1.0, 0.0], [4.0, -1.0, 0.0]])).tolist()
    [2.0, 1.0, 1.0]
    """
    sizes = weight.square().mean(0).pow_(0.25)
    return torch.where(sizes > 0, sizes, torch.ones_like(sizes))


def steps_to(most: int, rows: Tensor) -> Tensor:
    """(m, in) -> (m,), the step of each row by which its largest integer is ``most``."""
    return rows.abs().amax(1).clamp_min(LEAST) / most


@dataclass(frozen=True)
class RoundedMatrix:
    """``numbers`` (in, out) int8; ``steps`` (out,); ``scales`` (in,), by which inputs are multiplied first."""

    numbers: Tensor
    steps: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor, steps_of: Callable[[Tensor], Tensor]) -> RoundedMatrix:
        """Of (out, in) float32, rounded to the nearest integers; ``steps_of``: (m, in) -> (m,), a step for each.

        Raises:
            KflatsError: more than ``MOST_INPUTS`` inputs.
        """
        if len(scales) > MOST_INPUTS:
            raise KflatsError(
                f"integers of 8 bits are not supported for a layer of {len(scales):,} inputs",
                cause=f"sums of more than {MOST_INPUTS:,} products may leave 32 bits",
                hint="the run-time form dense, or a file of floats",
            )
        at_once = max(1, _AT_ONCE // max(1, len(scales)))
        steps = weight.new_empty(len(weight))
        # A new tensor: torch 2.13 reads beyond a view of one input whose strides are not those of a new tensor.
        numbers = torch.empty(len(scales), len(weight), dtype=torch.int8, device=weight.device)
        for first in range(0, len(weight), at_once):
            rows = slice(first, first + at_once)
            scaled = weight[rows] / scales
            steps[rows] = steps_of(scaled)
            numbers[:, rows] = scaled.div_(steps[rows].unsqueeze(1)).round_().T
        return cls(numbers, steps, scales)


@dataclass(frozen=True)
class IntegerProduct:
    """``packed``: the integers of a matrix, for ``kernel``; ``steps`` (out,) and ``scales`` (in,) as in
    ``RoundedMatrix``."""

    packed: Packed
    steps: Tensor
    scales: Tensor
    kernel: IntegerKernel

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor) -> IntegerProduct:
        """Of (out, in) float32, rounded to the integers of its device.

        Raises:
            KflatsError: as ``integer_kernel`` and ``RoundedMatrix.of``.
        """
        kernel = integer_kernel(weight.device.type)
        rounded = RoundedMatrix.of(weight, scales, partial(steps_to, kernel.most))
        return cls(kernel.packed(rounded.numbers), rounded.steps, scales, kernel)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``Product``. A token with NaN or infinity has outputs that are not finite."""
        check_width(x, len(self.scales))
        inputs = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(inputs), len(self.steps), dtype=torch.float32)
        learns = bias is not None and torch.is_grad_enabled() and bias.requires_grad
        # One pass fewer over the outputs, where no gradient of a bias must pass.
        added = None if bias is None or learns else bias.to(torch.float32)
        at_once = rows_at_once(len(self.scales), len(self.steps), x.device.type)
        for first in range(0, len(inputs), at_once):
            rows = slice(first, first + at_once)
            self._round_and_multiply(inputs[rows], added, out[rows])
        out = out + bias if bias is not None and learns else out
        return out.to(x.dtype).reshape(*x.shape[:-1], len(self.steps))

    @cached_property
    def constants(self) -> Tensor:
        """(in + out + 1,) ``scales``, ``steps`` in parts of the largest integer, and that integer."""
        limit = self.steps.new_full((1,), self.kernel.most)
        return torch.cat([self.scales, self.steps / limit, limit])

    def _round_and_multiply(self, x: Tensor, added: Tensor | None, out: Tensor) -> None:
        """Write the outputs of some tokens into ``out``, which holds the sums of integers first."""
        rows = x * self.scales
        largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        sizes = largest.clamp_min_(LEAST).div_(self.kernel.most)
        whole = self.kernel.rounded(rows.div_(sizes))
        sums = out.view(self.kernel.sums)
        self.packed.sums_(sums, whole)
        if sums.dtype != out.dtype:
            out.copy_(sums)
        out.mul_(sizes)
        if added is None:
            out.mul_(self.steps)
        else:
            torch.addcmul(added, out, self.steps, out=out)


def check_width(x: Tensor, inputs: int) -> None:
    """Refuse inputs of another length: those of length 1 would be repeated.

    Raises:
        KflatsError: ``x`` has other than (*b, ``inputs``) numbers.
    """
    if not x.ndim or x.shape[-1] != inputs:
        raise KflatsError(
            f"inputs of shape {tuple(x.shape)} do not fit a layer of {inputs} inputs",
            cause="the layer belongs behind another one",
        )
