"""The load-balancing loss of mixtures of experts: its value, and training with microbatches.

With `train_step(aux_loss="per_microbatch")` the reference is torch's loop over the microbatches,
each with its own loss divided by their number.
"""
# ruff: noqa: E501  (errors stand as they are printed)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from tests.api.test_batch_norm import microbatches
from tests.extras import missing

E, K = 5, 2
STAGES = {"pp": [["layers.0.*"], ["layers.1.*"]]}


class Router(nn.Module):
    """A mixture of E linear experts over x[b t d], all of which are computed. ``bias``: DeepSeek's
    bias of the choice, which each step updates from the counts of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, 6, 6) * 0.3)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("counts", torch.zeros(E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            self.bias += 0.05 * torch.sign(self.counts.mean() - self.counts)
            self.counts.zero_()
        rows = x.flatten(0, 1)
        logits = self.gate(rows)
        weights = logits.softmax(-1)
        ids = (weights + self.bias).topk(K, -1).indices
        chosen = torch.zeros_like(weights).scatter(1, ids, weights.gather(1, ids))
        with torch.no_grad():
            self.counts += torch.zeros_like(weights).scatter(1, ids, 1.0).sum(0)
        y = torch.einsum("td,edf,te->tf", rows, self.experts, chosen)
        return x + y.view_as(x), logits, ids


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Router(), Router()])

    def forward(self, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        routers: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            x, *router = layer(x)
            routers.append((router[0], router[1]))
        return x, routers


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of an error, a load-balancing loss and a z-loss."""
    out, routers = model(x)
    loss = (out - y).square().mean()
    for logits, ids in routers:
        loss = loss + 0.2 * dt.load_balancing_loss(logits, ids, E, mask.flatten())
        loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
    return loss


def unmasked_loss(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    out, routers = model(x)
    aux = [dt.load_balancing_loss(logits, ids, E) for logits, ids in routers]
    return (out - y).square().mean() + 0.2 * sum(aux)


def data(seed: int, rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, 3, 6, generator=generator)
    return x, y, torch.rand(rows, 3, generator=generator) < 0.8


def step_of(
    axes: Mapping[str, int],
    schedule: dt.Schedule,
    loss: Callable[..., Any] = loss_fn,
    **stated: Any,
) -> tuple[dt.ParallelModule, torch.optim.Optimizer, dt.TrainStep]:
    module = Net()
    model = dt.parallelize(module, dt.Mesh(**axes), stages=STAGES if "pp" in axes else None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = dict(dp=dt.Row()) if "dp" in axes else None
    step = dt.train_step(model, loss, optimizer, inputs=inputs, schedule=schedule, **stated)
    return model, optimizer, step


def looped(
    batches: Sequence[Sequence[Tensor]], ranks: int, num: int, loss: Callable[..., Any] = loss_fn
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with torch's loop over the microbatches. The bias moves once a step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        counts = {name: torch.zeros(E) for name in before if name.endswith("counts")}
        for rows in microbatches(len(batch[0]), ranks, num):
            model.load_state_dict(before, strict=False)
            value = loss(model, *(x[rows] for x in batch)) / num
            value.backward()
            total += value.item()
            for name in counts:
                counts[name] += model.state_dict()[name]
        model.load_state_dict(counts, strict=False)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def compare(
    axes: Mapping[str, int],
    schedule: dt.Schedule,
    loss: Callable[..., Any] = loss_fn,
    backend: Any = "inprocess",
    **stated: Any,
) -> None:
    batches = [data(seed) for seed in range(3)]
    stated = {"aux_loss": "per_microbatch", **stated}
    model, optimizer, step = step_of(axes, schedule, loss, **stated)
    with dt.launch(model.mesh, backend=backend):
        found = [float(step(*batch)) for batch in batches]
        state = dt.gather_state_dict(model, optimizer)["model"]
    losses, expected = looped(batches, axes.get("dp", 1), schedule.microbatches, loss)
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=2e-6)


PLACED: dict[str, tuple[Mapping[str, int], dt.Schedule]] = {
    "single": ({}, dt.GPipe(4)),
    "dp2": (dict(dp=2), dt.GPipe(2)),
    "dp2 whole": (dict(dp=2), dt.GPipe(1)),
    "dp4": (dict(dp=4), dt.OneFOneB(4)),
    "pp2 GPipe": (dict(pp=2), dt.GPipe(2)),
    "pp2 1F1B": (dict(pp=2), dt.OneFOneB(4)),
    "pp2 dp2 1F1B": (dict(pp=2, dp=2), dt.OneFOneB(4)),
    "pp2 dp2 ZBH1": (dict(pp=2, dp=2), dt.ZBH1(2)),
}


@pytest.mark.default("pp2 dp2 1F1B", "dp2 whole")
@pytest.mark.parametrize("name", PLACED)
def test_masked_loss_z_loss_and_bias_match_torch_loop_over_microbatches(name: str) -> None:
    compare(*PLACED[name])


@pytest.mark.default("dp2")
@pytest.mark.parametrize("name", ["dp2", "pp2 1F1B", "pp2 dp2 ZBH1"])
def test_unmasked_loss_matches_torch_loop_over_microbatches(name: str) -> None:
    compare(*PLACED[name], unmasked_loss)


@pytest.mark.slow
def test_loss_matches_torch_loop_on_ray_and_with_recompute() -> None:
    compare(*PLACED["dp2"], backend="ray")
    compare(*PLACED["dp2"], recompute=["layers.*"])
    compare(*PLACED["dp2"], search="free")


def test_only_sums_by_expert_are_sent_over_data_parallel_ranks() -> None:
    plan = step_of(dict(dp=2), dt.GPipe(2), aux_loss="per_microbatch")[2].plan(*data(0))
    sent = [c.bytes_sent for c in plan.collectives if c.phase == "forward"]
    assert sorted(sent)[-2:] == [3 * E * 4, 3 * E * 4]
    assert "aux loss    the mean of the microbatches' load-balancing losses" in str(plan)


# -- the value -------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value_and_gradient_match_formula(masked: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, E, dtype=dtype, requires_grad=True)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(9)])
    ids[2, 1] = -1
    mask = torch.arange(9) % 4 != 1 if masked else None
    counted = slice(None) if mask is None else mask
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    p = logits.softmax(-1).to(wide)[counted].mean(0)
    one_hot = F.one_hot(ids + 1, E + 1)[counted, :, 1:].to(wide)
    expected = E * (one_hot.sum(1).mean(0) * p).sum()
    found = dt.load_balancing_loss(logits, ids.int(), E, mask)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("op", ["sums", "sums_grad", "loss", "loss_grad"])
def test_load_balancing_ops_pass_torch_opcheck(op: str) -> None:
    p, sums = torch.rand(12, E, requires_grad=True), torch.rand(3, 3, E, requires_grad=True)
    ids, mask, plain = torch.randint(-1, E, (12, K)), torch.ones(12), torch.rand(3, 3, E)
    calls: dict[str, tuple[Any, ...]] = {
        "sums": (p, ids, mask, 2, 3),
        "sums_grad": (plain, mask, 12, torch.float32, 2, 3),
        "loss": (sums, 2.0),
        "loss_grad": (torch.rand(()), plain, 2.0),
    }
    torch.library.opcheck(getattr(torch.ops.dt, f"balance_{op}").default, calls[op])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(logits=torch.zeros(2, 3, E)), "logits is [T, E], for T tokens and E = 5 experts"),
        (dict(ids=torch.zeros(4, K).long()), "ids is [T, k], for"),
        (dict(ids=torch.zeros(6, K)), "ids holds integers, for"),
        (dict(mask=torch.ones(2, 3)), "fix: pass mask.flatten()"),
    ],
)
def test_wrong_arguments_are_refused_with_their_shapes(change: dict[str, Any], text: str) -> None:
    arguments = dict(logits=torch.zeros(6, E), ids=torch.zeros(6, K).long(), num_experts=E)
    with pytest.raises(dt.PlanningError, match=re.escape(text)):
        dt.load_balancing_loss(**{**arguments, **change})


