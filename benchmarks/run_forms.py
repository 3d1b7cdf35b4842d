"""Question: what does an encoder lose in each run-time form, and where does int8 lose it?

Cosines of the vectors of 400 CoLA sentences to those of all-MiniLM-L6-v2: mean, and 5th percentile. "int8": integers
end at 127. "to 90", "to 63": they end there, as on CPUs without VNNI units, with FBGEMM and without. All three are
computed in floats, which are exact for such sums, so that any CPU gives this page. "int8, weights only": the matrix is
rounded to 8 bits once more and inputs are not. "int8, mean subtracted": (x - m) W' + m W', m the mean input of each
layer over paragraphs of WikiText-2 (valid). "int8, s = 1": inputs are rounded as they are. ``--compressed DIR`` takes a
folder of 8 MB that is there.

"on a grid" is the same size with integers that follow no paths of a trellis, and whose values are the integers
themselves, in steps, in place of the means of intervals. Of these alone "int8, stored integers" multiplies what the
file holds: x s_i is rounded, with the whole step s_i of each column. Layers with integers beyond 127 are rounded again,
as in "int8".

    python benchmarks/run_forms.py --write benchmarks/results/run_forms.md
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from torch import Tensor, nn

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Transform, Uniform, compress_folder, read_texts, run_as_
from kflats.codecs import feedback
from kflats.codecs.streams import decode_rows
from kflats.codecs.streams import encode as encode_stream
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer
from kflats.evaluation.running import encode
from kflats.io import load_model
from kflats.matrices import running
from kflats.matrices.coded import STEPS_AN_OCTAVE
from kflats.matrices.integer_kernels import IntegerKernel
from kflats.matrices.layers import FactoredLinear
from kflats.matrices.registry import CodedMatrix
from kflats.matrices.running import LEAST, DenseProduct, IntegerProduct, RoundedMatrix, steps_to
from kflats.numerics.coding.quantizers import Quantizer

_OF = IntegerProduct.of


def main() -> None:
    options = arguments(__doc__, count=400, compressed="")
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    original, tokenizer = load_model(source), load_tokenizer(source)
    texts = sentences("cola")
    texts = [texts[i * len(texts) // options.count] for i in range(options.count)]
    before = encode(original, tokenizer, texts)

    def near(model: nn.Module) -> str:
        for layer in model.modules():
            if isinstance(layer, FactoredLinear):
                layer.refresh()  # its product is made anew
        made = fidelity_of(before, encode(model, tokenizer, texts))
        return f"{made.mean_cosine:.4f} / {made.p5_cosine:.4f}"

    def line(name: str, model: Any, on_grid: bool = False) -> dict[str, object]:
        found: dict[str, object] = {"codes of": name}
        for form in ("dense", "bfloat16"):
            run_as_(model, form)
            found[form] = near(model)
        run_as_(model, "int8")
        for most, column in ((127, "int8"), (90, "int8, to 90"), (63, "int8, to 63")):
            with up_to(most):
                found[column] = near(model)
        with patch.object(IntegerProduct, "of", weights_only):
            found["int8, weights only"] = near(model)
        with up_to(127):
            with patch.object(IntegerProduct, "of", unscaled):
                found["int8, s = 1"] = near(model)
            with centred(model, lambda: encode(model, tokenizer, paragraphs("valid", 60))):
                found["int8, mean subtracted"] = near(model)
            found["int8, stored integers"] = "-"
            if on_grid:
                with stored_integers():
                    found["int8, stored integers"] = near(model)
        print(found, flush=True)
        return found

    with tempfile.TemporaryDirectory() as place:
        folder = options.compressed or f"{place}/8MB"
        if not options.compressed:
            train = read_texts(data / "wikitext2" / "train.txt.gz")
            compress_folder(source, folder, size="8MB", texts=train, quiet=True)
        lines = [line("kflats --size 8MB", load_model(folder))]
        with patch.object(feedback, "_PATH_BITS", (math.inf, math.inf)), values_are_integers():
            train = read_texts(data / "wikitext2" / "train.txt.gz")
            compress_folder(source, f"{place}/grid", size="8MB", texts=train, proof=False, quiet=True)
        lines.append(line("kflats --size 8MB, on a grid", load_model(f"{place}/grid"), on_grid=True))
    recipes = {"Integer(8)": (KeepDense(), Integer(8), "30%"), "SVD, Transform": (SVD(), Transform(), "13%")}
    for name, (method, codec, keep) in recipes.items():
        model = load_model(source)
        kflats.compress_(model, {"linear": Recipe(method, Uniform(), codec)}, keep=keep, quiet=True)
        lines.append(line(f"{name}, 36 linear layers and the pooler", model))
    publish("What run-time forms lose", table(lines), options)


@dataclass(frozen=True)
class InFloats:
    """Integers of a matrix that are multiplied as floats."""

    numbers: Tensor

    def sums_(self, sums: Tensor, whole: Tensor) -> None:
        """As ``Packed``."""
        torch.matmul(whole.round(), self.numbers, out=sums)


@contextmanager
def up_to(most: int) -> Iterator[None]:
    """Inside, integers end at ``most``."""
    kernel = IntegerKernel(lambda numbers, most: InFloats(numbers.float()), most, torch.float32, torch.float32)
    with patch.object(running, "integer_kernel", lambda kind: kernel):
        yield


def weights_only(weight: Tensor, scales: Tensor) -> DenseProduct:
    made = RoundedMatrix.of(weight, scales, partial(steps_to, 127))
    return DenseProduct(((made.numbers * made.steps).T * scales,))


def unscaled(weight: Tensor, scales: Tensor) -> IntegerProduct:
    return _OF(weight, torch.ones_like(scales))


@contextmanager
def values_are_integers() -> Iterator[None]:
    """Inside, codes with error feedback leave the means of intervals out."""
    quantizer = feedback._Source._quantizer

    def without_means(*given: Any) -> Quantizer:
        made = quantizer(*given)
        return replace(made, shrink=torch.zeros_like(made.shrink))

    with patch.object(feedback._Source, "_quantizer", without_means):
        yield


@contextmanager
def stored_integers() -> Iterator[None]:
    """Inside, layers of codes with steps of columns multiply the integers of the file."""
    row_steps: list[Tensor | None] = []
    scaled_by = CodedMatrix.scaled

    def of_file(matrix: CodedMatrix, *, transposed: bool, power: float = 0.5) -> tuple[Tensor, Tensor]:
        n, tensors = matrix.shape[0], matrix.tensors()
        if "column_steps" not in tensors or not transposed or bool(tensors["shrink"].any()):
            row_steps.append(None)
            return scaled_by(matrix, transposed=transposed, power=power)
        numbers = decode_rows(encode_stream(matrix), matrix.geometry, torch.arange(n)).float()
        if int(numbers.abs().max()) > 127:
            row_steps.append(None)
            return scaled_by(matrix, transposed=transposed, power=power)
        scaled = numbers * (steps := torch.exp2(tensors["column_steps"].float() / STEPS_AN_OCTAVE))
        own = ((matrix.dense() * scaled).sum(1) / scaled.square().sum(1).clamp_min(LEAST)).clamp_min(LEAST)
        row_steps.append(own)
        return numbers * own.unsqueeze(1) * steps, steps

    def product(weight: Tensor, scales: Tensor) -> IntegerProduct:
        kernel, own = running.integer_kernel("cpu"), row_steps.pop()
        if own is None:
            return _OF(weight, scales)
        numbers = (weight / scales / own.unsqueeze(1)).round().T.to(torch.int8)
        return IntegerProduct(kernel.packed(numbers), own, scales, kernel)

    with patch.object(CodedMatrix, "scaled", of_file), patch.object(IntegerProduct, "of", product):
        yield


@contextmanager
def centred(model: Any, run: Any) -> Iterator[None]:
    """Inside, linear layers multiply inputs less their means, and add the means' products."""
    layers = [layer for layer in model.modules() if isinstance(layer, FactoredLinear)]
    sums: dict[int, tuple[Tensor, int]] = {}

    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).double()
        total, count = sums.get(id(layer), (torch.zeros(x.shape[1], dtype=torch.float64), 0))
        sums[id(layer)] = total + x.sum(0), count + len(x)

    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    times = FactoredLinear.times

    def shifted(layer: FactoredLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        mean = (sums[id(layer)][0] / sums[id(layer)][1]).float()
        own = layer.matrix.matvec(mean) if layer.transposed else layer.matrix.vecmat(mean)
        return times(layer, x - mean, own if bias is None else bias + own)

    with patch.object(FactoredLinear, "times", shifted):
        yield


if __name__ == "__main__":
    main()
