"""A program that moves a row of KV caches from one mesh to another, up to a length.

    plan = plan_sync("13 positions", {"k0": (StoredTensor(...), StoredTensor(...)), ...})
    program = row_program(plan, 4, device, names, length=13, tables={2: tables, 3: tables})
    cluster.run(cluster.load(program), fed)       # FROM: row 0 of [2,1,64,16], TO: row 5 of [8,...]

A cache is state [rows, heads, positions, dim]. Source ranks cut out [1, heads, length, dim], which
between_meshes.py moves; target ranks write it into their row, with zeros after ``length``, and
write a row of ``tables`` ([rows, n], by rank), which is an input. Row numbers are inputs, so one
program serves all rows on the same ranks. Nothing is written before all ranks agree that they have
received everything."""

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
"""The inputs with the row number on source and target ranks, counted in the rank's shard of the
caches."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """Tables of a rank, by name, each with the name of the input that has the new row, [1, n].

    ``state``: tables that are state; ``inputs``: tables that are inputs, which the run changes.
    """

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
    """Return the program that moves ``length`` positions of a row on a cluster of ``size`` ranks.

    ``tables``: the tables of each rank that has the target's row.
    """
    cut = {f"cut {label}": rank_program for label, (rank_program, _) in names.items()}
    new = {f"new {label}": rank_program for label, (_, rank_program) in names.items()}
    between = {label: (f"cut {label}", f"new {label}") for label in names}
    program = values_program(plan, size, device, between, state=False, also_agree=tables)
    functions = dict(program.functions)
    ranks: list[RankProgram] = []
    for rank, rank_program in enumerate(program.ranks):
        row_tables = tables.get(rank, RowTables({}, {}))
        cut_inputs = {
            name: cut[name] for name in rank_program.inputs if _is_read(name, rank_program)
        }
        new_outputs = {name: new[name] for name in rank_program.outputs}
        items: list[Instruction] = []
        if cut_inputs:
            function = _add_function(f"cut on {rank}", partial(cut_rows, length), functions)
            items.append(
                Call(function, (FROM, *cut_inputs.values()), tuple(cut_inputs), label=_LABEL)
            )
        items += rank_program.instructions
        if new_outputs:
            function = _add_function(f"seat on {rank}", partial(write_rows, length), functions)
            caches = tuple(new_outputs.values())
            items.append(Call(function, (TO, *caches, *new_outputs), (), caches, label=_LABEL))
        table_rows = {**row_tables.state, **row_tables.inputs}
        if table_rows:
            function = _add_function(f"tables on {rank}", write_tables, functions)
            read = (TO, *table_rows, *table_rows.values())
            items.append(Call(function, read, (), tuple(table_rows), label=_LABEL))
        if cut_inputs or new_outputs:
            items.append(Free((*cut_inputs, *new_outputs), label=_LABEL))
        sizes = [(f"cut {n}", _nbytes(t, rank)) for n, t in plan.transfers.items()]
        fed = [
            *([FROM] if cut_inputs else []),
            *([TO] if new_outputs or table_rows else []),
            *row_tables.inputs,
        ]
        ranks.append(
            replace(
                rank_program,
                instructions=tuple(items),
                inputs=(*fed, *dict.fromkeys(table_rows.values())),
                outputs=(),
                state=tuple(
                    dict.fromkeys((*cut_inputs.values(), *new_outputs.values(), *row_tables.state))
                ),
                nbytes=(*rank_program.nbytes, *(item for item in sizes if item[0] in cut_inputs)),
                changed=tuple(row_tables.inputs),
            )
        )
    return replace(program, ranks=tuple(ranks), functions=tuple(functions.items()))


_LABEL = Label("transfer")


# -- what ranks call -------------------------------------------------------------------------------


def cut_rows(length: int, row: int, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a copy [1, heads, length, dim] of the row of each cache."""
    return tuple(
        cache[row : row + 1, :, :length].clone(memory_format=torch.contiguous_format)
        for cache in caches
    )


def write_rows(length: int, row: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Write new rows into caches; ``values``: the caches, then a new row for each."""
    half = len(values) // 2
    for cache, new in zip(values[:half], values[half:], strict=True):
        cache[row, :, :length] = new[0]
        cache[row, :, length:] = 0
    return ()


def write_tables(row: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Write new rows into tables; ``values``: the tables, then a new row for each."""
    half = len(values) // 2
    for table, new in zip(values[:half], values[half:], strict=True):
        table[row] = new[0]
    return ()


def _add_function(
    name: str, fn: Callable[..., tuple[torch.Tensor, ...]], functions: dict[str, Function]
) -> str:
    functions[name] = Function.of(fn, name)
    return name


def _nbytes(plan: TransferPlan, rank: int) -> int:
    """Return the bytes of a rank's shard of the source, 0 if the rank has none."""
    here = plan.here
    if rank not in here.ranks:
        return 0
    box = here.where(here.at[here.ranks.index(rank)])
    return math.prod(shape_of(box)) * here.spec.dtype.itemsize


def _is_read(name: str, rank_program: RankProgram) -> bool:
    return any(isinstance(i, Call) and name in i.inputs for i in rank_program.instructions)
