"""A cluster whose ranks are in Ray actors, called hosts: a run is one message to each host.

    cluster = RayCluster(4, LaunchOptions(backend="ray"))     # starts Ray and four hosts: about 6 s
    cluster.run(cluster.load(program), inputs).get()
    cluster.close()

Invariants: Ray places hosts and notices their death. All calls go over our own connections
(`run_channel.py`), in order. The controller runs ahead and waits only for results. The first
failure is diagnosed once (`failure_detector.py`), ends all hosts, and is raised by all later calls.
A run has failed if for `deadline_s` none of the hosts that it still waits for makes progress.
On "cuda" a host has a GPU to itself, and GPUs exchange data over NCCL (`nccl.py`).
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.daft.cluster.call_log import CallLog, Recovered, SentCall
from dtensor.daft.cluster.cluster import (
    Handle,
    HostedCluster,
    Method,
    Part,
    Places,
    hosts_of,
)
from dtensor.daft.diagnosis.diagnosis import Waits, ranks_text, waits_at
from dtensor.daft.errors import (
    ActorLost,
    ClusterClosed,
    DaftError,
    Failure,
    HostError,
    ProgramError,
)
from dtensor.daft.ir.instructions import Call
from dtensor.daft.ir.program import Program
from dtensor.daft.launch_options import LaunchOptions
from dtensor.daft.ray.bootstrap.actor_placement import MachineCapacity, place
from dtensor.daft.ray.bootstrap.launch_folder import RunningLaunch
from dtensor.daft.ray.bootstrap.machines import START_S, ranks_per_gpu
from dtensor.daft.ray.bootstrap.progress import Progress
from dtensor.daft.ray.bootstrap.starting_line import show_starting_ranks
from dtensor.daft.ray.channel.messages import ONE_WAY, REQUEST, HostFailed, Payload
from dtensor.daft.ray.channel.processes import END_S, HostProcess, LaunchProcesses
from dtensor.daft.ray.diagnosis.failure_detector import AwaitedCall, FailureDetector
from dtensor.daft.ray.ranks.ranks import Plain, Ranks
from dtensor.daft.ray.recovery.loaded_programs import LoadedOnHosts
from dtensor.daft.ray.recovery.membership import HostCall, Membership
from dtensor.daft.ray.recovery.recovery import STOPPED_S, TOGETHER_S, Recovery, answered
from dtensor.daft.ray.transports.connect import check_routes, lost_key
from dtensor.daft.run.failures import describe
from dtensor.daft.run.worker import HostRun, Stored, Worker
from dtensor.daft.status import Status
from dtensor.daft.verification.pairing import Hosts, Site, instruction_at
from dtensor.kernel_flags import kernel_flags
from dtensor.signals import Lock, waits_handle_signals

_CHANGES = (Worker.put, Worker.delete, Worker.run)
"""The methods that change a host's table."""


