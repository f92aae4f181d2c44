"""`dtensor doctor`: checks whether dtensor can run here, and says how to fix it where it cannot.

    $ dtensor doctor
    ok       python        3.11.7                        supported: >=3.11
    ok       torch         2.13.0+cpu                    supported: >=2.11,<2.14
    warning  triton        not installed                 pip install 'dtensor[kernels]': ...
    ...

A line for each check: *ok*; *warning*, which costs something and stops nothing; *wrong*, with a
fix. Supported versions are those of the package's own metadata. The self-test trains for three
steps on two ranks in this process, on its GPU if it has one, and on Ray, and compares the losses
with one rank's.

Exit status 1 if a line is wrong. It changes only what a launch makes for itself and removes; a Ray
that it joined keeps running.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dtensor.commands.checks import Check, State, first_line
from dtensor.commands.options import add_json
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine

EPILOG = "exit status: 0, nothing is wrong; 1, something is; 2, an invalid request."
EXTRAS = {
    "ray": ("dtensor[ray]", "ranks in processes of their own, backend='ray'"),
    "triton": ("dtensor[kernels]", "fused kernels on a GPU"),
    "transformers": ("transformers>=5,<6", "models by their type, as `dtensor plan gpt2`"),
}
"""Optional packages: the pip requirement, and their use."""
LITTLE_MEMORY = 2 * 2**30
LITTLE_SHARED = 256 * 2**20


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "doctor",
        "whether dtensor can run here: versions, cores, GPUs, Ray, ports, a self-test",
        "Checks installed packages and the machine, and trains a tiny model for three steps on "
        "two ranks, in this process and on Ray. Each line that is not ok has a fix.",
        EPILOG,
    )
    parser.add_argument(
        "--no-ray", action="store_true", help="leave out the checks that start or join Ray"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check the GPUs instead, part by part: devices, streams, kernels, training, NCCL",
    )
    add_json(parser, "a JSON list, an object for each line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    checked: list[Check] = []
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("checks versions", versions),
        ("checks the machine", machine),
        ("trains on two ranks in this process", in_process),
        ("trains on two ranks on the GPU", on_gpu),
    ]
    if options.gpu:
        from dtensor.commands.doctor_gpu import on_gpus

        parts = [("checks versions", versions), ("checks the GPUs", on_gpus)]
    elif not options.no_ray:
        parts.append(("trains on two ranks on Ray", on_ray))
    table = _Table(plain=options.json or not sys.stdout.isatty())
    with ProgressLine() as progress:
        for what, checks in parts:
            with progress.doing(what):
                for check in checks():
                    checked.append(check)
                    if table.plain and not options.json:
                        table.line(check)
    if options.json:
        from dtensor.commands.json_data import print_json

        print_json([asdict(check) for check in checked])
    elif not table.plain:
        table.show(checked)
    wrong = sum(check.state == "wrong" for check in checked)
    warnings = sum(check.state == "warning" for check in checked)
    if not options.json:
        words = "Nothing is wrong" if not wrong else f"{wrong} wrong"
        print(f"\n{words}{f', {warnings} warnings' if warnings else ''}.")
    return int(wrong > 0)


# -- installed packages
# -----------------------------------------------------------------------------


def versions() -> Iterator[Check]:
    try:
        about: Any = metadata.metadata("dtensor")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        fix = "pip install -e . in the checkout"
        yield Check("warning", "dtensor", "not installed: no versions to compare with", fix)
        return
    wanted = about["Requires-Python"] or ""
    python = ".".join(map(str, sys.version_info[:3]))
    state: State = "ok" if within(python, wanted) else "wrong"
    yield Check(state, "python", python, f"supported: {wanted}")
    for name, wanted in requirements().items():
        extra = EXTRAS.get(name)
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            what = f"{extra[1]}: " if extra else ""
            pip = f"pip install '{extra[0] if extra else name + wanted}'"
            yield Check("warning" if extra else "wrong", name, "not installed", what + pip)
            continue
        if within(there, wanted):
            yield Check("ok", name, there, f"supported: {wanted}")
        else:
            bad: State = "warning" if extra else "wrong"
            fix = f"supported: {wanted}; pip install '{name}{wanted}'"
            yield Check(bad, name, there, fix)


def requirements() -> dict[str, str]:
    """The requirements of dtensor, then `EXTRAS`, each with its range, from the package's
    metadata."""
    ranges: dict[str, str] = {}
    for line in metadata.requires("dtensor") or ():
        parts = re.fullmatch(r"([\w.-]+)(?:\[.*?\])?([^;\[]*)(;.*)?", line)
        if parts is not None and ("extra ==" not in line or parts[1] in EXTRAS):
            bounds = [b.strip() for b in parts[2].split(",") if b.strip()]
            order = sorted(bounds, key=lambda bound: not bound.startswith(">"))
            ranges.setdefault(parts[1], ",".join(order))
    return ranges


def within(version: str, bounds: str) -> bool:
    """Whether a version is within ``>=2.11,<2.14``; only the numbers of 2.13.0+cpu count."""
    numbers = _numbers(version)
    for bound in filter(None, bounds.split(",")):
        parts = re.fullmatch(r"\s*(>=|<=|<|>|==|~=|!=)\s*([\d.]+)\S*\s*", bound)
        if parts is None:
            continue
        other = _numbers(parts[2])
        size = max(len(numbers), len(other))
        a, b = (n + (0,) * (size - len(n)) for n in (numbers, other))
        kept = {">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b, "==": a == b, "!=": a != b}
        if not kept.get(parts[1], True):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


# -- the machine ---------------------------------------------------------------------------------


def machine() -> Iterator[Check]:
    from dtensor.sharding.plan.text.words import size_text

    yield _cores()
    free = _available_memory()
    if free is not None:
        note = "a rank on Ray takes 200 MiB besides its tensors"
        yield Check("ok" if free >= LITTLE_MEMORY else "warning", "memory", size_text(free), note)
    yield from _gpus()
    yield _shared_memory(size_text)
    yield _own_folder()
    yield _ports()


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    stated = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} for this process; OMP_NUM_THREADS {stated or 'not set'}"
    if stated is not None and stated.isdecimal() and int(stated) > (cores or 1):
        return Check("warning", "cores", text, "set it to 1: more threads than cores take turns")
    return Check("ok", "cores", text, "a rank computes with one thread")


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _gpus() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            free, _ = torch.cuda.mem_get_info(index)
            memory = f"{free / 2**30:.0f} of {facts.total_memory / 2**30:.0f} GiB free"
            yield Check("ok", f"cuda:{index}", f"{facts.name}, {memory}", "device='cuda'")
        return
    if Path("/proc/driver/nvidia/version").exists():
        why = "is built for CPUs" if torch.version.cuda is None else "cannot use it"
        yield Check(
            "warning",
            "cuda",
            f"there is a GPU's driver, and this torch ({torch.__version__}) {why}",
            "install torch for CUDA, as pytorch.org says; ranks run on the CPU",
        )
        return
    yield Check("ok", "cuda", "no GPU", "ranks run on the CPU")


def _shared_memory(size_text: Callable[[int], str]) -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        fix = "ranks of one host on Ray exchange tensors there: mount a tmpfs"
        return Check("warning", "/dev/shm", "there is none", fix)
    if free < LITTLE_SHARED:
        fix = "make room there, or start the container with --shm-size=2g"
        return Check("warning", "/dev/shm", f"{size_text(free)} free", fix)
    return Check("ok", "/dev/shm", f"{size_text(free)} free", "tensors between ranks of a host")


def _own_folder() -> Check:
    from dtensor.daft.ray.bootstrap.user_folder import check_own, own_directory

    folder = own_directory()
    try:
        check_own(folder)
    except FileNotFoundError:
        if not os.access(folder.parent, os.W_OK | os.X_OK):
            fix = "set TMPDIR to a folder of your own that you can write to"
            return Check("wrong", "folder", f"{folder} cannot be made", fix)
        return Check("ok", "folder", str(folder), "made by the first launch on Ray")
    except PermissionError as error:
        said, _, fix = str(error).partition("\n  Fix: ")
        return Check("wrong", "folder", said, fix)
    return Check("ok", "folder", str(folder), "this user's alone")


def _ports() -> Check:
    """Whether a process can listen on loopback, and be reached there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    except OSError as error:
        fix = "let processes of this machine connect to 127.0.0.1: a firewall or a sandbox forbids"
        return Check("wrong", "ports", f"loopback: {error}", fix)
    return Check("ok", "ports", "loopback can be bound and reached", "")


