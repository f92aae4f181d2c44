"""`for_model`: derive Megatron's placements from the operations of a model.

    placements = dt.placements.for_model(model, (ids,), dict(labels=labels), axis="tp", size=2)
    print(placements)      # each pattern with its placement and the reason
    del placements["model.embed_tokens.weight"]                  # an ordinary dict: edit it
    model = dt.parallelize(model, dt.Mesh(tp=2), placements)

The model is captured with the example's shapes, so no list of model classes is needed. If the model
computes its loss, pass the labels: then the vocabulary is split up to the loss. `derive.py` finds
the placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dtensor.api.model.stating.patterns import matches
from dtensor.api.search.derive import Choice, derive
from dtensor.errors import PlanningError, check_kind
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Graph
from dtensor.private_torch import pytree
from dtensor.sharding.plan.dataflow import without_numbers
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.spec.placements import Placement, Shard, options_of


class Placements(dict[str, dict[str, Placement]]):
    """A dict of pattern -> axis -> placement for `parallelize`; prints as Python, with reasons.

    ``reasons``: pattern -> reason, also for weights that stay whole and are not in the dict.
    """

    def __init__(
        self,
        placements: Mapping[str, dict[str, Placement]],
        reasons: Mapping[str, str],
        matrices: frozenset[str] | None = None,
    ) -> None:
        super().__init__(placements)
        self.reasons: dict[str, str] = dict(reasons)
        self._matrices = matrices  # the patterns of weights of two dims; None: all are

    def __str__(self) -> str:
        text = ["{"]
        for pattern, stated in self.items():
            matrix = self._matrices is None or pattern in self._matrices
            inside = ", ".join(f"{axis}={_written(p, matrix)}" for axis, p in stated.items())
            why = self.reasons.get(pattern)
            text += [f"    # {why}"] if why else []
            text.append(f'    "{pattern}": dict({inside}),')
        whole = {pattern: why for pattern, why in self.reasons.items() if pattern not in self}
        for pattern, why in whole.items():
            text += [f"    # whole: {pattern}", f"    #   {why}"]
        return "\n".join([*text, "}"])


def for_model(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    axis: str = "tp",
    size: int | None = None,
) -> Placements:
    """Return placements of the model's weights on ``axis``, derived from a call of the model.

    Args:
        example_args, example_kwargs: the arguments of the call; tensors may be on the meta device.
        axis: the name of the mesh's axis.
        size: the number of ranks of the axis. If given: heads that do not divide get a ``unit``;
            query heads are split without their keys if a rank would have no group of heads;
            weights with fewer parts than ranks stay whole. If None: every boundary is stated.

    The placements line up with the forward and, if the model can be trained, with the backward.
    Raises PlanningError if the model cannot be captured or an op has no rule.
    """
    if not isinstance(model, nn.Module):
        raise PlanningError(
            f"for_model takes an nn.Module, not {type(model).__name__}; fix: pass the model as it "
            f"is before dt.parallelize"
        )
    check_kind("axis", axis, str, "the name of an axis", 'axis="tp"')
    check_kind("example_args", example_args, list | tuple, "a tuple of arguments", "(x,)")
    kwargs = "dict(labels=labels)"
    check_kind("example_kwargs", example_kwargs, Mapping | None, "a dict of arguments", kwargs)
    if size is not None and (type(size) is not int or size < 1):
        raise PlanningError(f"size={size!r}: an axis has at least 1 rank; fix: leave it out")

    def tensors(module: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(module(*args, **kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def trained(module: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tensors(module, *args, **kwargs) if leaf.requires_grad]

    given = ((model, *example_args), dict(example_kwargs or {}))
    graph = capture(tensors, *given, grads="none")
    try:
        step = dataflow(capture(trained, *given, grads="tangents"))
    except PlanningError:  # the model cannot be trained: use its forward alone
        step = None
    # One rank has no boundaries to respect, so a size of 1 is the same as an unknown size.
    choices = derive(dataflow(graph), None if size == 1 else size, step)
    return _by_pattern(choices, model, axis)


def of_step(
    graph: Graph, model: nn.Module, axis: str = "tp", size: int | None = None
) -> Placements:
    """Return the placements of `for_model` for a captured training step, from its forward."""
    flow = dataflow(graph)
    forward = replace(
        flow,
        ops=tuple(op for op in flow.ops if op.phase == "forward"),
        outputs=tuple(o for o in flow.outputs if o.kind == "result"),
    )
    return _by_pattern(derive(forward, size, flow), model, axis)


def _by_pattern(choices: Sequence[Choice], model: nn.Module, axis: str) -> Placements:
    """Return the choices by pattern: one pattern for equal parameters of repeated layers if their
    placements are equal, else one pattern for each parameter."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(without_numbers(choice.label), []).append(choice)
    names = [name for name, _ in model.named_parameters()]
    ranks = {name: p.dim() for name, p in model.named_parameters(remove_duplicate=False)}
    matrices: set[str] = set()
    placements: dict[str, dict[str, Placement]] = {}
    reasons: dict[str, str] = {}
    for pattern, alike in groups.items():
        labels = [choice.label for choice in alike]
        globs = (pattern, *collapse(labels))  # a star may match more
        exact = (g for g in globs if _matched(g, names) == set(labels))
        glob = next(exact, None) if len({choice.placement for choice in alike}) == 1 else None
        named = [(choice.label, choice) for choice in alike] if glob is None else [(glob, alike[0])]
        for key, choice in named:
            reasons[key] = choice.why
            if choice.placement is not None:
                placements[key] = {axis: choice.placement}
            if ranks[choice.label] == 2:
                matrices.add(key)
    return Placements(placements, reasons, frozenset(matrices))


def _matched(glob: str, names: Sequence[str]) -> set[str]:
    return {name for name in names if matches(glob, name)}


def _written(placement: Placement, matrix: bool) -> str:
    """Return the Python of a placement: ``dt.Row(unit=16)``; dim 1 of a matrix is a Column."""
    match placement:
        case Shard(dim, zigzag=False) if dim == 0 or (dim == 1 and matrix):
            return f"dt.{'Row' if dim == 0 else 'Column'}({', '.join(options_of(placement))})"
        case _:
            return f"dt.{placement!r}"
