"""What the rules of layers and losses promise beyond being right (test_certificates)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.testing.execute import reference, run, trace
from dtensor.testing.oracle import call_of, run_whole

aten = torch.ops.aten


def _rule(target: Any, *args: Any) -> Rule:
    call, operands = call_of(target, args, {})
    whole, _ = run_whole(call, operands)
    return rule_for(whole)


def _splits(rule: Rule) -> set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    return {(s.operands, s.results) for s in rule.strategies(2)}


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_batch_norm_splits_the_batch_only_where_it_evaluates() -> None:
    x, c = _randn(4, 6, 5), _randn(6).abs()
    rule = _rule(aten._native_batch_norm_legit_functional.default, x, c, c, c, c, True, 0.1, 1e-5)
    assert str(rule) == "n! c x0!, c, c, c, c -> n! c x0!, c, c, c, c"
    assert {s.operands[0] for s in rule.strategies(2)} == {REPLICATE, Shard(1)}
    rule = _rule(aten._native_batch_norm_legit_no_training.default, x, c, c, c, c, 0.1, 1e-5)
    assert {s.operands[0] for s in rule.strategies(2)} == {REPLICATE, Shard(0), Shard(1), Shard(2)}


def test_convolution_splits_channels_as_a_matmul_does() -> None:
    x, w, b = _randn(4, 6, 7), _randn(8, 6, 3), _randn(8)
    rule = _rule(aten.convolution.default, x, w, b, [1], [0], [1], False, [0], 1)
    found = _splits(rule)
    assert ((Shard(0), REPLICATE, REPLICATE), (Shard(0),)) in found
    assert ((REPLICATE, Shard(0), Shard(0)), (Shard(1),)) in found
    # The bias is added once: it is pending where the sum over input channels is.
    assert ((Shard(1), Shard(1), Partial("sum")), (Partial("sum"),)) in found
    assert rule.flops == 2 * (4 * 8 * 5) * 6 * 3
    # a kernel of one point splits the plane
    point = _rule(aten.convolution.default, x, w[..., :1], None, [1], [0], [1], False, [0], 1)
    assert ((Shard(2), REPLICATE), (Shard(2),)) in _splits(point)


def test_gradient_of_a_bias_is_whole_on_ranks_that_split_input_channels() -> None:
    x, w, grad = _randn(4, 6, 7), _randn(8, 6, 3), _randn(4, 8, 5)
    settings = ([8], [1], [0], [1], False, [0], 1, [True, True, True])
    rule = _rule(aten.convolution_backward.default, grad, x, w, *settings)
    assert str(rule).endswith("n i x0!, o i k0!, o ~i")
    operands = (REPLICATE, Shard(1), Shard(1))
    assert (operands, (Shard(1), Shard(1), REPLICATE)) in _splits(rule)


def test_mean_of_nll_is_left_to_its_decomposition() -> None:
    x, target = _randn(4, 5).log_softmax(1), torch.tensor([1, -100, 0, 3])
    with pytest.raises(NoRule, match="torch decomposes it"):
        _rule(aten.nll_loss_forward.default, x, target, None, 1, -100)


@pytest.mark.slow
def test_group_norm_of_strided_shards() -> None:
    """Its backward kernel reads storage in order: a shard gathered along a dim is not in order."""
    tensors = (_randn(4, 6, 5, 5), _randn(6), _randn(6))
    traced = trace(
        lambda x, w, b: F.group_norm(x, 3, w, b), tuple(t.requires_grad_() for t in tensors)
    )
    expected = reference(traced)
    for split in (Shard(1), Shard(3)):
        found = run(traced, Mesh(tp=4), [dict(tp=split), dict(tp=REPLICATE), dict(tp=Shard(0))])
        torch.testing.assert_close(found.gradients, expected.gradients)


def _batch_norm(
    x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, w, None, True), mean, var


@pytest.mark.parametrize("bandwidth", [200e9, 1e6])
def test_batch_norm_over_a_split_batch_has_the_statistics_of_all_of_it(bandwidth: float) -> None:
    """The batch stays split whatever a gather costs; sums go over the ranks."""
    tensors = (_randn(6, 4, 5).requires_grad_(), _randn(4).requires_grad_(), _randn(4), _randn(4))
    traced = trace(_batch_norm, tensors)
    expected = reference(traced)
    topology = Topology(bandwidth=bandwidth, latency=1e-9)
    split = [dict(tp=Shard(0)), *[dict(tp=REPLICATE)] * 3]
    found = run(traced, Mesh(tp=3), split, topology=topology)
    assert found.plan is not None
    assert {c.kind for c in found.plan.collectives} == {"all_reduce"}
    torch.testing.assert_close(found.results, expected.results)
    torch.testing.assert_close(found.gradients, expected.gradients)
