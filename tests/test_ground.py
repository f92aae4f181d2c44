"""Rules for the code base: which modules may import which, what files must contain, and that the
example starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
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


@pytest.mark.slow
def test_importing_dtensor_loads_no_torch_until_used():
    # From a file of the package itself: a namespace package without __init__ would prove nothing.
    code = "import sys, dtensor; print(dtensor.__file__); print(*sorted(sys.modules))"
    file, modules = python("-c", code).splitlines()
    assert Path(file) == ROOT / "dtensor" / "__init__.py"
    assert {m.partition(".")[0] for m in modules.split()}.isdisjoint({"torch", "numpy", "scipy"})
    used = "import sys, dtensor as dt; [getattr(dt, n) for n in dt.__all__]; print(*sys.modules)"
    assert "torch" in python("-c", used).split()
    assert not {"ray", "triton"} & set(python("-c", used).split())


PRIVATE = {"private_torch.py", "kernel_flags.py", "frontend/capture/patches.py"}
PRIVATE |= {"frontend/capture/cuda_casts.py", "frontend/capture/whole_layers.py"}
PRIVATE |= {"daft/ray/bootstrap/private_ray.py"}
"""Where what is private of torch and Ray is named; docs/notes/versions.md says which is which."""


@pytest.mark.slow
def test_private_names_of_torch_and_ray_are_used_only_in_listed_files():
    """Private modules and names with an underscore, imported or reached from `torch` or `ray`;
    names of ops do not count."""
    base = ROOT / "dtensor"
    named: dict[str, set[str]] = {}
    for file in sorted(base.rglob("*.py")):
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    found |= {f"{module}.{alias.name}" for alias in names}
                case ast.Import(names=names):
                    found |= {alias.name for alias in names}
                case ast.Attribute() if _root(node) in ("torch", "ray"):
                    found.add(ast.unparse(node))
                case _:
                    pass
        private = re.compile(r"(torch|ray)\.(?!ops\.)(\w+\.)*_(?!_)\w+(\.\w+)*")
        if hits := {name for name in found if private.fullmatch(name)}:
            named[str(file.relative_to(base))] = hits
    assert set(named) == PRIVATE, {k: v for k, v in named.items() if k not in PRIVATE}


def test_package_does_not_import_tests():
    graph = grimp.build_graph("dtensor", include_external_packages=True, cache_dir=None)
    assert "torch" in graph.modules
    assert "tests" not in graph.modules


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph[str]:
    """Return the import graph, including imports inside functions and for type checking."""
    graph = grimp.build_graph("dtensor", cache_dir=None)
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(graph.modules)
    for module in graph.modules:
        targets = graph.find_modules_directly_imported_by(module)
        found.add_edges_from((module, target) for target in targets)
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found.add_edges_from((module, target) for target in _imported_by_string(file))
    for package in ("dtensor", "dtensor.daft"):  # what they import at first use
        stub = ROOT.joinpath(*package.split(".")) / "__init__.pyi"
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                where = f"{package}.{node.module}" if node.module else package
                below = {f"{where}.{alias.name}" for alias in node.names} & graph.modules
                found.add_edges_from((package, module) for module in {where, *below} - {package})
    return found


def _imported_by_string(file: Path) -> set[str]:
    """Return the modules of dtensor that the file names as text, to import them later."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(
                func=ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.Subscript(value=ast.Name(id=name))
            ) if name in ("import_module", "resolve_name", "provide", "Provider"):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                texts = [v.value for v in values if isinstance(v, ast.Constant)]
                modules |= {str(text).partition(":")[0] for text in texts}
            case _:
                pass
    return {module for module in modules if module.partition(".")[0] == "dtensor"}


def test_imports_form_no_cycle(imports: nx.DiGraph[str]):
    """Also counts imports by string, which import-linter does not see."""
    assert [c for c in nx.strongly_connected_components(imports) if len(c) > 1] == []


def test_imports_follow_layers():
    """Checks the layers of pyproject.toml, and that each folder is in one."""
    python("-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())")


def test_every_module_is_reachable_from_public_modules(imports: nx.DiGraph[str]):
    entries = ("dtensor", "dtensor.__main__", "dtensor.daft", "dtensor.testing")
    entries += ("dtensor.testing.fixtures",)
    used = {*entries}.union(*(nx.descendants(imports, entry) for entry in entries))
    packages = {m.rpartition(".")[0] for m in imports}
    assert set(imports) - used - packages == set()


def test_files_named_in_docs_and_comments_exist():
    """Checks paths with a folder in pages, docstrings and comments, and the file names in the rows
    of docs/map.md."""
    text = (ROOT / "docs/map.md").read_text()
    rows = re.findall(r"^\| `([\w/]+/)`[^|]*\|(.*)\|$", text, re.MULTILINE)
    listed = [f"dtensor/{r}{n}.py" for r, names in rows for n in re.findall(r"`(\w+)`", names)]
    assert len(listed) > 100
    assert [path for path in listed if not (ROOT / path).exists()] == []
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


def test_every_module_has_docstring():
    silent = [f for f in FILES if f.read_text().strip() and not _starts_with_text(f)]
    assert [str(f.relative_to(ROOT)) for f in silent] == []


def test_every_folder_of_package_has_init_file():
    # setuptools leaves out a folder without __init__.py, and a checkout hides that it does.
    folders = {f.parent for f in FILES if f.is_relative_to(ROOT / "dtensor")}
    missing = [str(d.relative_to(ROOT)) for d in folders if not (d / "__init__.py").exists()]
    assert sorted(missing) == []


@pytest.mark.slow
def test_train_gpt_example_prints_help():
    help_text = python("examples/train_gpt.py", "--help")
    for word in ("tp2pp2", "--backend", "--tied", "--resume", "--compare"):
        assert word in help_text


@pytest.mark.slow
def test_placements_of_train_gpt_example_match_parameters():
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


def _root(node: ast.expr) -> str:
    """Return the name at the start of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _starts_with_text(file: Path) -> bool:
    """Whether the first statement is a string. Reads only the file's first lines."""
    with file.open() as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                return token.type == tokenize.STRING
    return False
