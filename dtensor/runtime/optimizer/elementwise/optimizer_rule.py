"""Decide which optimizers a train step accepts, and describe the state of each by a rule.

    rule = rule_of(lion)                       # raises PlanningError if both probes fail
    rule.owned                                 # False: its update is elementwise
    rule.keys(lion.param_groups[0])            # ("exp_avg",)
    rule.on_rank(masters=False)                # ShardOptimizer(...), for a rank's table
    rule_of(muon).owned                        # True: it needs whole parameters

A torch class in ELEMENTWISE is accepted, and so is a subclass that changes only `__init__`. Any
other class must pass the probe of elementwise updates (probe.py), or the probe of updates per
parameter (per_parameter.py) unless the user stated that it is elementwise. It is probed again if an
option changes in kind (`amsgrad` switched on, a first weight decay), but not for a new number such
as another learning rate.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow
from dtensor.private_torch import DisableTorchFunctionSubclass, pytree
from dtensor.runtime.optimizer.optimizer_kind import (
    TORCH_ATTRIBUTES,
    OptimizerKind,
    StateEntry,
    copy_plain,
    options_of,
    own_attributes,
    plain_attributes,
    split_attributes,
    step_without_hooks,
    text_entries,
    unwrapped_step,
)
from dtensor.runtime.optimizer.shard_optimizer import (
    ELEMENTWISE,
    NUMBERS,
    STATE,
    ShardOptimizer,
    hyperparameters,
    keys_of,
)

if TYPE_CHECKING:  # most programs never import the probe
    from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer
    from dtensor.runtime.optimizer.elementwise.trial import Probed, ProbeReport
    from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer
    from dtensor.sharding.plan.request import UpdateCost

Optimizer = torch.optim.Optimizer


class OptimizerRule(Protocol):
    """The properties of the user's optimizer on which planning and training depend."""

    @property
    def name(self) -> str:
        """The name of the optimizer's class, as plans print it."""
        ...

    @property
    def owned(self) -> bool:
        """Whether an update needs a whole parameter, so that one rank owns it and its state."""
        ...

    @property
    def report(self) -> ProbeReport | None:
        """The report of the probe, or None for a torch class."""
        ...

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of a parameter's state in a group with these options."""
        ...

    def entry(self, key: str) -> StateEntry:
        """Return the form of the state entry ``key``."""
        ...

    def numbers(self) -> frozenset[str]:
        """Return the keys of the state entries that are one number per parameter."""
        ...

    def on_rank(self, masters: bool) -> ShardOptimizer | OwnedOptimizer:
        """Return a new optimizer for a rank's table."""
        ...

    def sent_settings(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        """Return the options (and attributes, of a probed class) that ranks receive for a step."""
        ...

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> ShadowOptimizer | None:
        """Return a shadow that computes how steps change the optimizer's options and attributes, or
        None if steps change none. ``numbers``: existing state entries, by label."""
        ...

    def creates_missing_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], present: Set[str]
    ) -> bool:
        """Return whether a step itself creates the missing entries of a state with only
        ``present``."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether the controller may submit a step before the previous step has ended."""
        ...

    @property
    def attributes(self) -> frozenset[str]:
        """The names of the optimizer's attributes that a step changes."""
        ...


@dataclass(frozen=True, slots=True)
class _TorchRule:
    """The rule of a class in ELEMENTWISE."""

    cls: type[Optimizer]
    report: None = None
    attributes: frozenset[str] = frozenset()
    runs_ahead: bool = True
    owned: bool = False

    @property
    def name(self) -> str:
        return self.cls.__name__

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return keys_of(self.cls, group)

    def entry(self, key: str) -> StateEntry:
        return _PER_PARAMETER if key in NUMBERS else _PER_ELEMENT

    def numbers(self) -> frozenset[str]:
        return NUMBERS

    def on_rank(self, masters: bool) -> ShardOptimizer:
        return ShardOptimizer(self.cls, masters)

    def sent_settings(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        return hyperparameters(optimizer)

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        return None

    def creates_missing_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], present: Set[str]
    ) -> bool:
        return self.cls is torch.optim.SGD


