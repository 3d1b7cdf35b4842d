"""Question: how much does an encoder lose that is measured with few windows, and what does damping by samples bring?

all-MiniLM-L6-v2 in 8 MB, measured with some of the windows of WikiText-2 (train) (``samples``). "one share": the
damping of Gram matrices is the same share of their diagonals for any number of samples; otherwise it is
``importance.sensitivity.damping_for``. Cosines to the original's vectors: mean and 5th percentile, of 800 sentences of
STS-B (dev) and of 150 paragraphs of WikiText-2 (test). The rule was written down before these texts were looked at; a
first look had been at sentences of CoLA (dev) and paragraphs of WikiText-2 (valid), with 32 windows.

    python benchmarks/few_windows.py --write benchmarks/results/few_windows.md
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from whole_model import evenly

from kflats import compress_folder, read_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import encode
from kflats.importance import sensitivity, tokens
from kflats.io import load_model


def same(damping: float, size: int, samples: int) -> float:
    """In place of ``damping_for``."""
    return damping


def main() -> None:
    options = arguments(__doc__, windows="8,32,128,512", size="8MB", judged=800)
    torch.set_num_threads(1)
    data = data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    texts = read_texts(data / "wikitext2" / "train.txt.gz")
    original, tokenizer = load_model(packaged_model()), load_tokenizer(packaged_model())
    judged = {
        "sentences": evenly(sentences("stsb"), options.judged),
        "paragraphs": paragraphs("test", max(1, min(150, options.judged))),
    }
    before = {kind: encode(original, tokenizer, them) for kind, them in judged.items()}
    lines = list[dict[str, object]]()
    for windows in map(int, options.windows.split(",")):
        for name, rule in {"one share": same, "by samples": sensitivity.damping_for}.items():
            both = patch.object(sensitivity, "damping_for", rule), patch.object(tokens, "damping_for", rule)
            with tempfile.TemporaryDirectory() as place, both[0], both[1]:
                out = Path(place) / "small"
                asked = {"size": options.size, "samples": windows, "proof": False, "quiet": True}
                compress_folder(packaged_model(), out, texts=texts, **asked)
                line: dict[str, object] = {"windows": windows, "damping": name, "file": weight_file_bytes(out)}
                model = load_model(out)
                for kind, them in judged.items():
                    near = fidelity_of(before[kind], encode(model, tokenizer, them))
                    line[kind] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
            lines.append(line)
            print(line, flush=True)
    publish("Compressing an encoder measured with few windows", table(lines), options)


if __name__ == "__main__":
    main()
