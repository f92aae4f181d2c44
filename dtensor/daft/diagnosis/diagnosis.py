"""Diagnose a hang: what each rank is doing, the wait-for graph of the ranks, and its root.

    status = diagnose(launch, before, after)        # two samples of all hosts, 0.3 s apart
    status.waited_for                               # 2
    status.chain                                    # (0, 3, 2): rank 0 waits for 3, and 3 for 2

A rank that is blocked at a wait waits for the members that have not reached their part of it. The
chain ends at a rank that waits for no other: it is stopped, lost, idle, computing, or makes
progress between the samples. If all members have reached the wait, a message is held back, and its
sender is the end. The graph has no cycles, because a loaded program has none (pairing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dtensor.daft.diagnosis.observation import Observation, Progress, ThreadSeen, cpu_share
from dtensor.daft.diagnosis.program_lines import ListLine, ProgramLines
from dtensor.daft.status import Doing, RankStatus, Status

LATE_FACTOR = 5.0
"""A run is late if it takes this factor times the median of earlier runs, and at least LEAST_S."""
LEAST_S = 5.0
FIRST_S = 15.0  # the first run of a program is late after this,
FIRST_COMPUTES_S = 60.0  # or after this if the awaited rank computes, since it may compile
SILENT_S = 5.0
"""If the last heartbeat is this old and the thread uses no CPU, the process is stopped (in a frozen
container, for example). Heartbeats come every 0.25 s."""
BUSY_SHARE = 0.05  # of a core; a thread that sleeps and polls uses less
RUNNABLE_SHARE = 0.005  # enough if the thread was runnable in both samples (a loaded machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLaunch:
    """The constant facts of a launch.

    `hosts`: the ranks of each host. `machines`: the machine of each host, () if there is only one.
    `lines`: a function that returns the lines of a loaded program, by its number. `controller`: two
    samples of the controller's main thread. `patient`: runs never count as late (spawned actors).
    """

    title: str
    pid: int
    hosts: tuple[tuple[int, ...], ...]
    machines: tuple[str, ...] = ()
    lines: Callable[[int], ProgramLines | None]
    controller: tuple[ThreadSeen, ThreadSeen] | None = None
    patient: bool = False


def limit_s(progress: Progress, *, computes: bool = False) -> float:
    """Return how long the current run may take before it is late. `computes`: whether the awaited
    rank computes."""
    if progress.usual_s is None:
        return FIRST_COMPUTES_S if computes else FIRST_S
    return max(LATE_FACTOR * progress.usual_s, LEAST_S)


# -- the wait-for graph ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waits:
    """The hosts for which one host waits: its `blockers`. `held_back`: they have all started their
    part, so a message has not arrived."""

    blockers: tuple[int, ...] = ()
    held_back: bool = False


FOR_NOBODY = Waits()


def waits_at(line: ListLine | None, progress: Progress, positions: Mapping[int, Progress]) -> Waits:
    """Return for which hosts a host waits at `line`. `progress`: its own progress. `positions`: the
    progress of all observed hosts."""
    if line is None or line.kind != "wait":
        return FOR_NOBODY
    partners = [
        (rank, host, position) for rank, host, position in line.partners if host in positions
    ]
    missing = [
        host
        for _, host, position in partners
        if not positions[host].has_passed(progress.run, position)
    ]
    if missing:
        return Waits(tuple(dict.fromkeys(missing)))
    expected = [host for rank, host, _ in partners if rank == progress.peer]
    return Waits(
        tuple(dict.fromkeys(expected or [host for _, host, _ in partners])), bool(partners)
    )


def ends_of(
    start: int, waits: Mapping[int, Waits], down: Collection[int] = ()
) -> dict[int, tuple[int, ...]]:
    """Return the hosts at which the waits of host `start` end, each with the path of hosts to it.
    `down`: hosts that are stopped or lost."""
    ends: dict[int, tuple[int, ...]] = {}
    paths: list[tuple[int, ...]] = [(start,)]
    passed = {start}
    while paths:
        path = paths.pop(0)
        host_waits = waits.get(path[-1], FOR_NOBODY)
        if host_waits.held_back:
            # a stopped host may have sent half of a message
            for sender in [h for h in host_waits.blockers if h in down] or host_waits.blockers:
                ends.setdefault(sender, (*path, sender))
        elif host_waits.blockers:
            for blocker in host_waits.blockers:
                if blocker not in passed:
                    passed.add(blocker)
                    paths.append((*path, blocker))
        else:
            ends.setdefault(path[-1], path)
    return ends


# -- results ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Host:
    """What one host is doing. `line`: its current instruction, if known."""

    observation: Observation
    does: Doing
    cpu: float
    line: ListLine | None
    waits: Waits = FOR_NOBODY

    @property
    def blockers(self) -> tuple[int, ...]:
        """The hosts that this host waits for."""
        return self.waits.blockers

    @property
    def progress(self) -> Progress:
        return self.observation.progress

    @property
    def at_work(self) -> bool:
        """Whether the host has an unfinished run."""
        return self.progress.position >= 0 or self.progress.asked > self.progress.run

    @property
    def down(self) -> bool:
        return self.does in ("is stopped", "is lost")

    @property
    def unknown(self) -> bool:
        """Whether it is not known if this host waits for another host."""
        unread = self.progress.position >= 0 and self.line is None
        return self.does == "is elsewhere" or (unread and not self.down)


def diagnose(
    launch: ObservedLaunch, before: Sequence[Observation], after: Sequence[Observation]
) -> Status:
    """Return the status of a launch, from two samples of all hosts."""
    hosts = {b.host: _host(launch, b, a, after) for b, a in zip(before, after, strict=True)}
    roots = {h: _roots(h, hosts) for h, host in hosts.items() if host.down or host.at_work}
    root = _root(launch, hosts, roots)
    rank_of = {h: _rank(launch, hosts[h]) for h in hosts}
    path = _path(root, hosts, roots)
    link = None
    if len(path) > 1 and hosts[path[-2]].does == "waits for a message" and not hosts[path[-1]].down:
        link = rank_of[path[-1]], rank_of[path[-2]]
    waiting = [rank for h in roots if h != root and root in roots[h] for rank in launch.hosts[h]]
    controller = _controller(launch.controller)
    hangs = root is not None and _hangs(launch, root, hosts, roots)
    if root is None or hosts[root].does == "is idle":
        hangs |= controller == "is stopped"
    ranks = [
        _status(launch, hosts[h], rank, rank_of)
        for h, host_ranks in enumerate(launch.hosts)
        for rank in host_ranks
    ]
    ranks.sort(key=lambda each: each.rank)
    reason = _reason(launch, hosts, root, rank_of, link, sorted(waiting), controller)
    return Status(
        title=launch.title,
        pid=launch.pid,
        ranks=tuple(ranks),
        waited_for=None if root is None or hosts[root].unknown else rank_of[root],
        chain=tuple(rank_of[h] for h in path),
        link=link,
        hangs=hangs,
        reason=reason,
        controller=controller,
    )


# -- the state of a host ---------------------------------------------------------------------------


def _host(
    launch: ObservedLaunch, before: Observation, after: Observation, all_seen: Sequence[Observation]
) -> _Host:
    """Return what a host is doing, from two samples of it and the second samples of all hosts."""
    now, share = after.progress, cpu_share(before, after)
    ready = before.thread.state == after.thread.state == "R"
    busy = share >= BUSY_SHARE or (ready and share >= RUNNABLE_SHARE)
    lines = launch.lines(now.program) if now.position >= 0 else None
    line = None if lines is None else lines.at(after.host, now.position)

    def is_now(does: Doing, waits: Waits = FOR_NOBODY) -> _Host:
        return _Host(after, does, share, line, waits)

    if not now.pid:
        return is_now("is elsewhere" if now.answered or now.asked >= 0 else "is starting")
    if after.thread.state in ("", "Z", "X"):
        return is_now("is lost")
    silent = now.beat_s is not None and now.beat_s > SILENT_S and not busy
    if after.thread.state in "Tt" or silent:
        return is_now("is stopped")
    if now.position < 0:
        return is_now("is between runs" if now.asked > now.run else "is idle")
    if before.progress.moving != now.moving:
        return is_now("moves on")
    if line is None or line.kind != "wait":
        return is_now("computes" if busy else "sleeps")
    waits = waits_at(line, now, {seen.host: seen.progress for seen in all_seen})
    if waits.blockers and not waits.held_back:
        return is_now("waits", waits)
    if busy or not waits.blockers:  # the host copies a message that has arrived
        return is_now("computes" if busy else "sleeps")
    return is_now("waits for a message", waits)


# -- the root of the waits -------------------------------------------------------------------------


def _roots(start: int, hosts: Mapping[int, _Host]) -> dict[int, tuple[int, ...]]:
    """Return the hosts at which the waits of host `start` end, each with the path to it."""
    down = [h for h, host in hosts.items() if host.down]
    return ends_of(start, {h: host.waits for h, host in hosts.items()}, down)


def _root(
    launch: ObservedLaunch,
    hosts: Mapping[int, _Host],
    roots: Mapping[int, Mapping[int, tuple[int, ...]]],
) -> int | None:
    """Return the host that most hosts wait for. Hosts that are down, then late ones, come first."""
    candidates = sorted({root for paths_by_root in roots.values() for root in paths_by_root})
    if not candidates:
        return None

    def priority(root: int) -> tuple[bool, bool, bool, int, float]:
        host = hosts[root]
        hangs = _hangs(launch, root, hosts, roots)
        waiting = sum(root in paths_by_root for h, paths_by_root in roots.items() if h != root)
        return host.down, not host.unknown, hangs, waiting, host.progress.standing_s or 0.0

    return max(candidates, key=priority)


def _path(
    root: int | None,
    hosts: Mapping[int, _Host],
    roots: Mapping[int, Mapping[int, tuple[int, ...]]],
) -> tuple[int, ...]:
    """Return the longest path of waits to the root."""
    if root is None:
        return ()
    paths = [paths_by_root[root] for paths_by_root in roots.values() if root in paths_by_root]
    return max(paths, key=len, default=(root,))


def _hangs(
    launch: ObservedLaunch,
    root: int,
    hosts: Mapping[int, _Host],
    roots: Mapping[int, Mapping[int, tuple[int, ...]]],
) -> bool:
    """Return whether the root is down, or a run that waits for it is late."""
    if hosts[root].down:
        return True
    if launch.patient or hosts[root].does == "moves on":
        return False
    if hosts[root].does == "is between runs":
        busy = hosts[root].cpu >= BUSY_SHARE
        standing_s = hosts[root].progress.standing_s or 0.0
        if standing_s > (FIRST_COMPUTES_S if busy else FIRST_S):
            return True
    concerned = {root, *(h for h, paths_by_root in roots.items() if root in paths_by_root)}
    running = [hosts[h].progress for h in concerned if hosts[h].progress.position >= 0]
    computes = hosts[root].does == "computes"
    return any((p.running_s or 0.0) > limit_s(p, computes=computes) for p in running)


# -- texts -----------------------------------------------------------------------------------------


def _rank(launch: ObservedLaunch, host: _Host) -> int:
    """Return the host's rank whose instruction is the current one."""
    return launch.hosts[host.observation.host][0] if host.line is None else host.line.rank


