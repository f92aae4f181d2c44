"""Captures a function once, and plans and runs it in this process under any placements.

    traced = trace(torch.mm, (x, w))                      # x: (8, 6), w: (6, 4), requiring grad
    expected = reference(traced)                          # plain torch
    found = run(traced, Mesh(tp=2), [dict(tp=Shard(1)), dict(tp=Shard(0))])
    found.results, found.gradients, found.plan            # global values; gradients by tensor leaf

The placements are one dict for each tensor leaf of ``(args, kwargs)``, in pytree order; the planner
chooses the placement on other axes. A `Partial("sum")` input is cut into random summands, and
cotangents are random, so that a rule that is right for special values only is found. The same seed
gives the same numbers. `same.py` compares results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtensor.api.model.statements import Options
from dtensor.api.model.stating.stated_placements import InputPins, Stated, check_fit, check_stated
from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.loaded_program import load
from dtensor.api.step.plan_call import Planned, plan_call
from dtensor.api.store.session import Launch
from dtensor.daft import launch_cluster
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Const, Grad, Graph, Tangent, meta_of
from dtensor.private_torch import pytree
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.sharding.ops.call import Meta, is_random
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlannedOutput
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.shards import assemble, shard_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.oracle import cut

Tensors = tuple[torch.Tensor | None, ...]


class RanksDisagree(AssertionError):
    """Raised if ranks have different values of the same element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A captured call.

    ``leaves``: the tensor leaves of its arguments; ``numbers``: for the index of a tensor among all
    leaves, its index in ``leaves``; ``cotangents``: one for each tensor of the results, None for an
    integer tensor; ``grads``: whether gradients are captured.
    """

    call: BoundCall
    graph: Graph
    leaves: tuple[torch.Tensor, ...]
    numbers: Mapping[int, int]
    cotangents: Tensors
    grads: bool

    @property
    def names(self) -> dict[int, str]:
        """The argument name of each tensor leaf that the program uses, by its index in
        ``leaves``."""
        inputs = [entry for entry in self.graph.inputs if isinstance(entry, Arg)]
        return {self.numbers[entry.index]: entry.name for entry in inputs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The results of a run. ``results``: the function's results with global tensors; ``gradients``:
    one for each tensor leaf, or None; ``planned``: the plan that ran, None for plain torch."""

    results: Any
    gradients: Tensors
    planned: Planned | None = None

    @property
    def plan(self) -> Plan:
        assert self.planned is not None, "plain torch has no plan"
        return self.planned.plan

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the results, in order."""
        return tensors_of(self.results)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    grads: bool = True,
    seed: int = 0,
) -> Traced:
    """Capture ``fn(*args, **kwargs)``, and with ``grads`` the gradients of tensors that require
    grad.

    Raises PlanningError if the call cannot be captured or draws random numbers.
    """
    leaves, tree = pytree.tree_flatten((args, dict(kwargs or {})))
    call = BoundCall(fn, tuple(leaves), tree)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    has_gradient = grads and any(leaves[i].requires_grad for i in indices)
    graph = call.graph("tangents" if has_gradient else "none")
    flow = dataflow(graph)
    _check_not_random(flow)
    results = {int(o.of): flow.metas[o.value] for o in flow.outputs if o.kind == "result"}
    generator = torch.Generator().manual_seed(seed)
    return Traced(
        call=call,
        graph=graph,
        leaves=tuple(leaves[i] for i in indices),
        numbers={index: number for number, index in enumerate(indices)},
        cotangents=tuple(_random(results[i], generator) for i in sorted(results)),
        grads=has_gradient,
    )


def _check_not_random(flow: Dataflow) -> None:
    """Raise PlanningError if an op draws random numbers, because plain torch, with which results
    are compared, draws others."""
    for op in flow.ops:
        if is_random(op.call):
            raise PlanningError(
                f"the function has no counter-based form in plain torch, which it is compared "
                f"with: {op.call.name} draws other random numbers.\n"
                f"  {op.source}: {op.source_text}\n"
                f"fix: compare it with dropout at p=0, or model.eval()"
            )


def reference(traced: Traced) -> Evaluation:
    """Run the call in plain torch on one device, with gradients by autograd."""
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad and traced.grads)
        for leaf in traced.leaves
    ]
    leaves = list(traced.call.leaves)
    for index, number in traced.numbers.items():
        leaves[index] = copies[number]
    args, kwargs = pytree.tree_unflatten(leaves, traced.call.tree)
    results = traced.call.fn(*args, **kwargs)
    pairs = [
        (result, cotangent)
        for result, cotangent in zip(tensors_of(results), traced.cotangents, strict=True)
        if result.requires_grad and cotangent is not None
    ]
    gradients: dict[int, torch.Tensor | None] = {}
    with_gradient = [i for i, copy in enumerate(copies) if copy.requires_grad]
    if pairs and with_gradient:
        values = torch.autograd.grad(
            [result for result, _ in pairs],
            [copies[i] for i in with_gradient],
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        gradients = dict(zip(with_gradient, values, strict=True))
    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results)
    return Evaluation(
        results=detached, gradients=tuple(gradients.get(i) for i in range(len(copies)))
    )


def planned(
    traced: Traced,
    mesh: Mesh,
    placements: Sequence[Stated] = (),
    *,
    topology: Topology | None = None,
) -> Planned:
    """Return the plan under these placements of the tensor leaves, without running it.

    It is the plan of `dt.compile`, except that arguments may be pending and results may stay
    sharded (but not pending).
    """
    stated = list(placements) or [{}] * len(traced.leaves)
    if len(stated) != len(traced.leaves):
        raise PlanningError(
            f"there is one dict of placements per tensor of the arguments: {len(traced.leaves)} "
            f"tensors, {len(stated)} dicts were given.\n"
            f"fix: pass {len(traced.leaves)}, an empty dict for a tensor that the planner may place"
        )
    pins = {name: stated[number] for number, name in traced.names.items()}
    for number, name in traced.names.items():
        # Users may not state Partial for an argument. Tests may: a computed value can be pending.
        checked = {axis: p for axis, p in pins[name].items() if not isinstance(p, Partial)}
        check_stated(checked, name, mesh)
        check_fit(name, meta_of(traced.leaves[number]), checked, "placements", mesh)
    options = Options(
        inputs=InputPins(pins=pins, batch=()),
        split_results=True,
        topology=topology,
    )
    fn = traced.call.fn
    name = fn.__name__ if hasattr(fn, "__name__") else type(fn).__name__
    name = name if name.isidentifier() else "function"
    return plan_call(traced.call, mesh, "tangents", options, name, traced.graph)


def run(
    traced: Traced,
    mesh: Mesh,
    placements: Sequence[Stated] = (),
    *,
    topology: Topology | None = None,
    seed: int = 0,
) -> Evaluation:
    """Plan the call under these placements, run it on an in-process cluster, and return the global
    values."""
    planned_call = planned(traced, mesh, placements, topology=topology)
    generator = torch.Generator().manual_seed(seed)
    shards: dict[str, list[torch.Tensor]] = {}  # by name of an input, in rank order
    for item, entry in zip(planned_call.plan.inputs, traced.graph.inputs, strict=True):
        match entry:
            case Arg(index):
                leaf = traced.leaves[traced.numbers[index]].detach()
                shards[item.name] = _cut_exactly(leaf, item.spec, generator)
            case Tangent(output):
                cotangent = traced.cotangents[output]
                assert cotangent is not None
                shards[item.name] = _cut_exactly(cotangent, item.spec, generator)
            case Const():
                pass  # `load` sends constants with the program
            case _:
                raise PlanningError(
                    f"the function reads {entry.name}, a parameter or buffer of a module.\n"
                    f"fix: pass it as an argument, by torch.func.functional_call"
                )
    with launch_cluster(mesh.size) as cluster:
        session = Launch(cluster, "compiled").add(mesh)
        program = load(session, planned_call, Roles(gradients=True), owner=session)
        inputs = [
            {name: shards[name][rank] for name in rank_program.inputs}
            for rank, rank_program in enumerate(program.program.ranks)
        ]
        outputs = session.run(program.handle, inputs, {}).get()
    values = {(o.kind, o.of): _global_value(o, outputs) for o in planned_call.plan.outputs}
    tensors = [values["result", i] for i in range(len(traced.cotangents))]
    gradients: list[torch.Tensor | None] = [None] * len(traced.leaves)
    for output in traced.graph.outputs:
        if isinstance(output, Grad) and isinstance(output.of, Arg):
            gradients[traced.numbers[output.of.index]] = values["gradient", output.of.name]
    return Evaluation(
        results=traced.graph.unflatten(tensors), gradients=tuple(gradients), planned=planned_call
    )


# -- values ------------------------------------------------------------------------------------


def _cut_exactly(
    x: torch.Tensor, spec: TensorSpec, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return the shards in rank order. If one axis is pending, the summands add up to exactly
    ``x``, because a function may jump at a value of ``x`` (a sign, a hash)."""
    pending = [axis for axis, p in spec.sharding.items() if p == Partial("sum")]
    if len(pending) != 1 or not (x.is_floating_point() or x.is_complex()):
        return cut(x, spec, generator)
    axis, mesh = pending[0], spec.mesh
    reduced = spec.with_placements(**{axis: REPLICATE})
    parts = _exact_parts(x, mesh.axis_size(axis), generator)
    all_coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
    return [
        shard_of(parts[coordinates[axis]], reduced, coordinates) for coordinates in all_coordinates
    ]


