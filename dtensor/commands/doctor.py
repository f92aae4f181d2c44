"""`dtensor doctor`: checks whether dtensor can run on this machine, with a fix for each problem.

    $ dtensor doctor
    ok       python        3.11.7                        supported: >=3.11
    ok       torch         2.13.0+cpu                    supported: >=2.11,<2.14
    warning  triton        not installed                 pip install 'dtensor[kernels]': ...
    ...

Each check prints a line: ok; warning, if dtensor runs with a drawback; or wrong. The supported
versions are from the metadata of the package. Exit status 1 if a line is wrong. A Ray cluster that
the command joined keeps running.
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
from dataclasses import asdict
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
"""For each optional package, its pip requirement and its use."""
MIN_MEMORY = 2 * 2**30
MIN_SHARED_MEMORY = 256 * 2**20
"""Less free bytes than these are a warning."""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "doctor",
        "checks whether dtensor can run here: versions, cores, GPUs, Ray, ports, a self-test",
        "Checks installed packages and the machine, and trains a tiny model for three steps on "
        "two ranks, in this process, on its GPU and on Ray. Each line that is not ok has a fix.",
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
    add_json(parser, "print a JSON list with an object for each line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    checks: list[Check] = []
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
    show_at_end = sys.stdout.isatty() and not options.json  # a progress line is shown until then
    with ProgressLine() as progress:
        for title, part in parts:
            with progress.doing(title):
                for check in part():
                    checks.append(check)
                    if not show_at_end and not options.json:
                        _print_line(check)
    if options.json:
        from dtensor.commands.json_data import print_json

        print_json([asdict(check) for check in checks])
    elif show_at_end:
        _print_table(checks)
    num_wrong = sum(check.state == "wrong" for check in checks)
    num_warnings = sum(check.state == "warning" for check in checks)
    if not options.json:
        text = "Nothing is wrong" if not num_wrong else f"{num_wrong} wrong"
        print(f"\n{text}{f', {num_warnings} warnings' if num_warnings else ''}.")
    return int(num_wrong > 0)


# -- installed packages ----------------------------------------------------------------------------


def versions() -> Iterator[Check]:
    """Check the versions of Python and of required and optional packages."""
    try:
        package: Any = metadata.metadata("dtensor")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        fix = "pip install -e . in the checkout"
        yield Check("warning", "dtensor", "not installed: no versions to compare with", fix)
        return
    bounds = package["Requires-Python"] or ""
    python = ".".join(map(str, sys.version_info[:3]))
    state: State = "ok" if within(python, bounds) else "wrong"
    yield Check(state, "python", python, f"supported: {bounds}")
    for name, bounds in requirements().items():
        extra = EXTRAS.get(name)
        state_if_bad: State = "warning" if extra else "wrong"
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            use = f"{extra[1]}: " if extra else ""
            pip = f"pip install '{extra[0] if extra else name + bounds}'"
            yield Check(state_if_bad, name, "not installed", use + pip)
            continue
        if within(installed, bounds):
            yield Check("ok", name, installed, f"supported: {bounds}")
        else:
            fix = f"supported: {bounds}; pip install '{name}{bounds}'"
            yield Check(state_if_bad, name, installed, fix)


def requirements() -> dict[str, str]:
    """Return the version bounds of the required packages and of `EXTRAS`, from the package's
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
    """Return whether a version, as 2.13.0+cpu, is within bounds, as ``>=2.11,<2.14``. Only the
    numbers are compared."""
    numbers = _numbers(version)
    for bound in filter(None, bounds.split(",")):
        parts = re.fullmatch(r"\s*(>=|<=|<|>|==|~=|!=)\s*([\d.]+)\S*\s*", bound)
        if parts is None:
            continue
        other = _numbers(parts[2])
        size = max(len(numbers), len(other))
        a, b = (n + (0,) * (size - len(n)) for n in (numbers, other))
        holds = {">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b, "==": a == b, "!=": a != b}
        if not holds.get(parts[1], True):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


# -- the machine ---------------------------------------------------------------------------------


def machine() -> Iterator[Check]:
    """Check the cores, memory, GPUs, shared memory, folder and ports of this machine."""
    from dtensor.sharding.plan.text.words import size_text

    yield _cores()
    free = _available_memory()
    if free is not None:
        note = "a rank on Ray takes 200 MiB besides its tensors"
        yield Check("ok" if free >= MIN_MEMORY else "warning", "memory", size_text(free), note)
    yield from _gpus()
    yield _shared_memory(size_text)
    yield _user_folder()
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
    if free < MIN_SHARED_MEMORY:
        fix = "make room there, or start the container with --shm-size=2g"
        return Check("warning", "/dev/shm", f"{size_text(free)} free", fix)
    return Check("ok", "/dev/shm", f"{size_text(free)} free", "tensors between ranks of a host")


def _user_folder() -> Check:
    """Check the folder in TMPDIR that launches on Ray use."""
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
        problem, _, fix = str(error).partition("\n  Fix: ")
        return Check("wrong", "folder", problem, fix)
    return Check("ok", "folder", str(folder), "this user's alone")


def _ports() -> Check:
    """Check whether a process can listen on loopback and be reached there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    except OSError as error:
        fix = "let processes of this machine connect to 127.0.0.1: a firewall or a sandbox forbids"
        return Check("wrong", "ports", f"loopback: {error}", fix)
    return Check("ok", "ports", "loopback can be bound and reached", "")


# -- self-tests ------------------------------------------------------------------------------------


def in_process() -> Iterator[Check]:
    """Check that two ranks in this process train like one rank."""
    import dtensor as dt
    from dtensor.commands.selftest import STEPS, TOLERANCE, difference, losses

    begin = time.perf_counter()
    try:
        one_rank, two_ranks = losses("inprocess", dt.Mesh()), losses("inprocess", dt.Mesh(tp=2))
    except Exception as error:
        yield Check("wrong", "self-test", first_line(error), "report it, with this table")
        return
    off, seconds = difference(two_ranks, one_rank), time.perf_counter() - begin
    if off > TOLERANCE:
        found = f"losses of two ranks are {off:.1e} off one rank's: {two_ranks} and {one_rank}"
        yield Check("wrong", "self-test", found, "report it, with this table")
        return
    found = f"{STEPS} steps on two ranks in this process, {seconds:.1f} s"
    note = "losses are one rank's" + (f", but for {off:.0e}" if off else "")
    yield Check("ok", "self-test", found, note)


def on_gpu() -> Iterator[Check]:
    """Check that two ranks on the GPU of this process train like on the CPU; this compiles the
    kernels."""
    import torch

    if not torch.cuda.is_available():
        return  # `machine` reports it
    import dtensor as dt
    from dtensor.commands.selftest import GPU_TOLERANCE, STEPS, difference, losses

    mesh, begin = dt.Mesh(tp=2), time.perf_counter()
    try:
        gpu_losses = losses("inprocess", mesh, device="cuda")
    except Exception as error:
        yield Check("wrong", "on the GPU", first_line(error), "report it, with this table")
        return
    seconds, cpu_losses = time.perf_counter() - begin, losses("inprocess", mesh)
    off = difference(gpu_losses, cpu_losses)
    if not off <= GPU_TOLERANCE:
        found = f"losses on the GPU are {off:.1e} off the CPU's: {gpu_losses} and {cpu_losses}"
        yield Check("wrong", "on the GPU", found, "report it, with this table")
        return
    found = f"{STEPS} steps on two ranks on the GPU, {seconds:.1f} s"
    yield Check("ok", "on the GPU", found, f"losses are the CPU's, but for {off:.0e}")


def on_ray() -> Iterator[Check]:
    """Check that Ray can be joined or started, and that it gives the losses of this process."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        return  # `versions` reports it
    import dtensor as dt
    from dtensor.commands.selftest import STEPS, losses

    address = os.environ.get("RAY_ADDRESS") or None
    cluster = f"the Ray at {address} (RAY_ADDRESS)" if address else "a Ray of its own"
    local_losses = losses("inprocess", dt.Mesh(tp=2))
    begin = time.perf_counter()
    try:
        ray_losses = losses("ray", dt.Mesh(tp=2), address)
    except Exception as error:
        fix = (
            "give RAY_ADDRESS as `ray start --head` prints it, or unset it"
            if address
            else "look in the folder of Ray's logs above, or pip install --upgrade 'dtensor[ray]'"
        )
        yield Check("wrong", "on Ray", f"{cluster}: {first_line(error)}", fix)
        return
    seconds = time.perf_counter() - begin
    if ray_losses != local_losses:
        found = f"losses on Ray are {ray_losses}, in this process {local_losses}"
        yield Check("wrong", "on Ray", found, "report it, with this table")
        return
    found = f"{STEPS} steps on two ranks on {cluster}, {seconds:.1f} s"
    yield Check("ok", "on Ray", found, "losses are this process's, to the bit")


# -- the table -------------------------------------------------------------------------------------

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red"}


def _print_line(check: Check) -> None:
    """Print a line before the other checks are known, so with fixed column widths."""
    text = f"{check.state:<8} {check.name:<13} {check.found:<44} {check.note}"
    print(text.rstrip(), flush=True)


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape  # rich would read words in brackets as styles
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for check in checks:
        colour = _COLOURS[check.state]
        texts = (check.name, check.found, check.note)
        table.add_row(f"[{colour}]{check.state}[/]", *map(escape, texts))
    Console().print(table)
