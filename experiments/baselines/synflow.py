"""SynFlow: pruning a whole network without any data (Tanaka, Kunin, Yamins & Ganguli, NeurIPS 2020).

    R = 1' (prod_l |W_l|) 1,   score of a parameter theta = theta dR / dtheta   (eq. 1 and algorithm 1)

The scores of a layer sum to R whatever the layer (conservation, theorem 2): pruned step by step, exponentially, a
layer that gets thin gets large scores, so that no layer is emptied while another is still thick (theorem 3).

A transformer's embedding table alone is simpler (``encoder_flow``): R is linear in it, so that its scores are |E_ij|
times what flows on from column j, and one round says all.

As there, activations are the identity (exact for ReLU: every number is positive) and all shifts (biases, a batch
norm's mean and beta) are taken out, which makes the flow homogeneous.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def flow_model(model: nn.Module) -> nn.Module:
    """A float64 copy that computes the flow: absolute weights, no shifts, running statistics fixed."""
    flow = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.abs_()
        for module in flow.modules():
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                module.running_mean.zero_()
    return flow.requires_grad_(True)


def synflow_scores(flow: nn.Module, names: Sequence[str], shape: Sequence[int]) -> dict[str, Tensor]:
    """theta dR / dtheta >= 0 of the named parameters of ``flow_model``'s result, for inputs of ``shape`` (no batch)."""
    named = dict(flow.named_parameters())
    chosen = [named[name] for name in names]
    total = flow(torch.ones(1, *shape, dtype=torch.float64)).sum()
    gradients = torch.autograd.grad(total, chosen)
    return {name: (p * g).detach() for name, p, g in zip(names, chosen, gradients, strict=True)}


def synflow_masks(
    model: nn.Module,
    names: Sequence[str],
    shape: Sequence[int],
    fits: Callable[[Mapping[str, int]], bool],
    *,
    entries: int,
    steps: int = 100,
) -> dict[str, Tensor]:
    """Masks of the named parameters: in ``steps`` rounds as many entries are left as ``entries``, over all of them.

    Args:
        fits: asked after the last round with the entries left by parameter; while it says no, a thousandth more of
            them goes. Formats that count indices differ by layer, so the number that fits is not known before.
        entries: how many are left at most, over all parameters.

    Raises:
        ValueError: not one entry fits.
    """
    flow = flow_model(model)
    named = dict(flow.named_parameters())
    full = sum(named[name].numel() for name in names)

    def prune(left: int) -> dict[str, Tensor]:
        scores = synflow_scores(flow, names, shape)
        flat = torch.cat([scores[name].flatten() for name in names])
        kept = torch.zeros(len(flat), dtype=torch.bool)
        kept[flat.topk(left).indices] = True
        parts = kept.split([named[name].numel() for name in names])
        masks = {name: part.view(named[name].shape) for name, part in zip(names, parts, strict=True)}
        with torch.no_grad():
            for name, mask in masks.items():
                named[name].mul_(mask)
        return masks

    masks = {name: torch.ones(named[name].shape, dtype=torch.bool) for name in names}
    for step in range(1, steps + 1):
        masks = prune(max(round(full * (entries / full) ** (step / steps)), 1))
    while not fits({name: int(mask.sum()) for name, mask in masks.items()}):
        entries = entries * 999 // 1000
        if entries < 1:
            raise ValueError("not one entry fits")
        masks = prune(entries)
    return masks


class _Scale(nn.Module):
    """A layer norm that keeps its scales and does not normalise."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def encoder_flow(encoder: nn.Module) -> Tensor:
    """(d,) float64: dR / dx_j of a transformer encoder for an embedding x: |E_ij| times it is the score of E_ij.

    With absolute weights and no shifts attention averages equal positions, so one token says all: values and outputs
    carry the flow, queries and keys none. R, the sum of the last hidden state, is linear in the embedding of this
    token, so its slopes are its values at the unit vectors. For models of transformers that take
    ``inputs_embeds``: BERT, RoBERTa, ELECTRA, DistilBERT, ALBERT and XLNet are tried.
    """
    table = encoder.get_input_embeddings()
    flow = flow_model(encoder)
    read = flow.get_input_embeddings()
    with torch.no_grad():
        for module in list(flow.modules()):
            if isinstance(module, nn.Embedding) and module is not read:
                module.weight.zero_()  # positions and segments are shifts
            for name, child in module.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(module, name, _Scale(child))
                elif type(child).__module__ in _ACTIVATIONS and not any(True for _ in child.parameters()):
                    setattr(module, name, nn.Identity())
        units = torch.eye(table.weight.shape[1], dtype=torch.float64, device=table.weight.device).unsqueeze(1)
        hidden: Tensor = flow(inputs_embeds=units).last_hidden_state
    return hidden.sum((1, 2))


_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
