"""The report of a compression: printed as a table, saved as JSON, drawn by ``kflats.report.html``.

All errors are relative squared errors. For a matrix with rows a_i, importance w_i and compressed
rows b_i::

    error            = sum_i w_i |a_i - b_i|^2 / sum_i w_i |a_i|^2
    error_unweighted = the same with every w_i = 1
    svd_error        = the same as error, for the weighted SVD that fits in the same bytes

If importance is more than row weights, ``error`` has its measure: |L (A - B) R|^2 / |L A R|^2 for metrics
on both sides, sum_ij F_ij (a_ij - b_ij)^2 over sum_ij F_ij a_ij^2 for weights of single entries.

If a method minimises another norm, ``own`` is the error in that norm: the cost of the errors over the cost of the rows,
for the method and for the weighted SVD in the same bytes.

*Ratio* means bytes after / bytes before, labels included; it is printed for the named weights and for the whole model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.common.schema import JsonObject, check_version, decode
from kflats.io.atomic_files import replaced
from kflats.report.trimmed import TrimReport
from kflats.report.weights import BandReport, FrequencyBin, NormError, WeightReport, WorstRow

__all__ = ["REPORT_FILE", "BandReport", "FrequencyBin", "NormError", "Report", "WeightReport", "WorstRow", "span"]

REPORT_FILE = "kflats_report.json"
_FORMAT, _VERSION = "kflats-report", 1
_LARGEST_FILE = 64_000_000  # bytes: a report takes a few kB for each weight
_DETAILED = 4  # weights whose flats the text form lists
_REASONS = 12  # dense weights whose reasons the text form lists


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of ``compress_``. ``print(report)`` shows it; ``kflats report`` draws it.

    Sizes are bytes of weights: ``model_bytes_*`` of everything the model stores (with the weight files of a
    sentence-transformers folder's other modules), the weights' own in ``weights``; where the vocabulary was trimmed
    first, of the trimmed model. Round trip: ``Report.from_json(report.to_json()) == report``.

    >>> empty = Report("tiny", "60%", (), 10, 10, 0, "0.1.0")
    >>> Report.from_json(empty.to_json()) == empty
    True
    """

    model: str
    budget: str
    weights: tuple[WeightReport, ...]
    model_bytes_before: int
    model_bytes_after: int
    seed: int
    version: str
    trimming: TrimReport | None = None

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

    def to_json(self) -> JsonObject:
        """A JSON-able dict, with its format and version."""
        return {"format": _FORMAT, "version": _VERSION, "report": dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: object) -> Report:
        """The report that ``to_json`` wrote.

        Raises:
            KflatsError: another format, another version, a missing or unknown field, a wrong type.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise KflatsError(
                "the file is not a report of kflats", hint=f"the {REPORT_FILE} that kflats compress wrote"
            )
        check_version(data.get("version"), _VERSION, "reports")
        report: Report = decode(Report, data.get("report"), "report", signed=frozenset({"report.seed"}))
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file (``kflats_report.json`` in a compressed folder)."""
        try:
            text = json.dumps(self.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise KflatsError(
                f"the report cannot be written as JSON: {error}", cause="a NaN or infinite error"
            ) from error
        with replaced(path) as aside:
            aside.write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report file, or the report of a compressed model's folder."""
        file = Path(path)
        if file.is_dir():
            file = file / REPORT_FILE
        if not file.is_file():
            raise KflatsError(
                f"no report at {file}",
                cause="kflats compress did not write the folder",
                hint="kflats compress MODEL --keep 60% --out DIR writes a report",
            )
        if file.stat().st_size > _LARGEST_FILE:
            raise KflatsError(
                f"{file} is too large for a report ({size(file.stat().st_size)})", cause="another kind of file"
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise KflatsError(
                f"{file} is not readable JSON ({error})",
                cause="a damaged file",
                hint="compress again, which writes the report again",
            ) from error
        return Report.from_json(data)

    def __str__(self) -> str:
        rows = [
            [
                w.name,
                str(w.method.get("type", "?")) + (f" k={w.method['k']}" if "k" in w.method else ""),
                str(w.importance.get("type", "?")),
                *_before_after(w.bytes_before, w.bytes_after),
                w.kept,
                number(w.error),
                number(w.svd_error),
                number(w.error_unweighted),
                *(_own(w) if self.has_own else []),
            ]
            for w in self.weights
        ]
        columns = ["weight", "method", "importance", "before", "after", "ratio"]
        columns += ["rank", "error", "SVD error", "unweighted"]
        columns += ["own norm", "own error", "SVD's own"] if self.has_own else []
        blank = [""] * (len(columns) - 6)
        totals = [
            ["named weights", "", "", *_before_after(self.bytes_before, self.bytes_after), *blank],
            ["whole model", "", "", *_before_after(self.model_bytes_before, self.model_bytes_after), *blank],
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
        if dense := [weight for weight in self.weights if weight.dense]:
            parts += ["", *(f"{visible(w.name)}: {visible(w.note) or 'dense'}" for w in dense[:_REASONS])]
            parts += [f"({len(dense) - _REASONS} more left dense)"] if len(dense) > _REASONS else []
        factored = [weight for weight in self.weights if not weight.dense]
        for weight in factored[:_DETAILED]:
            parts += ["", *_details(weight)]
        if len(factored) > _DETAILED:
            parts += ["", f"({len(factored) - _DETAILED} more weights: see the report file)"]
        return "\n".join(parts)


def _own(weight: WeightReport) -> list[str]:
    """The norm, the error in it, and the SVD's error in it; dashes for the squared error."""
    own = weight.own
    return ["-"] * 3 if own is None else [own.norm, number(own.error), number(own.svd_error)]


def _before_after(before: int, after: int) -> list[str]:
    return [size(before), size(after), share(after, before)]


def _details(weight: WeightReport) -> list[str]:
    """The flats of one weight, one line for each."""
    places = f"; tied: {', '.join(visible(p) for p in weight.places)}" if len(weight.places) > 1 else ""
    lines = [f"{visible(weight.name)}: {weight.shape[0]} x {weight.shape[1]} {visible(weight.dtype)}{places}"]
    lines += [f"  {weight.recipe}", f"  fitted in {weight.seconds:.1f} s"]
    if weight.condition is not None:
        lines.append(f"  largest entry beside the identity block: {number(weight.condition)}")
    if weight.note:
        lines.append(f"  note: {visible(weight.note)}")
    rows = [
        [
            "exact" if flat is None else f"flat {flat}",
            str(sum(b.rows for b in bands)),
            span([b.rank for b in bands]),
            share(sum(b.weight_share for b in bands)),
            span([b.error for b in bands]),
        ]
        for flat, bands in weight.flats.items()
    ]
    if not rows:
        return lines
    shown = rows if len(rows) <= 24 else [*rows[:23], [f"... {len(rows) - 23} more flats", "", "", "", ""]]
    listing = plain(table(["rows kept in", "rows", "rank", "importance", "error"], shown))
    return lines + ["  " + line for line in listing.splitlines()]


def span(values: list[int] | list[float]) -> str:
    """``low-high``, or one number.

    >>> span([3, 1024]), span([0.25]), span([1e-5, 0.25])
    ('3-1024', '0.25', '1e-05 to 0.25')
    """
    low, high = min(values), max(values)
    if isinstance(low, int):
        return str(low) if low == high else f"{low}-{high}"
    first, last = number(low), number(high)
    return first if first == last else f"{first} to {last}"
