"""What users of other systems try first, on both backends: the same values, the same errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dtensor import daft
from tests.daft.actor_classes import Feeder, Model, Unborn, same
from tests.extras import missing

X = torch.arange(8.0).reshape(2, 4) / 10
BACKENDS = ["inprocess", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(params=BACKENDS)
def session(request: pytest.FixtureRequest) -> Iterator[daft.Session]:
    if request.param == "ray":
        pytest.importorskip("ray", reason=missing("ray"))
        request.getfixturevalue("ray_session")
    made = daft.launch(request.param, deadline_s=120.0)
    yield made
    made.close(quiet=True)


def test_methods_that_wait(session: daft.Session):
    a, b = daft.spawn(Feeder), daft.spawn(Feeder)
    x, turn = b.slowly(a.slowly(X)[0]).get()
    assert same(x, X) and turn == 1
    assert daft.compile(lambda x: a.slowly(x))(3).get() == (3, 2)
    with pytest.raises(daft.TaskError, match="actor 'Feeder-0', fail_slowly: ValueError: not in"):
        a.fail_slowly().get()
    assert a.meet(True).get() == [] and a.meet(False).get() == ["kept"]

    async def outer() -> Any:  # as in a notebook
        return a.slowly(5).get()

    assert asyncio.run(outer()) == (5, 3)


def test_methods_that_yield(session: daft.Session):
    a, model = daft.spawn(Feeder), daft.spawn(Model, 1)
    seen: list[Any] = []
    for number, batch in enumerate(a.batches(X, 2)):
        assert isinstance(batch, daft.TaskFuture) and a.last().get() == number
        seen.append(model.execute(batch))
    assert len(seen) == 2
    assert same(seen[1].get(), (X + 1) @ Model(1).weight.detach())
    assert [item.get() for item in a.later(3)] == [0, 1, 2]
    stream, items = a.batches(X, 3), []
    with pytest.raises(daft.TaskError, match="'Feeder-0', advance: ValueError: no more than two"):
        items += stream
    assert len(items) == 3 and list(stream) == []
    stream = a.batches(X, 100)
    assert same(next(stream).get(), X)
    stream.close()
    stream.close()
    assert list(stream) == [] and a.last().get() == 0
    with pytest.raises(daft.TaskError, match="cannot go between actors: .*'?generator'?"):
        a.lazily().get()
    with pytest.raises(daft.ProgramError, match="its values are read: Feeder-0.batches"):
        daft.compile(lambda x: a.batches(x, 2))(X)
    with pytest.raises(daft.TaskError, match="__init__: RuntimeError: no weights on this disk"):
        next(iter(_yields(daft.spawn(Stream))))


def _yields(actor: daft.ActorHandle) -> Any:
    return actor.items()


class Stream(Unborn):
    def items(self) -> Iterator[int]:
        yield 1


def test_functions_are_arguments(session: daft.Session):
    a, factor = daft.spawn(Feeder), 3

    def times(x: Any) -> Any:
        return x * factor

    assert same(a.call(times, X).get(), X * 3)
    assert a.call(lambda x: [x, factor], 4).get() == [4, 3]
    assert daft.compile(lambda x: a.call(lambda x: x + factor, x))(4).get() == 7
    assert a.call(lambda x: lambda y: x + y, 4).get()(5) == 9


def test_arrays(session: daft.Session):
    a, b = daft.spawn(Feeder), daft.spawn(Feeder)
    values = [
        numpy.arange(1000.0),
        numpy.arange(100_000, dtype=numpy.int16).reshape(100, -1),
        numpy.ones((200, 300), order="F"),
        numpy.arange(30_000.0)[::3],
        numpy.array(["a", "bc"]),
        numpy.array([None, {}], dtype=object),
        numpy.array([1, 2], dtype=">i4"),
        numpy.zeros(3, dtype=[("x", "f4"), ("y", "i8")]),
        numpy.array("2026-01-01", dtype="M8[D]"),
        numpy.float32(2),
        numpy.empty((0, 3)),
    ]
    step = daft.compile(lambda x: b.slowly(a.slowly(x)))
    for value in values:
        for given in (b.slowly(a.slowly(value)), step(value)):
            (found, _), _ = given.get()
            assert type(found) is type(value) and found.dtype == value.dtype
            numpy.testing.assert_array_equal(found, value)
            if (
                isinstance(found, numpy.ndarray)
                and found.dtype.kind in "fi"
                and not found.dtype.names
            ):
                assert found.flags.writeable
    both = numpy.arange(50_000.0)
    found, again = a.call(lambda x: x, [both, both]).get()
    assert found is again and found is not both


def test_some_are_waited_for(session: daft.Session, tmp_path: Path):
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
    for actor in (a, b):
        actor.meet_in(str(tmp_path)).get()
    done, rest = daft.wait([b.execute(X), a.execute(X)], num=2)
    assert len(done) == 2 and not rest
    failed = a.fail(X)
    assert daft.wait([failed]) == ([failed], [])
    futures = [a.execute(X) for _ in range(3)]
    assert daft.wait(futures, num=3)[0] == futures
    done, rest = daft.wait(futures)
    assert done == futures[:1] and rest == futures[1:]
    with pytest.raises(TypeError, match=r"takes futures of tasks, got 3.*\n  at .*\n  Fix:"):
        daft.wait([3])  # type: ignore[list-item]
    for num in (0, 4, 1.0):
        with pytest.raises(ValueError, match=r"num=.* of 3 futures.*\n  at .*\n  Fix:"):
            daft.wait(futures, num=num)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="given twice"):
        daft.wait([failed, failed])
    if type(session).__name__ == "RaySession":
        late = a.await_mark(5.0)
        assert daft.wait([late, b.execute(X)])[1] == [late]
        begin = time.monotonic()
        assert daft.wait([late], timeout=0.1) == ([], [late])
        assert time.monotonic() - begin >= 0.1
        (tmp_path / "5").touch()
        assert daft.wait([late]) == ([late], [])


def test_an_actor_is_ended(session: daft.Session):
    a, b, c = (daft.spawn(Model, seed, name=name) for seed, name in enumerate("abc"))
    x = a.execute(X)
    y = b.execute(x)
    assert same(y.get(), X @ Model(0).weight.detach() @ Model(1).weight.detach())
    with daft_other(c):
        daft.end(c)
        daft.end(c)
    with pytest.raises(daft.ActorLost, match="actor 'c'.*: it was ended by daft.end, at .*alike"):
        a.execute(c.execute(X)).get()
    assert same(b.execute(a.execute(X)).get(), y.get())
    with pytest.raises(TypeError, match="end takes an actor"):
        daft.end(x)  # type: ignore[arg-type]


def daft_other(actor: daft.ActorHandle) -> Any:
    """Something of the actor that is not read."""
    import contextlib

    actor.execute(X)
    return contextlib.nullcontext()


def test_what_is_no_method_says_so(session: daft.Session):
    a = daft.spawn(Feeder)
    with pytest.raises(
        AttributeError, match=r"no public method 'size': it is a property.\n  Fix: "
    ):
        a.size  # noqa: B018
    with pytest.raises(AttributeError, match=r"no public method 'batch'.\n  Fix: .* 'batches'"):
        a.batch  # noqa: B018
    with pytest.raises(RuntimeError, match=r"open already: the one at .*test_tasks_alike.py:\d+"):
        daft.launch()
