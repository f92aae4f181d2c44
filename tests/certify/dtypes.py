"""Which dtypes of operands torch's CPU kernels take together, op by op: found by running them.

    expected_dtypes("aten.mm.default")       # "same": operands of one dtype, no others
    expected_dtypes("aten.add.Tensor")       # "promote": any, as if all had the promoted dtype
    expected_dtypes("aten.copy.default")     # "like 0": any, as if all had the dtype of operand 0
    expected_dtypes("aten.native_layer_norm.default")   # "half 0": of one dtype, or operand 0 in a
                                                        # half dtype and the others in float32
    expected_dtypes("aten.convolution.default")         # "neither"

    python -m tests.certify.dtypes                   # all ops, into dtypes.md
    python -m tests.certify.dtypes aten.mm.default   # one, each trial

Torch's meta and fake kernels accept more than the kernels that ranks run: what capture lets through
is then refused on the rank. So each sample of an op is run with its float64 operands in other
dtypes, all of one, and some of one and the others of another, unless the op takes neither alone.
Operands that are integers or bools in the sample (indices, masks) stay.

Invariants: small shapes, no randomness: the same torch on the same kind of CPU gives the same
facts. A class holds for all floating dtypes that are mixed. Not here: values, GPUs, operands that
are complex.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path

import torch

from dtensor.api.rule import op_overloads
from dtensor.numerics import dtype_name
from dtensor.sharding.ops import attention as attention  # the project's own
from dtensor.sharding.ops.call import OpCall
from dtensor.testing.oracle import call_of, run
from tests.certify.samples import SAMPLES, Draw

TABLE = Path(__file__).with_name("dtypes.md")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.bool)

# Whose kernel ends the process: it divides integers by zero.
FLOATS_ONLY = {"aten.smooth_l1_loss_backward.default"}

Dtypes = tuple[torch.dtype, ...]
Results = tuple[torch.dtype | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The dtypes of the operands that vary, and those of the results, None where it is refused for
    the reason ``why``."""

    dtypes: Dtypes
    results: Results | None
    why: str = ""

    @property
    def floats(self) -> bool:
        return all(dtype in FLOATS for dtype in self.dtypes)

    @property
    def uniform(self) -> bool:
        return len(set(self.dtypes)) == 1

    def __str__(self) -> str:
        given = " ".join(map(dtype_name, self.dtypes))
        found = " ".join("-" if r is None else dtype_name(r) for r in self.results or ())
        return f"{given} -> {self.why if self.results is None else found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """Of one sample: ``dims`` of the operands that vary."""

    dims: tuple[int, ...]
    trials: tuple[Trial, ...]

    @property
    def mixed(self) -> list[Trial]:
        return [t for t in self.trials if not t.uniform]

    def against(self, kind: str) -> list[Trial]:
        """The mixed trials that a class does not describe."""
        alone = {t.dtypes[0]: t.results for t in self.trials if t.uniform}
        if kind == "same":
            return [t for t in self.mixed if t.results is not None]
        as_one = _as_one(kind, self.dims)
        return [t for t in self.mixed if t.results != alone.get(as_one(t.dtypes))]

    def kind(self) -> str:
        """The class that describes all mixes of floats, of several that with the fewest integers
        against it; "" where at most one operand varies."""
        if len(self.dims) < 2:
            return ""
        found: dict[str, int] = {}
        for kind in ("same", "promote", *(f"like {i}" for i in range(len(self.dims)))):
            against = self.against(kind)
            if not any(t.floats for t in against):
                found[kind] = len(against)
        return min(found, key=lambda kind: found[kind], default=self._half())

    def _half(self) -> str:
        """ "half 0 1" where the mixes taken are these operands in a half dtype, others float32."""
        taken = [t.dtypes for t in self.mixed if t.floats and t.results is not None]
        narrow = {tuple(i for i, d in enumerate(t) if d.itemsize == 2) for t in taken}
        wide = {d for dtypes in taken for d in dtypes if d.itemsize > 2}
        if len(narrow) != 1 or wide != {torch.float32} or any(len(set(t)) > 2 for t in taken):
            return "neither"
        return f"half {' '.join(map(str, narrow.pop()))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeFacts:
    op: str
    samples: tuple[SampleFacts, ...]

    @property
    def kind(self) -> str:
        """That of the samples with several operands; "neither" where they differ."""
        kinds = {s.kind() for s in self.samples} - {""}
        return kinds.pop() if len(kinds) == 1 else "neither" if kinds else ""


def expected_dtypes(op: str) -> str:
    """ "same", "promote", "like 0", "half 0 1" or "neither"; "" for an op with one operand."""
    return dtype_facts(op).kind


@cache
def dtype_facts(op: str) -> DtypeFacts:
    """What becomes of each sample of an op under other dtypes; some ms, at most 2 s."""
    (target,) = op_overloads(op)
    found: list[SampleFacts] = []
    for sample in SAMPLES[op]:
        args, kwargs = sample(Draw(0))
        call, operands = call_of(target, args, kwargs)
        found.append(sample_facts(call, operands, integers=op not in FLOATS_ONLY))
    return DtypeFacts(op=op, samples=tuple(found))


def sample_facts(
    call: OpCall, operands: Sequence[torch.Tensor], *, integers: bool = True
) -> SampleFacts:
    varied = [i for i, x in enumerate(operands) if x.dtype == torch.float64]
    every = (*FLOATS, *(INTEGERS if integers else ()))

    def tried(dtypes: Dtypes) -> Trial:
        given = list(operands)
        for place, dtype in zip(varied, dtypes, strict=True):
            given[place] = _converted(given[place], dtype)
        # An op may raise anything at dtypes that it does not take, which is what is asked here.
        try:
            found = run(_with_dtype(call, dtypes[0]), given)
        except Exception as error:
            return Trial(dtypes=dtypes, results=None, why=str(error).partition("\n")[0])
        results = tuple(None if r is None else r.dtype for r in found)
        return Trial(dtypes=dtypes, results=results)

    alone = [tried((d,) * len(varied)) for d in every] if varied else []
    taken = {t.dtypes[0] for t in alone if t.results is not None}
    mixes = [mix for mix in _mixes(len(varied), every) if taken & set(mix)]
    return SampleFacts(
        dims=tuple(operands[i].dim() for i in varied),
        trials=(*alone, *(tried(mix) for mix in mixes)),
    )


def _mixes(num: int, dtypes: Dtypes) -> Iterator[Dtypes]:
    """Some operands of one dtype and the others of another; where one of the two is an integer,
    one operand and the others."""
    found: dict[Dtypes, None] = {}
    for chosen in itertools.product((True, False), repeat=num):
        for one, rest in itertools.permutations(dtypes, 2):
            single = sum(chosen) == 1 or {one, rest} <= set(FLOATS)
            if single and 0 < sum(chosen) < num:
                found[tuple(one if c else rest for c in chosen)] = None
    yield from found


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats as integers from 1 on, so that kernels do not divide by zero; indices as they are."""
    if x.dtype in INTEGERS or dtype in FLOATS:
        return x.to(dtype)
    return (x.abs().round() + 1).to(dtype)


