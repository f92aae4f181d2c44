"""Resolution of what users state: glob patterns, placements of parameters, stages, and placements
of inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtensor.api.model.stating.patterns import expand, matches, names_of
from dtensor.api.model.stating.stages import NO_STAGES, resolve_stages
from dtensor.api.model.stating.stated_placements import (
    InputPins,
    input_pins,
    planner_pins,
    resolve_placements,
)
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import ColumnParallel
from dtensor.sharding.spec.placements import Column, Placement, Replicate, Row, Shard
from tests.models import GPT, MLP

TP = Mesh(tp=2)


class Normed(nn.Module):
    """A module with parameters, buffers beside them, a scalar buffer, and a buffer in a module
    without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("table", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))) + self.table[0]


# -- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("*.weight", "blocks.0.mlp.up.weight", True),  # `*` crosses dots
        ("*.weight", "weight", False),
        ("blocks.[0-1].*", "blocks.1.norm.bias", True),
        ("blocks.[0-1].*", "blocks.2.norm.bias", False),
        ("blocks.{0..11}.*", "blocks.11.norm.bias", True),
        ("blocks.{0..11}.*", "blocks.12.norm.bias", False),
        ("blocks.{2..11}.*", "blocks.1.norm.bias", False),
        ("*.{up,gate}.weight", "mlp.gate.weight", True),
        ("*.{up,gate}.weight", "mlp.down.weight", False),
        ("h.{0..1}.{a,b}", "h.1.b", True),
        ("h.?.w", "h.12.w", False),
        ("Up.weight", "up.weight", False),  # case matters
    ],
)
def test_glob_matches_expected_names(glob: str, name: str, expected: bool) -> None:
    assert matches(glob, name) is expected


def test_braces_expand_in_order() -> None:
    assert expand("b.{0..2}.{x,y}") == ("b.0.x", "b.0.y", "b.1.x", "b.1.y", "b.2.x", "b.2.y")
    assert expand("a.{b}") == ("a.{b}",)
    assert expand("a.{b,{c,d}}") == ("a.b", "a.c", "a.b", "a.d")


@pytest.mark.parametrize("glob", ["a.{b", "a.b}", "a.{3..1}"])
def test_stray_braces_raise_with_fix(glob: str) -> None:
    with pytest.raises(PlanningError, match="fix: write"):
        expand(glob)


def test_tied_parameter_lists_all_its_names() -> None:
    tied = next(n for n in names_of(GPT(tied=True)) if n.name == "embed.weight")
    assert tied.names == ("embed.weight", "head.weight")


# -- parameters ----------------------------------------------------------------------------------


ROWS, COLUMNS = dict(tp=Row()), dict(tp=Column())
FOUND: dict[str, tuple[type[nn.Module], dict[str, dict[str, Placement]], dict[str, Placement]]] = {
    "the first match wins": (
        MLP,
        {"up.*": ROWS, "*.weight": COLUMNS},
        {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(-1)},
    ),
    "a pattern whose parameters are taken does nothing": (
        MLP,
        {"*.weight": ROWS, "up.weight": COLUMNS},
        {"up.weight": Shard(0), "down.weight": Shard(0)},
    ),
    "a tied parameter is found under each name": (
        GPT,
        {"head.weight": ROWS},
        {"embed.weight": Shard(0)},
    ),
    "a pattern that matches parameters is not about buffers": (
        Normed,
        {"norm.*": ROWS},
        {"norm.weight": Shard(0), "norm.bias": Shard(0)},
    ),
    "a pattern that matches no parameter is about buffers": (
        Normed,
        {"norm.running_*": ROWS},
        {"norm.running_mean": Shard(0), "norm.running_var": Shard(0)},
    ),
} | {
    f"{placement} fits": (MLP, {"up.weight": dict(tp=placement)}, {"up.weight": placement})
    for placement in (Row(blocks=4), Row(blocks=(32, 16, 16)), Row(unit=16), Column(unit=4))
}


class Bracketed(nn.ModuleDict):
    """A module in which the name of one child is a glob that matches the other child."""

    def __init__(self) -> None:
        super().__init__({"a[0]": nn.Linear(4, 4), "a0": nn.Linear(4, 4)})


BRACKETED = {
    "a name": ("a[0].weight", {"a[0].weight"}),
    "a glob": ("a[0].*", {"a0.weight", "a0.bias"}),
    "a glob of a name with a bracket": ("a[[]0].*", {"a[0].weight", "a[0].bias"}),
    "a role": ("a[0]", {"a[0].weight"}),
}


@pytest.mark.parametrize("case", BRACKETED)
def test_name_with_brackets_matches_only_itself(case: str) -> None:
    pattern, expected = BRACKETED[case]
    placed = dict(tp=ColumnParallel()) if case == "a role" else ROWS
    found = resolve_placements(Bracketed(), TP, {pattern: placed})
    assert {p.name for p in found if p.pattern is not None} == expected


def test_stage_patterns_match_names_with_brackets() -> None:
    first = ["a[0].weight", "a[0].bias"]
    plan = resolve_stages(Bracketed(), Mesh(pp=2), {"pp": [first, ["a0.*"]]})
    assert (plan.held["a[0].weight"], plan.held["a0.weight"]) == ((0,), (1,))
    with pytest.raises(PlanningError, match=r'fix: "a\[\[\]0\].\*" matches 2 of 2'):
        resolve_stages(
            nn.ModuleDict({"a[0]": nn.Linear(4, 4)}), Mesh(pp=2), {"pp": [["a[0].*"], ["b"]]}
        )