# -- self-tests
# -------------------------------------------------------------------------------------


def in_process() -> Iterator[Check]:
    import dtensor as dt
    from dtensor.commands.selftest import STEPS, TOLERANCE, difference, losses

    begin = time.perf_counter()
    try:
        one, two = losses("inprocess", dt.Mesh()), losses("inprocess", dt.Mesh(tp=2))
    except Exception as error:
        yield Check("wrong", "self-test", first_line(error), "report it, with this table")
        return
    off, took = difference(two, one), time.perf_counter() - begin
    if off > TOLERANCE:
        words = f"losses of two ranks are {off:.1e} off one rank's: {two} and {one}"
        yield Check("wrong", "self-test", words, "report it, with this table")
        return
    words = f"{STEPS} steps on two ranks in this process, {took:.1f} s"
    note = "losses are one rank's" + (f", but for {off:.0e}" if off else "")
    yield Check("ok", "self-test", words, note)


def on_gpu() -> Iterator[Check]:
    """Whether two ranks train on this process's GPU: its kernels are compiled there."""
    import torch

    if not torch.cuda.is_available():
        return  # `machine` has said it
    import dtensor as dt
    from dtensor.commands.selftest import ON_A_GPU, STEPS, difference, losses

    mesh, begin = dt.Mesh(tp=2), time.perf_counter()
    try:
        there = losses("inprocess", mesh, device="cuda")
    except Exception as error:
        yield Check("wrong", "on the GPU", first_line(error), "report it, with this table")
        return
    took, here = time.perf_counter() - begin, losses("inprocess", mesh)
    off = difference(there, here)
    if not off <= ON_A_GPU:
        words = f"losses on the GPU are {off:.1e} off the CPU's: {there} and {here}"
        yield Check("wrong", "on the GPU", words, "report it, with this table")
        return
    words = f"{STEPS} steps on two ranks on the GPU, {took:.1f} s"
    yield Check("ok", "on the GPU", words, f"losses are the CPU's, but for {off:.0e}")


