"""The JSON that says which layers of a model are factored: its writer, its reader, and the weights that it is about.

    {"quant_method": "kflats", "format_version": 1, "dtype": "float32", "modules": {
        "embeddings.word_embeddings": {
            "matrix": {"kind": "flats", ...}, "dtype": "float32", "matrix_rows": "in_features", "untied": [],
            "places": [{"name": "embeddings.word_embeddings", "role": "embedding", "padding_idx": 0, "scale": null}]}}}

A coded matrix has a ``checksum`` of its integers, and a ``stream`` ({"version": 1, "bytes": ..., "checksum": ...})
where the file holds them entropy coded. ``forms``, beside ``modules``, says what each run-time form loses, once that
was measured.
``untied`` names places that the model's class would tie, but that have a table of their own. The model computes in the
type ``dtype``; a module's ``dtype`` is the type its factors are stored in. The first place of a module owns the factors
and gives the module its name. A transformers folder keeps this in ``config.json`` as ``quantization_config``; a plain
torch folder keeps it in the header of ``model.safetensors``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from kflats.codecs.streamed import StreamedMatrix
from kflats.codecs.streams import STREAM_VERSION, expand_, expect_, stream_checksum
from kflats.common.dtypes import dtype_name, dtype_of
from kflats.common.errors import KflatsError
from kflats.common.run_forms import FormLoss, RunForm
from kflats.common.schema import Json, JsonObject, check_version, decode
from kflats.common.torch_settings import one_thread
from kflats.matrices.layers import CONVOLVED
from kflats.matrices.registry import CodedMatrix, DenseMatrix, Matrix, matrix_from_spec
from kflats.model.parameters import begin_loading_
from kflats.model.run_as import LOSSES
from kflats.model.swap import Swaps, untied
from kflats.model.weights import (
    QUANT_METHOD,
    FactoredLayer,
    Weight,
    compute_dtype,
    factored_layers,
    find_weights,
    held_matrices,
    is_kflats_config,
    is_parameter,
    parameter,
    spellings,
    submodule,
    with_parameter_role,
)

FORMAT_VERSION = 1
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # a module path; never a file path
DAMAGED = "a damaged or hand-edited file"
LATE = 2**25
"""Numbers of an embedding from which on its codes are decoded late. For fewer it is better to wait once than in each of
the first calls (``benchmarks/results/latency_late.md``)."""


@dataclass(frozen=True)
class DescribedPlace:
    """A place as written. An embedding has its padding row and output scale, a convolution its ``kernel`` (inputs,
    height, width). ``gained_bias``: whether the layer had no bias before. ``run_as``: its run-time form."""

    name: str
    role: Literal["embedding", "head", "linear", "conv1d", "conv2d", "parameter", "experts"]
    padding_idx: int | None
    scale: float | None
    kernel: tuple[int, ...] | None = None
    gained_bias: bool = False
    run_as: RunForm = "dense"


@dataclass(frozen=True)
class _Stream:
    """``checksum``: as ``stream_checksum``; absent in older files, whose streams are decoded to be checked."""

    version: int
    bytes: int
    checksum: int | None = None


@dataclass(frozen=True)
class Module:
    """One factored weight as written, checked. ``empty`` is its matrix without memory (meta device), with the tensors
    that the file stores; ``stream`` stands in place of its integers."""

    matrix: object
    dtype: str
    matrix_rows: Literal["in_features", "out_features"]
    places: tuple[DescribedPlace, ...]
    untied: tuple[str, ...]
    checksum: int | None = None
    stream: _Stream | None = None
    empty: Matrix = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for path in (*self.untied, *(place.name for place in self.places)):
            if _NAME.fullmatch(path) is None:
                raise KflatsError(f"{path[:80]!r} is not the path of a module", cause=DAMAGED)
        empty = matrix_from_spec(self.matrix, dtype=_dtype(self.dtype))
        (n, d), coded = empty.shape, isinstance(empty, CodedMatrix)
        # A block that does not shrink is stored as it is: a stream is never much longer than codes and their layout.
        most = 2**20 + 2 * sum(t.numel() * t.element_size() for t in empty.tensors().values())
        if empty.num_values > 4 * n * d + 2**20:
            problem = f"claims {empty.num_values} numbers for a {n} x {d} table"
        elif self.matrix_rows == "out_features" and any(place.role in ("embedding", "head") for place in self.places):
            problem = "is an embedding whose matrix has outputs as rows"
        elif any(place.kernel is not None for place in self.places) and empty.kind not in CONVOLVED:
            problem = f"is a convolution with a matrix of kind {empty.kind!r}"
        elif (self.checksum is None) == coded:
            problem = f"has the checksum {self.checksum} and a matrix of kind {empty.kind!r}"
        elif self.stream is not None and not (coded and 0 < self.stream.bytes <= most):
            problem = f"claims a stream of {self.stream.bytes} bytes for a matrix of kind {empty.kind!r}"
        else:
            problem = next(filter(None, (_problem(place, n) for place in self.places)), "")
        if problem:
            raise KflatsError(f"the module {self.name!r} {problem}", cause=DAMAGED)
        object.__setattr__(self, "empty", self._expecting(empty))

    @property
    def name(self) -> str:
        """The first place."""
        return self.places[0].name if self.places else ""

    @property
    def gained_bias(self) -> bool:
        """Whether the layer has a bias that the model's class does not give it."""
        return any(place.gained_bias for place in self.places)

    def new(self, dtype: torch.dtype, device: torch.device | str = "meta", *, late_from: int | None = None) -> Matrix:
        """An empty matrix to load the file's tensors into; ``finish_`` must follow.

        Args:
            late_from: numbers of an embedding from which on codes are decoded late; by default ``LATE``.
        """
        known = self.places[0].role == "embedding" and self.stream is not None and self.stream.checksum is not None
        late = known and math.prod(self.empty.shape) >= (LATE if late_from is None else late_from)
        coded = StreamedMatrix if late else CodedMatrix
        return self._expecting(matrix_from_spec(self.matrix, dtype=dtype, device=device, coded=coded))

    def finish_(self, matrix: Matrix) -> None:
        """Make ``matrix``, filled with the file's tensors, ready for use. The codes of a long embedding on the CPU are
        decoded when their rows are read (``StreamedMatrix``), after the stream was compared with its checksum.

        Raises:
            KflatsError: its integers are damaged.
        """
        if isinstance(matrix, StreamedMatrix) and matrix.streamed and (codes := matrix.get_buffer("codes")).is_cpu:
            assert self.checksum is not None
            assert self.stream is not None
            if stream_checksum(codes, self.checksum) != self.stream.checksum:
                raise self._damaged()
            matrix.open_(self.checksum)
            return
        with one_thread():  # integers are decoded block by block
            if isinstance(matrix, CodedMatrix) and matrix.streamed:
                expand_(matrix)
            else:
                matrix.refresh()
            whole = not isinstance(matrix, CodedMatrix) or matrix.checksum() == self.checksum
        if not whole:
            raise self._damaged()

    def _damaged(self) -> KflatsError:
        return KflatsError(
            f"the codes of {self.name!r} are damaged: their checksum differs",
            hint="restore the file, or compress again",
        )

    def _expecting(self, matrix: Matrix) -> Matrix:
        if self.stream is not None and isinstance(matrix, CodedMatrix):
            check_version(self.stream.version, STREAM_VERSION, "codes")
            expect_(matrix, self.stream.bytes)
        return matrix


