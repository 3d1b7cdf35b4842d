"""Coded matrices in safetensors files: their integers as a stream.

``model.save_pretrained`` writes the fixed-rate form, which is valid and larger; ``stream_folder`` then makes streams
of it. Both load alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kflats.codecs.entropy import AGAIN
from kflats.codecs.stream_reader import STREAM_VERSION
from kflats.codecs.streams import encode
from kflats.common.errors import KflatsError
from kflats.io.atomic_files import put_back, replaced_together
from kflats.io.headers import check_files, stamp_
from kflats.io.manifest import manifest_follows
from kflats.io.sources import weights_folder
from kflats.io.write_errors import explain
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import read_geometry
from kflats.matrices.codes import CHECK, floats_checksum
from kflats.model.description import DAMAGED, QUANT_METHOD, Module, read_description

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_UNREADABLE = "a damaged or incomplete file"


def stream_folder(folder: str | os.PathLike[str]) -> None:
    """Replace the codes in a transformers or sentence-transformers folder by streams: all its files, or none.

    ``save_pretrained`` writes codes at fixed rates; streams are smaller, and decoded when the folder is loaded. A
    folder without coded matrices, or with streams already, is left as it is. After an exception it is as it was. One
    whose change was killed while files took their places is refused when it is loaded; called again, this puts the old
    files back and begins anew.

    Raises:
        KflatsError: the constriction library is missing, the disk is full, or the folder is damaged.
    """
    root = weights_folder(folder)
    try:
        put_back(root)
        files = [path.relative_to(folder).as_posix() for path in root.iterdir() if path.is_file()]
        with manifest_follows(Path(folder), *files):
            _stream(root)
    except (OSError, SafetensorError) as error:
        explain(error, root)
        raise KflatsError(f"the weights in {root} cannot be read or written: {error}", cause=_UNREADABLE) from error


def _stream(root: Path) -> None:
    config = _read(root / "config.json")
    coded = coded_modules(config.get("quantization_config"))
    if not coded:
        return
    index = _read(root / _INDEX) if (root / _INDEX).is_file() else None
    places: dict[str, str] = index["weight_map"] if index else {}
    names = sorted(set(places.values())) or [_WEIGHTS]
    check_files([root / name for name in names])  # damaged tensors must not get new checksums
    files = {name: load_file(root / name) for name in names}
    tensors = {key: tensor for file in files.values() for key, tensor in file.items()}
    stream_codes_(tensors, coded)
    with replaced_together(root) as aside:
        for name, before in files.items():
            after = {key: tensors[key] for key in before if key in tensors}
            save_file(after, aside / name)
            stamp_(aside / name)
        if index:
            index["weight_map"] = {key: file for key, file in places.items() if key in tensors}
            index["metadata"]["total_size"] = sum(t.numel() * t.element_size() for t in tensors.values())
            _write(aside / _INDEX, index)
        _write(aside / "config.json", config)


def coded_modules(description: Any) -> dict[str, dict[str, Any]]:
    """The entries of a written description whose codes are not a stream yet, by name."""
    if not isinstance(description, dict) or description.get("quant_method") != QUANT_METHOD:
        return {}
    read_description(description)
    modules = description["modules"].items()
    return {name: entry for name, entry in modules if entry["matrix"]["kind"] == "coded" and "stream" not in entry}


def stream_codes_(tensors: dict[str, Tensor], modules: dict[str, dict[str, Any]]) -> None:
    """Replace the integers of ``modules`` in ``tensors`` by a stream each, and note it in their entries."""
    for name, entry in modules.items():
        geometry = read_geometry(entry["matrix"])
        if lost := [key for key in geometry.shapes if f"{name}.{key}" not in tensors]:
            raise KflatsError(
                f"the weights of {name!r} lack {lost[0]!r}",
                cause="a damaged folder: config.json and the weight files do not belong together",
                hint="save the model again, or restore the folder",
            )
        own = {key: tensors[f"{name}.{key}"] for key in geometry.shapes}
        matrix, floats = CodedMatrix(geometry, own), floats_checksum(own)
        check = tensors.pop(f"{name}.{CHECK}", None)
        if matrix.checksum() != entry["checksum"] or (check is not None and check.tolist() != [floats]):
            raise _damaged(name)
        stream = encode(matrix)
        for key, value in own.items():
            if not value.is_floating_point():
                del tensors[f"{name}.{key}"]
        tensors[f"{name}.codes"] = stream
        entry |= {"stream": {"version": STREAM_VERSION, "bytes": len(stream)}, "floats": floats}


def check_modules(paths: Sequence[str | os.PathLike[str]], modules: Sequence[Module]) -> set[str]:
    """Refuse coded matrices whose tensors in safetensors files are not those that a description says.

    Shapes are compared, and the checksum of floating-point tensors: one that the description states, or that the files
    hold beside the tensors; where neither is (files of before, or of another program), those are read as they are.
    Integers are checked where they are decoded.

    Returns:
        Names of the modules with a checksum beside their tensors.

    Raises:
        KflatsError: files of another description, or damaged ones.
    """
    coded = [module for module in modules if isinstance(module.empty, CodedMatrix)]
    checked = set()
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in paths if coded else ():
            if str(path).endswith(".safetensors"):
                file = stack.enter_context(_open(path))
                files |= dict.fromkeys(file.keys(), file)
        for module in coded:
            own = {key: tensor for key, tensor in module.empty.tensors().items() if f"{module.name}.{key}" in files}
            for key, tensor in own.items():
                name = f"{module.name}.{key}"
                if (there := tuple(files[name].get_slice(name).get_shape())) != tensor.shape:
                    raise KflatsError(
                        f"size mismatch: {name} is {there} in the checkpoint, {tuple(tensor.shape)} in its description",
                        cause="config.json was edited, or belongs to other weights",
                        hint="restore the folder, or save the model again",
                    )
            expected, name = module.floats, f"{module.name}.{CHECK}"
            if name in files:
                checked.add(module.name)
                expected = int(files[name].get_tensor(name).sum())
            floats = {
                key: files[f"{module.name}.{key}"].get_tensor(f"{module.name}.{key}")
                for key, tensor in own.items()
                if tensor.is_floating_point() and expected is not None
            }
            if expected is not None and floats_checksum(floats) != expected:
                raise _damaged(module.name)
    return checked


def _open(path: str | os.PathLike[str]) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, ValueError) as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause=_UNREADABLE, hint=AGAIN) from error


def _damaged(name: str) -> KflatsError:
    return KflatsError(
        f"the tensors of {name!r} are damaged: their checksum differs",
        cause=DAMAGED,
        hint=AGAIN,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause=_UNREADABLE, hint=AGAIN) from error
    if not isinstance(found, dict):
        raise KflatsError(f"{path} holds no object", cause=DAMAGED)
    return found


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
