"""Copies of a host's values in a file that outlives its process, for the process that replaces it.

    store = SnapshotFile.create(folder, (0, 1))          # of the host of ranks 0 and 1
    record = store.keep(7, {(0, "w"): w}, {}, ())        # after change 7; w: f32[4]
    store.states(6, 7)                                   # it can restore states 6 and 7
    SnapshotFile.open(folder, (0, 1)).found()            # elsewhere, later: (6, 7, [records])

The folder is the launch's own, in memory (/dev/shm): other file systems do not allow files of that
length. The file is sparse: a page with the present states; a table of entries, 64 bytes each, which
give a record's place in eight numbers; then regions. A record has one region for its tensors, end
to end in steps of `STEP` bytes, one that describes them (JSON), and, if there are values other than
tensors, one for those (a pickle: the folder is 0700, and another user's file is refused).

Invariants: an entry's number is written last, and removed before its memory is reused; so each
record that another process finds is whole, at whatever instruction this process dies. Stores of one
thread reach shared memory in their order, and the kernel keeps it when the process is killed; it is
lost when the machine goes down. Memory is reserved before it is written: if there is none, `keep`
raises `OSError`, and no process is killed by SIGBUS. Pages are faulted in when they are reserved,
and records of equal keys reuse the same ones in turn, so that a copy costs only memory bandwidth.
"""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import pickle
import stat
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dtensor.daft.remote_exceptions import PICKLERS
from dtensor.daft.undo.snapshots import Key, Keys, SnapshotRecord, SnapshotStore, alike, copy_all
from dtensor.numerics import DTYPES, dtype_name

STEP = 64
"""Bytes: a value begins at a multiple."""
_PAGE = mmap.PAGESIZE
_MAGIC = 0x3153_5041_4E53_5444
_SIZE = 1 << 62  # of the file; a limit of offsets, not of memory
_ENTRY = 8  # numbers
_DATA = 1 << 27  # the begin of regions, after space for two million entries
_MAPPED = 1 << 30  # at once, of addresses and not of memory
_LARGE = 1 << 16  # bytes of a region for which unused memory is freed first
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_NOTHING = 0  # the number of an entry that is none


@dataclass(frozen=True, slots=True)
class Extent:
    begin: int
    nbytes: int


@dataclass(slots=True)
class RecordPlace:
    """The place of a record: its entry, its contents, and their regions."""

    entry: int
    views: dict[Key, torch.Tensor]
    data: Extent
    told: Extent
    told_bytes: int
    more: Extent | None = None


