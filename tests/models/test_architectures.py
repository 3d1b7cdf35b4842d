"""Every architecture: find, swap, run, save, load (also into and out of task heads), fine-tune, save again.

Configs are tiny and weights random: what is tested is the life of a factored model inside transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from kflats.files import annotate_
from kflats.nn.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.places import dense_weight, factored_layers, find_weight, find_weights
from kflats.surgery import swap_

VOCABULARY = 199
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Architecture:
    """A tiny config, its language model, and where its tables are in the base model and in the language model."""

    config: str
    language_model: Any
    table: str
    head: str
    settings: dict[str, Any] = field(default_factory=dict)
    task: str = ""
    others: tuple[str, ...] = ()

    def make(self, tied: bool) -> Any:
        kind = getattr(transformers, self.config)
        config = kind(vocab_size=VOCABULARY, tie_word_embeddings=tied, pad_token_id=1, **self.settings)
        model = self.language_model.from_config(config).eval()
        with torch.no_grad():  # biases start at zero, where a lost one would not be missed
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        if not tied and self.config == "T5Config":
            # T5 ties whatever its config says, unless the checkpoint brings a table for the head.
            model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 32))
            del model.all_tied_weights_keys["lm_head.weight"]
        return model


ARCHITECTURES = {
    "bert": Architecture(
        "BertConfig",
        AutoModelForMaskedLM,
        "embeddings.word_embeddings",
        "cls.predictions.decoder",
        _ENCODER,
        "BertForSequenceClassification",
    ),
    "roberta": Architecture(
        "RobertaConfig",
        AutoModelForMaskedLM,
        "embeddings.word_embeddings",
        "lm_head.decoder",
        _ENCODER,
        "RobertaForTokenClassification",
    ),
    "distilbert": Architecture(
        "DistilBertConfig",
        AutoModelForMaskedLM,
        "embeddings.word_embeddings",
        "vocab_projector",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40},
        "DistilBertForSequenceClassification",
    ),
    "albert": Architecture(
        "AlbertConfig",
        AutoModelForMaskedLM,
        "embeddings.word_embeddings",
        "predictions.decoder",
        {**_ENCODER, "embedding_size": 16},
        "AlbertForSequenceClassification",
    ),
    "mpnet": Architecture(
        "MPNetConfig",
        AutoModelForMaskedLM,
        "embeddings.word_embeddings",
        "lm_head.decoder",
        _ENCODER,
        "MPNetForSequenceClassification",
    ),
    "xlnet": Architecture(
        "XLNetConfig",
        AutoModelForCausalLM,
        "word_embedding",
        "lm_loss",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40},
        "XLNetForSequenceClassification",
    ),
    "gpt2": Architecture(
        "GPT2Config",
        AutoModelForCausalLM,
        "wte",
        "lm_head",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 2, "eos_token_id": 3},
        "GPT2ForSequenceClassification",
    ),
    "t5": Architecture(
        "T5Config",
        AutoModelForSeq2SeqLM,
        "shared",
        "lm_head",
        {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
        "T5EncoderModel",
        ("encoder.embed_tokens", "decoder.embed_tokens"),
    ),
    "llama": Architecture(
        "LlamaConfig", AutoModelForCausalLM, "embed_tokens", "lm_head", _DECODER, "LlamaForSequenceClassification"
    ),
    "gemma": Architecture(
        "GemmaConfig", AutoModelForCausalLM, "embed_tokens", "lm_head", _DECODER, "GemmaForSequenceClassification"
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        AutoModelForCausalLM,
        "embed_tokens",
        "lm_head",
        {**_DECODER, "layer_types": ["full_attention", "sliding_attention"]},
        "Gemma3TextForSequenceClassification",
    ),
    "qwen2": Architecture(
        "Qwen2Config", AutoModelForCausalLM, "embed_tokens", "lm_head", _DECODER, "Qwen2ForSequenceClassification"
    ),
}
every_architecture = pytest.mark.parametrize("case", ARCHITECTURES.values(), ids=ARCHITECTURES)
tied_and_untied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def tokens() -> Tensor:
    return torch.randint(5, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    ids = tokens()
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids).logits if is_t5(model) else model(input_ids=ids).logits


def hidden(model: Any) -> Tensor:
    with torch.no_grad():
        return (model.encoder if is_t5(model) else model)(input_ids=tokens()).last_hidden_state


def is_t5(model: Any) -> bool:
    return model.config.model_type == "t5"


def compress(model: Any, case: Architecture, make_matrix: Any, tied: bool) -> Any:
    """Swap the vocabulary (both tables if untied); the dense model that must compute the same."""
    dense = copy.deepcopy(model)
    names = [case.table] if tied else [case.table, case.head]
    for name in names:
        weight = find_weight(model, name)
        matrix = make_matrix(*weight.shape)
        with torch.no_grad():
            dense_weight(dense, find_weight(dense, name)).copy_(matrix.dense())
        swap_(model, weight, matrix)
    annotate_(model)
    return dense


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return found


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load_exactly(kind: Any, folder: Path) -> Any:
    """Load, and insist that the checkpoint and the model have the same tensors."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()


