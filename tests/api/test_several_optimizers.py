"""Steps with a list of optimizers: each keeps its own groups, schedulers, state and counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from tests import optimizers as own
from tests.training import (
    assert_losses_close,
    assert_same_bits,
    assert_states_close,
    failing_updates,
)

LinearLR = torch.optim.lr_scheduler.LinearLR


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid(self.up(x).tanh()).tanh())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def batches(count: int) -> list[Tensor]:
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def optimizers(net: Net) -> list[torch.optim.Optimizer]:
    """Return two optimizers with counters on the object, and one that needs whole parameters."""
    last = [{"params": [net.down.weight]}, {"params": [net.down.bias], "lr": 0.02}]
    return [
        own.Counted(net.up.parameters()),
        torch.optim.Adafactor(last, lr=0.1),
        own.Counted(net.mid.parameters(), lr=0.1),
    ]


PLACES: dict[str, tuple[dt.Mesh, dict[str, Any]]] = {
    "tp2": (
        dt.Mesh(tp=2),
        dict(placements={"up.*": dict(tp=dt.Row()), "mid.weight": dict(tp=dt.Column())}),
    ),
    "dp2, ZeRO-3": (dt.Mesh(dp=2), dict(zero={"dp": 3})),
    "pp2": (dt.Mesh(pp=2), dict(stages={"pp": [["up*", "mid*"], ["down*"]]})),
}


class Trained:
    """A net, its optimizers with schedulers, and its step under a placement."""

    def __init__(self, place: str) -> None:
        self.mesh, options = PLACES[place]
        self.net = Net()
        self.model = dt.parallelize(self.net, self.mesh, **options)
        self.optimizers = optimizers(self.net)
        self.schedulers = [
            LinearLR(opt, 0.5, total_iters=4 + i) for i, opt in enumerate(self.optimizers)
        ]
        self.step = dt.train_step(self.model, loss_fn, self.optimizers, clip_grad_norm=0.5)

    def take(self, data: list[Tensor]) -> list[float]:
        losses: list[float] = []
        for x in data:
            losses.append(float(self.step(x)))
            for scheduler in self.schedulers:
                scheduler.step()
        return losses

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.optimizers)


@pytest.mark.parametrize("place", PLACES)
def test_several_optimizers_with_schedulers_train_as_in_torch(place: str) -> None:
    run, net = Trained(place), Net()
    plain = optimizers(net)
    schedulers = [LinearLR(opt, 0.5, total_iters=4 + i) for i, opt in enumerate(plain)]
    with dt.launch(run.mesh):
        losses = run.take(batches(6))
        state = run.state()
        if place == "tp2":  # copies of down and mid.bias, and of numbers of Counted
            assert dt.check_replicas(run.model) == 3
            assert dt.check_replicas(run.model, run.optimizers) == 3 + 4 * 2 + 1
    expected: list[float] = []
    for x in batches(6):
        value = loss_fn(net, x)
        net.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for opt in (*plain, *schedulers):
            opt.step()
        expected.append(value.item())
    assert_losses_close(losses, expected)
    assert_states_close(state["model"], net.state_dict())
    assert state["attributes"] == [{"num_steps": 6}, {}, {"num_steps": 6}]
    for found, opt in zip(state["optimizer"], plain, strict=True):
        for number, entries in opt.state_dict()["state"].items():
            entries.pop("prior", None)  # is None, which ranks do not store
            assert_states_close(found["state"][number], entries)
        assert found["param_groups"] == opt.state_dict()["param_groups"]
    assert run.step.optimizer == run.optimizers
    reports = run.step.elementwise
    assert isinstance(reports, tuple)
    kinds = [report.updates for report in reports if report is not None]
    assert kinds == ["elementwise", "per parameter", "elementwise"]


def test_state_of_several_optimizers_is_loaded_and_moved_bitwise(tmp_path: Path) -> None:
    """A checkpoint, a gathered state and a switch give the same bits under another placement."""
    run = Trained("tp2")
    with dt.launch(run.mesh):
        run.take(batches(2))
        saved = dt.save(tmp_path / "2", run.model, run.optimizers)
        state = run.state()
        saved.get()
    losses: dict[str, list[float]] = {}
    after: dict[str, Any] = {}
    for how in ("load", "load outside", "load_state_dict", "switch"):
        other = Trained("tp2" if how == "switch" else "dp2, ZeRO-3")
        if how == "load outside":
            dt.load(tmp_path / "2", other.model, other.optimizers)
        elif how == "load_state_dict":
            dt.load_state_dict(other.model, other.optimizers, state)
        with dt.launch(other.mesh) as launched:
            if how == "load":
                assert dt.resume(tmp_path, other.model, other.optimizers) is not None
            elif how == "switch":
                other.take(batches(2))
                with pytest.raises(
                    dt.PlanningError, match="another optimizer of this model .*Adafactor"
                ):
                    launched.switch(other.model, other.optimizers[0], dt.Mesh(dp=2), {})
                mesh, options = PLACES["dp2, ZeRO-3"]
                launched.switch(other.model, other.optimizers, mesh, {}, **options)
            assert_same_bits(other.state(), state)
            losses[how] = [float(other.step(x)) for x in batches(4)[2:]]
            after[how] = other.state()
    assert_same_bits(losses, dict.fromkeys(losses, losses["load"]))
    assert_same_bits(after, dict.fromkeys(after, after["load"]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_checkpoint_of_several_optimizers(tmp_path: Path) -> None:
    """Entries are by name, and groups one after another, as in torch's `get_state_dict`."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    run = Trained("tp2")
    with dt.launch(run.mesh):
        run.take(batches(2))
        dt.save(tmp_path / "2", run.model, run.optimizers).get()
    dcp_to_torch_save(tmp_path / "2", tmp_path / "2.pt")
    found = torch.load(tmp_path / "2.pt", weights_only=True)["optimizer"]
    expected: Any = get_optimizer_state_dict(run.net, tuple(run.optimizers))
    assert found["state"].keys() == expected["state"].keys()
    assert_same_bits(found["state"]["down.bias"], expected["state"]["down.bias"])
    names = [group["params"] for group in found["param_groups"]]
    assert names == [group["params"] for group in expected["param_groups"]]


