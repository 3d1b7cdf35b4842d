"""Question: how near does a whole encoder stay if its layers are coded by GPTQ with an entropy coder, at equal files?

What a good engineer has without kflats' own layer codes, at its best. all-MiniLM-L6-v2, WikiText-2 (train) in the
windows that kflats measures with, no labels, no fine-tuning. Layers are rounded by GPTQ one after another: inputs are
measured behind the layers that are coded already, columns go in order of activation, the mean's error goes into the
bias. Each output has one step, by the squared gradients of its weights, and one number sets the size of all layers.
Their integers lie in kflats' own streams, with its contexts; tables are kflats' codes. What was to be chosen was chosen
for GPTQ, on sentences of CoLA (dev) and paragraphs of WikiText-2 (valid): damping, how much steps follow gradients
between layers, from where on numbers are rounded up, whether integers are decoded to the means of their intervals, and
the bytes of the token table.

"int4": GPTQ in groups of 64 with a 16-bit scale each and no entropy coder, in arithmetic of 4.25 bits a number; the
scales are those of least squared error, and tables are rounded in the same groups to 4 or 8 bits.

Cosines of vectors to the original's: mean and 5th percentile, on the texts of ``whole_model.py``. Then the loss of
kflats, 1 - cosine, as a share of GPTQ's.

    python benchmarks/gptq_entropy.py --write benchmarks/results/gptq_entropy.md
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import EMBEDDING, arguments, kept, publish, table
from _sentences import data_folder, paragraphs, sentences
from torch import Tensor, nn
from whole_model import SENTENCES, evenly

from kflats import SVD, Recipe, TokenFisher, Transform, compress_folder, read_texts
from kflats.calibration.collect import measure
from kflats.codecs.streams import stored_bytes
from kflats.demo import packaged_model
from kflats.demo.gptq import GROUP, Factor, gptq, in_four_bits, walk_
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import encode
from kflats.io import load_model, save_model
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.registry import Matrix
from kflats.methods.protocol import Problem
from kflats.model.swap import swap_
from kflats.model.weights import FactoredLayer, find_weight, find_weights
from kflats.numerics.coding.classes import split_classes
from kflats.numerics.coding.feedback import Rounded, designed
from kflats.planning.calibration_data import CalibrationData

CLASSES = 32
LEAST = 1e-3
"""Outputs of less importance, as a share of the layer's mean, count as much."""
TRIED: dict[str, tuple[float, ...]] = {
    "damping": (0.01, 0.05, 0.1, 0.2, 0.3, 0.5),
    "power": (1.0, 0.5),
    "up": (0.5, 0.55),
    "means": (0.0, 1.0),
}
SHARES = (1.0, 0.8, 0.65, 0.5, 1.25)
"""Bytes of the token table, as multiples of those that kflats gives it."""


@dataclass(frozen=True)
class Settings:
    """``damping``: share of the Gram's mean diagonal. ``power``: of a layer's squared gradients in its importance, 1
    the loss to second order, 0 the relative error of each layer. ``up``: the part of a step from which on numbers are
    rounded up. ``means``: 1 where integers are decoded nearer to zero, by an offset for each context of the coder that
    makes the layer's squared error least; 0 where they stand for themselves. ``share``: bytes of the token table, as a
    multiple of kflats'."""

    damping: float = 0.01
    power: float = 1.0
    up: float = 0.5
    means: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class Coded:
    """What replaces a layer: its matrix (out, in), and what its bias takes of the error (out,)."""

    matrix: CodedMatrix
    shift: Tensor
    nbytes: int


