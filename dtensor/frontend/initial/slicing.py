"""From all that was recorded to the recipe of one tensor.

Going back from the tensor's storage: an op that writes a storage which is needed is kept, and what
it reads is needed too; once an op writes all of a storage without reading it, earlier ones are not.
A recipe is split (see `recipe`) if every op is one of those whose result at an element depends on
that element alone and is rounded exactly, so that a shard has the bits of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.initial.recipe import (
    Constant,
    Recipe,
    Step,
    View,
    strides_of,
    truncated_normal,
)
from dtensor.sharding.ops.philox import Key

aten = torch.ops.aten
MAX_WHOLE = 1 << 24  # elements that one rank may make whole, to keep a part of them

FILLS = {aten.zero_.default, aten.fill_.Scalar}
DRAWS = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.randn.default,
    aten.rand.default,
    aten.randn_like.default,
    aten.rand_like.default,
    truncated_normal,
}
FACTORIES = {
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
EXACT = {
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.neg_.default,
    aten.clamp_.default,
    aten.clamp.default,
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.erfinv_.default,
}


@dataclass(frozen=True, slots=True)
class Known:
    """All steps in order, the storages' sizes, and which parameter each random step belongs to."""

    steps: list[Step]
    sizes: Mapping[int, tuple[int, torch.dtype]]
    owners: dict[int, Key]


def recipe_of(name: str, view: View, known: Known, key: Callable[[str], int]) -> Recipe:
    kept = _slice(view.storage, known)
    if not _is_filled([known.steps[i] for i in kept], view.storage, known):
        raise planning_error(
            f"Nothing initialises all of {name}, which is on the meta device.",
            f"{name}: {list(view.size)} {view.dtype}",
            *(known.steps[i].source for i in kept[:1]),
            source=None,
            fix="give its module a reset_parameters, or pass init=lambda: Model(config), which "
            "records what the constructor does",
        )
    steps: list[Step] = []
    number = 0
    for i in kept:
        step = known.steps[i]
        if _is_random(step):
            if step.target not in DRAWS:
                raise _cannot(name, view, step, "draws random numbers that have no counter")
            if step.kwargs and dict(step.kwargs).get("generator") is not None:
                raise _cannot(name, view, step, "draws from a generator of its own")
            found = known.owners.setdefault(i, Key(key(name), 0, number))
            number += 1
            step = replace(step, key=found)
        steps.append(step)
    split = view.is_all_of(view.size) and all(_is_local(step, view.size) for step in steps)
    used = sorted({v.storage for s in steps for v in _views((s.args, s.kwargs, s.writes))})
    whole = sum(known.sizes[s][0] for s in used)
    if not split and whole > MAX_WHOLE:
        needs = next(s for s in steps if not _is_local(s, view.size)) if steps else None
        raise _cannot(name, view, needs, "needs the whole tensor")
    return Recipe(
        name=name,
        view=view,
        storages=tuple((s, *known.sizes[s]) for s in used),
        steps=tuple(steps),
        split=split,
    )


def _cannot(name: str, view: View, step: Step | None, why: str) -> Exception:
    op = "a view" if step is None else _name(step)
    return planning_error(
        f"The initialisation of {name} cannot be done shard by shard: {op} {why}.",
        f"{name}: {list(view.size)} {view.dtype}",
        *([step.source] if step is not None and step.source else []),
        source=None,
        fix="initialise it element by element (normal_, uniform_, trunc_normal_, zero_, fill_), or "
        "load it with dt.load_state_dict",
    )


def _name(step: Step) -> str:
    if isinstance(step.target, torch._ops.OpOverload):
        return step.target._schema.name.removeprefix("aten::")
    return step.target.__name__


def _slice(storage: int, known: Known) -> list[int]:
    """The numbers of the steps that a storage's last value depends on, in order."""
    needed = {storage}
    kept: list[int] = []
    for i in reversed(range(len(known.steps))):
        step = known.steps[i]
        if not any(v.storage in needed for v in step.writes):
            continue
        kept.append(i)
        written = {v.storage for v in step.writes}
        reads = {v.storage for v in _views((step.args, step.kwargs))} - written
        if step.made or (len(written) == 1 and _overwrites(step, known)):
            needed -= written
        needed |= reads
    return kept[::-1]


def _overwrites(step: Step, known: Known) -> bool:
    """Whether it writes all of its storage without reading it."""
    view = step.writes[0]
    whole = _in_order(view) and _count(view) == known.sizes[view.storage][0]
    return whole and _only_writes(step)


def _only_writes(step: Step) -> bool:
    return step.target in {*FILLS, *DRAWS, aten.copy_.default, aten.fill_.Tensor}


def _in_order(view: View) -> bool:
    return strides_of(view.size) == view.stride


def _count(view: View) -> int:
    return math.prod(view.size)


def _is_filled(steps: Sequence[Step], storage: int, known: Known) -> bool:
    """Whether the steps give a value to each element of a storage, at once or part by part."""
    size = known.sizes[storage][0]
    parts: list[tuple[int, int]] = []
    for step in steps:
        for view in step.writes:
            if view.storage == storage and step.made:
                return True
            if view.storage == storage and _only_writes(step) and _in_order(view):
                parts.append((view.offset, view.offset + _count(view)))
    end = 0
    for start, stop in sorted(parts):
        if start > end:
            return False
        end = max(end, stop)
    return end >= size


def _is_random(step: Step) -> bool:
    if step.target is truncated_normal:
        return True
    tags = step.target.tags if isinstance(step.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


def _is_local(step: Step, shape: tuple[int, ...]) -> bool:
    """Whether a rank can do its part of the step: all tensors of one shape, or rows in place."""
    if step.target in FILLS or step.target in DRAWS:
        return len(step.writes) == 1 and (
            step.writes[0].is_all_of(shape)
            or (not step.made and step.writes[0].rows_of(shape) is not None)
        )
    if step.target in FACTORIES or step.target in EXACT:
        views = [*_views((step.args, step.kwargs)), *step.writes]
        constants = any(not isinstance(v, View) for v in _operands((step.args, step.kwargs)))
        fused = dict(step.kwargs).get("alpha", 1) != 1  # rounds once in vectors, twice in tails
        return all(v.is_all_of(shape) for v in views) and not constants and not fused
    return False


def _views(value: Any) -> list[View]:
    return [v for v in _operands(value) if isinstance(v, View)]


def _operands(value: Any) -> Iterable[Any]:
    """Views and constants in arguments."""
    match value:
        case View() | Constant():
            yield value
        case tuple() | list():
            for item in value:
                yield from _operands(item)
        case _:
            pass
