"""The pages of docs/ run as they stand, each as one program, and print what stands below each
example. docs/testing.md, docs/daft.md and docs/from_scratch.md have files of their own:
tests/testing, tests/daft, tests/test_from_scratch.py."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import dtensor as dt

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (
    "checkpoints",
    "compare",
    "composition",
    "eager",
    "generation",
    "hangs",
    "kernels",
    "performance",
    "precision",
    "randomness",
    "recompute",
    "recovery",
    "rollouts",
    "schedules",
    "state",
    "switching",
    "sync",
    "traces",
    "zero",
)
ON_RAY = {"recovery"}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(name: str, text: str) -> dict[str, Any]:
    """Runs a page's examples; AssertionError where one prints other than what stands below it.

    Returns the names that they leave.
    """
    names: dict[str, Any] = {"__name__": name}
    printed, shown = "", 0
    dt.manual_seed(0)  # as where nothing has run before it
    with dt.implicit_redistribution("warn"):  # and what a page sets ends here
        for language, block in _BLOCK.findall(text):
            if language == "mermaid":
                continue
            if language == "text":
                assert printed == block
                printed = ""
                shown += 1
                continue
            assert language == "python"
            assert not printed, "what an example prints stands below it"
            with contextlib.redirect_stdout(io.StringIO()) as out:
                # dont_inherit: as a file of its own, without this one's `from __future__`
                exec(compile(block, f"{name}.py", "exec", dont_inherit=True), names)
            printed = out.getvalue()
    assert shown and not printed
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.ray] if p in ON_RAY else []) for p in PAGES]
)
def test_a_page_prints_what_it_shows(page: str) -> None:
    run_page(f"docs_{page}", (DOCS / f"{page}.md").read_text())


def test_every_page_with_examples_is_run() -> None:
    having = {p.stem for p in DOCS.glob("*.md") if "```python" in p.read_text()}
    assert having - {"testing", "daft", "from_scratch"} == set(PAGES)
