"""Rows of a FlatsMatrix: the same product in the form each execution mode wants.

- eager: distinct rows, sorted by band: one gather and one matrix product a band, all in plain autograd
  (higher derivatives and ``torch.func`` included);
- torch.export, torch.jit.trace: plain operators with symbolic sizes, one ``nonzero`` a band;
- torch.compile: the eager form as one opaque operator with its own backward. Plain operators would
  give a compiled backward sizes that depend on data, which it does not handle reliably.

``place`` is a row's place in band order throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.matrices.geometry import RankGroup, bases_of, starts_of, tables_of

Group = tuple[int, int, int]  # band, and the slice of the distinct places that lies in it


FEW = 256  # for fewer ids the search for repeated ones takes longer than computing their rows again


def distinct(index: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted distinct values (u,) of ``index``, and for each of its entries the place among them.

    Text repeats its words: 4096 tokens have about 1800 distinct ones, and each row is computed once.
    The sort costs a few per cent of the matrix product it saves.
    """
    values, inverse = torch.unique(index, return_inverse=True)
    return values, inverse


def inverse_of(permutation: Tensor) -> Tensor:
    """``(n,)`` permutation -> the permutation that undoes it, int64."""
    places = torch.arange(permutation.shape[0], device=permutation.device)
    return torch.empty_like(places).index_copy(0, permutation.to(torch.int64), places)


def is_exporting() -> bool:
    """True while a graph of plain operators is recorded: sizes that depend on data must stay symbolic."""
    return is_jit_tracing() or _compiler_is_exporting()


def is_recording() -> bool:
    """True while a graph is recorded for any use: nothing may depend on the values of tensors."""
    return is_jit_tracing() or torch.compiler.is_compiling()


