"""A model in a process of its own: the memory and the time that loading and the first output take.

The memory is the peak of the process after the first output minus its peak after all imports. Loading, decoding and the
first run are counted; Python, torch and transformers are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kflats.common.errors import KflatsError
from kflats.common.release import needed
from kflats.common.schema import decode
from kflats.evaluation.running import run
from kflats.evaluation.samples import collate, drawn_samples
from kflats.io.folders import load_model
from kflats.io.sources import weights_folder

_TOKENS = 20
_PROGRAM = "import sys; from kflats.evaluation import footprint; print(footprint.measured_here(sys.argv[1]))"


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
    done = subprocess.run([sys.executable, "-c", _PROGRAM, os.fspath(folder)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise KflatsError(f"the model in {os.fspath(folder)} cannot be run in a fresh process", cause=lines[-1])
    result: Footprint = decode(Footprint, json.loads(done.stdout.splitlines()[-1]), "footprint")
    return result


def peak_memory() -> int | None:
    """The largest resident memory of this process so far, in bytes; None where the system does not tell."""
    status = Path("/proc/self/status")  # getrusage counts the memory of the parent too, on Linux
    if status.is_file():
        return 1024 * int(status.read_text(encoding="ascii", errors="replace").split("VmHWM:")[1].split()[0])
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def measured_here(folder: str) -> str:
    """The footprint of the model in ``folder`` in this process, which loaded no model before, as JSON."""
    library = needed("transformers", "kflats[hf]", "loading a model")
    config = library.AutoConfig.from_pretrained(weights_folder(folder), local_files_only=True, trust_remote_code=False)
    for name in ("AutoModel", *(getattr(config, "architectures", None) or ())):
        getattr(library, name, None)  # imports the code of the model
    imported, start = peak_memory(), time.perf_counter()
    model = load_model(folder)
    with torch.inference_mode():
        run(model, collate(drawn_samples(model, 1, _TOKENS), 0))
    seconds, peak = time.perf_counter() - start, peak_memory()
    memory = None if peak is None or imported is None else peak - imported
    return json.dumps(asdict(Footprint(memory, seconds)))
