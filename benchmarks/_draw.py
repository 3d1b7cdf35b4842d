"""Draw a fidelity table as the README's picture: bytes of the table against the distance to the original.

python benchmarks/_draw.py benchmarks/results/fidelity_stsb.md docs/fidelity.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LINES = {
    "SVD": ("#9aa0a6", "plain SVD"),
    "MESSI as published (k=5)": ("#c58a3a", "MESSI as published"),
    "SVD + counts": ("#6b8e9e", "SVD + token counts"),
    "kflats default: counts": ("#1a6fb5", "kflats"),
    "kflats default, float16 factors": ("#0b3d66", "kflats, float16 factors"),
    "kflats, no data: Zipf prior": ("#58a6dd", "kflats without any data"),
    "8-bit rows (what a user picks today)": ("#b3261e", "8-bit rows"),
    "4-bit rows (what a user picks today)": ("#e07a72", "4-bit rows"),
}


def main(table: Path, picture: Path) -> None:
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.read_text().splitlines() if line[:1] == "|"]
    points: dict[str, list[tuple[float, float]]] = {}
    for _, name, size, mean, *_ in cells[2:]:
        points.setdefault(name, []).append((float(size.split()[0]), max(1 - float(mean), 5e-5)))
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=160)
    for name, (colour, label) in LINES.items():
        if name in points:
            x, y = zip(*sorted(points[name]), strict=True)
            axes.plot(x, y, "o-", color=colour, label=label, markersize=5)
    axes.set_yscale("log")
    axes.set_xlabel("embedding table, MB (the original has 46.9)")
    axes.set_ylabel("1 - mean cosine to the original\n(lower is better)")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncol=2)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
