"""Tests that the mesh fixture gives each test a mesh with its own cluster."""

from __future__ import annotations

import pytest
import torch

import dtensor as dt
from dtensor.api.store.session import launched
from dtensor.testing.fixtures import MESHES, mesh  # noqa: F401 - the fixture under test

_seen: list[dt.Mesh] = []
_clusters: list[object] = []
_left: list[dt.DTensor] = []


def test_mesh_fixture_launches_new_cluster_for_each_default_mesh(mesh: dt.Mesh) -> None:  # noqa: F811
    session = launched()
    assert session is not None and session.mesh == mesh
    assert all(session.cluster is not other for other in _clusters)
    _clusters.append(session.cluster)
    _seen.append(mesh)
    x = torch.randn(5, 4)
    placed = dt.distribute(x, mesh, a=dt.Row())
    _left.append(placed)
    assert torch.equal(placed.full_tensor(), x)


def test_mesh_fixture_covers_default_meshes_and_ends_its_launches() -> None:
    assert launched() is None
    if _seen:  # empty if this test runs alone, or the tests above run in another worker
        assert set(_seen) <= set(MESHES)
        with pytest.raises(RuntimeError, match="has ended"):
            _left[0].full_tensor()


@pytest.mark.parametrize("mesh", [dict(tp=2), dt.Mesh(dp=2, tp=3)], indirect=True)
def test_mesh_fixture_accepts_stated_meshes(mesh: dt.Mesh) -> None:  # noqa: F811
    assert mesh in (dt.Mesh(tp=2), dt.Mesh(dp=2, tp=3))
    x = dt.distribute(torch.ones(3), mesh, tp=dt.Row())
    assert float(dt.compile(torch.sum, mesh)(x)) == 3


def test_mesh_fixture_training_does_not_warn(mesh: dt.Mesh) -> None:  # noqa: F811
    net = torch.nn.Linear(4, 2)
    model = dt.parallelize(net, mesh, {})
    step = dt.train_step(model, _loss, torch.optim.SGD(net.parameters(), lr=0.1))
    assert float(step(torch.ones(2, 4))) != 0


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()
