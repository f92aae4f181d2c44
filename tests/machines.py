"""Simulated machines for tests: Linux namespaces on this machine that share only a network.

    with Machines("one", "two") as machines:
        one, two = machines
        one.run("ray start --head --port=6379 --node-ip-address=10.77.0.1")
        two.pull_cable()                          # and `two.plug_in()`
        two.end()                                 # all its processes, as in a power failure

Each has its own network, processes, host name, /tmp, /dev/shm and HOME; a bridge joins them, and
they share /mnt. Needs root (`can_make()`). When the first process of the outer namespace ends, with
the block or with its creator, the kernel ends everything.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ADDRESSES = "10.77.0"
OWN = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
FIRST = "mount --make-rprivate / && mount -t proc proc /proc && ip link set lo up"
STAY = "while read -t 0.5; [ $? -gt 128 ]; do :; done"
"""Until nobody holds the other end; bash takes in the orphans that end meanwhile."""


@cache
def can_make() -> bool:
    try:
        with Machines("one"):
            return True
    except (OSError, RuntimeError):
        return False


class Machine:
    """One simulated machine."""

    def __init__(self, name: str, number: int, first: int) -> None:
        self.name = name
        self.address = f"{ADDRESSES}.{number}"
        self.first = first  # its first process, by our number
        self.network = os.open(f"/proc/{first}/ns/net", os.O_RDONLY)  # outlives the machine

    def start(self, command: str, **settings: str) -> subprocess.Popen[str]:
        """Start a shell command on the machine, with additional environment variables."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": "/tmp/home"}
        environment |= {"OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"} | settings
        given = ["nsenter", "--target", str(self.first), "--all", "bash", "-c"]
        there = f"cd {shlex.quote(str(REPOSITORY))} && {command}"
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*given, there], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, command: str, timeout: float = 600, **settings: str) -> str:
        """Return the output of a command. Raises RuntimeError with the output if it fails."""
        with self.start(command, **settings) as process:
            try:
                out, told = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode:
            raise RuntimeError(f"{command!r} on {self.name}: {out}\n{told}"[-6000:])
        return out

    def pull_cable(self) -> None:
        self._ip("link set eth0 down")

    def plug_in(self) -> None:
        self._ip("link set eth0 up")

    def end(self) -> None:
        """End the machine as in a power failure with its cable plugged in: the kernel closes its
        connections."""
        os.kill(self.first, 9)
        while Path(f"/proc/{self.first}").exists():
            time.sleep(0.005)

    def _ip(self, arguments: str) -> None:
        inside = ["nsenter", f"--net=/proc/self/fd/{self.network}", "ip", *arguments.split()]
        subprocess.run(inside, check=True, pass_fds=[self.network])


class Machines:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.machines: list[Machine] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._shared = tempfile.TemporaryDirectory()

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            os.close(machine.network)
        self.machines = []
        for process in self._processes[:1]:  # the others end with it
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes = []
        self._shared.cleanup()

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines)

    def _make(self) -> None:
        world = self._namespaces(
            f"{FIRST} && ip link add bridge type bridge && ip link set bridge up"
        )
        hosts = "".join(f"{ADDRESSES}.{i} {name}\\n" for i, name in enumerate(self.names, 1))
        for number, name in enumerate(self.names, 1):
            first = self._namespaces(own_places(name, hosts, Path(self._shared.name)), inside=world)
            inside = ["nsenter", "--target", str(world), "--all", "sh", "-c"]
            # by its number in the world's namespace of processes
            here = Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split("\n")[0]
            there = here.split()[-2]
            plug = (
                f"ip link add to-{name} type veth peer name eth0 netns {there} && "
                f"ip link set to-{name} master bridge up"
            )
            subprocess.run([*inside, plug], check=True, capture_output=True)
            machine = Machine(name, number, first)
            self.machines.append(machine)
            machine._ip(f"addr add {machine.address}/24 dev eth0")
            machine._ip("link set eth0 up")

    def _namespaces(self, script: str, inside: int | None = None) -> int:
        """Start new namespaces inside another one; return their first process when the script is
        done."""
        enter = [] if inside is None else ["nsenter", "--target", str(inside), "--all"]
        process = subprocess.Popen(
            [*enter, *OWN, "bash", "-c", f"{script} && echo made && {STAY}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "made\n":
            raise RuntimeError(f"no namespaces: {process.stderr.read()}")
        first = process.pid
        for _ in range(1 if inside is None else 2):  # nsenter, unshare, bash
            first = int(Path(f"/proc/{first}/task/{first}/children").read_text().split()[0])
        return first


def own_places(name: str, hosts: str, shared: Path) -> str:
    """Return shell commands that give a machine its own folders."""
    kept = [REPOSITORY, shared, *dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix)))]
    kept = [path for path in kept if path.is_relative_to("/tmp")]
    script = [FIRST, f"hostname {name}", "mount -t tmpfs m /dev/shm", "mount -t tmpfs m /mnt"]
    for at, path in enumerate(kept):
        script += [f"mkdir /mnt/{at}", f"mount --bind {path} /mnt/{at}"]
    script += ["mount -t tmpfs m /tmp", "chmod 1777 /tmp", "mkdir /tmp/home"]
    for at, path in enumerate(kept):
        script += [f"mkdir -p {path}", f"mount --bind /mnt/{at} {path}"]
    script += [f"mount --bind {shared} /mnt"]
    script += [f"printf '127.0.0.1 localhost\\n{hosts}' > /tmp/hosts"]
    return " && ".join([*script, "mount --bind /tmp/hosts /etc/hosts"])
