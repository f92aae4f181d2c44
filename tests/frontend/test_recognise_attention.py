"""Tests which attention masks capture removes or keeps, which heads it groups, and which
attention it leaves as written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.recognise import constants
from dtensor.frontend.graph import Graph
from tests.frontend.eager import check

B, H, G, T, D = 2, 4, 2, 6, 8
INFINITY = float("inf")
FAR = torch.ones(T, T, dtype=torch.bool).tril()


def heads(num: int = H, length: int = T, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, num, length, D, generator=generator, requires_grad=True)


def attentions(graph: Graph) -> list[bool]:
    """Return whether each dt.attention of the graph is causal."""
    found = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    return [bool(n.args[3]) for n in found]


def masks(graph: Graph) -> list[tuple[int, ...]]:
    """Return the mask shape of each dt.attention_masked of the graph."""
    found = (n for n in graph.nodes if n.target is torch.ops.dt.attention_masked.default)
    return [tuple(n.args[3].meta["val"].shape) for n in found]


def captured(fn: Callable[..., Tensor], *args: Tensor) -> Graph:
    """Return the graph, after checking that its loss and gradients are those of plain torch."""
    return check(fn, args, grads="loss")


def squares(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]


def earlier(q: Tensor, k: Tensor) -> Tensor:
    i, j = positions(q, k)
    return j <= i


def per_row(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask as transformers makes it: by indexing with the row numbers."""
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
def test_constant_causal_mask_becomes_is_causal(mask: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, mask(q, k)))

    assert attentions(captured(fn, heads(), heads(seed=1), heads(seed=2))) == [True]


@pytest.mark.parametrize("mask", NONE.values(), ids=NONE)
def test_constant_mask_that_hides_nothing_is_removed(mask: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, mask(q, k)))

    assert attentions(captured(fn, heads(), heads(seed=1), heads(seed=2))) == [False]


@pytest.mark.parametrize("length", [4, 9])
def test_only_causal_mask_aligned_to_first_position_becomes_is_causal(length: int) -> None:
    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v, earlier(q, k)))

    def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = positions(q, k)
        seen = j <= i + max(0, length - T)
        return squares(F.scaled_dot_product_attention(q, k, v, seen))

    args = heads(), heads(length=length, seed=1), heads(length=length, seed=2)
    assert attentions(captured(first, *args)) == [True]
    graph = captured(last, *args)
    assert attentions(graph) == ([] if length > T else [True])
    assert masks(graph) == ([(T, length)] if length > T else [])


def test_causal_mask_of_a_large_batch_is_computed_for_one_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "MAX_ELEMENTS", T * T)

    def fn(q: Tensor) -> Tensor:
        at = torch.arange(T)[None].expand(B, -1)
        mask = at[:, None, :] <= torch.arange(T)[None, :, None]
        mask = torch.ones((), dtype=torch.bool) & mask
        return squares(F.scaled_dot_product_attention(q, q, q, mask[:, None]))

    assert attentions(captured(fn, heads())) == [True]


