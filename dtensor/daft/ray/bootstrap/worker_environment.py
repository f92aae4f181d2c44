"""The environment variables of Ray's workers. This file does not import Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

_RAYS_FOLDER = os.path.join("ray", "thirdparty_files")
"""Ray adds this folder to the `sys.path` of each process that imports it."""


def worker_environment() -> dict[str, str]:
    """Return variables for actors: the controller's module path, and one kernel thread."""
    path = (os.path.abspath(entry or ".") for entry in sys.path if not entry.endswith(_RAYS_FOLDER))
    return {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Within the block, set these variables, which processes that start inherit."""
    former_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
