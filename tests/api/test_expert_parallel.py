"""A block of experts under each strategy, forward and backward in float64, against plain torch.

Routings are stated, so that adversarial ones occur: all tokens to one expert, experts without rows,
tokens without experts. The sizes are not divisible by the number of ranks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError

D, F = 6, 8


class Block(nn.Module):
    """Tokens of a dense layer, sent to experts with biases and combined with routing weights."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(experts)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=drawn, dtype=torch.float64) / 2)

        self.experts = experts
        self.dense, self.router = weight(D, D), weight(D, k)
        self.w_up, self.b_up = weight(experts, D, 2 * F), weight(experts, 2 * F)
        self.w_down, self.b_down = weight(experts, F, D), weight(experts, D)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        clean = x.nan_to_num()
        weights = torch.sigmoid(clean @ self.router)
        tokens = (clean @ self.dense).masked_fill(x.isnan(), float("nan"))
        rows, route = dt.to_experts(tokens, ids, self.experts)
        gate, up = dt.expert_linear(rows, self.w_up, route, self.b_up).chunk(2, -1)
        rows = dt.expert_linear(gate.tanh() * up, self.w_down, route, self.b_down)
        return clean + dt.from_experts(rows, route, weights)


def reference(block: Block, x: Tensor, ids: Tensor) -> Tensor:
    """Return what the block returns, one expert of one token at a time."""
    weights = torch.sigmoid(x.nan_to_num() @ block.router)
    tokens = []
    for token, own, scale in zip(x, ids.tolist(), weights, strict=True):
        y = token.nan_to_num()
        for j, e in enumerate(own):
            if e >= 0:
                gate, up = ((token @ block.dense) @ block.w_up[e] + block.b_up[e]).chunk(2, -1)
                y = y + scale[j] * ((gate.tanh() * up) @ block.w_down[e] + block.b_down[e])
        tokens.append(y)
    return torch.stack(tokens)


