"""Models of many families with fewer entries: the same outputs where the entries suffice, and files that load."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_modules import sentence_modules

import kflats
from kflats.calibration.windows import windows
from kflats.common.errors import KflatsError
from kflats.evaluation.outputs import load_tokenizer, weight_file_bytes
from kflats.io import load_model
from kflats.report.html import render
from kflats.report.report import Report
from kflats.trimming.trimming import TRIM_FILE, trim, trim_folder

transformers = pytest.importorskip("transformers", minversion="5.0")
tokenizers = pytest.importorskip("tokenizers")
models, trainers, splits = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
BYTES = [f"<0x{b:02X}>" for b in range(256)]
UNUSED = ["[", "##u", "##n", "##s", "##e", "##d", "##0", "##]"]


def texts(count: int = 200) -> list[str]:
    chance = random.Random(0)
    syllables = [a + b for a in "bdfgklmn" for b in ("a", "e", "i", "o", "ul")]
    words = ["".join(chance.choices(syllables, k=1 + rank // 60)) for rank in range(240)]
    return [" ".join(chance.choices(words, [1 / (r + 3) for r in range(240)], k=10)) for _ in range(count)]


def learned(kind: str, special: list[str], size: int) -> dict[str, Any]:
    """The model part of a trained ``tokenizer.json``."""
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": False}
    if kind == "wordpiece":
        made, trainer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer(**options)
        made.pre_tokenizer = splits.Whitespace()
    elif kind == "unigram":
        made, trainer = tokenizers.Tokenizer(models.Unigram()), trainers.UnigramTrainer(**options, unk_token="<unk>")
        made.pre_tokenizer = splits.Metaspace()
    elif kind == "metaspace":
        made, trainer = tokenizers.Tokenizer(models.BPE()), trainers.BpeTrainer(**options)
        made.pre_tokenizer = splits.Metaspace()
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(**options, initial_alphabet=splits.ByteLevel.alphabet())
    made.train_from_iterator(texts(), trainer)
    found: dict[str, Any] = json.loads(made.to_str())["model"]
    return found


def bert_tokenizer() -> Any:
    """Like BERT's own: an unused entry at the beginning, every character of which has an entry of its own."""
    vocab = learned("wordpiece", ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], 288)["vocab"]
    vocab |= {mark: len(vocab) + i for i, mark in enumerate(m for m in UNUSED if m not in vocab)}
    return transformers.BertTokenizer(vocab=vocab)


def unigram(kind: str, special: list[str], **options: Any) -> Any:
    model = learned("unigram", special, 300)
    return getattr(transformers, kind)(vocab=[tuple(entry) for entry in model["vocab"]], **options)


def bpe(kind: str, split: str, special: list[str], size: int = 480, **options: Any) -> Any:
    model = learned(split, special, size)
    return getattr(transformers, kind)(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], **options)


def ids_of(tokenizer: Any) -> dict[str, Any]:
    names = ("pad", "bos", "eos")
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}


FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def bert() -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(tokenizer), **TINY)), tokenizer


def albert() -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    config = transformers.AlbertConfig(vocab_size=len(tokenizer), embedding_size=8, **TINY)
    return transformers.AlbertForMaskedLM(config), tokenizer


def electra() -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    return transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(vocab_size=len(tokenizer), embedding_size=8, **TINY)
    ), tokenizer


def distilbert() -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    config = transformers.DistilBertConfig(vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=24)
    return transformers.DistilBertForMaskedLM(config), tokenizer


def xlm_roberta() -> tuple[Any, Any]:
    """Unigram; positions that begin after the padding id; a table padded beyond the tokenizer."""
    tokenizer = unigram("XLMRobertaTokenizer", FAIRSEQ)
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer) + 11, max_position_embeddings=64, **TINY)
    config.update(ids_of(tokenizer))
    return transformers.XLMRobertaForMaskedLM(config), tokenizer


def roberta() -> tuple[Any, Any]:
    tokenizer = bpe("RobertaTokenizer", "bytes", FAIRSEQ)
    config = transformers.RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **TINY)
    return transformers.RobertaForSequenceClassification(config), tokenizer


def bart() -> tuple[Any, Any]:
    """A bias of logits in a buffer, and ids in the generation config."""
    tokenizer = bpe("RobertaTokenizer", "bytes", FAIRSEQ)
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    config = transformers.BartConfig(vocab_size=len(tokenizer), d_model=16, **layers, **heads)
    model = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias.copy_(torch.randn(1, len(tokenizer)))
    model.generation_config.suppress_tokens = [tokenizer.convert_tokens_to_ids("z"), 300]
    return model, tokenizer


