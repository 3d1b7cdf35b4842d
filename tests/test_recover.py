"""Recovery: what trains, what stays, that it is reproducible, resumes exactly, and never leaves a pickle."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from kflats import SVD, Integer, KeepDense, Recipe, Transform, compress_, run_as_
from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_model
from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import LowRankMatrix, Matrix
from kflats.model.run_as import coded_layers
from kflats.model.swap import swap_
from kflats.model.weights import factored_layers, find_weights
from kflats.recover.problem import TrainingObjective, distance, only
from kflats.recover.recover import RECOVERY_FILE, recover_, recover_folder

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

from kflats.recover.training import last_checkpoint  # noqa: E402  it imports both

HEADER = "sentence1\tsentence2\tlabel\n"
FAST = {"lr": 5e-3, "batch": 16, "epochs": 3, "quiet": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that a tiny model can learn: is the first word "the"?"""
    folder = tmp_path_factory.mktemp("data")
    (folder / "sst2").mkdir()
    g = torch.Generator().manual_seed(0)
    for name, count in (("train", 160), ("dev", 60)):
        rows = []
        for i in range(count):
            words = "".join(" " + "abcdefghij"[w] for w in torch.randint(10, (1 + i % 4,), generator=g))
            rows.append(f"{'the' if i % 3 else 'of'}{words}\t\t{int(i % 3 > 0)}\n")
        (folder / "sst2" / f"{name}.tsv").write_text(HEADER + "".join(rows))
    return folder


def small(kind: str = "ForSequenceClassification", seed: int = 0, rank: int = 6, **config: Any) -> Any:
    """A tiny BERT, its word table and one linear layer factored."""
    torch.manual_seed(seed)
    size = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.BertConfig(**size, intermediate_size=32, max_position_embeddings=32, **config)
    model = getattr(transformers, f"Bert{kind}")(made).eval()
    for ending in ("word_embeddings", "intermediate.dense"):
        weight = next(w for w in find_weights(model) if w.name.endswith(ending))
        n, d = weight.shape
        swap_(model, weight, LowRankMatrix(torch.randn(n, rank) * 0.1, torch.randn(rank, d) * 0.1))
    annotate_(model)
    return model


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_task_is_learnt_and_the_best_epoch_kept(data: Path, tiny_tokenizer: Any) -> None:
    model = small()
    done = recover_(
        model, "sst2", tokenizer=tiny_tokenizer, task_data=data, **{**FAST, "epochs": 6, "patience": None, "seed": 1}
    )
    assert done.before is not None
    assert done.after is not None
    assert done.after > 0.9 > done.before
    assert done.after == max(e.value or 0 for e in done.epochs) == done.epochs[done.best_epoch - 1].value
    assert done.epochs[-1].loss < done.epochs[0].loss
    assert (done.metric, done.trained, done.distilled) == ("accuracy", model.num_parameters(), False)
    assert f"epoch {done.best_epoch} (kept)" in str(done)
    assert not model.training
    from kflats.tasks.scoring import score

    assert score(model, tiny_tokenizer, "sst2", task_data=data, costs=False).value == done.after


@pytest.mark.parametrize(
    ("train", "moved"),
    [
        ("bases", {"basis"}),
        pytest.param("coordinates", {"weight"}, marks=pytest.mark.slow),
        pytest.param("factors", {"basis", "weight"}, marks=pytest.mark.slow),
    ],
)
def test_just_the_chosen_factors_train(data: Path, tiny_tokenizer: Any, train: str, moved: set[str]) -> None:
    model = small()
    model.classifier.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    before = values(model)
    done = recover_(model, "sst2", tokenizer=tiny_tokenizer, task_data=data, train=train, eval_split=None, **FAST)
    owned = {name: layer for name, layer in factored_layers(model) if layer.owns_matrix}
    expected = {f"{name}.{key}" for name in owned for key in moved}
    assert {name for name, value in values(model).items() if not torch.equal(value, before[name])} == expected
    assert done.trained == sum(before[name].numel() for name in expected)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert done.after is None
    assert done.best_epoch == 3


