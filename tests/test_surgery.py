"""Surgery on plain torch modules: what is found, what a swap keeps, what it refuses, and the way back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import FlatsMatrix, LowRankMatrix, RankGroup
from kflats.model import swap
from kflats.model import weights as weights_of
from kflats.model.swap import Swaps, restore_, swap_
from kflats.model.weights import dense_weight, find_weight, find_weights, slots


def matrix(n: int, d: int, rank: int = 2) -> LowRankMatrix:
    return LowRankMatrix(torch.randn(n, rank), torch.randn(rank, d))


def flats(n: int, d: int) -> FlatsMatrix:
    labels = (torch.arange(n) % 2).to(torch.uint8)
    return FlatsMatrix(
        torch.randn(n, 2), torch.randn(4, d), labels, (RankGroup(-(-n // 2), 2, 0), RankGroup(n // 2, 2, 1)), (2, 2)
    )


class Tied(nn.Module):
    """A language model in miniature: an embedding, a layer, and a head that shares the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 9)  # registered first, yet the embedding must own
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.body = nn.ModuleDict({"layer": nn.Linear(4, 4)})
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.body["layer"](self.words(ids)))


def test_what_is_found() -> None:
    class Twice(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Shifted(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input + 1)

    marked = nn.Embedding(9, 4)
    marked.mark = nn.Parameter(torch.zeros(4))  # as T5Gemma2's token for the end of an image
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(9, 4),
            "marked": marked,
            "tamed": nn.Embedding(9, 4, max_norm=1.0),
            "shifted": Shifted(9, 4),
            "linear": nn.Linear(4, 5),
            "twice": Twice(4, 5),
            "fused": nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False),
            "attention": nn.MultiheadAttention(4, 2),
            "first": shared,
            "second": shared,
            "norm": nn.LayerNorm(4),
        }
    )
    assert [(w.name, w.shape, w.nbytes) for w in find_weights(model)] == [
        ("words", (9, 4), 144),
        ("linear", (4, 5), 80),
        ("first", (3, 3), 36),
    ]
    assert [place.name for place in find_weight(model, "second").places] == ["first", "second"]
    for name, reason in [
        ("tamed", "max_norm"),
        ("shifted", "Shifted is a subclass"),
        ("marked", "parameters beside its table: mark"),
        ("twice", "Twice"),
        ("fused.layers.0.linear1", "reads its numbers or its shape itself"),
        ("norm", "LayerNorm"),
    ]:
        with pytest.raises(KflatsError, match=reason):
            find_weight(model, name)


def test_a_tie_is_one_weight_owned_by_the_embedding() -> None:
    weight = find_weight(Tied(), "out")
    assert [(p.name, p.role) for p in weight.places] == [("words", "embedding"), ("out", "head")]
    assert weight.name == "words"
    assert weight.nbytes == 9 * 4 * 4


def test_a_table_shared_with_something_else_is_left_alone() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "bilinear": nn.Bilinear(2, 2, 1)})
    model["bilinear"].weight = model["words"].weight
    assert find_weights(model) == ()
    with pytest.raises(KflatsError, match="shared with a layer that cannot be factored"):
        find_weight(model, "words")


def test_names() -> None:
    model = Tied()
    assert find_weight(model, "words.weight") == find_weight(model, "words")
    assert find_weight(model, "layer").name == "body.layer"
    with pytest.raises(KflatsError, match=r"no weight called 'wrods'.*words"):
        find_weight(model, "wrods")
    with pytest.raises(KflatsError, match="no weight called"):
        find_weight(nn.ReLU(), "")


def test_orientation_and_no_copy() -> None:
    model = Tied()
    layer = model.body["layer"]
    assert dense_weight(model, find_weight(model, "words")).data_ptr() == model.words.weight.data_ptr()
    found = dense_weight(model, find_weight(model, "body.layer"))
    assert found.data_ptr() == layer.weight.data_ptr()
    torch.testing.assert_close(torch.ones(4) @ found + layer.bias, layer(torch.ones(4)))


