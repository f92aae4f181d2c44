"""The transport between actors on one machine: through shared memory, without messages.

    transport = join_same_host(store, own_place(node), 0, (0, 1), meet=..., connect=...)
    engine = Engine(host_program, table, transport)           # in actor 0, with rank 0 of two

An all_reduce of f32[1024] over ranks 0 and 1 (layout and counts: `slots.py`):
    start   copy the 4 KB into a slot of the actor's own segment; post the other rank's semaphore
    wait    take the other rank's post; fold both values in rank order: f32[1024]

A large all_reduce of three or more members is folded piece by piece; waiting members claim pieces.
Invariants: a start never waits, and a wait only for its partners' starts, so no verified program
hangs (docs/design/0016-same-host.md). All transports give the same bits. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import assert_never

from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, key_of
from dtensor.daft.ray.transports.exchange import ExchangeTransport, Wire
from dtensor.daft.ray.transports.segments import Window, calls, take
from dtensor.daft.ray.transports.shared_memory_peers import (
    CLOSED,
    FLAG,
    SharedMemoryPeers,
    whole_pages,
)
from dtensor.daft.ray.transports.slots import LINE, Lane, lay_out, pieces_of, placed
from dtensor.daft.run.transport import (
    Begin,
    Pending,
    Prepared,
    Transport,
    combined,
    copied,
)
from dtensor.daft.verification.pairing import Site, instruction_at
from dtensor.numerics import fold
from dtensor.private_torch import Store


def join_same_host(
    store: Store,
    place: str,
    index: int,
    host_of: Sequence[int],
    *,
    meet: Callable[[str], None],
    connect: Callable[[], Wire],
) -> ExchangeTransport | SameHostTransport:
    """Return actor `index`'s transport to all others, which uses shared memory where possible.

    `meet(text)` stores `here<index>`: text, and returns when all actors have done so; `connect`
    returns the wire when all actors have called it.
    """
    neighbours = SharedMemoryPeers.create(place, index, host_of)
    with ExitStack() as failing:
        everyone = range(max(host_of) + 1)
        if neighbours is not None:
            failing.callback(neighbours.close)
        meet(neighbours.segment_address if neighbours is not None else "")
        addresses = [store.get(f"here{i}").decode() for i in everyone]
        store.set(f"seen{index}", neighbours.look(addresses) if neighbours is not None else "")
        exchange = ExchangeTransport(connect(), host_of)
        open_segments = [store.get(f"seen{i}").decode() for i in everyone]
        if neighbours is None or not neighbours.settle(open_segments):
            return exchange
        failing.pop_all()
    return SameHostTransport(neighbours, exchange)


class _Link:
    """A rank of this actor and another rank. `started`: how many starts of this rank concern the
    other; `taken`: how many posts for starts of the other rank were taken."""

    __slots__ = ("inbox", "neighbours", "outbox", "rank", "started", "taken")

    def __init__(self, neighbours: SharedMemoryPeers, rank: int, other: int) -> None:
        self.neighbours = neighbours
        self.rank = other
        self.inbox = neighbours.inbox(rank, other)
        self.outbox = neighbours.inbox(other, rank)
        self.started = 0
        self.taken = 0

    def take(self, number: int) -> None:
        """Wait until the other rank has made `number` starts in total."""
        while self.taken < number:
            take(self.inbox, self._wait_on)
            self.taken += 1

    def _wait_on(self) -> None:
        self.neighbours.tell(self.rank)
        self.check()

    def check(self) -> None:
        self.neighbours.check(self.rank)


# -- the transport ---------------------------------------------------------------------------------


class SameHostTransport(Transport):
    """The transport of an actor over shared memory. `neighbours`: the actors that share memory with
    it; `others`: the transport for all other keys, and for values of unknown length.

    An actor's windows follow one another in the order in which it loads programs, and are not
    reused, so loading needs no message. The first wait on a key looks up the partners' windows.
    """

    def __init__(self, neighbours: SharedMemoryPeers, others: ExchangeTransport) -> None:
        self._neighbours = neighbours
        self._others = others
        self._end = neighbours.head_bytes(neighbours.index)  # where its next window begins
        self._links: dict[tuple[int, int], _Link] = {}
        self._loaded: set[_Shared] = set()

    def open(self, tags: Mapping[Key, int]) -> None:
        """Connect for the keys of a program that is about to be loaded."""
        self._others.open(tags)

    def set_wait_report(self, report: Callable[[int], None]) -> None:
        """Set a function that a wait calls every `SLICE_S` with the rank that it waits for, -1 if
        that is unknown."""
        self._neighbours.report_wait = report

    def prepare(self, program: HostProgram, number: int = 0) -> Prepared:
        """Load a program: lay out its messages, and publish this actor's window."""
        peers = self._neighbours
        arena = lay_out(program, peers.host_of, peers.shares)
        title = sha256(repr((number, program.name, arena.lanes)).encode()).digest()
        sizes = {a: whole_pages(nbytes) for a, nbytes in enumerate(arena.window_bytes) if nbytes}
        shared = _Shared(self, peers, number, title, sizes)
        self._loaded.add(shared)
        begins = dict(self._others.prepare(program, number).begins)
        if peers.index in sizes:
            peers.segments[peers.index].write(self._end, title)
            peers.announce(number, self._end)
            self._end += sizes[peers.index]
        for site, brings in arena.brings.items():
            rank, start = site[0], _start(program, site)
            key = key_of(rank, start)
            if (rank, key) not in shared.members:
                shared.members[rank, key] = _Member(arena.lanes[key], rank, shared)
            links = [(self._link(rank, other), n) for other, n in arena.ahead[site].items()]
            begins[site] = _Begin(start, shared.members[rank, key], brings, links)
        shared.begins = begins
        return shared

    def begin(self, rank: int, start: Start) -> Begin:
        return self._others.begin(rank, start)

    def unload(self, shared: _Shared) -> None:
        """Unload a program; the last actor that does so frees the pages."""
        if shared not in self._loaded:
            return
        self._loaded.remove(shared)
        shared.release()
        peers = self._neighbours
        if peers.index not in shared.sizes:
            return
        begins = {actor: peers.announced(actor, shared.number) for actor in shared.sizes}
        peers.segments[peers.index].write(begins[peers.index] + FLAG, b"\1")
        end_mark = shared.title + b"\1"
        if all(
            begin and peers.segments[a].read(begin, FLAG + 1) == end_mark
            for a, begin in begins.items()
        ):
            for actor, begin in begins.items():
                peers.segments[actor].drop(begin, shared.sizes[actor])

    def close(self) -> None:
        """Release all shared memory and close the connections, so that peers that wait fail."""
        for shared in self._loaded:
            shared.release()
        self._loaded.clear()
        self._links.clear()
        self._neighbours.close()
        self._others.close()

    def _link(self, rank: int, other: int) -> _Link:
        """Return the link of two ranks, creating it if necessary."""
        if (rank, other) not in self._links:
            self._links[rank, other] = _Link(self._neighbours, rank, other)
        return self._links[rank, other]