@pytest.mark.slow
def test_frozen_parameters_stay_frozen(data: Path, tiny_tokenizer: Any) -> None:
    model = small()
    model.bert.pooler.dense.weight.requires_grad_(False)
    before = values(model)
    recover_(model, "sst2", tokenizer=tiny_tokenizer, task_data=data, eval_split=None, **{**FAST, "epochs": 1})
    assert torch.equal(model.bert.pooler.dense.weight, before["bert.pooler.dense.weight"])
    assert not torch.equal(model.classifier.weight, before["classifier.weight"])


@pytest.mark.slow
def test_a_seed_decides_and_the_global_state_is_left_alone(data: Path, tiny_tokenizer: Any) -> None:
    found = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        model = small()
        torch.manual_seed(noise)
        random.seed(noise)
        np.random.seed(noise)
        recover_(
            model, "sst2", tokenizer=tiny_tokenizer, task_data=data, seed=seed, eval_split=None, **{**FAST, "epochs": 1}
        )
        found.append(values(model))
        drawn = (torch.rand(()).item(), random.random(), np.random.rand())
        torch.manual_seed(noise)
        random.seed(noise)
        np.random.seed(noise)
        assert drawn == (torch.rand(()).item(), random.random(), np.random.rand())
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


class Stop(KeyboardInterrupt):
    """As if the process were told to end."""


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the judge stop the run when it is asked for the ``after``-th time."""
    from kflats.recover import problem as training_data

    real, calls = training_data.score_features, []

    def judge(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == after:
            raise Stop
        return real(*arguments)

    monkeypatch.setattr(training_data, "score_features", judge)


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(
    data: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small()
    settings = {"tokenizer": tiny_tokenizer, "task_data": data, **FAST, "lr": 1e-3, "epochs": 4, "patience": None}
    expected = recover_(whole, "sst2", **settings)
    model = small()
    before = values(model)
    with monkeypatch.context() as patch:
        interrupted(patch, after=4)  # the start, epochs 1 and 2, and in epoch 3 it happens
        with pytest.raises(Stop):
            recover_(model, "sst2", **settings, folder=tmp_path / "run")
    assert same(values(model), before)
    done = recover_(model, "sst2", **settings, folder=tmp_path / "run")
    assert done.resumed == 2
    assert done.epochs == expected.epochs
    assert same(values(model), values(whole))


def test_checkpoints_hold_no_pickle(data: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    recover_(small(), "sst2", tokenizer=tiny_tokenizer, task_data=data, folder=tmp_path / "run", **FAST)
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
    (run,) = (tmp_path / "run").iterdir()
    assert last_checkpoint(run) is not None


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_off_is_passed_over(data: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    settings = {"tokenizer": tiny_tokenizer, "task_data": data, "eval_split": None, **FAST}
    whole = small()
    recover_(whole, "sst2", **settings)
    recover_(small(), "sst2", **settings, folder=tmp_path)
    (run,) = tmp_path.iterdir()
    found = last_checkpoint(run)
    assert found is not None
    weights = found[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (run / "checkpoint-9000").mkdir()
    assert last_checkpoint(run) is None
    model = small()
    assert recover_(model, "sst2", **settings, folder=tmp_path).resumed == 0
    assert same(values(model), values(whole))


@pytest.mark.slow
def test_checkpoints_of_another_run_are_not_used(data: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    settings = {"tokenizer": tiny_tokenizer, "task_data": data, "eval_split": None, "folder": tmp_path, **FAST}
    recover_(small(), "sst2", **settings)
    for other in ({"lr": 1e-3}, {"seed": 3}):
        assert recover_(small(), "sst2", **{**settings, **other}).resumed == 0
    assert recover_(small(seed=5), "sst2", **settings).resumed == 0
    assert recover_(small(), "sst2", **settings).resumed == 3
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_it_stops_when_nothing_is_gained(data: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    settings = {"tokenizer": tiny_tokenizer, "task_data": data, "quiet": True, "batch": 16, "folder": tmp_path}
    model = small()
    before = values(model)
    done = recover_(model, "sst2", lr=1e-12, epochs=9, patience=2, **settings)
    assert (done.stopped, len(done.epochs), done.best_epoch) == (True, 3, 1)
    assert done.after == done.before
    assert "stopped early" in str(done)
    again = recover_(small(), "sst2", lr=1e-12, epochs=9, patience=2, **settings)
    assert again.epochs == done.epochs
    assert before.keys() == values(model).keys()


@pytest.mark.slow
def test_a_start_that_was_better_is_put_back(data: Path, tiny_tokenizer: Any) -> None:
    model = small()
    recover_(
        model, "sst2", tokenizer=tiny_tokenizer, task_data=data, **{**FAST, "epochs": 6, "patience": None, "seed": 1}
    )
    good = values(model)
    done = recover_(model, "sst2", tokenizer=tiny_tokenizer, task_data=data, **{**FAST, "lr": 10.0, "epochs": 1})
    assert done.best_epoch == 0
    assert done.after == done.before
    assert same(values(model), good)
    assert "restored" in str(done)


def test_a_loss_that_is_nan_is_an_error_and_changes_nothing(data: Path, tiny_tokenizer: Any) -> None:
    model = small()
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    before = values(model)
    with pytest.raises(KflatsError, match="loss is nan after 0 steps"):
        recover_(model, "sst2", tokenizer=tiny_tokenizer, task_data=data, eval_split=None, **FAST)
    after = values(model)
    assert all(torch.equal(after[n], v) for n, v in before.items() if n != "classifier.bias")
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.slow
def test_factors_in_16_bits_train_and_return_to_16_bits(data: Path, tiny_tokenizer: Any) -> None:
    model = small()
    for _, layer in factored_layers(model):
        for p in layer.matrix.parameters():
            p.data = p.data.half()
        if isinstance(layer, FactoredEmbedding):
            layer.out_dtype = torch.float32
    start = values(model)
    done = recover_(
        model, "sst2", tokenizer=tiny_tokenizer, task_data=data, **{**FAST, "epochs": 6, "patience": None, "seed": 1}
    )
    assert done.after is not None
    assert done.after > 0.9
    name = "bert.embeddings.word_embeddings.weight"
    assert values(model)[name].dtype == torch.float16
    assert not torch.equal(values(model)[name], start[name])
    assert model.bert.embeddings.word_embeddings.out_dtype == torch.float32
    half = small().half()
    recover_(half, "sst2", tokenizer=tiny_tokenizer, task_data=data, eval_split=None, **{**FAST, "epochs": 1})
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert half.bert.embeddings.word_embeddings(torch.tensor([3])).dtype == torch.float16


def one_batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model"])
def test_a_teacher_is_at_no_distance_from_itself(kind: str) -> None:
    batch = one_batch()
    model, other = small(kind), small(kind, seed=1)
    with torch.no_grad():  # untrained heads are near zero: distances would be of the size of float32's rounding
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    objective = TrainingObjective(copy.deepcopy(model))
    changed = {**batch, "input_ids": batch["input_ids"] + torch.tensor([[0] * 4, [0, 0, 0, 50]])}
    with torch.no_grad():
        assert float(objective(model, batch)) == pytest.approx(0, abs=1e-6)
        assert float(objective(other, batch)) > 1e-3
        padded = float(objective(other, changed))
        assert padded == pytest.approx(float(objective(other, batch)), rel=1e-3, abs=1e-6)


def test_distances_by_hand() -> None:
    batch, temperature = one_batch(), 3.0
    model, teacher = small(), small(seed=1)
    with torch.no_grad():
        teacher.classifier.weight.mul_(30)
        ours, theirs = (m(**batch).logits.double() for m in (model, teacher))
        found = distance(model, model(**batch), teacher(**batch), batch, temperature)
    p, q = ((x / temperature).softmax(-1) for x in (theirs, ours))
    assert float(found) == pytest.approx(temperature**2 * float((p * (p / q).log()).sum(1).mean()), rel=1e-3)
    model, teacher = small(num_labels=1), small(num_labels=1, seed=1)
    with torch.no_grad():
        found = distance(model, model(**batch), teacher(**batch), batch, temperature)
        assert float(found) == pytest.approx(float(F.mse_loss(model(**batch).logits, teacher(**batch).logits)))
    model, teacher = small("Model"), small("Model", seed=1)
    with torch.no_grad():
        found = distance(model, model(**batch), teacher(**batch), batch, temperature)
        mean = [
            [m(input_ids=row[None, : int(mask.sum())]).last_hidden_state.mean(1) for m in (model, teacher)]
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
    cosines = [float(F.cosine_similarity(a, b)) for a, b in mean]
    assert float(found) == pytest.approx(1 - sum(cosines) / 2, abs=1e-5)


@pytest.mark.parametrize("taught", [False, True])
def test_a_batch_without_any_labelled_word_says_nothing(taught: bool) -> None:
    """A sentence of characters that the tokenizer drops is one: the mean over its words would be NaN."""
    model = small("ForTokenClassification")
    batch = {**one_batch(), "labels": torch.full((2, 4), -100)}
    loss = TrainingObjective(small("ForTokenClassification", seed=1) if taught else None)(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not bool(p.grad.any()) for p in model.parameters())


def test_labels_and_teacher_are_mixed() -> None:
    batch = {**one_batch(), "labels": torch.tensor([0, 1])}
    model, teacher = small(), small(seed=1)
    with torch.no_grad():
        teacher.classifier.weight.mul_(30)
        hard, soft = (float(TrainingObjective(teacher, labels_weight=w)(model, batch)) for w in (1.0, 0.0))
        assert abs(hard - soft) > 0.1
        assert float(TrainingObjective()(model, batch)) == pytest.approx(hard)
        mixed = TrainingObjective(teacher, labels_weight=0.25)
        assert float(mixed(model, batch)) == pytest.approx(0.25 * hard + 0.75 * soft)
    for wrong in ({"temperature": 0.0}, {"labels_weight": 1.5}, {"temperature": float("nan")}):
        with pytest.raises(KflatsError, match="out of range"):
            TrainingObjective(**wrong)
    with pytest.raises(KflatsError, match="neither labels nor a teacher"):
        TrainingObjective()(model, one_batch())
    with pytest.raises(KflatsError, match="another head"):
        TrainingObjective(small(num_labels=3))(model, batch)


@pytest.mark.slow
def test_a_headless_encoder_comes_nearer_to_its_teacher() -> None:
    teacher = small("Model", seed=3)
    teacher.train()
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        for _, layer in factored_layers(model):
            for p in layer.matrix.parameters():
                p.add_(0.1 * torch.randn_like(p))
    before = values(teacher)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (96, 6), generator=g)
    batches = [{"input_ids": ids[i : i + 8]} for i in range(0, 96, 8)]
    done = recover_(model, batches[:10], eval_split=batches[10:], teacher=teacher, train="factors", **FAST)
    assert done.metric == "loss"
    assert done.before is not None
    assert done.after is not None
    assert done.after < 0.7 * done.before
    assert same(values(teacher), before)
    assert teacher.training
    with pytest.raises(KflatsError, match="neither labels nor a teacher"):
        recover_(model, batches, eval_split=None, **FAST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "rows"}, "train='rows' is not known"),
        ({"lr": 0.0}, "learning rate of 0.0"),
        ({"lr": float("nan")}, "learning rate of nan"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"epochs": True}, "epochs=True"),
        ({"batch": 0}, "batch=0"),
        ({"patience": 0}, "patience=0"),
        ({"seed": -1}, "seed=-1"),
        ({"precision": "float16"}, "precision='float16' is not known"),
        ({"split": "nowhere"}, "no split 'nowhere'"),
        ({"eval_split": "nowhere"}, "no split 'nowhere'"),
        ({"eval_split": [one_batch()]}, "evaluated on one of its splits"),
    ],
)
def test_bad_requests_are_refused(data: Path, tiny_tokenizer: Any, options: dict[str, Any], message: str) -> None:
    model = small()
    before = values(model)
    with pytest.raises(KflatsError, match=message):
        recover_(model, "sst2", tokenizer=tiny_tokenizer, task_data=data, **{**FAST, **options})
    assert same(values(model), before)


def test_models_that_cannot_be_recovered_are_refused(
    data: Path, tiny_tokenizer: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"tokenizer": tiny_tokenizer, "task_data": data, **FAST}
    with pytest.raises(KflatsError, match="a transformers model"):
        recover_(torch.nn.Linear(2, 2), "sst2", **settings)
    with pytest.raises(KflatsError, match="does not fit BertModel"):
        recover_(tiny_model("bert"), "sst2", **settings)
    with pytest.raises(KflatsError, match="there are no batches"):
        recover_(small(), [], **FAST)
    dense = transformers.BertForSequenceClassification(small().config)
    with pytest.raises(KflatsError, match="no factored layer of which bases could train"):
        recover_(dense, "sst2", train="bases", **settings)
    frozen = small()
    frozen.requires_grad_(False)
    with pytest.raises(KflatsError, match="nothing is left to train"):
        recover_(frozen, "sst2", **settings)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(KflatsError, match=r"kflats\[tasks\]"):
        recover_(small(), "sst2", eval_split=None, **settings)


def t5() -> Any:
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def fsmt() -> Any:
    """A model that writes into the ids that it is given."""
    own = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    layers = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in own.items()}
    sizes = {"src_vocab_size": 60, "tgt_vocab_size": 60, "langs": ["en", "de"], "d_model": 16, "init_std": 0.3}
    return transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(**sizes, **layers))


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(t5, marks=pytest.mark.slow), fsmt])
def test_an_encoder_decoder_learns_from_texts(build: Callable[[], Any]) -> None:
    """Its decoder reads the text, as it is measured and compared."""
    torch.manual_seed(0)
    teacher = build()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.get_input_embeddings().weight.mul_(0.5)
    batches = [{"input_ids": torch.randint(3, 60, (4, 9))} for _ in range(4)]
    recovery = recover_(student, batches, teacher=teacher, eval_split=batches, lr=1e-2, epochs=4, batch=4, quiet=True)
    assert 0 < recovery.after < 0.85 * recovery.before


@pytest.mark.slow
def test_a_model_that_compares_texts_with_images_is_refused() -> None:
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 60}, vision_config={**tower, "image_size": 16, "patch_size": 8}
    )
    teacher = transformers.CLIPModel(config)
    with pytest.raises(KflatsError, match=r"CLIPModel cannot be run on these inputs alone.*reads texts alone"):
        recover_(copy.deepcopy(teacher), [{"input_ids": torch.ones(2, 5, dtype=torch.long)}], teacher=teacher, **FAST)


def test_codes_have_no_bases_to_train(tiny_model: Any) -> None:
    """Integers are constants: the error names them, scales train, and every flag is what it was."""
    pytest.importorskip("constriction")
    for recipe in (Recipe(SVD(), codec=Transform()), Recipe(KeepDense(), codec=Integer(bits=8))):
        model = tiny_model("bert")
        compress_(model, {"embeddings.word_embeddings": recipe}, keep="40%", quiet=True)
        before = {name: p.requires_grad for name, p in model.named_parameters()}
        with pytest.raises(KflatsError, match=r'codes have no bases.*integers.*train="all"'), only(model, "bases"):
            pass
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
        for train in ("coordinates", "factors"):
            with only(model, train) as chosen:
                assert sum(p.numel() for p in chosen)


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    small().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments: object) -> Any:
    from kflats.cli.app import app

    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_products_in_bfloat16_learn_as_well_and_parameters_stay_float32(data: Path, tiny_tokenizer: Any) -> None:
    settings = {**FAST, "tokenizer": tiny_tokenizer, "task_data": data, "epochs": 6, "patience": None, "seed": 1}
    models, done = [small(), small()], []
    for model, precision in zip(models, ("float32", "bfloat16"), strict=True):
        done.append(recover_(model, "sst2", precision=precision, **settings))
    assert all(one.after is not None and one.after > 0.9 for one in done)
    assert not same(values(models[0]), values(models[1]))
    assert {p.dtype for p in models[1].parameters()} == {torch.float32}
    losses = [[epoch.loss for epoch in one.epochs] for one in done]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.3, atol=0.02)


@pytest.mark.slow
def test_a_folder_is_recovered_twice_over(folder: Path, data: Path, tmp_path: Path) -> None:
    common = (
        "--task",
        "sst2",
        "--task-data",
        data,
        "--lr",
        "5e-3",
        "--batch",
        16,
        "--epochs",
        6,
        "--patience",
        6,
        "--seed",
        1,
    )
    result = run("recover", folder, "--out", tmp_path / "better", *common)
    assert result.exit_code == 0, result.output
    assert "accuracy on dev" in result.stdout
    model = load_model(tmp_path / "better")
    layers = [layer for _, layer in factored_layers(model)]
    assert len(layers) == 2
    assert all(isinstance(layer.matrix, Matrix) for layer in layers)
    first = json.loads((tmp_path / "better" / RECOVERY_FILE).read_text())
    assert first["after"] > first["before"]
    assert (tmp_path / "better" / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".*"))  # nothing is left beside it
    assert run("recover", tmp_path / "better", "--out", tmp_path / "best", *common, "--quiet").stdout == ""
    second = json.loads((tmp_path / "best" / RECOVERY_FILE).read_text())
    assert second["before"] == first["after"]
    shown = run("evaluate", tmp_path / "best", "--task", "sst2", "--task-data", data).stdout
    assert f"{second['after']:.4f}" in shown


def test_a_folder_of_layers_that_run_in_integers_trains_dense_and_runs_in_integers_again(
    data: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The form int8 has no gradients."""
    model = small()
    compress_(model, {"*.attention.*": Recipe(KeepDense(), codec=Integer(bits=8))}, keep="50%", quiet=True)
    run_as_(model, "int8")
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    settings = {**FAST, "epochs": 1, "task_data": data}
    recover_folder(tmp_path / "model", tmp_path / "out", "sst2", eval_split=None, **settings)
    before, after = (coded_layers(load_model(tmp_path / name)) for name in ("model", "out"))
    assert len(after) == 4
    assert {layer.run_form for layer in after} == {"int8"}
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.matrix.codes, other.matrix.codes)
        assert not torch.equal(one.matrix.weight, other.matrix.weight)


