"""Surgery: put a Matrix in place of a dense table, everywhere the table is used, and take it out again.

transformers shares parameters by name: ``_tied_weights_keys = {target: source}`` on every model class, and all of them,
expanded, in ``all_tied_weights_keys``; ``tie_weights`` then assigns them. A factored place has no table to assign,
because it borrows the owner's matrix. So its entries are taken out of the lists of the instance, and kept for
``recall_ties_``. ``config.tie_word_embeddings`` is never changed: T5 scales its logits by it.

**Vocabularies.** transformers reads and replaces the ``weight`` of an embedding to resize it. In a factored embedding
``weight`` holds only coordinates. So ``swap_`` gives the model its own methods. They resize the matrix, every layer
that uses it, and the bias of the head, or they refuse before anything has changed. The model's class resizes its other
tables itself (BART has a bias on its logits).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor, nn

from kflats.codecs.streams import decode
from kflats.common.errors import KflatsError
from kflats.matrices.base import with_rows
from kflats.matrices.layers import (
    FactoredConv2d,
    FactoredEmbedding,
    FactoredHead,
    FactoredLinear,
    mark_initialized,
)
from kflats.matrices.registry import CodedMatrix, DenseMatrix, Matrix
from kflats.model.parameters import hold_
from kflats.model.weights import (
    FactoredLayer,
    Weight,
    WeightUse,
    compute_dtype,
    embedding_scale,
    factored_layers,
    find_weight,
    find_weights,
    is_kflats_config,
    is_parameter,
    own_matrix_rows,
    parameter,
    pretrained_models,
    submodule,
    vocabulary_end,
)

_PLACES = "_places"

_Parts: TypeAlias = tuple[tuple[str, Any], ...]
"""The transformers models in a model, by path: ``pretrained_models``."""


def _guard_resizing_(parts: _Parts, layers: Sequence[FactoredLayer], matrix: Matrix) -> None:
    """Give each transformers model whose vocabulary is ``matrix``, of these layers, methods that resize factors."""
    matrix.__dict__[_PLACES] = len(layers)
    shared = {id(layer) for layer in layers}
    for _, part in parts:
        ends = (vocabulary_end(part, "get_input_embeddings"), vocabulary_end(part, "get_output_embeddings"))
        if any(id(end) in shared for end in ends):
            # They follow their model through deepcopy and pickle; bound methods would be pickled as those of the class.
            for method in _METHODS:
                part.__dict__[method.__name__] = update_wrapper(partial(method, part), method)


def resize_token_embeddings(self: Any, *args: Any, **settings: Any) -> nn.Module:
    """As transformers' method of that name, for a model whose vocabulary is factored.

    Rows that stay are unchanged. A new row begins at the mean coordinates of the rows that it joins. ``mean_resizing``
    concerns only a table that is still dense.

    Raises:
        KflatsError: the factors cannot have that size; nothing has changed then.
    """
    type(self).resize_token_embeddings(self, *args, **settings)
    found: nn.Module = self.get_input_embeddings()
    return found


def _resize_token_embeddings(
    self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> Any:
    """The step of transformers' ``resize_token_embeddings`` that resizes tables."""
    source, head = vocabulary_end(self, "get_input_embeddings"), vocabulary_end(self, "get_output_embeddings")
    if source is None:
        raise KflatsError(
            f"the vocabulary of {type(self).__name__} cannot be resized",
            cause="the class does not say which of its layers are the token embeddings",
        )
    if new_num_tokens is None and pad_to_multiple_of is None:
        return source
    old = source.matrix.shape[0] if isinstance(source, FactoredLayer) else cast(nn.Embedding, source).num_embeddings
    size = _padded(old if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)

    ends = [end for end in (source, head) if isinstance(end, FactoredLayer)]
    for end in ends:
        _check_end(self, end)
    resized = {id(end.matrix): end.matrix.resized(size) for end in ends if end.matrix.shape[0] != size}

    if not isinstance(source, FactoredLayer):
        self.set_input_embeddings(self._get_resized_embeddings(source, size, None, mean_resizing))
    if head is not None and not isinstance(head, FactoredLayer):
        self.set_output_embeddings(self._get_resized_lm_head(head, size, mean_resizing=mean_resizing))
    for _, layer in list(factored_layers(self)):
        if (matrix := resized.get(id(layer.matrix))) is not None:
            _take(self, layer, matrix)
    # The caller takes the new size from the table's first dimension, and ragged coordinates have no such dimension.
    return SimpleNamespace(weight=torch.empty(size, 0, device="meta"))


