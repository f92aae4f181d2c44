"""Tests that the project's CUDA autocast on CPU tensors casts as torch does on "cuda" tensors.

The reference is torch itself: fake "cuda" tensors follow CUDA's list even in a build without
CUDA. Each op on the list is called on both kinds of tensors in several mixes of dtypes; the ops
below autograd, their dtypes and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _dispatch_get_registrations_for_dispatch_key
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.errors import PlanningError
from dtensor.frontend.capture.cuda_casts import _kernels, _listed_ops, _unknown, cuda_casts

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten: Any = torch.ops.aten

Make = Callable[..., Tensor]
"""A float tensor of these sizes, of the next dtype of the mix, on the device."""


def rows(m: Make) -> tuple[Tensor, ...]:
    return (m(4, 5),)


def pair(m: Make) -> tuple[Tensor, ...]:
    return m(4, 5), m(4, 5)


def ids(m: Make, *sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int64, device=m(1).device)


def image(m: Make, *out: int) -> tuple[Any, ...]:
    return (m(1, 2, *[4] * len(out)), [*out])


def conv(m: Make, dims: int) -> tuple[Any, ...]:
    return m(1, 2, *[6] * dims), m(2, 2, *[3] * dims), m(2)


def whole(m: Make) -> tuple[Any, ...]:
    return (*conv(m, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def cell(m: Make, gates: int) -> tuple[Any, ...]:
    return m(2, 3), m(2, 4), m(4 * gates, 3), m(4 * gates, 4), m(4 * gates), m(4 * gates)


def named(names: str, call: Callable[[Make], tuple[Any, ...]]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), call)


CALLS: dict[str, Callable[[Make], tuple[Any, ...]]] = {
    "_convolution": lambda m: (*whole(m), False, False, True, True),
    "_convolution.deprecated": lambda m: (*whole(m), False, False, True),
    "convolution": whole,
    **{f"conv{d}d": lambda m, d=d: conv(m, d) for d in (1, 2, 3)},
    "conv_tbc": lambda m: (m(6, 1, 2), m(3, 2, 2), m(2)),
    "conv_transpose1d": lambda m: conv(m, 1),
    "conv_transpose2d.input": lambda m: conv(m, 2),
    "conv_transpose3d.input": lambda m: conv(m, 3),
    "prelu": lambda m: (m(4, 5), m(1)),
    "addmm": lambda m: (m(5), m(4, 3), m(3, 5)),
    "addmv": lambda m: (m(4), m(4, 3), m(3)),
    "addr": lambda m: (m(4, 3), m(4), m(3)),
    "matmul": lambda m: (m(2, 4, 3), m(3, 5)),
    "einsum": lambda m: ("ij,jk->ik", [m(4, 3), m(3, 5)]),
    "mm": lambda m: (m(4, 3), m(3, 5)),
    "mv": lambda m: (m(4, 3), m(3)),
    "linalg_vecdot": pair,
    "linear": lambda m: (m(2, 3), m(5, 3), m(5)),
    "addbmm": lambda m: (m(4, 5), m(2, 4, 3), m(2, 3, 5)),
    "baddbmm": lambda m: (m(2, 4, 5), m(2, 4, 3), m(2, 3, 5)),
    "bmm": lambda m: (m(2, 4, 3), m(2, 3, 5)),
    "chain_matmul": lambda m: ([m(2, 3), m(3, 4), m(4, 5)],),
    "linalg_multi_dot": lambda m: ([m(2, 3), m(3, 4), m(4, 5)],),
    "lstm_cell": lambda m: (m(2, 3), [m(2, 4), m(2, 4)], *cell(m, 4)[2:]),
    "gru_cell": lambda m: cell(m, 3),
    "rnn_tanh_cell": lambda m: cell(m, 1),
    "rnn_relu_cell": lambda m: cell(m, 1),
    "scaled_dot_product_attention": lambda m: (m(1, 2, 4, 8), m(1, 2, 4, 8), m(1, 2, 4, 8)),
    **named(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
        "softplus prod sum norm.Scalar linalg_vector_norm linalg_matrix_norm nuclear_norm "
        "pdist",
        rows,
    ),
    "pow.Tensor_Scalar": lambda m: (m(4, 5), 2),
    "pow.Tensor_Tensor": pair,
    "pow.Scalar": lambda m: (2.0, m(4, 5)),
    "layer_norm": lambda m: (m(4, 5), [5], m(5), m(5)),
    "native_layer_norm": lambda m: (m(4, 5), [5], m(5), m(5), 1e-5),
    "rms_norm": lambda m: (m(4, 5), [5], m(5)),
    "group_norm": lambda m: (m(2, 4, 3), 2, m(4), m(4)),
    "frobenius_norm.dim": lambda m: (m(4, 5), [1]),
    "nuclear_norm.dim": lambda m: (m(2, 4, 5), [1, 2]),
    "cosine_similarity": pair,
    "poisson_nll_loss": lambda m: (*pair(m), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda m: (*pair(m), ids(m, 4)),
    "nll_loss": lambda m: (m(4, 5), ids(m, 4)),
    "nll_loss2d": lambda m: (m(1, 5, 2, 2), ids(m, 1, 2, 2)),
    "hinge_embedding_loss": pair,
    **named(
        "kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss "
        "binary_cross_entropy_with_logits dist cdist atan2",
        pair,
    ),
    "margin_ranking_loss": lambda m: (m(4), m(4), m(4)),
    "multilabel_margin_loss": lambda m: (m(4, 5), ids(m, 4, 5)),
    "multi_margin_loss": lambda m: (m(4, 5), ids(m, 4)),
    "triplet_margin_loss": lambda m: (m(4, 5), m(4, 5), m(4, 5)),
    "renorm": lambda m: (m(4, 5), 2, 0, 1.0),
    "logsumexp": lambda m: (m(4, 5), [1]),
    **named(
        "upsample_nearest1d _upsample_nearest_exact1d",
        lambda m: image(m, 8),
    ),
    **named(
        "upsample_nearest2d _upsample_nearest_exact2d",
        lambda m: image(m, 8, 8),
    ),
    **named(
        "upsample_nearest3d _upsample_nearest_exact3d",
        lambda m: image(m, 8, 8, 8),
    ),
    "upsample_linear1d": lambda m: (*image(m, 8), False),
    **named(
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
        lambda m: (
            *image(m, 8, 8),
            False,
        ),
    ),
    "upsample_trilinear3d": lambda m: (*image(m, 8, 8, 8), False),
    **named(
        "prod.dim_int softmax.int log_softmax.int cumprod cumsum",
        lambda m: (m(4, 5), 1),
    ),
    "sum.dim_IntList": lambda m: (m(4, 5), [1]),
    "linalg_matrix_norm.str_ord": lambda m: (m(4, 5), "fro"),
    "norm.ScalarOpt_dim": lambda m: (m(4, 5), 2, [1]),
    "addcdiv": lambda m: (m(4), m(4), m(4)),
    "addcmul": lambda m: (m(4), m(4), m(4)),
    "bilinear": lambda m: (m(2, 3), m(2, 4), m(5, 3, 4), m(5)),
    "cross": lambda m: (m(4, 3), m(4, 3)),
    "dot": lambda m: (m(4), m(4)),
    "vdot": lambda m: (m(4), m(4)),
    "grid_sampler": lambda m: (m(1, 2, 4, 4), m(1, 3, 3, 2), 0, 0, False),
    "index_put": lambda m: (m(4, 5), [ids(m, 2)], m(2, 5)),
    "tensordot": lambda m: (m(4, 3), m(3, 5), [1], [0]),
    "scatter_add": lambda m: (m(4, 5), 0, ids(m, 2, 5), m(2, 5)),
}
NOT_HERE = {
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "cudnn_convolution",
    "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention",
}  # fmt: skip
"""Kernels of CUDA alone, which no fake CPU tensor reaches."""
RAISES = {"binary_cross_entropy"}
OTHER_OPS = {
    "scaled_dot_product_attention", "lstm_cell", "upsample_bicubic2d", "softmax.int",
    "log_softmax.int",
}  # fmt: skip
"""Which come to other ops on CUDA than on the CPU: only what they give is compared."""
STATED = {"gru_cell": (BF16, BF16, BF16), "grid_sampler": (BF16, F32, F32)}
"""What ops that torch does not run on fake tensors of CUDA give, of bf16, of f32, of both."""

MIXES = [(BF16,), (F32,), (F64,), (F32, BF16), (BF16, F32), (F64, BF16, F32), (F16,)]


def on_the_list() -> set[str]:
    """Return torch's own ops on the list. A CUDA build has one more, which no program calls
    directly."""
    names = _dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    own = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return own - {"_cudnn_rnn"}


class Seen(TorchDispatchMode):
    """Record each op below autograd with the dtypes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        dtypes = [x.dtype if isinstance(x, Tensor) else x for x in leaves]
        kept = [x for x in dtypes if not isinstance(x, torch.device | torch.layout)]
        if func.namespace != "prim":  # queries of a tensor's device
            self.ops.append((str(func), *kept))
        return func(*args, **(kwargs or {}))


def outcome(name: str, mix: tuple[torch.dtype, ...], device: str) -> tuple[Any, Any]:
    """Return the ops below the op and the dtypes of its results, or its error."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    count = iter(range(1000))
    with FakeTensorMode():

        def make(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=mix[next(count) % len(mix)], device=device)

        args = CALLS[name](make)
        casts = cuda_casts() if device == "cpu" else enable_python_dispatcher()
        try:
            with casts, Seen() as seen:
                given = op(*args)
        except Exception as error:
            return None, type(error)
    results = [x.dtype for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    return seen.ops, results


@pytest.fixture(autouse=True)
def _autocast(request: pytest.FixtureRequest) -> Any:
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


def test_every_op_on_torchs_cuda_autocast_list_has_cast_kernel() -> None:
    kernels = _kernels(_listed_ops()).items()
    unknown = [op for op, kernel in kernels if kernel.__qualname__.startswith("_unknown")]
    assert not [op for op in unknown if op.namespace == "aten"]
    assert on_the_list() == CALLS.keys() | NOT_HERE | RAISES


@pytest.mark.parametrize("name", STATED)
def test_casts_of_ops_unsupported_by_fake_tensors_have_stated_dtypes(name: str) -> None:
    mixes = [(BF16,), (F32,), (BF16, F32)]
    assert tuple(outcome(name, mix, "cpu")[1][0] for mix in mixes) == STATED[name]


@pytest.mark.default("linalg_matrix_norm", "pow.Tensor_Scalar", "pow.Scalar")
@pytest.mark.parametrize("name", sorted(CALLS.keys() - STATED.keys()))
def test_cuda_casts_on_cpu_tensors_equal_torchs_on_fake_cuda_tensors(name: str) -> None:
    for mix in MIXES:
        if name == "lstm_cell" and F64 in mix:  # a fused CUDA kernel without mixed dtypes
            continue
        ops, results = outcome(name, mix, "cuda")
        here = outcome(name, mix, "cpu")
        assert here[1] == results, mix
        if name not in OTHER_OPS:
            assert here[0] == ops, mix


def test_autocast_op_without_cast_kernel_is_refused() -> None:
    with pytest.raises(PlanningError, match=r"aten.add.Tensor is on the list of torch.autocast"):
        _unknown(aten.add.Tensor)(1)


def test_custom_op_with_register_autocast_is_refused() -> None:
    @torch.library.custom_op("cuda_casts_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    with cuda_casts():
        assert torch.ops.cuda_casts_test.twice(torch.ones(2)).dtype == F32
    twice.register_autocast("cuda", BF16)
    with cuda_casts(), pytest.raises(PlanningError, match="cuda_casts_test.twice"):
        torch.ops.cuda_casts_test.twice(torch.ones(2))


def test_binary_cross_entropy_under_autocast_is_refused_as_in_torch() -> None:
    with cuda_casts(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.rand(3), torch.rand(3))


def test_cuda_casts_are_removed_after_context() -> None:
    x = torch.ones(2, 3, dtype=BF16)
    with cuda_casts(), cuda_casts():
        assert torch.softmax(x, -1).dtype == F32
        torch.set_autocast_enabled("cuda", False)
        assert torch.softmax(x, -1).dtype == BF16
        torch.set_autocast_enabled("cuda", True)
    assert torch.softmax(x, -1).dtype == BF16
    assert not any(
        torch._C.DispatchKey.AutocastCUDA in op.py_kernels for op in _kernels(_listed_ops())
    )
