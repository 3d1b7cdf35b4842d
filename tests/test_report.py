"""Report records: what they say, and that a file of them is read strictly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.report.report import REPORT_FILE, BandReport, NormError, Report, WeightReport

NASTY = "<script>alert(1)</script>\x1b[2J‮[bold]"


def sample(bands: int = 4, name: str = "embeddings.word_embeddings") -> Report:
    weight = WeightReport(
        name=name,
        places=(name, "lm_head"),
        shape=(1000, 64),
        dtype="float32",
        method={"type": "Flats", "k": 3, "ranks": "filled"},
        importance={"type": "TokenCounts", "power": 0.5},
        codec={"type": "Float", "dtype": "same"},
        bytes_before=256_000,
        bytes_after=153_600,
        values_after=38_150,
        error=0.0123,
        error_unweighted=0.2,
        svd_error=0.0456,
        spectrum=tuple(2.0 ** -(i + 1) for i in range(64)),
        bands=tuple(
            BandReport(None if i == 0 else (i - 1) // 2, 64 if i == 0 else 10 * i, 1000 // bands, 1 / bands, 0.1 * i)
            for i in range(bands)
        ),
        seconds=1.25,
        note="",
    )
    return Report("tiny model", "60%", (weight,), 1_000_000, 897_600, -3, "0.1.0")


def test_json_round_trip_through_a_file(tmp_path: Path) -> None:
    report = sample()
    report.save(tmp_path / REPORT_FILE)
    assert Report.load(tmp_path / REPORT_FILE) == report
    assert Report.load(tmp_path) == report  # a compressed model's folder works too


def written(report: Report) -> Any:
    """The JSON of a report, as a file holds it."""
    with TemporaryDirectory() as folder:
        report.save(Path(folder, "r.json"))
        return json.loads(Path(folder, "r.json").read_text(encoding="utf-8"))


def read(data: Any) -> Report:
    """The report of a file that holds ``data``."""
    with TemporaryDirectory() as folder:
        Path(folder, "r.json").write_text(json.dumps(data), encoding="utf-8")
        return Report.load(Path(folder, "r.json"))


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    st.text(max_size=20),
    st.integers(0, 10**12),
    st.integers(0, 3) | st.none(),
)
def test_every_value_survives_json(spectrum: list[float], name: str, nbytes: int, flat: int | None) -> None:
    weight = replace(
        sample().weights[0],
        name=name,
        spectrum=tuple(spectrum),
        bytes_after=nbytes,
        bands=(BandReport(flat, 1, 2, 0.5, 0.25),),
    )
    report = replace(sample(), weights=(weight,))
    assert read(written(report)) == report
    assert str(report)


def test_the_table_says_sizes_ratios_and_both_errors() -> None:
    text = str(sample())
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("embeddings.word_embeddings "))
    for part in ("Flats k=3", "TokenCounts", "256.0 kB", "153.6 kB", "60.0 %", "0.0123", "0.0456", "0.2"):
        assert part in row
    whole = next(line for line in lines if line.startswith("whole model"))
    assert "1.0 MB" in whole
    assert "89.8 %" in whole
    assert any(line.startswith("named weights") and "60.0 %" in line for line in lines)
    recipe = "Recipe(Flats(k=3, ranks='filled'), TokenCounts(power=0.5), Float(dtype='same'))"
    assert sample().weights[0].recipe == recipe


def test_an_error_in_the_method_s_own_norm_stands_beside_the_squared_one() -> None:
    weight = replace(
        sample(name="table").weights[0],
        method={"type": "Subspace", "error": {"type": "Power", "q": 1.0}},
        own=NormError("power 1 of distances", 0.345, 0.456),
    )
    report = replace(sample(), weights=(weight, sample(name="other").weights[0]))
    assert read(written(report)) == report
    lines = str(report).splitlines()
    assert next(line for line in lines if line.startswith("table ")).split()[-6:] == [
        "power", "1", "of", "distances", "0.345", "0.456",
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("other ")).split()[-3:] == ["-", "-", "-"]
    assert any(line.startswith("own error: ") for line in lines)
    assert "Subspace(error=Power(q=1.0))" in weight.recipe
    assert "own" not in str(sample())


def test_names_from_files_cannot_reach_the_terminal() -> None:
    text = str(replace(sample(name=NASTY), model=NASTY))
    assert "\x1b" not in text
    assert "‮" not in text
    assert "[bold]" in text  # rich markup is text, not an instruction


def test_notes_of_many_weights_stay_readable() -> None:
    weights = [replace(sample(name=f"layer.{i}").weights[0], note=f"noticed {i}") for i in range(19)]
    text = str(replace(sample(), weights=(*weights, dense("last", "dense: too narrow"))))
    assert "layer.3: noticed 3" in text
    assert "last: dense: too narrow" in text
    assert "(8 more in kflats_report.json)" in text
    assert "layer.12: noticed" not in text


def test_a_report_without_bands_or_bytes_prints() -> None:
    weight = replace(sample().weights[0], bands=(), bytes_before=0)
    assert str(replace(sample(), weights=(weight,)))
    assert str(replace(sample(), weights=()))


def set_at(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "not a kflats report"),
        (("version",), 3, "version 3"),
        (("version",), True, "version True"),
        (("report",), [], "report should be an object"),
        (("report", "budget"), 3, "report.budget should be a string"),
        (("report", "seed"), 1.5, "report.seed should be a whole number"),
        (("report", "model_bytes_after"), True, "model_bytes_after should be a whole number"),
        (("report", "model_bytes_after"), -1, "whole number >= 0"),
        (("report", "extra"), 1, "unknown fields"),
        (("report", "weights"), {}, "report.weights should be a list"),
        (("report", "weights", 0, "shape"), [1, 2, 3], "shape should be a list of 2"),
        (("report", "weights", 0, "error"), "0.1", "error should be a finite number"),
        (("report", "weights", 0, "error"), math.nan, "error should be a finite number"),
        (("report", "weights", 0, "error"), 10**400, "error should be a finite number"),
        (("report", "weights", 0, "method"), {"k": 3}, 'method should be an object with a "type"'),
        (("report", "weights", 0, "bands", 1, "flat"), "0", "flat should be a whole number"),
        (("report", "weights", 0, "spectrum", 5), None, "spectrum[5] should be a finite number"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = written(sample())
    set_at(data, path, value)
    with pytest.raises(KflatsError) as caught:
        read(data)
    assert message in str(caught.value)


def test_a_missing_field_is_refused_and_a_default_is_not_needed() -> None:
    data = written(sample())
    del data["report"]["weights"][0]["note"]
    assert read(data) == sample()
    del data["report"]["weights"][0]["svd_error"]
    with pytest.raises(KflatsError, match="svd_error"):
        read(data)


def test_files_that_are_not_reports(tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match="holds no report"):
        Report.load(tmp_path)
    for content in (b"{", b"\xff\xfe\x00", b"[" * 100_000):
        (tmp_path / REPORT_FILE).write_bytes(content)
        with pytest.raises(KflatsError, match="is not JSON"):
            Report.load(tmp_path)
    for content in (b"[]", b"3", b"{}"):
        (tmp_path / REPORT_FILE).write_bytes(content)
        with pytest.raises(KflatsError, match="not a kflats report"):
            Report.load(tmp_path)


def test_a_report_with_a_nan_is_not_written(tmp_path: Path) -> None:
    weight = replace(sample().weights[0], error=math.nan)
    with pytest.raises(KflatsError, match="NaN"):
        replace(sample(), weights=(weight,)).save(tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def dense(name: str, note: str) -> WeightReport:
    return replace(
        sample(name=name).weights[0], stored="dense", bands=(), spectrum=(),
        bytes_after=256_000, error=0.0, note=note,
    )  # fmt: skip


def test_what_stays_dense_is_said_with_its_reason() -> None:
    report = replace(sample(), weights=(*sample().weights, dense("head", f"dense: too narrow {NASTY}")))
    text = str(report)
    assert "head: dense: too narrow" in text
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("head "))
    assert " dense " in row
    assert report.weights[1].dense
    assert report.weights[1].mean_rank == 64
    many = replace(report, weights=tuple(dense(f"layer.{i}", "dense: because") for i in range(30)))
    assert "(18 more in kflats_report.json)" in str(many)
    assert read(written(report)) == report


def test_ranks_are_beside_the_full_rank() -> None:
    weight = sample().weights[0]
    assert weight.kept == "31 of 64"
    assert replace(weight, bands=()).kept == "-"
