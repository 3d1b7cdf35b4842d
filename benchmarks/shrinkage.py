"""Question: what would a factor for each input take off the error of codes with error feedback?

``Feedback`` moves the value of each symbol to the mean of its interval, with one number for each distribution, inside
the recursion. A least-squares factor for each input (LMMSE; WaterSIC, arXiv:2603.04956) would come after it, and be
stored with each column's step. Here it is fitted to the targets of finished codes: the share of the weighted squared
error that it takes, median and largest of the 36 linear layers of all-MiniLM-L6-v2 under ``KroneckerFisher``, or of
every 7th (``--every 7``), which are of all kinds. A fit of one number for n outputs takes about 1 / n of any error:
.0026 where n is 384.

The second table has it inside of the recursion, under ``InputGram``, where columns are rounded one after another: each
column is multiplied by its factor before its error is passed on. It is the share that this takes off the error of
the recursion without factors, with the same prices of bits. (Under two Grams no column is complete before the next
one begins, so that there is no such factor.)

    python benchmarks/shrinkage.py --every 7 --write benchmarks/results/shrinkage.md
"""

from __future__ import annotations

import torch
from _common import arguments, publish, table
from feedback import measured

from kflats import Feedback, InputGram, KeepDense, KroneckerFisher, Recipe
from kflats.codecs.feedback import _Source
from kflats.demo import packaged_model
from kflats.io import load_model
from kflats.model.weights import find_weights
from kflats.numerics.coding.feedback import Rounding, ToRound, rounded_together
from kflats.planning.calibration_data import CalibrationData

POWERS = (-1.5, -0.5, 0.75, 2.25)
"""Binary logarithms of the step, in root mean squares of the numbers."""
PATHS = 0.0
"""Below, integers follow paths of a trellis, as kflats chooses at these rates; above, they lie on a grid."""


def main() -> None:
    options = arguments(__doc__, every=1)
    torch.set_num_threads(1)
    model = load_model(packaged_model())
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][:: options.every]
    data = CalibrationData(statistics=measured("train", KroneckerFisher().needs))
    recipe = Recipe(KeepDense(), KroneckerFisher(), matrix_rows="out_features")
    bits, taken = ({power: list[float]() for power in POWERS} for _ in range(2))
    for weight in weights:
        given = data.table(model, weight, recipe)
        for power in POWERS:
            paths = power < PATHS
            source = _Source.of(given.rows, given.weighting, Feedback().damping, paths=paths)
            c = source.size * 2.0**power / (2 if paths else 1)  # at equal rates steps of paths are half as large
            seen = source.likely(c, given.dtype)
            for _ in range(2):
                how = source.path_rounding(seen, given.dtype) if paths else source.rounding(seen, given.dtype)
                (made,) = rounded_together([source.to_round(c, given.dtype, how)])
                code, seen = source.code(c, given.dtype, how, made), made.targets
            _, row_steps, column_steps = source.steps(c, given.dtype)
            values = (code.stored.matrix.dense() / torch.outer(row_steps, column_steps)).double()
            sizes = torch.outer(source.rows.scale * row_steps, source.columns.scale * column_steps).square()
            factor = (sizes * made.targets * values).sum(0) / (sizes * values.square()).sum(0).clamp_min(1e-12)
            left = float((sizes * (made.targets - values * factor).square()).sum())
            taken[power].append(1 - left / float((sizes * (made.targets - values).square()).sum()))
            bits[power].append(8 * code.nbytes / given.numbers)
        print(weight.name, [f"{taken[power][-1]:.4f}" for power in POWERS], flush=True)
    lines = [
        {
            "integers": "along paths" if power < PATHS else "on a grid",
            "bits a number, median": f"{float(torch.tensor(bits[power]).median()):.2f}",
            "share taken, median": f"{float(torch.tensor(taken[power]).median()):.4f}",
            "largest": f"{max(taken[power]):.4f}",
        }
        for power in POWERS
    ]
    publish(
        "A factor for each input, after error feedback", f"{table(lines)}\n\n{table(inside(options.every))}", options
    )


def inside(every: int) -> list[dict[str, object]]:
    """The share that factors take inside of the recursion, for each step."""
    model = load_model(packaged_model())
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][::every]
    data = CalibrationData(statistics=measured("train", InputGram().needs))
    recipe, lines = Recipe(KeepDense(), InputGram(), matrix_rows="out_features"), list[dict[str, object]]()
    tables = [data.table(model, weight, recipe) for weight in weights]
    for power in POWERS:
        bits, taken = list[float](), list[float]()
        for given in tables:
            source = _Source.of(given.rows, given.weighting, Feedback().damping)
            c = source.size * 2.0**power
            seen = source.likely(c, given.dtype)
            for _ in range(2):
                how = source.rounding(seen, given.dtype)
                to_round = source.to_round(c, given.dtype, how)
                (made,) = rounded_together([to_round])
                seen = made.targets
            bits.append(8 * source.code(c, given.dtype, how, made).nbytes / given.numbers)
            without, with_factors = (in_turn(to_round, how, factors=factors) for factors in (False, True))
            taken.append(1 - with_factors / without)
        line: dict[str, object] = {"integers": "on a grid, InputGram"}
        line["bits a number, median"] = f"{float(torch.tensor(bits).median()):.2f}"
        line |= {"share taken, median": f"{float(torch.tensor(taken).median()):.4f}", "largest": f"{max(taken):.4f}"}
        lines.append(line)
        print(line, flush=True)
    return lines


def in_turn(one: ToRound, how: Rounding, *, factors: bool) -> float:
    """The error of columns that are rounded one after another, each with a factor of its own or without."""
    columns, couplings, error = one.columns, one.columns.couplings, 0.0
    assert couplings is not None
    steps, sizes = torch.outer(one.row_steps, one.column_steps), one.rows.scale.unsqueeze(1)
    errors = torch.zeros(one.matrix.shape, dtype=torch.float64)  # in the order of rounding
    for place, column in enumerate(columns.order.tolist()):
        target = one.matrix[:, column].double() + errors[:, :place] @ couplings[place, :place]
        own = Rounding(how.contexts[:, [column]], how.shrink, how.up, how.live)
        step = steps[:, [column]]
        values = own.values(own.levels((target.unsqueeze(1) / step).float())) * step
        weighed = sizes.square() * values
        factor = float((weighed * target.unsqueeze(1)).sum() / (weighed * values).sum().clamp_min(1e-30))
        made = values.squeeze(1) * (factor if factors and bool(values.any()) else 1.0)
        errors[:, place] = one.matrix[:, column].double() - made
        error += float((sizes.squeeze(1) * columns.scale[column] * (target - made)).square().sum())
    return error


if __name__ == "__main__":
    with torch.no_grad():
        main()
