"""The YAML at the top of a model card: kept line by line, with a few entries of ours.

It is edited as text. Parsing and writing it anew would change what others wrote: the language "no" becomes false,
comments and order are lost.
"""

from __future__ import annotations

import re

_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:(.*)")
_ITEM = re.compile(r"\s*-\s+(.*)")


def split(card: str) -> tuple[list[str], str]:
    """The lines between the two ``---`` at the top of ``card``, and what follows; no lines where there is no such top.

    >>> split("---\\nlicense: mit\\n---\\n# Model\\n")
    (['license: mit'], '# Model\\n')
    """
    lines = card.lstrip("\ufeff").splitlines()
    if lines and lines[0].rstrip() == "---":
        for at, line in enumerate(lines[1:], 1):
            if line.rstrip() in ("---", "..."):
                return lines[1:at], "\n".join(lines[at + 1 :]).strip("\n") + "\n"
    return [], card


def with_value(lines: list[str], key: str, value: str) -> list[str]:
    """``lines`` with ``key: value`` in place of what ``key`` had, at the end where it had nothing."""
    kept = [line for name, block in _blocks(lines) if name != key for line in block]
    return [*kept, f"{key}: {value}"]


def with_tag(lines: list[str], tag: str) -> list[str]:
    """``lines`` with ``tag`` among their tags, in the form that the list has.

    >>> with_tag(["tags: [a, b]", "license: mit"], "c")
    ['tags: [a, b, c]', 'license: mit']
    >>> with_tag(["tags:", "  - a"], "c")
    ['tags:', '  - a', '  - c']
    """
    found: list[str] = []
    there = False
    for name, block in _blocks(lines):
        if name == "tags":
            there = True
            block = _tagged(block, tag)
        found += block
    return found if there else [*found, "tags:", f"- {tag}"]


def _tagged(block: list[str], tag: str) -> list[str]:
    first = _KEY.fullmatch(block[0])
    value = first[2].strip() if first else ""
    items = [match[1].strip().strip("\"'") for line in block[1:] if (match := _ITEM.fullmatch(line))]
    if tag in items:
        return block
    if items:
        at = max(i for i, line in enumerate(block) if _ITEM.fullmatch(line))
        indent = block[at][: len(block[at]) - len(block[at].lstrip())]
        return [*block[: at + 1], f"{indent}- {tag}", *block[at + 1 :]]
    if value.startswith("[") and value.endswith("]") and len(block) == 1:
        inner = [part.strip() for part in value[1:-1].split(",") if part.strip()]
        known = [part.strip("\"'") for part in inner]
        return [f"tags: [{', '.join(inner if tag in known else [*inner, tag])}]"]
    if not value or value in ("null", "~"):
        return ["tags:", f"- {tag}"]
    if len(block) == 1:
        return ["tags:", *([f"- {value}"] if value.strip("\"'") != tag else []), f"- {tag}"]
    return block  # a form of YAML that no list of tags needs: left as it is


def _blocks(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Each key at the left margin with all its lines; lines before the first have the key ""."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        match = _KEY.fullmatch(line)
        if match or not found:
            found.append((match[1] if match else "", [line]))
        else:
            found[-1][1].append(line)
    return found
