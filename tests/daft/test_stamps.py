"""Code with stamps gives what it gives without, fails at the same lines, and notes each line."""

from __future__ import annotations

from dtensor.daft import Function
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.run.timestamps import stamped

LINES = (
    CodeLine("a = x + y", ("a",), ("x", "y"), source="net.py:1: a"),
    CodeLine("b = a / y", ("b",), ("a", "y"), drops=("a",), comment="of a", source="net.py:2: b"),
)
BODY = Body(("x", "y"), LINES, ("b", "x"))


def clock() -> float:
    clock.now += 1.0  # type: ignore[attr-defined]
    return clock.now  # type: ignore[attr-defined]


def test_a_stamp_after_each_line():
    clock.now = 0.0  # type: ignore[attr-defined]
    function, noted = Function.straight("f", BODY, {}), list[float]()
    assert (
        function.source
        == """\
def forward(x, y):
    a = x + y
    b = a / y; del a  # of a
    return (b, x, )
"""
    )
    built = stamped(function, clock, noted.extend)
    assert built(1, 2) == function.build()(1, 2) == (1.5, 1)
    assert noted == [1.0, 2.0, 3.0]


def test_errors_name_the_same_line():
    function = Function.straight("f", BODY, {})
    for built in (function.build(), stamped(function, lambda: 0.0, list[float]().extend)):
        try:
            built(1, 0)
        except ZeroDivisionError as error:
            assert function.user_line(error) == "net.py:2: b"
        else:
            raise AssertionError("it divides by zero")


def test_what_is_not_known_line_by_line_runs_as_it_is():
    wrapped = Function.of(divmod)
    branch = Function(name="f", source="def forward(x):\n    if x: x = 2\n    return (x,)\n")
    nothing = Function.straight("f", Body(("x",), (), ("x",)), {})
    noted = list[float]()
    assert stamped(wrapped, clock, noted.extend)(7, 2) == (3, 1)
    assert stamped(branch, clock, noted.extend)(7) == (2,)
    assert stamped(nothing, clock, noted.extend)(7) == (7,)
    assert noted == []
