"""Random ops on DTensors draw the numbers of ``dt.Mesh()`` under any placement, from the
distributions of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtensor as dt
from tests.api.eager import placements

ONE = dt.Mesh()
MESHES = (dt.Mesh(tp=2), dt.Mesh(tp=3), dt.Mesh(dp=2, tp=2))
X = torch.arange(1, 25.0).reshape(4, 6) / 25  # in (0, 1): probabilities, and deviations


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def _of_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.t()[1:].uniform_()
    return y


def _attention(x: Tensor) -> Tensor:
    q = x.reshape(1, 2, 3, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "rand_like of a dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randn_like bf16": lambda x: torch.randn_like(x.bfloat16()),
    "randint_like from": lambda x: torch.randint_like(x, 3, 10, dtype=torch.int64),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x),
    "normal_": lambda x: x.clone().normal_(2.0, 0.5),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "normal": lambda x: torch.normal(x, x),
    "a view": _of_a_view,
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x.reshape(2, 3, 4), 0.4),
    "dropout2d": lambda x: F.dropout2d(x.reshape(2, 3, 2, 2), 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(
        x.reshape(2, 3, 4), 0.4, training=True
    ),
    "attention": _attention,
    "gumbel_softmax": F.gumbel_softmax,
}


def drawn(fn: Callable[[Tensor], Tensor], mesh: dt.Mesh, stated: Any = None) -> Tensor:
    dt.manual_seed(3)
    return fn(dt.distribute(X, mesh, **(stated or {}))).full_tensor()  # type: ignore[attr-defined]


@pytest.mark.default("rand_like")
@pytest.mark.parametrize("name", OPS)
def test_eager_random_ops_draw_same_numbers_under_any_placement(name: str) -> None:
    wanted = drawn(OPS[name], ONE)
    before = torch.get_rng_state()
    for mesh in MESHES:
        for stated in placements(mesh, 2):
            got = drawn(OPS[name], mesh, stated)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)  # torch's generator is not read


def test_successive_draws_differ_and_manual_seed_repeats_them() -> None:
    x = dt.distribute(X, dt.Mesh(tp=2), tp=dt.Row())

    def three() -> list[Tensor]:
        dt.manual_seed(5)
        return [torch.rand_like(x).full_tensor() for _ in range(3)]  # type: ignore[attr-defined]

    found = three()
    assert all(torch.equal(a, b) for a, b in zip(found, three(), strict=True))
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    dt.manual_seed(6)
    assert not torch.equal(torch.rand_like(x).full_tensor(), found[0])  # type: ignore[attr-defined]


def test_eager_random_ops_follow_torch_distributions() -> None:
    x = dt.distribute(torch.full((300, 200), 0.25), dt.Mesh(tp=2), tp=dt.Row())
    mean: dict[str, Callable[[Tensor], Tensor]] = {
        "0.5": torch.rand_like,
        "0.0": torch.randn_like,
        "0.25": torch.bernoulli,
        "3.0": lambda x: torch.normal(3.0, x),
        "0.250": lambda x: F.dropout(x, 0.3),
        "4.5": lambda x: torch.randint_like(x, 10),
    }
    for wanted, fn in mean.items():
        assert float(fn(x).mean()) == pytest.approx(float(wanted), abs=0.02), wanted
    dropped = F.dropout(x, 0.3)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.max()) == pytest.approx(0.25 / 0.7)


def test_eager_random_op_result_has_placement_of_operand() -> None:
    mesh = dt.Mesh(dp=2, tp=2)
    x = dt.distribute(X, mesh, dp=dt.Row(), tp=dt.Column())
    for fn in (torch.rand_like, F.dropout, torch.bernoulli, lambda x: x.clone().normal_()):
        assert str(fn(x).spec) == str(x.spec)  # type: ignore[attr-defined]


def test_eager_dropout_gradient_uses_forward_mask() -> None:
    x = dt.distribute(X, dt.Mesh(tp=2), tp=dt.Column()).requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    kept = (y.detach().full_tensor() != 0).float()  # type: ignore[attr-defined]
    assert torch.equal(x.grad.full_tensor(), 2 * kept)  # type: ignore[attr-defined]
    assert 0 < float(kept.mean()) < 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.multinomial(x, 2),
        lambda x: x.normal_(generator=torch.Generator()),
        lambda x: x.geometric_(0.5),
        lambda x: F.rrelu(x, training=True),
    ],
    ids=["multinomial", "generator", "geometric", "rrelu"],
)
def test_random_op_without_counter_based_form_is_refused_with_fix(
    fn: Callable[[Tensor], Tensor],
) -> None:
    x = dt.distribute(X, dt.Mesh(tp=2))
    with pytest.raises(
        dt.PlanningError, match="no form by counter(.|\n)*fix: (rand_like|torch.arg)"
    ):
        fn(x)


def test_categorical_draw_written_as_multinomial_fix_advises_works() -> None:
    def drawn(p: Tensor) -> Tensor:
        return torch.argmax(p / torch.empty_like(p).exponential_(), -1)

    p = torch.tensor([0.25, 0.0, 0.75]).expand(1024, 3).contiguous()
    whole, split = (dt.compile(drawn, mesh)(p).full_tensor() for mesh in (dt.Mesh(), dt.Mesh(dp=2)))
    assert torch.equal(whole, split)
    assert 0.7 < float((whole == 2).float().mean()) < 0.8 and not (whole == 1).any()
