"""The memory and communication of a generator, from the plan of its decode program.

print(gen.summary())
# <generator of LlamaForCausalLM on mesh(tp=2): 8 slots of 256 positions>
#   prompts    in buckets of 16, 32, 64, 128, 256
#   cache      128.0 KiB on each rank, f32[8,2@tp,256,16] twice a layer
#   a token    4 all_reduce over tp, 1 all_gather over tp; 12.0 KiB sent by each rank
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from dtensor.runtime.lower.program import holders, on_mesh
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import size_text

_CACHE_LABEL = re.compile(r"kv_cache\.[kv]\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of `Generator.summary`. ``kv_bytes``: the bytes of the caches on each rank;
    ``caches``: their specs; ``collectives``: how many a run of decode has, by (kind, axis);
    ``bytes_sent``: in a run of decode, by the rank that sends most; ``rows``: the slots, and spare
    ones that make them divisible; ``positions``: how positions are split, "" if they are not."""

    head: str
    slots: int
    rows: int
    length: int
    buckets: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    caches: tuple[str, ...]
    collectives: dict[tuple[str, str], int]
    bytes_sent: int
    positions: str = ""

    def __str__(self) -> str:
        sizes = sorted(set(self.kv_bytes), reverse=True)
        per_rank = " or ".join(map(size_text, sizes))
        collectives = [f"{n} {kind} over {axis}" for (kind, axis), n in self.collectives.items()]
        bytes_text = f"; {size_text(self.bytes_sent)} sent by each rank" if collectives else ""
        lines = [
            self.head,
            f"  prompts    in buckets of {', '.join(map(str, self.buckets))}",
            f"  cache      {per_rank} on each rank, of {', '.join(self.caches)}",
            f"  a token    {', '.join(collectives) or 'no communication'}{bytes_text}",
        ]
        if self.positions:
            lines.append(f"  positions  {self.positions}")
        if self.rows > self.slots:
            lines.append(f"  rows       {self.rows}, so that they divide")
        return "\n".join(lines)


def summary_of(
    head: str,
    decode: Plan,
    slots: int,
    rows: int,
    length: int,
    buckets: tuple[int, ...],
    positions: str,
) -> Summary:
    """Return the summary of a generator, from its plan of decode. ``head``: the first line;
    ``positions``: as in `Summary`."""
    kv_bytes = [0] * decode.mesh.size
    caches: dict[str, None] = {}
    mesh = None
    for item in decode.inputs:
        if _CACHE_LABEL.match(item.label):
            spec = on_mesh(decode, item.held)
            mesh = spec.mesh
            kv_bytes = kv_bytes if len(kv_bytes) == mesh.size else [0] * mesh.size
            caches[str(item.spec)] = None
            for rank in holders(decode, item):
                size = spec.dtype.itemsize
                for n in spec.local_shape(mesh.coordinates(rank)):
                    size *= n
                kv_bytes[rank] += size
    collectives: Counter[tuple[str, str]] = Counter()
    for (axis, _, kind), stages in decode.totals.sent.items():
        collectives[kind, axis] += sum(collective.times for collective in stages)
    return Summary(
        head=head,
        slots=slots,
        rows=rows,
        length=length,
        buckets=buckets,
        kv_bytes=tuple(kv_bytes),
        caches=tuple(caches),
        collectives=dict(collectives),
        bytes_sent=decode.totals.bytes_sent,
        positions=positions,
    )
