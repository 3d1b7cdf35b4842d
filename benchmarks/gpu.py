"""Question: what do models in codes, and compressing them, gain on a GPU?

Two models with drawn weights, of MiniLM's shape and of BERT-base's: integers of 8 bits in each run-time form, and the
int8 form compiled, beside the same model in float32 and bfloat16. Times of one text of 20 tokens and of 32 texts of
128, as multiples of float32 as it is; contestants take turns.

Then seconds on the processor, with all its threads, and on the GPU: of measuring the Gram matrices of inputs and
gradients of the larger model; and of compressing one weight, a layer of 1,024 inputs and outputs, and a
table of 64 columns. Codecs encode on the CPU everywhere.

    python benchmarks/gpu.py --write benchmarks/results/gpu.md
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch._dynamo
import transformers
from _common import arguments, markdown, publish
from torch import Tensor, nn

import kflats
from kflats import (
    SVD,
    Feedback,
    Flats,
    InputGram,
    Integer,
    KeepDense,
    KroneckerFisher,
    Recipe,
    RobustSVD,
    Transform,
    run_as_,
)
from kflats.calibration.collect import measure
from kflats.common.run_forms import RunForm
from kflats.evaluation.latency import Run, latencies
from kflats.evaluation.running import run
from kflats.model.weights import find_weights

TITLE = "Models in codes, and compressing them, on a GPU"
MODELS = {"MiniLM": (6, 384, 1536, 12), "BERT-base": (12, 768, 3072, 12)}
"""Blocks, width, inner width and heads."""
SHAPES = ((1, 20), (32, 128))
COMPILED = ("float32", "bfloat16", "codes, int8")
SAMPLES, TOKENS = 32, 128
SIDES = (1024,)
ROWS = 2**20
LAYERS = {
    "SVD, half of the bytes": (Recipe(SVD()), "50%"),
    "RobustSVD, half of the bytes": (Recipe(RobustSVD()), "50%"),
    "SVD and Transform, 2 bits": (Recipe(SVD(), codec=Transform()), "6.25%"),
    "Feedback under the inputs, 4 bits": (Recipe(KeepDense(), InputGram(), codec=Feedback()), "12.5%"),
}
TABLES = {
    "4 flats, half of the bytes": (Recipe(Flats(k=4)), "50%"),
    "Transform, 2 bits": (Recipe(SVD(), codec=Transform()), "6.25%"),
}


@dataclass(frozen=True)
class Contestant:
    """A model as it is, or compiled."""

    name: str
    model: nn.Module
    is_compiled: bool

    def build(self) -> Run:
        return partial(run, torch.compile(self.model) if self.is_compiled else self.model)


def config_of(name: str) -> transformers.BertConfig:
    """The shape of a model."""
    blocks, width, inner, heads = MODELS[name]
    return transformers.BertConfig(
        num_hidden_layers=blocks, hidden_size=width, intermediate_size=inner, num_attention_heads=heads
    )


def measuring(name: str) -> list[object]:
    """Seconds of measuring the linear layers of a model on the CPU and on the GPU, and how far the Grams are apart."""
    torch.manual_seed(0)
    own = transformers.BertForMaskedLM(config_of(name))
    ids = torch.randint(1000, 30000, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    taken, grams = [], []
    for device in ("cpu", "cuda"):
        model = own.to(device)
        weights = [one for one in find_weights(model) if one.name.startswith("bert.encoder")]
        batches = [{"input_ids": part.to(device), "labels": part.to(device)} for part in ids.split(8)]
        start = time.perf_counter()
        found = measure(model, weights, batches, needs=KroneckerFisher().needs, quiet=True)
        taken.append(time.perf_counter() - start)
        grams.append(found.measured[weights[-1].name].fisher_gram.cpu())
    cpu, gpu = taken
    apart = float((grams[0] - grams[1]).norm() / grams[0].norm())
    return [name, f"{cpu:.1f}", f"{gpu:.1f}", f"{gpu / cpu:.2f}", f"{apart:.0e}"]


def forms(name: str, turns: int) -> list[list[str]]:
    """Rows of times of one model."""
    torch.manual_seed(0)
    own = transformers.BertModel(config_of(name)).eval().requires_grad_(False)
    coded = copy.deepcopy(own)
    kflats.compress_(coded, {"linear": Recipe(KeepDense(), codec=Integer(bits=8))}, keep="30%", quiet=True)
    models = {"float32": own, "bfloat16": copy.deepcopy(own).to(torch.bfloat16)}
    for form in get_args(RunForm):
        models[f"codes, {form}"] = made = copy.deepcopy(coded)
        run_as_(made, form)
    contestants = [
        Contestant(f"{kind}{', compiled' * compiled}", model.cuda(), compiled)
        for kind, model in models.items()
        for compiled in (False, True)
        if not compiled or kind in COMPILED
    ]
    torch.compiler.reset()
    timed, reasons = latencies(contestants, own, shapes=SHAPES, turns=turns)
    lines = {one.name: [name, one.name] for one in contestants}
    for one in timed:
        lines[one.name].append(f"{one.ratio:.2f} ({one.ms:.2f} ms)")
    for kind, why in reasons.items():
        print(f"{kind}: {why}")
    return [[*line, *["not run"] * (2 + len(SHAPES) - len(line))] for line in lines.values()]


class Layer(nn.Module):
    """One linear layer, whose inputs are numbers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def drawn(rows: int, columns: int) -> Tensor:
    """Normal numbers, whose columns shrink as the singular values of trained weights do."""
    gen = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=gen) * torch.arange(1, columns + 1).rsqrt()


