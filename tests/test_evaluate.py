"""Evaluation as laws: a model equals itself, padding and order change nothing, broken tables are noticed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.text_files import read_texts
from kflats.common.texts import packaged_texts
from kflats.evaluation.outputs import (
    fidelity,
    load_tokenizer,
    memory_bytes,
    neighbour_overlap,
)
from kflats.evaluation.running import encode, rare_words

transformers = pytest.importorskip("transformers")

WORDS = [f"word{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(10)]
TEXTS = [
    "wordaa wordab wordac",
    "wordjj",
    "wordba wordbb wordbc wordbd wordaa wordaa wordaa",
    "wordca wordcb",
    "wordaa",
]


def word_tokenizer(pad: str | None = "[PAD]") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, unk_token="[UNK]")


SIZES = {"vocab_size": 102, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "bert": lambda t: t.BertConfig(**SIZES, intermediate_size=32),
    "roberta": lambda t: t.RobertaConfig(**SIZES, intermediate_size=32, max_position_embeddings=40),
    "gpt2": lambda t: t.GPT2Config(vocab_size=102, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    "llama": lambda t: t.LlamaConfig(**SIZES, intermediate_size=32),
    "xlnet": lambda t: t.XLNetConfig(vocab_size=102, d_model=16, n_layer=2, n_head=2, d_inner=32),
    "t5": lambda t: t.T5Config(vocab_size=102, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
}


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(CONFIGS[name](transformers))


@pytest.fixture(scope="module")
def real(minilm: Path) -> tuple[Any, Any]:
    return transformers.AutoModel.from_pretrained(minilm), load_tokenizer(minilm)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_vector_does_not_depend_on_the_batch(name: str) -> None:
    model, tokenizer = tiny(name), word_tokenizer()
    alone = torch.cat([encode(model, tokenizer, [text]) for text in TEXTS])
    assert alone.shape == (5, 16)
    assert torch.allclose(alone.norm(dim=1), torch.ones(5), atol=1e-6)
    for batch in (1, 2, 32):
        assert torch.allclose(encode(model, tokenizer, TEXTS, batch), alone, atol=2e-5)


def test_a_vector_is_the_mean_of_the_hidden_states() -> None:
    model, tokenizer = tiny("bert").eval(), word_tokenizer()
    with torch.no_grad():
        hidden = model(torch.tensor([tokenizer(TEXTS[0])["input_ids"]])).last_hidden_state[0]
    mean = hidden.mean(0)
    assert torch.allclose(encode(model, tokenizer, TEXTS)[0], mean / mean.norm(), atol=1e-5)


def test_task_heads_and_missing_padding_tokens_change_nothing() -> None:
    base = tiny("gpt2")
    head = transformers.GPT2LMHeadModel(base.config)
    head.transformer.load_state_dict(base.state_dict())
    without = word_tokenizer(pad=None)
    assert torch.allclose(encode(base, word_tokenizer(), TEXTS), encode(head, without, TEXTS), atol=1e-6)
    seq2seq = transformers.T5ForConditionalGeneration(CONFIGS["t5"](transformers))
    assert encode(seq2seq, without, TEXTS).shape == (5, 16)


def test_every_module_gets_its_own_mode_back() -> None:
    model = tiny("bert").train()
    model.embeddings.eval()
    before = {name: module.training for name, module in model.named_modules()}
    first = encode(model, word_tokenizer(), TEXTS)
    assert torch.equal(first, encode(model, word_tokenizer(), TEXTS))  # dropout was off
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not first.requires_grad
    assert not first.is_inference()
    assert all(p.grad is None for p in model.parameters())


def test_long_and_empty_texts() -> None:
    model, tokenizer = tiny("roberta"), word_tokenizer()
    assert torch.isfinite(encode(model, tokenizer, ["wordaa " * 500, ""])).all()


def test_what_cannot_be_encoded() -> None:
    model, tokenizer = tiny("bert"), word_tokenizer()
    with pytest.raises(KflatsError, match="no texts"):
        encode(model, tokenizer, [])
    with pytest.raises(KflatsError, match="tokenizer is needed"):
        encode(model, None, TEXTS)
    small = transformers.BertModel(transformers.BertConfig(**{**SIZES, "vocab_size": 20}, intermediate_size=32))
    with pytest.raises(KflatsError, match="own folder"):
        encode(small, tokenizer, TEXTS)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[2] = torch.nan
    with pytest.raises(KflatsError, match="not finite"):
        encode(model, tokenizer, TEXTS)
    with pytest.raises(KflatsError, match="no last hidden state"):
        encode(Plain(), tokenizer, TEXTS)


class Plain(nn.Module):
    """Takes what a transformers model takes and answers otherwise."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_rare_words_are_unseen_whole_words_of_the_tail() -> None:
    tokenizer = word_tokenizer()
    tail = WORDS[-25:]
    assert list(rare_words(tokenizer)) == tail
    assert "wordjj" not in rare_words(tokenizer, TEXTS)
    few = rare_words(tokenizer, count=4)
    assert len(few) == 4
    assert set(few) <= set(tail)
    assert few == rare_words(tokenizer, count=4)


