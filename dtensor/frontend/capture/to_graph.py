"""Convert torch's joint graph of forward and backward to a `Graph`.

Torch's descriptors of placeholders and outputs become `Input`s and `Output`s with the user's names,
constants become inputs, and the tangent of a loss becomes the number 1. A check becomes an op on
values, and every use of the checked value reads the result of this op:

    token = with_effects(token, _linalg_check_errors, info, "linalg.inv")
        ->   dt.linalg_checked(inverse, info, "linalg.inv", False)

Invariants: unused parameters and arguments are dropped; a gradient that is None has no `Grad`. Only
parameters and buffers may be mutated, and, in a program without gradients, arguments on the meta
device, which stand for DTensors.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

import dtensor.sharding.ops.attention  # noqa: F401  (registers the op)
from dtensor.frontend.capture.call_as_module import CallAsModule, FlatCall
from dtensor.frontend.capture.decompose import ModuleWithConstants, decompose, lift_constants
from dtensor.frontend.capture.layers import args_key
from dtensor.frontend.capture.names import annotate_nodes, name_nodes, order_phases, user_path
from dtensor.frontend.capture.refusals import buffer_grad_error, check_joint, planning_error
from dtensor.frontend.capture.simplify import order_sums, simplify
from dtensor.frontend.graph import (
    Arg,
    Const,
    Grad,
    Graph,
    Input,
    ModuleBuffer,
    Mutation,
    Output,
    Param,
    Result,
    Tangent,
    named_tensors,
)
from dtensor.frontend.source import Source, source_of_callable, source_of_trace
from dtensor.private_torch import FakeTensorMode, HigherOrderOperator, OpOverload, aot_descriptors

aot = aot_descriptors()

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt


def to_graph(
    root: CallAsModule, joint: ModuleWithConstants, forward: fx.GraphModule, mode: FakeTensorMode
) -> Graph:
    """Return the `Graph` of a joint graph. `forward`: the exported graph, for lines in errors."""
    call, graph = root.call, joint.graph
    _replace_effects(graph)
    check_joint(graph)
    names = _user_names(call)
    _drop_tangents_of_parameters(graph)
    outputs = _outputs(graph, root, names, forward)  # before the inputs: it refuses mutations
    inputs = {
        node: _input(node.meta["desc"], call, names, forward)
        for node in graph.find_nodes(op="placeholder")
    }
    _lift_constants(joint, inputs, mode)
    simplify(graph)
    if decompose(joint, mode):
        _lift_constants(joint, inputs, mode)
        simplify(graph)
    order_sums(graph)
    if root.grads == "loss":
        _fold_tangent(graph, inputs)
    _drop_unused(graph, inputs, outputs)
    annotate_nodes(graph, call.prefixes)
    order_phases(graph)
    ordered = tuple(inputs[node] for node in graph.find_nodes(op="placeholder"))
    name_nodes(graph, ordered, outputs)
    _refresh_vals(graph, mode)
    return Graph(fx=graph, inputs=ordered, outputs=outputs, out_tree=root.notes.out_tree)


# -- effects -------------------------------------------------------------------------------------


def _replace_effects(graph: fx.Graph) -> None:
    """Replace checks of linalg results by ops on values; drop torch's effect tokens."""
    for node in list(graph.nodes):
        is_effect = node.target is torch.ops.higher_order.with_effects
        if is_effect and node.args[1] is aten._linalg_check_errors.default:
            _replace_check(graph, node)
    if not graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        _drop_tokens(graph)


def _replace_check(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one check of linalg results: each result goes through `dt.linalg_checked`."""
    values: Any = node.args
    token, _, info, api_name = values
    assert isinstance(info, fx.Node) and info.target is operator.getitem
    producer: Any = info.args[0]
    parts = [u for u in producer.users if u.target is operator.getitem and u is not info]
    last = [n for n in graph.nodes if n is info or n in parts][-1]
    for part in parts:
        with graph.inserting_after(last):
            checked = graph.call_function(
                dt.linalg_checked.default,
                (part, info, api_name, bool(node.kwargs.get("is_matrix", False))),
            )
        checked.meta.update(part.meta)
        part.replace_all_uses_with(checked, delete_user_cb=lambda u, own=checked: u is not own)
    for user in list(node.users):
        user.replace_all_uses_with(token)
        graph.erase_node(user)
    graph.erase_node(node)


_TOKENS_IN = (aot.ForwardTokenAOTInput, aot.BackwardTokenAOTInput)
_TOKENS_OUT = (aot.ForwardTokenAOTOutput, aot.BackwardTokenAOTOutput)


def _drop_tokens(graph: fx.Graph) -> None:
    """Remove torch's effect tokens from the inputs and outputs."""
    output = graph.output_node()
    values: Any = output.args[0]
    pairs = list(zip(values, output.meta["desc"], strict=True))
    remaining = [(v, d) for v, d in pairs if not isinstance(d, _TOKENS_OUT)]
    output.args = (tuple(v for v, _ in remaining),)
    output.meta["desc"] = [d for _, d in remaining]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _TOKENS_IN) and not node.users:
            graph.erase_node(node)


