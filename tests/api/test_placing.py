"""What users state: patterns, placements of parameters, stages, pins of arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtensor.api.model.stating.patterns import expand, matches, names_of
from dtensor.api.model.stating.stages import NO_STAGES, stage_of
from dtensor.api.model.stating.stated_placements import InputPins, input_pins, planner_pins, resolve
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Column, Placement, Replicate, Row, Shard
from tests.models import GPT, MLP

TP = Mesh(tp=2)


class Normed(nn.Module):
    """Parameters, buffers beside them, a scalar buffer, and a buffer far from any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("table", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))) + self.table[0]


def stated(module: nn.Module, mesh: Mesh, placements: dict) -> dict[str, dict[str, Placement]]:
    """What `resolve` found, without the parameters of which nothing was stated."""
    found = resolve(module, mesh, placements)
    return {p.name: dict(p.placements) for p in found if p.pattern is not None}


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
def test_globs(glob: str, name: str, expected: bool) -> None:
    assert matches(glob, name) is expected


def test_braces_expand_in_order() -> None:
    assert expand("b.{0..2}.{x,y}") == ("b.0.x", "b.0.y", "b.1.x", "b.1.y", "b.2.x", "b.2.y")
    assert expand("a.{b,{c,d}}") == ("a.b", "a.c", "a.b", "a.d")


@pytest.mark.parametrize("glob", ["a.{b", "a.b}", "a.{b}", "a.{3..1}", "a.{}"])
def test_stray_braces_are_errors(glob: str) -> None:
    with pytest.raises(PlanningError, match="fix: write"):
        expand(glob)


def test_names_of_a_tied_parameter_stand_together() -> None:
    tied = next(n for n in names_of(GPT(tied=True)) if n.name == "embed.weight")
    assert tied.names == ("embed.weight", "head.weight")


# -- parameters ----------------------------------------------------------------------------------


def test_the_first_match_wins() -> None:
    found = stated(MLP(), TP, {"up.*": dict(tp=Row()), "*.weight": dict(tp=Column())})
    assert found == {
        "up.weight": {"tp": Shard(0)},
        "up.bias": {"tp": Shard(0)},
        "down.weight": {"tp": Shard(-1)},
    }


def test_a_pattern_whose_parameters_are_taken_does_nothing() -> None:
    found = stated(MLP(), TP, {"*.weight": dict(tp=Row()), "up.weight": dict(tp=Column())})
    assert found["up.weight"] == {"tp": Shard(0)}


def test_each_parameter_and_buffer_has_an_entry_with_its_pattern() -> None:
    found = resolve(Normed(), TP, {"up.*": dict(tp=Row())})
    assert [(p.name, p.pattern) for p in found[:3]] == [
        ("up.weight", "up.*"),
        ("up.bias", "up.*"),
        ("norm.weight", None),
    ]
    assert [(p.name, p.placements) for p in found if p.name == "table"] == [("table", {})]


def test_a_tied_parameter_is_found_under_each_name() -> None:
    found = stated(GPT(tied=True), TP, {"head.weight": dict(tp=Row())})
    assert found == {"embed.weight": {"tp": Shard(0)}}


def test_the_order_of_axes_is_kept() -> None:
    mesh = Mesh(dp=2, tp=2)
    found = stated(MLP(), mesh, {"up.weight": dict(tp=Row(), dp=Row())})
    assert list(found["up.weight"]) == ["tp", "dp"]


def test_a_pattern_is_about_buffers_only_if_it_matches_no_parameter() -> None:
    assert set(stated(Normed(), TP, {"norm.*": dict(tp=Row())})) == {"norm.weight", "norm.bias"}
    found = stated(Normed(), TP, {"norm.running_*": dict(tp=Row())})
    assert set(found) == {"norm.running_mean", "norm.running_var"}


def test_an_axis_of_size_one_is_checked_like_any_other() -> None:
    with pytest.raises(PlanningError, match="dim 2 is not there"):
        resolve(MLP(), Mesh(tp=1), {"up.weight": dict(tp=Shard(2))})


def test_blocks_and_units_that_fit() -> None:
    for placement in (Row(blocks=4), Row(blocks=(32, 16, 16)), Row(unit=16), Column(unit=4)):
        assert stated(MLP(), TP, {"up.weight": dict(tp=placement)}) == {
            "up.weight": {"tp": placement}
        }