def gpt2() -> tuple[Any, Any]:
    """A tied head; its only special token stands at the end, where every id before it changes."""
    tokenizer = bpe("GPT2Tokenizer", "bytes", [])
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config.update({"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id})
    return transformers.GPT2LMHeadModel(config), tokenizer


def llama() -> tuple[Any, Any]:
    """Bytes to fall back on; a head of its own; several ends of text."""
    tokenizer = bpe("LlamaTokenizer", "metaspace", ["<unk>", "<s>", "</s>", *BYTES], 520)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **TINY)
    config.update({"bos_token_id": 1, "eos_token_id": [2, 400]})
    return transformers.LlamaForCausalLM(config), tokenizer


def t5() -> tuple[Any, Any]:
    """Three places of one table, and a hundred added tokens."""
    tokenizer = unigram("T5Tokenizer", ["<pad>", "</s>", "<unk>"], extra_ids=10)
    config = transformers.T5Config(
        vocab_size=len(tokenizer) + 5, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config), tokenizer


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    f.__name__: f for f in (bert, albert, electra, distilbert, xlm_roberta, roberta, bart, gpt2, llama, t5)
}


def built(family: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, tokenizer = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return model.eval(), tokenizer


def said(model: Any, ids: list[int]) -> torch.Tensor:
    """What the whole model answers: logits, of an encoder-decoder its decoder's."""
    inputs = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_where_the_entries_suffice_the_model_says_the_same(family: str, tmp_path: Path) -> None:
    model, tokenizer = built(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows, mark = model.get_input_embeddings().weight.shape[0], tokenizer("ba")["input_ids"]
    must = trim_minimum(model, tokenizer)
    keep = must + (len(tokenizer) - must) // 2
    small = trim(model, tokenizer, keep=keep, texts=texts())
    kept = small.kept
    assert small.report.entries == (rows, len(kept))
    assert keep - 3 <= len(kept) <= keep
    assert small.model.config.vocab_size == small.model.get_input_embeddings().weight.shape[0] == len(kept)

    # the original is as it was
    assert tokenizer("ba")["input_ids"] == mark
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    # covered texts: the same tokens, the same answers
    new = {int(old): row for row, old in enumerate(kept)}
    covered = 0
    for text in texts(40):
        old, ids = tokenizer(text)["input_ids"], small.tokenizer(text)["input_ids"]
        if all(i in new for i in old):
            covered += 1
            assert ids == [new[i] for i in old]
            want, got = said(model, old), said(small.model, ids)
            want = want[..., kept] if want.shape[-1] == rows else want
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert covered > 3
    assert small.report.segmentation is not None
    assert small.report.segmentation.tokens_changed > 0
    assert small.report.segmentation.unknown_after == 0
    assert small.report.table_bytes[1] < small.report.table_bytes[0]
    assert small.report.model_bytes[0] - small.report.model_bytes[1] == small.report.saved > 0

    # ids in configs are those of the same tokens
    for kind in ("config", "generation_config"):  # the second where the model can generate
        config, other = getattr(model, kind, None), getattr(small.model, kind, None)
        assert (config is None) is (other is None)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "suppress_tokens"):
            was, now = getattr(config, name, None), getattr(other, name, None)
            if isinstance(was, int) and was < len(tokenizer):
                assert tokenizer.convert_ids_to_tokens(was) == small.tokenizer.convert_ids_to_tokens(now)
            if isinstance(was, list):
                assert tokenizer.convert_ids_to_tokens(was) == small.tokenizer.convert_ids_to_tokens(now)

    # saved and loaded, without kflats' help
    small.model.save_pretrained(tmp_path)
    small.tokenizer.save_pretrained(tmp_path)
    again, reader = type(model).from_pretrained(tmp_path).eval(), transformers.AutoTokenizer.from_pretrained(tmp_path)
    sample = texts(1)[0]
    ids = small.tokenizer(sample)["input_ids"]
    assert reader(sample)["input_ids"] == ids
    torch.testing.assert_close(said(again, ids), said(small.model, ids))
    heads = (model, small.model, again)
    ties = [m.get_input_embeddings().weight is getattr(m.get_output_embeddings(), "weight", None) for m in heads]
    assert len(set(ties)) == 1


def trim_minimum(model: Any, tokenizer: Any) -> int:
    with pytest.raises(KflatsError, match="that must stay") as refused:
        trim(model, tokenizer, keep=1)
    return int(str(refused.value).split("the ")[1].split(" ")[0].replace(",", ""))


def test_without_texts_the_vocabulary_says_what_is_common() -> None:
    model, tokenizer = built("bert")
    small = trim(model, tokenizer, keep=trim_minimum(model, tokenizer) + 10)
    tokens = tokenizer.convert_ids_to_tokens(small.kept.tolist())
    words = [t for t in tokens if len(t.removeprefix("##")) > 1 and not t.startswith("[")]
    listed = [t for t in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) if len(t.removeprefix("##")) > 1]
    assert words == [t for t in listed if not t.startswith("[")][:10]
    assert "[unused0]" not in tokens
    assert small.report.segmentation is None


