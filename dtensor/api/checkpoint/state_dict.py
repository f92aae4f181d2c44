"""State dicts of full tensors in torch's format, which can be loaded under any placement.

    state = gather_state_dict(model, opt)        # {"model": ..., "optimizer": ...}
    load_state_dict(model, opt, state)           # the same model, with other placements

"model" is `module.state_dict()` and "optimizer" is `opt.state_dict()`. Master weights are float32
entries "master_param" of the optimizer's state; without them, the next step makes them again. For a
list of optimizers, "optimizer" and "attributes" are lists with an item for each, in order. "step",
if a step was taken, is the number of the next training step, which random numbers depend on.
"attributes" has the attributes that the step of a user's optimizer class changes.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn, cast

import torch

from dtensor.api.model.initial_values import labels_in_state
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers, kinds_text
from dtensor.api.store.home import ModelHome
from dtensor.api.values.lazy_parameters import LazyOptimizerState, by_holder, label_of, without_hook
from dtensor.errors import PlanningError, check_kind
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.optimizer.elementwise.optimizer_rule import changed_attributes, set_attributes
from dtensor.runtime.optimizer.shard_optimizer import DELAYED


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


def gather_state_dict(model: ParallelModule, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Return the full state of the model and the optimizer, on the CPU. Waits for running steps.

    For a list of optimizers, "optimizer" is the list of their state dicts. The controller's module
    and optimizers have the same values afterwards, unless they are on the meta device.
    Raises RuntimeError if values were lost with a launch that has ended.
    """
    check_parallel("gather_state_dict", model)
    optimizers = checked_optimizers(optimizer)
    with CALL_LOCK:
        state = _gather_model(model, optimizers)
        states = [copy.deepcopy(_torch_state(each)) for each in optimizers]
        attributes = [changed_attributes(each) for each in optimizers]
        is_list = isinstance(optimizer, list | tuple)
        if states:
            state["optimizer"] = states if is_list else states[0]
        if any(attributes):
            state["attributes"] = attributes if is_list else attributes[0]
    return state


def _gather_model(
    model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Gather the model's values into the controller's tensors, and return them as a state dict with
    the number of the next step."""
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

                warn_of_unequal(holder, optimizers)()
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
    model: ParallelModule, optimizer: Optimizers | None, state: Mapping[str, Any]
) -> None:
    """Load the result of `gather_state_dict`, or torch's state dicts, inside or outside a launch.

    Args:
        model: the model, with any placements.
        optimizer: an optimizer, or a list of several; None leaves the state as it is.
        state: ``{"model": ..., "optimizer": ...}``, with full tensors. For several optimizers,
            "optimizer" is the list of their state dicts, in the same order.

    The controller's tensors change in place; the ranks get the new values at the next step. Raises
    torch's errors for names and shapes that do not fit, and PlanningError for state dicts of
    optimizers of another number or order.
    """
    check_parallel("load_state_dict", model)
    if model.source is not None:
        raise PlanningError(
            "a replica has no values of its own to load.\n"
            "fix: dt.load_state_dict(policy, opt, state), then dt.sync(policy, actor)"
        )
    optimizers = checked_optimizers(optimizer)
    check_kind("the state", state, Mapping, "a dict", '{"model": ..., "optimizer": ...}')
    if "model" not in state:
        raise PlanningError(
            f"the state has no entry 'model', only {sorted(state)}; "
            f'fix: pass {{"model": ..., "optimizer": ...}}'
        )
    saved = _states_of(optimizers, state) if optimizers and "optimizer" in state else []
    attributes = state.get("attributes", {})
    attributes = attributes if isinstance(attributes, list) else [attributes] * len(saved)
    with CALL_LOCK:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            model.module.load_state_dict(state["model"])
        model.look()
        model.initial.load(model.module, model.seen, state["model"])
        if "step" in state:
            model.steps.restore(state["step"])
        for i, saved_state in enumerate(saved):
            # torch would keep the state's own tensors
            optimizers[i].load_state_dict(copy.deepcopy(_without_delayed(saved_state)))
            _keep_values(optimizers[i], saved_state)
            set_attributes(optimizers[i], attributes[i])
        model.loads += 1


def _states_of(
    optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the state dict of each optimizer. Raises PlanningError for another number of state
    dicts, and for an order in which a state dict fits another optimizer and not its own."""
    present = state["optimizer"]
    saved = list(present) if isinstance(present, list | tuple) else [present]
    if len(saved) != len(optimizers):
        raise PlanningError(
            f"the state is of {len(saved)} optimizers, and {len(optimizers)} are passed: "
            f"{kinds_text(optimizers)}; nothing was loaded.\n"
            f"fix: pass the optimizers whose state was gathered, in the same order"
        )
    for i, saved_state in enumerate(saved):
        fits = [_fits(optimizer, saved_state) for optimizer in optimizers]
        if not fits[i] and any(fits):
            right, own = fits.index(True), type(optimizers[i]).__name__
            raise PlanningError(
                f"the state dict {i} of the list fits {type(optimizers[right]).__name__}, which "
                f"is optimizer {right}, and not {own}, which is optimizer {i}; nothing was "
                f"loaded.\nfix: pass the optimizers in the order of their state dicts"
            )
    return saved


def _fits(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> bool:
    """Return whether a state dict has the optimizer's groups, with the same options, and for each
    parameter with tensors a tensor of the parameter's shape."""
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    forms = [
        [(len(g["params"]), g.keys() - {"param_names"}) for g in gs]
        for gs in (groups, saved_groups)
    ]
    if forms[0] != forms[1]:
        return False
    numbers = [number for group in saved_groups for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = saved["state"].get(number, {}).values()
        shapes = {v.shape for v in values if isinstance(v, torch.Tensor) and v.ndim}
        with without_hook():
            if shapes and parameter.shape not in shapes:
                return False
    return True


def _without_delayed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without delayed gradients. Torch's optimizers cannot load a state that
    has nothing else, as it is after one step."""
    state: dict[Any, Any] = {n: e for n, e in saved["state"].items() if isinstance(n, str)}
    for number, entries in saved["state"].items():
        if number not in state and (kept := {k: v for k, v in entries.items() if k != DELAYED}):
            state[number] = kept
    return {**saved, "state": state}


def _keep_values(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of state to the dtype and device of its parameter, and add delayed
    gradients.

    It rounds master weights and their moments to 16 bits, and empties the state of a parameter on
    the meta device. Tensors in nested values are replaced too.
    """
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        saved_entries = saved["state"].get(number, {})
        if any(isinstance(v, Mapping | list | tuple | deque) for v in saved_entries.values()):
            optimizer.state[parameter].update(copy.deepcopy(dict(saved_entries)))
            continue
        for key, value in saved_entries.items():
            if key == DELAYED:
                optimizer.state[parameter][key] = value.detach().clone()
                continue
            cast_value = optimizer.state[parameter].get(key)
            if not (isinstance(value, torch.Tensor) and isinstance(cast_value, torch.Tensor)):
                continue
            if (cast_value.dtype, cast_value.device) != (value.dtype, value.device):
                optimizer.state[parameter][key] = value.detach().clone()
