"""Kernels in Triton: on a GPU their fraction of the memory roofline, beside peers; anywhere, what
they compile to.

    python -m benchmarks.kernels [--rounds 50] [--write]       # needs a CUDA device
    python -m benchmarks.kernels --aot [--write]               # needs none

On a GPU each call is timed by CUDA events, all ways interleaved in one run, the level-2 cache
overwritten before each, so often that the host has queued the whole call by then; median seconds.
The host's own time is that of a call until it returns. The roofline is the bytes that a call must
read and write over the device's bandwidth, which is that of a copy of 1 GiB in the same run. Peers:
torch eager, torch.compile(dynamic=False), and Liger-Kernel where it can be imported. Shapes are
aligned and odd. "In a segment" an elementwise op is before the call and another one after it, as in
compiled local code: with the kernel these are three launches, and torch.compile may fuse all. A
line at the end names the ops that compiled code should take from the compiler, for
`COMPILED_INSTEAD` in dtensor/kernels/registry.py.

`--aot` compiles every kernel for four targets, checks that none spills or takes more than 128
registers, and prints registers and loads of 16 bytes of all loads (tests/kernels/ahead.py).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.smallest import parsed

RESULTS = Path(__file__).parent / "results"
Fn = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One direction of an op. ``op``: its name; ``nbytes``: what it must read and write; ``ways``:
    by who does it."""

    name: str
    op: str
    nbytes: int
    ways: dict[str, Callable[[], object]] = field(default_factory=dict)


IN_SEGMENT = "in a segment, "
SCALE = 1.5
"""The factor of the elementwise ops around a call in a segment."""


