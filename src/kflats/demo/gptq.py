"""GPTQ in 4 bits, what a model is usually rounded with, for comparison: layer by layer, in groups of columns.

    minimise   || (W - W^) X ||^2,      W^ = q s,   q = -8 .. 7,   s a 16-bit scale for each 64 inputs of an output

Columns are rounded one after another, and the error of each goes on to those behind it (Frantar et al., GPTQ,
arXiv:2210.17323). The inputs X are those behind the layers that are rounded already, columns go in order of activation,
scales are those of least squared error, and the mean's error goes into the bias. Embedding tables are rounded in the
same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kflats.model.weights import find_weights

GROUP = 64
_BLOCK = 128
_CLIPS = torch.linspace(0.6, 1.0, 9)
_DAMPING = 0.01


@dataclass(frozen=True)
class Factor:
    """The Cholesky factor of an inverse Gram with its columns in the order of rounding."""

    order: Tensor
    upper: Tensor

    @classmethod
    def of(cls, gram: Tensor, damping: float) -> Factor:
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
        damped = gram[order][:, order].to(torch.float64)
        damped.diagonal().add_(damping * float(gram.diagonal().mean()))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return cls(order, torch.linalg.cholesky(inverse, upper=True).to(torch.float32))

    @property
    def weight(self) -> float:
        """What the square of a rounding error counts, in the mean over columns."""
        return float(self.upper.diagonal().square().reciprocal().mean())


def gptq(weight: Tensor, factor: Factor, steps: Tensor, up: float, most: int) -> Tensor:
    """(out, in) integers from -most - 1 to most; the errors of a column go on to those behind it (arXiv:2210.17323).

    Args:
        weight: (out, in) float32. steps: (out, in), or (out, 1).
    """
    rest, wide = weight[:, factor.order].clone(), steps.expand_as(weight)[:, factor.order]
    levels, errors, upper = torch.empty_like(rest), torch.empty_like(rest), factor.upper
    for start in range(0, rest.shape[1], _BLOCK):
        end = min(start + _BLOCK, rest.shape[1])
        for i in range(start, end):
            scaled = rest[:, i] / wide[:, i]
            levels[:, i] = (scaled.abs() + 1 - up).floor().mul(scaled.sign()).clamp(-most - 1, most)
            errors[:, i] = (rest[:, i] - levels[:, i] * wide[:, i]) / upper[i, i]
            rest[:, i + 1 : end].addr_(errors[:, i], upper[i, i + 1 : end], alpha=-1)
        rest[:, end:].addmm_(errors[:, start:end], upper[start:end, end:], alpha=-1)
    natural = torch.empty_like(levels)
    natural[:, factor.order] = levels
    return natural


class _Entered(Exception):
    """The first block was reached."""


@torch.no_grad()
def walk_(
    model: Any, batches: Sequence[dict[str, Tensor]], code: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Replace the weights and biases of the encoder's layers, each after its inputs behind those before it.

    Args:
        code: given a layer's name, the Gram (in, in) of its centred inputs and their mean; gives what replaces the
            weight, (out, in), and what is added to the bias.
    """
    names, entered = {id(module): name for name, module in model.named_modules()}, list[tuple[Tensor, Any]]()

    def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append((args[0], args[1] if len(args) > 1 else kwargs.get("attention_mask")))
        raise _Entered

    handle = model.encoder.layer[0].register_forward_pre_hook(reached, with_kwargs=True)
    for batch in batches:
        try:
            model(**batch)
        except _Entered:
            continue
    handle.remove()
    hidden, masks = [h for h, _ in entered], [m for _, m in entered]
    real = [batch["attention_mask"].bool() for batch in batches]

    def put_(inputs: list[Tensor], *layers: nn.Linear) -> None:
        rows = torch.cat([x[mask] for x, mask in zip(inputs, real, strict=True)])
        mean = rows.mean(0)
        rows -= mean
        gram = rows.T @ rows / len(rows)
        for layer in layers:
            weight, shift = code(names[id(layer)], gram, mean)
            layer.weight.copy_(weight)
            layer.bias.add_(shift)

    for block in model.encoder.layer:
        own = block.attention.self
        put_(hidden, own.query, own.key, own.value)
        mixed = [own(h, attention_mask=mask)[0] for h, mask in zip(hidden, masks, strict=True)]
        put_(mixed, block.attention.output.dense)
        middle = [block.attention.output(x, h) for x, h in zip(mixed, hidden, strict=True)]
        put_(middle, block.intermediate.dense)
        inner = [block.intermediate(x) for x in middle]
        put_(inner, block.output.dense)
        hidden = [block.output(x, h) for x, h in zip(inner, middle, strict=True)]


def in_four_bits(original: nn.Module, batches: Sequence[dict[str, Tensor]], table_bits: int = 4) -> tuple[Any, int]:
    """A copy of an encoder shaped like BERT with the rounded numbers, and the bytes of its integers and scales.

    The layers of its blocks have 4 bits by GPTQ. Other matrices are rounded to the nearest: embeddings to
    ``table_bits``, others to 4.
    """
    model: Any = deepcopy(original)
    numbers = 0.0
    for weight in find_weights(model):
        role, held = weight.places[0].role, model.get_submodule(weight.name).weight
        bits = table_bits if role == "embedding" else 4
        numbers += held.numel() * (bits + 16 / GROUP) / 8
        if not weight.name.startswith("encoder.layer"):
            steps, most = group_steps(held.detach(), bits), 2 ** (bits - 1) - 1
            held.data = (held.data / steps).round().clamp(-most - 1, most) * steps

    def code(name: str, gram: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        own = model.get_submodule(name).weight.detach()
        steps = group_steps(own, 4)
        decoded = gptq(own, Factor.of(gram, _DAMPING), steps, 0.5, 7) * steps
        return decoded, (own - decoded) @ mean

    walk_(model, batches, code)
    others = sum(p.numel() * 4 for p in model.parameters()) - sum(w.nbytes for w in find_weights(model))
    return model, int(numbers) + others


def group_steps(weight: Tensor, bits: int) -> Tensor:
    """(out, in) steps, one for each group of columns: of several shares of the largest entry the one of least error."""
    n, d = weight.shape
    most = 2 ** (bits - 1) - 1
    parts = weight.reshape(n, d // GROUP, GROUP)
    tried = parts.abs().amax(2, keepdim=True) / most * _CLIPS.view(-1, 1, 1, 1)
    tried = tried.clamp_min(1e-12).to(torch.float16).to(torch.float32).clamp_min(1e-7)
    lost = torch.stack([((parts / s).round().clamp(-most - 1, most) * s - parts).square().sum(2) for s in tried])
    best = tried.gather(0, lost.argmin(0).unsqueeze(0).unsqueeze(3))[0]
    steps: Tensor = best.expand_as(parts).reshape(n, d)
    return steps
