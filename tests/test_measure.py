"""Measuring, against a loop of batches of one sample with autograd: what is slow and cannot be wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats import SVD, Recipe, compress_
from kflats.calibration import accumulators, collect
from kflats.calibration.accumulators import Accumulator, measured
from kflats.calibration.collect import measure
from kflats.calibration.counting import text_batches
from kflats.calibration.hooks import frozen
from kflats.calibration.measurements import Statistics, merge
from kflats.calibration.objectives import Projections, SampledLabels, TaskLoss
from kflats.common.errors import KflatsError
from kflats.evaluation.running import batch_size, take
from kflats.importance import InputGram, KroneckerFisher, RowFisher
from kflats.model.weights import find_weights
from kflats.numerics.gram import mirror_
from kflats.numerics.statistics import Moments, gradient_rows

transformers = pytest.importorskip("transformers", minversion="5.0")

FISHER = frozenset({"row_fisher", "column_fisher"})
ALL = FISHER | {"input_gram", "input_mean", "output_gram"}


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What the model itself says."""
    return model(**batch).loss


def brute_force(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], loss: Callable[[nn.Module, Mapping[str, Any]], Tensor]
) -> dict[str, Tensor]:
    """mean_s (dL_s / dM)^2 of every parameter by its weight's name, each sample a batch of its own, padding cut off."""
    model.eval()
    total: dict[int, Tensor] = {}
    samples = 0
    for batch in batches:
        for s in range(batch_size(batch)):
            one = take(batch, torch.tensor([s]))
            if "attention_mask" in one:
                length = int(one["attention_mask"].sum())
                shape = one["input_ids"].shape
                one = {k: v[:, :length] if v.shape == shape else v for k, v in one.items()}
            model.zero_grad()
            loss(model, one).backward()
            for p in model.parameters():
                g = torch.zeros_like(p) if p.grad is None else p.grad
                total[id(p)] = total.get(id(p), 0) + g.double().square()
            samples += 1
    model.zero_grad()
    found = {}
    for weight in find_weights(model):
        table = total[id(model.get_submodule(weight.name).weight)] / samples
        role = weight.places[0].role
        found[weight.name] = table.flatten(1).T if role in ("linear", "conv2d") else table
    return found


def check(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] = own_loss,
    **options: Any,
) -> Statistics:
    """All Fisher fields of all weights equal the loop's, asked for together or rows alone."""
    expected = brute_force(model, batches, loss)
    weights = find_weights(model)
    found = measure(model, weights, batches, needs=FISHER, quiet=True, **options)
    rows = measure(model, weights, batches, needs=frozenset({"row_fisher"}), quiet=True, **options)
    assert expected.keys() == found.measured.keys()
    for name, f in expected.items():
        for other in (found, rows):
            row = other.of(name).row_fisher
            torch.testing.assert_close(row, f.sum(1), rtol=1e-3, atol=1e-5 * float(f.sum(1).max()))
        column = found.of(name).column_fisher
        torch.testing.assert_close(column, f.sum(0), rtol=1e-3, atol=1e-5 * float(f.sum(0).max()))
    return found


TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT |= {"vocab_size": 40, "max_position_embeddings": 12}


def words(samples: int = 3, length: int = 7, labels: str = "", classes: int = 2) -> dict[str, Tensor]:
    """A padded batch, with labels of one kind."""
    ids = torch.randint(4, 40, (samples, length))
    mask = torch.ones_like(ids)
    for s in range(1, samples):
        mask[s, length - s :] = 0
    ids = ids.masked_fill(mask == 0, 0)
    ids[:, 2] = ids[:, 0]  # read twice by each sample
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels == "class":
        batch["labels"] = torch.randint(classes, (samples,))
    elif labels == "number":
        batch["labels"] = torch.randn(samples)
    elif labels == "multi":
        batch["labels"] = torch.randint(2, (samples, classes)).float()
    elif labels == "token":
        batch["labels"] = torch.randint(classes, (samples, length)).masked_fill(mask == 0, -100)
    elif labels == "text":
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


def bert(kind: str = "BertForSequenceClassification", **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**TEXT, initializer_range=0.3, **config))


@pytest.mark.parametrize(
    ("labels", "config"),
    [("class", {"num_labels": 3}), ("number", {"num_labels": 1}), ("multi", {"num_labels": 3})],
)
def test_sequences_are_samples(labels: str, config: dict[str, Any]) -> None:
    check(bert(**config), [words(3, labels=labels, classes=3), words(2, 5, labels=labels, classes=3)])


def test_regression_of_several_numbers() -> None:
    check(bert(num_labels=3, problem_type="regression"), [words(3, labels="multi", classes=3)])


def test_positions_of_a_sample_add_before_squaring() -> None:
    found = check(bert("BertForTokenClassification", num_labels=3), [words(3, labels="token", classes=3)] * 2)
    assert found.objective == {"type": "TaskLoss", "kind": "tokens"}


