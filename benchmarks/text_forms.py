"""Claim: the form of the texts does not matter. One text (WikiText-2 train) as files of tokenised paragraphs, tokenised
sentences, plain sentences, a book and JSON lines compresses the same encoder to nearly the same outputs, and to better
ones than no texts at all.

"layers": the 36 linear layers of all-MiniLM-L6-v2 in 5,266,944 numbers, half of theirs. "8MB": the whole model.
Nothing is fine-tuned. Judged on CoLA dev sentences and on paragraphs of WikiText-2 valid, both by the cosine to the
original's vectors. "the same windows": the share of the windows of the first form that a form has too.

    python benchmarks/text_forms.py --write benchmarks/results/text_forms.md
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import arguments, publish, table
from _sentences import data_folder, sentences

from kflats import SVD, Auto, Recipe, Uniform, compress_folder, read_texts
from kflats.calibration.windows import windows
from kflats.common.sentences import sentences as split
from kflats.common.sentences import undo_marks
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer
from kflats.evaluation.running import encode
from kflats.importance import KroneckerFisher
from kflats.io import load_model

NUMBERS = 5_266_944
PARAGRAPHS = 300


def write_forms(folder: Path, lines: Sequence[str]) -> dict[str, str]:
    """Files of one text, by form."""
    plain = undo_marks(lines)[0]
    contents = {
        "paragraphs, tokenised": ("paragraphs.txt", "\n".join(lines)),
        "sentences, tokenised": (
            "tokenised.txt",
            "\n".join(part.strip() for line in lines for part in re.findall(r".+?(?: [.!?](?= |$)|$)", line)),
        ),
        "sentences": ("sentences.txt", "\n".join(part.strip() for text in plain for part in split(text))),
        "book": ("book.txt", "\n\n".join(textwrap.fill(text, 72) for text in plain)),
        "JSON lines": ("lines.jsonl", "\n".join(json.dumps({"id": str(i), "body": t}) for i, t in enumerate(plain))),
    }
    for name, text in contents.values():
        (folder / name).write_text(text, encoding="utf-8")
    return {form: str(folder / name) for form, (name, _) in contents.items()}


def main() -> None:
    options = arguments(__doc__, only="", what="layers and 8MB")
    source, folder = packaged_model(), data_folder()
    if folder is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    original, tokenizer = load_model(source), load_tokenizer(source)
    valid = gzip.decompress((folder / "wikitext2" / "valid.txt.gz").read_bytes()).decode().split("\n")
    paragraphs = [text for text in undo_marks(valid)[0] if len(text.split()) >= 60][:PARAGRAPHS]
    judged = {"sentences": sentences("cola"), "paragraphs": paragraphs}
    before = {kind: encode(original, tokenizer, those, 32) for kind, those in judged.items()}
    lines: list[dict[str, object]] = []
    wanted: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        forms: dict[str, str | None] = dict(write_forms(Path(place), sentences("wikitext2")))
        for form, file in {**forms, "no texts": None}.items():
            texts = None if file is None else read_texts(file)
            made = set() if texts is None else set(windows(texts, tokenizer, model=original).counted)
            wanted = wanted or made
            same = f"{len(made & wanted) / len(wanted):.3f}" if made else ""
            for what in ("layers", "8MB"):
                if options.only not in form or what not in options.what:
                    continue
                layers: Any = Recipe(SVD(), Uniform() if texts is None else KroneckerFisher())
                asked: dict[str, Any] = {
                    "layers": {"keep": f"{NUMBERS} params", "method": layers, "weights": ("encoder.layer.*",)},
                    "8MB": {"size": "8MB", "method": Auto(), "weights": ("all",)},
                }[what]
                out, began = Path(place) / f"{form} {what}", time.perf_counter()
                compress_folder(source, out, texts=texts, proof=False, quiet=True, **asked)
                took, model = time.perf_counter() - began, load_model(out)
                line: dict[str, object] = {"what": what, "texts": form, "the same windows": same}
                for kind, those in judged.items():
                    near = fidelity_of(before[kind], encode(model, tokenizer, those, 32))
                    line[f"{kind}: mean cosine"] = f"{near.mean_cosine:.4f}"
                    line[f"{kind}: 5th percentile"] = f"{near.p5_cosine:.4f}"
                lines.append(line | {"time": f"{took:.0f} s"})
                print(lines[-1], flush=True)
    lines.sort(key=lambda line: line["what"] != "layers")
    publish("The same encoder from several forms of one text", table(lines), options)


if __name__ == "__main__":
    main()
