"""The hooks that let transformers and sentence-transformers load kflats folders, without importing them or torch."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_HOST = "transformers.quantizers.auto"
_STATIC = "sentence_transformers.kflats"  # of STATIC_MODULE in kflats.io.sources


def register_plugin() -> None:
    """Let transformers load kflats folders: at once if it is imported already, else when it is; never twice.

    Waiting keeps ``import kflats`` quick: transformers takes longer to import than everything else here. The class that
    sentence-transformers loads a compressed static model with is found by its name in ``modules.json``.
    """
    if not any(isinstance(finder, _OfStaticModels) for finder in sys.meta_path):
        sys.meta_path.append(_OfStaticModels())
    if _HOST in sys.modules:
        from kflats.io import transformers_plugin

        transformers_plugin.register()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the plug-in as soon as transformers' table of formats is imported, and removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                # The plug-in registers itself when it is imported. It must not be called here: if the plug-in imported
                # transformers, it is only half imported at this moment.
                importlib.import_module("kflats.io.transformers_plugin")

            setattr(spec.loader, "exec_module", run_and_register)  # noqa: B010
        return spec


class _OfStaticModels(importlib.abc.MetaPathFinder):
    """Finds the module for compressed static models, which is a file of kflats."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _STATIC:
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("static_module.py"))