class RayCluster(HostedCluster):
    """A cluster of ranks in Ray actors. `together`: ranks that should be on one machine."""

    def __init__(
        self, size: int, options: LaunchOptions, together: Sequence[Sequence[int]] = ()
    ) -> None:
        """Start the hosts' processes. They connect while the user's program continues
        (`_finish_start`)."""
        device, snapshot_every = torch.device(options.device), options.snapshot_every
        hosts = hosts_of(size, options.ranks_per_actor or 1)
        super().__init__(size, device, hosts, options.seed, snapshot_every)
        if device not in (torch.device("cpu"), torch.device("cuda")):
            raise ValueError(
                f"The device of Ray actors is 'cpu' or 'cuda', got {str(device)!r}: Ray chooses "
                f"which GPU an actor gets."
            )
        self.loaded: LoadedOnHosts = LoadedOnHosts(
            device, keeps=snapshot_every is not None, in_order=options.deterministic
        )
        self.log: CallLog = CallLog(self._is_over, lambda call: answered(call, self.channel))

        self._recovery: Recovery | None = None
        self._epoch = 0  # how often hosts have connected again to grow, without recovery
        self._spans = False  # whether hosts are on several machines
        self._starting: list[AwaitedCall] = []  # calls that end when the hosts have connected
        self._launch = LaunchProcesses(
            options.address, options.deadline_s, warm=options.warm, beside=device.type == "cpu"
        )
        try:
            if device.type == "cuda":
                self.hosts = hosts_of(size, ranks_per_gpu(size, options.ranks_per_actor))
                self.number_changes(snapshot_every)
            self.channel = self._launch.connect()
            self.watch: FailureDetector = FailureDetector(
                self,
                self._launch,
                self.channel,
                deadline_s=options.deadline_s,
                call_deadline_s=options.call_deadline_s,
                due=self._due,
                stopped_s=None if snapshot_every is None else STOPPED_S,
            )
            machines = self._machines_of(together)
            self._spans = bool(machines)
            self.membership: Membership = Membership(
                self._launch,
                self.channel,
                self.hosts,
                str(device),
                spares=options.spares,
                memory=None if self.changes is None else self._launch.snapshots,
                options={"num_gpus": 1} if device.type == "cuda" else {},
                machines=machines,
                controllers=self._launch.own_machine if machines else "",
            )
            self.channel.rank_of = self._rank_of
            if self.membership.several:
                self.copies *= 2  # each machine also keeps copies of another machine's snapshots
            rendezvous = replace(
                self.membership.meeting("ranks 0", self.loaded.tags, self.watch.patience_s),
                in_order=options.deterministic,
            )
            self._starting = [
                self.ask(h, Ranks.connect, rendezvous, h) for h in range(len(self.hosts))
            ]
            self._max_restarts = options.max_restarts
            if self._launch.local is None:
                self._finish_start()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        super()._check()
        if self._starting:
            self._finish_start()

    def _finish_start(self) -> None:
        """Wait until the hosts have connected. The constructor does not wait for it, so that the
        user's program can continue while Ray starts."""
        with waits_handle_signals(), self._lock:
            if not self._starting:  # another thread has waited meanwhile
                return
            with show_starting_ranks(self.size, lambda: self._num_ready):
                self._wait_long(self._starting)
            if self.changes is not None:
                self._recovery = Recovery(self, self.changes, self._max_restarts)
                self._recovery.begin_copies(self._wait_long)
            self._starting = []

    @property
    def _num_ready(self) -> int:
        """The number of ranks whose processes have started."""
        places = zip(self.membership.processes, self.membership.hosts)
        return sum(len(ranks) for process, ranks in places if process.counter.pid)

    def _machines_of(self, together: Sequence[Sequence[int]]) -> list[str]:
        """Return Ray's name of the machine for each host, [] if Ray has only one machine."""
        gpus = self.device.type == "cuda"
        machines = self._launch.machines("GPU" if gpus else "CPU")
        if not machines:
            return []
        capacities = [MachineCapacity(str(machine), machine.room) for machine in machines]
        kind = "GPU" if gpus else "CPU"
        assigned = place(self.hosts, together, capacities, kind=kind, fewest=gpus)
        return [machines[each].node for each in assigned]

    def _rank_of(self, process: int) -> int | None:
        place = self.membership.place(process)
        return None if place is None else self.membership.hosts[place][0]

    @property
    def machines(self) -> dict[str, tuple[int, ...]]:
        """The ranks on each machine, by the machine's name; {} if all are on one machine."""
        if not self._spans:
            return {}
        ranks_by_machine: dict[str, tuple[int, ...]] = {}
        for process, ranks in zip(self.membership.processes, self.membership.hosts, strict=True):
            name = self._launch.named(process.machine)
            ranks_by_machine[name] = (*ranks_by_machine.get(name, ()), *ranks)
        return ranks_by_machine

    def _grow(self, size: int) -> Hosts:
        """Start new processes; then let all hosts close their connections and connect again."""
        self._check()
        if self.device.type == "cuda":
            raise ProgramError(
                "Ranks can join a running launch only on CPUs: on GPUs, NCCL's groups are fixed "
                "when the launch starts.\n  Fix: launch with as many ranks as will be needed."
            )
        per_host = len(self.hosts[0])
        first_ranks = range(self.size, size, per_host)
        new = tuple(tuple(range(first, min(first + per_host, size))) for first in first_ranks)
        old = len(self.hosts)
        processes = self.membership.add(new)
        try:
            self._wait_until_started(old, processes)
        except BaseException:
            self.membership.drop_last(len(new))
            raise
        for process in processes:
            process.counts = True
        self.hosts = self.membership.hosts
        if self._recovery is not None and self.changes is not None:
            self.changes.grow(len(self.membership.hosts))
            self._or_fail(self._recovery.meet)
            return self.membership.hosts
        self._wait_loaded([self.ask(host, Ranks.leave) for host in range(old)])
        self._epoch += 1
        prefix, tags = f"ranks {self._epoch}", self.loaded.tags
        rendezvous = self.membership.meeting(prefix, tags, self.watch.patience_s)
        hosts = enumerate(self.membership.hosts)
        self._wait_loaded([self.ask(h, Ranks.rejoin, rendezvous, h, ranks) for h, ranks in hosts])
        self.loaded.start_over()
        return self.membership.hosts

    def _wait_until_started(self, first_host: int, processes: Sequence[HostProcess]) -> None:
        """Wait until the new hosts, from ``first_host`` on, have started. Raises `ActorLost` if one
        does not start, which is not a failure of the cluster."""
        replies = [self.ask(first_host + i, Ranks.warm).ref for i in range(len(processes))]
        end = time.monotonic() + max(START_S, self.watch.deadline_s)
        started = False
        while not started:
            started = self.channel.all_over(replies, 0.25)
            gone = [p for p in processes if p.gone or p.ended() is not None]
            if gone or any(reply.failed for reply in replies) or time.monotonic() > end:
                reason = "a new process did not start; the launch is unchanged."
                raise ActorLost(Failure(rank=None, reason=reason))
        for process in processes:
            process.answered = True
            process.watch()

    def _wait_loaded(self, calls: Sequence[AwaitedCall]) -> None:
        if calls:
            self._wait_long(calls)

    def _collect_slowly(self, calls: Sequence[AwaitedCall]) -> list[Any]:
        return self._wait_long(calls)

    def _wait_long(self, calls: Sequence[AwaitedCall]) -> list[Any]:
        return self._wait_for(calls, None, max(START_S, self.watch.deadline_s))

    # -- sending calls --------------------------------------------------------------------------
    def _call(
        self,
        method: Method,
        places: Places,
        parts: Sequence[Part],
        *,
        run: int | None = None,
        read: bool = True,
    ) -> list[AwaitedCall]:
        """See `HostedCluster._call`. `method` may also be a method of `Ranks`."""
        flags = b""
        if method is Worker.run or method is Worker.begin:
            flags = marshal.dumps(kernel_flags(), 2)
        calls: list[AwaitedCall] = []
        processes = self.membership.processes
        try:
            for (host, _), part in zip(places, parts, strict=True):
                process = processes[host]
                if method is Worker.begin:
                    self.membership.tell(process, Ranks.set_kernel_flags, flags)
                call, plain = self._message(host, method, part, run, flags)
                call.kind, call.lent = REQUEST if read else ONE_WAY, read and method is Worker.put
                if self._recovery is not None:
                    call.arguments = Payload.of(call.arguments)
                reply = self.channel.send(
                    process.index, call.kind, call.functions, call.arguments, lent=call.lent
                )
                if run is not None:
                    process.counter.asks(run)
                if run is not None and plain:
                    self.loaded.sent_inputs.note(run, part[0].program, plain)
                calls.append(AwaitedCall(process, reply, self.runs))
                if self._recovery is not None:  # the call may be sent again
                    call.keep_payload()
                    calls[-1].call = call
        except BaseException as error:
            if calls or not isinstance(error, Exception):
                self.interrupted()
            raise
        self._log(method, places, calls, run)
        return calls

    def _message(
        self, host: int, method: Method, part: Part, run: int | None, flags: bytes
    ) -> tuple[HostCall, Plain]:
        """Return the call of a method of `Worker` or `Ranks` with these arguments, and the plain
        data that it contains. `flags`: the marshalled settings of torch's kernels, for a run."""
        if method is not Worker.run:
            functions, arguments = (Ranks.ask, method), part
            if method in (Ranks.unload, Ranks.provide):
                functions = (method,)
            elif run is not None:
                functions, arguments = (Ranks.run, method), (run, part[0], *part)
            return HostCall(functions, arguments, run), {}
        host_run: HostRun = part[0]
        program = host_run.program
        inputs, plain = self.loaded.sent_inputs.split(program, host_run.inputs)
        plain |= self.loaded.sent_inputs.flags(host, program, flags)
        arguments = host_run._replace(inputs=inputs).plain(), plain
        call = HostCall((Ranks.run_program,), arguments, run)
        if self._recovery is not None:
            call.plain = self.loaded.sent_inputs.known(program, plain)
            call.program = program
            call.stored = tuple(
                (rank, value.name)
                for rank, named in host_run.inputs.items()
                for value in named.values()
                if isinstance(value, Stored)
            )
        return call, plain

    def _log(
        self, method: Method, places: Places, calls: Sequence[AwaitedCall], run: int | None
    ) -> None:
        """Add calls to the log: runs, and, if losses are recovered from, all calls."""
        recovers = self._recovery is not None
        change = self.changes.number if self.changes and method in _CHANGES else None
        logged = calls if recovers or method is Worker.run else ()
        for (host, _), each in zip(places, logged, strict=False):
            sent = SentCall(host=host, change=change, run=run, number=each.ref.number)
            if recovers:
                sent.awaited = each if each.call.kind == REQUEST else None
                sent.message, sent.nbytes = each.call, each.call.arguments.nbytes
            self.log.add(sent)
        if self._recovery is not None:
            self._or_fail(self._recovery.sent)
        elif self.log.is_long:
            self.log.drop()

    def _copy_buffers(self, calls: Sequence[AwaitedCall]) -> None:
        self.channel.copy_lent()
        if self._recovery is not None:
            self._recovery.copy_lent([each.call for each in calls])

    def _count(self, places: Places) -> int:
        return len(places)

    def ask(self, host: int, method: Method, *arguments: object) -> AwaitedCall:
        """Call a method of `Ranks` in a host. The call is not logged."""
        process = self.membership.host(host)
        reply = self.channel.send(process.index, REQUEST, (method,), arguments)
        return AwaitedCall(process, reply, self.runs)

    def collect(self, calls: Sequence[AwaitedCall], timeout: float | None = None) -> list[Any]:
        """Wait for calls, and return their results. Also raises an earlier exception of a one-way
        call."""
        if self._closed:
            raise ClusterClosed("This cluster was closed before the result was there.")
        try:
            results = self._wait_for(calls, timeout, None)
        except (DaftError, LookupError) as error:
            self._raise_unread(calls, f"then failed: {error}")
            raise
        self._raise_unread(calls)
        for each in calls:
            if each.lost_value is not None:
                raise each.lost_value
        return results

    def _raise_unread(self, calls: Sequence[AwaitedCall], note: str = "") -> None:
        """Raise the exception of a one-way call of these hosts, if such an exception has arrived
        with the answer to a run that is never read. Exceptions that the loss of a host caused are
        dropped: every call of these hosts raises them."""
        for each in calls:
            unread = self.channel.unread(each.host.index)
            if unread is not None and not isinstance(unread, HostFailed):
                if note:
                    unread.add_note(note)
                raise unread from unread.__cause__

    def _wait_for(
        self, calls: Sequence[AwaitedCall], timeout: float | None, deadline_s: float | None
    ) -> list[Any]:
        """Return the results of calls, recovering from losses meanwhile. See `FailureDetector.get`
        for `timeout` and `deadline_s`."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                epoch = 0 if self._recovery is None else self._recovery.epoch
                left = None if end is None else max(0.0, end - time.monotonic())
                try:
                    needed = self.membership.processes
                    return self.watch.get(calls, left, needed=needed, deadline_s=deadline_s)
                except HostError:  # raised by a call that is not a run: nothing is lost
                    raise
                except DaftError as error:
                    failed = error
                    if self._recovery is not None:
                        failed = self._recovery.recover(error, epoch)
                    if failed is not None:
                        root = self.fail(failed)
                        raise root from root.__cause__
        finally:
            if self.channel.interrupted and self.failure is None:
                self.interrupted()

    def _or_fail(self, act: Callable[[], None]) -> None:
        """Call `act`; if it raises DaftError, fail the cluster with that error."""
        try:
            act()
        except DaftError as error:
            failed = self.fail(error)
            raise failed from failed.__cause__

    def unload(self, handle: Handle) -> None:
        """Unload a program from its hosts, once no run of it may have to be repeated."""
        with self._lock:
            self._check()
            del self._handles[handle.id]
            self.loaded.sent_inputs.forget(handle.id)
            if self._recovery is None:
                self._unload(handle)
            else:  # a run of the program may have to be repeated until it is stable
                self._recovery.when_stable(lambda: self._unload(handle))

    def _unload(self, handle: Handle) -> None:
        """Tell the program's hosts to unload it, and forget its lines."""
        self.loaded.forget(handle.id)
        for host, _ in handle.places:
            self.calls += 1
            self.membership.tell(self.membership.host(host), Ranks.unload, handle.id)
        self._launch.folder.forget_lines(handle.id)

    def status(self, seconds: float) -> Status:
        self._check()
        return RunningLaunch(self._launch.folder.path).status(seconds)

    def came(self, calls: Sequence[AwaitedCall]) -> bool:
        return self.watch.came(calls)

    @property
    def recovered(self) -> int:
        return 0 if self._recovery is None else len(self._recovery.recovered)

    def _check_readable(self, handle: Handle, inputs: Sequence[Mapping[str, object]]) -> None:
        """Raise ActorLost if a value that a run may read was lost: state, or a `Stored` input."""
        if self._recovery is not None and self._recovery.lost_values:
            stored_names = [
                [v.name for v in inputs_of_rank.values() if isinstance(v, Stored)]
                for inputs_of_rank in inputs
            ]
            self._check_not_lost(
                [
                    [*rank_program.state, *names]
                    for rank_program, names in zip(handle.program.ranks, stored_names, strict=True)
                ]
            )

    def _check_not_lost(self, names: Sequence[Sequence[str]]) -> None:
        """Raise ActorLost if one of the named values was lost."""
        if self._recovery is not None and self._recovery.lost_values:
            keys = ((rank, name) for rank, of_rank in enumerate(names) for name in of_rank)
            self._recovery.check_not_lost(keys)

    def _record_written(self, names: Sequence[Collection[str]]) -> None:
        if self._recovery is not None and self._recovery.lost_values:
            for rank, names_of_rank in enumerate(names):
                for name in names_of_rank:
                    self._recovery.lost_values.pop((rank, name), None)

    @property
    def recoveries(self) -> Sequence[Recovered]:
        return () if self._recovery is None else tuple(self._recovery.recovered)

    def _ship(self, handle: Handle) -> Sequence[AwaitedCall]:
        """Send each host its part of a program, and the tags of new keys. Return the calls to wait
        for."""
        host_of = self.membership.host_of
        keys = check_routes(handle.program, host_of)
        new, calls = self.loaded.number(handle.program, keys, host_of), list[AwaitedCall]()
        parts = self.loaded.add(handle, self.membership.hosts)
        for host, part in parts.items():
            process = self.membership.host(host)
            # all members of a key take part in each program that uses the key
            tags = {k: n for k, n in new.items() if host in {host_of[r] for r in k[0]}}
            if tags and self.device.type == "cuda":  # waits until hosts have connected over NCCL
                calls.append(self.ask(host, Ranks.open, tags))
            elif tags:
                self.membership.tell(process, Ranks.open, tags)
            self.calls += 1
            self.membership.tell(process, Ranks.load, handle.id, *part)
        loaded = self.loaded.programs[handle.id]
        for spare in self.membership.spares if self._recovery is not None and loaded.needed else ():
            self.membership.tell(spare, Ranks.provide, loaded.needed)
        self._launch.folder.write_lines(handle.id, loaded.lines)
        return calls

    def ended(self, call: AwaitedCall) -> bool:
        return call.ref.message is not None and not call.ref.failed

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        """Send the custom ops that the program needs to its hosts. Raises ProgramError if a host
        cannot register an op."""
        needed = self.loaded.need(program)
        if not needed.origins:
            for host in hosts if needed else ():  # without custom ops this cannot fail: no wait
                self.membership.tell(self.membership.host(host), Ranks.provide, needed)
            return
        with self._lock:
            places = [(host, ()) for host in hosts]
            calls = self._call(Ranks.provide, places, [(needed,)] * len(hosts))
        lacking = self._wait_for(calls, None, max(START_S, self.watch.deadline_s))
        if lost := dict(pair for missing_on_host in lacking for pair in missing_on_host):
            facts = "".join(f"\n  {name}: {reason}" for name, reason in sorted(lost.items()))
            raise ProgramError(
                f"The program calls ops that the actors cannot have.{facts}\n"
                f"fix: define them with torch.library.custom_op in a module that the actors can "
                f"import; a library in C++, through a custom_op there that calls it"
            )

    def fail(self, error: DaftError) -> DaftError:
        """Fail the cluster with this error unless it has failed before, and end all hosts. Return
        the first failure."""
        if self.failure is None:
            self.failure = error
            for host in self._launch.processes:
                host.kill()
            for host in self._launch.processes:
                host.end()
        return self.failure

    def _end(self) -> None:
        """End all processes, after removing the snapshots on other machines."""
        if self._spans and self.changes is not None and self.failure is None:
            first = {p.machine: p for p in (*self.membership.processes, *self.membership.spares)}
            replies = [
                self.channel.send(process.index, REQUEST, (Ranks.remove_memory,), ())
                for process in first.values()
            ]
            self.channel.all_over(replies, END_S)
        self._launch.close()

    def _due(self, calls: Sequence[AwaitedCall]) -> dict[int, int]:
        """Return, by process, the last run that it must end before these calls can be answered."""
        end = max((each.before for each in calls), default=0)
        places = {self.membership.place(each.host.index) for each in calls}
        due = self.log.due({place for place in places if place is not None}, end)
        return {self.membership.host(host).index: run for host, run in due.items()}

    def _is_over(self, call: SentCall) -> bool:
        """Return whether a call was answered or lost."""
        if call.awaited is not None:
            return call.awaited.ref.over
        return self.channel.is_over(self.membership.processes[call.host].index, call.number)

    def _places_of(self, run: int) -> Places:
        """Return the hosts that a run was sent to, or all hosts if the log has forgotten the
        run."""
        hosts = self.log.hosts_of(run)
        every = self._everywhere()
        return every if hosts is None else [every[host] for host in hosts]

    # -- used by `Recovery` ---------------------------------------------------------------------
    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def lock(self) -> Lock:
        return self._lock

    # -- used by `FailureDetector`, see its `Controller` ----------------------------------------
    def describe(self, host: int, progress: Progress, reason: str) -> Failure:
        """Return the failure of a process: the instruction that it is at, and, if hosts are on
        several machines, its machine."""
        place = self.membership.place(host)
        if self._spans:
            reason = f"{reason} {self._whereabouts(host)}"
        if place is None:
            return Failure(rank=None, actor=f"process {host}", reason=f"{reason} It was a spare.")
        if (position := self._instruction_at(place, progress)) is None:
            rank = self.membership.hosts[place][0]
            if not self.membership.host(place).elsewhere:  # its counter can be read here
                reason += " It was between runs."
            return Failure(rank=rank, known_as=self.known_as.get(rank, ""), reason=reason)
        handle, site = position
        return replace(describe(handle.program, site, reason), step=progress.run)

    def _whereabouts(self, process: int) -> str:
        """Return a sentence that names a process's machine, and says if no process on that machine
        can be reached."""
        machine = self._launch.processes[process].machine
        name, broken = self._launch.named(machine), self.channel.broken()
        if process in broken and machine != self._launch.own_machine:
            self.channel.listen(TOGETHER_S)  # the connections to a lost machine break together
            broken = self.channel.broken()
        processes = (*self.membership.processes, *self.membership.spares)
        on_machine = [p for p in processes if p.machine == machine]
        if any(p.index not in broken for p in on_machine) or machine == self._launch.own_machine:
            return f"It was on {name}."
        ranks = [
            r
            for h, p in enumerate(self.membership.processes)
            if p in on_machine
            for r in self.membership.hosts[h]
        ]
        others = f", with {ranks_text(ranks)}" if len(ranks) > 1 else ""
        return f"Machine {name} has ended or cannot be reached{others}."

    def at_work(self, host: int, progress: Progress) -> bool:
        """Return whether a process executes a `Call`, or is between runs. False if its GPU
        waits."""
        if (
            progress.device is not None
        ):  # its GPU waits for a message; the host only spins meanwhile
            return False
        place = self.membership.place(host)
        position = None if place is None else self._instruction_at(place, progress)
        if position is None:  # between runs, a host may unpack or load a program
            return True
        handle, site = position
        return isinstance(instruction_at(handle.program, site), Call)

    def tell_of_loss(self, host: int) -> None:
        self._launch.announce(lost_key(host))

    def waits(self, progress_by_host: Mapping[int, Progress]) -> dict[int, Waits]:
        """Return, by process, the processes that it waits for, given the progress of all."""
        places = enumerate(self.membership.processes)
        by_host = {
            h: progress_by_host[p.index].of_device for h, p in places if p.index in progress_by_host
        }
        waits_of: dict[int, Waits] = {}
        host_of = self.membership.host_of
        for host, progress in by_host.items():
            lines = self.loaded.lines(progress.program)
            line = None if lines is None else lines.at(host, progress.position)
            waits = waits_at(line, progress, by_host)
            if (
                progress.position < 0 and progress.peer is not None and progress.peer >= 0
            ):  # it is connecting
                waits = Waits((host_of[progress.peer],))
            awaited_processes = tuple(self.membership.host(other).index for other in waits.blockers)
            waits_of[self.membership.host(host).index] = Waits(awaited_processes, waits.held_back)
        return waits_of

    def _instruction_at(self, host: int, progress: Progress) -> tuple[Handle, Site] | None:
        """Return the instruction that a host is at, with its program; None between runs."""
        handle = self._handles.get(progress.program)
        lists = () if handle is None else handle.report.lists
        if handle is None or host >= len(lists) or not 0 <= progress.position < len(lists[host]):
            return None
        return handle, lists[host][progress.position]
