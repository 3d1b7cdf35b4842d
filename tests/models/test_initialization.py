"""What ``_init_weights`` of a model class does while a folder is loaded must not reach factors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factoring import factor_named
from matrices import coded, flats
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM, DistilBertModel

from kflats.io import save_model
from kflats.matrices.layers import FactoredHead
from kflats.model.weights import find_weights

_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


class Careless(BertForMaskedLM):
    """Initializes as classes outside transformers do: in place, whatever was loaded."""

    def _init_weights(self, module: nn.Module) -> None:
        for part in (module, getattr(module, "decoder", None)):
            if isinstance(table := getattr(part, "weight", None), Tensor):
                table.data.normal_()


CLASSES: dict[str, tuple[Any, Any]] = {
    "modernbert": (transformers.ModernBertForMaskedLM, transformers.ModernBertConfig),
    "electra": (transformers.ElectraForMaskedLM, transformers.ElectraConfig),
    "xlnet": (transformers.XLNetLMHeadModel, transformers.XLNetConfig),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
    "careless": (Careless, BertConfig),
}
_SETTINGS = {
    "xlnet": {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1},
}


def tied_model(name: str, make: Any) -> Any:
    """With its table and its first two linear layers factored."""
    kind, config = CLASSES[name]
    torch.manual_seed(0)
    marks = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
    settings = {"vocab_size": 199, "tie_word_embeddings": True, "pad_token_id": 0, **marks}
    model = kind(config(**settings, **_SETTINGS.get(name, _SMALL))).eval()
    weights = find_weights(model)
    table = next(w for w in weights if w.shape[0] == 199)
    assert "head" in {place.role for place in table.places}
    layers = [w for w in weights if w.places[0].role == "linear" and min(w.shape) >= 16][:2]
    factor_named(model, [w.name for w in (table, *layers)], make)
    return model


def run(model: Any) -> Tensor:
    ids = torch.tensor([[5, 9, 50, 7]])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out: Tensor = model(input_ids=ids, **more).logits
    return out


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("make", [flats, coded])
def test_a_tied_model_returns(name: str, make: Any, tmp_path: Path) -> None:
    if make is coded:
        pytest.importorskip("constriction")
    model = tied_model(name, make)
    expected = run(model)
    model.init_weights()
    assert torch.equal(run(model), expected)
    save_model(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded), expected)
    head = loaded.get_output_embeddings()
    assert isinstance(head, FactoredHead)
    assert head.matrix is loaded.get_input_embeddings().matrix


@pytest.mark.slow
def test_so_it_does_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = tied_model("modernbert", flats)
    model.save_pretrained(tmp_path)
    program = """if True:
        import sys, torch, kflats
        from transformers import AutoModelForMaskedLM
        model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
        print(model(input_ids=torch.tensor([[5, 9, 50, 7]])).logits.double().sum().item())
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(run(model).double().sum().item(), abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_the_folder_lacks_starts_at_zero(tmp_path: Path) -> None:
    """A base model has no head; memory that nobody has written to is not a bias."""
    base = DistilBertModel(DistilBertConfig(vocab_size=199, dim=32, n_layers=1, n_heads=2, hidden_dim=48))
    factor_named(base, ["embeddings.word_embeddings"], flats)
    base.save_pretrained(tmp_path)
    rubbish = [torch.full((199,), 7.7) for _ in range(500)]
    del rubbish
    head = DistilBertForMaskedLM.from_pretrained(tmp_path).vocab_projector
    assert isinstance(head, FactoredHead)
    assert head.bias is not None
    assert not head.bias.any()
