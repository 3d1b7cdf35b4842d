"""Claim: with gross outliers planted, methods that do not square errors come near the clean matrix: entrywise l1 by
reweighting where entries are spoilt (1/15 of SVD's distance at 3 %), row losses and the lp ellipsoid at small p where
whole rows are (1/5 at 5 % of rows). The ellipsoid hardly helps against spoilt entries, whatever p.

    python experiments/robust_planted.py --parts FOLDER --write experiments/results

A rank-20 signal plus noise; 1, 3 or 5 % of all entries, or 5 % of the rows, replaced by +-20 standard deviations.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _results import kept, markdown, parsed, publish
from _robust import FAMILIES, L1_PCA, errors, low_rank
from torch import Tensor

RANK = 20
NOISE = 0.1
"""Standard deviation of the noise; an entry of the signal has 1."""

CASES = ("1 % of entries", "3 % of entries", "5 % of entries", "5 % of rows")
OTHERS = ["ellipsoid 0.5", "entrywise 0.5", "subspace 0.5", "subspace huber 2 median", "subspace truncated 3 median"]
METHODS = ["SVD", *FAMILIES, *OTHERS, *L1_PCA, "robust pca"]


def planted(n: int, d: int, case: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The spoilt matrix, the same unspoilt, the signal alone, and which rows count: those not replaced as a whole."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    signal = normal(n, RANK) @ normal(RANK, d) / RANK**0.5
    unspoilt = signal + NOISE * normal(n, d)
    gross = 20 * float(unspoilt.std()) * normal(n, d).sign()
    share = float(case.split()[0]) / 100
    if case.endswith("rows"):
        rows = torch.randperm(n, generator=generator)[: round(share * n)]
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[rows] = True
        return torch.where(chosen[:, None], gross, unspoilt), unspoilt, signal, ~chosen
    places = torch.rand(n, d, generator=generator) < share
    return torch.where(places, gross, unspoilt), unspoilt, signal, torch.ones(n, dtype=torch.bool)


def measured(name: str, case: str, n: int, d: int, seed: int) -> dict[str, Any]:
    """The distance to the signal in rows that count, relative, and the errors to the matrix that was given."""
    spoilt, unspoilt, signal, counted = planted(n, d, case, seed)
    made, note = next(low_rank(name, unspoilt if name == "SVD of the unspoilt" else spoilt, [RANK]))
    clean = float(torch.linalg.vector_norm((made - signal)[counted]) / torch.linalg.vector_norm(signal[counted]))
    return {"clean": clean, **errors([(spoilt, made)]), "note": note}


QUICK: dict[str, Any] = {"rows": 60, "columns": 24, "seeds": 1}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", required=True, type=Path, help="where finished parts are kept")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", help=f"comma-separated; default: {','.join(METHODS)}")
    asked = parsed(parser, argv, QUICK)
    names = asked.methods.split(",") if asked.methods else METHODS
    rows = []
    for case in CASES:
        for name in ["SVD of the unspoilt", *names]:
            for seed in range(asked.seeds):
                settings = {"case": case, "method": name, "n": asked.rows, "d": asked.columns, "seed": seed}
                make = partial(measured, name, case, asked.rows, asked.columns, seed)
                rows.append({**settings, **kept(asked.parts, ("planted", settings), make)})
    publish_table(asked, names, rows)


def publish_table(asked: argparse.Namespace, names: list[str], rows: list[dict[str, Any]]) -> None:
    def middle(case: str, name: str, what: str) -> float:
        return statistics.median(r[what] for r in rows if (r["case"], r["method"]) == (case, name))

    def cell(case: str, name: str) -> str:
        value, svd = middle(case, name, "clean"), middle(case, "SVD", "clean")
        return f"{value:.4f} ({value / svd:.3f})"

    ordered = ["SVD of the unspoilt", *names]
    clean = markdown(["method", *CASES], [[name, *(cell(case, name) for case in CASES)] for name in ordered])
    given = [
        [name, *(" / ".join(f"{middle(case, name, e):.3f}" for e in ("l1", "l21", "frobenius")) for case in CASES)]
        for name in names
    ]
    unfinished = sorted({f"{r['method']} ({r['case']})" for r in rows if r["note"]})
    body = "\n\n".join(
        [
            f"{asked.rows:,} x {asked.columns}, a signal of rank {RANK} with entries of standard deviation 1, noise of "
            f"{NOISE}, all methods at rank {RANK}; medians over {asked.seeds} seeds.",
            "**Distance to the signal** || signal - UV ||_F / || signal ||_F, and its ratio to SVD's. Where whole rows "
            "were replaced the other rows are counted. The first line is the SVD of the matrix before it was spoilt: "
            "what noise alone costs.",
            clean,
            remarks(middle, names),
            "**Errors to the matrix that was given, outliers included**, entrywise l1 / l2,1 / Frobenius, each "
            "relative to that of the zero matrix: what each method minimises.",
            markdown(["method", *CASES], given),
            "Stopped before it converged: " + (", ".join(unfinished) or "none") + ".",
        ]
    )

    publish("robust_planted", "Planted outliers", body, {"rows": rows}, asked)


def remarks(middle: Any, names: list[str]) -> str:
    """The claims, from the numbers."""
    claims = [
        ("entrywise 1", "3 % of entries", 1 / 15),
        ("ellipsoid 0.5", "5 % of rows", 1 / 5),
        ("subspace 1", "5 % of rows", 1 / 5),
    ]
    lines = []
    for name, case, limit in claims:
        if name in names:
            ratio = middle(case, name, "clean") / middle(case, "SVD", "clean")
            verdict = "holds" if ratio <= limit else "does NOT hold"
            lines.append(
                f"- {name}, {case}: at most 1/{1 / limit:.0f} of SVD's distance: {verdict} (1/{1 / ratio:.1f})."
            )
    for case in CASES:
        order = sorted(names, key=lambda name: middle(case, name, "clean"))
        lines.append(f"- {case}: nearest {', '.join(order[:3])}; farthest {', '.join(order[-3:])}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
