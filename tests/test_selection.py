"""Selection: names, patterns and words mean what they say, and what does not fit is refused before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kflats import MESSI, SVD, Auto, Flats, KeepDense, KMeansSVD, Recipe, TokenCounts, Uniform, compress_
from kflats.codecs import Table, Transform
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.importance.protocol import Weighting
from kflats.model.weights import find_weight, find_weights
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import candidates
from kflats.planning.selection import select, weighting_form

MEASURED = CalibrationData(calibration=("a text",))
TOKENIZER: Any = object()
EVERYTHING = CalibrationData(("a text",), TOKENIZER, ("a text",))
LAYER = "encoder.layer.0.attention.self.query"


def named(model: nn.Module, *names: str, recipe: object = None) -> list[str]:
    found = select(model, dict.fromkeys(names, recipe or SVD()), MEASURED)
    return [chosen.weight.name for chosen in found]


def test_words_mean_roles(tiny_model) -> None:
    model = tiny_model("bert")
    layers = named(model, "linear")
    assert len(layers) == 7  # four of attention, two of the feed-forward part, and the pooler
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in layers)
    tables = named(model, "embeddings")
    assert tables == [f"embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")]
    assert set(named(model, "all")) == {*layers, *tables}
    with pytest.raises(KflatsError, match="no weights of the kind 'conv'"):
        named(model, "conv")


@pytest.mark.parametrize("name", ["linear", "all", "lay*"])
def test_layers_that_share_a_weight_are_named(name: str) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 8), "layer_too": nn.Linear(8, 8)})
    model["layer_too"].weight = model["layer"].weight
    with pytest.raises(
        KflatsError, match=r"cannot be compressed: layer, layer_too\. .*shared by several modules.*a copy"
    ):
        named(model, name)
    with pytest.raises(KflatsError, match="no weights of the kind 'conv'"):
        named(model, "conv")


@pytest.mark.parametrize("name", ["linear", "all", "lay*"])
def test_layers_that_share_a_weight_are_left_out_with_a_warning(name: str) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 8), "layer_too": nn.Linear(8, 8), "layer_own": nn.Linear(8, 8)})
    model["layer_too"].weight = model["layer"].weight
    with pytest.warns(KflatsWarning, match="not compressed: layer, layer_too, because .* shared by several modules"):
        assert named(model, name) == ["layer_own"]
    named_alone = select(model, {name: None, "layer_own": SVD()}, MEASURED)  # no warning: nothing more was asked for
    assert [one.weight.name for one in named_alone] == ["layer_own"]


def test_a_token_table_without_a_tokenizer_is_weighed_by_what_is_measured() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    of = {data.measurable: select(model, {"all": Auto()}, data)[0].recipe for data in (CalibrationData(), MEASURED)}
    assert of[False].importance == Uniform()
    measured = KroneckerFisher(damping=1.0, unreached="uniform")
    assert (of[True].importance, of[True].matrix_rows) == (measured, "in_features")
    # All errors are in units of the loss, so that they can be added up.
    assert all(weighting_form(one.recipe, one.weight).loss_units for one in select(model, {"all": Auto()}, MEASURED))


def test_a_tied_head_is_no_layer_that_shares_a_weight() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    model["head"].weight = model["words"].weight
    with pytest.raises(KflatsError, match="no weights of the kind 'linear'"):
        named(model, "linear")


def test_a_table_of_positions_is_no_token_embedding() -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.positions = nn.Linear(12, 8), nn.Embedding(20, 8)

        def get_input_embeddings(self) -> nn.Module:
            return self.patches

    chosen = select(Sees(), {"all": Auto()}, CalibrationData())
    assert [one.recipe.importance for one in chosen] == [Uniform(), Uniform()]
    with pytest.raises(KflatsError, match="no token embedding"):
        select(Sees(), None, CalibrationData())


def test_a_model_that_reads_more_than_ids_is_not_measured_with_ids(tiny_model, tiny_tokenizer) -> None:
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, bbox: Tensor | None = None) -> None:
        raise ValueError("You have to specify bbox")

    model, data = tiny_model("bert"), CalibrationData(tokenizer=tiny_tokenizer)
    assert {type(one.recipe.importance) for one in select(model, {"linear": Auto()}, data)} == {KroneckerFisher}
    model.forward = forward
    data = CalibrationData(tokenizer=tiny_tokenizer)
    with pytest.warns(KflatsWarning, match="nothing is measured: BertModel cannot be run .*: You have to specify bbox"):
        chosen = select(model, {"linear": Auto()}, data)
    assert {one.recipe.importance for one in chosen} == {Uniform()}


def test_a_tied_head_is_no_linear_layer(tiny_model) -> None:
    names = named(tiny_model("bert-lm"), "linear")
    assert "cls.predictions.transform.dense" in names
    assert not any("decoder" in name for name in names)
    assert "transformer.h.0.mlp.c_fc" in named(tiny_model("gpt2"), "linear")  # GPT-2's Conv1D
    assert named(tiny_model("gpt2"), "lm_head") == ["transformer.wte"]


def test_patterns_are_shell_patterns_over_paths_with_or_without_the_prefix(tiny_model) -> None:
    expected = [f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    assert named(tiny_model("bert"), "encoder.layer.*.attention.self.*") == expected
    assert named(tiny_model("bert-lm"), "encoder.layer.?.attention.self.*") == [f"bert.{name}" for name in expected]
    assert named(tiny_model("bert"), "*.[kv]*.weight") == expected[1:]
    with pytest.raises(KflatsError, match=r"(?s)no weight of the model matches 'layers.\*'.*word_embeddings"):
        named(tiny_model("bert"), "layers.*")


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_word(tiny_model) -> None:
    given = {LAYER: SVD(), "linear": Flats(k=2), "*.attention.*": KMeansSVD(k=2), "*.output.dense": KeepDense()}
    for recipes in (given, dict(reversed(given.items()))):
        found = {c.weight.name: c for c in select(tiny_model("bert"), recipes, MEASURED)}
        assert found[LAYER].recipe.method == SVD()
        assert found[LAYER].named
        assert found["encoder.layer.0.attention.self.key"].recipe.method == KMeansSVD(k=2)
        assert found["pooler.dense"].recipe.method == Flats(k=2)
        assert not found["pooler.dense"].named
    # Of two patterns the later one decides.
    found = {c.weight.name: c.recipe.method for c in select(tiny_model("bert"), given, MEASURED)}
    assert found["encoder.layer.0.attention.output.dense"] == KeepDense()


def test_a_layer_that_is_called_like_a_word_is_itself() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    assert named(model, "linear") == ["linear"]
    assert named(model, "*") == ["linear", "other"]


def test_two_places_of_one_weight_are_one_weight(tiny_model) -> None:
    assert len(named(tiny_model("gpt2"), "*wte*", "lm_h*")) == 1
    with pytest.raises(KflatsError, match="named twice"):
        named(tiny_model("gpt2"), "transformer.wte", "lm_head")


def test_with_calibration_data_the_default_for_layers_is_what_it_says(tiny_model) -> None:
    recipes = {LAYER: None, "embeddings.word_embeddings": None}
    with_data = [c.recipe for c in select(tiny_model("bert"), recipes, EVERYTHING)]
    assert with_data == [Recipe(SVD(), KroneckerFisher()), Recipe(Flats(), TokenCounts())]
    without = [c.recipe for c in select(tiny_model("bert"), recipes, CalibrationData())]
    assert without == [Recipe(Flats()), Recipe(Flats())]
    conv = nn.ModuleDict({"a": nn.Conv2d(3, 8, 3)})
    assert select(conv, {"conv": None}, CalibrationData())[0].recipe == Recipe(SVD())


@pytest.mark.parametrize(
    ("method", "importance", "rows", "fits"),
    [
        (SVD(), RowFisher(), "in_features", True),
        (SVD(), KroneckerFisher(), "out_features", True),
        (Flats(), RowFisher(), "in_features", True),
        (Flats(), TwoSided(), "in_features", True),
        (Flats(), InputGram(), "out_features", True),
        (Flats(), InputGram(), "in_features", False),
        (Flats(), KroneckerFisher(), "out_features", False),
        (MESSI(), RowFisher(), "in_features", True),
        (KMeansSVD(), RowFisher(), "in_features", True),
        (KMeansSVD(), TwoSided(), "in_features", False),
        (KMeansSVD(), RowFisher(), "out_features", False),
        (KeepDense(), KroneckerFisher(), "in_features", True),
    ],
    ids=str,
)
def test_what_a_method_cannot_take_is_refused_when_planning(tiny_model, method, importance, rows, fits) -> None:
    recipe = Recipe(method, importance, matrix_rows=rows)
    if fits:
        assert select(tiny_model("bert"), {LAYER: recipe}, MEASURED)[0].recipe == recipe
        return
    with pytest.raises(
        KflatsError, match=rf"{type(method).__name__}\(.* cannot take .*{type(importance).__name__}.*{LAYER}"
    ):
        select(tiny_model("bert"), {LAYER: recipe}, MEASURED)


def test_the_way_out_is_named(tiny_model) -> None:
    with pytest.raises(KflatsError, match='matrix_rows="out_features"'):
        select(tiny_model("bert"), {LAYER: Recipe(Flats(), InputGram())}, MEASURED)


def test_one_hot_inputs_make_row_weights_of_an_input_gram(tiny_model) -> None:
    model = tiny_model("bert")
    table = find_weight(model, "embeddings.word_embeddings")
    assert weighting_form(Recipe(Flats(), KroneckerFisher()), table).kinds == {"rows", "right"}
    assert select(model, {"embeddings": Recipe(Flats(k=2), KroneckerFisher())}, MEASURED)


@pytest.mark.parametrize(
    ("recipes", "given", "message"),
    [
        ({LAYER: Recipe(SVD(), KroneckerFisher())}, CalibrationData(), "needs calibration data"),
        ({LAYER: Recipe(SVD(), KroneckerFisher())}, CalibrationData(("a text",)), "needs calibration data"),
        ({LAYER: Recipe(SVD(), TokenCounts())}, EVERYTHING, "weighs tokens, but .* holds a linear layer"),
        (
            {"embeddings": Recipe(SVD(), Uniform(), matrix_rows="out_features")},
            CalibrationData(),
            "is not possible for",
        ),
        ({}, CalibrationData(), "no weight is named"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny_model, recipes, given, message) -> None:
    with pytest.raises(KflatsError, match=message):
        select(tiny_model("bert"), recipes, given)


def test_texts_with_a_tokenizer_are_data_to_measure_with(tiny_model) -> None:
    assert select(tiny_model("bert"), {LAYER: Recipe(SVD(), RowFisher())}, CalibrationData(("a text",), TOKENIZER))


def test_convolutions_take_pairs_or_codes() -> None:
    model = nn.ModuleDict({"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3, groups=8)})
    assert [c.weight.name for c in select(model, {"conv": SVD()}, CalibrationData())] == [
        "a"
    ]  # "b" is eight small matrices
    with pytest.raises(KflatsError, match="Flats\\(k=5\\) cannot be used for 'a'"):
        select(model, {"a": Flats()}, CalibrationData())
    coded = Recipe(Flats(), codec=Transform())
    assert select(model, {"a": coded}, CalibrationData())[0].recipe == coded
    with pytest.raises(KflatsError, match="grouped convolution"):
        select(model, {"b": SVD()}, CalibrationData())


def test_a_recipe_of_other_rows_is_refused() -> None:
    with pytest.raises(KflatsError, match="rows='columns'"):
        Recipe(SVD(), matrix_rows="columns")  # type: ignore[arg-type]
    assert weighting_form(Recipe(SVD(), RowFisher(), matrix_rows="out_features"), _weight()).right == "diagonal"


def _weight():
    return find_weight(nn.ModuleDict({"a": nn.Linear(3, 4)}), "a")


@pytest.mark.slow
def test_the_weight_whose_type_is_taken_for_the_models_keeps_it(tiny_model) -> None:
    """transformers reads ``model.dtype`` from the first parameter, and models cast their inputs to it."""
    model = tiny_model("bert")
    assert [weight.name for weight in find_weights(model) if weight.type_is_read] == ["embeddings.word_embeddings"]
    assert not any(weight.type_is_read for weight in find_weights(nn.Sequential(nn.Linear(8, 8))))
    rows = TensorRows(torch.randn(64, 16))
    table = Table(rows, Weighting(), torch.float32, SVD().spectrum(rows, Weighting()))
    for own_type in (False, True):
        ways = candidates(Recipe(Auto()), table, own_type=own_type)
        floats = {way.codec.torch_dtype(torch.float32) for way in ways if not way.codec.stores_integers}
        assert floats == {torch.float32 if own_type else torch.float16}
    compress_(model, {"all": Auto()}, keep="70%", quiet=True)
    assert model.dtype == torch.float32


def test_a_layer_to_whose_type_inputs_are_cast_keeps_it() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.plain = nn.Conv2d(3, 64, 8), nn.Conv2d(64, 64, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.plain(self.read(x.to(self.read.weight.dtype)))
            return out

    model = Casts()
    with torch.no_grad():  # of rank 3: no bytes are missing where low rank is offered
        for layer in (model.read, model.plain):
            n, d = layer.weight.shape[0], layer.weight[0].numel()
            layer.weight.copy_((torch.randn(n, 3) @ torch.randn(3, d)).view_as(layer.weight))
    compress_(model, {"all": Auto()}, keep="8%", quiet=True)
    assert model.read.matrix.weight.dtype == torch.float32
    assert model.plain.matrix.weight.dtype == torch.float16
    assert model(torch.randn(1, 3, 20, 20)).dtype == torch.float32
