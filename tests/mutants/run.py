"""Runs mutants against the suite and writes which of them a test notices.

    run.py trace --tree . --out hits.jsonl
    run.py kill --tree . --hits hits.jsonl --out killed.jsonl
    run.py count killed.jsonl

`trace` runs the suite once in a copy of the tree where a probe stands before every mutated statement. It writes which
tests reach which mutant and how much processor time each test takes. `kill` copies the tree, and for each mutant runs
only the tests that reach it, the quickest first, until one fails. Every mutant gets the same processor time in tests
(--seconds), so "survived" means "not killed within that time". A test that takes ten times its usual time has failed.
torch and the other packages are imported once; the tests of each mutant run in a fork. `kill` appends to --out and
goes on where an earlier run stopped. Tests that fail or are skipped without a mutant kill nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from draw import Mutant, spans

COPIED = ("src", "tests", "docs", "examples", "benchmarks", "experiments")
IGNORED = shutil.ignore_patterns("__pycache__", "*.json.gz")
FIRST = 25  # tests of the first fork of a mutant: most mutants die there, and few files are imported
PROBE = "KFLATS_PROBE"


def read(path: Path) -> list[Mutant]:
    return [Mutant(**fields) for fields in json.loads(path.read_text())]


def copy_of(tree: Path, where: Path) -> Path:
    """A copy of what the suite needs."""
    where.mkdir(parents=True)
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, where / name, ignore=IGNORED, symlinks=True)
    for path in tree.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, where / path.name)
    for name in (".venv", ".git", ".ci"):
        if (tree / name).exists():
            (where / name).symlink_to((tree / name).resolve())
    return where


def place_of(mutant: Mutant, tree: Path) -> int | None:
    """The line number of a mutant in this tree, found by function and text; None where it is gone."""
    path = tree / mutant.file
    if not path.is_file():
        return None
    text = path.read_text()
    for name, first, last in spans(ast.parse(text)):
        if name == mutant.function:
            lines = text.split("\n")
            same = [number for number in range(first, last + 1) if lines[number - 1].strip() == mutant.line]
            if len(same) > mutant.occurrence:
                return same[mutant.occurrence]
    return None


def mutate(mutant: Mutant, tree: Path) -> None:
    """Writes the mutant into this tree."""
    number = place_of(mutant, tree)
    assert number is not None
    lines = (tree / mutant.file).read_text().split("\n")
    lines[number - 1] = lines[number - 1].replace(mutant.line, mutant.mutated)
    (tree / mutant.file).write_text("\n".join(lines))


# trace --------------------------------------------------------------------------------


def _statement(body: list[ast.stmt], number: int) -> ast.stmt | None:
    """The innermost statement of a function whose own text holds this line, before which a probe may stand."""
    for statement in body:
        if statement.lineno <= number <= (statement.end_lineno or statement.lineno):
            inner: list[list[ast.stmt]] = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            branch = statement
            while (
                len(inner[1]) == 1 and isinstance(inner[1][0], ast.If) and inner[1][0].col_offset == branch.col_offset
            ):
                branch = inner[1][0]  # "elif", before which no statement may stand
                inner = [inner[0] + branch.body, branch.orelse, []]
            inner += [handler.body for handler in getattr(statement, "handlers", [])]
            inner += [case.body for case in getattr(statement, "cases", [])]
            return next((deeper for part in inner if (deeper := _statement(part, number))), statement)
    return None


def add_probes(mutants: list[Mutant], tree: Path) -> None:
    """Puts a probe before the statement of each mutant (before the first statement of the function for defaults)."""
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, mutant in enumerate(mutants):
        if number := place_of(mutant, tree):
            by_file[mutant.file].append((index, number))
    for file, numbers in by_file.items():
        text = (tree / file).read_text()
        lines = text.split("\n")
        functions = [
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        probes: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        for index, number in numbers:
            around = max(
                (node for node in functions if node.lineno <= number <= (node.end_lineno or 0)),
                key=lambda node: node.lineno,
            )
            statement = _statement(around.body, number)
            if statement is None:
                first = around.body[0]
                is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                statement = around.body[1] if is_docstring and len(around.body) > 1 else first
            simple = not hasattr(statement, "body") and not isinstance(statement, ast.Match)
            probes[statement.lineno].append((f"__probe__({index})", simple))
        out = []
        for number, line in enumerate(lines, 1):
            indent = line[: len(line) - len(line.lstrip())]
            calls = "; ".join(call for call, _ in probes[number])
            if calls and probes[number][0][1]:
                line = f"{indent}{calls}; {line.lstrip()}"
            elif calls:
                out.append(indent + calls)
            out.append(line)
        compile("\n".join(out), file, "exec")
        (tree / file).write_text("\n".join(out))


SITE = f'''
import builtins, os
_hits = set()
builtins.__probe__ = _hits.add
vars(builtins)["__probe__hits"] = _hits
def _dump():
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if _hits and test and os.getpid() != _own:
        with open(os.path.join(os.environ["{PROBE}"], "%d" % os.getpid()), "a") as file:
            file.write(" ".join(map(str, _hits)) + "\\n")
import atexit
_own = int(os.environ.get("{PROBE}_PID", "0"))
atexit.register(_dump)
'''


class Tracer:
    """A pytest plugin: what each test reaches, also in its subprocesses, its fixtures and its module's import."""

    def __init__(self, out: Path, tree: Path) -> None:
        import builtins

        self.out = out.open("a", buffering=1)
        self.hits: set[int] = vars(builtins)["__probe__hits"]
        self.of_fixture: dict[int, set[int]] = defaultdict(set)
        self.of_module: dict[str, set[int]] = defaultdict(set)
        self.modules = [name for name in sys.modules if name.startswith("kflats")]
        self.folder = Path(os.environ[PROBE])

    def _spent(self) -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in usage)

    def _forget(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("kflats"):
                for value in list(vars(module).values()):
                    if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
                        value.cache_clear()

    def hooks(self) -> Any:
        import pytest

        tracer = self

        class Plugin:
            @pytest.hookimpl(wrapper=True)
            def pytest_make_collect_report(self, collector: Any) -> Any:
                tracer.hits.clear()
                report = yield
                tracer.of_module[collector.nodeid.split("::")[0]] |= tracer.hits
                return report

            @pytest.hookimpl(wrapper=True)
            def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
                before = set(tracer.hits)
                tracer.hits.clear()
                try:
                    return (yield)
                finally:
                    tracer.of_fixture[id(fixturedef)] |= tracer.hits
                    tracer.hits |= before

            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
                tracer._forget()
                tracer.hits.clear()
                tracer.outcomes = set()
                cpu, wall = tracer._spent(), time.perf_counter()
                result = yield
                hits = set(tracer.hits) | tracer.of_module[item.nodeid.split("::")[0]]
                for path in tracer.folder.iterdir():
                    hits |= {int(index) for index in path.read_text().split()}
                    path.unlink()
                used = getattr(item, "fixturenames", ())
                info = getattr(item, "_fixtureinfo", None)
                for name in used:
                    for definition in info.name2fixturedefs.get(name, ()) if info else ():
                        hits |= tracer.of_fixture[id(definition)]
                line = {"test": item.nodeid, "cpu": round(tracer._spent() - cpu, 4)}
                line |= {"wall": round(time.perf_counter() - wall, 4), "outcome": sorted(tracer.outcomes)}
                tracer.out.write(json.dumps(line | {"hits": sorted(hits)}) + "\n")
                return result

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.when == "call" or report.outcome != "passed":
                    tracer.outcomes.add(report.outcome)

        return Plugin()


def trace(asked: argparse.Namespace) -> None:
    """One run of the suite with probes."""
    if PROBE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="kflats-trace-"))
        tree = copy_of(asked.tree.resolve(), folder / "tree")
        add_probes(read(asked.mutants), tree)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        (folder / "hits").mkdir()
        environment = os.environ | {PROBE: str(folder / "hits"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{folder / 'site'}:{tree / 'src'}"
        command = [sys.executable, str(Path(__file__).resolve()), "trace", "--tree", str(tree)]
        command += ["--mutants", str(asked.mutants.resolve()), "--out", str(asked.out.resolve()), "--", *asked.pytest]
        subprocess.run(command, cwd=tree, env=environment, check=False)
        return
    import pytest

    os.environ[f"{PROBE}_PID"] = str(os.getpid())
    sys.modules["sitecustomize"]._own = os.getpid()  # type: ignore[attr-defined]
    plugin = Tracer(asked.out, asked.tree).hooks()
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *asked.pytest], plugins=[plugin]))


