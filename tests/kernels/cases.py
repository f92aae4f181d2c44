"""Calls of every kernel, small enough for Triton's interpreter, and their expected results.

    for case in cases(torch.device("cpu"), full=False):
        case.check()          # AssertionError with the error and the bound

Shapes are aligned and odd (a vocabulary over two ranks, rows of 7 elements); operands are
strided, expanded and sliced. Results are compared with references.py in float64, relative to the
largest value of the reference. Dropout must be bitwise equal to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dtensor.sharding.ops.registered  # noqa: F401  registers the ops
from dtensor.kernels import blocks, cross_entropy, dropout, gates, norms, rope
from dtensor.sharding.ops.random import encode_pieces
from tests.kernels import references

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {F32: 1.3e-6, F16: 1e-3, BF16: 1.6e-2}
"""Of FlagGems, over the largest value."""
ALL = (F32, F16, BF16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a kernel and its reference. ``equal``: bitwise, otherwise within a tolerance."""

    kernel: str
    label: str
    call: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]
    dtypes: Sequence[torch.dtype]
    equal: bool = False

    def check(self) -> float:
        """Return the largest error over its bound. Raises AssertionError if it exceeds 1."""
        made, wanted = self.call(), self.reference()
        assert len(made) == len(wanted) == len(self.dtypes), f"{self.kernel} {self.label}"
        worst = 0.0
        with no_kernels():
            by_op = self.call()
        for number, (x, y, dtype) in enumerate(zip(made, by_op, self.dtypes, strict=True)):
            where = f"{self.kernel} {self.label}: result {number} beside the op's"
            assert x.stride() == y.stride(), (where, x.stride(), y.stride())
            # torch's layer norm keeps 16-bit statistics on a CPU, 32-bit on a GPU
            assert x.dtype == y.dtype or self.kernel == "add_layer_norm", (where, x.dtype, y.dtype)
            if dtype == y.dtype and dtype.is_floating_point:
                assert error_of(x.cpu(), y.cpu().double()) <= 2 * TOLERANCES[dtype], where
        for number, (x, want, dtype) in enumerate(zip(made, wanted, self.dtypes, strict=True)):
            where = f"{self.kernel} {self.label}: result {number}"
            assert x.dtype == dtype and x.shape == want.shape, (where, x.dtype, x.shape, want.shape)
            x = x.cpu()
            if self.equal or not dtype.is_floating_point:
                assert torch.equal(x, want), where
                continue
            error = error_of(x, want)
            assert error <= TOLERANCES[dtype], f"{where}: {error:.2e} of {TOLERANCES[dtype]:.1e}"
            worst = max(worst, error / TOLERANCES[dtype])
        return worst


@contextmanager
def no_kernels() -> Iterator[None]:
    """Make every launcher decline inside the block, so that the ops run."""
    modules = [cross_entropy, dropout, gates, norms, rope]
    for module in modules:
        vars(module)["takes"] = lambda *tensors: False
    try:
        yield
    finally:
        for module in modules:
            vars(module)["takes"] = blocks.takes


def error_of(x: Tensor, wanted: Tensor) -> float:
    """Return the largest error over the largest value; non-finite values must match exactly."""
    finite = wanted.isfinite()
    if not torch.equal(x.double()[~finite], wanted[~finite].double()):
        nan = x[~finite].isnan() & wanted[~finite].isnan()
        if not bool((nan | (x.double()[~finite] == wanted[~finite])).all()):
            return float("inf")
    if not bool(finite.any()):
        return 0.0
    difference = (x.double() - wanted.double())[finite].abs().max()
    return float(difference / wanted[finite].abs().max().clamp(min=1e-30))


def cases(device: torch.device, *, full: bool) -> Iterator[Case]:
    """Yield cases of every kernel. ``full``: in every dtype and more shapes."""
    for make in (
        _norms, _layer_norms, _gates, _bias_gelus, _ropes, _cross_entropies, _dropouts,
    ):  # fmt: skip
        yield from make(_Maker(device), full)


class _Maker:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=self.random).to(dtype).to(self.device)


def wide(x: Tensor) -> Tensor:
    return x.cpu().double()


