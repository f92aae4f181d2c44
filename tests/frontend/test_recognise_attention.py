"""Tests which attention masks capture removes, replaces by terms or keeps, which heads it groups,
and which attention it leaves as written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.recognise import constants
from dtensor.frontend.graph import Graph, bound
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


def terms(graph: Graph) -> tuple[bool, list[int], list[str]]:
    """Return is_causal, the window and the comparisons of the only dt.attention of the graph."""
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.attention.default)
    a = bound(node)
    return bool(a["is_causal"]), list(a["window"] or ()), list(a["comparisons"] or ())


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


@pytest.mark.parametrize("width", [5, 11])
def test_values_of_another_width_reach_the_op(width: int) -> None:
    """Latent attention (DeepSeek-V3) has such values."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(T) <= lengths[:, None])[:, None, None]
        values = torch.cat([v, v], -1)[..., :width]
        return squares(F.scaled_dot_product_attention(q, k, values, seen))

    graph = captured(fn, heads(), heads(seed=1), heads(seed=2), torch.tensor([2, 5]))
    assert terms(graph) == (False, [], ["key"])


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
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 3]])
RESTARTS = torch.tensor([[0, 1, 2, 0, 1, 2], [5, 6, 0, 1, 0, 0]])
LOWEST = torch.finfo(torch.float32).min
Program = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def masked_by(mask: Callable[..., Tensor], *args: Tensor) -> Program:
    """Return a program whose mask is ``mask(i[t 1], j[1 s], *args)``."""

    def fn(q: Tensor, *args: Tensor) -> Tensor:
        i, j = positions(q, q)
        return squares(F.scaled_dot_product_attention(q, q, q, mask(i, j, *args)))

    return fn, (heads(), *args)


def same(x: Tensor) -> Tensor:
    return (x[:, :, None] == x[:, None, :])[:, None]


def in_documents(i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    """Return the mask of transformers for packed sequences, with a window of 3 tokens."""
    documents = (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, at, to = torch.arange(B)[:, None, None, None], i[None, None], j[None, None]
    query, key = x[rows, at], x[rows, to]
    seen = query.new_ones((), dtype=torch.bool) & (key > query - 3) & (key <= query)
    return seen & (documents[rows, at] == documents[rows, to])


Terms = tuple[bool, list[int], list[str]]
TERMS: dict[str, tuple[Program, Terms]] = {
    "padding": ((by_argument, (heads(), LENGTHS)), (False, [], ["key"])),
    "expanded": ((expanded_padding, (heads(), LENGTHS)), (False, [], ["key"])),
    "argument": (
        masked_by(lambda i, j, seen, x: seen, torch.ones(B, 1, 1, T) > 0, DOCUMENTS),
        (False, [], ["key"]),
    ),
    "four dims": (masked_by(lambda i, j, n: j < n[:, None, None, None], LENGTHS),
                  (False, [], ["key"])),
    "all hidden": ((hidden, (heads(), LENGTHS)), (True, [], ["key"])),
    "window": ((windowed, (heads(),)), (True, [1, 0], [])),
    "distance": (masked_by(lambda i, j: (i - j).abs() <= 2), (False, [2, 2], [])),
    "far": (masked_by(lambda i, j: ~((j - i >= 2) | ((i - j).abs() > 3))), (False, [3, 1], [])),
    "offset": (masked_by(lambda i, j: (j + 3 > i) & (i + 1 >= j)), (False, [2, 1], [])),
    "earlier": (masked_by(lambda i, j: i > j), (False, [], ["gt"])),
    "chunks": (masked_by(lambda i, j: i // 4 == j // 4), (False, [], ["eq"])),
    "documents": (masked_by(lambda i, j, x: same(x) & (j <= i), DOCUMENTS), (True, [], ["eq"])),
    "restarts": (masked_by(in_documents, RESTARTS), (True, [2, 0], ["eq"])),
    "unequal": (masked_by(lambda i, j, x: ~same(x) & (j <= i), DOCUMENTS), (True, [], ["ne"])),
    "not or": (masked_by(lambda i, j, x: ~(~same(x) | (j > i)), DOCUMENTS), (True, [], ["eq"])),
    "lowest": (
        masked_by(lambda i, j, x: torch.where(same(x) & (j <= i), 0.0, LOWEST), DOCUMENTS),
        (True, [], ["eq"]),
    ),
    "infinite": (
        masked_by(
            lambda i, j, x: torch.zeros(B, 1, T, T).masked_fill(~same(x), -INFINITY), DOCUMENTS
        ),
        (False, [], ["eq"]),
    ),
    "sum": (
        masked_by(
            lambda i, j, x: torch.where(same(x), 0.0, LOWEST) + torch.where(j > i, LOWEST, 0.0),
            DOCUMENTS,
        ),
        (True, [], ["eq"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TERMS, ids=TERMS)
def test_conjunction_of_comparisons_becomes_terms(case: str) -> None:
    (fn, args), expected = TERMS[case]
    graph = captured(fn, *args)
    assert terms(graph) == expected
    forward = [n.meta["val"] for n in graph.nodes if n.meta["phase"] == "forward"]
    assert not any(x.shape[-2:] == (T, T) for x in forward if isinstance(x, Tensor))


MANY = "no conjunction of comparisons"
MASKED: dict[str, tuple[Program, tuple[int, ...], str]] = {
    "lowest": ((lowest, (heads(), LENGTHS)), (B, 1, 1, T), "gives the mean of all values"),
    "frozen parameter": ((Masked(is_parameter=True), (heads(),)), (T, T), "adds numbers"),
    "buffer": ((Masked(is_parameter=False), (heads(),)), (T, T), "adds numbers"),
    "closure": ((by_closure, (heads(),)), (T, T), MANY),
    "in place": ((written_later, (heads(),)), (T, T), "is changed in place"),
    "bias": ((distance, (heads(),)), (T, T), "adds numbers"),
    "heads": ((by_head, (heads(), torch.rand(H))), (1, H, T, T), "differs between heads"),
    "by chance": ((by_chance, (heads(),)), (T, T), MANY),
    "or": (
        masked_by(lambda i, j, x: (j <= i) | (j < x[:, None, None, None]), LENGTHS),
        (B, 1, T, T),
        MANY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MASKED, ids=MASKED)
def test_other_mask_is_passed_to_attention_masked_with_reason(case: str) -> None:
    (fn, args), shape, reason = MASKED[case]
    graph = captured(fn, *args)
    assert attentions(graph) == [] and masks(graph) == [shape]
    (found,) = graph.recognised
    assert (found.what, found.op) == ("attention", "dt.attention_masked")
    assert reason in found.reason, found.reason


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

    graph = captured(fn, heads(), torch.tensor(3.5, requires_grad=True))
    assert terms(graph) == (False, [], ["key"])


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
    op = torch.ops.dt.attention if length == T else torch.ops.dt.attention_masked
    (node,) = (n for n in graph.nodes if n.target is op.default)
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
    assert terms(graph) == (False, [], ["key"])


def test_attention_left_as_written_with_narrow_values_applies_its_mask() -> None:
    """No op takes values narrower than the keys with a mask that has no terms."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        i, j = positions(q, k)
        seen = ((j <= lengths[:, None, None]) | (j <= i))[:, None]
        return squares(F.scaled_dot_product_attention(q, k, v[..., : D // 2], seen))

    graph = captured(fn, heads(), heads(seed=1), heads(seed=2), torch.tensor([2, 5]))
    assert not masks(graph)