def scaled(made: Any) -> Any:
    """Return the first result, scaled."""
    first: Tensor = made if isinstance(made, Tensor) else made[0]
    return first * SCALE


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def both(
    name: str,
    op: str,
    plain: Fn,
    inputs: Sequence[Tensor],
    ours: Callable[[Tensor], object],
    ours_backward: Callable[[Tensor], object],
    nbytes: tuple[int, int],
    liger: Fn | None,
) -> Iterator[Timed]:
    """Forward and backward: of peers by autograd, whose graph is made once. ``ours`` takes the
    first input, ``ours_backward`` the gradient of the result."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    with torch.no_grad():
        grad = torch.randn_like(plain(*inputs))
    peers = {"eager": plain, "compile": torch.compile(plain, dynamic=False)}
    peers |= {} if liger is None else {"Liger": liger}
    first, *others = inputs

    def segment(x: Tensor, *others: Tensor) -> Any:
        return scaled(plain(x * SCALE, *others))

    compiled = torch.compile(segment, dynamic=False)
    in_segment = compiled(*leaves)
    forward: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(first),
        f"{IN_SEGMENT}ours": lambda: scaled(ours(first * SCALE)),
        f"{IN_SEGMENT}compile": lambda: compiled(first, *others),
    }
    backward: dict[str, Callable[[], object]] = {
        "ours": lambda: ours_backward(grad),
        f"{IN_SEGMENT}ours": lambda: scaled(ours_backward(grad * SCALE)),
        f"{IN_SEGMENT}compile": lambda: torch.autograd.grad(
            in_segment, wanted, grad, retain_graph=True
        ),
    }
    for peer, fn in peers.items():
        y = fn(*leaves)
        forward[peer] = lambda fn=fn: fn(*inputs)
        backward[peer] = lambda y=y: torch.autograd.grad(y, wanted, grad, retain_graph=True)
    yield Timed(name=name, op=op, nbytes=nbytes[0], ways=forward)
    backward_op = "dropout_backward" if op == "dropout_add" else f"{op}_backward"
    backward_op = "ce_backward" if op == "ce_stats" else backward_op
    yield Timed(name=f"{name}, backward", op=backward_op, nbytes=nbytes[1], ways=backward)


def timed(rows: int, odd: bool) -> Iterator[Timed]:
    """Every op with both directions; lengths of an aligned model, or one less."""
    from dtensor.kernels import cross_entropy, dropout, gates, norms, rope

    less = 1 if odd else 0
    kind = "odd" if odd else "aligned"
    d, ff, v = 4096 - less, 11008 - less, (25129 if odd else 128256)
    liger: Any = None
    if find_spec("liger_kernel") is not None:
        liger = importlib.import_module("liger_kernel.transformers.functional")

    def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    a, weight = x(rows, d), x(d)
    args = (1e-6, 0.0, torch.bfloat16, torch.bfloat16)
    _, rstd = norms.rms_norm(a, weight, *args)
    yield from both(
        f"rms_norm [{rows}, {d}] {kind}",
        "rms_norm",
        lambda a, w: F.rms_norm(a, (d,), w, 1e-6),
        (a, weight),
        lambda x: norms.rms_norm(x, weight, *args),
        lambda g: norms.rms_norm_backward(g, a, rstd, weight, 0.0),
        (bytes_of(a, a, weight), bytes_of(a, a, a, weight)),
        liger and (lambda a, w: liger.liger_rms_norm(a, w, 1e-6)),
    )
    gate, up = x(rows, ff), x(rows, ff)
    yield from both(
        f"silu gate [{rows}, {ff}] {kind}",
        "gated",
        lambda a, b: F.silu(a) * b,
        (gate, up),
        lambda x: gates.gated(x, up, "silu"),
        lambda g: gates.gated_backward(g, gate, up, "silu"),
        (bytes_of(gate) * 3, bytes_of(gate) * 5),
        liger and liger.liger_swiglu,
    )
    wide, bias = x(rows, d, dtype=torch.float32), x(d, dtype=torch.float32)
    yield from both(
        f"bias + gelu f32 [{rows}, {d}] {kind}",
        "bias_gelu",
        lambda a, b: F.gelu(a + b),
        (wide, bias),
        lambda x: gates.bias_gelu(x, bias, "gelu"),
        lambda g: gates.bias_gelu_backward(g, wide, bias, "gelu"),
        (bytes_of(wide) * 2, bytes_of(wide) * 3),
        None,
    )
    size = 128 - 2 * less
    q, cos, sin = x(4, rows // 4, 32, size).transpose(1, 2), x(rows // 4, size), x(rows // 4, size)

    def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = q.chunk(2, -1)
        return q * cos + torch.cat((-right, left), -1) * sin

    yield from both(
        f"rope [4, 32, {rows // 4}, {size}] {kind}",
        "rope",
        lambda q: rotate(q, cos, sin),
        (q,),
        lambda x: rope.rope(x, cos, sin),
        lambda g: rope.rope_backward(g, cos, sin, q.dtype),
        (bytes_of(q) * 2, bytes_of(q) * 2),
        None,  # Liger's turns queries and keys at once, in place
    )
    logits, target = x(rows, v), torch.randint(v, (rows,), device="cuda")
    stats = cross_entropy.ce_stats(logits, target, -100)
    yield from both(
        f"cross entropy [{rows}, {v}] {kind}",
        "ce_stats",
        lambda a: F.cross_entropy(a.float(), target, reduction="none"),
        (logits,),
        lambda x: cross_entropy.ce_stats(x, target, -100),
        lambda g: cross_entropy.ce_backward(g.float(), logits, stats, target, -100),
        (bytes_of(logits), bytes_of(logits) * 2),
        None,  # Liger's forward writes the gradient: compare the sums of both
    )
    h, residual = x(rows, d), x(rows, d)
    at = {"at_seed": 0, "at_step": 0, "op": 0}
    _, kept = dropout.dropout_add(h, residual, 0.1, **at)
    yield from both(
        f"dropout + add [{rows}, {d}] {kind}",
        "dropout_add",
        lambda a, b: F.dropout(a, 0.1) + b,
        (h, residual),
        lambda x: dropout.dropout_add(x, residual, 0.1, **at),
        lambda g: dropout.dropout_backward(g, kept, 0.1),
        (bytes_of(h) * 3 + bytes_of(kept), bytes_of(h) * 2 + bytes_of(kept)),
        None,
    )


FLUSHES = 12
"""Each takes about 90 us on an H100: longer than what launches a call takes."""


def seconds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of each, interleaved: on the device, and of the host until the call returns."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 5):
        for name, call in ways.items():
            for _ in range(FLUSHES):
                flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            before = time.perf_counter()
            call()
            host = time.perf_counter() - before
            end.record()
            end.synchronize()
            if number >= 5:  # compiled and warm
                spent[name].append((begin.elapsed_time(end) / 1e3, host))
    return {
        name: (statistics.median(t for t, _ in each), statistics.median(t for _, t in each))
        for name, each in spent.items()
    }


def bandwidth(rounds: int) -> float:
    """Bytes a second of a copy of 1 GiB, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds({"copy": lambda: target.copy_(source)}, rounds)["copy"][0]


