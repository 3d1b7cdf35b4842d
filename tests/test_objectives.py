"""Objectives: each sample's loss is what the model itself says of that sample alone; random ones are unbiased."""

from __future__ import annotations

import math
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.calibration import counting
from kflats.calibration.counting import text_batches
from kflats.calibration.objectives import Projections, SampledLabels, TaskLoss, describe, objective_of
from kflats.common.errors import KflatsError
from kflats.evaluation.running import take

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 24, "max_position_embeddings": 12}


def bert(kind: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**SMALL, initializer_range=0.3, **config)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=12, initializer_range=0.3
    )
    config.bos_token_id = config.eos_token_id = 1
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


class Head(nn.Module):
    """The input is the output."""

    def forward(self, x: Tensor) -> Tensor:
        return x


IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 9, 4, 0, 0], [7, 7, 7, 7, 0]])
TEXT = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
TAGS = torch.tensor([[0, 1, 2, 1, 0], [2, -100, 1, -100, -100], [1, 1, -100, 0, -100]])


@pytest.mark.parametrize(
    ("model", "labels", "kind"),
    [
        (lambda: bert("BertForSequenceClassification", num_labels=3), torch.tensor([2, 0, 1]), "classification"),
        (lambda: bert("BertForSequenceClassification", num_labels=1), torch.tensor([2.0, 0.5, -1.0]), "regression"),
        (
            lambda: bert("BertForSequenceClassification", num_labels=2, problem_type="regression"),
            torch.randn(3, 2),
            "regression",
        ),
        (lambda: bert("BertForSequenceClassification", num_labels=2), torch.eye(3)[:, :2], "multi-label"),
        (lambda: bert("BertForTokenClassification", num_labels=3), TAGS, "tokens"),
        (lambda: bert("BertForMaskedLM"), IDS.masked_fill(IDS == 0, -100), "tokens"),
        (gpt2, IDS.masked_fill(IDS == 0, -100), "causal"),
        (llama, IDS.masked_fill(IDS == 0, -100), "causal"),
        (t5, IDS.masked_fill(IDS == 0, -100), "tokens"),
    ],
)
def test_task_loss_is_the_models_own_of_each_sample_alone(model: Any, labels: Tensor, kind: str) -> None:
    model, batch = model(), {**TEXT, "labels": labels}
    before = model.config.to_dict()
    resolved = TaskLoss().resolved(model, batch)
    assert resolved.kind == kind
    assert model.config.to_dict() == before
    losses = TaskLoss().losses(model, batch).detach()
    assert losses.shape == (3,)
    for s in range(3):
        own = model(**take(batch, torch.tensor([s]))).loss.detach()
        assert float(losses[s]) == pytest.approx(float(own), rel=1e-4)


def test_an_untrained_head_does_not_hide_what_is_read() -> None:
    """All labels have one loss there, whichever position they are compared with."""
    for model, kind in ((gpt2(), "causal"), (bert("BertForMaskedLM"), "tokens"), (t5(), "tokens")):
        with torch.no_grad():
            model.get_output_embeddings().weight.zero_()
        assert TaskLoss().resolved(model, {**TEXT, "labels": IDS}).kind == kind


def test_a_sample_without_targets_has_loss_zero() -> None:
    model = bert("BertForTokenClassification", num_labels=3)
    batch = {**TEXT, "labels": TAGS.index_fill(0, torch.tensor([1]), -100)}
    losses = TaskLoss().losses(model, batch).detach()
    assert float(losses[1]) == 0
    assert float(losses[0]) > 0
    with pytest.raises(KflatsError, match="all labels are -100"):
        TaskLoss().losses(model, {**TEXT, "labels": torch.full_like(TAGS, -100)})


@pytest.mark.parametrize(
    ("kind", "classes", "labels", "message"),
    [
        ("BertForSequenceClassification", 3, None, "no tensor of labels"),
        ("BertForSequenceClassification", 3, torch.tensor([0, 3, 1]), "label 3 is out of range"),
        ("BertForSequenceClassification", 3, torch.tensor([0, -1, 1]), "label -1 is out of range"),
        ("BertForSequenceClassification", 3, torch.tensor([0, 1]), "labels of shape"),
        ("BertForSequenceClassification", 3, TAGS, "do not fit a head of 3 outputs a sample"),
        ("BertForSequenceClassification", 3, torch.tensor([0.5, 1.5, 2.0]), "do not fit a head of 3"),
        ("BertForSequenceClassification", 1, torch.randn(3, 2), "do not fit a head of 1"),
        ("BertForSequenceClassification", 2, torch.randn(3, 4), "do not fit a head of 2"),
        ("BertForTokenClassification", 3, torch.tensor([0, 2, 1]), "do not fit a head of 3 outputs a token"),
        ("BertForTokenClassification", 3, TAGS[:, :4], "do not fit a head of 3 outputs a token"),
        ("BertForTokenClassification", 2, TAGS, "label 2 is out of range"),
        ("BertModel", 2, torch.tensor([0, 2, 1]), "gives no logits"),
        ("BertForQuestionAnswering", 2, torch.tensor([0, 2, 1]), "gives no logits"),
    ],
)
def test_labels_of_another_task(kind: str, classes: int, labels: Tensor | None, message: str) -> None:
    batch = dict(TEXT) if labels is None else {**TEXT, "labels": labels}
    with pytest.raises(KflatsError, match=message):
        TaskLoss().losses(bert(kind, num_labels=classes), batch)


