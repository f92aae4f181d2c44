"""Capture custom `torch.autograd.Function`s with the backward that they define.

    exported    dtensor::applied([x], 0)  ->  [y]      Doubled.apply(x): forward x * 2,
    restored    Doubled.apply(x)                       backward grad * 3
    joint       mul(x, 2), ..., mul(grad, 3)

Non-strict export loses the backward of a Function. So `apply` runs outside the trace on fake
tensors, and the exported graph gets one call of `dtensor::applied`. `restore` replaces this call by
`apply`, which the joint export runs under autograd.

Invariants: equal applications are equal nodes, so that repeated layers still match. The backward
also runs once during capture, so that guards see what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from dtensor.errors import PlanningError
from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.source import Source, source_here
from dtensor.private_torch import DisableTorchFunction, pytree

_LIBRARY = torch.library.Library("dtensor", "DEF")
# This op stands for a call of `apply` in the exported graph and is never run.
_LIBRARY.define("applied(Tensor[] tensors, int call) -> Tensor[]")
_APPLIED = torch.ops.dtensor.applied.default

# Types of arguments that hold no tensors.
_TENSORLESS_TYPES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_TENSORLESS_TYPES += (torch.layout, torch.memory_format)
_OR_CUSTOM_OP = "; or define it with torch.library.custom_op and register_autograd"


class AppliedFunction:
    """``cls.apply(*args)`` as a function of its tensor arguments only. Two are equal if the class
    and all other arguments are equal."""

    def __init__(
        self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], source: Source | None
    ) -> None:
        leaves, self._spec = pytree.tree_flatten(args)
        self.cls: type = cls
        self.source: Source | None = source
        self.tensors: tuple[Tensor, ...] = tuple(x for x in leaves if isinstance(x, Tensor))
        self._apply = apply
        self._tensor_positions = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
        self._other_leaves = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        # torch.fx writes these names into the code that it generates.
        self.__name__ = self.__qualname__ = cls.__name__
        self.__module__ = cls.__module__
        for leaf in self._other_leaves:
            if not isinstance(leaf, _TENSORLESS_TYPES):
                raise self.error(
                    f"an argument of it is of type {type(leaf).__name__}",
                    "pass tensors, numbers, strings and None, in lists, tuples and dicts",
                )

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self._other_leaves)
        for position, tensor in zip(self._tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        return _tensors(self._apply(*pytree.tree_unflatten(leaves, self._spec)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AppliedFunction) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.cls, self._tensor_positions))

    def _key(self) -> tuple[Any, ...]:
        literals = tuple((type(x), repr(x)) for x in self._other_leaves)
        return (self.cls, literals, self._tensor_positions, self._spec)

    def run_untraced(self, args: tuple[Any, ...]) -> Any:
        """Return the result of ``apply``, run outside the trace; also run its backward, if any.

        Raises PlanningError if forward changes an argument in place.
        """
        versions = [x._version for x in self.tensors]
        with _HideTensorlessCalls():
            out = self._apply(*args)
        results = _tensors(out)
        changed = [x._version for x in self.tensors] != versions
        if changed or any(x is y for x in results for y in self.tensors):
            raise self.error(
                "it changes an argument in place (ctx.mark_dirty)", "return a new tensor"
            )
        inputs = [x for x in self.tensors if x.requires_grad]
        outputs = [x for x in results if x.requires_grad]
        if inputs and outputs:
            with DisableTorchFunction():
                ones = [torch.ones_like(x) for x in outputs]
                torch.autograd.grad(outputs, inputs, ones, retain_graph=True, allow_unused=True)
        return out

    def error(self, reason: str, fix: str) -> PlanningError:
        return planning_error(
            f"This torch.autograd.Function cannot be captured: {reason}.",
            f"class {self.cls.__module__}.{self.cls.__qualname__}",
            source=self.source,
            fix=fix + _OR_CUSTOM_OP,
        )


class _HideTensorlessCalls(TorchFunctionMode):
    """Hide calls without tensors from the export, which would record torch.no_grad."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _tensors((args, kwargs)):
            return func(*args, **kwargs)
        with DisableTorchFunction():
            return func(*args, **kwargs)


class AppliedFunctions:
    """The applications of custom Functions in one capture. An application that runs inside another
    belongs to the outer one and is not recorded."""

    def __init__(self) -> None:
        self._calls: list[AppliedFunction] = []
        self._recording = True

    def apply(self, original: Callable[..., Any], cls: type, args: tuple[Any, ...]) -> Any:
        """Return ``cls.apply(*args)`` and record the call; ``original`` is torch's apply."""
        if not self._recording:
            return original(*args)
        self._recording = False
        try:
            return self._record(AppliedFunction(original, cls, args, source_here()), args)
        finally:
            self._recording = True

    def restore(self, module: fx.GraphModule) -> None:
        """Replace each recorded call by its ``apply``, in place, and stop recording."""
        self._recording = False
        _restore(module, self._calls)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """In this context, raise PlanningError if a Function read a tensor of the program that was
        not an argument of ``apply``."""
        try:
            yield
        except AssertionError as error:  # raised by torch's joint export and by lift_constants
            if not re.match("Unexpected fake (buffer|param)", str(error)):
                raise
            classes = (f"class {c.cls.__module__}.{c.cls.__qualname__}" for c in self._calls)
            raise planning_error(
                "A torch.autograd.Function cannot be captured: its forward or its backward reads a "
                "tensor of the program that apply was not given.",
                *dict.fromkeys(classes),
                source=self._calls[0].source,
                fix="pass it to apply as an argument" + _OR_CUSTOM_OP,
            ) from error

    def _record(self, call: AppliedFunction, args: tuple[Any, ...]) -> Any:
        """Run the call outside the trace, add a node for it to the graph, and return its result."""
        # Imported here because it loads torch's compiler, and triton if it is installed.
        from torch.fx.experimental.proxy_tensor import (
            disable_proxy_modes_tracing,
            get_proxy_mode,
            track_tensor_tree,
        )

        with disable_proxy_modes_tracing():
            out = call.run_untraced(args)
        mode = get_proxy_mode()
        assert mode is not None, "a program is traced while it is exported"
        proxies = [mode.tracer.unwrap_proxy(x) for x in call.tensors]
        proxy = mode.tracer.create_proxy("call_function", _APPLIED, (proxies, len(self._calls)), {})
        track_tensor_tree(_tensors(out), proxy, constant=None, tracer=mode.tracer)
        self._calls.append(call)
        return out


def _restore(module: fx.GraphModule, calls: Sequence[AppliedFunction]) -> None:
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _restore(child, calls)
    for node in module.graph.find_nodes(op="call_function", target=_APPLIED):
        tensors, index = node.args
        node.target, node.args = calls[index], tuple(tensors)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
