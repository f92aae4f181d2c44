"""Skip a test module where simulated GPUs cannot run."""

from __future__ import annotations

import pytest

from dtensor.testing.gpus.guard import CompilerMissing, install


def skip_without_compiler() -> None:
    """Install the guard of simulated GPUs; skip the calling module if there is no C++ compiler."""
    try:
        install()
    except CompilerMissing as error:
        pytest.skip(str(error), allow_module_level=True)
