"""Sequential calibration: each linear layer is coded for what it reads behind coded tables and layers.

Tables, and all that is no linear layer in codes, are fitted first, from the measurements of the original model. Then
linear layers are coded in the order in which the model calls them. The target of a layer is a part of the way from its
own matrix M to the one whose outputs are nearest to the original's when its inputs come from tables and layers that are
coded already (``calibration.sequential``). Bytes that a weight leaves of its budget go to the layers after it; where
codes of these have one size, the largest weight takes them, which is fitted once more in the end.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kflats.calibration.sequential import Blocks, Moments
from kflats.calibration.windows import drawn_windows
from kflats.common.errors import KflatsError
from kflats.common.formatting import announce, progress_bar
from kflats.common.texts import SAMPLES
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Workers
from kflats.compress.fitting import CompressedWeight, Fits, Partial, Target
from kflats.evaluation.running import Batch, batch_size, modalities_of
from kflats.model.weights import Weight, dense_weight
from kflats.planning.calibration_data import CalibrationData, needed
from kflats.planning.decide import Decided
from kflats.recipe.recipe import Decision

_PART, _DAMPING = 0.5, 0.25
"""Of the target: its part of the way (``benchmarks/sequential.py``), and its damping, about what importance and codec
add to a Gram matrix."""
_WIDEST, _WIDE = 8192, 2
"""Inputs of a layer up to which it has a target: its moments and their factor then take 1.6 GB. And inputs an output: a
layer with more of them, as the second of a feed-forward network, costs most and gains least
(``benchmarks/sequential.py --wide 9``)."""
_WINDOWS = SAMPLES
"""How many windows layers are run on, at most; of given batches up to twice as many samples."""
_NOTE = "coded behind coded layers"
_ALONE = (
    "each linear layer is coded by itself: sequential calibration needs a model that is a chain of blocks, and "
    "12 tokens of data for each input of a layer"
)


def fitted(
    model: nn.Module,
    decided: Decided,
    seed: int,
    quiet: bool,
    partial: Partial | None,
    file_limit: int | None = None,
    workers: Workers | None = None,
    *,
    sequential: bool = True,
) -> list[CompressedWeight]:
    """``factorize``, by sequential calibration where it can be.

    Args:
        sequential: False: each weight is fitted by itself. So it is also where nothing can be run: without texts,
            batches or a tokenizer, and in a model that is no chain of blocks.

    Raises:
        KflatsError: as ``factorize``.
    """
    plan, data = decided.plan, decided.data
    with progress_bar(quiet=quiet) as update:
        fits = Fits.of(model, plan, data, seed, partial, update, workers or Workers(), file_limit)
        done, decisions = fits.begun()
        layers = {one.weight.name: one for one in decisions if _has_target(one)}
        blocks = _blocks(fits, decisions, layers, quiet) if sequential and layers else None
        if blocks is not None:
            # Bytes pass on in another order: what was kept of one way is nothing for the other.
            fits = replace(fits, partial=partial and partial.beside("sequential"))
            fits.add_to_(done, [one for one in decisions if one.weight.name not in layers])
            last = fits.adjusted(decisions)
            # Layers whose codes have one size take no bytes more: what is left is for the largest weight then.
            takes_rest = last is not None and not any(one.recipe.codec.any_size for one in layers.values())
            _Layers(fits, blocks, layers, shares=not takes_rest).add_to_(done)
            decisions = []
            if last is not None and takes_rest:
                fits = replace(fits, partial=partial and partial.beside("sequential, last"))
                decisions = [last]
                del done[last.weight.name]
        fits.finish_(done, decisions)
    return [done[decision.weight.name] for decision in plan.decisions]


@dataclass(frozen=True)
class _Layers:
    """Linear layers by name that are coded one after another. ``shares``: each has its share of what the weights before
    it left of the budget."""

    fits: Fits
    blocks: Blocks
    decisions: Mapping[str, Decision]
    shares: bool

    def add_to_(self, done: dict[str, CompressedWeight]) -> None:
        """Code all of them, behind what is ``done``, and add them to it."""
        tables = [
            (one.decision.weight, one.matrix)
            for one in done.values()
            if one.matrix is not None and one.decision.weight.places[0].role == "embedding"
        ]

        def recode(weights: Sequence[Weight], moments: Moments | None) -> dict[str, tuple[Tensor, Tensor | None]]:
            waiting = [one for name, one in self.decisions.items() if name not in done]
            names = {weight.name for weight in weights}
            given = [one for one in waiting if one.weight.name in names]
            targets = {} if moments is None else self._targets(given, moments)
            self.fits.add_to_(done, self.fits.with_room(done, waiting, given) if self.shares else given, targets)
            return {weight.name: (done[weight.name].dense(), done[weight.name].bias_shift) for weight in weights}

        def show(text: str) -> None:
            self.fits.update(text, len(done), len(self.fits.plan.decisions))

        self.blocks.recalibrate(tables, recode, show)

    @usual_settings()
    def _targets(self, given: Sequence[Decision], moments: Moments) -> dict[str, Target]:
        """What is coded in place of the matrices of layers. Where importance is centred, the bias takes all means."""
        data, model = self.fits.data, self.fits.model
        matrices = {one.weight.name: dense_weight(model, one.weight).cpu().to(torch.float64) for one in given}
        centred = [one.weight.name for one in given if data.matrix(model, one.weight, one.recipe)[1].mean is not None]
        plain = [name for name in matrices if name not in centred]
        wanted = dict(zip(plain, moments.targets([matrices[name] for name in plain], _PART, _DAMPING), strict=True))
        if centred:
            spread = moments.centred_()
            found = spread.targets([matrices[name] for name in centred], _PART, _DAMPING)
            wanted |= dict(zip(centred, found, strict=True))

        def shift(matrix: Tensor, made: Tensor) -> Tensor:
            return _PART * moments.away @ matrix + moments.mean @ (matrix - made)

        return {
            name: Target(target.float(), functools.partial(shift, matrices[name]) if name in centred else None, _NOTE)
            for name, target in wanted.items()
        }


def _blocks(fits: Fits, decisions: Sequence[Decision], with_targets: Collection[str], quiet: bool) -> Blocks | None:
    """The blocks of the model with what they are run on. None where there are none, and a line if there is data."""
    measured = fits.data.statistics is not None and bool(needed((one.weight, one.recipe) for one in decisions))
    batches = _windows(fits.model, fits.data, measured)
    scratch = None if fits.partial is None else fits.partial.folder
    layers = [one.weight for one in decisions if _is_layer(one)]
    blocks = Blocks.of(fits.model, layers, with_targets, batches, scratch, fits.workers)
    announce(_ALONE, quiet=quiet or blocks is not None or not batches)
    return blocks


def _has_target(decision: Decision) -> bool:
    """Whether it is of a linear layer in codes whose target is worth its cost."""
    n, d = decision.weight.shape
    return _is_layer(decision) and decision.recipe.is_coded and n <= min(_WIDEST, _WIDE * d)


def _is_layer(decision: Decision) -> bool:
    """Whether it is of one linear layer."""
    places = decision.weight.places
    return len(places) == 1 and places[0].role in ("linear", "conv1d")


def _windows(model: nn.Module, data: CalibrationData, measured: bool) -> list[Batch]:
    """The batches that layers are run on: of the calibration data, of the texts, or drawn, where windows were drawn to
    measure with; [] where there is none."""
    try:
        if data.calibration or data.counts:
            batches = replace(data, samples=min(data.samples, _WINDOWS)).batches(model)
        elif measured and data.tokenizer is not None and modalities_of(model) == ("input_ids",):
            drawn = drawn_windows(data.tokenizer, samples=_WINDOWS, model=model)
            batches = replace(data, windows=drawn).batches(model)
        else:
            return []
    except KflatsError:  # what a model cannot read has no windows, as when it is measured
        return []
    batches = [batch for batch in batches if batch_size(batch)]
    return batches[:: max(1, sum(map(batch_size, batches)) // _WINDOWS)] if data.calibration else batches
