"""Describe the options of a launch for all backends: `LaunchOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import cast, get_args

from dtensor.daft.cluster.cluster import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of a launch. Raises ValueError if an option is invalid.

    The deadlines and `warm` are for Ray only, because nothing waits in-process.

    Args:
        backend: "inprocess": all ranks and actors are in this process; "ray": in other processes.
        device: the device of the ranks, "cpu" or "cuda".
        address: of a Ray cluster to join. Without it, the Ray that this process has joined is used,
            or one is started on this machine.
        deadline_s: how many seconds a rank may make no progress, and an actor's process may be
            silent or take to start, before it counts as lost. A rank that computes goes on, after
            a warning.
        call_deadline_s: how many seconds one computation of a rank, or one method of an actor, may
            take before its process is ended.
        ranks_per_actor: number of consecutive ranks that share an actor (on Ray a process, on
            "cuda" also a GPU); by default 1. There must be a free GPU for each actor.
        seed: selects one of the legal orders in which the ranks of a process run.
        spares: processes that wait to replace lost ones. `snapshot_every` is then 1 by default.
        snapshot_every: after this many runs, copies of the values that they wrote are kept.
            In-process every failed run is then undone. On Ray a lost process is replaced, and the
            runs since the last copy are repeated.
        max_restarts: how many processes may be replaced before the loss of one is an error.
        warm: a Ray that is started here stays for a minute for the next launch of this process.
            False: it ends with the launch, even if an earlier launch had left it running.
        deterministic: on "cuda", sums and other reductions between ranks are folds in the order of
            the ranks, and not NCCL's. They are that on CPUs and in-process.
    """

    backend: Backend = "inprocess"
    device: str = "cpu"
    address: str | None = None
    deadline_s: float = 60.0
    call_deadline_s: float = 3600.0
    ranks_per_actor: int | None = None
    seed: int = 0
    spares: int = 0
    snapshot_every: int | None = None
    max_restarts: int = 100
    warm: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f'backend={self.backend!r}: it is "inprocess" or "ray"')
        _check_seconds("deadline_s", self.deadline_s, 60.0)
        _check_seconds("call_deadline_s", self.call_deadline_s, 3600.0)
        if self.ranks_per_actor is not None:
            _check_count("ranks_per_actor", self.ranks_per_actor, 1, fix=1)
        _check_count("spares", self.spares, 0, fix=1)
        if self.snapshot_every is not None:
            _check_count("snapshot_every", self.snapshot_every, 1, fix=1)
        elif self.spares:
            object.__setattr__(self, "snapshot_every", 1)
        _check_count("max_restarts", self.max_restarts, 0, fix=100)
        if self.deterministic and not str(self.device).startswith("cuda"):
            raise ValueError(
                f"deterministic={self.deterministic!r} with device={self.device!r}: the option is "
                f'for "cuda". On CPUs, sums between ranks have one order.\nfix: leave it out'
            )


def _check_seconds(name: str, value: object, fix: float) -> None:
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not (is_number and cast(float, value) > 0):
        raise ValueError(f"{name}={value!r} is not a number above 0.\nfix: {name}={fix}")


def _check_count(name: str, value: object, least: int, *, fix: int) -> None:
    is_whole = not isinstance(value, bool) and isinstance(value, Integral)
    if not (is_whole and cast(int, value) >= least):
        raise ValueError(
            f"{name}={value!r} is not a whole number of at least {least}.\nfix: {name}={fix}"
        )
