"""Transform coding of a matrix under row weights, to a budget.

    minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= budget

Principal axes of the weighted rows; in each class of rows a step proportional to w^(-1/2); entropy-constrained
quantizers with one trade between squared steps and bits everywhere, which is what reverse water-filling asks for: at
one slope in every coordinate, those below the water level fall into the dead zone by themselves (Gersho and Gray,
Vector Quantization and Signal Compression, ch. 8; Goyal, Theoretical foundations of transform coding, IEEE Signal
Processing Magazine 18, 2001). One number, the step, then sets the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.frame import Source, source_of
from kflats.numerics.coding.sizing import at_size, at_step, estimate
from kflats.numerics.coding.tables import FARTHEST
from kflats.numerics.coding.transform import TransformCode
from kflats.numerics.rows import Rows, as_rows, check_finite, check_weights

_ROWS_A_CLASS = 96
"""A class of fewer rows does not pay for itself, and is not tried."""


def transform_code(
    matrix: Tensor | Rows,
    *,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    nbytes: int | None = None,
    bits: float | None = None,
    step: float | None = None,
    classes: int = 32,
) -> TransformCode:
    """Code ``matrix`` (n, d) in ``nbytes`` stored bytes, in ``bits`` per weight, or at a given ``step``: one of them.

    Args:
        matrix: a tensor of any float type, or any ``Rows``.
        weights: (n,) row weights; None: all alike. A row of weight 0 gets next to no bits.
        right: a Gram R R' of the columns, (d, d), or its diagonal (d,).
        nbytes: ``TransformCode.stored_bytes`` is at most this, and at least 99 % of it unless the matrix is coded as
            finely as 16383 steps to either side allow in less.
        step: the step of a row of weight 1, in the matrix' unit. Codes of several matrices at one step lose the
            same for the last bit, so that together they are optimal. Weights and metric are then taken as they are;
            elsewhere only their ratios count.
        classes: at most so many classes of rows, 1 to 256.

    A row is coded in at most 16383 steps to either side of its class' centre. Rows that are too long for the step of
    the others are apart, in classes of coarser steps: each loses about 1e-4 of its length, which may be most of the
    error, and the others are coded as finely as without them. With ``classes=1`` the longest row sets the
    least step of all.

    Choose it for whatever is to be small on disk: from half a bit to about eight per weight. Nothing is random.

    Raises:
        KflatsError: NaN or infinite values, weights or metrics that are none, no or several targets, a budget below
            what labels and distributions alone need, or one for which floats are the better choice.

    >>> import torch
    >>> matrix = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    >>> code = transform_code(matrix, bits=3)
    >>> code.shape, code.stored_bytes <= 500 * 8 * 3 / 8
    ((500, 8), True)
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    kind, value = _target(nbytes, bits, step)
    if not isinstance(classes, int) or not 1 <= classes <= 256:
        raise KflatsError(f"{classes!r} classes of rows are not supported", hint="a whole number from 1 to 256")
    check_finite(rows)
    check_weights(weights, n)
    budget = int(value) if kind == "nbytes" else int(value * n * d / 8)
    target = (kind, value) if kind == "step" else ("bits", 8 * budget / (n * d))
    source = classed(source_of(rows, weights, right, target), classes)
    if kind != "step":
        return at_size((source,), budget)[0]
    if value < source.finest:
        raise KflatsError(
            f"a step of {value:.3g} is too fine for every row: {FARTHEST} steps to either side can be coded",
            hint=f"a step of {source.finest:.3g} or more, or leave the matrix in floats",
        )
    return at_step(source, value)


@dataclass(frozen=True)
class Rate:
    """A code at ``step``: its ``rank``, its ``nbytes``, and the weighted squared ``error`` it leaves."""

    step: float
    rank: int
    nbytes: int
    error: float


def transform_rates(
    matrix: Tensor | Rows,
    steps: Sequence[float],
    *,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    classes: int = 32,
) -> Iterator[Rate]:
    """Bytes and errors of codes of ``matrix`` at several ``steps``, from a sample of at most 4096 rows of all classes.

    Matrices of up to 4096 rows are counted whole; sizes and errors of longer ones are right within some per cent. Rows
    are parted into classes once, for the middle step. Steps that are too fine for every row are left out. Choose it to
    compare sizes without coding the whole matrix at each.

    Raises:
        KflatsError: as ``transform_code``.

    >>> import torch
    >>> matrix = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    >>> [rate.nbytes > 500 for rate in transform_rates(matrix, [0.1, 1.0, 8.0])]
    [True, True, False]
    """
    rows = as_rows(matrix)
    for step in steps:
        _target(None, None, step)
    check_finite(rows)
    check_weights(weights, rows.shape[0])
    middle = sorted(steps)[len(steps) // 2]
    source = classed(source_of(rows, weights, right, ("step", middle)), classes)
    sample, scale = source.sample()
    for step in steps:
        if step >= source.finest:
            found = estimate(sample, scale, step)
            yield Rate(step, len(found.basis.levels), math.ceil(found.size), found.error + source.outside(step))


def _target(nbytes: int | None, bits: float | None, step: float | None) -> tuple[str, float]:
    given = [(name, v) for name, v in (("nbytes", nbytes), ("bits", bits), ("step", step)) if v is not None]
    if len(given) != 1:
        raise KflatsError(
            "a transform code needs one target",
            hint="nbytes=, bits= (per weight) or step=",
            command="a budget: --keep or --size",
        )
    name, value = given[0]
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise KflatsError(f"a target of {name}={value!r} is not possible", hint="a finite number above zero")
    return name, float(value)


def classed(source: Source, classes: int) -> Source:
    """The source with those classes that cost least, error and bytes together, at the step where the search begins."""
    if source.first_step == 0 or classes == 1:
        return source
    ways = source.candidates(min(classes, max(1, len(source.labels) // _ROWS_A_CLASS)), classes)
    if len(ways) == 1:
        return ways[0]
    step = max(source.first_step, *(way.finest for way in ways))
    return ways[min(range(len(ways)), key=lambda i: estimate(*ways[i].sample(), step).price)]
