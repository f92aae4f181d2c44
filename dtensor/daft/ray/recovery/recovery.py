"""Recovery from lost hosts: replaces a lost host, and repeats the runs past the recovery line.

Example: rank 1 is killed in step 7 when step 8 is already submitted. `Recovery.recover` then does:

    replace     a spare takes the place of rank 1's process
    leave       rank 0 closes its connections
    rejoin      both ranks connect again and load their programs
    roll back   both return to the state after step 6, the last step that ended on both
    repeat      steps 7 and 8 are sent again; the user's futures resolve with their results

Invariants: calls keep their numbers. A further loss starts a new epoch, which uses nothing of
earlier ones. If recovery is impossible, the original error is raised.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from dtensor.daft.cluster.call_log import CallLog, Recovered, SentCall
from dtensor.daft.cluster.recovery_line import ChangeLog
from dtensor.daft.errors import (
    ActorLost,
    ClusterClosed,
    CommunicationError,
    DaftError,
    Failure,
    TaskError,
)
from dtensor.daft.ray.bootstrap.machines import START_S
from dtensor.daft.ray.channel.messages import REQUEST, RESPONSE, HostFailed
from dtensor.daft.ray.channel.run_channel import CallLost, NotYet, Reply, RunChannel
from dtensor.daft.ray.diagnosis.failure_detector import AwaitedCall, FailureDetector
from dtensor.daft.ray.ranks.ranks import Ranks
from dtensor.daft.ray.ranks.replicas import Endpoint
from dtensor.daft.ray.recovery.loaded_programs import LoadedOnHosts
from dtensor.daft.ray.recovery.membership import HostCall, Membership, ring
from dtensor.daft.undo.failed_run import UndoneRun

STOPPED_S = 0.75
"""A process that can be replaced is lost if a signal has stopped it for this long."""
MEET_S = 10.0
"""How long hosts may make no progress while they connect."""
SLICE_S = 0.25  # how often a wait checks whether a host was lost
SETTLE_S = 2.0  # a death may be noticed later than its consequences, by up to this
TOGETHER_S = 0.1  # connections to one machine break within this time
MAX_BYTES = 1 << 28
MAX_CALLS = 2048
"""Limits of the log: beyond them a call waits until earlier calls are stable."""
MAX_LOSSES_IN_RUN = 3
"""How often in a row hosts may be lost in one run before that run counts as the cause."""


@dataclass(slots=True)
class _Losses:
    """The losses so far in a recovery: failures, lost ranks, kinds of replacements."""

    failures: list[Failure] = field(default_factory=list[Failure])
    ranks: list[int] = field(default_factory=list[int])
    by: list[str] = field(default_factory=list[str])


class Recovering(Protocol):
    """The part of a launch that recovery uses."""

    membership: Membership
    watch: FailureDetector
    loaded: LoadedOnHosts
    log: CallLog

    @property
    def failure(self) -> DaftError | None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def lock(self) -> Any: ...

    def interrupted(self) -> None:
        """Mark the launch as failed: its state is unknown."""
        ...


class Recovery:
    """Repeats calls of a launch after losses. `epoch` counts how often hosts reconnected."""

    def __init__(self, launch: Recovering, changes: ChangeLog, max_restarts: int) -> None:
        self.epoch: int = 0
        self.recovered: list[Recovered] = []
        self.lost_values: dict[
            tuple[int, str], ActorLost
        ] = {}  # (rank, name) of lost values, until put
        self._launch = launch
        self._changes = changes
        self._max_restarts = max_restarts
        self._restarts = 0
        self._stuck: tuple[int, int] = (-1, 0)  # the first repeated run, how often in a row
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # see `when_stable`
        self._copies: dict[int, int | None] = {}  # a host's process to its replica server's process
        self._places_of: list[list[str]] = []  # host to the machines that have its snapshots

    # -- sending ---------------------------------------------------------------------------
    def sent(self) -> None:
        """Bound the log after calls were added to it, and recover if a connection is broken. Raises
        the failure if recovery is impossible."""
        launch, log = self._launch, self._launch.log
        if log.is_long:
            self.settle()
        if log.nbytes > MAX_BYTES or len(log.calls) > MAX_CALLS:
            self._wait_for_ended_calls()
        if any(self._channel.is_broken(process.index) for process in launch.membership.processes):
            self._recover_or_raise(launch.watch.root((), ()), self.epoch)

    def settle(self) -> None:
        """Drop stable calls from the log, and make the deferred calls that waited for them."""
        log = self._launch.log
        log.drop(self._changes.base)
        while self._deferred and (not log.calls or self._deferred[0][0] <= log.calls[0].serial):
            self._deferred.pop(0)[1]()

    def when_stable(self, act: Callable[[], None]) -> None:
        """Call `act` once all earlier calls are stable: none of them will be sent again."""
        self._deferred.append((self._launch.log.added, act))
        self.settle()

    def copy_lent(self, messages: Sequence[Any]) -> None:
        """Copy the buffers that callers lent to these messages, unless the messages are stable. The
        calls have been answered, or have failed."""
        with self._launch.lock:
            lent, log = {id(message) for message in messages}, self._launch.log
            for call in log.calls:
                if id(call.message) in lent and call.change is not None and _succeeded(call):
                    self._changes.heard(call.host, call.change)
            self.settle()
            for call in log.calls:
                if id(call.message) in lent:
                    call.message.arguments, call.message.lent = call.message.arguments.kept(), False

    def _wait_for_ended_calls(self) -> None:
        """Wait until all hosts have ended their calls, and drop these calls from the log."""
        epoch = self.epoch
        try:
            ended = self._wait(self._ask_all(Ranks.ended))
        except ActorLost as error:
            return self._recover_or_raise(error, epoch)
        for host, change in enumerate(self._launch.log.ended(ended)):
            self._changes.heard(host, change)
        self.settle()

    def _recover_or_raise(self, error: DaftError, epoch: int) -> None:
        """Recover from ``error``, see `recover`. Raises the error that makes recovery
        impossible."""
        if (failed := self.recover(error, epoch)) is not None:
            raise failed

    # -- when a host is lost --------------------------------------------------------------------
    def recover(self, error: DaftError, epoch: int) -> DaftError | None:
        """Recover from an error of calls that were waited for since this epoch. Return None if the
        calls can be waited for again, else the error to raise."""
        launch = self._launch
        with launch.lock:
            if self.epoch != epoch or launch.failure is not None:
                return launch.failure
            if launch.closed:
                return error
            if isinstance(error, TaskError) and not self._undo(error.failure):
                return error
            try:
                replaced = self._replace(error)
            except DaftError as failed:
                return failed
            except BaseException:  # Ctrl-C, or the launch is closed: the state of hosts is unknown
                launch.interrupted()
                raise
            if isinstance(error, TaskError) and not replaced.ranks:
                return None  # the run's result is the error
            self.recovered.append(replaced)
        warnings.warn(str(replaced), RuntimeWarning, stacklevel=3)
        return None

    def meet(self) -> None:
        """Let all hosts connect again, including new ones. No call is in flight, and the lock is
        held. Raises DaftError if they cannot connect."""
        replaced = self._replace(ActorLost(Failure(rank=None, reason="hosts did not meet.")))
        if replaced.ranks:  # hosts were lost meanwhile
            self.recovered.append(replaced)
            warnings.warn(str(replaced), RuntimeWarning, stacklevel=3)

    def _undo(self, failure: Failure) -> bool:
        """Let a run fail with this failure instead of being repeated: a call of it raised after the
        vote. Return False if the run is not in the log."""
        calls = self._launch.log.calls
        calls_of_run = [call for call in calls if call.run is not None and call.run == failure.step]
        for call in calls_of_run:  # sent again, the call only reports that the run was undone
            call.undone = True
            call.message.functions = Ranks.undo_program, failure
        return bool(calls_of_run)

    def _replace(self, error: DaftError) -> Recovered:
        """Start an epoch, and another after each further loss, until an epoch is complete."""
        begin, lost = time.monotonic(), _Losses()
        while True:
            self.epoch += 1
            try:
                runs = self._start_epoch(error, lost)
            except ActorLost as more:
                if more is error or self._launch.closed:
                    raise
                error = more
            else:
                break
        return Recovered(
            failures=tuple(lost.failures),
            ranks=tuple(lost.ranks),
            by=tuple(lost.by),
            runs=len(runs),
            begun=begin,
            seconds=time.monotonic() - begin,
        )

    def _start_epoch(self, error: DaftError, lost: _Losses) -> set[int]:
        """Replace lost hosts, roll all hosts back, and send calls again. Return the repeated runs.
        Raises `error` if recovery is impossible, another `ActorLost` if another host is lost."""
        launch, membership, log = self._launch, self._launch.membership, self._launch.log
        channel = self._channel
        if membership.several:  # the connections to a lost machine break together
            channel.listen(TOGETHER_S)
        lost_hosts = self._lost_hosts()
        self._restarts += len(lost_hosts)
        if not lost_hosts:  # a connection broke between hosts that are alive
            lost.failures.append(error.failure)
        if self._restarts > self._max_restarts:
            error.add_note(
                f"it was not replaced: {self._max_restarts} were replaced before (max_restarts)"
            )
            raise error
        old_ranks = [membership.hosts[host] for host in lost_hosts]
        places = self._places(lost_hosts)
        for host in lost_hosts:
            old = membership.host(host)
            process, replacement = membership.replace(host, places[host])
            lost.failures.append(launch.watch.lost[old.index].failure)
            lost.ranks += membership.hosts[host]
            lost.by.append(replacement)
            end = time.monotonic() + SETTLE_S
            while not channel.is_broken(old.index) and time.monotonic() < end:
                channel.listen(0.01)  # read the last messages of the old process
            launch.loaded.load_on(partial(membership.tell, process), host)
        # new processes are asked, too, so that no host connects to a process that has not started
        calls = self._ask_all(Ranks.leave, old_ranks)
        self._wait(calls, ignore_results=True)
        for each in calls:
            channel.forget_unread(each.host.index)
        prefix = f"ranks {self.epoch}"
        rendezvous = membership.meeting(prefix, launch.loaded.tags, launch.watch.patience_s)
        calls = [
            self._ask(h, Ranks.rejoin, rendezvous, h, ranks)
            for h, ranks in enumerate(membership.hosts)
        ]
        ended = self._wait(calls)
        line = self._changes.recovery_line(log.ended(ended))
        repeated_calls = log.calls_to_repeat(line)
        runs = {call.run for call in repeated_calls if call.run is not None}
        self._check(error, ended, runs)
        restored = self._wait([self._ask(host, Ranks.roll_back, to) for host, to in line.items()])
        if restored != list(line.values()):
            error.add_note(f"it was not replaced: ranks are at {restored}, not at {line}")
            raise error
        self._changes.rolled_back(line)
        if not lost_hosts:  # a connection to a replica server may have broken
            self._copies.clear()
        self.begin_copies(self._wait_long)
        for host in lost_hosts:
            self._note_lost_values(host, error)
        poisoned = {call.run for call in repeated_calls if self._reads_lost_value(call)}
        for call in repeated_calls:
            if call.awaited is not None and call.run in poisoned:
                call.awaited.lost_value = next(iter(self.lost_values.values()))
        launch.loaded.start_over()
        for call in repeated_calls:
            call.succeeded = call.succeeded or _succeeded(call)
            self._resend(call)
        for spare in membership.start_spares():
            launch.loaded.load_on(partial(membership.tell, spare), None)
        self._check_repeated(repeated_calls)
        return runs

    def _reads_lost_value(self, call: SentCall) -> bool:
        """Return whether a call starts a run that may read a lost value."""
        message: HostCall = call.message
        if message.program is None:
            return False
        ranks = self._launch.membership.hosts[call.host]
        read = (*message.stored, *self._launch.loaded.state(message.program, ranks))
        return any(key in self.lost_values for key in read)

    def _resend(self, call: SentCall) -> None:
        """Send a call again, to the present process of its host."""
        message: HostCall = call.message
        membership, process = self._launch.membership, self._launch.membership.host(call.host)
        if message.plain:
            membership.tell(process, Ranks.remember, message.plain)
        reply = self._channel.send(
            process.index, message.kind, message.functions, message.arguments, lent=message.lent
        )
        if message.run is not None:
            process.counter.asks(message.run)
        call.number = reply.number
        if call.awaited is not None:
            call.awaited.host, call.awaited.ref, call.awaited.since = process, reply, None

    def _check_repeated(self, repeated_calls: Sequence[SentCall]) -> None:
        """Wait for the repeated calls that had succeeded, whose results the user may have read.
        Raises CommunicationError if one fails now, because later results would be wrong."""
        launch = self._launch
        succeeded = [
            (call, call.awaited)
            for call in repeated_calls
            if call.succeeded
            and not call.undone
            and call.awaited is not None
            and call.awaited.lost_value is None
        ]
        awaited_calls = [each for _, each in succeeded]
        while not self._channel.all_over([each.ref for each in awaited_calls], SLICE_S):
            if launch.closed:
                raise ClusterClosed("This cluster was closed while a lost host was replaced.")
            launch.watch.look(awaited_calls, launch.watch.deadline_s)
            self._raise_lost(None)
        undone = [each.ref for call, each in succeeded if not _succeeded(call)]
        if not undone:
            return
        errors = [error for reply in undone if (error := self._channel.failure(reply)) is not None]
        end = time.monotonic() + (SETTLE_S if errors else 0.0)
        while time.monotonic() < end:  # another loss may have caused the error
            self._raise_lost(None)
            time.sleep(0.02)
        undone_runs = [reply.message.value() for reply in undone if not reply.failed]
        errors += [fault.error for each in undone_runs for fault in each.faults]
        reason = "a run that had succeeded was repeated, because a rank was lost, and failed then."
        reason += "".join(f"\n  {error}" for error in errors[:1])
        raise CommunicationError(Failure(rank=None, reason=reason)) from next(iter(errors), None)

    # -- copies on another machine --------------------------------------------------------------
    def begin_copies(self, wait: Callable[[Sequence[AwaitedCall]], list[Any]]) -> None:
        """Let each host copy its snapshots to a host on another machine, if the launch spans
        several. Pairs of hosts whose processes are unchanged already do."""
        membership = self._launch.membership
        if not membership.several:
            return
        servers = ring([process.machine for process in membership.processes])  # the replica servers
        pairs = {
            membership.host(host).index: None if server is None else membership.host(server).index
            for host, server in enumerate(servers)
        }
        self._copies = {each: server for each, server in self._copies.items() if each in pairs}
        hosts_to_connect = [
            host
            for host, process in enumerate(membership.processes)
            if self._copies.get(process.index, -1) != pairs[process.index]
        ]
        for host in hosts_to_connect:
            self._copies.pop(membership.host(host).index, None)
        servers_to_start = sorted(
            {server for host in hosts_to_connect if (server := servers[host]) is not None}
        )
        secret = membership.launch.secret
        address = membership.launch.address
        endpoints_of_needed = wait(
            [self._ask(server, Ranks.keep_copies, secret, address) for server in servers_to_start]
        )
        endpoints: dict[int | None, Endpoint] = dict(
            zip(servers_to_start, endpoints_of_needed, strict=True)
        )
        wait(
            [
                self._ask(h, Ranks.copy_to, endpoints.get(servers[h]), secret)
                for h in hosts_to_connect
            ]
        )
        self._copies = pairs
        hosts_with_copies = enumerate(servers)
        self._places_of = [
            [membership.host(h).machine for h in hosts if h is not None]
            for hosts in hosts_with_copies
        ]

    def _places(self, lost_hosts: Sequence[int]) -> dict[int, list[str]]:
        """Return, for each lost host, the live machines that have its snapshots, or else the
        controller's machine."""
        membership, machines = self._launch.membership, dict[int, list[str]]()
        living = membership.living(lost_hosts)
        for host in lost_hosts:
            old_process = membership.host(host)
            places = [old_process.machine]
            server_process = self._copies.get(old_process.index)
            server_host = None if server_process is None else membership.place(server_process)
            if (
                server_host is not None and server_host not in lost_hosts
            ):  # else the copy may be old
                places.append(membership.host(server_host).machine)
            if not living.intersection(places):
                places = [place for each in self._places_of[host : host + 1] for place in each]
            machines[host] = [place for place in places if place in living] or [
                membership.controllers
            ]
        return machines

    def _note_lost_values(self, host: int, error: DaftError) -> None:
        """Record the values of a lost host that are in no snapshot."""
        for rank, name in self._launch.loaded.replayable(self._launch.membership.hosts[host]):
            reason = (
                f"{name!r} was lost with the process of this rank, which was replaced: values that "
                f"are overwritten in place, such as caches, are in no snapshot.\n"
                f"  fix: launch again and load a saved state, for example by dt.load_state_dict"
            )
            failure = Failure(rank=rank, known_as=error.failure.known_as, reason=reason)
            self.lost_values[rank, name] = ActorLost(failure)

    def check_not_lost(self, keys: Iterable[tuple[int, str]]) -> None:
        """Raise `ActorLost` if one of these values, (rank, name), was lost."""
        for key in keys:
            if key in self.lost_values:
                raise ActorLost(self.lost_values[key].failure)

    def _lost_hosts(self) -> list[int]:
        """Return the hosts that are lost and not replaced."""
        launch = self._launch
        launch.watch.find([process.index for process in launch.membership.processes])
        return [
            h for h, p in enumerate(launch.membership.processes) if p.index in launch.watch.lost
        ]

    def _check(self, error: DaftError, ended: Sequence[int], runs: set[int]) -> None:
        """Raise the error if stable state is lost, or if hosts are lost again and again in one run.
        `ended`: by host, the last change that has ended; `runs`: the runs to repeat."""
        if any(last < base for last, base in zip(ended, self._changes.base, strict=True)):
            is_copied = any(server is not None for server in self._copies.values())
            copies = ", as is the copy on another machine" if is_copied else ""
            error.add_note(f"it was not replaced: its state was lost with it{copies}")
            raise error
        first, num_starts = min(runs, default=-1), 1
        if first >= 0 and first == self._stuck[0]:
            num_starts += self._stuck[1]
        self._stuck = first, num_starts
        if num_starts > MAX_LOSSES_IN_RUN:
            error.add_note(
                f"it was not replaced: run {first} was started {num_starts} times, and each time a "
                f"host was lost"
            )
            raise error

    @property
    def _channel(self) -> RunChannel:
        return self._launch.membership.channel

    def _ask(self, host: int, method: Callable[..., Any], *arguments: object) -> AwaitedCall:
        process = self._launch.membership.host(host)
        return AwaitedCall(
            process, self._channel.send(process.index, REQUEST, (method,), arguments)
        )

    def _ask_all(self, method: Callable[..., Any], *arguments: object) -> list[AwaitedCall]:
        return [
            self._ask(host, method, *arguments)
            for host in range(len(self._launch.membership.processes))
        ]

    def _wait_long(self, calls: Sequence[AwaitedCall]) -> list[Any]:
        """Wait for calls that may take as long as sending all state of a host."""
        return self._wait(calls, patience_s=max(START_S, self._launch.watch.deadline_s))

    def _wait(
        self,
        calls: Sequence[AwaitedCall],
        *,
        ignore_results: bool = False,
        patience_s: float = MEET_S,
    ) -> list[Any]:
        """Return the results of calls. Raises `ActorLost` if a host is lost meanwhile.
        `ignore_results`: ignore results and exceptions of the calls, and return []."""
        launch = self._launch
        replies = [each.ref for each in calls]
        while True:
            if launch.closed:
                raise ClusterClosed("This cluster was closed while a lost host was replaced.")
            raised: Exception | None = None
            try:
                if ignore_results:
                    if self._channel.all_over(replies, SLICE_S):
                        raised = None if not any(reply.lost for reply in replies) else CallLost("")
                        if raised is None:
                            return []
                    else:
                        raise NotYet
                else:
                    results = self._channel.get(replies, SLICE_S)
                    for each in calls:
                        each.host.answered = True
                        each.host.watch()
                    return results
            except NotYet:
                launch.watch.look(calls, patience_s)
            except Exception as error:  # the loss of another host may cause any error
                raised = error
            self._raise_lost(raised)

    def _raise_lost(self, raised: Exception | None) -> None:
        """Raise `ActorLost` if a host is lost. Otherwise raise the exception of a call, if any."""
        launch = self._launch
        end = time.monotonic() + (SETTLE_S if raised is not None else 0.0)
        while True:
            lost = self._lost_hosts()
            if lost:
                raise launch.watch.lost[launch.membership.host(lost[0]).index]
            if raised is None:
                return
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        if isinstance(raised, CallLost):  # the host is alive, but cannot be reached
            for process in launch.membership.processes:
                if self._channel.is_broken(process.index):
                    reason = "its connection to the controller broke, though the process is alive."
                    raise launch.watch.lose(process, reason)
        reason = f"hosts did not meet again: {type(raised).__name__}: {raised}"
        raise CommunicationError(Failure(rank=None, reason=reason)) from raised


def answered(call: SentCall, channel: RunChannel) -> bool:
    """Return whether a call's answer has arrived: its result, or an exception that was not caused
    by the loss of another host."""
    reply: Reply | None = None if call.awaited is None else call.awaited.ref
    if reply is None or reply.message is None:
        return False
    return reply.message.kind == RESPONSE or not isinstance(channel.failure(reply), HostFailed)


def _succeeded(call: SentCall) -> bool:
    """Return whether a call was answered without a failure."""
    reply: Reply | None = None if call.awaited is None else call.awaited.ref
    if reply is None or reply.message is None or reply.failed:
        return False
    return not isinstance(reply.message.value(), UndoneRun)
