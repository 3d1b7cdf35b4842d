"""Claim: the embedding table of all-MiniLM-L6-v2 alone, no fine-tuning, in at most .70 bits per number keeps a mean
cosine of .94 and STS-B within .5 points; in 1.2 bits .98 and .2 points; in 2 bits .995. Every rival is measured beside.

Counted on WikiText-2 (train), judged on the sentences of STS-B (dev) and its Spearman correlation. Defaults are chosen
on CoLA's sentences, of which ``defaults.py`` makes a table (``--data cola`` judges on them here). The 5th percentile
and 500 rare words, which neither text shows, stand beside the means. The data come from the folder KFLATS_DATA or the
hub, as in ``fidelity.py``.

    python benchmarks/frontier_model.py --write benchmarks/results/frontier_model.md

``--out`` keeps the page and the pictures; interrupted, the same command goes on where it stopped.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from _common import arguments, markdown, publish
from fidelity import sentences

import kflats
from kflats.demo import packaged_model
from kflats.frontier.sweep import SIZES, Frontier

CLAIMS = ((0.70, 0.94, 0.5), (1.20, 0.98, 0.2), (2.0, 0.995, None))
"""Bits, least mean cosine, points of Spearman that may be lost."""


def held(found: Frontier) -> list[list[str]]:
    """For each claim our best point of at most so many bits, whether it holds, and the best rival's."""
    lines = []
    for bits, cosine, points in CLAIMS:
        ours, rival = found.best(bits, ours=True), found.best(bits, ours=False)
        if ours is None or ours.score is None or found.score is None:
            continue
        lost = 100 * (found.score - ours.score)
        holds = ours.mean_cosine >= cosine and (points is None or lost <= points)
        wanted = f"{cosine}" + ("" if points is None else f", {points} points")
        figures = f"{ours.mean_cosine:.4f}, {lost:+.2f} points"
        other = "-" if rival is None else f"{rival.name}: {rival.mean_cosine:.4f}"
        lines.append([f"{bits:g}", wanted, ours.name, f"{ours.bits:.3f}", figures, "yes" if holds else "NO", other])
    return lines


DEFAULTS = {
    "sizes": ",".join(map(str, (*SIZES[:3], 1.2, *SIZES[3:]))),
    "methods": "",
    "judged": 0,
    "data": "stsb",
}


def main() -> None:
    options = arguments(__doc__, out="", **DEFAULTS)
    chosen = "".join(f' --{k} "{v}"' for k, v in vars(options).items() if k in DEFAULTS and v != DEFAULTS[k])
    texts = sentences(options.data)
    every = max(1, len(texts) // options.judged) if options.judged else 1
    folder = Path(os.environ.get("KFLATS_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data"))
    found = kflats.frontier(
        packaged_model(),
        texts=sentences("wikitext2"),
        judge=texts[::every],
        sizes=[float(part) for part in options.sizes.split(",")],
        methods=options.methods.split(",") if options.methods else None,
        task="sts",
        data=folder if folder.is_dir() else None,
        out=options.out or Path(tempfile.gettempdir()) / "kflats-frontier",
        force=True,
    )
    judged = f"**A sample** of {len(texts[::every])} of {len(texts)} sentences" if every > 1 else "All sentences"
    tried = [
        f"{part} chosen" if vars(options)[part] != DEFAULTS[part] else f"all {part}" for part in ("methods", "sizes")
    ]
    said = f"{judged}, {', '.join(tried)}.\n\n"
    head = ["bits", "wanted", "ours", "its bits", "mean cosine, Spearman lost", "held", "best rival"]
    publish(
        "Size and quality of the embedding table of all-MiniLM-L6-v2",
        f"python benchmarks/frontier_model.py{chosen} --write benchmarks/results/frontier_model.md",
        f"{said}{markdown(head, held(found))}\n\n" + found.markdown().split("\n", 2)[2],
        options.write,
    )


if __name__ == "__main__":
    main()
