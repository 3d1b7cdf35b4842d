"""Question: how long do the products of a layer take on this CPU, by torch's operators and in kflats' run-time forms?

The six linear layers of a block of all-MiniLM-L6-v2 (four of 384 x 384, one of 384 x 1,536, one of 1,536 x 384) with
random numbers, one thread, for some tokens. "torch, bfloat16" is ``F.linear`` in this type, "torch._int_mm" the bare
product of integers. The forms of kflats take and give float32, add a bias, and int8 rounds each token. Contestants take
turns; a ratio to float32 is a median over turns, with its 95 % interval.

    python benchmarks/products.py --write benchmarks/results/products.md         # on a CPU with AVX2 alone
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from _common import arguments, publish, table
from torch import Tensor
from torch.nn import functional as F

from kflats.common.errors import KflatsError, first_line
from kflats.evaluation.latency import take_turns
from kflats.matrices.integer_kernels import integer_kernel
from kflats.matrices.running import DenseProduct, IntegerProduct

SHAPES = (*[(384, 384)] * 4, (384, 1536), (1536, 384))
TOKENS = (1, 20, 960)
FLOATS = "float32"


def main() -> None:
    options = arguments(__doc__, turns=15)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines: dict[str, dict[str, object]] = {}
    with torch.inference_mode():
        for tokens in TOKENS:
            for one in take_turns(contestants(tokens), options.turns, stretch=0.02):
                line = lines.setdefault(one.name, {"products by": one.name})
                line[f"{tokens} tokens"] = f"**{one.ratio:.2f}** ({one.low:.2f} to {one.high:.2f}), {one.ms:.2f} ms"
    publish("Products of a layer on this CPU", f"{table(list(lines.values()))}\n\n{integers()}", options)


def contestants(tokens: int) -> dict[str, Callable[[], object]]:
    """By name, what multiplies so many tokens by all layers of a block."""
    draws = torch.Generator().manual_seed(0)

    def each(make: Callable[[Tensor, Tensor, Tensor], Callable[[], object]]) -> Callable[[], None]:
        calls = []
        for inputs, outputs in SHAPES:
            weight, bias = torch.randn(outputs, inputs, generator=draws), torch.randn(outputs, generator=draws)
            calls.append(make(torch.randn(tokens, inputs, generator=draws), weight, bias))

        def run() -> None:
            for call in calls:
                call()

        return run

    def in_floats(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Callable[[], object]]:
        def make(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
            given = x.to(dtype), weight.to(dtype), bias.to(dtype)
            return lambda: F.linear(*given)

        return make

    def in_bfloat16(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
        product = DenseProduct((weight.to(torch.bfloat16),))
        return lambda: product(x, bias)

    def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
        left, right = (of.mul(20).clamp(-63, 63).to(torch.int8) for of in (x, weight.T.contiguous()))
        return lambda: torch._int_mm(left, right)

    def in_integers(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
        product = IntegerProduct.of(weight, torch.ones(weight.shape[1]))
        return lambda: product(x, bias)

    found = {
        FLOATS: each(in_floats(torch.float32)),
        "torch, bfloat16": each(in_floats(torch.bfloat16)),
        "kflats, bfloat16": each(in_bfloat16),
    }
    try:
        integer_kernel()
    except KflatsError:
        return found
    return found | {"torch._int_mm": each(whole), "kflats, int8": each(in_integers)}


def integers() -> str:
    """Where the integers of int8 end here."""
    try:
        return f"- the integers of int8 end at {integer_kernel().most}"
    except KflatsError as error:
        return f"- {first_line(error)}"


if __name__ == "__main__":
    main()
