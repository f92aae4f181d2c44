"""The tables of benchmarks/results/simulated_gpus.md, each written by the command that it names.

    table = Table("cases", ("case", "seeds"))
    table.put("zero 3", "2")           # replaces the row of this name, or appends it
    table.write()

A row stays until the same command writes it again; `keep` drops rows of cases that no longer
exist.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "simulated_gpus.md"


class Table:
    """The table between `<!-- name -->` and `<!-- end of name -->` on the page."""

    def __init__(self, name: str, head: tuple[str, ...]) -> None:
        self._name, self._head = name, head
        _, inner, _ = self._parts()
        lines = [line for line in inner.splitlines() if line.startswith("|")][2:]
        self.rows = {row[0]: row[1:] for row in map(_cells, lines)}

    def _parts(self) -> tuple[str, str, str]:
        begin, end = f"<!-- {self._name} -->\n", f"<!-- end of {self._name} -->\n"
        before, _, rest = PAGE.read_text().partition(begin)
        inner, _, after = rest.partition(end)
        return before + begin, inner, end + after

    def put(self, name: str, *cells: str) -> None:
        self.rows[name] = list(cells)

    def keep(self, names: Collection[str]) -> None:
        """Keep only the rows of these names, in this order."""
        self.rows = {name: self.rows[name] for name in names if name in self.rows}

    def write(self) -> None:
        lines = [self._head, ("---",) * len(self._head)]
        lines += [(name, *cells) for name, cells in self.rows.items()]
        before, _, after = self._parts()
        text = "\n".join(f"| {' | '.join(map(_escaped, cells))} |" for cells in lines)
        PAGE.write_text(f"{before}\n{text}\n\n{after}")


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _cells(line: str) -> list[str]:
    hidden = line.strip().strip("|").replace("\\|", "\0")
    return [cell.strip().replace("\0", "|") for cell in hidden.split("|")]
