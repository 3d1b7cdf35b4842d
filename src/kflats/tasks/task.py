"""Tasks for fine-tuning and evaluation: the meaning of their labels, their metrics, and the head that each needs.

A task is a frozen value. ``kflats.tasks.batches`` reads its examples, from a folder or from the hub. The main metric of
each task is the one that FWSVD (Hsu et al., ICLR 2022, section 4.1) reports.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kflats.common.errors import KflatsError, check_arguments

if TYPE_CHECKING:
    from torch import nn

_HEADS = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
}
TaskKind: TypeAlias = Literal["classification", "regression", "token", "language", "similarity"]
_WANTED: dict[TaskKind, tuple[str, ...]] = {
    "classification": ("sequence",),
    "regression": ("sequence",),
    "token": ("token",),
    "language": ("causal",),
    "similarity": ("", "sequence", "token", "masked"),
}


@dataclass(frozen=True)
class Hub:
    """The place of a task on the hub: repository, configuration, revision, and the names of its columns."""

    repository: str
    configuration: str | None
    columns: tuple[str, ...]
    label: str = "label"
    revision: str | None = None


@dataclass(frozen=True)
class Task:
    """A task with labels.

    Args:
        name: the name of the task.
        kind: "classification" or "regression" of a text or a pair, "token" (one label for each word), "language"
            (predict the text itself), or "similarity" (cosine of two texts' vectors; no head).
        metrics: names in ``kflats.tasks.scoring``; the first metric is reported, and decides which epoch is kept.
        labels: names of the classes, in the order of their numbers; empty without classes.
        pairs: True if an example has two texts.
        folder: name of the task's folder inside a folder of several tasks.
        hub: the task's place on the hub.
        limits: the smallest and largest label of a regression.

    Raises:
        KflatsError: an unknown kind, or no metric.

    >>> find_task("cola").metrics
    ('matthews',)
    """

    name: str
    kind: TaskKind
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    pairs: bool = True
    folder: str = ""
    hub: Hub | None = None
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_arguments(
            self,
            kind=(self.kind in get_args(TaskKind), f"one of: {', '.join(get_args(TaskKind))}"),
            metrics=(isinstance(self.metrics, tuple) and bool(self.metrics), 'names such as ("accuracy",)'),
        )

    @property
    def higher_is_better(self) -> bool:
        """False for perplexity."""
        return self.metrics[0] != "perplexity"


def _glue(
    name: str, metrics: tuple[str, ...], labels: tuple[str, ...], *columns: str, kind: TaskKind = "classification"
) -> Task:
    limits = None if labels else (0.0, 5.0)
    return Task(name, kind, metrics, labels, len(columns) == 2, name, Hub("nyu-mll/glue", name, columns), limits)


_NLI = ("entailment", "not_entailment")
_TAGS = ("O", *(f"{mark}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for mark in "BI"))
_CONLL = Hub("eriktks/conll2003", None, ("tokens",), "ner_tags", "refs/convert/parquet")
_WIKITEXT = Hub("Salesforce/wikitext", "wikitext-2-v1", ("text",))
_PAIR = ("sentence1", "sentence2")
_STSB = _glue("stsb", ("pearson_spearman", "pearson", "spearman"), (), *_PAIR, kind="regression")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", ("matthews",), ("unacceptable", "acceptable"), "sentence"),
        _glue("sst2", ("accuracy",), ("negative", "positive"), "sentence"),
        _glue("mrpc", ("f1", "accuracy"), ("not_equivalent", "equivalent"), *_PAIR),
        _glue("qqp", ("f1", "accuracy"), ("not_duplicate", "duplicate"), "question1", "question2"),
        _glue("mnli", ("accuracy",), ("entailment", "neutral", "contradiction"), "premise", "hypothesis"),
        _glue("qnli", ("accuracy",), _NLI, "question", "sentence"),
        _glue("rte", ("accuracy",), _NLI, *_PAIR),
        _glue("wnli", ("accuracy",), _NLI[::-1], *_PAIR),
        _STSB,
        replace(_STSB, name="sts", kind="similarity", metrics=("spearman", "pearson")),
        Task("conll2003", "token", ("entity_f1",), _TAGS, False, "conll2003", _CONLL),
        Task("wikitext2", "language", ("perplexity",), (), False, "wikitext2", _WIKITEXT),
    )
}
"""Every task by name: GLUE, STS-B by cosine ("sts"), CoNLL-2003 named entities, WikiText-2 perplexity."""


def find_task(name: str | Task) -> Task:
    """The task called ``name``; a ``Task`` is returned as it is, so that own tasks go wherever names do.

    Raises:
        KflatsError: no such task (near names are listed).

    >>> find_task("stsb").kind
    'regression'
    """
    if isinstance(name, Task):
        return name
    if isinstance(name, str) and name.lower().replace("-", "") in TASKS:
        return TASKS[name.lower().replace("-", "")]
    near = difflib.get_close_matches(str(name), TASKS, n=3, cutoff=0.5) or list(TASKS)
    known = f"one of: {', '.join(near)}"
    raise KflatsError(f"there is no task {str(name)[:40]!r}", hint=known)


def head_of(model: nn.Module | None) -> str:
    """The task head of a transformers model: "sequence", "token", "causal", "masked", or "" without one of these.

    The name of the model's class, or of a class that it inherits from, decides, as in transformers itself.
    """
    for kind in type(model).__mro__:
        for ending, head in _HEADS.items():
            if kind.__name__.endswith(ending):
                return head
    return ""


def check_head(model: nn.Module, task: Task) -> tuple[int, ...]:
    """The output of the model for each of the task's labels: ``order[label of the task] = output of the model``.

    Models of the hub number their labels in different orders; the names (``config.id2label``) identify them. The
    default names of transformers ("LABEL_0") stand for the task's own order.

    Raises:
        KflatsError: a head for something else, another number of labels, or labels with other names.
    """
    head, wanted = head_of(model), _WANTED[task.kind]
    if head not in wanted:
        needed = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification", "causal": "ForCausalLM"}
        raise KflatsError(
            f"the task {task.name!r} does not fit {type(model).__name__}",
            cause=f"a {task.kind} task needs a model {needed.get(wanted[0], 'of sentences')}"
            + (", and this one has no task head" if not head else ""),
            hint="another task, or a model that was fine-tuned for this one",
        )
    if task.kind in ("language", "similarity"):
        return ()
    outputs = int(getattr(model.config, "num_labels", 0))
    expected = len(task.labels) or 1
    if outputs != expected:
        raise KflatsError(
            f"the task {task.name!r} has {expected} labels, the head of {type(model).__name__} has {outputs}",
            hint="a model that was fine-tuned for this task, or another task",
        )
    if not task.labels:
        return (0,)
    id2label = getattr(model.config, "id2label", None) or {}
    names = [_plain(str(id2label.get(i, f"LABEL_{i}"))) for i in range(outputs)]
    if all(name == f"label{i}" for i, name in enumerate(names)):
        return tuple(range(expected))
    own = [_plain(name) for name in task.labels]
    if sorted(own) != sorted(names):
        raise KflatsError(
            f"the labels of the model, {names[:9]}, are not those of the task {task.name!r}, {list(task.labels)}",
            hint="if only the names differ, set model.config.id2label to the task's",
        )
    return tuple(names.index(name) for name in own)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