# -- inputs and outputs ----------------------------------------------------------------------------


def _user_names(call: FlatCall) -> dict[str, str]:
    """Return the user's names of parameters and buffers by their names in the root module. A tied
    parameter always gets its first name."""
    first: dict[int, str] = {}
    return {
        f"{child}.{name}": first.setdefault(id(tensor), user_path(f"{child}.{name}", call.prefixes))
        for child, module in call.modules.items()
        for name, tensor in named_tensors(module).items()
    }


def _input(desc: Any, call: FlatCall, names: Mapping[str, str], forward: fx.GraphModule) -> Input:
    """Return the `Input` for torch's descriptor of a placeholder."""
    match desc:
        case aot.ParamAOTInput(target=target):
            return Param(names[target])
        case aot.BufferAOTInput(target=target):
            return ModuleBuffer(names[target])
        case aot.PlainAOTInput(idx=index):
            return call.args[index]
        case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
            return Tangent(index)
        case aot.TangentAOTInput(output=aot.InputMutationAOTOutput(mutated_input=mutated)):
            name = _input(mutated, call, names, forward).name  # type: ignore[union-attr]
            line = _mutating_line(mutated, forward) or source_of_callable(call.fn)
            raise buffer_grad_error(name, line)
        case _:
            raise AssertionError(f"torch's joint export has an unknown input {desc!r}")


def _outputs(
    graph: fx.Graph, root: CallAsModule, names: Mapping[str, str], forward: fx.GraphModule
) -> tuple[Output, ...]:
    """Return the outputs that have a value, and remove the others from the output node. Raises
    PlanningError if the program mutates an argument."""
    call, node = root.call, graph.output_node()
    kept_values: list[Any] = []
    outputs: list[Output] = []
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):  # type: ignore[arg-type]
        if value is None or desc is None:
            continue
        match desc:
            case aot.PlainAOTOutput(idx=index):
                outputs.append(Result(index))
            case aot.GradAOTOutput(grad_of=differentiated):
                graph_input = _input(differentiated, call, names, forward)
                assert isinstance(graph_input, (Param, ModuleBuffer, Arg))
                outputs.append(Grad(graph_input))
            case aot.InputMutationAOTOutput(
                mutated_input=aot.BufferAOTInput(target=target) | aot.ParamAOTInput(target=target)
            ):
                outputs.append(Mutation(names[target]))
            case aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=index)) if (
                root.grads == "none" and call.leaves[call.args[index].index].is_meta
            ):
                outputs.append(Mutation(call.args[index].name, call.args[index].index))
            case aot.InputMutationAOTOutput(mutated_input=mutated):
                raise _mutation_error(_input(mutated, call, names, forward), mutated, call, forward)
            case _:
                raise AssertionError(f"torch's joint export has an unknown output {desc!r}")
        kept_values.append(value)
    node.args = (tuple(kept_values),)
    return tuple(outputs)


def _drop_tangents_of_parameters(graph: fx.Graph) -> None:
    """Drop the tangents of the new values of parameters that forward changes in place: the new
    value is not differentiated. Torch adds such a tangent to the gradient of the parameter."""
    for node in graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case aot.TangentAOTInput(
                output=aot.InputMutationAOTOutput(mutated_input=aot.ParamAOTInput())
            ):
                pass
            case _:
                continue
        for user in list(node.users):
            gradient: Any = None  # the gradient without the tangent
            if user.op != "output":
                assert user.target is aten.add.Tensor and len(user.args) == 2, user.format_node()
                gradient = user.args[1] if user.args[0] is node else user.args[0]
                user.replace_all_uses_with(gradient)
                graph.erase_node(user)
            else:
                user.replace_input_with(node, gradient)
        graph.erase_node(node)


def _mutation_error(arg: Input, desc: Any, call: FlatCall, forward: fx.GraphModule) -> Exception:
    assert isinstance(arg, Arg)
    return planning_error(
        "The program changes an argument in place; only parameters and buffers may be, and "
        "DTensors that dt.compile is given.",
        arg.name,
        source=_mutating_line(desc, forward) or source_of_callable(call.fn),
        fix="write the out-of-place form (x = x + 1), or register the tensor as a buffer; for "
        f"dt.compile: {arg.name} = dt.distribute({arg.name}, mesh) before the calls",
    )


