"""A row of caches on one mesh becomes a row of those on another, as far as it is live: a program.

    plan = plan_sync("13 positions", {"k0": (StoredTensor(...), StoredTensor(...)), ...})
    program = row_program(plan, 4, device, names, length=13, tables={2: tables, 3: tables})
    cluster.run(cluster.load(program), fed)       # FROM: row 0 of [2,1,64,16], TO: row 5 of [8,...]

A cache is [rows, heads, positions, dim], kept as state under the names of `Names` on each side. The
values that travel are regions of them, [1, heads, length, dim], placed as the caches are on heads
and dim; how they travel is between_meshes.py's. Each rank that gives some cuts its part of them
out; each that is to have some writes it into its row, and zeros behind it. ``tables`` ([rows, n],
by rank) get a row besides, which is fed.

Rows are fed, so that one program serves all rows that lie on the same ranks. Invariants: nothing is
written before all ranks have agreed that all have all; then the row is the other's up to
``length``, zero behind. Not here: which row, and when (api/generation/disaggregated_prefill.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from dtensor.daft import Call, Free, Function, Instruction, Label, Program, RankProgram
from dtensor.runtime.transfer.between_meshes import Names, values_program
from dtensor.sharding.redistribute.between_meshes import TransferPlan
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.spec.shards import shape_of

FROM, TO = "from row", "to row"
"""The inputs that say which row, counted in the rank's own part of the caches: of the ranks that
give, and of those that take."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """``state``: tables of a rank by name, with the inputs that have the new rows, [1, n];
    ``inputs``: the same of tables that are inputs, which the run changes."""

    state: Mapping[str, str]
    inputs: Mapping[str, str]


def row_program(
    plan: SyncPlan,
    size: int,
    device: torch.device,
    names: Names,
    *,
    length: int,
    tables: Mapping[int, RowTables],
) -> Program:
    """The program that moves a row, of ``length`` positions; ``size``: ranks of the cluster;
    ``tables``: of each rank on which the target's row is."""
    cut = {f"cut {label}": rank_program for label, (rank_program, _) in names.items()}
    new = {f"new {label}": rank_program for label, (_, rank_program) in names.items()}
    between = {label: (f"cut {label}", f"new {label}") for label in names}
    program = values_program(plan, size, device, between, state=False, also=tables)
    functions = dict(program.functions)
    ranks: list[RankProgram] = []
    for rank, rank_program in enumerate(program.ranks):
        tabled = tables.get(rank, RowTables({}, {}))
        given = {name: cut[name] for name in rank_program.inputs if _is_read(name, rank_program)}
        taken = {name: new[name] for name in rank_program.outputs}
        items: list[Instruction] = []
        if given:
            called = _called(f"cut on {rank}", partial(rows_cut, length), functions)
            items.append(Call(called, (FROM, *given.values()), tuple(given), label=_WHAT))
        items += rank_program.instructions
        if taken:
            called = _called(f"seat on {rank}", partial(rows_written, length), functions)
            caches = tuple(taken.values())
            items.append(Call(called, (TO, *caches, *taken), (), caches, label=_WHAT))
        written = {**tabled.state, **tabled.inputs}
        if written:
            called = _called(f"tables on {rank}", tables_written, functions)
            read = (TO, *written, *written.values())
            items.append(Call(called, read, (), tuple(written), label=_WHAT))
        if given or taken:
            items.append(Free((*given, *taken), label=_WHAT))
        sizes = [(f"cut {n}", _nbytes(t, rank)) for n, t in plan.transfers.items()]
        fed = [*([FROM] if given else []), *([TO] if taken or written else []), *tabled.inputs]
        ranks.append(
            replace(
                rank_program,
                instructions=tuple(items),
                inputs=(*fed, *dict.fromkeys(written.values())),
                outputs=(),
                state=tuple(dict.fromkeys((*given.values(), *taken.values(), *tabled.state))),
                nbytes=(*rank_program.nbytes, *(item for item in sizes if item[0] in given)),
                changed=tuple(tabled.inputs),
            )
        )
    return replace(program, ranks=tuple(ranks), functions=tuple(functions.items()))


_WHAT = Label("transfer")


# -- what ranks call -------------------------------------------------------------------------------


def rows_cut(length: int, row: int, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies, [1, heads, length, dim]."""
    return tuple(
        cache[row : row + 1, :, :length].clone(memory_format=torch.contiguous_format)
        for cache in caches
    )


def rows_written(length: int, row: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of as many caches as there are new parts after them."""
    half = len(values) // 2
    for cache, new in zip(values[:half], values[half:], strict=True):
        cache[row, :, :length] = new[0]
        cache[row, :, length:] = 0
    return ()


def tables_written(row: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of as many tables as there are new rows after them."""
    half = len(values) // 2
    for table, new in zip(values[:half], values[half:], strict=True):
        table[row] = new[0]
    return ()


def _called(
    name: str, fn: Callable[..., tuple[torch.Tensor, ...]], functions: dict[str, Function]
) -> str:
    functions[name] = Function.of(fn, name)
    return name


def _nbytes(plan: TransferPlan, rank: int) -> int:
    """Of what the cluster's rank has of the source; 0 where it has nothing."""
    here = plan.here
    if rank not in here.ranks:
        return 0
    box = here.where(here.at[here.ranks.index(rank)])
    return math.prod(shape_of(box)) * here.spec.dtype.itemsize


def _is_read(name: str, rank_program: RankProgram) -> bool:
    return any(isinstance(i, Call) and name in i.inputs for i in rank_program.instructions)
