"""Judging many versions of one model: the original is asked once, and every version each sentence once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kflats.evaluate.comparing import Fidelity, fidelity_of
from kflats.evaluate.encoding import encode, rare_words
from kflats.tasks.data import Examples, load_examples
from kflats.tasks.metrics import measure
from kflats.tasks.scoring import score
from kflats.tasks.task import check_head, find_task

_RARE = 500


@dataclass(frozen=True)
class Verdict:
    """How near a version's vectors are to the original's, and its score on the task, None without one."""

    fidelity: Fidelity
    score: float | None


class Judge:
    """Fidelity to ``original`` on ``texts`` and on rare words, and a task's score.

    Args:
        counted: rare words are those that neither these nor ``texts`` show.
        task: a name; its ``split`` lies in ``data``, or on the hub. A similarity task needs no head, and shares its
            sentences' vectors with the fidelity: texts are cut where ``encode`` cuts them.

    Raises:
        KflatsError: no texts, an unknown task, a model without the task's head.
    """

    def __init__(
        self,
        original: nn.Module,
        tokenizer: Any,
        texts: Sequence[str],
        counted: Sequence[str] = (),
        *,
        task: str | None = None,
        data: str | os.PathLike[str] | None = None,
        split: str = "dev",
        batch: int = 32,
    ) -> None:
        self.tokenizer, self.batch = tokenizer, batch
        self.task = None if task is None else find_task(task)
        self._data, self._split = data, split
        self._examples: Examples | None = None
        pairs: list[str] = []
        if self.task is not None:
            check_head(original, self.task)
            if self.task.kind == "similarity":
                self._examples = load_examples(self.task, split, data)
                pairs = [text for example in self._examples.inputs for text in example]
        rare = rare_words(tokenizer, [*texts, *counted], _RARE)
        self._sentences = list(dict.fromkeys([*texts, *rare, *pairs]))
        place = {text: i for i, text in enumerate(self._sentences)}
        self._texts, self._rare, self._pairs = ([place[text] for text in part] for part in (texts, rare, pairs))
        self._vectors = self._encode(original, tokenizer)
        self.original = self._judge(original, tokenizer, self._vectors)

    @property
    def metric(self) -> str:
        """What the score is; empty without a task."""
        return "" if self.task is None else self.task.metrics[0]

    def __call__(self, model: nn.Module, tokenizer: Any = None) -> Verdict:
        """Judge another version; ``tokenizer``: its own, where its vocabulary is another."""
        own = self.tokenizer if tokenizer is None else tokenizer
        return self._judge(model, own, self._encode(model, own))

    def _encode(self, model: nn.Module, tokenizer: Any) -> Tensor:
        return encode(model, tokenizer, self._sentences, self.batch)

    def _judge(self, model: nn.Module, tokenizer: Any, vectors: Tensor) -> Verdict:
        known = self._vectors
        rare = (known[self._rare], vectors[self._rare]) if self._rare else None
        near = fidelity_of(known[self._texts], vectors[self._texts], rare)
        return Verdict(near, self._score(model, tokenizer, vectors))

    def _score(self, model: nn.Module, tokenizer: Any, vectors: Tensor) -> float | None:
        if self.task is None:
            return None
        if self._examples is not None:
            first, second = vectors[self._pairs[0::2]], vectors[self._pairs[1::2]]
            return measure(self.task.metrics, (first * second).sum(1).tolist(), self._examples.labels)[self.metric]
        asked: dict[str, Any] = {"data": self._data, "split": self._split, "batch": self.batch, "costs": False}
        return score(model, tokenizer, self.task, **asked).value
