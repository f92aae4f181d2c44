"""Tests sources, modules, phases, sequence numbers and names of the nodes of a captured graph,
and the graph's text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from dtensor.frontend.annotate import annotate
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph
from dtensor.frontend.source import Source
from dtensor.sharding.spec.placements import Replicate, Shard
from tests.models import GPT, MLP, Llama, batch, loss_fn


def gpt_graph() -> Graph:
    tokens, targets = batch()
    return capture(loss_fn, (GPT(layers=2), tokens, targets), grads="loss")


def by_target(graph: Graph, name: str) -> list[fx.Node]:
    return [n for n in graph.nodes if str(n.target) == name]


def test_graph_text_of_mlp_shows_names_types_modules_and_gradients() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error = model(x) - y
        return error.pow(2).mean()

    x = torch.randn(2, 16)
    text = str(capture(loss, (MLP(bias=False), x, x), grads="loss"))
    lines = [line.rsplit(".py:", 1)[0] for line in text.splitlines()]  # lines move with this file
    assert_expected_inline(
        "\n".join(lines),
        """\
up_weight: Param                               f32[64,16]
down_weight: Param                             f32[16,64]
x: Arg                                         f32[2,16]
y: Arg                                         f32[2,16]

forward
  permute = permute(up_weight, [1, 0])         f32[16,64]  models
  h = mm(x, permute)                           f32[2,64]   models
  a = gelu(h)                                  f32[2,64]   models
  permute_1 = permute(down_weight, [1, 0])     f32[64,16]  models
  mm = mm(a, permute_1)                        f32[2,16]   models
  error = sub(mm, y)                           f32[2,16]   test_names
  pow_1 = pow(error, 2)                        f32[2,16]   test_names
  mean = mean(pow_1)                           f32[]       test_names

backward
  full = full([], 1.0, dtype=f32, device=cpu)  f32[]
  expand = expand(full, [2, 16])               f32[2,16]   test_names
  div = div(expand, 32)                        f32[2,16]   test_names
  mul = mul(error, 2.0)                        f32[2,16]   test_names
  mul_1 = mul(div, mul)                        f32[2,16]   test_names
  permute_2 = permute(mul_1, [1, 0])           f32[16,2]   models
  grad_down_weight = mm(permute_2, a)          f32[16,64]  models
  mm_1 = mm(mul_1, down_weight)                f32[2,64]   models
  gelu_backward = gelu_backward(mm_1, h)       f32[2,64]   models
  permute_3 = permute(gelu_backward, [1, 0])   f32[64,2]   models
  grad_up_weight = mm(permute_3, x)            f32[64,16]  models

