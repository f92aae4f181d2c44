"""The actors of a launch that share memory with one of them, and their rendezvous.

    own = SharedMemoryPeers.create(own_place(node), 0, (0, 1))  # actor 0, of rank 0; 1 of rank 1
    seen = own.look(cards)                                    # from the `own.card` of all: "0 1"
    own.settle(all_seen)                                      # True: they share, by the `look`s of
    all
    own.shares(((0, 1), "tp", "collective"))                  # True

Each actor has a segment. It begins with its nonce, a flag that its actor has closed, and for each
of its ranks and each rank a semaphore: the starts of the other that concern this one. They are made
before another process can open it. The windows of programs follow (`same_host.py`), and far behind
them a directory: by the program's number, the begin of its window.

Invariants: all agree on the actors that share: those of a *place*, a machine since its start and a
namespace of processes on it, if each of them could open all others' segments, else none of that
place. It does not import Ray, and knows no programs.
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
"""A byte of a first line, behind a segment's nonce: its actor has closed; behind a window's title:
its actor has unloaded the program."""
_DIRECTORY = 1 << 61  # in the middle of a segment
_ENTRY = 8  # bytes


def own_place(node: str) -> str:
    """The place in which processes share memory and see each other in `/proc`: a machine since its
    start, and a namespace of processes on it. `node`: Ray's name of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{node} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc: `SharedMemoryPeers.create` returns None there
        return node


class SharedMemoryPeers:
    """The neighbours of actor `index`; `host_of`: by rank, its actor."""

    def __init__(self, segment: Segment, index: int, host_of: Sequence[int]) -> None:
        self.index = index
        self.host_of: tuple[int, ...] = tuple(host_of)
        self.segments: dict[int, Segment] = {index: segment}
        self.heads = {index: segment.map(0, self.head_bytes(index))}
        self.told: Callable[[int], None] | None = None
        self._here = {index}
        for rank, host in enumerate(host_of):
            for other in range(len(host_of)) if host == index else ():
                calls().initialise(self.inbox(rank, other), 1, 0)

    @staticmethod
    def create(place: str, index: int, host_of: Sequence[int]) -> SharedMemoryPeers | None:
        """None if the system lacks a needed feature."""
        try:
            segment = Segment.create(place)
        except (AttributeError, OSError):  # not Linux, or another C library
            return None
        return SharedMemoryPeers(segment, index, host_of)

    @property
    def card(self) -> str:
        return json.dumps(asdict(self.segments[self.index].card))

    def look(self, cards: Sequence[str]) -> str:
        """Open the segments of this place, from the `cards` of all, "" for none. Returns those
        found."""
        place = self.segments[self.index].card.place
        cards_by_actor = {
            i: SegmentAddress(**json.loads(card)) for i, card in enumerate(cards) if card
        }
        self._here = {i for i, card in cards_by_actor.items() if card.place == place}
        for i in sorted(self._here - {self.index}):
            segment = Segment.open(cards_by_actor[i])
            if segment is not None:
                self.segments[i] = segment
                self.heads[i] = segment.map(0, self.head_bytes(i))
        return " ".join(map(str, sorted(self.segments)))

    def settle(self, seen: Sequence[str]) -> bool:
        """Whether any memory is shared, by the results of all `look`s; if not, this closes."""
        opened = [set(map(int, text.split())) for text in seen]
        if len(self._here) > 1 and all(opened[i] >= self._here for i in self._here):
            return True
        self.close()
        return False

    def shares(self, key: Key) -> bool:
        """Whether the key crosses actors that are all here."""
        actors = {self.host_of[rank] for rank in key[0]}
        return len(actors) == len(key[0]) > 1 and actors <= self.segments.keys()

    def head_bytes(self, actor: int) -> int:
        return whole_pages(LINE * (1 + self.host_of.count(actor) * len(self.host_of)))

    def inbox(self, rank: int, other: int) -> int:
        """The semaphore that counts the starts of `other` which concern `rank`."""
        actor = self.host_of[rank]
        row = self.host_of[:rank].count(actor) * len(self.host_of)
        return self.heads[actor].address + LINE * (1 + row + other)

    def announce(self, number: int, begin: int) -> None:
        """Publish the begin of its own window of a program."""
        where = _DIRECTORY + _ENTRY * number
        self.segments[self.index].write(where, begin.to_bytes(_ENTRY, "little"))

    def announced(self, actor: int, number: int) -> int:
        """The begin of an actor's window of a program; 0 if it has not loaded that."""
        where = _DIRECTORY + _ENTRY * number
        return int.from_bytes(self.segments[actor].read(where, _ENTRY), "little")

    def check(self, rank: int) -> None:
        """Raises if no start of this rank can come any more."""
        if not self.segments:
            raise RuntimeError(CLOSED)
        actor = self.host_of[rank]
        if self.segments[actor].ended:
            raise RuntimeError(f"The process of rank {rank} has ended.")
        if self.heads[actor].bytes[FLAG]:
            raise RuntimeError(f"The connections of rank {rank}'s actor are closed.")

    def tell(self, rank: int) -> None:
        """Publish that this actor waits for this rank; -1: it is unknown for which."""
        if self.told is not None:
            self.told(rank)

    def close(self) -> None:
        """Let the actors that wait for this one fail."""
        if self.segments:
            self.heads[self.index].bytes[FLAG] = 1
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self.heads.clear()


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
