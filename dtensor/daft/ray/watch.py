"""The hosts of a launch, as the controller sees them: who is alive, who was lost, and doing what.

    watch = HostWatch(controller, home, deadline_s=60.0, moves=True)
    watch.get([Asked(process, process.call(Ranks.get, names))])     # or the root cause of a failure

A run fails on many hosts at once: one dies, and its peers' connections break. Example: host 1 was
killed, host 0 says "Connection closed by peer": the root is `ActorLost` for host 1, with the
instruction in its counter file, and host 0's error as a note. In order: a `Call` that raised; a
host that was lost; a transfer that failed for another reason. Within one sort, the lowest.

Invariants: a host is lost once, described by what it was doing then, and every failure that comes
of it is that one `ActorLost`. A host that has stopped for `deadline_s`, or stands still where hosts
have to move, is ended, so that whatever waits for it fails.

It does not know what hosts run: the controller says what one was doing (`Controller`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import ray.exceptions

from dtensor.daft.errors import ActorLost, DaftError, Failure, TaskError
from dtensor.daft.ray.joining import HostFailed, lost_key
from dtensor.daft.ray.processes import Home, HostProcess
from dtensor.daft.ray.progress import Progress
from dtensor.daft.ray.starting import START_S

SLICE_S = 0.25  # how often a waiting controller looks at the hosts
SETTLE_S = 5.0  # how long after a first failure it looks for its root
STALE_S = 5.0
"""A heartbeat comes every 0.25 s, later on a loaded machine; one this old means that its process
has stopped, though no signal did that: a debugger, a frozen container, a machine that is gone."""

_ray: Any = ray  # Ray's stubs leave most of its types unknown


@dataclass(frozen=True, slots=True)
class Asked:
    """A call under way: who was called, and Ray's reference to the result."""

    host: HostProcess
    ref: Any


class Controller(Protocol):
    """Who has given the hosts what they do."""

    def describe(self, host: int, at: Progress, reason: str) -> Failure:
        """What a host was doing when this became of it."""
        ...

    def in_call(self, host: int, at: Progress) -> bool:
        """Whether a host is in code of the user's."""
        ...


