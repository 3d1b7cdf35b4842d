"""Metrics of predictions against labels, as in GLUE, CoNLL and the tables of FWSVD.

scikit-learn, SciPy and seqeval compute them (``pip install 'kflats[tasks]'``). A metric that is undefined is 0, not
NaN: so a model with equal predictions for all examples scores 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kflats.common.errors import KflatsError


def accuracy(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Share of equal labels.

    >>> accuracy([1, 0, 1], [1, 1, 1]) == 2 / 3
    True
    """
    return float(np.mean(np.asarray(predicted) == np.asarray(true)))


def f1(predicted: Sequence[int], true: Sequence[int]) -> float:
    """F1 of class 1, 2 P R / (P + R): MRPC and QQP. 0 if class 1 is never predicted."""
    return float(_needed("sklearn.metrics").f1_score(true, predicted, zero_division=0.0))


def matthews(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Matthews' correlation: CoLA. 0 if all predictions, or all labels, are one class."""
    return float(_needed("sklearn.metrics").matthews_corrcoef(true, predicted))


def pearson(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Pearson's correlation; 0 if either side is constant."""
    return _correlation("pearsonr", predicted, true)


def spearman(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 if either side is constant."""
    return _correlation("spearmanr", predicted, true)


def pearson_spearman(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Mean of Pearson's and Spearman's correlation, as GLUE and FWSVD report it for STS-B."""
    return (pearson(predicted, true) + spearman(predicted, true)) / 2


def entity_f1(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> float:
    """F1 over whole entities (micro average, span and kind must both agree), by seqeval: CoNLL-2003."""
    metrics = _needed("seqeval.metrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns of the tag sequences of untrained models
        return float(metrics.f1_score([list(t) for t in true], [list(p) for p in predicted], zero_division=0))


def perplexity(total_loss: float, predictions: int) -> float:
    """exp of the mean negative log-likelihood of the predicted tokens; infinite if it exceeds the range of a float.

    >>> round(perplexity(2 * math.log(8), 2), 6)
    8.0
    """
    if predictions < 1:
        raise KflatsError("there is no token to predict", cause="texts of one token each")
    mean = total_loss / predictions
    return math.exp(mean) if mean < 700 else math.inf


METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "pearson_spearman": pearson_spearman,
    "entity_f1": entity_f1,
}
"""Metrics by name, each (predicted, true) -> float, higher is better. ``perplexity`` needs sums of losses instead."""


def measure(
    names: Sequence[str],
    predicted: Sequence[float] | Sequence[Sequence[str]],
    true: Sequence[float] | Sequence[Sequence[str]],
) -> dict[str, float]:
    """Every named metric of the same predictions.

    Raises:
        KflatsError: nothing to score, another number of labels, predictions that are not finite, or a
            package that is not installed.

    >>> measure(["accuracy"], [1, 0], [1, 1])
    {'accuracy': 0.5}
    """
    if len(true) == 0 or len(predicted) != len(true):
        raise KflatsError(
            f"{len(predicted)} predictions cannot be scored against {len(true)} labels",
            cause="each label needs one prediction",
        )
    if unknown := [name for name in names if name not in METRICS]:
        raise KflatsError(f"there is no metric {unknown[0]!r}", hint=f"one of: {', '.join(METRICS)}")
    if not isinstance(predicted[0], Sequence) and not np.isfinite(np.asarray(predicted, dtype=np.float64)).all():
        raise KflatsError("the model's outputs are not finite", cause="overflow in float16, or damaged weights")
    return {name: METRICS[name](predicted, true) for name in names}


def _correlation(name: str, predicted: Sequence[float], true: Sequence[float]) -> float:
    a, b = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    # Equal up to rounding counts as constant: a correlation of rounding errors means nothing.
    if len(a) < 2 or any(np.ptp(side) <= 1e-9 * max(1.0, float(np.abs(side).max())) for side in (a, b)):
        return 0.0
    return float(getattr(_needed("scipy.stats"), name)(a, b).statistic)


def _needed(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KflatsError(
            f"scoring tasks needs the package {name.split('.')[0]}", hint="pip install 'kflats[tasks]'"
        ) from error
