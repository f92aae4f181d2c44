"""`for_model`: Megatron's placements, derived from what a model computes.

    placements = dt.placements.for_model(model, (ids,), dict(labels=labels), axis="tp", size=2)
    print(placements)      # each pattern with its placement and a line that says why
    del placements["model.embed_tokens.weight"]                  # an ordinary dict: edit it
    model = dt.parallelize(model, dt.Mesh(tp=2), placements)

The model is captured with the example (shapes count, values do not), so a model that nobody listed
works too. Pass labels where the model computes its own loss: then the vocabulary is split up to the
loss. Not here: how a placement is found (derive.py); stages and data parallelism, which need none.
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
    """Pattern -> axis -> placement, as `parallelize` takes it; prints as Python, with reasons.

    ``reasons``: pattern -> why, also of what was left whole and so is not in the dict.
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
    """Placements of the model's weights on ``axis``, derived from ``model(*args, **kwargs)``.

    Args:
        example_args, example_kwargs: a call of the model; tensors may be on the meta device.
        axis: the name of the mesh's axis that the placements are on.
        size: ranks of the axis. With it, heads that do not divide get a ``unit``, query
            heads are split alone where groups of them would leave a rank without one, and weights
            with fewer parts than ranks stay whole; without it every boundary is stated.

    What it places lines up with the forward and, where the model has one, with the backward.
    Raises PlanningError where the model cannot be captured or an op has no rule.
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
    except PlanningError:  # what cannot be trained at all is asked for its forward alone
        step = None
    # where one rank has all there is no boundary to look at: as where the size is not known
    choices = derive(dataflow(graph), None if size == 1 else size, step)
    return _by_pattern(choices, model, axis)


def of_step(
    graph: Graph, model: nn.Module, axis: str = "tp", size: int | None = None
) -> Placements:
    """`for_model`, of a training step that is captured: of its forward, without a capture more."""
    flow = dataflow(graph)
    forward = replace(
        flow,
        ops=tuple(op for op in flow.ops if op.phase == "forward"),
        outputs=tuple(o for o in flow.outputs if o.kind == "result"),
    )
    return _by_pattern(derive(forward, size, flow), model, axis)


def _by_pattern(choices: Sequence[Choice], model: nn.Module, axis: str) -> Placements:
    """One pattern for the alike parameters of repeated layers where they are placed alike."""
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
    """As one writes it: ``dt.Row(unit=16)``; a Column is the last dim, in a matrix dim 1."""
    match placement:
        case Shard(dim) if dim == 0 or (dim == 1 and matrix):
            return f"dt.{'Row' if dim == 0 else 'Column'}({', '.join(options_of(placement))})"
        case _:
            return f"dt.{placement!r}"
