"""Full error texts for mistakes in stated placements, inputs and stages.

Each text is one sentence of fact, the operands with their numbers, and a fix.
"""
# ruff: noqa: E501  (messages stand as they are printed)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from dtensor.api.model.stating.stages import resolve_stages
from dtensor.api.model.stating.stated_placements import input_pins, resolve_placements
from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Column, Partial, Row, Shard, Zigzag
from tests.models import GPT, MLP

MESH = Mesh(pp=2, dp=2, tp=2)


def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlanningError) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def placed(placements: Any, module: nn.Module | None = None) -> str:
    return refused(resolve_placements, module or GPT(), MESH, placements, stage_axis="pp")


# -- placements ------------------------------------------------------------------------------------


def test_pattern_without_match_error_lists_parameters() -> None:
    assert_expected_inline(
        placed({"*.attn.qvk.weight": dict(tp=Row())}),
        """\
the pattern "*.attn.qvk.weight" of placements matches no parameter.
  nearest names: blocks.1.attn.qkv.weight, blocks.0.attn.qkv.weight, blocks.1.attn.proj.weight
fix: "*.attn.qkv.weight" matches 2 of 28 parameters and buffers""",
    )
    assert_expected_inline(
        placed({"*.attn.qkv": dict(tp=Row())}),
        """\
the pattern "*.attn.qkv" of placements matches no parameter.
  it matches the names of modules: blocks.0.attn.qkv, blocks.1.attn.qkv
  nearest names: blocks.1.attn.qkv.bias, blocks.0.attn.qkv.bias, blocks.1.attn.qkv.weight
fix: "*.attn.qkv.weight" matches 2 of 28 parameters and buffers""",
    )
    assert_expected_inline(
        placed({"zzz": dict(tp=Row())}, MLP()),
        """\
the pattern "zzz" of placements matches no parameter.
  parameters: up.weight, up.bias, down.weight, down.bias
fix: name a parameter as in model.named_parameters(), or remove the pattern""",
    )


def test_unknown_axis_error_lists_axes_of_mesh() -> None:
    assert_expected_inline(
        placed({"*.up.weight": dict(tpp=Row())}),
        """\
"*.up.weight" names the axis "tpp", which is not in the mesh.
  mesh(pp=2, dp=2, tp=2), axes: pp, dp, tp
fix: tp=dt.Row(); or add tpp to the mesh, tpp=1 to split nothing""",
    )
    assert_expected_inline(
        placed({"*.up.weight": dict(expert=Row())}),
        """\
"*.up.weight" names the axis "expert", which is not in the mesh.
  mesh(pp=2, dp=2, tp=2), axes: pp, dp, tp
fix: name an axis of the mesh; or add expert to the mesh, expert=1 to split nothing""",
    )


def test_placement_on_stage_axis_error_says_to_remove_it() -> None:
    assert_expected_inline(
        placed({"*.up.weight": dict(pp=Row())}),
        """\
"*.up.weight" places a tensor on the axis "pp", which holds the stages.
  pp=Shard(0)
fix: remove it; stages= says which stage holds a parameter""",
    )


def test_placement_on_missing_dim_error_proposes_existing_dim() -> None:
    assert_expected_inline(
        placed({"*.up.weight": dict(tp=Shard(2))}),
        """\
tp=Shard(2) does not fit blocks.0.mlp.up.weight: it has 2 dims, and dim 2 is not there.
  blocks.0.mlp.up.weight: f32[64,16]
  stated by "*.up.weight"
fix: dt.Row() splits dim 0 of 64, dt.Column() dim 1 of 16""",
    )
    assert_expected_inline(
        placed({"*.up.bias": dict(tp=Shard(1))}),
        """\
tp=Shard(1) does not fit blocks.0.mlp.up.bias: it has 1 dim, and dim 1 is not there.
  blocks.0.mlp.up.bias: f32[64]
  stated by "*.up.bias"
fix: dt.Row() splits 64""",
    )


