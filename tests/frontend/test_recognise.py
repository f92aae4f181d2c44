"""Tests that norms, gates, rotary positions and dropouts written out in a program become one op
with bitwise equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph, Result
from tests.frontend.eager import check, run_graph

B, T, D = 2, 6, 8
HALVES = (torch.bfloat16, torch.float16)


def ops(graph: Graph) -> list[str]:
    """Return the project's own ops of the forward, without their namespace."""
    return [
        str(n.target).removeprefix("dt.").removesuffix(".default")
        for n in graph.nodes
        if str(n.target).startswith("dt.") and n.meta["phase"] == "forward"
    ]


def same_bits(graph: Graph, model: nn.Module, *args: Tensor) -> None:
    """Check that the results of the graph are bitwise those of plain torch."""
    found = run_graph(graph, model, args, {0: torch.ones(())})
    want = model(*args)
    assert torch.equal(found[Result(0)].view(torch.int32), want.detach().view(torch.int32))


class Model(nn.Module):
    """A function of x and a weight, then the mean square."""

    def __init__(
        self, fn: Callable[..., Tensor], dtype: torch.dtype = torch.float32, width: int = D
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        self.up = nn.Linear(D, width, dtype=dtype)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self).float().pow(2).mean()


def captured(fn: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Graph:
    """Return the graph, after checking that its results are bitwise those of plain torch and its
    gradients close to torch's."""
    model = Model(fn, dtype)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    graph = check(model, (x,), tolerance=1e-6 if dtype == torch.float32 else 2e-2)
    same_bits(graph, model, x)
    return graph


# -- norms -----------------------------------------------------------------------------------------


def llama(x: Tensor, m: Any) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * wide.to(x.dtype)


def gemma(x: Tensor, m: Any) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + m.weight.float())).type_as(x)


def t5(x: Tensor, m: Any) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normed = x * torch.rsqrt(variance + 1e-6)
    return m.weight * normed.to(m.weight.dtype)


def plain(x: Tensor, m: Any) -> Tensor:
    wide = x.float()
    return (torch.rsqrt(1e-5 + (wide * wide).mean(2, keepdim=True)) * wide).type_as(x) * m.weight


@pytest.mark.default("dtype1-t5")
@pytest.mark.parametrize("norm", [llama, gemma, t5, plain])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_written_out_rms_norm_becomes_one_op(
    norm: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    assert ops(captured(norm, dtype)) == ["rms_norm"]


def test_recognised_rms_norm_records_offset_and_rounding_dtypes() -> None:
    def options(norm: Callable[..., Tensor]) -> tuple[Any, ...]:
        graph = captured(norm, torch.bfloat16)
        (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.rms_norm.default)
        return tuple(node.args[3:])

    assert options(llama) == (0.0, torch.bfloat16, torch.bfloat16)
    assert options(gemma) == (1.0, torch.float32, torch.bfloat16)


def residual(x: Tensor, m: Any) -> Tensor:
    total = x + m.up(x)
    return total + llama(total, m)


def test_residual_sum_before_rms_norm_is_fused() -> None:
    assert ops(captured(residual)) == ["add_rms_norm"]
    assert ops(captured(residual, torch.bfloat16)) == ["add_rms_norm"]


def layer_norm_of_sum(x: Tensor, m: Any) -> Tensor:
    total = m.up(x) + x
    return F.layer_norm(total, (D,), m.weight, m.up.bias) + total


def layer_norm_of_one(x: Tensor, m: Any) -> Tensor:
    return F.layer_norm(x, (D,), m.weight, m.up.bias) + m.up(x)


def test_residual_sum_before_layer_norm_is_fused() -> None:
    assert ops(captured(layer_norm_of_sum)) == ["add_layer_norm"]
    graph = captured(layer_norm_of_one)
    assert ops(graph) == []
    assert [each.op for each in graph.recognised] == ["native_layer_norm"]


def test_fused_residual_sum_keeps_variable_name() -> None:
    graph = captured(layer_norm_of_sum)
    (total,) = (n for n in graph.nodes if n.name == "total")
    assert total.args[1] == 0


def narrow_squares(x: Tensor, m: Any) -> Tensor:
    return m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def narrow_offset(x: Tensor, m: Any) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1.0 + m.weight)