def on_ray() -> Iterator[Check]:
    """Whether Ray can be reached or started, and trains like this process."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        return  # `versions` has said it
    import dtensor as dt
    from dtensor.commands.selftest import STEPS, losses

    address = os.environ.get("RAY_ADDRESS") or None
    where = f"the Ray at {address} (RAY_ADDRESS)" if address else "a Ray of its own"
    here = losses("inprocess", dt.Mesh(tp=2))
    begin = time.perf_counter()
    try:
        there = losses("ray", dt.Mesh(tp=2), address)
    except Exception as error:
        fix = (
            "give RAY_ADDRESS as `ray start --head` prints it, or unset it"
            if address
            else "look in the folder of Ray's logs above, or pip install --upgrade 'dtensor[ray]'"
        )
        yield Check("wrong", "on Ray", f"{where}: {first_line(error)}", fix)
        return
    took = time.perf_counter() - begin
    if there != here:
        words = f"losses on Ray are {there}, in this process {here}"
        yield Check("wrong", "on Ray", words, "report it, with this table")
        return
    words = f"{STEPS} steps on two ranks on {where}, {took:.1f} s"
    yield Check("ok", "on Ray", words, "losses are this process's, to the bit")


# -- the table -------------------------------------------------------------------------------------

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red"}


@dataclass(frozen=True, slots=True)
class _Table:
    """``plain``: print lines as they come, for output that is no terminal."""

    plain: bool

    def line(self, check: Check) -> None:
        text = f"{check.state:<8} {check.name:<13} {check.found:<44} {check.note}"
        print(text.rstrip(), flush=True)

    def show(self, checks: list[Check]) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for check in checks:
            colour = _COLOURS[check.state]
            texts = (check.name, check.found, check.note)
            table.add_row(f"[{colour}]{check.state}[/]", *map(_literal, texts))
        Console().print(table)


def _literal(text: str) -> str:
    """Escape brackets: rich takes words in brackets for styles."""
    from rich.markup import escape

    return escape(text)
