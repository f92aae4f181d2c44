"""Why a test is skipped where a package of an extra is not installed.

pytest.importorskip("transformers", reason=missing("transformers"))
# skipped: transformers is not installed: pip install '.[examples]'
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def missing(package: str) -> str:
    """Return the reason for a skip, with the command that installs the package. Raises KeyError for
    a package of no extra."""
    return f"{package} is not installed: pip install '.[{_extras()[package]}]'"


def absent(error: ModuleNotFoundError) -> str:
    """Return the reason to skip a test that raised this error, or "" if the package is of no extra,
    or is installed and lacks the module."""
    package = (error.name or "").partition(".")[0]
    if package not in _extras() or find_spec(package) is not None:
        return ""
    return missing(package)


@cache
def _extras() -> dict[str, str]:
    """Return the extra of each package; peft installs accelerate."""
    stated = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found = {
        Requirement(text).name: extra
        for extra, texts in stated.items()
        if extra != "dev"
        for text in texts
    }
    return {**found, "accelerate": found["peft"]}
