"""The ground that everything stands on: what may be imported where, how files are kept, how much of
them a first program needs, and that the example starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import grimp
import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for part in ("dtensor", "tests", "examples") for p in (ROOT / part).rglob("*.py"))


def python(*args: str) -> str:
    """Run Python on this checkout, warnings shown, and return what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(file: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def where(package: str) -> set[str]:
    """The files of dtensor/ that import a package, relative to dtensor/."""
    base = ROOT / "dtensor"
    return {str(f.relative_to(base)) for f in base.rglob("*.py") if package in imported(f)}


@pytest.mark.slow
def test_importing_dtensor_loads_neither_ray_nor_triton():
    # From a file of the package itself: a namespace package without __init__ would prove nothing.
    code = "import sys, dtensor; print(dtensor.__file__); print(*sorted(sys.modules))"
    file, modules = python("-c", code).splitlines()
    assert Path(file) == ROOT / "dtensor" / "__init__.py"
    assert "torch" in modules.split()
    assert not {"ray", "triton"} & set(modules.split())


@pytest.mark.slow
def test_only_the_ray_backend_imports_ray():
    outside = {file for file in where("ray") if not file.startswith("daft/ray/")}
    assert not outside


PRIVATE = {"private_torch.py", "kernel_flags.py", "frontend/capture/patches.py"}
PRIVATE |= {"daft/ray/bootstrap/private_ray.py"}
"""Where what is private of torch and Ray is named; docs/notes/versions.md says which is which."""


@pytest.mark.slow
def test_what_is_private_of_torch_and_ray_is_named_in_its_files_alone():
    """Modules and names with an underscore, imported or reached from `torch`; ops are no such."""
    base = ROOT / "dtensor"
    named: dict[str, set[str]] = {}
    for file in sorted(base.rglob("*.py")):
        found: set[str] = set()
        for node in ast.walk(_parsed(file)):
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    found |= {f"{module}.{alias.name}" for alias in names}
                case ast.Import(names=names):
                    found |= {alias.name for alias in names}
                case ast.Attribute():
                    found.add(ast.unparse(node))
                case _:
                    pass
        private = re.compile(r"(torch|ray)\.(?!ops\.)(\w+\.)*_(?!_)\w+(\.\w+)*")
        if hits := {name for name in found if private.fullmatch(name)}:
            named[str(file.relative_to(base))] = hits
    assert set(named) == PRIVATE, {k: v for k, v in named.items() if k not in PRIVATE}


@pytest.mark.slow
def test_only_kernels_import_triton():
    outside = {file for file in where("triton") if not file.startswith("kernels/")}
    assert not outside


@pytest.mark.slow
def test_the_package_needs_no_tests():
    assert not where("tests")


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph[str]:
    """Who imports whom, also inside functions and for types alone."""
    graph = grimp.build_graph("dtensor")
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(graph.modules)
    for module in graph.modules:
        targets = graph.find_modules_directly_imported_by(module)
        found.add_edges_from((module, target) for target in targets)
    return found


def circles(graph: nx.DiGraph[str]) -> list[set[str]]:
    """Sets of modules of which each imports every other, directly or through others."""
    return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_no_import_circle(imports: nx.DiGraph[str]):
    assert circles(imports) == []


def test_no_circle_of_rooms(imports: nx.DiGraph[str]):
    """Of the files and folders of any one folder, those of its folders taken whole."""
    for room in {module.rpartition(".")[0] for module in imports} - {""}:
        inside = [m for m in imports if m.startswith(f"{room}.")]
        part = {m: m.removeprefix(f"{room}.").split(".")[0] for m in inside}
        parts = nx.DiGraph(
            (part[a], part[b]) for a, b in imports.subgraph(inside).edges if part[a] != part[b]
        )
        assert circles(parts) == [], room


@pytest.mark.slow
def test_no_import_goes_up():
    """The layers of pyproject.toml, and that each room has one."""
    python("-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())")


def test_every_module_is_used(imports: nx.DiGraph[str]):
    """Reached from what users import, or run."""
    entries = (
        "dtensor",
        "dtensor.__main__",
        "dtensor.daft",
        "dtensor.testing",
        "dtensor.testing.fixtures",
    )
    used = {*entries}.union(*(nx.descendants(imports, entry) for entry in entries))
    packages = {m.rpartition(".")[0] for m in imports}
    assert set(imports) - used - packages == set()


@pytest.mark.slow
def test_no_two_classes_of_one_name():
    where_defined: dict[str, list[str]] = defaultdict(list)
    for file in (f for f in FILES if f.is_relative_to(ROOT / "dtensor")):
        for node in _parsed(file).body:
            if isinstance(node, ast.ClassDef):
                where_defined[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in where_defined.items() if len(files) > 1} == {}


def test_the_map_names_every_file():
    """In docs/map.md: rows of a room and its files, and whole paths elsewhere."""
    text = (ROOT / "docs" / "map.md").read_text()
    rooms = re.findall(r"^\| `([\w/]+/)`[^|]*\|(.*)\|$", text, re.MULTILINE)
    listed = [room + name for room, row in rooms for name in re.findall(r"`(\w+)`", row)]
    files = {
        str(f.relative_to(ROOT / "dtensor").with_suffix(""))
        for f in FILES
        if f.is_relative_to(ROOT / "dtensor") and f.stem != "__init__"
    }
    assert sorted(listed) == sorted(
        files
        - {
            "numerics",
            "collectives",
            "errors",
            "misspelled",
            "kernel_flags",
            "provider",
            "showing",
            "signals",
        }
        - {"private_torch", "__main__"}
    )
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(paths) > 60
    assert [
        path
        for path in paths
        if not (ROOT / "dtensor" / path).exists() and not (ROOT / path).exists()
    ] == []


def test_files_that_texts_name_are_there():
    """A file with its folder, in pages, docstrings and comments."""
    elsewhere = (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py"))
    everything = [str(f.relative_to(ROOT)) for f in (*FILES, *elsewhere)]
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    lost: dict[str, set[str]] = {}
    for file in (*pages, *FILES):
        named = re.findall(r"(?<![\w./<>*{-])((?:\w+/)+\w+\.py)\b", file.read_text())
        there = {
            name for name in named if any(f"/{path}".endswith(f"/{name}") for path in everything)
        }
        if gone := set(named) - there - {"einops/_backends.py"}:
            lost[str(file.relative_to(ROOT))] = gone
    assert lost == {}


@pytest.mark.slow
def test_the_path_of_the_readmes_example():
    """What a reader of it opens does not grow in silence; `python -m tests.path -v` lists it."""
    text = python("-W", "ignore", "-m", "tests.path")
    files, lines, ran = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+\d", text))
    assert files > 20 and lines > ran > 1000
    # runs that are undone, steps that go on elsewhere, an optimizer's state as named values: 700
    # lines more; and launching apart from sessions, and these from an optimizer's state;
    # what is said of clipping between steps, of axes without names, of a rank that holds too much;
    # docstrings that the reference prints: 160 lines; what notebooks show of them: 20;
    # rules that fail are no rules; numbers in the place of tensors, sparse gradients refused: 100;
    # sums of 16 bits whose parts are float32, and the table of ops that give such parts: 250
    # what hosts raise, checks of values, waits that are followed: 250 more, and one file;
    # captures for one thread, reads of what is outside, programs that are unloaded, the names of
    # what is private of torch: 1,400 lines, a third of them run, and four files;
    # where signals act, launches that are objects: 600 lines, 250 of them run, and one file;
    # a prediction by the schedule's grid, costs of steps as data, the store, records of what hosts
    # have and of generated lines: 2,500 lines, 570 of them run, and twelve files;
    # memory that is held at once: 70 lines, 30 of them run
    assert files <= 117 and lines <= 32_000 and ran <= 13_170, text


def test_long_files_are_looked_at():
    """Of a file past 600 lines: one concept, or two rooms in one?"""
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES}
    assert len(lengths) > 10
    long = {name: n for name, n in lengths.items() if n > 600}
    if long:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"files of more than 600 lines: {long}", stacklevel=1)


