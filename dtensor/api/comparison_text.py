"""The table that a `Comparison` prints: what decides first, then bytes by axis and phase, memory.

    strategy                     mesh       step     bubble   collectives  sent        memory
    tp4                          mesh(tp=4) 1.21 ms *    0%            24  48.0 MiB    1.2 GiB *
    dp4                          no plan: the batch does not divide into microbatches.

``*`` marks the least of a column; in the first block the least of the strategies that fit, if any
does. ``!`` marks memory above what a rank's device has. A column in which all are alike has no
mark. Bytes are binary (MiB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtensor.api.comparison import Compared, Comparison
from dtensor.sharding.plan.text.words import seconds_text, size_text

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class _Column:
    """A title, a row's number (None where it has none), and the number's text."""

    title: str
    number: Callable[[Compared], float]
    text: Callable[[float], str]


def render(comparison: Comparison) -> str:
    """The table; deterministic, without a trailing newline."""
    planned = [row for row in comparison.rows if row.error is None]
    lines = [f"compare {comparison.name}    {comparison.optimizer}", ""]
    blocks = [_decides(comparison.rows, planned)]
    if planned:
        blocks.append(_sent(planned))
        columns = [c for c in _MEMORY if c.title != "masters" or any(map(c.number, planned))]
        blocks.append(_block("memory of the fullest rank", columns, planned, planned))
    first = max(len(row[0]) for block in blocks for row in block)
    for block in blocks:
        lines += [*_aligned(block, first), ""]
    return "\n".join([*lines, *_legend(blocks, planned)]).rstrip()


def _size(num: float) -> str:
    return size_text(int(num))


_DECIDING = (
    _Column("step", lambda r: r.seconds, seconds_text),
    _Column("bubble", lambda r: r.bubble, "{:.0%}".format),
    _Column("collectives", lambda r: r.num_collectives, "{:.0f}".format),
    _Column("sent", lambda r: r.bytes_sent, _size),
    _Column("memory", lambda r: r.memory.total, _size),
)
_MEMORY = (
    _Column("parameters", lambda r: r.memory.parameters, _size),
    _Column("gradients", lambda r: r.memory.gradients, _size),
    _Column("optimizer", lambda r: r.memory.optimizer, _size),
    _Column("masters", lambda r: r.memory.masters, _size),
    _Column("activations", lambda r: r.memory.activations, _size),
    _Column("total", lambda r: r.memory.total, _size),
)


def _decides(rows: Sequence[Compared], planned: Sequence[Compared]) -> list[list[str]]:
    """One line for each strategy; of one without a plan, why."""
    block = _block("strategy", _DECIDING, planned, [r for r in planned if r.fits] or planned)
    texts = {row.name: cells for row, cells in zip(planned, block[1:], strict=True)}
    found = [[block[0][0], "mesh", *block[0][1:]]]
    for row in rows:
        if row.error is None:
            found.append([row.name, str(row.mesh), *texts[row.name][1:]])
        else:
            found.append([row.name, f"no plan: {str(row.error).splitlines()[0]}"])
    return found


def _sent(planned: Sequence[Compared]) -> list[list[str]]:
    """A line for each strategy and axis; axes are no rivals, so nothing is marked."""
    found = [["sent per rank and step", "axis", *(f"{phase}  " for phase in _PHASES)]]
    for row in planned:
        name = row.name
        for axis in (axis for axis, num in row.mesh.shape.items() if num > 1):
            sent = [_size(row.bytes.get((axis, phase), 0)) for phase in _PHASES]
            found.append([name, axis, *(f"{text}  " for text in sent)])
            name = ""
    return found


def _block(
    title: str,
    columns: Sequence[_Column],
    rows: Sequence[Compared],
    candidates: Sequence[Compared],
) -> list[list[str]]:
    """The title and the columns' titles; then each row's cells, the least of candidates marked."""
    found = [[title], *([row.name] for row in rows)]
    for column in columns:
        among = [column.number(row) for row in candidates]
        least = min(among) if len(set(among)) > 1 else None
        found[0].append(column.title + "  ")
        for cells, row in zip(found[1:], rows, strict=True):
            number = column.number(row)
            mark = "*" if number == least and row in candidates else " "
            if column.title in ("memory", "total") and not row.fits:
                mark = "!"
            cells.append(f"{column.text(number)} {mark}")
    return found


def _aligned(rows: Sequence[Sequence[str]], first: int) -> list[str]:
    """Numbers to the right; a row that is shorter than the head runs on to the end."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [first, *(max(len(row[i]) for row in full) for i in range(1, len(rows[0])))]
    left = 2 if rows[0][1] in ("mesh", "axis") else 1
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


def _legend(blocks: Sequence[list[list[str]]], planned: Sequence[Compared]) -> list[str]:
    cells = [cell for block in blocks for row in block[1:] for cell in row[1:]]
    lines = ["* the least of its column"] if any(cell.endswith(" *") for cell in cells) else []
    sizes = sorted({row.plan.topology.memory_bytes for row in planned if not row.fits})
    lines += [f"! above the {_size(size)} of a rank's device" for size in sizes]
    if lines and any(not row.fits for row in planned) and any(row.fits for row in planned):
        lines[0] += "; in the first block, of the strategies that fit"
    return lines
