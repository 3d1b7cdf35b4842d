"""The report of a compression: printed as a table, saved as JSON, drawn by ``kflats.report.html``.

All errors are relative squared errors. For a matrix with rows a_i, importance w_i and compressed
rows b_i::

    error            = sum_i w_i |a_i - b_i|^2 / sum_i w_i |a_i|^2
    error_unweighted = the same with every w_i = 1
    svd_error        = the same as error, for the weighted SVD that fits in the same bytes

If importance is more than row weights, ``error`` has its measure: |L (A - B) R|^2 / |L A R|^2, with the metrics L and R
of both sides.

If a method minimises another norm, ``own`` is the error in that norm: the cost of the errors over the cost of the rows,
for the method and for the weighted SVD in the same bytes.

*Ratio* means bytes after / bytes before, labels included; it is printed for the named weights and for the whole model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.dtypes import dtype_name
from kflats.common.errors import KflatsError
from kflats.common.formatting import call, number, plain, share, size, table, visible
from kflats.common.schema import decode, read_json
from kflats.common.texts import Tokenizer, batched_texts
from kflats.evaluation.proof import Proof
from kflats.importance.protocol import Weighting
from kflats.io.atomic import write_json
from kflats.io.sources import is_coded_table
from kflats.matrices.registry import CodedMatrix, DenseMatrix, FlatsMatrix, InterpolativeMatrix, LowRankMatrix, Matrix
from kflats.methods.matrix_error import norm_error, row_errors, weighted_error
from kflats.methods.protocol import Factored
from kflats.numerics.flats import squared_norms
from kflats.numerics.rows import Rows
from kflats.numerics.svd import truncated_svd
from kflats.recipe.recipe import Decision, to_json

REPORT_FILE = "kflats_report.json"
_FORMAT, _VERSION = "kflats-report", 2
_NOTES = 12  # notes that the text form lists


@dataclasses.dataclass(frozen=True)
class BandReport:
    """One band: ``rows`` rows with ``rank`` coordinates in the flat ``flat`` (None: stored exactly).

    ``weight_share`` is these rows' share of the total importance, ``error`` their own relative error.
    """

    flat: int | None
    rank: int
    rows: int
    weight_share: float
    error: float


@dataclasses.dataclass(frozen=True)
class NormError:
    """The error in the norm that a method minimises, if that is not the squared error.

    ``error`` is sum_i w_i cost(a_i - b_i) over sum_i w_i cost(a_i); ``svd_error`` the same for the weighted SVD that
    fits in the same bytes.
    """

    norm: str
    error: float
    svd_error: float


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """The report of one weight; the module defines the errors.

    ``method``, ``importance`` and ``codec`` are the JSON forms of the recipe's values. ``spectrum`` holds the
    eigenvalues of the weighted Gram matrix, descending, with sum 1. It is empty, and ``svd_error`` None, for a large
    weight that is stored without axes: they would take longer than its codes. ``matrix_rows`` is the side of a linear
    layer that the matrix has as rows. ``condition`` is the largest entry beside the identity block of an interpolative
    form, None for other forms. ``own`` is the error in the method's own norm, None if that is the squared error.
    ``bytes_after`` are bytes in a file, ``memory_bytes`` those of all parameters and buffers of the loaded weight:
    entropy-coded integers and the index of the rows take more in memory. ``stored`` is "dense" (unchanged), another
    type of all numbers ("float16"), "factors" or "integers".
    """

    name: str
    places: tuple[str, ...]
    shape: tuple[int, int]
    dtype: str
    method: dict[str, Any]
    importance: dict[str, Any]
    codec: dict[str, Any]
    bytes_before: int
    bytes_after: int
    values_after: int
    error: float
    error_unweighted: float
    svd_error: float | None
    spectrum: tuple[float, ...] = ()
    bands: tuple[BandReport, ...] = ()
    seconds: float = 0.0
    note: str = ""
    matrix_rows: str = "in_features"
    condition: float | None = None
    own: NormError | None = None
    memory_bytes: int | None = None
    stored: str = "factors"

    @property
    def dense(self) -> bool:
        """Whether the weight stayed as it was; ``note`` is the reason."""
        return self.stored == "dense"

    @property
    def _whole(self) -> bool:
        """Whether all numbers are stored, perhaps in another type."""
        return self.stored not in ("factors", "integers")

    @property
    def bits(self) -> float:
        """Stored bits for each number of the original."""
        return 8 * self.bytes_after / math.prod(self.shape)

    @property
    def full_rank(self) -> int:
        """The largest rank that the weight can have."""
        return min(self.shape)

    @property
    def mean_rank(self) -> float:
        """Mean number of coordinates of a row; the full rank if all numbers are stored."""
        if self._whole:
            return float(self.full_rank)
        rows = sum(b.rows for b in self.bands)
        return sum(b.rows * b.rank for b in self.bands) / rows if rows else math.nan

    @property
    def kept(self) -> str:
        """The mean rank of the full rank, the bits of a number, the type of all numbers, or "dense"."""
        if self._whole:
            return self.stored
        if self.stored == "integers":
            return f"{number(self.bits)} bits"
        if not self.bands:
            return "-"
        return f"{number(self.mean_rank)} of {self.full_rank}"

    @property
    def recipe(self) -> str:
        """The recipe as the call that makes it."""
        return f"Recipe({call(self.method)}, {call(self.importance)}, {call(self.codec)})"


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of ``compress_``. ``print(report)`` shows it; ``kflats report`` draws it.

    Sizes are bytes of weights: ``model_bytes_*`` of everything the model stores (with the weight files of a
    sentence-transformers folder's other modules), the weights' own in ``weights``; where the vocabulary was trimmed
    first, of the trimmed model. ``proof`` is what the compression did to the outputs, None: not measured.
    """

    model: str
    budget: str
    weights: tuple[WeightReport, ...]
    model_bytes_before: int
    model_bytes_after: int
    seed: int
    version: str
    trimming: TrimReport | None = None
    proof: Proof | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes of the named weights before."""
        return sum(w.bytes_before for w in self.weights)

    @property
    def bytes_after(self) -> int:
        """Stored bytes of the named weights after, labels included."""
        return sum(w.bytes_after for w in self.weights)

    @property
    def has_own(self) -> bool:
        """Whether a method minimised another error than the squared one."""
        return any(w.own is not None for w in self.weights)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file (``kflats_report.json`` in a compressed folder)."""
        write_json(path, _FORMAT, _VERSION, report=dataclasses.asdict(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report file, or the report of a compressed model's folder.

        Raises:
            KflatsError: no report, another format or version, a missing or unknown field, a wrong type.
        """
        file = Path(path)
        if is_coded_table(file):
            raise KflatsError(f"{file} holds a coded table, which has no report", hint=f"kflats inspect {file}")
        if file.is_dir() and not (file / REPORT_FILE).exists():
            raise KflatsError(
                f"{file} holds no report",
                cause="kflats compress did not write the folder, or its model was trained and saved afterwards",
                hint="the folder that kflats compress wrote",
            )
        data = read_json(file / REPORT_FILE if file.is_dir() else file, _FORMAT, _VERSION, "report")
        report: Report = decode(Report, data.get("report"), "report", signed=frozenset({"report.seed"}))
        return report

    def __str__(self) -> str:
        rows = [
            [
                w.name,
                str(w.method.get("type", "?")) + (f" k={k}" if (k := w.method.get("k")) is not None else ""),
                str(w.importance.get("type", "?")),
                *before_after(w.bytes_before, w.bytes_after),
                w.kept,
                number(w.error),
                "-" if w.svd_error is None else number(w.svd_error),
                number(w.error_unweighted),
                *(_own_columns(w) if self.has_own else []),
            ]
            for w in self.weights
        ]
        columns = ["weight", "method", "importance", "before", "after", "ratio"]
        columns += ["rank", "error", "SVD error", "unweighted"]
        columns += ["own norm", "own error", "SVD's own"] if self.has_own else []
        blank = [""] * (len(columns) - 6)
        totals = [
            ["named weights", "", "", *before_after(self.bytes_before, self.bytes_after), *blank],
            ["whole model", "", "", *before_after(self.model_bytes_before, self.model_bytes_after), *blank],
        ]
        parts = [
            f"{visible(self.model)}: budget {visible(self.budget)}, seed {self.seed}, kflats {visible(self.version)}",
            "",
            plain(table(columns, rows, left=3, totals=totals)),
            "",
            "ratio: bytes after / bytes before, labels included. error: relative squared error, rows weighted by",
            "importance; SVD error: the same for a weighted SVD in the same bytes; unweighted: every row alike.",
        ]
        if self.has_own:
            parts += [
                "own error: what the method minimises, a sum over rows weighted by importance, as a share of the same",
                "of the whole weight; SVD's own: the same for the weighted SVD. Neither is a squared error.",
            ]
        if self.trimming is not None:
            parts += ["", "vocabulary trimmed first; the sizes above are of the trimmed model:", str(self.trimming)]
        dense_first = sorted(self.weights, key=lambda w: not w.dense)
        if noted := [f"{visible(w.name)}: {visible(w.note) or 'dense'}" for w in dense_first if w.note or w.dense]:
            more = [f"({len(noted) - _NOTES} more in {REPORT_FILE})"] if len(noted) > _NOTES else []
            parts += ["", *noted[:_NOTES], *more]
        if self.proof is not None:
            if self.trimming is None and self.proof.files[0] < self.model_bytes_before:
                parts += ["", "The original's weights take more bytes as they are loaded than in its files."]
            parts += ["", str(self.proof)]
        return "\n".join(parts)


def _own_columns(weight: WeightReport) -> list[str]:
    """The norm, the error in it, and the SVD's error in it; dashes for the squared error."""
    own = weight.own
    return ["-"] * 3 if own is None else [own.norm, number(own.error), number(own.svd_error)]


def before_after(before: int, after: int) -> list[str]:
    """Two sizes and their ratio, as text."""
    return [size(before), size(after), share(after, before)]


@dataclass(frozen=True)
class Resegmented:
    """Texts under two tokenizers, special tokens not counted.

    Args:
        texts: how many.
        texts_changed: how many are segmented differently in any place.
        tokens_before, tokens_after: how many tokens they are. A text costs time by its tokens.
        tokens_changed: tokens of the original's segmentation that the new one does not have in that place.
        unknown_before, unknown_after: unknown tokens among them.
    """

    texts: int
    texts_changed: int
    tokens_before: int
    tokens_after: int
    tokens_changed: int
    unknown_before: int
    unknown_after: int


@dataclass(frozen=True)
class TrimReport:
    """The report of a trimmed vocabulary: sizes in entries and bytes, and how many tokens of the texts changed.

    ``table_bytes`` are those of token tables, heads and their biases, shared ones counted once; ``model_bytes`` all
    that the model stores. Each pair is (before, after). ``required`` entries stay for any counts.
    ``segmentation`` is None without texts; ``counted`` says whether it is measured on the counted texts, of which fewer
    tokens change than of others.
    """

    entries: tuple[int, int]
    required: int
    table_bytes: tuple[int, int]
    model_bytes: tuple[int, int]
    segmentation: Resegmented | None = None
    counted: bool = True

    @property
    def saved(self) -> int:
        """Bytes that the model stores no longer."""
        return self.model_bytes[0] - self.model_bytes[1]

    def rows(self) -> list[list[str]]:
        """Entries, sizes and tokens as text: before, after, and their ratio."""
        before, after = self.entries
        rows = [["vocabulary entries", f"{before:,}", f"{after:,}", share(after, before)]]
        rows.append(["token tables, heads", *before_after(*self.table_bytes)])
        rows.append(["whole model", *before_after(*self.model_bytes)])
        if (texts := self.segmentation) is not None:
            before, after = texts.tokens_before, texts.tokens_after
            rows.append(["tokens of the texts", f"{before:,}", f"{after:,}", share(after, before)])
            rows.append(["unknown tokens", f"{texts.unknown_before:,}", f"{texts.unknown_after:,}", ""])
        return rows

    @property
    def summary(self) -> str:
        """How the texts change, in a sentence."""
        texts = self.segmentation
        if texts is None:
            return "The order of the vocabulary decided which tokens are common; no text was counted."
        kind = "counted texts (others change more)" if self.counted else "other texts"
        changed = share(texts.tokens_changed, texts.tokens_before)
        return (
            f"Of {texts.texts:,} {kind} {share(texts.texts_changed, texts.texts)} are segmented anew, with {changed} "
            f"of their tokens; they take {texts.tokens_after:,} tokens instead of {texts.tokens_before:,}."
        )

    def __str__(self) -> str:
        stay = f"{self.required:,} entries stay in any case: special and added tokens, single characters, bytes"
        return "\n".join([plain(table(["", "before", "after", "ratio"], self.rows())), "", stay, self.summary])


def resegmented(before: Tokenizer, after: Tokenizer, texts: Iterable[str], kept: Mapping[int, int]) -> Resegmented:
    """Compare two fast tokenizers on ``texts``.

    Args:
        before, after: the tokenizers. texts: streamed.
        kept: the new id of every old id that stays.

    Raises:
        KflatsError: no texts, or a value that is not a text.
    """
    totals: Counter[str] = Counter()
    for batch in batched_texts(texts):
        for (old, places), (new, goals) in zip(_read(before, batch), _read(after, batch), strict=True):
            moved = [kept.get(i, -1) for i in old]
            same = len(old) if moved == new else _same(moved, places, new, goals)
            totals["texts"] += 1
            totals["texts_changed"] += moved != new
            totals["tokens_before"] += len(old)
            totals["tokens_after"] += len(new)
            totals["tokens_changed"] += len(old) - same
            totals["unknown_before"] += old.count(before.unk_token_id) if before.unk_token_id is not None else 0
            totals["unknown_after"] += new.count(after.unk_token_id) if after.unk_token_id is not None else 0
    if not totals["texts"]:
        raise KflatsError("the report of trimming needs texts", cause="an empty file or list")
    return Resegmented(**{name: totals[name] for name in Resegmented.__dataclass_fields__})


def _same(old: list[int], places: list[Any], new: list[int], goals: list[Any]) -> int:
    """Number of tokens that both segmentations have at the same offsets."""
    first = Counter(zip(old, map(tuple, places), strict=True))
    return (first & Counter(zip(new, map(tuple, goals), strict=True))).total()


def _read(tokenizer: Tokenizer, batch: list[str]) -> Iterator[tuple[list[int], list[Any]]]:
    encoded = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)


_CUT_OFF = "the fit reached its limit of iterations (max_iterations)"


def analyse(
    decision: Decision, rows: Rows, factored: Factored, weighting: Weighting, tails: Tensor | None, gained: int = 0
) -> WeightReport:
    """Measure ``factored`` against its ``rows`` under ``weighting``.

    Args:
        tails: the squared error of the weighted SVD of every rank; None where it was not computed.
        gained: numbers of a bias that the layer did not have before.
    """
    matrix, weight = factored.matrix, decision.weight
    n, d = rows.shape
    w = _row_weights(weighting, n)
    dist2 = row_errors(rows, matrix)
    norm2 = squared_norms(rows).cpu().to(torch.float64)
    by_rows = weighting.kinds <= {"rows"}
    error = (
        _ratio(w @ dist2, w @ norm2)
        if by_rows
        else weighted_error(rows, matrix, weighting, None if tails is None else float(tails[0])).relative
    )
    eigenvalues = torch.empty(0) if tails is None else (tails[:-1] - tails[1:]).clamp_min(0)
    total = float(eigenvalues.sum())
    itemsize = weight.nbytes // (n * d) if decision.recipe.is_coded else matrix.weight.element_size()
    rank = min(factored.nbytes // itemsize // (n + d), len(eigenvalues))
    labels, bands = _bands(matrix)
    stored = "integers" if decision.recipe.is_coded else "factors"
    if decision.recipe.is_cast:
        stored = dtype_name(decision.recipe.torch_dtype(weight.dtype))
    return replace(
        left_dense(decision),
        bytes_after=factored.nbytes + gained * weight.nbytes // (n * d),
        memory_bytes=matrix.memory_bytes + gained * weight.nbytes // (n * d),
        values_after=matrix.num_values + gained,
        error=error,
        error_unweighted=_ratio(dist2.sum(), norm2.sum()),
        svd_error=None if tails is None else _ratio(tails[rank], tails[0]),
        spectrum=tuple(float(v) / total if total else 0.0 for v in eigenvalues),
        bands=tuple(
            BandReport(
                flat,
                rank,
                int((labels == b).sum()),
                _ratio(w[labels == b].sum(), w.sum()),
                _ratio(dist2[labels == b].sum(), norm2[labels == b].sum()),
            )
            for b, (flat, rank) in enumerate(() if isinstance(matrix, DenseMatrix) else bands)
        ),
        seconds=factored.seconds,
        note="; ".join(filter(None, (_planned(decision), "" if factored.converged else _CUT_OFF))),
        matrix_rows=decision.recipe.matrix_rows,
        condition=matrix.condition if isinstance(matrix, InterpolativeMatrix) else None,
        own=_own(factored, rows, weighting, rank),
        stored=stored,
    )


def _planned(decision: Decision) -> str:
    """The decision's note; what it foretells of codes is not quite what was stored."""
    return f"planned: {decision.note}" if decision.note and decision.recipe.is_coded else decision.note


def left_dense(decision: Decision) -> WeightReport:
    """The report of a weight that stays dense; its note is the reason."""
    weight = decision.weight
    return WeightReport(
        name=weight.name,
        places=tuple(place.name for place in weight.places),
        shape=weight.shape,
        dtype=weight.dtype,
        method=to_json(decision.recipe.method),
        importance=to_json(decision.recipe.importance),
        codec=to_json(decision.recipe.codec),
        bytes_before=weight.nbytes,
        bytes_after=weight.nbytes,
        memory_bytes=weight.nbytes,
        values_after=weight.shape[0] * weight.shape[1],
        error=0.0,
        error_unweighted=0.0,
        svd_error=0.0,
        note=decision.note,
        stored="dense",
    )


def stored_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that a file of ``model`` holds, those of its state dict; shared tensors once."""
    return list({id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}.values())


def stored_bytes(model: nn.Module) -> int:
    """Bytes that a file of ``model`` holds."""
    return sum(t.numel() * t.element_size() for t in stored_tensors(model))


def stored_numbers(model: nn.Module) -> int:
    """Numbers that a file of ``model`` holds."""
    return sum(t.numel() for t in stored_tensors(model))


def _bands(matrix: Matrix) -> tuple[Tensor, list[tuple[int | None, int]]]:
    """The band of each row (n,), and the flat and the rank of each band."""
    if isinstance(matrix, FlatsMatrix):
        return matrix.labels.cpu().to(torch.int64), [(band.flat, band.rank) for band in matrix.bands]
    one = torch.zeros(matrix.shape[0], dtype=torch.int64)
    if isinstance(matrix, CodedMatrix):
        labels = matrix.tensors().get("labels")
        used = [how.used for how in matrix.readings]
        return one if labels is None else labels.cpu().to(one), list(zip(matrix.geometry.flat_of, used, strict=True))
    return one, [(0, matrix.weight.shape[1])]


def _row_weights(weighting: Weighting, n: int) -> Tensor:
    """The weight of each row (n,), float64; of a full metric its diagonal."""
    if weighting.left is None:
        return torch.ones(n, dtype=torch.float64)
    weights = weighting.left.diagonal() if weighting.left.ndim == 2 else weighting.left
    return weights.detach().cpu().to(torch.float64)


def _own(factored: Factored, rows: Rows, weighting: Weighting, rank: int) -> NormError | None:
    """The error in the norm that the method minimises, and the error of the SVD of ``rank`` in that norm."""
    norm = factored.norm
    if norm is None:
        return None
    error = norm_error(rows, factored.matrix, norm, weighting.row_weights).relative
    if rank < 1:
        return NormError(norm.name, error, 1.0)
    svd = truncated_svd(rows, rank, left=weighting.row_weights)
    best = norm_error(rows, LowRankMatrix(svd.coordinates, svd.basis), norm, weighting.row_weights)
    return NormError(norm.name, error, best.relative)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) > 0 else 0.0
