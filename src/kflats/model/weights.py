"""Where a model keeps its matrices: embeddings, linear layers, convolutions, the ties between them, and their roles.

A *weight* is one matrix M of shape (n, d). Its rows belong to inputs: tokens, or input neurons. A *place* is a module
that uses it. A tied output head is a second place of the embedding's weight, not a weight of its own: a swap replaces
the weight at all of its places.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from dis import get_instructions
from inspect import unwrap
from types import FunctionType
from typing import Any, Literal, TypeGuard, cast

import torch
from torch import Tensor, nn

from kflats.common.dtypes import dtype_name
from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.layers import FactoredConv2d, FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import Matrix

FactoredLayer = FactoredEmbedding | FactoredHead | FactoredLinear | FactoredConv2d

READ_DIRECTLY = "the model reads its numbers or its shape itself, as torch's own transformer layers do"

# These modules read the tensors of layers inside them directly and never call the layers: torch's fused kernels, and
# modules of transformers whose tensors others read. ``_reads_of`` finds those that read single layers, or the shape of
# their weight, as CLIP reads its number of positions. BLOOM's read slices where a checkpoint asks for slow, exact
# products, and call elsewhere.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_READ_WHOLE = ("MobileBertLMPredictionHead", "PerceiverTextPreprocessor", "VectorQuantizer", "WavLMAttention")
_CALLED = ("BloomAttention", "BloomMLP")
_LIBRARIES = ("torch.", "builtins.", "abc.", "typing.", "transformers.modeling_utils.", "transformers.generation.")
_NO_FORWARD = ("__", "_init", "init", "reset", "tie", "_tie", "resize", "_resize", "set_", "from_", "_prune", "prune")
_SAME = (".device", ".requires_grad", ".is_meta")
"""Properties that factors have in common with the tensor that they stand for."""

_RAW, _NARROW = 4096, 4  # numbers of a parameter, and the shorter side of its matrix, from which it is a weight

_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names that transformers gives to tensors of experts."""

QUANT_METHOD = "kflats"
"""The name of the description of factored layers in a transformers config."""


@dataclass(frozen=True)
class WeightUse:
    """A module that uses a weight: its path in the model, and its role there.

    ``role`` is "embedding" (rows of M), "head" (x @ M.T, tied to an embedding), "linear" (torch keeps
    M.T), "conv1d" (GPT-2's layer, which keeps M) or "conv2d" (M is ``kernel.flatten(1).T``: a row for
    every number of a patch, channel by channel, as ``torch.nn.functional.unfold`` orders them). "parameter": a tensor
    that its module reads itself; ``name`` is the tensor's own, and M is the tensor with its axes joined to two, as
    nearly square as possible. "experts": such a tensor of a mixture of experts in transformers; its matrices, one of
    each expert, stand side by side in M, as those of one linear layer whose outputs are those of all experts.
    """

    name: str
    role: str


@dataclass(frozen=True)
class Weight:
    """One matrix M and all its places; ``name`` is the first place, which owns the factors after a swap.

    ``shape`` is M's, with inputs as rows; ``nbytes`` counts M once, whatever its ties. ``bias`` says whether the layer
    has a bias. A layer without one that gains a bias pays for it (d numbers).

    ``type_is_read`` says whether inputs are cast to M's type: by a module that reads it (``self.wo.weight.dtype``), or
    because M is the first floating-point parameter of a transformers model, whose type is ``model.dtype``. With factors
    in half precision, layers in float32 would get half precision.
    """

    name: str
    places: tuple[WeightUse, ...]
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    bias: bool = False
    type_is_read: bool = False


def check_model(model: object) -> None:
    """Raise KflatsError for what is no module, such as the name of a folder.

    >>> check_model("my-model")
    Traceback (most recent call last):
    kflats.common.errors.KflatsError: expected a model, found str. Try: a loaded model; compress_folder takes the \
name of a folder.
    """
    if not isinstance(model, nn.Module):
        raise KflatsError(
            f"expected a model, found {type(model).__name__}",
            hint="a loaded model; compress_folder takes the name of a folder",
        )