def _status(
    launch: ObservedLaunch, host: _Host, rank: int, rank_of: Mapping[int, int]
) -> RankStatus:
    """Return the status of one rank. ``rank_of``: the current rank of each host."""
    now, line = host.progress, host.line
    lines = launch.lines(now.program) if now.program >= 0 else None
    known_as = lines.known_as[rank] if lines is not None and rank < len(lines.known_as) else ""
    current = rank_of[host.observation.host]
    peers = tuple(sorted({rank_of[h] for h in host.blockers}))
    if line is not None and host.blockers:
        peers = tuple(sorted({r for r, h, _ in line.partners if h in host.blockers}))
    does, text = host.does, _describe_activity(host, peers)
    if does == "is elsewhere" and launch.machines:
        text = "is not seen from here"
    if rank != current and now.position >= 0 and not host.down:
        does, text, peers = "waits its turn", f"shares the process of rank {current}", (current,)
    running = now.position >= 0
    return RankStatus(
        rank=rank,
        known_as=known_as,
        machine=launch.machines[host.observation.host] if launch.machines else "",
        does=does,
        text=text,
        peers=peers,
        program=lines.program if running and lines is not None else "",
        run=now.run if now.run >= 0 else None,
        index=line.index if line is not None and rank == current else None,
        instruction=line.text if line is not None and rank == current else "",
        label=line.label if line is not None and rank == current else "",
        line=line.source if line is not None and rank == current else None,
        since_s=now.standing_s,
        cpu=host.cpu if now.pid else None,
        running_s=now.running_s if running else None,
        usual_s=now.usual_s if running else None,
        pid=now.pid,
    )


