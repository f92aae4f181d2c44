"""Two tables: ops that do not take every mix of dtypes, and ops that return float32 parts of sums.

    sum, over split rows     bf16[8@tp,4] -> f32[4]{sum@tp}    torch.sum(x, 0, dtype=float32)
    mul by a number          f32[4]{sum@tp} -> f32[4]{sum@tp}  a float32 part stays float32

A kernel adds 16-bit numbers in float32 and rounds the sum once. If ranks have parts of a sum, each
would round its part and the reduction would round again. So reductions and linear ops after them
return their parts in float32, and only the reduction over ranks rounds. Matrix products do not:
their parts are as large as activations, and only GPUs have kernels for it (docs/precision.md). Sums
by index (index_add, gradients of embeddings) and weight gradients of norms do not either.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import full_names, retarget
from dtensor.sharding.rules.dtypes import Dtypes, Half, same_float_dtype
from dtensor.sharding.rules.rule import Parts

VALUES = tuple(range(3, 32))
"""The operands of attention after q, k and v: values of tokens, sinks, folds of parts."""

# Backwards of norms are missing: torch's meta kernels state bfloat16 for their float32 statistics.
_OPS_BY_DTYPES: dict[Dtypes, str] = {
    "same": """
        mm bmm mv dot addmm baddbmm addbmm addmv linear convolution convolution_backward
        dt.add_layer_norm dt.bias_gelu_backward dt.dropout_add dt.gated_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_forward
        _cdist_backward _pdist_backward _fused_rms_norm_backward _histogramdd_from_bin_tensors
        _linalg_solve_ex _softmax_backward_data _log_softmax_backward_data _prelu_kernel
        _prelu_kernel_backward avg_pool2d_backward avg_pool3d_backward binary_cross_entropy
        binary_cross_entropy_backward cholesky_solve complex glu_backward grid_sampler_2d
        grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward heaviside
        histogram.bins_tensor huber_loss_backward lerp.Scalar lerp.Tensor linalg_cross
        linalg_householder_product log_sigmoid_backward ormqr polar reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward triangular_solve""",
    same_float_dtype: """
        vdot _embedding_bag _embedding_bag_backward _embedding_bag_per_sample_weights_backward
        _segment_reduce_backward _unsafe_index_put _unsafe_masked_index_put_accumulate
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward index_add index_copy index_put
        index_reduce linalg_ldl_solve linalg_lu_solve masked_scatter
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward multi_margin_loss
        multi_margin_loss_backward multilabel_margin_loss_backward nll_loss_forward
        nll_loss2d_forward nll_loss_backward nll_loss2d_backward put scatter.reduce scatter.src
        scatter_add scatter_reduce.two dt.expert_mm dt.expert_outer transformers.grouped_mm_fallback
        transformers.grouped_mm_fallback_backward""",
    Half((0,)): """
        native_layer_norm native_group_norm _batch_norm_no_update
        _batch_norm_with_update_functional _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training""",
    Half((0, 1, 2)): "_scaled_dot_product_flash_attention_for_cpu",
    Half((0, 1, 2), free=VALUES): "dt.attention dt.attention_part",
    Half((0, 1, 2, 3, 4), free=VALUES[3:]): "dt.attention_backward",
    Half((0, 1, 2, 3), free=VALUES[1:]): "dt.attention_part_backward",
    Half((0, 1, 2), free=(3,)): "dt.attention_masked dt.cache_attention",
    Half((0, 1, 2, 3, 5), free=(4,)): "dt.attention_masked_backward",
}
DTYPES: dict[str, Dtypes] = {
    op: dtypes for dtypes, ops in _OPS_BY_DTYPES.items() for op in full_names(ops)
}
"""The mixes of dtypes that each op takes; an op that is missing promotes."""


# -- parts of sums ---------------------------------------------------------------------------------


def _with_dtype(call: OpCall) -> OpCall:
    """Return the call with ``dtype=torch.float32``, for an op that has this argument."""
    kwargs = {**dict(call.kwargs), "dtype": torch.float32}
    return replace(call, kwargs=tuple(kwargs.items()))


def _mean(call: OpCall) -> OpCall:
    if call.target is local_forms.mean_over:
        return call.with_arg(4, torch.float32)
    return _with_dtype(call)


def _on_float32_copies(call: OpCall) -> OpCall:
    return retarget(call, local_forms.in_float32, call.target, *call.args, **dict(call.kwargs))


_OPS_BY_PARTS: dict[Parts, str] = {
    _with_dtype: """
        sum sum.dim_IntList nansum linalg_vector_norm _to_copy""",
    _mean: "mean mean.dim",
    _on_float32_copies: """
        dot vdot mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        multi_margin_loss""",
    "carried": """
        add.Tensor sub.Tensor mul.Tensor div.Tensor neg clone reshape permute expand cat
        constant_pad_nd where.self""",
}
_PARTS: dict[str, Parts] = {
    op: parts for parts, ops in _OPS_BY_PARTS.items() for op in full_names(ops)
}


def parts_of(call: OpCall) -> Parts:
    """Return how the op returns its part of a sum in float32; None if it cannot."""
    if call.name in ("aten.mm.default", "aten.bmm.default"):  # a row by a column is a sum
        return _on_float32_copies if call.result.shape[-2:] == (1, 1) else None
    return _PARTS.get(call.name)
