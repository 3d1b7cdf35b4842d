"""The number of flats whose compressed model scores best: a search by halving, and an ensemble over what it tried."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from kflats.common.errors import DoesNotFitError, KflatsError, check_seed
from kflats.common.formatting import announce
from kflats.common.texts import SAMPLES, Tokenizer
from kflats.common.workers import Packed, Workers
from kflats.compress.fitting import factorize, swapped
from kflats.evaluation.running import Batch
from kflats.methods import Flats, Method
from kflats.methods.flats import COUNTS
from kflats.planning.calibration_data import CalibrationData, gather
from kflats.planning.decide import Measuring, Sharing, decide
from kflats.recipe.budget import Budget, one_budget
from kflats.recipe.recipe import Recipe, as_recipe


@dataclass(frozen=True)
class FlatsSearch:
    """What a search found.

    Args:
        k: the number of flats of the best score, the smallest of equals. recipe: with this number.
        scores: of each number that was tried, by number.
    """

    k: int
    recipe: Recipe
    scores: Mapping[int, float]


def search_flats(
    model: nn.Module,
    recipe: Recipe | Method,
    score: Callable[[nn.Module], float],
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    weights: Sequence[str] = (),
    counts: Sequence[int] = COUNTS,
    texts: Iterable[str] | None = None,
    tokenizer: Tokenizer | None = None,
    calibration: Iterable[str | Batch] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    quiet: bool = False,
) -> FlatsSearch:
    """The number of flats whose compressed model scores best (MESSI, appendix D); ``model`` is not changed.

        maximise  score(M_k)   over k,   M_k: the model with its weights in k flats, all k in the same bytes

    Of two neighbouring numbers in the middle the better one says in which half to go on; this finds the best where
    scores rise to one peak and fall after it. All models that were tried are an ensemble: the best of them is chosen,
    as published. Every number is fitted whole, in a copy of the model. ``compress_`` with the found ``recipe`` gives
    that model.

    Args:
        model, keep, size, texts, tokenizer, calibration, samples, seed, quiet: as ``compress_``.
        recipe: with ``Flats(k=None)`` or ``MESSI(k=None)``, or such a method.
        score: of a compressed model, higher is better. Let it score examples that nothing was trained on and that judge
            nothing later, such as a held-out part of the training set: what is chosen on them looks better on them.
        weights: names as for ``compress_``; () for the token embedding.
        counts: the numbers of flats, rising. Those for which the bytes are too few count as worse than all others.

    Choose it where a task's score can be computed in seconds: ``k=None`` alone compares errors of matrices, which often
    rank numbers of flats otherwise than a task does. Limit: for about 2 log2 of ``len(counts)`` numbers it fits and
    scores a model.

    Raises:
        KflatsError: as ``compress_``; a method whose number of flats is not searched; ``counts`` that are no rising
            whole numbers from 1 on; no number for which the bytes are enough; a score that is NaN or infinite.

    >>> import torch, kflats
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> words = model["words"].weight.detach().clone()
    >>> def score(small):
    ...     return -(small["words"](torch.arange(200)) - words).square().sum().item()
    >>> found = search_flats(model, kflats.MESSI(k=None, restarts=2), score, weights=["words"], keep="50%", quiet=True)
    >>> found.scores[found.k] == max(found.scores.values()), found.recipe.method.k == found.k
    (True, True)
    """
    check_seed(seed)
    data = gather(texts, tokenizer, calibration, None, None, samples).windowed(model, quiet)
    sharing = Sharing(quiet=quiet)
    return best_flats(
        model, recipe, score, one_budget(keep, size), data, sharing, weights=weights, counts=counts, seed=seed
    )


def best_flats(
    model: nn.Module,
    recipe: Recipe | Method,
    score: Callable[[nn.Module], float],
    budget: Budget,
    data: CalibrationData,
    sharing: Sharing,
    *,
    weights: Sequence[str] = (),
    counts: Sequence[int] = COUNTS,
    measured: Measuring | None = None,
    seed: int = 0,
) -> FlatsSearch:
    """As ``search_flats``, with data that were gathered; one worker scores each model for all."""
    chosen, method = searched(recipe)
    if list(counts) != sorted({*counts}) or not counts or counts[0] < 1:
        raise KflatsError(f"a search among {tuple(counts)} flats is not supported", hint="rising whole numbers from 1")
    refused: list[DoesNotFitError] = []
    known = data

    def with_count(k: int) -> Recipe:
        return replace(chosen, method=replace(method, k=k))

    def attempt(k: int) -> float:
        nonlocal known
        of = with_count(k)
        try:
            decided = decide(
                model,
                dict.fromkeys(weights, of) if weights else of,
                budget,
                known,
                sharing,
                measured=None if known is not data else measured,
            )
            fitted = factorize(model, decided.plan, decided.data, seed, sharing.quiet, None)
        except DoesNotFitError as error:  # each flat stores a basis: these bytes hold fewer flats
            refused.append(error)
            return -math.inf
        known = decided.data

        def scored(_: int) -> float:
            small = copy.deepcopy(model)
            swapped(small, decided.plan, fitted, seed)
            return score(small)

        as_text = Packed[float](repr, lambda _, text: float(text))
        found = (sharing.workers or Workers()).divided([f"scoring {k} flats"], scored, as_text)[0]
        if not math.isfinite(found):
            raise KflatsError(f"the score of the model of {k} flats is {found}", hint="a score that is a finite number")
        announce(f"{k} flat{'s' * (k > 1)}: score {found:.4f}", quiet=sharing.quiet)
        return found

    scores = by_halving(counts, attempt)
    scores = {k: value for k, value in sorted(scores.items()) if value > -math.inf}
    if not scores:
        raise refused[0]
    best = max(scores, key=lambda k: (scores[k], -k))
    return FlatsSearch(best, with_count(best), scores)


def by_halving(counts: Sequence[int], attempt: Callable[[int], float]) -> dict[int, float]:
    """The values of the numbers that a search for the largest tries: it goes on in the half of the better neighbour.

    >>> by_halving((1, 2, 3, 4, 5, 7, 10, 15), lambda k: -abs(k - 3))
    {4: -1, 5: -2, 2: -1, 3: 0}
    """
    found: dict[int, float] = {}

    def value(place: int) -> float:
        k = counts[place]
        if k not in found:
            found[k] = attempt(k)
        return found[k]

    low, high = 0, len(counts) - 1
    while low < high:
        middle = (low + high) // 2
        if value(middle) >= value(middle + 1):
            high = middle
        else:
            low = middle + 1
    value(low)
    return found


def searched(recipe: Recipe | Method | None) -> tuple[Recipe, Flats]:
    """The recipe and its method; refused if the number of flats is given, or the method has none."""
    chosen = None if recipe is None else as_recipe(recipe)
    if chosen is None or not isinstance(chosen.method, Flats) or chosen.method.k is not None:
        name = "the default method" if chosen is None else repr(chosen.method)
        raise KflatsError(
            f"a search for the number of flats is not supported with {name}",
            hint="the method flats or messi, with its number of flats left to a search",
        )
    return chosen, chosen.method
