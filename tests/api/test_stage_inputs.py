"""Arguments that late stages use, or several: each stage is fed its own part by the controller."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.steps import Transfer
from tests.training import assert_gradients_close, gradients_of

D, VOCAB, ROWS, LENGTH = 8, 11, 8, 6
STAGES = {"pp": [["embed*", "one*"], ["two*"], ["place*", "head*"]]}


class Masked(nn.Module):
    """A mask for every layer, positions and a feature for the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.one, self.two, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, feature: Tensor) -> Tensor:
        keep = mask.to(feature.dtype).unsqueeze(-1)
        x = torch.tanh(self.one(self.embed(tokens))) * keep
        x = x + torch.tanh(self.two(x)) * keep
        return self.head(x + self.place(positions) + feature.unsqueeze(1))


def weighted(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    feature: Tensor,
    targets: Tensor,
) -> Tensor:
    """The targets, and the mask once more, count at the end."""
    logits = model(tokens, mask, positions, feature)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / (ROWS * LENGTH)


def given() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)

    def tokens(high: int) -> Tensor:
        return torch.randint(0, high, (ROWS, LENGTH), generator=generator)

    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
    feature = torch.randn(ROWS, D, generator=generator)
    return tokens(VOCAB), mask, tokens(LENGTH), feature, tokens(VOCAB)


def step_of(mesh: dt.Mesh) -> tuple[nn.Module, dt.TrainStep]:
    torch.manual_seed(0)
    module = Masked()
    model = dt.parallelize(module, mesh, {}, stages=STAGES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = dict(dp=dt.Row()) if "dp" in mesh.axes else None
    schedule = dt.OneFOneB(2)
    return module, dt.train_step(model, weighted, optimizer, inputs=inputs, schedule=schedule)


@pytest.mark.slow
def test_the_plan_feeds_each_stage_that_uses_it() -> None:
    _, step = step_of(dt.Mesh(pp=3, dp=2))
    plan = step.plan(*given())
    stages = {item.label: item.stages for item in plan.inputs if item.kind == "argument"}
    assert stages == {
        "tokens": (0,),
        "mask": (0, 1, 2),
        "positions": (2,),
        "feature": (2,),
        "targets": (2,),
    }
    crossing = [s for s in plan.steps if isinstance(s, Transfer)]
    # what the layers hand on, [8 6 8] by microbatch and dp, and its gradient: no argument
    assert [(s.stage, s.to_stage) for s in crossing] == [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert {s.spec.max_local_nbytes for s in crossing} == {ROWS // 4 * LENGTH * D * 4}
    specs = {i.label: str(i.spec) for i in plan.inputs if i.kind == "argument"}
    assert specs["mask"] == "bool[8@dp,6]"


@pytest.mark.parametrize("axes", [dict(pp=3), dict(pp=3, dp=2)])
def test_loss_and_gradients_are_plain_torchs(axes: dict[str, int]) -> None:
    mesh = dt.Mesh(**axes)
    module, step = step_of(mesh)
    plain = copy.deepcopy(module)
    with dt.launch(mesh):
        found = step.gradients(*given())
        loss = float(step(*given()))
    assert loss == pytest.approx(weighted(plain, *given()).item(), rel=1e-5)
    assert_gradients_close(found, gradients_of(plain, given(), weighted))


class Remembers(nn.Module):
    """A buffer that both stages read, written from what the last computes, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x) + self.mean + self.count) * (1 + self.count) - self.mean
        self.count.add_(1.0)
        self.mean.copy_(y.mean(0))
        return y


def test_a_buffer_that_several_stages_read_is_written_on_each() -> None:
    plain, x = Remembers(), torch.randn(3, 4)
    mesh = dt.Mesh(pp=2)
    stages = {"pp": [["one*"], ["two*"]]}
    model = dt.parallelize(copy.deepcopy(plain), mesh, {}, stages=stages)
    run = dt.compile(lambda m, x: m(x), mesh)
    kept = {i.label: i.stages for i in run.plan(model, x).inputs if i.kind == "buffer"}
    assert kept == {"mean": (0, 1), "count": (0, 1)}
    with dt.launch(mesh):
        for _ in range(3):
            torch.testing.assert_close(run(model, x).full_tensor(), plain(x).detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.ray
def test_ray_gives_the_bits_of_one_process(ray_session: None) -> None:
    mesh = dt.Mesh(pp=3)
    found: list[list[float]] = []
    for backend in ("inprocess", "ray"):
        _, step = step_of(mesh)
        with dt.launch(mesh, backend=backend):
            found.append([float(step(*given())) for _ in range(2)])
            dt.gather_state_dict(step.model)
    assert found[0] == found[1] and found[0][1] < found[0][0]
