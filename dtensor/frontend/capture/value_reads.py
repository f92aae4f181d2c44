"""Values that a program's Python reads from tensors which it was not given.

    scale = torch.tensor(2.0)
    def loss_fn(model, x):                      # reads.pairs() == [(scale, tensor(2.0))]
        return model(x).mean() * scale.item()

Such a tensor exists while the program is captured, and what is read from it becomes a number of the
graph. So each read is kept with the value that was read, and compared before each later call
(guards.py). `RefusalMode` (refusals.py) passes on each call of torch that is given such a tensor.
Values of traced tensors are not known then: it refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor.private_torch import FakeTensor, TorchDispatchMode, disable_current_modes

_READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__),
    *(torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__),
    *(torch.Tensor.__complex__, torch.Tensor.__repr__, torch.Tensor.__format__),
    *(torch.Tensor.__contains__, torch.Tensor.is_nonzero, torch.is_nonzero),
    *(torch.Tensor.equal, torch.equal, torch.Tensor.allclose, torch.allclose),
    *(torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.untyped_storage),
}
"""Functions that give a value of Python, or memory. They run as outside of a capture."""
_BUILDS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
"""Functions that read the tensors in a list without an op."""


class ValueReads:
    """The tensors that one capture read, each with its value at the first read."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(self._found.values())

    def add(self, x: torch.Tensor) -> None:
        if id(x) not in self._found:
            with disable_current_modes(), torch._C.DisableTorchFunction():
                self._found[id(x)] = (x, x.detach().clone())

    def watched(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        untraced: Sequence[torch.Tensor],
    ) -> Any:
        """``func(*args, **kwargs)``, where ``untraced`` are those of its tensors that were there
        before the capture."""
        alone = func in _READS and not any(isinstance(x, FakeTensor) for x in args)
        if alone or func in _BUILDS:
            for x in untraced:
                self.add(x)
        if alone:
            with disable_current_modes():
                return func(*args, **kwargs)
        with _Scalars(self):
            return func(*args, **kwargs)


class _Scalars(TorchDispatchMode):
    """Sees ops that give a value of Python, as where a tensor stands for a number: `x[:t]`."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (bool, int, float, complex)):
            for x in args:
                if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor):
                    self.reads.add(x)
        return result
