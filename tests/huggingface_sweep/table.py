"""benchmarks/results/huggingface.md from the records of a run: summary, refusals, families."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.huggingface_sweep.record import Record


def load(out: Path) -> list[Record]:
    """Return the last record of each family, by name."""
    lines = out.read_text().splitlines() if out.exists() else []
    found = {r.family: r for r in (Record(**json.loads(line)) for line in lines)}
    return [found[name] for name in sorted(found)]


def numbers(records: Sequence[Record]) -> dict[str, float]:
    """Return the figures of the summary."""
    run = [r for r in records if r.verdict != "not run"]
    right = [r for r in run if r.verdict == "right"]
    return {
        "families": len(records),
        "run": len(run),
        "right": len(right),
        "right %": 100 * len(right) / max(1, len(run)),
        "refused": sum(r.verdict == "refused" for r in run),
        "wrong": sum(r.verdict == "wrong" for r in run),
        "placed": sum(r.split > 0 for r in right),
        "double": sum(r.double for r in right),
        "captures": max((r.captures for r in right), default=0),
    }


_ROWS = (
    ("families of models that transformers lists", "families", "{:.0f}"),
    ("built small, and trained by plain torch", "run", "{:.0f}"),
    ("right", "right", "{:.0f}"),
    ("right, of those that plain torch trains", "right %", "{:.1f}%"),
    ("refused", "refused", "{:.0f}"),
    ("wrong", "wrong", "{:.0f}"),
    ("right, with weights that for_model splits", "placed", "{:.0f}"),
    ("right, told so in float64", "double", "{:.0f}"),
    ("captures of a step in five calls, at most", "captures", "{:.0f}"),
)


def summary(records: Sequence[Record]) -> str:
    found = numbers(records)
    lines = ["| | |", "|---|---|"]
    lines += [f"| {title} | {form.format(found[key])} |" for title, key, form in _ROWS]
    return "\n".join(lines)


def write(path: Path, records: Sequence[Record]) -> None:
    refused = [r for r in records if r.verdict == "refused"]
    wrong = [r for r in records if r.verdict == "wrong"]
    right = [r for r in records if r.verdict == "right"]
    left_out = [r for r in records if r.verdict == "not run"]
    torch_version = torch.__version__.partition("+")[0]
    versions = f"transformers {transformers.__version__}, torch {torch_version}."
    lines = [_HEAD, versions, "", summary(records), _METHOD]
    for title, some in (("Wrong", wrong), ("Refused", refused)):
        if some:
            lines += [f"## {title}", "", *_by_reason(some), ""]
    lines += ["## Right", "", "| family | model | patterns placed | loss | weights |"]
    lines += ["|---|---|---:|---:|---:|", *map(_line, right), ""]
    lines += ["## Not run by plain torch", "", *_by_reason(left_out)]
    path.write_text("\n".join(lines) + "\n")


def _line(record: Record) -> str:
    errors = f"{record.loss_error:.0e} | {record.weight_error:.0e}"
    return f"| {record.family} | {record.model} | {record.split} | {errors} |"


def _by_reason(records: Sequence[Record]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(_reason(record), []).append(record.family)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [f"| {reason} | {len(names)} | {', '.join(names)} |" for reason, names in ordered]
    return ["| reason | families | |", "|---|---:|---|", *rows]


def _reason(record: Record) -> str:
    """Return the start of the error without its operands, so that equal reasons compare equal."""
    text = record.reason
    text = re.sub(r"\([a-z]+\d+\[.*?\]\)", "(...)", text)  # operands
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text) if record.verdict == "not run" else text
    return text.replace("|", "\\|").replace("\n", " ")[:180]


_HEAD = """# Families of Hugging Face's transformers

Written by `make hf` (`python -m tests.huggingface_sweep`); do not edit. The guide:
[Hugging Face models](../../docs/huggingface.md).
"""

_METHOD = """
What was run. Every type of model in transformers' auto classes. A generic shrinker makes a small
configuration by the names of its fields (2 layers, 64 wide, 4 heads, 4 experts, 128 words, dropout
0); the first class that plain torch trains on a generic batch is taken: a language model, then the
classifiers of pictures and sound, last the bare model with a number made of what it returns.
Nothing is downloaded. In-process at tp=2 with the placements that `dt.placements.for_model`
derives, two steps of SGD in train mode are compared with plain torch's, then three more are run.

- **right**: both losses within 1e-5 of their size; after two steps each weight within 1e-4 of its
  largest element, and its change within 1e-3 of the largest change; one capture in five calls. What
  differs in float32 is run again in float64, and is right only if it is so there ten times closer.
- **refused**: an error before anything runs.
- **wrong**: other numbers.
- **not run**: no small configuration or no generic input was found, a library is missing, or plain
  torch's own numbers are not reproducible: they depend on random numbers, or change by as much when
  the last bit of a weight does.
"""
