"""State in and out: whole tensors in torch's own format, under any placement.

    state = gather_state_dict(model, opt)        # {"model": ..., "optimizer": ...}
    load_state_dict(model, opt, state)           # the same model, placed otherwise

"model" is what `module.state_dict()` gives and "optimizer" what `opt.state_dict()` gives, so torch
alone reads and writes them. Master weights are entries "master_param" of the optimizer's state, in
float32 as their moments; from a state without them the next step makes them anew. "step" is the
number of the next training step, which random numbers depend on; it is there once a step was taken.

Not here: how an optimizer's state comes to the cluster (`MeshSession.place_optimizer`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from dtensor.api.initial import names_in_state
from dtensor.api.parallel import ParallelModule, check_parallel
from dtensor.api.session import MeshSession, OptimizerHome, Resident, session_for
from dtensor.errors import PlanningError, check_kind
from dtensor.runtime.shard_optimizer import ShardOptimizer
from dtensor.sharding.spec.shards import assemble_at
from dtensor.sharding.spec.spec import TensorSpec

_OPTIMIZER = torch.optim.Optimizer | None


def gather_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """The model's and the optimizer's state, whole, on the CPU. Waits for running steps.

    What is not on the cluster (outside a launch, or unused so far) is the controller's value.
    """
    check_parallel("gather_state_dict", model)
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", "None")
    held = model.module.state_dict()
    resident = _resident(model)
    from_ranks: dict[str, torch.Tensor] = {}
    if resident is not None:
        session, home = resident
        for wait in session.settling:  # a step that failed gives its number back
            wait()
        from_ranks = _gather_model(session, home)
        home.changed = False
        home.saved = "the last was gathered", model.steps.present()
    names = names_in_state(model.module)
    values = {
        key: from_ranks[names[key]]
        if names[key] in from_ranks
        else model.initial.value(names[key], t).detach().cpu().clone()
        for key, t in held.items()
    }
    state: dict[str, Any] = {"model": values}
    if model.steps.present():
        state["step"] = model.steps.present()
    if optimizer is not None:
        state["optimizer"] = copy.deepcopy(optimizer.state_dict())
        if resident is not None and id(optimizer) in resident[1].optimizers:
            session, home = resident
            gathered = _gather_optimizer(session, home, home.optimizers[id(optimizer)])
            state["optimizer"] = _in_torch_format(model, optimizer, gathered)
    return state


def load_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Load what `gather_state_dict` (or torch) gave, inside or outside a launch.

    The controller's tensors change in place; a running launch takes them over at its next step.
    Raises as torch does for names and shapes that do not fit.
    """
    check_parallel("load_state_dict", model)
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", "None")
    check_kind("the state", state, Mapping, "a dict", '{"model": ..., "optimizer": ...}')
    if "model" not in state:
        raise PlanningError(
            f"the state has no entry 'model', only {sorted(state)}; "
            f'fix: pass {{"model": ..., "optimizer": ...}}'
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        model.module.load_state_dict(state["model"])
    model.initial.load(model.module, state["model"])
    if "step" in state:
        model.steps.restore(state["step"])
    if optimizer is not None and "optimizer" in state:
        # torch would keep the state's own tensors
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        _keep_values(optimizer, state["optimizer"])
    model.version += 1


def _keep_values(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of state to the dtype and device of its parameter.

    It rounds master weights and their moments to 16 bits, and empties the state of a parameter on
    the meta device.
    """
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            held = optimizer.state[parameter].get(key)
            if not (isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor)):
                continue
            if (held.dtype, held.device) != (value.dtype, value.device):
                optimizer.state[parameter][key] = value.detach().clone()


def _resident(model: ParallelModule) -> tuple[MeshSession, Resident] | None:
    session = session_for(model.mesh)
    home = session.residents.get(id(model))
    if home is None or home.version != model.version or not home.specs:
        return None
    return session, home


def _gather_model(session: MeshSession, home: Resident) -> dict[str, torch.Tensor]:
    labels = list(home.specs)
    wanted = [
        [home.name(label) for label in labels if rank in home.ranks[label]]
        for rank in range(session.mesh.size)
    ]
    session.check()
    found = session.cluster.get(wanted).get()
    tables = [dict(zip(*pair, strict=True)) for pair in zip(wanted, found, strict=True)]
    gathered: dict[str, torch.Tensor] = {}
    for label in labels:
        shards = {r: tables[r][home.name(label)] for r in home.ranks[label]}
        gathered[label] = assemble_at(shards, home.specs[label])
    return gathered


def _gather_optimizer(
    session: MeshSession, home: Resident, optimizer: OptimizerHome
) -> dict[str, dict[str, Any]]:
    """Parameter name to its state entries, whole."""
    found = session.cluster.get([[optimizer.name]] * session.mesh.size).get()
    exports: list[dict[str, dict[str, Any]]] = []
    for (shard,) in found:
        assert isinstance(shard, ShardOptimizer)
        exports.append(shard.export())
    gathered: dict[str, dict[str, Any]] = {}
    for label, spec in home.states.items():
        ranks = [r for r in home.ranks[label] if label in exports[r]]
        if not ranks or not exports[ranks[0]][label]:
            continue
        gathered[label] = {}
        for key, value in exports[ranks[0]][label].items():
            if isinstance(value, torch.Tensor) and value.dim() == len(spec.shape) > 0:
                whole = TensorSpec(spec.shape, value.dtype, spec.mesh, spec.placements)
                value = assemble_at({r: exports[r][label][key] for r in ranks}, whole)
            gathered[label][key] = value
    return gathered


def _in_torch_format(
    model: ParallelModule, optimizer: torch.optim.Optimizer, gathered: Mapping[str, Any]
) -> dict[str, Any]:
    """`opt.state_dict()` with the gathered entries: parameters by number, in group order."""
    names = {id(p): name for name, p in model.named_parameters()}
    state: dict[int, Any] = {}
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names[id(parameter)] in gathered:
                state[number] = gathered[names[id(parameter)]]
            number += 1
    return {**optimizer.state_dict(), "state": state}
