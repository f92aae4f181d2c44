"""Train steps with custom elementwise optimizers: losses, state, and counters stored on the
optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from tests.training import train_torch

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 12, dtype=dtype)
        self.down = nn.Linear(12, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype)).relu()).float()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def batches(count: int) -> list[Tensor]:
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


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
    return dt.train_step(model, loss_fn, opt, inputs=inputs, **{"elementwise": True, **options})


class Both:
    """One net and optimizer twice: with a step under a placement, and in plain torch."""

    def __init__(self, make: Make, placed: str = "tp2", **options: Any) -> None:
        self.expected, self.module = Net(), Net()
        self.plain, self.opt = (make(m.parameters()) for m in (self.expected, self.module))
        self.step = step_of(self.module, self.opt, placed, **options)
        self.mesh = self.step.model.mesh

    def wanted(self, *given: Tensor) -> list[float]:
        return train_torch(self.expected, self.plain, [(x,) for x in given], loss=loss_fn)

    def take(self, *given: Tensor) -> None:
        found = [float(self.step(x)) for x in given]
        assert found == pytest.approx(self.wanted(*given), rel=1e-5)

    def resume(self, placed: str) -> None:
        """Make the net and the optimizer again, under another placement."""
        self.module = Net()
        self.opt = type(self.opt)(self.module.parameters())  # type: ignore[call-arg]
        self.step = step_of(self.module, self.opt, placed)
        self.mesh = self.step.model.mesh

    def check_same(self) -> None:
        """Assert equal state, options and attributes; Python numbers must stay Python numbers and
        be bitwise equal."""
        a, b = self.plain.state_dict(), self.opt.state_dict()
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        for parameter, entries in a["state"].items():
            if not isinstance(entries, dict):  # under a text key
                assert torch.equal(entries, b["state"][parameter])
                continue
            assert entries.keys() >= b["state"][parameter].keys()
            for key, value in entries.items():
                found = b["state"][parameter].get(key)
                assert type(found) is type(value)
                if isinstance(value, Tensor):
                    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
                else:
                    assert found == value
        num_steps = (getattr(o, "num_steps", None) for o in (self.plain, self.opt))
        assert len(set(num_steps)) == 1


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


@pytest.mark.parametrize(
    "placed", ["tp2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("zero1", "pp2")), "zero3"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_custom_optimizer_trains_as_in_torch(kind: str, placed: str) -> None:
    both = Both(KINDS[kind], placed)
    with dt.launch(both.mesh):
        both.take(*batches(4))
    both.check_same()
    assert both.step.elementwise is not None


def test_elementwise_true_is_an_assertion() -> None:
    module = Net()
    model = dt.parallelize(module, *PLACED["tp2"][:2])
    report = dt.train_step(model, loss_fn, own.Lion(module.parameters())).elementwise
    assert report is not None and report.updates == "elementwise"
    with pytest.raises(dt.PlanningError, match="Normed is not elementwise"):
        dt.train_step(model, loss_fn, own.Normed(module.parameters()), elementwise=True)
    with pytest.raises(dt.PlanningError, match=r"elementwise is 1 \(int\), not True or False"):
        dt.train_step(model, loss_fn, own.Lion(module.parameters()), elementwise=1)  # type: ignore[arg-type]
    step = dt.train_step(model, loss_fn, torch.optim.SGD(module.parameters()), elementwise=True)
    assert step.elementwise is None


def test_optimizer_subclass_that_only_changes_init_needs_no_elementwise() -> None:
    both = Both(own.Renamed, elementwise=False)
    torch.optim.lr_scheduler.StepLR(both.opt, 1)
    both.take(*batches(3))
    assert both.step.elementwise is None
    assert "AdamW" in str(both.step.plan(batches(1)[0]))


# -- numbers on the optimizer ----------------------------------------------------------------------


def test_custom_optimizer_groups_and_attributes_match_torch_after_each_step() -> None:
    """Values that the user writes between steps are used by the next step."""
    both = Both(own.Counted)
    plain, opt = both.plain, both.opt
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (plain, opt)]
    hooked: list[int] = []
    opt.register_step_post_hook(lambda o, *_: hooked.append(o.param_groups[0]["k"]))
    with dt.launch(both.mesh):
        for number, x in enumerate(batches(6)):
            wanted = both.wanted(x)
            loss = both.step(x)
            for one, other in zip(plain.param_groups, opt.param_groups, strict=True):
                assert {**one, "params": 0} == {**other, "params": 0}
            assert plain.num_steps == opt.num_steps == number + 1  # type: ignore[attr-defined]
            assert float(loss) == pytest.approx(wanted[0], rel=1e-5)
            for schedule in schedules:
                schedule.step()
            if number == 3:
                for one in (plain, opt):
                    one.param_groups[0]["k"], one.num_steps = 1, 4  # type: ignore[attr-defined]
    assert hooked == [1, 2, 3, 4, 2, 3]
    both.check_same()


def test_failed_step_restores_numbers_of_custom_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is before or during the update; values that the user has written since the step
    are kept."""
    both = Both(own.ByText)
    update, fails = shard_optimizer.update, [0]

    def failing(*given: object) -> None:
        update(*given)  # type: ignore[arg-type]
        if fails[0]:
            fails[0] -= 1
            raise ArithmeticError("after the update")

    monkeypatch.setattr(shard_optimizer, "update", failing)
    group: Any = both.opt.param_groups[0]
    with dt.launch(both.mesh, snapshot_every=1):
        for number, x in enumerate(batches(5)):
            if number in (0, 3):
                fails[0] = 1
                with pytest.raises(TaskError, match="after the update"):
                    float(both.step(x))
                assert group["k"] == both.opt.num_steps == number  # type: ignore[attr-defined]
                assert ("weight_sum" in group) == ("k" in both.opt.state) == (number > 0)
            both.take(x)
    both.check_same()


