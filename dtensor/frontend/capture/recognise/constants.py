"""Compute values of an exported graph that are the same at every call.

    i = arange(4); mask = i[None, :] <= i[:, None]   ->  Constants(graph).value(mask): bool[4,4]
    mask = argument[:, None, None, :]                ->  NotConstant: it depends on an argument

Libraries build causal masks by comparing positions, once for each row of the batch. Rows that are
all equal are computed once.

Invariants: a value is not constant if it depends on an argument, a parameter, a buffer, a tensor
that the program closed over, or random numbers, or if an op changes it in place. Constants are
computed by the program's own ops.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from dtensor.private_torch import OpOverload, unset_fake_temporarily

aten: Any = torch.ops.aten

MAX_ELEMENTS = 2**28
"""The maximum size of a tensor that is computed."""
_MAX_COMPARED = 2**26
"""The maximum number of elements of a result whose rows are compared with each other."""
_ELEMENTWISE = (
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default,
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor,
)  # fmt: skip
"""Elementwise ops without torch's tag `pointwise`."""
_FILLS = {
    aten.new_ones.default: 1, aten.ones_like.default: 1,
    aten.new_zeros.default: 0, aten.zeros_like.default: 0,
}  # fmt: skip
"""Ops that read only the shape, dtype and device of their operand; and the elements."""


class NotConstant(Exception):
    """The value is not constant. The message is a reason: "it depends on an argument"."""


class Constants:
    """The constants of one graph, computed on request."""

    def __init__(self, graph: fx.Graph) -> None:
        self.writes: Writes = Writes(graph)
        self._constant_nodes: set[fx.Node] = set()
        self._positions = {node: i for i, node in enumerate(graph.nodes)}

    def value(self, node: fx.Node) -> Tensor:
        """Return the value of ``node``. A dim in which all rows are equal may have stride 0.

        Raises NotConstant if the value may differ between calls.
        """
        nodes = self._ancestors(node)
        remaining_reads = Counter(x for n in nodes for x in _reads(n))
        values: dict[fx.Node, Any] = {}
        with unset_fake_temporarily(), torch.no_grad():
            for current in nodes:
                values[current] = _compute(current, values)
                for read in _reads(current):
                    remaining_reads[read] -= 1
                    if not remaining_reads[read]:
                        del values[read]
        constant = values[node]
        assert isinstance(constant, Tensor), "asked for a tensor"
        return constant

    def _ancestors(self, node: fx.Node) -> list[fx.Node]:
        """Return the node and its ancestors in the order of the graph. Raises NotConstant."""
        ancestors, waiting, is_changed = {node: None}, [node], False
        while waiting:
            current = waiting.pop()
            if current not in self._constant_nodes:
                self._check(current)
                is_changed |= current not in self._positions or current in self.writes.changed
            for read in _reads(current):
                if read not in ancestors:
                    ancestors[read] = None
                    waiting.append(read)
        if is_changed:
            raise NotConstant("it is changed in place")
        self._constant_nodes.update(ancestors)
        return sorted(ancestors, key=self._positions.__getitem__)

    def _check(self, node: fx.Node) -> None:
        """Raise NotConstant if the node is an input, random, or not an ATen op."""
        if node.op == "placeholder":
            raise NotConstant("it depends on an argument")
        if node.op == "get_attr":
            _, dot, path = str(node.target).partition(".")  # below the module that was called
            raise NotConstant(f"it depends on {path if dot else 'a tensor that the module holds'}")
        target = node.target
        if target is operator.getitem:
            return
        if not isinstance(target, OpOverload):
            raise NotConstant(f"it depends on what {target} computes")
        if torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten":
            raise NotConstant(f"it depends on what {target} computes")


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values an op reads."""
    return [] if node.target in _FILLS else node.all_input_nodes


class Writes:
    """The in-place writes of a graph. ``changed``: the values whose memory is written."""

    def __init__(self, graph: fx.Graph) -> None:
        self.changed: set[fx.Node] = set()
        self._order: dict[fx.Node, int] = {}
        self._write_positions: list[int] = []
        for index, node in enumerate(graph.nodes):
            self._order[node] = index
            operands = list(_written_operands(node))
            if operands:
                self._write_positions.append(index)
                self.changed.add(node)
            for value in operands:
                while isinstance(value, fx.Node) and value not in self.changed:
                    self.changed.add(value)
                    value = value.args[0] if _is_view(value) else None

    def is_changed(self, node: fx.Node) -> bool:
        """Return whether the memory of a value is written."""
        value: Any = node
        while isinstance(value, fx.Node):
            if value in self.changed:
                return True
            value = value.args[0] if value.op == "call_function" and _is_view(value) else None
        return False

    def between(self, first: fx.Node, last: fx.Node) -> bool:
        """Return whether any op between ``first`` and ``last`` writes in place."""
        if not self._write_positions:
            return False
        start, stop = self._order.get(first), self._order.get(last)
        if start is None or stop is None:
            return True
        return any(start < at < stop for at in self._write_positions)


def _written_operands(node: fx.Node) -> Iterator[Any]:
    """Yield the operands that an op changes in place."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)


def _is_view(node: fx.Node) -> bool:
    """Return whether the result may be a view of the first operand."""
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and any(
        result.alias_info is not None for result in target._schema.returns
    )


# -- computing -------------------------------------------------------------------------------------


def _compute(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Run the op of a node. An elementwise op runs once for dims in which all operands repeat."""
    target: Any = node.target
    if target in _FILLS:
        val = node.meta["val"]
        return torch.full((), _FILLS[target], dtype=val.dtype).expand(val.shape)
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if target is operator.getitem:
        return target(*args, **kwargs)
    val = node.meta["val"]
    is_elementwise = torch.Tag.pointwise in target.tags or target in _ELEMENTWISE
    if not isinstance(val, Tensor) or not is_elementwise:
        if isinstance(val, Tensor) and not _is_view(node):
            _check_size(val.shape)
        return _compress_rows(target(*args, **kwargs))
    rank, shape = val.dim(), val.shape
    tensors = [x for x in node.all_input_nodes if isinstance(values[x], Tensor)]
    repeated = [d for d in range(rank) if all(_is_repeated(values[x], d - rank) for x in tensors)]

    def narrow(x: Any) -> Any:
        if isinstance(x, Tensor):
            for d in repeated:
                if rank - d <= x.dim():
                    x = x.narrow(d - rank, 0, min(1, x.shape[d - rank]))
        return x

    _check_size([1 if d in repeated else size for d, size in enumerate(shape)])
    narrowed = {x: narrow(values[x]) for x in tensors}
    operands = {**values, **narrowed}
    args = fx.map_arg(node.args, operands.__getitem__)
    kwargs = fx.map_arg(node.kwargs, operands.__getitem__)
    return target(*args, **kwargs).expand(shape)


def _is_repeated(x: Tensor, dim: int) -> bool:
    """Return whether x has only one row, or the same row repeated, in a dim (negative)."""
    return -dim > x.dim() or x.shape[dim] == 1 or x.stride(dim) == 0


def _compress_rows(value: Any) -> Any:
    """Return one expanded row for a small tensor whose rows are equal; else the value."""
    if not isinstance(value, Tensor) or value.dim() < 2 or not 0 < value.numel() <= _MAX_COMPARED:
        return value
    first = value[:1].expand_as(value)
    return first if value.stride(0) and value.shape[0] > 1 and first.equal(value) else value


def _check_size(shape: Any) -> None:
    if math.prod(shape) > MAX_ELEMENTS:
        raise NotConstant(f"it has more than {MAX_ELEMENTS:,} elements")
