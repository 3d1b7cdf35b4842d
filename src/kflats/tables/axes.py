"""Axes as the head of a table holds them: integers of 16 bits with a scale for each axis.

They are half as large as float32. Axes of 8 bits would be so far from orthogonal that errors grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kflats.tables.layout import tensor_of

_LARGEST = 32767


@dataclass(frozen=True)
class Axes:
    """``levels`` (k, d, d) int16, the axes of k flats as rows, in steps of their ``scales`` (k, d)."""

    levels: Tensor
    scales: Tensor

    @classmethod
    def of(cls, axes: Tensor) -> Axes:
        """Axes (k, d, d), rounded.

        >>> made = Axes.of(torch.tensor([[[0.6, 0.8], [-0.8, 0.6]]]))
        >>> made.dense
        tensor([[[ 0.6000,  0.8000],
                 [-0.8000,  0.6000]]])
        """
        scales = axes.abs().amax(2).clamp_min(1e-30) / _LARGEST
        return cls((axes / scales.unsqueeze(2)).round().to(torch.int16), scales)

    @cached_property
    def dense(self) -> Tensor:
        """(k, d, d) float32."""
        return self.levels.to(torch.float32) * self.scales.unsqueeze(2)

    def __len__(self) -> int:
        return len(self.levels)

    @cached_property
    def analysis(self) -> Tensor:
        """(k, d, d) float32, which rows are multiplied by for their coordinates: the inverse of ``dense``. So rounded
        axes lose nothing, and errors of coordinates are those of rows."""
        inverse: Tensor = torch.linalg.inv(self.dense.to(torch.float64))
        return inverse.to(torch.float32)

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
        levels = tensor_of(tensors, "axes", torch.int16, -1, columns, columns)
        return cls(levels, tensor_of(tensors, "axis_scales", torch.float32, len(levels), columns))