def test_masked_language_model_with_tied_head() -> None:
    model = bert("BertForMaskedLM")
    assert any(len(w.places) == 2 for w in find_weights(model))
    check(model, [words(3, labels="text")])


def test_causal_language_model_with_conv1d_and_tied_head() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=12, initializer_range=0.3
    )
    config.bos_token_id = config.eos_token_id = 1
    found = check(transformers.GPT2LMHeadModel(config), [words(3, labels="text"), words(1, labels="text")])
    assert found.objective["kind"] == "causal"
    assert found.of("transformer.wte").head


def test_tied_rows_alone_without_a_dense_gradient() -> None:
    """Sequences shorter than the width take the cheaper way; the others above do not all."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=12, initializer_range=0.3
    )
    config.bos_token_id = config.eos_token_id = 1
    check(transformers.GPT2LMHeadModel(config), [words(2, 4, labels="text")])


def test_shared_layers_add_before_squaring() -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**TEXT, embedding_size=8, initializer_range=0.3)
    config.num_hidden_layers = 3
    check(transformers.AlbertForSequenceClassification(config), [words(3, labels="class")])


@pytest.mark.parametrize("tied", [True, False])
def test_encoder_decoder(tied: bool) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    config.tie_word_embeddings = tied
    model = transformers.T5ForConditionalGeneration(config)
    batch = {"input_ids": torch.randint(2, 40, (3, 6)), "labels": torch.randint(2, 40, (3, 6))}
    check(model, [batch])


class Convolutions(nn.Module):
    """All that a convolution may do to its borders; no batch norm; one layer used twice; in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1, bias=False)
        self.again = nn.Conv2d(5, 5, 3, padding="same", dilation=2, padding_mode="reflect")
        self.last = nn.Conv2d(5, 4, (2, 3), stride=2, padding=(1, 0))
        self.out = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu_(self.first(image))
        x = self.again(torch.relu(self.again(x)))
        return self.out(torch.relu_(self.last(x)).mean((2, 3)))


def entropy(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["labels"])


def test_a_weight_that_is_given_twice_is_measured_once() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    weights, batches = find_weights(model), [{"input": torch.randn(4, 6)} for _ in range(3)]
    once, twice = (
        measure(model, given, batches, needs=InputGram().needs, quiet=True)
        for given in (weights, weights + weights[:1])
    )
    assert twice.samples == once.samples
    for weight in weights:
        assert torch.equal(twice.measured[weight.name].input_gram, once.measured[weight.name].input_gram)


def test_convolutions() -> None:
    batches = [{"image": torch.randn(s, 2, 7, 7), "labels": torch.randint(3, (s,))} for s in (4, 1)]
    found = check(Convolutions(), batches, entropy)
    assert found.of("last").positions == 5 * 4 * 3
    assert found.of("again").positions == 5 * 2 * 49


class Positions(nn.Module):
    """Layers that see samples behind another axis, flattened, or all as one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 6), nn.Embedding(12, 6)
        self.behind, self.flat, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.behind(x.transpose(0, 1)).transpose(0, 1).tanh()
        x = self.flat(x.reshape(-1, 6)).view(x.shape)
        return self.out(x.mean(1))


def test_samples_are_found_wherever_they_are() -> None:
    # As many samples as positions, so that sizes alone say nothing.
    batches = [{"input_ids": torch.randint(40, (5, 5)), "labels": torch.randint(2, (5,))}]
    check(Positions(), batches, lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))


class Joined(nn.Module):
    """The positions of all samples in one row, or two outputs beside each other for each sample."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.second, self._twice = nn.Linear(6, 5), nn.Linear(5, 4), twice

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return torch.cat([y, y.square()]) if self._twice else y.reshape(1, -1, 4)


@pytest.mark.parametrize("twice", [False, True])
def test_outputs_that_are_not_of_samples_are_measured_sample_by_sample(twice: bool) -> None:
    torch.manual_seed(0)
    model, x = Joined(twice), torch.randn(5, 3, 6)
    weights, needs = find_weights(model), frozenset({"row_fisher", "input_gram"})
    whole = measure(model, weights, [{"x": x}], needs=needs, quiet=True)
    alone = measure(model, weights, [{"x": one.unsqueeze(0)} for one in x], needs=needs, quiet=True)
    assert whole.samples == alone.samples == 5
    for name in ("first", "second"):
        a, b = whole.of(name), alone.of(name)
        torch.testing.assert_close(a.row_fisher, b.row_fisher)
        torch.testing.assert_close(a.input_gram, b.input_gram)
        assert float(a.row_fisher.sum()) > 0


