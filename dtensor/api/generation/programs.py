"""The two programs of a generator, and its module of KV caches.

    decode(model, kv_cache, live)                                        live: int64[rows, 2]
    prefill(model, kv_cache, live, tokens, where, request, knobs)        tokens: int64[b, bucket]
        -> {"live": int64[rows, 2], "token": int64[rows or b], "logprob": float[rows or b]}

``live`` is each slot's last token and its position, the only input of the next run. The caches are
placed like the model: slots are split over every axis that splits no weight, heads like the
attention's projections, and a layer's cache is on the stage of its attention. With fewer KV heads
than ranks, each rank keeps copies of the heads that its query heads use. Axes of ``attention=``
split positions instead of slots (split_cache.py), and the tokens of a prefill.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dtensor.api.eager.compiled import CompiledFunction
from dtensor.api.generation.forwards import Forward
from dtensor.api.generation.kv_cache import Decoding, KVSlots, Prefill
from dtensor.api.model.parallel import ParallelModule, chosen_placements, parallelize
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.stages import StagePlan
from dtensor.api.store.session import MeshSession
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.split_cache import SplitCache
from dtensor.sharding.ops import sampling as sampling  # registers torch.ops.dt.next_tokens
from dtensor.sharding.ops.heads import copies_for
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import dealt
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement, Replicate, Row, Shard, index_sets
from dtensor.sharding.spec.spec import TensorSpec, make_spec

CACHES = "kv_cache."
"""The prefix of the caches' names in the programs."""
_KEYS = re.compile(rf"{re.escape(CACHES)}k(\d+)")

BLOCK = 256
"""The positions of a block. Blocks are dealt to the ranks in turn, so that texts that are shorter
than a slot use all ranks."""

Split = Mapping[str, Placement]  # by axis


def decode_program(
    forward: Forward,
    mesh: Mesh,
    over: Split,
    topology: Topology | None = None,
    split: SplitCache | None = None,
    *,
    is_greedy: bool = False,
) -> CompiledFunction:
    """Return the program that makes one token for every slot. ``over``: the placement of slots;
    ``topology``: the hardware by which the planner prices; ``split``: the split of positions;
    ``is_greedy``: no token is drawn at random."""

    def decode(model: nn.Module, kv_cache: KVSlots, live: Tensor) -> dict[str, Tensor]:
        """Write the key and value of each slot's last token, and return its next token."""
        cache = Decoding(kv_cache, live[:, 1:])
        at = live[:, 1] + 1
        logits = forward(model, live[:, :1], cache, torch.zeros(1, dtype=torch.int64))
        token, logprob = _sample(logits, at, kv_cache.request, kv_cache.knobs, is_greedy)
        # an unused slot does not advance beyond its last position
        after = torch.stack([token, at.clamp(max=kv_cache.length - 1)], 1)
        return {"live": after, "token": token, "logprob": logprob}

    out: Mapping[str, Split] = dict.fromkeys(("live", "token", "logprob"), over)
    return CompiledFunction(decode, mesh, out, Options(topology=topology, cache=split), False)


def prefill_program(
    forward: Forward,
    mesh: Mesh,
    over: Split,
    topology: Topology | None = None,
    split: SplitCache | None = None,
    *,
    is_greedy: bool = False,
) -> CompiledFunction:
    """Return the program that writes prompts into slots and makes their first tokens. Its inputs
    are ``where``: int64[b, 2], the row and the length of each prompt, and ``request`` and
    ``knobs``: [b, 2], as in `KVSlots`. A prompt may be repeated, as padding."""
    tokens_over = {axis: Shard(1) for axis in split.axes} if split else {}

    def prefill(
        model: nn.Module,
        kv_cache: KVSlots,
        live: Tensor,
        tokens: Tensor,
        where: Tensor,
        request: Tensor,
        knobs: Tensor,
    ) -> dict[str, Tensor]:
        """Write the prompts and their options into their rows, and return their first tokens."""
        row, at = where[:, 0], where[:, 1]
        cache = Prefill(kv_cache, row, tokens.shape[1])
        logits = forward(model, tokens, cache, at - 1)
        token, logprob = _sample(logits, at, request, knobs, is_greedy)
        kv_cache.request.index_copy_(0, row, request)
        kv_cache.knobs.index_copy_(0, row, knobs)
        after = live.index_copy(0, row, torch.stack([token, at], 1))
        return {"live": after, "token": token, "logprob": logprob}

    options = Options(topology=topology, inputs={"tokens": tokens_over})
    return CompiledFunction(prefill, mesh, {"live": over}, options, False)