@pytest.mark.slow
def test_an_interrupted_folder_resumes_and_appears_whole(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"task_data": data, **FAST}
    with monkeypatch.context() as patch:
        interrupted(patch, after=3)
        with pytest.raises(Stop):
            recover_folder(folder, tmp_path / "out", "sst2", **settings)
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.glob(".out*")] == [".out.kflats-recovery"]
    done = recover_folder(folder, tmp_path / "out", "sst2", **settings)
    assert done.resumed == 1
    assert not list(tmp_path.glob(".out*"))
    with pytest.raises(KflatsError, match="exists already"):
        recover_folder(folder, tmp_path / "out", "sst2", **settings)


@pytest.mark.parametrize("held", ["model", "teacher"])
def test_a_folder_that_holds_a_model_is_not_replaced(folder: Path, data: Path, tmp_path: Path, held: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for where in (out, out / "inner", elsewhere):
        shutil.copytree(folder, where)
    model, teacher = (out / "inner", elsewhere) if held == "model" else (elsewhere, out / "inner")
    with pytest.raises(KflatsError, match="out holds the original, inner, so it is not replaced"):
        recover_folder(model, out, "sst2", teacher=teacher, force=True, task_data=data, **FAST)
    assert (out / "inner" / "config.json").is_file()


@pytest.mark.slow
def test_texts_and_a_teacher_will_do(tmp_path: Path, tiny_tokenizer: Any) -> None:
    teacher = small("Model", seed=3)
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.add_(0.1 * torch.randn(300, 6))
    for name, one in (("teacher", teacher), ("model", model)):
        one.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"word{i} word{(7 * i) % 280} a b" for i in range(100)))
    options = ("--texts", texts, "--lr", "1e-3", "--batch", 8, "--quiet")
    found = run("recover", tmp_path / "model", "--out", tmp_path / "out", "--teacher", tmp_path / "teacher", *options)
    assert found.exit_code == 0, found.output
    done = json.loads((tmp_path / "out" / RECOVERY_FILE).read_text())
    assert done["after"] < done["before"]
    assert done["distilled"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "either a task or texts"),
        (["--texts", "TEXTS"], "without a teacher"),
        (["--texts", "TEXTS", "--teacher", "MODEL", "--limit", "3"], "--texts cannot be used with --limit"),
        (["--task", "sst2", "--task-data", "DATA", "--train", "heads"], "train='heads' is not known"),
        (["--task", "mnli", "--task-data", "DATA"], "has 3 labels"),
        (["--task", "sst2", "--task-data", "DATA", "--split", "extra"], "no split 'extra'"),
    ],
)
def test_the_command_says_no(folder: Path, data: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "texts.txt").write_text("a b\n" * 20)
    named = {"TEXTS": tmp_path / "texts.txt", "MODEL": folder, "DATA": data}
    result = run("recover", folder, "--out", tmp_path / "out", *(named.get(o, o) for o in options))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
