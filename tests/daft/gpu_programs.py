"""The verifier against the mock of NCCL: real engines and transports, a simulated GPU a rank.

    python -m tests.daft.explore --gpus           # exhaustive families, then 300 random programs

`hangs` runs a program whether or not the verifier accepts it: it connects, starts and waits, and at
the end each host waits for its GPU. A kernel that cannot start is a `Deadlock`. What the verifier
refuses as it can hang must hang, whatever the seed, and what it accepts must end under every seed.
Both are so by the rules of NCCL that `dtensor/testing/gpus/nccl.py` names; it has run on no GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import dtensor as dt
from dtensor.daft import Program, ProgramError, verify
from dtensor.daft.ir.host_program import HostProgram, host_programs
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.daft.run.engine import Engine
from dtensor.testing.gpus import SimulatedGpus
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.world import Deadlock
from tests.daft.explore import Made, built, drawn, exhaustive

CUDA = torch.device("cuda", 0)


def hangs(program: Program, seed: int) -> bool:
    size = program.size
    hosts = tuple(range(size))
    lists = [[(r, i) for i in range(len(own.instructions))] for r, own in enumerate(program.ranks)]
    parts = list(host_programs(program, [(rank,) for rank in hosts], lists))
    tags = Communicators().number(program, check_routes(program, hosts), hosts)
    with (
        dt.testing.simulated_gpus(size, seed, early=(0.0, 0.5)[seed % 2]) as gpus,
        ThreadPoolExecutor(size) as threads,
    ):
        for rank in hosts:  # before one of them waits for those that are to come
            gpus.expect(1 + rank)
        asked = [threads.submit(_run, gpus, rank, parts[rank], tags, size) for rank in hosts]
        with gpus.waiting_for_hosts():
            errors = [each.exception() for each in asked]
        for error in errors:
            if error is not None and not isinstance(error, Deadlock):
                raise error
        report = gpus.report()
    assert not report.races and not report.early_frees, report
    return any(error is not None for error in errors)


def _run(gpus: SimulatedGpus, rank: int, part: HostProgram, tags: dict, size: int) -> None:
    host = gpus.host(1 + rank, range(rank, rank + 1))
    with host.expected(), Simulated(), torch.no_grad():
        wire = NcclWire((rank,), CUDA, gpus.fabric.group)
        transport = ExchangeTransport(wire, tuple(range(size)))
        transport.open({key: number for key, number in tags.items() if rank in key[0]})
        engine = Engine(part, {}, transport, CUDA)
        names = part.ranks[rank].inputs
        fed: dict[str, object] = {name: torch.ones(2, device="cuda") for name in names}
        engine.begin({rank: fed})
        for position in range(len(engine.sites)):
            engine.step(position)
        torch.cuda.synchronize()


def disagreement(made: Made, seeds: Sequence[int]) -> str | None:
    program = built(*made)
    try:
        verify(program)
    except ProgramError as error:
        if "can hang" not in str(error):
            return f"refused otherwise: {error}"
        ended = [seed for seed in seeds if not hangs(program, seed)]
        return f"refused, and it ends under seeds {ended}" if ended else None
    hung = [seed for seed in seeds if hangs(program, seed)]
    return f"accepted, and it hangs under seeds {hung}" if hung else None


FAMILIES = ((2, 1, "cd"), (2, 2, "cd"), (3, 2, "c"), (2, 3, "c"))
"""Ranks, transfers, channels."""


def sampled(programs: Iterator[Made], most: int, seed: int) -> list[Made]:
    found = list(programs)
    return found if len(found) <= most else random.Random(seed).sample(found, most)


def report(number_drawn: int, seed: int, most: int = 2_000) -> int:
    wrong = 0
    draw = random.Random(seed)
    families = [(f"{r} ranks, {n} transfers", exhaustive(r, n, c)) for r, n, c in FAMILIES]
    families.append(("random", (drawn(draw) for _ in range(number_drawn))))
    for name, programs in families:
        began, taken = time.monotonic(), sampled(programs, most, seed)
        for number, made in enumerate(taken):
            if (problem := disagreement(made, (number % 20, 20 + number % 21))) is not None:
                wrong += 1
                print(problem, *made, sep="\n  ")
        seconds = time.monotonic() - began
        print(
            f"{name}: {len(taken)} programs, two seeds each, {wrong} disagreements so far "
            f"({seconds:.0f} s)",
            flush=True,
        )
    return int(wrong > 0)
