"""Random programs of tasks give the same in four ways (`python -m tests.daft.explore --tasks`)."""

from __future__ import annotations

import pytest

from tests.daft.task_programs import compared
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = pytest.mark.ray


def test_programs_are_alike(ray_session: None) -> None:
    count, wrong = compared(range(1000, 1024))
    assert not wrong
    assert len(count) == 2
