"""Methods x rates on one model: every part kept once it is finished, tables, and a figure by rate."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from _results import kept, markdown
from _robust import Known, compressed
from torch import nn

from kflats.places import Weight

STORED = (
    "Low rank stores two factors, a mask what its format stores (csr: values, column indices, row pointers; bitmap: "
    "values and a bit for each place; values: values alone, as papers count, which no file holds)."
)
ERRORS = ("l1", "l21", "frobenius")


def sweep(
    asked: argparse.Namespace,
    what: str,
    settings: Mapping[str, Any],
    model: nn.Module,
    weights: Sequence[Weight],
    names: Sequence[str],
    known: Known,
    judge: Callable[[nn.Module], dict[str, float]],
) -> list[dict[str, Any]]:
    """One row for each method and rate: errors, what is kept, and what ``judge`` says of the model."""
    rates = [float(rate) for rate in asked.rates.split(",")]

    def make(name: str) -> dict[str, Any]:
        levels = compressed(model, weights, name, rates, known, asked.seed)
        return {"levels": [{**found, **judge(other)} for other, found in levels]}

    rows = []
    for name in names:
        of = {**settings, "method": name, "rates": rates, "seed": asked.seed}
        done = kept(asked.parts, what, of, partial(make, name))
        rows += [{"of": what, "method": name, **level} for level in done["levels"]]
    return rows


def table(rows: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> str:
    """Methods down, rates of compression across."""
    names = list(dict.fromkeys(r["method"] for r in rows))
    rates = sorted({r["rate"] for r in rows})
    at = {(r["method"], r["rate"]): r for r in rows}
    lines = [[name, *(cell(at[name, rate]) for rate in rates)] for name in names]
    return markdown(["method", *(f"{rate:.0%} saved" for rate in rates)], lines)


def errors_cell(row: Mapping[str, Any]) -> str:
    """Entrywise l1, l2,1 and Frobenius."""
    return " / ".join(f"{row[error]:.3f}" for error in ERRORS)


def least(rows: Sequence[Mapping[str, Any]], what: str, best: Callable[..., Any] = min, count: int = 3) -> str:
    """For each rate the ``count`` best methods by ``what``, with SVD's value."""
    told = []
    for rate in sorted({r["rate"] for r in rows}):
        level = sorted((r for r in rows if r["rate"] == rate), key=lambda r: r[what], reverse=best is max)
        svd = next((r[what] for r in level if r["method"] == "SVD"), None)
        first = ", ".join(f"{r['method']} {r[what]:.3f}" for r in level[:count])
        told.append(f"{rate:.0%}: {first}" + ("" if svd is None else f" (SVD {svd:.3f})"))
    return "; ".join(told)


def unfinished(rows: Sequence[Mapping[str, Any]]) -> str:
    """What stopped at a bound on iterations."""
    found = list(dict.fromkeys(f"{r['method']} at {r['rate']:.0%}" for r in rows if r["note"]))
    return f"Stopped at the bound on iterations: {', '.join(found) or 'none'}."


def draw(panels: Sequence[tuple[str, str, Sequence[Mapping[str, Any]], str]], plot: Any) -> None:
    """A panel for each (title, label, rows, measure): the measure by rate, a line a method."""
    figure, axes = plot.subplots(1, len(panels), figsize=(4.6 * len(panels), 6.4), squeeze=False)
    for axis, (title, label, rows, what) in zip(axes[0], panels, strict=True):
        for place, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
            line = sorted((r for r in rows if r["method"] == name), key=lambda r: r["rate"])
            style = ("-", "--", ":", "-.")[place // 10 % 4]
            axis.plot(
                [100 * r["rate"] for r in line],
                [r[what] for r in line],
                style,
                color=f"C{place % 10}",
                marker=".",
                label=name,
            )
        axis.set(title=title, xlabel="bytes saved, %", ylabel=label)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, ncol=4, loc="lower center")
    figure.subplots_adjust(bottom=0.38, wspace=0.3)


def shown(asked: argparse.Namespace, script: str, **more: object) -> str:
    """The command that makes a table again."""
    chosen = {"methods": asked.methods, "rates": asked.rates, **more}
    given = " ".join(f'--{key} "{value}"' for key, value in chosen.items() if value)
    return f"python experiments/{script}.py --parts FOLDER {given} --write experiments/results"
