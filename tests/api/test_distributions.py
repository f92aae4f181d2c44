"""`torch.distributions`, `gaussian_nll_loss` and `rrelu` in a step: torch's Python checks become
checks of the step, and random numbers do not depend on placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import dtensor as dt
from tests.training import sgd

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """x [b 4] -> [b 6]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def normal(model: nn.Module, x: Tensor) -> distributions.Normal:
    mean, log_scale = model(x).chunk(2, -1)
    return distributions.Normal(mean, log_scale.exp())


def prior(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = distributions.kl_divergence(normal(model, x), distributions.Normal(0.0, 1.0))
    return found.sum(-1).mean()


def many(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)[:, :3]
    of = [
        distributions.LogNormal(h, h.exp()),
        distributions.Laplace(h, h.exp()),
        distributions.Gumbel(h, h.exp()),
        distributions.Cauchy(h, h.exp()),
        distributions.Exponential(h.exp()),
        distributions.Independent(distributions.Normal(h, 2.0), 1),
        distributions.MultivariateNormal(h, torch.eye(3) * 2),
    ]
    return -sum(one.log_prob(y.abs() + 0.1).mean() for one in of)


LOSSES: dict[str, Loss] = {
    "gaussian": lambda m, x, y: F.gaussian_nll_loss(m(x)[:, :3], y, m(x)[:, 3:].exp()),
    "gaussian of classes": lambda m, x, y: nn.GaussianNLLLoss(full=True)(
        m(x)[:, :3], y, y.square()
    ),
    "normal": lambda m, x, y: -normal(m, x).log_prob(y).mean(),
    "kl": prior,
    "categorical": lambda m, x, y: (
        -distributions.Categorical(logits=m(x)).log_prob((y[:, 0] > 0).long()).mean()
    ),
    "bernoulli": lambda m, x, y: (
        -distributions.Bernoulli(logits=m(x)[:, :3]).log_prob((y > 0).float()).mean()
    ),
    "many": many,
    "rrelu in evaluation": lambda m, x, y: F.rrelu(m(x), 0.1, 0.4).square().mean(),
}
DRAWN: dict[str, Loss] = {
    "normal": lambda m, x, y: (normal(m, x).rsample() - y).square().mean(),
    "laplace": lambda m, x, y: (
        (distributions.Laplace(m(x)[:, :3], y.exp()).rsample() - y).square().mean()
    ),
    "gumbel": lambda m, x, y: (
        (distributions.Gumbel(m(x)[:, :3], y.exp()).rsample() - y).square().mean()
    ),
    "rrelu": lambda m, x, y: F.rrelu(m(x), 0.1, 0.4, training=True).square().mean(),
}
PLACED: dict[str, tuple[Mapping[str, int], Mapping[str, Any], int]] = {
    "single": ({}, {}, 1),
    "dp2": (dict(dp=2), {}, 1),
    "dp2 microbatches": (dict(dp=2), {}, 2),
    "tp2": (
        dict(tp=2),
        {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
        1,
    ),
}


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def start(name: str, loss: Loss) -> tuple[nn.Module, dt.ParallelModule, dt.TrainStep]:
    axes, pins, microbatches = PLACED[name]
    dt.manual_seed(3)
    module = Net()
    model = dt.parallelize(module, dt.Mesh(**axes), pins)
    step = dt.train_step(
        model,
        loss,
        sgd(module),
        inputs=dict(dp=dt.Row()) if "dp" in axes else None,
        schedule=dt.GPipe(microbatches),
    )
    return module, model, step


def trained(name: str, loss: Loss) -> list[float]:
    _, model, step = start(name, loss)
    with dt.launch(model.mesh):
        return [float(step(*data(number))) for number in range(3)]


@pytest.mark.default("rrelu in evaluation-tp2")
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_distributions_match_torch(name: str, placed: str) -> None:
    expected = Net()
    optimizer = sgd(expected)
    losses: list[float] = []
    for number in range(3):
        optimizer.zero_grad()
        loss = LOSSES[name](expected, *data(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert trained(placed, LOSSES[name]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.default("rrelu")
@pytest.mark.parametrize("name", DRAWN)
def test_random_draws_do_not_depend_on_placement(name: str) -> None:
    first = trained("single", DRAWN[name])
    for placed in PLACED:
        assert trained(placed, DRAWN[name]) == pytest.approx(first, rel=1e-5)


def test_cauchy_and_rrelu_draws_follow_their_distributions() -> None:
    """Compares quantiles of Cauchy draws with torch's `icdf`, and the range and mean of rrelu
    slopes."""

    def drawn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = distributions.Cauchy(x, 2 * torch.ones(())).rsample()
        return wide, F.rrelu(x - 1, 0.2, 0.4, training=True), F.rrelu(x + 1, training=True)

    dt.manual_seed(0)
    wide, slopes, above = (
        y.full_tensor() for y in dt.compile(drawn, dt.Mesh())(torch.zeros(20_000))
    )
    for p in (0.1, 0.25, 0.5, 0.75, 0.9):
        limit = distributions.Cauchy(0.0, 2.0).icdf(torch.tensor(p))
        assert float((wide < limit).float().mean()) == pytest.approx(p, abs=0.02)
    assert float(slopes.min()) >= -0.4 and float(slopes.max()) <= -0.2
    assert float(slopes.mean()) == pytest.approx(-0.3, abs=0.01)
    assert torch.equal(above, torch.ones(20_000))


BAD: dict[str, tuple[Loss, str]] = {
    "gaussian": (lambda m, x, y: F.gaussian_nll_loss(m(x)[:, :3], y, y.square() + x[:, :3]), "var"),
    "scale": (
        lambda m, x, y: -distributions.Normal(m(x)[:, :3], x[:, :3]).log_prob(y).mean(),
        "Expected parameter scale of distribution Normal",
    ),
    "sample": (
        lambda m, x, y: -distributions.Exponential(m(x)[:, :3].exp()).log_prob(x[:, :3]).mean(),
        "Expected value argument of distribution Exponential",
    ),
    "early": (  # what is checked is read before it is checked, and not after
        lambda m, x, y: (distributions.Gumbel(m(x)[:, :3], x[:, :3]).rsample() - y).square().mean(),
        "Expected parameter scale of distribution Gumbel",
    ),
}


@pytest.mark.default("gaussian-single")
@pytest.mark.parametrize("placed", ["single", "dp2 microbatches", "tp2"])
@pytest.mark.parametrize("name", BAD)
def test_values_that_torch_rejects_fail_the_step_and_change_nothing(name: str, placed: str) -> None:
    """Later steps equal those of a run without the failed step."""
    loss, text = BAD[name]
    good = [(x.abs() + 0.1, y) for x, y in map(data, range(2))]
    bad = (good[0][0].clone(), good[0][1])
    bad[0][-1, 1] = -50.0
    found: list[list[float]] = []
    for tries in (False, True):
        _, model, step = start(placed, loss)
        with dt.launch(model.mesh):
            losses = [float(step(*good[0]))]
            if tries:
                with pytest.raises(Exception, match=text):
                    float(step(*bad))
            found.append([*losses, float(step(*good[1]))])
    assert found[0] == found[1]


@torch.library.custom_op("distributions::ctc", mutates_args=())
def ctc(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the CTC losses [b] and their gradients by log_probs [t b c]."""
    given = (log_probs, targets, lengths.tolist(), target_lengths.tolist())
    losses, alpha = torch.ops.aten._ctc_loss(*given)
    by = torch.ops.aten._ctc_loss_backward(torch.ones_like(losses), *given, losses, alpha, 0)
    return losses, by


@ctc.register_fake
def _(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def _ctc_setup(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _ctc_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    return ctx.saved_tensors[0] * grad[:, None], None, None, None


ctc.register_autograd(_ctc_backward, setup_context=_ctc_setup)
dt.rule("distributions::ctc", "t! b c!, b s!, b, b -> b, t! b c!")


@pytest.mark.default("tp2")
@pytest.mark.parametrize("placed", PLACED)
def test_ctc_loss_written_as_error_fix_advises_matches_torch(placed: str) -> None:
    def rows(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, None, :].expand(-1, 5, -1).transpose(0, 1).log_softmax(-1) * 1.0

    def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        targets, lengths = y.argsort(-1) + 1, torch.full((x.shape[0],), 5)
        return ctc(rows(model, x), targets, lengths, lengths - 3)[0].mean()

    expected = Net()
    optimizer = sgd(expected)
    losses: list[float] = []
    for number in range(3):
        x, y = data(number)
        optimizer.zero_grad()
        lengths = torch.full((8,), 5)
        found = F.ctc_loss(
            rows(expected, x), y.argsort(-1) + 1, lengths, lengths - 3, reduction="none"
        )
        found.mean().backward()
        optimizer.step()
        losses.append(found.mean().item())
    assert trained(placed, written) == pytest.approx(losses, rel=1e-5)
