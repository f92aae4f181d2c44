"""The actors that share memory with an actor, and how they open each other's segments.

    own = SharedMemoryPeers.create(own_place(node), 0, (0, 1))  # actor 0 has rank 0, actor 1 rank 1
    seen = own.look(segment_addresses)            # the `segment_address` of all actors; "0 1"
    own.settle(all_seen)                          # `all_seen`: the results of all actors' `look`
    own.shares(((0, 1), "tp", "collective"))      # True

A segment has a nonce, a flag that its actor has closed, a semaphore for each pair of a rank of the
actor and another rank, the windows of programs (`same_host.py`), and a directory of the windows.
Invariant: actors of one place share memory only if each could open the segments of all.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.transports.segments import Segment, SegmentAddress, calls
from dtensor.daft.ray.transports.slots import LINE

CLOSED = "The connections of this actor are closed."
FLAG = LINE // 2
"""The offset of a flag. In the first line of a segment: the actor has closed. In the first line of
a window: the actor has unloaded the program."""
_DIRECTORY = 1 << 61  # the offset of the directory: the middle of a segment
_ENTRY_BYTES = 8


def own_place(node: str) -> str:
    """Return the place of this process: a machine, its boot, and a pid namespace. Processes of one
    place see each other in `/proc`. `node`: Ray's name of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{node} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc: `SharedMemoryPeers.create` returns None there
        return node


class SharedMemoryPeers:
    """The actors that share memory with actor `index`: their open segments, and its own segment.
    `host_of`: the actor of each rank."""

    def __init__(self, segment: Segment, index: int, host_of: Sequence[int]) -> None:
        self.index = index
        self.host_of: tuple[int, ...] = tuple(host_of)
        self.segments: dict[int, Segment] = {index: segment}
        self.heads = {index: segment.map(0, self.head_bytes(index))}
        self.report_wait: Callable[[int], None] | None = None
        self._same_place = {index}
        for rank, host in enumerate(host_of):
            for other in range(len(host_of)) if host == index else ():
                calls().initialise(self.inbox(rank, other), 1, 0)

    @staticmethod
    def create(place: str, index: int, host_of: Sequence[int]) -> SharedMemoryPeers | None:
        """Create the actor's segment. Return None if the system lacks a needed feature."""
        try:
            segment = Segment.create(place)
        except (AttributeError, OSError):  # not Linux, or another C library
            return None
        return SharedMemoryPeers(segment, index, host_of)

    @property
    def segment_address(self) -> str:
        """The address of the actor's segment, as JSON."""
        return json.dumps(asdict(self.segments[self.index].segment_address))

    def look(self, segment_addresses: Sequence[str]) -> str:
        """Open the segments of this place, given the addresses of all actors, "" if an
        actor has none. Return the actors whose segments are open, as in "0 1"."""
        place = self.segments[self.index].segment_address.place
        addresses_by_actor = {
            i: SegmentAddress(**json.loads(segment_address))
            for i, segment_address in enumerate(segment_addresses)
            if segment_address
        }
        self._same_place = {
            i for i, segment_address in addresses_by_actor.items() if segment_address.place == place
        }
        for i in sorted(self._same_place - {self.index}):
            segment = Segment.open(addresses_by_actor[i])
            if segment is not None:
                self.segments[i] = segment
                self.heads[i] = segment.map(0, self.head_bytes(i))
        return " ".join(map(str, sorted(self.segments)))

    def settle(self, results: Sequence[str]) -> bool:
        """Return whether memory is shared, given the results of all actors' `look`. If not,
        close."""
        opened = [set(map(int, text.split())) for text in results]
        same_place = self._same_place
        if len(same_place) > 1 and all(opened[i] >= same_place for i in same_place):
            return True
        self.close()
        return False

    def shares(self, key: Key) -> bool:
        """Return whether the members of a key are on different actors that all share memory."""
        actors = {self.host_of[rank] for rank in key[0]}
        return len(actors) == len(key[0]) > 1 and actors <= self.segments.keys()

    def head_bytes(self, actor: int) -> int:
        return whole_pages(LINE * (1 + self.host_of.count(actor) * len(self.host_of)))

    def inbox(self, rank: int, other: int) -> int:
        """Return the semaphore that counts the starts of rank `other` which concern `rank`."""
        actor = self.host_of[rank]
        row = self.host_of[:rank].count(actor) * len(self.host_of)
        return self.heads[actor].address + LINE * (1 + row + other)

    def announce(self, number: int, begin: int) -> None:
        """Publish where this actor's window of a program begins."""
        offset = _DIRECTORY + _ENTRY_BYTES * number
        self.segments[self.index].write(offset, begin.to_bytes(_ENTRY_BYTES, "little"))

    def announced(self, actor: int, number: int) -> int:
        """Return where an actor's window of a program begins, 0 if it has none."""
        offset = _DIRECTORY + _ENTRY_BYTES * number
        return int.from_bytes(self.segments[actor].read(offset, _ENTRY_BYTES), "little")

    def check(self, rank: int) -> None:
        """Raise RuntimeError if a rank can make no further start."""
        if not self.segments:
            raise RuntimeError(CLOSED)
        actor = self.host_of[rank]
        if self.segments[actor].ended:
            raise RuntimeError(f"The process of rank {rank} has ended.")
        if self.heads[actor].bytes[FLAG]:
            raise RuntimeError(f"The connections of rank {rank}'s actor are closed.")

    def tell(self, rank: int) -> None:
        """Record that this actor waits for a rank, -1 if it is unknown for which."""
        if self.report_wait is not None:
            self.report_wait(rank)

    def close(self) -> None:
        """Close all segments, so that actors that wait for this one fail."""
        if self.segments:
            self.heads[self.index].bytes[FLAG] = 1
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self.heads.clear()


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
