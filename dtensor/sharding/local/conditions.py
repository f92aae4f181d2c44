"""Conditions on operands: the host raises if one does not hold, or the device records the fault.

    condition = Range(size=50257, num=12)           # all of 12 ids are in 0:50257
    require(condition, ids)                         # raises IndexError; waits for the GPU
    ids_ok = checked(condition, ids, faults, 1)     # in 0:50257; a wrong id is in row ``faults``

The code of a deferred program calls `checked`: the op reads an operand that satisfies the
condition, and the run is undone at its commit point. ``faults`` is i64[3] on the device: the number
of the first failed check, the first wrong value, how many values are wrong. A float value is there
as the bits of its float64. Errors have the same words in both ways. A condition is a `Check` of the
IR; ``num`` is the number of elements, ``source`` the user's line.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.local.in_range import out_of_range, record_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(ABC):
    """A condition on one operand of an op."""

    num: int
    source: str | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> object:
        """The key by which `was_checked` knows an operand that satisfies the condition."""
        return self

    @abstractmethod
    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return an operand that satisfies the condition and equals x if x does, and a mask of the
        wrong ones among `values(x)`."""

    def values(self, x: Tensor) -> Tensor:
        """Return the values of which the error shows the first wrong one."""
        return x

    @abstractmethod
    def error(self, value: int, count: int) -> Exception:
        """Return the error; see `Check`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Condition):
    """All elements are ``ignored`` or in [low, size)."""

    size: int
    low: int = 0
    ignored: int | None = None

    @property
    def key(self) -> object:
        return self.size, self.low, self.ignored

    @property
    def is_empty(self) -> bool:
        """Whether [low, size) is empty: then no operand can replace a wrong one."""
        return self.size <= self.low

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_empty:
            return x, torch.ones_like(x).bool() if self.ignored is None else x != self.ignored
        ok = x.clamp(self.low, self.size - 1)
        if self.ignored is not None:
            ok = torch.where(x == self.ignored, x, ok)
        return ok, ok != x

    def error(self, value: int, count: int) -> Exception:
        return out_of_range(value, self.size, self.num)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Range):
    """All classes are ``ignored`` or in [0, size)."""

    def error(self, value: int, count: int) -> Exception:
        return IndexError(
            f"Target {value} is out of bounds for {self.size} classes "
            f"(ignore_index={self.ignored})."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probabilities(Condition):
    """All elements are in [0, 1]; NaN is not. ``name``: of the operand."""

    name: str

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wrong = ~((x >= 0) & (x <= 1))
        return torch.where(wrong, 0, x), wrong

    def error(self, value: int, count: int) -> Exception:
        return RuntimeError(
            f"all elements of {self.name} should be between 0 and 1; {count} of {self.num} are "
            f"not, the first is {float_of(value)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotNegative(Condition):
    """No element is negative. Otherwise all are replaced by 0. ``words``: of the error."""

    words: str

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wrong = x < 0
        return torch.where(wrong.any(), 0, x), wrong

    def error(self, value: int, count: int) -> Exception:
        return RuntimeError(f"{self.words}: {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats(Condition):
    """The sum of the repeats is ``total``. Otherwise the first element is repeated so often."""

    total: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wrong = x.sum() != self.total
        first = torch.nn.functional.pad(x.new_full((1,), self.total), (0, self.num - 1))
        return torch.where(wrong, first.view(x.shape), x), wrong

    def values(self, x: Tensor) -> Tensor:
        return x.sum()

    def error(self, value: int, count: int) -> Exception:
        return RuntimeError(f"output_size is {self.total}, and the repeats sum to {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets(Condition):
    """The offsets of bags begin with 0, do not decrease, and are at most ``num_ids``."""

    num_ids: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero = x.new_zeros(1)
        most = torch.cat((zero, x.new_full((self.num - 1,), self.num_ids)))
        wrong = (x < torch.cat((zero, x[:-1]))) | (x > most)
        return torch.where(wrong.any(), 0, x), wrong

    def error(self, value: int, count: int) -> Exception:
        return IndexError(
            f"offsets of bags begin with 0, do not decrease, and are at most the number of "
            f"indices, {self.num_ids}; the first wrong one of {self.num} is {value}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends(Condition):
    """The ends of groups do not decrease, and are in 0:``length``. Otherwise no group has rows."""

    length: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wrong = (x < torch.cat((x.new_zeros(1), x[:-1]))) | (x > self.length)
        return torch.where(wrong.any(), 0, x), wrong

    def error(self, value: int, count: int) -> Exception:
        return self.error_of(f"the first wrong one of {self.num} is {value}")

    def error_of(self, wrong: str) -> Exception:
        return IndexError(
            f"offsets of groups do not decrease, and are in 0:{self.length}, the rows of all "
            f"groups; {wrong}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertIds(Range):
    """All ids are experts or -1, or the spare id, which is ``num_experts``. The spare id and -1 are
    of slots without an expert."""

    num_experts: int

    @staticmethod
    def of(ids: Tensor, num_experts: int, has_spare_id: bool = False) -> ExpertIds:
        size = max(num_experts + has_spare_id, 1)
        return ExpertIds(num=ids.numel(), size=size, low=-1, num_experts=num_experts)

    def error(self, value: int, count: int) -> Exception:
        n = self.num_experts
        return IndexError(
            f"Expert id {value} is outside -1..{n - 1}, the ids of {n} experts and -1 for no "
            f"expert.\nfix: ids.masked_fill((ids < 0) | (ids >= {n}), -1), or the right number of "
            "experts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places(Condition):
    """At most ``most`` of ``num`` places are True after the mask is expanded ``times`` times.
    Otherwise no place is."""

    times: int
    most: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wrong = self.values(x) > self.most
        return x & ~wrong, wrong

    def values(self, x: Tensor) -> Tensor:
        return x.sum() * self.times

    def error(self, value: int, count: int) -> Exception:
        return RuntimeError(
            f"masked_scatter takes an element of the source for each place of the mask that is "
            f"true: {value} places, {self.most} elements"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid(Condition):
    """All elements are True, as `dt::checked` demands. ``message``: of the error."""

    message: str

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x), ~x

    def error(self, value: int, count: int) -> Exception:
        return ValueError(f"{self.message}: {count} of {self.num} on this rank are not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved(Condition):
    """All of LAPACK's infos are 0. ``name``: of torch's function; ``is_matrix``: one matrix, not a
    batch. A wrong value holds the position of an info and the info, of 32 bits each."""

    name: str
    is_matrix: bool

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x != 0

    def values(self, x: Tensor) -> Tensor:
        at = torch.arange(self.num, device=x.device)
        return (at << 32) | (x.reshape(-1).long() & 0xFFFFFFFF)

    def error(self, value: int, count: int) -> Exception:
        at, info = value >> 32, struct.unpack("i", struct.pack("I", value & 0xFFFFFFFF))[0]
        infos = torch.zeros((), dtype=torch.int32) if self.is_matrix else torch.zeros(at + 1).int()
        infos.view(-1)[at] = info
        check: Any = torch.ops.aten._linalg_check_errors.default
        try:
            check(infos, self.name, is_matrix=self.is_matrix)
        except Exception as error:
            return error
        raise AssertionError(f"info {info} of {self.name} is no error")


def require(condition: Condition, x: Tensor) -> None:
    """Raise the condition's error if x does not satisfy it. Waits for the GPU."""
    _, wrong = condition.split(x)
    if bool(wrong.any()):
        value, count = _first(condition, x, wrong)
        raise condition.error(int(value), int(count))


