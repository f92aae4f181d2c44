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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Call, Commit, Vote
from dtensor.daft.undo.failed_run import Fault
from dtensor.daft.verification.pairing import Site, instruction_at

Results: TypeAlias = dict[int, dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredRun:
    """A run of a host that was launched, whose outcome only the device knows.

    `results`: the outputs of each rank; they mean nothing if the run was undone. `rows`: the rows
    i64[n, 3] of the host's calls, in the order of `DeviceCommit.sites`. `skip`: f32[], 1 if the run
    was undone. `faults`: of the host's own exceptions.
    """

    results: Results
    rows: Tensor
    skip: Tensor
    faults: tuple[Fault, ...] = ()


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

    @staticmethod
    def of(program: HostProgram, device: torch.device) -> DeviceCommit | None:
        """Return the device's commit point of a program; None if the host reads the votes."""
        sites: list[Site] = []
        deferred = False
        for rank, rank_program in program.ranks.items():
            instructions = rank_program.instructions
            vote = next((i for i in instructions if isinstance(i, Vote)), None)
            deferred |= any(isinstance(i, Commit) and i.predicate for i in instructions)
            for row in () if vote is None else vote.faults:
                reads = (
                    index
                    for index, call in enumerate(instructions)
                    if isinstance(call, Call) and row in call.inputs
                )
                sites.append((rank, next(reads)))
        return DeviceCommit(program, device, tuple(sites)) if deferred else None

    def begin(self) -> None:
        """Begin a run."""
        self._words, self._rows, self._skip = {}, {}, None

    @property
    def votes(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor | None]:
        """The words, the rows and the predicate of the run, which a CUDA graph makes again."""
        return dict(self._words), dict(self._rows), self._skip

    @votes.setter
    def votes(self, votes: tuple[dict[int, Tensor], dict[int, Tensor], Tensor | None]) -> None:
        self._words, self._rows, self._skip = dict(votes[0]), dict(votes[1]), votes[2]

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
        rows = [self._rows_of(rank) for rank in self.program.ranks]
        skip = torch.ones((), device=self.device) if self._skip is None else self._skip
        self.begin()
        return DeferredRun(
            results=results,
            rows=rows[0] if len(rows) == 1 else torch.cat(rows),
            skip=skip,
            faults=tuple(faults),
        )

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
