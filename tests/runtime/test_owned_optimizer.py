"""Tests the optimizer of whole parameters on one rank, and the packing of its state."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor.runtime.optimizer.optimizer_kind import OptimizerKind, plain_attributes
from dtensor.runtime.optimizer.owned.owned_optimizer import OwnedOptimizer
from dtensor.runtime.optimizer.owned.packed_state import PackedState, pack, unpack
from dtensor.runtime.optimizer.shard_optimizer import MASTER, Updated, absent, hyperparameters
from tests.training import assert_same_bits

SHAPES = {"w": (6, 4), "v": (3, 5), "u": (4, 4)}


class Nested(torch.optim.Optimizer):
    """An optimizer whose state is nested, and whose tensors are replaced or views of others."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    sums = torch.zeros(2, *p.shape, dtype=p.dtype)
                    state |= {"step": 0, "sums": sums, "first": sums[0], "past": deque(maxlen=2)}
                    state["bases"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
                state["step"] += 1
                state["past"].append(p.grad)
                state["first"].mul_(0.9).add_(p.grad)
                left, right = state["bases"]
                p.sub_(left @ state["sums"].sum(0) @ right + state["past"][0], alpha=group["lr"])
                bases = (p @ p.T, p.T @ p)
                state["bases"] = [torch.linalg.qr(basis)[0] for basis in bases]  # column-major
                p.grad.mul_(0.5)  # a step may write to the gradient


CLASSES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.1, weight_decay=0.1),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "Nested": Nested,
}


