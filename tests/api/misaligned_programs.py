"""Random modules of ops that divide or merge dims, with random placements of their parameters.

    case = Case.of(7)
    print(case)        # mesh(dp=2, tp=3); 0.weight: tp=Shard(0, unit=2); linear 8 12, chunk 3, ...
    case.check()       # three training steps match one device

The ops are slices, splits, pads, group norms, views, rolls and flips between linear layers, so most
placements do not line up with some op.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.spec import make_spec
from tests.training import sgd, train_torch

Step = Callable[["Random", Tensor], Tensor]
ROWS, FEATURES, NUM_OPS, NUM_STEPS = (12, 13, 24), (8, 12, 18), 7, 3
MESHES = (dict(tp=2), dict(tp=3), dict(tp=4), dict(dp=2, tp=2), dict(dp=2, tp=3), dict(tp=2, dp=2))


class Random(nn.Module):
    """A random chain of ops on a matrix. ``names`` describes them; ``shape`` is that of the current
    result."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(1000))
        self.draw = draw
        self.shape: tuple[int, int] = (draw.choice(ROWS), draw.choice(FEATURES))
        self.x = torch.randn(self.shape)
        self.weights = nn.ParameterList()
        self.names: list[str] = []
        self.steps: list[Step] = []
        self._add("linear")
        kinds = list(KINDS)
        while len(self.names) < NUM_OPS:
            self._add(draw.choice(kinds))
        self._add("linear")

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(self, x)
        return x

    def weight(self, *shape: int) -> int:
        """Add a parameter and return its number."""
        self.weights.append(nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])))
        return len(self.weights) - 1

    def _add(self, kind: str) -> None:
        step = KINDS[kind](self, *self.shape)
        if step is None:
            return
        rows, features = step(self, torch.zeros(self.shape)).shape
        if rows * features > 1000 or min(rows, features) < 3:
            return
        self.shape = rows, features
        self.names.append(f"{kind} {rows}x{features}")
        self.steps.append(step)


def _divisor(draw: random.Random, number: int) -> int | None:
    divisors = [n for n in range(2, number) if number % n == 0]
    return draw.choice(divisors) if divisors else None


def _linear(m: Random, rows: int, features: int) -> Step:
    w, b = m.weight(size := m.draw.randrange(6, 17), features), m.weight(size)
    return lambda m, x: F.linear(x, m.weights[w], m.weights[b]).tanh()


def _linear_of_a_slice(m: Random, rows: int, features: int) -> Step:
    """A linear layer that uses the rows of its parameter from row 2 on."""
    w = m.weight(m.draw.randrange(8, 17), features)
    return lambda m, x: F.linear(x, m.weights[w][2:])


def _slice(m: Random, rows: int, features: int) -> Step:
    dim, size = m.draw.choice([(0, rows), (1, features)])
    lo, hi, by = m.draw.randrange(0, 3), size - m.draw.randrange(0, 3), m.draw.choice([1, 1, 2])
    at = (slice(None),) * dim + (slice(lo, hi, by),)
    return lambda m, x: x[at]


def _chunk(m: Random, rows: int, features: int) -> Step:
    dim, num = m.draw.randrange(2), m.draw.choice([2, 3])
    return lambda m, x: torch.cat([p * (i + 1) for i, p in enumerate(x.chunk(num, dim))][::-1], dim)


def _split(m: Random, rows: int, features: int) -> Step:
    first = m.draw.randrange(1, features)

    def step(m: Random, x: Tensor) -> Tensor:
        a, b = x.split([first, features - first], 1)
        return torch.cat([a.sigmoid(), b * a.mean(1, keepdim=True)], 1)

    return step


def _pad(m: Random, rows: int, features: int) -> Step:
    pad = [m.draw.randrange(0, 3) for _ in range(4)]
    return lambda m, x: F.pad(x, pad, value=0.5)


def _group_norm(m: Random, rows: int, features: int) -> Step | None:
    groups = _divisor(m.draw, features)
    if groups is None:
        return None
    w, b = m.weight(features), m.weight(features)
    return lambda m, x: F.group_norm(x, groups, m.weights[w], m.weights[b])


def _layer_norm(m: Random, rows: int, features: int) -> Step:
    w = m.weight(features)
    return lambda m, x: F.layer_norm(x, (features,), m.weights[w])


def _heads(m: Random, rows: int, features: int) -> Step | None:
    heads = _divisor(m.draw, features)
    if heads is None:
        return None
    return lambda m, x: x.view(rows, heads, -1).softmax(-1).transpose(1, 2).reshape(rows, features)


