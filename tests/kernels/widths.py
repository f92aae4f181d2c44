"""Checks, by intervals in Triton's IR, that 32-bit integers of kernels do not overflow.

    python -m tests.kernels.widths [--mutants]      # rc 1: one overflows; a minute

A launch is recorded (ahead.py) and compiled to Triton's IR, in which each number has a width.
Arguments are known, a program id is below its grid, and a loaded value may be anything, so each
integer lies in an interval. A 32-bit sum, difference, product or truncation with a wider
interval is an overflow if an address, a mask or a loop bound depends on it. The intended
overflows of random words reach none of these. `LIMITS` are the largest tensors that launchers
accept. `--mutants` computes each 64-bit offset in 32 bits, one at a time, and lists the
overflows that are not found.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from dtensor.kernels import cross_entropy, dropout, gates, rope
from dtensor.kernels.launches import MAX_COLUMNS, MAX_PROGRAMS
from tests.kernels import ahead

Interval = tuple[int, int]

SAME = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "arith.extsi", "tt.bitcast"}
WRAPS = {"arith.addi", "arith.subi", "arith.muli", "arith.trunci"}


@dataclass(slots=True)
class _Reading:
    """The lines of a function, read in order. ``wide``: values that overflow, with their lines."""

    launch: ahead.Launch
    known: dict[str, Interval] = field(default_factory=dict)
    from_: dict[str, list[str]] = field(default_factory=dict)
    wide: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)


def overflows(launch: ahead.Launch, target: str) -> list[str]:
    """Return the lines of the IR with an overflow that an address, a mask or a loop bound
    depends on."""
    reading = _Reading(launch)
    text = ahead.ir_for(launch, target)
    head = re.search(r"tt\.func public @\w+\((.*)", text)
    assert head is not None, text
    for name, kind in re.findall(r"%(\w+): (i32|i64)", head[1]):
        value = launch.arguments[name]
        reading.known[f"%{name}"] = (int(value), int(value))
        assert _range(kind)[0] <= value <= _range(kind)[1], name
    for line in text[head.end() :].splitlines():
        _read(reading, line.partition(" loc(")[0].strip())
    matter = _followed(reading)
    return [line for name, line in reading.wide.items() if name in matter]


def _followed(reading: _Reading) -> set[str]:
    """Return all values that the roots depend on."""
    seen: set[str] = set()
    waiting = list(reading.roots)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += reading.from_.get(name, [])
    return seen


def _range(kind: str) -> Interval:
    bits = int(kind[1:])
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _kind(line: str) -> str | None:
    """Return the integer type of a line: i32 for `... : tensor<4xi32>` and `... : i64 to i32`;
    None for other types."""
    found = re.search(r"(?:^|[ x])(i\d+)>?(?: *\{)?$", line)
    return found[1] if found else None


def _read(reading: _Reading, line: str) -> None:
    made, _, rest = line.partition(" = ") if line.startswith("%") else ("", "", line)
    op = rest.split(" ")[0].strip('"')
    operands = re.findall(r"%[\w#]+", rest.partition(" : ")[0])
    match op:
        case "tt.addptr":
            reading.roots.append(operands[1])
        case "tt.load":
            reading.roots += operands[1:2]
        case "tt.store":
            reading.roots += operands[2:3]
        case "scf.for":
            _loop(reading, rest, line)
            return
        case _:
            pass
    kind = "i1" if op in ("arith.cmpi", "arith.cmpf") else _kind(line)
    if not made or kind is None or op == "tt.addptr":
        return
    low, high = _interval(reading, op, rest, operands, kind)
    least, most = _range(kind)
    if op != "tt.load":
        reading.from_[made] = operands
    if not least <= low <= high <= most:
        if kind == "i32" and op in WRAPS:
            reading.wide[made] = f"{line}: {low} to {high}"
        low, high = least, most
    reading.known[made] = (low, high)


def _loop(reading: _Reading, rest: str, line: str) -> None:
    found = re.search(r"scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+).* : (i\d+) \{", rest)
    assert found is not None, line
    name, *bounds, kind = found.groups()
    (low, _), (_, end), (_, step) = (reading.known[bound] for bound in bounds)
    reading.roots += bounds
    reading.from_[name] = bounds
    reading.known[name] = (low, max(low, end - 1))
    if kind == "i32" and end - 1 + step > _range(kind)[1]:
        reading.wide[name] = f"{line}: to {end - 1 + step}"


def _interval(reading: _Reading, op: str, rest: str, operands: list[str], kind: str) -> Interval:
    everything = _range(kind)
    if op == "arith.constant":
        value = re.search(r"(?:dense<)?(-?\d+|true|false)>? :", rest)
        assert value is not None, rest
        number = {"true": 1, "false": 0}.get(value[1])
        number = int(value[1]) if number is None else number
        return number, number
    if op == "tt.make_range":
        end, start = re.findall(r"(?:end|start) = (\d+)", rest)
        return int(start), int(end) - 1
    if op == "tt.get_program_id":
        return 0, reading.launch.grid["xyz".index(rest.split()[1])] - 1
    given = [reading.known.get(operand, everything) for operand in operands]
    if op in SAME or op == "arith.trunci":
        return given[0]
    if op == "arith.extui":
        return given[0] if given[0][0] >= 0 else (0, 2**32 - 1)
    if op == "arith.select":
        return _hull(*given[1:])
    if len(given) != 2:
        return everything
    return _of_two(op, given[0], given[1], everything)


def _of_two(op: str, a: Interval, b: Interval, everything: Interval) -> Interval:
    match op:
        case "arith.addi":
            return a[0] + b[0], a[1] + b[1]
        case "arith.subi":
            return a[0] - b[1], a[1] - b[0]
        case "arith.muli":
            ends = [x * y for x in a for y in b]
            return min(ends), max(ends)
        case "arith.minsi":
            return min(a[0], b[0]), min(a[1], b[1])
        case "arith.maxsi":
            return max(a[0], b[0]), max(a[1], b[1])
        case "arith.divsi" if b[0] > 0 and a[0] >= 0:
            return a[0] // b[1], a[1] // b[0]
        case "arith.remsi" if b[0] > 0 and a[0] >= 0:
            return 0, min(a[1], b[1] - 1)
        case "arith.andi" if a[0] >= 0 and b[0] >= 0:
            return 0, min(a[1], b[1])
        case _:
            return everything


def _hull(*intervals: Interval) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


# -- the largest tensors --------------------------------------------------------------------------


def _gates() -> Iterator[Callable[[], object]]:
    for less in (0, 1):
        flat = ahead.meta(MAX_PROGRAMS * 2048 - less)
        yield lambda flat=flat: gates.gated(flat, flat, "silu")
        yield lambda flat=flat: gates.gated_backward(flat, flat, flat, "gelu")
    for rows, columns in ((MAX_PROGRAMS, 2047), (3, 2**40 + 1)):
        a, b = ahead.meta(rows, 2 * columns).chunk(2, -1)
        yield lambda a=a, b=b: gates.gated(a, b, "silu")
        yield lambda a=a, b=b: gates.gated_backward(a, a, b, "gelu")
    for rows, columns in ((MAX_PROGRAMS // 65_535, MAX_COLUMNS), (MAX_PROGRAMS, 1023)):
        x, bias = ahead.meta(rows, columns), ahead.meta(columns)
        yield lambda x=x, bias=bias: gates.bias_gelu(x, bias, "gelu")
        yield lambda x=x, bias=bias: gates.bias_gelu_backward(x, x, bias, "gelu")


def _ropes() -> Iterator[Callable[[], object]]:
    for shape in (
        (MAX_PROGRAMS, 1, 1, 128), (1, MAX_PROGRAMS, 1, 126), (1, 1, MAX_PROGRAMS, 128),
        (1290, 1290, 1290, 256),
    ):  # fmt: skip
        x, table = ahead.meta(*shape), ahead.meta(*shape[2:])
        yield lambda x=x, table=table: rope.rope(x, table, table)
        yield lambda x=x: rope.rope_backward(x, x, x, torch.bfloat16)


def _cross_entropies() -> Iterator[Callable[[], object]]:
    for rows, columns in ((131_071, MAX_COLUMNS - 8), (131_063, MAX_COLUMNS), (MAX_PROGRAMS, 4087)):
        stats, target = (
            ahead.meta(rows, 3, dtype=torch.float32),
            ahead.meta(rows, dtype=torch.int64),
        )
        grad = ahead.meta(rows, 8, dtype=torch.float32)[:, 0]
        for x in (ahead.meta(rows, columns), ahead.meta(rows, columns + 8)[:, :columns]):
            yield lambda x=x, t=target: cross_entropy.ce_stats(x, t, -100)
            yield lambda g=grad, x=x, s=stats, t=target: cross_entropy.ce_backward(g, x, s, t, -100)


def _dropouts() -> Iterator[Callable[[], object]]:
    key = {"at_seed": 2**63 - 1, "at_step": 2**32 - 1, "op": 5}
    for rows, columns in ((MAX_PROGRAMS, 1017), (1, (MAX_PROGRAMS - 1) * 1024)):
        x, kept = ahead.meta(rows, columns), ahead.meta(rows, columns, dtype=torch.bool)
        yield lambda x=x: dropout.dropout(x, 0.1, **key)  # type: ignore[arg-type]
        yield lambda x=x: dropout.dropout_add(x, x, 0.1, **key)  # type: ignore[arg-type]
        yield lambda x=x, kept=kept: dropout.dropout_backward(x, kept, 0.1)


LIMITS: Mapping[str, Callable[[], Iterator[Callable[[], object]]]] = {
    "norms": lambda: (c for k in (16384, 8191) for c in ahead.norm_calls(MAX_PROGRAMS, k).values()),
    "gates": _gates,
    "rope": _ropes,
    "cross_entropy": _cross_entropies,
    "dropout": _dropouts,
}


def found(target: str) -> Iterator[tuple[str, ahead.Launch, list[str]]]:
    """(the file of kernels, a launch at the limits, what overflows)."""
    for name, calls in LIMITS.items():
        for call in calls():
            caught = ahead.launches(call, target)
            assert caught, f"{name}: no kernel takes it"
            for launch in caught:
                yield name, launch, overflows(launch, target)


# -- mutants ---------------------------------------------------------------------------------------

CASTS = r"\.to\(tl\.int64\)"
FACTORS = r"\b(row|part|i0|i1|i2)(?= \* )|group\[:, None\](?= \* GROUP)"
VALUES = ("target = tl.load(TARGET + row).to(tl.int64)", "keep = words.to(tl.int64) >= drop")
"""Lines whose casts are of values, not of offsets."""
NO_NEED = {
    "tl.store(PARTS + part * length + c, dweight, mask=inside)": "at most 512 rows of 16,384",
    "LOGITS + (group[:, None] * GROUP + e),": "a column of a row, at most launches.MAX_COLUMNS",
    "at = group[:, None] * GROUP + e": "the same",
}
"""Products that 32 bits hold, by the line: mutants there live."""


def mutants(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield (the place and the change, the new source) with a 32-bit factor for a 64-bit one, or
    a cast removed."""
    path = Path(str(module.__file__))
    source = path.read_text()
    for match in re.finditer(f"{CASTS}|{FACTORS}", source):
        begin = source.rfind("\n", 0, match.start()) + 1
        line = source[begin : source.find("\n", match.end())].strip()
        if line in VALUES or "@triton.jit" not in source[: match.start()]:
            continue
        made = "" if match[0].startswith(".") else f"{match[0]}.to(tl.int32)"
        number = source.count("\n", 0, match.start()) + 1
        what = f"{path.name}:{number} {match.start() - begin}: {line}"
        yield what, source[: match.start()] + made + source[match.end() :]