def _exact_parts(x: torch.Tensor, num: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random tensors whose sum, from left to right, is ``x`` to the last bit."""
    if num == 2:  # 2x - x or -x + 2x, element by element
        is_finite = torch.isfinite(x)
        twice_first = (torch.rand(x.shape, generator=generator) < 0.5) & is_finite
        first = torch.where(twice_first, x + x, torch.where(is_finite, -x, x))
        return [first, torch.where(twice_first, -x, torch.where(is_finite, x + x, x))]
    noise = [_eighths(x, generator) for _ in range(num - 2)]
    return [*noise, -sum(noise[1:], noise[0]), x]


def _eighths(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random multiples of 1/8 in the shape of ``x``. Their sums are exact."""
    values = torch.randint(-24, 25, x.shape, generator=generator)
    return (values / 8).to(x.dtype)


def _global_value(
    output: PlannedOutput, rank_outputs: Sequence[Mapping[str, torch.Tensor]]
) -> torch.Tensor:
    """Return the global value of an output. Raises RanksDisagree if the shard of a rank has another
    shape, dtype or value."""
    spec = output.spec
    name = f"{output.kind} {output.of}"
    shards = [outputs[name] for outputs in rank_outputs]
    for rank, shard in enumerate(shards):
        shape = spec.local_shape(spec.mesh.coordinates(rank))
        if tuple(shard.shape) != shape or shard.dtype != spec.dtype:
            raise RanksDisagree(
                f"{name} is planned as {spec}: rank {rank} should hold {list(shape)} of "
                f"{spec.dtype}, it holds {list(shard.shape)} of {shard.dtype}"
            )
    value = assemble(shards, spec)
    if any(isinstance(p, Partial) for p in spec.placements):
        return value
    for rank, shard in enumerate(shards):
        expected = shard_of(value, spec, spec.mesh.coordinates(rank))
        if not torch.allclose(shard, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise RanksDisagree(
                f"{name} is planned as {spec}: rank {rank} holds other numbers than the ranks "
                f"that hold the same elements"
            )
    return value


def forward_signature(
    module: nn.Module, first: str, others: str, without: Container[str] = ()
) -> inspect.Signature:
    """Return the signature ``(first, *arguments of forward, *others)``, without the arguments
    ``without``. Capture names the tensors of a plan after the signature of a function."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = [
        p.replace(kind=p.POSITIONAL_ONLY, default=p.empty)
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in positional and p.name != first and p.name not in without
    ]
    head = inspect.Parameter(first, inspect.Parameter.POSITIONAL_ONLY)
    tail = inspect.Parameter(others, inspect.Parameter.VAR_POSITIONAL)
    return inspect.Signature([head, *arguments, tail])


def tensors_of(tree: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensor leaves of a pytree, in order."""
    return tuple(x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))


def _random(meta: Meta, generator: torch.Generator) -> torch.Tensor | None:
    """Return a random tensor of this shape and dtype; None for integers and bools."""
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        return None
    return torch.randn(meta.shape, dtype=meta.dtype, generator=generator)
