"""Which mixes of operand dtypes an op takes: the field `dtypes` of a rule.

    accepts("same", (torch.float32, torch.bfloat16))       # False: mm takes operands of one dtype
    accepts("promote", (torch.float32, torch.bfloat16))    # True: add promotes both to float32
    Half((0,))((torch.bfloat16, torch.float32))            # True: a norm of bf16 with f32 weights

Torch's meta and fake kernels accept more mixes than the kernels that ranks run: a product of f32
and bf16 can be captured, but fails on the rank. With these rules it is an error of planning.

Invariant: torch's kernels refuse every mix that is refused here (tests/certify/dtypes.py runs
them). No mix is refused for an op whose meta kernel states a wrong dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Dtypes = Literal["promote", "same"] | Callable[[tuple[torch.dtype, ...]], bool]
""""promote": any mix; "same": all operands of one dtype; or a function that says whether a mix is
accepted."""


def accepts(dtypes: Dtypes, operands: tuple[torch.dtype, ...]) -> bool:
    """Return whether an op whose rule states ``dtypes`` takes operands of these dtypes."""
    match dtypes:
        case "promote":
            return True
        case "same":
            return len(set(operands)) < 2
        case _:
            return dtypes(operands)


def same_float_dtype(operands: tuple[torch.dtype, ...]) -> bool:
    """Return whether all float operands have one dtype. Integers and bools are indices or masks."""
    return len({dtype for dtype in operands if dtype.is_floating_point or dtype.is_complex}) < 2


@dataclass(frozen=True, slots=True)
class Half:
    """Accepts operands of one dtype, or the ``narrow`` operands in one 16-bit dtype and the others
    in float32. The ``free`` operands may have any dtype."""

    narrow: tuple[int, ...]
    free: tuple[int, ...] = ()

    def __call__(self, operands: tuple[torch.dtype, ...]) -> bool:
        """Return whether the op takes operands of these dtypes."""
        narrow = {dtype for i, dtype in enumerate(operands) if i in self.narrow}
        exempt = (*self.narrow, *self.free)
        wide = {dtype for i, dtype in enumerate(operands) if i not in exempt}
        halves = {torch.bfloat16, torch.float16}
        mixed = len(narrow) == 1 and narrow <= halves and wide <= {torch.float32}
        return len(narrow | wide) < 2 or mixed
