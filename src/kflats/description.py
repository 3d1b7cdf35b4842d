"""The JSON that says which layers of a model are factored, and how: written beside the factors, checked when read.

    {"quant_method": "kflats", "format_version": 1, "dtype": "float32", "modules": {
        "embeddings.word_embeddings": {
            "matrix": {"kind": "flats", ...}, "dtype": "float32", "rows": "inputs", "untied": [],
            "places": [{"name": "embeddings.word_embeddings", "role": "embedding", "padding_idx": 0, "scale": null}]}}}

``untied`` names places that the model's class would tie, but that have a table of their own.
``dtype`` is the type the model computes in, a module's ``dtype`` the type its factors are stored in. The first
place of a module owns the factors and gives it its name. A transformers folder keeps this in ``config.json``
as ``quantization_config``; a plain torch folder in the header of ``model.safetensors``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kflats.errors import KflatsError
from kflats.nn.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.nn.matrix import Matrix, matrix_from_spec
from kflats.places import FactoredLayer, Weight, factored_layers, find_weights, spellings, submodule
from kflats.ties import untied_places

QUANT_METHOD = "kflats"
FORMAT_VERSION = 1

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # a module path; never a file path
_ROLES = ("embedding", "head", "linear", "conv1d")
_DAMAGED = "a damaged or hand-edited file"


@dataclass(frozen=True)
class DescribedPlace:
    """A place as written: its padding row and output scale where it is an embedding."""

    name: str
    role: str
    padding_idx: int | None
    scale: float | None


@dataclass(frozen=True)
class Module:
    """One factored weight as written. ``empty`` is its matrix without memory (meta device)."""

    name: str
    places: tuple[DescribedPlace, ...]
    untied: tuple[str, ...]
    empty: Matrix
    dtype: torch.dtype
    rows: str


@dataclass(frozen=True)
class Description:
    """All that a folder says about its factored layers, checked."""

    dtype: torch.dtype
    modules: tuple[Module, ...]


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The description of ``model``'s factored layers, JSON-able, or None where nothing is factored.

    Raises:
        KflatsError: a place whose owner is outside ``model``, or factors that have the dense table's
            shape (a program without kflats would load them as if they were the table).
    """
    modules: dict[str, dict[str, Any]] = {}
    owners: dict[int, str] = {}
    for name, layer in factored_layers(model):
        matrix = layer.matrix
        if layer.owns_matrix and id(matrix) not in owners:
            owners[id(matrix)] = name
            rows = layer.row_side if isinstance(layer, FactoredLinear) else "inputs"
            _check_collision(name, layer)
            modules[name] = {"matrix": matrix.spec(), "dtype": _name(matrix.weight.dtype), "rows": rows, "places": []}
        if id(matrix) not in owners:
            raise KflatsError(
                f"{name!r} borrows its matrix from a layer outside this {type(model).__name__}",
                cause="a part of a larger model is being saved",
                hint="save the whole model",
            )
        modules[owners[id(matrix)]]["places"].append(_described(name, layer))
    if not modules:
        return None
    for entry in modules.values():
        entry["untied"] = list(untied_places(model, [place["name"] for place in entry["places"]]))
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "dtype": _name(_compute_dtype(model)),
        "modules": modules,
    }


def read_description(data: object) -> Description:
    """A ``Description`` from parsed JSON; nothing is allocated and every size is checked.

    Raises:
        KflatsError: a newer version, missing or unknown fields, names that are no module paths,
            impossible sizes.
    """
    if not isinstance(data, dict) or data.get("quant_method") != QUANT_METHOD:
        raise KflatsError("this is not a description of kflats layers", cause=_DAMAGED)
    version = data.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise KflatsError(
            f"kflats layers of format version {version!r} are unknown here (this kflats reads {FORMAT_VERSION})",
            cause="a file of a newer kflats",
            hint="pip install -U kflats",
        )
    top = _fields(data, {"quant_method", "format_version", "dtype", "modules"}, "the description")
    if not isinstance(top["modules"], dict):
        raise KflatsError("the list of factored modules is not an object", cause=_DAMAGED)
    modules = tuple(_read_module(name, value) for name, value in top["modules"].items())
    names = [place.name for module in modules for place in module.places]
    if len(set(names)) != len(names):
        raise KflatsError("two factored modules claim the same place", cause=_DAMAGED)
    return Description(_dtype(top["dtype"]), modules)


