"""Sample calls of linear algebra and Fourier transforms (rules.linalg, rules.fft, rules.matmul)."""

from __future__ import annotations

from typing import Any

import torch

from tests.certify.samples.draw import Draw, Sample, call, words
from tests.certify.samples.special import complex_of

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]


def _square(d: Draw, dims: str) -> torch.Tensor:
    """Well-conditioned square matrices: far from singular, eigenvalues far apart."""
    x = 0.1 * d(dims)
    return x + torch.diag(torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype))


def _definite(d: Draw, dims: str) -> torch.Tensor:
    x = _square(d, dims)
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def _triangle(d: Draw, dims: str) -> torch.Tensor:
    return _definite(d, dims).tril()


def _of_squares() -> dict[str, list[Sample]]:
    names = words("""_linalg_det _linalg_slogdet linalg_eig _linalg_eigvals linalg_inv_ex
        linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_qr""")
    found: dict[str, list[Sample]] = {
        f"aten.{n}.default": [
            lambda d: call(_square(d, "a b 3 3")),
            lambda d: call(_square(d, "3 3")),
        ]
        for n in names
    }
    for n in words("cholesky linalg_cholesky_ex _linalg_eigh linalg_ldl_factor_ex"):
        found[f"aten.{n}.default"] = [lambda d: call(_definite(d, "a b 3 3"))]
    found["aten.linalg_eigvals.default"] = [lambda d: call(_square(d, "a 3 3"))]
    found["aten.linalg_pinv.atol_rtol_tensor"] = [
        lambda d: call(_square(d, "a b 3 3")),
        lambda d: call(_square(d, "a b 3 3"), rtol=d.positive("b").mul(1e-9)),
    ]
    found["aten._linalg_svd.default"] = [
        lambda d: call(_square(d, "a 3 3")),
        lambda d: call(_square(d, "a 3 3"), False, False),
    ]
    found["aten.linalg_qr.default"].append(lambda d: call(_square(d, "a 3 3"), "r"))
    found["aten.geqrf.default"] = [lambda d: call(_square(d, "a 3 3"))]
    found["aten.cholesky_inverse.default"] = [lambda d: call(_triangle(d, "a 3 3"))]
    return found


def _lu_solve(d: Draw, **kwargs: Any) -> Call:
    lu, pivots, _ = aten.linalg_lu_factor_ex(_square(d, "a 3 3"))
    rhs = d("a 3 c") if kwargs.get("left", True) else d("a c 3")
    return call(lu, pivots, rhs, **kwargs)


def _lu_unpack(d: Draw, *flags: bool) -> Call:
    lu, pivots, _ = aten.linalg_lu_factor_ex(_square(d, "a b 3 3"))
    return call(lu, pivots, *flags)


def _ldl_solve(d: Draw) -> Call:
    ld, pivots, _ = aten.linalg_ldl_factor_ex(_definite(d, "a 3 3"))
    return call(ld, pivots, d("a 3 c"))


def _reflectors(d: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    a, tau = torch.geqrf(_square(d, "a 3 3"))
    return a, tau


def _triangular(d: Draw, **kwargs: Any) -> Call:
    rhs = d("a 3 c") if kwargs.get("left", True) else d("a c 3")
    return call(_triangle(d, "a 3 3"), rhs, upper=False, **kwargs)


_SOLVES: dict[str, list[Sample]] = {
    "aten.linalg_lu_solve.default": [_lu_solve, lambda d: _lu_solve(d, left=False)],
    "aten.lu_unpack.default": [_lu_unpack, lambda d: _lu_unpack(d, True, False)],
    "aten.linalg_ldl_solve.default": [_ldl_solve],
    "aten.linalg_solve_triangular.default": [
        _triangular,
        lambda d: _triangular(d, left=False),
        lambda d: call(_triangle(d, "3 3"), d("a 3 c"), upper=False),
    ],
    "aten.triangular_solve.default": [
        lambda d: call(d("a 3 c"), _triangle(d, "a 3 3"), False),
    ],
    "aten.cholesky_solve.default": [lambda d: call(d("a 3 c"), _triangle(d, "a 3 3"))],
    "aten._linalg_solve_ex.default": [
        lambda d: call(_square(d, "a 3 3"), d("a 3 c")),
        lambda d: call(_square(d, "a 3 3"), d("a 3")),
        lambda d: call(_square(d, "a 3 3"), d("a c 3"), left=False),
    ],
    "aten.linalg_householder_product.default": [lambda d: call(*_reflectors(d))],
    "aten.ormqr.default": [
        lambda d: call(*_reflectors(d), d("a 3 c")),
        lambda d: call(*_reflectors(d), d("a c 3"), False, True),
    ],
    "aten.linalg_cross.default": [
        lambda d: call(d("a 3 b"), d("a 3 b"), dim=1),
        lambda d: call(d("a 3"), d("1 3")),
    ],
}

_TRANSFORMS: dict[str, list[Sample]] = {
    "aten._fft_r2c.default": [
        lambda d: call(d("a b c"), [1], 0, True),
        lambda d: call(d("a b c"), [0, 2], 1, False),
    ],
    "aten._fft_c2c.default": [
        lambda d: call(complex_of(d, "a b"), [1], 0, True),
        lambda d: call(complex_of(d, "a b"), [], 0, False),
    ],
    "aten._fft_c2r.default": [
        lambda d: call(complex_of(d, "a b"), [1], 0, 2 * d.size("b") - 2),
        lambda d: call(complex_of(d, "a b c"), [0, 1], 2, 2 * d.size("b") - 1),
    ],
}

_PRODUCTS: dict[str, list[Sample]] = {
    "aten.vdot.default": [
        lambda d: call(d("k"), d("k")),
        lambda d: call(complex_of(d, "k"), complex_of(d, "k")),
    ],
    "aten.addbmm.default": [
        lambda d: call(d("m n"), d("b m k"), d("b k n"), beta=2.0, alpha=0.5),
        lambda d: call(d("n"), d("b m k"), d("b k n")),
        lambda d: call(d(""), d("b m k"), d("b k n")),
    ],
    "aten.addmv.default": [
        lambda d: call(d("m"), d("m k"), d("k"), beta=0.5),
    ],
    "aten.addr.default": [
        lambda d: call(d("m n"), d("m"), d("n")),
        lambda d: call(d("m 1"), d("m"), d("n"), alpha=2.0),
    ],
}

MATRICES: dict[str, list[Sample]] = {**_of_squares(), **_SOLVES, **_TRANSFORMS, **_PRODUCTS}
