"""Tests a few cases of the matrix and of the mutations under one seed each (`make gpus` runs
all), and the real transport over the mock of NCCL.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.collectives import COLLECTIVES
from dtensor.daft import launch_cluster
from dtensor.daft.ir.instructions import WORD
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.run import engine
from dtensor.testing.gpus.world import Deadlock
from tests.daft.programs import Collectives, pipeline, same_bits
from tests.models import MLP
from tests.testing.gpus.cases import _square, cases
from tests.testing.gpus.exchanges import FLAT, all_exchanges, run_ranks, starts, transport_of
from tests.testing.gpus.matrix import check, without_kernels
from tests.testing.gpus.mutations import WIRE, Mutation, found, implied, mutations
from tests.testing.gpus.needed import skip_without_compiler
from tests.testing.gpus.waits import PROGRAMS, waits_of
from tests.training import SIX, Run, batches, sgd

skip_without_compiler()

CASES = {case.name: case for case in cases()}
FEW = [
    "train dp2_tp2",
    "schedule GPipe, p=2",
    "schedule LoopedBFS, p=2",
    "schedule DualPipeV, p=2",
    "zero 3",
    "bad data",
    "batches of two sizes",
    "eager",
    "transfer between meshes",
    "grouped product, by expert",
    "rows to ranks and back",
    "experts, tokens split",
    "experts, tokens whole",
    "experts whole, tokens split",
    "experts whole, bfloat16",
    "attention, ring",
    "attention, gather",
    "attention, heads",
]


@pytest.mark.default("batches of two sizes", "experts, tokens split", "attention, ring")
@pytest.mark.parametrize("name", FEW)
def test_simulated_gpu_case_matches_cpu_without_races(name: str) -> None:
    with without_kernels():
        seen = check(CASES[name], [FEW.index(name)])
    assert (seen.races, seen.early_frees) == (0, 0)


GRAPHED = [
    *("bad data", "schedule OneFOneB, p=2", "train dp2_tp2", "zero 3", "experts, tokens split"),
    *("loaded between steps", "steps counted in Python"),
]


@pytest.mark.default("schedule OneFOneB, p=2", "loaded between steps")
@pytest.mark.parametrize("name", GRAPHED)
def test_simulated_gpu_case_with_graphs_matches_cpu_without_races(name: str) -> None:
    with without_kernels():
        seen = check(CASES[name], [1], graphs=True)
    assert (seen.races, seen.early_frees) == (0, 0)


def test_host_waits_once_for_counts_of_sized_exchanges() -> None:
    waits = waits_of(PROGRAMS["rows to ranks and back"])
    assert [n for wait, n in waits.items() if "engine.py" in wait.line] == [2]  # ranks


@pytest.mark.default("tokens split")
@pytest.mark.parametrize("how", ["tokens split", "tokens whole", "experts whole"])
def test_layer_of_experts_waits_once_for_counts(how: str) -> None:
    """Neither the combine, nor a product, nor the backward waits."""
    with without_kernels():
        waits = waits_of(PROGRAMS[f"two layers of experts, {how}"])
    source = Path(engine.__file__).read_text().splitlines()
    (copy,) = (n for n, line in enumerate(source, 1) if "torch.stack(values).cpu()" in line)
    lines = (f"engine.py:{copy}", "grouped_matmul.py", "ops/experts.py", "in_range.py")
    found = {wait.line: n for wait, n in waits.items() if any(e in wait.line for e in lines)}
    assert list(found.values()) == [4], found  # 2 layers on 2 ranks


def test_products_by_expert_in_bfloat16_wait_for_nothing() -> None:
    """The host waits for the results alone."""
    with without_kernels():
        waits = waits_of(PROGRAMS["two layers of experts, experts whole, bfloat16"])
    assert {wait.line.rpartition(":")[0] for wait in waits} <= {"daft/run/pending_results.py"}


MUTATIONS = [each for each in mutations() if each.file in {*WIRE, "transport.py"}]
"""`make gpus` makes those of workers, checkpoints and undone runs too."""


@pytest.mark.default("exchange.py:217 work.wait()")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_device_code_mutation_is_found_or_implied(mutation: Mutation) -> None:
    """A mutation removes one wait, event, record or copy. It must cause an error, or another rule
    must imply the same order."""
    assert implied(mutation) or found(mutation, range(1))


# -- the mock of NCCL, and the real transport over it ----------------------------------------------


@pytest.mark.parametrize("early", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_native", [True, False])
def test_simulated_transport_exchanges_have_no_race_and_few_host_waits(
    seed: int, early: float, is_native: bool
) -> None:
    make = partial(transport_of, is_native=is_native)
    report = run_ranks(3, seed, all_exchanges, early=early, make=make)
    assert not report.races and not report.early_frees
    assert {wait.what for wait in report.host_waits} <= {
        "copy to the host",
        "aten._local_scalar_dense.default",
    }


def test_exchange_with_one_hardware_queue_deadlocks() -> None:
    """A rank's receive is queued before its send, and the next rank waits for that send."""

    def body(rank: int, transport: ExchangeTransport) -> None:
        send, recv = starts(rank, 3)[2:4]
        received = transport.begin(rank, recv)(())
        transport.begin(rank, send)((torch.ones(FLAT.shape, device="cuda"),)).wait()
        assert bool((received.wait()[0] == 1).all())

    run_ranks(3, 0, body)
    with pytest.raises(Deadlock, match="no host and no stream"):
        run_ranks(3, 0, body, num_queues=1)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_simulated_gpu_collectives_are_equal_to_inprocess(size: int, in_order: bool) -> None:
    """Bitwise if they are deterministic; sums of NCCL have another order."""
    case = Collectives(size)
    with launch_cluster(size) as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    with dt.testing.simulated_gpus(size) as gpus:
        with launch_cluster(size, backend="ray", device="cuda", deterministic=in_order) as cluster:
            found = cluster.run(cluster.load(case.program()), case.fed).get()
        assert not gpus.report().races and not gpus.report().early_frees
    for rank in range(size):
        assert set(found[rank]) == set(expected[rank]) == set(case.expected[rank])
        for name, value in expected[rank].items():
            assert not in_order or same_bits(found[rank][name], value), (rank, name)
            torch.testing.assert_close(found[rank][name], value)


