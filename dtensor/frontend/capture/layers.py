"""Cut an exported forward graph into layers, and find the layers that are the same program.

    model.layers.{0..31}    ->    [before, layer 0, ..., layer 31, after]; layers 0 to 31 are equal

A layer is a run of nodes inside one numbered module. Two layers are equal if they call the same ops
in the same order with the same literals, operands, lines, modules and outputs. Parameter values,
the indices of numbered modules, and the numbers of random ops and checkpoints may differ. Shapes
and strides of a layer's inputs are compared later (stitch.py).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.patches import CHECKPOINT
from dtensor.private_torch import FakeTensor, OpOverload

MAX_CONSTANT = 64  # elements
EXPORT_COST_NODES = 20
"""The fixed cost of an export, about 50 ms, in nodes that are traced in the same time."""
RANDOM = "random"
"""The kind of the number of a random op. The kind of a checkpoint's number is CHECKPOINT."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphSegment:
    """A run of nodes of a graph.

    reads: the arguments and values of other segments that it reads, in the order of first use.
    attributes: the get_attr nodes that it reads, in the same order. outputs: its values that others
    read; for the last segment, the program's outputs. numbers: kind and number of its random ops
    and checkpoints, in order. prefix: the layer's path, or "". program: equal for equal segments.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    attributes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    numbers: tuple[tuple[str, int], ...]
    prefix: str
    program: Hashable


Run = tuple[str, list[fx.Node]]  # the path of the layer, "" for none, and its nodes


def segments_of(module: fx.GraphModule) -> tuple[GraphSegment, ...]:
    """Return the segments of a program; () if too little is repeated to save time."""
    segments_of_runs = _segments(module, _runs(module.graph))
    count = Counter(segment.program for segment in segments_of_runs)
    runs: list[Run] = []
    for segment in segments_of_runs:
        is_unique = count[segment.program] == 1
        if is_unique and runs and not runs[-1][0]:
            runs[-1][1].extend(segment.nodes)
        else:
            runs.append(("" if is_unique else segment.prefix, list(segment.nodes)))
    segments = _segments(module, runs)
    first = {segment.program: segment for segment in reversed(segments)}
    saved_nodes = sum(len(s.nodes) for s in segments if first[s.program] is not s)
    return tuple(segments) if saved_nodes > EXPORT_COST_NODES * len(first) else ()


def _segments(module: fx.GraphModule, runs: Sequence[Run]) -> list[GraphSegment]:
    last = len(runs) - 1
    buffers = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    return [_segment(module, *run, buffers, last=i == last) for i, run in enumerate(runs)]


def layer_of(node: fx.Node) -> str | None:
    """Return the path of the outermost numbered module around a node ("model.layers.3"), "" if
    there is none, and None if the node's modules are unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return next((path for path, _ in stack.values() if path.rpartition(".")[2].isdigit()), "")


def _runs(graph: fx.Graph) -> list[Run]:
    """Return the runs of nodes. Nodes between two layers of a list belong to the earlier one."""
    runs: list[Run] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        layer = layer_of(node)
        if layer is None:
            layer = runs[-1][0] if runs else ""
        if not runs or runs[-1][0] != layer:
            runs.append((layer, []))
        runs[-1][1].append(node)
    joined: list[Run] = []
    for index, (layer, nodes) in enumerate(runs):
        after = runs[index + 1][0] if index + 1 < len(runs) else ""
        before = joined[-1][0] if joined else ""
        between = not layer and before and _list_of(before) == _list_of(after)
        if joined and (between or before == layer):
            joined[-1][1].extend(nodes)
        else:
            joined.append((layer, nodes))
    return joined


def _list_of(layer: str) -> str:
    """Return the path of the module list that holds a layer."""
    return layer.rpartition(".")[0]


def _segment(
    module: fx.GraphModule,
    prefix: str,
    nodes: Sequence[fx.Node],
    buffers: frozenset[str],
    *,
    last: bool,
) -> GraphSegment:
    own_nodes = dict.fromkeys(nodes)
    outer = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own_nodes)
    outputs: Any = module.graph.output_node().args[0] if last else ()
    if last:
        outer.update(dict.fromkeys(x for x in outputs if x not in own_nodes))
    shared_values = (
        outputs if last else [n for n in nodes if any(u not in own_nodes for u in n.users)]
    )
    reads = tuple(x for x in outer if x.op != "get_attr")
    attributes = tuple(x for x in outer if x.op == "get_attr")
    shared = {*outer, *shared_values}
    writes_shared = any(_writes_shared_value(node, shared) for node in nodes)
    numbers: list[tuple[str, int]] = []
    keys = {node: ("here", i) for i, node in enumerate(nodes)}
    keys.update({node: ("read", i) for i, node in enumerate(reads)})
    for index, node in enumerate(attributes):
        keys[node] = _attribute_key(module, node, index, prefix, buffers)
    calls = tuple(_call_key(node, keys, prefix, numbers) for node in nodes)
    return GraphSegment(
        nodes=tuple(nodes),
        reads=reads,
        attributes=attributes,
        outputs=tuple(shared_values),
        numbers=tuple(numbers),
        prefix=prefix,
        program=object() if writes_shared else (calls, tuple(keys[n] for n in shared_values), last),
    )


