"""Batch norm with microbatches: `train_step(batch_norm="per_microbatch")` matches a plain torch
loop.

The torch loop runs forward and backward for each microbatch, weights each loss by the microbatch's
share of the batch, and takes one optimizer step. Running statistics and `num_batches_tracked` are
updated by each microbatch.
"""
# ruff: noqa: E501  (plans stand as they are printed)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from tests.training import assert_same_bits, sgd

ROWS = dict(dp=dt.Row())
STAGES = {"pp": [["a*", "bn.*", "mid*"], ["bn2*", "b.*"]]}
HALVES = {"a.weight": dict(tp=dt.Row()), "mid.weight": dict(tp=dt.Shard(1))}


class Net(nn.Module):
    """A model with two batch norms of different momenta; with ``twice`` the first is called
    twice."""

    def __init__(self, *, conv: bool = False, twice: bool = False, **norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.twice = conv, twice
        kind = nn.BatchNorm2d if conv else nn.BatchNorm1d
        self.a = nn.Conv2d(3, 6, 3, padding=1) if conv else nn.Linear(4, 6)
        self.bn = kind(6, **norm)
        self.mid = nn.Conv2d(6, 6, 1) if conv else nn.Linear(6, 6)
        self.bn2 = kind(6, momentum=0.3)
        self.b = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.bn(self.a(x)).relu())
        x = self.bn(x) if self.twice else x
        x = self.bn2(x).relu()
        return self.b(x.mean((2, 3)) if self.conv else x)


def data(seed: int, rows: int = 16, *, conv: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *((3, 4, 4) if conv else (4,)), generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    y[1] = -100
    return x, y


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=-100)


def microbatches(rows: int, ranks: int, num: int) -> list[Tensor]:
    """Return the rows of each microbatch: a chunk of every rank's rows."""
    pieces = [held.chunk(num) for held in torch.arange(rows).chunk(ranks)]
    return [torch.cat([piece[i] for piece in pieces]) for i in range(len(pieces[0]))]


def looped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor],
    parts: Sequence[Tensor],
    clip: float = 1.0,
) -> float:
    """Take one step of torch's loop over the microbatches ``parts``."""
    x, y = batch
    optimizer.zero_grad()
    total = 0.0
    for rows in parts:
        summed = F.cross_entropy(model(x[rows]), y[rows], ignore_index=-100, reduction="sum")
        loss = summed / (y != -100).sum()
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stages: Any = None
    schedule: dt.Schedule = field(default_factory=lambda: dt.GPipe(microbatches=4))
    zero: Mapping[str, int] | None = None
    recompute: Sequence[str] | None = None
    search: str = "predictable"

    def step(
        self, module: nn.Module, loss: Callable[..., Any] = loss_fn, **options: Any
    ) -> tuple[dt.ParallelModule, torch.optim.Optimizer, dt.TrainStep]:
        mesh = dt.Mesh(**self.axes)
        model = dt.parallelize(module, mesh, self.pins, stages=self.stages, zero=self.zero)
        optimizer = sgd(module)
        step = dt.train_step(
            model,
            loss,
            optimizer,
            inputs=ROWS if "dp" in self.axes else None,
            schedule=self.schedule,
            clip_grad_norm=1.0,
            recompute=self.recompute,
            search=self.search,
            **{"batch_norm": "per_microbatch", **options},
        )
        return model, optimizer, step


PLACED = {
    "single": Placed(),
    "dp2": Placed(axes=dict(dp=2)),
    "dp2 zero 3": Placed(axes=dict(dp=2), zero={"dp": 3}),
    "tp2": Placed(axes=dict(tp=2), pins=HALVES),
    "dp2 tp2": Placed(axes=dict(dp=2, tp=2), pins=HALVES),
    "dp2 whole": Placed(axes=dict(dp=2), schedule=dt.GPipe(1)),
    "recompute": Placed(axes=dict(dp=2), recompute=["bn", "bn2"]),
    "pp2 1F1B": Placed(axes=dict(pp=2), stages=STAGES, schedule=dt.OneFOneB(4)),
    "pp2 GPipe": Placed(axes=dict(pp=2), stages=STAGES, schedule=dt.GPipe(4)),
    "pp2 dp2 ZBH1": Placed(axes=dict(pp=2, dp=2), stages=STAGES, schedule=dt.ZBH1(4)),
    "pp2 auto": Placed(axes=dict(pp=2), stages="auto", schedule=dt.OneFOneB(2)),
}


def train(
    placed: Placed, make: Callable[[], nn.Module], batches: Sequence[Sequence[Tensor]]
) -> tuple[list[float], dict[str, Any]]:
    model, optimizer, step = placed.step(make())
    with dt.launch(model.mesh):
        losses = [float(step(*one)) for one in batches]
        return losses, dt.gather_state_dict(model, optimizer)


