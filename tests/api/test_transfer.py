"""`dt.transfer` between meshes outside a launch, inside a launch, and to parts of it; and what is
refused."""

from __future__ import annotations

import contextlib

import pytest
import torch

import dtensor as dt


def value() -> torch.Tensor:
    return torch.randn(7, 6)


def check(y: dt.DTensor, x: torch.Tensor, text: str) -> None:
    assert str(y.spec) == text
    assert torch.equal(y.full_tensor(), x)
    assert len(y.local_tensors()) == y.spec.mesh.size


def test_transfer_between_meshes_outside_launch_keeps_value() -> None:
    x = value()
    a = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
    b = dt.transfer(a, dt.Mesh(dp=2, tp=2), dp=dt.Column(), tp=dt.Row())
    check(b, x, "f32[7@tp,6@dp]")
    check(dt.transfer(b, dt.Mesh(z=3), z=dt.Row()), x, "f32[7@z,6]")
    check(a, x, "f32[7@tp,6]")


def test_transfer_to_same_mesh_redistributes() -> None:
    mesh, x = dt.Mesh(tp=2), value()
    check(dt.transfer(dt.distribute(x, mesh, tp=dt.Row()), mesh, tp=dt.Column()), x, "f32[7,6@tp]")


@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_transfer_to_parts_of_launch_and_back_sends_planned_bytes(mode: str) -> None:
    x = value()
    whole, part, third = dt.Mesh(dp=2, tp=2), dt.Mesh(g=2), dt.Mesh(k=3)
    with dt.launch(whole, mode=mode):  # type: ignore[arg-type]
        a = dt.distribute(x, whole, dp=dt.Row(), tp=dt.Column())
        b = dt.transfer(a, part, (2, 3), g=dt.Row())
        check(b, x, "f32[7@g,6]")
        # what runs on the part runs on ranks 2 and 3 of the launch
        y = dt.compile(lambda t: t.relu() @ t.T, part)(b)
        torch.testing.assert_close(y.full_tensor(), x.relu() @ x.T)
        c = dt.transfer(b, third, k=dt.Row())  # part to part: ranks 0, 1, 2
        check(c, x, "f32[7@k,6]")
        check(dt.transfer(c, whole, tp=dt.Row()), x, "f32[7@tp,6]")
        assert dt.transfer_plan(b, third, k=dt.Row()).bytes_by_pair == {
            (2, 0): 3 * 6 * 4,
            (2, 1): 1 * 6 * 4,
            (3, 1): 2 * 6 * 4,
            (3, 2): 1 * 6 * 4,
        }
    with pytest.raises(RuntimeError, match="has ended"):
        b.full_tensor()


def test_transfer_in_launch_sends_no_value_through_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dt.launch(dt.Mesh(a=3)) as session:
        a = dt.distribute(value(), dt.Mesh(a=3), a=dt.Row())

        def refuse(*_: object) -> None:
            raise AssertionError("fetched")

        with monkeypatch.context() as patch:
            patch.setattr(session.cluster, "get", refuse)
            patch.setattr(session.cluster, "put", refuse)
            b = dt.transfer(a, dt.Mesh(b=2), b=dt.Row())
        assert b.full_tensor().shape == (7, 6)


def test_models_on_two_parts_of_launch_keep_separate_weights() -> None:
    """Both parts store a `model 0: weight` on the same ranks."""
    first, second = dt.Mesh(p=2), dt.Mesh(q=2)
    linears = [torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)]
    x = value()
    with dt.launch(dt.Mesh(a=2)):
        a = dt.distribute(x, dt.Mesh(a=2))
        for mesh, axis, linear in ((first, "p", linears[0]), (second, "q", linears[1])):
            dt.transfer(a, mesh)
            dt.compile(lambda m, t: m(t), mesh)(
                dt.parallelize(linear, mesh, {"weight": {axis: dt.Row()}}), x
            )
        for mesh, axis, linear in ((first, "p", linears[0]), (second, "q", linears[1])):
            model = dt.parallelize(linear, mesh, {"weight": {axis: dt.Row()}})
            y = dt.compile(lambda m, t: m(t), mesh)(model, dt.transfer(a, mesh))
            torch.testing.assert_close(y.full_tensor(), linear(x))


