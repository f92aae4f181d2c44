"""`transfer`: moves a DTensor from its mesh to another mesh.

    x = distribute(torch.randn(8, 4), Mesh(tp=2), tp=Row())
    y = transfer(x, Mesh(dp=2, tp=2), dp=Row(), tp=Column())
    print(transfer_plan(x, Mesh(x=4), x=Row()))        # who sends what to whom; nothing is sent

Each target rank receives only the blocks that it lacks (sharding/redistribute/between_meshes.py).
Inside a launch, one verified program sends the blocks between actors. Outside a launch, where each
mesh has its own in-process cluster, and for a DTensor from before the launch, the blocks pass
through the controller. The gradient returns to the source's mesh and placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtensor.api.eager.tensor import DTensor, check_placements
from dtensor.api.eager.values import fresh_name
from dtensor.api.store.meshes import meshes_text
from dtensor.api.store.session import MeshSession, launched, session_for
from dtensor.errors import PlanningError, check_kind
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.transfer.between_meshes import pieces_of, shard_from
from dtensor.sharding.redistribute.between_meshes import (
    Piece,
    TransferPlan,
    plan_transfer,
)
from dtensor.sharding.spec.mesh import Mesh, mesh_of
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.sharding.spec.stored import StoredTensor


def transfer(
    x: DTensor, mesh: Mesh, ranks: Sequence[int] | None = None, /, **placements: Placement
) -> DTensor:
    """Return the value of ``x`` on another mesh. ``placements``: by axis; Replicate on other axes.

    Args:
        ranks: the launch's ranks of ``mesh``, in its order, if it is not a mesh of the launch; by
            default the first ones. The mesh keeps the ranks of its first transfer.

    A pending sum is reduced first; its gradient is replicated. Raises PlanningError for an axis
    that the mesh lacks, a placement that does not fit, and a mesh with more ranks than the launch.
    """
    target, spec = _target(x, mesh, ranks, placements)
    if target is x.session:
        return x.redistribute(**placements)
    transferred = _Transfer.apply(x, target, spec)
    assert isinstance(transferred, DTensor)
    return transferred


def transfer_plan(
    x: DTensor, mesh: Mesh, ranks: Sequence[int] | None = None, /, **placements: Placement
) -> TransferPlan:
    """Return the plan of a `transfer`: the pieces, the bytes between each pair of ranks, and the
    price. ``x``, ``mesh``, ``ranks`` and ``placements`` are as for `transfer`. A pending sum is
    planned as it is after its reduction. Raises PlanningError as `transfer` does.
    """
    target, spec = _target(x, mesh, ranks, placements)
    before = x.session.stored("", x.spec.with_placements(**_pending(x.spec)))
    return _plan(x.session, before, target, target.stored("", spec))


class _Transfer(torch.autograd.Function):
    """Transfers a tensor, and its gradient back to the source."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: MeshSession, spec: TensorSpec) -> DTensor:
        ctx.source = (x.session, x.spec.with_placements(**_pending(x.spec)))
        return _transferred(x, target, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _transferred(gradients[0], *ctx.source), None, None


def _transferred(x: DTensor, target: MeshSession, spec: TensorSpec) -> DTensor:
    """Return the tensor on the target's mesh, after reducing pending sums."""
    with CALL_LOCK:
        pending = _pending(x.spec)
        x = x.redistribute(**pending) if pending else x
        value = x.value()
        after = target.stored(fresh_name(), spec)
        plan = _plan(x.session, value.stored, target, after)
        if plan.distinct:
            _send_through_controller(x.session, target, plan)
        else:
            future = target.launch.store.transfer(plan)
            if target.at_once:
                future.check()
    return DTensor(spec, target, after.label)


def _plan(
    session: MeshSession, before: StoredTensor, target: MeshSession, after: StoredTensor
) -> TransferPlan:
    return plan_transfer(before, after, distinct=session.launch is not target.launch)


def _target(
    x: DTensor, mesh: Mesh, ranks: Sequence[int] | None, placements: dict[str, Placement]
) -> tuple[MeshSession, TensorSpec]:
    """Return the session and the spec of the transferred value. Adds a session for a mesh that the
    running launch does not have yet. Raises PlanningError as `transfer` does."""
    check_kind("the first argument of transfer", x, DTensor, "a DTensor", "dt.distribute(x, mesh)")
    check_kind("ranks", ranks, list | tuple | range | None, "a list of ranks", "ranks=(0, 1)")
    x.session.check()
    check_placements(mesh, placements)
    spec = make_spec(tuple(x.shape), x.dtype, mesh, placements)
    first = launched()
    if first is None:
        if ranks is not None:
            raise PlanningError(
                f"ranks={list(ranks)} names ranks of a launch, and none is running: outside a "
                f"launch {mesh} has a cluster of its own; fix: leave ranks out, or transfer inside "
                f"`with dt.launch(...)`"
            )
        return session_for(mesh), spec
    launch = first.launch
    if (session := launch.sessions.get(mesh)) is not None:
        if ranks is not None and tuple(ranks) != session.ranks:
            raise PlanningError(
                f"{mesh} lives on ranks {list(session.ranks)} of this launch, now "
                f"ranks={list(ranks)}; fix: leave ranks out, or give the other mesh a name of its "
                f"own, as in {_renamed(mesh)!r}"
            )
        return session, spec
    if mesh.size > launch.cluster.size:
        raise PlanningError(
            f"{mesh} has {mesh.size} ranks, the running launch has {launch.cluster.size} "
            f"({meshes_text(launch.places)}); "
            f"fix: launch the larger mesh and transfer to the smaller"
        )
    chosen = tuple(range(mesh.size)) if ranks is None else tuple(ranks)
    if len(set(chosen)) != mesh.size or not set(chosen) <= set(range(launch.cluster.size)):
        raise PlanningError(
            f"ranks={list(chosen)} for {mesh}, which has {mesh.size} ranks, in a launch of ranks "
            f"0..{launch.cluster.size - 1}; fix: state {mesh.size} different ranks of those"
        )
    return launch.add(mesh, chosen), spec


def _renamed(mesh: Mesh) -> Mesh:
    return mesh_of(tuple(mesh.shape.items()), "play" if mesh.name != "play" else "other")


def _pending(spec: TensorSpec) -> dict[str, Placement]:
    """Return Replicate for each axis over which the spec has a pending sum."""
    return {axis: REPLICATE for axis, p in spec.sharding.items() if isinstance(p, Partial)}


def _send_through_controller(source: MeshSession, target: MeshSession, plan: TransferPlan) -> None:
    """Fetch the shards of the sending ranks, cut and join their blocks on the controller, and put
    the results on the target's ranks."""
    needed = {piece.source_rank for piece in plan.pieces}
    senders = plan.here.on(index for index, rank in plan.here.numbers.items() if rank in needed)
    blocks: dict[Piece, torch.Tensor] = {}
    for index, shard in source.launch.store.fetch([senders])[senders.label].items():
        of_rank = [p for p in plan.pieces if p.source_rank == plan.here.numbers[index]]
        blocks.update(zip(of_rank, pieces_of(plan, index, shard), strict=True))
    cpu = torch.device("cpu")
    values: list[dict[str, object]] = []
    for index, rank in plan.there.numbers.items():
        blocks_of_rank = [blocks[piece] for piece in plan.pieces if piece.target_rank == rank]
        values.append({plan.there.label: shard_from(plan, index, blocks_of_rank, cpu)})
    target.put(values)
