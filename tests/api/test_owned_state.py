"""The state of optimizers that need whole parameters: saved, loaded, switched, read and written
under any placement, and undone with a step that fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.errors import PlanningError
from dtensor.runtime.optimizer.elementwise import optimizer_rule
from tests.training import assert_same_bits

PLACES: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, Any]]] = {
    # mesh, placements, inputs
    "dp2": (dt.Mesh(dp=2), {}, dict(dp=dt.Row())),
    "tp2": (dt.Mesh(tp=2), {"0.w*": dict(tp=dt.Row()), "2.*": dict(tp=dt.Column())}, {}),
}
DOES: list[Callable[[], object]] = [int]
"""What a step of `Rotating` does besides: the last of these."""


class Rotating(torch.optim.Optimizer):
    """A small SOAP: its state has lists of column-major matrices, and a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                bases = [torch.eye(n, dtype=p.dtype) for n in p.shape]
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "Q": bases}
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.5)
            left, right = state["Q"]
            p.sub_(left.T @ state["exp_avg"] @ right, alpha=0.1 / state["step"])
            torch.linalg.eigh(p @ p.T)  # raises for NaN
            DOES[-1]()
            state["Q"] = [torch.linalg.qr(m)[0] for m in (p @ p.T + left, p.T @ p + right)]


class ByText(Rotating):
    """Keeps a number in the state under a text key."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rates: Any = self.state["rates"]  # type: ignore[index]
        rates["last"] = 0.9 * rates.get("last", 1.0)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.mul_(rates["last"])
        super().step()


def of_package(package: str, name: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda ps: getattr(pytest.importorskip(package), name)(ps, lr=0.01)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.1),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "Rotating": lambda ps: Rotating(ps, {}),
    "ByText": lambda ps: ByText(ps, {}),
    "SOAP": of_package("pytorch_optimizer", "SOAP"),
    "Shampoo": of_package("pytorch_optimizer", "Shampoo"),
}
NAMES = [
    *("Muon", "Adafactor", "ByText"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("SOAP", "Shampoo")),
]


class Scaled(nn.Linear):
    """A linear layer with a scalar parameter."""

    def __init__(self, *sizes: int, bias: bool) -> None:
        super().__init__(*sizes, bias=bias)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randn(8, 4)) for _ in range(count)]


class Training:
    """A model with its optimizer and step at a place."""

    def __init__(self, name: str, place: str = "dp2", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        linear = Scaled if name == "Adafactor" else nn.Linear  # others take matrices only
        layers = linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)
        module = nn.Sequential(*layers).to(dtype)
        self.mesh, placements, inputs = PLACES[place]
        self.model = dt.parallelize(module, self.mesh, placements)
        self.opt = OPTIMIZERS[name](list(module.parameters()))
        masters = dtype != torch.float32
        self.step = dt.train_step(
            self.model, loss_fn, self.opt, inputs=inputs, master_weights=masters
        )

    def train(self, data: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        dtype = next(self.model.parameters()).dtype
        return [float(self.step(x.to(dtype), y.to(dtype))) for x, y in data]

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.opt)


@pytest.mark.parametrize("name", NAMES)
def test_state_under_other_placements(name: str, tmp_path: Path) -> None:
    """dp2 to tp2 by a checkpoint, and back by a switch and by a state dict, is bitwise, and the
    training that goes on has the bits of an uninterrupted one."""
    data, first = batches(4), Training(name)
    with dt.launch(first.mesh):
        first.train(data[:1])
        dt.save(tmp_path / "dp2", first.model, first.opt)
        expected = first.state()
    second = Training(name, "tp2")
    with dt.launch(second.mesh) as run:
        dt.load(tmp_path / "dp2", second.model, second.opt)
        assert_same_bits(second.state(), expected)
        second.train(data[1:2])
        expected = second.state()
        mesh, placements, inputs = PLACES["dp2"]
        run.switch(second.model, second.opt, mesh, placements, inputs=inputs)
        assert_same_bits(second.state(), expected)
        second.train(data[2:3])
        dt.save(tmp_path / "back", second.model, second.opt)
        second.train(data[3:])
        end = second.state()
    torch.save(expected, tmp_path / "state.pt")
    for number in range(2):
        third = Training(name)
        if number:  # outside a launch
            dt.load(tmp_path / "back", third.model, third.opt)
        else:
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            dt.load_state_dict(third.model, third.opt, state)
        with dt.launch(third.mesh):
            third.train(data[2 + number :])
            assert_same_bits(third.state(), end)


def test_masters_are_in_the_state(tmp_path: Path) -> None:
    data, one = batches(3), Training("Rotating", dtype=torch.bfloat16)
    with dt.launch(one.mesh):
        one.train(data[:2])
        dt.save(tmp_path / "1", one.model, one.opt)
        state = one.state()
        one.train(data[2:])
        end = one.state()
    master = state["optimizer"]["state"][0]["master_param"]
    assert master.dtype == torch.float32
    assert_same_bits(master.bfloat16(), state["model"]["0.weight"])
    other = Training("Rotating", dtype=torch.bfloat16)
    with dt.launch(other.mesh):
        dt.load(tmp_path / "1", other.model, other.opt)
        other.train(data[2:])
        assert_same_bits(other.state(), end)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_saved_tensors(tmp_path: Path) -> None:
    """Tensors have their usual names in the files, and lists number theirs."""
    from torch.distributed.checkpoint.state_dict_loader import load

    one = Training("Rotating")
    with dt.launch(one.mesh):
        one.train(batches(1))
        dt.save(tmp_path / "1", one.model, one.opt)
        state = one.state()["optimizer"]["state"][0]
    names = {f"optimizer.state.0.weight.{k}": k for k in ("exp_avg", "Q.0", "Q.1")}
    read = {name: torch.zeros(8, 6 if "exp" in name else 8) for name in names}
    read["optimizer.state.0.weight.Q.1"] = torch.zeros(6, 6)
    load(read, checkpoint_id=tmp_path / "1", no_dist=True)
    assert_same_bits(list(read.values()), [state["exp_avg"], *state["Q"]])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nested_state_of_another_program_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    one = Training("Rotating")
    module, opt = one.model.module, Rotating(list(one.model.module.parameters()), {})
    loss_fn(module, *batches(1)[0]).backward()
    opt.step()
    model_state, optimizer_state = get_state_dict(module, opt)
    state = {"model": model_state, "optimizer": optimizer_state}
    save(state, checkpoint_id=tmp_path / "1", no_dist=True)
    with pytest.raises(PlanningError, match=r"weight.Q.0 is part of a nested value in"):
        dt.load(tmp_path / "1", one.model, one.opt)


def test_state_that_the_user_writes_is_put_again() -> None:
    data, one = batches(2), Training("Rotating")
    parameter = next(one.model.parameters())
    with dt.launch(one.mesh):
        one.train(data[:1])
        one.opt.state[parameter]["exp_avg"].zero_()
        one.opt.state[parameter]["Q"][0] = torch.eye(8)
        before = one.state()
        one.train(data[1:])
        after = one.state()
    assert before["optimizer"]["state"][0]["exp_avg"].abs().max() == 0
    other = Training("Rotating")
    dt.load_state_dict(other.model, other.opt, before)
    with dt.launch(other.mesh):
        other.train(data[1:])
        assert_same_bits(other.state(), after)


# -- failures --------------------------------------------------------------------------------------


def test_step_that_probes_again_leaves_no_old_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded state needs no other probe. An option of another kind does: the probe compares the
    loaded state with parameters, so it reads them, while the step is submitted."""
    monkeypatch.setattr(optimizer_rule, "_PROBED_BY_CLASS", {})
    (data, other), training = batches(2), Training("Muon")
    with dt.launch(training.mesh):
        training.train([data])
        state = training.state()
        rule = optimizer_rule.rule_of(training.opt)
        dt.load_state_dict(training.model, training.opt, state)
        assert optimizer_rule.rule_of(training.opt) is rule
        training.opt.param_groups[0]["nesterov"] = False
        training.train([other])
        for label, value in training.state()["model"].items():
            assert not torch.equal(value, state["model"][label])


