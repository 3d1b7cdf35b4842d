"""Only kflats speaks on its command line: what other libraries print while they are imported and work is hidden."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kflats.common.errors import KflatsWarning


@contextmanager
def only_own_words(show: Callable[[str], None]) -> Iterator[None]:
    """Hide logged lines below errors and Python's warnings meanwhile; ``show`` each warning of kflats, once."""
    said: set[str] = set()

    def shown(message: Warning | str, *_: object, **__: object) -> None:
        if isinstance(message, KflatsWarning) and message.command not in said:
            said.add(message.command)
            show(message.command)

    # Read by torch and transformers when they are imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", KflatsWarning)
            warnings.showwarning = shown
            yield
    finally:
        logging.disable(before)


def hush(quiet: bool) -> bool:
    """Hide the warnings of kflats too, if ``quiet``; and the progress of downloads."""
    if quiet:
        warnings.simplefilter("ignore", KflatsWarning)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return quiet