def is_jit_tracing() -> bool:
    """True inside ``torch.jit.trace``."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


# An older torch lacks this function: every recorded graph is then treated as one for export.
_compiler_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def eager_rows(
    place: Tensor, weight: Tensor, basis: Tensor, bands: Sequence[RankGroup], ranks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """(t,) places -> (t, d) rows."""
    values, inverse, groups = _grouped(place, bands)
    bases = bases_of(basis, [bands[c] for c, _, _ in groups], ranks)
    coordinates = _coordinates(values, groups, weight, bands)
    parts = [_product(x, columns, dtype) for x, columns in zip(coordinates, bases, strict=True)]
    if all(columns is None for columns in bases):
        parts.append(
            basis[:0]
        )  # only exact rows: the bases still get a gradient, of zeros, as data-parallel training wants
    return F.embedding(inverse, torch.cat(parts))


def exported_rows(
    place: Tensor, weight: Tensor, basis: Tensor, bands: Sequence[RankGroup], ranks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """(t,) places -> (t, d) rows, for a recorded graph."""
    starts, found, parts = starts_of(bands), [], []
    for c, (table, columns) in enumerate(zip(tables_of(weight, bands), bases_of(basis, bands, ranks), strict=True)):
        if bands[c].rows:
            here = ((place >= starts[c]) & (place < starts[c + 1])).nonzero().squeeze(1)
            found.append(here)
            parts.append(_product(table.index_select(0, place.index_select(0, here) - starts[c]), columns, dtype))
    out = torch.zeros(place.shape[0], basis.shape[1], dtype=dtype, device=place.device)
    return out.index_copy(0, torch.cat(found), torch.cat(parts))


def compiled_rows(
    place: Tensor, weight: Tensor, basis: Tensor, bands: Sequence[RankGroup], ranks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """(t,) places -> (t, d) rows, as one operator."""
    codes = [number for band in bands for number in (band.rows, band.rank, -1 if band.flat is None else band.flat)]
    found: Tensor = _rows_op(place, weight, basis, codes, list(ranks), dtype)
    return found


def _grouped(place: Tensor, bands: Sequence[RankGroup]) -> tuple[Tensor, Tensor, list[Group]]:
    if place.shape[0] < FEW:
        values, order = place.sort()
        inverse = inverse_of(order)
    else:
        values, inverse = distinct(place)
    starts = torch.tensor(starts_of(bands), device=values.device, dtype=values.dtype)
    cuts = torch.searchsorted(values, starts).tolist()
    groups = [(c, cuts[c], cuts[c + 1]) for c in range(len(bands)) if cuts[c] < cuts[c + 1]]
    return values, inverse, groups or [(0, 0, 0)]


def _coordinates(values: Tensor, groups: list[Group], weight: Tensor, bands: Sequence[RankGroup]) -> list[Tensor]:
    if weight.ndim == 2:
        found = weight.index_select(0, values)
        return [found[a:b] for _, a, b in groups]
    tables, starts = tables_of(weight, bands), starts_of(bands)
    return [tables[c].index_select(0, values[a:b] - starts[c]) for c, a, b in groups]


def _product(coordinates: Tensor, basis: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = coordinates.to(dtype)
    return wide if basis is None else wide @ basis.to(dtype)


def _decode(codes: Sequence[int]) -> list[RankGroup]:
    return [
        RankGroup(codes[i], codes[i + 1], None if codes[i + 2] < 0 else codes[i + 2]) for i in range(0, len(codes), 3)
    ]


def _without_autocast(place: Tensor) -> torch.autocast:
    # The graph fixed this operator's output type when it was recorded; a caller's autocast must not change it.
    return torch.autocast(place.device.type, enabled=False)


# They read sizes back to the host, so they cannot be part of a captured CUDA graph.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
_INPUTS = "Tensor place, Tensor weight, Tensor basis, int[] codes, int[] ranks"


@torch.library.custom_op(
    "kflats::flats_rows", mutates_args=(), schema=f"({_INPUTS}, ScalarType dtype) -> Tensor", **_TAGS
)
def _rows_op(
    place: Tensor, weight: Tensor, basis: Tensor, codes: Sequence[int], ranks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    with _without_autocast(place):
        return eager_rows(place, weight, basis, _decode(codes), ranks, dtype)


@_rows_op.register_fake
def _(
    place: Tensor, weight: Tensor, basis: Tensor, codes: Sequence[int], ranks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return basis.new_empty(place.shape[0], basis.shape[1], dtype=dtype)


@torch.library.custom_op(
    "kflats::flats_rows_backward", mutates_args=(), schema=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor)", **_TAGS
)
def _rows_backward_op(
    grad: Tensor, place: Tensor, weight: Tensor, basis: Tensor, codes: Sequence[int], ranks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    bands, dtype = _decode(codes), grad.dtype
    with _without_autocast(place):
        values, inverse, groups = _grouped(place, bands)
        summed = torch.ops.aten.embedding_dense_backward(grad, inverse, values.shape[0], -1, False)
        grad_weight, grad_basis = torch.zeros_like(weight), torch.zeros_like(basis)
        tables, starts = tables_of(grad_weight, bands), starts_of(bands)
        coordinates, used = _coordinates(values, groups, weight, bands), [bands[c] for c, _, _ in groups]
        bases, grad_bases = bases_of(basis, used, ranks), bases_of(grad_basis, used, ranks)
        for (c, a, b), x, columns, grad_columns in zip(groups, coordinates, bases, grad_bases, strict=True):
            reached = summed[a:b]
            if columns is not None and grad_columns is not None:
                grad_columns += x.to(dtype).T @ reached
                reached = reached @ columns.to(dtype).T
            tables[c].index_add_(0, values[a:b] - starts[c], reached.to(weight.dtype))
    return grad_weight, grad_basis


@_rows_backward_op.register_fake
def _(
    grad: Tensor, place: Tensor, weight: Tensor, basis: Tensor, codes: Sequence[int], ranks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(basis)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    place, weight, basis, codes, ranks, _ = inputs
    ctx.save_for_backward(place, weight, basis)  # type: ignore[arg-type]
    ctx.codes, ctx.ranks = codes, ranks  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    place, weight, basis = ctx.saved_tensors  # type: ignore[attr-defined]
    found = _rows_backward_op(grad, place, weight, basis, ctx.codes, ctx.ranks)  # type: ignore[attr-defined]
    return None, *found, None, None, None


_rows_op.register_autograd(_backward, setup_context=_save)
