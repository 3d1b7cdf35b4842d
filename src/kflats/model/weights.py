"""Where a model keeps its matrices: embeddings, linear layers, convolutions, and the ties between them.

A *weight* is one matrix M of shape (n, d). Its rows belong to inputs: tokens, or input neurons. A *place* is a module
that uses it. A tied output head is a second place of the embedding's weight, not a weight of its own: a swap replaces
the weight at all of its places.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.model.roles import READ_DIRECTLY, FactoredLayer, role_of, slots


@dataclass(frozen=True)
class WeightUse:
    """A module that uses a weight: its path in the model, and its role there.

    ``role`` is "embedding" (rows of M), "head" (x @ M.T, tied to an embedding), "linear" (torch keeps
    M.T), "conv1d" (GPT-2's layer, which keeps M) or "conv2d" (M is ``kernel.flatten(1).T``: a row for
    every number of a patch, channel by channel, as ``torch.nn.functional.unfold`` orders them).
    """

    name: str
    role: str


@dataclass(frozen=True)
class Weight:
    """One matrix M and all its places; ``name`` is the first place, which owns the factors after a swap.

    ``shape`` is M's, with inputs as rows; ``nbytes`` counts M once, whatever its ties. ``bias`` says whether the layer
    has a bias. A layer without one that gains a bias pays for it (d numbers).
    """

    name: str
    places: tuple[WeightUse, ...]
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    bias: bool = False


def find_weights(model: nn.Module) -> tuple[Weight, ...]:
    """Every matrix of ``model`` that can be factored, in the model's own order; factored ones are skipped.

    Embeddings (``nn.Embedding`` and transformers' scaled word embeddings), exact ``nn.Linear`` layers,
    GPT-2's ``Conv1D`` and exact ``nn.Conv2d`` layers of one group. Skipped are layers whose tensors other modules
    read directly (inside torch's own transformer layers), subclasses that compute something else, parameters
    shared with a module of another kind, and embeddings with ``max_norm`` or ``scale_grad_by_freq``.

    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    >>> model["out"].weight = model["words"].weight      # a tie
    >>> [(w.name, w.shape, [p.role for p in w.places]) for w in find_weights(model)]
    [('words', (9, 4), ['embedding', 'head'])]
    """
    uses: dict[int, list[tuple[str, nn.Module, str]]] = {}
    same = _ties_to_come(model)
    for name, module, fused in slots(model):
        for key, held in module._parameters.items():
            if held is not None:
                role = role_of(module).name if key == "weight" and not fused else ""
                uses.setdefault(same.get(id(held), id(held)), []).append((name, module, role))
    sources = _tie_sources(model)
    weights = [w for found in uses.values() if (w := _as_weight(found, sources)) is not None]
    return tuple(w for w in weights if _is_saved(model, w))


def find_weight(model: nn.Module, name: str) -> Weight:
    """The weight that has a place called ``name``: any tied place, with or without the base model's prefix.

    Raises:
        KflatsError: no such place (near names are listed), factored already, or a layer that cannot be
            factored, with the reason.

    >>> find_weight(nn.ModuleDict({"words": nn.Embedding(9, 4)}), "words").shape
    (9, 4)
    """
    weights = find_weights(model)
    by_place = {place.name: weight for weight in weights for place in weight.places}
    plain = name.removesuffix(".weight")
    for candidate in spellings(model, plain):
        if candidate in by_place:
            return by_place[candidate]
    ends = {by_place[place] for place in by_place if plain and place.endswith("." + plain)}
    if len(ends) == 1:
        return ends.pop()
    for candidate in spellings(model, plain):
        if (module := submodule(model, candidate)) is not None and candidate:
            raise KflatsError(f"{name!r} cannot be factored", cause=_reason(model, candidate, module))
    near = difflib.get_close_matches(plain, by_place, n=5, cutoff=0.4) or list(by_place)[:5]
    raise KflatsError(
        f"the model has no weight called {name!r}",
        cause="a misspelled name, or the name of another architecture",
        hint=f"one of: {', '.join(near)}" if near else "a model with embeddings, linear layers or convolutions",
    )


def own_matrix_rows(weight: Weight) -> Literal["in_features", "out_features"]:
    """The side of M that the layer keeps as the rows of its table: "in_features" (M itself) or "out_features" (M.T).

    >>> own_matrix_rows(Weight("out", (WeightUse("out", "linear"),), (4, 9), "float32", 144))
    'out_features'
    """
    return "out_features" if weight.places[0].role in ("linear", "conv2d") else "in_features"


def dense_weight(model: nn.Module, weight: Weight) -> Tensor:
    """M itself, (n, d), detached: a view of the model's parameter wherever its orientation allows.

    >>> model = nn.ModuleDict({"out": nn.Linear(4, 9)})
    >>> dense_weight(model, find_weight(model, "out")).shape      # rows are input neurons
    torch.Size([4, 9])
    """
    module = submodule(model, weight.name)
    table = None if module is None else module._parameters.get("weight")
    if table is None or isinstance(module, FactoredLayer):
        raise KflatsError(f"{weight.name!r} has no dense table", cause="it is factored already, or of another model")
    role = weight.places[0].role
    if role == "conv2d":
        return table.detach().flatten(1).T
    return table.detach().T if role == "linear" else table.detach()


def factored_layers(model: nn.Module) -> Iterator[tuple[str, FactoredLayer]]:
    """Path and layer of every factored place; an owner comes before the places that borrow from it."""
    found = [(name, module) for name, module, _ in slots(model) if isinstance(module, FactoredLayer)]
    yield from sorted(found, key=lambda item: not item[1].owns_matrix)


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """``model.get_submodule(name)``, or None where there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """``model.get_parameter(name)``, or None where there is none."""
    path, _, key = name.rpartition(".")
    module = submodule(model, path)
    return None if module is None else module._parameters.get(key)


def spellings(model: nn.Module, name: str) -> tuple[str, ...]:
    """``name`` as it is, with the base model's prefix, and without: a base model and its task heads
    (``BertModel``, ``BertForX``) call one layer by two names."""
    prefix = getattr(model, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return (name,)
    return (name, f"{prefix}.{name}", name.removeprefix(prefix + "."))


def pretrained_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every transformers ``PreTrainedModel`` inside ``model``, itself included, with its path, outermost first."""
    # Without that import there can be no such model: transformers stays optional, and unloaded.
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None:
        for name, module in model.named_modules():
            if isinstance(module, library.PreTrainedModel):
                yield name, module


def vocabulary_end(model: nn.Module, getter: str) -> nn.Module | None:
    """The module of ``get_input_embeddings`` or ``get_output_embeddings``; some models have none and raise."""
    try:
        found = getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether ``model`` is a SentenceTransformer, which takes its batches as one argument and saves itself."""
    return type(model).__module__.startswith("sentence_transformers.") and not hasattr(model, "config_class")


def _is_saved(model: nn.Module, weight: Weight) -> bool:
    """False for layers that sentence-transformers stores itself (its Dense modules), always as dense tables."""
    if not type(model).__module__.startswith("sentence_transformers."):
        return True
    homes = tuple(f"{name}." for name, _ in pretrained_models(model))
    return all(place.name.startswith(homes) for place in weight.places)


def _reason(model: nn.Module, name: str, module: nn.Module) -> str:
    role = role_of(module)
    if not role.name:
        return role.reason
    if any(slot == name and fused for slot, _, fused in slots(model)):
        return READ_DIRECTLY
    if role.name == "linear" and type(model).__module__.startswith("sentence_transformers."):
        return "sentence-transformers stores this layer itself, as a dense table"
    return "its parameter is shared with a layer that cannot be factored"


def _tie_sources(model: nn.Module) -> set[str]:
    """Modules that transformers calls the source of a tie: they own the weight, wherever they are in the model."""
    ties = getattr(model, "all_tied_weights_keys", None)
    return {source.removesuffix(".weight") for source in ties.values()} if isinstance(ties, dict) else set()


def _ties_to_come(model: nn.Module) -> dict[int, int]:
    """Ties to come, target to source by id: ``from_pretrained`` builds models on the meta device, untied."""
    found = {}
    ties = getattr(model, "all_tied_weights_keys", None)
    for target, source in ties.items() if isinstance(ties, dict) else ():
        pair = [parameter(model, name) for name in (target, source)]
        if pair[0] is not None and pair[1] is not None and pair[0].is_meta and pair[1].is_meta:
            found[id(pair[0])] = id(pair[1])
    return found


def _as_weight(uses: list[tuple[str, nn.Module, str]], sources: set[str]) -> Weight | None:
    """The weight of all uses of one parameter, or None where one of them cannot use factors."""
    roles = {role for _, _, role in uses}
    modules = {id(module) for _, module, _ in uses}
    if "" in roles or ("embedding" in roles and "conv1d" in roles) or ("embedding" not in roles and len(modules) > 1):
        return None
    tied = "embedding" in roles
    order = sorted(uses, key=lambda use: (use[2] != "embedding", use[0] not in sources))
    table = cast(Tensor, order[0][1]._parameters["weight"])
    role = order[0][2]
    n, d = table.shape if role in ("embedding", "conv1d") else (table.shape[1:].numel(), table.shape[0])
    return Weight(
        name=order[0][0],
        places=tuple(WeightUse(name, "head" if tied and role == "linear" else role) for name, _, role in order),
        shape=(n, d),
        dtype=str(table.dtype).removeprefix("torch."),
        nbytes=table.numel() * table.element_size(),
        bias=not tied and order[0][1]._parameters.get("bias") is not None,
    )