def _norms(make: _Maker, full: bool) -> Iterator[Case]:
    dtypes = [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)] if full else [(F32, F32)]
    shapes = (
        [((3, 2, 16), 0), ((5, 7), 0), ((2, 40), 24)] if full else [((2, 3, 16), 0), ((3, 7), 4)]
    )
    for (dtype, of_weight), (shape, more), offset in (
        (d, s, o) for d in dtypes for s in shapes for o in ((0.0, 1.0) if full else (1.0,))
    ):
        x = make(*shape[:-1], shape[-1] + more, dtype=dtype)[..., : shape[-1]]
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if len(shape) == 3 else x
        residual, weight = make(*shape, dtype=dtype), make(shape[-1], dtype=of_weight)
        inner = F32 if offset else dtype  # Gemma rounds at the end, Llama before the weight
        out = torch.promote_types(inner, of_weight) if not offset else dtype
        grad = make(*shape, dtype=out)
        label = f"{dtype}, weight {of_weight}, {list(shape)}, row {x.stride(-2)}, offset {offset}"
        args = (1e-6, offset, inner, out)
        yield Case(
            kernel="rms_norm",
            label=label,
            call=lambda x=x, w=weight, a=args: norms.rms_norm(x, w, *a),
            reference=lambda x=x, w=weight, a=args: references.rms_norm(wide(x), wide(w), *a),
            dtypes=(out, F32),
        )

        def added(x: Tensor = x, r: Tensor = residual, w: Tensor = weight, a: Any = args) -> Any:
            total = references.rounded(wide(x) + wide(r), x.dtype)
            return (total, *references.rms_norm(total, wide(w), *a))

        yield Case(
            kernel="add_rms_norm",
            label=label,
            call=lambda x=x, r=residual, w=weight, a=args: norms.add_rms_norm(x, r, w, *a),
            reference=added,
            dtypes=(dtype, out, F32),
        )
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        operands = (grad, x, rstd, weight)
        yield Case(
            kernel="rms_norm_backward",
            label=label,
            call=lambda t=operands, o=offset: norms.rms_norm_backward(*t, o),
            reference=lambda t=operands, o=offset: references.rms_norm_backward(*map(wide, t), o),
            dtypes=(dtype, of_weight),
        )
    if full:  # more rows than programs
        x, weight, grad = make(1100, 4), make(4), make(1100, 4)
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        yield Case(
            kernel="rms_norm_backward",
            label="many rows",
            call=lambda: norms.rms_norm_backward(grad, x, rstd, weight, 0.0),
            reference=lambda: references.rms_norm_backward(
                *map(wide, (grad, x, rstd, weight)), 0.0
            ),
            dtypes=(F32, F32),
        )


def _layer_norms(make: _Maker, full: bool) -> Iterator[Case]:
    for dtype in ALL if full else (F32,):
        for shape in ((2, 3, 16), (3, 7)):
            x, residual = make(*shape, dtype=dtype), make(*shape, dtype=dtype)
            operands = (x, residual, make(shape[-1], dtype=dtype), make(shape[-1], dtype=dtype))
            yield Case(
                kernel="add_layer_norm",
                label=f"{dtype}, {list(shape)}",
                call=lambda t=operands: norms.add_layer_norm(*t, 1e-5),
                reference=lambda t=operands, d=dtype: references.add_layer_norm(
                    *map(wide, t), 1e-5, d
                ),
                dtypes=(dtype, dtype, F32, F32),
            )


def _gates(make: _Maker, full: bool) -> Iterator[Case]:
    kinds = ("silu", "gelu", "gelu_tanh", "gelu_new") if full else ("silu", "gelu", "gelu_tanh")
    for dtype in ALL if full else (F32,):
        for kind in kinds:
            for columns in (16, 13) if full or kind == "silu" else (13,):
                both = make(3, 2 * columns, dtype=dtype)
                other = make(columns, 3, dtype=dtype).t()
                same = (both[:, :columns].contiguous(),) * 2
                for a, b in (both.chunk(2, -1), same, (other, other))[: 3 if full else 2]:
                    grad = make(3, columns, dtype=dtype)
                    label = f"{kind} {dtype}, {columns} columns, rows {a.stride(0)} apart"

                    def forward(a: Tensor = a, b: Tensor = b, k: str = kind) -> Any:
                        return (references.rounded(references.act(wide(a), k), a.dtype) * wide(b),)

                    def backward(
                        g: Tensor = grad, a: Tensor = a, b: Tensor = b, k: str = kind
                    ) -> Any:
                        da = references.act_backward(wide(g) * wide(b), wide(a), k)
                        return da, wide(g) * references.act(wide(a), k)

                    yield Case(
                        kernel="gated",
                        label=label,
                        call=lambda a=a, b=b, k=kind: (gates.gated(a, b, k),),
                        reference=forward,
                        dtypes=(dtype,),
                    )
                    yield Case(
                        kernel="gated_backward",
                        label=label,
                        call=lambda g=grad, a=a, b=b, k=kind: gates.gated_backward(g, a, b, k),
                        reference=backward,
                        dtypes=(dtype, dtype),
                    )


