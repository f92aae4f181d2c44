"""Pipelines of all shapes match plain torch: skip connections, encoder and decoder, branches,
stages with different placements, arguments and buffers used by several stages."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.steps import Transfer
from tests.models import GPT, batch, loss_fn
from tests.training import (
    Placed,
    Run,
    assert_gradients_close,
    assert_losses_close,
    assert_trains_as_torch,
    gradients_of,
    sgd,
)

D, VOCAB = 8, 11


def check_step(run: Run, loss: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """Compare the loss and the gradients of a step with plain torch."""
    plain = copy.deepcopy(run.module)
    with dt.launch(run.mesh):
        found = run.step.gradients(*given)
        value = float(run.step(*given))
    assert_gradients_close(found, gradients_of(plain, given, loss))
    expected = loss(plain, *given)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_losses_close([value], [expected.item()])


# -- stages that are no chain ----------------------------------------------------------------------


class Skips(nn.Module):
    """A small U-Net: values of the way down are joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(D, D), nn.Linear(D, D)
        self.middle = nn.Linear(D, D)
        self.up2, self.up1 = nn.Linear(2 * D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.down1(x))
        b = torch.tanh(self.down2(a))
        c = torch.tanh(self.middle(b))
        y = torch.tanh(self.up2(torch.cat([c, b], -1)))
        return self.up1(torch.cat([y, a], -1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(x)) * torch.tanh(self.right(x)))


class EncoderDecoder(nn.Module):
    """Every decoder layer uses the encoder's result; encoder, decoder and head share one
    embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, D, 0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(D, 2, D, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        y = self.embed(target)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def next_token(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(source, target).flatten(0, 1), target.roll(-1, 1).flatten())


def vectors() -> tuple[Tensor, ...]:
    return (torch.randn(8, D),)


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, VOCAB, (8, 6)), torch.randint(0, VOCAB, (8, 5))


FOUR = [["down1*"], ["down2*", "middle*"], ["up2*"], ["up1*"]]
THREE = [["down1*", "down2*"], ["middle*", "up2*"], ["up1*"]]
GPT_THREE = [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]]
CODERS = [["embed*", "encoder.0*"], ["encoder.1*", "decoder.0*"], ["decoder.1*", "head*"]]


@pytest.mark.default("Branches-square-vectors-stages4-3-schedule4")
@pytest.mark.parametrize(
    ("make", "loss", "data", "stages", "ranks", "schedule"),
    [
        (Skips, square, vectors, FOUR, 2, dt.ZBV(4)),  # a value is sent to two stages
        (Skips, square, vectors, THREE, 3, dt.OneFOneB(4)),
        (EncoderDecoder, next_token, tokens, CODERS, 3, dt.ZBH1(4)),
        (GPT, loss_fn, lambda: batch(size=8), GPT_THREE, 3, dt.ZBH1(4)),  # tied
        (Branches, square, vectors, [["left*"], ["right*"], ["out*"]], 3, dt.GPipe(2)),
    ],
)
def test_pipeline_gradients_match_torch(
    make: Callable[[], nn.Module],
    loss: Callable[..., Any],
    data: Callable[[], tuple[Tensor, ...]],
    stages: Sequence[Sequence[str]],
    ranks: int,
    schedule: dt.Schedule,
) -> None:
    placed = Placed(axes=dict(pp=ranks), stages={"pp": stages})
    check_step(Run.of(placed, module=make(), loss=loss, schedule=schedule), loss, data())


def test_tied_head_runs_on_stage_that_names_it() -> None:
    """The earlier stage, which computes the head's input, holds the weight too."""
    stages = [["embed*", "positions*", "blocks.*", "norm*"], ["head*"]]
    run = Run.of(Placed(axes=dict(pp=2), stages={"pp": stages}), module=GPT(), clip=None)
    plan = run.step.plan(*batch(size=8))
    assert {op.stage for op in plan.flow.ops if op.module == "head"} == {1}
    assert next(i.stages for i in plan.inputs if i.label == "embed.weight") == (0, 1)
    assert [c.kind for c in plan.collectives if c.phase == "optimizer"] == ["all_reduce"] * 2


# -- stages that are split in different ways -------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def two_mlps() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=MLP(), second=MLP(), head=nn.Linear(16, 4)))


def square_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randn(8, 4)


