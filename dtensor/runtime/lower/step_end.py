"""The end of a step on one rank: sums over microbatches, tied gradients, the norm, the update.

    F0 B0    total = grad_w.to(float32)        a gradient of bf16: its total is float32
    F1 B1    total = total + grad_w             now in storage of its own
    F2 B2    total = total.add_(grad_w)

A sum over microbatches is added to when an action ends. The first sum is the gradient itself, which
may be a view of a value with other readers; the second is new, and only the next sum reads it: from
then on it grows in place. The norm counts every element of every gradient once (a replica only
where its coordinate is 0, a tied parameter only on its first stage), folded over each axis of the
mesh in turn; the update is one call of the rank's torch.optim optimizer, on the rank's shard of
each parameter or, if state is stored split, on its slice.

Before state is written, and at the end of a program that writes none, all ranks agree whether a
call of any of them failed: the votes are summed along each axis of the mesh in turn, with the
norm's sums of squares if there is a norm.

    norm_squares_tp, vote.tp = all_reduce.sum(norm_squares, rank.vote) over (0, 1)
    commit vote.tp

Invariants: a sum over microbatches is a left fold in the order of the schedule, which in the
published ones is that of microbatches; later steps find it by `RankBuilder.accumulated`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Buffer, Commit, Label, Vote
from dtensor.daft.ir.code import tuple_text
from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower import moves
from dtensor.runtime.lower.code import ADDING, COPIES
from dtensor.runtime.lower.rank_builder import RankBuilder
from dtensor.runtime.optimizer.flat_buffers import filled, together
from dtensor.runtime.optimizer.shard_optimizer import (
    ELEMENTWISE,
    MASTER,
    ShardOptimizer,
    Updated,
    clip_divisor,
    has_kernel,
    kernel_divides,
    sum_of_squares,
    unscaled_squares,
    unscaling_divisor,
    value_name,
)
from dtensor.runtime.schedule import Action
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Update,
    norm_of,
    updates_of,
)
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Replicate
from dtensor.sharding.spec.shards import Where, block, given, write
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.state_writes import StateWrites


SCALE = "scale of the loss"
"""An input of each rank, a number, where the loss is scaled."""


def accumulate(b: RankBuilder, action: Action, owned: set[str]) -> None:
    """Add the outputs that the steps of this action have made to their sums; ``owned``: the sums
    that have their own storage."""
    last = action.microbatch == b.plan.num_microbatches - 1
    for step in b.shared.actions.sums(action.kind, action.stage):
        _add(b, step, owned, last=last)


def _add(b: RankBuilder, step: Accumulate, owned: set[str], *, last: bool) -> None:
    segment = b.short_segment()
    total = step.result if last else f"{step.result}@{b.microbatch}"
    segment.table[step.result] = total
    previous = b.accumulated.get(step.result)
    if previous is None:
        text, op = f"{step.result} = {step.operand}", ""
        if step.src.dtype != step.dst.dtype:
            text, op = f"{text}.to({segment.code.literal(step.dst.dtype, ())})", COPIES
        else:
            b.shares(total, b.value(step.operand))
        segment.code.line(text, [step.operand], [step.result], op=op)
    else:  # float32 and bf16 are added in float32
        before = f"{step.result}_before"
        segment.table[before] = previous
        in_place = step.result in owned
        if in_place:
            b.shares(total, previous)
        added = f"{before}.add_({step.operand})" if in_place else f"{before} + {step.operand}"
        owned.add(step.result)
        text = f"{step.result} = {added}"
        segment.code.line(text, [before, step.operand], [step.result], op=ADDING)
    b.price(step)
    b.accumulated[step.result] = total
    b.nbytes[total] = step.dst.local_nbytes(b.here)


def sum_tied(b: RankBuilder, step: Redistribute) -> None:
    """Emit the sum of a gradient over the stages that share its parameter, in order of stages."""
    mine = [i for i, stage in enumerate(step.tied) if stage in b.stages]
    hosts = tuple(dict.fromkeys(b.peer(stage) for stage in step.tied))
    first, (label,), spec = mine[0], step.of, step.moves[0].dst
    operands = _addends(b, step, mine)
    total = operands[0]
    if len(mine) > 1:  # this rank has several of the stages: their sum is local
        total = f"{step.results[first]}_here"
        b.segment().code.line(f"{total} = {' + '.join(operands)}", operands, [total], op=ADDING)
        b.record(total, spec)
    if len(hosts) > 1:
        b.collective(
            "all_reduce",
            f"tied {label}",
            (b.held(total, spec),),
            (b.held(step.results[first], spec),),
            step.label,
            way=f"over stages {step.tied}",
            group=hosts,
            op="sum",
        )
        total = step.results[first]
    for i in mine:
        if step.results[i] != total:
            b.renamed(total, step.results[i])
        b.record(step.results[i], spec)


def _addends(b: RankBuilder, step: Redistribute, mine: Sequence[int]) -> list[str]:
    """The gradients of this rank's stages; those of 16-bit parameters in float32."""
    operands, spec = [step.operands[i] for i in mine], step.moves[0].dst
    parameter = next(i for i in b.plan.inputs if i.label in step.of)
    if parameter.spec.dtype == spec.dtype:
        return operands
    code = b.segment().code
    dtype = code.literal(spec.dtype, ())
    for operand in operands:
        wide = f"{operand}_wide"
        code.line(f"{wide} = {operand}.to({dtype})", [operand], [wide], op=COPIES)
        b.record(wide, spec)
    return [f"{operand}_wide" for operand in operands]


