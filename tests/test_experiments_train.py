"""The fine-tuned models of the experiments: trained once, then read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def train(repository: Path) -> Any:
    path = repository / "experiments" / "_train.py"
    spec = importlib.util.spec_from_file_location("_train_of_experiments", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_model_is_trained_once_and_then_read(train: Any, minilm: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = "".join(f"This is sentence number {i}.\tIt says {i}.\t{i % 2}\n" for i in range(40))
    (tmp_path / "data" / "train.tsv").write_text("sentence1\tsentence2\tlabel\n" + rows)
    settings = {"data": tmp_path / "data", "epochs": 1, "batch": 8, "limit": 16, "quiet": True}
    first = train.fine_tuned("mrpc", tmp_path / "cache", **settings)
    assert not first.cached
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.folder.name]
    assert not torch.equal(first.model.bert.pooler.dense.weight, train.with_head("mrpc").bert.pooler.dense.weight)
    assert first.model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    again = train.fine_tuned("mrpc", tmp_path / "cache", **settings)
    assert again.cached
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_task_without_a_short_training_is_refused(train: Any) -> None:
    from argparse import Namespace

    from kflats.common.errors import KflatsError

    with pytest.raises(KflatsError, match="no short training is known for the task 'qnli'"):
        train.task_model("qnli", Namespace(full=False))


def test_heads_fit_their_tasks_and_follow_the_seed(train: Any, minilm: Path) -> None:
    assert train.with_head("conll2003").classifier.out_features == 9
    assert train.with_head("stsb").classifier.out_features == 1
    one, same, other = (train.with_head("cola", seed).classifier.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
