"""Tiny models of many architectures, what they compute, and how they are loaded and compared: shared by tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

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


def assert_same(first: Any, second: Any, output: Any = logits) -> None:
    """Every stored number is the same, and so are the outputs (up to the order of sums: memory is laid out anew)."""
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    torch.testing.assert_close(output(first), output(second))


def mixture_of_experts() -> Any:
    """A decoder whose experts are one tensor of each layer."""
    sizes = _DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3MoeConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()
