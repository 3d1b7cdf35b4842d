"""One streamed pass over a calibration set: Fisher information and activations of any weights, bounded in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn

from kflats.calibration.accumulators import GRADIENTS, Accumulator, Inputs, measured
from kflats.calibration.batches import BLOCK
from kflats.calibration.hooks import ActivationRecorder, LayerCall, frozen
from kflats.calibration.layouts import ALONE, find_layouts, places
from kflats.calibration.measurements import FIELDS, Statistics, Sums, fingerprint, merge
from kflats.calibration.objectives import Objective, Projections, TaskLoss, describe, objective_of
from kflats.calibration.running import batch_size, run, take, to_device
from kflats.common.errors import KflatsError
from kflats.common.formatting import size, visible
from kflats.common.progress import Update, progress_bar
from kflats.common.schema import JsonObject
from kflats.evaluation.encoding import Batch, BatchValue
from kflats.importance.measured import Measured
from kflats.model.weights import Weight

__all__ = ["Statistics", "measure"]

_EXPONENT = 10  # of the first scale, and of the largest gradient after another
_SMALLEST = 0.25  # what the largest gradient of a sample must reach
_STEP = 12  # how far a scale falls after an overflow
_MAX_EXPONENT = 60


def measure(
    model: nn.Module,
    weights: Sequence[Weight],
    batches: Iterable[Batch],
    *,
    needs: Mapping[str, frozenset[str]] | frozenset[str],
    objective: Objective | None = None,
    memory_bytes: int = 4_000_000_000,
    quiet: bool = False,
) -> Statistics:
    """Measure what importances need, from each single sample's own gradient:

        row_fisher      I_i  = sum_j  mean_s (dL_s / dM_ij)^2           (FWSVD, Hsu et al., ICLR 2022, eq. 3, 5)
        column_fisher   the same over rows
        input_gram      mean over positions of x x'; input_mean comes with it
        output_gram     mean over samples of sum_t g_t g_t'             (K-FAC, Martens and Grosse 2015)
        fisher_gram     as input_gram, a position's share being ||g_t||^2; fisher_mean comes with it
        counts          how often a table's rows are read

    A sample is one row of a batch: a sequence, an image. Its positions, and all calls of a shared layer or a tied
    table, add before squaring. Padding (``attention_mask``) is left out. The model runs in eval mode with frozen
    parameters; afterwards it is as it was, after exceptions too.

    Cost: a plain forward and backward, or less, for row_fisher; grams add n^2 + d^2 products a position. A layer
    that sees all samples as one (a table of positions) is run sample by sample. Sums beyond ``memory_bytes`` are
    measured in several passes. A few hundred samples do: a Gram of fewer positions than neurons is of low rank,
    and importances damp it.

    A table tied to an output head has two terms, reads (x) gradients and logit gradients (x) hidden states; asked
    for output_gram, both Grams are those of the nearest single product, the input's summing to 1; asked for
    input_gram alone, reads plus the mean square of hidden states.

    In a float16 model, and under float16 autocast, each sample's loss is scaled by a power of two, chosen from its
    gradients, and the gradients are divided by it in float32: they neither underflow nor overflow.

    Samples are summed in blocks of 64 (``BLOCK``), each block alone; block sums are added in the order of the samples
    (``measurements.merge``). The bits of the statistics do not depend on which process sums a block.

    Args:
        model: any torch module.
        weights: from ``find_weights``.
        batches: dicts of tensors, as for ``model(**batch)``; kept in memory.
        needs: what to measure, of all weights or by weight name: an importance's ``needs``.
        objective: whose gradients; by default ``TaskLoss()`` where batches have labels, ``Projections()`` where none
            has.
        memory_bytes: of sums at once, float64, on the model's device: those of one block of samples, and of all blocks
            before it. What they come to is kept on the CPU.
        quiet: no progress bar, and no line on weights that were never reached.

    Raises:
        KflatsError: no batches, labels of some batches missing or out of range, a head of another task, token ids
            beyond the model's vocabulary, a loss or a sum that is not finite, gradients that underflow float16
            at every scale, a weight whose sums alone exceed
            ``memory_bytes``.

    >>> from kflats.model.weights import find_weights
    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> batches = [{"input": torch.eye(3), "labels": torch.tensor([0, 1, 1])}]
    >>> found = measure(model, find_weights(model), batches, needs=frozenset({"row_fisher"}), quiet=True)
    >>> found.of("0").row_fisher.shape, found.samples
    (torch.Size([3]), 3)
    """
    wanted = _wanted(weights, needs)
    kept = _checked(batches)
    with frozen(model), progress_bar(quiet=quiet) as update:
        job = Job(model, weights, kept, wanted, objective, update)
        copies = min(len(_blocks(kept)), 2)  # the sums of all blocks before, and of one block
        means: dict[str, Measured] = {}
        for one_sample in (False, True):
            asked_now = [w for w in weights if (w.name in job.without_layout) == one_sample]
            for group in _groups(asked_now, wanted, memory_bytes, copies):
                sums = merge(job.blocks(group, one_sample))
                # Before the next group begins: then the sums of this one are off the device.
                done = [w for w in group if one_sample or w.name not in job.without_layout]
                means |= {w.name: measured(w, wanted[w.name], sums.pop(w.name)) for w in done}
    by_name = {w.name: means[w.name] for w in weights}
    reached = {name for name, one in by_name.items() if not wanted[name] or not _is_unreached(one)}
    return _statistics(model, by_name, reached, job.about, quiet)


class Job:
    """Passes over one calibration set, of a model that is ``frozen`` meanwhile.

    ``without_layout`` holds the names of weights that have to be run with one sample at a time; ``about`` describes the
    objective, {} where no gradients are needed.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        batches: Sequence[Batch],
        wanted: Mapping[str, frozenset[str]],
        objective: Objective | None,
        update: Update,
    ) -> None:
        self._model, self._batches, self._wanted, self._update = model, batches, wanted, update
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        gradients = any(fields & GRADIENTS for fields in wanted.values())
        chosen: Objective = objective_of(batches, objective) if gradients else Projections()
        _check_ids(model, batches)
        first = to_device(batches[0], self._device)
        if isinstance(chosen, TaskLoss):
            chosen = chosen.resolved(model, first)
        self._objective = chosen
        self.about = describe(chosen) if gradients else {}
        forward = partial(chosen.losses, model) if gradients else partial(run, model)
        self._layouts = find_layouts(model, weights, first, forward)
        alone = {w.name for module, w, _ in places(model, weights) if self._layouts.get(id(module)) == ALONE}
        self.without_layout: set[str] = alone

    def blocks(
        self, weights: Sequence[Weight], one_sample: bool, share: range | None = None
    ) -> Iterator[tuple[int, dict[str, Sums]]]:
        """(block index, sums by weight) of each block of ``share``, by default of all; names of weights that have to be
        run with one sample at a time are added to ``without_layout``."""
        blocks = _blocks(self._batches)
        self._summed = 0
        self._update("measuring", 0, len(self._batches))
        for index in blocks if share is None else [i for i in share if i in blocks]:
            yield index, self._sum(blocks[index], weights, one_sample)

    def _sum(
        self,
        batches: Sequence[tuple[int, Batch]],
        weights: Sequence[Weight],
        one_sample: bool,
    ) -> dict[str, Sums]:
        """The sums of one block, of batches with the places of their first samples."""
        inputs = Inputs()
        sums = {w.name: Accumulator(w, self._wanted[w.name], self._device, inputs) for w in weights}
        gradients = frozenset(name for name, one in sums.items() if one.wants_gradients)

        def on_input(call: LayerCall, given: Tensor) -> None:
            sums[call.weight].add_input(call, given)

        def on_gradients(name: str, calls: list[LayerCall]) -> None:
            sums[name].add_gradients(calls)

        scaled = _is_float16(self._model, self._device)
        recorder = ActivationRecorder(
            self._model, weights, on_input, on_gradients, self._layouts, gradients, one_sample, repeats=scaled
        )
        seen = 0
        with recorder.attached(), torch.set_grad_enabled(bool(gradients)):
            for first, whole in batches:
                there = to_device(whole, self._device)
                samples = batch_size(there)
                parts = [take(there, torch.tensor([s])) for s in range(samples)] if one_sample else [there]
                for place, batch in enumerate(parts, first):
                    recorder.start(batch)
                    losses = self._pass(batch, place, bool(gradients))
                    if losses is not None and losses.requires_grad:
                        # The sum, not the mean: then each activation's gradient is that of its own sample's loss.
                        _backward_scaled(losses, recorder) if scaled else losses.sum().backward()
                    recorder.finish()
                    inputs.forget()
                seen += samples
                self._summed += 1
                self._update("measuring", self._summed, len(self._batches))
        self.without_layout |= recorder.without_layout
        return {name: one.sums(seen) for name, one in sums.items()}

    def _pass(self, batch: dict[str, BatchValue], first: int, gradients: bool) -> Tensor | None:
        if not gradients:
            run(self._model, batch)
            return None
        losses = self._objective.losses(self._model, batch, first)
        if losses.shape != (batch_size(batch),):
            raise KflatsError(
                f"the objective gave losses of shape {tuple(losses.shape)} for {batch_size(batch)} samples",
                hint="one loss a sample, (B,)",
            )
        finite = torch.isfinite(losses.detach())
        if not bool(finite.all()):
            raise KflatsError(
                f"the loss of sample {first + int((~finite).nonzero()[0])} is NaN or infinite",
                cause="training that diverged, half precision that overflows, or NaN among the labels",
                hint="the model in float32, or another checkpoint",
            )
        return losses