def on_gpu(rounds: int) -> Iterator[str]:
    most = bandwidth(rounds)
    device = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, Triton {importlib.import_module('triton').__version__}"
    yield f"{device}, {versions}; a copy: {most / 1e12:.2f} TB/s"
    yield ""
    heads = ("ours, us", "of the roofline", "eager", "compile", "Liger", "compile in a segment")
    yield f"| op | {' | '.join(heads)} | host, us: ours | eager |"
    yield "|---" * (len(heads) + 3) + "|"
    in_segment: dict[str, list[float]] = {}
    for odd in (False, True):
        for each in timed(8192, odd):
            found = seconds(each.ways, rounds)
            ours, host = found.pop("ours")
            share = each.nbytes / most / ours
            peers = [
                f"{found[p][0] / ours:.2f}x" if p in found else "-"
                for p in ("eager", "compile", "Liger")
            ]
            ratio = found[f"{IN_SEGMENT}compile"][0] / found[f"{IN_SEGMENT}ours"][0]
            in_segment.setdefault(each.op, []).append(ratio)
            hosts = f"{host * 1e6:.0f} | {found['eager'][1] * 1e6:.0f}"
            cells = [each.name, f"{ours * 1e6:.0f}", f"{share:.0%}", *peers, f"{ratio:.2f}x", hosts]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "A peer's figure is its time over ours, on the device; of the host, until a call returns."
    instead = sorted(op for op, ratios in in_segment.items() if statistics.mean(ratios) < 1)
    yield f"Faster from the compiler in a segment, for `COMPILED_INSTEAD`: {', '.join(instead)}."


def ahead_of_time(most: int | None) -> Iterator[str]:
    """``most``: architectures; None: all."""
    import triton

    from tests.kernels import ahead

    yield f"Triton {triton.__version__}. A cell: registers, loads of 16 bytes of all loads."
    yield f"Nothing spills; at most {ahead.MOST_REGISTERS} registers."
    yield "8 divides aligned lengths, not odd ones; wide: 16,384; large: more than 2**31 elements."
    yield ""
    targets = list(ahead.TARGETS)[:most]
    yield f"| call | lengths | {' | '.join(targets)} |"
    yield "|---" * (2 + len(targets)) + "|"
    for row in ahead.rows(targets):
        yield f"| {' | '.join(row)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aot", action="store_true", help="what the kernels compile to")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    parser.set_defaults(targets=None)
    options = parsed(parser, aot=True, targets=1)
    if not options.aot and not torch.cuda.is_available():
        print("There is no CUDA device here; --aot needs none.", file=sys.stderr)
        return 1
    name = "kernels_aot" if options.aot else "kernels"
    command = "python -m benchmarks.kernels" + " --aot" * options.aot
    lines = [f"# Kernels{', compiled ahead of time' * options.aot}", "", f"`{command}`", ""]
    print("\n".join(lines))
    for line in ahead_of_time(options.targets) if options.aot else on_gpu(options.rounds):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
