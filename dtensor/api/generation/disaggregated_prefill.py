"""Prefill on one mesh, decoding on another: the transfer between, for `generator(...,
prefill=other)`.

    apart = DisaggregatedPrefill(model, caches, forward, 256, other)  # two meshes of one launch
    apart.admit(waiting, seats, live, arguments)           # prefills, sends, and assigns slots
    print(apart.transfer_plan(13, slot=0))                 # who sends what to whom

The other model has caches of ``ROWS`` rows on its mesh, and the same program of prefill. A request

    waits -> is in a row there -> its first token has been read -> is in a slot here, and decodes

The used part of its keys and values is sent from the row to the slot: [1, heads, t, head dim] of
each layer's keys and of its values, where t is the prompt's length, each element once to each rank
that keeps it. That is one verified program (runtime/transfer/cache_rows.py), which also writes
zeros after them, so no values of an earlier request are left. The token, its position, the
request's seed and its sampling options come from the controller, with the call.

Decoding never waits for a prefill: its result is read when it has ended, or when there is no other
work. One prefill runs at a time, and nothing is sent while it does, since a transfer would wait for
it: so the decoding mesh waits at most for a transfer.

Invariants: a request's tokens do not depend on when its prefill was seen to have ended; requests
get slots in the order of their arrival, and a request that ends with its first token is never sent.
Programs are made for a prompt's length and for the ranks that send and receive, not for rows, and
the last ``MAX_LOADED`` of them are kept; nothing is captured for them. Not here: the decoding of
slots (generator.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dtensor.api.eager.execute_op import make_shards_private, mark_changed
from dtensor.api.eager.tensor import DTensor
from dtensor.api.generation.forwards import Forward, evaluating, forward_of
from dtensor.api.generation.programs import (
    axes_of_slots,
    caches_of,
    decode_program,
    prefill_program,
    put_anew,
    settle_caches,
)
from dtensor.api.generation.requests import TextRequest
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.meshes import meshes_text, ranks_of_meshes
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.store.session import MeshSession, launched, session_for
from dtensor.api.store.store import name_on_ranks, with_mesh_ranks
from dtensor.daft import DaftError, Future, Stored
from dtensor.errors import PlanningError, check_number
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.transfer.between_meshes import bucket_bytes
from dtensor.runtime.transfer.cache_rows import FROM, TO, RowTables, row_program
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.sync_plan import SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor

ROWS = 2
"""Rows of the caches on the mesh of prefill: one is filled while another waits for a slot."""
MAX_LOADED = 64
"""The number of programs of transfers that stay loaded."""

Arguments = Callable[[TextRequest, int], tuple[Tensor, ...]]
"""The arguments of a prefill of a request into a row, after ``live``."""


@dataclass(slots=True)
class _Prefilled:
    """A request in a row of the other mesh's caches. ``first``: its token, once it was read."""

    request: TextRequest
    row: int
    token: DTensor
    logprob: DTensor
    first: int | None = None


