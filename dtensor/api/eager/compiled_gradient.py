"""The gradient of a compiled function: a second program, captured at the first call with operands
that require a gradient, and planned at the first backward.

    f = compile(lambda x: x.square().sum(), mesh)
    (f(x) + x.sum()).backward()              # x.grad == 2 * x + 1

The program takes the call's arguments and the gradients of the results, and returns the gradients
of the operands. It computes the forward again, so only the operands are saved; as in torch, they
must not change in between. A gradient is placed like its operand, but replicated where the operand
is a pending sum. Gradients of a module's parameters need `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dtensor.api.eager.errors import with_line
from dtensor.api.eager.op_program import without_pending
from dtensor.api.eager.tensor import DTensor
from dtensor.api.step.bound_call import BoundCall
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import (
    Arg,
    Grad,
    Graph,
    ModuleBuffer,
    Mutation,
    OutTree,
    Param,
    Result,
    Tangent,
)
from dtensor.frontend.guards.guards import Guards
from dtensor.private_torch import pytree
from dtensor.sharding.ops.call import is_random
from dtensor.sharding.spec.placements import Placement

_FIX = "call it on x.detach(), or train with dt.train_step"


def differentiable_operands(call: BoundCall) -> tuple[int, ...]:
    """Return the tensor leaves of a call that require a gradient; none if autograd is off."""
    if not torch.is_grad_enabled():
        return ()
    leaves = enumerate(call.leaves)
    return tuple(i for i, x in leaves if isinstance(x, torch.Tensor) and x.requires_grad)


def check_differentiable(graph: Graph, name: str) -> None:
    """Raise PlanningError if the backward cannot compute the forward again."""
    for op in dataflow(graph).ops:
        if is_random(op.call):
            raise PlanningError(
                f"{name} draws random numbers and is called with operands that require a gradient: "
                f"its backward would draw others.\n  {op.source}: {op.source_text}\n  fix: {_FIX}"
            )
    reads = [x.name for x in graph.inputs if isinstance(x, (Param, ModuleBuffer))]
    changed = [x.name for x in graph.outputs if isinstance(x, Mutation)]
    if reads or changed:
        problem = f"changes {changed[0]}" if changed else f"reads {reads[0]}, a tensor of a module,"
        raise PlanningError(
            f"{name} {problem} and is called with operands that require a gradient, which is not "
            f"supported.\n  fix: {_FIX}"
        )


def gradient_graph(graph: Graph, operands: Sequence[int], num_leaves: int) -> Graph:
    """Return the graph that computes the gradients of those leaves ``operands`` that have one. Its
    arguments are the leaves of the call, then the gradients of the call's results."""
    position_of_leaf = {index: position for position, index in enumerate(operands)}
    gradient_nodes: dict[int, fx.Node] = {}
    backward, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    backward.graph_copy(graph.fx, copies)
    for node, output in zip(graph.output_nodes, graph.outputs, strict=True):
        if isinstance(output, Grad) and isinstance(output.of, Arg):
            gradient_nodes[position_of_leaf[output.of.index]] = copies[node]
    backward.output(tuple(gradient_nodes[position] for position in sorted(gradient_nodes)))
    backward.eliminate_dead_code()
    for node in backward.nodes:
        node.meta["phase"] = "forward"  # the new program has no backward
    spec = pytree.tree_flatten([0] * len(gradient_nodes))[1]
    return replace(
        graph,
        fx=backward,
        inputs=tuple(
            Arg(num_leaves + x.output, f"gradient_{x.output}") if isinstance(x, Tangent) else x
            for x in graph.inputs
        ),
        outputs=tuple(Result(i) for i in range(len(gradient_nodes))),
        out_tree=OutTree(spec, (None,) * len(gradient_nodes), (True,) * len(gradient_nodes)),
    )


def results_by_leaf(graph: Graph) -> dict[int, frozenset[int]]:
    """Return, for each leaf that has a gradient, the results whose gradients it depends on."""
    reached: dict[fx.Node, frozenset[int]] = {}
    for node, x in zip(graph.placeholders, graph.inputs, strict=True):
        reached[node] = frozenset([x.output] if isinstance(x, Tangent) else [])
    for node in graph.nodes:
        reached[node] = frozenset().union(*(reached[operand] for operand in node.all_input_nodes))
    return {
        x.of.index: reached[node]
        for node, x in zip(graph.output_nodes, graph.outputs, strict=True)
        if isinstance(x, Grad) and isinstance(x.of, Arg)
    }


