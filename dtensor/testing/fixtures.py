"""A pytest fixture: a mesh, with a fresh in-process cluster of its ranks for each test.

    # conftest.py
    from dtensor.testing.fixtures import mesh

    # test_mine.py: runs on 2 ranks, on 3, and on 2x2
    def test_sum(mesh):
        x = dt.distribute(torch.randn(5, 4), mesh, a=dt.Row())
        ...

    # with meshes of one's own
    @pytest.mark.parametrize("mesh", [dict(tp=2), dict(dp=2, tp=2)], indirect=True)
    def test_mlp(mesh): ...

The test's body runs inside `dt.launch(mesh)`, so it must not launch itself; at its end the cluster
is closed, and no value, model or failure reaches the next test. Nothing is installed as a plugin:
the fixture exists where it is imported.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import pytest

from dtensor.api.launch.launching import launch
from dtensor.sharding.spec.mesh import Mesh, mesh_of

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2))
"""Where a test runs that asks for no other meshes."""


@pytest.fixture(params=MESHES, ids=str)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """A mesh and its running in-process cluster; parametrize indirectly for other meshes."""
    given = request.param
    if isinstance(given, Mapping):
        given = mesh_of(tuple(given.items()))
    if not isinstance(given, Mesh):
        raise TypeError(
            f"the fixture `mesh` was given {given!r}, which is no mesh; "
            f'fix: @pytest.mark.parametrize("mesh", [dict(tp=2)], indirect=True)'
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(launch(given))
        yield given
        # a test that trains and gathers nothing has not forgotten anything
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was not gathered.*")
            stack.close()
