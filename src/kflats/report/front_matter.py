"""The YAML at the top of a model card: the original's lines, with a few entries added or replaced.

Only the entries that change are parsed. Loading and dumping the whole YAML, as ``huggingface_hub.ModelCard`` does,
would change the others: the language "no" becomes false, and comments are lost.
"""

from __future__ import annotations

import re

_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:")


def split(card: str) -> tuple[list[str], str]:
    """The lines between the two ``---`` at the top of ``card``, and the text after them; no lines without such a top.

    >>> split("---\\nlicense: mit\\n---\\n# Model\\n")
    (['license: mit'], '# Model\\n')
    """
    lines = card.lstrip("\ufeff").splitlines()
    if lines and lines[0].rstrip() == "---":
        for at, line in enumerate(lines[1:], 1):
            if line.rstrip() in ("---", "..."):
                return lines[1:at], "\n".join(lines[at + 1 :]).strip("\n") + "\n"
    return [], card


def with_value(lines: list[str], key: str, value: str | list[str]) -> list[str]:
    """``lines`` without the entry ``key``, then ``key: value``.

    >>> with_value(["base_model: [a, b]", "license: mit"], "base_model", "c")
    ['license: mit', 'base_model: c']
    """
    import yaml

    return [*_entry(lines, key)[1], *yaml.safe_dump({key: value}, allow_unicode=True).splitlines()]


def with_tag(lines: list[str], tag: str) -> list[str]:
    """``lines`` with ``tag`` among their tags; unchanged if their tags cannot be read.

    >>> with_tag(["tags: [a, no]", "license: mit"], "c")
    ['license: mit', 'tags:', '- a', "- 'no'", '- c']
    """
    import yaml

    try:
        # The base loader keeps every value as text.
        tags = (yaml.BaseLoader("\n".join(_entry(lines, "tags")[0])).get_single_data() or {}).get("tags")
    except yaml.YAMLError:
        return lines
    if tags in (None, "", "null", "~"):
        tags = []
    tags = tags if isinstance(tags, list) else [tags]
    return lines if tag in tags else with_value(lines, "tags", [*tags, tag])


def _entry(lines: list[str], key: str) -> tuple[list[str], list[str]]:
    """The lines of the entry ``key``, and the other lines. An entry ends where another key stands at the margin."""
    own: list[str] = []
    others: list[str] = []
    part = others
    for line in lines:
        if match := _KEY.match(line):
            part = own if match[1] == key else others
        part.append(line)
    return own, others