def _zero(level: int) -> Any:
    module = MLP()
    model = dt.parallelize(module, dt.Mesh(dp=2), {}, zero=dict(dp=level))
    split: dict[str, Any] = dict(inputs=dict(dp=dt.Row()), clip_grad_norm=1.0)
    step = dt.train_step(model, _in_bfloat16 if level == 3 else _square, sgd(module), **split)
    return step, (torch.ones(8, 16),)


def _in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return _square(model, x)


def _placed(name: str) -> Any:
    return Run.of(name, make=sgd).step, batches(1)[0]


TRAINED: dict[str, Callable[[], Any]] = {
    **{f"zero {level}": partial(_zero, level) for level in (0, 1, 2, 3)},
    **{name: partial(_placed, name) for name in SIX if name != "single"},
}


@pytest.mark.default("zero 3")
@pytest.mark.parametrize("name", TRAINED)
def test_planned_collectives_are_those_that_run(name: str) -> None:
    """The kind, dtype and bytes of each message of rank 0, apart from votes and norms, which share
    messages. Small 16-bit gradients are summed in float32."""
    step, data = TRAINED[name]()
    mesh, ran, planned = step.model.mesh, Counter[Any](), Counter[Any]()
    with (
        without_kernels(),
        dt.testing.simulated_gpus(mesh.size) as gpus,
        dt.launch(mesh, "ray", device="cuda"),
    ):
        [float(step(*data)) for _ in range(2)]
        before = Counter(gpus.fabric.calls)
        float(step(*data))
        calls = gpus.fabric.calls - before
    for each in step.plan(*data).collectives:
        kind, dtype, sent = each.kind, each.dtype, each.bytes_sent
        if kind == "transfer":
            dtype = "uint8"
        elif COLLECTIVES[kind].reduces and dtype == "bfloat16":
            dtype, sent = "float32", 2 * sent
        if each.stage == 0:
            planned[kind, dtype, sent] += each.times
    for call, times in calls.items():
        kind, members = re.fullmatch(r"\d+: (\w+) (.*)", call.group).groups()  # type: ignore[union-attr]
        group, sent = ast.literal_eval(members), call.nbytes
        if kind == "collective":
            kind, sent = call.kind, COLLECTIVES[call.kind].bytes_sent(sent, len(group))
        if group[call.position] == 0:
            ran[kind, str(call.dtype).removeprefix("torch."), sent] += times
    words = {("all_reduce", "float32", n * WORD.nbytes) for n in (1, 2)}
    assert {k: n for k, n in ran.items() if k not in words} == {
        k: n for k, n in planned.items() if k not in words
    }


@pytest.mark.parametrize("ranks_per_actor", [1, 2])
def test_pipeline_transfers_between_simulated_gpus_are_exact(ranks_per_actor: int) -> None:
    given: dict[str, Any] = dict(backend="ray", device="cuda", ranks_per_actor=ranks_per_actor)
    with dt.testing.simulated_gpus(4), launch_cluster(4, **given) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 4)
        handle = cluster.load(pipeline(4))
        for k in (0.0, 1.0):
            found = cluster.run(handle, [{"x": torch.full((4,), k)}, {}, {}, {}]).get()
            assert found[3]["y"].tolist() == [4.0 + k] * 4