def _writes_shared_value(node: fx.Node, shared: Container[fx.Node]) -> bool:
    """Return whether an op changes in place a value that other segments may see. Only values of the
    same segment that are not views are safe: autograd may save the others."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return False
    if target is torch.ops.aten.detach_.default:
        return False
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_private = isinstance(value, fx.Node) and value not in shared and not _is_view(value)
        if is_written and not is_private:
            return True
    return node in shared


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return any(result.alias_info is not None for result in target._schema.returns)


def _attribute_key(
    module: fx.GraphModule, node: fx.Node, index: int, prefix: str, buffers: frozenset[str]
) -> tuple[Any, ...]:
    """Return a key that is equal for corresponding attributes of equal segments: the position of a
    parameter or buffer, the values of a small constant."""
    value = attribute_of(module, node)
    match value:
        case torch.nn.Parameter():
            return ("parameter", index)
        case torch.Tensor() if str(node.target) in buffers:
            return ("buffer", index)
        case FakeTensor():
            return ("constant", str(node.target))
        case torch.Tensor() if value.numel() <= MAX_CONSTANT:
            content = (tuple(value.shape), value.stride(), value.dtype, repr(value.tolist()))
            return ("constant", index, content)
        case fx.GraphModule():
            return ("graph", index, _region_key(value, prefix))
        case _:
            return ("constant", str(node.target))


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _region_key(module: fx.GraphModule, prefix: str) -> Hashable:
    """Return a key of the graph of a no_grad or autocast region, equal for equal code and lines."""
    keys = {node: ("here", i) for i, node in enumerate(module.graph.nodes)}
    parts: list[Hashable] = []
    numbers: list[tuple[str, int]] = []
    for node in module.graph.nodes:
        parts.append((node.op, _call_key(node, keys, prefix, numbers)))
        if node.op == "get_attr":
            child = attribute_of(module, node)
            is_graph = isinstance(child, fx.GraphModule)
            parts.append(_region_key(child, prefix) if is_graph else ("constant", id(child)))
    return (*parts, *numbers)


def _call_key(
    node: fx.Node, keys: dict[fx.Node, Any], prefix: str, numbers: list[tuple[str, int]]
) -> Hashable:
    """Return a key of a call, equal for the same call in equal layers. Appends the numbers of its
    random op and checkpoint to ``numbers``."""
    kwargs: dict[str, Any] = dict(node.kwargs)
    if is_random(node):
        numbers.append((RANDOM, kwargs.pop("op")))
    checkpoint = (node.meta.get("custom") or {}).get(CHECKPOINT)
    if checkpoint is not None and (CHECKPOINT, checkpoint) not in numbers:
        numbers.append((CHECKPOINT, checkpoint))
    stack = node.meta.get("nn_module_stack") or {}
    return (
        node.target if node.op == "call_function" else None,
        args_key(node.args, keys),
        args_key(tuple(kwargs.items()), keys),
        node.meta.get("stack_trace"),
        tuple((replace_prefix(path, prefix, "*"), cls) for path, cls in stack.values()),
        checkpoint is None or numbers.index((CHECKPOINT, checkpoint)),
    )


def is_random(node: fx.Node) -> bool:
    """Return whether a node is a random dt op; its keyword ``op`` is its number."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "dt" and "op" in node.kwargs


def replace_prefix(path: str, prefix: str, new: str) -> str:
    """Return ``path`` with ``new`` in place of ``prefix``, if the path starts with it."""
    if prefix and (path == prefix or path.startswith(f"{prefix}.")):
        return new + path[len(prefix) :]
    return path


def args_key(value: Any, keys: Mapping[fx.Node, Any]) -> Hashable:
    """Return a key of a call's arguments, with ``keys`` for nodes. 1 and True have other keys."""
    match value:
        case fx.Node():
            return keys[value]
        case list() | tuple():
            return (type(value).__name__, *(args_key(v, keys) for v in value))
        case dict():
            return ("dict", *((k, args_key(v, keys)) for k, v in value.items()))
        case _:
            return (type(value), repr(value))


# -- a whole program -------------------------------------------------------------------------------

MAX_HASHED_BYTES = 2**20
"""The maximum size of a constant whose bytes are hashed. A larger one makes a graph unique."""


def fingerprint(module: fx.GraphModule) -> str:
    """Return a hash of an exported forward graph. Equal hashes mean equal joint graphs."""
    return hashlib.sha256(repr(_fingerprint_parts(module)).encode()).hexdigest()


def _fingerprint_parts(module: fx.GraphModule) -> list[Any]:
    keys: dict[fx.Node, Any] = {}
    parts: list[Any] = []
    for node in module.graph.nodes:
        meta, val = node.meta, node.meta.get("val")
        stack = tuple(meta.get("nn_module_stack", {}).values())
        context = meta.get("stack_trace"), stack, meta.get("custom")
        call = str(node.target), args_key(node.args, keys), args_key(node.kwargs, keys)
        attribute = _content(attribute_of(module, node)) if node.op == "get_attr" else None
        parts.append((node.op, *call, attribute, _layouts(val), context))
        keys[node] = len(keys)
    return parts


def _content(value: Any) -> Any:
    """Return the part of a fingerprint that describes an attribute of the module."""
    match value:
        case fx.GraphModule():
            return _fingerprint_parts(value)
        case FakeTensor() | torch.nn.Parameter():
            return _layouts(value), value.requires_grad
        case torch.Tensor() if value.nbytes <= MAX_HASHED_BYTES and value.layout is torch.strided:
            values = value.detach().cpu().resolve_conj().resolve_neg()
            values = values.clone(memory_format=torch.contiguous_format)  # numpy() forbids resize_
            return _layouts(value), bytes(values.reshape(-1).view(torch.uint8).numpy())
        case _:
            return next(_unique_numbers)


_unique_numbers = itertools.count()


def _layouts(val: Any) -> Any:
    match val:
        case torch.Tensor():
            return (*val.shape, *val.stride(), val.dtype, val.is_conj(), val.is_neg())
        case tuple() | list():
            return tuple(map(_layouts, val))
        case _:
            return val
