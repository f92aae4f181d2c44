"""Ranks in Ray actors: one asynchronous call per actor and run; data goes from actor to actor.

Example: `RayCluster(4, torch.device("cpu"))` starts Ray on this machine, four actors and their
connections, about 6 s; `close()` ends all of it. With `ranks_per_actor` an actor hosts several
ranks, whose transfers stay inside. On device "cuda" an actor has one GPU to itself: by default
each rank where Ray has enough GPUs, over NCCL (written, and never run: see `nccl.py`); else one
actor hosts all ranks, and collectives are plain device operations.

Invariants: Ray places actors, notices their death and carries calls; it carries no tensors
between actors. The controller may run ahead, calls queue up at the actors in order; only results
are waited for. The first failure, whoever notices it, is diagnosed once (`failure.py`), kills
all actors, and is raised by everything after. A run whose actors make no progress for `deadline_s`
has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
import torch
from torch._C._distributed_c10d import TCPStore

from dtensor.daft.cluster.cluster import (
    NOTHING_KEPT,
    Cluster,
    Finished,
    Future,
    Handle,
    Mode,
    check_inputs,
    check_size,
    hosts_of,
)
from dtensor.daft.errors import ClusterClosed, CommunicationError, DaftError, Failure, TaskError
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.failure import Outcome, diagnose
from dtensor.daft.ray.rank_actor import Actor, Connection
from dtensor.daft.ray.results import (
    ActorCall,
    RayFuture,
    dicts_by_rank,
    packed,
    tuples_by_rank,
)
from dtensor.daft.ray.routes import Key, check_groups, check_routes
from dtensor.daft.ray.starting import START_S, ActorProcess, Home, own_address, ranks_per_gpu
from dtensor.daft.verification.interference import check_state
from dtensor.daft.verification.merge import merge_sites
from dtensor.daft.verification.verifier import verify

SLICE_S = 0.25  # how often a waiting controller looks for progress
SETTLE_S = 5.0  # how long after a first failure the controller looks for its root


class RayCluster(Cluster):
    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        address: str | None = None,
        deadline_s: float = 60.0,
        ranks_per_actor: int | None = None,
        seed: int = 0,
    ) -> None:
        self.size = size
        self.device = device
        self.calls = 0
        self.failure: DaftError | None = None
        self.hosts = hosts_of(size, 1 if ranks_per_actor is None else ranks_per_actor)
        if device not in (torch.device("cpu"), torch.device("cuda")):
            raise ValueError(
                f"The device of Ray actors is 'cpu' or 'cuda', got {str(device)!r}: Ray chooses "
                f"which GPU an actor gets."
            )
        self.deadline_s = deadline_s
        self._seed = seed
        self._tags: dict[Key, int] = {}
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0
        self.runs = 0
        self._closed = False
        self._actors: list[ActorProcess] = []
        self._store: TCPStore | None = None
        self._unread: list[ActorCall] = []  # calls that nobody waits for
        self._lock = threading.RLock()  # runs have one order, the same at every actor
        self._home = Home(address)
        try:
            if device.type == "cuda":
                self.hosts = hosts_of(size, ranks_per_gpu(size, ranks_per_actor))
            self._actor_of = tuple(h for h, ranks in enumerate(self.hosts) for _ in ranks)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        address = own_address()
        self._store = store = TCPStore(address, 0, None, True, wait_for_workers=False)
        self._actors += [self._home.spawn(ranks, str(self.device), Actor) for ranks in self.hosts]
        start_s = max(START_S, self.deadline_s)
        connection = Connection(
            host=address,
            port=store.port,
            own_address=address,
            start_s=start_s,
            deadline_s=self.deadline_s,
            actor_of=self._actor_of,
        )
        calls = [self._call(a, a.actor.connect, connection) for a in self._actors]
        self._collect(calls, deadline_s=start_s)

    def put(self, values: Sequence[Mapping[str, object]]) -> None:
        check_size(self.size, values, "put")
        self._submit("put", [({r: packed(values[r]) for r in ranks},) for ranks in self.hosts])

    def get(self, names: Sequence[Sequence[str]]) -> Future:
        check_size(self.size, names, "get")
        wanted = [({r: tuple(names[r]) for r in ranks},) for ranks in self.hosts]
        calls = self._submit("get", wanted, read=True)
        return RayFuture(self._collect, calls, lambda found: tuples_by_rank(self.size, found))

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        check_size(self.size, names, "delete")
        self._submit("delete", [({r: tuple(names[r]) for r in ranks},) for ranks in self.hosts])

    def load(self, program: Program) -> Handle:
        self._check()
        check_size(self.size, program.ranks, f"Program {program.name!r}")
        report = verify(program, self.hosts, self._seed)
        keys = check_routes(program, self._actor_of)
        with self._lock:
            check_state((handle.program for handle in self._handles.values()), program)
            new = [key for key in keys if key not in self._tags]
            if self.device.type == "cuda":
                check_groups([*self._tags, *new], self._actor_of)
            shipped = ray.put(program)  # pyright: ignore
            for key in new:
                self._tags[key] = len(self._tags)
            handle = Handle(self._next_handle, program, report)
            self._next_handle += 1
            self._handles[handle.id] = handle
            parts = [(handle.id, shipped, sites, dict(self._tags)) for sites in report.lists]
            self._submit("load", parts)
            if self.device.type == "cuda":  # over NCCL the actors connect here
                self._collect([], deadline_s=max(START_S, self.deadline_s))
        return handle

    def unload(self, handle: Handle) -> None:
        with self._lock:
            self._submit("unload", [(handle.id,)] * len(self._actors))
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
        fed = [{r: packed(inputs[r]) for r in ranks} for ranks in self.hosts]
        with self._lock:
            run, self.runs = self.runs, self.runs + 1
            if mode != "interpreted":
                timed = mode == "timed"
                parts = [(handle.id, run, own, dict(keep), timed) for own in fed]
                calls = self._submit("run", parts, read=True)
                return RayFuture(
                    self._collect, calls, lambda found: dicts_by_rank(self.size, found)
                )
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
        actors = self._actors
        self._collect(self._submit("begin", [(handle.id, run, own) for own in fed], read=True))
        position = {s: i for sites in handle.report.lists for i, s in enumerate(sites)}
        everyone = (tuple(range(self.size)),)
        for site in merge_sites(handle.program, everyone, self._seed)[0]:
            actor = actors[self._actor_of[site[0]]]
            self._collect([self._call(actor, actor.actor.step, handle.id, run, position[site])])
        made = self._submit("finish", [(handle.id, keep)] * len(actors), read=True)
        return Finished(dicts_by_rank(self.size, self._collect(made)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._actors.clear()
        self._store = None  # and its port: somebody may hold on to a future, and so to this
        self._home.close()

    def _check(self) -> None:
        if self._closed:
            raise ClusterClosed("This cluster is closed: launch another one.")
        if self.failure is not None:
            raise self.failure

    def _submit(
        self, method: str, parts: Sequence[tuple[object, ...]], *, read: bool = False
    ) -> list[ActorCall]:
        """One call to each actor, with its part, and no other thread's between them: so all
        actors see one order, on which it rests that runs of several programs cannot hang. Unless
        the results are to be `read`, only a failure among them will be noticed."""
        with self._lock:
            self._check()
            calls: list[ActorCall] = []
            try:
                for actor, part in zip(self._actors, parts, strict=True):
                    calls.append(self._call(actor, getattr(actor.actor, method), *part))
            except BaseException as error:
                if calls or not isinstance(error, Exception):
                    self._interrupted()  # actors that were called would wait for the others
                raise
            if not read:
                self._unread += calls
            return calls

    def _interrupted(self) -> None:
        """State may be half-written, and transfers half-made."""
        self.failure = CommunicationError(Failure(rank=None, reason="a run was interrupted"))

    def _call(self, actor: ActorProcess, method: Any, *arguments: object) -> ActorCall:
        self.calls += 1
        return ActorCall(self.calls, actor, method.remote(*arguments))

    def _collect(
        self,
        calls: Sequence[ActorCall],
        timeout: float | None = None,
        *,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """The results of calls; what earlier calls that nobody waited for have raised, too."""
        if self._closed:
            raise ClusterClosed("This cluster was closed before the result was there.")
        deadline_s = self.deadline_s + 1.0 if deadline_s is None else deadline_s
        first = calls[0].number if calls else self.calls + 1
        with self._lock:
            unread = [c for c in self._unread if c.number < first]
            self._unread = self._unread[len(unread) :]
        try:
            return self._wait_for([*unread, *calls], timeout, deadline_s)[len(unread) :]
        except TimeoutError:
            with self._lock:
                self._unread = [*unread, *self._unread]
            raise

    def _wait_for(
        self, calls: Sequence[ActorCall], timeout: float | None, deadline_s: float
    ) -> list[Any]:
        end = None if timeout is None else time.monotonic() + timeout
        seen, since = None, time.monotonic()
        while True:
            left = SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
            try:
                return ray.get([call.ref for call in calls], timeout=left)
            except ray.exceptions.GetTimeoutError:
                if self.failure is not None:
                    raise self.failure from None
            except ray.exceptions.RayTaskError as error:
                cause: object = error.cause
                if isinstance(cause, Exception) and not isinstance(cause, DaftError):
                    raise cause from error  # the caller's fault, such as an unknown name
                raise self._fail(calls) from None
            except ray.exceptions.RayError:
                raise self._fail(calls) from None
            now = time.monotonic()
            if end is not None and now >= end:
                raise TimeoutError(f"The result is not there after {timeout:g} s; ask again.")
            moving = [actor.counter.read().moving for actor in self._actors]
            if moving != seen:
                seen, since = moving, now
            elif now - since > deadline_s or any(actor.gone for actor in self._actors):
                raise self._fail(calls)

    def _fail(self, calls: Sequence[ActorCall]) -> DaftError:
        """Find the root cause, once, and end all actors: their values count as lost."""
        if self.failure is None:
            end = time.monotonic() + SETTLE_S
            outcomes = [_outcome(actor, calls) for actor in self._actors]
            while time.monotonic() < end and not any(map(_decides, outcomes)):
                time.sleep(0.05)
                outcomes = [_outcome(actor, calls) for actor in self._actors]
            self.failure = diagnose(outcomes, self._handles, self.deadline_s)
            for actor in self._actors:
                actor.kill()
            for actor in self._actors:
                actor.end()
        return self.failure


def _outcome(actor: ActorProcess, calls: Sequence[ActorCall]) -> Outcome:
    error: DaftError | None = None
    died = "Its process has ended." if actor.gone else None
    waiting = False
    for call in calls:
        if call.actor is not actor:
            continue
        try:
            ray.get(call.ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            waiting = True
        except ray.exceptions.RayTaskError as raised:
            cause: object = raised.cause
            error = cause if isinstance(cause, DaftError) else None
        except ray.exceptions.RayError as lost:
            died = str(lost).strip().splitlines()[0]
    return Outcome(
        ranks=actor.ranks,
        progress=actor.counter.read(),
        error=error,
        died=died,
        stopped_by_signal=actor.stopped,
        waiting=waiting,
    )


def _decides(outcome: Outcome) -> bool:
    """Whether this is a root cause, and no consequence of something not seen yet."""
    return isinstance(outcome.error, TaskError) or outcome.died is not None or outcome.stopped
