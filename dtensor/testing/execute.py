"""Any function under placements: captured once, then planned, lowered and run in this process.

    traced = trace(torch.mm, (x, w))                      # x: (8, 6), w: (6, 4), requiring grad
    expected = reference(traced)                          # plain torch
    found = run(traced, Mesh(tp=2), [dict(tp=Shard(1)), dict(tp=Shard(0))])
    found.results, found.gradients, found.plan            # global values; gradients by tensor leaf

Capture does not depend on placements, so many of them cost one `trace`. The placements are one dict
for each tensor leaf of ``(args, kwargs)``, in the order of the pytree; an axis that is not named is
left to the planner. A pending input, `Partial("sum")`, is fed as random summands, not as "one rank
has it all". Cotangents are random unless given, so a gradient that is right for ones alone is found
out.

Invariants: the same seed gives the same numbers; results may stay split on the ranks, and what the
ranks hold of one element must be the same number on all of them (`RanksDisagree`).

Not here: comparing (`torch.testing.assert_close`), parameters of modules (pass them as arguments,
see `torch.func.functional_call`), microbatches and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtensor.api.stating.checks import check_fit, check_stated
from dtensor.daft import launch_cluster
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Const, Grad, Graph, Tangent
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank import Roles
from dtensor.sharding.ops.random import is_random
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan, PlannedOutput
from dtensor.sharding.plan.planner import Request, plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement
from dtensor.sharding.spec.shards import assemble, shard_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.oracle import cut

Stated = Mapping[str, Placement]
Tensors = tuple[torch.Tensor | None, ...]


class RanksDisagree(AssertionError):
    """Ranks that should hold the same number hold different ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A captured call. ``leaves``: its tensors; ``cotangents``: one per tensor of its results."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[torch.Tensor, ...]
    graph: Graph
    flow: Dataflow
    cotangents: Tensors
    grads: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """``results``: as fn returns them, of global tensors; ``gradients``: by tensor leaf, None
    where there is none; ``plan``: None for plain torch."""

    results: Any
    gradients: Tensors
    plan: Plan | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the results, in order."""
        return tensors_of(self.results)


def evaluate(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    mesh: Mesh,
    placements: Sequence[Stated],
    *,
    grads: bool = True,
    cotangents: Sequence[torch.Tensor] | None = None,
    seed: int = 0,
) -> Evaluation:
    """`trace` and `run` in one: for one placement."""
    traced = trace(fn, args, kwargs, grads=grads, cotangents=cotangents, seed=seed)
    return run(traced, mesh, placements, seed=seed)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    grads: bool = True,
    cotangents: Sequence[torch.Tensor] | None = None,
    seed: int = 0,
) -> Traced:
    """Capture ``fn(*args, **kwargs)``.

    Args:
        grads: also the gradients of the tensor leaves that require grad.
        cotangents: one per tensor that fn returns, of its shape and dtype; random by default.

    Raises PlanningError where the call cannot be captured, or draws random numbers.
    """
    named = dict(kwargs or {})
    leaves = tensors_of((args, named))
    wanted = grads and any(leaf.requires_grad for leaf in leaves)
    graph = capture(fn, args, named, grads="tangents" if wanted else "none")
    flow = dataflow(graph)
    _check_repeats(flow)
    results = {o.of: flow.metas[o.value] for o in flow.outputs if o.kind == "result"}
    metas = [results[index] for index in sorted(results, key=int)]
    if cotangents is not None and len(cotangents) != len(metas):
        raise PlanningError(
            f"there is one cotangent per tensor of the results: fn returns {len(metas)} tensors, "
            f"{len(cotangents)} cotangents were given.\n"
            f"fix: pass {len(metas)}, in the order of the results"
        )
    generator = torch.Generator().manual_seed(seed)
    return Traced(
        fn=fn,
        args=args,
        kwargs=named,
        leaves=leaves,
        graph=graph,
        flow=flow,
        cotangents=tuple(cotangents)
        if cotangents is not None
        else tuple(_random(meta.shape, meta.dtype, generator) for meta in metas),
        grads=wanted,
    )


def _check_repeats(flow: Dataflow) -> None:
    """Plain torch is what results are compared with, and it draws other random numbers."""
    for op in flow.ops:
        if is_random(op.call):
            raise PlanningError(
                f"the function has no counter-based form in plain torch, which it is compared "
                f"with: {op.call.name} draws other random numbers.\n"
                f"  {op.source}: {op.source_text}\n"
                f"fix: compare it with dropout at p=0, or model.eval()"
            )


def reference(traced: Traced) -> Evaluation:
    """The same call by plain torch on one device, gradients by its autograd."""
    leaves, tree = pytree.tree_flatten((traced.args, dict(traced.kwargs)))
    copies: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            copy = leaf.detach().clone().requires_grad_(leaf.requires_grad and traced.grads)
            copies.append(copy)
            leaves[index] = copy
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    results = traced.fn(*args, **kwargs)
    pairs = [
        (result, cotangent)
        for result, cotangent in zip(tensors_of(results), traced.cotangents, strict=True)
        if result.requires_grad and cotangent is not None
    ]
    gradients: dict[int, torch.Tensor | None] = {}
    asked = [i for i, copy in enumerate(copies) if copy.requires_grad]
    if pairs and asked:
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [copies[i] for i in asked],
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        gradients = dict(zip(asked, found, strict=True))
    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results)
    return Evaluation(
        results=detached, gradients=tuple(gradients.get(i) for i in range(len(copies)))
    )


def planned(
    traced: Traced,
    mesh: Mesh,
    placements: Sequence[Stated] = (),
    *,
    results: Mapping[int, Stated] | None = None,
    topology: Topology | None = None,
) -> Plan:
    """The plan under these placements of the tensor leaves; nothing is run.

    ``results``: number of a tensor of the results -> placements; a result on which nothing is
    stated may stay split as it comes out, but not pending.
    """
    stated = list(placements) or [{}] * len(traced.leaves)
    if len(stated) != len(traced.leaves):
        raise PlanningError(
            f"there is one dict of placements per tensor of the arguments: {len(traced.leaves)} "
            f"tensors, {len(stated)} dicts were given.\n"
            f"fix: pass {len(traced.leaves)}, an empty dict for a tensor that the planner may place"
        )
    pins: dict[str, Stated] = {}
    pinned_by: dict[str, str] = {}
    numbers = _leaf_numbers(traced)
    for item, entry in zip(traced.flow.inputs, traced.graph.inputs, strict=True):
        if not isinstance(entry, Arg):
            continue
        pin = stated[numbers[entry.index]]
        # pending inputs are what a computed value may be, so unlike a user's argument they pass
        split = {axis: p for axis, p in pin.items() if not isinstance(p, Partial)}
        check_stated(split, entry.name, mesh)
        check_fit(entry.name, item.meta, split, "placements", mesh)
        if pin:
            pins[item.name] = pin
            pinned_by[item.name] = entry.name
    name = traced.fn.__name__ if hasattr(traced.fn, "__name__") else type(traced.fn).__name__
    return plan(
        Request(
            name=name if name.isidentifier() else "function",
            flow=traced.flow,
            mesh=mesh,
            pins=pins,
            pinned_by=pinned_by,
            results=results or {},
            split_results=True,
            topology=topology or Topology(),
        )
    )


def run(
    traced: Traced,
    mesh: Mesh,
    placements: Sequence[Stated] = (),
    *,
    results: Mapping[int, Stated] | None = None,
    topology: Topology | None = None,
    seed: int = 0,
) -> Evaluation:
    """Plan under these placements, run on an in-process cluster, bring the global values back."""
    made = planned(traced, mesh, placements, results=results, topology=topology)
    numbers = _leaf_numbers(traced)
    generator = torch.Generator().manual_seed(seed)
    fed: dict[str, list[torch.Tensor]] = {}
    constants: dict[str, torch.Tensor] = {}
    for item, entry in zip(made.inputs, traced.graph.inputs, strict=True):
        match entry:
            case Arg(index):
                leaf = traced.leaves[numbers[index]].detach()
                fed[item.name] = _cut(leaf, item.spec, generator)
            case Tangent(output):
                cotangent = traced.cotangents[output]
                assert cotangent is not None
                fed[item.name] = _cut(cotangent, item.spec, generator)
            case Const(_, value):
                constants[item.name] = value
            case _:
                raise PlanningError(
                    f"the function reads {entry.name}, a parameter or buffer of a module.\n"
                    f"fix: pass it as an argument, by torch.func.functional_call"
                )
    state = {name: f"constant {name}" for name in constants}
    lowered = lower(made, None, roles=Roles(gradients=True, state=state))
    with launch_cluster(mesh.size) as cluster:
        cluster.put([{state[n]: value for n, value in constants.items()}] * mesh.size)
        handle = cluster.load(lowered.program)
        inputs = [
            {name: fed[name][rank] for name in lowered.inputs[rank]} for rank in range(mesh.size)
        ]
        held = cluster.run(handle, inputs).get()
    values = {(o.kind, o.of): _whole(o, held) for o in made.outputs}
    tensors = [values["result", i] for i in range(len(traced.cotangents))]
    gradients: list[torch.Tensor | None] = [None] * len(traced.leaves)
    for output in traced.graph.outputs:
        if isinstance(output, Grad) and isinstance(output.of, Arg):
            gradients[numbers[output.of.index]] = values["gradient", output.of.name]
    return Evaluation(
        results=traced.graph.unflatten(tensors), gradients=tuple(gradients), plan=made
    )


# -- values ------------------------------------------------------------------------------------


def _cut(x: torch.Tensor, spec: TensorSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """The shards in rank order. Where one axis is pending, the parts sum up to ``x`` exactly: a
    function that jumps at a value of ``x`` (a sign, a hash) must see that value, not one near."""
    pending = [axis for axis, p in spec.sharding.items() if p == Partial("sum")]
    if len(pending) != 1 or not (x.is_floating_point() or x.is_complex()):
        return cut(x, spec, generator)
    axis, mesh = pending[0], spec.mesh
    kept = spec.with_placements(**{axis: REPLICATE})
    parts = _exact_parts(x, mesh.axis_size(axis), generator)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    return [shard_of(parts[here[axis]], kept, here) for here in places]


def _exact_parts(x: torch.Tensor, num: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors whose left fold is ``x`` to the last bit."""
    if num == 2:  # 2x - x or -x + 2x, element by element
        twice = torch.rand(x.shape, generator=generator) < 0.5
        twice &= torch.isfinite(x)
        first = torch.where(twice, x + x, torch.where(torch.isfinite(x), -x, x))
        return [first, torch.where(twice, -x, torch.where(torch.isfinite(x), x + x, x))]
    noise = [_eighths(x, generator) for _ in range(num - 2)]
    return [*noise, -sum(noise[1:], noise[0]), x]


