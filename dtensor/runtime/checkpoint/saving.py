"""Programs that move values between ranks and files: the copies, writes and reads of ranks.

    stored = {("model", "w"): StoredTensor("model 0: w", spec, (0, 1), (0, 1))}
    handle = cluster.load(save_program(stored, 2))
    fed = {STEP: 7, SAVING: Saving(folder="ckpt/.tmp-100-1f0c", ...)}
    cluster.run(handle, [fed] * 2)                   # ranks copy, and their threads write
    handle = cluster.load(load_program("ckpt/100", {"model.w": StoredTensor(...)}, 2, device))
    cluster.run(handle, [{}] * 2)                    # state "model 0: w" has the files' values

In a save each rank copies the blocks that it must write, and passes them to a thread of its
process, which writes during later runs. If several ranks hold the same value, each writes a part: a
small value is written by the rank with the fewest bytes so far, a large one is cut by rows. So each
element is written by exactly one rank, which follows from the specs alone.

In a load each rank reads only the blocks of its own shards; all ranks agree that all have all
before new values replace the old, as in a sync (between_meshes.py).

Not here: the contents of files (checkpoint/), the waits for a save (api/checkpoint/async_save.py).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypedDict

import torch

from dtensor.daft import Call, Free, Function, Instruction, Label, Program, RankProgram
from dtensor.daft.remote_exceptions import reason_of
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorPiece,
    read_part,
    write_hf_part,
    write_part,
)
from dtensor.runtime.checkpoint.atomic_folder import write_synced
from dtensor.runtime.optimizer.shard_optimizer import is_absent
from dtensor.runtime.transfer.between_meshes import agreement, placed
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.spec.shards import Where, shape_of
from dtensor.sharding.spec.stored import StoredTensor

SAVING = "saving"
"""The input of a save with its destination."""
SPLIT_BYTES = 1 << 20
"""A larger block that several ranks hold is cut, so that each writes a part."""

Names = tuple[str, ...]
"""The path of a tensor in the state dict of a checkpoint: ("model", "up.weight")."""


class Saving(TypedDict):
    """The input of ranks for a save. ``previous``: the checkpoint whose unchanged files are linked;
    ``format``: "dcp" or "hf"."""

    folder: str
    previous: str | None
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A block of a value that one rank writes: ``offsets``: its begin in the whole value, of shape
    ``shape``; ``at``: its begin in the rank's shard."""

    path: Names
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The block of a rank's shard: a view."""
        return block_at(shard, self.at, self.sizes)


