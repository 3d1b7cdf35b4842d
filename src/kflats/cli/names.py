"""The names that options accept, known without importing torch: help and refusals of arguments answer at once.

A test compares these tables with the registries of methods, importances and codecs, and with the losses.
"""

from __future__ import annotations

from collections.abc import Collection

from kflats.common.errors import KflatsError
from kflats.common.registry import announced, unknown

METHODS = ("svd", "flats", "kmeans-svd", "messi", "keep-dense", "auto", "robust-svd", "entrywise", "l1", "subspace")
IMPORTANCES = ("uniform", "counts", "zipf", "token-fisher", "row-fisher", "two-sided", "input-gram", "kronecker")
NO_DATA = ("uniform", "zipf")
"""The importances that neither count texts nor measure anything."""
CODECS = ("float", "integer", "transform")
TYPES = ("float32", "float16", "bfloat16")
"""The types of numbers, which stand for codecs."""
LOSSES = ("squared", "power", "huber", "truncated")
TAKE = {
    "flats": ("flats", "kmeans-svd", "messi"),
    "restarts": ("flats", "kmeans-svd", "messi"),
    "form": ("svd",),
    "p": ("robust-svd", "entrywise"),
    "error": ("flats", "messi", "subspace"),
}
"""The methods that take each option of a method."""
SEARCHED = ("flats", "messi")
"""The methods that can search their number of flats."""
TAKE_POWER = ("counts", "zipf", "token-fisher")
"""The importances with a power."""


def known(axis: str, own: Collection[str], name: str) -> bool:
    """Whether ``name`` is one of kflats' ``own`` names of an axis; False for one that another package announces.

    Raises:
        KflatsError: nothing is called so.
    """
    wanted = name.strip().lower()
    if wanted in own:
        return True
    others = [entry.name for entry in announced(axis)]
    if wanted not in others:
        raise unknown(axis, name, [*own, *others])
    return False


def check_codec(name: str) -> None:
    """Refuse a text that does not begin with the name of a codec or a type, or with "int" and a number of bits."""
    word = name.strip().lower().partition(" ")[0]
    if not (word.startswith("int") and word[3:].isdigit()):
        known("codec", (*CODECS, *TYPES), word)


def check_flats(count: str, method: str) -> None:
    """Refuse what is neither a number of flats nor the word "search", which only some methods can do."""
    if count == "search" and method not in SEARCHED:
        hint = f"--method {SEARCHED[0]} or {SEARCHED[1]}, or --flats K"
        raise KflatsError(f"--flats search cannot be used with --method {method}", hint=hint)
    if count != "search" and not (count.isascii() and count.isdigit() and 1 <= int(count) <= 4096):
        raise KflatsError(f"--flats {count} is not supported", hint="a whole number from 1 to 4096, or search")


def check_loss(name: str) -> None:
    """Refuse a text that does not begin with the name of a loss."""
    if name.strip().lower().partition(" ")[0] not in LOSSES:
        raise KflatsError(f"no loss is called {name!r}", hint="one of " + ", ".join(LOSSES))