class DisaggregatedPrefill:
    """Prefill of prompts on another mesh. ``model`` and ``caches`` are those that decode."""

    def __init__(
        self,
        model: ParallelModule,
        caches: ParallelModule,
        forward: Forward,
        length: int,
        other: ParallelModule,
        topology: Topology | None = None,
    ) -> None:
        _check_other(model, other)
        theirs = forward_of(other.module, length)
        _check_same(forward, theirs, other)
        self.model: ParallelModule = model
        self.caches: ParallelModule = caches
        self.other: ParallelModule = other
        self.length: int = length
        over = axes_of_slots(other)
        pieces = math.prod(other.mesh.axis_size(axis) for axis in over)
        self.rows: int = -(-ROWS // pieces) * pieces
        slots = caches.module.get_buffer("request").shape[0]
        here = math.prod(model.mesh.axis_size(axis) for axis in axes_of_slots(model))
        self._together = self.rows // pieces, slots // here  # rows that are on the same ranks
        self.own: ParallelModule = caches_of(other, theirs, self.rows, length, over)
        self._decode = decode_program(theirs, other.mesh, over, topology)  # planned, and never run
        self._prefill = prefill_program(theirs, other.mesh, over, topology)
        self._topology: Topology | None = topology
        self._settled = False
        self._nowhere = torch.zeros(self.rows, 2, dtype=torch.int64)  # that mesh decodes nothing
        self._here: MeshSession | None = None
        self._there: MeshSession | None = None
        self._free: deque[int] = deque(range(self.rows))
        self._under_way: deque[_Prefilled] = deque()
        self._sent: dict[TextRequest, Future] = {}  # transfers that were not checked yet
        self._programs = ProgramCache[ClusterProgram](MAX_LOADED)

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, arguments: tuple[Tensor, ...]) -> Plan:
        """The plan of prefill on its mesh."""
        with CALL_LOCK, evaluating(self.other.module):
            self._settle()
            return self._prefill.plan(self.other, self.own, self._nowhere, *arguments)

    def transfer_plan(
        self, length: int, slot: int, ranks: Mapping[Mesh, Sequence[int]] | None = None
    ) -> SyncPlan:
        """The transfer from the first row; the decoding caches are settled."""
        with CALL_LOCK, evaluating(self.other.module):
            self._settle()
        if launched() is None:
            places = ranks_of_meshes((self.other.mesh, self.model.mesh), ranks)
            source = current_homes(self.own, places[self.other.mesh], None)
            target = current_homes(self.caches, places[self.model.mesh], None)
            return self._planned(length, 0, slot, source, target, torch.device("cpu"))
        if ranks is not None:
            raise PlanningError(
                "ranks= says where the meshes would be, and a launch is running, which has them.\n"
                "fix: leave ranks out"
            )
        here, there = self._sessions()
        return self._planned(length, 0, slot, *self._kept(here, there), here.cluster.device)

    # -- requests ---------------------------------------------------------------------------------

    @property
    def requests(self) -> list[TextRequest]:
        """Requests that have no slot yet, and are not done."""
        return [at.request for at in self._under_way if not at.request.done]

    def enter(self) -> None:
        """Begin in a new launch."""
        here, there = self._sessions()
        if here is not self._here or there is not self._there:
            self._programs = ProgramCache(MAX_LOADED)  # the old programs ended with their launch
        self.clear()
        self._here, self._there = here, there
        self.own.initial.holders.clear()

    def begin_again(self) -> None:
        """After a loss of the caches: the generator queues the requests again."""
        assert self._there is not None
        self._under_way.clear()
        self.clear()
        put_anew(self._there, self.own)

    def clear(self) -> None:
        """Drop all requests."""
        if self._here is not None and not self._here.closed:
            self._here.model_home(self.own).unsaved = False
        for at in self._under_way:
            if not at.request.done:
                at.request.reason = "dropped"
        self._under_way.clear()
        self._sent.clear()
        self._free = deque(range(self.rows))

    def admit(
        self,
        waiting: deque[TextRequest],
        seats: list[TextRequest | None],
        live: DTensor,
        arguments: Arguments,
    ) -> None:
        """Prefill waiting requests, as far as there are rows, and give slots to prefilled ones.

        ``live``: int64[rows, 2] on the decoding mesh; its rows of requests that get slots are
        changed in place.
        """
        self._sent = {request: run for request, run in self._sent.items() if not request.done}
        if not self._settled:
            with CALL_LOCK, evaluating(self.other.module):
                self._settle()
        while self._seat(seats, live) and waiting and self._free:
            request = waiting.popleft()
            try:
                with CALL_LOCK, evaluating(self.other.module):
                    self._begin(request, self._free[0], arguments)
            except BaseException:
                waiting.appendleft(request)  # so that a recovery prefills it again
                raise
            self._free.popleft()

    def check(self, request: TextRequest) -> None:
        """Wait for the request's transfer; raises its failure."""
        run = self._sent.pop(request, None)
        if run is not None:
            self._checked(run)

    def _begin(self, request: TextRequest, row: int, arguments: Arguments) -> None:
        # a policy has no versions: its weights are those of the newest one, or newer
        versioned = self.other if self.other.source is not None else self.model
        given = arguments(request, row)
        outputs: Any = self._prefill(self.other, self.own, self._nowhere, *given)
        assert self._here is not None
        self._here.model_home(self.own).unsaved = False
        request.versions.append(versioned.version)
        self._under_way.append(_Prefilled(request, row, outputs["token"], outputs["logprob"]))

    def _seat(self, seats: list[TextRequest | None], live: DTensor) -> bool:
        """Give slots to prefilled requests, if no prefill runs; returns whether none does."""
        if not self._under_way:
            return True
        last = self._under_way[-1]
        if last.first is None:
            if any(seats) and not _ended(last.token):
                return False
            last.first = int(last.token.full_tensor())
            last.request.took(last.first, float(last.logprob.full_tensor()))
        while self._under_way:
            at = self._under_way[0]
            if not at.request.done:
                if None not in seats:
                    break
                slot = seats.index(None)
                self._send(at, slot, live)
                seats[slot] = at.request
            self._free.append(self._under_way.popleft().row)
        return True

    def _settle(self) -> None:
        """Place the caches as a decode there would, so that the program of prefill is that of a
        generator on its mesh."""
        if not self._settled:
            settle_caches(self.own, self._decode.plan(self.other, self.own, self._nowhere))
            self._settled = True

    # -- transfers --------------------------------------------------------------------------------

    def _send(self, at: _Prefilled, slot: int, live: DTensor) -> None:
        here, there = self._here, self._there
        assert here is not None and there is not None and at.first is not None
        request, length, how = at.request, len(at.request.prompt), at.request.sampling
        fed: dict[str, object] = {
            "now": torch.tensor([[at.first, length]]),
            "request": torch.tensor([[request.seed, how.top_k]]),
            "knobs": torch.tensor([[how.temperature, how.top_p]], dtype=torch.float32),
        }
        with CALL_LOCK:
            model_home = there.model_home(self.caches)
            model_home.settle()
            there.hold(self.caches, current_homes(self.caches, there.ranks, model_home))
            make_shards_private([live], (0,))
            fed["live"] = Stored(name_on_ranks(there, live.name))
            program = self._program(length, at.row, slot)
            handle = program.handle
            fed[FROM], fed[TO] = at.row % self._together[0], slot % self._together[1]
            inputs_by_rank = [{name: fed[name] for name in r.inputs} for r in handle.program.ranks]
            run = program.cluster.run(handle, inputs_by_rank, mode=there.mode)
            program.last_run = run
            labels = frozenset(label for label, _ in self.caches.module.named_buffers())
            there.wrote([(self.caches, labels)])
            model_home.unsaved = False
            mark_changed([live], (0,), run)
        if there.at_once:
            self._checked(run)
        else:
            self._sent[request] = run

    def _checked(self, run: Future) -> None:
        assert self._there is not None
        try:
            run.check()
        except DaftError as error:
            raise self._there.with_loss_note(error) from error.__cause__

    def _program(self, length: int, row: int, slot: int) -> ClusterProgram:
        key = length, row // self._together[0], slot // self._together[1]
        return self._programs.get(key) or self._programs.load(
            key, lambda: self._load(length, row, slot)
        )

    def _load(self, length: int, row: int, slot: int) -> ClusterProgram:
        here, there = self._here, self._there
        assert here is not None and there is not None
        cluster = there.launch.cluster
        source, target = self._kept(here, there)
        plan = self._planned(length, row, slot, source, target, cluster.device)
        names = {
            label: (name_on_ranks(here, moved.here.label), name_on_ranks(there, moved.there.label))
            for label, moved in plan.transfers.items()
        }
        state = {name_on_ranks(there, target[name].label): name for name in ("request", "knobs")}
        sampling = _with_row(target["request"], slot)  # on the ranks of `live`, too
        tables = {rank: RowTables(state, {"live": "now"}) for rank in sampling.ranks}
        program = row_program(
            plan, cluster.size, cluster.device, names, length=length, tables=tables
        )
        return ClusterProgram(cluster, cluster.load(with_mesh_ranks(cluster, program)))

    def _planned(
        self,
        length: int,
        row: int,
        slot: int,
        source: Mapping[str, StoredTensor],
        target: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> SyncPlan:
        values: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        for label, stored in source.items():
            if len(stored.spec.shape) == 4:  # not an argument of the call
                here, there = _with_row(stored, row), _with_row(target[label], slot)
                values[label] = _region(here, length), _region(there, length)
        num = f"{length} position{'s' * (length != 1)}"
        name = f"{num} of {type(self.model.module).__name__}'s caches"
        plan = plan_sync(name, values, topology=self._topology, bucket_bytes=bucket_bytes(device))
        return replace(plan, what="transfer")

    def _kept(
        self, here: MeshSession, there: MeshSession
    ) -> tuple[Mapping[str, StoredTensor], Mapping[str, StoredTensor]]:
        source = current_homes(self.own, here.ranks, here.model_homes.get(id(self.own)))
        return source, current_homes(
            self.caches, there.ranks, there.model_homes.get(id(self.caches))
        )

    def _sessions(self) -> tuple[MeshSession, MeshSession]:
        self.check_launched()
        return session_for(self.other.mesh), session_for(self.model.mesh)

    def check_launched(self) -> None:
        """PlanningError where the running launch does not have both meshes."""
        running, meshes = launched(), (self.other.mesh, self.model.mesh)
        places = {} if running is None else running.launch.places
        if not places.keys() >= set(meshes):
            present = f"the running one has {meshes_text(places)}" if places else "none is running"
            raise PlanningError(
                f"prompts are prefilled on {meshes[0]} and decoded on {meshes[1]}, which needs a "
                f"launch that has the ranks of both; {present}.\n"
                f"fix: with dt.launch({meshes[0]!r}, {meshes[1]!r}): ..."
            )


def _region(cache: StoredTensor, length: int) -> StoredTensor:
    """The first positions of a row of caches [rows, heads, positions, dim]: [1, heads, length,
    dim]."""
    spec = cache.spec
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Shard) and placement.dim == 2:
            raise PlanningError(
                f"caches are kept as {spec}: {axis} splits their positions, and only their first "
                f"positions are sent.\n"
                f"fix: placements of the model by which {axis} splits heads, or nothing"
            )
    rowless = tuple(
        REPLICATE if isinstance(p, Shard) and p.dim == 0 else p for p in spec.placements
    )
    heads, dim = spec.shape[1], spec.shape[3]
    region = TensorSpec((1, heads, length, dim), spec.dtype, spec.mesh, rowless)
    return replace(cache, spec=region)


