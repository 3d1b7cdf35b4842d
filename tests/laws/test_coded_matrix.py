"""A CodedMatrix is the dense matrix its text defines: values, gradients, recorded graphs, types, files, refusals."""

from __future__ import annotations

import copy
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import pytest
import torch
from table import slow
from torch import Tensor, nn

from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.common.errors import KflatsError
from kflats.common.run_forms import RunForm
from kflats.matrices import coded
from kflats.matrices.coded import from_integers
from kflats.matrices.integer_kernels import integer_limit
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import CodedMatrix, matrix_from_spec
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.rows import TensorRows

F64 = torch.float64
N, D = 60, 8


def made(
    *,
    counts: tuple[int, ...] = (60,),
    r: int = D,
    most: int = 5,
    scales: str = "class",
    groups: int = 1,
    basis: str = "identity",
    flats: tuple[tuple[int, int], ...] = (),
    shifted: bool = False,
    level_bits: bool = False,
    unit: int = 0,
    n: int = N,
    seed: int = 0,
    dtype: torch.dtype = F64,
) -> CodedMatrix:
    """Random integers of ``most`` bits at most, fewer in later columns and in later classes."""
    gen = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(n, generator=gen)]
    parts = []
    for c, rows in enumerate(counts):
        widths = [most if level_bits else max(0, most - c - (j * most) // (2 * max(1, r))) for j in range(r)]
        rank = [rank for count, rank in flats for _ in range(count)][c] if flats else r
        widths = [width if j < rank else 0 for j, width in enumerate(widths)]
        top = (1 << torch.tensor(widths, dtype=torch.int64)) - 1
        part = (torch.rand(rows, r, generator=gen) * (top + 1)).floor().to(torch.int64)
        part = part - (top + 1) // 2
        part[:, rank:] = 0
        parts.append(part.to(torch.int16))
    wide = partial(torch.rand, generator=gen, dtype=F64)
    floats: dict[str, Tensor] = {"shrink": (wide(3) / 2).to(dtype)}
    contexts = torch.randint(0, 3, (len(counts), r), generator=gen)
    integers: dict[str, Any] = {"contexts": contexts.to(torch.uint8)}
    if shifted:
        integers["centers"] = torch.randint(-9, 9, (len(counts), r), generator=gen).to(torch.int16)
        for c, rank in enumerate(rank for count, rank in flats for _ in range(count)):
            integers["centers"][c, rank:] = 0
    axes = sum(rank for _, rank in flats) if flats else r
    if basis == "int8":
        floats["basis"] = torch.randint(-127, 128, (axes, D), generator=gen).to(torch.int8)
        floats["basis_scale"] = wide(axes).to(dtype) / 64
    if basis == "diagonal":
        integers["column_steps"] = torch.randint(-20, 21, (D,), generator=gen).to(torch.int8)
    weight = (wide((len(counts) if scales == "class" else n) * groups) + 0.1).to(dtype)
    how: dict[str, Any] = {"scales": scales, "groups": groups, "flats": flats, "unit": unit}
    return from_integers(parts, labels, weight, **how, **integers, **floats)


TABLE: dict[str, Callable[..., CodedMatrix]] = {
    "int8 rows": partial(made, most=8, scales="row"),
    "int4 groups": partial(made, most=4, scales="row", groups=4),
    "ragged groups": partial(made, most=4, scales="row", groups=3),
    "ragged bytes": partial(made, most=8, scales="row", groups=3, level_bits=True, unit=3),
    "ragged classes": partial(made, counts=(20, 40), r=7, basis="int8", groups=2, shifted=True),
    "unit": partial(made, counts=(10, 30, 15, 5), r=6, basis="int8", shifted=True, unit=-2),
    "transform": partial(made, counts=(10, 30, 15, 5), r=6, basis="int8", shifted=True),
    "transform wide": partial(made, counts=(20, 40), most=13, basis="int8"),
    "flats": partial(made, counts=(10, 30, 15, 5), r=6, basis="int8", flats=((2, 6), (1, 4), (1, 5)), shifted=True),
    "flats of nothing": partial(made, counts=(0, 40, 20), r=4, basis="int8", flats=((1, 4), (1, 0), (1, 2))),
    "rounded flats": partial(
        made, counts=(10, 30, 20), r=5, basis="int8", flats=((1, 5), (2, 3)), scales="row", groups=2
    ),
    "row scaled flats": partial(made, counts=(40, 20), r=4, basis="int8", flats=((1, 2), (1, 4)), scales="row", unit=1),
    "column steps": partial(made, counts=(10, 30, 15, 5), basis="diagonal", unit=-1),
    "row and column steps": partial(made, most=8, scales="row", groups=3, basis="diagonal", shifted=True),
    "bytes": partial(made, most=8, scales="row", shifted=True, level_bits=True),
    "half bytes": partial(made, counts=(30, 30), most=4, level_bits=True),
    "empty classes": partial(made, counts=(0, 50, 0, 10, 0), basis="int8"),
    "no bits": partial(made, counts=(30, 20, 10), most=1, r=4, basis="int8", shifted=True),
    "nothing at all": partial(made, counts=(30, 30), most=0, basis="int8"),
    "rank 0": partial(made, counts=(30, 30), r=0, basis="int8"),
    "one row": partial(made, counts=(1,), n=1, most=4, scales="row"),
}


@pytest.fixture(params=TABLE.values(), ids=TABLE.keys(), scope="module")
def make(request: pytest.FixtureRequest) -> Callable[..., CodedMatrix]:
    found: Callable[..., CodedMatrix] = request.param
    return found


def definition(matrix: CodedMatrix) -> Tensor:
    """Row by row and bit by bit from the stored tensors, as the class text says."""
    found, geometry = matrix.tensors(), matrix.geometry
    labels = found["labels"].tolist() if "labels" in found else [0] * matrix.shape[0]
    data, rows, begin = bytes(found["codes"].tolist()), {}, 0
    each = math.ceil(geometry.rank / geometry.groups)
    group = torch.tensor([j // each for j in range(geometry.rank)], dtype=torch.int64)
    for c, (_, row_bytes) in enumerate(geometry.classes):
        fields = list(zip(found["bits"][c].tolist(), found["low"][c].tolist(), strict=True))
        less = found["shrink"][found["contexts"][c].long()]
        for row in [i for i, label in enumerate(labels) if label == c]:
            string = int.from_bytes(data[begin : begin + row_bytes], "little")
            begin += row_bytes
            numbers = []
            for bits, low in fields:
                q, string = string % 2**bits + low, string >> bits
                numbers.append(q)
            levels = torch.tensor(numbers, dtype=F64).to(less.dtype)
            values = levels - levels.sign() * less + found["centers"][c]
            line = c if geometry.scales == "class" else row
            rows[row] = values * found["weight"][line * geometry.groups + group] * 2.0**geometry.unit
    assert begin == len(data)
    table = torch.stack([rows[i] for i in range(len(labels))])
    if "column_steps" in found:
        return table * torch.tensor([2.0 ** (k / 8) for k in found["column_steps"].tolist()], dtype=F64).to(table)
    if "basis" not in found:
        return table
    basis = found["basis"].to(table.dtype) * found["basis_scale"][:, None]
    if not geometry.flats:
        return table @ basis
    first, owner, out = 0, [f for f, (count, _) in enumerate(geometry.flats) for _ in range(count)], []
    starts = [first := first + rank for _, rank in ((0, 0), *geometry.flats)]
    for i, label in enumerate(labels):
        flat = owner[label]
        axes = basis[starts[flat] : starts[flat + 1]]
        out.append(table[i, : len(axes)] @ axes)
    return torch.stack(out)


@pytest.mark.parametrize("bits", [0.7, 3.0])
@pytest.mark.parametrize("classes", [1, 6])
def test_it_holds_what_a_transform_code_says(bits, classes):
    gen = torch.Generator().manual_seed(0)
    table = torch.randn(900, 16, generator=gen) @ torch.diag(0.8 ** torch.arange(16)) @ torch.randn(16, 16)
    weights = torch.rand(900, generator=gen) + 0.01
    pytest.importorskip("constriction")
    code = transform_code(
        TensorRows(table),
        int(bits * 1800),
        lambda code: stored_bytes(from_codes(code)),
        weights=weights,
        classes=classes,
    )
    matrix = from_codes(code)
    (one,) = code.codes
    exact, basis = torch.empty(900, 16, dtype=F64), one.basis.to(F64) * one.basis_scale.to(F64).unsqueeze(1)
    for c, q in enumerate(one.levels):
        shrink = one.shrink[one.contexts[c].long()].to(F64)
        exact[one.labels == c] = one.steps[c].to(F64) * (one.centers[c] + q - q.sign() * shrink) @ basis
    torch.testing.assert_close(matrix.dense(), exact.float(), atol=1e-5, rtol=1e-5)
    assert matrix.nbytes < 4 * table.numel()
    half = from_codes(code, dtype=torch.float16)
    torch.testing.assert_close(half.dense().float(), exact.float(), rtol=0.01, atol=0.01 * float(table.abs().max()))


def gradients(matrix: nn.Module, out: Tensor, *inputs: Tensor, again: bool = True) -> list[Tensor]:
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    wanted = [*matrix.parameters(), *inputs]
    found = torch.autograd.grad((out * probe).sum(), wanted, allow_unused=True, retain_graph=again)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def assert_same_gradients(matrix: nn.Module, ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    assert_near(gradients(matrix, ours, *inputs, again=False), gradients(matrix, theirs, *inputs, again=False))


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype == F64:
            torch.testing.assert_close(a, b)
        else:  # sums in another order
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + float(b.detach().abs().sum())))


def test_every_operation_is_that_of_the_dense_matrix(make, monkeypatch):
    same = make()
    dense, (n, d), gen = definition(same), same.shape, torch.Generator().manual_seed(1)
    # The last ids are decoded class by class where ``a_class`` is 0.
    given = [torch.randint(0, n, shape, generator=gen) for shape in ((), (0,), (3, 5), (40, 20))]
    rows = [(ids, gradients(same, dense[ids])) for ids in given]
    x = torch.randn(2, 3, n, generator=gen, dtype=F64, requires_grad=True)
    h = torch.randn(2, 3, d, generator=gen, dtype=F64, requires_grad=True)
    vecmat, matvec = x @ dense, h @ dense.T
    vecmat_gradients, matvec_gradients = gradients(same, vecmat, x), gradients(same, matvec, h)
    for tile, many, a_class in ((2**20, 1024, 20), (2**20, 1, 0), (24, 1024, 0), (1, 1024, 0)):
        monkeypatch.setattr(coded, "TILE", tile)
        monkeypatch.setattr(coded, "MANY", many)
        monkeypatch.setattr(coded, "_A_CLASS", a_class)
        matrix = make()
        torch.testing.assert_close(matrix.dense(), dense)
        for ids, wanted in rows:
            ours = matrix.rows(ids)
            assert ours.shape == (*ids.shape, d)
            torch.testing.assert_close(ours, dense[ids])
            assert_near(gradients(matrix, ours), wanted)
            torch.testing.assert_close(matrix.rows(ids.to(torch.int32)), dense[ids])
        for ours, theirs, given, wanted in (
            (matrix.vecmat(x), vecmat, x, vecmat_gradients),
            (matrix.matvec(h), matvec, h, matvec_gradients),
        ):
            torch.testing.assert_close(ours, theirs)
            assert_near(gradients(matrix, ours, given), wanted)


def test_an_index_outside_is_an_error(make):
    for count in (3, 400):
        for bad in (-1, -N, 10**6):
            matrix = make()
            with pytest.raises(IndexError):
                matrix.rows(torch.tensor([0] * count + [bad]))


@pytest.mark.parametrize("a_class", [0, 20])
def test_smaller_types_lose_no_integer(make, a_class, monkeypatch):
    monkeypatch.setattr(coded, "_A_CLASS", a_class)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        matrix = make(dtype=dtype)
        exact = definition(copy.deepcopy(matrix).double()).detach()
        ids = torch.arange(matrix.shape[0]).repeat(8)
        close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps * float(exact.abs().max())}
        for given in (ids, ids[:20]):
            out = matrix.rows(given)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), exact[given], **close)
            wide = matrix.rows(given, dtype=torch.float32)
            assert wide.dtype == torch.float32
            torch.testing.assert_close(wide.double(), exact[given], rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
        assert matrix.dense().dtype == matrix.matvec(torch.ones(matrix.shape[1], dtype=dtype)).dtype == dtype


def test_layers_hold_it_as_any_other(make):
    matrix = make()
    n = matrix.shape[0]
    emb = FactoredEmbedding(matrix, padding_idx=0)
    net = nn.ModuleDict({"emb": emb, "head": FactoredHead(matrix, nn.Parameter(torch.zeros(n, dtype=F64)))})
    assert set(net.state_dict()) == {f"emb.{name}" for name in matrix.tensors()} | {"head.bias"}
    assert matrix.nbytes == sum(t.numel() * t.element_size() for t in matrix.state_dict().values())
    assert matrix.num_values == sum(p.numel() for p in matrix.parameters())
    ids = torch.randint(0, n, (3, 7), generator=torch.Generator().manual_seed(3))
    before = net["head"](emb(ids)).clone()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert other["emb"].matrix is other["head"].matrix
        torch.testing.assert_close(other["head"](other["emb"](ids)), before)
        with torch.no_grad():
            other["emb"].weight.zero_()
        assert not other["emb"](ids).any()
    emptied = copy.deepcopy(net).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(net.state_dict())
    torch.testing.assert_close(emptied["head"](emptied["emb"](ids)), before)
    half = net.half()
    assert matrix.codes.dtype == torch.uint8
    assert half["emb"](ids).dtype == torch.float16
    emb(torch.zeros(2, dtype=torch.int64)).sum().backward()  # nothing but padding
    assert all(p.grad is None or not p.grad.any() for p in emb.parameters())
    for rows in ("in_features", "out_features"):
        linear = FactoredLinear(make(), matrix_rows=rows)
        x = torch.randn(2, linear.in_features, dtype=F64)
        dense = definition(linear.matrix)
        torch.testing.assert_close(linear(x), x @ (dense if rows == "in_features" else dense.T))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x.float()).dtype == torch.bfloat16


