"""`Request`: all inputs of planning: a program, a mesh, pins, and how the step will run.

Request(name="mlp", flow=..., mesh=Mesh(tp=2), pins={"up_weight": {"tp": Shard(0)}})
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from dtensor.errors import check_word
from dtensor.sharding.plan.record import PlanTerms, Timetable
from dtensor.sharding.plan.sequence import Attention
from dtensor.sharding.spec.placements import Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec

Search = Literal["predictable", "free"]
OnMisaligned = Literal["redistribute", "error", "gather"]


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The cost of one update of a whole parameter. ``state_bytes``: the bytes of its optimizer
    state."""

    flops: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """One optimizer of a step. ``optimizer``: its name in the printed plan.

    ``trained``: labels of its parameters. ``state_tensors``: how many tensors of a parameter's
    shape an elementwise optimizer keeps for each parameter. ``owned``: for an optimizer that needs
    whole parameters, the cost of each update by label; None for an elementwise optimizer.
    ``host_reads``: why its updates read values of a GPU on the host; "" if they do not.
    """

    optimizer: str
    trained: frozenset[str]
    state_tensors: int = 0
    owned: Mapping[str, UpdateCost] | None = None
    host_reads: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The inputs of the optimizer phase: the optimizers with their parameters, and clipping.

    ``master_weights``: whether optimizers update float32 copies of narrow parameters. ``scaled``:
    whether the loss, and so each gradient, is multiplied by a loss scale. ``delay``: 1 if a step
    updates with the gradients of the step before, else 0. ``accumulate``: "float32" or "bf16", the
    dtype of sums of gradients over microbatches.
    """

    updaters: tuple[Updater, ...]
    clip_grad_norm: float | None = None
    master_weights: bool = False
    scaled: bool = False
    delay: int = 0
    accumulate: str = "float32"

    @property
    def trained(self) -> frozenset[str]:
        """The labels of the parameters of all optimizers."""
        return frozenset[str]().union(*(updater.trained for updater in self.updaters))

    def restricted_to(self, labels: Set[str]) -> Training:
        """Return the training of these parameters only."""
        updaters = tuple(replace(u, trained=u.trained & labels) for u in self.updaters)
        return replace(self, updaters=updaters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The stated placement of one value on one axis, in the planner's form. ``by``: the name for
    which the user wrote the placement. ``opens``: whether other values are split because of this
    pin. ``until_contraction``: whether that ends at the next contraction."""

    value: str
    placement: Placement
    by: str
    opens: bool = True
    until_contraction: bool = False
    stated: Shard | None = None  # as the user wrote it, for messages


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Request(PlanTerms):
    """The inputs of planning, with the fields that the plan shares (`PlanTerms`).

    pins: input name -> axis -> placement; axes in the order in which the user stated them.
    held: input name -> its present spec, for inputs that have no pins.
    pinned_by: input name -> the name for which the user wrote the pin ("blocks.*.up.weight").
    settled: the inputs of ``pins`` whose placement an earlier program chose; no other value is
    split because of them.
    batch: the names of the inputs whose dim 0 is the batch.
    results: index of a user result -> axis -> placement (default Replicate).
    split_results: whether a result without a stated placement may stay split.
    pending_results: whether a result without a stated placement may stay pending; it is priced as
    if it were reduced.
    attention: the stated strategies of attention, as (axis, word).
    search: "predictable" splits only values that pins reach; "free" may split any value.
    stored_whole: labels of the parameters to which ``zero`` does not apply.
    misaligned: if a parameter's pin does not line up with the program, "redistribute" changes the
    placement of the activation before the op, "error" refuses the pin, and "gather" uses the pin
    only for the parameter's storage.
    recompute: full names of the modules whose forward runs again in the backward.
    """

    pins: Mapping[str, Mapping[str, Placement]]
    held: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    pinned_by: Mapping[str, str] = field(default_factory=dict[str, str])
    settled: frozenset[str] = frozenset()
    batch: tuple[str, ...] = ()
    results: Mapping[int, Mapping[str, Placement]] = field(
        default_factory=dict[int, Mapping[str, Placement]]
    )
    timetable: Timetable | None = None
    training: Training | None = None
    attention: Attention = ()
    search: Search = "predictable"
    split_results: bool = False
    pending_results: bool = False
    stored_whole: frozenset[str] = frozenset()
    misaligned: OnMisaligned = "redistribute"
    recompute: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<request of a plan of {self.name} on {self.mesh}: {self.flow!r}>"

    def __post_init__(self) -> None:
        checked_search(self.search)
        if not self.stage_ranks:
            num = self.mesh.axis_size(self.stage_axis) if self.stage_axis else 1
            object.__setattr__(self, "stage_ranks", dealt(self.flow.num_stages, num))

    @property
    def stores_split(self) -> bool:
        """Whether the spec of a stored parameter may differ from the spec that ops use."""
        return self.zero is not None or self.misaligned == "gather"

    @property
    def updates_whole(self) -> bool:
        """Whether an optimizer updates whole parameters, each on one rank."""
        training = self.training
        return training is not None and any(u.owned is not None for u in training.updaters)


def checked_search(search: str) -> Search:
    """Return the word as a `Search`. Raises PlanningError if it is not one."""
    check_word("search", search, get_args(Search))
    return cast(Search, search)


def dealt(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage if stages are assigned to ranks round-robin."""
    return tuple(stage % num_ranks for stage in range(num_stages))
