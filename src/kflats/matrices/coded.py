"""CodedMatrix: rows as short strings of bits, decoded when they are read; the whole table never is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.matrices.coded_geometry import CodedGeometry
from kflats.matrices.coded_tiles import TILE, TiledCodes
from kflats.matrices.lookup import FEW, distinct, inverse_of, is_recording
from kflats.matrices.low_rank import check_rows, copy_trainable

MANY = 1024
"""Rows of an input from which on a small matrix is put together before it is multiplied by."""


class CodedMatrix(TiledCodes):
    """Row i of class c is ``(scale * value(q_i)) @ basis``: r integers q_i, in as many bits as its class gives each.
    Where there are several flats, ``basis`` is that of the class' flat.

        value(q) = center + q - sign(q) shrink      uniform steps; shrink: from an interval's middle to its mean
        value(q) = levels[q + L // 2]               L levels of any kind (Lloyd-Max)

    Rows of one class lie together, each in the same number of bytes (``numerics.coding.packing``): a batch is decoded
    class by class, all columns at once. The matrix takes its codes' memory and ``position``, 4 bytes a row.

    Args:
        geometry: all sizes.
        tensors: by name, of the shapes and types the geometry states:
            weight: the scales, flat: (class or row) x group, in units of 2^unit.
            codes: uint8, the packed rows of class 0, then of class 1, ...; inside a class by row number.
            labels: (n,) uint8, the class of each row; absent where there is one class.
            bits, low: (C, r), column j of class c holds low .. low + 2^bits - 1.
            centers, contexts: (C, r), the center of a column, and which ``shrink`` is its.
            shrink: (K,); or levels: (L,).
            basis: (r, d) int8, with basis_scale (r,), or floating-point; absent where it is the identity. Of several
                flats one after the other, r the sum of their ranks.

    Codes, labels, layouts and an int8 basis are constants. Scales, shrink, levels and a floating-point basis are
    parameters; training through ``matvec`` (a tied head) keeps decoded tiles for the backward pass.

    Raises:
        KflatsError: tensors that do not fit the geometry or contradict it.

    >>> geometry = CodedGeometry((2, 2), 2, ((2, 1),), scales="row")
    >>> four = {"bits": torch.tensor([[4, 4]], dtype=torch.uint8), "low": torch.tensor([[0, -8]], dtype=torch.int16),
    ...         "centers": torch.zeros(1, 2, dtype=torch.int16), "contexts": torch.zeros(1, 2, dtype=torch.uint8)}
    >>> m = CodedMatrix(geometry, {"weight": torch.tensor([1.0, 0.5]), "shrink": torch.zeros(1),
    ...                            "codes": torch.tensor([0x91, 0x62], dtype=torch.uint8), **four})
    >>> m.dense().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        self._check_filled()
        flat = index.reshape(-1)
        dtype = dtype or self.weight.dtype
        # Class by class bytes are gathered in blocks, and not one by one, but every class has its own calls.
        if is_recording() or index.device.type != "cpu" or flat.numel() < FEW:
            out = self._recorded_rows(flat, dtype)
        else:
            values, inverse = distinct(self.position.index_select(0, flat))
            out = self._sorted_rows(values, dtype).index_select(0, inverse)
        return out.reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        self._check_filled()
        if self._is_many(x):
            return self._project(0, x @ self._all_coordinates(x).T)
        one = self._get("labels") is None
        ordered = x if one else x.index_select(-1, inverse_of(self.position))
        found: dict[int, Tensor] = {}
        for tile in self._tiles(_product_type(x)):
            left = ordered[..., tile.first : tile.first + tile.numbers.shape[1]]
            if tile.rows is not None:
                left = left * tile.rows
            product = left @ tile.numbers.T
            if tile.centers is not None:
                product = product + left.sum(-1, keepdim=True) * tile.centers
            if tile.columns is not None:
                product = product * tile.columns
            wide = F.pad(product, (0, self.geometry.parts[tile.flat][1] - product.shape[-1]))
            found[tile.flat] = found[tile.flat] + wide if tile.flat in found else wide
        parts = [self._project(flat, product) for flat, product in found.items()]
        return sum(parts[1:], start=parts[0])

    def matvec(self, x: Tensor) -> Tensor:
        self._check_filled()
        bases = self._bases(x.dtype)
        if self._is_many(x):
            return (x if bases[0] is None else x @ bases[0].T) @ self._all_coordinates(x)
        inner = [x if basis is None else x @ basis.T for basis in bases]
        found = []
        for tile in self._tiles(_product_type(x)):
            right = inner[tile.flat][..., : tile.numbers.shape[0]]
            if tile.columns is not None:
                right = right * tile.columns
            product = right @ tile.numbers
            if tile.centers is not None:
                product = product + (right * tile.centers).sum(-1, keepdim=True)
            found.append(product if tile.rows is None else product * tile.rows)
        joined = torch.cat(found, dim=-1)
        return joined if self._get("labels") is None else joined.index_select(-1, self.position)

    def dense(self) -> Tensor:
        self._check_filled()
        dtype = self.weight.dtype
        parts = [self._ended(self._project(tile.flat, tile.whole().T), dtype) for tile in self._tiles(self._wide)]
        return torch.cat(parts).index_select(0, self.position)

    def resized(self, n: int) -> CodedMatrix:
        """The first n rows.

        Raises:
            KflatsError: n < 1, or more rows than there are: codes cannot be learned, as rows that are new must be.
        """
        check_rows(n)
        self._check_filled()
        geometry = self.geometry
        if n > geometry.shape[0]:
            raise KflatsError(
                f"a coded table of {geometry.shape[0]} rows cannot grow to {n}",
                cause="new rows have to be trained, and codes are constants",
                hint="resize before compressing, or kflats.restore_(model) first",
            )
        kept = {name: value.detach().clone() for name, value in self.tensors().items()}
        counts = [n]
        if "labels" in kept:
            kept["labels"] = kept["labels"][:n]
            counts = torch.bincount(kept["labels"], minlength=len(geometry.classes)).tolist()
        if geometry.scales == "row":
            kept["weight"] = kept["weight"][: n * geometry.groups]
        # Inside a class rows stand by row number: those that go are its last.
        parts = torch.split(kept["codes"], [rows * row_bytes for rows, row_bytes in geometry.classes])
        sizes = tuple((count, row_bytes) for count, (_, row_bytes) in zip(counts, geometry.classes, strict=True))
        kept["codes"] = torch.cat([part[: rows * size] for part, (rows, size) in zip(parts, sizes, strict=True)])
        smaller = CodedGeometry(**{**vars(geometry), "shape": (n, geometry.shape[1]), "classes": sizes})
        return copy_trainable(self, CodedMatrix(smaller, kept))

    def _is_many(self, x: Tensor) -> bool:
        """Whether ``x`` has so many rows that one product for all classes pays for putting them together."""
        small = self.geometry.shape[0] * self.geometry.rank <= TILE and not self.geometry.flats
        return small and not is_recording() and len(self.geometry.classes) > 1 and x.numel() >= MANY * x.shape[-1]

    def _all_coordinates(self, x: Tensor) -> Tensor:
        """(r, n) for products with ``x``, rows in their order."""
        rank, parts = self.geometry.rank, []
        for tile in self._tiles(self._wide):
            numbers = tile.whole()
            parts.append(F.pad(numbers, (0, 0, 0, rank - numbers.shape[0])))
        return torch.cat(parts, dim=1).index_select(1, self.position).to(_product_type(x))

    def extra_repr(self) -> str:
        n, d = self.shape
        return f"{n}, {d}, rank={self.geometry.rank}, classes={len(self.geometry.classes)}, bytes={self.nbytes}"


def _product_type(x: Tensor) -> torch.dtype:
    """The type in which a product with ``x`` is taken."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
