"""Question: do linear layers lose less if each is measured behind the layers that are coded already?

kflats measures every Gram in one pass over the original, and codes every weight from these. The other way goes from
layer to layer. For each of the 36 linear layers of all-MiniLM-L6-v2, X_s are the inputs of window s in the original
model and Z_s those behind all tables and layers that are coded before it; G_s are the gradients of the layer's outputs
in the original. Windows, gradients, codecs and the bytes of each weight are those of one run of ``kflats compress``,
and the tables are the same codes.

    Grams in turn     sum_s Z_s' G_s G_s' Z_s in place of sum_s X_s' G_s G_s' X_s
    targets w         also W + w (W* - W) in place of W, with W* of least squares: Z W* is nearest to X W, the outputs
                      of the original, under the metric and the damping that rounding has; the bias likewise

Cosines of sentence vectors to the original's: mean / 5th percentile. What kflats does was chosen on CoLA (dev) and
paragraphs of WikiText-2 (valid).

    python benchmarks/sequential.py --write benchmarks/results/sequential.md
    python benchmarks/sequential.py --size 6MB --write benchmarks/results/sequential_6mb.md
    python benchmarks/sequential.py --size 4MB --write benchmarks/results/sequential_4mb.md
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from torch import Tensor, nn

from kflats import Auto, Feedback, read_texts
from kflats.calibration.hooks import frozen
from kflats.calibration.objectives import Projections
from kflats.compress.fitting import CompressedWeight, factorize
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import Batch, encode
from kflats.importance.protocol import Measured
from kflats.io import load_model
from kflats.methods.protocol import Problem
from kflats.model.swap import swap_
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import gather
from kflats.planning.decide import Decided, Sharing, decide
from kflats.recipe.budget import one_budget

WAYS: dict[str, float | None] = {
    "one pass over the original": None,
    "Grams in turn": 0.0,
    "Grams in turn, targets 1/2": 0.5,
    "Grams in turn, targets 1": 1.0,
}
"""The part w of the targets; None: codes as kflats makes them."""
STAGES = {
    "attention.self": ("query", "key", "value"),
    "attention.output": ("dense",),
    "intermediate": ("dense",),
    "output": ("dense",),
}
DAMPING = 0.25
"""Of the targets: what importance and codec add together to the Gram that rounding has."""


@dataclass
class Windows:
    """Calibration windows in batches: masks (B, T) of tokens, and G_s G_s' (B, T, T) of each linear layer."""

    batches: list[Batch]
    masks: list[Tensor]
    kernels: dict[str, list[Tensor]]


