"""Models with factored layers in folders: annotated, saved and loaded, by transformers or as plain torch modules.

A plain module is one file with the description of its layers in the header. Both forms hold codes as streams. The
metadata of each weight file says which kflats wrote it, and has a checksum of every tensor. Other readers of the format
show these entries or ignore them; other writers drop them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial, update_wrapper
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.codecs.streamed import StreamedMatrix
from kflats.codecs.streams import STREAM_VERSION, KeptStreams, encode, stream_checksum
from kflats.common.dtypes import dtype_of
from kflats.common.errors import KflatsError, KflatsWarning, NotFiniteError, first_line
from kflats.common.hashing import crc32
from kflats.common.machine import is_out_of_memory
from kflats.common.release import needed, version
from kflats.common.run_forms import FormLoss, RunForm
from kflats.common.schema import JsonObject
from kflats.io.atomic import manifest_follows, replaced
from kflats.io.mapped import Spill, TensorEntry, copied_if_written, mapped_tensors, not_finite, read_header
from kflats.io.sources import read_config, static_folder, trusts_remote_code, weights_folder
from kflats.io.static import StaticModel, read_static, write_static
from kflats.matrices.coded import CodedMatrix, read_geometry
from kflats.matrices.registry import Matrix
from kflats.model.description import Module, describe, match, read_description, swap_described_
from kflats.model.parameters import forget_changed_, put_matrices_
from kflats.model.run_as import LOSSES
from kflats.model.swap import Swaps, unchanged_on_error
from kflats.model.weights import (
    check_model,
    factored_layers,
    held_matrices,
    is_kflats_config,
    is_sentence_transformer,
    pretrained_models,
    stored_name,
)

VERSION_KEY = "kflats_version"
STOP_KEY = "transformers_weights"
STOP = (
    "kflats compressed this model: `pip install 'kflats[hf,codes]'`, then `import kflats` before you load it. "
    "For programs without kflats: `kflats export --dense` or `--onnx`"
)
"""An entry of config.json that stops programs which do not know kflats, and tells their users what to do.

