"""Mixture-of-experts models of transformers: replicated, with experts split, and with their inner
dim split.

The grouped product of the experts is an op of transformers, which exists once transformers is
imported.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.sharding.local.grouped_matmul import grouped_mm, grouped_mm_backward
from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from tests.huggingface_sweep.judge import RATE, loss_fn, trainable
from tests.huggingface_sweep.record import Record

FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
EXPERTS: dict[str, Any] = {"*.experts.*": dict(tp=dt.Shard(0))}


@pytest.mark.slow
@pytest.mark.sample(*(f"{f}-experts" for f in FAMILIES), "olmoe-whole", "mixtral-derived")
@pytest.mark.parametrize("how", ["whole", "experts", "derived"])
@pytest.mark.parametrize("family", FAMILIES)
def test_moe_training_steps_match_torch(family: str, how: str) -> None:
    found = trainable(family, Record(family=family))
    assert found is not None
    model, batch, (losses, weights) = found
    pins = EXPERTS if how == "experts" else {}
    if how == "derived":
        pins = dt.placements.for_model(model, (), batch, size=2)
        (gate,) = {pins[p]["tp"] for p in pins if p.endswith("experts.gate_up_proj")}
        (down,) = {pins[p]["tp"] for p in pins if p.endswith("experts.down_proj")}
        assert (gate, down) == (dt.Shard(1, blocks=2), dt.Shard(2))
        assert 'experts.gate_up_proj": dict(tp=dt.Shard(1, blocks=2))' in str(pins)
    own = copy.deepcopy(model)
    placed = dt.parallelize(own, dt.Mesh(tp=2), pins)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    step = dt.train_step(placed, loss_fn, optimizer)
    with dt.launch(placed.mesh):
        assert [float(step(batch)) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
        state = dt.gather_state_dict(placed, optimizer)["model"]
    for name, expected in weights.items():
        scale = expected.abs().max().item()
        assert (state[name] - expected).abs().max() <= 1e-5 * max(scale, 1e-3), name


def test_grouped_mm_gives_zeros_for_experts_of_other_ranks() -> None:
    rows, experts = torch.randn(8, 4), torch.randn(3, 4, 8)
    stops = torch.tensor([3, 3, 7], dtype=torch.int32)
    whole = grouped_mm(rows, experts, stops, None)
    parts = [grouped_mm(rows, experts[g], stops, g) for g in ([0], [1, 2])]
    assert torch.equal(whole, sum(parts, torch.zeros(8, 8)))
    assert torch.equal(parts[0][3:], torch.zeros(5, 8))
    assert torch.allclose(whole[3:7], rows[3:7] @ experts[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_mm_rows_past_last_offset_are_zero(dtype: torch.dtype) -> None:
    """Torch's kernel leaves these rows uninitialized."""
    stops = torch.tensor([3, 5], dtype=torch.int32)
    rows, experts = torch.randn(8, 8, dtype=dtype), torch.randn(2, 8, 4, dtype=dtype)
    grad = torch.randn(8, 4, dtype=dtype)
    torch.full((8, 8), 777.0, dtype=dtype)  # freed: what a result may be made of
    assert torch.equal(grouped_mm(rows, experts, stops, None)[5:], torch.zeros(3, 4, dtype=dtype))
    of_rows, of_experts = grouped_mm_backward(rows, experts, stops, grad, None)
    assert torch.equal(of_rows[5:], torch.zeros(3, 8, dtype=dtype))
    assert torch.allclose(of_experts[1], rows[3:5].mT @ grad[3:5])
    columns = grouped_mm(rows.view(2, 4, 8), rows, stops, None)
    assert torch.equal(columns[:, 5:], torch.zeros(4, 3, dtype=dtype))


@pytest.mark.parametrize("stops", [[2, 9], [3, 2], [-1, 4]])
@pytest.mark.parametrize("groups", [None, [1]])
def test_grouped_mm_offsets_out_of_range_raise_index_error(
    stops: list[int], groups: list[int] | None
) -> None:
    """Torch's kernel would read out of bounds: on a CPU it returns garbage, on a GPU it may make
    the device unusable."""
    rows, experts = torch.randn(8, 8), torch.randn(2, 8, 8)
    held = experts if groups is None else experts[groups]
    given = torch.tensor(stops, dtype=torch.int32)
    for a, b in ((rows, held), (held, rows), (rows.t(), rows)):
        with pytest.raises(
            IndexError, match=re.escape(f"are in 0:8, the rows of all groups; got {stops}")
        ):
            grouped_mm(a, b, given, groups)
        right = grouped_mm(a, b, torch.tensor([2, 8], dtype=torch.int32), groups)
        assert right.isfinite().all()
