"""Tasks a model is fine-tuned for and judged by: what their labels mean, how they are scored, which head they need.

A task is a frozen value. Its data come separately (``kflats.task_data``), so that one task can be read from a folder
or from the hub. The main metric of each is the one that FWSVD (Hsu et al., ICLR 2022, section 4.1) reports.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch import nn

from kflats.common.errors import KflatsError

_HEADS = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
}
_WANTED = {
    "classification": ("sequence",),
    "regression": ("sequence",),
    "token": ("token",),
    "language": ("causal", "masked"),
    "similarity": ("", "sequence", "token", "masked"),
}


@dataclass(frozen=True)
class Hub:
    """Where ``datasets`` finds a task: repository, configuration, revision, and its names of columns."""

    repository: str
    configuration: str | None
    columns: tuple[str, ...]
    label: str = "label"
    revision: str | None = None


@dataclass(frozen=True)
class Task:
    """What is asked of a model.

    Args:
        name: how it is called.
        kind: "classification" or "regression" of a text or a pair, "token" (a label a word), "language"
            (predict the text itself), or "similarity" (cosine of two texts' vectors; no head).
        metrics: how it is scored (``kflats.metrics``); the first is the one reported and trained for.
        labels: names of the classes, in the order of their numbers; empty where there are none.
        pairs: True for two texts an example.
        folder: its folder among others of its form.
        hub: where the hub has it.
        limits: the smallest and largest label of a regression.

    >>> find_task("cola").metrics
    ('matthews',)
    """

    name: str
    kind: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    pairs: bool = True
    folder: str = ""
    hub: Hub | None = None
    limits: tuple[float, float] | None = None

    @property
    def higher_is_better(self) -> bool:
        """False for perplexity."""
        return self.metrics[0] != "perplexity"


def _glue(name: str, *columns: str) -> Hub:
    return Hub("nyu-mll/glue", name, columns)


_NLI = ("entailment", "not_entailment")
_TAGS = ("O", *(f"{mark}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for mark in "BI"))
_PAIR = ("sentence1", "sentence2")
_SCALE = (0.0, 5.0)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cola",
            "classification",
            ("matthews",),
            ("unacceptable", "acceptable"),
            False,
            "cola",
            _glue("cola", "sentence"),
        ),
        Task(
            "sst2", "classification", ("accuracy",), ("negative", "positive"), False, "sst2", _glue("sst2", "sentence")
        ),
        Task(
            "mrpc",
            "classification",
            ("f1", "accuracy"),
            ("not_equivalent", "equivalent"),
            True,
            "mrpc",
            _glue("mrpc", *_PAIR),
        ),
        Task(
            "qqp",
            "classification",
            ("f1", "accuracy"),
            ("not_duplicate", "duplicate"),
            True,
            "qqp",
            _glue("qqp", "question1", "question2"),
        ),
        Task(
            "mnli",
            "classification",
            ("accuracy",),
            ("entailment", "neutral", "contradiction"),
            True,
            "mnli",
            _glue("mnli", "premise", "hypothesis"),
        ),
        Task("qnli", "classification", ("accuracy",), _NLI, True, "qnli", _glue("qnli", "question", "sentence")),
        Task("rte", "classification", ("accuracy",), _NLI, True, "rte", _glue("rte", *_PAIR)),
        Task("wnli", "classification", ("accuracy",), _NLI[::-1], True, "wnli", _glue("wnli", *_PAIR)),
        Task(
            "stsb",
            "regression",
            ("pearson_spearman", "pearson", "spearman"),
            (),
            True,
            "stsb",
            _glue("stsb", *_PAIR),
            _SCALE,
        ),
        Task("sts", "similarity", ("spearman", "pearson"), (), True, "stsb", _glue("stsb", *_PAIR), _SCALE),
        Task(
            "conll2003",
            "token",
            ("entity_f1",),
            _TAGS,
            False,
            "conll2003",
            Hub("eriktks/conll2003", None, ("tokens",), "ner_tags", "refs/convert/parquet"),
        ),
        Task(
            "wikitext2",
            "language",
            ("perplexity",),
            (),
            False,
            "wikitext2",
            Hub("Salesforce/wikitext", "wikitext-2-v1", ("text",)),
        ),
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
    raise KflatsError(
        f"there is no task {str(name)[:40]!r}", hint=f"{known}; or a kflats.tasks.task.Task", command=known
    )


def head_of(model: nn.Module | None) -> str:
    """What a transformers model predicts: "sequence", "token", "causal", "masked", or "" without such a head.

    By the name of its class or of one it inherits from, as transformers itself does.
    """
    for kind in type(model).__mro__:
        for ending, head in _HEADS.items():
            if kind.__name__.endswith(ending):
                return head
    return ""


def check_head(model: nn.Module, task: Task) -> tuple[int, ...]:
    """Where the model keeps each of the task's labels: ``order[label of the task] = output of the model``.

    Models of the hub number their labels as they like; their names (``config.id2label``) say which is which.
    Names that transformers made up ("LABEL_0") stand for the task's own order.

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
            cause="a model that was fine-tuned for another task",
            hint=f"from_pretrained(..., num_labels={expected}) and fine-tune it, or another task",
            command="a model that was fine-tuned for this task, or another task",
        )
    if not task.labels:
        return (0,)
    given = getattr(model.config, "id2label", None) or {}
    names = [_plain(str(given.get(i, f"LABEL_{i}"))) for i in range(outputs)]
    if all(name == f"label{i}" for i, name in enumerate(names)):
        return tuple(range(expected))
    own = [_plain(name) for name in task.labels]
    if sorted(own) != sorted(names):
        raise KflatsError(
            f"the labels of the model, {names[:9]}, are not those of the task {task.name!r}, {list(task.labels)}",
            cause="a model of another task, or one with names of its own",
            hint="if only the names differ, set model.config.id2label to the task's",
        )
    return tuple(names.index(name) for name in own)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
