"""Experts kept as one tensor: what is measured of them, against each product of each expert, and their codes."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, mixture_of_experts
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kflats import (
    SVD,
    Auto,
    Feedback,
    InputGram,
    KeepDense,
    KroneckerFisher,
    Recipe,
    RowFisher,
    Transform,
    Uniform,
    compress_,
)
from kflats.calibration import collect
from kflats.calibration.collect import measure
from kflats.calibration.experts import one_by_one, watched_experts
from kflats.calibration.hooks import ALONE, _rows
from kflats.calibration.measurements import FIELDS
from kflats.calibration.objectives import TaskLoss
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.export.integers import in_integers_
from kflats.io import load_model
from kflats.io.saving import save_model
from kflats.model import weights as weights_module
from kflats.model.weights import dense_weight, find_weights, held_matrices, is_parameter

transformers = pytest.importorskip("transformers", minversion="5.0")

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
_SIZES |= {"tie_word_embeddings": False, "num_experts_per_tok": 2}


def gpt_oss() -> Any:
    """Experts with biases, whose matrices are (inputs, outputs)."""
    sizes = _SIZES | {"num_local_experts": 4, "intermediate_size": 24, "head_dim": 8, "num_hidden_layers": 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval()


def nemotron() -> Any:
    """Experts without a gate."""
    sizes = _SIZES | {"num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 72, "intermediate_size": 24}
    sizes |= {"layers_block_type": ["moe", "attention", "moe"], "num_hidden_layers": 3, "head_dim": 8}
    sizes |= {"moe_shared_expert_intermediate_size": 24}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes)).eval()


MIXTURES = {"qwen": mixture_of_experts, "gpt-oss": gpt_oss, "nemotron": nemotron}


@pytest.fixture(params=MIXTURES)
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny mixture, with tensors of experts from 1,000 numbers on."""
    torch.manual_seed(0)
    return MIXTURES[request.param]()


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_RAW", 1000)


def experts(model: nn.Module) -> list[Any]:
    return [weight for weight in find_weights(model) if weight.places[0].role == "experts"]


def labelled(samples: int = 5, length: int = 7) -> list[dict[str, Tensor]]:
    """Two batches of texts of several lengths."""
    found = []
    for _ in range(2):
        ids = torch.randint(4, VOCABULARY, (samples, length))
        mask = (torch.arange(length) < torch.randint(2, length + 1, (samples, 1))).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


class Products(TorchFunctionMode):
    """Sees what each matrix of one tensor is multiplied with: inputs and, after backward, gradients of outputs."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.inputs: dict[int, list[Tensor]] = {}
        self.gradients: dict[int, list[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__):
            x, matrix = args[:2]
            if matrix.untyped_storage().data_ptr() == self.table.untyped_storage().data_ptr():
                expert = matrix.storage_offset() // self.table.stride(0)
                self.inputs.setdefault(expert, []).append(x.detach().double())
                output.register_hook(lambda g: self.gradients.setdefault(expert, []).append(g.double()))
        return output


def by_definition(model: Any, weight: Any, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The statistics of the definitions: each sample alone and without padding, by transformers' own loop."""
    model.set_experts_implementation("eager")
    table = model.get_parameter(weight.name)
    count, (n, d) = len(table), weight.shape
    gram, reads, squares = torch.zeros(n, n).double(), 0, torch.zeros(d).double()
    fisher, rows, columns, samples = torch.zeros(n, n).double(), torch.zeros(n).double(), squares.clone(), 0
    total = 0.0
    for batch in data:
        for s in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][s].sum())
            one = {key: value[s : s + 1, :length] for key, value in batch.items()}
            model.zero_grad()
            with Products(table) as seen:
                model(**one).loss.backward()
            for expert, inputs in seen.inputs.items():
                for x in inputs:
                    gram += x.T @ x
                    reads += len(x)
                for g in seen.gradients[expert]:
                    squares.view(count, -1)[expert] += g.square().sum(0)
                    total += float(g.square().sum())
            own = table.grad.double()
            own = own.transpose(1, 2) if model.config.model_type == "gpt_oss" else own  # (experts, outputs, inputs)
            own = own.reshape(d, n).T
            fisher += own @ own.T
            rows += own.square().sum(1)
            columns += own.square().sum(0)
            samples += 1
    means = {"input_gram": gram / reads, "output_gram": squares / samples, "fisher_gram": fisher / total}
    return means | {"row_fisher": rows / samples, "column_fisher": columns / samples}


def test_statistics_of_experts_are_those_of_each_sample_alone(model: Any) -> None:
    data, found = labelled(), experts(model)
    assert len(found) == 4
    needs = frozenset(FIELDS) - {"counts"}
    statistics = measure(model, found, data, needs=needs, objective=TaskLoss(), quiet=True)
    for weight in found[:2] + found[-2:]:
        expected, measured = by_definition(model, weight, data), statistics.of(weight.name)
        n = weight.shape[0]
        for field, value in expected.items():
            own = getattr(measured, field)
            own = own[:n, :n] if field == "fisher_gram" else own
            torch.testing.assert_close(own, value, rtol=1e-3, atol=1e-4 * float(value.abs().max()), msg=field)
        # No bias takes a part of the error.
        assert not measured.input_mean.any()
        assert not measured.fisher_gram[n].any()


