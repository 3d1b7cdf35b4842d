"""Parameters without a layer of their own: dense in memory, coded in files, equal after loading, dense once changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from table import crossed

from kflats import SVD, Auto, Float, Integer, KeepDense, Recipe, Transform, compress_
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.evaluation.running import collate, drawn_samples, run
from kflats.export.dense import export_dense
from kflats.io import load_model
from kflats.io.saving import save_model, stamp_
from kflats.model.weights import find_weights, held_matrices, is_parameter

transformers = pytest.importorskip("transformers", minversion="5.0")

_MIXTRAL = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_MIXTRAL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_SOUND = {
    "vocab_size": 30,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_SOUND |= {
    "intermediate_size": 64,
    "conv_dim": (64, 64),
    "conv_kernel": (10, 8),
    "conv_stride": (10, 8),
    "num_feat_extract_layers": 2,
}
_SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "MixtralForCausalLM": (
        "MixtralConfig",
        _MIXTRAL,
        {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")},
    ),
    "XLNetLMHeadModel": (
        "XLNetConfig",
        {"vocab_size": 90, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 64},
        {f"transformer.layer.0.rel_attn.{name}" for name in "qkvor"},
    ),
    "Wav2Vec2Model": ("Wav2Vec2Config", _SOUND, {"feature_extractor.conv_layers.1.conv.weight"}),
}
RECIPES = {
    "codes": Recipe(SVD(), codec=Transform()),
    "integers": Recipe(KeepDense(), codec=Integer(8)),
    "a pair": Recipe(SVD(), codec=Float("float16")),
    "out": Recipe(SVD(), matrix_rows="out_features"),
}


def tiny(name: str) -> Any:
    config, settings, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()


def raw(model: Any) -> list[str]:
    return [weight.name for weight in find_weights(model) if is_parameter(weight.places[0].role)]


def outputs(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        result = run(model, collate(drawn_samples(model, 2, 8), 0))
    assert isinstance(result, dict)
    return [value for value in result.values() if isinstance(value, torch.Tensor)]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(outputs(a), outputs(b), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_large_parameter_is_a_weight(name: str) -> None:
    model = tiny(name)
    assert set(raw(model)) >= MODELS[name][2]
    known = sum(weight.nbytes for weight in find_weights(model))
    assert known > 0.93 * sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "recipe"), crossed(MODELS, RECIPES))
def test_parameters_come_back_from_files_as_they_were(name: str, recipe: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "original")
    model = load_model(tmp_path / "original").eval()
    before, names = outputs(model), raw(model)
    compress_(model, dict.fromkeys(names, RECIPES[recipe]), keep="40%", quiet=True)
    assert not raw(model)
    assert not all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
    save_model(model, tmp_path / "small")
    again = load_model(tmp_path / "small").eval()
    assert {name for name, _ in held_matrices(again)} == set(names)
    assert equal(model, again)
    again.save_pretrained(tmp_path / "twice")
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("small", "twice"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("original", "small")]
    whole = sum(weight.nbytes for weight in find_weights(tiny(name)) if weight.name in names)
    assert sizes[1] < sizes[0] - 0.4 * whole


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_that_was_trained_is_saved_as_it_is(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    names = raw(model)
    compress_(model, dict.fromkeys(names, RECIPES["integers"]), keep="50%", quiet=True)
    model.train()
    loss = sum(value.float().square().mean() for value in run(model, collate(drawn_samples(model, 2, 8), 0)).values()
               if isinstance(value, torch.Tensor) and value.requires_grad)  # fmt: skip
    loss.backward()
    changed = names[0]
    assert model.get_parameter(changed).grad is not None
    with torch.no_grad():
        model.get_parameter(changed).sub_(model.get_parameter(changed).grad)
    model.eval().save_pretrained(tmp_path / "trained")
    again = load_model(tmp_path / "trained").eval()
    assert {held for held, _ in held_matrices(again)} == set(names[1:])
    assert equal(model, again)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_parameters_were_all_trained_is_an_ordinary_one(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    names = raw(model)
    compress_(model, dict.fromkeys(names, RECIPES["codes"]), keep="50%", quiet=True)
    with torch.no_grad():
        for parameter in names:
            model.get_parameter(parameter).mul_(1.5)
    model.save_pretrained(tmp_path / "trained")
    assert "quantization_config" not in json.loads((tmp_path / "trained" / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path / "trained").eval()
    assert not any(True for _ in held_matrices(again))
    assert equal(model, again)


def test_half_precision_keeps_the_codes(tmp_path: Path) -> None:
    model = tiny("MixtralForCausalLM")
    names = raw(model)
    compress_(model, dict.fromkeys(names, RECIPES["codes"]), keep="40%", quiet=True)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    again = load_model(tmp_path / "half").eval()
    assert {held for held, _ in held_matrices(again)} == set(names)
    assert again.get_parameter(names[0]).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_base_model_takes_the_parameters_of_a_task_model(tmp_path: Path) -> None:
    model = tiny("MixtralForCausalLM")
    compress_(model, dict.fromkeys(raw(model), RECIPES["codes"]), keep="40%", quiet=True)
    save_model(model, tmp_path / "small")
    base = transformers.MixtralModel.from_pretrained(tmp_path / "small").eval()
    name = "layers.0.mlp.experts.down_proj"
    assert torch.equal(base.get_parameter(name), model.get_parameter(f"model.{name}"))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(load_model(tmp_path / "base").get_parameter(name), base.get_parameter(name))


def test_a_tensor_that_the_file_lacks_is_an_error(tmp_path: Path) -> None:
    model = tiny("XLNetLMHeadModel")
    name = raw(model)[0]
    compress_(model, {name: RECIPES["codes"]}, keep="40%", quiet=True)
    save_model(model, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{name}_codes"]
    save_file(tensors, path, {"format": "pt"})
    stamp_(path)
    with pytest.raises(KflatsError, match=f"{name}_codes"):
        load_model(tmp_path / "small")


def test_an_ordinary_checkpoint_has_the_dense_values(tmp_path: Path) -> None:
    """Under the names of the original's file, which are not those of transformers' modules."""
    model = tiny("MixtralForCausalLM")
    model.save_pretrained(tmp_path / "before")
    compress_(model, dict.fromkeys(raw(model), RECIPES["codes"]), keep="40%", quiet=True)
    save_model(model, tmp_path / "small")
    assert len(export_dense(tmp_path / "small", tmp_path / "dense").weights) == 2
    before, dense = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("before", "dense"))
    assert dense == before
    assert not before <= model.state_dict().keys()
    assert equal(load_model(tmp_path / "dense").eval(), model)


def test_experts_that_the_word_linear_leaves_out_are_named() -> None:
    model = tiny("MixtralForCausalLM")
    with pytest.warns(KflatsWarning, match=r"not compressed: .*experts.* experts kept as one tensor; the word all"):
        compress_(model, {"linear": SVD()}, keep="60%", quiet=True)


@pytest.mark.slow
def test_measured_layers_and_parameters_share_one_budget(tmp_path: Path) -> None:
    model = tiny("MixtralForCausalLM")
    batches = [collate(drawn_samples(model, 4, 8, seed), 0) for seed in range(2)]
    report = compress_(model, {"all": Auto()}, size="45%", calibration=batches, quiet=True)
    by_name = {one.name: one for one in report.weights}
    share = [by_name[name].bytes_after / by_name[name].bytes_before for name in MODELS["MixtralForCausalLM"][2]]
    assert all(0.2 < one <= 0.5 for one in share)
    before = tiny("MixtralForCausalLM")
    before.save_pretrained(tmp_path / "before")
    save_model(model, tmp_path / "after")
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("before", "after")]
    assert sizes[1] <= 0.45 * sizes[0]


def test_nothing_can_be_measured_of_a_parameter() -> None:
    from kflats import KroneckerFisher

    model = tiny("XLNetLMHeadModel")
    batches = [collate(drawn_samples(model, 2, 8), 0)]
    recipe = Recipe(SVD(), KroneckerFisher())
    with pytest.raises(KflatsError, match="cannot be measured"):
        compress_(model, {raw(model)[0]: recipe}, keep="40%", calibration=batches, quiet=True)
    with pytest.warns(KflatsWarning, match="not measured: .*; all their rows count alike"):
        report = compress_(model, {"all": recipe}, keep="60%", calibration=batches, quiet=True)
    assert set(MODELS["XLNetLMHeadModel"][2]) <= {one.name for one in report.weights}
