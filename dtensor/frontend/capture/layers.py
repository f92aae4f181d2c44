"""Cuts an exported forward graph into its layers, and says which of them are the same program.

    model.layers.{0..31}    ->    [before, layer 0, ..., layer 31, after]; layers 0 to 31 are alike

A layer is a run of nodes whose modules lie in one numbered module. Two are alike where they call
the same ops in the same order with the same literals, on operands that come from the same places,
from the same lines of the same modules, and leave the same values behind. It is the graph that is
compared, which was captured layer by layer, not the user's classes: nothing is assumed of them.

What may differ are the parameters' values, the names of numbered modules, and the numbers of random
ops and of checkpoints, which are listed. Not here: shapes and strides of what a layer reads, which
are known once the layers before it were differentiated (stitch.py).
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
EXPORT = 20
"""Nodes that take as long to trace as an export takes by itself, about 50 ms."""
RANDOM = "random"
"""The kind of a random op's number; a checkpoint's is CHECKPOINT."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphSegment:
    """A run of nodes.

    reads: values of other segments and arguments, in the order of first use; attributes: get_attr
    nodes, likewise; makes: the values that others read, of the last segment the program's outputs;
    numbers: kind and number of its random ops and checkpoints, in order; prefix: the layer's path,
    "" for none; program: equal for segments that are alike.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    attributes: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    numbers: tuple[tuple[str, int], ...]
    prefix: str
    program: Hashable


Run = tuple[str, list[fx.Node]]  # the path of the layer, "" for none, and its nodes


def segments_of(module: fx.GraphModule) -> tuple[GraphSegment, ...]:
    """The segments of a program, or none where too little of it is repeated to be worth it."""
    cut = _segments(module, _runs(module.graph))
    count = Counter(segment.program for segment in cut)
    runs: list[Run] = []
    for segment in cut:
        alone = count[segment.program] == 1
        if alone and runs and not runs[-1][0]:
            runs[-1][1].extend(segment.nodes)
        else:
            runs.append(("" if alone else segment.prefix, list(segment.nodes)))
    segments = _segments(module, runs)
    first = {segment.program: segment for segment in reversed(segments)}
    spared = sum(len(s.nodes) for s in segments if first[s.program] is not s)
    return tuple(segments) if spared > EXPORT * len(first) else ()


def _segments(module: fx.GraphModule, runs: Sequence[Run]) -> list[GraphSegment]:
    last = len(runs) - 1
    buffers = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    return [_segment(module, *run, buffers, last=i == last) for i, run in enumerate(runs)]


def layer_of(node: fx.Node) -> str | None:
    """The outermost numbered module around a node ("model.layers.3"); "": none; None: unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return next((path for path, _ in stack.values() if path.rpartition(".")[2].isdigit()), "")


def _runs(graph: fx.Graph) -> list[Run]:
    """Layer and nodes; what stands between two layers of one list belongs to the former."""
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
    return layer.rpartition(".")[0]


def _segment(
    module: fx.GraphModule,
    prefix: str,
    nodes: Sequence[fx.Node],
    buffers: frozenset[str],
    *,
    last: bool,
) -> GraphSegment:
    inside = dict.fromkeys(nodes)
    outer = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside)
    outputs: Any = module.graph.output_node().args[0] if last else ()
    if last:
        outer.update(dict.fromkeys(x for x in outputs if x not in inside))
    crossing_values = (
        outputs if last else [n for n in nodes if any(u not in inside for u in n.users)]
    )
    reads = tuple(x for x in outer if x.op != "get_attr")
    attributes = tuple(x for x in outer if x.op == "get_attr")
    crossing = {*outer, *crossing_values}
    changed = any(_changes_what_crosses(node, crossing) for node in nodes)
    numbers: list[tuple[str, int]] = []
    places = {node: ("here", i) for i, node in enumerate(nodes)}
    places.update({node: ("read", i) for i, node in enumerate(reads)})
    for index, node in enumerate(attributes):
        places[node] = _attribute(module, node, index, prefix, buffers)
    calls = tuple(_call(node, places, prefix, numbers) for node in nodes)
    return GraphSegment(
        nodes=tuple(nodes),
        reads=reads,
        attributes=attributes,
        makes=tuple(crossing_values),
        numbers=tuple(numbers),
        prefix=prefix,
        program=object() if changed else (calls, tuple(places[n] for n in crossing_values), last),
    )


