"""What a cluster does in a second: the `Topology` that its ranks measure.

    calibrate(cluster, Mesh(tp=2))      # Topology(latency={"tp": 7e-05}, bandwidth=..., flops=...)

Small programs run on all ranks at once, so that contention for what ranks share is in the figures;
the actors time their own instructions. An instruction's label says what its seconds count for:

    a, b, q, s0, ..., x0 = call made()
    [barrier]  call matmul(a, b)  call attention(q)  call stream(s0, ...)
               call update(optimizer, s0, ...)  x1 = call tiny(x0)  ...  x50 = call tiny(x49)
               and so on, NUM_ROUNDS times

Those of the first round have no label, as caches are cold and connections unused. All rounds are
one run: a rank is as busy as in a step, and ranks do the same at about the same time. On a GPU each
timed call, and each message, is followed by a wait for the device. A figure is the mean over rounds
and ranks, not the median: a step is a sum, and a core that is shared is lost for a while at a time.
The two numbers of an axis, latency and bandwidth, are those with which the alpha-beta model comes
closest to the seconds of all its messages, by least squares of the relative error.

Not measured: memory (the default of `Topology` stands), messages of several axes at once. In one
process the ranks take turns: figures are of each rank alone, and messages of its own copies.
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
from dtensor.runtime.lower.step_end import step_optimizer
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
"""After the first one, which is not counted."""
NUM_TINY = 50
"""Calls of MAX_LINES tiny ops each: a Call of a step has up to so many lines too."""
NUM_PRODUCTS = 3
STREAMED = 11
"""Tensors that "stream" reads and writes for each of its values."""
UPDATED = 7
"""The same of "update": a parameter, its gradient and the two of AdamW's state, as step_seconds
counts them."""
SMALL = 16
"""Numbers of a small message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How much work is timed: enough to keep a device busy, little enough to be done soon.

    matrix: rows and columns; attention: batch, heads, positions, width of a head; stream: numbers
    of a tensor, of which ``streams`` are gone through in turn, more than caches hold; message:
    numbers of the large one.
    """

    matrix: int
    attention: tuple[int, int, int, int]
    stream: int
    streams: int
    message: int


CPU = _Sizes(matrix=384, attention=(1, 8, 128, 64), stream=2**18, streams=6, message=2**19)
GPU = _Sizes(matrix=4096, attention=(4, 16, 2048, 64), stream=2**25, streams=4, message=2**24)


def calibrate(cluster: Cluster, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Topology:
    """Measure; about a second on CPUs. Raises daft's errors: a rank that failed or stopped."""
    device = cluster.device
    sizes = GPU if device.type == "cuda" else CPU
    busy = not isinstance(cluster, InProcessCluster)  # there no rank waits for another
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
    # of a forward and its backward, as the rules of both count them
    attended = (1 + 2.5) * 2 * batch * heads * positions**2 * 2 * width
    where = "ranks side by side" if busy else "each rank alone in this process"
    return Topology(
        latency={axis: _rounded(fit[0]) for axis, fit in fits.items()},
        bandwidth={axis: _rounded(fit[1]) for axis, fit in fits.items()},
        flops=_rounded(NUM_PRODUCTS * 2 * sizes.matrix**3 / local["matmul"]),
        memory_bandwidth=_rounded(memory_bandwidth),
        op_latency=0.0 if device.type == "cuda" else tiny,
        launch_latency=tiny if device.type == "cuda" else 0.0,
        step_latency=_rounded(_empty_seconds(cluster, mesh)),
        attention_flops=_rounded(attended / local["attention"]),
        # the streams are parameters and gradients in halves
        update_bandwidth=_rounded(UPDATED * (nbytes / 2) / local["update"]),
        name=f"calibrated on {mesh}, {device.type}, {where}",
    )


