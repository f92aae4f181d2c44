"""Tests that `assert_same` passes for correct functions, and finds and names each kind of error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.sharding.rules import registry
from dtensor.sharding.rules.build import pattern, retarget
from dtensor.testing.same import difference
from dtensor.testing.trials import all_placements, enumerate_placements


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.up(x).relu()
        y = self.down(h) * self.scale
        return y if mask is None else y * mask


MEGATRON = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}


# -- ops with rules that are wrong ---------------------------------------------------------------


@torch.library.custom_op("dtensor_test_same::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@square.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dtensor_test_same::square_backward", mutates_args=())
def square_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 2 * x * grad


@square_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


square.register_autograd(
    lambda ctx, grad: torch.ops.dtensor_test_same.square_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture
def rules() -> Iterator[dict[str, registry.Builder]]:
    """Return the registry of rules; rules added by a test are removed after it."""
    before = dict(registry._BUILDERS)
    yield registry._BUILDERS
    registry._BUILDERS.clear()
    registry._BUILDERS.update(before)


def test_assert_same_checks_function_under_enumerated_placements() -> None:
    same = dt.testing.assert_same(
        lambda x, w: (x @ w).relu(), torch.randn(5, 6), torch.randn(6, 7), count=4
    )
    assert len(same.checked) == 12 and not same.refused
    assert any("Mesh(a=2, b=2)" in repr(m) or "mesh(a=2, b=2)" in m for m in same.checked)


def test_assert_same_checks_module_under_stated_placements_and_meshes() -> None:
    same = dt.testing.assert_same(MLP(), torch.randn(5, 6), placements=MEGATRON)
    assert [what.split(":")[0] for what in same.checked] == ["mesh(tp=2)", "mesh(tp=3)"]
    both = {**MEGATRON, "x": dict(dp=dt.Row())}
    same = dt.testing.assert_same(MLP(), torch.randn(5, 6), placements=[MEGATRON, both])
    assert len(same.checked) == 6
    mesh = dt.Mesh(tp=4)
    same = dt.testing.assert_same(MLP(), torch.randn(5, 6), placements=MEGATRON, meshes=[mesh])
    assert len(same.checked) == 1
    kwargs = {"mask": torch.ones(6)}
    dt.testing.assert_same(MLP(), torch.randn(5, 6), kwargs=kwargs, count=2)


def test_assert_same_runs_inside_launch_of_another_mesh() -> None:
    with dt.launch(dt.Mesh(dp=2)):
        same = dt.testing.assert_same(torch.relu, torch.randn(5, 6), count=2)
    assert len(same.checked) == 6


def test_assert_same_accepts_pytrees_integers_and_no_gradients() -> None:
    def pick(batch: dict[str, torch.Tensor], index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"picked": batch["x"][index], "count": index + 1}

    batch, index = {"x": torch.randn(7, 3)}, torch.tensor([6, 0, 3, 3])
    dt.testing.assert_same(pick, batch, index, count=4)
    dt.testing.assert_same(pick, batch, index, placements={"batch": dict(a=dt.Column())})
    same = dt.testing.assert_same(torch.argmax, torch.randn(5), gradients=False, count=2)
    assert same.checked


def test_assert_same_reports_wrong_rule_with_placements_and_plan(
    rules: dict[str, registry.Builder],
) -> None:
    """The wrong rule says that a square keeps partial sums."""
    wrong = pattern("... -> ...", linear=((0,),))
    rules["dtensor_test_same.square.default"] = wrong

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.dtensor_test_same.square(x @ w).sum(1)

    with pytest.raises(AssertionError) as caught:
        dt.testing.assert_same(
            fn,
            torch.ones(2, 4),
            torch.ones(4, 3000),
            placements={"x": dict(tp=dt.Column())},
            meshes=[dt.Mesh(tp=2)],
            gradients=False,
        )
    text = str(caught.value)
    # the square of 4 comes out as 2 squared plus 2 squared
    head = """\
fn does not give the same numbers under this placement.
  mesh:       mesh(tp=2)
  placement:  x: tp=Shard(-1)
  wrong:      the result
  spec:       f32[2] on mesh(tp=2)
  element:    [0], held by all ranks
  expected:   48000.0
  found:      24000.0
  2 of 2 elements differ; allowed is 0.48 (atol 1e-06 + rtol 1e-05 * 4.8e+04, the largest)

