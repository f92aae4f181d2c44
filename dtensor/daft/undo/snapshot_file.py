"""Keep snapshots of a host's values in a shared-memory file that survives the host's process.

    store = SnapshotFile.create(folder, (0, 1))          # of the host of ranks 0 and 1
    record = store.keep(7, {(0, "w"): w}, {}, ())        # after change 7; w: f32[4]
    store.states(6, 7)                                   # it can restore states 6 and 7
    SnapshotFile.open(folder, (0, 1)).found()            # in the next process: (6, 7, [records])

The sparse file in /dev/shm has a page with the oldest and newest state, a table of 64-byte entries,
and regions. A record has one entry and up to three regions: its tensors, their names and shapes
(JSON), and other values (pickle). An entry's number is written last and cleared before its memory
is reused, so each record that a later process finds is complete, whenever this process dies. Memory
is reserved before it is written: `keep` raises OSError if there is none, rather than SIGBUS.
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
from dtensor.daft.undo.snapshots import Key, Keys, SnapshotRecord, SnapshotStore, can_copy, copy_all
from dtensor.numerics import DTYPES, dtype_name

STEP = 64
"""Alignment of values in a region, in bytes."""
_PAGE = mmap.PAGESIZE
_MAGIC = 0x3153_5041_4E53_5444
_SIZE = 1 << 62  # length of the file; sparse, so it takes no memory
_ENTRY = 8  # int64 numbers in an entry
_DATA = 1 << 27  # offset of the first region, after space for two million entries
_MAPPED = 1 << 30  # bytes of one mapping: address space, not memory
_LARGE = 1 << 16  # bytes; before such a region is allocated, unused memory is freed
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_UNUSED = 0  # the number of an unused entry


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in the file."""

    begin: int
    nbytes: int


@dataclass(slots=True)
class RecordPlace:
    """Where a record is in the file: the index of its entry, and its regions."""

    entry: int
    views: dict[Key, torch.Tensor]
    data: Extent
    description: Extent
    description_bytes: int
    pickled: Extent | None = None


