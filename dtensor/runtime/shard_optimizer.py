"""torch.optim on local shards: one real optimizer per rank, fed from outside.

    optimizer = ShardOptimizer(torch.optim.AdamW, (("w", "b"),))
    optimizer.step({"w": w_local, ...}, ({"lr": 3e-4, ...},), {"w": grad_local, ...})

The controller's optimizer is never stepped with gradients; its parameter groups are read each step
and sent here. Classes whose update is elementwise (each element of a parameter is updated from its
own gradient and state alone) give the same numbers on shards; those are known by exact class.
With master weights a shard of 16 bits has a float32 copy here, which is what is updated: the shard
becomes that copy rounded. The copies are exported with the state, under MASTER.
State tensors have the shape of the shard and its placements; scalars (the step) are the same on
all ranks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow

MASTER = "master_param"
"""The key of a master weight in a parameter's state, as in NVIDIA's Transformer Engine."""

NAMES = "names of parameters"
"""The key of a group's names among its options, where they are others than at the step before."""

ELEMENTWISE: dict[type[torch.optim.Optimizer], int] = {
    # class -> tensors of the parameter's shape that its state holds, at most
    torch.optim.SGD: 1,
    torch.optim.Adam: 3,
    torch.optim.AdamW: 3,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.Adamax: 2,
    torch.optim.Adagrad: 1,
    torch.optim.Adadelta: 2,
    torch.optim.RMSprop: 3,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """PlanningError unless the exact class is known to be elementwise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanningError(
            f"the optimizer is {optimizer!r}, not a torch.optim optimizer; "
            f"fix: torch.optim.AdamW(model.parameters())"
        )
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise PlanningError(
            f"{type(optimizer).__name__} is not known to be elementwise, so on shards it could "
            f"give other numbers than on whole parameters.\n  known: {known}\n"
            f"  fix: use one of these"
        )


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


def state_tensors(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's shape the state will hold, from class and options."""
    options = optimizer.defaults
    match type(optimizer).__name__:
        case "SGD":
            return 1 if options.get("momentum") else 0
        case "Adam" | "AdamW":
            return 3 if options.get("amsgrad") else 2
        case "RMSprop":
            return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
        case _:
            return ELEMENTWISE[type(optimizer)]


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Each group's options, without its parameters: what is sent every step."""
    return tuple(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


class ShardOptimizer:
    """One rank's optimizer. It lives in the actor's table and is built at its first step."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Sequence[str]],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        masters: bool = False,
    ) -> None:
        self.kind = kind
        self.groups = tuple(tuple(group) for group in groups)
        self.masters = masters
        self.initial = {name: dict(entry) for name, entry in (state or {}).items()}
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.mastered: set[str] = set()
        self.seen: dict[str, weakref.ref[torch.Tensor]] = {}  # the shards of the step before

    def step(
        self,
        shards: Mapping[str, torch.Tensor],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """Update ``shards`` in place; ``options`` are one mapping per group.

        A shard that is a copy, made anew for each step, is read and written like the others.
        """
        if any(NAMES in given for given in options):
            groups = tuple(tuple(given[NAMES]) for given in options)
            if groups != self.groups:  # names come again until a step is known to have them
                self._regroup(groups)
            options = [{k: v for k, v in given.items() if k != NAMES} for given in options]
        optimizer = self._built(shards, options)
        self._take_over(shards)
        copied = [
            (self.parameters[name], shard)
            for name, shard in shards.items()
            if self.parameters[name].data_ptr() != shard.data_ptr()
        ]
        for parameter, shard in copied:
            if parameter.dtype == shard.dtype:  # a master keeps what the shard has no bits for
                parameter.data.copy_(shard)
        for group, given in zip(self._groups(optimizer), options, strict=True):
            group.update(given)
        for name, parameter in self.parameters.items():
            grad = gradients.get(name)  # of narrow parameters it may be float32
            parameter.grad = None if grad is None else grad.to(parameter.dtype)
        with torch.enable_grad():
            optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        for parameter, shard in copied:
            shard.copy_(parameter.data)

    def _take_over(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Shards that are other tensors than at the step before may have other values: a master
        follows. One that is the same tensor twice is the parameter's memory from then on."""
        for name, shard in shards.items():
            parameter, seen = self.parameters[name], self.seen.get(name)
            if seen is not None and parameter.data_ptr() != shard.data_ptr():
                if name in self.mastered:
                    if seen() is not shard:
                        parameter.data.copy_(_master(shard, parameter.data))
                elif seen() is shard:
                    parameter.data = shard.detach()
            self.seen[name] = weakref.ref(shard)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves an actor as its state on the CPU: the controller may have no GPU to load it to.
        As arrays of bytes, which Ray moves without copying them."""
        state = {
            name: {
                key: _bytes_of(value) if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
            }
            for name, entry in self.entries().items()
        }
        return _arrived, (self.kind, self.groups, state, self.masters)

    def export(self) -> dict[str, dict[str, Any]]:
        """Parameter name to its state entries; tensors on the CPU."""
        return {
            name: {
                key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
            }
            for name, entry in self.entries().items()
        }

    def entries(self) -> dict[str, dict[str, Any]]:
        """Parameter name to its state entries, not copied: what was given for parameters that were
        not stepped yet, and what there is of others."""
        if self.optimizer is None:
            return self.initial
        now = {name: dict(self.optimizer.state.get(p, {})) for name, p in self.parameters.items()}
        for name in self.mastered:
            now[name][MASTER] = self.parameters[name].data
        return {**self.initial, **now}

    def part(self, names: Sequence[str]) -> ShardOptimizer:
        """One with the state of these parameters alone, not copied: what is sent is not all."""
        entries = self.entries()
        some = {name: entries[name] for name in names if name in entries}
        return ShardOptimizer(self.kind, self.groups, some, self.masters)

    def nbytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(
            value.numel() * value.element_size()
            for entry in self.export().values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )

    def _regroup(self, groups: tuple[tuple[str, ...], ...]) -> None:
        """The optimizer is built anew at this step, with the state that there is."""
        self.initial = self.entries()
        self.optimizer = None
        self.groups = groups

    def _built(
        self, shards: Mapping[str, torch.Tensor], options: Sequence[Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        """The optimizer of all parameters that had a gradient so far: one that is frozen, or that
        the program does not use, may get its first one later."""
        if self.optimizer is not None and self.parameters.keys() >= shards.keys():
            return self.optimizer
        state = self.entries()
        old = self.parameters
        self.parameters = {
            name: old[name] if name in old else self._parameter(name, shards[name], state)
            for group in self.groups
            for name in group
            if name in old or name in shards
        }
        groups = [
            {**given, "params": [self.parameters[name] for name in names]}
            for names, given in zip(self._present(), options, strict=True)
            if names
        ]
        self.optimizer = self.kind(groups)  # pyright: ignore[reportCallIssue]
        for name, parameter in self.parameters.items():
            if state.get(name):
                self.optimizer.state[parameter] = {
                    key: _fitted(value, parameter, key)
                    for key, value in state[name].items()
                    if key != MASTER
                }
        self.initial = {n: entry for n, entry in state.items() if n not in self.parameters}
        return self.optimizer

    def _parameter(
        self, name: str, shard: torch.Tensor, state: Mapping[str, Mapping[str, Any]]
    ) -> torch.nn.Parameter:
        """What the optimizer updates for a shard: the shard itself, or its master."""
        if not (self.masters and is_narrow(shard.dtype)):
            return torch.nn.Parameter(shard)
        self.mastered.add(name)
        loaded = state.get(name, {}).get(MASTER)
        if loaded is None:
            return torch.nn.Parameter(shard.float())
        return torch.nn.Parameter(_master(shard, loaded.to(shard.device, torch.float32)))

    def _present(self) -> list[list[str]]:
        """By group, the names of the parameters that the optimizer has."""
        return [[name for name in group if name in self.parameters] for group in self.groups]

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups, with empty stand-ins where this rank holds none of a group."""
        real = iter(optimizer.param_groups)
        return [next(real) if names else {} for names in self._present()]


def _master(shard: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """The elements of a master that the shard is the rounding of: where the model was given other
    values since, those count."""
    return torch.where(master.to(shard.dtype) == shard, master, shard.float())


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor on its way; bf16 has no numpy dtype."""

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


def _bytes_of(value: torch.Tensor) -> _Bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return _Bytes(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _arrived(
    kind: type[torch.optim.Optimizer],
    groups: Sequence[Sequence[str]],
    state: Mapping[str, Mapping[str, Any]],
    masters: bool,
) -> ShardOptimizer:
    """What it was given may be memory of Ray's, which nobody writes: the first step copies it."""

    def tensor(value: _Bytes) -> torch.Tensor:
        if not value.data.size:
            return torch.empty(value.shape, dtype=value.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is read-only
            return torch.from_numpy(value.data).view(value.dtype).reshape(value.shape)

    given = {
        name: {k: tensor(v) if isinstance(v, _Bytes) else v for k, v in entry.items()}
        for name, entry in state.items()
    }
    return ShardOptimizer(kind, groups, given, masters)


def _fitted(value: Any, parameter: torch.Tensor, key: str) -> Any:
    """A state entry where its parameter is, and in its dtype, which loading need not have kept."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":  # torch keeps it on the CPU unless the optimizer is capturable or fused
        return value.clone()
    alike = value.is_floating_point() and value.shape == parameter.shape
    return value.to(parameter.device, parameter.dtype if alike else value.dtype, copy=True)


# -- what generated code calls ---------------------------------------------------------------------


def sum_of_squares(counted: Sequence[torch.Tensor], like: torch.device) -> torch.Tensor:
    """The sum of squares of all elements, float32, a left fold over the tensors."""
    total = torch.zeros((), dtype=torch.float32, device=like)
    for gradient in counted:
        total = total + gradient.float().square().sum()
    return total


def clip_coefficient(squares: torch.Tensor, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, min(1, max_norm / (norm + 1e-6))), as torch.nn.utils.clip_grad_norm_ has it."""
    norm = squares.sqrt()
    return norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0)
