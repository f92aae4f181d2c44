"""The page docs/eager.md runs as it stands, and prints what stands below each example."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import dtensor as dt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "eager.md"


def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    parts = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [kind for kind, _ in parts] == ["python", "text"] * (len(parts) // 2)
    names: dict[str, Any] = {}
    with dt.implicit_redistribution("warn"):  # and what the page sets ends here
        for (_, code), (_, wanted) in zip(parts[::2], parts[1::2], strict=True):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(PAGE), "exec"), names)
            assert printed.getvalue() == wanted
