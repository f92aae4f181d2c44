"""Layers that change between steps behave as in plain torch: the step trains the optimizer's
parameters and computes with the module's current layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.errors import PlanningError
from tests.api.changing import (
    PLACES,
    REFUSED,
    WAYS,
    WIDTH,
    Adapter,
    Block,
    Place,
    Placed,
    Plain,
    Way,
    adamw,
    batch,
    differences,
    parameter,
)

places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
EACH_STEP, AT_THE_END = "each step", "at the end"


def cases() -> Iterator[Any]:
    """Return each way at two placements, with both times of reading; the others are marked as
    sweep."""
    for number, (name, way) in enumerate(WAYS.items()):
        for turn, place in enumerate(PLACES):
            reads = AT_THE_END if (number + turn) % len(PLACES) == 1 else EACH_STEP
            marks = [pytest.mark.sweep] if (number + turn) % len(PLACES) == 2 else []
            if place not in way.refused:
                yield pytest.param(name, place, reads, marks=marks)


def both(way: Way, place: Place) -> tuple[Plain, Placed]:
    return Plain(way.net()), Placed(way.net(), place)


def still(of: Any) -> Any:
    """A way without a change: a step before and a step after what the test does itself."""
    del of
    yield


STILL = Way(change=still)


def take(number: int, *all_of: Plain | Placed) -> None:
    for each in all_of:
        each.take(number)


@pytest.mark.default("a layer left out by forward, later back-pp2-at the end")
@pytest.mark.parametrize(("name", "where", "reads"), list(cases()))
def test_changed_layers_match_torch_after_each_step(name: str, where: str, reads: str) -> None:
    """Compares losses, norms, model and optimizer, either after every step or once while all steps
    are pending."""
    way, place = WAYS[name], PLACES[where]
    plain, placed = both(way, place)
    with dt.launch(place.mesh):
        for number in way.steps(plain, placed):
            take(number, plain, placed)
            if reads == EACH_STEP:
                assert differences(placed, plain) == []
        assert differences(placed, plain) == []
    assert differences(placed, plain) == []


@pytest.mark.default("a parameter exchanged with its state")
@pytest.mark.parametrize(
    "name",
    [
        "... by another shape, both neighbours",
        "a layer wrapped, its base frozen",
        "a layer moved to a submodule",
        "a layer deleted, later back",
        "head and embedding tied, later untied",
        "a parameter exchanged with its state",
    ],
)
def test_layers_changed_between_launches_match_torch(name: str) -> None:
    way, place = WAYS[name], PLACES["tp2"]
    plain, placed = both(way, place)
    for number in way.steps(plain, placed):
        plain.take(number)
        with dt.launch(place.mesh):
            placed.take(number)
        assert differences(placed, plain) == []


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.default("prune-pp2")
@places
@pytest.mark.parametrize("name", REFUSED)
def test_tensor_attribute_in_place_of_parameter_is_refused_without_loss(
    name: str, place: Place
) -> None:
    plain, placed = both(STILL, place)
    with dt.launch(place.mesh):
        take(0, plain, placed)
        undo = REFUSED[name](placed.net)
        with pytest.raises(PlanningError, match=r"blocks\.1\.up.*weight"):
            placed.take(1)
        undo()
        REFUSED[name](plain.net)()
        for number in (1, 2):
            take(number, plain, placed)
            assert differences(placed, plain) == []


@pytest.mark.default("tp2")
@places
def test_optimizer_parameter_outside_model_raises_planning_error(place: Place) -> None:
    plain, placed = both(STILL, place)
    stranger = parameter(torch.ones(3, 5))
    with dt.launch(place.mesh):
        take(0, plain, placed)
        placed.optimizer.add_param_group({"params": [stranger]})
        with pytest.raises(PlanningError, match=r"\[3, 5\] that is not one of the model's"):
            placed.take(1)
        placed.optimizer.param_groups.pop()
        take(1, plain, placed)
        assert differences(placed, plain) == []


def test_swapping_layers_of_two_stages_is_refused_without_loss() -> None:
    """A pipeline runs its stages in one order, and each parameter stays in its stage."""
    way = WAYS["... of two stages"]
    plain, placed = both(way, PLACES["pp2"])
    with dt.launch(placed.place.mesh):
        take(0, plain, placed)
        list(way.change(placed))
        with pytest.raises(PlanningError, match=way.refused["pp2"]):
            placed.take(1)
        list(way.change(placed))
        take(1, plain, placed)
        assert differences(placed, plain) == []


def test_new_parameter_outside_all_stages_is_refused_by_name() -> None:
    """Training continues with a new parameter whose name a stage's glob matches."""
    plain, placed = both(STILL, PLACES["pp2"])
    with dt.launch(placed.place.mesh):
        take(0, plain, placed)
        del placed.net.gain
        placed.net.factor = parameter(torch.ones(WIDTH, dtype=torch.float64) / 2)
        with pytest.raises(PlanningError, match="factor"):
            placed.take(1)
        del placed.net.factor
        for each in (plain, placed):
            each.net.gain = parameter(torch.ones(WIDTH, dtype=torch.float64) / 2)
            each.take(1)
        assert differences(placed, plain) == []