def test_value_written_by_user_before_failure_is_read_is_kept() -> None:
    module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
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


def test_custom_optimizer_state_is_gathered_and_loaded_in_torch_format() -> None:
    """Counters in the state are Python numbers again, and the optimizer's attributes are saved with
    it."""
    both = Both(own.ByText)
    with dt.launch(both.mesh):
        both.take(*batches(2))
        entries = both.opt.state[both.module.up.weight]
        assert entries["step"] == 2 and type(entries["seen"]) is float
        state: Any = both.opt.state
        state["rates"]["sum"] += 1  # a write by the user, of the next step
        both.plain.state["rates"]["sum"] += 1  # type: ignore[index]
        both.take(batches(3)[2])
        state = dt.gather_state_dict(both.step.model, both.opt)
    assert state["attributes"] == {"num_steps": 3}
    assert state["optimizer"]["state"][0]["step"] == 3
    both.resume("zero3")
    dt.load_state_dict(both.step.model, both.opt, state)
    with dt.launch(both.mesh):
        both.take(*batches(6)[3:])
    both.check_same()


@pytest.mark.parametrize("inside", [False, True])
def test_custom_optimizer_save_and_resume(tmp_path: Path, inside: bool) -> None:
    both = Both(own.ByText)
    with dt.launch(both.mesh):
        both.take(*batches(3))
        dt.save(tmp_path / "3", both.step.model, both.opt).get()
    both.resume("zero1")
    if not inside:
        dt.load(tmp_path / "3", both.step.model, both.opt)
        assert type(both.opt.state[both.module.up.weight]["step"]) is int
    with dt.launch(both.mesh):
        if inside:
            dt.load(tmp_path / "3", both.step.model, both.opt)
        assert both.opt.num_steps == both.opt.param_groups[0]["k"] == 3  # type: ignore[attr-defined]
        both.take(*batches(5)[3:])
    both.check_same()


def test_custom_optimizer_survives_switch_to_other_placement() -> None:
    both = Both(own.ByText)
    with dt.launch(both.mesh) as run:
        both.take(*batches(2))
        placements = {"up.weight": dict(other=dt.Column())}
        run.switch(both.step.model, both.opt, dt.Mesh(other=2), placements)
        both.take(*batches(4)[2:])
    both.check_same()


# -- groups that change ----------------------------------------------------------------------------


def test_param_group_added_between_steps_trains_with_custom_optimizer() -> None:
    both = Both(lambda parameters: own.Counted([*parameters][:2]))
    with dt.launch(both.mesh):
        both.take(*batches(2))
        for module, opt in ((both.expected, both.plain), (both.module, both.opt)):
            opt.add_param_group({"params": [*module.down.parameters()], "lr": 0.01})
        both.take(*batches(4)[2:])
    assert [group["k"] for group in both.opt.param_groups] == [4, 2]
    both.check_same()


