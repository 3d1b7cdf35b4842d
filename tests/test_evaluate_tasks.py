"""Scores of models on tasks: against counting by hand, with what the models cost, and on the command line."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from kflats.common.errors import KflatsError
from kflats.matrices.layers import FactoredLinear
from kflats.matrices.registry import LowRankMatrix
from kflats.model.swap import swap_
from kflats.model.weights import find_weights
from kflats.tasks.scoring import count_flops, evaluate_folder, score

transformers = pytest.importorskip("transformers")
pytest.importorskip("sklearn")

SIZE = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
HEADER = "sentence1\tsentence2\tlabel\n"


def bert(kind: str, labels: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, max_position_embeddings=64, num_labels=labels)
    model = getattr(transformers, f"BertFor{kind}")(config).eval()
    with torch.no_grad():  # as drawn, every text gets nearly the same answer
        for p in model.parameters():
            p.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = "abcdefghij"
    g = torch.Generator().manual_seed(0)
    texts = [" ".join(words[i] for i in torch.randint(10, (2 + row % 5,), generator=g)) for row in range(60)]
    for name, label in (("cola", lambda i: i % 2), ("stsb", lambda i: f"{i % 6:.3f}"), ("mrpc", lambda i: i % 2)):
        (folder / name).mkdir()
        rows = "".join(
            f"{t}\t{'' if name == 'cola' else texts[(i + 7) % 60]}\t{label(i)}\n" for i, t in enumerate(texts)
        )
        (folder / name / "dev.tsv").write_text(HEADER + rows)
    (folder / "conll2003").mkdir()
    tags = ("O", "B-PER", "I-PER", "B-LOC")
    rows = "\n".join("".join(f"{w}\t{tags[ord(w) % 4]}\n" for w in text.split()) for text in texts[:20])
    (folder / "conll2003" / "dev.tsv").write_text("token\tner\n" + rows)
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "dev.txt").write_text("\n".join(texts))
    return folder


def test_a_classification_is_what_counting_one_by_one_gives(data: Path, tiny_tokenizer: Any) -> None:
    model = bert("SequenceClassification")
    found = score(model, tiny_tokenizer, "mrpc", task_data=data, batch=7, costs=False)
    said, true = [], []
    for line in (data / "mrpc" / "dev.tsv").read_text().splitlines()[1:]:
        one, other, label = line.split("\t")
        with torch.no_grad():
            said.append(int(model(**tiny_tokenizer(one, other, return_tensors="pt")).logits.argmax()))
        true.append(int(label))
    assert 5 < sum(said) < 55  # else the test shows little
    hits = sum(a and b for a, b in zip(said, true, strict=True))
    assert found.value == pytest.approx(2 * hits / (sum(said) + sum(true)))
    assert dict(found.values)["accuracy"] == sum(a == b for a, b in zip(said, true, strict=True)) / 60
    assert (found.metric, found.n, found.full, found.split) == ("f1", 60, 0, "dev")


def test_the_models_numbering_of_labels_changes_nothing(data: Path, tiny_tokenizer: Any) -> None:
    model = bert("SequenceClassification")
    before = score(model, tiny_tokenizer, "mrpc", task_data=data, costs=False)
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight.flip(0).clone())
        model.classifier.bias.copy_(model.classifier.bias.flip(0).clone())
    model.config.id2label = {0: "equivalent", 1: "not_equivalent"}
    assert score(model, tiny_tokenizer, "mrpc", task_data=data, costs=False).values == before.values


def test_a_regression_and_a_cosine(data: Path, tiny_tokenizer: Any) -> None:
    model = bert("SequenceClassification", 1)
    found = score(model, tiny_tokenizer, "stsb", task_data=data, costs=False)
    values = dict(found.values)
    assert found.value == pytest.approx((values["pearson"] + values["spearman"]) / 2)
    scipy = pytest.importorskip("scipy.stats")
    lines = [line.split("\t") for line in (data / "stsb" / "dev.tsv").read_text().splitlines()[1:]]
    true = [float(label) for _, _, label in lines]
    with torch.no_grad():
        said = [model(**tiny_tokenizer(a, b, return_tensors="pt")).logits.item() for a, b, _ in lines]
        assert values["spearman"] == pytest.approx(scipy.spearmanr(said, true).statistic, abs=1e-6)
        cosines = []
        for a, b, _ in lines:
            u, v = (model.bert(**tiny_tokenizer(t, return_tensors="pt")).last_hidden_state.mean(1) for t in (a, b))
            cosines.append(float(F.cosine_similarity(u, v)))
    found = score(model.bert, tiny_tokenizer, "sts", task_data=data, costs=False)
    assert found.metric == "spearman"
    assert found.value == pytest.approx(scipy.spearmanr(cosines, true).statistic, abs=1e-4)


def test_words_are_judged_whole_and_a_cut_one_is_none(data: Path, tiny_tokenizer: Any) -> None:
    pytest.importorskip("seqeval")
    names = transformers.BertConfig().id2label
    assert names
    model = bert("TokenClassification", 9)

    class Knows(transformers.BertForTokenClassification):  # type: ignore[misc, name-defined]
        """Says the tag that the file has, which depends on the word alone."""

        def forward(self, input_ids: Any, **rest: Any) -> Any:
            places = {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 5}
            tags = ("O", "B-PER", "I-PER", "B-LOC")
            words = tiny_tokenizer.convert_ids_to_tokens(input_ids.reshape(-1))
            chosen = [places[tags[ord(w) % 4]] if len(w) == 1 else 0 for w in words]
            logits = F.one_hot(torch.tensor(chosen), 9).reshape(*input_ids.shape, 9).float()
            return transformers.modeling_outputs.TokenClassifierOutput(logits=logits)

    knows = Knows(model.config).eval()
    assert score(knows, tiny_tokenizer, "conll2003", task_data=data, costs=False, batch=3).value == 1.0
    cut = score(knows, tiny_tokenizer, "conll2003", task_data=data, costs=False, max_length=5)
    assert cut.full > 0
    assert 0 < cut.value < 1
    assert score(model, tiny_tokenizer, "conll2003", task_data=data, costs=False).value < 1


def test_perplexity_is_that_of_the_models_own_loss(data: Path, tiny_tokenizer: Any, tiny_model: Any) -> None:
    model = tiny_model("gpt2")
    found = score(model, tiny_tokenizer, "wikitext2", task_data=data, max_length=9, batch=4, costs=False)
    text = (data / "wikitext2" / "dev.txt").read_text()
    ids = tiny_tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, ids.shape[1], 9):
            block = ids[:, start : start + 9]
            if block.shape[1] > 1:
                total += float(model(block, labels=block).loss) * (block.shape[1] - 1)
                count += block.shape[1] - 1
    assert found.n == count
    assert found.value == pytest.approx(math.exp(total / count), rel=1e-4)
    with pytest.raises(KflatsError, match="needs a model ForCausalLM"):
        score(tiny_model("bert-lm"), tiny_tokenizer, "wikitext2", task_data=data, costs=False)


def test_costs_are_counted_and_timed(data: Path, tiny_tokenizer: Any) -> None:
    model = bert("SequenceClassification")
    found = score(model, tiny_tokenizer, "cola", task_data=data)
    assert found.flops is not None
    positions = found.batch * found.tokens
    inside = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and "encoder" in n)
    pooled = sum(m.weight.numel() for m in (model.bert.pooler.dense, model.classifier))
    attention = 2 * 2 * found.batch * found.tokens**2 * 16  # Q K' and its product with V
    assert found.flops == 2 * (positions * inside + found.batch * pooled) + attention
    assert found.parameters == model.num_parameters()
    assert found.size_bytes == 4 * found.parameters
    assert found.latency_ms is not None
    assert found.latency_ms > 0
    assert "GFLOP" in str(found)
    assert "matthews" in str(found)


def test_operations_of_factored_layers_are_counted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = FactoredLinear(LowRankMatrix(torch.ones(8, 3), torch.ones(3, 6)))
            self.b = nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.b(self.b.weight.new_tensor(0) + self.a(x)) @ torch.ones(5, 7)

    model = Model().train()
    assert count_flops(model, {"x": torch.ones(4, 8)}) == 2 * 4 * 3 * (8 + 6) + 2 * 4 * 6 * 5 + 2 * 4 * 5 * 7
    assert model.training
    assert not model.a._forward_hooks
    assert not model.a._forward_pre_hooks


def test_outputs_that_are_not_finite_are_refused(data: Path, tiny_tokenizer: Any, tiny_model: Any) -> None:
    model = bert("SequenceClassification")
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    with pytest.raises(KflatsError, match="not finite"):
        score(model, tiny_tokenizer, "cola", task_data=data, costs=False)
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(torch.nan)
    with pytest.raises(KflatsError, match="not finite"):
        score(model, tiny_tokenizer, "wikitext2", task_data=data, costs=False)


def test_the_models_mode_returns(data: Path, tiny_tokenizer: Any) -> None:
    model = bert("SequenceClassification").train()
    model.bert.eval()
    score(model, tiny_tokenizer, "cola", task_data=data)
    assert model.training
    assert not model.bert.training


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> tuple[Path, Path]:
    """A model, and the same with one layer at full rank, so that its answers are the same."""
    root = tmp_path_factory.mktemp("models")
    model = bert("SequenceClassification")
    model.save_pretrained(root / "original")
    small = copy.deepcopy(model)
    weight = next(w for w in find_weights(small) if w.name.endswith("intermediate.dense"))
    table = small.get_submodule(weight.name).weight.detach().T
    u, s, v = torch.linalg.svd(table, full_matrices=False)
    swap_(small, weight, LowRankMatrix((u * s).contiguous(), v.contiguous()))
    from kflats.io import annotate_

    annotate_(small)
    small.save_pretrained(root / "small")
    for name in ("original", "small"):
        tiny_tokenizer.save_pretrained(root / name)
    return root / "original", root / "small"


def test_two_folders_side_by_side(folders: tuple[Path, Path], data: Path) -> None:
    found = evaluate_folder(folders[1], "mrpc", original=folders[0], task_data=data)
    assert found.original is not None
    assert found.latency is not None
    assert found.compressed.value == found.original.value
    assert found.compressed.size_bytes == (folders[1] / "model.safetensors").stat().st_size
    assert found.compressed.parameters == found.original.parameters + 16 * 16  # the full-rank pair is larger
    assert found.original.flops is not None
    assert found.compressed.flops is not None
    assert found.compressed.flops > found.original.flops
    text = str(found)
    assert "original" in text
    assert "+0.0000" in text
    assert "95 % interval" in text
    assert evaluate_folder(folders[1], "mrpc", task_data=data, limit=9).compressed.n == 9


def run(*arguments: object) -> Any:
    from kflats.cli.app import app

    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command(folders: tuple[Path, Path], data: Path) -> None:
    result = run("evaluate", folders[1], "--task", "mrpc", "--task-data", data, "--original", folders[0], "--limit", 20)
    assert result.exit_code == 0, result.output
    for word in ("f1", "accuracy", "floating-point numbers", "weight files", "operations of it", "examples scored"):
        assert word in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "mrpcc"], "no task"),
        (["--task", "conll2003"], "does not fit"),
        (["--task", "mrpc", "--split", "test"], "no split 'test'"),
        (["--task", "mnli"], "has 3 labels"),
        (["--task", "mrpc", "--batch", "0"], "a batch size of 0"),
    ],
)
def test_the_command_says_no(folders: tuple[Path, Path], data: Path, options: list[str], message: str) -> None:
    result = run("evaluate", folders[0], "--task-data", data, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
