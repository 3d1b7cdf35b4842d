"""Layers on a Matrix: embeddings, linear layers, and output heads tied to an embedding.

A layer *adopts* its matrix: both share one table of parameters and one of buffers, so the state
dict says ``layer.weight``, ``layer.basis``, ``layer.labels``, and Matrix does all arithmetic.
A tied place *borrows*: it refers to the owner's matrix and has no parameters of its own, so saving,
loading and training cannot separate the two.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.machine import return_memory_now
from kflats.common.run_forms import RunForm
from kflats.common.schema import JsonObject
from kflats.common.torch_settings import one_thread
from kflats.matrices.base import (
    Matrix,
    State,
    complete_first,
    is_exporting,
    is_recording,
    moves_integers,
    refresh_after_load,
    settle,
)
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.compiled import WIDEST, computed, is_one_operator, multiplied_as_integers, numbered
from kflats.matrices.integer_kernels import INTEGER_DEVICES
from kflats.matrices.kept_rows import KeptRows, may_keep_rows
from kflats.matrices.low_rank import DenseMatrix, InterpolativeMatrix, LowRankMatrix
from kflats.matrices.running import DenseProduct, IntegerProduct, Product, check_width


class HoldsMatrix(ABC):
    """The base of all factored layers: a matrix, adopted or borrowed."""

    matrix_rows = "in_features"
    """What the rows of the matrix are."""
    gained_bias = False
    """Whether the layer has a bias, and the one that it stands for has none."""
    run_form: RunForm = "dense"

    @property
    @abstractmethod
    def role(self) -> str:
        """That of the layer it stands for, as ``kflats.model.weights.WeightUse`` has it."""

    def settings(self) -> JsonObject:
        """What a description of the layer needs beside its matrix (``kflats.model.description.DescribedPlace``)."""
        settings: JsonObject = {"role": self.role, "padding_idx": None, "scale": None}
        if self.gained_bias:
            settings["gained_bias"] = True
        if self.run_form != "dense":
            settings["run_as"] = self.run_form
        return settings

    @abstractmethod
    def table_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type of the table that the layer stands for, in a model that computes in ``model_dtype``."""

    @abstractmethod
    def give_back_(self, shell: nn.Module, table: nn.Parameter) -> None:
        """Give ``shell``, the layer that this one stands for, a table, with all else that may have changed since.

        Args:
            table: the dense matrix, in the orientation of the factors.
        """

    @property
    def matrix(self) -> Matrix:
        """The Matrix behind this layer."""
        matrix: Matrix = self.__dict__["_matrix"]
        return matrix

    @property
    def owns_matrix(self) -> bool:
        """False at a tied place, which borrows another layer's matrix."""
        return cast(bool, self.__dict__["_owns_matrix"])

    def _take(self, matrix: Matrix, *, own: bool) -> None:
        # Not a registered child: its tensors would appear under two names.
        self.__dict__["_matrix"] = matrix
        self.__dict__["_owns_matrix"] = own
        if own:
            for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                self.__dict__[table] = getattr(matrix, table)
            layer = cast(nn.Module, self)
            layer.register_state_dict_pre_hook(complete_first)
            layer.register_load_state_dict_pre_hook(complete_first)
            layer.register_load_state_dict_post_hook(refresh_after_load)

    @property
    def weight(self) -> Tensor:
        """The first factor (coordinates), for code that reads a layer's dtype or device."""
        shown: Tensor | None = self.__dict__.get("_shown")
        return self.matrix.weight if shown is None else shown

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense table that this layer stands for."""
        return self.matrix.shape

    @contextmanager
    def shown_dense(self) -> Iterator[None]:
        """Inside, ``weight`` has the shape of the dense table, no memory, and the mark of a loaded tensor."""
        table = torch.empty(self.dense_shape, dtype=self.matrix.weight.dtype, device="meta")
        self.__dict__["_shown"] = mark_initialized(table)
        try:
            yield
        finally:
            del self.__dict__["_shown"]

    def complete_(self) -> None:
        """As ``Matrix.complete_``."""
        self.matrix.complete_()

    def refresh(self) -> None:
        """Compute again all that the matrix derives from its stored tensors (call after loading into them)."""
        self.matrix.refresh()

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows."""
        n, d = self.matrix.shape
        return f"{n}, {d}, {self.matrix.kind}, values={self.matrix.num_values}, own={self.owns_matrix}"

    def _replicate_for_data_parallel(self) -> Any:
        raise KflatsError(
            "factored layers cannot be copied by nn.DataParallel",
            hint="DistributedDataParallel under torchrun, without broadcast_buffers, or one visible GPU",
        )


