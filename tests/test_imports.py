"""The shape of the package, held by parsing it: imports point down only, and some things are never imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kflats

SOURCE = Path(__file__).resolve().parents[1] / "src" / "kflats"

# From the ground up. A package may import what is above its own line here, and itself where that makes no cycle.
# One that is not listed fails the test: say where it belongs.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("common",),
    ("numerics",),
    ("matrices",),
    ("importance",),
    ("methods",),
    ("codecs",),
    ("model",),
    ("io",),
    ("recipe",),
    ("tables",),
    ("evaluation",),
    ("calibration",),
    ("report",),
    ("tasks",),
    ("planning",),
    ("trimming",),
    ("export",),
    ("recover",),
    ("compress",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
NUMERICS_MAY_IMPORT = {
    *("torch", "numpy", "kflats.common.errors", "kflats.common.machine", "kflats.common.torch_settings"),
    "kflats.numerics",
}
ALLOWED = {"torch", "numpy", "safetensors", "filelock", "typer", "click", "rich", "kflats"}
OPTIONAL = {
    "torchao",
    "transformers",
    "tokenizers",
    "sentence_transformers",
    "huggingface_hub",
    "matplotlib",
    "jinja2",
    "markupsafe",
    "accelerate",
    "datasets",
    "sklearn",
    "yaml",
    "scipy",
    "seqeval",
    "constriction",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "peft",
    "faiss",
    "pyarrow",
}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load"}


def module_name(path: Path) -> str:
    parts = ["kflats", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed() -> dict[str, ast.Module]:
    """Every module of the package; read once, so not to be changed."""
    return {module_name(p): ast.parse(p.read_text(encoding="utf-8"), str(p)) for p in sorted(SOURCE.rglob("*.py"))}


def imports(tree: ast.AST, known: set[str], *, run: bool = False) -> set[str]:
    """Every module that ``tree`` imports, wherever in it; ``from package import module`` counts as the module.

    Args:
        run: leave out what is imported for type checkers alone.
    """
    found: set[str] = set()
    nodes = deque([tree])
    while nodes:
        node = nodes.popleft()
        types = run and isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        nodes.extend(node.orelse if types else ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found


def layer(module: str) -> int:
    top = module.split(".")[1]
    found = [height for height, names in enumerate(LAYERS) if top in names]
    assert found, f"{module} belongs to no layer: enter it in LAYERS of {Path(__file__).name}"
    return found[0]


def violations(modules: dict[str, ast.Module]) -> Iterator[str]:
    """One line for every import that points up, and for a cycle."""
    graph: dict[str, set[str]] = {}
    for name, tree in modules.items():
        if name == "kflats":
            continue  # the public names come from everywhere
        own = {other for other in imports(tree, set(modules)) if other.split(".")[0] == "kflats"}
        for other in own:
            if other == "kflats":
                yield f"{name} imports the package itself, which imports everything"
            elif layer(other) > layer(name):
                yield f"{name} imports {other}, which is above it"
        graph[name] = own - {"kflats"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"a cycle: {' -> '.join(error.args[1])}"


def unsafe(tree: ast.AST) -> Iterator[str]:
    for module in imports(tree, set()):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield f"calls {ast.unparse(node.func)} in line {node.lineno}"
            for keyword in (one for one in node.keywords if one.arg == "trust_remote_code"):
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                asked = ast.unparse(keyword.value) == "trusts_remote_code()"  # off unless the user turns it on
                if not (is_false or asked):
                    yield f"trusts remote code in line {node.lineno}"


def test_imports_point_down_only() -> None:
    assert list(violations(parsed())) == []


def test_the_law_can_be_broken() -> None:
    broken = {
        "kflats.common.errors": "",
        "kflats.numerics.svd": "def f():\n    from kflats.matrices import layers",
        "kflats.matrices.layers": "from kflats.common import errors",
        "kflats.recipe.recipe": "import kflats.recipe.budget",
        "kflats.recipe.budget": "from kflats.recipe.recipe import Plan",
        "kflats.codecs": "import kflats",
    }
    found = list(violations({name: ast.parse(text) for name, text in broken.items()}))
    assert len(found) == 3
    assert any("numerics.svd imports kflats.matrices" in line for line in found)
    assert any("cycle" in line for line in found)
    with pytest.raises(AssertionError, match="belongs to no layer"):
        layer("kflats.helpers")


def test_every_layer_lists_modules_that_exist() -> None:
    there = {module.split(".")[1] for module in parsed() if "." in module}
    assert {name for names in LAYERS for name in names} - there == set()


def test_the_page_on_the_architecture_shows_this_order() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[: page.index("## Where things happen")]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name.strip(" `") for line in lines for name in line.split(",")]
    height = {name: place for place, names in enumerate(LAYERS) for name in names}
    assert set(named) == set(height)
    assert [height[name] for name in named] == sorted(height.values())


@pytest.mark.parametrize("name", [module_name(path) for path in sorted((SOURCE / "numerics").rglob("*.py"))])
def test_numerics_know_tensors_only(name: str) -> None:
    modules = parsed()
    for other in imports(modules[name], set(modules)):
        allowed = any(other == a or other.startswith(a + ".") for a in NUMERICS_MAY_IMPORT)
        assert allowed or other.split(".")[0] in sys.stdlib_module_names, f"{name} imports {other}"


def test_only_declared_packages_are_imported() -> None:
    modules = parsed()
    outside = {o.split(".")[0] for tree in modules.values() for o in imports(tree, set(modules), run=True)}
    assert outside - ALLOWED - OPTIONAL - set(sys.stdlib_module_names) == set()


def test_nothing_unsafe() -> None:
    assert {name: found for name, tree in parsed().items() if (found := list(unsafe(tree)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec('1')",
        "torch.load(p)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=x)",
    ],
)
def test_unsafe_is_noticed(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


def test_works_without_the_optional_packages() -> None:
    program = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
import kflats, kflats.cli.app, kflats.report.report, kflats.evaluation.outputs, kflats.io
model = torch.nn.Sequential(torch.nn.Embedding(60, 16))
with torch.no_grad():
    report = kflats.compress_(model, {{"0": kflats.Flats(k=2)}}, keep="60%", quiet=True)
assert model(torch.tensor([3])).shape == (1, 16)
print(report)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0" in done.stdout


def test_every_public_name_is_there() -> None:
    assert [name for name in kflats.__all__ if not hasattr(kflats, name)] == []


def test_the_package_is_light() -> None:
    """``import kflats`` loads none of the drawing packages, wanted or not."""
    program = "import sys, kflats; print([n for n in ('matplotlib', 'jinja2', 'sklearn', 'scipy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
