"""`dt.implicit_redistribution`: which eager ops count as redistributing, its errors and its
warnings once per line; and other errors of eager ops."""

from __future__ import annotations

import warnings

import pytest
import torch

import dtensor as dt

TP2 = dt.Mesh(tp=2)


def pending() -> tuple[dt.DTensor, dt.DTensor]:
    x = dt.distribute(torch.randn(8, 16), TP2, tp=dt.Column())
    w = dt.distribute(torch.randn(16, 4), TP2, tp=dt.Row())
    return x, w


def test_implicit_redistribution_error_names_op_specs_and_bytes() -> None:
    x, w = pending()
    y = x @ w
    assert str(y.spec) == "f32[8,4]{sum@tp}"
    with dt.implicit_redistribution("error"), pytest.raises(dt.PlanningError) as error:
        y.relu()
    assert _without_line(str(error.value)) == (
        "relu would redistribute implicitly\n"
        "  self: f32[8,4]{sum@tp} -> f32[8,4]: all_reduce over tp, 128 B sent per rank\n"
        "  test_eager_policy.py:N: y.relu()\n"
        "fix: say it with x.redistribute(...) before the op, or "
        'dt.implicit_redistribution("allow")'
    )
    assert str(y.spec) == "f32[8,4]{sum@tp}"
    with dt.implicit_redistribution("error"):
        y.redistribute(tp=dt.Replicate()).relu()  # said
        y.redistribute(tp=dt.Row()).relu()
        (y + x @ w).t().full_tensor()  # sums stay pending together; reading is no op


def test_refused_in_place_op_changes_nothing() -> None:
    x = dt.distribute(torch.ones(4, 6), TP2, tp=dt.Row())
    other = dt.distribute(torch.ones(4, 6), TP2, tp=dt.Column())
    version = x._version
    with dt.implicit_redistribution("error"), pytest.raises(dt.PlanningError, match="all_to_all"):
        x.add_(other)
    assert bool((x == 1).all()) and str(x.spec) == "f32[4@tp,6]" and x._version == version


def test_implicit_redistribution_warns_once_per_line() -> None:
    x, w = pending()
    with pytest.warns(UserWarning) as seen, dt.implicit_redistribution("warn"):
        for _ in range(3):
            (x @ w).exp()
        (x @ w).sin()
    assert [_without_line(str(w.message)) for w in seen] == [
        f"implicit redistribution in {op}\n"
        "  self: f32[8,4]{sum@tp} -> f32[8,4]: all_reduce over tp, 128 B sent per rank\n"
        f"  test_eager_policy.py:N: (x @ w).{op}()\n"
        "fix: say it with x.redistribute(...) before the op, or "
        'dt.implicit_redistribution("allow")'
        for op in ("exp", "sin")
    ]
    assert {w.filename for w in seen} == {__file__}
    assert seen[0].lineno != seen[1].lineno


def test_implicit_redistribution_in_backward_names_users_line() -> None:
    x, w = pending()
    w.requires_grad_()
    y = (x @ w).redistribute(tp=dt.Replicate())
    loss = (y * y).mean()
    with dt.implicit_redistribution("error"):
        loss.backward()  # Megatron's backward sends nothing here
    assert w.grad is not None and str(w.grad.spec) == "f32[16@tp,4]"
    opt = torch.optim.SGD([w], lr=0.1)
    w.grad = dt.distribute(torch.ones(16, 4), TP2, tp=dt.Column())
    with dt.implicit_redistribution("error"), pytest.raises(dt.PlanningError, match="opt.step()"):
        opt.step()


def test_ops_that_send_nothing_are_allowed_in_error_mode() -> None:
    whole = dt.distribute(torch.randn(8, 4), TP2)
    rows = dt.distribute(torch.randn(8, 4), TP2, tp=dt.Row())
    with dt.implicit_redistribution("error"):
        assert str((whole + rows).spec) == "f32[8@tp,4]"
        rows.t()[0].mul(2).sum()
        rows.sum(1).relu()
        with dt.implicit_redistribution("allow"):
            rows.sum(0).relu()
        with pytest.raises(dt.PlanningError):
            rows.sum(0).relu()


