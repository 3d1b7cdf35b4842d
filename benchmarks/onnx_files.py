"""Goal: ONNX files of the whole encoder, pooling included, equal to PyTorch within 1e-4, coded tables as codes; and
with integers, at a cosine of .997 to floats, within .30 (1 x 20) and .70 (32 x 30) of the original's time in PyTorch.

all-MiniLM-L6-v2 as a SentenceTransformer: as it is, its table in flats, and transform coded. The file's bytes beside
those the model's tensors have (coded tables at their fixed rate); the largest difference between onnxruntime and
``SentenceTransformer.encode`` over 64 sentences; and both timed on a batch of 32, in interleaved pairs, one thread.

Then the model compressed to 8 MB (``--compressed DIR`` takes a folder that is there), exported in integers, beside
onnxruntime's own dynamic int8 of the original. Time is a ratio to the original in float32, eager, in interleaved turns
with one thread, with its 95 % bootstrap interval. Cosines of sentence vectors: to the same model in float, and to the
original; mean and 5th percentile over 64 sentences.

    python benchmarks/onnx_files.py --write benchmarks/results/onnx_files.md
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from _common import arguments, markdown, median_pair, publish
from latency import Onnx
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

import kflats
from kflats import SVD, Transform
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.evaluation.latency import Run, TorchModel, latencies
from kflats.evaluation.running import encode, mean_over_tokens
from kflats.io import load_model
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


@dataclass(frozen=True)
class Built:
    """A contestant that is there already."""

    name: str
    run: Run

    def build(self) -> Run:
        return self.run


def vectors(run: Any, tokenizer: Any, texts: tuple[str, ...]) -> Tensor:
    """Sentence vectors of a session that gives the last hidden states."""
    batch = dict(tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt"))
    hidden = torch.from_numpy(run(batch)[0])
    return F.normalize(mean_over_tokens(hidden, batch["attention_mask"]), dim=1)


def cosines(found: Tensor, wanted: Tensor) -> str:
    each = (found * wanted).sum(1)
    return f"{float(each.mean()):.4f} / {float(each.quantile(0.05)):.4f}"


def in_integers(compressed: str, turns: int) -> str:
    """The table of files that multiply integers."""
    tokenizer, texts = AutoTokenizer.from_pretrained(packaged_model()), packaged_texts("judge")[:64]
    original: nn.Module = load_model(packaged_model())
    with tempfile.TemporaryDirectory() as place:
        folder = compressed or f"{place}/8MB"
        if not compressed:
            kflats.compress_folder(packaged_model(), folder, size="8MB", quiet=True)
        small = load_model(folder)
    narrow = {"per_channel": True, "reduce_range": True}
    entries = [
        (original, Onnx(original)),
        (original, Onnx(original, "dynamic int8 of onnxruntime", int8=True)),
        (original, Onnx(original, "the same per channel, reduced range", int8=True, settings=narrow)),
        (small, Onnx(small, "8 MB of kflats, integers", own=True)),
    ]
    built = [Built(entry.name, entry.build()) for _, entry in entries]
    first = encode(original, tokenizer, texts)
    quality = {"PyTorch, float32, eager": ["1", "1"]}
    for (model, _), ready in zip(entries, built, strict=True):
        found = vectors(ready.run, tokenizer, texts)
        quality[ready.name] = [cosines(found, encode(model, tokenizer, texts)), cosines(found, first)]
    shapes = [(1, 20), (32, 30)]
    timed, _ = latencies([TorchModel(next(iter(quality)), original), *built], original, shapes=shapes, turns=turns)
    rows = []
    for name, columns in quality.items():
        times = [f"**{one.ratio:.2f}** ({one.low:.2f} to {one.high:.2f})" for one in timed if one.name == name]
        rows.append([name, *times, *columns])
    heads = [f"{samples} x {tokens}, time / PyTorch" for samples, tokens in shapes]
    return markdown(["run by", *heads, "cosine to the same model in float", "to the original"], rows)


def main() -> None:
    given = arguments(__doc__, rounds=15, compressed="")
    torch.set_num_threads(1)
    original = SentenceTransformer(str(packaged_model()), device="cpu")
    models = [("as it is", original), ("flats, 20 % of the table", flats(original))]
    models += [(f"coded, {bits:g} bits a weight", coded(original, bits)) for bits in (4.0, 2.0, 1.0)]
    rows = [measured(name, model, given.rounds) for name, model in models]
    head = ["table", "tensors, bytes", "file, bytes", "largest difference", "onnxruntime, ms", "PyTorch, ms", "ratio"]
    note = "Tensors include a pooler of 592 kB that no output needs, which the files leave out."
    integers = in_integers(given.compressed, given.rounds)
    publish("ONNX files", f"{markdown(head, rows)}\n\n{note}\n\n{integers}", given)


if __name__ == "__main__":
    main()
