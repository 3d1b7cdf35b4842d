"""Claim: the embedding table of all-MiniLM-L6-v2 alone, no fine-tuning, in at most .70 bits per number keeps a mean
cosine of .94 and STS-B within .5 points; in 1.2 bits .98 and .2 points; in 2 bits .995. Every baseline is measured too.

Counted on WikiText-2 (train), judged on the sentences of STS-B (dev) and its Spearman correlation. Defaults are chosen
on CoLA's sentences, of which ``defaults.py`` makes a table (``--data cola`` judges on them here). The 5th percentile
and 500 rare words, which neither text shows, stand beside the means.

    python benchmarks/frontier_model.py --write benchmarks/results/frontier_model.md

``--methods``: of transform, flats, float16 (kflats); fp16, absmax, torchao, rotation, pq, opq, rq, svd, robust-svd,
messi, trim; with "+counts" or "+zipf" their rows are weighed, with "transform+fisher" the columns too. Points are kept
in the folder ``--parts``, so that an interrupted run resumes; empty it after changing the code.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict
from typing import Any

import torch
from _common import EMBEDDING, arguments, kept, markdown, publish
from _sentences import HEAD, Evaluator, Scores, cells, sentences
from frontier.sweeps import FAMILIES, OURS, sweep

from kflats import SVD, Recipe, TokenCounts, TokenFisher, Uniform, ZipfPrior
from kflats.common.errors import KflatsError
from kflats.common.formatting import number, size
from kflats.demo import packaged_model
from kflats.evaluation.outputs import Fidelity, load_tokenizer
from kflats.io import load_model
from kflats.model.weights import dense_weight, find_weight
from kflats.planning.calibration_data import gather
from kflats.trimming.trimming import trim

CLAIMS = ((0.70, 0.94, 0.5), (1.20, 0.98, 0.2), (2.0, 0.995, None))
"""Bits, least mean cosine, points of Spearman that may be lost."""
IMPORTANCES = {"": Uniform(), "counts": TokenCounts(), "zipf": ZipfPrior(), "fisher": TokenFisher()}
WORDS = {"": "", "counts": ", token counts", "zipf": ", Zipf prior", "fisher": ", token Fisher"}
WEIGHED = ("transform+fisher", "transform+counts", "transform+zipf", "flats+counts", "svd+counts", "pq+counts")
METHODS = ",".join((*WEIGHED[:3], "transform", WEIGHED[3], "float16", *FAMILIES, "trim", *WEIGHED[4:]))
SIZES = "0.5,0.7,1,1.2,1.5,2,3,4,6,8,16"


def held(points: list[dict[str, Any]], original: float) -> list[list[str]]:
    """For each claim our best point of at most so many bits, whether it holds, and the best baseline's."""
    lines = []
    for bits, cosine, most in CLAIMS:
        best = {
            ours: max((p for p in points if p["ours"] == ours and p["bits"] <= bits), key=_cosine, default=None)
            for ours in (True, False)
        }
        if (ours := best[True]) is None:
            continue
        lost = 100 * (original - ours["spearman"])
        holds = _cosine(ours) >= cosine and (most is None or lost <= most)
        wanted = f"{cosine}" + ("" if most is None else f", {most} points")
        figures = f"{_cosine(ours):.4f}, {lost:+.2f} points"
        other = "-" if best[False] is None else f"{best[False]['name']}: {_cosine(best[False]):.4f}"
        line = [f"{bits:g}", wanted, ours["name"], f"{ours['bits']:.3f}", figures, "yes" if holds else "NO", other]
        lines.append(line)
    return lines


def _cosine(point: dict[str, Any]) -> float:
    return point["fidelity"]["mean_cosine"]


