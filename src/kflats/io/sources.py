"""The sources of models: a local folder or a hub name, with the files beside the weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from kflats.common.errors import KflatsError, first_line
from kflats.common.formatting import announce
from kflats.common.paths import expanded
from kflats.common.release import needed
from kflats.common.schema import JsonObject
from kflats.io.atomic import beside, explained

TABLE_INDEX = "table.json"
"""What names the files of a coded table."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.txt", "*.safetensors", "*.model"]
_TENSORS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|ot|gguf|tflite|mlmodel|pkl|pickle)")
_WEIGHTS = re.compile(_TENSORS.pattern + r"|.*\.index\.json")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)")
_OWN = {"config.json", "generation_config.json", "kflats_report.json", "kflats_report.html"}
STATIC_MODULE = "sentence_transformers.kflats.StaticEmbedding"
"""The class that loads a compressed static table, as ``modules.json`` names it. sentence-transformers imports classes
of its own namespace only, so ``kflats.io.plugin`` offers it there; without kflats the first error names it."""
_STATIC_MODULE = "sentence_transformers.models.StaticEmbedding"  # the name that all versions know
_INSIDE = ("*/config.json", "snapshots/*/config.json")
_SKIPPED = {"onnx", "openvino", "coreml", "flax", "original", "__pycache__"}


_TRUSTED = ContextVar("kflats_trusts_remote_code", default=False)


@contextmanager
def trusting_remote_code() -> Iterator[None]:
    """Inside, a model that brings code of its own (``auto_map`` in its config) is loaded with it: the code is run.

    The default refuses such models. Limit: the code can do whatever the user of the process can; read it first. A line
    on stderr says that code may be run.

    >>> with trusting_remote_code():
    ...     trusts_remote_code()
    True
    """
    announce("code that comes with a model is run, because it is trusted")
    before = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(before)


def trusts_remote_code() -> bool:
    """Whether code that comes with a model may be run."""
    return _TRUSTED.get()


