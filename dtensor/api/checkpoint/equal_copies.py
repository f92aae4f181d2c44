"""`check_replicas`: checks that ranks that hold copies of one value hold equal copies.

    dt.check_replicas(model, opt)            # 14: this many values have copies, and all are equal

Several ranks may compute the same update of a replicated value, as of a norm under tensor
parallelism. No communication keeps the copies equal: they are equal only if the kernels return the
same bits. CPU kernels do; some CUDA kernels do not (`torch.use_deterministic_algorithms` lists
them), and the copies may then drift apart without a trace in the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers
from dtensor.api.store.home import ModelHome
from dtensor.api.store.session import existing_session
from dtensor.daft import DaftError
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.transfer.digests import copy_groups, digest_program, unequal_copies
from dtensor.sharding.spec.stored import StoredTensor

Paths = Mapping[tuple[str, ...], StoredTensor]
_FIX = (
    "fix: torch.use_deterministic_algorithms(True) before training: ranks get it with each step; "
    "dt.load(path, model, opt) of a checkpoint, which has one of the copies, makes them equal again"
)


class ReplicasDiffer(RuntimeError):
    """Ranks hold different copies of one value. ``names``: the names of these values."""

    def __init__(self, names: tuple[str, ...], lines: Iterable[str]) -> None:
        self.names = names
        values = "1 value" if len(names) == 1 else f"{len(names)} values"
        text = "\n".join(f"  {line}" for line in lines)
        super().__init__(f"ranks do not hold equal copies of {values}.\n{text}\n{_FIX}")


def check_replicas(model: ParallelModule, optimizer: Optimizers | None = None) -> int:
    """Compare bitwise the copies of each value that several ranks hold. Return the number of values
    that have copies.

    Args:
        model: the model, whose parameters and buffers are compared after the steps called before.
        optimizer: an optimizer, or a list of several; None leaves the state out.

    Raises `ReplicasDiffer`, which names the values, the ranks and the largest differences. Each
    rank reads its copies once and sends 16 bytes for each value; only copies that differ are sent
    in full. On CUDA, `gather_state_dict` and `save` also compare, and warn.
    """
    check_parallel("check_replicas", model)
    optimizers = checked_optimizers(optimizer)
    with CALL_LOCK:
        model.look()
        session = existing_session(model.mesh)
        home = None if session is None else session.model_homes.get(id(model))
        if session is None or home is None:
            raise PlanningError(
                "no rank holds a value of this model.\n"
                "fix: call dt.check_replicas(model, opt) in the launch, after a step"
            )
        values = with_copies(home, optimizers)
        if values and (unequal_values := _submit(home, values)()):
            _raise(home, values, unequal_values)
    return len(values)


def with_copies(home: ModelHome, optimizers: Sequence[torch.optim.Optimizer]) -> Paths:
    """Return the values that several ranks hold: the values of a model, by (name,), and of its
    optimizers, by (name, key, label of the optimizer)."""
    name = home.model.seen.name
    values: dict[tuple[str, ...], StoredTensor] = {
        (name(label),): stored for label, stored in home.owner.stored.items()
    }
    for optimizer in optimizers:
        optimizer_home = home.optimizers.get(id(optimizer))
        if optimizer_home is not None and optimizer_home.current:
            for (label, key), stored in optimizer_home.owner.stored.items():
                values[name(label), key, optimizer_home.label] = stored
    return {path: stored for path, stored in values.items() if copy_groups(stored)}


Unequal = list[tuple[tuple[str, ...], tuple[int, ...]]]
"""Values whose copies differ, with the ranks of their mesh that hold copies."""


def _submit(home: ModelHome, values: Paths) -> Callable[[], Unequal]:
    """Submit the comparison of copies after the steps called before. Return a function that waits
    for it and returns the values whose copies differ."""
    key = "copies", id(home.model), tuple(values)
    run = home.store.save(key, values, partial(digest_program, values), {})

    def wait() -> Unequal:
        try:
            return list(unequal_copies(values, run.get()))
        except DaftError as error:
            raise home.session.with_loss_note(error) from error.__cause__

    return wait


def warn_of_unequal(
    home: ModelHome, optimizers: Sequence[torch.optim.Optimizer]
) -> Callable[[], None]:
    """Submit the comparison, before one of the copies is written to a checkpoint. Return a function
    that waits for it and warns if copies differ."""
    values = with_copies(home, optimizers)
    if not values:
        return lambda: None
    wait = _submit(home, values)

    def warn() -> None:
        """Wait for the comparison. Warn if copies differ, or if only the comparison failed."""
        try:
            unequal = wait()
        except DaftError as error:
            if home.session.cluster.failure is not None:
                raise
            text = f"copies of values on several ranks were not compared: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        if unequal:
            lines = (f"{_path_text(path)}: {_ranks_text(ranks)}" for path, ranks in unequal)
            error = ReplicasDiffer(_names(unequal), lines)
            hint = "\ndt.check_replicas(model, opt) says by how much"
            warnings.warn(f"{error}{hint}", RuntimeWarning, stacklevel=2)

    return warn


def _raise(home: ModelHome, values: Paths, unequal: Unequal) -> None:
    """Fetch the copies that differ, and raise ReplicasDiffer."""
    lines: list[str] = []
    for path, ranks in unequal:
        stored = values[path]
        shards: dict[int, Tensor] = home.store.fetch([stored.on(ranks)])[stored.label]
        first = shards[ranks[0]]
        unequal_ranks = [rank for rank in ranks[1:] if not _same(first, shards[rank])]
        differences = [_difference(first, shards[rank]) for rank in unequal_ranks]
        number = max(count for count, _ in differences)
        sizes = torch.tensor([size for _, size in differences], dtype=torch.float64)
        largest = float(sizes.max())  # NaN if one is NaN
        lines.append(
            f"{_path_text(path)}: {_ranks_text((ranks[0],))} and {_ranks_text(unequal_ranks)} "
            f"differ in {number} of {first.numel()} elements, by up to {largest:.2g}"
        )
    raise ReplicasDiffer(_names(unequal), lines)


def _names(unequal: Unequal) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_path_text(path) for path, _ in unequal))


def _path_text(path: tuple[str, ...]) -> str:
    name, *key = path
    return f"{key[0]} of {name}" if key else name


def _ranks_text(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _same(tensor: Tensor, other: Tensor) -> bool:
    return _bytes(tensor).equal(_bytes(other))


def _bytes(value: Any) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _difference(tensor: Tensor, other: Tensor) -> tuple[int, float]:
    """Return how many elements differ in a bit, and the largest difference, which is NaN if only
    one of two elements is NaN."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    size = max(tensor.numel(), 1)
    differs = (_bytes(tensor) != _bytes(other)).reshape(size, -1).any(1)
    distances = (tensor.to(wide) - other.to(wide)).abs().reshape(-1)[differs]
    return int(differs.sum()), float(distances.max()) if distances.numel() else 0.0
