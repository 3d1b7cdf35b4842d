"""Random rotation and a Lloyd-Max quantizer: a fixed rate without any fit to the data.

    row  ~  s_i c[q_i] Q,      q_ij in 0 .. 2^b - 1,      c the 2^b values of least squared error for N(0, 1)

After a random rotation the entries of any row are close to Gaussian with variance |row|^2 / d, so that one quantizer
fits every row (Max, IRE Trans. IT 6, 1960; Lloyd, IEEE Trans. IT 28, 1982; rotations as in Suresh et al., ICML
2017). Every row has its own scale, of least squares. The error is that of the Gaussian whatever the spectrum: .117 of
the whole at 2 bits. Transform coding uses the spectrum and loses a fraction of that. Choose this one where nothing may
be fitted.

Q is two rounds of random signs, a Walsh-Hadamard transform in blocks, and a random order of columns. Only signs and
orders are stored, and they give the same Q on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.scales import Scales, scales_of
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite, slices

_ROUNDS = 2


@dataclass(frozen=True)
class Rotation:
    """An orthogonal (d, d) matrix: ``signs`` (rounds, d) int8 of +-1 and ``orders`` (rounds, d) int16 or int32."""

    signs: Tensor
    orders: Tensor

    def __post_init__(self) -> None:
        d = self.signs.shape[-1]
        if self.signs.ndim != 2 or self.orders.shape != self.signs.shape or not d:
            raise KflatsError(
                f"signs {tuple(self.signs.shape)} and orders {tuple(self.orders.shape)} are not a rotation",
                cause="a damaged file",
            )
        ordered = self.orders.to(torch.int64).sort(1).values
        if not torch.equal(ordered, torch.arange(d).expand_as(ordered)) or bool((self.signs.abs() != 1).any()):
            raise KflatsError(
                "signs that are not +-1, or orders that are not permutations, are not a rotation",
                cause="a damaged file",
            )

    def matrix(self) -> Tensor:
        """Q (d, d) float32: rows of the table are (their rotated form) @ Q."""
        return self.back(torch.eye(self.signs.shape[1]))

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` (m, d) @ Q'."""
        for signs, order in zip(self.signs, self.orders, strict=True):
            rows = _hadamard((rows * signs.to(rows.dtype))[:, order.to(torch.int64)])
        return rows

    def back(self, rows: Tensor) -> Tensor:
        """``rows`` (m, d) @ Q."""
        for signs, order in zip(self.signs.flip(0), self.orders.flip(0), strict=True):
            spread = torch.empty_like(rows)
            spread[:, order.to(torch.int64)] = _hadamard(rows)
            rows = spread * signs.to(rows.dtype)
        return rows


@dataclass(frozen=True)
class RotationCode:
    """``levels`` (n, d) uint8, indices into ``values`` (2^bits,) float32; ``scales`` (n,)."""

    levels: Tensor
    scales: Scales
    values: Tensor
    rotation: Rotation

    @property
    def bits(self) -> int:
        """Bits of a level."""
        return len(self.values).bit_length() - 1

    @property
    def stored_bits(self) -> int:
        """Levels, scales, values, signs and orders."""
        d = self.levels.shape[1]
        beside = 32 * len(self.values) + _ROUNDS * d * (1 + 8 * self.rotation.orders.itemsize)
        return self.levels.numel() * self.bits + 8 * self.scales.values.nbytes + beside

    def rows(self, index: Tensor) -> Tensor:
        """The rows at ``index`` (m,), decoded, (m, d) float32."""
        index = index.to(torch.int64)
        scale = self.scales.wide[index].to(torch.float32).unsqueeze(1)
        return self.rotation.back(self.values[self.levels[index].to(torch.int64)] * scale)

    def dense(self) -> Tensor:
        """(n, d) float32."""
        return self.rows(torch.arange(len(self.levels)))


