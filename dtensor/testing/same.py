"""`dt.testing.assert_same`: checks that placements do not change the results of a function.

    dt.testing.assert_same(lambda x, w: (x @ w).relu(), torch.randn(5, 6), torch.randn(6, 7))
    dt.testing.assert_same(MLP(), x, placements={"up.weight": dict(tp=dt.Row()),
                                                 "down.weight": dict(tp=dt.Column())})

The function or module runs once in plain torch and once in this process under each placement on
each mesh. All results and gradients are compared. Random ops and modules that change their buffers
are not supported. An element may differ by atol + rtol * (the largest magnitude of the tensor); see
`TOLERANCES`. Integers and bools must be equal, and NaN and infinities in the same places.
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
    forward_signature,
    reference,
    run,
    trace,
)
from dtensor.testing.trials import enumerate_placements

Placements = Mapping[str, Stated]
"""The placement on each axis, by argument name or by a glob over the parameters of a module."""

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 2e-15),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
    torch.complex128: (1e-10, 2e-15),
    torch.complex64: (1e-5, 1e-6),
}
"""(rtol, atol) of each dtype: the effect of another order of a sum. rtol is relative to the largest
magnitude of a tensor, because sums that cancel have the errors of their summands."""


@dataclass(frozen=True, slots=True)
class Same:
    """The result of `assert_same`. ``checked``: the placements that gave the same numbers;
    ``refused``: the placements that have no plan, each with the first line of the error."""

    checked: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"the same under {len(self.checked)} placements; {len(self.refused)} refused"]
        return "\n".join([*lines, *(f"  {title}: {reason}" for title, reason in self.refused)])


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
    """Assert that values and gradients do not depend on placements.

    Args:
        fn: a function of tensors and pytrees of tensors, or a module.
        args, kwargs: the arguments of a call of ``fn``.
        placements: one mapping, or several mappings to try: the placement on each axis, by argument
            name or by a glob over the parameters of a module. The planner places other tensors. By
            default ``count`` placements are made for each mesh: each tensor sharded on each dim,
            evenly or not, in blocks and at units, alone and together with others.
        meshes: by default meshes of 2, 3 and 2x2 ranks, with the axes that ``placements`` name.
        gradients: also compare the gradients of all floating-point arguments and parameters.
        rtol, atol: |found - expected| may be ``atol + rtol * (the largest magnitude in the
            expected tensor)``; the default depends on the dtype: 1e-5 and 1e-6 for float32.
        seed: the seed of the cotangents and of the placements.

    Returns the placements that were run. Raises AssertionError with the mesh, the placement, the
    first wrong value, its worst element, the ranks that have it, and the plan. Raises PlanningError
    if a stated placement, or each of the default placements, has no plan.
    """
    state, call, name = _as_function(fn, kwargs)
    call_args = args if state is None else (state, *args)
    call_args = pytree.tree_map_only(torch.Tensor, lambda t: _leaf(t, gradients), call_args)
    call_kwargs = None if state is not None else kwargs
    traced = trace(call, call_args, call_kwargs, grads=gradients, seed=seed)
    expected = reference(traced)
    prefix = f"{_STATE}." if state is not None else ""
    arguments = {i: label.removeprefix(prefix) for i, label in traced.names.items()}
    stated = [placements] if isinstance(placements, Mapping) else placements
    checked: list[str] = []
    refused: list[tuple[str, str]] = []
    error: PlanningError | None = None
    for mesh in meshes if meshes is not None else _default_meshes(stated):
        if stated is None:
            tensors = {n: traced.leaves[i] for i, n in arguments.items()}
            trials = enumerate_placements(tensors, mesh, count, seed)
        else:
            trials = [_placements_by_tensor(fn, each, arguments) for each in stated]
        for trial in trials:
            title = f"{mesh}: {_trial_text(trial)}"
            pins = [trial.get(arguments.get(i, ""), {}) for i in range(len(traced.leaves))]
            try:
                evaluation = run(traced, mesh, pins, seed=seed)
            except PlanningError as problem:
                if stated is not None:
                    raise
                error = error or problem
                refused.append((title, str(problem).splitlines()[0]))
                continue
            except RanksDisagree as problem:
                raise AssertionError(f"{_error_head(name, mesh, trial)}\n  {problem}") from problem
            problem = _first_difference(evaluation, expected, traced, arguments, (rtol, atol))
            if problem is not None:
                head = _error_head(name, mesh, trial)
                raise AssertionError(f"{head}\n{problem}\n\n{evaluation.plan}")
            checked.append(title)
    if error is not None and not checked:
        raise error
    return Same(tuple(checked), tuple(refused))


# -- the function ------------------------------------------------------------------------------


def _as_function(
    fn: Callable[..., Any], kwargs: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor] | None, Callable[..., Any], str]:
    """Return the tensors of a module (None for a function), a function to call, and its name.

    The function of a module takes the tensors as its first argument, so that they are placed and
    differentiated like arguments.
    """
    if not isinstance(fn, nn.Module):
        return None, fn, getattr(fn, "__name__", type(fn).__name__)
    module, module_kwargs = fn, dict(kwargs or {})
    state: dict[str, torch.Tensor] = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }

    def call(state: Mapping[str, torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(module, dict(state), args, module_kwargs)

    signature = forward_signature(module, _STATE, "others", module_kwargs)
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = type(module).__name__
    return state, call, type(module).__name__


_STATE = "state"


def _leaf(tensor: torch.Tensor, gradients: bool) -> torch.Tensor:
    """Return a copy of the tensor that requires grad if its gradient is compared."""
    requires_grad = gradients and (tensor.is_floating_point() or tensor.is_complex())
    if isinstance(tensor, nn.Parameter):
        requires_grad = requires_grad and tensor.requires_grad
    return tensor.detach().clone().requires_grad_(requires_grad)


# -- the placements ----------------------------------------------------------------------------


def _default_meshes(stated: Sequence[Placements] | None) -> list[Mesh]:
    """Return small meshes with the axes of the stated placements."""
    axes = dict.fromkeys(
        axis
        for each in stated or ()
        for pins in each.values()
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


def _placements_by_tensor(
    fn: Callable[..., Any], stated: Placements, arguments: Mapping[int, str]
) -> dict[str, Stated]:
    """Return the placements of each tensor from the stated names and globs. Raises PlanningError
    for a key that matches no tensor."""
    placements: dict[str, Stated] = {}
    tensors = names_of(fn) if isinstance(fn, nn.Module) else ()
    names = sorted(set(arguments.values()))
    for key, pins in stated.items():
        matched = [t.name for t in tensors if t.kind == "parameter" and t.matched_by(key)]
        matched = matched or [t.name for t in tensors if t.matched_by(key)]
        if not matched:
            matched = [n for n in names if n == key or n.startswith(f"{key}.")]
        if not matched:
            near = nearest(key, names)
            if isinstance(fn, nn.Module) and not near:
                raise no_match_error(key, "placements", fn, tensors)
            raise PlanningError(
                f'placements names "{key}", which is no tensor that the program uses.\n'
                f"  tensors: {listing(names)}\n"
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


def _error_head(name: str, mesh: Mesh, trial: Mapping[str, Stated]) -> str:
    lines = [f"{name} does not give the same numbers under this placement."]
    lines.append(f"  mesh:       {mesh}")
    lines += [
        f"  {'placement:' if i == 0 else '          '}  {_trial_text({n: pins})}"
        for i, (n, pins) in enumerate(trial.items())
    ]
    return "\n".join(lines)


# -- the comparison ----------------------------------------------------------------------------


def _first_difference(
    actual: Evaluation,
    expected: Evaluation,
    traced: Traced,
    arguments: Mapping[int, str],
    tolerance: tuple[float | None, float | None],
) -> str | None:
    """Return a text about the first value that differs, results before gradients; None if all are
    equal."""
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
            value = b if a is None else a  # torch and a plan may give None for a zero gradient
            assert value is not None
            if bool((value == 0).all()):
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
    """Return a text about the worst wrong element, with its ranks and the tolerance; None if no
    element is wrong."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"  expected:   {_type_text(expected)}\n  found:      {_type_text(actual)}"
    if expected.numel() == 0:
        return None
    default = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    rtol = default[0] if rtol is None else rtol
    atol = default[1] if atol is None else atol
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if expected.dtype in TOLERANCES:
        a, b = actual.to(wide), expected.to(wide)
        finite = b.abs()[b.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        allowed = atol + rtol * largest
        # `==` covers infinities. NaN in one tensor only makes the error NaN, which is wrong.
        equal = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(equal, torch.zeros((), dtype=torch.float64), (a - b).abs())
        wrong = ~(error <= allowed)
        tolerance = f"allowed is {allowed:.2g} (atol {atol:.2g} + rtol {rtol:.2g} * "
        tolerance += f"{largest:.4g}, the largest)"
    else:
        wrong = actual != expected
        error = wrong.double()
        tolerance = f"{expected.dtype} must be equal"
    if not bool(wrong.any()):
        return None
    wrong_error = torch.where(wrong, error.nan_to_num(nan=float("inf")), -1.0)
    worst = wrong_error.flatten().argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, expected.shape))
    lines = [f"  spec:       {spec} on {spec.mesh}"] if spec is not None else []
    ranks = f", held by {_ranks_text(spec, index)}" if spec is not None else ""
    lines += [
        f"  element:    {list(index)}{ranks}",
        f"  expected:   {expected[index].item()}",
        f"  found:      {actual[index].item()}",
        f"  {int(wrong.sum())} of {expected.numel()} elements differ; {tolerance}",
    ]
    return "\n".join(lines)


def _type_text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _ranks_text(spec: TensorSpec, index: tuple[int, ...]) -> str:
    """Return a text about the ranks whose shards have the element."""
    ranks: list[int] = []
    for rank in range(spec.mesh.size):
        coordinates = spec.mesh.coordinates(rank)
        if all(
            any(start <= i < end for start, end in spec.intervals(dim, coordinates))
            for dim, i in enumerate(index)
        ):
            ranks.append(rank)
    if len(ranks) == spec.mesh.size:
        return "all ranks" if len(ranks) > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
