"""Question: what would other choices in the codec ``Feedback`` gain, which it does not make?

Every fifth of the 36 linear layers of all-MiniLM-L6-v2 under ``KroneckerFisher``, measured on WikiText-2 (train).
Weighted squared errors at equal bytes, as shares of that of ``Feedback()``, under the damped Grams that it minimises:
median, least and largest.

    another order    along paths, with the rows and columns that count most first, so that they are rounded last.
                     "stored": less the bytes of the two orders, log2 n! + log2 d! bits
    classes          at most so many classes of rows, in place of 32
    a list           integers beyond 8 bits: how many of a million, and the largest share of any layer's bits that they
                     take now, by the entropy of their distributions. A list of their own saves less than that

Then the table of word vectors under ``TokenFisher()``, which tables get by default: the error of ``Feedback()`` as a
share of that of ``SVD()`` and ``Transform()``, in equal files.

    python benchmarks/feedback_choices.py --write benchmarks/results/feedback_choices.md
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from _sentences import data_folder
from feedback import measured
from paths import CODEC, damped

from kflats import SVD, KeepDense, KroneckerFisher, Recipe, TokenFisher, Transform, read_texts
from kflats.codecs import Codec, Table, feedback
from kflats.codecs.streams import decode_rows, encode
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.matrices.registry import CodedMatrix, Matrix
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Method, Problem
from kflats.model.weights import find_weights
from kflats.numerics.large_matrices import permuted
from kflats.numerics.rows import TensorRows, whole_matrix
from kflats.planning.calibration_data import SAMPLES, CalibrationData, gather

BITS = (1.5, 2.0, 3.0, 4.0)
TABLE_BITS = (0.5, 1.0, 2.0, 3.0, 4.0)
EVERY = 5
CLASSES = (1, 8, 128)
LARGEST_INT8 = 127


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    publish("Other choices in error feedback", f"{table(of_layers())}\n\n{table(of_words())}", options)


def of_layers() -> list[dict[str, object]]:
    """Shares of the error, a line for each number of bits."""
    model, importance = load_model(packaged_model()), KroneckerFisher()
    weights = [w for w in find_weights(model) if w.name.startswith("encoder.layer")][::EVERY]
    data = CalibrationData(statistics=measured("train", importance.needs))
    tables = [data.table(model, w, Recipe(SVD(), importance, matrix_rows="out_features")) for w in weights]
    lines = list[dict[str, object]]()
    for bits in BITS:
        found = [compared(one, bits) for one in tables]
        line: dict[str, object] = {"layers": len(found), "bits": f"{bits:g}"}
        for name in found[0][0]:
            shares = torch.tensor([shares[name] for shares, _ in found])
            line[name] = f"{float(shares.median()):.3f} ({float(shares.min()):.2f} to {float(shares.max()):.2f})"
        large, integers = (sum(own[place] for _, own in found) for place in (0, 1))
        line["beyond 8 bits, in a million"] = f"{1e6 * large / integers:.1f}"
        line["share of bits, largest"] = f"{max(own[2] for _, own in found):.5f}"
        lines.append(line)
        print(line, flush=True)
    return lines


def compared(given: Table, bits: float) -> tuple[dict[str, float], tuple[int, int, float]]:
    """Shares of the error in one layer; integers beyond 8 bits, all integers, and the share of bits that those take."""
    nbytes, matrix = int(bits * given.numbers / 8), whole_matrix(given.rows, torch.float32)
    best = coded(KeepDense(), CODEC, given.rows, given.weighting, nbytes)
    least = lost(given.rows, best, given.weighting)
    left, right = given.weighting.left, given.weighting.right
    assert left is not None
    assert right is not None
    rows, columns = (side.diagonal().argsort(descending=True) for side in (left, right))
    turned = TensorRows(permuted(matrix, rows, columns, torch.float32))
    ordered = Weighting(permuted(left, rows, rows, left.dtype), permuted(right, columns, columns, right.dtype))
    stored = sum(math.lgamma(len(order) + 1) for order in (rows, columns)) / math.log(2) / 8
    shares = dict[str, float]()
    for name, size in {"another order": nbytes, "another order, stored": nbytes - int(stored)}.items():
        shares[name] = lost(turned, coded(KeepDense(), CODEC, turned, ordered, size), ordered) / least
    for count in CLASSES:
        with patch.object(feedback, "_CLASSES", count):
            made = coded(KeepDense(), CODEC, given.rows, given.weighting, nbytes)
        shares[f"{count} class" + "es" * (count > 1)] = lost(given.rows, made, given.weighting) / least
    return shares, beyond_int8(best)


def coded(method: Method, codec: Codec, rows: TensorRows, weighting: Weighting, nbytes: int) -> CodedMatrix:
    """The code of ``rows`` in so many bytes."""
    made: Matrix = codec.encode(method, Problem(rows, nbytes, 4, weighting), torch.float32).matrix
    assert isinstance(made, CodedMatrix)
    return made


def lost(rows: TensorRows, made: Matrix, weighting: Weighting) -> float:
    """The error of a layer under the Grams that the codec minimises."""
    judge = Weighting(*(damped(side) for side in (weighting.left, weighting.right)))
    return weighted_error(rows, made, judge).error


def beyond_int8(matrix: CodedMatrix) -> tuple[int, int, float]:
    """The integers of more than 8 bits, all integers, and the share of the bits that those take."""
    n = matrix.shape[0]
    integers = decode_rows(encode(matrix), matrix.geometry, torch.arange(n)).to(torch.int64)
    labels = matrix.tensors().get("labels", torch.zeros(n, dtype=torch.uint8)).to(torch.int64)
    contexts = matrix.get_buffer("contexts").to(torch.int64)[labels]
    width = 2 * int(integers.abs().max()) + 1
    symbols = (contexts * width + integers + width // 2).flatten()
    counts = torch.bincount(symbols).double()
    of_contexts = torch.bincount(contexts.flatten()).double()
    bits = (of_contexts[contexts.flatten()] / counts[symbols]).log2()
    large = integers.abs().flatten() > LARGEST_INT8
    return int(large.sum()), integers.numel(), float(bits[large].sum() / bits.sum())


def of_words() -> list[dict[str, object]]:
    """The table of words, a line for each number of bits."""
    source, folder, importance = packaged_model(), data_folder(), TokenFisher()
    if folder is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    model = load_model(source)
    (weight,) = [w for w in find_weights(model) if w.name == "embeddings.word_embeddings"]
    texts = read_texts(folder / "wikitext2" / "train.txt.gz")
    data = gather(texts, load_tokenizer(source), None, None, None, SAMPLES).windowed(model)
    data = replace(data, statistics=measured("train", importance.needs, weight.name))
    given, lines = data.table(model, weight, Recipe(SVD(), importance)), list[dict[str, object]]()
    for bits in TABLE_BITS:
        nbytes = int(bits * given.numbers / 8)
        lost_by = [
            weighted_error(given.rows, coded(method, codec, given.rows, given.weighting, nbytes), given.weighting)
            for method, codec in ((KeepDense(), CODEC), (SVD(), Transform()))
        ]
        ours, theirs = (one.relative for one in lost_by)
        line: dict[str, object] = {"table, bits": f"{bits:g}", "error of transform codes": f"{theirs:.4f}"}
        lines.append(line | {"of error feedback, as a share": f"{ours / theirs:.2f}"})
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    with torch.no_grad():
        main()