class SnapshotFile(SnapshotStore):
    """Copies in shared memory, for the process that replaces this one."""

    outlives = True

    def __init__(self, descriptor: int) -> None:
        """Map the head of an open file. ``descriptor``: of the file, which this object closes."""
        self._descriptor = descriptor
        self._windows: list[tuple[range, mmap.mmap, torch.Tensor]] = []
        self._head = memoryview(mmap.mmap(descriptor, _DATA)).cast("q")
        self._num_entries = 0
        self._free_entries: list[int] = []
        self._end = _DATA
        self._small_page = range(0)  # the unused part of the page that small regions share
        self._free_regions: dict[int, list[Extent]] = {}  # by size
        self._reusable: dict[Keys, list[RecordPlace]] = {}  # dropped records of tensors, by keys

    @staticmethod
    def path(folder: Path, ranks: Sequence[int]) -> Path:
        return folder / f"ranks-{ranks[0]}-{ranks[-1]}"

    @staticmethod
    def beside(folder: Path, ranks: Sequence[int]) -> Path:
        """Return the path of a file that is not complete yet."""
        return SnapshotFile.path(folder, ranks).with_suffix(".part")

    @staticmethod
    def create(folder: Path, ranks: Sequence[int], *, beside: bool = False) -> SnapshotFile:
        """Create the file of these ranks. Raises FileExistsError if it exists. ``beside``: create
        it under the path of incomplete files, and remove an older one there."""
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
        """Open the file of a dead process. Raises FileNotFoundError if there is none, OSError if
        it belongs to another user or is not a snapshot file."""
        path = SnapshotFile.path(folder, ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not is_private or status.st_size != _SIZE:
            os.close(descriptor)
            raise OSError(f"{path} is not a snapshot file that only this user can access.")
        store = SnapshotFile(descriptor)
        if store._head[0] != _MAGIC:
            store.close()
            raise OSError(f"{path} is not an initialized snapshot file.")
        return store

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the file occupies."""
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
        """Store a record, in the memory of a dropped record with the same keys if there is one. Its
        number is written last, so a reader finds the complete record or none."""
        spares = [] if others or gone else self._reusable.get(tuple(tensors), [])
        place = spares.pop() if spares else None
        if place is not None and not can_copy(tensors, place.views, device=False):
            self._release(place)
            place = None
        if place is None:
            place = self._allocate_record(tensors, gone)
        copy_all(place.views.values(), tensors.values())
        if others:
            data = _pickle(dict(others))
            place.pickled = self._allocate(len(data))
            self._region(place.pickled)[: len(data)] = _as_tensor(data)
        pickled = place.pickled or Extent(0, 0)
        description = place.description
        at = _PAGE // 8 + place.entry * _ENTRY
        numbers = (
            place.data.begin,
            place.data.nbytes,
            description.begin,
            description.nbytes,
            place.description_bytes,
        )
        self._head[at + 1 : at + _ENTRY] = array("q", (*numbers, pickled.begin, pickled.nbytes))
        self._head[at] = 2 * number + before
        return SnapshotRecord(number, place.views, dict(others), gone, before, place)

    def drop(self, record: SnapshotRecord) -> None:
        """Mark the record's entry as unused, and keep its memory for other records."""
        place = record.place
        assert isinstance(place, RecordPlace)
        self._head[_PAGE // 8 + place.entry * _ENTRY] = _UNUSED
        if len(place.views) > 1 and not record.others and not record.gone:
            self._reusable.setdefault(tuple(place.views), []).append(place)
        else:
            self._release(place)

    def states(self, oldest: int, newest: int) -> None:
        self._head[2] = oldest
        self._head[1] = newest

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        """Read the records that a dead process left, and release the space of all others. Return
        the oldest and the newest restorable state, and the records, oldest first."""
        newest, oldest = self._head[1], self._head[2]
        self._num_entries = self._head[3]
        records: list[SnapshotRecord] = []
        used: list[Extent] = []
        for entry in range(self._num_entries):
            at = _PAGE // 8 + entry * _ENTRY
            stored_number, *numbers = self._head[at : at + _ENTRY].tolist()
            number, before = divmod(stored_number, 2)
            if not 0 < number <= newest:
                self._head[at] = _UNUSED
                self._free_entries.append(entry)
                continue
            data, description, pickled = (
                Extent(*numbers[:2]),
                Extent(*numbers[2:4]),
                Extent(*numbers[5:7]),
            )
            used += [data, description, pickled]
            place = RecordPlace(
                entry, {}, data, description, numbers[4], pickled if pickled.nbytes else None
            )
            records.append(self._read_record(number, bool(before), place))
        self._end = max((r.begin + r.nbytes for r in used), default=_DATA)
        self._release_unused(used)
        records.sort(key=lambda record: (record.number, record.before))
        return oldest, newest, records

    def close(self) -> None:
        """Close the file without deleting it. Existing tensors that are views of it stay valid."""
        self._windows.clear()
        self._reusable.clear()
        os.close(self._descriptor)

    def _allocate_record(self, tensors: Mapping[Key, torch.Tensor], gone: Keys) -> RecordPlace:
        """Allocate a record for such values, and write their names, dtypes and shapes."""
        described = [
            (*key, dtype_name(value.dtype), list(value.shape)) for key, value in tensors.items()
        ]
        text = json.dumps([described, gone]).encode()
        description = self._allocate(len(text))
        self._region(description)[: len(text)] = _as_tensor(text)
        data = self._allocate(nbytes_of(tensors.values()))
        views = self._views(data, described)
        return RecordPlace(self._allocate_entry(), views, data, description, len(text))

    def _read_record(self, number: int, before: bool, place: RecordPlace) -> SnapshotRecord:
        """Read a record of a dead process. Its tensors are views of the file."""
        text = self._region(place.description)[: place.description_bytes].numpy().tobytes()
        described, gone = json.loads(text)
        place.views = self._views(place.data, described)
        others: dict[Key, object] = {}
        if place.pickled is not None:
            others = pickle.loads(self._region(place.pickled).numpy().tobytes())
        absent = tuple((rank, name) for rank, name in gone)
        return SnapshotRecord(number, place.views, others, absent, before, place)

    def _views(
        self, data: Extent, described: Iterable[tuple[int, str, str, list[int]]]
    ) -> dict[Key, torch.Tensor]:
        """Return the tensors of a region. ``described``: (rank, name, dtype, shape) of each."""
        window, begin = self._region(data), 0
        views: dict[Key, torch.Tensor] = {}
        for rank, name, word, shape in described:
            dtype = DTYPES[word]
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            views[rank, name] = window[begin:end].view(dtype).view(shape)
            begin = _padded(end)
        return views

    # -- memory -----------------------------------------------------------------------------------

    def _allocate_entry(self) -> int:
        """Return the index of an unused entry, adding a page of entries if there is none."""
        if not self._free_entries:
            fresh = range(self._num_entries, self._num_entries + _PAGE // (8 * _ENTRY))
            self._reserve(_PAGE + self._num_entries * 8 * _ENTRY, _PAGE)
            self._num_entries = self._head[3] = fresh.stop
            self._free_entries += reversed(fresh)
        return self._free_entries.pop()

    def _allocate(self, nbytes: int) -> Extent:
        """Return a region of at least `nbytes` bytes: a free one of the same size, or a new one."""
        size = region_bytes(nbytes)
        if free := self._free_regions.get(size):
            return free.pop()
        if size >= _LARGE:
            self._release_pages()
        if size < _PAGE and len(self._small_page) < size:
            page = self._allocate(_PAGE)
            self._small_page = range(page.begin, page.begin + _PAGE)
        if size < _PAGE:
            begin, self._small_page = (
                self._small_page.start,
                range(self._small_page.start + size, self._small_page.stop),
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
        """Reserve memory for a range of the file. Raises OSError if there is none."""
        try:
            os.posix_fallocate(self._descriptor, begin, nbytes)
        except OSError as error:
            file_system = os.fstatvfs(self._descriptor)
            error.add_note(
                f"A snapshot needs {nbytes:,} B more in its file system, beside its "
                f"{self.nbytes:,} B; {file_system.f_bavail * file_system.f_frsize:,} B are free.\n"
                f"fix: more room there (mount -o remount,size=... /dev/shm), or snapshot_every=None"
            )
            raise

    def _release(self, place: RecordPlace) -> None:
        """Make the memory and the entry of a record available to other records."""
        for region in (place.data, place.description, place.pickled):
            if region is not None:
                self._free_regions.setdefault(region.nbytes, []).append(region)
        self._free_entries.append(place.entry)

    def _release_pages(self) -> None:
        """Return whole unused pages to the system."""
        for places in self._reusable.values():
            for place in places:
                self._release(place)
        self._reusable.clear()
        for size in [size for size in self._free_regions if size >= _PAGE]:
            for region in self._free_regions.pop(size):
                memory, offset = self._window(region)
                memory.madvise(mmap.MADV_REMOVE, offset, region.nbytes)

    def _release_unused(self, used: Iterable[Extent]) -> None:
        """Return all pages outside the ``used`` regions to the system."""
        end = _DATA
        for region in sorted(used, key=lambda r: r.begin):
            begin = -(-end // _PAGE) * _PAGE
            if region.begin - begin >= _PAGE:
                page_bytes = (region.begin - begin) // _PAGE * _PAGE
                with mmap.mmap(self._descriptor, page_bytes, offset=begin) as memory:
                    memory.madvise(mmap.MADV_REMOVE, 0, page_bytes)
            end = max(end, region.begin + region.nbytes)

    def _window(self, region: Extent) -> tuple[mmap.mmap, int]:
        memory, offset, _ = self._map(region)
        return memory, offset

    def _region(self, region: Extent) -> torch.Tensor:
        """Return the memory of a region as a tensor u8[nbytes]."""
        _, offset, memory_view = self._map(region)
        return memory_view[offset : offset + region.nbytes]

    def _map(self, region: Extent) -> tuple[mmap.mmap, int, torch.Tensor]:
        """Map a region of the file, if no window has it yet. Return the mapping, the region's
        offset in it, and the mapping as a tensor u8[n]."""
        end = region.begin + region.nbytes
        for window, memory, memory_view in self._windows:
            if window.start <= region.begin <= end <= window.stop:
                return memory, region.begin - window.start, memory_view
        begin = region.begin // _PAGE * _PAGE
        window = range(begin, max(end, begin + _MAPPED))
        memory = mmap.mmap(self._descriptor, len(window), offset=begin)
        memory_view = torch.frombuffer(memory, dtype=torch.uint8)
        self._windows.append((window, memory, memory_view))
        return memory, region.begin - begin, memory_view


def nbytes_of(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes that these values take in a record."""
    return sum(_padded(value.numel() * value.dtype.itemsize) for value in values)


def region_bytes(nbytes: int) -> int:
    """Return the bytes allocated for `nbytes`: whole pages, or a power of two below a page."""
    if nbytes >= _PAGE:
        return -(-nbytes // _PAGE) * _PAGE
    return max(STEP, 1 << (nbytes - 1).bit_length()) if nbytes else STEP


def _padded(nbytes: int) -> int:
    return -(-nbytes // STEP) * STEP


def _pickle(others: dict[Key, object]) -> bytes:
    """Pickle the values. If pickle fails, use the backend's pickler, which includes classes and
    functions of the user's script that the next process cannot import."""
    try:
        return pickle.dumps(others, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        PICKLERS[0](file).dump(others)
        return file.getvalue()


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _advise(memory: mmap.mmap, advice: int, begin: int, nbytes: int) -> None:
    """Give the kernel advice; do nothing if it is too old to know it."""
    try:
        memory.madvise(advice, begin, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
