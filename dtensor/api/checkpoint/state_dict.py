"""State dicts of full tensors in torch's format, which can be loaded under any placement.

    state = gather_state_dict(model, opt)        # {"model": ..., "optimizer": ...}
    load_state_dict(model, opt, state)           # the same model, with other placements

"model" is `module.state_dict()` and "optimizer" is `opt.state_dict()`. Master weights are float32
entries "master_param" of the optimizer's state; without them, the next step makes them again.
"step", if a step was taken, is the number of the next training step, which random numbers depend
on. "attributes" has the attributes that the step of a user's optimizer class changes.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from typing import Any, NoReturn, cast

import torch

from dtensor.api.model.initial_values import labels_in_state
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import checked_optimizer
from dtensor.api.store.home import ModelHome
from dtensor.api.values.lazy_parameters import LazyOptimizerState, by_holder, label_of, without_hook
from dtensor.errors import PlanningError, check_kind
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.optimizer.elementwise.optimizer_rule import changed_attributes, set_attributes


class _GatheredState(dict[str, Any]):
    """The result of `gather_state_dict`: a dict of dicts whose KeyError names the inner dict that
    has the missing key. Its copies and pickles are plain dicts, which torch loads without
    dtensor."""

    def __missing__(self, key: object) -> NoReturn:
        inside = [name for name, value in self.items() if isinstance(value, dict) and key in value]
        fix = f"state[{inside[0]!r}][{key!r}]" if inside else f"one of {', '.join(self)}"
        raise KeyError(f"{key!r} is no entry of the state. fix: {fix}".replace("'", '"'))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle as an OrderedDict, which torch.load accepts with weights_only=True."""
        items: Iterator[tuple[str, Any]] = iter(self.items())
        return OrderedDict, (), None, None, items


def gather_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return the full state of the model and the optimizer, on the CPU. Waits for running steps.

    The controller's module and optimizer have the same values afterwards, unless they are on the
    meta device. Raises RuntimeError if values were lost with a launch that has ended.
    """
    check_parallel("gather_state_dict", model)
    optimizer = checked_optimizer(optimizer)
    with CALL_LOCK:
        return _gather_state(model, optimizer)


def _gather_state(model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Gather the values into the controller's tensors, and return them as a state dict."""
    model.look()
    with without_hook():
        for holder, tensors in by_holder(model.seen.tensors.values()):
            assert isinstance(holder, ModelHome)
            for wait in holder.wait_functions:  # afterwards a failed step no longer has a number
                wait()
            holder.refresh([label_of(tensor) for tensor in tensors])
            holder.saved = "the last was gathered", model.steps.present()
            if holder.session.cluster.device.type == "cuda":
                from dtensor.api.checkpoint.equal_copies import warn_of_unequal

                warn_of_unequal(holder, optimizer)()
        entries = model.module.state_dict()
        labels = labels_in_state(model.module, model.seen)
        on_meta = _gather_from_meta(model, {labels[key] for key, t in entries.items() if t.is_meta})
        values = {
            key: on_meta[labels[key]] if t.is_meta else t.detach().cpu().clone()
            for key, t in entries.items()
        }
    state = _GatheredState(model=values)
    if model.steps.present():
        state["step"] = model.steps.present()
    if optimizer is not None:
        state["optimizer"] = copy.deepcopy(_torch_state(optimizer))
        if attributes := changed_attributes(optimizer):
            state["attributes"] = attributes
    return state


def _gather_from_meta(model: ParallelModule, labels: Set[str]) -> dict[str, torch.Tensor]:
    """Return the full values of parameters and buffers that are on the meta device."""
    tensors, holders = model.seen.tensors, model.initial.holders
    gathered: dict[str, torch.Tensor] = {}
    for holder in {id(holders[n]): holders[n] for n in labels if n in holders}.values():
        for wait in holder.wait_functions:  # afterwards a failed sync is undone
            wait()
    for holder in {id(holders[n]): holders[n] for n in labels if n in holders}.values():
        gathered |= holder.gather(sorted(n for n in labels if holders.get(n) is holder))
        holder.unsaved = False
    initial = {n: model.initial.value(n, tensors[n]) for n in sorted(labels - gathered.keys())}
    return {**gathered, **{n: value.detach().cpu().clone() for n, value in initial.items()}}


def _torch_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with current values. This does not count as a user's read."""
    lazy: object = optimizer.state
    if not isinstance(lazy, LazyOptimizerState):
        return optimizer.state_dict()
    optimizer.state = lazy.plain()
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = cast(Any, lazy)


def load_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Load the result of `gather_state_dict`, or torch's state dicts, inside or outside a launch.

    Args:
        model: the model, with any placements.
        optimizer: None leaves its state as it is.
        state: ``{"model": ..., "optimizer": ...}``, with full tensors.

    The controller's tensors change in place; the ranks get the new values at the next step. Raises
    torch's errors for names and shapes that do not fit.
    """
    check_parallel("load_state_dict", model)
    if model.source is not None:
        raise PlanningError(
            "a replica has no values of its own to load.\n"
            "fix: dt.load_state_dict(policy, opt, state), then dt.sync(policy, actor)"
        )
    optimizer = checked_optimizer(optimizer)
    check_kind("the state", state, Mapping, "a dict", '{"model": ..., "optimizer": ...}')
    if "model" not in state:
        raise PlanningError(
            f"the state has no entry 'model', only {sorted(state)}; "
            f'fix: pass {{"model": ..., "optimizer": ...}}'
        )
    with CALL_LOCK:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            model.module.load_state_dict(state["model"])
        model.look()
        model.initial.load(model.module, model.seen, state["model"])
        if "step" in state:
            model.steps.restore(state["step"])
        if optimizer is not None and "optimizer" in state:
            # torch would keep the state's own tensors
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            _keep_values(optimizer, state["optimizer"])
            set_attributes(optimizer, state.get("attributes", {}))
        model.loads += 1


def _keep_values(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of state to the dtype and device of its parameter.

    It rounds master weights and their moments to 16 bits, and empties the state of a parameter on
    the meta device.
    """
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            cast_value = optimizer.state[parameter].get(key)
            if not (isinstance(value, torch.Tensor) and isinstance(cast_value, torch.Tensor)):
                continue
            if (cast_value.dtype, cast_value.device) != (value.dtype, value.device):
                optimizer.state[parameter][key] = value.detach().clone()