def test_update_that_raises_is_undone() -> None:
    """A NaN in an eigendecomposition, and Ctrl-C within the update, change nothing."""
    data, one = batches(3), Training("ByText")
    with dt.launch(one.mesh):
        one.train(data[:1])
        before = one.state()
        with pytest.raises(TaskError, match="linalg.eigh"):
            one.train([(data[1][0] * torch.nan, data[1][1])])
        assert_same_bits(one.state(), before)
        DOES.append(lambda: signal.raise_signal(signal.SIGINT))
        try:
            with pytest.raises(KeyboardInterrupt):
                one.train(data[1:2])
        finally:
            DOES.pop()
        assert_same_bits(one.state(), before)
        one.train(data[1:])
        end = one.state()
    expected = Training("ByText")
    with dt.launch(expected.mesh):
        expected.train(data)
        assert_same_bits(end, expected.state())


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:recovered in")
def test_recovered_ranks_have_the_state(ray_session: None) -> None:
    """Ranks that are killed in the first step, which makes the state, and later."""
    data, expected, one = batches(4), Training("ByText"), Training("ByText")
    with dt.launch(expected.mesh):
        losses = expected.train(data)
        state = expected.state()
    with dt.launch(one.mesh, backend="ray", spares=1, snapshot_every=1) as run:
        cluster: Any = run.launch.cluster
        found: list[float] = []
        for number, (x, y) in enumerate(data):
            loss = one.step(x, y)
            if number in (0, 2):
                os.kill(cluster.membership.host(number // 2).counter.pid, signal.SIGKILL)
            found.append(float(loss))
        assert found == losses
        assert_same_bits(one.state(), state)


def test_state_that_a_checkpoint_cannot_keep(tmp_path: Path) -> None:
    one = Training("Rotating")
    with dt.launch(one.mesh):
        one.train(batches(1))
        for state in one.opt.state.values():
            state["view"] = state["exp_avg"][:1]
        with pytest.raises(PlanningError, match=r"exp_avg and view of 0.weight share memory"):
            dt.save(tmp_path / "1", one.model, one.opt)
        for state in one.opt.state.values():
            state["view"] = torch.eye(2).to_sparse()
        with pytest.raises(
            PlanningError, match=r"the state of 0.weight cannot be put on the ranks"
        ):
            one.train(batches(1))
