"""`dt.placements.for_model` on models that dtensor does not know: which placements it derives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, MLP
from tests.plans import kinds
from tests.training import assert_gradients_close


class Interleaved(nn.Module):
    """Transposed plain parameters; heads as the outer dim of fused q, k, v; attention written out;
    fused gate and up projections; two parallel branches, normalized last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 24) * 0.3)
        self.mixed = nn.Parameter(torch.randn(24, 72) * 0.2)
        self.out = nn.Parameter(torch.randn(24, 24) * 0.2)
        self.gated = nn.Parameter(torch.randn(24, 64) * 0.2)
        self.gated_bias = nn.Parameter(torch.randn(64) * 0.2)
        self.back = nn.Parameter(torch.randn(32, 24) * 0.2)
        self.norm = nn.LayerNorm(24)
        self.slopes = nn.Parameter(torch.randn(6))
        self.words = nn.Linear(24, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        b, t, _ = x.shape
        q, k, v = (x @ self.mixed).view(b, t, 6, 12).split(4, -1)
        far = torch.arange(t)[:, None] - torch.arange(t)
        scores = (
            torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 - far.abs() * self.slopes[:, None, None]
        )
        scores = scores.masked_fill(far < 0, float("-inf"))
        heads = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        gate, up = (x @ self.gated + self.gated_bias).chunk(2, -1)
        x = x + heads.reshape(b, t, 24) @ self.out + (torch.tanh(gate) * up) @ self.back
        return self.words(self.norm(x))


class Mixer(nn.Module):
    """An MLP over time, an MLP over channels with a norm inside, then attention in which all query
    heads share one key; few classes."""

    def __init__(self) -> None:
        super().__init__()
        self.time_up, self.time_down = nn.Linear(8, 20), nn.Linear(20, 8)
        self.widen, self.inner_norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.narrow = nn.Linear(32, 16)
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 4)
        self.key = nn.Linear(16, 4, bias=False)  # a bias of keys would have no gradient
        self.join = nn.Linear(16, 16)
        self.classes = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        x = x + self.time_down(F.relu(self.time_up(x.transpose(1, 2)))).transpose(1, 2)
        x = x + self.narrow(self.inner_norm(F.silu(self.widen(x))))
        q = self.query(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.key(x).unsqueeze(1), self.value(x).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.classes((x + self.join(y.transpose(1, 2).reshape(b, t, 16))).mean(1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


DATA: dict[type[nn.Module], Any] = {
    Interleaved: (torch.randint(40, (4, 10)), torch.randint(40, (4, 10))),
    Mixer: (torch.randn(4, 8, 16), torch.randint(3, (4,))),
}


def derived(kind: type[nn.Module], size: int | None) -> dt.placements.Placements:
    return dt.placements.for_model(build(kind), DATA[kind][:1], size=size)


def test_for_model_splits_fused_heads_outside_their_projections() -> None:
    assert_expected_inline(
        str(derived(Interleaved, 4)),
        """\
{
    # vocabulary: rows of other ranks give zeros, and one sum joins them
    "table": dict(tp=dt.Row()),
    # column: 6 heads, 12 wide, each attended alone
    "mixed": dict(tp=dt.Column(blocks=(48, 24), unit=12)),
    # row: it contracts the dim that mixed splits
    "out": dict(tp=dt.Row(blocks=(16, 8), unit=4)),
    # column: elementwise ops lead to back; 2 projections in one
    "gated": dict(tp=dt.Column(blocks=2)),
    # row: it contracts the dim that gated splits
    "back": dict(tp=dt.Row()),
    # vocabulary: the loss is computed on its parts
    "words.weight": dict(tp=dt.Row()),
}""",
    )


@pytest.mark.slow
def test_for_model_replicates_weights_it_cannot_split_and_says_why() -> None:
    assert_expected_inline(
        str(derived(Mixer, 2)),
        """\
{
    # column: elementwise ops lead to time_down
    "time_up.weight": dict(tp=dt.Row()),
    # row: it contracts the dim that time_up splits
    "time_down.weight": dict(tp=dt.Column()),
    # column: 4 heads, 4 wide, each attended alone
    "query.weight": dict(tp=dt.Row()),
    # row: it contracts the dim that query splits
    "join.weight": dict(tp=dt.Column()),
    # whole: widen.weight
    #   aten.native_layer_norm.default cannot split its output dim (test_derive.py:68)
    # whole: narrow.weight
    #   its output dim would also split query.weight
    # whole: value.weight
    #   dt.attention.default cannot split its output dim (test_derive.py:71)
    # whole: key.weight
    #   dt.attention.default cannot split its output dim (test_derive.py:71)
    # whole: classes.weight
    #   no weight contracts the split of its output dim
}""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [Interleaved, Mixer])
def test_gradients_under_derived_placements_match_torch(kind: type[nn.Module], size: int) -> None:
    model = build(kind)
    placed = dt.parallelize(model, dt.Mesh(tp=size), derived(kind, size))
    step = dt.train_step(placed, loss_fn, torch.optim.AdamW(model.parameters()))
    found = step.gradients(*DATA[kind])
    plain = build(kind)
    loss_fn(plain, *DATA[kind]).backward()
    assert_gradients_close(
        found, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    )


@pytest.mark.slow
def test_derived_placements_of_gpt_are_megatrons() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    placements = dt.placements.for_model(GPT(), (ids,), size=2)
    assert dict(placements) == {
        "embed.weight": dict(tp=dt.Row()),
        "blocks.*.attn.qkv.weight": dict(tp=dt.Row(blocks=3)),
        "blocks.*.attn.proj.weight": dict(tp=dt.Shard(1)),
        "blocks.*.mlp.up.weight": dict(tp=dt.Row()),
        "blocks.*.mlp.down.weight": dict(tp=dt.Shard(1)),
    }


def test_for_model_with_size_1_equals_placements_for_any_size() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    one, any_number = (dt.placements.for_model(GPT(), (ids,), size=size) for size in (1, None))
    assert one == any_number


def test_derived_placements_are_editable_dict() -> None:
    placements = dt.placements.for_model(MLP(), (torch.zeros(4, 16),), axis="x")
    del placements["down.weight"]
    placements["up.weight"] = dict(x=dt.Replicate())
    mesh = dt.Mesh(x=2)
    model = MLP()
    step = dt.train_step(
        dt.parallelize(model, mesh, placements),
        lambda model, x: model(x).pow(2).mean(),
        torch.optim.AdamW(model.parameters()),
    )
    assert kinds(step.plan(torch.zeros(4, 16))) == Counter()
    assert '"up.weight": dict(x=dt.Replicate())' in str(placements)
    assert '"down.weight"' not in str(placements)


def test_for_model_rejects_bad_arguments() -> None:
    with pytest.raises(dt.PlanningError, match="for_model takes an nn.Module, not function"):
        dt.placements.for_model(loss_fn)  # type: ignore[arg-type]
    with pytest.raises(dt.PlanningError, match="size=0: an axis has at least 1 rank"):
        dt.placements.for_model(MLP(), (torch.zeros(4, 16),), size=0)


class Inception(nn.Module):
    """Branches of unequal widths that are concatenated, so each gradient is a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, n, 1) for n in (12, 12, 4, 4))
        self.classes = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([branch(x) for branch in self.branches], 1)
        return self.classes(F.relu(x).mean((2, 3)))


@pytest.mark.default("2")
@pytest.mark.parametrize("size", [None, 2])
def test_model_with_derived_placements_can_be_planned_for_training(size: int | None) -> None:
    model, x = build(Inception), torch.randn(2, 3, 4, 4)
    found = dt.placements.for_model(model, (x,), size=size)
    assert "aten.slice.Tensor cuts its dim at other places" in found.reasons["classes.weight"]
    placed = dt.parallelize(model, dt.Mesh(tp=2), found)
    opt = torch.optim.SGD(placed.parameters(), lr=0.1)
    dt.train_step(placed, lambda m, x: m(x).square().mean(), opt).plan(x)


def test_for_model_uses_forward_alone_if_model_has_no_gradient() -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 20), nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x))).argmax(-1)

    found = dt.placements.for_model(Ids(), (torch.randn(2, 4),))
    assert list(found) == ["up.weight", "down.weight"]
