"""A train step and an evaluation of the same model, in turns, with several runs under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from tests.models import loss_fn
from tests.training import (
    Run,
    adamw,
    assert_losses_close,
    assert_same_bits,
    batches,
    make_model,
    sgd,
    train_torch,
)

DATA = batches(3)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def alternate(run: Run, evaluate: Any) -> tuple[list[float], list[Tensor]]:
    """Nothing is read before all is submitted: the stages are in several runs at once."""
    made = [(run.step(*one), evaluate(run.model, DATA[0][0])) for one in DATA]
    return [float(loss) for loss, _ in made], [found.full_tensor() for _, found in made]


@pytest.mark.slow
def test_each_evaluation_sees_the_steps_before_it() -> None:
    run = Run.of("pp2", clip=None)
    evaluate = dt.compile(logits, run.mesh)
    with dt.launch(run.mesh) as session:
        losses, found = alternate(run, evaluate)
        run.state()
        handles = list(session.cluster._handles.values())  # type: ignore[attr-defined]
    module = make_model()
    optimizer = adamw(module)
    for one, loss, outputs in zip(DATA, losses, found, strict=True):
        assert_losses_close([loss], train_torch(module, optimizer, [one]))
        torch.testing.assert_close(outputs, module(DATA[0][0]), rtol=0, atol=1e-5)
    # The runtime's own programs: training writes the parameters, evaluation reads them.
    programs = {handle.program.name: handle.program for handle in handles}
    trains, evaluates = programs["loss_fn"], programs["logits"]
    between = daft.interference(trains, evaluates)
    assert between.actors == ("rank 0", "rank 1") and not between.commutes
    assert {conflict.kind for conflict in between.conflicts} == {"read-write"}
    assert all(c.first.writes and not c.second.writes for c in between.conflicts)
    assert daft.interference(evaluates, evaluates).commutes
    assert {c.kind for c in daft.interference(trains, trains).conflicts} == {"write-write"}


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2, 3])
def test_two_optimizers_of_one_model_take_turns(level: int) -> None:
    """Each finds the parameters as the other left them, in whatever memory."""
    module, plain = make_model(), make_model()
    mesh = dt.Mesh(dp=2)
    model = dt.parallelize(module, mesh, {}, zero={"dp": level} if level else None)
    made = [make(module) for make in (adamw, sgd)]
    inputs = dict(dp=dt.Row())
    steps = [
        dt.train_step(model, loss_fn, optimizer, inputs=inputs, clip_grad_norm=clip)
        for optimizer, clip in zip(made, (0.5, None), strict=True)
    ]
    own = [make(plain) for make in (adamw, sgd)]
    with dt.launch(mesh):
        for number, one in enumerate(DATA * 2):
            at = number % 2
            expected = train_torch(plain, own[at], [one], clip=(0.5, None)[at])
            assert_losses_close([float(steps[at](*one))], expected)


@pytest.mark.ray
def test_the_same_bits_on_ray(ray_session: None) -> None:
    results: list[Any] = []
    for backend in ("inprocess", "ray"):
        run = Run.of("pp2")
        evaluate = dt.compile(logits, run.mesh)
        with dt.launch(run.mesh, backend=backend):
            losses, found = alternate(run, evaluate)
            results.append([losses, found, run.state()])
    assert_same_bits(results[1][1], results[0][1])
    assert_same_bits(results[1][2], results[0][2])
    assert results[1][0] == results[0][0]
