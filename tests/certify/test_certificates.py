"""Certificates of rules: no strategy that a rule offers may be wrong.

    pytest tests/certify/test_certificates.py -k mm

Each registered op runs on its samples (tests.certify.samples) at one size on 2 ranks, with values
that change whenever a rule changes. A part of the ops, also chosen anew with each change, is
certified in full: at all sizes, on 3 ranks and 2x2, in half precision, with backward. `make
certify` certifies all ops in full. The last tests plant wrong rules, which the oracle must find.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

import dtensor.sharding.rules
from dtensor.api.rule import op_overloads
from dtensor.sharding.ops import attention as attention
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import TABLES, NoRule, rule_for
from dtensor.sharding.rules.notation import parse_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.testing import Certificate, certify
from dtensor.testing.certificates import certify_autograd, certify_call
from dtensor.testing.oracle import call_of, run_global
from dtensor.testing.vary import accepts
from tests.certify.__main__ import main
from tests.certify.judge import certify_samples
from tests.certify.samples import FAMILIES, POINTWISE, SAMPLES, SPECIAL, UNCHECKED, Draw
from tests.certify.table import Row, recorded_missing, recorded_ops, table

aten, dt = torch.ops.aten, torch.ops.dt

RULED = sorted(name for table in TABLES for name in table.RULES)
TABLE = Path(__file__).parents[2] / "docs" / "certified.md"
WHOLLY = 12  # ops; about 0.3 s each


def _seed() -> int:
    """Return a seed that changes only when a rule changes, so that a failure can be repeated."""
    text = hashlib.sha256(" ".join(RULED).encode())
    for file in sorted(Path(next(iter(dtensor.sharding.rules.__path__))).rglob("*.py")):
        text.update(file.read_bytes())
    return int(text.hexdigest()[:6], 16)


SEED = _seed()
SHARE = sorted(random.Random(SEED).sample(sorted(SAMPLES), WHOLLY))


def test_every_rule_has_samples_in_one_family() -> None:
    assert sorted(SAMPLES) == RULED
    times = Counter(name for family in FAMILIES for name in family)
    assert [name for name, count in times.items() if count > 1] == []


def test_certificate_table_lists_every_rule() -> None:
    assert recorded_ops(TABLE.read_text()) == RULED, "run make certify"


@pytest.mark.filterwarnings("ignore")  # the ops' own: statistics of empty shards, beta ops
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_no_strategy_of_rule_is_wrong(name: str) -> None:
    found = certify_samples(name, seed=SEED, brief=True)
    assert found.wrong == ()
    assert found.checked > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARE)
def test_full_certificate_has_no_wrong_and_only_recorded_missing_strategies(name: str) -> None:
    found = certify_samples(name)
    assert found.wrong == ()
    recorded = recorded_missing(TABLE.read_text()).get(name, ())
    missing = {str(m) for m in found.missing if m.op == name}
    assert missing == set(recorded), "strategies that hold and are not offered: run make certify"


# -- Python's numbers ----------------------------------------------------------------------------

NUMBERS = (True, 3, 2.5, 1.5j)


def _with_numbers(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Return variants of the arguments with one number in place of any of the first tensors and
    numbers."""
    kinds = (torch.Tensor, bool, int, float, complex)
    places = [i for i, a in enumerate(args[:4]) if isinstance(a, kinds)]
    for count in range(1, len(places) + 1):
        for some in itertools.combinations(places, count):
            for number in NUMBERS:
                yield tuple(number if i in some else a for i, a in enumerate(args))


def _number_calls(name: str) -> list[tuple[Any, ...]]:
    """Return the calls with numbers that torch accepts."""
    (target,) = op_overloads(name)
    calls: list[tuple[Any, ...]] = []
    for sample in SAMPLES[name][:2]:
        args, kwargs = sample(Draw(0))
        calls += [(target, a, kwargs) for a in _with_numbers(args) if accepts(target, a, kwargs)]
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[] if n in ("aten.mul.Tensor", "aten._conj.default") else pytest.mark.slow
        )
        for n in sorted({**POINTWISE, **SPECIAL}.keys() - UNCHECKED)
        if not n.startswith("dt.")
    ],
)
def test_op_with_numbers_in_place_of_tensors_has_right_rule_or_none(name: str) -> None:
    """No exception other than `NoRule` is raised."""
    for target, args, kwargs in _number_calls(name):
        call, tensors = call_of(target, args, kwargs)
        try:
            rule_for(run_global(call, tensors)[0])
        except NoRule as error:
            assert not tensors or error.__cause__ is None, args
            continue
        if tensors:
            assert certify_call(target, args, kwargs, nums=(2,), square=False).wrong == (), args


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
def test_no_strategy_of_forward_and_backward_is_wrong(name: str) -> None:
    fn, tensors = CHAINS[name]
    found = certify_autograd(fn, *tensors)
    assert found.wrong == ()
    assert found.checked > 0


