"""What else transformers and its neighbours do with a model: types, devices, shards, resizing, training, adapters."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from factoring import factor_named
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MobileBertConfig,
    MobileBertForMaskedLM,
    MobileBertModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_model
from kflats.matrices.layers import FactoredEmbedding, FactoredHead
from kflats.matrices.registry import LowRankMatrix
from kflats.model.swap import restore_, swap_
from kflats.model.weights import find_weight, find_weights

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
IDS = torch.tensor([[5, 9, 150, 7], [8, 120, 6, 1]])


def bert(**settings: Any) -> Any:
    return BertForMaskedLM(BertConfig(vocab_size=199, pad_token_id=1, **(SIZES | settings))).eval()


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=199, bos_token_id=2, eos_token_id=3, **sizes)).eval()


def compress(model: Any, make_matrix: Any, name: str = "") -> Any:
    """Swap the token embedding; the dense model that computes the same."""
    name = name or next(n for n, module in model.named_modules() if module is model.get_input_embeddings())
    return factor_named(model, [name], make_matrix)


def run(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loads_in_any_type(dtype: torch.dtype, make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    dense = compress(model, make_matrix)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    torch.testing.assert_close(run(loaded), run(dense.to(dtype)), rtol=0.1, atol=0.1)
    torch.testing.assert_close(run(loaded.float()), run(model), rtol=0.1, atol=0.1)
    assert run(loaded.half()).dtype == torch.float16
    loaded.save_pretrained(tmp_path / "half")
    assert {p.dtype for p in load_model(tmp_path / "half").parameters()} == {torch.float16}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_factors_keep_a_type_of_their_own(stored: torch.dtype, make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    weight = find_weight(model, "word_embeddings")
    swap_(model, weight, make_matrix(*weight.shape).to(stored))
    annotate_(model)
    model.save_pretrained(tmp_path)  # which writes the first parameter's type as the model's
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().weight.dtype == stored
    assert loaded.bert.embeddings.LayerNorm.weight.dtype == torch.float32
    assert run(loaded).dtype == torch.float32
    torch.testing.assert_close(run(loaded), run(model), rtol=1e-3, atol=1e-3)
    loaded.save_pretrained(tmp_path / "again")
    assert load_model(tmp_path / "again").get_input_embeddings().weight.dtype == stored


def test_device_maps_and_shards(make_matrix: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for settings in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}, "dtype": "auto"}):
        torch.testing.assert_close(run(AutoModelForMaskedLM.from_pretrained(tmp_path, **settings)), run(model))
    layers = [f"bert.encoder.layer.{i}" for i in range(2)]
    places = dict.fromkeys(["bert.embeddings", *layers, "cls"], "cpu")
    settings = {"device_map": places | {layers[1]: "disk"}, "offload_folder": tmp_path / "offloaded"}
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, **settings)
    torch.testing.assert_close(run(loaded), run(model))
    settings["device_map"] = places | {"bert.embeddings": "disk"}
    with pytest.raises(KflatsError, match="a device_map that keeps them on disk is not supported"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, **settings)


@pytest.mark.parametrize("size", [160, 199, 230])
def test_resizing_a_tied_vocabulary(size: int, make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    compress(model, make_matrix)
    twin = copy.deepcopy(model)
    rows, bias = model.get_input_embeddings().matrix.dense(), model.cls.predictions.bias.detach().clone()

    found = twin.resize_token_embeddings(size)
    assert found is twin.get_input_embeddings()
    assert (found.num_embeddings, twin.config.vocab_size, twin.vocab_size) == (size, size, size)
    assert twin.get_output_embeddings().matrix is found.matrix
    assert twin.cls.predictions.decoder.bias is twin.cls.predictions.bias
    kept = min(size, 199)
    torch.testing.assert_close(found.matrix.dense()[:kept], rows[:kept])
    torch.testing.assert_close(twin.cls.predictions.bias[:kept], bias[:kept], rtol=0, atol=0)
    assert run(twin).shape == (2, 4, size)
    twin(IDS, labels=IDS).loss.backward()
    assert torch.isfinite(found.weight.grad).all()

    twin.save_pretrained(tmp_path)
    torch.testing.assert_close(run(AutoModelForMaskedLM.from_pretrained(tmp_path)), run(twin))
    assert run(model).shape == (2, 4, 199)  # the original did not follow its copy

    expected = run(twin)
    restore_(twin)
    assert (twin.get_input_embeddings().num_embeddings, twin.get_output_embeddings().out_features) == (size, size)
    torch.testing.assert_close(run(twin), expected)


def test_resizing_by_multiples_and_nothing(make_matrix: Any) -> None:
    model = gpt2()
    compress(model, make_matrix)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert run(model).shape[-1] == 256
    model.resize_token_embeddings(210, pad_to_multiple_of=8, mean_resizing=False)
    assert run(model).shape[-1] == 216
    with pytest.raises(KflatsError, match="resized to -1"):
        model.resize_token_embeddings(-1)


def test_resizing_what_is_only_partly_factored(make_matrix: Any) -> None:
    model = bert(tie_word_embeddings=False)
    compress(model, make_matrix)
    model.resize_token_embeddings(210)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert run(model).shape[-1] == 210
    assert len(model.cls.predictions.bias) == 210

    model = bert(tie_word_embeddings=False)
    compress(model, make_matrix, "cls.predictions.decoder")
    with pytest.raises(KflatsError, match="head cannot be resized"):
        model.resize_token_embeddings(210)
    assert run(model).shape[-1] == 199


def test_resizing_a_part_is_refused(make_matrix: Any) -> None:
    model = bert()
    compress(model, make_matrix)
    with pytest.raises(KflatsError, match="resize the whole model"):
        model.bert.resize_token_embeddings(210)
    alone = BertModel(model.config).eval()
    compress(alone, make_matrix)
    alone.resize_token_embeddings(210)
    assert alone(IDS + 40).last_hidden_state.shape == (2, 4, 32)


def test_resizing_every_place_of_t5(make_matrix: Any) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=199, **sizes)).eval()
    compress(model, make_matrix)
    model.resize_token_embeddings(230)
    assert model(input_ids=IDS, decoder_input_ids=IDS + 70).logits.shape[-1] == 230


def test_what_a_class_resizes_besides(make_matrix: Any) -> None:
    """BART has a bias on its logits, which its class resizes itself."""
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = BartForConditionalGeneration(BartConfig(vocab_size=199, d_model=32, **layers)).eval()
    compress(model, make_matrix)
    model.resize_token_embeddings(230)
    assert model.config.vocab_size == model.final_logits_bias.shape[-1] == 230
    assert run(model).shape[-1] == 230


def test_tables_that_others_read_are_refused() -> None:
    config = MobileBertConfig(vocab_size=199, embedding_size=16, intra_bottleneck_size=16, **SIZES)
    with pytest.raises(KflatsError, match="shared with a layer that cannot be factored"):
        find_weight(MobileBertForMaskedLM(config), "embeddings.word_embeddings")
    find_weight(MobileBertModel(config), "embeddings.word_embeddings")  # without that head it can


@pytest.mark.parametrize("kind", ["bart", "gemma3"])
def test_scaled_embeddings(kind: str, make_matrix: Any, tmp_path: Path) -> None:
    if kind == "bart":
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        config = BartConfig(vocab_size=199, d_model=32, scale_embedding=True, max_position_embeddings=16, **layers)
        model: Any = BartForConditionalGeneration(config).eval()
        place = "model.encoder.embed_tokens"
    else:
        heads = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"], "num_hidden_layers": 1}
        model = AutoModelForCausalLM.from_config(Gemma3TextConfig(vocab_size=199, **(SIZES | heads))).eval()
        place = "model.embed_tokens"
    before = type(model.get_submodule(place))
    assert before is not nn.Embedding
    dense = compress(model, make_matrix, place)
    assert model.get_submodule(place).scale == pytest.approx(32**0.5)
    torch.testing.assert_close(run(model), run(dense))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(run(loaded), run(dense))
    torch.testing.assert_close(run(loaded.bfloat16()), run(dense.bfloat16()), rtol=0.05, atol=0.1)
    loaded = type(model).from_pretrained(tmp_path)
    restore_(loaded)
    assert type(loaded.get_submodule(place)) is before
    torch.testing.assert_close(run(loaded), run(dense.float()), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("loaded", [False, True])
def test_restored_models_are_ordinary_again(loaded: bool, make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    dense = compress(model, make_matrix)
    if loaded:
        model.save_pretrained(tmp_path / "small")
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "small")
    restore_(model)
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.all_tied_weights_keys == dense.all_tied_weights_keys
    assert model._tied_weights_keys == dense._tied_weights_keys
    assert not hasattr(model.config, "quantization_config")
    assert "resize_token_embeddings" not in vars(model)
    torch.testing.assert_close(run(model), run(dense))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(AutoModelForMaskedLM.from_pretrained(tmp_path)), run(dense))
    model.resize_token_embeddings(210)
    assert run(model).shape[-1] == 210


def test_a_saved_model_can_be_compressed_further(make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path / "one")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    weight = next(w for w in find_weights(model) if w.name.endswith("intermediate.dense"))
    swap_(model, weight, LowRankMatrix(torch.randn(32, 2), torch.randn(2, 40)))
    annotate_(model)
    model.save_pretrained(tmp_path / "two")
    torch.testing.assert_close(run(load_model(tmp_path / "two")), run(model))


def pickled(model: Any) -> Any:
    """Its copy through pickle."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # our own bytes


