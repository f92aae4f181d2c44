"""Tests how NCCL communicators open, close and fail, and how ranks share GPUs.

Messages over them are tested on simulated GPUs: tests/testing/gpus/test_matrix.py.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, HashStore

from dtensor.daft import (
    Buffer,
    Collective,
    CommunicationError,
    Wait,
    launch_cluster,
)
from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Instruction, Recv, Send, awaited, key_of
from dtensor.daft.ir.program import Program, RankProgram
from dtensor.daft.ray.transports.communicators import MAX_COMMUNICATORS, Communicators
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import (
    CTAS,
    Group,
    NcclWire,
    dtypes_of_reduction,
    is_native,
    join_nccl,
)
from dtensor.daft.run.transport import TRANSPORTS, Meeting, Transport
from dtensor.testing.gpus.nccl import MAX_CTAS, MULTIPROCESSORS
from tests.daft.explore import built, drawn
from tests.daft.programs import Collectives, program, same_bits
from tests.extras import missing

CPU = torch.device("cpu")
PATIENCE_S = 600.0


class Silent:
    """Stands in for a `ProcessGroupNCCL` and sends nothing."""

    def __init__(self) -> None:
        self.posted = 0
        self.aborted = False

    def _start_coalescing(self) -> None: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> None: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> None: ...

    def allreduce(self, tensors: list[Tensor], op: object, /) -> Silent:
        return self

    def _end_coalescing(self) -> Silent:
        self.posted += 1
        return self

    def wait(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


def wire_of(rank: int, make: Callable[[str], Silent]) -> NcclWire:
    made: Any = lambda name, position, size, ctas: make(name)  # noqa: E731
    return NcclWire((rank,), CPU, made)


def test_all_actors_open_communicators_in_same_order() -> None:
    """Covers overlapping groups, and a second program whose first key sorts before those of the
    first."""
    members = [(0, 1), (0, 2), (1, 2), (0, 1), (0, 1, 2)]
    keys = [(each, f"c{n}", "collective") for n, each in enumerate(members)]
    for rank in range(3):
        names: list[str] = []

        def make(name: str, names: list[str] = names) -> Silent:
            names.append(name)
            return Silent()

        wire = wire_of(rank, make)
        own = {key: n for n, key in enumerate(keys) if rank in key[0]}
        wire.open({key: n for key, n in reversed(own.items()) if n < 3})
        wire.open(dict(reversed(own.items())))
        assert names == [
            f"{n}: collective {each}" for n, each in enumerate(members) if rank in each
        ]


def test_close_aborts_all_communicators_concurrently() -> None:
    """Aborting 24 one by one took 14 s on an H100, and one abort may wait for another
    communicator's kernel."""
    others = threading.Barrier(3)

    class Waits(Silent):
        def abort(self) -> None:
            others.wait(PATIENCE_S)

    wire = wire_of(0, lambda name: Waits())
    wire.open({((0, 1), f"c{n}", "transfer"): n for n in range(3)})
    wire.close()
    assert not others.broken


def test_closed_wire_has_aborted_and_refuses_messages() -> None:
    group, key = Silent(), ((0, 1), "c", "transfer")
    wire = wire_of(0, lambda name: group)
    wire.open({key: 0})
    assert group.posted == 1 and not group.aborted
    wire.close()
    assert group.aborted
    with pytest.raises(RuntimeError, match="closed"):
        wire.post(key, {1: torch.ones(1, dtype=torch.uint8)}, {}, 0)


class Lost(Silent):
    """After the connecting message nothing is sent, and an abort waits for the device for ever."""

    def _end_coalescing(self) -> Silent:
        if self.posted:
            raise RuntimeError("NCCL error: unhandled cuda error")
        return super()._end_coalescing()

    def abort(self) -> None:
        threading.Event().wait()


class RaisesInAbort(Lost):
    def abort(self) -> None:
        raise RuntimeError("NCCL error: cannot abort")


def over_groups(kind: type[Silent], meeting: Meeting) -> Transport:
    _, meet = meeting.of_hosts()
    meet("")
    made: Any = lambda name, position, size, ctas: kind()  # noqa: E731
    return ExchangeTransport(NcclWire(meeting.ranks, CPU, made), meeting.host_of)


