"""Reductions under placements are as exact as torch's on one device, in each dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.api.reductions import BF16, CASES, DTYPES, F16, PLACED, errors


@pytest.mark.default(*list(CASES)[::2])
@pytest.mark.parametrize("name", CASES)
def test_reduction_is_as_exact_as_torch_in_16_bits(name: str) -> None:
    dtype = (BF16, F16)[list(CASES).index(name) % 2]
    found = errors(name, dtype, ["tp3"] if "column" not in name else ["columns"])
    assert not [e for e in found if not e.is_as_torch]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reductions_are_as_exact_as_torch_in_all_dtypes_and_placements(
    name: str, dtype: torch.dtype
) -> None:
    # torch's own kernel is less exact on strided tensors, as slices of channels are
    placed = [p for p in PLACED if (name, p) != ("batch_norm", "columns")]
    found = [e for seed in range(3) for e in errors(name, dtype, placed, seed)]
    assert not [e for e in found if not e.is_as_torch]


@pytest.mark.parametrize("placed", PLACED)
def test_float16_mean_does_not_overflow(placed: str) -> None:
    mesh, pins = PLACED[placed]
    mean = dt.compile(lambda x: (x.mean(), x.mean(0), torch.nn.functional.mse_loss(x, 0 * x)), mesh)
    x = torch.full((100, 6), 200.0, dtype=F16)
    with dt.implicit_redistribution("allow"):
        found = mean(dt.distribute(x, mesh, **pins))
    assert [one.full_tensor().tolist() for one in found[:2]] == [200, [200] * 6]
    assert found[2].full_tensor().item() == 40_000


# -- gradients of parameters -----------------------------------------------------------------------


class Scaled(nn.Module):
    """A model in which the gradients of bias and scale are sums over rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.bias = nn.Parameter(torch.randn(16, dtype=torch.float64, generator=generator))
        self.scale = nn.Parameter(torch.randn(16, dtype=torch.float64, generator=generator))
        self.to(BF16).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.scale


def apart(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(model(x), y)


TRAINED: dict[str, dict[str, Any]] = {
    "1": dict(mesh=dt.Mesh()),
    "dp2": dict(mesh=dt.Mesh(dp=2)),
    "dp3": dict(mesh=dt.Mesh(dp=3)),
    "zero 1": dict(mesh=dt.Mesh(dp=2), zero=1),
    "zero 3": dict(mesh=dt.Mesh(dp=2), zero=3),
    "2x2": dict(mesh=dt.Mesh(dp=2, rep=2)),
    "microbatches": dict(mesh=dt.Mesh(), schedule=dt.GPipe(5)),
    "dp2, microbatches": dict(mesh=dt.Mesh(dp=2), schedule=dt.GPipe(5)),
}


@pytest.mark.default("1-torch.bfloat16")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("placed", TRAINED)
def test_summed_gradients_loss_and_norm_are_as_exact_as_torch(
    placed: str, dtype: torch.dtype
) -> None:
    """Errors are combined over three batches."""
    case = dict(TRAINED[placed])
    mesh, zero, schedule = case["mesh"], case.get("zero"), case.get("schedule")
    model = Scaled(dtype)
    parallel = dt.parallelize(model, mesh, {}, zero={"dp": zero} if zero else None)
    inputs = {axis: dt.Row() for axis in mesh.shape}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = dt.train_step(
        parallel, apart, optimizer, inputs=inputs, schedule=schedule, clip_grad_norm=0.1
    )
    off: dict[str, list[float]] = {}
    with dt.launch(mesh):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, y = (torch.randn(60, 16, generator=generator).to(dtype) for _ in range(2))
            exact, plain = Scaled(torch.float64), Scaled(dtype)
            losses = [apart(exact, x.double(), y.double()), apart(plain, x, y)]
            for loss in losses:
                loss.backward()
            found = step.gradients(x, y)
            loss = step(x, y)
            norm = torch.stack([p.grad.norm() for p in exact.parameters() if p.grad is not None])
            assert loss.grad_norm == pytest.approx(
                norm.norm().item(), rel=2 * torch.finfo(dtype).eps
            )
            off.setdefault("loss", [0.0, 0.0])
            rows = [("loss", loss.tensor(), losses[1], losses[0])]
            rows += [
                (name, found[name], plain.get_parameter(name).grad, p.grad)
                for name, p in exact.named_parameters()
            ]
            for name, ours, theirs, right in rows:
                assert theirs is not None and right is not None
                sums = off.setdefault(name, [0.0, 0.0])
                for at, value in enumerate((ours, theirs)):
                    sums[at] += ((value.double() - right).norm() / right.norm()).item() ** 2
    for name, (ours, theirs) in off.items():
        least = 0.5 * torch.finfo(dtype).eps if name == "loss" else 0.0
        assert math.sqrt(ours / 3) <= max(1.2 * math.sqrt(theirs / 3), least), name


# -- plans -----------------------------------------------------------------------------------------


def test_partial_sums_of_bf16_are_sent_in_float32_and_rounded_once() -> None:
    """Over two axes: after the reduction over the first axis the value is still partial, and stays
    float32."""
    mesh = dt.Mesh(a=2, b=3)
    x = dt.distribute(torch.randn(12, 8).to(BF16), mesh, a=dt.Row(), b=dt.Row())
    plan = dt.compile(lambda x: x.sum(0), mesh).plan(x)
    specs = [str(spec) for name, spec in plan.value_specs().items() if name != "x"]
    assert specs == ["f32[8]{sum@a,sum@b}", "f32[8]{sum@b}", "bf16[8]"]
    # an all_reduce of 32 bytes: of 2 ranks each sends half of its part and half of the sum, of 3
    # two thirds of its part and two of the sum, which is of 16 bytes by then
    sent = [(c.kind, c.dtype, c.bytes_sent) for c in plan.collectives]
    assert sent == [("all_reduce", "float32", 32), ("all_reduce", "float32", 32)]


def test_linear_ops_on_partial_sums_use_float32_and_matmuls_bf16() -> None:
    mesh = dt.Mesh(a=2)
    x = dt.distribute(torch.randn(12, 4096).to(BF16), mesh, a=dt.Row())
    w = dt.distribute(torch.randn(4096, 2).to(BF16), mesh)

    def parts(function: Any, *args: Any) -> list[str]:
        plan = dt.compile(function, mesh, search="free").plan(*args)
        every = (str(spec) for spec in plan.value_specs().values())
        return [text for text in every if "{" in text]

    linear = parts(lambda x: x.sum(0) * 3 - x.mean(0), x)
    assert linear and {text.partition("[")[0] for text in linear} == {"f32"}
    product = parts(lambda x, w: x.sum(0, keepdim=True) @ w, x, w)
    assert product == ["bf16[1,4096]{sum@a}", "bf16[1,2]{sum@a}"]
