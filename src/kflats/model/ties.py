"""Ties inside transformers: the lists of parameters that it shares by name, without factored places.

transformers keeps ``_tied_weights_keys = {target: source}`` on every model class, and all of them, expanded,
in ``all_tied_weights_keys``; ``tie_weights`` then assigns parameters by name. A factored place has no table to assign,
because it borrows the owner's matrix. So its entries are taken out of the lists of the instance, and kept for
``recall_ties_``. ``config.tie_word_embeddings`` is never changed: T5 scales its logits by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from kflats.common.errors import KflatsError
from kflats.model.weights import parameter, pretrained_models

_REMOVED = "_kflats_removed_ties"


def untie_(model: nn.Module, places: Iterable[str]) -> None:
    """Take the tables of ``places`` out of every list of ties; ties of biases stay."""
    group = set(places)
    for path, part in pretrained_models(model):
        named = _declared(part)
        kept = _without(named, path, group)
        if len(kept) < len(named):
            removed = {target: source for target, source in named.items() if target not in kept}
            part.__dict__.setdefault(_REMOVED, {}).update(removed)
            part._tied_weights_keys = kept
        # A parent's full list also names its children's ties.
        part.all_tied_weights_keys = _without(part.all_tied_weights_keys, path, group)


def recall_ties_(model: nn.Module) -> None:
    """Undo every ``untie_``: the class's own list is valid again, and ties that hold are listed again."""
    for path, part in pretrained_models(model):
        removed = part.__dict__.pop(_REMOVED, None)
        if removed is None:
            continue
        part.__dict__.pop("_tied_weights_keys", None)
        holds = {t: s for t, s in removed.items() if parameter(part, t) is parameter(part, s)}
        for outer_path, outer in pretrained_models(model):
            if path == outer_path or not outer_path or path.startswith(outer_path + "."):
                inner = path[len(outer_path) :].removeprefix(".")
                outer.all_tied_weights_keys.update({_absolute(inner, t): _absolute(inner, s) for t, s in holds.items()})


def untied_places(model: nn.Module, places: Iterable[str]) -> tuple[str, ...]:
    """Targets of ties that the model's class declares with one of ``places`` (all factored), but that do not hold.

    T5's head is such a place wherever its checkpoint has a table for it, whatever the config says.
    """
    group = set(places)
    found: set[str] = set()
    for path, part in pretrained_models(model):
        for pair in part.__dict__.get(_REMOVED, {}).items():
            target, source = (_absolute(path, key).removesuffix(".weight") for key in pair)
            if (target in group) != (source in group):
                found.add(target)
    return tuple(sorted(found))


def _declared(part: Any) -> dict[str, str]:
    """The ties that ``part`` declares for itself, by parameter name; none where its config says so."""
    if not hasattr(part, "all_tied_weights_keys"):
        raise KflatsError(
            f"{type(part).__name__} does not say which of its weights are tied",
            cause="transformers before 5.0, or a model class written for it",
            hint="pip install 'transformers>=5.0'",
        )
    found: dict[str, str] = part.get_expanded_tied_weights_keys(all_submodels=False)
    return found


def _without(ties: dict[str, str], path: str, group: set[str]) -> dict[str, str]:
    """``ties`` less those that assign a table of ``group`` or assign to one."""
    tables = {f"{name}.weight" for name in group}
    return {t: s for t, s in ties.items() if not tables & {_absolute(path, t), _absolute(path, s)}}


def _absolute(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
