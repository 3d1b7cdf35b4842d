"""The one exception a caller is expected to read: what happened, why, what to try."""

from __future__ import annotations


class KflatsError(ValueError):
    """A request that cannot be carried out as asked.

    The message always has three parts: the symptom, its likely cause, and what to try.
    The command line prints it without a traceback; any other exception is a defect.

    >>> str(KflatsError("table has NaN", cause="training diverged", hint="load an earlier checkpoint"))
    'table has NaN. Likely cause: training diverged. Try: load an earlier checkpoint.'
    """

    def __init__(self, symptom: str, *, cause: str = "", hint: str = "") -> None:
        parts = [symptom.rstrip(".") + "."]
        if cause:
            parts.append(f"Likely cause: {cause.rstrip('.')}.")
        if hint:
            parts.append(f"Try: {hint.rstrip('.')}.")
        super().__init__(" ".join(parts))
        self.symptom, self.cause, self.hint = symptom, cause, hint


class NoGradientSignalError(KflatsError):
    """No gradient reached a weight: all statistics measured of it are zero."""
