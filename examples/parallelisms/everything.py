"""Their product: 2 stages of 2 copies of 2 ranks; the tensor placements are derived."""

import dtensor as dt
from examples.parallelisms.model import batch, build, train

model = build()
losses = train(
    dt.parallelize(
        model,
        dt.Mesh(pp=2, dp=2, tp=2),
        dt.placements.for_model(model, batch()[:1], size=2),
        stages={"pp": [["embed*", "pos*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]},
    ),
    inputs=dict(dp=dt.Row()),
    schedule=dt.OneFOneB(microbatches=4),
)
