"""Record the values that a program's Python reads from tensors that are not arguments.

    scale = torch.tensor(2.0)
    def loss_fn(model, x):                      # reads.pairs() == [(scale, tensor(2.0))]
        return model(x).mean() * scale.item()

A value that Python reads becomes a number in the graph. So each value is recorded, and guards
compare it before each later call (guards.py). `RefusalMode` (refusals.py) reports each torch call
that has such a tensor as argument.

A traced tensor has a value if the program computes it from constants: `known_value` runs its ops.
`RefusalMode` refuses a read of any other traced tensor.
"""

from __future__ import annotations

import dis
import linecache
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dtensor.frontend.source import owner_of_frame
from dtensor.private_torch import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    node_of_tensor,
)

VALUE_FUNCTIONS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__),
    *(torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__),
    *(torch.Tensor.__complex__, torch.Tensor.__repr__, torch.Tensor.__format__),
    *(torch.Tensor.__contains__, torch.Tensor.is_nonzero, torch.is_nonzero),
    *(torch.Tensor.equal, torch.equal, torch.Tensor.allclose, torch.allclose),
}
"""Functions that return a Python value or an array."""
_MEMORY_READS = VALUE_FUNCTIONS | {
    *(torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.untyped_storage),
    torch.Tensor.__dlpack__,
}
"""Functions that return a value or memory. They run without the modes of the capture."""
_LIST_READERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
"""Functions that read the values of tensors in a list without calling an op."""
MAX_COMPUTED_ELEMENTS = 1 << 26
"""The maximum number of elements that `known_value` computes during capture."""


class ValueReads:
    """The tensors that one capture read, each with its value at the first read."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(self._values.values())

    def add(self, x: torch.Tensor) -> None:
        if id(x) not in self._values:
            with disable_current_modes(), DisableTorchFunction():
                self._values[id(x)] = (x, x.detach().clone())

    def call_and_record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        untraced: Sequence[torch.Tensor],
    ) -> Any:
        """Return ``func(*args, **kwargs)``, and record the values that it reads. ``untraced``: the
        arguments that are tensors from before the capture."""
        reads_memory = func in _MEMORY_READS and not any(isinstance(x, FakeTensor) for x in args)
        if reads_memory or func in _LIST_READERS:
            for x in untraced:
                self.add(x)
        if reads_memory:
            with disable_current_modes():
                return func(*args, **kwargs)
        with _ScalarReads(self):
            return func(*args, **kwargs)

    def known_value(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the value of x if the program computes x from constants only, else None. Tensors
        from before the capture are constants, and are recorded as read."""
        if not isinstance(x, FakeTensor):
            self.add(x)
            return x
        node, root = node_of_tensor(x)
        if node is None or torch.is_autocast_enabled("cpu"):
            return None
        needed = _needed_nodes(node)
        if needed is None:
            return None
        values: dict[fx.Node, Any] = {}
        with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            for current in node.graph.nodes:
                if current not in needed:
                    continue
                if current.op == "get_attr":
                    constant = getattr(root, str(current.target))
                    if isinstance(constant, FakeTensor):
                        return None
                    self.add(constant)
                    values[current] = constant.detach().clone()
                else:
                    args, kwargs = fx.map_arg((current.args, current.kwargs), values.__getitem__)
                    values[current] = current.target(*args, **kwargs)
        return values[node]


_SHOW = {"print", "write", "warn", "warning", "debug", "info", "error", "critical", "exception"}
_TO_TEXT = {"str", "repr", "format", "join"}


def is_printed() -> bool:
    """Return whether the text of a tensor is only for people to read: the calling `__repr__` or
    `__format__` is for print, a logger or an exception, or was called by Python or torch."""
    frame = sys._getframe(2)
    while frame.f_code not in (torch.Tensor.__repr__.__code__, torch.Tensor.__format__.__code__):
        if (outer := frame.f_back) is None:
            return False
        frame = outer
    frame = frame.f_back
    if frame is None or owner_of_frame(frame) is None:
        return True
    code, inner = frame.f_code, None
    for instruction in dis.get_instructions(code):
        span = instruction.positions
        if span is None or instruction.offset < frame.f_lasti:
            continue
        start, end = ((span.lineno, span.col_offset), (span.end_lineno, span.end_col_offset))
        inner = inner or (start, end)
        if not instruction.opname.startswith("CALL") or start > inner[0] or end < inner[1]:
            continue
        text = linecache.getline(code.co_filename, span.lineno or 0)
        if not text:  # the source is not available, as in an interactive session
            return "print" in code.co_names
        callee = re.match(
            r"""("[^"]*"|'[^']*')?[\w.]*""", text.encode()[span.col_offset or 0 :].decode()
        )
        name = callee[0].rpartition(".")[2] if callee else ""
        if name not in _TO_TEXT:
            return name in _SHOW or name.endswith(("Error", "Exception", "Warning"))
    return False


def _needed_nodes(node: fx.Node) -> set[fx.Node] | None:
    """Return the nodes from which ``node`` is computed, and the ops that change these in place.
    None if one of them is an argument, random or uninitialised, or if they are too large."""
    changes = [
        (n, {base_of(x) for x in n.all_input_nodes}) for n in node.graph.nodes if is_in_place(n)
    ]
    needed: set[fx.Node] = set()
    bases: set[fx.Node] = set()
    waiting, size = [node], 0
    while waiting:
        each = waiting.pop()
        if each in needed:
            continue
        value = each.meta.get("val")
        size += value.numel() if isinstance(value, torch.Tensor) else 0
        if size > MAX_COMPUTED_ELEMENTS or not (each.op == "get_attr" or _is_computable(each)):
            return None
        needed.add(each)
        bases.add(base_of(each))
        waiting += [*each.all_input_nodes, *(n for n, changed in changes if changed & bases)]
    return needed


def _is_computable(node: fx.Node) -> bool:
    target: Any = node.target
    if target is operator.getitem:
        return True
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not target._schema.name.startswith(("aten::empty", "aten::new_empty"))
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def is_in_place(node: fx.Node) -> bool:
    """Return whether the op changes one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` may be a view of."""
    target: Any = node.target
    is_view = target is operator.getitem or (
        isinstance(target, OpOverload) and any(r.alias_info for r in target._schema.returns)
    )
    first = node.args[0] if is_view and node.args else None
    return base_of(first) if isinstance(first, fx.Node) else node


class _ScalarReads(TorchDispatchMode):
    """Records reads by ops that return a Python value, such as the index of `x[:t]`."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (bool, int, float, complex)):
            for x in args:
                if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor):
                    self.reads.add(x)
        return result
