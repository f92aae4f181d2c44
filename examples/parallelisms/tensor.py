"""Megatron's tensor parallelism: columns, then rows; one all_reduce a pair in each direction."""

import dtensor as dt
from examples.parallelisms.model import build, train

losses = train(
    dt.parallelize(
        build(),
        dt.Mesh(tp=2),
        {
            "*.attn.qkv": dict(tp=dt.ColumnParallel(blocks=3)),
            "*.attn.proj": dict(tp=dt.RowParallel()),
            "*.mlp.up": dict(tp=dt.ColumnParallel()),
            "*.mlp.down": dict(tp=dt.RowParallel()),
        },
    )
)
