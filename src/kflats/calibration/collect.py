"""One streamed pass over a calibration set: Fisher information and activations of any weights, bounded in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from kflats.calibration.accumulators import GRADIENTS, Accumulator, Inputs, measured
from kflats.calibration.counting import BLOCK
from kflats.calibration.experts import one_by_one
from kflats.calibration.hooks import ALONE, ActivationRecorder, SampleLayout, find_layouts, frozen, places
from kflats.calibration.layers import Chain, Pass, Step, longest_list
from kflats.calibration.measurements import FIELDS, Statistics, Sums, fingerprint, merge
from kflats.calibration.objectives import Objective, Projections, TaskLoss, describe, objective_of
from kflats.common.errors import KflatsError, NotFiniteError
from kflats.common.formatting import Update, announce, progress_bar, size, some
from kflats.common.machine import unused_bytes
from kflats.common.texts import check_ids
from kflats.common.workers import Workers
from kflats.evaluation.running import (
    Batch,
    BatchValue,
    batch_size,
    device_of,
    explained,
    is_encoder_decoder,
    run,
    take,
    to_device,
)
from kflats.importance.protocol import Measured
from kflats.io.mapped import Spill
from kflats.model.weights import Weight

SampleBlock: TypeAlias = list[tuple[int, Batch]]
"""The batches of one block, each with the index of its first sample."""


_UNMEASURED = "batches of all that it reads at once, or Uniform(), which measures nothing"


def measure(
    model: nn.Module,
    weights: Sequence[Weight],
    batches: Iterable[Batch],
    *,
    needs: Mapping[str, frozenset[str]] | frozenset[str],
    objective: Objective | None = None,
    memory_bytes: int | None = None,
    quiet: bool = False,
    workers: Workers | None = None,
    scratch: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Statistics:
    """Measure the statistics that importances need, from each single sample's own gradient:

        row_fisher      I_i  = sum_j  mean_s (dL_s / dM_ij)^2           (FWSVD, Hsu et al., ICLR 2022, eq. 3, 5)
        column_fisher   the same over rows
        input_gram      mean over positions of x x'; input_mean comes with it
        output_gram     mean over samples of sum_t g_t g_t'             (K-FAC, Martens and Grosse 2015); of layers of
                        more than 16,384 outputs its diagonal
        fisher_gram     sum_s D_s D_s' / sum ||g_t||^2, D_s = sum_t x_t g_t': positions add before squaring
        counts          how often a table's rows are read

    A sample is one row of a batch: a sequence, an image. Its positions, and all calls of a shared layer or a tied
    table, add before squaring. Padding (``attention_mask``) is left out. The model runs in eval mode with frozen
    parameters; afterwards it is as it was, after exceptions too.

    Cost: a plain forward and backward, or less, for row_fisher; Grams add n^2 + d^2 products for each position. A layer
    whose input does not keep samples along its first axis (a table of positions) is run sample by sample. A batch that
    the model runs on as a whole alone (patches of all images in one row) counts as one sample. A model whose output has
    other parts than samples (frames, codebooks) is run sample by sample, too. Sums beyond ``memory_bytes`` are measured
    layer by layer, where the model is a chain of layers (``calibration.layers``): inputs of all layers go to disk, and
    each layer is run again. Other models make several passes. A few hundred samples are enough: a Gram of fewer
    positions than neurons has a low rank, and importances damp it.

    A table tied to an output head has two terms, reads (x) gradients and logit gradients (x) hidden states. With
    output_gram, both Grams are those of the nearest single product, and the input's Gram has sum 1. With input_gram
    alone, it is the reads plus the mean square of the hidden states.

    A float16 model is float32 meanwhile, and float16 autocast is off: gradients of single samples would underflow or
    overflow float16. Where it takes more than ``memory_bytes`` in float32, it is measured layer by layer too, if it is
    such a chain: then one layer at a time is float32, and what is outside of the layers.

    Samples are summed in blocks of 64 (``BLOCK``), each block alone; block sums are added in the order of the samples
    (``measurements.merge``). The bits of the statistics do not depend on which process sums a block.

    Args:
        model: any torch module.
        weights: from ``find_weights``.
        batches: dicts of tensors, as for ``model(**batch)``; kept in memory.
        needs: the statistics to measure, of all weights or by weight name: the ``needs`` of an importance.
        objective: the loss whose gradients are taken; by default ``TaskLoss()`` if batches have labels, otherwise
            ``Projections()``.
        memory_bytes: the largest size of the sums on the model's device, float64: the sums of one block of samples, and
            of all blocks before it. None: 4 GB, or a quarter of what this process may still take, if that is less; a
            weight that takes more is measured alone.
        quiet: no progress bar, and no line on weights that were never reached.
        workers: who sum the blocks; all of them get the statistics.
        scratch: a folder whose disk takes inputs of layers, and the means where the sums do not fit into memory
            together: they are then mapped and read-only (writing into them ends the process). None: the means are in
            memory, and the inputs on the disk of the system's temporary folder. Nothing is left in either folder.
        file: the first worker writes the statistics into it, in a folder that all workers see; those of every worker
            are then mapped and read-only. None: the means go to each worker's memory.

    Raises:
        KflatsError: no batches, labels of some batches missing or out of range, a head of another task, token ids
            beyond the model's vocabulary, batches that the model cannot be run on, a loss or a sum that is not finite,
            a weight whose sums alone exceed ``memory_bytes``.

    >>> from kflats.model.weights import find_weights
    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> batches = [{"input": torch.eye(3), "labels": torch.tensor([0, 1, 1])}]
    >>> statistics = measure(model, find_weights(model), batches, needs=frozenset({"row_fisher"}), quiet=True)
    >>> statistics.of("0").row_fisher.shape, statistics.samples
    (torch.Size([3]), 3)
    """
    weights = tuple({weight.name: weight for weight in weights}.values())  # one that is given twice is measured once
    wanted = _wanted(weights, needs)
    kept = _checked(batches, model)
    blocks, workers = in_blocks(kept), workers or Workers()
    # The sums of all blocks before, and of one block; with several workers, of another's block.
    copies = min(len(blocks), 2 if workers.count == 1 else 3)
    room = _least_room(workers) if memory_bytes is None else memory_bytes

    def groups(some: Sequence[Weight]) -> Iterator[list[Weight]]:
        return _groups(some, wanted, room, copies, refuse=memory_bytes is not None)

    several = len(list(groups(weights))) > 1
    # Of layers in float16 one at a time is float32, if it is measured layer by layer.
    widened = 4 * sum(p.numel() for p in model.parameters() if p.dtype == torch.float16)
    # A decoder's layers read which tokens the encoder was given, which is known while the encoder runs.
    chained = (several or widened > room) and not is_encoder_decoder(model)
    layers = longest_list(model) if chained else ()
    spill = None if scratch is None or not several else Spill(scratch)
    # Of the blocks whose sums this worker takes (``Workers.gathered``) the inputs of layers go to its disk.
    own = {index: blocks[index] for place, index in enumerate(blocks) if place % workers.count == workers.rank}
    # Who get the means: all, or the first alone, which writes them.
    sharing = workers if file is None else Workers() if workers.first else None
    if layers and not _is_chain(model, layers, weights, kept, wanted, objective):
        layers = ()
    with (
        one_by_one(module for module, _, role in places(model, weights) if role == "experts"),
        frozen(model, layers),
        explained(model, _UNMEASURED),
        progress_bar(quiet=quiet) as update,
    ):
        job = Job(model, weights, kept, wanted, objective)
        means: dict[str, Measured] = {}
        for one_sample in (False, True):
            chosen = [w for w in weights if (w.name in job.without_layout) == one_sample]
            chain = None if one_sample or not layers else job.chain(layers, Spill(scratch), chosen)
            if chain is None:
                passes: Iterator[Pass] = (Pass("measuring", group) for group in groups(chosen))
            else:
                passes = chain.passes(own, chosen, groups)
            for one in passes:
                update(one.what, 0, len(blocks))
                sums = merge(_summed(job, blocks, one, one_sample, update, workers))
                # Before the next group begins, so that the sums of this group are off the device.
                done = [w for w in one.weights if one_sample or w.name not in job.without_layout]
                for w in done:
                    summed = sums.pop(w.name)
                    if sharing is not None:
                        mean = _mean(w, wanted[w.name], summed, sharing)
                        means[w.name] = mean if spill is None else mean.kept_by(spill.kept)
    if sharing is not None:
        by_name = {w.name: means[w.name] for w in weights}
        unreached = tuple(name for name, one in by_name.items() if wanted[name] and _is_unreached(one))
        if unreached:
            announce(
                f"never reached by this data: {some(unreached, 5)}; the statistics of these weights are zero",
                quiet=quiet,
            )
        samples = max(one.samples for one in by_name.values())
        statistics = Statistics(by_name, samples, job.about, fingerprint(model), unreached)
        if file is None:
            return statistics
        statistics.save(file)
    assert file is not None
    workers.meet()
    if not workers.first and not Path(file).is_file():
        raise KflatsError(
            f"worker {workers.rank} cannot read the statistics {file}, which the first worker wrote",
            cause="the workers do not see one folder",
            hint="an output in a folder that all workers see",
        )
    return Statistics.load(file, mapped=True)


def _summed(
    job: Job, blocks: Mapping[int, SampleBlock], one: Pass, one_sample: bool, update: Update, workers: Workers
) -> Iterator[tuple[int, dict[str, Sums]]]:
    """(block index, sums by weight) of each block; the first worker alone has the tensors."""
    indices = list(blocks)

    def work(place: int) -> tuple[dict[str, Tensor], str]:
        sums = job.sum(blocks[indices[place]], one.weights, one_sample, one.step)
        update(one.what, place + 1, len(blocks))
        tensors = {f"{name}\n{key}": value for name, of in sums.items() for key, value in of.tensors.items()}
        return tensors, json.dumps([{name: of.counts for name, of in sums.items()}, sorted(job.without_layout)])

    tasks = [f"measuring with samples {index * BLOCK} and on" for index in indices]
    for index, (tensors, about) in zip(indices, workers.gathered(tasks, work), strict=True):
        counts, without_layout = json.loads(about)
        sums = {name: Sums({}, counts[name]) for name in counts}
        for name in list(tensors):
            weight, key = name.split("\n")
            sums[weight].tensors[key] = job.on_device(tensors.pop(name))
        job.without_layout |= set(without_layout)
        yield index, sums
        del sums, tensors  # before the next block is summed


def _mean(weight: Weight, needs: frozenset[str], sums: Sums, workers: Workers) -> Measured:
    """The means of a weight, which the first worker makes of its ``sums``, at every worker."""

    def work(_: int) -> tuple[dict[str, Tensor], str]:
        made = vars(measured(weight, needs, sums))
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return tensors, json.dumps({name: value for name, value in made.items() if name not in tensors})

    ((tensors, numbers),) = workers.in_turn([f"measuring {weight.name}"], work)
    return Measured(**(json.loads(numbers) | tensors))


class Job:
    """A pass over one calibration set, of a model that is ``frozen`` meanwhile.

    ``without_layout`` holds the names of weights that have to be run with one sample at a time; ``about`` describes the
    objective, {} if no gradients are needed.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        batches: Sequence[Batch],
        wanted: Mapping[str, frozenset[str]],
        objective: Objective | None,
    ) -> None:
        self._model, self._wanted, self._device = model, wanted, device_of(model)
        self._gradients = gradients = any(fields & GRADIENTS for fields in wanted.values())
        chosen: Objective = objective_of(batches, objective) if gradients else Projections()
        first = to_device(batches[0], self._device)
        if isinstance(chosen, TaskLoss):
            chosen = chosen.resolved(model, first)
        self._objective = chosen
        self.about = describe(chosen) if gradients else {}
        counts: list[int] = []  # of losses; find_layouts begins with two samples

        def forward(batch: Batch) -> object:
            if not gradients:
                return run(model, batch)
            losses = chosen.losses(model, batch)
            counts.append(losses.numel())
            return losses

        self._first = first
        self._layouts: dict[int, SampleLayout] = {}
        self._whole = self._joined = False
        try:
            self._layouts = find_layouts(model, weights, first, forward)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            # Patches of all images in one row, beside a table of their places: no part of it is a batch.
            with torch.no_grad():
                forward(first)  # says what else is wrong
            if isinstance(error, KflatsError):
                raise
            self._whole = True
        # Images of all samples in one row, frames or codebooks beside the samples: only one sample's are known.
        self._joined = isinstance(chosen, Projections) and not self._whole and counts[:1] not in ([], [2])
        alone = self._whole or self._joined
        modules = places(model, weights)
        self.without_layout = {w.name for module, w, _ in modules if alone or self._layouts.get(id(module)) == ALONE}

    def chain(self, layers: Sequence[nn.Module], spill: Spill, weights: Sequence[Weight]) -> Chain | None:
        """The model as a chain of ``layers``; None where it is none."""
        chain = Chain(self._model, layers, self._gradients, self._run, spill)
        one = take(self._first, torch.tensor([0]))
        return chain if chain.holds(one, weights, self._losses) else None

    def _run(self, batch: Batch, first: int) -> Tensor | None:
        """The losses, or None if no gradients are needed; without a backward pass."""
        there = to_device(batch, self._device)
        with torch.set_grad_enabled(self._gradients):
            if self._gradients:
                return self._losses(there, first)
            run(self._model, there)
            return None

    def sum(
        self, block: SampleBlock, weights: Sequence[Weight], one_sample: bool, step: Step | None = None
    ) -> dict[str, Sums]:
        """The sums of one block. Names of weights that have to be run with one sample at a time are added to
        ``without_layout``. ``step``: what runs the part of the model that these weights are in; None: all of it."""
        inputs = Inputs()
        sums = {w.name: Accumulator(w, self._wanted[w.name], self._device, inputs) for w in weights}
        gradients = frozenset(name for name, one in sums.items() if one.wants_gradients)
        recorder = ActivationRecorder(
            self._model,
            weights,
            lambda call, entered: sums[call.weight].add_input(call, entered),
            lambda name, calls: sums[name].add_gradients(calls),
            self._layouts,
            gradients,
            one_sample,
        )
        seen = 0
        with recorder.attached(), torch.set_grad_enabled(bool(gradients)):
            for first, whole in block:
                there = to_device(whole, self._device)
                samples = 1 if self._whole else batch_size(there)
                alone = one_sample and not self._whole
                parts = [take(there, torch.tensor([s])) for s in range(samples)] if alone else [there]
                for place, batch in enumerate(parts, first):
                    recorder.start(batch, 1 if self._whole else batch_size(batch))
                    if step is not None:
                        step(batch, place)
                    elif gradients:
                        losses = self._losses(batch, place)
                        if losses.requires_grad:
                            # The sum, not the mean: then each activation's gradient is that of its own sample's loss.
                            losses.sum().backward()
                    else:
                        run(self._model, batch)
                    recorder.finish()
                    inputs.forget()
                seen += samples
        self.without_layout |= recorder.without_layout
        return {name: one.sums(seen) for name, one in sums.items()}

    def on_device(self, sum_of_block: Tensor) -> Tensor:
        """Where the sums of this process's own blocks are."""
        return sum_of_block.to(self._device)

    def _losses(self, batch: Batch, first: int) -> Tensor:
        losses = self._objective.losses(self._model, batch, first)
        if self._whole or self._joined:
            losses = losses.sum().unsqueeze(0)
        elif losses.shape != (batch_size(batch),):
            raise KflatsError(
                f"the objective gave losses of shape {tuple(losses.shape)} for {batch_size(batch)} samples",
                hint="one loss a sample, (B,)",
            )
        finite = torch.isfinite(losses.detach())
        if not bool(finite.all()):
            raise NotFiniteError(
                f"the loss of sample {first + int((~finite).nonzero()[0])} is NaN or infinite",
                cause="training that diverged, half precision that overflows, or NaN among the labels",
                hint="the model in float32, or another checkpoint",
            )
        return losses


