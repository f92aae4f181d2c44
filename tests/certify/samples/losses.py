"""Sample calls of losses, activations, attention with a mask, bags, bilinear and distances."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - registers its products of experts

from tests.certify.samples.draw import Call, Draw, Sample, call, each, of

aten = torch.ops.aten
_REDUCTIONS = (0, 1, 2)  # none, mean, sum
_INF = float("inf")


def _elementwise(
    name: str, draw: Any, *more: Any, weights: bool = False
) -> dict[str, list[Sample]]:
    """loss(x, y, [weight,] reduction, *more), and backward(grad, x, y, ...)."""

    extra = (None,) if weights else ()

    def forward(reduction: int) -> Sample:
        return lambda d: call(*draw(d), *extra, reduction, *more)

    def backward(reduction: int) -> Sample:
        def drawn(d: Draw) -> Call:
            tensors = draw(d)
            return call(d("" if reduction else "a b"), *tensors, *extra, reduction, *more)

        return drawn

    return {
        f"aten.{name}.default": [forward(r) for r in _REDUCTIONS],
        f"aten.{name}_backward.default": [backward(r) for r in _REDUCTIONS],
    }


# -- rows of classes -----------------------------------------------------------------------------

_IGNORE = -100


def _nll(d: Draw, points: str, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits, targets of which one is ignored, weights of the classes."""
    logits = d(f"n v {points}").log_softmax(1)
    target = d.ints(f"n {points}", d.size("v"))
    target.view(-1)[0] = _IGNORE
    return logits, target, d.positive("v") if weighted else None


def _nll_backward(d: Draw, points: str, reduction: int) -> Call:
    x, target, weight = _nll(d, points, True)
    grad = d("" if reduction else f"n {points}")
    op = aten.nll_loss2d_forward if points else aten.nll_loss_forward
    _, total = op(x, target, weight, reduction, _IGNORE)
    return call(grad, x, target, weight, reduction, _IGNORE, total)


def _one_row(d: Draw) -> Call:
    return call(d("v").log_softmax(0), torch.tensor(1), d.positive("v"), 1, _IGNORE)


def _margin_backward(d: Draw, reduction: int) -> Call:
    x, target, weight = d("n v"), d.ints("n", d.size("v")), d.positive("v")
    return call(d("" if reduction else "n"), x, target, 1, 1.0, weight, reduction)


def _labels(d: Draw) -> torch.Tensor:
    """One label for each row, then the end mark."""
    labels = torch.full(d.shape("n v"), -1)
    labels[:, 0] = d.ints("n", d.size("v"))
    return labels


def _multilabel_backward(d: Draw, reduction: int) -> Call:
    x, labels = d("n v"), _labels(d)
    _, is_target = aten.multilabel_margin_loss_forward(x, labels, reduction)
    return call(d("" if reduction else "n"), x, labels, reduction, is_target)


def _each(sample: Any, reductions: tuple[int, ...] = _REDUCTIONS) -> list[Sample]:
    """A sample for each reduction."""
    return [lambda d, r=r: sample(d, r) for r in reductions]


