"""The version of kflats."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The installed version, "0" for a checkout that was never installed."""
    try:
        return installed_version("kflats")
    except PackageNotFoundError:
        return "0"
