"""The joint graph of forward and backward, of which repeated layers are differentiated once.

    joint = differentiate(forward, tensors, mode)
    joint.graph         # placeholders and output with meta "desc", as torch's joint export gives

Torch's joint export runs every op of the program through autograd, about a millisecond each, and a
model of 32 layers is 32 times the same. Where the exported graph is a chain of segments, alike up
to the names of their parameters (layers.py), each kind is exported by itself, with the tangents
of what it makes as inputs, and the graphs are put together (stitch.py). The result is that of the
whole export, node by node; where that is not certain the whole is exported:

- a value that requires grad is read by two segments, or two of them leave one segment: autograd
  would add their gradients in the order in which it comes by;
- a segment changes in place what others see.

The joint export is private to torch; it is called in this file alone, and the tests hold it for
each supported version. Not here: what the nodes mean (to_graph.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as aot
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor.frontend.capture.decompose import GraphAndConstants
from dtensor.frontend.capture.layers import Segment, attribute_of, segments_of
from dtensor.frontend.capture.stitch import Kind, NotAlone, Part, stitch


def differentiate(
    forward: fx.GraphModule, tensors: Sequence[torch.Tensor], mode: FakeTensorMode
) -> GraphAndConstants | fx.GraphModule:
    """``forward``: the exported graph, of fake parameters; ``tensors``: its fake arguments."""
    segments = segments_of(forward)
    if segments:
        try:
            return stitch(forward, _parts(forward, segments, tensors, mode))
        except NotAlone:
            pass
    return _export(forward, tensors)


def _export(module: nn.Module, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, tuple(tensors)).graph_module


def _parts(
    forward: fx.GraphModule,
    segments: Sequence[Segment],
    tensors: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> list[Part]:
    """Each segment with its kind, which is exported where it comes first.

    Raises NotAlone.
    """
    values = dict(zip(forward.graph.find_nodes(op="placeholder"), tensors, strict=True))
    readers = Counter(node for segment in segments for node in segment.reads)
    kinds: dict[Hashable, Kind] = {}
    parts: list[Part] = []
    for segment in segments:
        reads = [values[node] for node in segment.reads]
        held = [attribute_of(forward, node) for node in segment.attributes]
        key = (segment.program, *map(_layout, reads), *map(_layout, held))
        if key not in kinds:
            kinds[key] = _kind(forward, segment, reads, mode)
        kind = kinds[key]
        parts.append(Part(segment=segment, kind=kind))
        if segment is not segments[-1]:
            wanted = [node for node, (_, w) in zip(segment.makes, kind.made, strict=True) if w]
            if len(wanted) > 1 or any(readers[node] > 1 for node in wanted):
                raise NotAlone
            for node, (like, wants) in zip(segment.makes, kind.made, strict=True):
                if like.is_conj() or like.is_neg():
                    raise NotAlone  # a bit of the tensor that a made one would not have
                values[node] = _fake(like, wants, mode)
    return parts


def _layout(value: Any) -> Hashable:
    """What an export depends on of a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad


def _fake(like: torch.Tensor, requires_grad: bool, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    return made.requires_grad_(requires_grad)


def _kind(
    forward: fx.GraphModule,
    segment: Segment,
    reads: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> Kind:
    joint = _export(_module(forward, segment), reads)
    outputs: Any = joint.graph.output_node().args[0]
    made: dict[int, torch.Tensor] = {}
    for node, desc in zip(outputs, joint.graph.output_node().meta["desc"], strict=True):
        match desc:
            case aot.PlainAOTOutput(idx=index):
                made[index] = node.args[0].meta["val"]  # of what was cloned, see _module
            case aot.GradAOTOutput() | None:
                pass
            case _:
                raise NotAlone  # it changes one of its inputs
    wanted = {
        node.meta["desc"].output.idx
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], aot.TangentAOTInput)
    }
    if len(made) != len(segment.makes):
        raise NotAlone
    return Kind(
        segment=segment,
        joint=joint,
        made=tuple((made[i], i in wanted) for i in range(len(segment.makes))),
    )


def _module(forward: fx.GraphModule, segment: Segment) -> fx.GraphModule:
    """The segment as a program. What it makes is cloned: an output that is a view of an input, or
    of another output, would have no tangent. The clones are erased later (simplify.py)."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in segment.reads}
    for node in (*segment.attributes, *segment.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs: list[fx.Node] = []
    for node in segment.makes:
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise NotAlone
        outputs.append(graph.call_function(torch.ops.aten.clone.default, (env[node],)))
        outputs[-1].meta.update(node.meta)
    graph.output(tuple(outputs))
    module = fx.GraphModule(forward, graph)
    named = {name for name, _ in forward.named_parameters(remove_duplicate=False)}
    named |= {name for name, _ in forward.named_buffers(remove_duplicate=False)}
    for node in segment.attributes:  # fx makes buffers of constants
        name = str(node.target)
        value = attribute_of(forward, node)
        if isinstance(value, torch.Tensor) and name not in named:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            del owner._buffers[leaf]
            setattr(owner, leaf, value)
    return module
