"""Optimizer state is stored in the tables of the ranks as values with names, specs and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtensor as dt
from dtensor.api.store.home import OptimizerHome
from dtensor.api.store.session import MeshSession
from dtensor.daft import DaftError
from dtensor.runtime.optimizer.shard_optimizer import MASTER
from tests.runtime.test_shard_optimizer import VARIANTS, O
from tests.training import assert_same_bits, train_torch

MESH = dt.Mesh(tp=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


class Trained:
    """A model on two ranks with optimizer and step, and the same in plain torch."""

    def __init__(self, kind: type[O.Optimizer], given: Mapping[str, Any], **more: Any) -> None:
        dtype = torch.bfloat16 if more.get("master_weights") else torch.float32
        torch.manual_seed(0)
        self.module = Net().to(dtype)
        torch.manual_seed(0)
        self.plain = Net().to(dtype)
        self.model = dt.parallelize(self.module, MESH, {"*.weight": dict(tp=dt.Row())})
        make: Any = kind
        self.optimizer: O.Optimizer = make(self.module.parameters(), **given)
        self.expected: O.Optimizer = make(self.plain.parameters(), **given)
        self.step = dt.train_step(self.model, squares, self.optimizer, **more)
        self.data = [(torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype))] * 6

    def home(self, session: MeshSession) -> OptimizerHome:
        (home,) = session.model_home(self.model).optimizers.values()
        return home

    def by_torch(self, number: int) -> float:
        (loss,) = train_torch(self.plain, self.expected, [self.data[number]], loss=squares)
        return loss

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.optimizer)


@pytest.mark.default("sgd-False")
@pytest.mark.parametrize(
    ("variant", "masters"),
    [(name, False) for name in VARIANTS] + [(name, True) for name in ("sgd", "adamw", "rprop")],
)
def test_optimizer_state_put_back_by_name_continues_bitwise(variant: str, masters: bool) -> None:
    """The tables hold the complete state: the optimizer of another rank continues with it."""
    kind, given = VARIANTS[variant]
    results: list[Any] = []
    for put in (False, True):
        run = Trained(kind, given, master_weights=masters)
        with dt.launch(MESH) as session:
            losses = [float(run.step(*one)) for one in run.data[:2]]
            values = run.home(session).values()
            for (label, key), stored in values.items() if put else ():
                assert stored.label == f"model 0: optimizer 0: {key} of {label}"
                shards = session.launch.store.fetch([stored])[stored.label]
                for rank, shard in shards.items():
                    assert shard.shape == stored.spec.local_shape(MESH.coordinates(rank))
                    assert shard.dtype == stored.spec.dtype
                session.put([{stored.label: shards[rank]} for rank in range(2)])
            losses += [float(run.step(*one)) for one in run.data[2:]]
            state = run.state()
        entries = {key for entry in state["optimizer"]["state"].values() for key in entry}
        assert entries == {key for _, key in values}
        assert (MASTER in entries) == masters
        results.append((losses, state["model"], state["optimizer"]["state"]))
    assert_same_bits(results[0], results[1])


def test_writing_one_state_value_changes_only_its_parameter() -> None:
    run = Trained(O.SGD, dict(lr=1.0, momentum=0.5))
    with dt.launch(MESH) as session:
        float(run.step(*run.data[0]))
        stored = run.home(session).values()["b.bias", "momentum_buffer"]
        assert stored.at == (0, 1) and stored.spec.local_shape({"tp": 0}) == (4,)
        session.put([{stored.label: torch.full((4,), 100.0)}] * 2)
        before = run.module.b.bias.detach().clone()
        others = run.module.a.bias.detach().clone()
        float(run.step(*run.data[0]))
        assert torch.all((before - run.module.b.bias.detach() - 50).abs() < 5)
        assert torch.all((others - run.module.a.bias.detach()).abs() < 5)


def test_optimizer_state_is_empty_before_first_step() -> None:
    """It is also empty after a first step that was undone."""
    run = Trained(O.AdamW, {})
    x, y = run.data[0]
    with dt.launch(MESH) as session:
        step = dt.train_step(run.model, squares, run.optimizer, detect_nan=True)
        with pytest.raises(DaftError, match="NaN|nan"):
            float(step(x * float("nan"), y))
        assert run.home(session).values() == {}
        assert run.state()["optimizer"]["state"] == {}
        float(step(x, y))
        assert len(run.home(session).values()) == 3 * 4
    assert len(run.state()["optimizer"]["state"]) == 4


def test_momentum_switched_on_and_off_matches_torch() -> None:
    run = Trained(O.SGD, dict(lr=0.1))
    with dt.launch(MESH) as session:
        for number, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.5, 0.5)):
            for optimizer in (run.optimizer, run.expected):
                optimizer.param_groups[0]["momentum"] = momentum
            found, expected = float(run.step(*run.data[number])), run.by_torch(number)
            assert abs(found - expected) < 1e-6
            assert bool(run.home(session).values()) == (number > 0)
    torch.testing.assert_close(
        run.optimizer.state_dict()["state"], run.expected.state_dict()["state"]
    )


def test_alternating_steps_sharing_one_optimizer_match_torch() -> None:
    """The steps train different parameters; the state is read in between."""

    def of_a(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model.a(x).square().mean()

    run = Trained(O.AdamW, {})
    steps = (dt.train_step(run.model, of_a, run.optimizer), run.step)
    with dt.launch(MESH):
        for number, which in enumerate((0, 0, 1, 0, 1, 1)):
            data = [run.data[number]]
            (loss,) = train_torch(run.plain, run.expected, data, loss=(of_a, squares)[which])
            assert abs(float(steps[which](*run.data[number])) - loss) < 1e-6
            if number == 3:
                assert run.optimizer.state[run.module.a.weight]["step"] == 4
    torch.testing.assert_close(
        run.optimizer.state_dict()["state"],
        run.expected.state_dict()["state"],
        rtol=1e-4,
        atol=1e-6,
    )


def test_optimizer_state_with_wrong_shape_or_entries_is_refused() -> None:
    run = Trained(O.AdamW, {})
    with dt.launch(MESH):
        float(run.step(*run.data[0]))
        run.optimizer.param_groups[0]["amsgrad"] = True
        for _ in range(2):
            with pytest.raises(dt.PlanningError, match=r"reads max_exp_avg_sq of a\.weight"):
                run.step(*run.data[1])
        run.optimizer.param_groups[0]["amsgrad"] = False
        float(run.step(*run.data[1]))
        state = run.state()
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    dt.load_state_dict(run.model, run.optimizer, state)
    with dt.launch(MESH), pytest.raises(dt.PlanningError, match=r"has the shape \[3\]"):
        run.step(*run.data[1])
    del state["optimizer"]["state"][0]["exp_avg"]
    dt.load_state_dict(run.model, run.optimizer, state)
    with dt.launch(MESH), pytest.raises(dt.PlanningError, match="has only exp_avg_sq, step"):
        run.step(*run.data[1])


def test_adagrad_initial_accumulator_is_kept_for_meta_device_model() -> None:
    with torch.device("meta"):
        module = Net()
    model = dt.parallelize(module, MESH, {"*.weight": dict(tp=dt.Row())}, init="reset")
    optimizer = O.Adagrad(module.parameters(), initial_accumulator_value=0.5)
    step = dt.train_step(model, squares, optimizer)
    with dt.launch(MESH):
        float(step(torch.randn(4, 8), torch.randn(4, 8)))
        state = dt.gather_state_dict(model, optimizer)["optimizer"]["state"]
    for entry in state.values():
        assert float(entry["sum"].min()) >= 0.5 and float(entry["sum"].max()) < 1
