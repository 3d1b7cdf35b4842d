"""Question: at equal bytes, have k flats with ranks of their own less error than a learnt dictionary whose rows may use
any s atoms (MESSI's appendix E.1)? Freedom of choice costs an index for every coefficient, which labels do not.

    python experiments/dictionaries.py --parts FOLDER --write experiments/results

The embedding table of all-MiniLM-L6-v2. Dictionaries by scikit-learn: learnt from a sample of rows, coefficients by
orthogonal matching pursuit for another sample, on which every method is judged.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from _results import embedding_table, kept, markdown, parsed, publish
from _robust import Known, approximations, errors, options
from baselines.dictionary import dictionary_bytes, encode, learn, nonzeros_that_fit
from torch import Tensor

ATOMS = (512, 1024, 2048)


def one(name: str, rate: float, a: Tensor, asked: argparse.Namespace) -> dict[str, Any]:
    """One line: errors of the judged rows, bytes of the whole table, s."""
    n, d = a.shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(asked.seed))
    judged, taught = order[: asked.judged], order[-asked.taught :]
    if not name.startswith("dictionary"):
        made = next(approximations(name, a, [rate], Known(), asked.seed))
        return {"kept": made.nbytes / (4 * n * d), "nonzeros": None, **errors([(a[judged], made.matrix[judged])])}
    atoms = int(name.split()[1])
    nonzeros = nonzeros_that_fit(n, d, atoms, int((1 - rate) * 4 * n * d))
    if nonzeros < 1:
        return {"kept": None, "nonzeros": 0}
    learnt = learn(a[taught], atoms, min(nonzeros, 32), passes=asked.passes, seed=asked.seed)
    codes = encode(a[judged], learnt, nonzeros)
    share = dictionary_bytes(n, d, atoms, nonzeros) / (4 * n * d)
    return {"kept": share, "nonzeros": nonzeros, **errors([(a[judged], codes @ learnt)])}


QUICK: dict[str, Any] = {"rates": "0.6", "methods": "SVD,dictionary 512", "judged": 20, "taught": 600, "passes": 1}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.set_defaults(rates="0.41,0.6,0.8,0.9", methods="SVD,flats," + ",".join(f"dictionary {k}" for k in ATOMS))
    parser.add_argument("--judged", type=int, default=1000, help="rows to judge on")
    parser.add_argument("--taught", type=int, default=10_000, help="rows that dictionaries learn from")
    parser.add_argument("--passes", type=int, default=3, help="over those rows")
    asked = parsed(parser, argv, QUICK)
    a = embedding_table()
    names, rates = asked.methods.split(","), [float(rate) for rate in asked.rates.split(",")]
    rows = []
    for rate in rates:
        for name in names:
            settings = {"method": name, "rate": rate, "judged": asked.judged, "seed": asked.seed}
            if name.startswith("dictionary"):
                settings |= {"taught": asked.taught, "passes": asked.passes}
            found = kept(asked.parts, ("dictionary", settings), partial(one, name, rate, a, asked))
            rows.append({"method": name, "rate": rate, **found})
    at = {(r["method"], r["rate"]): r for r in rows}

    def cell(name: str, rate: float) -> str:
        r = at[name, rate]
        if "frobenius" not in r:
            return "does not fit"
        s = "" if r["nonzeros"] is None else f" (s = {r['nonzeros']})"
        return f"{r['frobenius'] ** 2:.4f}{s}"

    lines = [[name, *(cell(name, rate) for rate in rates)] for name in names]
    n, d = a.shape
    body = "\n\n".join(
        [
            f"Relative squared error at equal bytes, {n:,} x {d}. **Samples**: all methods are judged on "
            f"{asked.judged:,} rows drawn at random (SVD and flats fit all rows); dictionaries learn from "
            f"{asked.taught:,} others, {asked.passes} passes. A dictionary of K atoms stores them, and for each row s "
            "coefficients and s indices; flats (kflats' default: exact rows, ranks of their own, prefix ranks) their "
            "bases and labels.",
            markdown(["method", *(f"{rate:.0%} saved" for rate in rates)], lines),
            remarks(at, names, rates),
        ]
    )
    publish("dictionaries", "Flats and dictionaries", body, {"rows": rows}, asked)


def remarks(at: dict[tuple[str, float], dict[str, Any]], names: list[str], rates: list[float]) -> str:
    """Whether the claim holds, by rate."""
    lines = []
    for rate in rates:
        fit = [name for name in names if name.startswith("dictionary") and "frobenius" in at[name, rate]]
        if fit and ("flats", rate) in at:
            best = min(fit, key=lambda name: at[name, rate]["frobenius"])
            ratio = (at["flats", rate]["frobenius"] / at[best, rate]["frobenius"]) ** 2
            verdict = "holds" if ratio <= 1 else "does NOT hold"
            lines.append(f"- {rate:.0%} saved: {verdict}; flats have {ratio:.2f} of the error of the best, {best}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