def find_weights(model: nn.Module) -> tuple[Weight, ...]:
    """Every matrix of ``model`` that can be factored, in the model's own order; factored ones are skipped.

    Embeddings (``nn.Embedding`` and transformers' scaled word embeddings), exact ``nn.Linear`` layers,
    GPT-2's ``Conv1D`` and exact ``nn.Conv2d`` layers of one group. Other parameters of two or more dimensions and 4,096
    numbers are weights of the role "parameter" inside transformers models: experts, projections without a layer, layers
    whose tensors other modules read directly, subclasses that compute something else. Skipped are parameters that
    several modules share, and embeddings with ``max_norm``, ``sparse`` or ``scale_grad_by_freq``.

    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    >>> model["out"].weight = model["words"].weight      # a tie
    >>> [(w.name, w.shape, [p.role for p in w.places]) for w in find_weights(model)]
    [('words', (9, 4), ['embedding', 'head'])]

    Raises:
        KflatsError: ``model`` is no module.
    """
    check_model(model)
    uses: dict[int, list[tuple[str, nn.Module, str]]] = {}
    raw: dict[int, Weight] = {}
    same = _ties_to_come(model)
    for name, module, fused in slots(model):
        for key, held in module._parameters.items():
            if held is not None:
                role = role_of(module)[0] if key == "weight" and not fused else ""
                one = same.get(id(held), id(held))
                uses.setdefault(one, []).append((name, module, role))
                if not role and (found := _as_parameter(f"{name}.{key}".removeprefix("."), module, key)) is not None:
                    raw[one] = found
    sources = {source.removesuffix(".weight") for source in _ties(model).values()}
    typed = {same.get(one, one) for one in _types_read(model)}
    weights = [
        replace(found, type_is_read=one in typed)
        for one, users in uses.items()
        if (found := _as_weight(users, sources) or (raw.get(one) if len(users) == 1 else None)) is not None
    ]
    return tuple(w for w in weights if _is_saved(model, w))


def shared_layers(model: nn.Module, weights: Sequence[Weight]) -> tuple[WeightUse, ...]:
    """The layers whose tensor other modules hold too, but those of ``weights``, which ``find_weights`` gave.

    >>> model = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    >>> model["out"].weight = model["in"].weight
    >>> [layer.name for layer in shared_layers(model, find_weights(model))]
    ['in', 'out']
    """
    found = {place.name for weight in weights for place in weight.places}
    users: dict[int, dict[int, WeightUse]] = {}
    for name, module, fused in slots(model):
        for key, held in module._parameters.items():
            if held is not None:
                role = role_of(module)[0] if key == "weight" and not fused else ""
                users.setdefault(id(held), {})[id(module)] = WeightUse(name, role)
    several = (use for of_one in users.values() if len(of_one) > 1 for use in of_one.values())
    return tuple(use for use in several if use.role and use.name not in found)


def _types_read(model: nn.Module) -> set[int]:
    """The parameters (ids) whose type is read."""
    first = [one for _, part in pretrained_models(model) for one in _first_of(part, model)]
    read = [parameter(module, f"{path}.weight") for _, module in _held(model) for path in _reads_of(type(module)).types]
    return {id(p) for p in first + read if p is not None}


