"""`implicit_redistribution`: whether an op on DTensors may communicate if the user did not ask.

    with dt.implicit_redistribution("error"):
        y = x @ w            # raises, before anything runs, if a collective were needed

    dt.implicit_redistribution("allow")       # from now on, for the whole process

Implicit communication: what one op's plan sends (`moves_of`), and gathering a DTensor argument of
an actor's method. Explicit: `redistribute`, `full_tensor`, `local_tensors`, reading a value.
The default, "warn", warns once per line of the user's program.
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
    """Set what happens when an op must communicate, for the process, or as a context manager for
    the block. ``policy``:

    "allow": communicate silently. "warn": warn once per source line, with the op, the specs before
    and after, and the bytes that a rank sends. "error": raise PlanningError before anything runs.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in get_args(Policy):
            raise PlanningError(
                f'implicit_redistribution({policy!r}): it is "allow", "warn" or "error"'
            )
        self._previous_policy: Policy = _state.policy
        _state.policy = policy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _state.policy = self._previous_policy


@dataclass(slots=True)
class _State:
    """The process-wide policy, and the source lines that have warned."""

    policy: Policy = "warn"
    warned: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


_state = _State()


def check_moves(op: str, moves: Sequence[tuple[str, Move]]) -> None:
    """Apply the policy to an op that implicitly sends ``moves``, before it runs."""
    lines = [
        f"{label}: {move.src} -> {move.dst}: {move.kind} over {move.axis}, "
        f"{size_text(move.bytes_sent)} sent per rank"
        for label, move in moves
    ]
    check_sent(op, lines, "op")


def check_sent(op: str, transfers: Sequence[str], kind: str) -> None:
    """Apply the policy to implicit communication. ``transfers``: a line of text for each transfer;
    ``kind``: "op" or "call", before which the user can redistribute."""
    match _state.policy:
        case "allow":
            pass
        case "warn":
            source = source_here()
            file_and_line = (source.file, source.line) if source is not None else ("", 0)
            if file_and_line not in _state.warned:
                _state.warned.add(file_and_line)
                message = f"implicit redistribution in {_message(op, transfers, kind, source)}"
                warnings.warn_explicit(message, UserWarning, *file_and_line)
        case "error":
            raise PlanningError(
                f"{_message(op, transfers, kind, source_here())}".replace(
                    op, f"{op} would redistribute implicitly", 1
                )
            )


def _message(op: str, transfers: Sequence[str], kind: str, source: Source | None) -> str:
    """Return the text of a warning or error: the op, its transfers, the user's line and a fix."""
    lines = [op, *(f"  {line}" for line in transfers)]
    if source is not None:
        lines.append(f"  {source}: {source.text}")
    lines.append(
        f"fix: say it with x.redistribute(...) before the {kind}, or "
        'dt.implicit_redistribution("allow")'
    )
    return "\n".join(lines)


RECORDINGS: list[list[PlannedCollective]] = []
"""The lists of running `eager_collectives`: each op on DTensors adds its collectives to each."""


@contextmanager
def eager_collectives() -> Iterator[list[PlannedCollective]]:
    """Record the collectives of ops on DTensors within the block, including `redistribute`, in
    order. The records have the type of those in `Plan.collectives`.

        >>> x = dt.distribute(torch.ones(4, 8), dt.Mesh(tp=2), tp=dt.Row())
        >>> with dt.testing.eager_collectives() as sent:
        ...     y = x.redistribute(tp=dt.Replicate())
        >>> [(c.key, c.bytes_sent) for c in sent]
        [('all_gather@tp', 64)]

    Reading a value, as `full_tensor` does, is not a collective. Raises nothing itself.
    """
    collectives: list[PlannedCollective] = []
    RECORDINGS.append(collectives)
    try:
        yield collectives
    finally:
        RECORDINGS[:] = [other for other in RECORDINGS if other is not collectives]


# -- the transfers of one op -----------------------------------------------------------------------

_REARRANGING = ("aten.reshape.default", "aten.permute.default", "aten.expand.default")


def moves_of(
    planned: Plan, index_of_input: Mapping[str, int], operands: Sequence[str]
) -> tuple[tuple[str, Move], ...]:
    """Return the transfers of an op's plan, each with a label: the moved operand's name in torch's
    schema, or the op whose result is moved. ``index_of_input``: for each input of the plan, its
    index in ``operands``, the names."""
    labels = {name: operands[index] for name, index in index_of_input.items()}
    labeled_moves: list[tuple[str, Move]] = []
    for step in planned.steps:
        for operand, result, move in zip(step.reads, step.gives, step.moves):
            label = labels[result] = labels.get(operand, operand)
            if step.sends:
                labeled_moves.append((label, move))
        if step.op is not None:
            name = step.op.call.name
            view = name in _REARRANGING and len(step.reads) == 1
            source = labels.get(step.reads[0]) if view else None
            label_of_result = source or f"the result of {name.removeprefix('aten.').split('.')[0]}"
            labels.update(dict.fromkeys(step.gives, label_of_result))
    return tuple(labeled_moves)