transformers takes it for the name of the weight file, sees that it is none, and raises an error with this text before
it reads a tensor. Otherwise ``ignore_mismatched_sizes=True`` would fill the factored layers with random numbers. The
plug-in takes the entry out before transformers looks for files.
"""
CHECKSUMS = "kflats_checksums"
DIGITS = 8
"""Characters of the metadata that the checksum of one tensor takes."""


def stamp_(path: str | os.PathLike[str]) -> None:
    """Write into the metadata of a safetensors file the version of kflats and the CRC-32 of every tensor.

    ``kflats_checksums`` holds eight hexadecimal digits per tensor, in the order of the tensors' names. A checksum is of
    the tensor's name, type, shape and bytes. The tensors themselves are copied byte by byte; other entries stay. The
    file is replaced in one step.

    Raises:
        KflatsError: no safetensors file.

    >>> import tempfile, torch
    >>> from safetensors import safe_open
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    >>> stamp_(path)
    >>> with safe_open(path, framework="pt") as file:
    ...     sorted(file.metadata()), file.metadata()["kflats_checksums"], file.get_tensor("a").tolist()
    (['format', 'kflats_checksums', 'kflats_version'], 'debf5a60', [1.0, 1.0, 1.0])
    """
    path = Path(path)
    with replaced(path) as aside:
        with path.open("rb") as source, aside.open("wb") as target:
            metadata, entries = read_header(source, path)
            begin = source.tell()
            target.write(_header(metadata, entries, "".join(_checksums(source, entries))))
            source.seek(begin)
            shutil.copyfileobj(source, target, 2**20)
        shutil.copymode(path, aside)


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], data_bytes: int) -> int:
    """The most bytes that come before the tensors in a safetensors file with checksums.

    Args:
        tensors: type ("F32") and shape of each tensor, by name.
        data_bytes: of all tensors together. The number of its digits bounds the digits of each offset.

    >>> header_bytes({"a": ("F32", (3,))}, 12)
    152
    """
    entries = {name: TensorEntry(dtype, tuple(shape), (data_bytes,) * 2) for name, (dtype, shape) in tensors.items()}
    return len(_header({}, entries, "0" * DIGITS * len(entries)))


def _check_tensors(path: Path) -> int:
    """How many tensors have no checksum: none, or all of a file that another program wrote."""
    with path.open("rb") as file:
        metadata, entries = read_header(file, path)
        stored = metadata.get(CHECKSUMS)
        if stored is None:
            return len(entries)
        actual = _checksums(file, entries)
    expected = [stored[i : i + DIGITS] for i in range(0, len(stored), DIGITS)]
    if actual != expected:
        known = set(expected)
        strange = [name for name, checksum in zip(sorted(entries), actual, strict=True) if checksum not in known]
        problem = f"its tensor {strange[0]!r} was changed or renamed" if strange else "it lacks tensors"
        raise KflatsError(
            f"{path} is damaged: {problem}",
            cause="a failing disk, a broken download, or a program that changed tensors and kept the old checksums",
            hint="fetch the file again, or compress the model again",
        )
    return 0


def check_files(paths: Iterable[str | os.PathLike[str]], *, warns: bool = True) -> None:
    """Refuse safetensors files in which a tensor differs from the one that ``stamp_`` took a checksum of.

    Args:
        paths: files; those of other formats are passed over.
        warns: whether tensors without a checksum give a warning, one for all files.

    Raises:
        KflatsError: a changed, renamed, added or lost tensor; no safetensors file.
    """
    counts = {str(path): _check_tensors(Path(path)) for path in paths if str(path).endswith(".safetensors")}
    unchecked = {path: count for path, count in counts.items() if count}
    if unchecked and warns:
        others = f" and {len(unchecked) - 1} other files" if len(unchecked) > 1 else ""
        warnings.warn(
            KflatsWarning(
                f"{sum(unchecked.values()):,} tensors in {min(unchecked)}{others} have no checksum, because another "
                "program saved them: damage cannot be detected. Saving the model again while kflats is imported adds "
                "checksums."
            ),
            stacklevel=2,
        )


def _header(metadata: Mapping[str, str], entries: Mapping[str, TensorEntry], checksums: str) -> bytes:
    """Length and header of a file, padded: tensors begin at multiples of 8."""
    whole = {"format": "pt"} | dict(metadata) | {CHECKSUMS: checksums, VERSION_KEY: version()}
    # Sorted: safetensors writes several entries in any order, and equal models should be equal files.
    header = {"__metadata__": dict(sorted(whole.items())), **{name: vars(entry) for name, entry in entries.items()}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checksums(file: BinaryIO, entries: Mapping[str, TensorEntry]) -> list[str]:
    """The checksum of every tensor, in the order of names; ``file`` stands where the header ends."""
    begin, checksums = file.tell(), []
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        for name in sorted(entries):
            entry = entries[name]
            first, end = (begin + offset for offset in entry.data_offsets)
            with data[first:end] as part:
                checksums.append(_checksum(name, entry, part))
        return checksums


def _checksum(name: str, entry: TensorEntry, data: memoryview | Tensor) -> str:
    return f"{crc32([f'{name} {entry.dtype} {list(entry.shape)} ', data]):08x}"


def _check_written(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare what a file holds with the tensors that were saved, by name."""
    with path.open("rb") as file:
        _, entries = read_header(file, path)
        for name, found in zip(sorted(entries), _checksums(file, entries), strict=True):
            own = tensors.get(name)
            if own is None or type(own) not in (Tensor, nn.Parameter) or own.is_meta:
                continue  # offloaded or sharded: not in memory as a whole
            if _checksum(name, entries[name], own) != found:
                raise KflatsError(
                    f"{path} does not hold what was written: {name}", cause="a failing disk", hint="another disk"
                )


