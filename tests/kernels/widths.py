"""Whether whole numbers of 32 bits hold what kernels put in them: by intervals, in Triton's IR.

    python -m tests.kernels.widths [--mutants]      # rc 1: one overflows; a minute

A launch is caught (ahead.py) and compiled to Triton's IR, where each number has its width, loops'
variables too. What a launch is given is known, a program's id is below its grid, what is loaded is
anything: so each whole number lies in an interval. A sum, difference, product or truncation to 32
bits whose interval is wider is an overflow, if an address, a mask or the bounds of a loop follow
from it. Overflows of random words, which are meant, reach none.

`LIMITS` are the largest tensors that launchers take; `--mutants` looks at those of mutants.py. Not
here: what ptxas makes of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dtensor.kernels import adamw, cross_entropy, dropout, gates, norms, rope
from dtensor.kernels.launches import MAX_COLUMNS, MAX_PROGRAMS
from tests.kernels import ahead
from tests.kernels.mutants import report

Interval = tuple[int, int]

SAME = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "arith.extsi", "tt.bitcast"}
WRAPS = {"arith.addi", "arith.subi", "arith.muli", "arith.trunci"}


@dataclass(slots=True)
class _Reading:
    """A function's lines, read in their order. ``wide``: what overflows, and its line."""

    launch: ahead.Launch
    known: dict[str, Interval] = field(default_factory=dict)
    from_: dict[str, list[str]] = field(default_factory=dict)
    wide: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)


def overflows(launch: ahead.Launch, target: str) -> list[str]:
    """The lines of the IR whose 32 bits hold less than what may be in them, and that matter."""
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
    """All that the roots follow from."""
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
    """i32 of `... : tensor<4xi32>`, of `... : i64 to i32`; none: not a whole number."""
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


# -- the largest tensors ---------------------------------------------------------------------------


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norms(k: int) -> Iterator[Callable[[], object]]:
    x, w, rstd = _x(MAX_PROGRAMS, k), _x(k), _x(MAX_PROGRAMS, 1, dtype=torch.float32)
    bf16 = torch.bfloat16
    yield lambda: norms.rms_norm(x, w, 1e-6, 0.0, bf16, bf16)
    yield lambda: norms.add_rms_norm(x, x, w, 1e-6, 0.0, bf16, bf16)
    yield lambda: norms.rms_norm_backward(x, x, rstd, w, 0.0)
    yield lambda: norms.add_layer_norm(x, x, w, w, 1e-5)


def _gates() -> Iterator[Callable[[], object]]:
    for less in (0, 1):
        flat = _x(MAX_PROGRAMS * 2048 - less)
        yield lambda flat=flat: gates.gated(flat, flat, "silu")
        yield lambda flat=flat: gates.gated_backward(flat, flat, flat, "gelu")
    for rows, columns in ((MAX_PROGRAMS, 2047), (3, 2**40 + 1)):
        a, b = _x(rows, 2 * columns).chunk(2, -1)
        yield lambda a=a, b=b: gates.gated(a, b, "silu")
        yield lambda a=a, b=b: gates.gated_backward(a, a, b, "gelu")
    for rows, columns in ((MAX_PROGRAMS // 65_535, MAX_COLUMNS), (MAX_PROGRAMS, 1023)):
        x, bias = _x(rows, columns), _x(columns)
        yield lambda x=x, bias=bias: gates.bias_gelu(x, bias, "gelu")
        yield lambda x=x, bias=bias: gates.bias_gelu_backward(x, x, bias, "gelu")


def _ropes() -> Iterator[Callable[[], object]]:
    for shape in (
        (MAX_PROGRAMS, 1, 1, 128), (1, MAX_PROGRAMS, 1, 126), (1, 1, MAX_PROGRAMS, 128),
        (1290, 1290, 1290, 256),
    ):  # fmt: skip
        x, table = _x(*shape), _x(*shape[2:])
        yield lambda x=x, table=table: rope.rope(x, table, table)
        yield lambda x=x: rope.rope_backward(x, x, x, torch.bfloat16)


def _cross_entropies() -> Iterator[Callable[[], object]]:
    for rows, columns in ((131_071, MAX_COLUMNS - 8), (131_063, MAX_COLUMNS), (MAX_PROGRAMS, 4087)):
        stats, target = _x(rows, 3, dtype=torch.float32), _x(rows, dtype=torch.int64)
        grad = _x(rows, 8, dtype=torch.float32)[:, 0]
        for x in (_x(rows, columns), _x(rows, columns + 8)[:, :columns]):
            yield lambda x=x, t=target: cross_entropy.ce_stats(x, t, -100)
            yield lambda g=grad, x=x, s=stats, t=target: cross_entropy.ce_backward(g, x, s, t, -100)


def _dropouts() -> Iterator[Callable[[], object]]:
    key = {"at_seed": 2**63 - 1, "at_step": 2**32 - 1, "op": 5}
    for rows, columns in ((MAX_PROGRAMS, 1017), (1, (MAX_PROGRAMS - 1) * 1024)):
        x, kept = _x(rows, columns), _x(rows, columns, dtype=torch.bool)
        yield lambda x=x: dropout.dropout(x, 0.1, **key)  # type: ignore[arg-type]
        yield lambda x=x: dropout.dropout_add(x, x, 0.1, **key)  # type: ignore[arg-type]
        yield lambda x=x, kept=kept: dropout.dropout_backward(x, kept, 0.1)


def _adamw() -> Iterator[Callable[[], object]]:
    p, step = [_x(MAX_PROGRAMS * 1024 - 1, dtype=torch.float32)], [_x(dtype=torch.float32)]
    yield lambda: adamw.fused_adamw_(
        p, p, p, p, [], step, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
        amsgrad=False, maximize=False, grad_scale=step[0],
    )  # fmt: skip


LIMITS: Mapping[str, Callable[[], Iterator[Callable[[], object]]]] = {
    "norms": lambda: (call for k in (16384, 8191) for call in _norms(k)),
    "gates": _gates,
    "rope": _ropes,
    "cross_entropy": _cross_entropies,
    "dropout": _dropouts,
    "adamw": _adamw,
}


def found(target: str) -> Iterator[tuple[str, ahead.Launch, list[str]]]:
    """(the file of kernels, a launch at the limits, what overflows)."""
    for name, calls in LIMITS.items():
        for call in calls():
            caught = ahead.launches(call, target)
            assert caught, f"{name}: no kernel takes it"
            for launch in caught:
                yield name, launch, overflows(launch, target)


def run_mutants() -> int:
    total = [0, 0, 0]
    for name, calls in LIMITS.items():
        module = globals()[name]

        def wrong(made: ModuleType, name: str = name, calls: Any = calls) -> str:
            globals()[name] = made
            launches = (launch for call in calls() for launch in ahead.launches(call))
            return next((line for launch in launches for line in overflows(launch, "sm_90")), "")

        counts = report(module, wrong)
        globals()[name] = module
        total = [a + b for a, b in zip(total, counts, strict=True)]
    print(f"mutants: {total[0]}, of no need: {total[1]}, not found: {total[2]}")
    return 1 if total[2] else 0


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
