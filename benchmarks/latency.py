"""Question: what does an encoder cost as other tools ship it, and as kflats does: file, memory, time, outputs?

all-MiniLM-L6-v2 in float32, bfloat16, compiled, by onnxruntime (float; int8 by default, and per channel with reduced
range), by torchao (int8, as it is and compiled), rounded by GPTQ (4 bits, groups of 64), and compressed by kflats to
8 MB: in each run-time form, in int8 compiled, with the whole model in bfloat16, and as an ONNX file of integers. The
integers of GPTQ are multiplied by torch's own kernel for 4 bits, in a model in bfloat16: of float32 it takes many times
as long. Its cosines are those of its numbers in float32, and its file has the bytes of its integers and scales.

Memory is that of a fresh process: its peak after the first output minus its peak after the imports. The original's file
is mapped, and rows of its table that no text has are not read. Times are ratios to float32 of batches of 20, 30 and 128
tokens of WikiText-2 (test), other ones in each call, with one thread and with all; contestants take turns, and a ratio
is a median over turns. In its turn a model is called for 50 ms; its time is then the mean of its calls without the
first, in which caches hold what others read; models that take longer are called once. Models are compiled in the first
output, without what is kept on the disk, and in turns that are not counted. Below: each ratio with its 95 % bootstrap
interval. Cosines to the original's vectors: mean and 5th percentile, of 800 sentences of STS-B (dev) and of 150
paragraphs of WikiText-2 (test). A last line has those of the ONNX file of integers to the same folder in float.

    python benchmarks/latency.py --write benchmarks/results/latency.md
    python benchmarks/latency.py --quick 1        # small shapes, few turns: does everything run?

``--torchao 0`` leaves torchao out: on CPUs without VNNI units ``torch._int_mm``, by which it multiplies, takes 9 to 42
times as long as a product of floats.

``--late 1`` lets kflats decode the table of this model when rows are read, as it does with longer ones.
``--compressed DIR`` takes a folder of kflats that is there. ``--onednn AVX512_CORE_VNNI`` keeps torch's library for
products from the units for bfloat16 and from AMX, as on CPUs that have none (its variable ONEDNN_MAX_CPU_ISA).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from _common import arguments, markdown, publish, resident, table
from _sentences import data_folder, paragraphs, sentences
from gptq_entropy import Rival
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from whole_model import evenly

from kflats import compress_folder, read_texts, run_as_
from kflats.common.errors import KflatsError, first_line
from kflats.common.formatting import size as in_units
from kflats.common.release import needed
from kflats.common.run_forms import RunForm
from kflats.demo import packaged_model
from kflats.demo.gptq import GROUP, group_steps
from kflats.demo.ways import as_onnx, onnx_run, vectors
from kflats.evaluation.latency import SHAPES, Latency, Run, latencies
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import run
from kflats.export.onnx import export_onnx
from kflats.io import load_model
from kflats.model import description

NARROW = {"per_channel": True, "reduce_range": True}
INTEGERS = "kflats, int8 in onnxruntime"
CODES = "four_bits.bin"  # no name of a weight file, of which a folder has one
TITLE = "An encoder as other tools ship it: files, memory, time and outputs"


@dataclass(frozen=True)
class Way:
    """A way to ship a model: ``write`` makes its files in a folder and returns their bytes, ``opened`` gives outputs to
    compare, and ``run`` what is timed, if that is not the same."""

    name: str
    write: Callable[[Path], int]
    opened: Callable[[Path], Run]
    run: Callable[[Path], Run] | None = None
    imports: str = "transformers.models.bert.modeling_bert"

    @property
    def runs(self) -> Callable[[Path], Run]:
        """What is timed."""
        return self.run or self.opened

    def at(self, place: Path) -> Path:
        """Its folder."""
        return place / "".join(c if c.isalnum() else "-" for c in self.name)


@dataclass(frozen=True)
class Placed:
    """A way whose files are written."""

    way: Way
    place: Path

    @property
    def name(self) -> str:
        return self.way.name

    def build(self) -> Run:
        return self.way.runs(self.way.at(self.place))


def tools(source: Path, torchao: bool = True) -> list[Way]:
    """The model in ``source`` as other tools ship it; the first is what the others are compared with."""
    original = partial(load_model, source)
    made = [
        Way("float32", partial(written, original), of_torch),
        Way("bfloat16", partial(written, lambda: original().bfloat16()), of_torch),
        Way("torch.compile", partial(written, original), of_compiled),
        Way("onnxruntime, float32", partial(in_onnx, source), of_onnx, imports="onnxruntime"),
        Way("onnxruntime, int8", partial(in_onnx, source, settings={}), of_onnx, imports="onnxruntime"),
        Way(
            "onnxruntime, int8 per channel, reduced range",
            partial(in_onnx, source, settings=NARROW),
            of_onnx,
            imports="onnxruntime",
        ),
        Way("torchao, int8", partial(as_torchao, source), of_torchao, imports="torchao.quantization"),
        Way(
            "torchao, int8, torch.compile",
            partial(as_torchao, source),
            of_torchao_compiled,
            imports="torchao.quantization",
        ),
    ]
    return [way for way in made if torchao or not way.name.startswith("torchao")]


def ways(compressed: Path, windows: int = 512, torchao: bool = True) -> list[Way]:
    """``tools`` and, after them, GPTQ and kflats."""
    return [
        *tools(packaged_model(), torchao),
        Way("GPTQ, 4 bits", partial(gptq, windows), of_torch, of_four_bits),
        *(Way(f"kflats, {form}", partial(in_form, compressed, form), of_torch) for form in get_args(RunForm)),
        Way("kflats, int8, torch.compile", partial(in_form, compressed, "int8"), of_compiled),
        Way("kflats, the model in bfloat16", partial(in_form, compressed, "dense"), of_torch_in_bfloat16),
        Way(INTEGERS, partial(as_integers, compressed), of_onnx, imports="onnxruntime"),
    ]


def written(make: Callable[[], Any], folder: Path) -> int:
    make().save_pretrained(folder)
    return weight_file_bytes(folder)


def in_form(compressed: Path, form: RunForm, folder: Path) -> int:
    model = load_model(compressed)
    run_as_(model, form)
    return written(lambda: model, folder)


def of_torch(folder: Path) -> Run:
    return partial(run, load_model(folder).eval())


def of_torch_in_bfloat16(folder: Path) -> Run:
    return partial(run, load_model(folder).bfloat16().eval())


def of_compiled(folder: Path) -> Run:
    """Each shape is compiled in the turn that is not counted."""
    return partial(run, torch.compile(load_model(folder).eval()))


def in_onnx(source: Path, folder: Path, settings: dict[str, Any] | None = None) -> int:
    return as_onnx(source, folder / "model.onnx", settings)


def as_integers(compressed: Path, folder: Path) -> int:
    folder.mkdir(parents=True)
    return export_onnx(load_model(compressed), folder / "model.onnx", int8=True).nbytes


def of_onnx(folder: Path) -> Run:
    return onnx_run(folder / "model.onnx")


def as_torchao(source: Path, folder: Path) -> int:
    """torchao rounds a model that is loaded; its file would be its state."""
    folder.mkdir(parents=True)
    load_model(source).save_pretrained(folder)
    torch.save(rounded_by_torchao(folder).state_dict(), folder / "state.pt")
    return (folder / "state.pt").stat().st_size


def of_torchao(folder: Path) -> Run:
    return partial(run, rounded_by_torchao(folder))


def of_torchao_compiled(folder: Path) -> Run:
    return partial(run, torch.compile(rounded_by_torchao(folder)))


def rounded_by_torchao(folder: Path) -> nn.Module:
    """Weights rounded once, activations in every call."""
    library = needed("torchao.quantization", "kflats[baselines]", "rounding by torchao")
    model: nn.Module = load_model(folder).eval()
    library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig())
    return model


def gptq(windows: int, folder: Path) -> int:
    """The numbers of int4 codes as float32, and the codes of layers beside them; the bytes are those of all codes."""
    data = data_folder()
    assert data is not None
    rival = Rival(read_texts(data / "wikitext2" / "train.txt.gz"), windows)
    model, nbytes = rival.int4(4)
    model.save_pretrained(folder)
    tensors = dict[str, Tensor]()
    for weight in rival.layers:
        steps = group_steps(rival.weight(weight.name), 4)
        levels = (model.get_submodule(weight.name).weight.detach() / steps).round().to(torch.int32)
        scales = steps[:, ::GROUP].T.to(torch.bfloat16)
        tensors[f"{weight.name}.packed"] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels + 8, 1)
        tensors[f"{weight.name}.scales"] = torch.stack([scales, torch.zeros_like(scales)], dim=2).contiguous()
    save_file(tensors, folder / CODES)
    return nbytes


class FourBits(nn.Module):
    """A linear layer of 4-bit integers less 8, in groups of ``GROUP`` inputs with a scale each, in bfloat16."""

    def __init__(self, packed: Tensor, scales: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.packed, self.scales, self.bias = packed, scales, bias

    def forward(self, x: Tensor) -> Tensor:
        """``(*b, in)`` -> ``(*b, out)`` in bfloat16."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, GROUP, self.scales) + self.bias
        return out.view(*x.shape[:-1], -1)


