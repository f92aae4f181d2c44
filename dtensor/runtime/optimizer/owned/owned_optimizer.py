"""Run an optimizer on whole parameters, each on the one rank that owns it.

    optimizer = OwnedOptimizer(OptimizerKind.of(muon))
    updated = Updated(groups=(("w", "v"),), labels=("w",), names=(("w", "state"),))
    states = {"w": absent("cpu")}                     # from the rank's table: no step yet
    new, blobs = optimizer.compute(updated, {"w": w}, ({"lr": 0.1}, {}), {"w": grad}, states, None)
    new["w"]                                          # w after the step; w itself is unchanged
    blobs["w"]                                        # u8[n]: its new state (packed_state.py)

The optimizer's own step updates clones of all parameters in one call, so its results have torch's
bits. It writes no value that the step's inputs hold, so a step that fails has changed nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dtensor.numerics import is_narrow
from dtensor.private_torch import without_compiler
from dtensor.runtime.optimizer.flat_buffers import current_master
from dtensor.runtime.optimizer.optimizer_kind import (
    OptimizerKind,
    copy_plain,
    step_without_hooks,
    stray_state,
)
from dtensor.runtime.optimizer.owned.packed_state import Layout, PackedState, pack
from dtensor.runtime.optimizer.shard_optimizer import MASTER, Updated, divide, is_absent


@dataclass(slots=True, eq=False)
class _Work:
    """The clones that a step updates. ``parameter``: the parameter, or its master; ``narrow``: the
    dtype of a parameter with a master, else None; ``master``: the master in the blob."""

    parameter: Parameter
    narrow: torch.dtype | None
    packed: PackedState | None
    master: Tensor | None


class OwnedOptimizer:
    """The optimizer of one rank that updates whole parameters. It is stored in the rank's table,
    and pickled without state, because the table's blobs have all of it."""

    def __init__(self, kind: OptimizerKind, masters: bool = False) -> None:
        self.kind = kind
        self.masters = masters
        self._layouts: dict[str, _KnownLayouts] = {}  # by label, on devices that reads wait for

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnedOptimizer, (self.kind, self.masters)

    def compute(
        self,
        updated: Updated,
        parameters: Mapping[str, Tensor],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        clip: Tensor | None,
        overwritable: Collection[str] = (),
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the new values of the parameters that have gradients, and their new states.

        Args:
            updated: its ``groups`` are the labels of each group, including labels of other ranks.
            parameters, gradients: whole tensors, by label.
            options: the options of each group, then the optimizer's attributes.
            states: the blobs of the rank's table, by label; absent before the first step.
            clip: the gradients are divided by it.
            overwritable: the labels whose gradients the optimizer may write to; others are copied.

        Raises the errors of the optimizer's step with a note of its class and parameters, and
        TypeError if it leaves a state that cannot be packed.
        """
        works = {label: self._work(label, parameters[label], states[label]) for label in gradients}
        *group_options, attributes = copy_plain(tuple(map(dict, options)))
        groups = [
            {**o, "params": [works[label].parameter for label in labels if label in works]}
            for o, labels in zip(group_options, updated.groups, strict=True)
        ]
        optimizer = self.kind.make(groups, attributes)
        for label, work in works.items():
            if work.packed is not None:
                optimizer.state[work.parameter] = work.packed.state
            copied = label not in overwritable
            work.parameter.grad = _gradient(gradients[label], work.parameter, clip, copied)
        try:
            # The step of a class that is not torch's may use the compiler.
            is_torch_class = self.kind.cls.__module__.startswith("torch.optim")
            with torch.enable_grad(), without_compiler() if is_torch_class else nullcontext():
                step_without_hooks(optimizer)
            if stray := stray_state(optimizer, (work.parameter for work in works.values())):
                raise TypeError(f"the optimizer {stray}")
            blobs = {
                label: self._packed(label, work, optimizer, states[label])
                for label, work in works.items()
            }
        except Exception as error:
            error.add_note(f"in the update of {', '.join(works)} by {self.kind.cls.__name__}")
            raise
        return {label: _new_value(work) for label, work in works.items()}, blobs

    def _work(self, label: str, value: Tensor, blob: Tensor) -> _Work:
        """Return the clones of a parameter and of its state."""
        packed, master, narrow = None, None, None
        if not is_absent(blob):
            known = self._layouts[label].layout(blob) if label in self._layouts else None
            packed = PackedState.of(blob.detach().clone(), known)
            master = packed.state.get(MASTER)
        if self.masters and is_narrow(value.dtype):
            narrow = value.dtype
            clone = value.float() if master is None else master.copy_(current_master(value, master))
        else:
            clone = value.detach().clone(memory_format=torch.contiguous_format)
        if packed is not None:
            packed.state.pop(MASTER, None)
        return _Work(Parameter(clone), narrow, packed, master)

    def _packed(
        self, label: str, work: _Work, optimizer: torch.optim.Optimizer, blob: Tensor
    ) -> Tensor:
        """Return the blob of a parameter's state after the step."""
        parameter = work.parameter
        apart = {parameter.untyped_storage().data_ptr()} if work.narrow is None else set[int]()
        state: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
        if work.narrow is not None:
            stayed = work.master is not None and work.master.data_ptr() == parameter.data_ptr()
            state[MASTER] = work.master if stayed else parameter.detach()
        if work.packed is None:
            new, layout = pack(state, parameter.device, apart=apart)
        else:
            new, layout = work.packed.repack(state, apart)
        if parameter.device.type != "cpu":
            before = self._layouts.get(label)
            known = None if before is None else before.layout(blob)
            self._layouts[label] = _KnownLayouts.of(blob, known, new, layout)
        return new


@dataclass(frozen=True, slots=True)
class _KnownLayouts:
    """The layouts of the blob of a parameter, by its address: before a step, if it was known, and
    after it. Reading a layout from the blob would wait for the device.

    ``value`` is the tensor of the rank's table, whose ``data`` a committed step replaces. A value
    that was put or restored is another tensor, or has another ``version``.
    """

    value: weakref.ref[Tensor]
    version: int
    by_address: Mapping[int, Layout]

    @staticmethod
    def of(blob: Tensor, before: Layout | None, new: Tensor, after: Layout) -> _KnownLayouts:
        known = {} if before is None else {blob.data_ptr(): before}
        layouts = {**known, new.data_ptr(): after}
        return _KnownLayouts(weakref.ref(blob), blob._version, layouts)

    def layout(self, blob: Tensor) -> Layout | None:
        is_same = self.value() is blob and self.version == blob._version
        return self.by_address.get(blob.data_ptr()) if is_same else None


def _gradient(gradient: Tensor, parameter: Tensor, clip: Tensor | None, copied: bool) -> Tensor:
    """Return the gradient in the dtype of the parameter, divided by ``clip``, in new memory if
    ``copied``."""
    converted = gradient.detach().to(parameter.dtype)
    if clip is not None:
        converted = divide(converted, clip)
    elif copied and converted.data_ptr() == gradient.data_ptr():
        converted = converted.clone(memory_format=torch.contiguous_format)
    return converted.contiguous()


def _new_value(work: _Work) -> Tensor:
    """Return the value of a parameter after the step, in its own dtype and memory."""
    value = work.parameter.detach()
    return value if work.narrow is None else value.to(work.narrow)