def match(model: nn.Module, description: Description, *, strict: bool) -> list[tuple[Weight, Module]]:
    """Each described module with the weight of ``model`` it replaces; a base model's names match its heads' and back.

    Args:
        model: still dense.
        description: what the file says.
        strict: every described place must be there, and no other place may share the weight. Otherwise
            places that ``model`` lacks (a head) are passed over, and heads it ties in addition join.

    Raises:
        KflatsError: another shape, a tie that one side has and the other lacks, a layer of another kind.
    """
    weights = {place.name: weight for weight in find_weights(model) for place in weight.places}
    found = []
    for module in description.modules:
        name = _resolve(model, module.name, weights)
        if name is None:
            if strict or any(submodule(model, s) is not None for s in spellings(model, module.name)):
                raise KflatsError(
                    f"the file has a factored layer {module.name!r} that {type(model).__name__} cannot take",
                    cause="the model class or its config is not the one that was saved",
                )
            continue
        weight = weights[name]
        shape = module.empty.shape if module.rows == "inputs" else module.empty.shape[::-1]
        if shape != weight.shape:
            raise KflatsError(
                f"{module.name!r} is {shape[0]} x {shape[1]} in the file, but {weight.shape[0]} x {weight.shape[1]} "
                "in the model",
                cause="the config was edited, or is another model's",
            )
        _check_places(model, module, weight, strict=strict)
        found.append((weight, module))
    if len({weight.name for weight, _ in found}) != len(found):
        raise KflatsError("two factored modules of the file are one weight of the model", cause=_DAMAGED)
    return found


def scales(model: nn.Module, module: Module) -> dict[str, float | None]:
    """Embedding scales by place, under both spellings of its name."""
    return {name: place.scale for place in module.places for name in spellings(model, place.name)}


def stored_dtype(description: Description, module: Module, dtype: torch.dtype) -> torch.dtype:
    """The type for a module's factors in a model of type ``dtype``: they follow the model unless they were
    stored in a type of their own."""
    return dtype if module.dtype == description.dtype else module.dtype


def redescribe_(model: Any, name: str, layer: FactoredLayer) -> None:
    """Bring the config's description of one owning layer up to date (its matrix has been resized)."""
    known = getattr(model.config, "quantization_config", None)
    if isinstance(known, dict) and known.get("quant_method") == QUANT_METHOD:
        for spelling in spellings(model, name):
            if spelling in known["modules"]:
                known["modules"][spelling]["matrix"] = layer.matrix.spec()


def _described(name: str, layer: FactoredLayer) -> dict[str, Any]:
    padding, scale = (layer.padding_idx, layer.scale) if isinstance(layer, FactoredEmbedding) else (None, None)
    return {"name": name, "role": _layer_role(layer), "padding_idx": padding, "scale": scale}


def _layer_role(layer: FactoredLayer) -> str:
    if isinstance(layer, FactoredEmbedding):
        return "embedding"
    if isinstance(layer, FactoredHead):
        return "head"
    shell = layer.__dict__.get("_shell")
    return "linear" if shell is None or type(shell) is nn.Linear else "conv1d"


def _check_collision(name: str, layer: FactoredLayer) -> None:
    n, d = layer.matrix.shape
    # Conv1D keeps M, torch's linear layers M.T; with output neurons as rows M is M.T already.
    turned = isinstance(layer, FactoredLinear) and (_layer_role(layer) == "linear") == (layer.row_side == "inputs")
    dense = (d, n) if turned else (n, d)
    if tuple(layer.matrix.weight.shape) == dense:
        raise KflatsError(
            f"the factors of {name!r} are no smaller than the table itself",
            cause="its rank is the full dimension",
            hint="a smaller budget, or leave this weight dense (kflats.surgery.restore_)",
        )