def test_blocks_unit_or_sizes_that_do_not_divide_dim_error_proposes_value() -> None:
    assert_expected_inline(
        placed({"*.qkv.weight": dict(tp=Row(blocks=5))}),
        """\
tp=Shard(0, blocks=5) does not fit blocks.0.attn.qkv.weight: dim 0 of 48 is not 5 equal blocks.
  blocks.0.attn.qkv.weight: f32[48,16]
  stated by "*.qkv.weight"
fix: blocks=4, or the sizes of each""",
    )
    assert_expected_inline(
        placed({"*.qkv.weight": dict(tp=Row(blocks=(16, 16, 17)))}),
        """\
tp=Shard(0, blocks=(16, 16, 17)) does not fit blocks.0.attn.qkv.weight: blocks=(16, 16, 17) add up to 49, dim 0 of 48.
  blocks.0.attn.qkv.weight: f32[48,16]
  stated by "*.qkv.weight"
fix: blocks=(16, 16, 16)""",
    )
    assert_expected_inline(
        placed({"*.qkv.weight": dict(tp=Row(sizes=(40, 4)))}),
        """\
tp=Shard(0, sizes=(40, 4)) does not fit blocks.0.attn.qkv.weight: sizes=(40, 4) add up to 44, dim 0 of 48.
  blocks.0.attn.qkv.weight: f32[48,16]
  stated by "*.qkv.weight"
fix: sizes=(40, 8)""",
    )
    assert_expected_inline(
        placed({"*.qkv.weight": dict(tp=Column(sizes=(4, 4, 8)))}),
        """\
tp=Shard(-1, sizes=(4, 4, 8)) does not fit blocks.0.attn.qkv.weight: sizes=(4, 4, 8) has length 3, and the axis has 2 ranks.
  blocks.0.attn.qkv.weight: f32[48,16]
  stated by "*.qkv.weight"
fix: sizes=(4, 12)""",
    )
    assert_expected_inline(
        placed({"*.qkv.weight": dict(tp=Row(unit=5))}),
        """\
tp=Shard(0, unit=5) does not fit blocks.0.attn.qkv.weight: dim 0 of 48 is not a multiple of unit=5.
  blocks.0.attn.qkv.weight: f32[48,16]
  stated by "*.qkv.weight"
fix: unit=4""",
    )


def test_blocks_on_minor_axis_error_proposes_other_axis_order() -> None:
    assert_expected_inline(
        placed({"*.qkv.weight": dict(dp=Row(), tp=Row(blocks=3))}),
        """\
tp=Shard(0, blocks=3) of blocks.0.attn.qkv.weight would split the pieces that dp cuts, and its own blocks would be lost.
  blocks.0.attn.qkv.weight: f32[48,16]
  dp=Shard(0), tp=Shard(0, blocks=3), stated by "*.qkv.weight"
fix: name tp before dp, so that dp splits its blocks""",
    )


def test_invalid_placement_value_error_proposes_placement() -> None:
    assert_expected_inline(
        placed({"*.up.weight": dict(tp="row")}),
        """\
"*.up.weight" states tp='row' (str), which is not a placement.
fix: write tp=dt.Row()""",
    )
    assert_expected_inline(
        placed({"*.up.weight": dict(tp=Column)}),
        """\
"*.up.weight" states tp=Column without (), which is not a placement.
fix: write tp=dt.Column()""",
    )
    assert_expected_inline(
        placed({"*.up.weight": Row()}),
        """\
"*.up.weight" states Shard(0) (Shard), not placements by axis.
fix: write dict(tp=dt.Row())""",
    )
    assert_expected_inline(
        placed({"*.up.weight": dict(tp=Partial("sum"))}),
        """\
"*.up.weight" states tp=Partial("sum"), but only a computed value can be pending.
fix: write tp=dt.Replicate(), or tp=dt.Row() to split it""",
    )


