"""What stands around an optimizer of torch's, where one is taken.

    torchs_own(accelerator.prepare(adamw))       # adamw

Accelerate's wrapper of the exact class is taken off: its step steps the optimizer that it has, and
that is what trains here. Whatever else stands around an optimizer may do more in its step.
"""

from __future__ import annotations

import sys
from typing import Any


def torchs_own(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper; anything else as it is."""
    accelerate = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and type(optimizer) is accelerate.AcceleratedOptimizer:
        return optimizer.optimizer
    return optimizer
