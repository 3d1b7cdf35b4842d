"""Entropy-coded streams return every bit of what went in, or say that they are damaged."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.codecs import streams
from kflats.codecs.streamed import StreamedMatrix
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedGeometry, from_integers
from kflats.matrices.registry import CodedMatrix
from kflats.numerics.coding.packing import PackedLayout, pack, unpack
from kflats.numerics.coding.trellis import subsets_of

pytest.importorskip("constriction")


def laplace(n: int, scales: Tensor, gen: torch.Generator) -> Tensor:
    uniform = torch.rand(n, len(scales), generator=gen) - 0.5
    return (-uniform.sign() * (1 - 2 * uniform.abs()).log() * scales).round().clamp(-3000, 3000).to(torch.int16)


def transform(sizes: tuple[int, ...] = (300, 0, 50, 150), r: int = 12, d: int = 16, scale: float = 3.0) -> CodedMatrix:
    gen = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(sum(sizes), generator=gen)]
    spread = scale * 0.6 ** torch.arange(r)
    return from_integers(
        [laplace(n, spread / (c + 1), gen) for c, n in enumerate(sizes)],
        labels,
        torch.rand(len(sizes), generator=gen),
        centers=torch.randint(-2, 3, (len(sizes), r), generator=gen).to(torch.int16),
        contexts=(torch.arange(r) // 2).expand(len(sizes), r).contiguous().to(torch.uint8),
        shrink=torch.rand(r // 2, generator=gen) / 2,
        basis=torch.randint(-127, 128, (r, d), generator=gen).to(torch.int8),
        basis_scale=torch.rand(r, generator=gen),
    )


def flats() -> CodedMatrix:
    """Three flats of ranks 5, 0 and 8; the last has two classes."""
    gen = torch.Generator().manual_seed(0)
    ranks, sizes, spread = (5, 0, 8, 8), (120, 40, 90, 0), 3.0 * 0.6 ** torch.arange(8)
    parts = [F.pad(laplace(n, spread[:r], gen), (0, 8 - r)) for n, r in zip(sizes, ranks, strict=True)]
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))[torch.randperm(250, generator=gen)]
    return from_integers(
        parts,
        labels,
        torch.rand(4, generator=gen),
        contexts=(torch.arange(8) // 2).expand(4, 8).contiguous().to(torch.uint8),
        shrink=torch.rand(4, generator=gen) / 2,
        basis=torch.randint(-127, 128, (13, 16), generator=gen).to(torch.int8),
        basis_scale=torch.rand(13, generator=gen),
        flats=((1, 5), (1, 0), (2, 8)),
    )


def int8() -> CodedMatrix:
    gen = torch.Generator().manual_seed(0)
    return from_integers([laplace(70, torch.full((8,), 20.0), gen)], None, torch.rand(70), scales="row")


def stepped() -> CodedMatrix:
    """Three classes of rows, and a step for each column."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    return from_integers(
        [laplace(30, torch.linspace(8.0, 0.1, 24) / (c + 1), gen) for c in range(3)],
        labels,
        torch.rand(3, generator=gen),
        contexts=(torch.arange(24) // 6).expand(3, 24).contiguous().to(torch.uint8),
        shrink=torch.rand(4, generator=gen) / 2,
        column_steps=torch.randint(-127, 128, (24,), generator=gen).to(torch.int8),
    )


