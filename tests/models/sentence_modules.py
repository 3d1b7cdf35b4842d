"""The modules of sentence-transformers, which moved after version 5.2."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def sentence_modules() -> Any:
    """The module that holds Transformer, Pooling, Normalize and Dense; the test is skipped without the package."""
    pytest.importorskip("sentence_transformers")
    try:
        return importlib.import_module("sentence_transformers.sentence_transformer.modules")
    except ModuleNotFoundError:
        return importlib.import_module("sentence_transformers.models")
