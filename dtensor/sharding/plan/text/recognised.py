"""Renders the tables of `Plan.recognised`: patterns that became one op, and patterns left as
written, with the reason. Repeated layers share a row; rows are in program order.

    recognised
      dt.attention  model.layers.*.self_attn  x32  sdpa_attention.py:193
    as written
      rope          model.layers.*.self_attn  x32  its halves are not those of one tensor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dtensor.sharding.plan.dataflow import Recognised, without_numbers
from dtensor.showing import table

_NO_PATTERNS_TEXT = "nothing of this program is a pattern that is looked for"


def recognised_text(recognised: Iterable[Recognised]) -> str:
    """Return the two tables; a sentence if there are no patterns."""
    counts = Counter(
        (
            each.op or each.what,
            without_numbers(each.module),
            "  ".join(text for text in (each.reason, each.source) if text),
            each.op,
        )
        for each in recognised
    )
    parts: list[str] = []
    for title, became_op in (("recognised", True), ("as written", False)):
        rows = [
            (f"  {name}", module, f"x{count}", note)
            for (name, module, note, op), count in counts.items()
            if bool(op) == became_op
        ]
        if rows:
            parts += [title, *table(rows, "<<<<>")]
    return "\n".join(parts) or _NO_PATTERNS_TEXT
