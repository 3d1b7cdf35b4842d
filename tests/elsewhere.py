"""Tries a folder that ``kflats export --onnx --int8`` wrote in a fresh virtual environment without kflats.

    python tests/elsewhere.py                   # the demo's model, exported in integers
    python tests/elsewhere.py DIR               # a folder of sentence-transformers, compressed or not

sentence-transformers (backend "onnx", which needs an older transformers than kflats does), fastembed and OpenVINO read
the folder; a line for each says what its sentence vectors are. Packages come from pip's index and its cache, and the
environment is removed afterwards. ENVIRONMENT=DIR uses one that is there. 0 if all of them agree with kflats in float
(mean cosine of .99), 1 if not, and 77 if the environment cannot be made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

import kflats
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.evaluation.running import encode
from kflats.export.onnx import FILE, INTEGER_FILE
from kflats.io import load_model

PACKAGES = ("torch", "sentence-transformers>=5.2,<6", "optimum-onnx>=0.1", "onnxruntime", "fastembed", "openvino")
LEAST = 0.99
SKIPPED = 77

READERS = {
    "sentence-transformers": """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(
    folder, backend="onnx", device="cpu", local_files_only=True,
    model_kwargs={"file_name": file, "provider": "CPUExecutionProvider"},
)
found = model.encode(texts)
""",
    "fastembed": """
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
TextEmbedding.add_custom_model(
    "own/model", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="own/model"),
    dim=width, model_file=file,
)
found = np.array(list(TextEmbedding("own/model", specific_model_path=folder).embed(texts)))
""",
    "OpenVINO": """
import openvino
from transformers import AutoTokenizer
given = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="np")
model = openvino.Core().compile_model(os.path.join(folder, file), "CPU")
hidden = model({key.any_name: given[key.any_name].astype(np.int64) for key in model.inputs})[0]
mask = given["attention_mask"][..., None]
found = (hidden * mask).sum(1) / mask.sum(1)
found /= np.linalg.norm(found, axis=1, keepdims=True)
""",
}
"""How each program reads the folder; ``found`` are its vectors, one a text."""

BEFORE = """
import importlib.util, os, sys
import numpy as np
assert importlib.util.find_spec("kflats") is None
folder, file, width, texts = sys.argv[1], sys.argv[2], int(sys.argv[3]), open(sys.argv[4]).read().splitlines()
"""


def environment(place: Path) -> Path | None:
    """The interpreter of an environment with ``PACKAGES``; None if pip cannot make it."""
    if given := os.environ.get("ENVIRONMENT"):
        return Path(given) / "bin" / "python"
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    python = place / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(place)],
        [str(python), "-m", "pip", "install", "-q", *index, *PACKAGES],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print("the environment cannot be made:", *done.stderr.splitlines()[-3:], sep="\n")
            return None
    return python


def main(folder: Path) -> int:
    """See the top of this file."""
    texts = list(packaged_texts("judge"))[:64]
    wanted = encode(load_model(folder), AutoTokenizer.from_pretrained(folder), texts).numpy()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    good = True
    with tempfile.TemporaryDirectory() as place:
        if (python := environment(Path(place) / "environment")) is None:
            return SKIPPED
        out, lines, vectors = Path(place) / "onnx", Path(place) / "texts", Path(place) / "found.npy"
        print(kflats.export_onnx(folder, out, int8=True))
        lines.write_text("\n".join(texts))
        for name, reader in READERS.items():
            for file in (FILE, INTEGER_FILE):
                program = f"{BEFORE}{reader}\nnp.save({str(vectors)!r}, found)"
                given = [str(python), "-c", program, str(out), file, str(wanted.shape[1]), str(lines)]
                done = subprocess.run(given, env=variables, cwd=place, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name}, {file}: failed\n" + "\n".join(done.stderr.splitlines()[-5:]))
                    good = False
                    continue
                cosine = float((np.load(vectors) * wanted).sum(1).mean())
                print(f"{name}, {file}: cosine {cosine:.4f} to kflats in float")
                good &= cosine >= LEAST
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else packaged_model()))