def _bias_gelus(make: _Maker, full: bool) -> Iterator[Case]:
    for kind in ("gelu", "gelu_tanh"):
        for columns in (16, 13) if full else (13,):
            x, bias, grad = make(2, 3, columns), make(columns), make(2, 3, columns)

            def backward(g: Tensor = grad, x: Tensor = x, b: Tensor = bias, k: str = kind) -> Any:
                dx = references.act_backward(wide(g), wide(x) + wide(b), k)
                return dx, dx.flatten(0, -2).sum(0)

            yield Case(
                kernel="bias_gelu",
                label=f"{kind}, {columns} columns",
                call=lambda x=x, b=bias, k=kind: (gates.bias_gelu(x, b, k),),
                reference=lambda x=x, b=bias, k=kind: (references.act(wide(x) + wide(b), k),),
                dtypes=(F32,),
            )
            yield Case(
                kernel="bias_gelu_backward",
                label=f"{kind}, {columns} columns",
                call=lambda g=grad, x=x, b=bias, k=kind: gates.bias_gelu_backward(g, x, b, k),
                reference=backward,
                dtypes=(F32, F32),
            )


def _ropes(make: _Maker, full: bool) -> Iterator[Case]:
    for dtype, of_cos in (
        [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)] if full else [(F32, F32)]
    ):
        x = make(2, 5, 3, 12, dtype=dtype).transpose(1, 2)  # b h t d, as a projection gives it
        tables = {
            "[t d]": (make(5, 12, dtype=of_cos), make(5, 12, dtype=of_cos)),
            "[b 1 t d]": (make(2, 1, 5, 12, dtype=of_cos), make(2, 1, 5, 12, dtype=of_cos)),
            "[t 1]": (make(5, 1, dtype=of_cos), make(5, 1, dtype=of_cos)),
            "[1 1 t d] and [t d]": (make(1, 1, 5, 12, dtype=of_cos), make(5, 12, dtype=of_cos)),
        }
        for where, (cos, sin) in tables.items() if full else list(tables.items())[-2:]:
            out = torch.promote_types(dtype, of_cos)
            grad = make(2, 3, 5, 12, dtype=out)
            yield Case(
                kernel="rope",
                label=f"{dtype}, {of_cos} {where}",
                call=lambda x=x, c=cos, s=sin: (rope.rope(x, c, s),),
                reference=lambda x=x, c=cos, s=sin, d=out: (
                    references.rope(wide(x), wide(c), wide(s), d),
                ),
                dtypes=(out,),
            )
            yield Case(
                kernel="rope_backward",
                label=f"{dtype}, {of_cos} {where}",
                call=lambda g=grad, c=cos, s=sin, d=dtype: (rope.rope_backward(g, c, s, d),),
                reference=lambda g=grad, c=cos, s=sin: (
                    references.rope_backward(wide(g), wide(c), wide(s)),
                ),
                dtypes=(dtype,),
            )
    x, cos, sin = make(3, 7), make(3, 7), make(3, 7)
    yield Case(
        kernel="rope",
        label="no halves",
        call=lambda: (rope.rope(x, cos, sin),),
        reference=lambda: (torch.ops.dt.rope(x.cpu(), cos.cpu(), sin.cpu()),),
        dtypes=(F32,),
    )


