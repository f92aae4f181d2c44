"""Resources held by this process and its children, compared before and after a launch (Linux only).

    before = held()
    ...                                    # a launch, and its end
    left(before, patience_s=20.0)          # [] or ["thread: heartbeat +1", ...]

`held` counts processes, listening ports, shared memory, file descriptors, threads and temporary
files, from /proc; `alive` counts tensors and dtensor's owners of resources, from the garbage
collector. Numbers in names are removed, so that cycles can be compared. Not counted are Ray's idle
workers, gRPC threads and logs, and closed sockets: Ray 2.60 leaves one or two for each session with
an actor.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

Held: TypeAlias = Mapping[str, Counter[str]]
"""Sort, such as "thread", to how many there are of each name."""

Found = TypeVar("Found")

OWNERS = (
    "Cluster",
    "Session",
    "Engine",
    "Worker",
    "Transport",
    "Future",
    "File",
    "Process",
    "Channel",
)
"""How the names end of classes of dtensor's that own values, processes, files or connections."""

GRPC = ("grpc", "event_engine", "timer_manager", "resolver-", "default-execut")
"""How the names begin of the threads of gRPC's pools."""

PROC = Path("/proc")


def held() -> Held:
    everything = processes_of(os.getpid())
    processes = {p: n for p, n in everything.items() if n != "idle worker" or not _ray_runs()}
    return {
        "process": Counter(processes.values()),
        "port": _ports(processes),
        "shared memory": _shared_memory(processes) + _unnamed_memory(everything),
        "descriptor": _descriptors(),
        "thread": _threads(),
        "temporary file": Counter(os.listdir(tempfile.gettempdir())),
    }


def alive() -> Held:
    """Collect garbage and return the objects that are still referenced."""
    gc.collect()
    counts: Counter[str] = Counter()
    for found in gc.get_objects():
        cls = type(found)  # `isinstance` would ask lazy modules for their class
        if issubclass(cls, torch.Tensor):
            counts["Tensor"] += not issubclass(cls, FakeTensor)  # torch keeps its last export's
        elif str(cls.__module__).startswith("dtensor.") and cls.__name__.endswith(OWNERS):
            counts[cls.__name__] += 1
    return {"object": counts}


def left(before: Held, patience_s: float, take: Callable[[], Held] = held) -> list[str]:
    """Return what exists now and did not before; processes and threads get ``patience_s`` to
    end."""
    gc.collect()  # an exception that nobody holds holds its frames, and they Ray's references
    end = time.monotonic() + patience_s
    while more := _more(before, take()):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return more


def running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return _state(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def _more(before: Held, after: Held) -> list[str]:
    return [
        f"{sort}: {name} +{count}"
        for sort, names in after.items()
        for name, count in sorted((names - before[sort]).items())
    ]


def processes_of(controller: int) -> dict[int, str]:
    """Return the names of this process and all its descendants by pid, including processes of a Ray
    that it started, which init adopts when their parent ends first."""
    parents = {pid: int(state[1]) for pid in _pids() if (state := _try(_state, pid))}
    ours = {controller}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    logs = re.compile(rf"/session_[^/]*_{controller}/")
    ours |= {pid for pid in parents if any(map(logs.search, _links(pid)))}
    return {pid: name for pid in ours if (name := _name(pid)) is not None}


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def _state(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat from the third on: state, parent, ..."""
    return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()


def _name(pid: int) -> str | None:
    words = _try(lambda p: (PROC / str(p) / "cmdline").read_text().split("\0"), pid)
    if words is None:
        return None
    if not any(words):
        return "zombie"
    worker = any("default_worker.py" in word for word in words[1:3])  # raylet is told of it, too
    if words[0].startswith("ray::IDLE") or worker:
        return "idle worker"
    python = os.path.basename(words[0]).startswith("python")
    script = next((w for w in words[1:] if not w.startswith("-")), words[0]) if python else words[0]
    return os.path.basename(script.strip())


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _links(pid: int) -> list[str]:
    """Return the targets of a process's file descriptors."""
    folder = PROC / str(pid) / "fd"
    names = _try(lambda _: os.listdir(folder), pid) or []
    links = [_try(lambda _, n=name: os.readlink(folder / n), pid) for name in names]
    return [link for link in links if link is not None]


def _ports(processes: Mapping[int, str]) -> Counter[str]:
    """Return listening sockets by owning process."""
    return Counter(name for name, _, _ in listening(processes))


def listening(processes: Mapping[int, str] | None = None) -> list[tuple[str, str, int]]:
    """Return (process, address as in `ss`, port) of listening TCP sockets."""
    found: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                found[f"socket:[{fields[9]}]"] = (_address(address), int(port, 16))
    processes = processes_of(os.getpid()) if processes is None else processes
    return [
        (name, *found[link])
        for pid, name in processes.items()
        for link in _links(pid)
        if link in found
    ]


def _address(words: str) -> str:
    """Decode the kernel's hexadecimal address words, which are in machine byte order."""
    each = [int(words[i : i + 8], 16) for i in range(0, len(words), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in each)
    if len(packed) == 16 and (mapped := IPv6Address(packed).ipv4_mapped) is not None:
        return f"::ffff:{mapped}"
    return str(ip_address(packed))


def _descriptors() -> Counter[str]:
    """Return this process's descriptors, without closed sockets, which no kernel table lists."""
    tables = [(PROC / "net" / name).read_text() for name in ("tcp", "tcp6", "udp", "udp6", "unix")]
    open_sockets = {word for table in tables for word in table.split() if word.isdigit()}
    links = _links(os.getpid())
    inodes = {link: link[8:-1] for link in links if link.startswith("socket:[")}
    return Counter(
        _unnumbered(link) for link in links if link not in inodes or inodes[link] in open_sockets
    )


def _shared_memory(processes: Mapping[int, str]) -> Counter[str]:
    """Return files in /dev/shm, except those that a foreign process has open."""
    found = set(os.listdir("/dev/shm"))
    others = [pid for pid in _pids() if pid not in processes] if found else []
    for pid in others:
        maps = _try(lambda p: (PROC / str(p) / "maps").read_text(), pid) or ""
        text = "\n".join([maps, *_links(pid)])
        found -= {name for name in found if f"/dev/shm/{name}" in text}
    return Counter(found)


def _unnamed_memory(processes: Mapping[int, str]) -> Counter[str]:
    """Return dtensor's anonymous memory files: descriptors and mappings in all these processes,
    including idle workers."""
    counts: Counter[str] = Counter()
    for pid in processes:
        maps = _try(lambda p: (PROC / str(p) / "maps").read_text(), pid) or ""
        counts["memfd, open"] += sum(link.startswith("/memfd:dtensor") for link in _links(pid))
        counts["memfd, mapped"] += maps.count("/memfd:dtensor")
    return +counts


def _threads() -> Counter[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    counts: Counter[str] = Counter()
    for task in map(int, os.listdir(PROC / "self" / "task")):
        comm = _try(lambda t: (PROC / "self" / "task" / str(t) / "comm").read_text(), task)
        counts[_unnumbered(names.get(task) or (comm or "").strip())] += 1
    return Counter({name: n for name, n in counts.items() if not name.startswith(GRPC)})


def _unnumbered(text: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", text)


def _try(read: Callable[[int], Found], pid: int) -> Found | None:
    """Read from /proc; None if the process has ended or may not be inspected."""
    try:
        return read(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