@pytest.mark.ray
@pytest.mark.parametrize(
    "kind, also", [(Lost, ""), (RaisesInAbort, "failed to close: RuntimeError: NCCL error: cannot")]
)
def test_nccl_error_is_raised_although_abort_hangs(
    kind: type[Silent], also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.transports import connect  # noqa: F401 - it has the transport of hosts

    monkeypatch.setitem(TRANSPORTS, ("cpu", "hosts"), partial(over_groups, kind))
    buffer = (Buffer((4,), torch.float32),)
    line = "net.py:8: x.sum()"
    sums = Collective("all_reduce", (0, 1), ("x",), ("y",), buffer, buffer, "sum", "c", source=line)
    own = [sums, Wait(("y",))]
    made = program(own, own, inputs=[("x",)] * 2, outputs=[("y",)] * 2)
    with launch_cluster(2, backend="ray", deadline_s=60.0) as cluster:
        handle = cluster.load(made)
        with pytest.raises(CommunicationError) as caught:
            cluster.run(handle, [{"x": torch.ones(4)}] * 2).get()
        text = str(caught.value)
        assert re.search(r"rank [01] .*instruction 0 'y = all_reduce.*run 0: ", text), text
        assert "unhandled cuda error" in text and line in text and also in text, text


def test_torch_backend_has_private_methods_used_for_nccl() -> None:
    """The class of NCCL's groups exists in CUDA builds only; its methods are those of `Backend`."""
    methods = {name for name in vars(Group) if not name.startswith("__")} - {"_abc_impl"}
    methods = {name for name in methods if callable(getattr(Group, name))}
    assert methods | {"eager_connect_single_device"} <= set(dir(Backend))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_join_nccl_without_gpu_raises() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \(3,\) has no CUDA device"):
        join_nccl(HashStore(), (3,), num_actors=1, patience_s=1.0)


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs a GPU for each of two ranks")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_order", [True, False])
def test_nccl_collectives_are_equal_to_one_gpu(size: int, in_order: bool) -> None:
    """The only test with real NCCL. With three GPUs it also covers both halves of an all_reduce.
    NCCL's own sums are equal to a tolerance."""
    if 2 <= torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    case = Collectives(size)
    with launch_cluster(size, device="cuda") as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    options: dict[str, Any] = dict(backend="ray", device="cuda", ranks_per_actor=1)
    with launch_cluster(size, **options, deterministic=in_order) as cluster:
        found = cluster.run(cluster.load(case.program()), case.fed).get()
    for rank in range(size):
        for name, value in expected[rank].items():
            assert not in_order or same_bits(found[rank][name], value)
            torch.testing.assert_close(found[rank][name], value)


def test_too_few_gpus_error_proposes_ranks_per_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dtensor.daft.ray.bootstrap import machines

    class Resources:
        free = 8

        def cluster_resources(self) -> dict[str, float]:
            return {"GPU": 8.0}

        def available_resources(self) -> dict[str, float]:
            return {"GPU": float(self.free)}

    monkeypatch.setattr(machines, "_ray", Resources)
    with pytest.raises(ValueError, match="16 actors .* need 16 free GPUs") as caught:
        machines.ranks_per_gpu(16, None)
    shared, together = "between 2 ranks with ranks_per_actor=2", "ranks_per_actor=16"
    assert 0 < str(caught.value).find(shared) < str(caught.value).find(together)
    assert [machines.ranks_per_gpu(16, asked) for asked in (2, 16)] == [2, 16]
    monkeypatch.setattr(Resources, "free", 1)  # all ranks must share the one GPU
    with pytest.raises(ValueError, match="Fix: put all ranks on one GPU with ranks_per_actor=9"):
        machines.ranks_per_gpu(9, None)


def test_launch_on_cuda_refuses_spares_and_snapshots() -> None:
    """The refusal comes before anything starts, so it also holds for simulated GPUs."""
    for stated in ({"spares": 1}, {"snapshot_every": 2}):
        with pytest.raises(ValueError, match="replaced on CPUs alone"):
            launch_cluster(2, backend="ray", device="cuda", **stated)


@pytest.mark.ray
def test_ray_cluster_without_gpus_is_refused_at_launch() -> None:
    ray = pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.bootstrap.machines import ranks_per_gpu
    from dtensor.daft.ray.bootstrap.start_ray import end_ray

    end_ray()  # end the Ray of earlier tests
    with pytest.raises(ValueError, match="need 1000 free GPUs, one for each actor"):
        launch_cluster(1000, backend="ray", device="cuda", ranks_per_actor=1)
    assert not ray.is_initialized()
    with pytest.raises(ValueError, match="got 'cuda:1'"):
        launch_cluster(2, backend="ray", device="cuda:1")
    # Ray does not check the stated number of GPUs.
    own: dict[str, Any] = dict(address="local", include_dashboard=False, log_to_driver=False)
    ray.init(num_gpus=3, num_cpus=1, **own)
    try:
        assert [ranks_per_gpu(size, None) for size in (1, 3)] == [1, 1]
        assert [ranks_per_gpu(6, asked) for asked in (2, 6)] == [2, 6]
        with pytest.raises(
            ValueError, match=r"Ray has 3, of which 3 are free.\n.*actor=2, .*actor=4"
        ):
            ranks_per_gpu(4, None)
    finally:
        end_ray()


