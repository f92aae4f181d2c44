"""Programs in which ranks save values to files and load values from files.

    stored = {("model", "w"): StoredTensor("model 0: w", spec, (0, 1), (0, 1))}
    handle = cluster.load(save_program(stored, 2))
    fed = {STEP: 7, SAVING: Saving(folder="ckpt/.tmp-100-1f0c", ...)}
    cluster.run(handle, [fed] * 2)                   # ranks copy, and their threads write
    values = [(Assembly.of("model.w", torch.float32, (8, 4)), StoredTensor(...))]
    handle = cluster.load(load_program("ckpt/100", values, 2, device))
    cluster.run(handle, [{}] * 2)                    # state "model 0: w" has the files' values

In a save each rank copies its blocks and passes them to a thread, which writes during later runs.
Each element is written by one rank, which follows from the specs alone (`shares`). In a load each
rank reads only its shards; values are replaced when all ranks have read theirs.
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

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Free,
    Function,
    Instruction,
    Label,
    Program,
    RankProgram,
    Wait,
)
from dtensor.daft.remote_exceptions import reason_of
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorPiece,
    read_part,
    write_hf_part,
    write_part,
)
from dtensor.runtime.checkpoint.assembly import Assembly, InFiles, Part, read_block, replaced
from dtensor.runtime.checkpoint.atomic_folder import write_synced
from dtensor.runtime.optimizer.shard_optimizer import is_absent
from dtensor.runtime.transfer.between_meshes import agreement, placed
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.shards import Where, shape_of
from dtensor.sharding.spec.stored import StoredTensor

SAVING = "saving"
"""The name of the input with the destination of a save (`Saving`)."""
SPLIT_BYTES = 1 << 20
"""A larger block that several ranks hold is cut, so that each of these ranks writes a part."""

Names = tuple[str, ...]
"""The path of a tensor in the state dict of a checkpoint: ("model", "up.weight")."""


class Saving(TypedDict):
    """The destination of a save. ``previous``: the checkpoint whose unchanged files are linked;
    ``format``: "dcp" or "hf"."""

    folder: str
    previous: str | None
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A block of a value that one rank writes.

    ``offsets``: where the block begins in the global value, which has ``shape``; ``at``: where it
    begins in the rank's shard. ``part``: if the file's tensor has other dims than the value, the
    place of the block in that tensor.
    """

    path: Names
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    part: Part | None = None

    def piece(self, shard: torch.Tensor) -> TensorPiece:
        """Return a copy of the block of a rank's shard, to be written."""
        block = block_at(shard, self.at, self.sizes)
        if self.part is not None:
            block = self.part.arranged(block)
        return TensorPiece(
            path=self.path, shape=self.shape, offsets=self.offsets, tensor=private_copy(block)
        )

    def in_files(self, files: InFiles) -> Iterator[Share]:
        """Yield the shares of the same elements in the tensors of the files."""
        for part in files.parts[".".join(self.path)]:
            block = part.within(self.offsets, self.sizes)
            if block is not None:
                moves = zip(self.at, block.offsets, self.offsets, strict=True)
                yield Share(
                    path=(part.name,),
                    shape=files.tensors[part.name].shape,
                    offsets=block.begin,
                    sizes=block.sizes,
                    at=tuple(at + begin - first for at, begin, first in moves),
                    part=block.inverse(".".join(self.path)),
                )


