"""Tests which mistakes simulated GPUs find in user programs, and what they leave alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import dtensor as dt
import dtensor.sharding.ops.experts
from dtensor.testing.gpus.triton_kernels import written_arguments
from tests.testing.gpus.needed import skip_without_compiler

skip_without_compiler()

gpus = dt.testing.simulated_gpus


@triton.jit
def _add_one(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, at < n) + 1, at < n)


def add_one(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _add_one[(triton.cdiv(x.numel(), 4),)](x, y, x.numel(), BLOCK=tl.constexpr(4))
    return y


@triton.jit
def _difference(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at) - tl.load(X + at))


def test_kernel_arithmetic_with_infinities_warns_nothing() -> None:
    """numpy, on which the interpreter computes, would warn; a GPU does not."""
    with gpus(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.full((4,), float("inf"), device="cuda")
        y = torch.empty_like(x)
        _difference[(1,)](x, y, BLOCK=tl.constexpr(4))
        assert bool(y.cpu().isnan().all())


def on_side(x: Tensor, *, waits: bool, joins: bool, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `run` on a side stream; the flags say which of the two waits are made."""
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = run(x)
    if joins:
        torch.cuda.current_stream().wait_stream(side)
    return y


@pytest.mark.parametrize("run", [add_one, lambda x: x + 1], ids=["triton", "torch"])
@pytest.mark.parametrize("seed", range(4))
def test_kernel_on_synchronised_side_stream_gives_right_values_without_race(
    run: Callable[[Tensor], Tensor], seed: int
) -> None:
    with gpus(seed=seed) as seen:
        x = torch.arange(6.0, device="cuda") * 2
        y = on_side(x, waits=True, joins=True, run=run)
        assert (y * 1).tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
        assert not seen.report().races and not seen.report().early_frees


