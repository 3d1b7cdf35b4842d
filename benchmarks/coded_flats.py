"""Question: does a transform code lose less where the rows have several flats, each with axes and bits of its own?

The 30522 x 384 table of all-MiniLM-L6-v2 (80 rows a column) as one flat and as 2 and 4, in the same bytes; and planted
tables of more and more rows a column, drawn from four Gaussians whose axes differ: where several flats are there, from
what length on do they pay for their axes?

    python benchmarks/coded_flats.py --write benchmarks/results/coded_flats.md
"""

from __future__ import annotations

import torch
from _common import arguments, embedding_table, publish, table
from coded_flats_long import line, measured
from torch import Tensor

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


def main() -> None:
    options = arguments(__doc__, bits="1,2", rows="2000,8000,32000,128000")
    lines = []
    for bits in map(float, options.bits.split(",")):
        tables = [("all-MiniLM-L6-v2", embedding_table())]
        tables += [("planted", planted(rows)) for rows in map(int, options.rows.split(","))]
        for name, rows in tables:
            fits = {k: measured(rows, bits, k) for k in (1, 2, 4)}
            lines += [line(name, rows, bits, k, fit, fits[1]["error"]) for k, fit in fits.items()]
            print(lines[-3:], flush=True)
    body = f"{table(lines)}\n\nFlats of fewer rows than twice their columns are given up."
    publish("Transform codes on one flat and on several", body, options)


if __name__ == "__main__":
    main()
