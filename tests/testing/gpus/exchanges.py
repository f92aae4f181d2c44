"""Exchanges of the real transport between simulated GPUs, with each rank in its own thread.

report = run_ranks(3, seed=0, body=all_exchanges)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, key_of
from dtensor.daft.ray.transports import exchange
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.testing.gpus import SimulatedGpus
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.world import Deadlock

LENGTH = 12
BUFFER = Buffer((3, 4), torch.float32)
FLAT = Buffer((LENGTH,), torch.float32)
BYTES = Buffer((3,), torch.uint8)
Body: TypeAlias = Callable[[int, ExchangeTransport], None]
MakeTransport: TypeAlias = Callable[[int, int, SimulatedGpus], ExchangeTransport]
"""(rank, size, gpus)"""


def starts(rank: int, size: int) -> list[Start]:
    """Return the starts of each rank: an all_reduce in two halves, one in a single exchange of a
    bucket whose floats start at a byte that is no multiple of 4, the other collectives, and a
    message each way."""
    group = tuple(range(size))
    right, left = (rank + 1) % size, (rank - 1) % size
    bucket, all_of, names = (BYTES, BUFFER), (BUFFER,) * size, tuple("uvw"[:size])
    uneven = tuple(Buffer((rank + other + 1,), torch.float32) for other in group)
    root = (("a",), (BUFFER,)) if rank == 0 else ((), ())
    narrow = (Buffer(BUFFER.shape, torch.bfloat16),)
    return [
        Collective("all_reduce", group, ("a",), ("b",), (BUFFER,), (BUFFER,), "sum", "large"),
        Collective("all_gather", group, ("a",), ("e",) * size, (BUFFER,), all_of, None, "g"),
        Send("a", right, "ring", FLAT),
        Recv("d", left, "ring", FLAT),
        Collective("reduce_scatter", group, names, ("s",), (FLAT,) * size, (FLAT,), "sum", "r"),
        Collective("all_to_all", group, names, names, uneven, uneven, None, "t"),
        Collective("broadcast", group, root[0], ("o",), root[1], (BUFFER,), None, "o"),
        Collective("all_reduce", group, ("a",), ("b",), narrow, narrow, "sum", "narrow"),
        Collective("reduce_scatter", group, names, ("s",), narrow * size, narrow, "sum", "few"),
        Collective("all_reduce", group[:2], ("a", "i"), ("c", "j"), bucket, bucket, "sum", "small"),
    ]


def keys(size: int) -> dict[Key, int]:
    found = {key_of(rank, each) for rank in range(size) for each in _own(rank, size)}
    return {key: 3 * number + 2 for number, key in enumerate(sorted(found))}


def _own(rank: int, size: int) -> list[Start]:
    return starts(rank, size)[: None if rank < 2 else -1]


def all_exchanges(rank: int, transport: ExchangeTransport, size: int = 3, steps: int = 3) -> None:
    """Run exchanges in which values are made right before the send, dropped or changed during or
    after it, and their memory reused; results are used at once and dropped."""
    begins = [transport.begin(rank, each) for each in _own(rank, size)]
    left = (rank - 1) % size
    on_host = torch.arange(float(LENGTH)).reshape(4, 3).mT  # not contiguous
    ones = torch.ones(BUFFER.shape, device="cuda")
    if rank == 1:  # its host waits for rank 0, whose host has started the all_reduce
        check(begins[3](()).wait()[0] * 1.0, torch.ones(LENGTH))
    total = begins[0]((ones,))
    first = begins[2]((ones.reshape(-1),)) if rank == 0 else None
    check(total.wait()[0], torch.full(BUFFER.shape, float(size)))
    if first is not None:
        first.wait()
    for step in range(steps):
        base = torch.arange(float(LENGTH), device="cuda").reshape(4, 3).mT
        going = [begins[0]((base * (rank + 1 + step),))]
        mine = base + rank
        going.append(begins[1]((mine,)))
        spread = torch.arange(2.0 * LENGTH, device="cuda")[::2] * 5
        sent = begins[2](((spread + rank).repeat_interleave(2)[::2],))
        del base, spread
        filler = [torch.full((LENGTH,), -5.0, device="cuda") for _ in range(4)]
        going.append(begins[3](()))
        blocks = (torch.arange(size * LENGTH, device="cuda") * (rank + 1.0)).chunk(size)
        going.append(begins[4](blocks if step else [each * 1.0 for each in blocks]))
        del blocks
        sizes = [rank + other + 1 for other in range(size)]
        numbers = [rank * size + other + 0.0 for other in range(size)]
        going.append(
            begins[5]([torch.full((2 * n,), x, device="cuda")[::2] for n, x in zip(sizes, numbers)])
        )
        going.append(begins[6]([mine * 3] if rank == 0 else []))
        going.append(begins[7](((mine - rank).bfloat16(),)))
        going.append(begins[8]([(mine - rank).bfloat16()] * size))
        if rank < 2:
            few = torch.full((3,), rank + 1, dtype=torch.uint8, device="cuda")
            going.append(begins[9]((few, (mine - rank) + rank)))
            del few
        wanted = [on_host * sum(r + 1 + step for r in range(size))]
        wanted += [on_host + r for r in range(size)]
        wanted += [torch.arange(float(LENGTH)) * 10 + left]
        folded = torch.arange(size * LENGTH) * sum(r + 1.0 for r in range(size))
        wanted += [folded.chunk(size)[rank]]
        wanted += [torch.full((rank + r + 1,), r * size + rank + 0.0) for r in range(size)]
        wanted += [on_host * 3, *[(on_host * size).bfloat16()] * 2]
        wanted += [torch.full((3,), 3.0), on_host * 2 + 1] if rank < 2 else []
        results: list[Tensor] = []
        while going:
            came = list(going.pop(0).wait())
            if len(came) == size:
                mine.add_(100.0)  # the gathered copy does not change
            while came:
                results.append(came.pop(0) * 1.0)
        sent.wait()
        more = [torch.full((LENGTH,), -7.0, device="cuda") for _ in range(4)]
        for value, right in zip(results, wanted, strict=True):
            check(value, right)
        for value in (*filler, *more):
            check(value, value.new_full((LENGTH,), float(value[0])).cpu())


def check(value: Tensor, right: Tensor) -> None:
    is_right = value.dtype == right.dtype and torch.equal(value.cpu(), right)
    assert is_right, f"{value.tolist()} where {right.tolist()} is right"


def run_ranks(
    size: int,
    seed: int,
    body: Body,
    *,
    early: float = 0.0,
    num_queues: int = 32,
    make: MakeTransport | None = None,
) -> dt.testing.GpuReport:
    """Run `body` on every rank and return the report. Raises the first error of a rank."""
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(exchange, "SMALL_ALL_REDUCE", 0)
        )  # with 3 members every all_reduce counts as large
        given = dt.testing.simulated_gpus(size, seed, early=early, num_queues=num_queues)
        gpus = stack.enter_context(given)
        threads = stack.enter_context(ThreadPoolExecutor(size))
        given_make = make or transport_of
        for rank in range(size):
            gpus.expect(1 + rank)
        asked = [threads.submit(_rank, gpus, rank, size, body, given_make) for rank in range(size)]
        with gpus.waiting_for_hosts():
            errors = [each.exception() for each in asked]
        raised = [error for error in errors if error is not None]
        for error in sorted(raised, key=lambda error: isinstance(error, Deadlock)):
            raise error  # the other ranks would wait for the failed one
        return gpus.report()


def transport_of(
    rank: int,
    size: int,
    gpus: SimulatedGpus,
    *,
    is_native: bool = True,
    wire: Any = NcclWire,
    transport: Any = ExchangeTransport,
) -> ExchangeTransport:
    """Return the transport of a rank. ``is_native``: use collectives of NCCL, not exchanges."""
    own = wire((rank,), torch.device("cuda", 0), gpus.fabric.group)
    if not is_native:
        own.begin = lambda *_: None
    return transport(own, tuple(range(size)))


def _rank(gpus: SimulatedGpus, rank: int, size: int, body: Body, make: MakeTransport) -> None:
    transport = make(rank, size, gpus)
    with gpus.host(1 + rank, range(rank, rank + 1)).expected(), Simulated(), torch.no_grad():
        transport.open({key: n for key, n in keys(size).items() if rank in key[0]})
        body(rank, transport)
