"""Tests that an update copies as many gradient bytes as its program states."""

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
from tests.models import GPT, batch
from tests.plans import mean_square
from tests.training import Placed, Run, sgd


def said(program: HostProgram) -> list[int]:
    """Return, by rank, the copied bytes that its program states."""
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
    """Return, by rank: the stated bytes, the bytes of gradients that kernels read from a copy,
    and the bytes of all gradients."""
    copied: list[int] = []
    whole: list[int] = []
    plain_step, plain_update = ShardOptimizer.step, shard_optimizer.update
    now: list[tuple[ShardOptimizer, Mapping[str, Tensor]]] = []

    def step(self: ShardOptimizer, what: Any, shards: Any, options: Any, *more: Any) -> None:
        now[:] = [(self, more[0])]
        plain_step(self, what, shards, options, *more)

    def update(optimizer: Any, given: Any, *more: Any) -> None:
        [(own, gradients)] = now
        flat = {id(parameter): gradient.untyped_storage() for parameter, gradient in given}
        read = {n: flat[id(own.buffer_by_name[n].parameter)].data_ptr() for n in gradients}
        moved = [g for n, g in gradients.items() if g.untyped_storage().data_ptr() != read[n]]
        copied.append(sum(g.nbytes for g in moved))
        whole.append(sum(g.nbytes for g in gradients.values()))
        plain_update(optimizer, given, *more)

    with pytest.MonkeyPatch.context() as patch, dt.launch(run.mesh) as session:
        patch.setattr(ShardOptimizer, "step", step)
        patch.setattr(shard_optimizer, "update", update)
        for _ in range(2):
            copied.clear()
            whole.clear()
            float(run.step(*one))
        worker = session.cluster._worker  # type: ignore[attr-defined]
        (engine,) = worker.engines.values()
        run.state()
    return said(engine.program), copied, whole


def rmsprop(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(module.parameters())


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    bare = [p for n, p in module.named_parameters() if p.dim() == 1]
    decayed = [p for n, p in module.named_parameters() if p.dim() > 1]
    return torch.optim.AdamW([dict(params=bare, weight_decay=0.0), dict(params=decayed)])


DP2_EP2 = Placed(axes=dict(dp=2, ep=2), inputs=dict(dp=dt.Row(), ep=dt.Row()))
CASES: dict[str, tuple[str | Placed, dict[str, Any]]] = {
    "one": ("single", dict(clip=None)),
    "one_clip": ("single", {}),
    "kept": ("single", dict(keep_gradients=True)),
    "microbatches": ("single", dict(schedule=dt.GPipe(2))),
    "tp2": ("tp2", {}),
    "groups": ("dp2", dict(make=two_groups, clip=None)),
    "rmsprop": ("dp2", dict(make=rmsprop, clip=None)),
    "rmsprop_clip": ("dp2", dict(make=rmsprop)),
    **{f"zero{n}": ("dp2", dict(zero={"dp": n})) for n in range(4)},
    **{f"zero{n}_two_axes": (DP2_EP2, dict(zero={"dp": n, "ep": n})) for n in (1, 2, 3)},
    "masters": ("dp2", dict(zero={"dp": 1}, master_weights=True)),
    "narrow_sgd": ("dp2", dict(make=sgd)),
}


@pytest.mark.default("rmsprop_clip")
@pytest.mark.parametrize("case", CASES)
def test_bytes_copied_by_update_equal_bytes_stated_in_program(case: str) -> None:
    name, stated = CASES[case]
    torch.manual_seed(0)
    module = GPT(vocab=128, width=128, layers=1, tied=False)
    if case in ("masters", "narrow_sgd"):
        module = module.to(torch.bfloat16)
    run = Run.of(name, module=module, **{"schedule": dt.GPipe(1), **stated})
    stated_bytes, copied, whole = counted(run, batch(vocab=128))
    assert stated_bytes == copied
    share = max(c / w for c, w in zip(copied, whole, strict=True))
    if case in ("kept", "rmsprop_clip", "narrow_sgd"):
        assert share == 1  # returned, or divided first
    else:
        assert 0 < share < 0.05  # biases and norms


@pytest.mark.default("2", "3")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_update_reads_zero_gradient_bucket_without_copy(level: int) -> None:
    """The parts of the bucket have the layout of the parameters, so nothing is copied."""
    given = dict(module=nn.Linear(32, 64), loss=mean_square, schedule=dt.GPipe(1))
    run = Run.of("dp2", zero={"dp": level}, **given)
    stated, copied, whole = counted(run, (torch.randn(8, 32),))
    assert stated == copied == [0, 0] and min(whole) > 0
