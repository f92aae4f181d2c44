"""The end of a printed plan: memory per rank, what each axis carries, FLOP, predicted seconds.

    memory per rank                       communication per rank and step
      parameters           2.0 MiB          tp  forward    4 all_reduce    2.0 MiB sent
      ...                                 compute per rank and step    2.15 GFLOP

A plan of several stages has a column of memory, and lines of communication, for each stage.
Not here: how they are computed (plan/cost/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.sharding.plan.cost.memory import stage_flops
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import flop_text, seconds_text, size_text


def totals(plan: Plan) -> list[str]:
    return [*_memory(plan), "", *_communication(plan), "", *_time(plan)]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = [["memory per rank", *_stage_names(plan, plan.num_stages > 1)]]
    rows += [
        ["  parameters", *(size_text(m.parameters) for m in memory)],
        ["  gradients", *(size_text(m.gradients) for m in memory)],
        ["  optimizer state", *(size_text(m.optimizer) for m in memory)],
    ]
    if any(m.masters for m in memory):
        rows.append(["  float32 masters", *(size_text(m.masters) for m in memory)])
    rows += [
        ["  activations", *(size_text(m.activations) for m in memory)],
    ]
    if plan.plain is not None:
        plain = [size_text(m.activations) for m in plan.plain.memory]
        rows.append(["    without recompute", *plain])
    if any(held > 1 for held in plan.in_flight):
        rows.append(["    microbatches in flight", *map(str, plan.in_flight)])
    rows.append(["  total", *(size_text(m.total) for m in memory)])
    return _table(rows)


def _communication(plan: Plan) -> list[str]:
    """Messages and bytes by stage, axis, phase and kind."""
    found: dict[tuple[int, str, str, str], list[int]] = {}
    order = {"forward": 0, "backward": 1, "optimizer": 2}
    axes = plan.mesh.axes
    for c in plan.collectives:
        entry = found.setdefault((c.stage, c.axis, c.phase, c.kind), [0, 0])
        entry[0] += c.times
        entry[1] += c.times * c.bytes_sent
    if not found:
        return ["communication per rank and step    none"]
    rows = [
        [
            "  " + (f"stage {stage}  {axis}" if plan.num_stages > 1 else axis),
            phase,
            f"{number} {kind}",
            f"{size_text(sent)} sent",
        ]
        for (stage, axis, phase, kind), (number, sent) in sorted(
            found.items(), key=lambda e: (e[0][0], axes.index(e[0][1]), order[e[0][2]], e[0][3])
        )
    ]
    return ["communication per rank and step", *_table(rows, left=3)]


def _time(plan: Plan) -> list[str]:
    cost = plan.cost
    flops = [flop_text(stage_flops(plan, stage)) for stage in range(plan.num_stages)]
    names = _stage_names(plan, plan.num_stages > 1)
    shown = ", ".join(f"{name} {f}".strip() for name, f in zip(names or [""], flops, strict=True))
    if plan.plain is not None:
        more = [stage_flops(plan, s) - stage_flops(plan.plain, s) for s in range(plan.num_stages)]
        texts = (
            f"{name} {flop_text(f)}".strip() for name, f in zip(names or [""], more, strict=True)
        )
        shown += f"; recomputed {', '.join(texts)} of it"
    parts = [
        f"compute {seconds_text(cost.compute_seconds)}",
        f"communication {seconds_text(cost.communication_seconds)}",
    ]
    if plan.num_stages > 1:
        parts.append(f"bubble {cost.bubble:.0%}")
    one = "stage" if plan.num_stages == len(plan.hosted) else "rank"
    where = f" of the slowest {one}" if plan.num_stages > 1 else ""
    return [
        f"compute per rank and step    {shown}",
        f"predicted{where}    {seconds_text(cost.seconds)} a step: {', '.join(parts)}",
    ]


def _stage_names(plan: Plan, several: bool) -> list[str]:
    return [f"stage {stage}" for stage in range(plan.num_stages)] if several else []


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns aligned: the first ``left`` to the left, the others to the right."""
    num = max(len(row) for row in rows)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(num)]
    return [
        "  ".join(
            f"{cell:<{widths[i]}}" if i < left else f"{cell:>{widths[i]}}"
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