_METHODS = (resize_token_embeddings, _resize_token_embeddings)


def _padded(size: int, multiple: int | None) -> int:
    for value in (size, 1 if multiple is None else multiple):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KflatsError(f"a vocabulary cannot be resized to {value!r}", hint="whole numbers, at least 1")
    return size if multiple is None else -(-size // multiple) * multiple


def _check_end(model: nn.Module, end: FactoredLayer) -> None:
    if isinstance(end, FactoredLinear) and end.matrix_rows == "in_features":
        raise KflatsError(
            "the output head cannot be resized",
            cause="its tokens are columns of a factored matrix, and coordinates belong to rows",
            hint="resize the original model, then compress it",
        )
    here = sum(layer.matrix is end.matrix for _, layer in factored_layers(model))
    if here != end.matrix.__dict__.get(_PLACES, here):
        raise KflatsError(
            f"the vocabulary has places outside this {type(model).__name__}", hint="resize the whole model"
        )


def _take(model: nn.Module, layer: FactoredLayer, matrix: Matrix) -> None:
    """Let ``layer`` use ``matrix``, and resize its bias."""
    matrix.__dict__[_PLACES] = layer.matrix.__dict__.get(_PLACES, 1)
    for factor in matrix.parameters():
        mark_initialized(factor)
    bias = layer._parameters.get("bias")
    layer._take(matrix, own=layer.owns_matrix)
    if isinstance(layer, FactoredEmbedding):
        layer.num_embeddings = matrix.shape[0]
    else:
        layer._parameters["bias"] = bias  # the parameters of an owner are now those of the new matrix
        layer.out_features = matrix.shape[0]
    if bias is not None and bias.shape[0] != matrix.shape[0]:
        resized = with_rows(bias.detach().unsqueeze(1), matrix.shape[0]).squeeze(1)
        longer = nn.Parameter(resized, requires_grad=bias.requires_grad)
        for module in model.modules():  # BERT has its bias under two names
            module._parameters.update({key: longer for key, p in module._parameters.items() if p is bias})
    padding = layer.padding_idx if isinstance(layer, FactoredEmbedding) else None
    if padding is not None and padding >= matrix.shape[0]:
        layer.padding_idx = None


_REMOVED = "_kflats_removed_ties"


def swap_(
    model: nn.Module,
    weight: Weight,
    matrix: Matrix,
    *,
    matrix_rows: str = "in_features",
    bias_shift: Tensor | None = None,
    scales: dict[str, float | None] | None = None,
) -> None:
    """Replace every place of ``weight`` by a layer on ``matrix``, in place; the first place owns the factors.

    Padding, embedding scales, biases (the same parameter objects), hooks, device,
    ``requires_grad`` and training mode carry over; transformers' own lists of ties are kept true.

    Args:
        model: any module; transformers models keep working with everything transformers does.
        weight: of this model, from ``find_weight``.
        matrix: of ``weight.shape``; it is adopted, not copied.
        matrix_rows: "out_features" for a linear layer or convolution whose matrix has output neurons as rows (its
            shape is reversed).
        bias_shift: (d,), added to the layer's bias: the error of the factors on the mean input. A layer without
            a bias gets one, which is saved and loaded with it.
        scales: embedding scales by place, for a model on the meta device, where they cannot be read.

    Raises:
        KflatsError: another shape, a DenseMatrix in another orientation than the layer's own table, a model that has
            changed since ``find_weight``, flats in a convolution, a bias for an embedding
            or for a bias that two layers share, a layer that accelerate moves about. The model is then as it was.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> model["words"](torch.tensor([2])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    with Swaps(model) as swaps:
        swaps.swap_(weight, matrix, matrix_rows=matrix_rows, bias_shift=bias_shift, scales=scales)


class Swaps:
    """Several swaps in one model: its weights and the transformers models in it are searched for once.

    At the end of the ``with`` block one more search finds tables that are still used. Inside the block nothing but
    swaps, and new values, may happen to the model.

    Args:
        model: as ``swap_``.
        just_found: nothing but swaps happened to the model since its weights were found: this is then not checked.

    Raises:
        KflatsError: at the end, a table that the model still uses; a swap raises what ``swap_`` raises.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = nn.ModuleDict({name: nn.Linear(9, 4) for name in "ab"})
    >>> with Swaps(model) as swaps:
    ...     for weight in find_weights(model):
    ...         swaps.swap_(weight, LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> type(model["b"]).__name__
    'FactoredLinear'
    """

    def __init__(self, model: nn.Module, *, just_found: bool = False) -> None:
        self.model = model
        self._parts = tuple(pretrained_models(model))
        self._places = None if just_found else {weight.name: weight.places for weight in find_weights(model)}
        self._tables = dict[str, ref[Tensor]]()

    def __enter__(self) -> Swaps:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._check_tables()

    def swap_(
        self,
        weight: Weight,
        matrix: Matrix,
        *,
        matrix_rows: str = "in_features",
        bias_shift: Tensor | None = None,
        scales: dict[str, float | None] | None = None,
    ) -> None:
        """As ``kflats.model.swap.swap_``."""
        if self._places is not None and self._places.get(weight.name) != weight.places:
            find_weight(self.model, weight.name)  # says why there is none
            raise KflatsError(f"the places of {weight.name!r} have changed", hint="find the weight again, then swap")
        _check_swap(weight, matrix, matrix_rows, bias_shift)
        if is_parameter(weight.places[0].role):
            hold_(self.model, weight, matrix, matrix_rows)
        else:
            self._put_layers_(weight, matrix, matrix_rows, bias_shift, scales or {})
        if self._places is not None:
            del self._places[weight.name]

    def _put_layers_(
        self, weight: Weight, matrix: Matrix, rows: str, bias_shift: Tensor | None, scales: dict[str, float | None]
    ) -> None:
        model, group = self.model, [place.name for place in weight.places]
        old = [module for name in group if (module := submodule(model, name)) is not None]
        if len(old) < len(group):
            find_weight(model, weight.name)  # says that it is gone, with a layer around it
        if moved := [name for name, module in zip(group, old, strict=True) if hasattr(module, "_hf_hook")]:
            raise KflatsError(
                f"{moved[0]!r} is managed by accelerate, which moves its tensors while the model runs",
                hint="load it on one device, compress, save, and then load the small model with that device_map",
            )
        table = cast(nn.Parameter, old[0]._parameters["weight"])
        if matrix.weight.device != table.device:
            matrix.to(table.device)
        shared = [] if bias_shift is None else _holders_of_bias(model, weight.name, old[0])
        layers = _factored_layers_for(weight, old, matrix, rows, scales)
        for factor in matrix.floats().values():
            factor.requires_grad_(table.requires_grad)
        if bias_shift is not None:
            _shift_bias_(cast(FactoredLinear | FactoredConv2d, layers[0]), bias_shift, table, shared)

        _untie_(self._parts, group)  # while the dense parameters are there: transformers looks their names up
        for name, layer in zip(group, layers, strict=True):
            _put(model, name, layer)
        for module in old:
            # restore_ puts the shell back. Without a table it takes no memory and is no second place of the weight.
            module._parameters["weight"] = None
        self._tables[weight.name] = ref(table)
        if missing := [name for name, layer in zip(group, layers, strict=True) if submodule(model, name) is not layer]:
            raise _irreplaceable(weight.name, missing[0])
        _guard_resizing_(self._parts, layers, matrix)

    def _check_tables(self) -> None:
        kept = {id(table): name for name, held in self._tables.items() if (table := held()) is not None}
        for name, value in self.model.named_parameters(remove_duplicate=False) if kept else ():
            if id(value) in kept:
                raise _irreplaceable(kept[id(value)], name)


def restore_(model: nn.Module) -> None:
    """Put the dense layers back, in place: every factored layer becomes dense, with ``matrix.dense()`` as its table.

    Ties are tied again. The original values do not return: the dense model computes the same as the factored one,
    biases included. Only a bias that a layer gained is removed, because the architecture has no place for it; the
    outputs move by that constant. The description of factors leaves transformers' configs, so that ``save_pretrained``
    writes an ordinary folder.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> restore_(model)
    >>> model
    ModuleDict(
      (words): Embedding(9, 4)
    )
    """
    computed = compute_dtype(model)
    tables: dict[int, nn.Parameter] = {}
    shells: dict[int, nn.Module] = {}
    for name, layer in list(factored_layers(model)):
        matrix = layer.matrix
        if id(matrix) not in tables:
            # Factors of a smaller type are widened before they are multiplied, as the layer does.
            dtype = layer.table_dtype(computed)
            wide = matrix if matrix.weight.dtype == dtype else copy.deepcopy(matrix).to(dtype)
            with torch.no_grad():
                tables[id(matrix)] = nn.Parameter(wide.dense(), requires_grad=matrix.weight.requires_grad)
        if id(layer) not in shells:
            shells[id(layer)] = _dense_layer_for(name, layer, tables[id(matrix)])
        _put(model, name, shells[id(layer)])
    recall_ties_(model)
    for _, part in pretrained_models(model):
        if is_kflats_config(getattr(part.config, "quantization_config", None)):
            del part.config.quantization_config
        for module in part.modules():
            module.__dict__.pop("_kflats_held", None)  # the values stay
        for name in ("save_pretrained", *(method.__name__ for method in _METHODS)):  # see kflats.io.saving
            part.__dict__.pop(name, None)


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """After an exception inside, every module and config of ``model`` holds the same objects as before.

    Several swaps that belong together need this: the first is undone when the second is refused.

    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> try:
    ...     with unchanged_on_error(model):
    ...         _put(model, "words", nn.Identity())
    ...         raise RuntimeError
    ... except RuntimeError:
    ...     print(model["words"])
    Embedding(9, 4)
    """
    modules = dict.fromkeys(model.modules())
    owners: dict[int, Any] = {id(module): module for module in modules}
    owners |= {id(c): c for m in modules if hasattr(c := m.__dict__.get("config"), "__dict__")}
    before = [
        (owner, dict(vars(owner)), {k: dict(v) for k, v in vars(owner).items() if isinstance(v, dict)})
        for owner in owners.values()
    ]
    try:
        yield
    except BaseException:
        for owner, attributes, tables in before:
            vars(owner).clear()
            vars(owner).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)
        raise


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Register ``layer`` at ``name``. Never ``setattr(model, "a.b", ...)``: that makes a ghost child."""
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = layer


def _check_swap(weight: Weight, matrix: Matrix, matrix_rows: str, bias_shift: Tensor | None) -> None:
    """Refuse a matrix or a shift that does not fit."""
    if weight.places[0].role == "embedding" and matrix_rows == "out_features":
        raise KflatsError(f"outputs as rows are not supported for the embedding {weight.name!r}", hint="inputs as rows")
    if bias_shift is not None:
        if weight.places[0].role == "embedding" or tuple(bias_shift.shape) != weight.shape[1:]:
            raise KflatsError(
                f"a bias shift of shape {tuple(bias_shift.shape)} does not fit {weight.name!r} of shape {weight.shape}",
                cause="a bias has a number for each output, and an embedding has no bias",
            )
        if not bias_shift.is_meta and not bool(torch.isfinite(bias_shift).all()):
            raise KflatsError(
                f"the bias shift of {weight.name!r} is not finite", cause="infinite or NaN values in the data"
            )
    if matrix.shape != (weight.shape if matrix_rows == "in_features" else weight.shape[::-1]):
        raise KflatsError(
            f"a matrix of shape {matrix.shape} cannot replace {weight.name!r} of shape {weight.shape}",
            cause="the matrix was made for another weight, or in the other orientation",
        )
    if isinstance(matrix, DenseMatrix) and matrix_rows != own_matrix_rows(weight):
        raise KflatsError(
            f"the dense matrix of {weight.name!r} cannot have {matrix_rows} as rows",
            cause=f"the layer's own table has {own_matrix_rows(weight)}, and a program without kflats would load it",
            hint=f"the transpose of the matrix, with {own_matrix_rows(weight)} as rows",
        )


def _irreplaceable(weight: str, used: str) -> KflatsError:
    return KflatsError(
        f"the dense table of {weight!r} cannot be replaced",
        cause=f"the model still uses it as {used!r}, which no layer holds, or overrides how it holds its layers",
        hint="leave this weight dense",
    )


def _factored_layers_for(
    weight: Weight, old: Sequence[nn.Module], matrix: Matrix, rows: str, scales: dict[str, float | None]
) -> list[FactoredLayer]:
    """A layer for every place, not yet in the model. A module with two places gets one layer."""
    by_module: dict[int, FactoredLayer] = {}
    layers = []
    for place, module in zip(weight.places, old, strict=True):
        if id(module) not in by_module:
            layer = _new_layer(place, module, matrix, rows, scales.get(place.name), own=not by_module)
            bias = getattr(module, "bias", None)
            if not isinstance(layer, FactoredEmbedding) and bias is not None:
                layer.bias = bias  # the parameter itself: it may be tied
            hooks = ("_forward_", "_backward_", "_is_full_backward_hook")
            layer.__dict__.update({name: held for name, held in vars(module).items() if name.startswith(hooks)})
            if layer.owns_matrix and isinstance(matrix, CodedMatrix):
                layer.register_load_state_dict_pre_hook(_decode_stream)  # type: ignore[no-untyped-call]
            layer.train(module.training)
            layer.__dict__["_shell"] = module
            # With this mark transformers does not call ``_init_weights``, which would overwrite factors like a table.
            layer.__dict__["_is_hf_initialized"] = True
            if not matrix.weight.is_meta:
                _mark_initialized(layer)
            by_module[id(module)] = layer
        layers.append(by_module[id(module)])
    return layers


def _holders_of_bias(model: nn.Module, name: str, layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every other module that has ``layer``'s bias (BERT lists its decoder's bias twice), with the bias' name there."""
    bias = layer._parameters.get("bias")
    if bias is None:
        return []
    holders = [(m, key) for m in model.modules() if m is not layer for key, p in m._parameters.items() if p is bias]
    if any(holder._parameters.get("weight") is not None for holder, _ in holders):
        raise KflatsError(
            f"the bias of {name!r} cannot be shifted",
            cause="another layer has the same bias, and would be shifted, too",
        )
    return holders


def _shift_bias_(
    layer: FactoredLinear | FactoredConv2d, shift: Tensor, table: nn.Parameter, shared: list[tuple[nn.Module, str]]
) -> None:
    """Give ``layer`` a new bias. The old parameter stays as it is, so that the model can be put back after an error."""
    old = layer.bias
    layer.gained_bias = old is None
    like = table if old is None else old
    shift = shift.detach().to(like.device, like.dtype)
    layer.bias = nn.Parameter(shift.clone() if old is None else old.detach() + shift, requires_grad=like.requires_grad)
    if not layer.bias.is_meta:
        _mark_initialized(layer)
    for holder, key in shared:
        holder._parameters[key] = layer.bias


def _dense_layer_for(name: str, layer: FactoredLayer, table: nn.Parameter) -> nn.Module:
    """The module that ``layer`` replaced, with a table again."""
    shell = layer.__dict__.get("_shell")
    if not isinstance(shell, nn.Module):
        raise KflatsError(f"{name!r} cannot be made dense", cause="kflats did not put this layer into the model")
    layer.give_back_(shell, table)
    shell.train(layer.training)
    return shell


def _new_layer(
    place: WeightUse, module: nn.Module, matrix: Matrix, rows: str, scale: float | None, *, own: bool
) -> FactoredLayer:
    if isinstance(module, nn.Embedding):
        own_scale = embedding_scale(module)
        if own_scale is not None and math.isnan(own_scale):
            if scale is None:
                raise KflatsError(
                    f"the scale of the embedding {place.name!r} is unknown", cause="the model is on the meta device"
                )
            own_scale = scale
        out = module.weight.dtype
        return FactoredEmbedding(
            matrix,
            padding_idx=module.padding_idx,
            scale=own_scale,
            own=own,
            dtype=None if out == matrix.weight.dtype else out,
        )
    if place.role == "head":
        return FactoredHead(matrix)
    if isinstance(module, nn.Conv2d):
        return FactoredConv2d(matrix, module, matrix_rows=rows)
    return FactoredLinear(matrix, matrix_rows=rows)


def _decode_stream(layer: FactoredLayer, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` read the state of a file, which holds a stream in place of the integers."""
    stream, matrix = state.get(prefix + "codes"), cast(CodedMatrix, layer.matrix)
    if stream is not None and prefix + "bits" not in state:
        state.update({prefix + name: value for name, value in decode(stream, matrix.geometry).items()})


def _mark_initialized(layer: nn.Module) -> None:
    """Mark fitted factors like loaded ones: transformers' ``init_weights`` then leaves them as they are."""
    for value in layer.parameters():
        mark_initialized(value)


def untie_(model: nn.Module, places: Iterable[str]) -> None:
    """Take the tables of ``places`` out of every list of ties; ties of biases stay."""
    _untie_(tuple(pretrained_models(model)), places)


def _untie_(parts: _Parts, places: Iterable[str]) -> None:
    group = set(places)
    for path, part in parts:
        named = _declared(part)
        kept = _without(named, path, group)
        if len(kept) < len(named):
            removed = {target: source for target, source in named.items() if target not in kept}
            part.__dict__.setdefault(_REMOVED, {}).update(removed)
            part._tied_weights_keys = kept
        # A parent's full list also names its children's ties.
        # A part whose __init__ does not call transformers' post_init has no list.
        part.all_tied_weights_keys = _without(getattr(part, "all_tied_weights_keys", {}), path, group)


def recall_ties_(model: nn.Module) -> None:
    """Undo every ``untie_``: the class's own list is valid again, and ties that hold are listed again."""
    for path, part in pretrained_models(model):
        removed = part.__dict__.pop(_REMOVED, None)
        if removed is None:
            continue
        part.__dict__.pop("_tied_weights_keys", None)
        holds = {t: s for t, s in removed.items() if parameter(part, t) is parameter(part, s)}
        for outer_path, outer in pretrained_models(model):
            if path == outer_path or not outer_path or path.startswith(outer_path + "."):
                inner = path[len(outer_path) :].removeprefix(".")
                outer.all_tied_weights_keys.update({_absolute(inner, t): _absolute(inner, s) for t, s in holds.items()})


def untied(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The layers, target and source, of every tie that ``untie_`` took out of the lists of ``model``."""
    removed = [
        (path, pair) for path, part in pretrained_models(model) for pair in part.__dict__.get(_REMOVED, {}).items()
    ]
    return tuple(
        (_absolute(path, target).removesuffix(".weight"), _absolute(path, source).removesuffix(".weight"))
        for path, (target, source) in removed
    )


def _declared(part: Any) -> dict[str, str]:
    """The ties that ``part`` declares for itself, by parameter name; none where its config says so."""
    if not hasattr(part, "get_expanded_tied_weights_keys"):
        raise KflatsError(
            f"{type(part).__name__} does not say which of its weights are tied", hint="pip install 'transformers>=5.17'"
        )
    ties: dict[str, str] = part.get_expanded_tied_weights_keys(all_submodels=False)
    return ties


def _without(ties: dict[str, str], path: str, group: set[str]) -> dict[str, str]:
    """``ties`` less those that assign a table of ``group`` or assign to one."""
    tables = {f"{name}.weight" for name in group}
    return {t: s for t, s in ties.items() if not tables & {_absolute(path, t), _absolute(path, s)}}


def _absolute(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
