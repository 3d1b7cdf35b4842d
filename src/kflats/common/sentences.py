"""Running text: its sentences, its paragraphs, and the marks of tokenised corpora undone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise

_END = re.compile(r"[.!?…।؟]+[\"'”’»)\]]*(\s+)|[。！？]+[」』”’）]*\s*|\s*\n\s*")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“‘])(?:(?:[A-Z]\.)*[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Gen|Col|Lt|Sgt|Capt|Rev|vs|Nos?|[Vv]ols?|[Ff]igs?"
    r"|cf|al|lit|[Ee]\.g|[Ii]\.e)$"
)
_MARK = re.compile(r" @[-,.]@ |<unk>| [,.](?= |$)| (?:n't|'s)(?= |$)", re.MULTILINE)
_UNDO = (
    (re.compile(r"^ ?(?:= )+[^\n]*(?: =)+ ?$", re.MULTILINE), ""),  # headings, " = = Life = = "
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r"(?:``|'') ?([^\n]*?) ?''|\" ([^\n\"]*?) \""), r'"\1\2"'),
    (re.compile(r" +([,.;:!?%)\]]|n't|'(?:s|re|ve|ll|d|m))(?=[\s\"')\]]|$)"), r"\1"),
    (re.compile(r"([(\[$£€]) +"), r"\1"),
    (re.compile(r"(?<=s) '(?= \w)"), "'"),  # "the players ' turns"
)
"""What tokenised corpora (WikiText, Penn Treebank) write, and the text that it stands for."""
_TOKENISED = 0.25
"""The share of records with a mark from which a corpus is taken as tokenised: WikiText has .8, SST-2 .7, prose .02."""


def sentences(text: str) -> list[str]:
    """``text`` in slices that end where a sentence or a line ends; joined they are ``text``.

    A full stop behind an initial or an abbreviation, or in front of a small letter, ends no sentence.

    >>> sentences("Dr. Smith came. He saw H. gammarus; all left! Why?")
    ['Dr. Smith came. ', 'He saw H. gammarus; all left! ', 'Why?']
    """
    parts, start = [], 0
    for end in _END.finditer(text):
        if end[1] is not None and "\n" not in end[1]:
            following = text[end.end() : end.end() + 4].lstrip("\"'“‘«([¿¡")[:1]
            short = text[end.start()] == "." and _ABBREVIATION.search(text[max(start, end.start() - 12) : end.start()])
            if following.islower() or short:
                continue
        parts.append(text[start : end.end()])
        start = end.end()
    return parts + [text[start:]] if start < len(text) else parts


_ENDED = re.compile(r"[.!?。！？…][\"'»”’)]*(\s|$)|[。！？]")
_MOST_LINES = 20
"""Lines of a sentence of prose at most, in the mean."""


def unwrapped(text: str) -> str:
    """``text`` with a paragraph a line, if its lines are hard-wrapped; else as it is.

    Lines are hard-wrapped if most of them end where the next word would not have fit, and few end with a sentence.
    Lines of about one length without any end of a sentence are titles or queries.

    >>> lines = ["It was a bright cold day in April, and the clocks", "were striking thirteen; he went quickly through"]
    >>> unwrapped("\\n".join([*lines, "the doors.", "", "The end."]))[-40:]
    'went quickly through the doors.\\nThe end.'
    """
    lines = [line.strip() for line in text.split("\n")]
    inner = [(line, following) for line, following in pairwise(lines) if line and following]
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[int(0.98 * (len(lengths) - 1))] if inner else 0
    full = sum(len(line) + 1 + min(20, len(after.split(None, 1)[0])) > 0.9 * width for line, after in inner)
    going_on = sum(line[-1] not in ".!?。！？" for line, _ in inner)
    ended = sum(bool(_ENDED.search(line)) for line in lines)
    if not 40 <= width <= 120 or 2 * min(full, going_on) <= len(inner) or _MOST_LINES * ended < len(lengths):
        return text
    blocks = ("\n".join(block) for filled, block in groupby(lines, key=bool) if filled)
    return "\n".join(re.sub(r"(?<=\w-)\n(?=\w)", "", block).replace("\n", " ") for block in blocks)


def undo_marks(records: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """``records`` with the marks of a tokenised corpus undone, if they are one; else as they are.

    " @-@ " is a hyphen, " ," a comma, headings between "=" are left out, and so are sentences with "<unk>".

    Returns:
        The records, and how many sentences were left out for "<unk>"; None if there were no marks to undo.

    >>> undo_marks([" The top @-@ level team , he said , did n't play in <unk> . He left ( early ) . "])
    (('He left (early).',), 1)
    """
    long = [record for record in records if len(record) >= 20] or records
    sample = long[:: max(1, len(long) // 1000)]
    if sum(_MARK.search(record) is not None for record in sample) <= _TOKENISED * len(sample):
        return tuple(records), None
    kept, unknown = [], 0
    for record in records:
        for mark, meaning in _UNDO:
            record = mark.sub(meaning, record)
        parts = sentences(record.strip())
        known = [part for part in parts if "<unk>" not in part]
        unknown += len(parts) - len(known)
        kept.append("".join(known).strip())
    return tuple(filter(None, kept)), unknown