def test_a_later_batch_is_checked_too() -> None:
    model = bert("BertForSequenceClassification", num_labels=3)
    objective = TaskLoss().resolved(model, {**TEXT, "labels": torch.tensor([0, 1, 2])})
    with pytest.raises(KflatsError, match="label 7 is out of range"):
        objective.losses(model, {**TEXT, "labels": torch.tensor([0, 1, 7])})


def test_a_loss_that_is_not_known_is_not_guessed() -> None:
    class Smoothed(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            loss = None if labels is None else F.cross_entropy(x, labels, label_smoothing=0.3)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=x)

    batch = {"x": torch.randn(2, 3), "labels": torch.tensor([0, 2])}
    with pytest.raises(KflatsError, match=r"own loss, .* is none of: classification"):
        TaskLoss().losses(Smoothed(), batch)
    assert TaskLoss("classification").losses(Smoothed(), batch).shape == (2,)


def information(logits: Tensor) -> Tensor:
    """The Fisher information of a softmax in its logits: diag(p) - p p'."""
    p = logits.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


def gradients(objective: Any, logits: Tensor, samples: int) -> Tensor:
    """(samples, ...) gradients of each sample's loss by its output."""
    x = logits.expand(samples, *logits.shape).clone().requires_grad_()
    objective.losses(Head(), {"x": x}).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("objective", [SampledLabels(1), Projections(seed=1)])
def test_label_free_gradients_have_the_fisher_information(objective: Any) -> None:
    logits = torch.tensor([0.5, -1.0, 1.0])
    g = gradients(objective, logits, 40_000)
    torch.testing.assert_close(g.T @ g / len(g), information(logits), atol=0.01, rtol=0.03)


@pytest.mark.slow
def test_sampled_labels_of_numbers_and_tokens() -> None:
    # (f - y)^2 with y ~ N(f, 1/2) is a negative log likelihood, of information 1 / variance.
    g = gradients(SampledLabels(), torch.tensor([3.0]), 40_000)
    assert float(g.square().mean()) == pytest.approx(2, rel=0.03)
    # Positions draw for themselves, and their losses are averaged.
    logits = torch.tensor([[0.5, -1.0, 1.0], [0.0, 2.0, 0.0]])
    g = gradients(SampledLabels(), logits, 40_000)
    for t in range(2):
        expected = information(logits[t]) / 4
        torch.testing.assert_close(g[:, t].T @ g[:, t] / len(g), expected, atol=0.005, rtol=0.03)
    assert float((g[:, 0].T @ g[:, 1]).abs().max()) / len(g) < 0.005