def test_the_report_is_measured_on_eval_texts() -> None:
    model, tokenizer = built("bert")
    keep = trim_minimum(model, tokenizer) + 30
    report = trim(model, tokenizer, keep=keep, texts=texts(50), eval_texts=["bulbul kilomedufa"]).report
    told = report.segmentation
    assert told is not None
    assert told.texts == 1
    assert not report.counted
    assert told.tokens_before == len(tokenizer.tokenize("bulbul kilomedufa"))
    assert "segmented anew" in str(report)
    assert "counted texts (others change more)" in str(replace(report, counted=True))


def test_tokens_that_changed_are_counted_in_their_places() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b", "ab", "ba", "##ab"]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    model = transformers.BertModel(transformers.BertConfig(vocab_size=12, **TINY))
    told = trim(model, tokenizer, keep=10, texts=["ab ab ba", "ab c", "a"]).report.segmentation
    assert told is not None
    assert (told.texts, told.texts_changed) == (3, 1)
    assert (told.tokens_before, told.tokens_after, told.tokens_changed) == (6, 7, 1)
    assert (told.unknown_before, told.unknown_after) == (1, 1)


def test_all_entries_may_be_kept_and_padding_rows_go() -> None:
    model, tokenizer = built("xlm_roberta")
    small = trim(model, tokenizer, keep=len(tokenizer))
    assert small.report.entries == (len(tokenizer) + 11, len(tokenizer))
    assert small.tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 0}, "not a number of entries"),
        ({"keep": True}, "not a number of entries"),
        ({"keep": 10**6}, "more than the .* of the vocabulary"),
        ({"keep": 3}, "must stay"),
        ({"keep": 150, "texts": "one string"}, "not one string"),
        ({"keep": 150, "texts": []}, "no texts"),
        ({"keep": 150, "texts": [3]}, "a text must be a string"),
        ({"keep": 150, "eval_texts": []}, "report of trimming needs texts"),
    ],
)
def test_bad_requests(change: dict[str, Any], message: str) -> None:
    model, tokenizer = built("bert")
    with pytest.raises(KflatsError, match=message):
        trim(model, tokenizer, **change)


def test_a_model_without_texts_is_refused_for_that_and_not_for_its_tokenizer(tmp_path: Path) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "intermediate_size": 16, "hidden_size": 16}
    config = transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(KflatsError, match="ViTModel has no token embeddings"):
        trim_folder(tmp_path / "vit", tmp_path / "out", keep=100)
    assert not (tmp_path / "out").exists()


def test_bad_models() -> None:
    model, tokenizer = built("bert")
    with pytest.raises(KflatsError, match="a tokenizer is needed"):
        trim(model, keep=150)
    with pytest.raises(KflatsError, match="no fast tokenizer"):
        trim(model, object(), keep=150)
    with pytest.raises(KflatsError, match="has no token embeddings"):
        trim(torch.nn.Linear(3, 3), tokenizer, keep=150)
    other = transformers.BertModel(transformers.BertConfig(vocab_size=200, **TINY))
    with pytest.raises(KflatsError, match="ids up to"):
        trim(other, tokenizer, keep=150)
    model.register_buffer("logit_masks", torch.zeros(2, len(tokenizer)))
    with pytest.raises(KflatsError, match="logit_masks"):
        trim(model, tokenizer, keep=150)
    del model.logit_masks
    kflats.compress_(model, kflats.SVD(), keep="60%", quiet=True)
    with pytest.raises(KflatsError, match="a compressed model cannot be trimmed"):
        trim(model, tokenizer, keep=150)


def test_weights_that_are_not_finite_are_named_as_that() -> None:
    model, tokenizer = built("bert")
    with torch.no_grad():
        next(layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)).weight[0, 0] = math.nan
    with pytest.raises(KflatsError, match="outputs are not finite"):
        trim(model, tokenizer, keep=150, texts=texts(5))