def took(make: Callable[[], nn.Module], device: str, **options: Any) -> tuple[float, float]:
    """Seconds of compressing on a device, and the relative squared error."""
    model = make().to(device)
    start = time.perf_counter()
    report = kflats.compress_(model, quiet=True, **options)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, report.weights[0].error_unweighted


def compressing() -> list[list[str]]:
    """Rows of seconds."""
    jobs: list[tuple[str, str, Callable[[], nn.Module], dict[str, Any]]] = []
    for side in SIDES:
        for name, (recipe, keep) in LAYERS.items():
            jobs.append(
                (
                    f"layer {side:,} x {side:,}",
                    name,
                    partial(lambda n: Layer(drawn(n, n)), side),
                    {
                        "recipes": {"linear": recipe},
                        "keep": keep,
                    },
                )
            )
    for name, (recipe, keep) in TABLES.items():
        jobs.append(
            (
                f"table {ROWS:,} x 64",
                name,
                lambda: nn.ModuleDict({"table": nn.Embedding(ROWS, 64, _weight=drawn(ROWS, 64))}),
                {
                    "recipes": {"table": recipe},
                    "keep": keep,
                },
            )
        )
    lines = []
    for what, name, make, options in jobs:
        found = []
        for device in ("cuda", "cpu"):
            given = dict(options)
            if "Feedback" in name:
                side = make().linear.weight.shape[1]  # type: ignore[union-attr]
                batches = [{"x": drawn(512, side).to(device)} for _ in range(4)]
                given["calibration"] = batches
            found.append(took(make, device, **given))
        (gpu, error), (cpu, reference) = found
        lines.append([what, name, f"{cpu:.2f}", f"{gpu:.2f}", f"{gpu / cpu:.2f}", f"{reference:.4f}", f"{error:.4f}"])
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    options = arguments(__doc__, turns=30)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU of CUDA")
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    torch.cuda.init()
    timed = ["shape of", "model", *(f"{texts} x {tokens}" for texts, tokens in SHAPES)]
    seconds = ["seconds, CPU", "seconds, GPU", "GPU / CPU"]
    made = [f"{torch.cuda.get_device_name()}; {os.cpu_count()} processors."]
    parts: list[tuple[str, list[str], Callable[[], Sequence[Sequence[object]]]]] = [
        (
            "Times of calls, of float32 as it is",
            timed,
            lambda: [row for name in MODELS for row in forms(name, options.turns)],
        ),
        (
            f"Measuring {SAMPLES} texts of {TOKENS} tokens",
            ["shape of", *seconds, "Gram matrices apart"],
            lambda: [measuring("BERT-base")],
        ),
        ("Compressing one weight", ["weight", "method", *seconds, "error, CPU", "error, GPU"], compressing),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, head, rows in parts:
            made.append(f"{what}:\n\n{markdown(head, rows())}")
            publish(TITLE, "\n\n".join(made), options)  # a run that is ended leaves the parts that it finished


if __name__ == "__main__":
    main()
