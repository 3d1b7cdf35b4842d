"""Coded matrices in safetensors files: all integers of a matrix as one stream, beside its floating-point tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kflats.codecs.entropy import AGAIN
from kflats.codecs.streams import STREAM_VERSION, encode
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import read_geometry
from kflats.model.description import Module


def put_streams_(tensors: dict[str, Tensor], description: dict[str, Any], *, required: bool) -> None:
    """Replace the integers of each coded matrix in ``tensors`` by a stream, and write its size into ``description``.

    Args:
        tensors: the state of a model.
        description: of the same model, from ``describe``.
        required: whether a stream must be written. Otherwise a matrix stays at fixed rates, which load alike, where
            constriction is not installed or where its tensors are not in memory as a whole (offloaded or sharded).

    Raises:
        KflatsError: the constriction library is missing, or the state has other integers than the described model.
    """
    if not required and find_spec("constriction") is None:
        return
    for name, entry in description["modules"].items():
        if entry["matrix"]["kind"] != CodedMatrix.kind:
            continue
        geometry = read_geometry(entry["matrix"])
        own = {key: tensors[f"{name}.{key}"] for key in geometry.shapes if f"{name}.{key}" in tensors}
        whole = all(type(value) in (Tensor, nn.Parameter) and not value.is_meta for value in own.values())
        if not required and (not whole or len(own) < len(geometry.shapes)):
            continue
        matrix = CodedMatrix(geometry, own)
        if matrix.checksum() != entry["checksum"]:
            raise KflatsError(
                f"the codes of {name!r} differ from those of the model",
                cause="the state that is saved was changed, or belongs to another model",
                hint="save the state of this very model",
            )
        for key, value in own.items():
            if not value.is_floating_point():
                del tensors[f"{name}.{key}"]
        tensors[f"{name}.codes"] = encode(matrix)
        entry["stream"] = {"version": STREAM_VERSION, "bytes": len(tensors[f"{name}.codes"])}


def check_shapes(paths: Sequence[str | os.PathLike[str]], modules: Sequence[Module]) -> None:
    """Refuse safetensors files whose coded matrices have tensors of other shapes than their description says.

    Raises:
        KflatsError: files of another description, or files that cannot be read.
    """
    expected = {
        f"{module.name}.{key}": tuple(tensor.shape)
        for module in modules
        if isinstance(module.empty, CodedMatrix)
        for key, tensor in module.empty.tensors().items()
    }
    with ExitStack() as stack:
        for path in paths if expected else ():
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, ValueError) as error:
                raise KflatsError(
                    f"{path} cannot be read: {error}", cause="a damaged or incomplete file", hint=AGAIN
                ) from error
            for name in expected.keys() & set(file.keys()):
                if (shape := tuple(file.get_slice(name).get_shape())) != expected[name]:
                    raise KflatsError(
                        f"size mismatch: {name} is {shape} in the checkpoint, {expected[name]} in its description",
                        cause="config.json was edited, or belongs to other weights",
                        hint="restore the folder, or save the model again",
                    )