class Experts(nn.Module):
    """Each token goes to one of two layers: how many there are of each depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.experts = nn.Embedding(40, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids).flatten(0, 1)
        chosen = input_ids.flatten() >= 38
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            picked = (chosen == i).nonzero().squeeze(1)
            if len(picked):
                mixed = mixed.index_add(0, picked, expert(x[picked]))
        return self.out(mixed.view(*input_ids.shape, 6).tanh().mean(1))


def test_experts_that_the_first_batch_never_calls() -> None:
    first, second = torch.randint(30, (3, 5)), torch.randint(30, 40, (3, 5))
    second[1, 2] = 39
    batches = [{"input_ids": ids, "labels": torch.tensor([0, 1, 1])} for ids in (first, second)]
    check(Experts(), batches, lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))


def captured(model: nn.Module, name: str, batches: Sequence[Mapping[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """What enters a layer and the gradients of what leaves it, sample by sample without padding."""
    xs, gs = [], []
    module = model.get_submodule(name)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        xs.append(args[0].detach().flatten(0, -2).double())
        output.register_hook(lambda g: gs.append(g.flatten(0, -2).double()))

    handle = module.register_forward_hook(hook)
    for batch in batches:
        for s in range(batch_size(batch)):
            one = take(batch, torch.tensor([s]))
            length = int(one["attention_mask"].sum())
            one = {k: v[:, :length] if v.ndim == 2 else v for k, v in one.items()}
            own_loss(model.eval(), one).backward()
    handle.remove()
    model.zero_grad()
    return xs, gs


def test_grams_leave_padding_out() -> None:
    model = bert()
    batches = [words(3, labels="class"), words(2, 9, labels="class")]
    needs = ALL | {"fisher_gram"}
    found = measure(model, find_weights(model), batches, needs=needs, quiet=True)
    for name in ("bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.1.output.dense"):
        xs, gs = captured(model, name, batches)
        x, one = torch.cat(xs), found.of(name)
        assert one.positions == len(x)
        assert one.samples == 5
        torch.testing.assert_close(one.input_gram, x.T @ x / len(x), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.input_mean, x.mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.output_gram, sum(g.T @ g for g in gs) / 5, rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(one.input_gram, one.input_gram.T)
        gradients = [torch.cat([x, torch.ones(len(x), 1)], 1).T @ g for x, g in zip(xs, gs, strict=True)]
        whole = sum(d @ d.T for d in gradients) / sum(g.square().sum() for g in gs)
        torch.testing.assert_close(one.fisher_gram, whole, rtol=1e-4, atol=1e-6)
        # With S it is the whole Fisher information, and its diagonal is that of the rows.
        torch.testing.assert_close(
            one.fisher_gram.diagonal()[:-1] * one.output_gram.trace(), one.row_fisher, rtol=1e-4, atol=1e-9
        )
    table = found.of("bert.embeddings.word_embeddings")
    ids = torch.cat([b["input_ids"][b["attention_mask"] == 1] for b in batches])
    torch.testing.assert_close(table.input_gram * len(ids), torch.bincount(ids, minlength=40).double())


@pytest.mark.parametrize(("positions", "n", "d"), [(3, 20, 8), (40, 8, 6), (5, 600, 4)], ids=str)
def test_gradient_grams_are_those_of_whole_gradients(positions: int, n: int, d: int) -> None:
    """By positions and by neurons, whichever is cheaper; positions that no loss reads change nothing."""
    x, g = torch.randn(7, positions, n), torch.randn(7, positions, d)
    g[:, 1] = 0
    total = Moments(n, None, torch.device("cpu"))
    for start in (0, 4):
        total.add(*gradient_rows(x[start : start + 4], g[start : start + 4]))
    gram, _ = total.finish()
    mirror_(gram)
    gradients = torch.bmm(x.mT, g).double()
    torch.testing.assert_close(gram, (gradients @ gradients.mT).sum(0), rtol=1e-4, atol=1e-2)


class Additive(nn.Module):
    """A loss that reads the sum of all outputs: errors of all positions add up."""

    def __init__(self) -> None:
        super().__init__()
        self.summed, self.alternating = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        signs = (-1.0) ** torch.arange(x.shape[1]).view(-1, 1)
        return self.summed(x).sum(1) + (self.alternating(x) * signs).sum(1)


def test_errors_that_add_up_over_positions_count_more_and_those_that_cancel_less() -> None:
    torch.manual_seed(0)
    model = Additive()
    batch = {"x": 0.1 * torch.randn(50, 12, 6) + 1, "labels": torch.randint(4, (50,))}
    found = measure(model, find_weights(model), [batch], needs=KroneckerFisher.needs, quiet=True)
    error = torch.randn(6, 4, dtype=torch.float64)
    costs = {}
    for name in ("summed", "alternating"):
        weighting = KroneckerFisher(centred=False, damping=0.0).weigh(found.of(name))
        costs[name] = float((error.T @ weighting.left @ error @ weighting.right).trace())
    assert costs["summed"] > 100 * costs["alternating"]


def test_a_bias_that_no_loss_depends_on_is_left_alone() -> None:
    """A constant added to all keys changes no attention, and the sum of their gradients is rounding."""
    model, batches = bert(), [words(6, 12, labels="class")]
    found = measure(model, find_weights(model), batches, needs=KroneckerFisher.needs, quiet=True)
    for name, one in found.measured.items():
        if name.endswith("attention.self.key"):
            weighting, whole = (KroneckerFisher(centred=centred).weigh(one) for centred in (True, False))
            inputs = one.fisher_gram.diagonal()[:-1].max().sqrt()
            assert float(weighting.mean.abs().max()) < float(inputs)
            torch.testing.assert_close(weighting.left, whole.left, rtol=1e-3, atol=1e-5 * float(inputs) ** 2)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_table_of_positions_costs_no_pass_of_its_own(kind: str, tiny_model: Any) -> None:
    """All samples read one row of position ids; each sample's own gradient is needed."""
    model, passes = tiny_model(kind), []
    batches = [words(6, 12), words(5, 9)]
    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(lambda *_: passes.append(1)).remove)
        measure(model, find_weights(model), batches, needs=KroneckerFisher.needs, quiet=True)
    looks = 4  # at layouts
    assert len(passes) <= len(batches) + looks


