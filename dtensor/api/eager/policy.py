"""`implicit_redistribution`: whether an op on DTensors may communicate without being told to.

    with dt.implicit_redistribution("error"):
        y = x @ w            # raises, before anything runs, if a collective were needed

    dt.implicit_redistribution("allow")       # from now on, for the whole process

Implicit is what one op's plan sends (`moves_of`). Not implicit: `redistribute`, `full_tensor`,
`local_tensors`, reading a value; nor what sends nothing (taking a part of a replicated value).

An actor's method that is given a DTensor reads it too: implicit where it is not replicated.

Invariants: "warn", the default, warns once per line of the user's program. "error" raises before
anything runs, operands unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, get_args

from dtensor.errors import PlanningError
from dtensor.frontend.source import Source, source_here
from dtensor.sharding.plan.cost.seconds import PlannedCollective
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import size_text
from dtensor.sharding.redistribute.moves import Move

Policy = Literal["allow", "warn", "error"]


class implicit_redistribution:
    """Set what happens when an op must communicate; as a context manager, for the block.
    ``policy``:

    "allow": nothing is said. "warn": once per source line, with the op, the specs before and after
    and the bytes that a rank sends. "error": PlanningError, before anything runs.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in get_args(Policy):
            raise PlanningError(
                f'implicit_redistribution({policy!r}): it is "allow", "warn" or "error"'
            )
        self._before: Policy = _state.policy
        _state.policy = policy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _state.policy = self._before


@dataclass(slots=True)
class _State:
    policy: Policy = "warn"
    warned: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


_state = _State()


def check_moves(op: str, moves: Sequence[tuple[str, Move]]) -> None:
    """Called for an op that sends ``moves`` without being told to; before it runs."""
    lines = [
        f"{label}: {move.src} -> {move.dst}: {move.kind} over {move.axis}, "
        f"{size_text(move.bytes_sent)} sent per rank"
        for label, move in moves
    ]
    check_sent(op, lines, "op")


def check_sent(op: str, sent: Sequence[str], before: str) -> None:
    """Called for what sends, as ``sent`` says, without being told to; ``before``: what it is."""
    match _state.policy:
        case "allow":
            pass
        case "warn":
            source = source_here()
            place = (source.file, source.line) if source is not None else ("", 0)
            if place not in _state.warned:
                _state.warned.add(place)
                message = f"implicit redistribution in {_text(op, sent, before, source)}"
                warnings.warn_explicit(message, UserWarning, *place)
        case "error":
            raise PlanningError(
                f"{_text(op, sent, before, source_here())}".replace(
                    op, f"{op} would redistribute implicitly", 1
                )
            )


def _text(op: str, sent: Sequence[str], before: str, source: Source | None) -> str:
    lines = [op, *(f"  {line}" for line in sent)]
    if source is not None:
        lines.append(f"  {source}: {source.text}")
    lines.append(
        f"fix: say it with x.redistribute(...) before the {before}, or "
        'dt.implicit_redistribution("allow")'
    )
    return "\n".join(lines)


RECORDINGS: list[list[PlannedCollective]] = []
"""Lists to which ops on DTensors add what they send."""


@contextmanager
def eager_collectives() -> Iterator[list[PlannedCollective]]:
    """Within, what ops on DTensors send, `redistribute` too, in their order; of the kind that
    `Plan.collectives` has.

        >>> x = dt.distribute(torch.ones(4, 8), dt.Mesh(tp=2), tp=dt.Row())
        >>> with dt.testing.eager_collectives() as sent:
        ...     y = x.redistribute(tp=dt.Replicate())
        >>> [(c.key, c.bytes_sent) for c in sent]
        [('all_gather@tp', 64)]

    Reading a value, as `full_tensor` does, is no collective. Raises nothing of its own.
    """
    collectives: list[PlannedCollective] = []
    RECORDINGS.append(collectives)
    try:
        yield collectives
    finally:
        RECORDINGS[:] = [one for one in RECORDINGS if one is not collectives]


# -- what one op sends -----------------------------------------------------------------------------

_REARRANGING = ("aten.reshape.default", "aten.permute.default", "aten.expand.default")


def moves_of(
    planned: Plan, places: Mapping[str, int], operands: Sequence[str]
) -> tuple[tuple[str, Move], ...]:
    """What an op's plan sends: the operand's name in torch's schema, or the op whose result it is.

    ``places``: the operands among the plan's inputs, as indices of ``operands``, their names.
    """
    labels = {name: operands[index] for name, index in places.items()}
    sent: list[tuple[str, Move]] = []
    for step in planned.steps:
        for operand, result, move in zip(step.reads, step.gives, step.moves):
            label = labels[result] = labels.get(operand, operand)
            if step.sends:
                sent.append((label, move))
        if step.op is not None:
            name = step.op.call.name
            view = name in _REARRANGING and len(step.reads) == 1
            source = labels.get(step.reads[0]) if view else None
            label_of_result = source or f"the result of {name.removeprefix('aten.').split('.')[0]}"
            labels.update(dict.fromkeys(step.gives, label_of_result))
    return tuple(sent)