def guard_saving_(model: nn.Module) -> None:
    """Give each transformers model in ``model`` that has factored layers the ``save_pretrained`` below."""
    for _, part in pretrained_models(model):
        if any(True for _ in (*factored_layers(part), *held_matrices(part))):
            # It follows its model through deepcopy and pickle; a bound method would be pickled as that of the class.
            part.__dict__["save_pretrained"] = update_wrapper(partial(save_pretrained, part), save_pretrained)
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
    """transformers' method of that name. It writes codes as streams, a checksum of every tensor, and ``STOP``.

    Tensors have the model's own names. transformers writes many models under older names, and joins or splits dense
    tables for that, which factors do not survive.

    Codes stay at fixed rates, which take more bytes and load alike, where constriction is not installed, where the
    codes are offloaded or sharded, and with ``distributed_checkpoint=True``. With ``push_to_hub=True`` the files are
    uploaded before they have checksums and ``STOP``; ``model.push_to_hub(name)`` uploads them after.

    Raises:
        KflatsError: ``state_dict`` has other codes than the model.
    """
    _save_pretrained(self, save_directory, is_main_process, state_dict, *rest, **settings)


def _save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *rest: Any,
    spill: Spill | None = None,
    streams: KeptStreams | None = None,
    **settings: Any,
) -> None:
    config, before, described = self.config, _versions(save_directory), None
    rank = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()
    writes = is_main_process and not rank and not settings.get("distributed_checkpoint")
    note, adapters = getattr(config, "quantization_config", None), getattr(self, "_hf_peft_config_loaded", False)
    offloaded = any(layer.weight.is_meta for _, layer in factored_layers(self))
    if is_kflats_config(note) and not adapters and not offloaded:
        # A new one: the vocabulary may have another size now, and the sizes of streams are written into it.
        forget_changed_(self)
        described = describe(self, parameters=writes)
        if described is None and writes:  # every matrix was let go of: the model is an ordinary one
            del config.quantization_config
    if described is not None:
        if writes:
            state_dict = dict(self.state_dict() if state_dict is None else state_dict)
            put_matrices_(state_dict, self)
            put_streams_(state_dict, described, spill, streams)
        config.quantization_config = described
    saved = dict(state_dict or {})  # transformers empties its own
    try:
        own_names = {"save_original_format": False} if described is not None else {}
        type(self).save_pretrained(self, save_directory, is_main_process, state_dict, *rest, **own_names | settings)
    finally:
        if described is not None:
            config.quantization_config = note
    if writes:
        for path, written in _versions(save_directory).items():
            if before.get(path) != written:
                stamp_(path)
                if described is not None:
                    _check_written(path, saved)
        _write_stop(Path(save_directory) / "config.json")


