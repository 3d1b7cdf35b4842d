"""Integers of a fixed rate: what a method has fitted, or the matrix itself, each number in so many bits.

``Int8`` and ``Int4`` bring every column of a flat to one size and round it by the row's largest entry; ``Rotation``
turns the coordinates of a flat at random first, and rounds to the values that are best for a Gaussian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.codecs.codec import Int4, Int8
from kflats.errors import KflatsError
from kflats.factorize.parts import Parts
from kflats.nn.coded import CodedMatrix
from kflats.nn.coded_build import from_integers
from kflats.nn.coded_geometry import MAX_CLASSES
from kflats.numerics.coding.absmax import absmax_code
from kflats.numerics.coding.rotation import RotationCode, rotation_code
from kflats.numerics.coding.scales import Scales, scales_of
from kflats.numerics.rows import Rows


def rounded_table(codec: Int8 | Int4, rows: Rows, dtype: torch.dtype) -> CodedMatrix:
    """All numbers of the matrix itself; scales as ``dtype``."""
    groups = codec.groups(rows.shape[1])
    code = absmax_code(rows, codec.bits, -(-rows.shape[1] // groups), dtype=dtype)
    scales = code.scales
    return from_integers([code.levels], None, scales.values, scales="row", groups=groups, unit=scales.unit)


def rotated_table(bits: int, rows: Rows, dtype: torch.dtype, seed: int) -> CodedMatrix:
    """All numbers of the matrix itself, turned; scales as ``dtype``."""
    code = rotation_code(rows, bits, seed=seed, dtype=torch.float64)
    return _turned([code], None, [code.rotation.matrix()], (), (rows.shape[0],), dtype)


def rounded_parts(codec: Int8 | Int4, parts: Parts, dtype: torch.dtype) -> CodedMatrix:
    """Coordinates in flats; scales as ``dtype``.

    Raises:
        KflatsError: more classes of rows than a byte tells apart, or flats of rank 0 alone.
    """
    _check_classes(parts)
    if not parts.rank:
        raise KflatsError("no flat has a rank", cause="a matrix of zeros", hint="Dense(), or leave it as it is")
    sizes = [_sizes(parts, flat) for flat in range(len(parts.bases))]
    whole = torch.zeros(len(parts.labels), parts.rank)
    for c, (part, flat) in enumerate(zip(parts.coordinates, parts.flat_of, strict=True)):
        rank = part.shape[1]
        whole[parts.members(c), :rank] = (part / sizes[flat][:rank]).to(torch.float32)
    groups = codec.groups(parts.rank)
    code = absmax_code(whole, codec.bits, -(-parts.rank // groups), dtype=dtype)
    basis = _int8_rows(
        torch.cat([basis * size.unsqueeze(1) for basis, size in zip(parts.bases, sizes, strict=True)]), dtype
    )
    several = len(parts.coordinates) > 1
    return from_integers(
        [code.levels[parts.members(c)] for c in range(len(parts.coordinates))],
        parts.labels if several else None,
        code.scales.values,
        scales="row",
        groups=groups,
        basis=basis.levels,
        basis_scale=basis.scales.values,
        flats=_flats(parts),
        unit=code.scales.unit + basis.scales.unit,
    )


def rotated_parts(bits: int, parts: Parts, dtype: torch.dtype, seed: int) -> CodedMatrix:
    """Coordinates in flats, each flat's turned by a rotation of its own; scales as ``dtype``.

    Raises:
        KflatsError: more flats than a byte tells apart.
    """
    _check_classes(parts)
    codes, bases = [], []
    for number, (part, basis) in enumerate(zip(parts.coordinates, parts.bases, strict=True)):
        code = rotation_code(part.to(torch.float32), bits, seed=seed + number, dtype=torch.float64)
        codes.append(code)
        bases.append(code.rotation.matrix().to(torch.float64) @ basis)
    several = len(codes) > 1
    counts = tuple(len(part) for part in parts.coordinates)
    return _turned(codes, parts.labels if several else None, bases, _flats(parts), counts, dtype)


def _turned(
    codes: Sequence[RotationCode],
    labels: Tensor | None,
    bases: Sequence[Tensor],
    flats: tuple[tuple[int, int], ...],
    counts: Sequence[int],
    dtype: torch.dtype,
) -> CodedMatrix:
    rank = max(code.levels.shape[1] for code in codes)
    values = codes[0].values
    lengths = torch.empty(sum(counts), dtype=torch.float64)
    for c, code in enumerate(codes):
        mine = slice(None) if labels is None else (labels == c).nonzero().squeeze(1)
        lengths[mine] = code.scales.wide
    scales, basis = (
        scales_of(lengths, dtype),
        _int8_rows(torch.cat([basis.to(torch.float64) for basis in bases]), dtype),
    )
    integers = [code.levels.to(torch.int16) - len(values) // 2 for code in codes]
    return from_integers(
        [F.pad(one, (0, rank - one.shape[1])) for one in integers],
        labels,
        scales.values,
        levels=values.to(dtype),
        scales="row",
        basis=basis.levels,
        basis_scale=basis.scales.values,
        flats=flats,
        unit=scales.unit + basis.scales.unit,
    )


def _check_classes(parts: Parts) -> None:
    if len(parts.coordinates) > MAX_CLASSES:
        raise KflatsError(
            f"{len(parts.coordinates)} classes of rows cannot be told apart in a coded matrix",
            cause=f"a label is a byte, which tells {MAX_CLASSES} apart",
            hint="fewer flats or levels, or no codec of integers",
        )


def _flats(parts: Parts) -> tuple[tuple[int, int], ...]:
    """(classes, rank) of each flat; nothing where all classes share one basis."""
    if len(parts.bases) == 1:
        return ()
    return tuple((parts.flat_of.count(flat), len(basis)) for flat, basis in enumerate(parts.bases))


def _sizes(parts: Parts, flat: int) -> Tensor:
    """(r,) the root mean square of each coordinate of a flat, over the rows that have it; 1 for those of zeros."""
    sums, counts = torch.zeros(2, len(parts.bases[flat]), dtype=torch.float64)
    for part, of in zip(parts.coordinates, parts.flat_of, strict=True):
        if of == flat:
            sums[: part.shape[1]] += part.square().sum(0)
            counts[: part.shape[1]] += len(part)
    size = (sums / counts.clamp_min(1.0)).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))


@dataclass(frozen=True)
class _Int8Rows:
    """Rows of a basis as 8-bit integers and a scale each."""

    levels: Tensor
    scales: Scales


def _int8_rows(rows: Tensor, dtype: torch.dtype) -> _Int8Rows:
    scale = rows.abs().amax(1) / 127
    safe = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    return _Int8Rows((rows / safe).round().to(torch.int8), scales_of(scale, dtype))
