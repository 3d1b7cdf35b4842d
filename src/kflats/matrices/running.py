"""Run-time forms: how a layer of codes multiplies, apart from how it is stored.

A form is made from the codes when a layer is first called, and is never saved. Dense forms take the time of the
original layer. In "int8" the inputs x of each token are rounded too:

    x W'  ~  diag(a) K_x K_w' diag(b),      K_x = round(x diag(s) / a),      K_w = round(diag(1/b) W diag(1/s))

with one a for each token and one b for each output, so that integers end at 127 (at 63 on CPUs without VNNI units). The
scales s move size from inputs into the matrix (SmoothQuant: Xiao et al., arXiv:2211.10438). A code with error feedback
has steps that are small where inputs are large: s is their square root. Other codes know nothing of inputs, which are
often large where the matrix is small: s is the square root of the root mean square of a column (``evening_scales``).

``benchmarks/run_forms.py`` measures what this leaves out. To round the matrix with feedback could gain less than .001
of cosine, for the matrix has 8 bits. To subtract the mean of the inputs first, which only compression knows, gains
nothing for codes with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError

LEAST = 1e-30
"""A row or an output of less is rounded to zeros."""
_AT_ONCE = 2**16
"""Numbers that are rounded at a time, so that no copies of the whole matrix are made."""
_MULTIPLIED = 2**18
"""Inputs or outputs at a time. A block of outputs then stays in the cache, and memory of a much larger new tensor takes
longer to get from the system than to fill."""
_MULTIPLIED_ON_GPU = 2**27
"""The same on a GPU, where each call costs time: half a gigabyte of sums."""
_PROBES = ((1, 384, 384), (1, 8, 3), (5, 60, 8), (17, 64, 48), (33, 384, 384), (64, 384, 64))
"""Rows, inputs and outputs of the products by which a device is tried: they reach its different kernels."""
INTEGER_DEVICES = ("cpu", "cuda")
"""The kinds of device on which torch multiplies integers."""
_FEWEST, _UNIT = 32, 8
"""CUDA multiplies more than 16 rows of integers, and inputs and outputs that are multiples of 8."""


@cache
def integer_limit(kind: str = "cpu") -> int:
    """The largest integer of the form int8 on such a device: 127, or 63 on CPUs whose kernels add pairs of products in
    16 bits.

    Kernels without VNNI units do, and torch says nothing where such a sum is limited to 32767. So products of the
    largest integers are compared with exact ones, and the limit is kept.

    Args:
        kind: of device, "cpu" or "cuda".

    Raises:
        KflatsError: another device; one that is wrong with both, or on which torch has no such product.

    >>> integer_limit() in (127, 63)
    True
    """
    hint = "the run-time form bfloat16 or dense"
    if kind not in INTEGER_DEVICES:
        raise KflatsError(f"the run-time form int8 is not supported on {kind}", hint=hint)
    for most in (127, 63) if kind == "cpu" else (127,):
        if all(_is_exact(most, shape, kind) for shape in _PROBES):
            return most
    raise KflatsError(
        f"the run-time form int8 is not supported on this {'CPU' if kind == 'cpu' else 'GPU'} because its products of "
        "integers are wrong or missing",
        hint=hint,
    )


def _is_exact(most: int, shape: tuple[int, int, int], kind: str) -> bool:
    """Whether products of integers of this size are exact, of one sign and of drawn signs; not where there are none."""
    (m, k, n), draws = shape, torch.Generator().manual_seed(0)
    for least in (0, 1):
        left, right = (
            (torch.randint(least, 2, of, generator=draws) * 2 - 1).mul(most).to(torch.int8) for of in ((m, k), (k, n))
        )
        sums = torch.empty(m, n, dtype=torch.int32, device=kind)
        try:
            _multiply(left.to(kind), _arranged(right.to(kind)), sums)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError):
            return False
        if not torch.equal(sums.cpu(), left.to(torch.int32) @ right.to(torch.int32)):
            return False
    return True


def _arranged(numbers: Tensor) -> Tensor:
    """(in, out) int8 as ``_multiply`` takes them: on a GPU filled up with zeros, output by output."""
    if numbers.device.type == "cpu":
        return numbers
    inputs, outputs = numbers.shape
    return F.pad(numbers.T, (0, -inputs % _UNIT, 0, -outputs % _UNIT)).contiguous().T


def _multiply(whole: Tensor, numbers: Tensor, sums: Tensor) -> None:
    """Write the products of (rows, in) int8 and arranged integers into ``sums``, (rows, out) int32."""
    (rows, inputs), outputs = whole.shape, sums.shape[1]
    if whole.device.type == "cpu" or (rows >= _FEWEST and numbers.shape == (inputs, outputs)):
        # No public operator: a build, or a later torch, may lack it.
        torch._int_mm(whole, numbers, out=sums)
        return
    filled = F.pad(whole, (0, len(numbers) - inputs, 0, max(0, _FEWEST - rows)))
    sums.copy_(torch._int_mm(filled, numbers)[:rows, :outputs])


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
        *first, last = self.factors
        own = last.dtype == x.dtype
        out = x if own else x.to(last.dtype)
        for factor in first:
            out = F.linear(out, factor)
        if own:
            return F.linear(out, last, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))
        out = F.linear(out, last)
        return out.to(x.dtype) if bias is None else out.to(x.dtype).add_(bias)


def evening_scales(weight: Tensor) -> Tensor:
    """(in,) scales of inputs for a matrix (out, in) that says nothing of them; inputs that it drops keep theirs.

    >>> evening_scales(torch.tensor([[4.0, 1.0, 0.0], [4.0, -1.0, 0.0]])).tolist()
    [2.0, 1.0, 1.0]
    """
    sizes = weight.square().mean(0).pow_(0.25)
    return torch.where(sizes > 0, sizes, torch.ones_like(sizes))


@dataclass(frozen=True)
class IntegerProduct:
    """``numbers`` (in, out) int8, arranged for their device; ``steps`` (out,); ``scales`` (in,), by which inputs are
    multiplied first."""

    numbers: Tensor
    steps: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor, most: int | None = None) -> IntegerProduct:
        """Of (out, in) float32, rounded to the nearest integers up to ``most``, by default those of the device.

        Raises:
            KflatsError: as ``integer_limit``.
        """
        limit = most or integer_limit(weight.device.type)
        at_once = max(1, _AT_ONCE // max(1, len(scales)))
        steps = weight.new_empty(len(weight))
        # A new tensor: torch 2.13 reads beyond a view of one input whose strides are not those of a new tensor.
        numbers = torch.empty(len(scales), len(weight), dtype=torch.int8, device=weight.device)
        for first in range(0, len(weight), at_once):
            rows = slice(first, first + at_once)
            scaled = weight[rows] / scales
            steps[rows] = scaled.abs().amax(1).clamp_min(LEAST) / limit
            numbers[:, rows] = scaled.div_(steps[rows].unsqueeze(1)).round_().T
        return cls(_arranged(numbers), steps, scales)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``Product``. A token with NaN or infinity has outputs that are not finite."""
        check_width(x, len(self.scales))
        inputs = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(inputs), len(self.steps), dtype=torch.float32)
        learns = bias is not None and torch.is_grad_enabled() and bias.requires_grad
        # One pass fewer over the outputs, where no gradient of a bias must pass.
        added = None if bias is None or learns else bias.to(torch.float32)
        most = _MULTIPLIED if x.device.type == "cpu" else _MULTIPLIED_ON_GPU
        at_once = max(1, most // max(1, *self.numbers.shape))
        for first in range(0, len(inputs), at_once):
            rows = slice(first, first + at_once)
            self._round_and_multiply(inputs[rows], added, out[rows])
        out = out + bias if bias is not None and learns else out
        return out.to(x.dtype).reshape(*x.shape[:-1], len(self.steps))

    @cached_property
    def constants(self) -> Tensor:
        """(in + out + 1,) ``scales``, ``steps`` in parts of the largest integer, and that integer."""
        limit = self.steps.new_full((1,), integer_limit(self.steps.device.type))
        return torch.cat([self.scales, self.steps / limit, limit])

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        """Write the products of (rows, in) int8 into ``sums``, (rows, out) int32."""
        if whole.stride() != (whole.shape[1], 1):  # those of a new tensor, see ``_round_and_multiply``
            whole = whole.reshape(-1).view(whole.shape)
        _multiply(whole, self.numbers, sums)

    def _round_and_multiply(self, x: Tensor, added: Tensor | None, out: Tensor) -> None:
        """Write the outputs of some tokens into ``out``, which holds the sums of integers first."""
        rows = x * self.scales
        largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        sizes = largest.clamp_min_(LEAST).div_(integer_limit(x.device.type))
        # A row of a transposed batch keeps strides that torch calls contiguous, and that torch 2.13 multiplies wrongly.
        whole = rows.div_(sizes).round_().to(torch.int8, memory_format=torch.contiguous_format)
        sums = out.view(torch.int32)
        _multiply(whole, self.numbers, sums)
        out.copy_(sums).mul_(sizes)
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