def paths() -> CodedMatrix:
    """Integers that follow paths, of two classes of rows."""
    gen = torch.Generator().manual_seed(0)
    subsets = subsets_of(torch.randint(0, 2, (90, 40), generator=gen, dtype=torch.uint8)).to(torch.int16)
    levels = 4 * laplace(90, torch.linspace(6.0, 2.0, 40), gen) + subsets
    labels = torch.arange(90) % 3 // 2
    return from_integers(
        [levels[labels == c] for c in range(2)],
        labels,
        torch.rand(2, generator=gen),
        contexts=(torch.arange(40) // 10).expand(2, 40).contiguous().to(torch.uint8),
        shrink=torch.rand(4, generator=gen) / 2,
        column_steps=torch.randint(-127, 128, (40,), generator=gen).to(torch.int8),
    )


def paths_and_zeros() -> CodedMatrix:
    """The same among columns of zeros, and rows of zeros, which are a class."""
    inside, rows, columns = paths(), torch.arange(130) % 13 < 9, torch.arange(56) % 7 < 5
    levels, labels = torch.zeros(130, 56, dtype=torch.int16), torch.full((130,), 2)
    labels[rows] = inside.get_buffer("labels").long()
    for c in range(2):
        layout = PackedLayout(inside.get_buffer("bits")[c], inside.get_buffer("low")[c])
        at = (labels == c).nonzero(), columns.nonzero().T
        levels[at] = unpack(inside.geometry.part(inside.get_buffer("codes"), c), layout)
    contexts = torch.full((3, 56), 4, dtype=torch.uint8)
    contexts[:2, columns] = inside.get_buffer("contexts")
    return from_integers(
        [levels[labels == c] for c in range(3)],
        labels,
        torch.ones(3),
        contexts=contexts,
        shrink=torch.zeros(5),
        column_steps=torch.zeros(56, dtype=torch.int8),
    )


MATRICES = {
    "transform": transform,
    "one class": lambda: transform((500,)),
    "tiny": lambda: transform((1, 2)),
    "wide": lambda: transform(scale=400.0),
    "zeros": lambda: transform(scale=0.0),
    "flats": flats,
    "int8": int8,
    "column steps": stepped,
    "paths": paths,
    "paths and zeros": paths_and_zeros,
    "one row": lambda: transform((1,)),
}


@pytest.mark.parametrize("block", [2**18, 100, 1])
@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_every_integer_returns(make, block, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", block)
    matrix = make()
    if block == 1 and matrix.shape[0] > 200:
        pytest.skip("hundreds of blocks of one row")
    stream = streams.encode(matrix)
    assert (stream.dtype, stream.ndim) == (torch.uint8, 1)
    found = streams.decode(stream, matrix.geometry)
    integers = {name: t for name, t in matrix.tensors().items() if not t.is_floating_point()}
    assert found.keys() == integers.keys()
    for name, value in integers.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert torch.equal(streams.encode(matrix), stream)


@pytest.mark.parametrize("block", [2**18, 100])
@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_rows_are_read_without_the_others(make, block, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", block)
    matrix, draw = make(), torch.Generator().manual_seed(0)
    stream, geometry = streams.encode(matrix), matrix.geometry
    levels = torch.empty(geometry.shape[0], geometry.rank, dtype=torch.int16)
    labels = matrix.tensors().get("labels", torch.zeros(geometry.shape[0], dtype=torch.uint8))
    for c in range(len(geometry.classes)):
        layout = PackedLayout(matrix.get_buffer("bits")[c], matrix.get_buffer("low")[c])
        levels[labels == c] = unpack(geometry.part(matrix.get_buffer("codes"), c), layout)
    for rows in (torch.randperm(len(levels), generator=draw), torch.zeros(3, dtype=torch.int64), torch.empty(0).long()):
        assert torch.equal(streams.decode_rows(stream, geometry, rows), levels[rows])
    for rows in ([-1], [0, len(levels)]):
        with pytest.raises(KflatsError, match="not all in a table"):
            streams.decode_rows(stream, geometry, torch.tensor(rows))


def test_a_damaged_block_is_an_error_for_its_rows_only(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 100)
    matrix = transform((500,))
    stream = streams.encode(matrix)
    stream[-1] ^= 1
    assert streams.decode_rows(stream, matrix.geometry, torch.arange(492)).shape == (492, 12)
    with pytest.raises(KflatsError, match="rows 496 to 500 of class 0"):
        streams.decode_rows(stream, matrix.geometry, torch.tensor([0, 499]))


def test_a_stream_is_about_as_long_as_its_entropy():
    gen = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.05, 4.0, 32)
    integers = laplace(8000, spread, gen)
    contexts = torch.arange(32, dtype=torch.uint8).unsqueeze(0)
    matrix = from_integers([integers], None, torch.ones(1), contexts=contexts, shrink=torch.zeros(32))
    ideal = 0.0
    for column in integers.T:
        _, counts = column.unique(return_counts=True)
        ideal -= float((counts * (counts / counts.sum()).log2()).sum()) / 8
    assert ideal <= len(streams.encode(matrix)) <= 1.01 * ideal + 1000
    assert len(streams.encode(matrix)) < 0.75 * matrix.get_buffer("codes").numel()


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_rows_that_are_decoded_late_are_those_of_the_matrix(make, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 100)
    matrix = make()
    empty = {name: torch.empty_like(value, device="meta") for name, value in matrix.tensors().items()}
    late, stream = StreamedMatrix(matrix.geometry, empty | matrix.floats()), streams.encode(matrix)
    streams.expect_(late, len(stream))
    late.register_buffer("codes", stream)
    late.open_(matrix.checksum())
    # Blocks of paths need free bits of all rows.
    assert (late._blocks is None) == (make in (paths, paths_and_zeros))
    for index in torch.randint(matrix.shape[0], (4, 3), generator=torch.Generator().manual_seed(0)):
        assert torch.equal(late.rows(index), matrix.rows(index))
    assert late.checksum() == matrix.checksum()
    assert all(torch.equal(late.tensors()[name], value) for name, value in matrix.tensors().items())


def test_integers_that_follow_paths_are_noticed_and_take_less():
    """Every column has a quarter of all integers to choose from: a bit less than without paths."""
    matrix = paths()
    assert [int(streams.encode(make())[13]) for make in (paths, stepped)] == [streams.PATHS, streams.STATIC]
    tensors = {name: t.detach().clone() for name, t in matrix.tensors().items()}
    layout = PackedLayout(tensors["bits"][0], tensors["low"][0])
    first = unpack(matrix.geometry.part(tensors["codes"], 0), layout)
    first[0, 0] += 1 if first[0, 0] < 3 else -1
    matrix.geometry.part(tensors["codes"], 0)[:] = pack(first, layout)
    other = CodedMatrix(matrix.geometry, tensors)
    assert int(streams.encode(other)[13]) == streams.STATIC
    assert len(streams.encode(matrix)) < len(streams.encode(other)) - 0.7 * 90 * 40 / 8


def test_rows_and_columns_of_zeros_are_on_no_path():
    """They take next to no bytes: a column a few bits, a row what its class takes."""
    inside, among = streams.encode(paths()), streams.encode(paths_and_zeros())
    assert [int(stream[13]) for stream in (inside, among)] == [streams.PATHS] * 2
    assert len(among) - len(inside) < 130


def test_a_model_s_memory_is_filled_in_place():
    matrix = transform()
    other = CodedMatrix(matrix.geometry, {name: t.detach().clone() for name, t in matrix.tensors().items()})
    stream = streams.encode(matrix)
    streams.expect_(other, len(stream))
    assert other.tensors().keys() == {"weight", "codes", "shrink", "basis_scale"}
    with pytest.raises(KflatsError, match="before its tensors are filled"):
        other.rows(torch.tensor([0]))
    other.get_buffer("codes").copy_(stream)
    streams.expand_(other)
    assert torch.equal(other.dense(), matrix.dense())
    assert other.state_dict().keys() == matrix.state_dict().keys()


def read(data: bytes, geometry: CodedGeometry) -> dict[str, Tensor] | None:
    try:
        return streams.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), geometry)
    except KflatsError:
        return None


