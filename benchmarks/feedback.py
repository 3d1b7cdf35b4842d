"""Question: how much less does error feedback lose than transform codes, on linear layers at equal bytes?

The 36 linear layers of all-MiniLM-L6-v2, Grams measured on WikiText-2 (train), files counted. The ratio of the squared
errors under the importance at equal bytes: median and worst layer. Below it a Gaussian matrix, in bits above the least
bits of any code for the same error.

    python benchmarks/feedback.py --write benchmarks/results/feedback.md
"""

from __future__ import annotations

from pathlib import Path

import torch
from _common import arguments, publish, table
from _sentences import data_folder
from gaussian_bound import bound_bits

from kflats import SVD, Feedback, InputGram, KeepDense, KroneckerFisher, Recipe, Transform, read_texts
from kflats.calibration.collect import measure
from kflats.calibration.counting import text_batches
from kflats.calibration.measurements import Statistics
from kflats.calibration.windows import windows
from kflats.codecs import Table
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.model.weights import find_weights
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData

BITS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
WAYS = {"feedback": (KeepDense(), Feedback()), "transform": (SVD(), Transform())}


def main() -> None:
    options = arguments(__doc__, statistics="", layers=36, importances="KroneckerFisher,InputGram")
    torch.set_num_threads(1)
    model, lines = load_model(packaged_model()), list[dict[str, object]]()
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][: options.layers]
    data = CalibrationData(statistics=measured(options.statistics))
    for importance in (KroneckerFisher(), InputGram()):
        if type(importance).__name__ not in options.importances.split(","):
            continue
        ratios: dict[float, list[float]] = {bits: [] for bits in BITS}
        for weight in weights:
            given = data.table(model, weight, Recipe(SVD(), importance, matrix_rows="out_features"))
            for bits in BITS:
                errors = {
                    name: lost(given, Recipe(method, codec=codec), bits) for name, (method, codec) in WAYS.items()
                }
                ratios[bits].append(errors["feedback"] / errors["transform"])
            print(type(importance).__name__, weight.name, [f"{ratios[bits][-1]:.3f}" for bits in BITS], flush=True)
        for bits in BITS:
            found = torch.tensor(ratios[bits])
            lines.append(
                {
                    "importance": type(importance).__name__,
                    "bits": f"{bits:g}",
                    "median ratio": f"{float(found.median()):.2f}",
                    "worst": f"{float(found.max()):.2f}",
                }
            )
    publish("Error feedback and transform codes on linear layers", table(lines) + "\n\n" + table(gaussian()), options)


def measured(file: str) -> Statistics:
    """The statistics of all layers; kept in ``file``, if one is named."""
    if file and Path(file).is_file():
        return Statistics.load(file)
    source, folder = packaged_model(), data_folder()
    if folder is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    model, tokenizer = load_model(source), load_tokenizer(source)
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")]
    texts = windows(read_texts(folder / "wikitext2" / "train.txt.gz"), tokenizer, samples=512)
    needs = KroneckerFisher().needs | InputGram().needs
    statistics = measure(model, weights, text_batches(texts.calibration, tokenizer), needs=needs, quiet=True)
    if file:
        statistics.save(file)
    return statistics


def lost(given: Table, recipe: Recipe, bits: float) -> float:
    """The weighted error in so many bits a number."""
    problem = Problem(given.rows, int(bits * given.numbers / 8), given.dtype.itemsize, given.weighting)
    return weighted_error(given.rows, recipe.encode(problem, given.dtype).matrix, given.weighting).error


def gaussian() -> list[dict[str, object]]:
    """Bits above reverse water-filling: 1024 x 512 Gaussian numbers in a metric whose spectrum falls a hundredfold."""
    gen, lines = torch.Generator().manual_seed(0), list[dict[str, object]]()
    spectrum = torch.logspace(0, -2, 512, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(512, 512, generator=gen, dtype=torch.float64)).Q
    rows = TensorRows(torch.randn(1024, 512, generator=gen))
    weighting = Weighting(right=turn * spectrum @ turn.T)
    for bits in (1.0, 2.0, 3.0, 4.0, 6.0):
        problem = Problem(rows, int(bits * 1024 * 512 / 8), 4, weighting)
        line: dict[str, object] = {"bits": f"{bits:g}"}
        for name, (method, codec) in WAYS.items():
            made = codec.encode(method, problem, torch.float32)
            share = weighted_error(rows, made.matrix, weighting).relative
            above = 8 * made.nbytes / (1024 * 512) - bound_bits(spectrum, share)
            line[f"{name}: bits above the bound"] = f"{above:.3f}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
