"""Steps with optimizers that are none of torch's: losses, states, and numbers on the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.runtime.optimizer import shard_optimizer
from tests import optimizers as own
from tests.api.test_recovery import lose
from tests.extras import missing

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12, dtype=dtype)
        self.down = nn.Linear(12, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype)).relu()).float()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def batches(count: int) -> list[Tensor]:
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, int] | None]] = {
    "tp2": (
        dt.Mesh(tp=2),
        {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
        None,
    ),
    "zero1": (dt.Mesh(dp=2), {}, {"dp": 1}),
    "zero3": (dt.Mesh(dp=2), {}, {"dp": 3}),
    "pp2": (dt.Mesh(pp=2), {}, None),
}


def step_of(
    module: nn.Module, opt: torch.optim.Optimizer, placed: str = "tp2", **options: Any
) -> dt.TrainStep:
    mesh, placements, zero = PLACED[placed]
    stages = {"pp": [["up*"], ["down*"]]} if placed == "pp2" else None
    model = dt.parallelize(module, mesh, placements, zero=zero, stages=stages)
    inputs = dict(dp=dt.Row()) if "dp" in mesh.shape else None
    return dt.train_step(model, loss_fn, opt, inputs=inputs, elementwise=True, **options)


def by_torch(module: nn.Module, opt: torch.optim.Optimizer, given: Sequence[Tensor]) -> list[float]:
    losses: list[float] = []
    for x in given:
        opt.zero_grad()
        loss = loss_fn(module, x)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def check_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """States, options and attributes; numbers of Python's are that, and the same to the bit."""
    a, b = one.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for parameter, entries in a["state"].items():
        assert entries.keys() >= b["state"][parameter].keys()
        for key, value in entries.items():
            found = b["state"][parameter].get(key)
            assert type(found) is type(value)
            if isinstance(value, Tensor):
                torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
            else:
                assert found == value
    for name in ("num_steps",):
        assert getattr(one, name, None) == getattr(other, name, None)


KINDS: dict[str, Make] = {
    "lion": own.Lion,
    "counted": own.Counted,
    "amsgrad": own.Amsgrad,
    "wide": own.Wide,
    "doubled": lambda p: own.Doubled(p, lr=0.05, momentum=0.9),
    "mixed": own.Mixed,
    "begun": own.Begun,
    "begun, of two groups": lambda p: own.Begun([{"params": [q]} for q in p]),
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_torch(kind: str, placed: str) -> None:
    expected, module = net(), net()
    plain, opt = (KINDS[kind](m.parameters()) for m in (expected, module))
    wanted = by_torch(expected, plain, batches(4))
    step = step_of(module, opt, placed)
    with dt.launch(step.model.mesh):
        losses = [float(step(x)) for x in batches(4)]
    assert losses == pytest.approx(wanted, rel=1e-5)
    check_same(plain, opt)
    assert step.elementwise is not None


def test_it_needs_the_statement() -> None:
    module = net()
    model = dt.parallelize(module, *PLACED["tp2"][:2])
    with pytest.raises(dt.PlanningError, match=r"fix: train_step\(..., elementwise=True\), if"):
        dt.train_step(model, loss_fn, own.Lion(module.parameters()))
    with pytest.raises(dt.PlanningError, match="Normed is not elementwise"):
        dt.train_step(model, loss_fn, own.Normed(module.parameters()), elementwise=True)
    with pytest.raises(dt.PlanningError, match=r"elementwise is 1 \(int\), not True or False"):
        dt.train_step(model, loss_fn, own.Lion(module.parameters()), elementwise=1)  # type: ignore[arg-type]
    step = dt.train_step(model, loss_fn, torch.optim.SGD(module.parameters()), elementwise=True)
    assert step.elementwise is None


def test_a_subclass_that_differs_in_init_alone_needs_none() -> None:
    expected, module = net(), net()
    plain, opt = (own.Renamed(m.parameters()) for m in (expected, module))
    torch.optim.lr_scheduler.StepLR(opt, 1)
    model = dt.parallelize(module, *PLACED["tp2"][:2])
    step = dt.train_step(model, loss_fn, opt)
    assert "fused" not in str(opt) or step.elementwise is None
    losses = [float(step(x)) for x in batches(3)]
    assert losses == pytest.approx(by_torch(expected, plain, batches(3)), rel=1e-5)
    assert "AdamW" in str(step.plan(batches(1)[0]))


# -- numbers on the optimizer ----------------------------------------------------------------------


def test_groups_and_attributes_read_as_in_torch_at_once() -> None:
    """After each call; what the user writes between steps counts."""
    expected, module = net(), net()
    plain, opt = (own.Counted(m.parameters()) for m in (expected, module))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (plain, opt)]
    hooked: list[int] = []
    opt.register_step_post_hook(lambda o, *_: hooked.append(o.param_groups[0]["k"]))
    step = step_of(module, opt)
    with dt.launch(step.model.mesh):
        for number, x in enumerate(batches(6)):
            wanted = by_torch(expected, plain, [x])
            loss = step(x)
            for one, other in zip(plain.param_groups, opt.param_groups, strict=True):
                assert {**one, "params": 0} == {**other, "params": 0}
            assert plain.num_steps == opt.num_steps == number + 1
            assert float(loss) == pytest.approx(wanted[0], rel=1e-5)
            for schedule in schedules:
                schedule.step()
            if number == 3:
                for one in (plain, opt):
                    one.param_groups[0]["k"], one.num_steps = 1, 4
    assert hooked == [1, 2, 3, 4, 2, 3]
    check_same(plain, opt)