plan fn    mesh(tp=2)"""
    assert text.startswith(head), text
    assert "* " in text and "all_reduce" in text


def test_assert_same_reports_wrong_gradient(rules: dict[str, registry.Builder]) -> None:
    rules["dtensor_test_same.square.default"] = pattern("... -> ...")
    rules["dtensor_test_same.square_backward.default"] = pattern("..., ... -> ...", linear=((1,),))
    # correct: linear in each operand alone
    dt.testing.assert_same(torch.ops.dtensor_test_same.square, torch.randn(5, 3), count=4)
    # wrong: each rank runs another function
    rules["dtensor_test_same.square_backward.default"] = pattern(
        "..., ... -> ...", localize=lambda call, local: retarget(call, torch.mul, *call.args)
    )
    with pytest.raises(AssertionError, match="wrong:      the gradient of args.0"):
        dt.testing.assert_same(
            torch.ops.dtensor_test_same.square,
            torch.randn(5, 3),
            placements={"args.0": dict(tp=dt.Row())},
        )


def test_assert_same_raises_for_unplannable_stated_placement_and_lists_enumerated() -> None:
    def view(x: torch.Tensor) -> torch.Tensor:
        return x.view(3, 4).relu()

    x = torch.randn(12)
    with pytest.raises(dt.PlanningError, match="fix: "):
        dt.testing.assert_same(view, x, placements={"x": dict(tp=dt.Row(unit=5))})
    with pytest.raises(dt.PlanningError, match='names "y", which is no tensor'):
        dt.testing.assert_same(view, x, placements={"y": dict(tp=dt.Row())})
    with pytest.raises(dt.PlanningError, match='fix: write "up.weight"'):
        dt.testing.assert_same(
            MLP(), torch.randn(5, 6), placements={"up.weigth": dict(tp=dt.Row())}
        )


def test_assert_same_raises_if_every_placement_is_refused() -> None:
    """The op has no rule, so every placement is refused."""
    with pytest.raises(dt.PlanningError, match="no rule"):
        dt.testing.assert_same(
            torch.ops.dtensor_test_same.square, torch.randn(4), count=2, gradients=False
        )


# -- its parts -------------------------------------------------------------------------------------


def test_difference_describes_wrong_values_shapes_and_special_numbers() -> None:
    spec = dt.spec("f32[4@tp,2]", dt.Mesh(tp=2))
    x = torch.arange(8.0).view(4, 2)
    assert difference(x, x.clone(), spec) is None
    y = x.clone()
    y[3, 1] += 1e-4
    text = difference(y, x, spec)
    assert text is not None and "element:    [3, 1], held by rank 1\n" in text
    assert difference(y, x, spec, atol=1e-3) is None
    assert difference(y, x, spec, rtol=1e-4) is None
    # relative to the largest: a sum that cancelled is no more exact than its summands
    assert difference(torch.tensor([1e3, 1e-3]), torch.tensor([1e3, 0.0]), None) is None
    assert difference(x.double(), x, None) is not None
    assert difference(x[:3], x, None) is not None
    assert difference(x.long(), x.long() + 1, None) is not None
    bad = torch.tensor([float("nan"), float("inf"), 1.0])
    assert difference(bad, bad.clone(), None) is None
    for value in (0.0, float("inf"), -float("inf")):
        other = bad.clone()
        other[0] = value
        assert difference(other, bad, None) is not None
        assert difference(bad, other, None) is not None
    assert difference(torch.tensor([1.0]), torch.tensor([float("inf")]), None) is not None
    assert difference(torch.empty(0), torch.empty(0), None) is None


def test_enumerated_placements_are_varied_and_deterministic() -> None:
    tensors = {"x": torch.empty(5, 6), "w": torch.empty(6, 7), "s": torch.empty(())}
    mesh = dt.Mesh(a=2, b=2)
    found = enumerate_placements(tensors, mesh, 12)
    assert found == enumerate_placements(tensors, mesh, 12)
    assert len(found) == 12 and len({str(trial) for trial in found}) == 12
    assert {name for trial in found for name in trial} >= {"x", "w"}
    assert any(len(trial) == 3 for trial in found)
    both = [
        pins
        for pins in all_placements((4,), mesh)
        if all(isinstance(p, dt.Shard) for p in pins.values())
    ]
    assert {tuple(pins) for pins in both} == {("a", "b"), ("b", "a")}
    assert enumerate_placements({"s": torch.empty(())}, mesh, 3) == []