def loss_fn(model: nn.Module, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    return (model(x, ids) - y).square().mean()


# -- routings and strategies -----------------------------------------------------------------------

Routing = Callable[[int, int, int, torch.Generator], Tensor]
"""Returns ids[T k] for (T, k, E, generator)."""


def _distinct(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return torch.rand(t, e, generator=drawn).topk(k, -1).indices


def _to_first(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return torch.arange(k).expand(t, k).contiguous()


def _to_last(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return (e - 1 - torch.arange(k)).expand(t, k).contiguous()


def _one_row(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    ids = torch.full((t, k), -1)
    ids[-1, 0] = e // 2
    return ids


def _some_without(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    ids = _distinct(t, k, e, drawn)
    return ids.masked_fill(torch.rand(t, k, generator=drawn) < 0.4, -1)


def _half_of_experts(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return _distinct(t, k, max(k, e // 2), drawn)


def _nobody(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return torch.full((t, k), -1)


def _to_first_repeatedly(t: int, k: int, e: int, drawn: torch.Generator) -> Tensor:
    return torch.zeros(t, k, dtype=torch.int64)


ROUTINGS: dict[str, Routing] = {
    "uniform": _distinct,
    "to first": _to_first,
    "to last": _to_last,
    "half of experts": _half_of_experts,
    "some without": _some_without,
    "one row": _one_row,
    "nobody": _nobody,
}
REPEATED: dict[str, Routing] = {"to first repeatedly": _to_first_repeatedly}


@dataclass(frozen=True)
class Strategy:
    """Axes of a mesh, of which one has n ranks, that split tokens, experts and the inner dim."""

    mesh: dict[str, int]  # 0: n
    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    inner: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    zero: Any = None


def _microbatches(count: int) -> tuple[tuple[str, Any], ...]:
    return (("schedule", dt.GPipe(microbatches=count)),)


STRATEGIES: dict[str, Strategy] = {
    "experts": Strategy(dict(ep=0), experts=("ep",)),
    "tokens": Strategy(dict(ep=0), tokens=("ep",)),
    "both": Strategy(dict(ep=0), tokens=("ep",), experts=("ep",)),
    "inner": Strategy(dict(tp=0), inner="tp"),
    "tokens, inner": Strategy(dict(dp=2, tp=0), tokens=("dp",), inner="tp"),
    "both, inner": Strategy(dict(ep=0, tp=2), tokens=("ep",), experts=("ep",), inner="tp"),
    "experts, inner": Strategy(dict(tp=2, ep=0), experts=("ep",), inner="tp"),
    "dp, both": Strategy(dict(dp=2, ep=0), tokens=("dp", "ep"), experts=("ep",)),
    "both, dp": Strategy(dict(ep=0, dp=2), tokens=("ep", "dp"), experts=("ep",)),
    "dp, experts": Strategy(dict(dp=2, ep=0), tokens=("dp",), experts=("ep",)),
    "folded": Strategy(dict(dp=2, tp=0), tokens=("dp",), experts=("dp", "tp")),
    "folded, minor": Strategy(dict(dp=2, tp=0), tokens=("tp",), experts=("dp", "tp")),
    "folded, whole": Strategy(dict(dp=2, tp=0), experts=("dp", "tp")),
    "folded, both": Strategy(dict(dp=2, ep=0), tokens=("dp", "ep"), experts=("dp", "ep")),
    "folded, reversed": Strategy(dict(dp=2, ep=0), tokens=("dp", "ep"), experts=("ep", "dp")),
    "microbatches": Strategy(dict(ep=0), tokens=("ep",), experts=("ep",), options=_microbatches(2)),
    "accumulation": Strategy(dict(dp=0), tokens=("dp",), options=_microbatches(3)),
    "zero 1": Strategy(dict(dp=2, ep=0), ("dp", "ep"), ("ep",), zero={"dp": 1}),
    "zero 3": Strategy(dict(dp=2, ep=0), ("dp", "ep"), ("ep",), zero={"dp": 3}),
}


def placements(strategy: Strategy) -> dict[str, dict[str, dt.Shard]]:
    """Return the placements of the weights of a `Block`."""
    experts = {axis: dt.Shard(0) for axis in strategy.experts}
    inner = strategy.inner
    if not inner:
        return {"*_up": experts, "*_down": experts} if experts else {}
    return {
        "w_up": {**experts, inner: dt.Shard(2, blocks=2)},
        "b_up": {**experts, inner: dt.Shard(1, blocks=2)},
        "w_down": {**experts, inner: dt.Shard(1)},
        "b_down": experts,
    }


def check(name: str, routing: str, *, n: int, t: int, e: int, k: int, seed: int = 0) -> None:
    """Run a step of the block under the strategy. Compare the loss and all gradients."""
    strategy = STRATEGIES[name]
    drawn = torch.Generator().manual_seed(seed)
    ids = {**ROUTINGS, **REPEATED}[routing](t, k, e, drawn)
    x, y = (torch.randn(t, D, generator=drawn, dtype=torch.float64) for _ in range(2))
    x[(ids < 0).all(1)] = float("nan")
    block = Block(e, k)
    plain = copy.deepcopy(block)
    expected = (reference(plain, x, ids) - y).square().mean()
    if expected.requires_grad:
        expected.backward()
    mesh = dt.Mesh(**{axis: size or n for axis, size in strategy.mesh.items()})
    placed = dt.parallelize(block, mesh, placements(strategy), zero=strategy.zero)
    optimizer = torch.optim.SGD(block.parameters(), 1.0)
    inputs = {axis: dt.Row() for axis in strategy.tokens}
    step = dt.train_step(placed, loss_fn, optimizer, inputs=inputs, **dict(strategy.options))
    with dt.launch(mesh):
        loss = float(step(x, ids, y))
        state = dt.gather_state_dict(placed)["model"]
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for key, weight in plain.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert (state[key] - (weight - gradient)).abs().max() <= 1e-10, key


EDGES = [
    ("both", "to first", 3, 5, 4, 4),  # every token to every expert
    ("both", "one row", 4, 1, 7, 1),
    ("experts", "some without", 4, 7, 5, 2),
    ("tokens", "nobody", 2, 5, 4, 2),
    ("experts, inner", "some without", 3, 1, 5, 3),
    ("folded", "half of experts", 2, 7, 5, 2),
]


@pytest.mark.parametrize(("name", "routing", "n", "t", "e", "k"), EDGES)
def test_edge_cases_match_torch(name: str, routing: str, n: int, t: int, e: int, k: int) -> None:
    check(name, routing, n=n, t=t, e=e, k=k)


@pytest.mark.parametrize("name", ["both", "folded", "microbatches"])
def test_token_that_names_an_expert_twice_fails_its_step(name: str) -> None:
    with pytest.raises(TaskError, match="fix: ids that differ within a token"):
        check(name, "to first repeatedly", n=3, t=12, e=5, k=3)


def _drawn(seed: int) -> tuple[str, dict[str, int]]:
    drawn = random.Random(seed)
    e = drawn.choice((2, 3, 4, 5, 7, 8))
    k = drawn.choice([k for k in (1, 2, 3, e) if k <= e])
    sizes = dict(n=drawn.choice((2, 3, 4)), t=drawn.choice((1, 2, 3, 5, 7, 8, 11, 12)), e=e, k=k)
    return drawn.choice(list(ROUTINGS)), sizes


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_matches_torch(name: str) -> None:
    check_drawn(name, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_matches_torch_under_random_routings(name: str, seed: int) -> None:
    check_drawn(name, seed)


def check_drawn(name: str, seed: int) -> None:
    routing, sizes = _drawn(list(STRATEGIES).index(name) + 100 * seed)
    if STRATEGIES[name].options:
        sizes["t"] = 12  # as many tokens in each microbatch
    check(name, routing, seed=seed, **sizes)
