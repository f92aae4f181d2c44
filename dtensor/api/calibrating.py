"""`dt.calibrate`: the `Topology` of a cluster, measured on it."""

from __future__ import annotations

import torch

from dtensor.api.session import Backend, launch, launched, session_for
from dtensor.errors import PlanningError
from dtensor.runtime.simulate.calibration import calibrate as measured
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh


def calibrate(
    mesh: Mesh | None = None,
    *,
    backend: Backend | None = None,
    device: str | None = None,
    address: str | None = None,
    deadline_s: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Topology:
    """Measure what the ranks of ``mesh`` do in a second; about a second itself.

    Inside a `launch` its cluster is measured, and ``mesh`` is its own. Outside, the arguments are
    those of `launch`, by default in this process; with no mesh, one rank.

    Args:
        dtype: of the tensors that are multiplied, gone through and sent.

    Returns a `Topology` with a latency and a bandwidth for each axis of more than one rank; its
    repr can be pasted into a file. ``memory_bytes`` is not measured. Raises daft's errors, as a run
    does, where a rank fails or makes no progress for ``deadline_s``.
    """
    if not dtype.is_floating_point:
        raise PlanningError(
            f"calibrate(dtype={dtype}): matrices of {dtype} are not what a model multiplies.\n"
            f"fix: dt.calibrate(dtype=torch.bfloat16), or torch.float32"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanningError(
            f"calibrate takes a mesh, not {type(mesh).__name__}.\nfix: dt.calibrate(dt.Mesh(tp=2))"
        )
    running = launched()
    if running is None:
        whole = mesh or Mesh()
        with launch(
            whole,
            backend or "inprocess",
            device or "cpu",
            address=address,
            deadline_s=60.0 if deadline_s is None else deadline_s,
        ) as session:
            return measured(session.cluster, whole, dtype)
    given = dict(backend=backend, device=device, address=address, deadline_s=deadline_s)
    stated = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if stated:
        raise PlanningError(
            f"calibrate({', '.join(stated)}) inside a launch: what is measured is the launch's "
            f"cluster.\nfix: dt.calibrate(), or call it outside the launch"
        )
    session = session_for(mesh or running.mesh)
    return measured(session.cluster, session.mesh, dtype)