def _sample(
    logits: Tensor, at: Tensor, request: Tensor, knobs: Tensor, is_greedy: bool
) -> tuple[Tensor, Tensor]:
    options = {"is_greedy": True} if is_greedy else {}
    return torch.ops.dt.next_tokens(logits.detach(), at, request, knobs, **options)


def live_spec(model: ParallelModule, rows: int, over: Split) -> TensorSpec:
    """Return the spec of ``live``. With stages, it is on the last stage, which makes it."""
    mesh, stages = model.mesh, model.stage_plan
    spec = make_spec((rows, 2), torch.int64, mesh, over)
    if stages.axis is None or mesh.axis_size(stages.axis) == 1:
        return spec
    ranks = stages.ranks or dealt(stages.num_stages, mesh.axis_size(stages.axis))
    return replace(spec, on=((stages.axis, ranks[-1]),))


# -- the caches ------------------------------------------------------------------------------------


def axes_of_slots(model: ParallelModule) -> dict[str, Placement]:
    """Return the axes over which slots are split: axes without stages that split no weight, and
    that ``attention=`` does not name."""
    words = dict(model.attention)
    return {axis: Row() for axis in _axes_without_weights(model) if axis not in words}


def split_of_positions(model: ParallelModule, length: int) -> SplitCache | None:
    """Return the split of ``length`` positions, rounded up to equal parts, over the axes of
    ``attention=`` that hold no stages and split no weight; None if there are none."""
    words = dict(model.attention)
    axes = tuple(axis for axis in _axes_without_weights(model) if axis in words)
    num = math.prod(model.mesh.axis_size(axis) for axis in axes)
    positions = -(-length // (BLOCK * num)) * BLOCK * num
    return SplitCache(positions, num, BLOCK, axes) if axes else None


def _axes_without_weights(model: ParallelModule) -> list[str]:
    split = {model.stage_plan.axis}
    for stated in model.placements:
        split |= {axis for axis, p in stated.placements.items() if p != Replicate()}
    return [axis for axis, n in model.mesh.shape.items() if n > 1 and axis not in split]


def _over_positions(split: SplitCache | None, mesh: Mesh) -> dict[str, Placement]:
    """Return the placements of a cache [rows, heads, positions, dim] on the axes that split its
    positions."""
    if split is None:
        return {}
    placements: dict[str, Placement] = {}
    blocks = split.positions // (split.block * split.num)
    for axis in split.axes:
        placements[axis] = Shard(2, blocks=blocks)
        blocks *= mesh.axis_size(axis)
    return placements


def caches_of(
    model: ParallelModule,
    forward: Forward,
    rows: int,
    length: int,
    over: Split,
    copies: Mapping[int, Sequence[int]] | None = None,
    split: SplitCache | None = None,
) -> ParallelModule:
    """Return the module of KV caches. It is on the meta device, so each rank makes its own zeros.
    ``copies``: as in `KVSlots`; ``split``: the split of positions."""
    positions = length if split is None else split.positions

    def build() -> KVSlots:
        return KVSlots(forward.layers, rows, length, copies, positions)

    with torch.device("meta"):
        slots = build()
    over_positions = _over_positions(split, model.mesh)
    placements = {
        name: {**over, **(over_positions if buffer.dim() == 4 else {})}
        for name, buffer in slots.named_buffers()
    }
    caches = parallelize(slots, model.mesh, placements, init=build)
    caches.stage_plan = _stages_of_caches(model.stage_plan, forward)
    return caches


def copies_of_heads(decode: Plan) -> dict[int, list[int]]:
    """Return the copies of heads, as in `KVSlots`, for each layer whose query heads are split while
    its KV heads are replicated: with them, each rank stores only the heads that its query heads
    use."""
    step_of_value = {name: step for step in decode.steps for name in step.gives}
    labels = {item.name: item.label for item in decode.inputs}
    copies: dict[int, list[int]] = {}
    for step in decode.steps:
        if not isinstance(step, Compute) or step.rule.fallback is None:
            continue
        if step.rule.kind == "attention":
            queries, keys, value = *step.operand_specs[:2], step.operands[1]
        else:  # a view that joins repeated heads
            queries, keys, value = step.result_specs[0], step.operand_specs[0], step.operands[0]
        while value in step_of_value:
            value = step_of_value[value].reads[0]
        cache = _KEYS.fullmatch(labels.get(value, ""))
        cuts = [] if queries is None or keys.cuts(1) else queries.cuts(1)
        if cache is None or queries is None or len(cuts) != 1:
            continue
        ((shard, num_shards),) = cuts
        # query head i reads KV head i * kv_heads // q_heads
        q_heads, kv_heads = queries.shape[1], keys.shape[1]
        heads_by_rank = [
            sorted(
                {i * kv_heads // q_heads for start, stop in intervals for i in range(start, stop)}
            )
            for intervals in index_sets(shard, q_heads, num_shards)
        ]
        kept_heads, _ = copies_for(heads_by_rank)
        if len(kept_heads) < num_shards * kv_heads:
            copies[int(cache[1])] = kept_heads
    return copies


def settle_caches(caches: ParallelModule, decode: Plan) -> None:
    """Settle the caches' placements, for all programs, as decode uses them: it runs most often."""
    placements = chosen_placements(decode).items()
    of_caches = {n.removeprefix(CACHES): p for n, p in placements if n.startswith(CACHES)}
    caches.settle(of_caches, decode.stage_ranks, caches.stage_plan)


def reset_caches(session: MeshSession, caches: ParallelModule) -> None:
    """Make the caches zeros again on all ranks, before their next use."""
    model_home = session.model_home(caches)
    model_home.forget(list(model_home.stored))
    caches.initial.holders.clear()


def _stages_of_caches(plan: StagePlan, forward: Forward) -> StagePlan:
    """Return the stages of the caches: each layer's cache is on the stage of its module's weights,
    and the sampling options are on the last stage. Raises PlanningError if a layer has weights on
    several stages."""
    if plan.axis is None:
        return plan
    if plan.waiting:
        raise PlanningError(
            "the stages of the model are still to be chosen, and caches follow them.\n"
            "fix: state them, or run a program of the model first"
        )
    patterns: list[list[str]] = [[] for _ in range(plan.num_stages)]
    for number, layer in forward.layers.items():
        stages = _stages_around(layer.module, plan)
        if len(stages) != 1:
            raise PlanningError(
                f"the cache of layer {number} is kept by "
                f"{layer.module or 'the whole model'}, whose weights are on the stages {stages}.\n"
                f"fix: state one stage for them, or call cache.update in a part of the model"
            )
        patterns[stages[0]] += [f"k{number}", f"v{number}"]
    patterns[-1] += ["request", "knobs"]
    held = {name: (stage,) for stage, names in enumerate(patterns) for name in names}
    return replace(plan, held=held, homes=held, patterns=tuple(map(tuple, patterns)), auto=False)


def _stages_around(module: str, plan: StagePlan) -> list[int]:
    """Return the stages of a module's weights, or of the nearest parent that has weights."""
    while True:
        inside = [s for n, s in plan.held.items() if n.startswith(f"{module}." if module else "")]
        if inside or not module:
            return sorted({stage for stages_of in inside for stage in stages_of})
        module = module.rpartition(".")[0]
