"""Check ``recompute=``, and resolve it to modules (sharding/plan/passes/recompute.py uses them).

    globs = checked_recompute(["blocks.*"], model)  # ("blocks.*",)
    recomputed_modules(globs, model, flow)          # frozenset({"blocks.0", "blocks.0.attn", ...})

A glob matches a module if it matches any of its names. If nested modules match, the outermost
called module is recomputed as one region. A container that is never called (nn.ModuleList) is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtensor.api.model.stating.patterns import (
    is_patterns,
    listing,
    matches,
    names_of,
    no_match_error,
)
from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Dataflow


def checked_recompute(recompute: Sequence[str], module: nn.Module) -> tuple[str, ...]:
    """Return the globs. Raises PlanningError for a value that is not a list of globs, and for a
    glob that matches no module."""
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
            raise no_match_error(glob, "recompute", module, names_of(module), kind="module")
    return tuple(recompute)


def recomputed_modules(globs: Sequence[str], module: nn.Module, flow: Dataflow) -> frozenset[str]:
    """Return all names of the modules that the globs match.

    Raises PlanningError for a glob that matches only modules that the program does not call. A glob
    may match no module, because the model may have changed since the globs were checked.
    """
    modules: set[str] = set()
    called = {c.partition("@")[0] for op in flow.ops if op.phase == "forward" for c in op.calls}
    names = _modules(module)
    for glob in globs:
        ids = {id(m) for name, m in names.items() if matches(glob, name, names)}
        matched = {name for name, m in names.items() if id(m) in ids}
        if matched and not matched & called:
            raise _not_called_error(glob, sorted(matched), called)
        modules |= matched
    return frozenset(modules)


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return all submodules by full name. A shared module is there under each of its names."""
    return {n: m for n, m in module.named_modules(remove_duplicate=False) if n}


def _not_called_error(glob: str, matched: Sequence[str], called: set[str]) -> PlanningError:
    """Return the error for a glob whose modules are not called, with called modules inside them."""
    inside = sorted(c for c in called if any(c.startswith(f"{name}.") for name in matched))
    inside = [c for c in inside if not any(c.startswith(f"{outer}.") for outer in inside)]
    lines = [
        f'the pattern "{glob}" of recompute matches no module that the program calls.',
        f"  it matches: {listing(matched)}",
    ]
    if inside:
        count = sum(matches(f"{glob}.*", name) for name in inside)
        lines.append(f"  called inside: {listing(inside)}")
        lines.append(f'fix: "{glob}.*" matches {count} of these {len(inside)}')
    else:
        lines.append(f"  called: {listing(sorted(called))}")
        lines.append("fix: name modules whose forward the program runs, or remove the pattern")
    return PlanningError("\n".join(lines))
