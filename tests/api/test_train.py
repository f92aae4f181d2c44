"""Training under six placements gives the losses and gradients of plain torch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, Llama, batch, loss_fn
from tests.plans import LLAMA
from tests.training import (
    MEGATRON,
    SIX,
    TWO_STAGES,
    MakeOptimizer,
    Placed,
    Run,
    adamw,
    assert_gradients_close,
    assert_losses_close,
    batches,
    gradients_of,
    make_model,
    sgd,
    train_torch,
)

Data = list[tuple[Tensor, Tensor]]


def expected_losses(
    data: Data, make: MakeOptimizer, clip: float | None = 1.0, **options: Any
) -> list[float]:
    model = make_model(**options)
    return train_torch(model, make(model), data, clip=clip)


# -- gradients of one step -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("placed", SIX)
def test_gradients_and_twenty_steps(placed: str, tied: bool) -> None:
    """Tied: AdamW, 1F1B of 2; untied: SGD with momentum, GPipe of 4 (1 per rank where dp=2)."""
    make = adamw if tied else sgd
    schedule = dt.OneFOneB(microbatches=2) if tied else dt.GPipe(4 // SIX[placed].axes.get("dp", 1))
    data = batches(4) * 5
    run = Run.of(placed, module=make_model(tied=tied), make=make, schedule=schedule)
    with dt.launch(run.mesh):
        found = run.step.gradients(*data[0])
        losses = run.losses(data)
        run.state()
    assert_gradients_close(found, gradients_of(make_model(tied=tied), data[0]))
    expected = expected_losses(data, make, tied=tied)
    assert_losses_close(losses, expected)
    assert 1.0 < expected[0] < 4.0 and expected[-1] < expected[0] - 0.5


def test_the_comparison_sees_any_one_gradient_doubled() -> None:
    expected = gradients_of(make_model(), batch())
    for name in expected:
        planted = {n: 2 * g if n == name else g for n, g in expected.items()}
        with pytest.raises(AssertionError, match=name.replace(".", r"\.")):
            assert_gradients_close(planted, expected)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["enable_gqa", "repeat"])
def test_llama_with_grouped_heads(spread: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Llama(spread=spread)

    data = batches(3) * 2
    where = Placed(axes=dict(tp=2), pins=LLAMA)
    run = Run.of(where, module=build())
    with dt.launch(run.mesh):
        found = run.step.gradients(*data[0])
        losses = run.losses(data)
        run.state()
    assert_gradients_close(found, gradients_of(build(), data[0]))
    plain = build()
    assert_losses_close(losses, train_torch(plain, adamw(plain), data, clip=1.0))


# -- schedules, ignored targets, schedulers ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "schedule"),
    [
        ("single", dt.GPipe(4)),
        ("dp2", dt.GPipe(1)),
        ("dp2", dt.OneFOneB(2)),
        ("pp2", dt.OneFOneB(4)),
        ("tp2_pp2", dt.GPipe(2)),
        ("dp2_tp2", dt.OneFOneB(2)),
    ],
    ids=str,
)
def test_ignored_targets_are_counted_over_the_whole_batch(
    placed: str, schedule: dt.Schedule
) -> None:
    data = batches(3, ignored=True)
    counts = (data[0][1] == -100).sum(1).tolist()
    assert len(set(counts)) > 2  # otherwise a mean of means would be right
    assert sum(counts[:2]) != sum(counts[2:])
    run = Run.of(placed, schedule=schedule)
    with dt.launch(run.mesh):
        found = run.step.gradients(*data[0])
        losses = run.losses(data)
        run.state()
    assert_gradients_close(found, gradients_of(make_model(), data[0]))
    assert_losses_close(losses, expected_losses(data, adamw))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only, own options for norms and biases; all groups on all stages."""
    named = list(model.named_parameters())
    biases = [p for n, p in named if p.dim() == 1 and "norm" not in n]
    return torch.optim.AdamW(
        [
            dict(params=[p for _, p in named if p.dim() > 1], weight_decay=0.1),
            dict(params=[p for n, p in named if p.dim() == 1 and "norm" in n], lr=3e-2),
            dict(params=biases, betas=(0.8, 0.9)),
        ],
        lr=1e-2,
        weight_decay=0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["dp2_tp2", "tp2_pp2"])
