"""Batches whose rows are not a multiple of the microbatches, such as the last batch of an epoch.

The rows of each data-parallel rank are cut as torch.chunk cuts. Loss and gradients equal those of
plain torch on the whole batch. A batch with fewer rows than microbatches has fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, DropoutGPT
from tests.training import SIX, TWO_STAGES, Placed, Run, make_model, sgd, train_torch

ROWS = {"dp": dt.Row()}
PLACED = {
    "single": SIX["single"],
    "dp2": SIX["dp2"],
    "pp2": SIX["pp2"],
    "pp2_dp2": Placed(axes=dict(pp=2, dp=2), inputs=ROWS, stages=TWO_STAGES),
}


def data(rows: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets; some rows have only ignored targets."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 32, (rows, 6), generator=generator)
    targets = torch.randint(0, 32, (rows, 6), generator=generator)
    targets[0, :3] = -100
    targets[2:3] = -100
    return tokens, targets


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, {"size": logits.square().mean()}


def compare(placed: Placed, schedule: dt.Schedule, batches: Sequence[Sequence[Tensor]]) -> None:
    expected = make_model()
    losses = train_torch(expected, sgd(expected), batches, loss=loss_fn, clip=1.0)
    run = Run.of(placed, module=make_model(), make=sgd, loss=loss_fn, schedule=schedule)
    with dt.launch(run.mesh):
        found = [float(run.step(*one)) for one in batches]
        state = dt.gather_state_dict(run.model, run.optimizer)["model"]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.default("pp2-1")
@pytest.mark.sample(*(f"{name}-{rows}" for name in PLACED for rows in (1, 3, 7)))
@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("name", PLACED)
def test_batch_of_any_number_of_rows_trains_as_torch(name: str, rows: int) -> None:
    compare(PLACED[name], dt.OneFOneB(microbatches=4), [data(rows), data(rows)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        dt.GPipe(microbatches=4),
        dt.LoopedBFS(microbatches=4),
        dt.ZBH1(microbatches=4),
        dt.ZBH2(microbatches=4),
        dt.Interleaved1F1B(microbatches=4),
        dt.Custom("F0 F1 .  B0 F2 B1 F3 B2 .  B3\n.  F0 B0 F1 B1 F2 B2 F3 B3"),
        dt.Searched(microbatches=4),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_every_schedule_trains_short_batches_as_torch(schedule: dt.Schedule) -> None:
    compare(PLACED["pp2"], schedule, [data(rows) for rows in (8, 5, 2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_step_trains_batches_of_varying_sizes_as_torch(level: int) -> None:
    batches = [data(rows) for rows in (8, 30, 3, 7, 1, 8)]
    expected = make_model()
    losses = train_torch(expected, sgd(expected), batches, loss=loss_fn, clip=1.0)
    module = make_model()
    model = dt.parallelize(module, dt.Mesh(dp=3), {}, zero={"dp": level})
    optimizer = sgd(module)
    step = dt.train_step(
        model,
        loss_fn,
        optimizer,
        inputs=ROWS,
        schedule=dt.GPipe(microbatches=8),
        clip_grad_norm=1.0,
    )
    with dt.launch(model.mesh):
        found = [float(step(*one)) for one in batches]
        state = dt.gather_state_dict(model, optimizer)["model"]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_random_numbers_do_not_depend_on_microbatch_sizes() -> None:
    def losses(mesh: dt.Mesh, microbatches: int, inputs: Any = None) -> list[float]:
        torch.manual_seed(0)
        module = DropoutGPT()
        model = dt.parallelize(module, mesh, {})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = dt.GPipe(microbatches=microbatches)
        step = dt.train_step(model, loss_fn, optimizer, inputs=inputs, schedule=schedule)
        with dt.launch(mesh):
            dt.manual_seed(5)
            found = [float(step(*data(rows))) for rows in (7, 5, 1)]
            dt.gather_state_dict(model, optimizer)
            return found

    whole = losses(dt.Mesh(), 1)
    assert losses(dt.Mesh(), 4) == pytest.approx(whole, rel=1e-6)
    assert losses(dt.Mesh(dp=2), 4, ROWS) == pytest.approx(whole, rel=1e-6)


@pytest.mark.default("1-None-1 of 8 microbatches    -1")
@pytest.mark.parametrize(
    ("rows", "inputs", "stated", "actions"),
    [
        (30, None, "8 microbatches (axis mb, in time)", 8),  # of 4 rows, the last of 2
        (9, None, "5 of 8 microbatches (axis mb, in time)", 5),
        (3, None, "3 of 8 microbatches (axis mb, in time)", 3),
        (9, ROWS, "5 of 8 microbatches (axis mb, in time)", 5),  # ranks have 5 and 4 rows
        (1, None, "1 of 8 microbatches    ", 1),
    ],
)
def test_plan_states_number_of_microbatches_with_rows(
    rows: int, inputs: Any, stated: str, actions: int
) -> None:
    run = Run.of(
        Placed(axes=dict(dp=2), inputs=inputs),
        loss=loss_fn,
        schedule=dt.GPipe(microbatches=8),
    )
    plan = run.step.plan(*data(rows))
    assert f"    {stated}" in str(plan).splitlines()[0] + "    "
    assert plan.num_microbatches == actions
    reduced = [c for c in plan.collectives if c.phase == "backward"]
    assert all(c.times == actions for c in reduced)


@pytest.mark.slow
def test_pipeline_of_short_batch_has_shorter_schedule_and_step_time() -> None:
    run = Run.of(PLACED["pp2"], loss=loss_fn, schedule=dt.OneFOneB(microbatches=4))
    plan = run.step.plan(*data(2))
    assert plan.schedule == "F0 F1 .  B0 .  B1\n.  F0 B0 F1 B1 ."
    assert dt.simulate(run.step, *data(2)).seconds < dt.simulate(run.step, *data(8)).seconds


@pytest.mark.slow
def test_gradients_of_short_batch_match_torch() -> None:
    run = Run.of(
        PLACED["dp2"],
        module=make_model(),
        loss=loss_fn,
        schedule=dt.GPipe(microbatches=4),
        keep_gradients=True,
    )
    expected: GPT = make_model()  # type: ignore[assignment]
    loss_fn(expected, *data(5))[0].backward()
    with dt.launch(run.mesh):
        asked = run.step.gradients(*data(5))
        run.step(*data(5))
        kept = run.step.gradients()
        run.state()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(asked[name], parameter.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(kept[name], asked[name])


def test_microbatches_that_would_cut_row_groups_are_refused() -> None:
    """Pairs of rows: a microbatch of 3 rows would contain half a pair."""

    def paired(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x).view(x.shape[0] // 2, 2, 4).unbind(1)
        return (first - second).square().mean()

    module = nn.Linear(4, 4)
    model = dt.parallelize(module, dt.Mesh(), {})
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    step = dt.train_step(model, paired, sgd, schedule=dt.GPipe(microbatches=2))
    step.plan(torch.randn(8, 4))
    with pytest.raises(dt.PlanningError, match="mixes rows of the batch"):
        step.plan(torch.randn(6, 4))
