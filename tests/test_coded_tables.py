"""Laws of coded tables: rows at any places are those of the whole, files are whole or refused, sizes are kept."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crew import together
from table_files import as_arrow, as_parquet, as_safetensors
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import kflats.tables
from kflats import CodedTable, KflatsError, TableEmbedding, TableEmbeddingBag, compress_table, open_table
from kflats.cli.app import app
from kflats.codecs.streams import encode_symbols, model_of, models_of
from kflats.common.errors import KflatsWarning
from kflats.common.workers import Workers
from kflats.io import open_rows
from kflats.numerics.rows import all_rows
from kflats.tables import compress as compress_module
from kflats.tables import fast, shards, statistics
from kflats.tables.axes import Axes
from kflats.tables.compact import CompactCode, CompactWriter, _places, usual
from kflats.tables.compress import _BLOCK
from kflats.tables.flats import Parting, parted
from kflats.tables.index import Layout, shard_name
from kflats.tables.layout import Coordinates
from kflats.tables.shards import ShardWriter

pytestmark = pytest.mark.filterwarnings("ignore:.* which the fast layout cuts off")
"""It cuts off the longest of the ``drawn`` rows."""
LAYOUTS = ("compact", "fast")
KINDS = (*LAYOUTS, "flats")
"""Layouts, and the compact one with several flats and weights of rows."""
N = 2 * _BLOCK + 1011
D = 12


def drawn(n: int, d: int, seed: int = 0, kinds: int = 1, fall: float = 0.8) -> Tensor:
    """Rows of several lengths around a mean, in turned axes of falling energy; some are far from all others. The
    energies of each kind of row fall in another order."""
    g = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(d, d, generator=g)).Q
    orders = (torch.arange(d) + torch.arange(kinds).unsqueeze(1) * d // kinds) % d
    scales = (1.0 + orders)[torch.arange(n) % kinds] ** -fall
    rows = torch.randn(n, d, generator=g) * scales * torch.randn(n, 1, generator=g).exp()
    rows = rows @ axes + torch.randn(d, generator=g)
    rows[n // 3] = 3e3 * axes[-1]
    rows[n // 2] = rows[n // 2 + 1] = 0.0
    rows[n - 1] = -40 * axes[-1]
    return rows


def rows_of(kind: str) -> Tensor:
    return drawn(N, D, kinds=3, fall=1.6) if kind == "flats" else drawn(N, D)


def saved(table: Tensor, path: Path) -> Path:
    np.save(path, table.numpy())
    return path


def size_of(table: Tensor, bits: float) -> str:
    """So many bits a number, and what a short table needs beside its rows."""
    return f"{40_000 + 6 * table.shape[1] ** 2 + int(bits * table.numel() / 8)}B"


def as_bfloat16(table: Tensor, path: Path) -> Path:
    return as_safetensors(table.to(torch.bfloat16), path)


def options_of(kind: str, rows: int) -> dict[str, Any]:
    if kind != "flats":
        return {"layout": kind}
    return {"flats": 3, "row_weights": 1 / (10 + torch.arange(rows, dtype=torch.float32, device="cpu"))}


def made(table: Tensor, folder: Path, kind: str, bits: float = 5, **options: Any) -> CodedTable:
    folder.mkdir(exist_ok=True)
    source = saved(table, folder / "source.npy")
    options |= options_of(kind, len(table))
    compress_table(source, folder / "coded", size=size_of(table, bits), quiet=True, **options)
    return open_table(folder / "coded")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def table(kind: str, tmp_path_factory: pytest.TempPathFactory) -> CodedTable:
    """Three files; the last row of the last one is in a lane that is not full."""
    cut = pytest.warns(KflatsWarning, match="which the fast layout cuts off")
    with cut if kind == "fast" else nullcontext():
        table = made(rows_of(kind), tmp_path_factory.mktemp(kind), kind, shard_rows=_BLOCK, seed=1)
    assert table.flats == (3 if kind == "flats" else 1)
    return table


@pytest.fixture(scope="module")
def short(kind: str, tmp_path_factory: pytest.TempPathFactory) -> CodedTable:
    """A short table of the same kind, in one file."""
    return made(drawn(700, 6), tmp_path_factory.mktemp(kind), kind, 6)


@pytest.fixture
def small(short: CodedTable, tmp_path: Path) -> CodedTable:
    """A copy of it, which a test may damage."""
    return open_table(shutil.copytree(short.folder, tmp_path / "coded"))


# Rows -------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_whole(table: CodedTable) -> None:
    """For one row, for some, across the ends of lanes and files, in any order, several times, none."""
    whole = all_rows(table).float()
    assert whole.shape == (N, D)
    g = torch.Generator().manual_seed(2)
    edges = [0, 1, 7, 8, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, N - 1]
    for ids in (
        torch.tensor(edges),
        torch.tensor([N - 1]),
        torch.randint(N, (3, 5), generator=g),
        torch.randint(N, (6000,), generator=g),
        torch.randint(40, (900,), generator=g, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    ):
        rows = table.rows(ids)
        assert rows.shape == (*ids.shape, D)
        # One row and many are multiplied by different kernels, which round differently.
        torch.testing.assert_close(rows, whole[ids.long()], rtol=1e-5, atol=1e-5)
        array = table.rows(ids.numpy())
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, rows.numpy())
    assert torch.equal(table.rows([3, 1]), table.rows(torch.tensor([3, 1])))
    assert torch.equal(table[7], table.rows([7])[0])
    with pytest.raises(IndexError):
        table[N]


def test_the_error_is_that_of_the_rows(table: CodedTable, kind: str) -> None:
    """What the index says; and no row is lost: not the long ones, not those far from all others."""
    rows, whole = rows_of(kind).double(), all_rows(table)
    weights = options_of(kind, N).get("row_weights", torch.ones(N))
    error, total = ((rows - whole).square().sum(1) * weights).sum(), (rows.square().sum(1) * weights).sum()
    assert table.index.relative_error == pytest.approx(float(error / total), rel=1e-3)
    if table.index.layout == "compact":
        alone = (rows - whole).norm(dim=1)[[N // 3, N // 2, N - 1]]
        assert float(alone[0]) < 1e-3 * 3e3
        assert float(alone[1:].max()) < 1.0


@pytest.mark.parametrize("layout", [pytest.param("compact", marks=pytest.mark.slow), "fast"])
def test_more_bytes_lose_less(layout: str, tmp_path: Path) -> None:
    rows = drawn(30_000, D)[:9_000]
    errors = []
    for bits in (0, 4):
        coded = made(rows, tmp_path / f"{bits}", layout, bits)
        assert folder_bytes(coded.folder) <= int(size_of(rows, bits)[:-1])
        errors.append(coded.index.relative_error)
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize(("n", "d"), [(1, 8), (3, 1), pytest.param(300, 600, marks=pytest.mark.slow), (5000, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_of_any_shape(layout: str, n: int, d: int, tmp_path: Path) -> None:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    if n == 1:
        with pytest.raises(KflatsError, match="one row"):
            made(rows, tmp_path, layout)
        return
    coded = made(rows, tmp_path, layout)
    assert float((all_rows(coded) - rows).square().mean()) < 0.05


@pytest.mark.parametrize("kind", ["even", "normal", "of few", "of three values"])
def test_the_step_of_a_column_is_the_best_of_all_that_could_be_taken(kind: str) -> None:
    """For the search that tries about half of them."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, 6, generator=g)
    columns = {
        "even": torch.rand(2000, 6, generator=g) - 0.5,
        "normal": normal,
        "of few": normal * (torch.rand(2000, 6, generator=g) < 0.03),
        "of three values": normal.sign() * (normal.abs() > 0.5),
    }[kind] * torch.logspace(-2, 2, 6)
    squares, sizes = torch.rand(2000, 1, generator=g), columns.square().mean(0).sqrt()
    for bits in range(1, 10):
        least, steps = fast._best(columns, sizes, squares, bits)
        tried = 2 * fast._WIDTHS.unsqueeze(1) * sizes / 2**bits
        codes = (columns / tried.unsqueeze(1)).floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
        errors = ((codes * tried.unsqueeze(1) - columns).square() * squares).sum(1)
        torch.testing.assert_close(least, errors.min(0).values, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fast._error(columns, squares, steps, bits), least, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_lanes_take_little_more_than_a_whole_stream() -> None:
    """At most .05 bits a number more than one stream of the same integers by the same distributions."""
    rows = drawn(2**14, 64, 4)
    z = (rows - rows.mean(0)) @ torch.linalg.eigh(torch.cov(rows.T)).eigenvectors.flip(1)
    for step in (0.05, 0.4):
        sample = Coordinates(z)
        code = CompactCode.of(
            usual(sample),
            Parting(Axes.of(torch.eye(64)[None])),
            torch.zeros(64),
            step,
            float(z.norm(dim=1).max()),
        )
        assert code.design is not None
        labels, levels = code.design.quantized(sample)
        classes = labels.to(torch.int64)
        narrow = classes < code.lanes.first_wide
        contexts = code.design.quantizer.contexts[classes[narrow]]
        parts = [levels[narrow][contexts == k] for k in range(len(code.design.quantizer.tables))]
        parts += [levels[~narrow].flatten(), classes]
        models = models_of(code.design.quantizer.tables)
        models += [model_of(-(2**15), torch.ones(2**16)), model_of(0, torch.bincount(classes))]
        whole = 8 * len(encode_symbols([part.numpy().astype(np.int32) for part in parts], models))
        assert whole / len(z) < code.row_bits(sample) < whole / len(z) + 64 * 0.05


# Sources ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS[:2], pytest.param("flats", marks=pytest.mark.slow)])
def test_the_cut_of_the_source_changes_no_byte(kind: str, tmp_path: Path) -> None:
    rows = drawn(_BLOCK + 500, 5)
    outs = []
    for number, cuts in enumerate(([], [1, _BLOCK - 1, _BLOCK + 1])):
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        for part, piece in enumerate(torch.tensor_split(rows, cuts)):
            saved(piece, folder / f"{part}.npy")
        outs.append(tmp_path / f"out-{number}")
        options = options_of(kind, len(rows))
        compress_table(folder, outs[-1], size=size_of(rows, 6), shard_rows=_BLOCK, quiet=True, **options)
    for path in outs[0].iterdir():
        assert all((out / path.name).read_bytes() == path.read_bytes() for out in outs[1:]), path.name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        pytest.param(partial(as_parquet, group=777), "vector", id="parquet"),
        pytest.param(partial(as_arrow, group=777), "vector", id="arrow", marks=pytest.mark.slow),
        pytest.param(as_bfloat16, "table", id="bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_table_in_any_form_is_coded_as_its_numbers(
    workers: int, written: Callable[..., Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte; of several files, which end elsewhere than those of the coded table."""
    monkeypatch.setattr(statistics, "UNIT", _BLOCK // 2)
    rows = drawn(_BLOCK + 3000, 5).to(torch.bfloat16).float()
    (folder := tmp_path / "source").mkdir()
    for part, piece in enumerate(rows.split(5000)):
        written(piece, folder / f"part-{part}")

    def coded(source: Path, out: Path, crew: Workers, name: str) -> dict[str, bytes]:
        compress_table(source, out, size="8 bits", name=name, shard_rows=_BLOCK, quiet=True, workers=crew)
        crew.meet()
        return {path.name: path.read_bytes() for path in out.iterdir()}

    alone = coded(saved(rows, tmp_path / "rows.npy"), tmp_path / "alone", Workers(), "")
    assert together(workers, 0, lambda crew: coded(folder, tmp_path / "out", crew, name)) == [alone] * workers


def test_a_coded_table_is_rows(table: CodedTable) -> None:
    """Other methods read it as they read any source."""
    blocks = torch.cat([block for _, block in table.blocks(5000)])
    # Products of other sizes are taken by other kernels, which round differently.
    torch.testing.assert_close(blocks, all_rows(table).float(), rtol=1e-5, atol=1e-5)
    ids = torch.tensor([5, 1])
    assert torch.equal(table.take(ids), table.rows(ids))


@pytest.mark.parametrize(
    ("n", "size"), [(2000, "18kB"), (40_000, "4 bits"), pytest.param(40_000, "8 bits", marks=pytest.mark.slow)]
)
def test_rows_that_are_cut_off_are_spoken_of(n: int, size: str, tmp_path: Path) -> None:
    """Whether the sample has them or not; rows of many lengths, whose longest lose most, are none."""
    rows = torch.randn(n, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7) ** -0.8
    rows *= torch.randn(n, 1, generator=torch.Generator().manual_seed(1)).exp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_table(saved(rows, tmp_path / "x.npy"), tmp_path / "none", size=size, layout="fast", quiet=True)
    rows[77] *= 3000 / rows[77].norm()
    with pytest.warns(KflatsWarning, match="of the squared error is that of rows .* cuts off"):
        compress_table(saved(rows, tmp_path / "x.npy"), tmp_path / "one", size=size, layout="fast", quiet=True)


def test_a_few_long_rows_are_kept_by_scales(tmp_path: Path) -> None:
    """Three of 8192 decide that rows have scales."""
    rows = torch.randn(8192, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33) ** -0.8
    rows[[1, 4099, 8190]] *= 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_table(saved(rows, tmp_path / "x.npy"), tmp_path / "out", size="4 bits", layout="fast", quiet=True)
    assert open_table(tmp_path / "out").index.relative_error < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    rows = drawn(3000, 4)
    rows[2100, 1] = rows[2200, 0] = value
    for part, piece in enumerate(rows.split(2000)):
        saved(piece, tmp_path / f"part-{part}.npy")
    with pytest.raises(KflatsError, match=r"row 100 of .*part-1\.npy, and 1 more up to row 200 of .*part-1\.npy"):
        compress_table(tmp_path, tmp_path / "out", size="8 bits", quiet=True)
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no size": ({"size": "0.1 bits"}, "cannot hold a table"),
    "no size, fast": ({"size": "0.1 bits", "layout": "fast"}, "cannot hold a table"),
    "nothing": ({"size": "0.0001 bits"}, '0 bytes keeps nothing.*"8GB"'),
    "a share": ({"size": "10%"}, "not supported with a table"),
    "a layout": ({"layout": "slow"}, "layout='slow'"),
    "a seed": ({"seed": -1}, "seed=-1"),
    "rows a file": ({"shard_rows": 1000}, "shard_rows=1000"),
    "no flat": ({"flats": 0}, "flats=0 is not supported with a table"),
    "flats, fast": ({"flats": 2, "layout": "fast"}, "flats=2 is not supported with the fast layout"),
    "weights, fast": ({"row_weights": torch.ones(500), "layout": "fast"}, "not supported with the fast layout"),
    "other weights": ({"row_weights": torch.ones(499)}, r"of shape \(499,\) is not supported as weights"),
    "no numbers": ({"row_weights": np.array(["a"] * 500)}, "not supported as weights"),
    "a negative weight": ({"row_weights": -torch.ones(500).cumsum(0)}, "the weight -1.0 of row 0"),
    "a weight of NaN": ({"row_weights": torch.ones(500).index_fill(0, torch.tensor(7), np.nan)}, "weight nan of row 7"),
    "no weight": ({"row_weights": torch.zeros(500)}, "all weights of rows are 0"),
    "two rows of weights": ({"row_weights": [[1, 2], [3]]}, "weights of rows are no array"),
    "long numbers": ({"row_weights": np.ones(500, np.longdouble)}, "not supported as weights"),
    "sparse weights": ({"row_weights": torch.ones(500).to_sparse()}, "not supported as weights"),
    "tiny weights": ({"row_weights": torch.full((500,), 1e-20)}, "the weight .* of row 0 is not supported"),
    "a file of weights": ({"row_weights": "weights.csv"}, r"weights\.csv is not supported as weights of rows"),
    "no such file": ({"row_weights": "weights.npy"}, r"weights\.npy"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_done_is_refused(kind: str, tmp_path: Path) -> None:
    options, said = REFUSED[kind]
    source = saved(drawn(500, 4), tmp_path / "x.npy")
    with pytest.raises(KflatsError, match=said):
        compress_table(source, tmp_path / "out", **{"size": "9 bits", "quiet": True, **options})  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turned_table_is_refused_before_it_is_read(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What depends on its shape alone would take the cube of its columns."""
    monkeypatch.setattr(compress_module, "statistics_of", None)
    for columns, said in ((9000, "8 rows and 9,000 columns may be transposed"), (2**16 + 1, "65,537 columns is not")):
        source = saved(torch.zeros(8, columns), tmp_path / "x.npy")
        with pytest.raises(KflatsError, match=said):
            compress_table(source, tmp_path / "out", size="8 bits", layout=layout, quiet=True)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compact", pytest.param("flats", marks=pytest.mark.slow)])
def test_settings_of_torch_change_nothing(kind: str, tmp_path: Path) -> None:
    """Under autocast a table was written that nothing could open, and tables of flats could not be read."""
    table, ids = drawn(700, 6), torch.tensor([5, 699, 5])
    usual = made(table, tmp_path / "usual", kind, 6)
    rows = usual.rows(ids)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            other = made(table, tmp_path / "other", kind, 6)
            assert torch.equal(usual.rows(ids), rows)
    finally:
        torch.set_default_dtype(before)
    assert other.index == usual.index
    assert all(
        (other.folder / path.name).read_bytes() == path.read_bytes()
        for path in usual.folder.iterdir()
        if path.suffix == ".safetensors"
    )


def test_files_that_are_linked_beside_the_output_stay(tmp_path: Path) -> None:
    """The folder of unfinished runs may be a link to a disk with more room."""
    (tmp_path / "disk" / "own").mkdir(parents=True)
    (tmp_path / "disk" / "own.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".coded.kflats-partial").symlink_to(tmp_path / "disk")
    made(drawn(700, 6), tmp_path, "fast", 6)
    assert {"own", "own.json"} <= {path.name for path in (tmp_path / "disk").iterdir()}


# Flats and weights of rows ----------------------------------------------------------------------


def planted(n: int, d: int, flats: int) -> tuple[Tensor, Tensor]:
    """Rows of several kinds, each with axes of its own, and the kind of each row."""
    g = torch.Generator().manual_seed(flats)
    kinds, rows = torch.randint(flats, (n,), generator=g), torch.randn(n, d, generator=g)
    rows *= torch.arange(1, d + 1) ** -1.2 * torch.randn(n, 1, generator=g).mul(0.5).exp()
    for kind in range(flats):
        rows[kinds == kind] @= torch.linalg.qr(torch.randn(d, d, generator=g)).Q
    return rows, kinds


@pytest.mark.slow
def test_several_flats_lose_less_where_rows_are_of_several_kinds(tmp_path: Path) -> None:
    rows, _ = planted(10_000, 24, 3)
    errors = []
    for flats in (1, 3):
        source = saved(rows, tmp_path / "rows.npy")
        out = tmp_path / f"{flats}"
        index = compress_table(source, out, size="60kB", flats=flats, quiet=True)
        assert folder_bytes(out) <= 60_000
        assert open_table(out).flats == flats
        errors.append(index.relative_error)
    assert errors[1] < 0.6 * errors[0]


def test_em_gives_planted_kinds_flats_of_their_own_and_codes_become_shorter(tmp_path: Path) -> None:
    rows, kinds = planted(30_000, 16, 4)
    one = Parting(Axes.of(torch.eye(16)[None]))

    def blocks(unit: int) -> Iterator[tuple[int, Tensor, None]]:
        for start in range(10_000 * unit, 10_000 * unit + 10_000, 2_500):
            yield start, rows[start : start + 2_500], None

    def run(noise: float) -> tuple[Parting, tuple[float, ...]]:
        return parted(
            rows[::7],
            None,
            4,
            one=one,
            noise=noise,
            seed=0,
            blocks=blocks,
            units=3,
            workers=Workers(),
            show=lambda what, done: None,
        )

    made, lengths = run(1e-4)
    labels = made.labels(rows, torch.zeros(len(rows), dtype=torch.int64))
    found = torch.zeros(4, 4).index_put_((kinds, labels), torch.ones(len(rows)), accumulate=True)
    assert float(found.max(1).values.sum()) > 0.97 * len(rows)
    assert all(later < sooner for sooner, later in pairwise(lengths))
    basis = made.axes.dense[0] @ made.axes.dense[0].T
    torch.testing.assert_close(basis, torch.eye(16), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_flats_of_few_rows_are_given_up(tmp_path: Path) -> None:
    """Bytes are those of one flat."""
    rows = drawn(300, 40)
    source = saved(rows, tmp_path / "rows.npy")
    for flats in (1, 8):
        compress_table(source, tmp_path / f"{flats}", size=size_of(rows, 5), flats=flats, quiet=True)
    one, several = ({p.name: p.read_bytes() for p in (tmp_path / f"{k}").iterdir()} for k in (1, 8))
    assert one == several


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "size"), [(3000, 64, "40kB"), (4000, 96, "60kB")])
def test_flats_whose_axes_cost_more_than_they_save_are_not_taken(
    n: int, d: int, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three planted kinds in tables that are too short for three sets of axes; the smaller has no room for them."""
    source = saved(planted(n, d, 3)[0], tmp_path / "rows.npy")
    lost = [compress_table(source, tmp_path / f"{k}", size=size, flats=k).squared_error for k in (1, 3)]
    assert lost[0] == lost[1]
    assert "one flat does better than 3 in these bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_many_flats_and_weights_have_a_label_for_each_class(tmp_path: Path) -> None:
    """16 flats of 16 levels would be more than a byte tells apart."""
    rows = planted(3000, 8, 1)[0]
    weights = torch.randint(255, (len(rows),), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    source, errors = saved(rows, tmp_path / "rows.npy"), []
    for flats in (1, 16):
        index = compress_table(source, tmp_path / f"{flats}", size="20kB", flats=flats, row_weights=weights, quiet=True)
        lost = (all_rows(open_table(tmp_path / f"{flats}")) - rows).square().sum(1) @ weights.double()
        assert index.squared_error == pytest.approx(float(lost), rel=1e-3)
        errors.append(index.relative_error)
    assert errors[1] <= errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("flats", "far"), [(1, False), (2, False), (1, True)])
def test_axes_take_8_bits_where_that_loses_less_in_the_same_bytes(
    flats: int, far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error in the index is that of the rows, also in axes that are not quite orthogonal; far rows are kept."""
    rows, _ = planted(5000, 192, 2)
    if far:
        rows[5:7] *= 500 / rows[5:7].norm(dim=1, keepdim=True)
    source, lost = saved(rows, tmp_path / "rows.npy"), []
    for name, dear in (("8 bits", 0.0), ("16 bits", 2.0)):
        monkeypatch.setattr(compress_module, "_DEAR", dear)
        if far and not dear:
            monkeypatch.setattr(compress_module._Run, "expected_error", lambda run: not run.seen.parting.axes.coarse)
        index = compress_table(source, tmp_path / name, size="2 bits", flats=flats, quiet=True)
        table = open_table(tmp_path / name)
        apart = (all_rows(table) - rows).square().sum(1, dtype=torch.float64)
        assert index.squared_error == pytest.approx(float(apart.sum()), rel=1e-3)
        assert float(apart[5:7].max()) < 30 * float(apart.mean())
        assert isinstance(table._code, CompactCode)
        assert (table._code.axes.levels.dtype == torch.int8) == (not dear)
        lost.append(float(apart.sum()))
    assert lost[0] <= (1.5 if far else 0.95) * lost[1]


@pytest.mark.parametrize("nbytes", [1, 2**40])
def test_a_long_table_has_files_for_several_workers(nbytes: int) -> None:
    """Their number must not depend on the workers, for bytes must not."""
    for rows in (1, 1000, 2**18, 10**6, 2 * 10**7, 10**9):
        each = compress_module._rows_a_shard(rows, nbytes)
        assert each % _BLOCK == 0
        assert each * nbytes <= max(rows * 2**31, _BLOCK * nbytes)
        assert rows < 16 * 2**18 or rows >= 15 * each
        assert nbytes > 1 or 2**18 <= each <= 2**22


@pytest.mark.slow
def test_flats_in_few_bytes_do_not_lose_the_table(tmp_path: Path) -> None:
    source = saved(torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0)), tmp_path / "rows.npy")
    errors = [
        compress_table(source, tmp_path / f"{flats}", size="8 bits", flats=flats, quiet=True).relative_error
        for flats in (1, 16)
    ]
    assert errors[1] <= errors[0] < 0.02


@pytest.mark.slow
def test_heavy_rows_may_be_few(tmp_path: Path) -> None:
    """They are unusual in one sample, and usual in a part of it."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(20_000, 8, generator=g)
    weights = torch.full((len(rows),), 1e-5)
    weights[torch.randperm(len(rows), generator=g)[:38]] = 1.0
    source = saved(rows, tmp_path / "rows.npy")
    errors = []
    for name, one in (("none", None), ("weights", weights)):
        compress_table(source, tmp_path / name, size="10 bits", row_weights=one, quiet=True)
        lost = (all_rows(open_table(tmp_path / name)) - rows).square().sum(1)
        errors.append(float(lost @ weights.double()))
    assert errors[1] < errors[0]


def test_the_longest_rows_are_kept_whatever_the_step(tmp_path: Path) -> None:
    rows = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9) ** -0.5
    rows[7] = rows[8] = 0.0
    rows[7, 0], rows[8, 0] = 557_887.0, -557_887.0
    with pytest.warns(KflatsWarning, match="times as long as the middle row"):
        compress_table(saved(rows, tmp_path / "x.npy"), tmp_path / "out", size="30000B", quiet=True)
    # Half a step of a class that holds up to 2^15 - 1, and begins at a 64th of it.
    assert open_table(tmp_path / "out").rows([7, 8])[:, 0].tolist() == pytest.approx([557_887, -557_887], rel=1e-3)


@pytest.mark.slow
def test_rows_that_count_more_lose_less(tmp_path: Path) -> None:
    """Weights from a file are those in memory; equal ones change no byte of the rows."""
    rows, _ = planted(20_000, 16, 1)
    weights = 1 / (5 + torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).double())
    source, size = saved(rows, tmp_path / "rows.npy"), "180kB"
    given = {"none": None, "equal": torch.full((len(rows),), 7), "file": saved(weights, tmp_path / "w.npy")}
    errors, files = {}, {}
    for name, one in {**given, "array": weights.numpy()}.items():
        out = tmp_path / name
        compress_table(source, out, size=size, row_weights=one, quiet=True)
        lost = (all_rows(open_table(out)) - rows).square().sum(1)
        errors[name] = float((lost * weights).sum()), float(lost.sum())
        files[name] = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".safetensors"}
    assert files["file"] == files["array"]
    assert files["none"] == files["equal"]
    assert errors["file"][0] < 0.8 * errors["none"][0]  # which costs the others
    assert errors["file"][1] > errors["none"][1]


# Reading ----------------------------------------------------------------------------------------


def test_rows_that_are_not_there(table: CodedTable) -> None:
    for ids in ([-1], [N], [0.5], [2**40]):
        with pytest.raises(KflatsError, match=r"are not all in a table of|whole numbers"):
            table.rows(torch.tensor(ids))


def test_ids_without_numbers_of_their_own(table: CodedTable) -> None:
    masked = np.ma.MaskedArray([1, 2, N], mask=[False, False, True])
    with pytest.raises(KflatsError, match="ids with a mask are not supported"):
        table.rows(masked)
    for ids in (torch.ones(2, dtype=torch.int64).to_sparse(), torch.ones(2, dtype=torch.int64, device="meta")):
        for read in (table.rows, table.take):
            with pytest.raises(KflatsError, match="with a layout of their own"):
                read(ids)
    with pytest.raises(KflatsError, match=r"shape \(2, 1\) are not supported by take"):
        table.take(torch.ones(2, 1, dtype=torch.int64))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[3, 1], [0, 3]])
    assert np.array_equal(table.rows(matrix), table.rows(np.asarray(matrix)))
    for path in (None, b"table", 3):
        with pytest.raises(KflatsError, match="by the name of its folder"):
            open_table(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", [4, -1, None])
def test_an_id_that_stands_for_no_token_is_left_out_of_bags(table: CodedTable, padding: int | None) -> None:
    whole = all_rows(table).float()
    ids = torch.tensor([[4, N - 1, 2], [4, 4, 4], [1, 2, 3]])
    for mode in ("sum", "mean", "max"):
        bag = TableEmbeddingBag(table, mode, padding_idx=padding)
        dense = nn.EmbeddingBag.from_pretrained(whole, mode=mode, padding_idx=padding)
        torch.testing.assert_close(bag(ids), dense(ids), rtol=1e-5, atol=1e-5)
        assert bag.padding_idx == dense.padding_idx
    assert (
        TableEmbedding(table, padding).padding_idx
        == nn.Embedding.from_pretrained(whole, padding_idx=padding).padding_idx
    )
    for beyond in (N, -N - 1, 1.5, "3", True):
        with pytest.raises(KflatsError, match=f"padding_idx={beyond!r} is not supported"):
            TableEmbedding(table, beyond)  # type: ignore[arg-type]


def test_layers_are_those_of_the_whole_table(table: CodedTable) -> None:
    whole = all_rows(table).float()
    ids = torch.randint(N, (4, 6), generator=torch.Generator().manual_seed(3))
    weights = torch.rand(24, generator=torch.Generator().manual_seed(4))
    layer = TableEmbedding(table)
    torch.testing.assert_close(layer(ids), nn.Embedding.from_pretrained(whole)(ids), rtol=1e-5, atol=1e-5)
    for mode in ("sum", "mean", "max"):
        bag, dense = TableEmbeddingBag(table, mode), nn.EmbeddingBag.from_pretrained(whole, mode=mode)
        torch.testing.assert_close(bag(ids), dense(ids), rtol=1e-5, atol=1e-5)
        offsets = torch.tensor([0, 5, 5, 20])
        torch.testing.assert_close(bag(ids.flatten(), offsets), dense(ids.flatten(), offsets), rtol=1e-5, atol=1e-5)
    bag, dense = TableEmbeddingBag(table, "sum"), nn.EmbeddingBag.from_pretrained(whole, mode="sum")
    given = ids.flatten(), offsets, weights
    torch.testing.assert_close(bag(*given), dense(*given), rtol=1e-5, atol=1e-5)
    assert list(layer.state_dict()) == []
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(ids), layer(ids), rtol=1e-5, atol=1e-5)
    assert (layer.num_embeddings, layer.embedding_dim) == (N, D)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader_read_it(small: CodedTable, start: str) -> None:
    whole = small.rows(torch.arange(700))  # files are mapped in the parent already
    loader = DataLoader(small, batch_size=64, num_workers=2, multiprocessing_context=start)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(list(loader)), whole, rtol=1e-5, atol=1e-5)


# Damage -----------------------------------------------------------------------------------------


def read_all(folder: Path) -> Tensor:
    table = open_table(folder)
    return table.rows(torch.arange(len(table)))


def damage(folder: Path, g: np.random.Generator) -> str:
    """One file truncated, prolonged or with some bytes changed; its name."""
    path = sorted(one for one in folder.iterdir() if "manifest" not in one.name)[g.integers(3)]
    data = bytearray(path.read_bytes())
    match g.integers(4):
        case 0:
            data = data[: g.integers(len(data))]
        case 1:
            data += bytes(g.integers(1, 9))
        case _:
            at = int(g.integers(len(data)))
            data[at] ^= int(g.integers(1, 256))
    path.write_bytes(data)
    return path.name


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 162), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_damage_is_found(small: CodedTable, seeds: range, tmp_path: Path) -> None:
    """The file is named, or what was changed says nothing: no row is ever another."""
    whole = read_all(small.folder)
    for seed in seeds:
        copy = tmp_path / "copy"
        shutil.copytree(small.folder, copy)
        name = damage(copy, np.random.default_rng(seed))
        said = ""
        try:
            same = torch.equal(read_all(copy), whole)
        except KflatsError as error:
            same, said = False, str(error)
        assert same or name in said, f"{seed}: {said}"
        shutil.rmtree(copy)


@pytest.mark.parametrize("alone", [0, 1])
def test_damage_is_found_where_two_threads_check_one_piece(
    alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins within the checksum of the first, which other threads may run beside."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((20_000, 16), dtype=np.float32))
    compress_table(tmp_path / "rows.npy", tmp_path / "coded", size="8 bits", layout="fast", quiet=True)
    path = tmp_path / "coded" / shard_name(0)
    data = bytearray(path.read_bytes())
    data[-400] ^= 1  # the checksums behind the codes take fewer bytes
    path.write_bytes(bytes(data))
    table, checksum, asked = open_table(tmp_path / "coded"), zlib.crc32, list[int]()

    def doubled(piece: memoryview) -> int:
        if asked:
            table.rows([asked.pop()])
        return checksum(piece)

    monkeypatch.setattr(shards, "zlib", SimpleNamespace(crc32=doubled))
    for first in range(0, 19_000, 200):
        asked[:] = [first] if first >= alone else []
        table.rows([first])
    with pytest.raises(KflatsError, match="damaged"):
        table.rows(torch.arange(19_900, 20_000))


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EMFILE, r"beside all other files.*ulimit -n"), (errno.EACCES, "may not read it")]
)
def test_a_file_that_the_system_does_not_open_is_not_called_damaged(
    code: int, said: str, small: CodedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("kflats.io.mapped.mmap.mmap", refused)
    with pytest.raises(KflatsError, match=said) as caught:
        open_table(small.folder).rows([0])
    assert "damaged" not in str(caught.value)


def test_a_missing_file_is_named(small: CodedTable) -> None:
    inspect = ["inspect", str(small.folder)]
    rows = small.folder / "rows-00000.safetensors"
    data = rows.read_bytes()
    assert CliRunner().invoke(app, inspect).exit_code == 0
    rows.write_bytes(data[:-8])
    assert "is damaged: it has" in " ".join(CliRunner().invoke(app, inspect).output.split())
    rows.unlink()
    assert "is missing" in " ".join(CliRunner().invoke(app, inspect).output.split())
    with pytest.raises(KflatsError, match=r"rows-00000\.safetensors"):
        open_table(small.folder).rows([0])
    with pytest.raises(KflatsError, match="no coded table"):
        open_table(small.folder / "none")


# The command line -------------------------------------------------------------------------------


@pytest.mark.parametrize("fitted", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_line_compresses_a_table(fitted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two flats are asked for; to fit one of a smaller table is quicker."""
    source = saved(drawn(3000, 8), tmp_path / "x.npy")
    given = ["compress", "--table", str(source), "--out", str(tmp_path / "out"), "--size", "90kB", "--layout", "fast"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "3,000 x 8, fast" in done.output
    assert open_table(tmp_path / "out").index.layout == "fast"
    asked = []

    def fit(*arguments: Any, **options: Any) -> Any:
        asked.append((options["flats"], str(options["row_weights"])))
        return compress_table(*arguments, **options | {"flats": min(options["flats"], fitted)})

    monkeypatch.setattr(kflats.tables, "compress_table", fit)
    n, d, size = (10_000, 24, "3 bits") if fitted == 2 else (3000, 8, "40 bits")
    weights = saved(torch.arange(1.0, n + 1), tmp_path / "w.npy")
    source = saved(planted(n, d, 2)[0], tmp_path / "rows.npy")
    given = ["compress", "--table", str(source), "--out", str(tmp_path / "two"), "--size", size]
    given += ["--flats", "2", "--row-weights", str(weights)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert asked == [(2, str(weights))]
    assert open_table(tmp_path / "two").flats == fitted
    said = done.output.splitlines()[-3]
    assert "relative weighted squared error" in said
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "two")])
    assert shown.exit_code == 0
    assert shown.output.strip() == said.replace("weighted ", "") + (", 2 flats" if fitted == 2 else "")
    two, out = str(tmp_path / "two"), ["--out", str(tmp_path / "other")]
    for command, words in (
        (["trim", two, "--keep", "9", *out], "holds a coded table, not a model"),
        (["report", two, *out], "holds a coded table, which has no report"),
        (["compress", "--table", two, "--size", "2 bits", *out], "holds a table that is coded already"),
        (
            ["compress", "--table", str(source), "--size", "2 bits", "--run-as", "int8", *out],
            "cannot be used with --run-as",
        ),
    ):
        said = CliRunner().invoke(app, command)
        assert said.exit_code == 2
        assert words in said.output


def test_inspect_says_what_a_table_is(table: CodedTable) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(table.folder)])
    assert shown.exit_code == 0
    assert shown.output.startswith(f"{N:,} x {D}, {table.index.layout}: ")
    assert shown.output.rstrip().endswith(", 3 flats") == (table.flats == 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "x.npy"], "a table needs a size"),
        (["MODEL", "--table", "x.npy", "--size", "9kB"], "--table cannot be used with MODEL"),
        (["--table", "x.npy", "--keep", "5%", "--flats", "3", "--trim", "9"], "with --keep, --trim"),
        (["--table", "x.npy", "--size", "9kB", "--flats", "search"], "--flats search is not supported with --table"),
        (["MODEL", "--row-weights", "w.npy"], "--row-weights cannot be used with a model"),
        (["MODEL", "--layout", "fast"], "--layout cannot be used with a model"),
        ([], "no model is given"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compress", *arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


# Processes --------------------------------------------------------------------------------------

ANONYMOUS = """
def private():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
"""
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not tell memory apart")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory(layout: str, tmp_path: Path) -> None:
    """Reading takes at most 25 MB of its own, writing a fraction of the table, whatever its rows."""
    source = saved(drawn(1_200_000, 64).to(torch.float16), tmp_path / "x.npy")
    program = f"""
import threading, time, torch
import kflats
from kflats.io import open_rows
torch.set_num_threads(1)
{ANONYMOUS}
warm = torch.randn(64, 64) @ torch.linalg.eigh(torch.randn(64, 64)).eigenvectors
before = most = private()
def watch():
    global most
    while True:
        most = max(most, private())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
kflats.compress_table({str(source)!r}, {str(tmp_path / "out")!r}, size="6 bits", layout={layout!r}, quiet=True)
print(most - before)
"""
    assert int(run(program)) < 400_000  # kB
    program = f"""
import kflats, torch
torch.set_num_threads(1)
{ANONYMOUS}
kflats.open_table
warm = torch.randn(4096, 64) @ torch.randn(64, 64)
del warm
before = private()
table = kflats.open_table({str(tmp_path / "out")!r})
g = torch.Generator().manual_seed(0)
for _ in range(40):
    table.rows(torch.randint(len(table), (4096,), generator=g))
for start in range(0, len(table), 4096):
    table.rows(torch.arange(start, min(start + 4096, len(table))))
print(private() - before)
"""
    assert int(run(program)) < 25_000  # kB; the table has 57,600


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_leaves_nothing_that_opens(layout: str, tmp_path: Path) -> None:
    """At any moment; and in the end there is what a run without interruption makes."""
    source = saved(drawn(150_000, 16), tmp_path / "x.npy")

    def compressing(out: Path, *, force: bool = False) -> str:
        options = f"size='6 bits', layout={layout!r}, shard_rows={_BLOCK}, quiet=True, force={force}"
        return f"import kflats; kflats.compress_table({str(source)!r}, {str(out)!r}, {options})"

    whole, out = tmp_path / "whole", tmp_path / "out"
    began = time.monotonic()
    run(compressing(whole))
    lasted = time.monotonic() - began
    g = np.random.default_rng(0)
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", compressing(out)], stderr=subprocess.DEVNULL)
        time.sleep(lasted * float(g.uniform(0.3, 1.0)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            break  # it was done before
        with pytest.raises(KflatsError, match="no coded table"):
            open_table(out)
    # A run that was killed between its end and the removal of what it kept leaves that to the next one.
    run(compressing(out, force=out.exists()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole", "x.npy"]
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("layout", [pytest.param("compact", marks=pytest.mark.slow), "fast"])
def test_an_interrupted_run_is_taken_up(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are finished and whole are taken over, damaged ones and those of other rows or options are not."""
    source, written = saved(drawn(3 * _BLOCK + 500, 8), tmp_path / "x.npy"), list[str]()
    whole, out = tmp_path / "whole", tmp_path / "out"
    begin = ShardWriter.__init__
    most = 0

    def counting(self: ShardWriter, path: Path) -> None:
        if len(written) == most:
            raise KeyboardInterrupt
        written.append(f"{path.name.split('.')[1]}.safetensors")  # it is .rows-00000.safetensors.PID.tmp
        begin(self, path)

    def compressing(folder: Path, files: int, **options: Any) -> list[str]:
        """The files that are written until the last of so many is begun."""
        nonlocal most
        written.clear()
        most = files
        with suppress(KeyboardInterrupt):
            given = {"size": "6 bits", "layout": layout, "shard_rows": _BLOCK, "quiet": True, "seed": 0, **options}
            compress_table(source, folder, **given)
        return list(written)

    monkeypatch.setattr(ShardWriter, "__init__", counting)
    names = [shard_name(number) for number in range(4)]
    assert compressing(whole, 99) == names
    assert compressing(out, 3) == names[:3]
    assert not out.exists()
    kept = sorted(tmp_path.glob(".out.kflats-partial/*/*.safetensors"))
    assert [path.name for path in kept] == names[:3]
    assert compressing(out, 0) == []  # the three are whole, and the fourth is not begun
    data = bytearray(kept[1].read_bytes())
    data[5000] ^= 1  # among the codes
    kept[1].write_bytes(data)
    kept[2].with_suffix(".json").write_text("{}")
    assert compressing(out, 99) == [names[1], *names[2:]]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole", "x.npy"]
    for options in ({"size": "5 bits"}, {"shard_rows": 2 * _BLOCK}):
        shutil.rmtree(out)
        assert compressing(out, 2) == names[:2]
        others = compressing(out, 99, **options)
        assert others[:2] == names[:2]  # begun anew
    shutil.rmtree(out)
    assert compressing(out, 2) == names[:2]
    rows, times = np.load(source), source.stat()
    np.save(source, rows[[1, 0, *range(2, len(rows))]])  # two change places, size and time stay
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert compressing(out, 99) == names
    if layout == "compact":  # codes that were counted and did not suit are not counted again
        source, size = saved(drawn(20_000, 8), tmp_path / "short.npy"), "20kB"
        tries = len(compressing(tmp_path / "third", 99, size=size, shard_rows=None))
        assert tries > 1
        assert len(compressing(tmp_path / "fourth", tries - 1, size=size, shard_rows=None)) == tries - 1
        assert len(compressing(tmp_path / "fourth", 99, size=size, shard_rows=None)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_changes_between_passes_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = drawn(20_000, 6)
    source = saved(rows, tmp_path / "x.npy")
    first_pass = compress_module.statistics_of

    def then_written(*given: Any) -> Any:
        seen = first_pass(*given)
        table = np.load(source, mmap_mode="r+")
        table[17_000, 3] = np.nan
        return seen

    monkeypatch.setattr(compress_module, "statistics_of", then_written)
    with pytest.raises(KflatsError, match="rows 16384 and on of the table changed while it was read"):
        compress_table(source, tmp_path / "out", size="6 bits", quiet=True, **options_of(kind, len(rows)))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "sizes"),
    [
        (250, 3, (8000, 13_500, 14_500, 15_500, 16_500, 18_500)),
        (20_000, 8, (12_000, 16_000, 20_000, 22_000, 23_000, 40_000)),
    ],
)
def test_a_short_table_has_a_size_or_leaves_nothing(n: int, d: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """An axis, a lane or a distribution more is a large part of its file: what fits in fewer bytes fits in more."""
    source, out = saved(drawn(n, d), tmp_path / "x.npy"), tmp_path / "out"

    def error(nbytes: int) -> float:
        """1 where no code fits."""
        with suppress(KflatsError):
            index = compress_table(source, out, size=f"{nbytes}B", quiet=True)
            assert sum(path.stat().st_size for path in out.iterdir()) <= nbytes
            shutil.rmtree(out)
            return index.relative_error
        assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
        return 1.0

    errors = [error(nbytes) for nbytes in sizes]
    assert errors[0] == 1.0
    assert all(after <= 1.3 * before for before, after in pairwise(errors))
    assert errors[-1] < 0.2 * errors[2] < 0.01


def test_open_rows_names_its_file(tmp_path: Path) -> None:
    assert open_rows(saved(drawn(5, 3), tmp_path / "one.npy")).place(4).endswith("one.npy")


@pytest.mark.slow
def test_a_row_that_sets_the_steps_of_all_is_named(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20_000, 16)).astype(np.float32)
    rows[777] *= 1e8
    np.save(tmp_path / "wild.npy", rows)
    for layout in LAYOUTS:
        with pytest.warns(KflatsWarning, match=r"row 777 of .*wild.npy is .*e\+07 times as long as the middle row"):
            compress_table(tmp_path / "wild.npy", tmp_path / layout, size="8 bits", layout=layout, quiet=True)


@pytest.mark.parametrize(
    ("factor", "kind", "message"),
    [
        (1e18, np.float32, "huge numbers .* in row 0 of"),
        (1e100, np.float64, "huge numbers .* in row 0 of"),
        (1e-30, np.float32, r"(?s)are too small.*Try: the table times 1e\+"),
        (1e-17, np.float32, r"(?s)are too small.*Try: the table times 1e\+"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_whose_squares_do_not_fit_are_refused(
    layout: Layout, factor: float, kind: type, message: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).standard_normal((20_000, 8)) * factor
    np.save(tmp_path / "rows.npy", rows.astype(kind))
    with pytest.raises(KflatsError, match=message):
        compress_table(tmp_path / "rows.npy", tmp_path / "coded", size="8 bits", layout=layout, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
    np.save(tmp_path / "rows.npy", (rows / factor * 1e14).astype(np.float32))
    made = compress_table(tmp_path / "rows.npy", tmp_path / "coded", size="8 bits", layout=layout, quiet=True)
    assert made.relative_error < 0.01


def test_a_table_is_read_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32))
    compress_table(tmp_path / "rows.npy", tmp_path / "coded", size="20kB", layout="fast", shard_rows=2**50, quiet=True)
    monkeypatch.chdir(tmp_path)
    table = open_table("coded")
    monkeypatch.chdir(tmp_path / "coded")
    assert table.rows([3]).shape == (1, 8)
    assert torch.equal(table[torch.tensor(3)], table[3])  # type: ignore[index]
    (tmp_path / "coded" / "rows-00000.safetensors").rename(tmp_path / "moved")
    with pytest.raises(KflatsError, match=r"rows-00000.safetensors is missing"):
        open_table(tmp_path / "coded").rows([3])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "not by 5"),
        (None, "not by None"),
        ([[1], [2, 3]], "not by"),
        ([2**70], "not by"),
        ("12", "not by '12'"),
        (slice(2, 4), r"not by slice\(2, 4"),
        (np.array([2**64 - 1], dtype=np.uint64), "rows 18446744073709551615 to 18446744073709551615 are not all"),
    ],
)
def test_ids_that_are_no_list_of_rows(ids: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32))
    compress_table(tmp_path / "rows.npy", tmp_path / "coded", size="20kB", layout="fast", quiet=True)
    with pytest.raises(KflatsError, match=message):
        open_table(tmp_path / "coded").rows(ids)
    with pytest.raises(KflatsError, match="one row is asked for by a whole number"):
        open_table(tmp_path / "coded")[[1, 2]]  # type: ignore[index]


def test_lanes_are_found_wherever_they_lie_in_a_file() -> None:
    """Of 4 GB and beyond, as its writer notes them."""
    draws = np.random.default_rng(0)
    counts = 2**26 + draws.integers(0, 200, 500)
    counts[draws.integers(0, 500, 20)] += 10_000
    arrays: dict[str, Any] = {}
    writer = CompactWriter(None, SimpleNamespace(finish=arrays.update))  # type: ignore[arg-type]
    writer.counts = [counts[:300], counts[300:]]
    writer.finish()
    lanes = draws.integers(0, 500, 900)
    starts, ends = _places(SimpleNamespace(array=lambda name, kind, least: arrays[name]), lanes)  # type: ignore[arg-type]
    assert np.array_equal(ends, np.cumsum(counts)[lanes])
    assert np.array_equal(starts, ends - counts[lanes])
    assert int(ends.max()) > 2**34


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_beyond_two_to_the_31_are_coded_and_read(layout: Layout, tmp_path: Path) -> None:
    """2.2e9 numbers of a file with holes: rows at both ends are drawn, those between are zeros."""
    rows, width, path, drawn = 68_000_000, 32, tmp_path / "rows.npy", 200_000
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": (rows, width)})
        head = file.tell()
    try:
        os.truncate(path, head + 2 * rows * width)
    except OSError:
        pytest.skip("no files with holes here")
    ends = np.random.default_rng(0).standard_normal((2, drawn, width)).astype(np.float16)
    with path.open("r+b") as file:
        for first, part in ((0, ends[0]), (rows - drawn, ends[1])):
            file.seek(head + 2 * first * width)
            file.write(part.tobytes())
    compress_table(path, tmp_path / "coded", size="2.2 bits", layout=layout, quiet=True)
    table = open_table(tmp_path / "coded")
    assert float(table.rows([rows // 2]).abs().max()) < 0.2
    for first, part in ((0, ends[0]), (rows - drawn, ends[1])):
        index = [first, first + 77, first + drawn - 1]
        found, wanted = table.rows(index).numpy(), part[[0, 77, drawn - 1]].astype(np.float32)
        assert np.square(found - wanted).sum() < 0.5 * np.square(wanted).sum()
