"""Mixtures of experts whose matrices are one tensor: what each expert reads and gives, while the model runs.

transformers computes the products of all experts in one operation (``transformers.integrations.moe``). Here they are
computed expert by expert instead, as its examples of a class of experts do:

    y_t = sum over the experts e of token t  of  w_te (act(x_t A_e) * (x_t B_e)) C_e

so that the inputs of C_e are seen, and which token has which expert. The two ways round differently. So all experts are
computed in this way throughout a measurement, whichever of them is watched at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from kflats.common.errors import KflatsError
from kflats.model.weights import inputs_first


@dataclass(frozen=True)
class ExpertCall:
    """One product of one expert.

    Args:
        key: the name of the tensor in its module. expert: the number of the expert.
        hidden: (N, m) what the module reads: the tokens of all samples, one after another.
        tokens: (P,) which of them the expert is given, increasing; a token that is given twice comes twice.
        x: (P, n) what the matrix reads. output: (P, d) the product.
    """

    key: str
    expert: int
    hidden: Tensor
    tokens: Tensor
    x: Tensor
    output: Tensor


OnCall: TypeAlias = Callable[[ExpertCall], Tensor]
"""Sees a product, and gives the output that the model reads on with."""


_WATCHED = "_kflats_watched"


@contextmanager
def one_by_one(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the experts of each of these modules are computed one after another.

    Raises:
        KflatsError: experts that are not all on one device.
    """
    changed: dict[int, Any] = {id(module): module for module in modules}
    for module in changed.values():
        if "forward" in vars(module) or getattr(module, "_is_expert_parallel", False):
            raise KflatsError(
                f"the experts of a {type(module).__name__} that is managed by another library cannot be measured",
                cause="accelerate or expert parallelism moves their tensors while the model runs",
                hint="load the model on one device",
            )
    try:
        for module in changed.values():
            module.forward = partial(_forward, module)
        yield
    finally:
        for module in changed.values():
            vars(module).pop("forward", None)


@contextmanager
def watched_experts(module: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Inside, ``on_call`` sees each product of the experts of ``module``, which are computed ``one_by_one``."""
    vars(module)[_WATCHED] = on_call
    try:
        yield
    finally:
        del vars(module)[_WATCHED]


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The outputs (N, m) of the experts, weighted and summed.

    Args:
        module: the experts. hidden_states: (N, m). top_k_index, top_k_weights: (N, k) the experts of each token.
    """
    gated, biased = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    on_call: OnCall | None = vars(module).get(_WATCHED)
    result = torch.zeros_like(hidden)

    def product(key: str, expert: int, tokens: Tensor, x: Tensor) -> Tensor:
        matrix = getattr(module, key)[expert]
        bias = getattr(module, f"{key}_bias")[expert] if biased else None
        output = functional.linear(x.to(matrix.dtype), matrix.T if inputs_first(module) else matrix, bias)
        return on_call(ExpertCall(key, expert, hidden.detach(), tokens, x, output)) if on_call else output

    count = len(module.down_proj)
    for expert in filter(lambda one: one < count, top_k_index.unique().tolist()):  # beyond them stands "no expert"
        tokens, place = torch.where(top_k_index == expert)
        inner = product("gate_up_proj" if gated else "up_proj", expert, tokens, hidden[tokens])
        inner = module._apply_gate(inner) if gated else module.act_fn(inner)
        outer = product("down_proj", expert, tokens, inner)
        if getattr(module, "has_post_expert_norm", False):
            outer = module.post_expert_norm(outer)
        weighted = outer * top_k_weights[tokens, place, None]
        result = result.index_add(0, tokens, weighted.to(result.dtype))
    return result.reshape(hidden_states.shape)
