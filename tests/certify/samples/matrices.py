"""Sample calls of linear algebra and Fourier transforms (rules.linalg, rules.fft, rules.matmul)."""

from __future__ import annotations

from typing import Any

import torch

from tests.certify.samples.draw import Call, Draw, Sample, call, each, of

aten = torch.ops.aten


def _square(d: Draw, dims: str) -> torch.Tensor:
    """Well-conditioned square matrices: far from singular, eigenvalues far apart."""
    x = 0.1 * d(dims)
    return x + torch.diag(torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype))


def _definite(d: Draw, dims: str) -> torch.Tensor:
    x = _square(d, dims)
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def _triangle(d: Draw, dims: str) -> torch.Tensor:
    return _definite(d, dims).tril()


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


MATRICES: dict[str, list[Sample]] = {
    **each(
        "_linalg_det _linalg_slogdet linalg_eig _linalg_eigvals linalg_inv_ex linalg_lu "
        "linalg_lu_factor_ex linalg_matrix_exp",
        lambda d: call(_square(d, "a b 3 3")),
        lambda d: call(_square(d, "3 3")),
        overload="default",
    ),
    "aten.linalg_qr.default": [
        lambda d: call(_square(d, "a b 3 3")),
        lambda d: call(_square(d, "3 3")),
        lambda d: call(_square(d, "a 3 3"), "r"),
    ],
    **each(
        "cholesky linalg_cholesky_ex _linalg_eigh linalg_ldl_factor_ex",
        lambda d: call(_definite(d, "a b 3 3")),
        overload="default",
    ),
    **each("linalg_eigvals.default geqrf.default", lambda d: call(_square(d, "a 3 3"))),
    "aten.linalg_pinv.atol_rtol_tensor": [
        lambda d: call(_square(d, "a b 3 3")),
        lambda d: call(_square(d, "a b 3 3"), rtol=d.positive("b").mul(1e-9)),
    ],
    "aten._linalg_svd.default": [
        lambda d: call(_square(d, "a 3 3")),
        lambda d: call(_square(d, "a 3 3"), False, False),
    ],
    "aten.cholesky_inverse.default": [lambda d: call(_triangle(d, "a 3 3"))],
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
    "aten.linalg_cross.default": [of("a 3 b", "a 3 b", dim=1), of("a 3", "1 3")],
    "aten._fft_r2c.default": [of("a b c", [1], 0, True), of("a b c", [0, 2], 1, False)],
    "aten._fft_c2c.default": [of("~a b", [1], 0, True), of("~a b", [], 0, False)],
    "aten._fft_c2r.default": [
        lambda d: call(d.complex("a b"), [1], 0, 2 * d.size("b") - 2),
        lambda d: call(d.complex("a b c"), [0, 1], 2, 2 * d.size("b") - 1),
    ],
    "aten.vdot.default": [of("k", "k"), of("~k", "~k")],
    "aten.addbmm.default": [
        of("m n", "b m k", "b k n", beta=2.0, alpha=0.5),
        of("n", "b m k", "b k n"),
        of("", "b m k", "b k n"),
    ],
    "aten.addmv.default": [of("m", "m k", "k", beta=0.5)],
    "aten.addr.default": [of("m n", "m", "n"), of("m 1", "m", "n", alpha=2.0)],
}
