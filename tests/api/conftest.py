"""One Ray per test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """Launches inside a module join this Ray, and must not end it."""
    ray = pytest.importorskip("ray")
    from dtensor.daft.ray_launch import start_ray

    assert start_ray(None)
    yield
    assert ray.is_initialized()
    ray.shutdown()
