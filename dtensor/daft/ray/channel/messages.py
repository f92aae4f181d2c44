"""Messages between the controller and its hosts: how a call is written to a stream of bytes.

    send(sock, encoded(8, REQUEST, (Worker.get,), (names,)))     # at one end
    for message in incoming(sock):                               # at the other end
        (method,), arguments = message.functions, message.value()

A message is a head (call number, kind, lengths), the lengths of the buffers, the pickled functions,
the pickled arguments, and the buffers. Tensors of `SMALL_BYTES` and more, and numpy arrays, are
buffers (pickle's protocol 5): they are not copied. The user's classes are pickled by value.
Invariants: a tensor arrives contiguous, on the CPU, in its own writable memory. A stream that broke
inside a message yields no further message. Messages are neither encrypted nor signed; the ends
prove first that they know the launch's key (`handshake.py`).
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from dtensor.daft.errors import DaftError
from dtensor.daft.remote_exceptions import PICKLERS, reduced
from dtensor.daft.tasks.values import ByValuePickler

Kind: TypeAlias = Literal[0, 1, 2, 3, 4]
ONE_WAY: Kind = 0  # a call without an answer
REQUEST: Kind = 1  # a call with an answer
RESPONSE: Kind = 2  # an answer: the result
RAISED: Kind = 3  # an answer: an exception, and its traceback as text
UNREAD: Kind = 4  # an answer: the exception of an earlier one-way call, and its traceback
Function: TypeAlias = Callable[..., object]
Data: TypeAlias = bytes | bytearray | memoryview


class HostFailed(Exception):
    """An error on a host, sent to the controller. The loss of one of `hosts` may have caused it."""

    def __init__(self, error: DaftError, hosts: tuple[int, ...]) -> None:
        super().__init__(str(error))
        self.error = error
        self.hosts = hosts

    def __reduce__(self) -> tuple[Any, ...]:
        return (HostFailed, (self.error, self.hosts))


class CloudExceptionPickler(ByValuePickler):
    """Pickles exceptions; classes that the other side cannot import are pickled by value."""

    causes = True

    def reducer_override(self, obj: Any) -> Any:
        reduction = reduced(obj, self.causes)
        return super().reducer_override(obj) if reduction is NotImplemented else reduction  # pyright: ignore


PICKLERS.insert(0, CloudExceptionPickler)

SMALL_BYTES = 1 << 14
"""A smaller tensor is part of the pickle: a separate buffer costs more than the copy."""
READ_BYTES = 1 << 16  # how many bytes one read asks for
MAX_PIECES = 512  # buffers in one system call, which has a limit of 1024
_ZLIB_LEVEL = 1  # level 6 takes three times as long and saves a fifth of the bytes
_HEAD = struct.Struct("<QIIIQ")
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """A message that has arrived. `number` counts the calls of its host."""

    number: int
    kind: Kind
    named: bytes  # the pickled functions
    pickled: Data  # the pickled arguments or result
    buffers: list[Data]

    @property
    def functions(self) -> tuple[Function, ...]:
        return _functions(self.named)

    def value(self) -> Any:
        return pickle.loads(self.pickled, buffers=self.buffers)


@cache
def _named(functions: tuple[Function, ...]) -> bytes:
    return _pickled(functions)[0]


@cache
def _functions(named: bytes) -> tuple[Function, ...]:
    return pickle.loads(named)


class MessagePickler(ByValuePickler):
    """Pickles tensors without a copy of their bytes."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor to a buffer, its dtype and its shape; other objects as `ByValuePickler`
        does."""
        if type(obj) in (Tensor, Parameter) and _has_elements(obj):
            data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            buffer = bytearray(data) if len(data) < SMALL_BYTES else pickle.PickleBuffer(data)
            arguments = buffer, _DTYPE_NAMES[obj.dtype], tuple(obj.shape)
            parameter = type(obj) is Parameter
            if parameter or obj.requires_grad:
                return _tensor, (*arguments, parameter, obj.requires_grad)
            return _tensor, arguments
        return super().reducer_override(obj)  # pyright: ignore


def _has_elements(tensor: Tensor) -> bool:
    """Return whether the tensor is a plain strided array. Torch's own pickling handles others."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _tensor(
    data: Data, dtype: str, shape: tuple[int, ...], parameter: bool = False, grad: bool = False
) -> Tensor:
    """Return the tensor or parameter with these bytes, which are not copied."""
    if len(data):
        tensor = torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    return Parameter(tensor, grad) if parameter else tensor.requires_grad_(grad)


def _pickled(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickle of a value, and its buffers, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    MessagePickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), buffers


@dataclass(frozen=True, slots=True)
class Packed:
    """A large repetitive value, such as a program, pickled and compressed."""

    data: bytes

    @staticmethod
    def of(value: object) -> Packed:
        file = io.BytesIO()
        MessagePickler(file, protocol=5).dump(value)
        return Packed(zlib.compress(file.getvalue(), _ZLIB_LEVEL))

    def value(self) -> Any:
        return pickle.loads(zlib.decompress(self.data))


