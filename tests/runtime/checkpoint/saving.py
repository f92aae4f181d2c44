"""Helpers of the checkpoint tests: a small state, saved by two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtensor.runtime.checkpoint import Checkpoint, PartRecord, TensorPiece, Writing, write_part


def state(seed: int = 0) -> dict[tuple[str, ...], Tensor]:
    """Return, by path, matrices of several dtypes, a number, and a tensor without elements."""
    drawn = torch.Generator().manual_seed(seed)
    w = torch.randn(10, 6, generator=drawn)
    return {
        ("model", "0.weight"): w,
        ("model", "0.mask"): w > 0,
        ("model", "wide"): torch.randn(64, 96, generator=drawn).bfloat16(),
        ("model", "none"): torch.zeros(0, 3),
        ("optimizer", "state", "0.weight", "exp_avg"): torch.randn(10, 6, generator=drawn).double(),
        ("optimizer", "state", "0.weight", "step"): torch.tensor(7.0),
    }


GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["0.weight"]}]
SMALL: Mapping[tuple[str, ...], Any] = {("optimizer", "param_groups"): GROUPS}


def block(path: tuple[str, ...], full: Tensor, *where: tuple[int, int]) -> TensorPiece:
    """Return the piece of a tensor at these ranges of its first dims."""
    at = where + tuple((0, n) for n in full.shape[len(where) :])
    return TensorPiece(
        path=path,
        shape=tuple(full.shape),
        offsets=tuple(lo for lo, _ in at),
        tensor=full[tuple(slice(lo, hi) for lo, hi in at)],
    )


def pieces(values: Mapping[tuple[str, ...], Tensor], rank: int) -> list[TensorPiece]:
    """Return a rank's pieces, of two ranks: 7 and 3 rows of most tensors; three column blocks of
    "wide"; all else on rank 0."""
    own: list[TensorPiece] = []
    for path, full in values.items():
        if path == ("model", "wide"):
            ranges = [((0, 64), (0, 32)), ((0, 64), (64, 96))] if rank else [((0, 64), (32, 64))]
            own += [block(path, full, *where) for where in ranges]
        elif full.dim() == 2 and len(full):
            own.append(block(path, full, (7, 10) if rank else (0, 7)))
        elif rank == 0:
            own.append(block(path, full))
    return own


def save(
    path: Path,
    values: Mapping[tuple[str, ...], Tensor],
    *,
    extra: Any = None,
    step: int | None = 100,
    keep: int | None = None,
) -> list[PartRecord]:
    writing = Writing.begin(path, step=step, extra=extra, small=SMALL)
    parts = [
        write_part(writing.folder, rank, pieces(values, rank), writing.previous) for rank in (0, 1)
    ]
    writing.finish(parts, keep=keep)
    return parts


def check_equal(saved: Checkpoint, values: Mapping[tuple[str, ...], Tensor]) -> None:
    assert set(saved.tensors) == {".".join(path) for path in values}
    for path, full in values.items():
        got = saved.read(".".join(path))
        assert got.dtype == full.dtype and torch.equal(got, full), path
