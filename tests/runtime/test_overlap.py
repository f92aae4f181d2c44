"""Tests overlap of messages with computation: the same bits in less time, with little extra
memory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Backend, Call, Collective, Handle
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.lower import overlap
from dtensor.sharding.plan import steps
from tests.training import TWO_STAGES, Placed, Run, assert_same_bits, batches

SLOW = dt.Topology(
    flops=1e10,
    memory_bandwidth=1e10,
    latency=1e-4,
    bandwidth=1e8,
    op_latency=1e-6,
    launch_latency=0.0,
)
"""A cluster on which each of these messages has something to hide behind."""


def trained(run: Run, backend: Backend = "inprocess") -> tuple[Any, Handle]:
    """Return losses and state after three steps, and the program."""
    with dt.launch(run.mesh, backend):
        found = run.losses(batches(3)), run.state()
        [loaded] = programs_of(session_for(run.mesh))
        return found, loaded.handle


def inside(handle: Handle, rank: int = 0) -> list[tuple[int, int, list[Call]]]:
    """Return, for each message, its start, its wait, and the calls between them."""
    instructions = handle.program.ranks[rank].instructions
    return [
        (start, at, [i for i in instructions[start:at] if isinstance(i, Call)])
        for at, starts in starts_of_waits(instructions).items()
        for start in starts
    ]


def most_held(handle: Handle, rank: int) -> int:
    """Return the maximum bytes that collectives with calls before their wait hold at once."""
    instructions = handle.program.ranks[rank].instructions
    changes: list[tuple[int, int]] = []
    for start, at, calls in inside(handle, rank):
        item = instructions[start]
        if calls and isinstance(item, Collective):
            nbytes = sum(buffer.nbytes for buffer in item.out_buffers)
            changes += [(at, -nbytes), (start, nbytes)]
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))


def compared(
    monkeypatch: pytest.MonkeyPatch, name: str | Placed, **stated: Any
) -> tuple[Handle, Handle]:
    """Return the programs of a run with and without overlap, after checking equal bits, little
    more memory, and less time if the programs differ."""
    run = Run.of(name, topology=SLOW, **stated)
    found, handle = trained(run)
    predicted = dt.simulate(run.step)
    monkeypatch.setattr(overlap, "CUT_SECONDS", float("inf"))
    plain = Run.of(name, topology=SLOW, **stated)
    expected, plain_handle = trained(plain)
    assert_same_bits(found, expected)
    if handle.program.text() != plain_handle.program.text():
        without = dt.simulate(plain.step)
        assert predicted.seconds < without.seconds
    for rank in range(run.mesh.size):
        held, limit = (h.report.peak_bytes[rank] for h in (handle, plain_handle))
        assert held <= limit + most_held(handle, rank)
    return handle, plain_handle


CASES: list[tuple[str, dict[str, Any]]] = [
    ("tp2", {}),
    ("dp2_tp2", dict(zero={"dp": 2})),
    ("dp2_tp2", dict(zero={"dp": 3})),
    ("tp2_pp2", {}),
    ("tp2_pp2", dict(schedule=dt.ZBH1(microbatches=2))),
]


@pytest.mark.default("tp2-stated0")
@pytest.mark.parametrize(("name", "stated"), CASES)
def test_overlapped_training_is_bitwise_equal_and_computes_during_messages(
    name: str, stated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, plain = compared(monkeypatch, name, **stated)
    if "schedule" in stated:  # half a backward with a message has no other work
        assert handle.program.text() == plain.program.text()
    else:
        count, before = (sum(bool(c) for _, _, c in inside(h)) for h in (handle, plain))
        assert count > before


def test_tp_gradient_all_reduce_overlaps_weight_gradient() -> None:
    """Order in each layer that reduces over tp in the backward: input gradient, start, weight
    gradient, wait."""
    _, handle = trained(Run.of("tp2", topology=SLOW))
    functions = dict(handle.program.functions)
    instructions = handle.program.ranks[0].instructions
    hidden = 0
    for start, _, calls in inside(handle):
        label = str(instructions[start].label)
        if "B0" in label and "all_reduce mm_" in label:
            text = "".join(functions[i.fn].source for i in calls)
            assert "aten_mm_default(" in text, label
            hidden += 1
    assert hidden == 4


PP2_DP2 = Placed(axes=dict(pp=2, dp=2), inputs=dict(dp=dt.Row()), stages=TWO_STAGES)
FOUR_STAGES = replace(
    PP2_DP2,
    stages={"pp": [["embed*", "positions*"], ["blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]]},
)
REDUCING: dict[str, tuple[str | Placed, dict[str, Any]]] = {
    "one microbatch": ("dp2", dict(schedule=dt.GPipe(1))),
    "zero 1": ("dp2", dict(schedule=dt.GPipe(1), zero={"dp": 1})),
    "microbatches": ("dp2", dict(schedule=dt.GPipe(2))),
    "microbatches, zero 1": ("dp2", dict(schedule=dt.GPipe(2), zero={"dp": 1})),
    "tp": ("dp2_tp2", dict(schedule=dt.GPipe(2))),
    "1F1B": (PP2_DP2, dict(schedule=dt.OneFOneB(2))),
    "W": (PP2_DP2, dict(schedule=dt.ZBH1(2))),
    "two stages": (FOUR_STAGES, dict(schedule=dt.LoopedBFS(2))),
    "two stages, W": (FOUR_STAGES, dict(schedule=dt.ZBV(2))),
}


@pytest.mark.default("microbatches", "two stages, W")
@pytest.mark.parametrize("case", REDUCING)
def test_gradient_buckets_are_reduced_during_the_last_backward(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bucket starts as soon as its last gradient or sum is complete, two at a time."""
    monkeypatch.setattr(steps, "BUCKET_BYTES", 8192)
    placed, stated = REDUCING[case]
    handle, _ = compared(monkeypatch, placed, **stated)
    last = stated["schedule"].microbatches - 1
    for rank in range(handle.program.size):
        labels = [str(i.label) for i in handle.program.ranks[rank].instructions]
        reductions = [
            each
            for each in inside(handle, rank)
            if "gradients" in labels[each[0]] and "gather" not in labels[each[0]]
        ]
        early = sorted(each for each in reductions if "optimizer" not in labels[each[0]])
        assert all(labels[start][1:].startswith(f"{last} ") for start, *_ in early), labels
        assert 0 < len(early) >= len(reductions) - 3
        assert any(calls for *_, calls in early)
        for (_, end, _), (start, _, _) in zip(early[:-2], early[2:], strict=True):
            assert end < start


@pytest.mark.ray
@pytest.mark.slow
def test_overlapped_training_on_ray_is_bitwise_equal_to_inprocess() -> None:
    here, there = (Run.of("dp2_tp2", zero={"dp": 2}, topology=SLOW) for _ in range(2))
    assert_same_bits(trained(there, "ray")[0], trained(here)[0])


def test_messages_are_not_overlapped_if_splitting_calls_costs_more() -> None:
    """On an H100 a layer of width 16 computes for less time than splitting its call costs."""
    _, handle = trained(Run.of("tp2", schedule=dt.GPipe(1), clip=None))
    assert not any(calls for _, _, calls in inside(handle))
