"""Every rule's certificate: no strategy that a rule offers may be wrong.

    pytest tests/sharding/test_certificates.py -k mm

Each registered op is tried with its samples (samples.py) at dividing and non-dividing sizes, on 2
and 3 ranks and a 2x2 mesh, with negated values. The last tests plant wrong rules: the oracle must
find them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtensor.sharding import ops as ops
from dtensor.sharding.call import OpCall
from dtensor.sharding.notation import parse_rule
from dtensor.sharding.rule import Rule
from dtensor.sharding.rules import registered, rule_for
from dtensor.testing.oracle import Certificate, certify_autograd, certify_call
from tests.sharding.missing import MISSING
from tests.sharding.samples import POINTWISE, UNDEFINED, VARIANTS, Draw
from tests.sharding.samples_tensors import SAMPLES, STAND_INS

aten, dt = torch.ops.aten, torch.ops.dt

# Their CPU kernel does not check shapes that do not belong together.
NO_SEARCH = {"dt.attention.default", "dt.attention_backward.default", *UNDEFINED}


def _op(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _rule(name: str) -> Callable[[OpCall], Rule]:
    return lambda call: rule_for(replace(call, target=_op(name)))


def _certificate(name: str, *, missing: bool) -> Certificate:
    """One op's, over its samples and sizes: 2 ranks first, 3 ranks with other, negated values."""
    total = Certificate()
    squares = 1 if name in POINTWISE else 2  # their rules are all alike
    for sample in SAMPLES[name]:
        for variant in range(len(VARIANTS)):
            for negate in (False, True):
                args, kwargs = sample(Draw(variant, negate=negate))
                total += certify_call(
                    STAND_INS.get(name, _op(name)),
                    args,
                    kwargs,
                    nums=(3,) if negate else (2,),
                    rule=_rule(name),
                    seed=int(negate),
                    values=name not in UNDEFINED,
                    square=variant < squares and not negate,
                    missing=missing and variant == 0 and negate,
                )
    return total


def test_every_rule_has_samples() -> None:
    assert sorted(SAMPLES) == list(registered())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # statistics of empty shards
@pytest.mark.parametrize("name", registered())
def test_no_strategy_is_wrong(name: str) -> None:
    found = _certificate(name, missing=name not in NO_SEARCH)
    assert found.wrong == ()
    assert found.checked > 0
    missing = sorted(set(found.missing))
    assert missing == sorted(MISSING.get(name, ())), "strategies that hold and are not offered"


# -- forward and backward together ---------------------------------------------------------------


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


