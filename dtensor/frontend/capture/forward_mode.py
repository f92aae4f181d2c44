"""Support forward-mode derivatives (jvp, jacfwd, dual numbers) inside a captured program.

    def loss_fn(model, x):
        return jvp(model, (x,), (v,))[1].square().mean()     # through norms, torch.ones, zeros_like

`torch.export` records functorch calls, but has three faults, which this module fixes:

- Kernels for known-zero tangents return meta tensors if tensors are fake: see `PlainZeros`.
- A factory inside a jvp becomes a constant without values: see `make_below_jvp`.
- The values of jacfwd's batched tensors cannot be read: see `batched_snapshot`.

dt ops have no forward-mode derivative; canonical.py refuses them inside a jvp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dtensor.private_torch import (
    TorchDispatchMode,
    forward_ad,
    functorch_depth,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    predispatch,
    temporarily_clear_interpreter_stack,
)

_ZEROS = torch.ops.aten._efficientzerotensor.default
_FACTORIES: set[Callable[..., Any]] = {
    *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange),
    *(torch.linspace, torch.logspace, torch.tril_indices, torch.triu_indices),
}
_LIKE_FACTORIES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.zeros_like: torch.zeros,
    torch.ones_like: torch.ones,
    torch.full_like: torch.full,
    torch.empty_like: torch.empty,
}
_NEW_FACTORIES: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.new_zeros: torch.zeros,
    Tensor.new_ones: torch.ones,
    Tensor.new_full: torch.full,
    Tensor.new_empty: torch.empty,
}


def make_below_jvp(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Call a factory (torch.ones, zeros_like) below functorch's levels if it is called inside a
    jvp, and return the tensor; None for any other call, and for calls by functorch itself.

    Floats are cloned, because they may get a tangent if the program writes into them.
    """
    if not functorch_depth() or forward_ad._current_level < 0:
        return None
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch._functorch"):
        return None
    options = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if factory := _LIKE_FACTORIES.get(func) or _NEW_FACTORIES.get(func):
        x, *other_args = args
        args = (x.shape, *other_args) if func in _LIKE_FACTORIES else tuple(other_args)
        func = factory
        options["dtype"] = options.get("dtype") or x.dtype
    elif func not in _FACTORIES:
        return None
    with temporarily_clear_interpreter_stack():
        tensor = func(*args, **options)
    return tensor.clone() if tensor.is_floating_point() or tensor.is_complex() else tensor


def nodes_inside_jvp(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of an exported graph that run while a dual level is open."""
    nodes: set[fx.Node] = set()
    level = 0
    for node in graph.nodes:
        level += (node.target is predispatch._enter_dual_level) - (
            node.target is predispatch._exit_dual_level
        )
        if level:
            nodes.add(node)
    return nodes


def is_nested(graph: fx.Graph) -> bool:
    """Return whether the graph has several forward-mode derivatives."""
    calls = [n for n in graph.nodes if n.target is predispatch._jvp_increment_nesting]
    return len(calls) > 1


class PlainZeros(TorchDispatchMode):
    """Replaces zero tensors of a special type, which torch uses as tangents, by plain ones. The
    joint export needs this only for nested jvps, because inf * 0 differs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ZEROS:
            func = torch.ops.aten.zeros.default
        return func(*args, **(kwargs or {}))


def enter_with_plain_zeros(original: Any) -> Any:
    """Return `dual_level.__enter__` that also enters `PlainZeros`."""

    def enter(level: Any) -> Any:
        level.plain_zeros = PlainZeros()
        level.plain_zeros.__enter__()
        return original(level)

    return enter


def exit_with_plain_zeros(original: Any) -> Any:
    """Return `dual_level.__exit__` that also leaves `PlainZeros`."""

    def leave(level: Any, *error: Any) -> Any:
        try:
            return original(level, *error)
        finally:
            level.plain_zeros.__exit__(*error)

    return leave


def batched_snapshot(original: Any) -> Any:
    """Extend torch's `snapshot_fake`, which copies values of nodes, to functorch's tensors."""

    def snapshot(value: Tensor, include_real: bool = False) -> Tensor | None:
        # Imported here because it loads torch's compiler, and triton if it is installed.
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        if not is_functorch_wrapped_tensor(value):
            return original(value, include_real)
        inner: Any = value
        while is_functorch_wrapped_tensor(inner):
            inner = get_unwrapped(inner)
        with temporarily_clear_interpreter_stack(), disable_proxy_modes_tracing(), inner.fake_mode:
            return torch.empty(value.shape, dtype=value.dtype)

    return snapshot
