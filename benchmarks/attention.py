"""Attention on one GPU: dtensor's choice beside cuDNN, flash and memory-efficient, by shape.

    python -m benchmarks.attention [--rounds 20] [--write]       # needs a CUDA device

Each call is timed as in benchmarks/kernels.py: by CUDA events, all ways interleaved, with the
level-2 cache overwritten before each. The backward of a backend is torch's by autograd, whose graph
is made once. A backend that does not take the operands is "-".
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import seconds
from benchmarks.smallest import parsed

RESULTS = Path(__file__).parent / "results"
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SHAPES = (
    # batch, heads, heads of keys, tokens, size of a head, causal
    (8, 12, 12, 1024, 64, True),
    (8, 16, 4, 1024, 64, True),
    (2, 32, 8, 4096, 128, True),
    (1, 32, 8, 16384, 128, True),
    (16, 12, 12, 512, 64, False),
    (4, 16, 16, 2048, 96, True),
)
DTYPES = (torch.bfloat16, torch.float32)

Ways = dict[str, Callable[[], object]]


def ways_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Ways, Ways]:
    """Return the ways to compute the forward and the backward of q[b h t d], k and v[b g t d]."""
    import dtensor.sharding.ops.attention  # noqa: F401 - registers the ops
    from dtensor.kernels.attention import attention, attention_backward

    scale, repeats = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    out, lse = attention(q, k, v, causal, scale)
    grad = torch.randn_like(out)
    forward: Ways = {"dtensor": lambda: attention(q, k, v, causal, scale)}
    backward: Ways = {"dtensor": lambda: attention_backward(grad, q, k, v, out, lse, causal, scale)}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for name, backend in BACKENDS.items():
        # the memory-efficient kernel takes no grouped heads
        grouped = name != "efficient"

        def call(
            q: Tensor, k: Tensor, v: Tensor, backend: Any = backend, grouped: bool = grouped
        ) -> Tensor:
            if not grouped:
                k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=grouped and repeats > 1
                )

        try:
            made = call(*leaves)
        except RuntimeError:  # "No available kernel"
            continue
        forward[name] = lambda call=call: call(q, k, v)
        backward[name] = lambda made=made: torch.autograd.grad(
            made, leaves, grad, retain_graph=True
        )
    return forward, backward


def on_gpu(rounds: int) -> Iterator[str]:
    device, triton = torch.cuda.get_device_name(), importlib.import_module("triton")
    yield f"{device}, torch {torch.__version__}, Triton {triton.__version__}. Microseconds."
    yield ""
    yield f"| shape | | dtensor | {' | '.join(BACKENDS)} |"
    yield "|---|---|---|---|---|---|"
    for dtype in DTYPES:
        for b, h, g, t, d, causal in SHAPES:
            sizes = ((b, h, t, d), (b, g, t, d), (b, g, t, d))
            q, k, v = (torch.randn(size, dtype=dtype, device="cuda") for size in sizes)
            name = f"{str(dtype)[6:]} [{b}, {h}/{g}, {t}, {d}]{' causal' * causal}"
            for pass_name, ways in zip(("forward", "backward"), ways_of(q, k, v, causal)):
                found = seconds(ways, rounds)
                cells = [
                    f"{found[way][0] * 1e6:.0f}" if way in found else "-"
                    for way in ("dtensor", *BACKENDS)
                ]
                yield f"| {name} | {pass_name} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    given = parsed(parser, argv)
    if given.smallest and not torch.cuda.is_available():
        q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
        for ways in ways_of(q, k, k, True):
            for call in ways.values():
                call()
        return 0
    if not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 1
    lines = ["# Attention on one GPU", "", "`python -m benchmarks.attention`", ""]
    print(*lines, sep="\n")
    for line in on_gpu(given.rounds):
        print(line, flush=True)
        lines.append(line)
    if given.write:
        (RESULTS / "attention.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
