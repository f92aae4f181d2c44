"""Prefill on one mesh and decoding on another, for `generator(..., prefill=other)`.

    disaggregated = DisaggregatedPrefill(model, caches, forward, 256, other)
    disaggregated.admit(waiting, seats, live, arguments)   # prefills, sends, and assigns slots
    print(disaggregated.transfer_plan(13, slot=0))         # who sends what to whom

The prefill mesh has caches of ``ROWS`` rows. When a prefill has ended and a slot is free, one
verified program (runtime/transfer/cache_rows.py) sends the used part of the row, [1, heads, t, head
dim] of each layer's keys and values, to the slot. Decoding never waits for a prefill: one prefill
runs at a time, and nothing is sent meanwhile. Requests get slots in the order of their arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import ref

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
    reset_caches,
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
"""The rows of the caches on the prefill mesh: one is filled while another one waits for a slot."""
MAX_LOADED = 64
"""The number of programs of transfers that stay loaded."""

Arguments = Callable[[TextRequest, int], tuple[Tensor, ...]]
"""Returns the arguments, after ``live``, of a prefill of a request into a row."""


@dataclass(slots=True)
class _Prefilled:
    """A request in a row of the prefill caches. ``first``: its first token, once it was read."""

    request: TextRequest
    row: int
    token: DTensor
    logprob: DTensor
    first: int | None = None


class DisaggregatedPrefill:
    """Prefills prompts with the model ``other`` on its mesh; ``model`` and ``caches`` decode."""

    def __init__(
        self,
        model: ParallelModule,
        caches: ParallelModule,
        forward: Forward,
        length: int,
        other: ParallelModule,
        topology: Topology | None = None,
    ) -> None:
        """Make the caches and programs of prefill. Raises PlanningError if the models differ."""
        _check_other(model, other)
        prefill_forward = forward_of(other.module, length)
        _check_same_caches(forward, prefill_forward, other)
        self.model: ParallelModule = model
        self.caches: ParallelModule = caches
        self.other: ParallelModule = other
        self.length: int = length
        over = axes_of_slots(other)
        pieces = math.prod(other.mesh.axis_size(axis) for axis in over)
        self.rows: int = -(-ROWS // pieces) * pieces
        slots = caches.module.get_buffer("request").shape[0]
        decode_pieces = math.prod(model.mesh.axis_size(axis) for axis in axes_of_slots(model))
        # of the prefill mesh's caches, and of the decoding mesh's
        self._rows_per_rank = self.rows // pieces, slots // decode_pieces
        self.prefill_caches: ParallelModule = caches_of(
            other, prefill_forward, self.rows, length, over
        )
        self._decode = decode_program(prefill_forward, other.mesh, over, topology)  # never run
        self._prefill = prefill_program(prefill_forward, other.mesh, over, topology)
        self._topology: Topology | None = topology
        self._caches_settled = False
        self._no_live = torch.zeros(self.rows, 2, dtype=torch.int64)  # that mesh decodes nothing
        self._prefill_session: MeshSession | None = None
        self._decode_session: MeshSession | None = None
        self._free: deque[int] = deque(range(self.rows))
        self._prefilled: deque[_Prefilled] = deque()
        self._sent: dict[
            TextRequest, Future
        ] = {}  # transfers that were not checked yet, by request
        self._programs = ProgramCache[ClusterProgram](MAX_LOADED)

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, arguments: tuple[Tensor, ...]) -> Plan:
        """Return the plan of prefill on the prefill mesh."""
        with CALL_LOCK, evaluating(self.other.module):
            self._settle()
            return self._prefill.plan(self.other, self.prefill_caches, self._no_live, *arguments)

    def transfer_plan(
        self, length: int, slot: int, ranks: Mapping[Mesh, Sequence[int]] | None = None
    ) -> SyncPlan:
        """Return the plan of a transfer of ``length`` positions from the first row to a slot. The
        placements of the decoding caches are settled already."""
        with CALL_LOCK, evaluating(self.other.module):
            self._settle()
        if launched() is None:
            places = ranks_of_meshes((self.other.mesh, self.model.mesh), ranks)
            source = current_homes(self.prefill_caches, places[self.other.mesh], None)
            target = current_homes(self.caches, places[self.model.mesh], None)
            return self._plan_transfer(length, 0, slot, source, target, torch.device("cpu"))
        if ranks is not None:
            raise PlanningError(
                "ranks= says where the meshes would be, and a launch is running, which has them.\n"
                "fix: leave ranks out"
            )
        prefill, decode = self._sessions()
        homes = self._homes(prefill, decode)
        return self._plan_transfer(length, 0, slot, *homes, prefill.cluster.device)

    # -- requests ---------------------------------------------------------------------------------

    @property
    def requests(self) -> list[TextRequest]:
        """Requests on the prefill mesh that have no slot yet and have not ended."""
        return [entry.request for entry in self._prefilled if not entry.request.done]

    def enter(self) -> None:
        """Start over in the running launch."""
        prefill, decode = self._sessions()
        if prefill is not self._prefill_session or decode is not self._decode_session:
            self._programs = ProgramCache(MAX_LOADED)  # the old programs ended with their launch
        self.clear()
        self._prefill_session, self._decode_session = prefill, decode
        self.prefill_caches.initial.holders.clear()

    def restart(self) -> None:
        """After the caches were lost, drop all requests: the generator queues them again."""
        assert self._decode_session is not None
        self._prefilled.clear()
        self.clear()
        reset_caches(self._decode_session, self.prefill_caches)

    def clear(self) -> None:
        """Drop all requests."""
        if self._prefill_session is not None and not self._prefill_session.closed:
            self._prefill_session.model_home(self.prefill_caches).unsaved = False
        for entry in self._prefilled:
            if not entry.request.done:
                entry.request.reason = "dropped"
        self._prefilled.clear()
        self._sent.clear()
        self._free = deque(range(self.rows))

    def admit(
        self,
        waiting: deque[TextRequest],
        seats: list[TextRequest | None],
        live: DTensor,
        arguments: Arguments,
    ) -> None:
        """Prefill waiting requests, as far as rows are free, and assign slots to prefilled
        requests. ``live``: int64[rows, 2] on the decoding mesh, whose rows of these slots are
        written in place."""
        self._sent = {request: run for request, run in self._sent.items() if not request.done}
        if not self._caches_settled:
            with CALL_LOCK, evaluating(self.other.module):
                self._settle()
        while self._assign_slots(seats, live) and waiting and self._free:
            request = waiting.popleft()
            try:
                with CALL_LOCK, evaluating(self.other.module):
                    self._start_prefill(request, self._free[0], arguments)
            except BaseException:
                waiting.appendleft(request)  # a recovery prefills it again
                raise
            self._free.popleft()

    def check(self, request: TextRequest) -> None:
        """Wait for the request's transfer, if it has one, and raise its failure."""
        run = self._sent.pop(request, None)
        if run is not None:
            self._check_run(run)

    def _start_prefill(self, request: TextRequest, row: int, arguments: Arguments) -> None:
        """Submit the prefill of a request into a row."""
        # a policy has no versions: its weights are at least as new as the newest replica's
        versioned = self.other if self.other.source is not None else self.model
        inputs = arguments(request, row)
        outputs: Any = self._prefill(self.other, self.prefill_caches, self._no_live, *inputs)
        assert self._prefill_session is not None
        self._prefill_session.model_home(self.prefill_caches).unsaved = False
        request.versions.append(versioned.version)
        self._prefilled.append(_Prefilled(request, row, outputs["token"], outputs["logprob"]))

    def _assign_slots(self, seats: list[TextRequest | None], live: DTensor) -> bool:
        """Assign slots to prefilled requests, unless a prefill is running. Return whether no
        prefill is running."""
        if not self._prefilled:
            return True
        last = self._prefilled[-1]
        if last.first is None:
            if any(seats) and not _has_ended(last.token):
                return False
            last.first = int(last.token.full_tensor())
            last.request.add_token(last.first, float(last.logprob.full_tensor()))
        while self._prefilled:
            entry = self._prefilled[0]
            if not entry.request.done:
                if None not in seats:
                    break
                slot = seats.index(None)
                self._send(entry, slot, live)
                seats[slot] = entry.request
            self._free.append(self._prefilled.popleft().row)
        return True

    def _settle(self) -> None:
        """Settle the caches' placements by a decode on the prefill mesh, so that the prefill
        program is the same as a generator's there."""
        if not self._caches_settled:
            plan = self._decode.plan(self.other, self.prefill_caches, self._no_live)
            settle_caches(self.prefill_caches, plan)
            self._caches_settled = True

    # -- transfers --------------------------------------------------------------------------------

    def _send(self, entry: _Prefilled, slot: int, live: DTensor) -> None:
        """Send a prefilled row, its token and its options to a slot of the decoding mesh."""
        prefill, decode = self._prefill_session, self._decode_session
        assert prefill is not None and decode is not None and entry.first is not None
        request, length, sampling = entry.request, len(entry.request.prompt), entry.request.sampling
        feed: dict[str, object] = {
            "now": torch.tensor([[entry.first, length]]),
            "request": torch.tensor([[request.seed, sampling.top_k]]),
            "knobs": torch.tensor([[sampling.temperature, sampling.top_p]], dtype=torch.float32),
        }
        with CALL_LOCK:
            model_home = decode.model_home(self.caches)
            model_home.settle()
            decode.put_missing(self.caches, current_homes(self.caches, decode.ranks, model_home))
            make_shards_private([live], (0,))
            feed["live"] = Stored(name_on_ranks(decode, live.name))
            program = self._program(length, entry.row, slot)
            handle = program.handle
            feed[FROM], feed[TO] = entry.row % self._rows_per_rank[0], slot % self._rows_per_rank[1]
            inputs_by_rank = [{name: feed[name] for name in r.inputs} for r in handle.program.ranks]
            run = program.cluster.run(handle, inputs_by_rank, mode=decode.mode)
            program.last_run = ref(run)
            labels = frozenset(label for label, _ in self.caches.module.named_buffers())
            decode.record_write([(self.caches, labels)])
            model_home.unsaved = False
            mark_changed([live], (0,), run)
        if decode.at_once:
            self._check_run(run)
        else:
            self._sent[request] = run

    def _check_run(self, run: Future) -> None:
        """Wait for a transfer. Raises its failure."""
        assert self._decode_session is not None
        try:
            run.check()
        except DaftError as error:
            raise self._decode_session.with_loss_note(error) from error.__cause__

    def _program(self, length: int, row: int, slot: int) -> ClusterProgram:
        """Return the program of a transfer; it serves all rows and slots on the same ranks."""
        key = length, row // self._rows_per_rank[0], slot // self._rows_per_rank[1]
        return self._programs.get(key) or self._programs.load(
            key, lambda: self._load(length, row, slot)
        )

    def _load(self, length: int, row: int, slot: int) -> ClusterProgram:
        """Load the program that sends ``length`` positions of the row to the slot. It also serves
        other rows and slots on the same ranks."""
        prefill, decode = self._prefill_session, self._decode_session
        assert prefill is not None and decode is not None
        cluster = decode.launch.cluster
        source, target = self._homes(prefill, decode)
        plan = self._plan_transfer(length, row, slot, source, target, cluster.device)
        names = {
            label: (
                name_on_ranks(prefill, moved.here.label),
                name_on_ranks(decode, moved.there.label),
            )
            for label, moved in plan.transfers.items()
        }
        state = {name_on_ranks(decode, target[name].label): name for name in ("request", "knobs")}
        sampling = _with_row(target["request"], slot)  # on the ranks of `live`, too
        tables = {rank: RowTables(state, {"live": "now"}) for rank in sampling.ranks}
        program = row_program(
            plan, cluster.size, cluster.device, names, length=length, tables=tables
        )
        return ClusterProgram(cluster, cluster.load(with_mesh_ranks(cluster, program)))

    def _plan_transfer(
        self,
        length: int,
        row: int,
        slot: int,
        source: Mapping[str, StoredTensor],
        target: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> SyncPlan:
        """Return the plan of a transfer of the row's first ``length`` positions to the slot."""
        values: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        for label, stored in source.items():
            if len(stored.spec.shape) == 4:  # keys and values, and not sampling options
                source_row, target_row = _with_row(stored, row), _with_row(target[label], slot)
                values[label] = _used_region(source_row, length), _used_region(target_row, length)
        num = f"{length} position{'s' * (length != 1)}"
        name = f"{num} of {type(self.model.module).__name__}'s caches"
        plan = plan_sync(name, values, topology=self._topology, bucket_bytes=bucket_bytes(device))
        return replace(plan, what="transfer")

    def _homes(
        self, prefill: MeshSession, decode: MeshSession
    ) -> tuple[Mapping[str, StoredTensor], Mapping[str, StoredTensor]]:
        """Return the homes of the prefill caches and of the decoding caches, by label."""
        prefill_home = prefill.model_homes.get(id(self.prefill_caches))
        decode_home = decode.model_homes.get(id(self.caches))
        source = current_homes(self.prefill_caches, prefill.ranks, prefill_home)
        return source, current_homes(self.caches, decode.ranks, decode_home)

    def _sessions(self) -> tuple[MeshSession, MeshSession]:
        self.check_launched()
        return session_for(self.other.mesh), session_for(self.model.mesh)

    def check_launched(self) -> None:
        """Raises PlanningError unless the running launch has both meshes."""
        running, meshes = launched(), (self.other.mesh, self.model.mesh)
        places = {} if running is None else running.launch.places
        if not places.keys() >= set(meshes):
            present = f"the running one has {meshes_text(places)}" if places else "none is running"
            raise PlanningError(
                f"prompts are prefilled on {meshes[0]} and decoded on {meshes[1]}, which needs a "
                f"launch that has the ranks of both; {present}.\n"
                f"fix: with dt.launch({meshes[0]!r}, {meshes[1]!r}): ..."
            )


def _used_region(cache: StoredTensor, length: int) -> StoredTensor:
    """Return the first ``length`` positions of a row of a cache [rows, heads, positions, dim], as a
    value [1, heads, length, dim]. Raises PlanningError if positions are split."""
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
    """Return the cache on only the ranks that have this row."""
    return cache.on(r for r in cache.at if any(lo <= row < hi for lo, hi in cache.where(r)[0]))


def _has_ended(x: DTensor) -> bool:
    """Return whether the run that makes the value has ended or failed."""
    returned = x.value().returned
    return returned is None or returned.run.done()


# -- checks ----------------------------------------------------------------------------------------


def check_length(length: object, slot: object, max_length: int, slots: int) -> None:
    """Raises PlanningError for invalid arguments of `Generator.transfer_plan`. ``max_length``: the
    longest prompt."""
    check_number("t", length, least=1, whole=True, fix="gen.transfer_plan(13)")
    check_number("slot", slot, least=0, whole=True, fix="gen.transfer_plan(13, slot=0)")
    assert isinstance(length, int) and isinstance(slot, int)
    if length > max_length or slot >= slots:
        raise PlanningError(
            f"t={length}, slot={slot}: a prompt has at most {max_length} tokens here, and the "
            f"slots are 0 to {slots - 1}.\nfix: gen.transfer_plan({min(length, max_length)})"
        )


def refuse_no_prefill() -> NoReturn:
    raise PlanningError(
        "this generator prefills where it decodes, and nothing is sent between meshes.\n"
        "fix: dt.generator(model, slots=..., length=..., prefill=other), with a replica of the "
        "model on another mesh"
    )


def _check_other(model: ParallelModule, other: object) -> None:
    """Raises PlanningError unless ``other`` is the same model on another mesh, and one of the two
    is a replica."""
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


def _check_same_caches(forward: Forward, prefill_forward: Forward, other: ParallelModule) -> None:
    """Raises PlanningError if the two models have different layers or vocabularies."""
    decode, prefill = (
        {"vocabulary": f.vocabulary, **{f"layer {n}": shape for n, shape in f.layers.items()}}
        for f in (forward, prefill_forward)
    )
    for key in dict.fromkeys((*decode, *prefill)):
        if decode.get(key) != prefill.get(key):
            raise PlanningError(
                f"the caches of the two models differ: {key} is {decode.get(key)} where tokens are "
                f"decoded, and {prefill.get(key)} on {other.mesh}, where prompts are.\n"
                f"fix: make a new replica after changing the module"
            )
