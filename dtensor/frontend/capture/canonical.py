"""Rewrite the exported forward graph into ops that have simple sharding rules.

    sdpa(q, k, v, is_causal=True)       ->  dt.attention(q, k, v, True, scale)[0]     (recognise/)
    cross_entropy_loss(logits, target)  ->  rows = dt.cross_entropy_rows(logits, target, -100)[0]
                                            sum(rows) / dt.ce_count(target, -100)
    embedding_bag(w, ids [b k])         ->  sum(embedding(w, ids), 1)         (embedding_bags.py)
    dt.ask((x > 0).all())               ->  later uses of x read dt.checked(x, x > 0)

This happens before differentiation, because dt ops have their own backward. Calls that dt ops do
not cover (such as cross entropy with class weights) stay, and are decomposed into ATen ops later.
Results keep their dtypes; new nodes carry the line and module of the node that they replace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import dtensor.frontend.capture.transformers_attention
import dtensor.sharding.ops.attention
import dtensor.sharding.ops.experts  # noqa: F401  (likewise)
from dtensor.frontend.capture.forward_mode import nodes_inside_jvp
from dtensor.frontend.capture.random_ops import RANDOM_OPS, randomise
from dtensor.frontend.capture.refusals import data_error, is_idle_dropout, planning_error
from dtensor.frontend.graph import USERS_META, Writer, bound, type_text
from dtensor.frontend.source import source_of_trace
from dtensor.private_torch import OpOverload

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt
_ANCHORS = (
    dt.route.default, aten.bmm.default,
    aten.scaled_dot_product_attention.default, aten.layer_norm.default, aten.rms_norm.default,
    aten.cat.default, aten.softmax.int,
)  # fmt: skip
_ELEMENTWISE_ANCHORS = (
    aten.rsqrt.default, aten.silu.default, aten.gelu.default, aten.tanh.default,
    aten.dropout.default,
)  # fmt: skip
_FACTORIZATIONS = {
    aten.linalg_det.default, aten.det.default, aten._linalg_det.default, aten.logdet.default,
    aten.linalg_slogdet.default, aten.slogdet.default, aten._linalg_slogdet.default,
    aten.linalg_solve.default, aten.linalg_solve_ex.default, aten._linalg_solve_ex.default,
    aten.linalg_tensorsolve.default
}  # fmt: skip
_READERS = {aten.mul.Tensor, aten.add.Tensor}
"""An elementwise anchor counts only if one of these ops reads it."""


def canonicalise(
    module: fx.GraphModule, numbers: Iterator[int] | None = None, *, forward_mode: bool = False
) -> list[Any]:
    """Rewrite `module` and its nested graphs (no_grad, autocast) in place, and return the list of
    pattern matches. ``numbers``: numbers for the random ops, which stay unchanged if it is None.
    ``forward_mode``: all nodes may be differentiated in forward mode."""
    matches: list[Any] = []
    in_jvp = set(module.graph.nodes) if forward_mode else nodes_inside_jvp(module.graph)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            matches += canonicalise(child, numbers, forward_mode=bool(in_jvp))
            # Differentiation calls this module. Interpreted node by node, its ops keep their own
            # lines, modules and checkpoints instead of the region's.
            child.forward = fx.Interpreter(child).run
    matches += _recognise(module.graph) if _has_anchor(module.graph) and not in_jvp else []
    for node in list(module.graph.nodes):
        is_mark = node.target is dt.written_attention.default  # it was not recognised
        if is_mark or is_idle_dropout(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            continue
        is_random = node.target in RANDOM_OPS
        if (
            is_random
            and numbers is not None
            and randomise(module.graph, node, numbers, forward_mode=node in in_jvp)
        ):
            continue
        if node in in_jvp and isinstance(node.target, OpOverload):
            _refuse_forward_mode(node)
        elif node.target is dt.ask.default:
            _replace_check(module.graph, node)
        elif node.target is aten.cross_entropy_loss.default:
            _cross_entropy(module.graph, node)
        elif node.target in (aten.index_put.default, aten.index_put_.default):
            _masked_fill(module.graph, node)
        elif node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
            _lower_bag(module.graph, node)
        elif node.target in _FACTORIZATIONS:
            _make_contiguous(module.graph, node)
        elif node.op == "call_function" and not node.meta.get("stack_trace"):
            _borrow_line(module, node)
    module.graph.lint()
    module.recompile()
    return matches


def _refuse_forward_mode(node: fx.Node) -> None:
    """Raise PlanningError if the node calls an operator of this project with tensors: none of these
    operators has a forward-mode derivative."""
    name = node.target.name()  # type: ignore[union-attr]
    if name.startswith("dt::") and node.all_input_nodes:
        raise planning_error(
            f"{name} has no forward-mode derivative: a tangent would be lost.",
            *(type_text(x.meta["val"]) for x in node.all_input_nodes),
            source=source_of_trace(node.meta.get("stack_trace") or ""),
            fix="leave out the check, as with validate_args=False of a distribution"
            if node.target is dt.ask.default
            else "call it outside of the function that is derived",
        )


def _borrow_line(module: fx.GraphModule, node: fx.Node) -> None:
    """Give the node of a no_grad or autocast region the line of the region's first op."""
    for arg in node.args:
        if not (isinstance(arg, fx.Node) and arg.op == "get_attr"):
            continue
        child = getattr(module, str(arg.target), None)
        if isinstance(child, fx.GraphModule):
            for inner in child.graph.nodes:
                if inner.meta.get("stack_trace"):
                    node.meta.update({k: inner.meta[k] for k in USERS_META if k in inner.meta})
                    return