def _with_dtype(call: OpCall, dtype: torch.dtype) -> OpCall:
    """A dtype among the arguments (`_softmax_backward_data`) is that of an operand, too."""
    for i, value in enumerate(call.args):
        if value == torch.float64:
            call = call.with_arg(i, dtype)
    return call


def _as_one(kind: str, dims: Sequence[int]) -> Callable[[Dtypes], torch.dtype]:
    """The one dtype that operands of these dtypes are as good as."""
    if kind != "promote":
        number = int(kind.removeprefix("like "))
        return lambda dtypes: dtypes[number]

    def promoted(dtypes: Dtypes) -> torch.dtype:
        """Torch's: operands without dims count less than those with."""
        groups = [[d for d, n in zip(dtypes, dims) if (n > 0) == whole] for whole in (True, False)]
        kinds = [reduce(torch.promote_types, group) for group in groups if group]
        tensors = [torch.empty(shape, dtype=d) for shape, d in zip(((1,), ()), kinds)]
        return torch.result_type(*tensors) if len(tensors) == 2 else kinds[0]

    return promoted


# -- the table -----------------------------------------------------------------------------------

_HEAD = """\
# Dtypes that go together

Generated by `python -m tests.certify.dtypes`; do not edit. Each sample of an op was run by torch's
CPU kernels with its operands in float64, float32, bfloat16, float16, int64, int32 and bool: all of
one, and some of one with the others of another. *Class*: "same", mixes are refused; "promote", as
if all had the promoted dtype; "like k", as if all had operand k's; "half k", as "same", and these
operands may be in a half dtype while the others are float32; "neither". Operands that are indices
or masks in the samples are not counted. Ops with one operand have no row.

"""
_MADE_WITH = f"torch {torch.__version__.rpartition('.')[0]}"


def table(found: Sequence[DtypeFacts]) -> str:
    rows = [facts for facts in found if facts.kind]
    counts = {kind: sum(f.kind == kind for f in rows) for kind in sorted({f.kind for f in rows})}
    lines = [f"{_HEAD}Made with {_MADE_WITH}.", ""]
    lines += [*(f"- {kind}: {number}" for kind, number in counts.items()), ""]
    lines += ["| op | class |", "|---|---|", *(f"| `{f.op}` | {f.kind} |" for f in rows)]
    return "\n".join(lines) + "\n"


def is_of_this_torch(text: str) -> bool:
    """Kernels of another minor version of torch may take other dtypes."""
    return f"Made with {_MADE_WITH}." in text


def recorded(text: str) -> dict[str, str]:
    """The class of each op that a table has a row for."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:3] == "| `"]
    return {op.strip("`"): kind for op, kind in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.certify.dtypes")
    parser.add_argument("ops", nargs="*", metavar="op", help="names; none: all, into dtypes.md")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # the ops' own: deprecations, empty statistics
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = [dtype_facts(op) for op in given.ops or sorted(SAMPLES)]
    for facts in found if given.ops else ():
        print(f"{facts.op}: {facts.kind or 'one operand'}")
        for sample in facts.samples:
            print("\n".join(f"  {trial}" for trial in sample.trials))
    if not given.ops:
        TABLE.write_text(table(found))
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
