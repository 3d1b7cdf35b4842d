"""What ``--quick`` runs on: a tiny random model whose embedding table lies near three flats, and generated tasks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from _runs import SHARED, Asked
from _shared_layers import write_shared

from kflats.common.errors import KflatsError
from kflats.io import new_folder
from kflats.tasks.task import find_task

WORDS = 600
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def quick(asked: Asked) -> Asked:
    """The options with a tiny model and generated tasks in place of those that are not given."""
    if not asked.quick:
        return asked
    folder = asked.models.parent / "quick"
    source = asked.source
    if source in (None, SHARED):
        tiny = folder / "tiny"
        if not tiny.is_dir():
            write_model(tiny)
        if source == SHARED and not (folder / "tiny-shared").is_dir():
            write_shared(tiny, folder / "tiny-shared")
        source = str(tiny if source is None else folder / "tiny-shared")
    data = folder / "data"
    for task in asked.tasks:
        if not (data / find_task(task).folder / "train.tsv").is_file():
            write_task(data, task)
    return replace(asked, source=source, task_data=data)


def tokenizer() -> object:
    """A tokenizer of whole words, in BERT's order."""
    import tokenizers
    import transformers

    ids = {word: i for i, word in enumerate([*_SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **names)


def write_model(folder: Path) -> None:
    """A BERT of two blocks. Its rows lie near three flats of 6 dimensions, with noise around them; all share one
    direction, along which even and odd words differ."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS + len(_SPECIAL),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(config)
        bases = torch.randn(3, 6, 32)
        table = model.embeddings.word_embeddings.weight
        with torch.no_grad():
            rows = torch.einsum("nr,nrd->nd", torch.randn(len(table), 6), bases[torch.arange(len(table)) % 3])
            parity = (torch.arange(len(table)) - len(_SPECIAL)) % 2 * 2.0 - 1.0
            table.copy_(0.1 * rows + 0.02 * torch.randn_like(table) + 0.1 * torch.outer(parity, bases.sum((0, 1))))
    with new_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer().save_pretrained(aside)  # type: ignore[attr-defined]


def write_task(data: Path, task: str, sizes: tuple[int, int] = (320, 100)) -> None:
    """``train.tsv`` and ``dev.tsv`` of a generated task: words of two kinds, and labels that follow their shares.

    Raises:
        KflatsError: a task of another kind than classes, numbers or words with labels.
    """
    found = find_task(task)
    if found.kind not in ("classification", "regression", "token"):
        raise KflatsError(f"--quick generates no task like {task!r}", hint="a task with labels")
    folder = data / found.folder
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(task)
    for split, count in zip(("train", "dev"), sizes, strict=True):
        if found.kind == "token":
            lines = ["token\tner"]
            for _ in range(count):
                words = [draw.randrange(WORDS) for _ in range(draw.randint(4, 9))]
                lines += [f"w{word}\t{'B-PER' if word % 4 == 0 else 'O'}" for word in words] + [""]
        else:
            lines = ["sentence1\tsentence2\tlabel"]
            for _ in range(count):
                share = draw.random()
                kinds = [share, 1 - share] if found.pairs else [share]
                texts = [_sentence(draw, one) for one in kinds]
                label = str(round(5 * share, 2)) if not found.labels else str(int(len(found.labels) * share))
                lines.append("\t".join([texts[0], texts[1] if found.pairs else "", label]))
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sentence(draw: random.Random, share: float) -> str:
    """Eight words, of which about ``share`` have even numbers."""
    return " ".join(f"w{2 * draw.randrange(WORDS // 2) + (draw.random() > share)}" for _ in range(8))
