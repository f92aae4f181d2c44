"""Runs all checks and measurements that need a GPU (`make gpu`), part by part, correctness
first.

    python -m tests.gpu --list                       # the parts, in order, with their limits
    python -m tests.gpu --part 3 speed_small         # some, by number or name
    python -m tests.gpu --simulated 2                # the same on simulated GPUs, with small sizes

Each part (parts.py) runs in its own process group, which is killed at the part's time limit, and
writes a table and a log: build/gpu/03_memcheck.md and .log, or in the folder of `--to`. Nothing
is installed: a missing tool is "not installed" in the table. Copy tables worth keeping to
benchmarks/results, never those of simulated GPUs. Exit status 1 if a part fails, 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, Part
from tests.gpu.tables import Line, Where, read_lines

ROOT = Path(__file__).resolve().parents[2]
MARK = "DTENSOR_GPU_PART"
"""In the environment of all processes that descend from a part's, Ray's too."""
LEAVES_S = 5.0
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts at the head of each table."""

    facts: Mapping[str, Any]
    command: str
    simulated: int


@dataclass(slots=True)
class Outcome:
    part: Part
    seconds: float
    ended: str
    lines: list[Line] = field(default_factory=list[Line])

    @property
    def failed(self) -> bool:
        """Whether the part failed; a part that reports nothing has failed."""
        return bool(self.ended) or not self.lines or self.wrong != []

    @property
    def wrong(self) -> list[Line]:
        return [line for line in self.lines if line.state == "wrong"]

    def text(self) -> str:
        first = [self.ended] if self.ended else [] if self.lines else ["it said nothing"]
        said = "; ".join([*first, *(f"{line.name}: {line.found}" for line in self.wrong)])
        passed = sum(line.state == "ok" for line in self.lines)
        out = sum(line.state == "left out" for line in self.lines)
        counts = f"{passed} ok" + f", {out} left out" * bool(out)
        return f"FAILED: {said} ({counts})" if self.failed else counts


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--part", nargs="+", default=[], help="numbers or names; default: all")
    parser.add_argument("--list", action="store_true", help="the parts and their limits")
    parser.add_argument("--simulated", type=int, default=0, metavar="GPUS")
    parser.add_argument("--to", type=Path, help="the folder of the tables")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = [part.name for part in parts]
    if options.inside:
        return inside(options.inside, Where(options.to, options.simulated))
    if options.list:
        for number, part in enumerate(parts, 1):
            print(f"{number:>2}  {part.name:<14} {part.limit_s:>3} s  {part.title}")
        return 0
    wanted = options.part or names
    if unknown := [
        w for w in wanted if w not in names and w not in map(str, range(1, 1 + len(parts)))
    ]:
        parser.error(f"no part {unknown[0]!r}: {', '.join(names)}, or 1 to {len(parts)}")
    folder = options.to or ROOT / "build" / ("gpu_simulated" if options.simulated else "gpu")
    facts = facts_here()
    if not options.simulated and not facts["gpus"]:
        print("torch sees no GPU here; --simulated 2 needs none.", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    machine = Machine(
        facts=facts, command=f"python -m tests.gpu {shown}".strip(), simulated=options.simulated
    )
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, 1):
        if {part.name, str(number)} & set(wanted):
            print(f"{number:>2}  {part.name:<14} ", end="", flush=True)
            outcomes.append(run(number, part, folder, machine))
            print(f"{outcomes[-1].seconds:>4.0f} s  {outcomes[-1].text()}", flush=True)
    print(f"tables: {folder}")
    return int(any(outcome.failed for outcome in outcomes))


# -- a part, from outside --------------------------------------------------------------------------


def run(number: int, part: Part, folder: Path, machine: Machine) -> Outcome:
    """Run the part in its own process group, until it ends or exceeds its limit."""
    stem = f"{number:02}_{part.name}"
    table, log = folder / f"{stem}.md", folder / f"{stem}.log"
    private = folder / f"{stem}.tmp"
    private.mkdir(exist_ok=True)
    (private / "lines").write_text("")
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.gpu", "--inside", part.function, "--to", str(private)]
    if machine.simulated:
        command += ["--simulated", str(machine.simulated)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, MARK: mark, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        ended = ""
        try:
            status = process.wait(part.limit_s)
            if status:
                why = signal.Signals(-status).name if status < 0 else f"status {status}"
                ended = f"the process of this part ended with {why}"
        except subprocess.TimeoutExpired:
            ended = f"over its limit of {part.limit_s:g} s, and ended"
        finally:
            end_group(process)
            end_marked(mark)
    outcome = Outcome(part, time.monotonic() - began, ended)
    texts: list[str] = []
    for item in read_lines(private / "lines"):
        if isinstance(item, Line):
            outcome.lines.append(item)
        else:
            texts.append(item)
    if ended:
        last = outcome.lines[-1].name if outcome.lines else "its start"
        outcome.ended = f"{ended}; after {last}"
    table.write_text(table_of(number, outcome, texts, machine, log.name))
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and all processes in its group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVES_S)
    process.wait()


def end_marked(mark: str) -> None:
    """End processes that left the group: Ray's processes, which stay for the next launch and
    hold GPUs."""
    sought = f"{MARK}={mark}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if sought in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGKILL)


FACTS = """
import json, platform, torch
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
there = torch.cuda.is_available()
print(json.dumps({
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * there)],
    "cuda": torch.version.cuda or "none",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else "none",
    "torch": torch.__version__, "triton": of("triton"), "ray": of("ray"),
    "python": platform.python_version(), "machine": platform.node(),
}))
"""


def facts_here() -> dict[str, Any]:
    """Return facts of the machine, from another process, so that this one holds no GPU memory."""
    done = subprocess.run([sys.executable, "-c", FACTS], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("torch cannot be imported: see above")
    return {**json.loads(done.stdout.splitlines()[-1]), "driver": first_of(DRIVER)}


DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def first_of(command: Sequence[str]) -> str:
    """Return the first line that the command prints."""
    with suppress(OSError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.splitlines()[0] if done.returncode == 0 else "none"
    return "none"


def table_of(
    number: int, outcome: Outcome, texts: Sequence[str], machine: Machine, log: str
) -> str:
    facts = machine.facts
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    if machine.simulated:
        gpus = f"**{machine.simulated} simulated GPUs: no figure here says anything of a GPU**"
    commit = first_of(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    now, part = f"{datetime.now(UTC):%Y-%m-%d %H:%M}", outcome.part
    lines = [
        f"# {number}. {part.title}",
        "",
        f"`{machine.command}`",
        "",
        f"{facts['machine']}: {gpus}. Driver {facts['driver']}, CUDA {facts['cuda']}, NCCL "
        f"{facts['nccl']}, torch {facts['torch']}, Triton {facts['triton']}, Ray {facts['ray']}, "
        f"Python {facts['python']}. {now} UTC, commit {commit}.",
        "",
        f"{outcome.seconds:.0f} s of {part.limit_s:g}. {outcome.text()}",
        "",
    ]
    if outcome.lines:
        lines += ["| | what | found | beside |", "|---|---|---|---|"]
        for line in outcome.lines:
            cells = (line.state, line.name, line.found, line.note)
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        lines.append("")
    if texts:
        lines += [*texts, ""]
    if outcome.failed:
        lines += [f"All that it printed: {log}", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


# -- a part, inside its process --------------------------------------------------------------------


def inside(function: str, where: Where) -> int:
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(where)
    except Exception as error:
        traceback.print_exc()
        where.say(Line.of_error("this part", error))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part's group then ends too
    sys.exit(main())
