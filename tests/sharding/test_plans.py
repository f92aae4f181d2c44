"""Tests that plans are the known ones: Megatron's plan for Megatron's pins.

Counts collectives and compares their bytes with closed forms: for N bytes over w ranks, each rank
sends 2(w-1)/w N in an all_reduce. Shoeybi et al. 2019, arXiv:1909.08053, sections 3 and 5.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.frontend.annotate import annotate
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Redistribute, Transfer
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from tests.models import (
    GPT,
    MLP,
    Block,
    CausalSelfAttention,
    DropoutGPT,
    Llama,
    SwiGLU,
    batch,
    loss_fn,
)
from tests.plans import (
    ATTENTION_PINS,
    LLAMA,
    MEGATRON,
    MLP_PINS,
    VOCABULARY,
    Stated,
    kinds,
    mean_square,
    plan_model,
)
from tests.training import TWO_STAGES

B, T, D, V = 4, 8, 16, 32  # of tests.models
ACTIVATION = B * T * D * 4  # bytes
both_sizes = pytest.mark.parametrize("ranks", [2, 4])


def ring(num_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all_reduce of num_bytes, rounded up."""
    return -(-2 * (ranks - 1) * num_bytes // ranks)


def sent(plan: Plan, phase: str, key: str) -> list[int]:
    return [c.bytes_sent for c in plan.collectives if (c.phase, c.key) == (phase, key)]


def an_input() -> Tensor:
    return torch.randn(B, T, D, requires_grad=True)


# -- tensor parallel -------------------------------------------------------------------------------


@both_sizes
@pytest.mark.parametrize("which", ["mlp", "attention", "swiglu", "block"])
def test_megatron_layer_has_one_all_reduce_forward_and_one_backward(which: str, ranks: int) -> None:
    model, pins, layers = {
        "mlp": (MLP(D), MLP_PINS, 1),
        "attention": (CausalSelfAttention(D, 4, True), ATTENTION_PINS, 1),
        "swiglu": (SwiGLU(D), {"gate.weight": dict(tp=Shard(0)), **MLP_PINS}, 1),
        "block": (Block(D, 4, True), MEGATRON, 2),
    }[which]
    plan = plan_model(model, mean_square, (an_input(),), Mesh(tp=ranks), pins, train=False)
    assert sent(plan, "forward", "all_reduce@tp") == [ring(ACTIVATION, ranks)] * layers
    assert sent(plan, "backward", "all_reduce@tp") == [ring(ACTIVATION, ranks)] * layers
    assert len(plan.collectives) == 2 * layers


@pytest.mark.default("model0-pins0-1")
@pytest.mark.parametrize(
    ("model", "pins", "layers"),
    [
        (GPT(layers=1), MEGATRON, 1),
        (GPT(layers=3, tied=False), MEGATRON, 3),
        (Llama(layers=2), LLAMA, 2),
        (Llama(layers=2, norm="torch", spread="repeat"), LLAMA, 2),
    ],
)
def test_megatron_gpt_has_same_collectives_per_layer_and_none_for_gradients(
    model: nn.Module, pins: dict[str, Stated], layers: int
) -> None:
    plan = plan_model(model, loss_fn, batch(), Mesh(tp=2), pins)
    assert kinds(plan, "forward") == {"all_reduce@tp": 2 * layers}
    assert kinds(plan, "backward") == {"all_reduce@tp": 2 * layers}
    assert kinds(plan, "optimizer") == {}


@both_sizes
@pytest.mark.parametrize("tied", [True, False])
def test_sharded_vocabulary_reduces_embedding_and_loss_statistics(tied: bool, ranks: int) -> None:
    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(model, tokens, targets)[0]

    model = GPT(layers=0, tied=tied)
    pins = VOCABULARY if not tied else {"embed.weight": dict(tp=Shard(0))}
    plan = plan_model(model, loss, batch(), Mesh(tp=ranks), pins)
    one_per_token = B * T * 4
    embedding, *losses = sent(plan, "forward", "all_reduce@tp")
    assert embedding == ring(ACTIVATION, ranks)
    assert losses == [ring(3 * one_per_token, ranks)]
    assert sent(plan, "backward", "all_reduce@tp") == [ring(ACTIVATION, ranks)]  # the head
    assert len(plan.collectives) == 3


def test_norm_gradients_of_sharded_sequence_are_reduced_in_bucket() -> None:
    """Korthikanti et al. 2022, arXiv:2205.05198: the gradients of a norm are sums over a part of
    the sequence."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(D), MLP(D)

        def forward(self, x: Tensor) -> Tensor:
            x = annotate(x, "b t@tp d")
            return annotate(x + self.mlp(self.norm(x)), "b t@tp d")

    plan = plan_model(Split(), mean_square, (torch.randn(B, T, D),), Mesh(tp=2), MLP_PINS)
    waiting = {n for s in plan.steps if isinstance(s, Redistribute) and s.bucket for n in s.of}
    assert {"norm.weight", "norm.bias"} <= waiting


# -- data parallel ---------------------------------------------------------------------------------


@pytest.mark.default("2-2")
@both_sizes
@pytest.mark.parametrize("microbatches", [1, 2])
def test_data_parallel_gradients_are_each_reduced_once_in_buckets(
    ranks: int, microbatches: int
) -> None:
    tokens, targets = batch(size=8)
    model = GPT(layers=1)
    plan = plan_model(
        model, loss_fn, (tokens, targets), Mesh(dp=ranks), {},
        inputs=dict(dp=Shard(0)), microbatches=microbatches,
    )  # fmt: skip
    reduced = Counter(
        name for s in plan.steps if isinstance(s, Redistribute) and s.bucket for name in s.of
    )
    assert reduced == Counter(name for name, _ in model.named_parameters())
    buckets = [c for c in plan.collectives if c.name.startswith("gradients")]
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert [c.bytes_sent for c in buckets] == [ring(num_bytes, ranks)]  # all fit in one
    assert {c.times for c in buckets} == {1}
    others = [c for c in plan.collectives if c not in buckets]  # loss, accuracy, count of targets
    assert max(c.bytes_sent for c in others) <= ring(4, ranks)
    assert kinds(plan, "backward") == {}


# -- attention that the user's code writes out, over a split sequence ------------------------------


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of causal attention."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf"))


def by_softmax(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return F.dropout(scores_of(q, k).softmax(-1), p) @ v


def by_log_softmax(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return F.dropout(scores_of(q, k).log_softmax(-1).exp(), p) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    scores = torch.cat([scores_of(q, k), torch.zeros_like(q[..., :1])], -1)
    return F.dropout(scores.softmax(-1)[..., :-1], p) @ v


def unmasked(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), p) @ v


def of_grouped_heads(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    k, v = (x[:, ::2].repeat_interleave(2, 1) for x in (k, v))
    return torch.einsum("bhts,bhse->bhte", F.dropout(scores_of(q, k).softmax(-1), p), v)


WRITTEN_OUT = (by_softmax, by_log_softmax, with_sink, unmasked, of_grouped_heads)


@pytest.mark.default(*(f"{attend.__name__}-2" for attend in WRITTEN_OUT))
@both_sizes
@pytest.mark.parametrize("attend", WRITTEN_OUT, ids=lambda attend: attend.__name__)
def test_written_out_attention_gathers_keys_and_values_but_no_scores(
    attend: Any, ranks: int
) -> None:
    """Queries stay split; the gradients of keys and values are reduce-scattered. A head is narrower
    than a rank's part of the sequence, else scores would have fewer bytes than keys."""
    length = 13
    plan = plan_model(
        DropoutGPT(heads=8, attend=attend), loss_fn, batch(length=length), Mesh(cp=ranks), {},
        inputs=dict(cp=Shard(1)),
    )  # fmt: skip
    moved = [m for s in plan.steps if s.in_microbatch and s.sends for m in s.moves]
    assert [str(m) for m in moved if sum(n in (length, length + 1) for n in m.src.shape) > 1] == []
    assert set(kinds(plan)) == {"all_gather@cp", "reduce_scatter@cp", "all_reduce@cp"}


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.default("True")
@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_sends_each_value_once_per_stage_boundary_and_direction(tied: bool) -> None:
    plan = plan_model(
        GPT(layers=2, tied=tied), loss_fn, batch(), Mesh(pp=2, tp=2), MEGATRON,
        stages=TWO_STAGES, microbatches=2,
    )  # fmt: skip
    moved = [s for s in plan.steps if isinstance(s, Transfer)]
    assert [(s.stage, s.phase) for s in moved] == [(0, "forward"), (1, "backward")]
    assert [s.spec.max_local_nbytes for s in moved] == [ACTIVATION // 2] * 2
    assert sum(isinstance(s, Redistribute) and bool(s.tied) for s in plan.steps) == tied
    for stage in (0, 1):
        assert kinds(plan, "forward", stage)["all_reduce@tp"] == 2
        assert kinds(plan, "backward", stage)["all_reduce@tp"] == 2


class Skip(nn.Module):
    """Three stages: both later stages read the value of the first, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        k = torch.relu(self.b(h))
        return self.c(k * h) + h


def test_skip_connection_sends_value_once_to_each_stage_and_no_view_of_it() -> None:
    stages = {"pp": [["a.*"], ["b.*"], ["c.*"]]}
    x = torch.randn(2, 4, 16)
    plan = plan_model(Skip(), mean_square, (x,), Mesh(pp=3), {}, stages=stages, microbatches=2)
    moved = [s for s in plan.steps if isinstance(s, Transfer)]
    assert len({(s.operand, s.stage, s.to_stage) for s in moved}) == len(moved)
    crossing = [s for s in moved if s.phase == "forward"]
    ways = [(s.operand, s.stage, s.to_stage) for s in crossing]
    assert len(ways) == 3  # h to both, k * h to the last
    assert len({s.operand for s in crossing}) == 2
