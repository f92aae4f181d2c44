"""`recompute=` and `torch.utils.checkpoint` in training give the same bits; unsupported uses are
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor.errors import PlanningError
from tests import huggingface
from tests.models import GPT, MLP, Block, DropoutGPT, batch, loss_fn
from tests.training import (
    MEGATRON,
    TWO_STAGES,
    assert_gradients_close,
    assert_same_bits,
)

DROPOUT_PINS: dict[str, Any] = {
    "*.qkv.*": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}


class NormedCheckpoint(nn.Module):
    """Batch norm inside a checkpoint; torch itself would count its batch twice."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU())
        self.head = nn.Linear(32, 32)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.reshape(-1, 16)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x).reshape(*tokens.shape, 32)


def trained(
    module: nn.Module,
    mesh: dt.Mesh,
    pins: Any = None,
    *,
    recompute: list[str] | None = None,
    schedule: dt.Schedule | None = None,
    again: bool = True,
    **options: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Return losses and state of three steps. ``again``: whether the plan must recompute
    something."""
    dt.manual_seed(5)
    model = dt.parallelize(module, mesh, pins or {}, **options)
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        inputs=dict(dp=dt.Row()) if "dp" in mesh.axes else None,
        schedule=schedule,
        clip_grad_norm=1.0,
        recompute=recompute,
    )
    with dt.launch(mesh):
        losses = [float(step(*batch(i, size=8))) for i in range(3)]
        assert bool(step.plan(*batch(0, size=8)).regions) == again
        return losses, dt.gather_state_dict(model, step.optimizer)


CASES: dict[str, Any] = {
    "tp2": dict(mesh=dt.Mesh(tp=2), pins=DROPOUT_PINS),
    "dp2_microbatches": dict(mesh=dt.Mesh(dp=2), schedule=dt.GPipe(2), zero={"dp": 2}),
    "pp2_1f1b": dict(mesh=dt.Mesh(pp=2), stages=TWO_STAGES, schedule=dt.OneFOneB(4)),
    "zero3_microbatches": dict(mesh=dt.Mesh(dp=2), schedule=dt.GPipe(2), zero={"dp": 3}),
    "pp2_halves": dict(mesh=dt.Mesh(pp=2), stages=TWO_STAGES, schedule=dt.ZBH1(4)),
}


def dropout_gpt() -> nn.Module:
    torch.manual_seed(0)
    return DropoutGPT(0.2)


@pytest.mark.default("pp2_1f1b")
@pytest.mark.sample("tp2", "pp2_1f1b", "zero3_microbatches")
@pytest.mark.parametrize("case", CASES)
def test_recomputed_dropout_masks_are_bitwise_equal(case: str) -> None:
    plain = trained(dropout_gpt(), again=False, **CASES[case])
    assert_same_bits(trained(dropout_gpt(), recompute=["blocks.*"], **CASES[case]), plain)


@pytest.mark.default("2")
@pytest.mark.parametrize("dp", [1, 2])
def test_recomputed_batch_norm_updates_statistics_once_per_step(dp: int) -> None:
    runs: list[Any] = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = NormedCheckpoint(checkpointed)
        runs.append(trained(module, dt.Mesh(dp=dp), again=checkpointed))
    assert_same_bits(runs[1], runs[0])
    assert int(runs[1][1]["model"]["block.1.num_batches_tracked"]) == 3


@pytest.mark.slow
def test_apply_activation_checkpointing_is_bitwise_equal() -> None:
    """The wrapper puts another module around each block; state dict names leave it out."""
    runs: list[Any] = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        module = GPT()
        if wrapped:
            apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, Block))
        runs.append(trained(module, dt.Mesh(tp=2), MEGATRON, again=wrapped))
        assert list(runs[-1][1]["model"]) == list(module.state_dict())
    assert_same_bits(runs[1], runs[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.sample("gpt2-False")
@pytest.mark.parametrize(("name", "reentrant"), [("gpt2", False), ("llama", True)])
def test_hugging_face_gradient_checkpointing_saves_memory_and_matches_torch(
    name: str, reentrant: bool
) -> None:
    module = huggingface.build(name)
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    model = dt.parallelize(module, dt.Mesh(tp=2), huggingface.derived(name, 2))
    step = dt.train_step(
        model, huggingface.loss_fn, torch.optim.AdamW(module.parameters()), clip_grad_norm=1.0
    )
    plan = step.plan(*huggingface.batch())
    layer = {"gpt2": "transformer.h.", "llama": "model.layers."}[name]
    assert [r.name for r in plan.regions] == [f"{layer}0", f"{layer}1"]
    assert plan.plain is not None and plan.collectives == plan.plain.collectives
    assert plan.memory[0].activations < 0.6 * plan.plain.memory[0].activations
    with dt.launch(dt.Mesh(tp=2)):
        found = step.gradients(*huggingface.batch())
    assert_gradients_close(found, huggingface.reference(name)[1])


# -- what is refused -------------------------------------------------------------------------------


def refused(recompute: Any, module: nn.Module | None = None) -> str:
    """Return the error, which must be the same from `parallelize` and `train_step`."""
    module = GPT() if module is None else module
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(PlanningError) as caught:
        model = dt.parallelize(module, dt.Mesh(), recompute=recompute)
        dt.train_step(model, loss_fn, optimizer).plan(*batch())
    with pytest.raises(PlanningError) as other:
        model = dt.parallelize(module, dt.Mesh())
        dt.train_step(model, loss_fn, optimizer, recompute=recompute).plan(*batch())
    assert str(caught.value) == str(other.value)
    return str(caught.value)


def test_recompute_pattern_without_match_error_lists_modules() -> None:
    assert_expected_inline(
        refused(["block.*"]),
        """\
the pattern "block.*" of recompute matches no module.
  nearest names: blocks.1, blocks.0, blocks
fix: "blocks.*" matches 18 of 23 modules""",
    )
    assert_expected_inline(
        refused(["*.weight"], MLP()),
        """\
the pattern "*.weight" of recompute matches no module.
  it matches the names of parameters: up.weight, down.weight
  modules: up, down
fix: "*" matches 2 of 2 modules""",
    )


def test_recompute_pattern_of_uncalled_modules_error_lists_called_ones() -> None:
    assert_expected_inline(
        refused(["blocks.0", "blocks"]),
        """\
the pattern "blocks" of recompute matches no module that the program calls.
  it matches: blocks
  called inside: blocks.0, blocks.1
fix: "blocks.*" matches 2 of these 2""",
    )
    spare = MLP()
    spare.spare = MLP()
    assert_expected_inline(
        refused(["*spare"], nn.Sequential(nn.Embedding(32, 16), spare)),
        """\
the pattern "*spare" of recompute matches no module that the program calls.
  it matches: 1.spare
  called: 0, 1, 1.down, 1.up
fix: name modules whose forward the program runs, or remove the pattern""",
    )


def test_recompute_value_that_is_not_list_of_patterns_is_refused() -> None:
    assert_expected_inline(
        refused("blocks.*"),
        """\
recompute='blocks.*' is one text where it should be a list of patterns.
fix: recompute=['blocks.*']""",
    )
    assert_expected_inline(
        refused(True),
        """\
recompute=True is not a list of patterns over names of modules.
fix: recompute=['embed']""",
    )


def test_recompute_stated_in_parallelize_and_train_step_is_refused() -> None:
    module = GPT()
    model = dt.parallelize(module, dt.Mesh(), recompute=["blocks.*"])
    with pytest.raises(PlanningError) as caught:
        dt.train_step(
            model, loss_fn, torch.optim.AdamW(module.parameters()), recompute=["blocks.0"]
        )
    assert_expected_inline(
        str(caught.value),
        """\
recompute is stated twice.
  parallelize: ['blocks.*'], train_step: ['blocks.0']
fix: leave it out of one of them""",
    )
