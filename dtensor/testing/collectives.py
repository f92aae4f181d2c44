"""Unit tests of what a module communicates: no process, no numbers, only its plan.

    def test_megatron_mlp():
        mesh = dt.Mesh(tp=2)
        dt.testing.assert_collectives(
            MLP(), mesh, {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
            dt.spec("f32[8,16]", mesh, requires_grad=True),
            forward={"all_reduce@tp": 1}, backward={"all_reduce@tp": 1},
        )

The positional arguments of the module or function are given as specs, which pin them on every
axis; anything else is passed on as it is. Results may stay split as they come out, but not pending;
the gradients of parameters and inputs end where those are. Only shapes and dtypes count.

Not here: whether the plan computes the right numbers (oracle.py), what it costs in seconds.
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
from dtensor.testing.execute import named_as

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
    """Asserts how many collectives of each kind and axis a module or function needs.

    Args:
        module_or_fn: is planned, not run.
        mesh: has the axes that are named.
        placements: by globs over a module's parameters; by argument for a function.
        specs: the positional arguments; ``requires_grad`` asks for an input's gradient.
        forward, backward: ``{"all_reduce@tp": 1}``; what is not named must not occur. None: not
            checked. The reductions of parameters' gradients are backward.
        loss: applied to the output, it gives the scalar to differentiate. Without it the
            cotangent of each result is an input; it is left out where no gradient is asked for.

    Returns the plan. Raises AssertionError with the plan, PlanningError where there is none.
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
    """The plan that `assert_collectives` checks.

    Args:
        module_or_fn, mesh, placements, specs, loss: as of `assert_collectives`.
        grads: "loss": of the parameters, of a loss; "tangents": for given cotangents; "none". By
            default "loss" with a loss, "tangents" where a spec requires grad, else "none".

    Raises PlanningError where there is no plan.
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
        wanted = any(isinstance(s, TensorSpec) and s.requires_grad for s in leaves)
        grads = "loss" if loss is not None else "tangents" if wanted else "none"
    module = module_or_fn if isinstance(module_or_fn, nn.Module) else None
    fn = module_or_fn if module is None else parallelize(module, mesh, placements)
    given: tuple[Any, ...] = specs
    if loss is not None:
        given = specs if module is None else (fn, *specs)
        fn = _with_loss(module_or_fn, loss)
    leaves, tree = pytree.tree_flatten((given, {}))
    call = BoundCall(fn, tuple(leaves), tree)
    graph = call.graph(grads)
    pins = _spec_pins(graph, leaves)
    if module is None:
        pins = _with_stated(pins, placements, graph, mesh)
    options = Options(inputs=InputPins(pins=pins, batch=()), split_results=True)
    return plan_call(call, mesh, grads, options, _name_of(module_or_fn), graph).plan


def counts(planned: Plan, phase: str) -> dict[str, int]:
    """How many times each ``kind@axis`` runs in a phase; the optimizer's are backward."""
    counted: Counter[str] = Counter()
    for collective in planned.collectives:
        if _phase(collective) == phase:
            counted[collective.key] += 1
    return dict(sorted(counted.items()))


# -- what was found ----------------------------------------------------------------------------


def _phase(collective: PlannedCollective) -> str:
    return "forward" if collective.phase == "forward" else "backward"


def _differences(phase: str, expected: Counts, actual: Counts) -> list[str]:
    return [
        f"  {phase} {key}: expected {expected.get(key, 0)}, found {actual.get(key, 0)}"
        for key in sorted({*expected, *actual})
        if expected.get(key, 0) != actual.get(key, 0)
    ]


def _text(collective: PlannedCollective) -> str:
    where = f"  {collective.source}" if collective.source else ""
    return (
        f"  {_phase(collective):<8}  {collective.key}  {collective.name}  "
        f"{collective.bytes_sent} bytes sent{where}"
    )


def _name_of(module_or_fn: Callable[..., Any]) -> str:
    if isinstance(module_or_fn, nn.Module) or not inspect.isroutine(module_or_fn):
        return type(module_or_fn).__name__
    return module_or_fn.__name__


# -- the arguments -----------------------------------------------------------------------------


def _spec_pins(graph: Graph, leaves: Sequence[Any]) -> dict[str, Stated]:
    """Argument name to what its spec states, for the arguments that the program uses."""
    return {
        entry.name: _in_order(leaves[entry.index])
        for entry in graph.inputs
        if isinstance(entry, Arg) and isinstance(leaves[entry.index], TensorSpec)
    }


def _in_order(spec: TensorSpec) -> Stated:
    """The placements with the axes in an order, major first, in which they state this spec."""
    for order in itertools.permutations(spec.mesh.axes):
        stated = {axis: spec.placement(axis) for axis in order}
        if make_spec(spec.shape, spec.dtype, spec.mesh, stated) == spec:
            return stated
    raise PlanningError(
        f"{spec} splits one dim in two ways at once, which cannot be pinned.\n"
        f"fix: let one axis split the pieces of the other, as in 8@(tp,dp)"
    )


def _with_stated(
    pins: Mapping[str, Stated], placements: Mapping[str, Stated], graph: Graph, mesh: Mesh
) -> dict[str, Stated]:
    """The pins of a function's arguments, those that were stated by name added."""
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
            before = pins[name][axis]
            if isinstance(before, Shard) and before != placement:
                raise PlanningError(
                    f"{name} is placed twice on the axis {axis}.\n"
                    f"  placements: {axis}={placement!r}\n"
                    f"  its spec:   {axis}={before!r}\n"
                    f"fix: state it once"
                )
        rest = {axis: p for axis, p in pins[name].items() if axis not in stated}
        result[name] = {**stated, **rest}
    return result


def _with_loss(module_or_fn: Callable[..., Any], loss: Callable[[Any], Any]) -> Callable[..., Any]:
    """``loss(fn(*args))``; of a module ``loss(model(*args))``, a function of (model, *args)."""

    def with_loss(*args: Any) -> Any:
        if isinstance(module_or_fn, nn.Module):
            model, *given = args
            return loss(model(*given))
        return loss(module_or_fn(*args))

    if isinstance(module_or_fn, nn.Module):
        signature = named_as(module_or_fn, "model", "arg")
    else:
        signature = inspect.signature(module_or_fn)
    with_loss.__signature__ = signature  # type: ignore[attr-defined]
    return with_loss