class _Shared(Prepared):
    """A loaded program. `title`: a digest with which its windows begin; `sizes`: the bytes of its
    window, by actor."""

    def __init__(
        self,
        transport: SameHostTransport,
        neighbours: SharedMemoryPeers,
        number: int,
        title: bytes,
        sizes: Mapping[int, int],
    ) -> None:
        super().__init__({})
        self.number = number
        self.title = title
        self.sizes = sizes
        self.members: dict[tuple[int, Key], _Member] = {}
        self._transport = transport
        self._neighbours = neighbours
        self._windows: dict[int, Window] = {}

    def window(self, rank: int) -> Window:
        """Return the window of a rank's actor. The actor has loaded the program."""
        actor = self._neighbours.host_of[rank]
        if actor not in self._windows:
            begin = self._neighbours.announced(actor, self.number)
            segment = self._neighbours.segments[actor]
            if not begin or segment.read(begin, FLAG) != self.title:
                raise RuntimeError(
                    f"Rank {rank}'s actor has not loaded the same program under number "
                    f"{self.number}."
                )
            self._windows[actor] = segment.map(begin, self.sizes[actor])
        return self._windows[actor]

    def close(self) -> None:
        self._transport.unload(self)

    def release(self) -> None:
        """Release the memory."""
        for member in self.members.values():
            member.release()
        self._windows.clear()


# -- starts and waits ----------------------------------------------------------------


