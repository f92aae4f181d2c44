"""Several parallelized modules in one call: teacher and student, generator and discriminator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.training import train_torch

TP, DP, PP = dt.Mesh(tp=2), dt.Mesh(dp=2), dt.Mesh(pp=2)
SPLIT = {"0.weight": dict(tp=dt.Row()), "2.weight": dict(tp=dt.Column())}


def mlp(seed: int, width: int = 16, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(width) if norm else nn.GELU()
    return nn.Sequential(nn.Linear(8, width), middle, nn.Linear(width, 8))


def rows(i: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(i))


def distil(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(student(x), teacher(x).detach())


def pull(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    """A loss that gives the teacher gradients; the teacher has no optimizer."""
    return F.mse_loss(student(x), teacher(x))


PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, Any]]] = {
    "tp": (TP, {"placements": SPLIT}, {"placements": SPLIT}),
    "tp, the student alone": (TP, {"placements": SPLIT}, {}),
    "dp": (DP, {}, {}),
    "dp, ZeRO-3 of the student": (DP, {"zero": {"dp": 3}}, {}),
    "dp, ZeRO-3 of both": (DP, {"zero": {"dp": 3}}, {"zero": {"dp": 3}}),
    "pp": (PP, *[{"stages": {"pp": [["0.*"], ["2.*"]]}}] * 2),
}


@pytest.mark.default("tp-distil")
@pytest.mark.parametrize("loss_fn", [distil, pull])
@pytest.mark.parametrize("placed", PLACED)
def test_distillation_of_student_from_teacher_matches_torch(
    placed: str, loss_fn: Callable[..., Tensor]
) -> None:
    mesh, one, other = PLACED[placed]
    plain, plain_teacher = mlp(0), mlp(1, 32)
    student, teacher = copy.deepcopy(plain), copy.deepcopy(plain_teacher)
    expected = train_torch(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=0.05),
        [(plain_teacher, rows(i)) for i in range(3)],
        loss=loss_fn,
    )
    step = dt.train_step(
        dt.parallelize(student, mesh, **one),
        loss_fn,
        torch.optim.AdamW(student.parameters(), lr=0.05),
        inputs={"x": dict(dp=dt.Row())} if mesh == DP else None,
    )
    frozen = dt.parallelize(teacher, mesh, **other)
    with dt.launch(mesh):
        found = [float(step(frozen, rows(i))) for i in range(3)]
    assert found == pytest.approx(expected, rel=1e-5)
    for a, b in zip(student.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(teacher.parameters(), plain_teacher.parameters(), strict=True):
        assert torch.equal(a, b)


def first_half(d: nn.Module, g: nn.Module, z: Tensor, x: Tensor) -> Tensor:
    return F.softplus(d(g(z).detach())).mean() + F.softplus(-d(x)).mean()


def second_half(g: nn.Module, d: nn.Module, z: Tensor) -> Tensor:
    return F.softplus(-d(g(z))).mean()


@pytest.mark.default("mesh0")
@pytest.mark.parametrize("mesh", [TP, DP])
def test_generator_and_discriminator_steps_match_torch(mesh: dt.Mesh) -> None:
    plain_g, plain_d = mlp(0, norm=True), mlp(1)
    g, d = copy.deepcopy(plain_g), copy.deepcopy(plain_d)
    expected: list[float] = []
    of_g = torch.optim.SGD(plain_g.parameters(), lr=0.1)
    of_d = torch.optim.SGD(plain_d.parameters(), lr=0.1)
    for i in range(3):
        for optimizer, loss in (
            (of_d, lambda i=i: first_half(plain_d, plain_g, rows(i), rows(i + 10))),
            (of_g, lambda i=i: second_half(plain_g, plain_d, rows(i))),
        ):
            plain_g.zero_grad(), plain_d.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            expected.append(value.item())
    pins = SPLIT if mesh == TP else {}
    here_g, here_d = dt.parallelize(g, mesh, {}), dt.parallelize(d, mesh, pins)
    inputs = {"z": dict(dp=dt.Row())} if mesh == DP else None
    step_d = dt.train_step(
        here_d, first_half, torch.optim.SGD(d.parameters(), lr=0.1), inputs=inputs
    )
    step_g = dt.train_step(
        here_g, second_half, torch.optim.SGD(g.parameters(), lr=0.1), inputs=inputs
    )
    both = dt.compile(lambda g, d, z: d(g(z)), mesh)
    found: list[float] = []
    with dt.launch(mesh):
        for i in range(3):
            found.append(float(step_d(here_g, rows(i), rows(i + 10))))
            found.append(float(step_g(here_d, rows(i))))
        here_g.eval(), plain_g.eval()
        scores = both(here_g, here_d, rows(5)).full_tensor()
        running = g[1].running_mean.clone()
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(scores, plain_d(plain_g(rows(5))), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(running, plain_g[1].running_mean, rtol=1e-5, atol=1e-6)
    assert g[1].num_batches_tracked == plain_g[1].num_batches_tracked == 6
    for a, b in zip(
        [*g.parameters(), *d.parameters()], [*plain_g.parameters(), *plain_d.parameters()]
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def step_on(student: nn.Module) -> dt.TrainStep:
    model = student if isinstance(student, dt.ParallelModule) else dt.parallelize(student, TP, {})
    return dt.train_step(model, distil, torch.optim.SGD(model.parameters(), lr=0.1))


def test_modules_on_different_meshes_or_stages_in_one_call_are_refused() -> None:
    student, teacher = mlp(0), mlp(1)
    step = step_on(student)
    with pytest.raises(dt.PlanningError, match="parallelized on .*dp=2.*the program is for"):
        step.plan(dt.parallelize(teacher, DP, {}), rows(0))
    with pytest.raises(dt.PlanningError, match="a part of it"):
        step.plan(dt.parallelize(student[0], TP, {}), rows(0))
    teacher[0].weight = student[0].weight
    with pytest.raises(dt.PlanningError, match=r"share a tensor: student.0.weight is teacher.0"):
        step.plan(dt.parallelize(teacher, TP, {}), rows(0))
    named = nn.Module()
    named.teacher, named.forward = nn.Linear(8, 8), lambda x: x
    with pytest.raises(dt.PlanningError, match="give the argument another name"):
        step_on(named).plan(dt.parallelize(mlp(2), TP, {}), rows(0))
    with pytest.raises(dt.PlanningError, match="one of the model's"):
        one, other = dt.parallelize(mlp(0), TP, {}), mlp(1)
        dt.train_step(one, distil, torch.optim.SGD([*one.parameters(), *other.parameters()]))
    meshed = [dt.parallelize(mlp(i), PP, {}, stages=s) for i, s in enumerate([None, "auto"])]
    with pytest.raises(dt.PlanningError, match="stages alike"):
        dt.compile(lambda a, b, x: a(b(x)), PP).plan(*meshed, rows(0))


def test_plain_module_beside_parallelized_one_is_refused() -> None:
    with dt.launch(TP), pytest.raises(dt.PlanningError, match="not parallelized"):
        step_on(mlp(0))(mlp(1), rows(0))
