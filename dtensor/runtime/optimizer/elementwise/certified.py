"""Optimizers of other packages that need no statement: by distribution, class and version.

    certified(lion_pytorch.Lion(...))        # True of lion-pytorch 0.2.5

Each entry's source was read at that version, and `python -m tests.optimizers_sweep` trains it as
torch does. They are probed like others, with the user's options: one whose options make it another
thing (a norm that clips, say) is refused all the same.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

CERTIFIED: dict[str, tuple[str, tuple[str, ...]]] = {
    # class -> distribution and its versions
    "lion_pytorch.lion_pytorch.Lion": ("lion-pytorch", ("0.2.5",)),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": ("schedulefree", ("1.4.1",)),
    "schedulefree.radam_schedulefree.RAdamScheduleFree": ("schedulefree", ("1.4.1",)),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ("schedulefree", ("1.4.1",)),
    "pytorch_optimizer.optimizer.adan.Adan": ("pytorch_optimizer", ("4.1.0",)),
    "pytorch_optimizer.optimizer.adopt.ADOPT": ("pytorch_optimizer", ("4.1.0",)),
    "pytorch_optimizer.optimizer.lion.Lion": ("pytorch_optimizer", ("4.1.0",)),
}


def certified(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the exact class, of an installed version that was read, is in the table."""
    cls = type(optimizer)
    entry = CERTIFIED.get(f"{cls.__module__}.{cls.__qualname__}")
    if entry is None:
        return False
    distribution, versions = entry
    try:
        return version(distribution) in versions
    except PackageNotFoundError:
        return False
