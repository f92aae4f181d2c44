"""Capture parts of a host's list as CUDA graphs, and replay them with one launch each.

    graphs = Graphs(program, order, steps, values, table, commit)
    for part in graphs.parts:                   # one part, if all instructions can be captured
        part.positions                          # (0, 1, 2, ...)
        part.graph.run(counter)                 # captures if necessary, and replays

A graph reads and writes fixed addresses. Before a replay, inputs that move from run to run are
copied into fixed buffers. Numbers and settings of kernels must have the values that they had at the
capture; otherwise the part is captured again. After a change of the state's addresses a run without
graphs comes first: optimizers copy state that is new to them, which no replay may repeat. A message
that starts in a part ends in it. **CUDA graphs have run on simulated GPUs only.**
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import (
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Key,
    Recv,
    Send,
    Vote,
    Wait,
    key_of,
)
from dtensor.daft.run.device_commit import DeviceCommit
from dtensor.daft.verification.pairing import Site, instruction_at, starts_of_waits
from dtensor.gc_pause import collector_paused
from dtensor.kernel_flags import kernel_flags
from dtensor.private_torch import foreach_copy_, pytree

Table: TypeAlias = dict[tuple[int, str], object]
Step: TypeAlias = Callable[[], None]
Leaf: TypeAlias = tuple[tuple[int, str], int]
"""A value, as (rank, name), and the position of one of its leaves."""
MAX_MISSES = 4
"""After this number of consecutive runs that each had to capture, a part runs without a graph."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive positions of the host's list. ``graph``: None if they cannot be captured.
    ``waits``: whether the device waits for messages of other hosts."""

    positions: tuple[int, ...]
    graph: Graph | None
    waits: bool


class Graphs:
    """The parts of a program. `are_warm`: a run without graphs has called all functions since the
    state came to its addresses, so modules are loaded and lazily created state exists."""

    def __init__(
        self,
        program: HostProgram,
        order: Sequence[int],
        steps: Sequence[Step],
        values: Table,
        table: Table,
        commit: DeviceCommit | None,
        end: Step,
    ) -> None:
        """``end``: a step after all others, for a graph of the whole list; ``order``: the positions
        of a run; ``steps``: of the engine, by position; ``values``: of
        the current run; ``table``: the state; ``commit``: the engine's."""
        self.are_warm = False
        self._known: list[object] = []
        self.parts: list[Part] = []
        # a copy of a value that shares the memory of a written value would not see the write
        tied = {
            (rank, value)
            for rank, r in program.ranks.items()
            for written in [{*r.lasting, *(v for i in r.instructions for v in i.writes)}]
            for value, other in r.shares
            if other in written
        }
        for is_captured, positions in split(program, order):
            graph = None
            if is_captured and tied.isdisjoint(_values_from_outside(program, positions)):
                part_steps = [(position, steps[position]) for position in positions]
                if len(positions) == len(order):
                    part_steps.append((positions[-1], end))
                graph = Graph(program, part_steps, values, table, commit)
            instructions = [instruction_at(program, program.sites[p]) for p in positions]
            waits = not program.alone and any(isinstance(i, Wait) for i in instructions)
            self.parts.append(Part(positions, graph, waits))

    def begin(self) -> None:
        """Begin a run: it runs without graphs if the state is not where the last run left it."""
        addresses = self._addresses()
        self.are_warm = self.are_warm and _equal(addresses, self._known)
        if not self.are_warm:
            self.close()

    def end(self) -> None:
        """End a run that has called all functions."""
        if not self.are_warm:
            self.are_warm, self._known = True, self._addresses()

    def _addresses(self) -> list[object]:
        return [x for part in self.parts if part.graph is not None for x in part.graph.addresses()]

    def close(self) -> None:
        """Free the memory of all graphs."""
        for part in self.parts:
            if part.graph is not None:
                part.graph.reset()


