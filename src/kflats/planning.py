"""Select and allocate: which weight is treated how, in how many bytes. Nothing is fitted, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from kflats.analysis import stored_bytes
from kflats.budget import Budget, parse_budget, split
from kflats.errors import KflatsError
from kflats.importance import TokenCounts, Uniform, ZipfPrior
from kflats.methods import Flats
from kflats.nn.layers import FactoredEmbedding
from kflats.places import factored_layers
from kflats.plan import Decision, Plan, Recipe, as_recipe
from kflats.surgery import Weight, find_weight, find_weights


def plan(
    model: nn.Module,
    recipes: Any = None,
    *,
    budget: str | Budget,
    data: Iterable[str] | None = None,
    tokenizer: Any = None,
    file_bytes: int | None = None,
) -> Plan:
    """Decide which weight is treated how, in how many bytes; nothing is changed and nothing is fitted.

    Args:
        model: any torch module; transformers models know their token embedding.
        recipes: {weight name: recipe or method}; one recipe or method for the token embedding; None for
            the default recipe on it: ``Flats(k=5)`` with ``TokenCounts`` if there are texts, ``ZipfPrior``
            if there is only a tokenizer, ``Uniform`` without both. A value of None in a mapping means the
            same for the token embedding, and ``Flats(k=5)`` with ``Uniform`` for any other weight.
        budget: "60%", "12MB", "5.2M params" of the *named weights*, kept; several weights share it in
            proportion to their bytes.
        data: texts that importance may count. tokenizer: the model's own.
        file_bytes: all weight files of the original, for budgets of ``scope="file"``.

    Raises:
        KflatsError: unknown names, a budget that cannot be met, an importance without its data.
    """
    named = _named(model, recipes, data is not None, tokenizer is not None)
    allowed = parse_budget(budget)
    weights = [weight for weight, _ in named]
    sizes = {recipe.codec.itemsize(weight.dtype) for weight, recipe in named}
    if allowed.kind == "params" and len(sizes) > 1:
        raise KflatsError("a budget of parameters needs weights of one stored type", hint="a budget in bytes")
    total = stored_bytes(model)
    shares = split(allowed.stored_bytes(weights, file_bytes or total, sizes.pop()), weights)
    decisions = tuple(
        Decision(weight, recipe, share, _note(weight, recipe, data is not None, tokenizer is not None))
        for (weight, recipe), share in zip(named, shares, strict=True)
    )
    return Plan(decisions, str(allowed), total)


def _named(model: nn.Module, recipes: Any, texts: bool, tokenizer: bool) -> list[tuple[Weight, Recipe]]:
    importance = TokenCounts() if texts and tokenizer else ZipfPrior() if tokenizer else Uniform()
    if not isinstance(recipes, Mapping):
        recipes = {token_embedding(model).name: recipes}
    if not recipes:
        raise KflatsError("no weight is named", hint="kflats inspect MODEL lists what can be")
    found: list[tuple[Weight, Recipe]] = []
    for name, recipe in recipes.items():
        weight = find_weight(model, name)
        if recipe is None:  # what weighs tokens means nothing to rows that are no tokens
            of_tokens = weight.places[0].role == "embedding" and weight.name == token_embedding(model).name
            if of_tokens and texts and not tokenizer:
                raise KflatsError(
                    "texts are given, but no tokenizer that could count them",
                    hint="tokenizer=..., or Recipe(method, Uniform())",
                )
            recipe = Recipe(Flats(), importance if of_tokens else Uniform())
        made = as_recipe(recipe)
        if any(weight.name == other.name for other, _ in found):
            raise KflatsError(f"{name!r} is named twice", cause="two of the names are places of one tied weight")
        role = weight.places[0].role
        if role != "embedding" and not isinstance(made.importance, Uniform):
            raise KflatsError(
                f"{type(made.importance).__name__} weighs tokens, but {weight.name!r} is a {role} layer",
                hint="Uniform() for linear layers (--importance uniform)",
            )
        if getattr(made.importance, "needs_tokenizer", False) and not tokenizer:
            raise KflatsError(
                f"{type(made.importance).__name__} needs the model's tokenizer", hint="tokenizer=..., or Uniform()"
            )
        if getattr(made.importance, "needs_texts", False) and not texts:
            raise KflatsError(
                f"{type(made.importance).__name__} needs texts to count", hint="data=texts, or ZipfPrior()"
            )
        found.append((weight, made))
    return found


def token_embedding(model: nn.Module) -> Weight:
    """The weight that token ids enter: what the model calls its input embedding, else its largest embedding.

    Raises:
        KflatsError: the model has none that can be compressed.
    """
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
    factored = any(isinstance(layer, FactoredEmbedding) for _, layer in factored_layers(model))
    if not weights or factored or isinstance(module, nn.Module):
        raise KflatsError(
            "the model has no token embedding that can be compressed",
            cause="it is compressed already" if factored else "none at all, or of a kind that cannot be",
            hint="name the weights: compress_(model, {name: recipe}, ...)",
        )
    return max(weights, key=lambda weight: weight.nbytes)


def _note(weight: Weight, recipe: Recipe, texts: bool, tokenizer: bool) -> str:
    if not isinstance(recipe.importance, Uniform) or weight.places[0].role != "embedding":
        return ""
    if texts:
        return "the texts are not counted: every row counts the same"
    if isinstance(recipe.method, Flats) and not tokenizer:
        return "no texts and no tokenizer: every row counts the same"
    return ""


def decide(
    model: nn.Module, recipes: Any, budget: str | Budget | None, texts: tuple[str, ...] | None, tokenizer: Any
) -> Plan:
    """A plan for ``model``: a new one, or the given ``Plan`` checked against the model's own weights."""
    if not isinstance(recipes, Plan):
        return plan(model, recipes, budget=required(budget), data=texts, tokenizer=tokenizer)
    if budget is not None and str(parse_budget(budget)) != recipes.budget:
        raise KflatsError(f"the plan was made for {recipes.budget}, not {budget}", hint="leave the budget out")
    resolved = recipes.resolve(lambda name: find_weight(model, name))
    _named(model, {d.weight.name: d.recipe for d in resolved.decisions}, texts is not None, tokenizer is not None)
    return resolved


def required(budget: str | Budget | None) -> str | Budget:
    """The budget, or a clear error where none is given."""
    if budget is None:
        raise KflatsError("no budget is given", hint='budget="60%", "12MB" or "5.2M params"')
    return budget