def counts(b: RankBuilder, spec: TensorSpec) -> bool:
    """Whether this rank is the one among replicas whose copy enters the norm."""
    here = b.here
    return all(
        here[axis] == 0
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Replicate) and axis != MICROBATCH_AXIS
    )


def norm(b: RankBuilder, step: Norm) -> None:
    """The sum of squares here, folded over each axis of the mesh, then the divisor of the
    gradients."""
    counted = [
        value
        for (stage, value, _), spec in zip(step.operands, step.specs, strict=True)
        if stage in b.stages and counts(b, spec)
    ]
    name = f"{step.result}_squares"
    kept = Buffer((), step.dtype)
    wide = () if kept == WORD else (kept.dtype,)
    if step.scaled:
        segment = b.segment()
        segment.table["scale"] = SCALE
        segment.code.apply(unscaled_squares, [counted, "scale"], [name], b.shared.device, *wide)
    else:
        b.segment().code.apply(sum_of_squares, [counted], [name], b.shared.device, *wide)
    b.nbytes[name] = kept.nbytes
    name = _summed(b, name, kept)
    pair = (step.result, f"{step.result}_clip")
    if step.scaled:
        segment = b.segment()
        segment.table["scale"] = SCALE
        segment.code.apply(unscaling_divisor, [name, "scale"], pair, step.max_norm)
    else:
        b.segment().code.apply(clip_divisor, [name], pair, step.max_norm)
    b.nbytes.update(dict.fromkeys(pair, kept.nbytes))


def agree(b: RankBuilder) -> None:
    """The commit point, unless it came with the norm."""
    if b.shared.agrees(b.roles) and not b.agreed:
        b.close()
        _summed(b, None)


def _summed(b: RankBuilder, squares: str | None, kept: Buffer = WORD) -> str:
    """Sum squares over all ranks, and with them the votes: the commit point. ``kept``: the buffer
    of a sum of squares."""
    agrees, vote, what = b.shared.agrees(b.roles), "rank.vote", "the votes"
    if squares is not None:
        what = "the norm and the votes" if agrees else "the norm"
    if agrees:
        b.start(Vote(vote, label=b.label.doing("vote")))
    for axis, num in b.plan.mesh.shape.items():
        if num > 1:
            names = (*([squares] if squares else []), *([vote] if agrees else []))
            squares = squares and f"{squares}_{axis}"
            vote = f"vote.{axis}"
            made = (*([squares] if squares else []), *([vote] if agrees else []))
            words = (*([kept] if squares else []), *([WORD] if agrees else []))
            sent, given = (tuple(zip(side, words, strict=True)) for side in (names, made))
            b.collective("all_reduce", axis, sent, given, what, op="sum")
    if agrees:
        b.start(Commit(vote, label=b.label.doing("commit")))
        b.agreed = True
    return squares or vote


def snapshot(b: RankBuilder, state: StateWrites | None) -> dict[str, str]:
    """Copy the results that may be views of state that the step changes, or is about to change.
    Returns the copy by the program's name of a result."""
    copies: dict[str, str] = {}
    if b.roles.optimizer is not None:
        b.segment()  # all ranks have one, with a result or without
    for output in b.plan.outputs:
        for stage, value in output.values[:1] if output.kind == "result" else ():
            shared = b.roles.optimizer is not None or (state is not None and state.shares(value))
            if stage in b.stages and shared:
                name = f"result_{output.of}_copy"
                read = value if state is None else state.read([value])[0]
                b.segment().code.line(f"{name} = {read}.clone()", [read], [name], op=COPIES)
                b.nbytes[name] = b.shared.nbytes(output.spec, b.here)
                copies[f"result {output.of}"] = name
    b.close()
    return copies