def test_a_failed_step_gives_its_numbers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the update, and in it; what the user has written since stays."""
    expected, module = net(), net()
    plain, opt = (own.Counted(m.parameters()) for m in (expected, module))
    step = step_of(module, opt)
    update, fails = shard_optimizer._update, [0]

    def failing(*given: object) -> None:
        update(*given)  # type: ignore[arg-type]
        if fails[0]:
            fails[0] -= 1
            raise ArithmeticError("after the update")

    monkeypatch.setattr(shard_optimizer, "_update", failing)
    with dt.launch(step.model.mesh, snapshot_every=1):
        for number, x in enumerate(batches(5)):
            wanted = by_torch(expected, plain, [x])
            if number in (0, 3):
                fails[0] = 1
                with pytest.raises(TaskError, match="after the update"):
                    float(step(x))
                assert opt.param_groups[0]["k"] == number and opt.num_steps == number
                assert ("weight_sum" in opt.param_groups[0]) == (number > 0)
            assert [float(step(x))] == pytest.approx(wanted, rel=1e-5)
    check_same(plain, opt)


def test_what_the_user_writes_before_a_failure_is_heard_stays() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.table = nn.Embedding(4, 4)

        def forward(self, at: Tensor) -> Tensor:
            return self.inner(self.table(at))

    module = Refuses()
    opt = own.Counted(module.parameters())
    model = dt.parallelize(module, dt.Mesh(tp=2), {})
    step = dt.train_step(model, lambda m, at: m(at).square().mean(), opt, elementwise=True)
    float(step(torch.tensor([0, 1])))
    loss = step(torch.tensor([0, 9]))
    opt.param_groups[0]["lr"] = 0.25
    with pytest.raises((TaskError, IndexError)):
        float(loss)
    assert opt.param_groups[0]["k"] == 1 and opt.param_groups[0]["lr"] == 0.25
    float(step(torch.tensor([0, 1])))
    assert opt.param_groups[0]["k"] == 2


# -- state in and out ------------------------------------------------------------------------------


def test_it_is_gathered_loaded_and_looked_at() -> None:
    """In torch's own format; numbers are Python's again; the object's attributes beside them."""
    expected, module, other = net(), net(), net()
    plain, opt, second = (own.Counted(m.parameters()) for m in (expected, module, other))
    wanted = by_torch(expected, plain, batches(6))
    step = step_of(module, opt)
    with dt.launch(step.model.mesh):
        losses = [float(step(x)) for x in batches(2)]
        assert opt.state[module.up.weight]["step"] == 2
        assert type(opt.state[module.up.weight]["seen"]) is float
        losses += [float(step(x)) for x in batches(3)[2:]]
        state = dt.gather_state_dict(step.model, opt)
    assert state["attributes"] == {"num_steps": 3}
    assert state["optimizer"]["state"][0]["step"] == 3
    step = step_of(other, second, "zero3")
    dt.load_state_dict(step.model, second, state)
    with dt.launch(step.model.mesh):
        losses += [float(step(x)) for x in batches(6)[3:]]
    assert losses == pytest.approx(wanted, rel=1e-5)
    check_same(plain, second)


