"""Give every node its phase, source, module, sequence number and a readable name.

    h = self.up(x)                   the last forward node of this line is named h, others by op
    blocks.0.mlp.up.weight           the placeholder is named blocks_0_mlp_up_weight
    gradient of this weight          the node is named grad_blocks_0_mlp_up_weight

Invariants: names depend on the graph only. A backward node gets the source and module of its
forward op (the node with the same sequence number). A sum of gradients has no forward op, so it
gets the source and module of its first operand that has a source.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence

from torch import fx

from dtensor.frontend.capture.patches import CHECKPOINT
from dtensor.frontend.graph import (
    Arg,
    Const,
    Grad,
    Input,
    ModuleBuffer,
    Output,
    Param,
    Tangent,
    op_text,
)
from dtensor.frontend.source import Source, frames_of_trace, source_of_trace
from dtensor.private_torch import Namespace

_ASSIGNMENT = re.compile(
    r"^(?P<names>[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]+)?(?:[-+*/@]|//)?=(?!=)"
)
_ACCUMULATION = "Gradient addition node"


def annotate_nodes(graph: fx.Graph, prefixes: Mapping[str, str]) -> None:
    """Replace torch's meta of each node by ours. `prefixes`: see `FlatCall.prefixes`."""
    forward_of: dict[int, tuple[Source | None, str]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        meta = node.meta
        trace = meta.get("stack_trace") or ""
        backward = meta.get("partitioner_tag") == "is_backward"
        seq = None if _ACCUMULATION in trace else meta.get("seq_nr")
        stack = meta.get("fwd_nn_module_stack" if backward else "nn_module_stack") or {}
        calls = module_calls(stack, prefixes)
        module = calls[-1].partition("@")[0] if calls else ""
        source = source_of_trace(trace) if trace else None
        if backward and seq in forward_of:
            source_of_forward, path = forward_of[seq]
            source, module = source or source_of_forward, module or path
        if source is None and node.op == "call_function":
            # This node is a sum of gradients, or its region lost its lines.
            for operand in node.all_input_nodes:
                if operand.op == "call_function" and operand.meta["source"] is not None:
                    source = operand.meta["source"]
                    module = module or operand.meta["module"]
                    break
        if not backward and seq is not None and seq not in forward_of:
            forward_of[seq] = (source, module)
        node.meta = {
            "frames": frames_of_trace(trace),
            "val": meta["val"],
            "phase": "backward" if backward and node.op != "placeholder" else "forward",
            "source": source,
            "module": module,
            "calls": calls,
            "checkpoint": (meta.get("custom") or {}).get(CHECKPOINT),
            "seq": seq,
        }


def module_calls(
    stack: Mapping[str, tuple[str, object]], prefixes: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the module calls around a node, outermost first, without the call of the root.

    ``blocks.0``; ``norm@1`` is the second call of a module, as in torch's keys of ``stack``.
    """
    calls: list[str] = []
    for key, (path, _) in stack.items():
        name = user_path(path, prefixes) if path else ""
        if name:
            _, at, number = key.partition("@")
            calls.append(f"{name}{at}{number}")
    return tuple(calls)


def user_path(path: str, prefixes: Mapping[str, str]) -> str:
    """Return the user's path of a module: `module_0.blocks.0` -> `blocks.0`, or `actor.blocks.0` if
    the prefix of module_0 is "actor"."""
    root, _, path_in_root = path.partition(".")
    return ".".join(part for part in (prefixes.get(root, root), path_in_root) if part)


def order_phases(graph: fx.Graph) -> None:
    """Move all forward nodes before all backward nodes; both keep their order."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    backward = [n for n in nodes if n.meta["phase"] == "backward"]
    late = set(backward)
    # A node that reads a backward node is a backward node.
    for node in nodes:
        if node not in late and any(operand in late for operand in node.all_input_nodes):
            node.meta["phase"] = "backward"
            late.add(node)
            backward.append(node)
    output = graph.output_node()
    for node in nodes:
        if node in late:
            output.prepend(node)


def name_nodes(graph: fx.Graph, inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
    """Name inputs and gradients after their tensor, other nodes after the variable that their line
    assigns, or their op. Drops the meta "frames", which only names need."""
    wanted = {
        node: _input_name(described)
        for node, described in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    wanted.update(_assigned_names(graph))
    for node, described in zip(_output_nodes(graph), outputs, strict=True):
        is_backward = node.op == "call_function" and node.meta["phase"] == "backward"
        if isinstance(described, Grad) and is_backward:
            wanted.setdefault(node, f"grad_{described.of.name}")
    # The old namespace still holds the names of erased nodes.
    graph._graph_namespace = Namespace()
    graph._graph_namespace.create_name(graph.output_node().name, None)
    for node in (n for n in graph.nodes if n.op != "output"):
        name = wanted.get(node) or op_text(node).rsplit(".", 1)[-1].strip("_") or "value"
        node.name = graph._graph_namespace.create_name(name, node)
        if node.op == "placeholder":
            node.target = node.name
        del node.meta["frames"]


def _output_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]


def _input_name(graph_input: Input) -> str:
    match graph_input:
        case Param(name) | ModuleBuffer(name) | Arg(name=name) | Const(name=name):
            return name
        case Tangent(output):
            return f"tangent_{output}"


def _assigned_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the names of the variables to which the values of nodes are assigned.

    The nodes of a statement are consecutive nodes with the same frames; nodes of functions that the
    line calls may follow. The value is the last node of the statement that a later forward node
    uses (a layer norm also returns statistics for its backward), or the last node if none is used.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    order = {node: i for i, node in enumerate(nodes)}
    returned = set(_output_nodes(graph))
    names: dict[fx.Node, str] = {}
    for i, node in enumerate(nodes):
        frames = node.meta["frames"]
        next_frames = nodes[i + 1].meta["frames"] if i + 1 < len(nodes) else ()
        if not frames or next_frames[: len(frames)] == frames:
            continue
        match = _ASSIGNMENT.match(node.meta["source"].text)
        if match is None:
            continue
        targets = [t.strip() for t in match["names"].split(",")]
        start = i
        while start > 0 and nodes[start - 1].meta["frames"] == frames:
            start -= 1
        statement = nodes[start : i + 1]
        if len(targets) > 1:
            names.update(_tuple_names(statement, targets))
            continue
        used = [n for n in statement if n in returned or any(order.get(u, -1) > i for u in n.users)]
        last = (used or statement)[-1]
        names[_fused_sum(last, used) if last.target is operator.getitem else last] = targets[0]
    return names


def _fused_sum(part: fx.Node, candidates: Sequence[fx.Node]) -> fx.Node:
    """Return the sum if ``part`` is a part of a fused add and norm; else return ``part``."""
    is_fused = op_text(part.all_input_nodes[0]).startswith("dt.")
    return next((n for n in candidates if is_fused and n.args[:1] == part.args[:1]), part)


def _tuple_names(statement: Sequence[fx.Node], targets: Sequence[str]) -> dict[fx.Node, str]:
    """Return the names of the items of the last tuple of a statement: `q, k, v = qkv.chunk(3)`. {}
    if the number of items differs from the number of variables."""
    all_items = [n for n in statement if n.target is operator.getitem]
    if not all_items:
        return {}
    items = [n for n in all_items if n.args[0] is all_items[-1].args[0]]
    by_index = {int(n.args[1]): n for n in items}  # type: ignore[arg-type]
    if sorted(by_index) != list(range(len(targets))):
        return {}
    return {by_index[i]: name for i, name in enumerate(targets)}
