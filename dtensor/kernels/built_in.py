"""The ops that have a kernel of ours, which runs on CUDA unless another is registered.

Files and functions by name, so that it is known without Triton which ops these are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

TRITON: Mapping[str, str] = {
    "aten::_fused_adamw_": "adamw.fused_adamw_",
    "dt::add_layer_norm": "norms.add_layer_norm",
    "dt::add_rms_norm": "norms.add_rms_norm",
    "dt::bias_gelu": "gates.bias_gelu",
    "dt::bias_gelu_backward": "gates.bias_gelu_backward",
    "dt::ce_backward": "cross_entropy.ce_backward",
    "dt::ce_stats": "cross_entropy.ce_stats",
    "dt::dropout": "dropout.dropout",
    "dt::dropout_add": "dropout.dropout_add",
    "dt::dropout_backward": "dropout.dropout_backward",
    "dt::gated": "gates.gated",
    "dt::gated_backward": "gates.gated_backward",
    "dt::rms_norm": "norms.rms_norm",
    "dt::rms_norm_backward": "norms.rms_norm_backward",
    "dt::rope": "rope.rope",
    "dt::rope_backward": "rope.rope_backward",
}

TORCH: Mapping[str, str] = {
    "dt::attention": "attention.attention",
    "dt::attention_backward": "attention.attention_backward",
}
"""Kernels of torch's, chosen and called as they are fastest."""


def function_of(kernel: str) -> Callable[..., Any]:
    """``norms.rms_norm`` of either table; imports its file, and so Triton for one in Triton."""
    file, _, name = kernel.partition(".")
    return getattr(importlib.import_module(f"dtensor.kernels.{file}"), name)
