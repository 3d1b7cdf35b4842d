"""The model card (README.md) of a compressed folder: sizes, method, data, measured fidelity, and how to load it.

The card keeps that of the original: its YAML at the top, with ``base_model`` and a tag, and its text at the end. The
section of kflats stands between two comments, so that it can be replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.common.formatting import call, number, share, size, visible
from kflats.evaluation.comparing import Comparison
from kflats.io.atomic_files import replaced
from kflats.io.manifest import manifest_follows
from kflats.report.front_matter import split, with_tag, with_value
from kflats.report.report import Report
from kflats.report.trimmed import TrimReport
from kflats.report.weights import WeightReport

CARD = "README.md"
_BEGIN, _END = "<!-- kflats: begin -->", "<!-- kflats: end -->"
_MEASURED, _AFTER = "<!-- kflats: measured -->", "<!-- kflats: measured ends -->"
_SHOWN = 12  # weights in the table
_HUB_CACHE = "models--"


def compressed_card(
    report: Report, files: tuple[int, int], data: Sequence[str], base_model: str | None, original: str, loader: str
) -> str:
    """The text of the card.

    Args:
        report: what was done.
        files: bytes of the weight files, before and after.
        data: the data that importance was measured on, a phrase for each; none: the weights alone.
        base_model: the original's name on the hub, None if it is unknown.
        original: the original's card, "" if it has none.
        loader: "transformers" or "sentence-transformers".
    """
    head, body = split(original)
    head = with_tag(head, "kflats")
    if base_model is not None:
        head = with_value(with_value(head, "base_model", base_model), "base_model_relation", "quantized")
    ours = _section(report, files, data, base_model, loader)
    kept = without_section(body).strip()
    below = f"\n\n# The original's card\n\n{kept}" if kept else ""
    return "\n".join(["---", *head, "---", "", ours]) + below + "\n"


def dense_card(original: str) -> str:
    """The card of a dense export: that of the compressed folder, with a note in place of its section."""
    head, body = split(original)
    if _BEGIN not in body:
        return original
    note = "Weights multiplied out of a model compressed by kflats: an ordinary checkpoint, in the original's size."
    text = f"{_BEGIN}\n{note}\n{_END}\n\n{without_section(body).strip()}\n"
    return "\n".join(["---", *head, "---", "", text]) if head else text


def trimmed_card(report: TrimReport, files: tuple[int, int], base_model: str | None, original: str) -> str:
    """The card of a model that has fewer vocabulary entries and is otherwise as it was; arguments as above.

    It has no comments around it: a later compression keeps it as the original's card.
    """
    head, body = split(original)
    head = with_tag(head, "kflats")
    head = head if base_model is None else with_value(head, "base_model", base_model)
    lines = [
        "# Vocabulary trimmed by kflats",
        "",
        f"{_linked(base_model) if base_model else 'The original'} with fewer tokens. It loads as the original does, "
        "without kflats.",
        "",
        "| | original | here | ratio |",
        "| --- | --- | --- | --- |",
        _row("weight files", *_sizes(files)),
        _entries(report),
        _row("token tables, heads", *_sizes(report.table_bytes)),
        "",
        _resegmented(report),
    ]
    below = f"\n\n# The original's card\n\n{body.strip()}" if body.strip() else ""
    return "\n".join(["---", *head, "---", "", *lines]) + below + "\n"


def without_section(body: str) -> str:
    """``body`` without the section of kflats and the heading after it.

    >>> without_section(f"{_BEGIN}\\nours\\n{_END}\\n\\n# The original's card\\n\\ntheirs")
    'theirs'
    """
    pattern = re.escape(_BEGIN) + r".*?" + re.escape(_END) + r"\s*(# The original's card\s*)?"
    return re.sub(pattern, "", body, count=1, flags=re.S)


def note_fidelity(folder: str | os.PathLike[str], comparison: Comparison) -> Path:
    """Write the result of ``kflats.compare`` into the card of a compressed folder; the file is replaced in one step.

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
    rewritten = re.sub(pattern, lambda _: _fidelity(comparison), text, flags=re.S)
    with manifest_follows(Path(folder), CARD), replaced(path) as aside:
        aside.write_text(rewritten, encoding="utf-8")
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
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return os.fspath(source)
    for part in reversed(folder.resolve().parts):
        if part.startswith(_HUB_CACHE):
            return part.removeprefix(_HUB_CACHE).replace("--", "/")
    return None