def main() -> None:
    options = arguments(__doc__, size="8MB", samples=512, judged=800)
    torch.set_num_threads(1)
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    original, tokenizer = load_model(source), load_tokenizer(source)
    judged = {
        "cola": sentences("cola")[: options.judged],
        "paragraphs, valid": paragraphs("valid", options.judged // 6),
        "stsb": sentences("stsb")[: options.judged],
        "paragraphs, test": paragraphs("test", options.judged // 6),
    }
    before = {name: encode(original, tokenizer, texts) for name, texts in judged.items()}
    texts = read_texts(data / "wikitext2" / "train.txt.gz")
    given = gather(texts, tokenizer, None, None, None, options.samples).windowed(original)
    files = weight_file_bytes(source)
    budget = one_budget(None, options.size)
    decided = decide(original, {"all": Auto()}, budget, given, Sharing(file_bytes=files))
    done = factorize(original, decided.plan, decided.data, 0, True, None, int(budget.amount))
    lines: list[dict[str, object]] = []
    windows = measured_windows(original, given.batches(original), [one.decision.weight.name for one in done])
    for name, part in WAYS.items():
        began = time.process_time()
        model, nbytes = load_model(source), 0
        for one in done:
            if part is None or not is_layer(one):
                swap(model, one)
                nbytes += one.report.bytes_after if is_layer(one) else 0
        if part is not None:
            nbytes = code_in_turn(original, model, done, decided, windows, part)
        line: dict[str, object] = {"what": name, "36 layers": f"{nbytes:,} B"}
        for kind, those in judged.items():
            near = fidelity_of(before[kind], encode(model, tokenizer, those))
            line[kind] = f"{near.mean_cosine:.5f} / {near.p5_cosine:.5f}"
        lines.append(line)
        print(lines[-1], f"{time.process_time() - began:.0f} s", flush=True)
    publish(f"Layers measured in turn, whole model in {options.size}", table(lines), options)


def is_layer(one: CompressedWeight) -> bool:
    """Whether it is a linear layer of a block."""
    return one.decision.weight.name.startswith("encoder.layer.")


def swap(model: nn.Module, one: CompressedWeight) -> None:
    """What was fitted in place of the weight; a weight that stays dense is left."""
    if one.matrix is not None:
        rows = one.decision.recipe.matrix_rows
        swap_(model, one.decision.weight, one.matrix, matrix_rows=rows, bias_shift=one.bias_shift)


def measured_windows(model: Any, batches: list[Batch], names: list[str]) -> Windows:
    """The gradients of random projections of the output, as ``kflats.measure`` takes them."""
    masks = [torch.as_tensor(batch["attention_mask"]).bool() for batch in batches]
    kernels: dict[str, list[Tensor]] = {name: [] for name in names if name.startswith("encoder.layer.")}
    place = [0]

    def hook(name: str) -> Any:
        def arrived(g: Tensor) -> None:
            kernels[name].append(torch.bmm(g, g.mT))

        def forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            connected = output if output.requires_grad else output.detach().requires_grad_()
            connected.register_hook(arrived)
            return connected

        return forward

    with frozen(model), torch.enable_grad():
        handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in kernels]
        for batch, mask in zip(batches, masks, strict=True):
            Projections().losses(model, batch, place[0]).sum().backward()
            place[0] += len(mask)
        for handle in handles:
            handle.remove()
    return Windows(batches, masks, kernels)


def moments(windows: Windows, name: str, x: list[Tensor], z: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(sum_s Z_s' K Z_s, sum_s (X_s - Z_s)' K Z_s) with K = G_s G_s', inputs with a last 1 for the bias, (n + 1, n + 1)
    float64, as shares of sum ||G_s||^2."""
    n, total = x[0].shape[-1] + 1, 0.0
    gram, cross = (torch.zeros(n, n, dtype=torch.float64) for _ in range(2))
    for mine, theirs, kernel in zip(x, z, windows.kernels[name], strict=True):
        one = mine.new_ones(*mine.shape[:2], 1)
        away, behind = torch.cat([mine - theirs, 0 * one], 2), torch.cat([theirs, one], 2)
        weighed = torch.bmm(kernel, behind).flatten(0, 1)
        gram += behind.flatten(0, 1).T @ weighed
        cross += away.flatten(0, 1).T @ weighed
        total += float(kernel.diagonal(dim1=1, dim2=2).sum())
    return gram / total, cross / total


def recoded(
    original: nn.Module, one: CompressedWeight, known: Measured, gram: Tensor, cross: Tensor, part: float
) -> CompressedWeight:
    """The layer coded again, in the same bytes, with what was measured behind coded layers."""
    weight, recipe = one.decision.weight, one.decision.recipe
    weighting = recipe.importance.weigh(replace(known, fisher_gram=gram))
    mean = weighting.mean
    assert mean is not None
    assert recipe.matrix_rows == "out_features"
    assert isinstance(recipe.codec, Feedback)
    matrix = dense_weight(original, weight).T.to(torch.float64)
    away = cross[:-1, -1] / (gram[-1, -1] + 1e-5)  # as the importance has it: no loss depends on the bias of keys
    centred, coupled = (
        gram[:-1, :-1] - torch.outer(gram[:-1, -1], mean),
        cross[:-1, :-1] - torch.outer(away, gram[-1, :-1]),
    )
    damped = centred + DAMPING * centred.diagonal().mean() * torch.eye(len(centred), dtype=torch.float64)
    target = matrix + part * matrix @ torch.linalg.solve(damped, coupled.T).T
    problem = Problem(TensorRows(target.float()), one.decision.budget_bytes, 4, weighting.transposed())
    coded = recipe.encode(problem, torch.float32)
    stored = coded.matrix.rows(torch.arange(len(matrix)), dtype=torch.float32)
    shift = part * matrix @ away + (matrix - stored) @ mean
    return replace(
        one, matrix=coded.matrix, report=replace(one.report, bytes_after=coded.nbytes), bias_shift=shift.float()
    )


@torch.no_grad()
def code_in_turn(
    original: Any, model: Any, done: list[CompressedWeight], decided: Decided, windows: Windows, part: float
) -> int:
    """Code the layers of ``model``, whose tables are coded, one after another; returns the bytes of their codes."""
    layers = {one.decision.weight.name: one for one in done if is_layer(one)}
    statistics = decided.data.statistics
    assert statistics is not None
    least, nbytes = torch.finfo(torch.float32).min, 0
    hidden = [torch.where(mask[:, None, None, :], 0.0, least) for mask in windows.masks]
    ids = [{key: batch[key] for key in ("input_ids", "token_type_ids") if key in batch} for batch in windows.batches]
    x, z = ([one.embeddings(**batch) for batch in ids] for one in (original, model))
    for i, (block, mine) in enumerate(zip(original.encoder.layer, model.encoder.layer, strict=True)):
        came = x, z  # what a residual connection adds
        for stage, members in STAGES.items():
            for member in members:
                name = f"encoder.layer.{i}.{stage}.{member}"
                gram, cross = moments(windows, name, x, z)
                one = recoded(original, layers[name], statistics.of(name), gram, cross, part)
                swap(model, one)
                nbytes += one.report.bytes_after
            parts = [one.get_submodule(stage) for one in (block, mine)]
            if stage == "attention.self":
                x, z = (
                    [p(h, m)[0] for h, m in zip(s, hidden, strict=True)] for p, s in zip(parts, (x, z), strict=True)
                )
            elif stage == "intermediate":
                came = x, z
                x, z = ([p(h) for h in s] for p, s in zip(parts, (x, z), strict=True))
            else:
                both = zip(parts, (x, z), came, strict=True)
                x, z = ([p(h, before) for h, before in zip(s, c, strict=True)] for p, s, c in both)
    return nbytes


if __name__ == "__main__":
    main()