def _first_of(part: nn.Module, model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameter of ``part`` that its type is read from, now and where layers outside of it own those before."""
    outside = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    outside.subtract(id(p) for module in part.modules() for p in module._parameters.values())
    for one in filter(Tensor.is_floating_point, part.parameters()):
        yield one
        if not outside[id(one)]:
            return


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
    for candidate in (*spellings(model, name), *spellings(model, plain), *spellings(model, f"{plain}.weight")):
        if candidate in by_place:
            return by_place[candidate]
    ends = {by_place[place] for place in by_place if plain and place.endswith("." + plain)}
    if len(ends) == 1:
        return ends.pop()
    for candidate in spellings(model, plain):
        if (module := submodule(model, candidate)) is not None and candidate:
            raise KflatsError(f"{name!r} cannot be factored", cause=_reason(model, candidate, module))
    near = difflib.get_close_matches(plain, by_place, n=5, cutoff=0.4)
    named = f"a name such as {', '.join(near)}" if near else "linear, conv, embeddings or all"
    raise KflatsError(
        f"the model has no weight called {name!r}",
        cause="a misspelled name, or the name of another architecture",
        hint=f"{named}; kflats inspect MODEL lists the names"
        if by_place
        else "a model with embeddings, linear layers or convolutions",
    )


def is_parameter(role: str) -> bool:
    """Whether a place of this role is a tensor that its module reads itself: dense in memory, a matrix in files.

    >>> is_parameter("experts"), is_parameter("linear")
    (True, False)
    """
    return role in ("parameter", "experts")


def module_of(model: nn.Module, place: WeightUse) -> nn.Module | None:
    """The module of a place, None where there is none: that named by the path, or the one that reads a parameter."""
    return submodule(model, place.name.rpartition(".")[0] if is_parameter(place.role) else place.name)


def inputs_first(module: nn.Module) -> bool:
    """Whether the experts of ``module`` are matrices (inputs, outputs), as those of gpt-oss; others are (outputs,
    inputs), as torch's linear layers keep them."""
    return bool(getattr(module, "is_transposed", False))


def own_matrix_rows(weight: Weight) -> Literal["in_features", "out_features"]:
    """The side of M that the layer keeps as the rows of its table: "in_features" (M itself) or "out_features" (M.T).

    >>> own_matrix_rows(Weight("out", (WeightUse("out", "linear"),), (4, 9), "float32", 144))
    'out_features'
    """
    return "out_features" if weight.places[0].role in ("linear", "conv2d", "experts") else "in_features"


def dense_weight(model: nn.Module, weight: Weight) -> Tensor:
    """M itself, (n, d), detached: a view of the model's parameter wherever its orientation allows.

    >>> model = nn.ModuleDict({"out": nn.Linear(4, 9)})
    >>> dense_weight(model, find_weight(model, "out")).shape      # rows are input neurons
    torch.Size([4, 9])
    """
    role = weight.places[0].role
    if is_parameter(role) and (raw := parameter(model, weight.name)) is not None:
        if role == "parameter":
            return raw.detach().reshape(weight.shape)
        experts = module_of(model, weight.places[0])
        if experts is not None and inputs_first(experts):
            return raw.detach().transpose(0, 1).reshape(weight.shape)
        return raw.detach().reshape(weight.shape[::-1]).T
    module = submodule(model, weight.name)
    table = None if module is None else module._parameters.get("weight")
    if table is None or isinstance(module, FactoredLayer):
        raise KflatsError(f"{weight.name!r} has no dense table", cause="it is factored already, or of another model")
    if role == "conv2d":
        return table.detach().flatten(1).T
    return table.detach().T if role == "linear" else table.detach()


def role_of(module: nn.Module) -> tuple[str, str]:
    """The role of one module: "embedding", "linear", "conv1d", "conv2d", or "" and the reason why it has none.

    >>> role_of(nn.Linear(3, 4)), role_of(nn.Conv2d(4, 4, 3, groups=2))[1]
    (('linear', ''), 'a grouped convolution (groups=2) is 2 small matrices, not one')
    """
    kind = type(module)
    if isinstance(module, FactoredLayer):
        return "", "it is factored already"
    if isinstance(module, torch.jit.ScriptModule):
        return "", "torch.jit has compiled it"
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):  # accelerate's hooks carry over
        return "", f"this {kind.__name__} has a forward of its own"
    weight = module._parameters.get("weight")
    dimensions = 4 if isinstance(module, nn.Conv2d) else 2
    if not isinstance(weight, nn.Parameter) or weight.ndim != dimensions or not weight.is_floating_point():
        return "", f"a {kind.__name__} without a plain floating-point weight matrix"
    if weight.numel() == 0:
        return "", f"an empty {kind.__name__}"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "", "max_norm rescales rows of the table while they are read, and factors have no such rows"
        if module.sparse:
            return "", "sparse gradients are of rows, and a basis has a dense one"
        if module.scale_grad_by_freq:
            return "", "scale_grad_by_freq divides the gradient of a row by its count, and a basis has no such count"
        others = [name for name in module._parameters if name != "weight"]
        if others:
            return "", f"a {kind.__name__} has parameters beside its table: {', '.join(others)}"
        if kind is not nn.Embedding and not _is_scaled(kind):
            return "", f"{kind.__name__} is a subclass of nn.Embedding that kflats does not know"
        return "embedding", ""
    if kind is nn.Linear:
        return "linear", ""
    if kind is nn.Conv2d:
        groups = module.groups
        if groups != 1:
            return "", f"a grouped convolution (groups={groups}) is {groups} small matrices, not one"
        return "conv2d", ""
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return "conv1d", ""
    return "", f"a {kind.__name__} is neither an embedding, an exact nn.Linear nor an exact nn.Conv2d"


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """For every attribute that holds a module, also a shared one: path, module, is its tensor read directly?"""
    fused: set[int] = set()
    tokens = {id(vocabulary_end(part, "get_input_embeddings")) for _, part in pretrained_models(model)}
    for name, module in _held(model):
        for read in _read_by(module, tokens):
            fused.update(id(inner) for inner in read.modules())
        yield name, module, id(module) in fused


