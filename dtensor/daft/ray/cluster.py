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

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import ray
import torch

from dtensor.daft.cluster.cluster import (
    Cluster,
    Finished,
    Future,
    Handle,
    Mode,
    check_inputs,
    check_size,
    hosts_of,
)
from dtensor.daft.errors import ClusterClosed, CommunicationError, DaftError, Failure
from dtensor.daft.ir.instructions import Call, Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.joining import Join, check_groups, check_routes
from dtensor.daft.ray.processes import Home, HostProcess
from dtensor.daft.ray.progress import Progress
from dtensor.daft.ray.ranks import Ranks, pack, unpack, unpack_all
from dtensor.daft.ray.starting import own_address, ranks_per_gpu
from dtensor.daft.ray.watch import Asked, HostWatch
from dtensor.daft.run.engine import describe
from dtensor.daft.run.worker import NOTHING_KEPT
from dtensor.daft.verification.pairing import Site, instruction_at, merge_sites
from dtensor.daft.verification.verifier import check_state, verify

_ray: Any = ray  # Ray's stubs leave most of its types unknown


Method: TypeAlias = Callable[..., object]
"""Of `Ranks`."""


class RayCluster(Cluster):
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
        self.size = size
        self.device = device
        self.calls = 0
        self.runs = 0
        self.hosts = hosts_of(size, 1 if ranks_per_actor is None else ranks_per_actor)
        if device not in (torch.device("cpu"), torch.device("cuda")):
            raise ValueError(
                f"The device of Ray actors is 'cpu' or 'cuda', got {str(device)!r}: Ray chooses "
                f"which GPU an actor gets."
            )
        self._seed = seed
        self._tags: dict[Key, int] = {}
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0
        self._closed = False
        self._lock = threading.RLock()  # runs have one order, the same at every host
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
        self._collect(self._submit(Ranks.connect, [(join, index) for index in join.hosts]))

    @property
    def failure(self) -> DaftError | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.watch.failure

    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        check_size(self.size, values, "put")
        parts = [({rank: _packed(values[rank]) for rank in ranks},) for ranks in self.hosts]
        self._submit(Ranks.put, parts, read=False)

    def get(self, names: Sequence[Sequence[str]]) -> Future:
        check_size(self.size, names, "get")
        wanted = [({r: tuple(names[r]) for r in ranks},) for ranks in self.hosts]
        return RayFuture(self._collect, self._submit(Ranks.get, wanted), self._tuples)

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        check_size(self.size, names, "delete")
        unwanted = [({r: tuple(names[r]) for r in ranks},) for ranks in self.hosts]
        self._submit(Ranks.delete, unwanted, read=False)

    def load(self, program: Program) -> Handle:
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, self.hosts, self._seed)
        keys = check_routes(program, self._host_of)
        with self._lock:
            check_state((handle.program for handle in self._handles.values()), program)
            new = [key for key in keys if key not in self._tags]
            if self.device.type == "cuda":
                check_groups([*self._tags, *new], self._host_of)
            shipped = _ray.put(program)
            for key in new:
                self._tags[key] = len(self._tags)
            handle = Handle(self._next_handle, program, report)
            self._next_handle += 1
            self._handles[handle.id] = handle
            parts = [(handle.id, shipped, sites, dict(self._tags)) for sites in report.lists]
            if self.device.type == "cuda":  # over NCCL the hosts connect here
                self._collect(self._submit(Ranks.load, parts))
            else:
                self._submit(Ranks.load, parts, read=False)
        return handle

    def unload(self, handle: Handle) -> None:
        with self._lock:
            self._submit(Ranks.unload, [(handle.id,)] * len(self.hosts), read=False)
            del self._handles[handle.id]

    def run(
        self,
        handle: Handle,
        inputs: Sequence[Mapping[str, object]],
        *,
        mode: Mode = "compiled",
        keep: Mapping[str, str] = NOTHING_KEPT,
    ) -> Future:
        self._check()
        check_inputs(handle, inputs)
        fed = [{r: _packed(inputs[r]) for r in ranks} for ranks in self.hosts]
        with self._lock:
            run, self.runs = self.runs, self.runs + 1
            if mode != "interpreted":
                parts = [(handle.id, run, own, dict(keep), mode == "timed") for own in fed]
                return RayFuture(self._collect, self._submit(Ranks.run, parts), self._dicts)
            try:
                return self._run_interpreted(handle, run, fed, dict(keep))
            except DaftError as error:
                return Finished([], error)
            except BaseException:
                self._interrupted()
                raise

    def _run_interpreted(
        self,
        handle: Handle,
        run: int,
        fed: Sequence[Mapping[int, object]],
        keep: Mapping[str, str],
    ) -> Future:
        """One instruction at a time, in an order in which a single thread would never block."""
        self._collect(self._submit(Ranks.begin, [(handle.id, run, own) for own in fed]))
        position = {s: i for sites in handle.report.lists for i, s in enumerate(sites)}
        everyone = (tuple(range(self.size)),)
        for site in merge_sites(handle.program, everyone, self._seed)[0]:
            host = self._home.processes[self._host_of[site[0]]]
            self._collect([self._call(host, True, Ranks.step, handle.id, run, position[site])])
        made = self._submit(Ranks.finish, [(handle.id, keep)] * len(self.hosts))
        return Finished(self._dicts(self._collect(made)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
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

    # -- calls ----------------------------------------------------------------------------------
    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure

    def _submit(
        self, method: Method, parts: Sequence[tuple[object, ...]], *, read: bool = True
    ) -> list[Asked]:
        """One call to each host, with its part, and no other thread's between them: so all hosts
        see one order, on which it rests that runs of several programs cannot hang. Unless it is
        `read`, the next one that is will say what it has raised."""
        with self._lock:
            self._check()
            asked: list[Asked] = []
            try:
                for host, part in zip(self._home.processes, parts, strict=True):
                    asked.append(self._call(host, read, method, *part))
            except BaseException as error:
                if asked or not isinstance(error, Exception):
                    self._interrupted()  # hosts that were called would wait for the others
                raise
            return asked

    def _call(self, host: HostProcess, read: bool, method: Method, *arguments: object) -> Asked:
        self.calls += 1
        return Asked(host, (host.call if read else host.tell)(method, *arguments))

    def _collect(self, asked: Sequence[Asked], timeout: float | None = None) -> list[Any]:
        """The results of calls, of which there is one to each host in all but interpreted runs."""
        if self._closed:
            raise ClusterClosed("This cluster was closed before the result was there.")
        try:
            return self.watch.get(asked, timeout, needed=self._home.processes)
        except DaftError as error:
            raise self._fail(error) from None

    def _fail(self, error: DaftError) -> DaftError:
        """End all hosts, once: their values count as lost. The first failure."""
        if self.watch.failure is None:
            self.watch.failure = error
            for host in self._home.processes:
                host.kill()
            for host in self._home.processes:
                host.end()
        return self.watch.failure

    def _interrupted(self) -> None:
        """State may be half-written, and transfers half-made."""
        self.watch.failure = CommunicationError(Failure(rank=None, reason="a run was interrupted"))

    def _dicts(self, found: Sequence[Mapping[int, Mapping[str, object]]]) -> list[Any]:
        merged = unpack_all({r: named for part in found for r, named in part.items()})
        return [{n: _own(v) for n, v in merged[r].items()} for r in range(self.size)]

    def _tuples(self, found: Sequence[Mapping[int, Sequence[object]]]) -> list[Any]:
        merged = {rank: values for part in found for rank, values in part.items()}
        return [tuple(_own(unpack(v)) for v in merged[rank]) for rank in range(self.size)]


class RayFuture(Future):
    """The results of one call to every host, as the caller's own memory: Ray's is read-only, and
    would live as long as the future."""

    def __init__(
        self,
        collect: Callable[[Sequence[Asked], float | None], list[Any]],
        asked: Sequence[Asked],
        arrange: Callable[[list[Any]], list[Any]],
    ) -> None:
        self._collect = collect
        self._asked = tuple(asked)
        self._arrange = arrange
        self._finished: Finished | None = None

    def get(self, timeout: float | None = None) -> list[Any]:
        if self._finished is None:
            try:
                self._finished = Finished(self._arrange(self._collect(self._asked, timeout)))
            except (DaftError, LookupError) as error:
                self._finished = Finished([], error)
            self._asked = ()
        return self._finished.get()

    def done(self) -> bool:
        if self._finished is not None:
            return True
        refs = [each.ref for each in self._asked]
        waited = _ray.wait(refs, num_returns=len(refs), timeout=0)
        return len(waited[0]) == len(refs)


def _packed(named: Mapping[str, object]) -> dict[str, object]:
    return {name: pack(value) for name, value in named.items()}


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
