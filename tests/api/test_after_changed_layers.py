"""Run programs after a layer has changed and compare with plain torch: a `Case` is one change of
`changing.py` at one placement.

Each program is a generator. It runs a first step, yields CHANGE where the layer is to be changed,
and yields LOSE, LEAVE or ENTER where the test must lose a rank, leave or enter the launch.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import dtensor as dt
from dtensor.daft import TaskError
from tests.api.changing import PLACES, WAYS, Placed, Plain, batch, differences, unlike
from tests.api.generation import greedy


class Act(Enum):
    CHANGE = "the first change of the way"
    LOSE = "a rank is killed"
    LEAVE = "the launch ends"
    ENTER = "another one begins"


CHANGE, LOSE, LEAVE, ENTER = Act
PROMPTS = [[5, 3, 9], [7, 1]]


class Case:
    """One way of changing at one placement. ``wrong``: one line for each difference from torch."""

    def __init__(self, name: str, place: str, follow: str, folder: Path) -> None:
        self.place, self.follow, self.folder = place, follow, folder
        self.way = WAYS[name]
        self.plain, self.placed = self._pair(0)
        self.wrong: list[str] = []
        self._steps = self.way.steps(self.plain, self.placed)
        self._due: int | None = None  # the step that is to be taken next

    def _pair(self, seed: int) -> tuple[Plain, Placed]:
        mixes = self.follow == "dt.generator"
        plain, placed = (self.way.net(seed, mixes=mixes) for _ in range(2))
        return Plain(plain), Placed(placed, PLACES[self.place])

    def run(self) -> Iterator[Act]:
        """Run the program in a launch, and compare once more after the launch."""
        self.change()
        self.take()
        for act in FOLLOWS[self.follow](self):
            if act is CHANGE:
                self.change()
            else:
                yield act
        if self._due is not None:
            self.take()
        for number in self._steps:
            self._due = number
            self.take()
        self.compare("at the end")
        yield LEAVE
        self.compare("after the launch")

    def change(self) -> None:
        """Apply the next change of the way; before the first step, do nothing."""
        self._due = next(self._steps)

    def take(self) -> None:
        """Take the next step."""
        assert self._due is not None
        number, self._due = self._due, None
        self.plain.take(number)
        self.placed.take(number)

    def evaluate(self) -> None:
        self.plain.evaluate()
        self.placed.evaluate()

    def compare(self, when: str) -> None:
        self.wrong += [f"{when}, {line}" for line in differences(self.placed, self.plain)]

    def state(self) -> dict[str, Any] | None:
        """Return the state of plain torch, or None if torch cannot make one because a group was
        removed."""
        try:
            optimizer = self.plain.optimizer.state_dict()
        except KeyError:
            return None
        return copy.deepcopy({"model": self.plain.net.state_dict(), "optimizer": optimizer})

    def check(self, found: Any, expected: Any, what: str) -> None:
        self.wrong += unlike(found, expected, what)

    def changed_anew(self) -> tuple[Plain, Placed]:
        """Return new models with other values that had the same change and no step."""
        pair = self._pair(1)
        steps = self.way.steps(*pair)
        next(steps)
        next(steps)
        return pair


Follow = Callable[[Case], Iterator[Act]]


def steps(case: Case) -> Iterator[Act]:
    """Take steps and read nothing before the end."""
    yield CHANGE


def compiled(case: Case) -> Iterator[Act]:
    case.evaluate()
    yield CHANGE
    case.evaluate()
    case.take()
    case.evaluate()


def generated(case: Case) -> Iterator[Act]:
    """Generate with one generator that was made before the change."""
    texts = dt.generator(case.placed.model, slots=2, length=16, buckets=(8,))

    def compare(when: str) -> None:
        case.plain.net.eval()
        wanted = [greedy(case.plain.net, prompt, 4) for prompt in PROMPTS]
        case.plain.net.train()
        found = [list(text.tokens) for text in texts(PROMPTS, max_new_tokens=4)]
        case.check(found, wanted, f"texts {when}")

    compare("before")
    yield CHANGE
    compare("after the change")
    case.take()
    compare("after a step")


def gathered(case: Case) -> Iterator[Act]:
    yield CHANGE
    if (state := case.state()) is not None:
        case.check(
            _plain(dt.gather_state_dict(case.placed.model, case.placed.optimizer)),
            _plain(state),
            "gathered",
        )


def optimizer_state(case: Case) -> Iterator[Act]:
    yield CHANGE
    if (state := case.state()) is not None:
        case.check(case.placed.optimizer.state_dict(), state["optimizer"], "opt.state_dict()")


def saved(case: Case) -> Iterator[Act]:
    """Save, load into models with other values, and continue those."""
    yield CHANGE
    if (state := case.state()) is None:
        return
    path = case.folder / f"{len(list(case.folder.iterdir()))}"
    dt.save(str(path), case.placed.model, case.placed.optimizer).get()
    plain, placed = case.changed_anew()
    dt.load(str(path), placed.model, placed.optimizer)
    plain.net.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(state["optimizer"])
    for each in (plain, placed):
        each.take(1)
    case.wrong += [f"loaded, {line}" for line in differences(placed, plain)]


def came_home(case: Case) -> Iterator[Act]:
    yield CHANGE
    case.placed.read()  # evaluations do not outlive their launch
    yield LEAVE
    case.compare("at home")
    yield ENTER


def undone(case: Case) -> Iterator[Act]:
    """Run a batch with invalid labels, which is undone."""
    yield CHANGE
    tokens, targets = batch(5)
    try:
        float(case.placed.step(tokens, targets + 99))
        case.wrong.append("labels out of range raised nothing")
    except TaskError:
        pass


def lost(case: Case) -> Iterator[Act]:
    """Lose a rank right after the change, and again after an unread step."""
    yield CHANGE
    yield LOSE
    case.take()
    case.compare("after a loss")
    case.change()
    case.take()
    yield LOSE


FOLLOWS: Mapping[str, Follow] = {
    "steps": steps,
    "dt.compile": compiled,
    "dt.generator": generated,
    "gather_state_dict": gathered,
    "opt.state_dict": optimizer_state,
    "save, load": saved,
    "home-coming": came_home,
    "undo": undone,
    "a rank lost": lost,
}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert mappings to plain dicts."""
    return {"model": dict(state["model"]), "optimizer": dict(state["optimizer"])}