@pytest.mark.parametrize("make", [matrix, flats])
def test_a_swap_replaces_every_place(make) -> None:
    model = Tied()
    reference, table = copy.deepcopy(model), model.words.weight
    bias, new = model.out.bias, make(9, 4)
    with torch.no_grad():
        reference.words.weight.copy_(new.dense())
    swap_(model, find_weight(model, "words"), new)

    assert isinstance(model.get_submodule("words"), FactoredEmbedding)
    assert isinstance(model.get_submodule("out"), FactoredHead)
    assert dict(model.named_children()).keys() == {"words", "out", "body"}  # no ghost child
    assert model.out.matrix is model.words.matrix is new
    assert model.out.bias is bias
    assert all(parameter is not table for parameter in model.parameters())
    assert not any(key == "out.weight" for key in model.state_dict())
    ids = torch.tensor([[0, 3, 8]])
    torch.testing.assert_close(model(ids), reference(ids))
    model(ids).sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in new.parameters())
    with pytest.raises(KflatsError, match="factored already"):
        find_weight(model, "words")
    assert [w.name for w in find_weights(model)] == ["body.layer"]


def test_one_module_in_two_places_stays_one() -> None:
    shared = nn.Linear(3, 5)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    swap_(model, find_weight(model, "0.0"), matrix(3, 5))
    assert model[0][0] is model[1][0]
    assert isinstance(model[0][0], FactoredLinear)


def test_what_carries_over() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 4, padding_idx=-1), "out": nn.Linear(4, 2)}).eval()
    model["words"].weight.requires_grad_(False)
    seen = []
    handle = model["words"].register_forward_hook(lambda *args: seen.append(1))
    new = matrix(9, 4)
    swap_(model, find_weight(model, "words"), new)
    layer = model["words"]
    assert (layer.padding_idx, layer.training) == (8, False)
    assert not any(parameter.requires_grad for parameter in new.parameters())
    layer(torch.tensor([1]))
    handle.remove()
    layer(torch.tensor([1]))
    assert seen == [1]


def test_rows_may_be_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    bias, new = model[0].bias, matrix(6, 4)
    swap_(model, find_weight(model, "0"), new, matrix_rows="out_features")
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), x @ new.dense().T + bias)
    restore_(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), x @ new.dense().T + bias)


def test_refusals_leave_the_model_as_it_was() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "out": nn.Linear(4, 5)})
    before = repr(model)
    weight = find_weight(model, "words")
    with pytest.raises(KflatsError, match=r"shape \(4, 9\) cannot replace 'words'"):
        swap_(model, weight, matrix(4, 9))
    with pytest.raises(KflatsError, match="sparse gradients"):
        find_weight(nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True)}), "words")
    other = find_weight(model, "out")
    model["out"].weight = nn.Parameter(model["out"].weight.detach())
    model["more"] = nn.Sequential(model["out"])
    with pytest.raises(KflatsError, match="places of 'out' have changed"):
        swap_(model, other, matrix(4, 5))
    del model["more"]
    assert repr(model) == before


def test_several_swaps_search_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    for name in ("find_weights", "pretrained_models"):
        search = getattr(weights_of, name)
        for module in (swap, weights_of):
            monkeypatch.setattr(
                module, name, lambda model, name=name, search=search: searches.append(name) or search(model)
            )
    counts = []
    for layers in (2, 9):
        model = nn.ModuleList([nn.Linear(4, 3) for _ in range(layers)])
        found = find_weights(model)
        searches.clear()
        with Swaps(model) as swaps:
            for weight in found:
                swaps.swap_(weight, matrix(*weight.shape))
        assert all(isinstance(layer, FactoredLinear) for layer in model)
        counts.append(sorted(searches))
    assert counts[0] == counts[1]
    assert counts[0].count("find_weights") == 1


def test_several_swaps_let_each_table_go() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 3) for name in "ab"})
    a, b = find_weights(model)
    table = weakref.ref(model["a"].weight)
    with Swaps(model) as swaps:
        swaps.swap_(a, matrix(4, 3))
        gc.collect()
        assert table() is None
        swaps.swap_(b, matrix(4, 3))