def test_wide_grams_are_whole() -> None:
    """Wider than the blocks that only one half is computed of."""
    model = nn.Sequential(nn.Linear(600, 2))
    x = torch.randn(30, 600)
    batch = {"input": x, "labels": torch.randint(2, (30,))}
    found = measure(model, find_weights(model), [batch], needs=ALL | {"fisher_gram"}, quiet=True).of("0")
    torch.testing.assert_close(found.input_gram, (x.double().T @ x.double()) / 30, rtol=1e-4, atol=1e-4)
    # Thirty samples in 600 dimensions: what is not shown is damped, not divided by.
    assert torch.linalg.matrix_rank(found.input_gram.float(), rtol=1e-4) == 30
    for importance in (InputGram(), KroneckerFisher()):
        left = importance.weigh(found).left
        assert float(torch.linalg.eigvalsh(left)[0]) > 0


def test_encoder_and_decoder_padding_of_equal_lengths() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    batch = {"input_ids": torch.randint(2, 40, (2, 6)), "labels": torch.randint(2, 40, (2, 6))}
    batch["attention_mask"] = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    batch["labels"][0, 4:] = -100
    found = measure(model, find_weights(model), [batch], needs=frozenset({"input_gram", "counts"}), quiet=True)
    assert found.of("encoder.block.0.layer.0.SelfAttention.q").positions == 8
    assert found.of("decoder.block.0.layer.0.SelfAttention.q").positions == 10
    assert found.of("decoder.block.0.layer.1.EncDecAttention.q").positions == 10
    assert found.of("decoder.block.0.layer.1.EncDecAttention.v").positions == 8
    assert found.of("shared").positions == 18
    assert int(found.of("shared").counts.sum()) == 18


def test_tied_grams_are_the_nearest_product() -> None:
    model = bert("BertForMaskedLM").eval()
    batch = words(3, labels="text")
    name = "bert.embeddings.word_embeddings"
    one = measure(model, find_weights(model), [batch], needs=ALL, quiet=True).of(name)
    table = find_weights(model)[0]
    assert table.name == name
    hidden: list[Tensor] = []
    reads: list[Tensor] = []
    logits: list[Tensor] = []
    with ExitStack() as stack:

        def head(module: nn.Module, args: Any, output: Tensor) -> None:
            hidden.append(args[0].detach())
            output.register_hook(logits.append)

        def read(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(reads.append)

        stack.callback(model.cls.predictions.decoder.register_forward_hook(head).remove)
        stack.callback(model.get_submodule(name).register_forward_hook(read).remove)
        TaskLoss("tokens").losses(model, batch).sum().backward()
    kept = batch["attention_mask"] == 1
    h, p, g = hidden[0][kept].double(), logits[0][kept].double(), reads[0][kept].double()
    share = torch.bincount(batch["input_ids"][kept], minlength=40).double() / len(h)
    terms = [(share, g.T @ g / 3), (p.square().sum(0) / 3, h.T @ h / len(h))]
    whole = sum(torch.outer(left, right.flatten()) for left, right in terms)
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    torch.testing.assert_close(
        torch.outer(one.input_gram, one.output_gram.flatten()), s[0] * torch.outer(u[:, 0], v[0]), rtol=1e-3, atol=1e-7
    )
    assert float(one.input_gram.sum()) == pytest.approx(1)
    alone = measure(model, [table], [batch], needs=frozenset({"input_gram"}), quiet=True).of(name)
    torch.testing.assert_close(alone.input_gram, share + h.square().mean(), rtol=1e-4, atol=1e-6)


def test_batches_do_not_matter() -> None:
    model = bert()
    whole = words(6, labels="class")
    split = [take(whole, torch.tensor(part)) for part in ([0], [1, 2, 3], [4, 5])]
    weights = find_weights(model)
    for objective in (TaskLoss(), SampledLabels(3), Projections(seed=3), Projections("pooled")):
        one, other = (measure(model, weights, b, needs=ALL, objective=objective, quiet=True) for b in ([whole], split))
        for name, found in one.measured.items():
            for key in ALL:
                a, b = getattr(found, key), getattr(other.of(name), key)
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(a.abs().max()))


