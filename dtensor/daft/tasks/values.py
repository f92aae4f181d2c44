"""Values on their way between actors: one flat message of bytes for each, whatever it holds.

    message = encode({"loss": 0.5, "logits": torch.ones(2, 3)})     # u8, a copy: a snapshot
    decode(message)                                                 # {"loss": 0.5, "logits": ...}

A message is 24 bytes (the header's length, what kind of message, how many tensors), a pickled
header, and the bytes of each tensor, aligned. Tensors may be anywhere in the value, in a user's own
classes too: they are taken out as it is pickled. So a message never shares memory with the value
that it was made from, and one value is one transfer, whose size only the sender knows.

A tensor that is elsewhere goes as the tensor that it stands for: whoever defines such a class says
in `SENT_AS` how to get that.

Invariants: a tensor comes out with its dtype, shape and bits, contiguous, without a gradient, on
the CPU or, where the process has one, on the kind of device it came from; a tensor that a value
holds twice is one tensor again. Everything else goes as pickle carries it. A failure is a message
too, so that what depends on a failed task gets its root cause as its value.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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

ALIGN = 64
PREAMBLE = 24

Kind: TypeAlias = int
VALUE = 0
SENT_AS: dict[type, Callable[[Any], Tensor]] = {}
"""By class, what gives the tensor that is sent in place of one."""
FAILURES: dict[int, type[DaftError]] = {
    1: TaskError,
    2: ActorLost,
    3: CommunicationError,
    4: HostError,
}


class Placeholder:
    """Stands, anywhere in a value, for one that an actor has or will have."""


@dataclass(frozen=True, slots=True)
class _Header:
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], str], ...]
    body: bytes


class ValuePickler(pickle.Pickler):
    """Takes tensors and placeholders out of what it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self.placeholders: list[Placeholder] = []
        self._seen: dict[int, tuple[str, int]] = {}
        self._kept: list[object] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if isinstance(obj, Placeholder):
            return self._take("placeholder", self.placeholders, obj)
        if type(obj) in (Tensor, torch.nn.Parameter) and _is_plain(obj):
            return self._take("tensor", self.tensors, obj)
        if (sent_as := SENT_AS.get(obj.__class__)) is not None:
            if id(obj) not in self._seen:
                self._seen[id(obj)] = ("tensor", len(self.tensors))
                self.tensors.append(sent_as(obj))
                self._kept.append(obj)
            return self._seen[id(obj)]
        return None

    def _take(self, kind: str, taken: list[Any], obj: Any) -> tuple[str, int]:
        # `taken` keeps obj alive, so that its id stays its own
        if id(obj) not in self._seen:
            self._seen[id(obj)] = (kind, len(taken))
            taken.append(obj)
        return self._seen[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: Sequence[Tensor], values: Sequence[object]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors
        self._values = values

    def persistent_load(self, pid: tuple[str, int]) -> object:
        kind, index = pid
        return self._tensors[index] if kind == "tensor" else self._values[index]


@dataclass(frozen=True, slots=True)
class Encoded:
    message: Tensor
    placeholders: tuple[Placeholder, ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def encode(
    value: object, pickler: type[ValuePickler] = ValuePickler, kind: Kind = VALUE
) -> Encoded:
    """The message of a value and the placeholders in it, in the order `decode` takes them."""
    file = io.BytesIO()
    writer = pickler(file)
    try:
        writer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"This value cannot go between actors: it does not pickle ({error}).\n"
            f"  value: {type(value).__module__}.{type(value).__qualname__}\n"
            f"  Fix: give or return tensors and plain data, and define classes and functions at "
            f"the top of a module."
        ) from error
    metas = tuple((t.dtype, tuple(t.shape), t.device.type) for t in writer.tensors)
    header = pickle.dumps(_Header(metas, file.getvalue()), 5)
    offsets, total = _offsets(len(header), metas)
    message = torch.empty(total, dtype=torch.uint8)
    message[:PREAMBLE].view(torch.int64).copy_(torch.tensor([len(header), kind, len(metas)]))
    message[PREAMBLE : PREAMBLE + len(header)] = torch.frombuffer(
        bytearray(header), dtype=torch.uint8
    )
    with torch.no_grad():
        for tensor, offset in zip(writer.tensors, offsets):
            _piece(message, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    return Encoded(message, tuple(writer.placeholders), tuple(meta[:2] for meta in metas))


def decode(message: Tensor, values: Sequence[object] = (), *, copy: bool = True) -> Any:
    """The value. Without `copy` its tensors are the message's memory, which must have no other
    reader."""
    length, kind, _ = _preamble(message)
    assert kind == VALUE, "a failure has no value"
    header = _header(message, length)
    offsets, _ = _offsets(length, header.tensors)
    tensors: list[Tensor] = []
    for (dtype, shape, device), offset in zip(header.tensors, offsets):
        tensor = _piece(message, offset, dtype, shape)
        if device == "cuda" and torch.cuda.is_available():
            tensor = tensor.cuda()
        elif copy:
            tensor = tensor.clone()
        tensors.append(tensor)
    return _Unpickler(header.body, tensors, values).load()


def encode_failure(error: DaftError) -> Tensor:
    kind = next((kind for kind, cls in FAILURES.items() if isinstance(error, cls)), 3)
    return encode(error.failure, kind=kind).message


def failure_of(message: Tensor) -> DaftError | None:
    """The error that a message carries, if it is one."""
    length, kind, _ = _preamble(message)
    if kind == VALUE:
        return None
    failure = _Unpickler(_header(message, length).body, (), ()).load()
    assert isinstance(failure, Failure)
    return FAILURES[kind](failure)


def is_failure(message: Tensor) -> bool:
    return _preamble(message)[1] != VALUE


def has_tensors(message: Tensor) -> bool:
    return _preamble(message)[2] > 0


def _preamble(message: Tensor) -> tuple[int, int, int]:
    return struct.unpack_from("3q", message[:PREAMBLE].numpy())  # pyright: ignore


def _header(message: Tensor, length: int) -> _Header:
    header = pickle.loads(message[PREAMBLE : PREAMBLE + length].numpy().tobytes())
    assert isinstance(header, _Header)
    return header


def _offsets(
    length: int, metas: Sequence[tuple[torch.dtype, tuple[int, ...], str]]
) -> tuple[list[int], int]:
    """Where each tensor's bytes begin, and the length of the message."""
    at, found = _aligned(PREAMBLE + length), list[int]()
    for dtype, shape, _ in metas:
        found.append(at)
        at = _aligned(at + torch.Size(shape).numel() * dtype.itemsize)
    return found, at


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def _piece(message: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return message[offset : offset + nbytes].view(dtype).view(shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is what its bytes say; other tensors pickle themselves."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )
