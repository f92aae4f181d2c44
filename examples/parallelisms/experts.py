"""Expert parallelism: tokens and experts are split over `ep`, and rows travel to their experts."""

import dtensor as dt
from examples.parallelisms.model import build_with_experts, train

whole = train(dt.parallelize(build_with_experts(), dt.Mesh()))
losses = train(
    dt.parallelize(
        build_with_experts(),
        dt.Mesh(dp=2, ep=2),
        {"*.mlp.up": dict(ep=dt.Shard(0)), "*.mlp.down": dict(ep=dt.Shard(0))},
    ),
    inputs=dict(dp=dt.Row(), ep=dt.Row()),
)