def _blocks(batches: Sequence[Batch]) -> dict[int, list[tuple[int, Batch]]]:
    """Batches with the place of their first sample, by block: that of the first sample, in units of ``BLOCK``."""
    blocks: dict[int, list[tuple[int, Batch]]] = {}
    first = 0
    for batch in batches:
        blocks.setdefault(first // BLOCK, []).append((first, batch))
        first += batch_size(batch)
    return blocks


def _is_float16(model: nn.Module, device: torch.device) -> bool:
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16:
        return True
    return any(p.dtype == torch.float16 for p in model.parameters())


@dataclass
class _Scale:
    """The power of two of one sample's loss: searched between the largest that fits and the least that overflows."""

    exponent: int = _EXPONENT
    fits: int | None = None
    overflows: int = _MAX_EXPONENT + 1

    def change(self, largest: float) -> bool:
        """Whether another exponent is to be tried, after backward at this one gave the ``largest`` gradient."""
        before = self.exponent
        if not math.isfinite(largest):
            self.overflows = before
            self.exponent = max(before - _STEP if self.fits is None else (self.fits + before) // 2, -_MAX_EXPONENT)
        elif largest < _SMALLEST:
            self.fits = before
            wanted = before + (_EXPONENT - math.frexp(largest)[1] if largest else 2 * _STEP)
            most = self.overflows - 1 if self.overflows > _MAX_EXPONENT else (before + self.overflows) // 2
            self.exponent = min(wanted, most)
        return self.exponent != before


def _backward_scaled(losses: Tensor, recorder: ActivationRecorder) -> None:
    """Backward with each sample's loss times a power of two, so that its gradients fit float16; the recorded gradients
    are divided by it.

    Loss scaling (Micikevicius et al., ICLR 2018), by sample: losses of one batch may differ by orders of magnitude.
    Scales depend on their own batch alone. Backward is repeated until every sample's largest gradient is at least
    ``_SMALLEST`` and none overflows.
    """
    scales = [_Scale() for _ in losses]
    while True:
        factors = [2.0**scale.exponent for scale in scales]
        (losses.float() * torch.tensor(factors, device=losses.device)).sum().backward(retain_graph=True)
        largest = recorder.largest_gradients()
        changed = [scale.change(value) for scale, value in zip(scales, largest, strict=True)]
        if not any(changed):
            break
    if not all(map(math.isfinite, largest)):
        raise KflatsError(
            "gradients are NaN or infinite in float16 at every scale of the loss",
            cause="activations whose gradients differ by more than float16 can hold",
            hint="measure with the model in float32 or bfloat16",
        )
    recorder.unscale(factors)


def _wanted(
    weights: Sequence[Weight], needs: Mapping[str, frozenset[str]] | frozenset[str]
) -> dict[str, frozenset[str]]:
    if not weights:
        raise KflatsError("there are no weights to measure", hint="find_weights(model)", command="--weights linear")
    if not isinstance(needs, Mapping | Set):
        raise KflatsError(f"needs={needs!r} must be a set of fields", hint="an importance's needs, or {'row_fisher'}")
    found = {}
    for weight in weights:
        fields = frozenset(needs.get(weight.name, frozenset()) if isinstance(needs, Mapping) else needs)
        if unknown := sorted(fields - set(FIELDS)):
            raise KflatsError(f"{unknown[0]!r} cannot be measured", hint="one of " + ", ".join(FIELDS))
        found[weight.name] = fields
    if isinstance(needs, Mapping) and (unknown := sorted(set(needs) - set(found))):
        raise KflatsError(f"{unknown[0]!r} is none of the weights to measure", hint="a weight that is measured")
    return found


def _checked(batches: Iterable[Batch]) -> tuple[dict[str, BatchValue], ...]:
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise KflatsError(
            f"calibration batches must be a list of dicts, not one {type(batches).__name__}",
            hint="[batch]",
            command="--calibration FILE with one text a line",
        )
    kept = []
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise KflatsError(
                f"a calibration batch must be a dict of tensors, not {type(batch).__name__}",
                hint="text_batches(texts, tokenizer), or dicts as for model(**batch)",
                command="--calibration FILE with one text a line",
            )
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and len(ids) != len(mask):
            raise KflatsError(
                f"a calibration batch has {len(ids)} texts and attention masks of {len(mask)}",
                cause="each text needs one attention mask",
            )
        if batch_size(batch):
            kept.append(dict(batch))
    if not kept:
        raise KflatsError(
            "the calibration set is empty",
            cause="no batches, or a generator that is used up",
            hint="a few hundred samples",
        )
    return tuple(kept)


def _check_ids(model: nn.Module, batches: Sequence[Batch]) -> None:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    for batch in batches:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or not ids.numel() or not isinstance(vocabulary, int):
            continue
        if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
            wrong = int(ids.max()) if int(ids.max()) >= vocabulary else int(ids.min())
            raise KflatsError(
                f"the calibration batches hold the token id {wrong}, the model's vocabulary has {vocabulary}",
                cause="a tokenizer of another model",
                hint="the tokenizer of the model's own folder",
            )


def _groups(
    weights: Sequence[Weight], wanted: Mapping[str, frozenset[str]], memory_bytes: int, copies: int
) -> Iterator[list[Weight]]:
    """Weights whose sums fit into memory together, in the model's order."""
    group: list[Weight] = []
    used = 0
    for weight in weights:
        cost = copies * Accumulator.nbytes(weight, wanted[weight.name])
        if cost > memory_bytes:
            raise KflatsError(
                f"the statistics of {weight.name} take {size(cost)}, and {size(memory_bytes)} are allowed",
                cause="a Gram of a wide side, such as a vocabulary's",
                hint=f"memory_bytes={cost}, or leave the weight out, or RowFisher for it",
                command="fewer weights, or --importance row-fisher",
            )
        if group and used + cost > memory_bytes:
            yield group
            group, used = [], 0
        group.append(weight)
        used += cost
    if group:
        yield group


def _statistics(
    model: nn.Module, measured: Mapping[str, Measured], reached: set[str], about: JsonObject, quiet: bool
) -> Statistics:
    unreached = tuple(name for name in measured if name not in reached)
    if unreached and not quiet:
        names = ", ".join(map(visible, unreached[:5])) + (
            f" and {len(unreached) - 5} more" if len(unreached) > 5 else ""
        )
        Console(stderr=True).print(
            f"never reached by this data: {names}; what was measured there is zero", markup=False, highlight=False
        )
    samples = max(one.samples for one in measured.values())
    return Statistics(measured, samples, about, fingerprint(model), unreached)


def _is_unreached(one: Measured) -> bool:
    if one.positions == 0:
        return True
    # Entries that are squares, and the diagonals of Grams: zero only where all is.
    found = [one.row_fisher, one.column_fisher, one.output_gram]
    return any(not bool((g.diagonal() if g is one.output_gram else g).any()) for g in found if g is not None)
