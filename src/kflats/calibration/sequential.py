"""Inputs of linear layers behind layers that are coded already: one block of a model after another.

In a token of the calibration windows x is the input of a layer M in the original model, and z the input that the same
layer has behind all tables and layers that are coded before it. Output x M is wanted of input z, so the layer has

    M* = arg min  E || x M - z M* ||^2 = M + (E z z')^-1  E z (x - z)'  M

as its target in place of M (GPTAQ, Li et al., 2025, arXiv 2504.02692, has the same target). Errors of the layers before
it are made up for as far as its inputs still tell them.

Blocks are those of ``calibration.layers``: a chain, whose states lie on disk. Of each block the original is run first,
for x; then the block is run up to each group of layers that read one tensor, for z, and these layers are coded.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kflats.calibration.collect import Job
from kflats.calibration.counting import BLOCK
from kflats.calibration.hooks import entering, frozen
from kflats.calibration.layers import Chain, longest_list
from kflats.common.errors import KflatsError
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Workers
from kflats.evaluation.running import Batch, batch_size, device_of, explained, is_encoder_decoder
from kflats.io.mapped import Spill
from kflats.matrices.registry import Matrix
from kflats.model.weights import Weight, embedding_scale, module_of
from kflats.numerics.gram import add_lower_gram_, mirror_
from kflats.numerics.large_matrices import all_finite, factorize_, stripes, zero_matrix

_NOISE, _LEAST = 5e-7, 1e-4
"""The least damping, for each input and at all, as a share of the mean square of inputs: what differs less is not far
from errors of products in float32, whose eigenvalues grow with the number of inputs."""
_TOKENS = 12
"""Tokens an input of a layer from which on inputs are compared. Fewer show what is common to them, and to no others."""
_OTHER = "other tokens"
_NO_CHAIN = "sequential=False, which measures the original model alone"


@dataclass(frozen=True)
class Moments:
    """Means over tokens of what a layer reads, in float64: x in the original model, z behind coded layers.

    Args:
        gram: (n, n) of z z'. cross: (n, n) of z (x - z)'. mean: (n,) of z. away: (n,) of x - z. size: the mean diagonal
            of ``gram`` before it was centred.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 0.0]])
    >>> moments = Moments.of([(x, x)])
    >>> moments.targets([torch.eye(2).double()], part=1.0, damping=0.1)[0].tolist()  # no error before it
    [[1.0, 0.0], [0.0, 1.0]]
    """

    gram: Tensor
    cross: Tensor
    mean: Tensor
    away: Tensor
    size: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        """Those of pairs (x, z), each (tokens, n) float32: at least one pair, and one token."""
        return cls.of_sums(sums_of(pairs))

    @classmethod
    def of_sums(cls, sums: dict[str, Tensor]) -> Moments:
        """Those of ``sums_of`` pairs, with tokens, which are written over."""
        mirror_(sums["gram"])
        tokens = sums.pop("tokens")
        means = {name: one.div_(tokens) for name, one in sums.items()}
        return cls(**means, size=float(means["gram"].diagonal().mean()))

    def centred_(self) -> Moments:
        """Those of inputs less their means, where a bias takes over what the means do. Matrices are written over."""
        self.gram.addr_(self.mean, self.mean, alpha=-1)
        self.cross.addr_(self.mean, self.away, alpha=-1)
        zero = torch.zeros_like(self.mean)
        return replace(self, mean=zero, away=zero)

    def targets(self, matrices: Sequence[Tensor], part: float, damping: float) -> list[Tensor]:
        """M + part (E z z' + level I)^-1 E z (x - z)' M of each M. The level is ``damping`` of the mean diagonal of
        E z z', and at least a little of what that was before it was centred: inputs that differ less are noise of
        rounding.

        Args:
            matrices: M, each (n, d) float64. part: 1 for the target itself, 0 for M.
        """
        level = max(float(damping * self.gram.diagonal().mean()), max(_LEAST, _NOISE * len(self.gram)) * self.size)
        factor = zero_matrix(len(self.gram), len(self.gram)).copy_(self.gram)
        factor.diagonal().add_(level)
        if level <= 0 or not factorize_(factor):  # nothing was read, or rounding is more than all damping
            return list(matrices)
        return [matrix + part * _solved(factor, self.cross @ matrix) for matrix in matrices]


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """(R'R)^-1 times ``right``, where R is upper triangular."""
    half = torch.linalg.solve_triangular(factor.mT, right, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor, half, upper=True)
    return solved


def sums_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What ``Moments`` are means of, of pairs (x, z), each (tokens, n) float32, and the number of tokens; on the CPU.
    Of the Gram matrix the lower blocks. Empty without pairs."""
    sums: dict[str, Tensor] = {}
    for x, z in pairs:
        n, apart = x.shape[1], x - z
        if not sums:
            sums = {name: zero_matrix(n, n, device=z.device) for name in ("gram", "cross")}
            sums |= {name: torch.zeros(n, dtype=torch.float64, device=z.device) for name in ("mean", "away")}
            sums["tokens"] = torch.tensor(0)
        _add_(sums, z, apart)
    return {name: one.cpu() for name, one in sums.items()}


@usual_settings()
def _add_(sums: dict[str, Tensor], z: Tensor, apart: Tensor) -> None:
    # Products of one batch in float32, their sum over batches in float64.
    add_lower_gram_(sums["gram"], z)
    for here in stripes(sums["cross"]):
        sums["cross"][here] += z[:, here].T @ apart
    sums["mean"] += z.sum(0, dtype=torch.float64)
    sums["away"] += apart.sum(0, dtype=torch.float64)
    sums["tokens"] += len(z)


Recode = Callable[[Sequence[Weight], Moments | None], Mapping[str, tuple[Tensor, Tensor | None]]]
"""Codes layers that read one tensor; None: as they are, because their inputs cannot be compared. By name: M as it is
stored, (n, d), and what the bias gains, (d,)."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and the batches that they are run on, each with the number of its first sample.

    ``weights``: of linear layers, each at one place. ``measured``: names of those whose inputs are compared.
    ``workers`` divide the batches, in parts of 64 samples (``BLOCK``), and all of them call what follows.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    chain: Chain
    items: Sequence[tuple[int, Batch]]
    weights: Sequence[Weight]
    measured: frozenset[str]
    spill: Spill
    workers: Workers

    @classmethod
    def of(
        cls,
        model: nn.Module,
        weights: Sequence[Weight],
        measured: Collection[str],
        batches: Sequence[Batch],
        scratch: str | os.PathLike[str] | None = None,
        workers: Workers | None = None,
    ) -> Blocks | None:
        """None for a model that is no chain of blocks (``calibration.layers``), and where no layer can be compared.

        Args:
            weights, measured: as of ``Blocks``. batches: windows. scratch: a folder whose disk takes states; None: the
                system's temporary folder.
        """
        blocks = longest_list(model)
        if not blocks or is_encoder_decoder(model) or not weights or not batches:
            return None
        items = list[tuple[int, Batch]]()
        for batch in batches:
            items.append((sum(batch_size(one) for _, one in items), batch))
        wanted = {weight.name: frozenset({"input_gram"}) for weight in weights}
        spill, chain = Spill(scratch), None
        # Batches of an objective may be no arguments of the model, and a model in float16 may read types of its layers.
        with frozen(model, blocks), suppress(KflatsError, RuntimeError, TypeError, ValueError, IndexError):
            job = Job(model, weights, batches, wanted, None)
            chain = job.chain(blocks, spill, weights)
        if chain is None:
            return None
        # Layers that read something else than one row of each token, samples first, cannot be compared.
        known = _tokens_in(batches)
        compared = frozenset(
            one.name
            for one in weights
            if one.name in measured
            and one.name not in job.without_layout
            and (known is None or known >= _TOKENS * one.shape[0])
        )
        if not compared:
            return None
        return cls(model, blocks, chain, items, weights, compared, spill, workers or Workers())

    @property
    def _parts(self) -> list[list[int]]:
        """The places of batches, in parts of which each is run by one worker; the bits do not depend on which."""
        parts: dict[int, list[int]] = {}
        for place, (first, _) in enumerate(self.items):
            parts.setdefault(first // BLOCK, []).append(place)
        return list(parts.values())

    def recalibrate(
        self, tables: Sequence[tuple[Weight, Matrix]], recode: Recode, show: Callable[[str], object] = str
    ) -> None:
        """Call ``recode`` for the linear layers in the order in which the model calls them, with what each reads behind
        those that were recoded before. The model is as it was afterwards.

        Args:
            tables: coded embedding tables, which come before all layers. show: is told what is run.
        """
        with frozen(self.model, self.blocks), torch.no_grad():
            self._run(tables, recode, show)

    def _run(self, tables: Sequence[tuple[Weight, Matrix]], recode: Recode, show: Callable[[str], object]) -> None:
        # The first batch shows every worker what layers read.
        own = sorted({0, *(place for part in self._parts[self.workers.rank :: self.workers.count] for place in part)})
        items = {place: self.items[place] for place in own}
        with explained(self.model, _NO_CHAIN):
            self.chain.enter(items.values())
        original = {place: self.chain.first_state(first) for place, (first, _) in items.items()}
        inside = {id(module) for block in self.blocks for module in block.modules()}
        outside = [weight for weight in self.weights if id(self._module(weight)) not in inside]
        with ExitStack() as changed:
            changed.enter_context(_coded_tables(self.model, tables))
            self._put_in_place(changed, outside, None, recode)
            behind = self._on_disk(own, self._entered)
        for k, block in enumerate(self.blocks):
            show(f"running block {k + 1} of {len(self.blocks)}")
            inside = {id(module) for module in block.modules()}
            weights = {weight.name: weight for weight in self.weights if id(self._module(weight)) in inside}
            groups = self._groups(k, original[0], weights)
            first = [self._module(weights[group[0]]) for group in groups]
            is_last = k + 1 == len(self.blocks)
            # The original, before any layer of the block is changed.
            read, original = self._run_original(k, first, original, whole=not is_last)
            with ExitStack() as changed:
                grouped = {name for group in groups for name in group}
                self._put_in_place(changed, [w for w in weights.values() if w.name not in grouped], None, recode)
                for at, group in enumerate(groups):
                    x = {place: inputs[at] for place, inputs in read.items()}
                    moments = self._moments(k, first[at], x, behind)
                    self._put_in_place(changed, [weights[name] for name in group], moments, recode)
                if not is_last:
                    behind = self._on_disk(own, functools.partial(self._output, k, behind))

    def _put_in_place(
        self, changed: ExitStack, weights: Sequence[Weight], moments: Moments | None, recode: Recode
    ) -> None:
        """Recode layers, which multiply by what was made of them until ``changed`` ends."""
        made = recode(weights, moments) if weights else {}
        for weight in weights:
            changed.enter_context(_replaced(self._module(weight), weight, *made[weight.name]))

    def _moments(
        self, k: int, layer: nn.Module, x: Mapping[int, Tensor], behind: Mapping[int, Tensor]
    ) -> Moments | None:
        """None where a layer is given few tokens, reads other tokens behind coded layers, or numbers that are not
        finite."""
        device, parts = device_of(self.model), self._parts

        def pairs(places: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
            for place in places:
                ((z,), _) = self._inputs(k, behind, place, [layer])
                if x[place].shape != z.shape:
                    raise _OtherTokens
                if len(z):
                    yield x[place].to(device), z.to(device)

        def work(part: int) -> tuple[dict[str, Tensor], str]:
            try:
                return sums_of(pairs(parts[part])), ""
            except _OtherTokens:
                return {}, _OTHER

        total, comparable = dict[str, Tensor](), True
        for sums, text in self.workers.in_turn([f"running block {k + 1}"] * len(parts), work):
            comparable &= text != _OTHER
            total = {name: total[name].add_(one) for name, one in sums.items()} if total and sums else total or sums
        if not (comparable and total) or int(total["tokens"]) < _TOKENS * len(total["mean"]):
            return None
        moments = Moments.of_sums(total)
        return moments if all_finite(moments.gram) and all_finite(moments.cross) else None

    def _module(self, weight: Weight) -> nn.Module:
        module = module_of(self.model, weight.places[0])
        assert module is not None
        return module

    def _on_disk(self, places: Iterable[int], made: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """What is ``made`` of each batch."""
        places = list(places)
        kept = self.spill.kept_all({"": made(place)} for place in places)
        return {place: tensors[""] for place, tensors in zip(places, kept, strict=True)}

    def _run_original(
        self, k: int, layers: Sequence[nn.Module], states: Mapping[int, Tensor], *, whole: bool
    ) -> tuple[dict[int, list[Tensor]], dict[int, Tensor]]:
        """What these layers of block k read in each batch, and what the block gives; on disk."""

        def runs() -> Iterator[dict[str, Tensor]]:
            for place in states:
                inputs, after = self._inputs(k, states, place, layers, whole=whole)
                yield {str(at): x for at, x in enumerate([*inputs, after])}

        kept = [list(tensors.values()) for tensors in self.spill.kept_all(runs())]
        read = {place: tensors[:-1] for place, tensors in zip(states, kept, strict=True)}
        return read, {place: tensors[-1] for place, tensors in zip(states, kept, strict=True)}

    def _groups(self, k: int, state: Tensor, weights: Mapping[str, Weight]) -> list[list[str]]:
        """The layers in the order of their calls; those that read one tensor together. Without those that are called
        several times, or read something else than all tokens of a batch."""
        called: list[tuple[str, Tensor, int]] = []
        states = {0: state}

        def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            entered = entering(args, kwargs)
            called.append((name, entered, entered._version))

        with ExitStack() as stack:
            for name, weight in weights.items():
                handle = self._module(weight).register_forward_pre_hook(functools.partial(hook, name), with_kwargs=True)
                stack.callback(handle.remove)
            self._output(k, states, 0)
        calls = Counter(name for name, _, _ in called)
        groups: list[list[str]] = []
        before: tuple[int, ...] | None = None
        for name, entered, version in called:
            if calls[name] > 1 or name not in self.measured or not _is_of_tokens(entered, self.items[0][1], state):
                continue
            # By the memory and its version: transformers flattens one state for several layers.
            read = entered.data_ptr(), version, entered.numel(), entered.shape[-1], entered.stride(-1)
            if read == before:
                groups[-1].append(name)
            else:
                groups.append([name])
            before = read
        return groups

    def _entered(self, place: int) -> Tensor:
        """The state that enters the first block, as the model computes it now."""
        first, batch = self.items[place]
        with explained(self.model, _NO_CHAIN):
            return self.chain.entered(batch, first)

    def _output(self, k: int, states: Mapping[int, Tensor], place: int) -> Tensor:
        """What block k gives for the state of a batch. It may write into its input."""
        first, _ = self.items[place]
        with explained(self.model, _NO_CHAIN):
            return self.chain.output(k, first, states[place].to(device_of(self.model), copy=True))

    def _inputs(
        self, k: int, states: Mapping[int, Tensor], place: int, layers: Sequence[nn.Module], *, whole: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """(tokens, n) what each of these layers of block k reads in a batch, and what the block gives. Layers that do
        not read one row of each token have no rows here.

        Args:
            whole: the block is run to its end; otherwise up to the last of the layers, and gives its state.
        """
        batch, state = self.items[place][1], states[place]
        seen: dict[int, Tensor] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            entered = entering(args, kwargs)
            is_wanted = _is_of_tokens(entered, batch, state)
            seen[id(module)] = _tokens(entered, batch) if is_wanted else entered.new_empty(0, entered.shape[-1])
            if len(seen) == len(layers) and not whole:
                raise _Reached

        after = state
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            with suppress(_Reached):
                after = self._output(k, states, place)
        return [seen.get(id(layer), state.new_empty(0, 0)) for layer in layers], after


class _Reached(Exception):
    """A run came to the layer whose input is wanted."""


class _OtherTokens(Exception):
    """A layer read other tokens behind coded layers than in the original model."""


def _tokens_in(batches: Sequence[Batch]) -> int | None:
    """Tokens of all batches without padding; None where batches are no texts."""
    total = 0
    for batch in batches:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(ids, Tensor):
            return None
        masked = isinstance(mask, Tensor) and mask.shape == ids.shape
        total += int((mask != 0).sum()) if masked and isinstance(mask, Tensor) else ids.numel()
    return total


def _is_of_tokens(x: Tensor, batch: Batch, state: Tensor) -> bool:
    """Whether a layer reads a row of each token: of a batch of texts, or else of the ``state`` that enters its
    block."""
    ids = batch.get("input_ids")
    rows = ids.shape if isinstance(ids, Tensor) else state.shape[:-1]
    return x.shape[:-1] in (rows, (rows.numel(),))


def _tokens(x: Tensor, batch: Batch) -> Tensor:
    """(tokens, n) float32, a copy: inputs of all positions but padding. A later layer may write into ``x``."""
    mask = batch.get("attention_mask")
    flat = x.detach().flatten(0, -2)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel() == len(flat):
        flat = flat[mask.flatten().to(flat.device) != 0]
    return flat.to(torch.float32, copy=True)


@contextmanager
def _coded_tables(model: nn.Module, tables: Sequence[tuple[Weight, Matrix]]) -> Iterator[None]:
    """Inside, embeddings look up rows of these matrices."""

    def hook(
        matrix: Matrix, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> Tensor:
        rows = matrix.rows(entering(args, kwargs).flatten().to(matrix.weight.device), dtype=torch.float32)
        scale = embedding_scale(module)
        return (rows if scale is None else rows * scale).to(output).reshape(output.shape)

    with ExitStack() as stack:
        for weight, matrix in tables:
            for place in weight.places:
                module = module_of(model, place) if place.role == "embedding" else None
                if module is not None:
                    stack.callback(
                        module.register_forward_hook(functools.partial(hook, matrix), with_kwargs=True).remove
                    )
        yield


@contextmanager
def _replaced(layer: nn.Module, weight: Weight, matrix: Tensor, shift: Tensor | None) -> Iterator[None]:
    """Inside, a linear layer multiplies by ``matrix``, (n, d), and its bias has gained ``shift``."""
    table = layer.get_parameter("weight")
    own = matrix if weight.places[0].role == "conv1d" else matrix.T
    before = table.data
    with ExitStack() as stack:
        if shift is not None:
            handle = layer.register_forward_hook(lambda module, args, output: output + shift.to(output))
            stack.callback(handle.remove)
        try:
            table.data = own.to(before)
            yield
        finally:
            table.data = before
