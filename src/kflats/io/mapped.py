"""Tensors of safetensors files that stay on disk: the system reads a page when it is asked for, and may drop it again.

The mappings are read-only and shared. So they are no private memory of the process, and they count neither against its
heap nor against a limit of it; ``safetensors.safe_open`` maps files as private and writable memory, which counts.
Writing into such a tensor ends the process: whoever changes a model in place loads it in the ordinary way, and
``copied_if_written`` copies what a library writes into.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedRandom
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kflats.common.errors import KflatsError, first_line
from kflats.common.schema import decode
from kflats.io.atomic import explained

_LONGEST = 100_000_000  # bytes of a header, as the format allows
_AT_ONCE = 2**22  # numbers that are looked at together
_READ_BACK = 2**22  # bytes that are read back at once
_ALIGNED = 64  # bytes at whose multiples tensors begin
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of tensors that kflats reads; the format has others, of models that are quantized already."""
MAPPED_TYPES = frozenset(_TYPES.values())
"""The same as torch has them."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file: its type ("F32"), its shape, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Metadata and tensors of a file, which then stands where the header ends.

    Raises:
        KflatsError: no safetensors file, or a truncated one.
    """
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length) if length <= _LONGEST else b"")
        size = os.fstat(file.fileno()).st_size - file.tell()
        metadata = dict(header.pop("__metadata__", {}))
        entries: dict[str, TensorEntry] = decode(dict[str, TensorEntry], header, "header")
        if all(a <= b <= size for a, b in (entry.data_offsets for entry in entries.values())):
            return metadata, entries
    except (ValueError, AttributeError, TypeError):
        pass
    raise KflatsError(
        f"{path} cannot be read",
        cause="no safetensors file, or a truncated one",
        hint="fetch the file again, or compress the model again",
    )


