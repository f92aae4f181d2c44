"""The optimizers that a step accepts, and the rule of each: its class is torch's, or was probed.

    state_elementwise(lion, masters=False)     # train_step(..., elementwise=True): probe it
    rule = rule_of(lion)                       # or PlanningError
    rule.keys(lion.param_groups[0])            # ("exp_avg",)
    rule.on_rank(masters=False)                # ShardOptimizer(...), for a rank's table

A torch class that is known to be elementwise is accepted, and so is a subclass that changes only
`__init__`. Any other class must be stated elementwise by the user, unless it is certified
(certified.py), and pass the probe. It is probed again when an option is of another kind than before
(`amsgrad` switched on, a first weight decay); a number such as the learning rate may change.

Not here: the probe (probe.py), the update (shard_optimizer.py).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dtensor.errors import PlanningError
from dtensor.runtime.optimizer.optimizer_kind import (
    OF_TORCH,
    OptimizerKind,
    StateEntry,
    bare_step,
    copied,
    options_of,
    own_attributes,
    plain_attributes,
    unwrapped,
)
from dtensor.runtime.optimizer.shard_optimizer import (
    ELEMENTWISE,
    NUMBERS,
    ShardOptimizer,
    hyperparameters,
    keys_of,
)

if TYPE_CHECKING:  # the probe is loaded where one is needed
    from dtensor.runtime.optimizer.elementwise.probe import Probed, ProbeReport
    from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

Optimizer = torch.optim.Optimizer


class OptimizerRule(Protocol):
    """The rule of an optimizer."""

    @property
    def name(self) -> str:
        """The name of its class in plans."""
        ...

    @property
    def report(self) -> ProbeReport | None:
        """The report of the probe; None for a torch class."""
        ...

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of a parameter's state, in a group with these options."""
        ...

    def entry(self, key: str) -> StateEntry:
        """The form of a key's entry."""
        ...

    def numbers(self) -> frozenset[str]:
        """The keys of entries that are one number for a parameter."""
        ...

    def on_rank(self, masters: bool) -> ShardOptimizer:
        """The updater for the table of a rank."""
        ...

    def told(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        """The options that a rank gets at each step."""
        ...

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> ShadowOptimizer | None:
        """The object that advances the numbers which a step changes on the optimizer itself; None
        if there are none. ``numbers``: of existing states, by label."""
        ...

    def makes_missing(
        self, optimizer: Optimizer, group: Mapping[str, Any], there: Set[str]
    ) -> bool:
        """Whether a step can continue from a state that has only these keys."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be called before the previous one has ended."""
        ...

    @property
    def attributes(self) -> frozenset[str]:
        """The names of the attributes that a step changes."""
        ...


@dataclass(frozen=True, slots=True)
class _Torchs:
    """A known torch class."""

    cls: type[Optimizer]
    report: None = None
    attributes: frozenset[str] = frozenset()
    runs_ahead: bool = True

    @property
    def name(self) -> str:
        return self.cls.__name__

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return keys_of(self.cls, group)

    def entry(self, key: str) -> StateEntry:
        return _NUMBER if key in NUMBERS else _LIKE

    def numbers(self) -> frozenset[str]:
        return NUMBERS

    def on_rank(self, masters: bool) -> ShardOptimizer:
        return ShardOptimizer(self.cls, masters)

    def told(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        return hyperparameters(optimizer)

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        return None

    def makes_missing(
        self, optimizer: Optimizer, group: Mapping[str, Any], there: Set[str]
    ) -> bool:
        return self.cls is torch.optim.SGD


_NUMBER, _LIKE = StateEntry(number=True), StateEntry(number=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Probed:
    """A class that passed the probe."""

    found: Probed

    @property
    def name(self) -> str:
        cls = self.found.kind.cls
        return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"

    @property
    def report(self) -> ProbeReport:
        return self.found.report

    @property
    def runs_ahead(self) -> bool:
        return not self.found.moves

    @property
    def attributes(self) -> frozenset[str]:
        return self.found.attributes_changed

    def keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        from dtensor.runtime.optimizer.elementwise.probe import group_key

        return self.found.keys[group_key(group, self.found.changed)]

    def entry(self, key: str) -> StateEntry:
        return self.found.kind.entries.get(key, _LIKE)

    def numbers(self) -> frozenset[str]:
        return frozenset(key for key, entry in self.found.kind.entries.items() if entry.number)

    def on_rank(self, masters: bool) -> ShardOptimizer:
        return ShardOptimizer(self.found.kind, masters)

    def told(self, optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
        return *hyperparameters(optimizer), plain_attributes(optimizer)

    def shadow(self, numbers: Mapping[str, Mapping[str, Any]]) -> ShadowOptimizer | None:
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

        return ShadowOptimizer(self.found.kind, numbers) if self.found.moves else None

    def makes_missing(
        self, optimizer: Optimizer, group: Mapping[str, Any], there: Set[str]
    ) -> bool:
        """A trial on a parameter of one element."""
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import GRADIENT

        kind, parameter = self.found.kind, torch.nn.Parameter(torch.full((1,), 0.5))
        parameter.grad = torch.full((1,), GRADIENT)
        options = {**copied(options_of(group)), "params": [parameter]}
        trial = kind.make([options], copied(plain_attributes(optimizer)))
        trial.state[parameter] = {k: kind.entries[k].begun() for k in there if k in kind.entries}
        try:
            bare_step(trial)
        except Exception:  # it needs a missing entry
            return False
        return True


def check_optimizer(optimizer: Optimizer) -> None:
    """PlanningError unless it is torch's, certified, or was stated to be elementwise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanningError(
            f"the optimizer is {optimizer!r}, not a torch.optim optimizer; "
            f"fix: torch.optim.AdamW(model.parameters())"
        )
    if known_class(optimizer) is None and optimizer not in _STATED and not _certified(optimizer):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        kind = type(optimizer)
        if kind not in ELEMENTWISE and kind.__module__.startswith("torch.optim"):
            reason = (
                "needs sparse gradients, and those of a step are dense"
                if kind is torch.optim.SparseAdam
                else "updates an element from others than its own gradient and state, so on shards "
                "it would give other numbers"
            )
            raise PlanningError(
                f"{kind.__name__} {reason}.\n  known: {known}\n"
                f"fix: one of these, as torch.optim.AdamW(model.parameters())"
            )
        raise PlanningError(
            f"{type(optimizer).__name__} is not known to be elementwise, so on shards it could "
            f"give other numbers than on whole parameters.\n  known: {known}\n"
            f"fix: train_step(..., elementwise=True), if each element of a parameter is updated "
            f"from its own gradient and state alone"
        )


def state_elementwise(optimizer: Optimizer) -> None:
    """Note the user's statement that this optimizer is elementwise; the probe will test it."""
    if isinstance(optimizer, torch.optim.Optimizer) and known_class(optimizer) is None:
        _STATED[optimizer] = True


def rule_of(optimizer: Optimizer, masters: bool | None = None) -> OptimizerRule:
    """The present rule of an optimizer; it is probed anew if its options are of other kinds than
    before. ``masters``: whether a step updates float32 copies, None for the last value.
    PlanningError if the probe fails."""
    last = _RULES.get(optimizer)
    if isinstance(last, _Torchs):
        return last
    if last is None:
        check_optimizer(optimizer)
        known = known_class(optimizer)
        if known is not None:
            _RULES[optimizer] = probed = _Torchs(known)
            return probed
    from dtensor.runtime.optimizer.elementwise.probe import asked_of, probe

    with_masters = _MASTERS.get(optimizer, False) if masters is None else masters
    _MASTERS[optimizer] = with_masters
    known = _PROBED.setdefault(type(optimizer), [])
    before = last.found if isinstance(last, _Probed) else None
    for probed in [*([before] if before else []), *known]:
        asked = asked_of(optimizer, with_masters, probed.changed, probed.attributes_changed)
        if asked == probed.seen:
            break
    else:
        probed = probe(optimizer, with_masters)
        known.append(probed)
    kind = OptimizerKind.of(optimizer)
    if last is not None and before is not None and probed is before and kind.alike(before.kind):
        return last
    rule = _Probed(replace(probed, kind=replace(kind, entries=probed.kind.entries)))
    _RULES[optimizer] = rule
    return rule


_STATED: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
_MASTERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
_RULES: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerRule] = (
    weakref.WeakKeyDictionary()
)
_PROBED: weakref.WeakKeyDictionary[type, list[Probed]] = weakref.WeakKeyDictionary()


def known_rule(optimizer: Optimizer) -> OptimizerRule | None:
    """The rule when a step was last made or called."""
    return _RULES.get(optimizer)


def changed_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that its steps change, which no state dict has."""
    rule = _RULES.get(optimizer)
    names = rule.attributes if rule is not None else ()
    return {k: copied(vars(optimizer)[k]) for k in sorted(names) if k in vars(optimizer)}


def python_numbers(optimizer: Optimizer) -> dict[str, str]:
    """The keys of its state whose entries are Python numbers, which ranks have as tensors, and the
    names of their types."""
    rule = _RULES.get(optimizer)
    entries = rule.found.kind.entries if isinstance(rule, _Probed) else {}
    return {k: e.python.__name__ for k, e in entries.items() if e.python is not None}


def give_attributes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Set those attributes of `changed_attributes` that the optimizer has."""
    for name in saved.keys() & plain_attributes(optimizer).keys():
        setattr(optimizer, name, copied(saved[name]))


def state_tensors(optimizer: Optimizer) -> int:
    """How many tensors of a parameter's shape the state will hold, from class and options."""
    rule = rule_of(optimizer)
    groups = optimizer.param_groups if isinstance(rule, _Probed) else [optimizer.defaults]
    return max(sum(not rule.entry(key).number for key in rule.keys(group)) for group in groups)


def _certified(optimizer: Optimizer) -> bool:
    from dtensor.runtime.optimizer.elementwise.certified import certified

    return certified(optimizer)


# -- torch's classes ----------------------------------------------------------------------------

_OF_A_CLASS = frozenset(
    {
        *("__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__dict__"),
        *("__weakref__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
        *("__parameters__", "__slots__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__conditional_annotations__"),
    }
)


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The torch class whose step this is: its own, or a parent from which it differs only in
    `__init__`, over all its bases and on the object."""
    mro = type(optimizer).__mro__
    at = next((i for i, base in enumerate(mro) if base in ELEMENTWISE), None)
    if at is None or mro[at:] != mro[at].__mro__:
        return None
    parent = mro[at]
    for base in mro[:at]:
        for name, value in vars(base).items():
            hooked = name == "step" and inspect.unwrap(value) is inspect.unwrap(unwrapped(parent))
            if name not in _OF_A_CLASS and not hooked:
                return None
    attributes = own_attributes(optimizer)  # a scheduler's step is not among them
    shadows = any(hasattr(parent, name) for name in attributes if name not in OF_TORCH)
    return None if shadows else parent