def _lower_bag(graph: fx.Graph, node: fx.Node) -> None:
    from dtensor.frontend.capture.embedding_bags import lower_bag  # few programs need it

    lower_bag(graph, node)


def _make_contiguous(graph: fx.Graph, node: fx.Node) -> None:
    """Make the matrix of det or solve contiguous, as it is on the ranks: torch factors the
    transpose of a contiguous matrix, and the recorded backward depends on that."""
    matrix: Any = node.args[0]
    if not matrix.meta["val"].is_contiguous():
        node.replace_input_with(matrix, Writer(graph, node)(aten.contiguous.default, matrix))


def _has_anchor(graph: fx.Graph) -> bool:
    """Return whether the graph has an op with which a pattern of recognise/ may start."""
    return any(graph.find_nodes(op="call_function", target=t) for t in _ANCHORS) or any(
        _READERS & {u.target for u in n.users}
        for t in _ELEMENTWISE_ANCHORS
        for n in graph.find_nodes(op="call_function", target=t)
    )


def _recognise(graph: fx.Graph) -> list[Any]:
    from dtensor.frontend.capture.recognise.recognise import recognise  # few programs need it

    return recognise(graph)


def _remove_logits_cast(graph: fx.Graph, logits: fx.Node) -> None:
    from dtensor.frontend.capture.memory_rewrites import remove_logits_cast  # few programs need it

    remove_logits_cast(graph, logits)


def _masked_fill(graph: fx.Graph, node: fx.Node) -> None:
    from dtensor.frontend.capture.memory_rewrites import masked_fill  # few programs need it

    masked_fill(graph, node)


# -- checks ----------------------------------------------------------------------------------------

_ALL, _ANY = {aten.all.default, aten._is_all_true.default}, {aten.any.default}


def _replace_check(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a check (dt.ask) by dt.checked: later nodes read the checked value from this op.

    Raises PlanningError if no value of the graph fits the check.
    """
    answer, wanted, message = node.args
    assert isinstance(answer, fx.Node)
    value, later = None, _later_nodes(node)
    if answer.target in (_ALL if wanted else _ANY):
        ok: Any = answer.args[0]
        value = next(
            (x for x in _candidates(ok, node) if later & x.users.keys() and _fits(x, ok)), None
        )
    if value is None:
        source = source_of_trace(node.meta.get("stack_trace") or "")
        raise data_error(f"a check of torch's: {message}", source)
    call = Writer(graph, node)
    ok = ok if wanted else call(aten.logical_not.default, ok)
    checked_value = call(dt.checked.default, value, ok, message)
    checked_value.meta["val"] = value.meta["val"]
    value.replace_all_uses_with(checked_value, delete_user_cb=later.__contains__)
    graph.erase_node(node)


def _later_nodes(node: fx.Node) -> set[fx.Node]:
    """Return all nodes after ``node``."""
    later: set[fx.Node] = set()
    while node.op != "output":
        node = node.next
        later.add(node)
    return later


def _candidates(ok: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that may be the checked one: those from which ok is computed, the nearest
    first, then all earlier values, the last first."""
    waiting, visited = [ok], {ok}
    for current in waiting:
        operands = [x for x in current.all_input_nodes if x not in visited]
        visited.update(operands)
        waiting += operands
        yield from operands
    while node.prev.op != "root":
        node = node.prev
        yield node


def _fits(x: fx.Node, ok: fx.Node) -> bool:
    """Return whether ok has a flag for each element of x or of its leading dims. False if an op
    writes to x in place, because it would write to a copy."""
    val, flags = x.meta.get("val"), ok.meta["val"]
    written = any(isinstance(u.target, OpOverload) and u.target._schema.is_mutable for u in x.users)
    return isinstance(val, torch.Tensor) and val.shape[: flags.dim()] == flags.shape and not written


# -- cross entropy ---------------------------------------------------------------------------------


def _cross_entropy(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a cross entropy with class ids, and without class weights or label smoothing."""
    a = bound(node)
    logits, target = a["self"].meta["val"], a["target"].meta["val"]
    is_covered = (
        a["weight"] is None
        and a["label_smoothing"] == 0
        and not target.dtype.is_floating_point
        and logits.dim() >= 1
    )
    if not is_covered:
        return
    if graph.find_nodes(op="call_function", target=aten.to.dtype):
        _remove_logits_cast(graph, a["self"])
        a = bound(node)
        logits = a["self"].meta["val"]
    call = Writer(graph, node)
    rows, ids = a["self"], a["target"]
    if logits.dim() == 1:
        rows, ids = call(aten.reshape.default, rows, [1, -1]), call(aten.reshape.default, ids, [1])
    elif logits.dim() > 2:
        order = [0, *range(2, logits.dim()), 1]
        rows = call(aten.permute.default, rows, order)
        rows = call(aten.reshape.default, rows, [target.numel(), logits.shape[1]])
        ids = call(aten.reshape.default, ids, [target.numel()])
    triple = call(dt.cross_entropy_rows.default, rows, ids, a["ignore_index"])
    loss = call(operator.getitem, triple, 0)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    match a["reduction"]:
        case 0:
            if target.dim() != 1:
                loss = call(aten.reshape.default, loss, list(target.shape))
        case 1:
            total = call(aten.sum.default, loss)
            count = call(dt.ce_count.default, ids, a["ignore_index"])
            loss = call(aten.div.Tensor, total, count)
        case 2:
            loss = call(aten.sum.default, loss)
        case other:
            raise AssertionError(f"cross_entropy_loss has no reduction {other}")
    call.replace(call.cast(loss, dtype, node.meta["val"].dtype))
