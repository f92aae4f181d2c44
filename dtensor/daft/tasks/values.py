"""Values on their way between actors: one flat message of bytes for each, whatever it holds.

    message = encode({"loss": 0.5, "logits": torch.ones(2, 3)}).message     # u8, a snapshot
    decode(message)                                                 # {"loss": 0.5, "logits": ...}

A message is a head (kind, length of the pickle, number of buffers), the buffers' lengths, the
pickle, and the buffers, aligned. Buffers are what pickle's protocol 5 takes out of band: the bytes
of tensors and of numpy arrays, wherever they are in the value, in a user's own classes too. They
are copied once, into the message; so that never shares memory with the value that it was made from,
and one value is one transfer, whose size only the sender knows.

A tensor that is elsewhere goes as the tensor that it stands for: whoever defines such a class says
in `SENT_AS` how to get that.

Invariants: a tensor comes out with its dtype, shape and bits, contiguous, without a gradient, on
the CPU or, where the process has one, on the kind of device it came from; an array or tensor that a
value holds twice is one again. Everything else goes as cloudpickle carries it: classes and
functions of a script, lambdas too. A failure is a message too, so that what depends on a failed
task gets its root cause as its value.
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
"""A message below has memory of Python's, which is had sooner."""
_HEAD = struct.Struct("<3Q")
LARGE_BYTES = 1 << 22
"""Of a buffer: from here on a second core copies half of it."""

Kind: TypeAlias = int
VALUE = 0
Room: TypeAlias = Callable[[int], Tensor]
"""Where a message of so many bytes is put: u8."""
SENT_AS: dict[type, Callable[[Any], Tensor]] = {}
"""By class, what gives the tensor that is sent in place of one."""
FAILURES: dict[int, type[DaftError]] = {
    1: TaskError,
    2: ActorLost,
    3: CommunicationError,
    4: HostError,
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = frozenset("?bhilqBHILQefdFD")
"""numpy's characters of dtypes that have no more to them."""
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8))


class Placeholder:
    """Stands, anywhere in a value, for one that an actor has or will have."""


class _ValuePickler(_cloudpickle.Pickler):
    """Takes tensors and placeholders out of what it pickles."""

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
            return obj.__name__  # a third of the time that it takes otherwise
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
    """The placeholder of this number; who decodes has the values."""
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
    """`tensors`: those of the value, in the order in which they were met."""

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
    """Where each buffer begins, after what ends there, and the length of the message."""
    found = list[int]()
    for length in lengths:
        found.append(-(-end // ALIGN) * ALIGN)
        end = found[-1] + length
    return found, end


def pickled(value: object) -> bytes:
    """As it goes within a message, without tensors' being taken out."""
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
    """Whether it is what its bytes say; other tensors pickle themselves."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _is_plain_array(array: numpy.ndarray[Any, Any]) -> bool:
    return array.dtype.char in _PLAIN and array.dtype.isnative and array.flags.c_contiguous


def _copy(to: memoryview, raw: memoryview) -> None:
    """numpy gives up the GIL for what takes long."""
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


os.register_at_fork(after_in_child=_copier.cache_clear)  # there its thread is not
