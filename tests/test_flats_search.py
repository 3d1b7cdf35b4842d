"""The number of flats by the score of a task: the search itself, on a model, in a folder and on the command line."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import holds
from torch import Tensor, nn
from typer.testing import CliRunner

import kflats
from kflats import MESSI, SVD, Flats, KMeansSVD
from kflats.cli.app import app
from kflats.common.errors import KflatsError, NotWrittenError
from kflats.compress.flats_search import by_halving, search_flats
from kflats.methods import Method
from kflats.methods.flats import COUNTS
from kflats.report.report import Report


@pytest.mark.parametrize("peak", COUNTS)
def test_the_peak_is_found_wherever_it_is(peak: int) -> None:
    asked: list[int] = []

    def score(k: int) -> float:
        asked.append(k)
        return -abs(math.log(k / peak))

    found = by_halving(COUNTS, score)
    assert max(found, key=lambda k: found[k]) == peak
    assert len(asked) == len(found) <= 2 * math.log2(len(COUNTS)), "each number is tried once, and not all of them"


@pytest.fixture
def model() -> nn.Module:
    """A table whose rows lie near three planes."""
    gen = torch.Generator().manual_seed(0)
    bases = torch.randn(3, 2, 12, generator=gen)
    rows = torch.einsum("nr,nrd->nd", torch.randn(240, 2, generator=gen), bases[torch.arange(240) % 3])
    table = nn.Embedding.from_pretrained(rows + 0.01 * torch.randn(240, 12, generator=gen))
    return nn.ModuleDict({"words": table})


def nearness(table: Tensor) -> Callable[[nn.Module], float]:
    """A score: minus the squared error of the table."""
    ids = torch.arange(len(table))
    return lambda small: -float((small.get_submodule("words")(ids) - table).square().sum())


WAY: dict[str, Any] = {"weights": ["words"], "keep": "25%", "quiet": True}


def test_the_best_of_all_that_were_tried_is_chosen_and_can_be_made_again(model: nn.Module) -> None:
    table = model.get_parameter("words.weight").detach().clone()
    score = nearness(table)
    found = search_flats(model, MESSI(k=None, restarts=3), score, **WAY)
    assert found.scores[found.k] == max(found.scores.values())
    one = search_flats(model, MESSI(k=None), score, counts=(1,), **WAY).scores[1]
    assert found.scores[found.k] > 0.01 * one > one, "rows near three planes are far from one flat"
    assert torch.equal(model.get_parameter("words.weight"), table), "the model is as it was"
    kflats.compress_(model, {"words": found.recipe}, keep="25%", quiet=True)
    assert score(model) == pytest.approx(found.scores[found.k], rel=1e-5)
    assert list(found.scores) == sorted(found.scores)


def test_of_equal_scores_the_fewest_flats_win(model: nn.Module) -> None:
    assert search_flats(model, Flats(k=None), lambda small: 1.0, counts=(2, 3, 4), **WAY).k == 2


def test_a_full_disk_is_no_number_of_flats_that_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NotWrittenError("the disk is full")

    monkeypatch.setattr("kflats.compress.flats_search.factorize", full)
    with pytest.raises(NotWrittenError, match="the disk is full"):
        search_flats(model, MESSI(k=None, restarts=1), lambda _: 0.0, keep="50%", quiet=True)


def test_numbers_for_which_the_bytes_are_too_few_are_passed_over(model: nn.Module) -> None:
    found = search_flats(model, MESSI(k=None, restarts=1), lambda small: 1.0, counts=(2, 200), **WAY)
    assert found.scores == {2: 1.0}
    with pytest.raises(KflatsError):
        search_flats(model, MESSI(k=None, restarts=1), lambda small: 1.0, counts=(200, 230), **WAY)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_scores_are_finite(score: float, model: nn.Module) -> None:
    with pytest.raises(KflatsError, match=f"the score of the model of . flats is {score}"):
        search_flats(model, Flats(k=None), lambda small: score, counts=(2, 3), **WAY)


@pytest.mark.parametrize("method", [Flats(k=3), KMeansSVD(k=3), SVD()])
def test_only_a_number_that_is_not_given_is_searched(method: Method, model: nn.Module) -> None:
    with pytest.raises(KflatsError, match=r"(?s)a search for the number of flats is not supported.*left to a search"):
        search_flats(model, method, lambda small: 1.0, **WAY)


@pytest.mark.parametrize("counts", [(), (0, 1), (3, 2), (2, 2)])
def test_counts_rise(counts: tuple[int, ...], model: nn.Module) -> None:
    with pytest.raises(KflatsError, match="rising whole numbers"):
        search_flats(model, Flats(k=None), lambda small: 1.0, counts=counts, **WAY)


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A tiny classifier, and examples of a task for it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32, num_labels=2)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = [f"word{i} of word{3 * i % 283}\t\t{i % 2}" for i in range(40)]
    for split in ("train", "apart"):
        text = "\n".join(["sentence1\tsentence2\tlabel", *lines])
        (tmp_path / "data" / f"{split}.tsv").write_text(text + "\n", encoding="utf-8")
    return tmp_path


def test_a_folder_gets_the_number_whose_model_scores_best(folder: Path) -> None:
    given: dict[str, Any] = {"keep": "50%", "method": MESSI(k=None, restarts=1), "quiet": True}

    def tried(sign: int) -> Callable[[nn.Module, Any], float]:
        """Each model is better (or worse) than the one that was tried before."""
        calls: list[Any] = []

        def score(small: nn.Module, tokenizer: Any) -> float:
            calls.append(tokenizer("word1 of word2"))
            return sign * len(calls)

        return score

    for sign, k in ((1, 15), (-1, 4)):
        report = kflats.compress_folder(folder / "model", folder / f"k{k}", score=tried(sign), **given)
        assert f"k={k}," in report.weights[0].recipe
    for other, said in (({"quality": 0.9}, "with a quality"), ({"keep": "50%", "method": SVD()}, "left to a search")):
        asked = {"method": MESSI(k=None), "quiet": True} | other
        with pytest.raises(KflatsError, match=said):
            kflats.compress_folder(folder / "model", folder / "none", score=tried(1), **asked)


def test_the_command_searches_by_a_task(folder: Path) -> None:
    words = ["compress", str(folder / "model"), "--out", str(folder / "small"), "--keep", "50%", "--no-proof"]
    words += ["--method", "messi", "--importance", "uniform", "--restarts", "1"]
    task = ["--task", "sst2", "--task-data", str(folder / "data")]
    searched = ["--flats", "search", "--search", "task"]

    def said(*more: str) -> str:
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.replace("│", " ").split())

    assert "--search task cannot be used without --flats search" in said(*task, "--flats", "3", "--search", "task")
    assert "--search task cannot be used without --task" in said(*searched)
    assert "--search-split cannot be used with --search error" in said(*task, "--search-split", "apart")
    assert "no split 'other'" in said(*searched, *task, "--search-split", "other")
    done = CliRunner().invoke(app, [*words, *searched, *task, "--search-split", "apart"])
    assert done.exit_code == 0, done.output
    assert "score 0." in done.stderr
    assert "k=None" not in Report.load(folder / "small").weights[0].recipe


@pytest.mark.slow
def test_several_workers_choose_the_number_that_one_chooses(folder: Path) -> None:
    """One of them scores each model for all."""
    made = []
    for count in ("1", "2"):
        words = [sys.executable, "-m", "kflats", "compress", str(folder / "model"), "--out", str(folder / count)]
        words += ["--keep", "50%", "--no-proof", "--method", "flats", "--flats", "search", "--search", "task"]
        words += ["--task", "sst2", "--task-data", str(folder / "data"), "--workers", count]
        done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.append((Report.load(folder / count).weights[0].recipe, holds(folder / count)))
    assert made[0] == made[1]
