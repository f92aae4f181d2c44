"""A DTensor as an argument of an actor's method: the actor gets its global value.

    reward = daft.spawn(Reward)
    reward.score(y)                  # y: f32[8@tp,16]; `score` gets a plain tensor of (8, 16)

When the method is called the controller waits for the value, fetches one copy of each shard and
joins them; pending sums are reduced. A message with the whole value then goes to the actor. So the
value passes through the controller, and no rank waits for an actor, nor an actor for a rank.

Invariants: what was not replicated counts as an implicit redistribution. The copy is the value at
the time of the call, without history; what the ranks do later does not change it.
"""

from __future__ import annotations

import torch

from dtensor.api.eager.errors import located
from dtensor.api.eager.execute_op import own_value
from dtensor.api.eager.policy import check_sent
from dtensor.api.eager.values import CellTensor
from dtensor.daft import DaftError
from dtensor.sharding.plan.text.words import size_text
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import assemble_at


def sent_to_actor(x: CellTensor) -> torch.Tensor:
    """The global value, on the CPU. PlanningError where policy refuses to gather it."""
    x.session.check()
    value = own_value(x)
    asked = value.stored.on(value.stored.covering())
    spec, ranks = asked.spec, asked.at
    if set(spec.placements) - {REPLICATE}:
        gathered = spec.with_placements(**dict.fromkeys(spec.mesh.axes, REPLICATE))
        sent = f"{spec} -> {gathered}: {len(ranks)} shards gathered by the controller, "
        sent += size_text(spec.max_local_nbytes * len(ranks))
        check_sent("an argument of an actor", [sent], "call")
    try:
        shards = value.session.launch.store.fetch([asked])[asked.label]
    except DaftError as error:
        raise located(value.session, error) from error.__cause__
    return assemble_at(shards, spec)
