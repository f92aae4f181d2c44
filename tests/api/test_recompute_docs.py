"""The example of docs/recompute.md runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recompute.md"


def test_the_example_prints_what_is_written() -> None:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in found] == ["python", "text"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(found[0][1], "docs_recompute.py", "exec"), {"__name__": "docs_recompute"})
    assert out.getvalue() == found[1][1]
