"""The failure detector of a launch: which hosts are alive, which are lost, and why.

    watch = FailureDetector(controller, launch, channel, deadline_s=60, call_deadline_s=3600, ...)
    watch.get([AwaitedCall(process, channel.send(0, REQUEST, (Objects.failures,), ()))])

One fault makes a run fail on many hosts. The root cause is, in this order, a `Call` that raised, a
lost host, or a failed transfer; on the lowest host if there are several. Invariant: a host is lost
once, and each consequence of the loss raises the same `ActorLost`. The detector ends a host that
has stopped for `deadline_s`, or that is in one call for `call_deadline_s`. If the hosts that block
the awaited calls (`Due`) made no progress for `deadline_s` and none computes, it ends a host among
them that waits for no other host.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from dtensor.daft.diagnosis.diagnosis import BUSY_SHARE, FOR_NOBODY, SILENT_S, Waits, ends_of
from dtensor.daft.errors import ActorLost, DaftError, Failure, TaskError
from dtensor.daft.ray.bootstrap.machines import START_S
from dtensor.daft.ray.bootstrap.progress import Progress
from dtensor.daft.ray.channel.messages import HostFailed
from dtensor.daft.ray.channel.processes import HostProcess, LaunchProcesses
from dtensor.daft.ray.channel.run_channel import CallLost, NotYet, RunChannel
from dtensor.daft.ray.diagnosis.stragglers import StragglerWarnings
from dtensor.signals import wait

SLICE_S = 0.25  # how often a waiting controller samples the hosts
SETTLE_S = 5.0  # how long after a first failure it searches for the root
ENDING_S = 1.0  # how long Ray may take to report how a process ended
CUT_OFF_S = 0.5
"""How long it waits for the end of a process whose connection broke. Also how long it searches for
a root cause if losses are recovered from, since the recovery checks again which hosts are alive."""
RUNNABLE = 0.9
"""A process computes, even if it uses less than `BUSY_SHARE` of a core, if its thread was on a core
or waited for a core for this share of `deadline_s`."""


@dataclass(frozen=True, slots=True)
class _Used:
    """The CPU time that a host has used. `runnable_s`: the time for which its thread was on a core
    or waited for a core."""

    cpu_s: float
    runnable_s: float

    @staticmethod
    def of(host: HostProcess) -> _Used:
        return _Used(host.cpu_s, host.runnable_s)

    def computes(self, before: _Used, seconds: float) -> bool:
        """Return whether the host has computed in the `seconds` since `before`."""
        return (
            self.cpu_s - before.cpu_s >= BUSY_SHARE * seconds
            or self.runnable_s - before.runnable_s >= RUNNABLE * seconds
        )


@dataclass(slots=True)
class AwaitedCall:
    """A call in flight."""

    host: HostProcess
    ref: Any  # its `Reply`
    before: int = 0  # the number of the first run after the call
    since: float | None = None  # when a host that blocks the call last made progress
    used: Mapping[int, _Used] = field(default_factory=dict[int, "_Used"])  # by host, at that time
    call: Any = None  # the `HostCall`, if it may be sent again
    lost_value: ActorLost | None = None  # the loss of a value that the call should read


Due: TypeAlias = Callable[[Sequence[AwaitedCall]], Mapping[int, int]]
"""Returns the hosts that block these calls: host to the last run that it must end before them."""


@dataclass(slots=True)
class _Sighting:
    """The instruction at which a host was seen."""

    at: Progress
    earlier: Progress  # where it was before
    since: float  # when it was first seen here
    measured: float  # when `used` was measured
    used: _Used
    computes: bool = False  # in the `deadline_s` before `measured`
    at_work: bool = False  # computes, and does not wait for another host


class Controller(Protocol):
    """The object that knows the programs of hosts: a `RayCluster` or a `RaySession`."""

    @property
    def failure(self) -> DaftError | None:
        """The failure of the whole launch, which ends all waits."""
        ...

    def describe(self, host: int, progress: Progress, reason: str) -> Failure:
        """Return the `Failure` of a host, with the instruction that it was in."""
        ...

    def at_work(self, host: int, progress: Progress) -> bool:
        """Return whether a host's instruction, such as a `Call`, waits for no other host."""
        ...

    def waits(self, progress_by_host: Mapping[int, Progress]) -> Mapping[int, Waits]:
        """Return the hosts for which each waiting host waits, from the progress of all."""
        ...

    def tell_of_loss(self, host: int) -> None:
        """Tell the hosts that wait for a lost host that it is lost."""
        ...


