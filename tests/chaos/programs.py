"""The programs that are disturbed: few ranks, and each step gives results to compare.

    scenario = SCENARIOS["tp2"]
    body = scenario.make()                       # models and placements, outside the launch
    with dt.launch(*scenario.meshes):
        result = body(step, 9)                   # nine steps, each through `step`

The caller's `step(number, act)` calls `act` and returns its result (`disturbance.py`). Losses,
tokens, rewards and the final state must be bitwise equal to an undisturbed run. Reinforcement
learning with staleness is an exception: its weights depend on timing, so only the staleness bound
and the number of batches are checked.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import dtensor as dt
from tests.api.generation import placed
from tests.chaos.inside import KINDS, LATE

Step: TypeAlias = Callable[[int, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of each step, and the final state."""

    steps: list[Any]
    state: Any = None


Body: TypeAlias = Callable[[Step, int], Result]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """Placements of a model on two ranks."""

    mesh: dt.Mesh
    placements: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "tp2": Case(
        dt.Mesh(tp=2),
        {"*.up.weight": dict(tp=dt.Row()), "*.down.weight": dict(tp=dt.Column())},
    ),
    "pp2": Case(
        dt.Mesh(pp=2),
        {},
        dict(stages={"pp": [["embed*", "blocks.[0-1].*"], ["blocks.[2-3].*", "head*"]]}),
        dict(schedule=dt.OneFOneB(microbatches=2)),
    ),
    "dp2 delay": Case(
        dt.Mesh(dp=2), {}, dict(zero={"dp": 1}), dict(inputs=dict(dp=dt.Row()), delay=1)
    ),
    "dp2 zero3": Case(dt.Mesh(dp=2), {}, dict(zero={"dp": 3}), dict(inputs=dict(dp=dt.Row()))),
}


def training(case: Case) -> tuple[dt.ParallelModule, Any, dt.TrainStep]:
    torch.manual_seed(0)
    model = dt.parallelize(Net(), case.mesh, dict(case.placements), **case.options)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizers = [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(others, 0.05, momentum=0.9)]
    step = dt.train_step(model, loss_fn, optimizers, clip_grad_norm=1.0, **case.step)
    return model, optimizers, step


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 64, (4, 9), generator=drawn)
    return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`steps_per_fault`: the distance between faults; `ahead`: how many runs follow the first run
    of a step."""

    meshes: tuple[dt.Mesh, ...]
    make: Callable[[], Body]
    kinds: tuple[str, ...] = KINDS
    steps_per_fault: int = 4
    ahead: int = 0

    @property
    def ranks(self) -> int:
        return sum(mesh.size for mesh in self.meshes)


def _trains(case: Case) -> Callable[[], Body]:
    def make() -> Body:
        model, optimizer, step = training(case)

        def body(each: Step, steps: int) -> Result:
            losses = [each(n, lambda n=n: float(step(*batch(n)))) for n in range(steps)]
            return Result(steps=losses, state=dt.gather_state_dict(model, optimizer))

        return body

    return make


PROMPTS = [[5, 3, 9], [7], [11, 12, 13, 14, 15]]


def _generates(where: str) -> Callable[[], Body]:
    """Generate greedily and by sampling."""

    def make() -> Body:
        gen = dt.generator(placed("llama", where), slots=2, length=48, buckets=(8,), ahead=1)
        how: dict[str, Any] = dict(max_new_tokens=12, temperature=[0, 1.0, 0], seed=3)

        def body(each: Step, steps: int) -> Result:
            return Result(steps=[each(n, lambda: gen(PROMPTS, **how)) for n in range(steps)])

        return body

    return make


TRAIN, PLAY = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
TEXTS, NEW, SAMPLES = 8, 4, 4


def _reinforces(staleness: int) -> Callable[[], Body]:
    """The model and loss of examples/rl at a smaller size; the controller computes the score."""

    def make() -> Body:
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rl"))
        try:
            import counting
        finally:
            sys.path.pop(0)
        torch.manual_seed(0)
        net = counting.GPT(vocab=12, context=16, width=32, heads=4, layers=1)
        policy = dt.parallelize(net, TRAIN, {}, zero={"dp": 3})
        actor = dt.replica(policy, PLAY, counting.HEADS)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1.5e-3)
        step = dt.train_step(policy, counting.loss_fn, optimizer, inputs=dict(dp=dt.Row()))

        def score(prompt: list[int], tokens: list[int]) -> float:
            return sum((prompt[-1] + 1 + i) % 12 == t for i, t in enumerate(tokens)) / NEW

        def body(each: Step, steps: int) -> Result:
            dt.sync(policy, actor)
            batches = dt.rollouts(
                actor,
                itertools.cycle([[n, n + 1] for n in range(11)]),
                score,
                batch_size=TEXTS,
                samples=SAMPLES,
                staleness=staleness,
                max_new_tokens=NEW,
                length=16,
            )

            def one() -> Any:
                drawn = next(batches)
                of = drawn.rewards.view(-1, SAMPLES)
                advantages = (of - of.mean(1, keepdim=True)).view(-1, 1)
                loss = float(step(drawn.tokens, drawn.generated, drawn.logprobs, advantages))
                dt.sync(policy, actor)
                assert drawn.staleness <= staleness
                return None if staleness else (drawn.tokens, drawn.logprobs, drawn.rewards, loss)

            found = [each(n, one) for n in range(steps)]
            state = dt.gather_state_dict(policy, optimizer)
            return Result(steps=found, state=None if staleness else state)

        return body

    return make


_REPLACED = tuple(kind for kind in KINDS if kind != "exception")
"""An exception ends a generator of batches, as it would without faults."""

SCENARIOS: Mapping[str, Scenario] = {
    **{
        name: Scenario(meshes=(case.mesh,), make=_trains(case), kinds=(*KINDS, LATE))
        for name, case in CASES.items()
    },
    "texts tp2": Scenario(
        meshes=(dt.Mesh(tp=2),), make=_generates("tp2"), steps_per_fault=2, ahead=12
    ),
    "texts pp2": Scenario(
        meshes=(dt.Mesh(pp=2),), make=_generates("pp2"), steps_per_fault=2, ahead=12
    ),
    "rl": Scenario(
        meshes=(TRAIN, PLAY),
        make=_reinforces(0),
        kinds=_REPLACED,
        steps_per_fault=2,
        ahead=6,
    ),
    "rl, stale": Scenario(
        meshes=(TRAIN, PLAY),
        make=_reinforces(1),
        kinds=_REPLACED,
        steps_per_fault=2,
        ahead=6,
    ),
}
