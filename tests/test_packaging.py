"""Packaging: the wheel contains exactly the package's files, the source package builds the same
wheel, and every import is a stated dependency."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import grimp
import pytest
import torch
from packaging.requirements import Requirement

import dtensor
from dtensor import torch_bound
from tests import versions

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Named where they are used: a user who calls these has them.
OF_THE_USER = {"hypothesis", "peft", "pytest", "safetensors", "transformers"}


def names(requirements: list[str]) -> set[str]:
    return {Requirement(text).name for text in requirements}


def test_imported_packages_are_stated_dependencies() -> None:
    graph = grimp.build_graph("dtensor", include_external_packages=True)
    found = {module.partition(".")[0] for module in graph.modules}
    found -= {*sys.stdlib_module_names, "dtensor"}
    extras = PROJECT["optional-dependencies"]
    stated = names([*PROJECT["dependencies"], *extras["ray"], *extras["kernels"]])
    assert found - stated <= OF_THE_USER
    assert stated <= found, "stated, and not imported"


def test_torch_version_bound_equals_stated_dependency() -> None:
    (stated,) = (text for text in PROJECT["dependencies"] if text.startswith("torch"))
    low, high = (".".join(map(str, bound)) for bound in (torch_bound.LOWEST, torch_bound.BELOW))
    assert stated == f"torch>={low},<{high}"


@pytest.mark.parametrize("version", ["2.10.3", "2.14.0", "2.14.1+cpu", "3.0.0a0+git1"])
def test_torch_version_outside_bound_warns(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    words = re.escape(f"torch {version} is not supported") + ".*\nfix: pip install 'torch>=.*<.*'"
    with pytest.warns(UserWarning, match=words):
        torch_bound.warn_of_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.2.dev1", "unknown"])
def test_torch_version_inside_bound_does_not_warn(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_bound.warn_of_torch()  # warnings are errors


@pytest.mark.parametrize("first", ["", "import torch; "])
def test_importing_dtensor_with_unsupported_torch_warns_once(first: str, tmp_path: Path) -> None:
    """The warning names the user's line, whether or not torch has been imported."""
    other = tmp_path / "torch"
    other.mkdir()
    (other / "__init__.py").write_text("from torch.version import __version__\n")
    (other / "version.py").write_text("__version__ = '2.99.0+cu130'\n")
    user = tmp_path / "user.py"
    user.write_text(f"import sys; {first}import dtensor; print('torch' in sys.modules)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, user], env=env, capture_output=True, text=True)
    assert done.stdout == f"{bool(first)}\n"
    assert f"{user}:1: UserWarning: torch 2.99.0+cu130 is not supported" in done.stderr


def test_classifiers_name_python_versions_that_passed() -> None:
    """The default version, and those that passed all parts in the table of
    docs/notes/versions.md."""
    written = versions.TABLE.read_text().split(versions.BEGIN)[1].split(versions.END)[0]
    passed = {versions.PYTHONS[0]}
    for row in versions.parse(written):
        cells = [row.cells.get(part, "") for part in versions.PARTS]
        if all(re.fullmatch(r"\d+ passed, 0 failed", cell) for cell in cells):
            passed.add(row.pair[0])
    start = "Programming Language :: Python :: "
    assert {c.removeprefix(start) for c in PROJECT["classifiers"] if c.startswith(start)} == passed


def test_launch_on_ray_without_ray_error_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (wanted,) = PROJECT["optional-dependencies"]["ray"]
    with (
        pytest.raises(ImportError, match=f"needs Ray[^`]*pip install '{wanted}'"),
        dtensor.launch(dtensor.Mesh(tp=2), backend="ray"),
    ):
        raise AssertionError


def test_dev_extra_includes_all_other_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    (own,) = (Requirement(text) for text in extras["dev"] if text.startswith("dtensor"))
    assert own.extras == set(extras) - {"dev"}


def test_changelog_has_current_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dtensor.__version__ in versions


def test_editable_install_takes_precedence_over_folders_named_dtensor() -> None:
    """With this setting setuptools writes the path of the checkout and no import finder."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tools["package-dir"] == {"": "."}


@pytest.mark.parametrize(
    ("installed", "is_left"),
    [("{}", True), ('{"dir_info": {"editable": true}}', False), (None, False)],
    ids=["pip install .", "pip install -e .", "nothing"],
)
def test_make_setup_keeps_non_editable_install(
    installed: str | None, is_left: bool, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    if installed is not None:
        (packages,) = tmp_path.glob("lib/python*/site-packages")
        info = packages / "dtensor-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dtensor\nVersion: 0.1.0\n")
        (info / "direct_url.json").write_text(installed)
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode == 0) == is_left
    assert ("left as it is" if is_left else "No module named pip") in done.stdout + done.stderr
    assert not (tmp_path / ".stamp").exists()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source package and a wheel from it, offline, with installed tools."""
    copy = tmp_path_factory.mktemp("checkout")
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("dtensor", "examples", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=junk)
    for file in ROOT.glob("*"):
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, copy)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", str(copy)],
        capture_output=True, text=True, env=env, cwd=copy, timeout=900,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "dist"


@pytest.mark.slow
def test_wheel_contains_exactly_the_package(packages: Path) -> None:
    (wheel,) = packages.glob("*.whl")
    assert wheel.name == f"dtensor-{dtensor.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        info = f"dtensor-{dtensor.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    files = (f for f in (ROOT / "dtensor").rglob("*") if "__pycache__" not in f.parts)
    ours = {str(f.relative_to(ROOT)) for f in files if f.is_file()}
    assert {name for name in inside if not name.startswith(info)} == ours
    assert "dtensor/py.typed" in inside
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "dtensor = dtensor.__main__:main" in scripts


def test_source_package_has_examples_and_readme_but_no_tests(packages: Path) -> None:
    (archive,) = packages.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = [member.name.partition("/")[2] for member in opened if member.isfile()]
    examples = {str(f.relative_to(ROOT)) for f in (ROOT / "examples").rglob("*.py")}
    assert examples <= set(inside)
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= set(inside)
    junk = [n for n in inside if n.startswith("tests/") or "__pycache__" in n or ".pt" in n[-4:]]
    assert junk == []
