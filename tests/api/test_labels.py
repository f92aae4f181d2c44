"""Parameters keep their labels when the module renames, moves or replaces them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.api.model.labels import Labels

LINEAR = ["weight", "bias"]


def net() -> nn.Module:
    module = nn.Module()
    module.up, module.down = nn.Linear(4, 8), nn.Linear(8, 4)
    module.register_buffer("scale", torch.ones(3))
    return module


def test_tensor_keeps_its_first_name_as_label() -> None:
    module = net()
    labels = Labels(module)
    first = labels.snapshot()
    assert first.is_current()
    assert all(name == label for name, label in first.labels.items())
    module.up, module.down = module.down, module.up
    assert not first.is_current()
    swapped = labels.snapshot()
    assert swapped.labels["up.weight"] == "down.weight"
    assert swapped.names["up.weight"] == "down.weight"
    assert swapped.number != first.number
    module.up, module.down = module.down, module.up
    assert labels.snapshot().number == first.number


def test_new_tensor_gets_new_label() -> None:
    module = net()
    labels = Labels(module)
    old, kept = module.down.weight, labels.snapshot()
    for number in (2, 3):
        module.down = nn.Linear(8, 4)
        assert labels.snapshot().labels["down.weight"] == f"down.weight#{number}"
    assert labels.of(old) == kept.labels["down.weight"] == "down.weight"
    assert labels.of(nn.Parameter(torch.ones(1))) is None
    module.down.weight = old
    again = labels.snapshot()
    assert (again.labels["down.weight"], again.labels["down.bias"]) == (
        "down.weight",
        "down.bias#3",
    )


def renamed(module: nn.Module) -> None:
    held = module._parameters
    held["other"] = held.pop("extra")


def rebuilt(module: nn.Module) -> None:
    module.up._parameters = copy.copy(module.up._parameters)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "scale", torch.ones(3)),
        lambda module: delattr(module, "scale"),
        lambda module: module.register_buffer("more", None),
        lambda module: module.up.register_module("inner", nn.Identity()),
        lambda module: setattr(module.down, "bias", None),
        renamed,
        rebuilt,
    ],
)
def test_snapshot_detects_each_way_of_changing_module(change: object) -> None:
    module = net()
    module.extra = nn.Parameter(torch.ones(2))
    seen = Labels(module).snapshot()
    assert seen.is_current()
    assert callable(change)
    change(module)
    assert not seen.is_current()


def test_tied_parameter_has_one_label() -> None:
    module = net()
    module.tied = nn.Linear(4, 8)
    labels = Labels(module)
    labels.snapshot()
    module.tied.weight = module.up.weight
    seen = labels.snapshot()
    assert seen.labels["tied.weight"] == "up.weight"
    assert seen.names["up.weight"] == "up.weight"
    assert "tied.weight" not in seen.tensors
    module.up.weight = nn.Parameter(torch.ones(8, 4))
    assert labels.snapshot().names["up.weight"] == "tied.weight"


# -- what was stated follows -----------------------------------------------------------------------

MESH = dt.Mesh(tp=2)


def placed(model: dt.ParallelModule) -> dict[str, object]:
    model.look()
    return {p.name: dict(p.placements) for p in model.placements if p.placements}


def test_placement_follows_moved_parameter_and_pattern_matches_new_ones() -> None:
    module = net()
    model = dt.parallelize(module, MESH, {"up.weight": dict(tp=dt.Row())})
    module.inner = nn.Sequential(module.up)
    module.up = nn.Linear(4, 8)
    assert placed(model) == {
        "up.weight": {"tp": dt.Row()},
        "inner.0.weight": {"tp": dt.Row()},
    }
    del module.up
    assert placed(model) == {"inner.0.weight": {"tp": dt.Row()}}


def test_role_follows_weight_into_wrapping_module() -> None:
    module = net()
    model = dt.parallelize(module, MESH, {"up": dict(tp=dt.ColumnParallel())})
    module.up = nn.Sequential(module.up)
    model.look()
    owners = {p.name: p.owner.module for p in model.placements if p.owner is not None}
    assert owners == {"up.0.weight": "up.0"}


def test_new_parameter_that_cannot_be_placed_is_refused_until_it_can() -> None:
    module = net()
    model = dt.parallelize(module, MESH, {"up.weight": dict(tp=dt.Shard(1, blocks=2))})
    module.up = nn.Linear(3, 8)
    for _ in range(2):
        with pytest.raises(dt.PlanningError, match=r"does not fit up\.weight"):
            model.look()
    module.up = nn.Linear(6, 8)
    model.look()


def stages(model: dt.ParallelModule) -> dict[str, tuple[int, ...]]:
    model.look()
    return dict(model.stage_plan.held)


def test_moved_parameter_keeps_stage_and_new_parameter_needs_stage() -> None:
    module = net()
    mesh = dt.Mesh(pp=2)
    model = dt.parallelize(module, mesh, stages={"pp": [["up.*"], ["down.*"]]})
    module.first, up = nn.Sequential(module.up), module.up
    del module.up
    held = stages(model)
    assert (held["first.0.weight"], held["down.bias"]) == ((0,), (1,))
    module.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(dt.PlanningError, match="1 name is in no stage"):
        model.look()
    del module.extra
    module.down.weight = up.weight  # shared: it stays where it is, and where it is used now
    assert stages(model)["down.weight"] == (0, 1)


def test_labels_of_deleted_parameters_are_forgotten() -> None:
    module = net()
    model = dt.parallelize(module, MESH, {"*.weight": dict(tp=dt.Row())})
    for _ in range(3):
        module.down = nn.Linear(8, 4)
        model.look()
    present = {"up.weight", "up.bias", "down.weight#4", "down.bias#4", "scale"}
    assert model.labels.known == present
    module.down = module.up
    model.look()
    assert model._former_statements.placements.keys() <= present
