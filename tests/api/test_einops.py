"""Attention written with einops can be captured, split by heads and run eagerly; errors name its
line.

A `rearrange` is a reshape, a permutation and a reshape. As with views, a fused projection "(three h
d)" is split with ``blocks=3`` and whole heads with ``unit=``.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.extras import missing

pytest.importorskip("einops", reason=missing("einops"))

from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange

import dtensor as dt
from tests.api.eager import MESHES, gradients, placements, same
from tests.frontend.eager import check
from tests.plans import kinds
from tests.training import assert_gradients_close

TP2, TP4 = dt.Mesh(tp=2), dt.Mesh(tp=4)
FUSED = "b t (three h d) -> three b h t d"


class Fused(nn.Module):
    """x [b t 24]: six heads of size 4; one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), FUSED, three=3, h=6)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(rearrange(y, "b h t d -> b t (h d)"))


class Grouped(nn.Module):
    """x [b t 24]: six query heads share three KV heads; attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(24, 24), nn.Linear(24, 12)
        self.k = nn.Linear(24, 12, bias=False)  # a bias of keys would have no gradient
        self.proj = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(x), "b t (g n d) -> b g n t d", g=3, d=4)
        k, v = (rearrange(f(x), "b t (g d) -> b g t d", d=4) for f in (self.k, self.v))
        scores = einsum(q, k, "b g n t d, b g s d -> b g n t s")
        y = einsum(scores.softmax(-1), v, "b g n t s, b g s d -> b g n t d")
        return self.proj(rearrange(y, "b g n t d -> b t (g n d)"))


class Patches(nn.Module):
    """Images [b c H W] divided into patches by einops layers, mixed and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2), nn.Linear(12, 16)
        )
        self.mix = EinMix("b n (h i) -> b n (h o)", weight_shape="h i o", h=2, i=8, o=3)

    def forward(self, x: Tensor) -> Tensor:
        return reduce(self.mix(self.cut(x)), "b n c -> b c", "mean")


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def an_input(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


MODELS: dict[type[nn.Module], tuple[int, ...]] = {
    Fused: (2, 5, 24),
    Grouped: (2, 5, 24),
    Patches: (2, 3, 4, 6),
}


@pytest.mark.default("Fused")
@pytest.mark.parametrize("kind", MODELS)
def test_einops_attention_forward_and_backward_are_captured(kind: type[nn.Module]) -> None:
    check(squared, (kind(), an_input(*MODELS[kind])), grads="loss")
    check(kind(), (an_input(*MODELS[kind]).requires_grad_(),), grads="tangents")


# -- split by heads --------------------------------------------------------------------------------

MEGATRON: dict[type[nn.Module], dict[str, Any]] = {
    Fused: {"qkv": dict(tp=dt.ColumnParallel(blocks=3)), "proj": dict(tp=dt.RowParallel())},
    Grouped: {
        "q.weight": dict(tp=dt.Row(unit=8)),
        "[kv].weight": dict(tp=dt.Row(unit=4)),
        "proj.weight": dict(tp=dt.Column(unit=8)),
    },
}


@pytest.mark.parametrize("mesh", [TP2, dt.Mesh(tp=3)], ids=str)
@pytest.mark.parametrize("kind", MEGATRON)
def test_einops_attention_split_by_heads_matches_torch_gradients(
    kind: type[nn.Module], mesh: dt.Mesh
) -> None:
    torch.manual_seed(0)
    model, x = kind(), an_input(*MODELS[kind])
    opt = torch.optim.AdamW(model.parameters())
    step = dt.train_step(dt.parallelize(model, mesh, MEGATRON[kind]), squared, opt)
    assert kinds(step.plan(x)) == Counter({"all_reduce@tp": 1})  # Megatron's; x wants no gradient
    found = step.gradients(x)
    squared(model, x).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_gradients_close(found, wanted)


# -- pins that do not line up ----------------------------------------------------------------------


def refused(model: nn.Module, mesh: dt.Mesh, pins: dict[str, Any]) -> str:
    placed = dt.parallelize(model, mesh, pins, misaligned="error")
    with pytest.raises(dt.PlanningError) as caught:
        dt.compile(lambda model, x: model(x), mesh).plan(placed, an_input(2, 5, 24))
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def test_placement_across_fused_einops_projection_is_refused_proposing_blocks() -> None:
    assert_expected_inline(
        refused(Fused(), TP2, {"qkv.weight": dict(tp=dt.Row())}),
        """\
the pin tp=Shard(0) on qkv.weight does not line up with the program's use of that dim.
  qkv.weight: f32[72,24], dim 0: 2 ranks hold 36, 36 of 72
  aten.reshape.default sees it as 3 x 6 x 4 in add: f32[10,72]
  test_einops.py:N: q, k, v = rearrange(self.qkv(x), FUSED, three=3, h=6)
fix: tp=Shard(0, blocks=3), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )


# -- eager -----------------------------------------------------------------------------------------

OPS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "heads": (lambda x: rearrange(x, "b t (h d) -> b h t d", h=2), (3, 4, 6)),
    "repeat": (lambda x: repeat(x, "t d -> t r d", r=2), (3, 4)),
    "einsum": (lambda x: einsum(x, x, "b t d, b s d -> b t s"), (2, 3, 4)),
    "pack": (lambda x: unpack(*pack([x, x[..., 0]], "t *"), "t *")[0], (3, 4, 2)),
}


@pytest.mark.parametrize("mesh", MESHES[:1] + MESHES[2:], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_eager_einops_match_torch(name: str, mesh: dt.Mesh) -> None:
    fn, shape = OPS[name]
    x = torch.randn(shape, dtype=torch.float64)
    with dt.implicit_redistribution("allow"):
        for choice in placements(mesh, len(shape), pending=len(mesh.axes) == 1)[::3]:
            same(fn(dt.distribute(x, mesh, **choice)), fn(x))


def test_eager_einops_attention_sends_nothing_and_matches_torch_gradients() -> None:
    def attention(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = rearrange(F.linear(x, w), FUSED, three=3, h=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return rearrange(y, "b h t d -> b t (h d)")

    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(18, 6, dtype=torch.float64, requires_grad=True)
    rows = dt.distribute(w, TP2, tp=dt.Row(blocks=3))
    with dt.implicit_redistribution("error"):  # heads are split by themselves, and nothing is sent
        out = attention(dt.distribute(x, TP2), rows)
    assert str(out.spec) == "f64[2,3,6@tp]"
    with dt.implicit_redistribution("allow"):
        same(gradients(attention, (dt.distribute(x, TP2), rows)), gradients(attention, (x, w)))
