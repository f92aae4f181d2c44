"""Share captured graphs between tests, because torch's export takes most of a small test's time.

A graph depends only on the function, the structure of the modules, shapes, the definitions of
custom ops and the surrounding autocast, so tests that train the same small model can share it. The
function may close over numbers, strings, functions and frozen dataclasses of them. Other functions,
and methods, are captured each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dtensor.frontend.capture.autocast import surrounding
from dtensor.frontend.capture.call_as_module import flat_call
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Const, Graph
from dtensor.frontend.guards.guards import Guards, custom_ops

_found: dict[object, Graph] = {}


@functools.wraps(capture)
def shared_capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    grads: Any,
    each_call: bool = False,
    main: nn.Module | None = None,
) -> Graph:
    if not isinstance(fn, FunctionType) or fn.__defaults__ or each_call:
        return capture(fn, args, kwargs, grads=grads, each_call=each_call, main=main)
    closed_over = _closed_over(fn)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    around = surrounding()
    of_main = [leaf is main for leaf in leaves]
    called = (fn.__code__, fn.__module__, closed_over)
    key = (*called, grads, around, str(tree), *of_main, *map(_key, leaves))
    found = _found.get(key)
    if (
        found is None
        or found.reads is None
        or found.reads.values
        or custom_ops(found.fx) != found.reads.ops
    ):
        _found[key] = capture(fn, args, kwargs, grads=grads, main=main)
        return _found[key]
    constants = [(c.name, c.value) for c in found.inputs if isinstance(c, Const)]
    roots = flat_call(fn, args, kwargs or {}, main).roots
    return replace(found, reads=Guards(roots, found.reads.ran, constants, found.reads.ops))


def _key(leaf: Any) -> object:
    match leaf:
        case nn.Module() if any(m._forward_hooks or m._forward_pre_hooks for m in leaf.modules()):
            return object()  # what a hook does is unknown: not shared
        case nn.Module():
            tensors = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers()]
            first: dict[int, str] = {}
            return (
                *((type(m), name, _settings(m)) for name, m in leaf.named_modules()),
                *((n, _key(t), first.setdefault(id(t), n)) for n, t in tensors),
            )
        case torch.Tensor():
            return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        case int() | float() | str() | bool() | None:
            return (type(leaf), leaf)
        case _:
            return object()  # never equal: not shared


def _closed_over(fn: FunctionType) -> object:
    return tuple(_value(cell.cell_contents) for cell in fn.__closure__ or ())


def _value(held: object) -> object:
    """Return a key that is equal if and only if the object is the same to a program, and that does
    not change."""
    match held:
        case float():
            return repr(held)  # 0.0 is not -0.0
        case int() | str() | torch.dtype() | type() | None:
            return (type(held), held)
        case FunctionType() if not held.__defaults__:
            return (held.__code__, held.__module__, _closed_over(held))
        case tuple():
            return (type(held), *map(_value, held))
        case Mapping():  # of a frozen dataclass
            return (type(held), *((_value(k), _value(v)) for k, v in held.items()))
        case _ if is_dataclass(held) and type(held).__dataclass_params__.frozen:  # type: ignore
            return (type(held), *(_value(getattr(held, f.name)) for f in fields(held)))
        case _:
            return object()  # never equal: not shared


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Return the plain attributes: widths, numbers of heads, training mode."""
    return tuple(
        (name, value if isinstance(value, (int, float, str, bool, tuple)) else repr(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
    )
