"""Codecs: frozen values that say how the numbers of a matrix are stored. One axis of a recipe.

``Float`` stores the factors of any method. The others store integers (``CodedMatrix``), which an entropy coder makes
smaller still on disk. ``Integer`` rounds whatever a method fits; ``Transform`` takes the place of the fit of methods
that minimise squares.
"""

from __future__ import annotations

from kflats.codecs.feedback import Feedback
from kflats.codecs.float import Float
from kflats.codecs.protocol import DTYPES, Candidate, Codec, Table, check_codec
from kflats.codecs.row_scales import Integer, RowScaleCodec
from kflats.codecs.transform import Transform
from kflats.common.errors import KflatsError
from kflats.common.registry import Registry

__all__ = [
    "CODECS",
    "Candidate",
    "Codec",
    "Feedback",
    "Float",
    "Integer",
    "RowScaleCodec",
    "Table",
    "Transform",
    "check_codec",
    "from_name",
]

CODECS: Registry[Codec] = Registry(
    "codec",
    (Transform, Feedback, Integer, Float),
    {"feedback": Feedback, "float": Float, "integer": Integer, "transform": Transform},
)
"""All codecs, and what the command line calls them."""
_GROUP = "64"  # columns that share a scale at 4 bits and fewer, where none is named


def from_name(name: str) -> Codec:
    """The codec that a command line calls ``name``: a name with numbers, a type of ``Float``, or "int4" with a group.

    Integers of 4 bits and fewer without a group have groups of 64 columns.

    Raises:
        KflatsError: no codec has this name, or it does not take these numbers.

    >>> from_name("float16"), from_name("int4 32"), from_name("transform")
    (Float(dtype='float16'), Integer(bits=4, group=32), Transform(classes=32))
    """
    word, *rest = name.strip().lower().split() or [""]
    if word in DTYPES and not rest:
        return Float(word)
    if word.startswith("int") and word[3:].isdigit():
        word, rest = "integer", [word[3:], *rest]
    known = [*CODECS.all_names(), *DTYPES, "int8", "int4", '"int4 GROUP"', '"transform CLASSES"']
    if word == "integer" and len(rest) == 1 and rest[0].isdigit() and int(rest[0]) <= 4:
        rest.append(_GROUP)
    if word not in CODECS.all_names():
        raise KflatsError(f"no codec is called {name!r}", hint="one of " + ", ".join(known))
    if len(rest) > len(CODECS.options(word)) or not all(number.isdigit() for number in rest):
        raise KflatsError(
            f"the codec {name!r} cannot be read", cause="a codec takes a name and whole numbers", hint=", ".join(known)
        )
    return CODECS.make(word)(*(int(number) for number in rest))