def _with_row(cache: StoredTensor, row: int) -> StoredTensor:
    """The row's cache on only those of its ranks that have this row."""
    return cache.on(r for r in cache.at if any(lo <= row < hi for lo, hi in cache.where(r)[0]))


def _ended(x: DTensor) -> bool:
    """Whether the run that makes it has ended, or has failed."""
    returned = x.value().returned
    return returned is None or returned.run.done()


# -- refusals -------------------------------------------------------------------------------


def check_length(length: object, slot: object, most: int, slots: int) -> None:
    """Check the arguments of `Generator.transfer_plan`."""
    check_number("t", length, least=1, whole=True, fix="gen.transfer_plan(13)")
    check_number("slot", slot, least=0, whole=True, fix="gen.transfer_plan(13, slot=0)")
    assert isinstance(length, int) and isinstance(slot, int)
    if length > most or slot >= slots:
        raise PlanningError(
            f"t={length}, slot={slot}: a prompt has at most {most} tokens here, and the slots are "
            f"0 to {slots - 1}.\nfix: gen.transfer_plan({min(length, most)})"
        )


def refuse_no_prefill() -> NoReturn:
    raise PlanningError(
        "this generator prefills where it decodes, and nothing is sent between meshes.\n"
        "fix: dt.generator(model, slots=..., length=..., prefill=other), with a replica of the "
        "model on another mesh"
    )


