"""Mixture-of-experts models of transformers: replicated, with experts split, and with their inner
dim split.

The grouped product of the experts is an op of transformers, which exists once transformers is
imported.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.transformers_experts import experts_patches
from dtensor.sharding.local.conditions import ExpertIds
from dtensor.sharding.local.grouped_matmul import ends_of, grouped_mm, grouped_mm_backward
from dtensor.sharding.local.in_range import record_check
from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from transformers.integrations import moe
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

from tests.huggingface_sweep.experts import FAMILIES as SWEPT
from tests.huggingface_sweep.experts import LAYOUTS as SWEPT_LAYOUTS
from tests.huggingface_sweep.experts import judge
from tests.huggingface_sweep.judge import RATE, loss_fn, trainable
from tests.huggingface_sweep.record import Record

FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
EXPERTS: dict[str, Any] = {"*.experts.*": dict(tp=dt.Shard(0))}


@pytest.mark.slow
@pytest.mark.sample(*(f"{f}-experts" for f in FAMILIES), "olmoe-whole", "mixtral-derived")
@pytest.mark.parametrize("how", ["whole", "experts", "derived"])
@pytest.mark.parametrize("family", FAMILIES)
def test_moe_training_steps_match_torch(family: str, how: str) -> None:
    found = trainable(family, Record(family=family))
    assert found is not None
    model, batch, (losses, weights) = found
    pins = EXPERTS if how == "experts" else {}
    if how == "derived":
        pins = dt.placements.for_model(model, (), batch, size=2)
        (gate,) = {pins[p]["tp"] for p in pins if p.endswith("experts.gate_up_proj")}
        (down,) = {pins[p]["tp"] for p in pins if p.endswith("experts.down_proj")}
        assert (gate, down) == (dt.Shard(1, blocks=2), dt.Shard(2))
        assert 'experts.gate_up_proj": dict(tp=dt.Shard(1, blocks=2))' in str(pins)
    own = copy.deepcopy(model)
    placed = dt.parallelize(own, dt.Mesh(tp=2), pins)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    step = dt.train_step(placed, loss_fn, optimizer)
    with dt.launch(placed.mesh):
        assert [float(step(batch)) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
        state = dt.gather_state_dict(placed, optimizer)["model"]
    for name, expected in weights.items():
        scale = expected.abs().max().item()
        assert (state[name] - expected).abs().max() <= 1e-5 * max(scale, 1e-3), name


@pytest.mark.default("gpt_oss-ep2tp2", "deepseek_v3-pp2ep2 1F1B 2")
@pytest.mark.parametrize("layout", SWEPT_LAYOUTS)
@pytest.mark.parametrize("family", SWEPT)
def test_expert_parallel_training_steps_match_torch(family: str, layout: str) -> None:
    assert judge(family, layout).startswith("right")


# -- the implementation of experts that the registry gives during capture --------------------------


@pytest.fixture
def our_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' registry answer as it does during a capture."""
    for owner, name, change in experts_patches():
        monkeypatch.setattr(owner, name, change(vars(owner)[name]))


def mixtral_config(implementation: str | None) -> Any:
    config: Any = MixtralConfig()
    config._experts_implementation = implementation
    return config


def experts_class(**options: bool) -> type[nn.Module]:
    """Return a class of experts with this layout of weights."""
    has_gate, transposed = options.get("has_gate", True), options.get("is_transposed", False)

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            e, d, f = 4, 8, 6
            self.num_experts = e
            up = ("gate_up_proj", 2 * f, d) if has_gate else ("up_proj", f, d)
            for name, out, size in (up, ("down_proj", d, f)):
                shape = (e, size, out) if transposed else (e, out, size)
                setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
                bias = nn.Parameter(torch.randn(e, out, dtype=torch.float64))
                setattr(self, f"{name}_bias", bias)
            self.act_fn = nn.SiLU()
            self.post_expert_norm = nn.RMSNorm(d, dtype=torch.float64)

        def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            """Return the sum over slots, one after another."""
            y = torch.zeros_like(hidden)
            for t in range(len(ids)):
                for j in range(ids.shape[1]):
                    if ids[t, j] < self.num_experts:
                        y[t] += weights[t, j] * self.row(hidden[t], int(ids[t, j]))
            return y

        def row(self, x: Tensor, e: int) -> Tensor:
            x = self.linear("gate_up_proj" if has_gate else "up_proj", x, e)
            if has_gate:
                gate, up = x.chunk(2, -1)
                x = self.act_fn(gate) * up
            else:
                x = self.act_fn(x)
            x = self.linear("down_proj", x, e)
            return self.post_expert_norm(x) if options.get("has_post_expert_norm") else x

        def linear(self, name: str, x: Tensor, e: int) -> Tensor:
            weight = getattr(self, name)[e]
            bias = getattr(self, f"{name}_bias")[e] if options.get("has_bias") else None
            return nn.functional.linear(x, weight.t() if transposed else weight, bias)

    return moe.use_experts_implementation(Experts, **options)  # type: ignore[arg-type]


LAYOUTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed, biases": dict(is_transposed=True, has_bias=True),
    "no gate": dict(has_gate=False),
    "norm": dict(has_post_expert_norm=True, has_bias=True),
}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_experts_match_class_of_each_layout(
    layout: str, implementation: str | None, request: pytest.FixtureRequest
) -> None:
    """An id equal to the number of experts marks a slot without an expert."""
    torch.manual_seed(0)
    config = mixtral_config(implementation)
    experts = experts_class(**LAYOUTS[layout])(config)
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 4], [0, 3], [4, 4], [3, 0]])

    def outcome() -> list[Tensor | None]:
        leaves = [hidden, weights, *experts.parameters()]
        y = type(experts).forward(experts, hidden, ids, weights)
        grads = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)
        return [y, *grads]

    config._experts_implementation = "eager"
    wanted = outcome()
    config._experts_implementation = implementation
    request.getfixturevalue("our_experts")
    for a, b in zip(outcome(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_capture_replaces_experts_and_reports_them() -> None:
    experts = experts_class()(mixtral_config("grouped_mm"))
    operands = torch.randn(5, 8).double(), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)
    graph = capture(lambda module, *args: module(*args).sum(), (experts, *operands), grads="loss")
    assert [(m.what, m.op) for m in graph.recognised if m.what == "experts"] == [
        ("experts", "dt.expert_mm")
    ]
    ops = [str(n.target) for n in graph.fx.nodes]
    assert "dt.route.default" in ops and not any("sort" in op or "grouped" in op for op in ops)


def test_capture_reports_experts_that_are_a_bmm() -> None:
    class OwnExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(torch.bmm(x, self.weight), self.weight)

    graph = capture(
        lambda module, x: module(x).sum(), (OwnExperts(), torch.ones(4, 2, 8)), grads="loss"
    )
    (match,) = graph.recognised
    assert (match.what, match.op) == ("experts", "")
    assert match.reason == "each expert multiplies all rows (bmm)"


@pytest.mark.usefixtures("our_experts")
def test_experts_that_are_not_stacked_or_registered_by_users_keep_their_form() -> None:
    config = mixtral_config("eager")
    experts: Any = experts_class()(config)
    x, ids, weights = torch.ones(1, 8).double(), torch.tensor([[2]]), torch.ones(1, 1).double()
    wanted = experts(x, ids, weights)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:3].detach())
    torch.testing.assert_close(experts(x, ids, weights), wanted)
    moe.ALL_EXPERTS_FUNCTIONS.register("of_a_user", lambda self, *args: args[0] + 1)
    try:
        config._experts_implementation = "of_a_user"
        assert torch.equal(experts(x, ids, weights), x + 1)
    finally:
        del moe.ExpertsInterface._global_mapping["of_a_user"]


FORMS = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")