@pytest.mark.parametrize("case", FOUND)
def test_patterns_place_expected_parameters(case: str) -> None:
    kind, placements, expected = FOUND[case]
    found = resolve_placements(kind(), TP, placements)
    assert {p.name: p.placements for p in found if p.pattern is not None} == {
        name: {"tp": placement} for name, placement in expected.items()
    }


def test_each_parameter_and_buffer_has_an_entry_with_its_pattern() -> None:
    found = resolve_placements(Normed(), TP, {"up.*": dict(tp=Row())})
    assert [(p.name, p.pattern) for p in found[:3]] == [
        ("up.weight", "up.*"),
        ("up.bias", "up.*"),
        ("norm.weight", None),
    ]
    assert [(p.name, p.placements) for p in found if p.name == "table"] == [("table", {})]


def test_axes_keep_stated_order_and_are_checked_at_size_one() -> None:
    found = resolve_placements(MLP(), Mesh(dp=2, tp=2), {"up.weight": dict(tp=Row(), dp=Row())})
    assert list(found[0].placements) == ["tp", "dp"]
    with pytest.raises(PlanningError, match="dim 2 is not there"):
        resolve_placements(MLP(), Mesh(tp=1), {"up.weight": dict(tp=Shard(2))})


# -- stages ---------------------------------------------------------------------------------------

PP = Mesh(pp=2, tp=2)


def test_stages_hold_matched_parameters_and_tied_ones_are_on_both() -> None:
    first, last = ["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*"]
    plan = resolve_stages(GPT(tied=True), PP, {"pp": [first, [*last, "head*"]]})
    assert (plan.axis, plan.num_stages) == ("pp", 2)
    assert plan.held["embed.weight"] == (0, 1)
    assert plan.held["blocks.0.mlp.up.weight"] == (0,)
    assert plan.held["norm.bias"] == (1,)
    assert set(plan.held) == {name for name, _ in GPT(tied=True).named_parameters()}
    one_name = resolve_stages(GPT(tied=True), PP, {"pp": [first, last]})  # of two is enough
    assert one_name.held["embed.weight"] == (0,)


def test_buffer_is_on_stage_of_its_module_or_as_stated() -> None:
    plan = resolve_stages(Normed(), PP, {"pp": [["up*"], ["norm.weight", "norm.bias", "down*"]]})
    assert plan.held["norm.running_mean"] == plan.held["norm.num_batches_tracked"] == (1,)
    assert "table" not in plan.held  # its module's parameters are on both stages
    plan = resolve_stages(Normed(), PP, {"pp": [["up*"], ["norm*", "down*", "table"]]})
    assert plan.held["table"] == (1,)


def test_number_of_stages_must_be_multiple_of_axis_size() -> None:
    lists = [["embed*", "positions*"], ["blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]]
    assert resolve_stages(GPT(), PP, {"pp": lists}).num_stages == 4
    with pytest.raises(PlanningError, match="no multiple of the axis pp"):
        resolve_stages(GPT(), PP, {"pp": [[*lists[0], *lists[1]], *lists[2:]]})


def test_stages_none_resolves_to_no_stages() -> None:
    assert resolve_stages(GPT(), TP, None) == NO_STAGES


# -- arguments -------------------------------------------------------------------------------------

ARGUMENTS = {
    "tokens": Meta((8, 16), torch.int64),
    "mask": Meta((16, 16), torch.bool),
    "scale": Meta((), torch.float32),
    "batch.ids": Meta((8,), torch.int64),
}
DP = Mesh(dp=2)


ALL = ("tokens", "batch.ids")


@pytest.mark.parametrize(
    ("inputs", "pins", "batch"),
    [
        # for each argument with the batch dim
        (dict(dp=Row()), {"tokens": {"dp": Shard(0)}, "batch.ids": {"dp": Shard(0)}}, ALL),
        # by argument; the batch is what is as long as what is split along dim 0
        (
            {"mask": dict(dp=Column()), "batch": dict(dp=Row())},
            {"mask": {"dp": Shard(-1)}, "batch.ids": {"dp": Shard(0)}},
            ALL,
        ),
        # an argument that is named and left whole carries no batch
        (
            {"tokens": dict(dp=Row()), "batch.ids": {}},
            {"tokens": {"dp": Shard(0)}, "batch.ids": {}},
            ("tokens",),
        ),
        # without a pin along dim 0 the first argument says how long the batch is
        (None, {"tokens": {}, "batch.ids": {}}, ALL),
        ({"tokens": dict(dp=Column())}, {"tokens": {"dp": Shard(-1)}}, ALL),
    ],
)
def test_inputs_argument_resolves_to_placements_and_batch_arguments(
    inputs: Any, pins: Any, batch: tuple[str, ...]
) -> None:
    assert input_pins(ARGUMENTS, inputs, DP) == InputPins(pins=pins, batch=batch)


def test_planner_placements_use_names_of_dataflow() -> None:
    graph = capture(lambda m, x: m(x), (MLP(), torch.randn(8, 16)), grads="none")
    flow = dataflow(graph)
    found = planner_pins(
        flow,
        resolve_placements(
            MLP(), TP, {"*.weight": dict(tp=Row()), "up.bias": dict(tp=Replicate())}
        ),
        input_pins({"x": Meta((8, 16), torch.float32)}, dict(tp=Replicate()), TP),
    )
    assert found.pins == {
        "up_weight": {"tp": Shard(0)},
        "up_bias": {"tp": Replicate()},
        "down_weight": {"tp": Shard(0)},
        "x": {"tp": Replicate()},
    }
    assert found.pinned_by["down_weight"] == "*.weight"
    assert found.batch == ("x",)