def test_parameter_groups_and_a_scheduler(placed: str) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (i + 1) / 4 if i < 4 else 0.5)

    data = batches(3) * 3
    plain = make_model()
    optimizer = grouped(plain)
    expected = train_torch(plain, optimizer, data, clip=1.0, scheduler=scheduler(optimizer))
    run = Run.of(placed, make=grouped)
    schedule = scheduler(run.optimizer)
    losses: list[dt.Loss] = []
    with dt.launch(run.mesh):
        for one in data:
            losses.append(run.step(*one))
            schedule.step()
        found = [float(loss) for loss in losses]
        run.state()
    assert_losses_close(found, expected)
    constant = expected_losses(data, grouped)
    assert abs(expected[-1] - constant[-1]) > 1e-3  # the scheduler matters


def test_the_learning_rate_is_read_at_each_step() -> None:
    data = batches(1) * 3
    run = Run.of("tp2", make=sgd)
    with dt.launch(run.mesh):
        float(run.step(*data[0]))
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        second, third = run.losses(data[1:])
        run.state()
    assert second == third


# -- norm and metrics ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("placed", SIX)
def test_metrics_and_the_norm_come_with_the_loss(placed: str) -> None:
    one = batch()
    run = Run.of(placed)
    with dt.launch(run.mesh):
        loss = run.step(*one)
        metrics, norm = loss.metrics, loss.grad_norm
        run.state()
    plain = make_model()
    value, expected = loss_fn(plain, *one)
    value.backward()
    torch_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    assert metrics == pytest.approx({"accuracy": expected["accuracy"].item()}, abs=1e-7)
    assert norm == pytest.approx(torch_norm, rel=1e-5)
    assert torch_norm > 1.0  # it clips
    assert f"{loss:.3f}" == f"{value.item():.3f}"


