"""Select: names, patterns and words become weights, each with its recipe."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import nn

from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.formatting import some
from kflats.evaluation.trial import Trial
from kflats.importance import KroneckerFisher, RowFisher, TokenCounts, TokenFisher, Uniform, ZipfPrior
from kflats.importance.protocol import WeightingForm
from kflats.io.static import StaticModel
from kflats.matrices.layers import FactoredEmbedding
from kflats.methods import SVD, Flats, Method
from kflats.model.weights import (
    READ_DIRECTLY,
    Weight,
    WeightUse,
    factored_layers,
    find_weight,
    find_weights,
    is_parameter,
    shared_layers,
    spellings,
)
from kflats.planning.calibration_data import CalibrationData
from kflats.recipe.recipe import Recipe, Recipes, as_recipe, brief

WORDS: dict[str, frozenset[str]] = {
    "linear": frozenset({"linear", "conv1d"}),
    "embeddings": frozenset({"embedding"}),
    "conv": frozenset({"conv2d"}),
    "all": frozenset({"linear", "conv1d", "embedding", "conv2d", "parameter", "experts"}),
}
"""Words that stand for all weights of some roles; a tied output head goes with its embedding."""


@dataclass(frozen=True)
class Selected:
    """One weight and its recipe.

    ``named`` is whether its own name was given. Then it is compressed, or refused with a reason; one that only a
    pattern found may also be left dense where nothing else is possible.
    """

    weight: Weight
    recipe: Recipe
    named: bool


def select(model: nn.Module, recipes: Recipes, data: CalibrationData) -> tuple[Selected, ...]:
    """The weights that ``recipes`` mean, in its order, each once.

    Args:
        recipes: {name, pattern or word: recipe, method or None}, or one of these for the token embedding. A pattern
            is a shell pattern over names ("encoder.layer.*.attention.*"); a word is one of ``WORDS``. An exact name
            goes before a pattern, a pattern before a word; of two patterns, or two words, the later one decides.
        data: for default recipes and for refusals.

    Raises:
        KflatsError: names or patterns that mean nothing, a weight named twice, a recipe that cannot be carried out
            for its layer, an importance without its data, a named layer whose tensor the model reads itself.
    """
    if not isinstance(recipes, Mapping):
        recipes = {token_embedding(model).name: recipes}
    if not recipes:
        raise KflatsError("no weight is named", hint="kflats inspect MODEL lists what can be")
    weights = find_weights(model)
    named: dict[str, tuple[Weight, Any, int]] = {}
    shared: dict[str, None] = {}  # each once, in this order
    for name, recipe in recipes.items():
        meant = _meant(model, weights, str(name))
        rank = meant.rank
        shared |= dict.fromkeys(meant.shared if recipe is not None else ())
        for weight in meant.weights:
            other = named.get(weight.name)
            if other is not None and rank == other[2] == _NAME:
                raise KflatsError(f"{name!r} is named twice", cause="two of the names are places of one tied weight")
            if other is None or rank >= other[2]:
                named[weight.name] = (weight, recipe, rank)
    selected, trial, left, unmeasured = [], data.trial(model), list[str](), list[str]()
    for weight, recipe, rank in named.values():
        chosen = None if recipe is None else as_recipe(recipe)
        if chosen is None or (chosen.chooses and chosen is not recipe):
            chosen = _default(model, weight, data, None if chosen is None else chosen.method)
        if chosen.importance.needs and rank != _NAME and _is_unmeasured(weight, data):
            if weight.places[0].role == "experts" or (recipe is not None and as_recipe(recipe).importance.needs):
                unmeasured.append(weight.name)
            chosen = replace(chosen, importance=Uniform())
        chosen = _with_rows_of_experts(weight, chosen)
        if rank == _NAME:
            check_calls(weight, chosen, trial)
        elif is_read(weight, chosen, trial):
            left.append(weight.name)
            continue
        check(weight, chosen, data)
        typed = replace(weight, type_is_read=True) if _is_among(weight, trial.typed) else weight
        selected.append(Selected(typed, chosen, rank == _NAME))
    if left and not selected:
        raise KflatsError(f"{some(left)} cannot be factored, and nothing else is named", cause=READ_DIRECTLY)
    if left:
        warnings.warn(KflatsWarning(f"not compressed: {some(left)}, because {READ_DIRECTLY}"), stacklevel=2)
    if shared:
        why = "because each of their weights is shared by several modules"
        warnings.warn(KflatsWarning(f"not compressed: {some(list(shared))}, {why}"), stacklevel=2)
    if "linear" in recipes and (apart := _parameters_but(named, weights)):
        why = "which no layer of their own multiplies by, such as experts kept as one tensor; the word all names them"
        warnings.warn(KflatsWarning(f"not compressed: {some(apart)}, {why}"), stacklevel=2)
    if unmeasured:
        why = "because no layer multiplies by them, or the statistics lack them; all their rows count alike"
        warnings.warn(KflatsWarning(f"not measured: {some(unmeasured)}, {why}"), stacklevel=2)
    if not selected:
        raise KflatsError("nothing is left to compress", hint="kflats inspect MODEL lists the weights")
    return tuple(selected)


def _is_unmeasured(weight: Weight, data: CalibrationData) -> bool:
    """Whether nothing is measured of a weight: of parameters that no layer calls, and of experts that the statistics
    lack, as those of earlier versions do."""
    role, given = weight.places[0].role, data.statistics
    return role == "parameter" or (role == "experts" and given is not None and weight.name not in given.measured)


def _with_rows_of_experts(weight: Weight, recipe: Recipe) -> Recipe:
    """``recipe`` with the outputs of experts as rows where it stores integers and its importance allows that.

    All experts together have many more outputs than inputs. Axes of rows that long would take more than the matrix.
    """
    turned = replace(recipe, matrix_rows="out_features")
    if weight.places[0].role != "experts" or not (recipe.is_coded or recipe.chooses):
        return recipe
    return recipe if _refused_kinds(turned, weight) else turned


def _parameters_but(named: Mapping[str, object], weights: Sequence[Weight]) -> list[str]:
    """The names of parameters that are not ``named``."""
    return [w.name for w in weights if is_parameter(w.places[0].role) and w.name not in named]


def _is_among(weight: Weight, parameters: frozenset[str]) -> bool:
    """Whether ``parameters`` name the tensor of a layer; one that its module reads itself is dense in memory."""
    return any(f"{place.name}.weight" in parameters for place in weight.places if not is_parameter(place.role))


def check(weight: Weight, recipe: Recipe, data: CalibrationData) -> None:
    """Refuse, before any work, a recipe that cannot be carried out for ``weight``.

    Raises:
        KflatsError: see above; the message names the weight and what would fit.
    """
    if recipe.is_dense:
        return
    if not weight.name:
        raise KflatsError("the model is itself the layer that would be replaced", hint="a model that holds the layer")
    if recipe.is_cast:  # of any layer, and no importance has a say
        return
    if (recipe.is_coded or recipe.chooses) and find_spec("constriction") is None:
        raise KflatsError(
            f"{brief(recipe)} needs the library constriction, which codes integers", hint="pip install 'kflats[codes]'"
        )
    role, who = weight.places[0].role, brief(recipe.importance)
    if role == "parameter" and recipe.importance.needs:
        raise KflatsError(
            f"{who} cannot be measured of {weight.name!r}",
            cause="it is a parameter that no layer of its own multiplies by",
            hint="Uniform()",
        )
    weighs_tokens = recipe.importance.needs_tokenizer
    if role != "embedding" and weighs_tokens:
        raise KflatsError(
            f"{who} weighs tokens, but {weight.name!r} holds {'experts' if role == 'experts' else f'a {role} layer'}",
            hint="Uniform() for linear layers, or KroneckerFisher() with calibration data",
        )
    if weighs_tokens and data.tokenizer is None:
        raise KflatsError(f"{who} needs the model's tokenizer", hint="tokenizer=..., or Uniform()")
    if recipe.importance.needs_texts and data.texts is None:
        raise KflatsError(f"{who} needs texts to count", hint="texts=..., or ZipfPrior()")
    if recipe.matrix_rows == "out_features" and role == "embedding":
        raise KflatsError(
            f'matrix_rows="out_features" is not possible for {weight.name!r}', hint='matrix_rows="in_features"'
        )
    if role == "conv2d" and recipe.method.produces == "clusters" and not recipe.is_coded:
        raise KflatsError(
            f"{brief(recipe.method)} cannot be used for {weight.name!r}",
            cause="a convolution becomes two convolutions, which needs a low-rank pair of numbers",
            hint="SVD(), or a codec such as Transform()",
        )
    judge = recipe.codec if recipe.codec.replaces_fit(recipe.method) else recipe.method
    if refused := _refused_kinds(recipe, weight):
        raise KflatsError(
            f"{brief(judge)} cannot take the importance {who} of {weight.name!r}",
            cause=" and ".join(_WHY[kind] for kind in sorted(refused)),
            hint=", or ".join(_other_ways(recipe, weight)),
        )
    if recipe.importance.needs and not data.measurable and data.tokenizer is None:
        raise KflatsError(f"{who} of {weight.name!r} needs calibration data", hint="texts=..., batches or statistics")


def _refused_kinds(recipe: Recipe, weight: Weight) -> frozenset[str]:
    return weighting_form(recipe, weight).kinds - recipe.codec.accepts(recipe.method)


def _other_ways(recipe: Recipe, weight: Weight) -> list[str]:
    """What to change of a recipe so that its method takes its importance."""
    changes: dict[str, dict[str, Any]] = {
        "SVD()": {"method": SVD()},
        "RowFisher()": {"importance": RowFisher()},
        "Uniform()": {"importance": Uniform()},
    }
    if weight.places[0].role != "embedding":
        turned = 'matrix_rows="out_features", which turns a metric of rows into one of columns'
        changes[turned] = {"matrix_rows": "out_features"}
    ways = []
    for way, change in changes.items():
        with suppress(KflatsError):  # the codec cannot store what that method makes
            if not _refused_kinds(replace(recipe, **change), weight):
                ways.append(way)
    return ways


def is_read(weight: Weight, recipe: Recipe, trial: Trial) -> bool:
    """Whether the model was seen to read the tensor of this layer itself, so that it cannot have the recipe's form."""
    return _is_among(weight, trial.read) and not (recipe.is_dense or recipe.is_cast)


