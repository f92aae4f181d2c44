"""Capture autocast in a program and around its call.

    with torch.autocast("cuda", dtype=torch.bfloat16):     # in the user's function, or around it
        x = torch.softmax(x, -1)                           # float32 by CUDA's list of ops

A region casts by torch's list of ops for the device type that it names. Programs are captured on
fake CPU tensors, so torch writes the casts of the CPU's list, and cuda_casts.py the casts of CUDA's
list, also on machines without a GPU. Autocast around the call becomes a region around the user's
function only: as in torch, the backward uses the dtypes of the forward. Autocast for other devices,
or for both at once, would be ignored, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from dtensor.errors import PlanningError
from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.source import source_here
from dtensor.numerics import dtype_name
from dtensor.provider import Provider

CAPTURE_DEVICE = "cpu"
_TYPES = ("cpu", "cuda")
DEVICE = Provider[Callable[[], str]]("program_device")
"""Returns the device type on which programs of this thread will run: "cpu" or "cuda"."""
_provided = cache(DEVICE.get)  # cached, because each call of a step needs it


def program_device() -> str:
    """Return the device type on which programs of this thread will run."""
    return _provided()()


class Surrounding(NamedTuple):
    """The context of a call on which its program depends. ``device``: the device type that runs the
    program; ``autocast``: device type and dtype of the autocast around the call, or None."""

    device: str
    autocast: tuple[str, torch.dtype] | None


def surrounding() -> Surrounding:
    """Return the current context. If autocast is on for both device types, the one of the program's
    device counts, as in torch."""
    device = program_device()
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return Surrounding(device, None)  # the fast path: each call of a step comes here
    on = [name for name in _TYPES if torch.is_autocast_enabled(name)]
    name = device if device in on else on[0]
    return Surrounding(device, (name, torch.get_autocast_dtype(name)))


def autocast_region(surrounding: Surrounding) -> AbstractContextManager[object]:
    """Return the autocast of ``surrounding`` as a context for the user's function."""
    if surrounding.autocast is None:
        return nullcontext()
    name, dtype = surrounding.autocast
    return torch.autocast(name, dtype=dtype)


def autocast_regions(forward: fx.GraphModule) -> set[str]:
    """Return device types and dtypes of the autocast regions of an exported graph: "cuda, bf16"."""
    descriptions: set[str] = set()
    for module in forward.modules():
        if isinstance(module, fx.GraphModule):
            regions = module.graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.wrap_with_autocast
            )
            descriptions |= {f"{n.args[0]}, {dtype_name(n.args[1])}" for n in regions if n.args[2]}  # type: ignore[arg-type]
    return descriptions


def _checked_init(init: Any) -> Any:
    """Wrap `autocast.__init__`: refuse other devices, and keep CUDA enabled without a GPU."""

    def checked(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type not in _TYPES and enabled:
            raise _unsupported_device(device_type, "" if dtype is None else f"dtype={dtype}")
        is_cuda = device_type == "cuda"  # torch would disable it on a machine without a GPU
        init(self, device_type, dtype, enabled and not is_cuda, cache_enabled)
        if is_cuda:
            self._enabled = enabled
        self.made_in_capture = True

    return checked


def _checked_enter(enter: Any) -> Any:
    """Wrap `autocast.__enter__`: refuse two device types at once, and apply CUDA's casts."""

    def checked(self: Any) -> Any:
        name, device = self.device, program_device()
        others = [other for other in _TYPES if other != name and torch.is_autocast_enabled(other)]
        self.casts, self.put_back = None, ()
        if self._enabled:
            option = f"dtype={self.fast_dtype}"
            if name not in _TYPES:  # constructed before the capture, for example as a decorator
                raise _unsupported_device(name, option)
            if others:
                raise _two_lists(name, others[0], option)
        else:
            if others and name != device:
                raise _ends_no_autocast(name, others[0])
            if name == "cuda" and not hasattr(self, "made_in_capture"):
                matters = device == "cuda" or torch.is_autocast_enabled("cuda")
                if matters and not torch.cuda.is_available():
                    raise _disabled_early()
            self.put_back = others  # enabled=False on the program's device also ends the other one
        for other in self.put_back:
            torch.set_autocast_enabled(other, False)
        if self._enabled and name == "cuda":
            # Imported here because few programs need it.
            from dtensor.frontend.capture.cuda_casts import cuda_casts
            from dtensor.frontend.capture.whole_layers import without_decompositions

            self.casts = ExitStack()
            # Decomposed resizing would not be cast.
            self.casts.enter_context(without_decompositions())
            self.casts.enter_context(cuda_casts())
        return enter(self)

    return checked


def _restoring_exit(leave: Any) -> Any:
    """Wrap `autocast.__exit__`: undo what `_checked_enter` did."""

    def restoring(self: Any, *raised: Any) -> Any:
        result = leave(self, *raised)
        if self.casts is not None:
            self.casts.close()
        for other in self.put_back:
            torch.set_autocast_enabled(other, True)
        return result

    return restoring


AUTOCAST: Mapping[str, Callable[[Any], Any]] = {
    "__init__": _checked_init,
    "__enter__": _checked_enter,
    "__exit__": _restoring_exit,
}
"""The wrappers of methods of `torch.autocast` during capture, by name."""


def _unsupported_device(device_type: str, option: str) -> PlanningError:
    option = option and f", {option}"
    return planning_error(
        f'torch.autocast("{device_type}"{option}) would change no op: a program is captured '
        f"for the CPU or for CUDA.",
        source=source_here(),
        fix=f'torch.autocast("{CAPTURE_DEVICE}"{option}) or torch.autocast("cuda"{option}),'
        f" whose lists of ops differ",
    )


def _two_lists(name: str, other: str, dtype: str) -> PlanningError:
    return planning_error(
        f'torch.autocast("{name}", {dtype}) is within one for "{other}": two lists of ops at once.',
        source=source_here(),
        fix=f'torch.autocast("{other}", {dtype}), or end that one first',
    )


def _ends_no_autocast(name: str, other: str) -> PlanningError:
    return planning_error(
        f'torch.autocast("{name}", enabled=False) would end nothing: the autocast around it is for '
        f'"{other}".',
        source=source_here(),
        fix=f'torch.autocast("{other}", enabled=False)',
    )


def _disabled_early() -> PlanningError:
    return planning_error(
        'An autocast for "cuda" that was made before the program ran is disabled, perhaps because '
        "torch found no GPU when it was made.",
        source=source_here(),
        fix='make it within the program: with torch.autocast("cuda", ...): in the function',
    )