@dataclass(frozen=True, slots=True)
class Payload:
    """The pickled arguments of a message, and their buffers."""

    body: bytes
    buffers: Sequence[Data]

    @staticmethod
    def of(value: object) -> Payload:
        body, large = _pickled(value)
        return Payload(body, [buffer.raw() for buffer in large])

    @staticmethod
    def plain(value: object) -> Payload:
        """Return the payload of values without tensors and without objects of the user's script,
        pickled in a third of the time that `of` takes."""
        return Payload(pickle.dumps(value, 5), ())

    def kept(self) -> Payload:
        """Return a copy in its own memory, to be sent again."""
        return Payload(self.body, [bytes(buffer) for buffer in self.buffers])

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.buffers))


def encoded(number: int, kind: Kind, functions: tuple[Function, ...], value: object) -> list[Data]:
    """Return the pieces of a message, in order. `value`: the contents, or their `Payload`."""
    named = _named(functions)
    payload = value if isinstance(value, Payload) else Payload.of(value)
    body, buffers = payload.body, payload.buffers
    head = _HEAD.pack(number, kind, len(buffers), len(named), len(body))
    if not buffers:
        return [b"".join((head, named, body))]
    lengths = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [b"".join((head, lengths, named, body)), *buffers]


def unsent(pieces: Sequence[Data], sent: int) -> list[memoryview]:
    """Return the rest of the pieces after `sent` bytes."""
    unsent_pieces: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece)
        if sent < len(view):
            unsent_pieces.append(view[sent:])
        sent = max(0, sent - len(view))
    return unsent_pieces


def send(sock: socket.socket, pieces: Sequence[Data]) -> None:
    """Write all pieces; wait until they are written."""
    while pieces:
        sent = sock.sendmsg(islice(pieces, MAX_PIECES))
        pieces = unsent(pieces, sent)


class _Stream:
    """A socket and the bytes that were read from it but not used yet. The generators yield while
    too few bytes have arrived."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._begin = self._end = 0

    @property
    def empty(self) -> bool:
        return self._begin == self._end

    def fill(self) -> Generator[None, None, None]:
        """Read the bytes that have arrived. No bytes may be buffered."""
        self._begin, self._end = 0, (yield from self._read(self._buffer))

    def small(self) -> Message | None:
        """Return the next message if it has no buffers and has arrived completely, else None. This
        is the fast path of `message`, which the messages of runs take."""
        body = self._begin + _HEAD.size
        if body <= self._end:
            number, kind, count, length, size = _HEAD.unpack_from(self._buffer, self._begin)
            middle = body + length
            if not count and middle + size <= self._end:
                self._begin = middle + size
                named, pickled = self._buffer[body:middle], self._buffer[middle : middle + size]
                return Message(number, kind, bytes(named), bytes(pickled), [])
        return None

    def message(self) -> Generator[None, None, Message]:
        """Read the next message."""
        number, kind, count, length, size = _HEAD.unpack((yield from self.take(_HEAD.size)))
        lengths = struct.unpack(f"<{count}Q", (yield from self.take(8 * count)))
        named = bytes((yield from self.take(length)))
        body = yield from self.take(size)
        buffers: list[Data] = []
        for buffer_length in lengths:
            buffers.append((yield from self.take(buffer_length)))
        return Message(number, kind, named, body, buffers)

    def take(self, size: int) -> Generator[None, None, Data]:
        """Return the next `size` bytes, in their own memory."""
        if size <= READ_BYTES:
            while self._end - self._begin < size:
                if self._begin + size > READ_BYTES:
                    self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
                    self._begin, self._end = 0, self._end - self._begin
                self._end += yield from self._read(self._buffer[self._end :])
            self._begin += size
            data = bytearray(self._buffer[self._begin - size : self._begin])
            if self._begin == self._end:
                self._begin = self._end = 0
            return data
        view = numpy.empty(size, numpy.uint8).data  # not filled with zeros
        filled = self._end - self._begin
        view[:filled] = self._buffer[self._begin : self._end]
        self._begin = self._end = 0
        while filled < size:
            filled += yield from self._read(view[filled:])
        return view

    def _read(self, into: memoryview) -> Generator[None, None, int]:
        """Read at least one byte; return the number of bytes."""
        while True:
            try:
                count = self._sock.recv_into(into)
            except BlockingIOError:
                yield
                continue
            except OSError as error:  # reset, or out of reach for too long
                raise EOFError from error
            if not count:
                raise EOFError
            return count


def incoming(sock: socket.socket) -> Generator[Message | None]:
    """Yield the messages of a stream, and None when no complete message is left. Raises `EOFError`
    at the end of the stream."""
    stream = _Stream(sock)
    while True:
        yield from stream.fill()
        while not stream.empty:
            yield stream.small() or (yield from stream.message())
        yield None