def test_failed_update_of_one_optimizer_undoes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    until = failing_updates(monkeypatch)
    run, undisturbed = Trained("tp2"), Trained("tp2")
    with dt.launch(run.mesh, snapshot_every=1):
        losses: list[float] = []
        for number, x in enumerate(batches(3)):
            for bad in range(1, 5) if number != 1 else ():
                until[:] = [bad]
                with pytest.raises(TaskError, match="after the kernel"):
                    float(run.step(x))
                assert not until
                assert {opt.num_steps for opt in run.optimizers[::2]} == {number}  # type: ignore
            losses += run.take([x])
        state = run.state()
    with dt.launch(undisturbed.mesh):
        assert undisturbed.take(batches(3)) == losses
        assert_same_bits(undisturbed.state(), state)


def test_state_of_other_optimizers_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = Trained("tp2")
    counted, adafactor, other = run.optimizers
    with dt.launch(run.mesh):
        run.take(batches(1))
        state = run.state()
        dt.save(tmp_path / "three", run.model, run.optimizers).get()
        dt.save(tmp_path / "one", run.model, adafactor).get()
        run.take(batches(2)[1:])
        before = run.state()

        def load(name: str, *given: torch.optim.Optimizer) -> Callable[[], Any]:
            return lambda: dt.load(tmp_path / name, run.model, [*given])

        def load_state(*given: torch.optim.Optimizer) -> Callable[[], Any]:
            return lambda: dt.load_state_dict(run.model, [*given], state)

        refused: list[tuple[Callable[[], Any], str]] = [
            (
                load("three", counted, adafactor),
                "state of Counted, Adafactor, Counted, and this is Counted",
            ),
            (
                load("three", adafactor, counted, other),
                "in the order of the checkpoint, .Counted, A",
            ),
            (
                load("three", other, adafactor, counted),
                "the optimizer's parameters in other groups",
            ),
            (load("three", adafactor), "and this is Adafactor; nothing was loaded"),
            (load("one", adafactor, counted), "state of Adafactor, and this is Adafactor, Counted"),
            (load_state(counted, adafactor), "the state is of 3 optimizers, and 2 are passed"),
            (
                load_state(adafactor, counted, other),
                "state dict 0 of the list fits Counted, .*\n*fix",
            ),
            (load_state(other, adafactor, counted), "state dict 0 of the list fits Counted"),
        ]
        for call, message in refused:
            with pytest.raises(dt.PlanningError, match=message):
                call()
        assert_same_bits(run.state(), before)
        adafactor.add_param_group({"params": [run.net.up.bias]})
        for call in (
            lambda: run.step(batches(1)[0]),
            lambda: dt.save(tmp_path / "4", run.model, run.optimizers),
        ):
            with pytest.raises(dt.PlanningError, match="up.bias is a parameter of two optimizers"):
                call()
        adafactor.param_groups.pop()
        assert_same_bits(run.state(), before)
        dt.load(tmp_path / "one", run.model, [adafactor])
        assert_same_bits(run.state()["optimizer"][1], state["optimizer"][1])
        dt.load_state_dict(
            run.model, [adafactor], {**state, "optimizer": state["optimizer"][1], "attributes": {}}
        )
        dt.load(tmp_path / "three", run.model, run.optimizers)
        assert_same_bits(run.state(), state)
        assert len(run.take(batches(1))) == 1
