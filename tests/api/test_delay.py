"""`train_step(..., delay=1)` updates with the gradients of the step before, as a loop of torch
does, through saves, switches and failed steps. The table of training cases has a column of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import Program, TaskError
from dtensor.runtime.optimizer.shard_optimizer import DELAYED
from tests.models import loss_fn
from tests.optimizers import Counted
from tests.training import (
    SIX,
    Run,
    adamw,
    assert_losses_close,
    assert_same_bits,
    assert_states_close,
    batches,
    make_model,
    train_torch,
)

LIMIT = 1e-9


def build() -> nn.Module:
    return make_model().double()


def run_of(placed: str, **stated: Any) -> Run:
    return Run.of(placed, module=build(), delay=1, **stated)


def expected(data: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the state of plain torch."""
    model = build()
    optimizer = adamw(model)
    losses = train_torch(model, optimizer, data, clip=1.0, delay=1)
    return losses, dict(model=model.state_dict(), optimizer=optimizer.state_dict())


def assert_trained(
    data: Sequence[tuple[Tensor, Tensor]], losses: Sequence[float], state: dict[str, Any]
) -> None:
    wanted_losses, wanted = expected(data)
    assert_losses_close(losses, wanted_losses, LIMIT)
    assert_states_close(state["model"], wanted["model"], LIMIT)
    assert_states_close(state["optimizer"]["state"], wanted["optimizer"]["state"], LIMIT)


def train_in_parts(folder: Path, one: str, other: str, first: int, backend: Any) -> tuple[Any, Any]:
    """Train for 20 steps, the first ones in one place, then, from a save, in the other. Return
    losses and state. Loads outside the launch after one step, whose state has no more than delayed
    gradients."""
    data = batches(20)
    run, then = run_of(one), run_of(other)
    with dt.launch(run.mesh, backend=backend):
        losses = run.losses(data[:first])
        dt.save(folder, run.model, run.optimizer).get()
    if first == 1:
        dt.load(folder, then.model, then.optimizer)
    with dt.launch(then.mesh, backend=backend):
        if first > 1:
            dt.load(folder, then.model, then.optimizer)
        losses += then.losses(data[first:])
        return losses, then.state()


@cache
def in_process(one: str, other: str, first: int) -> tuple[Any, Any]:
    with TemporaryDirectory() as folder:
        return train_in_parts(Path(folder) / "save", one, other, first, "inprocess")


PARTS = [("dp2", "tp2", 1), ("tp2", "pp2", 10), ("pp2", "dp2", 10)]


@pytest.mark.default("dp2-tp2-1")
@pytest.mark.parametrize(("one", "other", "first"), PARTS)
def test_20_steps_with_save_match_torch(one: str, other: str, first: int) -> None:
    assert_trained(batches(20), *in_process(one, other, first))


@pytest.mark.ray
@pytest.mark.default("dp2-tp2-1")
@pytest.mark.parametrize(("one", "other", "first"), PARTS)
def test_steps_on_ray_have_the_bits_of_steps_in_process(
    one: str, other: str, first: int, tmp_path: Path, ray_session: None
) -> None:
    found = train_in_parts(tmp_path / "ray", one, other, first, "ray")
    assert_same_bits(found, in_process(one, other, first))


@pytest.mark.default("dp2_tp2-dp2")
@pytest.mark.parametrize(("one", "other"), [("dp2_tp2", "dp2"), ("tp2", "pp2"), ("dp2", "single")])
def test_switch_moves_delayed_gradients(one: str, other: str) -> None:
    run, where, data = run_of(one), SIX[other], batches(5)
    with dt.launch(run.mesh) as launch:
        losses = run.losses(data[:3])
        options = dict(inputs=where.inputs or {}, stages=where.stages)
        launch.switch(run.model, run.optimizer, where.mesh, where.pins, **options)
        losses += run.losses(data[3:])
        assert_trained(data, losses, run.state())


@pytest.mark.default("first-dp2")
@pytest.mark.parametrize("placed", ["dp2", "dp2_tp2"])
@pytest.mark.parametrize("failing", [0, 2], ids=["first", "later"])
def test_failed_step_changes_neither_weights_nor_delayed_gradients(
    failing: int, placed: str
) -> None:
    data = batches(4)
    outside = torch.full_like(data[0][0], 10**6), data[0][1]
    states: list[Any] = []
    for fails in (False, True):
        run = run_of(placed, zero={"dp": 1})
        with dt.launch(run.mesh):
            for number, one in enumerate(data):
                if fails and number == failing:
                    with pytest.raises(TaskError, match="index out of range"):
                        float(run.step(*outside))
                run.step(*one)
            states.append(run.state())
    assert_same_bits(*states)