# -- where it is placed ----------------------------------------------------------------------------


def specs(placed: Placed) -> dict[str, str]:
    """Return the spec of each stored parameter by its current name."""
    return {i.label: str(i.held) for i in placed.step.plan(*batch(0)).inputs}


def test_moved_layer_keeps_placement_and_new_layer_is_placed_by_name() -> None:
    """A glob that no longer matches any parameter raises no error."""
    placed = Placed(STILL.net(), PLACES["tp2"])
    with dt.launch(placed.place.mesh):
        placed.take(0)
        net = placed.net
        net.tail = torch.nn.Module()
        net.tail.head = net.head
        del net.head  # the pattern "head.weight" has no match
        net.blocks[1].up = Adapter(net.blocks[1].up)
        net.blocks.append(Block())
        net.blocks[0].down = Adapter(net.blocks[0].down)  # whose columns are split
        placed.take(1)
        found = specs(placed)
    assert found["tail.head.weight"] == "f64[12@tp,8]"
    assert found["blocks.1.up.base.weight"] == "f64[16@tp,8]"
    assert found["blocks.3.up.weight"] == "f64[16@tp,8]"
    assert found["blocks.3.down.weight"] == "f64[8,16@tp]"
    assert found["blocks.0.down.base.weight"] == "f64[8,16@tp]"
    assert "head.weight" not in found and "blocks.1.up.weight" not in found


def test_new_layer_is_sharded_by_zero3_like_other_layers() -> None:
    placed = Placed(STILL.net(), PLACES["dp2, ZeRO-3"])
    with dt.launch(placed.place.mesh):
        placed.take(0)
        placed.net.blocks.append(Block())
        placed.take(1)
        assert specs(placed)["blocks.3.up.weight"] == "f64[16@dp,8]"


@pytest.mark.default("a layer appended")
@pytest.mark.parametrize("name", ["a layer appended", "a layer wrapped, its base frozen"])
def test_new_parameter_joins_stage_of_its_module_with_auto_stages(name: str) -> None:
    """Existing parameters keep their stages."""
    way, place = WAYS[name], Place(mesh=dt.Mesh(pp=2), options=dict(stages="auto"))
    plain, placed = both(way, place)
    with dt.launch(place.mesh):
        for number in way.steps(plain, placed):
            take(number, plain, placed)
            stage = {i.label: i.stages for i in placed.step.plan(*batch(0)).inputs}
            if number == 0:
                before = stage
        assert differences(placed, plain) == []
    if name == "a layer appended":
        assert stage["blocks.3.up.weight"] == before["blocks.2.down.weight"]
        assert {n: s for n, s in stage.items() if n in before} == before
    else:
        assert stage["blocks.1.up.a"] == before["blocks.1.up.weight"]
        assert stage["blocks.1.up.base.weight"] == before["blocks.1.up.weight"]