_PER_PARAMETER, _PER_ELEMENT = StateEntry(number=True), StateEntry(number=False)


@dataclass(frozen=True, slots=True, eq=False)
class _ProbedRule:
    """The rule of a class that passed a probe."""

    probed: Probed
    owned: bool = False

    @property
    def name(self) -> str:
        cls = self.probed.kind.cls
        package = cls.__module__.partition(".")[0]
        return cls.__qualname__ if package == "torch" else f"{package}.{cls.__qualname__}"

    @property
    def report(self) -> ProbeReport:
        return self.probed.report

    @property
    def runs_ahead(self) -> bool:
        return not self.probed.changes_optimizer

    @property
    def attributes(self) -> frozenset[str]:
        return self.probed.attributes_changed

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        from dtensor.runtime.optimizer.elementwise.trial import group_key

        return self.probed.keys[group_key(group, self.probed.changed)]

    def entry(self, key: str) -> StateEntry:
        return self.probed.kind.entries.get(key, _PER_ELEMENT)

    def numbers(self) -> frozenset[str]:
        return frozenset(key for key, entry in self.probed.kind.entries.items() if entry.number)

    def on_rank(self, masters: bool) -> ShardOptimizer:
        return ShardOptimizer(self.probed.kind, masters)

    def sent_settings(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        return *hyperparameters(optimizer), plain_attributes(optimizer)

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> ShadowOptimizer | None:
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

        return ShadowOptimizer(self.probed.kind, numbers) if self.probed.changes_optimizer else None

    def creates_missing_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], present: Set[str]
    ) -> bool:
        """Return whether the optimizer's step creates missing state entries. Found by one step on a
        one-element parameter that has only the entries ``present``."""
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import SAMPLE_GRADIENT

        kind, parameter = self.probed.kind, torch.nn.Parameter(torch.full((1,), 0.5))
        parameter.grad = torch.full((1,), SAMPLE_GRADIENT)
        options = {**copy_plain(options_of(group)), "params": [parameter]}
        trial = kind.make([options], copy_plain(plain_attributes(optimizer)))
        trial.state[parameter] = {k: kind.entries[k].sample() for k in present if k in kind.entries}
        try:
            step_without_hooks(trial)
        except Exception:  # the step reads a missing entry
            return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _OwnedRule(_ProbedRule):
    """The rule of a class that needs whole parameters. A rank's table has one value for the whole
    state of a parameter (owned/packed_state.py)."""

    owned: bool = True
    masters: bool = False

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (STATE,)

    def entry(self, key: str) -> StateEntry:
        return _PACKED if key == STATE else _PER_ELEMENT

    def on_rank(self, masters: bool) -> OwnedOptimizer:
        from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer

        return OwnedOptimizer(self.probed.kind, masters)

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> ShadowOptimizer | None:
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

        if not self.probed.changes_optimizer:
            return None
        probed = self.probed
        return ShadowOptimizer(probed.kind, numbers, {}, probed.changed, self.masters, probed.exact)

    def creates_missing_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], present: Set[str]
    ) -> bool:
        return True  # the state of a parameter is complete or absent

    def cost(
        self, group: Mapping[str, Any], attributes: Mapping[str, Any], parameter: Tensor
    ) -> UpdateCost:
        """Return the cost of one update of a parameter of a group with these options, without its
        float32 master. ``group``, ``attributes``: of the user's optimizer."""
        from dtensor.runtime.optimizer.elementwise.trial import group_key
        from dtensor.runtime.optimizer.owned.update_cost import update_cost

        probed, costs = self.probed, self.probed.costs
        with DisableTorchFunctionSubclass():  # does not fetch lazy parameters
            shape, dtype = tuple(parameter.shape), parameter.dtype
        if self.masters and is_narrow(dtype):
            dtype = torch.float32  # of the master, which is updated
        key = group_key(group, probed.changed), shape, dtype
        if key not in costs:
            options = probed.kind.new_options(options_of(group), probed.changed)
            costs[key] = update_cost(probed.kind, options, attributes, shape, dtype)
        return costs[key]


