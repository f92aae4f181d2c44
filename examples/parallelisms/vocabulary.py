"""A vocabulary split over ranks: embedding, head and cross entropy, with no logits gathered."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(
    dt.parallelize(
        build(),
        dt.Mesh(tp=3),
        {"embed": dict(tp=dt.RowParallel()), "head": dict(tp=dt.ColumnParallel())},
    ),
    inputs=dict(tp=dt.Replicate()),  # attention is whole on purpose: 4 heads, 3 ranks
)
