"""The page docs/randomness.md runs as it stands, and prints what stands below each example."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "randomness.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_prints_what_it_shows() -> None:
    namespace: dict[str, Any] = {"__name__": "docs_randomness"}
    printed, shown = "", 0
    for language, text in ((m[1], m[2]) for m in _BLOCK.finditer(PAGE.read_text())):
        if language == "text":
            assert printed == text
            shown += 1
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs_randomness.py", "exec"), namespace)
        printed = out.getvalue()
    assert shown == 3
