"""Pack an optimizer's state of one parameter into one tensor of bytes, and unpack it.

    blob, _ = pack({"step": 3, "Q": [q0, q1]}, device)  # u8[n]: a header, then q0 and q1
    unpack(blob)                                # the state again, in memory of its own
    packed = PackedState.of(blob.clone())       # the tensors of packed.state are views of the blob
    packed.state["Q"][0].mul_(2)
    blob, _ = packed.repack(packed.state)       # the same blob, unless a tensor was replaced

A state is any nesting of containers, numbers, picklable objects and dense tensors. The blob begins
with the length of the header and the place of the body. The header has the pickled structure, with
the number of each tensor in its place. The body has one region for each storage. So tensors keep
their strides, and tensors that share memory still share it. Tensors on another device than the
blob, such as steps on the CPU, lie in the header.
"""

from __future__ import annotations

import io
import pickle
import struct
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function

ALIGNMENT = 64
"""Bytes: each region begins at a multiple of it."""
SLACK = 64
"""Bytes of the header that a longer header may use, so that a number that grows moves no tensor."""
_PREFIX = struct.Struct("<qq")
_GRAIN = 16  # bytes: a region begins at a multiple of it in its storage, for views of any dtype


class _Region(NamedTuple):
    """A block of bytes of the body. ``begin``: its first byte in the body; -1: in the header."""

    begin: int
    nbytes: int


class _View(NamedTuple):
    """The form of one tensor. ``offset``: of its first element in the region, in elements."""

    region: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool

    def of(self, region: Tensor) -> Tensor:
        """Return the tensor as a view of the bytes of its region."""
        whole = region[: region.numel() // self.dtype.itemsize * self.dtype.itemsize]
        flat = whole.view(self.dtype)
        view = flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)
        if self.is_parameter:
            return Parameter(view, self.requires_grad)
        return view.requires_grad_() if self.requires_grad else view


@dataclass(frozen=True, slots=True)
class Layout:
    """The content of a header. ``structure``: the pickled state, with numbers in place of tensors;
    ``on_host``: the bytes of the regions in the header, by number; ``body``: the first byte of the
    body in the blob."""

    structure: bytes
    regions: tuple[_Region, ...]
    views: tuple[_View, ...]
    on_host: Mapping[int, bytes]
    header: bytes = b""
    body: int = 0

    @staticmethod
    def read(blob: Tensor) -> Layout:
        """Return the layout in a blob's header. Waits for the device."""
        length, body = _PREFIX.unpack(_bytes_of(blob[: _PREFIX.size]))
        header = _bytes_of(blob[_PREFIX.size : _PREFIX.size + length])
        structure, regions, views, on_host = pickle.loads(header)
        return Layout(structure, regions, views, on_host, header, body)

    def with_header(self) -> Layout:
        header = pickle.dumps((self.structure, self.regions, self.views, self.on_host))
        return replace(self, header=header, body=_aligned(_PREFIX.size + len(header) + SLACK))

    def region(self, blob: Tensor, number: int) -> Tensor:
        """Return the bytes of a region: a view of the blob, or a CPU tensor if it is on the
        host."""
        begin, nbytes = self.regions[number]
        if begin >= 0:
            return blob[self.body + begin : self.body + begin + nbytes]
        data = bytearray(self.on_host[number])
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(data, dtype=torch.uint8).clone() if data else empty


def pack(
    state: Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    on_host: Collection[str] = (),
    apart: Collection[int] = (),
) -> tuple[Tensor, Layout]:
    """Return the state as a 1-D uint8 tensor on ``device``, and its layout.

    ``on_host``: keys whose tensors are CPU tensors for the optimizer, whatever the device.
    ``apart``: addresses of storages that no tensor may share. Raises TypeError for tensors that are
    not dense, and for objects that cannot be pickled.
    """
    storages = _Storages(torch.device(device), on_host=on_host, apart=apart)
    return storages.packed(storages.layout(state))