@pytest.mark.slow
@pytest.mark.sample("mixtral", "gpt_oss")
@pytest.mark.parametrize("family", FORMS)
def test_models_have_numbers_of_eager_experts(family: str, request: pytest.FixtureRequest) -> None:
    found = trainable(family, Record(family=family))
    assert found is not None
    batch = found[1]
    model: Any = found[0].double()
    model.set_experts_implementation("eager")

    def outcome() -> tuple[Tensor, ...]:
        loss = loss_fn(model, batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        return (model(**batch).logits, loss, *grads)

    wanted = outcome()
    request.getfixturevalue("our_experts")
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(outcome(), wanted, rtol=1e-10, atol=1e-10)


# -- grouped products ------------------------------------------------------------------------------


def test_grouped_mm_gives_zeros_for_experts_of_other_ranks() -> None:
    rows, experts = torch.randn(8, 4), torch.randn(3, 4, 8)
    stops = torch.tensor([3, 3, 7], dtype=torch.int32)
    whole = grouped_mm(rows, experts, stops, None)
    parts = [grouped_mm(rows, experts[g], stops, g) for g in ([0], [1, 2])]
    assert torch.equal(whole, sum(parts, torch.zeros(8, 8)))
    assert torch.equal(parts[0][3:], torch.zeros(5, 8))
    assert torch.allclose(whole[3:7], rows[3:7] @ experts[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_mm_rows_past_last_offset_are_zero(dtype: torch.dtype) -> None:
    """Torch's kernel leaves these rows uninitialized."""
    stops = torch.tensor([3, 5], dtype=torch.int32)
    rows, experts = torch.randn(8, 8, dtype=dtype), torch.randn(2, 8, 4, dtype=dtype)
    grad = torch.randn(8, 4, dtype=dtype)
    torch.full((8, 8), 777.0, dtype=dtype)  # freed: what a result may be made of
    assert torch.equal(grouped_mm(rows, experts, stops, None)[5:], torch.zeros(3, 4, dtype=dtype))
    of_rows, of_experts = grouped_mm_backward(rows, experts, stops, grad, None)
    assert torch.equal(of_rows[5:], torch.zeros(3, 8, dtype=dtype))
    assert torch.allclose(of_experts[1], rows[3:5].mT @ grad[3:5])
    columns = grouped_mm(rows.view(2, 4, 8), rows, stops, None)
    assert torch.equal(columns[:, 5:], torch.zeros(4, 3, dtype=dtype))


@pytest.mark.parametrize("stops", [[2, 9], [3, 2], [-1, 4]])
@pytest.mark.parametrize("groups", [None, [1]])
def test_grouped_mm_offsets_out_of_range_raise_index_error(
    stops: list[int], groups: list[int] | None
) -> None:
    """Torch's kernel would read out of bounds: on a CPU it returns garbage, on a GPU it may make
    the device unusable."""
    rows, experts = torch.randn(8, 8), torch.randn(2, 8, 8)
    held = experts if groups is None else experts[groups]
    given = torch.tensor(stops, dtype=torch.int32)
    for a, b in ((rows, held), (held, rows), (rows.t(), rows)):
        with pytest.raises(
            IndexError, match=re.escape(f"are in 0:8, the rows of all groups; got {stops}")
        ):
            grouped_mm(a, b, given, groups)
        right = grouped_mm(a, b, torch.tensor([2, 8], dtype=torch.int32), groups)
        assert right.isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "transposed"])
@pytest.mark.parametrize("groups", [None, [0], [1, 3], []])
@pytest.mark.parametrize("stops", [[3, 3, 6, 7], [0, 0, 0, 0], [0, 4, 8, 9]])
def test_grouped_mm_of_checked_offsets_does_not_wait(
    stops: list[int], groups: list[int] | None, layout: str
) -> None:
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randint(-2, 3, shape, generator=drawn).bfloat16()  # for exact sums
        if layout == "misaligned":
            return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
        return x.mT.contiguous().mT if layout == "transposed" else x

    rows, experts, grad = draw(9, 8), draw(4, 8, 16), draw(9, 16)
    held = experts if groups is None else experts[groups]
    pairs = ((rows, held), (grad, held.mT), (rows.t(), grad))
    offsets = torch.tensor(stops, dtype=torch.int32)
    wanted = [grouped_mm(a, b, offsets, groups) for a, b in pairs]
    with dt.testing.simulated_gpus(num=1) as gpus:
        on_gpu = offsets.cuda()
        record_check(on_gpu, ends_of(rows, experts, on_gpu).key)
        given = [(a.cuda(), b.cuda()) for a, b in pairs]
        before = gpus.report().host_waits
        found = [grouped_mm(a, b, on_gpu, groups) for a, b in given]
        assert gpus.report().host_waits == before
        for y, expected in zip(found, wanted, strict=True):
            assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize(
    "ids", [[[0, 2], [3, 0], [2, 3]], [[-1, 2], [4, 0], [2, -1]], [[4, -1]] * 3]
)
def test_products_by_expert_of_checked_ids_do_not_wait(ids: list[list[int]]) -> None:
    drawn = torch.Generator().manual_seed(0)
    shapes = (3, 8), (4, 8, 16), (4, 16)
    operands = [torch.randint(-1, 2, n, generator=drawn).bfloat16() for n in shapes]
    ops: Any = torch.ops.dt

    def outcome(ids: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        x, weight, bias = operands
        counts, expert, slot = ops.route(ids, 4, True)
        rows = ops.take_rows(x, slot, counts, None, 2)
        y = ops.expert_mm(rows, weight, counts, bias, 2)
        tokens = ops.add_rows(y, slot, counts, None, 3, 2)
        grad = ops.expert_mm(y, weight.mT, counts, None, 2)
        outer, total = ops.expert_outer(rows, y, counts, 2), ops.expert_sum(y, counts, 2)
        return [counts, expert, slot, y, tokens, grad, outer, total]

    given = torch.tensor(ids)
    wanted = outcome(given, *operands)
    with dt.testing.simulated_gpus(num=1) as gpus:
        on_gpu, *placed = (x.cuda() for x in (given, *operands))
        record_check(on_gpu, ExpertIds.of(on_gpu, 4, True).key)
        before = gpus.report().host_waits
        found = outcome(on_gpu, *placed)
        assert gpus.report().host_waits == before
        for y, expected in zip(found, wanted, strict=True):
            assert torch.equal(y.cpu(), expected)
