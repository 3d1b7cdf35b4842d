"""What this process may take of the machine, memory and cores, and how it gives memory back."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from kflats.common.errors import KflatsError

_M_MMAP_THRESHOLD = -3  # of malloc.h in glibc
_RETURNED = 2**20
"""Bytes of a block from which on it returns to the system when it is freed."""


def cores() -> int:
    """The cores that this process may run on.

    >>> cores() > 0
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_units() -> tuple[str, ...]:
    """What this CPU has for integers and bfloat16, by the names that Linux gives; nothing where it gives none.

    >>> set(cpu_units()) <= {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16"}
    True
    """
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(encoding="ascii", errors="replace").split()) if info.is_file() else set()
    names = ("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
    return tuple(name for name in names if name in flags)


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The maker, family and model of the first processor, as Linux numbers them; elsewhere what Python knows of it.

    Libraries of linear algebra choose kernels by the maker, and the sizes of blocks by caches.

    >>> isinstance(cpu_model(), str)
    True
    """
    if not info.is_file():
        return platform.processor()
    text = info.read_text(encoding="ascii", errors="replace")
    first = [line.partition(":") for line in text.strip().split("\n\n")[0].splitlines()]
    said = {name.strip(): value.strip() for name, _, value in first}
    names = ["vendor_id", "cpu family", "model"]  # x86
    names += ["CPU implementer", "CPU part", "cpu", "mvendorid", "marchid"]  # ARM, POWER, RISC-V
    return " ".join(said[name] for name in names if name in said)


def started_workers() -> int | None:
    """How many workers torchrun started, by what it says in the environment; None without torchrun.

    Raises:
        KflatsError: it says no number.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    if not (os.environ["WORLD_SIZE"].isdecimal() and os.environ["RANK"].isdecimal()):
        raise KflatsError(
            f"WORLD_SIZE {os.environ['WORLD_SIZE']!r} and RANK {os.environ['RANK']!r} are no numbers",
            cause="they are set in the environment, but not by torchrun",
            hint="unset both, or start the command by torchrun",
        )
    return int(os.environ["WORLD_SIZE"])


def available_bytes() -> int:
    """The machine's memory, or the limit that was set for this process (``ulimit -d`` or ``-v``) or for its container
    (a control group of Linux) if that is less.

    What other processes take is not counted: a limit that depends on it would differ from run to run.

    >>> available_bytes() > 0
    True
    """
    found = [2**34]  # where the system does not say
    if hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        known = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")  # -1: not known
        found = [known[0] * known[1]] if min(known) > 0 else found
    if sys.platform != "win32":
        import resource

        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
        found += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(found + _group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))


def _group_limits(groups: Path, mounted: Path) -> list[int]:
    """The limits of memory of the control groups that ``groups`` names, and of those that hold them. In a container the
    names may be those outside of it: then the limits of what is ``mounted`` count."""
    limits = []
    with suppress(OSError, ValueError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, kinds, name = line.split(":", 2)  # version 2 has no kinds, and one tree for all
            if kinds and "memory" not in kinds.split(","):
                continue
            root, file = (mounted / "memory", "memory.limit_in_bytes") if kinds else (mounted, "memory.max")
            here = root / name.lstrip("/")
            for folder in (here, *here.parents):
                if folder.is_relative_to(root) and (folder / file).is_file():
                    said = (folder / file).read_text(encoding="ascii").strip()
                    limits += [int(said)] if said.isdecimal() else []  # "max": none
    return [limit for limit in limits if limit > 0]


def unused_bytes() -> int:
    """This worker's share of ``available_bytes`` less the private memory of this process (Linux; elsewhere nothing is
    subtracted). Workers of one machine (torchrun's ``LOCAL_WORLD_SIZE``) have equal shares."""
    private = 0
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        private = 1024 * int(status.split("RssAnon:")[1].split()[0])
    workers = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = available_bytes() // max(1, int(workers) if workers.isdecimal() else 1)
    return max(0, share - private)


def return_memory_when_freed() -> None:
    """From now on, let blocks of a megabyte or more return to the system when they are freed (glibc alone needs this).

    It keeps freed blocks of up to 32 MB for later ones, which then leave gaps between them: after a pass over Gram
    matrices the process has several times the memory that it uses. The price: the pages of each new block are zeroed.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _RETURNED)


def return_memory_now() -> None:
    """Return to the system now what is freed (glibc alone needs this; a millisecond).

    Blocks that stay in use lie between those that were freed, and without this keep their memory with the process:
    making a layer ready to run takes several times the memory of what it keeps.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: Python's own, or torch's.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape"))
    (True, False)
    """
    said = ("allocate memory", "out of memory", "not enough memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)
