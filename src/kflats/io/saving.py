"""``save_pretrained`` of a model with factored layers: as transformers', and then a checksum of every tensor."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from kflats.io.headers import stamp_
from kflats.model.weights import factored_layers, pretrained_models


def guard_saving_(model: nn.Module) -> None:
    """Give each transformers model in ``model`` that has factored layers the ``save_pretrained`` below."""
    for _, part in pretrained_models(model):
        if any(True for _ in factored_layers(part)):
            # A bound method follows its model through copy.deepcopy.
            part.__dict__["save_pretrained"] = MethodType(save_pretrained, part)
        else:
            part.__dict__.pop("save_pretrained", None)


def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *rest: Any, **settings: Any) -> None:
    """transformers' method of that name; the weight files that it writes then get a checksum of every tensor.

    ``push_to_hub=True`` uploads the files before they have checksums; ``model.push_to_hub(name)`` uploads them after.
    """
    before = _versions(save_directory)
    type(self).save_pretrained(self, save_directory, *rest, **settings)
    writes = settings.get("is_main_process", rest[0] if rest else True)
    if writes and _is_first() and not settings.get("distributed_checkpoint"):
        for path, written in _versions(save_directory).items():
            if before.get(path) != written:
                stamp_(path)


def _versions(folder: str | os.PathLike[str]) -> dict[Path, tuple[int, int, int]]:
    """What tells the weight files in ``folder`` from earlier files of the same names."""
    found = ((path, path.stat()) for path in sorted(Path(folder).glob("*.safetensors")))
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in found}


def _is_first() -> bool:
    """Of several processes that save one model, one writes checksums."""
    return not (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()
    )