def test_gradients_use_current_parameter_names() -> None:
    plain, placed = both(WAYS["a layer moved to a submodule"], PLACES["tp2"])
    with dt.launch(placed.place.mesh):
        for number in WAYS["a layer moved to a submodule"].steps(plain, placed):
            take(number, plain, placed)
        found = placed.step.gradients(*batch(9))
    assert {n for n, p in plain.net.named_parameters()} == set(found)


def test_old_and_new_step_of_changed_model_alternate_as_in_torch() -> None:
    """Each step has its own optimizer."""
    plain, placed = both(STILL, PLACES["tp2"])
    with dt.launch(placed.place.mesh):
        take(0, plain, placed)
        old, old_step, old_plain = placed.optimizer, placed.step, plain.optimizer
        for each in (plain, placed):
            torch.manual_seed(5)
            each.net.blocks[1] = Block()
            each.train_with(adamw(each.net))
        for number in range(1, 5):
            take(number, plain, placed)
            plain.optimizer, old_plain = old_plain, plain.optimizer
            placed.optimizer, old = old, placed.optimizer
            placed.step, old_step = old_step, placed.step
            assert differences(placed, plain) == []


# -- casts between calls ---------------------------------------------------------------------------

CASTS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
PLACED = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}


def of_two() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.up, net.norm, net.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    return net, copy.deepcopy(net)


def test_module_cast_between_compiled_calls_gives_results_in_new_dtype() -> None:
    net, plain = of_two()
    model = dt.parallelize(net, dt.Mesh(tp=2), PLACED)
    f = dt.compile(lambda m, x: m(x), model.mesh)
    with dt.launch(model.mesh):
        for dtype in CASTS:
            net.to(dtype), plain.to(dtype)
            x = torch.randn(6, 4, dtype=dtype)
            found, expected = f(model, x), plain(x)
            assert found.dtype == dtype
            torch.testing.assert_close(found.full_tensor(), expected, rtol=0.02, atol=0.02)


def test_module_cast_between_steps_matches_torch() -> None:
    """Each cast rounds the weights, so a stale value would be visible."""
    net, plain = of_two()
    model = dt.parallelize(net, dt.Mesh(tp=2), PLACED)
    opt, plain_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain))
    step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt)
    with dt.launch(model.mesh):
        for dtype in CASTS * 2:
            net.to(dtype), plain.to(dtype)
            for _ in range(2):
                x = torch.randn(6, 4, dtype=dtype)
                loss = plain(x).square().mean()
                plain_opt.zero_grad()
                loss.backward()
                plain_opt.step()
                assert float(step(x)) == pytest.approx(loss.item(), rel=0.02)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=0.02, atol=0.005)


def test_casting_module_with_optimizer_state_raises_and_new_step_works() -> None:
    """torch.optim.AdamW raises too in its next step; a new optimizer works in both."""
    net, _ = of_two()
    model = dt.parallelize(net, dt.Mesh(tp=2), PLACED)

    def make() -> dt.TrainStep:
        opt = torch.optim.AdamW(net.parameters(), lr=0.1)
        return dt.train_step(model, lambda m, x: m(x).square().mean(), opt)

    step = make()
    with dt.launch(model.mesh):
        float(step(torch.randn(6, 4)))
        net.double()
        x = torch.randn(6, 4, dtype=torch.float64)
        with pytest.raises(PlanningError, match=r"cast to f64 after AdamW had made its exp_avg"):
            step(x)
        losses = [float(step(x)) for step in [make()] for _ in range(9)]
    assert losses[-1] < losses[0] and net.up.weight.dtype == torch.float64
