"""Tables in files are read as the tensors that were written, whole, in blocks, and at random places."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from table_files import FORMS, as_npy, as_safetensors, column
from torch import Tensor

from kflats import SVD
from kflats.common.errors import KflatsError
from kflats.io import open_rows, tables
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows, all_rows


def drawn(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_that_were_written(form: str, parts: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tables = [drawn(20 + part, 5, part, dtype) for part in range(parts)]
    whole = torch.cat(tables)
    paths = [FORMS[form](table, tmp_path / f"part-{i}") for i, table in enumerate(tables)]
    for source in (tmp_path, paths):
        rows = open_rows(source, name="" if "npy" in form else "table" if form == "safetensors" else "vector")
        assert (rows.shape, rows.dtype) == ((len(whole), 5), torch.promote_types(dtype, torch.float32))
        assert torch.equal(all_rows(rows), whole.double())
        for size in (1, 6, 1000):
            blocks = list(rows.blocks(size))
            assert torch.equal(torch.cat([block for _, block in blocks]), whole.to(rows.dtype))
            assert all(torch.equal(block, whole[at : at + len(block)].to(rows.dtype)) for at, block in blocks)
            assert [len(block) for _, block in blocks[:-1]] == [size] * (len(whole) // size - (len(whole) % size == 0))
        index = torch.randint(len(whole), (50,), generator=torch.Generator().manual_seed(1))
        assert torch.equal(rows.take(index), whole[index].to(rows.dtype))


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith(("parquet", "arrow"))])
def test_rows_are_read_piece_by_piece(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of three rows, in groups of seven and in one: in order, backwards, and mixed."""
    monkeypatch.setattr(tables, "_PIECE", 3)
    table = drawn(40, 5)
    rows = open_rows(FORMS[form](table, tmp_path / "x"), name="vector")
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for index in (torch.arange(40), torch.arange(39, -1, -1), mixed, torch.tensor([39]), torch.tensor([0, 39, 0])):
        assert torch.equal(rows.take(index), table[index])
    assert [len(piece) for _, piece in rows.parts[0]._pieces_of(0)][:2] == [3, 3]  # type: ignore[attr-defined]


def test_damage_that_is_found_while_rows_are_read_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PIECE", 100)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, whole = tmp_path / "x.parquet", arrow.table({"vector": column(drawn(2000, 8), "fixed")})
    parquet.write_table(whole, path, data_page_size=4096, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    rows = open_rows(path)  # its first rows are whole
    for _ in range(2):  # and goes on doing so: no other rows are given in their place
        with pytest.raises(KflatsError, match=r"x\.parquet cannot be read"):
            rows.take(torch.arange(2000))


def test_bfloat16_is_read(tmp_path: Path) -> None:
    table = drawn(9, 4, dtype=torch.bfloat16)
    assert torch.equal(all_rows(open_rows(as_safetensors(table, tmp_path / "x"))), table.double())


def test_methods_fit_what_lies_in_files(tmp_path: Path) -> None:
    """To the bit what they fit in memory, however the table is cut."""
    table = drawn(60, 8)
    for part in range(3):
        as_npy(table[20 * part : 20 * part + 20], tmp_path / f"{part}")
    made = [SVD().fit(Problem(rows, 4 * 3 * 68, 4)).matrix for rows in (open_rows(tmp_path), TensorRows(table))]
    assert torch.equal(made[0].dense(), made[1].dense())


@pytest.mark.parametrize("cut", [0, 0.5, 0.97])
@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_an_error(form: str, cut: float, tmp_path: Path) -> None:
    path = FORMS[form](drawn(40, 6), tmp_path / "x")
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data))])
    with pytest.raises(KflatsError, match="cannot be read"):
        open_rows(path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: folder / "none.npy", "there is no file"),
    "empty folder": (lambda folder: folder, "holds no table"),
    "no file at all": (lambda folder: [], "holds no table"),
    "another form": (lambda folder: written(folder / "x.csv", b"1,2"), "no known form"),
    "objects": (lambda folder: objects(folder / "x.npy"), "cannot be read"),
    "integers": (lambda folder: numbers(folder / "x.npy", np.int64), "holds int64"),
    "the other byte order": (lambda folder: numbers(folder / "x.npy", ">f4"), "holds >f4"),
    "one axis": (lambda folder: numbers(folder / "x.npy", np.float32, (6,)), r"x\.npy.*non-empty matrix"),
    "no rows": (lambda folder: numbers(folder / "x.npy", np.float32, (0, 3)), r"x\.npy holds no rows"),
    "no rows in any file": (
        lambda folder: [numbers(folder / f"{i}.npy", np.float32, (0, 3)) for i in range(3)] and folder,
        r"0\.npy and the 2 after it hold no rows",
    ),
    "tensors of a model": (
        lambda folder: [save_file({name: drawn(2, 3)}, folder / f"{name}.safetensors") for name in "ab"] and folder,
        r"a\.safetensors holds 'a', and .*b\.safetensors holds 'b', which are not parts of one table",
    ),
    "empty lists": (lambda folder: ragged(folder / "x.parquet", [[], []]), "lists without numbers"),
    "an array": (lambda folder: np.zeros((2, 3)), "ndarray is not supported as a source"),
    "nothing": (lambda folder: None, "NoneType is not supported as a source"),
    "numbers without zeros": (
        lambda folder: [as_npy(drawn(2, 3), folder / f"part-{i}") for i in (1, 2, 10)] and folder,
        r"part-10\.npy comes before part-2\.npy .*2 digits, such as 02",
    ),
    "two kinds": (
        lambda folder: [as_npy(drawn(2, 3), folder / "x"), as_safetensors(drawn(2, 3), folder / "x")],
        "several kinds",
    ),
    "two widths": (lambda folder: [as_npy(drawn(2, 3), folder / "x"), as_npy(drawn(2, 4), folder / "y")], "4 columns"),
    "two tensors": (lambda folder: two_tensors(folder / "x.safetensors"), "more than one tensor: a, b"),
    "ragged lists": (lambda folder: ragged(folder / "x.parquet", [[1.0, 2.0], [3.0]]), "several lengths"),
    "missing values": (lambda folder: ragged(folder / "x.parquet", [[1.0, None], [3.0, 4.0]]), "missing values"),
    "no rows in Parquet": (lambda folder: ragged(folder / "x.parquet", []), "holds no rows"),
}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def objects(path: Path) -> Path:
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)
    return path