def _updates(b: RankBuilder) -> list[Update]:
    """The updates of the parameters here; one per rank, even if a parameter is on several
    stages."""
    every = updates_of(b.plan.steps, b.stages)
    return list({s.parameter: s for s in reversed(every)}.values())[::-1]


def optimizer_values(b: RankBuilder) -> dict[str, tuple[str, str]]:
    """The table's names of the state that the update has, to parameter and key. It notes bytes."""
    roles = b.roles
    keys_of = {n: k for group, k in zip(roles.groups, roles.keys, strict=False) for n in group}
    names: dict[str, tuple[str, str]] = {}
    for step in _updates(b) if roles.optimizer is not None and keys_of else ():
        narrow = (MASTER,) if step.master_bytes else ()
        width = torch.float32 if narrow else step.spec.dtype
        numel = b.shared.nbytes(step.spec, b.here) // step.spec.dtype.itemsize
        (label,) = roles.called([step.parameter])
        for key in (*keys_of[step.parameter], *narrow):
            name = value_name(roles.optimizer or "", key, label)
            names[name] = label, key
            b.nbytes[name] = WORD.nbytes if key in roles.numbers else numel * width.itemsize
    return names


def update(b: RankBuilder) -> None:
    """One call that steps the rank's optimizer with all its gradients."""
    optimizer = b.roles.optimizer
    if optimizer is None:
        return
    updates = _updates(b)
    inputs = {i.label: i for i in b.plan.inputs}
    norm = norm_of(b.plan.steps)
    clip = norm and f"{norm.result}_clip"
    b.close()
    b.label = Label("update")
    segment = b.segment()
    for step in updates:
        b.price(step)
    names = [inputs[s.parameter].name for s in updates]
    gradients = [s.gradient for s in updates]
    segment.table["optimizer"] = optimizer
    values = optimizer_values(b)
    state = {f"optimizer_{at}": name for at, name in enumerate(values)}
    segment.table |= state
    segment.writes = (*state, *names)
    parts = [_slice(b, inputs[s.parameter], s) for s in updates]
    code = segment.code
    function = code.bind("step_optimizer", step_optimizer)
    called = b.roles.called
    cut = called(s.parameter for s, n, p in zip(updates, names, parts, strict=True) if n != p)
    divides = norm is not None and kernel_divides(norm.dtype)
    anew = _made_anew(b, updates) if divides else ()
    labels, groups = called(s.parameter for s in updates), tuple(map(called, b.roles.groups))
    what = code.bind("updated", Updated(groups, labels, tuple(values.values())))
    given = f"{tuple_text(parts)}, {tuple_text(gradients)}, {tuple_text(tuple(state))}, {clip}"
    given += f", {code.bind('parts', cut)}, {code.bind('own', called(anew))}" if cut or anew else ""
    reads = ["optimizer", "options", *state, *parts, *gradients, *([clip] if clip else [])]
    copied = _copied_bytes(b, updates, anew if clip else None)
    if copied:
        code.line(f'"copies {copied} B of gradients"', (), ())
    code.line(f"{function}(optimizer, {what}, options, {given})", reads, (), called=function)
    for step, name, part in zip(updates, names, parts, strict=True):
        where = _where(b, inputs[step.parameter], step)
        if part != name and any(len(intervals) > 1 for intervals in where):  # a slice is a copy
            code.apply(write, [name, part], (), layout=where)
    b.close()
    for step in b.plan.steps:
        if isinstance(step, Redistribute) and step.in_place and step.stage in b.stages:
            b.label = Label("regather")
            started = moves.redistribute(b, step, wait=False)
            assert started is not None, "updated parameters are gathered"
            moves.finish(b, started)
    b.label = Label("optimizer")


def _where(b: RankBuilder, item: PlannedInput, step: Update) -> Where:
    """The places, in the rank's shard of the parameter, of the elements that this rank updates."""
    return given(item.held, step.spec, b.here, b.here)


def _slice(b: RankBuilder, item: PlannedInput, step: Update) -> str:
    """The part of a parameter that this rank updates; a view where it is one block."""
    if step.spec == item.held:
        return item.name
    part = f"{item.name}_part"
    b.segment().code.apply(block, [item.name], [part], _where(b, item, step))
    return part


_ANEW = frozenset(
    f"aten.{op}"
    for op in (
        *("add", "addmm", "bmm", "convolution_backward", "embedding_dense_backward", "mean"),
        *("mm", "mul", "native_layer_norm_backward", "sum"),
    )
)
"""Ops whose results have their own memory."""