def _eighths(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random multiples of 1/8, whose sums are exact."""
    values = torch.randint(-24, 25, x.shape, generator=generator)
    return (values / 8).to(x.dtype)


def _whole(output: PlannedOutput, held: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """An output's global value; every rank's piece is compared with it."""
    spec = output.spec
    name = f"{output.kind} {output.of}"
    shards = [values[name] for values in held]
    for rank, shard in enumerate(shards):
        shape = spec.local_shape(spec.mesh.coordinates(rank))
        if tuple(shard.shape) != shape or shard.dtype != spec.dtype:
            raise RanksDisagree(
                f"{name} is planned as {spec}: rank {rank} should hold {list(shape)} of "
                f"{spec.dtype}, it holds {list(shard.shape)} of {shard.dtype}"
            )
    whole = assemble(shards, spec)
    if any(isinstance(p, Partial) for p in spec.placements):
        return whole
    for rank, shard in enumerate(shards):
        expected = shard_of(whole, spec, spec.mesh.coordinates(rank))
        if not torch.allclose(shard, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise RanksDisagree(
                f"{name} is planned as {spec}: rank {rank} holds other numbers than the ranks "
                f"that hold the same elements"
            )
    return whole


def replicated(traced: Traced, mesh: Mesh) -> list[Stated]:
    """Placements that pin every leaf whole on every rank: a start to change entries of."""
    return [dict.fromkeys(mesh.axes, REPLICATE) for _ in traced.leaves]


def _leaf_numbers(traced: Traced) -> dict[int, int]:
    """Index among all leaves -> number among the tensor leaves."""
    leaves = pytree.tree_leaves((traced.args, dict(traced.kwargs)))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return {index: number for number, index in enumerate(tensors)}


def tensors_of(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensor leaves of a pytree, in order."""
    return tuple(x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor | None:
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    return torch.randn(shape, dtype=dtype, generator=generator)
