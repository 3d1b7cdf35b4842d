"""docs/architectures.md from the log of a sweep: totals, stages, and what did not hold with its reason."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]

_STAGES = {
    "build": "a tiny config, its model, its own folder saved and loaded by transformers",
    "inspect": "`kflats inspect`",
    "tables": "`kflats compress --weights embeddings --keep 50% --method flats`",
    "linear": "`kflats compress --weights linear --keep 50% --method svd`",
    "size": "`kflats compress --size`, the whole model, without data",
    "data": "`compress_folder(size=..., method=SVD())` with texts, or with generated batches",
    "load tables": "a fresh process: same outputs as before saving, same ties",
    "load linear": "the same",
    "load size": "the same",
    "load data": "the same",
    "heads": "out of the head into the base model and back (a base model: into a task's head and out)",
    "train": "one step of SGD: finite, parameters move; saved",
    "saved again": "a fresh process: the trained model's outputs",
}
_COMMANDS = {
    "compare": "`kflats compare` with the original, without the fresh processes that measure memory",
    "dense": "`kflats export --dense` (with `--drop-biases` where compression added some), loaded: the same outputs "
    "where no bias was left out",
    "onnx": "`kflats export --onnx`, checked with onnxruntime",
    "trim": "`kflats trim` of the original, by texts",
    "smallest": "`kflats compress` without a size: the search for the smallest folder that keeps .99; loaded and run",
    "recover": "one epoch of `kflats recover`, towards the original, by texts",
}
_RANKS = ("failed", "refused", "held")


def main(log: str, onto: str | None = None) -> int:
    """Print the page of a log; ``onto``: replace in that page what it says of the model types in the log."""
    from life import model_types
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found, configs = read(Path(log)), len(CONFIG_MAPPING_NAMES)
    if onto is None:
        print("\n".join(page(found, model_types(), configs)))
        return 0
    old = Path(onto).read_text(encoding="utf-8")
    lived = {name for name, records in found.items() if not _ways_of(records) <= {*_COMMANDS, "data"}}
    again = sorted(lived | {*_run_again(old)})
    before = from_page(old)
    known = before | {name: records for name, records in found.items() if name in lived or name not in before}
    known |= {name: [*before[name], *_failures(found[name])] for name in before.keys() & found.keys() - lived}
    commands = _command_lines(found) or _section(old, "Other commands")
    lines = page(known, model_types(), configs, stages=_table(old, "Stages"), again=again, commands=commands)
    Path(onto).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def from_page(text: str) -> dict[str, list[Record]]:
    """Records from which ``page`` writes the same page, less its table of stages, which they do not have."""
    about = {"ways": [], "versions": text.partition("Run with ")[2].partition(".\n")[0]}
    found: dict[str, list[Record]] = defaultdict(list)
    for part in re.findall(r"^.* \(\d+\): (?:.*)\.$", text.partition("## Held")[2], re.M):
        if not part.startswith("Not run"):
            note = "tensors are compared" if part.startswith("With tensors") else ""
            for name in _names(part):
                found[name].append(about | {"type": name, "stage": "build", "outcome": "held", "message": note})
    for title, rank in (("Failed", "failed"), ("Refused", "refused"), ("No tiny model", "unbuildable")):
        for row in _table(text, title)[2:]:
            message, stages, _, names = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
            plain = message.replace("\\|", "|").replace("\\<", "<")
            for name in names.split(", "):
                records = (
                    {"type": name, "stage": stage, "outcome": rank, "message": plain} for stage in stages.split(", ")
                )
                found[name].extend(about | record for record in records)
    return dict(found)


def _ways_of(records: Iterable[Record]) -> set[str]:
    return {way for record in records for way in record["ways"]}


def _failures(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["outcome"] == "failed"]


def _section(text: str, title: str) -> list[str]:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip("\n").splitlines()


def _run_again(text: str) -> list[str]:
    line = re.search(rf"^{_AGAIN} \(\d+\): .*$", text, re.M)
    return _names(line[0]) if line else []


def _names(line: str) -> list[str]:
    return line.partition("): ")[2].removesuffix(".").split(", ")


def _table(text: str, title: str) -> list[str]:
    """The lines of the table below a heading."""
    return [line for line in text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"]


def read(log: Path) -> dict[str, list[Record]]:
    """The records of each model type. A run of some ways of compressing replaces earlier runs of no other ways."""
    runs: dict[str, list[list[Record]]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        of_type = runs.setdefault(record["type"], [])
        if record["stage"] == "build" or not of_type:
            of_type[:] = [one for one in of_type if not set(one[0]["ways"]) <= set(record["ways"])]
            of_type.append([])
        of_type[-1].append(record)
    return {name: [record for one in of_type for record in one] for name, of_type in runs.items()}


def outcome(records: Iterable[Record]) -> str:
    """Of a model type: unbuildable, or the worst of its stages. What another command refuses does not count."""
    seen = {one["outcome"] for one in records if one["stage"] not in _COMMANDS or one["outcome"] == "failed"}
    return "unbuildable" if "unbuildable" in seen else next((rank for rank in _RANKS if rank in seen), "none")


def page(
    found: dict[str, list[Record]],
    types: list[str],
    configs: int,
    *,
    stages: list[str] | None = None,
    again: Iterable[str] = (),
    commands: list[str] | None = None,
) -> list[str]:
    """The lines of the page. ``stages``: its table of stages, from before types were run ``again``. ``commands``: its
    section on other commands, of an earlier run."""
    by = defaultdict(list)
    for name in types:
        by[outcome(found[name]) if name in found else "not run"].append(name)
    built = len(by["held"]) + len(by["refused"]) + len(by["failed"])
    compared = [name for name in by["held"] if "tensors are compared" not in found[name][0]["message"]]
    rest = [name for name in by["held"] if name not in compared]
    versions = "; ".join(sorted({record["versions"] for records in found.values() for record in records}))
    unbuildable, missing = by["unbuildable"], by["not run"]
    shares = {rank: f"{len(by[rank])} | {_share(len(by[rank]), built)} of those built" for rank in _RANKS}
    counts = [
        f"| configs of transformers | {configs} | |",
        f"| with an Auto model | {len(types)} | |",
        *([f"| not run | {len(missing)} | |"] if missing else []),
        f"| no tiny model | {len(unbuildable)} | {_share(len(unbuildable), len(types))} of those with an Auto model |",
        f"| built | {built} | |",
        *(f"| {rank} | {shares[rank]} |" for rank in reversed(_RANKS)),
    ]
    unknown = "With tensors compared, because the sweep knows no inputs that they run on alone"
    return [
        _INTRODUCTION.format(versions=versions),
        "| | model types | |",
        "| --- | ---: | --- |",
        *counts,
        _WORDS,
        *(stages or [*_STAGE_HEAD, *_stage_rows(found, built)]),
        *(["", _AGAIN_WHY, "", f"{_AGAIN} ({len(names)}): {', '.join(names)}."] if (names := list(again)) else []),
        *("", "## Failed", "", *_causes(found, by["failed"], "failed")),
        *("", "## Refused", "", *_causes(found, by["refused"], "refused", ignored=_COMMANDS)),
        *("", "## Other commands", "", *(commands or _command_lines(found) or ["Not run."])),
        *("", "## No tiny model", "", *_causes(found, unbuildable, "unbuildable")),
        *("", "## Held", "", f"With outputs compared ({len(compared)}): {', '.join(compared)}."),
        *("", f"{unknown} ({len(rest)}): {', '.join(rest)}."),
        *(["", f"Not run ({len(missing)}): {', '.join(missing)}."] if missing else []),
    ]


_INTRODUCTION = """# Architectures

