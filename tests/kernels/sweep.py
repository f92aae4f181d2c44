"""Runs all cases in Triton's interpreter, which needs no GPU, or on a GPU, in a separate
process.

    python -m tests.kernels.sweep               # in every dtype, a minute; rc 1 where one fails
    python -m tests.kernels.sweep --quick       # float32 alone: what the tests run
    python -m tests.kernels.sweep --device cuda # on a GPU; with --simulated on a simulated one

The interpreter must be chosen before Triton is imported. An access out of bounds ends the
process. The interpreter truncates bfloat16 where a GPU rounds; this is corrected here, so that
results can be compared bitwise. It computes scalar arguments in float64; kernels leave such
arithmetic to their callers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from typing import Any


def round_to_nearest() -> None:
    """Make the interpreter's casts to bfloat16 round to nearest, ties to even."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cut: Any = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            bits = data.view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
            data = np.where(np.isnan(data), data, nearest.view(np.float32))
        return cut(data, source, target, mode)

    vars(interpreter)["_convert_float"] = convert


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="float32 alone, fewer shapes")
    parser.add_argument("--kernel", help="one kernel alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--simulated", action="store_true", help="a simulated GPU")
    options = parser.parse_args()
    interpreted = options.device == "cpu" or options.simulated
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    from dtensor.testing import simulated_gpus

    torch.set_num_threads(1)
    if interpreted:
        round_to_nearest()
    with simulated_gpus() if options.simulated else nullcontext():
        return swept(torch.device(options.device), not options.quick, options.kernel)


def swept(device: Any, full: bool, kernel: str | None) -> int:
    from tests.kernels.cases import cases

    worst: dict[str, float] = {}
    count: dict[str, int] = {}
    spent: dict[str, float] = {}
    failed = 0
    for case in cases(device, full=full):
        if kernel not in (None, case.kernel):
            continue
        began = time.process_time()
        try:
            found = case.check()
        except AssertionError as error:
            print(f"FAILED {error}")
            failed += 1
            continue
        worst[case.kernel] = max(worst.get(case.kernel, 0.0), found)
        count[case.kernel] = count.get(case.kernel, 0) + 1
        spent[case.kernel] = spent.get(case.kernel, 0.0) + time.process_time() - began
    for name, error in worst.items():
        text = f"{name}: cases {count[name]}, largest error {error:.2f} of its bound"
        print(f"{text}, {spent[name]:.1f} s", flush=True)
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
