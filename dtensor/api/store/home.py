"""The homes of a model's values: its state on a cluster, and the module's tensors meanwhile.

    model_home.keep("up.weight", tensor)  # its shards were put: the tensor is lazy from now on
    model_home.wrote({"up.weight"})            # a step changed the shards
    tensor.sum()                               # bring: gathered, written in place, plain again
    model_home.settle()                        # before the next step: if the tensor was written,
                                               # it is put anew; else it is evicted again
    model_home.come_home()                     # the launch ends: every value returns, in place

Each value has one home. A tensor that was put is a lazy remote tensor until the user reads it. A
tensor that was read is compared with a copy of the value that was brought, before the next program
runs, so a write through it is never missed. A step without reads in between checks one thing:
whether the tensors were written. A tensor that has left the module comes home with its state, and
leaves the ranks. An optimizer's state follows the same rules: `opt.state` is an
`LazyOptimizerState` while the ranks have it, and entries that were read are put anew. Names here
are labels (labels.py).

Tensors on the meta device have no memory to come home to: they stay on the ranks, and
`InitialValues.holder` knows their holder.

Not here: what is put where (session.py, optimizer_state.py), whole states in and out
(state_dict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.store import MeshRanks, Owner, TensorStore, buckets
from dtensor.api.values.lazy_parameters import (
    Entries,
    LazyOptimizerState,
    as_it_is,
    by_holder,
    evict,
    holder_of,
    label_of,
    make_plain,
    plainly,
)
from dtensor.daft import Cluster
from dtensor.errors import PlanningError
from dtensor.runtime.optimizer.elementwise.optimizer_rule import OptimizerRule
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_may_act

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

LOAD = "dt.load_state_dict(model, opt, state)"
_version = attrgetter("_version")


@dataclass(slots=True, repr=False)
class OptimizerHome:
    """One torch optimizer and its state on the ranks. The fields: its label among the model's
    values, whether the ranks hold masters, and ``optimizer.state``, first as the user gave it.

    ``parameters``: the labels of parameters that have state on the ranks; ``keys``: of the state,
    by group; ``rule``: the rule of its class; ``ghost``: the object that advances numbers on the
    optimizer itself; ``groups``: of labels, and ``trained``: those that the last plan updates;
    ``owner``: of its values in the store, by parameter and key, including those that are absent
    until a first step; ``updated``: those that the last plan updates; ``rest``: entries that no
    program here has used, perhaps ``on_disk``; ``placed``: the last plan.
    """

    optimizer: torch.optim.Optimizer
    label: str
    masters: bool
    keys: tuple[tuple[str, ...], ...]
    rule: OptimizerRule
    model_home: ModelHome
    given: InitVar[Entries]
    rest: Entries
    placed: Plan | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    owner: Owner[tuple[str, str]] = field(default_factory=Owner[tuple[str, str]])
    updated: frozenset[tuple[str, str]] = frozenset()
    on_disk: bool = False
    groups: tuple[tuple[str, ...], ...] = ()
    trained: frozenset[str] = frozenset()
    shadow: ShadowOptimizer | None = None
    state: LazyOptimizerState = field(init=False)

    def __post_init__(self, given: Entries) -> None:
        self.state = LazyOptimizerState(given, lambda: self.model_home.gather_optimizer(self))
        self.optimizer.state = cast(Any, self.state)

    @property
    def name(self) -> str:
        """The name of the ranks' optimizers in their tables."""
        return self.model_home.name(self.label)

    @property
    def current(self) -> bool:
        """Whether the ranks' state is still the optimizer's: the user has neither read nor replaced
        it."""
        held: object = self.optimizer.state
        return held is self.state and not self.state.touched

    def values(self, *, wait: bool = True) -> dict[tuple[str, str], StoredTensor]:
        """The state on the ranks, by parameter and key. A parameter's entries exist from its first
        step on. Waits for running steps. Entries that no program has updated are in ``rest``,
        whole."""
        for settle in self.model_home.settling if wait else ():
            settle()
        return {k: one for k, one in self.owner.stored.items() if self.owner.is_there(k)}

    def ended(self, updated: frozenset[tuple[str, str]]) -> None:
        """A step that updated these has ended without failure."""
        self.model_home.store.written(self.owner, updated)

    def take_rule(self, rule: OptimizerRule) -> None:
        """Use another rule from now on: its options have changed."""
        self.rule, shadow = rule, rule.shadow({})
        if shadow is not None and self.shadow is not None:
            shadow.parameters, shadow.state = self.shadow.parameters, self.shadow.state
        self.shadow = shadow

    def advance(self) -> Callable[[], None]:
        """A step was called: write its changes of the groups' options and of the attributes to the
        optimizer. Returns the function that reverts them, if the step is undone."""
        if self.shadow is None:
            return _nothing
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import advance

        return advance(self.optimizer, self.shadow, self.groups, self.trained)

    def come_home(self) -> None:
        if self.current:
            self.optimizer.state = self.state.plain()

    def let_go(self, labels: Set[str]) -> None:
        """Bring the state of these parameters home, since it is put no more, and delete it on the
        ranks."""
        left = {which: one for which, one in self.owner.stored.items() if which[0] in labels}
        if self.current:
            for parameter, entries in self.model_home.gather_values(self, left).items():
                self.rest.setdefault(parameter, {}).update(entries)
        self.model_home.store.forget(self.owner, left, delete=True)
        for label in labels & self.parameters.keys():
            del self.parameters[label]
        self.updated, self.placed = self.updated - left.keys(), None


