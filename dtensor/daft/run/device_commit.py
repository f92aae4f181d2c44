"""The commit point of a run whose values the host does not read, on one host.

    commit = DeviceCommit(program, device)
    commit.begin()                          # each run
    commit.vote(rank, rows)                 # f32[]: 1 if a row of the rank has a fault, else 0
    commit.predicate(total)                 # f32[]: exactly 1 if a rank has failed, else exactly 0
    pending = commit.finish(results, faults)
    for site, error, line in commit.faults(rows): ...     # once a copy of the rows is on the host

Each function that makes checks has a row i64[3] (`Check`): the position of its first failed check
plus 1, the first wrong value, the number of wrong values. Votes and predicates are tensors on the
device, so no wait of the host is between the calls of a run and its writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Call, Vote
from dtensor.daft.run.packed import Packed
from dtensor.daft.undo.failed_run import Fault
from dtensor.daft.verification.pairing import Site, instruction_at

Results: TypeAlias = dict[int, dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredRun:
    """A run of a host that was launched, whose outcome only the device knows.

    `results`: the outputs of each rank; they mean nothing if the run was undone. `rows`: the rows
    i64[n, 3] of the host's calls, in the order of `DeviceCommit.sites`. `skip`: f32[], 1 if the run
    was undone. `faults`: of the host's own exceptions. `packed`: small tensors of these, if a CUDA
    graph has packed them.
    """

    results: Results
    rows: Tensor
    skip: Tensor
    faults: tuple[Fault, ...] = ()
    packed: Packed | None = None


@dataclass(frozen=True, slots=True)
class Votes:
    """The tensors of a run's commit point: the word and the rows of each rank, the predicate; if
    the run has ended, the rows of all ranks, and all small results in one tensor."""

    words: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    rows: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    skip: Tensor | None = None
    joined: Tensor | None = None
    packed: Packed | None = None


@dataclass(slots=True)
class DeviceCommit:
    """The votes and the predicate of the current run of a program on one host."""

    program: HostProgram
    device: torch.device
    sites: tuple[Site, ...] = ()
    """The call of each row, rank by rank."""
    _words: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _skip: Tensor | None = None
    _joined: Tensor | None = None
    _packed: Packed | None = None

    @staticmethod
    def of(program: HostProgram, device: torch.device) -> DeviceCommit | None:
        """Return the device's commit point of a program; None if the host reads the votes."""
        if not any(rank_program.is_deferred for rank_program in program.ranks.values()):
            return None
        sites: list[Site] = []
        for rank, rank_program in program.ranks.items():
            instructions = rank_program.instructions
            vote = next((i for i in instructions if isinstance(i, Vote)), None)
            for row in () if vote is None else vote.faults:
                reads = (
                    index
                    for index, call in enumerate(instructions)
                    if isinstance(call, Call) and row in call.inputs
                )
                sites.append((rank, next(reads)))
        return DeviceCommit(program, device, tuple(sites))

    def begin(self) -> None:
        """Begin a run."""
        self.votes = Votes()

    @property
    def votes(self) -> Votes:
        """The tensors of the run, which each replay of a CUDA graph makes again."""
        words, rows = dict(self._words), dict(self._rows)
        return Votes(words, rows, self._skip, self._joined, self._packed)

    @votes.setter
    def votes(self, votes: Votes) -> None:
        self._words, self._rows, self._skip = dict(votes.words), dict(votes.rows), votes.skip
        self._joined, self._packed = votes.joined, votes.packed

    def vote(self, rank: int, rows: Sequence[object], *, failed: bool = False) -> Tensor:
        """Return the vote of a rank. ``failed``: a call of the rank has raised; its rows may be
        None."""
        if tensors := [row for row in rows if isinstance(row, Tensor)]:
            self._rows[rank] = torch.stack(tensors)
        if failed:
            word = torch.ones((), device=self.device)
        elif tensors:
            word = self._rows[rank][:, 0].any().to(torch.float32)
        else:
            word = torch.zeros((), device=self.device)
        self._words[rank] = word
        return word

    def predicate(self, total: Tensor | None) -> Tensor:
        """Return 1 if a rank has failed, else 0. ``total``: the sum of all votes, or None if all
        ranks are on this host: they have all voted."""
        if total is not None:
            self._skip = (total != 0).to(torch.float32)
        elif self._skip is None:
            words = tuple(self._words.values())
            self._skip = words[0] if len(words) == 1 else torch.stack(words).amax()
        return self._skip

    def finish(self, results: Results, faults: Sequence[Fault]) -> DeferredRun:
        """Return the run, and drop its tensors."""
        rows, packed = self._all_rows(), self._packed
        skip = torch.ones((), device=self.device) if self._skip is None else self._skip
        self.begin()
        return DeferredRun(
            results=results, rows=rows, skip=skip, faults=tuple(faults), packed=packed
        )

    def pack(self, results: Results) -> None:
        """Pack the small tensors of the run that has ended."""
        self._joined = self._all_rows()
        outputs = [value for named in results.values() for value in named.values()]
        self._packed = Packed.of(self._joined.device, [self._joined, self._skip, *outputs])

    def _all_rows(self) -> Tensor:
        if self._joined is not None:
            return self._joined
        rows = [self._rows_of(rank) for rank in self.program.ranks]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _rows_of(self, rank: int) -> Tensor:
        """Return the rows of a rank: zeros if it failed before it had any."""
        if rank in self._rows:
            return self._rows[rank]
        num = sum(site[0] == rank for site in self.sites)
        return torch.zeros(num, 3, dtype=torch.int64, device=self.device)

    def faults(self, rows: Tensor) -> Iterator[tuple[Site, Exception, str | None]]:
        """Yield the fault of each row that has one: its call, its error, and the user's line.
        ``rows``: of the `DeferredRun`, in the host's memory."""
        functions = dict(self.program.functions)
        numbers: list[list[int]] = cast(Any, rows).tolist()
        for site, (position, value, count) in zip(self.sites, numbers, strict=True):
            if position:
                call = cast(Call, instruction_at(self.program, site))
                check = functions[call.fn].checks[position - 1]
                yield site, check.error(value, count), check.source
