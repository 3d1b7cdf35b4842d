"""The model card (README.md) of a compressed folder: sizes, method, data, measured fidelity, and how to load it.

The card keeps that of the original: its YAML at the top, with ``base_model`` and a tag, and its text at the end. The
section of kflats stands between two comments, so that it can be replaced.

Of the YAML only the entries that change are parsed. Loading and dumping all of it, as ``huggingface_hub.ModelCard``
does, would change the others: the language "no" becomes false, and comments are lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.common.formatting import call, number, size, visible
from kflats.common.paths import expanded
from kflats.evaluation.proof import COLUMNS, FORM_COLUMNS, Proof
from kflats.io.atomic import manifest_follows, replaced
from kflats.io.saving import note_losses_
from kflats.report.report import REPORT_FILE, Report, TrimReport, before_after

CARD = "README.md"
_BEGIN, _END = "<!-- kflats: begin -->", "<!-- kflats: end -->"
_MEASURED, _AFTER = "<!-- kflats: measured -->", "<!-- kflats: measured ends -->"
_SHOWN = 12  # weights in the table
_HUB_CACHE = "models--"
_SPELT = "The tokenizer of this folder spells removed tokens with kept ones."
_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:")


def compressed_card(
    report: Report,
    files: tuple[int, int],
    data: Sequence[str],
    base_model: str | None,
    original: str,
    loader: str,
    own_code: bool = False,
) -> str:
    """The text of the card.

    Args:
        report: the report of the compression.
        files: bytes of the weight files, before and after.
        data: the data that importance was measured on, a phrase for each; none: the weights alone.
        base_model: the original's name on the hub, None if it is unknown.
        original: the original's card, "" if it has none.
        loader: "transformers" or "sentence-transformers".
        own_code: whether the model's folder holds code that loading it runs.
    """
    head, body = split(original)
    head = with_tag(head, "kflats")
    if base_model is not None:
        head = with_value(with_value(head, "base_model", base_model), "base_model_relation", "quantized")
    return _card(head, _section(report, files, data, base_model, loader, own_code), without_section(body))


def dense_card(original: str) -> str:
    """The card of a dense export: that of the compressed folder, with a note in place of its section."""
    note = "Weights multiplied out of a model compressed by kflats: an ordinary checkpoint, in the original's size."
    return _noted(original, note)


def onnx_card(original: str) -> str:
    """The card of a folder for programs that run ONNX, likewise."""
    return _noted(original, "An ONNX file of a model compressed by kflats, for programs that run ONNX.")


def _noted(original: str, note: str) -> str:
    head, body = split(original)
    if _BEGIN not in body:
        return original
    return _card(head, f"{_BEGIN}\n{note}\n{_END}", without_section(body))


def trimmed_card(report: TrimReport, files: tuple[int, int], base_model: str | None, original: str) -> str:
    """The card of a model that has fewer vocabulary entries and is otherwise as it was; arguments as above.

    It has no comments around it: a later compression keeps it as the original's card.
    """
    head, body = split(original)
    head = with_tag(head, "kflats")
    head = head if base_model is None else with_value(head, "base_model", base_model)
    rows = [["weight files", *before_after(*files)], *report.rows()]
    lines = [
        "# Vocabulary trimmed by kflats",
        "",
        f"{_linked(base_model) if base_model else 'The original'} with fewer tokens. It loads as the original does, "
        "without kflats.",
        "",
        *_table(["", "original", "here", "ratio"], rows),
        "",
        f"{_SPELT} {report.summary}",
    ]
    return _card(head, "\n".join(lines), body)


def split(card: str) -> tuple[list[str], str]:
    """The lines between the two ``---`` at the top of ``card``, and the text after them; no lines without such a top.

    >>> split("---\\nlicense: mit\\n---\\n# Model\\n")
    (['license: mit'], '# Model\\n')
    """
    lines = card.lstrip("\ufeff").splitlines()
    if lines and lines[0].rstrip() == "---":
        for at, line in enumerate(lines[1:], 1):
            if line.rstrip() in ("---", "..."):
                return lines[1:at], "\n".join(lines[at + 1 :]).strip("\n") + "\n"
    return [], card


def with_value(lines: list[str], key: str, value: str | list[str]) -> list[str]:
    """``lines`` without the entry ``key``, then ``key: value``.

    >>> with_value(["base_model: [a, b]", "license: mit"], "base_model", "c")
    ['license: mit', 'base_model: c']
    """
    import yaml

    return [*_entry(lines, key)[1], *yaml.safe_dump({key: value}, allow_unicode=True).splitlines()]


def with_tag(lines: list[str], tag: str) -> list[str]:
    """``lines`` with ``tag`` among their tags; unchanged if their tags cannot be read.

    >>> with_tag(["tags: [a, no]", "license: mit"], "c")
    ['license: mit', 'tags:', '- a', "- 'no'", '- c']
    """
    import yaml

    try:
        # The base loader keeps every value as text.
        tags = (yaml.BaseLoader("\n".join(_entry(lines, "tags")[0])).get_single_data() or {}).get("tags")
    except yaml.YAMLError:
        return lines
    if tags in (None, "", "null", "~"):
        tags = []
    tags = tags if isinstance(tags, list) else [tags]
    return lines if tag in tags else with_value(lines, "tags", [*tags, tag])


def without_section(body: str) -> str:
    """``body`` without the section of kflats and the heading after it.

    >>> without_section(f"{_BEGIN}\\nours\\n{_END}\\n\\n# The original's card\\n\\ntheirs")
    'theirs'
    """
    pattern = re.escape(_BEGIN) + r".*?" + re.escape(_END) + r"\s*(# The original's card\s*)?"
    return re.sub(pattern, "", body, count=1, flags=re.S)


def note_proof(folder: str | os.PathLike[str], proof: Proof) -> Path:
    """Write the result of ``kflats.compare`` into the card of a compressed folder, into its report if it has one, and
    what run-time forms lose into its ``config.json``.

    Each file is replaced in one step.

    Raises:
        KflatsError: the folder has no card of kflats.
    """
    path = Path(folder) / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    pattern = re.escape(_MEASURED) + r".*?" + re.escape(_AFTER)
    if len(re.findall(pattern, text, flags=re.S)) != 1:
        raise KflatsError(
            f"{path} has no place for measurements",
            cause="kflats compress did not write the folder, or its card was rewritten",
        )
    rewritten = re.sub(pattern, lambda _: _measured(proof), text, flags=re.S)
    report = Path(folder) / REPORT_FILE
    with manifest_follows(Path(folder), CARD, REPORT_FILE):
        with replaced(path) as aside:
            aside.write_text(rewritten, encoding="utf-8")
        if report.is_file():
            replace(Report.load(report), proof=replace(proof, outputs=replace(proof.outputs, worst=()))).save(report)
    if proof.forms:
        note_losses_(folder, proof.forms)
    return path


def rewrite_(folder: Path, make: Callable[[str], str]) -> None:
    """Replace the folder's card by ``make`` of it, of "" if it has none. For temporary folders."""
    path = folder / CARD
    # The bytes of the original's text stay, whatever their encoding is.
    original = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    path.write_text(make(original), encoding="utf-8", errors="surrogateescape")