def _write_stop(path: Path) -> None:
    """Enter ``STOP`` into the config.json of a compressed model. transformers writes no such entry from a config."""
    if not path.is_file():  # an adapter was saved alone
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if is_kflats_config(config.get("quantization_config")) and config.get(STOP_KEY) != STOP:
        with replaced(path) as aside:
            aside.write_text(json.dumps(config | {STOP_KEY: STOP}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def put_streams_(
    tensors: dict[str, Tensor],
    description: JsonObject,
    spill: Spill | None = None,
    streams: KeptStreams | None = None,
) -> None:
    """Replace the integers of each coded matrix in ``tensors`` by a stream, and write its size into ``description``.

    Codes stay at fixed rates, which take more bytes and load alike, where constriction is not installed, and where
    tensors are not in memory as a whole (offloaded or sharded).

    Args:
        tensors: the state of a model.
        description: of the same model, from ``describe``.
        spill: where streams go until they are saved; None: they stay in memory.
        streams: those that were made before.

    Raises:
        KflatsError: the state has other integers than the described model.
    """
    if find_spec("constriction") is None:
        return
    streams = KeptStreams() if streams is None else streams
    for name, entry in cast(dict[str, dict[str, Any]], description["modules"]).items():
        if entry["matrix"]["kind"] != CodedMatrix.kind:
            continue
        geometry = read_geometry(entry["matrix"])
        role = entry["places"][0]["role"]
        names = {key: stored_name(name, key, role) for key in (*geometry.shapes, "codes")}
        own = {key: tensors[names[key]] for key in geometry.shapes if names[key] in tensors}
        whole = all(type(value) in (Tensor, nn.Parameter) and not value.is_meta for value in own.values())
        if not whole or len(own) < len(geometry.shapes):
            continue
        matrix = CodedMatrix(geometry, own)
        if matrix.checksum() != entry["checksum"]:
            raise KflatsError(
                f"the codes of {name!r} differ from those of the model",
                cause="the state that is saved was changed, or belongs to another model",
            )
        for key, value in own.items():
            if not value.is_floating_point():
                del tensors[names[key]]
        stream = streams.of(matrix)
        if stream is None:
            stream = encode(matrix)
            stream = stream if spill is None else spill.kept({"codes": stream})["codes"]
        tensors[names["codes"]] = stream
        both = stream_checksum(stream, entry["checksum"])
        entry["stream"] = {"version": STREAM_VERSION, "bytes": len(stream), "checksum": both}


def _versions(folder: str | os.PathLike[str]) -> dict[Path, tuple[int, int, int]]:
    """The weight files in ``folder``, each with a key that another file of its name does not have."""
    stats = ((path, path.stat()) for path in sorted(Path(folder).glob("*.safetensors")))
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a plain torch module with factored layers as ``folder/model.safetensors``; ``load_`` reads it back.

    The description of the layers is in the file's header. The file is replaced in one step. Shared parameters are
    stored once. Codes are streams where constriction is installed, and stay at fixed rates elsewhere.

    Args:
        model: a torch module; a transformers model has ``save_pretrained``.
        folder: created if missing; other files in it stay.

    Raises:
        KflatsError: a transformers or sentence-transformers model, or a full disk; an earlier file stays as it was.
    """
    if is_sentence_transformer(model) or any(part is model for _, part in pretrained_models(model)):
        raise KflatsError(
            f"{type(model).__name__} is not supported here, because it saves itself",
            hint="save_pretrained, or kflats compress",
        )
    tensors, shared = _distinct(model)
    layers = describe(model, parameters=False)
    if layers is not None:
        put_streams_(tensors, layers)
    with replaced(Path(folder) / "model.safetensors") as aside:
        save_file(tensors, aside, metadata={"kflats": json.dumps({"layers": layers, "shared": shared})})
        stamp_(aside)


def load_(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load what ``save`` wrote into ``model``, a dense module of the same architecture, in place.

    Every name, shape, size and checksum is checked before a layer is replaced or memory is allocated. A file without
    checksums, because another program wrote it again, is loaded with a warning.

    Raises:
        KflatsError: no module, or no name of a folder; no such file, a damaged one, or one of another architecture.
            ``model`` is then as it was.
    """
    check_model(model)
    if not isinstance(folder, str | os.PathLike):
        raise KflatsError(
            f"expected the name of a folder, found {type(folder).__name__}", hint="a folder that was saved by kflats"
        )
    path = Path(folder) / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file, unchanged_on_error(model), torch.no_grad():
            _load(model, path, file)
    except FileNotFoundError as error:
        raise KflatsError(f"there is no {path}", hint="a folder that was saved by kflats") from error
    except (SafetensorError, json.JSONDecodeError) as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or incomplete file") from error


def _load(model: nn.Module, path: Path, file: Any) -> None:
    """Replace the described layers, check every name and shape, and read the tensors."""
    header = file.metadata() or {}
    if "kflats" not in header:
        raise KflatsError(
            f"{path} has no description of layers",
            cause="kflats.save did not write this file",
            hint="from_pretrained of transformers, after import kflats, for a folder with a config.json",
        )
    note = json.loads(header["kflats"])
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    shared = note.get("shared") if isinstance(note, dict) and note.keys() == {"layers", "shared"} else None
    if not isinstance(shared, dict) or not all(isinstance(v, str) and v in shapes for v in shared.values()):
        raise KflatsError(f"{path} has an unreadable description", cause="a damaged or hand-edited file")
    check_files([path])
    chosen: list[tuple[str, Module, Matrix]] = []
    if note["layers"] is not None:
        description = read_description(note["layers"])
        with Swaps(model, just_found=True) as swaps:
            for weight, module in match(model, description, strict=True):
                dtype = description.stored_dtype(module, dtype_of(weight.dtype))
                matrix = module.new(dtype, model.get_parameter(f"{weight.name}.weight").device)
                swap_described_(swaps, weight, module, matrix)
                chosen.append((weight.name, module, matrix))
    state = model.state_dict(keep_vars=True)
    _check_shapes(
        {name: tuple(t.shape) for name, t in state.items()}, shapes | {a: shapes[n] for a, n in shared.items()}
    )
    for name, module, matrix in chosen:
        for key, tensor in matrix.tensors().items():
            stored = file.get_tensor(f"{name}.{key}")
            if stored.is_floating_point() != tensor.is_floating_point():
                raise KflatsError(f"{name}.{key} is of type {stored.dtype} in the file", cause="a damaged file")
            tensor.copy_(stored)
            del state[f"{name}.{key}"]
        module.finish_(matrix)
    for name, tensor in state.items():
        tensor.copy_(file.get_tensor(shared.get(name, name)))


def _check_shapes(expected: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() | there.keys()):
        if expected.get(name) != there.get(name):
            problem = f"{name!r} is {there.get(name)} in the file, {expected.get(name)} in the model"
            if name not in there or name not in expected:
                problem = f"the file {'lacks' if name in expected else 'has an unknown tensor'} {name!r}"
            raise KflatsError(problem, cause="it was saved from another architecture, or is damaged")


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state without repeats, and the name under which each repeat is stored."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise KflatsError(f"{name!r} cannot be stored", cause="it is not a tensor")
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor.detach().clone().contiguous()
    return tensors, shared


class Described(dict[str, Any]):
    """The description of a model in its config. A deep copy shares its parts, which nobody changes.

    transformers copies the whole config whenever a model with an encoder and a decoder runs, which took several times
    as long as the model.

    >>> import copy
    >>> note = Described(modules={"a": 1})
    >>> copied = copy.deepcopy(note)
    >>> copied == note, copied is note, copied["modules"] is note["modules"]
    (True, False, True)
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Described:
        return Described(self)


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
                hint="compress the original model, then quantize the result",
            )
        if (description := describe(part)) is not None:
            part.config.quantization_config = Described(description)
        elif known is not None:
            del part.config.quantization_config


def save_model(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    spill: Spill | None = None,
    shard: str | None = None,
    streams: KeptStreams | None = None,
) -> None:
    """Save a transformers model, or a static one, into ``folder``, annotated: codes as streams, and a checksum of every
    tensor. A static model without factors is saved as its library does it.

    Args:
        spill: where streams go until all are there; None: they stay in memory.
        shard: the most bytes of one weight file ("5GB"), as transformers takes it; None: its default.
        streams: of the model's matrices, those that were made before.
    """
    if not isinstance(model, StaticModel):
        annotate_(model)
        limits: dict[str, Any] = {} if shard is None else {"max_shard_size": shard}
        _save_pretrained(model, folder, spill=spill, streams=streams, **limits)
    elif (described := describe(model)) is None:
        write_static(model, Path(folder))
    else:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        put_streams_(tensors, described, streams=streams)
        with replaced(Path(folder) / "model.safetensors") as aside:
            save_file(tensors, aside, metadata={"format": "pt"})
            stamp_(aside)
        config = {**model.origin, "quantization_config": described}
        (Path(folder) / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        model.tokenizer.save(str(Path(folder) / "tokenizer.json"))


def note_losses_(folder: str | os.PathLike[str], losses: Sequence[FormLoss], run_as: RunForm | None = None) -> None:
    """Write into the ``config.json`` of a compressed folder what run-time forms lose, and the form that it loads in.

    The file is replaced in one step, and the folder's manifest follows.

    Args:
        folder: as kflats wrote it.
        losses: of the forms that were measured.
        run_as: of all coded linear layers, convolutions and tied heads; None: as it is.
    """
    path = weights_folder(folder) / "config.json"
    with manifest_follows(Path(folder), path.relative_to(folder).as_posix()), replaced(path) as aside:
        config = json.loads(path.read_text(encoding="utf-8"))
        note = config["quantization_config"]
        note[LOSSES] = [asdict(one) for one in losses]
        for place in (place for module in note["modules"].values() for place in module["places"]):
            if run_as is not None and place["role"] in ("linear", "conv1d", "conv2d", "head"):
                place["run_as"] = run_as
        aside.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_model(folder: str | os.PathLike[str], *, pickled: bool = False, mapped: bool = False) -> Any:
    """The transformers model of a local folder, of the class its config names (else ``AutoModel``), in its own dtype.

    Only safetensors are read. Code from the folder is run only inside ``trusting_remote_code``. A static model becomes
    a ``StaticModel``.

    Args:
        pickled: also read torch's pickles where there is nothing else. transformers reads tensors alone of them.
        mapped: the weights stay on disk, read-only (``kflats.io.mapped``), for who only reads them or puts others in
            their places. A class that transformers alone can find, and a static model, are loaded as always.

    Raises:
        KflatsError: transformers is missing, the folder holds no model, or an adapter, or a model that another library
            quantized, or one that needs its own code; its files lack tensors, or hold them in other shapes.
    """
    where = weights_folder(folder, pickled=pickled)
    if static_folder(folder) is not None:
        return load_static(where)
    transformers = needed("transformers", "kflats[hf]", "loading a model")
    safe = any(where.glob("*.safetensors"))
    if safe:
        _shards(where)  # which refuses a damaged index
    _check_code(where, transformers)
    config: Any = None
    try:
        config = transformers.AutoConfig.from_pretrained(
            where, trust_remote_code=trusts_remote_code(), local_files_only=True
        )
        _check_unquantized(where, getattr(config, "quantization_config", None))
        named = (getattr(config, "architectures", None) or ("",))[0]
        own = (auto for auto, path in _auto_map(where).items() if path.rpartition(".")[2] == named)
        kind: Any = getattr(transformers, next(own, named) if trusts_remote_code() else named, None)
        if not isinstance(kind, type) or not (
            issubclass(kind, transformers.PreTrainedModel) or kind.__name__.startswith("AutoModel")
        ):
            kind = transformers.AutoModel
        settings = {
            "use_safetensors": safe,
            "trust_remote_code": trusts_remote_code(),
            "local_files_only": True,
            "dtype": "auto",
        }
        if hasattr(config, "quantization_config"):
            return kind.from_pretrained(where, **settings)  # the plug-in checks the files
        check_files(where.glob("*.safetensors"), warns=False)
        with torch.random.fork_rng(devices=[]):  # what the files lack is drawn
            torch.default_generator.manual_seed(0)  # of the CPU alone
            if mapped and safe and not kind.__name__.startswith("AutoModel"):
                model, found = _mapped_model(kind, config, where, transformers)
            else:
                model, found = _with_findings(kind, where, own_code=bool(_auto_map(where)), **settings)
        _check_complete(where, model, found)
        return model
    except KflatsError:
        raise
    except Exception as error:  # a damaged config makes transformers raise many kinds of exceptions
        if config is not None and not safe and "mismatch" not in str(error):
            raise KflatsError(
                f"the pickled weights in {where} cannot be read as tensors",
                cause="a damaged file, or a pickle of other objects than tensors, which could run code",
                hint="fetch the files again, or a revision with model.safetensors",
            ) from error
        if is_out_of_memory(error):
            raise KflatsError(
                f"the model in {where} cannot be loaded: {first_line(error)}",
                cause="too little memory, or a damaged config that asks for a larger model",
                hint="a machine with more memory, or restore the folder",
            ) from error
        raise KflatsError(
            f"the model in {where} cannot be loaded: {first_line(error)}",
            cause="a damaged folder, or an architecture that this transformers does not have",
            hint="restore the folder, or install another transformers",
        ) from error


_UNUSED = ("masked_spec_embed",)
"""Tensors that training alone reads, and that published files often lack: of speech encoders."""


def _check_complete(folder: Path, model: Any, found: Mapping[str, Any]) -> None:
    """Refuse a folder whose files lack numbers of ``model``, or hold them in other shapes: transformers draws these.

    A base model's own pooler that is wholly absent is drawn, with a warning: many encoders are saved without one, and
    means over tokens do not depend on it. So is what training alone reads. Counters begin at 0.

    Args:
        found: what transformers reports of the files.
    """
    if wrong := sorted(found["mismatched_keys"]):
        name, there, here = wrong[0]
        raise KflatsError(
            f"the tensor {name!r} in {folder} is of shape {tuple(there)}, and in the model that its config.json "
            f"describes of {tuple(here)}{_and_more(wrong)}",
            cause="config.json is of another model",
            hint="the config.json that was saved with these weights",
        )
    if not found["missing_keys"]:
        return
    counters = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    lost = set(found["missing_keys"]) - counters
    pooler = {name for name, _ in model.named_parameters() if name.startswith("pooler.")}
    drawn = {name for name in lost if name.rpartition(".")[2] in _UNUSED}
    if pooler <= lost and getattr(model, "base_model", None) is model:
        drawn |= pooler
    if without := sorted(lost - drawn):
        raise KflatsError(
            f"the weight files in {folder} lack the tensor {without[0]!r}{_and_more(without)}",
            cause="a file or its index is missing, or the model never had this part",
            hint="fetch the files again; if the model never had it, save the model by transformers, which draws the "
            "part at random, and take that folder",
        )
    if drawn:
        names = sorted({"pooler" if name in pooler else name for name in drawn})
        message = f"the weight files in {folder} have no {' and no '.join(names)}: its numbers are drawn at random"
        warnings.warn(KflatsWarning(message), stacklevel=3)


def _with_findings(
    kind: Any, *arguments: object, own_code: bool = False, **settings: object
) -> tuple[Any, Mapping[str, Any]]:
    """What ``kind`` loads, and what it reports of the files. Shapes that do not fit are reported, and no error.

    Limit: classes that load in a way of their own, which may know nothing of a report, report nothing. These are few in
    transformers; the ``own_code`` of a model may be one.
    """
    from transformers import PreTrainedModel

    loads = getattr(kind.from_pretrained, "__func__", None)
    usual = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if (own_code and trusts_remote_code()) or (issubclass(kind, PreTrainedModel) and loads is not usual):
        return kind.from_pretrained(*arguments, **settings), {"missing_keys": (), "mismatched_keys": ()}
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(*arguments, **settings, **report)
    return model, found


def _and_more(found: Sequence[object]) -> str:
    return f", and {len(found) - 1} more" if len(found) > 1 else ""


def _mapped_model(kind: Any, config: Any, folder: Path, transformers: Any) -> tuple[Any, Mapping[str, Any]]:
    """The model of class ``kind`` with the tensors of ``folder``, mapped; transformers renames and ties them. And what
    it reports of them."""
    state: dict[str, Tensor] = {}
    for path in _shards(folder):
        state |= mapped_tensors(path)
    model, found = copied_if_written(
        lambda: _with_findings(kind, None, config=config, state_dict=dict(state), dtype="auto"), state
    )
    for module in model.modules():  # what a run may change
        module._buffers.update({name: None if t is None else t.clone() for name, t in module._buffers.items()})
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, found


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Inside, an error of numbers that are not finite says where in the files of ``folder`` such numbers are."""
    try:
        yield
    except NotFiniteError as error:
        found: list[str] = []
        with suppress(KflatsError):  # a type of numbers that is not read
            found += islice(not_finite(_shards(weights_folder(folder))), 3)
        if not found:
            raise
        cause = f"NaN or infinity in {', and in '.join(found)}"
        raise NotFiniteError(error.symptom, cause=cause, hint="fetch these files again") from error


def _shards(folder: Path) -> list[Path]:
    """The weight files that transformers reads: one, or those that an index names."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file() or not index.is_file():
        return [one] if one.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        named = [str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KflatsError(
            f"{index} names no files of weights", cause="a damaged file", hint="fetch it again"
        ) from error
    if outside := [name for name in named if Path(name).name != name]:
        raise KflatsError(f"{index} names {outside[0]!r}, outside of the folder", cause="a damaged or tampered file")
    return [folder / name for name in sorted(set(named))]


def load_static(folder: str | os.PathLike[str]) -> StaticModel:
    """The static model whose table is in ``folder``: of model2vec, of sentence-transformers, or compressed.

    A stream is decoded when rows of it are read, block by block (``StreamedMatrix``).

    Raises:
        KflatsError: the library that wrote a table is missing, a damaged file, or a newer description.
    """
    folder = Path(folder)
    origin, path = read_config(folder), folder / "model.safetensors"
    note = origin.pop("quantization_config", None)
    if note is None:
        return read_static(folder, origin)
    check_files([path])
    description = read_description(note)
    if set(description.modules) != {"embedding"}:
        raise KflatsError(f"{folder} describes no static embedding", cause="a damaged or hand-edited file")
    module = description.modules["embedding"]
    dtype = dtype_of(description.dtype)
    shell = torch.empty(1, 1, dtype=dtype).expand(*module.empty.shape)  # one number: the matrix takes its place
    model = StaticModel.of(folder, nn.Embedding.from_pretrained(shell, freeze=False), origin)
    (weight,) = (weight for weight, _ in match(model, description, strict=True))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key.removeprefix("embedding."): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or incomplete file") from error
    expected = {name: tuple(tensor.shape) for name, tensor in module.empty.tensors().items()}
    _check_shapes(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    # The first vector of a static model should come soon, however short its table is.
    matrix = module.new(description.stored_dtype(module, dtype), "cpu", late_from=0)
    if isinstance(matrix, StreamedMatrix):
        matrix.hold_(tensors["codes"])  # mapped from the file
    with torch.no_grad():
        for name, tensor in matrix.tensors().items():
            if tensor is not tensors[name]:
                tensor.copy_(tensors[name])
    module.finish_(matrix)
    with Swaps(model, just_found=True) as swaps:
        swap_described_(swaps, weight, module, matrix)
    return model


def _auto_map(folder: Path) -> dict[str, str]:
    """The classes of a model's own code, by the names of transformers' classes that load them; {} of other models."""
    found = read_config(folder).get("auto_map")
    return {auto: path for auto, path in found.items() if isinstance(path, str)} if isinstance(found, dict) else {}


def _check_code(folder: Path, transformers: Any) -> None:
    """Refuse a model that needs its own code, unless that is trusted."""
    own = _auto_map(folder)
    if not own or trusts_remote_code():
        return
    known = read_config(folder).get("model_type")
    if known not in transformers.CONFIG_MAPPING:
        raise KflatsError(
            f"the model in {folder} brings code of its own ({next(iter(own.values())).partition('.')[0]}.py), "
            "which is not run",
            cause=f"transformers has no model type {known!r}",
            hint="read that code; if you trust it, trusting_remote_code()",
        )


def _check_unquantized(folder: Path, note: Any) -> None:
    """Refuse a model that another library quantized."""
    note = note if note is None or isinstance(note, dict) else note.to_dict()
    if note and not is_kflats_config(note):
        method = note.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in note else "another library")
        raise KflatsError(
            f"the model in {folder} is quantized already, by {getattr(method, 'value', method)}",
            cause="its weights are rounded integers in a form of that library",
            hint="the model that it was made from, in float32, float16 or bfloat16",
        )