@pytest.mark.parametrize("run", [add_one, lambda x: x + 1], ids=["triton", "torch"])
@pytest.mark.parametrize("missing", ["waits", "joins"])
def test_missing_stream_wait_is_reported_as_race_under_every_seed(
    run: Callable[[Tensor], Tensor], missing: str
) -> None:
    wrong = 0
    for seed in range(8):
        with gpus(seed=seed) as seen:
            run(torch.ones(2, device="cuda"))  # the first use waits
            x = torch.arange(6.0, device="cuda") * 2
            given: dict[str, Any] = {"waits": True, "joins": True, missing: False}
            y = on_side(x, **given, run=run) * 1
            wrong += y.tolist() != [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
            races = [str(race) for race in seen.report().races]
        assert races and all(text.count("test_simulated_gpus.py:") == 2 for text in races)
    assert wrong  # some orders give wrong numbers


def test_race_report_names_lines_of_both_accesses() -> None:
    with gpus() as seen:
        x = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x.add_(1)
        (race,) = seen.report().races
    assert race.earlier.what == "aten.zeros.default" or "fill" in race.earlier.what
    assert race.later.what == "aten.add_.Tensor" and race.later.stream == "GPU 0, side 1"
    first, second = (int(each.line.rsplit(":", 1)[1]) for each in (race.earlier, race.later))
    assert second - first == 3


def test_memory_freed_while_another_stream_reads_it_is_reported() -> None:
    def program(record: bool) -> int:
        with gpus() as seen:
            x = torch.ones(4, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if record:
                x.record_stream(side)
            del x
            z = torch.full((4,), 5.0, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            (y + z).tolist()
            return len(seen.report().early_frees)

    assert program(record=False) == 1
    assert program(record=True) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_recorded_stream_orders_free_after_streams_that_it_waits_for(waits: bool) -> None:
    """A third stream reads memory; the recorded stream waits for it before the free, or not."""
    with gpus() as seen:
        main, owner, reader = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(owner):
            x = torch.ones(4, device="cuda")
        reader.wait_stream(owner)
        with torch.cuda.stream(reader):
            y = x + 1
        if waits:
            main.wait_stream(reader)
        x.record_stream(main)
        del x
        main.wait_stream(reader)
        assert y.tolist() == [2.0] * 4
        assert len(seen.report().early_frees) == (not waits)


def test_host_waits_are_counted_by_cause() -> None:
    with gpus() as seen:
        x = torch.ones(4, device="cuda")
        float(x.sum())
        x.cpu()
        assert x[x > 0].shape == (4,)
        torch.ones(4).cuda()
        torch.ones(4).pin_memory().to("cuda", non_blocking=True)
        x.add_(torch.tensor(2.0))
        torch.cuda.synchronize()
        found = {wait.what: times for wait, times in seen.report().host_waits.items()}
    assert found == {
        "aten._local_scalar_dense.default": 1,
        "copy to the host": 1,
        "aten.index.Tensor": 1,
        "copy from the host": 1,
        "torch.cuda.synchronize()": 1,
    }


def test_pinned_non_blocking_copy_reads_source_when_it_runs() -> None:
    with gpus() as seen:
        source = torch.zeros(3).pin_memory()
        x = source.to("cuda", non_blocking=True)
        source.fill_(7)  # before the copy has run
        (race,) = seen.report().races
        assert race.writes and race.later.stream == "the host"
        assert x.tolist() == [7.0] * 3
        source.fill_(8)  # after it
        assert len(seen.report().races) == 1
        source = torch.zeros(3)
        y = source.to("cuda", non_blocking=True)
        source.fill_(7)
        assert y.tolist() == [0.0] * 3


@pytest.mark.parametrize("pin", ["op", "empty", "method"])
def test_pinned_result_is_ordered_by_its_event_alone(pin: str) -> None:
    def program(read: Callable[[torch.cuda.Event], object]) -> tuple[int, int, float]:
        with gpus() as seen:
            x = torch.ones(2, device="cuda") * 3
            if pin == "op":
                y = x.to("cpu", non_blocking=True)
            else:
                y = (
                    torch.zeros(4, pin_memory=True)
                    if pin == "empty"
                    else torch.zeros(4).pin_memory()
                )
                y = y[2:].copy_(x, non_blocking=True)
            assert y.is_pinned() and not seen.report().host_waits
            passed = torch.cuda.Event()
            passed.record()
            torch.ones(2, device="cuda").mul_(2)
            read(passed)
            value = float(y[:].sum())
            report = seen.report()
            return len(report.races), sum(report.host_waits.values()), value

    def twice(passed: torch.cuda.Event) -> None:
        assert not passed.query()
        passed.synchronize()
        passed.synchronize()  # the host waits only for an event that has not passed
        assert passed.query()

    assert program(twice) == (0, 1, 6.0)
    races, waits, _ = program(lambda passed: None)
    assert races and not waits


def test_copies_that_are_not_plain_or_pinned_wait() -> None:
    with gpus() as seen:
        x = torch.ones(4, 4, device="cuda")
        for to in (torch.empty(4, 4), torch.empty(4, 4, dtype=torch.float64).pin_memory()):
            to.copy_(x, non_blocking=True)
            assert float(to.sum()) == 16
        torch.ones(4, 4).pin_memory().t().to("cuda", non_blocking=True)
        assert sum(seen.report().host_waits.values()) == 3 and not seen.report().races


def test_mixing_devices_is_refused() -> None:
    with gpus(num=2):
        x, y = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        for other in (y, torch.ones(2)):
            with pytest.raises(RuntimeError, match="same device"):
                x + other
        assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0]
        assert (x + y.to("cuda:0")).tolist() == [2.0, 2.0]
        with torch.cuda.device(1), pytest.raises(ValueError, match="current"):
            add_one(x)
        with torch.cuda.device(1):
            assert add_one(y).tolist() == [2.0, 2.0]


def test_simulated_out_of_memory_is_raised_at_capacity_or_stated_allocation() -> None:
    with gpus(capacity=4096):
        x = torch.empty(768, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(768, device="cuda")
        del x
        torch.empty(768, device="cuda")
    with gpus(fails_at=2):
        torch.empty(1, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, device="cuda")


def test_streams_that_share_hardware_queue_give_right_values() -> None:
    """One stream waits for an event of another in the same queue; in the wrong order this would
    hang."""

    def program(num_queues: int) -> list[float]:
        with gpus(num_queues=num_queues):
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            x = torch.ones(2, device="cuda")
            torch.cuda.synchronize()
            done = torch.cuda.Event()
            with torch.cuda.stream(second):
                y = x + 1
                done.record()
            with torch.cuda.stream(first):
                first.wait_event(done)
                return (y + 1).tolist()

    assert program(32) == program(1) == [3.0, 3.0]


def test_first_launch_of_triton_kernel_counts_as_host_wait() -> None:
    with gpus() as seen:
        x = torch.ones(4, device="cuda")
        for _ in range(3):
            x = add_one(x)
        assert x.tolist() == [4.0] * 4
        found = [wait.what for wait in seen.report().host_waits]
    assert found.count("first use of Triton's _add_one") == 1


def test_index_add_varies_between_seeds_only_with_varies_option() -> None:
    def program(*, varies: bool, seed: int) -> Tensor:
        with gpus(varies=varies, seed=seed):
            x, at = torch.ones(64).cuda(), torch.arange(64).cuda()
            return torch.zeros(64, device="cuda").index_add(0, at, x).cpu()

    assert torch.equal(program(varies=False, seed=0), program(varies=False, seed=1))
    first, second = program(varies=True, seed=0), program(varies=True, seed=1)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, rtol=3e-7, atol=0)


@pytest.mark.parametrize("counts_device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_ops_wait_only_for_counts_on_the_gpu(dtype: torch.dtype, counts_device: str) -> None:
    ops: Any = torch.ops.dt
    drawn = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=drawn).to(dtype) for shape in ((6, 16), (4, 16, 24), (4, 24))
    )
    weights, ids = torch.rand(6, 2, generator=drawn), torch.tensor([[0, 3], [2, -1], [3, 2]] * 2)
    counts, _, slot = ops.route(ids, 4)

    def run(x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, slot: Tensor) -> Any:
        rows = ops.take_rows(x, slot, counts, weights, 2)
        h = ops.expert_mm(rows, weight, counts, bias, 2)
        grads = ops.expert_outer(rows, h, counts, 2), ops.expert_sum(h, counts, 2)
        more = ops.slot_grads(rows[:6], rows, slot, counts, 6, 2)
        return ops.add_rows(h, slot, counts, weights, 6, 2), more, *grads

    operands = x, weight, bias, weights, slot
    expected = run(*operands)
    with gpus() as seen:
        held = [value.cuda() for value in operands]
        counts = counts.to(counts_device)
        before = seen.report().host_waits
        results = run(*held)
        found = Counter(seen.report().host_waits) - Counter(before)
        torch.testing.assert_close([r.cpu() for r in results], list(expected), rtol=0.05, atol=0.2)
    wanted = set() if counts_device == "cpu" else {"tolist()"}
    assert {wait.what for wait in found} == wanted


class _Balanced(torch.nn.Module):
    """A layer of experts whose router has a bias by the load, as DeepSeek-V3's."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(16, 8)
        self.up = torch.nn.Parameter(torch.randn(8, 16, 16))
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        ids = (self.gate(x).sigmoid() + self.bias).topk(2).indices
        rows, route = dt.to_experts(x, ids, 8)
        with torch.no_grad():
            load = route.counts.float()
            self.bias += 0.1 * torch.sign(load.mean() - load)
        return dt.from_experts(dt.expert_linear(rows, self.up, route), route)


@pytest.mark.parametrize("splits", [True, False], ids=["tokens split", "tokens whole"])
def test_program_reads_counts_of_experts_on_their_gpu(splits: bool) -> None:
    def bias(mesh: dt.Mesh, device: str, **options: Any) -> Tensor:
        pins = {"up": dict(ep=dt.Shard(0))} if mesh.shape else {}
        model = dt.parallelize(_Balanced(), mesh, pins)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.train_step(model, lambda m, x: m(x).square().mean(), optimizer, **options)
        with dt.launch(mesh, device=device):
            for _ in range(2):
                float(step(torch.randn(32, 16, generator=torch.Generator().manual_seed(1))))
            return dt.gather_state_dict(model)["model"]["bias"]

    options = dict(inputs=dict(ep=dt.Row())) if splits else {}
    with dt.testing.simulated_gpus(num=2, seed=0):
        found = bias(dt.Mesh(ep=2), "cuda", **options)
    assert torch.equal(found, bias(dt.Mesh(), "cpu"))


# -- CUDA graphs -----------------------------------------------------------------------------------


@contextmanager
def captured(**given: Any) -> Generator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **given):
        yield graph


def doubled_on_side(x: Tensor, **flags: bool) -> Tensor:
    return on_side(x, **{"waits": True, "joins": True, **flags}, run=lambda x: x * 2)


@pytest.mark.parametrize("run", [add_one, lambda x: x + 1], ids=["triton", "torch"])
@pytest.mark.parametrize("seed", range(4))
def test_replay_runs_captured_kernels_on_the_same_memory(
    run: Callable[[Tensor], Tensor], seed: int
) -> None:
    with gpus(seed=seed) as seen:
        x, total = torch.zeros(6, device="cuda"), torch.zeros(6, device="cuda")
        run(x)
        with captured() as graph:
            y = run(doubled_on_side(x)) * 1
            total.add_(y)
        assert total.tolist() == [0.0] * 6  # a capture runs nothing
        results: list[list[float]] = []
        for i in range(3):
            x.copy_(torch.full((6,), float(i)).cuda())
            launches = seen.report().launches
            graph.replay()
            assert seen.report().launches == launches + 1
            results.append(y.tolist())
        assert results == [[1.0] * 6, [3.0] * 6, [5.0] * 6] and total.tolist() == [9.0] * 6
        assert not seen.report().races and not seen.report().early_frees


_REFUSED: dict[str, Callable[[Tensor], object]] = {
    "_local_scalar_dense": lambda x: x.sum().item(),
    "copy to the host": lambda x: x.cpu(),
    "copy from the host": lambda x: x.copy_(torch.ones(6)),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event.query": lambda x: torch.cuda.current_stream().record_event().query(),
    "first use": lambda x: x[None] @ x[:, None],
    "does not include": lambda x: on_side(x, waits=False, joins=False, run=lambda x: x * 2),
    "does not wait for": lambda x: doubled_on_side(x, joins=False),
    "work that the capture": lambda x: torch.cuda.current_stream().wait_stream(
        torch.cuda.default_stream()
    ),
}


@pytest.mark.parametrize("what", list(_REFUSED))
def test_capture_refuses_what_cuda_does_not_permit(what: str) -> None:
    with gpus():
        x = torch.ones(6, device="cuda")
        with pytest.raises(torch.AcceleratorError, match=what), captured():
            _REFUSED[what](x)
        assert (x + 1).tolist() == [2.0] * 6


def test_capture_is_refused_on_the_default_stream() -> None:
    with gpus(), pytest.raises(RuntimeError, match="non-default"):
        torch.cuda.CUDAGraph().capture_begin()


def _input_after_replay(x: Tensor, replay: Callable[[], None], y: Tensor) -> object:
    replay()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        return x.fill_(3)


def _result_without_event(x: Tensor, replay: Callable[[], None], y: Tensor) -> object:
    replay()
    return on_side(y, waits=False, joins=True, run=lambda y: y + 1)


def _next_replay_before_result_is_read(x: Tensor, replay: Callable[[], None], y: Tensor) -> object:
    replay()
    z = on_side(y, waits=True, joins=False, run=lambda y: y + 1)
    replay()
    return z


@pytest.mark.parametrize(
    "program", [_input_after_replay, _result_without_event, _next_replay_before_result_is_read]
)
def test_access_that_no_event_orders_with_a_replay_is_a_race(program: Any) -> None:
    with gpus() as seen:
        x = torch.ones(6, device="cuda")
        with captured() as graph:
            y = x * 2
        torch.cuda.synchronize()
        program(x, graph.replay, y)
        assert seen.report().races


def test_missing_wait_within_a_graph_is_a_race_of_its_replay() -> None:
    with gpus() as seen:
        x = torch.ones(6, device="cuda")
        y = torch.zeros(6, device="cuda")
        with captured() as graph:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            y.add_(x)
            with torch.cuda.stream(side):
                z = y * 2
            torch.cuda.current_stream().wait_stream(side)
        assert not seen.report().races
        graph.replay()
        (race,) = seen.report().races
        assert "add_" in str(race) and "mul" in str(race)
        del z


def test_replay_with_memory_that_was_freed_since_the_capture_is_an_early_free() -> None:
    with gpus() as seen:
        x = torch.ones(6, device="cuda")
        with captured() as graph:
            y = x * 2
        graph.replay()
        assert y.tolist() == [2.0] * 6 and not seen.report().early_frees
        x = x + 1  # another address
        graph.replay()
        assert seen.report().early_frees


def test_graphs_of_one_pool_reuse_its_memory_and_reset_frees_it() -> None:
    with gpus() as seen:
        x = torch.ones(1024, device="cuda")
        held = torch.cuda.memory_allocated()
        stream = torch.cuda.Stream()
        with captured(stream=stream) as first:
            y = ((x + 1) * 2 + 3).sum()
        with captured(pool=first.pool(), stream=stream) as second:
            z = ((x + 4) * 2 + 3).sum()
        assert torch.cuda.memory_allocated() - held <= 2 * x.nbytes + 4 * 512
        first.replay()
        second.replay()
        assert (y.item(), z.item()) == (7 * 1024.0, 13 * 1024.0)
        assert not seen.report().races and not seen.report().early_frees
        first.reset()
        second.reset()
        assert torch.cuda.memory_allocated() == held


def test_plain_autograd_is_refused_with_train_step_as_fix() -> None:
    with gpus():
        x = torch.ones(2, device="cuda", requires_grad=True)
        with pytest.raises(NotImplementedError, match="dt.train_step"):
            (x * 2).sum().backward()


def test_simulated_gpus_restore_torch_and_triton_on_exit() -> None:
    before = torch.cuda.Stream, torch.cuda.is_available(), triton.JITFunction.run
    with gpus(), pytest.raises(RuntimeError, match="already"), gpus():
        pass
    assert (torch.cuda.Stream, torch.cuda.is_available(), triton.JITFunction.run) == before


def test_written_arguments_lists_only_pointers_that_kernel_stores_to() -> None:
    assert {"Y"} <= written_arguments(_add_one.fn) and "X" not in written_arguments(_add_one.fn)