class Affine(nn.Module):
    def __init__(self, dtype: torch.dtype, of_bias: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 6, dtype=dtype, generator=generator))
        self.bias = nn.Parameter(torch.randn(6, dtype=of_bias, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def spread(model: nn.Module, x: Tensor) -> Tensor:
    """Of complex parameters the gradients are purely imaginary."""
    y = model(x)
    return (y.imag if y.is_complex() else y).square().mean()


C64, C128, F32, F64 = torch.complex64, torch.complex128, torch.float32, torch.float64


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize(
    ("dtype", "of_bias"), [(C64, C64), (C128, C128), (F64, F64), (F64, F32), (F32, F32)]
)
@pytest.mark.parametrize("axes", [{}, dict(dp=2), pytest.param(dict(dp=2, tp=3), id="dp2_tp3")])
def test_clipping_is_torchs_in_every_dtype(
    axes: dict[str, int], dtype: torch.dtype, of_bias: torch.dtype, make: MakeOptimizer
) -> None:
    """Of complex gradients it takes the absolute values; of float64 it computes in float64."""
    torch.manual_seed(1)
    data = [(torch.randn(6, 8, dtype=torch.float64).to(dtype),) for _ in range(3)]
    pins = {"weight": dict(tp=dt.Column())} if "tp" in axes else {}
    placed = Placed(axes=axes, pins=pins, inputs=dict(dp=dt.Row()) if axes else None)
    run = Run.of(placed, module=Affine(dtype, of_bias), make=make, loss=spread, clip=0.1)
    with dt.launch(run.mesh):
        norms = [run.step(*one).grad_norm for one in data]
        found = run.state()["model"]
    plain = Affine(dtype, of_bias)
    optimizer = make(plain)
    close = 1e-15 if torch.finfo(dtype).bits == 64 and dtype == of_bias else 1e-6
    for one, norm in zip(data, norms, strict=True):
        optimizer.zero_grad()
        spread(plain, *one).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        assert expected > 0.1  # it clips
        assert norm == pytest.approx(expected, rel=close)
        optimizer.step()
    for name, value in plain.state_dict().items():
        exact = torch.finfo(value.dtype).bits == 64 and dtype == of_bias
        near = (1e-15 if exact else 1e-6) * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=0, atol=near)


def test_the_norm_is_over_what_the_optimizer_has() -> None:
    model = Affine(F32, F32)
    placed = dt.parallelize(model, dt.Mesh(), {})
    step = dt.train_step(placed, spread, torch.optim.SGD([model.bias], lr=0.1), clip_grad_norm=0.1)
    x = torch.ones(4, 8)
    with dt.launch(dt.Mesh()):
        norm = step(x).grad_norm
    plain = Affine(F32, F32)
    spread(plain, x).backward()
    assert plain.bias.grad is not None and plain.weight.grad is not None
    assert norm == pytest.approx(plain.bias.grad.norm().item(), rel=1e-6)


def test_without_clipping_there_is_no_norm() -> None:
    data = batches(3)
    run = Run.of("tp2_pp2", clip=None)
    with dt.launch(run.mesh):
        loss = run.step(*data[0])
        assert loss.grad_norm is None
        losses = [float(loss), *run.losses(data[1:])]
        run.state()
    assert_losses_close(losses, expected_losses(data, adamw, clip=None))


# -- what is trained -------------------------------------------------------------------------------


class Skip(nn.Module):
    """The first stage's activation, and the input, are used on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        g = self.b(h).tanh()
        return self.c(g).tanh() + h + x


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def pairs(count: int, rows: int = 8) -> Data:
    return [(torch.randn(rows, 8), torch.randn(rows, 8)) for _ in range(count)]


def compare(
    where: Placed, build: Any, data: Data, make: MakeOptimizer = adamw, **options: Any
) -> dict[str, Tensor]:
    """Trains both ways and compares losses and final values; the gathered values."""
    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    run = Run.of(where, module=build(), make=make, loss=squares, clip=None, **options)
    expected = train_torch(plain, make(plain), data, loss=squares)
    with dt.launch(run.mesh):
        losses = run.losses(data)
        values = run.state()["model"]
    assert_losses_close(losses, expected)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    return values


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(1, dt.GPipe(4)), (3, dt.GPipe(1)), (3, dt.GPipe(4)), (3, dt.OneFOneB(4))],
    ids=str,
)
def test_a_skip_over_stages(ranks: int, schedule: dt.Schedule) -> None:
    stages = {"pp": [["a.*"], ["b.*"], ["c.*"]]}
    compare(Placed(axes=dict(pp=ranks), stages=stages), Skip, pairs(4), schedule=schedule)


def test_frozen_parameters_keep_their_values() -> None:
    def frozen() -> nn.Module:
        model = Skip()
        model.b.weight.requires_grad_(False)
        return model

    where = Placed(axes=dict(tp=2), pins={"*.weight": dict(tp=dt.Row())})
    before = (torch.manual_seed(1), frozen().b.weight.detach().clone())[1]
    values = compare(where, frozen, pairs(3))
    assert torch.equal(values["b.weight"], before)


def test_parameters_outside_the_optimizer_keep_their_values() -> None:
    def only_a(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.a.parameters(), lr=0.1)  # type: ignore[union-attr]

    where = Placed(axes=dict(tp=2), pins={"*.weight": dict(tp=dt.Column())})
    before = (torch.manual_seed(1), Skip())[1]
    values = compare(where, Skip, pairs(3), only_a)
    assert torch.equal(values["c.weight"], before.c.weight)
    assert not torch.equal(values["a.weight"], before.a.weight)


@pytest.mark.slow
def test_a_parameter_that_is_unfrozen_later() -> None:
    """The optimizer on the shards takes it up, and keeps the state of the others."""
    data = pairs(6)
    results: list[list[float]] = []
    for parallel in (False, True):
        torch.manual_seed(1)
        model = Skip()
        model.b.requires_grad_(False)
        if not parallel:
            optimizer = adamw(model)
            losses = train_torch(model, optimizer, data[:3], loss=squares)
            model.b.requires_grad_(True)
            results.append(losses + train_torch(model, optimizer, data[3:], loss=squares))
            continue
        where = Placed(axes=dict(tp=2), pins={"*.weight": dict(tp=dt.Row())})
        run = Run.of(where, module=model, loss=squares, clip=None)
        with dt.launch(run.mesh):
            losses = run.losses(data[:3])
            model.b.requires_grad_(True)
            results.append(losses + run.losses(data[3:]))
            run.state()
    assert_losses_close(results[1], results[0])


class Counting(nn.Module):
    """Buffers that forward changes: a counter, and a running mean in training."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.a(x) - self.mean


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_forward_changes_are_state(ranks: int) -> None:
    where = Placed(axes=dict(dp=ranks), inputs=dict(dp=dt.Row()))
    values = compare(where, Counting, pairs(4), schedule=dt.GPipe(1))
    assert values["seen"].item() == 4


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "NAdam", "Adamax", "Rprop"])
def test_other_elementwise_optimizers(kind: str) -> None:
    where = Placed(axes=dict(tp=2), pins={"*.weight": dict(tp=dt.Row())})
    compare(where, Skip, pairs(4), lambda m: getattr(torch.optim, kind)(m.parameters(), lr=1e-2))


