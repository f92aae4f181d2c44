"""Tests actors, groups and `daft.compile` in one process, and the messages between actors.

`test_contract.py` has what each backend promises.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch

from dtensor import daft
from dtensor.daft.errors import Failure
from dtensor.daft.ir.text import parse_instructions
from dtensor.daft.tasks.values import decode, encode, encode_failure, failure_of
from dtensor.numerics import DTYPES, fold
from tests.daft.actor_classes import Batch, Feeder, Model, same
from tests.daft.programs import ctrl_c_interrupts

X = torch.arange(8.0).reshape(2, 4) / 10


def test_encoded_message_decodes_to_copy_of_value():
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
        assert found["batch"].tokens.stride() == (1, 3)
        assert same(found["dtypes"], value["dtypes"])
        assert found["again"][2].shape == (0, 5) and found["again"][3].requires_grad
        assert (found["batch"].note, found["plain"]) == ("é", [None, 1.5, {"a"}])
    lost = daft.ActorLost(Failure(rank=None, actor="a", reason="gone"))
    assert isinstance(failure_of(encode_failure(lost)), daft.ActorLost)
    assert failure_of(message) is None
    assert decode(encode(lambda: 7).message)() == 7
    with pytest.raises(TypeError, match="does not pickle .*lock.*\n  value: builtins.list"):
        encode([threading.Lock()])


class PicklesItself(torch.Tensor):
    def __reduce_ex__(self, protocol: object) -> Any:
        return torch.tensor, (self.tolist(),)


@pytest.mark.parametrize("kind", ["parametrized", "opaque", "graded"])
def test_value_that_does_not_pickle_is_refused_with_fix(kind: str) -> None:
    value: Any = torch.ones(2, 2)
    if kind == "parametrized":
        value = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    elif kind == "opaque":
        value = value.to_mkldnn()
    else:
        value = value.as_subclass(PicklesItself)
        value.grad = torch.ones(2, 2)
    with pytest.raises(
        TypeError, match="(?s)^This value cannot go .* does not pickle .*\n  value: .*\n  Fix: give"
    ):
        encode(value)


def test_launch_refuses_invalid_backend_deadline_and_function():
    with pytest.raises(ValueError, match=r"backend='rya': it is \"inprocess\" or \"ray\""):
        daft.launch(backend="rya")  # type: ignore[arg-type]
    for seconds in (0, -1.0, "60", None, float("nan")):
        with pytest.raises(ValueError, match=r"is not a number above 0.\nfix: deadline_s=60.0"):
            daft.launch_cluster(2, deadline_s=seconds)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compile takes a function of futures, not 3"):
        daft.compile(3)  # type: ignore[arg-type]


def test_future_used_as_value_or_outside_launch_raises_with_fix():
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
        message = r"open already: the one at .*test_actors.py:\d+ in test_future.*\n  at .*\n  Fix:"
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


def test_worker_group_calls_all_members_and_scatters_arguments():
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
        failed = group.fail(1)  # reading one failure of a group counts as reading all
        with pytest.raises(daft.TaskError, match="actor 'g-0', fail"):
            failed.get()


class Computes:
    def interrupted(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_task_raises_keyboard_interrupt():
    """The interrupt ends the call of the controller, and is no failure of the actor."""
    with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt), daft.launch():
        daft.spawn(Computes).interrupted()


def test_compiled_function_holds_no_argument_or_result():
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


def test_large_copies_work_in_forked_process():
    value = torch.ones(1 << 21)
    with daft.launch():
        daft.spawn(Feeder).call(torch.abs, value).get()
    if not (child := os.fork()):
        signal.alarm(600)  # a deadlock would otherwise hang the test
        with daft.launch():
            daft.spawn(Feeder).call(torch.abs, value).get()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_spawn_refuses_unpicklable_class_before_starting_process():
    lock = threading.Lock()

    class Locked:
        def locked(self) -> bool:
            return lock.locked()

    with daft.launch() as session:
        with pytest.raises(TypeError, match=r"Locked cannot go to another process[^$]*__init__"):
            daft.spawn(Locked)
        assert not session.actors


# -- compiled functions ----------------------------------------------------------------------------


def test_softmax_all_reduce_folds_triples_and_refuses_other_shapes():
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


def test_compiled_program_text_lists_calls_transfers_and_memory():
    with daft.launch():
        a, b = daft.spawn(Model, name="a"), daft.spawn(Model, name="b")

        def fn(x: torch.Tensor) -> daft.TaskFuture:
            return b.total(a.grow(b.declared(x), 2))

        frozen = daft.compile(fn).program(X)
        assert str(frozen) == EXPECTED
        for own in frozen.program.ranks:
            assert parse_instructions(own.text()) == own.instructions
        (v0,) = [i for i in frozen.program.ranks[0].instructions if isinstance(i, daft.Send)]
        assert v0.source is not None and "return b.total(a.grow(b.declared(x), 2))" in v0.source
        known = daft.compile(lambda x: [b.declared(a.declared(x))]).program(X)
        assert "unknown" not in str(known) and known.report.peak_bytes == (32, 64)
        assert daft.compile(lambda x: a.declared(b.declared(x)))(X).get().equal(4 * X)
        # Each actor for itself: b holds its result and what it is given, a runs an opaque method.
        named = daft.spawn(Model, name="n" * 40)
        wide = daft.compile(lambda x: a.execute(named.execute(x))).program(X)
        assert "n.execute(self, x0) writes self" in str(wide)
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


def test_compiled_function_is_recorded_once_per_argument_structure():
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
        outer = daft.compile(lambda x: a.execute(step(x)))  # a nested compiled function is inlined
        assert same(outer(X).get(), a.execute(step(X)).get())
    with daft.launch():
        a = daft.spawn(Model, 1)
        assert same(step(X).get(), a.add([X]).get())  # another launch records again


def test_interrupted_step_leaves_no_pending_transfers(monkeypatch: pytest.MonkeyPatch):
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
            for _ in range(3):  # a has sent and b has not received when b is interrupted
                b.weights()
            b.execute(x)
            return b.add([a.execute(x)])

        step = daft.compile(fn)
        with pytest.raises(KeyboardInterrupt):
            step(X)
        assert same(step(2 * X).get(), 2 * X @ Model(1).weight.detach() + Model(2).weight[0])


def test_variable_length_buffer_has_no_size_before_it_runs():
    buffer = daft.Buffer((), torch.uint8, variable=True)
    assert (str(buffer), buffer.nbytes) == ("u8[*]", 0)
    assert buffer.accepts(torch.empty(7, dtype=torch.uint8))
    assert not buffer.accepts(torch.empty(7, 1, dtype=torch.uint8))
    assert not buffer.accepts(torch.empty(7))
    with pytest.raises(ValueError, match="has no shape before it runs"):
        daft.Buffer((2,), torch.uint8, variable=True)
    with pytest.raises(ValueError, match=r"must know its sizes before it runs, got u8\[\*\]"):
        daft.Collective("broadcast", (0, 1), (), ("y",), (), (buffer,), None, "c")


def test_failure_of_group_member_in_all_reduce_names_member():
    with daft.launch():
        group = daft.WorkerGroup(Model, 3)
        reduce = daft.compile(lambda x, y: daft.all_reduce(group.execute(daft.Scatter([x, y, x]))))
        with pytest.raises(daft.TaskError, match="actor 'Model-1', execute: RuntimeError"):
            reduce(X, torch.ones(1))[2].get()
        with pytest.raises(daft.TaskError, match="fold_piece: .*members' values differ in shape"):
            reduce(X, X[:1])[0].get()
        assert reduce(X, X)[0].get().shape == (2, 4)


def test_unpacking_future_raises_with_fix():
    with daft.launch():
        future = daft.spawn(Model).add([X, X])
        with pytest.raises(TypeError, match=r"iterated over(.|\n)*Fix: a, b = f.get\(\)"):
            _a, _b = future


def test_pickled_function_keeps_its_source_file():
    code = decode(encode({"f": lambda: 1}).message)["f"].__code__
    assert code.co_filename == __file__ and code.co_firstlineno > 1


def test_compile_refuses_function_that_reads_values_or_spawns():
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
        assert a.execute(X).get() is not None  # the recording has ended
