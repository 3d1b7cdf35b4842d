"""Runs mutants against the suite and writes which of them a test notices.

    run.py trace --tree . --out hits.jsonl
    run.py kill --tree . --hits hits.jsonl --out killed.jsonl
    run.py trace --tree NEWER --carried carried.json --out hits-newer.jsonl -- -m "not slow"
    run.py kill --tree NEWER --carried carried.json --hits hits-newer.jsonl --mark "not slow" --out killed-newer.jsonl
    run.py count killed.jsonl killed-newer.jsonl

`trace` runs the suite once in a copy of the tree where a probe stands before every mutated statement. It writes which
tests reach which mutant and how much processor time each test takes. `kill` copies the tree, and for each mutant runs
only the tests that reach it, the quickest first, until one fails. Every mutant gets the same processor time in tests
(--seconds), so "survived" means "not killed within that time". A test that takes ten times its usual time has failed.
torch and the other packages are imported once; the tests of each mutant run in a fork. `kill` appends to --out and
goes on where an earlier run stopped. In a newer tree a mutant is found by function and line, or by
`carried.json`. A test that fails without the mutant too kills nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
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
LINKED = (".venv", ".git", ".ci")
IGNORED = shutil.ignore_patterns("__pycache__", "*.json.gz")
PRELOADED = ("torch._dynamo", "torch.export", "scipy.linalg", "sklearn.metrics", "hypothesis", "typer.testing", "rich",
             "sentence_transformers", "transformers.models.bert.modeling_bert", "constriction", "safetensors.torch",
             "transformers.models.gpt2.modeling_gpt2", "matplotlib.pyplot", "jinja2", "datasets")  # fmt: skip
FIRST = 25  # tests of the first fork of a mutant: most mutants die there, and few files are imported
PROBE = "KFLATS_PROBE"


def read(path: Path, carried: Path | None = None) -> list[Mutant | None]:
    """The mutants; those that ``carried`` names as they are in a newer tree, None where their code is gone."""
    drawn = json.loads(path.read_text())
    for index, change in (json.loads(carried.read_text()) if carried else {}).items():
        drawn[int(index)] = None if "gone" in change else drawn[int(index)] | change
    return [Mutant(**fields) if fields else None for fields in drawn]


def copy_of(tree: Path, where: Path) -> Path:
    """A copy of what the suite needs."""
    where.mkdir(parents=True)
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, where / name, ignore=IGNORED, symlinks=True)
    for path in tree.iterdir():
        if path.is_file() and not path.is_symlink() and path.name not in LINKED:
            shutil.copy2(path, where / path.name)
    for name in LINKED:
        if (tree / name).exists():
            (where / name).symlink_to((tree / name).resolve())
    return where


def places_in(mutant: Mutant, path: Path) -> list[int]:
    """The numbers of the mutant's line in functions of its name, in one file."""
    text = path.read_text()
    lines = text.split("\n")
    return [
        number
        for name, first, last in spans(ast.parse(text))
        if name == mutant.function
        for number in range(first, last + 1)
        if lines[number - 1].strip() == mutant.line
    ]


def place_of(mutant: Mutant | None, tree: Path) -> tuple[Path, int] | None:
    """File and line number of a mutant in this tree, by function and text; another file where its own has no such line.

    None where the line is gone, or where several other files have it.
    """
    if mutant is None:
        return None
    path = tree / mutant.file
    same = places_in(mutant, path) if path.is_file() else []
    if not same:
        files = [file for folder in ("src", "experiments") for file in sorted((tree / folder).rglob("*.py"))]
        others = [(other, places_in(mutant, other)) for other in files]
        others = [(other, numbers) for other, numbers in others if numbers]
        if len(others) != 1:
            return None
        path, same = others[0]
    return (path, same[mutant.occurrence]) if len(same) > mutant.occurrence else None


def mutate(mutant: Mutant | None, tree: Path) -> Path:
    """Writes the mutant into this tree; the file that it changed."""
    place = place_of(mutant, tree)
    assert mutant is not None
    assert place is not None
    path, number = place
    lines = path.read_text().split("\n")
    lines[number - 1] = lines[number - 1].replace(mutant.line, mutant.mutated)
    path.write_text("\n".join(lines))
    return path


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


def add_probes(mutants: list[Mutant | None], tree: Path) -> None:
    """Puts a probe before the statement of each mutant (before the first statement of the function for defaults)."""
    by_file: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    lost = []
    for index, mutant in enumerate(mutants):
        if place := place_of(mutant, tree):
            by_file[place[0]].append((index, place[1]))
        elif mutant is not None:
            lost.append(index)
    if lost:
        raise SystemExit(f"no line of this tree is that of the mutants {lost}: say in carried.json what became of them")
    for file, numbers in by_file.items():
        text = file.read_text()
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
        compile("\n".join(out), str(file), "exec")
        file.write_text("\n".join(out))


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


