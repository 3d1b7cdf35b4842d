"""Claim: a lookup in flats costs at most 2.0 x the same-sized factorized embedding, and an encoder at most 1.03 x.

What is timed, each against a baseline run beside it in interleaved pairs (the order inside a pair alternates):

- rows of a 30522 x 384 FlatsMatrix for 32 x 128 tokens, against ``Embedding(n, j)`` + ``Linear(j, d, bias=False)``;
  ids drawn from Zipf's law, as words are, and all distinct, which no text is: the worst case;
- the output head tied to such a table, one token, against the dense product;
- all of all-MiniLM-L6-v2 with its word embedding replaced, against the original (extra ``demo``).

Ratios are medians over the pairs.

    python benchmarks/lookup.py --write benchmarks/results/lookup.md
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from _common import arguments, markdown, median_pair, publish
from torch import Tensor, nn

from kflats.demo import packaged_model
from kflats.io import load_model
from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import FlatsMatrix, RankGroup, label_dtype, weight_shape

N, D, K, J = 30522, 384, 5, 200
BATCH, LENGTH = 32, 128
Call = Callable[[Tensor], object]


HEAD = ["what", "threads", "kflats, ms", "baseline, ms", "ratio", "at most", "held"]


def compare(
    what: str, ours: Call, baseline: Call, inputs: list[Tensor], rounds: int, target: float | None
) -> list[str]:
    """A line of the table: both on the same inputs, in interleaved pairs."""
    # Both see the inputs in the same order: each has an iterator of its own.
    first, second = (iter(inputs * (rounds + 1)) for _ in range(2))
    mine, theirs, ratio = median_pair(lambda: ours(next(first)), lambda: baseline(next(second)), rounds)
    held = "" if target is None else ("yes" if ratio <= target else "NO")
    line = [what, str(torch.get_num_threads()), f"{1000 * mine:.3f}", f"{1000 * theirs:.3f}", f"**{ratio:.3f}**"]
    line += ["" if target is None else f"{target:.2f}", held]
    print(line, flush=True)
    return line


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


def forward(function: Callable[[Tensor], object]) -> Call:
    """The function, or layer, without gradients."""
    return torch.no_grad()(function)


def training(layer: nn.Module) -> Call:
    gradient = torch.randn(BATCH, LENGTH, D, generator=torch.Generator().manual_seed(1))

    def run(ids: Tensor) -> object:
        layer.zero_grad(set_to_none=True)
        return layer(ids).backward(gradient)

    return run


def lookups(rounds: int) -> Iterator[list[str]]:
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


def heads(rounds: int) -> Iterator[list[str]]:
    hidden = [torch.randn(1, D, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for name, matrix, _ in tables():
        dense = nn.Linear(D, N, bias=False)
        dense.weight.data = matrix.dense().detach()
        yield compare(f"{name}; tied head, one token", forward(matrix.matvec), forward(dense), hidden, rounds, None)


def encoders(rounds: int) -> Iterator[list[str]]:
    original = load_model(packaged_model()).eval()
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
    options = arguments(__doc__, rounds=100, threads="1,2")
    lines: list[list[str]] = []
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for part in (lookups, heads, encoders):
            lines.extend(part(options.rounds))
    meaning = (
        "Baseline: `Embedding(n, j)` + `Linear(j, d, bias=False)` with as many coordinates for lookups (without "
        "gradients, or with a backward pass), the dense product for the head, the original model for the encoder. "
        f"Ratios are medians of {options.rounds} interleaved pairs ({max(20, options.rounds // 4)} for 32 x 128 tokens "
        "through the encoder). Equal ids are computed once, which is why a batch of words, most of them repeated, can "
        "cost less than the baseline; distinct ids are the worst case."
    )
    title = f"Lookup: {N} x {D}, {BATCH} x {LENGTH} tokens, float32, CPU"
    publish(title, f"{meaning}\n\n{markdown(HEAD, lines)}", options)


if __name__ == "__main__":
    main()
