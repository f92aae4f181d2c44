"""The pages of docs/ run as they stand, each as one program, and print what stands below each
example. docs/testing.md and docs/daft.md have files of their own: tests/testing, tests/daft."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import dtensor as dt

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("compare", "eager", "precision", "randomness", "recompute", "schedules", "traces", "zero")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_shows(page: str) -> None:
    names: dict[str, Any] = {"__name__": f"docs_{page}"}
    printed, shown = "", 0
    with dt.implicit_redistribution("warn"):  # and what a page sets ends here
        for language, text in _BLOCK.findall((DOCS / f"{page}.md").read_text()):
            if language == "text":
                assert printed == text
                printed = ""
                shown += 1
                continue
            assert language == "python"
            assert not printed, "what an example prints stands below it"
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, f"docs_{page}.py", "exec"), names)
            printed = out.getvalue()
    assert shown and not printed


def test_every_page_with_examples_is_run() -> None:
    having = {p.stem for p in DOCS.glob("*.md") if "```python" in p.read_text()}
    assert having - {"testing", "daft"} == set(PAGES)
