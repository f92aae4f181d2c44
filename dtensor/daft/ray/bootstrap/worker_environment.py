"""The environment in which Ray's workers find what the controller finds. It does not import Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

_RAYS_OWN = os.path.join("ray", "thirdparty_files")
"""Ray puts this folder into the `sys.path` of each process that imports it."""


def worker_environment() -> dict[str, str]:
    """So that actors find the modules that the controller finds, and use one kernel thread."""
    path = (os.path.abspath(entry or ".") for entry in sys.path if not entry.endswith(_RAYS_OWN))
    return {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Processes that are started within inherit these, too."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
