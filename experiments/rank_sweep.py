"""Claim (FWSVD, figure 5): at every rank ratio FWSVD scores at or above SVD before fine-tuning; and importance with
correlations at or above FWSVD.

    python experiments/rank_sweep.py --cache FOLDER --write experiments/results
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from _results import markdown, needs, parsed, publish, variants
from task_scores import Bench, one, options, originals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.add_argument("--tasks", default="cola,stsb")
    parser.add_argument("--methods", default="SVD,RowFisher,KroneckerFisher,KroneckerFisher+loss")
    parser.add_argument("--ratios", default="10,20,33,45")
    asked = parsed(parser)
    chosen = variants(asked.methods.split(","))
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for task in asked.tasks.split(","):
        bench = Bench(task, asked, needs([v.importance for v in chosen]))
        about[task] = bench.before()
        for ratio in asked.ratios.split(","):
            for variant in chosen:
                settings = {"variant": variant.name, "ratio": f"{ratio}%"}
                found = bench.kept("compressed", settings, partial(one, bench, variant, f"{ratio}%"))
                rows.append({"task": task, "ratio": int(ratio), "method": variant.name, **found})
    at = {(r["task"], r["ratio"], r["method"]): r["score"] for r in rows}
    names = [v.name for v in chosen]
    keys = list(dict.fromkeys((r["task"], r["ratio"]) for r in rows))
    lines = [[task, f"{ratio} %", *(f"{at[task, ratio, name]:.3f}" for name in names)] for task, ratio in keys]
    failed = [
        f"{task} at {ratio} % ({better} {at[task, ratio, better]:.3f}, {worse} {at[task, ratio, worse]:.3f})"
        for better, worse in zip(names[1:], names, strict=False)
        for task, ratio in keys
        if at[task, ratio, better] < at[task, ratio, worse]
    ]
    verdict = "The order of the columns holds everywhere." if not failed else "It does NOT hold: " + "; ".join(failed)
    body = "\n\n".join(
        [
            f"All 36 encoder linear layers, no fine-tuning after compression, calibrated on {asked.samples} training "
            "examples, one seed. " + ("" if asked.full else "**Training was short, not the paper's recipe.**"),
            originals(about),
            markdown(["task", "rank ratio", *names], lines),
            f"Each column should be at or above the one before it. {verdict}",
        ]
    )

    publish("rank_sweep", "Score by rank ratio", body, {"tasks": about, "rows": rows}, asked)


if __name__ == "__main__":
    main()
