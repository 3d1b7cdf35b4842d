"""The demo: a real encoder in three sizes, beside what other tools make of it. It needs no network.

No texts are given: sentences of the package and drawn tokens are measured with, and other sentences of the package are
compared on and searched.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.common.errors import KflatsError, first_line
from kflats.common.formatting import announce, plain, size, table
from kflats.common.machine import cores
from kflats.common.texts import Tokenizer, packaged_texts
from kflats.common.workers import Packed, Workers
from kflats.compress.pipeline import Prepared, compress_folder
from kflats.demo.gptq import in_four_bits
from kflats.demo.packaged import packaged_model
from kflats.demo.page import PAGE, Point, Search, draw, write_page
from kflats.demo.ways import Way, as_onnx, in_onnxruntime, in_torch, vectors
from kflats.evaluation.forms import run_as_
from kflats.evaluation.latency import Latency, Run, latencies
from kflats.evaluation.outputs import Fidelity, fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.proof import Footprint
from kflats.io import load_model
from kflats.io.atomic import new_folder
from kflats.planning.calibration_data import CalibrationData
from kflats.report.html import REPORT_PAGE, render

SIZES = ("20MB", "8MB", "6MB")
QUERIES = (
    "a program that does not work",
    "a place to stay where nobody could sleep",
    "looking for a flat to rent",
    "the package never came",
    "an animal that took food",
)
_FOUND = 3
_SHAPES = ((1, 20), (32, 30))
_TURNS, _SECONDS = 9, 20.0  # of each shape: without units for it, bfloat16 takes seconds a batch
_PARAGRAPH = 6  # sentences
_COLUMNS = ("shipped as", "file", "memory", "1 x 20", "32 x 30", "sentences", "5th perc.", "paragraphs", "5th perc.")


@dataclass(frozen=True)
class Line:
    """A way to ship the model, and what was measured of it.

    Args:
        sentences, paragraphs: cosines of their vectors to the original's.
        memory: bytes of a fresh process, its peak after the first output less its peak after the imports.
        times: of one text of 20 tokens and of 32 of 30, as multiples of the original's; none that no kernel runs.
    """

    way: Way
    sentences: Fidelity
    paragraphs: Fidelity
    memory: int | None
    times: tuple[Latency, ...]

    @property
    def ours(self) -> bool:
        """Whether kflats made it."""
        return self.way.name.startswith("kflats")

    def cells(self) -> list[str]:
        """As text, in the order of the columns."""
        ratios = {(one.samples, one.tokens): f"{one.ratio:.2f}" for one in self.times}
        times = [ratios.get(shape, "-") for shape in _SHAPES]
        cosines = [f"{v:.4f}" for near in (self.sentences, self.paragraphs) for v in (near.mean_cosine, near.p5_cosine)]
        memory = "-" if self.memory is None else size(self.memory)
        return [self.way.name, size(self.way.nbytes), memory, *times, *cosines]


def demo(
    out: str | os.PathLike[str],
    *,
    sizes: Sequence[str] = SIZES,
    force: bool = False,
    quiet: bool = False,
    show: Callable[[str], None] = lambda _: None,
    workers: Workers | None = None,
) -> None:
    """Compress the packaged model, compare it with other ways to ship it, and search sentences with it.

    ``out`` gets a model folder for each size, ``index.html`` with the table, its picture and the search, and
    ``report/report.html`` about the smallest size but one.

    Args:
        out: a new folder.
        sizes: of the folders, as ``compress_folder`` takes them.
        force: replace a folder of an earlier demo.
        quiet: no progress bar.
        show: called with each part of the result as soon as it is computed; the command line prints it.
        workers: who compress together; the first alone compares.

    Raises:
        KflatsError: the model or an extra is not installed; ``out`` exists; no size, or one that cannot be met.
    """
    if not sizes:
        raise KflatsError("the demo needs a size", hint="one such as 8MB")
    began, source, searched = time.monotonic(), packaged_model(), sizes[min(1, len(sizes) - 1)]
    workers = workers or Workers()
    with new_folder(out, force, [source], workers) as folder, tempfile.TemporaryDirectory() as place:
        prepared, others = Prepared(), folder / ".others"  # which all workers see
        for wanted in sizes:
            show(f"kflats compress all-MiniLM-L6-v2 --size {wanted} --out {Path(out) / wanted}")
            report = compress_folder(
                source, folder / wanted, size=wanted, prepared=prepared, quiet=quiet, workers=workers
            )
            if wanted == searched and workers.first:
                render(report, folder / "report")
        tokenizer = load_tokenizer(source)
        announce("bfloat16, onnxruntime and GPTQ make their own", quiet=quiet or not workers.first)
        ways = _ways(source, others, tokenizer, show, workers)
        if not workers.first:
            return
        ways += [in_torch(f"kflats --size {one}", weight_file_bytes(folder / one), folder / one) for one in sizes]
        ways += _in_integers(f"kflats --size {searched}, run as int8", folder / searched, Path(place), show)
        lines, encoders = _compared(ways, load_model(source), tokenizer, quiet, show)
        rows = [line.cells() for line in lines]
        show(f"\n{plain(table(_COLUMNS, rows))}\n")
        searches = _searches(encoders[ways[0].name], encoders[f"kflats --size {searched}"], tokenizer)
        show("\n".join(_as_text(one, searched) for one in searches))
        points = [_point(line) for line in lines[1:] if "run as" not in line.way.name]
        write_page(
            folder,
            _COLUMNS,
            rows,
            [line.ours for line in lines],
            draw(points),
            searches,
            searched,
            len(packaged_texts("judge")),
        )
        shutil.rmtree(others)
    made = Path(out).resolve()
    folders = ", ".join(str(made / one) for one in sizes)
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    show(f"\nmodels: {folders}\npage:   {made / PAGE}\nreport: {made / 'report' / REPORT_PAGE}")
    show(f"took:   {minutes} min {seconds} s on {cores()} cores, imports not counted")


def _point(line: Line) -> Point:
    loss, name = 1 - line.sentences.mean_cosine, line.way.name.removeprefix("kflats --size ")
    return Point(name, line.way.nbytes, loss, "kflats" if line.ours else "")


def _ways(source: Path, place: Path, tokenizer: Tokenizer, show: Callable[[str], None], workers: Workers) -> list[Way]:
    """The original, and what other tools make of it. One whose package is missing is left out, and said so."""
    place.mkdir(exist_ok=True)

    def in_bfloat16() -> int:
        _save(load_model(source).bfloat16(), place / "bfloat16")
        return weight_file_bytes(place / "bfloat16")

    def by_gptq() -> int:
        original = load_model(source)
        data = CalibrationData(packaged_texts("count"), tokenizer).windowed(original)
        batches = [{k: v for k, v in batch.items() if isinstance(v, Tensor)} for batch in data.batches(original)]
        rounded, nbytes = in_four_bits(original, batches)
        _save(rounded, place / "gptq")
        return nbytes

    makers: dict[str, Callable[[], int]] = {
        "bfloat16": in_bfloat16,
        "onnxruntime, int8": lambda: as_onnx(source, place / "int8.onnx", settings={}),
        "GPTQ, 4 bits": by_gptq,
    }
    names = list(makers)

    def make(index: int) -> tuple[int, str]:
        try:
            return makers[names[index]](), ""
        except KflatsError as error:
            return 0, first_line(error)

    packed = Packed[tuple[int, str]](json.dumps, lambda _, text: (json.loads(text)[0], json.loads(text)[1]))
    longest_first = range(len(names))[::-1]
    made = dict(zip(names, workers.divided(names, make, packed, longest_first), strict=True))
    for name, (_, missing) in made.items():
        if missing and workers.first:
            show(f"{name}: {missing}")
    ways = {
        "bfloat16": in_torch("bfloat16", made["bfloat16"][0], place / "bfloat16"),
        "GPTQ, 4 bits": in_torch("GPTQ, 4 bits", made["GPTQ, 4 bits"][0], place / "gptq", kernel=False),
    }
    if not made["onnxruntime, int8"][1]:
        ways["onnxruntime, int8"] = in_onnxruntime("onnxruntime, int8", place / "int8.onnx")
    original = in_torch("original, float32", weight_file_bytes(source), source)
    return [original, *(ways[name] for name in names if name in ways and not made[name][1])]


def _save(model: Any, folder: Path) -> None:
    """``save_pretrained`` writes in the first of several workers alone."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = model.dtype  # in which it is loaded
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _in_integers(name: str, folder: Path, place: Path, show: Callable[[str], None]) -> list[Way]:
    """The same codes, multiplied as integers, where this machine can."""
    model = load_model(folder)
    try:
        run_as_(model, "int8")
        model.save_pretrained(place / "int8")
        return [in_torch(name, weight_file_bytes(place / "int8"), place / "int8")]
    except KflatsError as error:
        show(f"{name}: {first_line(error)}")
        return []


