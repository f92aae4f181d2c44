"""Tests that the examples of docs/testing.md run and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Return (language, text) of each block, in the order of the page."""
    return [(m[1], m[2]) for m in _BLOCK.finditer(PAGE.read_text())]


def files() -> dict[str, str]:
    """Return the blocks that start with a comment that names a file."""
    found: dict[str, str] = {}
    for language, text in blocks():
        name = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and name:
            found[name[1]] = text
    return found


def test_testing_page_has_only_python_and_output_blocks() -> None:
    kinds = [language for language, _ in blocks()]
    assert set(kinds) == {"python", "text"}
    assert kinds.count("text") == 2
    assert set(files()) == {"conftest.py", "test_attention.py"}


def test_testing_page_blocks_run_and_print_shown_output() -> None:
    namespace: dict[str, Any] = {"__name__": "docs_testing"}
    printed, ran = "", 0
    for language, text in blocks():
        if language == "text":
            assert printed == text
            continue
        if text in files().values():
            continue
        # plans and capture must find the source lines of the page
        linecache.cache["docs_testing.py"] = (
            len(text),
            None,
            text.splitlines(keepends=True),
            "docs_testing.py",
        )
        before = set(namespace)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs_testing.py", "exec"), namespace)
        printed = out.getvalue()
        for name in sorted(set(namespace) - before):
            if name.startswith("test_"):
                namespace[name]()
                ran += 1
    assert ran == 5


def test_testing_page_fixture_works_in_user_project(tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    # as in pyproject.toml: trio (from selenium) registers an unreferenced object with Hypothesis
    ignored = "ignore:It looks like .register_random. was passed"
    ini = f"[pytest]\nfilterwarnings =\n    error\n    {ignored}\n"
    (tmp_path / "pytest.ini").write_text(ini)
    outcome = Outcome()
    # in this process, because a new one would import torch again
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    code = pytest.main([*options, f"--rootdir={tmp_path}", str(tmp_path)], plugins=[outcome])
    assert code == 0, outcome.failed
    assert outcome.passed == 5


class Outcome:
    """Counts the outcomes of the tests of the inner run."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.longreprtext)