def test_a_place_that_is_not_known_is_noticed() -> None:
    """A model that reads an id from where trimming cannot see is refused, not spoilt."""
    model, tokenizer = built("bert")
    last = len(tokenizer) - 1  # a single character, which always stays
    row = model.get_input_embeddings().weight[last].detach().clone()
    table = model.get_input_embeddings()
    hook = table.register_forward_hook(lambda module, args, out: out + (args[0] == last).unsqueeze(-1) * row)
    try:
        with pytest.raises(KflatsError, match="gives other outputs"):
            trim(model, tokenizer, keep=150, texts=texts(5))
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder of a tiny BERT, with the old vocabulary in a second form too."""
    modules = sentence_modules()
    from sentence_transformers import SentenceTransformer

    where = tmp_path_factory.mktemp("st")
    _, tokenizer = built("bert")
    transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **TINY)).save_pretrained(where / "a")
    tokenizer.save_pretrained(where / "a")
    inner = modules.Transformer(str(where / "a"), max_seq_length=20)
    parts = [inner, modules.Pooling(16, "mean"), modules.Normalize()]
    made = SentenceTransformer(modules=parts, prompts={"query": "ba "})
    made.save(str(where / "b"))
    (where / "b" / "vocab.txt").write_text("\n".join(tokenizer.get_vocab()))
    (where / "b" / "README.md").write_text("card")
    return where / "b"


def test_sentence_transformers_folders_keep_working(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    report = trim_folder(folder, tmp_path / "small", keep=170, texts=texts())
    assert not (tmp_path / "small" / "vocab.txt").exists()
    card = (tmp_path / "small" / "README.md").read_text()
    assert card.startswith("---\ntags:\n- kflats\n---\n\n# Vocabulary trimmed by kflats\n")
    assert card.endswith("\n# The original's card\n\ncard\n")
    assert f"| vocabulary entries | {report.entries[0]} | 170 |" in card
    assert report.segmentation is not None
    changed = 100 * report.segmentation.texts_changed / 200
    assert f"Of 200 counted texts (others change more) {changed:.1f} % are segmented anew" in card
    record = json.loads((tmp_path / "small" / TRIM_FILE).read_text())
    assert record["report"]["entries"] == list(report.entries)
    assert len(record["kept"]) == 170
    before, after = (SentenceTransformer(str(where), device="cpu") for where in (folder, tmp_path / "small"))
    assert after.max_seq_length == 20
    assert after.prompts["query"] == "ba "
    new, tokenizer = set(record["kept"]), load_tokenizer(folder)
    covered = [t for t in texts(60) if set(tokenizer(t)["input_ids"]) <= new]
    assert len(covered) > 3
    old, now = (m.encode(covered, convert_to_tensor=True, prompt_name="query") for m in (before, after))
    torch.testing.assert_close(now, old, atol=1e-5, rtol=1e-4)

    made = trim(before, keep=170, texts=texts())  # the object itself
    assert made.model.tokenizer is made.tokenizer
    assert before.tokenizer is not made.tokenizer
    torch.testing.assert_close(made.model.encode(covered, convert_to_tensor=True, prompt_name="query"), now)


@pytest.mark.slow
def test_the_folder_loads_without_kflats(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    trim_folder(folder, small, keep=170, texts=texts())
    program = f"""
