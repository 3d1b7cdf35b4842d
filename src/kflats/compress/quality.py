"""The smallest size that keeps a quality: a search over sizes, each of which is fitted and judged in memory."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from kflats.common.errors import DoesNotFitError, KflatsError, NotFiniteError
from kflats.common.formatting import announce, size
from kflats.common.run_forms import RunForm
from kflats.common.workers import Packed, Workers
from kflats.compress.fitting import CompressedWeight, Partial, swapped
from kflats.compress.sequential import fitted
from kflats.evaluation.outputs import Judge
from kflats.model.run_as import set_run_form_
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.decide import Decided, Measuring, Sharing, decide
from kflats.planning.selection import select
from kflats.recipe.budget import Budget
from kflats.recipe.recipe import Recipes

_TRIES = 5
_NEAR = 0.9
"""A loss of at least this share of what is allowed is near enough: it is a fortieth of the size."""
_AIM = 0.96
_FIRST_BITS = 2.9
"""Bits a number at which outputs of encoders lose about 1 %: where the search begins for that loss."""
_FACTOR_A_BIT = 4.0
"""How much less outputs lose with each bit more: squared errors fall by 2^2."""
_LEAST_BITS, _MOST_BITS = 0.3, 16.0

Fitted = TypeVar("Fitted")


@dataclass(frozen=True)
class Try(Generic[Fitted]):
    """One size that was tried: its bytes, the loss of the outputs, and what was fitted."""

    nbytes: int
    loss: float
    fitted: Fitted


def smallest(
    model: nn.Module,
    recipes: Recipes,
    data: CalibrationData,
    measured: Measuring,
    finished: Callable[[Decided], Partial],
    judge: Judge,
    quality: float,
    seed: int,
    run_as: RunForm,
    most: int,
    sharing: Sharing,
    sequential: bool = True,
) -> tuple[Decided, list[CompressedWeight], int]:
    """The plan of the smallest size whose model keeps ``quality`` by ``judge``, what it fitted, and that size in bytes.

    Every size is fitted whole, in a copy of ``model``. All share one measurement and one list of candidates. What an
    interrupted search has ``finished`` is not fitted again. ``most`` are bytes of the original's files. ``sequential``:
    as ``fitted`` has it.

    Raises:
        KflatsError: as ``decide``; no size below the original's keeps the quality; a model that draws random numbers,
            so that two runs of the original lose more than ``quality`` allows.
    """
    workers, quiet = sharing.workers or Workers(), sharing.quiet
    known: CalibrationData | None = None
    loss_as_text: Packed[float] = Packed(repr, lambda _, text: float(text))
    is_steady = False

    def check_steady() -> None:
        """Refuse an original whose own outputs are farther from each other than ``quality`` allows."""
        nonlocal is_steady
        if is_steady:
            return
        own = workers.divided(["judging the original"], lambda _: judge(model).loss, loss_as_text)[0]
        if own > 1 - quality:
            raise KflatsError(
                f"a quality of {quality} is not supported with {type(model).__name__}",
                cause=f"two runs of the original itself differ by {own:.3g}: it draws random numbers",
                hint="a size",
            )
        is_steady = True

    def attempt(nbytes: int) -> tuple[float, tuple[Decided, list[CompressedWeight]]]:
        nonlocal known
        decided = decide(
            model,
            recipes,
            Budget("bytes", nbytes, "file"),
            known or data,
            sharing,
            measured=None if known else measured,
        )
        known = decided.data
        room = nbytes - sharing.beside
        done = fitted(model, decided, seed, quiet, finished(decided), room, workers, sequential=sequential)

        def judged(_: int) -> float:
            small = _copied(model)
            swapped(small, decided.plan, done, seed)
            set_run_form_(small, run_as)
            try:
                return judge(small).loss
            except NotFiniteError:  # coarse weights may overflow where finer ones do not
                return math.inf
            finally:
                del small
                gc.collect()  # a model holds a method of its own, so that nothing else lets go of it soon

        # One worker judges: the same number decides for all of them what is tried next.
        loss = workers.divided([f"judging {size(nbytes)}"], judged, loss_as_text)[0]
        if loss == math.inf:
            raise DoesNotFitError(
                f"at {nbytes:,} bytes the outputs are NaN or infinite", hint="a lower quality, or a size"
            )
        announce(f"at {size(nbytes)} the outputs lose {100 * loss:.2f} %", quiet=quiet)
        if loss > 1 - quality:
            check_steady()
        return loss, (decided, done)

    weights = [chosen.weight for chosen in select(model, recipes, data)]
    assert sharing.file_bytes is not None
    others = sharing.file_bytes - sum(weight.nbytes for weight in weights)
    best = smallest_size(attempt, quality, sum(math.prod(w.shape) for w in weights), max(others, 0), most)
    return *best.fitted, best.nbytes


def smallest_size(
    attempt: Callable[[int], tuple[float, Fitted]], quality: float, numbers: int, beside: int, most: int
) -> Try[Fitted]:
    """The smallest size whose loss is at most 1 - ``quality``, within about a fortieth.

    The logarithm of the loss is nearly a line over the size: the next size lies where the line through the two nearest
    tries has the allowed loss. Where five tries find none, sizes are doubled until one is enough.

    Args:
        attempt: fits at a size in bytes; gives the loss of the outputs, and what was fitted. ``DoesNotFitError`` is
            that of a size that is too small; any other error ends the search.
        numbers: how many numbers share the size. beside: bytes of all else in the files.
        most: bytes of the original, which bound the size.

    Raises:
        KflatsError: no size below the original's keeps the quality.

    >>> losses = {}
    >>> def attempt(nbytes):
    ...     losses[nbytes] = 4 * 4.0 ** (-8 * nbytes / 1000)
    ...     return losses[nbytes], None
    >>> best = smallest_size(attempt, 0.99, numbers=1000, beside=0, most=4000)
    >>> best.loss <= 0.01, len(losses) <= 3
    (True, True)
    """
    allowed = 1 - quality
    tries: list[Try[Fitted]] = []
    best: Try[Fitted] | None = None
    too_small = 0
    bits = _FIRST_BITS + math.log(0.01 / allowed, _FACTOR_A_BIT)
    nbytes = _bytes_of(bits, numbers, beside, most)
    for _ in range(_TRIES):
        try:
            loss, fitted = attempt(nbytes)
        except DoesNotFitError:  # small models need more bytes for labels and scales than this size has
            if nbytes == most:
                raise
            too_small, nbytes = nbytes, min(2 * nbytes, most)
            continue
        tries.append(Try(nbytes, max(loss, 1e-12), fitted))
        best = min((one for one in tries if one.loss <= allowed), key=lambda one: one.nbytes, default=None)
        if best is not None and best.loss >= _NEAR * allowed:
            return best
        # The two nearest in loss decide the line; a single one has the slope of squared errors.
        nearest = sorted(tries, key=lambda one: abs(math.log(one.loss / allowed)))[:2]
        slope = -math.log(_FACTOR_A_BIT) * 8 / numbers
        if len(nearest) == 2 and nearest[0].nbytes != nearest[1].nbytes:
            measured = math.log(nearest[1].loss / nearest[0].loss) / (nearest[1].nbytes - nearest[0].nbytes)
            slope = min(measured, slope / 8) if measured < 0 else slope
        step = math.log(_AIM * allowed / nearest[0].loss) / slope
        floor = _bytes_of(_LEAST_BITS, numbers, beside, most)
        if too_small:
            floor = max(floor, (too_small + nearest[0].nbytes) // 2)
        nbytes = min(max(round(nearest[0].nbytes + step), floor), most)
        if any(abs(nbytes - one.nbytes) < 0.002 * one.nbytes for one in tries):
            break
    # Where the line misleads (a loss that falls in steps, or noise of few samples), sizes grow until one is enough.
    largest = max([too_small, *(one.nbytes for one in tries)])
    while best is None and largest < most:
        largest = min(2 * largest, most)
        try:
            loss, fitted = attempt(largest)
        except DoesNotFitError:
            if largest == most and not tries:
                raise
            continue
        tries.append(Try(largest, loss, fitted))
        best = tries[-1] if loss <= allowed else None
    if best is None:
        least = min(tries, key=lambda one: one.loss)
        raise KflatsError(
            f"no size below the original's keeps a quality of {quality}",
            cause=f"at {least.nbytes:,} bytes the outputs keep {1 - least.loss:.4f}",
            hint="a lower quality, or a size",
        )
    return best


def _copied(model: nn.Module) -> nn.Module:
    """A copy. Of states that recurrent models keep from a run with gradients, which cannot be copied, the values."""
    held = [value for module in model.modules() for value in vars(module).values()]
    states = [value for value in held if isinstance(value, Tensor) and not value.is_leaf]
    return copy.deepcopy(model, {id(state): state.detach().clone() for state in states})


def _bytes_of(bits: float, numbers: int, beside: int, most: int) -> int:
    return min(most, beside + round(min(max(bits, _LEAST_BITS), _MOST_BITS) * numbers / 8))
