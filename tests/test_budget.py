"""A budget has one meaning, is never exceeded, and nonsense is refused with the sizes in the message."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.model.weights import Weight, WeightUse
from kflats.planning.strategies import split
from kflats.recipe.budget import Budget, parse_budget


def weight(
    rows: int = 30522, columns: int = 384, name: str = "embeddings.word_embeddings", itemsize: int = 4
) -> Weight:
    dtype = {2: "float16", 4: "float32", 8: "float64"}[itemsize]
    return Weight(name, (WeightUse(name, "embedding"),), (rows, columns), dtype, rows * columns * itemsize)


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("60%", "fraction", 0.6),
        (" 60 % ", "fraction", 0.6),
        ("100%", "fraction", 1.0),
        ("0.5%", "fraction", 0.005),
        ("12MB", "bytes", 12_000_000),
        ("12 mb", "bytes", 12_000_000),
        ("12MiB", "bytes", 12 * 2**20),
        ("1.5kB", "bytes", 1500),
        ("2GB", "bytes", 2 * 10**9),
        ("7B", "bytes", 7),
        ("1e6 B", "bytes", 1_000_000),
        ("5.2M params", "params", 5_200_000),
        ("5.2 M params", "params", 5_200_000),
        ("5200000 params", "params", 5_200_000),
        ("5200000 parameters", "params", 5_200_000),
        ("1B params", "params", 10**9),
    ],
)
def test_forms(text: str, kind: str, amount: float) -> None:
    assert parse_budget(text) == Budget(kind, amount)
    assert parse_budget(text, "weights") is not parse_budget(text)
    if kind != "params":
        assert parse_budget(text, "file").scope == "file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.6", "ambiguous"),
        ("12", "ambiguous"),
        ("0%", "keeps nothing"),
        ("-5%", "keeps nothing"),
        ("-12MB", "keeps nothing"),
        ("0.2 B", "keeps nothing"),
        ("nan%", "keeps nothing"),
        ("nan", "ambiguous"),
        ("inf MB", "larger than any model"),
        ("101%", "more than the original.*101%, larger allowed"),
        ("201%, larger allowed", "more than twice the original"),
        ("103% of all files, larger allowed", "not supported"),
        ("50% ranks, larger allowed", "not supported"),
        ("1e300 GB", "larger than any model"),
        ("1e999999999 MB", "is not a budget"),
        ("", "is not a budget"),
        ("MB", "is not a budget"),
        ("1,5MB", "is not a budget"),
        ("12 elephants", "unknown unit"),
        ("12 MB params", "unknown unit"),
        ("60% params", "unknown unit"),
        ("5 params of all files", "count of parameters"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(KflatsError, match=says) as caught:
        parse_budget(text)
    assert caught.value.hint or caught.value.cause


@pytest.mark.parametrize("text", ["8e6", "0MB", "8,5MB"])
@pytest.mark.parametrize(("scope", "form", "other"), [("file", "2 bits", "% ranks"), ("weights", "% ranks", "bits")])
def test_what_is_offered_instead_is_of_the_same_scope(text: str, scope: str, form: str, other: str) -> None:
    with pytest.raises(KflatsError) as caught:
        parse_budget(text, scope)
    assert form in caught.value.hint
    assert other not in caught.value.hint


@pytest.mark.parametrize("value", [0.6, 12_000_000, None, True, b"60%"])
def test_only_text_or_a_budget(value: object) -> None:
    with pytest.raises(KflatsError, match="not a budget"):
        parse_budget(value)  # type: ignore[arg-type]


def test_a_budget_is_handed_back() -> None:
    budget = Budget("bytes", 5, "file")
    assert parse_budget(budget) is budget


@pytest.mark.parametrize(
    "arguments",
    [
        ("share", 0.5),
        ("fraction", float("nan")),
        ("bytes", float("inf")),
        ("bytes", 1.5),
        ("params", -3),
        ("params", 5, "file"),
    ],
)
def test_values_check_themselves(arguments: tuple[object, ...]) -> None:
    with pytest.raises(KflatsError):
        Budget(*arguments)  # type: ignore[arg-type]


@given(st.one_of(
    st.builds(lambda n: Budget("bytes", n), st.integers(1, 2**50)),
    st.builds(lambda n: Budget("params", n), st.integers(1, 2**50)),
    st.builds(lambda n: Budget("fraction", float(f"{n}e-5")), st.integers(1, 10**5)),
    st.builds(lambda n: Budget("bytes", n, "file"), st.integers(1, 2**50)),
    st.builds(lambda n: Budget("fraction", n / 16, "file"), st.integers(1, 16)),
    st.builds(lambda n: Budget("fraction", n / 16, larger=True), st.integers(1, 32)),
    st.builds(lambda n: Budget("params", n, larger=True), st.integers(1, 2**50)),
))  # fmt: skip
def test_text_round_trip(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget


def test_meaning() -> None:
    table = weight()
    assert table.nbytes == 46_881_792
    assert parse_budget("60%").stored_bytes([table], 90_000_000, 4) == 28_129_075  # rounded down
    assert parse_budget("12MB").stored_bytes([table], 90_000_000, 4) == 12_000_000
    assert parse_budget("5.2M params").stored_bytes([table], 90_000_000, 4) == 20_800_000
    assert parse_budget("5.2M params").stored_bytes([table], 90_000_000, 2) == 10_400_000
    assert parse_budget("12MB").counts_labels
    assert not parse_budget("5.2M params").counts_labels


def test_a_file_budget_pays_for_the_rest_first() -> None:
    table, file = weight(), 90_868_376
    allowed = parse_budget("60MB", "file").stored_bytes([table], file, 4)
    rest = file - table.nbytes
    assert allowed + rest < 60_000_000 < allowed + rest + 1000  # the rest, and room for a longer header
    assert parse_budget("100%", "file").stored_bytes([table], file, 4) <= table.nbytes
    half = parse_budget("50%", "file").stored_bytes([table], file, 4)
    assert half + rest < file / 2


@pytest.mark.parametrize(
    ("text", "scope", "says"),
    [
        ("50MB", "weights", r"50,000,000 bytes.*46,881,792 bytes"),
        ("12M params", "weights", r"48,000,000 bytes.*46,881,792 bytes"),
        ("40MB", "file", r"40,000,000 bytes.*everything else takes 43,9\d\d,\d\d\d of 90,868,376"),
        ("91MB", "file", r"91,000,000 bytes.*90,868,376 bytes"),
    ],
)
def test_sizes_that_cannot_be_are_named(text: str, scope: str, says: str) -> None:
    with pytest.raises(KflatsError) as caught:
        parse_budget(text, scope).stored_bytes([weight()], 90_868_376, 4)
    assert re.search(says, str(caught.value))


def test_a_model_stored_narrower_than_loaded_is_refused() -> None:
    with pytest.raises(KflatsError, match="narrower type"):
        parse_budget("40MB", "file").stored_bytes([weight()], 46_000_000, 4)


def test_no_weights() -> None:
    with pytest.raises(KflatsError, match="no weights are named"):
        parse_budget("60%").stored_bytes([], 10, 4)


shapes = st.lists(
    st.tuples(st.integers(1, 10**6), st.integers(1, 4096), st.sampled_from([2, 4, 8])), min_size=1, max_size=12
)


@given(shapes, st.fractions(0, 1))
def test_the_split_is_exact_and_proportional(chosen: list[tuple[int, int, int]], part: object) -> None:
    weights = [weight(r, c, f"w{i}", itemsize) for i, (r, c, itemsize) in enumerate(chosen)]
    total = sum(w.nbytes for w in weights)
    budget = max(1, int(part * total))  # type: ignore[operator]
    parts = split(budget, [w.nbytes for w in weights])
    assert sum(parts) == budget
    for one, own in zip(weights, parts, strict=True):
        assert 0 <= own <= one.nbytes
        assert abs(own - budget * one.nbytes / total) <= 1 + 1e-9 * own


@given(shapes, st.integers(1, 10**5))
def test_a_share_is_never_exceeded(chosen: list[tuple[int, int, int]], thousandths: int) -> None:
    weights = [weight(r, c, f"w{i}", itemsize) for i, (r, c, itemsize) in enumerate(chosen)]
    total = sum(w.nbytes for w in weights)
    budget = parse_budget(f"{thousandths / 1000}%")
    if thousandths * total < 10**5:
        with pytest.raises(KflatsError, match="keeps nothing"):
            budget.stored_bytes(weights, total, 4)
    else:
        allowed = budget.stored_bytes(weights, total, 4)
        assert allowed * 10**5 <= thousandths * total < (allowed + 1) * 10**5


def test_a_share_of_ranks_is_no_number_of_bytes() -> None:
    assert str(parse_budget("33% ranks")) == "33% ranks"
    assert parse_budget(" 100 % Ranks") == Budget("ranks", 1.0)
    assert round(parse_budget(str(Budget("ranks", 127 / 384))).amount * 384, 9) == 127
    for make in (
        lambda: parse_budget("101% ranks"),
        lambda: parse_budget("33 ranks"),
        lambda: parse_budget("33% ranks", scope="file"),
        lambda: parse_budget("33% ranks").stored_bytes([Weight("a", (), (4, 4), "float32", 64)], 100, 4),
    ):
        with pytest.raises(KflatsError, match="ranks"):
            make()


def test_a_file_budget_pays_for_the_bias_that_a_layer_may_gain() -> None:
    budget = parse_budget("50kB", "file")

    def left(role: str, bias: bool) -> int:
        one = Weight("dense", (WeightUse("dense", role),), (100, 200), "float32", 80_000, bias)
        return budget.stored_bytes([one], 90_000, 4)

    assert left("linear", True) == left("embedding", False)
    assert left("linear", True) - left("linear", False) > len("dense") + 60