def hub_name(source: str | os.PathLike[str]) -> str | None:
    """The hub's name of a model: ``source`` if it is no folder, else the name in the hub's cache.

    >>> hub_name("owner/model"), hub_name(".")
    ('owner/model', None)
    """
    folder = expanded(source)
    if not folder.is_dir():
        return os.fspath(source)
    for part in reversed(folder.resolve().parts):
        if part.startswith(_HUB_CACHE):
            return part.removeprefix(_HUB_CACHE).replace("--", "/")
    return None


def _card(head: list[str], text: str, original: str) -> str:
    """The card of a front matter, a text, and the text of the original's card."""
    below = f"\n\n# The original's card\n\n{original.strip()}" if original.strip() else ""
    return "\n".join(["---", *head, "---", "", text]) + below + "\n"


def _section(
    report: Report, files: tuple[int, int], data: Sequence[str], base_model: str | None, loader: str, own_code: bool
) -> str:
    trimmed = report.trimming
    named = (report.bytes_before, report.bytes_after)
    start = report.model_bytes_before + (0 if trimmed is None else trimmed.saved)
    memory = sum(w.bytes_after if w.memory_bytes is None else w.memory_bytes for w in report.weights)
    sizes = [["weight files", *before_after(*files)], ["all tensors", *before_after(start, report.model_bytes_after)]]
    sizes += [] if trimmed is None else trimmed.rows()[:1]
    sizes.append(["compressed weights" + ("" if trimmed is None else ", after trimming"), *before_after(*named)])
    sizes += [["the same in memory", *before_after(named[0], memory)]] if memory != named[1] else []
    weights = [
        [
            w.name,
            "left as it is" if w.dense else call(w.method),
            call(w.importance),
            call(w.codec),
            w.kept,
            size(w.bytes_before),
            size(w.bytes_after),
            number(w.error),
        ]
        for w in report.weights[:_SHOWN]
    ]
    if len(report.weights) > _SHOWN:
        weights.append([f"{len(report.weights) - _SHOWN} more: kflats_report.json", *[""] * 7])
    sentences = loader == "sentence-transformers"
    library, name = ("sentence_transformers", "SentenceTransformer") if sentences else ("transformers", "AutoModel")
    lines = [
        _BEGIN,
        f"# {_cell(report.model.rpartition('/')[2])}, compressed by kflats",
        "",
        f"{_linked(base_model) if base_model else _cell(report.model)} with smaller weights. "
        f"`{name}` loads it, after `import kflats`.",
        "",
        *_table(["", "original", "here", "ratio"], sizes),
        "",
        *_table(["weight", "method", "importance", "numbers", "kept", "before", "after", "error"], weights),
        "",
        *([] if trimmed is None else [f"The vocabulary was trimmed first. {_SPELT} {trimmed.summary}"]),
        "Error: relative squared error, rows weighted by importance.",
        f"Budget {_cell(report.budget)}; seed {report.seed}; kflats {_cell(report.version)}.",
        f"Data: {'; '.join(data) if data else 'none but the weights themselves'}.",
        "",
        "## Measured",
        "",
        _MEASURED,
        "Not measured yet: `kflats compare ORIGINAL FOLDER --card`.",
        _AFTER,
        "",
        "## Loading",
        "",
        "```python",
        "import kflats  # pip install 'kflats[hf,codes]'",
        f"from {library} import {name}",
        "",
        f'{name}{"" if sentences else ".from_pretrained"}("FOLDER"{", trust_remote_code=True" if own_code else ""})',
        "```",
        "",
        "Without kflats: `kflats export FOLDER --dense --out DIR` writes an ordinary checkpoint, "
        "`kflats export FOLDER --onnx --out model.onnx` an ONNX file.",
        _END,
    ]
    return "\n".join(lines)


def _linked(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})"


def _measured(proof: Proof) -> str:
    outputs = _table(["", "compressed", "original"], proof.outputs.rows())
    note = f"Times: {proof.conditions}."
    forms = [*_table(FORM_COLUMNS, proof.form_rows()), ""] if proof.forms else []
    return "\n".join(
        [_MEASURED, *_table(COLUMNS, proof.rows()), "", proof.outputs.summary, "", *outputs, "", *forms, note, _AFTER]
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines]


def _cell(text: str) -> str:
    """``text`` without markup: names come from files, and must not end a cell."""
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", visible(text))


def _entry(lines: list[str], key: str) -> tuple[list[str], list[str]]:
    """The lines of the entry ``key``, and the other lines. An entry ends where another key stands at the margin."""
    own: list[str] = []
    others: list[str] = []
    part = others
    for line in lines:
        if match := _KEY.match(line):
            part = own if match[1] == key else others
        part.append(line)
    return own, others
