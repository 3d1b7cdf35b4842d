"""Question: how good are the defaults of importance and codec on the sentences that they were chosen on?

Counted: WikiText-2 (train). Judged: CoLA (dev), and never STS-B, on which ``fidelity.py`` and ``frontier_model.py``
report. One field at a time is moved away from its default: of the importances under ``Transform()`` at .7, 1.2 and 2
bits a number, of its classes, and of the importances under ``Flats()`` in floats at 60 % of the bytes. Rare words as in
``fidelity.py``. The data come from the folder KFLATS_DATA or the hub, as there.

    python benchmarks/defaults.py --write benchmarks/results/defaults.md
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from _common import EMBEDDING, arguments, markdown, publish
from _sentences import Evaluator, sentences
from torch import Tensor

from kflats import SVD, Flats, Recipe, TokenCounts, Transform, Uniform, ZipfPrior
from kflats.calibration.counting import count_tokens, zipf_prior
from kflats.demo import packaged_model
from kflats.evaluation.outputs import Fidelity, load_tokenizer
from kflats.importance import TokenFisher
from kflats.importance.protocol import Weighting
from kflats.io import load_model
from kflats.methods.protocol import Problem
from kflats.model.weights import dense_weight, find_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import gather

ROWS: dict[str, tuple[float, ...]] = {
    "power": (0.25, 0.75, 1.0),
    "smoothing": (0.0, 1.0),
    "floor": (0.1, 1.0),
}
"""What else was tried of the fields that both importances of counts have."""
DAMPING = (0.1, 0.5, 2.0)
CLASSES = (8, 16, 32, 64)
KEPT = 0.6
"""Share of the bytes that ``Flats()`` is given."""
MEASURES = ("mean cosine", "5th percentile", "rare words")
Found = dict[str, list[tuple[float, ...]]]
"""Of each candidate the three measures at each size."""


def moved(kind: Any, fields: Mapping[str, Sequence[float]]) -> list[Any]:
    """The default, and everything that differs from it in one field."""
    return [kind(), *(kind(**{name: value}) for name, values in fields.items() for value in values)]


def called(value: Any, every: bool = False) -> str:
    """The call that makes it, with only what is not at its default, or with every field."""
    fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    return f"{type(value).__name__}({', '.join(f'{n}={v:g}' for n, v, usual in fields if every or v != usual)})"


def figures(found: Fidelity) -> tuple[float, ...]:
    return found.mean_cosine, found.p5_cosine, found.rare_mean_cosine or 0.0


def compared(found: Found, default: str, sizes: Sequence[str]) -> list[str]:
    """For each size and measure whether the default is the best, to the four digits that the table shows."""
    lines = []
    for place, size in enumerate(sizes):
        said = []
        for i, measure in enumerate(MEASURES):
            scores = {name: round(values[place][i], 4) for name, values in found.items()}
            best = max(scores, key=lambda name: scores[name])
            ahead = sum(score > scores[default] for score in scores.values())
            short = scores[best] - scores[default]
            beaten = f"{measure}: {ahead} of {len(scores) - 1} others are better, `{best}` most ({short:+.4f})"
            said.append(beaten if ahead else f"{measure}: none of {len(scores) - 1} others is better")
        lines.append(f"- `{default}`, {size}: {'; '.join(said)}.")
    return lines


def shown(found: Found, defaults: Sequence[str], sizes: Sequence[str]) -> str:
    head = ["candidate", *(f"{size}: {m}" if m == MEASURES[0] else m for size in sizes for m in MEASURES)]
    rows = [
        [f"**`{name}`** (default)" if name in defaults else f"`{name}`", *(f"{x:.4f}" for at in values for x in at)]
        for name, values in found.items()
    ]
    return markdown(head, rows)


def main() -> None:
    options = arguments(__doc__, bits="0.7,1.2,2")
    bits = [float(part) for part in options.bits.split(",")]
    counted, judged = sentences("wikitext2"), sentences("cola")
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    weight = find_weight(original, EMBEDDING)
    table = dense_weight(original, weight).detach().clone()
    data = gather(counted, tokenizer, None, None, None).measured(original, [(weight, Recipe(SVD(), TokenFisher()))])
    assert data.statistics is not None
    n = len(table)
    measured = replace(
        data.statistics.of(EMBEDDING), counts=count_tokens(counted, tokenizer, n), prior=zipf_prior(tokenizer, n)
    )
    evaluator = Evaluator(original, tokenizer, judged, counted[:2000])
    model = copy.deepcopy(original)

    def verdict(name: str, size: str, made: Tensor) -> tuple[float, ...]:
        with torch.no_grad():
            dense_weight(model, weight).copy_(made)
        found = figures(evaluator(model).fidelity)
        print(name, size, *(f"{x:.4f}" for x in found), flush=True)
        return found

    def coded(importance: Any, classes: int, size: float) -> Tensor:
        given = Problem(TensorRows(table), int(size * table.numel() / 8), 4, importance.weigh(measured))
        return Recipe(SVD(), codec=Transform(classes)).encode(given, torch.float32).matrix.dense().detach()

    def floats(importance: Any, _: float) -> Tensor:
        # Flats weigh rows here: a metric of the columns is what coded tables are measured with.
        weighting = Weighting(left=importance.weigh(measured).left)
        given = Problem(TensorRows(table), int(KEPT * table.numel() * 4), 4, weighting)
        return Flats().fit(given).matrix.dense().detach()

    def tried(candidates: Mapping[str, Callable[[float], Tensor]], sizes: Sequence[float], unit: str) -> Found:
        return {
            name: [verdict(name, f"{size:g} {unit}", make(size)) for size in sizes] for name, make in candidates.items()
        }

    counts, plain = moved(TokenCounts, ROWS), [ZipfPrior(), Uniform()]
    fisher = moved(TokenFisher, {**ROWS, "damping": DAMPING})
    sizes = [f"{size:g} bits" for size in bits]
    weighed = tried(
        {called(one): lambda s, one=one: coded(one, Transform().classes, s) for one in (*fisher, *counts, *plain)},
        bits,
        "bits",
    )
    usual = called(Transform(), every=True)
    others = {called(one, every=True): one.classes for one in map(Transform, CLASSES) if one != Transform()}
    classed = {usual: weighed["TokenFisher()"]} | tried(
        {name: lambda s, k=k: coded(TokenFisher(), k, s) for name, k in others.items()}, bits, "bits"
    )
    floated = tried({called(one): lambda s, one=one: floats(one, s) for one in (*counts, *plain)}, [100 * KEPT], "%")
    share = f"{KEPT:.0%} of the bytes"
    of_counts = {name: values for name, values in weighed.items() if name.startswith("TokenCounts")}
    parts = [
        f"{len(judged)} sentences of CoLA (dev), all of them; {len(counted):,} texts of WikiText-2 (train) counted.",
        "## Transform codes: whose error counts",
        shown(weighed, ["TokenFisher()", "TokenCounts()"], sizes),
        "`TokenFisher()` is what `Auto()` takes where there are texts, `TokenCounts()` what `--codec transform` takes.",
        "\n".join([*compared(weighed, "TokenFisher()", sizes), *compared(of_counts, "TokenCounts()", sizes)]),
        "## Transform codes: classes of rows, weighed by `TokenFisher()`",
        shown(classed, [usual], sizes),
        "\n".join(compared(classed, usual, sizes)),
        "## `Flats()` in float32: whose error counts",
        shown(floated, ["TokenCounts()"], [share]),
        "\n".join(compared(floated, "TokenCounts()", [share])),
    ]
    publish(
        "Defaults on the sentences that they were chosen on (all-MiniLM-L6-v2, CoLA)",
        "\n\n".join(parts),
        options,
    )


if __name__ == "__main__":
    main()