class _Member:
    """The slots of a key, for one member. `me`: its position in the key's ranks; `windows`:
    position to the window of the rank's actor, only its own until `met`; `views`: see `_Begin`."""

    __slots__ = ("closed", "lane", "me", "met", "shared", "started", "views", "windows")

    def __init__(self, lane: Lane, rank: int, shared: _Shared) -> None:
        """Map the window of this rank's actor, and initialize the semaphores in it."""
        self.lane = lane
        self.me = lane.key[0].index(rank)
        self.shared = shared
        self.windows = {self.me: shared.window(rank)}
        self.met = False
        self.started = 0
        self.closed = False
        # for each kind of start on the key, since layers repeat: the views of each slot
        self.views: dict[object, list[_Views | None]] = {}
        if lane.pieces:
            window_address = self.windows[self.me].address
            semaphores = [
                window_address + lane.done[self.me] + slot * LINE for slot in range(lane.slots)
            ]
            if self.me == 0:
                semaphores += [
                    window_address + lane.claims + i * LINE for i in range(lane.slots * lane.pieces)
                ]
            for address in semaphores:
                calls().initialise(address, 1, 0)

    def meet(self) -> None:
        """Map the windows of the other members, which have started and so loaded the program."""
        self.windows = {m: self.shared.window(rank) for m, rank in enumerate(self.lane.key[0])}
        self.met = True

    def tensors(self, member: int, slot: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        """Return the tensors in slot `slot` of a member."""
        begin = self.lane.begins[member] + slot * self.lane.slot_bytes[member]
        return self._tensors_at(member, begin, buffers)

    def results(self, slot: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        """Return the tensors into which the pieces of slot `slot` are folded."""
        return self._tensors_at(0, self.lane.results + slot * self.lane.result_bytes, buffers)

    def claim(self, slot: int, piece: int) -> int:
        """Return the semaphore by which a member claims a piece of slot `slot`."""
        line = slot * self.lane.pieces + piece
        return self.windows[0].address + self.lane.claims + line * LINE

    def done(self, member: int, slot: int) -> int:
        """Return the semaphore that counts the pieces which others have folded for a member."""
        return self.windows[member].address + self.lane.done[member] + slot * LINE

    def release(self) -> None:
        self.closed = True
        self.windows.clear()
        for views in self.views.values():
            views.clear()

    def _tensors_at(self, member: int, begin: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        """Return the tensors with these buffers in a member's window, one after the other from
        ``begin`` on."""
        memory = self.windows[member].bytes
        return [
            memory[begin + offset : begin + offset + buffer.nbytes]
            .view(buffer.dtype)
            .view(buffer.shape)
            for offset, buffer in zip(placed(buffers)[0], buffers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of an all_reduce: for each tensor the members' values and the place of the result
    (`folds`), and the semaphore by which a member claims the piece (`claim`)."""

    claim: int
    folds: Sequence[tuple[list[Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Views:
    """The tensors and semaphores of one slot, for one kind of start. The fields after `parts` are
    for an all_reduce that is folded piece by piece."""

    own: Sequence[tuple[int, Tensor]]  # (number of a value, its place in the slot)
    parts: Sequence[Sequence[Tensor]] = ()  # the members' values; () until they have met
    claims: Sequence[int] = ()  # semaphores that a start posts, so that pieces can be claimed
    pieces: Sequence[_Piece] = ()
    results: Sequence[Tensor] = ()
    done: int = 0  # the semaphore of pieces that others have folded
    others_done: Sequence[int] = ()  # the other members' `done`


class _Begin:
    """Starts a message of one instruction. `payloads`: the buffers of each member; `links`: to each
    other member, with the number of starts by which that must be ahead of this rank
    (`slots.py`)."""

    __slots__ = ("_buffers", "_links", "_member", "_post", "_start", "_views")

    def __init__(
        self,
        start: Start,
        member: _Member,
        payloads: tuple[tuple[Buffer, ...], ...],
        links: Sequence[tuple[_Link, int]],
    ) -> None:
        """Find the views that starts of the same kind on this key share."""
        self._start = start
        self._member = member
        self._buffers = payloads
        self._links = links
        self._post = calls().post
        kind: object = payloads  # starts of one kind share their views
        if isinstance(start, Collective):
            kind = payloads, start.kind, start.op, start.out_buffers
        self._views = member.views.setdefault(kind, [None] * member.lane.slots)

    def __call__(self, values: Sequence[Tensor], rows: Sequence[int] = (), /) -> Pending:
        """Start the message: copy the values into the next slot, and tell the other members."""
        member, post = self._member, self._post
        if member.closed:
            raise RuntimeError(CLOSED)
        slot = member.started % member.lane.slots
        views = self._views[slot]
        if views is None:
            views = self._views[slot] = self._make_views(slot)
        member.started += 1
        for number, memory in views.own:
            value = values[number]
            (memory.narrow(0, 0, len(value)) if rows else memory).copy_(value)
        for claim in views.claims:
            post(claim)
        needed: list[int] = []
        for link, ahead in self._links:
            needed.append(link.started + ahead)
            link.started += 1
            post(link.outbox)
        return _Started(self, slot, needed, values, rows)

    def complete(
        self, slot: int, needed: Sequence[int], values: Sequence[Tensor], rows: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Wait for the start in slot `slot`; return its results. `needed`: by link, how many starts
        the other member must have made. `rows`: see `Begin`."""
        member = self._member
        if member.closed:
            raise RuntimeError(CLOSED)
        for (link, _), number in zip(self._links, needed):
            if link.taken < number:
                link.take(number)
        if not member.met:
            member.meet()
        views = self._views[slot]
        if views is None or not views.parts:  # it was started before the members met
            views = self._views[slot] = self._make_views(slot)
        match start := self._start:
            case Collective():
                if views.pieces:
                    return self._fold_together(start, views)
                parts = [start.given(part, m, member.me) for m, part in enumerate(views.parts)]
                for m, num in enumerate(rows):
                    parts[m] = [memory.narrow(0, 0, num) for memory in parts[m]]
                parts[member.me] = start.given(values, member.me, member.me)
                folded = combined(start, parts)
                return folded if start.op is not None else tuple(map(copied, folded))
            case Recv(lent=lent):
                return tuple(views.parts[0]) if lent else tuple(map(copied, views.parts[0]))
            case Send():
                return ()
            case _:
                assert_never(start)

    def _fold_together(self, start: Collective, views: _Views) -> tuple[Tensor, ...]:
        """Fold the pieces that no other member has claimed, then wait for the pieces that other
        members fold. Return copies of the results."""
        op, claim, post = start.op, calls().take, self._post
        assert op is not None
        num_claimed_by_others, first_piece = (
            0,
            self._member.me * len(views.pieces) // len(views.parts),
        )
        for piece in (*views.pieces[first_piece:], *views.pieces[:first_piece]):
            if claim(piece.claim):
                num_claimed_by_others += 1
                continue
            for parts, result in piece.folds:
                result.copy_(fold(parts, op, result.dtype))
            for done in views.others_done:
                post(done)
        for _ in range(num_claimed_by_others):
            take(views.done, self._check)
        return tuple(map(copied, views.results))

    def _check(self) -> None:
        """Raise if another member's process has ended or closed."""
        for link, _ in self._links:
            link.neighbours.tell(-1)
            link.check()

    def _make_views(self, slot: int) -> _Views:
        """Return the views of slot `slot` for this start."""
        member, start = self._member, self._start
        divided = isinstance(start, Collective) and start.does.divided
        own_tensors = member.tensors(member.me, slot, self._buffers[member.me])
        own_values = [(i, to) for i, to in enumerate(own_tensors) if not divided or i != member.me]
        pieces = pieces_of(start)
        claims = [member.claim(slot, n) for n in range(len(pieces))] if member.me == 0 else []
        if not member.met:
            return _Views(own=own_values, claims=claims)
        values_of_members = tuple(
            member.tensors(m, slot, payloads) for m, payloads in enumerate(self._buffers)
        )
        if not pieces or not isinstance(start, Collective):
            return _Views(own=own_values, parts=values_of_members)
        results = member.results(slot, start.out_buffers)
        payloads = [[tensor.view(-1) for tensor in part] for part in values_of_members]
        flat_results = [tensor.view(-1) for tensor in results]
        folds = [
            [
                ([part[n][begin:end] for part in payloads], flat_results[n][begin:end])
                for n, begin, end in piece
            ]
            for piece in pieces
        ]
        return _Views(
            own=own_values,
            parts=values_of_members,
            claims=claims,
            pieces=[_Piece(member.claim(slot, n), fold) for n, fold in enumerate(folds)],
            results=results,
            done=member.done(member.me, slot),
            others_done=[
                member.done(m, slot) for m in range(len(values_of_members)) if m != member.me
            ],
        )


class _Started(Pending):
    """A start in flight. Not a dataclass, for speed: one is created for each start."""

    __slots__ = ("begin", "needed", "rows", "slot", "values")

    def __init__(
        self,
        begin: _Begin,
        slot: int,
        needed: Sequence[int],
        values: Sequence[Tensor],
        rows: Sequence[int],
    ) -> None:
        self.begin = begin
        self.slot = slot
        self.needed = needed
        self.values = values
        self.rows = rows

    def wait(self) -> tuple[Tensor, ...]:
        return self.begin.complete(self.slot, self.needed, self.values, self.rows)


def _start(program: HostProgram, site: Site) -> Start:
    start = instruction_at(program, site)
    assert isinstance(start, Send | Recv | Collective)
    return start
