"""``--quick`` of the experiments: the whole command on tiny models and generated data, and the directions that must
hold there."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("_runs", reason="experiments/ is not here")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import all_runs
import fwsvd_groups
import fwsvd_tasks
import messi_epochs
import messi_lenet
import messi_same_size
import messi_search
import messi_tasks
import messi_variants
import messi_vgg
import robust_scores
import train_small
from _small_networks import Images, ResNet20, accuracy, train_

from kflats.common.errors import KflatsError


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quick")


def quick(main: Any, places: Path, name: str, *words: str, page: str = "") -> tuple[str, list[dict[str, Any]]]:
    """The page and the runs of a command."""
    results = places / "results"
    main(["--quick", "--resume", "--results", str(results), "--models", str(places / "models"), *words])
    lines = (results / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return (results / f"{page or name}.md").read_text(encoding="utf-8"), [json.loads(line) for line in lines]


@pytest.mark.slow
def test_messi_tasks(places: Path) -> None:
    words = ("--tasks", "sst2", "--rates", "60")
    page, runs = quick(messi_tasks.main, places, "messi_tasks", *words)
    at = {(run["method"], run["seed"]): run for run in runs}
    assert set(at) == {(method, seed) for method in ("SVD", "MESSI, k = 3", "kflats") for seed in (0, 1)}
    for seed in (0, 1):
        svd, messi, ours = (at[method, seed] for method in ("SVD", "MESSI, k = 3", "kflats"))
        assert svd["original"] == messi["original"] == ours["original"] > 0.6, "the tiny model learns its task"
        assert messi["error"] < svd["error"], "its rows lie near three flats"
        assert max(run["nbytes"] for run in (svd, messi, ours)) <= 0.4 * svd["more"]["bytes_before"]
        for run in (svd, messi, ours):
            assert run["tuned"] > 0.5
            assert set(run["held_out"]) == {"original", "compressed", "tuned"}
    assert "not run" not in page.split("## Half")[0]
    assert (places / "results" / "messi_tasks_after.png").stat().st_size > 2000
    before = page
    page, again = quick(messi_tasks.main, places, "messi_tasks", *words)
    assert again == runs, "finished runs are kept"
    assert page == before
    page, again = quick(messi_tasks.main, places, "messi_tasks", *words, "--seeds", "0,1,2", "--tables")
    assert again == runs
    assert "(2 of 3)" in page, "tables run nothing"


@pytest.mark.slow
def test_messi_variants(places: Path) -> None:
    page, runs = quick(messi_variants.main, places, "messi_variants", "--tasks", "sst2")
    at = {(run["method"], run["seed"]): run for run in runs}
    ways = ("MESSI, k = 3", "k-means, k = 3", "MESSI l1, k = 3")
    assert set(at) == {(method, seed) for method in ways for seed in (0, 1)}
    for seed in (0, 1):
        flats, k_means, distances = (at[method, seed] for method in ways)
        assert flats["error"] <= k_means["error"], "projective clustering minimises the squares"
        assert flats["error"] != distances["error"], "distances are another objective"
        assert flats["nbytes"] == distances["nbytes"]
        assert k_means["original"] == flats["original"]
        assert None not in (flats["tuned"], k_means["tuned"], distances["tuned"])
    assert "not run" not in page
    assert "MESSI, k = 3 better than k-means, k = 3" in page
    assert "MESSI l1, k = 3 better than MESSI, k = 3" in page


@pytest.mark.slow
def test_messi_epochs(places: Path) -> None:
    page, runs = quick(messi_epochs.main, places, "messi_epochs")
    at = {(run["method"], run["epochs"], run["seed"]): run for run in runs}
    assert set(at) == {(way, epochs, seed) for way in ("SVD", "MESSI, k = 3") for epochs in (1, 2) for seed in (0, 1)}
    for seed in (0, 1):
        one, two = (at["MESSI, k = 3", epochs, seed] for epochs in (1, 2))
        assert one["compressed"] == two["compressed"], "the same table"
        assert one["error"] < at["SVD", 1, seed]["error"], "its rows lie near three flats"
        assert min(one["tuned"], two["tuned"]) > 0.5
    assert "not run" not in page
    assert "MESSI, k = 3, 1 epoch better than SVD, 2 epochs" in page
    with pytest.raises(KflatsError, match="--epochs 2 compares nothing"):
        messi_epochs.main(["--quick", "--epochs", "2"])
    with pytest.raises(KflatsError, match="--k 1 is not supported"):
        messi_epochs.main(["--quick", "--k", "1"])


@pytest.mark.slow
def test_fwsvd_tasks(places: Path) -> None:
    page, runs = quick(fwsvd_tasks.main, places, "fwsvd_tasks", "--seeds", "0")
    at = {run["method"]: run for run in runs}
    ways = ("SVD", "FWSVD", "kflats")
    default = "kflats, default"
    assert set(at) == {"no compression", default, *ways, *(f"{way}, generic first" for way in ways)}
    assert at["no compression"]["compressed"] == at["no compression"]["original"] > 0.6
    assert at[default]["more"]["parameters"] <= at["SVD"]["more"]["parameters"]
    for way in ways:
        assert at[way]["more"]["parameters"] <= at["SVD"]["more"]["parameters"]
        assert at[way]["tuned"] > 0.6
        assert at[f"{way}, generic first"]["compressed"] is None
        assert at[f"{way}, generic first"]["tuned"] > 0.6
    assert "not run" not in page
    (places / "results" / "fwsvd_tasks.md").unlink()  # the page of the first command, which another may not replace
    words = ("--seeds", "0", "--before", "10,60", "--epochs", "0")
    page, more = quick(fwsvd_tasks.main, places, "fwsvd_tasks", *words)
    assert more[: len(runs)] == runs
    assert {run["size"] for run in more[len(runs) :]} == {"10% ranks", "60% ranks"}
    assert "60 % of ranks" in page
    assert "33 % of ranks" in page, "one log serves the tables and figure 5"


@pytest.mark.slow
def test_fwsvd_tasks_of_a_model_that_shares_its_layers(places: Path) -> None:
    words = ("--seeds", "0", "--source", "shared", "--paths", "task")
    page, runs = quick(fwsvd_tasks.main, places / "shared", "fwsvd_tasks", *words, page="fwsvd_tasks_tiny-shared")
    at = {run["method"]: run for run in runs}
    assert set(at) == {"no compression", "SVD", "FWSVD", "kflats", "kflats, default"}
    assert {run["model"] for run in runs} == {"tiny-shared"}
    assert at["SVD"]["more"]["before"] == 4 * 32 * 32 + 2 * 32 * 64, "one block's layers, however often it is used"
    for way in ("SVD", "FWSVD", "kflats", "kflats, default"):
        assert at[way]["more"]["parameters"] <= at["SVD"]["more"]["parameters"] < at[way]["more"]["before"]
    assert "tiny-shared" in page
    assert "(fwsvd_tasks.jsonl)" in page


def test_a_shared_block_that_is_used_once_is_the_block_of_the_original(tmp_path: Path) -> None:
    import transformers
    from _quick import tokenizer
    from _shared_layers import write_shared

    sizes = {"vocab_size": 605, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=1)).eval()
    bert.save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    write_shared(tmp_path / "bert", tmp_path / "shared")
    shared = transformers.AlbertModel.from_pretrained(tmp_path / "shared").eval()
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        for one, other in zip(bert(ids)[:2], shared(ids)[:2], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_fwsvd_groups(places: Path) -> None:
    page, runs = quick(fwsvd_groups.main, places, "fwsvd_groups", "--seeds", "0")
    at = {(run["method"], run["size"]): run for run in runs}
    assert len(at) == len(runs) == 20
    for method in ("SVD", "FWSVD"):
        errors = [at[method, f"group {g}"]["error"] for g in range(1, 11)]
        assert sum(errors) == pytest.approx(1.0, rel=1e-3), "the groups together are the whole matrix"
        values = [at[method, f"group {g}"]["more"]["singular_value"] for g in range(1, 11)]
        assert values == sorted(values, reverse=True)
    svd = [at["SVD", f"group {g}"]["error"] for g in range(1, 11)]
    assert svd == sorted(svd, reverse=True)
    assert "not run" not in page


@pytest.mark.slow
def test_messi_lenet(places: Path) -> None:
    page, runs = quick(messi_lenet.main, places, "messi_lenet")
    names = {"SVD", "MESSI, k = 2", "k-means, k = 2", "kflats"}
    assert {(run["method"], run["seed"]) for run in runs} == {(name, seed) for name in names for seed in (0, 1)}
    for run in runs:
        assert run["nbytes"] <= 0.1 * 4 * (784 * 300 + 300 * 100) + 1
        assert 0.89 < run["more"]["network_saved"] < 0.92
        assert run["original"] > 0.95
        if run["method"] == "kflats":
            assert run["compressed"] > 0.9, "it measures what the outputs mind"
        else:
            assert run["compressed"] < run["tuned"], "training again helps what has lost most"
    assert "not run" not in page
    assert quick(messi_lenet.main, places, "messi_lenet") == (page, runs)


@pytest.mark.slow
def test_messi_search(places: Path) -> None:
    page, runs = quick(messi_search.main, places / "search", "messi_search", "--seeds", "0")
    at = {run["method"]: run for run in runs}
    assert set(at) == {"SVD", *messi_search.METHODS.values()}
    for method in messi_search.METHODS.values():
        run = at[method]
        tried = {int(k): score for k, score in run["more"]["tried"].items()}
        assert set(tried) <= {1, 2, 3, 4}
        assert tried[run["more"]["k"]] == max(tried.values())
        assert run["nbytes"] <= 0.4 * run["more"]["bytes_before"]
    before = at[messi_search.METHODS["before"]]
    assert before["held_out"]["compressed"] == before["more"]["tried"][str(before["more"]["k"])], "found and made again"
    assert "not run" not in page
    again = places / "search again"
    shutil.copytree(places / "search", again)
    (again / "results" / "messi_search.jsonl").rename(again / "results" / "messi_tasks.jsonl")
    same, fewer = quick(messi_search.main, again, "messi_search", "--seeds", "0", "--choose", "before")
    assert {run["method"] for run in fewer} == {messi_search.METHODS["before"]}, "SVD is in the other log"
    assert "not run" not in same


@pytest.mark.slow
def test_robust_scores(places: Path) -> None:
    page, runs = quick(robust_scores.main, places, "robust_scores")
    names = {"SVD", "ellipsoid 1", "magnitude bitmap", "SVD + zipf"}
    places_run = {(run["task"], run["method"], run["seed"]) for run in runs}
    assert places_run == {(task, name, seed) for task in ("sst2", "wnli") for name in names for seed in (0, 1)}
    at = {(run["task"], run["method"], run["seed"]): run for run in runs}
    for task in ("sst2", "wnli"):
        svd, ellipsoid, weighed = (at[task, name, 0] for name in ("SVD", "ellipsoid 1", "SVD + zipf"))
        assert svd["error"] <= min(ellipsoid["error"], weighed["error"]), "no other rank has fewer squares"
        assert max(run["nbytes"] for run in runs) <= 0.59 * 4 * 605 * 32
    assert "not run" not in page
    assert "wnli, which is in no average" in page
    assert "mean" not in page.split("## What holds")[1], "one task has no mean, and WNLI is not counted"


@pytest.mark.slow
def test_messi_vgg(places: Path) -> None:
    page, runs = quick(messi_vgg.main, places, "messi_vgg")
    names = {"SVD", "MESSI, k = 2", "k-means, k = 2", "kflats"}
    assert {(run["method"], run["seed"]) for run in runs} == {(name, seed) for name in names for seed in (0, 1)}
    for run in runs:
        assert run["nbytes"] <= 0.1 * 4 * 2 * 512 * 512 + 1
        assert run["original"] > 0.15, "the network has begun to learn"
        assert run["tuned"] > run["original"], "the linear layers go on learning"
    assert "not run" not in page
    assert len(list((places / "models").glob("vgg19-*.safetensors"))) == 2, "a network for each seed"
    assert quick(messi_vgg.main, places, "messi_vgg") == (page, runs)


@pytest.mark.slow
def test_messi_same_size(places: Path) -> None:
    page, runs = quick(messi_same_size.main, places, "messi_same_size", "--seeds", "0")
    flats, noise = runs
    assert (flats["method"], noise["method"]) == ("MESSI, k = 2, j = 15", "noise of the same error")
    assert flats["error"] == pytest.approx(noise["error"], rel=1e-3)
    assert 0 < flats["error"] < 0.05, "one dimension of sixteen is left out"
    assert flats["more"]["share"] == pytest.approx((605 * 15 + 2 * 15 * 16 + 605 / 4) / (605 * 16))
    assert abs(flats["compressed"] - flats["original"]) < 0.1
    assert flats["original"] == noise["original"] > 0.6
    assert "of its bytes" in page
    assert "![Gains by task](messi_same_size.png)" in page
    assert (places / "results" / "messi_same_size.png").is_file()


@pytest.mark.slow
def test_small_networks_are_trained_and_read_again(
    places: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import vision

    folder = places / "small"
    words = ("--networks", "lenet", "--lenet-epochs", "1", "--limit", "2000")
    train_small.main(["--out", str(folder), "--task-data", str(data_folder), *words])
    assert "2,000 training images" in capsys.readouterr().out
    monkeypatch.setenv("KFLATS_WEIGHTS", str(folder))
    assert sum(p.numel() for p in vision.network("lenet").parameters()) == 266_610


@pytest.mark.slow
def test_a_residual_network_learns_what_it_is_shown() -> None:
    gen = torch.Generator().manual_seed(0)
    classes = torch.arange(64) % 2
    images = torch.randn(64, 3, 32, 32, generator=gen) + 2.0 * classes[:, None, None, None]
    model = ResNet20()
    train_(model, Images(images, classes), 4, seed=0, lr=3e-3, batch=16, augmented=True)
    assert accuracy(model, images, classes) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Roberta", "DistilBert", "Albert", "XLNet", "Electra"])
def test_other_models_go_end_to_end(kind: str, places: Path) -> None:
    import transformers
    from _quick import tokenizer

    sizes: dict[str, Any] = {"vocab_size": 605, "pad_token_id": 0}
    if kind == "DistilBert":
        sizes |= {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}
    elif kind == "XLNet":
        sizes |= {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes |= {"embedding_size": 32} if kind in ("Albert", "Electra") else {}
    folder = places / kind
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    _, runs = quick(
        messi_tasks.main,
        places / f"{kind}-places",
        "messi_tasks",
        *("--tasks", "sst2", "--rates", "60", "--seeds", "0", "--source", str(folder), "--original-epochs", "1"),
        page=f"messi_tasks_{kind}",
    )
    assert {run["method"] for run in runs} == {"SVD", "MESSI, k = 3", "kflats"}
    assert {run["model"] for run in runs} == {kind}


@pytest.mark.slow
def test_all_runs_ends_in_time_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--only", "messi_same_size.py,messi_vgg.py"]
    words += ["--results", str(tmp_path / "results"), "--models", str(tmp_path / "models")]
    assert all_runs.main([*words, "--minutes", "0"]) == 0
    assert capfd.readouterr().out.count("the time is over") == 1
    pages = [tmp_path / "results" / f"{name}.md" for name in ("messi_same_size", "messi_vgg")]
    assert all("not run" in page.read_text(encoding="utf-8") for page in pages)
    assert all_runs.main([*words, "--minutes", "30", "--jobs", "2"]) == 0
    assert "the time is over" not in capfd.readouterr().out
    assert all(page.with_suffix(".jsonl").is_file() for page in pages)
    assert "not run" not in pages[1].read_text(encoding="utf-8")


def test_no_two_processes_train_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share runs once; those of one task and seed never at a time."""
    todo = [share for command in all_runs.COMMANDS[:2] for share in all_runs.shares(command)]
    running, seen, lock = set[str](), list[tuple[str, ...]](), threading.Lock()

    def finished(command: list[str], variables: object, seconds: float) -> int:
        place = command.index("--tasks")
        trains = f"{command[place + 1]} {command[place + 3]}"
        with lock:
            assert trains not in running
            running.add(trains)
            seen.append(tuple(command))
        time.sleep(0.002)
        with lock:
            running.remove(trains)
        return int(command[place + 3] == "0")

    monkeypatch.setattr(all_runs, "finished", finished)
    runner = all_runs.Runner([], {}, 5, 60)
    runner.run(todo)
    assert len(set(seen)) == len(seen) == len(todo) == 24
    assert runner.failed == 8
    assert not runner.is_over


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_share_that_cannot_begin_is_counted_and_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(command: list[str], variables: object, seconds: float) -> int:
        if not started:
            started.append(command)
            raise OSError("no process can be made")
        started.append(command)
        return 0

    started: list[list[str]] = []
    monkeypatch.setattr(all_runs, "finished", finished)
    runner = all_runs.Runner([], {}, 2, 60)
    runner.run([all_runs.Share((str(number),), "one model") for number in range(3)])
    assert (len(started), runner.failed) == (3, 1)


def test_all_runs_names_every_logged_experiment() -> None:
    logged = {path.name for path in all_runs.HERE.glob("[!_]*.py") if "conduct(" in path.read_text(encoding="utf-8")}
    assert logged <= {command[0] for command in all_runs.COMMANDS} == {command[0] for command in all_runs.QUICK}