def block_at(shard: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the block at these offsets, of these sizes, a view."""
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        shard = shard.narrow(dim, begin, size)
    return shard


def blocks_of(where: Where) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield the blocks of a shard, as (global offsets, sizes, offsets in the shard). A shard
    without elements has none."""
    dims: list[list[tuple[int, int, int]]] = []
    for intervals in where:
        begins = itertools.accumulate((hi - lo for lo, hi in intervals), initial=0)
        dims.append([(lo, hi - lo, at) for (lo, hi), at in zip(intervals, begins, strict=False)])
    for block in itertools.product(*dims):
        offsets, sizes, at = zip(*block, strict=True) if block else ((), (), ())
        yield offsets, sizes, at


def shares(values: Mapping[Names, StoredTensor], size: int) -> list[list[Share]]:
    """Return by rank the blocks that it writes: each element of each value exactly once.

    If several ranks hold a block, a large block is cut by rows, and each part goes to the rank with
    the fewest bytes so far.
    """
    shares_by_rank: list[list[Share]] = [[] for _ in range(size)]
    load = [0] * size
    parts: list[tuple[int, list[int], Share]] = []
    for path, value in values.items():
        spec = value.spec
        ranks_by_block: dict[Where, list[int]] = {}
        for rank in value.at:
            ranks_by_block.setdefault(value.where(rank), []).append(rank)
        for where, holders in ranks_by_block.items():
            for offsets, sizes, at in blocks_of(where):
                share = Share(path=path, shape=spec.shape, offsets=offsets, sizes=sizes, at=at)
                parts += [
                    (math.prod(part.sizes) * spec.dtype.itemsize, holders, part)
                    for part in _cut(share, len(holders), spec.dtype.itemsize)
                ]
        if 0 in spec.shape:  # there are no elements, but the value needs a record
            where, (rank, *_) = next(iter(ranks_by_block.items()))
            none = (0,) * len(spec.shape)
            shares_by_rank[rank].append(
                Share(path=path, shape=spec.shape, offsets=none, sizes=shape_of(where), at=none)
            )
    # First assign blocks that only one rank holds, then the others, largest first.
    for nbytes, holders, share in sorted(parts, key=lambda part: (len(part[1]) > 1, -part[0])):
        rank = min(holders, key=lambda r: (load[r], r))
        shares_by_rank[rank].append(share)
        load[rank] += nbytes
    order = {path: i for i, path in enumerate(values)}
    return [
        sorted(rank_shares, key=lambda share: (order[share.path], share.offsets))
        for rank_shares in shares_by_rank
    ]


def _cut(share: Share, num: int, itemsize: int) -> list[Share]:
    """Cut a large block into ``num`` parts along its first dim larger than 1."""
    dim = next((d for d, size in enumerate(share.sizes) if size > 1), None)
    if num == 1 or dim is None or math.prod(share.sizes) * itemsize < SPLIT_BYTES:
        return [share]

    def part_of(begin: int, end: int) -> Share:
        """Return rows ``begin`` to ``end`` of the block."""
        return replace(
            share,
            offsets=replaced(share.offsets, dim, share.offsets[dim] + begin),
            sizes=replaced(share.sizes, dim, end - begin),
            at=replaced(share.at, dim, share.at[dim] + begin),
        )

    bounds = [share.sizes[dim] * i // num for i in range(num + 1)]
    return [part_of(lo, hi) for lo, hi in itertools.pairwise(bounds) if hi > lo]


# -- the programs ----------------------------------------------------------------------------------


def save_program(values: Mapping[Names, StoredTensor], files: InFiles | None, size: int) -> Program:
    """Return the program in which each rank copies its shares and passes them to a thread. Pending
    values are reduced before.

    ``files``: the tensors of Hugging Face's files, or None. The input STEP is the number of the
    next training step, and the output is that number, which is right even if an earlier step was
    undone.
    """
    ranks: list[RankProgram] = []
    functions: list[tuple[str, Function]] = []
    for rank, rank_shares in enumerate(shares(values, size)):
        names = tuple(dict.fromkeys(values[share.path].label for share in rank_shares))
        written = [
            (new, names.index(values[share.path].label))
            for share in rank_shares
            for new in (share.in_files(files) if files is not None else (share,))
        ]
        fn = partial(copy_and_write, rank, [s for s, _ in written], [i for _, i in written])
        functions.append((f"save on {rank}", Function.of(fn, f"save on {rank}")))
        reduced, reductions = _reduced(values, rank)
        made = tuple(name for item in reductions for name in item.outputs)
        freed = [Free(made, label=Label("save"))] if made else []
        sources = (reduced.get(name, name) for name in names)
        call = Call(f"save on {rank}", (STEP, SAVING, *sources), ("number",), label=Label("save"))
        ranks.append(
            RankProgram(
                instructions=(*reductions, call, *freed),
                inputs=(STEP, SAVING),
                outputs=("number",),
                state=tuple(dict.fromkeys((*names, *reduced))),
            )
        )
    return Program(
        name="save", ranks=tuple(ranks), functions=tuple(functions), stage_of=(0,) * size
    )


def _reduced(
    values: Mapping[Names, StoredTensor], rank: int
) -> tuple[dict[str, str], list[Instruction]]:
    """Return the instructions of a rank that reduce pending values, one axis after the other, and
    the name of each result by the value's label."""
    names: dict[str, str] = {}
    instructions: list[Instruction] = []
    for value in values.values():
        mesh, label, spec = value.spec.mesh, value.label, value.spec
        for axis, placement in spec.sharding.items() if rank in value.at else ():
            if isinstance(placement, Partial):
                name, names[label] = names.get(label, label), f"{label}, reduced over {axis}"
                buffers = (Buffer(spec.local_shape(mesh.coordinates(rank)), spec.dtype),)
                doing = Label("save").doing("all_reduce", label, f"over {axis}")
                instructions += [
                    Collective(
                        "all_reduce", mesh.group(rank, axis), (name,), (names[label],),
                        buffers, buffers, placement.op, axis, label=doing,
                    ),
                    Wait((names[label],), label=doing),
                ]  # fmt: skip
    return names, instructions


def load_program(
    folder: str,
    values: Sequence[tuple[Assembly, StoredTensor]],
    size: int,
    device: torch.device,
) -> Program:
    """Return the program in which each rank reads its shards of ``values``, which consist of
    tensors in the files. Either all values on all ranks are replaced, or none."""
    requested: list[dict[str, tuple[Assembly, Where, torch.dtype]]] = [{} for _ in range(size)]
    for source, value in values:
        for rank in value.at:
            where = value.where(rank)
            own = source.within(*_hull(where)) if len(source.parts) > 1 else source
            requested[rank][value.label] = own, where, value.spec.dtype
    group = tuple(rank for rank, blocks in enumerate(requested) if blocks)
    functions: list[tuple[str, Function]] = [("place", Function.of(placed, "place"))]
    ranks: list[RankProgram] = []
    for rank, blocks in enumerate(requested):
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
    """Return the program in which each rank reports the state of its part of a save
    (`state_of`)."""
    functions = tuple(
        (f"ask {rank}", Function.of(partial(report_state, rank), f"ask {rank}"))
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
    rank_shares: Sequence[Share],
    source: Sequence[int],
    number: int,
    saving: Saving,
    *shards: torch.Tensor,
) -> tuple[int]:
    """Copy share i from ``shards[source[i]]``, pass the copies to a thread, and return ``number``.

    Optimizer state that no step has created is skipped. The function may run again after another
    rank was lost, when the save is over, so it never fails.
    """
    pieces = [
        share.piece(shards[i])
        for share, i in zip(rank_shares, source, strict=True)
        if not (share.path[0] == "optimizer" and is_absent(shards[i]))
    ]
    hand_over(saving, rank, pieces)
    return (number,)


def report_state(rank: int, saving: Saving) -> tuple[str]:
    return (state_of(saving["folder"], rank),)


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def read_shards(
    folder: str,
    requested: Sequence[tuple[Assembly, Where, torch.dtype]],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return the shard of each value, read from the files and converted to its dtype."""
    checkpoint = open_cached(folder)
    return tuple(
        read_shard(checkpoint, source, where, dtype).to(device)
        for source, where, dtype in requested
    )


def read_shard(
    checkpoint: Checkpoint, source: Assembly, where: Where, dtype: torch.dtype
) -> torch.Tensor:
    """Return a shard of a value: for each dim the intervals of global indices in ``where``."""
    blocks = list(blocks_of(where))
    if len(blocks) == 1:
        return read_block(checkpoint, source, *blocks[0][:2]).to(dtype)
    shard = torch.empty(shape_of(where), dtype=dtype)
    for offsets, sizes, at in blocks:
        block_at(shard, at, sizes).copy_(read_block(checkpoint, source, offsets, sizes))
    return shard


def _hull(where: Where) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of the smallest block that has all intervals of a shard."""
    ends = [
        (min((lo for lo, _ in w), default=0), max((hi for _, hi in w), default=0)) for w in where
    ]
    return tuple(lo for lo, _ in ends), tuple(hi - lo for lo, hi in ends)


def open_cached(folder: str) -> Checkpoint:
    """Return a checkpoint for ranks to read; each process reads the metadata once."""
    try:
        changed = os.stat(folder).st_mtime_ns
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"this rank is on {socket.gethostname()}, which cannot access {folder}.\n"
            f"fix: load from a folder that all machines of the launch share"
        ) from error
    return _open_at(folder, changed)


@lru_cache(maxsize=2)
def _open_at(folder: str, changed: int) -> Checkpoint:
    return Checkpoint.open(folder)


# -- threads that write ----------------------------------------------------------------------------

FAILED = "error-{}.json"
"""The name of the file with the reason why a rank's part is missing."""
WRITING, WRITTEN = "writing", "written"

_writers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="dtensor-save")
GONE = "the process that should write it is gone"

_jobs: dict[tuple[str, int], Future[None]] = {}
"""By folder and rank, the writes of this process; of earlier folders only unfinished writes."""


def hand_over(saving: Saving, rank: int, pieces: Sequence[TensorPiece]) -> None:
    """Start a thread that writes a rank's part, unless this process already does.

    The thread ends by writing `part-<rank>.json` or `error-<rank>.json`, if the disk permits. A run
    that is repeated after another rank was lost has the same pieces, so they are written once.
    """
    folder = saving["folder"]
    if (folder, rank) in _jobs:
        return
    for key in [key for key, job in _jobs.items() if key[0] != folder and job.done()]:
        del _jobs[key]
    _jobs[folder, rank] = _writers.submit(_write, saving, rank, pieces)


def state_of(folder: str, rank: int) -> str:
    """Return `WRITING`, `WRITTEN`, or the reason why this rank's part will be missing."""
    job = _jobs.get((folder, rank))
    if job is None:
        return GONE
    if not job.done():
        return WRITING
    error = job.exception()
    return WRITTEN if error is None else _reason_text(error)


def error_of(folder: str, rank: int) -> str:
    """Return the reason that a rank wrote for its missing part; "" if it wrote none."""
    try:
        return json.loads(Path(folder, FAILED.format(rank)).read_bytes())
    except FileNotFoundError:
        return ""


def _write(saving: Saving, rank: int, pieces: Sequence[TensorPiece]) -> None:
    """Write a rank's part, or a file with the reason why this failed."""
    folder = saving["folder"]
    try:
        if read_part(folder, rank) is not None:
            return  # the process that was lost had written it
        if not os.path.isdir(folder):
            raise CheckpointError(
                f"it is on {socket.gethostname()}, which cannot access {folder}.\n"
                f"fix: save to a folder that all machines of the launch share"
            )
        if saving["format"] == "hf":
            write_hf_part(folder, rank, pieces)
        else:
            write_part(folder, rank, pieces, saving["previous"])
    except BaseException as error:
        with suppress(OSError):  # the disk may be full: then only `state_of` reports the error
            write_synced(
                Path(folder) / FAILED.format(rank), json.dumps(_reason_text(error)).encode()
            )
        del pieces  # the traceback would keep them alive
        raise


def _reason_text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else reason_of(error)