def test_implicit_redistribution_setting_outside_with_persists() -> None:
    x, w = pending()
    before = dt.implicit_redistribution("allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (x @ w).cos()
    before.__exit__(None, None, None)
    with pytest.raises(dt.PlanningError, match='"allow", "warn" or "error"'):
        dt.implicit_redistribution("never")  # type: ignore[arg-type]


def test_pending_sum_is_reduced_once_for_many_uses() -> None:
    """The reduced value is kept beside the pending one."""
    x, w = pending()
    y = x @ w
    with dt.implicit_redistribution("allow"):
        a = y.exp()
    with dt.implicit_redistribution("error"):
        b = y.exp() + y.sin()
    assert str(y.spec) == "f32[8,4]{sum@tp}"
    assert torch.equal(b - y.sin(), (a + y.sin()) - y.sin())
    y.mul_(2)
    with dt.implicit_redistribution("allow"):
        assert torch.allclose(y.exp(), a * a)


# -- what is refused -----------------------------------------------------------------------------


def _without_line(text: str) -> str:
    import re

    return re.sub(r"\.py:\d+", ".py:N", text)


def test_eager_op_on_dtensor_and_plain_tensor_is_refused_with_fix() -> None:
    x = dt.distribute(torch.randn(8, 4), TP2, tp=dt.Row())
    with pytest.raises(dt.PlanningError) as error:
        x @ torch.randn(4, 2)
    assert _without_line(str(error.value)) == (
        "mm takes a DTensor together with a plain tensor.\n"
        "  test_eager_policy.py:N: x @ torch.randn(4, 2)\n"
        "  f32[8@tp,4] on mesh(tp=2)\n"
        "  f32[4,2]\n"
        "fix: dt.distribute(x, Mesh(tp=2)) for the plain one; its placements default to Replicate"
    )
    for op in (
        lambda: torch.randn(8, 4) + x,
        lambda: torch.cat([x, torch.randn(8, 4)]),
        lambda: x.add_(torch.randn(4)),
        lambda: x[torch.tensor([0, 1])],
    ):
        with pytest.raises(dt.PlanningError, match=r"plain(.|\n)*fix: dt.distribute"):
            op()
    with pytest.raises(dt.PlanningError, match=r"into a plain tensor(.|\n)*fix: x.full_tensor"):
        torch.randn(8, 4).add_(x)


def test_eager_op_on_dtensors_of_two_meshes_or_launches_is_refused() -> None:
    x = dt.distribute(torch.randn(4), TP2)
    y = dt.distribute(torch.randn(4), dt.Mesh(dp=2))
    with pytest.raises(dt.PlanningError, match=r"mesh\(tp=2\)(.|\n)*mesh\(dp=2\)(.|\n)*fix: "):
        x + y
    with dt.launch(TP2):
        z = dt.distribute(torch.randn(4), TP2)
        with pytest.raises(dt.PlanningError, match="two launches(.|\n)*InProcessCluster"):
            x + z
        assert bool((x == x).all())  # one of before works where it is
    with pytest.raises(dt.PlanningError, match="takes a plain tensor"):
        dt.distribute(x, TP2)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: x.nonzero(), "depends on values"),
        (lambda x: x.resize_(3), "shape or storage in place"),
        (lambda x: x.to("meta"), "where the launch put them"),
        (lambda x: setattr(x, "data", torch.zeros(4, 4)), "x.data = y takes a DTensor"),
        (lambda x: dt.compile(lambda y: y + x, TP2)(x), "was not passed to it"),
    ],
)
def test_unsupported_eager_op_is_refused_with_fix(op, words: str) -> None:  # type: ignore[no-untyped-def]
    x = dt.distribute(torch.randn(4, 4), TP2)
    before = x.full_tensor()
    with pytest.raises(dt.PlanningError, match=f"{words}(.|\n)*fix: "):
        op(x)
    assert torch.equal(x.full_tensor(), before)


def test_failed_eager_op_names_rank_op_and_line() -> None:
    with dt.launch(TP2):
        table = dt.distribute(torch.randn(4, 3), TP2)
        ids = dt.distribute(torch.tensor([0, 7]), TP2)
        with pytest.raises(dt.daft.DaftError) as error:
            torch.nn.functional.embedding(ids, table)
        text = str(error.value)
        assert "rank 0" in text and "embedding" in text and "index out of range" in text
        assert "test_eager_policy.py" in text and "embedding(ids, table)" in text
        assert torch.equal((table + 1).full_tensor(), table.full_tensor() + 1)  # all else goes on


def test_dtensor_repr_and_format_show_spec_values_and_grad_fn() -> None:
    x = dt.distribute(torch.arange(4.0).reshape(2, 2), TP2, tp=dt.Row())
    assert repr(x) == "DTensor(f32[2@tp,2], mesh(tp=2),\n        [[0., 1.],\n         [2., 3.]])"
    x.requires_grad_()
    assert str(x).endswith("[2., 3.]],\n        requires_grad=True)")
    assert (
        str(x.sum())
        == "DTensor(f32[]{sum@tp}, mesh(tp=2),\n        6.,\n        grad_fn=<SumBackward>)"
    )
    assert f"{x.sum()} {x.sum():.2f}" == "6.0 6.00" and f"{x}" == str(x)


def test_view_across_ranks_is_reported_at_use_and_not_at_read() -> None:
    x = dt.distribute(torch.arange(8.0), TP2, tp=dt.Row())
    with dt.implicit_redistribution("error"):
        v = x[1:]
        assert v.tolist() == [1, 2, 3, 4, 5, 6, 7]
        x.add_(1)
        with pytest.raises(dt.PlanningError, match="slice would redistribute implicitly"):
            v * 2
        x[2] = 5  # writes need not see
        assert v.tolist() == [2, 5, 4, 5, 6, 7, 8]
        (v * 2).sum()  # it has been seen
