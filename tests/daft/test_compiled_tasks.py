"""`daft.compile` in one process: the same bits as interpreted, the program, and what it refuses."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from dtensor import daft
from dtensor.numerics import fold
from tests.daft.actor_classes import Model, same
from tests.daft.programs import ctrl_c_interrupts

X = torch.arange(8.0).reshape(2, 4) / 10


def test_triples_are_reduced_whole():
    x = torch.randn(5, 3)
    with daft.launch():
        trio = daft.WorkerGroup(Model, 3, daft.Scatter([5, 6, 7]), 3)
        reduce = lambda x: daft.all_reduce(trio.execute(x), "softmax")  # noqa: E731
        expected = fold([x @ Model(seed, 3).weight.detach() for seed in (5, 6, 7)], "softmax")
        for fn in (reduce, daft.compile(reduce)):
            assert same(fn(x).get(), [expected] * 3)
        wide = daft.WorkerGroup(Model, 3, 5, 6)
        refused = daft.compile(lambda x: daft.all_reduce(wide.execute(x), "softmax"))
        with pytest.raises(daft.TaskError, match=r"f64\[...,3\], got torch.float32\[5, 6\]"):
            refused(torch.ones(5, 6))[0].get()


def test_the_program_says_what_runs():
    with daft.launch():
        a, b = daft.spawn(Model, name="a"), daft.spawn(Model, name="b")

        def fn(x: torch.Tensor) -> daft.TaskFuture:
            return b.total(a.grow(b.declared(x), 2))

        frozen = daft.compile(fn).program(X)
        assert str(frozen) == EXPECTED
        (v0,) = [i for i in frozen.program.ranks[0].instructions if isinstance(i, daft.Send)]
        assert v0.source is not None and "return b.total(a.grow(b.declared(x), 2))" in v0.source
        known = daft.compile(lambda x: [b.declared(a.declared(x))]).program(X)
        assert "unknown" not in str(known) and known.report.peak_bytes == (32, 64)
        assert daft.compile(lambda x: a.declared(b.declared(x)))(X).get().equal(4 * X)
        # Each actor for itself: b holds its result and what it is given, a runs an opaque method.
        mixed = str(daft.compile(lambda x: a.execute(b.declared(x))).program(X))
        assert mixed.splitlines()[-4:-1] == [
            "memory of values, at most",
            "  b                32 bytes + x0",
            "  a                unknown: a.execute",
        ]


EXPECTED = """\
program fn    2 actors
     0: b                                       | 1: a
   0 v0 = call b.declared(self, x0) writes self | v0 = recv from 0
   1 send v0 to 1                               | wait v0
   2 v1 = recv from 1                           | v1 = call a.grow(self, v0) writes self
   3 wait v1                                    | send v1 to 0
   4 v2 = call b.total(self, v1) writes self    | free v0
   5 free v1                                    | wait v1
   6 wait v0                                    | free v1
   7 free v0                                    |

