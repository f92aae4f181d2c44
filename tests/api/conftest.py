"""One Ray per test module, and captured graphs shared between tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.captures import shared_capture


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that train the same model share its graph; tests/frontend tests the capture itself."""
    monkeypatch.setattr("dtensor.api.program.capture", shared_capture)


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """Launches inside a module join this Ray, and must not end it."""
    ray = pytest.importorskip("ray")
    from dtensor.daft.ray_launch import start_ray

    assert start_ray(None)
    yield
    assert ray.is_initialized()
    ray.shutdown()
