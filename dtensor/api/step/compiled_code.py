"""Whether a session compiles local code by torch's compiler, and where.

    if compiles(session, detect_nan=False):
        program = compiled_program(session, planned, program, num_optimizers=1, state=state)

Code for CPUs is compiled in the controller. Code for GPUs is compiled in the process of the first
rank on each kind of GPU; all ranks on GPUs of this kind load its artifacts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.step.plan_call import Planned
from dtensor.api.store.session import MeshSession
from dtensor.daft import Buffer, Program
from dtensor.errors import PlanningError
from dtensor.frontend.source import caller_level
from dtensor.runtime.lower.detect_nan import DetectNan
from dtensor.runtime.lower.program import on_mesh
from dtensor.runtime.lower.rank_builder import options_name, rates_name
from dtensor.runtime.lower.step_end import SCALE

if TYPE_CHECKING:
    from dtensor.runtime.lower.pieces import PieceSource


def compiles(session: MeshSession, detect_nan: DetectNan) -> bool:
    """Return whether the session's local code is compiled by torch's compiler.

    Warns, once for a launch, if `local="auto"` cannot compile because a rank lacks a compiler.
    Raises PlanningError if `local="inductor"` cannot, or if NaN detection is on.
    """
    launch, device = session.launch, session.cluster.device
    is_stated = launch.local == "inductor"
    if launch.local == "generated" or (launch.local == "auto" and device.type != "cuda"):
        return False
    if detect_nan:
        if is_stated:
            raise PlanningError(
                'detect_nan checks each op, and local="inductor" compiles several into one.\n'
                "fix: leave one of them out"
            )
        return False
    if launch.has_compiler is None:
        launch.has_compiler = _has_compiler(session)
    return launch.has_compiler


def _has_compiler(session: MeshSession) -> bool:
    problem = session.cluster.call_on(0, _problem_on_host, session.cluster.device.type)
    if problem is None:
        return True
    lacks, fix = problem
    if session.launch.local == "inductor":
        raise no_compiler(lacks, fix)
    warnings.warn(
        f"local code is not compiled: torch's compiler needs {lacks}.\n"
        f'fix: {fix}; or launch with local="generated"',
        stacklevel=caller_level(),
    )
    return False


def no_compiler(lacks: str, fix: str) -> PlanningError:
    return PlanningError(f'local="inductor" needs {lacks}.\nfix: {fix}; or leave local out')


def compiled_program(
    session: MeshSession,
    planned: Planned,
    program: Program,
    num_optimizers: int,
    state: Mapping[str, str],
) -> Program:
    """Return the program with its local code compiled for the shapes of each rank. ``state``: plan
    input -> name on the ranks."""
    from dtensor.runtime.lower.inductor import compile_segments

    plan, cluster = planned.plan, session.cluster
    of_optimizers = (name(n) for n in range(num_optimizers) for name in (options_name, rates_name))
    others = [SCALE, *of_optimizers]
    # numbers, such as the step, are tensors if the host reads nothing during a run
    number: object = Buffer((), torch.int64) if program.is_deferred else 0
    inputs_by_rank: list[dict[str, object]] = []
    for rank, rank_program in enumerate(program.ranks):
        coordinates = session.mesh.coordinates(rank)
        names = {*rank_program.inputs, *rank_program.state}
        buffers: dict[str, object] = {}
        for item in (*plan.inputs, *plan.delayed):
            name = state.get(item.name, item.name)
            if name in names:
                spec = item.held if item.name in state else item.spec
                buffers[name] = Buffer(on_mesh(plan, spec).local_shape(coordinates), spec.dtype)
        numbers = set(rank_program.inputs).difference(buffers, others)
        inputs_by_rank.append(buffers | dict.fromkeys(numbers, number))
    compilers: dict[str, int] = {"cpu": 0}  # kind of device -> the rank that compiles
    if cluster.device.type == "cuda":
        kinds = [cluster.call_on(rank, _kind_on_host) for rank in range(program.size)]
        compilers = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}

    def compile(source: PieceSource) -> dict[str, bytes] | str:
        data: dict[str, bytes] = {}
        for kind, rank in compilers.items():
            made = (
                _compile_on_host(None, source)
                if cluster.device.type == "cpu"
                else cluster.call_on(rank, _compile_on_host, source, "cuda")
            )
            if isinstance(made, str):
                return made
            data[kind] = made
        return data

    return compile_segments(program, inputs_by_rank, cluster.device, compile)


def _problem_on_host(worker: Any, device_type: str) -> tuple[str, str] | None:
    from dtensor.runtime.lower import pieces

    return pieces.compiler_problem(device_type)


def _kind_on_host(worker: Any) -> str:
    from dtensor.runtime.lower import pieces

    return pieces.device_kind(torch.device("cuda"))


def _compile_on_host(worker: Any, source: PieceSource, device: str = "cpu") -> bytes | str:
    from dtensor.runtime.lower import pieces

    return pieces.compile_piece(source, torch.device(device))