def function_of(test: str) -> str:
    """A test's name without its case."""
    return test.split("[")[0]


class Tracer:
    """A pytest plugin: what each test reaches, also in its subprocesses, its fixtures and its module's import."""

    def __init__(self, out: Path, cases: int) -> None:
        import builtins

        self.cases = cases
        self.done = {json.loads(line)["test"] for line in out.read_text().splitlines()} if out.exists() else set()

        self.out = out.open("a", buffering=1)
        self.hits: set[int] = vars(builtins)["__probe__hits"]
        self.of_fixture: dict[int, set[int]] = defaultdict(set)
        self.of_module: dict[str, set[int]] = defaultdict(set)
        self.folder = Path(os.environ[PROBE])

    def chosen(self, items: list[Any]) -> list[Any]:
        """Some cases of each function, evenly among all of them; the others are written as not traced."""
        of_function: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            of_function[function_of(item.nodeid)].append(item)
        run = []
        for cases in of_function.values():
            step = len(cases) / min(self.cases or len(cases), len(cases))
            taken = {int(i * step) for i in range(len(cases)) if i * step < len(cases)}
            for place, item in enumerate(cases):
                if item.nodeid not in self.done:
                    if place in taken:
                        run.append(item)
                    else:
                        self.out.write(json.dumps({"test": item.nodeid}) + "\n")
        return run

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
            @pytest.hookimpl(trylast=True)
            def pytest_collection_modifyitems(self, items: list[Any]) -> None:
                items[:] = tracer.chosen(items)

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
        add_probes(read(asked.mutants, asked.carried), tree)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        (folder / "hits").mkdir()
        environment = os.environ | {PROBE: str(folder / "hits"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{folder / 'site'}:{tree / 'src'}"
        command = [sys.executable, str(Path(__file__).resolve()), "trace", "--tree", str(tree)]
        command += ["--mutants", str(asked.mutants.resolve()), "--out", str(asked.out.resolve())]
        command += ["--cases", str(asked.cases), "--", *asked.pytest]
        subprocess.run(command, cwd=tree, env=environment, check=False)
        return
    import pytest

    os.environ[f"{PROBE}_PID"] = str(os.getpid())
    sys.modules["sitecustomize"]._own = os.getpid()  # type: ignore[attr-defined]
    plugin = Tracer(asked.out, asked.cases).hooks()
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


def _child(tree: Path, tests: list[Test], seconds: float, report: Path, mark: str) -> None:
    """Runs these tests in this order in a fork; writes the first that fails."""
    os.setpgid(0, 0)
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

    def key(test: str) -> str:
        return test if test in wanted else function_of(test)

    def stop(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGVTALRM, stop)
    started = time.process_time()

    class Plugin:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            chosen = [item for item in items if key(item.nodeid) in wanted]
            items[:] = sorted(chosen, key=lambda item: wanted[key(item.nodeid)])

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
            if time.process_time() - started > seconds:
                os._exit(3)
            self.now = item.nodeid
            signal.setitimer(signal.ITIMER_VIRTUAL, max(20.0, 10 * usual[key(item.nodeid)]))
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

    # Packages that were imported before the fork are not rewritten, which pytest warns of.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", mark]
    path, plugin = report, Plugin()
    try:
        pytest.main([*options, *dict.fromkeys(test.file for test in tests)], plugins=[plugin])
    except TooLongError:
        report.write_text(plugin.now + " (too long)")
        os._exit(1)
    except BaseException as error:
        report.write_text(f"{type(error).__name__}: {error}")
        os._exit(4)
    os._exit(0)


def _run(tree: Path, tests: list[Test], seconds: float, report: Path, mark: str) -> tuple[int, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child_status: list[int] = []
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            _child(tree, tests, seconds, report, mark)
        finally:
            os._exit(4)
    deadline = time.monotonic() + 1800  # of a deadlock; all other limits are processor time
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


def tests_of(hits: Path) -> dict[int, list[Test]]:
    """The tests that reach each mutant. A case that was not traced reaches what the traced ones of its function do."""
    lines = [json.loads(line) for line in hits.read_text().splitlines()]
    by_function: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_function[function_of(line["test"])].append(line)
    reached: dict[int, list[Test]] = defaultdict(list)
    for cases in by_function.values():
        traced = [case for case in cases if "hits" in case]
        everything = sorted({index for case in traced for index in case["hits"]})
        usual = sum(case["cpu"] for case in traced) / max(1, len(traced))
        for case in cases:
            if case.get("outcome", ["passed"]) == ["passed"]:
                for index in case.get("hits", everything):
                    reached[index].append(Test(case["test"], case.get("cpu", usual)))
    return reached


def count(asked: argparse.Namespace) -> None:
    """How many mutants of each result; of two files, those that the first killed and the second does not."""
    results = [
        {line["index"]: line for line in map(json.loads, path.read_text().splitlines())} for path in asked.results
    ]
    for path, lines in zip(asked.results, results, strict=True):
        kinds = sorted(line["result"] for line in lines.values())
        print(path, len(lines), {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})
    if len(results) == 2:
        before, after = results
        both = [index for index in before if index in after and after[index]["result"] != "gone"]
        killed = [{index for index in both if lines[index]["result"] == "killed"} for lines in (before, after)]
        print(f"of {len(both)} that both trees have: {len(killed[0])} killed before, {len(killed[1])} after")
        for index in sorted(killed[0] - killed[1]):
            print("no longer killed:", after[index])


def _judge(tree: Path, tests: list[Test], asked: argparse.Namespace, report: Path) -> tuple[int, float]:
    """Runs the quickest tests, then the others, until one fails: the status of the last fork, the processor time."""
    status, spent = _run(tree, _order(tests[:FIRST]), asked.seconds, report, asked.mark)
    if status == 0 and len(tests) > FIRST:
        left, total = [], 0.0
        for test in tests[FIRST:]:
            total += test.cpu
            if total <= 1.5 * asked.seconds:
                left.append(test)
        status, more = _run(tree, _order(left), asked.seconds - min(spent, asked.seconds / 2), report, asked.mark)
        spent += more
        if status == 0 and len(left) < len(tests) - FIRST:
            status = 3
    return status, spent


def _named(report: Path, tests: list[Test]) -> Test | None:
    """The test that the report names; None of one that took too long."""
    name = report.read_text() if report.exists() else ""
    same = [test for test in tests if name in (test.name, test.file) or function_of(name) == test.name]
    return same[0] if same else None


def kill(asked: argparse.Namespace) -> None:
    """Every mutant against the tests that reach it."""
    mutants = read(asked.mutants, asked.carried)
    reached = tests_of(asked.hits)
    done = {json.loads(line)["index"] for line in asked.out.read_text().splitlines()} if asked.out.exists() else set()
    # What every fork shares.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert not any(name.startswith("kflats") for name in sys.modules)
    work = Path(tempfile.mkdtemp(prefix="kflats-mutants-"))
    tree = copy_of(asked.tree.resolve(), work / "tree")
    broken: set[str] = set()
    for index, mutant in enumerate(mutants):
        if index in done or (asked.only and index not in asked.only):
            continue
        line: dict[str, Any] = {"index": index}
        if mutant:
            line |= {"file": mutant.file, "function": mutant.function}
        tests = sorted(reached.get(index, []), key=lambda test: test.cpu)
        line["tests"] = len(tests)
        place = place_of(mutant, tree)
        if place is None:
            line["result"] = "gone"
        elif not tests:
            line["result"] = "not reached"
        else:
            path = place[0]
            original = path.read_bytes()
            mutate(mutant, tree)
            report = work / "report"
            report.unlink(missing_ok=True)
            status, spent = _judge(tree, [test for test in tests if test.name not in broken], asked, report)
            while status not in (0, 3, 4) and (killer := _named(report, tests)):
                path.write_bytes(original)
                by = report.read_text()
                if _run(tree, [killer], asked.seconds, report, asked.mark)[0] in (0, 3):
                    report.write_text(by)
                    break
                broken.add(killer.name)  # it fails without the mutant as well
                mutate(mutant, tree)
                report.unlink(missing_ok=True)
                status, spent = _judge(tree, [test for test in tests if test.name not in broken], asked, report)
            line["result"] = {0: "survived", 3: "survived within the time", 4: "not run"}.get(status, "killed")
            line["by"] = report.read_text() if report.exists() else str(status) if status not in (0, 3) else ""
            line["cpu"] = round(spent, 1)
            path.write_bytes(original)
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
        command.add_argument("--carried", type=Path, help="the mutants whose lines a newer tree has in other words")
        command.add_argument("--out", type=Path, required=True)
        if name == "trace":
            command.add_argument("--cases", type=int, default=0, help="trace only so many cases of each function")
            command.add_argument("pytest", nargs="*", help="more arguments of pytest (after --)")
        else:
            command.add_argument("--hits", type=Path, required=True, help="what trace wrote")
            command.add_argument("--mark", default="", help='as pytest\'s -m: "not slow" is what make test runs')
            command.add_argument("--seconds", type=float, default=20.0)
            command.add_argument("--only", type=int, nargs="*")
    command = commands.add_parser("count")
    command.set_defaults(run=count)
    command.add_argument(
        "results", type=Path, nargs="+", help="what kill wrote: of one tree, or of the older and the newer"
    )
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
