"""Question: how should numbers be rounded that get less than a bit each?

Every third of the 36 linear layers of all-MiniLM-L6-v2 under ``InputGram``, and every sixth under ``KroneckerFisher``,
measured on WikiText-2 (train). Weighted squared errors at equal bytes, under the damped Grams that the codec minimises,
as shares of that by the second prices of bits: median, least and largest. "first prices": bits are priced by the
integers that are chosen without prices. "nearest": numbers are rounded to the nearest integers. "Feedback()": the code
that is kept, which is the best of the three below .75 bits.

    python benchmarks/few_bits.py --write benchmarks/results/few_bits.md
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from feedback import IMPORTANCES, measured
from paths import CODEC, damped

from kflats import SVD, KeepDense, Recipe
from kflats.codecs import Table, feedback
from kflats.demo import packaged_model
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.model.weights import find_weights
from kflats.numerics.coding.feedback import Rounding
from kflats.planning.calibration_data import CalibrationData

BITS = (0.15, 0.25, 0.5, 0.7, 1.0, 1.3)
EVERY = {"InputGram": 3, "KroneckerFisher": 6}
ALONE = {"second prices": 2, "first prices": 1, "nearest": 0}


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    model = load_model(packaged_model())
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")]
    needs = frozenset[str]().union(*(importance.needs for importance, _ in IMPORTANCES.values()))
    data, lines = CalibrationData(statistics=measured("train", needs)), list[dict[str, object]]()
    for name, (importance, _) in IMPORTANCES.items():
        recipe = Recipe(SVD(), importance, matrix_rows="out_features")
        tables = [data.table(model, w, recipe) for w in weights[:: EVERY[name]]]
        for bits in BITS:
            found = [errors(one, bits) for one in tables]
            line: dict[str, object] = {"importance": name, "layers": len(found), "bits": f"{bits:g}"}
            for way in found[0]:
                shares = torch.tensor([one[way] / one["second prices"] for one in found])
                if way != "second prices":
                    line[way] = f"{float(shares.median()):.3f} ({float(shares.min()):.2f} to {float(shares.max()):.2f})"
            lines.append(line)
            print(lines[-1], flush=True)
    publish("Ways to round numbers that get less than a bit each", table(lines), options)


def errors(given: Table, bits: float) -> dict[str, float]:
    """Of one layer by each way, in files of equal size."""
    judge = Weighting(*(damped(side) for side in (given.weighting.left, given.weighting.right)))
    problem = Problem(given.rows, int(bits * given.numbers / 8), given.dtype.itemsize, given.weighting)

    def lost() -> float:
        made = CODEC.encode(KeepDense(), problem, given.dtype).matrix
        return weighted_error(given.rows, made, judge).error

    rounding: Callable[..., Rounding] = feedback._Source.rounding
    found = dict[str, float]()
    with patch.object(feedback, "_FEW_BITS", 0.0):
        for way, times in ALONE.items():
            with patch.object(feedback._Source, "rounding", lambda *given, own=times, **_: rounding(*given, own)):
                found[way] = lost()
    found["Feedback()"] = lost()
    return found


if __name__ == "__main__":
    main()