def resolve_model(name_or_path: str | os.PathLike[str], *, pickled: bool = False) -> Path:
    """The local folder of a model: the given folder, or else a snapshot of the hub's model of that name.

    Of the hub only ``*.json``, ``*.txt``, ``*.safetensors`` and ``*.model`` are fetched; code only where it is trusted
    (``trusting_remote_code``).

    Args:
        pickled: whether weights as torch's pickles will do, in a local folder.

    Raises:
        KflatsError: no such folder, no such model, no network, or a model without safetensors.
    """
    if (folder := local_model(name_or_path, pickled=pickled)) is not None:
        return folder
    text = os.fspath(name_or_path)
    hub = needed("huggingface_hub", "kflats[hf]", f"there is no folder {text}, and fetching it from the hub")
    try:
        with explained(Path(text)):
            patterns = [*_HUB_FILES, "*.py"] if trusts_remote_code() else _HUB_FILES
            snapshot = Path(hub.snapshot_download(text, allow_patterns=patterns))
    except KflatsError:
        raise
    except (OSError, ValueError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise KflatsError(
            f"there is no folder {text}, and the hub does not give that model ({said})",
            cause="a misspelled path or name, no network, or a model that is private or gated",
            hint="owner/model; for a private or gated model accept its licence on the hub, and hf auth login",
        ) from error
    weights_folder(snapshot)
    return snapshot


def local_model(name_or_path: str | os.PathLike[str], *, pickled: bool = False) -> Path | None:
    """The local folder of a model; None for what may be a name of the hub, which is not asked.

    Args:
        pickled: as ``resolve_model``.

    Raises:
        KflatsError: neither a folder with a model nor a name.
    """
    text = os.fspath(name_or_path)
    if not text.strip():
        raise KflatsError("no model is named", hint="a model folder, or a hub name such as owner/model")
    path = expanded(text)
    if path.is_dir():
        weights_folder(path, pickled=pickled)
        return path.resolve()
    if path.exists():
        raise KflatsError(f"{text} is a file", hint="the folder that holds config.json")
    interrupted = beside(path.absolute(), "old").is_dir()
    if interrupted or path.is_absolute() or text.startswith((".", "~")) or not _HUB_NAME.fullmatch(text):
        old = f"rename {beside(path.absolute(), 'old')} to {path.name}, or run the interrupted command again"
        raise KflatsError(
            f"there is no folder {text}",
            cause="its replacement was interrupted while it was renamed" if interrupted else "",
            hint=old if interrupted else "a model folder, or a hub name such as owner/model",
        )
    return None


def weights_folder(folder: str | os.PathLike[str], *, pickled: bool = False) -> Path:
    """The folder with the transformer's ``config.json``: ``folder``, or one inside it (some sentence-transformers).

    Args:
        pickled: as ``resolve_model``.

    Raises:
        KflatsError: no model in it, one without safetensors, or an adapter of PEFT.
    """
    root = holder = Path(folder)
    if (root / "adapter_config.json").is_file():
        own = (path for path in root.glob("*.safetensors") if not path.name.startswith("adapter_"))
        if (root / "config.json").is_file() and any(own):
            raise KflatsError(
                f"{root} holds a model beside the adapter_config.json of PEFT",
                cause="transformers then loads the model that adapter_config.json names, not this one",
                hint="move adapter_config.json out of the folder",
            )
        raise KflatsError(
            f"{root} holds an adapter of PEFT, not a model",
            cause="an adapter is trained factors beside the weights of another model, which it names",
            hint="merge it into that model first (merge_and_unload of peft), save that, and compress what was saved",
        )
    static = static_folder(root)
    if static is not None:
        holder = static
    elif not (root / "config.json").is_file():
        modules = [(m["path"], m["type"].rpartition(".")[2]) for m in _modules(root)]
        inner = [path for path, kind in modules if kind == "Transformer"]
        if modules and not inner:
            raise KflatsError(
                f"{root} is a model of sentence-transformers without a Transformer or StaticEmbedding",
                cause=f"modules.json begins with {modules[0][1][:40]!r}",
                hint="the folder of one encoder inside of it; kflats compresses one at a time",
            )
        holder = root / (inner or [""])[0]
        if not (holder / "config.json").is_file():
            if is_coded_table(root):
                raise KflatsError(
                    f"{root} holds a coded table, not a model",
                    hint=f"a model folder; kflats inspect {root} shows the table",
                )
            raise KflatsError(
                f"{root} holds no model",
                cause="it has no config.json, nor a modules.json that names a folder with one",
                hint=_models_inside(root),
            )
    if not any(holder.glob("*.safetensors")):
        stored = any(_PICKLED.fullmatch(path.name) for path in holder.iterdir())
        if stored and pickled:
            return holder
        other = "a folder or a revision with model.safetensors"
        formats = [path.name for path in sorted(holder.iterdir()) if _TENSORS.fullmatch(path.name)]
        cause = "a download or save that did not finish"
        if exported := next(iter(sorted((holder / "onnx").glob("*.onnx"))), None):
            cause = f"it is a folder for programs that run ONNX: its weights are in onnx/{exported.name}"
        if formats:
            cause = f"its weights are in {formats[0]}, a format of another library"
        raise KflatsError(
            f"{holder} has {'a config.json' if static is None else 'a static embedding'} and no safetensors file",
            cause="its weights are stored as pickle, which can run code" if stored else cause,
            hint=f"kflats export {root} --dense --out DIR writes them as safetensors, or {other}" if stored else other,
        )
    return holder


def _models_inside(root: Path) -> str:
    """A hint at models in folders of ``root``, as the cache of the hub keeps them; "" where there are none."""
    folders = sorted(path.parent for form in _INSIDE for path in root.glob(form))
    found = [folder for folder in folders if any(folder.glob("*.safetensors"))]
    if not found:
        return ""
    return f"{found[0]}, " + ("which holds a model" if len(found) == 1 else f"one of {len(found)} folders with a model")


def is_coded_table(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is what ``kflats compress --table`` wrote."""
    folder = expanded(folder)
    return (folder / TABLE_INDEX).is_file() and not (folder / "config.json").exists()


def static_folder(root: str | os.PathLike[str]) -> Path | None:
    """The folder with the table of a static model, whose tokens have one vector each; None for other models.

    Those are folders of sentence-transformers whose first module is a ``StaticEmbedding``, and model2vec's.
    """
    root = Path(root)
    modules = _modules(root)
    if modules and modules[0]["type"].rpartition(".")[2] == "StaticEmbedding":
        return root / modules[0]["path"]
    return root if not modules and is_model2vec(read_config(root)) else None


def is_model2vec(config: JsonObject) -> bool:
    """Whether a config is model2vec's, which writes ``model_type`` only where it distils a model."""
    return config.get("model_type", "model2vec" if "embedding_dtype" in config else None) == "model2vec"


def read_config(folder: str | os.PathLike[str]) -> JsonObject:
    """``config.json`` of a folder as JSON; {} where there is none, or none that can be read."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


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
    files = _files(root, (root, *_blobs(root)))
    return [path for path in files if _TENSORS.fullmatch(path.name) and _is_inside(path, modules)]


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
    inner = weights_folder(source, pickled=True)
    modules = _module_folders(source)
    if static_folder(source) is not None:
        _copy_static_modules(source, target, inner.relative_to(source))
    for path in _files(source, allowed):
        relative = path.relative_to(source)
        own = _WEIGHTS.fullmatch(path.name) is not None or (path.parent == inner and path.name in _OWN)
        own |= relative.parts[0] == "report" and (source / "kflats_report.json").is_file()  # of kflats report
        if not _is_inside(path, modules) and (relative.parts[0] in _SKIPPED or own):
            continue
        goal = target / relative
        if os.path.lexists(goal):
            continue
        with explained(goal):
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, goal)


def _copy_static_modules(source: Path, target: Path, inner: Path) -> None:
    """Write ``modules.json`` of a static model, with the class that loads the table in ``target / inner``."""
    path, config = source / "modules.json", read_config(target / inner)
    entries = [{"idx": 0, "name": "0", "path": "", "type": _STATIC_MODULE}]
    if path.is_file():
        entries = json.loads(path.read_text(encoding="utf-8"))
    elif config.get("normalize"):  # as model2vec itself writes it
        normalize = "sentence_transformers.models.Normalize"
        entries.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": normalize})
    entries[0]["type"] = STATIC_MODULE if "quantization_config" in config else _STATIC_MODULE
    with explained(target / "modules.json"):
        (target / "modules.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")


def _module_folders(root: Path) -> set[Path]:
    """The folders of the modules beside the transformer."""
    folders = {(root / m["path"]).resolve() for m in _modules(root) if m["path"]}
    return folders - {weights_folder(root, pickled=True).resolve()} if folders else folders


def _is_inside(path: Path, folders: set[Path]) -> bool:
    return any(parent.resolve() in folders for parent in path.parents)


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


def _modules(root: Path) -> list[dict[str, str]]:
    """sentence-transformers' list of modules; paths that leave the folder are refused."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        entries = [{"path": str(module["path"]), "type": str(module["type"])} for module in modules]
        paths = [PurePosixPath(module["path"].replace("\\", "/")) for module in entries]
        if any(p.is_absolute() or ".." in p.parts or ":" in str(p) for p in paths):
            raise ValueError("a folder outside the model")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KflatsError(f"{path} cannot be read: {error!r}", cause="a damaged or tampered file") from error
    return entries