def _section(report: Report, files: tuple[int, int], data: Sequence[str], base_model: str | None, loader: str) -> str:
    of = _linked(base_model) if base_model else _cell(report.model)
    trimmed = report.trimming
    named = (report.bytes_before, report.bytes_after)
    start = report.model_bytes_before + (0 if trimmed is None else trimmed.saved)
    whole = (start, report.model_bytes_after)
    memory = sum(w.bytes_after if w.memory_bytes is None else w.memory_bytes for w in report.weights)
    lines = [
        _BEGIN,
        f"# {_cell(report.model.rpartition('/')[2])}, compressed by kflats",
        "",
        f"{of} with smaller weights. It loads as the original does, after `import kflats`.",
        "",
        "| | original | here | ratio |",
        "| --- | --- | --- | --- |",
        _row("weight files", *_sizes(files)),
        _row("all tensors", *_sizes(whole)),
        *([] if trimmed is None else [_entries(trimmed)]),
        _row("compressed weights" if trimmed is None else "compressed weights, after trimming", *_sizes(named)),
        *([_row("the same in memory", *_sizes((named[0], memory)))] if memory != named[1] else []),
        "",
        "| weight | method | importance | numbers | kept | before | after | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(*_weight(w)) for w in report.weights[:_SHOWN]),
    ]
    if more := len(report.weights) - _SHOWN:
        lines += [_row(f"{more} more: kflats_report.json", *[""] * 7)] if more > 0 else []
    lines += [
        "",
        *([] if trimmed is None else ["The vocabulary was trimmed first. " + _resegmented(trimmed)]),
        "Error: relative squared error, rows weighted by importance.",
        f"Budget {_cell(report.budget)}; seed {report.seed}; kflats {_cell(report.version)}.",
        f"Data: {'; '.join(data) if data else 'none but the weights themselves'}.",
        "",
        "## Measured fidelity",
        "",
        _MEASURED,
        "Not measured yet: `kflats compare ORIGINAL FOLDER --card`.",
        _AFTER,
        "",
        "## Loading",
        "",
        "```python",
        *_loading(loader),
        "```",
        "",
        "Without kflats: `kflats export FOLDER --dense --out DIR` writes an ordinary checkpoint, "
        "`kflats export FOLDER --onnx --out model.onnx` an ONNX file.",
        _END,
    ]
    return "\n".join(lines)


def _linked(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})"


def _entries(report: TrimReport) -> str:
    before, after = report.entries
    return _row("vocabulary entries", f"{before:,}", f"{after:,}", share(after, before))


def _resegmented(report: TrimReport) -> str:
    """How many tokens of the texts changed."""
    lost = "The tokenizer of this folder spells removed tokens with kept ones."
    texts = report.segmentation
    if texts is None:
        return f"{lost} The order of the vocabulary decided which tokens are common; no text was counted."
    kind = "counted" if report.counted else "other"
    return (
        f"{lost} Of {texts.texts:,} {kind} texts {share(texts.texts_changed, texts.texts)} are segmented anew, with "
        f"{share(texts.tokens_changed, texts.tokens_before)} of their tokens; they take {texts.tokens_after:,} tokens "
        f"instead of {texts.tokens_before:,}."
    )


def _loading(loader: str) -> list[str]:
    first = "import kflats  # pip install kflats"
    if loader == "sentence-transformers":
        return [first, "from sentence_transformers import SentenceTransformer", "", 'SentenceTransformer("FOLDER")']
    return [first, "from transformers import AutoModel", "", 'AutoModel.from_pretrained("FOLDER")']


def _fidelity(comparison: Comparison) -> str:
    f = comparison.fidelity
    rows = [
        _row(f"mean cosine of sentence vectors, {f.sentences:,} sentences", f"{f.mean_cosine:.4f}"),
        _row("its 5th percentile", f"{f.p5_cosine:.4f}"),
    ]
    if f.rare_mean_cosine is not None:
        rows.append(_row(f"mean cosine of {f.rare_words:,} rare words, each alone", f"{f.rare_mean_cosine:.4f}"))
    if f.neighbour_overlap is not None:
        rows.append(_row("of the 10 nearest sentences, kept", share(f.neighbour_overlap)))
    t = comparison.latency
    rows.append(
        _row("time of a batch, share of the original's", f"{number(t.ratio)} ({number(t.low)}-{number(t.high)})")
    )
    return "\n".join([_MEASURED, "| against the original | |", "| --- | --- |", *rows, _AFTER])


def _weight(w: WeightReport) -> list[str]:
    error = number(w.error)
    method = "left as it is" if w.dense else call(w.method)
    return [w.name, method, call(w.importance), call(w.codec), w.kept, size(w.bytes_before), size(w.bytes_after), error]


def _sizes(pair: tuple[int, int]) -> tuple[str, str, str]:
    return size(pair[0]), size(pair[1]), share(pair[1], pair[0])


def _row(*cells: str) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """``text`` without markup: names come from files, and must not end a cell."""
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", visible(text))