def test_stages_and_the_tied_table_of_the_megatron_pins() -> None:
    """The head is on the last stage and the table on the first: one parameter, one gradient."""
    run = Run.of(Placed(axes=dict(pp=2, tp=2), pins=MEGATRON, stages=TWO_STAGES))
    ties = [c for c in run.step.plan(*batch()).collectives if "tied" in c.name]
    assert sorted((c.kind, c.stage) for c in ties) == [("all_reduce", 0), ("all_reduce", 1)]


class Scaled(GPT):
    """A GPT whose head shares the embedding, with a fourth stage behind it."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.last = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.last


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_tied_between_stages_of_one_rank(ranks: int) -> None:
    data = batches(3)
    torch.manual_seed(0)
    model = Scaled()
    expected = train_torch(model, torch.optim.SGD(model.parameters(), lr=1e-2), data, clip=1.0)
    torch.manual_seed(0)
    mesh = dt.Mesh(pp=ranks)
    model = Scaled()
    stages = {"pp": [["embed*", "positions*"], ["blocks*"], ["norm*", "head*"], ["last"]]}
    placed = dt.parallelize(model, mesh, {}, stages=stages)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = dt.train_step(
        placed, loss_fn, opt, schedule=dt.GPipe(microbatches=2), clip_grad_norm=1.0
    )
    with dt.launch(mesh):
        assert_losses_close([float(step(*one)) for one in data], expected)
        dt.gather_state_dict(placed, opt)


@pytest.mark.slow
def test_the_gradients_of_the_last_step_on_request() -> None:
    run = Run.of("tp2_pp2", keep_gradients=True)
    one = batch(0)
    with dt.launch(run.mesh):
        with pytest.raises(dt.PlanningError, match="no gradients of a last step are kept"):
            run.step.gradients()
        asked = run.step.gradients(*one)
        float(run.step(*one))
        kept = run.step.gradients()
        dt.gather_state_dict(run.model, run.optimizer)
    assert asked.keys() == kept.keys()
    assert all(torch.equal(asked[name], kept[name]) for name in asked)
