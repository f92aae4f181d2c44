"""The record of a pattern match, or of a match that failed."""

from __future__ import annotations

from typing import Any, NamedTuple


class PatternMatch(NamedTuple):
    """``what``: the pattern; ``op``: the op that replaced it, or ""; ``reason``: why it was not
    replaced; ``meta``: the meta of its last node."""

    what: str
    op: str
    reason: str
    meta: dict[str, Any]