# kill --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    name: str
    cpu: float

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


class TooLongError(BaseException):
    """A test took ten times its usual time."""


def _child(tree: Path, tests: list[Test], seconds: float, report: Path) -> None:
    """Runs these tests in this order in a fork; writes the first that fails."""
    os.setsid()
    os.chdir(tree)
    sink = os.open(os.devnull, os.O_WRONLY) if report.suffix != ".debug" else os.open(report, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.path[:] = [str(tree / "src"), *sys.path]
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    import pytest

    wanted = {test.name: place for place, test in enumerate(tests)}
    usual = {test.name: test.cpu for test in tests}

    def stop(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGVTALRM, stop)
    started = time.process_time()

    class Plugin:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
            if time.process_time() - started > seconds:
                os._exit(3)
            self.now = item.nodeid
            signal.setitimer(signal.ITIMER_VIRTUAL, max(20.0, 10 * usual[item.nodeid]))
            result = yield
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            return result

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                path.write_text(report.nodeid)
                os._exit(1)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                path.write_text(report.nodeid)
                os._exit(1)

    path, plugin = report, Plugin()
    try:
        pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", *dict.fromkeys(test.file for test in tests)], plugins=[plugin]
        )
    except TooLongError:
        report.write_text(plugin.now + " (too long)")
        os._exit(1)
    except BaseException as error:
        report.write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def _run(tree: Path, tests: list[Test], seconds: float, report: Path) -> tuple[int, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child_status: list[int] = []
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            _child(tree, tests, seconds, report)
        finally:
            os._exit(4)
    deadline = time.monotonic() + 120 + 15 * seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            child_status.append(os.waitstatus_to_exitcode(status))
            break
        if time.monotonic() > deadline:
            report.write_text("hangs")
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child_status.append(1)
            break
        time.sleep(0.05)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return child_status[0], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _order(tests: list[Test]) -> list[Test]:
    """Quickest first, the tests of one file together."""
    of_file: dict[str, list[Test]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: test.cpu):
        of_file[test.file].append(test)
    return [test for part in sorted(of_file.values(), key=lambda part: sum(t.cpu for t in part)) for test in part]


def kill(asked: argparse.Namespace) -> None:
    """Every mutant against the tests that reach it."""
    mutants = read(asked.mutants)
    reached: dict[int, list[Test]] = defaultdict(list)
    everything = 0
    for line in asked.hits.read_text().splitlines():
        found = json.loads(line)
        everything += 1
        if found["outcome"] != ["passed"]:
            print("left out:", found["test"], found["outcome"])
            continue
        for index in found["hits"]:
            reached[index].append(Test(found["test"], found["cpu"]))
    done = {json.loads(line)["index"] for line in asked.out.read_text().splitlines()} if asked.out.exists() else set()
    # What every fork shares.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import scipy.linalg  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import typer.testing  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.startswith("kflats") for name in sys.modules)
    work = Path(tempfile.mkdtemp(prefix="kflats-mutants-"))
    tree = copy_of(asked.tree.resolve(), work / "tree")
    for index, mutant in enumerate(mutants):
        if index in done or (asked.only and index not in asked.only):
            continue
        line: dict[str, Any] = {"index": index, "file": mutant.file, "function": mutant.function}
        tests = sorted(reached[index], key=lambda test: test.cpu)
        line["tests"] = len(tests)
        if place_of(mutant, tree) is None:
            line["result"] = "gone"
        elif not tests:
            line["result"] = "not reached"
        else:
            original = (tree / mutant.file).read_bytes()
            mutate(mutant, tree)
            report = work / "report"
            report.unlink(missing_ok=True)
            first = _order(tests[:FIRST])
            status, spent = _run(tree, first, asked.seconds, report)
            if status == 0 and len(tests) > FIRST:
                left, total = [], 0.0
                for test in tests[FIRST:]:
                    total += test.cpu
                    if total <= 1.5 * asked.seconds:
                        left.append(test)
                status, more = _run(tree, _order(left), asked.seconds - min(spent, asked.seconds / 2), report)
                spent += more
                if status == 0 and len(left) < len(tests) - FIRST:
                    status = 3
            line["result"] = {0: "survived", 3: "survived within the time"}.get(status, "killed")
            line["by"] = report.read_text() if report.exists() else str(status) if status not in (0, 3) else ""
            line["cpu"] = round(spent, 1)
            (tree / mutant.file).write_bytes(original)
        print(json.dumps(line), flush=True)
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in {"trace": trace, "kill": kill}.items():
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        command.add_argument("--tree", type=Path, default=Path())
        command.add_argument("--mutants", type=Path, default=Path(__file__).with_name("mutants.json"))
        command.add_argument("--out", type=Path, required=True)
        if name == "trace":
            command.add_argument("pytest", nargs="*", help="more arguments of pytest (after --)")
        else:
            command.add_argument("--hits", type=Path, required=True)
            command.add_argument("--seconds", type=float, default=60.0)
            command.add_argument("--only", type=int, nargs="*")
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