class SnapshotFile(SnapshotStore):
    outlives = True

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._windows: list[tuple[range, mmap.mmap, torch.Tensor]] = []
        self._head = memoryview(mmap.mmap(descriptor, _DATA)).cast("q")
        self._num_entries = 0
        self._free_entries: list[int] = []
        self._end = _DATA
        self._small = range(0)  # the rest of a page for small regions
        self._free: dict[int, list[Extent]] = {}  # by size
        self._spare: dict[Keys, list[RecordPlace]] = {}

    @staticmethod
    def path(folder: Path, ranks: Sequence[int]) -> Path:
        return folder / f"ranks-{ranks[0]}-{ranks[-1]}"

    @staticmethod
    def beside(folder: Path, ranks: Sequence[int]) -> Path:
        """The path of a file that is not complete yet."""
        return SnapshotFile.path(folder, ranks).with_suffix(".part")

    @staticmethod
    def create(folder: Path, ranks: Sequence[int], *, beside: bool = False) -> SnapshotFile:
        """`FileExistsError` if there is one; with `beside`, an incomplete one is removed."""
        path = SnapshotFile.path(folder, ranks)
        if beside:
            path = SnapshotFile.beside(folder, ranks)
            path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        os.ftruncate(descriptor, _SIZE)
        os.posix_fallocate(descriptor, 0, _PAGE)
        store = SnapshotFile(descriptor)
        store._head[0] = _MAGIC
        return store

    @staticmethod
    def open(folder: Path, ranks: Sequence[int]) -> SnapshotFile:
        """The file of a dead process. `FileNotFoundError` if there is none, `OSError` if it belongs
        to another user or is no such file."""
        path = SnapshotFile.path(folder, ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not is_private or status.st_size != _SIZE:
            os.close(descriptor)
            raise OSError(f"{path} is no file of snapshots of this user's alone.")
        store = SnapshotFile(descriptor)
        if store._head[0] != _MAGIC:
            store.close()
            raise OSError(f"{path} is no file of snapshots that was begun.")
        return store

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the file takes."""
        return os.fstat(self._descriptor).st_blocks * 512

    # -- records ----------------------------------------------------------------------------------

    def keep(
        self,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        *,
        before: bool,
    ) -> SnapshotRecord:
        spares = [] if others or gone else self._spare.get(tuple(tensors), [])
        place = spares.pop() if spares else None
        if place is not None and not alike(tensors, place.views, device=False):
            self._give_up(place)
            place = None
        if place is None:
            place = self._placed(tensors, gone)
        copy_all(place.views.values(), tensors.values())
        if others:
            data = _pickled(dict(others))
            place.more = self._take(len(data))
            self._bytes(place.more)[: len(data)] = _tensor(data)
        more = place.more or Extent(0, 0)
        told = place.told
        at = _PAGE // 8 + place.entry * _ENTRY
        numbers = place.data.begin, place.data.nbytes, told.begin, told.nbytes, place.told_bytes
        self._head[at + 1 : at + _ENTRY] = array("q", (*numbers, more.begin, more.nbytes))
        self._head[at] = 2 * number + before
        return SnapshotRecord(number, place.views, dict(others), gone, before, place)

    def drop(self, record: SnapshotRecord) -> None:
        place = record.place
        assert isinstance(place, RecordPlace)
        self._head[_PAGE // 8 + place.entry * _ENTRY] = _NOTHING
        if len(place.views) > 1 and not record.others and not record.gone:
            self._spare.setdefault(tuple(place.views), []).append(place)
        else:
            self._give_up(place)

    def states(self, oldest: int, newest: int) -> None:
        self._head[2] = oldest
        self._head[1] = newest

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        newest, oldest = self._head[1], self._head[2]
        self._num_entries = self._head[3]
        records: list[SnapshotRecord] = []
        used: list[Extent] = []
        for entry in range(self._num_entries):
            at = _PAGE // 8 + entry * _ENTRY
            told_number, *numbers = self._head[at : at + _ENTRY].tolist()
            number, before = divmod(told_number, 2)
            if not 0 < number <= newest:
                self._head[at] = _NOTHING
                self._free_entries.append(entry)
                continue
            data, told, more = Extent(*numbers[:2]), Extent(*numbers[2:4]), Extent(*numbers[5:7])
            used += [data, told, more]
            place = RecordPlace(entry, {}, data, told, numbers[4], more if more.nbytes else None)
            records.append(self._record(number, bool(before), place))
        self._end = max((r.begin + r.nbytes for r in used), default=_DATA)
        self._forget_all_but(used)
        records.sort(key=lambda record: (record.number, record.before))
        return oldest, newest, records

    def close(self) -> None:
        """Views stay while they are used; the file stays."""
        self._windows.clear()
        self._spare.clear()
        os.close(self._descriptor)

    def _placed(self, tensors: Mapping[Key, torch.Tensor], gone: Keys) -> RecordPlace:
        """Allocate a record of such values, and write its description."""
        named = [
            (*key, dtype_name(value.dtype), list(value.shape)) for key, value in tensors.items()
        ]
        text = json.dumps([named, gone]).encode()
        told = self._take(len(text))
        self._bytes(told)[: len(text)] = _tensor(text)
        data = self._take(nbytes_of(tensors.values()))
        views = self._views(data, named)
        return RecordPlace(self._entry(), views, data, told, len(text))

    def _record(self, number: int, before: bool, place: RecordPlace) -> SnapshotRecord:
        text = self._bytes(place.told)[: place.told_bytes].numpy().tobytes()
        named, gone = json.loads(text)
        place.views = self._views(place.data, named)
        others: dict[Key, object] = {}
        if place.more is not None:
            others = pickle.loads(self._bytes(place.more).numpy().tobytes())
        absent = tuple((rank, name) for rank, name in gone)
        return SnapshotRecord(number, place.views, others, absent, before, place)

    def _views(
        self, data: Extent, named: Iterable[tuple[int, str, str, list[int]]]
    ) -> dict[Key, torch.Tensor]:
        window, begin = self._bytes(data), 0
        views: dict[Key, torch.Tensor] = {}
        for rank, name, word, shape in named:
            dtype = DTYPES[word]
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            views[rank, name] = window[begin:end].view(dtype).view(shape)
            begin = _filled(end)
        return views

    # -- memory -----------------------------------------------------------------------------------

    def _entry(self) -> int:
        if not self._free_entries:
            fresh = range(self._num_entries, self._num_entries + _PAGE // (8 * _ENTRY))
            self._reserve(_PAGE + self._num_entries * 8 * _ENTRY, _PAGE)
            self._num_entries = self._head[3] = fresh.stop
            self._free_entries += reversed(fresh)
        return self._free_entries.pop()

    def _take(self, nbytes: int) -> Extent:
        size = region_bytes(nbytes)
        if free := self._free.get(size):
            return free.pop()
        if size >= _LARGE:
            self._give_back()
        if size < _PAGE and len(self._small) < size:  # small ones share pages
            page = self._take(_PAGE)
            self._small = range(page.begin, page.begin + _PAGE)
        if size < _PAGE:
            begin, self._small = (
                self._small.start,
                range(self._small.start + size, self._small.stop),
            )
            return Extent(begin, size)
        begin = -(-self._end // _PAGE) * _PAGE
        self._reserve(begin, size)
        self._end = begin + size
        region = Extent(begin, size)
        memory, offset = self._window(region)
        _advise(memory, _POPULATE_WRITE, offset, size)
        return region

    def _reserve(self, begin: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, begin, nbytes)
        except OSError as error:
            there = os.fstatvfs(self._descriptor)
            error.add_note(
                f"A snapshot needs {nbytes:,} B more in its file system, beside its "
                f"{self.nbytes:,} B; {there.f_bavail * there.f_frsize:,} B are free.\n"
                f"fix: more room there (mount -o remount,size=... /dev/shm), or snapshot_every=None"
            )
            raise

    def _give_up(self, place: RecordPlace) -> None:
        for region in (place.data, place.told, place.more):
            if region is not None:
                self._free.setdefault(region.nbytes, []).append(region)
        self._free_entries.append(place.entry)

    def _give_back(self) -> None:
        """Free whole unused pages."""
        for places in self._spare.values():
            for place in places:
                self._give_up(place)
        self._spare.clear()
        for size in [size for size in self._free if size >= _PAGE]:
            for region in self._free.pop(size):
                memory, offset = self._window(region)
                memory.madvise(mmap.MADV_REMOVE, offset, region.nbytes)

    def _forget_all_but(self, used: Iterable[Extent]) -> None:
        end = _DATA
        for region in sorted(used, key=lambda r: r.begin):
            begin = -(-end // _PAGE) * _PAGE
            if region.begin - begin >= _PAGE:
                page_bytes = (region.begin - begin) // _PAGE * _PAGE
                with mmap.mmap(self._descriptor, page_bytes, offset=begin) as memory:
                    memory.madvise(mmap.MADV_REMOVE, 0, page_bytes)
            end = max(end, region.begin + region.nbytes)

    def _window(self, region: Extent) -> tuple[mmap.mmap, int]:
        memory, offset, _ = self._mapped(region)
        return memory, offset

    def _bytes(self, region: Extent) -> torch.Tensor:
        """u8[nbytes]"""
        _, offset, there = self._mapped(region)
        return there[offset : offset + region.nbytes]

    def _mapped(self, region: Extent) -> tuple[mmap.mmap, int, torch.Tensor]:
        end = region.begin + region.nbytes
        for where, memory, there in self._windows:
            if where.start <= region.begin <= end <= where.stop:
                return memory, region.begin - where.start, there
        begin = region.begin // _PAGE * _PAGE
        where = range(begin, max(end, begin + _MAPPED))
        memory = mmap.mmap(self._descriptor, len(where), offset=begin)
        there = torch.frombuffer(memory, dtype=torch.uint8)
        self._windows.append((where, memory, there))
        return memory, region.begin - begin, there


def nbytes_of(values: Iterable[torch.Tensor]) -> int:
    """Bytes of the region of a record with these values."""
    return sum(_filled(value.numel() * value.dtype.itemsize) for value in values)


def region_bytes(nbytes: int) -> int:
    """Bytes allocated for `nbytes`: whole pages, or a power of two."""
    if nbytes >= _PAGE:
        return -(-nbytes // _PAGE) * _PAGE
    return max(STEP, 1 << (nbytes - 1).bit_length()) if nbytes else STEP


def _filled(nbytes: int) -> int:
    return -(-nbytes // STEP) * STEP


def _pickled(others: dict[Key, object]) -> bytes:
    """A pickle; if that fails, one of the backend's pickler: with classes and functions of the
    user's script, which the next process could not import."""
    try:
        return pickle.dumps(others, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        PICKLERS[0](file).dump(others)
        return file.getvalue()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _advise(memory: mmap.mmap, advice: int, begin: int, nbytes: int) -> None:
    """Advice that an older kernel may not support."""
    try:
        memory.madvise(advice, begin, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
