"""`generator`: texts from a parallelized model, one token of every slot at a time.

    model = dt.parallelize(LlamaForCausalLM(config), dt.Mesh(tp=2), placements)
    gen = generator(model, slots=8, length=256)
    gen([[5, 3, 9], [7]], max_new_tokens=64)           # [Generated(tokens=..., ...), ...]
    for event in gen.stream(prompts): ...              # as tokens come
    request = gen.submit(prompt); gen.step()           # continuous batching by the caller

Two programs use the model on the ranks, and a module of the generator that has only the KV caches:
*prefill* (``prefill_batch`` prompts, padded to a bucket, into slots) and *decode* (one token of
every slot). The inputs of the next decode (``live``: each slot's last token and its position) are a
result of the one before. The controller reads tokens to detect finished texts, up to ``ahead`` runs
late: tokens of a slot after its end are dropped, and the slot stays free until then.

The caches are placed like the model: slots over every axis that splits no weight, heads as the
planner splits them with the attention's projections, each layer's on the stage of its attention.
With fewer heads than ranks each rank keeps the heads that its query heads use (not with
``prefill=``, where every rank keeps all).

Invariants: the tokens of a request are a function of its prompt, its options and its seed, to the
bit in the same program. They do not depend on its slot, on other requests, on time or on ``ahead``.
Another option, prompt or number of requests within a bucket needs no new capture. Not here: the
caches (kv_cache.py), calls of models (forwards.py), the draw of a token (sharding/ops/sampling.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dtensor.api.eager.tensor import DTensor, put_shards
from dtensor.api.generation.disaggregated_prefill import (
    DisaggregatedPrefill,
    check_length,
    refuse_no_prefill,
)
from dtensor.api.generation.forwards import evaluating, forward_of
from dtensor.api.generation.programs import (
    axes_of_slots,
    caches_of,
    copies_of_heads,
    decode_program,
    live_spec,
    prefill_program,
    put_anew,
    settle_caches,
)
from dtensor.api.generation.requests import (
    Eos,
    Event,
    Generated,
    Sampling,
    TextRequest,
    each,
    eos_of,
    prompt_of,
    prompts_of,
)
from dtensor.api.generation.summary import Summary, summary_of
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.store.session import MeshSession, session_for
from dtensor.api.values.randomness import Counter, initial_seed, key_of
from dtensor.daft import DaftError
from dtensor.errors import PlanningError, check_number, check_word, not_pickled
from dtensor.frontend.call_lock import CALL_LOCK, is_capturing
from dtensor.frontend.graph import Graph
from dtensor.sharding.ops import sampling as sampling  # registers torch.ops.dt.next_tokens
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh

SMALLEST_BUCKET = 16
VECTOR = 2
"""The slots of a rank are a multiple of this. Torch computes the last elements of silu and other
ops in another way, where they do not fill vectors of 64, so a text would have other bits in the
last slot. With an even number of slots this happens only for widths that are no multiple of 32."""
WHOLE = 16
"""Positions that fill a CPU's vectors, four of 16 numbers, where widths are multiples of 4."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run in flight: the requests that get a token from it, with the row of each. ``whole``: it
    makes a token for every row, else for these requests in their order."""

    of: tuple[tuple[int, TextRequest], ...]
    token: DTensor
    logprob: DTensor
    whole: bool


class Generator:
    """The result of `generator`. ``gen(prompts, max_new_tokens=...)`` returns a text for each
    prompt, in their order: ``.tokens``, the new ones, ``.logprobs``, and ``.reason``, why it
    ended."""

    def __init__(
        self,
        model: ParallelModule,
        slots: int,
        length: int,
        buckets: Sequence[int],
        sampling: Sampling,
        eos: Eos | Literal["model"],
        ahead: int,
        prefill: ParallelModule | None = None,
        prefill_batch: int = 1,
        topology: Topology | None = None,
    ) -> None:
        model.look()
        forward = forward_of(model.module, length)
        self.model = model
        self._made_for = forward, model.seen.number
        self.slots: int = slots
        self.length: int = length
        self.buckets: tuple[int, ...] = tuple(buckets)
        self.ahead: int = ahead
        self.prefill_batch = prefill_batch
        self.sampling: Sampling = sampling
        self.eos: frozenset[int] = eos_of(eos, forward.eos)
        self.vocabulary: int = forward.vocabulary
        self.rows_over = axes_of_slots(model)
        pieces = 1
        for axis in self.rows_over:
            pieces *= model.mesh.axis_size(axis)
        rows_per_rank = -(-slots // pieces)  # slots of a rank; spare ones pad it
        self.rows: int = pieces * (
            rows_per_rank if rows_per_rank == 1 else -(-rows_per_rank // VECTOR) * VECTOR
        )
        self.caches: ParallelModule = caches_of(model, forward, self.rows, length, self.rows_over)
        self._decode = decode_program(forward, model.mesh, self.rows_over, topology)
        self._prefill = prefill_program(forward, model.mesh, self.rows_over, topology)
        self._apart = None
        if prefill is not None:
            self._apart = DisaggregatedPrefill(
                model, self.caches, forward, length, prefill, topology
            )
        self._switches = self._now_switches()
        self._settled = False
        self._shares_graphs = False  # with generators on other meshes, so caches have no copies
        self._one = RLock()  # taken before CALL_LOCK
        self._asked = Counter("generate")  # counts requests without a stated seed
        self._numbers = 0
        self._session: MeshSession | None = None
        self._recovered = 0  # the cluster's `recovered` when the caches were put
        self._live: DTensor | None = None
        self._seats: list[TextRequest | None] = [None] * slots
        self._waiting: deque[TextRequest] = deque()
        self._flying: deque[_Run] = deque()
        self._events: list[Event] = []  # of submitted requests

    def __reduce__(self) -> NoReturn:
        raise not_pickled(
            "a generator cannot be pickled or copied",
            'dt.save("checkpoint", gen.model), and make the generator again from the model that '
            "dt.load has filled",
        )

    def __repr__(self) -> str:
        apart = "" if self._apart is None else f", prompts on {self._apart.other.mesh}"
        return (
            f"<generator of {type(self.model.module).__name__} on {self.model.mesh}{apart}: "
            f"{self.slots} slots of {self.length} positions>"
        )

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, which: str, bucket: int | None = None) -> Plan:
        """The plan of ``which``: "decode", or "prefill" with a bucket, by default the largest. It
        launches nothing."""
        check_word("which", which, ("prefill", "decode"))
        self._check_placed()
        with CALL_LOCK, evaluating(self.model.module):
            self._settle()
            live = live_spec(self.model, self.rows, self.rows_over)
            if which == "decode":
                return self._decode.plan(self.model, self.caches, live)
            size = self.buckets[-1] if bucket is None else bucket
            if size not in self.buckets:
                raise PlanningError(f"bucket={bucket!r}: the buckets are {list(self.buckets)}")
            asked = [_asking((0,), 0, self._width(size), 0, Sampling())]
            if self._apart is not None:
                return self._apart.plan(asked[0])
            return self._prefill.plan(self.model, self.caches, live, *self._filled(asked))

    def plans(self, bucket: int, graphs: dict[object, Graph]) -> tuple[Plan, Plan]:
        """The plans of decode and of prefill. ``graphs``, empty at first, is shared by generators
        of one model and length: a program that is planned for many meshes is captured once."""
        programs = {
            ("decode", self.rows): self._decode,
            ("prefill", self.rows, self._width(bucket), self.prefill_batch): self._prefill,
        }
        self._shares_graphs = True
        for key, program in programs.items():
            program.graph = graphs.get(key)
        both = self.plan("decode"), self.plan("prefill", bucket)
        for key, program in programs.items():
            if program.plans.latest is not None:
                graphs[key] = program.plans.latest.graph
            program.graph = None
        return both

    def transfer_plan(
        self, t: int, slot: int = 0, *, ranks: Mapping[Mesh, Sequence[int]] | None = None
    ) -> SyncPlan:
        """The messages that carry a prompt of ``t`` tokens from the mesh of ``prefill=`` to a slot:
        the pieces of each layer's keys and values, bytes of each pair of ranks, messages, the
        price. It launches nothing.

        Args:
            ranks: outside a launch, the ranks of the meshes, as in ``dt.launch(..., ranks=ranks)``;
                by default those of prefill are the first.
        """
        if self._apart is None:
            refuse_no_prefill()
        check_length(t, slot, min(self.buckets[-1], self.length - 1), self.slots)
        self._check_placed()
        with CALL_LOCK, evaluating(self.model.module):
            self._settle()
        return self._apart.transfer_plan(t, slot, ranks)

    def summary(self) -> Summary:
        """Bytes of the cache on each rank, and the communication of a token."""
        decode = self.plan("decode")
        return summary_of(repr(self), decode, self.slots, self.rows, self.length, self.buckets)

    def _now_switches(self) -> int:
        prefill = 0 if self._apart is None else self._apart.other.switches
        return self.model.switches + prefill

    def _check_placed(self) -> None:
        """PlanningError unless the model's placement and its layers with caches are those for which
        the caches and programs were made."""
        if self._switches != self._now_switches():
            raise PlanningError(
                f"{type(self.model.module).__name__} was switched to {self.model.mesh} since this "
                f"generator was made; its caches have the old placement.\n"
                f"fix: gen = dt.generator(model, slots={self.slots}, length={self.length}), anew"
            )
        self.model.look()
        forward, number = self._made_for
        if number != self.model.seen.number:
            if forward_of(self.model.module, self.length) != forward:
                raise PlanningError(
                    f"{type(self.model.module).__name__} has other layers, or another dtype, than "
                    f"when this generator was made, and its caches are for those.\n"
                    f"fix: gen = dt.generator(model, slots={self.slots}, length={self.length}), "
                    f"anew"
                )
            self._made_for = forward, self.model.seen.number

    def _settle(self) -> None:
        if not self._settled:
            live = live_spec(self.model, self.rows, self.rows_over)
            plan = self._decode.plan(self.model, self.caches, live)
            copies = copies_of_heads(plan) if self._apart is None else {}
            if copies and not self._shares_graphs:
                sizes, (forward, _) = (self.rows, self.length), self._made_for
                self.caches = caches_of(self.model, forward, *sizes, self.rows_over, copies)
                plan = self._decode.plan(self.model, self.caches, live)
            settle_caches(self.caches, plan)
            self._settled = True

    # -- all at once ------------------------------------------------------------------------------

    def __call__(
        self, prompts: Sequence[Any] | Tensor, max_new_tokens: Any = None, **options: Any
    ) -> list[Generated]:
        """The new tokens of each prompt, in the prompts' order.

        Args:
            prompts: lists of tokens, or 1-D integer tensors; any lengths.
            max_new_tokens: a number, or one for each; None: as many as the slot has room for.
            options: temperature, top_k, top_p, seed: each one for all, or a list of one for each
                prompt; eos. See `generator`. An integer ``seed`` gives every prompt numbers of its
                own by its place.
        """
        requests = self._requests(prompts, max_new_tokens, options, [])
        self._run_all(requests)
        return [request.generated() for request in requests]

    def stream(
        self, prompts: Sequence[Any] | Tensor, max_new_tokens: Any = None, **options: Any
    ) -> Iterator[Event]:
        """The same, one event for each token as it comes; ``prompts``, ``max_new_tokens`` and
        ``options`` as in a call. Leaving the loop early drops the rest."""
        events: list[Event] = []
        requests = self._requests(prompts, max_new_tokens, options, events)
        return self._streamed(requests, events)

    def _streamed(self, requests: list[TextRequest], events: list[Event]) -> Iterator[Event]:
        self._waiting.extend(requests)
        try:
            while events or not all(request.done for request in requests):
                if not events:
                    self._advance()
                while events:
                    yield events.pop(0)
            _check_whole(requests)
        finally:
            for request in requests:
                self.cancel(request)

    def _run_all(self, requests: list[TextRequest]) -> None:
        self._waiting.extend(requests)
        try:
            while not all(request.done for request in requests):
                self._advance()
            _check_whole(requests)
        finally:
            for request in requests:
                self.cancel(request)

    # -- one at a time ----------------------------------------------------------------------------

    def submit(self, prompt: Any, max_new_tokens: int | None = None, **options: Any) -> TextRequest:
        """A request of ``prompt`` that waits for a free slot; `step` returns its tokens.
        ``max_new_tokens`` and ``options`` are as in a call, for one."""
        (request,) = self._requests([prompt], max_new_tokens, options, self._events)
        request.number = self._numbers
        self._numbers += 1
        self._waiting.append(request)
        return request

    def step(self) -> list[Event]:
        """Admit requests to free slots, make one token for every slot that has a request, and
        return events of submitted requests, up to ``ahead`` runs late."""
        if not self.idle:
            self._advance()
        events, self._events[:] = list(self._events), []
        return events

    @property
    def idle(self) -> bool:
        """Whether no request waits, and none is in flight."""
        apart = self._apart is not None and self._apart.requests
        return not (self._waiting or self._flying or any(self._seats) or apart)

    def cancel(self, request: TextRequest) -> None:
        """The request gets no more tokens; its slot is free."""
        if not request.done:
            request.reason = "dropped"
            with suppress(ValueError):  # it no longer waits
                self._waiting.remove(request)
        for row, seated in enumerate(self._seats):
            if seated is request:
                self._seats[row] = None

    # -- requests ---------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Sequence[Any] | Tensor,
        max_new_tokens: Any,
        options: Mapping[str, Any],
        events: list[Event],
    ) -> list[TextRequest]:
        _check_options(options)
        self._check_placed()
        listed = prompts_of(prompts)
        num = len(listed)
        limits = each("max_new_tokens", max_new_tokens, num)
        names = ("temperature", "top_k", "top_p")
        columns = {n: each(n, options[n], num) for n in names if n in options}
        stated = options.get("seed")
        seeds = each("seed", stated, num)
        own = options.get("eos", "own")
        eos = self.eos if own == "own" else eos_of(own, tuple(self.eos))
        requests: list[TextRequest] = []
        for number, given in enumerate(listed):
            prompt = prompt_of(given, self.vocabulary)
            how = replace(self.sampling, **{n: column[number] for n, column in columns.items()})
            seed = self._seed(seeds[number], 0 if isinstance(stated, (list, tuple)) else number)
            most = self._most(prompt, limits[number])
            requests.append(TextRequest(number, prompt, most, how, seed, eos, events))
        return requests

    def _seed(self, seed: object, place: int) -> int:
        if seed is None:
            return key_of(initial_seed(), "generate", "next", str(self._asked.advance()))
        check_number("seed", seed, least=0, whole=True, fix="seed=7")
        return key_of(int(seed), "generate", str(place))  # type: ignore[call-overload]

    def _most(self, prompt: tuple[int, ...], limit: object) -> int:
        """The most new tokens of a request. PlanningError where it does not fit."""
        num = len(prompt)
        if num > self.buckets[-1] or num >= self.length:
            largest = min(self.buckets[-1], self.length - 1)
            raise PlanningError(
                f"a prompt has {num} tokens; the buckets are {list(self.buckets)}, and a slot has "
                f"{self.length} positions.\n"
                f"fix: a prompt of at most {largest}, or dt.generator(model, slots={self.slots}, "
                f"length={2 * num})"
            )
        room = self.length - num
        if limit is None:
            return room
        check_number("max_new_tokens", limit, least=1, whole=True, fix="max_new_tokens=64")
        most = int(limit)  # type: ignore[call-overload]
        if most > room:
            raise PlanningError(
                f"a prompt of {num} tokens and {most} new ones do not fit in a slot of "
                f"{self.length} positions.\n"
                f"fix: max_new_tokens={room}, or dt.generator(model, slots={self.slots}, "
                f"length={num + most})"
            )
        return most

    # -- runs -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Prefill admitted requests, decode all slots, and read results older than ``ahead``.

        One thread at a time. Each run is submitted under the lock of all calls, and read without
        it, so other calls continue meanwhile.
        """
        if is_capturing():
            raise PlanningError(
                "Texts are generated within a program that is being captured.\n"
                "fix: generate before, and pass the tokens as an argument"
            )
        with self._one:
            self._check_placed()
            try:
                with CALL_LOCK:
                    self._enter()
                self._advance_once()
            except BaseException:
                self._clear()
                raise

    def _advance_once(self) -> None:
        assert self._session is not None
        cluster = self._session.cluster
        if cluster.recovered != self._recovered:
            with CALL_LOCK:
                self._begin_again()
        try:
            if not self._settled:
                with CALL_LOCK, evaluating(self.model.module):
                    self._settle()
            asked = self._admit()
            seated = ((row, r) for row, r in enumerate(self._seats) if r is not None)
            sitting = tuple((row, r) for row, r in seated if not r.done)
            if sitting:
                with CALL_LOCK, evaluating(self.model.module):
                    outputs = self._decode(self.model, self.caches, self._live)
                    self._went(sitting, outputs, whole=True)
            self._read(self.ahead if asked or sitting else 0)
        except DaftError:
            if cluster.recovered == self._recovered:
                raise

    def _begin_again(self) -> None:
        """A rank was replaced, and its caches are gone: prefill requests in flight again, and
        decode their tokens again. Tokens do not depend on the slot or on the time."""
        assert self._session is not None
        self._recovered = self._session.cluster.recovered
        flying = [request for run in self._flying for _, request in run.of]
        apart = [] if self._apart is None else self._apart.requests
        seated = [request for request in self._seats if request is not None]
        begun = [r for r in dict.fromkeys((*flying, *seated, *apart)) if not r.done]
        self._flying.clear()
        self._seats = [None] * self.slots
        self._waiting.extendleft(reversed(begun))
        for request in begun:
            request.begin_again(self.model.version)
        if self._apart is not None:
            self._apart.begin_again()
        put_anew(self._session, self.caches)

    def _admit(self) -> bool:
        """Give free slots to waiting requests, first come first served; requests of one bucket
        enter together."""
        if self._apart is not None:
            assert self._live is not None
            self._apart.admit(self._waiting, self._seats, self._live, self._arguments)
            return bool(self._apart.requests)
        entering: dict[int, list[tuple[int, TextRequest]]] = {}
        for row in range(self.slots):
            if self._waiting and self._seats[row] is None:
                request = self._seats[row] = self._waiting.popleft()
                entering.setdefault(self._bucket(request), []).append((row, request))
        for group in entering.values():
            for first in range(0, len(group), self.prefill_batch):
                some = group[first : first + self.prefill_batch]
                asked = [self._arguments(request, row) for row, request in some]
                with CALL_LOCK, evaluating(self.model.module):
                    outputs = self._prefill(
                        self.model, self.caches, self._live, *self._filled(asked)
                    )
                    self._went(tuple(some), outputs, whole=False)
                self._read(self.ahead)
        return bool(entering)

    def _bucket(self, request: TextRequest) -> int:
        return next(size for size in self.buckets if size >= len(request.prompt))

    def _arguments(self, request: TextRequest, row: int) -> tuple[Tensor, ...]:
        """The arguments of a prefill of one prompt, after ``live``."""
        width = self._width(self._bucket(request))
        return _asking(request.prompt, row, width, request.seed, request.sampling)

    def _width(self, bucket: int) -> int:
        """The width of a prefill. Torch computes the last elements of silu and other ops in another
        way, where they do not fill its vectors; with several prompts that would affect only the
        last one."""
        return bucket if self.prefill_batch == 1 else -(-bucket // WHOLE) * WHOLE

    def _filled(self, asked: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The arguments of one prefill, always of one shape: copies of the first prompt pad the
        batch, and write the same values again."""
        asked = asked + asked[:1] * (self.prefill_batch - len(asked))
        return tuple(torch.cat(column) for column in zip(*asked, strict=True))

    def _went(
        self,
        of: tuple[tuple[int, TextRequest], ...],
        outputs: Mapping[str, DTensor],
        *,
        whole: bool,
    ) -> None:
        assert self._session is not None
        self._live = outputs["live"]
        # worthless once the launch has ended: no warning that they were not gathered
        self._session.model_home(self.caches).unsaved = False
        self._flying.append(_Run(of, outputs["token"], outputs["logprob"], whole))
        for row, request in of:
            request.versions.append(self.model.version)
            if len(request.versions) == request.most:
                self._seats[row] = None

    def _read(self, ahead: int) -> None:
        while len(self._flying) > ahead:
            run = self._flying[0]  # until it is read, so that a recovery knows its requests
            if all(request.done for _, request in run.of):
                self._flying.popleft()
                continue
            if self._apart is not None:
                for _, request in run.of:
                    self._apart.check(request)
            assert self._session is not None
            tokens, logprobs = run.token.full_tensor().tolist(), run.logprob.full_tensor().tolist()
            if self._session.cluster.recovered != self._recovered:
                return  # it may depend on lost values
            self._flying.popleft()
            for number, (row, request) in enumerate(run.of):
                at = row if run.whole else number
                request.took(tokens[at], logprobs[at])
                if request.done and self._seats[row] is request:
                    self._seats[row] = None

    def _enter(self) -> None:
        """Use the running session; on a new one, caches begin anew."""
        if self._apart is not None:
            self._apart.check_launched()
        session = session_for(self.model.mesh)
        if session is self._session and not session.closed:
            return
        begun = {id(r) for run in self._flying for _, r in run.of if not r.done}
        begun |= {id(r) for r in self._seats if r is not None}
        if self._apart is not None:
            begun |= {id(r) for r in self._apart.requests}
            self._apart.enter()
        self._session = session
        self._recovered = session.cluster.recovered
        self.caches.initial.holders.clear()  # zeros again: the old caches ended with their launch
        spec = live_spec(self.model, self.rows, self.rows_over)
        self._live = put_shards(torch.zeros(spec.shape, dtype=spec.dtype), spec, session)
        if begun:
            raise RuntimeError(
                f"the launch in which {len(begun)} requests were in flight has ended, and their "
                f"caches with it.\nfix: submit them again"
            )

    def _clear(self) -> None:
        """After a failure: no request has a slot or waits, and no run is in flight."""
        known = [*self._waiting, *self._seats, *(r for run in self._flying for _, r in run.of)]
        for request in known:
            if request is not None and not request.done:
                request.reason = "dropped"
        if self._apart is not None:
            self._apart.clear()
        self._session = self._live = None
        self._flying.clear()
        self._waiting.clear()
        self._seats = [None] * self.slots


def generator(
    model: ParallelModule,
    *,
    slots: int,
    length: int,
    buckets: Sequence[int] | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: Eos | Literal["model"] = "model",
    ahead: int = 0,
    prefill: ParallelModule | None = None,
    prefill_batch: int = 1,
    topology: Topology | None = None,
) -> Generator:
    """Texts from a parallelized model: one of transformers, unchanged, or one with
    ``forward(tokens, cache, pos)`` (docs/generation.md).

    Args:
        slots: requests that generate at once.
        length: positions of a slot, for the prompt and the new tokens.
        buckets: lengths that prompts are padded to, one captured program each; by default powers
            of two from 16, and ``length``.
        temperature, top_k, top_p: defaults of requests. 0: greedy; 0: all; 1: all.
        eos: the token or tokens that end a text; "model": those of a Hugging Face model's
            generation_config; other models have none.
        ahead: runs that may be in flight when a result is read.
        prefill: the same model on another mesh of the launch, where prompts are prefilled: a
            replica of it or of its policy, or the policy. The used part of its caches is sent to
            the slot.
        prefill_batch: prompts of one bucket that are prefilled together, in one run. The batch
            always has this size, for other shapes have other bits: many prompts get cheaper, one
            alone dearer.
        topology: the planner's prices.

    Raises PlanningError for a model whose cache is more than keys and values, by name.
    """
    check_parallel("generator", model)
    check_topology(topology)
    fix = "dt.generator(model, slots=8, length=256)"
    check_number("slots", slots, least=1, whole=True, fix=fix)
    check_number("length", length, least=2, whole=True, fix=fix)
    check_number("ahead", ahead, least=0, whole=True, fix="ahead=2")
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    check_number("prefill_batch", prefill_batch, least=1, whole=True, fix="prefill_batch=4")
    if prefill_batch > slots:
        raise PlanningError(
            f"prefill_batch={prefill_batch} prompts never enter {slots} slots together.\n"
            f"fix: prefill_batch={slots}"
        )
    if prefill is not None and prefill_batch > 1:
        raise PlanningError(
            f"prefill_batch={prefill_batch} with prefill=: on its own mesh a prompt is prefilled "
            f"alone.\nfix: leave prefill_batch out"
        )
    sizes = _buckets(buckets, length)
    return Generator(model, slots, length, sizes, how, eos, ahead, prefill, prefill_batch, topology)


def _buckets(buckets: object, length: int) -> tuple[int, ...]:
    if buckets is None:
        powers = (2**n for n in range(length.bit_length()))
        return (*(size for size in powers if SMALLEST_BUCKET <= size < length), length)
    if not isinstance(buckets, (list, tuple)) or not buckets:
        raise PlanningError(f"buckets={buckets!r} is no list of lengths; fix: buckets=(64, 256)")
    for size in buckets:
        check_number("buckets", size, least=1, whole=True, fix="buckets=(64, 256)")
        if size > length:
            raise PlanningError(
                f"a bucket of {size} is longer than a slot, {length}.\nfix: length={size}"
            )
    return tuple(sorted(set(buckets)))


_OPTIONS = ("temperature", "top_k", "top_p", "seed", "eos")


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name}= is no option of a request; they are {', '.join(_OPTIONS)}")


def _check_whole(requests: Sequence[TextRequest]) -> None:
    dropped = [request.number for request in requests if request.reason == "dropped"]
    if dropped:
        raise RuntimeError(
            f"the requests {dropped} ended before their last token: a run failed, or they were "
            f"cancelled.\nfix: ask for them again"
        )


def _asking(
    prompt: Sequence[int], row: int, bucket: int, seed: int, how: Sampling
) -> tuple[Tensor, ...]:
    """The arguments of a prefill after ``live``."""
    tokens = torch.zeros(1, bucket, dtype=torch.int64)
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    where, request = torch.tensor([[row, len(prompt)]]), torch.tensor([[seed, how.top_k]])
    knobs = torch.tensor([[how.temperature, how.top_p]], dtype=torch.float32)
    return tokens, where, request, knobs
