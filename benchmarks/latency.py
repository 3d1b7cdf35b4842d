"""Question: how fast is an encoder as other tools run it, and as kflats stores it?

all-MiniLM-L6-v2 in float32, bfloat16, compiled, by onnxruntime (float; int8 by default, and per channel with reduced
range) and by torchao (int8), and compressed by kflats to 8 MB in each run-time form and by onnxruntime (int8), with
one thread and with all.
Contestants take turns; a ratio is a median over turns, with its 95 % bootstrap interval. ``--compressed DIR`` takes a
folder that is there. A contestant that this machine cannot run says why under the table.

    python benchmarks/latency.py --write benchmarks/results/latency.md
    python benchmarks/latency.py --quick 1        # small shapes, few turns: does everything run?
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from _common import arguments, markdown, publish
from torch import nn

from kflats import compress_folder, run_as_
from kflats.common.release import needed
from kflats.common.run_forms import RunForm
from kflats.demo import packaged_model
from kflats.evaluation.latency import SHAPES, Batch, Contestant, Run, TorchModel, latencies
from kflats.evaluation.running import run
from kflats.export.onnx import export_onnx
from kflats.io import load_model


@dataclass(frozen=True)
class Compiled:
    """``torch.compile`` of the model; each shape is compiled in the turn that is not counted."""

    model: nn.Module
    name: str = "torch.compile"

    def build(self) -> Run:
        compiled = torch.compile(copy.deepcopy(self.model).eval())
        return lambda batch: run(compiled, batch)


@dataclass(frozen=True)
class Onnx:
    """The model's export run by onnxruntime, with torch's number of threads.

    ``int8``: rounded by onnxruntime's ``quantize_dynamic`` with ``settings``. ``own``: by kflats' export.
    """

    model: nn.Module
    name: str = "onnxruntime, float32"
    int8: bool = False
    own: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Run:
        runtime = needed("onnxruntime", "kflats[onnx]", self.name)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, rounded = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
            export_onnx(self.model, path, int8=self.own)
            if self.int8:
                quantization = needed("onnxruntime.quantization", "kflats[onnx]", self.name)
                quantization.quantize_dynamic(path, rounded, **self.settings)
            options = runtime.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = torch.get_num_threads()
            session = runtime.InferenceSession(
                str(rounded if self.int8 else path), options, providers=["CPUExecutionProvider"]
            )
        names = [one.name for one in session.get_inputs()]

        def run_session(batch: Batch) -> object:
            # Token types are optional for the model and an input of the file.
            feed = {name: batch.get(name, torch.zeros_like(batch["input_ids"])).numpy() for name in names}
            return session.run(None, feed)

        return run_session


@dataclass(frozen=True)
class TorchAo:
    """torchao's int8: weights rounded once, activations in every call."""

    model: nn.Module
    name: str = "torchao, int8"

    def build(self) -> Run:
        library = needed("torchao.quantization", "kflats[baselines]", self.name)
        model = copy.deepcopy(self.model).eval()
        library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig())
        return lambda batch: run(model, batch)


def contestants(original: nn.Module) -> list[Contestant]:
    """The original in float32, with which the others are compared, and the ways that other tools run it."""
    narrow = {"per_channel": True, "reduce_range": True}
    return [
        TorchModel("float32", original),
        TorchModel("bfloat16", original, torch.bfloat16),
        Compiled(original),
        Onnx(original),
        Onnx(original, "onnxruntime, int8", int8=True),
        Onnx(original, "onnxruntime, int8 per channel, reduced range", int8=True, settings=narrow),
        TorchAo(original),
    ]


def main() -> None:
    options = arguments(__doc__, turns=15, quick=0, compressed="")
    original = load_model(packaged_model())
    all_of_them = contestants(original)
    with tempfile.TemporaryDirectory() as place:
        folder = options.compressed or f"{place}/8MB"
        if not options.compressed:
            compress_folder(packaged_model(), folder, size="8MB", quiet=True)
        for form in get_args(RunForm):
            model = load_model(folder)
            run_as_(model, form)
            all_of_them.append(TorchModel(f"kflats, {form}", model))
        all_of_them.append(Onnx(load_model(folder), "kflats, int8 in onnxruntime", own=True))
    shapes = [(1, 20), (4, 30)] if options.quick else SHAPES
    reasons: dict[str, str] = {}
    lines = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        turns = 3 if options.quick else options.turns
        timed, unavailable = latencies(all_of_them, original, shapes=shapes, turns=turns)
        reasons |= unavailable
        for one in timed:
            ratio = f"**{one.ratio:.2f}** ({one.low:.2f} to {one.high:.2f})"
            lines.append([one.name, f"{one.samples} x {one.tokens}", one.threads, f"{one.ms:.1f} ms", ratio])
            print(lines[-1], flush=True)
    body = markdown(["run by", "texts x tokens", "threads", "median", "time / float32"], lines)
    notes = [f"- {name} cannot run here: {why}" for name, why in reasons.items()]
    publish("An encoder as other tools run it: time of a batch", "\n".join([body, "", *notes]).strip(), options)


if __name__ == "__main__":
    main()
