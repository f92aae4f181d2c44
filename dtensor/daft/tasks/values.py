"""The form of values between actors: one flat message of bytes for each.

    message = encode({"loss": 0.5, "logits": torch.ones(2, 3)}).message     # u8, a snapshot
    decode(message)                                                 # {"loss": 0.5, "logits": ...}

A message is a head (kind, length of the pickle, number of buffers), the buffers' lengths, the
pickle, and the buffers, aligned. Buffers are the out-of-band data of pickle's protocol 5: the bytes
of tensors and of numpy arrays, anywhere in the value, in a user's own classes too. They are copied
once, into the message; so a message never shares memory with its value, and one value is one
transfer, whose size only the sender knows.

A remote tensor is sent as its value: the module that defines such a class registers the function
for it in `SENT_AS`.

Invariants: a tensor comes out with its dtype, shape and bits, contiguous, without a gradient, on
the CPU or, if the process has one, on the kind of device it came from; an array or tensor that a
value holds twice is one again. Everything else is pickled by cloudpickle: classes and functions of
a script, lambdas too. A failure is a message too, so that tasks that depend on a failed task get
its root cause as their value.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

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

_cloudpickle: Any = cloudpickle  # which has no types

ALIGN = 64
SMALL_BYTES = 1 << 12
"""A smaller message is in Python's memory, which is faster to get."""
_HEAD = struct.Struct("<3Q")
LARGE_BYTES = 1 << 22
"""Bytes of a buffer from which on a second core copies half of it."""

Kind: TypeAlias = int
VALUE = 0
Room: TypeAlias = Callable[[int], Tensor]
"""Allocates the memory of a message of so many bytes: u8."""
SENT_AS: dict[type, Callable[[Any], Tensor]] = {}
"""By class, the function that returns the tensor to send in place of one."""
FAILURES: dict[int, type[DaftError]] = {
    1: TaskError,
    2: ActorLost,
    3: CommunicationError,
    4: HostError,
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = frozenset("?bhilqBHILQefdFD")
"""numpy's characters of plain dtypes."""
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8))


class Placeholder:
    """A placeholder, anywhere in a value, for a value that an actor has or will have."""


class _ValuePickler(_cloudpickle.Pickler):
    """Removes tensors and placeholders from the pickled value."""

    def __init__(self, file: io.BytesIO, take: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            file, protocol=5, buffer_callback=take
        )
        self.metas: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.placeholders: list[Placeholder] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)  # pyright: ignore[reportUnknownVariableType]
        if kind in (Tensor, torch.nn.Parameter) and _is_plain(obj):
            return self._tensor(obj)
        if kind is numpy.ndarray and _is_plain_array(obj):
            return _array, (pickle.PickleBuffer(obj), obj.dtype.char, obj.shape)
        if obj is _array or obj is _tensor or obj is placeholder:
            return obj.__name__  # a third of the usual time
        if isinstance(obj, Placeholder):
            self.placeholders.append(obj)
            return placeholder, (len(self.placeholders) - 1,)
        if (sent_as := SENT_AS.get(obj.__class__)) is not None:
            return self._tensor(sent_as(obj))
        return super().reducer_override(obj)  # pyright: ignore

    def _tensor(self, tensor: Tensor) -> Any:
        shape = tuple(tensor.shape)
        self.metas.append((tensor.dtype, shape))
        data, device = tensor.detach(), tensor.device.type
        if device != "cpu" or data.is_conj() or data.is_neg():
            data = data.cpu().resolve_conj().resolve_neg()
        data = data.contiguous()
        if tensor.dtype not in _OF_NUMPY:
            data = data.view(-1).view(torch.uint8)
        raw = pickle.PickleBuffer(data.numpy().data)
        return _tensor, (raw, _NAMES[tensor.dtype], shape, device)


def placeholder(index: int) -> object:
    """The placeholder of this number; the decoder has the values."""
    raise LookupError(f"placeholder {index} of a message that was decoded without values")


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, buffers: Sequence[Any], values: Sequence[object]) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._values = values

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__:
            return self._values.__getitem__ if name == "placeholder" else globals()[name]
        return super().find_class(module, name)


