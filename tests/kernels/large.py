"""Every kernel at offsets of 2**31 + 1 and more, on strides alone, in Triton's interpreter.

    python -m tests.kernels.large                # seconds, and little memory: rc 1 where one fails
    python -m tests.kernels.large --mutants      # each offset computed in 32 bits: all are found

Operands lie in memory that is only mapped (watched.py): rows THIRD elements apart, whose fourth
begins at 2**31 + 1; one row that is repeated, so that the *results* are that large, of which the
first and the last programs run; one row of 2**31 + 1 elements. What a kernel gives there must be,
to the last bit, what it gives for the same numbers side by side. An access outside the operands
fails by itself.

`--mutants`: those of mutants.py. Not here: that numbers are right (cases.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

import dtensor.sharding.ops.registered  # noqa: F401  registers the ops
from dtensor.kernels import adamw, blocks, cross_entropy, dropout, gates, norms, rope
from tests.kernels.mutants import report
from tests.kernels.watched import Choose, ends, every, last, last_offset, mapped, watched

FAR = 2**31 + 1
THIRD = FAR // 3
WIDTH = 40
"""Of rows that are repeated."""
LENGTHS = (FAR + 16, FAR + 15)
"""Of one row, without whole groups and with them; the last 9 elements are in its last program."""

MODULES: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: module
    for module in (adamw, blocks, cross_entropy, dropout, gates, norms, rope)
}
Results = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Large:
    """``far``: a call with large offsets; ``near``: the same numbers; ``programs``: which run;
    ``taken``: what of a far result the near one is (its last row, its last element).
    """

    module: str
    label: str
    far: Callable[[Any], Results]
    near: Callable[[Any], Results]
    programs: Choose = every
    taken: Callable[[Tensor], Tensor] = lambda x: x

    def check(self) -> int:
        """The farthest element of an operand; AssertionError where results differ."""
        module = MODULES[self.module]
        with watched(self.programs) as launches:
            far = [self.taken(x).clone() for x in self.far(module)]
        with watched():
            near = self.near(module)
        for number, (x, want) in enumerate(zip(far, near, strict=True)):
            x = x.reshape(want.shape)
            assert torch.equal(x, want), f"{self.label}: result {number}: {x} and not {want}"
        values = (x for launch in launches for x in launch.arguments.values())
        return max(last_offset(x) for x in values if isinstance(x, Tensor))


_random = torch.Generator().manual_seed(0)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=_random).to(dtype)


def apart(x: Tensor, dim: int = 0, step: int = THIRD) -> Tensor:
    """The same numbers, 4 along ``dim``, at ``step`` elements from one to the next."""
    assert x.shape[dim] == 4
    strides = list(x.contiguous().stride())
    strides[dim] = step
    count = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) + 1
    return mapped(count, x.dtype).as_strided(x.shape, strides).copy_(x)


def repeated(row: Tensor, least: int = FAR) -> Tensor:
    """row[k] -> [n, k], whose last row would begin at ``least`` elements or after them."""
    return row.expand(-(-least // row.shape[0]) + 1, row.shape[0])


def long(end: Tensor, count: int) -> Tensor:
    """A row of ``count`` elements that ends with these."""
    x = mapped(count, end.dtype)
    x[-end.shape[0] :] = end
    return x


def last_row(x: Tensor) -> Tensor:
    return x[-1:]


def last_elements(x: Tensor) -> Tensor:
    return x.reshape(-1)[-9:]


# -- by kernel -------------------------------------------------------------------------------------


def _norms() -> Iterator[Large]:
    args = (1e-6, 1.0, torch.float32, torch.float32)
    x, residual, grad = some(4, WIDTH), some(4, WIDTH), some(4, WIDTH)
    weight, bias, rstd = some(WIDTH), some(WIDTH), some(4, 1).abs()
    calls: dict[str, tuple[Callable[..., Results], Sequence[Tensor]]] = {
        "rms_norm": (lambda m, x: m.rms_norm(x, weight, *args), (x,)),
        "add_rms_norm": (lambda m, x, r: m.add_rms_norm(x, r, weight, *args), (x, residual)),
        "add_layer_norm": (lambda m, *xs: m.add_layer_norm(*xs, weight, bias, 1e-5), (x, residual)),
    }
    for name, (call, operands) in calls.items():
        yield from _each_apart("norms", name, call, operands)
        yield Large(
            module="norms",
            label=f"{name}, results",
            far=lambda m, call=call, t=operands: call(m, *(repeated(x[0]) for x in t)),
            near=lambda m, call=call, t=operands: call(m, *(x[:1] for x in t)),
            programs=ends,
            taken=last_row,
        )

    def backward(m: Any, grad: Tensor, x: Tensor) -> Results:
        return m.rms_norm_backward(grad, x, rstd, weight, 1.0)

    yield from _each_apart("norms", "rms_norm_backward", backward, (grad, x))
    grad, x, rstd_, weight_ = some(16384), some(16384), some(1, 1).abs(), some(16384)
    many = repeated(x)
    yield Large(
        module="norms",
        label="rms_norm_backward, results",
        far=lambda m: m.rms_norm_backward(
            repeated(grad), many, rstd_.expand(len(many), 1).contiguous(), weight_, 0.0
        )[:1],
        near=lambda m: m.rms_norm_backward(grad[None], x[None], rstd_, weight_, 0.0)[:1],
        programs=last,
        taken=last_row,
    )


def _each_apart(
    module: str, name: str, call: Callable[..., Results], operands: Sequence[Tensor]
) -> Iterator[Large]:
    """Each operand's rows apart, those of the others side by side; at steps that GROUP divides and
    does not, near by too, as sums of rows that begin elsewhere are added in another order."""
    for at, step in itertools.product(range(len(operands)), (THIRD, THIRD + 5)):
        near = -(-operands[at].shape[-1] // 8) * 8 + step % 8

        def made(m: Any, step: int, at: int = at) -> Results:
            return call(m, *(apart(x, 0, step) if i == at else x for i, x in enumerate(operands)))

        yield Large(
            module=module,
            label=f"{name}, operand {at}, rows {step} apart",
            far=lambda m, made=made, step=step: made(m, step),
            near=lambda m, made=made, step=near: made(m, step),
        )


def _gates() -> Iterator[Large]:
    calls: dict[str, tuple[Callable[..., Results], int]] = {
        "gated": (lambda m, a, b: (m.gated(a, b, "silu"),), 2),
        "gated_backward": (lambda m, g, a, b: m.gated_backward(g, a, b, "gelu"), 3),
    }
    for name, (call, count) in calls.items():
        for width in (WIDTH, 13):
            operands = [some(4, width) for _ in range(count)]
            yield from _each_apart("gates", f"{name}, {width} columns", call, operands)
        yield Large(
            module="gates",
            label=f"{name}, results",
            far=lambda m, call=call, t=operands: call(m, *(repeated(x[0]) for x in t)),
            near=lambda m, call=call, t=operands: call(m, *(x[:1] for x in t)),
            programs=ends,
            taken=last_row,
        )
        for length in LENGTHS:
            rows = [some(9) for _ in range(count)]
            yield Large(
                module="gates",
                label=f"{name}, one row of {length}",
                far=lambda m, call=call, t=rows, n=length: call(m, *(long(x, n) for x in t)),
                near=lambda m, call=call, t=rows: call(m, *t),
                programs=ends,
                taken=last_elements,
            )


def _bias_gelus() -> Iterator[Large]:
    x, grad, bias = some(4, WIDTH), some(4, WIDTH), some(WIDTH)

    def forward(m: Any, x: Tensor) -> Results:
        return (m.bias_gelu(x, bias, "gelu"),)

    yield from _each_apart("gates", "bias_gelu", forward, (x,))
    yield Large(
        module="gates",
        label="bias_gelu, results",
        far=lambda m: forward(m, repeated(x[0])),
        near=lambda m: forward(m, x[:1]),
        programs=ends,
        taken=last_row,
    )
    yield from _each_apart(
        "gates",
        "bias_gelu_backward",
        lambda m, g, x: m.bias_gelu_backward(g, x, bias, "gelu_tanh"),
        (grad, x),
    )
    columns = 2**22 + 2**14  # the last of 512 rows of the partial sums begins after 2**31
    row, grad_row, wide = (long(some(9), columns) for _ in range(3))
    yield Large(
        module="gates",
        label="bias_gelu_backward, results",
        far=lambda m: m.bias_gelu_backward(
            grad_row.expand(512, columns), row.expand(512, columns), wide, "gelu"
        ),
        # of 512 parts the first and the last have run
        near=lambda m: [
            x.reshape(-1, 9)[-1]
            for x in m.bias_gelu_backward(
                grad_row[-9:].expand(2, 9), row[-9:].expand(2, 9), wide[-9:], "gelu"
            )
        ],
        programs=ends,
        taken=last_elements,
    )


def _sums() -> Iterator[Large]:
    columns = 2**22 + 2**14
    rows = some(2, 9)

    def large() -> Tensor:
        x = mapped(512 * columns, torch.float32).view(512, columns)
        x[0, -9:], x[511, -9:] = rows[0], rows[1]
        return x

    yield Large(
        module="blocks",
        label="sum_rows",
        far=lambda m: (m.sum_rows(large(), torch.float32),),
        near=lambda m: (m.sum_rows(rows, torch.float32),),
        programs=ends,
        taken=last_elements,
    )


def _ropes() -> Iterator[Large]:
    calls: dict[str, Callable[..., Results]] = {
        "rope": lambda m, x, c, s: (m.rope(x, c, s),),
        "rope_backward": lambda m, x, c, s: (m.rope_backward(x, c, s, torch.float32),),
    }
    for name, call in calls.items():
        for dim in range(3):
            shape = [2, 2, 2, 12]
            shape[dim] = 4
            x, cos, sin = some(*shape), some(*shape), some(*shape)
            for at in range(3):
                yield Large(
                    module="rope",
                    label=f"{name}, operand {at}, dim {dim}",
                    far=lambda m, call=call, t=(x, cos, sin), at=at, dim=dim: call(
                        m, *(apart(x, dim) if i == at else x for i, x in enumerate(t))
                    ),
                    near=lambda m, call=call, t=(x, cos, sin): call(m, *t),
                )
            row = [t.flatten(0, 2)[0] for t in (x, cos, sin)]

            def along(row: Tensor, dim: int = dim) -> Tensor:
                return repeated(row)[(None,) * dim].unflatten(dim, (-1,) + (1,) * (2 - dim))

            yield Large(
                module="rope",
                label=f"{name}, results, dim {dim}",
                far=lambda m, call=call, t=row, along=along: call(m, *map(along, t)),
                near=lambda m, call=call, t=row: call(m, *(x[None] for x in t)),
                programs=ends,
                taken=last_elements_of(12),
            )


def last_elements_of(count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.reshape(-1)[-count:]


def _cross_entropies() -> Iterator[Large]:
    target, grad, stats = torch.tensor([3, 7, -100, 5]), some(4), some(4, 3).abs()

    def forward(m: Any, x: Tensor, target: Tensor = target) -> Results:
        return (m.ce_stats(x, target, -100),)

    def backward(
        m: Any, grad: Tensor, x: Tensor, stats: Tensor = stats, target: Tensor = target
    ) -> Results:
        return (m.ce_backward(grad, x, stats, target, -100),)

    for width in (WIDTH, 37):
        x = some(4, width)
        label = f"{width} columns"
        yield from _each_apart("cross_entropy", f"ce_stats, {label}", forward, (x,))
        yield from _each_apart("cross_entropy", f"ce_backward, {label}", backward, (grad, x))
    row, half = some(8), some(8, dtype=torch.float16)

    def targets(count: int) -> Tensor:
        """0, and of the last row 5."""
        return long(torch.tensor([5]), count)

    many = repeated(row[:3])  # as statistics are
    yield Large(
        module="cross_entropy",
        label="ce_stats, results",
        far=lambda m: forward(m, row.expand(len(many), 8), targets(len(many))),
        near=lambda m: forward(m, row[None], target[3:]),
        programs=ends,
        taken=last_row,
    )

    def statistics(count: int) -> Tensor:
        return long(stats[3], 3 * count).view(count, 3)

    yield Large(
        module="cross_entropy",
        label="ce_backward, statistics and results",
        far=lambda m: backward(
            m,
            grad[:1].expand(len(many)),
            half.expand(len(many), 8),
            statistics(len(many)),
            targets(len(many)),
        ),
        near=lambda m: backward(m, grad[:1], half[None], stats[3:], target[3:]),
        programs=last,
        taken=last_row,
    )
    count = -(-FAR // 8) + 1
    yield Large(
        module="cross_entropy",
        label="ce_backward, results alike",
        far=lambda m: backward(
            m,
            grad[:1].expand(count),
            long(half, count * 8).view(count, 8),
            statistics(count),
            targets(count),
        ),
        near=lambda m: backward(m, grad[:1], half[None], stats[3:], target[3:]),
        programs=last,
        taken=last_row,
    )


def _dropouts() -> Iterator[Large]:
    key = {"at_seed": 0x9123456789AB, "at_step": 7, "op": 3}
    x, residual = some(4, WIDTH), some(4, WIDTH)
    yield from _each_apart("dropout", "dropout", lambda m, x: m.dropout(x, 0.3, **key), (x,))
    yield from _each_apart(
        "dropout", "dropout_add", lambda m, x, r: m.dropout_add(x, r, 0.3, **key), (x, residual)
    )

    def placed(m: Any, x: Tensor, shape: Sequence[int], pieces: Sequence[int], r: Any) -> Results:
        at = {**key, "shape": list(shape), "pieces": list(pieces)}
        return m.dropout_add(x, r, 0.3, **at)

    rows = -(-FAR // WIDTH) + 1
    row, other = some(WIDTH), some(WIDTH)
    yield Large(
        module="dropout",
        label="dropout_add, results",
        far=lambda m: m.dropout_add(repeated(row), repeated(other), 0.3, **key),
        near=lambda m: placed(m, row[None], (rows, WIDTH), (1, rows - 1, rows, 1, 0, WIDTH), other),
        programs=ends,
        taken=last_row,
    )
    end, n = some(9), LENGTHS[0]
    yield Large(
        module="dropout",
        label="dropout_add, one row",
        far=lambda m: m.dropout_add(long(end, n), long(end, n), 0.3, **key),
        near=lambda m: placed(m, end, (n,), (1, n - 9, n), end),
        programs=ends,
        taken=last_elements,
    )
    for shape, pieces in {
        "rows": ((FAR + 9, 8), (1, FAR, FAR + 4, 1, 0, 8)),
        "some rows": ((FAR + 9, 8), (2, 0, 2, FAR, FAR + 2, 1, 0, 8)),
        "columns": ((4, 2**33), (1, 0, 4, 1, 2**32 + 3, 2**32 + 11)),
        "some columns": ((4, 2**33), (1, 0, 4, 2, 0, 3, FAR, FAR + 5)),
    }.values():
        part = some(4, 8)
        yield Large(
            module="dropout",
            label=f"dropout_add, {pieces} of {shape}",
            far=lambda m, x=part, s=shape, p=pieces: placed(m, x, s, p, x),
            near=lambda m, x=part, s=shape, p=pieces: _add(
                torch.ops.dt.dropout(x, 0.3, **key, shape=list(s), pieces=list(p)), x
            ),
        )
    grad, kept = some(9), torch.tensor([True, False, True] * 3)
    for length in LENGTHS:
        yield Large(
            module="dropout",
            label=f"dropout_backward of {length}",
            far=lambda m, n=length: (m.dropout_backward(long(grad, n), long(kept, n), 0.3),),
            near=lambda m: (m.dropout_backward(grad, kept, 0.3),),
            programs=ends,
            taken=last_elements,
        )


def _add(made: Results, residual: Tensor) -> Results:
    return made[0] + residual, made[1]


def _adamws() -> Iterator[Large]:
    items = [some(9), some(9), some(9), some(9).abs()]

    def update(m: Any, make: Callable[[Tensor], Tensor]) -> Results:
        p, grad, first, second = map(make, items)
        m.fused_adamw_(
            [p], [grad], [first], [second], [], [torch.tensor(3.0)], lr=0.01, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-6, amsgrad=False, maximize=False,
            grad_scale=torch.tensor(3.0),
        )  # fmt: skip
        return p, grad, first, second

    for length in LENGTHS:
        yield Large(
            module="adamw",
            label=f"adamw of {length}",
            far=lambda m, n=length: update(m, lambda x: long(x, n)),
            near=lambda m: update(m, torch.clone),
            programs=ends,
            taken=last_elements,
        )


def cases() -> Iterator[Large]:
    for make in (
        _norms, _gates, _bias_gelus, _sums, _ropes, _cross_entropies, _dropouts, _adamws,
    ):  # fmt: skip
        yield from make()


def failure(case: Large) -> str:
    """What is wrong with it; empty: nothing."""
    try:
        case.check()
    except (AssertionError, InterpreterError) as error:
        return str(error)
    return ""


def run_mutants(by_module: Mapping[str, Sequence[Large]]) -> int:
    total = [0, 0, 0]
    for name, its_cases in by_module.items():
        module = MODULES[name]

        def wrong(made: ModuleType, name: str = name, its_cases: Any = its_cases) -> str:
            MODULES[name] = made
            return next((f"{c.label}: {text}" for c in its_cases if (text := failure(c))), "")

        counts = report(module, wrong)
        MODULES[name] = module
        total = [a + b for a, b in zip(total, counts, strict=True)]
    print(f"mutants: {total[0]}, of no need: {total[1]}, not found: {total[2]}")
    return 1 if total[2] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="each offset in 32 bits, one by one")
    parser.add_argument("--module", help="one file of kernels alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
    torch.set_num_threads(1)
    by_module: dict[str, list[Large]] = {}
    for case in cases():
        if options.module in (None, case.module):
            by_module.setdefault(case.module, []).append(case)
    if options.mutants:
        return run_mutants(by_module)
    failed = 0
    for name, its_cases in by_module.items():
        far: list[int] = []
        for case in its_cases:
            try:
                far.append(case.check())
            except (AssertionError, InterpreterError) as error:
                print(f"FAILED {case.label}: {error}")
                failed += 1
        print(f"{name}: cases {len(its_cases)}, farthest {max(far, default=0)}", flush=True)
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
