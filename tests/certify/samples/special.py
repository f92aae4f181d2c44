"""Sample calls of the long tail of elementwise ops (dtensor.sharding.rules.tables.special)."""

from __future__ import annotations

import torch

from dtensor.sharding.rules.tables import special
from tests.certify.samples.draw import Draw, Sample, call, words

_UNARY = words("""
    alias_copy detach_copy deg2rad rad2deg resolve_conj resolve_neg zero conj_physical
    _neg_view _neg_view_copy atan asinh cosh sinh sinc angle erfc i0 frac signbit
    isfinite isposinf isneginf special_airy_ai special_bessel_j0 special_bessel_j1
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_spherical_bessel_j0""")
_POSITIVE = words("""
    digamma lgamma special_bessel_y0 special_bessel_y1 special_entr special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1""")
_WITHIN_ONE = words("acos asin atanh erfinv")  # their domain is -1 to 1
_WITHIN_HALF = words("logit special_ndtri")  # 0 to 1
_BINARY = words("""
    copysign.Tensor fmax.default fmin.default heaviside.default hypot.default nextafter.default
    logaddexp.default logaddexp2.default""")
_POSITIVE_BINARY = words("""
    igamma.default igammac.default xlogy.Tensor special_xlog1py.default
    float_power.Tensor_Tensor""")
_INTEGER = words("gcd.default lcm.default")
_SHIFTS = words("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__")


def complex_of(d: Draw, dims: str) -> torch.Tensor:
    return torch.complex(d(dims), d(dims))


def _unary() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {
        f"aten.{n}.default": [lambda d: call(d("a b")), lambda d: call(d(""))] for n in _UNARY
    }
    found |= {f"aten.{n}.default": [lambda d: call(d.positive("a b"))] for n in _POSITIVE}
    found |= {f"aten.{n}.default": [lambda d: call(d("a b").tanh())] for n in _WITHIN_ONE}
    found |= {f"aten.{n}.default": [lambda d: call(d("a b").sigmoid())] for n in _WITHIN_HALF}
    found["aten.acosh.default"] = [lambda d: call(d.positive("a b") + 1)]
    for name in ("angle", "conj_physical", "resolve_conj", "isfinite"):
        found[f"aten.{name}.default"].append(lambda d: call(complex_of(d, "a b")))
    for name in ("_conj", "_conj_copy", "_conj_physical"):
        found[f"aten.{name}.default"] = [lambda d: call(complex_of(d, "a b"))]
    found["aten.mvlgamma.default"] = [lambda d: call(d.positive("a b") + 1, 2)]
    found["aten.polygamma.default"] = [lambda d: call(1, d.positive("a b"))]
    found["aten.round.decimals"] = [lambda d: call(d("a b"), decimals=2)]
    found["aten.frexp.Tensor"] = [lambda d: call(d("a b"))]
    found["aten.fill.Scalar"] = [lambda d: call(d("a b"), 2.0)]
    found["aten.fill.Tensor"] = [lambda d: call(d("a b"), d(""))]
    return found


def _binary() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {
        f"aten.{n}": [lambda d: call(d("a b"), d("a b")), lambda d: call(d("a b c"), d("b 1"))]
        for n in _BINARY
    }
    found |= {
        f"aten.{n}": [lambda d: call(d.positive("a b"), d.positive("b"))] for n in _POSITIVE_BINARY
    }
    found |= {f"aten.{n}": [lambda d: call(d.ints("a b", 9), d.ints("b", 9))] for n in _INTEGER}
    for name in _SHIFTS:
        dunder = name.startswith("__")
        found[f"aten.{name}.Tensor"] = [lambda d: call(d.ints("a b", 9), d.ints("b", 3))]
        scalar = "Scalar" if dunder else "Tensor_Scalar"
        found[f"aten.{name}.{scalar}"] = [lambda d: call(d.ints("a b", 9), 2)]
        if not dunder:
            found[f"aten.{name}.Scalar_Tensor"] = [lambda d: call(5, d.ints("a b", 3))]
    for name in ("and", "or", "xor"):
        found[f"aten.bitwise_{name}.Scalar_Tensor"] = [lambda d: call(5, d.ints("a b", 8))]
    return found


def _polynomials() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for name in special.RULES:
        if "_polynomial_" not in name:
            continue
        if name.endswith("x_scalar"):
            found[name] = [lambda d: call(0.5, d.ints("a b", 4))]
        elif name.endswith("n_scalar"):
            found[name] = [lambda d: call(d("a b").tanh(), 3)]
        else:
            found[name] = [lambda d: call(d("a b").tanh(), d.ints("b", 4))]
    return found


SPECIAL: dict[str, list[Sample]] = {
    **_unary(),
    **_binary(),
    **_polynomials(),
    "aten.copysign.Scalar": [lambda d: call(d("a b"), -1.0)],
    "aten.ldexp.Tensor": [lambda d: call(d("a b"), d.ints("b", 3))],
    "aten.lerp.Scalar": [lambda d: call(d("a b"), d("a b"), 0.3)],
    "aten.lerp.Tensor": [lambda d: call(d("a b"), d("b"), d.positive("a b"))],
    "aten.complex.default": [lambda d: call(d("a b"), d("b"))],
    "aten.polar.default": [lambda d: call(d.positive("a b"), d("b"))],
    "aten.xlogy.Scalar_Self": [lambda d: call(2.0, d.positive("a b"))],
    "aten.xlogy.Scalar_Other": [lambda d: call(d("a b"), 2.0)],
    "aten.special_xlog1py.self_scalar": [lambda d: call(2.0, d.positive("a b"))],
    "aten.special_xlog1py.other_scalar": [lambda d: call(d("a b"), 2.0)],
    "aten.special_zeta.default": [lambda d: call(d.positive("a b") + 1, d.positive("b"))],
    "aten.special_zeta.self_scalar": [lambda d: call(2.0, d.positive("a b"))],
    "aten.special_zeta.other_scalar": [lambda d: call(d.positive("a b") + 1, 2.0)],
    "aten.float_power.Tensor_Scalar": [lambda d: call(d.positive("a b"), 1.5)],
    "aten.remainder.Scalar_Tensor": [lambda d: call(5.0, d.positive("a b"))],
    "aten.view_as_real.default": [lambda d: call(complex_of(d, "a b"))],
    "aten.view_as_real_copy.default": [lambda d: call(complex_of(d, "a b"))],
    "aten.view_as_complex.default": [lambda d: call(d("a b 2"))],
    "aten.view_as_complex_copy.default": [lambda d: call(d("a b 2"))],
    "aten.isin.Tensor_Scalar": [lambda d: call(d.ints("a b", 3), 1)],
    "aten.isin.Tensor_Tensor": [
        lambda d: call(d.ints("a b", 9), d.ints("c 2", 9)),
        lambda d: call(d.ints("a b", 9), d.ints("c", 9), invert=True),
    ],
    "aten.isin.Scalar_Tensor": [lambda d: call(3, d.ints("a b", 9))],
}
