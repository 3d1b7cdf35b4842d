"""Budgets: "60%", "12MB", "5.2M params", "33% ranks". One meaning everywhere: what is *kept* of the named weights.

A size counts stored bytes, row labels included; 1 MB is 1e6 bytes and 1 MiB is 2**20. A count of
parameters counts stored numbers, so labels come on top. A share of ranks keeps that share of every weight's
full rank (FWSVD's rank ratio): a square layer then takes twice that share of its bytes. With ``scope="file"``
the size bounds all weight files of the model instead of the named weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal

from kflats.common.errors import KflatsError
from kflats.model.swap import Weight

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_SYNTAX = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?|[+-]?nan|[+-]?inf)\s*([a-z%]*)(?:\s+([a-z]+))?", re.I
)
_FORMS = 'a budget as "60%" (of the named weights, kept), "12MB" (12e6 bytes), "5.2M params" or "33% ranks"'
_FILES = " of all files"
_HEADER_ENTRY = 78
"""Bytes that one more tensor may add to a safetensors header, its name not counted."""
_MORE_ENTRIES = 3
_HEADER_TYPE = 4
"""What a type's name, and offsets of more digits, may add to an entry."""
_METADATA = 128
"""Bytes of a header that say who wrote the file, with a checksum, and of its end, which is padded."""


