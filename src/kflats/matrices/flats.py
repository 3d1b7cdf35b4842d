"""FlatsMatrix: rows near several flats; each row is stored as its few coordinates in one flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import Matrix
from kflats.matrices.geometry import RankGroup, bases_of, check_geometry, tables_of, weight_shape
from kflats.matrices.lookup import compiled_rows, eager_rows, exported_rows, inverse_of, is_exporting
from kflats.matrices.low_rank import check_rows, copy_trainable, with_rows


class FlatsMatrix(Matrix):
    """Rows near k flats: row i is ``coordinates_i @ basis[flat of i][:rank of i]`` (MESSI, section 2).

    Args:
        weight: coordinates, compact, in *band order* (rows of band 0, then band 1, ...; inside a band
            by row number): (n, j) when all bands have rank j, else one-dimensional. Never the paper's
            n x kj matrix of zeros, so "zeros stay zero" in fine-tuning holds by construction.
        basis: (sum of flat ranks, d), the flats' bases one below the other.
        labels: (n,) unsigned integers, the band of each row.
        bands: what each label means.
        flat_ranks: rows of ``basis`` that belong to each flat.

    Stores sum(rows * rank) + sum(flat ranks) * d numbers and one label a row. Band order makes the
    tied head slices plus one permutation; ``position`` (row -> place in band order) is derived.

    Raises:
        KflatsError: tensors that do not fit the bands, or labels that contradict them.

    >>> m = FlatsMatrix(torch.tensor([[2.0], [3.0]]), torch.eye(2), torch.tensor([1, 0], dtype=torch.uint8),
    ...                 (RankGroup(1, 1, 0), RankGroup(1, 1, 1)), (1, 1))
    >>> m.dense().tolist()      # row 0 lies on the second axis, row 1 on the first
    [[0.0, 3.0], [2.0, 0.0]]
    """

    kind = "flats"

    def __init__(
        self, weight: Tensor, basis: Tensor, labels: Tensor, bands: Sequence[RankGroup], flat_ranks: Sequence[int]
    ) -> None:
        super().__init__()
        if basis.ndim != 2 or labels.ndim != 1 or labels.is_floating_point():
            raise KflatsError(
                f"a basis {tuple(basis.shape)} and labels {tuple(labels.shape)} of {labels.dtype} make no flats",
                cause="the basis must be (ranks, d), and the labels (n,) whole numbers",
            )
        n, d = labels.shape[0], basis.shape[1]
        check_geometry(n, d, bands, flat_ranks)
        expected = weight_shape(bands)
        if tuple(weight.shape) != expected or basis.shape[0] != sum(flat_ranks):
            raise KflatsError(
                f"coordinates {tuple(weight.shape)} and basis {tuple(basis.shape)} do not fit the bands",
                cause=f"expected {expected} and {(sum(flat_ranks), d)}",
            )
        self.bands, self.flat_ranks = tuple(bands), tuple(flat_ranks)
        self.uniform = len(expected) == 2
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)
        self.ready = False
        self.labels: Tensor
        self.position: Tensor
        self.register_buffer("labels", labels)
        self.register_buffer("position", torch.empty(n, dtype=torch.int32, device=labels.device), persistent=False)
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        return self.position.shape[0], self.basis.shape[1]

    def refresh(self) -> None:
        """Compute ``position`` from ``labels`` again; refuse labels that contradict the bands."""
        if self.labels.is_meta:
            return
        labels = self.labels.to(torch.int64)
        counts = torch.bincount(labels, minlength=len(self.bands)).tolist() if bool((labels >= 0).all()) else []
        if counts != [band.rows for band in self.bands]:
            raise KflatsError(
                f"row labels do not match the bands ({counts[:8]} rows instead of {[b.rows for b in self.bands][:8]})",
                cause="a damaged or mixed-up file",
                hint="restore the file, or compress again",
            )
        self.position = inverse_of(torch.argsort(labels, stable=True)).to(torch.int32)
        self.ready = True

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        self._check_filled()
        place = self.position.index_select(0, index.reshape(-1))
        look_up = exported_rows if is_exporting() else compiled_rows if torch.compiler.is_compiling() else eager_rows
        out = look_up(place, self.weight, self.basis, self.bands, self.flat_ranks, dtype or self.weight.dtype)
        return out.reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        self._check_filled()
        ordered = x.index_select(-1, inverse_of(self.position))
        parts = torch.split(ordered, [band.rows for band in self.bands], dim=-1)
        inner: list[list[Tensor]] = [[] for _ in self.flat_ranks]
        found: list[Tensor] = []
        for part, band, table in zip(parts, self.bands, tables_of(self.weight, self.bands), strict=True):
            product = part @ table.to(x.dtype)
            if band.flat is None:
                found.append(product)
            else:
                inner[band.flat].append(F.pad(product, (0, self.flat_ranks[band.flat] - band.rank)))
        # Bands that share a flat add up in its coordinates; then one product brings all flats back.
        empty = [x.new_zeros(*x.shape[:-1], rank) for rank in self.flat_ranks]
        flats = [sum(shares[1:], shares[0]) if shares else zero for shares, zero in zip(inner, empty, strict=True)]
        if flats:
            found.append(torch.cat(flats, dim=-1) @ self.basis.to(x.dtype))
        return sum(found[1:], found[0])

    def matvec(self, x: Tensor) -> Tensor:
        self._check_filled()
        inner = torch.split(x @ self.basis.T.to(x.dtype), list(self.flat_ranks), dim=-1) if self.flat_ranks else ()
        parts = [
            (x if band.flat is None else inner[band.flat][..., : band.rank]) @ table.T.to(x.dtype)
            for band, table in zip(self.bands, tables_of(self.weight, self.bands), strict=True)
        ]
        return torch.cat(parts, dim=-1).index_select(-1, self.position)

    def dense(self) -> Tensor:
        self._check_filled()
        bases = bases_of(self.basis, self.bands, self.flat_ranks)
        tables = tables_of(self.weight, self.bands)
        parts = [table if basis is None else table @ basis for table, basis in zip(tables, bases, strict=True)]
        return torch.cat(parts).index_select(0, self.position)

    def spec(self) -> JsonObject:
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "bands": [[band.rows, band.rank, band.flat] for band in self.bands],
            "flat_ranks": list(self.flat_ranks),
        }

    def resized(self, n: int) -> FlatsMatrix:
        """As ``Matrix.resized``; new rows join the most populated band, at the mean of its coordinates."""
        check_rows(n)
        self._check_filled()
        labels = self.labels.to(torch.int64)
        largest = max(range(len(self.bands)), key=lambda c: self.bands[c].rows)
        extra = labels.new_full((max(0, n - labels.shape[0]),), largest)
        counts = torch.bincount(torch.cat([labels[:n], extra]), minlength=len(self.bands)).tolist()
        # Inside a band rows stand by row number: dropped rows are its last, and new rows follow its last.
        tables = [
            with_rows(table.detach(), count) if count else table.detach()[:0]
            for table, count in zip(tables_of(self.weight, self.bands), counts, strict=True)
        ]
        found = FlatsMatrix(
            torch.cat(tables) if self.uniform else torch.cat([table.reshape(-1) for table in tables]),
            self.basis.detach().clone(),
            torch.cat([labels[:n], extra]).to(self.labels.dtype),
            tuple(RankGroup(count, band.rank, band.flat) for count, band in zip(counts, self.bands, strict=True)),
            self.flat_ranks,
        )
        return copy_trainable(self, found)

    def _check_filled(self) -> None:
        self._check_ready()
        # Code that resizes embeddings by writing into ``weight`` would cut rows of the last band.
        if tuple(self.weight.shape) != weight_shape(self.bands):
            raise KflatsError(
                f"the coordinates, now {tuple(self.weight.shape)}, were resized without their labels",
                cause="code that treats layer.weight as a dense table",
                hint="matrix.resized(n), and a new layer on the result",
                command="resize the original model, then compress it",
            )


def refresh_after_load(module: nn.Module, _: object) -> None:
    """After ``load_state_dict`` compute derived buffers again. A named function, so that modules can be pickled."""
    module.refresh()  # type: ignore[operator]