def test_option_switched_on_between_steps_adds_optimizer_state() -> None:
    both = Both(own.Amsgrad)
    with dt.launch(both.mesh):
        both.take(*batches(2))
        for opt in (both.plain, both.opt):
            opt.param_groups[0]["amsgrad"] = True
        both.take(*batches(5)[2:])
    both.check_same()


# -- precision, wrappers, Ray ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lion", "counted", "wide"])
def test_custom_optimizer_trains_bf16_with_and_without_master_weights(kind: str) -> None:
    """With master weights, the losses equal those of torch's optimizer over a float32 copy."""
    module, copied = Net(torch.bfloat16), Net(torch.bfloat16)
    opt = KINDS[kind](module.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in copied.parameters()]
    plain = KINDS[kind](masters)
    step = step_of(module, opt, "zero1", master_weights=True)
    wanted: list[float] = []
    for x in batches(3):
        loss = loss_fn(copied, x)
        copied.zero_grad()
        loss.backward()
        for master, p in zip(masters, copied.parameters(), strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        plain.step()
        for master, p in zip(masters, copied.parameters(), strict=True):
            p.data.copy_(master)
        wanted.append(loss.item())
    with dt.launch(step.model.mesh):
        assert [float(step(x)) for x in batches(3)] == pytest.approx(wanted, rel=0.02)
        state = dt.gather_state_dict(step.model, opt)["optimizer"]["state"]
    assert state[0]["master_param"].dtype == torch.float32
    other = Net(torch.bfloat16)
    step = step_of(other, KINDS[kind](other.parameters()))
    assert [float(step(x)) for x in batches(3)] == pytest.approx(wanted, rel=0.05)


def test_step_unwraps_optimizer_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason=missing("accelerate"))
    module = Net()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare(torch.optim.AdamW(module.up.parameters(), lr=0.01))
    assert type(wrapped) is accelerate.optimizer.AcceleratedOptimizer
    model = dt.parallelize(module, *PLACED["tp2"][:2])
    optimizers = [wrapped, torch.optim.SGD(module.down.parameters(), lr=0.1)]
    step = dt.train_step(model, loss_fn, optimizers)
    with dt.launch(model.mesh) as run:
        losses = [float(step(x)) for x in batches(2)]
        state = dt.gather_state_dict(model, wrapped)
        dt.load_state_dict(model, wrapped, state)
        dt.save(tmp_path / "2", model, optimizers).get()
        dt.load(tmp_path / "2", model, optimizers)
        run.switch(model, optimizers, dt.Mesh(other=2), {})
        losses += [float(step(x)) for x in batches(4)[2:]]
    expected = Net()
    plain = torch.optim.AdamW(expected.up.parameters(), lr=0.01)
    both = [plain, torch.optim.SGD(expected.down.parameters(), lr=0.1)]
    wanted = train_torch(expected, both, [(x,) for x in batches(4)], loss=loss_fn)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for p, q in zip(expected.up.parameters(), module.up.parameters(), strict=True):
        torch.testing.assert_close(wrapped.optimizer.state[q], plain.state[p])


def test_gradient_accumulation_of_accelerate_is_refused() -> None:
    """Accelerate's wrapper would skip the optimizer at each micro-step, while a train step would
    not."""
    accelerate = pytest.importorskip("accelerate", reason=missing("accelerate"))
    module = Net()
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
def test_custom_optimizer_class_is_sent_to_ray_ranks() -> None:
    """Also a class that no module defines. A lost rank loses no optimizer state."""

    class Local(own.Counted):
        def step(self, closure: Any = None) -> None:
            super().step()

    both = Both(Local)
    wanted = both.wanted(*batches(4))
    with dt.launch(both.mesh, backend="ray", snapshot_every=1) as run:
        losses = [both.step(x) for x in batches(2)]
        assert both.opt.param_groups[0]["k"] == 2 and float(losses[1]) > 0
        lose(run, 1)
        with pytest.warns(RuntimeWarning, match="recovered"):
            losses += [both.step(x) for x in batches(4)[2:]]
            found = [float(loss) for loss in losses]
        assert found == pytest.approx(wanted, rel=1e-5)
        state = copy.deepcopy(dt.gather_state_dict(both.step.model, both.opt))
    assert state["optimizer"]["state"][0]["step"] == 4
    both.check_same()
