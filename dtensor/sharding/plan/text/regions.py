"""What a printed plan says of recomputation: per region what is saved and what runs again.

    recompute                                                       per rank
      blocks.{0..11}    12 regions, each
        saves           4.0 KiB: mm_1_reduced, x (of blocks.0)
                        not communicated again: mm_1_reduced (of blocks.0)
        repeats         10 ops, 65.54 kFLOP

Regions that save and repeat alike are one entry. Both memories stand in totals.py.
Not here: which values those are (plan/passes/recompute.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.sharding.plan.passes.recompute import Region
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import collapse, flop_text, size_text, wrapped

_NAME = 18  # the column of names


def regions(plan: Plan, width: int) -> list[str]:
    """The section, after an empty line; nothing without regions."""
    if not plan.regions:
        return []
    specs = plan.value_specs()
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in plan.regions:
        nbytes = sum(specs[name].max_local_nbytes for name in region.saved)
        key = (region.stage, nbytes, len(region.communicated), region.num_ops, region.flops)
        groups.setdefault(key, []).append(region)
    per = "per rank" if plan.num_microbatches == 1 else "per rank and microbatch"
    lines = ["", f"{'recompute':<64}{per}"]
    for (_, nbytes, *_), members in groups.items():
        assert isinstance(nbytes, int)
        lines += _entry(plan, members, nbytes, width)
    return lines


def _entry(plan: Plan, members: Sequence[Region], nbytes: int, width: int) -> list[str]:
    first, several = members[0], len(members) > 1
    where = f"stage {first.stage}, " if plan.num_stages > 1 else ""
    each = ", each" if first.repeated else ""
    count = f"{len(members)} regions{each}" if several else "1 region"
    name = ", ".join(collapse([region.name for region in members]))
    of_first = f" (of {first.name})" if several else ""
    ops = f"{first.num_ops} op{'s' * (first.num_ops != 1)}"
    head = f"{name:<{_NAME - 2}}  {where}{count}"
    if not first.repeated:
        return wrapped(f"{head}: the backward reads nothing that runs again", "  ", width)
    lines = wrapped(head, "  ", width)
    saved = ", ".join(first.saved) or "nothing but parameters and the batch"
    lines += wrapped(
        f"{size_text(nbytes)}: {saved}{of_first}", f"    {'saves':<{_NAME - 2}}", width
    )
    if first.communicated:
        kept = ", ".join(first.communicated)
        lines += wrapped(f"not communicated again: {kept}{of_first}", " " * (_NAME + 2), width)
    lines.append(f"    {'repeats':<{_NAME - 2}}{ops}, {flop_text(first.flops)}")
    return lines


def repeated(plan: Plan, name: str) -> list[str]:
    """For `Plan.explain`: whether the value runs again, or is there because another does."""
    lines: list[str] = []
    for region in plan.regions:
        if f"{name}_again" in region.repeated:
            lines.append(f"not kept for the backward of {region.name}: see {name}_again")
        if name in region.repeated:
            lines.append(f"recomputed in the backward of {region.name}, whose values are not kept")
        if name in region.communicated:
            lines.append(f"saved for {region.name}: to compute it again it would be communicated")
        elif name in region.saved:
            lines.append(f"saved for {region.name}, which is computed again from it")
    return lines
