"""Question: does a transform code lose less where the rows have several flats, each with axes and bits of its own?

The 30522 x 384 table of all-MiniLM-L6-v2 (80 rows a column) as one flat and as 2 and 4, in the same bytes; and planted
tables of more and more rows a column, drawn from four Gaussians whose axes differ: where several flats are there, from
what length on do they pay for their axes?

    python benchmarks/coded_flats.py --write benchmarks/results/coded_flats.md
"""

from __future__ import annotations

import torch
from _common import arguments, embedding_table, markdown, publish
from torch import Tensor

from kflats import SVD, Flats, Recipe, Transform
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows

COLUMNS, FALL = 64, 4.0


def planted(rows: int, seed: int = 0) -> Tensor:
    """Four Gaussians on random axes, standard deviations falling from 1 to e^-FALL."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.exp(-FALL * torch.arange(COLUMNS) / COLUMNS)
    parts = [
        (torch.randn(rows // 4, COLUMNS, generator=gen) * sizes)
        @ torch.linalg.qr(torch.randn(COLUMNS, COLUMNS, generator=gen))[0]
        for _ in range(4)
    ]
    return torch.cat(parts)[torch.randperm(rows // 4 * 4, generator=gen)]


def measured(name: str, table: Tensor, bits: float) -> list[list[str]]:
    n, d = table.shape
    lines, first = [], 0.0
    for k in (1, 2, 4):
        method = SVD() if k == 1 else Flats(k=k)
        given = Problem(TensorRows(table), int(bits * n * d / 8), 4)
        found = Recipe(method, codec=Transform()).encode(given, torch.float32)
        error = weighted_error(table, found.matrix).relative
        first = first or error
        geometry = found.matrix.geometry
        lines.append([name, f"{n / d:.0f}", f"{bits:g}", str(k), f"{8 * found.nbytes / (n * d):.3f}", f"{error:.5f}"])
        lines[-1] += [f"**{error / first:.3f}**", str(len(geometry.parts)), str(len(geometry.classes))]
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    options = arguments(__doc__, bits="1,2", rows="2000,8000,32000,128000")
    lines = []
    for bits in map(float, options.bits.split(",")):
        lines += measured("all-MiniLM-L6-v2", embedding_table(), bits)
        for rows in map(int, options.rows.split(",")):
            lines += measured("planted", planted(rows), bits)
    head = [
        "table",
        "rows a column",
        "bits",
        "flats asked",
        "bits stored",
        "error",
        "of one flat's",
        "flats",
        "classes",
    ]
    publish(
        "Transform codes on one flat and on several",
        f"{markdown(head, lines)}\n\nFlats of fewer rows than twice their columns are given up.",
        options,
    )


if __name__ == "__main__":
    main()