def _mutating_line(desc: Any, forward: fx.GraphModule) -> Source | None:
    """Return the line of the first in-place op on an input, also inside a no_grad region."""
    if isinstance(desc, aot.PlainAOTInput):
        inputs = [forward.graph.find_nodes(op="placeholder")[desc.idx]]
    else:
        inputs = [n for n in forward.graph.find_nodes(op="get_attr") if n.target == desc.target]
    for node in forward.graph.nodes:
        if not any(i in node.all_input_nodes for i in inputs):
            continue
        target = node.target
        in_place = isinstance(target, OpOverload) and target._schema.is_mutable
        if in_place or isinstance(target, HigherOrderOperator):
            return source_of_trace(node.meta.get("stack_trace") or "")
    return None


def _lift_constants(
    joint: ModuleWithConstants, inputs: dict[fx.Node, Input], mode: FakeTensorMode
) -> None:
    """Turn each tensor attribute of the module into a placeholder and a `Const` input."""
    check_joint(joint.graph)
    for number, (node, value) in enumerate(lift_constants(joint, mode).items()):
        inputs[node] = Const(f"const_{number}", value)


def _fold_tangent(graph: fx.Graph, inputs: dict[fx.Node, Input]) -> None:
    """Replace the cotangent of the loss by the number 1."""
    for node, graph_input in list(inputs.items()):
        if not isinstance(graph_input, Tangent):
            continue
        val = node.meta["val"]
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            cotangent = graph.call_function(
                torch.ops.aten.full.default,
                ([], 1.0),
                {"dtype": val.dtype, "device": torch.device("cpu")},
            )
        cotangent.meta.update(val=val, partitioner_tag="is_backward")
        node.replace_all_uses_with(cotangent)
        del inputs[node]
        graph.erase_node(node)


def _drop_unused(
    graph: fx.Graph, inputs: dict[fx.Node, Input], outputs: tuple[Output, ...]
) -> None:
    """Drop inputs that no node, gradient or mutation needs."""
    differentiated = [o.of for o in outputs if isinstance(o, Grad)]  # a gradient may be constant
    used = [x for node, x in inputs.items() if node.users]  # a tied input has several nodes
    written = {(o.name, o.index) for o in outputs if isinstance(o, Mutation)}
    for node, graph_input in list(inputs.items()):
        needed = graph_input in differentiated and graph_input not in used
        if isinstance(graph_input, (Param, ModuleBuffer, Arg)):  # written, though perhaps not read
            index = graph_input.index if isinstance(graph_input, Arg) else None
            needed |= (graph_input.name, index) in written and graph_input not in used
        if not node.users and not isinstance(graph_input, Tangent) and not needed:
            del inputs[node]
            graph.erase_node(node)


def _refresh_vals(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Run the final graph on fake tensors to update each node's meta "val": rewrites may have
    changed strides, but not shapes or dtypes. A product of two dtypes keeps its val; the planner
    refuses it (planner.py)."""

    def val(node: fx.Node) -> Any:
        return node.meta["val"]

    layouts: dict[fx.Node, Hashable] = {}
    results: dict[Hashable, Any] = {}  # by call: repeated layers run once
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                call = (node.target, args_key(node.args, layouts), args_key(node.kwargs, layouts))
                if call not in results:
                    out = node.target(*fx.map_arg(node.args, val), **fx.map_arg(node.kwargs, val))
                    results[call] = tuple(out) if isinstance(out, (tuple, list)) else out
                out = results[call]
                pairs = list(zip(_tensors(node.meta["val"]), _tensors(out), strict=True))
                operands = {x.dtype for n in node.all_input_nodes for x in _tensors(val(n))}
                if len(operands) > 1 and any(a.dtype != b.dtype for a, b in pairs):
                    out = node.meta["val"]
                    pairs = []
                for a, b in pairs:
                    assert a.shape == b.shape, f"{node.format_node()}: {a}, {b}"
                    assert a.dtype == b.dtype, f"{node.format_node()}: {a}, {b}"
                node.meta["val"] = out
            if node.op != "output":
                layouts[node] = layout_of(node.meta["val"])


def layout_of(val: Any) -> Hashable:
    """Return all properties of a fake tensor (or tuple of them) on which an op may depend."""
    match val:
        case torch.Tensor():
            return (val.shape, val.stride(), val.dtype, val.is_conj(), val.is_neg())
        case tuple() | list():
            return tuple(map(layout_of, val))
        case _:
            return val


def _tensors(val: Any) -> list[torch.Tensor]:
    values = val if isinstance(val, (tuple, list)) else [val]
    return [v for v in values if isinstance(v, torch.Tensor)]
