"""`check_range`: raise IndexError for indices out of range, with one message on every device.

    check_range(ids, 50257)                          # raises IndexError, or returns None

Functions that read or write shards need this check, because an index that no rank holds would read
zeros. A check waits for the GPU. A tensor that has not been written to since its last check is not
checked again: layers share positions, and a forward and its backward share targets. In the code of
a deferred program the tensor was checked on the device before (conditions.py), so nothing waits.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_passed: MutableMapping[Tensor, tuple[int, tuple[object, ...]]] = WeakIdKeyDictionary()
"""The version of each tensor at its last check, and the checks that it passed in this version."""


def check_range(index: Tensor, size: int, low: int = 0, ignored: int | None = None) -> None:
    """Raise IndexError unless all indices are ``ignored`` or in [low, size). Meta tensors pass."""
    if index.is_meta or index.numel() == 0:
        return
    check = size, low, ignored
    if was_checked(index, check):
        return
    wrong = (index < low) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if bool(wrong.any()):
        raise out_of_range(int(index[wrong][0]), size, index.numel())
    record_check(index, check)


def out_of_range(index: int, size: int, num: int) -> IndexError:
    """Return the error for the first wrong of ``num`` indices."""
    return IndexError(
        f"index {index} is out of range for a dim of size {size}, among {num} indices"
    )


def was_checked(x: Tensor, check: object) -> bool:
    """Return whether x passed this check and has not been written to since."""
    entry = None if x.is_inference() else _passed.get(x)
    return entry is not None and entry[0] == x._version and check in entry[1]


def record_check(x: Tensor, check: object) -> None:
    """Record that x passed this check, until x is written to."""
    if x.is_inference():  # inference tensors have no version
        return
    entry = _passed.get(x)
    earlier = () if entry is None or entry[0] != x._version else entry[1]
    _passed[x] = x._version, (*earlier, check)
