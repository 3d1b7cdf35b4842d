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

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kflats.calibration.collect import Job
from kflats.calibration.hooks import entering, frozen
from kflats.calibration.layers import Chain, longest_list
from kflats.common.formatting import Update
from kflats.evaluation.running import Batch, batch_size, device_of, explained, is_encoder_decoder
from kflats.io.mapped import Spill
from kflats.matrices.registry import Matrix
from kflats.model.weights import Weight, embedding_scale, module_of

_WIDEST = 8192
"""Inputs of a layer up to which its moments are taken: both, centred ones and the solver's take 3 GB."""
_NOISE = 1e-4
"""The least damping, as a share of the mean square of inputs: what differs less is not far from errors of float32."""
_NO_CHAIN = "sequential=False, which measures the original model alone"


@dataclass(frozen=True)
class Moments:
    """Means over tokens of what a layer reads, in float64: x in the original model, z behind coded layers.

    Args:
        gram: (n, n) of z z'. cross: (n, n) of z (x - z)'. mean: (n,) of z. away: (n,) of x - z. size: the mean diagonal
            of ``gram`` before it was centred.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 0.0]])
    >>> moments = Moments.of([(x, x)])
    >>> torch.equal(moments.target(torch.eye(2), part=1.0, damping=0.1), torch.eye(2).double())  # no error before it
    True
    """

    gram: Tensor
    cross: Tensor
    mean: Tensor
    away: Tensor
    size: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        """Those of pairs (x, z), each (tokens, n) float32: at least one pair, and one token."""
        sums: list[Tensor] = []
        tokens = 0
        for x, z in pairs:
            apart, wide = x - z, z.to(torch.float64)
            # Products of one batch in float32, their sum over batches in float64.
            new = [z.T @ z, z.T @ apart, wide.sum(0), apart.sum(0, dtype=torch.float64)]
            sums = (
                [one.to(torch.float64) for one in new]
                if not sums
                else [a.add_(b) for a, b in zip(sums, new, strict=True)]
            )
            tokens += len(z)
        gram, cross, mean, away = (one.cpu() / tokens for one in sums)
        return cls(gram, cross, mean, away, float(gram.diagonal().mean()))

    def centred(self) -> Moments:
        """Those of inputs less their means, where a bias takes over what the means do."""
        zero = torch.zeros_like(self.mean)
        gram = self.gram - torch.outer(self.mean, self.mean)
        return Moments(gram, self.cross - torch.outer(self.mean, self.away), zero, zero, self.size)

    def target(self, matrix: Tensor, part: float, damping: float) -> Tensor:
        """M + part (E z z' + level I)^-1 E z (x - z)' M. The level is ``damping`` of the mean diagonal of E z z', and
        at least a ten thousandth of what that was before it was centred: inputs that differ less are noise of rounding.

        Args:
            matrix: M, (n, d). part: 1 for the target itself, 0 for M.
        """
        level = max(float(damping * self.gram.diagonal().mean()), _NOISE * self.size)
        if level <= 0:  # nothing was read
            return matrix
        damped = self.gram + level * torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        factor = torch.linalg.cholesky(damped)
        return matrix + part * torch.cholesky_solve(self.cross @ matrix.to(torch.float64), factor)


Recode = Callable[[Sequence[Weight], Moments | None], Mapping[str, tuple[Tensor, Tensor | None]]]
"""Codes layers that read one tensor, or takes their first codes where their inputs cannot be compared (None). By name:
M as it is stored, (n, d), and what the bias gains, (d,)."""


