"""Installed software: the version of kflats, and packages that only some work needs."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import ModuleType

from kflats.common.errors import KflatsError


def version() -> str:
    """The installed version, "0" for a checkout that was never installed."""
    try:
        return installed_version("kflats")
    except PackageNotFoundError:
        return "0"


__version__ = version()


def needed(package: str, install: str, work: str) -> ModuleType:
    """Import a package that only ``work`` needs, and that ``pip install`` of ``install`` brings.

    >>> needed("json", "kflats[hf]", "a report").__name__
    'json'

    Raises:
        KflatsError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise KflatsError(
            f"{work} needs {name}", cause=f"{name} is not installed", hint=f"pip install '{install}'"
        ) from error