def main() -> None:
    options = arguments(__doc__, parts="", sizes=SIZES, methods=METHODS, judged=0, data="stsb")
    counted, texts = sentences("wikitext2"), sentences(options.data)
    every = max(1, len(texts) // options.judged) if options.judged else 1
    judged, source = texts[::every], packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    weight = find_weight(original, EMBEDDING)
    table = dense_weight(original, weight).detach().clone()
    recipes = {name: Recipe(SVD(), importance) for name, importance in IMPORTANCES.items()}
    data = gather(counted, tokenizer, None, None, None)
    data = data.measured(original, [(weight, recipe) for recipe in recipes.values()])
    weightings = {name: data.weigh(weight, recipe) for name, recipe in recipes.items()}
    evaluator, version = Evaluator(original, tokenizer, judged, counted, sts=True), copy.deepcopy(original)

    def point(name: str, ours: bool, nbytes: int, scores: Scores, errors: tuple[Any, Any], began: float) -> dict:
        return {"name": name, "ours": ours, "bits": 8 * nbytes / table.numel(), "nbytes": nbytes, "error": errors[0],
                "weighted": errors[1], "fidelity": asdict(scores.fidelity), "spearman": scores.spearman,
                "seconds": time.perf_counter() - began}  # fmt: skip

    def stored(one: Any, weighed: str, ours: bool) -> dict[str, Any]:
        began = time.perf_counter()
        made = one.code(table, weightings[weighed])
        with torch.no_grad():
            dense_weight(version, weight).copy_(made.table)
        errors = made.error(table), made.error(table, weightings["counts"].left)
        return point(one.name + WORDS[weighed], ours, made.nbytes, evaluator(version), errors, began)

    def trimmed(name: str, bits: float) -> dict[str, Any]:
        """The commonest tokens whose rows in float16 take ``bits`` per number of the whole table."""
        began, keep = time.perf_counter(), int(len(table) * bits / 16)
        made = trim(original, tokenizer, keep=max(1, keep), texts=counted, eval_texts=judged)
        rows = dense_weight(made.model, find_weight(made.model, EMBEDDING))
        with torch.no_grad():
            rows.copy_(rows.half())
        return point(name, False, 2 * rows.numel(), evaluator(made.model, made.tokenizer), (None, None), began)

    sizes = sorted(map(float, options.sizes.split(",")))
    points, refused = [], []
    for method in options.methods.split(","):
        name, _, weighed = method.partition("+")
        if name == "trim":
            tries = {(t := f"trimmed vocabulary, {bits:g} bits"): (trimmed, t, bits) for bits in sizes if bits <= 16}
        else:
            found = sweep(tuple(table.shape), sizes, name)
            tries = {one.name + WORDS[weighed]: (stored, one, weighed, name in OURS) for one in found}
        for called, (make, *given) in tries.items():
            about = {"name": called, "judged": judged, "counted": len(counted)}
            try:
                points.append(kept(options.parts, about, lambda make=make, given=given: make(*given)))
            except KflatsError as error:
                refused.append(f"- not possible: {called}: {error.symptom}")
    points.sort(key=lambda p: (-p["bits"], p["name"]))
    lines = [
        [("* " if p["ours"] else "") + p["name"], f"{p['bits']:.3f}", size(p["nbytes"]), number(p["error"])]
        + [number(p["weighted"]), *cells(Fidelity(**p["fidelity"])), f"{100 * p['spearman']:.2f}"]
        for p in points
    ]
    n, d = table.shape
    whole = evaluator.original.spearman
    about = (
        f"{n:,} x {d}; weighted errors by {IMPORTANCES['counts']}; {len(counted):,} texts counted; {len(judged):,} of "
        f"{len(texts):,} sentences judged; sts: spearman of the original {100 * whole:.2f}; * is kflats'."
    )
    claims = ["bits", "wanted", "ours", "its bits", "mean cosine, Spearman lost", "held", "best baseline"]
    head = ["stored as", "bits", "bytes", "error", "weighted error", *HEAD, "spearman"]
    publish(
        "Size and quality of the embedding table of all-MiniLM-L6-v2",
        "\n\n".join([markdown(claims, held(points, whole)), about, markdown(head, lines), "\n".join(refused)]),
        options,
    )


if __name__ == "__main__":
    main()
