"""The check behind ``detect_nan``: after each op of the local code, on the rank's local tensors.

    h = aten_div_Tensor(x, n)
    check_finite((x, n), (h,), dt_step, "aten.div.Tensor", ["x", "n"], ["h"], True)
    # NotFinite: aten.div.Tensor gives NaN in step 3: h f32[4,8] has 2 NaN of 32, the first at [0,5]
    #   x: f32[4,8], -1.3 to 2.1; it holds 1 NaN already

Every NaN is reported. An Inf is reported only if the op made it: no operand holds an Inf, and the
call has no infinite constant, as masks filled with -inf have. The largest finite value of a dtype
counts as an Inf, because sums of such masks overflow on purpose. A NaN that a collective or the
optimizer makes is reported by the next op that reads it. ``detect_nan="nan"`` reports only NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import dtype_name
from dtensor.runtime.lower.code import CodeBuilder
from dtensor.sharding.ops.call import STEP, OpCall
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.spec import TensorSpec

DetectNan = bool | Literal["nan"]
_UNINITIALIZED_FACTORIES = ("aten.empty", "aten.new_empty")


class NotFinite(ArithmeticError):
    """An op gave a NaN or an Inf on a rank."""


def checked_detect(value: object) -> DetectNan:
    """Return ``value``. Raises PlanningError if it is not True, False or "nan"."""
    if isinstance(value, bool) or value == "nan":
        return cast(DetectNan, value)
    raise PlanningError(
        f'detect_nan={value!r}: it is True, False or "nan", for NaN alone.\nfix: detect_nan=True'
    )


def add_check(
    code: CodeBuilder,
    operands: Sequence[str],
    results: Sequence[tuple[str, TensorSpec]],
    call: OpCall,
    source: str | None,
    detect: DetectNan,
) -> None:
    """Add the check of a call's results to the local code. ``operands`` and ``results``: the names
    of variables in the generated code."""
    if not results or call.name.startswith(_UNINITIALIZED_FACTORIES):
        return
    check_infinities = (
        detect is True and not _has_infinite_constant(call) and not _pending_extremes(results)
    )
    names = [list(dict.fromkeys(operands)), [name for name, _ in results]]
    code.apply(check_finite, [*names, STEP], (), call.name, *names, check_infinities, source=source)


def _has_infinite_constant(call: OpCall) -> bool:
    """Whether a constant of the call is at least the largest number of the result's dtype."""
    meta = next((m for m in call.results if m is not None), None)
    if meta is None or not meta.dtype.is_floating_point:
        return False
    largest = torch.finfo(meta.dtype).max
    return any(abs(v) >= largest for v in _floats((call.args, [v for _, v in call.kwargs])))


def _floats(value: object) -> Iterator[float]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, float):
        yield value


def _pending_extremes(results: Sequence[tuple[str, TensorSpec]]) -> bool:
    """Whether a result is a partial max, min or softmax, infinite where a rank has no elements."""
    placements = (p for _, spec in results for p in spec.sharding.values())
    return any(isinstance(p, Partial) and p.op != "sum" for p in placements)


# -- on a rank -------------------------------------------------------------------------------------


def check_finite(
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    step: int,
    op: str,
    operand_names: Sequence[str],
    result_names: Sequence[str],
    infinite: bool,
) -> None:
    """Raise NotFinite if a result holds a NaN or, if ``infinite``, an Inf that this op made.
    Tensors are local. Only the first result is searched for Inf; the other results are values that
    are saved for the backward."""
    for number, (name, x) in enumerate(zip(result_names, results, strict=True)):
        if not _is_float(x) or bool(torch.isfinite(wide := _comparable(x)).all()):
            continue
        bad = torch.isnan(wide)
        kind = "NaN"
        if not bool(bad.any()):
            if number or not infinite or any(map(_holds_infinite, operands)):
                continue
            bad, kind = torch.isinf(wide), "Inf"
        first = ",".join(str(int(i)) for i in bad.nonzero()[0])
        lines = [
            f"{op} gives {kind} in step {step}: {name} {_type(x)} has {int(bad.sum())} {kind} of "
            f"{x.numel()}, the first at [{first}] of this rank's part",
            *(f"  {n}: {_summary(o)}" for n, o in zip(operand_names, operands, strict=True)),
        ]
        raise NotFinite("\n".join(lines))


def _is_float(x: torch.Tensor) -> bool:
    return x.numel() > 0 and (x.is_floating_point() or x.is_complex())


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """Return x in a dtype that torch can compare: it has no comparisons for 8-bit floats."""
    return x.float() if x.dtype.itemsize == 1 else x


def _holds_infinite(x: torch.Tensor) -> bool:
    if not _is_float(x):
        return False
    largest = torch.finfo(x.dtype).max
    return bool((_comparable(x).abs() >= largest).any())


def _type(x: torch.Tensor) -> str:
    return f"{dtype_name(x.dtype)}[{','.join(map(str, x.shape))}]"


def _summary(x: torch.Tensor) -> str:
    if not _is_float(x) or x.is_complex():
        return _type(x)
    wide = x.double()
    nan, inf = int(torch.isnan(wide).sum()), int(torch.isinf(wide).sum())
    finite = wide[torch.isfinite(wide)]
    span = f", {float(finite.min()):.4g} to {float(finite.max()):.4g}" if finite.numel() else ""
    held = [f"{n} {kind}" for n, kind in ((nan, "NaN"), (inf, "Inf")) if n]
    return _type(x) + span + (f"; it holds {' and '.join(held)} already" if held else "")
