"""Tests recomputation in the plan: which values are saved, which ops run again, and what never
runs twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Redistribute
from tests.models import GPT, MLP, DropoutGPT, batch, loss_fn
from tests.plans import MEGATRON, mean_square
from tests.training import TWO_STAGES

Globs = Sequence[str]


def plan_of(
    module: nn.Module,
    recompute: Globs | None,
    mesh: dt.Mesh | None = None,
    pins: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] = mean_square,
    given: Sequence[Tensor] = (torch.empty(4, 16, device="meta"),),
    schedule: dt.Schedule | None = None,
    **options: Any,
) -> Plan:
    mesh = mesh or dt.Mesh()
    model = dt.parallelize(module, mesh, pins or {}, **options)
    step = dt.train_step(
        model,
        loss,
        torch.optim.AdamW(module.parameters()),
        inputs=dict(dp=dt.Row()) if "dp" in mesh.axes else None,
        schedule=schedule,
        recompute=recompute,
    )
    plan = step.plan(*given)
    plan.verify()
    return plan


def gpt(recompute: Globs | None = ("blocks.*",), *args: Any, **options: Any) -> Plan:
    return plan_of(GPT(), recompute, *args, loss=loss_fn, given=batch(), **options)


def again(plan: Plan) -> list[Compute]:
    return [
        s
        for s in plan.steps
        if isinstance(s, Compute) and s.op.phase == "forward" and s.phase == "backward"
    ]


def section(plan: Plan) -> str:
    text = str(plan)
    return text[text.index("\nrecompute ") + 1 : text.index("\nmemory per rank")].rstrip()


# -- what is kept --------------------------------------------------------------------------------


def test_recomputed_megatron_block_saves_its_input_and_all_reduced_sum() -> None:
    plan = gpt(["blocks.*"], dt.Mesh(tp=2), MEGATRON)
    assert plan.collectives == plan.plain.collectives  # type: ignore[union-attr]
    inside = [r for r in plan.regions if r.name == "blocks.1"]
    assert [(r.saved, r.communicated) for r in inside] == [
        (("mm_5_reduced", "add_4"), ("mm_5_reduced",))
    ]
    assert "not communicated again" not in section(gpt())
    assert "saved for blocks.0: to compute it again it would be" in plan.explain("mm_1_reduced")
    assert "not kept for the backward of blocks.0: see h_again" in plan.explain("h")
    assert "recomputed in the backward of blocks.0" in plan.explain("h_again")


def test_plan_with_recompute_states_saved_memory_and_repeated_flop() -> None:
    plan, plain = gpt(), gpt(None)
    assert plan.plain == plain and plain.regions == () and plain.plain is None
    assert plan.memory[0].activations < 0.65 * plain.memory[0].activations
    more = sum(r.flops for r in plan.regions)
    assert more == sum(s.flops for s in again(plan)) > 0
    assert plan.cost.compute_seconds > plain.cost.compute_seconds
    text = re.sub(" +", " ", str(plan))
    assert f"\n without recompute {plain.memory[0].activations / 1024:.1f} KiB\n" in text
    assert f"; recomputed {more / 1000:.2f} kFLOP of it\n" in text


@pytest.mark.slow
def test_recompute_in_pipeline_lowers_memory_of_every_stage() -> None:
    given: dict[str, Any] = dict(
        schedule=dt.OneFOneB(4), stages=TWO_STAGES, loss=loss_fn, given=batch(0, 16, 16)
    )
    plan, plain = (plan_of(GPT(), g, dt.Mesh(pp=2), **given) for g in (["blocks.*"], None))
    assert (plan.schedule, plan.in_flight) == (plain.schedule, plain.in_flight)
    assert plan.collectives == plain.collectives
    assert [(r.name, r.stage) for r in plan.regions] == [("blocks.0", 0), ("blocks.1", 1)]
    assert {s.stage for s in again(plan)} == {0, 1} and not any(s.once for s in again(plan))
    # the last stage holds one microbatch of one block, and all of it while it is recomputed
    assert plan.memory[0].activations < 0.75 * plain.memory[0].activations
    assert plan.memory[1].activations <= plain.memory[1].activations
    assert "blocks.1          stage 1, 1 region\n" in section(plan)


def test_zero_3_gathers_parameters_once_for_recompute_and_backward() -> None:
    """Recomputed ops read the parameters that the backward gathers anyway."""
    options = dict(zero={"dp": 3})
    plan, plain = gpt(["blocks.*"], dt.Mesh(dp=2), **options), gpt(None, dt.Mesh(dp=2), **options)

    def gathers(one: Plan, phase: str) -> list[set[str]]:
        found = [s for s in one.steps if isinstance(s, Redistribute) and s.bucket]
        return [set(s.of) for s in found if s.kind == "all_gather" and s.phase == phase]

    assert gathers(plan, "forward") == gathers(plain, "forward")
    more, few = gathers(plan, "backward"), gathers(plain, "backward")
    assert len(more) == len(few) and all(a >= b for a, b in zip(more, few, strict=True))
    biases = {f"blocks.{i}.{part}.bias" for i in (0, 1) for part in ("attn.qkv", "mlp.up")}
    assert biases <= set().union(*more) - set().union(*few)


# -- which ops are a region ------------------------------------------------------------------------


def test_nested_recompute_matches_use_outermost_module() -> None:
    found = [[r.name for r in gpt([g]).regions] for g in ("blocks.1*", "*.mlp", "*.up")]
    assert found == [
        ["blocks.1"],
        ["blocks.0.mlp", "blocks.1.mlp"],
        ["blocks.0.mlp.up", "blocks.1.mlp.up"],
    ]


def test_region_with_nothing_to_recompute_is_reported() -> None:
    """The backward of a matrix product reads only the input of the region."""
    plan = gpt(["*"])
    assert [r.name for r in plan.regions if r.repeated] == ["blocks.0", "blocks.1", "norm"]
    assert [r.name for r in plan.regions if not r.repeated] == ["embed", "positions", "head"]
    nothing = "3 regions: the backward reads nothing that runs again"
    assert re.search(rf"\n  embed, positions, head +{nothing}\n", str(plan))
    assert gpt(["head"]).steps == gpt(None).steps


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))

    def tail(self, x: Tensor) -> Tensor:
        return torch.sin(self.blocks[2](x) * x)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = x + self.blocks[1](x)
        return checkpoint(self.tail, x, use_reentrant=False)


def test_torch_checkpoint_in_model_is_recomputed_region() -> None:
    plan = plan_of(Checkpointed(), None)
    assert [r.name for r in plan.regions] == ["blocks.0", "checkpoint 1"]
    assert "sin" not in {s.op.name for s in again(plan)}  # its result leaves the region
    assert plan.memory[0].activations < plan.plain.memory[0].activations  # type: ignore[union-attr]
    stated = plan_of(Checkpointed(), ["blocks.*"])
    # a stated module is its own region; the rest of the checkpoint is another region
    names = [r.name for r in stated.regions]
    assert names == ["blocks.0", "blocks.1", "blocks.2", "checkpoint 1"]


def test_each_call_of_shared_module_is_separate_region() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    regions = plan_of(Shared(), ["block"]).regions
    assert [(r.name, r.num_ops) for r in regions] == [("block", 3), ("block@1", 3)]
    assert regions[0].flops == regions[1].flops > 0


# -- what may not be done twice --------------------------------------------------------------------


def test_recompute_updates_batch_norm_statistics_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x))

    plan = plan_of(Normed(), ["block"])
    assert any("batch_norm" in s.op.call.name for s in again(plan))
    for output in plan.outputs:
        assert output.kind != "mutation" or "_again" not in output.values[0][1]
    changed = {v for o in plan.outputs if o.kind == "mutation" for _, v in o.values}
    assert len(changed) == 3  # running mean, running var, the number of batches
    repeated = {n.removesuffix("_again") for s in again(plan) for n in s.gives}
    assert not changed & repeated


@pytest.mark.slow
def test_recomputed_dropout_draws_same_random_numbers() -> None:
    plan = plan_of(DropoutGPT(), ["blocks.*"], loss=loss_fn, given=batch())
    twice = [s.op.name for s in again(plan) if "dropout" in s.op.call.name]
    assert len(twice) == 6  # all three of each block: masks are not kept
    calls = {s.op.name: s.op.call for s in plan.steps if isinstance(s, Compute)}
    assert all(s.op.call == calls[s.op.name] for s in again(plan))


def test_recompute_does_not_change_forward_only_plan() -> None:
    model = dt.parallelize(GPT(), dt.Mesh(tp=2), MEGATRON, recompute=["blocks.*"])
    found = dt.compile(lambda m, x: m(x), dt.Mesh(tp=2)).plan(model, batch()[0])
    assert found.regions == () and found.plain is None
    assert "recompute" not in str(found)


def test_recompute_in_parallelize_equals_recompute_in_train_step() -> None:
    module = GPT()
    model = dt.parallelize(module, dt.Mesh(), {}, recompute=["blocks.*"])
    step = dt.train_step(model, loss_fn, torch.optim.AdamW(module.parameters()))
    assert step.plan(*batch()) == gpt()