def test_saves_through_pickle_and_state_dicts(make_matrix: Any) -> None:
    model = bert()
    compress(model, make_matrix)
    twin = pickled(model)
    torch.testing.assert_close(run(twin), run(model))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(twin), run(model))


def test_a_pickled_model_saves_and_resizes_as_the_model_itself(make_matrix: Any, tmp_path: Path) -> None:
    """The methods of transformers would write tensors that the config does not describe."""
    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path / "own")
    for number, twin in enumerate((pickled(model), copy.deepcopy(model))):
        assert twin.save_pretrained.args == twin.resize_token_embeddings.args == (twin,)
        twin.save_pretrained(tmp_path / str(number))
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / str(number) / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
        twin.resize_token_embeddings(230)
        assert run(twin).shape == (2, 4, 230)
    assert run(model).shape == (2, 4, 199)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
def test_generation_and_gradient_checkpointing(make_matrix: Any) -> None:
    model = gpt2()
    dense = compress(model, make_matrix)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 3, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **options), dense.generate(IDS, **options))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_the_trainer(make_matrix: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path / "small")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "small")
    before = model.get_input_embeddings().weight.detach().clone()
    data = [{"input_ids": row, "labels": row} for row in IDS]
    options = {"max_steps": 2, "report_to": [], "save_steps": 2, "use_cpu": True, "disable_tqdm": True}
    Trainer(model, TrainingArguments(tmp_path / "run", learning_rate=0.1, **options), train_dataset=data).train()
    assert not torch.equal(model.get_input_embeddings().weight, before)
    assert isinstance(model.get_output_embeddings(), FactoredHead)
    loaded = load_model(tmp_path / "run" / "checkpoint-2")
    torch.testing.assert_close(run(loaded), run(model.eval()))


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
def test_adapters(make_matrix: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path / "small")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "small")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2, lora_alpha=64))
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0).step()
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        AutoModelForMaskedLM.from_pretrained(tmp_path / "small"), tmp_path / "adapter"
    )
    torch.testing.assert_close(run(again.eval()), run(adapted.eval()))
    merged = adapted.merge_and_unload()
    assert isinstance(merged.get_input_embeddings(), FactoredEmbedding)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(run(load_model(tmp_path / "merged")), run(merged))


