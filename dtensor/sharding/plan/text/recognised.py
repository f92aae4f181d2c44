"""Which of the user's patterns became one op, and which did not and why.

    recognised
      dt.attention  model.layers.*.self_attn  x32  sdpa_attention.py:193
    as written
      rope          model.layers.*.self_attn  x32  its halves are not those of one tensor

Repeated layers are one row. Invariant: the rows are in the order of the program. Not here: what is
recognised (frontend/capture/recognise).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dtensor.sharding.plan.recognised import Recognised
from dtensor.sharding.plan.text.words import table

_NOTHING = "nothing of this program is a pattern that is looked for"


def recognised_text(recognised: Iterable[Recognised]) -> str:
    """The two tables; a sentence where both are empty."""
    counts = Counter(
        (each.op or each.what, _place(each), _why(each), each.op) for each in recognised
    )
    parts: list[str] = []
    for title, wanted in (("recognised", True), ("as written", False)):
        rows = [
            (f"  {name}", place, f"x{count}", why)
            for (name, place, why, op), count in counts.items()
            if bool(op) == wanted
        ]
        if rows:
            parts += [title, *table(rows, left=4)]
    return "\n".join(parts) or _NOTHING


def _place(each: Recognised) -> str:
    """The path of a module, of repeated layers with a star for the number."""
    return ".".join("*" if part.isdigit() else part for part in each.module.split("."))


def _why(each: Recognised) -> str:
    return "  ".join(text for text in (each.reason, each.source) if text)
