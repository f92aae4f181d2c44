"""The user's optimizer on the controller: names of its parameters, hooks and schedulers.

    groups = GroupNames(model, (muon, adamw))
    groups()                        # ((("up.weight", "down.weight"),), (("up.bias",),))
    step_without_gradients(opt)     # after each step on the ranks

The ranks run the updates; schedulers and hooks on the controller only need to notice a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.optim.optimizer as hooks

from dtensor.api.model.labels import ModuleSnapshot
from dtensor.api.model.parallel import ParallelModule, foreign_parameter_error
from dtensor.api.values.lazy_parameters import without_hook
from dtensor.errors import PlanningError
from dtensor.runtime.optimizer.elementwise.optimizer_rule import known_rule


class GroupNames:
    """Returns the names of the parameters of each group of each optimizer, as they are at the call.

    A parameter that was removed from the module is left out. Raises PlanningError for a parameter
    that never was in the module, and for a parameter of two optimizers.
    """

    def __init__(self, model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.key: object = None  # of ``names``: the module's contents, the ids of the parameters
        self.names: tuple[tuple[tuple[str, ...], ...], ...] = ()

    def __call__(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Return the names by optimizer and group, computed again if the module or a group has
        changed."""
        seen = self.model.seen
        ids = [[[*map(id, g["params"])] for g in o.param_groups] for o in self.optimizers]
        if (seen.number, ids) != self.key:
            check_parameters(self.model, self.optimizers)
            self.names = tuple(
                tuple(tuple(self._names(group["params"], seen)) for group in each.param_groups)
                for each in self.optimizers
            )
            self.key = seen.number, ids
        return self.names

    def _names(self, parameters: Sequence[torch.Tensor], seen: ModuleSnapshot) -> Iterator[str]:
        """Yield the names of the parameters that are still in the module."""
        for parameter in parameters:
            label = self.model.labels.of(parameter)
            if label is not None and label in seen.names:
                yield seen.names[label]


def check_parameters(model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise PlanningError for a parameter that never was in the module, and for a parameter of two
    optimizers."""
    numbers: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            label = model.labels.of(parameter)
            if label is None:
                raise foreign_parameter_error(optimizer, parameter)
            first = numbers.setdefault(label, number)
            if first != number:
                kind, own = type(optimizers[first]).__name__, type(optimizer).__name__
                raise PlanningError(
                    f"{model.seen.name(label)} is a parameter of two optimizers, and each would "
                    f"update it: {kind}, optimizer {first} of the list, and {own}, optimizer "
                    f"{number}.\n"
                    f"fix: build each optimizer over other parameters, such as the matrices "
                    f"[p for p in model.parameters() if p.ndim == 2] and the rest"
                )


def refuse_early_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanningError if the optimizer has a pre-hook, which would see no gradients."""
    if optimizer._optimizer_step_pre_hooks or hooks._global_optimizer_pre_hooks:
        raise PlanningError(
            f"the {type(optimizer).__name__} has a hook before its step, which would find no "
            f"gradients: they are on the ranks, where the update runs.\n"
            f"fix: remove the hook; clip_grad_norm= clips, step.gradients() gives gradients"
        )


def step_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer without gradients, so that schedulers (which replace its `step`) and hooks
    notice the step. No parameter changes."""
    rule = known_rule(optimizer)
    if rule is not None and rule.report is not None:  # of the user's own class
        _notify_observers(optimizer)
        return
    if "step" not in vars(optimizer) and not _has_hooks(optimizer):
        return
    with without_hook():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
    if _has_hooks(optimizer):  # which may read parameters
        optimizer.step()
    else:
        with without_hook():
            optimizer.step()
    for parameter, grad in gradients:
        parameter.grad = grad


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_post_hooks or hooks._global_optimizer_post_hooks)


def _notify_observers(optimizer: torch.optim.Optimizer) -> None:
    """Do what a step does for schedulers and hooks, without calling `step` of the user's class,
    which may change attributes of the optimizer."""
    if "step" in vars(optimizer):  # a scheduler has replaced `step`
        optimizer._opt_called = True  # type: ignore[attr-defined]
    for post_hooks in (optimizer._optimizer_step_post_hooks, hooks._global_optimizer_post_hooks):
        for hook in list(post_hooks.values()):
            hook(optimizer, (optimizer,), {})
