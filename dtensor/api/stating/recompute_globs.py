"""What `recompute=` states: globs over names of modules, checked.

    globs = recompute_of(["blocks.*"], model)       # ("blocks.*",)
    recomputed_modules(globs, model, flow)          # frozenset({"blocks.0", "blocks.0.attn", ...})

A glob means a module when it matches any of its names. Of nested modules that match, the outermost
that is called is one region; a container that is never called (nn.ModuleList) is none.
What a region saves and runs again stands in sharding/plan/passes/recompute.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtensor.api.stating.patterns import listing, matches, nearest
from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Dataflow


def recompute_of(recompute: Sequence[str] | None, module: nn.Module) -> tuple[str, ...]:
    """The globs. PlanningError for what is no list of globs, and for a glob without a match."""
    if recompute is None:
        return ()
    if isinstance(recompute, str):
        raise PlanningError(
            f"recompute={recompute!r} is one text where it should be a list of patterns.\n"
            f"fix: recompute=[{recompute!r}]"
        )
    if not isinstance(recompute, Sequence) or not all(isinstance(g, str) for g in recompute):
        example = next((name for name, _ in module.named_children()), "blocks.*")
        raise PlanningError(
            f"recompute={recompute!r} is not a list of patterns over names of modules.\n"
            f"fix: recompute=[{example!r}]"
        )
    names = _names(module)
    for glob in recompute:
        if not any(matches(glob, name) for name in names):
            raise _no_match(glob, module, list(names))
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


def _no_match(glob: str, module: nn.Module, names: Sequence[str]) -> PlanningError:
    lines = [f'the pattern "{glob}" of recompute matches no module.']
    parameters = [n for n, _ in module.named_parameters() if matches(glob, n)]
    if parameters:
        lines.append(f"  it matches the names of parameters: {listing(parameters)}")
    near = nearest(glob, names)
    lines.append(f"  nearest names: {', '.join(near)}" if near else f"  modules: {listing(names)}")
    trials = [glob.rpartition(".")[0], f"{glob}.*", f"*.{glob}", f"*{glob}*"]
    words = sorted({word for name in names for word in name.split(".")})
    parts = glob.split(".")
    for at, part in enumerate(parts):
        trials += [".".join([*parts[:at], w, *parts[at + 1 :]]) for w in nearest(part, words)]
    tried = next((t for t in trials if t and any(matches(t, name) for name in names)), None)
    if tried is None:
        lines.append("fix: name a module as in model.named_modules(), or remove the pattern")
    else:
        count = sum(matches(tried, name) for name in names)
        lines.append(f'fix: "{tried}" matches {count} of {len(names)} modules')
    return PlanningError("\n".join(lines))


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