def cases() -> Iterator[Any]:
    """Return all cases that are not refused. Ranks can be lost only on Ray. The default set has one
    case of each program."""
    for turn, follow in enumerate(FOLLOWS):
        for number, name in enumerate(WAYS):
            for at, place in enumerate(PLACES):
                if follow == "a rank lost":
                    if (number + turn) % len(PLACES) != at:
                        continue
                    marks = [pytest.mark.ray]
                else:
                    marks = []
                if number != 7 * turn % len(WAYS) or at != turn % len(PLACES):
                    marks.append(pytest.mark.sweep)
                if place not in WAYS[name].refused:
                    yield pytest.param(name, place, follow, marks=marks)


@pytest.mark.default("a layer replaced-tp2-steps")
@pytest.mark.filterwarnings("ignore:recovered")
@pytest.mark.parametrize(("name", "place", "follow"), list(cases()))
def test_programs_after_layer_change_match_torch(
    name: str, place: str, follow: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mesh, options = PLACES[place].mesh, dict[str, Any]()
    if follow == "a rank lost":
        request.getfixturevalue("ray_session")
        options = dict(backend="ray", spares=1, snapshot_every=1)
    case = Case(name, place, follow, tmp_path)
    with ExitStack() as launches:
        for act in itertools.chain([ENTER], case.run()):
            if act is ENTER:
                running: Any = launches.enter_context(dt.launch(mesh, **options))
            elif act is LEAVE:
                launches.pop_all().close()
            elif act is LOSE:
                pid = running.launch.cluster.membership.host(1).counter.pid
                os.kill(pid, signal.SIGKILL)
    assert case.wrong == []
