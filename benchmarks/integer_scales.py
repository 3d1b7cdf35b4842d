"""Question: what share of the steps of columns should the inputs of integer products take?

A code with error feedback has a step for each column, small where inputs are large. Inputs are multiplied by a power of
these steps before they are rounded, and columns are divided by it. all-MiniLM-L6-v2 in 8 MB, its linear layers as
``kflats export --onnx --int8`` rounds them: inputs end at 127, and the matrix at 63, at 127, or in pairs: at 127, and
two neighbours of one sign at a sum of 128. 1 - cosine of vectors to those of the same model in float: 400 CoLA
sentences, and 60 paragraphs of WikiText-2 (valid). ``--compressed DIR``
takes a folder of 8 MB that is there.

    python benchmarks/integer_scales.py --write benchmarks/results/integer_scales.md
"""

from __future__ import annotations

import tempfile
from functools import partial
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from whole_model import evenly

from kflats import compress_folder, read_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer
from kflats.evaluation.running import encode
from kflats.export import integers
from kflats.io import load_model
from kflats.matrices.running import steps_to

POWERS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 1.0)
STEPS = {"to 63": partial(steps_to, 63), "in pairs": integers.paired_steps, "to 127": partial(steps_to, 127)}


def main() -> None:
    options = arguments(__doc__, count=400, compressed="")
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    tokenizer = load_tokenizer(source)
    judged = {"sentences": evenly(sentences("cola"), options.count), "paragraphs": paragraphs("valid", 60)}
    lines = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as place:
        folder = options.compressed or f"{place}/8MB"
        if not options.compressed:
            train = read_texts(data / "wikitext2" / "train.txt.gz")
            compress_folder(source, folder, size="8MB", texts=train, proof=False, quiet=True)
        in_float = load_model(folder)
        before = {name: encode(in_float, tokenizer, texts) for name, texts in judged.items()}
        for power in POWERS:
            line: dict[str, object] = {"power": f"{power:g}"}
            for limit, steps_of in STEPS.items():
                model = load_model(folder)
                ids = {"input_ids": torch.arange(1000, 1020).unsqueeze(0)}
                with (
                    torch.no_grad(),
                    patch.object(integers, "SCALE_POWER", power),
                    patch.object(integers, "paired_steps", steps_of),
                ):
                    integers.in_integers_(model, lambda model=model, ids=ids: model(**ids))
                for name, texts in judged.items():
                    made = fidelity_of(before[name], encode(model, tokenizer, texts))
                    line[f"{limit}, {name}"] = f"{1 - made.mean_cosine:.5f}"
            lines.append(line)
            print(line, flush=True)
    publish("What integers lose, by the share of the steps that inputs take", table(lines), options)


if __name__ == "__main__":
    main()
