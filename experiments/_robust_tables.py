"""Methods x rates on one model: every part kept once it is finished, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from _results import kept, markdown, part
from _robust import FAMILIES, HALF, Known, compressed
from torch import nn

from kflats.model.weights import Weight
from kflats.tasks.scoring import spearman

STORED = (
    "Low rank stores two factors, a mask what its format stores (csr: values, column indices, row pointers; bitmap: "
    "values and a bit for each place; values: values alone, as papers count, which no file holds)."
)
ERRORS = ("l1", "l21", "frobenius")


def storable(name: str, rate: float) -> bool:
    """float16 saves half and no more."""
    return name != HALF or rate <= 0.5


def sweep(
    asked: argparse.Namespace,
    what: str,
    settings: Mapping[str, Any],
    model: nn.Module,
    weights: Sequence[Weight],
    names: Sequence[str],
    known: Known,
    judge: Callable[[nn.Module], dict[str, float]],
    wanted: Callable[[str, float], bool] = storable,
) -> list[dict[str, Any]]:
    """One row for each ``wanted`` method and rate: errors, what is kept, and what ``judge`` says of the model."""
    rates = [float(rate) for rate in asked.rates.split(",")]
    rows = []
    for name in names:
        levels = iter(())

        def make(rate: float, name: str = name) -> dict[str, Any]:
            nonlocal levels
            for other, found in levels:
                if found["rate"] == rate:
                    return {**found, **judge(other)}
            levels = compressed(model, weights, name, rates[rates.index(rate) :], known, asked.seed)
            other, found = next(levels)
            return {**found, **judge(other)}

        for rate in rates:
            if not wanted(name, rate):
                continue
            of = {**settings, "method": name, "rate": rate, "seed": asked.seed}
            if asked.finished and not part(asked.parts, (what, of)).is_file():
                continue
            rows.append({"of": what, "method": name, **kept(asked.parts, (what, of), partial(make, rate))})
    return rows


def table(rows: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> str:
    """Methods down, rates of compression across."""
    names = list(dict.fromkeys(r["method"] for r in rows))
    rates = sorted({r["rate"] for r in rows})
    at = {(r["method"], r["rate"]): r for r in rows}
    lines = [[name, *(cell(at[name, rate]) if (name, rate) in at else "-" for rate in rates)] for name in names]
    return markdown(["method", *(f"{rate:.0%} saved" for rate in rates)], lines)


def errors_cell(row: Mapping[str, Any]) -> str:
    """Entrywise l1, l2,1 and Frobenius."""
    return " / ".join(f"{row[error]:.3f}" for error in ERRORS)


def least(rows: Sequence[Mapping[str, Any]], what: str, best: Callable[..., Any] = min) -> str:
    """For each rate the three best methods by ``what``, of what can be stored, beside SVD."""
    told = []
    for rate in sorted({r["rate"] for r in rows}):
        level = [r for r in rows if r["rate"] == rate and r["method"] != HALF and not r["method"].endswith("values")]
        level.sort(key=lambda r: r[what], reverse=best is max)
        svd = next((r[what] for r in level if r["method"] == "SVD"), None)
        first = ", ".join(f"{r['method']} {r[what]:.3f}" for r in level[:3])
        told.append(f"{rate:.0%}: {first}" + ("" if svd is None else f" (SVD {svd:.3f})"))
    return "; ".join(told)


def agreement(rows: Sequence[Mapping[str, Any]], what: str, label: str) -> str:
    """Whether less matrix error means a better model: SVD, ellipsoid, entrywise and subspace fits without weights."""
    lines = []
    for rate in sorted({r["rate"] for r in rows}):
        level = [r for r in rows if r["rate"] == rate and r["method"] in ("SVD", *FAMILIES)]
        if len(level) > 2:
            scores = [r[what] for r in level]
            told = ", ".join(f"{error} {spearman([r[error] for r in level], scores):+.2f}" for error in ERRORS)
            lines.append(f"{rate:.0%}: {told}")
    return (
        f"Rank correlation of an error with {label}, over SVD, ellipsoid, entrywise and subspace fits without weights "
        f"(-1: less error always means more of it; +1: always less): {'; '.join(lines)}."
        if lines
        else ""
    )


def unfinished(rows: Sequence[Mapping[str, Any]]) -> str:
    """What stopped at a bound on iterations."""
    found = list(dict.fromkeys(f"{r['method']} at {r['rate']:.0%}" for r in rows if r["note"]))
    return f"Stopped at the bound on iterations: {', '.join(found) or 'none'}."