def _held(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every attribute that holds one; a module comes before those inside it."""
    entered: set[int] = set()
    left = [("", model)]
    while left:
        name, module = left.pop()
        yield name, module
        if id(module) not in entered:  # the attributes of a shared module are found once
            entered.add(id(module))
            inner = [(f"{name}.{leaf}" if name else leaf, held) for leaf, held in module._modules.items()]
            left += [(path, held) for path, held in reversed(inner) if held is not None]


def embedding_scale(module: nn.Module) -> float | None:
    """The factor by which a scaled word embedding multiplies its output; NaN where it is on the meta device."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        return float("nan") if scale.is_meta else float(scale)
    return None if scale is None else float(scale)


def factored_layers(model: nn.Module) -> Iterator[tuple[str, FactoredLayer]]:
    """Path and layer of every factored place; an owner comes before the places that borrow from it."""
    layers = [(name, module) for name, module in _held(model) if isinstance(module, FactoredLayer)]
    yield from sorted(layers, key=lambda item: not item[1].owns_matrix)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that ``model`` computes in. Its factors may be stored in another type."""
    for _, layer in factored_layers(model):
        if isinstance(layer, FactoredEmbedding) and layer.out_dtype is not None:
            return layer.out_dtype
    factored = {id(t) for _, layer in factored_layers(model) for t in layer.matrix.floats().values()}
    own: torch.dtype | None = None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            if id(parameter) not in factored:
                return parameter.dtype
            own = own or parameter.dtype
    return own or torch.get_default_dtype()


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


def described_models(model: nn.Module) -> Iterator[tuple[Any, JsonObject]]:
    """Those of ``pretrained_models`` that have factored layers, with the description of these layers."""
    for _, part in pretrained_models(model):
        if is_kflats_config(note := getattr(part.config, "quantization_config", None)):
            yield part, note


def is_kflats_config(note: object) -> TypeGuard[JsonObject]:
    """Whether the ``quantization_config`` of a model is the description of its factored layers."""
    return isinstance(note, dict) and note.get("quant_method") == QUANT_METHOD


def vocabulary_end(model: nn.Module, getter: str) -> nn.Module | None:
    """The module of ``get_input_embeddings`` or ``get_output_embeddings``; some models have none and raise."""
    try:
        end = getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
    return end if isinstance(end, nn.Module) else None


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether ``model`` is a SentenceTransformer, which takes its batches as one argument and saves itself."""
    return type(model).__module__.startswith("sentence_transformers.") and not hasattr(model, "config_class")


@dataclass
class Held:
    """The matrix behind a parameter that is dense in memory, of the role "parameter" or "experts". ``empty``: the
    parameter, while the matrix is loaded."""

    matrix: Matrix
    matrix_rows: str
    role: str
    empty: nn.Parameter | None = None


def held_matrices(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """The names of parameters that have the values of a matrix, with the matrix."""
    for path, module in model.named_modules():
        for key, held in module.__dict__.get("_kflats_held", {}).items():
            yield f"{path}.{key}".removeprefix("."), held


def stored_name(name: str, key: str, role: str) -> str:
    """The name in a file of the tensor ``key`` of the matrix of a weight.

    >>> stored_name("dense", "codes", "linear"), stored_name("experts.up", "codes", "parameter")
    ('dense.codes', 'experts.up_codes')
    >>> stored_name("experts.up", "weight", "parameter")  # of another shape than the dense tensor
    'experts.up'
    """
    if not is_parameter(role):
        return f"{name}.{key}"
    return name if key == "weight" else f"{name}_{key}"


def _as_parameter(path: str, module: nn.Module, key: str) -> Weight | None:
    """The weight of a parameter that is no table of a known layer; None for small ones and those that are held."""
    table = module._parameters[key]
    if isinstance(module, FactoredLayer | nn.Embedding) or key in module.__dict__.get("_kflats_held", {}):
        return None
    if table is None or table.ndim < 2 or not table.is_floating_point() or table.numel() < _RAW:
        return None
    shape = _nearly_square(table)
    nbytes = table.numel() * table.element_size()
    if is_experts(module, key) and table.ndim == 3 and min(table.shape[1:]) >= _NARROW:
        inputs = table.shape[1 if inputs_first(module) else 2]
        shape = (inputs, table.numel() // inputs)
        return Weight(path, (WeightUse(path, "experts"),), shape, dtype_name(table.dtype), nbytes)
    if min(shape) < _NARROW:
        return None
    return Weight(path, (WeightUse(path, "parameter"),), shape, dtype_name(table.dtype), nbytes)


def is_experts(module: nn.Module, key: str) -> bool:
    """Whether the tensor ``key`` of ``module`` holds matrices of experts that transformers' own functions of experts
    multiply by (``use_experts_implementation``)."""
    own = hasattr(type(module).forward, "__wrapped__")  # a class that is derived may have a forward of its own
    return own and key in _EXPERTS and hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def with_parameter_role(model: nn.Module, weight: Weight) -> Weight:
    """The weight of experts as that of any other parameter, as files had it before experts had a role of their own."""
    table = parameter(model, weight.name)
    assert table is not None
    return replace(weight, places=(WeightUse(weight.name, "parameter"),), shape=_nearly_square(table))


def _nearly_square(table: Tensor) -> tuple[int, int]:
    shapes = [(table.shape[:axis].numel(), table.shape[axis:].numel()) for axis in range(1, table.ndim)]
    return max(shapes, key=min)


def _is_saved(model: nn.Module, weight: Weight) -> bool:
    """False for layers that sentence-transformers stores itself (its Dense modules), always as dense tables, and for
    parameters outside transformers models."""
    if is_parameter(weight.places[0].role):
        return any(weight.name.startswith(f"{name}." if name else "") for name, _ in pretrained_models(model))
    if not type(model).__module__.startswith("sentence_transformers."):
        return True
    homes = tuple(f"{name}." for name, _ in pretrained_models(model))
    return all(place.name.startswith(homes) for place in weight.places)


def _reason(model: nn.Module, name: str, module: nn.Module) -> str:
    role, reason = role_of(module)
    if not role:
        return reason
    if any(slot == name and fused for slot, _, fused in slots(model)):
        return READ_DIRECTLY
    if role == "linear" and type(model).__module__.startswith("sentence_transformers."):
        return "sentence-transformers stores this layer itself, as a dense table"
    return "its parameter is shared with a layer that cannot be factored together with it"


def _ties(model: nn.Module) -> dict[str, str]:
    """The ties of a transformers model by parameter name, target to source. The source owns the weight, wherever it is
    in the model."""
    ties = getattr(model, "all_tied_weights_keys", None)
    return ties if isinstance(ties, dict) else {}


def _ties_to_come(model: nn.Module) -> dict[int, int]:
    """Ties to come, target to source by id: ``from_pretrained`` builds models on the meta device, untied."""
    pairs = ((parameter(model, target), parameter(model, source)) for target, source in _ties(model).items())
    return {id(a): id(b) for a, b in pairs if a is not None and b is not None and a.is_meta and b.is_meta}


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
        dtype=dtype_name(table.dtype),
        nbytes=table.numel() * table.element_size(),
        bias=not tied and order[0][1]._parameters.get("bias") is not None,
    )


def _read_by(module: nn.Module, tokens: set[int]) -> Iterator[nn.Module]:
    """The modules inside ``module``, perhaps itself, whose tensors it reads.

    A table of ``tokens`` (module ids) is entered by a call, whatever a helper reads of it; what forward reads counts.
    """
    name = type(module).__name__
    for held in vars(module).values():  # in a plain list modules cannot be replaced
        if isinstance(held, list | tuple):
            yield from (inner for inner in held if isinstance(inner, nn.Module))
    if isinstance(module, _FUSED) or name.endswith(_READ_WHOLE):
        yield module
    elif not name.endswith(_CALLED):
        reads = _reads_of(type(module)).methods
        for path in sorted(reads):
            inner = submodule(module, path)
            if inner is not None and (id(inner) not in tokens or "forward" in reads[path]):
                yield inner


@dataclass(frozen=True)
class _Reads:
    """What methods of a class read of the ``weight`` of modules inside it, as ``self.out_proj.weight``.

    ``methods``: by the path of a module the names of those that read its numbers or its shape. ``types``: the paths of
    those whose type is read.
    """

    methods: dict[str, set[str]]
    types: set[str]


def _reads_of(kind: type[nn.Module]) -> _Reads:
    """What the methods of a ``kind`` read.

    >>> class Scores(nn.Module):
    ...     def forward(self, x):
    ...         return self.first(x) @ self.second.weight.to(self.first.weight.dtype)
    >>> _reads_of(Scores)
    _Reads(methods={'second': {'forward'}}, types={'first'})
    """
    if kind not in _READS:
        found = _Reads({}, set())
        for base in kind.__mro__:
            for name, method in {} if f"{base.__module__}.".startswith(_LIBRARIES) else vars(base).items():
                if isinstance(method, FunctionType) and not name.startswith(_NO_FORWARD):
                    paths, types = _paths_read(unwrap(method))
                    found.types.update(types)
                    for path in paths:
                        found.methods.setdefault(path, set()).add(name)
        _READS[kind] = found
    return _READS[kind]


_READS: dict[type[nn.Module], _Reads] = {}
"""What ``_reads_of`` found; the methods of a class do not change."""


def _paths_read(method: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Each path between ``self`` and a ``weight`` whose numbers or shape are read, and whose type is."""
    read, types = set[str](), set[str]()
    code = getattr(method, "__code__", None)
    if code is None or "weight" not in code.co_names:
        return read, types
    path: list[str] | None = None
    before = ""  # isinstance(self.wo.weight, Tensor) reads no number
    for step in get_instructions(code):
        if step.opname in ("CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"):
            continue
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path is not None:
            path.append(step.argval)
            continue
        inner, found, rest = ".".join(path or ()).partition(".weight")
        if found and rest.startswith(".dtype"):
            types.add(inner)
        elif found and not rest.startswith(_SAME):
            read.add(inner)
        loads_self = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and step.argrepr.split(", ")[-1] == "self"
        path = [] if loads_self and before != "isinstance" else None
        before = str(step.argval)
    return read, types


def _is_scaled(kind: type) -> bool:
    """Gemma's, BART's, ...: transformers' word embeddings whose output is multiplied by ``embed_scale``."""
    return kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.")
