"""Importance: the weights are what the formulas say, no row starves, and what is missing is asked for."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kflats_toys import LogCounts

import kflats
from kflats.common.errors import KflatsError, NoGradientSignalError
from kflats.importance import (
    Importance,
    InputGram,
    KroneckerFisher,
    RowFisher,
    TokenCounts,
    TokenFisher,
    TwoSided,
    Uniform,
    ZipfPrior,
    from_name,
)
from kflats.importance.protocol import Measured
from kflats.recipe.recipe import from_json, to_json

F64 = torch.float64
IMPORTANCES = {
    "uniform": Uniform(),
    "counts": TokenCounts(),
    "counts as they are": TokenCounts(power=1, smoothing=0, floor=1e-9),
    "zipf": ZipfPrior(),
    "zipf, full": ZipfPrior(power=1),
    "of another package": LogCounts(),
}
"""A new importance is a new row."""

EVERY = pytest.mark.parametrize("importance", IMPORTANCES.values(), ids=IMPORTANCES.keys())


def measured(n=50, seed=0, head=False):
    gen = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 30, (n,), generator=gen)
    prior = torch.rand(n, generator=gen, dtype=F64)
    return Measured(n, counts, prior / prior.sum(), head)


@EVERY
@pytest.mark.parametrize("head", [False, True])
def test_every_row_gets_a_finite_weight_above_zero(importance, head):
    found = importance.weigh(measured(head=head))
    assert found.kinds <= {"rows"}
    w = torch.ones(50, dtype=F64) if found.row_weights is None else found.row_weights
    assert w.shape == (50,)
    assert w.dtype == F64
    assert bool((w > 0).all())
    assert bool(torch.isfinite(w).all())


@EVERY
def test_a_value_is_frozen_and_survives_json(importance, toys):
    assert isinstance(importance, Importance)
    assert from_json(json.loads(json.dumps(to_json(importance)))) == importance
    assert hash(importance) == hash(dataclasses.replace(importance))


@given(power=st.floats(0, 4), smoothing=st.floats(0, 1), floor=st.floats(1e-6, 10), seed=st.integers(0, 100))
def test_token_counts_are_the_formula(power, smoothing, floor, seed):
    m = measured(seed=seed)
    found = TokenCounts(power, smoothing, floor).weigh(m).row_weights
    counted = m.counts.to(F64) / m.counts.sum()
    expected = (50 * ((1 - smoothing) * counted + smoothing * m.prior + floor / 50)) ** power
    torch.testing.assert_close(found, expected)
    assert float(found.min()) >= floor**power * (1 - 1e-9)


@given(power=st.floats(0, 4), floor=st.floats(1e-6, 10), seed=st.integers(0, 100))
def test_a_zipf_prior_is_the_formula(power, floor, seed):
    m = measured(seed=seed)
    torch.testing.assert_close(ZipfPrior(power, floor).weigh(m).row_weights, (50 * m.prior + floor) ** power)


def test_the_length_of_the_texts_does_not_matter_only_their_shares():
    short = measured()
    long = dataclasses.replace(short, counts=short.counts * 1000)
    torch.testing.assert_close(TokenCounts().weigh(short).row_weights, TokenCounts().weigh(long).row_weights)


def test_power_zero_is_uniform_and_power_one_keeps_proportions():
    assert TokenCounts(power=0).weigh(measured()).row_weights.tolist() == [1.0] * 50
    assert Uniform().weigh(measured()).kinds == frozenset()
    w = TokenCounts(power=1, smoothing=0, floor=1e-12).weigh(Measured(3, torch.tensor([8, 2, 0]))).row_weights
    assert float(w[0] / w[1]) == pytest.approx(4)


def test_without_a_prior_counts_are_smoothed_evenly():
    w = TokenCounts(power=1, smoothing=0.5, floor=0.1).weigh(Measured(2, torch.tensor([4, 0]))).row_weights
    assert w.tolist() == pytest.approx([0.5 * 2 + 0.5 + 0.1, 0.5 + 0.1])


def test_frequent_rows_weigh_more_and_a_smaller_power_levels():
    w, flat = TokenCounts(power=1).weigh(measured()).row_weights, TokenCounts(power=0.25).weigh(measured()).row_weights
    assert float(w.max() / w.min()) > float(flat.max() / flat.min()) > 1


@pytest.mark.parametrize("importance", [TokenCounts(), ZipfPrior()])
def test_a_tied_head_adds_an_even_share_of_every_row(importance):
    alone, tied = importance.weigh(measured()).row_weights, importance.weigh(measured(head=True)).row_weights
    torch.testing.assert_close(tied, alone / alone.mean() + 1)
    assert float(tied.mean()) == pytest.approx(2)  # half of the weight is the head's, row by row the same
    assert float(tied.min()) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenCounts(power=-1), "power=-1 "),
        (lambda: TokenCounts(power=5), "power=5 "),
        (lambda: TokenCounts(power=float("nan")), "power=nan "),
        (lambda: TokenCounts(floor=0), "floor=.* is not supported"),
        (lambda: TokenCounts(floor=float("inf")), "floor=.* is not supported"),
        (lambda: TokenCounts(floor=float("nan")), "floor=.* is not supported"),
        (lambda: TokenCounts(smoothing=1.5), "smoothing=1.5 "),
        (lambda: TokenCounts(smoothing=float("nan")), "smoothing=nan "),
        (lambda: ZipfPrior(power=-0.5), "power=-0.5 "),
        (lambda: ZipfPrior(floor=0), "floor=.* is not supported"),
        (lambda: TokenCounts().weigh(Measured(3)), "needs texts to count"),
        (lambda: TokenCounts().weigh(Measured(3, torch.zeros(3))), "hold no token"),
        (lambda: ZipfPrior().weigh(Measured(3)), "needs the model's tokenizer"),
        (lambda: from_name("fisher"), "uniform, counts, zipf"),
        (lambda: from_name("uniform", power=1), "has no power"),
        (lambda: from_name("kronecker", power=1), "has no power"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(KflatsError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("uniform", {}, Uniform()),
        (" Counts", {"power": 1.0}, TokenCounts(power=1.0)),
        ("zipf", {"power": 0.75}, ZipfPrior(power=0.75)),
        ("row-fisher", {}, RowFisher()),
        ("two-sided", {}, TwoSided()),
        ("input-gram", {"centred": False}, InputGram(centred=False)),
        ("kronecker", {}, KroneckerFisher()),
    ],
)
def test_names_of_the_command_line(name, options, value):
    assert from_name(name, **options) == value


@pytest.mark.parametrize("kind", kflats.importance.IMPORTANCES.kinds)
def test_every_importance_says_what_must_be_measured(kind):
    fields = {field.name for field in dataclasses.fields(Measured)}
    assert kind().needs <= fields - {"rows", "columns", "head", "counts", "prior"}
    if kind().needs:
        with pytest.raises(KflatsError, match="needs"):
            kind().weigh(Measured(4, columns=3))


@pytest.mark.parametrize("damping", [0.0, 0.1, 1.0, 30.0])
def test_damping_moves_importance_between_columns_and_makes_none(damping):
    """A table's errors are added to those of other layers: rows count as counts say, columns by S's own trace."""
    gen = torch.Generator().manual_seed(0)
    g = torch.randn(40, 5, generator=gen, dtype=F64) * torch.tensor([3.0, 1.0, 1.0, 0.1, 0.0], dtype=F64)
    counts = torch.tensor([100.0, 10.0, 1.0, 0.0], dtype=F64)
    measured = Measured(
        4, counts=counts, prior=counts / counts.sum(), fisher_gram=counts, output_gram=g.T @ g, columns=5
    )
    found = TokenFisher(damping=damping).weigh(measured)
    rows = TokenCounts().weigh(measured).left
    torch.testing.assert_close(found.left, rows / rows.sum())
    assert float(found.right.trace()) == pytest.approx(float((g.T @ g).trace()))
    values = torch.linalg.eigvalsh(found.right)
    assert float(values[0]) >= damping / (1 + damping) * float(values.mean()) * (1 - 1e-9)


@pytest.mark.parametrize(("samples", "times"), [(0, 1.0), (4, 5.0), (40, 1.0)])
def test_grams_of_few_samples_are_damped_more(samples: int, times: float) -> None:
    """Of sixty neurons and four samples five times as much; the bias' row is no neuron."""
    size, damping = 60, 0.1
    one = torch.zeros(size + 1)
    one[0] = one[-1] = 1.0
    direction = torch.outer(one[:-1], one[:-1])
    inputs = torch.outer(one, one) + torch.diag(one)
    found = KroneckerFisher(damping=damping).weigh(
        Measured(size, fisher_gram=inputs, output_gram=direction, columns=size, samples=samples)
    )
    for side in (found.left, found.right):
        values = torch.linalg.eigvalsh(side)
        kept = float(values[-1] - values[0])
        assert float(values[0]) == pytest.approx(times * damping * kept / size, rel=1e-6)
    tokens = TokenFisher(damping=damping).weigh(
        Measured(
            size,
            prior=torch.ones(size),
            counts=torch.ones(size),
            fisher_gram=torch.ones(size),
            output_gram=direction,
            columns=size,
            samples=samples,
        )
    )
    assert float(tokens.right.trace()) == pytest.approx(1.0)


