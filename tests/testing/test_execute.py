"""Tests running a function under placements: inputs, results, gradients and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtensor.errors import PlanningError
from dtensor.sharding.rules import pattern, registry
from dtensor.sharding.rules.build import retarget
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.sharding.spec.spec import make_spec
from dtensor.testing import execute

MESH = Mesh(x=3)
SUM = Partial("sum")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def test_execute_matches_reference_results_and_gradients_of_nested_arguments() -> None:
    def fn(pair: tuple[torch.Tensor, torch.Tensor], *, k: torch.Tensor) -> dict[str, object]:
        return {"y": (pair[0] @ pair[1]).relu() * k, "n": 3}

    args, kwargs = ((drawn(7, 6), drawn(6, 4)),), {"k": torch.randn(4)}
    traced = execute.trace(fn, args, kwargs)
    expected = execute.reference(traced)
    for option in ((Shard(1), Shard(0), REPLICATE), (Shard(0), REPLICATE, SUM)):
        found = execute.run(traced, MESH, [{"x": p} for p in option])
        assert found.results["n"] == 3
        torch.testing.assert_close(found.results["y"], expected.results["y"])
        torch.testing.assert_close(found.gradients[:2], expected.gradients[:2])
        assert found.gradients[2] is None  # it does not require grad
        assert found.plan.collectives


def test_execute_draws_cotangents_from_seed() -> None:
    x = drawn(5)
    first, second = (execute.trace(torch.sin, (x,), seed=s) for s in (0, 1))
    cotangent = first.cotangents[0]
    assert cotangent is not None and not torch.equal(cotangent, second.cotangents[0])
    found = execute.run(first, MESH, [{"x": Shard(0)}])
    torch.testing.assert_close(found.gradients[0], cotangent * x.detach().cos())


@pytest.mark.parametrize("num", [2, 3, 4])
def test_cut_into_partial_shards_sums_back_bitwise(num: int) -> None:
    """A hash or a sign of a partial value must see the exact value."""
    x = torch.cat([torch.randn(50) * 1e-3, torch.zeros(2), torch.tensor([float("inf"), -2.5])])
    spec = make_spec(tuple(x.shape), x.dtype, Mesh(x=num), {"x": SUM})
    parts = execute._cut_exactly(x, spec, torch.Generator().manual_seed(0))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(total, x)
    assert sum(bool(part.any()) for part in parts) > 1  # no rank has the whole value


def test_execute_treats_closed_over_tensor_as_constant() -> None:
    table = torch.randn(4, 3)
    traced = execute.trace(lambda i: table[i], (torch.tensor([3, 0, 2]),))
    found = execute.run(traced, MESH, [{"x": Shard(0)}])
    torch.testing.assert_close(found.results, table[[3, 0, 2]])


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


def random_parts(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def test_execute_raises_if_ranks_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(local: Callable[[torch.Tensor], torch.Tensor], placement: Placement) -> None:
        broken = pattern("n -> n", localize=lambda call, _: retarget(call, local, call.args[0]))
        monkeypatch.setitem(registry._BUILDERS, "aten.exp.default", broken)
        execute.run(execute.trace(torch.exp, (torch.ones(6),)), MESH, [{"x": placement}])

    with pytest.raises(execute.RanksDisagree, match=r"rank 0 should hold \[2\].* holds \[4\]"):
        run(twice, Shard(0))
    with pytest.raises(execute.RanksDisagree, match="holds other numbers"):
        run(random_parts, REPLICATE)


def test_execute_backward_of_identity_returns_cotangent_at_input_placement() -> None:
    x = drawn(6, 4)
    traced = execute.trace(torch.clone, (x,))
    for option in (Shard(0), Shard(1), SUM, REPLICATE):
        found = execute.run(traced, MESH, [{"x": option}])
        assert torch.equal(found.results, x.detach())
        torch.testing.assert_close(found.gradients[0], traced.cotangents[0])


def test_execute_allows_value_named_like_runtime_function() -> None:
    """torch names the gradient of floor `zeros_like`, which is also the function that fills
    partial shards."""
    traced = execute.trace(torch.floor, (drawn(6),))
    found = execute.run(traced, MESH, [{"x": SUM}])
    torch.testing.assert_close(found.gradients[0], torch.zeros(6))


def test_execute_requires_one_dict_of_placements_per_tensor() -> None:
    traced = execute.trace(torch.add, (drawn(6), drawn(6)))
    with pytest.raises(PlanningError, match="one dict of placements per tensor"):
        execute.run(traced, MESH, [{"x": Shard(0)}])
    with pytest.raises(PlanningError, match="dim"):
        execute.run(traced, MESH, [{"x": Shard(1)}, {}])


def test_execute_without_gradients_returns_values_only() -> None:
    x = drawn(6)
    found = execute.run(execute.trace(torch.exp, (x,), grads=False), MESH, [{"x": Shard(0)}])
    torch.testing.assert_close(found.tensors[0], x.detach().exp())
    assert found.gradients == (None,)
