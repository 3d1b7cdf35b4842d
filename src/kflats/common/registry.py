"""The values of one axis of a recipe by name: the package's own, and those that other packages announce.

Another package announces a method, an importance or a codec by an entry point in its ``pyproject.toml``::

    [project.entry-points."kflats.methods"]
    my-method = "my_package:MyMethod"

The entry point's name is what the command line calls it, and the class's own name is what plan files call it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, TypeVar

from kflats.common.errors import KflatsError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The kinds of one axis.

    Args:
        axis: "method", "importance" or "codec", for messages.
        kinds: the package's own classes, which plan files name.
        names: what the command line calls them: classes, or functions that make a value.
    """

    axis: str
    kinds: tuple[type[T], ...]
    names: Mapping[str, Callable[..., T]]

    def all_names(self) -> tuple[str, ...]:
        """Every name that the command line knows; nothing of another package is imported."""
        return (*self.names, *(entry.name for entry in self._announced()))

    def all_kinds(self) -> Iterator[type[T]]:
        """Every class, the package's own first.

        Raises:
            KflatsError: a package that announces one cannot be imported.
        """
        yield from self.kinds
        for entry in self._announced():
            yield self._load(entry)

    def make(self, name: str) -> Callable[..., T]:
        """The class or function that makes the value that the command line calls ``name``.

        Raises:
            KflatsError: no value has this name.
        """
        wanted = name.strip().lower()
        if wanted in self.names:
            return self.names[wanted]
        for entry in self._announced():
            if entry.name.lower() == wanted:
                return self._load(entry)
        raise unknown(self.axis, name, self.all_names())

    def value(self, name: str, **options: object) -> T:
        """The value that the command line calls ``name``, with these options.

        Raises:
            KflatsError: no value has this name, or this one does not have an option.
        """
        known = self.options(name)
        if unfit := sorted(options.keys() - set(known)):
            raise KflatsError(
                f"the {self.axis} {name!r} has no {', '.join(unfit)}", hint=f"it has {', '.join(known) or 'no options'}"
            )
        return self.make(name)(**options)

    def options(self, name: str) -> tuple[str, ...]:
        """The arguments of ``make(name)``."""
        return tuple(inspect.signature(self.make(name)).parameters)

    def _announced(self) -> tuple[EntryPoint, ...]:
        return tuple(entry for entry in announced(self.axis) if entry.name.lower() not in self.names)

    def _load(self, entry: EntryPoint) -> type[T]:
        package = entry.dist.name if entry.dist else entry.value
        try:
            kind = entry.load()
            if not isinstance(kind, type) or any(own.__name__ == kind.__name__ for own in self.kinds):
                raise TypeError(f"{entry.value} is not a class with a name of its own")
        except Exception as error:  # whatever the other package raises
            raise KflatsError(
                f"the {self.axis} {entry.name!r} of the package {package!r} cannot be loaded",
                cause=f"{type(error).__name__}: {error}",
                hint=f"repair or remove the package {package!r}",
            ) from error
        return kind


def announced(axis: str) -> EntryPoints:
    """The entry points by which other packages announce methods, importances or codecs; nothing is imported."""
    return _entry_points(f"kflats.{axis}s", tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read again when something was installed: it opens a file of every installed package, and each weight asks."""
    return entry_points(group=group)


def _changed(folder: str) -> int:
    """When something was put into a folder of ``sys.path`` or taken out of it; 0 for what is no folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def unknown(axis: str, name: str, known: Iterable[str]) -> KflatsError:
    """The error for a name that nothing of an axis has."""
    return KflatsError(f"no {axis} is called {name!r}", hint="one of " + ", ".join(known))
