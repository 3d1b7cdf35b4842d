"""Draws mutants of the source by seed: small faults that the suite should notice.

    python tests/mutants/draw.py --tree . --seed 14 --count 200 > tests/mutants/mutants.json

A mutant changes one physical line inside one function. It is stored as text (file, qualified name of the function, the
line before and after, and which of several equal lines of the function it is), so it can be carried to code that moved.
All points of all operators in PACKAGES are drawn with the same probability, at most one on each line. Messages of
errors, annotations, decorators, docstrings and assertions are left alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES = ("numerics", "codecs", "nn", "files", "swap", "factorize")

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
OPPOSITES = {"min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "any": "all", "floor": "ceil"}
OPPOSITES |= {"zeros": "ones", "zeros_like": "ones_like", "sqrt": "square", "clamp_min": "clamp_max"}
OPPOSITES |= {there: here for here, there in OPPOSITES.items()}


@dataclass(frozen=True)
class Mutant:
    """One fault: `line` of `function` in `file` becomes `mutated`; `occurrence` counts equal lines of the function."""

    file: str
    function: str
    operator: str
    line: str
    mutated: str
    occurrence: int
    number: int  # of the line, in the tree that the mutant was drawn from


class Source:
    """The bytes of one file, since the columns of a syntax tree count bytes."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset


Edit = tuple[str, int, int, str]  # operator, first byte, last byte + 1, new text


def _token(source: Source, left: int, right: int, text: str) -> tuple[int, int] | None:
    """Where the operator `text` stands between two operands (brackets and spaces may stand there too)."""
    pattern = re.escape(text).replace(r"\ ", r"\s+")
    match = re.search(rb"(?<![\w*/<>=!])" + pattern.encode() + rb"(?![\w*/<>=])", source.data[left:right])
    return (left + match.start(), left + match.end()) if match else None


def edits(source: Source, node: ast.AST) -> Iterator[Edit]:
    """The changes of one node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            before, after = COMPARISONS[type(operator)]
            if place := _token(source, source.end(left), source.begin(right), before):
                yield "comparison", *place, after
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            before, after = ARITHMETIC[type(op)]
            if place := _token(source, source.end(left), source.begin(right), before):
                yield "arithmetic", *place, after
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in ARITHMETIC:
            before, after = ARITHMETIC[type(op)]
            if place := _token(source, source.end(target), source.begin(value), before + "="):
                yield "arithmetic", *place, after + "="
        case ast.BoolOp(op=op, values=[first, second, *_]):
            before, after = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            if len(node.values) == 2 and (place := _token(source, source.end(first), source.begin(second), before)):
                yield "boolean", *place, after
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", source.begin(node), source.begin(operand), ""
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", source.begin(node), source.begin(operand), ""
        case ast.Constant(value=bool(value)):
            yield "constant", source.begin(node), source.end(node), str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", source.begin(node), source.end(node), str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", source.begin(node), source.end(node), repr(value * 2 if value else 1.0)
        case ast.Call(func=ast.Name(id=name) as called) if name in OPPOSITES:
            yield "opposite", source.begin(called), source.end(called), OPPOSITES[name]
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in OPPOSITES:
            yield "opposite", source.end(called) - len(name), source.end(called), OPPOSITES[name]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.UnaryOp) and test.lineno == test.end_lineno:
                begin, end = source.begin(test), source.end(test)
                yield "boolean", begin, end, f"not ({source.data[begin:end].decode()})"
        case ast.Return() | ast.Raise() | ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "dropped statement", source.begin(node), source.begin(node), "if False: "
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "dropped statement", source.begin(node), source.begin(node), "if False: "


def points(
    source: Source, node: ast.AST, function: tuple[str, ...] = (), inside: bool = False
) -> Iterator[tuple[str, Edit]]:
    """All changes below `node`, with the qualified name of the function around each."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = (*function, node.name)
        inside = inside or not isinstance(node, ast.ClassDef)
        children: list[ast.AST] = [*node.body]
        if not isinstance(node, ast.ClassDef):
            children += [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
    else:
        if inside:
            yield from ((".".join(function), edit) for edit in edits(source, node))
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            return
        children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.AnnAssign):
            children.remove(node.annotation)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
            return
    for child in children:
        yield from points(source, child, function, inside)


def spans(tree: ast.AST, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, int, int]]:
    """Qualified name, first and last line of every function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = (*prefix, node.name)
            if not isinstance(node, ast.ClassDef):
                yield ".".join(name), node.lineno, node.end_lineno or node.lineno
            yield from spans(node, name)
        else:
            yield from spans(node, prefix)


def mutants_of(path: Path, name: str) -> Iterator[Mutant]:
    """Every mutant of one file."""
    source = Source(path)
    tree = ast.parse(source.data)
    lines = source.data.decode().splitlines()
    lengths = {function: (first, last) for function, first, last in spans(tree)}
    for function, (operator, begin, end, text) in points(source, tree):
        if b"\n" in source.data[begin:end]:
            continue
        changed = source.data[:begin] + text.encode() + source.data[end:]
        number = source.data[:begin].count(b"\n") + 1
        before, after = lines[number - 1].strip(), changed.decode().splitlines()[number - 1].strip()
        try:
            compile(changed, name, "exec")
        except SyntaxError:
            continue
        first = lengths[function][0]
        occurrence = sum(lines[i - 1].strip() == before for i in range(first, number))
        yield Mutant(name, function, operator, before, after, occurrence, number)


def draw(tree: Path, seed: int, count: int) -> list[Mutant]:
    """`count` mutants of the packages of `tree`, sorted by place."""
    files = sorted(path for package in PACKAGES for path in (tree / "src" / "kflats" / package).rglob("*.py"))
    everything = [mutant for path in files for mutant in mutants_of(path, path.relative_to(tree).as_posix())]
    print(f"{len(everything)} points in {len(files)} files", file=sys.stderr)
    random.Random(seed).shuffle(everything)
    drawn: dict[tuple[str, int], Mutant] = {}
    for mutant in everything:
        if len(drawn) == count:
            break
        drawn.setdefault((mutant.file, mutant.number), mutant)
    return sorted(drawn.values(), key=lambda mutant: (mutant.file, mutant.number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    drawn = draw(asked.tree, asked.seed, asked.count)
    print(json.dumps([asdict(mutant) for mutant in drawn], indent=1))


if __name__ == "__main__":
    main()