class HostWatch:
    """`moves`: whether hosts have to move on; a method of a spawned actor may take as long as it
    likes."""

    def __init__(
        self, controller: Controller, home: Home, deadline_s: float, *, moves: bool
    ) -> None:
        self.deadline_s = deadline_s
        self.lost: dict[int, ActorLost] = {}
        self.failure: DaftError | None = None  # of all of it: whoever waits is told
        self._controller = controller
        self._home = home
        self._moves = moves
        self._seen: list[tuple[int, int, int]] = []
        self._since = self._looked = 0.0  # when the hosts were first, and last, seen there

    def get(
        self,
        asked: Sequence[Asked],
        timeout: float | None = None,
        *,
        needed: Collection[HostProcess] = (),
    ) -> list[Any]:
        """What the calls give; raises the root cause of a failure, also if a host is lost that is
        `needed`, though none of these calls was made to it. `TimeoutError` after `timeout`."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
            try:
                found = _ray.get([each.ref for each in asked], timeout=left)
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayTaskError as error:
                cause: object = error.cause
                if isinstance(cause, HostFailed):
                    raise self._root(asked, cause.hosts) from None
                if isinstance(cause, ray.exceptions.RayError):
                    raise self._root(asked, (), str(cause)) from None
                if isinstance(cause, Exception):
                    raise cause from error  # the caller's fault, such as an unknown name
                raise
            except ray.exceptions.RayError as error:
                raise self._root(asked, (), str(error)) from None
            else:
                for each in asked:
                    each.host.watch()
                return found
            if self.failure is not None:
                raise self.failure
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"The result is not there after {timeout:g} s; ask again.")
            self.look(asked)
            if any(host.index in self.lost for host in needed):
                raise self._root(asked, [host.index for host in needed])

    def find(self, hosts: Collection[int]) -> ActorLost | None:
        """The first of these that is lost, if any is."""
        for host in self._home.processes:
            if host.index in hosts and host.gone:
                self.lose(host, "the process died.")
        return next((self.lost[h] for h in sorted(hosts) if h in self.lost), None)

    def look(self, asked: Sequence[Asked] = ()) -> None:
        """Lose who has died, and end who has stopped or, where hosts have to move, stands still."""
        for host in self._home.processes:
            if host.index in self.lost:
                continue
            beat_s = host.counter.read().beat_s
            if host.gone:
                self.lose(host, "the process died.")
            elif beat_s is None:
                waited_s = time.monotonic() - host.started
                if waited_s > max(START_S, self.deadline_s):
                    self.end(host, f"the process has not started for {waited_s:.1f} s.")
            elif beat_s > self.deadline_s and (host.stopped or beat_s > STALE_S):
                self.end(host, f"the process has stopped: no heartbeat for {beat_s:.1f} s.")
        if self._moves:
            self._look_for_one_that_stands(asked)

    def lose(self, host: HostProcess, reason: str) -> ActorLost:
        """It is lost; those that wait for it to join a program are told."""
        if host.index not in self.lost:
            failure = self._controller.describe(host.index, host.counter.read(), reason)
            self.lost[host.index] = ActorLost(failure)
            self._home.announce(lost_key(host.index))
        return self.lost[host.index]

    def end(self, host: HostProcess, reason: str) -> None:
        """End one that cannot go on, so that what waits for it fails."""
        self.lose(host, reason)
        host.kill()
        host.end()

    def _look_for_one_that_stands(self, asked: Sequence[Asked]) -> None:
        now, hosts = time.monotonic(), self._home.processes
        at = [host.counter.read() for host in hosts]
        moving = [each.moving for each in at]
        if moving != self._seen or now - self._looked > 4 * SLICE_S:
            self._seen, self._since = moving, now
        self._looked = now
        if now - self._since <= self.deadline_s or any(each.beat_s is None for each in at):
            return
        came, _ = _ray.wait([a.ref for a in asked], num_returns=len(asked), timeout=0)
        waiting = [each.host for each in asked if each.ref not in came]
        # One in a Call is more likely to be at fault than one that waits for it.
        waiting.sort(key=lambda host: not self._controller.in_call(host.index, at[host.index]))
        for host in waiting[:1]:  # none: the last call has just come back
            fact = f"made no progress for more than {self.deadline_s:g} s, though it is alive."
            self.end(host, f"the process {fact}")

    def _root(self, asked: Sequence[Asked], hosts: Collection[int], text: str = "") -> DaftError:
        """What a failure follows from, among these hosts, or those that Ray's `text` names; a death
        may show a moment later than what comes of it."""
        end = time.monotonic() + SETTLE_S
        while True:
            errors: list[DaftError] = []
            for each in asked:
                try:
                    _ray.get(each.ref, timeout=0)
                except ray.exceptions.GetTimeoutError:
                    continue
                except ray.exceptions.RayTaskError as error:
                    if isinstance(cause := error.cause, HostFailed):
                        errors.append(cause.error)
                except ray.exceptions.RayError as error:
                    text = text or str(error)
            line = next(iter(text.strip().splitlines()), "")
            processes = self._home.processes
            for host in processes:
                if host.gone or host.id in text:
                    self.lose(host, f"the process died. {line}".strip())
            named = [host.index for host in processes if host.id in text]
            among = (*named, *(sorted(hosts) or range(len(processes))))
            roots: list[DaftError] = [e for e in errors if isinstance(e, TaskError)]
            roots += [self.lost[index] for index in among if index in self.lost]
            if roots or time.monotonic() > end:
                break
            time.sleep(0.05)
        root, *_ = (*roots, *errors, ActorLost(Failure(rank=None, reason=line)))
        for error in errors:
            if error.failure != root.failure:
                root.add_note(f"then failed: {error}")
        return root
