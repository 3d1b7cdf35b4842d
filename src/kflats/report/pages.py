"""HTML pages of one file: the frame that they share, and the filters of their texts.

The content policy of the pages forbids scripts, fonts and addresses. jinja2 escapes every text, because token names and
notes come from files.

Needs jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

import base64
from typing import Any

from kflats.common.formatting import number, size, visible
from kflats.report.canvas import missing_extra


def page_template(name: str) -> Any:
    """The jinja2 template ``templates/<name>``, with the filters that all pages use.

    Raises:
        KflatsError: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise missing_extra(error) from error
    environment = Environment(
        loader=PackageLoader("kflats"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "number": number, "visible": visible, "inline": _inline}
    # Module paths are long and have no blanks: they may break after a dot. Markup.join escapes the parts.
    environment.filters["path"] = lambda name: Markup(".<wbr>").join(visible(name).split("."))
    return environment.get_template(name)


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
