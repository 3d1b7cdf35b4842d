"""``save_pretrained`` of a model with factored layers: transformers' own, with streams and checksums."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kflats.io.coded import put_streams_
from kflats.io.headers import stamp_
from kflats.model.describe import describe
from kflats.model.description import is_kflats_config
from kflats.model.weights import factored_layers, pretrained_models


def guard_saving_(model: nn.Module) -> None:
    """Give each transformers model in ``model`` that has factored layers the ``save_pretrained`` below."""
    for _, part in pretrained_models(model):
        if any(True for _ in factored_layers(part)):
            # A bound method follows its model through copy.deepcopy.
            part.__dict__["save_pretrained"] = MethodType(save_pretrained, part)
        else:
            part.__dict__.pop("save_pretrained", None)


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *rest: Any,
    **settings: Any,
) -> None:
    """transformers' method of that name. It writes codes as streams, and a checksum of every tensor.

    Codes stay at fixed rates, which take more bytes and load alike, where constriction is not installed, where the
    codes are offloaded or sharded, and with ``distributed_checkpoint=True``. With ``push_to_hub=True`` the files are
    uploaded before they have checksums; ``model.push_to_hub(name)`` uploads them after.

    Raises:
        KflatsError: ``state_dict`` has other codes than the model.
    """
    config, before, described = self.config, _versions(save_directory), None
    writes = is_main_process and _is_first() and not settings.get("distributed_checkpoint")
    note, adapters = getattr(config, "quantization_config", None), getattr(self, "_hf_peft_config_loaded", False)
    offloaded = any(layer.weight.is_meta for _, layer in factored_layers(self))
    if is_kflats_config(note) and not adapters and not offloaded:
        described = describe(self)  # anew: the vocabulary may have another size now
    if described is not None:
        if writes:
            state_dict = dict(self.state_dict() if state_dict is None else state_dict)
            put_streams_(state_dict, described, required=False)
        config.quantization_config = described
    try:
        type(self).save_pretrained(self, save_directory, is_main_process, state_dict, *rest, **settings)
    finally:
        if described is not None:
            config.quantization_config = note
    if writes:
        for path, written in _versions(save_directory).items():
            if before.get(path) != written:
                stamp_(path)


def _versions(folder: str | os.PathLike[str]) -> dict[Path, tuple[int, int, int]]:
    """The weight files in ``folder``, each with a key that another file of its name does not have."""
    stats = ((path, path.stat()) for path in sorted(Path(folder).glob("*.safetensors")))
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}


def _is_first() -> bool:
    """Whether this process writes streams and checksums: the first one, where several processes save one model."""
    return not (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()
    )