def stepped(
    optimizer: torch.optim.Optimizer,
    owned: OwnedOptimizer,
    values: dict[str, Tensor],
    states: dict[str, Tensor],
    gradients: Mapping[str, Tensor],
    clip: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the values and states after one step on a rank that owns ``gradients``."""
    updated = Updated((tuple(SHAPES),), tuple(gradients), ())
    settings = *hyperparameters(optimizer), plain_attributes(optimizer)
    new, blobs = owned.compute(updated, values, settings, gradients, states, clip)
    return {**values, **new}, {**states, **blobs}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("masters", [False, True])
def test_torch_bits_and_torch_state(name: str, masters: bool) -> None:
    """Values and states are torch's bits, and a step changes nothing that it was given."""
    torch.manual_seed(0)
    parameters = {k: torch.nn.Parameter(torch.randn(shape)) for k, shape in SHAPES.items()}
    if masters:
        for p in parameters.values():
            p.data = p.data.bfloat16().float()
    optimizer = CLASSES[name](list(parameters.values()))
    owned = copy.deepcopy(OwnedOptimizer(OptimizerKind.of(optimizer), masters))
    dtype = torch.bfloat16 if masters else torch.float32
    values = {k: p.detach().to(dtype) for k, p in parameters.items()}
    states = dict.fromkeys(SHAPES, absent("cpu"))
    for number in range(5):
        with_gradients = ["w", "u"] if number == 3 else list(SHAPES)
        gradients = {k: torch.randn(SHAPES[k]) for k in with_gradients}
        given = copy.deepcopy((values, states, gradients))
        new = stepped(optimizer, owned, values, states, gradients)
        assert_same_bits((values, states, gradients), given)
        values, states = new
        for k, p in parameters.items():
            p.grad = gradients[k].clone() if k in gradients else None
        optimizer.step()
        assert_same_bits(values, {k: p.detach().to(dtype) for k, p in parameters.items()})
    for k, p in parameters.items():
        state = unpack(states[k])
        if masters:
            assert_same_bits(state.pop(MASTER), p.detach())
        assert_same_bits(state, dict(optimizer.state[p]))


def test_masters_follow_the_user() -> None:
    """A value that the user has changed replaces its master; clipping divides the gradient."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Muon([parameter], lr=0.0, weight_decay=0.0)
    owned = OwnedOptimizer(OptimizerKind.of(optimizer), masters=True)
    values = {"w": torch.ones(4, 4, dtype=torch.bfloat16)}
    states, gradients = {"w": absent("cpu")}, {"w": torch.full((4, 4), 2.0)}
    _, states = stepped(optimizer, owned, values, states, gradients, torch.tensor(2.0))
    assert unpack(states["w"])["momentum_buffer"][0, 0] == pytest.approx(0.05)
    values["w"][0] = 3
    values, states = stepped(optimizer, owned, values, states, gradients)
    assert unpack(states["w"])[MASTER][0, 0] == values["w"][0, 0] == 3


class Sharing(Nested):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["anchor"] = p.data


class Counting(Nested):
    def step(self, closure: Any = None) -> None:
        self.state["k"] = torch.ones(2)  # type: ignore[index]


class Raising(Nested):
    def step(self, closure: Any = None) -> None:
        torch.linalg.eigh(self.param_groups[0]["params"][0].detach() * torch.nan)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Sharing, TypeError, "shares memory with the parameter"),
        (Counting, TypeError, "keeps a state that is of no parameter under 'k', with more"),
        (Raising, RuntimeError, "linalg.eigh"),
    ],
)
def test_errors_name_the_parameters(
    kind: type[torch.optim.Optimizer], error: type[Exception], text: str
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(4, 4))])  # type: ignore[call-arg]
    owned = OwnedOptimizer(OptimizerKind.of(optimizer))
    w = {"w": torch.ones(4, 4)}
    with pytest.raises(error, match=text) as raised:
        stepped(optimizer, owned, w, {"w": absent("cpu")}, w)
    assert raised.value.__notes__ == [f"in the update of w by {kind.__name__}"]


def states() -> dict[str, Any]:
    base = torch.arange(10.0)
    return {
        "step": 3,
        "number": torch.tensor(2.0),
        "Q": [torch.linalg.qr(torch.ones(5, 5))[0], None, torch.zeros(0, 3)],
        "base": base,
        "view": base[2:5],
        "bytes": base.view(torch.uint8)[4:9],
        "expanded": torch.ones(1).expand(4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nested": {"a": (1, torch.arange(3)), "b": deque([base], 2)},
    }


def test_pack_round_trip() -> None:
    state = states()
    unpacked = unpack(pack(state, on_host=("number",))[0])
    assert_same_bits(unpacked, state)
    assert unpacked["Q"][0].stride() == state["Q"][0].stride() == (1, 5)
    assert unpacked["nested"]["b"][0] is unpacked["base"]
    unpacked["base"][3] = 100
    assert unpacked["view"][1] == 100


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        (lambda s: s["Q"][0].mul_(2), True),
        (lambda s: s.update(step=2**60, number=torch.tensor(5.0)), True),
        (lambda s: s["half"].set_(torch.zeros(3, dtype=torch.bfloat16)), True),
        (lambda s: s["Q"].append(torch.ones(3)), False),
        (lambda s: s.update(base=s["view"], view=s["base"]), False),
        (lambda s: s.update(Q=[s["Q"][0].T, None, s["Q"][2]]), False),
        (lambda s: s.update(step="a longer value " * 20), False),
        (lambda s: s.update(half=s["base"][8:]), False),
    ],
)
def test_repack(change: Callable[[dict[str, Any]], object], in_place: bool) -> None:
    """A changed state is packed in place if the forms of its tensors are unchanged."""
    packed = PackedState.of(pack(states())[0])
    change(packed.state)
    blob, layout = packed.repack(packed.state)
    assert (blob is packed.blob) == in_place
    assert_same_bits(unpack(blob), packed.state)
    assert_same_bits(PackedState.of(blob, layout).state, packed.state)


@pytest.mark.parametrize(
    "value", [lambda: 1, torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
)
def test_what_cannot_be_packed(value: object) -> None:
    with pytest.raises(TypeError, match="the state of a parameter"):
        pack({"x": [value]})
