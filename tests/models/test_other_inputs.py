"""Models that read images, sounds, or several things: compressed, saved, and loaded with equal outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kflats import Auto, Integer, KeepDense, Recipe, compress_
from kflats.calibration.collect import measure
from kflats.common.errors import KflatsError
from kflats.evaluation.outputs import Judge
from kflats.evaluation.running import collate, drawn_samples, run
from kflats.io import load_model
from kflats.io.saving import save_model
from kflats.model.weights import factored_layers, find_weights
from kflats.planning.calibration_data import gather

transformers = pytest.importorskip("transformers", minversion="5.0")

_TEXT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
_VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
_VIT |= {"image_size": 24, "patch_size": 8}
_T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", _VIT),
    "Dinov2Model": ("Dinov2Config", _VIT),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": {**_TEXT, "eos_token_id": 3, "max_position_embeddings": 32}, "vision_config": _VIT},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 8}
        | {"max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 3},
    ),
    "T5ForConditionalGeneration": ("T5Config", _T5 | {"decoder_start_token_id": 0}),
    "T5Model": ("T5Config", _T5 | {"pad_token_id": 0}),
}


def tiny(name: str) -> Any:
    config, settings = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()


def outputs(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        result = run(model, collate(drawn_samples(model, 2, 8), 0))
    assert isinstance(result, dict)
    return [value for value in result.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_come_back_from_their_folders(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "original")
    model = load_model(tmp_path / "original").eval()  # transformers may have renamed and joined tensors
    recipe = Recipe(KeepDense(), codec=Integer(8))
    names = [weight.name for weight in find_weights(model) if weight.places[0].role != "conv2d" and weight.shape[1] > 2]
    compress_(model, dict.fromkeys(names, recipe), keep="80%", quiet=True)
    for folder in ("once", "again"):
        save_model(model, tmp_path / folder)
        expected, model = outputs(model), load_model(tmp_path / folder).eval()
        assert all(torch.equal(a, b) for a, b in zip(expected, outputs(model), strict=True))
        assert {name for name, layer in factored_layers(model) if layer.owns_matrix} == set(names)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_other_models_is_measured(name: str) -> None:
    model = tiny(name)
    batches = [collate(drawn_samples(model, 2, 8, seed), 0) for seed in range(2)]
    weights = find_weights(model)
    measured = measure(model, weights, batches, needs=frozenset({"row_fisher", "input_gram"}), quiet=True)
    assert not measured.unreached
    assert all(float(measured.of(weight.name).row_fisher.sum()) > 0 for weight in weights)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "WhisperForConditionalGeneration"])
def test_texts_are_refused_by_models_that_read_none(name: str) -> None:
    with pytest.raises(KflatsError, match=f"texts are not supported with {name}, which reads (images|spectrograms)"):
        compress_(tiny(name), None, keep="60%", texts=["a text"], quiet=True)
    with pytest.raises(KflatsError, match=f"texts are not supported with {name}, which reads (images|spectrograms)"):
        Judge(tiny(name), texts=["a text"])


def test_texts_alone_are_refused_by_models_that_compare_them_with_images(tiny_tokenizer: Any) -> None:
    data = gather(["a text"], tiny_tokenizer, None, None, None)
    with pytest.raises(KflatsError, match=r"texts alone cannot be passed through CLIPModel.*texts and images"):
        data.batches(tiny("CLIPModel"))


@pytest.mark.slow
def test_a_model_that_reads_images_says_that_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = compress_(tiny("ViTForImageClassification"), {"all": Auto()}, size="60%")
    assert "nothing is measured: ViTForImageClassification reads images" in capsys.readouterr().err
    assert any(one.bytes_after < one.bytes_before for one in report.weights)
