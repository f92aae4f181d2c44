"""`OpCall`: one call of an op without its tensors, in captured graphs, local code and eager ops.

    x.t() @ w   ->  OpCall(aten.mm.default, args=(Operand(0), Operand(1)),
                           operands=(Meta((8, 4), f32), Meta((8, 2), f32)),
                           results=(Meta((4, 2), f32),))

Invariants: ``operands`` are in the order of the tensors in args, then kwargs, and a tensor that
occurs twice is two operands; ``results`` has an entry for each result, None if the op returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dtensor.errors import PlanningError
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
    """A placeholder in ``args`` for the tensor operand ``index``."""

    index: int


class RunNumber(float):
    """A number in ``args`` that each run of the program receives under ``name``, such as a seed.
    Rules see an example value, and may only distinguish zero from other numbers."""

    name: str

    @staticmethod
    def of(value: float, name: str) -> RunNumber:
        number = RunNumber(value)
        number.name = name
        return number


SEED, STEP = "dt_seed", "dt_step"
"""The names under which a program receives the seed and the step."""


def is_random(call: OpCall) -> bool:
    """Return whether the op is one of ops/random.py, which alone have an argument for the seed."""
    return call.name.startswith("dt.") and any(key == "at_seed" for key, _ in call.kwargs)


def with_run_numbers(call: OpCall) -> OpCall:
    """Return a random op's call with RunNumbers as its seed and step; other calls as they are."""
    if not is_random(call):
        return call
    numbers = {"at_seed": RunNumber.of(0.0, SEED), "at_step": RunNumber.of(0.0, STEP)}
    return replace(call, kwargs=tuple((k, numbers.get(k, v)) for k, v in call.kwargs))


def run_number_names(call: OpCall) -> tuple[str, ...]:
    """Return the names of the call's RunNumbers, in the order of its arguments."""
    values = (*call.args, *(value for _, value in call.kwargs))
    return tuple(dict.fromkeys(value.name for value in values if isinstance(value, RunNumber)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an op. ``target`` is an OpOverload; in local code it may be any function.
    ``multiple``: the op returns a tuple, even if it has only one element."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    operands: tuple[Meta, ...]
    results: tuple[Meta | None, ...]
    multiple: bool = False

    @property
    def name(self) -> str:
        """The full name of the op: ``aten.mm.default``, ``dt.attention.default``."""
        return target_name(self.target)

    @property
    def result(self) -> Meta:
        """The first result of the op. It must not be None."""
        meta = self.results[0]
        assert meta is not None, "the op returns nothing"
        return meta

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at ``position`` or with the keyword ``name``, else the default."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def with_arg(self, position: int, value: Any) -> OpCall:
        """Return the call with the argument at ``position`` replaced."""
        args = list(self.args)
        args[position] = value
        return replace(self, args=tuple(args))


def target_name(target: Callable[..., Any]) -> str:
    if isinstance(target, OpOverload):
        return str(cast(object, target))
    return f"{target.__module__}.{target.__qualname__}"


class RowsError(PlanningError):
    """The rank's call depends on the number or on the positions of its rows of experts."""


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's view of a call, which a localizer gets: the specs of operands and results, and the
    rank's coordinates in the mesh. Raises RowsError if a localizer asks for a number of rows by
    expert, or for the positions of rows by token or expert: the counts of a run determine them."""

    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]
    coordinates: Mapping[str, int]

    def operand_shape(self, index: int) -> tuple[int, ...]:
        return self._known(self.operand_sizes(index))

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return self._known(self.result_sizes(index))

    def operand_sizes(self, index: int) -> tuple[int, ...]:
        """Return the local shape of an operand, with -1 for the number of rows by expert."""
        return self._sizes(self.operands[index])

    def result_sizes(self, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result, with -1 for the number of rows by expert."""
        return self._sizes(self._result(index))

    def operand_size(self, index: int, dim: int) -> int:
        """Return the local size of one dim of an operand."""
        return self._known((self.operand_sizes(index)[dim],))[0]

    def result_size(self, index: int, dim: int) -> int:
        """Return the local size of one dim of a result."""
        return self._known((self.result_sizes(index)[dim],))[0]

    def operand_intervals(self, index: int, dim: int) -> Intervals:
        """Return the global indices of an operand's dim that this rank holds."""
        return self._intervals(self.operands[index], dim)

    def result_intervals(self, index: int, dim: int) -> Intervals:
        return self._intervals(self._result(index), dim)

    def rows_operand(self) -> tuple[int, int]:
        """Return the index and the dim of an operand with the number of rows by expert. Raises
        RowsError if there is none."""
        for i, spec in enumerate(self.operands):
            if spec.is_by_expert:
                return i, spec.ragged_dim
        raise RowsError("the number of rows is data, and no operand has it")

    def _sizes(self, spec: TensorSpec) -> tuple[int, ...]:
        shape = spec.local_shape(self.coordinates)
        if not spec.is_by_expert:
            return shape
        return tuple(-1 if dim == spec.ragged_dim else n for dim, n in enumerate(shape))

    @staticmethod
    def _known(sizes: tuple[int, ...]) -> tuple[int, ...]:
        if -1 in sizes:
            raise RowsError("the number of rows is data")
        return sizes

    def _intervals(self, spec: TensorSpec, dim: int) -> Intervals:
        if spec.ragged is not None and dim == spec.ragged_dim:
            raise RowsError("the positions of rows are data")
        return spec.intervals(dim, self.coordinates)

    def _result(self, index: int) -> TensorSpec:
        spec = self.results[index]
        assert spec is not None, "the op does not return this result"
        return spec


Localizer = Callable[[OpCall, Local], OpCall]
"""Returns the call that a rank runs, from the global call."""
