"""Budgets: "60%", "12MB", "5.2M params", "33% ranks". One meaning everywhere: what is *kept* of the named weights.

A size counts stored bytes, row labels included; 1 MB is 1e6 bytes and 1 MiB is 2**20. A count of
parameters counts stored numbers, so labels come on top. A share of ranks keeps that share of every weight's
full rank (FWSVD's rank ratio): a square layer then takes twice that share of its bytes. With ``scope="file"``
the size bounds all weight files of the model instead of the named weights. "103%, larger allowed" asks for more than
the named weights take now (MESSI's table 2 covers a table by flats of its own size, and labels come on top).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from kflats.common.errors import DoesNotFitError, KflatsError, is_number

if TYPE_CHECKING:
    from kflats.model.weights import Weight

Allocation = Literal["auto", "uniform", "loss"]
"""How weights share a budget. "uniform": each gets the same share of bytes (or ranks). "loss": bytes go where they save
most loss, and weights may stay dense. "auto": "loss" if every importance is in units of the loss."""

DEFAULT_QUALITY = 0.99
"""The quality that a folder keeps where neither a size nor a quality is given."""

_UNITS: dict[tuple[str, str], tuple[str, Decimal]] = {
    ("%", ""): ("fraction", Decimal("0.01")),
    ("%", "ranks"): ("ranks", Decimal("0.01")),
    ("bit", ""): ("bits", Decimal(1)),
    ("bits", ""): ("bits", Decimal(1)),
}
"""Kind and scale of each unit, with the noun after it."""
for _i, _letter in enumerate(("", "k", "m", "g")):
    _UNITS[f"{_letter}b", ""] = "bytes", Decimal(1000**_i)
    _UNITS[f"{_letter}ib", ""] = "bytes", Decimal(1024**_i)
    _UNITS[_letter, "params"] = _UNITS[_letter, "parameters"] = "params", Decimal(1000**_i)
_UNITS["b", "params"] = _UNITS["b", "parameters"] = _UNITS["g", "params"]
_SYNTAX = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?|[+-]?nan|[+-]?inf)\s*([a-z%]*)(?:\s+([a-z]+))?", re.I
)
_FORMS = {
    "weights": 'a budget as "60%" (of the named weights, kept), "12MB" (12e6 bytes), "5.2M params" or "33% ranks"',
    "file": 'a size of all weight files as "8MB" (8e6 bytes), "10%" or "2 bits" (a number)',
}
"""What a budget may be, for each scope."""
_FILES = " of all files"
_LARGER = ", larger allowed"
_HEADER_ENTRY = 78
"""Bytes that one more tensor may add to a safetensors header, its name not counted."""
_MORE_ENTRIES = 3
_MOST = 2**62  # no model has more bytes
_LARGEST = 2
"""How many times the present bytes a larger budget may be."""
_METADATA = 128
"""Bytes of a header that say who wrote the file, with a checksum, and of its end, which is padded."""


@dataclass(frozen=True)
class Budget:
    """How much may be kept: see the module's text.

    Args:
        kind: "fraction" or "ranks" (amount in 0..1, a larger fraction up to 2), "bytes", "params" or "bits" (a number
            of all weight files).
        amount: how much of it; whole for bytes and params.
        scope: "weights" (the named ones) or "file" (all weight files).
        larger: it may be more than the named weights take now, up to twice as much.

    >>> str(Budget("fraction", 0.6)), str(Budget("bytes", 12_000_000)), str(Budget("params", 5_200_000))
    ('60%', '12MB', '5.2M params')
    >>> str(Budget("bytes", 40_000_000, "file"))
    '40MB of all files'
    """

    kind: str
    amount: float
    scope: str = "weights"
    larger: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("fraction", "bytes", "params", "ranks", "bits") or self.scope not in tuple(_FORMS):
            raise KflatsError(
                f"no budget is of kind {self.kind!r} and scope {self.scope!r}", hint="; or ".join(_FORMS.values())
            )
        forms = _FORMS[self.scope]
        if not 0 < self.amount < _MOST:  # nan lands here as well
            many = "is larger than any model" if self.amount >= _MOST else "keeps nothing"
            raise KflatsError(f"a budget of {self.amount} {self.kind} {many}", hint=forms)
        if self.larger and (self.scope == "file" or self.kind not in ("fraction", "bytes", "params")):
            raise KflatsError(
                f"a budget of {self} is not supported", cause="a larger size is for named weights", hint=forms
            )
        if self.kind in ("fraction", "ranks") and self.amount > self.most:
            able = self.kind == "fraction" and self.scope == "weights" and not self.larger
            asked = f'. "{self}{_LARGER}" if the weights shall grow' if able and self.amount <= _LARGEST else ""
            raise KflatsError(
                f"a budget of {self} is more than {'twice ' if self.larger else ''}the original",
                cause="a budget says what is kept, not a factor",
                hint="at most 100%; '40% compression' in the papers is a budget of 60%" + asked,
            )
        if self.kind in ("bytes", "params") and self.amount != int(self.amount):
            raise KflatsError(f"a budget of {self.amount} {self.kind} is not a whole number", hint=forms)
        if self.kind in ("params", "ranks") and self.scope == "file":
            share = "count of parameters" if self.kind == "params" else "share of ranks"
            raise KflatsError(f"a file cannot be bounded by a {share}", hint='a file budget such as "40MB"')
        if self.kind == "bits" and self.scope != "file":
            raise KflatsError("bits a number are not supported for named weights", hint='size="2 bits", or keep="6%"')

    @property
    def most(self) -> int:
        """The largest share of the present bytes that it may ask for."""
        return _LARGEST if self.larger else 1

    @property
    def counts_labels(self) -> bool:
        """Whether row labels must fit as well: for sizes yes, for a count of parameters no."""
        return self.kind != "params"

    def __str__(self) -> str:
        files = _FILES if self.scope == "file" else _LARGER if self.larger else ""
        if self.kind == "fraction":
            return f"{100 * self.amount:.15g}%{files}"
        if self.kind == "ranks":
            return f"{100 * self.amount:.15g}% ranks"
        if self.kind == "bits":
            return f"{self.amount:.15g} bits{files}"
        amount, prefixes = Decimal(int(self.amount)), (("G", 10**9), ("M", 10**6), ("k", 10**3), ("", 1))
        # Only where three decimals say it exactly, so that the text parses back to this budget.
        prefix, scale = next((p, s) for p, s in prefixes if amount >= s and amount * 1000 % s == 0)
        amount /= scale
        return f"{amount:f}{prefix}B{files}" if self.kind == "bytes" else f"{amount:f}{prefix} params{files}"

    def in_bytes(self, numbers: int) -> Budget:
        """This budget with bits a number turned into bytes; ``numbers`` of the whole model.

        >>> str(Budget("bits", 2, "file").in_bytes(4_000_000)), str(Budget("bytes", 5).in_bytes(8))
        ('1MB of all files', '5B')
        """
        return Budget("bytes", int(self.amount * numbers // 8), self.scope) if self.kind == "bits" else self

    def amount_of(self, total: int) -> int:
        """Its amount as a whole number: of a share, what it is of ``total`` bytes.

        >>> Budget("fraction", 0.29).amount_of(100), Budget("bytes", 5).amount_of(100)
        (29, 5)
        """
        # 0.29 * 100 is 28.999... in floating point.
        return int(Decimal(repr(float(self.amount))) * total) if self.kind == "fraction" else int(self.amount)

    def stored_bytes(self, weights: Sequence[Weight], model_file_bytes: int, itemsize: int) -> int:
        """Bytes that the factored ``weights`` may take in all, labels included (see ``counts_labels``).

        Args:
            weights: the named weights; a tied matrix counts once.
            model_file_bytes: all weight files of the original; used by ``scope="file"`` alone, where
                everything that is not named, and the longer file header, is paid first.
            itemsize: bytes of one stored number, to turn parameters into bytes.

        Raises:
            KflatsError: no weights, more than the original, or nothing left; the message has the sizes.
        """
        original = sum(weight.nbytes for weight in weights)
        if self.kind == "ranks":
            raise KflatsError("a share of ranks is no number of bytes", cause="what it takes depends on the shapes")
        if not weights or original <= 0:
            raise KflatsError("no weights are named, so a budget means nothing", hint="kflats inspect MODEL lists them")
        rest, total, whose = 0, original, "the named weights"
        if self.scope == "file":
            if model_file_bytes < original:
                raise KflatsError(
                    f"the named weights take {original:,} bytes but the model's files only {model_file_bytes:,}",
                    cause="in the file, tokens share rows, or weights are quantized or of a narrower type than loaded",
                    hint='keep="50%", a share of the named weights; or a folder whose config.json names their type',
                )
            header = _METADATA + sum(_longer_header(weight) for weight in weights)
            rest, total, whose = model_file_bytes - original + header, model_file_bytes, "the model's files"
        allowed = self.amount_of(total) * (itemsize if self.kind == "params" else 1)
        if allowed > self.most * total:
            most = f"{'twice what ' if self.larger else ''}{whose} take now"
            raise KflatsError(
                f"a budget of {self} ({allowed:,} bytes) is more than {most} ({total:,} bytes)",
                hint=f"at most {self.most * total:,} bytes",
            )
        if allowed <= rest:
            whole = self.scope == "file"
            beside = "weights that are not named stay as they are, and so do biases and norms; files have headers"
            raise DoesNotFitError(
                f"a budget of {self} ({allowed:,} bytes) keeps nothing of the named weights: "
                f"everything else takes {rest:,} of {total:,} bytes",
                cause=beside if whole else "",
                hint="a larger budget" + (", or more weights where not all are named (--weights all)" if whole else ""),
            )
        return min(allowed - rest, self.most * original)


def parse_budget(text: str | Budget, scope: str = "weights") -> Budget:
    """A budget from its text.

    Args:
        text: "60%"; "12MB" (kB, MB, GB: powers of 1000; KiB, MiB, GiB: powers of 1024; B);
            "5.2M params" (k, M, G, or none); "33% ranks"; with scope "file" also "2 bits" a number. "... of all files"
            means scope "file"; "..., larger allowed" more than the weights take now. A ``Budget`` is handed back as it
            is.
        scope: "weights" or "file".

    Raises:
        KflatsError: not a budget, nothing, less than nothing, more than everything, or ambiguous: "0.6"
            might be a share kept, a share removed, or bytes.

    >>> parse_budget("12MB")
    Budget(kind='bytes', amount=12000000, scope='weights', larger=False)
    >>> parse_budget("33% ranks")
    Budget(kind='ranks', amount=0.33, scope='weights', larger=False)
    """
    if isinstance(text, Budget):
        return text
    if scope not in tuple(_FORMS):
        raise KflatsError(f"a budget of the scope {scope!r} is not supported", hint=" or ".join(_FORMS))
    size = text.strip() if isinstance(text, str) else ""
    larger, size = size.endswith(_LARGER), size.removesuffix(_LARGER)
    if size.endswith(_FILES):
        size, scope = size.removesuffix(_FILES), "file"
    if (match := _SYNTAX.fullmatch(size)) is None:
        raise KflatsError(f"{text!r} is not a budget", hint=_FORMS[scope])
    unit, noun = match[2].lower(), (match[3] or "").lower()
    if unit in ("params", "parameters") and not noun:
        unit, noun = "", unit
    if (unit, noun) not in _UNITS:
        ambiguous = "a number without a unit is ambiguous: it might be a share kept, a share removed, or bytes"
        cause = f"unknown unit {f'{unit} {noun}'.strip()!r}" if unit or noun else ambiguous
        raise KflatsError(f"{text!r} is not a budget", cause=cause, hint=_FORMS[scope])
    kind, scale = _UNITS[unit, noun]
    amount = Decimal(match[1]) * scale
    # Sizes are rounded down: a budget is never exceeded.
    whole = kind in ("bytes", "params") and amount.is_finite()
    return Budget(kind, int(amount) if whole else float(amount), scope, larger)


def one_budget(keep: str | Budget | None, size: str | Budget | None) -> Budget:
    """The one budget that is given: ``keep`` of the named weights, or the ``size`` of all weight files.

    Raises:
        KflatsError: both or none, or a text that is not a budget.

    >>> str(one_budget("60%", None)), str(one_budget(None, "8MB"))
    ('60%', '8MB of all files')
    """
    if (keep is None) == (size is None):
        raise KflatsError(
            "no budget is given" if keep is None else f"keep={str(keep)!r} and size={str(size)!r} are both given",
            cause="keep bounds the named weights, and size bounds all weight files",
            hint='keep="60%" or size="8MB"',
        )
    return parse_budget(keep) if keep is not None else parse_budget(size or "", scope="file")


def check_quality(quality: float | None, keep: object = None, size: object = None) -> None:
    """Raise KflatsError for a quality that is no share of the original's below 1, and for a size beside a quality."""
    if quality is None:
        return
    if not is_number(quality, 0, 1) or quality in (0, 1):
        raise KflatsError(f"a quality of {quality!r} is not supported", hint="a number between 0 and 1, such as 0.99")
    if keep is not None or size is not None:
        raise KflatsError("a quality beside a size is not supported", hint="one of quality, size and keep")


def _longer_header(weight: Weight) -> int:
    """Bytes that the entries of a weight may gain in a file's header."""
    # A factored weight is up to four tensors in place of one; a layer without a bias may gain one, too.
    more = _MORE_ENTRIES + (not weight.bias and weight.places[0].role != "embedding")
    return more * (len(weight.name.encode()) + _HEADER_ENTRY)
