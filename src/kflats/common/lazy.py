"""Packages that import their names when they are first used, so that importing the package takes milliseconds."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def from_stub(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose stub, ``__init__.pyi``, lists its imports.

    Type checkers read the stub alone, and programs import each name from where the stub says (PEP 562).

    Args:
        package, file: ``__name__`` and ``__file__`` of the package.

    >>> import kflats.io
    >>> get, names, _ = from_stub("kflats.io", kflats.io.__file__)
    >>> "weights_folder" in names(), get("weights_folder").__module__
    (True, 'kflats.io.sources')
    """
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    where = {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(vars(sys.modules[package]).keys() | where), list(where)