def check_calls(weight: Weight, recipe: Recipe, trial: Trial) -> None:
    """Refuse factors for a layer whose tensor the model was seen to read itself.

    Raises:
        KflatsError: such a layer.
    """
    if is_read(weight, recipe, trial):
        raise KflatsError(f"{weight.name!r} cannot be factored", cause=READ_DIRECTLY)


def weighting_form(recipe: Recipe, weight: Weight) -> WeightingForm:
    """The kind of weighting that the importance makes for ``weight``, as the method sees it.

    >>> from kflats.importance import InputGram
    >>> from kflats.model.weights import WeightUse
    >>> layer = Weight("dense", (WeightUse("dense", "linear"),), (8, 4), "float32", 128)
    >>> weighting_form(Recipe(SVD(), InputGram()), layer).kinds
    frozenset({'left'})
    """
    form = recipe.importance.form(one_hot=weight.places[0].role == "embedding")
    return form.transposed() if recipe.matrix_rows == "out_features" else form


def token_embedding(model: nn.Module) -> Weight:
    """The weight that token ids enter: what the model calls its input embedding, else its largest embedding.

    Raises:
        KflatsError: the model has none that can be compressed.
    """
    if (found := _token_embedding(model)) is not None:
        return found
    factored = _has_factored_embedding(model)
    if any(isinstance(part, nn.EmbeddingBag) for part in model.modules()):
        raise KflatsError(
            "nn.EmbeddingBag is not supported in memory",
            cause="the classes that hold one, such as StaticEmbedding of sentence-transformers, save a dense table",
            hint="save the model, and compress its folder; or the table alone, as a table in files",
        )
    raise KflatsError(
        "the model has no token embedding that can be compressed",
        cause="it is compressed already" if factored else "none at all, or of a kind that cannot be",
        hint="the names of the weights",
    )


