"""CodedMatrix from the integers of a codec, packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import MAX_CLASSES, CodedGeometry
from kflats.numerics.coding.flats import FlatsCode, common_contexts
from kflats.numerics.coding.packing import Layout, layout_of, pack
from kflats.numerics.coding.scales import scales_of
from kflats.numerics.coding.transform import TransformCode

_ALIGNED = 1.125
"""How many times the bytes of the smallest layout one of equal columns may take."""


def from_transform(code: TransformCode, *, dtype: torch.dtype = torch.float32) -> CodedMatrix:
    """The matrix of a ``TransformCode``; its steps, shrink and basis scales are stored as ``dtype``.

    Raises:
        KflatsError: steps that ``dtype`` cannot hold.
    """
    return _from_codes([code], code.labels, [code.contexts], code.shrink, dtype)


def from_flats(code: FlatsCode, *, dtype: torch.dtype = torch.float32) -> CodedMatrix:
    """The matrix of a ``FlatsCode``: the classes of all flats, one after the other.

    Raises:
        KflatsError: as ``from_transform``; more than 256 classes.
    """
    codes, shared = code.codes, common_contexts(code.codes)
    if len(codes) == 1:
        return from_transform(codes[0], dtype=dtype)
    labels, first = torch.empty(len(code.flats), dtype=torch.int64), 0
    for flat, one in enumerate(codes):
        labels[code.members(flat)] = one.labels.to(torch.int64) + first
        first += len(one.levels)
    contexts = [of[one.contexts.to(torch.int64)] for of, one in zip(shared.of, codes, strict=True)]
    return _from_codes(codes, labels, contexts, shared.shrink, dtype)


def _from_codes(
    codes: Sequence[TransformCode], labels: Tensor, contexts: Sequence[Tensor], shrink: Tensor, dtype: torch.dtype
) -> CodedMatrix:
    rank = max(code.rank for code in codes)
    steps, scales = torch.cat([code.steps for code in codes]), torch.cat([code.basis_scale for code in codes])
    shift = _balance(steps, scales)
    held, held_scales = scales_of(steps * shift, dtype), scales_of(scales / shift, dtype)

    def wide(values: Tensor) -> Tensor:
        return F.pad(values, (0, rank - values.shape[1]))

    return from_integers(
        [wide(levels) for code in codes for levels in code.levels],
        labels,
        held.values,
        centers=torch.cat([wide(code.centers) for code in codes]),
        contexts=torch.cat([wide(of) for of in contexts]).to(torch.uint8),
        shrink=shrink.to(dtype),
        basis=torch.cat([code.basis for code in codes]),
        basis_scale=held_scales.values,
        flats=tuple((len(code.levels), code.rank) for code in codes) if len(codes) > 1 else (),
        unit=held.unit + held_scales.unit,
    )


def _balance(steps: Tensor, scales: Tensor) -> float:
    """The power of two by which steps grow and scales of the basis shrink, so that both have about one magnitude.

    The matrix depends on their product only. In units of a loss the steps may be 1e-8 and the scales 1e4; float16 holds
    neither.
    """
    middles = []
    for found in (steps, scales):
        live = found[found > 0].to(torch.float64).log2()
        if not live.numel():
            return 1.0
        middles.append((float(live.min()) + float(live.max())) / 2)
    return float(2.0 ** round((middles[1] - middles[0]) / 2))


def from_integers(
    integers: Sequence[Tensor],
    labels: Tensor | None,
    weight: Tensor,
    *,
    centers: Tensor | None = None,
    contexts: Tensor | None = None,
    shrink: Tensor | None = None,
    levels: Tensor | None = None,
    scales: str = "class",
    groups: int = 1,
    basis: Tensor | None = None,
    basis_scale: Tensor | None = None,
    flats: tuple[tuple[int, int], ...] = (),
    unit: int = 0,
) -> CodedMatrix:
    """Pack the integers of each class, (n_c, r), at the smallest fixed rate.

    Args:
        integers: of every class, its rows by row number; -(L // 2) and up where there are L ``levels``.
        labels: (n,) the class of each row; None for one class.
        weight: scales, flat: (class or row) x group, of the type that all floating-point parts get.
        centers, contexts, shrink, levels, scales, groups, basis, basis_scale, flats, unit: as ``CodedMatrix``; zeros,
            or absent, by default.

    Raises:
        KflatsError: sizes that do not fit, scales that are not finite, or integers beyond 15 bits.

    >>> m = from_integers([torch.tensor([[3, -4], [1, 0]])], None, torch.tensor([0.5, 2.0]), scales="row")
    >>> m.dense().tolist(), m.get_buffer("codes").numel()
    ([[1.5, -2.0], [2.0, 0.0]], 2)
    """
    if not 1 <= len(integers) <= MAX_CLASSES or len({part.shape[1] for part in integers}) != 1:
        raise KflatsError(
            f"integers of {len(integers)} classes do not make one matrix",
            cause=f"a matrix has 1 to {MAX_CLASSES} classes, all with the same number of columns",
        )
    if not bool(torch.isfinite(weight).all()):
        raise KflatsError(
            f"the scales of a coded matrix are not finite in {weight.dtype}", cause="values beyond its range"
        )
    r, dtype, count = integers[0].shape[1], weight.dtype, len(integers)
    layouts = [_centered(part) if flats else _aligned(_centered(part)) for part in integers]
    if levels is not None:
        layouts = [_below(at, len(levels) - len(levels) // 2) for at in layouts]
    zeros = torch.zeros(count, r, dtype=torch.int16)
    kept = {
        "weight": weight.reshape(-1),
        "codes": torch.cat([pack(part, at).reshape(-1) for part, at in zip(integers, layouts, strict=True)]),
        "bits": torch.stack([at.bits for at in layouts]),
        "low": torch.stack([at.low for at in layouts]),
        "centers": zeros if centers is None else centers,
        "contexts": zeros.to(torch.uint8) if contexts is None else contexts,
    }
    if labels is not None and count > 1:
        kept["labels"] = labels.to(torch.uint8)
    if levels is None:
        kept["shrink"] = torch.zeros(1, dtype=dtype) if shrink is None else shrink
    else:
        kept["levels"] = levels
    kind = "identity"
    if basis is not None:
        kind, kept["basis"] = ("float" if basis.is_floating_point() else "int8"), basis
    if basis_scale is not None:
        kept["basis_scale"] = basis_scale
    geometry = CodedGeometry(
        (sum(part.shape[0] for part in integers), r if basis is None else basis.shape[1]),
        r,
        tuple((part.shape[0], at.row_bytes) for part, at in zip(integers, layouts, strict=True)),
        contexts=1 if levels is not None or shrink is None else shrink.shape[0],
        levels=0 if levels is None else levels.shape[0],
        scales=scales,
        groups=groups,
        basis=kind,
        flats=flats,
        unit=unit,
    )
    return CodedMatrix(geometry, kept)


def _centered(integers: Tensor) -> Layout:
    """The smallest layout, with zero in the middle of a column's range where the integers allow it."""
    found = layout_of(integers)
    if not integers.numel():
        return found
    middle = -((1 << found.bits.to(torch.int64)) // 2)
    fits = (integers.amin(0) >= middle) & (integers.amax(0) < middle + (1 << found.bits.to(torch.int64)))
    return Layout(found.bits, torch.where(fits, middle, found.low.to(torch.int64)).to(torch.int16))


def _below(found: Layout, end: int) -> Layout:
    """The same bits, in ranges that end before ``end``, because integers from there on stand for no level."""
    return Layout(found.bits, torch.minimum(found.low, end - (1 << found.bits.to(torch.int64))).to(torch.int16))


def _aligned(found: Layout) -> Layout:
    """4 or 8 bits for all columns where this takes little more bytes: such codes are read several times as fast."""
    width = int(found.bits.max()) if found.bits.numel() else 0
    if width not in (4, 8) or found.bits.numel() % 2 or found.bits.numel() * width > _ALIGNED * 8 * found.row_bytes:
        return found
    low = torch.where(found.bits < width, torch.full_like(found.low, -(1 << width - 1)), found.low)
    inside = (found.low >= low) & (found.low + (1 << found.bits.to(torch.int64)) <= low + (1 << width))
    return Layout(torch.full_like(found.bits, width), torch.where(inside, low, found.low))
