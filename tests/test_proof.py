"""Proof as laws, for every kind of model: equal models lose nothing, more noise loses more, batches change nothing."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from latency import Placed, tools
from typer.testing import CliRunner

from kflats.cli.app import app
from kflats.common.errors import KflatsError
from kflats.compress import pipeline
from kflats.compress.pipeline import compress_folder
from kflats.evaluation import outputs
from kflats.evaluation import proof as proof_module
from kflats.evaluation.latency import Latency, TorchModel, latencies, take_turns
from kflats.evaluation.outputs import Judge, Measure, Outputs, Worst
from kflats.evaluation.proof import Footprint, Proof, compare, footprint
from kflats.evaluation.running import collate, drawn_samples
from kflats.io import load_model
from kflats.report.model_card import CARD, compressed_card, note_proof
from kflats.report.report import REPORT_FILE, Report

transformers = pytest.importorskip("transformers", minversion="5.0")

BERT = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": 3}
GPT2 = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": 2, "eos_token_id": 3}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VIT |= {"image_size": 24, "patch_size": 8}
CLIP = {"text_config": {**BERT, "max_position_embeddings": 32, "eos_token_id": 3}, "vision_config": VIT}
CLIP |= {"projection_dim": 16}
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
    "clip": ("CLIPModel", "CLIPConfig", CLIP, "encoder"),
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


@pytest.mark.parametrize("name", ["bert", "gpt2 classifier", "bert tagger", "masked bert", "gpt2", "t5", "whisper"])
def test_batches_and_padding_change_nothing(name: str, tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    model = tiny(name)
    other = noisy(model, 0.1)
    one, many = (Judge(model, *reads(name, tiny_tokenizer), batch=batch)(other) for batch in (1, 32))

    # Rounding to float32 moves log-probabilities and unit vectors by up to about 1e-5. A total variation then moves by
    # 1e-5, and a loss d^2 / 2 by 1e-5 d.
    def near(loss: float) -> Any:
        return pytest.approx(loss, rel=1e-4, abs=1e-5 * (1 if "classifier" in one.kind else (2 * loss) ** 0.5))

    assert many.loss == near(one.loss)
    assert many.tail_loss == near(one.tail_loss)
    for ours, theirs in zip(many.measures, one.measures, strict=True):
        assert ours.name == theirs.name
        slack = 1.5 / one.places if "kept" in ours.name else 1e-5  # rounding may turn one tie
        assert ours.value == pytest.approx(theirs.value, rel=1e-4, abs=slack)


def test_small_divergences_keep_their_digits() -> None:
    """p log(p / q) alone, in float32, would leave errors near 1e-7."""
    draws = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(200, 1000, dtype=torch.float64, generator=draws) for _ in range(2))
    for size in (1e-2, 1e-4):
        p, q = (one.log_softmax(1) for one in (3 * logits, 3 * logits + size * noise))
        exact = (p.exp() * (p - q)).sum(1)
        distance, divergence = outputs._distances(p.float(), q.float())
        rounding = 1e-6 / size  # of log-probabilities near 20, beside their difference
        assert torch.allclose(divergence, exact, rtol=2 * rounding, atol=0)
        assert torch.allclose(distance, (p.exp() - q.exp()).abs().sum(1) / 2, rtol=rounding, atol=0)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("bert", lambda words: 1),
        ("bert multi-label", lambda words: 4),
        ("bert tagger", lambda words: words),  # neither [CLS] nor [SEP]
        ("masked bert", lambda words: max(1, round(0.15 * words))),
        ("gpt2", lambda words: words + 1),  # all but the first of "[CLS] words [SEP]" are predicted
        ("t5", lambda words: words + 2),
    ],
)
def test_what_is_compared_of_each_text(
    name: str, places: Callable[[int], int], tiny: Callable[[str], Any], tiny_tokenizer: Any
) -> None:
    model = tiny(name)
    made = Judge(model, tiny_tokenizer, TEXTS)(model)
    assert made.places == sum(places(len(text.split())) for text in TEXTS)
    assert made.samples == len(TEXTS)


def test_masked_tokens_are_hidden_and_drawn_by_seed(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    """A model that differs in the table's row of the mask token alone differs where tokens are masked."""
    model = tiny("masked bert")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.bert.embeddings.word_embeddings.weight[tiny_tokenizer.mask_token_id].neg_()
    losses = [Judge(model, tiny_tokenizer, TEXTS, seed=seed)(other).loss for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] > 1e-4


