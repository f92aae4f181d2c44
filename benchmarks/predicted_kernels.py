"""The bytes that kernels move, and the least time for them on an H100: predicted, never measured.

    python -m benchmarks.predicted_kernels [--write]      # no GPU; to results/kernels_predicted.md

Calls are made with tensors that hold nothing, and their launches are caught. The bytes of a launch
follow from its own data: its operands, and which of them the kernel loads and stores
(dtensor/kernels/launches.py; tests/kernels/moved.py counts the same in Triton's interpreter). The
roofline is NVIDIA's: "NVIDIA H100 Tensor Core GPU", data sheet, H100 SXM: 3.35 TB/s of HBM3,
1,979 TFLOP/s in bfloat16 with sparsity, of which 989 without.

A prediction is what the bandwidth allows at best: each byte counts once, at the full bandwidth, and
nothing else takes time. `benchmarks/kernels.py` measures, and has a file of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.smallest import parsed
from dtensor.kernels import cross_entropy, dropout, gates, norms, rope
from dtensor.kernels.launches import LAUNCHES
from tests.kernels import ahead

RESULTS = Path(__file__).parent / "results" / "kernels_predicted.md"
BANDWIDTH = 3.35e12
"""Bytes a second, of the data sheet."""
FLOPS = 989e12
"""Of the tensor cores in bfloat16, dense."""

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op with its operands on the meta device. ``written``: those that it changes."""

    name: str
    call: Callable[[], Any]
    operands: Sequence[Tensor]
    written: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """``least``: the bytes of the operands and of the results, once."""

    launches: Sequence[ahead.Launch]
    read: int
    written: int
    least: int

    @property
    def seconds(self) -> float:
        return (self.read + self.written) / BANDWIDTH


class _Copies(TorchDispatchMode):
    """That a call copies no operand, whose bytes no launch would show."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        large = any(isinstance(x, Tensor) and x.numel() > 1 << 16 for x in args)
        if large and func.name() in ("aten::clone", "aten::copy_", "aten::_to_copy"):
            raise AssertionError(f"{func.name()} of {[x.shape for x in args[:1]]}")
        return func(*args, **(kwargs or {}))


def predict(call: Call) -> Predicted:
    results: list[Tensor] = []

    def made() -> None:
        with _Copies():
            got = call.call()
        results.extend(got if isinstance(got, tuple) else [got] if got is not None else [])

    launches = ahead.launches(made)
    moved = [LAUNCHES[launch.function.__name__].moved(launch.arguments) for launch in launches]
    return Predicted(
        launches=launches,
        read=sum(read for read, _ in moved),
        written=sum(written for _, written in moved),
        least=sum(x.numel() * x.element_size() for x in (*call.operands, *call.written, *results)),
    )


def _x(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(rows: int, d: int, ff: int, v: int, heads: int, dtype: torch.dtype) -> Iterator[Call]:
    """Of a model: rows of d, gates of ff, a vocabulary of v, heads of 128 in rows of 2,048."""

    def x(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return _x(*shape, dtype=of)

    a, b, w, rstd = x(rows, d), x(rows, d), x(d), x(rows, 1, of=F32)
    args = (1e-6, 0.0, dtype, dtype)
    yield Call(
        name=f"rms_norm [{rows}, {d}]",
        call=lambda: norms.rms_norm(a, w, *args),
        operands=(a, w),
    )
    yield Call(
        name=f"add_rms_norm [{rows}, {d}]",
        call=lambda: norms.add_rms_norm(a, b, w, *args),
        operands=(a, b, w),
    )
    yield Call(
        name=f"rms_norm_backward [{rows}, {d}]",
        call=lambda: norms.rms_norm_backward(b, a, rstd, w, 0.0),
        operands=(a, b, w, rstd),
    )
    yield Call(
        name=f"add_layer_norm [{rows}, {d}]",
        call=lambda: norms.add_layer_norm(a, b, w, w, 1e-5),
        operands=(a, b, w, w),
    )
    gate, up, grad = x(rows, ff), x(rows, ff), x(rows, ff)
    yield Call(
        name=f"gated silu [{rows}, {ff}]",
        call=lambda: gates.gated(gate, up, "silu"),
        operands=(gate, up),
    )
    yield Call(
        name=f"gated_backward silu [{rows}, {ff}]",
        call=lambda: gates.gated_backward(grad, gate, up, "silu"),
        operands=(grad, gate, up),
    )
    bias = x(ff)
    yield Call(
        name=f"bias_gelu [{rows}, {ff}]",
        call=lambda: gates.bias_gelu(gate, bias, "gelu"),
        operands=(gate, bias),
    )
    yield Call(
        name=f"bias_gelu_backward [{rows}, {ff}]",
        call=lambda: gates.bias_gelu_backward(grad, gate, bias, "gelu"),
        operands=(grad, gate, bias),
    )
    t = 2048
    q, q_grad = x(rows // t, t, heads, 128).transpose(1, 2), x(rows // t, heads, t, 128)
    cos, sin = x(t, 128), x(t, 128)
    yield Call(
        name=f"rope {list(q.shape)}",
        call=lambda: rope.rope(q, cos, sin),
        operands=(q, cos, sin),
    )
    yield Call(
        name=f"rope_backward {list(q.shape)}",
        call=lambda: rope.rope_backward(q_grad, cos, sin, dtype),
        operands=(q_grad, cos, sin),
    )
    logits, target = x(rows, v), x(rows, of=torch.int64)
    stats, loss_grad = x(rows, 3, of=F32), x(rows, of=F32)
    yield Call(
        name=f"ce_stats [{rows}, {v}]",
        call=lambda: cross_entropy.ce_stats(logits, target, -100),
        operands=(logits, target),
    )
    yield Call(
        name=f"ce_backward [{rows}, {v}]",
        call=lambda: cross_entropy.ce_backward(loss_grad, logits, stats, target, -100),
        operands=(loss_grad, logits, stats[:, :2], target),
    )
    kept = x(rows, d, of=torch.bool)
    at: dict[str, Any] = {"at_seed": 1, "at_step": 0, "op": 0}
    yield Call(
        name=f"dropout_add [{rows}, {d}]",
        call=lambda: dropout.dropout_add(a, b, 0.1, **at),
        operands=(a, b),
    )
    yield Call(
        name=f"dropout_backward [{rows}, {d}]",
        call=lambda: dropout.dropout_backward(a, kept, 0.1),
        operands=(a, kept),
    )


MODELS: dict[str, tuple[int, int, int, int, int]] = {
    "Llama 3 8B's sizes, 8,192 tokens": (8192, 4096, 14336, 128256, 32),
    "Llama 3 70B's sizes, 8,192 tokens": (8192, 8192, 28672, 128256, 64),
    "GPT-2's, whose vocabulary is odd, 8,192 tokens": (8192, 768, 3072, 50257, 6),
}
"""Tokens, width, width of the gate, vocabulary, heads (of 128 elements, also where a model has
others)."""


def shape_of(launch: ahead.Launch) -> str:
    """`rms_norm_row (8192,) BLOCK 4096, 8 warps`"""
    sizes = ("BLOCK", "ROWS", "LANES", "COLUMNS")
    block = " ".join(
        f"{k} {launch.arguments[k]}" for k in sizes if type(launch.arguments.get(k)) is int
    )
    grid = " x ".join(f"{n:,}" for n in launch.grid)
    return f"{launch.name}: {grid} programs, {block}, {launch.options['num_warps']} warps"


def row(call: Call, dtype: str) -> str:
    found = predict(call)
    moved = found.read + found.written
    cells = [
        call.name,
        dtype,
        "; ".join(map(shape_of, found.launches)),
        f"{found.read / 1e6:.1f}",
        f"{found.written / 1e6:.1f}",
        f"{moved / found.least:.3f}",
        f"{found.seconds * 1e6:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = [
    "| call | dtype | launches | read, MB | written, MB | over the least | predicted, us |",
    "|---|---|---|---|---|---|---|",
]


def attention(b: int, h: int, groups: int, t: int, d: int = 128) -> Iterator[str]:
    """Causal, with its results: torch's flash kernels, whose launches are not ours to read."""
    q, kv, lse = 2 * b * h * t * d, 2 * b * groups * t * d, 4 * b * h * t
    products = 2 * b * h * t * t * d // 2  # of one product of matrices, half of it masked
    for name, nbytes, num in (
        ("attention", 2 * q + 2 * kv + lse, 2),
        ("attention_backward", 4 * q + 4 * kv + lse, 5),
    ):
        flops = num * products
        bytes_s, flops_s = nbytes / BANDWIDTH, flops / FLOPS
        cells = [
            f"{name} [{b}, {h}, {t}, {d}], {groups} groups",
            f"{nbytes / 1e6:.1f}",
            f"{flops / 1e9:.0f}",
            f"{flops / nbytes:.0f}",
            f"{bytes_s * 1e6:.1f}",
            f"{flops_s * 1e6:.1f}",
            "products" if flops_s > bytes_s else "bytes",
        ]
        yield f"| {' | '.join(cells)} |"


