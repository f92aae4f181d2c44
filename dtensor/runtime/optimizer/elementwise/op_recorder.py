"""Record the ops that an optimizer's step runs on elements of parameters, and the lines it runs.

    recorded = RecordedSteps(files)
    recorded.follow([p.data, p.grad])
    with recorded:
        optimizer.step()                       # NotElementwise at the first op that mixes elements
    recorded.ops                               # {"aten.add_", "aten.lerp_", ...}

A tensor *holds elements* if it is a parameter, a gradient, or computed from tensors that do;
tensors are identified by their storage, so views count. On these tensors a step may run torch's
pointwise ops, copies, views of all elements in order, and read shapes: no sum, index, matrix
product, or read to Python. It may not draw random numbers. Other tensors may be used freely.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtensor.private_torch import DisableTorchFunction, OpOverload, TorchDispatchMode, pytree


class NotElementwise(BaseException):
    """The step mixed elements or drew random numbers. A BaseException, so that the step cannot
    catch it."""

    def __init__(self, fact: str, line: str) -> None:
        super().__init__(fact)
        self.what = fact
        self.line = line


_aten = torch.ops.aten
_COPIES = {
    *(_aten.copy_, _aten._to_copy, _aten.clone, _aten.lift_fresh, _aten.lift_fresh_copy),
    *(
        _aten.resolve_conj,
        _aten.resolve_neg,
        _aten.fill_,
        _aten.zero_,
        _aten._conj,
        _aten._foreach_copy_,
    ),
    *(_aten._foreach_zero_, _aten._foreach_copy, _aten.masked_fill_, _aten.where),
}
_VIEWS = {
    *(_aten.detach, _aten.detach_, _aten.alias, _aten.view, _aten._unsafe_view, _aten.reshape),
    *(_aten._reshape_alias, _aten.unsqueeze, _aten.view_as_real, _aten.view_as_complex),
    *(_aten.real, _aten.imag, _aten._neg_view),
}
"""Views of all elements in their order, or of the real and imaginary parts of all elements."""
_FACTORIES = {
    *(_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.new_zeros),
    *(_aten.new_empty, _aten.new_full, _aten.new_ones, _aten.new_empty_strided),
}
_FUSED = {_aten._fused_adam_, _aten._fused_adamw_, _aten._fused_sgd_, _aten._fused_adagrad_}
_READS = {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.item, _aten.allclose}
_REDUCES = frozenset({"max", "min", "norm", "powsum", "mm"})
"""Names of `_foreach_` ops that mix elements, without the prefix."""
_RAW = {
    *(Tensor.tolist, Tensor.numpy, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
    *(Tensor.__array__, Tensor.__dlpack__, Tensor.apply_, Tensor.map_),
}


class RecordedSteps(AbstractContextManager["RecordedSteps"]):
    """A context in which ops on tensors that hold elements are recorded, or refused. ``files``: the
    executed lines of these files are recorded. ``mixing``: only random numbers are refused."""

    def __init__(self, files: Collection[str], mixing: bool = False) -> None:
        self.files = frozenset(files)
        self.mixing = mixing
        self.ops: dict[str, None] = {}
        self.reached: dict[CodeType, set[int]] = {}
        self._memory: dict[int, Any] = {}  # element storages, kept alive
        self._block = ExitStack()

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as holding elements."""
        with DisableTorchFunction():
            for tensor in tensors:
                memory = tensor.untyped_storage()
                self._memory[memory._cdata] = memory

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory holds elements of parameters."""
        with DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._memory

    def __enter__(self) -> RecordedSteps:
        """Begin to record ops, and the executed lines of ``files``. Remember the random states."""
        self._block.enter_context(_Dispatched(self))
        if not self.mixing:
            self._block.enter_context(_MemoryReads(self))
        self._drawn = random.getstate(), numpy.random.get_state()
        self._tracing = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *raised: object) -> None:
        """End the recording, and restore the random states. Raises NotElementwise if the block has
        drawn random numbers in Python or numpy."""
        sys.settrace(self._tracing)
        self._block.close()
        python, arrays = self._drawn
        drawn_from = python != random.getstate() and "Python's random"
        old_arrays, new_arrays = arrays, numpy.random.get_state()
        is_unchanged = all(
            numpy.array_equal(a, b) for a, b in zip(old_arrays, new_arrays, strict=True)
        )
        drawn_from = drawn_from or (not is_unchanged and "numpy's random")
        random.setstate(python)
        numpy.random.set_state(arrays)
        if drawn_from and raised[0] is None:
            raise NotElementwise(f"it draws from {drawn_from}, on each rank its own", "")

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Record the lines that a frame of ``files`` executes (see `sys.settrace`)."""
        code = frame.f_code
        if code.co_filename not in self.files:
            return None
        lines = self.reached.setdefault(code, set())

        def trace_line(frame: FrameType, event: str, arg: object) -> Any:
            lines.add(frame.f_lineno)
            return trace_line

        lines.add(frame.f_lineno)
        return trace_line

    # -- ops ---------------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an op. Raises NotElementwise if it is not allowed."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(func, "draws random numbers, on each rank its own")
        if self.mixing:
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        element_tensors = [t for t in tensors if self.holds(t)]
        packet = func.overloadpacket
        if element_tensors and packet not in _FACTORIES:
            if packet in _READS:
                self.refuse(func, "reads elements of a parameter to Python")
            if not _allowed(func):
                self.refuse(func, "is not one element of a parameter at a time")
            self.ops[str(packet)] = None
        out = func(*args, **kwargs)
        if element_tensors and packet not in _FACTORIES:
            if packet not in _VIEWS and packet not in _FUSED:
                self._check_sizes(func, (*args, *kwargs.values(), out))
            self.follow(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
            self.follow(written(func, args, kwargs))
        return out

    def _check_sizes(self, func: OpOverload, values: Sequence[Any]) -> None:
        """Raise NotElementwise unless the result and all operands that hold elements have the same
        number of elements. Lists of tensors (foreach ops) are compared position by position."""
        lists = [v for v in values if isinstance(v, list | tuple) and _are_tensors(v)]
        longest = max(map(len, lists), default=1)
        for index in range(longest):
            tensors = [v[index] for v in lists if index < len(v)]
            tensors += [v for v in values if isinstance(v, Tensor)]
            sizes = {t.numel() for t in tensors if self.holds(t)}
            result = values[-1]
            if isinstance(result, list | tuple):
                result = result[index] if index < len(result) else None
            if isinstance(result, Tensor):
                sizes.add(result.numel())
            if len(sizes) > 1:
                self.refuse(
                    func, f"mixes tensors of {' and '.join(map(str, sorted(sizes)))} elements"
                )

    def refuse(self, func: object, why: str) -> None:
        raise NotElementwise(f"{func} {why}", line_of(self.files))


class _Dispatched(TorchDispatchMode):
    """Passes each op to `RecordedSteps.op`."""

    def __init__(self, recorded: RecordedSteps) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorded.op(func, args, kwargs or {})


class _MemoryReads(TorchFunctionMode):
    """Refuse functions that read a tensor's memory without an op, such as `Tensor.numpy`."""

    def __init__(self, recorded: RecordedSteps) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch. Raises NotElementwise if it reads elements of a parameter."""
        if func in _RAW and isinstance(args[0], Tensor) and self._recorded.holds(args[0]):
            name = getattr(func, "__name__", str(func))
            self._recorded.refuse(f"Tensor.{name}", "reads elements of a parameter to Python")
        return func(*args, **(kwargs or {}))


class Meetings(TorchDispatchMode):
    """Finds the line at which numbers of two parameters first meet in an op.

    Each tensor's storage has the labels of the parameters from which it was computed. A stack is
    not followed, because most are cut into their parts again.
    """

    def __init__(self, files: Collection[str], label: str, changed: str) -> None:
        super().__init__()
        self._files, self._pair, self._changed = files, {label, changed}, changed
        self._labels: dict[int, set[str]] = {}
        self._storages: list[Any] = []
        self._lines: dict[str, str] = dict.fromkeys(("op", "read", "stack"), "")

    @property
    def line(self) -> str:
        """The line, or else one that reads a number of the changed parameter to Python or stacks
        numbers of both, or ""."""
        return next(filter(None, self._lines.values()), "")

    def follow(self, label: str, tensors: Iterable[Tensor | None]) -> None:
        """Mark tensors as a parameter's."""
        for tensor in tensors:
            if tensor is not None:
                self._add(tensor, {label})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        if name in ("stack", "cat"):
            self._record("stack", self._pair <= self._all(tensors))
        elif name == "_local_scalar_dense":
            self._record("read", self._changed in self._all(tensors))
        elif name.startswith("_foreach_"):
            lists = [a for a in args if isinstance(a, list | tuple)]
            single = _tensors([a for a in args if not isinstance(a, list | tuple)])
            for index in range(len(args[0])):
                of_index = _tensors([values[index] for values in lists if index < len(values)])
                self._mix([*of_index, *single], [args[0][index], *_tensors(out)[index : index + 1]])
        else:
            self._mix(tensors, [*_tensors(out), *written(func, args, kwargs)])
        return out

    def _mix(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        labels = self._all(sources)
        self._record("op", self._pair <= labels)
        for tensor in targets if labels else ():
            self._add(tensor, labels)

    def _record(self, what: str, is_met: bool) -> None:
        if is_met and not self._lines[what]:
            self._lines[what] = line_of(self._files)

    def _all(self, tensors: Sequence[Tensor]) -> set[str]:
        known = (self._labels.get(t.untyped_storage()._cdata, set()) for t in tensors)
        return set[str]().union(*known)

    def _add(self, tensor: Tensor, labels: Set[str]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._labels:
            self._storages.append(storage)  # kept, so that its address is not reused
        self._labels.setdefault(storage._cdata, set()).update(labels)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _allowed(func: OpOverload) -> bool:
    """Return whether the op copies, views, or computes each element from one element of each
    operand."""
    packet = func.overloadpacket
    if packet in _COPIES or packet in _VIEWS or packet in _FUSED:
        return True
    name = packet.__name__
    if name.startswith("_foreach_"):
        name = name.removeprefix("_foreach_").rstrip("_")
        if name in _REDUCES:
            return False
    elif torch.Tag.pointwise in func.tags:
        return True
    else:  # some in-place and out= variants lack the tag
        ends = ("out", "Scalar_out", "Tensor_out")
        if not (name.endswith("_") or func._overloadname.endswith(ends)):
            return False
        name = name.rstrip("_")
        if name in _REDUCES:
            return False
    base = getattr(_aten, name, None)
    return base is not None and any(
        torch.Tag.pointwise in getattr(base, overload).tags for overload in base.overloads()
    )


def written(func: OpOverload, args: Sequence[Any], kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an op writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))


def _are_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def line_of(files: Collection[str]) -> str:
    """Return the innermost line of the current stack that is in one of these files, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name in files:
            return text_of(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def text_of(file: str, line: int) -> str:
    """Return a line of source, with its file and number."""
    folder, name = os.path.split(file)
    return f"{os.path.basename(folder)}/{name}:{line}: {linecache.getline(file, line).strip()}"


def unreached(reached: dict[CodeType, set[int]]) -> tuple[str, ...]:
    """Return the lines that did not run. ``reached``: the lines that ran, by function."""
    lines_left: list[tuple[str, int]] = []
    for code, lines in reached.items():
        lines_of_code = {line for _, _, line in code.co_lines() if line is not None}
        lines_of_code.discard(code.co_firstlineno)
        lines_left += [(code.co_filename, line) for line in lines_of_code - lines]
    return tuple(text_of(file, line) for file, line in sorted(lines_left))
