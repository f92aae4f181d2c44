"""Which masks `dt.attention` does without, which heads are grouped, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph
from tests.frontend.eager import check

B, H, G, T, D = 2, 4, 2, 6, 8
INFINITY = float("inf")
FAR = torch.ones(T, T, dtype=torch.bool).tril()


def heads(num: int = H, length: int = T, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, num, length, D, generator=generator, requires_grad=True)


def attentions(graph: Graph) -> list[bool]:
    """Of each dt.attention whether it is causal."""
    found = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    return [bool(n.args[3]) for n in found]


def captured(fn: Callable[..., Tensor], *args: Tensor) -> Graph:
    """The graph, whose loss and gradients are those of plain torch."""
    return check(fn, args, grads="loss")


def squares(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]


def earlier(q: Tensor, k: Tensor) -> Tensor:
    i, j = positions(q, k)
    return j <= i


def per_row(q: Tensor, k: Tensor) -> Tensor:
    """As transformers makes it: by indexing with the numbers of the rows."""
    ids = torch.arange(q.shape[2])[None].expand(B, -1)
    rows = torch.arange(B)[:, None, None, None]
    at, to = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])
    return (ids[rows, to[None, None, None]] <= ids[rows, at]).expand(B, -1, -1, -1)


def wide_window(q: Tensor, k: Tensor) -> Tensor:
    i, j = positions(q, k)
    return (j <= i) & (j > i - T)


CAUSAL = {
    "comparison": earlier,
    "rows of a batch": per_row,
    "window": wide_window,
    "tril": lambda q, k: torch.ones(T, T, dtype=torch.bool).tril(),
    "infinite": lambda q, k: torch.full((T, T), -INFINITY).triu(1),
    "lowest": lambda q, k: torch.zeros(T, T).masked_fill(
        ~earlier(q, k), torch.finfo(torch.float32).min
    ),
}
NONE = {
    "ones": lambda q, k: torch.ones(1, 1, 1, T, dtype=torch.bool),
    "zeros": lambda q, k: torch.zeros(T, T),
    "positions": lambda q, k: (torch.arange(T) >= 0)[None, None, :, None].expand(B, 1, T, T),
}


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_a_constant_mask_of_what_comes_later_is_causal(mask: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, mask(q, k)))

    assert attentions(captured(fn, heads(), heads(seed=1), heads(seed=2))) == [True]


@pytest.mark.parametrize("mask", NONE.values(), ids=NONE)
def test_a_constant_mask_that_hides_nothing_goes(mask: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, mask(q, k)))

    assert attentions(captured(fn, heads(), heads(seed=1), heads(seed=2))) == [False]


@pytest.mark.parametrize("length", [4, 9])
def test_causal_counts_from_the_first_position(length: int) -> None:
    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, earlier(q, k)))

    def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = positions(q, k)
        seen = j <= i + max(0, length - T)
        return squares(F.scaled_dot_product_attention(q, k, v, seen))

    args = heads(), heads(length=length, seed=1), heads(length=length, seed=2)
    assert attentions(captured(first, *args)) == [True]
    assert attentions(captured(last, *args)) == ([] if length > T else [True])


class Masked(nn.Module):
    """Attention with a mask that is its own."""

    def __init__(self, *, is_parameter: bool) -> None:
        super().__init__()
        mask = torch.zeros(T, T)
        if is_parameter:
            self.mask = nn.Parameter(mask)
        else:
            self.register_buffer("mask", mask)

    def forward(self, q: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, q, q, self.mask))


def by_argument(q: Tensor, lengths: Tensor) -> Tensor:
    seen = torch.arange(T)[None] < lengths[:, None]
    return squares(F.scaled_dot_product_attention(q, q, q, seen[:, None, None]))


def by_closure(q: Tensor) -> Tensor:
    return squares(F.scaled_dot_product_attention(q, q, q, FAR))


def by_chance(q: Tensor) -> Tensor:
    return squares(F.scaled_dot_product_attention(q, q, q, torch.rand(T, T) < 2))


def written_later(q: Tensor) -> Tensor:
    seen = torch.ones(T, T, dtype=torch.bool)
    seen[:, T - 1] = False
    return squares(F.scaled_dot_product_attention(q, q, q, seen))


def windowed(q: Tensor) -> Tensor:
    i, j = positions(q, q)
    return squares(F.scaled_dot_product_attention(q, q, q, (j <= i) & (j > i - 2)))


def distance(q: Tensor) -> Tensor:
    i, j = positions(q, q)
    return squares(F.scaled_dot_product_attention(q, q, q, (j - i).float()))


def three_dims(q: Tensor) -> Tensor:
    return squares(F.scaled_dot_product_attention(q[0], q[0], q[0]))


LENGTHS = torch.tensor([T, 3])
AS_WRITTEN: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "argument": (by_argument, (heads(), LENGTHS), "depends on an argument"),
    "parameter": (Masked(is_parameter=True), (heads(),), "depends on mask"),
    "buffer": (Masked(is_parameter=False), (heads(),), "depends on mask"),
    "closure": (by_closure, (heads(),), "depends on a tensor that is held"),
    "in place": (written_later, (heads(),), "changed in place"),
    "window": (windowed, (heads(),), "neither causal nor all true"),
    "bias": (distance, (heads(),), "adds to the scores"),
    "dims": (three_dims, (heads(),), "3 dims"),
}


@pytest.mark.parametrize("case", AS_WRITTEN, ids=AS_WRITTEN)
def test_what_is_no_constant_stays_and_is_named(case: str) -> None:
    fn, args, reason = AS_WRITTEN[case]
    graph = capture(fn, args, grads="loss")
    assert attentions(graph) == []
    (found,) = graph.recognised
    assert (found.what, found.op) == ("attention", "")
    assert reason in found.reason, found.reason


def test_a_mask_that_is_drawn_stays() -> None:
    graph = capture(by_chance, (heads(),), grads="loss")
    assert attentions(graph) == []
    assert "dt.random_uniform" in graph.recognised[0].reason or "rand" in graph.recognised[0].reason


def test_a_closed_over_mask_is_read_at_each_call() -> None:
    """It is an input of the graph, which is compared and read anew: no constant."""
    graph = capture(by_closure, (heads(),), grads="loss")
    assert any(type(what).__name__ == "Const" for what in graph.inputs)


# -- groups ----------------------------------------------------------------------------------------


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // G, dim=1)


def expanded(x: Tensor) -> Tensor:
    b, g, s, d = x.shape
    return x[:, :, None].expand(b, g, H // g, s, d).reshape(b, H, s, d)


def tiled(x: Tensor) -> Tensor:
    """Another order: each query head's neighbour has another group."""
    return x.repeat(1, H // G, 1, 1)


def tiled_by_expanding(x: Tensor) -> Tensor:
    b, g, s, d = x.shape
    return x[:, None].expand(b, H // g, g, s, d).reshape(b, H, s, d)


@pytest.mark.parametrize("repeat", [interleaved, expanded])
def test_repeated_heads_are_grouped(repeat: Callable[[Tensor], Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True))

    graph = captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [H, G, G]


@pytest.mark.parametrize("repeat", [tiled, tiled_by_expanding])
def test_heads_in_another_order_are_not_grouped(repeat: Callable[[Tensor], Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True))

    graph = captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [H, H, H]


def test_keys_changed_after_they_were_repeated_stay_repeated() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k * 2
        many, more = interleaved(keys), interleaved(v)
        keys.mul_(3)
        return squares(F.scaled_dot_product_attention(q, many, more)) + keys.mean()

    captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))


def test_one_of_keys_and_values_that_is_repeated_is_not_grouped() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, interleaved(k), v))

    captured(fn, heads(), heads(G, seed=1), heads(seed=2))
