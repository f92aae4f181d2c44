"""A pattern that recognition met, as the rewrites leave it; fusion_report.py gives it the user's
names."""

from __future__ import annotations

from typing import Any, NamedTuple


class PatternMatch(NamedTuple):
    """``op``: what it became, or ""; ``reason``: why it did not; ``meta``: its last node's."""

    what: str
    op: str
    reason: str
    meta: dict[str, Any]
