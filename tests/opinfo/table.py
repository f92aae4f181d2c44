"""Write docs/coverage.md from the records of a run: the summary, and all entries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.opinfo.record import Record

Found = Mapping[str, Sequence[Record]]


def load(out: Path, kind: str) -> list[Record]:
    """Return the records of one kind of sizes, by name."""
    path = out / f"{kind}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((Record.from_json(json.loads(line)) for line in lines), key=lambda r: r.name)


def crashed(name: str) -> Record:
    record = Record(name=name, verdict="refused", errors=["the process died"])
    record.forward["refused"] += 1
    return record


def numbers(records: Sequence[Record]) -> dict[str, float]:
    """Return the figures of the summary."""
    counted = [r for r in records if r.counted]
    total = max(1, len(counted))
    return {
        "entries": len(records),
        "counted": len(counted),
        "forward %": 100 * sum(r.forward_passes for r in counted) / total,
        "with gradients %": 100 * sum(r.passes for r in counted) / total,
        "forward": sum(r.forward_passes for r in counted),
        "with gradients": sum(r.passes for r in counted),
        "wrong": sum(bool(r.wrong) for r in counted),
        "split": sum(r.verdict == "split" for r in counted),
        "whole": sum(r.verdict == "whole" for r in counted),
        "split by decomposition": sum(r.verdict == "split" and bool(r.expanded) for r in counted),
        "refused": sum(r.verdict == "refused" for r in counted),
        "without collectives": sum(r.forward_passes and r.free > 0 for r in counted),
        "placements": sum(sum(r.forward.values()) for r in counted),
        "placements free": sum(r.free for r in counted),
        "placements free with gradients": sum(r.free_all for r in counted),
        "rounding": sum(r.rounding for r in counted),
    }


_ROWS = (
    ("entries of the database", "entries", "{:.0f}"),
    ("counted: they capture and are deterministic", "counted", "{:.0f}"),
    ("right forward", "forward", "{:.0f}"),
    ("right forward, of those counted", "forward %", "{:.1f}%"),
    ("right with gradients, where there are any", "with gradients", "{:.0f}"),
    ("right with gradients, of those counted", "with gradients %", "{:.1f}%"),
    ("wrong numbers", "wrong", "{:.0f}"),
    ("right, with some dim split on the ranks", "split", "{:.0f}"),
    ("of those, written out by a decomposition", "split by decomposition", "{:.0f}"),
    ("right, only whole on every rank", "whole", "{:.0f}"),
    ("refused, in part or wholly", "refused", "{:.0f}"),
    ("right, some placement without a collective forward", "without collectives", "{:.0f}"),
    ("placements run", "placements", "{:.0f}"),
    ("of those without a collective forward", "placements free", "{:.0f}"),
    (
        "of those without a collective forward and backward",
        "placements free with gradients",
        "{:.0f}",
    ),
    ("of those that needed float64 to be told right", "rounding", "{:.0f}"),
)


PEER = Path(__file__).parent / "peer.json"
_OF_PEER = ("forward", "forward %", "with gradients", "with gradients %", "wrong", "split")


def peer_numbers(records: Sequence[Record], ours: Sequence[Record]) -> dict[str, object]:
    """Return the figures of PyTorch's DTensor over the entries that count for dtensor."""
    counted = {r.name for r in ours if r.counted}
    same = [r if r.counted else crashed(r.name) for r in records if r.name in counted]
    found = numbers(same)
    return {
        "torch": torch.__version__.partition("+")[0],
        "counted": len(same),
        **{key: found[key] for key in _OF_PEER},
        "wrong entries": sorted(r.name for r in same if r.wrong),
    }


