"""The one exception for a caller to read: what cannot be done, why, and what to do instead."""

from __future__ import annotations

import math
import re
from types import FunctionType

_OPTIONS = {
    "texts=...": "--texts FILE",
    "tokenizer=...": "a folder with a tokenizer",
    "Uniform()": "--importance uniform",
    "ZipfPrior()": "--importance zipf",
    "KroneckerFisher()": "--importance kronecker",
    "TwoSided()": "--importance two-sided",
    "RowFisher()": "--importance row-fisher",
    "Projections()": "--objective logits",
    "sequential=False": "--no-sequential",
    "SampledLabels()": "--objective sampled",
    "SVD()": "--method svd",
    "KeepDense()": "--method keep-dense",
    "Auto()": "--method auto",
    "trusting_remote_code()": "--trust-remote-code",
    "Float()": "--codec float",
    "Integer(bits=8)": "--codec int8",
    "Transform()": "--codec transform",
}
"""Values that hints name in Python, and how the command line names them."""


class KflatsError(ValueError):
    """A request that cannot be carried out as asked.

    Every message has one form: the symptom says what is refused ("X is not supported with Y"), the cause says why, and
    the hint says what to use instead. The command line prints it without a traceback; any other exception is a defect.

    Args:
        symptom: what cannot be done. cause: why.
        hint: what to do instead, in words, arguments and values that the command line has as options.

    >>> error = KflatsError("no budget is given", hint='keep="60%"')
    >>> str(error)
    'no budget is given. Try: keep="60%".'
    >>> error.on_command_line()
    'no budget is given. Try: --keep 60%.'
    """

    def __init__(self, symptom: str, *, cause: str = "", hint: str = "") -> None:
        super().__init__(_sentences(symptom, cause, hint))
        self.symptom, self.cause, self.hint = symptom, cause, hint

    def on_command_line(self) -> str:
        """The message with what to do on the command line."""
        return _sentences(self.symptom, self.cause, as_options(self.hint))

    def about(self, name: str) -> KflatsError:
        """The same error, whose symptom begins with ``name``: the weight or file that it is about."""
        return type(self)(f"{name}: {self.symptom}", cause=self.cause, hint=self.hint)


class NotWrittenError(KflatsError):
    """A file cannot be written: the disk is full, or does not allow it. Another size would not change that."""


class DoesNotFitError(KflatsError):
    """Bytes are too few for a matrix, or rows for a number of flats. More bytes, or fewer flats, may do."""


class KflatsWarning(UserWarning):
    """What a caller should know of work that goes on."""


class NoGradientSignalError(KflatsError):
    """No gradient reached a weight: all statistics measured of it are zero."""


class NotFiniteError(KflatsError):
    """Numbers of a weight, or what the model makes of them, are NaN or infinite."""


def as_options(advice: str) -> str:
    """``advice`` whose arguments and values in Python are written as options of the command line.

    >>> as_options('KeepDense(), or allocation="loss"')
    '--method keep-dense, or --allocation loss'
    """
    options = re.sub(r'\b[a-z_]+=(True|[A-Z]+\b|"[^"]*")', _as_option, advice)
    for value, option in _OPTIONS.items():
        options = options.replace(value, option)
    return options


def first_line(error: BaseException) -> str:
    """The first line of what another library's error says; its class where it says nothing.

    >>> first_line(ValueError("no head\\nin line 3")), first_line(KeyError())
    ('no head', 'KeyError')
    """
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # colours of a terminal
    return next(iter(said.strip().splitlines()), type(error).__name__)


def _as_option(argument: re.Match[str]) -> str:
    """A Python argument such as ``keep="60%"`` as an option such as ``--keep 60%``."""
    name, _, value = argument[0].partition("=")
    given = value if " " in value else value.strip('"')
    return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {given}")


def _sentences(symptom: str, cause: str, hint: str) -> str:
    parts = [symptom, f"Likely cause: {cause}" if cause else "", f"Try: {hint}" if hint else ""]
    return " ".join(part.rstrip(".") + "." for part in parts if part)


def is_whole(value: object, low: int, high: float = math.inf) -> bool:
    """Whether ``value`` is a whole number from ``low`` to ``high``; True and False are not.

    >>> is_whole(3, 1), is_whole(3.0, 1), is_whole(True, 1), is_whole(9, 2, 8)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_seed(seed: object) -> None:
    """Refuse a seed that torch does not take.

    Raises:
        KflatsError: it is no whole number from 0 to 2^63 - 1.
    """
    if not is_whole(seed, 0, 2**63 - 1):
        raise KflatsError(f"seed={seed!r} is not supported", hint="a whole number from 0 to 2^63 - 1")


def check_samples(samples: object) -> None:
    """Refuse a number of samples to measure with that is no whole number from 1 on.

    Raises:
        KflatsError: it is none.
    """
    if not is_whole(samples, 1):
        raise KflatsError(f"{samples!r} samples measure nothing", hint="a whole number, a few hundred")


def is_number(value: object, low: float, high: float = math.inf) -> bool:
    """Whether ``value`` is a finite number from ``low`` to ``high``; True and False are not.

    >>> is_number(0.5, 0, 1), is_number("0.5", 0, 1), is_number(float("nan"), 0), is_number(10**400, 0, 1)
    (True, False, False, False)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # A whole number beyond float64 is finite, and ``math.isfinite`` does not take it.
    return (isinstance(value, int) or math.isfinite(value)) and low <= value <= high


def check_arguments(value: object, **arguments: tuple[bool, str]) -> None:
    """Refuse a value whose arguments it does not support.

    Args:
        arguments: by name, whether the argument is supported, and what is.

    Raises:
        KflatsError: the first argument that is not supported.
    """
    for name, (supported, hint) in arguments.items():
        if not supported:
            symptom = f"{name}={getattr(value, name)!r} is not supported with {type(value).__name__}"
            raise KflatsError(symptom, hint=hint)


def check_value(value: object, protocol: type, axis: str, members: str, examples: str) -> None:
    """Refuse a value that is not of one axis of a recipe.

    Args:
        protocol: the class that all values of the axis inherit from. axis: "a method", for messages.
        members: what values of the axis have. examples: values of the axis.

    Raises:
        KflatsError: a class or a function in place of a value, or another value.
    """
    if isinstance(value, type | FunctionType):
        cause, hint = f"{value.__name__} is not called", f"{value.__name__}()"
    elif isinstance(value, protocol):
        return
    else:
        cause, hint = f"{type(value).__name__} has no {members}", examples
    raise KflatsError(f"{value!r} is not {axis}", cause=cause, hint=hint)