_PACKED = StateEntry(number=False, packed=True)


def state_elementwise(optimizer: Optimizer) -> None:
    """Record the user's statement that this optimizer is elementwise. The probe will test it."""
    if known_class(optimizer) is None:
        _STATED_ELEMENTWISE[optimizer] = True


def rule_of(optimizer: Optimizer, masters: bool | None = None) -> OptimizerRule:
    """Return the rule of the optimizer with its current options, probing the class if necessary.

    ``masters``: whether steps update float32 master weights; None means the last value. Raises
    PlanningError if the optimizer is not accepted or the probe fails.
    """
    last_rule = _RULES.get(optimizer)
    if isinstance(last_rule, _TorchRule):
        return last_rule
    if last_rule is None:
        known = known_class(optimizer)
        if known is not None:
            _RULES[optimizer] = probed = _TorchRule(known)
            return probed
    from dtensor.runtime.optimizer.elementwise.trial import probe_key

    with_masters = _MASTERS.get(optimizer, False) if masters is None else masters
    _MASTERS[optimizer] = with_masters
    known = _PROBED_BY_CLASS.setdefault(type(optimizer), [])
    last_probed = last_rule.probed if isinstance(last_rule, _ProbedRule) else None
    for probed in [*([last_probed] if last_probed else []), *known]:
        changed, owned = (probed.changed, probed.attributes_changed), probed.owned
        if owned and optimizer in _STATED_ELEMENTWISE:
            continue
        if probe_key(optimizer, with_masters, *changed, owned) == probed.key:
            break
    else:
        probed = _classify(optimizer, with_masters)
        known.append(probed)
    kind = OptimizerKind.of(optimizer)
    if (
        last_rule is not None
        and last_probed is not None
        and probed is last_probed
        and kind.equals(last_probed.kind)
    ):
        return last_rule
    probed = replace(probed, kind=replace(kind, entries=probed.kind.entries))
    rule = _OwnedRule(probed, masters=with_masters) if probed.owned else _ProbedRule(probed)
    _RULES[optimizer] = rule
    return rule


def _classify(optimizer: Optimizer, masters: bool) -> Probed:
    """Return the result of the first probe that the optimizer passes. Raises PlanningError with the
    reason if its updates are neither elementwise nor per parameter."""
    from dtensor.runtime.optimizer.elementwise.probe import probe

    try:
        return probe(optimizer, masters)
    except PlanningError as error:
        not_elementwise = error
    from dtensor.runtime.optimizer.elementwise.per_parameter import probe_parameters

    try:
        probed = probe_parameters(optimizer, masters)
    except PlanningError:
        if optimizer in _STATED_ELEMENTWISE:
            raise not_elementwise from None
        raise
    if optimizer in _STATED_ELEMENTWISE:
        fact = str(not_elementwise).partition("\nfix: ")[0]
        raise PlanningError(f"{fact}\nfix: leave out elementwise=True, so that one rank updates it")
    return probed


_STATED_ELEMENTWISE: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = (
    weakref.WeakKeyDictionary()
)
_MASTERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
_RULES: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerRule] = (
    weakref.WeakKeyDictionary()
)
_PROBED_BY_CLASS: weakref.WeakKeyDictionary[type, list[Probed]] = weakref.WeakKeyDictionary()


def host_reads(optimizer: Optimizer) -> str:
    """Return why updates by the optimizer with its current options read values of a GPU on the
    host, or "" if they do not."""
    rule, groups = rule_of(optimizer), optimizer.param_groups
    if not isinstance(rule, _TorchRule):
        return f"the step of {rule.name} may read values"
    if rule.cls is torch.optim.Adagrad:
        return "Adagrad counts its steps on the host"
    if any(group.get("momentum") and group.get("dampening") for group in groups):
        return "the first step of SGD with dampening differs from the later ones"
    return ""


def known_rule(optimizer: Optimizer) -> OptimizerRule | None:
    """Return the last result of `rule_of` for this optimizer, or None."""
    return _RULES.get(optimizer)


