"""The result for one family as a line of JSON; the table is made of these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["right", "refused", "wrong", "not run"]


@dataclass(slots=True, kw_only=True)
class Record:
    """``stage``: where it ended: "configuration", "build", "torch", "for_model", "step", "compare",
    or "process"; ``split``: the number of patterns that for_model placed; ``captures``: of one
    train step over five calls; errors: of the losses and weights, relative to their largest."""

    family: str
    verdict: Verdict = "not run"
    stage: str = "configuration"
    model: str = ""
    parameters: int = 0
    split: int = 0
    captures: int = 0
    loss_error: float = 0.0
    weight_error: float = 0.0
    double: bool = False  # compared in float64, after float32 differed
    reason: str = ""
    trace: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
