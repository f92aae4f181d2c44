"""Tests which factors the pins open for splitting over an axis, and which stay unsplit.

reached(GPT layer, Megatron's pins)    opens the ffn factor and the heads, not the residual stream
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from dtensor.errors import PlanningError
from dtensor.frontend.annotate import annotate
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.sharding.plan.choose.opened_factors import Pin, Reach, reach
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.planner import rules_of
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement, Shard
from tests.models import MLP, Block, CausalSelfAttention, GroupedAttention
from tests.plans import MEGATRON, MLP_PINS, kinds, mean_square, plan_model

B, T, D = 4, 8, 16


def an_input() -> Tensor:
    return torch.randn(B, T, D, requires_grad=True)


def flow_of(model: nn.Module, *args: Tensor) -> Dataflow:
    return dataflow(capture(model, args, grads="none"))


def reached(
    flow: Dataflow, stated: Mapping[str, Placement], num: int = 2, **options: bool
) -> Reach:
    """Return the factors that pins open on a tp axis. ``stated``: pins by label of an input."""
    names = {i.label: i.name for i in flow.inputs}
    labels = {i.name: i.label for i in flow.inputs}
    metas = flow.metas
    pins = [
        Pin(value=names[label], placement=p, by=label, opens=len(metas[names[label]].shape) > 1)
        for label, p in stated.items()
    ]
    return reach(
        flow, rules_of(flow), pins, "tp", num, labels=labels, misaligned="error", **options
    )


def split_values(found: Reach) -> set[str]:
    return {value for value, shardings in found.shardings.items() if shardings}


# -- what opens ------------------------------------------------------------------------------------


def test_pin_of_fused_qkv_with_blocks_opens_head_factor() -> None:
    """q, k and v are split together, each into its own heads."""
    flow = flow_of(CausalSelfAttention(D, 4, bias=True), an_input())
    found = reached(flow, {"qkv.weight": Shard(0, blocks=3)})
    (opened,) = found.opened
    assert set(opened.values) == {"qkv.bias", "proj.weight"}
    shardings = {i.label: found.shardings.get(i.name, ()) for i in flow.inputs}
    assert shardings["qkv.bias"] == (Shard(0, blocks=3),)
    assert shardings["proj.weight"] == (Shard(1),)
    sizes = {flow.metas[v].shape[s.dim] for v, ss in found.shardings.items() for s in ss}
    assert sizes == {3 * D, D, 4}  # qkv; q, k or v, or all heads; heads


def test_pin_of_kv_heads_opens_query_heads_of_same_group() -> None:
    cos = sin = torch.ones(T, 4)
    model = GroupedAttention(D, 4, 2, "enable_gqa")
    found = reached(flow_of(model, an_input(), cos, sin), {"k.weight": Shard(0)})
    assert {"q.weight", "v.weight", "o.weight"} <= set(found.opened[0].values)


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, D), nn.Linear(D, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.softmax(self.head(self.embed(tokens)), -1)


def test_vocabulary_factor_stops_at_embedding_and_softmax() -> None:
    tokens = torch.zeros(B, T, dtype=torch.long)
    flow = flow_of(Vocabulary(), tokens)
    embedding = reached(flow, {"embed.weight": Shard(0)})
    assert embedding.opened[0].reached == ("embed_weight",)
    pending = [s.kind for s in embedding.strategies["embedding"]]
    assert len(pending) == 2  # replicate, or split the rows
    head = reached(flow, {"head.weight": Shard(0)})
    softmax = next(op for op in flow.ops if "softmax" in op.call.name)
    assert [s.kind for s in head.strategies[softmax.name]] == ["replicate"]


def test_free_search_opens_all_factors_and_no_pins_open_none() -> None:
    found = reached(flow_of(MLP(D), an_input()), {}, free=True)
    assert found.opened == ()
    assert {"up_weight", "down_weight", "up_bias", "down_bias"} <= split_values(found)
    plan = plan_model(MLP(D), mean_square, (an_input(),), Mesh(tp=2), {})
    assert not plan.collectives
    assert all(i.spec.placement("tp") == REPLICATE for i in plan.inputs)


# -- what does not ------------------------------------------------------------------------------


def test_bias_pin_opens_no_factor_and_is_kept() -> None:
    flow = flow_of(MLP(D), an_input())
    found = reached(flow, {"up.bias": Shard(0)})
    assert found.opened == () and split_values(found) == set()
    pins = {"up.bias": dict(tp=Shard(0))}
    plan = plan_model(MLP(D), mean_square, (an_input(),), Mesh(tp=2), pins)
    assert dict(plan.opened)["tp"] == ()
    specs = {i.label: str(i.spec) for i in plan.inputs}
    assert specs["up.bias"] == "f32[64@tp]" and specs["up.weight"] == "f32[64,16]"


# -- annotations ---------------------------------------------------------------------------------


class Sequence(Block):
    """Korthikanti et al. 2022: norms and the residual stream work on parts of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        x = annotate(x, "b t@tp d")
        x = annotate(x + self.attn(self.norm1(x)), "b t@tp d")
        return annotate(x + self.mlp(self.norm2(x)), "b t@tp d")


