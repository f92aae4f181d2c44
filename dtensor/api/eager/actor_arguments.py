"""A DTensor as an argument of an actor's method: the actor gets its global value.

    reward = daft.spawn(Reward)
    reward.score(y)                  # y: f32[8@tp,16]; `score` gets a plain tensor of (8, 16)

When the method is called, the controller waits for the value, fetches one copy of each shard, joins
the shards (pending sums are reduced) and sends the result to the actor. So ranks and actors never
wait for each other. A value that is not replicated counts as an implicit redistribution. The actor
gets the value at the time of the call, without autograd history.
"""

from __future__ import annotations

import torch

from dtensor.api.eager.errors import with_line_of_run
from dtensor.api.eager.execute_op import own_value
from dtensor.api.eager.policy import check_sent
from dtensor.api.eager.values import CellTensor
from dtensor.daft import DaftError
from dtensor.sharding.plan.text.words import size_text
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import assemble_at


def sent_to_actor(x: CellTensor) -> torch.Tensor:
    """Return the global value on the CPU. Raises PlanningError if the policy forbids this."""
    x.session.check()
    value = own_value(x)
    covering = value.stored.on(value.stored.covering())
    spec, ranks = covering.spec, covering.at
    if set(spec.placements) - {REPLICATE}:
        gathered = spec.with_placements(**dict.fromkeys(spec.mesh.axes, REPLICATE))
        line = f"{spec} -> {gathered}: {len(ranks)} shards gathered by the controller, "
        line += size_text(spec.max_local_nbytes * len(ranks))
        check_sent("an argument of an actor", [line], "call")
    try:
        shards = value.session.launch.store.fetch([covering])[covering.label]
    except DaftError as error:
        raise with_line_of_run(value.session, error) from error.__cause__
    return assemble_at(shards, spec)
