"""The words for run-time forms: how a layer of codes multiplies. The command line reads them without torch."""

from __future__ import annotations

from typing import Literal, get_args

from kflats.common.errors import KflatsError

RunForm = Literal["compact", "dense", "bfloat16", "int8"]
"""compact: decoded in every call, the least memory. dense: in the type of the inputs. bfloat16: as dense, in this type.
int8: integers times integers."""


def check_run_form(form: str) -> None:
    """Refuse a word that is no form.

    Raises:
        KflatsError: see above.
    """
    if form not in get_args(RunForm):
        raise KflatsError(f"run_as={form!r} is unknown", hint=", ".join(get_args(RunForm)))
