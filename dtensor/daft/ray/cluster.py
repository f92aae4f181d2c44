"""Ranks in Ray actors: one asynchronous call per host and run; data goes from host to host.

Example: `RayCluster(4, torch.device("cpu"))` starts Ray on this machine, four hosts and their
connections, about 6 s; `close()` ends all of it. With `ranks_per_actor` a host has several ranks,
whose transfers stay inside. On device "cuda" a host has one GPU to itself: by default each rank
where Ray has enough GPUs, over NCCL (written, and never run: see `nccl.py`); else one host has all
ranks, and collectives are plain device operations.

Invariants: Ray places hosts, notices their death and carries calls; it carries no tensors between
hosts. The controller may run ahead, calls queue up at the hosts in order; only results are waited
for. The first failure, whoever notices it, is diagnosed once (`watch.py`), kills all hosts, and is
raised by everything after. A run whose hosts make no progress for `deadline_s` has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, hosts_of
from dtensor.daft.errors import ClusterClosed, DaftError, Failure, ProgramError
from dtensor.daft.ir.instructions import Call, Key
from dtensor.daft.ray.joining import Join, check_groups, check_routes
from dtensor.daft.ray.operators import Needed
from dtensor.daft.ray.processes import Home
from dtensor.daft.ray.progress import Progress
from dtensor.daft.ray.ranks import Ranks, pack, unpack
from dtensor.daft.ray.starting import START_S, own_address, ranks_per_gpu
from dtensor.daft.ray.watch import Asked, HostWatch
from dtensor.daft.run.engine import describe
from dtensor.daft.run.worker import Worker
from dtensor.daft.verification.pairing import Site, instruction_at

_ray: Any = ray  # Ray's stubs leave most of its types unknown


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
        self._home = Home(address, deadline_s)
        self.watch = HostWatch(
            self, self._home, deadline_s=deadline_s, call_deadline_s=call_deadline_s, moves=True
        )
        try:
            if device.type == "cuda":
                self.hosts = hosts_of(size, ranks_per_gpu(size, ranks_per_actor))
            self._host_of = tuple(h for h, ranks in enumerate(self.hosts) for _ in ranks)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        options = {"num_gpus": 1} if self.device.type == "cuda" else {}
        for ranks in self.hosts:
            self._home.spawn(Ranks, ranks, str(self.device), options=options)
        join = Join(
            address=own_address(),
            port=self._home.store.port,
            prefix="ranks",
            hosts=tuple(range(len(self.hosts))),
            host_of=self._host_of,
            tags={},
            patience_s=2 * (self.watch.deadline_s + self.watch.call_deadline_s) + 60,
        )
        hosts = self._home.processes
        self._connect([Asked(h, h.call(Ranks.connect, join, h.index)) for h in hosts])

    def _connect(self, asked: Sequence[Asked]) -> None:
        self._wait_for(asked, None, max(START_S, self.watch.deadline_s))

    # -- how a call reaches a host --------------------------------------------------------------
    def _call(self, host: int, run: int | None, read: bool, method: Method, part: Part) -> Asked:
        self.calls += 1
        process = self._home.processes[host]
        send = process.call if read else process.tell
        if run is None:
            return Asked(process, send(Ranks.ask, method, *map(pack, part)))
        return Asked(process, send(Ranks.run, run, method, *map(pack, part)))

    def collect(self, asked: Sequence[Asked], timeout: float | None = None) -> list[Any]:
        if self._closed:
            raise ClusterClosed("This cluster was closed before the result was there.")
        found = self._wait_for(asked, timeout, None)
        return [unpack(each, own=True) for each in found]

    def _wait_for(
        self, asked: Sequence[Asked], timeout: float | None, deadline_s: float | None
    ) -> list[Any]:
        try:
            needed = self._home.processes
            return self.watch.get(asked, timeout, needed=needed, deadline_s=deadline_s)
        except DaftError as error:
            raise self._fail(error) from None

    def came(self, asked: Sequence[Asked]) -> bool:
        return self.watch.came(asked)

    def _ship(self, handle: Handle) -> None:
        if needed := Needed.of(handle.program, self.device):
            self._provide(needed)
        keys = check_routes(handle.program, self._host_of)
        new = [key for key in keys if key not in self._tags]
        if self.device.type == "cuda":
            check_groups([*self._tags, *new], self._host_of)
        self._tags.update((key, len(self._tags) + i) for i, key in enumerate(new))
        hosts = self._home.processes if new else []
        if self.device.type == "cuda":  # over NCCL the hosts connect here
            self._connect([Asked(host, host.call(Ranks.open, self._tags)) for host in hosts])
        else:
            for host in hosts:
                host.tell(Ranks.open, self._tags)
        shipped = _ray.put(handle.program)
        for host, sites in zip(self._home.processes, handle.report.lists, strict=True):
            self.calls += 1
            host.tell(Ranks.ask, Worker.load, handle.id, sites, values=[shipped])

    def _provide(self, needed: Needed) -> None:
        hosts = self._home.processes
        asked = [Asked(host, host.call(Ranks.provide, needed)) for host in hosts]
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

    # -- what the watch asks --------------------------------------------------------------------
    def describe(self, host: int, at: Progress, reason: str) -> Failure:
        if (known := self._at(host, at)) is None:
            return Failure(rank=self.hosts[host][0], reason=f"{reason} It was between runs.")
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
