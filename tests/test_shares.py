"""Shares: budgets in bytes, parameters and ranks, uniform or by loss, with every decision explained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import kflats
from kflats import SVD, Auto, Flats, KeepDense, KroneckerFisher, Recipe, RowFisher, Statistics, Uniform
from kflats.codecs import Float, Integer
from kflats.common.errors import KflatsError, KflatsWarning, as_options
from kflats.importance import IMPORTANCES, InputGram, TwoSided
from kflats.importance.protocol import Measured
from kflats.model.weights import find_weights
from kflats.planning.decide import plan
from kflats.recipe.recipe import Plan

SHAPES = {"a": (24, 24), "b": (24, 48), "c": (48, 24), "head": (24, 1)}


def model(bias: bool = True) -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.ModuleDict({name: nn.Linear(n, d, bias=bias) for name, (n, d) in SHAPES.items()})


def statistics(of: nn.Module, scale: dict[str, float] | None = None, seed: int = 0) -> Statistics:
    """What a pass would find where ``scale`` says how much each layer matters."""
    found = {}
    generator = torch.Generator().manual_seed(seed)
    for weight in find_weights(of):
        n, d = weight.shape
        by = (scale or {}).get(weight.name, 1.0)
        x = torch.randn(60, n, generator=generator, dtype=torch.float64) + 1
        g = torch.randn(60, d, generator=generator, dtype=torch.float64) * by**0.5
        fisher = (x.square().T @ g.square()) / 60
        with_bias = torch.cat([x, x.new_ones(60, 1)], 1)
        found[weight.name] = Measured(
            n,
            row_fisher=fisher.sum(1),
            column_fisher=fisher.sum(0),
            input_gram=x.T @ x / 60,
            input_mean=x.mean(0),
            fisher_gram=with_bias.T @ with_bias / 60,
            output_gram=g.T @ g / 60,
            samples=60,
            positions=60,
            columns=d,
        )
    return Statistics(found, 60)


def kinds(made: Plan) -> dict[str, str]:
    return {d.weight.name: type(d.recipe.method).__name__ for d in made.decisions}


def spent(made: Plan) -> int:
    return sum(d.budget_bytes for d in made.decisions)


KRONECKER = Recipe(SVD(), KroneckerFisher())
TOTAL = 4 * sum(n * d for n, d in SHAPES.values())


@pytest.mark.parametrize("importance", [KroneckerFisher(), RowFisher(), TwoSided()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("form", ["factors", "interpolative"])
@pytest.mark.parametrize("percent", [20, 50, 90, 100])
def test_bytes_go_where_they_save_loss(importance, form, percent) -> None:
    made_for = model()
    given = statistics(made_for, {"a": 1e6})
    made = plan(made_for, {"linear": Recipe(SVD(form), importance)}, keep=f"{percent}%", statistics=given)
    assert made.allocation == "loss"
    assert spent(made) <= TOTAL * percent // 100
    assert all(d.note for d in made.decisions)
    found = {d.weight.name: d for d in made.decisions}
    if percent >= 50:
        assert kinds(made)["a"] == "KeepDense"
        assert found["a"].budget_bytes == found["a"].weight.nbytes
    assert found["a"].budget_bytes / found["a"].weight.nbytes >= found["b"].budget_bytes / found["b"].weight.nbytes
    if percent == 100:
        assert set(kinds(made).values()) == {"KeepDense"}
    # What was planned is what is done: ranks and bytes.
    report = kflats.compress_(made_for, made, statistics=given, quiet=True)
    for decision, weight in zip(made.decisions, report.weights, strict=True):
        assert weight.bytes_after == decision.budget_bytes
        assert weight.dense == isinstance(decision.recipe.method, KeepDense)
        if not weight.dense:
            assert decision.note.startswith(f"rank {weight.bands[0].rank} of {weight.full_rank}")
            assert float(decision.note.rsplit(" ", 1)[1]) == pytest.approx(weight.error, rel=0.02, abs=1e-6)


def test_by_loss_less_is_lost_than_uniformly() -> None:
    lost = {}
    for allocation in ("uniform", "loss"):
        given = statistics(model(), {"a": 100.0, "c": 0.01})
        report = kflats.compress_(
            m := model(), {"linear": KRONECKER}, keep="50%", statistics=given, allocation=allocation, quiet=True
        )
        original = model()
        total = 0.0
        for w in report.weights:
            weighting = KroneckerFisher().weigh(given.of(w.name))
            layer = m[w.name]
            now = layer.weight if isinstance(layer, nn.Linear) else layer.matrix.dense().T
            error = (original[w.name].weight - now).T.detach().double()
            total += float(((weighting.left @ error @ weighting.right) * error).sum())
        lost[allocation] = total
    assert lost["loss"] < 0.7 * lost["uniform"]


def test_a_share_of_ranks_is_the_papers_ratio() -> None:
    made = plan(model(), {"[abc]": SVD()}, keep="33% ranks")
    assert str(made.budget) == "33% ranks"
    assert [d.budget_bytes for d in made.decisions] == [8 * (n + d) * 4 for n, d in ((24, 24), (24, 48), (48, 24))]
    assert [d.note for d in made.decisions] == ["rank 8 of 24"] * 3
    report = kflats.compress_(model(), made, quiet=True)
    assert [w.kept for w in report.weights] == ["8 of 24"] * 3


def test_what_would_not_shrink_at_its_rank_stays_dense_and_the_report_says_so() -> None:
    report = kflats.compress_(model(), {"linear": SVD()}, keep="60% ranks", quiet=True)
    found = {w.name: w for w in report.weights}
    assert [name for name, w in found.items() if w.dense] == ["a", "head"]  # 14 of 24: 24 x 24 < 14 x 48
    assert "rank 14 of 24 takes 2.7 kB of 2.3 kB, so it would not shrink" in found["a"].note
    assert "a: dense: rank 14 of 24" in str(report)
    assert found["b"].kept == "14 of 24"


def test_ranks_shared_by_loss_take_the_same_bytes() -> None:
    given = statistics(model(), {"b": 50.0})
    even = plan(model(), {"[abc]": KRONECKER}, keep="40% ranks", statistics=given, allocation="uniform")
    made = plan(model(), {"[abc]": KRONECKER}, keep="40% ranks", statistics=given)
    assert made.allocation == "loss"
    assert spent(even) - 24 * 2 * 4 <= spent(made) <= spent(even)
    assert made.decisions[1].budget_bytes > even.decisions[1].budget_bytes


@pytest.mark.parametrize("budget", ["1500 params", "7kB"])
def test_numbers_and_bytes_are_kept_to(budget) -> None:
    for codec in (Float(), Float("float16")):
        recipe = Recipe(SVD("interpolative"), KroneckerFisher(), codec)
        report = kflats.compress_(model(), {"[abc]": recipe}, keep=budget, statistics=statistics(model()), quiet=True)
        values = sum(w.values_after for w in report.weights)
        if "params" in budget:
            assert 1500 - 72 < values <= 1500
        else:
            assert 7000 - 72 * 4 < report.bytes_after <= 7000


def test_a_layer_without_a_bias_gets_one_and_pays_for_it() -> None:
    bare = model(bias=False)
    given = statistics(bare)
    # A mean input takes a rank of its own, 48 + 24 numbers; a bias of 24 takes its place.
    made = plan(bare, {"c": KRONECKER}, keep="56%", statistics=given)
    assert made.decisions[0].recipe.importance.centred
    report = kflats.compress_(bare, made, statistics=given, quiet=True)
    assert bare["c"].bias is not None
    assert 0.56 * 48 * 24 * 4 - 72 * 4 < report.bytes_after <= 0.56 * 48 * 24 * 4
    assert report.weights[0].values_after == sum(p.numel() for p in bare["c"].parameters())


def test_the_bias_takes_the_mean_error() -> None:
    made_for, original = model(), model()
    given = statistics(made_for)
    kflats.compress_(made_for, {"b": KRONECKER}, keep="40%", statistics=given, quiet=True)
    gram = given.of("b").fisher_gram
    mean = (gram[-1, :-1] / gram[-1, -1]).float()
    torch.testing.assert_close(made_for["b"](mean), original["b"](mean), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [SVD(), SVD("interpolative"), Flats(k=2)], ids=str)
@pytest.mark.parametrize(
    "importance",
    [kind() for kind in IMPORTANCES.kinds if kind().needs and not kind.needs_tokenizer],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("rows", ["in_features", "out_features"])
def test_every_importance_with_every_method_it_fits(method, importance, rows) -> None:
    recipe = Recipe(method, importance, matrix_rows=rows)
    made_for = model()
    given = statistics(made_for)
    try:
        report = kflats.compress_(made_for, {"b": recipe}, keep="55%", statistics=given, quiet=True)
    except KflatsError as error:
        assert "cannot take the importance" in str(error)  # noqa: PT017
        assert isinstance(method, Flats)
        changed = {"SVD()": {"method": SVD()}, "RowFisher()": {"importance": RowFisher()}}
        changed |= {"Uniform()": {"importance": Uniform()}, "matrix_rows=": {"matrix_rows": "out_features"}}
        advised = [change for way, change in changed.items() if way in str(error.hint)]
        assert len(advised) >= 2
        for change in advised:  # what the message advises works
            kflats.compress_(model(), {"b": replace(recipe, **change)}, keep="55%", statistics=given, quiet=True)
        return
    (told,) = report.weights
    assert told.matrix_rows == rows
    assert told.bytes_after <= 0.55 * told.bytes_before
    assert 0 < told.error < 1
    weighting = importance.weigh(given.of("b"))
    layer = made_for["b"]
    dense = layer.matrix.dense() if rows == "in_features" else layer.matrix.dense().T
    original = model()["b"].weight.T.detach().double()
    error = original - dense.detach().double()
    assert told.error == pytest.approx(measure_by(weighting, error) / measure_by(weighting, original), rel=1e-3)
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer(x), x @ dense + layer.bias, rtol=1e-4, atol=1e-4)


def measure_by(weighting, error):
    """The objective, written out."""
    n, d = error.shape
    left = torch.eye(n).double() if weighting.left is None else weighting.left
    right = torch.eye(d).double() if weighting.right is None else weighting.right
    left, right = (torch.diag(m) if m.ndim == 1 else m for m in (left, right))
    return float(torch.trace(right @ error.T @ left @ error))


def test_narrow_layers_that_a_pattern_finds_stay_dense_and_named_ones_are_refused() -> None:
    made = plan(model(), {"linear": SVD()}, keep="30%")
    assert kinds(made) == {"a": "SVD", "b": "SVD", "c": "SVD", "head": "KeepDense"}
    assert spent(made) == TOTAL * 30 // 100
    with pytest.raises(KflatsError, match=r"head: a budget of .* cannot hold"):
        kflats.compress_(model(), {"a": SVD(), "head": SVD()}, keep="30%", quiet=True)


def test_what_is_kept_dense_on_request_counts() -> None:
    made = plan(model(), {"linear": SVD(), "a": KeepDense()}, keep="60%")
    assert kinds(made)["a"] == "KeepDense"
    assert spent(made) == TOTAL * 60 // 100
    assert made.decisions[0].note == "dense: asked for"
    with pytest.raises(KflatsError, match=r"those that stay dense or .*b take .* bytes \(dense: asked for\)"):
        plan(model(), {"linear": SVD(), "b": KeepDense()}, keep="10%")


@pytest.mark.parametrize(("keep", "bits"), [("40%", 8), ("12.4%", 4)])
def test_auto_rounds_a_layer_that_data_never_reaches_as_finely_as_the_budget_is(keep: str, bits: int) -> None:
    given = statistics(model(), {"c": 0.0})
    made = plan(model(), {"linear": Recipe(Auto(), KroneckerFisher())}, keep=keep, statistics=given)
    recipe = made.decisions[2].recipe
    assert (recipe.method, recipe.codec.bits) == (KeepDense(), bits)
    assert made.decisions[2].note.startswith(f"{bits} bits: the calibration data does not reach it")


def test_data_that_never_reaches_a_layer_leaves_it_dense_or_is_refused() -> None:
    given = statistics(model(), {"c": 0.0})
    made = plan(model(), {"linear": KRONECKER}, keep="60%", statistics=given)
    assert made.decisions[2].note == "dense: the calibration data does not reach it, or no loss depends on it"
    assert kinds(made)["c"] == "KeepDense"
    with pytest.raises(KflatsError, match="c: the calibration data does not reach this weight"):
        plan(model(), {"c": KRONECKER, "a": KRONECKER}, keep="60%", statistics=given)
    uniform = Recipe(SVD(), KroneckerFisher(unreached="uniform"))
    made = plan(model(), {"[abc]": uniform}, keep="50%", statistics=given)
    assert made.allocation == "loss"
    whole = sum(d.weight.nbytes for d in made.decisions)
    assert 0.45 * made.decisions[2].weight.nbytes < made.decisions[2].budget_bytes <= 0.5 * 24 * 48 * 4
    assert 0.48 * whole < spent(made) <= 0.5 * whole
    assert "no gradient reached it: an equal share" in made.decisions[2].note
    asked = plan(model(), {"[abc]": uniform}, keep="33% ranks", statistics=given)
    equal = plan(model(), {"[abc]": uniform}, keep="33% ranks", statistics=given, allocation="uniform")
    assert spent(asked) <= spent(equal)
    made = plan(model(), {"linear": uniform}, keep="60%", statistics=given, allocation="uniform")
    assert kinds(made)["c"] == "SVD"


@pytest.mark.parametrize("importance", [InputGram(), Uniform()])
def test_errors_that_are_no_loss_are_not_compared(importance) -> None:
    given = statistics(model())
    with pytest.raises(KflatsError, match=rf"cannot compare {type(importance).__name__}.*units of a loss"):
        plan(model(), {"[abc]": Recipe(SVD(), importance)}, keep="50%", statistics=given, allocation="loss")
    made = plan(model(), {"[abc]": Recipe(SVD(), importance)}, keep="50%", statistics=given)
    assert made.allocation == "uniform"
    made = plan(model(), {"[ab]": KRONECKER, "c": Recipe(SVD(), importance)}, keep="50%", statistics=given)
    assert made.allocation == "uniform"
    unread = [{"input": torch.full((1, 1), torch.nan)}]  # nothing is measured before it is refused
    with pytest.raises(KflatsError, match="allocation='best'"):
        plan(model(), {"a": KRONECKER}, keep="50%", allocation="best", calibration=unread)


def test_flats_are_given_bytes_by_loss_too() -> None:
    given = statistics(model(), {"b": 1e4})
    recipe = Recipe(Flats(k=2), RowFisher())
    made = plan(model(), {"[abc]": recipe}, keep="50%", statistics=given)
    assert made.allocation == "loss"
    report = kflats.compress_(model(), made, statistics=given, quiet=True)
    assert report.bytes_after <= spent(made) <= (24 * 24 + 2 * 24 * 48) * 4 // 2
    assert made.decisions[1].budget_bytes > 0.5 * made.decisions[1].weight.nbytes


def test_a_budget_below_rank_one_says_what_it_takes() -> None:
    with pytest.raises(KflatsError, match="cannot hold the least of all 3 weights"):
        plan(model(), {"[abc]": KRONECKER}, keep="3%", statistics=statistics(model()))


def test_uniform_shares_that_hold_no_rank_of_any_weight_are_refused() -> None:
    """Not left dense, all of them, above the budget."""
    for names in ("linear", "[abc]"):
        with pytest.raises(KflatsError, match="spent on weights that stay dense"):
            plan(model(), {names: SVD()}, keep="1%")


def test_small_heads_under_uniform_shares_are_told_of() -> None:
    net = nn.ModuleDict({"encoder": nn.Linear(64, 64), "classifier": nn.Linear(64, 3)})
    for budget in ("33% ranks", "70%"):
        with pytest.warns(KflatsWarning, match="^classifier: equal shares cut the rank.*some outputs are lost") as said:
            plan(net, {"linear": SVD()}, keep=budget)
        assert "--allocation loss weighs its loss" in as_options(str(said[0].message))
        for other in (
            {"encoder": SVD()},
            {"linear": SVD(), "classifier": KeepDense()},
            {"encoder": SVD(), "classifier": SVD()},
        ):
            plan(net, other, keep=budget)
    codes = plan(net, {"linear": Recipe(KeepDense(), codec=Integer(bits=8))}, keep="70%")
    assert {decision.recipe.codec for decision in codes.decisions} == {Integer(bits=8)}
    judged = plan(net, {"linear": KRONECKER}, keep="33% ranks", statistics=statistics(net))
    assert judged.allocation == "loss"
