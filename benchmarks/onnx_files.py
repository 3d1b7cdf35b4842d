"""Goal: ONNX files of the whole encoder, pooling included, equal to PyTorch within 1e-4, coded tables as codes.

all-MiniLM-L6-v2 as a SentenceTransformer: as it is, its table in flats, and transform coded. The file's bytes beside
those the model's tensors have (coded tables at their fixed rate); the largest difference between onnxruntime and
``SentenceTransformer.encode`` over 64 sentences; and both timed on a batch of 32, in interleaved pairs, one thread.
What files of integers give and take stands in ``latency.py``; how long they take to write, of the whole model in 8 MB,
stands here: at most a minute.

    python benchmarks/onnx_files.py --write benchmarks/results/onnx_files.md
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from _common import arguments, markdown, median_pair, publish
from sentence_transformers import SentenceTransformer

import kflats
from kflats import SVD, Transform
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.methods import Problem
from kflats.model.swap import swap_
from kflats.model.weights import Weight, dense_weight, find_weights
from kflats.numerics.rows import TensorRows


def table_of(model: Any) -> Weight:
    return next(w for w in find_weights(model) if w.name.endswith("word_embeddings"))


def coded(original: Any, bits: float) -> Any:
    model = copy.deepcopy(original)
    weight = table_of(model)
    table = dense_weight(model, weight)
    given = Problem(TensorRows(table), int(bits * table.numel() / 8), 4)
    swap_(model, weight, Transform().encode(SVD(), given, torch.float32).matrix)
    return model


def flats(original: Any) -> Any:
    model = copy.deepcopy(original)
    kflats.compress_(model, {table_of(model).name: kflats.Flats(k=5)}, keep="20%", quiet=True)
    return model


def seconds_to_write(model: Any, int8: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        kflats.export_onnx(model, Path(folder) / "model.onnx", int8=int8)
        return time.monotonic() - began


def measured(name: str, model: Any, rounds: int) -> list[str]:
    texts = packaged_texts("judge")[:64]
    with tempfile.TemporaryDirectory() as folder:
        made = kflats.export_onnx(model, Path(folder) / "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])
    given = model.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    given = {name: given[name] for name in made.inputs}
    (out,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    difference = abs(out - model.encode(list(texts))).max()
    batch = {name: value[:32] for name, value in given.items()}
    feed = {name: value.numpy() for name, value in batch.items()}
    with torch.inference_mode():
        ours, torchs, ratio = median_pair(lambda: session.run(None, feed), lambda: model(dict(batch)), rounds)
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    stored = sum(t.numel() * t.element_size() for t in tensors.values())
    sizes = [f"{n:,}" for n in (stored, made.nbytes)]
    return [name, *sizes, f"**{difference:.1e}**", f"{1000 * ours:.0f}", f"{1000 * torchs:.0f}", f"{ratio:.2f}"]


def main() -> None:
    given = arguments(__doc__, rounds=15)
    torch.set_num_threads(1)
    original = SentenceTransformer(str(packaged_model()), device="cpu")
    models = [("as it is", original), ("flats, 20 % of the table", flats(original))]
    models += [(f"coded, {bits:g} bits a weight", coded(original, bits)) for bits in (4.0, 2.0, 1.0)]
    rows = [measured(name, model, given.rounds) for name, model in models]
    head = ["table", "tensors, bytes", "file, bytes", "largest difference", "onnxruntime, ms", "PyTorch, ms", "ratio"]
    note = "Tensors include a pooler of 592 kB that no output needs, which the files leave out."
    whole = copy.deepcopy(original)
    kflats.compress_(whole, {"all": kflats.Auto()}, size="8MB", quiet=True)
    written = [
        [name, file, f"**{seconds_to_write(model, file == 'int8'):.0f} s**"]
        for name, model in (("as it is", original), ("in 8 MB", whole))
        for file in ("float32", "int8")
    ]
    times = markdown(["model", "file", "written in"], written)
    publish("ONNX files", f"{markdown(head, rows)}\n\n{note}\n\n{times}", given)


if __name__ == "__main__":
    main()
