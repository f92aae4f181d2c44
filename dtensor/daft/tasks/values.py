"""Encode values that are sent between actors: one flat message of bytes for each value.

    message = encode({"loss": 0.5, "logits": torch.ones(2, 3)}).message     # u8[n], a copy
    decode(message)                                                 # {"loss": 0.5, "logits": ...}

A message has a head (kind, numbers and lengths), a pickle, and the aligned bytes of numpy arrays
and tensor storages, which are copied once. Tensors keep class, dtype, shape, strides, attributes,
`requires_grad` and `grad`; tensors that share a storage share one again. A tensor computed by
autograd is detached. Refused: a hook on a gradient, and the `grad` of a tensor whose class pickles
itself. Other values are pickled by cloudpickle. A failure is a message of another kind, so tasks
that depend on a failed task receive its root cause.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, ClassVar, TypeAlias

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy
import torch
from torch import Tensor

from dtensor.daft.errors import (
    ActorLost,
    CommunicationError,
    DaftError,
    Failure,
    HostError,
    TaskError,
)
from dtensor.numerics import contiguous_strides
from dtensor.private_torch import DisableTorchFunctionSubclass, make_subclass

_cloudpickle: Any = cloudpickle  # has no type annotations

ALIGN = 64
SMALL_BYTES = 1 << 12
"""A smaller message is a Python bytearray, which is faster to allocate."""
_HEAD = struct.Struct("<4Q")
LARGE_BYTES = 1 << 22
"""From this size on, a second thread copies half of a buffer."""

Kind: TypeAlias = int
VALUE = 0
MessageAllocator: TypeAlias = Callable[[int], Tensor]
"""A function that allocates a message u8[nbytes]."""
SENT_AS: dict[type, Callable[[Any], Tensor]] = {}
"""Class of remote tensors -> a function that returns the tensor to send in place of an instance."""
FAILURES: dict[int, type[DaftError]] = {
    1: TaskError,
    2: ActorLost,
    3: CommunicationError,
    4: HostError,
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = frozenset("?bhilqBHILQefdFD")
"""Characters of numpy dtypes whose arrays are sent as bytes."""
_PICKLING = frozenset(
    ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__slots__")
    + ("__torch_dispatch__",)
)
"""Names that a tensor class defines if it controls its pickling or holds more than elements."""


class Placeholder:
    """An object within a value that stands for a value of an actor (a future) or for an actor."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Return what cloudpickle returns for a code object, with the real file name."""
    make, args = _cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = (code.co_filename if type(x) is str and x == "<dynamic-code>" else x for x in args)
    return make, tuple(named)


