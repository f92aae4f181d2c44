"""PyTorch's own DTensor on the same entries, samples and placements, for comparison.

    python -m tests.opinfo --peer       # sizes that divide; one more column of docs/coverage.md

It runs on 4 simulated ranks (`LocalTensorMode`, a fake process group) and is judged in the same
way: all placements of an entry must be right, with gradients if the entry has them. An op counts as
split if, in DTensor's own decision, an operand after redistribution or the result is sharded; views
count only in entries made of views alone. Partial inputs are left out, because DTensor's tests have
none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _pytree as pytree

from dtensor.sharding.spec import placements as ours
from dtensor.testing import execute
from tests.opinfo.entries import MESH, Sample, name_of, placements
from tests.opinfo.judge import (
    PER_OP,
    PER_SAMPLE,
    SECONDS,
    NotCounted,
    chosen_samples,
    difference,
    differentiable,
    shares,
)
from tests.opinfo.record import OutOfTime, Record, first_line, limited

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo


def judge(entry: OpInfo) -> Record:
    """Run one entry with sizes that divide."""
    record = Record(name=name_of(entry))
    try:
        chosen = chosen_samples(entry, "even", record)
    except NotCounted as reason:
        record.note = str(reason)
        return record
    try:
        with limited(SECONDS), _simulated() as mesh:
            queue = [placements(s.leaves, even=True, limit=PER_SAMPLE) for s in chosen]
            budgets = shares([len(q) for q in queue], PER_OP)
            for sample, options, budget in zip(chosen, queue, budgets, strict=True):
                grads = any(x.requires_grad for x in sample.leaves) and differentiable(sample)
                for option in options[:budget]:
                    trial = _one(sample, option, grads, mesh)
                    if trial.wrong:  # as with ours: float64 tells rounding from a wrong number
                        trial = _one(sample.in_double(), option, grads, mesh)
                    _add(record, trial)
    except OutOfTime:
        record.forward["refused"] += 1
    if record.wrong:
        record.verdict = "wrong"
    elif set(record.forward) == {"right"}:
        record.verdict = "split" if record.split else "whole"
    else:
        record.verdict = "refused"
    return record


def _one(sample: Sample, option: Sequence[ours.Placement], grads: bool, mesh: DeviceMesh) -> Record:
    record = Record(name="")
    expected = _plain(sample, grads)
    counts = record.forward
    try:  # what DTensor makes of an op is this entry's outcome
        with _recorded() as seen:
            leaves = [
                distribute_tensor(x.detach(), mesh, [_theirs(p)]).requires_grad_(
                    grads and x.requires_grad
                )
                for x, p in zip(sample.leaves, option, strict=True)
            ]
            outputs = execute.tensors_of(sample.fn(*leaves))
        results = [_whole(x) for x in outputs]
        pairs = zip(results, expected[0], strict=True)
        record.wrong = [problem for a, b in pairs if (problem := difference(a, b))]
        counts["wrong" if record.wrong else "right"] += 1
        record.split += _is_split(seen)
        if not grads or record.wrong:
            return record
        counts = record.gradient
        found = [None if g is None else _whole(g) for g in _gradients(outputs, leaves)]
    except Exception as error:
        counts["refused"] += 1
        record.errors.append(first_line(error))
        return record
    record.wrong = [
        problem
        for a, b in zip(found, expected[1], strict=True)
        if b is not None and (problem := difference(torch.zeros_like(b) if a is None else a, b))
    ]
    counts["wrong" if record.wrong else "right"] += 1
    return record


def _add(record: Record, trial: Record) -> None:
    record.forward += trial.forward
    record.gradient += trial.gradient
    record.split += trial.split
    record.wrong = [*record.wrong, *trial.wrong][:3]
    record.errors = list(dict.fromkeys([*record.errors, *trial.errors]))[:3]


def _plain(sample: Sample, grads: bool) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    with local.maybe_disable_local_tensor_mode():
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in sample.leaves]
        outputs = execute.tensors_of(sample.fn(*leaves))
        found = _gradients(outputs, leaves) if grads else [None] * len(leaves)
        return [o.detach() for o in outputs], found


def _gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return gradients by leaf, for fixed random cotangents."""
    generator = torch.Generator().manual_seed(0)
    outs = [o for o in outputs if o.requires_grad]
    tangents: list[torch.Tensor] = []
    for o in outs:
        t = torch.randn(o.shape, dtype=o.dtype, generator=generator)
        is_dtensor = isinstance(o, DTensor)
        tangents.append(distribute_tensor(t, o.device_mesh, [Replicate()]) if is_dtensor else t)
    asked = [x for x in leaves if x.requires_grad]
    values = iter(torch.autograd.grad(outs, asked, tangents, allow_unused=True))
    return [next(values) if x.requires_grad else None for x in leaves]


def _whole(x: torch.Tensor) -> torch.Tensor:
    full = x.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.reconcile() if isinstance(full, local.LocalTensor) else full


def _theirs(placement: ours.Placement) -> placement_types.Placement:
    return Shard(placement.dim) if isinstance(placement, ours.Shard) else Replicate()


# -- the simulation ------------------------------------------------------------------------------


@contextlib.contextmanager
def _simulated() -> Iterator[DeviceMesh]:
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=MESH.size)
        torch.autograd._enable_record_function(False)
    mesh = init_device_mesh("cpu", (MESH.size,))
    with local.LocalTensorMode(MESH.size):
        yield mesh


@contextlib.contextmanager
def _recorded() -> Iterator[list[tuple[Any, Any]]]:
    """Within the block, record every (operator schema, output sharding) that DTensor decides on."""
    seen: list[tuple[Any, Any]] = []
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    decide = propagator.propagate_op_sharding_non_cached

    def record(schema: Any) -> Any:
        found = decide(schema)
        seen.append((schema, found))
        return found

    _clear_sharding_prop_cache()
    propagator.propagate_op_sharding_non_cached = record
    try:
        yield seen
    finally:
        del propagator.propagate_op_sharding_non_cached


def _is_split(seen: Sequence[tuple[Any, Any]]) -> bool:
    more = [pair for pair in seen if not pair[0].op.is_view] or list(seen)
    for schema, found in more:
        used = found.redistribute_schema if found.needs_redistribute else schema
        specs = pytree.tree_leaves((used.args_schema, dict(used.kwargs_schema), found.output_spec))
        for spec in specs:
            if isinstance(spec, DTensorSpec) and any(p.is_shard() for p in spec.placements):
                return True
    return False