class _OneOperator(HoldsMatrix):
    """The base of layers that a graph of ``torch.compile`` calls by their number (``kflats.matrices.compiled``)."""

    _number: Tensor

    def _take(self, matrix: Matrix, *, own: bool) -> None:
        super()._take(matrix, own=own)
        self._number = numbered(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._number = numbered(self)  # a copy is another layer

    @abstractmethod
    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """As ``kflats.matrices.compiled.Numbered``."""

    def integers(self) -> IntegerProduct | None:
        """As ``kflats.matrices.compiled.Numbered``."""
        return None

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """As ``kflats.matrices.compiled.Numbered``."""
        own = self._factors()
        if all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(own.values(), tensors, strict=True)):
            return self
        other, matrix = copy.copy(self), copy.copy(self.matrix)
        matrix.__dict__["_parameters"] = dict(matrix._parameters)
        for name, tensor in zip(own, tensors, strict=True):
            matrix._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        other.__dict__["_matrix"] = matrix
        return other

    def _as_operator(self, given: Tensor, bias: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        out: Tensor = computed(given, bias, self._number, list(self._factors().values()), shape, dtype)
        return out

    def _factors(self) -> dict[str, Tensor]:
        # Quicker than ``named_parameters()``.
        return {name: factor for name, factor in self.matrix._parameters.items() if factor is not None}


_LARGE = 2**18
"""Numbers of a matrix from which on it pays to return to the system what making a product took."""
_SHARED = 2**22
"""Numbers of a matrix from which on threads share making a product; of smaller ones they take no less time."""


@dataclass(frozen=True)
class _Ready:
    """A product, the run-time form and the type of inputs (None: any) that it is for, and what it was made of."""

    form: RunForm
    kind: torch.dtype | None
    state: State
    product: Product | None


class _Multiplies(_OneOperator):
    """The base of layers that multiply their inputs by a matrix, in a run-time form."""

    in_features: int
    out_features: int
    _ready: _Ready | None = None
    _modules: dict[str, nn.Module | None]

    @property
    def transposed(self) -> bool:
        """Whether inputs meet the columns of the matrix: x @ M.T."""
        return True

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``(*b, in)`` -> ``(*b, out)`` in the run-time form, plus ``bias`` (out,). Calls whose gradients reach the
        matrix, and graphs that are recorded for files, use the stored form."""
        product: Product | None = self._modules.get("recorded")  # what an exporter put in place of the matrix
        if product is None and not torch.is_grad_enabled() and isinstance(x, Tensor) and not is_recording():
            # The usual call, with as few questions as can be: of short texts they take as long as a product.
            _check_floats(x)
            check_width(x, self.in_features)
            product = self._product(x.dtype, x.device)
            if product is not None:
                return product(x, bias)
        if not _is_traced(x):
            _check_floats(x)
            check_width(x, self.in_features)
        matrix, transposed = self.matrix, self.transposed
        if is_one_operator(matrix) and not torch.is_autocast_enabled(x.device.type):
            if (
                self.run_form == "int8"
                and matrix.has_integers
                and x.device.type in INTEGER_DEVICES
                and self.out_features <= WIDEST
            ):
                tensors = list(self._factors().values())
                return multiplied_as_integers(x, bias, self._number, tensors, self.in_features, self.out_features)
            return self._as_operator(x, bias, (*x.shape[:-1], self.out_features), x.dtype)
        if product is None and not is_recording():
            learns = self._learns()
            product = None if learns and self.run_form != "int8" else self._product(x.dtype, x.device)
            graded = learns or (torch.is_grad_enabled() and x.requires_grad)
            if graded and product is not None and self.run_form == "int8":
                raise KflatsError(
                    "gradients are not supported with the run-time form int8",
                    cause="it rounds inputs",
                    hint="the run-time form dense to train, or a call without gradients",
                )
        if product is not None:
            return product(x, bias)
        out = matrix.matvec(x) if transposed else matrix.vecmat(x)
        return out if bias is None else out + bias.to(out.dtype)

    def _learns(self) -> bool:
        """Whether gradients reach the matrix, whose table of parameters has the layer's bias too."""
        if not torch.is_grad_enabled():
            return False
        return any(factor.requires_grad for name, factor in self._factors().items() if name != "bias")

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """As ``kflats.matrices.compiled.Numbered``: ``(*b, in)`` -> ``(*b, out)``."""
        return self.times(given, bias)

    def integers(self) -> IntegerProduct | None:
        """As ``kflats.matrices.compiled.Numbered``."""
        product = self._product(torch.float32, self.matrix.weight.device)
        return product if isinstance(product, IntegerProduct) else None

    def _product(self, dtype: torch.dtype, device: torch.device) -> Product | None:
        """What multiplies inputs of this type on such a device; made anew after the matrix has changed."""
        matrix, form = self.matrix, self.run_form
        factors = matrix._parameters.values()  # quicker than ``parameters()``
        kind = None if form == "int8" else dtype  # integers are those of any type
        ready = self._ready  # another thread may replace it, for other tensors
        if ready is None or ready.form != form or ready.kind != kind or not ready.state.holds_for(factors):
            state = State(factors)
            # Not under autocast, and not as inference tensors, which no later gradient could pass.
            numbers = math.prod(matrix.shape)
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.autocast(device.type, enabled=False))
                if numbers < _SHARED:
                    stack.enter_context(one_thread())
                product = matrix.product(form, dtype, transposed=self.transposed)
                settle(matrix.weight.device)
                self._ready = ready = _Ready(form, kind, state, product)
            if numbers >= _LARGE:
                return_memory_now()
        return ready.product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._ready = None
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def refresh(self) -> None:
        """As for other layers."""
        self._ready = None
        super().refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}


