"""`generator`: continuous batching of texts from a parallelized model with KV caches.

    gen = generator(model, slots=8, length=256)
    gen([[5, 3, 9], [7]], max_new_tokens=64)           # [Generated(tokens=..., ...), ...]
    for event in gen.stream(prompts): ...              # an event for each token
    request = gen.submit(prompt); gen.step()           # one step at a time

Two programs run on the ranks (programs.py): *prefill* writes prompts into slots, *decode* makes a
token for every slot. The controller reads tokens up to ``ahead`` runs late, and drops tokens after
the end of a text. Invariant: the tokens of a request depend, bitwise, only on its prompt, options
and seed; not on its slot, on other requests, on time or on ``ahead``.
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
from dtensor.api.generation.forwards import Forward, evaluating, forward_of
from dtensor.api.generation.programs import (
    axes_of_slots,
    caches_of,
    copies_of_heads,
    decode_program,
    live_spec,
    prefill_program,
    reset_caches,
    settle_caches,
    split_of_positions,
)
from dtensor.api.generation.requests import (
    Eos,
    Event,
    Generated,
    Sampling,
    TextRequest,
    eos_of,
    per_prompt,
    prompt_of,
    prompts_of,
)
from dtensor.api.generation.summary import Summary, summary_of
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.store.session import MeshSession, session_for
from dtensor.api.values.randomness import Counter, initial_seed, key_of
from dtensor.daft import DaftError
from dtensor.errors import PlanningError, check_number, check_word, pickling_error
from dtensor.frontend.call_lock import CALL_LOCK, is_capturing
from dtensor.frontend.graph import Graph
from dtensor.sharding.ops import sampling as sampling  # registers torch.ops.dt.next_tokens
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 2
"""The number of slots on a rank is a multiple of this. Torch computes the elements of silu and
other ops that do not fill a vector of 64 elements differently, so a text in the last slot would
have other bits. With an even number of slots this happens only if a width is not a multiple of
32."""
WIDTH_MULTIPLE = 16
"""The width of a prefill of several prompts is a multiple of this, so that it fills the CPU's
vectors if the model's widths are multiples of 4."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run in flight. ``requests``: the requests that get a token from it, with their rows;
    ``is_decode``: the results have an entry for each row, otherwise one for each request."""

    requests: tuple[tuple[int, TextRequest], ...]
    token: DTensor
    logprob: DTensor
    is_decode: bool


class Generator:
    """The result of `generator`. ``gen(prompts, max_new_tokens=...)`` returns a text for each
    prompt, in order: its new ``.tokens``, their ``.logprobs``, and the ``.reason`` of its end."""

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
        self._forward_and_contents = forward, model.seen.number
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
        rows_per_rank = -(-slots // pieces)
        if rows_per_rank > 1:
            rows_per_rank = -(-rows_per_rank // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        self.rows: int = pieces * rows_per_rank  # the slots, and spare ones that pad them
        self.split = split = split_of_positions(model, length)
        program = forward, model.mesh, self.rows_over, topology, split
        self._decode, self._prefill = decode_program(*program), prefill_program(*program)
        self._greedy_decode = decode_program(*program, is_greedy=True)
        self._greedy_prefill = prefill_program(*program, is_greedy=True)
        self.caches: ParallelModule = self._new_caches(forward)
        self._disaggregated = None
        if prefill is not None:
            self._disaggregated = DisaggregatedPrefill(
                model, self.caches, forward, length, prefill, topology
            )
        self._switches = self._count_switches()
        self._caches_settled = False
        self._shares_graphs = False  # with generators on other meshes: then heads are not copied
        self._lock = RLock()  # taken before CALL_LOCK
        self._request_counter = Counter("generate")  # counts requests without a stated seed
        self._next_number = 0  # of a submitted request
        self._session: MeshSession | None = None
        self._recovered = 0  # the cluster's `recovered` when the caches were put
        self._live: DTensor | None = None  # each slot's last token and its position
        self._seats: list[TextRequest | None] = [None] * slots  # the request of each slot
        self._waiting: deque[TextRequest] = deque()
        self._in_flight: deque[_Run] = deque()
        self._events: list[Event] = []  # of submitted requests

    def __reduce__(self) -> NoReturn:
        raise pickling_error(
            "a generator cannot be pickled or copied",
            'dt.save("checkpoint", gen.model), and make the generator again from the model that '
            "dt.load has filled",
        )

    def __repr__(self) -> str:
        other = "" if (d := self._disaggregated) is None else f", prompts on {d.other.mesh}"
        return (
            f"<generator of {type(self.model.module).__name__} on {self.model.mesh}{other}: "
            f"{self.slots} slots of {self.length} positions>"
        )

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, which: str, bucket: int | None = None) -> Plan:
        """Return the plan of "decode", or of "prefill" with a bucket, by default the largest.
        Launches nothing."""
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
            arguments = [_prefill_arguments((0,), 0, self._width(size), 0, Sampling())]
            if self._disaggregated is not None:
                return self._disaggregated.plan(arguments[0])
            return self._prefill.plan(self.model, self.caches, live, *self._batched(arguments))

    def plans(self, bucket: int, graphs: dict[object, Graph]) -> tuple[Plan, Plan]:
        """Return the plans of decode and of prefill. ``graphs``: a dict, empty at first, that is
        passed to generators of one model and length on many meshes, so that each program is
        captured once."""
        programs = {
            ("decode", self.rows): self._decode,
            ("prefill", self.rows, self._width(bucket), self.prefill_batch): self._prefill,
        }
        self._shares_graphs = True
        for key, program in programs.items():
            program.graph = graphs.get(key)
        decode_and_prefill = self.plan("decode"), self.plan("prefill", bucket)
        for key, program in programs.items():
            if program.plans.latest is not None:
                graphs[key] = program.plans.latest.graph
            program.graph = None
        return decode_and_prefill

    def transfer_plan(
        self, t: int, slot: int = 0, *, ranks: Mapping[Mesh, Sequence[int]] | None = None
    ) -> SyncPlan:
        """Return the plan of the transfer of a prompt of ``t`` tokens from the mesh of ``prefill=``
        to a slot: the pieces of each layer's keys and values, the bytes between each pair of ranks,
        the messages and the price. Launches nothing.

        Args:
            ranks: outside a launch, the ranks of the meshes, as in ``dt.launch(..., ranks=ranks)``;
                by default the prefill mesh has the first ranks.
        """
        if self._disaggregated is None:
            refuse_no_prefill()
        check_length(t, slot, min(self.buckets[-1], self.length - 1), self.slots)
        self._check_placed()
        with CALL_LOCK, evaluating(self.model.module):
            self._settle()
        return self._disaggregated.transfer_plan(t, slot, ranks)

    def summary(self) -> Summary:
        """Return the bytes of the caches on each rank, and the communication for a token."""
        decode = self.plan("decode")
        sizes = self.slots, self.rows, self.length, self.buckets
        return summary_of(repr(self), decode, *sizes, "" if self.split is None else str(self.split))

    def _count_switches(self) -> int:
        prefill = 0 if self._disaggregated is None else self._disaggregated.other.switches
        return self.model.switches + prefill

    def _check_placed(self) -> None:
        """Raises PlanningError if the model was switched to another mesh, or if its layers have
        changed, since this generator was made."""
        if self._switches != self._count_switches():
            raise PlanningError(
                f"{type(self.model.module).__name__} was switched to {self.model.mesh} since this "
                f"generator was made; its caches have the old placement.\n"
                f"fix: make a new one: dt.generator(model, slots={self.slots}, "
                f"length={self.length})"
            )
        self.model.look()
        forward, number = self._forward_and_contents
        if number != self.model.seen.number:
            if forward_of(self.model.module, self.length) != forward:
                raise PlanningError(
                    f"{type(self.model.module).__name__} has other layers, or another dtype, than "
                    f"when this generator was made, and its caches are for those.\n"
                    f"fix: make a new one: dt.generator(model, slots={self.slots}, "
                    f"length={self.length})"
                )
            self._forward_and_contents = forward, self.model.seen.number

    def _settle(self) -> None:
        """Settle the placements of the caches by the plan of decode. If ranks need copies of heads,
        make the caches again with these copies first."""
        if not self._caches_settled:
            live = live_spec(self.model, self.rows, self.rows_over)
            decode = self._greedy_decode if self._is_greedy([self.sampling]) else self._decode
            plan = decode.plan(self.model, self.caches, live)
            copies = copies_of_heads(plan) if self._disaggregated is None else {}
            if copies and not self._shares_graphs:
                self.caches = self._new_caches(self._forward_and_contents[0], copies)
                plan = decode.plan(self.model, self.caches, live)
            settle_caches(self.caches, plan)
            self._caches_settled = True

    def _new_caches(
        self, forward: Forward, copies: Mapping[int, Sequence[int]] | None = None
    ) -> ParallelModule:
        sizes = self.rows, self.length, self.rows_over
        return caches_of(self.model, forward, *sizes, copies, self.split)

    # -- all at once ------------------------------------------------------------------------------

    def __call__(
        self, prompts: Sequence[Any] | Tensor, max_new_tokens: Any = None, **options: Any
    ) -> list[Generated]:
        """Generate a text for each prompt, and return the texts in order.

        Args:
            prompts: lists of tokens, or 1-D integer tensors, of any lengths.
            max_new_tokens: a number, or a list with one for each prompt; None: as many as fit.
            options: temperature, top_k, top_p, seed (a value, or a list with one for each prompt),
                and eos; see `generator`. With one integer seed, the prompts still get different
                random numbers, by their positions in ``prompts``.
        """
        requests = self._requests(prompts, max_new_tokens, options, [])
        self._run_all(requests)
        return [request.generated() for request in requests]

    def stream(
        self, prompts: Sequence[Any] | Tensor, max_new_tokens: Any = None, **options: Any
    ) -> Iterator[Event]:
        """Generate as a call does, and yield an event for each token when it is read. ``prompts``,
        ``max_new_tokens`` and ``options`` are as in a call. Leaving the loop early cancels the
        remaining requests."""
        events: list[Event] = []
        requests = self._requests(prompts, max_new_tokens, options, events)
        return self._events_of(requests, events)

    def _events_of(self, requests: list[TextRequest], events: list[Event]) -> Iterator[Event]:
        """Generate the requests, and yield their events. At the end, cancel unfinished requests."""
        self._waiting.extend(requests)
        try:
            while events or not all(request.done for request in requests):
                if not events:
                    self._advance()
                while events:
                    yield events.pop(0)
            _check_complete(requests)
        finally:
            for request in requests:
                self.cancel(request)

    def _run_all(self, requests: list[TextRequest]) -> None:
        """Generate until all requests have ended. On an error, cancel the remaining requests."""
        self._waiting.extend(requests)
        try:
            while not all(request.done for request in requests):
                self._advance()
            _check_complete(requests)
        finally:
            for request in requests:
                self.cancel(request)

    # -- one at a time ----------------------------------------------------------------------------

    def submit(self, prompt: Any, max_new_tokens: int | None = None, **options: Any) -> TextRequest:
        """Return a new request for ``prompt``, which waits for a free slot. `step` returns its
        tokens. ``max_new_tokens`` and ``options`` are as in a call, for one prompt."""
        (request,) = self._requests([prompt], max_new_tokens, options, self._events)
        request.number = self._next_number
        self._next_number += 1
        self._waiting.append(request)
        return request

    def step(self) -> list[Event]:
        """Admit requests to free slots, make one token for every slot with a request, and return
        the events of submitted requests, up to ``ahead`` runs late."""
        if not self.idle:
            self._advance()
        events, self._events[:] = list(self._events), []
        return events

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or in flight."""
        prefilled = self._disaggregated is not None and self._disaggregated.requests
        return not (self._waiting or self._in_flight or any(self._seats) or prefilled)

    def cancel(self, request: TextRequest) -> None:
        """Stop a request, and free its slot."""
        if not request.done:
            request.reason = "dropped"
            with suppress(ValueError):  # it may no longer wait
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
        """Check the arguments of a call, and return a request for each prompt."""
        _check_options(options)
        self._check_placed()
        listed = prompts_of(prompts)
        num = len(listed)
        limits = per_prompt("max_new_tokens", max_new_tokens, num)
        names = ("temperature", "top_k", "top_p")
        columns = {n: per_prompt(n, options[n], num) for n in names if n in options}
        stated = options.get("seed")
        seeds = per_prompt("seed", stated, num)
        eos = eos_of(options["eos"], tuple(self.eos)) if "eos" in options else self.eos
        requests: list[TextRequest] = []
        for number, tokens in enumerate(listed):
            prompt = prompt_of(tokens, self.vocabulary)
            sampling = replace(
                self.sampling, **{n: values[number] for n, values in columns.items()}
            )
            seed = self._seed(seeds[number], 0 if isinstance(stated, (list, tuple)) else number)
            max_tokens = self._max_new_tokens(prompt, limits[number])
            requests.append(TextRequest(number, prompt, max_tokens, sampling, seed, eos, events))
        return requests

    def _seed(self, seed: object, position: int) -> int:
        """Return the key of a request's random numbers, for its stated seed and position, or for
        the next number of the process if ``seed`` is None."""
        if seed is None:
            return key_of(initial_seed(), "generate", "next", str(self._request_counter.advance()))
        check_number("seed", seed, least=0, whole=True, fix="seed=7")
        return key_of(int(seed), "generate", str(position))  # type: ignore[call-overload]

    def _max_new_tokens(self, prompt: tuple[int, ...], limit: object) -> int:
        """Return the limit of new tokens. Raises PlanningError for a request that is too long."""
        num = len(prompt)
        if num > self.buckets[-1] or num >= self.length:
            largest = min(self.buckets[-1], self.length - 1)
            raise PlanningError(
                f"a prompt has {num} tokens; the buckets are {list(self.buckets)}, and a slot has "
                f"{self.length} positions.\n"
                f"fix: a prompt of at most {largest}, or dt.generator(model, slots={self.slots}, "
                f"length={2 * num})"
            )
        num_free = self.length - num
        if limit is None:
            return num_free
        check_number("max_new_tokens", limit, least=1, whole=True, fix="max_new_tokens=64")
        max_tokens = int(limit)  # type: ignore[call-overload]
        if max_tokens > num_free:
            raise PlanningError(
                f"a prompt of {num} tokens and {max_tokens} new ones do not fit in a slot of "
                f"{self.length} positions.\n"
                f"fix: max_new_tokens={num_free}, or dt.generator(model, slots={self.slots}, "
                f"length={num + max_tokens})"
            )
        return max_tokens

    # -- runs -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Prefill admitted requests, decode all slots, and read results more than ``ahead`` runs
        old. Only one thread advances at a time. Runs are submitted under CALL_LOCK and read without
        it, so that other calls continue meanwhile."""
        if is_capturing():
            raise PlanningError(
                "Texts are generated within a program that is being captured.\n"
                "fix: generate before, and pass the tokens as an argument"
            )
        with self._lock:
            self._check_placed()
            try:
                with CALL_LOCK:
                    self._use_session()
                self._advance_once()
            except BaseException:
                self._drop_requests()
                raise

    def _advance_once(self) -> None:
        """Admit requests, decode, and read results; after a loss of a rank, restart first."""
        assert self._session is not None
        cluster = self._session.cluster
        if cluster.recovered != self._recovered:
            with CALL_LOCK:
                self._restart_requests()
        try:
            if not self._caches_settled:
                with CALL_LOCK, evaluating(self.model.module):
                    self._settle()
            has_prefilled = self._admit()
            seated = ((row, r) for row, r in enumerate(self._seats) if r is not None)
            active = tuple((row, r) for row, r in seated if not r.done)
            if active:
                is_greedy = self._is_greedy([r.sampling for _, r in active])
                decode = self._greedy_decode if is_greedy else self._decode
                with CALL_LOCK, evaluating(self.model.module):
                    outputs = decode(self.model, self.caches, self._live)
                    self._record_run(active, outputs, is_decode=True)
            self._read(self.ahead if has_prefilled or active else 0)
        except DaftError:
            if cluster.recovered == self._recovered:
                raise

    def _restart_requests(self) -> None:
        """After a rank was replaced and its caches were lost, queue the requests in flight again,
        to make their tokens again. Tokens do not depend on the slot or on the time."""
        assert self._session is not None
        self._recovered = self._session.cluster.recovered
        in_flight = [request for run in self._in_flight for _, request in run.requests]
        prefilled = [] if self._disaggregated is None else self._disaggregated.requests
        seated = [request for request in self._seats if request is not None]
        unfinished = [r for r in dict.fromkeys((*in_flight, *seated, *prefilled)) if not r.done]
        self._in_flight.clear()
        self._seats = [None] * self.slots
        self._waiting.extendleft(reversed(unfinished))
        for request in unfinished:
            request.restart(self.model.version)
        if self._disaggregated is not None:
            self._disaggregated.restart()
        reset_caches(self._session, self.caches)

    def _admit(self) -> bool:
        """Assign free slots to waiting requests in order, and prefill requests of one bucket
        together. Return whether a request was prefilled, or is on the prefill mesh."""
        if self._disaggregated is not None:
            assert self._live is not None
            self._disaggregated.admit(self._waiting, self._seats, self._live, self._arguments)
            return bool(self._disaggregated.requests)
        requests_by_bucket: dict[int, list[tuple[int, TextRequest]]] = {}
        for row in range(self.slots):
            if self._waiting and self._seats[row] is None:
                request = self._seats[row] = self._waiting.popleft()
                requests_by_bucket.setdefault(self._bucket(request), []).append((row, request))
        for group in requests_by_bucket.values():
            for first in range(0, len(group), self.prefill_batch):
                batch = group[first : first + self.prefill_batch]
                arguments = self._batched([self._arguments(r, row) for row, r in batch])
                is_greedy = self._is_greedy([r.sampling for _, r in batch])
                prefill = self._greedy_prefill if is_greedy else self._prefill
                with CALL_LOCK, evaluating(self.model.module):
                    outputs = prefill(self.model, self.caches, self._live, *arguments)
                    self._record_run(tuple(batch), outputs, is_decode=False)
                self._read(self.ahead)
        return bool(requests_by_bucket)

    def _is_greedy(self, samplings: Sequence[Sampling]) -> bool:
        """Whether programs run that draw no token at random. On a CPU the op sees the temperatures
        and skips greedy rows; on a GPU the host would wait to see them."""
        on_gpu = self._session is not None and self._session.cluster.device.type == "cuda"
        return on_gpu and all(sampling.temperature == 0 for sampling in samplings)

    def _bucket(self, request: TextRequest) -> int:
        return next(size for size in self.buckets if size >= len(request.prompt))

    def _arguments(self, request: TextRequest, row: int) -> tuple[Tensor, ...]:
        """Return the arguments, after ``live``, of a prefill of one prompt."""
        width = self._width(self._bucket(request))
        return _prefill_arguments(request.prompt, row, width, request.seed, request.sampling)

    def _width(self, bucket: int) -> int:
        """Return the width of a prefill: the bucket, or a multiple of WIDTH_MULTIPLE for several
        prompts, since torch computes elements that do not fill its vectors differently, and only
        the last prompt would have such elements."""
        return bucket if self.prefill_batch == 1 else -(-bucket // WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    def _batched(self, arguments: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the arguments of one prefill of several prompts. Copies of the first prompt, which
        write the same values again, pad the batch to ``prefill_batch``."""
        arguments = arguments + arguments[:1] * (self.prefill_batch - len(arguments))
        return tuple(torch.cat(column) for column in zip(*arguments, strict=True))

    def _record_run(
        self,
        requests: tuple[tuple[int, TextRequest], ...],
        outputs: Mapping[str, DTensor],
        *,
        is_decode: bool,
    ) -> None:
        """Record a submitted run: its result ``live``, and the requests that get its tokens."""
        assert self._session is not None
        self._live = outputs["live"]
        # caches are never gathered, and their loss needs no warning
        self._session.model_home(self.caches).unsaved = False
        self._in_flight.append(_Run(requests, outputs["token"], outputs["logprob"], is_decode))
        for row, request in requests:
            request.versions.append(self.model.version)
            if len(request.versions) == request.max_new_tokens:
                self._seats[row] = None

    def _read(self, ahead: int) -> None:
        """Read the results of runs until at most ``ahead`` runs are in flight."""
        while len(self._in_flight) > ahead:
            run = self._in_flight[0]  # stays there until it is read, for a recovery
            if all(request.done for _, request in run.requests):
                self._in_flight.popleft()
                continue
            if self._disaggregated is not None:
                for _, request in run.requests:
                    self._disaggregated.check(request)
            assert self._session is not None
            tokens, logprobs = run.token.full_tensor().tolist(), run.logprob.full_tensor().tolist()
            if self._session.cluster.recovered != self._recovered:
                return  # the result may depend on lost values
            self._in_flight.popleft()
            for number, (row, request) in enumerate(run.requests):
                index = row if run.is_decode else number
                request.add_token(tokens[index], logprobs[index])
                if request.done and self._seats[row] is request:
                    self._seats[row] = None

    def _use_session(self) -> None:
        """Use the present session of the mesh. In a new session, make the caches zeros again.
        Raises RuntimeError if requests were in flight in the old session."""
        if self._disaggregated is not None:
            self._disaggregated.check_launched()
        session = session_for(self.model.mesh)
        if session is self._session and not session.closed:
            return
        unfinished = {id(r) for run in self._in_flight for _, r in run.requests if not r.done}
        unfinished |= {id(r) for r in self._seats if r is not None}
        if self._disaggregated is not None:
            unfinished |= {id(r) for r in self._disaggregated.requests}
            self._disaggregated.enter()
        self._session = session
        self._recovered = session.cluster.recovered
        self.caches.initial.holders.clear()  # the old caches ended with their launch
        spec = live_spec(self.model, self.rows, self.rows_over)
        self._live = put_shards(torch.zeros(spec.shape, dtype=spec.dtype), spec, session)
        if unfinished:
            raise RuntimeError(
                f"the launch in which {len(unfinished)} requests were in flight has ended, and "
                f"their caches with it.\nfix: submit them again"
            )

    def _drop_requests(self) -> None:
        """After a failure, drop all requests and runs."""
        in_flight = [request for run in self._in_flight for _, request in run.requests]
        for request in (*self._waiting, *self._seats, *in_flight):
            if request is not None and not request.done:
                request.reason = "dropped"
        if self._disaggregated is not None:
            self._disaggregated.clear()
        self._session = self._live = None
        self._in_flight.clear()
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
    """Return a generator of texts from a parallelized model: a Hugging Face model, unchanged, or a
    module with ``forward(tokens, cache, pos)`` (docs/generation.md).

    Args:
        model: the parallelized model.
        slots: the number of requests that generate at once.
        length: the positions of a slot, for the prompt and the new tokens.
        buckets: the lengths that prompts are padded to, each with its own captured program; by
            default powers of two from 16, and ``length``.
        temperature, top_k, top_p: the defaults of requests. temperature=0 is greedy; top_k=0 and
            top_p=1 allow all tokens.
        eos: the token or tokens that end a text; "model": the tokens in a Hugging Face model's
            generation_config, and none for other models.
        ahead: the number of runs that may be in flight when a result is read.
        prefill: the same model on another mesh of the launch, where prompts are prefilled: a
            replica of the model or of its policy, or the policy. The used part of its caches is
            sent to the slot.
        prefill_batch: the number of prompts of one bucket that are prefilled together. Batches are
            padded to this number, because other shapes have other bits: many prompts get cheaper,
            a single prompt more expensive.
        topology: the hardware by which the planner prices.

    Raises PlanningError, with the reason, for a model whose cache is more than keys and values.
    """
    check_parallel("generator", model)
    check_topology(topology)
    fix = "dt.generator(model, slots=8, length=256)"
    check_number("slots", slots, least=1, whole=True, fix=fix)
    check_number("length", length, least=2, whole=True, fix=fix)
    check_number("ahead", ahead, least=0, whole=True, fix="ahead=2")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
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
    split = [s for m in (model, prefill) if m is not None and (s := split_of_positions(m, length))]
    if prefill is not None and split:
        raise PlanningError(
            f"prefill= sends the first positions of a slot to another mesh, and attention= splits "
            f"positions over {', '.join(split[0].axes)}.\nfix: leave prefill= out"
        )
    sizes = _buckets(buckets, length)
    return Generator(
        model, slots, length, sizes, sampling, eos, ahead, prefill, prefill_batch, topology
    )


def _buckets(buckets: object, length: int) -> tuple[int, ...]:
    """Return the buckets in ascending order. Raises PlanningError for invalid ones."""
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


def _check_complete(requests: Sequence[TextRequest]) -> None:
    """Raise RuntimeError if a request was dropped before its last token."""
    dropped = [request.number for request in requests if request.reason == "dropped"]
    if dropped:
        raise RuntimeError(
            f"the requests {dropped} ended before their last token: a run failed, or they were "
            f"cancelled.\nfix: ask for them again"
        )


def _prefill_arguments(
    prompt: Sequence[int], row: int, bucket: int, seed: int, sampling: Sampling
) -> tuple[Tensor, ...]:
    """Return the arguments, after ``live``, of a prefill of one prompt."""
    tokens = torch.zeros(1, bucket, dtype=torch.int64)
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    where, request = torch.tensor([[row, len(prompt)]]), torch.tensor([[seed, sampling.top_k]])
    knobs = torch.tensor([[sampling.temperature, sampling.top_p]], dtype=torch.float32)
    return tokens, where, request, knobs
