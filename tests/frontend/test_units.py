"""Tests that the units of a program are the modules that compute with parameters, in program
order.
"""

from __future__ import annotations

from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.dataflow.units import Units, units_of
from tests.models import GPT, batch, loss_fn

TIED = {"embed.weight": ("embed.weight", "head.weight")}


def units(model: nn.Module, *given: Tensor, aliases: dict[str, tuple[str, ...]]) -> Units:
    graph = capture(loss_fn, (model, *given), grads="loss")
    return units_of(dataflow(graph), aliases)


def test_gpt_has_one_unit_per_module_with_parameters() -> None:
    found = units(GPT(layers=1), *batch(), aliases=TIED)
    assert [unit.owner for unit in found.units] == [
        *("embed", "positions", "blocks.0.norm1", "blocks.0.attn.qkv", "blocks.0.attn.proj"),
        *("blocks.0.norm2", "blocks.0.mlp.up", "blocks.0.mlp.down", "norm", "head"),
    ]
    assert found.units[3].names == ("blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias")
    # tied: one parameter with a name in each of its two modules
    assert found.units[9].names == ("head.weight",) and found.units[9].labels == ("embed.weight",)
    assert found.of_label()["embed.weight"] == (0, 9) and not found.reused
    stages = {op.module: op.stage for op in found.flow.ops if op.phase == "forward"}
    assert stages["blocks.0.mlp.up"] == 6 and stages["head"] == 9
    assert all(op.stage == 9 for op in found.flow.ops if op.call.name == "dt.cross_entropy.default")


def test_tied_head_without_alias_is_reported_as_reuse_of_embedding() -> None:
    """Without its alias, the tied head is a second use of the embedding's weight."""
    found = units(GPT(layers=1), *batch(), aliases={})
    assert found.reused == ((0, 9),)
