"""Sizes that do not divide by the number of ranks: ops, gradients, optimizers, heads, vocabularies
and few KV heads match plain torch.

The collectives are those of Megatron: no dim is gathered because it does not divide.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, MLP, GroupedAttention, Llama, batch, loss_fn
from tests.training import (
    Placed,
    Run,
    adamw,
    assert_gradients_close,
    assert_losses_close,
    gradients_of,
    train_torch,
)

Stated = Mapping[str, dt.Placement]


# -- ops and their gradients -----------------------------------------------------------------------

X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
ROWS = [{"x": dict(a=dt.Row())}, {"x": dict(a=dt.Column())}]


@pytest.mark.default("cat")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: x.mean(),
        lambda x: x.var(0),
        lambda x: x.cumsum(0),
        lambda x: x.amax(1),
        lambda x: x.t().contiguous() @ x,
        lambda x: torch.cat([x, x * 2], 0),
        lambda x: x.flatten().sin(),
        lambda x: x[1:6] * x[:5],
        lambda x: F.pad(x, (1, 2)),
        lambda x: x.roll(2, 0),
        lambda x: x.repeat(2, 1),
        lambda x: x.unsqueeze(1).expand(7, 3, 5).sum(0),
        lambda x: F.mse_loss(x, x.detach() + 1),
    ],
    ids=[
        "softmax", "layer_norm", "mean", "var", "cumsum", "amax", "matmul", "cat", "flatten",
        "slices", "pad", "roll", "repeat", "expand", "mse_loss",
    ],
)  # fmt: skip
def test_ops_on_uneven_dims_match_torch(fn: object) -> None:
    """7 rows or 5 columns over 2, 3 and 4 ranks."""
    meshes = [dt.Mesh(a=n) for n in (2, 3, 4)]
    same = dt.testing.assert_same(fn, X, placements=ROWS, meshes=meshes)  # type: ignore[arg-type]
    assert len(same.checked) == 6


def test_ops_with_more_ranks_than_rows_match_torch() -> None:
    x, w = torch.randn(2, 3), torch.randn(3, 2)
    for axes in (dict(a=4), dict(a=2, b=3)):
        mesh = dt.Mesh(**axes)
        placed: list[dict[str, Stated]] = [{"x": {axis: dt.Row()}} for axis in axes]
        placed += [{"x": {axis: dt.Column()}, "w": {axis: dt.Row()}} for axis in axes]
        dt.testing.assert_same(
            lambda x, w: (x @ w).relu().softmax(-1), x, w, placements=placed, meshes=[mesh]
        )


def test_uneven_full_and_local_tensors_have_expected_shapes() -> None:
    x = torch.randn(7, 5)
    mesh = dt.Mesh(a=2, b=3)
    for placements in (
        dict(a=dt.Row(), b=dt.Row()),
        dict(b=dt.Row(), a=dt.Row()),
        dict(a=dt.Column(), b=dt.Row(blocks=(4, 3))),
        dict(a=dt.Row(sizes=(0, 7)), b=dt.Row(sizes=(1, 4, 2))),
        dict(a=dt.Column(sizes=(5, 0)), b=dt.Column()),
    ):
        placed = dt.distribute(x, mesh, **placements)
        assert torch.equal(placed.full_tensor(), x)
        shapes = [tuple(t.shape) for t in placed.local_tensors()]
        assert shapes == [placed.spec.local_shape(mesh.coordinates(r)) for r in range(6)]
        for moved in (dict(a=dt.Row(), b=dt.Column()), dict(a=dt.Row(sizes=(2, 5)), b=dt.Row())):
            assert torch.equal(placed.redistribute(**moved).full_tensor(), x)


@pytest.mark.parametrize(
    ("placement", "text"),
    [(dt.Row(blocks=(6, 1)), "f32[(6+1)@tp,5]"), (dt.Row(sizes=(2, 5)), "f32[(2|5)@tp,5]")],
    ids=str,
)
def test_annotation_of_blocks_or_sizes_splits_value(placement: dt.Shard, text: str) -> None:
    double = dt.compile(lambda x: dt.annotate(x * 2, tp=placement) + 1, dt.Mesh(tp=2))
    assert text in str(double.plan(X))
    assert torch.equal(double(X).full_tensor(), X * 2 + 1)


# -- training --------------------------------------------------------------------------------------


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        (dict(tp=3), None),
        (dict(dp=3, tp=2), None),
        (dict(tp=4), None),
        (dict(tp=4), (0, 4, 0, 3)),
        (dict(dp=3, tp=2), (1, 6)),
    ],
    ids=str,
)
def test_uneven_mlp_with_adamw_and_clipping_trains_as_torch(
    axes: dict[str, int], sizes: tuple[int, ...] | None
) -> None:
    """7 hidden units over 2, 3 and 4 ranks, in even or stated sizes; batches of 5 over 3."""
    data = [(torch.randn(5, 6, generator=torch.Generator().manual_seed(s)),) for s in range(6)]

    def make() -> nn.Module:
        torch.manual_seed(1)
        return MLP(width=6, hidden=7)

    module = make()
    expected = train_torch(module, adamw(module), data, loss=mean_square, clip=0.1)
    placed = Placed(
        axes=axes,
        pins={
            "up.weight": dict(tp=dt.Row(sizes=sizes)),
            "down.weight": dict(tp=dt.Column(sizes=sizes)),
        },
        inputs=dict(dp=dt.Row(sizes=sizes and (0, 2, 3))) if "dp" in axes else None,
    )
    run = Run.of(
        placed,
        module=make(),
        loss=mean_square,
        schedule=dt.OneFOneB(microbatches=1),
        clip=0.1,
    )
    forward = [c.key for c in run.step.plan(*data[0]).collectives if c.phase == "forward"]
    assert forward.count("all_reduce@tp") == 1
    assert not any(key.startswith("all_gather") for key in forward)
    with dt.launch(run.mesh):
        found = run.step.gradients(*data[0])
        losses = run.losses(data)
        state = run.state()
    assert_gradients_close(found, gradients_of(make(), data[0], mean_square))
    assert_losses_close(losses, expected)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-5, atol=1e-6)


def test_uneven_heads_with_unit_train_as_torch() -> None:
    """5 heads of size 4 over 3 ranks: 2, 2 and 1."""
    placed = Placed(
        axes=dict(tp=3),
        pins={
            "*.qkv.weight": dict(tp=dt.Row(blocks=3, unit=4)),
            "*.proj.weight": dict(tp=dt.Column(unit=4)),
            "*.up.weight": dict(tp=dt.Row()),
            "*.down.weight": dict(tp=dt.Column()),
        },
    )
    check_language_model(
        placed,
        lambda: GPT(width=20, heads=5, layers=1, vocab=32),
        {"all_reduce@tp": 2},
        32,
    )


@pytest.mark.default("untied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_uneven_vocabulary_trains_as_torch_without_sending_logits(tied: bool) -> None:
    """31 tokens over 3 ranks: 11, 11 and 9 rows of embedding, head and cross entropy."""
    pins: dict[str, Stated] = {"embed.weight": dict(tp=dt.Row())}
    if not tied:
        pins["head.weight"] = dict(tp=dt.Row())
    plan = check_language_model(
        Placed(axes=dict(tp=3), pins=pins),
        lambda: GPT(vocab=31, width=16, heads=4, layers=1, tied=tied),
        None,
        31,
    )
    # one for the embedding; the loss needs numbers per token, never the logits
    biggest = max(c.bytes_sent for c in plan.collectives)
    tokens, width = 4 * 8, 16
    assert biggest <= 2 * (2 / 3) * tokens * width * 4 + 16


def check_language_model(
    placed: Placed,
    make_module: object,
    forward: Mapping[str, int] | None,
    vocab: int,
) -> dt.Plan:
    data = [batch(seed, vocab=vocab) for seed in range(4)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = make_module()  # type: ignore[operator]
        with torch.no_grad():
            model.embed.weight.mul_(0.1)
        return model

    def loss_alone(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(model, tokens, targets)[0]

    module = make()
    expected = train_torch(module, adamw(module), data, loss=loss_alone, clip=1.0)
    run = Run.of(
        placed, module=make(), loss=loss_alone, schedule=dt.OneFOneB(microbatches=1), clip=1.0
    )
    plan = run.step.plan(*data[0])
    found_forward: dict[str, int] = {}
    for collective in plan.collectives:
        if collective.phase == "forward":
            found_forward[collective.key] = found_forward.get(collective.key, 0) + 1
    if forward is not None:
        assert found_forward == dict(forward)
    assert not any(key.startswith("all_gather") for key in found_forward)
    with dt.launch(run.mesh):
        gradients = run.step.gradients(*data[0])
        losses = run.losses(data)
        run.state()
    assert_gradients_close(gradients, gradients_of(make(), data[0], loss_alone), limit=2e-5)
    assert_losses_close(losses, expected)
    return plan


# -- fewer kv heads than ranks ---------------------------------------------------------------------


@pytest.mark.default("repeat")
@pytest.mark.parametrize("spread", ["enable_gqa", "repeat"])
def test_gqa_with_more_ranks_than_kv_heads_matches_torch(spread: str) -> None:
    """2 KV heads over axis kv=2, their 4 query heads over kv and rep: each of 4 ranks has its own
    query head."""
    torch.manual_seed(0)
    module = GroupedAttention(16, 4, 2, spread)  # type: ignore[arg-type]
    x, cos, sin = torch.randn(3, 5, 16), torch.randn(5, 4), torch.randn(5, 4)
    both = dict(kv=dt.Row(unit=4), rep=dt.Row(unit=4))
    pins: dict[str, Stated] = {
        "q.weight": both,
        "[kv].weight": dict(kv=dt.Row(unit=4), rep=dt.Replicate()),
        "o.weight": dict(kv=dt.Column(unit=4), rep=dt.Column(unit=4)),
    }
    mesh = dt.Mesh(kv=2, rep=2)
    dt.testing.assert_same(module, x, cos, sin, placements=pins, meshes=[mesh])
    specs = [dt.spec(text, mesh) for text in ("f32[3,5,16]", "f32[5,4]", "f32[5,4]")]
    dt.testing.assert_collectives(
        module, mesh, pins, *specs, forward={"all_reduce@kv": 1, "all_reduce@rep": 1}
    )


def test_llama_with_more_ranks_than_kv_heads_trains_as_torch() -> None:
    both = dict(kv=dt.Row(unit=4), rep=dt.Row(unit=4))
    back = dict(kv=dt.Column(unit=4), rep=dt.Column(unit=4))
    pins: dict[str, Stated] = {
        "*attn.q.weight": both,
        "*attn.[kv].weight": dict(kv=dt.Row(unit=4), rep=dt.Replicate()),
        "*attn.o.weight": back,
        "*mlp.gate.weight": dict(kv=dt.Row(), rep=dt.Row()),
        "*mlp.up.weight": dict(kv=dt.Row(), rep=dt.Row()),
        "*mlp.down.weight": dict(kv=dt.Column(), rep=dt.Column()),
    }
    check_language_model(
        Placed(axes=dict(kv=2, rep=2), pins=pins),
        lambda: Llama(vocab=30, layers=1),
        {"all_reduce@kv": 2, "all_reduce@rep": 2},
        30,
    )
