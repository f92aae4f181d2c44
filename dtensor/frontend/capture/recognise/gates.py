"""Match gated activations: an activation that is multiplied by another value.

    silu(a) * b                     ->  dt.gated(a, b, "silu")
    gelu(a, approximate="tanh") * b ->  dt.gated(a, b, "gelu_tanh")
    0.5 * a * (1.0 + tanh(0.7978845608028654 * (a + 0.044715 * a ** 3)))
                                    ->  "gelu_new" (transformers), which is then multiplied by b

Invariants: a and b have the same dtype and shape, and only the product reads the activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.recognise.constants import Writes
from dtensor.frontend.capture.recognise.matching import (
    NoMatch,
    check_same_checkpoint,
    dtype,
    is_op,
    is_plain,
    is_tensor,
    other_operand,
    replace_node,
    shape,
    sole_user,
    users,
)
from dtensor.frontend.graph import Writer
from dtensor.sharding.ops.gates import CUBIC, SLOPE

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def rewrite_gate(graph: fx.Graph, anchor: fx.Node, writes: Writes) -> tuple[str, fx.Node]:
    """Rewrite a gated activation in place; return the op's name and its output. ``anchor``: a silu,
    gelu or tanh. Raises NoMatch."""
    a, active, kind, nodes = _activation(anchor)
    product = sole_user(active, aten.mul.Tensor)
    if product is None:
        used = any(is_op(user, aten.mul.Tensor) and _gates(user, active) for user in users(active))
        raise NoMatch("its activation is used elsewhere" if used and len(users(active)) > 1 else "")
    b = other_operand(product, active)
    if not _gates(product, active):
        raise NoMatch("")
    if dtype(a) != dtype(b) or dtype(active) != dtype(a):
        raise NoMatch("its two factors have different dtypes")
    check_same_checkpoint((*nodes, active, product))
    if writes.between(nodes[0] if nodes else active, product):
        raise NoMatch("an op changes a value in place within it")
    call = Writer(graph, product)
    new = call(dt.gated.default, a, b, kind)
    replace_node(graph, product, new)
    return "dt.gated", new


def _gates(product: fx.Node, active: fx.Node) -> bool:
    """Return whether ``product`` multiplies the activation by another value of the same shape."""
    b = other_operand(product, active)
    return is_tensor(b) and b is not active and shape(b) == shape(active)


def _activation(anchor: fx.Node) -> tuple[fx.Node, fx.Node, str, list[fx.Node]]:
    """Return the input of the activation, its result, its kind, and the nodes between them."""
    a: Any = anchor.args[0]
    if anchor.target is aten.silu.default:
        return a, anchor, "silu", []
    if anchor.target is aten.gelu.default:
        return a, anchor, _GELUS[str(anchor.kwargs.get("approximate", "none"))], []
    return _gelu_new(anchor)


def _gelu_new(tanh: fx.Node) -> tuple[fx.Node, fx.Node, str, list[fx.Node]]:
    """Like `_activation`, for the gelu that transformers writes out with a tanh."""
    inner = _factor_removed(tanh.args[0], SLOPE)
    if not is_op(inner, aten.add.Tensor) or not is_plain(inner):
        raise NoMatch("")
    x, cubed = inner.args[:2]
    power = _factor_removed(cubed, CUBIC)
    if not is_op(power, aten.pow.Tensor_Scalar) or power.args != (x, 3.0) or not is_tensor(x):
        raise NoMatch("")
    shifted = sole_user(tanh, aten.add.Tensor)
    result = None if shifted is None else sole_user(shifted, aten.mul.Tensor)
    if shifted is None or result is None or shifted.args != (tanh, 1.0) or not is_plain(shifted):
        raise NoMatch("")
    half = other_operand(result, shifted)
    if not is_tensor(half) or _factor_removed(half, 0.5) is not x:
        raise NoMatch("")
    nodes = [power, cubed, inner, tanh.args[0], tanh, shifted, half]
    if any(len(users(node)) > 1 for node in nodes):
        raise NoMatch("an intermediate value is used elsewhere")
    return x, result, "gelu_new", sorted(nodes)


def _factor_removed(node: Any, factor: float) -> Any:
    """Return x if the node is x * factor, else None."""
    if not is_op(node, aten.mul.Tensor, aten.mul.Scalar) or node.args[1] != factor:
        return None
    return node.args[0]
