"""Layers that torch would take apart while differentiating, kept whole: they have rules.

    with whole_layers():
        aot_export_joint_with_descriptors(...)     # upsample_bilinear2d, not 40 index and mul

Torch registers Python decompositions under autograd for a few ops, for which the joint export has
no switch. Resizing is one fused kernel otherwise. Those of the margin losses differ from their
kernels: multilabel_margin_loss with targets that end early (-1) comes out wrong.

Invariants: torch's registrations are restored on the way out. It touches private tables of torch
(`py_kernels`), guarded by tests/frontend/test_fused.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._decomp  # registers what is taken away here
from torch._C import DispatchKey
from torch._ops import OpOverload

_PACKETS = (
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """Within it these ops reach the graph as they are; not reentrant, not for several threads."""
    taken: list[tuple[OpOverload, DispatchKey, object]] = []
    for op in _overloads():
        for key in _KEYS:
            if key in op.py_kernels:
                taken.append((op, key, op.py_kernels.pop(key)))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel  # type: ignore[assignment]
            op._dispatch_cache.clear()


def _overloads() -> list[OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in _PACKETS]
    return [getattr(p, name) for p in packets for name in p.overloads() if "out" not in name]
