"""Actors, futures, tasks and groups, interpreted, in one process; and the messages they send."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from dtensor import daft
from dtensor.daft.errors import Failure
from dtensor.daft.tasks.values import decode, encode, encode_failure, failure_of
from dtensor.numerics import DTYPES
from tests.daft.actor_classes import Batch, Feeder, Model, same
from tests.daft.programs import ctrl_c_interrupts

X = torch.arange(8.0).reshape(2, 4)


def test_a_message_is_a_copy_of_any_value():
    shared = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    value = {
        "batch": Batch(shared, [1, 2], "é"),
        "again": (shared, torch.tensor(3), torch.empty(0, 5), torch.nn.Parameter(shared)),
        "dtypes": [torch.ones(3).to(d) for d in DTYPES.values() if d != torch.complex32],
        "plain": [None, 1.5, {"a"}],
    }
    message = encode(value).message
    shared.zero_()
    for copy in (True, False):
        found = decode(message, copy=copy)
        assert found["batch"].tokens is found["again"][0]
        assert found["batch"].tokens.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert found["batch"].tokens.is_contiguous()
        assert same(found["dtypes"], value["dtypes"])
        assert found["again"][2].shape == (0, 5) and not found["again"][3].requires_grad
        assert (found["batch"].note, found["plain"]) == ("é", [None, 1.5, {"a"}])
    lost = daft.ActorLost(Failure(rank=None, actor="a", reason="gone"))
    assert isinstance(failure_of(encode_failure(lost)), daft.ActorLost)
    assert failure_of(message) is None
    assert decode(encode(lambda: 7).message)() == 7
    with pytest.raises(TypeError, match="does not pickle .*lock.*\n  value: builtins.list"):
        encode([threading.Lock()])


def test_what_a_launch_takes_is_checked():
    with pytest.raises(ValueError, match=r"backend='rya'.\n  Fix: 'inprocess' or 'ray'"):
        daft.launch(backend="rya")  # type: ignore[arg-type]
    for seconds in (0, -1.0, "60", None, float("nan")):
        with pytest.raises(ValueError, match=r"is no number of seconds.\n  Fix: deadline_s=60.0"):
            daft.launch_cluster(2, deadline_s=seconds)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compile takes a function of futures, not 3"):
        daft.compile(3)  # type: ignore[arg-type]


def test_what_is_no_value_says_so():
    with daft.launch():
        a = daft.spawn(Model)
        y = a.execute(X)
        for use in (bool, len, float, iter, lambda f: f + 1, lambda f: f < 1, torch.relu):
            with pytest.raises(
                TypeError, match=r"not a value, but .*\n  at .*\n  Fix: .*\.get\(\)"
            ):
                use(y)
        with pytest.raises(TypeError, match="not a value, but its attribute 'shape'"):
            _ = y.shape
        with pytest.raises(AttributeError, match="no public method 'exec'.*\n.*'execute'"):
            a.exec(X)
        feeder = daft.spawn(Feeder)
        with pytest.raises(AttributeError, match=r"method 'size': it is a property.\n  Fix: "):
            _ = feeder.size
        with pytest.raises(AttributeError, match=r"method 'batch'.\n  Fix: .* 'batches'"):
            _ = feeder.batch
        with pytest.raises(TypeError, match="actors do not call actors"):
            a.execute(a)
        with pytest.raises(ValueError, match="an actor 'x' already"):
            daft.spawn(Model, name="x"), daft.spawn(Model, name="x")
        message = r"open already: the one at .*test_actors.py:\d+ in test_what.*\n  at .*\n  Fix:"
        with pytest.raises(RuntimeError, match=message):
            daft.launch()
        with pytest.raises(daft.ProgramError, match="ended while a function is recorded"):
            daft.compile(lambda x: [daft.end(a), a.execute(x)][1])(X)
    with daft.launch(), pytest.raises(ValueError, match="belongs to another launch"):
        daft.spawn(Model).execute(y)
    with pytest.raises(daft.ClusterClosed, match="inside `with daft.launch"):
        y.get()
    with pytest.raises(RuntimeError, match="Actors need a launch.*\n  at .*spawn"):
        daft.spawn(Model)


def test_a_group_is_addressed_as_one():
    with daft.launch() as session:
        group = daft.WorkerGroup(Model, 3, daft.Scatter([5, 6, 7]), name="g")
        one = daft.spawn(Model)
        weights = [Model(seed).weight.detach() for seed in (5, 6, 7)]
        ys = group.execute(X)
        assert same(ys.get(), [X @ w for w in weights])
        assert same(group.execute(daft.Scatter([X, 2 * X, 3 * X]))[2].get(), 3 * X @ weights[2])
        assert same(group.execute(ys).get(), [X @ w @ w for w in weights])  # each its own
        total = X @ weights[0] + X @ weights[1] + X @ weights[2]
        assert same(one.add(ys).get(), torch.stack(ys.get()).sum(0) + Model().weight.detach()[0])
        calls = session.calls
        assert same(daft.all_reduce(ys).get(), [total] * 3)
        assert session.calls == calls + 3
        largest = torch.maximum(torch.maximum(X @ weights[0], X @ weights[1]), X @ weights[2])
        assert same(daft.all_reduce(ys, "max")[1].get(), largest)
        with pytest.raises(daft.TaskError, match=r"f64\[...,3\], got torch.float32\[2, 4\]"):
            daft.all_reduce(ys, "softmax").get()
        assert same(daft.all_gather(ys)[2].get(), ys.get())
        assert same(daft.broadcast(ys[1], group).get(), [ys.get()[1]] * 3)
        states = daft.all_reduce(group.weights()).get()
        assert states[0]["version"] == 9 and same(states[0], states[2])
        with pytest.raises(ValueError, match="group of 3 is given Scatter of 2"):
            group.execute(daft.Scatter([X, X]))
        with pytest.raises(TypeError, match="Scatter is an argument of a group's method"):
            one.execute(daft.Scatter([X]))
        with pytest.raises(daft.TaskError, match="members' tensors differ"):
            daft.all_reduce(group.execute(daft.Scatter([X, X, X[:1]]))).get()
        with pytest.raises(AttributeError, match="no public method"):
            group.nothing()
        failed = group.fail(1)  # one of a group's failures is enough to have read them
        with pytest.raises(daft.TaskError, match="actor 'g-0', fail"):
            failed.get()


class Computes:
    def interrupted(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_task_computes():
    """It ends what was called, and is no failure of the actor's."""
    with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt), daft.launch():
        daft.spawn(Computes).interrupted()


def test_a_compiled_function_keeps_no_values():
    with daft.launch():
        a = daft.spawn(Model)
        step = daft.compile(lambda x: [a.execute(x)])
        step(torch.ones(2, 4))
        gc.disable()
        try:
            x = torch.ones(2, 4)
            made, given = weakref.ref(step(x)[0]), weakref.ref(x)
            del x
            assert made() is None and given() is None
        finally:
            gc.enable()


def test_large_copies_go_on_in_a_fork():
    value = torch.ones(1 << 21)
    with daft.launch():
        daft.spawn(Feeder).call(torch.abs, value).get()
    if not (child := os.fork()):
        signal.alarm(600)  # it would wait for ever
        with daft.launch():
            daft.spawn(Feeder).call(torch.abs, value).get()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_class_that_does_not_pickle_is_refused_before_anything_starts():
    lock = threading.Lock()

    class Locked:
        def locked(self) -> bool:
            return lock.locked()

    with daft.launch() as session:
        with pytest.raises(TypeError, match=r"Locked cannot go to another process[^$]*__init__"):
            daft.spawn(Locked)
        assert not session.actors
