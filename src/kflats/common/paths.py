"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with the home folder in place of a leading ``~``. The names of files such as ``~rows.npy`` stay as they
    are, as in a shell.

    >>> expanded("~nobody-of-this-name/rows.npy").parts
    ('~nobody-of-this-name', 'rows.npy')
    """
    return Path(os.path.expanduser(path))
