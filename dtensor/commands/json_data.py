"""Plans, rows of comparisons and traces as data for JSON.

    plan_data(plan)["memory_by_stage"][0]["total"]       # bytes of the fullest rank of stage 0

Sizes are numbers of bytes, times are seconds. The keys do not depend on the values.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from dtensor.api.search.comparison import Compared
from dtensor.runtime.simulate.trace import Trace
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.plan import Plan


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return the placements, collectives, cost and memory of a plan, for one rank and one step."""
    return {
        "name": plan.name,
        "mesh": plan.mesh.shape,
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "topology": plan.topology.title,
        **_cost(plan.totals),
        "memory_by_stage": [{**asdict(m), "total": m.total} for m in plan.memory],
        "stages": plan.stages,
        "parameters": {
            item.label: str(item.spec) for item in plan.inputs if item.kind == "parameter"
        },
        "collectives": [asdict(each) for each in plan.collectives],
    }


def row_data(row: Compared) -> dict[str, Any]:
    """Return the data of a strategy of a comparison, or its error if it has no plan."""
    head = {"name": row.name, "mesh": row.mesh.shape}
    if row.error is not None:
        return {**head, "error": str(row.error)}
    sent = [{"axis": a, "phase": p, "bytes": n} for (a, p), n in sorted(row.bytes.items())]
    head |= {"microbatches": row.plan.num_microbatches, "schedule": row.plan.schedule}
    return {**head, **_cost(row.plan.totals), "sent": sent}


def _cost(totals: PlanTotals) -> dict[str, Any]:
    cost, memory = totals.cost, totals.memory
    return {
        "seconds": cost.seconds,
        "compute_seconds": cost.compute_seconds,
        "communication_seconds": cost.communication_seconds,
        "waiting_seconds": cost.waiting_seconds,
        "host_wait_seconds": cost.host_wait_seconds,
        "host_bound": cost.host_bound,
        "bubble": cost.bubble,
        "num_collectives": totals.num_collectives,
        "bytes_sent": totals.bytes_sent,
        "memory": {**asdict(memory), "total": memory.total},
        "device_bytes": totals.plan.topology.memory_bytes,
        "fits": totals.fits,
    }


def trace_data(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "seconds": trace.seconds,
        "bubble": trace.bubble,
        "alike": trace.alike,
        "ranks": [
            {
                "rank": rank,
                "computes": trace.spent(rank, "compute"),
                "waits": trace.spent(rank, "wait"),
                "messages": trace.spent(rank, "communication"),
                "hidden": trace.hidden(rank),
                "peak_bytes": peak,
                "seconds_by_kind": dict(trace.by_kind(rank)),
            }
            for rank, peak in zip(trace.ranks, trace.peak_bytes, strict=True)
        ],
    }