def _changes_what_crosses(node: fx.Node, crossing: Container[fx.Node]) -> bool:
    """Whether an op changes in place what others may see: all but values of its own segment's,
    which are no views. Where autograd reads those again depends on the readers."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return False
    if target is torch.ops.aten.detach_.default:
        return False
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        own = isinstance(value, fx.Node) and value not in crossing and not _is_view(value)
        if written and not own:
            return True
    return node in crossing


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return any(result.alias_info is not None for result in target._schema.returns)


def _attribute(
    module: fx.GraphModule, node: fx.Node, index: int, prefix: str, buffers: frozenset[str]
) -> tuple[Any, ...]:
    """Where a parameter or buffer comes from: by position. A small constant is what it holds."""
    value = attribute_of(module, node)
    match value:
        case torch.nn.Parameter():
            return ("parameter", index)
        case torch.Tensor() if str(node.target) in buffers:
            return ("buffer", index)
        case FakeTensor():
            return ("constant", str(node.target))
        case torch.Tensor() if value.numel() <= MAX_CONSTANT:
            held = (tuple(value.shape), value.stride(), value.dtype, repr(value.tolist()))
            return ("constant", index, held)
        case fx.GraphModule():
            return ("graph", index, _nested(value, prefix))
        case _:
            return ("constant", str(node.target))


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _nested(module: fx.GraphModule, prefix: str) -> Hashable:
    """A graph that an op holds (no_grad, autocast): equal for equal code and lines."""
    places = {node: ("here", i) for i, node in enumerate(module.graph.nodes)}
    inner: list[Hashable] = []
    numbers: list[tuple[str, int]] = []
    for node in module.graph.nodes:
        inner.append((node.op, _call(node, places, prefix, numbers)))
        if node.op == "get_attr":
            child = attribute_of(module, node)
            graph = isinstance(child, fx.GraphModule)
            inner.append(_nested(child, prefix) if graph else ("constant", id(child)))
    return (*inner, *numbers)


def _call(
    node: fx.Node, places: dict[fx.Node, Any], prefix: str, numbers: list[tuple[str, int]]
) -> Hashable:
    kwargs: dict[str, Any] = dict(node.kwargs)
    if is_random(node):
        numbers.append((RANDOM, kwargs.pop("op")))
    checkpoint = (node.meta.get("custom") or {}).get(CHECKPOINT)
    if checkpoint is not None and (CHECKPOINT, checkpoint) not in numbers:
        numbers.append((CHECKPOINT, checkpoint))
    stack = node.meta.get("nn_module_stack") or {}
    return (
        node.target if node.op == "call_function" else None,
        exact(node.args, places),
        exact(tuple(kwargs.items()), places),
        node.meta.get("stack_trace"),
        tuple((renamed(path, prefix, "*"), cls) for path, cls in stack.values()),
        checkpoint is None or numbers.index((CHECKPOINT, checkpoint)),
    )


def is_random(node: fx.Node) -> bool:
    """Whether a node is an op of the project's own that draws numbers, under the number ``op``."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "dt" and "op" in node.kwargs


def renamed(path: str, prefix: str, new: str) -> str:
    """``path`` with ``new`` in the place of its beginning ``prefix``, if it begins so."""
    if prefix and (path == prefix or path.startswith(f"{prefix}.")):
        return new + path[len(prefix) :]
    return path


def exact(value: Any, places: Mapping[fx.Node, Any]) -> Hashable:
    """A call's arguments with ``places`` for nodes: equal for the same, but not for 1 and True."""
    match value:
        case fx.Node():
            return places[value]
        case list() | tuple():
            return (type(value).__name__, *(exact(v, places) for v in value))
        case dict():
            return ("dict", *((k, exact(v, places)) for k, v in value.items()))
        case _:
            return (type(value), repr(value))


# -- a whole program -------------------------------------------------------------------------------

MAX_FINGERPRINT_BYTES = 2**20
"""Bytes of a constant that are part of a print; a larger one makes it unlike any other."""


def fingerprint(module: fx.GraphModule) -> str:
    """A hash of an exported forward graph: what is made of two that have the same is the same."""
    return hashlib.sha256(repr(_fingerprint_parts(module)).encode()).hexdigest()


def _fingerprint_parts(module: fx.GraphModule) -> list[Any]:
    places: dict[fx.Node, Any] = {}
    found: list[Any] = []
    for node in module.graph.nodes:
        meta, val = node.meta, node.meta.get("val")
        stack = tuple(meta.get("nn_module_stack", {}).values())
        around = meta.get("stack_trace"), stack, meta.get("custom")
        call = str(node.target), exact(node.args, places), exact(node.kwargs, places)
        attribute = (
            _attribute_fingerprint(attribute_of(module, node)) if node.op == "get_attr" else None
        )
        found.append((node.op, *call, attribute, _layouts(val), around))
        places[node] = len(places)
    return found


def _attribute_fingerprint(value: Any) -> Any:
    match value:
        case fx.GraphModule():
            return _fingerprint_parts(value)
        case FakeTensor() | torch.nn.Parameter():
            return _layouts(value), value.requires_grad
        case torch.Tensor() if (
            value.nbytes <= MAX_FINGERPRINT_BYTES and value.layout is torch.strided
        ):
            held = value.detach().cpu().resolve_conj().resolve_neg()
            held = held.clone(memory_format=torch.contiguous_format)  # numpy() forbids resize_
            return _layouts(value), bytes(held.reshape(-1).view(torch.uint8).numpy())
        case _:
            return next(_unlike)


_unlike = itertools.count()


def _layouts(val: Any) -> Any:
    match val:
        case torch.Tensor():
            return (*val.shape, *val.stride(), val.dtype, val.is_conj(), val.is_neg())
        case tuple() | list():
            return tuple(map(_layouts, val))
        case _:
            return val