@pytest.mark.parametrize("inside", [False, True])
def test_it_is_saved_and_resumed(tmp_path: Path, inside: bool) -> None:
    expected, module = net(), net()
    plain, opt = (own.Counted(m.parameters()) for m in (expected, module))
    wanted = by_torch(expected, plain, batches(5))
    step = step_of(module, opt)
    with dt.launch(step.model.mesh):
        losses = [float(step(x)) for x in batches(3)]
        dt.save(tmp_path / "3", step.model, opt).get()
    other = net()
    second = own.Counted(other.parameters())
    step = step_of(other, second, "zero1")
    if not inside:
        dt.load(tmp_path / "3", step.model, second)
        assert type(second.state[other.up.weight]["step"]) is int
    with dt.launch(step.model.mesh):
        if inside:
            dt.load(tmp_path / "3", step.model, second)
        assert second.num_steps == 3 and second.param_groups[0]["k"] == 3
        losses += [float(step(x)) for x in batches(5)[3:]]
    assert losses == pytest.approx(wanted, rel=1e-5)
    check_same(plain, second)


def test_it_is_switched() -> None:
    expected, module = net(), net()
    plain, opt = (own.Counted(m.parameters()) for m in (expected, module))
    wanted = by_torch(expected, plain, batches(4))
    step = step_of(module, opt)
    with dt.launch(step.model.mesh) as run:
        losses = [float(step(x)) for x in batches(2)]
        run.switch(step.model, opt, dt.Mesh(other=2), {"up.weight": dict(other=dt.Column())})
        losses += [float(step(x)) for x in batches(4)[2:]]
    assert losses == pytest.approx(wanted, rel=1e-5)
    check_same(plain, opt)


# -- groups that change ----------------------------------------------------------------------------


def test_a_group_that_is_added() -> None:
    expected, module = net(), net()
    plain, opt = (own.Counted(m.up.parameters()) for m in (expected, module))
    step = step_of(module, opt)
    losses, wanted = [], []
    with dt.launch(step.model.mesh):
        for number, x in enumerate(batches(4)):
            if number == 2:
                plain.add_param_group({"params": [*expected.down.parameters()], "lr": 0.01})
                opt.add_param_group({"params": [*module.down.parameters()], "lr": 0.01})
            wanted += by_torch(expected, plain, [x])
            losses.append(float(step(x)))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert [group["k"] for group in opt.param_groups] == [4, 2]
    check_same(plain, opt)


def test_an_option_that_is_switched_on() -> None:
    """It brings a state along."""
    expected, module = net(), net()
    plain, opt = (own.Amsgrad(m.parameters()) for m in (expected, module))
    step = step_of(module, opt)
    losses, wanted = [], []
    with dt.launch(step.model.mesh):
        for number, x in enumerate(batches(5)):
            if number == 2:
                plain.param_groups[0]["amsgrad"] = opt.param_groups[0]["amsgrad"] = True
            wanted += by_torch(expected, plain, [x])
            losses.append(float(step(x)))
    assert losses == pytest.approx(wanted, rel=1e-5)
    check_same(plain, opt)