def block_at(shard: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The block at these offsets, of these sizes: a view."""
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        shard = shard.narrow(dim, begin, size)
    return shard


def blocks_of(where: Where) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The blocks that a shard consists of: their global offsets, their sizes, their offsets in the
    shard. A shard without elements has none."""
    dims: list[list[tuple[int, int, int]]] = []
    for intervals in where:
        begins = itertools.accumulate((hi - lo for lo, hi in intervals), initial=0)
        dims.append([(lo, hi - lo, at) for (lo, hi), at in zip(intervals, begins, strict=False)])
    for block in itertools.product(*dims):
        offsets, sizes, at = zip(*block, strict=True) if block else ((), (), ())
        yield offsets, sizes, at


def shares(values: Mapping[Names, StoredTensor], size: int) -> list[list[Share]]:
    """By rank, the blocks that it writes: every element of every value once."""
    shares_by_rank: list[list[Share]] = [[] for _ in range(size)]
    load = [0] * size
    parts: list[tuple[int, list[int], Share]] = []
    for path, value in values.items():
        spec = value.spec
        alike: dict[Where, list[int]] = {}
        for rank in value.at:
            alike.setdefault(value.where(rank), []).append(rank)
        for where, holders in alike.items():
            for offsets, sizes, at in blocks_of(where):
                share = Share(path=path, shape=spec.shape, offsets=offsets, sizes=sizes, at=at)
                parts += [
                    (math.prod(part.sizes) * spec.dtype.itemsize, holders, part)
                    for part in _cut(share, len(holders), spec.dtype.itemsize)
                ]
        if 0 in spec.shape:  # no elements to write, only its record
            where, (rank, *_) = next(iter(alike.items()))
            none = (0,) * len(spec.shape)
            shares_by_rank[rank].append(
                Share(path=path, shape=spec.shape, offsets=none, sizes=shape_of(where), at=none)
            )
    # blocks of one rank alone, then the largest first: the rank with the fewest bytes takes the
    # next
    for nbytes, holders, share in sorted(parts, key=lambda part: (len(part[1]) > 1, -part[0])):
        rank = min(holders, key=lambda r: (load[r], r))
        shares_by_rank[rank].append(share)
        load[rank] += nbytes
    order = {path: i for i, path in enumerate(values)}
    return [
        sorted(mine, key=lambda share: (order[share.path], share.offsets))
        for mine in shares_by_rank
    ]


def _cut(share: Share, num: int, itemsize: int) -> list[Share]:
    """Parts of a large block, by rows of its first dim that has several."""
    dim = next((d for d, size in enumerate(share.sizes) if size > 1), None)
    if num == 1 or dim is None or math.prod(share.sizes) * itemsize < SPLIT_BYTES:
        return [share]

    def moved(begin: int, end: int) -> Share:
        return replace(
            share,
            offsets=_with(share.offsets, dim, share.offsets[dim] + begin),
            sizes=_with(share.sizes, dim, end - begin),
            at=_with(share.at, dim, share.at[dim] + begin),
        )

    bounds = [share.sizes[dim] * i // num for i in range(num + 1)]
    return [moved(lo, hi) for lo, hi in itertools.pairwise(bounds) if hi > lo]


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


# -- the programs ----------------------------------------------------------------------------------


def save_program(values: Mapping[Names, StoredTensor], size: int) -> Program:
    """Each rank copies its shares and hands them to a writer; it is fed STEP, the number of the
    next training step, and returns it: the right one if an earlier step was undone."""
    ranks: list[RankProgram] = []
    functions: list[tuple[str, Function]] = []
    for rank, mine in enumerate(shares(values, size)):
        names = tuple(dict.fromkeys(values[share.path].label for share in mine))
        fn = partial(copy_and_write, rank, mine, [names.index(values[s.path].label) for s in mine])
        functions.append((f"save on {rank}", Function.of(fn, f"save on {rank}")))
        call = Call(f"save on {rank}", (STEP, SAVING, *names), ("number",), label=Label("save"))
        ranks.append(
            RankProgram(
                instructions=(call,), inputs=(STEP, SAVING), outputs=("number",), state=names
            )
        )
    return Program(
        name="save", ranks=tuple(ranks), functions=tuple(functions), stage_of=(0,) * size
    )


def load_program(
    folder: str, values: Mapping[str, StoredTensor], size: int, device: torch.device
) -> Program:
    """By name in the files: each rank reads its own blocks; either all values of all ranks replace
    the old ones, or none does."""
    wanted: list[dict[str, tuple[str, Where, torch.dtype]]] = [{} for _ in range(size)]
    for in_files, value in values.items():
        for rank in value.at:
            wanted[rank][value.label] = in_files, value.where(rank), value.spec.dtype
    group = tuple(rank for rank, blocks in enumerate(wanted) if blocks)
    functions: list[tuple[str, Function]] = [("place", Function.of(placed, "place"))]
    ranks: list[RankProgram] = []
    for rank, blocks in enumerate(wanted):
        if not blocks:
            ranks.append(RankProgram(instructions=()))
            continue
        fn = partial(read_shards, folder, tuple(blocks.values()), device)
        functions.append((f"read on {rank}", Function.of(fn, f"read on {rank}")))
        names = tuple(blocks)
        new = tuple(f"new {name}" for name in names)
        instructions: list[Instruction] = [
            Call(f"read on {rank}", (), new, label=Label("load")),
            *agreement(group, "load"),
            Call("place", new, names, label=Label("load")),
            Free(new, label=Label("load")),
        ]
        nbytes = tuple(
            (f"new {name}", math.prod(shape_of(where)) * dtype.itemsize)
            for name, (_, where, dtype) in blocks.items()
        )
        ranks.append(RankProgram(instructions=tuple(instructions), state=names, nbytes=nbytes))
    return Program(
        name="load", ranks=tuple(ranks), functions=tuple(functions), stage_of=(0,) * size
    )


def ask_program(size: int) -> Program:
    """Each rank reports its progress in the folder that it is fed (`state_of`)."""
    functions = tuple(
        (f"ask {rank}", Function.of(partial(told_state, rank), f"ask {rank}"))
        for rank in range(size)
    )
    calls = [
        Call(name, (SAVING,), ("state",), label=Label("ask of a save")) for name, _ in functions
    ]
    ranks = tuple(
        RankProgram(instructions=(call,), inputs=(SAVING,), outputs=("state",)) for call in calls
    )
    return Program(name="ask of a save", ranks=ranks, functions=functions, stage_of=(0,) * size)


# -- functions that ranks call
# -------------------------------------------------------------------------------


def copy_and_write(
    rank: int,
    mine: Sequence[Share],
    source: Sequence[int],
    number: int,
    saving: Saving,
    *shards: torch.Tensor,
) -> tuple[int]:
    """Copy the shares, of ``shards[source[i]]`` each, and pass them to a thread; returns
    ``number``. A state that no step has made yet is skipped. It never fails: it may be repeated
    after the loss of another rank, when the save is over."""
    pieces = [
        TensorPiece(
            path=share.path,
            shape=share.shape,
            offsets=share.offsets,
            tensor=own_copy(share.of(shards[i])),
        )
        for share, i in zip(mine, source, strict=True)
        if not (share.path[0] == "optimizer" and is_absent(shards[i]))
    ]
    hand_over(saving, rank, pieces)
    return (number,)


def told_state(rank: int, saving: Saving) -> tuple[str]:
    return (state_of(saving["folder"], rank),)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A private contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def read_shards(
    folder: str,
    wanted: Sequence[tuple[str, Where, torch.dtype]],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Each value's shard, read from the files; in this dtype, if they have another."""
    checkpoint = opened(folder)
    return tuple(
        read_shard(checkpoint, name, where, dtype).to(device) for name, where, dtype in wanted
    )


def read_shard(checkpoint: Checkpoint, name: str, where: Where, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's shard: per dim the intervals of global indices in ``where``, one after another."""
    blocks = list(blocks_of(where))
    if len(blocks) == 1:
        return checkpoint.read(name, *blocks[0][:2]).to(dtype)
    shard = torch.empty(shape_of(where), dtype=dtype)
    for offsets, sizes, at in blocks:
        block_at(shard, at, sizes).copy_(checkpoint.read(name, offsets, sizes))
    return shard


def opened(folder: str) -> Checkpoint:
    """A checkpoint for ranks to read: each process reads its metadata once."""
    try:
        changed = os.stat(folder).st_mtime_ns
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"this rank is on {socket.gethostname()}, which does not see {folder}.\n"
            f"fix: load from a folder that all machines of the launch share"
        ) from error
    return _opened(folder, changed)


@lru_cache(maxsize=2)
def _opened(folder: str, changed: int) -> Checkpoint:
    return Checkpoint.open(folder)


# -- threads that write ----------------------------------------------------------------------------

FAILED = "error-{}.json"
"""The file with the reason why a rank has no part."""
WRITING, WRITTEN = "writing", "written"

_writers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="dtensor-save")
GONE = "the process that should write it is gone"

_jobs: dict[tuple[str, int], Future[None]] = {}
"""By folder and rank, the parts that this process writes, and the last one it wrote."""


def hand_over(saving: Saving, rank: int, pieces: Sequence[TensorPiece]) -> None:
    """Have a thread of this process write a rank's part. It ends by `part-<rank>.json` or an
    `error-<rank>.json` in the folder, if anything can still be written there (`state_of`). Once: a
    run that is repeated after the loss of another rank has the same pieces."""
    folder = saving["folder"]
    if (folder, rank) in _jobs:
        return
    for key in [key for key, job in _jobs.items() if key[0] != folder and job.done()]:
        del _jobs[key]
    _jobs[folder, rank] = _writers.submit(_write, saving, rank, pieces)


def state_of(folder: str, rank: int) -> str:
    """`WRITING`, `WRITTEN`, or the reason why there will be no part of this rank."""
    job = _jobs.get((folder, rank))
    if job is None:
        return GONE
    if not job.done():
        return WRITING
    error = job.exception()
    return WRITTEN if error is None else _told(error)


def error_of(folder: str, rank: int) -> str:
    """The reason why a rank has no part, if it could write that; or ""."""
    try:
        return json.loads(Path(folder, FAILED.format(rank)).read_bytes())
    except FileNotFoundError:
        return ""


def _write(saving: Saving, rank: int, pieces: Sequence[TensorPiece]) -> None:
    folder = saving["folder"]
    try:
        if read_part(folder, rank) is not None:
            return  # the lost process wrote it before
        if not os.path.isdir(folder):
            raise CheckpointError(
                f"it is on {socket.gethostname()}, which does not see {folder}.\n"
                f"fix: save to a folder that all machines of the launch share"
            )
        if saving["format"] == "hf":
            write_hf_part(folder, rank, pieces)
        else:
            write_part(folder, rank, pieces, saving["previous"])
    except BaseException as error:
        with suppress(OSError):  # the disk may be full: then `state_of` reports it
            write_synced(Path(folder) / FAILED.format(rank), json.dumps(_told(error)).encode())
        del pieces  # which the traceback would keep
        raise


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else reason_of(error)
