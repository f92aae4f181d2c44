"""Does a function give the same numbers under any placement? Many are tried, in this process.

    dt.testing.assert_same(lambda x, w: (x @ w).relu(), torch.randn(5, 6), torch.randn(6, 7))
    dt.testing.assert_same(MLP(), x, placements={"up.weight": dict(tp=dt.Row()),
                                                 "down.weight": dict(tp=dt.Column())})

The function, or the nn.Module with its parameters and buffers, is run once by plain torch and once
under each placement on each mesh; every result and every gradient is compared. The cotangents are
random, so a gradient that is right for a cotangent of ones alone is found out.

Tolerance: |found - expected| <= atol + rtol * (the largest magnitude in the expected tensor), not
of each element: sums that cancel are as wrong as their summands. The default is by dtype
(`TOLERANCES`): what reordering a sum may cost, not what a wrong rule makes. Integers and bools must
be equal, NaN and infinities in the same places.

Not here: which collectives that takes (`assert_collectives`), whether one op's rule is right for
all operands (`certify`), random ops and modules that change their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtensor.api.model.stating.patterns import listing, names_of, nearest, no_match_error
from dtensor.api.model.stating.stated_placements import Stated
from dtensor.errors import PlanningError
from dtensor.private_torch import pytree
from dtensor.sharding.spec.mesh import Mesh, mesh_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.execute import (
    Evaluation,
    RanksDisagree,
    Traced,
    named_as,
    reference,
    run,
    trace,
)
from dtensor.testing.trials import enumerated

Placements = Mapping[str, Stated]
"""By argument, and for a module by globs over its parameters: axis to placement."""

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 2e-15),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
    torch.complex128: (1e-10, 2e-15),
    torch.complex64: (1e-5, 1e-6),
}
"""dtype to (rtol, atol); atol is about 8 units in the last place of 1."""


@dataclass(frozen=True, slots=True)
class Same:
    """What `assert_same` ran: ``checked`` placements gave the same numbers, ``refused`` ones have
    no plan, each with the first line of the reason."""

    checked: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"the same under {len(self.checked)} placements; {len(self.refused)} refused"]
        return "\n".join([*lines, *(f"  {what}: {why}" for what, why in self.refused)])


def assert_same(
    fn: Callable[..., Any],
    *args: Any,
    placements: Placements | Sequence[Placements] | None = None,
    meshes: Sequence[Mesh] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    count: int = 12,
    seed: int = 0,
) -> Same:
    """Asserts that values and gradients do not depend on placements.

    Args:
        fn: a function of tensors and pytrees of them, or a module.
        args: of a call of it.
        placements: one mapping, or several to try: argument name, or a glob over a module's
            parameters, to axis to placement. What is not named is left to the planner. By default
            ``count`` placements for each mesh are enumerated: each tensor split on each dim,
            evenly or not, in blocks and at units, alone and together with others.
        meshes: by default meshes of 2 and 3 ranks and of 2x2, with the axes that ``placements``
            name.
        gradients: also compare the gradients of all floating-point arguments and parameters.
        rtol, atol: |found - expected| may be ``atol + rtol * (the largest magnitude in the
            expected tensor)``; the default is by dtype, of float32 1e-5 and 1e-6.
        kwargs: of ``fn``.
        seed: of the cotangents and of the enumeration.

    Returns what was run. Raises AssertionError with the mesh, the placement, the first wrong value,
    its worst element, the ranks that hold it, and the plan. A placement that was stated and has no
    plan raises its PlanningError; one that was enumerated is listed as refused, unless all are.
    """
    state, call, name = _as_function(fn, kwargs)
    leaves = pytree.tree_map_only(
        torch.Tensor, lambda t: _leaf(t, gradients), (state, args) if state is not None else args
    )
    full = (leaves[0], *leaves[1]) if state is not None else leaves
    named = None if state is not None else kwargs
    traced = trace(call, full, named, grads=gradients, seed=seed)
    expected = reference(traced)
    prefix = f"{_STATE}." if state is not None else ""
    arguments = {i: of.removeprefix(prefix) for i, of in traced.names.items()}
    stated = _listed(placements)
    checked: list[str] = []
    refused: list[tuple[str, str]] = []
    error: PlanningError | None = None
    for mesh in meshes if meshes is not None else _default_meshes(stated):
        if stated is None:
            metas = {n: traced.leaves[i] for i, n in arguments.items()}
            trials = enumerated(metas, mesh, count, seed)
        else:
            trials = [_resolved(fn, one, mesh, arguments) for one in stated]
        for trial in trials:
            what = f"{mesh}: {_trial_text(trial)}"
            pins = [trial.get(arguments.get(i, ""), {}) for i in range(len(traced.leaves))]
            try:
                evaluation = run(traced, mesh, pins, seed=seed)
            except PlanningError as problem:
                if stated is not None:
                    raise
                error = error or problem
                refused.append((what, str(problem).splitlines()[0]))
                continue
            except RanksDisagree as problem:
                raise AssertionError(f"{_head(name, mesh, trial)}\n  {problem}") from problem
            problem = _compared(evaluation, expected, traced, arguments, (rtol, atol))
            if problem is not None:
                raise AssertionError(f"{_head(name, mesh, trial)}\n{problem}\n\n{evaluation.plan}")
            checked.append(what)
    if error is not None and not checked:
        raise error
    return Same(tuple(checked), tuple(refused))


# -- the function ------------------------------------------------------------------------------


def _as_function(
    fn: Callable[..., Any], kwargs: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor] | None, Callable[..., Any], str]:
    """A module's tensors become a first argument, so that they are placed and differentiated."""
    if not isinstance(fn, nn.Module):
        return None, fn, getattr(fn, "__name__", type(fn).__name__)
    module, rest = fn, dict(kwargs or {})
    state: dict[str, torch.Tensor] = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }

    def call(state: Mapping[str, torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(module, dict(state), args, rest)

    call.__signature__ = named_as(module, _STATE, "others", rest)  # type: ignore[attr-defined]
    call.__name__ = type(module).__name__
    return state, call, type(module).__name__


_STATE = "state"


def _leaf(tensor: torch.Tensor, gradients: bool) -> torch.Tensor:
    wanted = gradients and (tensor.is_floating_point() or tensor.is_complex())
    if isinstance(tensor, nn.Parameter):
        wanted = wanted and tensor.requires_grad
    return tensor.detach().clone().requires_grad_(wanted)


# -- the placements ----------------------------------------------------------------------------


def _listed(placements: Placements | Sequence[Placements] | None) -> list[Placements] | None:
    if placements is None:
        return None
    return [placements] if isinstance(placements, Mapping) else list(placements)


def _default_meshes(stated: Sequence[Placements] | None) -> list[Mesh]:
    axes = dict.fromkeys(
        axis
        for one in stated or ()
        for pins in one.values()
        if isinstance(pins, Mapping)
        for axis in pins
    )
    if stated is None or not axes:
        return [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2)]
    names = list(axes)
    if len(names) == 1:
        sizes = [(2,), (3,)]
    elif len(names) == 2:
        sizes = [(2, 2), (2, 3), (3, 2)]
    else:
        sizes = [(2,) * len(names)]
    return [mesh_of(tuple(zip(names, each, strict=True))) for each in sizes]


def _resolved(
    fn: Callable[..., Any], stated: Placements, mesh: Mesh, arguments: Mapping[int, str]
) -> dict[str, Stated]:
    """Argument to its placements: keys are names, or globs over a module's tensors."""
    placements: dict[str, Stated] = {}
    tensors = names_of(fn) if isinstance(fn, nn.Module) else ()
    known = set(arguments.values())
    for key, pins in stated.items():
        matched = [t.name for t in tensors if t.kind == "parameter" and t.matched_by(key)]
        matched = matched or [t.name for t in tensors if t.matched_by(key)]
        if not matched:
            matched = sorted(n for n in known if n == key or n.startswith(f"{key}."))
        if not matched:
            near = nearest(key, sorted(known))
            if isinstance(fn, nn.Module) and not near:
                raise no_match_error(key, "placements", fn, tensors)
            raise PlanningError(
                f'placements names "{key}", which is no tensor that the program uses.\n'
                f"  tensors: {listing(sorted(known))}\n"
                + (f'fix: write "{near[0]}"' if near else "fix: use the names of its parameters")
            )
        for name in matched:
            placements.setdefault(name, pins)  # the first match wins
    return placements


def _trial_text(trial: Mapping[str, Stated]) -> str:
    parts = [
        f"{name}: {', '.join(f'{axis}={p!r}' for axis, p in pins.items())}"
        for name, pins in trial.items()
        if pins
    ]
    return "; ".join(parts) or "nothing stated"


def _head(name: str, mesh: Mesh, trial: Mapping[str, Stated]) -> str:
    lines = [f"{name} does not give the same numbers under this placement."]
    lines.append(f"  mesh:       {mesh}")
    lines += [
        f"  {'placement:' if i == 0 else '          '}  {_trial_text({n: pins})}"
        for i, (n, pins) in enumerate(trial.items())
    ]
    return "\n".join(lines)


# -- the comparison ----------------------------------------------------------------------------


def _compared(
    actual: Evaluation,
    expected: Evaluation,
    traced: Traced,
    arguments: Mapping[int, str],
    tolerance: tuple[float | None, float | None],
) -> str | None:
    """The first value that differs, in words; results before gradients."""
    specs = {(o.kind, o.of): o.spec for o in actual.plan.outputs}
    pairs: list[tuple[str, Any, torch.Tensor | None, torch.Tensor | None]] = []
    for i, (a, b) in enumerate(zip(actual.tensors, expected.tensors, strict=True)):
        label = "the result" if len(expected.tensors) == 1 else f"result {i}"
        pairs.append((label, specs.get(("result", i)), a, b))
    for i, (a, b) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        spec = specs.get(("gradient", traced.names.get(i, "")))
        pairs.append((f"the gradient of {arguments.get(i, i)}", spec, a, b))
    for label, spec, a, b in pairs:
        if a is None and b is None:
            continue
        if a is None or b is None:
            # torch says "no gradient", which is a zero; the other way round nothing is computed
            zero = b if a is None else a
            assert zero is not None
            if bool((zero == 0).all()):
                continue
            missing = "found" if a is None else "expected"
            return f"  wrong:      {label}: none is {missing}"
        text = difference(a, b, spec, rtol=tolerance[0], atol=tolerance[1])
        if text is not None:
            return f"  wrong:      {label}\n{text}"
    return None


def difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    spec: TensorSpec | None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """What differs, with the element, its ranks and the tolerance; None if nothing does."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"  expected:   {_kind(expected)}\n  found:      {_kind(actual)}"
    if expected.numel() == 0:
        return None
    default = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    relative = default[0] if rtol is None else rtol
    absolute = default[1] if atol is None else atol
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if expected.dtype in TOLERANCES:
        a, b = actual.to(wide), expected.to(wide)
        finite = b.abs()[b.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        allowed = absolute + relative * largest
        # equal covers infinities; a NaN on one side alone makes the distance NaN, which is wrong
        alike = (a == b) | (a.isnan() & b.isnan())
        excess = torch.where(alike, torch.zeros((), dtype=torch.float64), (a - b).abs())
        wrong = ~(excess <= allowed)
        rule = f"allowed is {allowed:.2g} (atol {absolute:.2g} + rtol {relative:.2g} * "
        rule += f"{largest:.4g}, the largest)"
    else:
        wrong = actual != expected
        excess = wrong.double()
        rule = f"{expected.dtype} must be equal"
    if not bool(wrong.any()):
        return None
    ranked = torch.where(wrong, excess.nan_to_num(nan=float("inf")), -1.0)
    worst = int(ranked.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
    number = int(wrong.sum())
    lines = [f"  spec:       {spec} on {spec.mesh}"] if spec is not None else []
    held = f", held by {_ranks(spec, index)}" if spec is not None else ""
    lines += [
        f"  element:    {list(index)}{held}",
        f"  expected:   {expected[index].item()}",
        f"  found:      {actual[index].item()}",
        f"  {number} of {expected.numel()} elements differ; {rule}",
    ]
    return "\n".join(lines)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _ranks(spec: TensorSpec, index: tuple[int, ...]) -> str:
    """The ranks whose shard has the element."""
    ranks: list[int] = []
    for rank in range(spec.mesh.size):
        here = spec.mesh.coordinates(rank)
        inside = all(
            any(lo <= i < hi for lo, hi in spec.intervals(dim, here)) for dim, i in enumerate(index)
        )
        if inside:
            ranks.append(rank)
    if len(ranks) == spec.mesh.size:
        return "all ranks" if len(ranks) > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