def _made_anew(b: RankBuilder, updates: Sequence[Update]) -> tuple[str, ...]:
    """The parameters whose gradients a kernel may write to: results of a sum or a message that only
    the update reads. A gradient that may be a view of such a one is not among them, so it is copied
    before."""
    if b.roles.gradients:
        return ()
    producers = {name: step for step in b.plan.steps for name in step.gives}
    taken: dict[str, str] = {}  # gradient to its first parameter
    for update in updates:
        match producers.get(update.gradient):
            case Compute() as step:
                name = b.shared.local_call(step, b.here).name  # aten.sum.dim_IntList
                anew = name.rpartition(".")[0] in _ANEW
            case Accumulate():
                anew = b.plan.num_microbatches > 1
            case Redistribute() as step:
                anew = not step.is_free
            case _:
                anew = False
        if anew:
            taken.setdefault(update.gradient, update.parameter)
    return tuple(taken.values())


def _copied_bytes(b: RankBuilder, updates: Sequence[Update], anew: Sequence[str] | None) -> int:
    """Bytes of gradients that the update copies: small ones, to be end to end like their parameters
    (flat_buffers.py), unless they are parts of one message; those of another dtype than the updated
    tensor; and, if there is a norm, those that a kernel may not write to (``anew``). Unknown here,
    and copied too: gradients whose elements are not in order in memory; and, if the user chose an
    implementation of the update and there is a norm, all."""
    scattered = {
        name: (step.name, at)
        for step in b.plan.steps
        if isinstance(step, Redistribute) and step.bucket and step.kind == "reduce_scatter"
        for at, name in enumerate(step.results)
    }
    specs = b.plan.value_specs()
    by_label = {update.parameter: update for update in updates}
    dtypes = {u.parameter: torch.float32 if u.master_bytes else u.spec.dtype for u in updates}
    device = b.shared.device
    fused = all(has_kernel(u.optimizer, dtypes[u.parameter], device) for u in updates)
    total = 0
    for group in b.roles.groups or (tuple(by_label),):
        alike: dict[tuple[torch.dtype, torch.dtype], list[Update]] = {}
        for update in (by_label[label] for label in group if label in by_label):
            key = update.spec.dtype, dtypes[update.parameter]
            alike.setdefault(key, []).append(update)
        for (_, dtype), some in alike.items():
            sizes = [math.prod(update.spec.local_shape(b.here)) for update in some]
            for run in together(sizes):
                gradient_specs = [specs[some[at].gradient] for at in run]
                places = [scattered.get(some[at].gradient, ("", -at)) for at in run]
                first, begin = places[0]
                stands = (
                    places == [(first, begin + i) for i in range(len(run))]
                    and all(spec.dtype == dtype for spec in gradient_specs)
                    and all(sizes[at] == filled(sizes[at], dtype) for at in run)
                )
                kept = anew is None and some[0].optimizer in _KNOWN
                written = kept or (
                    anew is not None and fused and all(some[at].parameter in anew for at in run)
                )
                if not (stands and written):
                    total += sum(spec.local_nbytes(b.here) for spec in gradient_specs)
    return total


_KNOWN = frozenset(cls.__name__ for cls in ELEMENTWISE)
"""Optimizers that may write to the gradients, so they get copies of them."""


def publish(b: RankBuilder, outputs: Mapping[str, str]) -> None:
    """Give the values that the program returns their output names."""
    b.close()
    b.label = Label("outputs")
    segment = b.segment()
    for number, (name, value) in enumerate(outputs.items()):
        result = f"out{number}"
        read = f"value{number}"
        segment.table[read] = value
        segment.table[result] = name
        segment.views[result] = read
        b.nbytes[name] = b.nbytes.get(value, 0)
        b.shares(name, value)
        segment.code.line(f"{result} = {read}", [read], [result])
    b.close()


# -- functions that generated code calls
# ---------------------------------------------------------------------


def step_optimizer(
    optimizer: ShardOptimizer,
    what: Updated,
    options: tuple[dict[str, object], ...],
    shards: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    clip: torch.Tensor | None,
    parts: tuple[str, ...] = (),
    own: tuple[str, ...] = (),
) -> None:
    """Runs on actors: `ShardOptimizer.step`."""
    by_label = dict(zip(what.labels, shards, strict=True))
    grads = dict(zip(what.labels, gradients, strict=True))
    optimizer.step(what, by_label, options, grads, values, clip, parts, own)
