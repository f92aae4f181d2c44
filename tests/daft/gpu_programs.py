"""Compares the verifier with the mock of NCCL: real engines and transports, one simulated GPU
per rank.

    python -m tests.daft.explore --gpus           # exhaustive families, then 300 random programs
    python -m tests.daft.gpu_programs --seeds 200 # the messages of training steps, every schedule

`hangs` runs a program even if the verifier refuses it; a kernel that cannot start raises
`Deadlock`. A refused program must hang under every seed, and an accepted one must end under
every seed. The rules of NCCL are those of `dtensor/testing/gpus/nccl.py`. `of_messages` keeps
all instructions of a training step and replaces its calls: a random half return at once, the
others first wait on the host for the GPU.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import torch

import dtensor as dt
from dtensor.daft import Buffer, Call, Collective, Program, ProgramError, Send, verify
from dtensor.daft.cluster.cluster import HostedCluster
from dtensor.daft.ir.host_program import HostProgram, host_programs
from dtensor.daft.ir.program import Function, RankProgram
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.daft.run.engine import Engine
from dtensor.testing.gpus import SimulatedGpus
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.world import Deadlock
from tests.api import test_schedules as chains
from tests.daft.explore import Made, built, drawn, exhaustive

CUDA = torch.device("cuda", 0)
FLAT = Buffer((2,), torch.float32)


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
        for rank in hosts:  # all must connect before one of them waits for the others
            gpus.expect(1 + rank)
        asked = [threads.submit(_run, gpus, rank, parts[rank], tags, size) for rank in hosts]
        with gpus.waiting_for_hosts():
            errors = [each.exception() for each in asked]
        for error in errors:
            if error is not None and not _is_deadlock(error):
                raise error
        report = gpus.report()
    assert not report.races and not report.early_frees, report
    return any(error is not None for error in errors)


def _is_deadlock(error: BaseException) -> bool:
    """Whether the error is a Deadlock, also if the engine has wrapped it with the instruction."""
    return isinstance(error, Deadlock) or isinstance(error.__cause__, Deadlock)


def _run(gpus: SimulatedGpus, rank: int, part: HostProgram, tags: dict, size: int) -> None:
    host = gpus.host(1 + rank, range(rank, rank + 1))
    with host.expected(), Simulated(), torch.no_grad():
        wire = NcclWire((rank,), CUDA, gpus.fabric.group)
        transport = ExchangeTransport(wire, tuple(range(size)))
        transport.open({key: number for key, number in tags.items() if rank in key[0]})
        own = part.ranks[rank]
        buffers = _sent(own)
        state = {(rank, name): _made(buffers.get(name, FLAT)) for name in own.state}
        engine = Engine(part, state, transport, CUDA)
        fed: dict[str, object] = {name: _made(buffers.get(name, FLAT)) for name in own.inputs}
        engine.begin({rank: fed})
        for position in range(len(engine.sites)):
            engine.step(position)
        torch.cuda.synchronize()


def _made(buffer: Buffer) -> torch.Tensor:
    return torch.ones(buffer.shape, dtype=buffer.dtype, device="cuda")


def _sent(own: RankProgram) -> dict[str, Buffer]:
    """Return, by name, the values that a rank sends to others."""
    found: dict[str, Buffer] = {}
    for instruction in own.instructions:
        if isinstance(instruction, Send):
            found[instruction.value] = instruction.buffer
        elif isinstance(instruction, Collective):
            found.update(zip(instruction.inputs, instruction.in_buffers, strict=True))
    return found


def training_step(make: Callable[[int], dt.Schedule], v: int, p: int) -> Program:
    """Return the program that the first step over p ranks with v stages each loads."""
    loaded: list[Program] = []
    plain = HostedCluster.load

    def load(cluster: HostedCluster, program: Program) -> object:
        loaded.append(program)
        return plain(cluster, program)

    mesh = dt.Mesh(pp=p)
    with patch.object(HostedCluster, "load", load), dt.launch(mesh):
        float(chains.step_of(p * v, mesh, make(2 * p))(*chains.data(8 * p)))
    return max(loaded, key=lambda program: len(program.ranks[0].instructions))


def of_messages(program: Program, seed: int) -> Program:
    draw, functions, ranks = random.Random(seed), dict[str, Function](), list[RankProgram]()
    for rank, own in enumerate(program.ranks):
        buffers, items = _sent(own), list(own.instructions)
        for i, item in enumerate(items):
            if isinstance(item, Call):
                name = f"rank {rank}, {i}"
                shapes = tuple(buffers.get(output, FLAT) for output in item.outputs)
                fn = functools.partial(_call, shapes, draw.random() < 0.5)
                functions[name] = Function.of(fn, name)
                items[i] = replace(item, fn=name)
        ranks.append(replace(own, instructions=tuple(items), shares=()))
    return replace(program, ranks=tuple(ranks), functions=tuple(functions.items()))


def _call(buffers: Sequence[Buffer], waits: bool, *_: object) -> tuple[torch.Tensor, ...]:
    if waits:
        torch.cuda.current_stream().synchronize()
    return tuple(_made(buffer) for buffer in buffers)


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


def schedules(sizes: Sequence[int]) -> Iterator[tuple[str, Program]]:
    for make, v in chains.SCHEDULES:
        for p in sizes:
            name = getattr(make, "__name__", "").replace("<lambda>", "Searched")
            yield f"{name}, p={p}", training_step(make, v, p)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    seeds, wrong = parser.parse_args(given).seeds, 0
    for name, program in schedules((2, 3, 4)):
        began = time.monotonic()
        verify(program)
        hung = [seed for seed in range(seeds) if hangs(of_messages(program, seed), seed)]
        wrong += len(hung)
        seconds = time.monotonic() - began
        print(
            f"{name:<24} {seeds} seeds, hangs under {hung or 'none'} ({seconds:.0f} s)", flush=True
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
