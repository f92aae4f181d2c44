"""Replace transformers' load-balancing loss during capture by ours, which has the same value.

    load_balancing_loss_func(gate_logits, num_experts, top_k, attention_mask)
        ->  balance_of_layers(probabilities, topk(probabilities), mask)

Each modeling file of transformers has its own copy of the function. A copy is replaced if its
signature is this one, and if it returns our value for an example. Only imported files are looked
at.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dtensor.frontend.capture.thread_patches import if_capturing
from dtensor.sharding.ops.load_balance import balance_of_layers

_NAME = "load_balancing_loss_func"
_PACKAGES = ("transformers.models.", "transformers_modules.")
_PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")


def loss_patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the changes of imported modules for `patch_attributes`."""
    functions = [
        (module, vars(module).get(_NAME))
        for name, module in list(sys.modules.items())
        if name.startswith(_PACKAGES)
    ]
    return [
        (module, _NAME, if_capturing(_load_balancing_loss, function))
        for module, function in functions
        if isinstance(function, FunctionType) and _has_our_value(function)
    ]


def _load_balancing_loss(
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """Replace transformers' function of this signature."""
    if not isinstance(gate_logits, tuple):
        return 0
    probabilities = [torch.softmax(logits, -1) for logits in gate_logits]
    ids = [layer.topk(top_k, -1).indices for layer in probabilities]
    mask = None if attention_mask is None else attention_mask.reshape(-1)
    return balance_of_layers(probabilities, ids, mask)


@cache
def _has_our_value(function: FunctionType) -> bool:
    """Return whether ``function`` has our signature, and our value for two layers of three
    tokens."""
    if tuple(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    values = torch.arange(24, dtype=torch.float64, device="cpu").mul(2.6).sin().float()
    logits = tuple(values.view(2, 3, 4))
    mask = torch.tensor([[1, 0, 1]], device="cpu")
    for attention_mask in (None, mask):
        with torch.no_grad():
            theirs = function(logits, 4, 2, attention_mask)
            ours = _load_balancing_loss(logits, 4, 2, attention_mask)
        if not isinstance(theirs, Tensor) or not torch.allclose(theirs, torch.as_tensor(ours)):
            return False
    return True