class ByValuePickler(_cloudpickle.Pickler):
    """cloudpickle's pickler, which also pickles the file name of each function. (cloudpickle 3.1.2
    omits it.) So tracebacks on actors show the user's file and line."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, _cloudpickle.Pickler.dispatch_table
    )


class _ValuePickler(ByValuePickler):
    """Pickles a value without its tensors' bytes and its placeholders, and collects these."""

    def __init__(self, file: io.BytesIO, take: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            file, protocol=5, buffer_callback=take
        )
        self.metas: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.placeholders: list[Placeholder] = []
        self.storages: dict[int, Span] = {}
        self.is_sending = False  # while a function of `SENT_AS` runs, whose errors are not wrapped

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors, arrays and placeholders by the functions of this class, other objects as
        cloudpickle does."""
        kind = type(obj)  # pyright: ignore[reportUnknownVariableType]
        if kind in (Tensor, torch.nn.Parameter) and _is_plain(obj):
            return self._tensor(obj)
        if kind is numpy.ndarray and _is_plain_array(obj):
            return _array, (pickle.PickleBuffer(obj), obj.dtype.char, obj.shape)
        if obj is _array or obj is tensor_of or obj is placeholder or obj is _set_attributes:
            return obj.__name__  # takes a third of the time
        if isinstance(obj, Placeholder):
            self.placeholders.append(obj)
            return placeholder, (len(self.placeholders) - 1,)
        if (sent_as := SENT_AS.get(obj.__class__)) is not None:
            self.is_sending = True
            sent = sent_as(obj)
            self.is_sending = False
            return self._tensor(sent)
        if issubclass(kind, Tensor):  # pyright: ignore[reportUnknownArgumentType]
            return self._other_tensor(obj)
        return super().reducer_override(obj)  # pyright: ignore

    def _tensor(self, tensor: Tensor) -> Any:
        """Reduce a tensor to `tensor_of` with the number of its storage, dtype, shape, strides and
        offset; collect the storage. Raises TypeError if the tensor has hooks."""
        shape = tuple(tensor.shape)
        self.metas.append((tensor.dtype, shape))
        data = tensor.detach().resolve_conj().resolve_neg()
        storage = data.untyped_storage()
        span = self.storages.get(storage.data_ptr())
        if span is None:
            span = self.storages[storage.data_ptr()] = Span(len(self.storages), storage)
        span.add(data)
        strides = None if data.stride() == contiguous_strides(shape) else data.stride()
        offset, device = data.storage_offset(), tensor.device.type
        reference = (span.index, _NAMES[tensor.dtype], shape, strides, offset, device)
        kind = type(tensor) if tensor.is_leaf else Tensor
        wants_grad = tensor.is_leaf and tensor.requires_grad
        attributes, grad = dict(vars(tensor)), tensor.grad if tensor.is_leaf else None
        extra = bool(attributes) or grad is not None
        if kind is Tensor and not (wants_grad or extra):
            return tensor_of, reference
        if tensor.is_leaf and _has_hooks(tensor):
            raise TypeError(f"a tensor {tensor.dtype}{list(shape)} has a hook on its gradient")
        reduction = tensor_of, (*reference, kind is not Tensor, wants_grad)
        return (*reduction, (attributes, grad), None, None, _set_attributes) if extra else reduction

    def _other_tensor(self, tensor: Tensor) -> Any:
        """Reduce a tensor of a subclass, or one that torch pickles, to its elements and class."""
        kind = type(tensor)
        with DisableTorchFunctionSubclass():
            is_leaf, controls_pickling = tensor.is_leaf, _pickles_itself(kind)
            grad = tensor.grad if is_leaf else None
            has_hooks = is_leaf and _has_hooks(tensor)
            if has_hooks or (controls_pickling and grad is not None):
                lost_attribute = "hook on its gradient" if has_hooks else "gradient"
                description = f"a {kind.__name__} {tensor.dtype}{list(tensor.shape)}"
                raise TypeError(f"{description} has a {lost_attribute}, which would be lost")
            wants_grad = is_leaf and tensor.requires_grad
            if controls_pickling or (
                kind is Tensor and not (tensor.requires_grad or grad is not None)
            ):
                return NotImplemented
            elements = tensor.detach()  # a plain Tensor, since subclasses are disabled
        state = (dict(vars(tensor)), grad)
        return _as_class, (elements, kind, wants_grad), state, None, None, _set_attributes


@dataclass(slots=True)
class Span:
    """The range of a storage's bytes that tensors of a value use. It begins at a multiple of
    `ALIGN`."""

    index: int
    storage: torch.UntypedStorage
    begin: int = -1
    end: int = 0

    def add(self, data: Tensor) -> None:
        """Extend the range to the elements of a tensor of the storage."""
        size = data.element_size()
        begin = end = int(data.storage_offset()) * size
        if data.numel():
            last = sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
            end += size + size * int(last)
        begin -= begin % ALIGN
        self.begin = begin if self.begin < 0 else min(self.begin, begin)
        self.end = max(self.end, end)

    def raw(self) -> memoryview:
        """Return the bytes of the range, copied to the CPU if they are on a GPU."""
        data = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        data.set_(self.storage, self.begin, (max(0, self.end - self.begin),), (1,))
        return data.cpu().numpy().data


def placeholder(index: int) -> object:
    """Stand for a placeholder in the pickle. `_Unpickler` replaces this function."""
    raise LookupError(f"placeholder {index} of a message that was decoded without values")


class _Unpickler(pickle.Unpickler):
    """Unpickles a message. ``storages``: for each, (its used bytes, the offset of the first one).
    ``values``: the values of the placeholders."""

    def __init__(
        self,
        body: bytes,
        buffers: Sequence[Any],
        storages: Sequence[tuple[Any, int]],
        values: Sequence[object],
    ) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._values = values
        self._spans = storages
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Replace `placeholder` and `tensor_of` by functions that know this message."""
        if module == __name__:
            replacements = {"placeholder": self._values.__getitem__, "tensor_of": self._tensor}
            return replacements[name] if name in replacements else globals()[name]
        return super().find_class(module, name)

    def _tensor(
        self,
        index: int,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        offset: int,
        device: str,
        parameter: bool = False,
        wants_grad: bool = False,
    ) -> Tensor:
        """Return a tensor of storage ``index``. Tensors of one storage share its memory."""
        data, begin = self._spans[index]
        if index not in self._storages:
            memory = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0)
            memory = memory.cuda() if device == "cuda" and torch.cuda.is_available() else memory
            self._storages[index] = memory.untyped_storage()
        storage = self._storages[index]
        tensor = torch.empty(0, dtype=_DTYPES[dtype], device=storage.device)
        offset -= begin // tensor.element_size()
        tensor.set_(
            storage, offset, shape, contiguous_strides(shape) if strides is None else strides
        )
        if parameter:
            return torch.nn.Parameter(tensor, wants_grad)
        return tensor.requires_grad_(wants_grad)


