"""Which dtypes of operands torch's CPU kernels accept together, found by running them.

    disagreements("aten.mm.default", "same")      # []: operands of one dtype, no others
    disagreements("aten.mm.default", "promote")   # ["f64 f32", ...]: what the kernel refuses

Each sample of an op runs with its float64 operands in mixtures of other floating dtypes, except
dtypes that the op does not accept alone. Integer and bool operands (indices, masks) keep their
dtype. Shapes are small and nothing is random, so the same torch on the same kind of CPU gives the
same results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from dtensor.api.rule import op_overloads
from dtensor.numerics import dtype_name
from dtensor.sharding.ops import attention as attention  # the project's own
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.dtypes import Dtypes, accepts
from dtensor.testing.oracle import call_of, run
from tests.certify.samples import SAMPLES, Draw

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Mix = tuple[torch.dtype, ...]


def disagreements(op: str, stated: Dtypes) -> list[str]:
    """Return the mixes that a rule with this dtypes field accepts and the kernel refuses, or vice
    versa."""
    (target,) = op_overloads(op)
    found: list[str] = []
    for sample in SAMPLES[op]:
        call, operands = call_of(target, *sample(Draw(0)))
        found += _disagreements(call, operands, stated)
    return found


def _disagreements(call: OpCall, operands: Sequence[torch.Tensor], stated: Dtypes) -> list[str]:
    varied = varied_operands(operands)
    alone = [d for d in FLOATS if _takes(call, operands, (d,) * len(varied))]
    found: list[str] = []
    for mix in _mixes(len(varied), alone):
        dtypes = iter(mix)
        given = tuple(next(dtypes) if i in varied else x.dtype for i, x in enumerate(operands))
        if accepts(stated, given) != _takes(call, operands, mix):
            found.append(" ".join(map(dtype_name, mix)))
    return found


def varied_operands(operands: Sequence[torch.Tensor]) -> list[int]:
    return [i for i, x in enumerate(operands) if x.dtype == torch.float64]


def _mixes(num: int, dtypes: Sequence[torch.dtype]) -> Iterator[Mix]:
    """Return mixes in which some operands have one dtype and the others another; of many operands,
    one differs."""
    sizes = range(1, num) if num < 6 else (1, num - 1)
    for size in sizes:
        for chosen in itertools.combinations(range(num), size):
            for one, rest in itertools.permutations(dtypes, 2):
                yield tuple(one if i in chosen else rest for i in range(num))


def _takes(call: OpCall, operands: Sequence[torch.Tensor], mix: Mix) -> bool:
    given = list(operands)
    for place, dtype in zip(varied_operands(operands), mix, strict=True):
        given[place] = given[place].to(dtype)
    for i, value in enumerate(call.args):  # a dtype among the arguments is that of an operand, too
        if value == torch.float64:
            call = call.with_arg(i, mix[0])
    try:
        run(call, given)
    except Exception:  # an op may raise anything at dtypes that it does not take
        return False
    return True