def test_what_is_watched_computes_what_transformers_does(model: Any) -> None:
    ids = torch.randint(4, VOCABULARY, (3, 6))
    before = model(input_ids=ids).logits
    modules = {id(m): m for m in model.modules() if hasattr(m, "is_transposed")}.values()
    for module in modules:
        tokens: list[Tensor] = []
        watch = watched_experts(module, lambda call, tokens=tokens: tokens.append(call.tokens) or call.output)
        with one_by_one([module]), watch:
            torch.testing.assert_close(model(input_ids=ids).logits, before)
        assert sum(map(len, tokens)) == 2 * 2 * ids.numel()  # two matrices, two experts a token
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_do_not_depend_on_what_is_measured_together(
    dtype: torch.dtype, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of samples, layers beside experts, one weight at a time: with little memory, or all at once."""
    model, data = model.to(dtype), labelled(samples=35)
    some = [weight for weight in find_weights(model) if weight.places[0].role in ("linear", "experts")]
    needs = frozenset({"fisher_gram", "output_gram", "input_gram"})
    whole = measure(model, some, data, needs=needs, objective=TaskLoss(), quiet=True)
    monkeypatch.setattr(collect, "_least_room", lambda workers: 1)
    parts = measure(model, some, data, needs=needs, objective=TaskLoss(), quiet=True, scratch=tmp_path)
    for weight in some:
        for field in needs:
            one, other = (getattr(made.of(weight.name), field) for made in (whole, parts))
            assert torch.equal(one, other), (weight.name, field)


def test_a_norm_behind_the_experts_and_tokens_without_one() -> None:
    """Muse Spark's layer of experts; the number of the experts stands for none."""
    from transformers.models.muse_spark import modeling_muse_spark

    sizes = {"num_local_experts": 4, "moe_hidden_size": 16, "moe_intermediate_size": 12}
    config = SimpleNamespace(**sizes, hidden_act="silu", post_norm_eps=1e-6, _experts_implementation="eager")
    module = modeling_muse_spark.MuseSparkExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    hidden, weights = torch.randn(10, 16), torch.rand(10, 2)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(10)])
    assert (index == 4).any()
    before = module(hidden, index, weights)
    with one_by_one([module]):
        torch.testing.assert_close(module(hidden, index, weights), before)


def test_a_model_is_as_before_after_an_interruption(model: Any) -> None:
    """Interrupted in the middle of a measurement."""
    module = next(m for m in model.modules() if hasattr(m, "is_transposed"))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(model, experts(model), labelled(), needs=InputGram().needs, quiet=True)
    assert not {"forward", "_kflats_watched"} & vars(module).keys()


def test_a_part_of_the_tokens_is_measured_sample_by_sample() -> None:
    """As the text experts of ERNIE-4.5-VL have: another batch may have its tokens in other samples."""
    assert _rows(torch.zeros(8, 3), torch.zeros(12, 3), "experts", 8) == ALONE
    assert _rows(torch.zeros(16, 3), torch.zeros(24, 3), "experts", 8).fits(torch.zeros(16, 3), {}, 16)


def test_a_class_with_a_forward_of_its_own_is_not_measured() -> None:
    """Its formula is unknown."""
    model = mixture_of_experts()
    module = model.get_submodule(experts(model)[0].name.rpartition(".")[0])
    kind: Any = type(module)

    class Doubled(kind):
        def forward(self, *args: Tensor) -> Any:
            return 2 * super().forward(*args)

    module.__class__ = Doubled
    assert not any(weight.name.startswith("model.layers.0") for weight in experts(model))


def test_statistics_without_experts_leave_them_unmeasured() -> None:
    model = mixture_of_experts()
    linear = [weight for weight in find_weights(model) if weight.places[0].role == "linear"]
    found = measure(model, linear, labelled(), needs=KroneckerFisher().needs, objective=TaskLoss(), quiet=True)
    names = [weight.name for weight in experts(model)]
    recipes = {"all": KeepDense(), "linear": Auto(), "*experts.*": Auto()}
    with pytest.warns(KflatsWarning, match="not measured: .*experts.*statistics lack them"):
        report = compress_(model, recipes, keep="50%", statistics=found, quiet=True)
    assert {one.importance["type"] for one in report.weights if one.name in names} == {"Uniform"}


