"""Recovery from lost hosts: a lost host is replaced, and runs past the recovery line are sent
again.

    recovery = Recovery(launch, max_restarts=100)
    recovery.sent()                            # calls were sent: they may have to be sent again
    recovery.recover(error, epoch)             # None: wait for the same calls again

Example, two ranks that train, rank 1 is killed in step 7, when step 8 is submitted already. Rank 0
fails in step 7, as a transfer breaks. Then, in `recover`:

    replace     the process of rank 1 is ended, if it is not; a spare takes its place
    leave       rank 0 closes its connections; all earlier calls are over when it answers
    meet        both connect anew, under a prefix of this epoch, and make their programs ready
    cut         step 6 has ended on both, by rank 0's answer and rank 1's file; 7 and 8 have not
    roll back   both return to the state after step 6
    again       steps 7 and 8 are sent again, with copies of their inputs; the user's futures of
                them resolve with these

Where a connection breaks between processes that are all alive, the first line is left out. The same
is done where a call of a run raises after the vote, when its rank cannot continue: that run is not
repeated, but undone on all ranks, and its future raises.

Invariants: calls keep their numbers, so ranks count runs as before. A result that a user has read
is not read again: it would be the same. A host that is lost meanwhile starts the next epoch;
nothing of an older epoch (store, memory, connections, answers) is used in a later one. The lock of
the launch is held, so threads that call meanwhile wait. Where recovery is impossible, for example
because a machine's memory is gone, the original error is raised.
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
"""A process that a signal has stopped for so long is lost, where it can be replaced."""
MEET_S = 10.0
"""How long hosts may make no progress while they only have to meet."""
SLICE_S = 0.25
SETTLE_S = 2.0  # a death may be noticed a moment later than its consequences
TOGETHER_S = 0.1
MOST_BYTES = 1 << 28
MOST_CALLS = 2048
"""Limits of the log: beyond them a call waits until earlier ones are stable."""
MOST_AT_ONCE = 3
"""How often in a row hosts may be lost in one run before that run counts as the cause."""


@dataclass(slots=True)
class _Lost:
    """The losses so far, in one recovery."""

    failures: list[Failure] = field(default_factory=list[Failure])
    ranks: list[int] = field(default_factory=list[int])
    by: list[str] = field(default_factory=list[str])


class Recovering(Protocol):
    """The part of a launch that recovery needs."""

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
        """It cannot be used any more."""
        ...


class Recovery:
    def __init__(self, launch: Recovering, changes: ChangeLog, max_restarts: int) -> None:
        self.epoch: int = 0
        self.recovered: list[Recovered] = []
        self.gone: dict[tuple[int, str], ActorLost] = {}  # lost values, until put anew
        self._launch = launch
        self._changes = changes
        self._max_restarts = max_restarts
        self._restarts = 0
        self._stuck: tuple[int, int] = (-1, 0)  # the first repeated run, how often in a row
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._copies: dict[int, int | None] = {}  # by process of a host, that of its keeper
        self._places_of: list[list[str]] = []  # by host, the machines that have its snapshots

    # -- sending ---------------------------------------------------------------------------
    def sent(self) -> None:
        """Calls were sent and are in the log: they may have to be sent again. Raises the failure if
        a host is lost and not replaced."""
        launch, log = self._launch, self._launch.log
        if log.is_long:
            self.settle()
        if log.nbytes > MOST_BYTES or len(log.calls) > MOST_CALLS:
            self._wait_for_some()
        if any(self._channel.is_broken(process.index) for process in launch.membership.all):
            self._recover_or_raise(launch.watch.root((), ()), self.epoch)

    def settle(self) -> None:
        """Drop stable calls from the log."""
        log = self._launch.log
        log.drop(self._changes.base)
        while self._later and (not log.calls or self._later[0][0] <= log.calls[0].serial):
            self._later.pop(0)[1]()

    def when_stable(self, act: Callable[[], None]) -> None:
        """Call `act` once all earlier calls are stable: none of them will be sent again."""
        self._later.append((self._launch.log.added, act))
        self.settle()

    def own(self, messages: Sequence[Any]) -> None:
        """These messages were sent with buffers lent by their callers, and have ended if all is
        well: copy those that are not stable yet."""
        with self._launch.lock:
            mine, log = {id(message) for message in messages}, self._launch.log
            for call in log.calls:
                if id(call.message) in mine and call.change is not None and _gave(call):
                    self._changes.heard(call.host, call.change)
            self.settle()
            for call in log.calls:
                if id(call.message) in mine:
                    call.message.given, call.message.lent = call.message.given.kept(), False

    def _wait_for_some(self) -> None:
        epoch = self.epoch
        try:
            ended = self._wait(self._ask_all(Ranks.ended))
        except ActorLost as error:
            return self._recover_or_raise(error, epoch)
        for host, change in enumerate(self._launch.log.ended(ended)):
            self._changes.heard(host, change)
        self.settle()

    def _recover_or_raise(self, error: DaftError, epoch: int) -> None:
        if (failed := self.recover(error, epoch)) is not None:
            raise failed

    # -- when one is lost -----------------------------------------------------------------------
    def recover(self, error: DaftError, epoch: int) -> DaftError | None:
        """None if calls that failed with the error, and were waited for since this epoch, can be
        waited for again; else the error to raise."""
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
            except BaseException:  # Ctrl-C, or the launch is closed: the hosts' states are unknown
                launch.interrupted()
                raise
            if isinstance(error, TaskError) and not replaced.ranks:
                return None  # reading the run's result raises it
            self.recovered.append(replaced)
        warnings.warn(str(replaced), RuntimeWarning, stacklevel=3)
        return None

    def meet(self) -> None:
        """All hosts meet anew, including new ones. With no call in flight, and the lock held;
        DaftError if they cannot."""
        replaced = self._replace(ActorLost(Failure(rank=None, reason="hosts did not meet.")))
        if replaced.ranks:  # lost meanwhile
            self.recovered.append(replaced)
            warnings.warn(str(replaced), RuntimeWarning, stacklevel=3)

    def _undo(self, failure: Failure) -> bool:
        """A call of a run has raised where its rank could not continue, as in an update: that run
        is not repeated, and fails with this. False if the run is none of those that can be
        repeated."""
        calls = self._launch.log.calls
        calls_of_run = [call for call in calls if call.run is not None and call.run == failure.step]
        for call in calls_of_run:  # when it is sent again, it only reports that it was undone
            call.undone = True
            call.message.functions = Ranks.undo_program, failure
        return bool(calls_of_run)

    def _replace(self, error: DaftError) -> Recovered:
        begin, lost = time.monotonic(), _Lost()
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

    def _start_epoch(self, error: DaftError, lost: _Lost) -> set[int]:
        """The runs that are repeated. Raises `error` if recovery is impossible, and another
        `ActorLost` if another host is lost meanwhile."""
        launch, membership, log = self._launch, self._launch.membership, self._launch.log
        channel = self._channel
        if membership.several:  # a machine's connections break together
            channel.listen(TOGETHER_S)
        gone = self._gone()
        self._restarts += len(gone)
        if not gone:  # connections broke between hosts that are all alive
            lost.failures.append(error.failure)
        if self._restarts > self._max_restarts:
            error.add_note(f"it was not replaced: {self._max_restarts} were (max_restarts)")
            raise error
        old_ranks = [membership.hosts[host] for host in gone]
        places = self._places(gone)
        for host in gone:
            old = membership.host(host)
            process, by = membership.replace(host, places[host])
            lost.failures.append(launch.watch.lost[old.index].failure)
            lost.ranks += membership.hosts[host]
            lost.by.append(by)
            end = time.monotonic() + SETTLE_S
            while not channel.is_broken(old.index) and time.monotonic() < end:
                channel.listen(0.01)  # read its last messages
            launch.loaded.load_on(partial(membership.tell, process), host)
        # new processes too: no host begins to connect to one that has not started
        asked = self._ask_all(Ranks.leave, old_ranks)
        self._wait(asked, whatever=True)
        for each in asked:
            channel.forget_unread(each.host.index)
        prefix = f"ranks {self.epoch}"
        join = membership.meeting(prefix, launch.loaded.tags, launch.watch.patience_s)
        asked = [
            self._ask(h, Ranks.rejoin, join, h, ranks) for h, ranks in enumerate(membership.hosts)
        ]
        ended = self._wait(asked)
        cut = self._changes.recovery_line(log.ended(ended))
        again = log.again(cut)
        runs = {call.run for call in again if call.run is not None}
        self._check(error, ended, runs)
        there = self._wait([self._ask(host, Ranks.roll_back, to) for host, to in cut.items()])
        if there != list(cut.values()):
            error.add_note(f"it was not replaced: ranks are at {there}, not at {cut}")
            raise error
        self._changes.rolled_back(cut)
        if not gone:  # a connection of copies may have broken, too
            self._copies.clear()
        self.begin_copies(self._wait_long)
        for host in gone:
            self._note_gone(host, error)
        poisoned = {call.run for call in again if self._reads_gone(call)}
        for call in again:
            if call.asked is not None and call.run in poisoned:
                call.asked.gone = next(iter(self.gone.values()))
        launch.loaded.start_over()
        for call in again:
            call.gave = call.gave or _gave(call)
            self._resend(call)
        for spare in membership.start_spares():
            launch.loaded.load_on(partial(membership.tell, spare), None)
        self._check_again(again)
        return runs

    def _reads_gone(self, call: SentCall) -> bool:
        """Whether the call starts a run that may read a value lost with a process."""
        message: HostCall = call.message
        if message.program is None:
            return False
        ranks = self._launch.membership.hosts[call.host]
        read = (*message.stored, *self._launch.loaded.state(message.program, ranks))
        return any(key in self.gone for key in read)

    def _resend(self, call: SentCall) -> None:
        message: HostCall = call.message
        membership, process = self._launch.membership, self._launch.membership.host(call.host)
        if message.plain:
            membership.tell(process, Ranks.remember, message.plain)
        reply = self._channel.send(
            process.index, message.kind, message.functions, message.given, lent=message.lent
        )
        if message.run is not None:
            process.counter.asks(message.run)
        call.number = reply.number
        if call.asked is not None:
            call.asked.host, call.asked.ref, call.asked.since = process, reply, None

    def _check_again(self, again: Sequence[SentCall]) -> None:
        """Wait for the calls whose answers the user may have read; raises if one fails now, because
        later results would be wrong."""
        launch = self._launch
        given = [
            (call, call.asked)
            for call in again
            if call.gave and not call.undone and call.asked is not None and call.asked.gone is None
        ]
        asked = [each for _, each in given]
        while not self._channel.all_over([each.ref for each in asked], SLICE_S):
            if launch.closed:
                raise ClusterClosed("This cluster was closed while a lost host was replaced.")
            launch.watch.look(asked, launch.watch.deadline_s)
            self._raise_lost(None)
        undone = [each.ref for call, each in given if not _gave(call)]
        if not undone:
            return
        why = [error for reply in undone if (error := self._channel.failure(reply)) is not None]
        end = time.monotonic() + (SETTLE_S if why else 0.0)
        while time.monotonic() < end:  # this may be a consequence of another loss
            self._raise_lost(None)
            time.sleep(0.02)
        undone_runs = [reply.message.value() for reply in undone if not reply.failed]
        why += [fault.error for each in undone_runs for fault in each.faults]
        reason = "a run that had succeeded was repeated, because a rank was lost, and failed then."
        reason += "".join(f"\n  {error}" for error in why[:1])
        raise CommunicationError(Failure(rank=None, reason=reason)) from next(iter(why), None)

    # -- copies on another machine --------------------------------------------------------------
    def begin_copies(self, wait: Callable[[Sequence[AwaitedCall]], list[Any]]) -> None:
        """From now on hosts copy their snapshots to a host on another machine. A pair of hosts
        whose processes are unchanged does so already."""
        membership = self._launch.membership
        if not membership.several:
            return
        keepers = ring([process.machine for process in membership.all])
        pairs = {
            membership.host(host).index: None if keeper is None else membership.host(keeper).index
            for host, keeper in enumerate(keepers)
        }
        self._copies = {each: keeper for each, keeper in self._copies.items() if each in pairs}
        new = [
            host
            for host, process in enumerate(membership.all)
            if self._copies.get(process.index, -1) != pairs[process.index]
        ]
        for host in new:
            self._copies.pop(membership.host(host).index, None)
        needed = sorted({keeper for host in new if (keeper := keepers[host]) is not None})
        secret = membership.home.secret
        given = secret, membership.home.address
        doors = wait([self._ask(keeper, Ranks.keep_copies, *given) for keeper in needed])
        door_of: dict[int | None, Endpoint] = dict(zip(needed, doors, strict=True))
        wait([self._ask(h, Ranks.copy_to, door_of.get(keepers[h]), secret) for h in new])
        self._copies = pairs
        both = enumerate(keepers)
        self._places_of = [[membership.host(h).machine for h in b if h is not None] for b in both]

    def _places(self, gone: Sequence[int]) -> dict[int, list[str]]:
        """By lost host, the live machines that have its snapshots; the controller's if none has."""
        membership, machines = self._launch.membership, dict[int, list[str]]()
        living = membership.living(gone)
        for host in gone:
            old = membership.host(host)
            places = [old.machine]
            keeper = self._copies.get(old.index)
            by = None if keeper is None else membership.place(keeper)
            if by is not None and by not in gone:  # else its copy may be old
                places.append(membership.host(by).machine)
            if not living.intersection(places):
                places = [place for own in self._places_of[host : host + 1] for place in own]
            machines[host] = [place for place in places if place in living] or [
                membership.controllers
            ]
        return machines

    def _note_gone(self, host: int, error: DaftError) -> None:
        """Note the values of the process that are in no snapshot."""
        for rank, name in self._launch.loaded.replayable(self._launch.membership.hosts[host]):
            reason = (
                f"{name!r} was lost with the process of this rank, which was replaced: values that "
                f"are written over in place, as those of caches, are in no snapshot.\n"
                f"  fix: launch again and load a saved state, for example by dt.load_state_dict"
            )
            failure = Failure(rank=rank, known_as=error.failure.known_as, reason=reason)
            self.gone[rank, name] = ActorLost(failure)

    def check_there(self, keys: Iterable[tuple[int, str]]) -> None:
        """Raises if one of these values of ranks was lost."""
        for key in keys:
            if key in self.gone:
                raise ActorLost(self.gone[key].failure)

    def _gone(self) -> list[int]:
        """The hosts that are lost now."""
        launch = self._launch
        launch.watch.find([process.index for process in launch.membership.all])
        return [h for h, p in enumerate(launch.membership.all) if p.index in launch.watch.lost]

    def _check(self, error: DaftError, ended: Sequence[int], runs: set[int]) -> None:
        """Raises the error if stable state is lost, or if the failure repeats."""
        if any(last < base for last, base in zip(ended, self._changes.base, strict=True)):
            kept = any(keeper is not None for keeper in self._copies.values())
            copies = ", as is the copy on another machine" if kept else ""
            error.add_note(f"it was not replaced: its state is gone with it{copies}")
            raise error
        first, times = min(runs, default=-1), 1
        if first >= 0 and first == self._stuck[0]:
            times += self._stuck[1]
        self._stuck = first, times
        if times > MOST_AT_ONCE:
            error.add_note(
                f"it was not replaced: run {first} was begun {times} times, and lost each time"
            )
            raise error

    @property
    def _channel(self) -> RunChannel:
        return self._launch.membership.channel

    def _ask(self, host: int, method: Callable[..., Any], *given: object) -> AwaitedCall:
        process = self._launch.membership.host(host)
        return AwaitedCall(process, self._channel.send(process.index, REQUEST, (method,), given))

    def _ask_all(self, method: Callable[..., Any], *given: object) -> list[AwaitedCall]:
        return [self._ask(host, method, *given) for host in range(len(self._launch.membership.all))]

    def _wait_long(self, asked: Sequence[AwaitedCall]) -> list[Any]:
        """Wait for calls that may take as long as sending all of a host's state."""
        return self._wait(asked, patience_s=max(START_S, self._launch.watch.deadline_s))

    def _wait(
        self, asked: Sequence[AwaitedCall], *, whatever: bool = False, patience_s: float = MEET_S
    ) -> list[Any]:
        """The results; `ActorLost` if a host is lost meanwhile. `whatever`: ignore results and
        exceptions of the calls."""
        launch = self._launch
        replies = [each.ref for each in asked]
        while True:
            if launch.closed:
                raise ClusterClosed("This cluster was closed while a lost host was replaced.")
            raised: Exception | None = None
            try:
                if whatever:
                    if self._channel.all_over(replies, SLICE_S):
                        raised = None if not any(reply.lost for reply in replies) else CallLost("")
                        if raised is None:
                            return []
                    else:
                        raise NotYet
                else:
                    results = self._channel.get(replies, SLICE_S)
                    for each in asked:
                        each.host.answered = True
                        each.host.watch()
                    return results
            except NotYet:
                launch.watch.look(asked, patience_s)
            except Exception as error:  # a host may raise any error because another is lost
                raised = error
            self._raise_lost(raised)

    def _raise_lost(self, raised: Exception | None) -> None:
        """Raise `ActorLost` if a host is lost; else the exception of a call, if there is one."""
        launch = self._launch
        end = time.monotonic() + (SETTLE_S if raised is not None else 0.0)
        while True:
            lost = self._gone()
            if lost:
                raise launch.watch.lost[launch.membership.host(lost[0]).index]
            if raised is None:
                return
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        if isinstance(raised, CallLost):  # alive, but unreachable
            for process in launch.membership.all:
                if self._channel.is_broken(process.index):
                    reason = "its connection to the controller broke, though the process is alive."
                    raise launch.watch.lose(process, reason)
        reason = f"hosts did not meet again: {type(raised).__name__}: {raised}"
        raise CommunicationError(Failure(rank=None, reason=reason)) from raised


def answered(call: SentCall, channel: RunChannel) -> bool:
    """Whether a call's answer has arrived: its result, or its own exception."""
    reply: Reply | None = None if call.asked is None else call.asked.ref
    if reply is None or reply.message is None:
        return False
    return reply.message.kind == RESPONSE or not isinstance(channel.failure(reply), HostFailed)


def _gave(call: SentCall) -> bool:
    """Whether it was answered without a failure."""
    reply: Reply | None = None if call.asked is None else call.asked.ref
    if reply is None or reply.message is None or reply.failed:
        return False
    return not isinstance(reply.message.value(), UndoneRun)
