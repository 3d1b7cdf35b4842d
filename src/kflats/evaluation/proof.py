"""A compressed folder beside the original's: outputs, sizes, memory, and time. A run ends with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.common.progress import progress_bar
from kflats.evaluation.comparing import load_tokenizer, weight_file_bytes
from kflats.evaluation.footprint import Footprint, footprint
from kflats.evaluation.latency import Latency, TorchModel, latencies
from kflats.evaluation.outputs import Judge, Outputs
from kflats.evaluation.samples import medium_of
from kflats.io.folders import load_model
from kflats.io.sources import resolve_model
from kflats.model.weights import compute_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("", "original", "bfloat16", "compressed", "compressed / original")
_BFLOAT16, _COMPRESSED = COLUMNS[2:4]
_SECONDS = 2.0  # of the turns of one shape
_ALIKE = 0.8  # loss: near 1 for the vectors of unrelated models


@dataclass(frozen=True)
class Proof:
    """What a compression did; printing it gives tables.

    Args:
        outputs: how far the outputs are from the original's.
        files: bytes of the weight files, of the original and of the compressed folder.
        footprints: memory and time to the first output of both in fresh processes; None: not measured.
        latencies: of the original, of the original in bfloat16, and of the compressed model, for each shape.
        untimed: why some of them are missing.
    """

    outputs: Outputs
    files: tuple[int, int]
    footprints: tuple[Footprint, Footprint] | None
    latencies: tuple[Latency, ...]
    untimed: tuple[str, ...] = ()

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

    def __str__(self) -> str:
        out = self.outputs
        parts = [plain(table(COLUMNS, self.rows())), "", out.summary]
        parts += [plain(table(["", "compressed", "original"], out.rows())), ""]
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
        turns = [one.turns for one in self.latencies] or [0]
        threads = max((one.threads for one in self.latencies), default=0)
        return f"medians of {min(turns)} to {max(turns)} turns and 95 % intervals of the ratio; {threads} threads"


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
        update("proof: outputs", 0, 4)
        models: list[nn.Module] = [load_model(folder) for folder in folders]
        original, compressed = models
        tokenizer = own = None
        if medium_of(original) == "input_ids":
            tokenizer = load_tokenizer(folders[0])
            own = _own_tokenizer(folders[1], tokenizer, models)
        outputs = Judge(original, tokenizer, texts)(compressed, own)
        update("proof: time", 1, 4)
        contestants = [TorchModel("original", original)]
        if compute_dtype(original) == torch.float32:
            contestants.append(TorchModel(_BFLOAT16, original, torch.bfloat16))
        contestants.append(TorchModel(_COMPRESSED, compressed))
        drawn_for = min(models, key=lambda model: _vocabulary(model) or 0)
        timed, reasons = latencies(contestants, drawn_for, turns=turns, seconds=_SECONDS)
        footprints = None
        if fresh:
            update("proof: memory", 2, 4)
            first = footprint(folders[0])
            update("proof: memory", 3, 4)
            footprints = first, footprint(folders[1])
    files = weight_file_bytes(folders[0]), weight_file_bytes(folders[1])
    return Proof(outputs, files, footprints, tuple(timed), tuple(f"{name}: {why}" for name, why in reasons.items()))


def _own_tokenizer(
    folder: Path, tokenizer: PreTrainedTokenizerBase, models: Sequence[nn.Module]
) -> PreTrainedTokenizerBase:
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
