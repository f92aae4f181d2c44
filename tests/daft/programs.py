"""Programs that several tests run, with their expected results computed directly."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Free,
    Function,
    Instruction,
    Label,
    Program,
    RankProgram,
    Recv,
    Send,
    Sizes,
    Wait,
)
from dtensor.daft.ir.host_program import HostProgram, host_programs
from dtensor.daft.ray.transports.slots import CrossHostKeys
from dtensor.daft.verification.pairing import merge_sites

F32 = torch.float32


@contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt inside the block, even if the shell made this process
    ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def function(name: str, source: str, **bindings: object) -> Function:
    return Function(name=name, source=source, bindings=tuple(bindings.items()))


def parts_of(made: Program, hosts: Sequence[Sequence[int]]) -> tuple[HostProgram, ...]:
    """Return the part of a program that each host receives."""
    hosts = tuple(map(tuple, hosts))
    between = CrossHostKeys(made, [h for h, ranks in enumerate(hosts) for _ in ranks])
    parts = host_programs(made, hosts, merge_sites(made, hosts))
    return tuple(replace(own, meetings=between.of(own.ranks)) for own in parts)


def program(
    *lists: Sequence[Instruction],
    functions: Sequence[Function] = (),
    inputs: Sequence[tuple[str, ...]] | None = None,
    outputs: Sequence[tuple[str, ...]] | None = None,
    state: Sequence[tuple[str, ...]] | None = None,
) -> Program:
    none: list[tuple[str, ...]] = [()] * len(lists)
    return Program(
        name="test",
        ranks=tuple(
            RankProgram(instructions=tuple(items), inputs=i, outputs=o, state=s)
            for items, i, o, s in zip(lists, inputs or none, outputs or none, state or none)
        ),
        functions=tuple((f.name, f) for f in functions),
        stage_of=tuple(range(len(lists))),
    )


def precisions(size: int) -> Program:
    """Return a program in which each rank returns `x` if its matrix products may use lower
    precision, else 0."""
    source = "def forward(x):\n    return (x * (precision() == 'high'),)"
    asks = function("asks", source, precision=torch.get_float32_matmul_precision)
    return program(
        *[[Call("asks", ("x",), ("y",))]] * size,
        functions=[asks],
        inputs=[("x",)] * size,
        outputs=[("y",)] * size,
    )


def values(rank: int, *shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(1000 * seed + rank)
    real = torch.randn(shape, generator=made) * 10
    return real > 0 if dtype == torch.bool else real.to(dtype)


def _left_fold(parts: Sequence[Tensor], op: str, dtype: torch.dtype | None = None) -> Tensor:
    """A left fold that does not use `fold`, to check it."""
    total = parts[0].double() if parts[0].dtype == torch.float64 else parts[0]
    narrow = op == "sum" and parts[0].dtype in (torch.float16, torch.bfloat16)
    total = total.float() if narrow else total
    for part in parts[1:]:
        if op == "softmax":
            (m0, s0, t0), (m1, s1, t1) = total.unbind(-1), part.unbind(-1)
            m = m0.maximum(m1)
            s = (m0 - m).nan_to_num(0.0).exp() * s0 + (m1 - m).nan_to_num(0.0).exp() * s1
            total = torch.stack((m, s, t0 + t1), -1)
            continue
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](
            total, part.float() if narrow else part
        )
    return total.to(dtype or parts[0].dtype)


class Collectives:
    """A program with every collective on every rank in sequence; all results are outputs."""

    def __init__(self, size: int, large: int = 40_000) -> None:
        self.size = size
        self.group = tuple(range(size))
        self.fed: list[dict[str, Tensor]] = [{} for _ in self.group]
        self.expected: list[dict[str, Tensor]] = [{} for _ in self.group]
        self.lists: list[list[Instruction]] = [[] for _ in self.group]
        self._count = 0
        self._all(large)

    def program(self) -> Program:
        return program(
            *self.lists,
            inputs=[tuple(fed) for fed in self.fed],
            outputs=[tuple(results) for results in self.expected],
        )

    def _all(self, large: int) -> None:
        n, g = self.size, self.group
        for dtype in (F32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8):
            self._reduce("sum", [(3, 5)], dtype)
        for op in ("max", "min"):
            self._reduce(op, [(7,)], F32)
            self._reduce(op, [(2, 2)], torch.int32)
        self._reduce("softmax", [(7, 3), (3,), (0, 3)], F32)
        self._reduce("softmax", [(large // 3 + 1, 3), (2, 2, 3)], torch.float64)
        self._reduce("sum", [(0, 4)], F32)
        self._reduce("sum", [()], F32)
        self._reduce("sum", [(3,), (2, 3), (0,), ()], torch.bfloat16)
        self._reduce("sum", [(large + 1,)], F32)
        self._reduce("sum", [(large,), (7,), (1,)], torch.float16)
        self._reduce("sum", [(3,), (2, 3), (0,), ()], torch.bfloat16, F32)
        self._reduce("sum", [(large + 1,), (5,)], torch.bfloat16, F32)
        for dtype in (F32, torch.bool, torch.bfloat16, torch.int8):
            parts = [values(r, r, 3, dtype=dtype) for r in g]  # rank 0's is empty
            self._collective("all_gather", None, [[p] for p in parts], [parts] * n)
            pieces = [[values(r * n + to, r + to, dtype=dtype) for to in g] for r in g]
            received = [[pieces[r][to] for r in g] for to in g]
            self._collective("all_to_all", None, pieces, received)
            whole = values(0, 4, 2, dtype=dtype)
            self._collective("broadcast", None, [[whole]] + [[]] * (n - 1), [[whole]] * n)
            for distance in range(1, n):
                more = [
                    [values(r, 2)] if dtype != F32 else [] for r in g
                ]  # else rank 0 sends nothing
                passed = [[values(r, r, 3, dtype=dtype), *more[r]] for r in g]
                received = [passed[r - distance] for r in g]
                self._collective("shift", None, passed, received, distance=distance)
        for dtype in (F32, torch.bfloat16, torch.int64):
            given = [[values(r * n + to, to, 2, dtype=dtype) for to in g] for r in g]
            for made in (dtype, F32) if dtype == torch.bfloat16 else (dtype,):
                folded = [[_left_fold([given[r][to] for r in g], "sum", made)] for to in g]
                self._collective("reduce_scatter", "sum", given, folded)
        uneven = [[(3 * r + p) % 4 for p in range(2 * n)] for r in g]
        to_last = [[0] * (2 * n - 1) + [r] for r in g]
        parts = tuple((to, to + n) for to in g)
        total = max(sum(row[p] for row in uneven for p in part) for part in parts)
        self._sized(uneven, parts, (5,), F32)
        self._sized(uneven, parts, (2, 3), torch.bfloat16, total)
        self._sized(uneven, parts, (5,), F32, total - 1)
        self._sized(to_last, (tuple(range(n + 1)), *((p,) for p in range(n + 1, 2 * n))), (), F32)
        self._sized([[0] * n] * n, tuple((to,) for to in g), (3,), torch.int64)
        self._sized([[2 * n] * n] * n, tuple((to,) for to in g), (large // 8,), torch.bfloat16)

    def _reduce(
        self,
        op: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        made: torch.dtype | None = None,
    ) -> None:
        given = [
            [values(r, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
            for r in self.group
        ]
        folded = [_left_fold([row[i] for row in given], op, made) for i in range(len(shapes))]
        self._collective("all_reduce", op, given, [folded] * self.size)

    def _sized(
        self,
        counts: Sequence[Sequence[int]],
        parts: tuple[tuple[int, ...], ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        limit: int | None = None,
    ) -> None:
        """Gather counts, exchange rows by them, and send the received rows back."""
        g = self.group
        rows = [[sum(counts[r][p] for p in part) for part in parts] for r in g]
        sent = [
            [values(r * self.size + to, rows[r][to], *shape, dtype=dtype) for to in g] for r in g
        ]
        if limit is None or max(map(sum, zip(*rows, strict=True))) <= limit:
            back, received = sent, [[sent[r][to] for r in g] for to in g]
        else:
            none = values(0, 0, *shape, dtype=dtype)
            back, received = [[none] * self.size] * self.size, [[none] * self.size] * self.size
        vectors = [torch.tensor(own, dtype=torch.int64) for own in counts]
        number = self._count
        self._collective("all_gather", None, [[v] for v in vectors], [vectors] * self.size)
        names = tuple(f"out{number}.{r}" for r in g)
        for rank in g:
            self.lists[rank][-2] = replace(self.lists[rank][-2], on_host=True)  # type: ignore
        sizes = Sizes(names, parts, False, limit)
        number = self._count
        self._collective("all_to_all", None, sent, received, sizes)
        given = tuple(f"out{number}.{r}" for r in g)
        returned = replace(sizes, returned=True)
        self._collective("all_to_all", None, received, back, returned, given)

    def _collective(
        self,
        kind: str,
        op: str | None,
        given: Sequence[Sequence[Tensor]],
        results: Sequence[Sequence[Tensor]],
        sizes: Sizes | None = None,
        inputs: tuple[str, ...] = (),
        distance: int = 0,
    ) -> None:
        """Add a collective, and its wait. ``inputs``: earlier results that it sends."""
        number, self._count = self._count, self._count + 1
        for rank in self.group:
            ins = inputs or tuple(f"in{number}.{i}" for i in range(len(given[rank])))
            outs = tuple(f"out{number}.{i}" for i in range(len(results[rank])))
            if not inputs:
                self.fed[rank] |= dict(zip(ins, given[rank]))

            def buffer(tensor: Tensor, more: int = rank) -> Buffer:
                exact = Buffer.of(tensor)
                if sizes is None:
                    return exact
                return replace(exact.with_rows(tensor.shape[0] + more), bounded=True)

            self.expected[rank] |= dict(zip(outs, results[rank]))
            self.lists[rank] += [
                Collective(
                    kind,  # type: ignore[arg-type]
                    self.group,
                    ins,
                    outs,
                    tuple(map(buffer, given[rank])),
                    tuple(map(buffer, results[rank])),
                    op,  # type: ignore[arg-type]
                    f"channel{number % 2}",
                    distance=distance,
                    sizes=sizes,
                ),
                Wait(outs[:1]),
            ]


def pipeline(size: int) -> Program:
    """Return a program in which each rank adds its state `w` to the received value, passes it on,
    and counts its runs in `n`."""
    buffer = Buffer((4,), F32)
    step = function(
        "step", "def forward(x, w, n):\n    n += 1\n    return (add(x, w),)", add=torch.add
    )
    lists: list[list[Instruction]] = []
    for rank in range(size):
        items: list[Instruction] = []
        if rank:
            items += [Recv("x", rank - 1, "fwd", buffer), Wait(("x",))]
        items.append(Call("step", ("x", "w", "n"), ("y",), ("n",), label=Label("F", 0, rank)))
        if rank < size - 1:
            items += [Send("y", rank + 1, "fwd", buffer), Wait(("y",)), Free(("y",))]
        if rank:
            items.append(Free(("x",)))
        lists.append(items)
    return program(
        *lists,
        functions=[step],
        inputs=[("x",)] + [()] * (size - 1),
        outputs=[()] * (size - 1) + [("y",)],
        state=[("w", "n")] * size,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