ON_BOTH = dict(dp=dt.Row(), tp=dt.Row())
TP4 = {"up.*": ON_BOTH, "down.weight": dict(dp=dt.Column(), tp=dt.Column())}
TP2 = {"up.*": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
WHOLE: dict[str, Any] = {"*": dict(dp=dt.Replicate(), tp=dt.Replicate())}


def split(first: Mapping[str, Any], second: Mapping[str, Any], inputs: Any) -> Placed:
    pins = {f"first.{name}": at for name, at in first.items()}
    pins |= {f"second.{name}": at for name, at in second.items()}
    if second is WHOLE:
        pins["head.*"] = WHOLE["*"]
    stages = {"pp": [["first.*"], ["second.*", "head.*"]]}
    return Placed(axes=dict(pp=2, dp=2, tp=2), pins=pins, inputs=inputs, stages=stages)


SPLIT = {
    "tp4, then dp2 tp2": split(TP4, TP2, dict(x={}, y=dict(dp=dt.Row()))),
    "dp4, then tp4": split(WHOLE, TP4, dict(x=ON_BOTH, y={})),
    "tp4, then dp4": split(TP4, WHOLE, dict(x={}, y=ON_BOTH)),
}


@pytest.mark.default("tp4, then dp4")
@pytest.mark.parametrize("case", SPLIT)
def test_stages_with_different_placements_match_torch(case: str) -> None:
    check_step(Run.of(SPLIT[case], module=two_mlps(), loss=square_error), square_error, rows())


def test_value_between_stages_is_sent_split_and_gathered_at_target() -> None:
    """The first stage needs the whole batch's gradient on each rank: half of it is sent to each and
    then gathered."""
    run = Run.of(SPLIT["tp4, then dp2 tp2"], module=two_mlps(), loss=square_error, clip=None)
    plan = run.step.plan(*rows())
    half_of_a_microbatch = 2 * 16 * 4  # rows, columns, bytes
    assert [(c.phase, c.bytes_sent) for c in plan.collectives if c.axis == "pp"] == [
        ("forward", half_of_a_microbatch),
        ("backward", half_of_a_microbatch),
    ]
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert [(c.axis, c.phase, c.stage) for c in gathers] == [("dp", "backward", 0)]


def test_zero_with_stages_of_different_placements_matches_torch() -> None:
    """With tp=4 on one stage and dp=2 x tp=2 on the other; state that dp does not split yet is
    split over dp."""
    where = SPLIT["tp4, then dp2 tp2"]
    data = [rows() for _ in range(3)]
    assert_trains_as_torch(
        where, data, build=two_mlps, loss=square_error, zero={"dp": 2}, clip=None, atol=2e-6
    )


# -- terms over parameters of several stages -------------------------------------------------------


def penalty(m: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in m.parameters()]).sum()


