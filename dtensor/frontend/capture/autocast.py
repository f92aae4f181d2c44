"""`torch.autocast` of a captured program: around a call as within it, and what would be lost.

    with torch.autocast(x.device.type, dtype=torch.bfloat16):   # in loss_fn, in a module's forward,
        loss = step(x)                                          # or around the call: the same ops

A program is captured on fake CPU tensors, whatever runs it. So the ops that "cpu" autocast chooses
are the program's, on every device; autocast for "cuda" would touch none of those tensors and be
lost in silence: it is refused. Regions nest, and ``enabled=False`` ends one within another.

Invariants: an autocast around the call is a region around the user's function and nothing else:
the backward runs in the dtypes that the forward left, as in torch.
Not here: the casts themselves, which torch's own autocast writes into the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from dtensor.errors import PlanningError
from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.marks import is_capturing
from dtensor.frontend.source import source_here

CAPTURED_ON = "cpu"


def surrounding() -> torch.dtype | None:
    """The dtype of the autocast around the call, which its program depends on; None without one.

    PlanningError under autocast for a device that programs are not captured on.
    """
    if torch.is_autocast_enabled("cuda"):
        raise _lost("cuda", f"dtype={torch.get_autocast_dtype('cuda')}")
    if torch.is_autocast_enabled(CAPTURED_ON):
        return torch.get_autocast_dtype(CAPTURED_ON)
    return None


def region(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """The region of `surrounding`, entered around the user's function alone."""
    return nullcontext() if dtype is None else torch.autocast(CAPTURED_ON, dtype=dtype)


@contextmanager
def honoured() -> Iterator[None]:
    """Within a capture: no autocast but the program's own; one for another device raises."""
    init: Any = torch.autocast.__init__
    enter: Any = torch.autocast.__enter__

    def checked_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        dtype = kwargs.get("dtype", args[0] if args else None)
        if is_capturing() and device_type != CAPTURED_ON and enabled:
            raise _lost(device_type, "" if dtype is None else f"dtype={dtype}")
        init(self, device_type, *args, **kwargs)

    def checked_enter(self: Any) -> Any:
        # made before the capture, as a decorator is; or one that ends a region it does not reach
        here = torch.is_autocast_enabled(CAPTURED_ON)
        if is_capturing() and self.device != CAPTURED_ON and (self._enabled or here):
            given = f"dtype={self.fast_dtype}" if self._enabled else "enabled=False"
            raise _lost(self.device, given)
        return enter(self)

    with (
        torch.autocast(CAPTURED_ON, enabled=False),
        mock.patch.object(torch.autocast, "__init__", checked_init),
        mock.patch.object(torch.autocast, "__enter__", checked_enter),
    ):
        yield


def _lost(device_type: str, given: str) -> PlanningError:
    given = given and f", {given}"
    return planning_error(
        f'torch.autocast("{device_type}"{given}) would change no op: a program is captured on the '
        f"CPU, whatever device runs it.",
        source=source_here(),
        fix=f'torch.autocast("{CAPTURED_ON}"{given}), or x.device.type of an argument x: it holds '
        f"on every device",
    )