# Recorded graphs --------------------------------------------------------------------------------


class TiedNet(nn.Module):
    def __init__(self, matrix: CodedMatrix) -> None:
        super().__init__()
        self.emb = FactoredEmbedding(matrix, padding_idx=0)
        self.head = FactoredHead(matrix)
        self.head.run_form = "compact"  # recorded graphs hold this form: both sides add in about the same order

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.emb(ids)))


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batches(matrix: CodedMatrix) -> list[Tensor]:
    n, gen = matrix.shape[0], torch.Generator().manual_seed(4)
    found = [torch.randint(0, n, shape, generator=gen) for shape in ((4, 7), (2, 9), (3, 5))]
    return [*found, torch.full((2, 6), n - 1), found[0].repeat(5, 4)]


RECORDED = ["ragged groups", "transform", "no bits", "rounded flats", "row scaled flats"]


def recorded(*names: str) -> pytest.MarkDecorator:
    """Cases of the table for laws that record a graph, which takes seconds: two of them are quick."""
    quick = {"ragged groups", "rounded flats"}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in quick else slow) for name in names])


@pytest.mark.usefixtures("_fresh")
@recorded(*RECORDED)
def test_compiled_forward_and_backward(name):
    layer = FactoredEmbedding(TABLE[name](dtype=torch.float32), padding_idx=0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids in batches(layer.matrix):
        ours, theirs = compiled(ids), layer(ids)
        torch.testing.assert_close(ours, theirs)
        if theirs.requires_grad:
            assert_same_gradients(layer, ours, theirs)


@dataclass
class Kept:
    """A backend of ``torch.compile`` that runs a graph as it is and keeps the names of its operators."""

    operators: list[str] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.operators += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward

    @property
    def layers(self) -> int:
        """Layers that the compiler does not look into, or not into their products."""
        return sum("kflats.computed" in name or "kflats.integer_sums_" in name for name in self.operators)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("form", get_args(RunForm))
def test_compiled_without_gradients_a_layer_is_in_its_form(form):
    make = partial(TABLE["ragged groups"], dtype=torch.float32)
    net, kept = TiedNet(make()), Kept()
    linear = FactoredLinear(make(), torch.ones(D), matrix_rows="in_features")
    whole = nn.Sequential(net, linear)
    net.head.run_form = linear.run_form = form
    # To scale sums of integers is one of the graph's own operators.
    digits = {"rtol": 1e-5, "atol": 1e-5} if form == "int8" else {"rtol": 0, "atol": 0}
    compiled = torch.compile(whole, fullgraph=True, backend=kept, dynamic=True)
    for again in range(2):
        for ids in batches(net.emb.matrix):
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    torch.testing.assert_close(compiled(ids), whole(ids), **digits)
        assert kept.layers in (3, 6)  # one or two graphs: the second has sizes as symbols
        if again == 0:
            with torch.no_grad():  # a new form is made, and not that of the graph
                before = whole(ids)
                linear.weight.mul_(2)
                net.emb.weight.mul_(0.5)
    with torch.no_grad():
        assert not torch.allclose(compiled(ids), before, rtol=0.1)
        other = copy.deepcopy(whole)  # it has layers of its own
        other[1].weight.zero_()
        fresh = torch.compile(other, fullgraph=True, backend=kept, dynamic=True)
        assert torch.equal(fresh(ids), torch.ones_like(before))
        torch.testing.assert_close(compiled(ids), whole(ids), **digits)


@pytest.mark.usefixtures("_fresh")
# Forward mode uses torch.jit.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_compiled_for_derivatives_or_autocast_layers_are_plain_operators():
    net, kept = TiedNet(TABLE["ragged groups"](dtype=torch.float32)), Kept()
    compiled = torch.compile(net, fullgraph=True, backend=kept)
    compiled(batches(net.emb.matrix)[0]).square().sum().backward()
    net.requires_grad_(False)
    hidden, tangent = torch.randn(3, D, requires_grad=True), torch.randn(3, D)
    head = torch.compile(net.head, backend=kept)
    head(hidden).sum().backward()
    assert hidden.grad is not None
    with torch.no_grad():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(hidden.detach(), tangent)
            moved = torch.autograd.forward_ad.unpack_dual(head(dual)).tangent
        assert moved is not None
        torch.testing.assert_close(moved, net.head(tangent))
        given = torch.compile(lambda x: torch.func.grad(lambda y: net.head(y).sum())(x), backend=kept)(hidden.detach())
        torch.testing.assert_close(given, hidden.grad)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = head(hidden)
            assert out.dtype == net.head(hidden).dtype == torch.bfloat16
    assert kept.operators
    assert not kept.layers


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("form", ["dense", "int8"])
def test_compiled_a_layer_follows_the_tensors_of_the_graph(form):
    layer = FactoredLinear(TABLE["ragged groups"](dtype=torch.float32), matrix_rows="out_features")
    layer.run_form = form
    table = FactoredEmbedding(TABLE["rounded flats"](dtype=torch.float32))
    x, ids = torch.randn(3, D), torch.tensor([[0, 5, 59]])

    def given(weight: Tensor) -> Tensor:
        tensors = {name: each.detach() for name, each in layer.named_parameters()}
        return torch.func.functional_call(layer, tensors | {"weight": weight}, (x,))

    def doubled() -> tuple[Tensor, ...]:
        before = layer(x), table(ids)
        layer.weight.mul_(2)
        table.weight.mul_(2)
        return *before, layer(x), table(ids)

    with torch.no_grad():
        once = layer(x), table(ids)
        torch.testing.assert_close(torch.compile(given, backend="aot_eager")(layer.weight * 3), 3 * once[0])
        found = torch.compile(doubled, backend="aot_eager")()
        for ours, theirs in zip(found, (*once, 2 * once[0], 2 * once[1]), strict=True):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(layer(x), 2 * once[0])


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh")
def test_compiled_integers_are_those_outside_of_graphs():
    """For no rows, one row of a batch that is transposed, numbers that are not finite, half precision, and a bias."""
    layer = FactoredLinear(TABLE["ragged groups"](dtype=torch.float32), torch.arange(0.0, D))
    layer.run_form = "int8"
    x = torch.randn(5, N, generator=torch.Generator().manual_seed(3))
    odd = torch.stack([x[0].index_fill(0, torch.tensor(2), value) for value in (math.nan, math.inf, -math.inf, 0.0)])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for given in (x[:0], x.T[:, :1].T, odd, x.view(1, 5, N), x[0], x.to(torch.bfloat16), 1e-33 * x):
            ours, theirs = compiled(given), layer(given)
            assert ours.dtype == theirs.dtype == given.dtype
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert not compiled(odd)[:3].isfinite().any()
        for wrong in (x[:, :1], x[:, 1:]):  # one number a row would be repeated
            for run in (layer, compiled):
                with pytest.raises((KflatsError, RuntimeError), match="do not fit"):
                    run(wrong)


@pytest.mark.usefixtures("_fresh")
def test_equal_layers_are_compiled_once():
    layers = [FactoredLinear(TABLE["int8 rows"](dtype=torch.float32, seed=seed)) for seed in range(12)]
    x, kept = torch.randn(2, N), Kept()
    for layer in layers:
        layer.compile(fullgraph=True, backend=kept)
        with torch.no_grad():
            assert torch.equal(layer(x), layer.forward(x))
    assert kept.layers == 1


@pytest.mark.usefixtures("_fresh")
def test_layers_run_alike_while_another_thread_compiles():
    layer = FactoredLinear(TABLE["ragged groups"](dtype=torch.float32))
    layer.run_form = "int8"
    x, done = torch.randn(2, N), threading.Event()

    def run() -> bool:
        with torch.no_grad():
            first, same, calls = layer(x), True, 0
            while not done.is_set() or not calls:
                same, calls = same and torch.equal(layer(x), first), calls + 1
        return same

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            for width in range(3, 6):
                torch.compile(nn.Linear(width, width), backend="aot_eager")(torch.randn(2, width))
        finally:
            done.set()
        assert running.result()


@pytest.mark.parametrize("trained", ["emb", "head", "both"])
def test_what_a_fused_optimizer_changed_is_seen(trained):
    """It leaves no new version in its tensors."""
    net = TiedNet(TABLE["ragged groups"](dtype=torch.float32))
    ids, hidden = batches(net.emb.matrix)[0], torch.randn(3, D)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        before = net(ids), net.head(hidden), net.emb(ids)
    out = {"emb": net.emb, "head": lambda _: net.head(hidden), "both": net}[trained](ids)
    with torch.no_grad():  # an evaluation between forward and step
        net(ids)
    out.square().sum().backward()
    optimizer.step()
    fresh = copy.deepcopy(net)
    with torch.no_grad():
        after = net(ids), net.head(hidden), net.emb(ids)
        for ours, theirs, old in zip(after, (fresh(ids), fresh.head(hidden), fresh.emb(ids)), before, strict=True):
            assert torch.equal(ours, theirs)
            assert not torch.allclose(ours, old)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.slow  # it runs the C++ compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["dense", "int8"])
def test_compiled_by_inductor(form):
    net = TiedNet(TABLE["transform"](dtype=torch.float32))
    net.head.run_form = form
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for ids in batches(net.emb.matrix):
            torch.testing.assert_close(compiled(ids), net(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export on itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@recorded(*RECORDED, "empty classes", "rank 0")
def test_exported_with_dynamic_batch_and_length(name):
    net = TiedNet(TABLE[name](dtype=torch.float32))
    inputs = batches(net.emb.matrix)
    shapes = ({axis: torch.export.Dim(name, min=1, max=4096) for axis, name in enumerate(("batch", "length"))},)
    program = torch.export.export(net, (inputs[0],), dynamic_shapes=shapes)
    assert not [node for node in program.graph.nodes if "kflats" in str(node.target)]
    for ids in inputs:
        torch.testing.assert_close(program.module()(ids), net(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")  # of a category that torch 2.15 changed
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@recorded(*RECORDED)
def test_traced_graph_does_not_freeze_the_ids_it_saw(name):
    net = TiedNet(TABLE[name](dtype=torch.float32)).requires_grad_(False)
    inputs = batches(net.emb.matrix)
    traced = torch.jit.trace(net, (inputs[0],))
    for ids in inputs:
        torch.testing.assert_close(traced(ids), net(ids), rtol=1e-4, atol=1e-4)  # fused kernels round otherwise


# Files and refusals -----------------------------------------------------------------------------


def test_a_matrix_survives_its_description(make):
    matrix = make()
    spec = json.loads(json.dumps(matrix.spec()))
    for device in ("meta", "cpu"):
        other = matrix_from_spec(spec, dtype=F64, device=device)
        assert isinstance(other, CodedMatrix)
        assert other.spec() == spec
        assert {k: (v.shape, v.dtype) for k, v in other.tensors().items()} == {
            k: (v.shape, v.dtype) for k, v in matrix.tensors().items()
        }
    with pytest.raises(KflatsError, match="before its tensors are filled"):
        other.rows(torch.tensor([0]))
    other.load_state_dict(matrix.state_dict())
    assert torch.equal(other.dense(), matrix.dense())


def test_resized_drops_the_last_rows_and_never_adds_one(make):
    for n in (1, 20, N):
        matrix = make()
        if n <= matrix.shape[0]:
            found = matrix.resized(n)
            # A product of fewer rows may sum in another order.
            torch.testing.assert_close(found.dense(), matrix.dense()[:n])
            assert found.shape == (n, D)
            with torch.no_grad():
                found.weight.add_(1)
            assert matrix_from_spec(found.spec(), dtype=F64).spec() == found.spec()
        with pytest.raises(KflatsError, match="cannot grow to"):
            matrix.resized(matrix.shape[0] + 1)
        with pytest.raises(KflatsError, match="cannot be resized"):
            matrix.resized(0)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("labels", lambda t: t * 0, "labels do not match"),
        ("labels", lambda t: t + 200, "labels do not match"),
        ("bits", lambda t: t + 1, "do not add up"),
        ("contexts", lambda t: t + 3, "distribution that is not there"),
    ],
)
def test_contradictions_are_refused(name, damage, message):
    matrix = TABLE["transform"]()
    state = {key: value.clone() for key, value in matrix.state_dict().items()}
    state[name] = damage(state[name])
    with pytest.raises(KflatsError, match=message):
        matrix.load_state_dict(state)


GOOD = TABLE["transform"]().spec()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"unit": True},
        {"unit": 1.0},
        {"unit": 301},
        {"version": True},
        {"version": None},
        {"extra": 1},
        {"shape": [61, 8]},
        {"shape": [60, 5]},
        {"shape": [60]},
        {"rank": 9},
        {"rank": -1},
        {"rank": True},
        {"classes": []},
        {"classes": [[60, 100]]},
        {"classes": [[60]]},
        {"classes": [[61, 3], [-1, 3]]},
        {"classes": [[60, 3]] + [[0, 3]] * 300},
        {"classes": 3},
        {"contexts": 0},
        {"contexts": 257},
        {"levels": 4},
        {"groups": 0},
        {"groups": 4},
        {"scales": "column"},
        {"scales": None},
        {"basis": "identity"},
        {"basis": "diagonal"},
        {"basis": "int4"},
        {"basis": ["int8"]},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_impossible_descriptions_are_refused(change):
    with pytest.raises(KflatsError):
        matrix_from_spec({**GOOD, **change}, dtype=F64)


def test_tensors_that_do_not_fit_are_refused():
    matrix = TABLE["transform"]()
    good = {name: value.detach() for name, value in matrix.tensors().items()}
    for name, value in good.items():
        for other in (value[:-1], value.to(torch.complex64)):
            if name != "weight":
                with pytest.raises(KflatsError, match=f"'{name}' of a coded matrix"):
                    CodedMatrix(matrix.geometry, good | {name: other})
    with pytest.raises(KflatsError, match="'more' of a coded matrix"):
        CodedMatrix(matrix.geometry, good | {"more": good["weight"]})
    with pytest.raises(KflatsError, match="not finite"):
        from_integers([torch.zeros(2, 2)], None, torch.tensor([float("inf")]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("form", "near"), [("dense", 1e-12), ("bfloat16", 0.02), ("int8", 0.03 * 127 / integer_limit())]
)
def test_run_forms_multiply_as_the_definition_says(
    make: Callable[..., CodedMatrix], form: RunForm, near: float, transposed: bool
) -> None:
    matrix = make()
    whole = definition(matrix).detach()
    whole = whole if transposed else whole.T
    before = {name: tensor.clone() for name, tensor in matrix.tensors().items()}
    product = matrix.product(form, F64, transposed=transposed)
    assert product is not None
    for shape in ((5,), (2, 3), (0,), ()):
        x = torch.randn(*shape, whole.shape[1], generator=torch.Generator().manual_seed(1), dtype=F64)
        out = product(x)
        assert out.dtype == F64
        assert out.shape == (*shape, whole.shape[0])
        lengths = x.norm(dim=-1, keepdim=True) * whole.norm(dim=1)
        assert bool(((out - x @ whole.T).abs() <= near * lengths + 1e-12).all())
    assert all(torch.equal(tensor, before[name]) for name, tensor in matrix.tensors().items())
    assert matrix.product("compact", F64, transposed=transposed) is None


def test_lookups_follow_the_scales(make):
    """What lookups keep between calls is made anew after any change of a scale, and never stops a gradient."""
    matrix = copy.deepcopy(make())
    ids = torch.tensor([0, matrix.shape[0] - 1, 0])
    with torch.no_grad():
        first = matrix.rows(ids)
        assert torch.equal(matrix.rows(ids), first)
        assert torch.equal(copy.deepcopy(matrix).rows(ids), first)
        for parameter in matrix.parameters():
            parameter.mul_(2)
            torch.testing.assert_close(matrix.rows(ids), definition(matrix)[ids])
        halved = {
            name: value / 2 if value.is_floating_point() else value for name, value in matrix.state_dict().items()
        }
        matrix.load_state_dict(halved)
        assert torch.equal(matrix.rows(ids), first)
        for parameter in matrix.parameters():
            parameter.data = parameter.data * 2
        torch.testing.assert_close(matrix.rows(ids), definition(matrix)[ids])
    matrix.rows(ids).sum().backward()
    learnt = [parameter.grad for parameter in matrix.parameters()]
    matrix.zero_grad()
    definition(matrix)[ids].sum().backward()
    for ours, parameter in zip(learnt, matrix.parameters(), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def test_a_dense_product_holds_the_rows_in_their_order(make):
    matrix = make()
    with torch.no_grad():
        product = matrix.product("dense", F64, transposed=True)
    if len(product.factors) == 1:
        torch.testing.assert_close(product.factors[0], definition(matrix).detach())