def assert_tied(model: Any, case: Architecture, tied: bool) -> None:
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(source, FactoredEmbedding)
    assert source.owns_matrix
    if tied:
        assert isinstance(head, FactoredHead)
        assert head.matrix is source.matrix
    else:
        assert isinstance(head, FactoredLinear)
        assert head.matrix is not source.matrix
    for name in case.others:
        assert model.get_submodule(name).matrix is source.matrix
    bias = getattr(head, "bias", None)
    if bias is not None and any(key.endswith("decoder.bias") for key in model.all_tied_weights_keys):
        assert sum(p is bias for _, p in model.named_parameters(remove_duplicate=False)) == 2


def assert_same(first: Any, second: Any, output: Any = logits) -> None:
    """Every stored number is the same, and so are the outputs (up to the order of sums: memory is laid out anew)."""
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    torch.testing.assert_close(output(first), output(second))


def train_one_step(model: Any) -> None:
    """One step of SGD on the model's own loss; every factor must move and stay finite."""
    model.train()
    factors = {n: p for _, layer in factored_layers(model) for n, p in layer.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in factors.items()}
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.eval()
    for name, parameter in factors.items():
        assert torch.isfinite(parameter).all()
        assert not torch.equal(parameter, before[name]), f"{name} did not move"


@every_architecture
@tied_and_untied
def test_a_whole_life(case: Architecture, tied: bool, make_matrix: Any, tmp_path: Path) -> None:
    model = case.make(tied)
    model.save_pretrained(tmp_path / "dense")
    weight = find_weight(model, case.table)
    assert {place.name for place in weight.places} >= {weight.name, *case.others}
    assert ("head" in {place.role for place in weight.places}) == tied

    dense = compress(model, case, make_matrix, tied)
    assert_tied(model, case, tied)
    assert find_weights(model) == tuple(w for w in find_weights(model) if w.shape[0] != VOCABULARY)
    torch.testing.assert_close(logits(model), logits(dense))

    model.save_pretrained(tmp_path / "small")
    shapes = stored(tmp_path / "small")
    assert weights_bytes(tmp_path / "small") < weights_bytes(tmp_path / "dense")
    assert all(shape[:1] != (VOCABULARY,) or len(shape) == 1 or shape[1] < 16 for shape in shapes.values()), shapes
    assert sum(key.endswith(".basis") for key in shapes) == (1 if tied else 2)

    loaded = load_exactly(case.language_model, tmp_path / "small")
    assert_tied(loaded, case, tied)
    assert_same(loaded, model)
    assert not loaded.is_quantized
    assert getattr(loaded, "hf_quantizer", None) is None

    train_one_step(loaded)
    loaded.tie_weights()
    assert_tied(loaded, case, tied)
    loaded.save_pretrained(tmp_path / "tuned")
    tables = {key: shape for key, shape in shapes.items() if "LayerNorm" not in key}
    assert tables.items() <= stored(tmp_path / "tuned").items()
    assert len(stored(tmp_path / "tuned")) == len(shapes)
    again = load_exactly(case.language_model, tmp_path / "tuned")
    assert_same(again, loaded)
    assert (logits(again) - logits(model)).abs().max() > 1e-3


@every_architecture
def test_out_of_a_head_and_into_one(case: Architecture, make_matrix: Any, tmp_path: Path) -> None:
    model = case.make(tied=True)
    dense = compress(model, case, make_matrix, tied=True)
    model.save_pretrained(tmp_path / "head")

    base = AutoModel.from_pretrained(tmp_path / "head").eval()
    torch.testing.assert_close(hidden(base), hidden(dense.base_model if not is_t5(dense) else dense))
    base.save_pretrained(tmp_path / "base")
    assert_same(load_exactly(AutoModel, tmp_path / "base"), base, hidden)

    back = case.language_model.from_pretrained(tmp_path / "base").eval()
    assert_tied(back, case, tied=True)
    torch.testing.assert_close(back.get_input_embeddings().matrix.dense(), model.get_input_embeddings().matrix.dense())

    task = getattr(transformers, case.task).from_pretrained(tmp_path / "base").eval()
    table = task.get_input_embeddings()
    assert isinstance(table, FactoredEmbedding)
    torch.testing.assert_close(table.matrix.dense(), model.get_input_embeddings().matrix.dense())
    task.save_pretrained(tmp_path / "task")
    load_exactly(getattr(transformers, case.task), tmp_path / "task")
    from_task = AutoModel.from_pretrained(tmp_path / "task").eval()
    if not is_t5(base):  # an encoder alone has no decoder to give back
        torch.testing.assert_close(hidden(from_task), hidden(base))


@every_architecture
def test_every_weight_at_once(case: Architecture, tmp_path: Path) -> None:
    """All that ``find_weights`` offers can be swapped together, saved and loaded."""
    from kflats.nn.matrix import LowRankMatrix

    model = case.make(tied=True)
    dense = copy.deepcopy(model)
    names = [w.name for w in find_weights(model)]
    assert len(set(names)) == len(names)
    for name in names:
        weight = find_weight(model, name)
        rank = max(1, min(weight.shape) // 2)
        matrix = LowRankMatrix(torch.randn(weight.shape[0], rank) * 0.1, torch.randn(rank, weight.shape[1]))
        with torch.no_grad():
            dense_weight(dense, find_weight(dense, name)).copy_(matrix.dense())
        swap_(model, weight, matrix)
    assert find_weights(model) == ()
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-4)
    annotate_(model)
    model.save_pretrained(tmp_path)
    loaded = load_exactly(case.language_model, tmp_path)
    assert_same(loaded, model)