def test_values_narrower_than_keys_are_padded() -> None:
    """Latent attention (DeepSeek-V3) has such values."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, k, v[..., :5], is_causal=True))

    assert attentions(captured(fn, heads(), heads(seed=1), heads(seed=2))) == [True]


class Masked(nn.Module):
    """Attention with a mask that is a buffer or parameter of the module."""

    def __init__(self, *, is_parameter: bool, is_trained: bool = False) -> None:
        super().__init__()
        mask = torch.randn(T, T, generator=torch.Generator().manual_seed(9))
        if is_parameter:
            self.mask = nn.Parameter(mask, is_trained)
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


def expanded_padding(q: Tensor, lengths: Tensor) -> Tensor:
    seen = (torch.arange(T)[None] < lengths[:, None])[:, None, None].expand(B, 1, T, T)
    return squares(F.scaled_dot_product_attention(q, q, q, seen))


def hidden(q: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask under which some queries see nothing."""
    i, j = positions(q, q)
    seen = (j <= i) & (j >= lengths[:, None, None, None] // 2)
    return squares(F.scaled_dot_product_attention(q, q, q, seen))


def lowest(q: Tensor, lengths: Tensor) -> Tensor:
    seen = torch.arange(T)[None] < lengths[:, None]
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return squares(F.scaled_dot_product_attention(q, q, q, bias[:, None, None]))


def by_head(q: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(q, q)
    return squares(F.scaled_dot_product_attention(q, q, q, ((j - i) * slopes[:, None, None])[None]))


def dropping(q: Tensor, lengths: Tensor) -> Tensor:
    seen = (torch.arange(T)[None] < lengths[:, None])[:, None, None]
    return squares(F.scaled_dot_product_attention(q, q, q, seen, dropout_p=0.5))


LENGTHS = torch.tensor([T, 3])
Program = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
MASKED: dict[str, tuple[Program, tuple[int, ...]]] = {
    "argument": ((by_argument, (heads(), LENGTHS)), (B, 1, 1, T)),
    "expanded": ((expanded_padding, (heads(), LENGTHS)), (B, 1, 1, T)),
    "all hidden": ((hidden, (heads(), LENGTHS)), (B, 1, T, T)),
    "lowest": ((lowest, (heads(), LENGTHS)), (B, 1, 1, T)),
    "frozen parameter": ((Masked(is_parameter=True), (heads(),)), (T, T)),
    "buffer": ((Masked(is_parameter=False), (heads(),)), (T, T)),
    "closure": ((by_closure, (heads(),)), (T, T)),
    "in place": ((written_later, (heads(),)), (T, T)),
    "window": ((windowed, (heads(),)), (T, T)),
    "bias": ((distance, (heads(),)), (T, T)),
    "heads": ((by_head, (heads(), torch.rand(H))), (1, H, T, T)),
    "by chance": ((by_chance, (heads(),)), (T, T)),
}


@pytest.mark.parametrize("case", MASKED, ids=MASKED)
def test_needed_mask_is_passed_to_attention_masked(case: str) -> None:
    (fn, args), shape = MASKED[case]
    graph = captured(fn, *args)
    assert attentions(graph) == [] and masks(graph) == [shape]
    (found,) = graph.recognised
    assert (found.what, found.op, found.reason) == ("attention", "dt.attention_masked", "")


SLOPES = torch.rand(H).requires_grad_()
AS_WRITTEN: dict[str, tuple[Program, str]] = {
    "parameter": (
        (Masked(is_parameter=True, is_trained=True), (heads(),)),
        "depends on mask, which wants a gradient",
    ),
    "slopes": ((by_head, (heads(), SLOPES)), "depends on an argument, which wants"),
    "dims": ((three_dims, (heads(),)), "3 dims"),
    "dropout": ((dropping, (heads(), LENGTHS)), "drops weights"),
}


@pytest.mark.parametrize("case", AS_WRITTEN, ids=AS_WRITTEN)
def test_unsupported_attention_stays_written_out_and_reason_is_reported(case: str) -> None:
    (fn, args), reason = AS_WRITTEN[case]
    graph = capture(fn, args, grads="loss")
    assert attentions(graph) == masks(graph) == []
    (found,) = graph.recognised
    assert (found.what, found.op) == ("attention", "")
    assert reason in found.reason, found.reason


def test_trained_mask_is_accepted_in_capture_without_gradients() -> None:
    graph = capture(by_head, (heads(), SLOPES), grads="none")
    assert masks(graph) == [(1, H, T, T)]


def test_boolean_mask_from_trained_number_needs_no_gradient() -> None:
    def fn(q: Tensor, limit: Tensor) -> Tensor:
        seen = torch.arange(T) < limit
        return squares(F.scaled_dot_product_attention(q, q, q, seen[None])) + limit * 2

    assert masks(captured(fn, heads(), torch.tensor(3.5, requires_grad=True))) == [(1, T)]


def test_autocast_casts_additive_mask_to_16_bits() -> None:
    def fn(q: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squares(F.scaled_dot_product_attention(q, q, q, bias).float())

    bias = torch.randn(T, T, generator=torch.Generator().manual_seed(5))
    (mask,) = (
        n.args[3]
        for n in check(fn, (heads(), bias), grads="loss", tolerance=3e-2).nodes
        if n.target is torch.ops.dt.attention_masked.default
    )
    assert mask.meta["val"].dtype == torch.bfloat16


def test_closed_over_mask_is_graph_input_read_at_each_call() -> None:
    """The mask is not folded into the graph as a constant."""
    graph = capture(by_closure, (heads(),), grads="loss")
    assert any(type(what).__name__ == "Const" for what in graph.inputs)


# -- groups ----------------------------------------------------------------------------------------


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // G, dim=1)


def expanded(x: Tensor) -> Tensor:
    b, g, s, d = x.shape
    return x[:, :, None].expand(b, g, H // g, s, d).reshape(b, H, s, d)


def tiled(x: Tensor) -> Tensor:
    """Repeat heads in another order: neighbouring query heads belong to different groups."""
    return x.repeat(1, H // G, 1, 1)


def tiled_by_expanding(x: Tensor) -> Tensor:
    b, g, s, d = x.shape
    return x[:, None].expand(b, H // g, g, s, d).reshape(b, H, s, d)


@pytest.mark.parametrize("repeat", [interleaved, expanded])
def test_repeated_key_and_value_heads_become_grouped_query_attention(
    repeat: Callable[[Tensor], Tensor],
) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True))

    graph = captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [H, G, G]


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("repeat", [interleaved, expanded, None])
def test_repeated_heads_become_grouped_query_attention_under_mask(
    repeat: Callable[[Tensor], Tensor] | None, length: int
) -> None:
    """Covers a decode step too: one query, and keys that are all in the cache except the last."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(T) <= lengths[:, None])[:, None, None]
        if repeat is None:
            return squares(F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True))
        return squares(F.scaled_dot_product_attention(q, repeat(k), repeat(v), seen))

    q = heads(length=length)
    graph = captured(fn, q, heads(G, seed=1), heads(G, seed=2), torch.tensor([2, 5]))
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention_masked.default)
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [H, G, G]


@pytest.mark.parametrize("repeat", [tiled, tiled_by_expanding])
def test_heads_repeated_in_other_order_are_not_grouped(repeat: Callable[[Tensor], Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True))

    graph = captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    assert [tuple(x.meta["val"].shape)[1] for x in node.args[:3]] == [H, H, H]


def test_keys_written_after_repeat_stay_repeated() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k * 2
        many, more = interleaved(keys), interleaved(v)
        keys.mul_(3)
        return squares(F.scaled_dot_product_attention(q, many, more)) + keys.mean()

    captured(fn, heads(), heads(G, seed=1), heads(G, seed=2))


def test_heads_are_not_grouped_if_only_keys_are_repeated() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return squares(F.scaled_dot_product_attention(q, interleaved(k), v))

    captured(fn, heads(), heads(G, seed=1), heads(seed=2))


def test_one_broadcast_key_head_is_one_group() -> None:
    """Without enable_gqa, torch broadcasts a single key head."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(T) <= lengths[:, None])[:, None, None]
        return squares(F.scaled_dot_product_attention(q, k, v, seen))

    graph = captured(fn, heads(), heads(1, seed=1), heads(1, seed=2), torch.tensor([2, 5]))
    assert masks(graph) == [(B, 1, 1, T)]


def test_attention_left_as_written_with_narrow_values_applies_its_mask() -> None:
    """The values are narrower than the keys, so the attention is not recognised."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(T) <= lengths[:, None])[:, None, None]
        return squares(F.scaled_dot_product_attention(q, k, v[..., : D // 2], seen))

    graph = captured(fn, heads(), heads(seed=1), heads(seed=2), torch.tensor([2, 5]))
    assert not masks(graph)
