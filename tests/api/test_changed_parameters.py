"""Parameters that forward changes in place are state, as buffers are, and match plain torch under
any placement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.training import train_torch


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class MoCo(nn.Module):
    """MoCo (He et al. 2020, arXiv 1911.05722): the key encoder follows the query encoder and is not
    trained."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = Encoder()
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.follow = follow

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q(x)
        with torch.no_grad():
            for own, key in zip(self.q.parameters(), self.k.parameters(), strict=True):
                self.follow(own, key)
            k = self.k(x)
        return (q - k - 1).square().mean() + F.cross_entropy(q, y)


def by_data(q: nn.Parameter, k: nn.Parameter) -> None:
    k.data = k.data * 0.9 + q.data * (1.0 - 0.9)


WRITES: dict[str, Callable[[nn.Parameter, nn.Parameter], object]] = {
    "data = ": by_data,
    "data.mul_": lambda q, k: k.data.mul_(0.9).add_(q.data, alpha=0.1),
    "mul_": lambda q, k: k.mul_(0.9).add_(q, alpha=0.1),
    "lerp_": lambda q, k: k.lerp_(q, 0.1),
    "copy_": lambda q, k: k.copy_(q),
}


class Constrained(nn.Module):
    """A model that bounds the norm of a trained weight, as EEGNet (Lawhern et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = Encoder()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.q.down.weight.data = torch.renorm(self.q.down.weight.data, 2, 0, 0.3)
        return F.cross_entropy(self.q(x), y)


TP = {"*up.weight": dict(tp=dt.Row()), "*down.weight": dict(tp=dt.Column())}
STAGES = {"pp": [["*up*"], ["*down*"]]}
PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, Any]]] = {
    "tp2": (dt.Mesh(tp=2), dict(placements=TP), {}),
    "zero1": (dt.Mesh(dp=2), dict(placements={}, zero={"dp": 1}), {}),
    "zero3": (dt.Mesh(dp=2), dict(placements={}, zero={"dp": 3}), {}),
    "pp2": (
        dt.Mesh(pp=2),
        dict(placements={}, stages=STAGES),
        dict(schedule=dt.OneFOneB(microbatches=2)),
    ),
    "auto": (
        dt.Mesh(pp=2),
        dict(placements={}, stages="auto"),
        dict(schedule=dt.OneFOneB(microbatches=2)),
    ),
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def made(placed: str, net: nn.Module, **options: Any) -> tuple[dt.ParallelModule, Any]:
    mesh, how, schedule = PLACED[placed]
    inputs = dict(dp=dt.Row()) if "dp" in mesh.shape else None
    model = dt.parallelize(net, mesh, **how)
    return model, dt.train_step(model, loss_fn, adamw(net), inputs=inputs, **schedule, **options)


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(4, 4, generator=g), torch.tensor([0, 1, 2, 3])


def reference(net: nn.Module, steps: int, clip: float | None = None) -> list[float]:
    """Train ``net`` in plain torch and return the losses."""
    return train_torch(net, adamw(net), [batch()] * steps, loss=loss_fn, clip=clip)


def check_same(net: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.default("zero3-copy_")
@pytest.mark.parametrize(
    ("placed", "write"),
    [(placed, "data = ") for placed in PLACED]
    + [(placed, write) for placed in ("tp2", "zero3") for write in list(WRITES)[1:]],
)
def test_moco_key_encoder_written_in_forward_matches_torch(placed: str, write: str) -> None:
    net = MoCo(WRITES[write])
    plain = copy.deepcopy(net)
    _, step = made(placed, net)
    losses = [float(step(*batch())) for _ in range(3)]
    assert losses == pytest.approx(reference(plain, 3), abs=1e-5)
    check_same(net, plain)


@pytest.mark.default("pp2")
@pytest.mark.parametrize("placed", ["tp2", "zero1", "zero3", "pp2"])
def test_trained_parameter_written_in_forward_matches_torch(placed: str) -> None:
    """The gradient is taken at the written value, and the optimizer updates that value."""
    net = Constrained()
    plain = copy.deepcopy(net)
    _, step = made(placed, net, clip_grad_norm=0.5)
    expected = reference(plain, 3, clip=0.5)
    assert [float(step(*batch())) for _ in range(3)] == pytest.approx(expected, abs=1e-5)
    check_same(net, plain)


def test_parameter_written_in_forward_matches_torch_with_capture_each_call() -> None:
    net = MoCo(by_data)
    plain = copy.deepcopy(net)
    _, step = made("tp2", net, capture="each call")
    assert [float(step(*batch())) for _ in range(2)] == pytest.approx(reference(plain, 2), abs=1e-5)
    check_same(net, plain)


@pytest.mark.default("tp2")
@pytest.mark.parametrize("placed", ["tp2", "zero3", "pp2"])
def test_failed_step_leaves_parameters_written_in_forward_unchanged(placed: str) -> None:
    net = MoCo(by_data)
    plain = copy.deepcopy(net)
    model, step = made(placed, net)
    with dt.launch(model.mesh):
        losses = [float(step(*batch()))]
        before = dt.gather_state_dict(model)["model"]
        with pytest.raises(dt.daft.TaskError):
            float(step(batch()[0], torch.tensor([0, 1, 2, 99])))
        torch.testing.assert_close(dt.gather_state_dict(model)["model"], before, rtol=0, atol=0)
        losses.append(float(step(*batch())))
    assert losses == pytest.approx(reference(plain, 2), abs=1e-5)
    check_same(net, plain)


def test_compiled_function_writes_parameters_as_torch_does() -> None:
    net = MoCo(WRITES["mul_"])
    with torch.no_grad():
        net.k.up.weight.add_(1.0)
    plain = copy.deepcopy(net)
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(net, mesh, TP)
    f = dt.compile(loss_fn, mesh)
    with torch.no_grad():
        expected = [plain(*batch()).item() for _ in range(2)]
    assert [float(f(model, *batch())) for _ in range(2)] == pytest.approx(expected, abs=1e-5)
    check_same(net, plain)


@pytest.mark.default("True-zero3")
@pytest.mark.parametrize("placed", ["tp2", "zero1", "zero3"])
@pytest.mark.parametrize("masters", [False, True])
def test_step_trains_on_parameter_written_by_another_program(placed: str, masters: bool) -> None:
    """With master weights, the master takes over the written value. The result equals a run without
    masters within rounding."""
    net = Encoder().bfloat16()
    plain = copy.deepcopy(net)
    mesh, how, _ = PLACED[placed]
    model = dt.parallelize(net, mesh, **how)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    step = dt.train_step(model, lambda m, x: m(x).mean(), opt, master_weights=masters)
    halve = dt.compile(lambda m: m.down.weight.data.mul_(0.5).sum(), mesh)
    x = torch.ones(2, 4).bfloat16()
    for _ in range(2):
        step(x)
        halve(model)
        plain.down.weight.data.mul_(0.5)
    float(step(x))
    check_same(net, plain)


def test_step_writes_parameter_that_another_step_trains() -> None:
    def trained(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.k(x), y)

    net = MoCo(by_data)
    net.k.requires_grad_(True)
    plain = copy.deepcopy(net)
    model = dt.parallelize(net, dt.Mesh(tp=2), TP)
    steps = [
        dt.train_step(model, fn, torch.optim.AdamW(part.parameters(), lr=0.05))
        for fn, part in ((loss_fn, net.q), (trained, net.k))
    ]
    opts = [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (plain.q, plain.k)]
    for _ in range(2):
        for step, opt, fn in zip(steps, opts, (loss_fn, trained), strict=True):
            opt.zero_grad()
            loss = fn(plain, *batch())
            loss.backward()
            opt.step()
            assert float(step(*batch())) == pytest.approx(loss.item(), abs=1e-5)
    check_same(net, plain)


def test_parameter_written_in_forward_is_copied_at_commit() -> None:
    """A buffer would be written in place; a parameter must keep its old value if the step fails."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.seen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.data.copy_(x)
            return self.up(self.seen * 2).square().mean()

    net = Filled()
    model = dt.parallelize(net, dt.Mesh(tp=2), {})
    opt = torch.optim.SGD(net.up.parameters(), lr=0.1)
    step = dt.train_step(model, lambda m, x: m(x), opt)
    x, _ = batch()
    (write,) = step.plan(x).state_writes
    assert (write.of, write.how) == ("seen", "copied")
    step(x)
    torch.testing.assert_close(net.seen.detach(), x)