class Derivative:
    """The backward of one captured call. ``grad_results``: the results that have a
    gradient. ``results_by_operand``: the operands that receive a gradient, each with the results
    that it depends on. ``compiled``: the `CompiledFunction` that computes the gradients."""

    def __init__(
        self,
        graph: Graph,
        call: BoundCall,
        operands: tuple[int, ...],
        compile_function: Callable[[Callable[..., Any], list[dict[str, Placement]]], Any],
        name: str,
    ) -> None:
        """Make the backward of ``graph``, a capture with gradients, with ``compile_function(fn,
        out)``. Captures and plans nothing."""
        assert graph.reads is not None
        self.reads: Guards = graph.reads
        self.name = name
        self.grad_results: tuple[int, ...] = tuple(
            sorted(x.output for x in graph.inputs if isinstance(x, Tangent))
        )
        if not self.grad_results:
            return
        check_differentiable(graph, name)
        needed = results_by_leaf(graph)
        self.results_by_operand = {
            position: needed[i] for position, i in enumerate(operands) if i in needed
        }
        self.compiled = compile_function(
            _gradient,
            [_placements(call.leaves[operands[position]]) for position in self.results_by_operand],
        )
        self.compiled.graph = gradient_graph(graph, operands, len(call.leaves))

    def numbers(self) -> list[int]:
        """Return how often each tensor that the function closes over has changed."""
        self.reads.refresh()
        return [caught.number for caught in self.reads.caught]

    def __call__(self, call: BoundCall, gradients: Sequence[Any], num_results: int) -> list[Any]:
        remaining = iter(gradients)
        tangents = [next(remaining) if i in self.grad_results else 0 for i in range(num_results)]
        args = pytree.tree_unflatten(call.leaves, call.tree)
        return self.compiled(args, tangents)


def _gradient(call: Any, gradients: Any) -> Any:
    raise AssertionError("a gradient's graph is not captured")


def _placements(operand: torch.Tensor) -> dict[str, Placement]:
    return without_pending(operand.spec) if isinstance(operand, DTensor) else {}


class Differentiated(torch.autograd.Function):
    """Calls a compiled function on operands that require a gradient, and returns its tensors."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: BoundCall,
        run: Callable[[], list[Any]],
        derivative: Derivative,
        operands: tuple[int, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the results of ``run``. Save the tensors of the call for the backward."""
        results = [x.detach() for x in run()]
        ctx.call, ctx.derivative, ctx.operands = call, derivative, operands
        ctx.numbers = derivative.numbers()
        ctx.metas = [(x.shape, x.dtype) for x in results]
        ctx.set_materialize_grads(False)
        ctx.tensor_leaves = [i for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*(call.leaves[i] for i in ctx.tensor_leaves))
        without_gradient = [x for i, x in enumerate(results) if i not in derivative.grad_results]
        ctx.mark_non_differentiable(*without_gradient)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the operands' gradients: None for an operand that no used result depends on, a
        plain tensor for a plain operand. Raises if a saved tensor has changed."""
        derivative: Derivative = ctx.derivative
        if torch.is_grad_enabled():
            raise with_line(
                PlanningError(
                    f"The gradient of the compiled function {derivative.name} is not "
                    f"differentiable, and create_graph=True asks for its graph.\n"
                    f"fix: call {derivative.name} without dt.compile, or leave create_graph away"
                )
            )
        leaves = list(ctx.call.leaves)
        for index, tensor in zip(ctx.tensor_leaves, ctx.saved_tensors, strict=True):
            leaves[index] = tensor.detach()  # raises if it has changed since
        if derivative.numbers() != ctx.numbers:
            raise RuntimeError(
                "a tensor that a compiled function closes over has changed between the call and "
                "its backward.\n  fix: pass it as an argument"
            )
        unused = {i for i, g in enumerate(gradients) if g is None}
        result: list[Any] = [None] * len(ctx.operands)
        if unused.issuperset(derivative.grad_results):
            return (None, None, None, None, *result)
        cotangents = [
            torch.zeros(ctx.metas[i][0], dtype=ctx.metas[i][1]) if i in unused else gradients[i]
            for i in derivative.grad_results
        ]
        grads = derivative(replace(ctx.call, leaves=tuple(leaves)), cotangents, len(ctx.metas))
        for (position, needed), gradient in zip(
            derivative.results_by_operand.items(), grads, strict=True
        ):
            if needed and needed <= unused:
                continue  # as torch: None for an operand that no used result depends on
            is_plain = not isinstance(leaves[ctx.operands[position]], DTensor)
            result[position] = gradient.full_tensor() if is_plain else gradient
        return (None, None, None, None, *result)