def rounded_twice(x: Tensor, m: Any) -> Tensor:
    wide = x.to(torch.float16).to(torch.bfloat16).float()
    return m.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def shared_scale(x: Tensor, m: Any) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * (x * scale) + scale


def shared_normed(x: Tensor, m: Any) -> Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * normed + normed


def other_mean(x: Tensor, m: Any) -> Tensor:
    return m.weight * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6))


def other_value(x: Tensor, m: Any) -> Tensor:
    return m.weight * (m.up(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def weightless(x: Tensor, m: Any) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def full_weight(x: Tensor, m: Any) -> Tensor:
    return m.weight.expand(T, D) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.default("narrow_squares-dtype0-squares are computed in bfloat16")
@pytest.mark.parametrize(
    ("norm", "dtype", "reason"),
    [
        (narrow_squares, torch.bfloat16, "squares are computed in bfloat16"),
        (narrow_offset, torch.bfloat16, "added in bfloat16"),
        (shared_scale, torch.float32, "used elsewhere"),
        (shared_normed, torch.float32, "no weight, or more than one"),
        (other_mean, torch.float32, "not over the last dim alone"),
        (other_value, torch.float32, "than it squares"),
        (weightless, torch.float32, "no weight"),
        (full_weight, torch.float32, "another shape"),
    ],
)
def test_near_miss_of_rms_norm_is_not_fused_and_reason_is_reported(
    norm: Callable[..., Tensor], dtype: torch.dtype, reason: str
) -> None:
    graph = captured(norm, dtype)
    assert ops(graph) == []
    (found,) = graph.recognised
    assert found.op == "" and reason in found.reason, found.reason


def test_rms_norm_that_rounds_twice_keeps_casts() -> None:
    assert ops(captured(rounded_twice, torch.bfloat16)) == ["rms_norm"]


def test_rms_norm_partly_inside_checkpoint_is_not_fused() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        def scale(x: Tensor) -> Tensor:
            return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        return m.weight * (x * checkpoint(scale, x, use_reentrant=False))

    graph = captured(fn)
    assert ops(graph) == []
    assert "checkpoint" in graph.recognised[0].reason


# -- gates -----------------------------------------------------------------------------------------


def gelu_new(x: Tensor) -> Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": gelu_new,
}


@pytest.mark.default("dtype0-silu")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_out_gate_becomes_one_op(kind: str, dtype: torch.dtype) -> None:
    def first(x: Tensor, m: Any) -> Tensor:
        return GATES[kind](m.up(x)) * x

    def last(x: Tensor, m: Any) -> Tensor:
        return x * GATES[kind](m.up(x))

    for fn in (first, last):
        graph = captured(fn, dtype)
        (node,) = (n for n in graph.nodes if n.target is torch.ops.dt.gated.default)
        assert node.args[2] == kind


def test_gate_whose_activation_is_used_elsewhere_is_not_fused() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        active = F.silu(x)
        return active * m.up(x) + active

    graph = captured(fn)
    assert ops(graph) == []
    assert graph.recognised[0].reason == "its activation is used elsewhere"


@pytest.mark.default("<lambda>0")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: F.silu(m.up(x)),
        lambda x, m: F.silu(m.up(x)) * 2.0,
        lambda x, m: F.silu(m.up(x)) * m.weight,
        lambda x, m: F.silu(m.up(x)).pow(2),
        lambda x, m: torch.tanh(m.up(x)) * x,
        lambda x, m: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))) * x,
    ],
)
def test_activation_without_product_is_not_reported_as_gate(fn: Callable[..., Tensor]) -> None:
    graph = captured(fn)
    assert ops(graph) == []
    assert graph.recognised == ()


def test_gate_of_two_dtypes_is_not_fused() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        return F.silu(m.up(x)) * x.float()

    graph = captured(fn, torch.bfloat16)
    assert ops(graph) == []
    assert "different dtypes" in graph.recognised[0].reason


