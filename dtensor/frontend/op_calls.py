"""From a node of a graph of ATen ops to an OpCall: its tensors taken out, their nodes in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.fx

from dtensor.sharding.ops.call import Meta, OpCall, Operand


def op_call(node: torch.fx.Node) -> tuple[OpCall, tuple[torch.fx.Node, ...]]:
    """The call, and the nodes of its operands, one per occurrence; all have meta "val"."""
    operands: list[torch.fx.Node] = []

    def encode(value: object) -> object:
        if isinstance(value, torch.fx.Node):
            operands.append(value)
            return Operand(len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(encode(v) for v in cast(Iterable[object], value))
        return value

    args = tuple(encode(a) for a in node.args)
    kwargs = tuple((k, encode(v)) for k, v in node.kwargs.items())
    val = node.meta["val"]
    multiple = isinstance(val, (tuple, list))
    call = OpCall(
        target=cast(Any, node.target),
        args=args,
        kwargs=kwargs,
        operands=tuple(meta_of(n.meta["val"]) for n in operands),
        results=tuple(None if v is None else meta_of(v) for v in val)
        if multiple
        else (meta_of(val),),
        multiple=multiple,
    )
    return call, tuple(operands)


def meta_of(value: torch.Tensor) -> Meta:
    return Meta(tuple(int(s) for s in value.shape), value.dtype)
