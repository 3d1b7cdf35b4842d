"""One run before anything is planned: reads of weights that no code analysis sees, and models that change their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kflats import SVD, Auto, Recipe, compress_, compress_folder
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.evaluation.trial import tried
from kflats.matrices.layers import FactoredEmbedding, FactoredLinear
from kflats.model.weights import find_weights
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.selection import select

IDS = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))


class Config(PretrainedConfig):
    model_type = "reads"


class Plain(PreTrainedModel):
    """Tokens, one layer, two layers in a list, and what a subclass does after them."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.words, self.fc = nn.Embedding(300, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, **_: object) -> Tensor:
        x = self.fc(self.words(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.tail(x)

    def tail(self, x: Tensor) -> Tensor:
        return x


class InAVariable(Plain):
    def tail(self, x: Tensor) -> Tensor:
        fc = self.fc
        return F.linear(x, fc.weight)


class InALambda(Plain):
    def tail(self, x: Tensor) -> Tensor:
        return (lambda: x / self.fc.weight.shape[1])()


class InAProperty(Plain):
    @property
    def width(self) -> int:
        return self.fc.weight.shape[1]

    def tail(self, x: Tensor) -> Tensor:
        return x / self.width


class AsAnArgument(Plain):
    def tail(self, x: Tensor) -> Tensor:
        return _scaled(x, self.fc)


class ByName(Plain):
    def tail(self, x: Tensor) -> Tensor:
        return x / self.get_parameter("fc.weight").size(1)


class FromAList(Plain):
    def tail(self, x: Tensor) -> Tensor:
        return x / self.layers[1].weight.shape[1]


class Tokens(Plain):
    def tail(self, x: Tensor) -> Tensor:
        return x / self.words.weight.shape[1]


class TypeInAVariable(Plain):
    def tail(self, x: Tensor) -> Tensor:
        fc = self.fc
        return x.to(fc.weight.dtype)


class Halving(Plain):
    def tail(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.div_(2)
        return x


class Replacing(Plain):
    def tail(self, x: Tensor) -> Tensor:
        self.fc.weight = nn.Parameter(self.fc.weight.detach() / 2)
        return x


class ReplacingNumbers(Plain):
    def tail(self, x: Tensor) -> Tensor:
        self.fc.weight.data = self.fc.weight.data / 2
        return x


class Counting(Plain):
    """Each run changes a buffer, an attribute and the state of torch's draws, and would change its input."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("runs", torch.zeros(()))
        self.last = ""

    def forward(self, input_ids: Tensor, **more: object) -> Tensor:
        self.runs += 1
        self.last = "run"
        torch.rand(1)
        found = super().forward(input_ids)
        input_ids.zero_()
        return found


def _scaled(x: Tensor, layer: nn.Linear) -> Tensor:
    return x / layer.weight.shape[1]


def model(kind: type[Plain]) -> Any:
    torch.manual_seed(0)
    return kind(Config()).eval()


READS = {
    InAVariable: "fc",
    InALambda: "fc",
    InAProperty: "fc",
    AsAnArgument: "fc",
    ByName: "fc",
    FromAList: "layers.1",
    Tokens: "words",
}


@pytest.mark.parametrize(("kind", "read"), READS.items(), ids=[kind.__name__ for kind in READS])
def test_what_a_run_reads_stays_dense_and_the_rest_is_factored(kind: type[Plain], read: str) -> None:
    changed = model(kind)
    assert tried(changed, {"input_ids": IDS}).read == {f"{read}.weight"}
    with pytest.warns(KflatsWarning, match=read):
        compress_(changed, {"all": Recipe(SVD())}, keep="60%", quiet=True)
    dense = {name for name, part in changed.named_modules() if type(part) in (nn.Linear, nn.Embedding)}
    assert dense == {read}
    with pytest.raises(KflatsError, match="reads its numbers or its shape itself"):
        compress_(model(kind), {read: Recipe(SVD())}, keep="60%", quiet=True)


def test_nothing_is_read_where_layers_are_called() -> None:
    trial = tried(model(Plain), {"input_ids": IDS})
    assert (trial.read, trial.written, trial.failed) == (frozenset(), (), None)


def test_a_type_that_a_run_reads_is_known_to_the_plan() -> None:
    changed = model(TypeInAVariable)
    assert tried(changed, {"input_ids": IDS}).typed == {"fc.weight"}
    chosen = select(changed, {"linear": Auto()}, CalibrationData())
    assert {one.weight.name for one in chosen if one.weight.type_is_read} == {"fc"}


@pytest.mark.parametrize("kind", [Halving, Replacing, ReplacingNumbers])
def test_a_model_that_changes_its_weights_is_refused_and_unchanged(kind: type[Plain]) -> None:
    changed = model(kind)
    before = changed.fc.weight.clone()
    with pytest.raises(KflatsError, match=r"changes its own weights when it runs: fc\.weight"):
        compress_(changed, {"all": Recipe(SVD())}, keep="60%", quiet=True)
    assert torch.equal(changed.fc.weight, before)


def test_the_run_leaves_the_model_the_batch_and_the_draws_as_they_were() -> None:
    counting, ids, state = model(Counting), IDS.clone(), torch.get_rng_state()
    batch = {"input_ids": ids}
    tried(counting, batch)
    assert (float(counting.runs), counting.last) == (0.0, "")
    assert torch.equal(ids, IDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in counting.modules())


class Interrupted(Counting):
    def tail(self, x: Tensor) -> Tensor:
        self.fc.weight.data = self.fc.weight.data / 2
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_the_model_as_it_was() -> None:
    stopped = model(Interrupted).train()
    runs, before = stopped.runs, stopped.fc.weight.clone()
    with pytest.raises(KeyboardInterrupt):
        tried(stopped, {"input_ids": IDS})
    assert stopped.runs is runs
    assert (float(runs), stopped.last, stopped.training) == (0.0, "", True)
    assert torch.equal(stopped.fc.weight, before)
    assert not any(module._forward_hooks for module in stopped.modules())


@pytest.mark.parametrize("how", [{"size": "60%"}, {"quality": 0.5}, {"keep": "60%", "trim": 100}])
def test_rwkv_in_a_folder(tmp_path: Path, tiny_tokenizer: Any, how: dict[str, Any]) -> None:
    """Its weights are mapped read-only: a write would end the process."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 3}
    RwkvForCausalLM(RwkvConfig(rescale_every=1, **sizes)).save_pretrained(tmp_path / "writes")
    tiny_tokenizer.save_pretrained(tmp_path / "writes")
    with pytest.raises(KflatsError, match="changes its own weights"):
        compress_folder(tmp_path / "writes", tmp_path / "small", quiet=True, **how)
    assert not (tmp_path / "small").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch itself calls old
@pytest.mark.parametrize("wrapped", [nn.DataParallel, lambda inner: nn.Sequential(inner), torch.compile])
def test_a_model_inside_of_another_is_tried(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    outer = wrapped(model(InAVariable))
    with pytest.warns(KflatsWarning, match=r"\.fc, because"):
        compress_(outer, {"all": Recipe(SVD())}, keep="60%", quiet=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_tried_in_their_type(dtype: torch.dtype) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.a, self.b
            return first(x) @ second.weight

    found = CalibrationData(calibration=({"x": torch.ones(2, 64, dtype=dtype)},)).trial(Layers().to(dtype))
    assert (found.read, found.failed) == ({"b.weight"}, None)


def test_a_hook_that_reads_its_layer_is_seen() -> None:
    hooked = model(Plain)
    hooked.fc.register_forward_hook(lambda layer, _, output: output / layer.weight.norm())
    assert tried(hooked, {"input_ids": IDS}).read == {"fc.weight"}


def test_a_layer_with_a_forward_of_its_own_stays_dense() -> None:
    own = model(Plain)
    forward = own.fc.forward
    own.fc.forward = lambda x: 2 * forward(x)
    assert "fc" not in {weight.name for weight in find_weights(own)}


def test_modules_without_a_config_are_not_tried() -> None:
    """What they read is not known; neither are their names those of transformers."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(50, 64), nn.Linear(64, 64)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.fc(self.words(input_ids))

    compress_(reads := Reads(), {"fc": Recipe(SVD())}, keep="60%", quiet=True)
    assert isinstance(reads.fc, FactoredLinear)


@pytest.mark.filterwarnings("ignore")  # of torch, and of transformers' mask
def test_a_run_of_flex_attention_is_tried() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, attn_implementation="flex_attention", **sizes)).eval()
    assert CalibrationData().trial(llama).failed is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch itself calls old
def test_what_is_compiled_runs_compiled_after_the_trial() -> None:
    """Compiled inside of a mode, dynamo keeps that it cannot compile it."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    plain = model(Plain)
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    assert tried(compiled, {"input_ids": IDS}).failed is None
    assert not graphs
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS), plain(input_ids=IDS))
    assert len(graphs) == 1


def test_sparse_parameters_and_norms_of_embeddings_are_no_reason_to_refuse() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(50, 64, max_norm=1.0), nn.Linear(64, 64)
            self.sparse = nn.Parameter(torch.eye(64).to_sparse(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.words(x) + torch.sparse.mm(self.sparse, torch.ones(64, 1)).T)

    mixed = Mixed()
    before = mixed.words.weight.clone()
    compress_(mixed, {"fc": Recipe(SVD())}, keep="60%", calibration=[{"x": IDS % 50}], quiet=True)
    assert isinstance(mixed.fc, FactoredLinear)
    assert torch.equal(mixed.words.weight, before)


def test_layers_beside_a_traced_module_are_found() -> None:
    beside = nn.ModuleDict({"fc": nn.Linear(64, 64)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        beside["traced"] = torch.jit.trace(nn.Linear(64, 4), torch.ones(1, 64))
    assert [weight.name for weight in find_weights(beside)] == ["fc"]


def test_type_and_device_of_a_weight_are_no_read_of_its_numbers() -> None:
    class Casting(Plain):
        def tail(self, x: Tensor) -> Tensor:
            fc = self.fc
            return x.to(fc.weight)

    found = tried(model(Casting), {"input_ids": IDS})
    assert (found.read, found.typed) == (frozenset(), {"fc.weight"})


@pytest.mark.filterwarnings("ignore:not compressed")  # with transformers 5.17 a tie says the same
def test_a_module_given_to_a_head_stays_dense() -> None:
    """DeBERTa's new head multiplies by the table of tokens, which it is given."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    deberta = DebertaV2ForMaskedLM(DebertaV2Config(vocab_size=300, legacy=False, **sizes)).eval()
    compress_(deberta, {"all": Recipe(SVD())}, keep="60%", quiet=True)
    assert type(deberta.get_input_embeddings()) is nn.Embedding
    assert bool(deberta(input_ids=IDS).logits.isfinite().all())


def test_every_part_of_a_model_keeps_its_type() -> None:
    """The encoder borrows the table of tokens: its type is that of its first own parameter."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=300, decoder_start_token_id=0, **sizes)).eval()
    compress_(t5, {"all": Recipe(SVD())}, keep="40%", quiet=True)
    assert any(isinstance(part, FactoredEmbedding | FactoredLinear) for part in t5.modules())
    assert (t5.dtype, t5.encoder.dtype, t5.decoder.dtype) == (torch.float32,) * 3


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.fc.weight


def test_names_of_own_modules_may_begin_like_those_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reading, "__module__", "abcnet")
    assert find_weights(Reading()) == ()
