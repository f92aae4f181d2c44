"""Arithmetic, comparison and torch's and numpy's functions of what `float()` reads.

    total += loss                   # total: float
    loss < 2;  f"{loss:.3f}";  sum(losses);  round(loss, 3);  math.isnan(loss);  np.mean(losses)
    torch.isnan(loss);  torch.stack(losses);  tensor + loss     # of the scalar that `tensor` reads

Each of them reads, and waits for what is under way; results are plain floats (bools, tensors).
Equality is that of values, as hashing is by identity: as with a torch.Tensor.

Not here: what is read (`api/step/loss.py`), and methods of a tensor, which an error sends to
`tensor()`.
"""

from __future__ import annotations

import math
import numbers
import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from dtensor.private_torch import pytree


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest: function(float(self), *rest)


def _of_two(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator with the number at its left, and at its right."""
    return (
        lambda self, other: function(float(self), _value(other)),
        lambda self, other: function(_value(other), float(self)),
    )


def _value(x: object) -> Any:
    return float(x) if isinstance(x, ReadsAsFloat) else x


class ReadsAsFloat:
    """Counts as the number that `float()` of it gives, in arithmetic, comparison and torch's
    functions."""

    @abstractmethod
    def __float__(self) -> float: ...

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The number as a scalar CPU tensor."""

    __add__, __radd__ = _of_two(operator.add)
    __sub__, __rsub__ = _of_two(operator.sub)
    __mul__, __rmul__ = _of_two(operator.mul)
    __truediv__, __rtruediv__ = _of_two(operator.truediv)
    __floordiv__, __rfloordiv__ = _of_two(operator.floordiv)
    __mod__, __rmod__ = _of_two(operator.mod)
    __divmod__, __rdivmod__ = _of_two(divmod)
    __pow__, __rpow__ = _of_two(operator.pow)
    __lt__, __gt__ = _of_two(operator.lt)
    __le__, __ge__ = _of_two(operator.le)
    __neg__, __pos__, __abs__ = map(_of_one, (operator.neg, operator.pos, operator.abs))
    __bool__, __int__, __round__ = map(_of_one, (bool, int, round))
    __trunc__, __floor__, __ceil__ = map(_of_one, (math.trunc, math.floor, math.ceil))
    __str__, __format__ = map(_of_one, (str, format))

    def __eq__(self, other: object) -> Any:
        return float(self) == _value(other)

    __hash__ = object.__hash__

    def __iter__(self) -> NoReturn:
        """As of a scalar tensor; torch's GradScaler asks for items of what is no tensor."""
        raise TypeError(
            f"a {type(self).__name__} is one number, and has no items.\n"
            f"fix: float(loss); of a torch.amp.GradScaler: the step has run backward and the "
            f"optimizer already; dt.train_step(..., grad_scaler=scaler) scales its loss, and "
            f"torch.bfloat16 needs no scaling"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.tensor().double().numpy().astype(dtype or "float64")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def read(x: object) -> object:
            return x.tensor() if isinstance(x, ReadsAsFloat) else x

        return func(*pytree.tree_map(read, args), **pytree.tree_map(read, dict(kwargs or {})))

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        known = name in dir(torch.Tensor)
        fix = f"loss.tensor().{name}, of a torch.Tensor, or float(loss)" if known else "float(loss)"
        raise AttributeError(
            f"a {kind} has no {name!r}: it is a number that may still be on its way.\nfix: {fix}",
            name=name,
            obj=self,
        )


numbers.Number.register(ReadsAsFloat)
