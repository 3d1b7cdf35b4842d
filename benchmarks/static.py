"""Goals: 1.2 bits a number at a mean cosine of .98 of sentence vectors, and a first vector 50 ms after opening.

The static model is model2vec's distillation of all-MiniLM-L6-v2 with its defaults: 29,525 tokens, 256 numbers each, in
float16. Making it takes model2vec's extra ``distill`` (its dependency skeletoken) and about a minute; it is kept in
``--cache``. It is compressed by what model2vec itself offers (8-bit integers, fewer dimensions of its PCA, a vocabulary
of k means) and by kflats, without texts and with counts of WikiText-2 (train). All are read by model2vec: the folders
of kflats are exported for that. Cosines are to the vectors of the distilled model. kflats' default was chosen on CoLA
(dev) and WikiText-2 (valid); nothing was chosen on STS-B (dev) and MRPC (dev).

Then ``SentenceTransformer`` opens folders in fresh processes, in turns: milliseconds to open one (imports are not
counted, the tokenizer is), to the first vector, and to that of another sentence; the memory that all of this added; and
sentences of STS-B a second, in batches of 32, after a thousand others were read. Ratios in brackets are to the
distilled model in the same turn; all figures are medians.

    python benchmarks/static.py --cache DIR --write benchmarks/results/static.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import arguments, kept, markdown, publish
from _sentences import data_folder, paragraphs, sentences

from kflats.common.sentences import sentences as split_sentences
from kflats.compress.pipeline import compress_folder
from kflats.demo import packaged_model
from kflats.evaluation.outputs import weight_file_bytes
from kflats.export.dense import export_dense
from kflats.tasks.batches import load_examples
from kflats.tasks.scoring import spearman

ORIGINAL = "distilled, float16"
BITS = (0.7, 1.2, 2.0, 4.0, 8.0)
DIMS = {"int8": (38, 64), "float16": (19, 32)}  # of 1.2 and of 2 bits a number
MEANS = 1867  # of 1.2 bits a number, with the weight and the mean of each token
TEXTS = ("cola", "wikitext2 (valid)", "stsb", "mrpc")
TURNS = 5
WATCH = """
import json, sys, time, torch
torch.set_num_threads(1)
import kflats, kflats.io.static, constriction, sentence_transformers.kflats
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
texts = json.loads(sys.argv[2])
before, times = resident("VmRSS"), [time.perf_counter()]
model = SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True)
times.append(time.perf_counter())
for text in ("A man is playing a guitar on a stage.", "Two dogs run through deep snow near the frozen lake."):
    model.encode([text])
    times.append(time.perf_counter())