memory of values, at most
  b                unknown: a.grow, b.total
  a                unknown: a.grow
  (unknown: these tasks do not declare their tensors by daft.returns)"""


def test_recorded_once_for_each_structure():
    with daft.launch():
        a = daft.spawn(Model)
        recorded: list[int] = []

        def fn(*xs: Any, twice: bool = False) -> Any:
            recorded.append(len(xs))
            y = a.add(list(xs))
            return a.add([y, y]) if twice else y

        step = daft.compile(fn)
        for args in ((X,), (X, X), (X + 1,), (X[:1],), (X, X)):
            step(*args).get()
        assert recorded == [1, 2]
        assert not same(step(X, twice=True).get(), step(X).get())
        assert recorded == [1, 2, 1]
        outer = daft.compile(lambda x: a.execute(step(x)))  # one inside another is a part of it
        assert same(outer(X).get(), a.execute(step(X)).get())
    with daft.launch():
        a = daft.spawn(Model, 1)
        assert same(step(X).get(), a.add([X]).get())  # recorded anew in another launch


def test_an_interrupted_step_leaves_no_transfers_behind(monkeypatch: pytest.MonkeyPatch):
    original, numbers = Model.execute, [signal.SIGINT]

    def execute(self: Model, x: torch.Tensor) -> torch.Tensor:
        if self.kept is not None and numbers:
            signal.raise_signal(numbers.pop())
        return original(self, x)

    monkeypatch.setattr(Model, "execute", execute)
    with ctrl_c_interrupts(), daft.launch():
        a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
        b.keep(X)

        def fn(x: torch.Tensor) -> daft.TaskFuture:
            for _ in range(3):  # so that a has sent when b is interrupted, and b not yet received
                b.weights()
            b.execute(x)
            return b.add([a.execute(x)])

        step = daft.compile(fn)
        with pytest.raises(KeyboardInterrupt):
            step(X)
        assert same(step(2 * X).get(), 2 * X @ Model(1).weight.detach() + Model(2).weight[0])


def test_a_buffer_of_unknown_length():
    buffer = daft.Buffer((), torch.uint8, variable=True)
    assert (str(buffer), buffer.nbytes) == ("u8[*]", 0)
    assert buffer.accepts(torch.empty(7, dtype=torch.uint8))
    assert not buffer.accepts(torch.empty(7, 1, dtype=torch.uint8))
    assert not buffer.accepts(torch.empty(7))
    with pytest.raises(ValueError, match="has no shape before it runs"):
        daft.Buffer((2,), torch.uint8, variable=True)
    with pytest.raises(ValueError, match=r"must know its sizes before it runs, got u8\[\*\]"):
        daft.Collective("broadcast", (0, 1), (), ("y",), (), (buffer,), None, "c")


def test_a_failing_step_leaves_the_actors_as_they_are():
    with daft.launch():
        a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
        step = daft.compile(lambda x: (b.execute(a.fail(x)), b.execute(a.execute(x))))
        for _ in range(2):
            failed, fine = step(X)
            with pytest.raises(daft.TaskError, match="no good: Tensor") as caught:
                failed.get()
            assert "test_compiled_tasks.py" in str(caught.value).split("traceback")[0]
            assert same(fine.get(), X @ Model(1).weight.detach() @ Model(2).weight.detach())
        group = daft.WorkerGroup(Model, 3)
        reduce = daft.compile(lambda x, y: daft.all_reduce(group.execute(daft.Scatter([x, y, x]))))
        with pytest.raises(daft.TaskError, match="actor 'Model-3', execute: RuntimeError"):
            reduce(X, torch.ones(1))[2].get()
        with pytest.raises(daft.TaskError, match="fold_piece: .*members' values differ in shape"):
            reduce(X, X[:1])[0].get()
        assert reduce(X, X)[0].get().shape == (2, 4)


def test_a_function_that_reads_values_is_refused():
    with daft.launch():
        a = daft.spawn(Model)
        before = a.execute(X)
        for fn, message in (
            (lambda x: a.execute(x) if a.execute(x) else None, "its truth .*: Model-0.execute"),
            (lambda x: a.execute(x * 2), "the controller computes with it: argument 0 of"),
            (lambda x: a.execute(torch.relu(x)), "the controller computes with it: argument 0"),
            (lambda x: a.execute(x[0]), "an item of it is read: argument 0"),
            (lambda x: a.execute(a.execute(x).get()), "its value is read: Model-0.execute"),
            (lambda x: [a.grow(x, i) for i in range(int(x))], "it is made a number: argument 0"),
        ):
            with pytest.raises(daft.ProgramError, match=f"{message}.*\n  at .*lambda x.*\n  Fix:"):
                daft.compile(fn)(X)
        with pytest.raises(daft.ProgramError, match="neither one of its arguments nor made in it"):
            daft.compile(lambda x: a.add([x, before]))(X)
        with pytest.raises(daft.ProgramError, match="its value is read: Model-0.execute"):
            daft.compile(lambda x: a.add([x, before.get()]))(X)
        with pytest.raises(daft.ProgramError, match="spawned while a function is recorded"):
            daft.compile(lambda x: daft.spawn(Model))(X)
        with pytest.raises(daft.ProgramError, match="calls no method of an actor"):
            daft.compile(lambda x: x)(X)
        assert a.execute(X).get() is not None  # no longer recording