def test_optimizer_begins_state_that_has_only_delayed_gradients() -> None:
    data, states = batches(3), list[Any]()
    for reads in (False, True):
        run = run_of("dp2", make=lambda model: Counted(model.parameters()))
        with dt.launch(run.mesh):
            run.losses(data[:1])
            if reads:
                assert {k for own in run.optimizer.state.values() for k in own} == {DELAYED}
            run.losses(data[1:])
            states.append(run.state())
    assert_same_bits(*states)


def test_gradients_of_a_batch_are_not_delayed_and_kept_ones_are() -> None:
    def zero(model: nn.Module, *batch: Tensor) -> Tensor:
        value = loss_fn(model, *batch)[0]
        return value - value.detach()

    run, (one, other) = run_of("dp2", keep_gradients=True, loss=zero), batches(2)
    with dt.launch(run.mesh):
        now = run.step.gradients(*one)
        float(run.step(*one))
        with pytest.raises(dt.PlanningError, match="no gradients of a last step"):
            run.step.gradients()
        float(run.step(*other))
        assert_states_close(run.step.gradients(), now, LIMIT)


def test_reductions_of_delayed_gradients_start_before_the_forward_and_end_after_it() -> None:
    run, one = run_of("dp2", schedule=dt.GPipe(1)), batches(1)[0]
    loaded: list[Program] = []
    with dt.launch(run.mesh) as launch:
        float(run.step(*one))
        load = launch.cluster.load

        def record(program: Program) -> Any:
            loaded.append(program)
            return load(program)

        launch.cluster.load = record  # type: ignore[method-assign]
        float(run.step(*one))
    labels = [str(i.label) for i in loaded[0].ranks[0].instructions]
    at = [i for i, label in enumerate(labels) if "gradients_dp" in label]
    forward = [i for i, label in enumerate(labels) if label.startswith(("F", "B"))]
    assert at[0] < forward[0] < forward[-1] < at[-1]


def test_plan_prints_delay_and_its_memory() -> None:
    text = str(run_of("dp2").step.plan(*batches(1)[0]))
    assert "delay   1: updates with the gradients of the step before; 115.0 KiB for them" in text
    assert "  delayed gradients  115.0 KiB" in text


def test_explain_names_the_rank_of_an_update_and_the_gradient_of_the_step_before() -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([model.blocks[0].attn.qkv.weight])

    run = run_of("dp2", make=make, zero={"dp": 1})
    plan = run.step.plan(*batches(1)[0])
    assert "updated by one rank: gradient and optimizer state are f64[(48|0)@dp,16] there" in (
        plan.explain("blocks.0.attn.qkv.weight")
    )
    (delayed,) = plan.delayed
    assert "the gradient of blocks.0.attn.qkv.weight that the step before kept" in (
        plan.explain(delayed.name)
    )
    kept = next(output for output in plan.outputs if output.kind == "delayed")
    assert "kept for the next step as the gradient of" in plan.explain(kept.values[0][1])


def test_state_of_delayed_gradients_is_refused_by_step_without_delay() -> None:
    data = batches(1)
    run = run_of("dp2")
    with dt.launch(run.mesh):
        run.losses(data)
        state = run.state()
    plain = Run.of("tp2", module=build())
    with dt.launch(plain.mesh):
        dt.load_state_dict(plain.model, plain.optimizer, state)
        with pytest.raises(dt.PlanningError, match="AdamW has the gradients of the last step for"):
            plain.losses(data)
        for entries in plain.optimizer.state.values():  # the fix
            entries.pop("delayed_gradient", None)
        plain.losses(data)


def test_delayed_gradients_of_other_parameters_are_refused() -> None:
    def loss(model: nn.Module, x: Tensor, both: bool) -> Tensor:
        return (model[1](model[0](x)) if both else model[0](x)).square().mean()

    model = dt.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dt.Mesh(dp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, loss, optimizer, inputs={"x": dict(dp=dt.Row())}, delay=1)
    with dt.launch(model.mesh):
        float(step(torch.ones(4, 4), True))
        before = dt.gather_state_dict(model, optimizer)
        with pytest.raises(
            dt.PlanningError, match="SGD has a gradient of the last step for 1.bias"
        ):
            step(torch.ones(4, 4), False)
        assert_same_bits(dt.gather_state_dict(model, optimizer), before)
        float(step(torch.ones(4, 4), True))