def _is_chain(
    model: nn.Module,
    layers: Sequence[nn.Module],
    weights: Sequence[Weight],
    batches: Sequence[Batch],
    wanted: Mapping[str, frozenset[str]],
    objective: Objective | None,
) -> bool:
    """Whether ``model`` runs, and is a chain, where ``layers`` are widened one by one: it may read their types."""
    with frozen(model, layers):
        try:
            return Job(model, weights, batches, wanted, objective).chain(layers, Spill(None), weights) is not None
        except (KflatsError, RuntimeError, TypeError, ValueError, IndexError):
            return False


def _least_room(workers: Workers) -> int:
    """Bytes for sums where the caller names none: of the worker with the least memory, for all must choose alike."""
    own = min(4_000_000_000, unused_bytes() // 4)
    tasks = [f"choosing memory for sums, worker {rank}" for rank in range(workers.count)]
    return min(int(text) for _, text in workers.in_turn(tasks, lambda _: ({}, str(own))))


def in_blocks(batches: Sequence[Batch]) -> dict[int, SampleBlock]:
    """The batches by block, each with the index of its first sample; that sample decides the block of the batch."""
    blocks: dict[int, SampleBlock] = {}
    first = 0
    for batch in batches:
        blocks.setdefault(first // BLOCK, []).append((first, batch))
        first += batch_size(batch)
    return blocks


def _wanted(
    weights: Sequence[Weight], needs: Mapping[str, frozenset[str]] | frozenset[str]
) -> dict[str, frozenset[str]]:
    if not weights:
        raise KflatsError("there are no weights to measure", hint="the weights that find_weights gives")
    if not isinstance(needs, Mapping | Set):
        raise KflatsError(f"needs={needs!r} must be a set of fields", hint="an importance's needs, or {'row_fisher'}")
    wanted = {}
    for weight in weights:
        fields = frozenset(needs.get(weight.name, frozenset()) if isinstance(needs, Mapping) else needs)
        if unknown := sorted(fields - set(FIELDS)):
            raise KflatsError(f"{unknown[0]!r} cannot be measured", hint="one of " + ", ".join(FIELDS))
        wanted[weight.name] = fields
    if isinstance(needs, Mapping) and (unknown := sorted(set(needs) - set(wanted))):
        raise KflatsError(f"{unknown[0]!r} is none of the weights to measure", hint="a weight that is measured")
    return wanted


def _checked(batches: Iterable[Batch], model: nn.Module) -> tuple[dict[str, BatchValue], ...]:
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise KflatsError(
            f"calibration batches must be a list of dicts, not one {type(batches).__name__}",
            hint="several batches in a list",
        )
    kept = []
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise KflatsError(
                f"a calibration batch must be a dict of tensors, not {type(batch).__name__}",
                hint="batches such as text_batches makes of texts",
            )
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and len(ids) != len(mask):
            raise KflatsError(
                f"a calibration batch has {len(ids)} texts and attention masks of {len(mask)}",
                cause="each text needs one attention mask",
            )
        if isinstance(ids, Tensor) and ids.numel():
            check_ids([[int(ids.min()), int(ids.max())]], model, "a calibration batch")
        if batch_size(batch):
            kept.append(dict(batch))
    if not kept:
        raise KflatsError(
            "the calibration set is empty", hint="a few hundred samples, of a generator that is not used up"
        )
    return tuple(kept)


def _groups(
    weights: Sequence[Weight], wanted: Mapping[str, frozenset[str]], memory_bytes: int, copies: int, *, refuse: bool
) -> Iterator[list[Weight]]:
    """Weights whose sums fit into memory together, in the model's order. ``refuse``: a weight that does not fit."""
    group: list[Weight] = []
    used = 0
    for weight in weights:
        cost = copies * Accumulator.nbytes(weight, wanted[weight.name])
        if cost > memory_bytes and refuse:
            raise KflatsError(
                f"the statistics of {weight.name} take {size(cost)}, and {size(memory_bytes)} are allowed",
                hint="fewer weights, a larger memory_bytes, or RowFisher() for this one",
            )
        if group and used + cost > memory_bytes:
            yield group
            group, used = [], 0
        group.append(weight)
        used += cost
    if group:
        yield group


def _is_unreached(one: Measured) -> bool:
    """Whether no sample reached the weight: sums of squares are zero then, and so are the diagonals of Grams."""
    outputs = one.output_gram if one.output_gram is None or one.output_gram.ndim == 1 else one.output_gram.diagonal()
    squares = [one.row_fisher, one.column_fisher, outputs]
    return one.positions == 0 or any(values is not None and not bool(values.any()) for values in squares)