CHAINS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        (_randn(4, 3, 4), _randn(4), _randn(4)),
    ),
    "rms_norm": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        (_randn(6, 4), _randn(4)),
    ),
    "attention": (
        lambda q, k, v: dt.attention(q, k, v, True, 0.5)[0],
        (_randn(2, 4, 3, 2), _randn(2, 2, 3, 2), _randn(2, 2, 3, 2)),
    ),
    "softmax": (lambda x: x.softmax(-1), (_randn(4, 6),)),
    "log_softmax": (lambda x: x.log_softmax(-1), (_randn(4, 6),)),
    "mse": (lambda x, y: ((x - y) ** 2).mean(), (_randn(4, 6), _randn(4, 6).flip(0))),
    "mse_loss": (F.mse_loss, (_randn(5, 6), _randn(5, 6).flip(0))),
    "linear gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        (_randn(4, 6), _randn(3, 6), _randn(3)),
    ),
    "swiglu": (lambda x, w: F.silu(x @ w) * (x @ w), (_randn(4, 6), _randn(6, 4))),
    "rope": (
        lambda x, c: x * c + torch.cat((-x[..., 2:], x[..., :2]), -1) * c,
        (_randn(4, 3, 4), _randn(3, 4)),
    ),
    "heads": (
        lambda x: torch.stack([t.view(2, 3, 2, 2).transpose(1, 2) for t in x.chunk(3, -1)]),
        (_randn(2, 3, 12),),
    ),
    "embedding": (
        lambda w: F.embedding(torch.tensor([[0, 3, 3], [5, 1, 2]]), w),
        (_randn(6, 4),),
    ),
    "cross_entropy": (
        lambda x: dt.cross_entropy_rows(x, torch.tensor([0, -100, 3, 5]), -100)[0],
        (_randn(4, 6),),
    ),
    "masked": (
        lambda x: x.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")).softmax(-1),
        (_randn(3, 4, 4),),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_forward_and_backward(name: str) -> None:
    fn, tensors = CHAINS[name]
    found = certify_autograd(fn, *tensors)
    assert found.wrong == ()
    assert found.checked > 0


def test_cross_entropy_chain_matches_torch() -> None:
    x, target = _randn(4, 6), torch.tensor([0, -100, 3, 5])
    maximum = dt.ce_max(x)
    sumexp = dt.ce_sumexp(x, maximum)
    picked = dt.ce_target(x, target, -100, [])
    loss = dt.ce_loss(maximum, sumexp, picked, target, -100)
    torch.testing.assert_close(loss, F.cross_entropy(x, target, reduction="none"))


# -- the oracle can fail ---------------------------------------------------------------------------


def _planted(text: str, **options: Any) -> Callable[[OpCall], Rule]:
    return lambda call: parse_rule(text, call.operands, call.results, **options)


PLANTED: dict[str, tuple[Any, tuple[Any, ...], Callable[[OpCall], Rule], str]] = {
    "mm reduced with max": (
        aten.mm.default,
        (_randn(4, 6), _randn(6, 2)),
        _planted("m k, k n -> m n", reduce="max"),
        "other values",
    ),
    "mm linear in both at once": (
        aten.mm.default,
        (_randn(4, 6), _randn(6, 2)),
        _planted("m k!, k! n -> m n", linear=((0, 1),)),
        "other values",
    ),
    "mm on a split k with the result whole": (
        aten.mm.default,
        (_randn(4, 6), _randn(6, 6)),
        _planted("m k, k n -> m k"),
        "its shard is",
    ),
    "mean with the local count": (
        aten.mean.dim,
        (_randn(4, 6), [1]),
        _planted("a b -> a"),
        "other values",
    ),
    "softmax along a split dim": (
        aten._softmax.default,
        (_randn(4, 6), 1, False),
        _planted("a b -> a b"),
        "other values",
    ),
    "view with global sizes": (
        aten.view.default,
        (_randn(4, 6), [4, 2, 3]),
        _planted("a (b c) -> a b c", sizes={"b": 2}),
        "RuntimeError",
    ),
    "gelu as if linear": (aten.gelu.default, (_randn(4),), _planted("a -> a", linear=((0,),)), ""),
    "abs pending: right only if rank 0 has it all": (
        aten.abs.default,
        (_randn(4),),
        _planted("a -> a", linear=((0,),)),
        "other values",
    ),
    "add of a literal as if linear": (
        aten.add.Tensor,
        (_randn(4), 1.0),
        _planted("a -> a", linear=((0,),)),
        "other values",
    ),
    "mse gradient over the local count": (
        aten.mse_loss_backward.default,
        (_randn(), _randn(4, 6), _randn(4, 6).flip(0), 1),
        _planted(", a b, a b -> a b"),
        "other values",
    ),
    "embedding of split rows without their offset": (
        aten.embedding.default,
        (_randn(4, 2), torch.tensor([0, 3, 1])),
        _planted("v d, n -> n d"),
        "IndexError",
    ),
    "argmax of a split dim": (
        aten.argmax.default,
        (_randn(4, 6), 1),
        _planted("a b -> a", reduce="max"),
        "other values",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_rule_is_found_wrong(name: str) -> None:
    target, args, rule, reason = PLANTED[name]
    found = certify_call(target, args, rule=rule)
    assert found.wrong
    assert any(reason in text for text in found.wrong)


def test_rule_that_offers_less_is_found_missing() -> None:
    args = (_randn(6, 6), _randn(6, 6))
    found = certify_call(aten.mm.default, args, rule=_planted("m k!, k! n -> m n"), missing=True)
    assert found.wrong == ()
    assert set(found.missing) == {
        'aten.mm.default: [Partial("sum"), Replicate()] -> [Partial("sum")]',
        'aten.mm.default: [Replicate(), Partial("sum")] -> [Partial("sum")]',
        'aten.mm.default: [Shard(1), Shard(0)] -> [Partial("sum")]',
    }
