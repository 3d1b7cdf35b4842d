"""Question: how many bits a number does a mean cosine of .98 take on the static model of ``static.py``, at least?

The bound is reverse water-filling: coordinates of rows in principal axes are Gaussian, with variances of classes of
rows (those of the codec, or one class), and row i loses min(t / w_i, variance) in each. Axes, means, variances and
classes cost nothing here, so that the bound is a low estimate. Such a code is drawn,

    x^ = mean + (1 - D / variance) (x - mean) + noise,      variance of the noise D (1 - D / variance)

and its sentence vectors are compared with those of the table, as the codec's are. Weights are those of kflats' default
for static models: by the Zipf prior, and with half of the share counted in texts. The sentences of STS-B and MRPC are
those of their dev sets; what is counted there are sentences of their training sets. Between two sizes the logarithm of
1 - cosine is interpolated in the bits.

    python benchmarks/static_bound.py --cache DIR --write benchmarks/results/static_bound.md

``--cache``: as ``static.py``, which the distilled model is taken from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from _common import arguments, kept, markdown, publish
from _sentences import data_folder, sentences
from static import TEXTS, distilled, opened, texts_of
from torch import Tensor
from torch.nn import functional as F

from kflats.calibration.counting import count_tokens, zipf_prior
from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.evaluation.outputs import load_tokenizer
from kflats.importance import TokenCounts
from kflats.importance.protocol import Measured
from kflats.numerics.coding.encode import FlatsCode, transform_code
from kflats.numerics.coding.frame import source_of, water_level
from kflats.numerics.rows import TensorRows
from kflats.tasks.batches import load_examples

GOAL, BITS = 0.98, (1.2, 1.6, 2.0)
COUNTED = ("", "wikitext2", "sts", "mrpc")
"""What is counted; "": nothing."""


class Static:
    """The table, (n, d) float32, and the tokens of the texts that are judged."""

    def __init__(self, folder: Path) -> None:
        model = opened(folder)
        self.table = torch.from_numpy(model.embedding).float()
        self._bags = {}
        for name in TEXTS:
            tokens = [ids for ids in model.tokenize(texts_of(name)) if ids]
            offsets = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1]
            self._bags[name] = torch.tensor([i for ids in tokens for i in ids]), offsets

    def cosines(self, made: Tensor) -> dict[str, float]:
        """Means over the sentences of each set of texts."""
        found = {}
        for name, (ids, offsets) in self._bags.items():
            a, b = (F.embedding_bag(ids, table, offsets, mode="mean") for table in (self.table, made))
            found[name] = float(F.cosine_similarity(a, b).mean())
        return found


def weights_of(folder: Path, rows: int, counted: str) -> Tensor:
    """(n,) float64 row weights, with mean 1."""
    tokenizer = load_tokenizer(folder)
    prior, counts = zipf_prior(tokenizer, rows), None
    if counted == "wikitext2":
        counts = count_tokens(sentences(counted), tokenizer, rows)
    elif counted:
        examples = load_examples(counted, "train", data_folder())
        counts = count_tokens([text for pair in examples.inputs for text in pair], tokenizer, rows)
    importance = TokenCounts(power=1, smoothing=0.5 if counted else 1, floor=0.02)
    weights = importance.weigh(Measured(rows, counts, prior)).row_weights
    assert weights is not None
    return weights * (rows / weights.sum())


def drawn(table: Tensor, weights: Tensor, bits: float, labels: Tensor) -> Tensor:
    """The table that the code of the docstring gives, with classes ``labels`` (n,)."""
    source = source_of(TensorRows(table), weights, None, ("bits", bits))
    z = table.double() @ source.axes.double().T
    count = torch.bincount(labels).double().unsqueeze(1)

    def mean_of(values: Tensor) -> Tensor:
        return (torch.zeros(len(count), values.shape[1]).double().index_add_(0, labels, values) / count)[labels]

    mean = mean_of(z)
    variance = mean_of((z - mean).square()).clamp_min(1e-300)
    level = water_level(variance * weights.unsqueeze(1), bits * table.shape[1] / z.shape[1])
    error = variance.minimum((level / weights).unsqueeze(1))
    share = 1 - error / variance
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).double()
    made = mean + share * (z - mean) + (error * share).sqrt() * noise
    return (made @ source.axes.double()).float()


def found(static: Static, folder: Path, counted: str, bits: float) -> dict[str, dict[str, float]]:
    """Bits and cosines of the codec, and cosines of drawn codes in as many bits."""
    table = static.table
    weights = weights_of(folder, len(table), counted)

    def size_of(code: FlatsCode) -> int:
        return stored_bytes(from_codes(code))

    code = transform_code(TensorRows(table), int(bits * table.numel() / 8), size_of, weights=weights)
    size = 8 * size_of(code) / table.numel()
    classes = code.codes[0].labels.to(torch.int64)
    return {
        "kflats": {"bits": size, **static.cosines(from_codes(code).dense().detach().float())},
        f"bound, {int(classes.max()) + 1} classes": {
            "bits": bits,
            **static.cosines(drawn(table, weights, bits, classes)),
        },
        "bound, one class": {
            "bits": bits,
            **static.cosines(drawn(table, weights, bits, torch.zeros_like(classes))),
        },
    }


def bits_at(points: Sequence[dict[str, float]], text: str) -> str:
    """The bits at which the cosine is ``GOAL``, on the line through the two sizes that are nearest to it."""
    lost = math.log(1 - GOAL)
    lines = [[(one["bits"], math.log(1 - one[text])) for one in pair] for pair in pairwise(points)]
    (x, y), (x2, y2) = next((line for line in lines if line[1][1] <= lost), lines[-1])
    return f"{x + (lost - y) * (x2 - x) / (y2 - y):.2f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = arguments(__doc__, cache="")
    if not options.cache:
        raise SystemExit("--cache DIR: a folder for the models")
    cache = Path(options.cache)
    folder = distilled(cache / "distilled")
    static, rows = Static(folder), list[list[str]]()
    for counted in COUNTED:
        sizes = [
            kept(cache / "bound", (counted, bits), lambda c=counted, b=bits: found(static, folder, c, b))
            for bits in BITS
        ]
        for place, name in enumerate(sizes[0]):
            points = [list(one.values())[place] for one in sizes]
            first = [f"{points[0][text]:.4f}" for text in TEXTS]
            weights = {"": "Zipf prior", "wikitext2": "WikiText-2", "sts": "STS-B", "mrpc": "MRPC"}[counted]
            label = name if name.count("one") or name == "kflats" else "bound, classes of kflats"
            rows.append([weights, label, *first, *(bits_at(points, text) for text in TEXTS)])
    names = [name.removesuffix(" (valid)") for name in TEXTS]
    head = ["weights", "code", *(f"{name}, 1.2 bits" for name in names), *(f"{name}, bits at .98" for name in names)]
    publish("Bits a number that a static model needs for its sentence vectors", markdown(head, rows), options)