Every model type of the installed transformers whose config has an Auto model, as a tiny model with random weights:
inspected, compressed in four ways, saved, loaded in another process, trained for a step, saved again. What a tiny model
proves is that nothing breaks; it says nothing about quality. Of each type the last run in the log counts.

    python tests/sweep/sweep.py run --log sweep.jsonl --resume
    python tests/sweep/sweep.py table sweep.jsonl > docs/architectures.md

Run with {versions}.
"""
_STAGE_HEAD = [
    "| stage | what is done | held | nothing to do | refused | failed | not run |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
]
_AGAIN = "Run again"
_AGAIN_WHY = """These stages count the run of all types. Some types were run again after that, alone; the totals and
the other tables say what came of them:

    python tests/sweep/sweep.py table again.jsonl --onto docs/architectures.md"""
_WORDS = """
*held*: every stage that was run did what it should, or there was nothing to do. *refused*: kflats said that it cannot
do a stage, and why. *failed*: a traceback, other outputs, a lost tie, more than two minutes of processor time, or 4 GB.

## Stages
"""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f} %"


def _stage_rows(found: dict[str, list[Record]], built: int) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for records in found.values():
        if outcome(records) != "unbuildable":
            worst: dict[str, list[Record]] = {}
            for record in records:
                worst.setdefault(record["stage"], []).append(record)
            counts.update((stage, outcome(of_stage)) for stage, of_stage in worst.items())
    rows = []
    for stage, text in _STAGES.items():
        cells = [counts[stage, rank] for rank in ("held", "none", "refused", "failed")]
        # Only what was compressed can be loaded.
        ways = stage.removeprefix("load ")
        all_of_it = built if ways == stage else counts[ways, "held"]
        rows.append(f"| {stage} | {text} | {' | '.join(map(str, cells))} | {max(0, all_of_it - sum(cells))} |")
    cut = sorted({stage for stage, _ in counts} - set(_STAGES))
    return [*rows, *(f"| {stage} | ended early | | | | {counts[stage, 'failed']} | |" for stage in cut)]


def _command_lines(found: dict[str, list[Record]]) -> list[str]:
    """How often each of the other commands held, and why it refused a model; [] where none was run."""
    ran: dict[str, list[Record]] = {
        name: [one for one in records if one["stage"] in _COMMANDS] for name, records in found.items()
    }
    counts = Counter((one["stage"], one["outcome"]) for records in ran.values() for one in records)
    if not counts:
        return []
    ranks = ("held", "refused", "failed")
    rows = [
        f"| {stage} | {text} | {' | '.join(str(counts[stage, rank]) for rank in ranks)} |"
        for stage, text in _COMMANDS.items()
    ]
    tried = [name for name, records in ran.items() if records]
    return [
        _COMMANDS_WHY.format(count=len(tried)),
        "",
        f"| command | what is done | {' | '.join(ranks)} |",
        f"| --- | --- |{' ---: |' * len(ranks)}",
        *rows,
        "",
        "Refused:",
        "",
        *_causes(ran, tried, "refused", names=False),
    ]


_COMMANDS_WHY = """What can be done with a compressed model of these types ({count}). A command may say that it does not
support a model, and why; a traceback counts as failed, here and above. Commands whose counts are smaller ran on a part
of these types, drawn at random.

    python tests/sweep/sweep.py run --log commands.jsonl --ways data compare dense onnx trim recover smallest --resume
    python tests/sweep/sweep.py table commands.jsonl --onto docs/architectures.md"""


def _causes(
    found: dict[str, list[Record]],
    types: list[str],
    rank: str,
    *,
    ignored: Collection[str] = (),
    names: bool = True,
) -> list[str]:
    """A row for each cause: its first message, its stages, its model types (or some of them)."""
    causes: dict[str, list[tuple[str, Record]]] = defaultdict(list)
    for name in types:
        for record in found[name]:
            if record["outcome"] == rank and record["stage"] not in ignored:
                causes[_kind(record["message"])].append((name, record))
    if not causes:
        return ["None."]
    rows = []
    for members in sorted(causes.values(), key=lambda members: -len({name for name, _ in members})):
        of = sorted({name for name, _ in members})
        stages = ", ".join(dict.fromkeys(record["stage"] for _, record in members))
        message = members[0][1]["message"][:240].replace("](", "] (").replace("|", "\\|").replace("<", "\\<")
        shown = ", ".join(of) if names else ", ".join(of[:4]) + (", ..." if of[4:] else "")
        rows.append(f"| {message} | {stages} | {len(of)} | {shown} |")
    return ["| message | stage | types | |", "| --- | --- | ---: | --- |", *rows]


def _kind(message: str) -> str:
    """What messages of one cause have in common: no names of classes and layers, no numbers."""
    text = re.sub(r"\b[A-Z]\w*(?:Model|For[A-Z]\w*|Encoder|Decoder|Config)\b", "X", message)
    text = re.sub(r"[\w.]*\.[\w.]+", "Y", text)
    return re.sub(r"[\d,]+", "N", text)[:90]