def _compute_dtype(model: nn.Module) -> torch.dtype:
    for _, layer in factored_layers(model):
        if isinstance(layer, FactoredEmbedding) and layer.out_dtype is not None:
            return layer.out_dtype
    factored = {id(p) for _, layer in factored_layers(model) for p in layer.matrix.parameters()}
    own: torch.dtype | None = None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            if id(parameter) not in factored:
                return parameter.dtype
            own = own or parameter.dtype
    return own or torch.get_default_dtype()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise KflatsError(f"{name!r} is not a floating-point type", cause=_DAMAGED)
    return found


def _fields(data: object, expected: set[str], where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) != expected:
        there = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise KflatsError(f"{where} must have the fields {sorted(expected)}, not {there}", cause=_DAMAGED)
    return data


def _read_module(name: object, data: object) -> Module:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise KflatsError(f"{str(name)[:80]!r} is not the path of a module", cause=_DAMAGED)
    fields = _fields(data, {"matrix", "dtype", "rows", "places", "untied"}, f"module {name!r}")
    if fields["rows"] not in ("inputs", "outputs"):
        raise KflatsError(f"module {name!r} has rows={fields['rows']!r}", cause=_DAMAGED)
    if not isinstance(fields["places"], list) or not fields["places"]:
        raise KflatsError(f"module {name!r} names no places", cause=_DAMAGED)
    if not isinstance(fields["matrix"], dict):
        raise KflatsError(f"module {name!r} has no matrix", cause=_DAMAGED)
    dtype = _dtype(fields["dtype"])
    empty = matrix_from_spec(fields["matrix"], dtype=dtype)
    n, d = empty.shape
    if empty.num_values > 4 * n * d + 2**20:
        raise KflatsError(f"module {name!r} claims {empty.num_values} numbers for a {n} x {d} table", cause=_DAMAGED)
    places = tuple(_read_place(place, n) for place in fields["places"])
    if places[0].name != name or len({place.name for place in places}) != len(places):
        raise KflatsError(f"module {name!r} does not own its own places", cause=_DAMAGED)
    untied = fields["untied"]
    if not isinstance(untied, list) or not all(isinstance(n, str) and _NAME.fullmatch(n) for n in untied):
        raise KflatsError(f"module {name!r} has an unreadable list of untied places", cause=_DAMAGED)
    return Module(name, places, tuple(untied), empty, dtype, fields["rows"])


def _read_place(data: object, n: int) -> DescribedPlace:
    fields = _fields(data, {"name", "role", "padding_idx", "scale"}, "a place")
    name, role, padding, scale = (fields[key] for key in ("name", "role", "padding_idx", "scale"))
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise KflatsError(f"{str(name)[:80]!r} is not the path of a module", cause=_DAMAGED)
    if role not in _ROLES:
        raise KflatsError(f"place {name!r} has the unknown role {role!r}", cause="a file of a newer kflats")
    if padding is not None and (isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < n):
        raise KflatsError(f"place {name!r} has padding row {padding!r} of {n}", cause=_DAMAGED)
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise KflatsError(f"place {name!r} has scale {scale!r}", cause=_DAMAGED)
    return DescribedPlace(name, role, padding, None if scale is None else float(scale))


def _resolve(model: nn.Module, name: str, weights: dict[str, Weight]) -> str | None:
    return next((spelling for spelling in spellings(model, name) if spelling in weights), None)


def _check_places(model: nn.Module, module: Module, weight: Weight, *, strict: bool) -> None:
    here = {place.name for place in weight.places}
    for place in module.places:
        names = spellings(model, place.name)
        if not here & set(names) and (strict or any(submodule(model, name) is not None for name in names)):
            raise KflatsError(
                f"the file ties {place.name!r} to {module.name!r}, but this {type(model).__name__} does not",
                cause="the model was built with tie_word_embeddings=False",
                hint="load it with the config it was saved with",
            )
    known = {name for place in module.places for name in spellings(model, place.name)}
    if strict and (more := here - known):
        raise KflatsError(
            f"this {type(model).__name__} ties {sorted(more)[0]!r} to {module.name!r}, but the file does not",
            cause="the model was built with tie_word_embeddings=True",
            hint="load it with the config it was saved with",
        )
