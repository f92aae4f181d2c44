"""Conversion of outputs to their final specs, move by move; messages of gradients share buckets.

item = Pending(output, "grad_w", f32[64,16]{sum@dp}, "w", is_new=False, path=(...))
convert(emitter, [item, ...])        # gradients_dp = reduce_scatter(2 gradients, dp)
item.name                            # "grad_w_scattered"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor.sharding.plan.dataflow import Output
from dtensor.sharding.plan.emit.values import Emitter
from dtensor.sharding.plan.steps import Redistribute, StepPhase, fill_buckets
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(slots=True)
class Pending:
    """An output that is being converted to its final spec. ``name`` and ``spec`` are its present
    value, ``path`` the moves that remain, and ``of`` the label of an input, or "result 0".
    ``is_new``: whether no op made the value. ``scattered``: whether the path reduces a gradient
    by scattering and gathering it. ``is_delayed``: whether it is a gradient of the step before.
    ``bucket``: the name of the buckets in which all its messages travel; "" if only its reductions
    do."""

    output: Output
    name: str
    spec: TensorSpec
    of: str
    is_new: bool
    path: tuple[Move, ...] = ()
    scattered: bool = False
    is_delayed: bool = False
    bucket: str = ""

    def is_bucketed(self) -> bool:
        """Return whether the next move of a trained parameter or its gradient is in a bucket."""
        move = self.path[0]
        is_message = move.kind not in FREE_KINDS
        return (
            move.reduces
            or (self.scattered and move.kind == "all_gather")
            or (bool(self.bucket) and is_message)
        )


def convert(e: Emitter, pending: Sequence[Pending]) -> None:
    """Emit all moves of the outputs."""
    while any(item.path for item in pending):
        _advance(e, pending)


def _advance(e: Emitter, pending: Sequence[Pending]) -> None:
    """Emit the next move of each output; reductions of gradients on one axis share buckets."""
    buckets: dict[tuple[object, ...], list[Pending]] = {}
    for item in pending:
        if not item.path:
            continue
        move = item.path[0]
        trained = item.output.kind == "gradient" and _trains(e)
        if trained and item.is_bucketed():
            key = (move.axis, item.output.stage, item.spec.dtype, move.kind)
            buckets.setdefault(key, []).append(item)
        else:
            move_one(e, item, move)
    for items in buckets.values():
        for group in fill_buckets(items, [item.spec.max_local_nbytes for item in items]):
            _send_together(e, group)


def move_one(e: Emitter, item: Pending, move: Move) -> None:
    """Emit the next move of one output."""
    after_microbatches = MICROBATCH_AXIS in e.mesh.axes or _trains(e)
    producer = e.request.flow.producers.get(item.output.value)
    result = e.fresh(f"{item.name}_{move.suffix}")
    e.steps.append(
        Redistribute(
            results=(result,),
            operands=(item.name,),
            moves=(move,),
            phase="optimizer" if after_microbatches else phase_of(item.output),
            stage=item.output.stage,
            source=producer.source if producer else "",
            of=(item.of,) if item.bucket else (),
            why=f"{item.of} is wanted as {move.dst}",
        )
    )
    item.name, item.spec, item.path = result, move.dst, item.path[1:]


def _send_together(e: Emitter, items: Sequence[Pending]) -> None:
    """Emit the next move of several gradients as one bucket, which is one message."""
    first = items[0].path[0]
    results = tuple(e.fresh(f"{item.name}_{first.suffix}") for item in items)
    e.steps.append(
        Redistribute(
            bucket=e.fresh(f"{items[0].bucket or 'gradients'}_{first.axis}"),
            results=results,
            operands=tuple(item.name for item in items),
            moves=tuple(item.path[0] for item in items),
            phase="optimizer",
            stage=items[0].output.stage,
            of=tuple(item.of for item in items),
        )
    )
    for item, result in zip(items, results, strict=True):
        item.name, item.spec, item.path = result, item.path[0].dst, item.path[1:]


def _trains(e: Emitter) -> bool:
    return e.request.training is not None


def phase_of(output: Output) -> StepPhase:
    """Return the phase that produces the output."""
    return "forward" if output.kind == "result" else "backward"