def lines() -> Iterator[str]:
    yield "# Kernels on an H100: predicted, never measured"
    yield ""
    yield "`python -m benchmarks.predicted_kernels --write`"
    yield ""
    yield from INTRODUCTION.strip().splitlines()
    for title, (rows, d, ff, v, heads) in MODELS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield from HEADER
        for dtype, word in ((BF16, "bfloat16"), (F32, "float32")):
            for call in calls(rows, d, ff, v, heads, dtype):
                yield row(call, word)
    yield ""
    yield from ATTENTION.strip().splitlines()
    yield ""
    yield "| call | MB | GFLOP | FLOP a byte | bytes, us | products, us | bound by |"
    yield "|---|---|---|---|---|---|---|"
    for b, h, groups, t in ((4, 32, 8, 2048), (1, 32, 8, 8192), (1, 64, 8, 8192), (1, 64, 8, 512)):
        yield from attention(b, h, groups, t)


INTRODUCTION = f"""
No line here was timed. Bytes follow from the launches of each call, made on tensors that hold
nothing: which operands a kernel loads and stores (`dtensor/kernels/launches.py`), each element
once. Triton's interpreter counts the same bytes on small shapes (`python -m tests.kernels.moved`).

- The roofline: 3.35 TB/s of HBM3, 989 TFLOP/s in bfloat16 without sparsity (NVIDIA, "H100 Tensor
  Core GPU", data sheet, H100 SXM, which states 1,979 with sparsity). They meet
  at {FLOPS / BANDWIDTH:.0f} FLOP a byte.
- The kernels in Triton multiply no matrices, so the bandwidth alone bounds them here. Their other
  arithmetic (exponentials, Philox) and launches are taken to cost nothing.
- "over the least": the bytes over those of the op's operands and results, each once. Above 1 are
  partial sums, which one kernel writes and the next reads. What programs share (weights, tables)
  counts once, as from a cache. Partial sums count twice, though they may stay in the L2 cache.
- MB are 10^6 bytes. Measured times are in kernels.md, where a copy reached 3.01 TB/s.
"""
ATTENTION = """
## Attention

Torch's flash kernels in bfloat16, causal: their launches are torch's, so the bytes are those of the
operands and results, and the FLOP those of 2 products forward and 5 backward, half of each masked.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    options = parsed(parser)
    text = "\n".join(lines()) + "\n"
    print(text, end="")
    if options.write:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