def changed_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that steps change. An optimizer's `state_dict` does not have them."""
    rule = _RULES.get(optimizer)
    names = rule.attributes if rule is not None else ()
    return {k: copy_plain(vars(optimizer)[k]) for k in sorted(names) if k in vars(optimizer)}


def python_numbers(optimizer: Optimizer) -> dict[str, str]:
    """Return the state keys whose entries are Python numbers, with the names of their types. Ranks
    store these entries as tensors."""
    rule = _RULES.get(optimizer)
    entries = rule.probed.kind.entries if isinstance(rule, _ProbedRule) else {}
    return {k: e.python.__name__ for k, e in entries.items() if e.python is not None}


def saved_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a checkpoint has besides options and the state of parameters: the attributes that
    steps change, and the state under text keys. A tensor of one element is a dict."""

    def as_dict(tensor: Tensor) -> Any:
        is_one = tensor.numel() == 1
        return dict(zip(_ONE, (tensor.item(), tensor.dtype, tensor.shape))) if is_one else tensor

    attributes = {**changed_attributes(optimizer), **text_entries(optimizer)}
    return pytree.tree_map_only(Tensor, as_dict, attributes)


_ONE = "one element", "dtype", "shape"
"""The keys of a dict that is a tensor of one element in a checkpoint."""


def set_attributes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Set `changed_attributes` or `saved_attributes`, except attributes that the optimizer
    lacks."""

    def is_one(value: Any) -> bool:
        return isinstance(value, dict) and tuple(value) == _ONE

    def value_of(value: Any) -> Any:
        if not is_one(value):
            return copy_plain(value)
        number, dtype, shape = value.values()
        return torch.full(tuple(shape), number, dtype=dtype)

    tensors = pytree.tree_map(value_of, dict(saved), is_leaf=is_one)
    attributes, by_text = split_attributes(tensors)
    for name in attributes.keys() & plain_attributes(optimizer).keys():
        setattr(optimizer, name, attributes[name])
    optimizer.state.update(cast(Any, by_text))


def state_tensors(optimizer: Optimizer) -> int:
    """Return how many tensors of the parameter's shape the state of each parameter will hold."""
    rule = rule_of(optimizer)
    groups = optimizer.param_groups if isinstance(rule, _ProbedRule) else [optimizer.defaults]
    return max(sum(not rule.entry(key).number for key in rule.keys(group)) for group in groups)


def owned_costs(
    optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, UpdateCost] | None:
    """Return the cost of the update of each parameter, by label; None if the optimizer is
    elementwise. ``parameters``: the optimizer's parameters, by label."""
    rule = rule_of(optimizer)
    if not isinstance(rule, _OwnedRule):
        return None
    attributes = plain_attributes(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {label: rule.cost(groups[id(p)], attributes, p) for label, p in parameters.items()}


# -- torch's classes ----------------------------------------------------------------------------

_CLASS_ATTRIBUTES = frozenset(
    {
        *("__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__dict__"),
        *("__weakref__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
        *("__parameters__", "__slots__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__conditional_annotations__"),
    }
)


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class in ELEMENTWISE whose step this optimizer runs, or None.

    It is the optimizer's class, or a base class of it, if neither a subclass nor the object changes
    anything other than `__init__`.
    """
    mro = type(optimizer).__mro__
    index = next((i for i, base in enumerate(mro) if base in ELEMENTWISE), None)
    if index is None or mro[index:] != mro[index].__mro__:
        return None
    parent = mro[index]
    for base in mro[:index]:
        for name, value in vars(base).items():
            is_torch_step = name == "step" and inspect.unwrap(value) is inspect.unwrap(
                unwrapped_step(parent)
            )
            if name not in _CLASS_ATTRIBUTES and not is_torch_step:
                return None
    attributes = own_attributes(optimizer)  # without the step that a scheduler has wrapped
    is_overridden = any(
        hasattr(parent, name) for name in attributes if name not in TORCH_ATTRIBUTES
    )
    return None if is_overridden else parent