@pytest.mark.parametrize("name", ["transform", "flats", "int8", "tiny", "column steps", "paths", "paths and zeros"])
def test_damage_is_noticed_wherever_it_is(name, monkeypatch):
    """Bits flipped, bytes lost, put in, swapped or cut off: a clear error or the right integers, nothing else."""
    monkeypatch.setattr(streams, "BLOCK", 500)
    matrix = MATRICES[name]()
    data, draw = bytes(streams.encode(matrix).tolist()), random.Random(1)
    right = {key: t for key, t in matrix.tensors().items() if not t.is_floating_point()}
    refused = 0
    for trial in range(150):
        bad = bytearray(data)
        at = draw.randrange(len(bad))
        kind = trial % 5
        if kind == 0:
            bad[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del bad[at:]
        elif kind == 2:
            del bad[at : at + draw.randint(1, 9)]
        elif kind == 3:
            bad[at:at] = draw.randbytes(draw.randint(1, 9))
        else:
            size = draw.randint(1, 64)
            bad[at : at + size] = draw.randbytes(len(bad[at : at + size]))
        found = read(bytes(bad), matrix.geometry)
        refused += found is None
        if found is not None:
            assert all(torch.equal(found[key], value) for key, value in right.items())
    assert refused >= 145  # random bytes are sometimes those that were there


def test_other_streams_are_refused():
    matrix = transform()
    data = bytes(streams.encode(matrix).tolist())
    for bad, message in [
        (b"", "too early"),
        (b"\x00" * 50, "no kflats codes"),
        (data[:12] + bytes([9]) + data[13:], "version 9"),
        (data[:13] + bytes([7]) + data[14:], "context model 7"),
        (data[:14] + bytes(4) + data[18:], "blocks of 0 integers"),
        (data[:14] + b"\xff" * 4 + data[18:], "blocks of 4294967295 integers"),
        (data[:18] + b"\xff" * 8 + data[26:], "too early"),
        (data + b"\x00", "followed by"),
    ]:
        with pytest.raises(KflatsError, match=message):
            streams.decode(
                torch.frombuffer(bytearray(bad), dtype=torch.uint8) if bad else torch.empty(0).byte(), matrix.geometry
            )
    for other in (transform((300, 0, 51, 149)), transform((500,)), transform(r=10), int8(), transform(scale=9.0)):
        with pytest.raises(KflatsError):
            streams.decode(streams.encode(matrix), other.geometry)


@pytest.mark.slow
def test_without_the_library_the_error_says_what_to_install():
    program = """
import sys
sys.modules["constriction"] = None
import torch
from kflats.matrices.coded import from_integers
from kflats.codecs.streams import encode
try:
    encode(from_integers([torch.ones(3, 2)], None, torch.ones(1)))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "KflatsError" in done.stdout, done.stderr
    assert "kflats[codes]" in done.stdout


def test_axes_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = transform()
    whole = streams.encode(matrix)
    tensors = streams.decode(whole, matrix.geometry)
    monkeypatch.setattr(streams, "_PIECE", 11)
    assert torch.equal(streams.encode(matrix), whole)
    pieces = streams.decode(whole, matrix.geometry)
    assert pieces.keys() == tensors.keys()
    assert all(torch.equal(pieces[name], tensor) for name, tensor in tensors.items())
