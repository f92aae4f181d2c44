"""What `parallelize` states besides placements and stages, checked: ``zero=`` and ``recompute=``.

    zero_of({"dp": 3}, mesh, None)                  # ("dp", 3)
    zero_of({"dp": 3}, Mesh(dp=1), None)            # None: one rank has nothing to split over
    globs = recompute_of(["blocks.*"], model)       # ("blocks.*",)
    recomputed_modules(globs, model, flow)          # frozenset({"blocks.0", "blocks.0.attn", ...})

A glob means a module when it matches any of its names. Of nested modules that match, the outermost
that is called is one region; a container that is never called (nn.ModuleList) is none.
What the two mean stands in sharding/plan/passes (gather_stored.py, recompute.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dtensor.api.stating.patterns import is_patterns, listing, matches, names_of, no_match
from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.spec.mesh import Mesh


def zero_of(
    zero: Mapping[str, int] | None, mesh: Mesh, stage_axis: str | None
) -> tuple[str, int] | None:
    """The axis and the level. PlanningError for what is neither."""
    if zero is not None and not isinstance(zero, Mapping):
        raise PlanningError(f'zero={zero!r} is not a mapping; fix: zero={{"dp": 3}}')
    if not zero:
        return None
    if len(zero) > 1:
        raise PlanningError(
            f"zero={dict(zero)} names {len(zero)} axes, and state is stored split over one.\n"
            f"fix: zero={dict([next(iter(zero.items()))])}"
        )
    axis, level = next(iter(zero.items()))
    size = mesh.axis_size(axis)
    if type(level) is not int or level not in (0, 1, 2, 3):
        raise PlanningError(
            f"zero={dict(zero)}: the level is 1 (optimizer state), 2 (gradients too) or "
            f"3 (parameters too), not {level!r}; fix: zero={{{axis!r}: 1}}"
        )
    if axis == stage_axis:
        others = [a for a, n in mesh.shape.items() if a != axis and n > 1]
        fix = f"zero={{{others[0]!r}: {level}}}" if others else "leave zero= out"
        raise PlanningError(
            f"zero={dict(zero)}: the axis {axis!r} holds the pipeline's stages, whose parameters "
            f"differ; fix: {fix}"
        )
    return (axis, level) if level and size > 1 else None


def recompute_of(recompute: Sequence[str] | None, module: nn.Module) -> tuple[str, ...]:
    """The globs. PlanningError for what is no list of globs, and for a glob without a match."""
    if recompute is None:
        return ()
    if isinstance(recompute, str):
        raise PlanningError(
            f"recompute={recompute!r} is one text where it should be a list of patterns.\n"
            f"fix: recompute=[{recompute!r}]"
        )
    if not is_patterns(recompute):
        example = next((name for name, _ in module.named_children()), "blocks.*")
        raise PlanningError(
            f"recompute={recompute!r} is not a list of patterns over names of modules.\n"
            f"fix: recompute=[{example!r}]"
        )
    names = _names(module)
    for glob in recompute:
        if not any(matches(glob, name) for name in names):
            raise no_match(glob, "recompute", module, names_of(module), kind="module")
    return tuple(recompute)


def recomputed_modules(globs: Sequence[str], module: nn.Module, flow: Dataflow) -> frozenset[str]:
    """Every name of the modules that the globs match.

    PlanningError for a glob of which the program calls no module: nothing would run again.
    """
    found: set[str] = set()
    called = {c.partition("@")[0] for op in flow.ops if op.phase == "forward" for c in op.calls}
    names = _names(module)
    for glob in globs:
        same = {id(m) for name, m in names.items() if matches(glob, name)}
        mine = {name for name, m in names.items() if id(m) in same}
        if not mine & called:
            raise _not_called(glob, sorted(mine), called)
        found |= mine
    return frozenset(found)


def _names(module: nn.Module) -> dict[str, nn.Module]:
    """Full names, a shared module under each of its own; without the root, which has none."""
    return {n: m for n, m in module.named_modules(remove_duplicate=False) if n}


def _not_called(glob: str, mine: Sequence[str], called: set[str]) -> PlanningError:
    inside = sorted(c for c in called if any(c.startswith(f"{name}.") for name in mine))
    inside = [c for c in inside if not any(c.startswith(f"{outer}.") for outer in inside)]
    lines = [
        f'the pattern "{glob}" of recompute matches no module that the program calls.',
        f"  it matches: {listing(mine)}",
    ]
    if inside:
        count = sum(matches(f"{glob}.*", name) for name in inside)
        lines.append(f"  called inside: {listing(inside)}")
        lines.append(f'fix: "{glob}.*" matches {count} of these {len(inside)}')
    else:
        lines.append(f"  called: {listing(sorted(called))}")
        lines.append("fix: name modules whose forward the program runs, or remove the pattern")
    return PlanningError("\n".join(lines))