def checked(condition: Condition, x: Tensor, faults: Tensor, number: int) -> Tensor:
    """Return x, or an operand that satisfies the condition if x does not. The fault is written to
    the row ``faults`` as the check ``number`` unless the row has a fault. The host does not
    wait."""
    ok, wrong = condition.split(x)
    value, count = _first(condition, x, wrong)
    row = torch.cat((count.clamp(max=1) * number, value, count))
    if number > 1:  # an earlier check may have written to the row
        row = torch.where(faults[:1] == 0, row, faults)
    faults.copy_(row)
    record_check(ok, condition.key)
    return ok


def satisfied(condition: Condition, x: Tensor) -> Tensor:
    """Return the result of `checked` for an x that the program has checked before."""
    ok, _ = condition.split(x)
    record_check(ok, condition.key)
    return ok


def new_faults(num: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return ``num`` rows i64[3] without a fault."""
    return torch.zeros(num, 3, dtype=torch.int64, device=device).unbind()


def _first(condition: Condition, x: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first wrong value as int64[1], and the number of wrong values as int64[1]."""
    wrong = wrong.reshape(-1)
    _, at = wrong.max(0, keepdim=True)  # the first of several maxima
    value = condition.values(x).reshape(-1).gather(0, at)
    wide = value.double().view(torch.int64) if value.is_floating_point() else value.long()
    return wide, wrong.sum(0, keepdim=True)


def float_of(bits: int) -> float:
    """Return the number of which ``bits`` are the bits as a signed integer."""
    return struct.unpack("d", struct.pack("q", bits))[0]