def recalibrate(
    model: nn.Module,
    weights: Sequence[Weight],
    tables: Sequence[tuple[Weight, Matrix]],
    batches: Sequence[Batch],
    recode: Recode,
    *,
    scratch: str | os.PathLike[str] | None = None,
    update: Update | None = None,
) -> bool:
    """Call ``recode`` for linear layers in the order in which the model calls them, with what each reads behind those
    that were recoded before. The model is as it was afterwards.

    Args:
        weights: of linear layers, each at one place. tables: coded embedding tables, which come before all layers.
        batches: windows. scratch: a folder whose disk takes states; None: the system's temporary folder.

    Returns:
        Whether it was done: False for a model that is no chain of blocks (``calibration.layers``).
    """
    blocks = longest_list(model)
    if not blocks or is_encoder_decoder(model) or not weights:
        return False
    items = list[tuple[int, Batch]]()
    for batch in batches:
        items.append((sum(batch_size(one) for _, one in items), batch))
    wanted = {weight.name: frozenset({"input_gram"}) for weight in weights}
    spill = Spill(scratch)
    with frozen(model, blocks), explained(model, _NO_CHAIN):
        job = Job(model, weights, batches, wanted, None)
        chain = job.chain(blocks, spill, weights)
        if chain is None:
            return False
        with torch.no_grad():
            _Blocks(model, blocks, chain, items, weights, frozenset(job.without_layout), spill).run(
                tables, recode, update
            )
    return True


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a model, and the batches that they are run on. ``apart``: weights whose layers read something else
    than one row of each token, samples first."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    chain: Chain
    items: Sequence[tuple[int, Batch]]
    weights: Sequence[Weight]
    apart: frozenset[str]
    spill: Spill

    def run(self, tables: Sequence[tuple[Weight, Matrix]], recode: Recode, update: Update | None) -> None:
        """Recode the layers of one block after another."""
        self.chain.start(self.items, ends=True)
        original = [self._kept(self.chain.state(0, first)) for first, _ in self.items]
        inside = {id(module) for block in self.blocks for module in block.modules()}
        outside = [weight for weight in self.weights if id(self._module(weight)) not in inside]
        with ExitStack() as changed:
            changed.enter_context(_coded_tables(self.model, tables))
            self._put_in_place(changed, outside, None, recode)
            behind = [self._kept(self.chain.entered(batch, first)) for first, batch in self.items]
        for k, block in enumerate(self.blocks):
            if update is not None:
                update("layers behind coded ones", k, len(self.blocks))
            inside = {id(module) for module in block.modules()}
            weights = {weight.name: weight for weight in self.weights if id(self._module(weight)) in inside}
            groups = self._groups(k, original[0], weights)
            first = [self._module(weights[group[0]]) for group in groups]
            # The original, before any layer of the block is changed.
            runs = [self._inputs(k, place, first, state) for place, state in enumerate(original)]
            original = [after for _, after in runs]
            read = [inputs for inputs, _ in runs]
            del runs
            with ExitStack() as changed:
                grouped = {name for group in groups for name in group}
                self._put_in_place(changed, [w for w in weights.values() if w.name not in grouped], None, recode)
                for at, group in enumerate(groups):
                    moments = self._moments(k, first[at], [inputs[at] for inputs in read], behind)
                    self._put_in_place(changed, [weights[name] for name in group], moments, recode)
                behind = [self._inputs(k, place, (), state)[1] for place, state in enumerate(behind)]

    def _put_in_place(
        self, changed: ExitStack, weights: Sequence[Weight], moments: Moments | None, recode: Recode
    ) -> None:
        """Recode layers, which multiply by what was made of them until ``changed`` ends."""
        made = recode(weights, moments) if weights else {}
        for weight in weights:
            changed.enter_context(_replaced(self._module(weight), weight, *made[weight.name]))

    def _moments(self, k: int, layer: nn.Module, x: Sequence[Tensor], behind: Sequence[Tensor]) -> Moments | None:
        """None where a layer is too wide, is given no tokens, reads other tokens behind coded layers, or numbers that
        are not finite."""
        device = device_of(self.model)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for place, (inputs, state) in enumerate(zip(x, behind, strict=True)):
                ((z,), _) = self._inputs(k, place, [layer], state, stop=True)
                if inputs.shape != z.shape:
                    raise _OtherTokens
                if len(z):
                    yield inputs.to(device), z.to(device)

        if not any(map(len, x)) or max(one.shape[1] for one in x) > _WIDEST:
            return None
        try:
            moments = Moments.of(pairs())
        except _OtherTokens:
            return None
        return moments if bool(moments.gram.isfinite().all() and moments.cross.isfinite().all()) else None

    def _module(self, weight: Weight) -> nn.Module:
        module = module_of(self.model, weight.places[0])
        assert module is not None
        return module

    def _kept(self, tensor: Tensor) -> Tensor:
        """On disk, mapped."""
        return self.spill.kept({"tensor": tensor})["tensor"]

    def _groups(self, k: int, state: Tensor, weights: Mapping[str, Weight]) -> list[list[str]]:
        """The layers in the order of their calls; those that read one tensor together. Without those that are called
        several times, or read something else than all tokens of a batch."""
        called: list[tuple[str, Tensor, int]] = []

        def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            entered = entering(args, kwargs)
            called.append((name, entered, entered._version))

        with ExitStack() as stack:
            for name, weight in weights.items():
                handle = self._module(weight).register_forward_pre_hook(partial(hook, name), with_kwargs=True)
                stack.callback(handle.remove)
            self._run(k, 0, state)
        calls = Counter(name for name, _, _ in called)
        groups: list[list[str]] = []
        before: tuple[int, ...] | None = None
        for name, entered, version in called:
            if calls[name] > 1 or name in self.apart or not _is_of_tokens(entered, self.items[0][1]):
                continue
            # By the memory and its version: transformers flattens one state for several layers.
            read = entered.data_ptr(), version, entered.numel(), entered.shape[-1], entered.stride(-1)
            if read == before:
                groups[-1].append(name)
            else:
                groups.append([name])
            before = read
        return groups

    def _run(self, k: int, place: int, state: Tensor) -> Tensor:
        """What block k gives for ``state`` and a batch. It may write into its input."""
        first, _ = self.items[place]
        return self.chain.output(k, first, state.to(device_of(self.model), copy=True))

    def _inputs(
        self, k: int, place: int, layers: Sequence[nn.Module], state: Tensor, *, stop: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """(tokens, n) what each of these layers of block k reads in a batch, and what the block gives for ``state``:
        all of it on disk. ``stop``: at the last of the layers; its input is not written then."""
        batch = self.items[place][1]
        seen: dict[int, Tensor] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            read = _tokens(entering(args, kwargs), batch)
            seen[id(module)] = read if stop else self._kept(read)
            if stop and len(seen) == len(layers):
                raise _Reached

        after = state
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            with suppress(_Reached):
                after = self._kept(self._run(k, place, state))
        return [seen.get(id(layer), state.new_empty(0, 0)) for layer in layers], after


class _Reached(Exception):
    """A run came to the layer whose input is wanted."""


class _OtherTokens(Exception):
    """A layer read other tokens behind coded layers than in the original model."""


def _is_of_tokens(x: Tensor, batch: Batch) -> bool:
    """Whether a layer reads a row of each token of a batch of texts; of other batches this is not known."""
    ids = batch.get("input_ids")
    return not isinstance(ids, Tensor) or x.shape[:-1] in (ids.shape, (ids.numel(),))


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
                    stack.callback(module.register_forward_hook(partial(hook, matrix), with_kwargs=True).remove)
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
