"""`tests.replay`, the comparison of plans and programs between two revisions."""

from __future__ import annotations

import json
from pathlib import Path

from tests.replay import RAISED, difference, record, source_lines


def test_recorded_entry_has_the_plan_and_the_programs(tmp_path: Path) -> None:
    record(["compile sum"], tmp_path / "texts.json")
    [(name, text)] = json.loads((tmp_path / "texts.json").read_text()).items()
    assert name == "compile sum"
    assert "plan lambda    mesh(dp=2, tp=2)" in text and "program lambda" in text
    assert "def forward(" in text


def test_difference_names_changed_missing_and_failed_entries() -> None:
    base = dict(same="a", changed="a\nb", removed="a", failed="a")
    tree = dict(same="a", changed="a\nc", added="a", failed=f"{RAISED}KeyError: 'a'")
    assert list(difference(base, tree)) == [
        "added: only in the work tree",
        "changed: differs",
        "    --- base",
        "    +++ work tree",
        "    @@ -1,2 +1,2 @@",
        "     a",
        "    -b",
        "    +c",
        "failed: raised KeyError: 'a'",
        "removed: only at the base",
    ]


def test_equal_texts_have_no_difference() -> None:
    assert list(difference(dict(a="1"), dict(a="1"))) == []


def test_position_in_a_test_file_is_compared_by_its_line_of_code() -> None:
    lines = {"models.py": ["import torch", "    x = self.up(x)"]}
    text = "x = mm(a)  models.py:2  other.py:2  models.py:3"
    assert source_lines(text, lines) == (
        "x = mm(a)  models.py: x = self.up(x)  other.py:2  models.py:3"
    )