class Rival:
    """The encoder, its texts, and what is measured once."""

    def __init__(self, texts: Sequence[str], windows: int) -> None:
        self.original = load_model(packaged_model())
        tokenizer = load_tokenizer(packaged_model())
        data = CalibrationData(tuple(texts), tokenizer, samples=windows).windowed(self.original)
        self.batches = [
            {key: value for key, value in batch.items() if isinstance(value, Tensor)}
            for batch in data.batches(self.original)
        ]
        self.words = find_weight(self.original, EMBEDDING)
        self.layers = [w for w in find_weights(self.original) if w.name.startswith("encoder.layer")]
        self.recipe = Recipe(SVD(), TokenFisher(), Transform())
        fields = frozenset({"column_fisher", "input_gram", "input_mean"})
        needs = {weight.name: fields for weight in self.layers} | {EMBEDDING: TokenFisher.needs}
        found = measure(self.original, [self.words, *self.layers], self.batches, needs=needs, quiet=True)
        self.data = replace(data, statistics=found)
        self.statistics = found
        self.tables: dict[int, Matrix] = {}
        self.ratio = 1.0

    def weight(self, name: str) -> Tensor:
        """(out, in) float32, the original's."""
        found: Tensor = self.original.get_submodule(name).weight.detach()
        return found

    def words_in(self, nbytes: int) -> Matrix:
        """The token table as kflats codes it."""
        if nbytes not in self.tables:
            held = self.data.table(self.original, self.words, self.recipe)
            problem = Problem(held.rows, nbytes, held.dtype.itemsize, held.weighting)
            self.tables[nbytes] = self.recipe.encode(problem, held.dtype).matrix
        return self.tables[nbytes]

    def importance(self, name: str, power: float) -> Tensor:
        """(out,) float64: what the squared error of each output counts."""
        measured, weight = self.statistics.of(name), self.weight(name).to(torch.float64)
        assert measured.column_fisher is not None
        assert measured.input_gram is not None
        gram = self._centred(name)
        fisher = measured.column_fisher.to(torch.float64) / float(measured.input_gram.diagonal().sum())
        fisher = fisher.clamp_min(LEAST * float(fisher.mean()))
        output = float((weight @ gram * weight).sum()) / len(weight)
        return fisher / fisher.mean() * float(fisher.mean()) ** power * output ** (power - 1)

    def _centred(self, name: str) -> Tensor:
        measured = self.statistics.of(name)
        assert measured.input_gram is not None
        assert measured.input_mean is not None
        mean = measured.input_mean.to(torch.float64)
        return measured.input_gram.to(torch.float64) - torch.outer(mean, mean)

    def size_number(self, target: float, settings: Settings) -> float:
        """The number that sets all steps, for layers of about ``target`` bytes."""
        spreads = []
        for layer in self.layers:
            weight, factor = self.weight(layer.name), Factor.of(self._centred(layer.name), settings.damping)
            counts = self.importance(layer.name, settings.power) * factor.weight
            spreads.append((weight.shape[1], weight.square().mean(1) * counts))
        low, high = -40.0, 40.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            step = 2.0 ** (2 * middle)
            # The entropy of rounded Gaussian numbers, nearly.
            bits = sum(d * float((1 + 2 * math.pi * math.e * of / step).log2().sum()) / 2 for d, of in spreads)
            low, high = (middle, high) if self.ratio * bits / 8 > target else (low, middle)
        self.guessed = target / self.ratio
        return 2.0**high

    def coded(
        self,
        base: Any,
        words: Matrix,
        target: float,
        settings: Settings,
        near: float,
        batches: Sequence[dict[str, Tensor]],
    ) -> tuple[dict[str, Coded], Any]:
        """All layers in ``target`` bytes, within a share ``near``; and the model that has them, decoded."""
        for _ in range(4):
            number, made = self.size_number(target, settings), dict[str, Coded]()
            code = partial(self._one, made, number, settings)
            model = with_words(base, words)
            walk_(model, batches, code)
            nbytes = sum(one.nbytes for one in made.values())
            print(f"    {settings}: layers of {nbytes / 1e6:.3f} MB, aimed at {target / 1e6:.3f}", flush=True)
            self.ratio = nbytes / self.guessed
            if abs(nbytes - target) <= near * target:
                break
        return made, model

    def _one(
        self, made: dict[str, Coded], number: float, settings: Settings, name: str, gram: Tensor, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Code one layer; ``walk_`` calls it."""
        weight, factor = self.weight(name), Factor.of(gram, settings.damping)
        counts = self.importance(name, settings.power) * factor.weight
        labels = split_classes(counts, weight.norm(dim=1), CLASSES, float(weight.shape[1]))
        sums = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add_(0, labels, counts.log2())
        steps = (number * (-sums / torch.bincount(labels) / 2).exp2()).to(torch.float32)
        levels = gptq(weight, factor, steps[labels].unsqueeze(1), settings.up, 2**14 - 2)
        contexts = designed(Rounded(levels.to(torch.int16), levels), labels).contexts
        shrink = torch.zeros(int(contexts.max()) + 1)
        if settings.means:
            own = contexts[labels].to(torch.int64)
            shrink = offsets(weight, levels, steps[labels].unsqueeze(1), own, gram, counts.sqrt().unsqueeze(1))
        else:
            own = torch.zeros_like(levels, dtype=torch.int64)
        matrix = from_integers(
            [levels[labels == label].to(torch.int16) for label in range(len(steps))],
            labels,
            steps,
            contexts=contexts.to(torch.uint8),
            shrink=shrink,
            column_steps=torch.zeros(weight.shape[1], dtype=torch.int8),
        )
        decoded = (levels - levels.sign() * shrink[own]) * steps[labels].unsqueeze(1)
        made[name] = Coded(matrix, (weight - decoded) @ mean, stored_bytes(matrix))
        return decoded, made[name].shift

    def base(self, folder: Path) -> tuple[Any, int, int]:
        """kflats' model with the original's layers and token table; the bytes of that table, and of all but both."""
        model, rest, words = load_model(folder), weight_file_bytes(folder), 0
        for name in [EMBEDDING, *(layer.name for layer in self.layers)]:
            held = model.get_submodule(name)
            words = file_bytes(held)
            rest -= words
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, deepcopy(self.original.get_submodule(name)))
            if name == EMBEDDING:
                table_bytes = words
        return model, table_bytes, rest

    def folder(self, base: Any, size: int, rest: int, layers: dict[str, Coded], out: Path) -> None:
        """Write a folder of at most ``size`` bytes: the token table takes what the others leave."""
        room = size - rest - sum(one.nbytes for one in layers.values())
        for _ in range(4):
            model = deepcopy(base)
            swap_(model, find_weight(model, EMBEDDING), deepcopy(self.words_in(room)))
            for name, one in layers.items():
                weight = find_weight(model, name)
                swap_(model, weight, deepcopy(one.matrix), matrix_rows="out_features", bias_shift=one.shift)
            save_model(model, out)
            over = weight_file_bytes(out) - size
            if over <= 0:
                return
            room -= over + 64
        raise SystemExit(f"{over} bytes too many in {out.name}")

    def int4(self, bits: int) -> tuple[Any, int]:
        """The usual 4 bits of layers with tables of ``bits``, and the bytes of its numbers and scales."""
        return in_four_bits(self.original, self.batches, bits)


def offsets(weight: Tensor, levels: Tensor, steps: Tensor, of: Tensor, gram: Tensor, counts: Tensor) -> Tensor:
    """(contexts,) how far towards zero integers are decoded: least squares of the layer's error under its Gram.

    Args:
        weight, levels: (out, in). steps: (out, 1). of: (out, in) the context of each integer. counts: (out, 1) roots of
            what the squared error of an output counts.
    """
    moved = [(levels.sign() * (of == k) * steps * counts).to(torch.float32) for k in range(int(of.max()) + 1)]
    wide = gram.to(torch.float32)
    error, seen = (levels * steps - weight) * counts, [part @ wide for part in moved]
    system = torch.tensor([[float((a * b).sum()) for b in moved] for a in seen], dtype=torch.float64)
    right = torch.tensor([float((a * error).sum()) for a in seen], dtype=torch.float64)
    # A context of zeros alone has no offset.
    return torch.linalg.lstsq(system, right.unsqueeze(1), driver="gelsd").solution.squeeze(1).to(torch.float32)


def file_bytes(layer: nn.Module) -> int:
    """What a file holds of a layer's matrix."""
    if not isinstance(layer, FactoredLayer):
        return sum(p.numel() * p.element_size() for name, p in layer.named_parameters() if name == "weight")
    return stored_bytes(layer.matrix) if isinstance(layer.matrix, CodedMatrix) else layer.matrix.nbytes


def with_words(base: Any, words: Matrix) -> Any:
    """A copy of the model with the coded token table, decoded."""
    model = deepcopy(base)
    model.get_submodule(EMBEDDING).weight.data = words.dense().detach().to(torch.float32)
    return model


def main() -> None:
    options = arguments(__doc__, sizes="12MB,8MB,6MB", windows=512, judged=800, cache="")
    torch.set_num_threads(1)
    data = data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    texts = read_texts(data / "wikitext2" / "train.txt.gz")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(options.cache or temporary)
        place.mkdir(parents=True, exist_ok=True)
        publish("GPTQ with an entropy coder, and kflats, in equal files", compared(texts, place, options), options)


def compared(texts: list[str], place: Path, options: Any) -> str:
    """Both tables."""
    rival, tokenizer = Rival(texts, options.windows), load_tokenizer(packaged_model())
    few = max(1, options.judged // 2)
    chosen_on = {"CoLA": evenly(sentences("cola"), few), "valid": paragraphs("valid", max(1, few // 5))}
    judged = {name: evenly(sentences(name), options.judged) for name in SENTENCES}
    judged["paragraphs"] = paragraphs("test", max(1, min(150, options.judged)))
    before = {name: encode(rival.original, tokenizer, them) for name, them in (chosen_on | judged).items()}

    def judge(model: Any, those: dict[str, list[str]]) -> dict[str, list[float]]:
        near = {kind: fidelity_of(before[kind], encode(model, tokenizer, them)) for kind, them in those.items()}
        return {kind: [one.mean_cosine, one.p5_cosine] for kind, one in near.items()}

    def tried(size: str, settings: Settings) -> dict[str, Any]:
        """How near a choice comes, with half of the windows."""
        base, words, rest = rival.base(place / size)
        held = rival.words_in(int(settings.share * words))
        target = in_bytes(size) - rest - settings.share * words
        made, model = rival.coded(base, held, target, settings, 0.015, rival.batches[::2])
        # The token table takes what the layers leave.
        room = in_bytes(size) - rest - sum(one.nbytes for one in made.values())
        model.get_submodule(EMBEDDING).weight.data = rival.words_in(room).dense().detach().to(torch.float32)
        del rival.tables[room]
        return judge(model, chosen_on)

    def best_of(size: str, ways: list[Settings]) -> Settings:
        """The way of the largest mean cosine on both kinds of texts."""
        found = [kept(place, ["tried", size, options.windows, way], partial(tried, size, way)) for way in ways]
        return max(zip(ways, found, strict=True), key=lambda one: sum(mean for mean, _ in one[1].values()))[0]

    def kflats(size: str) -> dict[str, Any]:
        folder = place / size
        return {"bytes": weight_file_bytes(folder), "near": judge(load_model(folder), judged)}

    def gptq_in(size: str, settings: Settings) -> dict[str, Any]:
        out, (base, words, rest) = place / f"{size} rival", rival.base(place / size)
        held = rival.words_in(int(settings.share * words))
        target = in_bytes(size) - rest - settings.share * words
        made, _ = rival.coded(base, held, target, settings, 0.004, rival.batches)
        rival.folder(base, in_bytes(size), rest, made, out)
        return {"bytes": weight_file_bytes(out), "near": judge(load_model(out), judged)}

    def int4(bits: int) -> dict[str, Any]:
        model, nbytes = rival.int4(bits)
        return {"bytes": nbytes, "near": judge(model, judged)}

    sizes = options.sizes.split(",")
    for size in sizes:
        if not (place / size).is_dir():
            asked: dict[str, Any] = {"texts": texts, "samples": options.windows}
            compress_folder(packaged_model(), place / size, size=size, weights=("all",), quiet=True, **asked)
    settings, lines, ratios = Settings(), list[dict[str, object]](), list[dict[str, object]]()
    first = "8MB" if "8MB" in sizes else sizes[0]
    for field, values in TRIED.items():
        settings = best_of(first, [replace(settings, **{field: value}) for value in values])
    about = [options.windows, options.judged]
    for size in sizes:
        own = best_of(size, [replace(settings, share=share) for share in SHARES])
        theirs = kept(place, ["gptq", size, own, *about], partial(gptq_in, size, own))
        ours = kept(place, ["kflats", size, *about], partial(kflats, size))
        chosen = ", ".join(f"{name} {value:g}" for name, value in asdict(own).items())
        lines += [row(size, f"GPTQ + entropy ({chosen})", theirs), row(size, f"kflats --size {size}", ours)]
        ratio: dict[str, object] = {"size": size}
        for kind in judged:
            lost = [(1 - a) / (1 - b) for a, b in zip(ours["near"][kind], theirs["near"][kind], strict=True)]
            ratio[kind] = " / ".join(f"{one:.2f}" for one in lost)
        ratios.append(ratio)
    for bits in (4, 8):
        found = kept(place, ["int4", bits, *about], partial(int4, bits))
        lines.append(row("", f"int4, groups of {GROUP}, GPTQ; tables {bits} bits", found))
    return f"{table(lines)}\n\nLoss of kflats as a share of GPTQ's:\n\n{table(ratios)}"


def row(size: str, what: str, found: dict[str, Any]) -> dict[str, object]:
    """A line of the table."""
    near = {kind: " / ".join(f"{cosine:.4f}" for cosine in those) for kind, those in found["near"].items()}
    return {"size": size, "what": what, "file": f"{found['bytes'] / 1e6:.2f} MB", **near}


def in_bytes(size: str) -> int:
    """Of a text such as "8MB"."""
    return int(float(size.removesuffix("MB")) * 1e6)


if __name__ == "__main__":
    main()
