"""``recompute=``: the modules whose activations are computed again, checked.

    globs = recompute_of(["blocks.*"], model)       # ("blocks.*",)
    recomputed_modules(globs, model, flow)          # frozenset({"blocks.0", "blocks.0.attn", ...})

A glob means a module when it matches any of its names. Of nested modules that match, the outermost
that is called is one region; a container that is never called (nn.ModuleList) is none.

Not here: what recomputation means (sharding/plan/passes/recompute.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtensor.api.model.stating.patterns import is_patterns, listing, matches, names_of, no_match
from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Dataflow


def recompute_of(recompute: Sequence[str], module: nn.Module) -> tuple[str, ...]:
    """The globs. PlanningError for what is no list of globs, and for a glob without a match."""
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
    names = _modules(module)
    for glob in recompute:
        if not any(matches(glob, name, names) for name in names):
            raise no_match(glob, "recompute", module, names_of(module), kind="module")
    return tuple(recompute)


def recomputed_modules(globs: Sequence[str], module: nn.Module, flow: Dataflow) -> frozenset[str]:
    """Every name of the modules that the globs match.

    PlanningError for a glob of which the program calls no module: nothing would run again. It may
    match none, in a module that was changed since.
    """
    modules: set[str] = set()
    called = {c.partition("@")[0] for op in flow.ops if op.phase == "forward" for c in op.calls}
    names = _modules(module)
    for glob in globs:
        same = {id(m) for name, m in names.items() if matches(glob, name, names)}
        mine = {name for name, m in names.items() if id(m) in same}
        if mine and not mine & called:
            raise _not_called(glob, sorted(mine), called)
        modules |= mine
    return frozenset(modules)


def _modules(module: nn.Module) -> dict[str, nn.Module]:
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
