"""Tests recovery by simulation: hosts die or lose their connections at random instructions.

    ops = drawn(random.Random(7), 2, 14)         # puts, deletes, runs on some ranks
    calm = World(2, 0).play(ops)
    world = World(2, 7, store="file", folder=folder).play(ops, faults=0.03, kills=True)
    differs(calm.tables()[0], world.tables()[0]) == ""

Each host has one rank and a real `Worker`; all share one `LocalTransport` and run in random order.
After a loss, a new host opens the file of the dead one, each host rolls back to the recovery line,
and the controller resends all later calls. Checked at each rollback: the host can go back, and its
table is then bitwise what it was, except for replayable values.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.cluster.recovery_line import ChangeLog
from dtensor.daft.ir.host_program import HostProgram, host_programs
from dtensor.daft.ir.instructions import WORD
from dtensor.daft.run.transport import LocalTransport, Pending
from dtensor.daft.run.worker import Counted, HostRun, Worker
from dtensor.daft.undo.failed_run import Poisoned, UndoneCounts
from dtensor.daft.undo.rollback import TableChange
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import MemorySnapshots, SnapshotStore
from dtensor.daft.verification.pairing import instruction_at
from dtensor.daft.verification.verifier import verify

CPU = torch.device("cpu")
NUMBER = Buffer((), torch.float64)
Table = dict[tuple[int, str], object]


# -- programs --------------------------------------------------------------------------------------


def _made(x: Tensor) -> tuple[Tensor]:
    if x.item() == 0:
        raise ArithmeticError("zero")
    return (x * 2 + 1,)


def _write(w: Tensor, m: Tensor, y: Tensor, n: object) -> tuple[()]:
    """Write `w` so that the number and the order of writes show in its value."""
    w.mul_(1.25).add_(y)
    m.add_(w.sum()).add_(int(str(n)))
    return ()


def _grown(k: Tensor, y: Tensor) -> tuple[Tensor]:
    return (torch.cat((k, y.reshape(1)))[-5:],)


def _cached(c: Tensor, x: Tensor, n: object) -> tuple[()]:
    c[int(x.item()) % 4] = x
    return ()


def _seated(c: Tensor, y: Tensor) -> tuple[()]:
    c.copy_(c.flip(0) + y)
    return ()


FUNCTIONS = {
    name: Function.of(fn, name)
    for name, fn in (
        ("made", _made),
        ("write", _write),
        ("grown", _grown),
        ("cached", _cached),
        ("seated", _seated),
    )
}

Kind = Literal["step", "plain", "grow", "seat"]


def program(size: int, members: Sequence[int], kind: Kind) -> Program:
    """Return a program of one kind. "step": writes at its commit point, and a cache before it;
    "plain": like step without a commit point, each rank sending to the next; "grow": creates a
    state value again; "seat": writes the cache."""
    group = tuple(members)
    lists: list[RankProgram] = [RankProgram(instructions=())] * size
    for rank in group:
        items: list[Instruction] = [Call("made", ("x",), ("y",))]
        state, replayable, free = ["w", "m"], (), []
        if kind == "step":
            items.append(Call("cached", ("c", "x", "n"), (), ("c",)))
            state, replayable = [*state, "c"], ("c",)
        if kind == "plain" and len(group) > 1:
            at = group.index(rank)
            after, before = group[(at + 1) % len(group)], group[at - 1]
            items += [
                Send("y", after, "ring", NUMBER),
                Recv("z", before, "ring", NUMBER),
                Wait(("y", "z")),
            ]
            free.append("z")
        elif kind != "plain" and len(group) > 1:
            words = ("v",), ("s",), (WORD,), (WORD,)
            items += [Vote("v"), Collective("all_reduce", group, *words, "sum", "agree")]
            items += [Wait(("s",)), Commit("s")]
            free += ["v", "s"]
        elif kind != "plain":
            items += [Vote("v"), Commit("v")]
            free.append("v")
        read = "z" if "z" in free else "y"
        items.append(Call("write", ("w", "m", read, "n"), (), ("w", "m")))
        if kind == "grow":
            items.append(Call("grown", ("k", "y"), ("k",)))
            state.append("k")
        if kind == "seat":
            items.append(Call("seated", ("c", "y"), (), ("c",)))
            state.append("c")
        if free:
            items.append(Free(tuple(free)))
        lists[rank] = RankProgram(
            instructions=tuple(items),
            inputs=("x", "n"),
            outputs=("y",),
            state=tuple(state),
            replayable=replayable,
        )
    return Program(
        name=f"{kind} {group}",
        ranks=tuple(lists),
        functions=tuple(FUNCTIONS.items()),
        stage_of=tuple(range(size)),
    )


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Put:
    values: Mapping[int, Mapping[str, object]]
    drop: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Delete:
    names: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class Run:
    members: tuple[int, ...]
    kind: Kind
    x: float
    keep: str = ""
    drop: Mapping[int, Sequence[str]] = field(default_factory=dict)


Op = Put | Delete | Run


def drawn(draw: random.Random, size: int, count: int) -> list[Op]:
    """Return a random sequence of operations that drop, delete and read only existing values."""
    ops: list[Op] = [
        Put(
            {
                rank: {
                    "w": torch.full((3,), float(rank)),
                    "m": torch.zeros((), dtype=torch.float64),
                    "c": torch.zeros(4),
                    "k": torch.zeros(2, dtype=torch.float64),
                    "f": torch.full((5,), rank, dtype=torch.bfloat16),
                }
                for rank in range(size)
            }
        )
    ]
    there: dict[int, list[str]] = {rank: [] for rank in range(size)}  # values that may be dropped

    def going(ranks: Sequence[int]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for rank in ranks:
            if there[rank] and draw.random() < 0.4:
                found[rank] = [there[rank].pop(draw.randrange(len(there[rank])))]
        return found

    for number in range(count):
        some = sorted(draw.sample(range(size), draw.randint(1, size)))
        choice = draw.random()
        if choice < 0.15:
            name = draw.choice(("f", "w", f"p{number}", "p0"))
            drop = going(some)
            values: dict[int, dict[str, object]] = {}
            for rank in some:
                odd = draw.choice((draw.random(), "a text", [number, rank]))
                wide = torch.full((3,), float(number), requires_grad=name == "f")
                values[rank] = {name: wide if name in ("w", "f") else odd}
                if name.startswith("p") and name not in there[rank]:
                    there[rank].append(name)
            ops.append(Put(values, drop))
        elif choice < 0.25:
            if names := going(range(size)):
                ops.append(Delete(names))
        else:
            members = tuple(range(size)) if draw.random() < 0.5 else tuple(some)
            kind: Kind = draw.choice(("step", "step", "step", "plain", "grow", "seat"))
            fails = kind in ("step", "grow", "seat") and draw.random() < 0.15
            keep = draw.choice(("", "", f"k{number}", "kept"))
            drop = going(members)
            if keep:
                for rank in members:
                    if keep not in there[rank]:
                        there[rank].append(keep)
            x = 0.0 if fails else float(draw.randint(1, 9))
            ops.append(Run(members, kind, x, keep, drop=drop))
    return ops


# -- hosts -----------------------------------------------------------------------------------------


class _Ready(LocalTransport):
    """A transport whose waits can be asked whether they would block."""

    def missing(self, pending: Pending) -> bool:
        return bool(pending.meeting.missing)  # type: ignore[attr-defined]


@dataclass
class _Host:
    rank: int
    worker: Worker
    queue: deque[tuple[Any, tuple[Any, ...], TableChange]] = field(default_factory=deque)
    at: int | None = None
    """The position in the run under way."""
    was: dict[int, Table] = field(default_factory=dict)
    """Copies of the table after changes."""


class World:
    def __init__(
        self,
        size: int,
        seed: int,
        *,
        store: Literal["copies", "file"] = "copies",
        folder: Path | None = None,
        every: int = 1,
    ) -> None:
        self.size = size
        self.draw = random.Random(seed)
        self.kind, self.folder = store, folder
        self.changes = ChangeLog(size, every)
        self.every = every
        self.transport = _Ready()
        self.programs: dict[tuple[tuple[int, ...], Kind], int] = {}
        self.lists: dict[int, tuple[HostProgram, ...]] = {}
        self.runs = 0
        self.counts: dict[str, int] = {}
        self.rolled_back = 0
        self.slow = 0
        self.most = 0
        self.sent: list[list[tuple[Any, tuple[Any, ...], TableChange]]] = [[] for _ in range(size)]
        self.hosts = [_Host(rank, self._worker(rank, self._fresh(rank))) for rank in range(size)]
        for host in self.hosts:
            host.was[0] = {}

    def _fresh(self, rank: int) -> SnapshotStore:
        if self.kind == "copies":
            return MemorySnapshots()
        assert self.folder is not None
        return SnapshotFile.create(self.folder, (rank,))

    def _worker(self, rank: int, store: SnapshotStore) -> Worker:
        return Worker((rank,), CPU, self.transport, snapshots=store)

    # -- the controller ---------------------------------------------------------------------------

    def submit(self, op: Op) -> None:
        match op:
            case Put():
                places = sorted(op.values)
                parts = [
                    ({r: op.values[r]}, {r: op.drop[r]} if r in op.drop else {}) for r in places
                ]
                self._send(Worker.put, places, parts, together=False, commits=False)
            case Delete():
                places = sorted(op.names)
                parts = [({r: op.names[r]},) for r in places]
                self._send(Worker.delete, places, parts, together=False, commits=False)
            case Run():
                handle = self._program(op)
                number = self.counts.setdefault(str(op.members), 0)
                self.counts[str(op.members)] += 1
                x = torch.tensor(op.x, dtype=torch.float64)
                counted = Counted(str(op.members), 0, "n")
                keep = {"y": op.keep} if op.keep else {}
                parts = [
                    (
                        HostRun(
                            handle,
                            self.runs,
                            {rank: {"x": x + rank * (op.x != 0), "n": number}},
                            keep,
                            counted,
                            drop={rank: op.drop[rank]} if rank in op.drop else {},
                        ),
                    )
                    for rank in op.members
                ]
                self.runs += 1
                commits = op.kind != "plain"
                self._send(Worker.begin, op.members, parts, together=True, commits=commits)

    def _send(
        self,
        method: Any,
        places: Sequence[int],
        parts: Sequence[tuple[Any, ...]],
        *,
        together: bool,
        commits: bool,
    ) -> None:
        number, sure, taken = self.changes.add(places, together=together, commits=commits)
        for rank, part, committed in zip(places, parts, sure, strict=True):
            message = method, part, TableChange(number, committed, taken)
            self.sent[rank].append(message)
            self.hosts[rank].queue.append(message)

    def _program(self, op: Run) -> int:
        key = op.members, op.kind
        if key not in self.programs:
            made = program(self.size, *key)
            hosts = tuple((rank,) for rank in range(self.size))
            handle = self.programs[key] = len(self.programs)
            self.lists[handle] = tuple(host_programs(made, hosts, verify(made, hosts).lists))
            for rank in op.members:
                self.hosts[rank].worker.load(handle, self.lists[handle][rank])
        return self.programs[key]

    # -- what hosts do ----------------------------------------------------------------------------

    def step(self, host: _Host) -> bool:
        """Handle one message, or one instruction of it. Return False if the host has to wait."""
        if not host.queue:
            return False
        method, part, change = host.queue[0]
        if method is not Worker.begin:
            method(host.worker, *part, change)
            self._ended(host, change)
            return True
        run: HostRun = part[0]
        handle = run.program
        own = self.lists[handle][host.rank]
        sites = own.sites
        if host.at is None:
            method(host.worker, _sent(run, change))
            host.at = 0
        elif host.at == len(sites):
            host.worker.finish(handle)
            host.at = None
            self._ended(host, change)
        else:
            if isinstance(instruction_at(own, sites[host.at]), Wait):
                engine = host.worker.engines[handle]
                waited = engine._waits[host.rank][sites[host.at][1]]
                if any(self.transport.missing(engine._pending[host.rank, s]) for s in waited):
                    return False
            host.worker.step(handle, host.at)
            host.at += 1
        return True

    def _ended(self, host: _Host, change: TableChange) -> None:
        host.queue.popleft()
        host.was[change.number] = copied(host.worker)
        assert host.worker._rollback is not None
        snapshots = host.worker._rollback.snapshots
        self.most = max(self.most, *map(len, snapshots._versions.values()), 0)
        if self.draw.random() < 0.3:
            self.changes.heard(host.rank, change.number)

    def settle(self, faults: float = 0.0, kills: bool = False, until: int = 0) -> None:
        """Run until at most `until` messages are left; each step has a fault with probability
        `faults`."""
        while sum(len(host.queue) for host in self.hosts) > until:
            if faults and self.draw.random() < faults:
                self.fault(kills)
            if self.draw.random() < 0.02:
                self.slow = self.draw.randrange(self.size)
            order = self.draw.sample(self.hosts, self.size)
            order.sort(key=lambda host: host.rank == self.slow)  # others run first
            assert any(self.step(host) for host in order), "no host can go on"

    def fault(self, kills: bool) -> None:
        self.rolled_back += 1
        dead = {r for r in range(self.size) if kills and self.draw.random() < 0.5}
        self.transport = _Ready()
        for host in self.hosts:
            if host.rank in dead:
                assert self.folder is not None
                left = SnapshotFile.open(self.folder, (host.rank,))
                host.worker = self._worker(host.rank, left)
            else:
                host.worker.transport = self.transport
                for handle in tuple(host.worker.engines):
                    host.worker.unload(handle)
            for (members, _), handle in self.programs.items():
                if host.rank in members:
                    host.worker.load(handle, self.lists[handle][host.rank])
        cut = self.changes.recovery_line([host.worker.ended() for host in self.hosts])
        for host in self.hosts:
            to, rank = cut[host.rank], host.rank
            assert host.worker.roll_back(to) == to == host.worker.ended()
            difference = differs(copied(host.worker), host.was[to], lasting_only=True)
            assert not difference, (rank, to, difference)
            again = [message for message in self.sent[rank] if message[2].number > to]
            left = {m[2].number for m in host.queue}
            assert left <= {m[2].number for m in again}
            host.queue, host.at = deque(again), None
        self.changes.rolled_back(cut)

    def play(self, ops: Sequence[Op], faults: float = 0.0, *, kills: bool = False) -> World:
        for op in ops:
            self.submit(op)
            self.settle(faults, kills, until=self.draw.choice((0, 2, 6, 12)) if faults else 0)
        self.settle(faults, kills)
        return self

    def left_over(self) -> list[tuple[int, str]]:
        """Return what hosts still keep after they know that everything is committed."""
        for _ in range(2 * self.every):  # per snapshot: a run that reports it, and a run after it
            for host in self.hosts:
                self.changes.heard(host.rank, host.worker.ended())
            self.play([Run(tuple(range(self.size)), "step", 1.0)])
        found: list[tuple[int, str]] = []
        for host in self.hosts:
            assert host.worker._rollback is not None
            snapshots = host.worker._rollback.snapshots
            if snapshots.outlives:
                found += {key for key in snapshots._versions if key not in host.worker._table}
            for key, own in snapshots._versions.items():
                alike = Counter(record.keys for record in own)
                found += [key] * (max(alike.values()) > 2)
        return found

    def tables(self) -> list[Table]:
        return [copied(host.worker) for host in self.hosts]


def _sent(run: HostRun, change: TableChange) -> HostRun:
    """Return a copy of the run as it arrives; the run may change its inputs."""
    inputs = {rank: dict(own) for rank, own in run.inputs.items()}
    return HostRun.of(run._replace(inputs=inputs, change=change).plain())


def copied(worker: Worker) -> Table:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in worker._table.items()
    }


def differs(one: Table, other: Table, *, lasting_only: bool = False) -> str:
    """Describe which values of two tables are not bitwise equal; "" if none."""

    def wanted(key: tuple[int, str]) -> bool:
        return not (lasting_only and key[1] == "c")

    if missing := {*filter(wanted, one)} ^ {*filter(wanted, other)}:
        return f"only in one: {sorted(missing)}"
    for key in filter(wanted, sorted(one)):
        a, b = one[key], other[key]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.dtype == b.dtype and torch.equal(a, b)
        elif isinstance(a, UndoneCounts) and isinstance(b, UndoneCounts):
            same = dict(a.runs) == dict(b.runs) and _runs(a) == _runs(b)
        elif isinstance(a, Poisoned) and isinstance(b, Poisoned):
            same = a.failure.step == b.failure.step
        else:
            same = type(a) is type(b) and a == b
        if not same:
            return f"{key}: {a} and {b}"
    return ""


def _runs(counters: UndoneCounts) -> list[int | None]:
    return [undone.run for undone in counters.undone]
