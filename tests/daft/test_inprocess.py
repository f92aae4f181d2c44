"""Tests the engine on the in-process cluster."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    CommunicationError,
    Free,
    Function,
    Sizes,
    Wait,
    launch_cluster,
)
from dtensor.daft.run.worker import is_on
from dtensor.numerics import REDUCTIONS, fold
from tests.daft.programs import Collectives, function, program, same_bits


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_collectives_in_random_rank_order_give_expected_bits(
    size: int, seed: int, device: str
) -> None:
    case = Collectives(size, large=100)
    with launch_cluster(size, seed=seed, device=device) as cluster:
        results = cluster.run(cluster.load(case.program()), case.fed).get()
    for rank in range(size):
        assert set(results[rank]) == set(case.expected[rank])
        for name, value in case.expected[rank].items():
            assert same_bits(results[rank][name], value), (rank, name)


def test_rows_beyond_declared_bound_undo_run() -> None:
    counts, wide = Buffer((1,), torch.int64), Buffer((8,), torch.float32, bounded=True)
    narrow = replace(wide, shape=(2,))
    gather = Collective(
        *("all_gather", (0,), ("n",), ("c",), (counts,), (counts,), None, "g"), on_host=True
    )
    exchange = Collective(
        *("all_to_all", (0,), ("x",), ("r",), (wide,), (narrow,), None, "g"),
        sizes=Sizes(("c",), ((0,),)),
    )
    items = [gather, Wait(("c",)), exchange, Wait(("r",)), Free(("c",))]
    made = program(items, inputs=[("x", "n")], outputs=[("r",)])
    with launch_cluster(1) as cluster:
        handle = cluster.load(made)
        for rows in (2, 3, 1):
            fed = [{"x": torch.ones(rows), "n": torch.tensor([rows])}]
            if rows == 3:
                words = r"Rank 0 sends 3 rows of 'r', declared is f32\[<=2\]"
                with pytest.raises(CommunicationError, match=words):
                    cluster.run(handle, fed).get()
            else:
                assert len(cluster.run(handle, fed).get()[0]["r"]) == rows


def test_cuda_device_without_index_means_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs on the current GPU are then read in place."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    class There:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    x: Any = There("cuda:1")
    assert is_on(x, torch.device("cuda")) and is_on(x, torch.device("cuda:1"))
    assert not is_on(x, torch.device("cuda:0")) and not is_on(x, torch.device("cpu"))
    x = There("cuda:0")
    assert not is_on(x, torch.device("cuda")) and is_on(x, torch.device("cuda:0"))
    assert is_on(torch.ones(1), torch.device("cpu"))


def test_ranks_keep_gpu_that_was_current_at_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton launches on the current GPU, and each new thread starts on GPU 0."""
    current = [1]

    @contextmanager
    def guard(device: torch.device) -> Generator[None]:
        assert device.index is not None
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    with pytest.raises(ValueError, match="device='cuda', and this process sees no GPU"):
        launch_cluster(1, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", guard)
    seen: list[int] = []
    source = "def forward():\n    note()\n    return ()"
    noted = function("noted", source, note=lambda: seen.append(current[0]))
    made = program([Call("noted", (), ())], functions=[noted])
    with launch_cluster(1, device="cuda") as cluster:
        assert cluster.device == torch.device("cuda:1")
        handle = cluster.load(made)
        for now in (1, 0):
            current[0] = now
            cluster.run(handle, [{}]).get()
            assert current[0] == now
    assert seen == [1, 1]


@pytest.mark.gpu
def test_tensor_on_gpu_is_lent_without_copy() -> None:
    made = program(
        [Call("own", ("x",), ("y",))],
        functions=[function("own", "def forward(x):\n    return (x.data_ptr(),)")],
        inputs=[("x",)],
        outputs=[("y",)],
    )
    x = torch.ones(3, device="cuda")
    with launch_cluster(1, device="cuda") as cluster:
        assert cluster.run(cluster.load(made), [{"x": x}]).get() == [{"y": x.data_ptr()}]


def test_sum_is_left_fold_in_rank_order_with_float32_accumulation() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, 1.0, -1e8)]
    assert fold(parts, "sum").item() == 0.0  # a tree reduction would give 1 or 2
    assert fold(parts[::-1], "sum").item() == 1e8 - 1e8 + 0.0
    halves = [torch.tensor([1.0]).bfloat16(), *[torch.tensor([2**-9]).bfloat16()] * 4]
    assert fold(halves, "sum").item() == 1.0 + 2**-7  # in bf16 each addition would be lost


def _triples(x: torch.Tensor) -> torch.Tensor:
    """For each row of x: its maximum, the sum of exp(x - maximum), and a number to be summed."""
    top = x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -torch.inf)
    total = torch.where(x == top[:, None], 1.0, (x - top[:, None]).exp()).sum(1)
    return torch.stack((top, total * (top > -torch.inf), x.isfinite().sum(1)), 1)


def test_folded_softmax_triples_equal_triples_of_full_row() -> None:
    x = torch.randn(40, 12, dtype=torch.float64) * 30
    x[3], x[4, :6], x[5, 6:] = -torch.inf, -torch.inf, -torch.inf
    parts = [_triples(part) for part in (x[:, :6], x[:, :0], x[:, 6:7], x[:, 7:])]
    got, wanted = fold(parts, "softmax"), _triples(x)
    assert torch.equal(got[:, 0], wanted[:, 0]) and torch.isfinite(got[:, 1:]).all()
    assert torch.allclose(got[:, 1:], wanted[:, 1:], rtol=1e-13, atol=0)
    assert got[3].tolist() == [-torch.inf, 0, 0]
    none = torch.tensor([-torch.inf, 0, 0], dtype=x.dtype).expand(40, 3)
    for part in parts:
        assert same_bits(fold([none, part, none], "softmax"), part)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_folded_softmax_triples_keep_nan(bad: float) -> None:
    one, other = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[bad, torch.nan, 0.0]])
    for parts in ([one, other], [other, one], [other, other]):
        assert fold(parts, "softmax")[0, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_fold_in_pieces_is_bitwise_equal_to_whole_fold(dtype: torch.dtype) -> None:
    parts = [torch.randn(67, 3, dtype=dtype) * 20 for _ in range(3)]
    whole, unit = fold(parts, "softmax").reshape(-1), REDUCTIONS["softmax"].unit
    for cut in range(0, 67 * 3 + 1, unit):
        low, high = (
            fold([p.reshape(-1)[s] for p in parts], "softmax")
            for s in (slice(cut), slice(cut, None))
        )
        assert same_bits(torch.cat([low, high]), whole)


def test_free_instruction_drops_last_reference_to_value() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> tuple[torch.Tensor]:
        value = torch.ones(3)
        made.append(weakref.ref(value))
        return (value,)

    def check(x: torch.Tensor) -> tuple[()]:
        assert made[0]() is None
        return ()

    items = [Call("make", (), ("a",)), Free(("a",)), Free(("x",)), Call("check", ("k",), ())]
    functions = [Function.of(make, "make"), Function.of(check, "check")]
    with launch_cluster(1) as cluster:
        handle = cluster.load(program(items, functions=functions, inputs=[("x", "k")]))
        fed = [{"x": torch.ones(1), "k": torch.ones(1)}]
        cluster.run(handle, fed).get()
        made.clear()
        cluster.run(handle, fed).get()
        with pytest.raises(LookupError):
            cluster.get([("k",)]).get()
