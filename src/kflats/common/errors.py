"""The one exception for a caller to read: what cannot be done, why, and what to do instead."""

from __future__ import annotations

import re


class KflatsError(ValueError):
    """A request that cannot be carried out as asked.

    Every message has one form: the symptom says what is refused ("X is not supported with Y"), the cause says why, and
    the hint says what to use instead. The command line prints it without a traceback; any other exception is a defect.

    Args:
        symptom: what cannot be done. cause: why. hint: what to do instead, in Python.
        command: what to do instead on the command line, where ``hint`` names more of Python than arguments, of which
            the command line has options of the same names.

    >>> error = KflatsError("no budget is given", hint='keep="60%"')
    >>> str(error)
    'no budget is given. Try: keep="60%".'
    >>> error.on_command_line()
    'no budget is given. Try: --keep 60%.'
    """

    def __init__(self, symptom: str, *, cause: str = "", hint: str = "", command: str = "") -> None:
        super().__init__(_sentences(symptom, cause, hint))
        self.symptom, self.cause, self.hint, self.command = symptom, cause, hint, command

    def on_command_line(self) -> str:
        """The message with what to do on the command line."""
        options = re.sub(r'\b[a-z_]+=(True|"[^"]*")', _as_option, self.hint)
        return _sentences(self.symptom, self.cause, self.command or options)

    def about(self, name: str) -> KflatsError:
        """The same error, whose symptom begins with ``name``: the weight or file that it is about."""
        return type(self)(f"{name}: {self.symptom}", cause=self.cause, hint=self.hint, command=self.command)


class KflatsWarning(UserWarning):
    """What a caller should know of work that goes on. ``command``: the same for the command line, where it differs."""

    def __init__(self, message: str, *, command: str = "") -> None:
        super().__init__(message)
        self.command = command or message


class NoGradientSignalError(KflatsError):
    """No gradient reached a weight: all statistics measured of it are zero."""


def _as_option(argument: re.Match[str]) -> str:
    """A Python argument such as ``keep="60%"`` as an option such as ``--keep 60%``."""
    name, _, value = argument[0].partition("=")
    return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value if ' ' in value else value[1:-1]}")


def _sentences(symptom: str, cause: str, hint: str) -> str:
    parts = [symptom, f"Likely cause: {cause}" if cause else "", f"Try: {hint}" if hint else ""]
    return " ".join(part.rstrip(".") + "." for part in parts if part)
