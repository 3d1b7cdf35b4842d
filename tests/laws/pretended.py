"""A second device that is pretended: its tensors lie in the memory of the CPU, and an operation that mixes them with
others fails as it does on a GPU. So code is tried where there is none.

What is checked is where tensors lie, not kernels: ``test_devices.py`` runs the same laws on a GPU that is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NAME = "cuda"
_CPU = torch.device("cpu")
_THERE = torch.device(NAME, 0)
_GET_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_MIXING = {"copy_", "to", "cpu", "cuda", "type_as", "__get__", "__set__", "set_", "as_tensor", "tensor"}
_MIXING |= {"_has_compatible_shallow_copy_type"}
"""Operations that move tensors, or take none of their numbers."""
_FROM_CPU_ONLY = {"numpy", "__array__", "__cuda_array_interface__"}


class Pretended(TorchFunctionMode):
    """While it is entered, the device "cuda" seems to be there."""

    def __init__(self) -> None:
        super().__init__()
        self._there: set[StorageWeakRef] = set()
        """The storages of its tensors. A weak reference keeps the identity of a storage, not its memory: what is made
        later at the same address is another storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device or getattr(func, "__name__", "") == "_parse_to":
            return func(*args, **kwargs)
        if func in (_GET_DEVICE, _IS_CPU, _IS_CUDA):
            is_there = self._is_there(args[0])
            device = _THERE if is_there else _GET_DEVICE(args[0])
            return device if func == _GET_DEVICE else is_there == (func == _IS_CUDA)
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = self._wanted(name, args, kwargs)
        args, kwargs = _without_device(args, kwargs)
        there = [t for t in tensors if self._is_there(t)]
        self._check(name, args, tensors, there, wanted, kwargs.get("generator"))
        if name in ("cpu", "cuda"):
            out = args[0].clone() if bool(there) != (name == "cuda") else args[0]
            return self._placed(out, name == "cuda")
        out = func(*args, **kwargs)
        goes_there = wanted if wanted is not None else self._goes_there(name, args, there)
        if name in ("to", "type_as") and out is args[0] and goes_there != self._is_there(out):
            out = out.clone()
        return self._placed(out, goes_there)

    def _goes_there(self, name: str, args: tuple[Any, ...], there: list[Tensor]) -> bool:
        if name in ("copy_", "__setitem__", "__set__"):
            return self._is_there(args[0])
        if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
            return self._is_there(args[1])
        return bool(there)

    def _placed(self, out: Any, there: bool) -> Any:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := _storage(leaf)) is not None:
                (self._there.add if there else self._there.discard)(storage)
        return out

    def _is_there(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage in self._there

    def _wanted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether the result is to lie there; None where nothing says so."""
        for one in (kwargs.get("device"), *(args[1:2] if name == "to" else ())):
            if isinstance(one, str | torch.device):
                return torch.device(one).type == NAME
        return None

    def _check(
        self,
        name: str,
        args: tuple[Any, ...],
        tensors: list[Tensor],
        there: list[Tensor],
        wanted: bool | None,
        generator: torch.Generator | None,
    ) -> None:
        if generator is not None and (there or wanted):
            raise RuntimeError(f"{name}: a generator of the CPU for tensors there")
        if name in _FROM_CPU_ONLY and there:
            raise TypeError(f"{name}: can't convert cuda:0 device type tensor to numpy")
        if name in _MIXING or not there:
            return
        if name == "__getitem__" and self._is_there(args[0]):
            return
        if name == "__setitem__" and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args[1])):
            return  # a copy into a part
        if name == "__setitem__" and self._is_there(args[0]):
            tensors = [leaf for leaf in tree_leaves(args[2]) if isinstance(leaf, Tensor)]
        here = [t for t in tensors if not self._is_there(t) and t.ndim and t.numel()]
        if here:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    if tensor.layout != torch.strided or _GET_DEVICE(tensor) != _CPU:
        return None
    return StorageWeakRef(tensor.untyped_storage())


def _without_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def here(one: Any) -> Any:
        of_device = isinstance(one, torch.device) or (isinstance(one, str) and one.split(":")[0] == NAME)
        return _CPU if of_device and torch.device(one).type == NAME else one

    return tuple(map(here, args)), {name: here(one) for name, one in kwargs.items()}
