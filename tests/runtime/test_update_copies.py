"""What an update copies of the gradients is what its program says, counted as it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import Call, Label
from dtensor.daft.ir.host_program import HostProgram
from dtensor.runtime.optimizer import shard_optimizer
from dtensor.runtime.optimizer.shard_optimizer import ShardOptimizer
from tests.api.precision import build
from tests.models import GPT, batch
from tests.training import MEGATRON, Run, sgd

BF16 = torch.bfloat16


def said(program: HostProgram) -> list[int]:
    """By rank, the bytes that its program states."""
    functions = dict(program.functions)
    found: list[int] = []
    for rank in program.ranks.values():
        calls = [
            i.fn for i in rank.instructions if isinstance(i, Call) and i.label == Label("update")
        ]
        text = "".join(functions[name].source for name in calls)
        stated = re.search(r"copies (\d+) B of gradients", text)
        found.append(int(stated[1]) if stated else 0)
    return found


def counted(run: Run, one: Any) -> tuple[list[int], list[int], list[int]]:
    """By rank: what is said, the bytes of gradients that a kernel does not read where they were
    made, and those of all."""
    copied: list[int] = []
    whole: list[int] = []
    plain_step, plain_update = ShardOptimizer.step, shard_optimizer._update
    now: dict[str, Any] = {}

    def step(self: ShardOptimizer, what: Any, shards: Any, options: Any, *more: Any) -> None:
        now.update(own=self, gradients=more[0])
        plain_step(self, what, shards, options, *more)

    def update(optimizer: Any, given: Any, clip: Tensor | None) -> None:
        gradients: Mapping[str, Tensor] = now["gradients"]
        total = 0
        flat = {id(parameter): gradient for parameter, gradient in given}
        for name, gradient in gradients.items():
            read = flat[id(now["own"].run_of[name].parameter)]
            if read.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr():
                total += gradient.nbytes
        copied.append(total)
        whole.append(sum(g.nbytes for g in gradients.values()))
        plain_update(optimizer, given, clip)

    with pytest.MonkeyPatch.context() as patch, dt.launch(run.mesh) as session:
        patch.setattr(ShardOptimizer, "step", step)
        patch.setattr(shard_optimizer, "_update", update)
        for _ in range(2):
            copied.clear()
            whole.clear()
            float(run.step(*one))
        worker = session.cluster._worker  # type: ignore[attr-defined]
        (engine,) = worker.engines.values()
        stated = said(engine.program)
        run.state()
    return stated, copied, whole


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=128, width=128, layers=1, tied=False)


def rmsprop(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(module.parameters())


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    bare = [p for n, p in module.named_parameters() if p.dim() == 1]
    decayed = [p for n, p in module.named_parameters() if p.dim() > 1]
    return torch.optim.AdamW([dict(params=bare, weight_decay=0.0), dict(params=decayed)])


CASES: dict[str, dict[str, Any]] = {
    "one": dict(mesh=dt.Mesh()),
    "one_clip": dict(mesh=dt.Mesh(), clip_grad_norm=1.0),
    "kept": dict(mesh=dt.Mesh(), clip_grad_norm=1.0, keep_gradients=True),
    "microbatches": dict(mesh=dt.Mesh(), clip_grad_norm=1.0, schedule=dt.GPipe(2)),
    "tp2": dict(mesh=dt.Mesh(tp=2), pins=MEGATRON, clip_grad_norm=1.0),
    "groups": dict(mesh=dt.Mesh(dp=2), make=two_groups),
    "rmsprop": dict(mesh=dt.Mesh(dp=2), make=rmsprop),
    "rmsprop_clip": dict(mesh=dt.Mesh(dp=2), make=rmsprop, clip_grad_norm=1.0),
    **{f"zero{n}": dict(mesh=dt.Mesh(dp=2), zero=n, clip_grad_norm=1.0) for n in range(4)},
    "masters": dict(mesh=dt.Mesh(dp=2), zero=1, master_weights=True, clip_grad_norm=1.0),
    "narrow_sgd": dict(mesh=dt.Mesh(dp=2), make=sgd, clip_grad_norm=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_copies_are_counted(case: str) -> None:
    narrow = case in ("masters", "narrow_sgd")
    run = build(**CASES[case], module=gpt().to(BF16) if narrow else gpt())
    stated, copied, whole = counted(run, batch(vocab=128))
    assert stated == copied
    share = max(c / w for c, w in zip(copied, whole, strict=True))
    if case in ("kept", "rmsprop_clip", "narrow_sgd"):
        assert share == 1  # they are returned, or divided before
    else:
        assert 0 < share < 0.05  # biases and norms


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_bucket_is_read_where_it_is(level: int) -> None:
    """Its parts stand as the parameters do: nothing is copied of it."""
    torch.manual_seed(0)

    def loss(model: nn.Linear, x: Tensor) -> Tensor:
        return model(x).square().mean()

    run = build(dt.Mesh(dp=2), module=nn.Linear(32, 64), zero=level, loss=loss, clip_grad_norm=1.0)
    stated, copied, whole = counted(run, (torch.randn(8, 32),))
    assert stated == copied == [0, 0] and min(whole) > 0
