"""The sources of models: a local folder or a hub name, with the files beside the weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from kflats.common.errors import KflatsError
from kflats.io.atomic_folder import beside
from kflats.io.write_errors import explain

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.txt", "*.safetensors", "*.model"]
_TENSORS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|ot|gguf|tflite|mlmodel|pkl|pickle)")
_WEIGHTS = re.compile(_TENSORS.pattern + r"|.*\.index\.json")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)")
_OWN = {"config.json", "generation_config.json", "kflats_report.json", "kflats_report.html"}
_SKIPPED = {"onnx", "openvino", "coreml", "flax", "original", "__pycache__"}


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the given folder, or else a snapshot of the hub's model of that name.

    Of the hub only ``*.json``, ``*.txt``, ``*.safetensors`` and ``*.model`` are fetched, never code or pickles.

    Raises:
        KflatsError: no such folder, no such model, no network, or a model without safetensors.
    """
    text = os.fspath(name_or_path)
    if not text.strip():
        raise KflatsError("no model is named", hint="a model folder, or a hub name such as owner/model")
    path = Path(text).expanduser()
    if path.is_dir():
        weights_folder(path)
        return path.resolve()
    if path.exists():
        raise KflatsError(f"{text} is a file", hint="the folder that holds config.json")
    if (old := beside(path.absolute(), "old")).is_dir():
        raise KflatsError(
            f"there is no folder {text}",
            cause="its replacement was interrupted while it was renamed",
            hint=f"rename {old} to {path.name}, or run the interrupted command again",
        )
    if path.is_absolute() or text.startswith((".", "~")) or not _HUB_NAME.fullmatch(text):
        raise KflatsError(f"there is no folder {text}", hint="a model folder, or a hub name such as owner/model")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise KflatsError(
            f"there is no folder {text}, and the hub cannot be reached",
            cause="huggingface_hub is not installed",
            hint="pip install 'kflats[hf]', or a local folder",
        ) from error
    try:
        snapshot = Path(snapshot_download(text, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise KflatsError(
            f"the hub's {text} is gated", hint="accept its licence on the hub, and hf auth login"
        ) from error
    except LocalEntryNotFoundError as error:
        raise KflatsError(
            f"{text} is no folder, and the hub cannot be reached",
            cause="a misspelled path, or no network",
            hint="a model folder, or owner/model where there is a network",
        ) from error
    except (RepositoryNotFoundError, ValueError) as error:
        raise KflatsError(
            f"there is no folder {text}, and no such model on the hub",
            cause="a misspelled path or name, or a private model",
            hint="owner/model, or hf auth login",
        ) from error
    except OSError as error:
        explain(error, path)
        raise KflatsError(f"{text} could not be fetched from the hub: {error}", hint="try again") from error
    weights_folder(snapshot)
    return snapshot


def weights_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder with the transformer's ``config.json``: ``folder``, or one inside it (some sentence-transformers).

    Raises:
        KflatsError: no model in it, or one without safetensors.
    """
    root = Path(folder)
    found = root
    if not (root / "config.json").is_file():
        inner = [m["path"] for m in _modules(root) if str(m["type"]).rpartition(".")[2] == "Transformer"]
        if not inner:
            raise KflatsError(
                f"{root} holds no model",
                cause="it has neither config.json nor modules.json",
                hint="the folder that holds them",
            )
        found = root / inner[0]
        if not (found / "config.json").is_file():
            raise KflatsError(
                f"{found} holds no config.json, though modules.json names it", cause="an incomplete download"
            )
    if not any(found.glob("*.safetensors")):
        if any(_PICKLED.fullmatch(path.name) for path in found.iterdir()):
            raise KflatsError(
                f"{found} has no safetensors file",
                cause="its weights are stored as pickle, which can run code",
                hint="from_pretrained(...).save_pretrained(...) once, if you trust the file",
                command="another revision of the model, with model.safetensors",
            )
        raise KflatsError(
            f"{found} has a config.json and no weights",
            cause="a download or save that did not finish, or weights in a format of another library",
            hint="a folder with model.safetensors",
        )
    return found


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Every weight file that counts as the model's size: the transformer's safetensors, and ``module_files``.

    Raises:
        KflatsError: as ``weights_folder``.
    """
    return sorted(weights_folder(folder).glob("*.safetensors")) + module_files(folder)


def module_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Weight files, in any format, of the other modules of a sentence-transformers folder (such as ``Dense``).

    ``copy_companions`` copies them as they are. A file with two names counts twice, because the copy has two files.
    """
    root = Path(folder).resolve()
    modules = _module_folders(root)
    if not modules:
        return []
    found = _files(root, (root, *_blobs(root)))
    return [path for path in found if _TENSORS.fullmatch(path.name) and _is_inside(path, modules)]


def module_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes of ``module_files``: a part of the model's size that compression does not change."""
    return sum(path.stat().st_size for path in module_files(folder))


def copy_companions(source_folder: str | os.PathLike[str], target_folder: str | os.PathLike[str]) -> None:
    """Copy the files that a model needs beside its weights: tokenizer, pooling and dense modules, prompts, model card.

    It leaves out the model's weights in any format, its config (saved with the model), Python code, and hidden files.
    Files that the target has already are kept. Links that lead out of the folder are not followed, except into the hub
    cache's own store of this model.

    Raises:
        KflatsError: the disk is full, or a file cannot be written.
    """
    source, target = Path(source_folder).resolve(), Path(target_folder)
    allowed = (source, *_blobs(source))
    own = weights_folder(source)
    modules = _module_folders(source)
    for path in _files(source, allowed):
        relative = path.relative_to(source)
        if not _is_inside(path, modules) and (relative.parts[0] in _SKIPPED or _is_weights(path, own)):
            continue
        goal = target / relative
        if os.path.lexists(goal):
            continue
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, goal)
        except OSError as error:
            explain(error, goal)
            raise


def _module_folders(root: Path) -> set[Path]:
    """The folders of the modules beside the transformer."""
    found = {(root / m["path"]).resolve() for m in _modules(root) if m["path"]}
    return found - {weights_folder(root).resolve()} if found else found


def _is_inside(path: Path, folders: set[Path]) -> bool:
    return any(parent.resolve() in folders for parent in path.parents)


def _is_weights(path: Path, own: Path) -> bool:
    return _WEIGHTS.fullmatch(path.name) is not None or (path.parent == own and path.name in _OWN)


def _files(folder: Path, allowed: tuple[Path, ...]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix == ".py":
            continue
        if not any(path.resolve().is_relative_to(root) for root in allowed):
            continue
        if path.is_dir():
            if not path.is_symlink():
                yield from _files(path, allowed)
        elif path.is_file():
            yield path


def _blobs(source: Path) -> tuple[Path, ...]:
    """The folder that the links of a hub snapshot lead to: ``models--owner--name/{snapshots/<commit>, blobs}``."""
    repository = source.parent.parent
    is_snapshot = source.parent.name == "snapshots" and repository.name.startswith("models--")
    return ((repository / "blobs").resolve(),) if is_snapshot else ()


def _modules(root: Path) -> list[dict[str, Any]]:
    """sentence-transformers' list of modules; paths that leave the folder are refused."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        found = [{"path": str(module["path"]), "type": str(module["type"])} for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KflatsError(f"{path} cannot be read: {error!r}", cause="a damaged file") from error
    for module in found:
        parts = PurePosixPath(module["path"].replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in module["path"]:
            raise KflatsError(f"{path} names a folder outside the model, {module['path']!r}", cause="a tampered file")
    return found
