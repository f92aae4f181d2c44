"""float16 training with torch's GradScaler: scale, skipped steps and weights equal those of torch's
loop."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.errors import PlanningError
from tests.training import Placed, Run, Stated, gradients_of

F16 = torch.float16


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", dtype=F16):
        out = model(x)
    error = out.float() - y
    return error.square().mean(), {"absolute": error.abs().mean()}


def data(num: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=made), torch.randn(8, 4, generator=made)) for _ in range(num)
    ]


LARGE, SMALL = 2.0**22, 2.0**10
"""The first is too large for the first steps; where the batch is cut, parts of sums in float16
overflow at another scale than the whole, so only the second has torch's own scales."""


def scaler(scale: float = LARGE) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


def in_torch(batches: list[tuple[Tensor, Tensor]], scale: float, clip: float | None) -> Any:
    model, scaling = net(), scaler(scale)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, scales = [], []
    for x, y in batches:
        opt.zero_grad()
        loss, _ = loss_fn(model, x, y)
        scaling.scale(loss).backward()
        if clip is not None:
            scaling.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaling.step(opt)
        scaling.update()
        losses.append(loss.item())
        scales.append(scaling.get_scale())
    return model, losses, scales, scaling


def step_of(
    mesh: dt.Mesh, scaling: torch.amp.GradScaler | None, zero: int = 0, **options: Any
) -> tuple[nn.Module, dt.TrainStep]:
    pins: dict[str, Stated] = {"0.weight": dict(tp=dt.Row()), "2.weight": dict(tp=dt.Column())}
    placed = Placed(
        axes=mesh.shape,
        pins=pins if "tp" in mesh.shape else {},
        stages={"pp": [["0*"], ["[2-4]*"]]} if "pp" in mesh.shape else None,
        inputs=dict(dp=dt.Row()) if "dp" in mesh.shape else None,
    )
    given = {"schedule": dt.GPipe(1), "clip": options.pop("clip_grad_norm", None), **options}
    stored = {"dp": zero} if zero else None
    run = Run.of(placed, module=net(), loss=loss_fn, zero=stored, grad_scaler=scaling, **given)
    return run.module, run.step


CASES: list[tuple[dt.Mesh, float, dict[str, Any]]] = [
    (dt.Mesh(), LARGE, {}),
    (dt.Mesh(), LARGE, {"clip_grad_norm": 0.5}),
    (dt.Mesh(dp=2), SMALL, {"zero": 3}),
    (dt.Mesh(tp=2), LARGE, {}),
    (dt.Mesh(pp=2), SMALL, {"schedule": dt.OneFOneB(microbatches=2), "clip_grad_norm": 0.5}),
]


@pytest.mark.default("mesh0-4194304.0-options0")
@pytest.mark.parametrize(("mesh", "scale", "options"), CASES)
def test_grad_scaler_scales_losses_and_weights_match_torch(
    mesh: dt.Mesh, scale: float, options: dict[str, Any]
) -> None:
    batches = data(14)
    batches[7][1][0, 0] = math.inf  # skipped at every scale
    clip = options.get("clip_grad_norm")
    plain, losses, scales, theirs = in_torch(batches, scale, clip)
    scaling = scaler(scale)
    module, step = step_of(mesh, scaling, **dict(options))
    found, moved, skipped = [], [], []
    with dt.launch(mesh):
        for x, y in batches:
            loss = step(x, y)
            found.append(float(loss))
            moved.append(scaling.get_scale())
            skipped.append(loss.skipped)
            assert loss.metrics.keys() == {"absolute"}
            assert (loss.grad_norm is None) == loss.skipped
    assert moved == scales
    assert {True, False} == set(skipped)
    assert scaling.state_dict() == theirs.state_dict()
    for ours, torchs, was_skipped in zip(found, losses, skipped, strict=True):
        assert math.isnan(ours) if was_skipped else ours == pytest.approx(torchs, rel=2e-3)
    for ours, torchs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-3)


