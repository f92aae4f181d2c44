"""The programs that calibration.py runs: what each rank computes and sends to be timed.

    local_program(mesh, CPU, torch.float32, torch.device("cpu")), on each rank:

    a, b, q, s0, ..., x0 = call made()
    [barrier]  call matmul(a, b)  call attention(q)  call stream(s0, ...)
               call update(optimizer, s0, ...)  x1 = call tiny(x0)  ...  x50 = call tiny(x49)
               and so on, NUM_ROUNDS times

An instruction's label says what its seconds count for; those of the first round have none, as
caches are cold and connections unused. All rounds are one run: a rank is as busy as in a step, and
ranks do the same at about the same time. On a GPU each timed call, and each message, is followed
by a wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Send,
    Wait,
)
from dtensor.runtime.lower.builder import MAX_LINES
from dtensor.runtime.lower.step_end import step_optimizer
from dtensor.runtime.shard_optimizer import ShardOptimizer, hyperparameters
from dtensor.sharding.spec.mesh import Mesh

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

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
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


CPU = Sizes(matrix=384, attention=(1, 8, 128, 64), stream=2**18, streams=6, message=2**19)
GPU = Sizes(matrix=4096, attention=(4, 16, 2048, 64), stream=2**25, streams=4, message=2**24)


def local_program(mesh: Mesh, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Program:
    """What a rank does alone, labelled "matmul", "attention", "stream", "update" and "tiny"."""
    streams = tuple(f"s{i}" for i in range(sizes.streams))
    parameters, gradients = streams[: len(streams) // 2], streams[len(streams) // 2 :]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(streams, (sizes.stream,))
    shapes.update(a=(sizes.matrix,) * 2, b=(sizes.matrix,) * 2, q=sizes.attention, x0=(1,))
    updated = ("optimizer", *streams)
    functions = (
        _made(shapes, dtype, device),
        _function(
            "optimizer", (), f"return (ShardOptimizer(AdamW, ({parameters!r},)),)", dtype, device
        ),
        _function("matmul", ("a", "b"), _MATMUL, dtype, device),
        _function("attention", ("q",), _ATTENTION, dtype, device),
        _function("stream", streams, _stream(streams), dtype, device),
        _function("update", updated, _update(parameters, gradients), dtype, device),
        _function("tiny", ("x",), "x = add(x, 1)\n" * MAX_LINES + "return (x,)", dtype, device),
    )

    def rank(_: int) -> Iterator[Instruction]:
        at = 0
        yield Call("optimizer", (), ("optimizer",))
        for timed in (False, *[True] * NUM_ROUNDS):

            def label(name: str, timed: bool = timed) -> str:
                return name if timed else ""

            yield Call("matmul", ("a", "b"), (), label=label("matmul"))
            yield Call("attention", ("q",), (), label=label("attention"))
            yield Call("stream", streams, (), label=label("stream"))
            writes = ("optimizer", *parameters)
            yield Call("update", updated, (), writes, label=label("update"))
            for _ in range(NUM_TINY):
                yield Call("tiny", (f"x{at}",), (f"x{at + 1}",), label=label("tiny"))
                yield Free((f"x{at}",), label=label("tiny"))
                at += 1
        yield Free((f"x{at}", "a", "b", "q", "optimizer", *streams))

    return _program("calibrate", mesh, shapes, rank, functions)


def message_program(
    mesh: Mesh, axis: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, *, busy: bool
) -> Program:
    """Messages along an axis, labelled "KIND small" and "KIND large".

    ``busy``: collectives come after a piece of computation, as in a step: that ranks end it at
    different times, and that one whose core is shared wakes late, is in their seconds. A transfer
    goes there and back between neighbours; a rank without a neighbour has none.
    """
    shapes = dict(small=(SMALL,), large=(sizes.message,), a=(sizes.matrix,) * 2)
    functions = (
        _made(shapes, dtype, device),
        _function("matmul", ("a", "b"), _MATMUL, dtype, device),
        _function("done", (), "return ()", dtype, device),
    )

    def collectives(
        group: tuple[int, ...], value: str, buffer: Buffer, timed: bool
    ) -> Iterator[Instruction]:
        for kind in ("all_reduce", "all_gather"):
            reduces = kind == "all_reduce"
            results = ("result",) if reduces else tuple(f"part{m}" for m in range(len(group)))
            buffers = (buffer,) * len(results)
            label = f"{kind} {value}" if timed else ""
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
        label = f"transfer {value}" if timed else ""
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

    return _program(f"calibrate {axis}", mesh, shapes, rank, functions)


def empty_program(mesh: Mesh) -> Program:
    return Program(
        name="calibrate nothing",
        ranks=(RankProgram(instructions=()),) * mesh.size,
        functions=(),
        stage_of=(0,) * mesh.size,
    )


def _done(
    values: tuple[str, ...],
    label: str,
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
    made: Mapping[str, tuple[int, ...]],
    rank: Callable[[int], Iterator[Instruction]],
    functions: Sequence[Function],
) -> Program:
    """On each rank: what is made, a barrier, the instructions of ``rank``."""
    everyone, one = tuple(range(mesh.size)), (Buffer((), torch.float32),)
    barrier = (
        Call("one", (), ("one",)),
        Collective("all_reduce", everyone, ("one",), ("all",), one, one, "sum", "barrier"),
        Wait(("all",)),
        Free(("one", "all")),
    )
    head = (Call("made", (), tuple(made)), *(barrier if mesh.size > 1 else ()))
    ones = Function(
        name="one",
        source="def forward():\n    return (ones(()),)",
        bindings=(("ones", torch.ones),),
    )
    return Program(
        name=name,
        ranks=tuple(RankProgram(instructions=(*head, *rank(r))) for r in everyone),
        functions=tuple((f.name, f) for f in (*functions, ones)),
        stage_of=(0,) * mesh.size,
    )


# the product of a layer, and the two of its backward, which read a factor across its rows
_MATMUL = "mm(a, b), mm(t(a), b), mm(a, t(b))\nreturn ()"

_ATTENTION = """out, lse = attention(q, q, q, True, 0.1)
attention_backward(out, q, q, q, out, lse, True, 0.1)
return ()"""


def _stream(values: Sequence[str]) -> str:
    """A forward that keeps a sum and a function of it for each value in turn, then a backward that
    reads them in reverse and drops them: so memory is taken from the system and reused in a step.
    """
    lines = [f"y{i} = add({v}, {v})\nz{i} = gelu(y{i})" for i, v in enumerate(values)]
    for i, v in reversed(list(enumerate(values))):
        lines.append(f"g = add(y{i}, z{i})\ndel y{i}, z{i}\ng = add(g, {v})")
    return "\n".join([*lines, "return ()"])


def _update(parameters: Sequence[str], gradients: Sequence[str]) -> str:
    shards, given = (f"({''.join(f'{n}, ' for n in names)})" for names in (parameters, gradients))
    return f"step(optimizer, options, {tuple(parameters)!r}, {shards}, {given}, None)\nreturn ()"


def _made(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Function:
    each = [f"full({shape!r}, 0.5, dtype=dtype, device=device)," for shape in shapes.values()]
    return _function("made", (), f"return ({' '.join(each)})", dtype, device)


def _function(
    name: str, inputs: tuple[str, ...], body: str, dtype: torch.dtype, device: torch.device
) -> Function:
    lines = body.splitlines()
    if device.type == "cuda":  # a call is over when the device has done its work
        lines.insert(len(lines) - 1, "synchronize()")
    source = f"def forward({', '.join(inputs)}):\n" + "".join(f"    {line}\n" for line in lines)
    bindings: dict[str, object] = dict(
        AdamW=torch.optim.AdamW,
        ShardOptimizer=ShardOptimizer,
        add=torch.add,  # as the code of a step calls it: see lower/quick.py
        attention=torch.ops.dt.attention.default,
        attention_backward=torch.ops.dt.attention_backward.default,
        device=device,
        dtype=dtype,
        full=torch.full,
        gelu=aten.gelu.default,
        mm=aten.mm.default,
        options=hyperparameters(torch.optim.AdamW([torch.empty(0)])),
        step=step_optimizer,
        synchronize=torch.cuda.synchronize,
        t=aten.t.default,
    )
    return Function(name=name, source=source, bindings=tuple(bindings.items()))