def rotation_code(matrix: Tensor | Rows, bits: int, *, seed: int = 0, dtype: torch.dtype | None = None) -> RotationCode:
    """Code (n, d) at ``bits`` (1 to 8) per weight and 16 per row.

    Args:
        dtype: of the scales; None: float16, or float32 where rows are so unlike that float16 does not hold all of them.

    Raises:
        KflatsError: other bits; NaN or infinite values.

    >>> code = rotation_code(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)), 8)
    >>> code.levels.shape, code.bits
    (torch.Size([64, 48]), 8)
    """
    if isinstance(bits, bool) or bits not in range(1, 9):
        raise KflatsError(f"a rotation at {bits!r} bits is not supported", hint="1 to 8 bits")
    rows = as_rows(matrix)
    check_finite(rows)
    n, d = rows.shape
    rotation, values = random_rotation(d, seed), lloyd_max(bits)
    edges = (values[1:] + values[:-1]) / 2
    levels = torch.empty(n, d, dtype=torch.uint8)
    lengths = torch.empty(n, dtype=torch.float64)
    for here, block in slices(rows, GRAM_BLOCK):
        wide = block.to(torch.float64)
        size = wide.norm(dim=1) / math.sqrt(d)
        # Each row at length 1 first, so that float32 holds the rotated row whatever its length.
        turned = rotation.forward(wide / torch.where(size > 0, size, 1.0).unsqueeze(1)).to(torch.float32)
        scale = torch.ones(len(block))
        for _ in range(2):
            index = torch.bucketize(turned / scale.unsqueeze(1), edges)
            chosen = values[index]
            scale = ((turned * chosen).sum(1) / chosen.square().sum(1)).clamp_min(1e-30)
        levels[here] = index.to(torch.uint8)
        lengths[here] = size * scale
    return RotationCode(levels, scales_of(lengths, dtype), values, rotation)


def random_rotation(d: int, seed: int) -> Rotation:
    """Signs and orders drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (_ROUNDS, d), generator=generator) * 2 - 1
    orders = torch.stack([torch.randperm(d, generator=generator) for _ in range(_ROUNDS)])
    return Rotation(signs.to(torch.int8), orders.to(torch.int16 if d <= 2**15 else torch.int32))


def lloyd_max(bits: int) -> Tensor:
    """(2^bits,) float32 values of least squared error for a standard Gaussian, ascending.

    Means of the cells and middles of the means in turn, until no value moves by 1e-9; from 5 bits on at most 2000
    times, which leaves the error within 1e-4 of its least.

    >>> lloyd_max(1).tolist()
    [-0.7978845834732056, 0.7978845834732056]
    """
    return _lloyd_max(bits).to(torch.float32)


@cache
def _lloyd_max(bits: int) -> Tensor:
    """As ``lloyd_max``, in float64; read only."""
    count = 2**bits
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    # Quantiles of the cube root of the density, which high-resolution theory gives, are a start near the end.
    values: Tensor = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count) * math.sqrt(3.0)
    end = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat([-end, (values[1:] + values[:-1]) / 2, end])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(edges).diff()
        means = -density.diff() / mass
        means = (means - means.flip(0)) / 2
        moved = float((means - values).abs().max())
        values = means
        if moved < 1e-9:
            break
    return values


@cache
def gaussian_share(bits: int) -> float:
    """The share of a Gaussian's square that rounding to ``lloyd_max(bits)`` loses: 1 - sum_i p_i c_i^2.

    >>> [round(gaussian_share(bits), 4) for bits in (1, 2, 4)]
    [0.3634, 0.1175, 0.0095]
    """
    values = _lloyd_max(bits)
    end = torch.tensor([math.inf], dtype=torch.float64)
    mass = torch.special.ndtr(torch.cat([-end, (values[1:] + values[:-1]) / 2, end])).diff()
    return 1.0 - float(mass @ values.square())


def _hadamard(rows: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of blocks of columns: powers of two that add up to d, largest first."""
    m, d = rows.shape
    parts, at = [], 0
    while at < d:
        size = 1 << ((d - at).bit_length() - 1)
        part = rows[:, at : at + size]
        width = 1
        while width < size:
            pair = part.reshape(m, size // (2 * width), 2, width)
            part = torch.stack([pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]], dim=2).reshape(m, size)
            width *= 2
        parts.append(part / math.sqrt(size))
        at += size
    return torch.cat(parts, dim=1)
