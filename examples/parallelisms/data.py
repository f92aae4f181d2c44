"""Data parallelism: the batch is split, gradients are summed in buckets after the backward."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(dt.parallelize(build(), dt.Mesh(dp=4)), inputs=dict(dp=dt.Row()))