def test_the_config_says_only_what_is_there(make_matrix: Any, tmp_path: Path) -> None:
    model = bert()
    compress(model, make_matrix)
    model.save_pretrained(tmp_path)
    note = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (note["quant_method"], note["format_version"], note["dtype"]) == ("kflats", 1, "float32")
    (name, entry), *more = note["modules"].items()
    assert not more
    assert name == "bert.embeddings.word_embeddings"
    assert [(p["name"], p["role"], p["padding_idx"]) for p in entry["places"]] == [
        ("bert.embeddings.word_embeddings", "embedding", 1),
        ("cls.predictions.decoder", "head", None),
    ]
    base = AutoModel.from_pretrained(tmp_path)
    assert [*base.config.quantization_config["modules"]] == ["embeddings.word_embeddings"]
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(KflatsError, match="another method"):
        annotate_(model)


def test_copies_of_a_config_share_the_description(make_matrix: Any, tmp_path: Path) -> None:
    """transformers copies the config in each forward of an encoder with a decoder."""
    model = ARCHITECTURES["t5"].make(True)
    compress(model, make_matrix)
    model.save_pretrained(tmp_path)
    found = 0
    for module in type(model).from_pretrained(tmp_path).modules():
        note = getattr(getattr(module, "config", None), "quantization_config", None)
        if note is not None:
            copied, found = copy.deepcopy(module.config).quantization_config, found + 1
            assert copied is note or all(copied[key] is note[key] for key in note)
    assert found
