"""Proof as laws, for every kind of model: equal models lose nothing, more noise loses more, batches change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kflats.evaluation.outputs import Judge

transformers = pytest.importorskip("transformers", minversion="5.0")

BERT = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": 3}
GPT2 = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": 2, "eos_token_id": 3}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VIT |= {"image_size": 24, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
SOUND = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SOUND |= {"intermediate_size": 32, "conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (10, 8)}
SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
WHISPER = {"vocab_size": 300, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
WHISPER |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1}
WHISPER |= {"eos_token_id": 2, "decoder_start_token_id": 3}
BART = {"vocab_size": 300, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "eos_token_id": 3}
BART |= {"pad_token_id": 0, "bos_token_id": 2, "decoder_start_token_id": 3, "max_position_embeddings": 64}
MULTI = {"problem_type": "multi_label_classification"}

# The class, its config, the settings, and what its outputs are.
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertModel", "BertConfig", BERT, "encoder"),
    "bert classifier": ("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 3}, "classifier"),
    "bert multi-label": (
        "BertForSequenceClassification", "BertConfig", BERT | MULTI | {"num_labels": 4}, "multi-label classifier",
    ),
    "bert regression": ("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 1}, "regression"),
    "bert tagger": ("BertForTokenClassification", "BertConfig", BERT | {"num_labels": 5}, "token classifier"),
    "bert with spans": ("BertForQuestionAnswering", "BertConfig", BERT, "encoder"),
    "masked bert": ("BertForMaskedLM", "BertConfig", BERT, "masked language model"),
    "gpt2 body": ("GPT2Model", "GPT2Config", GPT2, "encoder"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "causal language model"),
    "gpt2 classifier": ("GPT2ForSequenceClassification", "GPT2Config", GPT2 | {"num_labels": 3}, "classifier"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "encoder-decoder"),
    "t5 body": ("T5Model", "T5Config", T5, "encoder"),
    "t5 encoder": ("T5EncoderModel", "T5Config", T5, "encoder"),
    "bart classifier": ("BartForSequenceClassification", "BartConfig", BART | {"num_labels": 3}, "classifier"),
    "vit": ("ViTModel", "ViTConfig", VIT, "encoder"),
    "vit classifier": ("ViTForImageClassification", "ViTConfig", VIT | {"num_labels": 3}, "classifier"),
    "resnet": ("ResNetModel", "ResNetConfig", RESNET, "encoder"),
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", SOUND, "encoder"),
    "wav2vec2 letters": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, "token classifier"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "encoder-decoder"),
}  # fmt: skip
TEXTS = [
    "a b c the word1 word2",
    "word10 of the word11",
    "d e f g h i j a b c d e f word40 word41",
    "the of the of",
    "word100 word101 word102 word103",
    "h",
    *(f"word{i} the word{2 * i} of word{3 * i}" for i in range(12)),
]


@pytest.fixture(scope="module")
def tiny() -> Callable[[str], Any]:
    def build(name: str) -> Any:
        kind, config, settings, _ = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
        with torch.no_grad():  # untrained heads are near zero: their outputs would all be alike
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.ndim > 1 and "conv" not in config else 1)
        return model

    return build


def noisy(model: Any, amount: float) -> Any:
    """A copy with noise in every matrix, of ``amount`` times its root mean square; the noise differs in size alone."""
    other, draws = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=draws)
                parameter.add_(amount * parameter.square().mean().sqrt() * noise)
    return other


def reads(name: str, tokenizer: Any) -> tuple[Any, Any]:
    """The tokenizer and the texts for a model, or none for one that reads no text."""
    read = not name.startswith(("vit", "resnet", "wav2vec2", "whisper"))
    return (tokenizer, TEXTS) if read else (None, None)


@pytest.mark.parametrize("name", MODELS)
def test_equal_models_lose_nothing_and_more_noise_loses_more(
    name: str, tiny: Callable[[str], Any], tiny_tokenizer: Any
) -> None:
    model = tiny(name)
    judge = Judge(model, *reads(name, tiny_tokenizer))
    assert judge.kind == MODELS[name][3]
    same = judge(copy.deepcopy(model))
    assert (same.loss, same.quality, same.tail_loss, same.worst) == (0, 1, 0, ())
    losses = [judge(noisy(model, amount)).loss for amount in (0.003, 0.03, 0.3)]
    assert 0 < losses[0] < losses[1] < losses[2]
    assert losses[0] < 0.1 * losses[2]
