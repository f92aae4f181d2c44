"""Which ops are one op of repeated layers: they make one choice, so that a model of any depth is
solved at the size of one layer.

    group(blocks.3.attn: matmul)  ==  group(blocks.7.attn: matmul)

Two ops are alike where their module paths differ in numbers alone and their calls are equal. A sum
of gradients stands in no module; it is told by the modules whose gradients it adds.

Not here: whether members of a group have the same options; where not, solve.py takes it apart.
"""

from __future__ import annotations

from collections.abc import Hashable

from dtensor.sharding.plan.dataflow import Dataflow, Op


def group(op: Op, flow: Dataflow) -> Hashable:
    """Equal for the same op of repeated layers; the op's own name for what is not repeated."""
    inside = (without_numbers(op.module),)
    if inside == (op.module,):
        adds = op.phase == "backward" and not op.module
        inside = _operand_modules(op, flow) if adds else ()
        if not any("*" in path for path in inside):
            return op.name
    call = op.call
    return (inside, op.phase, op.source, call.name, call.operands, call.results, repr(call.args))


def _operand_modules(op: Op, flow: Dataflow) -> tuple[str, ...]:
    producers = (flow.producers.get(name) for name in op.operands)
    return tuple("" if p is None else without_numbers(p.module) for p in producers)


def without_numbers(path: str) -> str:
    """``blocks.*.norm1`` of ``blocks.3.norm1``: a layer's number goes, a number in a name stays."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
