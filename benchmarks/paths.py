"""Question: how much less do integers lose that follow paths of a trellis, at equal bytes of file?

Every seventh of the 36 linear layers of all-MiniLM-L6-v2, which are of all kinds, under ``KroneckerFisher`` and under
``InputGram``, measured on WikiText-2 (train). Weighted squared error of ``Feedback()`` as a share of that of the same
codec on a grid, under the damped Grams that both minimise: median and worst layer. Of the two codes ``Feedback()``
keeps the better one, so that a share of 1.00 is a layer that stays on the grid.

    python benchmarks/paths.py --write benchmarks/results/paths.md
"""

from __future__ import annotations

import math
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from feedback import IMPORTANCES, measured

from kflats import SVD, Feedback, KeepDense, Recipe
from kflats.codecs import feedback
from kflats.demo import packaged_model
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.model.weights import find_weights
from kflats.planning.calibration_data import CalibrationData

BITS = (1.5, 2.0, 3.0, 4.0)
EVERY = 7
CODEC = Feedback()


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    model = load_model(packaged_model())
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][::EVERY]
    importances = {name: importance for name, (importance, _) in IMPORTANCES.items()}
    needs = frozenset[str]().union(*(importance.needs for importance in importances.values()))
    data, lines = CalibrationData(statistics=measured("train", needs)), list[dict[str, object]]()
    for name, importance in importances.items():
        tables = [data.table(model, w, Recipe(SVD(), importance, matrix_rows="out_features")) for w in weights]
        for bits in BITS:
            shares = []
            for one in tables:
                problem = Problem(one.rows, int(bits * one.numbers / 8), one.dtype.itemsize, one.weighting)
                judge = Weighting(*(damped(side) for side in (one.weighting.left, one.weighting.right)))
                ours = CODEC.encode(KeepDense(), problem, one.dtype).matrix
                with patch.object(feedback, "_PATH_BITS", (math.inf, math.inf)):
                    grid = CODEC.encode(KeepDense(), problem, one.dtype).matrix
                errors = [weighted_error(one.rows, made, judge).error for made in (ours, grid)]
                shares.append(errors[0] / errors[1])
            found = torch.tensor(shares)
            line: dict[str, object] = {"importance": name, "layers": len(shares), "bits": f"{bits:g}"}
            lines.append(line | {"median": f"{float(found.median()):.2f}", "worst": f"{float(found.max()):.2f}"})
            print(lines[-1], flush=True)
    publish("Integers on paths of a trellis and on a grid, in equal files", table(lines), options)


def damped(gram: torch.Tensor | None) -> torch.Tensor | None:
    """The Gram that the codec minimises under."""
    if gram is None:
        return None
    return gram + CODEC.damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)


if __name__ == "__main__":
    main()