@dataclass(frozen=True)
class _Encoder:
    """A way that is built, and the vectors of the package's sentences by it."""

    runs: Run
    sentences: Tensor


def _compared(
    ways: Sequence[Way], original: nn.Module, tokenizer: Tokenizer, quiet: bool, show: Callable[[str], None]
) -> tuple[list[Line], dict[str, _Encoder]]:
    """What each way costs and loses; the first is what the others are compared with. Also all of them, by name."""
    sentences = packaged_texts("judge")
    paragraphs = [" ".join(sentences[i : i + _PARAGRAPH]) for i in range(0, len(sentences), _PARAGRAPH)]
    announce("comparing: outputs, memory of fresh processes, times in turns", quiet=quiet)
    runs = {way.name: way.build() for way in ways}
    near, read, threads = [], [], torch.get_num_threads()
    torch.set_num_threads(cores())  # the other workers have left
    for texts in (sentences, paragraphs):
        read.append({name: vectors(runs[name], tokenizer, texts) for name in runs})
        near.append({name: fidelity_of(read[-1][ways[0].name], made) for name, made in read[-1].items()})
    torch.set_num_threads(threads)
    contestants = [_Ready(way.name, runs[way.name]) for way in ways if way.footprint is not None]
    read_by = tokenizer(list(packaged_texts("count")))["input_ids"]
    text = torch.tensor([token for ids in read_by for token in ids])
    timed, reasons = latencies(contestants, original, shapes=_SHAPES, turns=_TURNS, seconds=_SECONDS, text=text)
    for what, why in reasons.items():
        show(f"not timed: {what}: {why}")
    measured = {way.name: way.footprint for way in ways if way.footprint is not None}
    with ThreadPoolExecutor(2) as pool:  # a process that runs beside it does not change the memory of another
        found = pool.map(_called, measured.values())
        memory = {name: made.memory_bytes for name, made in zip(measured, found, strict=True)}
    lines = []
    for way in ways:
        times = tuple(one for one in timed if one.name == way.name)
        lines.append(Line(way, near[0][way.name], near[1][way.name], memory.get(way.name), times))
    return lines, {name: _Encoder(runs[name], read[0][name]) for name in runs}


def _called(footprint: Callable[[], Footprint]) -> Footprint:
    return footprint()


@dataclass(frozen=True)
class _Ready:
    """A contestant that is built."""

    name: str
    ready: Run

    def build(self) -> Run:
        """As ``Contestant``."""
        return self.ready


def _searches(original: _Encoder, small: _Encoder, tokenizer: Tokenizer) -> list[Search]:
    """What both find for every query."""
    sentences = packaged_texts("judge")
    both = []
    for encoder in (original, small):
        scores = vectors(encoder.runs, tokenizer, QUERIES) @ encoder.sentences.T
        best: torch.return_types.topk = scores.topk(_FOUND, dim=1)
        both.append(
            [
                tuple((sentences[i], float(v)) for i, v in zip(places.tolist(), values.tolist(), strict=True))
                for places, values in zip(best.indices, best.values, strict=True)
            ]
        )
    return [Search(query, first, second) for query, first, second in zip(QUERIES, *both, strict=True)]


def _as_text(one: Search, wanted: str) -> str:
    lines = [f"“{one.query}”"]
    for name, found in (("original", one.original), (wanted, one.small)):
        lines += [f"  {name:<9} {value:.3f}  {text}" for text, value in found]
    return "\n".join([*lines, ""])
