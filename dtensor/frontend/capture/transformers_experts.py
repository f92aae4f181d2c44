"""Replace the experts of transformers' models by dt ops while a program is captured.

    experts = MixtralExperts(config)           # a class with @use_experts_implementation
    experts(hidden, ids, weights)              # in a capture: route, take_rows, expert_mm, add_rows

The decorator asks transformers' registry for an implementation at each call. In a capture the
registry answers with `_experts_forward` in place of transformers' own "eager", "grouped_mm" and
"batched_mm". Implementations that users register stay, and so do experts with other weights.
Transformers is not imported here: it is patched if the program has imported it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import traceback

from dtensor.frontend.experts import Route, expert_linear, from_experts, sent_to_experts

EXPERTS = "dtensor_experts"
"""The key in torch's node annotations that marks the ops of replaced experts."""

_Forward = Callable[..., Any]


def experts_patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the patches of transformers' registry: owner, name, and replacement of an original."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    if not hasattr(moe, "ExpertsInterface"):
        return []
    return [(moe.ExpertsInterface, "get_interface", partial(_with_our_experts, moe))]


def _with_our_experts(moe: Any, get_interface: _Forward) -> _Forward:
    """Wrap the registry's `get_interface`, whose ``default`` is the forward of the class."""

    def get_ours(self: Any, experts_implementation: str | None, default: _Forward) -> _Forward:
        theirs = get_interface(self, experts_implementation, default)
        replaced = (default, moe.grouped_mm_experts_forward, moe.batched_mm_experts_forward)
        return partial(_experts_forward, theirs) if theirs in replaced else theirs

    return get_ours


def _experts_forward(theirs: _Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what ``theirs(module, hidden[T d], ids[T k], weights[T k])`` returns, by dt ops."""
    operands = inspect.signature(theirs).bind(module, *args, **kwargs).args[1:]
    if not (len(operands) == 3 and _is_standard(module, *operands)):
        return theirs(module, *args, **kwargs)
    experts: Any = module
    hidden, ids, weights = operands
    with traceback.annotate({EXPERTS: True}):
        rows, route = sent_to_experts(hidden, ids, experts.num_experts, has_spare_id=True)
        rows = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, route)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = _linear(experts, "down_proj", rows, route)
        if experts.has_post_expert_norm:
            rows = experts.post_expert_norm(rows)
        return from_experts(rows, route, weights).to(hidden.dtype)


def _linear(experts: Any, name: str, rows: Tensor, route: Route) -> Tensor:
    weight = getattr(experts, name)
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return expert_linear(rows.to(weight.dtype), weight, route, bias)


def _is_standard(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> bool:
    """Return whether the weights are stacked as transformers' implementations need it."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    dims = {name: 3, "down_proj": 3}
    if experts.has_bias:
        dims |= {f"{name}_bias": 2, "down_proj_bias": 2}
    for name, num_dims in dims.items():
        weight = getattr(experts, name, None)
        if not (isinstance(weight, Tensor) and weight.is_floating_point()):
            return False
        if weight.dim() != num_dims or weight.shape[0] != experts.num_experts:
            return False
    return hidden.dim() == ids.dim() == 2 and weights.shape == ids.shape