@pytest.mark.parametrize("importance", [InputGram(), KroneckerFisher(), KroneckerFisher(damping=0.05)])
@pytest.mark.parametrize("noise", [3e-8, 1e-5])
def test_inputs_that_hardly_vary_have_a_metric(importance: InputGram | KroneckerFisher, noise: float) -> None:
    """What is left beside their mean is rounding, of either sign; a metric has no negative direction."""
    draws = torch.Generator().manual_seed(0)
    mean = torch.rand(20, generator=draws) + 0.5
    rounding = noise * torch.randn(21, 21, generator=draws)
    wide = torch.outer(both := torch.cat([mean, torch.ones(1)]), both) + rounding + rounding.T
    gram = wide[:-1, :-1]
    weighting = importance.weigh(
        Measured(20, input_gram=gram, input_mean=mean, fisher_gram=wide, output_gram=torch.eye(4))
    )
    assert weighting.left is not None
    values = torch.linalg.eigvalsh(weighting.left)
    assert float(values[0]) >= -1e-5 * float(values.sum())


@pytest.mark.parametrize("importance", [InputGram(), KroneckerFisher()])
def test_inputs_that_never_vary_leave_a_usable_metric(importance):
    x = torch.randn(40, 1) * torch.ones(40, 6)
    mean = x[0].double()
    noise = torch.randn(6, 6).double()
    # What is left after centring is rounding, below zero and above.
    gram = torch.outer(mean, mean) * (1 - 1e-6 + 1e-7 * (noise + noise.T))
    with_bias = torch.cat([torch.cat([gram, mean.unsqueeze(1)], 1), torch.cat([mean, mean.new_ones(1)]).unsqueeze(0)])
    found = importance.weigh(
        Measured(6, input_gram=gram, input_mean=mean, fisher_gram=with_bias,
                 output_gram=torch.eye(3, dtype=F64), columns=3)
    )  # fmt: skip
    assert float(torch.linalg.eigvalsh(found.left).min()) > 0
    assert float(found.left.trace()) < 3e-5 * float(gram.trace())


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenCounts(power="0.5"),
        lambda: TokenCounts(smoothing="a half"),
        lambda: TokenCounts(floor=True),
        lambda: ZipfPrior(floor=float("nan")),
        lambda: RowFisher(unreached="ignore"),
        lambda: TwoSided(floor=-1e-4),
        lambda: InputGram(damping=float("nan")),
        lambda: KroneckerFisher(damping=-1),
        lambda: from_json({"type": "KroneckerFisher", "damping": -1}),
    ],
)
def test_options_that_mean_nothing_are_refused_where_they_are_made(make):
    with pytest.raises(KflatsError, match="is not supported with"):
        make()


