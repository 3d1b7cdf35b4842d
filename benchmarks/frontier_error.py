"""Question: at equal bytes, what is left of the best baseline's squared error on a real 30522 x 384 embedding table?

Wanted: at most .75 of it at 3 bits per number and below, and nowhere from .5 to 16 bits more than all of it; unweighted
against unweighted, and under token counts (WikiText-2 train) weighted against weighted. Baselines that can weigh rows
do: k-means of PQ and OPQ with weights, rotations and RQ trained on rows drawn by weight, factors by weighted fits;
roundings are as they are.

Ours is the stream that a file holds, never above the bytes asked: ``Transform``, whose finest steps take 9 to 11 bits,
and from 16 bits on the table itself in float16. Baselines have sizes of their own. In the first table their error at
our bytes is read between their two neighbours, on a line of log error against bits. Storing some rows as one neighbour
and the rest as the other would reach the straight line of the errors themselves, which lies higher: so they are given
more than they can do. A curve is read for each number of bits a code, and the lowest taken; a curve of codebooks is not
read beyond its largest. In the second table every baseline's point up to 16 bits keeps its own size: ours is made again
at the bytes of roundings, and at those of another point unless one of ours of fewer bytes is what is wanted already.

    python benchmarks/frontier_error.py --write benchmarks/results/frontier_error.md

Points are kept in the folder ``--parts``, so that an interrupted run resumes.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _common import arguments, embedding_table, kept, markdown, publish
from _sentences import sentences, token_rows
from frontier.baseline import Baseline
from frontier.baselines import Half, Transformed
from frontier.sweeps import FAMILIES, sweep
from gaussian_bound import bound_error
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.importance import TokenCounts
from kflats.importance.protocol import Weighting

FIXED = ("fp16", "absmax rows", "absmax groups", "torchao", "rotation")
"""Families whose sizes cannot be chosen."""
FINEST, LARGEST = 12.0, 16.0
"""Bits a number: above the first, steps of ``Transform`` get no finer; above the second nothing is compared."""
LIMITS = """RQ has codebooks of whole rows up to .9 bits a number, OPQ codes of 8 bits after a rotation found in 10
rounds on 8192 rows: larger or longer ones were not measured, and no curve of codebooks is read beyond its largest."""


@dataclass(frozen=True)
class Point:
    name: str
    family: str
    curve: str
    bits: float
    error: float
    seconds: float


def measured(baseline: Baseline, table: Tensor, weights: Tensor | None) -> dict[str, Any]:
    """The fields of its ``Point``, or none of them where the baseline cannot have this size."""
    began = time.process_time()
    weighting = None if weights is None or "rows" not in baseline.accepts else Weighting(left=weights)
    try:
        coded = baseline.code(table, weighting)
    except KflatsError as error:
        print(f"{baseline.name}: {error}", flush=True)
        return {}
    return {"name": baseline.name, "family": baseline.family, "curve": str(baseline.curve), "bits": coded.bits,
            "error": coded.error(table, weights), "seconds": time.process_time() - began}  # fmt: skip


def read(points: list[Point], bits: float) -> tuple[float, str] | None:
    """The error of a curve at ``bits``, and where from; None where it has no point that small, or no codebooks so
    large."""
    ordered = sorted(points, key=lambda p: p.bits)
    below, above = [p for p in ordered if p.bits <= bits], [p for p in ordered if p.bits > bits]
    if not below:
        return None
    if not above:
        last = below[-1]
        if last.curve.startswith("faiss") and bits > 1.05 * last.bits:
            return None  # no larger one was measured
        # A fixed size, or the end of a curve: what it has at fewer bytes it has at these.
        return last.error, f"{last.name} at {last.bits:.2f}"
    left, right = below[-1], above[0]
    at = (bits - left.bits) / (right.bits - left.bits)
    error = math.exp((1 - at) * math.log(left.error) + at * math.log(right.error))
    return min(error, left.error), f"{left.name} .. {right.name}"


def lowest(bits: float, curves: dict[str, list[Point]]) -> list[tuple[float, str, str]]:
    """(error at ``bits``, family, where it was read) of each family that has it, least first."""
    best: dict[str, tuple[float, str, str]] = {}
    for points in curves.values():
        family, found = points[0].family, read(points, bits)
        if found is not None and (family not in best or found[0] < best[family][0]):
            best[family] = (found[0], family, found[1])
    return sorted(best.values())


def main() -> None:
    options = arguments(
        __doc__,
        bits="16,12,8,6,4,3,2,1.5,1,0.7,0.5",
        families=",".join(FAMILIES),
        parts="",
        rows=0,
        weighted="alike,token counts",
    )
    sizes = sorted(map(float, options.bits.split(",")), reverse=True)
    table, counted = loaded(options.rows)
    n, d = table.shape
    about = hashlib.sha256(table.numpy().tobytes() + counted.numpy().tobytes()).hexdigest()
    baselines = [one for name in options.families.split(",") for one in sweep((n, d), sizes, name, above=True)]
    first, second, every = [], [], []
    for name in options.weighted.split(","):
        weights = {"alike": None, "token counts": counted}[name]
        w = torch.ones(n, dtype=torch.float64) if weights is None else weights.double()
        spectrum = torch.linalg.eigvalsh((table.double() * w.unsqueeze(1)).T @ table.double()).clamp_min(0)

        def measure(one: Baseline, name: str = name, weights: Tensor | None = weights) -> Point | None:
            point = kept(options.parts, (about, repr(one), name), lambda: measured(one, table, weights))
            if not point:
                return None
            found = Point(**point)
            line = [name, found.name, f"{found.bits:.3f}", f"{found.error:.3g}", f"{found.seconds:.0f} s"]
            every.extend([line] if line not in every else [])
            return found

        def made(bits: float, measure: Callable[[Baseline], Point | None] = measure) -> Point | None:
            """Ours of the least error in at most ``bits``."""
            ways: list[Baseline] = [Transformed(min(bits, FINEST))]
            ways += [Half("kflats Dense, float16")] if bits >= LARGEST else []
            return min((p for way in ways if (p := measure(way)) is not None), key=lambda p: p.error, default=None)

        ours = {bits: point for bits in sizes if (point := made(bits)) is not None}
        curves: dict[str, list[Point]] = defaultdict(list)
        points = [found for one in baselines if (found := measure(one)) is not None]
        for point in points:
            curves[point.curve].append(point)
        for bits, own in ours.items():
            bound = bound_error(spectrum, own.bits, None if weights is None else w)
            for place, (error, family, source) in enumerate(lowest(own.bits, curves)):
                share = own.error / error
                cells = [name, f"{own.bits:.3f}", family, source, f"{error:.3g}", f"{own.error:.3g}", f"{share:.3f}"]
                first.append([*cells, *([held(bits, share), f"{bound:.3g}"] if not place else ["", ""])])
        for point in sorted((p for p in points if p.bits <= LARGEST), key=lambda p: -p.bits):
            smaller = [p for p in ours.values() if p.bits <= point.bits]
            at = min(smaller, key=lambda p: p.error, default=None)
            if point.family in FIXED or at is None or held(point.bits, at.error / point.error) != "yes":
                at = made(point.bits)
            if at is None:
                second.append([name, f"{point.bits:.3f}", point.name, f"{point.error:.3g}", "none", "", "", "NO"])
                continue
            share = at.error / point.error
            cells = [name, f"{point.bits:.3f}", point.name, f"{point.error:.3g}", f"{at.bits:.3f}", f"{at.error:.3g}"]
            second.append([*cells, f"{share:.3f}", held(point.bits, share)])
    answers = [line[7] for line in first if line[7]]
    one = ["weights", "bits", "baseline", "read from", "its error", "ours", "ours / its", "held", "Gaussian bound"]
    two = ["weights", "bits", "baseline", "its error", "our bits", "ours", "ours / its", "held"]
    own_sizes = [line[-1] for line in second]
    publish(
        "Squared error of a coded embedding table against every baseline at the same bytes",
        f"{n} x {d}; error = weighted squared error / weighted squared norm; baselines best first at each size.\n"
        f"At {answers.count('yes')} of {len(answers)} sizes ours is what is wanted of the best baseline's, at "
        f"{own_sizes.count('yes')} of {len(own_sizes)} baselines' own sizes of that baseline's.\n\n{LIMITS}\n\n"
        f"{markdown(one, first)}\n\nEvery baseline at its own bytes, ours in at most as many:\n\n"
        f"{markdown(two, second)}\n\n"
        f"Every point:\n\n{markdown(['weights', 'stored as', 'bits', 'error', 'CPU time'], every)}",
        options,
    )


def loaded(rows: int) -> tuple[Tensor, Tensor]:
    """The table and how much its rows count by WikiText-2; ``rows`` of them, evenly spaced, for a trial."""
    table = embedding_table()
    weights = TokenCounts().weigh(token_rows(len(table), sentences("wikitext2"))).left
    chosen = torch.arange(len(table)) if not rows else torch.arange(rows) * len(table) // rows
    return table[chosen].contiguous(), weights[chosen]


def held(bits: float, share: float) -> str:
    """Whether ``share`` of a baseline's error is what is wanted at this size."""
    return "yes" if share <= (0.75 if bits <= 3.05 else 1.0) else "NO"


if __name__ == "__main__":
    main()
