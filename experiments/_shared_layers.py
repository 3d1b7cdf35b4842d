"""A model whose blocks share one set of weights, as ALBERT's do, made from a BERT."""

from __future__ import annotations

from pathlib import Path

import torch

from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model, new_folder

_BLOCK = "encoder.albert_layer_groups.0.albert_layers.0."
_PLACES = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention.LayerNorm",
    "intermediate.dense": "ffn",
    "output.dense": "ffn_output",
    "output.LayerNorm": "full_layer_layer_norm",
}
"""Layers of a BERT's block, and what ALBERT calls them."""


def write_shared(source: Path, folder: Path) -> None:
    """An ALBERT with the embeddings, the pooler and the first block of the BERT in ``source``, the block as often as
    the BERT has blocks. A BERT of one block and this one compute the same."""
    import transformers

    bert = load_model(source).base_model
    found = bert.config
    config = transformers.AlbertConfig(
        vocab_size=found.vocab_size,
        embedding_size=found.hidden_size,
        hidden_size=found.hidden_size,
        num_hidden_layers=found.num_hidden_layers,
        num_attention_heads=found.num_attention_heads,
        intermediate_size=found.intermediate_size,
        hidden_act=found.hidden_act,
        hidden_dropout_prob=found.hidden_dropout_prob,
        attention_probs_dropout_prob=found.attention_probs_dropout_prob,
        max_position_embeddings=found.max_position_embeddings,
        type_vocab_size=found.type_vocab_size,
        layer_norm_eps=found.layer_norm_eps,
        pad_token_id=found.pad_token_id,
    )
    model = transformers.AlbertModel(config)
    state = {name: tensor for name, tensor in bert.state_dict().items() if name.startswith("embeddings.")}
    for bert_name, name in _PLACES.items():
        for kind in ("weight", "bias"):
            state[f"{_BLOCK}{name}.{kind}"] = bert.get_parameter(f"encoder.layer.0.{bert_name}.{kind}")
    state["encoder.embedding_hidden_mapping_in.weight"] = torch.eye(found.hidden_size)
    state["encoder.embedding_hidden_mapping_in.bias"] = torch.zeros(found.hidden_size)
    state |= {f"pooler.{kind}": bert.get_parameter(f"pooler.dense.{kind}") for kind in ("weight", "bias")}
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()})
    with new_folder(folder) as aside:
        model.save_pretrained(aside)
        load_tokenizer(source).save_pretrained(aside)