def _check_other(model: ParallelModule, other: object) -> None:
    if not isinstance(other, ParallelModule):
        check_parallel("prefill=", other)
        return
    if other.mesh == model.mesh:
        named = ", ".join(f"{axis}={size}" for axis, size in model.mesh.shape.items())
        name = "prompts" if model.mesh.name != "prompts" else "prefill"
        mesh = f'dt.Mesh({named}{", " * bool(named)}name="{name}")'
        raise PlanningError(
            f"prefill= is a model on {other.mesh}, where the generator's is too.\n"
            f"fix: leave prefill out, or dt.replica(model, {mesh}, placements)"
        )
    ours, theirs = (m.source or m for m in (model, other))
    fix = "dt.replica(model, mesh, placements), and dt.sync(model, replica) in the launch"
    if ours.module is not theirs.module:
        raise PlanningError(
            f"prefill= is a {type(other.module).__name__} on {other.mesh}, and of another module "
            f"than the generator's {type(model.module).__name__} on {model.mesh}.\nfix: {fix}"
        )
    if other.source is None and model.source is None:
        raise PlanningError(
            f"one {type(model.module).__name__} is parallelized on {model.mesh} and again on "
            f"{other.mesh}, and its values are on one mesh at a time.\nfix: {fix}"
        )


def _check_same(forward: Forward, theirs: Forward, other: ParallelModule) -> None:
    ours, prefilled = (
        {"vocabulary": f.vocabulary, **{f"layer {n}": shape for n, shape in f.layers.items()}}
        for f in (forward, theirs)
    )
    for what in dict.fromkeys((*ours, *prefilled)):
        if ours.get(what) != prefilled.get(what):
            raise PlanningError(
                f"the caches of the two models differ: {what} is {ours.get(what)} where tokens are "
                f"decoded, and {prefilled.get(what)} on {other.mesh}, where prompts are.\n"
                f"fix: make the replica anew, after the module was changed"
            )