def summary(found: Found) -> str:
    """Return the summary as a Markdown table, with PyTorch's DTensor if it was measured."""
    columns: dict[str, Mapping[str, float]] = {k: numbers(r) for k, r in found.items()}
    if PEER.exists():
        columns["peer"] = json.loads(PEER.read_text())
    lines = ["| | " + " | ".join(_TITLES[kind] for kind in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for title, key, form in _ROWS:
        cells = [form.format(c[key]) if key in c else "" for c in columns.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_TITLES = {
    "even": "sizes that divide",
    "uneven": "sizes that do not",
    "peer": "PyTorch's DTensor, sizes that divide",
}


def write(path: Path, found: Found) -> None:
    even = {r.name: r for r in found["even"]}
    uneven = {r.name: r for r in found["uneven"]}
    names = sorted(even.keys() | uneven.keys())
    counted = [n for n in names if any(n in k and k[n].counted for k in (even, uneven))]
    lines = [_HEAD, summary(found), _METHOD]
    lines += [*entries([_cells(name, even.get(name), uneven.get(name)) for name in counted])]
    lines += ["", "## Not counted", "", "| reason | entries |", "|---|---|"]
    lines += _left_out([even.get(n) or uneven[n] for n in names if n not in counted])
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The texts about one entry. ``run`` and ``free``: the numbers of placements run, and of those
    without a collective, for both kinds of sizes."""

    name: str
    kind: str
    forward: str
    gradient: str
    run: str
    free: str
    note: str


def entries(found: Sequence[Entry]) -> list[str]:
    """Return the lines about all entries: lists by class, notes, and a table of failures."""
    groups: dict[str, list[str]] = {}
    noted: list[str] = []
    refused: list[str] = []
    for e in found:
        if e.forward != "right" or e.gradient not in ("right", "none"):
            cells = (e.name, e.kind, e.forward, e.gradient, e.run, e.free, e.note)
            refused.append(f"| {' | '.join(cells)} |")
        elif e.note:
            noted.append(f"- `{e.name}`, {e.kind}: {e.note}")
        else:
            title = e.kind if e.gradient == "right" else f"{e.kind}, without a gradient"
            groups.setdefault(title, []).append(f"`{e.name}`")
    lines = ["## Entries", "", _LISTS]
    for title in sorted(groups):
        lines += [f"### {title} ({len(groups[title])})", "", ", ".join(groups[title]) + ".", ""]
    lines += [f"### Right, with a note ({len(noted)})", "", *noted, ""]
    lines += [f"### Refused or wrong ({len(refused)})", ""]
    lines += ["| entry | class | forward | gradient | run | no collective | note |"]
    return [*lines, "|---|---|---|---|---|---|---|", *refused]


def _cells(name: str, even: Record | None, uneven: Record | None) -> Entry:
    first = even or uneven
    assert first is not None
    both = [r for r in (even, uneven) if r is not None]
    wrong = [line for r in both for line in r.wrong]
    refused = [line for r in both for line in r.errors]
    return Entry(
        name=_cell(name),
        kind=" / ".join(dict.fromkeys(_class(r) for r in both)),
        forward=_of([r.forward for r in both]),
        gradient=_of([r.gradient for r in both]),
        run="+".join(str(sum(r.forward.values())) for r in both),
        free="+".join(str(r.free) for r in both),
        note=_cell((wrong or refused or [first.note])[0]),
    )


def _class(record: Record) -> str:
    if record.verdict != "split":
        return record.verdict
    return "split by decomposition" if record.expanded else "split by rule"


def _of(counts: Sequence[Counter[str]]) -> str:
    total = sum(counts, Counter[str]())
    if not total:
        return "none"
    if set(total) == {"right"}:
        return "right"
    return ", ".join(f"{total[key]} {key}" for key in ("right", "refused", "wrong") if total[key])


def _left_out(records: Sequence[Record]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for record in records:
        by_reason.setdefault(record.note, []).append(record.name)
    return [
        f"| {_cell(reason)} ({len(names)}) | {', '.join(sorted(names))} |"
        for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]


_HEAD = """# Coverage of PyTorch's OpInfo database

Generated by `make opinfo` (`python -m tests.opinfo`); do not edit.
"""

_METHOD = """
The run covers every entry of `torch.testing._internal.common_methods_invocations.op_db` in float32
on 4 ranks in one process: capture, plan, lower and run, forward and backward with a random
cotangent, compared with plain torch. An entry has up to 8 samples. Each sample runs under the
placements that PyTorch's `DTensorConverter` enumerates (Replicate and Shard of every dim, for all
tensors together; at most 12 per sample and 48 per entry), and under up to 4 placements with pending
sums, cut into random summands. Sizes that divide: L=24, M=12, S=4, XS=2; sizes that do not: 23, 11,
5, 3. The tolerances of `torch.testing.assert_close` apply (float32: rtol 1.3e-6, atol 1e-5). A
sample that differs by more is run again in float64 (1e-7), and counts as right only if it is right
there. Results pass through OpInfo's `output_process_fn_grad`, which removes signs and phases that
the op leaves open.

- **split**: right under all placements, and in at least one of them an op of the forward that is
  more than a view ran on an operand or result of which each rank holds a part. (For programs of
  views alone, a view counts; for programs without ops, a result.) *By rule*: each captured op has a
  rule. *By decomposition*: some op of the forward or the backward was decomposed.
- **whole**: right under all placements; every rank works on whole tensors.
- **refused**: some placement, or the backward, has no plan: an error before anything runs.
- **wrong**: numbers that differ from plain torch's.
- The column of PyTorch's DTensor is from the same entries, samples and placements without the
  pending sums (`python -m tests.opinfo --peer`, torch's simulation of 4 ranks), judged and counted
  in the same way.
"""

_LISTS = """\
All entries of the lists are right under all placements. A class of two parts, such as *whole /
split by rule*, has the class for sizes that divide first. `build/opinfo` has the placements of each
entry. In the last table *run* counts placements, *sizes that divide* + *sizes that do not*, and *no
collective* the placements whose forward needs none.
"""
