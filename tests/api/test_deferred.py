"""Programs whose votes stay on the device, run on the CPU: failed runs leave state unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import Commit, TaskError
from dtensor.runtime.lower import deferred, program
from dtensor.runtime.lower.rank_builder import ProgramContext, Roles
from tests.api import test_bad_data as bad_data
from tests.api import test_state_in_place as in_place


@pytest.fixture(autouse=True)
def defer_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer programs as on a GPU; `programs` counts them."""

    def defers(shared: ProgramContext, roles: Roles) -> bool:
        device, shared.device = shared.device, torch.device("cuda")
        try:
            return deferred.defers(shared, roles)
        finally:
            shared.device = device

    monkeypatch.setattr(program, "defers", defers)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["label", "op"])
@pytest.mark.parametrize("placed", bad_data.PLACED)
def test_failed_deferred_step_changes_nothing(placed: str, fault: str) -> None:
    options = dict(dropout=True, norm=placed == "tp2")
    bad_data.check(placed, fault, clip=0.1, ahead=True, **options)


WRITES = {
    "copy": "m.k.copy_(x.expand(4, 4, 8, 2))",
    "slice": "m.k[:, :, 1:2] = x",
    "select": "m.k[:, :, 3] = x[:, :, 0]",
    "index_copy": "m.k.index_copy_(2, at, x.expand(4, 4, 2, 2))",
    "index_put": "m.k[:, :, at] = x.expand(4, 4, 2, 2)",
    "index_add": "m.k.index_add_(2, at, x.expand(4, 4, 2, 2))",
    "index_fill": "m.k.index_fill_(2, at, 3.0)",
    "masked_fill": "m.k.masked_fill_(m.k > 0, 2.0)",
    "scatter": "m.k.scatter_(2, at[:1, None, None, None].expand(4, 4, 1, 2), x)",
    "add": "m.k.mul_(0.5).add_(x)",
    "where": "m.k.copy_(torch.where(m.k > 0, x, m.k))",
}


@pytest.mark.default("heads-index_copy", "positions-index_put", "one-add", "one-slice")
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("split", in_place.MESHES)
def test_write_to_buffer_is_made_by_committed_runs_only(split: str, name: str, read: bool) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    result = "(m.k if y is None else x).sum((1, 2, 3)) + m.table(ids).sum()"
    source = f"def f(m, x, at, ids, y=None):\n    {WRITES[name]}\n    return {result}"
    exec(source if read else source.replace("m.k if y is None else ", ""), namespace)
    net: Any = in_place.Cached(namespace["f"])
    net.table = nn.Embedding(5, 2).double()
    net.k.normal_()
    reference, (mesh, placed) = copy.deepcopy(net), in_place.MESHES[split]
    call = dt.compile(lambda m, *a: m(*a), mesh)
    at, good, bad = torch.tensor([3, 6]), torch.tensor([0, 4]), torch.tensor([0, 5])
    with dt.launch(mesh):
        model = dt.parallelize(net, mesh, {"k": placed}, misaligned="gather")

        def both(x: Tensor) -> None:
            with torch.no_grad():
                want = reference(x, at, good)
            assert torch.allclose(call(model, x, at, good).full_tensor(), want)
            assert torch.allclose(net.k, reference.k)

        both(in_place.TOKEN)
        before = net.k.clone()
        for wrong in ((at, bad), (at + 5, good)):
            if wrong[1] is good and "at" not in WRITES[name]:
                continue
            with pytest.raises(TaskError, match="out of range"):
                call(model, in_place.TOKEN * 2, *wrong).full_tensor()
            assert torch.equal(net.k, before) or read
        both(in_place.TOKEN * 3)
        commits = [i for i in in_place.latest(mesh).ranks[0].instructions if isinstance(i, Commit)]
        assert [commit.predicate for commit in commits] == ["rank.skip"]


@pytest.mark.parametrize("name", ["index_copy", "decode"])
def test_wrong_position_changes_no_other_row_before_the_commit(name: str) -> None:
    fn, (x, at), how = in_place.FORMS[name]
    assert how == "in place"
    for mesh, placed in (in_place.MESHES["one"], in_place.MESHES["positions"]):
        net: Any = in_place.Cached(fn)
        call = dt.compile(lambda m, *a: m(*a), mesh)
        with dt.launch(mesh):
            model = dt.parallelize(net, mesh, {"k": placed})
            with pytest.raises(TaskError, match="out of range"):
                call(model, x, at + in_place.T).full_tensor()
            assert not net.k.any()
            call(model, x, at).full_tensor()
            assert net.k.any()