@dataclass(frozen=True)
class Budget:
    """How much may be kept: see the module's text.

    Args:
        kind: "fraction" or "ranks" (amount in 0..1), "bytes", "params" or "bits" (a number of all weight files).
        amount: how much of it; whole for bytes and params.
        scope: "weights" (the named ones) or "file" (all weight files).

    >>> str(Budget("fraction", 0.6)), str(Budget("bytes", 12_000_000)), str(Budget("params", 5_200_000))
    ('60%', '12MB', '5.2M params')
    >>> str(Budget("bytes", 40_000_000, "file"))
    '40MB of all files'
    """

    kind: str
    amount: float
    scope: str = "weights"

    def __post_init__(self) -> None:
        if self.kind not in ("fraction", "bytes", "params", "ranks", "bits") or self.scope not in ("weights", "file"):
            raise KflatsError(f"no budget is of kind {self.kind!r} and scope {self.scope!r}", hint=_FORMS)
        if not 0 < self.amount < float("inf"):  # nan lands here as well
            raise KflatsError(f"a budget of {self.amount} {self.kind} keeps nothing", hint=_FORMS)
        if self.kind in ("fraction", "ranks") and self.amount > 1:
            raise KflatsError(
                f"a budget of {self} is more than the original",
                cause="a budget says what is kept, not a factor",
                hint="at most 100%; '40% compression' in the papers is a budget of 60%",
            )
        if self.kind in ("bytes", "params") and self.amount != int(self.amount):
            raise KflatsError(f"a budget of {self.amount} {self.kind} is not a whole number", hint=_FORMS)
        if self.kind == "params" and self.scope == "file":
            raise KflatsError("a file cannot be bounded by a count of parameters", hint='a file budget such as "40MB"')
        if self.kind == "bits" and self.scope != "file":
            raise KflatsError(
                "bits a number are not supported for named weights",
                cause="they bound all weight files",
                hint='size="2 bits" (--size), or keep="6%"',
                command="--size '2 bits', or --keep 6%",
            )
        if self.kind == "ranks" and self.scope == "file":
            raise KflatsError("a file cannot be bounded by a share of ranks", hint='a file budget such as "40MB"')

    @property
    def counts_labels(self) -> bool:
        """Whether row labels must fit as well: for sizes yes, for a count of parameters no."""
        return self.kind != "params"

    def __str__(self) -> str:
        files = " of all files" if self.scope == "file" else ""
        if self.kind == "fraction":
            return f"{100 * self.amount:.15g}%{files}"
        if self.kind == "ranks":
            return f"{100 * self.amount:.15g}% ranks"
        if self.kind == "bits":
            return f"{self.amount:.15g} bits{files}"
        amount, prefix = Decimal(int(self.amount)), ""
        for name, scale in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
            # Only where three decimals say it exactly, so that the text parses back to this budget.
            if amount >= scale and amount % (scale // 1000) == 0:
                amount, prefix = amount / scale, name
                break
        return f"{amount:f}{prefix}B{files}" if self.kind == "bytes" else f"{amount:f}{prefix} params"

    def in_bytes(self, numbers: int) -> Budget:
        """This budget with bits a number turned into bytes; ``numbers`` of the whole model.

        >>> str(Budget("bits", 2, "file").in_bytes(4_000_000)), str(Budget("bytes", 5).in_bytes(8))
        ('1MB of all files', '5B')
        """
        return Budget("bytes", int(self.amount * numbers // 8), self.scope) if self.kind == "bits" else self

    def stored_bytes(
        self, weights: Sequence[Weight], model_file_bytes: int, itemsize: int, whole: Collection[str] = ()
    ) -> int:
        """Bytes that the factored ``weights`` may take in all, labels included (see ``counts_labels``).

        Args:
            weights: the named weights; a tied matrix counts once.
            model_file_bytes: all weight files of the original; used by ``scope="file"`` alone, where
                everything that is not named, and the longer file header, is paid first.
            itemsize: bytes of one stored number, to turn parameters into bytes.
            whole: names of weights that stay one tensor of their name; of the others a file's header may need more.

        Raises:
            KflatsError: no weights, more than the original, or nothing left; the message has the sizes.
        """
        original = sum(weight.nbytes for weight in weights)
        if self.kind == "ranks":
            raise KflatsError("a share of ranks is no number of bytes", cause="what it takes depends on the shapes")
        if not weights or original <= 0:
            raise KflatsError("no weights are named, so a budget means nothing", hint="kflats inspect MODEL lists them")
        if self.scope == "file":
            return self._stored_in_file(weights, original, model_file_bytes, whole)
        if self.kind == "fraction":
            allowed = int(Decimal(repr(self.amount)) * original)
        else:
            allowed = int(self.amount) * (itemsize if self.kind == "params" else 1)
        if allowed > original:
            raise KflatsError(
                f"a budget of {self} ({allowed:,} bytes) is more than the named weights take now ({original:,} bytes)",
                cause="the budget counts the named weights, not the whole model",
                hint="a smaller budget, or size (--size) to bound all weight files",
            )
        if allowed < 1:
            raise KflatsError(f"a budget of {self} of {original:,} bytes keeps nothing", hint="a larger budget")
        return allowed

    def _stored_in_file(
        self, weights: Sequence[Weight], original: int, model_file_bytes: int, whole: Collection[str]
    ) -> int:
        if model_file_bytes < original:
            raise KflatsError(
                f"the named weights take {original:,} bytes but the model's files only {model_file_bytes:,}",
                cause="the model was loaded in a wider type than it is stored in",
                hint="load it in its own type (dtype='auto')",
                command="a model folder whose config.json names the type of its weights",
            )
        if self.kind == "fraction":
            limit = int(Decimal(repr(self.amount)) * model_file_bytes)
        else:
            limit = int(self.amount)
        if limit > model_file_bytes:
            raise KflatsError(
                f"a file budget of {self} ({limit:,} bytes) is more than the model's files now "
                f"({model_file_bytes:,} bytes)",
                hint="a smaller budget",
            )
        header = _METADATA + sum(_longer_header(weight, weight.name in whole) for weight in weights)
        rest = model_file_bytes - original + header
        if limit <= rest:
            raise KflatsError(
                f"a file budget of {self} ({limit:,} bytes) leaves nothing for the named weights: "
                f"everything else takes {rest:,} of {model_file_bytes:,} bytes",
                hint="a larger budget, or name more weights",
            )
        return min(limit - rest, original)


def parse_budget(text: str | Budget, scope: str = "weights") -> Budget:
    """A budget from its text.

    Args:
        text: "60%"; "12MB" (kB, MB, GB: powers of 1000; KiB, MiB, GiB: powers of 1024; B);
            "5.2M params" (k, M, G, or none); "33% ranks". "... of all files" means scope "file". A ``Budget`` is handed
            back as it is.
        scope: "weights" or "file".

    Raises:
        KflatsError: not a budget, nothing, less than nothing, more than everything, or ambiguous: "0.6"
            might be a share kept, a share removed, or bytes.

    >>> parse_budget("12MB")
    Budget(kind='bytes', amount=12000000, scope='weights')
    >>> parse_budget("33% ranks")
    Budget(kind='ranks', amount=0.33, scope='weights')
    """
    if isinstance(text, Budget):
        return text
    if not isinstance(text, str):
        raise KflatsError(f"{text!r} is not a budget", cause="a number without a unit is ambiguous", hint=_FORMS)
    size = text.strip()
    if size.endswith(_FILES):
        size, scope = size.removesuffix(_FILES), "file"
    match = _SYNTAX.fullmatch(size)
    if match is None:
        raise KflatsError(f"{text!r} is not a budget", hint=_FORMS)
    number, unit, noun = match[1], match[2].lower(), (match[3] or "").lower()
    if unit in ("params", "parameters") and not noun:
        unit, noun = "", "params"
    amount = Decimal(number)
    if not amount.is_finite() or amount <= 0:
        raise KflatsError(f"a budget of {text.strip()} keeps nothing", hint=_FORMS)
    if noun in ("params", "parameters") and unit in _COUNTS:
        return Budget("params", _whole(amount * _COUNTS[unit], text), scope)
    if noun in ("", "ranks") and unit == "%":
        return Budget("ranks" if noun else "fraction", float(amount / 100), scope)
    if not noun and unit in ("bit", "bits"):
        return Budget("bits", float(amount), scope)
    if not noun and unit in _BYTES:
        return Budget("bytes", _whole(amount * _BYTES[unit], text), scope)
    if not noun and not unit:
        raise KflatsError(
            f"a budget of {text.strip()} without a unit is ambiguous",
            cause="it might be a share kept, a share removed, or bytes",
            hint=_FORMS,
        )
    raise KflatsError(f"{text!r} is not a budget", cause=f"unknown unit {(unit + ' ' + noun).strip()!r}", hint=_FORMS)


def one_budget(keep: str | Budget | None, size: str | Budget | None) -> Budget:
    """The one budget that is given: ``keep`` of the named weights, or the ``size`` of all weight files.

    Raises:
        KflatsError: both or none, or a text that is not a budget.

    >>> str(one_budget("60%", None)), str(one_budget(None, "8MB"))
    ('60%', '8MB of all files')
    """
    if keep is not None and size is not None:
        raise KflatsError(
            f"keep={str(keep)!r} and size={str(size)!r} are both given",
            cause="keep bounds the named weights, and size bounds all weight files",
            hint="leave one of them out",
        )
    if keep is None and size is None:
        raise KflatsError(
            "no budget is given",
            hint='keep="60%" (named weights) or size="8MB" (all weight files)',
            command="--keep 60% (named weights) or --size 8MB (all weight files)",
        )
    return parse_budget(keep) if keep is not None else parse_budget(size or "", scope="file")


def _longer_header(weight: Weight, whole: bool) -> int:
    """Bytes that the entries of a weight may gain in a file's header."""
    lengths = [len(place.name.encode()) for place in weight.places]
    if whole:  # of a tied table another name may be stored than was
        return max(lengths) - min(lengths) + _HEADER_TYPE
    # A factored weight is up to four tensors in place of one; a layer without a bias may gain one, too.
    more = _MORE_ENTRIES + (not weight.bias and weight.places[0].role != "embedding")
    return more * (len(weight.name.encode()) + _HEADER_ENTRY)


def _whole(amount: Decimal, text: str) -> int:
    """Rounded down: a budget is never exceeded."""
    if amount < 1:
        raise KflatsError(f"a budget of {text.strip()} keeps nothing", hint=_FORMS)
    if amount > Decimal(2) ** 62:
        raise KflatsError(f"a budget of {text.strip()} is larger than any model", hint=_FORMS)
    return int(amount)
