"""Context parallelism: the tokens of each sequence are split over `cp`, and chunks of keys and
values pass from rank to rank in attention. The zigzag gives both ranks the same causal work."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(
    dt.parallelize(build(), dt.Mesh(cp=2), attention={"cp": "ring"}),
    inputs=dict(cp=dt.Zigzag(1)),
)
