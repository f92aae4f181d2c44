"""Restore torch's modes and levels after a capture that fails.

    with restored_on_failure():
        export(...)                  # raises inside torch.func.jvp, whose level is then closed

While torch traces, leaving a context manager may be recorded and not executed. So after a failure,
this module restores the levels of functorch and forward AD, the function and dispatch modes (the
default device is one), the gradient modes, autocast, and the default dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dtensor.private_torch import (
    dispatch_modes,
    eager_transforms,
    forward_ad,
    function_modes,
    functorch_depth,
    pop_dispatch_mode,
    pop_function_mode,
    pop_functorch_levels,
)

_C: Any = torch._C


@contextmanager
def restored_on_failure() -> Iterator[None]:
    """Restore torch's state if an exception leaves the block."""
    depth, jvps, level = functorch_depth(), eager_transforms.JVP_NESTING, forward_ad._current_level
    num_function_modes, num_dispatch_modes = len(function_modes()), len(dispatch_modes())
    grad, forward_grad = torch.is_grad_enabled(), _C._is_fwd_grad_enabled()
    dtype, autocast = torch.get_default_dtype(), _autocast_state()
    try:
        yield
    except BaseException:
        while len(function_modes()) > num_function_modes:
            pop_function_mode()
        while len(dispatch_modes()) > num_dispatch_modes:
            pop_dispatch_mode()
        if functorch_depth() > depth:
            pop_functorch_levels(depth)
        with suppress(RuntimeError):  # that no level is open
            _C._exit_dual_level(level=level + 1)
        forward_ad._current_level = level
        eager_transforms.JVP_NESTING = jvps
        _C._set_grad_enabled(grad)
        _C._set_fwd_grad_enabled(forward_grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        _set_autocast(autocast)
        raise


_DEVICES = ("cpu", "cuda")


def _autocast_state() -> tuple[Any, ...]:
    """Return the autocast state: of each device, whether the cache is on, the nesting depth."""
    of_devices = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return of_devices, torch.is_autocast_cache_enabled(), nesting


def _set_autocast(state: tuple[Any, ...]) -> None:
    of_devices, cached, nesting = state
    for device, enabled, dtype in of_devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cached)
    while _autocast_state()[2] > nesting:
        torch.autocast_decrement_nesting()
