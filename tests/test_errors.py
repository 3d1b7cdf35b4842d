"""Every error says why or what to do; on the command line none advises Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kflats.common.errors import KflatsError

SOURCE = Path(__file__).resolve().parents[1] / "src"
PYTHON = re.compile(r"(?<![-\w])[A-Za-z_]\w*=|\w\(|kflats\.\w|(?<!kflats)\[\w+\]|\b(True|False|None)\b")
"""A keyword argument, a call, a name of the package, a list, or a constant: advice that only Python can follow."""
KINDS = ("KflatsError", "NoGradientSignalError", "NotFiniteError", "DoesNotFitError", "NotWrittenError")


def reached() -> Iterator[tuple[str, ast.Module, list[ast.AST]]]:
    """Modules that the commands import, directly or not, and all that they hold."""
    seen = set()
    waiting = ["kflats.cli.app"]
    while waiting:
        name = waiting.pop()
        path = SOURCE / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or name == "kflats" or not file.is_file():  # the package itself imports what Python users call
            continue
        seen.add(name)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield name, tree, nodes


def words(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """The text of an expression, with "x" in place of what is known only when it runs."""
    match node:
        case None:
            return ""
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(values):
            return "".join(words(value, constants) for value in values)
        case ast.BinOp(left, _, right):
            return words(left, constants) + words(right, constants)
        case ast.IfExp(_, first, second):
            return f"{words(first, constants)} {words(second, constants)}"
        case ast.Name(name) if name in constants:
            return words(constants[name], {})
    return "x"


def errors() -> Iterator[tuple[str, dict[str, str]]]:
    """Place and arguments of every ``KflatsError(...)`` in the source."""
    for name, tree, nodes in reached():
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                yield f"{name}:{node.lineno}", {str(k.arg): words(k.value, constants) for k in node.keywords}


@pytest.fixture(scope="module")
def found() -> list[tuple[str, dict[str, str]]]:
    """Read where a test needs them: each process that runs tests would read all sources before its first one."""
    return list(errors())


def test_every_error_says_why_or_what_to_do(found: list[tuple[str, dict[str, str]]]) -> None:
    assert len(found) > 100
    assert [place for place, given in found if not (given.get("cause") or given.get("hint"))] == []


def test_no_error_advises_python_on_the_command_line(found: list[tuple[str, dict[str, str]]]) -> None:
    advice = [(place, KflatsError("x", hint=given.get("hint", "")).on_command_line()) for place, given in found]
    assert [(place, said) for place, said in advice if PYTHON.search(said)] == []
