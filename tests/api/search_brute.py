"""Every point of version 1 of the search's space, planned through `dt.compare`: what `dt.search`
finds is to be no dearer than the best of them.

    python -m tests.api.search_brute [--ranks 2]

The space is enumerated here by itself, from what docs/searching.md says; nothing is pruned. One
small GPT; a point takes a tenth of a second of a core.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT

ROWS, LAYERS = 4, 2


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def every_strategy(num: int, placements: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    sizes = range(1, num + 1)
    meshes = [(p, d, t) for p in sizes for d in sizes for t in sizes if p * d * t == num]
    for pp, dp, tp in meshes:
        if pp > LAYERS or ROWS % dp or 4 % tp:  # four heads
            continue
        mesh = dt.Mesh(**{a: n for a, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1})
        for count in (1, 2, 4):
            if ROWS // dp % count:
                continue
            for order in (dt.OneFOneB, dt.ZBH1) if pp > 1 and count > 1 else (dt.OneFOneB,):
                for zero in range(4) if dp > 1 else (0,):
                    for again in (False, True):
                        one: dict[str, Any] = dict(mesh=mesh, schedule=order(count))
                        one |= dict(placements=placements) if tp > 1 else {}
                        one |= dict(stages="auto") if pp > 1 else {}
                        one |= dict(inputs=dict(dp=dt.Row())) if dp > 1 else {}
                        one |= dict(zero={"dp": zero}) if zero else {}
                        one |= dict(recompute=["blocks.*"]) if again else {}
                        found[f"{mesh} {order.__name__}({count}) zero{zero} {again}"] = one
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    num = parser.parse_args().ranks
    with torch.device("meta"):
        model = GPT(layers=LAYERS, tied=False)
    tokens = torch.empty(ROWS, 16, dtype=torch.int64, device="meta")
    placements = dt.placements.for_model(model, (tokens,))
    for topology in (dt.Topology(), dt.topologies.laptop()):
        began = time.process_time()
        strategies = every_strategy(num, placements)
        rows = dt.compare(model, loss_fn, strategies, tokens, tokens, topology=topology)
        best = min((row for row in rows if row.error is None), key=lambda row: row.seconds)
        found = dt.search(model, loss_fn, num, tokens, tokens, topology=topology)
        assert found.num_points == len(strategies), (found.num_points, len(strategies))
        print(
            f"{num} ranks, {topology.title}: {len(rows)} points, best {best.seconds:.6g} s; search "
            f"{found.best.seconds:.6g} s with {found.num_planned} planned and {found.num_bases} "
            f"bases; {time.process_time() - began:.0f} s of a core",
            flush=True,
        )
        assert found.best.seconds <= best.seconds * (1 + 1e-9), best.name


if __name__ == "__main__":
    main()