@dataclass(frozen=True)
class Description:
    """The factored layers of a folder, checked."""

    quant_method: str
    format_version: int
    dtype: str
    modules: dict[str, Module]
    forms: tuple[FormLoss, ...] = ()

    def __post_init__(self) -> None:
        _dtype(self.dtype)
        names = [place.name for module in self.modules.values() for place in module.places]
        if len(set(names)) != len(names):
            raise KflatsError("two factored modules claim the same place", cause=DAMAGED)
        for name, module in self.modules.items():
            if name != module.name or not name:
                raise KflatsError(f"the module {name!r} is not the first of its own places", cause=DAMAGED)

    def stored_dtype(self, module: Module, dtype: torch.dtype) -> torch.dtype:
        """The type for a module's factors in a model of type ``dtype``: the type of the model, unless the file stores
        the factors in a type of their own."""
        return dtype if module.dtype == self.dtype else _dtype(module.dtype)


def read_description(data: Json) -> Description:
    """A ``Description`` from parsed JSON; nothing is allocated and every size is checked.

    Raises:
        KflatsError: a newer version, missing or unknown fields, names that are no module paths,
            impossible sizes.
    """
    if not isinstance(data, dict) or data.get("quant_method") != QUANT_METHOD:
        raise KflatsError("this is not a description of kflats layers", cause=DAMAGED)
    check_version(data.get("format_version"), FORMAT_VERSION, "kflats layers")
    description: Description = decode(Description, data, "description")
    return description