F16, F32, F64, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int64
SMALL, LARGE = (1 << 14,), (1 << 16,)


@pytest.mark.parametrize(
    "kind, op, size, shape, given, made, reduced",
    [
        ("all_reduce", "sum", 3, LARGE, F32, F32, F32),
        ("all_reduce", "sum", 3, LARGE, F64, F32, F64),
        ("all_reduce", "sum", 3, LARGE, I64, I64, I64),
        ("all_reduce", "sum", 2, LARGE, F16, F16, F16),
        ("all_reduce", "sum", 2, SMALL, F16, F32, F32),
        ("all_reduce", "sum", 3, SMALL, F16, F16, F32),
        ("all_reduce", "sum", 2, LARGE, F16, F32, None),
        ("all_reduce", "sum", 3, LARGE, F16, F16, None),
        ("all_reduce", "sum", 3, SMALL, torch.bool, torch.bool, None),
        ("all_reduce", "sum", 3, SMALL, torch.complex64, torch.complex64, None),
        ("all_reduce", "sum", 3, (0,), F32, F32, None),
        ("all_reduce", "max", 3, SMALL, I64, I64, I64),
        ("all_reduce", "max", 3, SMALL, F32, F32, None),
        ("all_reduce", "softmax", 3, (2, 3), F32, F32, None),
        ("reduce_scatter", "sum", 3, SMALL, F32, F32, F32),
        ("reduce_scatter", "sum", 2, SMALL, F16, F16, F16),
        ("reduce_scatter", "sum", 2, LARGE, F16, F32, None),
        ("reduce_scatter", "max", 3, SMALL, I64, I64, None),
    ],
)
def test_reductions_run_in_nccl_in_dtype_that_keeps_promises(
    kind: str,
    op: str,
    size: int,
    shape: tuple[int, ...],
    given: torch.dtype,
    made: torch.dtype,
    reduced: torch.dtype | None,
) -> None:
    """Sums of 16-bit floats are float32 sums, and a maximum keeps NaN."""
    names = ("x",) * (1 if kind == "all_reduce" else size)
    ins, outs = (Buffer(shape, given),) * len(names), (Buffer(shape, made),)
    step = Collective(kind, tuple(range(size)), names, ("y",), ins, outs, op, "c")
    assert is_native(step, in_order=False) == (reduced is not None)
    assert not is_native(step, in_order=True)
    if reduced is not None:
        assert set(dtypes_of_reduction(step)) == {reduced}


# -- which keys share a communicator ---------------------------------------------------------------

X = Buffer((2,), torch.float32)


def lists_of(*lists: Sequence[Instruction]) -> Program:
    ranks = tuple(RankProgram(instructions=tuple(each)) for each in lists)
    return Program(name="p", ranks=ranks, functions=(), stage_of=(0,) * len(ranks))


def sends(to: int, channels: str) -> list[Instruction]:
    return [Send("x", to, channel, X) for channel in channels]


def recvs(source: int, channels: str) -> list[Instruction]:
    return [Recv("y", source, channel, X) for channel in channels]


def reduces(group: tuple[int, ...], channels: str) -> list[Instruction]:
    return [Collective("all_reduce", group, ("x",), ("y",), (X,), (X,), "sum", c) for c in channels]


def numbers(shared: Communicators, loaded: Program) -> list[str]:
    """Return the channels of each communicator, over all programs so far."""
    host_of = tuple(range(loaded.size))
    shared.number(loaded, check_routes(loaded, host_of), host_of)
    by: dict[int, str] = {}
    for (_, channel, _), number in sorted(shared.of.items()):
        by[number] = by.get(number, "") + channel
    return sorted(by.values())


def test_channels_in_same_order_share_communicator() -> None:
    loaded = lists_of(
        sends(1, "aba") + recvs(1, "c") + reduces((0, 1), "de"),
        recvs(0, "aba") + sends(0, "c") + reduces((0, 1), "de"),
    )
    assert numbers(Communicators(), loaded) == ["ab", "c", "de"]