def _fold(m: Random, rows: int, features: int) -> Step | None:
    """A reshape to rows of another length."""
    parts = _divisor(m.draw, features)
    return None if parts is None else lambda m, x: x.reshape(rows * parts, features // parts)


def _unfold(m: Random, rows: int, features: int) -> Step | None:
    parts = _divisor(m.draw, rows)
    return None if parts is None else lambda m, x: x.reshape(rows // parts, features * parts)


def _batched(m: Random, rows: int, features: int) -> Step | None:
    """A batched product: each block of rows is multiplied by its own matrix."""
    blocks = _divisor(m.draw, rows)
    if blocks is None:
        return None
    w = m.weight(blocks, features, m.draw.randrange(3, 9))
    return lambda m, x: torch.bmm(x.view(blocks, -1, features), m.weights[w]).flatten(0, 1)


def _roll(m: Random, rows: int, features: int) -> Step:
    dim, shift = m.draw.randrange(2), m.draw.randrange(1, 4)
    return lambda m, x: x.roll(shift, dim)


def _flip(m: Random, rows: int, features: int) -> Step:
    dim = m.draw.randrange(2)
    return lambda m, x: x.flip(dim) + x


def _cumsum(m: Random, rows: int, features: int) -> Step:
    dim = m.draw.randrange(2)
    return lambda m, x: x.cumsum(dim) / 4


def _transpose(m: Random, rows: int, features: int) -> Step:
    return lambda m, x: x.t().relu()


def _viewed_parameter(m: Random, rows: int, features: int) -> Step | None:
    """An added parameter that is viewed as another shape first."""
    parts = _divisor(m.draw, features)
    if parts is None:
        return None
    w = m.weight(parts, features // parts)
    return lambda m, x: x * m.weights[w].reshape(features)


KINDS: dict[str, Callable[[Random, int, int], Step | None]] = {
    "linear": _linear,
    "linear_of_a_slice": _linear_of_a_slice,
    "slice": _slice,
    "chunk": _chunk,
    "split": _split,
    "pad": _pad,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "heads": _heads,
    "fold": _fold,
    "unfold": _unfold,
    "batched": _batched,
    "roll": _roll,
    "flip": _flip,
    "cumsum": _cumsum,
    "transpose": _transpose,
    "viewed_parameter": _viewed_parameter,
}


def random_shard(draw: random.Random, shape: tuple[int, ...], num: int) -> dt.Shard:
    """Return a random placement that fits the shape and an axis of ``num`` ranks: any dim, equal or
    unequal blocks, any unit, any sizes."""
    dim = draw.randrange(len(shape))
    size = shape[dim]
    if draw.random() < 0.3:
        ends = [0, *sorted(draw.randint(0, size) for _ in range(num - 1)), size]
        return dt.Shard(dim, sizes=tuple(b - a for a, b in itertools.pairwise(ends)))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    first = draw.randrange(1, size)
    blocks = draw.choice([1, draw.choice(divisors), (first, size - first)])
    least = math.gcd(*blocks) if isinstance(blocks, tuple) else size // blocks
    unit = draw.choice([n for n in divisors if least % n == 0]) if draw.random() < 0.4 else 1
    return dt.Shard(dim, blocks, unit)


@dataclass(frozen=True, kw_only=True)
class Case:
    mesh: dt.Mesh
    module: Random
    pins: Mapping[str, Mapping[str, dt.Shard]]
    inputs: Mapping[str, dt.Placement]

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        mesh = dt.Mesh(**draw.choice(MESHES))
        module = Random(draw)
        pins = {
            name: dict(tp=random_shard(draw, tuple(p.shape), mesh.axis_size("tp")))
            for name, p in module.named_parameters()
            if draw.random() < 0.6
        }
        inputs: dict[str, dt.Placement] = dict(dp=dt.Row()) if "dp" in mesh.axes else {}
        if draw.random() < 0.2:
            inputs["tp"] = dt.Shard(1)
        return cls(mesh=mesh, module=module, pins=pins, inputs=inputs)

    def __str__(self) -> str:
        pins = ", ".join(f"{name}: {stated}" for name, stated in self.pins.items())
        return f"{self.mesh}; {pins}; inputs {self.inputs}; {', '.join(self.module.names)}"

    def check(self) -> Plan:
        """Compare three steps with plain torch, and the stored shards with the stated
        placements."""
        expected = deepcopy(self.module)
        data = [(self.module.x + 0.1 * i,) for i in range(NUM_STEPS)]
        losses = train_torch(expected, sgd(expected), data, loss=_loss)
        model = dt.parallelize(self.module, self.mesh, self.pins)
        optimizer = sgd(self.module)
        step = dt.train_step(model, _loss, optimizer, inputs=self.inputs)
        plan = step.plan(*data[0])
        for item in plan.inputs:
            for axis, stated in self.pins.get(item.label, {}).items():
                wanted = make_spec(item.spec.shape, item.spec.dtype, self.mesh, {axis: stated})
                for spec in (item.held, item.state):
                    assert spec.placement(axis) == wanted.placement(axis), item.label
        with dt.launch(self.mesh):
            found = [float(step(*one)) for one in data]
            state: Mapping[str, Any] = dt.gather_state_dict(model, optimizer)["model"]
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        for name, value in expected.state_dict().items():
            atol = 1e-4 * float(value.abs().max())
            torch.testing.assert_close(state[name], value, rtol=0, atol=atol)
        return plan


def _loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()