def test_gradients_with_grad_scaler_are_unscaled() -> None:
    (x, y), *_ = data(1)
    exact = gradients_of(net(), (x, y), loss_fn)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, step = step_of(dt.Mesh(dp=2), scaling, keep_gradients=True)
    with dt.launch(dt.Mesh(dp=2)):
        asked = step.gradients(x, y)
        loss = step(x, y)
        norm = loss.grad_norm
        state = scaling.state_dict()  # another than that of the gradients which are kept
        scaling.load_state_dict({**state, "scale": 4096.0})
        kept = step.gradients()
    for name, gradient in exact.items():
        for ours in (asked[name], kept[name]):
            torch.testing.assert_close(ours, gradient, rtol=0, atol=2e-3)
    squares = sum(float(g.square().sum()) for g in exact.values())
    assert norm == pytest.approx(math.sqrt(squares), rel=2e-3)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.seen += 1
        drop = nn.functional.dropout(x * self.weight, 0.5)
        return (drop * nn.functional.embedding(ids, torch.ones(4, 1))).square().mean()


def test_skipped_step_is_not_committed_and_failed_step_keeps_scale() -> None:
    module = Counting()
    model = dt.parallelize(module, dt.Mesh(dp=2))
    opt = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaling = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    step = dt.train_step(
        model, lambda m, x, i: m(x, i), opt, inputs=dict(dp=dt.Row()), grad_scaler=scaling
    )
    x, ids = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    with dt.launch(dt.Mesh(dp=2)):
        step(x, ids).tensor()
        before = dt.gather_state_dict(model, opt)
        state = scaling.state_dict()
        assert state["_growth_tracker"] == 1
        lost = step(x, ids + 9)  # out of range
        with pytest.raises(TaskError):
            float(lost)
        assert scaling.state_dict() == state and not lost.skipped
        skipped = step(x * math.inf, ids)
        assert math.isnan(float(skipped)) and skipped.skipped
        assert scaling.get_scale() == 2.0 and scaling.state_dict()["_growth_tracker"] == 0
        after = dt.gather_state_dict(model, opt)
        last = float(step(x, ids))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert float(module.seen) == 2
    assert math.isfinite(last)


@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def test_unread_skipped_step_raises_nothing(backend: Any) -> None:
    scaling = scaler(SMALL)
    (x, y), (u, v) = data(2)
    module, step = step_of(dt.Mesh(dp=2), scaling)
    with dt.launch(dt.Mesh(dp=2), backend=backend):
        step(x, y * math.inf)
        second = step(x, y)  # by the scale that the first has left
        norm = second.grad_norm
        step(u, v * math.inf)
    assert scaling.get_scale() == SMALL / 4
    plain = net()
    opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loss_fn(plain, x, y)[0].backward()
    squares = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    assert norm == pytest.approx(math.sqrt(squares), rel=2e-3)
    opt.step()
    for ours, torchs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-3)


def test_plan_with_grad_scaler_lists_unscaled_norm() -> None:
    scaling = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, step = step_of(dt.Mesh(), scaling)
    (x, y), *_ = data(1)
    text = str(step.plan(x, y))
    assert "norm(6 gradients), unscaled" in text
    assert "clipped" not in text
    assert "on GPUs, the host launches a step after the step before has ended" in text


def test_invalid_or_disabled_grad_scaler_is_refused() -> None:
    with pytest.raises(PlanningError, match="grad_scaler"):
        step_of(dt.Mesh(), True)  # type: ignore[arg-type]
    _, step = step_of(dt.Mesh(), torch.amp.GradScaler("cpu", enabled=False))
    assert step.options.grad_scaler is None
    with pytest.raises(PlanningError, match="detect_nan fails a step"):
        step_of(dt.Mesh(), scaler(), detect_nan=True)
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU, and leaves it on")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it switches it off
        off = torch.amp.GradScaler()
    with pytest.raises(PlanningError, match="grad_scaler is switched off"):
        step_of(dt.Mesh(), off)
