"""ZeRO-3: parameters, gradients and optimizer state are stored split over dp, and each layer's
parameters are gathered before use and freed after it."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(dt.parallelize(build(), dt.Mesh(dp=2), zero=dict(dp=3)), inputs=dict(dp=dt.Row()))
