"""One Ray per test module: launches inside it join it, and must not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    from dtensor.daft.ray_launch import start_ray

    assert start_ray(None)
    yield
    assert ray.is_initialized()
    ray.shutdown()