# -- stages ---------------------------------------------------------------------------------------

PP = Mesh(pp=2, tp=2)


def test_stages_hold_parameters_and_ties_are_held_by_both() -> None:
    plan = stage_of(
        GPT(tied=True),
        PP,
        {"pp": [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]},
    )
    assert (plan.axis, plan.num_stages) == ("pp", 2)
    assert plan.held["embed.weight"] == (0, 1)
    assert plan.held["blocks.0.mlp.up.weight"] == (0,)
    assert plan.held["norm.bias"] == (1,)
    assert set(plan.held) == {name for name, _ in GPT(tied=True).named_parameters()}


def test_a_tied_parameter_needs_only_one_of_its_names() -> None:
    plan = stage_of(
        GPT(tied=True),
        PP,
        {"pp": [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*"]]},
    )
    assert plan.held["embed.weight"] == (0,)


def test_a_buffer_goes_with_the_parameters_of_its_module() -> None:
    plan = stage_of(Normed(), PP, {"pp": [["up*"], ["norm.weight", "norm.bias", "down*"]]})
    assert plan.held["norm.running_mean"] == (1,)
    assert plan.held["norm.num_batches_tracked"] == (1,)
    assert "table" not in plan.held  # its module's parameters are on both stages


def test_a_buffer_can_be_stated() -> None:
    plan = stage_of(Normed(), PP, {"pp": [["up*"], ["norm*", "down*", "table"]]})
    assert plan.held["table"] == (1,)


def test_the_number_of_stages_is_a_multiple_of_the_axis() -> None:
    lists = [["embed*", "positions*"], ["blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]]
    assert stage_of(GPT(), PP, {"pp": lists}).num_stages == 4
    with pytest.raises(PlanningError, match="no multiple of the axis pp"):
        stage_of(GPT(), PP, {"pp": [[*lists[0], *lists[1]], *lists[2:]]})


def test_no_stages() -> None:
    assert stage_of(GPT(), TP, None) == NO_STAGES


# -- arguments -------------------------------------------------------------------------------------

ARGUMENTS = {
    "tokens": Meta((8, 16), torch.int64),
    "mask": Meta((16, 16), torch.bool),
    "scale": Meta((), torch.float32),
    "batch.ids": Meta((8,), torch.int64),
}
DP = Mesh(dp=2)


def test_inputs_are_for_each_argument_with_the_batch_dim() -> None:
    pins = input_pins(ARGUMENTS, dict(dp=Row()), DP)
    assert pins.batch == ("tokens", "batch.ids")
    assert pins.pins == {"tokens": {"dp": Shard(0)}, "batch.ids": {"dp": Shard(0)}}


def test_inputs_by_argument() -> None:
    pins = input_pins(ARGUMENTS, {"mask": dict(dp=Column()), "batch": dict(dp=Row())}, DP)
    assert pins.pins == {"mask": {"dp": Shard(-1)}, "batch.ids": {"dp": Shard(0)}}
    assert pins.batch == ("tokens", "batch.ids")  # as long as what is split along dim 0


def test_an_argument_that_is_named_and_left_whole_carries_no_batch() -> None:
    pins = input_pins(ARGUMENTS, {"tokens": dict(dp=Row()), "batch.ids": {}}, DP)
    assert pins.batch == ("tokens",)


def test_without_a_pin_along_dim_0_the_first_argument_says_how_long_the_batch_is() -> None:
    assert input_pins(ARGUMENTS, None, DP) == InputPins(
        pins={"tokens": {}, "batch.ids": {}}, batch=("tokens", "batch.ids")
    )
    pins = input_pins(ARGUMENTS, {"tokens": dict(dp=Column())}, DP)
    assert pins.batch == ("tokens", "batch.ids")


def test_pins_under_the_names_of_the_flow() -> None:
    graph = capture(lambda m, x: m(x), (MLP(), torch.randn(8, 16)), grads="none")
    flow = dataflow(graph)
    found = planner_pins(
        flow,
        resolve(MLP(), TP, {"*.weight": dict(tp=Row()), "up.bias": dict(tp=Replicate())}),
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
