"""All layers of a model factored at once, each in another form: saved, loaded into other classes, trained, saved again.

Matrices of every kind are made by hand, with inputs or outputs as rows; every third layer has its bias
shifted, or gets one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, Architecture, assert_same, hidden, is_t5, load_exactly, logits, stored, tokens
from factoring import factor
from matrices import low_rank
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageClassification

from kflats.common.errors import KflatsError
from kflats.io import annotate_
from kflats.matrices.layers import FactoredConv2d
from kflats.model.swap import restore_, swap_
from kflats.model.weights import factored_layers, find_weight, find_weights

IMAGES: dict[str, tuple[Any, str, str]] = {
    "resnet": (
        transformers.ResNetConfig(
            num_channels=3, embedding_size=16, hidden_sizes=[16, 24], depths=[1, 2], layer_type="basic"
        ),
        "",
        "",
    ),
    "convnext": (
        transformers.ConvNextConfig(num_channels=3, hidden_sizes=[16, 24], depths=[1, 1], num_stages=2, patch_size=2),
        "dwconv",
        "a grouped convolution",
    ),
    "vit": (
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=4,
        ),
        "",
        "",
    ),
}
every_architecture = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (place % 2))
        for place, (name, case) in enumerate(ARCHITECTURES.items())
    ],
)


def matrices(model: nn.Module) -> list[Tensor]:
    return [layer.matrix.dense() for _, layer in sorted(factored_layers(model)) if layer.owns_matrix]


def train_one_step(model: Any, **inputs: Tensor) -> None:
    """One step of SGD on the model's own loss: every factor and every gained bias has a gradient."""
    model.train()
    model(**inputs).loss.backward()
    for name, layer in factored_layers(model):
        for key, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"{name}.{key}"
            assert torch.isfinite(parameter.grad).all()
            assert name.endswith(("key", "k", "k_lin", "k_proj")) or bool(parameter.grad.any()), f"{name}.{key}"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()


@every_architecture
def test_every_layer_at_once(case: Architecture, tmp_path: Path) -> None:
    model = case.make(tied=True)
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d)}
    layers |= {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    assert {place.name for weight in find_weights(model) for place in weight.places} >= layers  # none is refused
    lacking = [weight.name for weight in find_weights(model) if not weight.bias]
    dense = factor(model)
    assert find_weights(model) == ()
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-3, atol=1e-3)

    model.save_pretrained(tmp_path / "small")
    loaded = load_exactly(case.language_model, tmp_path / "small")
    assert_same(loaded, model)
    gained = {name for name, layer in factored_layers(loaded) if layer.gained_bias}
    assert gained <= set(lacking)

    base = AutoModel.from_pretrained(tmp_path / "small").eval()
    torch.testing.assert_close(hidden(base), hidden(dense if is_t5(dense) else dense.base_model), rtol=1e-3, atol=1e-3)
    base.save_pretrained(tmp_path / "base")
    task = getattr(transformers, case.task).from_pretrained(tmp_path / "base").eval()
    task.save_pretrained(tmp_path / "task")
    again = load_exactly(getattr(transformers, case.task), tmp_path / "task")
    assert len(matrices(again)) == len(matrices(task)) > 2
    if not is_t5(base):  # an encoder alone has no decoder to give back
        torch.testing.assert_close(hidden(AutoModel.from_pretrained(tmp_path / "task").eval()), hidden(base))

    train_one_step(loaded, input_ids=tokens(), labels=tokens())
    loaded.save_pretrained(tmp_path / "tuned")
    assert stored(tmp_path / "tuned") == stored(tmp_path / "small")
    assert_same(load_exactly(case.language_model, tmp_path / "tuned"), loaded)

    with torch.no_grad():  # what a layer gained goes when it is dense again, and nothing else
        for name in gained:
            loaded.get_submodule(name).bias.zero_()
    expected = logits(loaded)
    restore_(loaded)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-3, atol=1e-3)
    annotate_(loaded)
    loaded.save_pretrained(tmp_path / "restored")
    case.make(tied=True).save_pretrained(tmp_path / "dense")
    assert stored(tmp_path / "restored") == stored(tmp_path / "dense")


@pytest.mark.parametrize(("config", "refused", "reason"), IMAGES.values(), ids=IMAGES)
def test_networks_that_see(config: Any, refused: str, reason: str, tmp_path: Path) -> None:
    model = AutoModelForImageClassification.from_config(config)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        model(x)  # in training mode: the statistics of a batch norm move from where they start
    model.eval()
    for name, module in model.named_modules():
        if refused and name.endswith(refused):
            assert isinstance(module, nn.Conv2d)
            with pytest.raises(KflatsError, match=reason):
                find_weight(model, name)
    dense = factor(model)
    assert any(isinstance(layer, FactoredConv2d) for _, layer in factored_layers(model))
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert all(refused and name.endswith(refused) for name in left)

    def see(net: Any) -> Tensor:
        with torch.no_grad():
            return net(pixel_values=x)[0]

    torch.testing.assert_close(see(model), see(dense), rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path / "small")
    loaded = load_exactly(AutoModelForImageClassification, tmp_path / "small")
    assert_same(loaded, model, see)
    base = AutoModel.from_pretrained(tmp_path / "small").eval()
    torch.testing.assert_close(see(base), see(dense.base_model), rtol=1e-3, atol=1e-3)
    base.save_pretrained(tmp_path / "base")
    assert_same(load_exactly(AutoModel, tmp_path / "base"), base, see)
    task = AutoModelForImageClassification.from_pretrained(tmp_path / "base").eval()
    assert len(matrices(task)) == len(matrices(base))

    train_one_step(loaded, pixel_values=x, labels=torch.tensor([0, 1, 0, 1]))
    loaded.save_pretrained(tmp_path / "tuned")
    assert_same(load_exactly(AutoModelForImageClassification, tmp_path / "tuned"), loaded, see)


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_a_checkpoint_without_a_gained_bias_is_an_error(tmp_path: Path) -> None:
    case, name = ARCHITECTURES["llama"], "model.layers.0.mlp.up_proj"
    model = case.make(tied=True)
    swap_(model, find_weight(model, name), low_rank(32, 40), bias_shift=torch.ones(40))
    annotate_(model)
    model.save_pretrained(tmp_path)
    note = model.config.quantization_config["modules"][name]["places"][0]
    assert note["gained_bias"] is True
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{name}.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    for kind in (AutoModel, case.language_model):
        with pytest.raises(KflatsError, match=r"the checkpoint has no .*up_proj\.bias of shape \(40,\)"):
            kind.from_pretrained(tmp_path)
