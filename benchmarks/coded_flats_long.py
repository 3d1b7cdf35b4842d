"""Question: on long tables of real vectors, does a transform code lose less on several flats than on one?

The longest real table of embeddings here has 80 rows a column (``coded_flats.py``). Long ones are made of what
all-MiniLM-L6-v2 says about sentences of WikiText-2 (train), 384 numbers each: its hidden states before the first layer
and after the last, one row a token; and, as a table of phrases would hold them, one row for every pair of neighbouring
words, the mean of the last hidden states of both over all places where they were read together. Seconds are processor
time of one fit on one thread, coding included.

    python benchmarks/coded_flats_long.py --write benchmarks/results/coded_flats_long.md

``--parts FOLDER`` keeps finished lines, so that an interrupted run resumes.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import torch
from _common import arguments, kept, publish, table
from _sentences import sentences
from torch import Tensor

from kflats import SVD, Flats, Recipe, Transform
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows

SENTENCES, BATCH, LONGEST = 10**6, 32, 128
"""All sentences that there are, until the tables are full."""


class Pairs:
    """Means of pairs of neighbouring words, up to ``most`` different pairs."""

    def __init__(self, most: int, columns: int) -> None:
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.sums, self.counts, self.most = torch.zeros(most, columns), torch.zeros(most), most

    @property
    def full(self) -> bool:
        return len(self.known) == self.most

    def add(self, ids: list[int], words: list[int | None], hidden: Tensor) -> None:
        """The pairs of one sentence; ``words``: which word each token is part of, None for special ones."""
        spans: dict[int, list[int]] = {}
        for place, word in enumerate(words):
            if word is not None:
                spans.setdefault(word, []).append(place)
        parts = [(tuple(ids[p] for p in places), places) for _, places in sorted(spans.items())]
        for (one, first), (other, second) in itertools.pairwise(parts):
            if (row := self.known.get((one, other))) is None:
                if self.full:
                    continue
                row = self.known[(one, other)] = len(self.known)
            self.sums[row] += hidden[first + second].mean(0)
            self.counts[row] += 1

    @property
    def means(self) -> Tensor:
        count = len(self.known)
        return self.sums[:count] / self.counts[:count].unsqueeze(1)


def calibration(size: int) -> list[str]:
    """``size`` sentences of WikiText-2, drawn with a fixed seed; marks undone, none with unknown words."""
    text = "\n".join(sentences("wikitext2")).replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
    parts = [part.strip() for line in text.split("\n") for part in line.split(" . ")]
    found = [f"{part} ." for part in parts if len(part) > 30 and "<unk>" not in part and not part.startswith("=")]
    random.Random(0).shuffle(found)
    return found[:size]


def vectors(rows: int) -> tuple[dict[str, Tensor], str]:
    """The three tables, at most ``rows`` rows each, and what was read for them."""
    source = packaged_model()
    model: Any = load_model(source).eval()
    tokenizer = load_tokenizer(source)
    texts, read, tokens, words = calibration(SENTENCES), 0, 0, 0
    pairs = Pairs(rows, model.config.hidden_size)
    kept: dict[str, list[Tensor]] = {"before the first layer": [], "after the last layer": []}
    while read < len(texts) and not (pairs.full and tokens >= rows):
        batch = tokenizer(
            texts[read : read + BATCH], truncation=True, max_length=LONGEST, padding=True, return_tensors="pt"
        )
        read += BATCH
        with torch.inference_mode():
            states = model(**batch, output_hidden_states=True).hidden_states
        for i, ids in enumerate(batch["input_ids"].tolist()):
            own = batch.word_ids(i)
            real = [place for place, word in enumerate(own) if word is not None]
            pairs.add(ids, own, states[-1][i])
            words += len(set(own) - {None})
            if tokens < rows:
                for name, hidden in zip(kept, (states[0], states[-1]), strict=True):
                    kept[name].append(hidden[i, real])
                tokens += len(real)
    found = {name: torch.cat(parts)[:rows].clone() for name, parts in kept.items()}
    # The first pairs are the commonest: in any order, the first rows are like all of them.
    found["pairs of words"] = pairs.means[torch.randperm(len(pairs.known), generator=torch.Generator().manual_seed(0))]
    times = float(pairs.counts.sum()) / max(1, len(pairs.known))
    return (
        found,
        f"{min(read, len(texts)):,} of {len(texts):,} sentences, {words:,} words; a pair was read {times:.2f} times.",
    )


def measured(rows: Tensor, bits: float, k: int) -> dict[str, float]:
    """One fit on ``k`` flats: its size, its error and its time."""
    n, d = rows.shape
    problem = Problem(TensorRows(rows), int(bits * n * d / 8), 4)
    began = time.process_time()
    made = Recipe(SVD() if k == 1 else Flats(k=k), codec=Transform()).encode(problem, torch.float32)
    took = time.process_time() - began
    geometry, error = made.matrix.geometry, weighted_error(rows, made.matrix).relative
    used = {"flats": len(geometry.parts), "classes": len(geometry.classes)}
    return {"bits": 8 * made.nbytes / (n * d), "error": error, "seconds": took, **used}


def line(name: str, rows: Tensor, bits: float, k: int, fit: dict[str, float], first: float) -> dict[str, object]:
    """A line of the table; ``first``: the error of one flat."""
    n, d = rows.shape
    return {
        "table": name,
        "rows": f"{n:,}",
        "rows a column": f"{n / d:.0f}",
        "bits": f"{bits:g}",
        "flats asked": k,
        "flats": fit["flats"],
        "classes": fit["classes"],
        "bits stored": f"{fit['bits']:.3f}",
        "error": f"{fit['error']:.5f}",
        "of one flat's": f"**{fit['error'] / first:.3f}**",
        "seconds": f"{fit['seconds']:.0f}",
    }


def main() -> None:
    options = arguments(__doc__, parts="", bits="1,2", rows="120000", flats="1,2,4,8", only="")
    lengths, flats = (sorted(int(part) for part in given.split(",")) for given in (options.rows, options.flats))
    tables, said = vectors(lengths[-1])
    lines = []
    for rows, (name, whole), bits in itertools.product(lengths, tables.items(), map(float, options.bits.split(","))):
        if options.only not in name:
            continue
        part, first = whole[:rows].clone(), 0.0
        n = len(part)
        for k in flats:
            # The rows at hand are drawn from the longest table: its length is part of the key.
            key = f"{name}, {n} of {len(whole)} rows, {bits:g} bits, {k}"
            fit = kept(options.parts, key, lambda part=part, bits=bits, k=k: measured(part, bits, k))
            first = first or fit["error"]
            lines.append(line(name, part, bits, k, fit, first))
    publish(
        "Transform codes on one flat and on several: long tables of hidden states",
        f"{table(lines)}\n\nRead: {said}",
        options,
    )


if __name__ == "__main__":
    main()