def compare(
    placed: Placed, make: Callable[[], nn.Module], batches: Sequence[Sequence[Tensor]]
) -> None:
    expected = make()
    optimizer = sgd(expected)
    ranks, num = placed.axes.get("dp", 1), placed.schedule.microbatches
    losses = [
        looped(expected, optimizer, one, microbatches(len(one[0]), ranks, num)) for one in batches
    ]
    found, state = train(placed, make, batches)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["model"], expected.state_dict(), rtol=1e-5, atol=2e-6)


@pytest.mark.default("dp2 whole")
@pytest.mark.parametrize("name", PLACED)
def test_batch_norm_1d_matches_torch_loop_over_microbatches(name: str) -> None:
    compare(PLACED[name], Net, [data(seed) for seed in range(3)])


@pytest.mark.default("pp2 1F1B")
@pytest.mark.parametrize("name", ["single", "dp2 tp2", "pp2 1F1B"])
def test_batch_norm_2d_matches_torch_loop_over_microbatches(name: str) -> None:
    batches = [data(seed, conv=True) for seed in range(2)]
    compare(PLACED[name], lambda: Net(conv=True), batches)


@pytest.mark.default("momentum 1-dp2")
@pytest.mark.parametrize("name", ["dp2"])
@pytest.mark.parametrize(
    "norm",
    [dict(affine=False), dict(track_running_stats=False), dict(momentum=1.0), dict(momentum=0.0)],
    ids=["no weights", "no running statistics", "momentum 1", "momentum 0"],
)
def test_batch_norm_options_match_torch_loop(name: str, norm: dict[str, Any]) -> None:
    compare(PLACED[name], lambda: Net(**norm), [data(seed) for seed in range(3)])


@pytest.mark.default("single")
@pytest.mark.parametrize("name", ["single", "dp2", "dp2 tp2"])
def test_batch_norm_called_twice_updates_statistics_in_torch_order(name: str) -> None:
    compare(PLACED[name], lambda: Net(twice=True), [data(seed) for seed in range(3)])


@pytest.mark.slow
def test_all_schedules_give_bitwise_equal_running_statistics() -> None:
    batches = [data(seed) for seed in range(2)]
    first = train(PLACED["pp2 1F1B"], Net, batches)
    for schedule in (dt.GPipe(4), dt.ZBH1(4), dt.LoopedBFS(4)):
        other = Placed(axes=dict(pp=2), stages=STAGES, schedule=schedule)
        assert_same_bits(train(other, Net, batches), first)


@pytest.mark.slow
def test_batch_norm_with_varying_batch_sizes_and_evaluation_matches_torch() -> None:
    """With 4 microbatches, a batch of 2 rows would give microbatches of one row, which torch
    refuses too; a batch of 3 rows has 3 microbatches."""
    batches = [data(0, 16, conv=True), data(1, 8, conv=True), data(2, 3, conv=True)]
    expected = Net(conv=True)
    optimizer = sgd(expected)
    model, ours, step = PLACED["single"].step(Net(conv=True))
    evaluate = dt.compile(lambda model, x: model(x), model.mesh)
    with dt.launch(model.mesh):
        for one in batches:
            loss = looped(expected, optimizer, one, microbatches(len(one[0]), 1, 4))
            assert float(step(*one)) == pytest.approx(loss, rel=1e-5)
            for net in (model, expected):
                net.eval()
            torch.testing.assert_close(
                evaluate(model, one[0]).full_tensor(), expected(one[0]), rtol=1e-4, atol=1e-5
            )
            for net in (model, expected):
                net.train()
        dt.gather_state_dict(model, ours)


def test_batch_norm_in_eval_mode_uses_running_statistics_without_option() -> None:
    """In eval mode batch norm does not mix rows of the batch, so the `batch_norm` option is not
    needed and changes nothing."""

    def frozen() -> nn.Module:
        module = Net()
        module.bn.eval()
        module.bn2.eval()
        return module

    compare(PLACED["dp2"], frozen, [data(0)])
    plan = PLACED["dp2"].step(frozen(), batch_norm="whole_batch")[2].plan(*data(0))
    assert str(plan) == str(PLACED["dp2"].step(frozen())[2].plan(*data(0)))
    assert "batch norm" not in str(plan)