def tensor_of(*_: object) -> Tensor:
    """Stand for a tensor in the pickle. `_Unpickler` replaces this function."""
    raise LookupError("a tensor of a message that was decoded without its storages")


def _as_class(elements: Tensor, kind: type[Tensor], wants_grad: bool) -> Tensor:
    return make_subclass(kind, elements, wants_grad)


def _set_attributes(tensor: Tensor, more: tuple[dict[str, Any], Tensor | None]) -> None:
    """Set the attributes and the gradient of a tensor, after both were unpickled."""
    attributes, grad = more
    vars(tensor).update(attributes)
    if grad is not None:
        tensor.grad = grad


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded value. `tensors`: (dtype, shape) of its tensors, in pickling order."""

    message: Tensor
    placeholders: tuple[Placeholder, ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def allocate_message(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def encode(
    value: object, kind: Kind = VALUE, allocate: MessageAllocator = allocate_message
) -> Encoded:
    """Encode a value. The placeholders of the result are in the order of `decode`'s ``values``.
    Raises TypeError if the value cannot be pickled."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    writer = _ValuePickler(file, buffers.append)
    try:
        writer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        if writer.is_sending:
            raise
        raise TypeError(
            f"This value cannot go between actors: it does not pickle ({error}).\n"
            f"  value: {type(value).__module__}.{type(value).__qualname__}\n"
            f"  Fix: give or return tensors, arrays and plain data."
        ) from error
    # the message: head, lengths of the buffers and begins of the storages, pickle, aligned buffers
    spans = list(writer.storages.values())
    body, data_of_buffers = file.getbuffer(), [buffer.raw() for buffer in buffers]
    data_of_buffers += [span.raw() for span in spans]
    numbers = [raw.nbytes for raw in data_of_buffers] + [span.begin for span in spans]
    lengths = numbers[: len(data_of_buffers)]
    begin = _HEAD.size + 8 * len(numbers)
    offsets, total = _offsets(begin + len(body), lengths)
    if total < SMALL_BYTES:
        view = memoryview(bytearray(total))
        message = torch.frombuffer(view, dtype=torch.uint8)
    else:
        message = allocate(total)
        view = message.numpy().data
    _HEAD.pack_into(view, 0, kind, len(body), len(data_of_buffers), len(spans))
    struct.pack_into(f"<{len(numbers)}Q", view, _HEAD.size, *numbers)
    view[begin : begin + len(body)] = body
    for raw, offset in zip(data_of_buffers, offsets):
        _copy(view[offset : offset + raw.nbytes], raw)
    return Encoded(message, tuple(writer.placeholders), tuple(writer.metas))