def describe(model: nn.Module, *, parameters: bool = True) -> JsonObject | None:
    """The description of ``model``'s factored layers, JSON-able, or None where nothing is factored.

    Args:
        parameters: also of parameters that are dense in memory, and a matrix in files.

    Raises:
        KflatsError: a place whose owner is outside ``model``, or factors of the dense table's shape (a program without
            kflats would load them as if they were the table).
    """
    modules: dict[str, JsonObject] = {}
    places: dict[str, list[JsonObject]] = {}
    owners: dict[int, str] = {}
    for name, layer in factored_layers(model):
        matrix = layer.matrix
        if layer.owns_matrix and id(matrix) not in owners:
            owners[id(matrix)] = name
            _check_collision(name, layer)
            modules[name] = {
                "matrix": matrix.spec(),
                "dtype": dtype_name(matrix.weight.dtype),
                "matrix_rows": layer.matrix_rows,
                "places": places.setdefault(name, []),
            }
            if isinstance(matrix, CodedMatrix):
                modules[name]["checksum"] = matrix.checksum()
        if id(matrix) not in owners:
            raise KflatsError(
                f"{name!r} borrows its matrix from a layer outside this {type(model).__name__}",
                hint="save the whole model",
            )
        places[owners[id(matrix)]].append({"name": name, **layer.settings()})
    for name, held in held_matrices(model) if parameters else ():
        place: JsonObject = {"name": name, "role": held.role, "padding_idx": None, "scale": None}
        modules[name] = {
            "matrix": held.matrix.spec(),
            "dtype": dtype_name(held.matrix.weight.dtype),
            "matrix_rows": held.matrix_rows,
            "places": places.setdefault(name, [place]),
        }
        if isinstance(held.matrix, CodedMatrix):
            modules[name]["checksum"] = held.matrix.checksum()
    if not modules:
        return None
    ties = untied(model)
    for name, entry in modules.items():
        # Targets of ties that the model's class declares with one of these places, but that do not hold: T5's head,
        # wherever its checkpoint has a table for it, whatever the config says.
        here = {place["name"] for place in places[name]}
        entry["untied"] = tuple(sorted({target for target, source in ties if (target in here) != (source in here)}))
    known = getattr(getattr(model, "config", None), "quantization_config", None)
    losses = {LOSSES: known[LOSSES]} if is_kflats_config(known) and LOSSES in known else {}
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "dtype": dtype_name(compute_dtype(model)),
        "modules": modules,
        **losses,
    }


def match(model: nn.Module, description: Description, *, strict: bool) -> list[tuple[Weight, Module]]:
    """Each described module with the weight of ``model`` it replaces, whose name may lack the base model's prefix.

    Args:
        model: still dense.
        description: of the file.
        strict: the model must have every described place, and no other place may share the weight. Otherwise
            described places that ``model`` lacks (a head) are passed over, and a head that only ``model`` ties joins.

    Raises:
        KflatsError: another shape, a tie that only the file or only the model has, a layer of another kind.
    """
    weights = {place.name: weight for weight in find_weights(model) for place in weight.places}
    matches = []
    for module in description.modules.values():
        name = next((s for s in spellings(model, module.name) if s in weights), None)
        if name is None:
            there = [submodule(model, s) for s in spellings(model, module.name)]
            if any(isinstance(layer, FactoredLayer) for layer in there):
                raise KflatsError(
                    f"{module.name!r} is factored already, and a file is loaded into dense layers",
                    cause="the model was compressed, or the file loaded before",
                    hint="a newly built model",
                )
            if strict or any(layer is not None for layer in there):
                raise KflatsError(
                    f"the file has a factored layer {module.name!r} that {type(model).__name__} cannot take",
                    cause="the model class or its config is not the one that was saved",
                    hint="load the folder with the class that its config names",
                )
            continue
        weight = weights[name]
        if weight.places[0].role == "experts" and module.places[0].role == "parameter":  # an earlier version's file
            weight = with_parameter_role(model, weight)
        if difference := _difference(model, module, weight):
            cause = "the config was edited, or belongs to another model"
            hint = "restore the folder, or compress again"
            raise KflatsError(f"{module.name!r} {difference}", cause=cause, hint=hint)
        _check_places(model, module, weight, strict=strict)
        matches.append((weight, module))
    if len({weight.name for weight, _ in matches}) != len(matches):
        raise KflatsError("two factored modules of the file are one weight of the model", cause=DAMAGED)
    return matches