def _cross_entropies(make: _Maker, full: bool) -> Iterator[Case]:
    places: list[tuple[int, int, tuple[int, ...]]] = [  # columns, elements from row to row, vocab
        (40, 40, ()),
        (37, 37, (37, 74)),  # half of an odd vocabulary: rows start at any alignment
        (3, 3, (8, 11)),
        (21, 27, (0, 10, 30, 41)),
        (21, 32, (5, 26)),
        (4100, 4100, ()),  # more than a block
        (4099, 4099, (1, 4100)),
    ]
    for dtype in ALL if full else (F32,):
        for columns, stride, vocab in places if full else (places[1], places[3], places[6]):
            whole = make(5, stride, dtype=dtype)
            whole[1, 2] = 80.0
            whole[2, :columns] = float("-inf") if not vocab else 1.0
            logits = whole[:, :columns]
            first = vocab[0] if vocab else 0
            target = torch.tensor([first, first + 2, -100, first + columns - 1, 100_000])
            if vocab == (0, 10, 30, 41):
                target = torch.tensor([9, 30, -100, 40, 15])
            where = target.to(make.device)
            label = f"{dtype}, {columns} columns, rows {stride} apart, vocab {list(vocab)}"
            yield Case(
                kernel="ce_stats",
                label=label,
                call=lambda x=logits, t=where, v=vocab: (cross_entropy.ce_stats(x, t, -100, v),),
                reference=lambda x=logits, t=target, v=vocab: (
                    references.ce_stats(wide(x), t, -100, v),
                ),
                dtypes=(F32,),
            )
            whole = whole.clone()
            logits = whole[:, :columns]
            if not vocab:
                logits[2] = 0.0
            stats = references.ce_stats(wide(logits), target, -100, vocab)
            stats[:, 1] *= 1.5  # as if other ranks had more columns
            grad = make(5)
            grad[2] = float("inf")  # a mean over no rows gives 0
            given = stats.float().to(make.device)
            yield Case(
                kernel="ce_backward",
                label=label,
                call=lambda g=grad, x=logits, s=given, t=where, v=vocab: (
                    cross_entropy.ce_backward(g, x, s, t, -100, v),
                ),
                reference=lambda g=grad, x=logits, s=given, t=target, v=vocab: (
                    references.ce_backward(wide(g), wide(x), wide(s), t, -100, v),
                ),
                dtypes=(dtype,),
            )
    x = make(3, 24)
    x[0, 3], x[1, 5], x[2, 23] = float("nan"), float("inf"), float("nan")
    target = torch.tensor([0, 1, 2])
    yield Case(
        kernel="ce_stats",
        label="not finite",
        call=lambda: (cross_entropy.ce_stats(x, target.to(make.device), -100),),
        reference=lambda: (references.ce_stats(wide(x), target, -100),),
        dtypes=(F32,),
    )


def _dropouts(make: _Maker, full: bool) -> Iterator[Case]:
    key = {"at_seed": 0x9123456789AB, "at_step": 7, "op": 3}
    far = 2**31 + 1
    places: list[tuple[tuple[int, ...], Any]] = [  # the local shape; global shape, pieces
        ((6, 10), ((20, 37), (((4, 10),), ((3, 13),)))),
        ((3, 4, 8), None),
        ((7,), ((30,), (((21, 28),),))),
        ((4, 2, 9), ((8, 3, 9), (((0, 2), (6, 8)), ((1, 3),), ((0, 9),)))),
        ((2, 10), ((2, 40), (((0, 2),), ((1, 6), (30, 35))))),
        ((2, 1100), ((2, 2200), (((0, 2),), ((1100, 2200),)))),
        ((4, 8), ((far + 9, 8), (((far, far + 4),), ((0, 8),)))),
        ((4, 8), ((far + 9, 8), (((0, 2), (far, far + 2)), ((0, 8),)))),
        ((4, 8), ((4, 2**33), (((0, 4),), ((2**32 + 3, 2**32 + 11),)))),
        ((4, 8), ((4, 2**33), (((0, 4),), ((0, 3), (far, far + 5))))),
    ]
    for dtype in ALL if full else (F32,):
        for shape, where in places if full else (places[0], places[3], *places[-4:]):
            x, residual = make(*shape, dtype=dtype), make(*shape, dtype=dtype)
            at = dict(key)
            if where is not None:
                at |= {"shape": list(where[0]), "pieces": encode_pieces(where[1])}
            numbers = {k: torch.tensor(key[k], device=make.device) for k in ("at_seed", "at_step")}
            on_device = at | numbers
            for p in (0.3, 0.0, 1.0) if full else (0.3,):
                label = f"{dtype}, p {p}, {list(shape)} of {where}"

                def op(x: Tensor = x, p: float = p, at: Any = at) -> Sequence[Tensor]:
                    return torch.ops.dt.dropout(x.cpu(), p, **at)

                def add(r: Tensor = residual, op: Any = op) -> Sequence[Tensor]:
                    y, kept = op()
                    return y + r.cpu(), kept

                yield Case(
                    kernel="dropout",
                    label=label,
                    call=lambda x=x, p=p, at=on_device: dropout.dropout(x, p, **at),
                    reference=op,
                    dtypes=(dtype, torch.bool),
                    equal=True,
                )
                yield Case(
                    kernel="dropout_add",
                    label=label,
                    call=lambda x=x, r=residual, p=p, at=at: dropout.dropout_add(x, r, p, **at),
                    reference=add,
                    dtypes=(dtype, torch.bool),
                    equal=True,
                )
                kept = op()[1].to(make.device)
                yield Case(
                    kernel="dropout_backward",
                    label=label,
                    call=lambda x=x, k=kept, p=p: (dropout.dropout_backward(x, k, p),),
                    reference=lambda x=x, k=kept, p=p: (
                        torch.ops.dt.dropout_backward(x.cpu(), k.cpu(), p),
                    ),
                    dtypes=(dtype,),
                    equal=True,
                )
