"""A model's state on the ranks, and the module's lazy tensors while it is there.

    model_home.make_lazy({"up.weight": tensor})  # its shards were put: the ranks have its value
    model_home.record_write({"up.weight"})       # a step changed the shards: the memory is stale
    tensor.sum()                                 # bring: gather, write in place, make plain
    model_home.settle()                          # before a step: evict it; if written, put it again
    model_home.come_home()                       # the launch ends: gather every value in place

A tensor that the user read is compared, before the next program, with a copy of the value that was
gathered, so that no write is missed. Tensors on the meta device have no memory: they stay on the
ranks, and `InitialValues.holders` names their holder. Names here are labels (labels.py).
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
    by_holder,
    evict,
    holder_of,
    label_of,
    make_plain,
    without_fetch,
    without_hook,
)
from dtensor.daft import Cluster
from dtensor.errors import PlanningError
from dtensor.runtime.optimizer.elementwise.optimizer_rule import OptimizerRule
from dtensor.runtime.optimizer.owned.packed_state import unpack
from dtensor.runtime.optimizer.shard_optimizer import DELAYED, MASTER
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_handle_signals

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank_builder import OptimizerRole
    from dtensor.runtime.optimizer.elementwise.shadow_optimizer import ShadowOptimizer

LOAD = "dt.load_state_dict(model, opt, state)"
_version = attrgetter("_version")


@dataclass(slots=True, repr=False)
class OptimizerHome:
    """One torch optimizer and its state on the ranks. While the ranks have the state,
    ``optimizer.state`` is a `LazyOptimizerState`."""

    optimizer: torch.optim.Optimizer
    label: str  # the optimizer's label among the model's values
    masters: bool  # whether the ranks hold master weights
    keys: tuple[tuple[str, ...], ...]  # the keys of the state, by parameter group
    rule: OptimizerRule
    model_home: ModelHome
    user_state: InitVar[Entries]  # `optimizer.state` as the user has set it
    unplaced: Entries  # entries that no program here has used; still on disk if `on_disk`
    placed: Plan | None = None  # the last plan whose state was put
    parameters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # with state on ranks
    # the stored state by (label, key), including values that are absent until the first step:
    owner: Owner[tuple[str, str]] = field(default_factory=Owner[tuple[str, str]])
    updated: frozenset[tuple[str, str]] = frozenset()  # the state that the last plan updates
    on_disk: bool = False
    groups: tuple[tuple[str, ...], ...] = ()  # the labels of each parameter group
    trained: frozenset[str] = frozenset()  # labels of the parameters that the last plan updates
    shadow: ShadowOptimizer | None = None  # advances the numbers on the optimizer itself
    state: LazyOptimizerState = field(init=False)
    role: OptimizerRole = field(init=False)  # the optimizer in programs of the last plan

    def __post_init__(self, user_state: Entries) -> None:
        self.state = LazyOptimizerState(user_state, lambda: self.model_home.gather_optimizer(self))
        self.optimizer.state = cast(Any, self.state)

    @property
    def name(self) -> str:
        """The name of the ranks' optimizers in their tables."""
        return self.model_home.name(self.label)

    @property
    def current(self) -> bool:
        """Whether the user has neither read nor replaced ``optimizer.state`` since it was put."""
        present: object = self.optimizer.state
        return present is self.state and not self.state.touched

    def values(self, *, wait: bool = True) -> dict[tuple[str, str], StoredTensor]:
        """Return the state on the ranks, by (label, key): values that a step has made, or that were
        put. Waits for running steps, unless ``wait`` is False. The state that no program has
        updated is in ``unplaced``."""
        for settle in self.model_home.wait_functions if wait else ():
            settle()
        return {
            key: value for key, value in self.owner.stored.items() if self.owner.is_present(key)
        }

    @property
    def delayed(self) -> frozenset[tuple[str, str]]:
        """The delayed gradients in ``updated``."""
        return frozenset(key for key in self.updated if key[1] == DELAYED)

    def delayed_outputs(self, plan: Plan, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the name on the ranks of each delayed gradient, by the output of the program that
        makes it. ``labels``: the label of each parameter's name."""
        stored = self.owner.stored
        keys = {item.label: (labels[item.label], DELAYED) for item in plan.delayed}
        return {f"delayed {n}": stored[key].label for n, key in keys.items() if key in stored}

    def ended(self, updated: frozenset[tuple[str, str]]) -> None:
        """Record that a step that updated this state has ended without failure."""
        self.model_home.store.mark_present(self.owner, updated)

    def take_rule(self, rule: OptimizerRule) -> None:
        """Use another rule from now on, because the optimizer's options have changed."""
        self.rule, shadow = rule, rule.shadow({})
        if shadow is not None and self.shadow is not None:
            shadow.parameters, shadow.state = self.shadow.parameters, self.shadow.state
        self.shadow = shadow

    def advance(self) -> Callable[[], None]:
        """Write to the optimizer what a called step changes in the groups' options and the
        optimizer's attributes. Return the function that reverts the changes, for a step that is
        undone."""
        if self.shadow is None:
            return _nothing
        from dtensor.runtime.optimizer.elementwise.shadow_optimizer import advance

        return advance(self.optimizer, self.shadow, self.groups, self.trained, self.parameters)

    def come_home(self) -> None:
        """Make ``optimizer.state`` a plain dict of gathered state, unless the user replaced it."""
        if self.current:
            self.optimizer.state = self.state.plain()

    def bring_and_delete(self, labels: Set[str]) -> None:
        """Gather the state of parameters that have left the module, and delete it on the ranks."""
        stored = {key: value for key, value in self.owner.stored.items() if key[0] in labels}
        if self.current:
            for parameter, entries in self.model_home.gather_values(self, stored).items():
                self.unplaced.setdefault(parameter, {}).update(entries)
        self.model_home.store.forget(self.owner, stored, delete=True)
        for label in labels & self.parameters.keys():
            del self.parameters[label]
        self.updated, self.placed = self.updated - stored.keys(), None


@dataclass(slots=True, eq=False, repr=False)
class ModelHome:
    """A model's state on the ranks of a session's mesh."""

    model: ParallelModule
    prefix: str  # of the values' names in the ranks' tables, before the label
    session: MeshRanks
    loads: int  # `model.loads` when the values were put
    owner: Owner[str] = field(default_factory=Owner[str])  # parameters and buffers, by label
    gradients: Owner[str] = field(default_factory=Owner[str])  # that a step keeps, by name
    optimizers: dict[int, OptimizerHome] = field(default_factory=dict)  # by id(optimizer)
    placed: Plan | None = None  # the plan last given to `place`: its values are on the ranks
    # the module's tensors whose shards were put, by label, except tensors on the meta device:
    local_tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    stale: set[str] = field(default_factory=set[str])  # labels: the shards are newer than memory
    # copies of the values that the user has read since the last program, by label:
    read_copies: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    changed: bool = False  # whether the values differ from the initial ones
    unsaved: bool = False  # whether they changed since they were last gathered
    seen_number: int = 0  # the number of `model.seen` when this home was last settled
    lost: str = ""  # why the values are lost, once the launch has ended
    saved: tuple[str, int] = ("", 0)  # where the last copy of the state is, and its step
    wait_functions: list[Callable[[], None]] = field(
        default_factory=list[Any]
    )  # waits for its steps
    trained_by: dict[int, Any] = field(default_factory=dict)  # by id(optimizer), its last step
    _versions: dict[str, int] = field(default_factory=dict[str, int])  # torch's, by label
    _versioned: list[Tensor] = field(default_factory=list[Tensor])  # the same as two lists, for
    _last_versions: list[int] = field(default_factory=list[int])  # the check before each step
    _fetch_size: int = 1  # the number of tensors that the next read fetches

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
        """Why the values are lost, as the text after a value's name; "" if they are not."""
        if not self.lost and self.cluster.failure is not None:
            return self._failed(self.cluster.failure)
        return self.lost

    @property
    def on_meta(self) -> bool:
        """Whether tensors of the model are on the meta device."""
        return len(self.local_tensors) < len(self.stored)

    # -- the user's side --------------------------------------------------------------------------

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Fetch the values of these lazy tensors, and make them plain. Reads in the module's order
        fetch more and more tensors at a time. Raises RuntimeError if the values are lost."""
        labels = [label_of(tensor) for tensor in tensors]
        if self.gone:
            name = self.model.seen.name(labels[0])
            raise RuntimeError(f"{name} {self.gone}") from self.cluster.failure
        if not self.stale.isdisjoint(labels):
            self.refresh([*labels, *self._prefetched_labels(labels[-1])])
            self._fetch_size *= 2
        with without_fetch():
            for label, tensor in zip(labels, tensors, strict=True):
                make_plain(tensor)
                self.read_copies[label] = tensor.detach().clone()

    def give_up(self, tensor: Tensor) -> None:
        """Do nothing: the caller makes the tensor plain, and this object keeps its records."""

    def _prefetched_labels(self, label: str) -> list[str]:
        """Return the stale labels after this one that are fetched with it: at most one bucket."""
        order = list(self.local_tensors)
        later = [n for n in order[order.index(label) + 1 :] if n in self.stale]
        candidates = {label: self.stored[label] for label in later[: self._fetch_size - 1]}
        return list(next(buckets(candidates), {}))

    def refresh(self, labels: Iterable[str]) -> None:
        """Update the memory of stale tensors in place, a bucket at a time, without marking the
        tensors as read. Raises PlanningError if one was written through a view."""
        stale = self.stale & self.local_tensors.keys()
        stale_labels = [label for label in dict.fromkeys(labels) if label in stale]
        self._refuse_written(self._written(stale_labels))
        with waits_handle_signals():
            self._fetch(stale_labels)

    def _fetch(self, labels: Sequence[str]) -> None:
        """Copy these values from the ranks into the memory of their tensors."""
        for bucket in buckets({label: self.stored[label] for label in labels}):
            with without_fetch():
                for label, value in self.gather([*bucket]).items():
                    tensor = self.local_tensors[label]
                    with torch.inference_mode() if tensor.is_inference() else nullcontext():
                        tensor.copy_(value)
            self.stale.difference_update(bucket)
            self._note_versions(bucket)

    def settle(self) -> None:
        """Before a program runs, evict the tensors that the user has read. Forget the shards of
        tensors that the user has written, so that they are put again."""
        if self.read_copies:
            self._settle_read()
        if self.seen_number != self.model.seen.number:
            self._settle_changed()
        with without_hook():
            written = list(map(_version, self._versioned)) != self._last_versions
        if written:
            self._settle_written()
        if self.on_meta:  # another mesh may hold these values now
            holders = self.model.initial.holders
            self.forget([n for n in self.stored if holders.get(n, self) is not self])

    def _settle_read(self) -> None:
        """Evict tensors that the user has only read, and forget the shards of written ones."""
        copies, self.read_copies = self.read_copies, {}
        changed: list[str] = []
        for label, copy in copies.items():
            tensor = self.local_tensors[label]
            for holder, _ in by_holder([tensor]):  # another mesh holds the tensor now
                holder.bring([tensor])
            if _same(tensor, copy):
                evict(tensor, self, label)
            else:
                changed.append(label)
        self._note_versions(copies)
        self.forget(changed)

    def _settle_changed(self) -> None:
        """Gather tensors that have left the module, with their optimizer state, and delete them on
        the ranks. Tensors on the meta device stay on the ranks, in case they return."""
        present = self.model.seen.tensors
        removed = [label for label in self.local_tensors if label not in present]
        self.refresh(removed)
        for home in self.optimizers.values():
            home.bring_and_delete(set(removed))
        for label in removed:
            if holder_of(self.local_tensors[label]) is self:
                make_plain(self.local_tensors[label])
        self.forget(removed, delete=True)
        self.session.drop()
        self.store.unsettle(self.owner, self.owner.settled.keys() - self.model.labels.known)
        self.seen_number, self.placed = self.model.seen.number, None

    def _settle_written(self) -> None:
        """Forget the shards of tensors that were written through an older view, so that they are
        put again. Raises PlanningError if their memory was stale."""
        written = self._written(self.local_tensors)
        self._refuse_written([label for label in written if label in self.stale])
        for label in written:
            if holder_of(self.local_tensors[label]) is self:
                make_plain(self.local_tensors[label])
        self.forget(written)

    def _written(self, labels: Iterable[str]) -> list[str]:
        """Return the labels whose tensors were written since their versions were noted."""
        noted = self._versions
        return [n for n in labels if n in noted and noted[n] != _version_of(self.local_tensors[n])]

    def _refuse_written(self, written: Sequence[str]) -> None:
        """Raises PlanningError if tensors were written whose memory was stale."""
        if written:
            raise PlanningError(
                f"{self.model.seen.name(written[0])} was written through a view of it that was "
                f"taken before, whose memory was old: the value is on {self.mesh}.\n"
                f"fix: write through the parameter, as in `with torch.no_grad(): p.copy_(x)`, "
                f"or take a new view after each step"
            )

    def forget(self, labels: Sequence[str], *, delete: bool = False) -> None:
        """Drop the records of these values, so that `MeshSession.place` puts the module's values
        again. ``delete``: delete the shards too."""
        if labels:
            self.store.forget(self.owner, labels, delete=delete)
            for label in labels:
                for table in (self.local_tensors, self._versions):
                    table.pop(label, None)
            self.stale.difference_update(labels)
            self.placed = None
            self._note_versions(())

    # -- the ranks' side --------------------------------------------------------------------------

    def make_lazy(self, tensors: dict[str, Tensor]) -> None:
        """Make these tensors lazy: their shards were put, and hold their values from now on."""
        for label, tensor in tensors.items():
            self.read_copies.pop(label, None)
            if self.cluster.device.type == "meta":
                continue  # ranks on meta compute nothing: the module keeps its values
            if tensor.is_meta:
                previous = self.model.initial.holders.get(label)
                self.changed |= previous is not None and previous.changed
                self.model.initial.holders[label] = self
            else:
                self.local_tensors[label] = tensor
                evict(tensor, self, label)
        self._note_versions(self.local_tensors.keys() & tensors)

    def record_write(
        self, labels: frozenset[str], optimizers: Sequence[OptimizerHome] = ()
    ) -> None:
        """Mark these values in the module, and the state of the optimizers, as older than the
        ranks' values: a program that changes them was submitted."""
        if self.cluster.device.type != "meta":
            if self.read_copies:  # the probe of an optimizer has read them since `settle`
                self._settle_read()
            for optimizer in optimizers:
                optimizer.state.changed()
            self.stale |= labels
            self._fetch_size = 1
            self.changed = self.unsaved = True

    def gather(self, labels: Sequence[str]) -> dict[str, Tensor]:
        """Return the full values on the CPU, after running steps. Raises RuntimeError if lost."""
        if self.lost:
            raise RuntimeError(f"{self.model.seen.name(labels[0])} {self.lost}")
        values = self.store.get({label: self.stored[label] for label in labels})
        return {label: value for label, value in values if value is not None}

    def gather_optimizer(self, home: OptimizerHome) -> Entries:
        """Return the full state entries of each parameter, on the parameter's device."""
        parameters = [p for group in home.optimizer.param_groups for p in group["params"]]
        gathered: Entries = {parameter: {} for parameter in parameters}  # in torch's order
        unplaced = home.unplaced
        if home.on_disk:
            from dtensor.api.values.on_disk import read_whole

            unplaced = {parameter: read_whole(entries) for parameter, entries in unplaced.items()}
        gathered |= {parameter: dict(entries) for parameter, entries in unplaced.items()}
        for parameter, entries in self.gather_values(home, home.owner.stored).items():
            gathered.setdefault(parameter, {}).update(entries)
        return {parameter: entries for parameter, entries in gathered.items() if entries}

    def gather_values(
        self, home: OptimizerHome, stored: Mapping[tuple[str, str], StoredTensor]
    ) -> Entries:
        """Return these state entries in full, by parameter and key, without absent values. The
        packed state of an owned parameter is unpacked."""
        gathered: Entries = {}
        for (label, key), value in self.store.get(stored):
            if value is not None:
                entry, parameter = home.rule.entry(key), home.parameters[label]
                if entry.packed:
                    device = "cpu" if parameter.is_meta else parameter.device
                    gathered.setdefault(parameter, {}).update(unpack(value, device))
                    continue
                if entry.number:
                    value = entry.from_table(value)
                elif not parameter.is_meta:
                    value = value.to(parameter.device)
                gathered.setdefault(parameter, {})[key] = value
        if self.cluster.device.type == "cuda":
            for label in {label for label, _ in stored}:
                _drop_unstepped(home, label, gathered.get(home.parameters[label], {}))
        return gathered

    # -- the end ----------------------------------------------------------------------------------

    def end(self, bring_home: bool) -> None:
        """Before the cluster ends, gather the values if ``bring_home``; otherwise, or if the
        cluster has failed, mark values that are only on the ranks as lost."""
        failure = self.cluster.failure
        if failure is not None:
            self.mark_lost(self._failed(failure))
        elif not bring_home and self.model.source is None:
            self.mark_lost(
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
                    self.mark_lost(self._failed(self.cluster.failure))

    def come_home(self) -> None:
        """Copy every value that is newer on the ranks into the module's memory. The values and the
        optimizer state of a model on the meta device are not copied.

        Raises PlanningError, after copying, if a view of a stale value was written.
        """
        stale = [label for label in self.local_tensors if label in self.stale]
        written = self._written(stale)
        self._fetch(stale)
        if not self.on_meta:
            for home in self.optimizers.values():
                home.come_home()
        self.mark_lost(
            f"is on the meta device: its value was on {self.mesh}, in a launch that has ended.\n"
            f"fix: {self._remedy('the result of dt.gather_state_dict(model, opt) in the launch')}"
        )
        self._refuse_written(written)

    def mark_lost(self, why: str) -> None:
        """Mark the values that are only on the cluster as lost, and make the other tensors plain.
        ``why``: the text of a later error, after the value's name."""
        self.lost = why
        for home in self.optimizers.values():
            if home.current and home.state.stale:
                home.state.gone = f"the state of {type(home.optimizer).__name__} {why}"
            else:
                home.come_home()
        for label, tensor in self.local_tensors.items():
            if holder_of(tensor) is self and label not in self.stale:
                make_plain(tensor)
        holders = self.model.initial.holders
        for label in [label for label in holders if holders[label] is self and not self.changed]:
            del holders[label]  # the next launch makes the same initial values

    def _failed(self, failure: Exception) -> str:
        """Return the text that says why values on a failed cluster are lost."""
        reason = str(failure).partition("\n")[0]
        return (
            f"is lost: its value was on {self.mesh}, which failed ({reason}).\n"
            f"fix: {self._remedy('the last result of dt.gather_state_dict')}"
        )

    def _remedy(self, state: str) -> str:
        return self.model.initial.remedy or f"{LOAD}, with {state}"

    # -- the check before each step -------------------------------------------------------

    def _note_versions(self, labels: Iterable[str]) -> None:
        """Record torch's versions of these tensors, which an in-place write increases."""
        for label in labels:
            if not self.local_tensors[label].is_inference():  # they have no version
                self._versions[label] = _version_of(self.local_tensors[label])
        self._versioned = [self.local_tensors[label] for label in self._versions]
        self._last_versions = list(self._versions.values())


def _drop_unstepped(home: OptimizerHome, label: str, entries: dict[str, Any]) -> None:
    """Drop the entries that a step which was undone on a GPU has initialized, as torch does in a
    first step. They are absent for the controller, and the step count, or else all, is zero."""
    stored = [key for key in entries if key != DELAYED and (label, key) in home.owner.stored]
    absent = [key for key in stored if not home.owner.is_present((label, key))]
    counts = ["step"] if "step" in absent else [key for key in absent if key != MASTER]
    if not any(bool(torch.as_tensor(entries[key]).any()) for key in counts):
        for key in absent:
            del entries[key]


def check_no_shared_memory(tensors: Mapping[str, Tensor], written: Set[str]) -> None:
    """Raises PlanningError if a tensor that a program changes shares memory with another tensor: on
    the ranks only one of the two would change."""
    with without_hook():
        distinct = {id(tensor): (name, tensor) for name, tensor in reversed(list(tensors.items()))}
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in distinct.values()
            if tensor.nbytes and not tensor.is_meta and _is_dense(tensor)
        )
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end and not written.isdisjoint((first, second)):
            raise PlanningError(
                f"{first} and {second} share memory without being one tensor, so on the ranks they "
                f"would change independently.\n"
                f"fix: make them one, as in `module.{second} = module.{first}`, or copy one of them"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill the memory from the first to the last without gaps."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(steps) == tensor.numel()


def _version_of(tensor: Tensor) -> int:
    with without_hook():
        return tensor._version


def _same(tensor: Tensor, copy: Tensor) -> bool:
    same_type = tensor.shape == copy.shape and tensor.dtype == copy.dtype
    return same_type and tensor.device == copy.device and torch.equal(tensor, copy)


def _nothing() -> None:
    pass
