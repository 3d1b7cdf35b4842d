"""Axes as the head of a table holds them: integers of 16 or 8 bits with a scale for each axis.

Those of 16 bits are half as large as float32, and as good. Those of 8 bits are not quite orthogonal: the squared error
of a row is some percent more or less than that of its coordinates. They pay where a table has few rows a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kflats.tables.layout import tensor_of


@dataclass(frozen=True)
class Axes:
    """``levels`` (k, d, d) int16 or int8, the axes of k flats as rows, in steps of their ``scales`` (k, d)."""

    levels: Tensor
    scales: Tensor

    @classmethod
    def of(cls, axes: Tensor, dtype: torch.dtype = torch.int16) -> Axes:
        """Axes (k, d, d), rounded to integers of this type.

        >>> made = Axes.of(torch.tensor([[[0.6, 0.8], [-0.8, 0.6]]]))
        >>> made.dense
        tensor([[[ 0.6000,  0.8000],
                 [-0.8000,  0.6000]]])
        """
        scales = axes.abs().amax(2).clamp_min(1e-30) / torch.iinfo(dtype).max
        return cls((axes / scales.unsqueeze(2)).round().to(dtype), scales)

    @property
    def coarse(self) -> bool:
        """Whether they are of 8 bits."""
        return self.levels.dtype == torch.int8

    def coarser(self) -> Axes:
        """The same axes in 8 bits."""
        return Axes.of(self.dense, torch.int8)

    @cached_property
    def dense(self) -> Tensor:
        """(k, d, d) float32."""
        return self.levels.to(torch.float32) * self.scales.unsqueeze(2)

    def __len__(self) -> int:
        return len(self.levels)

    @cached_property
    def analysis(self) -> Tensor:
        """(k, d, d) float32, which rows are multiplied by for their coordinates: the inverse of ``dense``. So rounded
        axes lose nothing of a row."""
        # One by one: several at once may hang, or be wrong, with more than one thread (pytorch issues 141358, 142815).
        return torch.stack([torch.linalg.inv(axes) for axes in self.dense.to(torch.float64)]).to(torch.float32)

    def errors(self, apart: Tensor, flats: Tensor) -> Tensor:
        """(m,) squared errors of rows, of which ``flats`` (m,) are the flats and ``apart`` (m, d) the errors of
        coordinates, which axes of 16 bits do not change."""
        if not self.coarse:
            return apart.square().sum(1)
        squares = apart.new_empty(len(apart))
        for flat in flats.unique().tolist():
            mine = flats == flat
            squares[mine] = (apart[mine] @ self.dense[flat]).square().sum(1)
        return squares

    @property
    def nbytes(self) -> int:
        """Bytes in the head."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """For the head."""
        return {"axes": self.levels, "axis_scales": self.scales}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], columns: int) -> Axes:
        """The axes of a head.

        Raises:
            KflatsError: they are none of so many columns.
        """
        dtype = torch.int8 if "axes" in tensors and tensors["axes"].dtype == torch.int8 else torch.int16
        levels = tensor_of(tensors, "axes", dtype, -1, columns, columns)
        return cls(levels, tensor_of(tensors, "axis_scales", torch.float32, len(levels), columns))