@pytest.mark.default("dp2 whole")
@pytest.mark.parametrize("name", ["single", "dp2", "dp2 whole"])
def test_batch_norm_under_bf16_autocast_matches_torch(name: str) -> None:
    """Batch statistics and running statistics of bf16 inputs are float32."""

    class Narrow(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
            return y.float()

    expected = Narrow()
    placed = PLACED[name]
    parts = microbatches(16, placed.axes.get("dp", 1), placed.schedule.microbatches)
    losses = [looped(expected, sgd(expected), data(0), parts)]
    found, state = train(PLACED[name], Narrow, [data(0)])
    assert found == pytest.approx(losses, rel=2e-2)
    for norm in ("running_mean", "running_var", "num_batches_tracked"):
        wanted = expected.state_dict()[f"bn.{norm}"]
        torch.testing.assert_close(state["model"][f"bn.{norm}"], wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.default("dp2 whole")
@pytest.mark.parametrize("name", ["single", "dp2", "dp2 whole"])
def test_bfloat16_running_statistics_match_torch(name: str) -> None:
    def narrow() -> nn.Module:
        return Net().bfloat16()

    x, y = data(0)
    placed = PLACED[name]
    found, state = train(placed, narrow, [(x.bfloat16(), y)])
    expected = narrow()
    parts = microbatches(16, placed.axes.get("dp", 1), placed.schedule.microbatches)
    losses = [looped(expected, sgd(expected), (x.bfloat16(), y), parts)]
    assert found == pytest.approx(losses, rel=2e-2)
    mean, wanted = state["model"]["bn.running_mean"], expected.state_dict()["bn.running_mean"]
    assert mean.dtype == torch.bfloat16
    torch.testing.assert_close(mean, wanted, rtol=5e-2, atol=5e-3)


# -- what is said ----------------------------------------------------------------------------------


def test_plan_text_names_batch_norms_and_their_statistics() -> None:
    text = str(PLACED["dp2"].step(Net())[2].plan(*data(0)))
    assert_expected_inline(
        "\n".join(text.splitlines()[:3]),
        """\
plan loss_fn    mesh(dp=2)    4 microbatches (axis mb, in time)    stage 0 of 1    all ranks identical
axis dp    splits x dim 0 (16); opened by x
batch norm  statistics of each microbatch, running ones move 4 times a step: bn, bn2""",
    )


def refused(placed: Placed, *batch: Tensor, module: nn.Module | None = None, **options: Any) -> str:
    with pytest.raises(dt.PlanningError) as caught:
        placed.step(module or Net(), **options)[2].plan(*batch)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


@pytest.mark.slow
def test_batch_norm_over_microbatches_without_option_is_refused_with_fix() -> None:
    text = refused(PLACED["single"], *data(0), batch_norm="whole_batch")
    assert "_native_batch_norm_legit_functional.default mixes rows of the batch" in text
    assert 'fix: train_step(..., batch_norm="per_microbatch")' in text
    assert_expected_inline(
        refused(PLACED["dp2"], *data(0, 20)),
        """\
batch_norm="per_microbatch" takes microbatches of one size.
  add: f32[20,6], its rows in 4 microbatches: 6, 6, 6, 2
  test_batch_norm.py:N: x = self.mid(self.bn(self.a(x)).relu())
fix: microbatches=2, or a batch that is a multiple of 8, as with DataLoader(drop_last=True)""",
    )
    two = Placed(axes=dict(dp=2), schedule=dt.GPipe(microbatches=2))
    two.step(Net())[2].plan(*data(0, 20))  # the fix
    assert_expected_inline(
        refused(PLACED["single"], *data(0, 4)),
        """\
a batch norm in training needs more than one value of each channel.
  add: f32[4,6], its rows in 4 microbatches: 1, 1, 1, 1
  test_batch_norm.py:N: x = self.mid(self.bn(self.a(x)).relu())
fix: microbatches=2, or a larger batch""",
    )
    with pytest.raises(dt.PlanningError, match="batch_norm='mean': it is"):
        PLACED["single"].step(Net(), batch_norm="mean")


def test_per_microbatch_option_does_not_allow_other_ops_that_mix_rows() -> None:
    def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z @ z.T, torch.arange(z.shape[0]))

    text = refused(PLACED["single"], *data(0), loss=contrastive)
    assert "aten.mm.default mixes rows of the batch" in text

    class Reading(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + self.bn.running_mean.mean()  # type: ignore[union-attr]

    text = refused(PLACED["single"], *data(0), module=Reading())
    assert "running statistics of a batch norm are read in the forward that moves them" in text


def test_buffer_summed_over_microbatches_equals_whole_batch_sum() -> None:

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.w(x)
            self.get_buffer("mean").mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.get_buffer("steps").add_(1)
            return y

    expected = Summing()
    optimizer = sgd(expected)
    for seed in range(3):
        optimizer.zero_grad()
        loss_fn(expected, *data(seed, 9)).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    for name in ("single", "dp2"):
        _, state = train(PLACED[name], Summing, [data(seed, 9) for seed in range(3)])
        torch.testing.assert_close(state["model"], expected.state_dict(), rtol=1e-5, atol=1e-6)