@pytest.mark.slow
def test_modules_say_what_they_are_for():
    silent = [f for f in FILES if f.read_text().strip() and not ast.get_docstring(_parsed(f))]
    assert [str(f.relative_to(ROOT)) for f in silent] == []


def test_every_package_is_packaged():
    # setuptools leaves out a folder without __init__.py, and a checkout hides that it does.
    folders = {f.parent for f in FILES if f.is_relative_to(ROOT / "dtensor")}
    missing = [str(d.relative_to(ROOT)) for d in folders if not (d / "__init__.py").exists()]
    assert sorted(missing) == []


@pytest.mark.slow
def test_the_example_starts():
    help_text = python("examples/train_gpt.py", "--help")
    for word in ("tp2pp2", "--backend", "--tied", "--resume", "--compare"):
        assert word in help_text


@pytest.mark.slow
def test_the_example_names_parameters_that_exist():
    code = """
import sys; sys.path.insert(0, "examples")
from fnmatch import fnmatchcase
import train_gpt
names = [n for n, _ in train_gpt.GPT(train_gpt.Config()).named_parameters()]
import dtensor as dt
for place in train_gpt.PLACEMENTS.values():
    dt.Mesh(**place.mesh)
    for glob in place.parameters:
        assert any(fnmatchcase(n, glob) for n in names), glob
print(len(names))
"""
    assert int(python("-c", code)) == 2 + 4 * 12 + 3


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