def vector_norm(m: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(m.parameters()).norm()


def orthogonality(m: nn.Module) -> Tensor:
    weights = [p for p in m.parameters() if p.dim() == 2]
    return torch.stack([(w @ w.T - torch.eye(len(w))).norm() for w in weights]).max()


def difference(m: Any) -> Tensor:
    return (m.first.up.weight - m.second.up.weight.detach()).square().sum() * m.head.weight.norm()


def after_term(term: Callable[[Any], Tensor]) -> Callable[..., Any]:
    """Return a loss that computes ``term`` before the forward and also returns it as a metric."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = 0.01 * term(m)
        return square_error(m, x, y) + value, {"term": value.detach()}

    return loss


TERM_STAGES = [["first.*"], ["second.*"], ["head.*"]]


@pytest.mark.default("vector_norm-axes0-OneFOneB-None")
@pytest.mark.parametrize(
    ("term", "axes", "schedule", "zero"),
    [
        (vector_norm, dict(pp=3), dt.OneFOneB, None),
        (penalty, dict(pp=3, tp=2), dt.ZBH1, None),
        (orthogonality, dict(pp=3, dp=2), dt.GPipe, {"dp": 3}),
        (difference, dict(pp=3, dp=2), dt.OneFOneB, {"dp": 2}),
    ],
)
def test_loss_term_over_parameters_of_several_stages_matches_torch(
    term: Callable[[Any], Tensor],
    axes: dict[str, int],
    schedule: Callable[[int], dt.Schedule],
    zero: dict[str, int] | None,
) -> None:
    pins = {f"{name}.{at}": TP2[at] for name in ("first", "second") for at in TP2}
    placed = Placed(
        axes=axes,
        pins=pins if "tp" in axes else {},
        inputs=dict(dp=dt.Row()) if "dp" in axes else None,
        stages={"pp": TERM_STAGES},
    )
    loss, data = after_term(term), [rows() for _ in range(3)]
    options: dict[str, Any] = dict(schedule=schedule(4), zero=zero, clip=None, make=sgd)
    assert_trains_as_torch(placed, data, build=two_mlps, loss=loss, **options)


def test_weight_penalty_sends_only_scalars_between_stages_once_per_step() -> None:
    placed = Placed(axes=dict(pp=2), stages={"pp": [["first.*"], ["second.*", "head.*"]]})
    plans = [
        Run.of(placed, module=two_mlps(), loss=loss, clip=None).step.plan(*rows())
        for loss in (square_error, after_term(penalty))
    ]
    plain, with_penalty = ([s for s in p.steps if isinstance(s, Transfer)] for p in plans)
    scalars = [s for s in with_penalty if s.spec.shape == ()]
    assert len(with_penalty) == len(plain) + len(scalars)
    assert [(s.stage, s.to_stage, s.once) for s in scalars] == [(0, 1, True)] * 4


def test_gradient_of_weight_difference_crosses_stages_once_per_step() -> None:
    placed = Placed(axes=dict(pp=2), stages={"pp": [["first.*"], ["second.*", "head.*"]]})
    run = Run.of(placed, module=two_mlps(), loss=after_term(difference), clip=None)
    weight = run.module.get_parameter("first.up.weight").shape
    crossing = [s for s in run.step.plan(*rows()).steps if isinstance(s, Transfer)]
    weights = [(s.stage, s.to_stage, s.once) for s in crossing if s.spec.shape == weight]
    assert weights == [(0, 1, True), (1, 0, True)]


# -- arguments and buffers that late stages use, or several ----------------------------------------

LENGTH = 6


class Masked(nn.Module):
    """A mask for every layer, and positions and a feature for the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.one, self.two, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, feature: Tensor) -> Tensor:
        keep = mask.to(feature.dtype).unsqueeze(-1)
        x = torch.tanh(self.one(self.embed(tokens))) * keep
        x = x + torch.tanh(self.two(x)) * keep
        return self.head(x + self.place(positions) + feature.unsqueeze(1))


def weighted(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    feature: Tensor,
    targets: Tensor,
) -> Tensor:
    """A loss that uses the targets, and the mask once more."""
    logits = model(tokens, mask, positions, feature)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.numel()


def test_stage_receives_only_arguments_that_it_uses() -> None:
    placed = Placed(
        axes=dict(pp=3, dp=2),
        stages={"pp": [["embed*", "one*"], ["two*"], ["place*", "head*"]]},
        inputs=dict(dp=dt.Row()),
    )
    run = Run.of(placed, module=Masked(), loss=weighted)
    ids, targets = torch.randint(0, VOCAB, (2, 8, LENGTH))
    positions, feature = torch.randint(0, LENGTH, (8, LENGTH)), torch.randn(8, D)
    given = (ids, torch.rand(8, LENGTH) < 0.7, positions, feature, targets)
    plan = run.step.plan(*given)
    stages = {item.label: item.stages for item in plan.inputs if item.kind == "argument"}
    assert stages == {
        "tokens": (0,),
        "mask": (0, 1, 2),
        "positions": (2,),
        "feature": (2,),
        "targets": (2,),
    }
    crossing = [s for s in plan.steps if isinstance(s, Transfer)]
    # what the layers hand on, [8 6 8] by microbatch and dp, and its gradient: no argument
    assert [(s.stage, s.to_stage) for s in crossing] == [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert {s.spec.max_local_nbytes for s in crossing} == {2 * LENGTH * D * 4}
    check_step(run, weighted, given)


class Remembers(nn.Module):
    """A model with a buffer that both stages read and the last stage writes, and a counter of
    calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x) + self.mean + self.count) * (1 + self.count) - self.mean
        self.count.add_(1.0)
        self.mean.copy_(y.mean(0))
        return y


def test_buffer_read_by_several_stages_is_written_on_each() -> None:
    plain, x = Remembers(), torch.randn(3, 4)
    mesh = dt.Mesh(pp=2)
    stages = {"pp": [["one*"], ["two*"]]}
    model = dt.parallelize(copy.deepcopy(plain), mesh, {}, stages=stages)
    run = dt.compile(lambda m, x: m(x), mesh)
    kept = {i.label: i.stages for i in run.plan(model, x).inputs if i.kind == "buffer"}
    assert kept == {"mean": (0, 1), "count": (0, 1)}
    with dt.launch(mesh):
        for _ in range(3):
            torch.testing.assert_close(run(model, x).full_tensor(), plain(x).detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