class FailureDetector:
    """Finds lost hosts while the controller waits for calls. `due`: None if hosts need not make
    progress, since a method of a spawned actor may take any time; `stopped_s`: how long a signal
    may stop a host, None for `deadline_s`."""

    def __init__(
        self,
        controller: Controller,
        launch: LaunchProcesses,
        channel: RunChannel,
        *,
        deadline_s: float,
        call_deadline_s: float,
        due: Due | None,
        stopped_s: float | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self.stopped_s = stopped_s
        self.call_deadline_s = call_deadline_s
        self.patience_s: float = 2 * (deadline_s + call_deadline_s) + 60  # of NCCL's own watchdog
        self.lost: dict[int, ActorLost] = {}
        self._controller = controller
        self._launch = launch
        self._channel = channel
        self._due = due
        self._sightings: dict[int, _Sighting] = {}
        self._warned: set[tuple[int, int, int]] = set()  # instructions: host, program, position
        self._straggler_warnings = StragglerWarnings(launch.folder.path)

    def get(
        self,
        calls: Sequence[AwaitedCall],
        timeout: float | None = None,
        *,
        needed: Collection[HostProcess] = (),
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Return the results of the calls. Raises the root cause of a failure, also if a `needed`
        host is lost to which none of the calls was made; `TimeoutError` after `timeout` seconds.
        `deadline_s`: how long these calls may make no progress, None for the detector's own."""
        began = time.monotonic()
        end = None if timeout is None else began + timeout
        while True:
            left = SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
            try:  # other exceptions are the caller's fault, for example an unknown name
                results = self._channel.get([call.ref for call in calls], left)
            except NotYet:
                pass
            except HostFailed as failed:
                root = self.root(calls, failed.hosts)
                raise root from root.__cause__
            except CallLost as lost:
                root = self.root(calls, (), str(lost))
                raise root from root.__cause__
            else:
                for call in calls:
                    call.host.answered = True
                    call.host.watch()
                return results
            if self._controller.failure is not None:
                raise self._controller.failure
            wait()  # handle signals
            self._launch.check()
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"The result is not there after {timeout:g} s; ask again.")
            self.look(calls, self.deadline_s if deadline_s is None else deadline_s)
            if self._due is not None:
                self._straggler_warnings.look(time.monotonic() - began)
            if any(host.index in self.lost for host in needed):
                raise self.root(calls, [host.index for host in needed])

    def find(self, hosts: Collection[int]) -> ActorLost | None:
        """Look for dead processes among these hosts. Return the first loss, None if all live."""
        for host in self._launch.processes:
            if host.index in hosts and (host.gone or self._is_cut_off(host)):
                self._lose_dead(host)
        return next((self.lost[h] for h in sorted(hosts) if h in self.lost), None)

    def came(self, calls: Sequence[AwaitedCall]) -> bool:
        """Return whether all these calls were answered or lost."""
        return self._channel.all_over([call.ref for call in calls])

    def look(self, calls: Sequence[AwaitedCall], deadline_s: float) -> None:
        """Mark dead hosts as lost. End a host if it has stopped, is in one call for too long, or
        blocks these calls without progress."""
        now, num_lost = time.monotonic(), len(self.lost)
        for host in self._launch.processes:
            if host.counts and host.index not in self.lost:
                self._look_at(host, host.counter.read(), now)
        if self._due is not None and len(self.lost) == num_lost:  # no host waits for a lost host
            self._look_for_stalled(self._due, calls, now, deadline_s)

    def _look_at(self, host: HostProcess, progress: Progress, now: float) -> None:
        """Mark a host as lost if it is dead; end it if it stopped or is in a call too long."""
        if host.gone or self._is_cut_off(host) or host.ended() is not None:
            self._lose_dead(host)
            return
        if progress.beat_s is None:
            waited_s = 0.0 if host.answered else now - host.started
            if waited_s > max(START_S, self.deadline_s):
                self.end(host, f"the process has not started for {waited_s:.1f} s.")
            return
        sighting = self._sightings.get(host.index)
        if sighting is None or sighting.at.moving != progress.moving:
            earlier = progress if sighting is None else sighting.at
            sighting = self._sightings[host.index] = _Sighting(
                progress, earlier, now, now, _Used.of(host)
            )
        elif now - sighting.measured > self.deadline_s:
            used = _Used.of(host)
            sighting.computes = used.computes(sighting.used, now - sighting.measured)
            sighting.measured, sighting.used = now, used
        at_work = self._controller.at_work(host.index, progress)
        sighting.at_work = at_work and sighting.computes
        if self.stopped_s is not None and progress.beat_s > self.stopped_s and host.stopped:
            fact = f"a signal has stopped the process: no heartbeat for {progress.beat_s:.1f} s."
            self.end(host, fact, grace_s=0.0)
        elif progress.beat_s > self.deadline_s and (
            host.stopped or (progress.beat_s > SILENT_S and not sighting.computes)
        ):
            self.end(host, f"the process has stopped: no heartbeat for {progress.beat_s:.1f} s.")
        elif at_work and progress.position >= 0:
            if now - sighting.since > self.call_deadline_s:
                limit = f"{self.call_deadline_s:g} s (call_deadline_s)"
                self.end(host, f"the process was in one call for more than {limit}.")
            elif sighting.at_work and self._due is not None:
                self._warn(host, progress)

    def _warn(self, host: HostProcess, progress: Progress) -> None:
        """Warn, once for each instruction, that it takes long."""
        instruction = (host.index, progress.program, progress.position)
        if instruction in self._warned:
            return
        self._warned.add(instruction)
        fact = (
            f"it has computed for more than {self.deadline_s:g} s, and may take up to "
            f"{self.call_deadline_s:g} s (call_deadline_s)."
        )
        failure = self._controller.describe(host.index, progress, fact)
        warnings.warn(str(failure), RuntimeWarning, stacklevel=2)

    def lose(self, host: HostProcess, reason: str) -> ActorLost:
        """Mark a host as lost, and tell the hosts that wait for it to connect."""
        if host.index not in self.lost:
            failure = self._controller.describe(host.index, host.counter.read(), reason)
            self.lost[host.index] = ActorLost(failure)
            self._controller.tell_of_loss(host.index)
        return self.lost[host.index]

    def _lose_dead(self, host: HostProcess, text: str = "") -> None:
        """Mark a dead host as lost. `text`: Ray's report of the death, "" to ask Ray."""
        cut_off = self._is_cut_off(host)  # Ray reports the loss of a machine late
        text = text or host.ended(0.0 if cut_off else ENDING_S) or ""
        line = next(iter(text.strip().splitlines()), "")
        fact = "the process died." if line or not cut_off else "its connection broke."
        self.lose(host, f"{fact} {line}".strip())

    def _is_cut_off(self, host: HostProcess) -> bool:
        """Return whether the connection to a process on another machine broke, which is the
        earliest sign of its end."""
        return host.elsewhere and host.index in self._channel.broken()

    def end(self, host: HostProcess, reason: str, grace_s: float = 1.0) -> None:
        """End a host that cannot make progress, so that calls that wait for it fail."""
        self.lose(host, reason)
        host.kill()
        host.end(grace_s)

    def _look_for_stalled(
        self, due: Due, calls: Sequence[AwaitedCall], now: float, deadline_s: float
    ) -> None:
        """End one of the hosts that block these calls, if none of them has made progress for
        `deadline_s` and none computes."""
        waiting = [call for call in calls if not self.came([call])]
        called = {call.host.index for call in waiting}
        last_runs = due(waiting)
        blocking_hosts = list[HostProcess]()  # the hosts that block the calls
        last_progress = max(
            (call.since or now for call in waiting), default=now
        )  # the last progress
        for index in sorted(called | last_runs.keys()):
            host, sighting = self._launch.processes[index], self._sightings.get(index)
            if sighting is None and not host.answered:
                last_progress = now  # the host is still starting
            if sighting is None:  # its counter cannot be read, as it is on another machine
                blocking_hosts.append(host)
                continue
            if index in called or not sighting.earlier.has_ended(last_runs[index]):
                last_progress = max(last_progress, sighting.since)
            if index in called or not sighting.at.has_ended(last_runs[index]):
                blocking_hosts.append(host)
        if any(call.since != last_progress for call in waiting):
            self._record_stall(waiting, blocking_hosts, last_progress)
        if now - last_progress <= deadline_s:
            return
        progress_by_host = {host.index: host.counter.read() for host in self._launch.processes}
        waits = self._controller.waits(progress_by_host)
        used_before = {index: used for call in waiting for index, used in call.used.items()}
        if any(
            self._controller.at_work(host.index, progress_by_host[host.index])
            and not waits.get(host.index, FOR_NOBODY).blockers
            and host.index in used_before
            and _Used.of(host).computes(used_before[host.index], now - last_progress)
            for host in blocking_hosts
        ):
            self._record_stall(waiting, blocking_hosts, now)
            return
        if blocking_hosts:  # empty if the last call was answered just now
            host, fact = self._suspect(blocking_hosts, progress_by_host, waits)
            why = f"no progress for more than {deadline_s:g} s"
            self.end(host, f"the process {fact.format(why)}")

    def _record_stall(
        self,
        waiting: Sequence[AwaitedCall],
        blocking_hosts: Sequence[HostProcess],
        last_progress: float,
    ) -> None:
        """Record that no host that blocks these calls has made progress since ``last_progress``."""
        used = {host.index: _Used.of(host) for host in blocking_hosts}
        for call in waiting:
            call.since, call.used = last_progress, used

    def _suspect(
        self,
        blocking_hosts: Sequence[HostProcess],
        progress_by_host: Mapping[int, Progress],
        waits: Mapping[int, Waits],
    ) -> tuple[HostProcess, str]:
        """Return the host to end, and its fault as text: a host that has stopped, or else one that
        waits for no other host, preferably in a `Call`. `blocking_hosts`: the hosts that block the
        calls; `progress_by_host`, `waits`: the progress of all hosts, and for whom they wait."""
        stopped = [host for host in blocking_hosts if host.stopped]
        if stopped:
            return stopped[0], "has stopped: {}."
        ends = {end for host in blocking_hosts for end in ends_of(host.index, waits)}
        # a sender that holds back its message may have ended its run
        senders = {
            h for host_waits in waits.values() if host_waits.held_back for h in host_waits.blockers
        }
        blocking_indices = {host.index for host in blocking_hosts}
        suspects = [
            h for h in self._launch.processes if h.index in ends & (blocking_indices | senders)
        ]
        fact = "made {}, though it is alive."
        if not suspects:  # the awaited host was replaced, but no connection to it broke
            suspects = list(blocking_hosts)
            fact = "made {}: it waits for a process that is gone, and was not told."

        def priority(host: HostProcess) -> tuple[bool, bool, int]:
            at = progress_by_host[host.index]
            unseen = host.index not in self._sightings  # on another machine
            return unseen, not self._controller.at_work(host.index, at), at.run

        return min(suspects, key=priority), fact

    def root(
        self, calls: Sequence[AwaitedCall], hosts: Collection[int], text: str = ""
    ) -> DaftError:
        """Find the root cause of a failure of these calls. `hosts`: where it may be, all if empty;
        `text`: Ray's error, which may name a host. Searches for a while, because a death may be
        noticed later than its consequences."""
        begin = time.monotonic()
        while True:
            errors: list[DaftError] = []
            for call in calls:
                match self._channel.failure(call.ref):
                    case HostFailed(error=error):
                        errors.append(error)
                    case CallLost() as lost:
                        text = text or str(lost)
                    case _:
                        pass
            processes = [host for host in self._launch.processes if host.counts]
            for host in processes:
                gone = host.gone or self._is_cut_off(host) or host.ended() is not None
                if gone or host.id in text:
                    self._lose_dead(host, text)
            indices = [host.index for host in processes]
            named_in_text = [host.index for host in processes if host.id in text]
            candidates = (*named_in_text, *(sorted(hosts) or indices))
            roots: list[DaftError] = [e for e in errors if isinstance(e, TaskError)]
            roots += [self.lost[i] for i in candidates if i in self.lost and i in indices]
            broken = self._channel.broken()
            cut_off = [host for host in processes if host.index in broken]
            settle_s = CUT_OFF_S if cut_off or self.stopped_s is not None else SETTLE_S
            if roots or time.monotonic() > begin + settle_s:
                break
            self._channel.listen(0.05)
        if not roots:
            alive = "its connection to the controller broke, though the process is alive."
            roots = [self.lose(host, alive) for host in cut_off]
        line = next(iter(text.strip().splitlines()), "")
        root, *_ = (*roots, *errors, ActorLost(Failure(rank=None, reason=line)))
        for error in errors:
            if error.failure != root.failure:
                root.add_note(f"then failed: {error}")
        return root
