"""Arithmetic, comparison, and torch's and numpy's functions for an object that `float()` reads.

    total += loss                   # total: float
    loss < 2;  f"{loss:.3f}";  sum(losses);  round(loss, 3);  math.isnan(loss);  np.mean(losses)
    torch.isnan(loss);  torch.stack(losses);  tensor + loss     # use loss.tensor()

Each operation reads the value, and waits for it if it is pending. Results are plain floats, bools
or tensors. Two objects are equal if their values are; the hash is by identity, as for torch.Tensor.
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


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(float(self), *args)


def _binary(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the methods for the object as the left and as the right operand."""
    return (
        lambda self, other: function(float(self), _value(other)),
        lambda self, other: function(_value(other), float(self)),
    )


def _value(x: object) -> Any:
    return float(x) if isinstance(x, ReadsAsFloat) else x


class ReadsAsFloat:
    """A base class of objects that behave as the number ``float(self)``."""

    @abstractmethod
    def __float__(self) -> float: ...

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """Return the number as a scalar CPU tensor."""

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod)
    __pow__, __rpow__ = _binary(operator.pow)
    __lt__, __gt__ = _binary(operator.lt)
    __le__, __ge__ = _binary(operator.le)
    __neg__, __pos__, __abs__ = map(_unary, (operator.neg, operator.pos, operator.abs))
    __bool__, __int__, __round__ = map(_unary, (bool, int, round))
    __trunc__, __floor__, __ceil__ = map(_unary, (math.trunc, math.floor, math.ceil))
    __str__, __format__ = map(_unary, (str, format))

    def __eq__(self, other: object) -> Any:
        return float(self) == _value(other)

    __hash__ = object.__hash__

    def __iter__(self) -> NoReturn:
        """Raises TypeError, as for a scalar tensor. torch's GradScaler iterates over a loss that is
        not a tensor."""
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
        """Call a torch function with the numbers as scalar tensors."""

        def read(x: object) -> object:
            return x.tensor() if isinstance(x, ReadsAsFloat) else x

        return func(*pytree.tree_map(read, args), **pytree.tree_map(read, dict(kwargs or {})))

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        is_tensor_attribute = name in dir(torch.Tensor)
        fix = (
            f"loss.tensor().{name}, of a torch.Tensor, or float(loss)"
            if is_tensor_attribute
            else "float(loss)"
        )
        raise AttributeError(
            f"a {kind} has no {name!r}: it is a number that may still be on its way.\nfix: {fix}",
            name=name,
            obj=self,
        )


numbers.Number.register(ReadsAsFloat)
