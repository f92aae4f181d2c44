"""The examples of docs/schedules.md run, and print what the page says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_examples_print_what_is_written() -> None:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "docs_schedules"}
    printed = ""
    for language, text in found:
        if language == "text":
            assert printed == text
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs_schedules.py", "exec"), names)
        printed = out.getvalue()
    assert sum(language == "text" for language, _ in found) == 4
