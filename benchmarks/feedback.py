"""Question: how much less does error feedback lose than transform codes, on linear layers at equal bytes?

The 36 linear layers of all-MiniLM-L6-v2, files counted; every fifth of them under ``KroneckerFisher``. Codes are made
with Grams measured on WikiText-2 (train), and judged twice: by these Grams ("same"), and by Grams measured on
WikiText-2 (test) under the same importance ("held out"). Weighted squared errors: of ``SVD`` and ``Transform`` as a
share of the layer (median, same Grams), and the ratio of those of error feedback to them: median and worst layer, with
the damping of error feedback and without it.

Below it a Gaussian matrix in a known metric, in bits above the least bits of any code for the same error: of the
integers alone, and of all that a file holds (with distributions, steps and classes of rows).

    python benchmarks/feedback.py --write benchmarks/results/feedback.md
"""

from __future__ import annotations

import struct
from functools import partial

import torch
from _common import arguments, kept, publish, table
from _sentences import data_folder
from gaussian_bound import bound_bits
from torch import nn

from kflats import SVD, Feedback, InputGram, KeepDense, KroneckerFisher, Recipe, Transform, read_texts
from kflats.calibration.collect import measure
from kflats.calibration.counting import text_batches
from kflats.calibration.measurements import Statistics
from kflats.calibration.windows import windows
from kflats.codecs import Codec, Table
from kflats.codecs.streams import encode
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.importance.protocol import Importance, Weighting
from kflats.io import load_model
from kflats.matrices.registry import CodedMatrix
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Method, Problem
from kflats.model.weights import Weight, find_weights
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData

HEAD_BYTES_AT = len(b"kflats codes") + struct.calcsize("<BBI")
"""Where a stream says how long its head is (docs/files.md)."""
RELATIVE = "error of transform codes"
BITS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
GAUSSIAN_BITS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
TRANSFORM = (SVD(), Transform())
FEEDBACK = {"damped": Feedback(), "undamped": Feedback(damping=0.0)}
IMPORTANCES: dict[str, tuple[Importance, int]] = {
    "InputGram": (InputGram(), 1),
    "KroneckerFisher": (KroneckerFisher(), 5),
}
"""With how many layers one is tried: every one, or every fifth, which are of all kinds. Two sides take longer."""


def main() -> None:
    options = arguments(__doc__, importances=",".join(IMPORTANCES), every=1, rows=1024, cache="")
    torch.set_num_threads(1)
    chosen = [name for name in options.importances.split(",") if name]
    ratios = table(layers(chosen, options.every, options.cache)) if chosen else ""
    above = table(gaussian(options.rows))
    publish("Error feedback and transform codes on linear layers", f"{ratios}\n\n{above}", options)


def layers(chosen: list[str], every: int, cache: str) -> list[dict[str, object]]:
    """Ratios of errors, for each importance over each ``every``-th of its layers."""
    model, lines = load_model(packaged_model()), list[dict[str, object]]()
    encoder = [w for w in find_weights(model) if w.name.startswith("encoder.layer")]
    needs = frozenset[str]().union(*(IMPORTANCES[name][0].needs for name in chosen))
    data = {
        "same": CalibrationData(statistics=measured("train", needs)),
        "held out": CalibrationData(statistics=measured("test", needs)),
    }
    for kind in chosen:
        importance, step = IMPORTANCES[kind]
        weights = encoder[:: step * every]
        found = [kept(cache, [kind, w.name], partial(compared, model, w, importance, data)) for w in weights]
        for bits in map(str, BITS):
            shares = torch.tensor([one[bits].pop(RELATIVE) for one in found])
            line: dict[str, object] = {"importance": kind, "layers": len(weights), "bits": bits.removesuffix(".0")}
            line[RELATIVE] = f"{float(shares.median()):.4f}"
            for name in found[0][bits]:
                ratios = torch.tensor([one[bits][name] for one in found])
                line |= {name: f"{float(ratios.median()):.2f}", f"{name}, worst": f"{float(ratios.max()):.2f}"}
            lines.append(line)
    return lines