def test_a_model_is_faithful_to_itself() -> None:
    model, tokenizer = tiny("bert"), word_tokenizer()
    found = fidelity(model, copy.deepcopy(model), tokenizer, TEXTS)
    assert found.mean_cosine == pytest.approx(1, abs=1e-6)
    assert found.p5_cosine == pytest.approx(1, abs=1e-6)
    assert found.rare_mean_cosine == pytest.approx(1, abs=1e-6)
    assert (found.neighbour_overlap, found.sentences, found.rare_words) == (1.0, 5, 24)


def test_a_starved_tail_shows_in_rare_words_and_not_in_the_mean() -> None:
    model, tokenizer = tiny("bert"), word_tokenizer()
    starved = copy.deepcopy(model)
    with torch.no_grad():
        starved.embeddings.word_embeddings.weight[-25:].normal_()
    found = fidelity(model, starved, tokenizer, [t for t in TEXTS if "wordjj" not in t])
    assert found.mean_cosine > 0.999
    assert found.rare_mean_cosine is not None
    assert found.rare_mean_cosine < 0.9


def test_models_of_different_width_are_refused() -> None:
    wide = transformers.BertModel(transformers.BertConfig(**{**SIZES, "hidden_size": 32}, intermediate_size=32))
    with pytest.raises(KflatsError, match="cannot be compared"):
        fidelity(tiny("bert"), wide, word_tokenizer(), TEXTS)


def test_neighbour_overlap_by_hand_and_in_blocks() -> None:
    a, b = (nn.functional.normalize(torch.randn(50, 8), dim=1) for _ in range(2))
    by_hand = 0.0
    for i in range(50):
        sets = []
        for vectors in (a, b):
            order = [j for j in (vectors @ vectors[i]).argsort(descending=True).tolist() if j != i]
            sets.append(set(order[:10]))
        by_hand += len(sets[0] & sets[1]) / 10 / 50
    for block in (7, 50, 1024):
        assert neighbour_overlap(a, b, block=block) == pytest.approx(by_hand)
    assert neighbour_overlap(a, a) == 1.0
    assert neighbour_overlap(a[:2], b[:2]) is None
    assert neighbour_overlap(a[:3], a[:3]) == 1.0


def test_memory_counts_shared_tensors_once() -> None:
    config = transformers.GPT2Config(vocab_size=102, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=True)
    head, base = transformers.GPT2LMHeadModel(config), transformers.GPT2Model(config)
    assert memory_bytes(head) == memory_bytes(base)


@pytest.mark.slow
def test_the_real_model(real: tuple[Any, Any]) -> None:
    model, tokenizer = real
    vectors = encode(model, tokenizer, ["A dog runs.", "A puppy is running.", "Stocks fell sharply on Monday."])
    assert vectors.shape == (3, 384)
    assert vectors[0] @ vectors[1] > 0.6 > vectors[0] @ vectors[2] + 0.3
    words = rare_words(tokenizer, packaged_texts("count"), count=50)
    assert len(words) == 50
    assert all(len(tokenizer(w, add_special_tokens=False)["input_ids"]) == 1 for w in words)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(KflatsError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    for broken in ("{", "{}", "[]"):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(KflatsError, match="no tokenizer"):
            load_tokenizer(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("wordaa")["input_ids"] == [2]


def test_texts_files(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffEins.\r\n\r\n  Zwei über drei. \nvier".encode())
    assert read_texts(file) == ("Eins.", "Zwei über drei.", "vier")
    for content, message in (
        (b"", "no text"),
        (b" \n\t\n", "no text"),
        (b"abc\0def", "zero bytes"),
        ("für".encode("latin-1"), "other than UTF-8"),
        ("two bytes".encode("utf-16"), "zero bytes"),
    ):
        file.write_bytes(content)
        with pytest.raises(KflatsError, match=message):
            read_texts(file)
    with pytest.raises(KflatsError, match="cannot be read"):
        read_texts(tmp_path / "none.txt")
    with pytest.raises(KflatsError, match="count or judge"):
        packaged_texts("../secrets")
