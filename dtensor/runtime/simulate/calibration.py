"""Calibration: ranks measure the `Topology` of their cluster.

    calibrate(cluster, Mesh(tp=2))      # Topology(latency={"tp": 7e-05}, bandwidth=..., flops=...)

Small programs run on all ranks at once, so contention for shared hardware is measured too. Each
rank times its instructions; their labels name what is measured. The first of the rounds, with cold
caches, has no labels. A figure is the mean over rounds and ranks, not the median, because a step is
a sum. Latency and bandwidth of an axis are fitted to the seconds of all its messages, by least
squares of the relative error. Ranks in one process take turns, so there each is measured alone.
Memory size and messages of several axes at once are not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Cluster,
    Collective,
    Free,
    Function,
    Instruction,
    Label,
    Program,
    RankProgram,
    Recv,
    Send,
    Wait,
)
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.run.timestamps import time_when_idle, times_of
from dtensor.runtime.lower.rank_builder import MAX_LINES
from dtensor.runtime.lower.updates import step_optimizer
from dtensor.runtime.optimizer.shard_optimizer import (
    ShardOptimizer,
    Updated,
    absent,
    hyperparameters,
    keys_of,
)
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh

NUM_EMPTY = 20
NUM_ROUNDS = 8
"""The number of rounds that count; one round runs before them."""
NUM_TINY = 50
"""The number of calls of "tiny", each with MAX_LINES tiny ops, as a Call of a step has at most."""
NUM_PRODUCTS = 3
STREAMED = 11
"""The number of tensors that "stream" reads or writes for each of its values."""
UPDATED = 7
"""The number of tensors that "update" reads or writes for each parameter: the parameter, its
gradient and AdamW's two states, as `step_seconds` counts them."""
SMALL = 16
"""The number of elements of a small message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of the timed work: large enough to keep a device busy, small enough to be quick."""

    matrix: int  # rows and columns
    attention: tuple[int, int, int, int]  # batch, heads, positions, width of a head
    stream: int  # elements of each tensor that "stream" reads
    streams: int  # number of these tensors; together they are larger than the caches
    message: int  # elements of a large message


CPU = _Sizes(matrix=384, attention=(1, 8, 128, 64), stream=2**18, streams=6, message=2**19)
GPU = _Sizes(matrix=4096, attention=(4, 16, 2048, 64), stream=2**25, streams=4, message=2**24)


