"""Helpers for training tests: parallel training, and the plain torch reference.

    assert_trains_as_torch("tp2_pp2", batches(3), schedule=dt.GPipe(4))     # losses, weights, state
    run = Run.of("tp2_pp2", zero={"dp": 1}, make=sgd)                       # the same in parts
    with dt.launch(run.mesh):
        losses, state = run.losses(data), run.state()
    model = make_model()
    assert_losses_close(losses, train_torch(model, sgd(model), data, clip=1.0))

Every model starts from the same weights, with a loss near ln 32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.runtime.optimizer import shard_optimizer
from tests.models import GPT, batch, loss_fn

Stated = Mapping[str, dt.Placement]

MEGATRON: dict[str, Stated] = {
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
TWO_STAGES = {"pp": [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement of a GPT with two layers."""

    axes: Mapping[str, int]
    pins: Mapping[str, Stated] = field(default_factory=dict)
    inputs: Stated | None = None
    stages: Mapping[str, Sequence[Sequence[str]]] | None = None

    @property
    def mesh(self) -> dt.Mesh:
        return dt.Mesh(**self.axes)


SIX: dict[str, Placed] = {
    "single": Placed(axes={}),
    "dp2": Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row())),
    "tp2": Placed(axes=dict(tp=2), pins=MEGATRON),
    "pp2": Placed(axes=dict(pp=2), stages=TWO_STAGES),
    "tp2_pp2": Placed(axes=dict(pp=2, tp=2), pins=MEGATRON, stages=TWO_STAGES),
    "dp2_tp2": Placed(axes=dict(dp=2, tp=2), pins=MEGATRON, inputs=dict(dp=dt.Row())),
}
FOUR: dict[str, Placed] = {
    "tp4": Placed(axes=dict(tp=4), pins=MEGATRON),
    "dp4": Placed(axes=dict(dp=4), inputs=dict(dp=dt.Row())),
}

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[nn.Module], Optimizers]


def make_model(**options: Any) -> nn.Module:
    """Return a GPT with small embeddings, so that the initial loss is near ln 32."""
    torch.manual_seed(0)
    model = GPT(**options)
    with torch.no_grad():
        model.embed.weight.mul_(0.1)
        model.positions.weight.mul_(0.1)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]


