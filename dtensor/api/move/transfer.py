"""`transfer`: a DTensor goes from its mesh to another one.

    x = distribute(torch.randn(8, 4), Mesh(tp=2), tp=Row())
    y = transfer(x, Mesh(dp=2, tp=2), dp=Row(), tp=Column())
    print(transfer_plan(x, Mesh(x=4), x=Row()))        # who sends what to whom; nothing is sent

The other mesh may have another size, other names or another shape. Which rank sends which block is
decided by sharding/redistribute/between_meshes.py: each target rank receives only what it lacks.

Where the blocks travel. Inside a launch the other mesh lives on ranks of the same cluster: those of
`launch`, or, if that does not name it, rank i on rank i unless ``ranks`` says otherwise; the blocks
go from actor to actor in one verified program. Outside a launch each mesh has an in-process cluster
of its own, so the blocks pass through the controller; so they do when a DTensor from before a
launch is transferred into it.

Differentiable: the gradient goes back to the source's mesh and placement; that of a pending sum is
replicated where the sum was pending.
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
    """The value of ``x`` on another mesh; ``placements`` are by axis. Axes that are not named:
    Replicate.

    Args:
        ranks: which ranks of the launch are those of ``mesh``, in its order, if it is none of the
            meshes of the launch; by default the first ones. It keeps those of its first transfer.

    A pending value is reduced first. Raises PlanningError for an axis that the mesh lacks, a
    placement that does not fit, and a mesh that has more ranks than the launch.
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
    """What `transfer` would send: the pieces, the bytes of each pair of ranks, and the price.

    ``x``, ``mesh``, ``ranks`` and ``placements`` are as of `transfer`, whose PlanningError it
    raises. A pending value is planned as it is after its reduction.
    """
    target, spec = _target(x, mesh, ranks, placements)
    before = x.session.stored("", x.spec.with_placements(**_pending(x.spec)))
    return _plan(x.session, before, target, target.stored("", spec))


class _Transfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: MeshSession, spec: TensorSpec) -> DTensor:
        ctx.source = (x.session, x.spec.with_placements(**_pending(x.spec)))
        return _moved(x, target, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _moved(gradients[0], *ctx.source), None, None


def _moved(x: DTensor, target: MeshSession, spec: TensorSpec) -> DTensor:
    with CALL_LOCK:
        pending = _pending(x.spec)
        x = x.redistribute(**pending) if pending else x
        value = x.value()
        now = target.stored(fresh_name(), spec)
        plan = _plan(x.session, value.stored, target, now)
        if plan.distinct:
            _through_controller(x.session, target, plan)
        else:
            future = target.launch.store.transfer(plan)
            if target.at_once:
                future.check()
    return DTensor(spec, target, now.label)


def _plan(
    session: MeshSession, before: StoredTensor, target: MeshSession, now: StoredTensor
) -> TransferPlan:
    return plan_transfer(before, now, distinct=session.launch is not target.launch)


def _target(
    x: DTensor, mesh: Mesh, ranks: Sequence[int] | None, placements: dict[str, Placement]
) -> tuple[MeshSession, TensorSpec]:
    """The session and the spec that the value gets."""
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
    if (known := launch.sessions.get(mesh)) is not None:
        if ranks is not None and tuple(ranks) != known.ranks:
            raise PlanningError(
                f"{mesh} lives on ranks {list(known.ranks)} of this launch, now "
                f"ranks={list(ranks)}; fix: leave ranks out, or give the other mesh a name of its "
                f"own, as in {_renamed(mesh)!r}"
            )
        return known, spec
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
    return {axis: REPLICATE for axis, p in spec.sharding.items() if isinstance(p, Partial)}


def _through_controller(source: MeshSession, target: MeshSession, plan: TransferPlan) -> None:
    """Fetched from the ranks that are to send, cut and joined here, put on the target's ranks."""
    needed = {piece.source_rank for piece in plan.pieces}
    asked = plan.here.on(index for index, rank in plan.here.numbers.items() if rank in needed)
    blocks: dict[Piece, torch.Tensor] = {}
    for index, shard in source.launch.store.fetch([asked])[asked.label].items():
        mine = [p for p in plan.pieces if p.source_rank == plan.here.numbers[index]]
        blocks.update(zip(mine, pieces_of(plan, index, shard), strict=True))
    cpu = torch.device("cpu")
    values: list[dict[str, object]] = []
    for index, rank in plan.there.numbers.items():
        blocks_of_rank = [blocks[piece] for piece in plan.pieces if piece.target_rank == rank]
        values.append({plan.there.label: shard_from(plan, index, blocks_of_rank, cpu)})
    target.put(values)
