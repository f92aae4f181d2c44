"""Apply the casts of `torch.autocast("cuda")` to CPU tensors, which torch itself would not cast.

    with cuda_casts():
        torch.softmax(x, -1)                 # bf16[8,16] -> f32[8,16]; on the CPU's list: bf16

Programs are captured on fake CPU tensors. The ops on CUDA's list are those for which torch has a
kernel with the dispatch key AutocastCUDA. How their operands are cast is written here, as in
torch's autocast_mode.h; unknown ops are refused.

Invariants: a listed op runs with the key excluded, so that nested ops cast nothing, as in torch.
Casts are not cached; simplify.py merges the casts of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_get_registrations_for_dispatch_key,
    _dispatch_tls_is_dispatch_key_included,
    _dispatch_tls_set_dispatch_key_included,
    _EnablePythonDispatcher,
    _ExcludeDispatchKeyGuard,
)

from dtensor.errors import PlanningError

_KEY = DispatchKey.AutocastCUDA
_NARROW_OPS = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
"""
_FLOAT32_OPS = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
_FLOAT32_RESULT_OPS = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST_OPS = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
_DTYPE_OVERLOADS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_SKIPPED_OPS = {"binary_cross_entropy", "_cudnn_rnn"}
"""Ops that get no kernel here: the first raises in torch, and the second runs only on CUDA."""

_Kernel = Callable[..., Any]


@contextmanager
def cuda_casts() -> Iterator[None]:
    """Apply CUDA's casts in this context and thread; may be nested. The kernels are global, but
    only tracing uses Python kernels, and only one thread traces."""
    was_included = _dispatch_tls_is_dispatch_key_included(_KEY)
    kernels = {} if was_included else _kernels(_listed_ops())
    try:
        for op, kernel in kernels.items():
            op.py_kernels[_KEY] = kernel
            op._dispatch_cache.clear()
        _dispatch_tls_set_dispatch_key_included(_KEY, True)
        with _EnablePythonDispatcher():
            yield
    finally:
        _dispatch_tls_set_dispatch_key_included(_KEY, was_included)
        for op in kernels:
            op.py_kernels.pop(_KEY, None)
            op._dispatch_cache.clear()


def _listed_ops() -> frozenset[str]:
    """Return the names of all ops on the list. It changes when a library defines ops."""
    return frozenset(_dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))


@cache
def _kernels(listed_ops: frozenset[str]) -> dict[Any, _Kernel]:
    """Return the casting kernel of each op. The kernel of an op of another library raises, because
    its casts are unknown."""
    makers = {name: _narrow for name in _NARROW_OPS.split()}
    makers |= {name: _float32 for name in _FLOAT32_OPS.split()}
    makers |= {name: _float32_result for name in _FLOAT32_RESULT_OPS.split()}
    makers |= {name: _widest for name in _WIDEST_OPS.split()}
    makers |= {name: _with_dtype for name in _DTYPE_OVERLOADS}
    kernels: dict[Any, _Kernel] = {}
    for full in sorted(listed_ops):
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and name in _SKIPPED_OPS:
            continue
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        maker = makers.get(name, _unknown) if namespace == "aten" else _unknown
        kernels[op] = maker(op)
    return kernels


def _is_castable(x: object) -> bool:
    """Return whether autocast casts x: a floating-point tensor that is not float64."""
    return isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    match value:
        case Tensor():
            return value.to(dtype) if _is_castable(value) and value.dtype != dtype else value
        case list() | tuple():
            return [_cast(item, dtype) for item in value]
        case _:
            return value


def _without_autocast() -> Any:
    return _ExcludeDispatchKeyGuard(DispatchKeySet(_KEY))


def _call_with_casts(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Call the op with its operands cast to ``dtype``."""
    with _without_autocast():
        cast_args = [_cast(value, dtype) for value in args]
        return op(*cast_args, **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _narrow(op: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call_with_casts(op, torch.get_autocast_dtype("cuda"), args, kwargs)

    return kernel


def _float32(op: Any) -> _Kernel:
    return lambda *args, **kwargs: _call_with_casts(op, torch.float32, args, kwargs)


def _float32_result(op: Any) -> _Kernel:
    """Return a kernel that computes in float32 with dtype=, unless the call states a dtype."""
    names = [argument.name for argument in op._schema.arguments]
    dtype_index = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        stated_dtype = args[dtype_index] if len(args) > dtype_index else kwargs.get("dtype")
        if stated_dtype is None and _is_castable(args[0]):
            args, kwargs = args[:dtype_index], {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return op(*args, **kwargs)

    return kernel


def _with_dtype(op: Any) -> _Kernel:
    """Return a kernel that calls the overload with dtype= of an op without one."""
    overload = _DTYPE_OVERLOADS[op._schema.name.removeprefix("aten::") + f".{op._overloadname}"]
    overload_op = getattr(op._overloadpacket, overload)
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        dtype = torch.float32 if _is_castable(args[0]) else args[0].dtype
        with _without_autocast():
            return overload_op(*(values[name] for name in names), dtype=dtype)

    return kernel


def _widest(op: Any) -> _Kernel:
    """Return a kernel that casts to the autocast dtype, or to float32 if an operand is float32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        narrow = dtype = torch.get_autocast_dtype("cuda")
        for value in (*args, *kwargs.values()):
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if not _is_castable(x) or dtype == torch.float32:
                    continue
                if x.dtype not in (narrow, torch.float32):
                    raise RuntimeError(
                        f"Unexpected floating ScalarType in at::autocast::prioritize: "
                        f"{op} of {x.dtype}, where autocast has {narrow}"
                    )
                dtype = x.dtype
        return _call_with_casts(op, dtype, args, kwargs)

    return kernel


def _unknown(op: Any) -> _Kernel:
    """Return a kernel that raises PlanningError, because the casts of the op are unknown."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise PlanningError(
            f'{op} is on the list of torch.autocast("cuda") of torch {torch.__version__}, and what '
            f"it does there is not known here.\n"
            f'fix: with torch.autocast("cuda", enabled=False): around it, and casts of your own'
        )

    return kernel
