"""An OpCall: one call of an operator, with its tensors taken out, and the rank-local view of it.

    x.t() @ w   ->  OpCall(aten.mm.default, args=(Operand(0), Operand(1)),
                           operands=(Meta((8, 4), f32), Meta((8, 2), f32)),
                           results=(Meta((4, 2), f32),))

The same value serves the captured graph, local code and eager ops. `Local` is what a localizer
sees: the specs of operands and results, and one rank's coordinates.

Invariants: `operands` are in the order in which tensors appear in args, then kwargs (each
occurrence is its own operand); `results` has one entry per returned tensor, None where an op
returns None. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dtensor.numerics import dtype_name
from dtensor.private_torch import OpOverload
from dtensor.sharding.spec.placements import Intervals
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Meta:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands in ``args`` for the tensor operand of that index."""

    index: int


class RunNumber(float):
    """A number in ``args`` that is given anew at each run: rules see a representative of it.

    Only its being zero may matter to a plan; the program reads the number under ``name``.
    """

    name: str

    @staticmethod
    def of(value: float, name: str) -> RunNumber:
        slot = RunNumber(value)
        slot.name = name
        return slot


SEED, STEP = "dt_seed", "dt_step"
"""The names under which a program is fed the seed and the step."""


def is_random(call: OpCall) -> bool:
    """Whether it is one of the project's random ops: they alone are told a seed."""
    return call.name.startswith("dt.") and any(key == "at_seed" for key, _ in call.kwargs)


def with_run_numbers(call: OpCall) -> OpCall:
    """The call with its seed and step read from what the program is fed; others as they are."""
    if not is_random(call):
        return call
    given = {"at_seed": RunNumber.of(0.0, SEED), "at_step": RunNumber.of(0.0, STEP)}
    return replace(call, kwargs=tuple((k, given.get(k, v)) for k, v in call.kwargs))


def slots_of(call: OpCall) -> tuple[str, ...]:
    """The names of the numbers that a call is given at each run, in the order of its arguments."""
    values = (*call.args, *(value for _, value in call.kwargs))
    return tuple(dict.fromkeys(value.name for value in values if isinstance(value, RunNumber)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One operator call. ``target`` is an OpOverload, or in local code any function."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    operands: tuple[Meta, ...]
    results: tuple[Meta | None, ...]
    multiple: bool = False  # the op returns a tuple, also when it has one element

    @property
    def name(self) -> str:
        """``aten.mm.default``, ``dt.attention.default``."""
        return target_name(self.target)

    @property
    def result(self) -> Meta:
        """Of an op that returns a tensor, or several: the first."""
        meta = self.results[0]
        assert meta is not None, "the op returns nothing"
        return meta

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or of that keyword, else the default."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def with_arg(self, position: int, value: Any) -> OpCall:
        """The call with its positional argument replaced."""
        args = list(self.args)
        args[position] = value
        return replace(self, args=tuple(args))


def target_name(target: Callable[..., Any]) -> str:
    if isinstance(target, OpOverload):
        return str(cast(object, target))
    return f"{target.__module__}.{target.__qualname__}"


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's view of a call: global specs and the rank's mesh coordinates."""

    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]
    coordinates: Mapping[str, int]

    def operand_shape(self, index: int) -> tuple[int, ...]:
        return self.operands[index].local_shape(self.coordinates)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return self._result(index).local_shape(self.coordinates)

    def operand_intervals(self, index: int, dim: int) -> Intervals:
        """The global indices of an operand's dim that this rank holds."""
        return self.operands[index].intervals(dim, self.coordinates)

    def result_intervals(self, index: int, dim: int) -> Intervals:
        return self._result(index).intervals(dim, self.coordinates)

    def _result(self, index: int) -> TensorSpec:
        spec = self.results[index]
        assert spec is not None, "the op does not return this result"
        return spec


Localizer = Callable[[OpCall, Local], OpCall]
