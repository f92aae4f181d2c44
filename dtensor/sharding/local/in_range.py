"""Indices that are out of range raise, in the same words on every device.

    check_range(ids, 50257)                          # IndexError, or nothing

What ranks run in place of an op checks so, for there an index that is on no rank would give zeros;
`device_asserts.py` does before an op on a GPU. A check waits for the GPU; a tensor that nothing has
written to since it was checked is not looked at again: layers share positions, a forward and its
backward targets.

Not here: targets of `dt::ce_loss`, which has its own words for them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_checked: MutableMapping[Tensor, tuple[int, tuple[object, ...]]] = WeakIdKeyDictionary()
"""By tensor: its version when it was right, and for what it was."""


def check_range(index: Tensor, size: int, low: int = 0, ignored: int | None = None) -> None:
    """IndexError unless all are ``ignored`` or in [low, size). Nothing is known of meta tensors."""
    if index.is_meta or index.numel() == 0:
        return
    asked = size, low, ignored
    if is_known(index, asked):
        return
    wrong = (index < low) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if bool(wrong.any()):
        raise IndexError(
            f"index {int(index[wrong][0])} is out of range for a dim of size {size}, among "
            f"{index.numel()} indices"
        )
    remember(index, asked)


def is_known(x: Tensor, asked: object) -> bool:
    """Whether x was found right for this, and nothing has written to it since."""
    known = None if x.is_inference() else _checked.get(x)
    return known is not None and known[0] == x._version and asked in known[1]


def remember(x: Tensor, asked: object) -> None:
    if x.is_inference():  # has no count of writes
        return
    known = _checked.get(x)
    others = () if known is None or known[0] != x._version else known[1]
    _checked[x] = x._version, (*others, asked)
