"""Step a torch optimizer on flat buffers: its fused kernel once for each group, or its `step`.

    update(adamw, [(parameter, gradient)], clip, None, True)
    update(adamw, [(parameter, gradient)], clip, torch.ones(()), True)  # no change

With ``skip``, the host does not know whether the update takes place. A fused kernel returns without
a write if ``skip`` is exactly 1. Otherwise the old values are selected again after the step, from
copies of the parameters and of their state. State is initialized before the step, so that a skipped
first step leaves the values from which torch's first step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch

from dtensor.private_torch import (
    foreach_add_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
    without_compiler,
)
from dtensor.runtime.optimizer.optimizer_kind import step_without_hooks


def update(
    optimizer: Any,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    clip: torch.Tensor | None,
    skip: torch.Tensor | None,
    is_torch_class: bool,
) -> None:
    """Step the optimizer on pairs of (1-D parameter, gradient).

    ``clip``: for fused kernels only, which divide the gradients by it in place. ``skip``: f32[] on
    the parameters' device, for torch's classes only: if it is 1, no parameter and no state changes;
    otherwise it is 0.
    """
    if type(optimizer) in _DIRECT and _call_kernels(optimizer, pairs, clip, skip):
        return
    for parameter, gradient in pairs:
        parameter.grad = gradient
    if is_torch_class:
        optimizer.grad_scale = clip
    before = {} if skip is None else _copy_state(optimizer)
    # The step of a class that is not torch's may use the compiler.
    with torch.enable_grad(), without_compiler() if is_torch_class else nullcontext():
        optimizer.step() if is_torch_class else step_without_hooks(optimizer)
    for parameter, _ in pairs:
        parameter.grad = None
    if skip is not None:
        skipped = skip == 1
        for parameter, entries in before.items():
            values = {**optimizer.state[parameter], PARAMETER: parameter.detach()}
            for key, value in entries.items():
                torch.where(skipped, value, values[key], out=values[key])


PARAMETER = "parameter"


def _copy_state(optimizer: Any) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return copies of the parameters that have gradients, under the key PARAMETER, and of their
    state. First initialize the state as the class does in its first step."""
    copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            num_lists = len(signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(group, *([] for _ in range(num_lists)))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter]
                    if group.get("momentum") and isinstance(optimizer, torch.optim.SGD):
                        _start_momentum(state, parameter, group, may_skip=True)
                    values = {**state, PARAMETER: parameter}
                    copies[parameter] = {key: value.clone() for key, value in values.items()}
    return copies


_DIRECT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes whose fused kernel is called directly, without `step`, which takes half of the time if
tensors are small."""


def _call_kernels(
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    clip: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> bool:
    """Call the class's fused kernel once for each group. Return False, without an update, if a
    group does not use the fused kernel."""
    if not all(group["fused"] for group in optimizer.param_groups):
        return False
    gradients = {id(parameter): gradient for parameter, gradient in pairs}
    call = _call_sgd if isinstance(optimizer, torch.optim.SGD) else _call_adam
    calls: list[tuple[Any, Any, Any, Any]] = []
    steps: list[torch.Tensor] = []
    with torch.no_grad():
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if id(p) in gradients]
            if not parameters:
                continue
            states = [optimizer.state[parameter] for parameter in parameters]
            if call is _call_adam:
                for state, parameter in zip(states, parameters, strict=True):
                    _start_moments(state, parameter, group)
                    steps.append(state["step"])
            calls.append((group, parameters, [gradients[id(p)] for p in parameters], states))
        if steps:  # a list, since torch reads the value of a single tensor on the host
            foreach_add_(steps, 1 if skip is None else [1 - skip] * len(steps))
        for arguments in calls:
            call(*arguments, clip, skip)
    return True


def _start_moments(
    state: dict[str, torch.Tensor], parameter: torch.Tensor, group: Mapping[str, Any]
) -> None:
    """Initialize Adam's state of a parameter as torch does, if there is none."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[key] = torch.zeros_like(parameter)


def _start_momentum(
    state: dict[str, torch.Tensor],
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    *,
    may_skip: bool,
) -> bool:
    """Initialize SGD's momentum of a parameter with zeros if there is none. Return whether this is
    its first step, which sets the momentum to the gradient.

    If steps may be skipped, the host does not know the first step, and it is as any other: from
    zeros it gives the same momentum without dampening. Raises ValueError for dampening.
    """
    if "momentum_buffer" in state:
        return False
    if may_skip and group["dampening"]:
        raise ValueError("a first step of SGD with dampening cannot be skipped on the device")
    state["momentum_buffer"] = torch.zeros_like(parameter)
    return not may_skip


def _call_adam(
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    clip: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update the parameters of a group with one kernel call. The steps are counted already."""
    beta1, beta2 = group["betas"]
    kernel = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
    kernel(
        parameters,
        gradients,
        *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")),
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        **{key: group[key] for key in ("lr", "eps", "weight_decay", "amsgrad", "maximize")},
        beta1=beta1,
        beta2=beta2,
        grad_scale=clip,
        found_inf=skip,
    )


def _call_sgd(
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[dict[str, torch.Tensor]],
    clip: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update the parameters of a group with one kernel call. They all have a momentum, or none."""
    is_first = False
    for state, parameter in zip(states, parameters, strict=True) if group["momentum"] else ():
        is_first = _start_momentum(state, parameter, group, may_skip=skip is not None)
    fused_sgd_(
        parameters,
        gradients,
        [state["momentum_buffer"] for state in states] if group["momentum"] else [],
        **{key: group[key] for key in ("lr", "weight_decay", "momentum", "dampening")},
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=is_first,
        grad_scale=clip,
        found_inf=skip,
    )
