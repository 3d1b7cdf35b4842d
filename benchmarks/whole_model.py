"""Question: how small can a whole encoder be on disk, and what does it lose?

all-MiniLM-L6-v2, 90.9 MB in float32. Every line but bfloat16 is a folder written and loaded again: embeddings, 36
linear layers, the pooler; biases, norms and tokenizer as they are. Texts are the file of WikiText-2 (train) as it is,
without labels or fine-tuning. "no texts" measures with sentences of the package and with tokens drawn by the Zipf
prior of the vocabulary, and takes token counts from that prior. Rounding to 8 and 4 bits (groups of 64) is given by its
files, where integers are entropy coded.

Cosines of the vectors of 800 sentences of each set and of 150 paragraphs to the original's: mean, and 5th percentile.
Methods were chosen on CoLA (dev) and on paragraphs of WikiText-2 (valid). STS-B (dev) was looked at while developing;
nothing was chosen on MRPC (dev), CoNLL-2003 (dev) and the paragraphs of WikiText-2 (test).

Memory and times, also of each run-time form, are in ``latency.py``.

    python benchmarks/whole_model.py --write benchmarks/results/whole_model.md
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences

from kflats import Auto, Integer, KeepDense, Recipe, Uniform, compress_folder, read_texts, score
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import encode
from kflats.io import load_model

ROUNDED = {bits: Recipe(KeepDense(), Uniform(), codec) for bits, codec in ((8, Integer(8)), (4, Integer(4, group=64)))}
LINES: dict[str, tuple[Any, str, bool]] = {
    "8 bits a number": (ROUNDED[8], "60MB", False),
    "4 bits a number": (ROUNDED[4], "60MB", False),
    "kflats --size 20MB": (Auto(), "20MB", True),
    "kflats --size 12MB": (Auto(), "12MB", True),
    "kflats --size 8MB": (Auto(), "8MB", True),
    "kflats --size 6MB": (Auto(), "6MB", True),
    "kflats --size 5MB": (Auto(), "5MB", True),
    "kflats --size 4MB": (Auto(), "4MB", True),
    "kflats --size 8MB, no texts": (Auto(), "8MB", False),
}
SENTENCES = ("stsb", "mrpc", "conll2003")


def evenly(texts: list[str], count: int = 800) -> list[str]:
    """At most ``count`` of the texts, evenly spaced."""
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def main() -> None:
    options = arguments(__doc__, only="")
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    original, tokenizer = load_model(source), load_tokenizer(source)
    judged = {name: evenly(sentences(name)) for name in SENTENCES} | {"paragraphs": paragraphs("test", 150)}
    before = {name: encode(original, tokenizer, texts) for name, texts in judged.items()}
    texts = read_texts(data / "wikitext2" / "train.txt.gz")
    lines: list[dict[str, object]] = []

    def judge(name: str, folder: Path, seconds: float) -> None:
        model = load_model(folder)
        line: dict[str, object] = {"what": name, "file": f"{weight_file_bytes(folder) / 1e6:.2f} MB"}
        for kind, those in judged.items():
            near = fidelity_of(before[kind], encode(model, tokenizer, those))
            line[kind] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
        sts = score(model, tokenizer, "sts", task_data=data / "stsb", costs=False).value
        lines.append(line | {"STS-B": f"{100 * sts:.2f}", "compressed in": f"{seconds:.0f} s"})
        print(lines[-1], flush=True)

    with tempfile.TemporaryDirectory() as place:
        judge("original", source, 0.0)
        load_model(source).bfloat16().save_pretrained(Path(place) / "bfloat16")
        judge("bfloat16", Path(place) / "bfloat16", 0.0)
        for name, (method, size, with_texts) in LINES.items():
            if options.only not in name:
                continue
            asked: dict[str, Any] = {"texts": texts} if with_texts else {}
            out, began = Path(place) / name, time.perf_counter()
            compress_folder(source, out, size=size, method=method, weights=("all",), proof=False, quiet=True, **asked)
            judge(name, out, time.perf_counter() - began)
    title = f"A whole encoder of {weight_file_bytes(source) / 1e6:.1f} MB"
    publish(title, table(lines), options)


if __name__ == "__main__":
    main()
