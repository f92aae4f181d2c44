"""Strategies that brute force shows to hold and that no rule offers, recorded so as to be counted.

A rule that comes to offer one, or to lack another, makes test_certificates.py fail: record it.

Why they lack: a rule says nothing of operands whose values do not matter (new_zeros, full_like,
copy), of an addend that must be pending when a contraction is split (addmm, linear with a bias,
scatter_add, index_put: captured programs have an explicit add instead), nor of results of which
only some are linear (the weight of a norm). Those of slice, split, cat and pow are of empty pieces
and of the power 1.
"""

from __future__ import annotations

MISSING: dict[str, tuple[str, ...]] = {
    "aten._fused_rms_norm.default": (
        'aten._fused_rms_norm.default: [Replicate(), Partial("sum")] -> [Partial("sum"), Replicate()]',  # noqa: E501
    ),
    "aten.addmm.default": (
        'aten.addmm.default: [Partial("sum"), Shard(1), Shard(0)] -> [Partial("sum")]',
    ),
    "aten.baddbmm.default": (
        'aten.baddbmm.default: [Partial("sum"), Shard(2), Shard(1)] -> [Partial("sum")]',
    ),
    "aten.cat.default": (
        'aten.cat.default: [Partial("sum"), Partial("sum"), Replicate()] -> [Partial("sum")]',
        'aten.cat.default: [Replicate(), Replicate(), Partial("sum")] -> [Replicate()]',
    ),
    "aten.copy.default": (
        'aten.copy.default: [Partial("sum"), Partial("sum")] -> [Partial("sum")]',
        'aten.copy.default: [Partial("sum"), Replicate()] -> [Replicate()]',
    ),
    "aten.full_like.default": ('aten.full_like.default: [Partial("sum")] -> [Replicate()]',),
    "aten.index_put.default": (
        'aten.index_put.default: [Partial("sum"), Shard(0), Shard(1)] -> [Partial("sum")]',
    ),
    "aten.linear.default": (
        'aten.linear.default: [Shard(1), Shard(1), Partial("sum")] -> [Partial("sum")]',
    ),
    "aten.native_layer_norm.default": (
        'aten.native_layer_norm.default: [Replicate(), Partial("sum"), Partial("sum")] -> [Partial("sum"), Replicate(), Replicate()]',  # noqa: E501
    ),
    "aten.new_full.default": (
        'aten.new_full.default: [Partial("sum")] -> [Replicate()]',
        "aten.new_full.default: [Shard(0)] -> [Replicate()]",
        "aten.new_full.default: [Shard(1)] -> [Replicate()]",
    ),
    "aten.new_ones.default": (
        'aten.new_ones.default: [Partial("sum")] -> [Replicate()]',
        "aten.new_ones.default: [Shard(0)] -> [Replicate()]",
        "aten.new_ones.default: [Shard(1)] -> [Replicate()]",
    ),
    "aten.new_zeros.default": (
        'aten.new_zeros.default: [Partial("sum")] -> [Replicate()]',
        'aten.new_zeros.default: [Shard(0)] -> [Partial("sum")]',
        "aten.new_zeros.default: [Shard(0)] -> [Replicate()]",
        'aten.new_zeros.default: [Shard(1)] -> [Partial("sum")]',
        "aten.new_zeros.default: [Shard(1)] -> [Replicate()]",
    ),
    "aten.ones_like.default": ('aten.ones_like.default: [Partial("sum")] -> [Replicate()]',),
    "aten.pow.Tensor_Scalar": ('aten.pow.Tensor_Scalar: [Partial("sum")] -> [Partial("sum")]',),
    "aten.scatter_add.default": (
        'aten.scatter_add.default: [Partial("sum"), Shard(1), Shard(1)] -> [Partial("sum")]',
    ),
    "aten.slice.Tensor": (
        'aten.slice.Tensor: [Partial("sum")] -> [Replicate()]',
        'aten.slice.Tensor: [Partial("sum")] -> [Shard(1)]',
        'aten.slice.Tensor: [Shard(1)] -> [Partial("sum")]',
        "aten.slice.Tensor: [Shard(1)] -> [Replicate()]",
        "aten.slice.Tensor: [Shard(1)] -> [Shard(1)]",
    ),
    "aten.split_with_sizes.default": (
        'aten.split_with_sizes.default: [Partial("sum")] -> [Partial("sum"), Replicate()]',
        'aten.split_with_sizes.default: [Partial("sum")] -> [Partial("sum"), Shard(1)]',
    ),
    "aten.zeros_like.default": ('aten.zeros_like.default: [Partial("sum")] -> [Replicate()]',),
}
