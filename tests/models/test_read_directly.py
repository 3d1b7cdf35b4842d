"""Layers whose tensors a model reads without calling them are refused; all the others can be factored together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from factoring import factor
from torch import Tensor, nn
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder

from kflats.common.errors import KflatsError
from kflats.evaluation.trial import tried, tried_on_drawn
from kflats.model.weights import find_weight, find_weights

_COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_TEXT = {**_COMMON, "vocab_size": 99}
_SPEECH = {**_COMMON, "conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
_SPEECH |= {"tdnn_dim": (16, 16, 16, 16, 24), "xvector_output_dim": 16}
_SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
_REFORMER = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
_REFORMER |= {"feed_forward_size": 40, "axial_pos_shape": [4, 2], "axial_pos_embds_dim": [16, 16], "num_buckets": 2}
_REFORMER |= {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "attn_layers": ["lsh", "local"]}
_GEMMA = {**_TEXT, "intermediate_size": [40, 40], "num_key_value_heads": 2, "head_dim": 8, "laurel_rank": 4}
_GEMMA |= {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
_GEMMA |= {"layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0, 0.0]}

IDS = torch.randint(5, 99, (2, 8), generator=torch.Generator().manual_seed(1))
SOUND = {"input_values": torch.randn(2, 200, generator=torch.Generator().manual_seed(1))}
PIXELS = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
BOXES = {"bbox": torch.zeros(2, 8, 4, dtype=torch.long)}

# Model, config, settings, inputs, and the ends of the names that are refused.
READERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Tensor], set[str]]] = {
    "clipseg": (
        "CLIPSegVisionModel",
        "CLIPSegVisionConfig",
        {**_COMMON, "image_size": 8, "patch_size": 4},
        PIXELS,
        {"position_embedding"},
    ),
    "deberta": (
        "DebertaForMaskedLM",
        "DebertaConfig",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
        {"input_ids": IDS},
        {"in_proj", "rel_embeddings"},
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        {"input_ids": IDS},
        {"rel_embeddings"},
    ),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", _GEMMA, {"input_ids": IDS}, {"_coefs"}),
    "layoutlmv3": (
        "LayoutLMv3Model",
        "LayoutLMv3Config",
        {**_TEXT, "coordinate_size": 5, "shape_size": 6, "visual_embed": False, "max_2d_position_embeddings": 64},
        {"input_ids": IDS, **BOXES},
        {"rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        {"input_ids": IDS},
        {"x_proj", "dt_proj", "out_proj"},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 2},
        {"input_ids": IDS},
        {"out_proj"},
    ),
    "reformer": (
        "ReformerModel",
        "ReformerConfig",
        _REFORMER,
        {"input_ids": IDS},
        {"query_key", "self_attention.value"},
    ),
    "clip": ("CLIPTextModel", "CLIPTextConfig", _TEXT, {"input_ids": IDS}, {"position_embedding"}),
    "vilt": (
        "ViltModel",
        "ViltConfig",
        {**_TEXT, "image_size": 16, "patch_size": 4, "max_position_embeddings": 16},
        {"input_ids": IDS, **PIXELS},
        {"patch_embeddings.projection"},
    ),
    "wavlm": (
        "WavLMForXVector",
        "WavLMConfig",
        _SPEECH,
        SOUND,
        {".kernel", "_proj", "gru_rel_pos_linear", "rel_attn_embed"},
    ),
}


# From transformers 5.24 on LayoutLMv3's layers are given to a function that reads them, which only a run shows.
STATIC = (
    READERS
    if not hasattr(LayoutLMv3Encoder, "_relative_position_lookup")
    else {k: v for k, v in READERS.items() if k != "layoutlmv3"}
)


@pytest.mark.parametrize(("kind", "config", "settings", "inputs", "refused"), STATIC.values(), ids=STATIC)
def test_what_a_model_reads_is_left_alone(
    kind: str, config: str, settings: dict[str, Any], inputs: dict[str, Tensor], refused: set[str]
) -> None:
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    places = {place.name for weight in find_weights(model) for place in weight.places}
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d)]
    left = [name for name in layers if name not in places]
    assert left
    assert {end for end in refused for name in left if name.endswith(end)} == refused
    for name in left:
        assert name.endswith(tuple(refused))
        with pytest.raises(KflatsError, match="reads its numbers or its shape itself"):
            find_weight(model, name)
    dense = factor(model)
    with torch.no_grad():
        outputs = []
        for net in (model, dense):
            torch.manual_seed(1)  # Reformer draws its hashes, ViLT its patches
            outputs.append(next(value for value in net(**inputs).values() if isinstance(value, Tensor)))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


def test_layers_that_are_given_to_a_function_are_found_by_a_run() -> None:
    kind, config, settings, inputs, refused = READERS["layoutlmv3"]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    places = {place.name for weight in find_weights(model) for place in weight.places}
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d)}
    for trial in (tried(model, inputs), tried_on_drawn(model)):
        found = {name.removesuffix(".weight") for name in trial.read} | (layers - places)
        assert {end for end in refused for name in found if name.endswith(end)} == refused


class Pads(transformers.BertModel):
    """Reads its token table in a helper, and that of positions as well as calling it."""

    def padding(self) -> Tensor:
        return self.embeddings.word_embeddings.weight[0] + self.embeddings.position_embeddings.weight[0]


class PadsAlways(Pads):
    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs).last_hidden_state + self.embeddings.word_embeddings.weight[0]


def test_what_a_helper_reads_of_the_token_table_leaves_it_a_weight_and_what_forward_reads_does_not() -> None:
    config = transformers.BertConfig(**_TEXT)
    tables = [f"embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")]
    for kind, refused in ((transformers.BertModel, ()), (Pads, tables[1:2]), (PadsAlways, tables[:2])):
        found = {weight.name for weight in find_weights(kind(config))}
        assert [name for name in tables if name not in found] == list(refused)


def test_layers_in_a_plain_list_cannot_be_replaced_and_are_no_weights() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.layers = [self.first, nn.ReLU()]

    assert [weight.name for weight in find_weights(Block())] == ["second"]