def test_gate_under_autocast_is_fused_with_equal_bits() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            gate = m.up(x)
            return F.silu(gate) * m.up(x) + 0 * x

    model = Model(fn)
    x = torch.randn(B, T, D, requires_grad=True)
    graph = check(model, (x,), tolerance=2e-2)
    same_bits(graph, model, x)
    assert ops(graph) == ["gated"]


# -- rotary positions ------------------------------------------------------------------------------


def angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = torch.arange(T)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return turned.cos().to(dtype), turned.sin().to(dtype)


def rope(rotate: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
    def fn(x: Tensor, m: Any) -> Tensor:
        cos, sin = angles(dtype or x.dtype)
        x = m.up(x).view(B, T, 2, 4).transpose(1, 2)
        return x * cos + rotate(x) * sin

    return fn


def by_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def by_chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def by_split(x: Tensor) -> Tensor:
    a, b = x.split(x.shape[-1] // 2, dim=-1)
    return torch.cat([-b, a], -1)


@pytest.mark.default("dtype0-by_slices")
@pytest.mark.parametrize("rotate", [by_slices, by_chunks, by_split])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_out_rotary_positions_become_one_op(rotate: Any, dtype: torch.dtype) -> None:
    assert ops(captured(rope(rotate), dtype)) == ["rope"]


def test_rotary_positions_of_two_dtypes_become_one_op() -> None:
    assert ops(captured(rope(by_slices, torch.float32), torch.bfloat16)) == ["rope"]


def test_rotary_positions_with_learned_angles_have_eager_gradients() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        return x * m.weight + by_slices(x) * (m.weight * 2)

    assert ops(captured(fn)) == ["rope"]


def wrong_halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., :2], x[..., 2:]), dim=-1)


def uneven(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 1:], x[..., :1]), dim=-1)


@pytest.mark.default("wrong_halves")
@pytest.mark.parametrize("rotate", [wrong_halves, uneven])
def test_rotation_that_does_not_swap_halves_is_not_fused(rotate: Any) -> None:
    graph = captured(rope(rotate))
    assert ops(graph) == []
    assert "two halves" in graph.recognised[0].reason


def test_rotary_positions_with_in_place_change_are_not_fused() -> None:
    def fn(x: Tensor, m: Any) -> Tensor:
        cos, sin = angles(x.dtype)
        x = m.up(x).view(B, T, 2, 4).transpose(1, 2) * 1.0
        turned = by_slices(x)
        return x.mul_(2.0) * cos + turned * sin

    graph = captured(fn)
    assert ops(graph) == []
    assert "same tensor" in graph.recognised[0].reason

    def again(x: Tensor, m: Any) -> Tensor:
        cos, sin = angles(x.dtype)
        x = m.up(x).view(B, T, 2, 4).transpose(1, 2) * 1.0
        turned = by_slices(x)
        x[0].mul_(2.0)
        return x * cos + turned * sin

    graph = captured(again)
    assert ops(graph) == []
    assert "in place" in graph.recognised[0].reason


# -- dropouts --------------------------------------------------------------------------------------


def residual_first(x: Tensor, m: Any) -> Tensor:
    return x + F.dropout(m.up(x), 0.5)


def residual_last(x: Tensor, m: Any) -> Tensor:
    return F.dropout(m.up(x), 0.5) + x


def among_others(x: Tensor, m: Any) -> Tensor:
    first = F.dropout(x, 0.25) + torch.rand_like(x)
    h = F.dropout(m.up(first), 0.5)
    return (first + h) * torch.rand_like(x) + F.dropout(first, 0.1)


def before_a_norm(x: Tensor, m: Any) -> Tensor:
    total = x + F.dropout(m.up(x), 0.5)
    return total + F.layer_norm(total, (D,), m.weight, m.up.bias)


def in_a_checkpoint(x: Tensor, m: Any) -> Tensor:
    return checkpoint(residual_first, x, m, use_reentrant=False)


def both_graphs(
    fn: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Graph, dict[Any, Tensor]]]:
    """Capture fn with and without recognition; return both graphs and their results."""
    model = Model(fn, dtype)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    found = []
    for hides in (False, True):
        if hides:
            monkeypatch.setattr("dtensor.frontend.capture.canonical._has_anchor", lambda _: False)
        graph = capture(model, (x,), grads="loss")
        found.append((graph, run_graph(graph, model, (x,), {0: torch.ones(())})))
    return found