def _describe_activity(host: _Host, peers: Sequence[int]) -> str:
    """Return `RankStatus.text`. ``peers``: the ranks that the host waits for."""
    peers_text = ranks_text(peers)
    match host.does:
        case "waits":
            return f"waits for {peers_text}"
        case "waits for a message":
            return f"waits for a message of {peers_text}"
        case "computes" | "sleeps":
            kind = None if host.line is None else host.line.kind
            location = {"call": " in a call", "start": " in a start", "wait": " in a wait"}
            return host.does + location.get(kind or "", "")
        case "is stopped" if host.observation.thread.state not in "Tt":
            return f"is stopped: no heartbeat for {host.progress.beat_s or 0.0:.1f} s"
        case "is between runs":
            busy = "computes" if host.cpu >= BUSY_SHARE else "sleeps"
            return f"{busy} before run {host.progress.asked}"
        case "is elsewhere":
            return "is on another machine, and not seen from here"
        case _:
            return host.does


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 1` or `ranks 1, 2 and 3`."""
    *others, last = map(str, ranks or ("?",))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _controller(samples: tuple[ThreadSeen, ThreadSeen] | None) -> str:
    """Return what the controller's thread is doing, "" if it was not observed."""
    if samples is None:
        return ""
    before, after = samples
    if after.state in ("", "Z", "X"):
        return "has ended"
    if after.state in "Tt":
        return "is stopped"
    return "computes" if after.cpu_s - before.cpu_s > 0.01 else "sleeps"


def _reason(
    launch: ObservedLaunch,
    hosts: Mapping[int, _Host],
    root: int | None,
    rank_of: Mapping[int, int],
    link: tuple[int, int] | None,
    waiting: Sequence[int],
    controller: str,
) -> str:
    """Return `Status.reason`. ``waiting``: the ranks that wait for the root."""
    if root is None:
        if unseen := [h for h in hosts if hosts[h].does in ("is starting", "is elsewhere")]:
            ranks = [rank for h in unseen for rank in launch.hosts[h]]
            verb = "is" if len(ranks) == 1 else "are"
            states = {"starting" if hosts[h].does == "is starting" else "elsewhere" for h in unseen}
            return f"{ranks_text(ranks)} {verb} {' or '.join(sorted(states))}.".capitalize()
        last = max((host.progress.run for host in hosts.values()), default=-1)
        done = f"since run {last} has ended" if last >= 0 else "yet"
        controller_text = f"; the controller {controller}" if controller else ""
        return f"No run is in flight: the controller has called no rank {done}{controller_text}."
    host = hosts[root]
    name = f"Rank {rank_of[root]}"
    if host.unknown and launch.patient:
        return "The waits of spawned actors are not seen from here."
    if host.does == "is elsewhere" and not waiting:
        return f"{name} is on another machine, and not seen from here; no rank is seen to wait."
    if host.does == "is elsewhere":
        ranks = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'}".capitalize()
        location = "it is on another machine, and not seen from here"
        return f"{ranks} for rank {rank_of[root]}, or for a message of it: {location}."
    if link is not None:
        fact = (
            f"A message of rank {link[0]} to rank {link[1]} is held back: both have started it, "
            f"and it has not come"
        )
        # the receiver waits for the sender, too
        others = sorted({*waiting, link[1]} - {link[0]})
        return f"{fact}; {_wait_for(others, 'it')}."
    fact = f"{name} {_describe_activity(host, ())}"
    if host.unknown:
        fact += ", and its waits are not known: the lines of its program are missing"
    if host.does == "is idle":
        fact = f"{name} is idle: the controller has not called it"
        fact += f", which {controller}" if controller else ""
    others = _wait_for(waiting, "it") if waiting else "no other rank waits for it"
    if not waiting and not host.at_work:
        others = "no rank waits for it yet"
    return f"{fact}; {others}."


def _wait_for(ranks: Sequence[int], awaited: str) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {awaited}"
