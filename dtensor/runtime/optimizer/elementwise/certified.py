"""List optimizers of other packages that need no `train_step(..., elementwise=True)`.

    certified(lion_pytorch.Lion(...))        # True for lion-pytorch 0.2.5

The source of each was read at the listed versions, and `python -m tests.optimizers_sweep` compares
its training with torch's. They are still probed with the user's options, and refused if an option
makes the update not elementwise (clipping by a norm, for example).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

CERTIFIED: dict[str, tuple[str, tuple[str, ...]]] = {
    # class -> (distribution, its certified versions)
    "lion_pytorch.lion_pytorch.Lion": ("lion-pytorch", ("0.2.5",)),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": ("schedulefree", ("1.4.1",)),
    "schedulefree.radam_schedulefree.RAdamScheduleFree": ("schedulefree", ("1.4.1",)),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ("schedulefree", ("1.4.1",)),
    "pytorch_optimizer.optimizer.adan.Adan": ("pytorch_optimizer", ("4.1.0",)),
    "pytorch_optimizer.optimizer.adopt.ADOPT": ("pytorch_optimizer", ("4.1.0",)),
    "pytorch_optimizer.optimizer.lion.Lion": ("pytorch_optimizer", ("4.1.0",)),
}


def certified(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether CERTIFIED has the optimizer's exact class and the installed version."""
    cls = type(optimizer)
    entry = CERTIFIED.get(f"{cls.__module__}.{cls.__qualname__}")
    if entry is None:
        return False
    distribution, versions = entry
    try:
        return version(distribution) in versions
    except PackageNotFoundError:
        return False
