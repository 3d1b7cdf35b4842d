"""The words for run-time forms: how a layer of codes multiplies. The command line reads them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kflats.common.errors import KflatsError

RunForm = Literal["compact", "dense", "bfloat16", "int8"]
"""compact: decoded in every call, the least memory. dense: in the type of the inputs. bfloat16: as dense, in this type.
int8: integers times integers."""
RunAs = Literal["compact", "dense", "bfloat16", "int8", "auto"]
"""A form by name, or "auto": the fastest that loses little."""


@dataclass(frozen=True)
class FormLoss:
    """What a model loses in one run-time form, against the original's outputs.

    Args:
        form: "dense", "bfloat16" or "int8"; "compact" computes what "dense" does.
        loss, tail_loss: as ``Outputs`` has them: the mean, and the 95th percentile over samples.
        integers: where integers end in "int8": 127, or 90 on CPUs without VNNI units, which lose more.
    """

    form: RunForm
    loss: float
    tail_loss: float
    integers: int | None = None


def check_run_form(form: str, *, auto: bool = False) -> None:
    """Refuse a word that is no form; ``auto``: whether this word is one here.

    Raises:
        KflatsError: see above.
    """
    known = get_args(RunAs if auto else RunForm)
    if form not in known:
        raise KflatsError(f"run_as={form!r} is unknown", hint=", ".join(known))
