"""Messages that begin early and are waited for late: the same bits in less time, little memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Backend, Call, Collective, Handle, Wait
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.lower import overlap
from dtensor.sharding.plan import steps
from tests.models import loss_fn
from tests.training import SIX, adamw, assert_same_bits, batches, make_model

SLOW = dt.Topology(flops=1e10, memory_bandwidth=1e10, latency=1e-4, bandwidth=1e8, op_latency=1e-6)
"""A cluster on which each of these messages has something to hide behind."""


def step_of(
    name: str, zero: Mapping[str, int] | None = None, schedule: dt.Schedule | None = None
) -> dt.TrainStep:
    placed, module = SIX[name], make_model()
    model = dt.parallelize(module, placed.mesh, placed.pins, stages=placed.stages, zero=zero)
    return dt.train_step(
        model,
        loss_fn,
        adamw(module),
        inputs=placed.inputs,
        schedule=schedule or dt.OneFOneB(microbatches=2),
        topology=SLOW,
        clip_grad_norm=1.0,
    )


def trained(step: dt.TrainStep, backend: Backend = "inprocess") -> tuple[list[float], dict, Handle]:
    mesh = step.model.mesh
    with dt.launch(mesh, backend):
        losses = [float(step(*one)) for one in batches(3)]
        state = dt.gather_state_dict(step.model, step.optimizer)
        [loaded] = programs_of(session_for(mesh))
        return losses, state, loaded.handle


def in_flight(handle: Handle, rank: int) -> tuple[int, int]:
    """How many collectives have calls between their start and their wait, and the most bytes that
    such collectives make at once."""
    instructions = handle.program.ranks[rank].instructions
    waited = {s: at for at, starts in starts_of_waits(instructions).items() for s in starts}
    count, most, now, ends = 0, 0, 0, dict[int, int]()
    for at, item in enumerate(instructions):
        now -= ends.pop(at, 0)
        if isinstance(item, Collective):
            inside = instructions[at : waited[at]]
            if any(isinstance(i, Call) for i in inside):
                nbytes = sum(buffer.nbytes for buffer in item.out_buffers)
                count, now = count + 1, now + nbytes
                ends[waited[at]] = ends.get(waited[at], 0) + nbytes
        most = max(most, now)
    return count, most


CASES = [
    ("tp2", None, None),
    ("dp2_tp2", {"dp": 2}, None),
    ("dp2_tp2", {"dp": 3}, None),
    ("tp2_pp2", None, None),
    ("tp2_pp2", None, dt.ZBH1(microbatches=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zero", "schedule"), CASES)
def test_the_same_bits_in_less_time(
    name: str,
    zero: Mapping[str, int] | None,
    schedule: dt.Schedule | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(name, zero, schedule)
    losses, state, handle = trained(step)
    predicted = dt.simulate(step)
    monkeypatch.setattr(overlap, "CUT_SECONDS", float("inf"))
    plain = step_of(name, zero, schedule)
    plain_losses, plain_state, plain_handle = trained(plain)
    assert losses == plain_losses
    assert_same_bits(state, plain_state)
    without = dt.simulate(plain)
    if schedule is None:
        assert predicted.seconds < without.seconds
        assert predicted.hidden(0) > without.hidden(0)
        assert in_flight(handle, 0)[0] > in_flight(plain_handle, 0)[0]
    else:  # a half of a backward that has the message has nothing else to do
        assert handle.program.text() == plain_handle.program.text()
    for rank, (held, before) in enumerate(
        zip(handle.report.peak_bytes, plain_handle.report.peak_bytes, strict=True)
    ):
        assert held <= before + in_flight(handle, rank)[1]


def test_a_gradients_sum_is_hidden_behind_its_weights_gradient() -> None:
    """dgrad, start, wgrad, wait: in each layer that sums over tp in the backward."""
    _, _, handle = trained(step_of("tp2"))
    functions = dict(handle.program.functions)
    instructions = handle.program.ranks[0].instructions
    waits = starts_of_waits(instructions)
    hidden = 0
    for at, starts in waits.items():
        for start in starts:
            item = instructions[start]
            if "B0" in str(item.label) and "all_reduce mm_" in str(item.label):
                inside = [i for i in instructions[start:at] if isinstance(i, Call)]
                text = "".join(functions[i.fn].source for i in inside)
                assert "aten_mm_default(" in text, item.label
                hidden += 1
    assert hidden == 4


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, {"dp": 1}])
def test_gradients_are_reduced_while_the_backward_goes_on(
    zero: Mapping[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several buckets: each begins as soon as its last gradient is made, one at a time."""
    monkeypatch.setattr(steps, "BUCKET_BYTES", 8192)
    one = dt.GPipe(microbatches=1)
    step = step_of("dp2", zero, one)
    losses, state, handle = trained(step)
    instructions = handle.program.ranks[0].instructions
    waits = starts_of_waits(instructions)
    reductions = [
        (start, at)
        for at, starts in waits.items()
        for start in starts
        if "gradients" in str(instructions[start].label)
        and "gather" not in str(instructions[start].label)
    ]
    assert len(reductions) > 3
    early = [pair for pair in reductions if str(instructions[pair[0]].label).startswith("B0")]
    assert len(early) >= len(reductions) - 2
    assert sum(any(isinstance(i, Call) for i in instructions[a:b]) for a, b in early) > 2
    for (_, end), (start, _) in itertools.pairwise(sorted(early)):
        assert end < start
    predicted = dt.simulate(step)
    monkeypatch.setattr(overlap, "CUT_SECONDS", float("inf"))
    plain = step_of("dp2", zero, one)
    plain_losses, plain_state, plain_handle = trained(plain)
    assert losses == plain_losses
    assert_same_bits(state, plain_state)
    assert predicted.seconds < dt.simulate(plain).seconds
    for rank in range(2):
        held, before = (h.report.peak_bytes[rank] for h in (handle, plain_handle))
        assert held <= before + in_flight(handle, rank)[1]


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_the_same_bits() -> None:
    here, there = step_of("dp2_tp2", {"dp": 2}), step_of("dp2_tp2", {"dp": 2})
    losses, state, _ = trained(here)
    ray_losses, ray_state, _ = trained(there, "ray")
    assert losses == ray_losses
    assert_same_bits(state, ray_state)


def test_where_the_price_says_no_nothing_moves() -> None:
    """On an H100 a layer of width 16 computes for less than a cut costs."""
    placed, module = SIX["tp2"], make_model()
    model = dt.parallelize(module, placed.mesh, placed.pins)
    step = dt.train_step(model, loss_fn, adamw(module))
    _, _, handle = trained(step)
    instructions = handle.program.ranks[0].instructions
    for at, starts in starts_of_waits(instructions).items():
        assert isinstance(instructions[at], Wait)
        for start in starts:
            assert not any(isinstance(i, Call) for i in instructions[start:at])
