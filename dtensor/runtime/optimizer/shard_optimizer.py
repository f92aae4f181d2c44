"""torch.optim on local shards: one real optimizer per rank, fed from outside.

    optimizer = ShardOptimizer(torch.optim.AdamW)
    values = (absent("cpu"),) * 3                      # of a rank's table, by these names
    names = (("w", "step"), ("w", "exp_avg"), ("w", "exp_avg_sq"))
    what = Updated(groups=(("w",),), labels=("w",), names=names)
    optimizer.step(what, {"w": w_local}, ({"lr": 3e-4, ...},), {"w": grad_local}, values)

What it updates are runs of padded shards (flat_buffers.py), by torch's fused kernels where there
are such and the user states nothing else: the same bits wherever a parameter is cut. Where
gradients are clipped they are divided, by the kernel or before it, which is the same.

The controller's optimizer is never stepped with gradients; its parameter groups are read each step
and sent here. Classes whose update is elementwise (each element of a parameter is updated from its
own gradient and state alone) give the same numbers on shards. Those of torch are known; of others
an `OptimizerKind` says what a probe has seen (elementwise/). One of these has a group for each of
the user's, with all of its runs, and its attributes as they are sent with the options.

The state is values of the rank's table, each with a name of its own: tensors of the shard's shape,
numbers (the step) of no dims, and with master weights a float32 copy of a shard of 16 bits, under
MASTER, which is what is updated: the shard becomes that copy rounded. A value is `absent` until its
parameter's first step makes it. From then on it is a view of what torch's optimizer holds, so that
a step finds it there by identity. (Of Python's numbers it is a copy; other classes may put another
tensor in the place of one, and then it is a view of that.) Another tensor that stands in its place
counts: what is kept here is made anew from the values of the table. So nothing is lost with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from operator import is_not
from typing import Any, NamedTuple, cast

import torch

from dtensor.errors import PlanningError
from dtensor.kernels.registry import kernel_of
from dtensor.numerics import accumulation_dtype, is_narrow
from dtensor.private_torch import foreach_add_, fused_adam_, fused_adamw_, without_compiler
from dtensor.runtime.optimizer.flat_buffers import FlatRun, run_of, together
from dtensor.runtime.optimizer.optimizer_kind import OptimizerKind, StateEntry, bare_step, copied

MASTER = "master_param"
"""The key of a master weight in a parameter's state, as in NVIDIA's Transformer Engine."""

ELEMENTWISE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    # class -> the keys of a parameter's state, at most
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.RMSprop: ("step", "square_avg", "momentum_buffer", "grad_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
}

IF_STATED = {
    "max_exp_avg_sq": "amsgrad",
    "momentum_buffer": "momentum",
    "grad_avg": "centered",
}
"""Keys that are there only where an option of the group is true."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes for which torch has a kernel of the whole update, on the CPU too; that of Adagrad there
alone."""

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of the state entries that are one number for a parameter; others have one an element."""


