"""Models in local folders: annotated, saved and loaded."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.release import needed
from kflats.io.headers import check_files
from kflats.io.plugin import register_plugin
from kflats.io.saving import guard_saving_, save_pretrained
from kflats.io.sources import weights_folder
from kflats.model.description import describe
from kflats.model.weights import is_kflats_config, pretrained_models


def annotate_(model: nn.Module) -> None:
    """Write into the config of ``model`` (or of each transformers model inside it) which layers are factored.

    ``model.save_pretrained`` then writes a folder that ``from_pretrained`` loads. The config of a model without
    factored layers loses the description. Plain torch modules have no config, and ``save`` needs none.

    Raises:
        KflatsError: a model that another method has quantized, or factors no smaller than their table.
    """
    guard_saving_(model)
    done: list[str] = []
    for name, part in list(pretrained_models(model)):
        if any(not outer or name.startswith(outer + ".") for outer in done):
            continue
        done.append(name)
        known = getattr(part.config, "quantization_config", None)
        if known is not None and not is_kflats_config(known):
            raise KflatsError(
                f"factored layers are not supported in {type(part).__name__}, which is quantized by another method",
                cause="a config describes one method",
                hint="compress the original model, then quantize the result",
            )
        if (description := describe(part)) is not None:
            part.config.quantization_config = description
        elif known is not None:
            del part.config.quantization_config


def save_model(model: Any, folder: str | os.PathLike[str]) -> None:
    """Save a transformers model into ``folder``, annotated: codes as streams, and a checksum of every tensor."""
    annotate_(model)
    save_pretrained(model, folder)


def load_model(folder: str | os.PathLike[str]) -> Any:
    """The transformers model of a local folder, of the class its config names (else ``AutoModel``), in its own dtype.

    Only safetensors are read, and no code from the folder is run.

    Raises:
        KflatsError: transformers is missing, the folder holds no model, or a model that needs its own code.
    """
    register_plugin()
    transformers = needed("transformers", "kflats[hf]", "loading a model")
    where = weights_folder(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, local_files_only=True)
        kind: Any = getattr(transformers, (getattr(config, "architectures", None) or ("",))[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            kind = transformers.AutoModel
        if not hasattr(config, "quantization_config"):  # otherwise the plug-in checks them
            check_files(where.glob("*.safetensors"), warns=False)
        return kind.from_pretrained(
            where, dtype="auto", use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except KflatsError:
        raise
    except Exception as error:  # a damaged config makes transformers raise many kinds of exceptions
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise KflatsError(
            f"the model in {where} cannot be loaded: {reason[0]}",
            cause="a damaged folder, or an architecture that this transformers does not have",
            hint="transformers.AutoModel.from_pretrained on the same folder shows the details",
            command="restore the folder, or install another transformers",
        ) from error
