"""Pipeline parallelism: two stages, four microbatches, one forward and one backward in turn."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(
    dt.parallelize(
        build(),
        dt.Mesh(pp=2),
        stages={"pp": [["embed*", "pos*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]},
    ),
    schedule=dt.OneFOneB(microbatches=4),
)