grown = resident("VmRSS") - before
half = len(texts) // 2
model.encode(texts[:half], batch_size=32)
start = time.perf_counter()
model.encode(texts[half:], batch_size=32)  # other sentences: rows that were read are kept
took = time.perf_counter() - start
print(json.dumps([*(1000 * (b - a) for a, b in zip(times, times[1:])), grown / 1000, (len(texts) - half) / took]))
"""


def distilled(folder: Path) -> Path:
    """The folder of the distilled model."""
    if not folder.is_dir():
        from model2vec.distill import distill

        distill(str(packaged_model()), device="cpu").save_pretrained(folder)
    return folder


def texts_of(name: str) -> list[str]:
    """Sentences to judge on."""
    if name in ("cola", "stsb", "mrpc"):
        return sentences(name)
    pieces = [piece.strip() for text in paragraphs("valid") for piece in split_sentences(text)]
    return [piece for piece in pieces if len(piece.split()) >= 5][:1500]


def opened(folder: Path) -> Any:
    """The static model of a folder, by model2vec."""
    from model2vec import StaticModel

    return StaticModel.from_pretrained(folder)


def versions(source: Path, cache: Path) -> dict[str, Callable[[], Path]]:
    """By name: a function that makes a folder which model2vec reads, unless it is there."""
    from model2vec.model import quantize_model

    model = opened(source)

    def of_model2vec(name: str, **settings: Any) -> Path:
        if not (cache / name).is_dir():
            quantize_model(model, **settings).save_pretrained(cache / name)
        return cache / name

    def of_kflats(bits: float, counted: bool) -> Path:
        folder = cache / f"kflats {bits}{' counted' if counted else ''}"
        if not folder.is_dir():
            texts = sentences("wikitext2") if counted else None
            compress_folder(source, folder, size=f"{bits} bits", texts=texts, quiet=True)
        return folder

    made: dict[str, Callable[[], Path]] = {ORIGINAL: lambda: source}
    made["model2vec, int8"] = partial(of_model2vec, "int8", quantize_to="int8")
    for kind, dims in DIMS.items():
        for count in dims:
            name = f"model2vec, {kind}, {count} dimensions"
            made[name] = partial(of_model2vec, name, quantize_to=kind, dimensionality=count)
    made[f"model2vec, {MEANS} means"] = partial(of_model2vec, "means", vocabulary_quantization=MEANS)
    for bits in BITS:
        made[f"kflats, {bits:g} bits"] = partial(of_kflats, bits, counted=False)
        made[f"kflats, {bits:g} bits, counted"] = partial(of_kflats, bits, counted=True)
    return made


def vectors(folder: Path, texts: Sequence[str]) -> torch.Tensor:
    """Unit vectors by model2vec; shorter ones are filled up with zeros."""
    dense = folder
    if (folder / "kflats_report.json").is_file():
        dense = folder.with_name(folder.name + " dense")
        if not dense.is_dir():
            export_dense(folder, dense)
    found = opened(dense).encode(list(texts), use_multiprocessing=False).astype(np.float32)
    return torch.nn.functional.normalize(torch.from_numpy(found), dim=1)


def fidelity(source: Path, folder: Path) -> dict[str, float]:
    """Mean and 5th percentile of the cosines on each set of texts, and Spearman's correlation on STS-B."""
    figures: dict[str, float] = {}
    for name in TEXTS:
        a, b = (vectors(one, texts_of(name)) for one in (source, folder))
        # Fewer dimensions: the cosine is of what both have, so that a rotation would not help.
        cosines = (a[:, : b.shape[1]] * b).sum(1)
        figures |= {f"{name} mean": float(cosines.mean()), f"{name} 5th": float(cosines.quantile(0.05))}
    examples = load_examples("sts", "dev", data_folder())
    pairs = vectors(folder, [text for pair in examples.inputs for text in pair])
    figures["spearman"] = spearman((pairs[0::2] * pairs[1::2]).sum(1).tolist(), examples.labels)
    return figures


def watched(folders: dict[str, Path]) -> list[list[object]]:
    """Rows of the second table."""
    texts, found = json.dumps(texts_of("stsb")[:2000]), {name: list[list[float]]() for name in folders}
    for turn in range(TURNS):
        for name in list(folders)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, "-c", WATCH, str(folders[name]), texts]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows: list[list[object]] = []
    for name, turns in found.items():
        opened, first, second, memory, rate = (median(column) for column in zip(*turns, strict=True))
        ratios = [
            median(own[k] / other[k] for own, other in zip(turns, found[ORIGINAL], strict=True)) for k in (0, 1, 4)
        ]
        rows.append(
            [
                name,
                *(f"{ms:.0f} ({ratio:.2f})" for ms, ratio in zip((opened, first), ratios[:2], strict=True)),
                f"{second:.0f}",
                f"{memory:.1f} MB",
                f"{rate:,.0f} ({ratios[2]:.2f})",
            ]
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = arguments(__doc__, cache="")
    if not options.cache:
        raise SystemExit("--cache DIR: a folder for the models")
    cache = Path(options.cache)
    cache.mkdir(parents=True, exist_ok=True)
    source = distilled(cache / "distilled")
    numbers = opened(source).embedding.size
    rows, folders = [], {}
    for name, make in versions(source, cache).items():
        folders[name] = make()
        nbytes = weight_file_bytes(folders[name])
        near = kept(cache / "figures", name, partial(fidelity, source, folders[name]))
        cells = [f"{near[f'{text} {kind}']:.4f}" for text in TEXTS for kind in ("mean", "5th")]
        rows.append([name, f"{nbytes:,}", f"{8 * nbytes / numbers:.2f}", *cells, f"{100 * near['spearman']:.2f}"])
    head = [f"{name.removesuffix(' (valid)')} {kind}" for name in TEXTS for kind in ("mean", "5th")]
    first = markdown(["version", "bytes", "bits a number", *head, "STS-B"], rows)
    columns = [
        "opened by SentenceTransformer",
        "open, ms",
        "first vector, ms",
        "another, ms",
        "memory",
        "sentences a second",
    ]
    timed = (ORIGINAL, "kflats, 1.2 bits", "kflats, 2 bits")
    second = markdown(columns, watched({name: folders[name] for name in timed}))
    publish("A static model: bytes, sentence vectors, and the first one", f"{first}\n\n{second}", options)
