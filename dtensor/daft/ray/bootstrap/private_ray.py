"""All that dtensor uses of Ray and that is private to Ray.

Its tokens, which let in who knows them, and the switch by which a cluster listens on this machine
alone. A new Ray may move any of it. Not here: what is done with it (starting.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ray._private import ray_constants

constants: Any = ray_constants
tokens: Any = None
config: Any = None
gcs_client: Any = None
with suppress(ImportError):  # Ray 2.50 and 2.51 know no tokens
    from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # pyright: ignore

    tokens, config = AuthenticationTokenLoader.instance(), Config  # pyright: ignore
    gcs_client = GcsClient  # pyright: ignore
