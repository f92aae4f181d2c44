"""The ops that do not take operands of any dtypes together; all others promote.

What multiplies matrices, convolves, attends, interpolates or scatters takes one dtype. Ops whose
meta kernels name a result's dtype wrongly are left out (the backwards of norms, of which statistics
are float32 where torch's meta kernels say bfloat16), and so is the backward of the CPU's attention,
whose operands have the dtypes that the forward took.
"""

from __future__ import annotations

from dtensor.sharding.rules.dtypes import Dtypes, Half, beside_indices

_STATED: dict[Dtypes, str] = {
    "same": """
        aten.mm.default aten.bmm.default aten.mv.default aten.dot.default aten.addmm.default
        aten.baddbmm.default aten.addbmm.default aten.addmv.default aten.linear.default
        aten.convolution.default aten.convolution_backward.default dt.attention.default
        aten._adaptive_avg_pool2d_backward.default aten._adaptive_avg_pool3d_backward.default
        aten._cdist_forward.default aten._cdist_backward.default aten._pdist_backward.default
        aten._fused_rms_norm_backward.default aten._histogramdd_from_bin_tensors.default
        aten._linalg_solve_ex.default aten._softmax_backward_data.default
        aten._log_softmax_backward_data.default aten._prelu_kernel.default
        aten._prelu_kernel_backward.default aten.avg_pool2d_backward.default
        aten.avg_pool3d_backward.default aten.binary_cross_entropy.default
        aten.binary_cross_entropy_backward.default aten.cholesky_solve.default
        aten.complex.default aten.glu_backward.default aten.grid_sampler_2d.default
        aten.grid_sampler_2d_backward.default aten.grid_sampler_3d.default
        aten.grid_sampler_3d_backward.default aten.heaviside.default aten.histogram.bins_tensor
        aten.huber_loss_backward.default aten.lerp.Scalar aten.lerp.Tensor
        aten.linalg_cross.default aten.linalg_householder_product.default
        aten.log_sigmoid_backward.default aten.ormqr.default aten.polar.default
        aten.reflection_pad1d_backward.default aten.reflection_pad2d_backward.default
        aten.reflection_pad3d_backward.default aten.replication_pad1d_backward.default
        aten.replication_pad2d_backward.default aten.replication_pad3d_backward.default
        aten.triangular_solve.default""",
    beside_indices: """
        aten.vdot.default aten._embedding_bag.default aten._embedding_bag_backward.default
        aten._embedding_bag_per_sample_weights_backward.default
        aten._segment_reduce_backward.default aten._unsafe_index_put.default
        aten._unsafe_masked_index_put_accumulate.default
        aten.adaptive_max_pool2d_backward.default aten.adaptive_max_pool3d_backward.default
        aten.index_add.default aten.index_copy.default aten.index_put.default
        aten.index_reduce.default aten.linalg_ldl_solve.default aten.linalg_lu_solve.default
        aten.masked_scatter.default aten.max_pool2d_with_indices_backward.default
        aten.max_pool3d_with_indices_backward.default aten.multi_margin_loss.default
        aten.multi_margin_loss_backward.default aten.multilabel_margin_loss_backward.default
        aten.nll_loss_forward.default aten.nll_loss2d_forward.default
        aten.nll_loss_backward.default aten.nll_loss2d_backward.default aten.put.default
        aten.scatter.reduce aten.scatter.src aten.scatter_add.default
        aten.scatter_reduce.two""",
    Half((0,)): """
        aten.native_layer_norm.default aten.native_group_norm.default
        aten._batch_norm_no_update.default aten._batch_norm_with_update_functional.default
        aten._native_batch_norm_legit.no_stats aten._native_batch_norm_legit_functional.default
        aten._native_batch_norm_legit_no_training.default""",
    Half((0, 1, 2)): "aten._scaled_dot_product_flash_attention_for_cpu.default",
    Half((0, 1, 2, 3, 4)): "dt.attention_backward.default",
}
DTYPES: dict[str, Dtypes] = {op: kind for kind, ops in _STATED.items() for op in ops.split()}
