"""Convolutions on a Matrix: a thin convolution of r outputs, then a mixture of these outputs at every pixel."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.matrices.base import Matrix
from kflats.matrices.dense import DenseMatrix
from kflats.matrices.interpolative import InterpolativeMatrix
from kflats.matrices.layers import HoldsMatrix, check_bias, check_matrix_rows
from kflats.matrices.low_rank import LowRankMatrix

CONVOLVED = (LowRankMatrix.kind, InterpolativeMatrix.kind, DenseMatrix.kind)  # kinds of matrices that can be a kernel


class FactoredConv2d(HoldsMatrix, nn.Module):
    """An ``nn.Conv2d`` whose kernel is a Matrix: a convolution of r outputs, then 1 x 1 to all outputs.

        out = conv1x1(conv(x; A), B) + bias,     kernel.flatten(1).T = M = A B,   A (in * kh * kw, r),  B (r, out)

    Stride, padding (every ``padding_mode``) and dilation belong to the first of the two. It costs
    r (in kh kw + out) multiplications a pixel instead of in kh kw out, and is exact for M of rank r.

    Args:
        matrix: (in * kh * kw, out), or its transpose with ``matrix_rows="out_features"``; a LowRankMatrix or an
            InterpolativeMatrix, or a DenseMatrix, which is one convolution as before. Flats need every patch of the
            image as a row: they are refused.
        like: the layer to stand in for; its geometry is read, its tensors are not.
        bias: (out,).
        matrix_rows: "in_features" (rows of M are the numbers of a patch, channel by channel) or "out_features".

    Raises:
        KflatsError: a grouped convolution, flats, another shape, or a bias of the wrong length.

    >>> import torch
    >>> conv = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    >>> layer = FactoredConv2d(LowRankMatrix(torch.ones(75, 2), torch.ones(2, 8)), conv)
    >>> layer(torch.ones(1, 3, 10, 10)).shape
    torch.Size([1, 8, 5, 5])
    """

    bias: nn.Parameter | None
    gained_bias = False  # True where the layer it stands for has no bias

    def __init__(
        self, matrix: Matrix, like: nn.Conv2d, bias: Tensor | None = None, *, matrix_rows: str = "in_features"
    ) -> None:
        nn.Module.__init__(self)
        check_matrix_rows(matrix_rows)
        if like.groups != 1:
            raise KflatsError(
                f"a convolution of {like.groups} groups is not supported",
                cause=f"its kernel is {like.groups} matrices, not one",
                hint="leave this layer dense",
            )
        if matrix.kind not in CONVOLVED:
            raise KflatsError(
                f"a matrix of kind {matrix.kind!r} cannot be a convolution's kernel",
                cause="its rows would be patches of the image, clustered one by one",
                hint="the method SVD",
            )
        self.matrix_rows = matrix_rows
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.kernel_size, self.stride, self.padding, self.dilation = (
            like.kernel_size,
            like.stride,
            like.padding,
            like.dilation,
        )
        self.groups, self.padding_mode = 1, like.padding_mode
        # torch's own layout for F.pad: "same" and asymmetric paddings are worked out in it.
        self._margins: list[int] = list(like._reversed_padding_repeated_twice)
        expected = (self.in_channels * self.kernel_size[0] * self.kernel_size[1], self.out_channels)
        if (matrix.shape if matrix_rows == "in_features" else matrix.shape[::-1]) != expected:
            raise KflatsError(
                f"a matrix of shape {matrix.shape} cannot be the kernel of {like}",
                cause=f"its shape must be {expected} with inputs as rows, or the reverse with outputs as rows",
            )
        check_bias(bias, self.out_channels)
        self._take(matrix, own=True)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def forward(self, x: Tensor) -> Tensor:
        """``(*b, in, height, width)`` -> ``(*b, out, ...)``, with at most one dimension b, in x's type."""
        matrix = self.matrix
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if isinstance(matrix, DenseMatrix):
            kernel = matrix.weight.T if self.matrix_rows == "in_features" else matrix.weight
            return self._convolved(x, kernel.to(x.dtype), bias)
        left, right = (factor.to(x.dtype) for factor in cast(LowRankMatrix | InterpolativeMatrix, matrix).factors())
        if left.shape[1] == 0:  # torch has no convolution of no outputs: one that is zero stands for it
            left, right = F.pad(left, (0, 1)), F.pad(right, (0, 0, 0, 1))
        thin, mixing = (left.T, right.T) if self.matrix_rows == "in_features" else (right, left)
        # At every pixel the (out, r) mixing matrix times the r channels of the thin convolution.
        return F.conv2d(self._convolved(x, thin, None), mixing[:, :, None, None], bias)

    def _convolved(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._margins, mode=self.padding_mode), (0, 0)
        kernel = kernel.reshape(-1, self.in_channels, *self.kernel_size)
        return F.conv2d(x, kernel, bias, self.stride, padding, self.dilation)

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows."""
        size = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        return f"{size}, {self.matrix.kind}, values={self.matrix.num_values}, matrix_rows={self.matrix_rows}"
