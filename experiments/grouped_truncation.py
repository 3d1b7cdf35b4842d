"""Claim (FWSVD, section 3, figures 1 and 6 to 9): the smallest singular values are not always the least important
for a task; weighted by Fisher information (row sums), the order by singular value fits the score better.

    python experiments/grouped_truncation.py --cache FOLDER --write experiments/results

The singular values of every encoder linear layer are put into ten groups, from the largest to the smallest. One group
at a time is removed from all layers together, the others are kept; the model is judged on the dev split. Beside the
score stands the relative squared error of the reconstruction over all layers: by construction it falls from group to
group for SVD, not for FWSVD.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from functools import partial
from typing import Any

import torch
from _results import ENCODER, IMPORTANCES, markdown, parsed, publish
from task_scores import Bench, options, originals
from torch import Tensor

from kflats import find_weights
from kflats.model.weights import dense_weight

GROUPS = 10
METHODS = {"SVD": "SVD", "FWSVD": "RowFisher"}


def groups(table: Tensor, left: Tensor | None) -> list[Tensor]:
    """What is to be subtracted from M (n, d) to remove each group: U_g S_g V_g' of L M, with L undone.

    L is the diagonal of the roots of row weights. Rows of weight zero get their projection on V_g, as in FWSVD's
    limit of small weights.
    """
    scale = None if left is None else left.clamp_min(0).sqrt().to(table.dtype)
    _, _, v = torch.linalg.svd(table if scale is None else table * scale[:, None], full_matrices=False)
    # Undone, L^-1 U_g S_g V_g' is M V_g V_g': nothing is divided by.
    return [table @ part.T @ part for part in v.tensor_split(GROUPS)]


def by_group(bench: Bench, name: str) -> dict[str, Any]:
    """For each group the score without it, and the relative reconstruction error."""
    model = bench.made.model
    chosen = [w for w in find_weights(model) if w.name.startswith(ENCODER.rstrip("*"))]
    removed = {}
    for weight in chosen:
        left = None if name == "SVD" else IMPORTANCES[name].weigh(bench.statistics().of(weight.name)).left
        removed[weight.name] = groups(dense_weight(model, weight), left)
    total = sum(float(dense_weight(model, w).square().sum()) for w in chosen)
    rows = []
    for group in range(GROUPS):
        other = copy.deepcopy(model)
        for weight in chosen:
            # Torch keeps a linear layer's M transposed.
            other.get_submodule(weight.name).weight.data -= removed[weight.name][group].T
        lost = sum(float(parts[group].square().sum()) for parts in removed.values())
        rows.append({"group": group + 1, "score": bench.score(other), "error": lost / total})
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.add_argument("--tasks", default="cola,mrpc,stsb")
    asked = parsed(parser)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for task in asked.tasks.split(","):
        bench = Bench(task, asked, frozenset({"row_fisher"}))
        about[task] = bench.before()
        for shown, name in METHODS.items():
            found = bench.kept("groups", {"method": name}, partial(by_group, bench, name))
            rows += [{"task": task, "method": shown, **row} for row in found["rows"]]
    write_up(asked, rows, about)


def write_up(asked: argparse.Namespace, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Table, remarks, figure."""
    at = {(r["task"], r["method"], r["group"]): r for r in rows}
    head = ["group removed"]
    for task in about:
        head += [f"{task}: {shown} {what}" for shown in METHODS for what in ("score", "error")]
    lines = []
    for group in range(1, GROUPS + 1):
        line: list[object] = [f"{group}{' (largest)' if group == 1 else ' (smallest)' if group == GROUPS else ''}"]
        for task in about:
            for shown in METHODS:
                line += [f"{at[task, shown, group]['score']:.3f}", f"{at[task, shown, group]['error']:.4f}"]
        lines.append(line)
    body = "\n\n".join(
        [
            f"Ten groups of singular values, one removed at a time from all 36 encoder linear layers. "
            f"Fisher from {asked.samples} training examples. One seed. No fine-tuning after removal. "
            + ("" if asked.full else "**Training was short, not the paper's recipe.**"),
            originals(about),
            markdown(head, lines),
            remarks(at, about),
        ]
    )

    title = "Grouped truncation: which singular values matter"
    publish("grouped_truncation", title, body, {"tasks": about, "rows": rows}, asked)


def remarks(at: dict[tuple[str, str, int], dict[str, Any]], about: dict[str, Any]) -> str:
    """How far the score agrees with the order of singular values: Spearman's correlation, and each one's last group."""
    from scipy.stats import spearmanr

    lines = []
    for task, what in about.items():
        said = []
        for shown in METHODS:
            scores = [at[task, shown, g]["score"] for g in range(1, GROUPS + 1)]
            agree = float(spearmanr(range(GROUPS), scores).statistic)
            falls = sum(b < a for a, b in itertools.pairwise(scores))
            said.append(
                f"{shown}: rank correlation of score with group {agree:.2f}, {falls} of 9 steps go the wrong way, "
                f"{what['before'] - scores[-1]:.3f} lost with the smallest group and "
                f"{what['before'] - max(scores):.3f} with the most harmless one"
            )
        lines.append(f"- {task}: " + "; ".join(said) + ".")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