def swap_described_(swaps: Swaps, weight: Weight, module: Module, matrix: Matrix) -> None:
    """Swap ``matrix`` in for ``weight`` as ``module`` describes it; a bias that the layer gained starts at zero."""
    model = swaps.model
    if is_parameter(module.places[0].role):
        begin_loading_(model, weight, matrix, module.matrix_rows)
        return
    scales = {name: place.scale for place in module.places for name in spellings(model, place.name)}
    table, bias = parameter(model, f"{weight.name}.weight"), None
    if module.gained_bias and table is not None:
        bias = torch.zeros(weight.shape[1], dtype=table.dtype, device=table.device)
    swaps.swap_(weight, matrix, matrix_rows=module.matrix_rows, bias_shift=bias, scales=scales)
    for place in module.places:
        for name in spellings(model, place.name):
            if isinstance(layer := submodule(model, name), FactoredLayer):
                layer.run_form = place.run_as


def _check_places(model: nn.Module, module: Module, weight: Weight, *, strict: bool) -> None:
    here = {place.name for place in weight.places}
    known = [spellings(model, place.name) for place in module.places]
    missing = [
        names[0]
        for names in known
        if not here & set(names) and (strict or any(submodule(model, name) is not None for name in names))
    ]
    more = sorted(here - {name for names in known for name in names}) if strict else []
    if missing or more:
        kind, own = type(model).__name__, module.name
        raise KflatsError(
            f"the file ties {missing[0]!r} to {own!r}, but this {kind} does not"
            if missing
            else f"this {kind} ties {more[0]!r} to {own!r}, but the file does not",
            cause=f"the model was built with tie_word_embeddings={not missing}",
            hint="load it with the config it was saved with",
        )


def _difference(model: nn.Module, module: Module, weight: Weight) -> str:
    """How the layer in the file differs from that of the model; "" if it does not."""
    shape = module.empty.shape if module.matrix_rows == "in_features" else module.empty.shape[::-1]
    layer = submodule(model, weight.name)
    here = (layer.in_channels, *layer.kernel_size) if isinstance(layer, nn.Conv2d) else None
    if shape != weight.shape:
        return f"is {shape[0]} x {shape[1]} in the file, but {weight.shape[0]} x {weight.shape[1]} in the model"
    if (there := module.places[0].kernel) != here:
        return f"has {there or 'no kernel'} as its kernel in the file, but {here or 'no kernel'} in the model"
    return "gets a bias beside its own" if module.gained_bias and weight.bias else ""


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    if not dtype.is_floating_point:
        raise KflatsError(f"{name[:40]!r} is not a floating-point type", cause=DAMAGED)
    return dtype


def _problem(place: DescribedPlace, n: int) -> str:
    """The reason why a place cannot hold a matrix of ``n`` rows; "" if it can."""
    kernel = place.kernel
    if place.padding_idx is not None and place.padding_idx >= n:
        return f"has padding row {place.padding_idx} of {n}"
    if (kernel is None) == (place.role == "conv2d") or (kernel is not None and (len(kernel) != 3 or 0 in kernel)):
        return f"has a place of role {place.role!r} with kernel {str(kernel)[:40]}"
    if place.gained_bias and place.role not in ("linear", "conv1d", "conv2d"):
        return f"has a place of role {place.role!r} with a gained bias"
    return ""


def _check_collision(name: str, layer: FactoredLayer) -> None:
    if layer.role == "conv2d" or isinstance(layer.matrix, DenseMatrix):
        return  # a dense kernel has four dimensions, and the tensor of a dense matrix is the table
    n, d = layer.matrix.shape
    # Conv1D stores M, and torch's linear layers store M.T. A matrix with output neurons as rows is M.T already.
    turned = layer.role in ("linear", "conv1d") and (layer.role == "linear") == (layer.matrix_rows == "in_features")
    dense = (d, n) if turned else (n, d)
    if tuple(layer.matrix.weight.shape) == dense:
        raise KflatsError(
            f"the factors of {name!r} are no smaller than the table itself",
            hint="a smaller budget, or leave this weight dense",
        )
