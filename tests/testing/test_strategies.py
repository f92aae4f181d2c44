"""Tests that the hypothesis strategies draw what they promise, and say so if hypothesis is not
installed.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import dtensor as dt
from dtensor.sharding.spec.shards import assemble, shard_of
from dtensor.sharding.spec.spec import make_spec
from dtensor.testing import strategies

QUICK = settings(deadline=None, max_examples=30, database=None)


@QUICK
@given(strategies.specs(pending=True))
def test_drawn_spec_parses_back(spec: dt.TensorSpec) -> None:
    assert dt.spec(str(spec), spec.mesh) == spec
    assert spec.mesh.size <= 8


@QUICK
@given(strategies.specs(dtype=torch.float64), st.data())
def test_drawn_spec_shards_assemble_to_tensor(spec: dt.TensorSpec, data: st.DataObject) -> None:
    x = data.draw(strategies.tensors(spec.shape))
    shards = [shard_of(x, spec, spec.mesh.coordinates(r)) for r in range(spec.mesh.size)]
    assert torch.equal(assemble(shards, spec), x)


@QUICK
@given(strategies.shardings((6, 5), dt.Mesh(a=2, b=3)))
def test_drawn_sharding_makes_valid_spec(sharding: dict[str, dt.Placement]) -> None:
    made = make_spec((6, 5), torch.float32, dt.Mesh(a=2, b=3), sharding)
    assert set(sharding) == {"a", "b"}
    assert made.shape == (6, 5)


@QUICK
@given(strategies.placements((6, 5)), strategies.tensors((2, 3), dtype=torch.int64))
def test_strategies_draw_no_partial_and_respect_dtype_unless_asked(
    placement: dt.Placement, x: torch.Tensor
) -> None:
    assert not isinstance(placement, dt.Partial)
    assert x.dtype == torch.int64 and x.abs().max() <= 9


@pytest.mark.parametrize(
    "what",
    [
        lambda s: any(isinstance(p, dt.Partial) for p in s.placements),
        lambda s: any(isinstance(p, dt.Shard) and p.unit > 1 for p in s.placements),
        lambda s: any(
            isinstance(p, dt.Shard) and isinstance(p.blocks, tuple) for p in s.placements
        ),
        lambda s: [p.dim for p in s.placements if isinstance(p, dt.Shard)] == [1, 1],
        lambda s: s.shape == () and s.mesh.size > 1,
        lambda s: any(n == 1 for n in s.mesh.shape.values()),
        lambda s: (
            s.mesh.size > 1
            and bool(s.shape)
            and s.local_shape(s.mesh.coordinates(s.mesh.size - 1))[0] == 0
        ),
    ],
    ids=["pending", "units", "blocks", "two axes on a dim", "scalar", "axis of one", "empty shard"],
)
def test_specs_strategy_draws_rare_cases(what: object) -> None:
    settings_ = settings(deadline=None, max_examples=3000, database=None, phases=[Phase.generate])
    find(strategies.specs(pending=True), what, settings=settings_)  # type: ignore[arg-type]


def test_meshes_strategy_shrinks_to_smallest_mesh() -> None:
    plain = settings(deadline=None, database=None)
    assert find(strategies.meshes(), lambda m: True, settings=plain) == dt.Mesh(a=1)
    assert find(strategies.meshes(("x", "y")), lambda m: m.size > 1, settings=plain).size == 2


def test_strategies_without_hypothesis_raise_import_error_with_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match="fix: pip install hypothesis"):
        strategies.meshes()