def split(program: HostProgram, order: Sequence[int]) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Split a host's list into maximal parts that can be captured, and parts that cannot. The
    starts and waits of one exchange are in one part or in none, and so are votes and commits."""
    instructions = {p: instruction_at(program, program.sites[p]) for p in order}
    on_host = {
        (rank, name)
        for rank, rank_program in program.ranks.items()
        for i in rank_program.instructions
        if isinstance(i, Collective) and i.on_host
        for name in i.outputs
    }
    capturable = {
        p
        for p, i in instructions.items()
        if _is_capturable(program, i)
        and on_host.isdisjoint((program.sites[p][0], name) for name in i.inputs)
    }
    groups = list(_kept_together(program, order))
    while True:
        parts = [(c, tuple(part)) for c, part in groupby(order, capturable.__contains__)]
        part_of = {p: n if c else -1 for n, (c, part) in enumerate(parts) for p in part}
        torn = [group for group in groups if len({part_of[p] for p in group}) > 1]
        if not torn:
            break
        capturable.difference_update(*torn)
    for captured, part in parts:
        kinds = (Call, Send, Recv, Collective)
        yield captured and any(isinstance(instructions[p], kinds) for p in part), part


def _is_capturable(program: HostProgram, instruction: Instruction) -> bool:
    """Return whether the instruction never makes the host wait for a value of the device."""
    assert program.graphs is not None
    match instruction:
        case Call(fn=fn):
            return fn in program.graphs
        case Collective():
            return instruction.sizes is None and not instruction.on_host
        case Send(buffer=buffer) | Recv(buffer=buffer):
            return not (buffer.variable or buffer.bounded)
        case Commit(predicate=predicate):
            return predicate is not None
        case Wait() | Free() | Vote():
            return True


def _kept_together(program: HostProgram, order: Sequence[int]) -> Iterator[set[int]]:
    """Yield the sets of positions that one part must have, if it has one of them: the starts of
    this host in an exchange and their waits, and all votes and commits, which share tensors."""
    at: dict[Site, int] = {program.sites[position]: position for position in order}
    exchanges: dict[tuple[Key, int], set[int]] = {}
    commits: set[int] = set()
    for rank, rank_program in program.ranks.items():
        instructions, counts = rank_program.instructions, Counter[Key]()
        wait_of = {s: w for w, starts in starts_of_waits(instructions).items() for s in starts}
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Vote | Commit):
                commits.add(at[rank, index])
            if isinstance(instruction, Send | Recv | Collective):
                key = key_of(rank, instruction)
                sites = {(rank, index), (rank, wait_of[index])}
                exchange = exchanges.setdefault((key, counts[key]), set())
                exchange.update(at[site] for site in sites if site in at)
                counts[key] += 1
    yield from (*exchanges.values(), commits)


class Graph:
    """A part of a program as a CUDA graph."""

    def __init__(
        self,
        program: HostProgram,
        steps: Sequence[tuple[int, Step]],
        values: Table,
        table: Table,
        commit: DeviceCommit | None,
    ) -> None:
        """``steps``: with their positions; the other arguments are described at `Graphs`."""
        self._steps, self._values, self._table, self._commit = steps, values, table, commit
        self._state = {(rank, name) for rank, r in program.ranks.items() for name in r.state}
        # a write to a copy of these would be lost
        self._fixed = {(rank, name) for rank, r in program.ranks.items() for name in r.lasting}
        self._reads = list(_values_from_outside(program, [position for position, _ in steps]))
        self._stream: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._misses = 0  # consecutive runs that had to capture
        self._last: dict[Leaf, ref[Tensor]] = {}  # tensors that the last run without it has read
        self._moving: set[Leaf] = set()
        self._key: list[tuple[object, ...]] = []
        # of the capture: values with buffers in place of moving tensors; values that the part makes
        # and drops; votes
        self._inputs: Table = {}
        self._buffers: list[Tensor] = []
        self._made: Table = {}
        self._dropped: list[tuple[int, str]] = []
        self._votes: Any = None

    @property
    def is_given_up(self) -> bool:
        return self._misses >= MAX_MISSES

    def record_reads(self) -> None:
        """Record the objects that the part reads in a run without the graph."""
        leaves = self._leaves()
        self._last = {leaf: ref(value) for leaf, value in leaves if isinstance(value, Tensor)}

    def run(self, counter: memoryview) -> None:
        """Replay the graph, and capture it before if necessary. If this raises, ``counter[0]`` is
        the position of the instruction that cannot be captured."""
        key = self._present_key()
        if self._graph is None or not _equal(key, self._key):
            self._misses += 1
            self._find_moving(key)
            self._capture(counter)
            if self.is_given_up:
                warnings.warn(
                    f"graphs=True: {MAX_MISSES} runs in a row had to capture a CUDA graph again, "
                    f"because the addresses or numbers that the graph reads changed. From now on "
                    f"its instructions are launched one by one.\nfix: leave graphs out",
                    stacklevel=2,
                )
        else:
            self._misses = 0
        moving = [value for leaf, value in self._leaves() if leaf in self._moving]
        if moving:
            foreach_copy_(self._buffers, moving)
        self._values.update(self._inputs)
        assert self._graph is not None, "it was captured"
        self._graph.replay()
        for key_dropped in self._dropped:
            self._values.pop(key_dropped, None)
        self._values.update(self._made)
        if self._commit is not None:
            self._commit.votes = self._votes

    def reset(self) -> None:
        """Free the graph and its memory."""
        self._inputs, self._buffers, self._made, self._votes = {}, [], {}, None
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()

    def addresses(self) -> Iterator[object]:
        """Yield where the state is that the part reads; values that are no tensors."""
        for key in self._reads:
            if key in self._state:
                for value in pytree.tree_leaves(self._table.get(key)):
                    is_tensor = isinstance(value, Tensor)
                    yield (value.data_ptr(), *_form(value), value.stride()) if is_tensor else value

    def _leaves(self) -> Iterator[tuple[Leaf, object]]:
        """Yield the tensors and numbers in the values that the part reads from outside, except
        state."""
        for key in self._reads:
            if key not in self._state:
                for number, value in enumerate(pytree.tree_leaves(self._values.get(key))):
                    yield (key, number), value

    def _present_key(self) -> list[tuple[object, ...]]:
        """Return what must be equal at the capture and at a replay, besides `addresses`."""
        key: list[tuple[object, ...]] = [(None, kernel_flags())]
        for leaf, value in self._leaves():
            if not isinstance(value, Tensor):
                key.append((leaf, type(value), value))
            elif leaf in self._moving:
                key.append((leaf, *_form(value)))
            else:
                key.append((leaf, *_form(value), value.data_ptr(), value.stride()))
        return key

    def _find_moving(self, key: Sequence[tuple[object, ...]]) -> None:
        """Add tensors that are not where they were in the last run to the moving ones."""
        same = {entry[0] for entry, old in zip(key, self._key) if _equal([entry], [old])}
        for leaf, value in self._leaves():
            last = self._last.get(leaf)
            stays = leaf in same or (last is not None and last() is value)
            if isinstance(value, Tensor) and not stays and leaf[0] not in self._fixed:
                self._moving.add(leaf)
            if isinstance(value, Tensor) and value.device.type == "cpu":
                rank, name = leaf[0]
                raise ValueError(f"Its input {name!r} of rank {rank} is a tensor on the CPU.")

    def _capture(self, counter: memoryview) -> None:
        """Capture the part on a side stream. Its kernels do not run."""
        self.reset()
        values, graph = self._values, torch.cuda.CUDAGraph()
        self._stream = self._stream or torch.cuda.Stream()
        moving: dict[tuple[int, str], list[int]] = {}
        for key, number in self._moving:
            moving.setdefault(key, []).append(number)
        for key in self._reads:
            if key in moving:
                leaves, tree = pytree.tree_flatten(values[key])
                for number in sorted(moving[key]):
                    leaves[number] = torch.empty_like(leaves[number])
                    self._buffers.append(leaves[number])
                self._inputs[key] = pytree.tree_unflatten(leaves, tree)
        originals = {key: values[key] for key in self._inputs}
        values.update(self._inputs)
        before = dict(values)
        state = {key: self._table[key] for key in self._state if key in self._table}
        addresses = list(self.addresses())
        with torch.cuda.stream(self._stream), collector_paused():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for position, step in self._steps:
                    counter[0] = position
                    step()
                self._restore_addresses(state)
                if not _equal(list(self.addresses()), addresses):
                    raise ValueError("It moves state to another address.")
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graph = graph
        self._dropped = [key for key in before if key not in values]
        self._made = {key: value for key, value in values.items() if before.get(key) is not value}
        self._votes = None if self._commit is None else self._commit.votes
        values.clear()
        values.update(before | originals)
        self._last, self._key = {}, self._present_key()

    def _restore_addresses(self, before: Table) -> None:
        """Copy state that the part has replaced to its old address, which the next replay reads."""
        for key in self._state:
            old, new = before.get(key), self._table.get(key)
            if new is old:
                continue
            if not (
                isinstance(old, Tensor) and isinstance(new, Tensor) and _form(old) == _form(new)
            ):
                raise ValueError(
                    f"It replaces the state {key[1]!r} of rank {key[0]} by another kind of value."
                )
            old.copy_(new)
            self._table[key] = old


def _values_from_outside(
    program: HostProgram, positions: Sequence[int]
) -> dict[tuple[int, str], None]:
    """Return the values, as (rank, name), that the part reads and has not made before."""
    made: set[tuple[int, str]] = set()
    outside: dict[tuple[int, str], None] = {}
    outputs = [(rank, name) for rank, r in program.ranks.items() for name in r.outputs]
    for position in positions:
        rank, index = program.sites[position]
        instruction = program.ranks[rank].instructions[index]
        outside.update(
            dict.fromkeys((rank, n) for n in instruction.inputs if (rank, n) not in made)
        )
        made.update((rank, name) for name in instruction.outputs)
    outside.update(dict.fromkeys(key for key in outputs if key not in made))  # a graph packs them
    return outside


def _form(value: Tensor) -> tuple[object, ...]:
    return value.shape, value.dtype, value.device


def _equal(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether two lists of keys are equal; values that cannot be compared are not."""
    try:
        return len(a) == len(b) and all(bool(x == y) for x, y in zip(a, b))
    except Exception:
        return False