def _token_embedding(model: nn.Module) -> Weight | None:
    """As ``token_embedding``; None where the model has none that can be compressed."""
    weights = [w for w in find_weights(model) if w.places[0].role == "embedding"]
    module = None
    get = getattr(model, "get_input_embeddings", None)
    if callable(get):
        with suppress(NotImplementedError):  # models that read no tokens
            module = get()
        names = {name for name, part in model.named_modules(remove_duplicate=False) if part is module}
        for weight in weights:
            if names & {place.name for place in weight.places}:
                return weight
    # The largest of what is left is no token embedding where that one is factored already, or cannot be.
    if _has_factored_embedding(model) or isinstance(module, nn.Module):
        return None
    return max(weights, key=lambda weight: weight.nbytes, default=None)


def _has_factored_embedding(model: nn.Module) -> bool:
    return any(isinstance(layer, FactoredEmbedding) for _, layer in factored_layers(model))


_FEW = 400_000
"""Characters, about 100,000 tokens: counts of fewer say less of a vocabulary than its Zipf prior does."""
_DAMPING = 0.05
"""For linear layers it adds a little of the plain error. For the table of positions it is the least weight of what
no window reaches, as a share of the mean: windows have 128 tokens, and models read 512. Chosen for a whole encoder in
8 MB, against .001: for layers sentences of CoLA (dev) gain .0015 of mean cosine, for positions paragraphs of WikiText-2
(valid) gain .013 in the 5th percentile."""
_UNREAD = 1.0
"""For a token table without a tokenizer: rows that no batch reads have half of the mean weight. Chosen for a whole
encoder in 8 MB, against .05 and .3, on CoLA (dev) and WikiText-2 (valid) (``benchmarks/without_tokenizer.py``)."""
_STATIC_FLOOR = 0.02
"""Of the token counts of a static model. Vectors of texts are means of its rows, so that the expected error of a text
counts a row as often as it is read (power 1). Chosen on CoLA (dev) and WikiText-2 (valid), with the power."""
_WORD, _PATTERN, _NAME = 0, 1, 2
_WHY = {
    "left": "a full metric on the side of the rows couples them, and this method treats rows one by one",
    "right": "it weighs columns, and this method does not",
    "rows": "it weighs rows, and this method does not",
}