return
  result 0 = mean
  grad up.weight = grad_up_weight
  grad down.weight = grad_down_weight""",
    )


@pytest.mark.slow
def test_every_op_has_source_line_and_module() -> None:
    graph = gpt_graph()
    without = [n.name for n in graph.nodes if n.meta["source"] is None]
    assert without == ["full"]  # the loss's cotangent, 1
    (first, second) = by_target(graph, "dt.attention.default")
    assert (first.meta["module"], second.meta["module"]) == ("blocks.0.attn", "blocks.1.attn")
    source = first.meta["source"]
    assert isinstance(source, Source)
    assert source.text == "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    assert (source.function, str(source).split(":")[0]) == ("forward", "models.py")
    assert by_target(graph, "dt.ce_loss.default")[0].meta["source"].function == "loss_fn"
    assert by_target(graph, "aten.gelu.default")[1].meta["module"] == "blocks.1.mlp"


def test_backward_op_has_source_module_and_sequence_number_of_forward_op() -> None:
    graph = gpt_graph()
    forward = by_target(graph, "dt.attention.default")
    backward = by_target(graph, "dt.attention_backward.default")
    for f, b in zip(forward, reversed(backward), strict=True):
        assert (f.meta["phase"], b.meta["phase"]) == ("forward", "backward")
        assert f.meta["seq"] is not None
        for key in ("source", "module", "seq"):
            assert f.meta[key] == b.meta[key]
    grads = by_target(graph, "dt.ce_backward.default")
    assert grads[0].meta["source"] == by_target(graph, "dt.ce_stats.default")[0].meta["source"]


def test_ops_in_functions_called_by_forward_have_lines_of_those_functions() -> None:
    tokens, targets = batch()
    graph = capture(loss_fn, (Llama(layers=1), tokens, targets), grads="loss")
    lines = {n.meta["source"].text for n in by_target(graph, "aten.cat.default")}
    assert "angle = torch.cat((angle, angle), dim=-1)" in lines
    lines = {n.meta["source"].text for n in by_target(graph, "dt.rope.default")}
    assert lines == {"return x * cos + turned * sin"}
    assert {"cos", "sin", "angle"} <= {n.name for n in graph.nodes}


def test_node_names_follow_variable_assignments() -> None:
    graph = gpt_graph()
    named = {n.name: n for n in graph.nodes}
    assert str(named["at"].target) == "aten.arange.default"
    assert str(named["q"].target) == "<built-in function getitem>"
    assert str(named["q_1"].target) == "aten.permute.default"
    assert named["y"].args[1] == 0  # the attention's output, not its log-sum-exp
    assert str(named["loss"].target) == "aten.div.Tensor"
    assert str(named["h"].target) == "aten.reshape.default"
    assert str(named["h_1"].meta["module"]) == "blocks.1.mlp.up"
    assert "grad_blocks_0_mlp_up_weight" in named
    names = [n.name for n in graph.placeholders]
    assert "blocks_0_attn_qkv_weight" in names and "tokens" in names


def test_forward_ops_precede_backward_ops_and_views_are_simplified_away() -> None:
    graph = gpt_graph()
    phases = [n.meta["phase"] for n in graph.nodes]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    erased = {"aten.detach.default", "aten.t.default", "aten.view.default", "aten.addmm.default",
              "aten.clone.default", "dt.cross_entropy_rows.default"}  # fmt: skip
    assert not erased & {str(n.target) for n in graph.nodes}
    counts = Counter(str(n.target) for n in graph.nodes)
    assert {k: v for k, v in counts.items() if k.startswith("dt.ce_")} == {
        "dt.ce_stats.default": 1,
        "dt.ce_loss.default": 1, "dt.ce_count.default": 1, "dt.ce_backward.default": 1,
    }  # fmt: skip


def test_annotations_appear_in_forward_and_backward_graph() -> None:
    class Marked(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = annotate(self.up(x), "b f@tp")
            return annotate(self.down(h), dp=Shard(0), tp=Replicate())

    graph = capture(Marked(), (torch.randn(2, 16),), grads="tangents")
    texts = [n.args[1] for n in by_target(graph, "dt.annotate.default")]
    assert texts == ["b f@tp", "dp=Shard(0), tp=Replicate()"]
    assert len(by_target(graph, "dt.annotate_backward.default")) == 2


def test_annotate_outside_capture_returns_its_input() -> None:
    x: Any = torch.randn(2)
    assert annotate(x, "b@dp") is x
    assert annotate(x, tp=1) is x


def test_annotate_refuses_text_together_with_placements() -> None:
    with pytest.raises(TypeError, match="either a text or placements by axis"):
        capture(lambda x: annotate(x, "b@dp", dp=1), (torch.randn(2),), grads="none")


def test_variable_named_output_does_not_clash_with_fx_output_node() -> None:
    """torch.fx calls the last node of a graph "output"; Gemma's norms assign a variable of that
    name."""

    def doubled(x: Tensor) -> Tensor:
        output = x * 2
        return output.sin()

    graph = capture(doubled, (torch.randn(2),), grads="none")
    assert [n.name for n in graph.fx.nodes] == ["x", "output_1", "sin", "output"]
