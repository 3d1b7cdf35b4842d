"""Matrix: the form in which every method hands over its result, and which every layer computes with.

A ``Matrix`` stands for a dense (n, d) matrix M that is never formed. Row i belongs to one input of a
layer: a token of an embedding table, or an input neuron of a linear layer.

The first factor is always called ``weight``, as the table of a dense layer is. Where kflats is not imported, loading
a checkpoint of factors then stops with a size mismatch, instead of leaving random weights in place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from kflats.common.errors import KflatsError
from kflats.common.run_forms import RunForm
from kflats.common.schema import JsonObject
from kflats.matrices.running import Product

MAX_SIDE = 2**31 - 1  # places of rows are int32
MAX_VALUES = 2**46  # of the dense matrix: far beyond any model, and its bytes still fit 64 bits


class Matrix(nn.Module):
    """A factored (n, d) matrix M that is never formed: methods make it and layers compute with it.

    ``rows``, ``vecmat`` and ``matvec`` are differentiable with respect to the stored factors, in
    eager mode, under ``torch.compile(fullgraph=True)`` and in ``torch.export`` with dynamic shapes.
    Factors stored in a smaller type than the model's are widened before they are multiplied: half
    precision products are slow on most CPUs, and would round twice.
    """

    kind: str
    weight: nn.Parameter
    ready = True
    """False while a matrix that was built empty waits for ``refresh``."""
    has_integers = False
    """Whether there is a form in integers: ``scaled`` gives what they are made of."""
    one_operator = False
    """Whether graphs of ``torch.compile`` call a layer of it (``matrices.compiled``): plain operators would compute
    more."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, d), the shape of the dense matrix."""

    @abstractmethod
    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """``(*b,)`` integers -> ``(*b, d)``: the rows of M at ``index``, as an embedding returns them.

        ``dtype`` is the type to multiply in and to return, by default the stored one.

        Raises:
            IndexError: an index outside 0..n-1 (negative ones included), as ``nn.Embedding`` does.
        """

    @abstractmethod
    def vecmat(self, x: Tensor) -> Tensor:
        """``(*b, n)`` -> ``(*b, d)``: x @ M, as a linear layer computes it, in x's type."""

    @abstractmethod
    def matvec(self, x: Tensor) -> Tensor:
        """``(*b, d)`` -> ``(*b, n)``: x @ M.T, as a tied output head computes it, in x's type."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The whole (n, d) matrix, for tests, export and error reports."""

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(n, r) and (r, d) in ``dtype``, whose product is M; (M,) of a matrix that is no such pair."""
        return (self.dense().to(dtype),)

    @abstractmethod
    def spec(self) -> JsonObject:
        """JSON-able geometry: with it ``matrix_from_spec`` builds an empty matrix of the same shapes."""

    @abstractmethod
    def resized(self, n: int) -> Matrix:
        """A new, independent Matrix of ``n`` rows, for a vocabulary that shrinks or grows.

        The last rows are dropped, or new ones are appended at the mean coordinates of the rows
        they join. Rows that stay are unchanged, bit for bit.

        Raises:
            KflatsError: n < 1.
        """

    def product(self, form: RunForm, dtype: torch.dtype, *, transposed: bool) -> Product | None:
        """This matrix in a run-time form, ready for x @ M (x @ M.T if ``transposed``), for x of ``dtype``. None:
        ``vecmat`` and ``matvec`` are that form already, as with floating-point factors."""
        return None

    def scaled(self, *, transposed: bool, power: float = 0.5) -> tuple[Tensor, Tensor] | None:
        """What integers are made of: the (out, in) matrix in float32, and (in,) scales, by which inputs are multiplied
        and columns divided. None: it has no form in integers, as with floating-point factors.

        Args:
            power: if a code has steps of columns, the scales are this power of them. At 1 the columns are even, and at
                0 the inputs are as they come. Other codes take no notice of it.
        """
        return None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a file stores, by name: factors, and labels or an order where there are any."""
        tensors: dict[str, Tensor] = {"weight": self.weight}
        for name in ("basis", "labels", "order"):
            if isinstance(value := getattr(self, name, None), Tensor):
                tensors[name] = value
        return tensors

    def floats(self) -> dict[str, Tensor]:
        """Those of ``tensors`` that are floating-point numbers."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    @property
    def num_values(self) -> int:
        """Stored floating-point numbers (labels not counted)."""
        return sum(t.numel() for t in self.floats().values())

    @property
    def nbytes(self) -> int:
        """Stored bytes, labels included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def keeps_rows(self) -> bool:
        """Whether a row takes many times as long as its copy, so that embeddings keep some of them."""
        return False

    def row_sources(self) -> list[Tensor]:
        """The tensors that rows are put together from, and that may change."""
        return [factor for factor in self._parameters.values() if factor is not None]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all parameters and buffers, which include tensors that are derived from stored ones."""
        return sum(t.numel() * t.element_size() for t in [*self.parameters(), *self.buffers()])

    def refresh(self) -> None:
        """Compute again all that is derived from stored tensors (call after loading into them)."""

    def complete_(self) -> None:
        """Fill all stored tensors, where some are filled late: before other code reads, copies or moves them."""

    def _check_ready(self) -> None:
        if not self.ready:
            raise KflatsError(
                f"a matrix of kind {self.kind!r} cannot be used before its tensors are filled",
                hint="load the model again, or refresh the matrix",
            )

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows."""
        n, d = self.shape
        return f"{n}, {d}, values={self.num_values}"