def mark_initialized(tensor: Tensor) -> Tensor:
    """``tensor``, with a mark: transformers' ``init`` functions leave tensors that have it as they are."""
    tensor.__dict__["_is_hf_initialized"] = True
    return tensor


class FactoredEmbedding(_OneOperator, nn.Embedding):  # type: ignore[override]
    """An ``nn.Embedding`` whose table is a Matrix: ``rows(ids)``, times ``scale`` where the model has one.

    ``(*b,)`` ids -> ``(*b, d)``, in the table's dtype also under autocast, as ``nn.Embedding`` does.

    Args:
        matrix: the (n, d) table.
        padding_idx: ids there receive no gradient, in coordinates or bases.
        scale: factor on the output, rounded to the table's dtype (Gemma, BART).
        own: False when another layer owns the matrix (a tied table).
        dtype: of the output, where the factors are stored in another (float16 factors in a float32 model).
            It follows ``.half()``, ``.to(dtype)`` and the like.

    Raises:
        KflatsError: a padding_idx outside the table.

    >>> layer = FactoredEmbedding(LowRankMatrix(torch.ones(5, 1), torch.ones(1, 3)))
    >>> layer(torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 3])
    """

    _kept: tuple[torch.dtype, State, KeptRows] | None = None
    """Rows of codes that were put together, for the next lookups; none in the run-time form "compact"."""

    def __init__(
        self,
        matrix: Matrix,
        *,
        padding_idx: int | None = None,
        scale: float | None = None,
        own: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = matrix.shape
        if padding_idx is not None and not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise KflatsError(
                f"padding_idx {padding_idx} lies outside the table of {self.num_embeddings} rows",
                cause="the matrix belongs to another embedding",
            )
        self.padding_idx = cast(int, None if padding_idx is None else padding_idx % self.num_embeddings)
        self.max_norm, self.norm_type, self.scale_grad_by_freq = None, 2.0, False
        self.sparse, self.scale, self.out_dtype = False, scale, dtype
        self._take(matrix, own=own)

    @property
    def role(self) -> str:
        """As for other layers."""
        return "embedding"

    def settings(self) -> JsonObject:
        """As for other layers, with the padding row and the scale."""
        return super().settings() | {"padding_idx": self.padding_idx, "scale": self.scale}

    def table_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """That of the rows."""
        return self.out_dtype or self.matrix.weight.dtype

    def give_back_(self, shell: nn.Module, table: nn.Parameter) -> None:
        """As for other layers: the vocabulary may have been resized."""
        shell._parameters["weight"] = table
        embedding = cast(nn.Embedding, shell)
        embedding.num_embeddings, embedding.padding_idx = self.num_embeddings, self.padding_idx
        if isinstance(scale := getattr(shell, "embed_scale", None), Tensor):
            # The shell is no part of the model: its scale may be on another device, or on the meta device.
            shell.embed_scale = torch.full_like(scale, cast(float, self.scale), device=table.device)

    def reset_parameters(self) -> None:
        """Nothing: a factored table has no random start."""

    def refresh(self) -> None:
        """As for other layers."""
        self._kept = None
        super().refresh()

    def __getstate__(self) -> dict[str, Any]:
        # The matrix first: while it is copied another thread may fill its buffers.
        return {"_matrix": self.matrix, **self.__dict__, "_kept": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._kept = None
        if self.owns_matrix and moves_integers(fn):
            self.complete_()
        if self.out_dtype is not None:
            self.out_dtype = fn(torch.empty(0, dtype=self.out_dtype)).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """``(*b,)`` token ids -> ``(*b, d)``: rows of the matrix, times ``scale`` where the model scales its
        embeddings."""
        if not input.is_meta and torch.is_autocast_enabled(input.device.type):
            with torch.autocast(input.device.type, enabled=False):
                return self._look_up(input)
        return self._look_up(input)

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """As ``kflats.matrices.compiled.Numbered``: ids ``(*b, 1)`` -> ``(*b, d)``."""
        return self._rows(given.squeeze(-1))

    def _look_up(self, input: Tensor) -> Tensor:
        matrix = self.matrix
        if is_one_operator(matrix):
            dtype = self.table_dtype(matrix.weight.dtype)
            out = self._as_operator(input.unsqueeze(-1), None, (*input.shape, self.embedding_dim), dtype)
        else:
            out = self._rows(input)
        if self.padding_idx is not None and out.requires_grad:
            out = torch.where((input == self.padding_idx).unsqueeze(-1), out.detach(), out)
        if self.scale is not None:
            # Models keep the scale as a float32 tensor and round it to the table's dtype before they multiply.
            out = out * torch.full((), self.scale, dtype=torch.float32, device=out.device).to(out.dtype)
        return out

    def _rows(self, index: Tensor) -> Tensor:
        """``(*b,)`` -> ``(*b, d)``, without the scale; from the rows that are kept, where these are the matrix'."""
        matrix, dtype = self.matrix, self.table_dtype(self.matrix.weight.dtype)
        if self.run_form != "compact" and matrix.keeps_rows and index.device.type == "cpu" and may_keep_rows():
            sources = matrix.row_sources()
            learns = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
            if not learns and all(source.is_cpu and not source.is_inference() for source in sources):
                kept = self._kept  # another thread may replace it, for other tensors
                if kept is None or kept[0] != dtype or not kept[1].holds_for(sources):
                    self._kept = kept = dtype, State(sources), KeptRows(*matrix.shape, dtype)
                rows = kept[2].look_up(index, partial(matrix.rows, dtype=dtype))
                if rows is not None:
                    return rows
        return matrix.rows(index, dtype=dtype)


class FactoredLinear(_Multiplies, nn.Module):
    """A linear layer whose (in, out) matrix is a Matrix: x @ M + bias.

    ``matrix_rows="out_features"`` says that M's rows are output neurons (M is torch's own (out, in) weight), and
    the layer computes x @ M.T instead. The state dict holds ``weight``, ``basis``, ``labels`` of the
    matrix and ``bias``.

    Raises:
        KflatsError: ``matrix_rows`` is neither of the two, or the bias has the wrong length.

    >>> layer = FactoredLinear(LowRankMatrix(torch.ones(5, 1), torch.ones(1, 3)), torch.zeros(3))
    >>> layer(torch.ones(2, 5)).tolist()
    [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    """

    bias: nn.Parameter | None

    def __init__(self, matrix: Matrix, bias: Tensor | None = None, *, matrix_rows: str = "in_features") -> None:
        nn.Module.__init__(self)
        check_matrix_rows(matrix_rows)
        self.matrix_rows = matrix_rows
        self.in_features, self.out_features = matrix.shape[::-1] if self.transposed else matrix.shape
        check_bias(bias, self.out_features)
        self._take(matrix, own=True)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    @property
    def role(self) -> str:
        """As for other layers."""
        shell = self.__dict__.get("_shell")
        return "linear" if shell is None or type(shell) is nn.Linear else "conv1d"

    def table_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """That of the bias, where there is one."""
        return model_dtype if self.bias is None else self.bias.dtype

    def give_back_(self, shell: nn.Module, table: nn.Parameter) -> None:
        """As for other layers. Conv1D stores M, and torch's linear layers store M.T."""
        turned = isinstance(shell, nn.Linear) == (self.matrix_rows == "in_features")
        held = table.detach().T if turned else table.detach()
        shell._parameters["weight"] = nn.Parameter(held.contiguous(), requires_grad=table.requires_grad)
        shell._parameters["bias"] = None if self.gained_bias else self.bias
        if isinstance(shell, nn.Linear):
            shell.out_features = self.out_features  # the head of a vocabulary may have been resized

    @property
    def transposed(self) -> bool:
        """Whether rows of the matrix are outputs."""
        return self.matrix_rows == "out_features"

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """As ``nn.Linear`` has it."""
        return self.out_features, self.in_features

    def forward(self, input: Tensor) -> Tensor:
        """``(*b, in)`` -> ``(*b, out)``: the input times the matrix in its orientation, plus the bias."""
        return self.times(input, self.bias)


class FactoredHead(_Multiplies, nn.Module):
    """An output head tied to a factored embedding: logits = h @ M.T + bias, M borrowed from the embedding.

    ``(*b, d)`` -> ``(*b, n)``. The bias is the head's own; a Parameter is taken as it is, so that a
    model which lists it twice (BERT's decoder) keeps one.

    Raises:
        KflatsError: the bias has the wrong length.

    >>> table = FactoredEmbedding(LowRankMatrix(torch.ones(5, 1), torch.ones(1, 3)))
    >>> FactoredHead(table.matrix)(torch.ones(2, 3)).shape
    torch.Size([2, 5])
    """

    bias: nn.Parameter | None
    matrix_rows = "out_features"

    @property
    def weight(self) -> Tensor:
        """As for other layers, but always with n lines: transformers pads the bias to that length.

        One-dimensional coordinates are shown as a view that repeats their first number n times, and not as a new
        tensor: PEFT takes two layers for tied only where their weights begin at the same place in memory.
        """
        table = super().weight
        if table.ndim == 2:
            return table
        return mark_initialized(
            table[:1].expand(self.out_features) if table.numel() else table.new_empty(self.out_features, 0)
        )

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        check_bias(bias, self.out_features)
        self._take(matrix, own=False)
        self.register_parameter("bias", bias)

    @property
    def role(self) -> str:
        """As for other layers."""
        return "head"

    def table_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """That of the model; the table itself is the embedding's."""
        return model_dtype

    def give_back_(self, shell: nn.Module, table: nn.Parameter) -> None:
        """As for other layers: the vocabulary may have been resized."""
        shell._parameters["weight"] = table
        shell._parameters["bias"] = self.bias
        if isinstance(shell, nn.Linear):
            shell.out_features = self.out_features

    def forward(self, input: Tensor) -> Tensor:
        """``(*b, d)`` -> ``(*b, n)``: logits of all tokens from the tied table."""
        return self.times(input, self.bias)


def check_bias(bias: Tensor | None, size: int) -> None:
    """Refuse a bias of another length than ``size``."""
    if bias is not None and tuple(bias.shape) != (size,):
        raise KflatsError(
            f"a bias of shape {tuple(bias.shape)} does not fit {size} outputs",
            cause="the bias has one number per output",
        )


def _is_traced(x: object) -> bool:
    """Whether a graph of plain operators is recorded, in which ``x`` decides nothing; of torch.fx it is no tensor."""
    return is_exporting() or not isinstance(x, Tensor)


def _check_floats(x: Tensor) -> None:
    """Refuse whole numbers as inputs: factors are cast to the inputs' type, and would become zeros."""
    if not (x.is_floating_point() or x.is_complex()):
        raise KflatsError(
            f"inputs of {x.dtype} are not supported with a factored layer",
            cause="it multiplies floating-point numbers",
            hint="inputs in float32, or in the model's own type",
        )


def check_matrix_rows(matrix_rows: str) -> None:
    """Refuse a value of ``matrix_rows`` that is not a side of a layer."""
    if matrix_rows not in ("in_features", "out_features"):
        raise KflatsError(
            f"matrix_rows={matrix_rows!r} is not a side of a layer", hint='"in_features" or "out_features"'
        )


CONVOLVED = (LowRankMatrix.kind, InterpolativeMatrix.kind, DenseMatrix.kind, CodedMatrix.kind)
"""Kinds of matrices that can be a kernel."""
_UNFOLDED = 2**23
"""Numbers of the patches that are multiplied at a time."""


@dataclass(frozen=True)
class Patches:
    """The parts of an image that a convolution multiplies by its kernel, so that it is a product with a matrix.

    ``kernel``, ``stride``, ``dilation``: (height, width). ``margins``: on each side, in the order of
    ``torch.nn.functional.pad``. ``mode``: as ``padding_mode`` of ``nn.Conv2d``.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    margins: tuple[int, ...]
    mode: str

    @classmethod
    def of(cls, layer: nn.Conv2d | FactoredConv2d) -> Patches:
        """Those of ``layer`` as it is now: models change its stride, padding and dilation."""
        kernel, stride, dilation = _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.dilation)
        if layer.padding_mode != "zeros":
            # torch reads this list of its own, which it makes once.
            return cls(kernel, stride, dilation, tuple(layer._reversed_padding_repeated_twice), layer.padding_mode)
        if layer.padding == "same":
            whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
            ends = [(both // 2, both - both // 2) for both in whole]
        else:
            ends = [(end, end) for end in _pair(0 if isinstance(layer.padding, str) else layer.padding)]
        return cls(kernel, stride, dilation, (*ends[1], *ends[0]), "constant")

    @property
    def reach(self) -> tuple[int, ...]:
        """The height and the width of a patch."""
        return tuple(step * (size - 1) + 1 for size, step in zip(self.kernel, self.dilation, strict=True))

    def sizes(self, height: int, width: int) -> tuple[int, int]:
        """How many patches lie below each other, and side by side, in an image of this size."""
        left, right, top, bottom = self.margins
        (high, wide), (down, across) = self.reach, self.stride
        return (height + top + bottom - high) // down + 1, (width + left + right - wide) // across + 1

    def padded(self, x: Tensor) -> Tensor:
        """(b, in, height, width) with its margins."""
        return F.pad(x, self.margins, mode=self.mode)

    def inside(self, padded: Tensor) -> Tensor:
        """(b, in, height, width) -> (b, patches, in * kh * kw), row by row of the image."""
        return F.unfold(padded, self.kernel, dilation=self.dilation, stride=self.stride).mT


def _pair(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """(height, width) of a size as ``nn.Conv2d`` takes it."""
    return (size, size) if isinstance(size, int) else size


class FactoredConv2d(_Multiplies, nn.Module):
    """An ``nn.Conv2d`` whose kernel is a Matrix, ``kernel.flatten(1).T = M``.

    Of a low-rank pair M = A B, A (in * kh * kw, r), B (r, out), it is a convolution of r outputs, then 1 x 1 to all:

        out = conv1x1(conv(x; A), B) + bias

    Stride, padding (every ``padding_mode``) and dilation belong to the first of the two. It costs
    r (in kh kw + out) multiplications a pixel instead of in kh kw out, and is exact for M of rank r. A matrix of codes
    is one convolution by its decoded kernel, and in the run-time form int8 a product with patches of the image, some of
    them at a time.

    Args:
        matrix: (in * kh * kw, out), or its transpose with ``matrix_rows="out_features"``; a LowRankMatrix, an
            InterpolativeMatrix, a CodedMatrix, or a DenseMatrix, which is one convolution as before. Flats in
            floating-point numbers need every patch of the image as a row: they are refused.
        like: the layer to stand in for; its geometry is read, its tensors are not.
        bias: (out,).
        matrix_rows: "in_features" (rows of M are the numbers of a patch, channel by channel) or "out_features".

    Raises:
        KflatsError: a grouped convolution, flats, another shape, or a bias of the wrong length.

    >>> import torch
    >>> conv = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    >>> layer = FactoredConv2d(LowRankMatrix(torch.ones(75, 2), torch.ones(2, 8)), conv)
    >>> layer(torch.ones(1, 3, 10, 10)).shape
    torch.Size([1, 8, 5, 5])
    """

    bias: nn.Parameter | None

    def __init__(
        self, matrix: Matrix, like: nn.Conv2d, bias: Tensor | None = None, *, matrix_rows: str = "in_features"
    ) -> None:
        nn.Module.__init__(self)
        check_matrix_rows(matrix_rows)
        if like.groups != 1:
            raise KflatsError(f"a convolution of {like.groups} groups is not supported", hint="leave this layer dense")
        if matrix.kind not in CONVOLVED:
            raise KflatsError(
                f"a matrix of kind {matrix.kind!r} cannot be a convolution's kernel", hint="the method SVD"
            )
        self.matrix_rows = matrix_rows
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.kernel_size, self.stride = like.kernel_size, like.stride
        self.padding, self.dilation = like.padding, like.dilation
        self.groups, self.padding_mode = 1, like.padding_mode
        self._reversed_padding_repeated_twice = list(like._reversed_padding_repeated_twice)
        self.in_features, self.out_features = self.in_channels * math.prod(self.kernel_size), self.out_channels
        expected = (self.in_features, self.out_features)
        if (matrix.shape[::-1] if self.transposed else matrix.shape) != expected:
            raise KflatsError(
                f"a matrix of shape {matrix.shape} cannot be the kernel of {like}",
                cause=f"its shape must be {expected} with inputs as rows, or the reverse with outputs as rows",
            )
        check_bias(bias, self.out_channels)
        self._take(matrix, own=True)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    @property
    def role(self) -> str:
        """As for other layers."""
        return "conv2d"

    @property
    def transposed(self) -> bool:
        """As for linear layers, of patches."""
        return self.matrix_rows == "out_features"

    def settings(self) -> JsonObject:
        """As for other layers, with the shape of the kernel."""
        return super().settings() | {"kernel": [self.in_channels, *self.kernel_size]}

    def table_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """That of the bias, where there is one."""
        return model_dtype if self.bias is None else self.bias.dtype

    def give_back_(self, shell: nn.Module, table: nn.Parameter) -> None:
        """As for other layers. torch stores M.T, with the numbers of a patch on axes of their own."""
        held = table.detach() if self.transposed else table.detach().T
        kernel = held.reshape(self.dense_shape).contiguous()
        shell._parameters["weight"] = nn.Parameter(kernel, requires_grad=table.requires_grad)
        shell._parameters["bias"] = None if self.gained_bias else self.bias

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """As ``nn.Conv2d`` has it."""
        return self.out_channels, self.in_channels, *self.kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """``(*b, in, height, width)`` -> ``(*b, out, ...)``, with at most one dimension b, in the input's type."""
        if not is_one_operator(self.matrix) or torch.is_autocast_enabled(input.device.type):
            return self._output(input, self.bias)
        shape = (*input.shape[:-3], self.out_channels, *self._sizes(input))
        return self._as_operator(input, self.bias, shape, input.dtype)

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """As ``kflats.matrices.compiled.Numbered``."""
        return self._output(given, bias).contiguous()

    def _output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(x, Tensor) and not is_recording():
            _check_floats(x)
            if self.run_form == "int8" and self.matrix.has_integers:
                return self._by_patches(x, bias)
            kept = None if self._learns() else self._product(x.dtype, x.device)
            if isinstance(kept, DenseProduct) and kept.factors[0].shape[0]:
                return kept.by((self._convolved, _mixed), x, bias, rows=x.numel() // self.in_channels, channels=-3)
        bias = None if bias is None else bias.to(x.dtype)
        first, *others = self.matrix.factors(x.dtype)
        if not others:
            return self._convolved(x, first if self.transposed else first.T, bias)
        left, right = first, others[0]
        if self._factors()["weight"].shape[1] == 0:  # torch has no convolution of no outputs: a zero stands for it
            left, right = F.pad(left, (0, 1)), F.pad(right, (0, 0, 0, 1))
        thin, mixing = (right, left) if self.transposed else (left.T, right.T)
        return _mixed(self._convolved(x, thin, None), mixing, bias)

    def _convolved(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = Patches.of(self).padded(x), (0, 0)
        kernel = kernel.reshape(-1, self.in_channels, *self.kernel_size)
        return F.conv2d(x, kernel, bias, self.stride, padding, self.dilation)

    def _by_patches(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with all patches: of some images at a time, or of some rows of an image."""
        high, wide = self._sizes(x)
        patches, images = Patches.of(self), x if x.ndim == 4 else x.unsqueeze(0)
        lines = min(high, max(1, _UNFOLDED // max(1, wide * self.in_features)))
        most = max(1, _UNFOLDED // max(1, high * wide * self.in_features))
        (down, _), (reach, _) = patches.stride, patches.reach
        parts = []
        for part in patches.padded(images).split(most):
            strips = []
            for top in range(0, high, lines):
                count = min(lines, high - top)
                strip = part[:, :, top * down : (top + count - 1) * down + reach]
                out = self.times(patches.inside(strip), bias)
                strips.append(out.mT.reshape(len(part), self.out_channels, count, wide))
            parts.append(torch.cat(strips, dim=2) if len(strips) > 1 else strips[0])
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        layout = torch.contiguous_format
        if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
            layout = torch.channels_last  # as torch's convolution
        whole = whole.contiguous(memory_format=layout)
        return whole if x.ndim == 4 else whole.squeeze(0)

    def _sizes(self, x: Tensor) -> tuple[int, int]:
        """The height and the width of the output."""
        fits = x.ndim in (3, 4) and x.shape[-3] == self.in_channels
        high, wide = Patches.of(self).sizes(*x.shape[-2:]) if fits else (0, 0)
        if high < 1 or wide < 1:
            raise KflatsError(
                f"inputs of shape {tuple(x.shape)} do not fit a convolution of {self.in_channels} channels by a kernel "
                f"of {' x '.join(map(str, _pair(self.kernel_size)))}",
                cause="the layer belongs behind another one",
                hint="inputs of shape (batch, channels, height, width), at least as large as the kernel",
            )
        return high, wide

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows."""
        return f"{super().extra_repr()}, kernel_size={self.kernel_size}, stride={self.stride}"


def _mixed(x: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """At every pixel the (out, r) mixing matrix times the r channels of the thin convolution."""
    return F.conv2d(x, factor[:, :, None, None], bias)