def _seconds(cluster: Cluster, program: Program) -> dict[Label, float]:
    """By label, the seconds of one round of its instructions on a rank."""
    handle = cluster.load(program)
    outputs = cluster.run(handle, [{}] * cluster.size, mode="timed").get()
    cluster.unload(handle)
    by_rank: list[dict[Label, float]] = []
    for rank, own in enumerate(outputs):
        spent: dict[Label, float] = {}
        instructions = program.ranks[rank].instructions
        for index, begin, end in times_of(own):
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
    """(latency, bandwidth) of an axis of ``num`` ranks, from the seconds of each kind and size.

    Where noise hides what bytes cost, the bandwidth is ``fastest``: a rank reads what it sends.
    """
    per_exchange = Topology(latency=1.0, bandwidth=float("inf"))
    per_byte = Topology(latency=0.0, bandwidth=1.0)
    rows: list[tuple[float, float]] = []
    for label, seconds in seconds_by_label.items():
        kind, size = label.action, label.what
        if kind == "transfer":
            seconds /= 2  # there and back
        share = {"all_reduce": 2 * (num - 1) / num, "all_gather": num - 1, "transfer": 1.0}[kind]
        exchanges, sent = (
            unit.collective_seconds(kind, axis="", num=num, bytes_sent=share * nbytes[size])
            for unit in (per_exchange, per_byte)
        )
        rows.append((exchanges / seconds, sent / seconds))
    from scipy.optimize import nnls  # here, as actors import this package and load no scipy

    (latency, inverse), _ = nnls(rows, [1.0] * len(rows))
    return float(latency), 1.0 / max(float(inverse), 1.0 / fastest)


def _empty_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """From the call of a run that does nothing to its answer."""
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
    """To three digits: no more are repeated by a second measurement."""
    return float(f"{figure:.3g}")


# -- the programs ----------------------------------------------------------------------------------

_Functions = Mapping[str, Body]


def _local_program(mesh: Mesh, sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> Program:
    """What a rank does alone, labelled "matmul", "attention", "stream", "update" and "tiny"."""
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
    """Messages along an axis, labelled by kind, with "small" or "large".

    ``busy``: collectives come after a piece of computation, as in a step: that ranks end it at
    different times, and that one whose core is shared wakes late, is in their seconds. A transfer
    goes there and back between neighbours; a rank without a neighbour has none.
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
            yield from _done(results, label, device)

    def transfers(
        at: int, pair: tuple[int, int], value: str, buffer: Buffer, timed: bool
    ) -> Iterator[Instruction]:
        label = Label("transfer", what=value) if timed else None
        there, back = f"{axis} there", f"{axis} back"
        if at == pair[0]:
            yield Send(value, pair[1], there, buffer, label=label)
            yield Recv("result", pair[1], back, buffer, label=label)
            yield from _done((value, "result"), label, device, free=("result",))
        else:
            yield Recv("result", pair[0], there, buffer, label=label)
            yield from _done(("result",), label, device, free=())
            yield Send("result", pair[0], back, buffer, label=label)
            yield from _done(("result",), label, device)

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


def _done(
    values: tuple[str, ...],
    label: Label | None,
    device: torch.device,
    *,
    free: tuple[str, ...] | None = None,
) -> Iterator[Instruction]:
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
    """On each rank: what is made, of the shapes given; a barrier; the instructions of ``rank``."""
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


# the product of a layer, and the two of its backward, which read a factor across its rows
_MATMUL = _body(("a", "b"), "mm(a, b), mm(t(a), b), mm(a, t(b))")

_ATTENTION = (
    "out, lse = attention(q, q, q, True, 0.1)",
    "attention_backward(out, q, q, q, out, lse, True, 0.1)",
)


def _stream(values: Sequence[str]) -> Iterator[str]:
    """A forward that keeps a sum and a function of it for each value in turn, then a backward that
    reads them in reverse and drops them: so memory is taken from the system and reused in a step.
    """
    for i, v in enumerate(values):
        yield from (f"y{i} = add({v}, {v})", f"z{i} = gelu(y{i})")
    for i, v in reversed(list(enumerate(values))):
        yield from (f"g = add(y{i}, z{i})", f"del y{i}, z{i}", f"g = add(g, {v})")


def _update(*names: Sequence[str]) -> str:
    """``names``: of parameters, gradients and values of the state."""
    given = ", ".join(f"({''.join(f'{n}, ' for n in own)})" for own in names)
    return f"step(optimizer, what, options, {given}, None)"


def _function(name: str, body: Body, dtype: torch.dtype, device: torch.device) -> Function:
    if device.type == "cuda":  # a call is over when the device has done its work
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
