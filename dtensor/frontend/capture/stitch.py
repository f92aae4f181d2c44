"""Build the joint graph of repeated layers: differentiate each kind of layer once, copy, connect.

    joint = stitch(forward, segments_of(forward), tensors, mode)
    # forward of segments 0, 1, ..., n, then backward of segments n, ..., 1, 0

Torch's joint export takes about a millisecond per op. So each kind of segment (layers.py) is
exported once. Each copy gets its own parameters, modules and random numbers.

Invariants: nodes, order and meta "desc" are as in torch's export of the whole program. If the
order in which autograd adds gradients is not certain, or a segment changes in place a value that
other segments see, `NotSeparable` is raised, and the caller exports the whole program.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK

from dtensor.frontend.capture.decompose import GraphAndConstants
from dtensor.frontend.capture.layers import (
    RANDOM,
    GraphSegment,
    attribute_of,
    is_random,
    replace_prefix,
)
from dtensor.frontend.capture.patches import CHECKPOINT, export_joint
from dtensor.private_torch import FakeTensorMode, aot_descriptors

aot = aot_descriptors()

_COPIED_META = ("val", "stack_trace", "partitioner_tag")


class NotSeparable(Exception):
    """A segment cannot be differentiated separately: its gradients interact with other segments."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Kind:
    """The joint graph of a segment and of all equal ones. outputs: for each output of the segment,
    a tensor like it, and whether it has a tangent."""

    segment: GraphSegment
    joint: fx.GraphModule
    outputs: tuple[tuple[torch.Tensor, bool], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Occurrence:
    """A segment of the program, and its kind."""

    segment: GraphSegment
    kind: _Kind


def stitch(
    forward: fx.GraphModule,
    segments: Sequence[GraphSegment],
    tensors: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> GraphAndConstants:
    """Return the joint graph of an exported graph ``forward`` with fake parameters.

    segments: its parts in order. tensors: its fake arguments. Raises NotSeparable if the segments
    cannot be differentiated separately."""
    parts = _occurrences(forward, segments, tensors, mode)
    _check_gradient_order(forward, parts)
    return _Stitcher(forward, parts).run()


# -- the kinds -----------------------------------------------------------------------------------


def _occurrences(
    forward: fx.GraphModule,
    segments: Sequence[GraphSegment],
    tensors: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> list[_Occurrence]:
    """Return each segment with its kind; export each kind at its first segment.

    Raises NotSeparable if a segment has several differentiable outputs, or several segments read
    one.
    """
    values = dict(zip(forward.graph.find_nodes(op="placeholder"), tensors, strict=True))
    reader_count = Counter(node for segment in segments for node in segment.reads)
    kinds: dict[Hashable, _Kind] = {}
    parts: list[_Occurrence] = []
    for segment in segments:
        reads = [values[node] for node in segment.reads]
        attributes = [attribute_of(forward, node) for node in segment.attributes]
        key = (segment.program, *map(_export_key, reads), *map(_export_key, attributes))
        if key not in kinds:
            kinds[key] = _export_kind(forward, segment, reads, mode)
        kind = kinds[key]
        parts.append(_Occurrence(segment=segment, kind=kind))
        if segment is not segments[-1]:
            outputs = list(zip(segment.outputs, kind.outputs, strict=True))
            with_grad = [node for node, (_, requires_grad) in outputs if requires_grad]
            if len(with_grad) > 1 or any(reader_count[node] > 1 for node in with_grad):
                raise NotSeparable
            for node, (like, requires_grad) in outputs:
                if like.is_conj() or like.is_neg():
                    raise NotSeparable  # `_fake` does not copy these bits
                values[node] = _fake(like, requires_grad, mode)
    return parts


def _export_key(value: Any) -> Hashable:
    """Return the properties of a tensor on which an export depends; None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad


def _fake(like: torch.Tensor, requires_grad: bool, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    return tensor.requires_grad_(requires_grad)


def _export_kind(
    forward: fx.GraphModule,
    segment: GraphSegment,
    reads: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> _Kind:
    """Export a segment as a program of its own. ``reads``: its fake inputs."""
    joint = export_joint(_segment_module(forward, segment), reads)
    outputs: Any = joint.graph.output_node().args[0]
    values: dict[int, torch.Tensor] = {}
    for node, desc in zip(outputs, joint.graph.output_node().meta["desc"], strict=True):
        match desc:
            case aot.PlainAOTOutput(idx=index):
                values[index] = node.args[0].meta["val"]  # `_segment_module` cloned this value
            case aot.GradAOTOutput() | None:
                pass
            case _:
                raise NotSeparable  # it changes one of its inputs
    with_tangent = {
        node.meta["desc"].output.idx
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], aot.TangentAOTInput)
    }
    if len(values) != len(segment.outputs):
        raise NotSeparable
    return _Kind(
        segment=segment,
        joint=joint,
        outputs=tuple((values[i], i in with_tangent) for i in range(len(segment.outputs))),
    )


def _segment_module(forward: fx.GraphModule, segment: GraphSegment) -> fx.GraphModule:
    """Return the segment as a module. Outputs are cloned, because an output that is a view of an
    input or of another output has no tangent. simplify.py erases the clones."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in segment.reads}
    for node in (*segment.attributes, *segment.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs: list[fx.Node] = []
    for node in segment.outputs:
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise NotSeparable
        outputs.append(graph.call_function(torch.ops.aten.clone.default, (env[node],)))
        outputs[-1].meta.update(node.meta)
    graph.output(tuple(outputs))
    module = fx.GraphModule(forward, graph)
    state_names = {name for name, _ in forward.named_parameters(remove_duplicate=False)}
    state_names |= {name for name, _ in forward.named_buffers(remove_duplicate=False)}
    for node in segment.attributes:  # fx turned constants into buffers: undo it
        name = str(node.target)
        value = attribute_of(forward, node)
        if isinstance(value, torch.Tensor) and name not in state_names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            del owner._buffers[leaf]
            setattr(owner, leaf, value)
    return module


# -- connecting the copies -----------------------------------------------------------------------


def _check_gradient_order(forward: fx.GraphModule, parts: Sequence[_Occurrence]) -> None:
    """Raise NotSeparable unless each segment adds one gradient to a value that several read."""
    readers: dict[fx.Node, list[_Occurrence]] = {}
    names_by_id: dict[int, dict[str, None]] = {}
    for part in parts:
        for node in (*part.segment.reads, *part.segment.attributes):
            readers.setdefault(node, []).append(part)
        for node in part.segment.attributes:
            names_by_id.setdefault(id(attribute_of(forward, node)), {})[str(node.target)] = None
    if any(len(names) > 1 for names in names_by_id.values()):
        raise NotSeparable  # one tensor under two names
    for node, occurrences in readers.items():
        value = attribute_of(forward, node) if node.op == "get_attr" else None
        several = len(occurrences) > 1
        shared = several and node.op == "placeholder" and _requires_grad(node, occurrences[0])
        if shared or (
            isinstance(value, torch.Tensor)
            and value.requires_grad
            and _mixes_sums(node, occurrences)
        ):
            raise NotSeparable


def _requires_grad(node: fx.Node, part: _Occurrence) -> bool:
    """Return whether an argument of the program that ``part`` reads requires grad."""
    index = part.segment.reads.index(node)
    return any(
        isinstance(desc, aot.GradAOTOutput) and desc.grad_of == aot.PlainAOTInput(index)
        for desc in part.kind.joint.graph.output_node().meta["desc"]
    )


def _mixes_sums(node: fx.Node, occurrences: Sequence[_Occurrence]) -> bool:
    """Return whether autograd would not add the gradients of a parameter segment by segment: a
    segment before the last reads it several times, and autograd adds these terms one by one."""
    use_counts = [sum(user in part.segment.nodes for user in node.users) for part in occurrences]
    return any(count > 1 for count in use_counts[:-1])


class _Stitcher:
    """Builds the joint graph of the whole program from copies of the kinds' graphs."""

    def __init__(self, forward: fx.GraphModule, parts: Sequence[_Occurrence]) -> None:
        self.forward, self.parts = forward, parts
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: dict[Any, fx.Node] = {}  # placeholders by torch's descriptor
        self.values: dict[fx.Node, fx.Node] = {}  # by node of the exported graph
        self.gradients: dict[Any, fx.Node] = {}  # by the descriptor of the input
        self.sequence = itertools.count()

    def run(self) -> GraphAndConstants:
        """Return the joint graph."""
        for name, _ in self.forward.named_parameters(remove_duplicate=False):
            self._placeholder(aot.ParamAOTInput(name))
        for name, _ in self.forward.named_buffers(remove_duplicate=False):
            self._placeholder(aot.BufferAOTInput(name))
        for index, node in enumerate(self.forward.graph.find_nodes(op="placeholder")):
            self.values[node] = self._placeholder(aot.PlainAOTInput(index))
        last = self.parts[-1]
        for index, (_, wanted) in enumerate(last.kind.outputs):
            if wanted:
                output: Any = aot.PlainAOTOutput(index)
                self._placeholder(aot.TangentAOTInput(output))
        copies = [_Copy(self, part) for part in self.parts]
        for copy in copies:
            copy.forward()
        tangents: dict[fx.Node, fx.Node] = {}
        for copy in reversed(copies):
            copy.backward(tangents, last=copy is copies[-1])
        self._output(copies[-1])
        return GraphAndConstants(self.graph, self.constants)

    def _placeholder(self, desc: Any) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta["desc"] = desc
        self.inputs[desc] = node
        return node

    def _output(self, last: _Copy) -> None:
        descs: list[Any] = [aot.PlainAOTOutput(i) for i in range(len(last.part.kind.outputs))]
        values: list[fx.Node | None] = [last.outputs[desc] for desc in descs]
        for desc in self.inputs:
            if not isinstance(desc, aot.TangentAOTInput):
                values.append(self.gradients.get(desc))
                descs.append(aot.GradAOTOutput(desc))
        self.graph.output(tuple(values)).meta["desc"] = descs

    def accumulate(self, input_desc: Any, gradient: fx.Node) -> None:
        """Add a gradient to the sum of the gradients of an input, as autograd does."""
        if input_desc in self.gradients:
            total = self.graph.call_function(
                torch.ops.aten.add.Tensor, (self.gradients[input_desc], gradient)
            )
            total.meta = {k: gradient.meta[k] for k in _COPIED_META if k in gradient.meta}
            trace = f"{gradient.meta.get('stack_trace') or ''}{GRADIENT_ACC_SPECIAL_STACK}"
            total.meta |= {"stack_trace": trace, "partitioner_tag": "is_backward"}
            gradient = total
        self.gradients[input_desc] = gradient


class _Copy:
    """The copy of a kind's joint graph for one segment."""

    def __init__(self, stitcher: _Stitcher, part: _Occurrence) -> None:
        self.stitcher, self.part = stitcher, part
        self.env: dict[fx.Node, fx.Node] = {}  # by node of the kind's graph
        self.outputs: dict[Any, fx.Node] = {}  # by torch's descriptor
        numbers = zip(part.kind.segment.numbers, part.segment.numbers, strict=True)
        self.numbers = {old: number for old, (_, number) in numbers}
        self.sequence: dict[int, int] = {}  # from sequence numbers of the kind's graph
        self.stacks: dict[int, dict[str, Any]] = {}  # by id of the kind's stack
        self.backward_nodes: list[fx.Node] = []

    def forward(self) -> None:
        """Copy the forward nodes."""
        segment, graph = self.part.segment, self.part.kind.joint.graph
        names = {str(n.target): i for i, n in enumerate(self.part.kind.segment.attributes)}
        for node in graph.nodes:
            if node.op == "placeholder":
                desc = node.meta["desc"]
                match desc:
                    case aot.ParamAOTInput(target) | aot.BufferAOTInput(target) if target in names:
                        attribute = str(segment.attributes[names[target]].target)
                        self.env[node] = self.stitcher.inputs[type(desc)(attribute)]
                        self._copy_input_meta(self.env[node], node)
                    case aot.PlainAOTInput(idx=index):
                        self.env[node] = self.stitcher.values[segment.reads[index]]
                        self._copy_input_meta(self.env[node], node)
                    case _:
                        pass  # tangents come later
            elif node.meta.get("partitioner_tag") == "is_backward":
                self.backward_nodes.append(node)
            elif node.op != "output":
                self._copy(node)
        output = graph.output_node()
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            if isinstance(desc, aot.PlainAOTOutput):
                self.outputs[desc] = self.env[value]  # type: ignore[index]
        if self.part is not self.stitcher.parts[-1]:
            for index, node in enumerate(segment.outputs):
                self.stitcher.values[node] = self.outputs[aot.PlainAOTOutput(index)]

    def backward(self, tangents: dict[fx.Node, fx.Node], *, last: bool) -> None:
        """Copy the backward nodes. ``tangents``: the gradients of values that later segments read,
        by node of the exported graph; the gradients of this segment's inputs are added."""
        segment, graph = self.part.segment, self.part.kind.joint.graph
        for node in graph.find_nodes(op="placeholder"):
            desc = node.meta["desc"]
            if isinstance(desc, aot.TangentAOTInput):
                output_node = segment.outputs[desc.output.idx]  # type: ignore[union-attr]
                if not last and output_node not in tangents:
                    raise NotSeparable  # no later segment has a gradient for this value
                self.env[node] = self.stitcher.inputs[desc] if last else tangents[output_node]
                self._copy_input_meta(self.env[node], node)
        for node in self.backward_nodes:
            self._copy(node)
        output = graph.output_node()
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            if value is None or not isinstance(desc, aot.GradAOTOutput):
                continue
            gradient = self.env[value]  # type: ignore[index]
            match desc.grad_of:
                case aot.PlainAOTInput(idx=index):
                    read = segment.reads[index]
                    if read.op == "placeholder":
                        argument_desc = self.stitcher.values[read].meta["desc"]
                        self.stitcher.accumulate(argument_desc, gradient)
                    else:
                        tangents[read] = gradient
                case input_desc:
                    node = next(n for n in self.env if n.meta.get("desc") == input_desc)
                    self.stitcher.accumulate(self.env[node].meta["desc"], gradient)

    def _copy_input_meta(self, copied: fx.Node, node: fx.Node) -> None:
        """Copy the meta of an input from the first segment that reads it."""
        if copied.op == "placeholder" and "val" not in copied.meta:
            copied.meta |= {k: v for k, v in node.meta.items() if k != "desc"}

    def _copy(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            name = f"_constant_{len(self.stitcher.constants)}"
            self.stitcher.constants[name] = self.part.kind.joint.get_buffer(str(node.target))
            new = self.stitcher.graph.get_attr(name)
        else:
            new = self.stitcher.graph.node_copy(node, self.env.__getitem__)
        new.meta = self._meta(node)
        if is_random(new):
            number = self.numbers[RANDOM, new.kwargs["op"]]  # type: ignore[index]
            new.kwargs = {**new.kwargs, "op": number}
        self.env[node] = new

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        """Return the meta of a copied node, with the segment's modules and numbers."""
        meta = {k: node.meta[k] for k in _COPIED_META if k in node.meta}
        sequence = node.meta.get("seq_nr")
        if sequence is not None:
            if sequence not in self.sequence:
                self.sequence[sequence] = next(self.stitcher.sequence)
            meta["seq_nr"] = self.sequence[sequence]
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if node.meta.get(key):
                meta[key] = self._stack(node.meta[key])
        checkpoint = (node.meta.get("custom") or {}).get(CHECKPOINT)
        if checkpoint is not None:
            meta["custom"] = {CHECKPOINT: self.numbers[CHECKPOINT, checkpoint]}
        return meta

    def _stack(self, stack: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Return the module stack of a node with the path of this segment's layer."""
        if id(stack) not in self.stacks:
            old, new = self.part.kind.segment.prefix, self.part.segment.prefix
            self.stacks[id(stack)] = {
                key: (replace_prefix(path, old, new), cls) for key, (path, cls) in stack.items()
            }
        return self.stacks[id(stack)]
