"""The user's data as one value: texts to count, batches to measure with, and the measured statistics."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kflats.calibration.collect import measure
from kflats.calibration.counting import count_tokens, text_batches, zipf_prior
from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Objective
from kflats.calibration.windows import LONG, Windows, drawn_windows, filled_windows, windows
from kflats.codecs import Candidate, Table
from kflats.common.dtypes import dtype_of
from kflats.common.errors import KflatsError, KflatsWarning, check_samples
from kflats.common.formatting import announce
from kflats.common.hashing import Hashed, sha256
from kflats.common.machine import available_bytes
from kflats.common.texts import SAMPLES, check_texts, token_limit
from kflats.common.workers import Workers
from kflats.evaluation.running import (
    Batch,
    device_of,
    explained,
    modalities_of,
    read_together,
    spoken_modalities,
    to_device,
)
from kflats.evaluation.trial import Trial, tried, tried_on_drawn
from kflats.importance.protocol import Measured, Weighting
from kflats.methods import SVD
from kflats.methods.matrix_error import weighted_total
from kflats.model.weights import Weight, check_model, dense_weight, is_parameter
from kflats.numerics.rows import TensorRows
from kflats.recipe.recipe import Recipe, to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Recent:
    """The weightings that were asked for last, as many as a sixteenth of the memory holds."""

    def __init__(self) -> None:
        self._kept: dict[str, Weighting] = {}
        self._most = available_bytes() // 16

    def get(self, key: str) -> Weighting | None:
        """The weighting, which is then the last to go; None where it is not kept."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def put(self, key: str, weighting: Weighting) -> None:
        """Keep a weighting; those asked for longest ago go."""
        self._kept[key] = weighting
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > self._most:
            del self._kept[next(iter(self._kept))]