def mapped_tensors(path: str | os.PathLike[str], only: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, read-only. The file stays mapped as long as one of them lives.

    Args:
        only: the name of the one tensor that is wanted; None: all.

    Raises:
        KflatsError: no safetensors file, a truncated one, a type that kflats does not read, or a tensor whose bytes are
            not those of its shape.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/a.safetensors"
    >>> save_file({"a": torch.arange(3), "none": torch.ones(0, 2)}, path)
    >>> {name: tensor.tolist() for name, tensor in mapped_tensors(path).items()}
    {'a': [0, 1, 2], 'none': []}
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            _, entries = read_header(file, path)
            begin = file.tell()
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(path, error) from error
    return {
        name: _tensor(data, begin, entry, f"the tensor {name!r} in {path}")
        for name, entry in entries.items()
        if only in (None, name)
    }


def unreadable(path: Path, error: Exception) -> KflatsError:
    """The error for a file that cannot be opened or read."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        return KflatsError(
            f"{path} cannot be opened beside all other files",
            cause="the system allows this process no more open files",
            hint="ulimit -n 8192 before the command, or fewer and longer files",
        )
    cause, hint = "a damaged or truncated file", "restore the file"
    if code in (errno.EACCES, errno.EPERM):
        cause, hint = "this user may not read it", "its permissions"
    elif code == errno.ENOENT:
        cause = "it was moved or removed"
    return KflatsError(f"{path} cannot be read: {first_line(error)}", cause=cause, hint=hint)


def mapped_array(path: str | os.PathLike[str]) -> np.memmap[Any, np.dtype[Any]]:
    """The array of a ``.npy`` file, read-only. Arrays of objects are refused, so nothing is unpickled.

    Raises:
        ValueError, OSError and others: a damaged file, for whose head numpy raises many kinds.
    """
    return np.lib.format.open_memmap(path, mode="r")


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The same numbers as a tensor, which nobody writes into where the array is read-only."""
    with warnings.catch_warnings():  # that the array is not writable is what is wanted
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(array)


def _tensor(data: mmap.mmap, begin: int, entry: TensorEntry, what: str) -> Tensor:
    first, end = entry.data_offsets
    dtype = _TYPES.get(entry.dtype)
    if dtype is None:
        raise KflatsError(f"{what} is of type {entry.dtype}, which is not supported", hint="float32, bfloat16, float16")
    if end - first != prod(entry.shape) * dtype.itemsize:
        raise KflatsError(f"{what} has other bytes than its shape", cause="a damaged file", hint="fetch the file again")
    if first == end:
        return torch.empty(entry.shape, dtype=dtype)
    return _read_only(data, begin + first, dtype, entry.shape)


_Loaded = TypeVar("_Loaded")


def copied_if_written(load: Callable[[], _Loaded], tensors: dict[str, Tensor]) -> _Loaded:
    """What ``load`` returns. It may write into mapped ``tensors``: these become copies, and it is called again.

    Models of transformers write: some set the row of the padding token to zero when they are loaded. Limit: a write by
    another thread, or through a view of numpy, still ends the process.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/a.safetensors"
    >>> save_file({"a": torch.ones(2, 2), "b": torch.ones(1)}, path)
    >>> tensors = mapped_tensors(path)
    >>> copied_if_written(lambda: [tensors["a"][0].zero_(), tensors["a"] + tensors["b"]], tensors)[1].tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    mapped = dict(tensors)
    while True:
        with Watched(mapped) as watched:
            try:
                loaded = load()
                if not watched.written:
                    return loaded
                del loaded
            except Exception:
                if not watched.written:  # otherwise it missed what was not written
                    raise
        tensors |= {name: mapped.pop(name).clone() for name in watched.written}


class Watched(TorchDispatchMode):
    """Inside, operations that would write into one of ``tensors``, or a view of it, do nothing; ``written`` has the
    names of these. Limit: of a write that an operation does not declare nothing is noticed.
    Rows that ``max_norm`` of an embedding would scale stay as they are, and are not named.

    >>> table = torch.ones(2, 2)
    >>> with Watched({"table": table}) as watched:
    ...     found = table[0].mul_(3) + 1
    >>> watched.written, table.tolist(), found.tolist()
    ({'table'}, [[1.0, 1.0], [1.0, 1.0]], [2.0, 2.0])
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        there = {name: tensor for name, tensor in tensors.items() if has_memory(tensor) and tensor.numel()}
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in there.items()}
        self.written = set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # an operator that calls functions, as flex_attention
            return func(*args, **kwargs)
        places = (
            kwargs.get(argument.name) if place >= len(args) else args[place]
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        changed = [one for given in places for one in (given if isinstance(given, list | tuple) else (given,))]
        storages = {one.untyped_storage().data_ptr() for one in changed if has_memory(one)}
        names = {self._names[storage] for storage in storages & self._names.keys()}
        if not names:
            return func(*args, **kwargs)
        if func is not torch.ops.aten.embedding_renorm_.default:  # rows of max_norm: the same each time
            self.written |= names
        returned = len(func._schema.returns)
        return None if not returned else changed[0] if returned == 1 else tuple(changed)


def has_memory(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor of numbers one after the other in memory: none of the meta device, none sparse."""
    return isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided


def not_finite(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Where safetensors files hold NaN or infinity: file, tensor and rows. All of them are read.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/a.safetensors"
    >>> save_file({"words": torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [0.0, torch.inf]])}, path)
    >>> list(not_finite([path]))
    ["rows 1 to 2 of 'words' in a.safetensors"]
    """
    for path in map(Path, paths):
        for name, tensor in mapped_tensors(path).items():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            rows = tensor.reshape(len(tensor) if tensor.ndim else 1, -1)
            parts = rows.split(max(1, _AT_ONCE // max(1, rows.shape[1])))
            bad = torch.cat([~torch.isfinite(part).all(1) for part in parts]).nonzero().flatten().tolist()
            if bad:
                yield f"rows {bad[0]} to {bad[-1]} of {name!r} in {path.name}"


class Spill:
    """The disk of a folder, for tensors that shall not stay in memory.

    They go into files without a name, so the system removes them with the process, however that ends. Where a file
    must have a name (network folders, Windows), it is removed when it is mapped, or closed.

    Args:
        folder: made if it is missing; None: the system's temporary folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Spill(folder).kept({"a": torch.ones(2)}), os.listdir(folder)
    ({'a': tensor([1., 1.])}, [])
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)

    def kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, mapped. What was written is compared with them before they may go.

        Raises:
            KflatsError: a full disk, or a disk that does not return what was written.
        """
        (mapped,) = self.kept_all([tensors])
        return mapped

    def kept_all(self, given: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The same of all that ``given`` yields, each of which is written before the next one is made, in one file.

        Raises:
            KflatsError: as ``kept``.
        """
        written: list[dict[str, _Place]] = []
        with ExitStack() as stack:
            with explained(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(tempfile.TemporaryFile(dir=self.folder))
            for tensors in given:
                with explained(self.folder):
                    written.append({name: self._written(file, tensor) for name, tensor in tensors.items()})
            with explained(self.folder):
                file.flush()
                data = _memory_of(file)
        return [{name: place.of(data) for name, place in places.items()} for places in written]

    def _written(self, file: BufferedRandom, tensor: Tensor) -> _Place:
        stored = tensor.detach().cpu().contiguous()
        file.write(bytes(-file.tell() % _ALIGNED))
        place = _Place(file.tell(), stored.dtype, stored.shape)
        flat = _bytes_of(stored)
        file.write(flat.numpy().data)
        file.seek(place.offset)
        room = np.empty(min(_READ_BACK, len(flat)), dtype=np.uint8)
        for part in flat.split(_READ_BACK):
            read = room[: len(part)]
            if file.readinto(read.data) != len(part) or not np.array_equal(read, part.numpy()):
                raise KflatsError(
                    f"a file in {self.folder} does not hold what was written",
                    cause="a failing disk",
                    hint="another disk",
                )
        file.seek(0, os.SEEK_END)
        return place


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """The tensor, of the whole file; its storage is its own part alone."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        if not nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.from_numpy(data[self.offset : self.offset + nbytes]).view(self.dtype).view(self.shape)


def _memory_of(file: BufferedRandom) -> npt.NDArray[np.uint8]:
    """A file that was written to its end, mapped; what is written into this memory stays out of the file. A process may
    have few open files: where the system opens this one again, by its number, it does not stay open."""
    if not (size := file.tell()):
        return np.empty(0, dtype=np.uint8)
    try:
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=False, nbytes=size)
    except RuntimeError:
        return np.memmap(file, dtype=np.uint8, mode="c")
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(cast(torch.UntypedStorage, storage)).numpy()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _read_only(data: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():  # that the buffer is not writable is what is wanted
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(data, dtype=dtype, count=prod(shape), offset=offset).view(shape)
