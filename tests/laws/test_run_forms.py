"""A run-time form changes how a coded layer multiplies, and nothing that is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn

import kflats
from kflats import SVD, Feedback, Integer, KeepDense, Recipe, Transform, run_as_
from kflats.codecs import Codec
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.machine import cpu_units
from kflats.common.run_forms import FormLoss, RunForm
from kflats.evaluation import forms
from kflats.matrices import integer_kernels, layers, running
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.integer_kernels import IntegerKernel, integer_kernel, integer_limit
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.running import DenseProduct, IntegerProduct, RoundedMatrix, steps_to
from kflats.model import description
from kflats.model.run_as import running_as

FORMS: tuple[RunForm, ...] = get_args(RunForm)
KERNELS = integer_kernels._candidates("cpu")
NEAR = {"compact": 1e-6, "dense": 1e-6, "bfloat16": 0.02, "int8": 0.03 * 127 / integer_limit()}


def net(recipe: Recipe | None = None, keep: str = "40%", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
    recipe = recipe or Recipe(KeepDense(), codec=Integer(bits=8))
    kflats.compress_(model, {"linear": recipe}, keep=keep, quiet=True)
    return model


def inputs(count: int = 8) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(2))


def layer_of(model: nn.Module) -> FactoredLinear:
    return next(layer for layer in model.modules() if isinstance(layer, FactoredLinear))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("matrix_rows", ["in_features", "out_features"])
@pytest.mark.parametrize("codec", [Integer(bits=8), Feedback()], ids=lambda codec: type(codec).__name__)
def test_forms_are_near_the_codes_and_leave_them_alone(
    codec: Codec, form: RunForm, matrix_rows: Any, tmp_path: Path
) -> None:
    pytest.importorskip("constriction")
    model = net(Recipe(KeepDense(), codec=codec, matrix_rows=matrix_rows))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        dense = model(inputs())
        run_as_(model, "compact")
        exact = model(inputs())
        assert run_as_(model, form) == 2
        made = model(inputs())
        assert float((made - exact).norm()) <= NEAR[form] * float(exact.norm())
        assert torch.equal(copy.deepcopy(model)(inputs()), made)
    now = model.state_dict()
    assert now.keys() == stored.keys()
    assert all(torch.equal(now[name], stored[name]) for name in stored)
    kflats.save(model, tmp_path / "saved")
    loaded = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
    kflats.load_(loaded, tmp_path / "saved")
    assert layer_of(loaded).run_form == form
    with torch.inference_mode():
        assert torch.equal(loaded(inputs()), made)
        for one in (model, copy.deepcopy(model), loaded):
            run_as_(one, "dense")
            assert torch.equal(one(inputs()), dense)
    decoded = [model[place].matrix.dense() for place in (0, 2)]  # type: ignore[union-attr, operator]
    kflats.restore_(model)
    for place, matrix in zip((0, 2), decoded, strict=True):
        assert torch.equal(model[place].weight, matrix if matrix_rows == "out_features" else matrix.T)
    assert torch.allclose(model(inputs()), exact, rtol=1e-4, atol=1e-5)


def test_one_thread_decodes_and_makes_what_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On busy cores several threads take many times as long. Large matrices are shared among threads again."""
    used = list[tuple[str, int]]()
    product, expand = CodedMatrix.product, description.expand_

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            used.append((what, torch.get_num_threads()))
            return call(*given, **named)

        return run

    monkeypatch.setattr(CodedMatrix, "product", noted("product", product))
    monkeypatch.setattr(description, "expand_", noted("decode", expand))
    torch.set_num_threads(2)
    kflats.save(net(), tmp_path / "saved")
    loaded = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
    kflats.load_(loaded, tmp_path / "saved")
    with torch.inference_mode():
        loaded(inputs())
        monkeypatch.setattr(layers, "_SHARED", 64 * 96)
        run_as_(loaded, "int8")
        loaded(inputs())
    assert used == [("decode", 1), ("decode", 1), ("product", 1), ("product", 1), ("product", 2), ("product", 1)]
    assert torch.get_num_threads() == 2