def test_the_loss_of_labels_by_hand(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    model = tiny("bert classifier")
    other = noisy(model, 0.3)
    batch = tiny_tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        p, q = (m(batch["input_ids"], batch["attention_mask"]).logits.double().softmax(1) for m in (model, other))
    made = Judge(model, tiny_tokenizer, TEXTS)(other)
    assert made.loss == pytest.approx(float((p - q).abs().sum(1).mean()) / 2, rel=1e-3)
    kept, divergence = (m.value for m in made.measures)
    assert kept == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert divergence == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-3)
    assert (made.samples, made.places, made.inputs) == (len(TEXTS), len(TEXTS), "texts")


def test_the_loss_of_a_language_model_by_hand(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    model = tiny("gpt2")
    other = noisy(model, 0.2)
    divergence, surprise = [], []
    for text in TEXTS:
        ids = torch.tensor([tiny_tokenizer(text)["input_ids"]])
        with torch.no_grad():
            p, q = (m(ids).logits[0, :-1].double().log_softmax(-1) for m in (model, other))
        divergence.append((p.exp() * (p - q)).sum(-1))
        surprise.append(-q.gather(1, ids[0, 1:, None]))
    made = Judge(model, tiny_tokenizer, TEXTS)(other)
    assert made.loss == pytest.approx(float(torch.cat(divergence).mean()), rel=1e-3)
    assert made.measures[0].name == "perplexity"
    assert made.measures[0].value == pytest.approx(float(torch.cat(surprise).mean().exp()), rel=1e-3)
    assert made.places == len(torch.cat(surprise))


def test_excluded_tokens_are_compared_too(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    """A logit of minus infinity, as padded vocabularies have."""
    model = tiny("bert tagger")
    with torch.no_grad():
        model.classifier.bias[2] = -torch.inf
    judge = Judge(model, tiny_tokenizer, TEXTS)
    assert judge(model).loss == 0
    losses = [judge(noisy(model, amount)).loss for amount in (0.03, 0.3)]
    assert 0 < losses[0] < losses[1] < 1


def test_fewer_tokens_are_compared_where_the_vocabulary_is_large(
    tiny: Callable[[str], Any], tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    whole = Judge(model, tiny_tokenizer, TEXTS)(noisy(model, 0.1))
    monkeypatch.setattr(outputs, "_NUMBERS", 300 * whole.places // 2)
    half = Judge(model, tiny_tokenizer, TEXTS)(noisy(model, 0.1))
    assert half.samples == whole.samples
    assert whole.places / 2 - 1 < half.places < 0.75 * whole.places
    assert half.loss == pytest.approx(whole.loss, rel=0.3)
    assert Judge(model, tiny_tokenizer, TEXTS)(model).loss == 0


def test_the_worst_texts_are_those_that_were_planted(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    """One word's vector is spoilt: the texts with this word are the worst, and the tail is heavy."""
    model = tiny("bert")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embeddings.word_embeddings.weight[tiny_tokenizer.convert_tokens_to_ids("word200")].neg_()
    planted = ["word200 word200", "the word200 word200 word200 a"]
    texts = [*(f"word{i} the word{i + 1} of" for i in range(20)), *planted]
    made = Judge(model, tiny_tokenizer, texts)(other)
    assert made.heavy
    assert {one.text for one in made.worst if one.loss > 0} == set(planted)
    assert made.worst[0].loss >= made.worst[1].loss > 4 * made.loss
    even = Judge(model, tiny_tokenizer, texts)(noisy(model, 0.3))
    assert not even.heavy
    assert even.worst == ()


def test_what_cannot_be_judged(tiny: Callable[[str], Any], tiny_tokenizer: Any) -> None:
    bert, wide = tiny("bert"), transformers.BertModel(transformers.BertConfig(**(BERT | {"hidden_size": 32})))
    with pytest.raises(KflatsError, match="no texts"):
        Judge(bert, tiny_tokenizer, [])
    with pytest.raises(KflatsError, match="tokenizer is needed"):
        Judge(bert, None, TEXTS)
    with pytest.raises(KflatsError, match="not one string"):
        Judge(bert, tiny_tokenizer, "one text")
    with pytest.raises(KflatsError, match="cannot be compared"):
        Judge(bert, tiny_tokenizer, TEXTS)(wide)
    with pytest.raises(KflatsError, match="inputs of Linear are unknown"):
        Judge(torch.nn.Linear(3, 4))
    with pytest.raises(KflatsError, match="too few tokens"):
        Judge(tiny("bert tagger"), tiny_tokenizer, [""])
    broken = copy.deepcopy(bert)
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[5] = torch.nan
    with pytest.raises(KflatsError, match="not finite"):
        Judge(bert, tiny_tokenizer, TEXTS)(broken)

    class Boxed(transformers.BertModel):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, boxes: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, position_ids=boxes.long(), **others)

    with pytest.raises(KflatsError, match="Boxed cannot be run on these inputs alone"):
        Judge(Boxed(bert.config), tiny_tokenizer, TEXTS)
    electra = {**BERT, "embedding_size": 16}
    with pytest.raises(KflatsError, match="are not compared"):
        Judge(transformers.ElectraForPreTraining(transformers.ElectraConfig(**electra)), tiny_tokenizer, TEXTS)


class Clock:
    """Seconds that pass only while something runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: list[str] = []

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds
            self.seen.append(name)

        return work


def test_turns_alternate_and_the_first_is_not_counted() -> None:
    clock = Clock()
    first, second = take_turns({"a": clock.run("a", 1), "b": clock.run("b", 2)}, 3, (3, 5), clock=clock)
    assert "".join(clock.seen) == "ab" + "ba" + "ab" + "ba"
    assert (first.ms, first.ratio, second.ms, second.ratio, second.low, second.high) == (1000, 1, 2000, 2, 2, 2)
    assert (second.name, second.turns, second.samples, second.tokens) == ("b", 3, 3, 5)
    with pytest.raises(KflatsError, match="0 turns"):
        take_turns({}, 0)


def test_a_quick_run_is_called_again_in_its_turn_with_other_inputs() -> None:
    """Its first call takes longer, because another run has filled the caches: it is not counted."""
    clock, quick_seconds = Clock(), itertools.cycle([1.0, 0.5, 0.5])
    prepared: list[int] = []
    given: dict[str, list[int]] = {"slow": [], "quick": []}

    def slow() -> None:
        clock.run("slow", 3)()
        given["slow"].append(prepared[-1])

    def quick() -> None:
        clock.run("quick", next(quick_seconds))()
        given["quick"].append(prepared[-1])

    runs = {"slow": slow, "quick": quick}
    made = take_turns(runs, 2, stretch=2, clock=clock, prepare=prepared.append)
    assert [(one.ms, one.ratio, one.turns) for one in made] == [(3000, 1, 2), (500, 1 / 6, 2)]
    assert given == {"slow": [0, 3, 6], "quick": [*range(9)]}


@pytest.mark.parametrize(("seconds", "ran"), [(100, 11), (12, 5), (5, 4), (1, 3)])
def test_turns_end_after_some_seconds_but_there_are_three(seconds: float, ran: int) -> None:
    """A turn takes 3 s. If the first one alone is longer than the limit, it is counted."""
    clock = Clock()
    made = take_turns({"a": clock.run("a", 1), "b": clock.run("b", 2)}, 10, seconds=seconds, clock=clock)
    assert len(clock.seen) == 2 * ran
    assert {one.turns for one in made} == {ran if seconds < 3 else ran - 1}


def test_a_ratio_is_taken_turn_by_turn() -> None:
    """A machine that slows down by half in the middle changes no ratio."""
    clock = Clock()

    def slowing(name: str, seconds: float) -> Callable[[], None]:
        return lambda: clock.run(name, seconds * (1 + (len(clock.seen) > 11)))()

    single, double = take_turns({"a": slowing("a", 1), "b": slowing("b", 2)}, 10, clock=clock)
    assert single.ms in (1000, 1500, 2000)
    assert (double.ratio, double.low, double.high) == (2, 2, 2)


class Unavailable:
    name = "unavailable"

    def build(self) -> Any:
        raise KflatsError("this machine cannot run it")


class Slow(TorchModel):
    def build(self) -> Any:
        run = super().build()
        return lambda batch: [run(batch) for _ in range(30)]


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "t5", "vit", "whisper", pytest.param("bart classifier", marks=pytest.mark.slow)]
)
def test_contestants_are_timed_or_say_why_not(name: str, tiny: Callable[[str], Any]) -> None:
    model = tiny(name)
    contestants = [TorchModel("original", model), Unavailable(), Slow("slow", model)]
    contestants.append(TorchModel("bfloat16", model, torch.bfloat16))
    timed, reasons = latencies(contestants, model, shapes=[(1, 20), (4, 9)], turns=3)
    assert reasons == {"unavailable": "this machine cannot run it."}
    assert [one.name for one in timed] == ["original", "slow", "bfloat16"] * 2
    assert [one.samples for one in timed] == [1] * 3 + [4] * 3
    text = name not in ("vit", "whisper")
    assert [one.tokens for one in timed] == ([20] * 3 + [9] * 3 if text else [0] * 6)
    assert {one.threads for one in timed} == {torch.get_num_threads()}
    assert timed[1].ratio > timed[0].ratio == 1
    assert next(model.parameters()).dtype == torch.float32
    assert latencies([Unavailable(), TorchModel("other", model)], model, turns=1)[0] == []


def test_a_shape_that_the_model_cannot_read_is_left_out(tiny: Callable[[str], Any]) -> None:
    """This classifier has no padding token, and reads one text at a time."""
    model = tiny("gpt2 classifier")
    timed, reasons = latencies([TorchModel("original", model)], model, shapes=[(1, 20), (4, 9)], turns=1)
    assert [(one.samples, one.tokens) for one in timed] == [(1, 20)]
    assert "padding token" in reasons["4 x 9"]


class ShortOnly(TorchModel):
    """A runtime without a kernel for long texts."""

    def build(self) -> Any:
        ready = super().build()

        def read(batch: Any) -> object:
            if batch["input_ids"].shape[1] > 10:
                raise RuntimeError("no kernel for long texts")
            return ready(batch)

        return read


def test_a_shape_that_one_contestant_cannot_run_is_timed_for_the_others(tiny: Callable[[str], Any]) -> None:
    """torch's attention in bfloat16 has no kernel for long texts on some CPU settings."""
    model = tiny("bert")
    original, short = TorchModel("original", model), ShortOnly("short", model)
    timed, reasons = latencies([original, short, TorchModel("same", model)], model, shapes=[(1, 9), (1, 20)], turns=1)
    assert [(one.name, one.tokens) for one in timed] == [
        *(("original", 9), ("short", 9), ("same", 9)),
        *(("original", 20), ("same", 20)),
    ]
    assert reasons == {"short, 1 x 20": "no kernel for long texts"}
    timed, reasons = latencies([short, original], model, shapes=[(1, 9), (1, 20)], turns=1)
    assert [(one.name, one.tokens) for one in timed] == [("short", 9), ("original", 9)]
    assert set(reasons) == {"1 x 20"}


def test_baselines_that_are_not_installed_say_so(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny("bert")
    wanted = [one for one in tools(tmp_path) if one.name != "torch.compile"]
    for one in wanted:
        model.to(torch.bfloat16 if one.name == "bfloat16" else torch.float32).save_pretrained(one.at(tmp_path))
    load_model(wanted[0].at(tmp_path))  # transformers imports what it finds of torchao
    for package in ("onnxruntime", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, package, None)
    timed, reasons = latencies([Placed(one, tmp_path) for one in wanted], model.float(), shapes=[(1, 9)], turns=1)
    assert [one.name for one in timed] == ["float32", "bfloat16"]
    assert len(reasons) == 5
    assert all("is not installed" in reason for reason in reasons.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compilers and exporters warn about their own code
def test_every_baseline_computes_what_the_original_does(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    """int8 included: within a tenth."""
    model = tiny("bert")
    model.save_pretrained(tmp_path / "original")
    batch = collate(drawn_samples(model, 2, 20), 0)
    with torch.inference_mode():
        wanted = model(**batch).last_hidden_state
        for one in tools(tmp_path / "original"):
            assert one.write(one.at(tmp_path)) > 0
            made: Any = one.opened(one.at(tmp_path))(batch)
            assert (torch.as_tensor(made[0]).float() - wanted).norm() < 0.1 * wanted.norm(), one.name


LATENCIES = tuple(
    Latency(name, 50.0 * ratio, ratio, ratio - 0.03, ratio + 0.03, 9, 32, 30, 2)
    for name, ratio in (("original", 1.0), ("bfloat16", 0.29), ("compressed", 1.02))
)
MADE = Proof(
    Outputs("encoder", "texts", 20, 20, 0.01, 0.25, (Measure("mean cosine", 0.99),), (Worst(0.25, "a\x1bb"),)),
    (90_900_000, 72_000_000),
    (Footprint(60_000_000, 0.5), Footprint(30_000_000, 1.0)),
    LATENCIES,
)


def test_a_proof_prints_what_it_holds() -> None:
    text = str(MADE)
    shown = (
        "90.9 MB 72.0 MB 79.2 % 60.0 MB 30.0 MB 50.0 % 0.50 s 1.00 s 200.0 % 0.9900 (quality 0.9900) 14.5 ms 51.0 ms"
    )
    for part in (
        *shown.split(),
        "32 x 30 tokens",
        "102.0 % (99.0 % to 105.0 %)",
        "9 turns",
        "2 threads",
        "one in twenty",
    ):
        assert part in text
    assert "\x1b" not in text
    assert "hardly alike" not in text
    assert "hardly alike" in str(replace(MADE, outputs=replace(MADE.outputs, loss=0.9)))
    assert "warning" not in str(replace(MADE, outputs=replace(MADE.outputs, tail_loss=0.03)))
    assert "memory" not in str(replace(MADE, footprints=None))
    untimed = str(replace(MADE, latencies=(), untimed=("original: no padding token",)))
    assert "original: no padding token" in untimed
    assert "tokens" not in untimed


def test_a_report_holds_the_proof_without_texts(tmp_path: Path) -> None:
    report = Report("m", "60%", (), 100, 80, 0, "0.1.0", proof=MADE)
    (tmp_path / CARD).write_text(compressed_card(report, (9, 5), (), None, "", "transformers"))
    replace(report, proof=None).save(tmp_path / REPORT_FILE)
    note_proof(tmp_path, MADE)
    assert Report.load(tmp_path) == report
    for file in (CARD, REPORT_FILE):
        assert "u001bb" not in (tmp_path / file).read_text()
    older = json.loads((tmp_path / REPORT_FILE).read_text()) | {"version": 1}
    (tmp_path / REPORT_FILE).write_text(json.dumps(older))
    assert Report.load(tmp_path).proof == MADE
    assert "90.9 MB" in str(report)


@pytest.fixture
def folder(tiny: Callable[[str], Any], tiny_tokenizer: Any, tmp_path: Path) -> Path:
    tiny("bert classifier").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_compared_with_itself(folder: Path) -> None:
    proof = compare(folder, folder, TEXTS, turns=2)
    assert (proof.outputs.loss, proof.outputs.kind, proof.outputs.samples) == (0, "classifier", len(TEXTS))
    assert proof.files[0] == proof.files[1] == (folder / "model.safetensors").stat().st_size
    assert {one.name for one in proof.latencies} == {"original", "bfloat16", "compressed"}
    assert {(one.samples, one.tokens) for one in proof.latencies} == {(1, 20), (32, 30), (32, 128)}


def test_a_folder_without_a_tokenizer_is_read_with_the_originals(folder: Path, tmp_path: Path) -> None:
    for vocabulary in (300, 200):
        config = transformers.BertConfig(**(BERT | {"num_labels": 3, "vocab_size": vocabulary}))
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / str(vocabulary))
    assert compare(folder, tmp_path / "300", TEXTS, turns=1).outputs.loss > 0
    with pytest.raises(KflatsError, match="no tokenizer"):
        compare(folder, tmp_path / "200", TEXTS, turns=1)


def test_images_need_no_tokenizer(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("vit").save_pretrained(tmp_path)
    proof = compare(tmp_path, tmp_path, turns=1)
    assert (proof.outputs.inputs, proof.outputs.loss) == ("drawn inputs", 0)
    assert "a batch of 8" in str(proof)


@pytest.mark.slow
def test_a_quality_of_what_reads_no_texts_is_kept_on_drawn_inputs(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("vit").save_pretrained(tmp_path / "vit")
    report = compress_folder(tmp_path / "vit", tmp_path / "small", quality=0.95, samples=8, proof=True, quiet=True)
    assert report.model_bytes_after < report.model_bytes_before
    assert report.proof is not None
    assert report.proof.outputs.inputs == "drawn inputs"
    assert 0 < report.proof.outputs.loss < 0.1
    with pytest.raises(KflatsError, match="texts are not supported"):
        compress_folder(tmp_path / "vit", tmp_path / "other", quality=0.95, eval_texts=TEXTS, proof=True, quiet=True)


def test_compress_ends_with_a_proof(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    wanted = ["compress", str(folder), "--keep", "40%", "--out"]
    done = CliRunner().invoke(app, [*wanted, str(tmp_path / "a"), "--eval-texts", str(texts)])
    assert done.exit_code == 0, done.output
    proof = Report.load(tmp_path / "a").proof
    assert proof is not None
    assert (proof.outputs.inputs, proof.outputs.samples) == ("texts", len(TEXTS))
    assert proof.outputs.summary in done.output
    assert proof.outputs.summary in (tmp_path / "a" / CARD).read_text()
    done = CliRunner().invoke(app, [*wanted, str(tmp_path / "b"), "--no-proof"])
    assert "outputs compared" not in done.output
    assert Report.load(tmp_path / "b").proof is None
    refused = CliRunner().invoke(app, [*wanted, str(tmp_path / "c"), "--no-proof", "--eval-texts", str(texts)])
    assert refused.exit_code == 2
    assert "without a proof" in refused.stderr
    # Written by kflats and unchanged since, the folder may be replaced.
    again = CliRunner().invoke(app, [*wanted, str(tmp_path / "b")])
    assert (again.exit_code, "a whole model without a proof" in again.stderr) == (2, True)
    assert "--card writes the proof" in again.stderr
    assert CliRunner().invoke(app, [*wanted, str(tmp_path / "a"), "--force", "--no-proof"]).exit_code == 0


def test_an_interrupted_proof_leaves_the_folder_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "compare", interrupt)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["compress", str(folder), "--keep", "40%", "--out", str(out)])
    assert done.exit_code == 130
    assert f"kflats compare {folder} {out} --card" in done.stderr.replace("\n", "")
    assert Report.load(out).proof is None
    assert compare(folder, out, TEXTS, turns=1).outputs.loss > 0


def test_where_both_models_do_not_fit_into_memory_one_line_says_so_in_place_of_a_proof(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is whole, and the command that the line names makes the proof good."""
    original = (folder / "model.safetensors").stat().st_size

    def compressed(out: Path, memory: float) -> str:
        monkeypatch.setattr(pipeline, "available_bytes", lambda: round(memory))
        done = CliRunner().invoke(app, ["compress", str(folder), "--keep", "40%", "--out", str(out)])
        assert done.exit_code == 0, done.output
        return done.stderr.replace("\n", "")

    out = tmp_path / "small"
    said = compressed(out, 3 * original)
    assert "no proof: comparing takes" in said
    assert f"kflats compare {folder} {out} --card, on a machine with more memory" in said
    assert Report.load(out).proof is None
    assert "Not measured yet" in (out / CARD).read_text()
    note_proof(out, compare(folder, out, TEXTS, turns=1, fresh=False))
    assert Report.load(out).proof is not None

    given = compare(folder, out, TEXTS, turns=1, fresh=False)
    monkeypatch.setattr(pipeline, "compare", lambda *_, **__: given)
    assert "no proof" not in compressed(tmp_path / "enough", 6 * original)
    assert Report.load(tmp_path / "enough").proof is not None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_in_the_proof_leaves_the_folder_whole(
    error: Exception, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "compare", fail)
    with pytest.warns(UserWarning, match="no proof: memory ran out while the models were compared"):
        report = compress_folder(folder, tmp_path / "out", keep="40%", quiet=True, proof=True)
    assert report == Report.load(tmp_path / "out")


def test_the_models_are_let_go_of_before_fresh_processes_load_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, alive = list[weakref.ref[torch.nn.Module]](), list[bool]()

    def load(path: Path) -> torch.nn.Module:
        model: torch.nn.Module = load_model(path)
        loaded.append(weakref.ref(model))
        return model

    def measured(_: Path) -> Footprint:
        alive.extend(one() is not None for one in loaded)
        return Footprint(None, 1.0)

    monkeypatch.setattr(proof_module, "load_model", load)
    monkeypatch.setattr(proof_module, "footprint", measured)
    compare(folder, folder, TEXTS, turns=1)
    assert alive == [False] * 4


@pytest.mark.slow
def test_a_model_that_cannot_be_judged_is_compressed_and_said_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KflatsError("its outputs are not compared")

    monkeypatch.setattr(pipeline, "compare", refuse)
    with pytest.warns(UserWarning, match=r"no proof: its outputs are not compared"):
        report = compress_folder(folder, tmp_path / "out", keep="40%", quiet=True, proof=True)
    assert report == Report.load(tmp_path / "out")


@pytest.mark.slow
def test_a_fresh_process_measures_memory_and_time(minilm: Path, tmp_path: Path) -> None:
    """The numbers of a table that is never looked at are memory too, once they are decoded or copied."""
    made = footprint(minilm)
    assert made.memory_bytes is not None
    assert 20e6 < made.memory_bytes < 400e6
    assert 0 < made.first_output_s < 120
    with pytest.raises(KflatsError, match="fresh process"):
        footprint(tmp_path)