def test_statistics_measured_for_another_importance_are_told_of():
    with pytest.raises(KflatsError, match=r"needs the fisher gram.*another importance"):
        KroneckerFisher().weigh(Measured(3, row_fisher=torch.ones(3), columns=2))


def test_sums_that_cancelled_to_less_than_their_rounding_still_give_metrics():
    """As float32 leaves those of gradients before a batch normalisation: negative directions on both sides."""
    draws = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    noise = draws + draws.T
    gram = torch.diag(torch.tensor([1e-6] * 4 + [1.0], dtype=F64)) + 1e-2 * noise[:5, :5]
    outputs = torch.eye(3, dtype=F64) * 1e-3 + noise[5:, 5:] * 1e-2
    assert float(torch.linalg.eigvalsh(outputs).min()) < 0
    found = KroneckerFisher().weigh(Measured(4, fisher_gram=gram, output_gram=outputs, columns=3))
    assert float((gram[:4, :4] - torch.outer(gram[:4, 4], gram[:4, 4]) / gram[4, 4]).diagonal().min()) < 0
    for side in (found.left, found.right):
        assert float(torch.linalg.eigvalsh(side).min()) > -1e-9 * float(side.trace())
        assert float(side.trace()) > 0


def test_inputs_that_are_always_zero_reach_nothing():
    """The bias takes the whole error; the outputs have gradients all the same."""
    gram = torch.zeros(5, 5)
    gram[4, 4] = 2.0  # of the bias
    found = Measured(4, fisher_gram=gram, output_gram=torch.eye(3), samples=6, positions=6)
    with pytest.raises(NoGradientSignalError):
        KroneckerFisher().weigh(found)
    assert not KroneckerFisher(unreached="uniform").weigh(found).kinds