def test_codes_are_what_multiplies_after_they_change() -> None:
    model, other, x = net(), net(seed=1), inputs()
    with torch.no_grad():
        before = model(x)
        layer_of(model).matrix.weight.mul_(2)
        changed = model(x)
        run_as_(model, "compact")
        assert not torch.equal(before, changed)
        assert torch.allclose(model(x), changed, rtol=1e-4, atol=1e-5)
        run_as_(model, "dense")
        model.load_state_dict(other.state_dict())
        assert torch.allclose(model(x), other(x), rtol=1e-4, atol=1e-5)
        halves = model.to(torch.bfloat16)(x.to(torch.bfloat16))
        assert halves.dtype == torch.bfloat16
        assert float((halves.float() - other(x)).norm()) < 0.03 * float(other(x).norm())


@pytest.mark.parametrize("fused", [False, True])
def test_evaluations_follow_training(fused: bool) -> None:
    """What products and lookups keep is made anew after a step of any optimizer; a fused one raises no version."""
    draws = torch.Generator().manual_seed(0)
    integers, steps = torch.randint(-7, 8, (64, 16), generator=draws), torch.rand(64, generator=draws) + 0.5
    model, table = net(), FactoredEmbedding(from_integers([integers], None, steps, scales="row"))
    optimizer = torch.optim.AdamW([*model.parameters(), *table.parameters()], lr=0.1, fused=fused)
    few, many = torch.arange(3), torch.arange(64).repeat(9)

    def evaluated(model: nn.Module, table: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [model(inputs()), table(few), table(many)]

    before = evaluated(model, table)
    (model(inputs()).square().sum() + table(many).square().sum()).backward()
    optimizer.step()
    after = evaluated(model, table)
    expected = evaluated(copy.deepcopy(model), copy.deepcopy(table))
    assert all(torch.equal(one, other) for one, other in zip(after, expected, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_gradients_are_those_of_the_codes() -> None:
    model, grads = net(), []
    for form in ("compact", "dense"):
        run_as_(model, form)
        model.zero_grad()
        x = inputs().requires_grad_()
        model(x).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*grads, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    model.requires_grad_(False)
    with torch.inference_mode():
        model(inputs())
    x = inputs().requires_grad_()
    model(x).square().sum().backward()  # the matrix that inference made serves gradients of inputs
    assert torch.allclose(x.grad, grads[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_a_bias_that_learns_leaves_frozen_codes_in_their_form(form: RunForm) -> None:
    layer = layer_of(net())
    layer.run_form = form
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == "bias")
    layer(inputs()).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((96,), 8.0))
    assert layer._ready is not None
    layer.weight.requires_grad_()
    layer._ready = None
    if form == "int8":
        with pytest.raises(KflatsError, match="gradients are not supported"):
            layer(inputs())
    else:
        layer(inputs()).sum().backward()
        assert layer._ready is None  # the codes are decoded, for gradients of the scales
        assert bool(layer.weight.grad.any())


@pytest.mark.parametrize("frozen", [False, True])
def test_int8_has_no_gradients_and_says_so(frozen: bool) -> None:
    model = net().requires_grad_(not frozen)
    run_as_(model, "int8")
    with pytest.raises(KflatsError, match="gradients are not supported with the run-time form int8"):
        model(inputs().requires_grad_(frozen))
    with torch.no_grad():
        model(inputs())
    with running_as(model, "dense"):
        model(inputs().requires_grad_(frozen)).sum().backward()
    assert layer_of(model).run_form == "int8"
    factors = net(Recipe(SVD())).requires_grad_(not frozen)
    with pytest.warns(KflatsWarning, match="the run-time form int8 changes nothing"):
        run_as_(factors, "int8")
    factors(inputs().requires_grad_(frozen)).sum().backward()


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    model, x = net(), inputs()
    run_as_(model, "int8")
    layer = layer_of(model)
    with torch.inference_mode():
        whole = layer(x)
        x[3, 5], x[4, 0] = float("nan"), float("inf")
        spoiled = layer(x)
    assert not bool(torch.isfinite(spoiled[3]).any())
    assert not bool(torch.isfinite(spoiled[4]).all())
    kept = [0, 1, 2, 5, 6, 7]
    assert torch.equal(spoiled[kept], whole[kept])


def test_inputs_of_unlike_size_are_evened_out_by_the_steps_of_feedback() -> None:
    """One input is 100 times as large as the others, and its steps are as much smaller."""
    gen = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=gen), torch.randn(200, 64, generator=gen)
    weight[:, 7] /= 100
    x[:, 7] *= 100
    steps = torch.ones(64)
    steps[7] = 0.01
    errors = []
    for scales in (torch.ones(64), steps.sqrt()):
        product = IntegerProduct.of(weight, scales)
        errors.append(float((product(x) - x @ weight.T).norm()))
    assert errors[1] < 0.3 * errors[0]


def test_every_number_is_rounded_to_the_nearest_step() -> None:
    gen = torch.Generator().manual_seed(0)  # more numbers than are rounded at a time
    weight, scales = torch.randn(700, 300, generator=gen), 0.5 + torch.rand(300, generator=gen)
    rounded = RoundedMatrix.of(weight, scales, partial(steps_to, 90))
    steps, numbers = rounded.steps.unsqueeze(1), rounded.numbers.T.to(torch.float32)
    assert bool(((numbers * steps - weight / scales).abs() <= 0.50001 * steps).all())
    assert numbers.abs().amax(1).unique().tolist() == [90]


def test_axes_of_few_coordinates_stay_two_factors() -> None:
    pytest.importorskip("constriction")
    for keep, count in (("4%", 2), ("30%", 1)):
        product = layer_of(net(Recipe(SVD(), codec=Transform()), keep)).matrix.product(
            "dense", torch.float32, transposed=False
        )
        assert isinstance(product, DenseProduct)
        assert len(product.factors) == count


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_the_same_on_cpus_that_multiply_it_in_float32(
    lacks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of bfloat16, summed in float32; by parts of the matrix, the last of them smaller."""
    monkeypatch.setattr(running, "_lacks_bfloat16", lambda: lacks)
    monkeypatch.setattr(running, "_WIDENED", 7 * 64)
    widened = []
    in_float32 = running._in_float32
    monkeypatch.setattr(running, "_in_float32", lambda *given: widened.append(1) or in_float32(*given))
    draws = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(20, 64, generator=draws).to(torch.bfloat16), torch.randn(20, generator=draws)
    product = DenseProduct((weight,))
    for rows in (1, 8):
        x = torch.randn(2, rows, 64, generator=draws).to(dtype)
        exact = x.to(torch.bfloat16).double() @ weight.double().T + bias.to(dtype).double()
        made = product(x, bias)
        assert made.dtype == dtype
        assert float((made.double() - exact).abs().max()) <= 2.0**-8 * float(exact.abs().max())
    assert len(widened) == lacks


def test_recorded_graphs_use_the_codes() -> None:
    model, x = net().requires_grad_(False), inputs()
    expected = model(x)
    run_as_(model, "int8")
    assert torch.allclose(torch.export.export(model, (x,)).module()(x), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=KERNELS, ids=lambda kernel: f"{kernel.pack.__self__.__name__}-{kernel.most}")
def kernel(request: pytest.FixtureRequest) -> IntegerKernel:
    """Each that this CPU has."""
    if not integer_kernels._is_exact(request.param, (5, 384, 60), "cpu"):
        pytest.skip("not exact on this CPU, or not in this build of torch")
    return cast(IntegerKernel, request.param)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 1, 3), (1, 2, 17), (3, 384, 5), (33, 65, 64), (320, 384, 96)])
def test_products_are_those_of_whole_numbers(kernel: IntegerKernel, shape: tuple[int, int, int]) -> None:
    """Of the largest integers of both signs, and of numbers between them that the kernel rounds to the nearest."""
    (m, k, n), draws = shape, torch.Generator().manual_seed(0)
    most, near = kernel.most, torch.rand(m, k, generator=draws) * 0.8 - 0.4
    drawn = torch.randint(-most, most + 1, (m, k), generator=draws)
    for whole, given in ((torch.full((m, k), most), 0.0), (torch.full((m, k), -most), 0.0), (drawn, near)):
        numbers = torch.randint(-most, most + 1, (k, n), generator=draws).to(torch.int8)
        numbers[:, 0] = most
        sums = torch.empty(m, n, dtype=kernel.sums)
        kernel.packed(numbers.clone()).sums_(sums, kernel.rounded(whole + given + torch.zeros(m, k)))
        assert torch.equal(sums.to(torch.int64), whole @ numbers.to(torch.int64))


def test_the_largest_integers_are_those_of_the_cpu() -> None:
    """Its own units take integers to 127. Without them FBGEMM takes them to 90, and torch's product is not asked."""
    chosen = integer_kernel.__wrapped__()
    assert chosen.most == 127 or (not cpu_units() and chosen.most in (90, 63))
    if not cpu_units() and "fbgemm" in torch.backends.quantized.supported_engines:
        assert chosen.whole == torch.float32


def test_a_cpu_whose_integers_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_kernels._Fbgemm, "sums_", lambda self, sums, whole: sums.zero_())
    monkeypatch.setattr(integer_kernels._Plain, "sums_", lambda self, sums, whole: sums.zero_())
    with pytest.raises(KflatsError, match="its products of integers are wrong"):
        integer_kernel.__wrapped__()


def no_kernel(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    raise NotImplementedError("'_int_mm' is not implemented for 'Char' on this build")


def test_sums_of_integers_that_leave_32_bits_are_refused() -> None:
    most = running.MOST_INPUTS
    assert most * integer_limit() ** 2 < 2**31
    model = nn.Sequential(nn.Linear(most + 1, 2, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(0.01)
    recipe = Recipe(KeepDense(), codec=Integer(bits=8), matrix_rows="out_features")
    kflats.compress_(model, {"linear": recipe}, keep="40%", quiet=True)
    assert forms.integers_of(model) is None
    assert forms.integers_of(net()) == integer_limit()
    run_as_(model, "int8")
    with torch.inference_mode(), pytest.raises(KflatsError, match=r"131,073 inputs[\s\S]*32 bits[\s\S]*dense"):
        model(torch.ones(1, most + 1))
    rows = torch.ones(1, most)
    whole = IntegerProduct.of(rows, torch.ones(most))(rows)
    assert float(whole) == pytest.approx(most, rel=1e-3)


def test_inputs_may_have_the_name_that_torch_gives_them() -> None:
    for recipe in (Recipe(KeepDense(), codec=Integer(bits=8)), Recipe(SVD())):
        layer, x = net(recipe)[0], inputs()
        torch.testing.assert_close(layer(input=x), layer(x))


@pytest.mark.parametrize("missing", [no_kernel, None], ids=["no kernel", "no operator"])
def test_a_machine_without_products_of_integers_runs_the_other_forms(
    missing: Callable[[Tensor, Tensor, Tensor], Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor, or another build of torch: int8 is refused where it is called, and auto takes another form."""
    monkeypatch.delattr(torch, "_int_mm") if missing is None else monkeypatch.setattr(torch, "_int_mm", missing)
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["none"])
    integer_kernel.cache_clear()
    monkeypatch.setattr(forms, "_times", lambda model, allowed: {form: 1 / (1 + i) for i, form in enumerate(allowed)})
    model, x = net().requires_grad_(False), torch.randn(4, 64)
    try:
        assert forms.integers_of(model) is None
        for form in ("dense", "bfloat16", "compact"):
            run_as_(model, form)
            assert torch.isfinite(model(x)).all()
        run_as_(model, "int8")
        with pytest.raises(KflatsError, match=r"wrong or missing\. Try: the run-time form bfloat16 or dense"):
            model(x)
        losses = FormLoss("dense", 0.0, 0.0), FormLoss("bfloat16", 0.0, 0.0), FormLoss("int8", 0.0, 0.0, 127)
        assert forms.fastest(model, losses, 0.01, quiet=True) == "bfloat16"
    finally:
        integer_kernel.cache_clear()


def test_int8_is_refused_where_it_has_no_kernel() -> None:
    with pytest.raises(KflatsError, match="int8 is not supported on meta"):
        IntegerProduct.of(torch.empty(8, 8, device="meta"), torch.ones(8))


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_parts_of_a_batch_are_multiplied_as_the_whole(
    rows: int, kernel: IntegerKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last part is one row of a transposed batch, which torch multiplies wrongly as it is."""
    weight, scales = torch.randn(24, 64), torch.rand(64) + 0.5
    rounded = RoundedMatrix.of(weight, scales, partial(steps_to, kernel.most))
    product = IntegerProduct(kernel.packed(rounded.numbers.clone()), rounded.steps, scales, kernel)
    for x in (torch.randn(rows, 64), torch.randn(64, rows).T, torch.randn(1, 64, rows).transpose(1, 2)):
        whole = product(x.contiguous().clone())
        for most in (1, 64, 128, 2**19):
            monkeypatch.setitem(integer_kernels._MULTIPLIED, "cpu", most)
            torch.testing.assert_close(product(x), whole, rtol=0, atol=0)
            near = x.reshape(-1, 64) @ (rounded.numbers.float() * rounded.steps * scales.unsqueeze(1))
            assert float((product(x).reshape(near.shape) - near).norm()) < 0.05 * float(near.norm())


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_another_kind_are_refused(form: RunForm) -> None:
    """Whole numbers gave zeros, and one number was repeated for all inputs."""
    model = net().requires_grad_(False)
    run_as_(model, form)
    for x, said in (
        (torch.randint(0, 3, (2, 64)), "inputs of torch.int64 are not supported"),
        (torch.ones(2, 64, dtype=torch.uint8), "inputs of torch.uint8 are not supported"),
        (torch.randn(3, 1), r"inputs of shape \(3, 1\) do not fit"),
        (torch.randn(3, 65), r"inputs of shape \(3, 65\) do not fit"),
    ):
        with pytest.raises(KflatsError, match=said):
            model(x)


def test_an_unknown_form_is_refused() -> None:
    model = net()
    with pytest.raises(KflatsError, match="run_as='int4' is unknown"):
        run_as_(model, "int4")  # type: ignore[arg-type]
    assert layer_of(model).run_form == "dense"


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_is_added_once_and_can_be_trained(form: RunForm) -> None:
    table = net()[0].matrix.requires_grad_(False)  # type: ignore[union-attr, operator]
    head = FactoredHead(table, nn.Parameter(torch.randn(table.shape[0])))
    x = torch.randn(8, table.shape[1])
    head.run_form = form
    with torch.inference_mode():
        whole, bias = head(x), head.bias.clone()  # type: ignore[union-attr]
        assert torch.allclose(whole, x @ table.dense().T + bias, atol=0.1)
    made = head(x)
    assert torch.allclose(made, whole, atol=1e-5)
    made.sum().backward()
    assert torch.equal(head.bias.grad, torch.full_like(bias, len(x)))  # type: ignore[union-attr, arg-type]


def test_int8_evens_out_inputs_by_the_columns_of_a_matrix_without_steps() -> None:
    """One input is 100 times as large, and its column as much smaller."""
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    with torch.no_grad():
        model[0].weight[:, 7] /= 100  # type: ignore[operator, union-attr]
    kflats.compress_(model, {"linear": Recipe(KeepDense(), codec=Integer(bits=8))}, keep="50%", quiet=True)
    layer, x = layer_of(model), inputs(200)
    x[:, 7] *= 100
    with torch.inference_mode():
        exact = layer(x)
        layer.run_form = "int8"
        plain = IntegerProduct.of(layer.matrix.dense().T, torch.ones(64))
        assert float((layer(x) - exact).norm()) < 0.3 * float((plain(x) - exact).norm())


def test_graphs_of_fx_hold_factored_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU()).eval()
    kflats.compress_(model, {"linear": SVD()}, keep="50%", quiet=True)
    x = inputs()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