def unpack(blob: Tensor, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the state in a blob, in memory of its own. Its tensors are on ``device``, except those
    that are on the CPU for the optimizer."""
    return PackedState.of(blob, copy_to=device).state


@dataclass(frozen=True, slots=True, eq=False)
class PackedState:
    """A blob and the state in it, whose ``tensors`` are views of the blob. ``forms``: their
    addresses, shapes and strides."""

    blob: Tensor
    layout: Layout
    state: dict[str, Any]
    tensors: Sequence[Tensor]
    forms: Sequence[object]

    @staticmethod
    def of(
        blob: Tensor, known: Layout | None = None, copy_to: torch.device | str | None = None
    ) -> PackedState:
        """Return the state in a blob. ``known``: the result of `Layout.read` for it, which saves a
        wait for the device. ``copy_to``: the device to which each region in the body is copied."""
        layout = known or Layout.read(blob)
        regions = [layout.region(blob, number) for number in range(len(layout.regions))]
        if copy_to is not None:
            regions = [
                region.to(copy_to if number not in layout.on_host else "cpu", copy=True)
                for number, region in enumerate(regions)
            ]
        tensors = [view.of(regions[view.region]) for view in layout.views]
        unpickler = pickle.Unpickler(io.BytesIO(layout.structure))
        unpickler.persistent_load = tensors.__getitem__
        return PackedState(blob, layout, unpickler.load(), tensors, list(map(_form, tensors)))

    def repack(
        self, state: Mapping[str, Any], apart: Collection[int] = ()
    ) -> tuple[Tensor, Layout]:
        """Return a blob with ``state``, the state of this object after a step, and its layout. It
        is the same blob, changed in place, unless the form of a tensor has changed or a tensor has
        moved within the blob. ``apart``: as in `pack`."""
        if self._is_unchanged(state):
            return self.blob, self.layout
        storages = _Storages(self.blob.device, within=self, apart=apart)
        layout = storages.layout(state)
        is_same = (layout.regions, layout.views) == (self.layout.regions, self.layout.views)
        fits = _PREFIX.size + len(layout.header) <= self.layout.body
        if not (is_same and fits and storages.stay_in_place()):
            return storages.packed(layout)
        layout = replace(layout, body=self.layout.body)
        storages.write(self.blob, layout, in_place=True)
        return self.blob, layout

    def _is_unchanged(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state has tensors alone, directly under its keys, all in place."""
        return (
            not self.layout.on_host
            and list(state) == list(self.state)
            and len(state) == len(self.tensors)
            and all(map(is_, state.values(), self.tensors))
            and list(map(_form, self.tensors)) == self.forms
        )


def _form(tensor: Tensor) -> object:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(slots=True, eq=False)
class _Storage:
    """The part of a storage that tensors of the state use: bytes ``begin`` to ``end``. ``tensor``:
    the one of the narrowest dtype. ``old``: the number of its region, if the storage is the blob
    ``within``."""

    tensor: Tensor
    on_host: bool
    old: int | None
    begin: int
    end: int

    def bytes(self) -> Tensor:
        itemsize = self.tensor.dtype.itemsize
        size, begin = (self.end - self.begin) // itemsize, self.begin // itemsize
        return self.tensor.detach().as_strided((size,), (1,), begin).view(torch.uint8)


@dataclass(slots=True, eq=False)
class _Storages:
    """The storages of the tensors of a state, in order. ``device``: of the blob. ``within``: a blob
    of which tensors may be views; there each region counts as a storage. ``apart``: as in
    `pack`."""

    device: torch.device
    on_host: Collection[str] = ()
    within: PackedState | None = None
    apart: Collection[int] = ()
    storages: list[_Storage] = field(default_factory=list[_Storage])

    def layout(self, state: Mapping[str, Any]) -> Layout:
        """Return the layout of a state, after finding the storages of its tensors."""
        structure, tensors = _pickled(state)
        forced = {id(state[key]) for key in self.on_host if key in state}
        numbers: dict[object, int] = {}
        positions: list[tuple[int, int]] = []  # of each tensor: its storage, its first byte there
        for tensor in tensors:
            key, old = self._key(tensor)
            begin, end = _span(tensor)
            number = numbers.setdefault(key, len(self.storages))
            if number == len(self.storages):
                on_host = id(tensor) in forced or tensor.device != self.device
                self.storages.append(_Storage(tensor, on_host, old, begin, end))
            storage = self.storages[number]
            if tensor.dtype.itemsize < storage.tensor.dtype.itemsize:
                storage.tensor = tensor
            storage.begin = min(storage.begin, begin - begin % _GRAIN)
            storage.end = max(storage.end, end)
            positions.append((number, begin))
        regions: list[_Region] = []
        at = 0
        for storage in self.storages:
            nbytes = storage.end - storage.begin
            regions.append(_Region(-1 if storage.on_host else at, nbytes))
            at += 0 if storage.on_host else _aligned(nbytes)
        views = tuple(
            _View(
                number,
                tensor.dtype,
                (begin - self.storages[number].begin) // tensor.dtype.itemsize,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.requires_grad,
                isinstance(tensor, Parameter),
            )
            for tensor, (number, begin) in zip(tensors, positions, strict=True)
        )
        on_host = {i: _bytes_of(s.bytes()) for i, s in enumerate(self.storages) if s.on_host}
        return Layout(structure, tuple(regions), views, on_host).with_header()

    def _key(self, tensor: Tensor) -> tuple[object, int | None]:
        """Return what identifies the tensor's storage, and the number of its region in ``within``
        if it is a view of that blob."""
        storage = tensor.untyped_storage()
        if not tensor.numel() or not storage.data_ptr():
            return id(tensor), None
        if storage.data_ptr() in self.apart:
            raise TypeError("the state of a parameter shares memory with the parameter")
        key = tensor.device, storage.data_ptr()
        if self.within is None or storage.data_ptr() != _start(self.within.blob):
            return key, None
        numbers = [i for i, (begin, _) in enumerate(self.within.layout.regions) if begin >= 0]
        begins = [self._first_byte(i) for i in numbers]
        old = numbers[bisect_right(begins, _span(tensor)[0]) - 1]
        return (*key, old), old

    def _first_byte(self, region: int) -> int:
        """Return the first byte of a region of ``within``, in the blob's storage."""
        assert self.within is not None
        begin = self.within.layout.regions[region].begin
        return int(self.within.blob.storage_offset()) + self.within.layout.body + begin

    def stay_in_place(self) -> bool:
        """Return whether each storage that lies in ``within`` is at the place of its region."""
        return all(
            storage.old is None
            or (storage.old == number and storage.begin == self._first_byte(number))
            for number, storage in enumerate(self.storages)
        )

    def packed(self, layout: Layout) -> tuple[Tensor, Layout]:
        """Return the storages in a new blob, and the layout."""
        sizes = (begin + _aligned(nbytes) for begin, nbytes in layout.regions if begin >= 0)
        size = layout.body + max(sizes, default=0)
        blob = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.write(blob, layout, in_place=False)
        return blob, layout

    def write(self, blob: Tensor, layout: Layout, *, in_place: bool) -> None:
        """Write the header, and the storages. ``in_place``: storages of ``within``, which is the
        blob, are not written."""
        data = bytearray(_PREFIX.pack(len(layout.header), layout.body) + layout.header)
        header = torch.frombuffer(data, dtype=torch.uint8)
        header = header.pin_memory() if blob.device.type == "cuda" else header
        blob[: len(data)].copy_(header, non_blocking=True)
        for number, storage in enumerate(self.storages):
            if not storage.on_host and not (in_place and storage.old is not None):
                layout.region(blob, number).copy_(storage.bytes())


class _Pickler(pickle.Pickler):
    """A pickler that replaces tensors by numbers, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.numbers:
            _check_tensor(obj)
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self.numbers[id(obj)]


def _pickled(state: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
    """Return the pickled structure of a state, and its tensors, each once. Raises TypeError for
    values that cannot be packed."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(dict(state))
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"the state of a parameter cannot be pickled: {error}") from error
    return file.getvalue(), pickler.tensors


def _check_tensor(tensor: Tensor) -> None:
    """Raise TypeError for a tensor that is not a plain dense leaf."""
    kind = type(tensor)
    if has_torch_function((tensor,)):
        raise TypeError(f"the state of a parameter has a {kind.__module__}.{kind.__qualname__}")
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    if not is_dense or (tensor.numel() and not _start(tensor)):
        raise TypeError(f"the state of a parameter has a tensor without dense memory: {kind}")
    if tensor.grad_fn is not None or tensor.is_conj() or tensor.is_neg():
        raise TypeError("the state of a parameter has a tensor with a lazy value or a gradient")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    begin = int(tensor.storage_offset()) * tensor.dtype.itemsize
    if not tensor.numel():
        return 0, 0
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (1 + sum(steps)) * tensor.dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(values: Tensor) -> bytes:
    return values.detach().cpu().numpy().tobytes()
