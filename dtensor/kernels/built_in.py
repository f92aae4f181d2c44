"""The built-in kernels by op. They run on CUDA unless the user registers another kernel.

TRITON                                 # the ops; available without Triton
triton_kernels()["dt::rms_norm"]       # the function of an op; imports Triton
torch_kernels()["dt::attention"]       # a function that calls torch's fastest kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TRITON = frozenset(
    """dt::add_layer_norm dt::add_rms_norm dt::bias_gelu dt::bias_gelu_backward
    dt::ce_backward dt::ce_stats dt::dropout dt::dropout_add dt::dropout_backward dt::gated
    dt::gated_backward dt::rms_norm dt::rms_norm_backward dt::rope
    dt::rope_backward""".split()  # noqa: SIM905
)


def triton_kernels() -> Mapping[str, Callable[..., Any]]:
    from dtensor.kernels import cross_entropy, dropout, gates, norms, rope

    return {
        "dt::add_layer_norm": norms.add_layer_norm,
        "dt::add_rms_norm": norms.add_rms_norm,
        "dt::bias_gelu": gates.bias_gelu,
        "dt::bias_gelu_backward": gates.bias_gelu_backward,
        "dt::ce_backward": cross_entropy.ce_backward,
        "dt::ce_stats": cross_entropy.ce_stats,
        "dt::dropout": dropout.dropout,
        "dt::dropout_add": dropout.dropout_add,
        "dt::dropout_backward": dropout.dropout_backward,
        "dt::gated": gates.gated,
        "dt::gated_backward": gates.gated_backward,
        "dt::rms_norm": norms.rms_norm,
        "dt::rms_norm_backward": norms.rms_norm_backward,
        "dt::rope": rope.rope,
        "dt::rope_backward": rope.rope_backward,
    }


def torch_kernels() -> Mapping[str, Callable[..., Any]]:
    from dtensor.kernels import attention

    return {
        "dt::attention": attention.attention,
        "dt::attention_backward": attention.attention_backward,
    }
