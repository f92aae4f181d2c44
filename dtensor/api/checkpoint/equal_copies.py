"""Whether ranks that hold copies of one value hold the same: `check_replicas`.

    dt.check_replicas(model, opt)            # 14: so many values have copies, and all are equal

Where several ranks compute the same update of a replicated value, as those along tp do for norms,
nothing is sent that would keep their copies equal: their kernels must give the same bits. On a CPU
they do. On CUDA some do not (`torch.use_deterministic_algorithms` lists them), and the copies may
drift apart, of which no loss shows anything.

Not here: the digests and their program (runtime/transfer/digests.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import checked_optional
from dtensor.api.store.home import ModelHome
from dtensor.api.store.session import existing_session
from dtensor.daft import DaftError
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.transfer.digests import copies, digest_program, unequal
from dtensor.sharding.spec.stored import StoredTensor

Paths = Mapping[tuple[str, ...], StoredTensor]
_FIX = (
    "fix: torch.use_deterministic_algorithms(True) before training: ranks get it with each step; "
    "dt.load(path, model, opt) of a checkpoint, which has one of the copies, makes them equal again"
)


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold copies of one value hold different values. ``names``: of the
    values."""

    def __init__(self, names: tuple[str, ...], lines: Iterable[str]) -> None:
        self.names = names
        values = "1 value" if len(names) == 1 else f"{len(names)} values"
        text = "\n".join(f"  {line}" for line in lines)
        super().__init__(f"ranks do not hold equal copies of {values}.\n{text}\n{_FIX}")


def check_replicas(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Compare the copies of each value that several ranks hold, to the bit; returns how many values
    have copies.

    Args:
        model: its parameters and buffers, as they are on the ranks after the steps called before.
        optimizer: None leaves its state out.

    Raises `ReplicasDiffer`, which names the values, the ranks and the largest differences. Each
    rank reads its copies once, and sends 16 bytes for each value; only copies that differ are sent
    whole. On CUDA `gather_state_dict` and `save` look too, and warn.
    """
    check_parallel("check_replicas", model)
    optimizer = checked_optional(optimizer)
    with CALL_LOCK:
        model.look()
        session = existing_session(model.mesh)
        home = None if session is None else session.model_homes.get(id(model))
        if session is None or home is None:
            raise PlanningError(
                "no rank holds a value of this model.\n"
                "fix: call dt.check_replicas(model, opt) in the launch, after a step"
            )
        values = with_copies(home, optimizer)
        if values and (found := _begun(home, values)()):
            _raise(home, values, found)
    return len(values)


def with_copies(home: ModelHome, optimizer: torch.optim.Optimizer | None) -> Paths:
    """The values of a model, and of its optimizer, of which several ranks have the same; by name,
    and for the optimizer the key there."""
    name = home.model.seen.name
    found: dict[tuple[str, ...], StoredTensor] = {
        (name(label),): stored for label, stored in home.owner.stored.items()
    }
    own = None if optimizer is None else home.optimizers.get(id(optimizer))
    if own is not None and own.current:
        for (label, key), stored in own.owner.stored.items():
            found[name(label), key] = stored
    return {path: stored for path, stored in found.items() if copies(stored)}


Unequal = list[tuple[tuple[str, ...], tuple[int, ...]]]
"""Values whose copies differ, with the ranks of their mesh that hold copies."""


def _begun(home: ModelHome, values: Paths) -> Callable[[], Unequal]:
    """Submit the comparison of copies, as they are after the steps before; the function waits for
    it."""
    key = "copies", id(home.model), tuple(values)
    run = home.store.save(key, values, partial(digest_program, values), {})

    def found() -> Unequal:
        try:
            return list(unequal(values, run.get()))
        except DaftError as error:
            raise home.session.with_loss_note(error) from error.__cause__

    return found


def warn_of_unequal(home: ModelHome, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Submit the comparison; the function waits for it, and warns where copies differ, as whoever
    writes one of them must."""
    values = with_copies(home, optimizer)
    if not values:
        return lambda: None
    found = _begun(home, values)

    def warn() -> None:
        try:
            differ = found()
        except DaftError as error:
            if home.session.cluster.failure is not None:
                raise
            text = f"copies of values on several ranks were not compared: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        if differ:
            error = ReplicasDiffer(_names(differ), (f"{_said(p)}: {_ranks(r)}" for p, r in differ))
            how_far = "\ndt.check_replicas(model, opt) says by how much"
            warnings.warn(f"{error}{how_far}", RuntimeWarning, stacklevel=2)

    return warn


def _raise(home: ModelHome, values: Paths, found: Unequal) -> None:
    lines: list[str] = []
    for path, ranks in found:
        stored = values[path]
        shards: dict[int, Tensor] = home.store.fetch([stored.on(ranks)])[stored.label]
        first = shards[ranks[0]]
        others = [rank for rank in ranks[1:] if not _same(first, shards[rank])]
        each = [_difference(first, shards[rank]) for rank in others]
        number = max(differs for differs, _ in each)
        most = float(torch.tensor([by for _, by in each], dtype=torch.float64).max())  # nan, if any
        lines.append(
            f"{_said(path)}: {_ranks((ranks[0],))} and {_ranks(others)} differ in {number} of "
            f"{first.numel()} elements, by up to {most:.2g}"
        )
    raise ReplicasDiffer(_names(found), lines)


def _names(found: Unequal) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_said(path) for path, _ in found))


def _said(path: tuple[str, ...]) -> str:
    name, *key = path
    return f"{key[0]} of {name}" if key else name


def _ranks(ranks: Iterable[int]) -> str:
    each = list(ranks)
    return f"rank {each[0]}" if len(each) == 1 else f"ranks {', '.join(map(str, each))}"


def _same(one: Tensor, other: Tensor) -> bool:
    return _bytes(one).equal(_bytes(other))


def _bytes(value: Any) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _difference(one: Tensor, other: Tensor) -> tuple[int, float]:
    """How many elements differ in a bit, and the largest difference; nan where only one is nan."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    size = max(one.numel(), 1)
    bits = (_bytes(one) != _bytes(other)).reshape(size, -1).any(1)
    by = (one.to(wide) - other.to(wide)).abs().reshape(-1)[bits]
    return int(bits.sum()), float(by.max()) if by.numel() else 0.0