def numbers(path: Path, dtype: object, shape: tuple[int, ...] = (2, 3)) -> Path:
    np.save(path, np.zeros(shape, dtype=dtype))
    return path


def two_tensors(path: Path) -> Path:
    save_file({"a": drawn(2, 3), "b": drawn(2, 3, 1)}, path)
    return path


def ragged(path: Path, lists: list[list[float | None]], *, plain: bool = False) -> Path:
    """``plain``: without a type, as a program writes a column that it knows nothing of."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    kind = arrow.null() if plain else arrow.list_(arrow.float32())
    parquet.write_table(arrow.table({"vector": arrow.array(lists, type=kind)}), path)
    return path


def test_a_stream_that_was_cut_between_its_parts_is_refused(tmp_path: Path) -> None:
    """Which reads like a whole one with fewer rows."""
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    path, whole = tmp_path / "x.arrow", arrow.table({"vector": column(drawn(90, 6), "fixed")})
    with ipc.new_stream(path, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=30)
    assert open_rows(path).shape == (90, 6)
    data = path.read_bytes()
    older = tmp_path / "older.arrow"
    with ipc.new_stream(older, whole.schema, options=ipc.IpcWriteOptions(use_legacy_format=True)) as writer:
        writer.write_table(whole)
    assert open_rows(older).shape == (90, 6)
    source = arrow.BufferReader(data)
    messages = ipc.MessageReader.open_stream(source)
    for _ in range(3):  # the schema and two batches
        messages.read_next_message()
    path.write_bytes(data[: source.tell()])
    with ipc.open_stream(path) as cut:
        assert cut.read_all().num_rows == 60
    with pytest.raises(KflatsError, match=r"x\.arrow ends without the mark of its end"):
        open_rows(path)


@pytest.mark.parametrize("form", FORMS)
def test_files_without_rows_are_left_out(form: str, tmp_path: Path) -> None:
    """As programs write them that divide few rows among many files."""
    for part, count in enumerate((0, 3, 0, 2)):
        FORMS[form](drawn(5, 6)[:count], tmp_path / f"part-{part}")
    last = sorted(tmp_path.iterdir())[3]
    empty_parts(tmp_path, last.suffix)
    rows = open_rows(tmp_path)
    assert torch.equal(rows.take(torch.arange(3)).double(), drawn(5, 6)[:3].double())
    assert (rows.shape, rows.place(4)) == ((5, 6), f"row 1 of {last}")


def test_a_file_that_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    first, second = as_npy(drawn(3, 6), tmp_path / "a"), as_npy(drawn(2, 6, 1), tmp_path / "b")
    rows = open_rows([first, second, first])
    assert torch.equal(all_rows(rows), torch.cat([drawn(3, 6), drawn(2, 6, 1), drawn(3, 6)]).double())


def empty_parts(folder: Path, suffix: str) -> None:
    """Parts whose emptiness has hidden what they would hold."""
    if suffix == ".npy":
        np.save(folder / "part-4.npy", np.array([], dtype=np.float32))
    elif suffix == ".safetensors":
        save_file({"another": torch.zeros(0, 6)}, folder / "part-4.safetensors")
    elif suffix == ".parquet":
        ragged(folder / "part-4.parquet", [], plain=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_table_is_refused(kind: str, tmp_path: Path) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(KflatsError, match=said):
        open_rows(make(tmp_path))


@pytest.mark.parametrize(
    "names", [("table", "table1"), ("12bc", "3f2a"), ("data-old", "data1"), ("2024-9-30", "2025-1-1"), ("a01c", "a1b")]
)
def test_names_of_another_kind_have_their_own_order(names: tuple[str, str], tmp_path: Path) -> None:
    for row, name in enumerate(names):
        np.save(tmp_path / f"{name}.npy", np.full((1, 3), row, dtype=np.float32))
    assert open_rows(tmp_path).take(torch.tensor([0, 1]))[:, 0].tolist() == [0, 1]


def test_hidden_files_are_no_part_of_a_table(tmp_path: Path) -> None:
    as_npy(drawn(2, 3), tmp_path / "x")
    as_npy(drawn(2, 3), tmp_path / ".y")
    assert open_rows(tmp_path).shape == (2, 3)


def test_the_index_of_a_model_says_which_file_holds_a_tensor(tmp_path: Path) -> None:
    for name in ("words", "other"):
        save_file({name: drawn(4, 3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(KflatsError, match=r"called 'words'.*one of: other"):
        open_rows(tmp_path, name="words")
    weight_map = {"words": "words.safetensors", "other": "other.safetensors", "outside": "../x.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert torch.equal(all_rows(open_rows(tmp_path, name="words")), drawn(4, 3).double())
    with pytest.raises(KflatsError, match="called 'outside'"):
        open_rows(tmp_path, name="outside")
    for part in (2, 10):  # which says nothing of rows, where the index names one file
        save_file({f"x{part}": drawn(4, 3)}, tmp_path / f"model-{part}.safetensors")
    assert open_rows(tmp_path, name="words").shape == (4, 3)
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(KflatsError, match=r"index\.json cannot be read"):
        open_rows(tmp_path, name="words")


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_file_of_more_bytes_than_the_memory_is_opened(kind: str, tmp_path: Path) -> None:
    """A billion rows in one file, of which the disk holds the head alone; places lie beyond 2^31 and 2^32."""
    rows, width, path = 1_000_000_000, 64, tmp_path / f"table.{kind}"
    if kind == "npy":
        with path.open("wb") as file:
            head = {"descr": "<f2", "fortran_order": False, "shape": (rows, width)}
            np.lib.format.write_array_header_1_0(file, head)
    else:
        entry = {"dtype": "F16", "shape": [rows, width], "data_offsets": [0, 2 * rows * width]}
        head_bytes = json.dumps({"table": entry}).encode()
        path.write_bytes(len(head_bytes).to_bytes(8, "little") + head_bytes)
    size = path.stat().st_size + 2 * rows * width
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("no files with holes here")
    with path.open("r+b") as file:
        for row in (2**26, rows - 1):  # their numbers begin at 2^32 and near 2^36
            file.seek(size - 2 * width * (rows - row))
            file.write(np.full(width, row % 1000, dtype=np.float16).tobytes())
    found = open_rows(path)
    assert found.shape == (rows, width)
    taken = found.take(torch.tensor([rows - 1, 5, 2**26]))
    assert taken[:, 0].tolist() == [(rows - 1) % 1000, 0, 2**26 % 1000]


def test_too_many_open_files_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    path = as_npy(drawn(2, 3), tmp_path / "x")
    monkeypatch.setattr(np.lib.format, "open_memmap", opened)
    with pytest.raises(KflatsError, match=r"no more open files.*ulimit"):
        open_rows(path)


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    as_npy(drawn(2, 3), tmp_path / "x")
    assert open_rows("~/x.npy").shape == open_rows(["~/x.npy"]).shape == (2, 3)


def test_a_name_is_refused_where_there_are_none(tmp_path: Path) -> None:
    as_npy(drawn(2, 3), tmp_path / "x")
    with pytest.raises(KflatsError, match="has no tensor called 'words'"):
        open_rows(tmp_path, name="words")


def test_the_place_of_a_row_names_its_file(tmp_path: Path) -> None:
    for part in range(3):
        as_npy(drawn(4, 2), tmp_path / f"rows-{part}")
    rows = open_rows(tmp_path)
    assert [rows.place(row).removesuffix(".npy").rsplit(" ", 1)[0] for row in (0, 3, 4, 11)] == [
        "row 0 of",
        "row 3 of",
        "row 0 of",
        "row 3 of",
    ]
    assert rows.place(4).endswith("rows-1.npy")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not tell memory apart")
@pytest.mark.parametrize("form", ["npy", "safetensors", "arrow"])
def test_mapped_files_take_no_memory_of_their_own(form: str, tmp_path: Path) -> None:
    path = FORMS[form](drawn(200_000, 64), tmp_path / "x")
    program = f"""
import torch
from kflats.io import open_rows, tables
def private():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])
rows = open_rows({str(path)!r})
rows.take(torch.arange(3))
before = private()
total = sum(float(block.sum()) for _, block in rows.blocks(1024))
print(private() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000  # kB; the file has 51,200