@dataclass(frozen=True, slots=True)
class Encoded:
    """`tensors`: those of the value, in the order of the pickler."""

    message: Tensor
    placeholders: tuple[Placeholder, ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def own_room(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def encode(value: object, kind: Kind = VALUE, room: Room = own_room) -> Encoded:
    """The message of a value and the placeholders in it, in the order `decode` takes them."""
    file, taken = io.BytesIO(), list[pickle.PickleBuffer]()
    writer = _ValuePickler(file, taken.append)
    try:
        writer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"This value cannot go between actors: it does not pickle ({error}).\n"
            f"  value: {type(value).__module__}.{type(value).__qualname__}\n"
            f"  Fix: give or return tensors, arrays and plain data."
        ) from error
    body, raws = file.getbuffer(), [buffer.raw() for buffer in taken]
    lengths = [raw.nbytes for raw in raws]
    begin = _HEAD.size + 8 * len(raws)
    offsets, total = _offsets(begin + len(body), lengths)
    if total < SMALL_BYTES:
        view = memoryview(bytearray(total))
        message = torch.frombuffer(view, dtype=torch.uint8)
    else:
        message = room(total)
        view = message.numpy().data
    _HEAD.pack_into(view, 0, kind, len(body), len(raws))
    struct.pack_into(f"<{len(raws)}Q", view, _HEAD.size, *lengths)
    view[begin : begin + len(body)] = body
    for raw, offset in zip(raws, offsets):
        _copy(view[offset : offset + raw.nbytes], raw)
    return Encoded(message, tuple(writer.placeholders), tuple(writer.metas))


def decode(message: Tensor, values: Sequence[object] = (), *, copy: bool = True) -> Any:
    """The value. Without `copy` its tensors are the message's memory, which must have no other
    reader."""
    view = message.numpy().data
    kind, size, num = _HEAD.unpack_from(view)
    assert kind == VALUE, "a failure has no value"
    if num and copy:
        view = message.clone().numpy().data
    begin = _HEAD.size + 8 * num
    lengths = struct.unpack_from(f"<{num}Q", view, _HEAD.size)
    offsets, _ = _offsets(begin + size, lengths)
    buffers = [view[at : at + length] for at, length in zip(offsets, lengths)]
    return _Unpickler(bytes(view[begin : begin + size]), buffers, values).load()


def _offsets(end: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """The begin of each buffer, after `end`, and the length of the message."""
    offsets = list[int]()
    for length in lengths:
        offsets.append(-(-end // ALIGN) * ALIGN)
        end = offsets[-1] + length
    return offsets, end


def pickled(value: object) -> bytes:
    """The pickle of a message, with its tensors inside."""
    return _cloudpickle.dumps(value)


def encode_failure(error: DaftError) -> Tensor:
    kind = next((kind for kind, cls in FAILURES.items() if isinstance(error, cls)), 3)
    return encode(error.failure, kind=kind).message


def failure_of(message: Tensor) -> DaftError | None:
    """The error that a message carries, if it is one."""
    kind, size, _ = _preamble(message)
    if kind == VALUE:
        return None
    failure = pickle.loads(message[_HEAD.size : _HEAD.size + size].numpy().data)
    assert isinstance(failure, Failure)
    return FAILURES[kind](failure)


def is_failure(message: Tensor) -> bool:
    return _preamble(message)[0] != VALUE


def _preamble(message: Tensor) -> tuple[int, int, int]:
    return _HEAD.unpack_from(message.numpy().data)


def _tensor(data: Any, dtype: str, shape: tuple[int, ...], device: str) -> Tensor:
    if len(data):
        tensor = torch.frombuffer(data, dtype=_DTYPES[dtype]).view(shape)
    else:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    return tensor.cuda() if device == "cuda" and torch.cuda.is_available() else tensor


def _array(data: Any, dtype: str, shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(data, dtype).reshape(shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is only its bytes; other tensors pickle themselves."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _is_plain_array(array: numpy.ndarray[Any, Any]) -> bool:
    return array.dtype.char in _PLAIN and array.dtype.isnative and array.flags.c_contiguous


def _copy(to: memoryview, raw: memoryview) -> None:
    """A copy; numpy releases the GIL for long ones."""
    if raw.nbytes < ALIGN * ALIGN:
        to[:] = raw
        return
    there, given = numpy.frombuffer(to, numpy.uint8), numpy.frombuffer(raw, numpy.uint8)
    if len(given) < LARGE_BYTES or len(os.sched_getaffinity(0)) < 2:
        numpy.copyto(there, given)
        return
    half = len(given) // 2
    other = _copier().submit(numpy.copyto, there[half:], given[half:])
    numpy.copyto(there[:half], given[:half])
    other.result()


@cache
def _copier() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "copy of a value")


os.register_at_fork(after_in_child=_copier.cache_clear)  # the child lacks its thread