def test_queue_buffer_indexed_by_tensor_buffer_matches_torch() -> None:
    class Queue(nn.Module):
        queue: Tensor
        place: Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q = nn.Linear(4, 4)
            self.register_buffer("queue", torch.randn(4, 12))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q = self.q(x)
            with torch.no_grad():
                seen = self.queue.clone()
                at = (self.place + torch.arange(4)) % 12
                self.queue.index_copy_(1, at, q.detach().T)
                self.place.copy_((self.place + 4) % 12)
            return (q @ seen).square().mean() + F.cross_entropy(q, y)

    net = Queue()
    plain = copy.deepcopy(net)
    model = dt.parallelize(net, dt.Mesh(tp=2), {})
    step = dt.train_step(model, loss_fn, adamw(net))
    assert [float(step(*batch())) for _ in range(4)] == pytest.approx(reference(plain, 4), abs=1e-4)
    check_same(net, plain)


@pytest.mark.parametrize("order", ["qk", "kq"])
def test_parameter_written_from_another_pipeline_stage_matches_torch(order: str) -> None:
    net = MoCo(WRITES["lerp_"])
    plain = copy.deepcopy(net)
    stages = {"pp": [[f"{name}.*"] for name in order]}
    model = dt.parallelize(net, dt.Mesh(pp=2), {}, stages=stages)
    step = dt.train_step(model, loss_fn, adamw(net), schedule=dt.OneFOneB(microbatches=2))
    assert [float(step(*batch())) for _ in range(4)] == pytest.approx(reference(plain, 4), abs=1e-4)
    check_same(net, plain)
