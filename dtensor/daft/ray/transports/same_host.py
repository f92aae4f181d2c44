"""The transport between actors of one host: through shared memory, without messages.

    transport = join_same_host(store, own_place(node), 0, (0, 1), meet=..., connect=...)
    engine = Engine(host_program, table, transport)           # actor 0, of rank 0 of two

`slots.py` computes the layout of payloads and the counts of waits, `segments.py` has the memory. An
all_reduce of f32[1024] over ranks 0 and 1:

    start   copy the 4 KB into this start's slot in its own segment; post the other's semaphore
    wait    take the other's post; fold its value and the other's slot, in rank order: f32[1024]

A large all_reduce of three or more members is folded piece by piece, each by a waiting member that
claims it: all members have started then, so a claimed piece needs no further waiting.

It handles the keys whose actors all share memory (`shared_memory_peers.py`); other keys, and values
of unknown length, use the messages of `others`.

Invariants: a start never waits, and a wait only for its partners' starts, as in the verifier; so no
accepted program hangs, and a slot is not written before all have read it
(docs/design/0016-same-host.md). The tensors of `wait` have their own memory, unless they are lent.
Folds are `numerics.fold` over whole values or pieces of them, the bits those of every transport. A
partner whose process has ended, or that has closed, is noticed within `segments.SLICE_S`; the
controller ends one that has stopped. An actor's windows follow one another in its own order of
loading, and none is used twice, so that loading and unloading need no message: the first wait on a
key looks up the begin of the partners' windows, for they have started and so loaded the program,
and compares their heads; the last to unload a program frees its pages. Actors need not have loaded
the same programs. Used by one thread at a time. It does not import Ray.
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
    contribution,
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
    """Actor `index`'s transport to all others, with shared memory where possible.

    `meet` puts its argument into `store` as `here<index>` and returns when all have; `connect`
    returns the wire, when all have called it.
    """
    neighbours = SharedMemoryPeers.create(place, index, host_of)
    with ExitStack() as failing:
        everyone = range(max(host_of) + 1)
        if neighbours is not None:
            failing.callback(neighbours.close)
        meet(neighbours.card if neighbours is not None else "")
        cards = [store.get(f"here{i}").decode() for i in everyone]
        store.set(f"seen{index}", neighbours.look(cards) if neighbours is not None else "")
        exchange = ExchangeTransport(connect(), host_of)
        seen = [store.get(f"seen{i}").decode() for i in everyone]
        if neighbours is None or not neighbours.settle(seen):
            return exchange
        failing.pop_all()
    return SameHostTransport(neighbours, exchange)


class _Link:
    """A pair of a rank here and another one: the number of starts of each that concern the other,
    as far as they were taken."""

    __slots__ = ("inbox", "neighbours", "outbox", "rank", "started", "taken")

    def __init__(self, neighbours: SharedMemoryPeers, rank: int, other: int) -> None:
        self.neighbours = neighbours
        self.rank = other
        self.inbox = neighbours.inbox(rank, other)
        self.outbox = neighbours.inbox(other, rank)
        self.started = 0
        self.taken = 0

    def take(self, number: int) -> None:
        """Wait until the other has made so many starts in all."""
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
    """`neighbours` have settled; `others` carries messages for other hosts."""

    def __init__(self, neighbours: SharedMemoryPeers, others: ExchangeTransport) -> None:
        self._neighbours = neighbours
        self._others = others
        self._end = neighbours.head_bytes(neighbours.index)  # of its own windows
        self._links: dict[tuple[int, int], _Link] = {}
        self._loaded: set[_Shared] = set()

    def open(self, tags: Mapping[Key, int]) -> None:
        """Prepare for the keys of a program that is about to be loaded."""
        self._others.open(tags)

    def tell_whom_it_awaits(self, told: Callable[[int], None]) -> None:
        """Every `SLICE_S` of a wait, `told` is called with the rank for whose start it waits, -1 if
        that is unknown."""
        self._neighbours.told = told

    def prepare(self, program: HostProgram, number: int = 0) -> Prepared:
        here = self._neighbours
        arena = lay_out(program, here.host_of, here.shares)
        title = sha256(repr((number, program.name, arena.lanes)).encode()).digest()
        sizes = {a: whole_pages(nbytes) for a, nbytes in enumerate(arena.window_bytes) if nbytes}
        shared = _Shared(self, here, number, title, sizes)
        self._loaded.add(shared)
        begins = dict(self._others.prepare(program, number).begins)
        if here.index in sizes:
            here.segments[here.index].write(self._end, title)
            here.announce(number, self._end)
            self._end += sizes[here.index]
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
        """The pages of a program are freed when all have unloaded it."""
        if shared not in self._loaded:
            return
        self._loaded.remove(shared)
        shared.release()
        here = self._neighbours
        if here.index not in shared.sizes:
            return
        begins = {actor: here.announced(actor, shared.number) for actor in shared.sizes}
        here.segments[here.index].write(begins[here.index] + FLAG, b"\1")
        wanted = shared.title + b"\1"
        if all(at and here.segments[a].read(at, FLAG + 1) == wanted for a, at in begins.items()):
            for actor, at in begins.items():
                here.segments[actor].drop(at, shared.sizes[actor])

    def close(self) -> None:
        for shared in self._loaded:
            shared.release()
        self._loaded.clear()
        self._links.clear()
        self._neighbours.close()
        self._others.close()

    def _link(self, rank: int, other: int) -> _Link:
        if (rank, other) not in self._links:
            self._links[rank, other] = _Link(self._neighbours, rank, other)
        return self._links[rank, other]


class _Shared(Prepared):
    """A loaded program. `title`: the head of its windows; `sizes`: their bytes, by actor."""

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
        """The window of a rank's actor, which has loaded the program."""
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
    """A key's slots as one of its ranks uses them. `windows`: of the actors of its ranks, by their
    places in the key; only its own, until the others have `met`."""

    __slots__ = ("closed", "lane", "me", "met", "shared", "started", "views", "windows")

    def __init__(self, lane: Lane, rank: int, shared: _Shared) -> None:
        self.lane = lane
        self.me = lane.key[0].index(rank)
        self.shared = shared
        self.windows = {self.me: shared.window(rank)}
        self.met = False
        self.started = 0
        self.closed = False
        # by slot, for each kind of start on the key: layers repeat
        self.views: dict[object, list[_Views | None]] = {}
        if lane.pieces:
            window_address = self.windows[self.me].address
            counted = [window_address + lane.done[self.me] + at * LINE for at in range(lane.slots)]
            if self.me == 0:
                counted += [
                    window_address + lane.claims + i * LINE for i in range(lane.slots * lane.pieces)
                ]
            for address in counted:
                calls().initialise(address, 1, 0)

    def meet(self) -> None:
        """Map the others' windows, once they have started, and so loaded the program."""
        self.windows = {m: self.shared.window(rank) for m, rank in enumerate(self.lane.key[0])}
        self.met = True

    def tensors(self, member: int, at: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        """The tensors of a member's slot `at`."""
        begin = self.lane.begins[member] + at * self.lane.slot_bytes[member]
        return self._cut(member, begin, buffers)

    def results(self, at: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        """The tensors that were folded together."""
        return self._cut(0, self.lane.results + at * self.lane.result_bytes, buffers)

    def claim(self, at: int, piece: int) -> int:
        line = at * self.lane.pieces + piece
        return self.windows[0].address + self.lane.claims + line * LINE

    def done(self, member: int, at: int) -> int:
        """The semaphore that counts the pieces which others have folded for this member."""
        return self.windows[member].address + self.lane.done[member] + at * LINE

    def release(self) -> None:
        self.closed = True
        self.windows.clear()
        for views in self.views.values():
            views.clear()

    def _cut(self, member: int, begin: int, buffers: Sequence[Buffer]) -> list[Tensor]:
        memory = self.windows[member].bytes
        return [
            memory[begin + at : begin + at + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for at, buffer in zip(placed(buffers)[0], buffers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """`folds`: for each of its tensors the members' values, and the place of the fold."""

    claim: int
    folds: Sequence[tuple[list[Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Views:
    """A slot for one start: the places of its own values, by their number, and the members' values,
    in the order of the key; only its own until they have met. For a collective that is folded
    together: the `claims` that a start offers, `pieces`, `results`, the semaphore of pieces that
    others have `done`, and those by which they are `told`."""

    own: Sequence[tuple[int, Tensor]]
    parts: Sequence[Sequence[Tensor]] = ()
    claims: Sequence[int] = ()
    pieces: Sequence[_Piece] = ()
    results: Sequence[Tensor] = ()
    done: int = 0
    told: Sequence[int] = ()


class _Begin:
    """An instruction that starts a message; `given`: the values of each member; `links` to the
    others and the number of starts by which each must be ahead (`slots.py`)."""

    __slots__ = ("_given", "_links", "_member", "_post", "_start", "_views")

    def __init__(
        self,
        start: Start,
        member: _Member,
        given: tuple[tuple[Buffer, ...], ...],
        links: Sequence[tuple[_Link, int]],
    ) -> None:
        self._start = start
        self._member = member
        self._given = given
        self._links = links
        self._post = calls().post
        sort: object = given
        if isinstance(start, Collective):
            sort = given, start.kind, start.op, start.out_buffers
        self._views = member.views.setdefault(sort, [None] * member.lane.slots)

    def __call__(self, values: Sequence[Tensor]) -> Pending:
        member, post = self._member, self._post
        if member.closed:
            raise RuntimeError(CLOSED)
        at = member.started % member.lane.slots
        views = self._views[at]
        if views is None:
            views = self._views[at] = self._look(at)
        member.started += 1
        for number, place in views.own:
            place.copy_(values[number])
        for claim in views.claims:
            post(claim)
        needed: list[int] = []
        for link, ahead in self._links:
            needed.append(link.started + ahead)
            link.started += 1
            post(link.outbox)
        return _Started(self, at, needed, values)

    def complete(
        self, at: int, needed: Sequence[int], values: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        member = self._member
        if member.closed:
            raise RuntimeError(CLOSED)
        for (link, _), number in zip(self._links, needed):
            if link.taken < number:
                link.take(number)
        if not member.met:
            member.meet()
        views = self._views[at]
        if views is None or not views.parts:  # it was started before they met
            views = self._views[at] = self._look(at)
        match start := self._start:
            case Collective():
                if views.pieces:
                    return self._fold_together(start, views)
                parts = [contribution(start, part, member.me) for part in views.parts]
                parts[member.me] = contribution(start, values, member.me)
                folded = combined(start, parts)
                return folded if start.op is not None else tuple(map(copied, folded))
            case Recv(lent=lent):
                return tuple(views.parts[0]) if lent else tuple(map(copied, views.parts[0]))
            case Send():
                return ()
            case _:
                assert_never(start)

    def _fold_together(self, start: Collective, views: _Views) -> tuple[Tensor, ...]:
        """Fold the unclaimed pieces, then wait for those that others have claimed."""
        op, claim, post = start.op, calls().take, self._post
        assert op is not None
        missing, first = 0, self._member.me * len(views.pieces) // len(views.parts)
        for piece in (*views.pieces[first:], *views.pieces[:first]):
            if claim(piece.claim):
                missing += 1
                continue
            for parts, result in piece.folds:
                result.copy_(fold(parts, op, result.dtype))
            for done in views.told:
                post(done)
        for _ in range(missing):
            take(views.done, self._check)
        return tuple(map(copied, views.results))

    def _check(self) -> None:
        """Raises if one of the others is gone."""
        for link, _ in self._links:
            link.neighbours.tell(-1)
            link.check()

    def _look(self, at: int) -> _Views:
        """The views of slot `at` for this start."""
        member, start = self._member, self._start
        divided = isinstance(start, Collective) and start.does.divided
        mine = member.tensors(member.me, at, self._given[member.me])
        own_values = [(i, to) for i, to in enumerate(mine) if not divided or i != member.me]
        cut = pieces_of(start)
        claims = [member.claim(at, n) for n in range(len(cut))] if member.me == 0 else []
        if not member.met:
            return _Views(own=own_values, claims=claims)
        brings = tuple(member.tensors(m, at, given) for m, given in enumerate(self._given))
        if not cut or not isinstance(start, Collective):
            return _Views(own=own_values, parts=brings)
        results = member.results(at, start.out_buffers)
        given = [[tensor.view(-1) for tensor in part] for part in brings]
        flat_results = [tensor.view(-1) for tensor in results]
        folds = [
            [
                ([part[n][begin:end] for part in given], flat_results[n][begin:end])
                for n, begin, end in piece
            ]
            for piece in cut
        ]
        return _Views(
            own=own_values,
            parts=brings,
            claims=claims,
            pieces=[_Piece(member.claim(at, n), fold) for n, fold in enumerate(folds)],
            results=results,
            done=member.done(member.me, at),
            told=[member.done(m, at) for m in range(len(brings)) if m != member.me],
        )


class _Started(Pending):
    """Not a dataclass, for speed: one is made for each start."""

    __slots__ = ("at", "begin", "needed", "values")

    def __init__(
        self, begin: _Begin, at: int, needed: Sequence[int], values: Sequence[Tensor]
    ) -> None:
        self.begin = begin
        self.at = at
        self.needed = needed
        self.values = values

    def wait(self) -> tuple[Tensor, ...]:
        return self.begin.complete(self.at, self.needed, self.values)


def _start(program: HostProgram, site: Site) -> Start:
    start = instruction_at(program, site)
    assert isinstance(start, Send | Recv | Collective)
    return start
