"""Rivals: what each stores is counted, what comes back is what was stored, and none is made worse than it is."""

from __future__ import annotations

import builtins
from functools import cache

import pytest
import torch

from kflats.errors import KflatsError
from kflats.frontier.rivals.codebooks import OPQ, PQ, Residual
from kflats.frontier.rivals.coded import Coded, halved, unit_of
from kflats.frontier.rivals.factored import METHODS, Factors
from kflats.frontier.rivals.rounding import Absmax, Half, Rotated, TorchAO
from kflats.frontier.rivals.sweeps import FAMILIES, sweep
from kflats.frontier.rivals.transformed import Transformed

N, D = 700, 32

# A rival, what it needs, and its bytes written out by hand: codes, then what lies beside them.
TABLE = {
    "fp16": (Half(), None, N * D * 2),
    "int8 rows": (Absmax(8), None, N * D + N * 2 + 4),
    "int4 rows": (Absmax(4), None, N * D // 2 + N * 2 + 4),
    "int4 groups": (Absmax(4, 8), None, N * D // 2 + N * 4 * 2 + 4),
    # two rounds of a sign and a place of 16 bits a column; 4 values of float32; a scale a row
    "rotation": (Rotated(2), None, N * D // 4 + N * 2 + 4 * 4 + 2 * D * 17 // 8 + 4),
    "torchao int8": (TorchAO(8), "torchao", N * D + N * 2 + 4),
    "torchao int4": (TorchAO(4, 16), "torchao", N * D // 2 + N * 2 * 2 + 4),
    "torchao int3": (TorchAO(3, 16), "torchao", N * D * 3 // 8 + N * 2 * 2 + 4),
    "pq": (PQ(8, 6), "faiss", N * 8 * 6 // 8 + 64 * D * 2 + 4),
    "pq of 4 bits": (PQ(16, 4), "faiss", N * 16 * 4 // 8 + 16 * D * 2 + 4),
    "opq": (OPQ(8, 6, rounds=5), "faiss", N * 8 * 6 // 8 + 64 * D * 2 + D * D * 2 + 4),
    "opq of half": (OPQ(4, 6, 16, rounds=5), "faiss", N * 4 * 6 // 8 + 64 * 16 * 2 + 16 * D * 2 + 4),
    "rq": (Residual(3, 5), "faiss", -(-N * 3 * 5 // 8) + 3 * 32 * D * 2 + 4),
    "svd": (Factors("SVD", 6.0), None, 2 * 11 * (N + D)),
    "robust svd": (Factors("Robust SVD", 6.0), None, 2 * 11 * (N + D)),
    # the labels of five flats take a byte a row
    "messi": (Factors("MESSI", 6.0), None, N + 2 * 9 * (N + 5 * D)),
    "k-means svd": (Factors("k-means + SVD", 6.0), None, N + 2 * 9 * (N + 5 * D)),
    "flats": (Factors("kflats Flats", 6.0), None, None),
    "transform": (Transformed(3.0), "constriction", None),
}
CASES = [pytest.param(*case, id=name) for name, case in TABLE.items()]
WEIGHING = [pytest.param(*case[:2], id=name) for name, case in TABLE.items() if case[0].weighs]


def cloud(n: int = N, d: int = D, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=gen)).Q
    return torch.randn(n, d, generator=gen) * torch.logspace(0, -1, d) @ turn * 0.05


def code(rival, needs, table, **given):
    if needs is not None:
        pytest.importorskip(needs)
    return rival.code(table, **given)


@cache
def plain(rival, needs):
    """Of the table as it is: what most laws ask."""
    return code(rival, needs, cloud())


@pytest.mark.parametrize(("rival", "needs", "nbytes"), CASES)
def test_what_is_stored_is_counted(rival, needs, nbytes):
    table, found = cloud(), plain(rival, needs)
    assert found.table.shape == (N, D)
    assert found.table.dtype == torch.float32
    assert bool(torch.isfinite(found.table).all())
    if nbytes is not None:
        assert abs(found.nbytes - nbytes) <= 1  # a last byte that is not full
    else:
        assert 0 < found.nbytes <= rival.bits * N * D / 8
    assert found.name == rival.name
    assert found.bits == 8 * found.nbytes / (N * D)
    assert 0 < found.error(table) < 0.35


@pytest.mark.parametrize(("rival", "needs", "nbytes"), CASES)
def test_equal_seeds_give_equal_codes(rival, needs, nbytes):
    table = cloud()
    first, second = plain(rival, needs), code(rival, needs, table, seed=0)
    assert torch.equal(table, cloud())  # and leave the table alone
    assert torch.equal(first.table, second.table)
    assert first.nbytes == second.nbytes


@pytest.mark.parametrize(("rival", "needs", "nbytes"), CASES)
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**8])
def test_a_table_in_another_unit_is_coded_alike(rival, needs, nbytes, scale):
    found, same = plain(rival, needs), code(rival, needs, cloud() * scale)
    # float16 has its own smallest numbers; everything else works in units of the table.
    assert torch.allclose(same.table, found.table * scale, rtol=1e-3, atol=2e-4 * scale)
    assert abs(same.nbytes - found.nbytes) <= 0.002 * found.nbytes


@pytest.mark.parametrize(("rival", "needs"), WEIGHING)
def test_weights_lower_the_weighted_error(rival, needs):
    table, weights = cloud(), torch.logspace(0, 4, N)
    weighted = code(rival, needs, table, weights=weights).error(table, weights)
    alike = plain(rival, needs).error(table, weights)
    assert weighted < alike * (0.97 if "SVD" not in rival.name else 1.0)


@pytest.mark.parametrize(("rival", "needs", "nbytes"), CASES)
def test_what_cannot_be_coded_is_refused(rival, needs, nbytes):
    holed = cloud()
    holed[3, 4] = float("nan")
    with pytest.raises(KflatsError, match="NaN or infinite"):
        code(rival, needs, holed)
    with pytest.raises(KflatsError, match="codes a matrix"):
        code(rival, needs, torch.zeros(3))
    if not rival.weighs:
        with pytest.raises(KflatsError, match="cannot weigh rows"):
            code(rival, needs, cloud(), weights=torch.ones(N))
    else:
        with pytest.raises(KflatsError, match="weight"):
            code(rival, needs, cloud(), weights=-torch.ones(N))


def test_a_table_of_zeros_comes_back():
    for rival in (Half(), Absmax(8), Absmax(4, 8), Rotated(2)):
        assert not rival.code(torch.zeros(60, 8)).table.any()
    pytest.importorskip("faiss")
    assert not PQ(4, 4).code(torch.zeros(60, 8)).table.any()


def test_codebooks_are_as_small_as_they_say():
    """Every group of columns has at most 2^bits different vectors, and they are numbers of float16."""
    pytest.importorskip("faiss")
    table = cloud()
    for rival, parts in ((PQ(8, 4), 8), (PQ(4, 6), 4)):
        found = rival.code(table).table
        for part in found.split(D // parts, dim=1):
            assert len(part.unique(dim=0)) <= 2**rival.bits
        scaled = found / unit_of(table)
        assert torch.equal(scaled, halved(scaled))
    turned = OPQ(8, 4, rounds=3).code(table).table
    assert torch.linalg.matrix_rank(turned) == D
    assert torch.linalg.matrix_rank(OPQ(4, 4, 8, rounds=3).code(table).table) == 8
    assert len(Residual(1, 4).code(table).table.unique(dim=0)) <= 16


def test_each_row_has_its_nearest_centroid():
    pytest.importorskip("faiss")
    table = cloud()
    found = PQ(8, 4).code(table).table
    for mine, part in zip(table.split(4, dim=1), found.split(4, dim=1), strict=True):
        centroids = part.unique(dim=0)
        least = torch.cdist(mine, centroids).amin(1)
        assert torch.allclose((mine - part).norm(dim=1), least, atol=1e-6)


def test_weighted_codebooks_are_weighted_means():
    """At the end of k-means each centroid is the weighted mean of its rows, or moves there by little."""
    pytest.importorskip("faiss")
    table, weights = cloud(4000, 2), torch.rand(4000, generator=torch.Generator().manual_seed(1)) * 9 + 1
    found = PQ(1, 3).code(table, weights=weights).table
    for centroid in found.unique(dim=0):
        mine = (found == centroid).all(1)
        mean = (table[mine] * weights[mine, None]).sum(0) / weights[mine].sum()
        assert (mean - centroid).norm() < 0.05 * table.norm(dim=1).mean()


def test_more_bytes_lose_less():
    pytest.importorskip("faiss")
    table = cloud()
    ladders = [
        [Rotated(bits) for bits in (1, 2, 4)],
        [PQ(4, 4), PQ(8, 4), PQ(16, 4)],
        [OPQ(m, 4, rounds=5) for m in (4, 8, 16)],
        [Residual(m, 4) for m in (1, 2, 4)],
        *[[Factors(name, bits) for bits in (3, 6, 9)] for name in METHODS],
        [Absmax(4), Absmax(4, 8), Absmax(8), Half()],
    ]
    for ladder in ladders:
        coded = [rival.code(table) for rival in ladder]
        assert [c.nbytes for c in coded] == sorted(c.nbytes for c in coded)
        errors = [c.error(table) for c in coded]
        assert errors == sorted(errors, reverse=True), [rival.name for rival in ladder]


def test_a_rotation_that_suits_codebooks_helps():
    pytest.importorskip("faiss")
    table = cloud()
    assert OPQ(8, 4, rounds=10).code(table).error(table) < 0.9 * PQ(8, 4).code(table).error(table)


def test_ours_is_measured_as_the_file_it_makes():
    pytest.importorskip("constriction")
    table = cloud(3000, 16)
    found = Transformed(2.0).code(table)
    assert 0.97 * 2.0 < found.bits <= 2.0
    assert found.error(table) < PQ(4, 6).code(table).error(table)


def test_the_error_is_the_definition():
    table, other = cloud(50, 4), cloud(50, 4, seed=1)
    weights = torch.rand(50, generator=torch.Generator().manual_seed(2))
    lost = sum(float(w * ((a - b) ** 2).sum()) for w, a, b in zip(weights, table, other, strict=True))
    whole = sum(float(w * (a**2).sum()) for w, a in zip(weights, table, strict=True))
    assert Coded("x", other, 1).error(table, weights) == pytest.approx(lost / whole)
    assert Coded("x", other, 1).error(table) == pytest.approx(
        float((table - other).square().sum() / table.square().sum())
    )


@pytest.mark.parametrize(("rival", "package"), [(PQ(4, 4), "faiss"), (TorchAO(8), "torchao")])
def test_a_missing_package_is_named(rival, package, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KflatsError, match=rf"needs {package}\b.*kflats\[rivals\]"):
        rival.code(cloud())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PQ(5, 4).code(cloud()), "5 parts do not divide 32 columns"),
        (lambda: PQ(4, 10).code(cloud()), "1024 centroids for 700 rows"),
        (lambda: PQ(0), "not possible"),
        (lambda: PQ(4, 17), "not possible"),
        (lambda: OPQ(4, 4, 33).code(cloud()), "a rotation to 33 of 32 columns"),
        (lambda: Residual(2, 10).code(cloud()), "1024 centroids for 700 rows"),
        (lambda: TorchAO(9), "no integers of 9 bits"),
        (lambda: TorchAO(4, 5).code(cloud()), "groups of 5 do not divide"),
        (lambda: Absmax(5).code(cloud()), "rounding to 5 bits"),
        (lambda: Half().code(cloud() * 1e7), "float16 cannot hold"),
        (lambda: Factors("PCA", 2.0), "no factors are called 'PCA'"),
        (lambda: Factors("SVD", 0.0), "0.0 bits per number"),
        (lambda: Factors("SVD", 0.1).code(cloud()), "cannot hold"),
        (lambda: Transformed(0.0), "0.0 bits per number"),
        (lambda: Transformed(0.02).code(cloud()), "bytes"),
        (lambda: sweep((N, D), [2.0], ["gzip"]), "no rivals are called 'gzip'"),
        (lambda: sweep((N, D), []), "sizes"),
        (lambda: sweep((N, D), [-1.0]), "sizes"),
    ],
)
def test_bad_wishes_are_refused(make, message):
    with pytest.raises(KflatsError, match=message):
        make()


def test_a_sweep_lies_around_its_sizes():
    shape, sizes = (30522, 384), (0.7, 1.0, 2.0, 4.0)
    for family, least, most in (("pq", 0.6, 1.6), ("opq", 0.5, 2.4)):
        found = [8 * rival.size(shape) / (shape[0] * shape[1]) for rival in sweep(shape, sizes, [family], every=True)]
        assert len(set(found)) == len(found)
        for size in sizes if family == "pq" else sizes[:-1]:
            assert any(size * least <= bits <= size for bits in found), (family, size)
            assert any(size < bits <= size * most for bits in found), (family, size)
    assert [r.name for r in sweep(shape, [16.0], ["fp16", "rotation"])] == ["fp16", "rotation, 8 bits"]
    assert sweep(shape, [16.0], ["svd"]) == []
    assert {type(r) for r in sweep(shape, sizes)} >= {Absmax, TorchAO, Rotated, PQ, OPQ, Residual, Factors}
    assert {name for family in FAMILIES for name in [r.name for r in sweep(shape, [16.0, 1.0], [family])]}