# -- the oracle can fail ---------------------------------------------------------------------------


def _planted(text: str, **options: Any) -> Callable[[OpCall], Rule]:
    return lambda call: parse_rule(text, call.operands, call.results, **options)


LINEAR, LOCAL_COUNT = _planted("a -> a", linear=((0,),)), _planted(", a b, a b -> a b")
X, Y, W, V = _randn(4, 6), _randn(4, 6).flip(0), _randn(6, 2), _randn(4)
VALUES = "other values"
PLANTED: dict[str, tuple[Any, tuple[Any, ...], Callable[[OpCall], Rule], str]] = {
    "mm reduced with max": (
        aten.mm.default,
        (X, W),
        _planted("m k, k n -> m n", reduce="max"),
        VALUES,
    ),
    "mm linear in both at once": (
        aten.mm.default,
        (X, W),
        _planted("m k!, k! n -> m n", linear=((0, 1),)),
        VALUES,
    ),
    "a bias that each rank adds": (
        aten.addmm.default,
        (V, _randn(8, 6), _randn(6, 4)),
        _planted("n, m k, k n -> m n"),
        "Shard(1), Shard(0)] -> [Partial",
    ),
    "mm on a split k with the result whole": (
        aten.mm.default,
        (X, _randn(6, 6)),
        _planted("m k, k n -> m k"),
        "its shard is",
    ),
    "mean with the local count": (aten.mean.dim, (X, [1]), _planted("a b -> a"), VALUES),
    "softmax along a split dim": (
        aten._softmax.default,
        (X, 1, False),
        _planted("a b -> a b"),
        VALUES,
    ),
    "view with global sizes": (
        aten.view.default,
        (X, [4, 2, 3]),
        _planted("a (b c) -> a b c", sizes={"b": 2}),
        "RuntimeError",
    ),
    "gelu as if linear": (aten.gelu.default, (V,), LINEAR, ""),
    "abs pending: right only if rank 0 has it all": (aten.abs.default, (V,), LINEAR, VALUES),
    "add of a literal as if linear": (aten.add.Tensor, (V, 1.0), LINEAR, VALUES),
    "mse gradient over the local count": (
        aten.mse_loss_backward.default,
        (_randn(), X, Y, 1),
        LOCAL_COUNT,
        VALUES,
    ),
    "embedding of split rows without their offset": (
        aten.embedding.default,
        (_randn(4, 2), torch.tensor([0, 3, 1])),
        _planted("v d, n -> n d"),
        "IndexError",
    ),
    "argmax of a split dim": (
        aten.argmax.default,
        (X, 1),
        _planted("a b -> a", reduce="max"),
        VALUES,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_certify_finds_planted_wrong_rule(name: str) -> None:
    target, args, rule, reason = PLANTED[name]
    found = certify_call(target, args, rule=rule)
    assert found.wrong
    assert any(reason in text for text in found.wrong)


def test_certify_lists_strategies_missing_from_rule() -> None:
    args = (_randn(6, 6), _randn(6, 6))
    found = certify_call(aten.mm.default, args, rule=_planted("m k!, k! n -> m n"), missing=True)
    assert found.wrong == ()
    assert {str(m) for m in found.missing} == {
        'aten.mm.default: [Partial("sum"), Replicate()] -> [Partial("sum")]',
        'aten.mm.default: [Replicate(), Partial("sum")] -> [Partial("sum")]',
        'aten.mm.default: [Shard(1), Shard(0)] -> [Partial("sum")]',
    }


# -- the same through certify, which users call ----------------------------------------------------


def _for(name: str, planted: Callable[[OpCall], Rule]) -> Callable[[OpCall], Rule]:
    """Return the rules of this library with one op's rule replaced."""
    return lambda call: planted(call) if call.name == name else rule_for(call)


def test_certify_of_forward_finds_local_count_in_backward_rule() -> None:
    """PyTorch's DTensor makes these gradients too large by a factor of the number of ranks."""
    found = certify(F.mse_loss, X, Y, rule=_for("aten.mse_loss_backward.default", LOCAL_COUNT))
    assert found.wrong
    assert all(text.startswith("aten.mse_loss_backward") for text in found.wrong)
    assert certify(F.mse_loss, X, Y).wrong == ()


def test_certify_finds_rule_wrong_only_for_uneven_sizes() -> None:
    """The planted localizer gives every rank the share of rank 0."""

    def localize(call: OpCall, local: Any) -> OpCall:
        return call.with_arg(1, [-(-s // 2) if s == 4 else s for s in call.args[1]])

    x, rule = _randn(4, 3), _planted("a b -> a b", localize=localize)
    assert certify_call(aten.expand.default, (x, [4, 3]), rule=rule, nums=(2,), square=False).wrong
    found = certify(aten.expand.default, x, [4, 3], rule=rule)
    assert any("on 3 ranks" in text for text in found.wrong)


def test_certify_finds_rule_wrong_only_in_half_precision() -> None:
    def localize(call: OpCall, local: Any) -> OpCall:
        return replace(call, target=_sum_float, args=call.args[:1])

    rule = _planted("a -> ", localize=localize)
    assert certify_call(aten.sum.default, (V,), rule=rule).wrong == ()
    found = certify(aten.sum.default, V, rule=rule)
    assert found.wrong
    assert all("bf16" in text for text in found.wrong)


def _sum_float(x: torch.Tensor) -> torch.Tensor:
    return x.sum() if x.dtype == torch.float64 else x.float().sum()


def test_certify_finds_rule_wrong_only_on_two_axes() -> None:
    """The planted localizer considers only one axis of the mesh."""

    def localize(call: OpCall, local: Any) -> OpCall:
        spec = local.operands[0]
        share = spec.mesh.axis_size(spec.mesh.axes[0])
        split = spec.placements[0] == spec.placements[-1]
        return call.with_arg(1, [call.args[1][0] // share if split else call.args[1][0]])

    rule = _planted("a -> a", localize=localize)
    found = certify_call(aten.view.default, (_randn(12), [12]), rule=rule, nums=(2,))
    assert any("on 2x2 ranks" in text for text in found.wrong)


def test_certify_finds_rule_wrong_only_at_other_sizes() -> None:
    """The maximum over one column is the column itself, so only other sizes show that the dim is
    reduced."""
    rule = _planted("a b -> a")
    x = _randn(4, 1)
    assert certify_call(aten.amax.default, (x, [1]), rule=rule).wrong == ()
    assert certify(aten.amax.default, x, [1], rule=rule).wrong


# -- the table and the command ---------------------------------------------------------------------


def test_certificate_table_can_be_read_back() -> None:
    whole = _planted("m! k!, k! n! -> m! n!")
    found = certify(aten.mm.default, _randn(6, 6), _randn(6, 6), rule=whole)
    rows = [
        Row(op="aten.mm.default", rule="m k, k n -> m n", certificate=found),
        Row(op="aten.add.Tensor", rule="a, a -> a", certificate=Certificate(checked=7)),
    ]
    text = table(rows)
    assert text == table(rows[::-1])
    assert recorded_ops(text) == ["aten.add.Tensor", "aten.mm.default"]
    assert set(recorded_missing(text)["aten.mm.default"]) == {str(m) for m in found.missing}
    assert "| `a, a -> a` | `aten.add.Tensor` (7) |" in text
    assert f"`aten.mm.default` ({found.checked}, {len(found.missing)} missing)" in text


def test_certify_command_proposes_nearest_names_of_unknown_op(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given in (["aten.negg.default"], ["aten.mm.default", "--table", "x.md"]):
        with pytest.raises(SystemExit) as raised:
            main(given)
        assert raised.value.code == 2
    assert "nearest names" in capsys.readouterr().err


def test_certify_command_fails_on_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Certificate(("aten.neg.default: bad",), checked=1)
    assert main(["aten.neg.default", "aten::mm"]) == 0
    assert "2 rules, " in (out := capsys.readouterr().out) and ": 0 wrong" in out
    monkeypatch.setattr("tests.certify.__main__.certify_samples", lambda *a, **k: wrong)
    assert main(["aten.neg.default"]) == 1
