"""Claim: experts kept as one tensor lose less at equal bytes where they are measured: the Gram of what they read, and
the gradients of what they give.

    python experiments/experts.py --write experiments/results

A byte-level language model with the layers of Qwen's mixtures of experts (eight experts a layer, two a token), trained
here on the training part of WikiText-2 in some minutes. It is calibrated on other texts of that part, by gradients of
its own loss, and judged by bits per byte on the test part (KFLATS_DATA). Sizes are shares of all
matrices in float32. Without experts' statistics, they get their share of the bytes by their size, and errors of all
their numbers count alike; the other layers are measured on the same texts.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from typing import Any

import torch
from _results import markdown, parsed, publish
from _sentences import paragraphs
from torch import Tensor

from kflats import Auto, Integer, KeepDense, Recipe, TaskLoss, Uniform, compress_, find_weights
from kflats.evaluation.running import evaluating

WIDTH, LENGTH, EXPERTS = 128, 256, 8
QUICK: dict[str, Any] = {"steps": 3, "samples": 4, "judged": 4, "sizes": "10%"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of training, of 16 texts of 256 bytes")
    parser.add_argument("--sizes", default="15%,12.5%,10%,8%,6%")
    parser.add_argument("--samples", type=int, default=256, help="texts to calibrate on")
    parser.add_argument("--judged", type=int, default=400, help="texts to judge on")
    parser.add_argument("--seed", type=int, default=0)
    asked = parsed(parser, argv, QUICK)
    learnt, tested = (windows(name) for name in ("train", "test"))
    order = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(asked.seed))
    learnt = learnt[order]
    began = time.monotonic()
    original = trained(learnt[asked.samples :], asked.steps, asked.seed)
    minutes = (time.monotonic() - began) / 60
    batches = [{"input_ids": ids, "labels": ids} for ids in learnt[: asked.samples].split(16)]
    judged_on = tested[:: max(1, len(tested) // asked.judged)][: asked.judged]
    experts = [w.name for w in find_weights(original) if w.places[0].role == "experts"]
    apart = {name: Recipe(Auto(), Uniform(), matrix_rows="out_features") for name in experts}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "no data": ({"all": Auto()}, {}),
        "layers measured, experts not": ({"all": Auto(), **apart}, {"calibration": batches, "objective": TaskLoss()}),
        "all measured": ({"all": Auto()}, {"calibration": batches, "objective": TaskLoss()}),
    }
    rows: list[dict[str, Any]] = []

    def judged(method: str, size: str, model: Any, kept: float) -> None:
        rows.append({"method": method, "size": size, "kept": kept, "bits": bits_per_byte(model, judged_on)})
        print(rows[-1], flush=True)

    judged("float32", "", original, 1.0)
    for name, codec in {"8 bits": Integer(8), "4 bits, groups of 64": Integer(4, group=64)}.items():
        model = copy.deepcopy(original)
        outputs = Recipe(KeepDense(), codec=codec, matrix_rows="out_features")
        recipes: dict[str, Any] = {"all": outputs, "embeddings": Recipe(KeepDense(), codec=codec)}
        report = compress_(model, recipes, keep="60%", quiet=True)
        judged("rounding to the nearest", name, model, report.bytes_after / report.bytes_before)
    for size in asked.sizes.split(","):
        for name, (recipes, data) in ways.items():
            model = copy.deepcopy(original)
            report = compress_(model, recipes, keep=size, allocation="loss", quiet=True, **data)
            judged(name, size, model, report.bytes_after / report.bytes_before)
    share = sum(w.nbytes for w in find_weights(original) if w.name in experts) / sum(
        w.nbytes for w in find_weights(original)
    )
    lines = [[r["method"], r["size"] or "-", f"{r['kept']:.1%}", f"{r['bits']:.4f}"] for r in rows]
    body = "\n\n".join(
        [
            f"{sum(p.numel() for p in original.parameters()):,} numbers, {share:.0%} of them experts; trained in "
            f"{asked.steps} steps ({minutes:.0f} minutes), calibrated on {asked.samples} texts of {LENGTH} bytes, "
            f"judged on {len(judged_on)}. One seed.",
            markdown(["method", "size asked", "kept", "bits per byte"], lines),
            remarks(rows),
        ]
    )
    publish("experts", "A mixture of experts in codes", body, {"rows": rows}, asked)


def windows(name: str) -> Tensor:
    """(texts, 256) bytes of a part of WikiText-2."""
    raw = bytearray("\n".join(paragraphs(name, 10**9)).encode())
    whole = torch.frombuffer(raw, dtype=torch.uint8).long()
    return whole[: len(whole) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(texts: Tensor, steps: int, seed: int) -> Any:
    """The model, trained on drawn batches with a cosine schedule."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": 4, "head_dim": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH}
    sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH}
    balanced: dict[str, Any] = {"norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01}
    config = Qwen3MoeConfig(tie_word_embeddings=False, **sizes, **balanced)
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1, pct_start=0.1)
    for step in range(steps):
        ids = texts[torch.randint(len(texts), (16,))]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}: {float(loss.detach()) / math.log(2):.3f} bits a byte", flush=True)
    model.config.output_router_logits = False
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: Any, texts: Tensor) -> float:
    """The mean over all bytes but the first of each text."""
    total = 0.0
    with evaluating(model):
        for ids in texts.split(32):
            total += len(ids) * float(model(input_ids=ids, labels=ids).loss)
    return total / len(texts) / math.log(2)


def remarks(rows: list[dict[str, Any]]) -> str:
    """What measuring the experts changes at each size, from the numbers."""
    at = {(r["method"], r["size"]): r["bits"] - rows[0]["bits"] for r in rows}
    lines = []
    for size in dict.fromkeys(r["size"] for r in rows if r["method"] == "all measured"):
        with_them, without = at["all measured", size], at["layers measured, experts not", size]
        lines.append(f"- {size}: {with_them:+.4f} where all is measured, {without:+.4f} where experts are not.")
    return "Bits per byte more than float32:\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
