"""The package's layers and fences, read from the sources: the first breach fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tunekit"

# Lowest first. A module imports only from lower layers; a plain module also from
# those named before it in its own layer; a package never from a sibling.
LAYERS = (
    ("errors", "launch", "child", "model", "trials", "once", "progress"),
    ("arch", "settings", "identity", "environment"),
    ("spec",),
    ("pruning", "space", "probe", "backends", "oracle"),
    ("jobs", "measure", "search", "store", "simulate"),
    ("compiling",),
    ("sweep", "dispatch", "check", "report"),
    ("cli",),
)
RANK = {name: (layer, place) for layer, names in enumerate(LAYERS) for place, name in enumerate(names)}
# The same within the simulator, with one exception: a program loads the units, which registers them.
SIMULATOR = (
    *("ptx", "faults", "report", "job", "tma", "history", "machine", "launch", "numbers", "matrix", "sync", "units"),
    *("grid", "run", "problem", "worker", "client"),
)
LOADS_THE_UNITS = PACKAGE / "simulate" / "machine" / "program.py"
FENCED = {"torch", "cutlass", "cuda", "tvm_ffi"}
# The files outside the fence: what runs in a compile process or on the device.
BEHIND_THE_FENCE = ("tunekit/backends/*/*", "tunekit/measure/*", "kernel_specs/kernels/*", "kernel_specs/kernels/*/*")
ENTRY_POINTS = {"__init__", "__main__"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST, *, module_level: bool = False) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of each import, but those for type checkers only; optionally not those in functions."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending += node.orelse
            continue
        if module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "tunekit":
                yield from ((node.lineno, f"tunekit.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, "." * node.level + (node.module or "")
        pending += ast.iter_child_nodes(node)


def breaches(top: str, is_package: bool, tree: ast.AST) -> list[str]:
    """What a module of the part `top` may not import, each as ``line: sentence``."""
    layer, place = RANK[top]
    found = []
    for line, name in imports(tree):
        if name.startswith("."):
            found.append(f"{line}: relative import {name}")
            continue
        if name == "kernel_specs" or name.startswith("kernel_specs."):
            found.append(f"{line}: imports {name}: specs are loaded, never imported")
        if not name.startswith("tunekit."):
            continue
        other = name.split(".")[1]
        if other not in RANK:
            found.append(f"{line}: imports {name}, which is in no layer")
            continue
        other_layer, other_place = RANK[other]
        sibling = other_layer == layer and other != top
        if other_layer > layer or (sibling and (is_package or other_place > place)):
            found.append(f"{line}: {top} (layer {layer}) imports {name} (layer {other_layer})")
    return found


@pytest.mark.parametrize("path", sources("tunekit/simulate"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_simulators_parts_import_downwards_only(path: Path) -> None:
    part = path.relative_to(PACKAGE / "simulate").with_suffix("").parts[0]
    if part in ENTRY_POINTS:
        return
    for line, name in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[:2] != ["tunekit", "simulate"]:
            continue
        if len(parts) == 2:
            assert path == LOADS_THE_UNITS, f"{line}: name the module that is imported"
            continue
        assert SIMULATOR.index(parts[2]) <= SIMULATOR.index(part), f"{line}: {part} imports {name}"


@pytest.mark.parametrize("path", sources("tunekit"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if top in ENTRY_POINTS:
        return
    assert top in RANK, f"{top} is in no layer: add it to LAYERS and to docs/architecture.md"
    assert breaches(top, (PACKAGE / top).is_dir(), ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("top", "is_package", "line"),
    [
        ("model", False, "from tunekit.spec import Axis"),
        ("store", True, "import tunekit.jobs"),
        ("report", True, "from tunekit import sweep"),
        ("arch", False, "def f():\n    from tunekit.cli import main"),
        ("spec", True, "from .axes import Axis"),
        ("cli", True, "from kernel_specs.fmha import SPEC"),
    ],
)
def test_the_walk_sees_a_breach(top, is_package, line):
    assert len(breaches(top, is_package, ast.parse(line))) == 1


@pytest.mark.parametrize("path", sources("tunekit", "kernel_specs"), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stay_behind_the_fence(path):
    if any(path.relative_to(ROOT).match(pattern) for pattern in BEHIND_THE_FENCE):
        return
    tree = ast.parse(path.read_text())
    heavy = [(line, name) for line, name in imports(tree, module_level=True) if name.split(".")[0] in FENCED]
    assert heavy == []


@pytest.mark.parametrize("path", sources("tunekit"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_one_idea(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    assert path.stem not in ("utils", "util", "common", "helpers", "helper", "misc")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module's docstring says what it owns"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: input is checked by raising, not by assert"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "print"), f"line {node.lineno}: {node.func.id}()"
    names = {name.split(".")[0] for _, name in imports(tree)}
    assert not names & {"pickle", "shelve", "marshal"}, "nothing stored is ever unpickled"


@pytest.mark.parametrize("path", sources("kernel_specs"), ids=lambda p: str(p.relative_to(ROOT)))
def test_specs_are_light(path):
    if path.parent.name == "kernels":
        return
    assert path.read_text().count("\n") <= 400
    allowed = {"spec", "model", "arch"}
    for line, name in imports(ast.parse(path.read_text()), module_level=True):
        if name.startswith("tunekit."):
            assert name.split(".")[1] in allowed, f"line {line}: a spec declares; it does not use {name}"


def test_no_committed_file_names_a_private_place():
    """Machine paths and registry hosts have no business in the project's files."""
    private = ("/wo" + "rk/", "/opt/" + "wheels", "/opt/" + "pypi", "files.pythonhosted" + ".org")
    found = []
    for path in [*sources("tunekit", "kernel_specs", "tests", "benchmarks"), *ROOT.glob("*.*"), *ROOT.glob("docs/*")]:
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".sh", ".jsonl"):
            found += [f"{path.relative_to(ROOT)}: {p}" for p in private if p in path.read_text()]
    assert found == []


def test_no_two_files_of_tests_have_one_name():
    """Outside of packages pytest takes the second for the first, and fails."""
    paths = [path for path in ROOT.glob("tests/**/test_*.py") if not path.with_name("__init__.py").exists()]
    names = sorted(path.name for path in paths)
    assert names == sorted(set(names))
