"""Ways to ship an encoder: files, how they are run, and what that takes.

A way that torch runs is a model folder. onnxruntime runs a file. Both give last hidden states, of which the mean over
tokens is a text's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.common.release import needed
from kflats.common.texts import Tokenizer
from kflats.evaluation.latency import Run, TensorBatch
from kflats.evaluation.proof import Footprint, footprint, footprint_of, in_fresh_process
from kflats.evaluation.running import mean_over_tokens, run
from kflats.export.onnx import export_onnx
from kflats.io import load_model

_BATCH, _LONGEST = 32, 256
_TOKENS = 20
_PROGRAM = "import sys; from kflats.demo.ways import onnx_footprint; print(onnx_footprint(sys.argv[1]))"


@dataclass(frozen=True)
class Way:
    """One way to ship a model.

    Args:
        name: as it stands in tables.
        nbytes: of its weight files.
        build: gives a function of a batch, with last hidden states first in its result.
        footprint: what it takes in a fresh process; None for numbers that no kernel runs as they are stored.
    """

    name: str
    nbytes: int
    build: Callable[[], Run]
    footprint: Callable[[], Footprint] | None


def in_torch(name: str, nbytes: int, folder: Path, *, kernel: bool = True) -> Way:
    """The model in ``folder``. Without a ``kernel`` it is compared, and not timed."""
    return Way(name, nbytes, partial(_torch_run, folder), partial(footprint, folder) if kernel else None)


def in_onnxruntime(name: str, path: Path) -> Way:
    """The ONNX file at ``path``, run with torch's number of threads."""
    return Way(name, path.stat().st_size, partial(onnx_run, path), partial(_in_a_process, path))


def as_onnx(source: Path, path: Path, settings: Mapping[str, Any] | None = None) -> int:
    """Write the model in ``source`` as an ONNX file, and return its bytes.

    Args:
        settings: of onnxruntime's own rounding to 8 bits (``quantize_dynamic``). None: it stays in float32.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    export_onnx(source, path)
    if settings is not None:
        quantization = needed("onnxruntime.quantization", "kflats[onnx]", "rounding an ONNX file")
        aside = path.with_suffix(".rounded.onnx")
        quantization.quantize_dynamic(path, aside, **settings)
        aside.replace(path)
    return path.stat().st_size


def onnx_run(path: Path) -> Run:
    """A function of a batch by onnxruntime, with torch's number of threads."""
    runtime = needed("onnxruntime", "kflats[onnx]", "running an ONNX file")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run_session(batch: TensorBatch) -> object:
        # Token types are optional for the model and an input of the file.
        feed = {name: batch.get(name, torch.zeros_like(batch["input_ids"])).numpy() for name in names}
        return session.run(None, feed)

    return run_session


def onnx_footprint(path: str) -> str:
    """The footprint of the file at ``path`` in this process, which ran no model before, as JSON."""
    needed("onnxruntime", "kflats[onnx]", "running an ONNX file")
    ids = torch.randint(0, 1000, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return footprint_of(lambda: onnx_run(Path(path))({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))


def vectors(runs: Run, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """(texts, d) vectors of length 1: means of last hidden states over tokens."""
    rows = []
    for start in range(0, len(texts), _BATCH):
        part = list(texts[start : start + _BATCH])
        batch = dict(tokenizer(part, padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt"))
        with torch.inference_mode():
            out: Any = runs(batch)
        rows.append(F.normalize(mean_over_tokens(torch.as_tensor(out[0]).float(), batch["attention_mask"]), dim=1))
    return torch.cat(rows)


def _torch_run(folder: Path) -> Run:
    return partial(run, load_model(folder).eval())


def _in_a_process(path: Path) -> Footprint:
    return in_fresh_process(_PROGRAM, str(path), what=str(path))
