"""The store of a launch: only the store changes its entries, and a failed move leaves them
unchanged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.api.store.session import MeshSession
from dtensor.api.store.store import Moving, Owner
from dtensor.daft import DaftError
from dtensor.runtime.transfer import between_meshes
from dtensor.sharding.redistribute.sync_plan import plan_sync
from dtensor.sharding.spec.stored import StoredTensor
from tests.api.test_sync import TP, batch, loss_fn, net

SOURCE = Path(dt.__file__).parent
STORE = ("api/store/store.py", "api/store/")


# -- one owner: by the syntax tree -------------------------------------------------------


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text()


def assignments(name: str, text: str) -> list[str]:
    """Return where code outside the store assigns to the store's entries."""
    table = {"_stored", "_settled", "_absent"}
    if name.startswith(STORE) or not any(entry in text for entry in table):
        return []
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for node in nodes
        # another class may have an attribute of that name for itself
        if node.attr in table and ast.unparse(node.value) != "self"
    ]


def test_only_store_module_assigns_entries() -> None:
    assert [one for source in sources() for one in assignments(*source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "model_home.owner._stored[label] = home",
        "home.owner._stored |= new",
        "owner._settled.update(homes)",
        "self.owner._absent.clear()",
    ],
)
def test_assignment_of_entry_elsewhere_is_detected(line: str) -> None:
    assert assignments("api/move/replica.py", line) and not assignments("api/store/store.py", line)


# -- what fails ------------------------------------------------------------------------------------


class Failing:
    """While ``on``, assembling received values fails; must be made before programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        unpacked = between_meshes.unpack

        def fails(*given: Any) -> tuple[Tensor, ...]:
            if self.on:
                raise RuntimeError("no memory")
            return unpacked(*given)

        monkeypatch.setattr(between_meshes, "unpack", fails)


@pytest.mark.parametrize("known", ["at once", "later"])
@pytest.mark.parametrize("synced", [False, True])
def test_failed_sync_leaves_actor_values_unchanged(
    known: str, synced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor has the values of the sync before, or none, and the store records that; also if the
    failure becomes known only after the sync returned."""
    if known == "later":
        monkeypatch.setattr(MeshSession, "at_once", False)
    failing, train, play = Failing(monkeypatch), dt.Mesh(dp=2), dt.Mesh(tp=2)
    policy = dt.parallelize(net(), train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, TP)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    step = dt.train_step(policy, loss_fn, torch.optim.SGD(parameters, lr=0.1))
    with dt.launch(train, play) as run:
        model_home = run.launch.sessions[play].model_home(actor)
        before: dict[str, Tensor] = {}
        if synced:
            dt.sync(policy, actor)
            before = dt.gather_state_dict(actor)["model"]
        entries = dict(model_home.stored)
        step(*batch(0)).wait()
        failing.on = True
        if known == "at once":
            with pytest.raises(DaftError, match="no memory"):
                dt.sync(policy, actor)
        else:
            dt.sync(policy, actor)
        if synced:
            found = dt.gather_state_dict(actor)["model"]
            assert all(torch.equal(found[name], before[name]) for name in before)
        else:
            with pytest.raises(dt.PlanningError, match=r"no value here yet(.|\n)*dt\.sync"):
                dt.gather_state_dict(actor)
        assert dict(model_home.stored) == entries
        failing.on = False
        if known == "later":
            with pytest.raises(DaftError, match="no memory") as caught:
                dt.sync(policy, actor)
            assert "which changed nothing" in str(caught.value.__notes__)
        dt.sync(policy, actor)
        state = dt.gather_state_dict(policy)["model"]
        mine = dt.gather_state_dict(actor)["model"]
        assert all(torch.equal(state[name], mine[name]) for name in state)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("fails", [(True, False), (False, True), (True, True), (False, False)])
def test_entry_is_that_of_last_successful_of_two_pending_moves(
    fails: tuple[bool, bool], backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or both moves fail, and the failures are noticed in either order. If both fail, there is
    no entry."""
    mesh, x = dt.Mesh(tp=2), torch.arange(16.0).reshape(4, 4)
    owner, given = Owner[str](), Owner[str]()
    with dt.launch(mesh) as run:
        store, session = run.launch.store, run.launch.sessions[mesh]
        source = session.stored("x", dt.spec("f32[4@tp,4]", mesh))
        store.put(given, {"x": (x, source)})
        failing, moves = Failing(monkeypatch), list[Moving]()
        homes: list[StoredTensor] = []
        for text, fail in zip(("f32[4,4@tp]", "f32[4,4]"), fails, strict=True):
            home = session.stored("y", dt.spec(text, mesh))
            failing.on = fail
            homes.append(home)
            moves.append(store.move(plan_sync("v", {"y": (source, home)}), {"y": (owner, "y")}))
            assert owner.stored == {"y": home}
        seen = list(zip(fails, moves, strict=True))
        for fail, move in reversed(seen) if backwards else seen:
            if fail:
                with pytest.raises(DaftError, match="no memory"):
                    move.check()
            else:
                move.check()
        well = [home for home, fail in zip(homes, fails, strict=True) if not fail]
        assert owner.stored == ({"y": well[-1]} if well else {})
        found = dict(store.get(owner.stored))
        assert all(value is not None and torch.equal(value, x) for value in found.values())