def batches(count: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    return [batch(seed, **options) for seed in range(count)]


def train_torch(
    model: nn.Module,
    optimizer: Optimizers,
    data: Sequence[Sequence[Tensor]],
    *,
    loss: Callable[..., Any] = loss_fn,
    clip: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    masters: nn.Module | None = None,
    delay: int = 0,
) -> list[float]:
    """Train the model in plain torch and return the losses. ``masters``: a float32 copy of the
    model, which the optimizer updates and ``model`` follows. ``delay``: 1 to update with the
    gradients of the batch before; the last ones are put into the optimizer's state."""
    losses: list[float] = []
    delayed: dict[int, Tensor] = {}
    updated = model if masters is None else masters
    optimizers = listed(optimizer)
    for one in data:
        value = loss(model, *one)
        value = value[0] if isinstance(value, tuple) else value
        for each in optimizers:
            each.zero_grad()
        value.backward()
        for p, q in zip(model.parameters(), updated.parameters(), strict=True):
            if masters is not None and p.grad is not None:
                q.grad, p.grad = p.grad.float(), None
        if delay:
            gradients = {id(p): p.grad for p in updated.parameters() if p.grad is not None}
            for p in updated.parameters():
                p.grad = delayed.get(id(p)) if id(p) in gradients else None
            delayed = gradients
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(updated.parameters(), clip)
        for each in optimizers:
            each.step()
        if masters is not None:
            model.load_state_dict(masters.state_dict())
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    for each in optimizers:
        for p in (p for group in each.param_groups for p in group["params"] if id(p) in delayed):
            each.state[p]["delayed_gradient"] = delayed[id(p)]
    return losses


def gradients_of(
    model: nn.Module, one: Sequence[Tensor], loss: Callable[..., Any] = loss_fn
) -> dict[str, Tensor]:
    """Return plain torch's gradients of one batch."""
    value = loss(model, *one)
    (value[0] if isinstance(value, tuple) else value).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A parallelized model, its optimizer and its step."""

    mesh: dt.Mesh
    module: nn.Module
    model: dt.ParallelModule
    optimizer: Optimizers
    step: dt.TrainStep

    @staticmethod
    def of(
        placed: str | Placed,
        *,
        module: nn.Module | None = None,
        make: MakeOptimizer = adamw,
        loss: Callable[..., Any] = loss_fn,
        schedule: dt.Schedule | None = None,
        clip: float | None = 1.0,
        zero: Mapping[str, int | str] | None = None,
        **stated: Any,
    ) -> Run:
        """Build the model, optimizer and step. ``stated``: other arguments of `dt.train_step`."""
        where = {**SIX, **FOUR}[placed] if isinstance(placed, str) else placed
        module = make_model() if module is None else module
        model = dt.parallelize(module, where.mesh, where.pins, stages=where.stages, zero=zero)
        optimizer = make(module)
        step = dt.train_step(
            model,
            loss,
            optimizer,
            inputs=where.inputs,
            schedule=schedule or dt.OneFOneB(microbatches=2),
            clip_grad_norm=clip,
            **stated,
        )
        return Run(mesh=where.mesh, module=module, model=model, optimizer=optimizer, step=step)

    def losses(self, data: Sequence[Sequence[Tensor]]) -> list[float]:
        """Call all steps before reading the first loss."""
        return [float(loss) for loss in [self.step(*one) for one in data]]

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.optimizer)


def assert_trains_as_torch(
    placed: str | Placed,
    data: Sequence[Sequence[Tensor]] | None = None,
    *,
    build: Callable[[], nn.Module] = make_model,
    make: MakeOptimizer = adamw,
    loss: Callable[..., Any] = loss_fn,
    clip: float | None = 1.0,
    limit: float = 2e-6,
    atol: float = 5e-5,
    part: float | None = None,
    backend: Any = "inprocess",
    **stated: Any,
) -> Run:
    """Train on ``data`` in parallel and in plain torch, and compare losses, weights and state.
    ``build`` makes the module twice with the same weights. ``limit`` is the tolerance of losses;
    ``atol`` or ``part`` (`assert_states_close`) that of weights and optimizer state. ``stated``:
    other arguments of `dt.train_step`, such as ``schedule`` and ``zero``."""
    data = batches(3) if data is None else data
    run = Run.of(placed, module=build(), make=make, loss=loss, clip=clip, **stated)
    with dt.launch(run.mesh, backend=backend):
        losses = run.losses(data)
        state = run.state()
    plain = build()
    masters = deepcopy(plain).float() if stated.get("master_weights") else None
    updated = plain if masters is None else masters
    optimizer = make(updated)
    delay = stated.get("delay", 0)
    expected = train_torch(
        plain, optimizer, data, loss=loss, clip=clip, masters=masters, delay=delay
    )
    assert_losses_close(losses, expected, limit)
    start = build().state_dict()
    assert_states_close(state["model"], plain.state_dict(), atol, start=start, part=part)
    names = {p: n for n, p in updated.named_parameters()}
    gathered = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
    for each, own in zip(listed(optimizer), gathered, strict=True):
        order = [names[p] for group in each.param_groups for p in group["params"]]
        found, wanted = own["state"], each.state_dict()["state"]
        assert set(found) == set(wanted), "optimizer state"
        for i, entry in wanted.items():  # sums of 16-bit gradients are wider than torch's
            if "delayed_gradient" in entry:
                dtype = entry["delayed_gradient"].dtype
                found[i]["delayed_gradient"] = found[i]["delayed_gradient"].to(dtype)
        a, b = ({order[i]: entry for i, entry in entries.items()} for entries in (found, wanted))
        assert_states_close(a, b, atol, "optimizer", part=part)
    return run


# -- comparisons ---------------------------------------------------------------------------------


def assert_gradients_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = 1e-5
) -> None:
    """Assert that each gradient is within ``limit``, relative to its largest value."""
    assert set(found) == set(expected)
    for name in expected:
        scale = expected[name].abs().max().item()
        error = (found[name] - expected[name]).abs().max().item()
        assert error <= limit * scale, f"{name}: {error:.3e} of {scale:.3e}"


def assert_losses_close(
    found: Sequence[float], expected: Sequence[float], limit: float = 2e-6
) -> None:
    """Assert that each loss is within ``limit``, relative for losses above 1."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= limit * max(1.0, abs(b)), f"step {i}: {a!r} for {b!r}"


def assert_states_close(
    found: Any,
    expected: Any,
    atol: float = 5e-5,
    where: str = "state",
    *,
    start: Any = None,
    part: float | None = None,
) -> None:
    """Compare nested dicts of tensors and numbers: each element within ``atol``, or, with ``part``,
    the norm of each tensor's error within this fraction of the norm of its change since ``start``.
    Biases of keys are left out: their gradients are only rounding errors, which AdamW scales up."""
    if isinstance(expected, Mapping):
        assert set(found) >= set(expected), f"{where}: {set(found) ^ set(expected)}"
        for key in expected:
            if not str(key).endswith("qkv.bias"):
                below = start[key] if start else None
                assert_states_close(
                    found[key], expected[key], atol, f"{where}.{key}", start=below, part=part
                )
    elif not isinstance(expected, Tensor):
        assert found == expected, f"{where}: {found!r} for {expected!r}"
    elif part is None:
        torch.testing.assert_close(
            found, expected, rtol=0, atol=atol, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        change = expected.double() - (0 if start is None else start.double())
        error, whole = (found.double() - expected.double()).norm(), change.norm()
        assert error <= part * whole, f"{where}: {error:.3e} of {whole:.3e}"


def assert_same_bits(found: Any, expected: Any, where: str = "state") -> None:
    """Assert that nested dicts, lists and tensors are bitwise equal."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.dtype == expected.dtype, where
        assert torch.equal(found, expected), f"{where} differs"
    elif isinstance(expected, Mapping):
        assert set(found) == set(expected), f"{where}: {set(found) ^ set(expected)}"
        for key in expected:
            assert_same_bits(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(a, b, f"{where}[{i}]")
    else:
        assert found == expected, f"{where}: {found!r} for {expected!r}"


def failing_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is empty until a test puts n into it: then the n-th update of a rank in
    this process raises ArithmeticError after its kernel, and the list is empty again."""
    update, until = shard_optimizer.update, list[int]()

    def failing(*given: object) -> None:
        update(*given)  # type: ignore[arg-type]
        if until:
            until[0] -= 1
            if until[0] == 0:
                until.clear()
                raise ArithmeticError("after the kernel")

    monkeypatch.setattr(shard_optimizer, "update", failing)
    return until
