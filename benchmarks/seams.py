"""How often the library looks at the class of a method, a codec or an importance, and how much of it is untyped.

Counted in ``src/``, by its syntax trees, today or at earlier commits.

A *value class* is a class that ``kflats.methods``, ``kflats.codecs`` or ``kflats.importance`` lists: in a ``Registry``
(at earlier commits in ``VALUES``), or one that such a class inherits from in its package. An expression *names a value*
if it is a variable or an attribute called method, codec or importance, or something that ends so (``own_method``).

- ``isinstance``: a call whose first argument names a value, or whose second names a value class.
- class pattern: ``case SVD():`` of a value class.
- ``type()``, ``getattr``, ``hasattr``: a call whose first argument names a value.

These five are counted outside the package of the value alone: a codec may look at codecs, but not at methods.

- Public signatures with ``Any``: functions and methods without a leading underscore, in classes without one, that have
  ``Any`` in the annotation of an argument or of the result. A property counts as a function.
- ``object``: annotations of arguments, results and variables that hold it. ``cast``: calls. ``type: ignore``: comments.

    python benchmarks/seams.py                     # the working tree
    python benchmarks/seams.py 4459c05 HEAD        # before and after
    python benchmarks/seams.py --list              # the places themselves
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from code_lines import markdown, sources

PACKAGES = {"methods": "method", "codecs": "codec", "importance": "importance"}
"""The package of each kind of value."""
RULES = (
    "isinstance",
    "class pattern",
    "type()",
    "getattr",
    "hasattr",
    "public signatures with Any",
    "object",
    "cast",
    "type: ignore",
)


@dataclass(frozen=True)
class Module:
    """One file of the library: where it lies, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package within ``kflats``, or the module itself."""
        return self.path.relative_to("src/kflats").parts[0]


def modules(commit: str | None) -> list[Module]:
    """All files of ``src/kflats``, at ``commit`` or on disk."""
    files = ((path, text) for path, text in sources(commit) if path.is_relative_to("src/kflats"))
    return [Module(path, text, ast.parse(text)) for path, text in files]


def value_classes(files: list[Module]) -> dict[str, str]:
    """The kind ("method", "codec" or "importance") of every value class, by the class's name."""
    kinds: dict[str, str] = {}
    for package, kind in PACKAGES.items():
        trees = [file.tree for file in files if file.package == package]
        classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
        found = [name for tree in trees for name in _listed(tree) if name in classes]
        while found:
            name = found.pop()
            if name in classes and name not in kinds:
                kinds[name] = kind
                found += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return kinds


def _listed(tree: ast.Module) -> Iterator[str]:
    """The names inside ``VALUES`` and inside calls of ``Registry``."""
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or not isinstance(target, ast.Name):
            continue
        registry = isinstance(node.value, ast.Call) and _name(node.value.func) == "Registry"
        if target.id == "VALUES" or registry:
            yield from (part.id for part in ast.walk(node.value) if isinstance(part, ast.Name))


def _name(node: ast.expr) -> str:
    """The last name of a variable or an attribute: ``codec`` of ``recipe.codec``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr) -> str | None:
    """The kind of value that an expression names.

    >>> _value(ast.parse("item.recipe.codec", mode="eval").body)
    'codec'
    """
    return next((kind for kind in PACKAGES.values() if _name(node).split("_")[-1] == kind), None)


def looks(file: Module, classes: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Rule and line of each look at the class of a value outside the package of that value."""
    own = PACKAGES.get(file.package)
    for node in ast.walk(file.tree):
        rule, kinds, line = "", set[str | None](), 0
        if isinstance(node, ast.MatchClass):
            rule, kinds, line = "class pattern", {classes.get(_name(node.cls))}, node.lineno
        elif isinstance(node, ast.Call) and node.args:
            called, line = _name(node.func) if isinstance(node.func, ast.Name) else "", node.lineno
            if called in ("isinstance", "getattr", "hasattr") or (called == "type" and len(node.args) == 1):
                rule, kinds = "type()" if called == "type" else called, {_value(node.args[0])}
            if called == "isinstance" and len(node.args) == 2:
                parts = (part for part in ast.walk(node.args[1]) if isinstance(part, ast.Name | ast.Attribute))
                kinds |= {classes.get(_name(part)) for part in parts}
        if kinds - {None, own}:
            yield rule, line


def loose_types(file: Module) -> Iterator[tuple[str, int]]:
    """Rule and line of each public signature with ``Any``, each ``object``, ``cast`` and ``type: ignore``."""
    for node in _public(file.tree):
        if any("Any" in _names(part) for part in _annotations(node)):
            yield "public signatures with Any", node.lineno
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (("object", part.lineno) for part in _annotations(node) if "object" in _names(part))
        elif isinstance(node, ast.AnnAssign) and "object" in _names(node.annotation):
            yield "object", node.lineno
        elif isinstance(node, ast.Call) and _name(node.func) == "cast":
            yield "cast", node.lineno
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT and "type: ignore" in token.string:
            yield "type: ignore", token.start[0]


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions without a leading underscore, of the module and of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node)


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    """Those of its arguments and of its result."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    parts = [argument.annotation for argument in arguments if argument is not None]
    return [part for part in (*parts, function.returns) if part is not None]


def _names(annotation: ast.expr) -> set[str]:
    return {_name(part) for part in ast.walk(annotation) if isinstance(part, ast.Name | ast.Attribute)}


def places(commit: str | None) -> dict[str, list[str]]:
    """``file:line`` of all that is counted, by rule."""
    files = modules(commit)
    classes = value_classes(files)
    listed: dict[str, list[str]] = {rule: [] for rule in RULES}
    for file in files:
        for rule, line in (*looks(file, classes), *loose_types(file)):
            listed[rule].append(f"{file.path}:{line}")
    return listed


def main(commits: list[str], *, lists: bool) -> str:
    """Markdown: one row a rule, one column a commit; or every place."""
    counted = [places(commit) for commit in commits or [None]]
    if lists:
        return "\n".join(f"{rule}: {place}" for found in counted for rule in RULES for place in found[rule])
    body = [[rule, *(str(len(found[rule])) for found in counted)] for rule in RULES]
    body.insert(5, ["all five", *(str(sum(len(found[rule]) for rule in RULES[:5])) for found in counted)])
    return markdown(["in `src/`", *(commits or ["working tree"])], body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to count; none: the working tree")
    parser.add_argument("--list", action="store_true", help="print file and line of everything counted")
    given = parser.parse_args()
    print(main(given.commits, lists=given.list))
