"""Formats the parts of a printed plan: sizes with units, calls, names of repeated layers.

size_text(2097152)                        # "2.0 MiB"
flop_text(2_147_483_648)                  # "2.15 GFLOP"
collapse(["a.0.w", "b", "a.1.w"])         # ("a.{0..1}.w", "b")
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch

from dtensor.numerics import dtype_name
from dtensor.sharding.ops.call import OpCall, Operand, target_name
from dtensor.sharding.plan.record import Cost
from dtensor.sharding.plan.steps import Redistribute

_NUMBER = re.compile(r"\d+")
# Keyword arguments that are not printed: placements decide where and how a result is stored, and
# each run passes its own seed and step.
_HIDDEN_ARGUMENTS = frozenset(
    {"at_seed", "at_step", "device", "layout", "memory_format", "non_blocking", "pin_memory"}
)


def size_text(num_bytes: int) -> str:
    """Return bytes in binary units: ``512 B``, ``2.0 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def cost_text(cost: Cost) -> tuple[str, list[str]]:
    """Return ", host-bound" or "", and the parts of a step's seconds as texts."""
    parts = [
        f"compute {seconds_text(cost.compute_seconds)}",
        f"communication {seconds_text(cost.communication_seconds)}",
    ]
    if cost.host_wait_seconds:
        parts.append(f"host {seconds_text(cost.host_wait_seconds)}")
    return ", host-bound" if cost.host_bound else "", parts


def flop_text(flops: int) -> str:
    """Return FLOP in decimal units: ``512 FLOP``, ``2.15 GFLOP``."""
    count = float(flops)
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{flops} FLOP" if not unit else f"{count:.2f} {unit}FLOP"
        count /= 1000
    return f"{count:.2f} PFLOP"


def seconds_text(seconds: float) -> str:
    """Return seconds with a decimal unit: ``1.25 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.1f} ns" if seconds else "0 s"


def op_text(call: OpCall) -> str:
    """Return the printed name of the op of a call (`op_name`)."""
    return op_name(call.target)


@cache
def op_name(target: Callable[..., Any]) -> str:
    """Return ``mm`` for aten.mm.default, ``dt.attention`` for dt.attention.default."""
    parts = target_name(target).split(".")
    return ".".join(parts[1:2] if parts[0] == "aten" else parts[:2])


def distance_text(step: Redistribute) -> str:
    """Return the text about the distance of a shift; "" for other kinds."""
    return f" by {step.moves[0].distance}" if step.kind == "shift" else ""


def call_text(call: OpCall, operands: Sequence[str]) -> str:
    """Return the text of a call with its operands' names and its literals: ``mm(x, w1)``."""
    arguments = [_argument_text(value, operands) for value in call.args]
    arguments += [
        f"{key}={_argument_text(value, operands)}"
        for key, value in call.kwargs
        if key not in _HIDDEN_ARGUMENTS and value is not None
    ]
    return f"{op_text(call)}({', '.join(arguments)})"


def _argument_text(value: object, operands: Sequence[str]) -> str:
    """Return the text of an argument of a call: an operand's name, or a literal."""
    match value:
        case Operand(index):
            return operands[index]
        case list() | tuple():
            items = cast(Iterable[object], value)
            return f"[{', '.join(_argument_text(item, operands) for item in items)}]"
        case torch.dtype():
            return dtype_name(value)
        case str():
            return repr(value)
        case _:
            return str(value)


def collapse(names: Iterable[str], instead: str | None = None) -> tuple[str, ...]:
    """Return the names, with names that differ only in integers combined into one:
    ``blocks.{0..11}.up.weight``. A combined name stands for exactly the combined names. With
    ``instead``, every integer is replaced by that text: ``blocks.*.up.weight``."""
    groups: dict[str, dict[str, None]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), {})[name] = None
    if instead is not None:
        return tuple(pattern.replace("#", instead) for pattern in groups)
    patterns: list[str] = []
    for pattern, members in groups.items():
        patterns += _with_braces(pattern, list(members))
    return tuple(patterns)


def _with_braces(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names as one text with braces if they are all combinations of the integers at each
    place; else the names unchanged."""
    columns = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    choices = [
        tuple(sorted(dict.fromkeys(column), key=lambda text: (int(text), text)))
        for column in columns
    ]
    if len(names) == 1 or set(itertools.product(*choices)) != set(zip(*columns, strict=True)):
        return list(names)
    pieces = pattern.split("#")
    text = pieces[0]
    for choice, piece in zip(choices, pieces[1:], strict=True):
        text += _braces(choice) + piece
    return [text]


def _braces(numbers: Sequence[str]) -> str:
    """Return ``{0..3}`` for consecutive numbers, ``{0,2}`` for others, ``0`` for one number."""
    if len(numbers) == 1:
        return numbers[0]
    first, last = int(numbers[0]), int(numbers[-1])
    if [str(n) for n in range(first, last + 1)] == list(numbers):
        return f"{{{first}..{last}}}"
    return f"{{{','.join(numbers)}}}"


def wrapped(text: str, start: str, width: int) -> list[str]:
    """Wrap ``text`` to ``width``, after ``start`` and with the indent of its length."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
