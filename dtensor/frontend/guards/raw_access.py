"""Access to Python objects that does not run their methods.

    raw_attributes(config)     # its __dict__, even if a property hides it
    raw_items(registry)        # the values in a dict subclass, whatever its __iter__ does

Guards read the user's objects before each call of a step. A user's `__getattr__`, `__iter__` or
`__torch_function__` may be slow, raise, or change state.
"""

from __future__ import annotations

import collections
import enum
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from dtensor.frontend.guards.known_functions import module_of
from dtensor.private_torch import DisableTorchFunctionSubclass

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Immutable classes that are compared by value."""
NO_ATTRIBUTES: dict[str, Any] = {}
"""The result of `raw_attributes` for an object without a `__dict__`."""
_ITERATOR_MODULES = {"builtins", "itertools", "_collections", "collections", "array", "_struct"}
_ITERATOR_MODULES |= {"re"}
DICT_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
WEAK_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)


def raw_items(value: Any) -> list[Any] | None:
    """Return the contents of a builtin container or of a subclass of one (a dict's values); None
    for any other object."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    for base in _CONTAINERS:
        if issubclass(kind, base):
            return list(base.__iter__(value))
    return None


def raw_attributes(value: Any) -> dict[str, Any]:
    """Return the object's `__dict__` itself, of a `threading.local` the `__dict__` of this thread.
    Return `NO_ATTRIBUTES` if there is none."""
    try:
        return raw_attribute(value, "__dict__")
    except Exception:  # no __dict__, or a property of this name that raises
        return NO_ATTRIBUTES


def raw_attribute(value: Any, name: str) -> Any:
    """Return an attribute as `getattr` does, without the object's own `__getattr__`.
    Raises AttributeError."""
    kind = threading.local if isinstance(value, threading.local) else object
    return kind.__getattribute__(value, name)


def tensor_metadata(x: torch.Tensor, *, strides: bool) -> tuple[Any, ...]:
    """Return what Python can read of a tensor besides its elements, gradient and attributes.

    Args:
        strides: include strides and storage offset. They may differ from step to step without an
            effect, so they are left out unless the code reads them.
    """
    with DisableTorchFunctionSubclass():
        metadata = (
            *(type(x), isinstance(x, nn.Parameter), x.shape, x.dtype, x.device, x.requires_grad),
        )
        if not strides or x.layout is not torch.strided or x.is_nested:
            return metadata
        return (*metadata, x.stride(), x.storage_offset())


def array_contents(array: Any) -> tuple[Any, ...]:
    """Return the bytes of a buffer; for a numpy array also its dtype, shape and strides."""
    if not isinstance(array, np.ndarray):
        return (bytes(array),)
    return (array.tobytes(), array.dtype, array.shape, array.strides)


def is_iterator(value: Any) -> bool:
    """Return whether a value is a builtin iterator: taking an item from it changes it."""
    kind = type(value)
    return hasattr(kind, "__next__") and module_of(kind) in _ITERATOR_MODULES


def referent_of(proxy: Any) -> Any:
    """Return the object behind a weak proxy; None if it is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def has_hooks(x: torch.Tensor) -> bool:
    """Return whether hooks run when the gradient of this leaf tensor is computed."""
    with DisableTorchFunctionSubclass():
        return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


def key_text(key: Any) -> str:
    """Return a key as part of a path: "['a']", or "" if its repr may contain an address."""
    try:
        return f"[{key!r}]" if isinstance(key, (*PLAIN, enum.Enum)) else ""
    except Exception:  # raised by the repr of a user's class
        return f"[{type(key).__name__}]"
