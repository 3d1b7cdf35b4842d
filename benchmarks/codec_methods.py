"""Question: codecs store what any method makes; which of them pays, on a real 30522 x 384 table?

Squared error as a share of the table's, unweighted, in at most so many bits a number of the file, everything counted.
Beside it the bits that the file has: a rank more may not fit, and the coder makes fixed rates smaller.

    python benchmarks/codec_methods.py --write benchmarks/results/codec_methods.md
"""

from __future__ import annotations

import time
from typing import Any

from _common import arguments, embedding_table, markdown, publish

from kflats import (
    MESSI,
    SVD,
    Flats,
    Float,
    Integer,
    KflatsError,
    KMeansSVD,
    Recipe,
    RobustSVD,
    Subspace,
    Transform,
)
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows

METHODS: dict[str, Any] = {
    "SVD": SVD(),
    "Flats, k=5": Flats(k=5),
    "MESSI, k=5": MESSI(5, restarts=1),
    "KMeansSVD, k=5": KMeansSVD(5),
    "RobustSVD, p=1": RobustSVD(p=1.0),
    "Subspace, q=1": Subspace(),
}
CODECS = (Float(), Float("float16"), Integer(bits=8), Integer(bits=4, group=64), Transform())


def main() -> None:
    options = arguments(__doc__, bits="2")
    table = embedding_table()
    rows = TensorRows(table)
    heads, lines = ["method", "bits", *map(named, CODECS)], []
    for bits in map(float, options.bits.split(",")):
        for name, method in METHODS.items():
            line = [name, f"{bits:g}"]
            for codec in CODECS:
                start = time.perf_counter()
                line.append(stored(method, codec, rows, int(bits * table.numel() / 8)))
                print(name, bits, codec, line[-1], f"{time.perf_counter() - start:.1f} s", flush=True)
            lines.append(line)
    title = "Codecs on methods: squared error as a share of the table's (bits in the file)"
    publish(title, markdown(heads, lines), options)


def named(codec: Any) -> str:
    """As the head of its column."""
    return "float16" if codec == Float("float16") else type(codec).__name__


def stored(method: Any, codec: Any, rows: TensorRows, nbytes: int) -> str:
    """The error and the bits of one file, or what is in the way."""
    try:
        recipe = Recipe(method, codec=codec)
        if isinstance(codec, Float):
            dtype = codec.torch_dtype(rows.matrix.dtype)
            made = method.fit(Problem(rows, nbytes, dtype.itemsize))
            matrix = made.matrix.to(dtype)
            size = matrix.nbytes
        else:
            made = recipe.codec.encode(recipe.method, Problem(rows, nbytes, 4), rows.matrix.dtype)
            matrix, size = made.matrix, made.nbytes
    except KflatsError as refused:
        return "refused" if "cannot store" in refused.symptom else "does not fit"
    return f"{weighted_error(rows, matrix).relative:.3f} ({8 * size / rows.matrix.numel():.2f})"


if __name__ == "__main__":
    main()
