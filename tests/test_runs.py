"""The frame of the experiments: what decides a run, the log, what tables say of it, and the data that models learn."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kflats.common.errors import KflatsError

pytest.importorskip("_runs", reason="experiments/ is not here")
pytest.importorskip("scipy")
pytest.importorskip("transformers")

import _algorithms
import _claims
import _runs
import fwsvd_tasks
import messi_lenet
import messi_tasks
import messi_vgg
import robust_scores
from _quick import write_task
from _runs import Asked, Cell, Log, Scores, asked_for, carry_out
from _tables import Results, by_size, by_task, drop, orderings, paired, told, tuned_drop
from _task_models import Training, task_data, with_head

CELL = Cell("cola", "tiny", "SVD", "60%", 0, 2, {"lr": 1e-4}, {"k": 1}, ("svd", "scores"), "data")
SCORES = Scores("matthews", 0.5, 0.4, 0.45, {"compressed": 0.3}, 1000, 0.1)


def asked(folder: Path, *words: str) -> Asked:
    return asked_for("", "cola,mrpc", argv=["--results", str(folder), *words])


def log_of(folder: Path, drops: dict[tuple[str, int], float]) -> Log:
    """A log of runs that lose ``drops`` points, by method and seed."""
    log = Log(folder / "log.jsonl")
    cells = [
        (
            dataclasses.replace(CELL, method=method, seed=seed),
            lambda lost=lost: dataclasses.replace(SCORES, compressed=SCORES.original - lost / 100),
        )
        for (method, seed), lost in drops.items()
    ]
    carry_out(cells, log, asked(folder))
    return log


def test_several_processes_write_one_log(tmp_path: Path) -> None:
    """A log that is read while others append to it drops nothing of what they write."""
    path = tmp_path / "log.jsonl"

    def append(seed: int) -> None:
        for epochs in range(20):
            cell = dataclasses.replace(CELL, seed=seed, epochs=epochs)
            carry_out([(cell, lambda: SCORES)], Log(path), asked(tmp_path))

    threads = [threading.Thread(target=append, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(run.seed, run.epochs) for run in Log(path).runs} == {(s, e) for s in range(4) for e in range(20)}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Cell)])
def test_each_thing_that_decides_a_run_changes_its_key(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other: dict[str, Any] = {"seed": 1, "epochs": 0, "training": {}, "recipe": {}, "algorithms": ("svd",)}
    changed = dataclasses.replace(CELL, **{field: other.get(field, "another")})
    assert changed.key != CELL.key
    assert dataclasses.replace(CELL).key == CELL.key


def test_a_changed_library_or_algorithm_changes_the_key_and_a_commit_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return dataclasses.replace(CELL).key

    before = key()
    monkeypatch.setattr(_runs, "commit", lambda: "another")
    assert key() == before
    monkeypatch.setitem(_algorithms.VERSIONS, "messi", 99)
    assert key() == before, "this cell does not use it"
    monkeypatch.setitem(_algorithms.VERSIONS, "svd", 99)
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(_runs, "libraries", lambda: {"torch": "0"})
    assert key() != before


def test_finished_runs_are_kept_by_resume_and_run_again_without_it(tmp_path: Path) -> None:
    calls = []

    def compute() -> Scores:
        calls.append(1)
        return SCORES

    for words, count in ((("--resume",), 1), (("--resume",), 1), ((), 2)):
        carry_out([(CELL, compute)], Log(tmp_path / "log.jsonl"), asked(tmp_path, *words))
        assert len(calls) == count
    log = Log(tmp_path / "log.jsonl")
    assert len(log.runs) == 2
    (newest,) = log.newest()
    assert newest == log.runs[1]
    assert (newest.task, newest.tuned, newest.held_out) == ("cola", 0.45, {"compressed": 0.3})
    assert set(newest.libraries) == {"torch", "transformers"}


def test_a_run_of_another_process_is_kept(tmp_path: Path) -> None:
    """Which appended it after this one read the log, and which later cells may depend on."""
    log = Log(tmp_path / "log.jsonl")
    log_of(tmp_path, {("SVD", 0): 10.0})
    carry_out([(dataclasses.replace(CELL, seed=0), lambda: pytest.fail("run again"))], log, asked(tmp_path, "--resume"))
    assert len(log.runs) == 1


def test_cells_of_a_column_are_of_the_same_models(tmp_path: Path) -> None:
    """Where each seed has a model that all methods compressed; a method without runs of all seeds has no say."""
    old = {("SVD", 0): 10.0, ("SVD", 1): 10.0, ("MESSI", 0): 8.0, ("MESSI", 1): 8.0}
    new = {**dict.fromkeys(old, 20.0), ("k", 0): 9.0, ("k", 1): 9.0, ("few", 0): 5.0}
    runs = log_of(tmp_path / "old", old).newest()
    runs += [
        dataclasses.replace(run, original=run.original + 0.1, compressed=(run.compressed or 0.0) + 0.1)
        for run in log_of(tmp_path / "new", new).newest()
    ]
    results = Results(runs, drop)
    assert results.cells(["SVD", "MESSI", "k"], "60%", ["cola"], 2) == ["20.00 ± 0.00", "20.00 ± 0.00", "9.00 ± 0.00"]
    assert results.cells(["SVD", "few"], "60%", ["cola"], 2) == ["15.00 ± 0.00", "5.00 (1 of 2)"]
    assert results.cells(["SVD", "MESSI"], "60%", ["cola"], 2) == ["15.00 ± 0.00", "14.00 ± 0.00"]
    ours, theirs = results.by_seed(("MESSI", "SVD"), "60%", ["cola"])
    assert (ours, theirs) == (pytest.approx({0: 14.0, 1: 14.0}), pytest.approx({0: 15.0, 1: 15.0})), "all models count"


def test_all_models_that_a_seed_trained_count(tmp_path: Path) -> None:
    """A run of the same model replaces an older one."""
    log = log_of(tmp_path, {("SVD", 0): 10.0})
    for original in (0.6, 0.5):
        carry_out([(CELL, lambda of=original: dataclasses.replace(SCORES, original=of))], log, asked(tmp_path))
    assert sorted(drop(run) or 0.0 for run in log.newest()) == pytest.approx([10.0, 20.0])
    assert len(log.runs) == 3


def test_k_is_chosen_for_each_trained_model(tmp_path: Path) -> None:
    """By its own held-out scores; a model that lacks a k has none."""
    log = Log(tmp_path / "log.jsonl")
    scores = {(0.5, 1): 0.3, (0.5, 5): 0.4, (0.6, 1): 0.5, (0.6, 5): 0.4, (0.7, 5): 0.9}
    for (original, k), score in scores.items():
        cell = dataclasses.replace(CELL, method=messi_tasks.method_name(k))
        found = dataclasses.replace(SCORES, original=original, held_out={"compressed": score})
        carry_out([(cell, lambda found=found: found)], log, asked(tmp_path))
    chosen = [run for run in messi_tasks.with_chosen(log.newest(), [1, 5]) if run.method == messi_tasks.CHOSEN]
    assert {run.original: run.more["k"] for run in chosen} == {0.5: 5, 0.6: 1}


def test_a_page_of_another_command_is_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    _runs.check_page(page, "python x.py --resume")
    page.write_text("# Title\n\n    python x.py --resume\n\ntext\n")
    _runs.check_page(page, "python x.py --resume")
    with pytest.raises(KflatsError, match=r"the page of another command: python x\.py --resume"):
        _runs.check_page(page, "python x.py --precision bfloat16 --resume")


def test_runs_of_an_older_algorithm_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path, {("SVD", 0): 10.0})
    assert len(log.newest()) == 1
    monkeypatch.setitem(_algorithms.VERSIONS, "svd", 99)
    assert log.newest() == []


def test_a_line_that_was_cut_off_is_dropped_and_a_damaged_one_refused(tmp_path: Path, capsys: Any) -> None:
    log_of(tmp_path, {("SVD", 0): 10.0, ("SVD", 1): 12.0})
    path = tmp_path / "log.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert [run.seed for run in Log(path).runs] == [0]
    assert "cut off" in capsys.readouterr().err
    assert path.read_text() == whole[:-5], "reading changes nothing"
    carry_out([(dataclasses.replace(CELL, seed=2), lambda: SCORES)], Log(path), asked(tmp_path))
    assert [run.seed for run in Log(path).runs] == [0, 2]
    path.write_text(whole.replace("\n", "", 1))
    assert [run.seed for run in Log(path).runs] == [0, 1], "two runs in a line are two"
    for damaged in ("{}", "[1]", "not JSON", json.dumps({"key": 1}), whole.splitlines()[0] + "x"):
        path.write_text(damaged + "\n" + whole)
        with pytest.raises(KflatsError, match=r"line 1 of .* is no run"):
            Log(path)


def test_a_paired_interval_is_student_s() -> None:
    found = paired({0: 3.0, 1: 5.0, 2: 4.0, 9: 1.0}, {0: 1.0, 1: 2.0, 2: 3.0, 8: 7.0})
    assert found is not None
    half = 4.302652729911275 / 3**0.5  # t of 2 degrees of freedom; differences 2, 3, 1
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert not found.decides
    assert paired({0: 1.0}, {1: 1.0}) is None
    for few in ({0: 2.0}, {0: 2.0, 1: 3.0}):  # one pair, or equal differences: no interval, so no claim
        assert (one := paired(few, {seed: value - 1 for seed, value in few.items()})) is not None
        assert one.mean == 1.0
        assert not one.decides


def test_tables_say_what_was_not_run_and_orderings_what_the_interval_allows(tmp_path: Path) -> None:
    lost = {"SVD": (10.0, 12.0, 11.0), "MESSI": (5.0, 6.5, 6.2), "noise": (4.0, 18.0, 12.0), "half": (1.0,)}
    runs = log_of(tmp_path, {(m, s): v for m, values in lost.items() for s, v in enumerate(values)}).newest()
    results, sizes = Results(runs, drop), [("60%", "40 % saved"), ("40%", "60 % saved")]
    page = by_size(results, [*lost, "never"], sizes, ["cola"], 3).splitlines()
    assert page[0] == "| method | 40 % saved | 60 % saved |"
    assert page[2] == "| SVD | 11.00 ± 1.00 | not run |"
    assert page[5] == "| half | 1.00 (1 of 3) | not run |"
    assert page[6] == "| never | not run | not run |"
    both = by_size(results, ["SVD"], sizes, ["cola", "rte"], 3).splitlines()
    assert both[2:] == [
        "| cola | SVD | 11.00 ± 1.00 | not run |",
        "| rte | SVD | not run | not run |",
        "| mean | SVD | not run | not run |",
    ]
    head, _, row = by_task(results, ["SVD"], sizes[0], ["cola", "rte"], 3).splitlines()
    assert (head, row) == ("| 40 % saved | cola | rte | mean |", "| SVD | 11.00 ± 1.00 | not run | not run |")
    claims = [("MESSI", "SVD"), ("SVD", "MESSI"), ("noise", "SVD"), ("half", "SVD"), ("never", "SVD")]
    said = orderings(results, claims, sizes, ["cola"]).splitlines()
    assert len(said) == 2 + 2 + 4, "nothing is said of what was not run"
    for line, verdict in zip(said[4:], ("**holds**", "**REFUTED**", "]", "no interval)"), strict=True):
        assert line.endswith(f"{verdict} | not run |")
    found = Results(runs, tuned_drop).by_model("SVD", "60%", "cola")
    assert {seed: value for (seed, _), value in found.items()} == pytest.approx({0: 5.0, 1: 5.0, 2: 5.0})


def test_runs_of_different_models_are_not_paired(tmp_path: Path) -> None:
    lost = {("SVD", 0): 10.0, ("SVD", 1): 12.0, ("MESSI", 0): 5.0, ("MESSI", 1): 6.5}
    runs = log_of(tmp_path, lost).newest()
    assert "2 seeds; lr" in told(runs)
    other = [dataclasses.replace(run, original=0.6) if (run.method, run.seed) == ("SVD", 1) else run for run in runs]
    assert "3 models: cells are of those that all methods of a column compressed" in told(other)
    results = Results(other, drop)
    assert len(results.by_model("SVD", "60%", "cola")) == 2
    twice = Results([*runs, *(dataclasses.replace(r, original=0.9, compressed=0.8) for r in runs)], drop)
    ours, theirs = twice.by_seed(("MESSI", "SVD"), "60%", ["cola"])
    assert ours == pytest.approx({0: 7.5, 1: 8.25})
    assert theirs == pytest.approx({0: 10.0, 1: 11.0})
    assert twice.cell("SVD", "60%", ["cola"], 2) == "10.50 ± 0.71", "a seed counts once in a cell too"
    said = orderings(results, [("MESSI", "SVD")], [("60%", "")], ["cola"])
    assert "+5.00 (1 seed, no interval)" in said
    both = [*other, *(dataclasses.replace(run, task="mrpc") for run in runs)]
    assert "| mean | MESSI better than SVD | +5.00 (1 seed" in orderings(
        Results(both, drop), [("MESSI", "SVD")], [("60%", "")], ["cola", "mrpc"]
    )


def test_the_parts_of_a_training_set_share_nothing_and_follow_no_seed_of_a_run(tmp_path: Path) -> None:
    write_task(tmp_path, "sst2", (200, 40))
    data = task_data("sst2", Training(), tmp_path)
    assert (len(data.training), len(data.held_out), len(data.judged)) == (180, 20, 40)
    whole = {*zip(data.training.inputs, data.training.labels, strict=True)}
    assert not whole & {*zip(data.held_out.inputs, data.held_out.labels, strict=True)}
    assert task_data("sst2", Training(), tmp_path).digest == data.digest
    fewer = task_data("sst2", Training(limit=50), tmp_path)
    assert (len(fewer.training), len(fewer.held_out)) == (45, 5)
    assert fewer.digest != data.digest
    assert len(data.texts) == 180
    with pytest.raises(KflatsError, match="too few"):
        task_data("sst2", Training(limit=5), tmp_path)


def test_tasks_of_the_hub_are_read_by_official_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked_of_hub = []

    def load(repository: str, configuration: str, *, split: str, revision: str | None) -> Any:
        asked_of_hub.append((repository, configuration, split))
        rows = range(40 if split == "train" else 12)
        columns = {"question": [f"q{i}?" for i in rows], "sentence": [f"s{i}." for i in rows]}
        return datasets.Dataset.from_dict({**columns, "label": [i % 2 for i in rows]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = task_data("qnli", Training(), None)
    assert asked_of_hub == [("nyu-mll/glue", "qnli", "train"), ("nyu-mll/glue", "qnli", "validation")]
    assert (len(data.training), len(data.held_out), len(data.judged)) == (36, 4, 12)


def test_a_task_without_its_training_split_is_refused_with_the_splits_that_are_there(tmp_path: Path) -> None:
    write_task(tmp_path, "qnli")
    (tmp_path / "qnli" / "train.tsv").rename(tmp_path / "qnli" / "train_sample.tsv")
    with pytest.raises(KflatsError, match=r"(?s)no split 'train'.*train_sample"):
        task_data("qnli", Training(), tmp_path)
    assert len(task_data("qnli", Training(split="train_sample"), tmp_path).training) == 288
    with pytest.raises(KflatsError, match="there is no task 'qnly'"):
        task_data("qnly", Training(), tmp_path)


@pytest.mark.parametrize(
    ("words", "tasks", "seeds", "command"),
    [
        (("--tasks", "mrpc", "--seeds", "1"), ("cola", "mrpc"), (0, 1, 2), ""),
        (("--tasks", "mrpc,rte", "--seeds", "7"), ("mrpc", "rte"), (7,), " --tasks mrpc,rte --seeds 7"),
        (("--tasks", "mrpc", "--source", "a"), ("mrpc",), (0, 1, 2), " --tasks mrpc --source a"),
    ],
)
def test_a_page_shows_all_of_its_experiment_whatever_part_was_run(
    words: tuple[str, ...], tasks: tuple[str, ...], seeds: tuple[int, ...], command: str, tmp_path: Path
) -> None:
    found = asked(tmp_path, *words)
    assert ",".join(found.tasks) == words[1]
    page = found.of_page
    assert (page.tasks, page.seeds) == (tasks, seeds)
    assert found.command.endswith(f"{command} --resume")
    assert ("--tasks" in found.command) == bool(command)


@pytest.mark.parametrize("seeds", ["a", "0,", "-1", "0.5"])
def test_seeds_are_whole_numbers(seeds: str, tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match="--seeds"):
        asked(tmp_path, "--seeds", seeds)


def test_other_tasks_have_a_page_of_their_own(tmp_path: Path) -> None:
    script = messi_tasks.Tables
    own = {**messi_tasks.OWN}
    pages = {"cola": "messi_tasks", "sst2,cola": "messi_tasks_cola_sst2", "cola,sst2": "messi_tasks_cola_sst2"}
    commands = set()
    for tasks, page in pages.items():
        found = asked_for("", "cola,mrpc", own, argv=["--results", str(tmp_path), "--tasks", tasks])
        assert script(found.of_page).page == page
        commands.add(found.command.partition(" ")[2])
    assert len(commands) == 2, "in any order"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", ""), "--tasks names no task"),
        (("--tasks", "wikitext2"), "wikitext2"),
        (("--rates", "60,abc"), "--rates 60,abc is not supported: 'abc' is no number"),
        (("--rates", "0"), "'0' is no number above 0"),
        (("--rates", "150"), "'150' is no number above 0 and below 100"),
        (("--ks", ""), "'' is no whole number"),
        (("--ks", "1,0.5"), "'0.5' is no whole number"),
        (("--tuned", "7"), "--tuned 7 holds none of --ks"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(words: tuple[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match=said):
        messi_tasks.main(["--quick", "--results", str(tmp_path / "results"), "--models", str(tmp_path / "m"), *words])
    assert not (tmp_path / "results").exists()


def test_names_that_are_not_known_are_refused(tmp_path: Path) -> None:
    folders = ["--quick", "--results", str(tmp_path / "results"), "--models", str(tmp_path / "m")]
    for script, words in ((robust_scores, ["--methods", "nosuch"]), (fwsvd_tasks, ["--paths", "nowhere"])):
        with pytest.raises(KflatsError, match=f"{words[1]}.* is not known"):
            script.main([*folders, *words])


def test_other_texts_are_counted_by_another_recipe(monkeypatch: pytest.MonkeyPatch, minilm: Path) -> None:
    def recipes(texts: list[str]) -> dict[str, dict[str, str]]:
        monkeypatch.setattr(robust_scores, "sentences", lambda name: texts)
        experiment = robust_scores.Robust(asked_for(None, "", robust_scores.OWN, argv=[]))
        return {name: experiment.recipe(name) for name in robust_scores.METHODS}

    one, other, spaced = recipes(["a text"]), recipes(["another"]), recipes([" a text \n"])
    assert one == spaced, "as they are counted"
    assert {name for name in one if one[name] != other[name]} == {"SVD + counts"}
    digest = one["SVD + counts"]["texts"]
    monkeypatch.setattr(robust_scores, "WIKITEXT_2", digest)
    assert recipes(["a text"]) == {name: {"method": name} for name in robust_scores.METHODS}
    monkeypatch.setattr(robust_scores, "sentences", lambda name: pytest.fail("no method counts"))
    assert robust_scores.Robust(asked_for(None, "", robust_scores.OWN, argv=[])).recipe("SVD") == {"method": "SVD"}


def test_runs_of_other_texts_are_on_no_page(tmp_path: Path, minilm: Path) -> None:
    name, words = "SVD + counts", ["--results", str(tmp_path), "--tables", "--precision", "bfloat16"]
    asked = asked_for(None, "cola", robust_scores.OWN, argv=words)
    training = dataclasses.asdict(robust_scores.Robust(asked).training["cola"])
    cell = dataclasses.replace(CELL, model="MiniLM", method=name, size="59%", epochs=0, training=training)
    for recipe, lost in (({"method": name}, 0.1), ({"method": name, "texts": "another"}, 0.2)):
        scores = dataclasses.replace(SCORES, compressed=SCORES.original - lost, tuned=None)
        log = Log(tmp_path / "robust_scores.jsonl")
        carry_out([(dataclasses.replace(cell, recipe=recipe), lambda scores=scores: scores)], log, asked)
    robust_scores.Robust(asked).publish(log)
    page = (tmp_path / "robust_scores.md").read_text(encoding="utf-8")
    assert "10.00" in page
    assert "20.00" not in page
    assert [run.recipe for run in _claims.runs_of(tmp_path, "robust_scores")] == [{"method": name}]


@pytest.mark.parametrize(
    ("second", "flats", "verdict"),
    [(2.0, 1.0, "**holds**"), (2.0, 5.0, "**refuted**"), (3.0, 1.0, "open: SVD is not shown to need it")],
)
def test_fewer_epochs_suffice_only_where_more_are_needed(
    second: float, flats: float, verdict: str, tmp_path: Path
) -> None:
    log = Log(tmp_path / "messi_epochs.jsonl")
    lost = {("SVD", 1): 3.0, ("SVD", 2): second, ("MESSI, k = 5", 1): flats}
    for ((method, epochs), points), seed in itertools.product(lost.items(), range(3)):
        cell = dataclasses.replace(CELL, model="MiniLM", method=method, seed=seed, epochs=epochs, task="mrpc")
        tuned = SCORES.original - (points + 0.01 * seed * epochs) / 100
        carry_out([(cell, lambda tuned=tuned: dataclasses.replace(SCORES, tuned=tuned))], log, asked(tmp_path))
    claim = _claims.fewer_epochs("messi_epochs", "MESSI, k = 5", "SVD", CELL.size, ("mrpc", "rte"))
    told, missing = claim(tmp_path).split("<br>")
    assert told.endswith(verdict)
    assert missing == "rte: not run"


@pytest.mark.parametrize("words", [("--source", "shared"), ("--tasks", "cola"), ("--tasks", "mnist,cola")])
@pytest.mark.parametrize("script", [messi_lenet, messi_vgg])
def test_small_networks_have_one_model_and_one_task(script: Any, words: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match=rf"{words[0]} {words[1]} is not supported with {script.__name__}.py"):
        script.main([*words, "--tables", "--results", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_heads_fit_their_tasks_and_follow_the_seed(minilm: Path) -> None:
    assert with_head("conll2003", 0, minilm).classifier.out_features == 9
    assert with_head("stsb", 0, minilm).classifier.out_features == 1
    one, same, other = (with_head("cola", seed, minilm).classifier.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