class Norms(Block):
    """Like Sequence, but with only the results of the norms annotated."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(annotate(self.norm1(x), "b t@tp d"))
        return x + self.mlp(annotate(self.norm2(x), "b t@tp d"))


@pytest.mark.default("1-Sequence")
@pytest.mark.parametrize("block", [Sequence, Norms])
@pytest.mark.parametrize("layers", [1, 3])
def test_long_sequence_plan_is_megatron_sequence_parallel(block: type[Block], layers: int) -> None:
    """Each layer has two gathers and two scatters, forward and backward, and no all_reduce of
    activations."""
    model = nn.Sequential(*(block(D, 4, True) for _ in range(layers)))
    x = torch.randn(8, 8192, D)  # 4 MiB: bytes cost more than exchanges
    plan = plan_model(model, mean_square, (x,), Mesh(tp=2), MEGATRON)
    expected = {"all_gather@tp": 2 * layers, "reduce_scatter@tp": 2 * layers}
    assert kinds(plan, "forward") == expected
    assert kinds(plan, "backward") == expected


# -- pins that do not line up ------------------------------------------------------------------


def test_pin_of_fused_qkv_without_blocks_is_refused_with_fix() -> None:
    flow = flow_of(CausalSelfAttention(D, 4, bias=True), an_input())
    with pytest.raises(PlanningError, match="fix: tp=Shard.0, blocks=3.") as caught:
        reached(flow, {"qkv.weight": Shard(0)})
    assert "does not line up" in str(caught.value)
    reached(flow, {"qkv.weight": Shard(0, blocks=3)})  # the proposed fix is accepted


def test_more_ranks_than_kv_heads_is_refused_with_smaller_axis_as_fix() -> None:
    cos = sin = torch.ones(T, 4)
    flow = flow_of(GroupedAttention(D, 4, 2, "enable_gqa"), an_input(), cos, sin)
    with pytest.raises(PlanningError, match=r"Mesh\(tp=2, tp_rep=2\)"):
        reached(flow, {"k.weight": Shard(0)}, num=4)
    reached(flow, {"k.weight": Shard(0)}, num=2)


def test_error_for_uneven_parts_of_flattened_weight_proposes_no_blocks() -> None:
    """The weight is split after its rows and columns were flattened to one dim, so no blocks of
    the rows help."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.split(self.weight.reshape(12) * x, [1, 11])[1].exp()

    with pytest.raises(PlanningError, match=r"2 parts of 1, 11.*\n.*\n.*\nfix: tp=Replicate"):
        reached(flow_of(Shifted(), torch.randn(12)), {"weight": Shard(0)})


def test_misaligned_input_split_is_gathered_instead_of_refused() -> None:
    """An input, unlike a parameter, may be split anyhow: here weights are cheaper to move."""
    plan = plan_model(
        MLP(D),
        mean_square,
        (torch.randn(3, 64, D),),
        Mesh(tp=2),
        MLP_PINS,
        inputs=dict(tp=Shard(0)),
    )
    assert kinds(plan, "forward")["all_gather@tp"] == 2