@dataclass(frozen=True)
class _Meant:
    """What one name, pattern or word means: ``weights``, and names of layers that cannot be compressed, because several
    modules share their weight; ``rank``: which of the three it is."""

    weights: list[Weight]
    rank: int
    shared: list[str] = field(default_factory=list)


def _meant(model: nn.Module, weights: tuple[Weight, ...], name: str) -> _Meant:
    paths = {end for path in spellings(model, name) for end in (path, path.removesuffix(".weight"))}
    if any(paths & {place.name for place in w.places} for w in weights):
        return _Meant([find_weight(model, name)], _NAME)
    if name in WORDS:

        def is_meant(place: WeightUse) -> bool:
            return place.role in WORDS[name]

        chosen, rank = [w for w in weights if is_meant(w.places[0])], _WORD
        nothing = f"the model has no weights{'' if name == 'all' else f' of the kind {name!r}'} that can be compressed"
        hint = "kflats inspect MODEL lists them"
    elif any(mark in name for mark in "*?["):

        def is_meant(place: WeightUse) -> bool:
            return any(fnmatchcase(place.name, path) for path in paths)

        chosen, rank = [w for w in weights if any(map(is_meant, w.places))], _PATTERN
        nothing = f"no weight of the model matches {name!r}"
        hint = "names such as " + ", ".join(w.name for w in weights[:3]) + "; kflats inspect MODEL lists them"
    else:
        return _Meant([find_weight(model, name)], _NAME)
    shared = [layer.name for layer in shared_layers(model, weights) if is_meant(layer)]
    if shared and not chosen:
        raise KflatsError(
            f"the weights that {name!r} means cannot be compressed: {some(shared)}",
            cause="each of them is shared by several modules",
            hint="a model with one module in all places of a weight, or with a copy of the weight for each module",
        )
    if not chosen:
        raise KflatsError(nothing, hint=hint)
    return _Meant(chosen, rank, shared)


def _measures(model: nn.Module, weight: Weight, data: CalibrationData) -> bool:
    """Whether gradients of ``weight`` are measured, or can be."""
    if data.statistics is not None:
        return weight.name in data.statistics.measured
    return data.measurable or data.draws(model)


def _default(model: nn.Module, weight: Weight, data: CalibrationData, chooser: Method | None) -> Recipe:
    """The recipe of a weight for which none is given; or that of a bare ``Auto()``, in units of the loss if possible.

    Only the token embedding has rows that are tokens.
    """
    role = weight.places[0].role
    if role == "parameter":
        return Recipe(chooser or SVD())
    if role == "embedding" and weight == _token_embedding(model):
        if data.texts is not None and data.tokenizer is None:
            raise KflatsError(
                "texts are given, but no tokenizer that could count them", hint="tokenizer=..., or Uniform()"
            )
        if isinstance(model, StaticModel) and data.tokenizer is not None:
            return Recipe(chooser or Flats(), TokenCounts(1.0, 0.5 if data.counts else 1.0, _STATIC_FLOOR))
        if chooser is not None and _measures(model, weight, data):
            if data.tokenizer is None:
                return Recipe(chooser, KroneckerFisher(damping=_UNREAD, unreached="uniform"), matrix_rows="in_features")
            few = sum(map(len, data.texts or ())) < _FEW
            return Recipe(chooser, TokenFisher(smoothing=1) if few else TokenFisher())
        prior = Uniform() if data.tokenizer is None else ZipfPrior()
        return Recipe(chooser or Flats(), TokenCounts() if data.counts else prior)
    if chooser is not None and (data.measurable or data.draws(model)):
        damped = KroneckerFisher(damping=_DAMPING)
        return Recipe(chooser, damped, matrix_rows="in_features" if role == "embedding" else "out_features")
    if chooser is None and role != "embedding" and data.measurable:
        return Recipe(SVD(), KroneckerFisher())
    return Recipe(chooser or (SVD() if role in ("conv2d", "experts") else Flats()))