def test_codes_of_experts_come_back_from_files(model: Any, tmp_path: Path) -> None:
    data, names = labelled(), [weight.name for weight in experts(model)]
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    recipe = Recipe(KeepDense(), InputGram(), codec=Feedback(), matrix_rows="out_features")
    compress_(model, dict.fromkeys(names, recipe), keep="30%", calibration=data, quiet=True)
    for name in names:  # each number is near its own, so that no matrix was turned
        error = (model.get_parameter(name) - before[name]).square().sum() / before[name].square().sum()
        assert 0 < error < 0.05
    save_model(model, tmp_path / "small")
    again = load_model(tmp_path / "small")
    assert {name for name, _ in held_matrices(again)} == set(names)
    assert all(torch.equal(again.get_parameter(name), model.get_parameter(name)) for name in names)


def test_codes_lose_less_under_what_was_measured(model: Any) -> None:
    """Equal bytes, inputs in few directions: the error of the products is below that of unmeasured codes."""
    with torch.no_grad():
        words = model.get_input_embeddings().weight
        words.copy_(torch.randn(len(words), 3) @ torch.randn(3, words.shape[1]) + 0.1 * torch.randn(words.shape))
    data, weight = labelled(), experts(model)[0]
    gram = measure(model, [weight], data, needs=InputGram().needs, quiet=True).of(weight.name).input_gram
    exact, errors = dense_weight(model, weight).double().clone(), []
    for importance in (InputGram(), Uniform()):
        torch.manual_seed(0)
        kflats_model = load_state(model)
        recipe = Recipe(KeepDense(), importance, codec=Feedback(), matrix_rows="out_features")
        compress_(kflats_model, {weight.name: recipe}, keep="25%", calibration=data, quiet=True)
        table = kflats_model.get_parameter(weight.name).detach()
        table = table.transpose(0, 1) if model.config.model_type == "gpt_oss" else table.flatten(0, 1).T
        error = table.reshape(exact.shape).double() - exact
        errors.append(float((error * (gram @ error)).sum()))
    assert errors[0] < 0.7 * errors[1]


def load_state(model: Any) -> Any:
    """A copy."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def test_auto_shares_bytes_by_loss_between_experts_and_layers() -> None:
    model = mixture_of_experts()
    names = {weight.name for weight in experts(model)}
    report = compress_(model, {"all": Auto()}, size="60%", calibration=labelled(), quiet=True)
    ours = [one for one in report.weights if one.name in names]
    assert len({one.bytes_after / one.bytes_before for one in ours}) > 1
    assert {one.importance["type"] for one in ours if one.stored == "integers"} == {"KroneckerFisher"}


def test_a_file_from_before_experts_had_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """All experts one below the other, as any other parameter."""
    with monkeypatch.context() as earlier:
        earlier.setattr(weights_module, "is_experts", lambda module, key: False)
        names = [w.name for w in find_weights(model) if is_parameter(w.places[0].role) and "experts" in w.name]
        assert not experts(model)
        recipe = Recipe(KeepDense(), codec=Feedback())
        compress_(model, dict.fromkeys(names, recipe), keep="30%", quiet=True)
        save_model(model, tmp_path / "small")
    again = load_model(tmp_path / "small")
    assert {name for name, _ in held_matrices(again)} == set(names)
    assert all(torch.equal(again.get_parameter(name), model.get_parameter(name)) for name in names)
    save_model(again, tmp_path / "twice")
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == (
        tmp_path / "twice" / "model.safetensors"
    ).read_bytes()


def test_experts_that_another_library_manages_are_refused() -> None:
    model = mixture_of_experts()
    weight = experts(model)[0]
    module = model.get_submodule(weight.name.rpartition(".")[0])
    module._is_expert_parallel = True
    with pytest.raises(KflatsError, match="managed by another library cannot be measured"):
        measure(model, [weight], labelled(), needs=RowFisher().needs, objective=TaskLoss(), quiet=True)


def test_an_expert_that_no_token_reaches_is_coded() -> None:
    model = mixture_of_experts()
    weight = experts(model)[0]
    found = measure(model, [weight], labelled(), needs=KroneckerFisher().needs, objective=TaskLoss(), quiet=True)
    found.of(weight.name).output_gram.view(4, -1)[2] = 0
    recipe = Recipe(KeepDense(), KroneckerFisher(), codec=Feedback(), matrix_rows="out_features")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_(model, {weight.name: recipe}, keep="40%", statistics=found, quiet=True)
    assert torch.isfinite(model.get_parameter(weight.name)).all()


def test_integers_of_experts_have_outputs_as_rows(model: Any) -> None:
    """Whatever the recipe says: the axes of all outputs of all experts would take more than the matrix."""
    name = experts(model)[0].name
    for recipe, rows in ((SVD(), "in_features"), (Recipe(SVD(), codec=Transform()), "out_features")):
        report = compress_(load_state(model), {name: recipe}, keep="60%", quiet=True)
        assert [one.matrix_rows for one in report.weights] == [rows]


def test_integers_for_onnx_leave_experts_as_they_are() -> None:
    """They are multiplied as floats there."""
    model = mixture_of_experts()
    before = {weight.name: model.get_parameter(weight.name).detach().clone() for weight in experts(model)}
    ids = torch.randint(4, VOCABULARY, (1, 5))
    in_integers_(model, lambda: model(input_ids=ids))
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