def compared(
    model: nn.Module, weight: Weight, importance: Importance, data: dict[str, CalibrationData]
) -> dict[str, dict[str, float]]:
    """Ratios of errors in one layer, by bits, and by judge and codec."""
    recipe = Recipe(SVD(), importance, matrix_rows="out_features")
    judges = {split: one.table(model, weight, recipe) for split, one in data.items()}
    ratios: dict[str, dict[str, float]] = {}
    for bits in BITS:
        least = lost(judges, *TRANSFORM, bits)
        of = ratios[str(bits)] = {RELATIVE: least["same"]}
        for name, codec in FEEDBACK.items():
            error = lost(judges, KeepDense(), codec, bits)
            of |= {f"{split}, {name}": error[split] / least[split] for split in judges}
    return ratios


def measured(split: str, needs: frozenset[str], prefix: str = "encoder.layer") -> Statistics:
    """The statistics of all layers, or of weights of another ``prefix``, on a split of WikiText-2."""
    source, folder = packaged_model(), data_folder()
    if folder is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    model, tokenizer = load_model(source), load_tokenizer(source)
    weights = [w for w in find_weights(model) if w.name.startswith(prefix)]
    texts = windows(read_texts(folder / "wikitext2" / f"{split}.txt.gz"), tokenizer, samples=512)
    return measure(model, weights, text_batches(texts.calibration, tokenizer), needs=needs, quiet=True)


def lost(judges: dict[str, Table], method: Method, codec: Codec, bits: float) -> dict[str, float]:
    """Errors as shares of the matrix, as each of ``judges`` weighs both, in so many bits a number."""
    given = judges["same"]
    problem = Problem(given.rows, int(bits * given.numbers / 8), given.dtype.itemsize, given.weighting)
    made = codec.encode(method, problem, given.dtype).matrix
    return {split: weighted_error(given.rows, made, judge.weighting).relative for split, judge in judges.items()}


def gaussian(rows: int) -> list[dict[str, object]]:
    """Bits above reverse water-filling: rows x 512 Gaussian numbers in a metric whose spectrum falls a hundredfold."""
    ways: dict[str, tuple[Method, Codec]] = {name: (KeepDense(), codec) for name, codec in FEEDBACK.items()}
    ways["transform"] = TRANSFORM
    gen, lines = torch.Generator().manual_seed(0), list[dict[str, object]]()
    spectrum = torch.logspace(0, -2, 512, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(512, 512, generator=gen, dtype=torch.float64)).Q
    drawn = TensorRows(torch.randn(rows, 512, generator=gen))
    weighting = Weighting(right=turn * spectrum @ turn.T)
    numbers = rows * 512
    for bits in GAUSSIAN_BITS:
        problem = Problem(drawn, int(bits * numbers / 8), 4, weighting)
        line: dict[str, object] = {"Gaussian numbers": f"{rows} x 512", "bits": f"{bits:g}"}
        for name, (method, codec) in ways.items():
            made = codec.encode(method, problem, torch.float32)
            least = bound_bits(spectrum, weighted_error(drawn, made.matrix, weighting).relative)
            assert isinstance(made.matrix, CodedMatrix)
            if name in FEEDBACK:
                line[f"{name}: integers"] = f"{8 * integer_bytes(made.matrix) / numbers - least:.3f}"
            line[f"{name}: file"] = f"{8 * made.nbytes / numbers - least:.3f}"
        lines.append(line)
        print(line, flush=True)
    return lines


def integer_bytes(matrix: CodedMatrix) -> int:
    """The bytes of a stream's blocks: the integers, and the classes of rows."""
    stream = encode(matrix).numpy().tobytes()
    (head,) = struct.unpack_from("<Q", stream, HEAD_BYTES_AT)
    return len(stream) - HEAD_BYTES_AT - struct.calcsize("<QI") - int(head)


if __name__ == "__main__":
    main()
