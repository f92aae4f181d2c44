"""State is gathered in full, in torch's format, and can be loaded under any placement."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from tests.models import MLP, batch
from tests.training import (
    Placed,
    Run,
    adamw,
    assert_losses_close,
    assert_same_bits,
    batches,
    make_model,
    sgd,
    train_torch,
)

DATA = batches(3) * 2


def scrambled(**options: Any) -> nn.Module:
    """Return a model whose values must all be replaced by loading."""
    model = make_model(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


@pytest.mark.default("dp4-single-inside-False")
@pytest.mark.parametrize(
    ("first", "second", "when", "tied"),
    [
        ("tp2_pp2", "dp2_tp2", "outside", False),
        ("dp4", "single", "inside", False),
        ("pp2", "tp2", "after a step", True),
    ],
)
def test_training_continues_under_other_placement_as_in_torch(
    first: str, second: str, when: str, tied: bool
) -> None:
    make = adamw if tied else sgd
    plain = make_model(tied=tied)
    optimizer = make(plain)
    expected = train_torch(plain, optimizer, DATA, clip=1.0)

    schedule = dt.GPipe(1 if first == "dp4" else 2)
    a = Run.of(first, module=make_model(tied=tied), make=make, schedule=schedule)
    with dt.launch(a.mesh):
        losses = a.losses(DATA[:3])
        state = a.state()
    kept = copy.deepcopy(state)

    b = Run.of(second, module=scrambled(tied=tied), make=make)
    if when == "outside":
        dt.load_state_dict(b.model, b.optimizer, state)
    with dt.launch(b.mesh):
        if when != "outside":
            if when == "after a step":
                float(b.step(*DATA[0]))
            dt.load_state_dict(b.model, b.optimizer, state)
        losses += b.losses(DATA[3:])
        final = b.state()
    assert_losses_close(losses, expected)
    assert_same_bits(state, kept)  # what was given is not changed
    if make is sgd:  # AdamW turns rounding of the zero gradients of key biases into steps of lr
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(final["model"][name], value, rtol=0, atol=2e-6)
    assert set(final["optimizer"]["state"]) == set(optimizer.state_dict()["state"])


def test_plain_torch_continues_from_gathered_state() -> None:
    run = Run.of("tp2_pp2")
    with dt.launch(run.mesh):
        losses = run.losses(DATA[:3])
        state = run.state()
    model = scrambled()
    optimizer = adamw(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses += train_torch(model, optimizer, DATA[3:], clip=1.0)
    plain = make_model()
    assert_losses_close(losses, train_torch(plain, adamw(plain), DATA, clip=1.0))


def test_training_continues_from_state_of_plain_torch() -> None:
    model = make_model()
    optimizer = adamw(model)
    losses = train_torch(model, optimizer, DATA[:3], clip=1.0)
    run = Run.of("tp2_pp2", module=scrambled())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dt.load_state_dict(run.model, run.optimizer, state)
    with dt.launch(run.mesh):
        losses += run.losses(DATA[3:])
        run.state()
    plain = make_model()
    assert_losses_close(losses, train_torch(plain, adamw(plain), DATA, clip=1.0))


def test_tied_names_share_one_value_in_gathered_state() -> None:
    run = Run.of("pp2")
    with dt.launch(run.mesh):
        run.losses(DATA[:2])
        values = run.state()["model"]
    assert set(values) == set(run.module.state_dict())
    assert torch.equal(values["head.weight"], values["embed.weight"])
    assert not torch.equal(values["head.weight"], make_model().state_dict()["head.weight"])


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.default("2")
@pytest.mark.parametrize("hidden", [7, 2])
def test_state_of_uneven_and_empty_shards_is_gathered_and_loaded(hidden: int) -> None:
    """7 over 3 ranks is 3, 3, 1; 2 over 3 ranks leaves one rank without elements."""
    where = Placed(
        axes=dict(tp=3), pins={"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    )
    data = [(torch.randn(4, 16),) for _ in range(4)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MLP(hidden=hidden)

    plain = build()
    expected = train_torch(plain, adamw(plain), data, loss=squares)
    a, b = (Run.of(where, module=build(), loss=squares, clip=None) for _ in range(2))
    with dt.launch(a.mesh):
        losses = a.losses(data[:2])
        state = a.state()
    dt.load_state_dict(b.model, b.optimizer, state)
    with dt.launch(b.mesh):
        losses += b.losses(data[2:])
        final = b.state()["model"]
    assert_losses_close(losses, expected)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(final[name], value, rtol=0, atol=1e-6)


# -- when values move ------------------------------------------------------------------------------


def test_weights_changed_by_user_are_used_by_next_call() -> None:
    run = Run.of("tp2")
    with dt.launch(run.mesh):
        with torch.no_grad():
            run.module.embed.weight.zero_()  # type: ignore[union-attr, operator]
        first = run.step.gradients(*DATA[0])
        with torch.no_grad():
            run.module.embed.weight.fill_(0.3)  # type: ignore[union-attr, operator]
        second = run.step.gradients(*DATA[0])
        dt.load_state_dict(run.model, None, {"model": run.module.state_dict()})
        third = run.step.gradients(*DATA[0])
    assert not torch.equal(second["positions.weight"], first["positions.weight"])
    assert_same_bits(third, second)


def test_gathered_state_before_any_step_is_copy_of_users_state() -> None:
    run = Run.of("tp2")
    train_torch(run.module, run.optimizer, DATA[:1])
    expected = copy.deepcopy(run.module.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    with dt.launch(run.mesh):
        state = run.state()
        assert_same_bits((state["model"], state["optimizer"]), expected)
        run.step.gradients(*DATA[0])
        state = run.state()
        assert_same_bits((state["model"], state["optimizer"]), expected)
    train_torch(run.module, run.optimizer, DATA[:1])
    assert_same_bits((state["model"], state["optimizer"]), expected)  # a copy


def test_load_state_dict_rejects_malformed_state() -> None:
    run = Run.of("tp2")
    with pytest.raises(dt.PlanningError, match="no entry 'model'"):
        dt.load_state_dict(run.model, run.optimizer, run.module.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        dt.load_state_dict(run.model, None, {"model": make_model(vocab=64).state_dict()})


@pytest.mark.slow
def test_programs_for_other_batch_sizes_share_state() -> None:
    data = [batch(0), batch(1, size=2), batch(2), batch(3, size=2), batch(4, length=5)]
    run = Run.of("tp2_pp2")
    with dt.launch(run.mesh) as session:
        losses = run.losses(data)
        loaded = set(programs_of(session))
        losses += run.losses(data[1:3])
        assert set(programs_of(session)) == loaded  # nothing is captured or shipped again
        run.state()
    plain = make_model()
    assert_losses_close(losses, train_torch(plain, adamw(plain), data + data[1:3], clip=1.0))