@contextmanager
def loaded(name: str, source: str) -> Iterator[None]:
    """Replace this kernel file by `source` inside the block; Triton reads the source from a
    file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"mutated_{name}", path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        with patch.dict(globals(), {name: made}), patch.object(ahead, name, made):
            yield


def run_mutants() -> int:
    count = kept = lived = 0
    for name, calls in LIMITS.items():
        for what, source in mutants(importlib.import_module(f"dtensor.kernels.{name}")):
            with loaded(name, source):
                launches = (launch for call in calls() for launch in ahead.launches(call))
                found = next((t for one in launches for t in overflows(one, "sm_90")), "")
            reason = "" if found else NO_NEED.get(what.partition(": ")[2], "")
            count, kept, lived = count + 1, kept + bool(reason), lived + (not found and not reason)
            print(f"{what}\n    {found[:160] or reason or 'NOT FOUND'}", flush=True)
    print(f"mutants: {count}, of no need: {kept}, not found: {lived}")
    return 1 if lived else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="each offset in 32 bits, one by one")
    if parser.parse_args().mutants:
        return run_mutants()
    failed = 0
    for target in ("sm_80", "sm_90"):
        counts: dict[str, int] = {}
        for name, launch, lines in found(target):
            counts[name] = counts.get(name, 0) + 1
            for line in lines:
                print(f"FAILED {launch.name} {launch.grid}: {line}")
            failed += bool(lines)
        print(f"{target}: launches {', '.join(f'{n} {count}' for n, count in counts.items())}")
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