def test_equal_seeds_are_equal_and_others_not() -> None:
    model, batch = bert("BertModel"), words(3)
    weights = find_weights(model)

    def rows(seed: int) -> Tensor:
        found = measure(model, weights, [batch], needs=FISHER, objective=Projections(seed=seed), quiet=True)
        return found.of("encoder.layer.0.output.dense").row_fisher

    before = torch.random.get_rng_state()
    assert torch.equal(rows(0), rows(0))
    assert not torch.allclose(rows(0), rows(1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_little_memory_takes_more_passes_to_the_same() -> None:
    model = bert()
    weights, batches = find_weights(model), [words(3, labels="class")]
    calls = []
    handle = model.register_forward_hook(lambda m, a, o: calls.append(1))
    most = max(8 * (w.shape[0] * w.shape[1] * 1 + 2 * sum(x * x + x for x in w.shape)) for w in weights)
    one = measure(model, weights, batches, needs=ALL, quiet=True)
    few = len(calls)
    other = measure(model, weights, batches, needs=ALL, memory_bytes=most, quiet=True)
    handle.remove()
    assert len(calls) - few > few
    for name, found in one.measured.items():
        assert all(torch.equal(getattr(found, key), getattr(other.of(name), key)) for key in ALL)
    with pytest.raises(KflatsError, match=r"statistics of .* take"):
        measure(model, weights, batches, needs=ALL, memory_bytes=100, quiet=True)


def test_one_group_of_sums_is_in_hand_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulator of a group that is done must not wait, on a device perhaps, until all others are."""
    told: list[str] = []
    begin, end = Accumulator.__init__, collect.measured
    monkeypatch.setattr(Accumulator, "__init__", lambda *given: (told.append("+"), begin(*given))[1])
    monkeypatch.setattr(collect, "measured", lambda *given: (told.append("-"), end(*given))[1])
    model = bert()
    weights = [w for w in find_weights(model) if w.places[0].role == "linear"]
    most = max(Accumulator.nbytes(weight, ALL) for weight in weights)
    measure(model, weights, [words()], needs=ALL, memory_bytes=most, quiet=True)
    held = [told[: k + 1].count("+") - told[: k + 1].count("-") for k in range(len(told))]
    assert told.count("-") == len(weights) > max(held)


def test_grams_alone_need_no_backward_and_no_labels() -> None:
    model, needs = bert("BertModel"), frozenset({"input_gram"})
    found = measure(model, find_weights(model), [words(3)], needs=needs, quiet=True)
    one = found.of("encoder.layer.0.output.dense")
    assert one.row_fisher is None
    assert found.objective == {}
    assert InputGram().weigh(one).mean is not None


def test_needs_by_weight() -> None:
    model = bert()
    name = "bert.encoder.layer.0.output.dense"
    needs = {name: RowFisher.needs, "classifier": KroneckerFisher.needs}
    found = measure(model, find_weights(model), [words(labels="class")], needs=needs, quiet=True)
    assert found.of(name).row_fisher is not None
    assert found.of(name).input_gram is None
    assert found.of("classifier").output_gram is not None
    assert found.unreached == ()
    for wrong in (frozenset({"fisher"}), {"nowhere": frozenset({"row_fisher"})}):
        with pytest.raises(KflatsError, match=r"cannot be measured|none of the weights"):
            measure(model, find_weights(model), [words()], needs=wrong, quiet=True)


@dataclass(frozen=True)
class Broken:
    """Fails in the second batch, in forward or in what follows."""

    how: str

    def losses(self, model: nn.Module, batch: Mapping[str, Any], first: int = 0) -> Tensor:
        losses = TaskLoss().losses(model, batch)
        if first and self.how == "raise":
            raise RuntimeError("on purpose")
        return losses * (math.nan if first else 1) if self.how == "nan" else losses.mean()


def state(model: nn.Module) -> Any:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    grads = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    return hooks, grads, model.config.to_dict()


@pytest.mark.parametrize("how", ["", "raise", "nan", "mean"])
def test_the_model_is_as_it_was_whatever_happens(how: str) -> None:
    model = bert().train()
    model.bert.encoder.layer[0].eval()
    model.bert.pooler.dense.weight.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    before, batches = state(model), [words(3, labels="class")] * 2
    values = {k: v.clone() for k, v in model.state_dict().items()}
    if how:
        with pytest.raises((KflatsError, RuntimeError), match=r"on purpose|NaN or infinite|one loss a sample"):
            measure(model, find_weights(model), batches, needs=ALL, objective=Broken(how), quiet=True)
    else:
        with torch.inference_mode():
            measure(model, find_weights(model), batches, needs=ALL, quiet=True)
    after = state(model)
    assert before[0] == after[0]
    assert before[2] == after[2]
    for (required, grad), (still, kept) in zip(before[1], after[1], strict=True):
        assert required == still
        assert (grad is None and kept is None) or torch.equal(grad, kept)
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())


def test_nan_names_the_sample() -> None:
    model = bert(num_labels=1)
    good, bad = words(2, labels="number"), words(3, labels="number")
    bad["labels"][1] = math.nan
    with pytest.raises(KflatsError, match="loss of sample 3 is NaN"):
        measure(model, find_weights(model), [good, bad], needs=FISHER, quiet=True)


@pytest.mark.parametrize("batches", [[], iter(()), [{"input_ids": torch.zeros(0, 3)}]])
def test_an_empty_calibration_set(batches: Any) -> None:
    model = bert()
    with pytest.raises(KflatsError, match="empty"):
        measure(model, find_weights(model), batches, needs=FISHER, quiet=True)


@pytest.mark.parametrize(
    "batches", [["a text"], [{"input_ids": [1, 2]}], {"input_ids": torch.ones(1, 2)}, Path("x"), 5]
)
def test_what_is_no_batch(batches: Any) -> None:
    model = bert()
    with pytest.raises(KflatsError, match=r"batch"):
        measure(model, find_weights(model), batches, needs=FISHER, quiet=True)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": torch.tensor([[3, 10**4]])},
            "a calibration batch gives id 10000, but",
        ),
        ({"input_ids": torch.tensor([[3, -1]])}, "gives id -1"),
        (
            {"input_ids": torch.ones(3, 4).long(), "attention_mask": torch.ones(2, 4)},
            "3 texts and attention masks of 2",
        ),
    ],
)
def test_batches_of_another_model_or_torn_apart(batch: dict[str, Tensor], message: str) -> None:
    model = bert()
    with pytest.raises(KflatsError, match=message):
        measure(model, find_weights(model), [words(), batch], needs=frozenset({"input_gram"}), quiet=True)


def test_needs_are_a_set() -> None:
    model = bert()
    with pytest.raises(KflatsError, match="must be a set"):
        measure(model, find_weights(model), [words()], needs="row_fisher", quiet=True)  # type: ignore[arg-type]


class Unused(nn.Module):
    """One layer that is never called, and one whose output nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.aside = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return self.used(x)


def test_layers_never_reached_are_zero_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    model = Unused()
    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
    found = measure(model, find_weights(model), [batch], needs=ALL)
    assert "never reached by this data: never, aside" in capsys.readouterr().err
    assert found.unreached == ("never", "aside")
    assert "never reached" in str(found)
    assert not found.of("never").column_fisher.any()
    assert found.of("aside").input_gram.any()
    assert not found.of("aside").row_fisher.any()
    with pytest.raises(KflatsError, match="does not reach this weight"):
        RowFisher().weigh(found.of("never"))
    assert RowFisher(unreached="uniform").weigh(found.of("never")).left is None
    measure(model, find_weights(model), [batch], needs=ALL, quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_do_not_overflow_half_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2)).to(dtype)
    x = torch.tensor([[3000.0, 1.0, 0.0], [3000.0, 0.0, 1e-3]]).to(dtype)  # 3000^2 is beyond float16
    batch = {"input": x, "labels": torch.tensor([0.5, -500.0]).unsqueeze(1).expand(2, 2).to(dtype)}
    kind = TaskLoss("regression")
    found = measure(model, find_weights(model), [batch], needs=ALL, objective=kind, quiet=True).of("0")
    assert float(found.input_gram[0, 0]) == pytest.approx(9e6, rel=1e-2)
    wide = model.float()
    batch = {k: v.float() for k, v in batch.items()}
    exact = measure(wide, find_weights(wide), [batch], needs=ALL, objective=kind, quiet=True).of("0")
    torch.testing.assert_close(found.row_fisher, exact.row_fisher, rtol=5e-2, atol=0.05 * float(exact.row_fisher.max()))


@dataclass(frozen=True)
class Times:
    """The task's loss times ``even`` and ``odd``, by the sample's place."""

    even: float
    odd: float

    def losses(self, model: nn.Module, batch: Mapping[str, Any], first: int = 0) -> Tensor:
        losses = TaskLoss().losses(model, batch, first)
        return losses * torch.where((torch.arange(len(losses)) + first) % 2 == 1, self.odd, self.even)


@pytest.mark.parametrize("factors", [(1e-7, 1e-7), (1.0, 0.0), (1e-3, 1e6)])
def test_losses_of_any_size_in_float16(factors: tuple[float, float]) -> None:
    """Gradients neither underflow nor overflow, and samples of one batch may differ in size."""
    needs = ALL | {"fisher_gram"}
    model, batches = bert(num_labels=3).half(), [words(3, labels="class"), words(2, 5, labels="class")]
    half, exact = (
        measure(one, find_weights(one), batches, needs=needs, objective=Times(*factors), quiet=True)
        for one in (model, copy.deepcopy(model).float())
    )
    for name, expected in exact.measured.items():
        for key in needs:
            a, b = getattr(half.of(name), key), getattr(expected, key)
            assert float((a - b).abs().max()) <= 0.02 * float(b.abs().max()), (name, key)


class Faint(nn.Module):
    """Two layers, one of whose gradients are 1e-10 of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.strong, self.faint = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.strong(x) + self.faint(x) * 1e-5 * 1e-5


def test_gradients_that_would_underflow_float16_are_measured() -> None:
    model = Faint().half()
    batch = {"x": torch.randn(6, 4).half(), "labels": torch.randint(3, (6,))}
    with torch.autocast("cpu", torch.float16):
        found = measure(model, find_weights(model), [batch], needs=FISHER, quiet=True)
    torch.testing.assert_close(found.of("faint").row_fisher * 1e20, found.of("strong").row_fisher, rtol=1e-3, atol=0.0)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_inputs_overwritten_in_place_are_refused() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.one(x)
            x += 1
            return self.two(y + x)

    model = Overwrites()
    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
    with pytest.raises(KflatsError, match="input of one is overwritten in place"):
        measure(model, find_weights(model), [batch], needs=FISHER, quiet=True)


def test_sentence_transformers_measure_as_their_model(tiny_folder: Any, tiny_tokenizer: Any) -> None:
    library = pytest.importorskip("sentence_transformers")
    whole = library.SentenceTransformer(str(tiny_folder), device="cpu")
    batches = text_batches(["the a b", "of word1", "word2 the of a"], tiny_tokenizer, batch=2)
    inner = whole[0].auto_model
    one = measure(whole, find_weights(whole), batches, needs=FISHER, quiet=True)
    other = measure(inner, find_weights(inner), batches, needs=FISHER, quiet=True)
    pairs = [(a, b) for a in one.measured for b in other.measured if a.endswith("." + b)]
    assert len(pairs) >= 6
    for a, b in pairs:
        torch.testing.assert_close(one.of(a).row_fisher, other.of(b).row_fisher, rtol=1e-3, atol=1e-12)


def test_the_real_model(minilm: Any) -> None:
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = ["A man is playing a guitar.", "Two dogs run.", "The stock market fell sharply on Friday."]
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer.5.")]
    needs = frozenset({"row_fisher"})
    batches = text_batches(texts, tokenizer, batch=3)
    found = measure(model, weights, batches, needs=needs, objective=Projections(seed=1), quiet=True)
    expected = brute_force(model, batches, _Counting(Projections(seed=1)))
    for weight in weights:
        torch.testing.assert_close(found.of(weight.name).row_fisher, expected[weight.name].sum(1), rtol=1e-3, atol=1e-9)


class _Counting:
    """An objective one sample at a time, in the order of the stream."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.first = objective, 0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        self.first += 1
        return self.objective.losses(model, batch, self.first - 1).sum()


NEEDS = ALL | {"fisher_gram", "counts"}


def sums_of(model: nn.Module, batches: Any, share: range) -> list[Any]:
    """The blocks of a share of the calibration set, summed by a process that sums no others."""
    weights = find_weights(model)
    with frozen(model):
        wanted = {w.name: NEEDS for w in weights}
        job = collect.Job(model, weights, batches, wanted, SampledLabels())
        kept, blocks = [w for w in weights if w.name not in job.without_layout], collect.in_blocks(batches)
        return [(index, job.sum(blocks[index], kept, False)) for index in share if index in blocks]


@pytest.mark.parametrize("kind", ["tied", "half", "convolutions"])
def test_shares_of_blocks_merge_to_the_same_bits(kind: str) -> None:
    """The sums of a pass equal, bit for bit, those of its blocks in shares, whichever share is summed first."""
    if kind == "convolutions":
        model: nn.Module = Convolutions()
        batches: Any = [{"image": torch.randn(s, 2, 5, 5)} for s in (40, 24, 30, 34, 64, 7)]
    else:
        model = bert("BertForMaskedLM") if kind == "tied" else bert(num_labels=3).half()
        batches = [words(s, 4 + i) for i, s in enumerate((16, 48, 30, 34, 60, 4, 7))]
    weights = find_weights(model)
    whole = measure(model, weights, batches, needs=NEEDS, objective=SampledLabels(), quiet=True)
    for cut in (1, 2):
        last, first = sums_of(model, batches, range(cut, 9)), sums_of(model, batches, range(cut))
        assert [index for index, _ in first + last] == [0, 1, 2, 3]
        with pytest.raises(KflatsError, match=r"block 0 .* after block"):
            merge(copy.deepcopy(last + first))
        merged = merge(first + last)
        for weight in [w for w in weights if w.name in merged]:
            a, b = measured(weight, NEEDS, merged[weight.name]), whole.of(weight.name)
            assert (a.samples, a.positions) == (b.samples, b.positions)
            for key in NEEDS:
                one, other = getattr(a, key), getattr(b, key)
                assert one is other is None or torch.equal(one, other), (weight.name, key)


def test_batches_of_a_block_do_not_depend_on_other_texts(tiny_tokenizer: Any) -> None:
    texts = ["word1 " * (1 + 7 * i % 11) for i in range(150)]
    whole = text_batches(texts, tiny_tokenizer, batch=10)
    parts = [batch for i in range(0, 150, 64) for batch in text_batches(texts[i : i + 64], tiny_tokenizer, batch=10)]
    assert len(whole) == len(parts) == 7 + 7 + 3
    assert all(torch.equal(a[key], b[key]) for a, b in zip(whole, parts, strict=True) for key in a)


def test_what_a_model_says_of_its_inputs_is_an_error_to_read_and_a_defect_of_measuring_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 2)

        def forward(self, x: Tensor, boxes: Tensor | None = None) -> Tensor:
            return self.first(x + boxes.mean())  # type: ignore[union-attr]

    model, needs = Reads(), frozenset({"row_fisher"})
    with pytest.raises(KflatsError, match=r"Reads cannot be run on these inputs alone: .* 'mean'") as refused:
        measure(model, find_weights(model), [{"x": torch.eye(3)}], needs=needs, quiet=True)
    assert "--importance uniform" in refused.value.on_command_line()
    monkeypatch.setattr(collect, "in_blocks", lambda batches: None)
    with pytest.raises(TypeError):
        measure(model, find_weights(model), [{"x": torch.eye(3), "boxes": torch.eye(3)}], needs=needs, quiet=True)


