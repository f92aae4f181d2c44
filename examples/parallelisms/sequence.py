"""Sequence parallelism beside tensor parallelism: between the pairs of layers each rank holds part
of the time dim, so that norms and residuals are split too; an all_gather before each pair and a
reduce_scatter after it. The annotations are hooks: the model stays as it is."""

import dtensor as dt
from examples.parallelisms.model import build, train

model = build()
for name, norm in model.named_modules():
    if name.endswith((".norm1", ".norm2")):
        norm.register_forward_pre_hook(lambda _, args: dt.annotate(args[0], "b t@tp d"))
        norm.register_forward_hook(lambda _, args, y: dt.annotate(y, "b t@tp d"))
losses = train(
    dt.parallelize(
        model,
        dt.Mesh(tp=2),
        {
            "*.attn.qkv": dict(tp=dt.ColumnParallel(blocks=3)),
            "*.attn.proj": dict(tp=dt.RowParallel()),
            "*.mlp.up": dict(tp=dt.ColumnParallel()),
            "*.mlp.down": dict(tp=dt.RowParallel()),
        },
    )
)