@dataclass(slots=True, eq=False, repr=False)
class ModelHome:
    """A model's state on the ranks of a session's mesh: labels begin with ``prefix``.

    ``own``: label to the module's tensor whose shards were put, without those on meta; ``owner``:
    of parameters and buffers in the store, by label; ``gradients``: of the gradients that a step
    keeps, by name; ``stale``: labels whose shards are newer than the module's memory; ``touched``:
    label to a copy of the value that the user has read.
    """

    model: ParallelModule
    prefix: str
    session: MeshRanks
    loads: int
    owner: Owner[str] = field(default_factory=Owner[str])
    gradients: Owner[str] = field(default_factory=Owner[str])
    optimizers: dict[int, OptimizerHome] = field(default_factory=dict)  # by id(optimizer)
    placed: Plan | None = None  # the last that `place` was given: all its values are on the ranks
    own: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    stale: set[str] = field(default_factory=set[str])
    touched: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    changed: bool = False  # its values differ from the initial ones
    unsaved: bool = False  # and were not gathered since
    looked: int = 0  # the number of `model.seen` when it was settled
    lost: str = ""  # `gone`, once the launch has ended
    saved: tuple[str, int] = ("", 0)  # where the last copy of the state is, and its step
    settling: list[Callable[[], None]] = field(default_factory=list[Any])  # waits for its steps
    trained_by: dict[int, Any] = field(default_factory=dict)  # by id(optimizer), its last step
    _versions: dict[str, int] = field(default_factory=dict[str, int])
    _counted: list[Tensor] = field(default_factory=list[Tensor])  # as `_versions`, for speed
    _counts: list[int] = field(default_factory=list[int])
    _ahead: int = 1  # how many tensors the next read fetches

    @property
    def mesh(self) -> Mesh:
        return self.session.mesh

    @property
    def cluster(self) -> Cluster:
        return self.session.cluster

    @property
    def store(self) -> TensorStore:
        return self.session.launch.store

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The values on the ranks, by label."""
        return self.owner.stored

    def name(self, label: str) -> str:
        return f"{self.prefix}{label}"

    @property
    def gone(self) -> str:
        """Why the values are out of reach for good, or ""."""
        if not self.lost and self.cluster.failure is not None:
            return self._failed(self.cluster.failure)
        return self.lost

    @property
    def on_meta(self) -> bool:
        """Whether tensors of the model have no memory here."""
        return len(self.own) < len(self.stored)

    # -- the user's side --------------------------------------------------------------------------

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """See `lazy_parameters.ValueHolder`. Reads in order fetch more and more tensors at a
        time."""
        labels = [label_of(tensor) for tensor in tensors]
        if self.gone:
            name = self.model.seen.name(labels[0])
            raise RuntimeError(f"{name} {self.gone}") from self.cluster.failure
        if not self.stale.isdisjoint(labels):
            self.refresh([*labels, *self._following(labels[-1])])
            self._ahead *= 2
        with plainly():
            for label, tensor in zip(labels, tensors, strict=True):
                make_plain(tensor)
                self.touched[label] = tensor.detach().clone()

    def give_up(self, tensor: Tensor) -> None:
        """See `lazy_parameters.ValueHolder`: a lost value no longer belongs to this object."""

    def _following(self, label: str) -> list[str]:
        """Stale labels after this one, as many as a read fetches, and one bucket at most."""
        order = list(self.own)
        rest = [n for n in order[order.index(label) + 1 :] if n in self.stale][: self._ahead - 1]
        return list(next(buckets({label: self.stored[label] for label in rest}), {}))

    def refresh(self, labels: Iterable[str]) -> None:
        """Update their memory, in place, a bucket at a time; it does not count as a read."""
        known = self.stale & self.own.keys()
        wanted = [label for label in dict.fromkeys(labels) if label in known]
        self._refuse(self._written(wanted))
        with waits_may_act():  # signals may act
            self._fetch(wanted)

    def _fetch(self, wanted: Sequence[str]) -> None:
        for bucket in buckets({label: self.stored[label] for label in wanted}):
            with plainly():
                for label, value in self.gather([*bucket]).items():
                    tensor = self.own[label]
                    with torch.inference_mode() if tensor.is_inference() else nullcontext():
                        tensor.copy_(value)
            self.stale.difference_update(bucket)
            self._note_versions(bucket)

    def settle(self) -> None:
        """Before a program runs: put tensors that the user has written, and evict the others
        again."""
        if self.touched:
            self._settle_touched()
        if self.looked != self.model.seen.number:
            self._settle_changed()
        with as_it_is():
            written = list(map(_version, self._counted)) != self._counts
        if written:
            self._settle_written()
        if self.on_meta:  # another mesh may have that now
            holders = self.model.initial.holders
            self.forget([n for n in self.stored if holders.get(n, self) is not self])

    def _settle_touched(self) -> None:
        touched, self.touched = self.touched, {}
        changed: list[str] = []
        for label, shown in touched.items():
            tensor = self.own[label]
            for holder, _ in by_holder([tensor]):  # another mesh has it now
                holder.bring([tensor])
            if _same(tensor, shown):
                evict(tensor, self, label)
            else:
                changed.append(label)
        self._note_versions(touched)
        self.forget(changed)

    def _settle_changed(self) -> None:
        """A tensor that has left the module comes home with its state, and leaves the ranks. One
        without memory here stays on the ranks, for when it returns."""
        there = self.model.seen.tensors
        gone = [label for label in self.own if label not in there]
        self.refresh(gone)
        for home in self.optimizers.values():
            home.let_go(set(gone))
        for label in gone:
            if holder_of(self.own[label]) is self:
                make_plain(self.own[label])
        self.forget(gone, delete=True)
        self.session.drop()
        self.store.unsettle(self.owner, self.owner.settled.keys() - self.model.labels.known)
        self.looked, self.placed = self.model.seen.number, None

    def _settle_written(self) -> None:
        """Put tensors that were written through an older view; their memory must have been
        current."""
        written = self._written(self.own)
        self._refuse([label for label in written if label in self.stale])
        for label in written:
            if holder_of(self.own[label]) is self:
                make_plain(self.own[label])
        self.forget(written)

    def _written(self, labels: Iterable[str]) -> list[str]:
        """The labels whose tensors were written since their versions were noted."""
        known = self._versions
        return [n for n in labels if n in known and known[n] != _version_of(self.own[n])]

    def _refuse(self, written: Sequence[str]) -> None:
        """Refuse a write to memory that was stale."""
        if written:
            raise PlanningError(
                f"{self.model.seen.name(written[0])} was written through a view of it that was "
                f"taken before, whose memory was old: the value is on {self.mesh}.\n"
                f"fix: write through the parameter, as in `with torch.no_grad(): p.copy_(x)`, "
                f"or take the view anew after each step"
            )

    def forget(self, labels: Sequence[str], *, delete: bool = False) -> None:
        """Their shards are no longer valid; `MeshSession.place` puts the module's values."""
        if labels:
            self.store.forget(self.owner, labels, delete=delete)
            for label in labels:
                for known in (self.own, self._versions):
                    known.pop(label, None)
            self.stale.difference_update(labels)
            self.placed = None
            self._note_versions(())

    # -- the ranks' side --------------------------------------------------------------------------

    def keep(self, tensors: dict[str, Tensor]) -> None:
        """The shards of these tensors were put, and hold their values from now on."""
        for label, tensor in tensors.items():
            self.touched.pop(label, None)
            if self.cluster.device.type == "meta":
                continue  # it computes nothing: the values are here
            if tensor.is_meta:
                before = self.model.initial.holders.get(label)
                self.changed |= before is not None and before.changed
                self.model.initial.holders[label] = self
            else:
                self.own[label] = tensor
                evict(tensor, self, label)
        self._note_versions(self.own.keys() & tensors)

    def wrote(self, labels: frozenset[str], optimizer: OptimizerHome | None = None) -> None:
        """A program that was called changes these, and the optimizer's state."""
        if self.cluster.device.type != "meta":
            if optimizer is not None:
                optimizer.state.changed()
            self.stale |= labels
            self._ahead = 1
            self.changed = self.unsaved = True

    def gather(self, labels: Sequence[str]) -> dict[str, Tensor]:
        """The whole values, on the CPU. Waits for running steps."""
        if self.lost:
            raise RuntimeError(f"{self.model.seen.name(labels[0])} {self.lost}")
        values = self.store.get({label: self.stored[label] for label in labels})
        return {label: value for label, value in values if value is not None}

    def gather_optimizer(self, home: OptimizerHome) -> Entries:
        """Parameter to its state entries, whole, where the parameter is."""
        held = [p for group in home.optimizer.param_groups for p in group["params"]]
        gathered: Entries = {parameter: {} for parameter in held}  # in this order, as torch has it
        rest = home.rest
        if home.on_disk:
            from dtensor.api.values.on_disk import read_whole

            rest = {parameter: read_whole(entries) for parameter, entries in rest.items()}
        gathered |= {parameter: dict(entries) for parameter, entries in rest.items()}
        for parameter, entries in self.gather_values(home, home.owner.stored).items():
            gathered.setdefault(parameter, {}).update(entries)
        return {parameter: entries for parameter, entries in gathered.items() if entries}

    def gather_values(
        self, home: OptimizerHome, wanted: Mapping[tuple[str, str], StoredTensor]
    ) -> Entries:
        """Parameter to those of its state entries that are ``wanted`` and exist, whole."""
        gathered: Entries = {}
        for (label, key), value in self.store.get(wanted):
            if value is not None:
                entry, parameter = home.rule.entry(key), home.parameters[label]
                if entry.number:
                    value = entry.from_table(value)
                elif not parameter.is_meta:
                    value = value.to(parameter.device)
                gathered.setdefault(parameter, {})[key] = value
        return gathered

    # -- the end ----------------------------------------------------------------------------------

    def end(self, bring_home: bool) -> None:
        """The cluster is about to end."""
        failure = self.cluster.failure
        if failure is not None:
            self.leave(self._failed(failure))
        elif not bring_home and self.model.source is None:
            self.leave(
                f"is not here: its value was on {self.mesh}, in a launch that has ended with "
                f"bring_home=False.\n"
                f"fix: leave bring_home out, or call dt.gather_state_dict(model, opt) inside the "
                f"launch"
            )
        else:
            try:
                self.come_home()
            finally:
                if self.cluster.failure is not None:
                    self.leave(self._failed(self.cluster.failure))

    def come_home(self) -> None:
        """Bring every value home that can come, in place. A model on meta stays on the ranks, its
        optimizer's state too.

        PlanningError, when all is home, where a view of a stale value was written.
        """
        away = [label for label in self.own if label in self.stale]
        written = self._written(away)
        self._fetch(away)
        if not self.on_meta:
            for home in self.optimizers.values():
                home.come_home()
        self.leave(
            f"is on the meta device: its value was on {self.mesh}, in a launch that has ended.\n"
            f"fix: {self._remedy('the result of dt.gather_state_dict(model, opt) in the launch')}"
        )
        self._refuse(written)

    def leave(self, why: str) -> None:
        """Values that are only on the cluster are lost; ``why`` is the text after their name."""
        self.lost = why
        for home in self.optimizers.values():
            if home.current and home.state.stale:
                home.state.gone = f"the state of {type(home.optimizer).__name__} {why}"
            else:
                home.come_home()
        for label, tensor in self.own.items():
            if holder_of(tensor) is self and label not in self.stale:
                make_plain(tensor)
        holders = self.model.initial.holders
        for label in [label for label in holders if holders[label] is self and not self.changed]:
            del holders[label]  # a new one is the same

    def _failed(self, failure: Exception) -> str:
        """The text why values on a failed cluster are lost."""
        reason = str(failure).partition("\n")[0]
        return (
            f"is lost: its value was on {self.mesh}, which failed ({reason}).\n"
            f"fix: {self._remedy('the last result of dt.gather_state_dict')}"
        )

    def _remedy(self, state: str) -> str:
        return self.model.initial.remedy or f"{LOAD}, with {state}"

    # -- the check before each step -------------------------------------------------------

    def _note_versions(self, labels: Iterable[str]) -> None:
        for label in labels:
            if not self.own[label].is_inference():  # inference tensors have none
                self._versions[label] = _version_of(self.own[label])
        self._counted = [self.own[label] for label in self._versions]
        self._counts = list(self._versions.values())


def check_apart(tensors: Mapping[str, Tensor], written: Set[str]) -> None:
    """PlanningError where a tensor that a program changes shares memory with another one: on the
    ranks only one of them would change."""
    with as_it_is():
        each = {id(tensor): (name, tensor) for name, tensor in reversed(list(tensors.items()))}
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in each.values()
            if tensor.nbytes and not tensor.is_meta and _is_dense(tensor)
        )
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end and not written.isdisjoint((one, other)):
            raise PlanningError(
                f"{one} and {other} share memory without being one tensor, so on the ranks they "
                f"would change apart.\n"
                f"fix: make them one, as in `module.{other} = module.{one}`, or copy one of them"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill the memory from the first to the last."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(steps) == tensor.numel()


def _version_of(tensor: Tensor) -> int:
    with as_it_is():
        return tensor._version


def _same(tensor: Tensor, shown: Tensor) -> bool:
    alike = tensor.shape == shown.shape and tensor.dtype == shown.dtype
    return alike and tensor.device == shown.device and torch.equal(tensor, shown)


def _nothing() -> None:
    pass
