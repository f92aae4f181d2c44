"""Spawned actors on Ray that die, are stopped, killed or ended: named, and the others go on."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from dtensor import daft
from tests.chaos.watch import running
from tests.daft.actor_classes import Model, same
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = pytest.mark.ray

X = torch.arange(8.0).reshape(2, 4) / 10


def test_a_dead_actor_is_named_and_the_others_go_on(ray_session: None):
    with daft.launch("ray", deadline_s=120.0):
        a, b, c = (daft.spawn(Model, i, name=n) for i, n in enumerate("abc"))
        step = daft.compile(lambda x: (b.execute(a.execute(x)), c.execute(x)))
        kill = daft.compile(lambda x: b.execute(a.die(x)))
        step(X)[0].get()
        for future in (kill(X), b.execute(a.execute(X))):
            with pytest.raises(daft.ActorLost, match="actor 'a', die: the process died") as caught:
                future.get()
            assert "daft.compile(lambda x: b.execute(a.die(x)))" in str(caught.value)
            assert "daft/ray/actors/session.py" not in str(caught.value)
        with pytest.raises(daft.ActorLost, match="actor 'a', die: the process died"):
            step(X)
        assert same(b.execute(c.execute(X)).get(), X @ Model(2).weight @ Model(1).weight)
        # One that is lost now, after another: each is named.
        other = daft.compile(lambda x: b.execute(c.execute(x)))
        assert same(other(X).get(), X @ Model(2).weight @ Model(1).weight)
        process = c.process().get()
        for future in (daft.compile(lambda x: b.execute(c.die(x)))(X), b.execute(c.execute(X))):
            with pytest.raises(daft.ActorLost, match="actor 'c', die: the process died"):
                future.get()
    assert not running(process)


def test_a_stopped_actor_and_one_that_takes_too_long_are_named(ray_session: None, tmp_path: Path):
    unread = pytest.raises(daft.TaskError, match="actor 'b', fail: ValueError: no good: int")
    with unread, daft.launch("ray") as session:
        a, b, c = (daft.spawn(Model, name=n) for n in "abc")
        process = a.process().get()
        daft.wait([b.fail(1)])
        c.meet_in(str(tmp_path)).get()
        session.watch.call_deadline_s = 1.0  # type: ignore[attr-defined]  # none else is in a call
        with pytest.raises(daft.ActorLost, match="'c', await_mark: .* one call for more than 1 s"):
            c.await_mark(1.0).get()
        session.watch.call_deadline_s = math.inf  # type: ignore[attr-defined]
        os.kill(process, signal.SIGSTOP)
        session.watch.deadline_s = 3.0  # type: ignore[attr-defined]  # starting takes longer
        with pytest.raises(daft.ActorLost, match="actor 'a': the process has stopped: no heart"):
            a.execute(X).get()
    assert not running(process)
