"""One device: what the other examples are held against."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(dt.parallelize(build(), dt.Mesh()))