# -- precision, wrappers, Ray ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lion", "counted", "wide"])
def test_bf16_with_masters_and_without(kind: str) -> None:
    """With masters as torch's own optimizer over a float32 copy."""
    module, copied = net(torch.bfloat16), net(torch.bfloat16)
    opt = KINDS[kind](module.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in copied.parameters()]
    plain = KINDS[kind](masters)
    step = step_of(module, opt, "zero1", master_weights=True)
    losses, wanted = [], []
    with dt.launch(step.model.mesh):
        for x in batches(3):
            loss = loss_fn(copied, x)
            copied.zero_grad()
            loss.backward()
            for master, p in zip(masters, copied.parameters(), strict=True):
                master.grad = p.grad.float()
            plain.step()
            with torch.no_grad():
                for master, p in zip(masters, copied.parameters(), strict=True):
                    p.copy_(master)
            wanted.append(loss.item())
            losses.append(float(step(x)))
        state = dt.gather_state_dict(step.model, opt)["optimizer"]["state"]
    assert losses == pytest.approx(wanted, rel=0.02)
    assert state[0]["master_param"].dtype == torch.float32
    other = net(torch.bfloat16)
    step = step_of(other, KINDS[kind](other.parameters()))
    assert [float(step(x)) for x in batches(3)] == pytest.approx(wanted, rel=0.05)


def test_accelerates_wrapper_is_taken_off(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason=missing("accelerate"))
    module = net()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare(torch.optim.AdamW(module.parameters(), lr=0.01))
    assert type(wrapped) is accelerate.optimizer.AcceleratedOptimizer
    model = dt.parallelize(module, *PLACED["tp2"][:2])
    step = dt.train_step(model, loss_fn, wrapped)
    with dt.launch(model.mesh) as run:
        losses = [float(step(x)) for x in batches(2)]
        state = dt.gather_state_dict(model, wrapped)
        dt.load_state_dict(model, wrapped, state)
        dt.save(tmp_path / "2", model, wrapped).get()
        dt.load(tmp_path / "2", model, wrapped)
        run.switch(model, wrapped, dt.Mesh(other=2), {})
        losses += [float(step(x)) for x in batches(4)[2:]]
    expected = net()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)
    assert losses == pytest.approx(by_torch(expected, plain, batches(4)), rel=1e-5)
    check_same(plain, wrapped.optimizer)


def test_accelerates_accumulation_is_refused() -> None:
    """Its wrapper would not step; ours would, at each micro-step."""
    accelerate = pytest.importorskip("accelerate", reason=missing("accelerate"))
    module = net()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        wrapped = accelerator.prepare(torch.optim.AdamW(module.parameters(), lr=0.01))
        model = dt.parallelize(module, *PLACED["tp2"][:2])
        step = dt.train_step(model, loss_fn, wrapped)
        before = [p.detach().clone() for p in module.parameters()]
        (x,) = batches(1)
        with dt.launch(model.mesh):
            with accelerator.accumulate(module):
                assert not accelerator.sync_gradients
                with pytest.raises(dt.PlanningError, match="accumulating.*\n.*microbatches=4"):
                    step(x)
            assert all(map(torch.equal, before, module.parameters()))
            with accelerator.accumulate(module):  # the second of two, at which it steps
                assert float(step(x)) > 0
    finally:
        accelerate.state.GradientState._reset_state()  # one for the process


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_on_ray_the_class_goes_along() -> None:
    """One that no module has, too; a rank that is lost takes nothing along."""

    class Local(own.Counted):
        def step(self, closure: Any = None) -> None:
            super().step()

    expected, module = net(), net()
    plain, opt = (Local(m.parameters()) for m in (expected, module))
    wanted = by_torch(expected, plain, batches(4))
    step = step_of(module, opt)
    with dt.launch(step.model.mesh, backend="ray", snapshot_every=1) as run:
        losses = [step(x) for x in batches(2)]
        assert opt.param_groups[0]["k"] == 2 and float(losses[1]) > 0
        lose(run, 1)
        with pytest.warns(RuntimeWarning, match="recovered"):
            losses += [step(x) for x in batches(4)[2:]]
            found = [float(loss) for loss in losses]
        assert found == pytest.approx(wanted, rel=1e-5)
        state = copy.deepcopy(dt.gather_state_dict(step.model, opt))
    assert state["optimizer"]["state"][0]["step"] == 4
    check_same(plain, opt)