def test_channels_in_different_orders_get_separate_communicators() -> None:
    loaded = lists_of(sends(1, "ab"), recvs(0, "ba"))
    assert numbers(Communicators(), loaded) == ["a", "b"]
    three = [reduces((0, 1, 2), "ab"), reduces((0, 1, 2), "ab"), reduces((0, 1, 2), "ba")]
    assert numbers(Communicators(), lists_of(*three)) == ["a", "b"]


def test_later_program_with_other_order_moves_channel_to_new_communicator() -> None:
    shared = Communicators()
    assert numbers(shared, lists_of(sends(1, "ab"), recvs(0, "ab"))) == ["ab"]
    assert numbers(shared, lists_of(sends(1, "bc"), recvs(0, "bc"))) == ["abc"]
    before = dict(shared.of)
    assert numbers(shared, lists_of(sends(1, "ab"), recvs(0, "ba"))) == ["ac", "b"]
    assert {key[1] for key, number in shared.of.items() if before[key] != number} == set("abc")
    before = dict(shared.of)
    assert numbers(shared, lists_of(sends(1, "abc"), recvs(0, "abc"))) == ["ac", "b"]
    assert shared.of == before


def test_number_of_ctas_follows_most_communicators_under_way() -> None:
    waited = [step for each in reduces((0, 1), "ab") for step in (each, Wait(("y",)))]
    shared = Communicators()
    numbers(shared, lists_of(waited, waited))
    assert {CTAS[number % 3] for number in shared.of.values()} == {0}
    for channels, ctas in (("ef", 32), ("efg", 32), ("efgh", 4)):
        numbers(shared, lists_of(reduces((0, 1), channels), reduces((0, 1), channels[::-1])))
        assert {CTAS[shared.of[(0, 1), c, "collective"] % 3] for c in channels} == {ctas}
        assert {CTAS[shared.of[(0, 1), c, "collective"] % 3] for c in "ab"} == {0}


def test_kernels_under_way_together_fit_on_gpu() -> None:
    """Random programs, loaded one after the other; their messages overlap in all ways."""
    draw = random.Random(0)
    for _ in range(40):
        programs = [built(*drawn(draw)) for _ in range(4)]
        shared, hosts = Communicators(), tuple(range(4))
        for each in programs:
            shared.number(each, check_routes(each, hosts), hosts)
        for each in programs:
            for rank, own in enumerate(each.ranks):
                assert max(ctas_under_way(rank, own, shared)) <= MULTIPROCESSORS


def ctas_under_way(rank: int, own: RankProgram, shared: Communicators) -> Iterator[int]:
    yield 0
    under_way: dict[str, int] = {}  # by the value that is awaited, in which `built` differs
    for step in own.instructions:
        if isinstance(step, Wait):
            under_way.pop(step.values[0])
        elif isinstance(step, Send | Recv | Collective):
            (value,) = awaited(step)
            under_way[value] = shared.of[key_of(rank, step)]
        yield sum(CTAS[number % 3] or MAX_CTAS for number in set(under_way.values()))


def test_too_many_communicators_are_refused_without_changing_assignment() -> None:
    shared = Communicators()
    forth = "".join(chr(ord("A") + n) for n in range(MAX_COMMUNICATORS + 1))
    back = forth[::-1]
    with pytest.raises(ProgramError, match=f"need {MAX_COMMUNICATORS + 1} NCCL communicators"):
        numbers(shared, lists_of(sends(1, forth), recvs(0, back)))
    assert shared.of == {}
    fewer = lists_of(sends(1, forth[1:]), recvs(0, back[:-1]))
    assert len(numbers(shared, fewer)) == len(forth) - 1


def test_side_streams_count_towards_communicator_limit() -> None:
    """An all_reduce in two halves uses an extra stream beside the one of its communicator.
    NCCL's own all_reduce does not."""
    large = Buffer((1 << 16,), torch.float32)
    group, channels = (0, 1, 2), "".join(chr(ord("A") + n) for n in range(16))
    lists = [
        [Collective("all_reduce", group, ("x",), ("y",), (large,), (large,), "sum", c) for c in own]
        for own in (channels, channels[::-1], channels)
    ]
    with pytest.raises(ProgramError, match="need 16 NCCL communicators on actor 0, with 32 stream"):
        numbers(Communicators(in_order=True), lists_of(*lists))
    assert len(numbers(Communicators(in_order=True), lists_of(*[own[1:-1] for own in lists]))) == 14
    assert len(numbers(Communicators(), lists_of(*lists))) == 16