def decode(message: Tensor, values: Sequence[object] = (), *, copy: bool = True) -> Any:
    """Decode a message. ``values``: replace the placeholders. Without ``copy`` tensors share the
    message's memory, which must have no other reader."""
    view = message.numpy().data
    kind, size, num, num_storages = _HEAD.unpack_from(view)
    assert kind == VALUE, "a failure has no value"
    if num and copy:
        view = message.clone().numpy().data
    begin = _HEAD.size + 8 * (num + num_storages)
    numbers = struct.unpack_from(f"<{num + num_storages}Q", view, _HEAD.size)
    lengths, begins = numbers[:num], numbers[num:]
    offsets, _ = _offsets(begin + size, lengths)
    buffers = [view[at : at + length] for at, length in zip(offsets, lengths)]
    storages = list(zip(buffers[num - num_storages :], begins))
    return _Unpickler(bytes(view[begin : begin + size]), buffers, storages, values).load()


def _offsets(end: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offset of each buffer after `end`, and the length of the message."""
    offsets = list[int]()
    for length in lengths:
        offsets.append(-(-end // ALIGN) * ALIGN)
        end = offsets[-1] + length
    return offsets, end


def pickled(value: object) -> bytes:
    """Pickle a value by `ByValuePickler`, including the bytes of its tensors."""
    file = io.BytesIO()
    ByValuePickler(file).dump(value)
    return file.getvalue()


def encode_failure(error: DaftError) -> Tensor:
    kind = next((kind for kind, cls in FAILURES.items() if isinstance(error, cls)), 3)
    return encode(error.failure, kind=kind).message


def failure_of(message: Tensor) -> DaftError | None:
    """Return the error if the message is a failure, else None."""
    kind, size, *_ = _preamble(message)
    if kind == VALUE:
        return None
    failure = pickle.loads(message[_HEAD.size : _HEAD.size + size].numpy().data)
    assert isinstance(failure, Failure)
    return FAILURES[kind](failure)


def is_failure(message: Tensor) -> bool:
    return _preamble(message)[0] != VALUE


def _preamble(message: Tensor) -> tuple[int, int, int, int]:
    return _HEAD.unpack_from(message.numpy().data)


def _has_hooks(tensor: Tensor) -> bool:
    memory: Any = tensor
    return bool(memory._backward_hooks or memory._post_accumulate_grad_hooks)


def _pickles_itself(kind: type) -> bool:
    """Return whether a tensor class controls its pickling, or has more state than elements and a
    dict."""
    bases = set(kind.__mro__[: kind.__mro__.index(Tensor)]) - {torch.nn.Parameter}
    return any(_PICKLING & vars(cls).keys() for cls in bases)


def _array(data: Any, dtype: str, shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(data, dtype).reshape(shape)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is sent as bytes. Other tensors (sparse, quantized) pickle
    themselves."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _is_plain_array(array: numpy.ndarray[Any, Any]) -> bool:
    return array.dtype.char in _PLAIN and array.dtype.isnative and array.flags.c_contiguous


def _copy(to: memoryview, raw: memoryview) -> None:
    """Copy bytes. numpy releases the GIL for long copies."""
    if raw.nbytes < ALIGN * ALIGN:
        to[:] = raw
        return
    target, source = numpy.frombuffer(to, numpy.uint8), numpy.frombuffer(raw, numpy.uint8)
    if len(source) < LARGE_BYTES or len(os.sched_getaffinity(0)) < 2:
        numpy.copyto(target, source)
        return
    middle = len(source) // 2
    second_half = _copier().submit(numpy.copyto, target[middle:], source[middle:])
    numpy.copyto(target[:middle], source[:middle])
    second_half.result()


@cache
def _copier() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "copy of a value")


os.register_at_fork(after_in_child=_copier.cache_clear)  # a forked child lacks the thread
