"""One Ray for the tests of this package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """Launches join this Ray, and must not end it."""
    ray = pytest.importorskip("ray")
    from dtensor.daft.ray_launch import start_ray

    assert start_ray(None)
    yield
    assert ray.is_initialized()
    ray.shutdown()