def test_invalid_inputs_argument_error_names_arguments_and_fix() -> None:
    arguments = {"tokens": Meta((8, 16), torch.int64), "labels": Meta((8,), torch.int64)}
    assert_expected_inline(
        refused(input_pins, arguments, {"tokns": dict(dp=Row())}, MESH),
        """\
inputs names "tokns", which is no tensor argument that the program uses.
  tensor arguments: tokens: i64[8,16], labels: i64[8]
fix: write "tokens\"""",
    )
    assert input_pins(arguments, {"mask": dict(dp=Row())}, MESH, absent={"mask"}).pins == {}
    assert_expected_inline(
        refused(input_pins, arguments, dict(dp=Shard(1)), MESH),
        """\
dp=Shard(1) does not fit labels: it has 1 dim, and dim 1 is not there.
  labels: i64[8]
  stated by inputs
fix: dt.Row() splits 8""",
    )
    short = {"tokens": Meta((8, 3), torch.int64)}
    assert_expected_inline(
        refused(input_pins, short, dict(dp=Zigzag(1)), MESH),
        """\
dp=Zigzag(1) cuts dim 1 into 4 pieces, 2 for each of 2 ranks, but dim 1 has only 3 elements.
  tokens: i64[8,3]
  stated by inputs
fix: dp=dt.Shard(1), or at least 4 elements""",
    )
    assert_expected_inline(
        refused(input_pins, arguments, {"tokens": dict(dp=Row()), "dp": Row()}, MESH),
        """\
inputs mixes arguments with axes: tokens by name, dp not.
fix: state the placements of all arguments at once, or of each by name""",
    )


# -- stages ----------------------------------------------------------------------------------------


def staged(*lists: list[str], axis: str = "pp") -> str:
    return refused(resolve_stages, GPT(layers=2), MESH, {axis: list(lists)})


def test_invalid_stage_lists_error_names_stages_and_fix() -> None:
    assert_expected_inline(
        staged(["embed*", "blocks.0.*"], ["blocks.1.*", "head*"]),
        """\
3 names are in no stage.
  positions.weight: f32[16,16]
  norm.weight: f32[16]
  norm.bias: f32[16]
fix: add to the list of one stage a pattern for each, such as "positions.*\"""",
    )
    assert_expected_inline(
        staged(["embed*", "positions*", "blocks.*"], ["blocks.1.mlp.*", "norm*", "head*"]),
        """\
4 names are matched by more than one stage.
  blocks.1.mlp.up.weight: stage 0 ("blocks.*") and stage 1 ("blocks.1.mlp.*")
  blocks.1.mlp.up.bias: stage 0 ("blocks.*") and stage 1 ("blocks.1.mlp.*")
  blocks.1.mlp.down.weight: stage 0 ("blocks.*") and stage 1 ("blocks.1.mlp.*")
  blocks.1.mlp.down.bias: stage 0 ("blocks.*") and stage 1 ("blocks.1.mlp.*")
fix: narrow the patterns until each name is matched by one stage""",
    )
    assert_expected_inline(
        staged(["embed*", "positions*", "blocks.0.*"], ["block.1.*", "norm*"]),
        """\
the pattern "block.1.*" of stage 1 matches no parameter.
  nearest names: blocks.1.norm2.bias, blocks.1.norm1.bias, blocks.0.norm1.bias
fix: "blocks.1.*" matches 12 of 28 parameters and buffers""",
    )
    assert_expected_inline(
        staged(["*"]),
        """\
the number of stages is no multiple of the axis pp.
  stages: 1; mesh(pp=2, dp=2, tp=2): pp=2
fix: state 2 stages, or Mesh(pp=1)""",
    )
    assert_expected_inline(
        staged(["*"], []),
        """\
stage 1 of 2 has no patterns, so nothing would run there.
fix: state its parameters, or remove the empty list""",
    )
    assert_expected_inline(
        staged(["embed*"], ["head*"], axis="pipe"),
        """\
stages names the axis "pipe", which is not in the mesh.
  mesh(pp=2, dp=2, tp=2), axes: pp, dp, tp
fix: write "pp\"""",
    )
    assert_expected_inline(
        refused(resolve_stages, GPT(), MESH, {"pp": ["embed*", "head*"]}),
        """\
stages has patterns where it should have one list of patterns for each stage.
  pp: ['embed*', 'head*']
fix: write {"pp": [["embed*"], ["head*"]]}, one inner list for each stage""",
    )
