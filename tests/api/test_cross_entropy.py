"""Cross entropy over a split vocabulary, and `Partial("softmax")` as a placement that users
state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtensor as dt
from dtensor.errors import PlanningError
from dtensor.numerics import accumulation_dtype
from dtensor.sharding.rules import registry
from tests.api.eager import same

Reduction = Literal["mean", "sum", "none"]
SPLIT = {"w": dict(tp=dt.Column())}


def values(rows: int = 9, vocab: int = 10, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (rows,), generator=made)
    targets[1::4] = -100
    x = torch.randn(rows, width, generator=made)
    return x, torch.randn(width, vocab, generator=made) * 3, targets


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y)


def gradients(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by x and w; the inputs may be tensors or DTensors."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = loss(x, w, y)
    out.backward()
    assert x.grad is not None and w.grad is not None
    return full(out.detach()), full(x.grad), full(w.grad)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, dt.DTensor) else value


@pytest.fixture
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocabulary_split_loss_sends_one_all_reduce_of_three_numbers_per_row(
    reduction: Reduction, dtype: torch.dtype
) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction=reduction)

    mesh = dt.Mesh(tp=2)
    name = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}[dtype]
    logits = dt.spec(f"{name}[12,10@tp]", mesh, requires_grad=True)
    plan = dt.testing.assert_collectives(
        fn, mesh, {}, logits, dt.spec("i64[12]", mesh), forward={"all_reduce@tp": 1}, backward={}
    )
    (reduced,) = plan.collectives
    assert reduced.bytes_sent == 12 * 3 * (8 if dtype == torch.float64 else 4)
    assert "{softmax@tp}" in str(plan)


@pytest.mark.default("-100-10-mean")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("vocab", [10, 5, 2])  # over 4 ranks 5 are 2 + 2 + 1 + 0
@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy_over_split_vocabulary_matches_torch(
    vocab: int, ignored: int, reduction: Reduction
) -> None:
    x, w, y = values(vocab=vocab)
    targets = torch.where(y == -100, ignored, y)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, targets, reduction=reduction, ignore_index=ignored)

    wholes = x.double(), w.double()
    split = [SPLIT, {"w": dict(tp=dt.Column(blocks=2))}] if vocab % 2 == 0 else [SPLIT]
    for mesh in (dt.Mesh(tp=2), dt.Mesh(tp=4)):
        dt.testing.assert_same(fn, *wholes, placements=split, meshes=[mesh])
    both = {"x": dict(dp=dt.Row()), **SPLIT}
    dt.testing.assert_same(fn, *wholes, placements=both, meshes=[dt.Mesh(dp=2, tp=2)])


@pytest.mark.usefixtures("allowed")
def test_float32_gradients_over_split_vocabulary_are_within_1e_6() -> None:
    x, w, y = values(rows=300, vocab=1000)
    whole = gradients(x, w, y)
    for num in (2, 3):
        mesh = dt.Mesh(tp=num)
        given = dt.distribute(x, mesh), dt.distribute(w, mesh, tp=dt.Column())
        split = gradients(*given, dt.distribute(y, mesh))
        for a, b in zip(split, whole, strict=True):
            assert (a - b).abs().max() <= 1e-6 * b.abs().max()


@pytest.mark.usefixtures("allowed")
def test_cross_entropy_with_minus_inf_logits_matches_torch() -> None:
    """The logits of the last rank's part of the vocabulary are all -inf (padding), and one row is
    -inf entirely."""

    def fn(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none")

    logits, y = torch.randn(4, 9), torch.tensor([0, 4, -100, 5])
    logits[:, 6:] = -torch.inf
    logits[3] = -torch.inf
    mesh = dt.Mesh(tp=3)
    plain, spread = logits.requires_grad_(), dt.distribute(logits.detach(), mesh, tp=dt.Column())
    wanted, got = fn(plain, y), fn(spread.requires_grad_(), dt.distribute(y, mesh))
    assert wanted[:3].isfinite().all() and wanted[3].isnan()
    assert torch.allclose(got.full_tensor(), wanted, equal_nan=True)  # type: ignore[attr-defined]
    wanted[:3].sum().backward()
    got[:3].sum().backward()
    assert spread.grad is not None and plain.grad is not None
    found = spread.grad.full_tensor()  # type: ignore[attr-defined]
    assert torch.allclose(found[:3], plain.grad[:3])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 10])
def test_target_out_of_range_raises_task_error_with_class_count(wrong: int, tp: int) -> None:
    x, w, y = values()
    y[3] = wrong
    mesh = dt.Mesh(tp=tp)
    given = dt.distribute(x, mesh), dt.distribute(w, mesh, tp=dt.Column()), dt.distribute(y, mesh)
    with pytest.raises(dt.daft.TaskError) as error:
        dt.compile(loss, mesh)(*given).full_tensor()
    text = f"Target {wrong} is out of bounds for 10 classes (ignore_index=-100)."
    assert text in str(error.value)


# -- the placement ---------------------------------------------------------------------------------


def triples(rows: int = 6) -> Tensor:
    return torch.stack([torch.randn(rows), torch.rand(rows) + 1, torch.randn(rows)], 1)


@pytest.mark.parametrize("num", [2, 3])
def test_softmax_partial_redistributes_without_loss(num: int) -> None:
    x, mesh = triples(), dt.Mesh(tp=num)
    d = dt.distribute(x, mesh, tp=dt.Partial("softmax"))
    assert str(d.spec) == "f32[6,3]{softmax@tp}"
    first, *others = d.local_tensors()
    assert torch.equal(first, x)
    assert all(torch.equal(o, torch.tensor([-torch.inf, 0, 0]).expand(6, 3)) for o in others)
    for placement in (dt.Replicate(), dt.Row(), dt.Column()):
        moved = d.redistribute(tp=placement)
        assert torch.equal(moved.full_tensor(), x)
        back = moved.redistribute(tp=dt.Partial("softmax"))
        assert back.spec == d.spec and torch.equal(back.full_tensor(), x)
    other = dt.transfer(d.redistribute(tp=dt.Row()), dt.Mesh(c=2), c=dt.Partial("softmax"))
    assert torch.equal(other.full_tensor(), x)


@pytest.mark.parametrize("op", ["max", "softmax"])
@pytest.mark.usefixtures("allowed")
def test_view_of_non_sum_partial_reads_and_writes_full_value(op: Literal["max", "softmax"]) -> None:
    x, mesh = triples(), dt.Mesh(tp=2)
    for view in (lambda d: d[:, 0], lambda d: d.t(), lambda d: d.view(-1), lambda d: d[1:3]):
        d = dt.distribute(x, mesh, tp=dt.Partial(op))
        assert torch.equal(view(d).full_tensor(), view(x))
        view(d).add_(1)
        written = x.clone()
        view(written).add_(1)
        same([d], [written])


REFUSED = {
    "f32[8,4]{softmax@a}": r"needs values f32\[...,3\] or f64\[...,3\].* this one is f32\[8,4\]",
    "bf16[8,3]{softmax@a}": r"this one is bf16\[8,3\]",
    "f32[]{softmax@a}": r"this one is f32\[\]",
    "f32[8,3@b]{softmax@a}": r"numbers whole, but b=Shard\(1\) splits the last dim of f32\[8,3\]",
    "f32[8,3]{softmax@a,sum@b}": "cannot be pending under",
    "f32[8,3]{soft@a}": 'the op is "sum", "max", "min" or "softmax"',
}


@pytest.mark.parametrize("text", REFUSED)
def test_softmax_partial_on_unsuitable_spec_is_refused(text: str) -> None:
    with pytest.raises(PlanningError, match=REFUSED[text]):
        dt.spec(text, dt.Mesh(a=2, b=2))


def test_softmax_partial_shape_is_checked_on_one_rank_too() -> None:
    with pytest.raises(PlanningError, match=r"this one is f32\[5,4\]"):
        dt.distribute(torch.randn(5, 4), dt.Mesh(tp=1), tp=dt.Partial("softmax"))


@torch.library.custom_op("test_cross_entropy::row_stats", mutates_args=())
def row_stats(x: Tensor) -> Tensor:
    """For rows x[n v], return the maximum, sum(exp(x - maximum)) and the sum; in float32 for half
    dtypes."""
    x = x.to(accumulation_dtype(x.dtype))
    if x.shape[1] == 0:
        return x.new_tensor([-torch.inf, 0, 0]).repeat(len(x), 1)
    top = x.amax(1)
    return torch.stack((top, (x - top[:, None]).exp().sum(1), x.sum(1)), 1)


@row_stats.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 3), dtype=accumulation_dtype(x.dtype))


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> dt.OpRule:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    return dt.rule("test_cross_entropy::row_stats", "n v -> n k!", reduce="softmax")


def test_user_rule_with_softmax_reduction_is_certified_and_matches_torch(stated: dt.OpRule) -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    found = dt.testing.certify(stated, x)
    assert found.wrong == () and found.checked > 3
    as_sum = replace(stated, reduce="sum")
    assert dt.testing.certify(stated, x, rule=as_sum).wrong

    def logsumexp(x: Tensor) -> Tensor:
        stats = torch.ops.test_cross_entropy.row_stats(x)
        return stats[:, 1].log() + stats[:, 0]

    mesh = dt.Mesh(tp=2)
    plan = dt.testing.assert_collectives(
        logsumexp, mesh, {}, dt.spec("f64[5,7@tp]", mesh), forward={"all_reduce@tp": 1}
    )
    assert plan.collectives[0].bytes_sent == 5 * 3 * 8
    dt.testing.assert_same(
        logsumexp, x, placements={"x": dict(tp=dt.Column())}, meshes=[mesh], gradients=False
    )


@pytest.mark.usefixtures("stated")
def test_user_rule_must_mark_softmax_dim_as_whole() -> None:
    with pytest.raises(PlanningError, match='mark it as whole, as in "n v -> n k!"'):
        dt.rule("test_cross_entropy::row_stats", "n v -> n k", reduce="softmax")
