"""Tests that need a package of an extra are skipped without it, and the reason says how to install
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import absent, missing

ROOT = Path(__file__).parents[1]

BLOCKS = """
import importlib.util
import sys

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "einops"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocks())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name.partition(".")[0] in {"transformers", "einops"} else find(name, *more)
)
"""


def test_skip_reason_names_extra_to_install() -> None:
    assert missing("ray") == "ray is not installed: pip install '.[ray]'"
    assert missing("accelerate") == "accelerate is not installed: pip install '.[examples]'"


def test_missing_module_of_no_extra_is_error_and_not_skip() -> None:
    for name in ("torch.no_such_module", "no_such_package", "einops.no_such_module"):
        with pytest.raises(ModuleNotFoundError) as error:
            __import__(name)
        assert not absent(error.value)


@pytest.mark.slow
def test_tests_are_skipped_without_their_extra(tmp_path: Path) -> None:
    """The import may be in the test file or in a helper that the test calls."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    files = ("tests/api/test_einops.py", "tests/api/test_huggingface.py")
    helped = "tests/api/test_generation.py::test_generator_refuses_unsupported_models_by_name"
    command = [sys.executable, "-m", "pytest", "-p", "blocks", "-q", "-rs", *files, helped]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 3
    assert all("is not installed: pip install '.[examples]'" in line for line in reasons)
    assert "passed" not in done.stdout and "failed" not in done.stdout