def calibrate(cluster: Cluster, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Topology:
    """Measure and return the topology, in about a second on CPUs. Raises the errors of daft if a
    rank fails or stops."""
    device = cluster.device
    sizes = GPU if device.type == "cuda" else CPU
    busy = not isinstance(cluster, InProcessCluster)  # in one process no rank waits for another
    timed = _seconds(cluster, _local_program(mesh, sizes, dtype, device))
    local = {label.action: seconds for label, seconds in timed.items()}
    nbytes = sizes.streams * sizes.stream * dtype.itemsize
    memory_bandwidth = STREAMED * nbytes / local["stream"]
    fits: dict[str, tuple[float, float]] = {}
    for axis, num in mesh.shape.items():
        if num > 1:
            measured = _seconds(
                cluster, _message_program(mesh, axis, sizes, dtype, device, busy=busy)
            )
            numbers = {"small": SMALL, "large": sizes.message}
            sent = {size: n * dtype.itemsize for size, n in numbers.items()}
            fits[axis] = _fitted(measured, num, sent, memory_bandwidth)
    batch, heads, positions, width = sizes.attention
    tiny = _rounded(local["tiny"] / (NUM_TINY * MAX_LINES))  # the host's seconds of an op
    # the FLOP of a forward and its backward, as the rules of attention count them
    attention_flop = (1 + 2.5) * 2 * batch * heads * positions**2 * 2 * width
    where = "ranks side by side" if busy else "each rank alone in this process"
    return Topology(
        latency={axis: _rounded(fit[0]) for axis, fit in fits.items()},
        bandwidth={axis: _rounded(fit[1]) for axis, fit in fits.items()},
        flops=_rounded(NUM_PRODUCTS * 2 * sizes.matrix**3 / local["matmul"]),
        memory_bandwidth=_rounded(memory_bandwidth),
        op_latency=0.0 if device.type == "cuda" else tiny,
        launch_latency=tiny if device.type == "cuda" else 0.0,
        step_latency=_rounded(_empty_seconds(cluster, mesh)),
        attention_flops=_rounded(attention_flop / local["attention"]),
        # half of the streams are parameters, the other half gradients
        update_bandwidth=_rounded(UPDATED * (nbytes / 2) / local["update"]),
        name=f"calibrated on {mesh}, {device.type}, {where}",
    )


def _seconds(cluster: Cluster, program: Program) -> dict[Label, float]:
    """Return, by label, the seconds of its instructions in one round, the mean over ranks."""
    handle = cluster.load(program)
    outputs = cluster.run(handle, [{}] * cluster.size, mode="timed").get()
    cluster.unload(handle)
    by_rank: list[dict[Label, float]] = []
    for rank, outputs_of_rank in enumerate(outputs):
        spent: dict[Label, float] = {}
        instructions = program.ranks[rank].instructions
        for index, begin, end in times_of(outputs_of_rank):
            label = instructions[index].label
            if label is not None:
                spent[label] = spent.get(label, 0.0) + (end - begin) / NUM_ROUNDS
        by_rank.append(spent)
    labels = dict.fromkeys(label for spent in by_rank for label in spent)
    return {
        label: statistics.fmean(spent[label] for spent in by_rank if label in spent)
        for label in labels
    }


def _fitted(
    seconds_by_label: Mapping[Label, float], num: int, nbytes: Mapping[str, int], fastest: float
) -> tuple[float, float]:
    """Return (latency, bandwidth) of an axis of ``num`` ranks, fitted to the seconds of each kind
    and size of message. ``fastest``: the most bandwidth, used if noise hides the cost of bytes."""
    per_exchange = Topology(latency=1.0, bandwidth=float("inf"))
    per_byte = Topology(latency=0.0, bandwidth=1.0)
    rows: list[tuple[float, float]] = []
    for label, seconds in seconds_by_label.items():
        kind, size = label.action, label.what
        if kind == "transfer":
            seconds /= 2  # a transfer and its answer
        share = {"all_reduce": 2 * (num - 1) / num, "all_gather": num - 1, "transfer": 1.0}[kind]
        exchanges, sent = (
            unit.collective_seconds(kind, axis="", num=num, bytes_sent=share * nbytes[size])
            for unit in (per_exchange, per_byte)
        )
        rows.append((exchanges / seconds, sent / seconds))
    from scipy.optimize import nnls  # here, so that actors, which import this file, need no scipy

    (latency, inverse), _ = nnls(rows, [1.0] * len(rows))
    return float(latency), 1.0 / max(float(inverse), 1.0 / fastest)


def _empty_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """Return the seconds from the call of a run that does nothing to its answer."""
    nothing = Program(
        name="calibrate nothing",
        ranks=(RankProgram(instructions=()),) * mesh.size,
        functions=(),
        stage_of=(0,) * mesh.size,
    )
    handle = cluster.load(nothing)
    seconds: list[float] = []
    for _ in range(NUM_EMPTY):
        start = time.perf_counter()
        cluster.run(handle, [{}] * cluster.size).get()
        seconds.append(time.perf_counter() - start)
    cluster.unload(handle)
    return statistics.fmean(seconds)


def _rounded(figure: float) -> float:
    """Return the figure with three digits; a second measurement does not repeat more."""
    return float(f"{figure:.3g}")


# -- the programs ----------------------------------------------------------------------------------

_Functions = Mapping[str, Body]


def _local_program(mesh: Mesh, sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> Program:
    """Return the program of local work, labelled "matmul", "attention", "stream", "update" and
    "tiny"."""
    streams = tuple(f"s{i}" for i in range(sizes.streams))
    parameters, gradients = streams[: len(streams) // 2], streams[len(streams) // 2 :]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(streams, (sizes.stream,))
    shapes.update(a=(sizes.matrix,) * 2, b=(sizes.matrix,) * 2, q=sizes.attention, x0=(1,))
    keys = keys_of(torch.optim.AdamW, {})
    what = Updated((parameters,), parameters, tuple((p, key) for p in parameters for key in keys))
    state = tuple(f"v{i}" for i in range(len(what.names)))
    optimizer = ("optimizer", "what", *state)
    updated = (*optimizer, *streams)
    made = ("ShardOptimizer(AdamW)", repr(what), *["absent(device)"] * len(state))
    functions: _Functions = {
        "optimizer": Body((), (), made),
        "matmul": _MATMUL,
        "attention": _body(("q",), *_ATTENTION),
        "stream": _body(streams, *_stream(streams)),
        "update": _body(updated, _update(parameters, gradients, state)),
        "tiny": _body(("x",), *["x = add(x, 1)"] * MAX_LINES, outputs=("x",)),
    }

    def rank(_: int) -> Iterator[Instruction]:
        at = 0
        yield Call("optimizer", (), optimizer)
        for timed in (False, *[True] * NUM_ROUNDS):

            def label(name: str, timed: bool = timed) -> Label | None:
                return Label(name) if timed else None

            yield Call("matmul", ("a", "b"), (), label=label("matmul"))
            yield Call("attention", ("q",), (), label=label("attention"))
            yield Call("stream", streams, (), label=label("stream"))
            writes = (*state, *parameters)
            yield Call("update", updated, (), writes, label=label("update"))
            for _ in range(NUM_TINY):
                yield Call("tiny", (f"x{at}",), (f"x{at + 1}",), label=label("tiny"))
                yield Free((f"x{at}",), label=label("tiny"))
                at += 1
        yield Free((f"x{at}", "a", "b", "q", *updated))

    return _program("calibrate", mesh, shapes, rank, functions, dtype, device)


def _message_program(
    mesh: Mesh, axis: str, sizes: _Sizes, dtype: torch.dtype, device: torch.device, *, busy: bool
) -> Program:
    """Return the program of messages along an axis, labelled by kind, with "small" or "large".

    ``busy``: each collective follows a computation, as in a step. So its seconds include waits for
    ranks that end the computation late. Transfers go back and forth between two neighbours; the
    last of an odd number of ranks has none.
    """
    shapes = dict(small=(SMALL,), large=(sizes.message,), a=(sizes.matrix,) * 2)
    functions: _Functions = {"matmul": _MATMUL, "done": Body((), (), ())}

    def collectives(
        group: tuple[int, ...], value: str, buffer: Buffer, timed: bool
    ) -> Iterator[Instruction]:
        for kind in ("all_reduce", "all_gather"):
            reduces = kind == "all_reduce"
            results = ("result",) if reduces else tuple(f"part{m}" for m in range(len(group)))
            buffers = (buffer,) * len(results)
            label = Label(kind, what=value) if timed else None
            if busy:
                yield Call("matmul", ("a", "a"), ())
            yield Collective(
                kind,
                group,
                (value,),
                results,
                (buffer,),
                buffers,
                "sum" if reduces else None,
                axis,
                label=label,
            )
            yield from _complete(results, label, device)

    def transfers(
        at: int, pair: tuple[int, int], value: str, buffer: Buffer, timed: bool
    ) -> Iterator[Instruction]:
        label = Label("transfer", what=value) if timed else None
        there, back = f"{axis} there", f"{axis} back"
        if at == pair[0]:
            yield Send(value, pair[1], there, buffer, label=label)
            yield Recv("result", pair[1], back, buffer, label=label)
            yield from _complete((value, "result"), label, device, free=("result",))
        else:
            yield Recv("result", pair[0], there, buffer, label=label)
            yield from _complete(("result",), label, device, free=())
            yield Send("result", pair[0], back, buffer, label=label)
            yield from _complete(("result",), label, device)

    def rank(number: int) -> Iterator[Instruction]:
        group = mesh.group(number, axis)
        first = group.index(number) // 2 * 2
        pair = group[first : first + 2]
        for timed in (False, *[True] * NUM_ROUNDS):
            for value in ("small", "large"):
                buffer = Buffer(shapes[value], dtype)
                yield from collectives(group, value, buffer, timed)
                if len(pair) == 2:
                    yield from transfers(number, (pair[0], pair[1]), value, buffer, timed)
        yield Free(tuple(shapes))

    return _program(f"calibrate {axis}", mesh, shapes, rank, functions, dtype, device)


def _complete(
    values: tuple[str, ...],
    label: Label | None,
    device: torch.device,
    *,
    free: tuple[str, ...] | None = None,
) -> Iterator[Instruction]:
    """Yield a wait for the values, and a Free of them or of ``free``."""
    yield Wait(values, label=label)
    if device.type == "cuda":
        yield Call("done", (), (), label=label)
    if free != ():
        yield Free(values if free is None else free)


def _program(
    name: str,
    mesh: Mesh,
    shapes: Mapping[str, tuple[int, ...]],
    rank: Callable[[int], Iterator[Instruction]],
    functions: _Functions,
    dtype: torch.dtype,
    device: torch.device,
) -> Program:
    """Return a program: each rank creates tensors of these shapes, meets the other ranks in a
    barrier, and runs the instructions of ``rank``."""
    everyone, one = tuple(range(mesh.size)), (Buffer((), torch.float32),)
    barrier = (
        Call("one", (), ("one",)),
        Collective("all_reduce", everyone, ("one",), ("all",), one, one, "sum", "barrier"),
        Wait(("all",)),
        Free(("one", "all")),
    )
    head = (Call("made", (), tuple(shapes)), *(barrier if mesh.size > 1 else ()))
    full = tuple(f"full({shape!r}, 0.5, dtype=dtype, device=device)" for shape in shapes.values())
    filled: _Functions = {"made": Body((), (), full), "one": Body((), (), ("full((), 1.0)",))}
    return Program(
        name=name,
        ranks=tuple(RankProgram(instructions=(*head, *rank(r))) for r in everyone),
        functions=tuple(
            (name, _function(name, body, dtype, device))
            for name, body in {**functions, **filled}.items()
        ),
        stage_of=(0,) * mesh.size,
    )


def _body(inputs: tuple[str, ...], *lines: str, outputs: tuple[str, ...] = ()) -> Body:
    return Body(inputs, tuple(map(CodeLine, lines)), outputs)


# the product of a layer, and the two products of its backward, which read a factor transposed
_MATMUL = _body(("a", "b"), "mm(a, b), mm(t(a), b), mm(a, t(b))")

_ATTENTION = (
    "out, lse = attention(q, q, q, True, 0.1)",
    "attention_backward(out, q, q, q, out, lse, True, 0.1)",
)


def _stream(values: Sequence[str]) -> Iterator[str]:
    """Yield lines that use memory as a step does: a forward that keeps two tensors for each value,
    then a backward that reads the tensors in reverse order and frees them."""
    for i, v in enumerate(values):
        yield from (f"y{i} = add({v}, {v})", f"z{i} = gelu(y{i})")
    for i, v in reversed(list(enumerate(values))):
        yield from (f"g = add(y{i}, z{i})", f"del y{i}, z{i}", f"g = add(g, {v})")


def _update(*names: Sequence[str]) -> str:
    """Return the line that updates; ``names``: of parameters, gradients and values of the state."""
    tuples = ", ".join(f"({''.join(f'{n}, ' for n in group)})" for group in names)
    return f"step(optimizer, what, options, {tuples}, None)"


def _function(name: str, body: Body, dtype: torch.dtype, device: torch.device) -> Function:
    if device.type == "cuda":  # so that the time of a call includes the device's work
        body = replace(body, lines=(*body.lines, CodeLine("time_when_idle(device)")))
    bindings: dict[str, object] = dict(
        AdamW=torch.optim.AdamW,
        ShardOptimizer=ShardOptimizer,
        Updated=Updated,
        absent=absent,
        add=torch.add,  # as the code of a step calls it: see lower/code.py
        attention=torch.ops.dt.attention.default,
        attention_backward=torch.ops.dt.attention_backward.default,
        device=device,
        time_when_idle=time_when_idle,
        dtype=dtype,
        full=torch.full,
        gelu=torch.ops.aten.gelu.default,
        mm=torch.ops.aten.mm.default,
        options=hyperparameters(torch.optim.AdamW([torch.empty(0)])),
        step=step_optimizer,
        t=torch.ops.aten.t.default,
    )
    return Function.straight(name, body, bindings)