class Maps(nn.Module):
    """Three classes at four places of an image, (B, 3, 2, 2), or after frames and tokens, (B, 2, 2, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 12)

    def forward(
        self, pixel_values: Tensor | None = None, input_features: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        x = input_features if pixel_values is None else pixel_values
        assert x is not None
        y: Tensor = self.layer(x).view(-1, 4, 3)
        return y.mT.reshape(-1, 3, 2, 2) if input_features is None else y.view(-1, 2, 2, 3)


@pytest.mark.parametrize("objective", [TaskLoss("tokens"), TaskLoss(), SampledLabels(), Projections()])
def test_classes_of_pixels_and_of_pairs_are_those_of_positions(objective: Any) -> None:
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(3, 5)
    labels = torch.randint(0, 3, (3, 2, 2))
    flat = Head()
    expected = objective.losses(flat, {"x": model.layer(x).view(3, 4, 3), "labels": labels.flatten(1)})
    for name in ("pixel_values", "input_features"):
        torch.testing.assert_close(objective.losses(model, {name: x, "labels": labels}), expected)


def test_sampled_labels_of_several_labels_at_once() -> None:
    model = bert("BertForSequenceClassification", num_labels=2, problem_type="multi_label_classification")
    batch = {k: v[:1].expand(4000, -1) for k, v in TEXT.items()}
    with torch.no_grad():
        logits = model(**batch).logits
    captured: list[Tensor] = []
    model.register_forward_hook(lambda m, a, o: o.logits.register_hook(captured.append) and None)
    SampledLabels().losses(model, batch).sum().backward()
    p = logits[0].sigmoid()
    torch.testing.assert_close(captured[0].square().mean(0), p * (1 - p) / 4, rtol=0.1, atol=0.005)


@pytest.mark.slow
def test_projections_of_pooled_vectors() -> None:
    """<u, y> of the unit vector that sentence-transformers would give, and E grad grad' = J'J."""
    model = bert("BertModel")
    losses = Projections("pooled", seed=4).losses(model, TEXT)
    hidden = model(**TEXT).last_hidden_state
    mask = TEXT["attention_mask"].unsqueeze(-1)
    y = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    raw = Projections("pooled", seed=4, normalized=False).losses(model, TEXT)
    norm = ((hidden * mask).sum(1) / mask.sum(1)).norm(dim=1)
    torch.testing.assert_close(raw, losses * norm)
    many = torch.stack([Projections("pooled", seed=s).losses(model, TEXT).detach() for s in range(1000)])
    torch.testing.assert_close(many.square().mean(0), (y * y).sum(1), rtol=0.15, atol=0)  # u is standard normal
    torch.testing.assert_close(Projections(seed=4).losses(model, TEXT), losses)
    head = bert("BertForSequenceClassification")
    assert Projections("pooled").losses(head, TEXT).shape == (3,)
    assert not torch.allclose(Projections("pooled").losses(head, TEXT), Projections().losses(head, TEXT))


def test_padding_is_left_out_of_projections() -> None:
    model = bert("BertModel")
    for head in (model, bert("BertForTokenClassification", num_labels=3)):
        whole = Projections(seed=2).losses(head, TEXT)
        for s in range(3):
            length = int(TEXT["attention_mask"][s].sum())
            one = {k: v[s : s + 1, :length] for k, v in TEXT.items()}
            alone = Projections(seed=2).losses(head, one, first=s)
            torch.testing.assert_close(alone, whole[s : s + 1], rtol=1e-4, atol=1e-5)


def test_projections_of_what_is_not_there() -> None:
    with pytest.raises(KflatsError, match="gives no logits"):
        Projections("logits").losses(bert("BertModel"), TEXT)
    with pytest.raises(KflatsError, match="Projections of 'outputs'"):
        Projections("outputs")  # type: ignore[arg-type]
    with pytest.raises(KflatsError, match="has a decoder"):
        Projections().losses(t5(), {"inputs_embeds": torch.randn(3, 5, 16)})
    assert Projections().losses(t5(), TEXT).shape == (3,)  # the decoder reads the text, shifted
    assert Projections("pooled").losses(t5(), TEXT).shape == (3,)
    assert Projections().losses(t5(), {**TEXT, "labels": IDS}).shape == (3,)

    class Odd(nn.Module):
        def forward(self, **batch: Tensor) -> tuple[Tensor, ...]:
            return tuple(batch.values())

    with pytest.raises(KflatsError, match="no logits and no last hidden state"):
        Projections().losses(Odd(), TEXT)


def test_outputs_without_logits_and_hidden_states_are_projected_whole() -> None:
    class Depth(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"focal_length": x.new_ones(1), "levels": x.long(), "maps": (x.reshape(len(x), 2, -1), x)}

    x = torch.randn(5, 6)
    losses = Projections().losses(Depth(), {"x": x})
    assert losses.shape == (5,)
    torch.testing.assert_close(Projections().losses(Depth(), {"x": 3 * x}), losses)  # of length 1
    torch.testing.assert_close(Projections(normalized=False).losses(Depth(), {"x": x}), losses * x.norm(dim=1))


@pytest.mark.parametrize("objective", [SampledLabels(5), Projections(seed=5)])
def test_draws_depend_on_the_place_in_the_stream_only(objective: Any) -> None:
    x = torch.randn(6, 4)
    whole = objective.losses(Head(), {"x": x})
    parts = [objective.losses(Head(), {"x": x[i : i + 2]}, first=i) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    other = type(objective)(seed=6).losses(Head(), {"x": x})
    assert not torch.equal(whole, other)


def test_descriptions() -> None:
    assert describe(Projections("pooled", 3)) == {"type": "Projections", "of": "pooled", "seed": 3, "normalized": True}
    assert describe(Head()) == {"type": "Head"}


def test_text_batches(tiny_tokenizer: Any) -> None:
    texts = ["the of a b c", "a", "the of", "b " * 60]
    batches = text_batches(iter(texts), tiny_tokenizer, batch=2, max_length=8)
    assert [tuple(b["input_ids"].shape) for b in batches] == [(2, 4), (2, 8)]
    assert batches[0]["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_long_texts_get_a_batch_of_their_own_where_that_saves_padding(tiny_tokenizer: Any) -> None:
    texts = ["a " * 100] * 3 + ["a"] * 5 + ["b " * 100]
    shapes = [tuple(b["input_ids"].shape) for b in text_batches(texts, tiny_tokenizer)]
    assert [rows for rows, _ in shapes] == [5, 4]
    few = text_batches(["a", "a b"] * 5, tiny_tokenizer, batch=4)  # nothing to save: as many as may be
    assert [len(b["input_ids"]) for b in few] == [4, 4, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 5))
def test_no_other_cut_of_a_block_has_fewer_tokens(lengths: list[int], most: int) -> None:
    rows = [[0] * length for length in sorted(lengths)]

    def cost(ends: tuple[int, ...]) -> int:
        return sum((b - a) * len(rows[b - 1]) + counting._CALL for a, b in pairwise((0, *ends, len(rows))))

    parts = list(counting._parts(rows, most))
    assert [row for part in parts for row in part] == rows
    assert max(map(len, parts)) <= most
    inner = range(1, len(rows))
    cuts = [ends for k in range(len(rows)) for ends in combinations(inner, k)]
    allowed = [ends for ends in cuts if max(b - a for a, b in pairwise((0, *ends, len(rows)))) <= most]
    assert cost(tuple(accumulate(len(part) for part in parts[:-1]))) == min(map(cost, allowed))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "empty"),
        ("one text", {}, "not one string"),
        (["a", 3], {}, "must be a string, not int"),
        (["a"], {"batch": 0}, "is not supported"),
        (["a"], {"max_length": 0}, "is not supported"),
    ],
)
def test_what_is_no_text(texts: Any, options: dict[str, int], message: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(KflatsError, match=message):
        text_batches(texts, tiny_tokenizer, **options)
    with pytest.raises(KflatsError, match="tokenizer"):
        text_batches(["a"], None)


def test_nothing_but_half_precision_changes_a_loss() -> None:
    logits = torch.tensor([[60000.0, 0.0]]).half()
    loss = TaskLoss().losses(Head(), {"x": logits, "labels": torch.tensor([1])})
    assert math.isfinite(float(loss))
    assert float(loss) == pytest.approx(60000, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForTokenClassification", "gpt2"])
def test_the_own_loss_of_a_model_in_half_precision_is_known(dtype: torch.dtype, head: str) -> None:
    """It is rounded to a few parts in a thousand; another loss is still no such one."""
    model = (gpt2() if head == "gpt2" else bert(head, num_labels=3)).to(dtype)
    labels = {"gpt2": IDS, "BertForTokenClassification": TAGS}.get(head, torch.tensor([2, 0, 1]))
    kind = {"gpt2": "causal", "BertForTokenClassification": "tokens"}.get(head, "classification")
    assert TaskLoss().resolved(model, {**TEXT, "labels": labels}).kind == kind
    other: Any = model.forward

    def doubled(*args: Any, labels: Tensor | None = None, **rest: Any) -> Any:
        output = other(*args, labels=labels, **rest)
        output.loss = None if output.loss is None else 2 * output.loss
        return output

    model.forward = doubled
    with pytest.raises(KflatsError, match="own loss"):
        TaskLoss().resolved(model, {**TEXT, "labels": labels})


@pytest.mark.parametrize(
    ("batches", "asked", "message"),
    [
        ([{"labels": 1}, {}], None, "batch 1 has no labels, and others have"),
        ([{"label": 1}], None, "have 'label', and no 'labels'"),
        ([{}], "task", "'task' is no objective"),
        ([{}], TaskLoss, "is no objective"),
    ],
)
def test_objectives_are_not_guessed(batches: Any, asked: Any, message: str) -> None:
    with pytest.raises(KflatsError, match=message):
        objective_of(batches, asked)


def test_the_objective_is_by_default_the_tasks_or_needs_no_labels() -> None:
    assert objective_of([{"labels": 1}, {"labels": 0}]) == TaskLoss()
    assert objective_of([{"x": 1}]) == Projections()
    assert objective_of([{"x": 1}], SampledLabels(3)) == SampledLabels(3)
    with pytest.raises(KflatsError, match="no TaskLoss of kind 'ranking'"):
        TaskLoss("ranking")  # type: ignore[arg-type]
    with pytest.raises(KflatsError, match="no tensor of labels"):
        TaskLoss().losses(Head(), {"x": torch.zeros(1, 2), "labels": [1]})
