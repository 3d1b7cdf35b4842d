"""Every architecture: find, swap, run, save, load (also into and out of task heads), fine-tune, save again.

Configs are tiny and weights random: what is tested is the life of a factored vocabulary inside transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import (
    ARCHITECTURES,
    VOCABULARY,
    Architecture,
    assert_same,
    hidden,
    is_t5,
    load_exactly,
    logits,
    stored,
    tokens,
    weights_bytes,
)
from factoring import MAKERS, factor_named
from table import crossed
from transformers import AutoModel

from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.model.weights import factored_layers, find_weight, find_weights

every_architecture = pytest.mark.parametrize(
    ("case", "make_matrix"),
    crossed(ARCHITECTURES.values(), MAKERS),
    ids=lambda value: getattr(value, "config", None) or value.__name__,
    indirect=["make_matrix"],
)
tied_and_untied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def compress(model: Any, case: Architecture, make_matrix: Any, tied: bool) -> Any:
    """Swap the vocabulary (both tables if untied); the dense model that must compute the same."""
    return factor_named(model, [case.table] if tied else [case.table, case.head], make_matrix)


def assert_tied(model: Any, case: Architecture, tied: bool) -> None:
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(source, FactoredEmbedding)
    assert source.owns_matrix
    if tied:
        assert isinstance(head, FactoredHead)
        assert head.matrix is source.matrix
    else:
        assert isinstance(head, FactoredLinear)
        assert head.matrix is not source.matrix
    for name in case.others:
        assert model.get_submodule(name).matrix is source.matrix
    bias = getattr(head, "bias", None)
    if bias is not None and any(key.endswith("decoder.bias") for key in model.all_tied_weights_keys):
        assert sum(p is bias for _, p in model.named_parameters(remove_duplicate=False)) == 2


def train_one_step(model: Any) -> None:
    """One step of SGD on the model's own loss; every factor must move and stay finite."""
    model.train()
    factors = {f"{name}.{n}": p for name, layer in factored_layers(model) for n, p in layer.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in factors.items()}
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.eval()
    for name, parameter in factors.items():
        assert torch.isfinite(parameter).all()
        assert not torch.equal(parameter, before[name]), f"{name} did not move"


@every_architecture
@tied_and_untied
def test_a_whole_life(case: Architecture, tied: bool, make_matrix: Any, tmp_path: Path) -> None:
    model = case.make(tied)
    model.save_pretrained(tmp_path / "dense")
    weight = find_weight(model, case.table)
    assert {place.name for place in weight.places} >= {weight.name, *case.others}
    assert ("head" in {place.role for place in weight.places}) == tied

    dense = compress(model, case, make_matrix, tied)
    assert_tied(model, case, tied)
    assert find_weights(model) == tuple(w for w in find_weights(model) if w.shape[0] != VOCABULARY)
    torch.testing.assert_close(logits(model), logits(dense))

    model.save_pretrained(tmp_path / "small")
    shapes = stored(tmp_path / "small")
    assert weights_bytes(tmp_path / "small") < weights_bytes(tmp_path / "dense")
    assert all(shape[:1] != (VOCABULARY,) or len(shape) == 1 or shape[1] < 16 for shape in shapes.values()), shapes
    assert sum(key.endswith(".basis") for key in shapes) == (1 if tied else 2)

    loaded = load_exactly(case.language_model, tmp_path / "small")
    assert_tied(loaded, case, tied)
    assert_same(loaded, model)
    assert not loaded.is_quantized
    assert getattr(loaded, "hf_quantizer", None) is None

    train_one_step(loaded)
    loaded.tie_weights()
    assert_tied(loaded, case, tied)
    loaded.save_pretrained(tmp_path / "tuned")
    tables = {key: shape for key, shape in shapes.items() if "LayerNorm" not in key}
    assert tables.items() <= stored(tmp_path / "tuned").items()
    assert len(stored(tmp_path / "tuned")) == len(shapes)
    again = load_exactly(case.language_model, tmp_path / "tuned")
    assert_same(again, loaded)
    assert (logits(again) - logits(model)).abs().max() > 1e-3


@every_architecture
def test_out_of_a_head_and_into_one(case: Architecture, make_matrix: Any, tmp_path: Path) -> None:
    model = case.make(tied=True)
    dense = compress(model, case, make_matrix, tied=True)
    model.save_pretrained(tmp_path / "head")

    base = AutoModel.from_pretrained(tmp_path / "head").eval()
    torch.testing.assert_close(hidden(base), hidden(dense.base_model if not is_t5(dense) else dense))
    base.save_pretrained(tmp_path / "base")
    assert_same(load_exactly(AutoModel, tmp_path / "base"), base, hidden)

    back = case.language_model.from_pretrained(tmp_path / "base").eval()
    assert_tied(back, case, tied=True)
    torch.testing.assert_close(back.get_input_embeddings().matrix.dense(), model.get_input_embeddings().matrix.dense())

    task = getattr(transformers, case.task).from_pretrained(tmp_path / "base").eval()
    table = task.get_input_embeddings()
    assert isinstance(table, FactoredEmbedding)
    torch.testing.assert_close(table.matrix.dense(), model.get_input_embeddings().matrix.dense())
    task.save_pretrained(tmp_path / "task")
    load_exactly(getattr(transformers, case.task), tmp_path / "task")
    from_task = AutoModel.from_pretrained(tmp_path / "task").eval()
    if not is_t5(base):  # an encoder alone has no decoder to give back
        torch.testing.assert_close(hidden(from_task), hidden(base))
