"""Question: how much less does error feedback lose than transform codes, on linear layers at equal bytes?

The 36 linear layers of all-MiniLM-L6-v2, files counted. Codes are made with Grams measured on WikiText-2 (train), and
judged by Grams measured on WikiText-2 (test), under the same importance. The ratio of their squared errors: median and
worst layer, with and without the damping of error feedback. Below it a Gaussian matrix, in bits above the least bits of
any code for the same error.

    python benchmarks/feedback.py --write benchmarks/results/feedback.md
"""

from __future__ import annotations

import torch
from _common import arguments, publish, table
from _sentences import data_folder
from gaussian_bound import bound_bits

from kflats import SVD, Feedback, InputGram, KeepDense, KroneckerFisher, Recipe, Transform, read_texts
from kflats.calibration.collect import measure
from kflats.calibration.counting import text_batches
from kflats.calibration.measurements import Statistics
from kflats.calibration.windows import windows
from kflats.codecs import Codec, Table
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Method, Problem
from kflats.model.weights import find_weights
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData

BITS = (1.0, 2.0, 3.0, 4.0)
TRANSFORM = (SVD(), Transform())
FEEDBACK = {"median ratio": Feedback(), "without damping": Feedback(damping=0.0)}
NEEDS = KroneckerFisher().needs | InputGram().needs


def main() -> None:
    options = arguments(__doc__, layers=36, importances="KroneckerFisher,InputGram")
    torch.set_num_threads(1)
    model, lines = load_model(packaged_model()), list[dict[str, object]]()
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][: options.layers]
    train, test = (CalibrationData(statistics=measured(split)) for split in ("train", "test"))
    for importance in (KroneckerFisher(), InputGram()):
        if type(importance).__name__ not in options.importances.split(","):
            continue
        recipe = Recipe(SVD(), importance, matrix_rows="out_features")
        ratios: dict[tuple[float, str], list[float]] = {(bits, name): [] for bits in BITS for name in FEEDBACK}
        for weight in weights:
            given, judge = (data.table(model, weight, recipe) for data in (train, test))
            for bits in BITS:
                least = lost(given, judge, *TRANSFORM, bits)
                for name, codec in FEEDBACK.items():
                    ratios[bits, name].append(lost(given, judge, KeepDense(), codec, bits) / least)
            print(type(importance).__name__, weight.name, [f"{r[-1]:.3f}" for r in ratios.values()], flush=True)
        for bits in BITS:
            line: dict[str, object] = {"importance": type(importance).__name__, "bits": f"{bits:g}"}
            for name in FEEDBACK:
                found = torch.tensor(ratios[bits, name])
                line |= {name: f"{float(found.median()):.2f}", f"{name}, worst": f"{float(found.max()):.2f}"}
            lines.append(line)
    publish("Error feedback and transform codes on linear layers", table(lines) + "\n\n" + table(gaussian()), options)


def measured(split: str) -> Statistics:
    """The statistics of all layers on a split of WikiText-2."""
    source, folder = packaged_model(), data_folder()
    if folder is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    model, tokenizer = load_model(source), load_tokenizer(source)
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")]
    texts = windows(read_texts(folder / "wikitext2" / f"{split}.txt.gz"), tokenizer, samples=512)
    return measure(model, weights, text_batches(texts.calibration, tokenizer), needs=NEEDS, quiet=True)


def lost(given: Table, judge: Table, method: Method, codec: Codec, bits: float) -> float:
    """The weighted error, as ``judge`` weighs it, in so many bits a number."""
    problem = Problem(given.rows, int(bits * given.numbers / 8), given.dtype.itemsize, given.weighting)
    return weighted_error(given.rows, codec.encode(method, problem, given.dtype).matrix, judge.weighting).error


def gaussian() -> list[dict[str, object]]:
    """Bits above reverse water-filling: 1024 x 512 Gaussian numbers in a metric whose spectrum falls a hundredfold."""
    ways: dict[str, tuple[Method, Codec]] = {"feedback": (KeepDense(), Feedback()), "transform": TRANSFORM}
    gen, lines = torch.Generator().manual_seed(0), list[dict[str, object]]()
    spectrum = torch.logspace(0, -2, 512, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(512, 512, generator=gen, dtype=torch.float64)).Q
    rows = TensorRows(torch.randn(1024, 512, generator=gen))
    weighting = Weighting(right=turn * spectrum @ turn.T)
    for bits in (1.0, 2.0, 3.0, 4.0, 6.0):
        problem = Problem(rows, int(bits * 1024 * 512 / 8), 4, weighting)
        line: dict[str, object] = {"bits": f"{bits:g}"}
        for name, (method, codec) in ways.items():
            made = codec.encode(method, problem, torch.float32)
            share = weighted_error(rows, made.matrix, weighting).relative
            above = 8 * made.nbytes / (1024 * 512) - bound_bits(spectrum, share)
            line[f"{name}: bits above the bound"] = f"{above:.3f}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