_steps = 0
"""Of optimizers in this process."""


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


class State:
    """Some tensors as they are now, to find out whether one was changed, moved or replaced; those that are None are
    left out.

    Fused optimizers change parameters without giving them a new version: of what may be trained, steps count too.
    The tensors are held, so that another one cannot have the address of one that is gone. Limit: writes through
    ``tensor.data``, and into tensors of inference mode, leave no trace.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._held = [t for t in tensors if t is not None]
        self._marks = [_marks(t) for t in self._held]

    def holds_for(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether these are the tensors, unchanged."""
        place = 0
        for t in tensors:  # every call of a layer comes here: a loop is quicker than what has a frame of its own
            if t is not None:
                if place == len(self._held) or t is not self._held[place] or _marks(t) != self._marks[place]:
                    return False
                place += 1
        return place == len(self._held)


def _marks(t: Tensor) -> tuple[object, ...]:
    """What differs once a tensor has changed."""
    return t.data_ptr(), 0 if t.is_inference() else t._version, _steps if t.requires_grad else -1


# Sizes and copies --------------------------------------------------------------------------------

M = TypeVar("M", bound=Matrix)


def check_shape(n: int, d: int) -> None:
    """Refuse an (n, d) that no matrix of a model has, before any memory is allocated."""
    if n < 1 or d < 1 or n > MAX_SIDE or d > MAX_SIDE or n * d > MAX_VALUES:
        raise KflatsError(f"impossible matrix shape {(n, d)}", cause="a damaged or hand-edited file")


def check_rows(n: int) -> None:
    """Refuse to resize a matrix to nothing."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise KflatsError(f"a matrix cannot be resized to {n!r} rows", hint="a whole number, at least 1")


def with_rows(table: Tensor, n: int) -> Tensor:
    """A copy of the first n rows of ``table``, continued by its mean row where n exceeds it."""
    extra = n - table.shape[0]
    if extra <= 0:
        return table[:n].clone()
    mean = table.mean(0, dtype=torch.float32).to(table.dtype)
    return torch.cat([table, mean.expand(extra, -1)])


def copy_trainable(source: Matrix, target: M) -> M:
    """``target`` with the ``requires_grad`` flags of ``source``'s factors."""
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(source.get_parameter(name).requires_grad)
    return target


def complete_first(module: nn.Module, *_: object) -> None:
    """Before ``state_dict`` and ``load_state_dict`` fill what is filled late. A named function, as the next one."""
    module.complete_()  # type: ignore[operator]


def moves_integers(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``fn``, which ``nn.Module._apply`` is called with, does more to integers than to leave them as they are.

    >>> moves_integers(lambda t: t.half() if t.is_floating_point() else t), moves_integers(lambda t: t.clone())
    (False, True)
    """
    probe = torch.empty(0, dtype=torch.uint8, device="cpu")
    return fn(probe) is not probe or probe.is_shared()


def refresh_after_load(module: nn.Module, _: object) -> None:
    """After ``load_state_dict`` compute derived buffers again. A named function, so that modules can be pickled."""
    module.refresh()  # type: ignore[operator]


# Lookups ------------------------------------------------------------------------------------------

FEW = 256  # for fewer ids the search for repeated ones takes longer than computing their rows again


def distinct(index: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted distinct values (u,) of ``index``, and for each of its entries the place among them.

    Text repeats its words: 4096 tokens have about 1800 distinct ones, and each row is computed once.
    The sort costs a few per cent of the matrix product it saves.
    """
    values, inverse = torch.unique(index, return_inverse=True)
    return values, inverse


def inverse_of(permutation: Tensor) -> Tensor:
    """``(n,)`` permutation -> the permutation that undoes it, int64."""
    places = torch.arange(permutation.shape[0], device=permutation.device)
    return torch.empty_like(places).index_copy(0, permutation.to(torch.int64), places)


def settle(device: torch.device) -> None:
    """Wait until a GPU has made what is about to be kept: other threads read it, in streams of their own."""
    if device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def is_exporting() -> bool:
    """True while a graph of plain operators is recorded: sizes that depend on data must stay symbolic."""
    # In graphs of ``torch.compile`` the function ``is_exporting`` is True before torch 2.13, and its flag is right.
    return bool(torch.compiler._is_exporting_flag or torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_recording() -> bool:
    """True while a graph is recorded for any use: nothing may depend on the values of tensors."""
    # ``is_compiling`` would be true while any thread compiles.
    return torch.compiler.is_dynamo_compiling() or is_exporting()


def each_once(index: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """``compute(index)``, rows for an index of any shape; repeated rows are computed once where this is quicker."""
    # On CUDA the search for distinct rows would make the host wait; one large product is quicker there.
    if is_recording() or index.device.type != "cpu" or index.numel() < FEW:
        return compute(index)
    values, inverse = distinct(index)
    return F.embedding(inverse, compute(values))
