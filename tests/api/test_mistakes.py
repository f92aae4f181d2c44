"""What a new user tries: it works, or the error says what is wrong and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from tests.api.training import MEGATRON, SIX, adamw, make_model
from tests.models import batch, loss_fn

TP2 = dt.Mesh(tp=2)
TOKENS, TARGETS = batch()


class OwnAdam(torch.optim.AdamW):
    pass


def step(loss: Callable[..., Any] = loss_fn, make: Any = adamw, **options: Any) -> dt.TrainStep:
    model = make_model()
    return dt.train_step(dt.parallelize(model, TP2, MEGATRON), loss, make(model), **options)


def test_arguments_by_name_and_a_lambda() -> None:
    expected = step().gradients(TOKENS, TARGETS)
    by_name = step().gradients(tokens=TOKENS, targets=TARGETS)
    plain = step(lambda m, x, y: loss_fn(m, x, y)[0]).gradients(TOKENS, TARGETS)
    for name, value in expected.items():
        assert torch.equal(by_name[name], value) and torch.equal(plain[name], value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x, y: m(x).sum(-1), r"A loss is one number(.|\n)*it returned f32\[4,8\]"),
        (lambda m, x, y: 3.0, "A loss is one number"),
        (lambda m, x, y: None, "A loss is one number"),
        (lambda m, x, y: (m(x).mean(), {"a": m(x)}), "a dict of scalar tensors by name"),
        (lambda m, x, y: m(x).mean().detach(), "does not depend on any parameter"),
    ],
)
def test_losses_that_are_none(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(dt.PlanningError, match=message) as caught:
        step(loss).plan(TOKENS, TARGETS)
    assert "test_mistakes.py:" in str(caught.value) and "fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is not known to be elementwise"),
        (lambda m: OwnAdam(m.parameters()), "OwnAdam is not known to be elementwise"),
        (
            lambda m: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]),
            r"a parameter of shape \[2\] that is not one of the model's",
        ),
        (lambda m: 3, "the optimizer is 3, not a torch.optim optimizer"),
    ],
)
def test_optimizers_that_do_not_do(make: Any, message: str) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        step(make=make)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step(schedule=3), "schedule=3 is not a schedule"),
        (lambda: step(clip_grad_norm=0.0), "clip_grad_norm=0.0"),
        (lambda: dt.parallelize(dt.parallelize(make_model(), TP2), TP2), "parallelized already"),
        (
            lambda: dt.train_step(make_model(), loss_fn, adamw(make_model())),  # type: ignore[arg-type]
            "takes a parallelized module, not GPT",
        ),
        (lambda: dt.launch(TP2, backend="x").__enter__(), "backend='x'"),  # type: ignore[arg-type]
        (lambda: dt.launch(TP2, mode="x").__enter__(), "mode='x'"),  # type: ignore[arg-type]
        (
            lambda: step(schedule=dt.GPipe(3)).plan(TOKENS, TARGETS),
            r"does not divide into microbatches(.|\n)*fix: microbatches=2",
        ),
        (
            lambda: step(inputs=dict(dp=dt.Row())).plan(TOKENS, TARGETS),
            'names the axis "dp", which is not in the mesh',
        ),
    ],
)
def test_refused_while_planning(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        call()


def test_the_wrong_mesh() -> None:
    with (
        dt.launch(dt.Mesh(tp=4)),
        pytest.raises(dt.PlanningError, match=r"launch is on mesh\(tp=4\), .* for mesh\(tp=2\)"),
    ):
        step()(TOKENS, TARGETS)


def test_a_parallelized_module_is_not_called() -> None:
    with pytest.raises(TypeError, match=r"dt.compile\(lambda model, x: model\(x\), mesh\)"):
        dt.parallelize(make_model(), TP2)(TOKENS)


def test_an_output_of_the_last_stage_as_an_argument() -> None:
    where = SIX["pp2"]
    model = dt.parallelize(make_model(), where.mesh, stages=where.stages)
    logits = dt.compile(model, where.mesh)(TOKENS)
    assert str(logits.spec) == "f32[4,8,32] on pp=1"
    total = dt.compile(lambda x: x.sum(), where.mesh)
    with pytest.raises(dt.PlanningError, match=r"on pp=1: only a part of the mesh"):
        total(logits)
    assert total(logits.full_tensor()).item() == pytest.approx(logits.full_tensor().sum().item())


def test_evaluation_beside_training_uses_the_trained_values() -> None:
    model = make_model()
    parallel = dt.parallelize(model, TP2, MEGATRON)
    optimizer = adamw(model)
    train = dt.train_step(parallel, loss_fn, optimizer)
    evaluate = dt.compile(lambda m, x, y: loss_fn(m, x, y)[0], TP2)
    with dt.launch(TP2):
        before = evaluate(parallel, TOKENS, TARGETS).item()
        first, second = float(train(TOKENS, TARGETS)), float(train(TOKENS, TARGETS))
        after = evaluate(parallel.eval(), TOKENS, TARGETS).item()
        parallel.train()
        third = float(train(TOKENS, TARGETS))
        dt.gather_state_dict(parallel, optimizer)
    assert before == pytest.approx(first, rel=1e-6) and after == pytest.approx(third, rel=1e-6)
    assert third < second < first
