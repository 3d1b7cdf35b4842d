"""How many lines of code each package has, today and at earlier commits: not blank, no comment, no docstring.

A line counts if it holds a token of the program; imports count. A statement's string that nothing uses (a docstring, or
one under a constant) does not. Every commit is read from git, the working tree from disk.

    python benchmarks/code_lines.py                     # the working tree
    python benchmarks/code_lines.py 4459c05 HEAD        # before and after
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "benchmarks", "experiments", "tests")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines of ``source`` that hold code.

    >>> code_lines('import os  # one\\n\\n# none\\ndef f():\\n    "none"\\n    return os\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sources(commit: str | None) -> Iterator[tuple[Path, str]]:
    """Path and text of every Python file under ``FOLDERS``, at ``commit`` or on disk."""
    if commit is None:
        for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
        return
    archive = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield Path(member.name), file.read().decode()


def package(path: Path) -> str:
    """The row of a file: its package within ``src/kflats``, else its top folder.

    >>> [package(Path(path)) for path in ("src/kflats/io/saving.py", "src/kflats/demo.py", "tests/laws/a.py")]
    ['kflats/io', 'kflats', 'tests']
    """
    parts = path.parts
    return parts[0] if parts[0] != "src" else "/".join(parts[1:3] if len(parts) > 3 else parts[1:2])


def table(commits: list[str]) -> str:
    """Markdown: lines of code per package, one column a commit."""
    counts: list[Counter[str]] = []
    for commit in commits or [None]:
        count: Counter[str] = Counter()
        for path, source in sources(commit):
            lines = code_lines(source)
            count[package(path)] += lines
            for group in ("src",) * (path.parts[0] == "src") + ("src + benchmarks + experiments",) * (
                path.parts[0] != "tests"
            ):
                count[group] += lines
        counts.append(count)
    inside = sorted({name for count in counts for name in count if name.startswith("kflats")})
    rows = [*inside, "src", "benchmarks", "experiments", "src + benchmarks + experiments", "tests"]
    body = [[f"`{name}`", *(f"{count[name]:,}" for count in counts)] for name in rows]
    return markdown(["package", *(commits or ["working tree"])], body)


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table whose first column is text, and the others numbers."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ruler, *body])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to count; none: the working tree")
    print(table(parser.parse_args().commits))