import sys, transformers
model = transformers.AutoModel.from_pretrained({str(small)!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({str(small)!r})
assert "kflats" not in sys.modules and len(tokenizer) == model.config.vocab_size == 170
print(model(**tokenizer("ba dulfa", return_tensors="pt")).last_hidden_state.shape[-1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "16", done.stderr


def test_two_folders_compare_as_their_models_do(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    trim_folder(folder, small, keep=170, texts=texts())
    found = kflats.compare(folder, small, texts(30), turns=1)
    assert 0 < found.outputs.loss < 0.8
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    wide = kflats.fidelity(
        model, load_model(small), tokenizer, texts(30), compressed_tokenizer=load_tokenizer(small), words=1
    )
    assert wide.mean_cosine == pytest.approx(found.outputs.quality, abs=1e-5)


def test_two_vocabularies_of_one_size_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """Each folder is read with its own tokenizer, also where the tables have as many rows."""
    one, two = tmp_path / "one", tmp_path / "two"
    trim_folder(folder, one, keep=170, texts=texts())
    trim_folder(folder, two, keep=170)
    read_by = [load_tokenizer(where) for where in (one, two)]
    assert read_by[0].get_vocab() != read_by[1].get_vocab()
    both = [load_model(where) for where in (one, two)]
    wanted = kflats.fidelity(*both, read_by[0], texts(30), compressed_tokenizer=read_by[1], words=1)
    found = kflats.compare(one, two, texts(30), turns=1)
    assert found.outputs.quality == pytest.approx(wanted.mean_cosine, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "files"),
    [
        (0.6, "float16"),
        pytest.param(0.6, "without a layer norm", marks=pytest.mark.slow),
        pytest.param(1.0, "float16", marks=pytest.mark.slow),
        pytest.param(1.0, "without a layer norm", marks=pytest.mark.slow),
    ],
)
def test_shares_of_trimmed_files_that_hold_other_bytes_than_are_loaded(
    files: str, share: float, folder: Path, tmp_path: Path
) -> None:
    source, small = tmp_path / "source", tmp_path / "small"
    shutil.copytree(folder, source)
    tensors = load_file(source / "model.safetensors")
    if files == "float16":
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if "embeddings.LayerNorm" not in name}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    settings: dict[str, Any] = {"texts": texts(), "proof": False, "quiet": True}
    report = kflats.compress_folder(source, small, trim=170, size=f"{100 * share:g}%", **settings)
    assert report.trimming is not None
    saved = report.trimming.saved // (2 if files == "float16" else 1)
    more = 0 if files == "float16" else 2 * 16 * 4  # the loaded model has the norm
    assert 0 < weight_file_bytes(small) <= share * (weight_file_bytes(source) - saved + more)


def test_trimming_in_front_of_compression(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    settings = {"method": kflats.SVD(), "texts": texts(), "quiet": True}
    report = kflats.compress_folder(folder, out, keep="50%", trim=170, **settings)
    assert report.trimming is not None
    assert report.trimming.entries[1] == 170
    assert report.weights[0].shape == (170, 16)
    assert report.weights[0].bytes_after <= 170 * 16 * 4 / 2
    assert Report.load(out) == report
    assert "vocabulary trimmed first" in str(report)
    card = (out / "README.md").read_text()
    assert f"| vocabulary entries | {report.trimming.entries[0]} | 170 |" in card
    assert "The vocabulary was trimmed first. The tokenizer of this folder spells removed tokens" in card
    whole = [kflats.common.formatting.size(n) for n in (report.trimming.model_bytes[0], report.model_bytes_after)]
    assert f"| all tensors | {' | '.join(whole)} |" in card
    assert len(load_tokenizer(out)) == load_model(out).config.vocab_size == 170
    assert not (out / "vocab.txt").exists()
    assert kflats.compare(folder, out, texts(20), turns=1).outputs.loss < 1
    counted = windows(texts(), load_tokenizer(folder), model=load_model(folder)).counted
    step = trim_folder(folder, tmp_path / "first", keep=170, texts=counted)
    apart = kflats.compress_folder(tmp_path / "first", tmp_path / "second", keep="50%", **settings)
    assert step == report.trimming
    card = (tmp_path / "second" / "README.md").read_text()  # that of the trimmed model stays below
    assert card.index("compressed by kflats") < card.index("# Vocabulary trimmed by kflats") < card.rindex("card\n")
    assert apart.weights[0].error == pytest.approx(report.weights[0].error)
    page = render(report, tmp_path / "page").read_text()
    assert f"from {report.trimming.entries[0]} entries to 170" in page
    plan = kflats.plan(load_model(folder), kflats.SVD(), keep="50%", quiet=True)
    with pytest.raises(KflatsError, match="trim is not supported with a plan"):
        kflats.compress_folder(folder, tmp_path / "third", plan=plan, trim=170)
    batches = [dict(load_tokenizer(folder)("ba dulfa", return_tensors="pt"))]
    known = kflats.Statistics({}, samples=1)
    for given, what in (({"calibration": batches}, "batches of ids"), ({"statistics": known}, "statistics")):
        with pytest.raises(KflatsError, match=f"trim is not supported with {what}"):
            kflats.compress_folder(folder, tmp_path / "third", keep="50%", method=kflats.SVD(), trim=170, **given)
    assert not (tmp_path / "third").exists()


def test_the_command(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kflats.cli.app import app

    (tmp_path / "texts.txt").write_text("\n".join(texts(50)))
    (tmp_path / "others.txt").write_text("kilomedufa\n")
    arguments = ["trim", str(folder), "--keep", "170", "--texts", str(tmp_path / "texts.txt")]
    arguments += ["--eval-texts", str(tmp_path / "others.txt"), "--out", str(tmp_path / "small")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "vocabulary entries" in done.stdout
    assert "Of 1 other texts" in done.stdout
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    few = CliRunner().invoke(app, ["trim", str(folder), "--keep", "4", "--out", str(tmp_path / "few")])
    assert few.exit_code == 2
    assert "must stay" in few.stderr
    assert not (tmp_path / "few").exists()