def numbers(graph: Graph) -> list[int]:
    return [n.kwargs["op"] for n in graph.nodes if "at_seed" in n.kwargs]


@pytest.mark.default("in_a_checkpoint-1-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (residual_first, 1),
        (residual_last, 1),
        (among_others, 2),
        (before_a_norm, 1),
        (in_a_checkpoint, 1),
    ],
)
def test_dropout_and_residual_sum_become_one_op_with_equal_bits(
    fn: Callable[..., Tensor], count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, found), (written, wanted) = both_graphs(fn, dtype, monkeypatch)
    assert ops(one).count("dropout_add") == count and "dropout_add" not in ops(written)
    assert numbers(one) == numbers(written) == list(range(len(numbers(written))))
    assert found.keys() == wanted.keys() and len(wanted) >= 3
    for what in wanted:
        assert torch.equal(found[what], wanted[what]), what


def used_twice(x: Tensor, m: Any) -> Tensor:
    dropped = F.dropout(m.up(x), 0.5)
    return (x + dropped) * dropped


def residual_comes_later(x: Tensor, m: Any) -> Tensor:
    return F.dropout(x, 0.5) + m.up(x)


def two_of_one(x: Tensor, m: Any) -> Tensor:
    dropped = F.dropout(x, 0.5)
    return dropped + dropped


def scaled_sum(x: Tensor, m: Any) -> Tensor:
    return torch.add(x, F.dropout(m.up(x), 0.5), alpha=2)


def broadcast_sum(x: Tensor, m: Any) -> Tensor:
    return F.dropout(m.up(x), 0.5) + m.weight


def number_added(x: Tensor, m: Any) -> Tensor:
    return F.dropout(m.up(x), 0.5) + 1.0


def idle(x: Tensor, m: Any) -> Tensor:
    return x + F.dropout(m.up(x), 0.5, training=False) + F.dropout(m.up(x), 0.0)


def not_in_order(x: Tensor, m: Any) -> Tensor:
    y = x.transpose(0, 1)
    total = y + F.dropout(y, 0.5)
    return total.transpose(0, 1).view(-1)


def changed_between(x: Tensor, m: Any) -> Tensor:
    y = x * 1.0
    rows = y.view(-1)
    dropped = F.dropout(m.up(x), 0.5)
    rows.mul_(2.0)
    return y + dropped


def other_dtype(x: Tensor, m: Any) -> Tensor:
    return x.double() + F.dropout(m.up(x), 0.5)


def checkpoint_ends(x: Tensor, m: Any) -> Tensor:
    return x + checkpoint(lambda x: F.dropout(m.up(x), 0.5), x, use_reentrant=False)


@pytest.mark.default("used_twice-")
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (used_twice, ""),
        (residual_comes_later, "is computed later"),
        (two_of_one, ""),
        (scaled_sum, ""),
        (broadcast_sum, ""),
        (number_added, ""),
        (idle, ""),
        (not_in_order, ""),
        (changed_between, "in place"),
        (other_dtype, "different dtypes"),
        (checkpoint_ends, "a checkpoint"),
    ],
)
def test_other_dropout_patterns_are_not_fused(
    fn: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (graph, found), (_, wanted) = both_graphs(fn, torch.float32, monkeypatch)
    assert "dropout_add" not in ops(graph)
    assert [m.op for m in graph.recognised] == [""] * len(graph.recognised)
    assert (reason in graph.recognised[0].reason) if reason else graph.recognised == ()
    assert all(torch.equal(found[what], wanted[what]) for what in wanted)


def test_dropout_add_refuses_operands_of_two_dtypes() -> None:
    x, at = torch.randn(2, 3), {"at_seed": 1, "at_step": 2, "op": 3}
    with pytest.raises(TypeError, match=r"one dtype, not torch.float32 and torch.float64"):
        torch.ops.dt.dropout_add(x, x.double(), 0.5, **at)