LOSSES: dict[str, list[Sample]] = {
    **_elementwise("smooth_l1_loss", lambda d: (d("a b"), d("a b")), 0.5),
    **_elementwise("huber_loss", lambda d: (d("a b"), d("a b")), 0.7),
    **_elementwise("soft_margin_loss", lambda d: (d("a b"), d("a b").sign())),
    **_elementwise(
        "binary_cross_entropy", lambda d: (d("a b").sigmoid(), d("a b").sigmoid()), weights=True
    ),
    "aten.binary_cross_entropy_with_logits.default": [
        *_each(lambda d, r: call(d("a b"), d("a b").sigmoid(), None, None, r)),
        lambda d: call(d("a b"), d("a b").sigmoid(), d("b"), d.positive("b"), 1),
    ],
    "aten.nll_loss_forward.default": [
        *_each(lambda d, r: call(*_nll(d, "", True), r, _IGNORE), (0, 2)),
        lambda d: call(*_nll(d, "", False), 2, _IGNORE),
        _one_row,
    ],
    "aten.nll_loss2d_forward.default": _each(
        lambda d, r: call(*_nll(d, "2 3", True), r, _IGNORE), (0, 2)
    ),
    "aten.nll_loss_backward.default": _each(lambda d, r: _nll_backward(d, "", r)),
    "aten.nll_loss2d_backward.default": _each(lambda d, r: _nll_backward(d, "2 3", r)),
    "aten.multi_margin_loss.default": _each(
        lambda d, r: call(d("n v"), d.ints("n", d.size("v")), 1, 1.0, d.positive("v"), r)
    ),
    "aten.multi_margin_loss_backward.default": _each(_margin_backward),
    "aten.multilabel_margin_loss_forward.default": _each(
        lambda d, r: call(d("n v"), _labels(d), r)
    ),
    "aten.multilabel_margin_loss_backward.default": _each(_multilabel_backward),
}


# -- activations -----------------------------------------------------------------------------------


def _log_sigmoid_backward(d: Draw) -> Call:
    x = d("a b")
    return call(d("a b"), x, aten.log_sigmoid_forward(x)[1])


ACTIVATIONS: dict[str, list[Sample]] = {
    **each(
        "celu selu hardswish hardsigmoid mish softshrink hardshrink log_sigmoid_forward",
        of("a b"),
        overload="default",
    ),
    **each(
        "hardswish_backward hardsigmoid_backward mish_backward",
        of("a b", "a b"),
        overload="default",
    ),
    **each("softshrink_backward hardshrink_backward", of("a b", "a b", 0.5), overload="default"),
    "aten.threshold.default": [of("a b", 0.1, 3.0)],
    "aten._prelu_kernel.default": [of("a b", "1 b"), of("a b c", "1 b 1")],
    "aten._prelu_kernel_backward.default": [of("a b c", "a b c", "1 b 1")],
    "aten.log_sigmoid_backward.default": [_log_sigmoid_backward],
    "aten.native_dropout_backward.default": [of("a b", "?a b", 2.0)],
    "aten.glu.default": [
        lambda d: call(d(f"a {2 * d.size('h')}")),
        lambda d: call(d(f"a {2 * d.size('h')} b"), 1),
    ],
    "aten.glu_backward.default": [
        lambda d: call(d("a h b"), d(f"a {2 * d.size('h')} b"), 1),
        lambda d: call(d("a h"), d(f"a {2 * d.size('h')}"), -1),
    ],
}


# -- the rest --------------------------------------------------------------------------------------


def _attention(d: Draw, causal: bool, mask: str) -> Call:
    q, k, v = d("b h t 4"), d("b h s 4"), d("b h s 4")
    return call(q, k, v, 0.0, causal, attn_mask=d(mask) if mask else None, scale=0.5)


def _attention_backward(d: Draw, causal: bool, mask: str) -> Call:
    (q, k, v, *_), named = _attention(d, causal, mask)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **named)
    return call(d("b h t 4"), q, k, v, out, lse, 0.0, causal, **named)


def _bag(d: Draw, mode: int, weighted: bool) -> Call:
    weights = d("7") if weighted else None
    return call(
        d("v d"), d.ints("7", d.size("v")), torch.tensor([0, 2, 5]), False, mode, False, weights
    )


def _bag_backward(d: Draw, mode: int, weighted: bool) -> Call:
    args = _bag(d, mode, weighted)[0]
    out, bags, sizes, maxima = aten._embedding_bag(*args)
    weight, indices, offsets = args[:3]
    grad = d(" ".join(map(str, out.shape)))
    rest = (weight.shape[0], False, mode, False, args[6])
    return call(grad, indices, offsets, _bags() if not len(bags) else bags, sizes, maxima, *rest)


