"""A segment: local code between two communications, while it is being put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtensor.runtime.lower.code import CodeBuilder


@dataclass(slots=True)
class Segment:
    """Local code under construction; ``rename`` maps names in the code to names in the table."""

    code: CodeBuilder
    label: str
    microbatch: int | None
    table: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    seconds: float = 0.0  # predicted, where the lowering is priced
