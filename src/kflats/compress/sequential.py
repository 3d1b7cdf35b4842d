"""Sequential calibration: linear layers are coded a second time, for what they read behind coded layers.

All weights are fitted first, from one measurement of the original model. Then each linear layer of a block is coded
again in the bytes that it has. Its target is half the way from its own matrix M to the one whose outputs are nearest to
the original's when its inputs come from tables and layers that are coded already (``calibration.sequential``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kflats.calibration.sequential import Moments, recalibrate
from kflats.calibration.windows import drawn_windows
from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.common.formatting import announce, progress_bar
from kflats.common.texts import SAMPLES
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Packed, Workers
from kflats.compress.fitting import CompressedWeight, Fits, Partial, factorize
from kflats.evaluation.running import Batch, batch_size, modalities_of
from kflats.methods.protocol import Problem
from kflats.model.weights import Weight, dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import bias_bytes
from kflats.planning.decide import Decided

_PART, _DAMPING = 0.5, 0.25
"""Of the target: its part of the way (``benchmarks/sequential.py``), and its damping, about what importance and codec
add to a Gram matrix."""
_WINDOWS = SAMPLES
"""How many windows layers are run on, at most."""
_NOTE = "coded again behind coded layers"


def fitted(
    model: nn.Module,
    decided: Decided,
    seed: int,
    quiet: bool,
    partial: Partial | None,
    file_limit: int | None = None,
    workers: Workers | None = None,
    *,
    sequential: bool = False,
) -> list[CompressedWeight]:
    """``factorize``, and then sequential calibration.

    Args:
        sequential: whether linear layers are coded again. They keep their codes where nothing can be run: without
            texts, batches or a tokenizer, or in a model that is no chain of blocks.

    Raises:
        KflatsError: as ``factorize``.
    """
    workers = workers or Workers()
    plan, data = decided.plan, decided.data
    done = factorize(model, plan, data, seed, quiet, partial, file_limit, workers)
    layers = [one for one in done if _is_layer(one)]
    if not (sequential and layers):
        return done
    if not (batches := _windows(model, data)):
        announce(f"{_NOTE}: no layer, there are no texts or batches to run the model on", quiet=quiet)
        return done
    kept = None if partial is None else partial.beside("sequential")
    with progress_bar(quiet=quiet) as update:
        fits = Fits(model, plan, data, seed, kept, update, workers)
        second = _SecondPass(fits, {one.decision.weight.name: one for one in layers})
        packed = Packed[list[CompressedWeight]](
            lambda made: json.dumps([one.decision.weight.name for one in made]),
            lambda _, names: [fits.written(second.first[name].decision) for name in json.loads(names)],
        )
        # One worker does it: each layer waits for the one before.
        (made,) = workers.divided(["coding layers again"], lambda _: second.run(done, batches), packed)
    coded = sum(one.decision.recipe.is_coded for one in layers)
    why = "" if made else f", {type(model).__name__} is no chain of blocks, or has no such layers in them"
    announce(f"{_NOTE}: {len(made)} of {coded} linear layers in codes{why}", quiet=quiet)
    by_name = {one.decision.weight.name: one for one in made}
    return [by_name.get(one.decision.weight.name, one) for one in done]


@dataclass(frozen=True)
class _SecondPass:
    """Linear layers by name, with what was made of them first; those in codes are coded again."""

    fits: Fits
    first: Mapping[str, CompressedWeight]

    def run(self, done: Sequence[CompressedWeight], batches: Sequence[Batch]) -> list[CompressedWeight]:
        """Those that were coded again, behind the coded tables among all that is ``done``."""
        fits = self.fits
        tables = [
            (one.decision.weight, one.matrix)
            for one in done
            if one.matrix is not None and one.decision.weight.places[0].role == "embedding"
        ]
        made: dict[str, CompressedWeight] = {}

        def recode(weights: Sequence[Weight], moments: Moments | None) -> dict[str, tuple[Tensor, Tensor | None]]:
            known = {weight.name: self.first[weight.name] for weight in weights}
            for name, one in list(known.items()):
                if moments is None or not one.decision.recipe.is_coded:
                    continue
                with suppress(DoesNotFitError):  # integers of one width may take more bytes: the first ones stay
                    known[name] = made[name] = self._coded(one, moments)
            return {name: (_dense(one), one.bias_shift) for name, one in known.items()}

        layers = [one.decision.weight for one in self.first.values()]
        scratch = None if fits.partial is None else fits.partial.folder
        recalibrate(fits.model, layers, tables, batches, recode, scratch=scratch, update=fits.update)
        return list(made.values())

    @usual_settings()
    def _coded(self, one: CompressedWeight, moments: Moments) -> CompressedWeight:
        """A layer in the bytes of its first codes."""
        fits, decision = self.fits, one.decision
        if (stored := fits.stored(decision)) is not None:
            return stored
        weight, recipe, counted = decision.weight, decision.recipe, fits.plan.budget.counts_labels
        rows, weighting = fits.data.matrix(fits.model, weight, recipe)
        matrix = dense_weight(fits.model, weight).cpu().to(torch.float64)
        centred = weighting.mean is not None
        target = (moments.centred() if centred else moments).target(matrix, _PART, _DAMPING).float()
        nbytes = one.report.bytes_after - bias_bytes(weight, recipe, weighting, counted)
        dtype = recipe.torch_dtype(weight.dtype)
        aim = TensorRows(target.T if recipe.matrix_rows == "out_features" else target)
        problem = Problem(aim, nbytes, dtype.itemsize, weighting, not counted, fits.seed)
        made = fits.reported(decision, replace(problem, rows=rows), recipe.encode(problem, dtype))
        if centred:
            shift = _PART * moments.away @ matrix + moments.mean @ (matrix - _dense(made))
            made = replace(made, bias_shift=shift.float())
        note = "; ".join(filter(None, (made.report.note, _NOTE)))
        return fits.kept(replace(made, report=replace(made.report, note=note)))


def _is_layer(one: CompressedWeight) -> bool:
    """Whether it was made of one linear layer."""
    places = one.decision.weight.places
    return one.matrix is not None and len(places) == 1 and places[0].role in ("linear", "conv1d")


def _dense(one: CompressedWeight) -> Tensor:
    """(n, d): the matrix as it is stored, with inputs as rows."""
    assert one.matrix is not None
    with torch.no_grad():
        rows = one.matrix.rows(torch.arange(one.matrix.shape[0], device=one.matrix.weight.device), dtype=torch.float32)
    return rows.T if one.decision.recipe.matrix_rows == "out_features" else rows


def _windows(model: nn.Module, data: CalibrationData) -> list[Batch]:
    """The batches that layers are run on: of the calibration data, of the texts, or drawn; [] where there is none."""
    try:
        if data.calibration or data.counts:
            batches = replace(data, samples=min(data.samples, _WINDOWS)).batches(model)
        elif data.tokenizer is not None and modalities_of(model) == ("input_ids",):
            drawn = drawn_windows(data.tokenizer, samples=_WINDOWS, model=model)
            batches = replace(data, windows=drawn).batches(model)
        else:
            return []
    except KflatsError:  # what a model cannot read has no windows, as when it is measured
        return []
    batches = [batch for batch in batches if batch_size(batch)]
    return batches[:: max(1, sum(map(batch_size, batches)) // _WINDOWS)] if data.calibration else batches
