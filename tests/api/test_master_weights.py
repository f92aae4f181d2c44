"""Master weights: the optimizer updates float32 copies, and the 16-bit parameters are rounded from
them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.errors import PlanningError
from tests.api.precision import BF16, STAGES, build, gpt, loss_of
from tests.models import batch
from tests.training import MEGATRON, assert_same_bits, batches

F32 = torch.float32
MASTER = "master_param"


def mixed() -> nn.Module:
    """Return a GPT with float32 norms, as many models have; norms need no master copies."""
    module = gpt()
    for name, child in module.named_modules():
        if "norm" in name:
            child.to(F32)
    return module


def by_hand(
    module: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Run the recipe in plain torch; return losses, parameters, and the master copies with their
    state."""
    copies = {n: nn.Parameter(p.detach().float()) for n, p in module.named_parameters()}
    optimizer = make(list(copies.values()))
    for group in optimizer.param_groups:
        group["fused"] = True  # as on the ranks
    losses: list[float] = []
    for one in data:
        module.zero_grad()
        loss = loss_of(module, *one)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            copies[name].grad = parameter.grad.float()
        optimizer.step()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(copies[name].data)
    state = {n: {**optimizer.state[copy], MASTER: copy.detach()} for n, copy in copies.items()}
    return losses, {n: p.detach() for n, p in module.named_parameters()}, state


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@pytest.mark.default("sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_on_one_rank_equal_manual_recipe_bitwise(name: str) -> None:
    data = batches(4)
    make = OPTIMIZERS[name]
    run = build(dt.Mesh(), make=lambda m: make(m.parameters()), master_weights=True)
    with dt.launch(run.mesh):
        losses = run.losses(data)
        state = run.state()
    expected, parameters, entries = by_hand(gpt(), data, make)
    assert losses == pytest.approx(expected, rel=1e-6)
    for number, (label, value) in enumerate(parameters.items()):
        assert_same_bits(state["model"][label], value, label)
        assert_same_bits(state["optimizer"]["state"][number], entries[label], label)


def test_updates_below_half_ulp_accumulate_in_master_weights() -> None:
    """An update of 1e-3 to a weight of 1 is below half an ulp of bf16 (2**-9) and is lost without
    masters."""

    def summed(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    found: list[float] = []
    for masters in (False, True):
        module = nn.Linear(4, 1, bias=False, dtype=BF16)
        module.weight.data.fill_(1.0)
        run = build(
            dt.Mesh(dp=2),
            module=module,
            make=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
            loss=summed,
            master_weights=masters,
        )
        x = torch.full((2, 4), 0.5, dtype=BF16)
        with dt.launch(run.mesh):
            for _ in range(16):
                run.step(x)
            found.append(float(run.state()["model"]["weight"][0, 0]))
    assert found == [1.0, 0.984375]  # 1 - 16 * 1e-3, rounded


CASES: dict[str, dict[str, Any]] = {
    "dp2_tp2": dict(mesh=dt.Mesh(dp=2, tp=2), pins=MEGATRON),
    "pp2_dp2": dict(mesh=dt.Mesh(pp=2, dp=2), stages=STAGES),
}


@pytest.mark.default("pp2_dp2")
@pytest.mark.parametrize("case", CASES)
def test_zero_levels_with_master_weights_are_bitwise_equal(case: str) -> None:
    data = batches(3)
    found: list[Any] = []
    for zero in (0, 1, 2, 3):
        run = build(**CASES[case], module=mixed(), zero=zero, master_weights=True)
        with dt.launch(run.mesh):
            found.append((run.losses(data), run.state()))
        assert_same_bits(found[zero], found[0], f"level {zero}")
    entries = found[0][1]["optimizer"]["state"].values()
    assert {MASTER in entry for entry in entries} == {True, False}
    assert {v.dtype for entry in entries for v in entry.values()} == {F32}


# -- state in and out ----------------------------------------------------------------------------


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.default("3")
@pytest.mark.parametrize("zero", [1, 3])
def test_training_with_master_weights_resumes_bitwise(zero: int) -> None:
    data = batches(5)
    case = dict(mesh=dt.Mesh(dp=2), master_weights=True, clip_grad_norm=1.0)
    run = build(**case, zero=zero)  # type: ignore[arg-type]
    with dt.launch(run.mesh):
        run.losses(data[:2])
        state = saved(run.state())
        expected = (run.losses(data[2:]), run.state())
    other = build(**case, zero=zero)  # type: ignore[arg-type]
    dt.load_state_dict(other.model, other.optimizer, state)
    with dt.launch(other.mesh):
        found = (other.losses(data[2:]), other.state())
    assert_same_bits(found, expected)
    assert {p.dtype for p in state["model"].values()} == {BF16}
    assert all(e[MASTER].dtype == F32 for e in state["optimizer"]["state"].values())


def test_master_weights_move_to_other_placement_and_out_of_launch() -> None:
    data = batches(2)
    run = build(dt.Mesh(dp=2), zero=3, master_weights=True)
    with dt.launch(run.mesh):
        run.losses(data)
        state = run.state()
    other = build(dt.Mesh(tp=2), pins=MEGATRON, master_weights=True)
    dt.load_state_dict(other.model, other.optimizer, state)
    assert_same_bits(other.state(), state)  # the controller's: torch alone would have rounded it
    with dt.launch(other.mesh):
        other.step.plan(*data[0])
        float(other.step(*data[0]))
        after = other.state()
    moved = [
        (after["optimizer"]["state"][n][MASTER] - e[MASTER]).abs().max().item()
        for n, e in state["optimizer"]["state"].items()
    ]
    assert all(0 < m < 3e-2 for m in moved)  # one step of AdamW at 1e-2 from where they were


def test_weights_loaded_without_optimizer_reset_master_weights() -> None:
    """The next step starts from the loaded weights and not from the old masters."""
    one = batch()
    run = build(dt.Mesh(dp=2), master_weights=True)
    with dt.launch(run.mesh):
        run.losses([one])
        state = run.state()
        dt.load_state_dict(run.model, run.optimizer, state)
        fresh = {n: p + 1 for n, p in state["model"].items()}
        dt.load_state_dict(run.model, None, {"model": fresh})
        run.losses([one])
        after = run.state()["model"]
    for name, value in fresh.items():
        assert (after[name] - value).abs().max() <= 2**-6, name


def test_state_with_masters_loads_as_16_bits_without_master_weights() -> None:
    data = batches(2)
    run = build(dt.Mesh(), master_weights=True)
    with dt.launch(run.mesh):
        run.losses(data)
        state = run.state()
    plain = build(dt.Mesh())
    dt.load_state_dict(plain.model, plain.optimizer, state)
    with dt.launch(plain.mesh):
        run_on = plain.losses(data)
        entries = plain.state()["optimizer"]["state"].values()
    assert run_on[0] < run_on[1] + 1
    assert all(MASTER not in e and e["exp_avg"].dtype == BF16 for e in entries)


# -- what the plan says ----------------------------------------------------------------------------


def test_plan_counts_memory_of_master_weights() -> None:
    one = batch()
    numel = sum(p.numel() for p in gpt().parameters())
    found = []
    for zero in (0, 1, 3):
        memory = build(dt.Mesh(dp=4), zero=zero, master_weights=True).step.plan(*one).memory[0]
        found.append((memory.masters, memory.optimizer, memory.parameters))
    whole, split = 4 * numel, numel
    assert found == [
        (whole, 2 * whole, 2 * numel),
        (split, 2 * split, 2 * numel),
        (split, 2 * split, numel // 2),
    ]
    plan = build(dt.Mesh(dp=4), zero=1, master_weights=True).step.plan(*one)
    (line,) = [x for x in str(plan).splitlines() if x.startswith("  float32 masters")]
    assert line.split() == ["float32", "masters", f"{split / 1024:.1f}", "KiB"]
    assert f"{split / 1024:.1f} KiB of float32 masters" in str(plan)
    memory = plan.memory[0]
    assert memory.total == sum(
        (memory.parameters, memory.gradients, memory.optimizer, memory.masters, memory.activations)
    )
    assert "masters" not in str(build(dt.Mesh(dp=4), zero=1).step.plan(*one))


@pytest.mark.parametrize("zero", [0, 1])
def test_rank_memory_of_masters_equals_plan(zero: int) -> None:
    run = build(dt.Mesh(dp=2), zero=zero, master_weights=True)
    one = batch()
    memory = run.step.plan(*one).memory[0]
    with dt.launch(run.mesh) as session:
        float(run.step(*one))
        (home,) = session.model_home(run.model).optimizers.values()
        found = session.launch.store.fetch(list(home.values().values()))
        shards = [(own[0], own[1]) for own in found.values()]
        run.state()
    steps = 4 * len(list(run.module.parameters()))  # AdamW's step counts
    nbytes = [sum(t.nbytes for t in own) - steps for own in zip(*shards, strict=True)]
    assert nbytes == [memory.optimizer + memory.masters] * 2


def test_master_weights_mistakes_raise_planning_error() -> None:
    with pytest.raises(PlanningError, match=r"narrower than float32.*\n.*\n.*bfloat16"):
        build(dt.Mesh(), dtype=None, master_weights=True)
    one = batch()
    run = build(dt.Mesh(), master_weights=True)
    other = dt.train_step(run.model, loss_of, run.optimizer)
    with dt.launch(run.mesh):
        float(run.step(*one))
        with pytest.raises(PlanningError, match="fix: master_weights=True here too"):
            other(*one)
        run.state()
