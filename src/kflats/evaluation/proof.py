"""A compressed folder beside the original's: outputs, run-time forms, sizes, memory, and time. A run ends with it.

Memory and the time to the first output are those of a process of its own: its peak after the first output minus its
peak after all imports. Loading, decoding and the first run are counted; Python, torch and transformers are not.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import Update, number, plain, progress_bar, share, size, table, visible
from kflats.common.release import needed
from kflats.common.run_forms import FormLoss
from kflats.common.schema import decode
from kflats.common.texts import Tokenizer
from kflats.evaluation.forms import MOST_LOSS, fastest, form_losses
from kflats.evaluation.latency import Latency, TorchModel, latencies
from kflats.evaluation.outputs import Judge, Outputs, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import collate, drawn_samples, modality_of, run
from kflats.io.saving import load_model, note_losses_
from kflats.io.sources import (
    read_config,
    resolve_model,
    static_folder,
    trusting_remote_code,
    trusts_remote_code,
    weights_folder,
)
from kflats.io.static import StaticModel, import_library
from kflats.model.weights import compute_dtype

_TOKENS = 20
_PROGRAM = "import sys; from kflats.evaluation.proof import measured_here; print(measured_here(*sys.argv[1:]))"


@dataclass(frozen=True)
class Footprint:
    """What one model takes in a fresh process.

    Args:
        memory_bytes: peak after the first output minus peak after the imports; None where the system does not tell.
        first_output_s: seconds from the begin of loading to the first output, of one text of 20 tokens.
    """

    memory_bytes: int | None
    first_output_s: float


def footprint(folder: str | os.PathLike[str]) -> Footprint:
    """Load the model in ``folder`` in a fresh process, run it once, and say what that took.

    Raises:
        KflatsError: the process failed; its last line is the cause.
    """
    arguments = [os.fspath(folder), *(["trusted"] if trusts_remote_code() else [])]
    return in_fresh_process(_PROGRAM, *arguments, what=f"the model in {os.fspath(folder)}")


def in_fresh_process(program: str, *arguments: str, what: str) -> Footprint:
    """What ``footprint_of`` says in a process of its own, whose ``program`` prints it last; ``what``: for errors.

    Raises:
        KflatsError: the process failed; its last line is the cause.
    """
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise KflatsError(f"{what} cannot be run in a fresh process", cause=lines[-1])
    result: Footprint = decode(Footprint, json.loads(done.stdout.splitlines()[-1]), "footprint")
    return result


def footprint_of(start: Callable[[], object]) -> str:
    """What ``start``, which loads a model and runs it once, takes in this process, as JSON."""
    imported, began = peak_memory(), time.perf_counter()
    start()
    seconds, peak = time.perf_counter() - began, peak_memory()
    memory = None if peak is None or imported is None else peak - imported
    return json.dumps(asdict(Footprint(memory, seconds)))


def peak_memory() -> int | None:
    """The largest resident memory of this process so far, in bytes; None where the system does not tell."""
    status = Path("/proc/self/status")  # getrusage counts the memory of the parent too, on Linux
    if status.is_file():
        peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="ascii", errors="replace"), re.M)
        return None if peak is None else 1024 * int(peak[1])  # containers may have a shorter file
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def measured_here(folder: str, trusted: str = "") -> str:
    """The footprint of the model in ``folder`` in this process, which loaded no model before, as JSON.

    Args:
        folder: of the model. trusted: not "" where its own code may be run.
    """
    library = needed("transformers", "kflats[hf]", "loading a model")
    for name in filter(find_spec, ("tokenizers", "constriction")):  # what a compressed folder may import while it loads
        import_module(name)
    with trusting_remote_code() if trusted else nullcontext():
        if (static := static_folder(folder)) is not None:
            if "quantization_config" not in (origin := read_config(static)):
                import_library(origin)
        else:
            config = library.AutoConfig.from_pretrained(
                weights_folder(folder), local_files_only=True, trust_remote_code=trusts_remote_code()
            )
            for name in ("AutoModel", *(getattr(config, "architectures", None) or ())):
                getattr(library, name, None)  # imports the code of the model
        return footprint_of(partial(_loaded_and_run, folder))


def _loaded_and_run(folder: str) -> None:
    model = load_model(folder)
    with torch.inference_mode():
        run(model, collate(drawn_samples(model, 1, _TOKENS), 0))


COLUMNS = ("", "original", "bfloat16", "compressed", "compressed / original")
FORM_COLUMNS = ("run-time form", "loss", "95th percentile")
_BFLOAT16, _COMPRESSED = COLUMNS[2:4]
_SECONDS = 2.0  # of the turns of one shape
_ALIKE = 0.8  # loss: near 1 for the vectors of unrelated models

_STATIC = "no network runs; texts take the time of the tokenizer, and of rows that are decoded"


@dataclass(frozen=True)
class Proof:
    """What a compression did; printing it gives tables.

    Args:
        outputs: how far the outputs are from the original's.
        files: bytes of the weight files, of the original and of the compressed folder.
        footprints: memory and time to the first output of both in fresh processes; None: not measured.
        latencies: of the original, of the original in bfloat16, and of the compressed model, for each shape.
        untimed: why some of them are missing.
        forms: what the compressed model loses in each run-time form; none without coded layers that multiply.
    """

    outputs: Outputs
    files: tuple[int, int]
    footprints: tuple[Footprint, Footprint] | None
    latencies: tuple[Latency, ...]
    untimed: tuple[str, ...] = ()
    forms: tuple[FormLoss, ...] = ()

    def rows(self) -> list[list[str]]:
        """Sizes, memory and times as text, under ``COLUMNS``."""
        rows = [["weight files", *_pair(self.files, size)]]
        if self.footprints is not None:
            memory, first = zip(*((one.memory_bytes, one.first_output_s) for one in self.footprints), strict=True)
            if None not in memory:
                rows.append(["memory of a fresh process", *_pair(memory, size)])
            rows.append(["loading and first output", *_pair(first, "{:.2f} s".format)])
        for shape in dict.fromkeys((one.samples, one.tokens) for one in self.latencies):
            times = {one.name: one for one in self.latencies if (one.samples, one.tokens) == shape}
            cells = [f"{times[name].ms:.1f} ms" if name in times else "-" for name in COLUMNS[1:4]]
            ours = times.get(_COMPRESSED)
            ratio = "-" if ours is None else f"{share(ours.ratio)} ({share(ours.low)} to {share(ours.high)})"
            rows.append(["{} x {} tokens".format(*shape) if shape[1] else f"a batch of {shape[0]}", *cells, ratio])
        return rows

    def form_rows(self) -> list[list[str]]:
        """What each run-time form loses, as text, under ``FORM_COLUMNS``."""
        return [
            [
                one.form if one.integers is None else f"{one.form}, integers to {one.integers}",
                number(one.loss),
                number(one.tail_loss),
            ]
            for one in self.forms
        ]

    def __str__(self) -> str:
        out = self.outputs
        parts = [plain(table(COLUMNS, self.rows())), "", out.summary]
        parts += [plain(table(["", "compressed", "original"], out.rows())), ""]
        parts += [plain(table(FORM_COLUMNS, self.form_rows())), ""] if self.forms else []
        parts += [f"times: {self.conditions}", *map(visible, self.untimed)]
        if out.loss > _ALIKE:
            parts.append("the outputs are hardly alike: is the second model a compressed version of the first?")
        if out.heavy:
            parts += ["", f"warning: one in twenty loses {number(out.tail_loss)} or more. The worst:"]
            parts += [f"  {number(one.loss)}  {visible(one.text)}" for one in out.worst]
        return "\n".join(parts)

    @property
    def conditions(self) -> str:
        """How the times were measured."""
        if not self.latencies:
            return "not measured"
        turns = [one.turns for one in self.latencies]
        threads = max(one.threads for one in self.latencies)
        return (
            f"medians of {min(turns)} to {max(turns)} turns; the ratio is the median of the ratios of single turns, "
            f"with its 95 % interval; {threads} thread{'s' if threads > 1 else ''}"
        )


def compare(
    original_folder: str | os.PathLike[str],
    compressed_folder: str | os.PathLike[str],
    texts: Sequence[str] | None = None,
    *,
    turns: int = 20,
    fresh: bool = True,
    quiet: bool = True,
) -> Proof:
    """Load two models, and compare their outputs, sizes, memory and times.

    Args:
        original_folder: a local folder or a hub name.
        compressed_folder: what ``kflats compress`` or ``save_pretrained`` wrote; read with its own tokenizer if its
            vocabulary is another, else with the original's.
        texts: to compare outputs on; None: the sentences of the package. As ``Judge``.
        turns: runs of each model at each shape; fewer where they take more than some seconds.
        fresh: also run each model in a fresh process, to measure memory and the time to the first output.
        quiet: no progress bar.

    Raises:
        KflatsError: a folder that holds no model or no tokenizer, or models that do not belong together.
    """
    folders = [resolve_model(os.fspath(folder)) for folder in (original_folder, compressed_folder)]
    with progress_bar(quiet=quiet) as update:
        outputs, forms, timed, untimed = _run_here(folders, texts, turns, update)
        gc.collect()  # the models, which hold methods of their own: each fresh process takes the memory of one
        footprints = None
        if fresh:
            update("proof: memory", 2, 4)
            first = footprint(folders[0])
            update("proof: memory", 3, 4)
            footprints = first, footprint(folders[1])
    files = weight_file_bytes(folders[0]), weight_file_bytes(folders[1])
    return Proof(outputs, files, footprints, timed, untimed, forms)


def _run_here(
    folders: Sequence[Path], texts: Sequence[str] | None, turns: int, update: Update
) -> tuple[Outputs, tuple[FormLoss, ...], tuple[Latency, ...], tuple[str, ...]]:
    """What both models give, what forms lose, times, and why some are missing; the models are let go of."""
    update("proof: outputs", 0, 4)
    models, judge, own = _judged(folders, texts)
    original, compressed = models
    outputs = judge(compressed, own)
    forms = form_losses(judge, compressed, own, outputs)
    update("proof: time", 1, 4)
    contestants = [TorchModel("original", original)]
    if compute_dtype(original) == torch.float32:
        contestants.append(TorchModel(_BFLOAT16, original, torch.bfloat16))
    contestants.append(TorchModel(_COMPRESSED, compressed))
    drawn_for = min(models, key=lambda model: _vocabulary(model) or 0)
    timed, reasons = list[Latency](), {"a static model": _STATIC}
    if not isinstance(original, StaticModel):
        text = judge.text if len({_vocabulary(model) for model in models}) == 1 else None
        timed, reasons = latencies(contestants, drawn_for, turns=turns, seconds=_SECONDS, text=text)
    return outputs, forms, tuple(timed), tuple(f"{name}: {why}" for name, why in reasons.items())


def settle_form_(
    original_folder: str | os.PathLike[str],
    compressed_folder: str | os.PathLike[str],
    texts: Sequence[str] | None = None,
    *,
    quiet: bool = True,
) -> None:
    """Let a compressed folder load in the fastest run-time form of this machine, as ``run_as_`` with "auto" chooses it.

    Args:
        original_folder, compressed_folder, texts: as ``compare``. quiet: as ``run_as_``.

    Raises:
        KflatsError: as ``compare``.
    """
    folders = [resolve_model(os.fspath(folder)) for folder in (original_folder, compressed_folder)]
    (_, compressed), judge, own = _judged(folders, texts)
    losses = form_losses(judge, compressed, own)
    note_losses_(compressed_folder, losses, fastest(compressed, losses, MOST_LOSS, quiet=quiet))


def _judged(folders: Sequence[Path], texts: Sequence[str] | None) -> tuple[list[nn.Module], Judge, Tokenizer | None]:
    """Both models, the judge of the first, and the tokenizer of the second."""
    models: list[nn.Module] = [load_model(folder) for folder in folders]
    tokenizer = own = None
    if modality_of(models[0]) == "input_ids":
        tokenizer = load_tokenizer(folders[0])
        own = _own_tokenizer(folders[1], tokenizer, models)
    return models, Judge(models[0], tokenizer, texts), own


def _own_tokenizer(folder: Path, tokenizer: Tokenizer, models: Sequence[nn.Module]) -> Tokenizer:
    """The tokenizer of a trimmed model's folder; ``tokenizer`` if the folder has none."""
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if len({_vocabulary(model) for model in models}) > 1:
            raise
        return tokenizer


def _vocabulary(model: nn.Module) -> int | None:
    return getattr(getattr(model, "config", None), "vocab_size", None)


def _pair(values: Sequence[float], shown: Callable[[float], str]) -> list[str]:
    return [shown(values[0]), "-", shown(values[1]), share(values[1], values[0])]
