"""Which dtypes of operands an op's kernels take together: the field `dtypes` of a rule.

    accepts("same", (torch.float32, torch.bfloat16))       # False: mm takes operands of one dtype
    accepts("promote", (torch.float32, torch.bfloat16))    # True: add takes them as float32 both
    Half((0,))((torch.bfloat16, torch.float32))            # True: a norm of bf16 with f32 weights

Torch's meta and fake kernels accept more than the kernels that ranks run: a product of f32 with
bf16 is captured, and fails on the rank. So rules say it, and it is an error while planning.

Invariant: what is refused here torch's kernels refuse (tests/certify/dtypes.py runs them); of ops
with operands whose dtype torch's meta kernels name wrongly nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Dtypes = Literal["promote", "same"] | Callable[[tuple[torch.dtype, ...]], bool]
"""Any mix; operands of one dtype; or whether a mix is taken."""


def accepts(dtypes: Dtypes, operands: tuple[torch.dtype, ...]) -> bool:
    """Whether an op whose rule says ``dtypes`` takes operands of these dtypes."""
    match dtypes:
        case "promote":
            return True
        case "same":
            return len(set(operands)) < 2
        case _:
            return dtypes(operands)


def beside_indices(operands: tuple[torch.dtype, ...]) -> bool:
    """Of one dtype, but for integers and bools, which are indices or masks."""
    return len({dtype for dtype in operands if dtype.is_floating_point or dtype.is_complex}) < 2


@dataclass(frozen=True, slots=True)
class Half:
    """Of one dtype; or the ``narrow`` operands in one 16-bit dtype and all others in float32;
    those that are ``free`` in any."""

    narrow: tuple[int, ...]
    free: tuple[int, ...] = ()

    def __call__(self, operands: tuple[torch.dtype, ...]) -> bool:
        narrow = {dtype for i, dtype in enumerate(operands) if i in self.narrow}
        stated = (*self.narrow, *self.free)
        wide = {dtype for i, dtype in enumerate(operands) if i not in stated}
        halves = {torch.bfloat16, torch.float16}
        mixed = len(narrow) == 1 and narrow <= halves and wide <= {torch.float32}
        return len(narrow | wide) < 2 or mixed
