"""What others put on top of our layers: PEFT's LoRA and torchao's quantize_, on factored and on coded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("transformers")

from transformers import BertConfig, BertModel

import kflats
from kflats.common.errors import KflatsError
from kflats.export.adapters import adapt_lora_
from kflats.matrices.coded import from_integers
from kflats.matrices.layers import FactoredEmbedding, FactoredLinear
from kflats.matrices.registry import LowRankMatrix, Matrix
from kflats.model.swap import swap_
from kflats.model.weights import find_weight

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.tensor([[5, 9, 150, 7], [8, 120, 6, 1]])
TABLE, LAYER = "embeddings.word_embeddings", "encoder.layer.0.intermediate.dense"


def matrix(kind: str, n: int, d: int) -> Matrix:
    gen = torch.Generator().manual_seed(n)
    if kind == "low_rank":
        return LowRankMatrix(torch.randn(n, 8, generator=gen) * 0.3, torch.randn(8, d, generator=gen) * 0.2)
    integers = torch.randint(-7, 8, (n, d), generator=gen).to(torch.int16)
    return from_integers([integers], None, torch.rand(n, generator=gen) * 0.05 + 0.01, scales="row")


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=199, **SIZES)).eval()
    if kind == "flats":
        kflats.compress_(model, dict.fromkeys((TABLE, LAYER), kflats.Flats(k=2)), keep="60%", quiet=True)
        return model
    for name in (TABLE, LAYER):
        weight = find_weight(model, name)
        swap_(model, weight, matrix(kind, *weight.shape))
    kflats.annotate_(model)
    return model


def run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).last_hidden_state


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # PEFT on transformers
@pytest.mark.parametrize("kind", ["low_rank", "flats", "coded"])
def test_lora_on_factored_layers(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build(kind)
    before = run(model)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(target_modules=["intermediate.dense", "word_embeddings", "query"], r=2, lora_alpha=64)
    adapt_lora_(config)
    adapted = peft.get_peft_model(model, config).eval()
    torch.testing.assert_close(run(adapted), before)  # B begins at zero
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 6
    adapted.train()(IDS).last_hidden_state.square().sum().backward()
    torch.optim.SGD(trained, lr=0.01).step()
    after = run(adapted.eval())
    assert not torch.allclose(after, before, atol=1e-3)
    adapted.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 6
    assert all("lora" in name for name in saved)
    again = peft.PeftConfig.from_pretrained(tmp_path)
    adapt_lora_(again)
    loaded = peft.PeftModel.from_pretrained(build(kind), tmp_path, config=again).eval()
    torch.testing.assert_close(run(loaded), after)
    with pytest.raises(KflatsError, match="cannot be merged into a factored layer"):
        adapted.merge_and_unload()
    plain = adapted.unload()
    assert isinstance(plain.get_submodule(LAYER), FactoredLinear)
    left = plain.state_dict()
    assert all(torch.equal(left[name], value) for name, value in frozen.items())
    torch.testing.assert_close(run(plain), before)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # PEFT on transformers
def test_lora_says_what_it_cannot_do() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"Target module FactoredLinear.* is not supported"):
        peft.get_peft_model(build("low_rank"), peft.LoraConfig(target_modules=["intermediate.dense"]))
    for wrong in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(KflatsError, match="starts from the dense weight"):
            adapt_lora_(peft.LoraConfig(target_modules=["query"], **wrong))


@pytest.mark.parametrize("kind", ["low_rank", "flats", "coded"])
def test_torchao_quantizes_what_is_dense(kind: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = build(kind)
    before = run(model)
    factors = {name: value.clone() for name, value in model.get_submodule(LAYER).matrix.tensors().items()}
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    assert type(model.encoder.layer[0].attention.self.query.weight) is not nn.Parameter
    left = model.get_submodule(LAYER).matrix.tensors()
    assert all(torch.equal(left[name], value) for name, value in factors.items())
    torch.testing.assert_close(run(model), before, rtol=0.02, atol=0.02)


def test_torchao_on_low_rank_coordinates() -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = build("low_rank")
    before = run(model)
    config = ao.Int8WeightOnlyConfig()
    ao.quantize_(model, config, filter_fn=lambda module, _: isinstance(module, FactoredEmbedding))
    assert type(model.get_submodule(TABLE).matrix.weight) is not nn.Parameter
    torch.testing.assert_close(run(model), before, rtol=0.05, atol=0.05)


def test_torchao_cannot_quantize_codes_or_factored_layers() -> None:
    pytest.importorskip("torchao", minversion="0.18")  # 0.16 quantizes some of them, and fails in other words
    ao = pytest.importorskip("torchao.quantization")
    for kind, wanted in (("coded", FactoredEmbedding), ("flats", FactoredEmbedding), ("low_rank", FactoredLinear)):
        model = build(kind)
        config = ao.Int8WeightOnlyConfig()
        ao.quantize_(model, config, filter_fn=lambda module, _, of=wanted: isinstance(module, of))
        with pytest.raises(NotImplementedError, match="Int8Tensor dispatch"):
            run(model)