def raw() -> nn.Module:
    """A model with a layer that has another in it, and with a parameter without a layer."""
    transformers = pytest.importorskip("transformers", minversion="5.0")

    class Raw(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.up = nn.Parameter(torch.zeros(64, 64))
            self.outer = nn.Linear(8, 8)
            self.outer.inner = nn.Linear(4, 3)
            self.post_init()

    return Raw()


@pytest.mark.parametrize(("first", "second"), [("outer", "outer"), ("up", "up"), ("outer", "outer.inner")])
def test_what_was_swapped_is_no_weight_any_more(first: str, second: str) -> None:
    model = raw()
    found = {weight.name: weight for weight in find_weights(model)}
    with Swaps(model) as swaps:
        swaps.swap_(found[first], matrix(*found[first].shape))
        with pytest.raises(KflatsError, match=f"{second}' cannot be factored|no weight called '{second}'"):
            swaps.swap_(found[second], matrix(*found[second].shape))


def test_a_table_that_is_still_used_is_found_at_the_end() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "again": nn.ParameterList()})
    (a,) = find_weights(model)
    model["again"].append(model["a"].weight)
    message = "the dense table of 'a' cannot be replaced"
    with pytest.raises(KflatsError, match=message), Swaps(model, just_found=True) as swaps:
        swaps.swap_(a, matrix(4, 3))


def test_there_and_back() -> None:
    model = Tied().double()
    words, out = model.words, model.out
    new = flats(9, 4).double()
    swap_(model, find_weight(model, "words"), new)
    inner = matrix(4, 4).double()
    swap_(model, find_weight(model, "body.layer"), inner)
    ids = torch.tensor([[0, 3, 8]])
    expected = model(ids)
    restore_(model)
    assert model.words is words
    assert model.out is out
    assert model.out.weight is model.words.weight
    assert type(model.body["layer"]) is nn.Linear
    assert all(p.dtype == torch.float64 for p in model.parameters())
    torch.testing.assert_close(model(ids), expected)
    assert len(find_weights(model)) == 2
    restore_(model)  # nothing left to do


def test_copies_are_independent() -> None:
    model = Tied()
    swap_(model, find_weight(model, "words"), flats(9, 4))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert twin.out.matrix is twin.words.matrix
        assert twin.words.matrix is not model.words.matrix
        with torch.no_grad():
            twin.words.matrix.weight.zero_()
        assert twin(torch.tensor([3])).shape == (1, 9)
    assert model.words.weight.abs().sum() > 0


def test_factors_may_be_stored_in_their_own_type() -> None:
    model = Tied()
    new = matrix(9, 4)
    rounded = (new.weight.half() @ new.basis.half()).float()
    swap_(model, find_weight(model, "words"), new.half())
    ids = torch.tensor([[1, 3, 8]])
    assert model.words(ids).dtype == torch.float32
    torch.testing.assert_close(model.words(ids), rounded[ids], rtol=1e-2, atol=1e-2)
    assert model(ids).dtype == torch.float32
    assert model.bfloat16()(ids).dtype == torch.bfloat16
    restore_(model)
    assert model.words.weight.dtype == torch.bfloat16


def test_slots_are_every_attribute_that_holds_a_module() -> None:
    """By definition: all paths, of which the first one to each attribute of each module counts."""
    shared = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"in": nn.Linear(2, 2)}))
    model = nn.ModuleDict(
        {"a": shared, "b": nn.Sequential(shared, shared[0], nn.MultiheadAttention(2, 1)), "c": shared}
    )
    model["none"] = None  # type: ignore[assignment]
    seen, expected = set(), []
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        slot = (id(model.get_submodule(parent)) if name else 0, leaf)
        if slot not in seen:
            expected.append((name, module))
        seen.add(slot)
    found = list(slots(model))
    assert [(name, module) for name, module, _ in found] == expected
    assert {name for name, _, fused in found if fused} == {"b.2", "b.2.out_proj"}