def _bags() -> torch.Tensor:
    """Return the bag of each of the seven indices."""
    return torch.tensor([0, 0, 1, 1, 1, 2, 2])


def _bag_weights_backward(d: Draw) -> Call:
    args = _bag(d, 0, True)[0]
    out, *_ = aten._embedding_bag(*args)
    return call(d(" ".join(map(str, out.shape))), *args[:3], _bags(), 0)


_ATTENTIONS = ((False, ""), (True, ""), (False, "t s"), (False, "b 1 t s"), (False, "1 h 1 s"))


def _rows16(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that the kernel accepts, with matrix rows aligned to 16
    bytes."""
    return x.float()


def _offsets() -> torch.Tensor:
    return torch.tensor([3, 8], dtype=torch.int32)


def _experts(d: Draw, *more: str) -> Call:
    """Rows of which the last belong to no expert; three experts, one of them without rows."""
    rows, stop = d("8 k"), torch.tensor([3, 3, 7], dtype=torch.int32)
    return call(rows, d("3 k n"), stop, *(d(m) for m in more))


def _cdist_backward(d: Draw, p: float) -> Call:
    x, y = d("b p m"), d("b r m")
    return call(d("b p r"), x, y, p, aten._cdist_forward(x, y, p, None))


def _pdist_backward(d: Draw) -> Call:
    x = d("5 m")
    return call(d("10"), x, 2.0, aten._pdist_forward(x, 2.0))


MISCELLANEOUS: dict[str, list[Sample]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [
        lambda d, c=c, m=m: _attention(d, c, m) for c, m in _ATTENTIONS
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [
        lambda d, c=c, m=m: _attention_backward(d, c, m) for c, m in _ATTENTIONS
    ],
    "aten._trilinear.default": [
        of("a i", "o i j", "a j", [1, 3], [0], [1, 2], [2, 3]),
        of("a i", "i j", "a j", [2], [0], [1], [1]),
    ],
    "aten._embedding_bag.default": [lambda d, m=m: _bag(d, m, False) for m in _REDUCTIONS]
    + [lambda d: _bag(d, 0, True)],
    "aten._embedding_bag_forward_only.default": [lambda d: _bag(d, 1, False)],
    "aten._embedding_bag_backward.default": [
        *[lambda d, m=m: _bag_backward(d, m, False) for m in _REDUCTIONS],
        lambda d: _bag_backward(d, 0, True),
    ],
    "aten._embedding_bag_per_sample_weights_backward.default": [_bag_weights_backward],
    "aten._grouped_mm.default": [
        lambda d: call(_rows16(d("8 8")), _rows16(d("2 8 4")), _offsets()),
        lambda d: call(_rows16(d("4 8")), _rows16(d("8 12")), _offsets()),
        lambda d: call(_rows16(d("2 4 8")), _rows16(d("8 8")), _offsets()),
        lambda d: call(_rows16(d("g m 4")), _rows16(d("g 4 8"))),
    ],
    "transformers.grouped_mm_fallback.default": [lambda d: _experts(d)],
    "transformers.grouped_mm_fallback_backward.default": [lambda d: _experts(d, "8 n")],
    "aten._cdist_forward.default": [
        of("b p m", "b r m", 2.0, None),
        *[lambda d, p=p: call(d("p m"), d("r m"), p, None) for p in (0.0, 1.0, _INF)],
    ],
    "aten._cdist_backward.default": [
        lambda d, p=p: _cdist_backward(d, p) for p in (2.0, 1.0, 3.0, _INF)
    ],
    "aten._pdist_forward.default": [of("5 m", 2.0)],
    "aten._pdist_backward.default": [_pdist_backward],
}

LAYER_LOSSES: dict[str, list[Sample]] = {**LOSSES, **ACTIVATIONS, **MISCELLANEOUS}
