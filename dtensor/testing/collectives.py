"""`dt.testing.assert_collectives`: checks the collectives of a module in its plan; nothing runs.

    def test_megatron_mlp():
        mesh = dt.Mesh(tp=2)
        dt.testing.assert_collectives(
            MLP(), mesh, {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
            dt.spec("f32[8,16]", mesh, requires_grad=True),
            forward={"all_reduce@tp": 1}, backward={"all_reduce@tp": 1},
        )

Positional arguments are specs, which state a placement on every axis, or other values. Results may
stay sharded but not pending. Gradients have the placements of their parameters and inputs.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from dtensor.api.model.parallel import parallelize
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.api.model.stating.stated_placements import InputPins, Stated, check_fit, check_stated
from dtensor.api.step.bound_call import BoundCall, Grads
from dtensor.api.step.plan_call import plan_call
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Arg, Graph, meta_of
from dtensor.private_torch import pytree
from dtensor.sharding.plan.cost.seconds import PlannedCollective
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing.execute import forward_signature

Counts = Mapping[str, int]


def assert_collectives(
    module_or_fn: Callable[..., Any],
    mesh: Mesh,
    placements: Mapping[str, Stated],
    *specs: Any,
    forward: Counts | None = None,
    backward: Counts | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Plan:
    """Assert the number of collectives of each kind and axis that a module or function needs.

    Args:
        module_or_fn: the module or function; it is planned, not run.
        mesh: the mesh, with the axes that ``placements`` names.
        placements: placements by globs over the parameters of a module, or by the argument names
            of a function.
        specs: the positional arguments; a spec with ``requires_grad`` gets a gradient.
        forward, backward: the expected numbers, as ``{"all_reduce@tp": 1}``. Other collectives must
            not occur. None: do not check. Reductions of the gradients of parameters are backward.
        loss: a function from the output to the scalar to differentiate. Without it, the cotangents
            of the results are inputs of the plan, if a gradient is needed.

    Returns the plan. Raises AssertionError with the plan, or PlanningError if there is no plan.
    """
    planned = plan_of(
        module_or_fn,
        mesh,
        placements,
        *specs,
        grads="loss" if loss is not None else "tangents" if backward is not None else None,
        loss=loss,
    )
    problems: list[str] = []
    for phase, expected in (("forward", forward), ("backward", backward)):
        if expected is not None:
            problems += _differences(phase, expected, counts(planned, phase))
    if problems:
        lines = [f"{planned.name} does not communicate as expected.", *problems]
        lines += ["collectives:", *(_text(c) for c in planned.collectives)]
        if not planned.collectives:
            lines.append("  none")
        raise AssertionError("\n".join([*lines, "", str(planned)]))
    return planned


def plan_of(
    module_or_fn: Callable[..., Any],
    mesh: Mesh,
    placements: Mapping[str, Stated],
    *specs: Any,
    grads: Grads | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Plan:
    """Return the plan that `assert_collectives` checks.

    Args:
        module_or_fn, mesh, placements, specs, loss: the arguments of `assert_collectives`.
        grads: "loss": plan the gradients of a loss; "tangents": plan the gradients for given
            cotangents of the results; "none". By default "loss" with a loss, "tangents" if a spec
            requires grad, else "none".

    Raises PlanningError if there is no plan.
    """
    leaves, tree = pytree.tree_flatten(specs)
    for spec in leaves:
        if isinstance(spec, TensorSpec) and spec.mesh != mesh:
            raise PlanningError(
                f"an argument is stated on another mesh.\n"
                f"  {spec}: {spec.mesh}\n"
                f"  the plan is for {mesh}\n"
                f"fix: state it as dt.spec({str(spec)!r}, mesh) of this mesh"
            )
    if grads is None:
        needs_grad = any(isinstance(s, TensorSpec) and s.requires_grad for s in leaves)
        grads = "loss" if loss is not None else "tangents" if needs_grad else "none"
    module = module_or_fn if isinstance(module_or_fn, nn.Module) else None
    fn = module_or_fn if module is None else parallelize(module, mesh, placements)
    args: tuple[Any, ...] = specs
    if loss is not None:
        args = specs if module is None else (fn, *specs)
        fn = _with_loss(module_or_fn, loss)
    leaves, tree = pytree.tree_flatten((args, {}))
    call = BoundCall(fn, tuple(leaves), tree)
    graph = call.graph(grads)
    pins = _spec_pins(graph, leaves)
    if module is None:
        pins = _add_stated_pins(pins, placements, graph, mesh)
    options = Options(inputs=InputPins(pins=pins, batch=()), split_results=True)
    return plan_call(call, mesh, grads, options, _name_of(module_or_fn), graph).plan


def counts(planned: Plan, phase: str) -> dict[str, int]:
    """Return the number of collectives of each ``kind@axis`` in a phase. Collectives of the
    optimizer are in the phase "backward"."""
    counted: Counter[str] = Counter()
    for collective in planned.collectives:
        if _phase(collective) == phase:
            counted[collective.key] += 1
    return dict(sorted(counted.items()))


# -- text of the error ---------------------------------------------------------------------------


def _phase(collective: PlannedCollective) -> str:
    return "forward" if collective.phase == "forward" else "backward"


def _differences(phase: str, expected: Counts, actual: Counts) -> list[str]:
    return [
        f"  {phase} {key}: expected {expected.get(key, 0)}, found {actual.get(key, 0)}"
        for key in sorted({*expected, *actual})
        if expected.get(key, 0) != actual.get(key, 0)
    ]


def _text(collective: PlannedCollective) -> str:
    source = f"  {collective.source}" if collective.source else ""
    return (
        f"  {_phase(collective):<8}  {collective.key}  {collective.name}  "
        f"{collective.bytes_sent} bytes sent{source}"
    )


def _name_of(module_or_fn: Callable[..., Any]) -> str:
    if isinstance(module_or_fn, nn.Module) or not inspect.isroutine(module_or_fn):
        return type(module_or_fn).__name__
    return module_or_fn.__name__


# -- the arguments -----------------------------------------------------------------------------


def _spec_pins(graph: Graph, leaves: Sequence[Any]) -> dict[str, Stated]:
    """Return the placements of the spec of each argument that the program uses, by its name."""
    return {
        entry.name: _stated_placements(leaves[entry.index])
        for entry in graph.inputs
        if isinstance(entry, Arg) and isinstance(leaves[entry.index], TensorSpec)
    }


def _stated_placements(spec: TensorSpec) -> Stated:
    """Return the placements of the spec by axis, in an order that states this spec: of two axes
    that shard one dim, the major axis first. Raises PlanningError if there is no such order."""
    for order in itertools.permutations(spec.mesh.axes):
        stated = {axis: spec.placement(axis) for axis in order}
        if make_spec(spec.shape, spec.dtype, spec.mesh, stated) == spec:
            return stated
    raise PlanningError(
        f"{spec} splits one dim in two ways at once, which cannot be pinned.\n"
        f"fix: let one axis split the pieces of the other, as in 8@(tp,dp)"
    )


def _add_stated_pins(
    pins: Mapping[str, Stated], placements: Mapping[str, Stated], graph: Graph, mesh: Mesh
) -> dict[str, Stated]:
    """Return the pins of a function's arguments with the placements that are stated by name.
    Raises PlanningError for an unknown name or a placement that contradicts a spec."""
    result = dict(pins)
    metas = {
        entry.name: node.meta["val"]
        for entry, node in zip(graph.inputs, graph.placeholders, strict=True)
        if isinstance(entry, Arg)
    }
    for name, stated in placements.items():
        check_stated(stated, f'"{name}"', mesh)
        if name not in pins:
            near = nearest(name, pins)
            raise PlanningError(
                f'placements names "{name}", which is no tensor argument of the function.\n'
                f"  tensor arguments: {listing(list(pins))}\n"
                + (f'fix: write "{near[0]}"' if near else "fix: use the names of its parameters")
            )
        check_fit(name, meta_of(metas[name]), stated, "placements", mesh)
        for axis, placement in stated.items():
            of_spec = pins[name][axis]
            if isinstance(of_spec, Shard) and of_spec != placement:
                raise PlanningError(
                    f"{name} is placed twice on the axis {axis}.\n"
                    f"  placements: {axis}={placement!r}\n"
                    f"  its spec:   {axis}={of_spec!r}\n"
                    f"fix: state it once"
                )
        other_axes = {axis: p for axis, p in pins[name].items() if axis not in stated}
        result[name] = {**stated, **other_axes}
    return result


def _with_loss(module_or_fn: Callable[..., Any], loss: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that computes ``loss(fn(*args))``. For a module its arguments are
    ``(model, *args)`` and it computes ``loss(model(*args))``."""

    def with_loss(*args: Any) -> Any:
        if isinstance(module_or_fn, nn.Module):
            model, *inputs = args
            return loss(model(*inputs))
        return loss(module_or_fn(*args))

    if isinstance(module_or_fn, nn.Module):
        signature = forward_signature(module_or_fn, "model", "arg")
    else:
        signature = inspect.signature(module_or_fn)
    with_loss.__signature__ = signature  # type: ignore[attr-defined]
    return with_loss