# -- errors of plans -------------------------------------------------------------------------------


def refused(axes: Mapping[str, int], num: int, *batch: Tensor, **stated: Any) -> str:
    with pytest.raises(dt.PlanningError) as caught:
        step_of(axes, dt.GPipe(num), **stated)[2].plan(*batch)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def test_microbatches_without_option_are_refused_with_fix() -> None:
    assert_expected_inline(
        refused({}, 4, *data(0), loss=unmasked_loss),
        """\
the load-balancing loss is a product of means over the batch, so microbatches would change it.
  balance_sums: f32[1,3,5], a sum over microbatches
  test_load_balancing.py:N: aux = [dt.load_balancing_loss(logits, ids, E) for logits, ids in routers]
fix: train_step(..., aux_loss="per_microbatch"), the mean of the losses of all microbatches, or microbatches=1""",
    )


def test_microbatches_of_several_sizes_are_refused_with_fix() -> None:
    assert_expected_inline(
        refused(dict(dp=2), 4, *data(0, 20), aux_loss="per_microbatch"),
        """\
aux_loss="per_microbatch" takes microbatches of one size.
  softmax: f32[60,5], its rows in 4 microbatches: 18, 18, 18, 6
  test_load_balancing.py:N: loss = loss + 0.2 * dt.load_balancing_loss(logits, ids, E, mask.flatten())
fix: microbatches=2, or a batch that is a multiple of 8, as with DataLoader(drop_last=True)""",
    )
    step_of(dict(dp=2), dt.GPipe(2), aux_loss="per_microbatch")[2].plan(*data(0, 20))  # the fix
    with pytest.raises(dt.PlanningError, match="aux_loss='mean': it is"):
        step_of({}, dt.GPipe(1), aux_loss="mean")


def test_update_of_buffer_from_sum_of_same_step_is_refused_with_fix() -> None:
    class Now(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Any:
            out, routers = super().forward(x)
            self.seen += torch.sign(out.detach().sum((0, 1)))
            return out, routers

    model = dt.parallelize(Now(), dt.Mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, lambda m, x: m(x)[0].mean(), optimizer, schedule=dt.GPipe(2))
    with pytest.raises(dt.PlanningError, match="fix: .* add the sum to a buffer in this step"):
        step.plan(data(0)[0])


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_loss_of_transformers_becomes_ours_during_capture(masked: bool) -> None:
    mixtral = pytest.importorskip(
        "transformers.models.mixtral.modeling_mixtral", reason=missing("transformers")
    )

    def loss(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        out, routers = model(x)
        logits = tuple(logits for logits, _ in routers)
        aux = mixtral.load_balancing_loss_func(logits, E, K, mask if masked else None)
        return (out - y).square().mean() + 0.2 * aux

    compare(dict(dp=2), dt.GPipe(2), loss)
    plan = step_of({}, dt.GPipe(1), loss)[2].plan(*data(0))
    assert [r.op for r in plan.flow.recognised] == ["dt.balance_loss"]
    assert "dt.balance_loss" in str(plan.recognised())