def has_kernel(kind: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has a fused kernel of the class with this name that is right.

    That of SGD is not for 16 bits on the CPU (torch 2.13): after 4 steps of lr=0.1 on 64 normal
    numbers it is 0.6 away from the loop's.
    """
    on_cpu = device.type == "cpu"
    right = kind != "SGD" or not (on_cpu and is_narrow(dtype))
    on_cuda = device.type == "cuda" and kind != "Adagrad"
    fits = dtype.is_floating_point and (on_cpu or on_cuda)
    return kind in {cls.__name__ for cls in FUSED} and fits and right


def kernel_divides(dtype: torch.dtype) -> bool:
    """Whether fused kernels divide gradients by numbers of this dtype: they read float32 alone."""
    return dtype == torch.float32


def check_masters(optimizer: torch.optim.Optimizer) -> None:
    """PlanningError where master weights would be copies of nothing."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_narrow(p.dtype) for p in held):
        dtypes = ", ".join(sorted({str(p.dtype) for p in held}))
        raise PlanningError(
            f"master_weights=True, and no parameter of the optimizer is narrower than float32.\n"
            f"  its {len(held)} parameters: {dtypes}\n"
            f"fix: leave master_weights out, or model.to(torch.bfloat16) before the step is made"
        )


def keys_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a parameter's state, in a group with these options; master weights apart."""
    return _keys(kind, tuple(option for option in IF_STATED.values() if options.get(option)))


@cache
def _keys(kind: type[torch.optim.Optimizer], stated: tuple[str, ...]) -> tuple[str, ...]:
    keys = ELEMENTWISE[kind]
    return tuple(key for key in keys if key not in IF_STATED or IF_STATED[key] in stated)


def value_name(optimizer: str, key: str, label: str) -> str:
    """The table's name of a value of a parameter's state; ``optimizer``: that of the rank's."""
    return f"{optimizer}: {key} of {label}"


def absent(device: torch.device | str) -> torch.Tensor:
    """What stands for a value of the state before there is one: no elements, of bools."""
    return torch.empty(0, dtype=torch.bool, device=device)


def is_absent(value: torch.Tensor) -> bool:
    return value.dtype == torch.bool


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Each group's options, without its parameters: what is sent every step."""
    return tuple(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


class Updated(NamedTuple):
    """What a program updates: the names of the parameters of each group, of those that it has
    gradients of, and of each value of the state that it reads and writes the parameter and the key.
    Plain data: ranks share its code."""

    groups: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    names: tuple[tuple[str, str], ...]


class ShardOptimizer:
    """One rank's optimizer. It lives in the actor's table and is built at its first step.

    What torch's optimizer holds as parameters are runs of shards (flat_buffers.py). All of it is
    made of the values of the table, and leaves an actor without them.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer] | OptimizerKind, masters: bool = False
    ) -> None:
        """``kind``: a class of torch's that is known, or what was found out of another."""
        self.own = kind if isinstance(kind, OptimizerKind) else None
        self.kind = kind.cls if isinstance(kind, OptimizerKind) else kind
        self.masters = masters
        self._forget(())

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardOptimizer, (self.own or self.kind, self.masters)

    def step(
        self,
        what: Updated,
        shards: Mapping[str, torch.Tensor],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, torch.Tensor],
        values: tuple[torch.Tensor, ...],
        clip: torch.Tensor | None = None,
        parts: Collection[str] = (),
        own: Collection[str] = (),
    ) -> None:
        """Update ``shards`` and ``values``, named by ``what``; ``options`` are one for each group
        and, where the class is not one of torch's, the object's attributes.

        These become views of larger buffers, but for shards named in ``parts``: parts or copies of
        other tensors, made anew for each step; they are read and written. What has no gradient is
        left alone. Gradients are divided by ``clip``, where they stand if they are named in
        ``own``; the others are not changed.
        """
        for given in options if self.own is None else ():
            if not isinstance(given["lr"], float | int | torch.Tensor):
                raise TypeError(f"lr={given['lr']!r} of {self.kind.__name__} is not a number.")
        if what is not self._what:
            if what.groups != self.groups or self._is_cast(shards):
                self._forget(what.groups)
            self._what, self._runs = what, []
        if len(values) != len(self._seen) or any(map(is_not, values, self._seen)):
            self._know(what.names, values)
        if not gradients:
            return
        runs = self._runs = self._runs or self._runs_of(shards, gradients)
        for run in runs:
            run.take(shards, parts)
        optimizer = self._built(options)
        torchs = self.own is None
        fused = torchs and all(group.get("fused") for group in optimizer.param_groups)
        folded = clip is not None and fused and kernel_divides(clip.dtype)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run in runs:
            gradient, copies = run.gradient(gradients)
            if clip is not None and not folded:
                gradient = _divided(gradient, clip)
            elif (folded or not torchs) and not (copies or all(m.name in own for m in run.members)):
                gradient = gradient.clone()  # it may be written to, as by a kernel that divides
            pairs.append((run.parameter, gradient))
        _update(optimizer, pairs, clip if folded else None)
        if optimizer.state is not self.state:
            raise TypeError(f"{self.kind.__name__} has put another dict in the place of its state.")
        for run in runs:
            run.give()
        for run in self._unbound if torchs else runs:
            self._bind(run)
        self._unbound = []

    # -- the values of the table -------------------------------------------------------------------

    def _forget(self, groups: tuple[tuple[str, ...], ...]) -> None:
        """The next step makes all of it anew, from values of the table; ``groups``: by name."""
        self.groups = groups
        self.optimizer: torch.optim.Optimizer | None = None
        self.runs: dict[_Alike, list[FlatRun]] = {}  # each list is a group of torch's
        self.run_of: dict[str, FlatRun] = {}
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)  # torch's, by parameter
        self.values: dict[str, dict[str, torch.Tensor]] = {}  # of the table, by parameter and key
        self._seen: tuple[torch.Tensor, ...] = ()
        self._what: Updated | None = None  # of the step before
        self._runs: list[FlatRun] = []  # that it updated, where they are the same still
        self._unbound: list[FlatRun] = []
        self._bound: dict[tuple[FlatRun, str], torch.Tensor] = {}  # what values are views of

    def _is_cast(self, shards: Mapping[str, torch.Tensor]) -> bool:
        """Whether a shard has another dtype than the run that was made of it: the module was
        cast."""
        return any(
            member.name in shards and shards[member.name].dtype != key.stored
            for key, runs in self.runs.items()
            for run in runs
            for member in run.members
        )

    def _know(self, names: Sequence[tuple[str, str]], values: tuple[torch.Tensor, ...]) -> None:
        """Other values than at the step before: of other parameters, or put since."""
        for (label, key), value in zip(names, values, strict=True):
            if label in self.run_of and self.values.get(label, {}).get(key) is not value:
                self._forget(self.groups)
                break
        for (label, key), value in zip(names, values, strict=True):
            self.values.setdefault(label, {})[key] = value
        self._seen = values

    def _bind(self, run: FlatRun) -> None:
        """The values of a run's members are views of its state from now on."""
        state = self.state.get(run.parameter, {})
        if self.own is not None:
            self._bind_entries(run, state, self.own.entries)
            return
        for member in run.members:
            for key, value in self.values.get(member.name, {}).items():
                if key == MASTER and run.master:
                    value.data = run.of(run.parameter.data, member)
                elif isinstance(value_of_state := state.get(key), torch.Tensor):
                    value.data = (
                        run.of(value_of_state, member) if key not in NUMBERS else value_of_state
                    )

    def _bind_entries(
        self, run: FlatRun, state: Mapping[str, Any], entries: Mapping[str, StateEntry]
    ) -> None:
        """The same for a class that may put other tensors, or numbers, into a state at any step."""
        if run.master and run in self._unbound:
            state = {**state, MASTER: run.parameter.data}
        for key, entry_value in state.items():
            entry = entries.get(key)
            _check_as_probed(self.kind, key, entry_value, entry, run)
            if entry_value is None or self._bound.get((run, key)) is entry_value:
                continue
            number = entry is not None and entry.number
            stored = entry.stored(entry_value) if entry is not None else entry_value
            for member in run.members:
                value = self.values.get(member.name, {}).get(key)
                if value is not None:
                    value.data = stored.clone() if number else run.of(stored, member)
            if isinstance(entry_value, torch.Tensor) and not number:
                self._bound[run, key] = entry_value

    def _given(self, name: str) -> dict[str, torch.Tensor]:
        """What there is of a parameter's state, its master apart."""
        entries = self.values.get(name, {})
        return {k: v for k, v in entries.items() if k != MASTER and not is_absent(v)}

    # -- which runs there are ----------------------------------------------------------------------

    def _runs_of(
        self, shards: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> list[FlatRun]:
        """The runs of what has a gradient. A parameter that is frozen, or that the program does not
        use, may get its first one later."""
        if not gradients.keys() <= self.run_of.keys():
            self._add({name: shards[name] for name in gradients if name not in self.run_of})
        runs: list[FlatRun] = []
        num_members = 0
        for run in dict.fromkeys(map(self.run_of.__getitem__, gradients)):
            runs.append(run)
            num_members += len(run.members)
        if num_members == len(gradients):
            return runs
        for run in runs:
            if not all(member.name in gradients for member in run.members):
                self._split(run, gradients)
        return list(dict.fromkeys(map(self.run_of.__getitem__, gradients)))

    def _add(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Runs of parameters that had none: of each group those with the same dtype and steps."""
        alike: dict[_Alike, list[str]] = {}
        for group, names in enumerate(self.groups):
            for name in names:
                if name in shards:
                    shard = shards[name]
                    narrow = self.masters and is_narrow(shard.dtype)
                    given = sorted(self._given(name).items())
                    steps = tuple((k, self._told(k, v)) for k, v in given)
                    dtype = torch.float32 if narrow else shard.dtype
                    key = _Alike(group, shard.dtype, dtype, shard.device, steps, len(self.runs))
                    alike.setdefault(key, []).append(name)
        for key, names in alike.items():
            self.runs[key] = []
            for positions in together(shards[name].numel() for name in names):
                some = [names[at] for at in positions]
                masters = {name: self._master(name) for name in some}
                run = run_of(some, shards, masters if key.dtype != key.stored else None)
                self.runs[key].append(run)
                self.run_of.update(dict.fromkeys(some, run))
                if key.steps:
                    self.state[run.parameter] = self._loaded(run, shards)
                    self._bind(run)  # at once: what it was made of is needed no more
                self._unbound.append(run)
        self.optimizer = None

    def _is_number(self, key: str) -> bool:
        if self.own is None:
            return key in NUMBERS
        return key in self.own.entries and self.own.entries[key].number

    def _told(self, key: str, value: torch.Tensor) -> object:
        """What must be the same in all parameters of a run."""
        return float(value) if self._is_number(key) and not value.is_meta else None

    def _master(self, name: str) -> torch.Tensor | None:
        master = self.values.get(name, {}).get(MASTER)
        return None if master is None or is_absent(master) else master

    def _loaded(self, run: FlatRun, shards: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The state of a run, of its members' values, in the dtype of what is updated, which
        loading need not have kept. What fills a run alone stays where it is."""
        entries = [self._given(member.name) for member in run.members]
        like = run.parameter if run.master else shards[run.members[0].name]
        state: dict[str, Any] = {}
        known = {} if self.own is None else self.own.entries
        for key, entry in known.items():
            if entry.late and entries[0] and key not in entries[0]:
                state[key] = None
        for key, first in entries[0].items():
            if self._is_number(key):
                state[key] = known[key].given(first.clone()) if key in known else first.clone()
                continue
            dtype = like.dtype if first.is_floating_point() else first.dtype
            dtype = known[key].dtype(like.dtype) if key in known else dtype
            for member, entry in zip(run.members, entries, strict=True):
                if entry[key].shape != member.shape:
                    raise ValueError(
                        f"{key} of {member.name} has the shape {list(entry[key].shape)}, the "
                        f"parameter's shard {list(member.shape)}."
                    )
            if first.numel() == run.size and first.dtype == dtype and first.is_contiguous():
                state[key] = first.detach().view(-1)
                continue
            state[key] = flat = torch.zeros(run.size, dtype=dtype, device=like.device)
            for member, entry in zip(run.members, entries, strict=True):
                run.of(flat, member).copy_(entry[key])
        return state

    def _split(self, run: FlatRun, present: Collection[str]) -> None:
        """Runs of their own for members that have a gradient and those that have none."""
        parts = run.split(present)
        for runs in self.runs.values():
            if run in runs:
                at = runs.index(run)
                runs[at : at + 1] = [part for part, _ in parts]
        state = self.state.pop(run.parameter, {})
        for part, begin in parts:
            self.run_of.update((member.name, part) for member in part.members)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    number = self._is_number(key)
                    entry = value.clone() if number else value[begin : begin + part.size]
                    self.state[part.parameter][key] = entry
                elif self.own is not None:
                    self.state[part.parameter][key] = value
            self._bind(part)
        self.optimizer = None

    # -- torch's optimizer -------------------------------------------------------------------------

    def _built(self, options: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        """One over the runs that there are, told the options of its groups."""
        if self.own is not None:
            return self._made(self.own, options)
        given = [self._options(key, options[key.group]) for key in self.runs]
        if self.optimizer is None:
            groups = [
                {**group_options, "params": [run.parameter for run in runs]}
                for group_options, runs in zip(given, self.runs.values(), strict=True)
            ]
            with without_compiler():
                self.optimizer = self.kind(groups)  # pyright: ignore[reportCallIssue]
            for parameter, entry in self.optimizer.state.items():  # Adagrad's has some at once
                self.state.setdefault(parameter, entry)
            self.optimizer.state = cast(Any, self.state)
            for group in self.optimizer.param_groups:
                on_device = group.get("fused") or group.get("capturable")
                elsewhere = (p for p in group["params"] if p.device.type not in ("cpu", "meta"))
                for parameter in elsewhere:
                    self._place_numbers(parameter, on_device or self.kind is torch.optim.ASGD)
        for group, group_options in zip(self.optimizer.param_groups, given, strict=True):
            group.update(group_options)
        return self.optimizer

    def _made(
        self, kind: OptimizerKind, told: Sequence[Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        """The same of a class that is not torch's: a group for each of the user's, and attributes,
        as they are told, whatever a step before has changed of them."""
        *options, attributes = copied(tuple(map(dict, told)))
        held: list[list[torch.Tensor]] = [[] for _ in options]
        for key, runs in self.runs.items():
            held[key.group] += [run.parameter for run in runs]
        groups = [{**o, "params": p} for o, p in zip(options, held, strict=True)]
        self.optimizer = kind.make(groups, attributes)
        self.optimizer.state = cast(Any, self.state)
        return self.optimizer

    def _place_numbers(self, parameter: torch.Tensor, on_device: bool) -> None:
        """To where the class wants them; values of a table are all on its device."""
        place = parameter.device if on_device else torch.device("cpu")
        state = self.state.get(parameter, {})
        for key in NUMBERS & state.keys():
            state[key] = state[key].to(place)

    def _options(self, key: _Alike, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What torch is told: its fused kernel, where it has one and the user chose none."""
        chosen = (
            given.get("fused") is not None
            or given.get("foreach") is not None
            or given.get("capturable")
            or given.get("differentiable")
            or any(isinstance(beta, torch.Tensor) for beta in given.get("betas", ()))
        )
        right = has_kernel(self.kind.__name__, key.dtype, key.device)
        if given.get("fused") and self.kind in FUSED and not right:
            raise ValueError(
                f"torch's fused {self.kind.__name__} is not right for {key.dtype} on "
                f"{key.device.type}.\nfix: leave fused=True out, or train_step(..., "
                f"master_weights=True)"
            )
        return {**given, "fused": True} if right and not chosen else given


@dataclass(frozen=True, slots=True)
class _Alike:
    """What the parameters of a run have in common. ``stored``: the dtype of the shards; ``dtype``:
    of what is updated; ``steps``: their state when it was given, by key; ``built``: how many groups
    were there, for kernels want all of a group to have state, or none."""

    group: int
    stored: torch.dtype
    dtype: torch.dtype
    device: torch.device
    steps: tuple[tuple[str, object], ...]
    built: int


def _check_as_probed(
    kind: type[torch.optim.Optimizer], key: str, value: Any, entry: StateEntry | None, run: FlatRun
) -> None:
    """TypeError where a class keeps what its probe did not see: it would be lost."""
    if key == MASTER or (value is None and entry is not None and entry.late):
        return
    if entry is not None and entry.python is not None:
        fits = isinstance(value, entry.python | int if entry.python is float else entry.python)
    elif entry is not None and isinstance(value, torch.Tensor):
        wanted = entry.shape if entry.number else (run.size,)
        fits = tuple(value.shape) == wanted and value.dtype == entry.dtype(run.parameter.dtype)
        fits = fits or (entry.number and tuple(value.shape) == wanted)
    else:
        fits = False
    if not fits:
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            what = f"a tensor of shape {list(value.shape)} and {value.dtype}"
        raise TypeError(
            f"{kind.__name__} has put {what} under {key!r} into the state of a parameter, which "
            f"its probe did not see."
        )


def _divided(gradient: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
    wide = gradient.float() if is_narrow(gradient.dtype) else gradient
    return (wide / clip.to(accumulation_dtype(wide.dtype))).to(gradient.dtype)


# -- the update ------------------------------------------------------------------------------------


def _update(
    optimizer: Any, given: Sequence[tuple[torch.Tensor, torch.Tensor]], clip: torch.Tensor | None
) -> None:
    """The optimizer's step on parameters with their gradients, all of one dim.

    ``clip`` is for fused kernels alone, which divide the gradients by it, in place.
    """
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and _adam(optimizer, given, clip):
        return
    for parameter, gradient in given:
        parameter.grad = gradient
    torchs = type(optimizer) in ELEMENTWISE
    if torchs:
        optimizer.grad_scale = clip
    # An own class's step may use the compiler.
    with torch.enable_grad(), without_compiler() if torchs else nullcontext():
        optimizer.step() if torchs else bare_step(optimizer)
    for parameter, _ in given:
        parameter.grad = None


def _adam(
    optimizer: torch.optim.Optimizer,
    given: Sequence[tuple[torch.Tensor, torch.Tensor]],
    clip: torch.Tensor | None,
) -> bool:
    """What `torch.optim.Adam.step` calls, without what that does before: half of the time, where
    tensors are small. False, and nothing done, if a group is not to be updated by a kernel."""
    gradients = {id(parameter): gradient for parameter, gradient in given}
    groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
    for group in optimizer.param_groups:
        lr = group["lr"]
        if not group["fused"] or (isinstance(lr, torch.Tensor) and lr.device.type != "cpu"):
            return False
        groups.append((group, [p for p in group["params"] if id(p) in gradients]))
    with torch.no_grad():
        for group, held in groups:
            if held:
                states = [_moments(optimizer, parameter, group) for parameter in held]
                _adam_of(group, held, [gradients[id(p)] for p in held], states, clip)
    return True


def _moments(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A parameter's state, made as torch does where there is none."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[key] = torch.zeros_like(parameter)
    return state


def _adam_of(
    group: Mapping[str, Any],
    held: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    clip: torch.Tensor | None,
) -> None:
    """One call of torch's kernel, or of ours where there is one."""
    steps = [state["step"] for state in states]
    first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
    most = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
    foreach_add_(steps, 1)
    options = {key: group[key] for key in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    options["beta1"], options["beta2"] = group["betas"]
    kernel = fused_adam_
    if group["decoupled_weight_decay"]:
        ours = kernel_of(torch.ops.aten._fused_adamw_.default, held[0].device)
        kernel = fused_adamw_ if ours is None else ours.function
    tensors = (held, gradients, first, second, most, steps)
    kernel(*tensors, **options, grad_scale=clip, found_inf=None)


# -- what generated code calls ---------------------------------------------------------------------


def sum_of_squares(
    counted: Sequence[torch.Tensor], like: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The sum of squares of all elements, those of complex ones of their absolute values, as
    ``dtype``: a left fold over the tensors, each in float32 or, if that is its own, in float64."""
    total = torch.zeros((), dtype=dtype, device=like)
    for gradient in counted:
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        total = total + gradient.to(accumulation_dtype(gradient.dtype)).square().sum()
    return total


class GradientOverflow(ArithmeticError):
    """A gradient of a scaled loss is not finite, or its square is near the end of float32."""


_MOST_SQUARES = 1e30


def unscaled_squares(
    counted: Sequence[torch.Tensor],
    scale: float,
    like: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`sum_of_squares` of the gradients divided by the scale. Raises GradientOverflow; it waits for
    the device."""
    total = sum_of_squares(counted, like, dtype)
    if like.type != "meta" and not float(total) < _MOST_SQUARES:  # a NaN is not
        raise GradientOverflow(f"a gradient of the loss times {scale:g} is not finite")
    return total / scale / scale


def unscaling_divisor(
    squares: torch.Tensor, scale: float, max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`clip_divisor`, of gradients that are times the scale."""
    norm, divisor = clip_divisor(squares, max_norm)
    return norm, divisor * scale


def clip_divisor(squares: torch.Tensor, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, max(1, (norm + 1e-6) / max_norm)): what torch.nn.utils.clip_grad_norm_ multiplies
    gradients by is one over that. Fused kernels divide (`kernel_divides`)."""
    norm = squares.sqrt()
    return norm, torch.clamp((norm + 1e-6) / max_norm, min=1.0)
