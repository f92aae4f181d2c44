"""Ranks in Ray actors: one message per host and run; data goes from host to host.

Example: `RayCluster(4, torch.device("cpu"))` starts Ray on this machine, four hosts and their
connections, about 6 s; `close()` ends all of it. With `ranks_per_actor` a host has several ranks,
whose transfers stay inside. On device "cuda" a host has one GPU to itself: by default each rank
where Ray has enough GPUs, over NCCL (written, and never run: see `nccl.py`); else one host has all
ranks, and collectives are plain device operations.

Invariants: Ray places hosts and notices their death. Calls go over connections of our own
(`run_channel.py`), all of them, so that they keep their order. The controller may run ahead, calls
queue up at the hosts in order; only results are waited for. The first failure, whoever notices it,
is diagnosed once (`watch.py`), kills all hosts, and is raised by everything after. A run has failed
if for `deadline_s` no host moves that has to do something yet before it can end; others may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, hosts_of
from dtensor.daft.errors import ClusterClosed, DaftError, Failure, ProgramError
from dtensor.daft.ir.instructions import Call, Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.joining import Join, check_groups, check_routes
from dtensor.daft.ray.launch_folder import LaunchSeen
from dtensor.daft.ray.messages import ASKED, TOLD, Pickled
from dtensor.daft.ray.operators import Needed
from dtensor.daft.ray.processes import Home
from dtensor.daft.ray.progress import Progress
from dtensor.daft.ray.ranks import Ranks, SentInputs
from dtensor.daft.ray.starting import START_S, own_address, ranks_per_gpu
from dtensor.daft.ray.watch import Asked, HostWatch
from dtensor.daft.run.engine import describe
from dtensor.daft.run.worker import Worker
from dtensor.daft.status.lines import Lines
from dtensor.daft.status.status import Status
from dtensor.daft.verification.pairing import Site, instruction_at


class RayCluster(HostedCluster):
    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        address: str | None = None,
        deadline_s: float = 60.0,
        call_deadline_s: float = 3600.0,
        ranks_per_actor: int | None = None,
        seed: int = 0,
    ) -> None:
        hosts = hosts_of(size, 1 if ranks_per_actor is None else ranks_per_actor)
        super().__init__(size, device, hosts, seed)
        if device not in (torch.device("cpu"), torch.device("cuda")):
            raise ValueError(
                f"The device of Ray actors is 'cpu' or 'cuda', got {str(device)!r}: Ray chooses "
                f"which GPU an actor gets."
            )
        self._tags: dict[Key, int] = {}
        self._sent = SentInputs()
        # by host, its runs that have not come back: (number of the call, of the run)
        self._under_way: list[deque[tuple[int, int]]] = []
        self._home = Home(address, deadline_s)
        try:
            if device.type == "cuda":
                self.hosts = hosts_of(size, ranks_per_gpu(size, ranks_per_actor))
            self._channel = self._home.connect(len(self.hosts))
            self._under_way = [deque() for _ in self.hosts]
            self.watch = HostWatch(
                self,
                self._home,
                self._channel,
                deadline_s=deadline_s,
                call_deadline_s=call_deadline_s,
                due=self._due,
            )
            self._host_of = tuple(h for h, ranks in enumerate(self.hosts) for _ in ranks)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        options = {"num_gpus": 1} if self.device.type == "cuda" else {}
        for host, ranks in enumerate(self.hosts):
            process = self._home.spawn(Ranks, ranks, str(self.device), options=options)
            process.serve(self._channel.invitation(host))
        self._say_hosts()
        join = Join(
            address=own_address(),
            port=self._home.store.port,
            secret=self._home.secret,
            prefix="ranks",
            hosts=tuple(range(len(self.hosts))),
            host_of=self._host_of,
            tags={},
            patience_s=2 * (self.watch.deadline_s + self.watch.call_deadline_s) + 60,
        )
        self._joined([self._ask(h, Ranks.connect, join, h) for h in range(len(self.hosts))])

    def _say_hosts(self) -> None:
        """Whoever looks at the launch hears which process has which ranks."""
        files = [process.counter.path.name for process in self._home.processes]
        self._home.folder.say("ranks", dict(zip(files, self.hosts, strict=True)))

    def _joined(self, asked: Sequence[Asked]) -> None:
        if asked:
            self._wait_for(asked, None, max(START_S, self.watch.deadline_s))

    # -- how a call reaches a host --------------------------------------------------------------
    def _call(self, host: int, run: int | None, read: bool, method: Method, part: Part) -> Asked:
        kind = ASKED if read else TOLD
        if run is None:
            reply = self._channel.send(host, kind, (Ranks.ask, method), part)
        elif method is Worker.run:
            handle, inputs, *rest = part
            inputs, plain = self._sent.split(handle, inputs)
            given = (run, handle, inputs, plain, *rest)
            reply = self._channel.send(host, kind, (Ranks.run_program,), given)
            self._sent.note(run, handle, plain)
        else:
            reply = self._channel.send(host, kind, (Ranks.run, method), (run, *part))
        if run is not None:
            own = self._under_way[host]
            while own and self._channel.came_back(host, own[0][0]):
                own.popleft()
            own.append((reply.number, run))
            self._home.processes[host].counter.asks(run)
        return Asked(self._home.processes[host], reply, self.runs)

    def _count(self, ranks: Sequence[int]) -> int:
        return 1

    def _ask(self, host: int, method: Method, *given: object) -> Asked:
        reply = self._channel.send(host, ASKED, (method,), given)
        return Asked(self._home.processes[host], reply, self.runs)

    def _tell(self, host: int, method: Method, *given: object) -> None:
        self._channel.send(host, TOLD, (method,), given)

    def collect(self, asked: Sequence[Asked], timeout: float | None = None) -> list[Any]:
        if self._closed:
            raise ClusterClosed("This cluster was closed before the result was there.")
        try:
            found = self._wait_for(asked, timeout, None)
        except (DaftError, LookupError) as error:
            self._raise_unread(asked, f"then failed: {error}")
            raise
        self._raise_unread(asked)
        return found

    def _raise_unread(self, asked: Sequence[Asked], note: str = "") -> None:
        """What these hosts were told may have failed, and a run that nobody reads have said so."""
        for each in asked:
            if (unread := self._channel.unread(each.host.index)) is not None:
                if note:
                    unread.add_note(note)
                raise unread from None

    def _wait_for(
        self, asked: Sequence[Asked], timeout: float | None, deadline_s: float | None
    ) -> list[Any]:
        try:
            needed = self._home.processes
            return self.watch.get(asked, timeout, needed=needed, deadline_s=deadline_s)
        except DaftError as error:
            raise self._fail(error) from None
        finally:
            if self._channel.interrupted and self.failure is None:
                self._interrupted()

    def unload(self, handle: Handle) -> None:
        super().unload(handle)
        self._sent.forget(handle.id)
        self._home.folder.forget_lines(handle.id)

    def status(self, seconds: float) -> Status:
        self._check()
        return LaunchSeen(self._home.folder.path).status(seconds)

    def came(self, asked: Sequence[Asked]) -> bool:
        return self.watch.came(asked)

    def _ship(self, handle: Handle) -> Sequence[Asked]:
        keys = check_routes(handle.program, self._host_of)
        missing = [key for key in keys if key not in self._tags]
        new = {key: len(self._tags) + i for i, key in enumerate(missing)}
        if self.device.type == "cuda":
            check_groups([*self._tags, *new], self._host_of)
        program, asked = Pickled.of(handle.program), list[Asked]()
        for host, _ in handle.places:
            # all members of a key take part in each program that uses it
            tags = {k: n for k, n in new.items() if host in {self._host_of[r] for r in k[0]}}
            if tags and self.device.type == "cuda":  # over NCCL the hosts connect here
                asked.append(self._ask(host, Ranks.open, tags))
            elif tags:
                self._tell(host, Ranks.open, tags)
            self.calls += 1
            self._tell(host, Ranks.load, handle.id, handle.report.lists[host], program)
        self._tags.update(new)
        self._home.folder.write_lines(handle.id, Lines.of(handle.program, handle.report.lists))
        return asked

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        needed = Needed.of(program, self.device)
        if not needed.origins:
            for host in hosts if needed else ():  # nothing that could be lacking: no wait for it
                self._tell(host, Ranks.provide, needed)
            return
        asked = [self._ask(host, Ranks.provide, needed) for host in hosts]
        lacking = self._wait_for(asked, None, max(START_S, self.watch.deadline_s))
        if lost := dict(pair for each in lacking for pair in each):
            facts = "".join(f"\n  {name}: {reason}" for name, reason in sorted(lost.items()))
            raise ProgramError(
                f"The program calls ops that the actors cannot have.{facts}\n"
                f"fix: define them with torch.library.custom_op in a module that the actors can "
                f"import; a library in C++, through a custom_op there that calls it"
            )

    def _fail(self, error: DaftError) -> DaftError:
        """End all hosts, once: their values count as lost. The first failure."""
        if self.failure is None:
            self.failure = error
            for host in self._home.processes:
                host.kill()
            for host in self._home.processes:
                host.end()
        return self.failure

    def _end(self) -> None:
        self._home.close()

    def _due(self, asked: Sequence[Asked]) -> dict[int, int]:
        """By host, the last run that it has to end before these calls can come back: of those, and
        of all earlier runs that share a host with one of them at which they have not ended."""
        limit = max((each.before for each in asked), default=0)
        hosts_of: dict[int, list[int]] = {}
        for host, own in enumerate(self._under_way):
            for number, run in own.copy():  # other threads add to it
                if run < limit and not self._channel.came_back(host, number):
                    hosts_of.setdefault(run, []).append(host)
        due: dict[int, int] = {}
        past = {each.host.index for each in asked}
        for run in sorted(hosts_of, reverse=True):
            if not past.isdisjoint(hosts_of[run]):
                past.update(hosts_of[run])
                for host in hosts_of[run]:
                    due.setdefault(host, run)
        return due

    # -- what the watch asks --------------------------------------------------------------------
    def describe(self, host: int, at: Progress, reason: str) -> Failure:
        if (known := self._at(host, at)) is None:
            rank, reason = self.hosts[host][0], f"{reason} It was between runs."
            return Failure(rank=rank, known_as=self.known_as.get(rank, ""), reason=reason)
        handle, site = known
        return replace(describe(handle.program, site, reason), step=at.run)

    def at_work(self, host: int, at: Progress) -> bool:
        known = self._at(host, at)  # between runs it may unpack what it is given, or load it
        return known is None or isinstance(instruction_at(known[0].program, known[1]), Call)

    def _at(self, host: int, at: Progress) -> tuple[Handle, Site] | None:
        """The instruction that a host was last seen at; none between runs."""
        handle = self._handles.get(at.program)
        if handle is None or not 0 <= at.position < len(handle.report.lists[host]):
            return None
        return handle, handle.report.lists[host][at.position]
