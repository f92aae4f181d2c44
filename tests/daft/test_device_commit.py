"""Tests commit points whose votes and predicates stay on the device, and the checks behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dtensor.daft import (
    Call,
    Collective,
    Commit,
    Free,
    Function,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    TaskError,
    Vote,
    Wait,
    launch_cluster,
    verify,
)
from dtensor.daft.ir.instructions import WORD, Buffer
from dtensor.daft.run import device_commit
from tests.daft.programs import function, program


@dataclass(frozen=True, slots=True)
class Below:
    """The check that numbers are below a bound."""

    bound: int
    source: str | None = "net.py:7: y = table[x]"

    def error(self, value: int, count: int) -> Exception:
        return IndexError(f"{value} is not below {self.bound}, nor are {count} numbers")


def below(x: Tensor, bound: int, row: Tensor, number: int) -> Tensor:
    """Record the numbers of x that are not below ``bound`` in the row; return x, clamped."""
    wrong = x >= bound
    first = torch.stack((torch.tensor(number), x[wrong.int().argmax()], wrong.sum()))
    row.copy_(torch.where(wrong.any() & (row[0] == 0), first, row))
    return x.clamp(max=bound - 1)


CHECKED = replace(
    function(
        "checked",
        "def forward(x, faults):\n"
        "    y = below(below(x, 90, faults, 1), 10, faults, 2)\n"
        "    int('x') if fails(x) else 0\n"
        "    return (y,)",
        below=below,
        fails=lambda x: bool((x == -1).any()),
    ),
    checks=(Below(90), Below(10)),
)
ROWS = Function(
    name="rows",
    source="def forward():\n    return tuple(torch.zeros(1, 3, dtype=torch.int64).unbind())",
    bindings=(("torch", torch),),
)
WRITE = function(
    "write",
    "def forward(w, y, skip):\n"
    "    w.copy_(where(skip == 1, w, w + y.sum()))\n"
    "    return (w.clone(),)",
    where=torch.where,
)
SUM = Collective("all_reduce", (0, 1), ("v",), ("s",), (WORD,), (WORD,), "sum", "votes")
WRITES = Call("write", ("w", "y", "skip"), ("out",), ("w",))
LIST: tuple[Instruction, ...] = (
    Call("rows", (), ("faults",)),
    Call("checked", ("x", "faults"), ("y",)),
    Vote("v", ("faults",)),
    *(SUM, Wait(("s",)), Commit("s", "skip")),
    WRITES,
    Free(("v", "s", "y", "skip", "faults")),
)


def made(items: tuple[Instruction, ...] = LIST, second: tuple[Instruction, ...] = LIST) -> Program:
    names = {"inputs": [("x",)] * 2, "outputs": [("out",)] * 2, "state": [("w",)] * 2}
    return program(items, second, functions=[CHECKED, ROWS, WRITE], **names)


RUNS = [
    ([1, 2], [3, 4], None),
    ([1, 2], [30, 40], "rank 1 .*IndexError: 30 is not below 10, nor are 2 numbers"),
    ([100, 50], [3, 4], "rank 0 .*IndexError: 100 is not below 90, nor are 1 numbers"),
    ([1, 2], [-1, 99], "rank 1 .*IndexError: 99 is not below 90"),  # before its exception
    ([-1, 2], [3, 99], "rank 0 .*ValueError"),
    ([5, 5], [5, 5], None),
]


def ran() -> None:
    """Make `RUNS` on two ranks in this process, and compare errors and state."""
    total = torch.zeros(2)
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(made())
        for first, second, error in RUNS:
            future = cluster.run(handle, [{"x": torch.tensor(x)} for x in (first, second)])
            if error is None:
                total += torch.tensor([sum(first), sum(second)])
                assert [float(r["out"]) for r in future.get()] == total.tolist()
            else:
                with pytest.raises(TaskError, match=error) as caught:
                    future.get()
                is_check = "IndexError" in error
                assert (caught.value.failure.line == "net.py:7: y = table[x]") == is_check
            state = [float(w) for (w,) in cluster.get([("w",)] * 2).get()]
            assert state == total.tolist(), (first, second)


def test_run_with_fault_on_device_is_undone_with_first_check_and_line() -> None:
    ran()


@pytest.mark.parametrize(
    "mutant", ["vote ignores rows", "predicate of 2", "predicate of 0", "rows in reverse"]
)
def test_wrong_votes_and_predicates_are_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = device_commit.DeviceCommit
    vote, predicate, faults = cls.vote, cls.predicate, cls.faults
    match mutant:
        case "vote ignores rows":
            monkeypatch.setattr(
                cls, "vote", lambda s, r, rows, failed=False: vote(s, r, (), failed=failed)
            )
        case "predicate of 2":
            monkeypatch.setattr(cls, "predicate", lambda s, total: predicate(s, total) * 2)
        case "predicate of 0":
            monkeypatch.setattr(cls, "predicate", lambda s, total: predicate(s, total) * 0)
        case _:
            monkeypatch.setattr(cls, "faults", lambda s, rows: faults(s, rows.flip(0)))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        ran()


X = Buffer((2,), torch.int64)
FREED = Free(("v", "s", "y", "faults"))
VARIABLE = Buffer((), torch.int64, variable=True)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            (*LIST[:6], replace(WRITES, inputs=("w", "y")), *LIST[7:]),
            r"it writes 'w' after the commit and does not read 'skip'",
        ),
        ((*LIST[:2], Vote("v"), *LIST[3:]), r"has no row of its own in a later vote"),
        (
            (*LIST[:5], Commit("s"), replace(WRITES, inputs=("w", "y", "v")), FREED),
            r"it has no predicate",
        ),
        (
            (LIST[0], *LIST[2:6], LIST[1], *LIST[6:]),
            r"has no row of its own in a later vote",
        ),
        (
            (*LIST[:2], Call("checked", ("x", "faults"), ("z",)), *LIST[2:], Free(("z",))),
            r"has no row of its own in a later vote",
        ),
        (
            (*LIST[:5], Commit("v", "skip"), *LIST[6:]),
            r"those of ranks \[1\] are not in it",
        ),
        (
            (Send("x", 1, "m", VARIABLE), Wait(("x",)), *LIST),
            r"the host waits for its length",
        ),
        (
            (*LIST[:6], WRITES, Recv("w", 1, "m", WORD), Wait(("w",)), LIST[7]),
            r"it writes 'w' after the commit and does not read 'skip'",
        ),
    ],
)  # fmt: skip
def test_verifier_refuses_unsound_deferred_program(
    items: tuple[Instruction, ...], said: str
) -> None:
    verify(made())
    second = LIST
    if any(isinstance(i, Send) for i in items):
        second = (Recv("m", 0, "m", VARIABLE), Wait(("m",)), Free(("m",)), *LIST)
    if any(isinstance(i, Recv) for i in items):
        second = (*LIST, Send("w", 0, "m", WORD), Wait(("w",)))
    with pytest.raises(ProgramError, match=said):
        verify(made(items, second))
