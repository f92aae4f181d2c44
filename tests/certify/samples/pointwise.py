"""Sample calls of the ops that work element by element; see draw.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.certify.samples.draw import Draw, Sample, call, words


def _unary() -> dict[str, list[Sample]]:
    anywhere = words("""neg clone detach alias lift_fresh_copy positive contiguous zeros_like
        lift_fresh ones_like empty_like exp exp2 expm1 sin cos tan tanh sigmoid relu gelu silu
        leaky_relu hardtanh elu softplus abs sign sgn square erf floor ceil round trunc""")
    positive = words("sqrt rsqrt log log2 log10 log1p reciprocal")
    found: dict[str, list[Sample]] = {
        f"aten.{n}.default": [lambda d: call(d("a b")), lambda d: call(d(""))] for n in anywhere
    }
    found |= {f"aten.{n}.default": [lambda d: call(d.positive("a b"))] for n in positive}
    for name in ("isnan", "isinf", "nan_to_num"):
        found[f"aten.{name}.default"] = [lambda d: call(d("a b").floor() / d.ints("a b", 2))]
    return found


def _binary() -> dict[str, list[Sample]]:
    tensors = words("""add.Tensor sub.Tensor rsub.Tensor mul.Tensor lt.Tensor le.Tensor gt.Tensor
        ge.Tensor maximum.default minimum.default atan2.default""")
    equalities = words("""eq.Tensor ne.Tensor logical_and.default logical_or.default
        logical_xor.default""")
    quotients = words("""div.Tensor floor_divide.default remainder.Tensor fmod.Tensor
        pow.Tensor_Tensor""")
    scalars = words("""
        add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar lt.Scalar le.Scalar gt.Scalar
        ge.Scalar floor_divide.Scalar remainder.Scalar fmod.Scalar""")
    found: dict[str, list[Sample]] = {
        f"aten.{n}": [lambda d: call(d("a b"), d("a b")), lambda d: call(d("a b c"), d("b 1"))]
        for n in tensors
    }
    found |= {
        f"aten.{n}": [lambda d: call(d.positive("a b"), d.positive("b")), _scalar_divisor]
        for n in quotients
    }
    found |= {
        f"aten.{n}": [lambda d: call(d("a b"), 2.0), lambda d: call(d.ints("a b", 9, 1), 2)]
        for n in scalars
    }
    found |= {
        f"aten.{n}": [
            lambda d: call(d.ints("a b", 3), d.ints("a b", 3)),
            lambda d: call(d.ints("a b", 3), d.ints("b", 3)),
        ]
        for n in equalities
    }
    for name in ("and", "or", "xor"):
        found[f"aten.bitwise_{name}.Tensor"] = [
            lambda d: call(d.bools("a b"), d.bools("b")),
            lambda d: call(d.ints("a b", 8), d.ints("a b", 8)),
        ]
        found[f"aten.bitwise_{name}.Scalar"] = [lambda d: call(d.ints("a b", 8), 3)]
    found["aten.add.Tensor"] += [
        lambda d: call(d("a b"), d("a b"), alpha=2.5),
        lambda d: call(d("a b"), 1.0),
        lambda d: call(d("a b"), d("")),
        lambda d: call(d.ints("a b", 8), d.ints("b", 8)),
    ]
    for name in ("eq.Scalar", "ne.Scalar"):
        found[f"aten.{name}"] = [lambda d: call(d.ints("a b", 3), 1)]
    found["aten.logical_not.default"] = [lambda d: call(d.ints("a b", 2))]
    found["aten.add.Scalar"].append(lambda d: call(d("a b"), 0))
    found["aten.mul.Tensor"] += [lambda d: call(d("a b"), 2.0), lambda d: call(d("a b"), d(""))]
    found["aten.copy.default"] = [lambda d: call(d("a b"), d("a b"))]
    return found


def _scalar_divisor(d: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call(d.positive("a b"), d.positive(""))


POINTWISE: dict[str, list[Sample]] = {
    **_unary(),
    **_binary(),
    "aten.bitwise_not.default": [lambda d: call(d.bools("a b"))],
    "aten.full_like.default": [lambda d: call(d("a b"), 3.0)],
    "aten._to_copy.default": [
        lambda d: call(d("a b"), dtype=torch.float32),
        lambda d: call(d("a b"), dtype=torch.int64),
        lambda d: call(d.bools("a b"), dtype=torch.float64),
        lambda d: call(d.ints("a b", 5), dtype=torch.float64),
    ],
    "aten.pow.Tensor_Scalar": [lambda d: call(d("a b"), 2), lambda d: call(d("a b"), 1)],
    "aten.pow.Scalar": [lambda d: call(2.0, d("a b"))],
    "aten.clamp.default": [lambda d: call(d("a b"), -0.5, 0.5), lambda d: call(d("a b"), 0.0)],
    "aten.clamp.Tensor": [lambda d: call(d("a b"), d("b"), None)],
    "aten.clamp_min.default": [lambda d: call(d("a b"), 0.0)],
    "aten.clamp_max.default": [lambda d: call(d("a b"), 0.0)],
    "aten.clamp_min.Tensor": [lambda d: call(d("a b"), d("a b"))],
    "aten.clamp_max.Tensor": [lambda d: call(d("a b"), d("a b"))],
    "aten.div.Tensor_mode": [
        lambda d: call(d("a b"), d.positive("b"), rounding_mode="floor"),
        lambda d: call(d("a b"), 2.0, rounding_mode="trunc"),
    ],
    "aten.div.Scalar_mode": [lambda d: call(d("a b"), 2.0, rounding_mode="floor")],
    "aten.where.self": [
        lambda d: call(d.bools("a b"), d("a b"), d("a b")),
        lambda d: call(d.bools("a 1"), d("b"), d("")),
    ],
    "aten.where.ScalarSelf": [lambda d: call(d.bools("a b"), 1.0, d("a b"))],
    "aten.where.ScalarOther": [
        lambda d: call(d.bools("a b"), d("a b"), 0.0),
        lambda d: call(d.bools("a b"), d("a b"), 3.0),
    ],
    "aten.where.Scalar": [lambda d: call(d.bools("a b"), 1.0, 0.0)],
    "aten.masked_fill.Scalar": [
        lambda d: call(d("a b"), d.bools("a b"), 0),
        lambda d: call(d("a b"), d.bools("b"), -1.5),
    ],
    "aten.masked_fill.Tensor": [lambda d: call(d("a b"), d.bools("b"), d(""))],
    "aten.addcmul.default": [lambda d: call(d("a b"), d("a b"), d("b"), value=0.5)],
    "aten.addcdiv.default": [lambda d: call(d("a b"), d("a b"), d.positive("b"))],
    "aten.gelu_backward.default": [
        lambda d: call(d("a b"), d("a b")),
        lambda d: call(d("a b"), d("a b"), approximate="tanh"),
    ],
    "aten.silu_backward.default": [lambda d: call(d("a b"), d("a b"))],
    "aten.tanh_backward.default": [lambda d: call(d("a b"), d("a b").tanh())],
    "aten.sigmoid_backward.default": [lambda d: call(d("a b"), d("a b").sigmoid())],
    "aten.threshold_backward.default": [lambda d: call(d("a b"), d("a b"), 0)],
    "aten.leaky_relu_backward.default": [lambda d: call(d("a b"), d("a b"), 0.1, False)],
    "aten.hardtanh_backward.default": [lambda d: call(d("a b"), d("a b"), -1.0, 1.0)],
    "aten.elu_backward.default": [lambda d: call(d("a b"), 1.0, 1.0, 1.0, False, d("a b"))],
    "aten.softplus_backward.default": [lambda d: call(d("a b"), d("a b"), 1.0, 20.0)],
    "dt.annotate.default": [lambda d: call(d("a b"), "a b@tp")],
    "dt.annotate_backward.default": [lambda d: call(d("a b"), "a b@tp")],
}
