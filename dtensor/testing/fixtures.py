"""A pytest fixture: a mesh, with a new in-process launch for each test.

    from dtensor.testing.fixtures import mesh      # in conftest.py

    def test_sum(mesh): ...                        # runs on 2 ranks, on 3 ranks and on 2x2 ranks

    @pytest.mark.parametrize("mesh", [dict(tp=2), dict(dp=2, tp=2)], indirect=True)
    def test_mlp(mesh): ...                        # runs on these meshes

The test runs inside `dt.launch(mesh)`, so it must not launch itself. No plugin is installed: the
fixture exists where it is imported.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import pytest

from dtensor.api.launch.launching import launch
from dtensor.sharding.spec.mesh import Mesh, mesh_of

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2))
"""The meshes of a test that states no meshes."""


@pytest.fixture(params=MESHES, ids=str)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """Return the mesh of a running in-process launch. Parametrize indirectly for other meshes."""
    param = request.param
    if isinstance(param, Mapping):
        param = mesh_of(tuple(param.items()))
    if not isinstance(param, Mesh):
        raise TypeError(
            f"the fixture `mesh` was given {param!r}, which is no mesh; "
            f'fix: @pytest.mark.parametrize("mesh", [dict(tp=2)], indirect=True)'
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(launch(param))
        yield param
        with warnings.catch_warnings():  # a test need not gather what it trained
            warnings.filterwarnings("ignore", message=".*was not gathered.*")
            stack.close()