def of_four_bits(folder: Path) -> Run:
    """The layers are replaced before their numbers are read from the mapped file."""
    model, codes = load_model(folder).eval(), load_file(folder / CODES)
    for name in {key.rpartition(".")[0] for key in codes}:
        parent, _, leaf = name.rpartition(".")
        bias = model.get_submodule(name).bias.detach().bfloat16()
        layer = FourBits(codes[f"{name}.packed"], codes[f"{name}.scales"], bias)
        setattr(model.get_submodule(parent), leaf, layer)
    return partial(run, model.bfloat16())


def alone(way: Way, folder: Path) -> None:
    """Print the memory and the seconds to the first output in this process, after its imports."""
    importlib.import_module("transformers.models.bert.modeling_bert")
    importlib.import_module(way.imports)
    ids = torch.randint(0, 30_000, (1, 20), generator=torch.Generator().manual_seed(0))
    before, start = resident("VmHWM"), time.perf_counter()
    with torch.inference_mode():
        way.runs(folder)({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    seconds = time.perf_counter() - start
    print(json.dumps([resident("VmHWM") - before, seconds]))


def in_a_process(way: Way, place: Path, compressed: Path) -> tuple[int, float]:
    """What ``alone`` prints."""
    command = [sys.executable, __file__, "--alone", way.name, "--place", str(place), "--compressed", str(compressed)]
    command += ["--late", "1"] * (not description.LATE)
    cold = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # on the disk, of the outputs that were judged
    done = subprocess.run(command, capture_output=True, text=True, env=cold)
    if done.returncode:
        raise SystemExit(done.stderr)
    memory, seconds = json.loads(done.stdout.splitlines()[-1])
    return memory, seconds


def main() -> None:
    options = arguments(__doc__, turns=15, quick=0, compressed="", alone="", place="", onednn="", torchao=1, late=0)
    if options.late:
        description.LATE = 0
    if options.onednn:  # read when its first product is made; processes that are started inherit it
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.onednn
    if options.alone:
        way = next(one for one in ways(Path(options.compressed)) if one.name == options.alone)
        alone(way, way.at(Path(options.place)))
        return
    import torch._dynamo  # here: other processes of this file measure what loading takes

    # Several compiled models in a process share code, which has eight graphs at most; then it runs without a compiler.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressed = Path(options.compressed or f"{place}/8MB")
        if not options.compressed:
            data = data_folder()
            assert data is not None
            texts = read_texts(data / "wikitext2" / "train.txt.gz")
            compress_folder(packaged_model(), compressed, size="8MB", texts=texts, proof=False, quiet=True)
        publish(TITLE, compared(Path(place), compressed, options), options)


def compared(place: Path, compressed: Path, options: Any) -> str:
    """Both tables."""
    threads = sorted({1, torch.get_num_threads()})
    torch.set_num_threads(1)
    few = 64 if options.quick else 800
    judged = {"sentences": evenly(sentences("stsb"), few), "paragraphs": paragraphs("test", max(16, few * 3 // 16))}
    tokenizer = load_tokenizer(packaged_model())
    placed, lines, before = list[Way](), dict[str, dict[str, object]](), dict[str, Tensor]()
    reasons: dict[str, str] = {}
    in_float: dict[str, Tensor] = {}
    notes: list[str] = []
    for way in ways(compressed, 32 if options.quick else 512, bool(options.torchao)):
        try:
            nbytes, runs = way.write(way.at(place)), way.opened(way.at(place))
        except KflatsError as error:
            reasons[way.name] = first_line(error)
            continue
        line: dict[str, object] = {"shipped as": way.name, "file": in_units(nbytes)}
        for name, texts in judged.items():
            own = vectors(runs, tokenizer, texts)
            near = fidelity_of(before.setdefault(name, own), own)
            if way.name == "kflats, dense":
                in_float[name] = own
            if way.name == INTEGERS:
                same = fidelity_of(in_float[name], own)
                cosines = f"{same.mean_cosine:.4f} / {same.p5_cosine:.4f}"
                notes.append(f"- {INTEGERS}, cosine to kflats, dense, {name}: {cosines}")
            line[name] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
        del runs
        memory, seconds = in_a_process(way, place, compressed)
        line |= {"memory": in_units(memory), "first output": f"{seconds:.2f} s"}
        placed.append(way)
        lines[way.name] = line
        print(line, flush=True)
    timed: list[Latency] = []
    text = torch.tensor(tokenizer("\n".join(paragraphs("test", 10**6)), verbose=False)["input_ids"])
    for count in threads:
        torch.set_num_threads(count)
        shapes = [(1, 20), (4, 30)] if options.quick else SHAPES
        turns = 3 if options.quick else options.turns
        contestants = [Placed(way, place) for way in placed]
        found, unavailable = latencies(contestants, load_model(packaged_model()), shapes=shapes, turns=turns, text=text)
        timed, reasons = timed + found, reasons | unavailable
    columns = [f"{a} x {b}, {t} thread{'s' * (t > 1)}" for t in threads for a, b in shapes]
    for line in lines.values():
        line |= {name: "-" for name in ("memory", "first output", *columns) if name not in line}
    for one in timed:
        column = f"{one.samples} x {one.tokens}, {one.threads} thread{'s' * (one.threads > 1)}"
        lines[one.name][column] = f"{one.ratio:.2f}"
    head = ["run by", "texts x tokens", "threads", "median", "time / float32"]
    each = [
        [
            one.name,
            f"{one.samples} x {one.tokens}",
            one.threads,
            f"{one.ms:.1f} ms",
            f"**{one.ratio:.2f}** ({one.low:.2f} to {one.high:.2f})",
        ]
        for one in timed
    ]
    notes += [f"- {name} cannot run here: {why}" for name, why in reasons.items()]
    return "\n".join([table(list(lines.values())), "", markdown(head, each), "", *notes]).strip()


if __name__ == "__main__":
    main()