@dataclass(frozen=True)
class CalibrationData:
    """All that recipes may draw on.

    Args:
        texts: records of running text; their windows are counted, and measured with where there is no other data.
        tokenizer: the model's own.
        calibration: texts, or batches: mappings of tensors for ``model(**batch)``, with labels for a task's loss. They
            are passed through the model as they are.
        objective: what gradients are taken of; None: the task's loss where batches have labels, else random
            projections of the output, which need no labels.
        statistics: what was measured before.
        samples: how many windows are measured with, or how many of the calibration texts, evenly spaced; batches are
            all used.
        windows: what ``windowed`` cut the texts into; ``texts`` are then the windows that may be counted.

    Token counts, spectra and candidates are computed once and kept here, and as many weightings as fit into memory;
    ``dataclasses.replace`` begins without them.
    """

    texts: tuple[str, ...] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    calibration: tuple[str | Batch, ...] | None = None
    objective: Objective | None = None
    statistics: Statistics | None = None
    samples: int = SAMPLES
    windows: Windows | None = None
    _counts: dict[int, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    _trials: WeakKeyDictionary[nn.Module, Trial] = field(
        default_factory=WeakKeyDictionary, init=False, compare=False, repr=False
    )
    _read: WeakKeyDictionary[nn.Module, bool] = field(
        default_factory=WeakKeyDictionary, init=False, compare=False, repr=False
    )
    _weightings: Recent = field(default_factory=lambda: Recent(), init=False, compare=False, repr=False)
    _spectra: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    _candidates: dict[str, tuple[Candidate, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def counts(self) -> bool:
        """Whether there are texts and a tokenizer that counts them."""
        return self.texts is not None and self.tokenizer is not None

    @property
    def measurable(self) -> bool:
        """Whether gradients and activations can be measured: by texts, if there is no other calibration data."""
        return self.calibration is not None or self.statistics is not None or self.counts

    def draws(self, model: nn.Module) -> bool:
        """Whether ``model`` is measured with ``drawn_windows``: it reads token ids alone, and nothing else is given.

        Some models read boxes or codes of their own beside the ids: one run is tried. Where the model cannot read them
        alone, a warning says so.
        """
        if self.measurable or self.tokenizer is None or modalities_of(model) != ("input_ids",):
            return False
        if model not in self._read:
            failed = self.trial(model).failed
            try:
                with explained(model, ""):
                    drawn_windows(self.tokenizer, samples=1, model=model)
            except KflatsError as error:
                failed = failed or error
            if failed is not None:
                warnings.warn(KflatsWarning(f"nothing is measured: {failed.symptom}"), stacklevel=2)
            self._read[model] = failed is None
        return self._read[model]

    def trial(self, model: nn.Module) -> Trial:
        """What one run shows of ``model``: on the first batch, or on drawn inputs of a transformers model.

        Raises:
            KflatsError: the model changes its own weights when it runs.
        """
        if model not in self._trials:
            given = next((item for item in self.calibration or () if not isinstance(item, str)), None)
            try:
                found = tried_on_drawn(model) if given is None else tried(model, to_device(given, device_of(model)))
            except KflatsError as error:
                found = Trial(failed=error)
            self._trials[model] = found
        found = self._trials[model]
        if found.written:
            raise KflatsError(
                f"{type(model).__name__} is not supported because it changes its own weights when it runs: "
                + ", ".join(found.written[:3]),
                cause="the changed weights would be saved, and changed again when they are loaded",
                hint="a setting of its config.json that leaves them as they are (RWKV: rescale_every 0)",
            )
        return found

    @property
    def held_out(self) -> tuple[str, ...] | None:
        """Windows of the texts that are neither counted nor measured with; None where there are none."""
        return (self.windows and self.windows.held_out) or None

    def windowed(self, model: nn.Module, quiet: bool = True) -> CalibrationData:
        """This data with its texts in windows that ``model`` reads; as it is without texts or a tokenizer, and where
        the texts themselves are the calibration data. Not ``quiet``: says on stderr what became of the texts.

        Raises:
            KflatsError: blank texts, or a model that reads none.
        """
        self.check_reader(model)
        if not self.texts or self.tokenizer is None or self.texts == self.calibration:
            return self
        made = windows(self.texts, self.tokenizer, samples=self.samples, model=model)
        if modalities_of(model) == ("input_ids",):
            with suppress(KflatsError):  # of a vocabulary without words none can be drawn
                made = filled_windows(made, self.tokenizer, samples=self.samples, model=model)
        announce(f"texts: {made.summary}", quiet=quiet)
        return replace(self, texts=made.counted, windows=made)

    def check_reader(self, model: nn.Module) -> None:
        """Raises KflatsError for what is no model, and for texts that ``model`` cannot read."""
        check_model(model)
        modalities = modalities_of(model)
        if self.texts is not None and modalities and "input_ids" not in modalities:
            raise KflatsError(
                f"texts are not supported with {type(model).__name__}, which reads {spoken_modalities(model)}",
                hint="no texts: the errors of all numbers then count the same",
            )

    def batches(self, model: nn.Module | None = None) -> list[Batch]:
        """The batches to measure with.

        Args:
            model: whose positions limit texts.

        Raises:
            KflatsError: no data, texts without a tokenizer, or texts beside batches.
        """
        own = self.texts if self.windows is None else self.windows.calibration
        items = own if self.calibration is None else self.calibration
        if not items:
            raise KflatsError("there is no calibration data", cause="an empty file or list", hint="a few hundred texts")
        texts = [item for item in items if isinstance(item, str)]
        batches = [item for item in items if not isinstance(item, str)]
        if texts and batches:
            raise KflatsError("calibration data holds texts and batches", hint="texts alone, or batches alone")
        if batches:
            return batches
        if self.tokenizer is None:
            raise KflatsError(
                "calibration texts need the model's tokenizer", hint="tokenizer=..., or batches of tensors"
            )
        if model is not None and modalities_of(model) and read_together(model) != ("input_ids",):
            raise KflatsError(
                f"texts alone cannot be passed through {type(model).__name__}",
                cause=f"one call of it reads {spoken_modalities(model)}",
                hint="no texts: the errors of all numbers then count the same",
            )
        # Evenly spaced texts: files are often sorted by topic.
        count = min(self.samples, len(texts))
        spaced = [texts[i * len(texts) // count] for i in range(count)]
        return list(text_batches(spaced, self.tokenizer, max_length=token_limit(self.tokenizer, LONG[1], model)))

    def measured(
        self,
        model: nn.Module,
        recipes: Sequence[tuple[Weight, Recipe]],
        quiet: bool = True,
        workers: Workers | None = None,
        scratch: Path | None = None,
        file: Path | None = None,
    ) -> CalibrationData:
        """This data with what ``recipes`` need measured; nothing is run where that is there, or nothing is needed.
        ``scratch``: a folder for what shall not stay in memory; ``file``: for the statistics (``measure``)."""
        needs = needed(recipes)
        if not needs:
            reads = modalities_of(model)
            drawable = reads == ("input_ids",) and self.tokenizer is not None
            told = model in self._read
            if reads and not (drawable or told or self.measurable) and any(recipe.chooses for _, recipe in recipes):
                self._read[model] = False
                why = f"{type(model).__name__} reads {spoken_modalities(model)}"
                if reads == ("input_ids",):
                    why = "there is no tokenizer for the sentences that would be drawn"
                announce(f"nothing is measured: {why}; the errors of all numbers count the same", quiet=quiet)
            return self
        if self.statistics is not None:
            self.statistics.check(model)
            return self
        weights = [weight for weight, _ in recipes if weight.name in needs]
        data = self
        if self.draws(model):
            assert self.tokenizer is not None
            drawn = drawn_windows(self.tokenizer, samples=self.samples, model=model)
            announce(f"no texts: {drawn.summary}", quiet=quiet)
            data = replace(self, windows=drawn)
        batches = data.batches(model)
        statistics = measure(
            model,
            weights,
            batches,
            needs=needs,
            objective=self.objective,
            quiet=quiet,
            workers=workers,
            scratch=scratch,
            file=file,
        )
        return replace(self, statistics=statistics)

    def weigh(self, weight: Weight, recipe: Recipe) -> Weighting:
        """The weighting of the errors of ``weight``'s own matrix, whose rows are inputs. Kept for each weight and
        importance while it fits into memory; do not change its tensors.

        Raises:
            KflatsError: as the importance; the message names the weight.
        """
        key = f"{weight.name} {to_json(recipe.importance)}"
        known = self._weightings.get(key)
        if known is None:
            try:
                known = recipe.importance.weigh(self._measured(weight, recipe))
                if is_parameter(weight.places[0].role):  # no bias could take the mean
                    known = replace(known, mean=None)
            except KflatsError as error:
                raise error.about(weight.name) from error
            self._weightings.put(key, known)
        return known

    def matrix(self, model: nn.Module, weight: Weight, recipe: Recipe) -> tuple[TensorRows, Weighting]:
        """The matrix of ``weight`` as the method of ``recipe`` takes it, with its weighting: on the device of the
        model, or on the CPU for codecs, which compute there.

        Raises:
            KflatsError: a model without values; as ``weigh``.
        """
        matrix, weighting = dense_weight(model, weight), self.weigh(weight, recipe)
        if matrix.is_meta:
            raise KflatsError(
                f"{weight.name} has a shape but no values",
                cause="the model is on the meta device, or offloaded by a device_map",
                hint="load it with its weights, on one device",
            )
        if recipe.matrix_rows == "out_features":
            matrix, weighting = matrix.T, weighting.transposed()
        matrix = matrix.cpu() if recipe.is_coded or recipe.chooses else matrix
        return TensorRows(matrix), weighting.to(matrix.device)

    def table(self, model: nn.Module, weight: Weight, recipe: Recipe) -> Table:
        """``matrix``, with the errors of its SVD (``Table.spectrum``).

        Raises:
            KflatsError: as ``matrix``; values that are not finite.
        """
        ranks = recipe.chooses or recipe.method.produces != "dense"
        spectrum = self.spectrum(model, weight, recipe, ranks=ranks)
        return Table(*self.matrix(model, weight, recipe), dtype_of(weight.dtype), spectrum)

    def spectrum(self, model: nn.Module, weight: Weight, recipe: Recipe, *, ranks: bool = True) -> Tensor:
        """The errors of the SVD of ``matrix`` of every rank, or without ``ranks`` of rank 0 alone, which takes no SVD:
        computed once for each weight, importance and side.

        Raises:
            KflatsError: as ``matrix``; values that are not finite.
        """
        key = f"{weight.name} {to_json(recipe.importance)} {recipe.matrix_rows} {ranks}"
        if key not in self._spectra:
            rows, weighting = self.matrix(model, weight, recipe)
            try:
                self._spectra[key] = (
                    SVD().spectrum(rows, weighting).cpu().clamp_min(0)
                    if ranks
                    else torch.tensor([weighted_total(rows, weighting)], dtype=torch.float64)
                )
            except KflatsError as error:
                raise error.about(weight.name) from error
        return self._spectra[key]

    def spectra_of(self, weight: Weight) -> dict[str, list[float]]:
        """What ``spectrum`` computed of ``weight``, for ``take_spectra`` of another worker."""
        return {key: found.tolist() for key, found in self._spectra.items() if key.startswith(f"{weight.name} ")}

    def take_spectra(self, spectra: Mapping[str, list[float]]) -> None:
        """Keep what another worker computed."""
        self._spectra.update({key: torch.tensor(found, dtype=torch.float64) for key, found in spectra.items()})

    def candidates(self, key: str, make: Callable[[], tuple[Candidate, ...]]) -> tuple[Candidate, ...]:
        """The ways to store a weight that ``make`` lists, listed once for each ``key``: other budgets choose from the
        same."""
        if key not in self._candidates:
            self._candidates[key] = make()
        return self._candidates[key]

    def _measured(self, weight: Weight, recipe: Recipe) -> Measured:
        n, d = weight.shape
        measured = Measured(n, columns=d)
        if self.statistics is not None and recipe.importance.needs:
            measured = self.statistics.of(weight.name)
        measured = replace(measured, head=any(place.role == "head" for place in weight.places))
        if self.tokenizer is None or not recipe.importance.needs_tokenizer:
            return measured
        measured = replace(measured, prior=zipf_prior(self.tokenizer, n))
        if self.texts is None:
            return measured
        if n not in self._counts:
            self._counts[n] = count_tokens(self.texts, self.tokenizer, n)
        return replace(measured, counts=self._counts[n])

    def digest(self) -> str:
        """Of everything here that measurements depend on, but for the tokenizer."""
        parts: list[Hashed] = [json.dumps([self.texts, repr(self.objective), self.samples])]
        for item in self.calibration or ():
            parts += _parts(item if isinstance(item, Mapping) else {"text": item})
        return sha256(parts)

    def statistics_digest(self, names: Iterable[str]) -> str:
        """Of all that was measured of these weights."""
        statistics = self.statistics
        return sha256([] if statistics is None else [p for n in names for p in (n, *_parts(vars(statistics.of(n))))])


def gather(
    texts: Iterable[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Iterable[str | Batch] | None,
    objective: Objective | None,
    statistics: Statistics | None,
    samples: int = SAMPLES,
) -> CalibrationData:
    """The data as one value: each iterable is read once, and checked.

    Raises:
        KflatsError: one string in place of several, items that are not texts, no samples, or a tokenizer that cannot
            be called.
    """
    check_samples(samples)
    batches = None if calibration is None else _kept(calibration, batches=True)
    kept = None if texts is None else _kept(texts)
    if tokenizer is not None and not callable(tokenizer):
        raise KflatsError(
            f"expected a tokenizer, found {type(tokenizer).__name__}", hint="a loaded tokenizer of transformers"
        )
    return CalibrationData(kept, tokenizer, batches, objective, statistics, samples)


def needed(recipes: Iterable[tuple[Weight, Recipe]]) -> dict[str, frozenset[str]]:
    """The statistics that each weight needs; weights that need none are left out."""
    return {
        weight.name: recipe.importance.needs
        for weight, recipe in recipes
        if recipe.importance.needs and not (recipe.is_dense or recipe.is_cast)
    }


def _kept(data: Iterable[Any], batches: bool = False) -> tuple[Any, ...]:
    if isinstance(data, Mapping):
        raise KflatsError("calibration data must be a sequence of batches, not one batch", hint="a list of batches")
    check_texts(data)
    items = tuple(data)
    for item in items:
        if not isinstance(item, str) and not (batches and isinstance(item, Mapping)):
            expected = "texts or batches (dicts of tensors)" if batches else "texts"
            hint = "a list of strings" + (", or of batches such as {'input': tensor}" if batches else "")
            raise KflatsError(f"expected {expected}, found {type(item).__name__}", hint=hint)
    return items


def _parts(values: Mapping[str, Any]) -> Iterator[Hashed]:
    for name, value in sorted(values.items()):
        yield name
        yield value if isinstance(value, Tensor) else repr(value)
    yield "end of item"