def test_a_batch_that_cannot_be_divided_counts_as_one_sample() -> None:
    """Patches of all images in one row, as of Qwen's vision towers, against the same images one by one."""

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, patches: Tensor, sides: Tensor) -> dict[str, Tensor]:
            whole = torch.split(patches, sides.prod(1).tolist())  # as many patches as the sides say
            return {"last_hidden_state": self.second(torch.cat([self.first(one).relu() for one in whole]))}

    torch.manual_seed(0)
    model, images = Sees(), [torch.randn(4, 3), torch.randn(6, 3)]
    needs = frozenset({"input_gram", "row_fisher", "output_gram"})
    batch = {"patches": torch.cat(images), "sides": torch.tensor([[2, 2], [2, 3]])}
    both = measure(model, find_weights(model), [batch], needs=needs, quiet=True)
    assert both.samples == 1
    x = torch.cat(images)
    torch.testing.assert_close(both.of("first").input_gram, x.T @ x / 10, check_dtype=False)
    assert both.of("second").row_fisher is not None
    assert bool((both.of("second").row_fisher > 0).all())
    with pytest.raises(KflatsError, match="cannot be run on these inputs alone"):
        measure(model, find_weights(model), [{**batch, "sides": torch.tensor([[9, 9]])}], needs=needs, quiet=True)


def test_many_outputs_have_the_diagonal_of_their_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compress by it: the head of a large vocabulary has no Gram that fits into memory."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 40))
    batches = [{"input": torch.randn(9, 6), "labels": torch.randint(40, (9,))} for _ in range(3)]
    weights, needs = find_weights(model), KroneckerFisher.needs
    whole = measure(model, weights, batches, needs=needs, quiet=True)
    monkeypatch.setattr(accumulators, "WIDEST", 20)
    found = measure(model, weights, batches, needs=needs, quiet=True)
    assert torch.equal(whole.of("0").output_gram, found.of("0").output_gram)
    squares = found.of("2").output_gram
    torch.testing.assert_close(squares, whole.of("2").output_gram.diagonal(), rtol=1e-4, atol=1e-9)
    weighting = KroneckerFisher().weigh(found.of("2"))
    assert weighting.right is not None
    torch.testing.assert_close(weighting.right, squares + 1e-3 * squares.mean())
    report = compress_(model, {"2": Recipe(SVD(), KroneckerFisher())}, keep="60%", statistics=found, quiet=True)
    assert 0 < report.weights[0].error < 1
