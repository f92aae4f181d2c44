"""A DTensor stores its shards on the ranks, and every redistribution keeps its value."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

import dtensor as dt

TP2 = dt.Mesh(tp=2)


def ints(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_dtensor_properties_and_shards_in_rank_order() -> None:
    x = dt.distribute(ints(5, 3), dt.Mesh(tp=3), tp=dt.Row())
    assert str(x.spec) == "f32[5@tp,3]"
    assert (x.shape, x.dtype, x.ndim, x.mesh) == ((5, 3), torch.float32, 2, dt.Mesh(tp=3))
    assert (x.size(), x.size(1), x.dim(), x.numel(), len(x)) == ((5, 3), 3, 2, 15, 5)
    assert [t.shape[0] for t in x.local_tensors()] == [2, 2, 1]
    assert torch.equal(torch.cat(x.local_tensors()), ints(5, 3))
    assert torch.equal(x.full_tensor(), ints(5, 3))


def test_partial_sum_has_full_value() -> None:
    x = dt.distribute(ints(4), TP2, tp=dt.Partial("sum"))
    assert str(x.spec) == "f32[4]{sum@tp}"
    assert torch.equal(x.full_tensor(), ints(4))
    assert torch.equal(x.redistribute(tp=dt.Row()).full_tensor(), ints(4))


@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (2, 3), (1, 1)], ids=str)
def test_redistribute_between_all_pairs_of_placements_keeps_value(shape: tuple[int, int]) -> None:
    """Over 3 ranks, with sizes that divide, sizes that do not, and sizes that leave ranks empty."""
    mesh = dt.Mesh(tp=3)
    placements = [dt.Replicate(), dt.Row(), dt.Column(), dt.Partial("sum")]
    if shape[0] > 2:
        placements += [dt.Row(blocks=(shape[0] - 2, 2)), dt.Column(blocks=shape[1])]
    x = ints(*shape)
    for src, dst in itertools.product(placements, placements):
        moved = dt.distribute(x, mesh, tp=src).redistribute(tp=dst)
        assert str(moved.spec) == str(dt.distribute(x, mesh, tp=dst).spec)
        assert torch.equal(moved.full_tensor(), x), f"{src} to {dst}"
        if not isinstance(dst, dt.Partial):
            direct = dt.distribute(x, mesh, tp=dst).local_tensors()
            for got, wanted in zip(moved.local_tensors(), direct, strict=True):
                assert torch.equal(got, wanted), f"{src} to {dst}"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.arange(6),
        torch.tensor([True, False, True]),
        torch.randn(4, dtype=torch.float64),
        torch.randn(4).bfloat16(),
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_distribute_keeps_values_of_all_dtypes_and_odd_shapes(tensor: torch.Tensor) -> None:
    x = dt.distribute(tensor, TP2, **({"tp": dt.Row()} if tensor.dim() else {}))
    assert torch.equal(x.full_tensor(), tensor) and x.full_tensor().dtype == tensor.dtype
    assert torch.equal(x.redistribute(tp=dt.Replicate()).full_tensor(), tensor)


def test_distribute_and_reads_copy_their_tensors() -> None:
    source = ints(4)
    x = dt.distribute(source, TP2)
    source.zero_()
    x.full_tensor().zero_()
    x.local_tensors()[0].zero_()
    assert torch.equal(x.full_tensor(), ints(4))


def test_scalar_dtensor_converts_to_float_and_larger_one_raises() -> None:
    x = dt.distribute(torch.tensor(2.5), TP2)
    assert float(x) == x.item() == 2.5
    with pytest.raises(ValueError, match="only one element tensors can be converted"):
        float(dt.distribute(ints(4), TP2))


def test_shards_of_deleted_dtensors_are_dropped() -> None:
    with dt.launch(TP2) as session:
        kept = dt.distribute(ints(4), TP2)
        for _ in range(5):
            dt.distribute(ints(4), TP2)
        gc.collect()
        kept.redistribute(tp=dt.Row())
        gc.collect()
        session.put([{"one": 1}, {"one": 1}])
        table = session.cluster._worker._table  # type: ignore[attr-defined]
        assert [name for _, name in table if name.startswith("tensor ")] == [kept.name] * 2


# -- what is refused -------------------------------------------------------------------------------


def test_unknown_attribute_raises_and_dtensor_is_hashable() -> None:
    x = dt.distribute(ints(4), TP2)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = x.nonsense
    assert {x: 1}[x] == 1


def test_dtensor_of_closed_launch_raises_when_used() -> None:
    with dt.launch(TP2):
        x = dt.distribute(ints(4), TP2)
    for use in (x.full_tensor, x.local_tensors):
        with pytest.raises(RuntimeError, match="the launch that this value belongs to has ended"):
            use()
    for op in (lambda: x.redistribute(tp=dt.Row()), lambda: x + 1, lambda: x[0].item()):
        with pytest.raises(RuntimeError, match="the launch that this value belongs to has ended"):
            op()
    assert repr(x) == "DTensor(f32[4], mesh(tp=2), values lost with their launch)"


def test_dtensors_of_two_launches_do_not_mix() -> None:
    outside = dt.distribute(ints(4), TP2)
    with dt.launch(TP2):
        inside = dt.distribute(ints(4), TP2)
        with pytest.raises(dt.PlanningError, match="belongs to another launch"):
            dt.compile(lambda a, b: a + b, TP2)(inside, outside)
        with pytest.raises(dt.PlanningError, match=r"running launch is on mesh\(tp=2\)"):
            dt.distribute(ints(4), dt.Mesh(tp=3))
        with pytest.raises(dt.PlanningError, match="a launch is running already"), dt.launch(TP2):
            pass
    assert torch.equal(outside.full_tensor(), ints(4))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (dict(dp=dt.Row()), "has no axis 'dp'; its axes are tp"),
        (dict(tp=dt.Shard(5)), r"Shard\(5\) names dim 5 of a tensor of shape \[4, 2\]"),
        (dict(tp=0), "tp=0 is not a placement"),
        (dict(tp=dt.Row(blocks=3)), "3"),
        (dict(tp=dt.Row(unit=3)), "3"),
    ],
)
def test_distribute_and_redistribute_reject_placements_that_do_not_fit(
    placements: Any, message: str
) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        dt.distribute(ints(4, 2), TP2, **placements)
    if "blocks" not in str(placements) and "unit" not in str(placements):
        with pytest.raises(dt.PlanningError):
            dt.distribute(ints(4, 2), TP2).redistribute(**placements)
