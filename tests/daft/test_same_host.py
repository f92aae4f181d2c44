"""Tests shared memory between processes of one host: the same bits as gloo, and nothing left
behind.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    CommunicationError,
    Instruction,
    Program,
    Recv,
    Send,
    Wait,
    launch_cluster,
)
from dtensor.daft.ray.transports import same_host, slots
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.same_host import SameHostTransport
from dtensor.daft.ray.transports.segments import SLICE_S, Segment
from dtensor.daft.ray.transports.shared_memory_peers import own_place
from tests.daft.actors_here import Here, Hosted, actors, each
from tests.daft.explore import drawn
from tests.daft.programs import Collectives, function, pipeline, program, same_bits, values
from tests.daft.slots import accepted

B = Buffer((2,), torch.float32)


def _sum(
    number: int, channel: str = "c", group: Sequence[int] = (0, 1), buffer: Buffer = B
) -> Collective:
    bs = (buffer,)
    return Collective(
        "all_reduce", tuple(group), (f"x{number}",), (f"y{number}",), bs, bs, "sum", channel
    )


def _sums(size: int = 2, buffer: Buffer = B, count: int = 1) -> Program:
    """Return a program in which all ranks sum their inputs, one after the other."""
    own: list[Instruction] = []
    for n in range(count):
        own += [_sum(n, group=range(size), buffer=buffer), Wait((f"y{n}",))]
    made = tuple(f"y{n}" for n in range(count))
    given = tuple(f"x{n}" for n in range(count))
    return program(*[own] * size, inputs=[given] * size, outputs=[made] * size)


# -- values ----------------------------------------------------------------------------------------


def _collectives(here: Here, size: int, large: int) -> str:
    case = Collectives(size, large=large)
    with launch_cluster(size) as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    shared = here.join()
    assert isinstance(shared, SameHostTransport)
    for hosted in (Hosted(here, shared), Hosted(here, here.gloo())):
        handle = hosted.load(case.program())
        for _ in range(5):
            for rank, named in hosted.run(handle, case.fed).items():
                assert named.keys() == expected[rank].keys()
                for name, value in named.items():
                    assert same_bits(value, expected[rank][name]), (rank, name)
        hosted.worker.close()
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "large"), [(3, 40_000), (4, 400_000)])
def test_shared_memory_collectives_are_bitwise_equal_to_gloo_and_inprocess(
    size: int, large: int
) -> None:
    assert each(size, _collectives, size, large) == ["right"] * size


def _random_programs(here: Here, seed: int, number: int) -> int:
    """Run accepted random programs in random orders of runs, ranks out of step, and compare with
    one process."""
    slots.TOGETHER_BYTES, slots.PIECE_BYTES = 0, 4  # fold every sum of three ranks in two pieces
    size, draw = len(here.hosts), random.Random(seed)
    hosted = Hosted(here, here.join())
    own = random.Random(here.index)
    with launch_cluster(size) as local:
        for _ in range(number):
            family = accepted(
                made for made in iter(lambda: drawn(draw), None) if len(made[1]) == size
            )
            found = list(islice(family, 2))
            loaded = [(hosted.load(made), local.load(made), made) for made in found]
            for run in range(6):
                handle, beside, made = draw.choice(loaded)
                fed = [
                    {name: values(rank, 2, seed=8 * run + i) for i, name in enumerate(rank_inputs)}
                    for rank, rank_inputs in enumerate(each.inputs for each in made.ranks)
                ]
                expected = local.run(beside, fed).get()[here.index]
                time.sleep(own.choice((0.0, 0.0, 0.002)))
                given = hosted.run(handle, fed)[here.index]
                assert given.keys() == expected.keys()
                assert all(same_bits(given[name], expected[name]) for name in given), made.text()
            for handle, beside, _ in loaded:
                hosted.worker.unload(handle)
                local.unload(beside)
    hosted.worker.close()
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("size", "number"), [(2, 60), (3, 60), (4, 40)])
def test_random_accepted_programs_run_over_shared_memory(size: int, number: int) -> None:
    assert each(size, _random_programs, 5, number) == [number] * size


def _variable(here: Here) -> list[int]:
    message = Buffer((), torch.uint8, variable=True)
    send = [Send("m", 1, "c", message), _sum(0), Wait(("m",)), Wait(("y0",))]
    receive = [_sum(0), Recv("m", 0, "c", message), Wait(("y0",)), Wait(("m",))]
    made = program(send, receive, inputs=[("m", "x0"), ("x0",)], outputs=[("y0",), ("y0", "m")])
    made = replace(made, ranks=(replace(made.ranks[0], outputs=("y0", "m")), made.ranks[1]))
    hosted = Hosted(here, here.join())
    handle = hosted.load(made)
    lengths = []
    for length in (0, 5, 100_000):
        fed = {"x0": torch.ones(2), "m": torch.ones(length, dtype=torch.uint8)}
        found = hosted.run(handle, [fed, {"x0": torch.ones(2)}])[here.index]
        assert found["y0"].tolist() == [2.0, 2.0]
        lengths.append(int(found["m"].sum()))
    hosted.worker.close()
    return lengths


def test_values_of_unknown_length_are_sent_as_messages() -> None:
    assert each(2, _variable) == [[0, 5, 100_000]] * 2


def test_routes_contain_only_transfers_between_hosts() -> None:
    assert check_routes(pipeline(4), (0, 0, 1, 1)) == [((1, 2), "fwd", "transfer")]


# -- who shares ------------------------------------------------------------------------------------


def _places(here: Here, nodes: Sequence[str]) -> tuple[str, list[int]]:
    """Sum over all ranks, over the first two, and over the last two."""
    transport = here.join(nodes[here.index])
    hosted = Hosted(here, transport)
    groups = ((0, 1, 2), (0, 1), (1, 2))
    lists: list[list[Instruction]] = [[], [], []]
    for number, group in enumerate(groups):
        for rank in group:
            lists[rank] += [_sum(number, group=group), Wait((f"y{number}",))]
    given = [tuple(f"x{n}" for n, g in enumerate(groups) if r in g) for r in range(3)]
    wanted = [tuple(f"y{n}" for n, g in enumerate(groups) if r in g) for r in range(3)]
    made = program(*lists, inputs=given, outputs=wanted)
    handle = hosted.load(made)
    fed = [{name: torch.full((2,), 10.0**r) for name in given[r]} for r in range(3)]
    for _ in range(3):
        found = hosted.run(handle, fed)[here.index]
    hosted.worker.close()
    return type(transport).__name__, [int(found[name][0]) for name in wanted[here.index]]


def test_key_uses_shared_memory_only_if_all_members_share_host() -> None:
    sums = [[111, 11], [111, 11, 110], [111, 110]]
    shared, other = SameHostTransport.__name__, ExchangeTransport.__name__
    assert each(3, _places, ("a", "a", "b")) == list(zip([shared, shared, other], sums))
    assert each(3, _places, ("a", "b", "c")) == list(zip([other] * 3, sums))


def _one_cannot_open(here: Here) -> str:
    if here.index == 1:
        Segment.open = staticmethod(lambda card: None)  # type: ignore[method-assign]
    return _places(here, "aaa")[0]


def test_host_falls_back_to_messages_if_one_process_cannot_open_memory() -> None:
    assert each(3, _one_cannot_open) == [ExchangeTransport.__name__] * 3


def test_segment_open_refuses_other_or_closed_segment() -> None:
    own = Segment.create(own_place("here"))
    there = Segment.open(own.segment_address)
    assert there is not None and not there.ended
    window, same = own.map(1 << 40, 4096), there.map(1 << 40, 4096)
    window.bytes[7] = 3
    assert same.bytes[7] == 3
    there.close()
    assert Segment.open(replace(own.segment_address, nonce="0" * 32)) is None
    with open("/dev/null") as other:
        assert Segment.open(replace(own.segment_address, descriptor=other.fileno())) is None
    own.close()
    assert Segment.open(own.segment_address) is None


def _another_program(here: Here) -> str:
    """Load a different program under one number on each of two actors."""
    hosted = Hosted(here, here.join())
    handle = hosted.load(_sums(buffer=Buffer((2 + 99 * here.index,), torch.float32)))
    with pytest.raises(CommunicationError, match="not loaded the same program under number 1"):
        hosted.run(handle, [{"x0": torch.ones(2 + 99 * here.index)}] * 2)
    return "refused"


def test_actors_with_different_programs_refuse_to_connect() -> None:
    assert each(2, _another_program) == ["refused"] * 2


# -- failures --------------------------------------------------------------------------------------


def _waits(here: Here, pipe: Connection) -> None:
    """Rank 0 runs and reports when and how it failed; rank 1 joins when it is told to."""
    hosted = Hosted(here, here.join())
    handle = hosted.load(_sums())
    fed = [{"x0": torch.ones(2)}] * 2
    hosted.run(handle, fed)
    pipe.send(os.getpid())
    if here.index == 1 and pipe.recv() == "close":
        hosted.worker.close()
        pipe.recv()
    try:
        found: object = hosted.run(handle, fed)[here.index]["y0"].tolist()
    except CommunicationError as error:
        found = str(error)
    pipe.send(found)
    pipe.recv()


@pytest.mark.parametrize("how", ["kill", "close"])
def test_wait_for_dead_or_closed_partner_raises(how: str) -> None:
    with actors(2, _waits) as (first, second):
        first.recv()
        other = second.recv()
        time.sleep(2 * SLICE_S)  # rank 0 sleeps in the kernel by now
        if how == "kill":
            os.kill(other, signal.SIGKILL)
        else:
            second.send("close")
        found = first.recv()
        assert "'wait y0'" in found and "rank 1" in found
        words = "process of rank 1 has ended" if how == "kill" else "rank 1's actor are closed"
        assert words in found


def _folds(here: Here, pipe: Connection) -> None:
    """Rank 1 dies in the middle of a piece that it has claimed; each other rank has claimed one
    piece."""
    slots.TOGETHER_BYTES = 0
    hosted = Hosted(here, here.join())
    handle = hosted.load(_sums(3, buffer=Buffer((6,), torch.float32)))
    fed = [{"x0": torch.ones(6)}] * 3
    fold = same_host.fold

    def fails(*given: Any) -> torch.Tensor:
        if here.index == 1:
            here.store.set("claimed", "")
            os.kill(os.getpid(), signal.SIGKILL)
        here.store.wait(["claimed"])  # otherwise the other ranks would fold all pieces
        return fold(*given)

    same_host.fold = fails
    try:
        hosted.run(handle, fed)
    except CommunicationError as error:
        pipe.send(str(error))
    pipe.recv()


def test_wait_for_partner_that_died_with_claimed_piece_raises() -> None:
    with actors(3, _folds) as (first, _, third):
        for pipe in (first, third):
            found = pipe.recv()
            assert "process of rank 1 has ended" in found or "actor are closed" in found


def test_wait_for_stopped_partner_continues_when_it_resumes() -> None:
    with actors(2, _waits) as (first, second):
        first.recv()
        other = second.recv()
        os.kill(other, signal.SIGSTOP)
        second.send("go on")
        assert not first.poll(4 * SLICE_S)
        os.kill(other, signal.SIGCONT)
        assert first.recv() == second.recv() == [2.0, 2.0]


# -- what is held ----------------------------------------------------------------------------------


def _held() -> tuple[list[str], int]:
    """Return the paths of this process's open descriptors, and the number of its mapped
    segments."""
    gc.collect()
    folder, found = Path("/proc/self/fd"), list[str]()
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(folder / name))
    maps = Path("/proc/self/maps").read_text().count("memfd:dtensor")
    return sorted(link for link in found if link.startswith("/")), maps


def _fails(x: torch.Tensor) -> tuple[Any, ...]:
    raise ZeroDivisionError


def _opens_and_closes(here: Here, count: int) -> tuple[int, str]:
    """Open and close connections, normally or after a failure that cannot be undone."""
    fed = [{"x0": torch.ones(2)}] * 2
    write = function("write", "def forward(x):\n    x += 1\n    return ()")
    fails = function("fails", "def forward(x):\n    fail()\n    return (x,)", fail=_fails)
    failing = program(
        [Call("fails", ("w",), ("v",)), _sum(0), Wait(("y0",)), Call("write", ("w",), (), ("w",))],
        [_sum(0), Wait(("y0",)), Call("write", ("w",), (), ("w",))],
        functions=[write, fails],
        inputs=[("x0",)] * 2,
        outputs=[("v", "y0"), ("y0",)],
        state=[("w",)] * 2,
    )
    after: list[tuple[int, int, list[str]]] = []
    for number in range(count):
        hosted = Hosted(here, here.join())
        good = hosted.load(_sums())
        for _ in range(3):
            hosted.run(good, fed)
        if number % 2:
            hosted.worker.put({here.index: {"w": torch.zeros(2)}})
            bad = hosted.load(failing)
            try:
                hosted.run(bad, fed)
            except Exception:
                hosted.transport.close()  # as `HostConnections.running` does it
            else:
                return number, "no failure"
        hosted.worker.close()
        del hosted
        after.append(_held())
    assert after[1] == after[-1], (after[1], after[-1])
    return after[-1][1], "right"


@pytest.mark.slow
def test_closed_and_failed_connections_leave_no_resources() -> None:
    assert each(2, _opens_and_closes, 12) == [(0, "right")] * 2


def _loads_and_unloads(here: Here) -> tuple[int, int]:
    """Return the bytes of its segment with a large program loaded, and after all unloaded it."""
    transport = here.join()
    assert isinstance(transport, SameHostTransport)
    hosted = Hosted(here, transport)
    segment = transport._neighbours.segments[here.index]

    def held() -> int:
        return os.stat(f"/proc/self/fd/{segment.descriptor}").st_blocks * 512

    large = _sums(buffer=Buffer((1 << 18,), torch.float32))
    fed = [{"x0": torch.ones(1 << 18)}] * 2
    found, held_first = (0, 0), None
    for number in range(6):
        handles = [hosted.load(large), *(hosted.load(_sums()) for _ in range(20))]
        for handle in (*handles, *handles[:1] * 3):
            hosted.run(handle, fed if handle == handles[0] else [{"x0": torch.ones(2)}] * 2)
        loaded = held()
        if here.index:
            time.sleep(0.02)
        for handle in handles:
            hosted.worker.unload(handle)
        here.meet(f"unloaded{number}")
        found = loaded, held()
        held_first = held_first or _held()
        assert _held() == held_first  # however many programs were loaded
    hosted.worker.close()
    return found


@pytest.mark.slow
def test_memory_of_program_is_freed_when_all_processes_unloaded_it() -> None:
    head = 2 * 4096  # its semaphores, and where programs' windows begin
    loaded = head + 2 * (1 << 20) + 4096 + 20 * 4096
    assert each(2, _loads_and_unloads) == [(loaded, head)] * 2