def test_dtensor_made_before_launch_transfers_into_it() -> None:
    x = value()
    a = dt.distribute(x, dt.Mesh(tp=2), tp=dt.Row())
    with dt.launch(dt.Mesh(b=3)):
        check(dt.transfer(a, dt.Mesh(b=3), b=dt.Column()), x, "f32[7,6@b]")
        # the same mesh as the implicit one's, yet other ranks
        check(dt.transfer(a, dt.Mesh(tp=2), tp=dt.Row()), x, "f32[7@tp,6]")


def test_transfer_reduces_partial_value_first() -> None:
    x = value()
    summed = dt.distribute(x, dt.Mesh(a=2), a=dt.Partial())
    check(dt.transfer(summed, dt.Mesh(b=3), b=dt.Row()), x, "f32[7@b,6]")


@pytest.mark.parametrize("launched", [False, True])
def test_gradients_flow_back_through_transfer(launched: bool) -> None:
    x = value().requires_grad_()
    (x.sin() * 3).sum().backward()
    source, target = dt.Mesh(a=2), dt.Mesh(b=3)
    with dt.launch(dt.Mesh(c=3)) if launched else contextlib.nullcontext():
        if launched:
            a = dt.transfer(dt.distribute(x.detach(), dt.Mesh(c=3)), source, a=dt.Row()).detach()
            a.requires_grad_()
        else:
            a = dt.distribute(x.detach(), source, a=dt.Row()).requires_grad_()
        y = (dt.transfer(a.sin(), target, b=dt.Column()) * 3).sum()
        y.backward()
        assert a.grad is not None and a.grad.mesh == source
        assert str(a.grad.spec) == "f32[7@a,6]"
        torch.testing.assert_close(a.grad.full_tensor(), x.grad)


def test_transfer_of_view_sends_viewed_values() -> None:
    x = value()
    a = dt.distribute(x, dt.Mesh(a=2), a=dt.Row())
    b = dt.transfer(a[:, 1:5].t(), dt.Mesh(b=3), b=dt.Row())
    assert torch.equal(b.full_tensor(), x[:, 1:5].t())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_transfer_keeps_values_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(5).to(dtype)
    a = dt.distribute(x, dt.Mesh(a=3), a=dt.Row())
    b = dt.transfer(a, dt.Mesh(b=2), b=dt.Row())
    assert b.dtype == dtype and torch.equal(b.full_tensor(), x)


def test_transfer_to_more_ranks_than_elements() -> None:
    x = torch.randn(2)
    b = dt.transfer(dt.distribute(x, dt.Mesh(a=3), a=dt.Row()), dt.Mesh(b=4), b=dt.Row())
    assert [len(t) for t in b.local_tensors()] == [1, 1, 0, 0]
    assert torch.equal(b.full_tensor(), x)


def test_transfer_rejects_bad_ranks() -> None:
    a = dt.distribute(value(), dt.Mesh(a=2), a=dt.Row())
    with pytest.raises(dt.PlanningError, match="leave ranks out"):
        dt.transfer(a, dt.Mesh(b=2), (0, 1))
    with pytest.raises(dt.PlanningError, match="no axis 'tp'"):
        dt.transfer(a, dt.Mesh(b=2), tp=dt.Row())
    with pytest.raises(dt.PlanningError, match="is not a placement"):
        dt.transfer(a, dt.Mesh(b=2), b=0)  # type: ignore[arg-type]
    with dt.launch(dt.Mesh(c=2)):
        with pytest.raises(dt.PlanningError, match="launch the larger mesh"):
            dt.transfer(a, dt.Mesh(b=3))
        dt.transfer(a, dt.Mesh(b=1), (1,))
        with pytest.raises(dt.PlanningError, match="lives on ranks"):
            dt.transfer(a, dt.Mesh(b=1), (0,))
        with pytest.raises(dt.PlanningError, match="state 2 different ranks"):
            dt.transfer(a, dt.Mesh(d=2), (0, 2))


@pytest.mark.ray
def test_transfer_on_ray_keeps_value(ray_session: None) -> None:
    x = value()
    with dt.launch(dt.Mesh(a=3), backend="ray"):
        a = dt.distribute(x, dt.Mesh(a=3), a=dt.Row())
        b = dt.transfer(a, dt.Mesh(b=2), (2, 1), b=dt.Column())
        check(b, x, "f32[7,6@b]")
        y = dt.compile(lambda t: t.relu().sum(), dt.Mesh(b=2))(b)
        torch.testing.assert_close(y.full_tensor(), x.relu().sum())
