"""Tests lowering: the instructions of each rank, the source lines of its code, and that the
verifier accepts lowered programs of every schedule and refuses a broken one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from dtensor.daft import Call, Collective, Program, ProgramError, Recv, Send, Wait
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.daft.verification.verifier import verify
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank_builder import MAX_LINES, Roles
from dtensor.runtime.lower.timetable import ONE_BY_ONE
from dtensor.runtime.schedule import OneFOneB
from dtensor.runtime.simulate.simulator import simulate
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Redistribute, roots
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard, with_shift
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON, mean_square, plan_model
from tests.runtime.test_overlap import SLOW
from tests.training import TWO_STAGES

TP2_PP2 = Mesh(pp=2, tp=2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_model(
        GPT(),
        loss_fn,
        batch(),
        TP2_PP2,
        MEGATRON,
        microbatches=4,
        stages=TWO_STAGES,
        clip_grad_norm=1.0,
    )


@pytest.fixture(scope="module")
def lowered(plan: Plan) -> Program:
    return lower(plan, OneFOneB(4).grid(2, 2), roles=Roles.of_plan(plan))


def test_lowered_program_starts_as_many_collectives_as_planned(
    plan: Plan, lowered: Program
) -> None:
    """Counts, per rank, the starts of each kind against those that the plan counts for the rank's
    stage."""
    for rank, own in enumerate(lowered.ranks):
        stage = rank // 2
        counts = Counter(type(i) for i in own.instructions)
        planned = [c for c in plan.collectives if c.kind != "transfer"]
        transfers = [c for c in plan.collectives if c.kind == "transfer"]
        assert counts[Collective] == sum(c.times for c in planned if c.stage == stage), rank
        assert counts[Send] == sum(c.times for c in transfers if c.stage == stage), rank
        assert counts[Recv] == sum(c.times for c in transfers if c.stage != stage), rank


def test_lowered_calls_are_short_and_name_model_lines(lowered: Program) -> None:
    for name, function in lowered.functions:
        lines = function.source.splitlines()
        assert len(lines) <= 4 * MAX_LINES, name
        assert len(function.lines) == len(lines)
    calls = [i for own in lowered.ranks for i in own.instructions if isinstance(i, Call)]
    forward = [call for call in calls if call.label and call.label.action == "F" and call.source]
    assert forward and all("models.py:" in str(call.source) for call in forward)


# -- the verifier ----------------------------------------------------------------------------------


def pipeline(stages: int, microbatches: int) -> Plan:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))
    return plan_model(
        model,
        mean_square,
        (torch.randn(microbatches, 4),),
        Mesh(pp=stages),
        {},
        microbatches=microbatches,
        stages={"pp": [[f"{i}.*"] for i in range(stages)]},
    )


def test_receive_is_posted_one_action_before_its_wait() -> None:
    """The value arrives while the rank computes, and the sender can free its buffer."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2))
    between: list[list[str]] = []  # by rank: the actions between the receive and its wait
    for rank in program.ranks:
        items = rank.instructions
        between.append([])
        for at, item in enumerate(items):
            if isinstance(item, Recv):
                waits = (i for i in items[at:] if isinstance(i, Wait) and i.values == (item.value,))
                until = items.index(next(waits))
                calls = [i.label for i in items[at:until] if isinstance(i, Call)]
                between[-1].append(" ".join(dict.fromkeys(c.numbered for c in calls if c)))
    assert between[0] == ["F1", "F2", "F3", "B2"]  # the gradients of B0, B1, B2, B3
    assert between[1][1:] == ["B0", "B1", "B2"]  # the activations of F1, F2, F3


def test_verifier_refuses_wait_for_gradient_before_sending_activation() -> None:
    """The first stage waits for its first gradient before it has sent an activation."""
    program = lower(pipeline(2, 4), OneFOneB(4).grid(2, 2))
    items = list(program.ranks[0].instructions)
    receive = next(item for item in items if isinstance(item, Recv))
    wait = next(i for i in items if isinstance(i, Wait) and i.values == (receive.value,))
    early = [receive, wait, *(item for item in items if item not in (receive, wait))]
    broken = replace(
        program, ranks=(replace(program.ranks[0], instructions=tuple(early)), program.ranks[1])
    )
    verify(program, ((0,), (1,)))
    with pytest.raises(ProgramError, match="waits for"):
        verify(broken, ((0,), (1,)))


# -- shifts ----------------------------------------------------------------------------------------

RING = Mesh(cp=4)
VALUES = {"k": torch.randn(11, 2), "v": torch.arange(5), "x": torch.randn(64, 64)}
CUTS = {"k": dt.Zigzag(0), "v": Shard(0), "x": Shard(0)}


def shift(operands: dict[str, TensorSpec], results: tuple[str, ...], by: int) -> Redistribute:
    """Return a step that sends the shards of all operands to the coordinate ``by`` ranks later."""
    moves: list[Move] = []
    for spec in operands.values():
        cut = spec.placement("cp")
        assert isinstance(cut, Shard)
        moved = spec.with_placements(cp=with_shift(cut, cut.shift + by, 4))
        moves.append(Move("shift", "cp", spec, moved))
    names = tuple(operands)
    return Redistribute(
        results=results,
        operands=names,
        moves=tuple(moves),
        phase="forward",
        stage=0,
        why="they travel",
    )


@pytest.fixture(scope="module")
def shifted() -> Plan:
    """Return a plan of two products, in which k and v are shifted by 1 before the first product and
    by 2 before the second. The results are the shifted values."""

    def products(k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(2):
            x = x @ torch.ones(64, 64)
        return k, v, x

    given = [dt.distribute(VALUES[name], RING, cp=cut) for name, cut in CUTS.items()]
    found = dt.compile(products, RING, topology=SLOW).plan(*given)
    ones, first, second, *_ = (step for step in found.steps if isinstance(step, Compute))
    specs = {name: spec for name, spec in found.value_specs().items() if name in ("k", "v")}
    one = shift(specs, ("k1", "v1"), 1)
    two = shift(dict(zip(one.results, (m.dst for m in one.moves), strict=True)), ("k3", "v3"), 2)
    outputs = [
        replace(output, values=((0, name),), spec=spec)
        for output, (_, name, spec) in zip(found.outputs, two.gives_as(), strict=False)
    ]
    steps = (ones, one, first, two, second)
    found = replace(found, steps=steps, outputs=tuple(outputs), timetable=ONE_BY_ONE)
    found.verify()
    return found


def test_shift_sends_uneven_shards_to_rank_at_its_distance(shifted: Plan) -> None:
    program = lower(shifted, None)
    verify(program)
    specs = shifted.value_specs()
    given = [
        {name: shard_of(x, specs[name], RING.coordinates(rank)) for name, x in VALUES.items()}
        for rank in range(4)
    ]
    with daft.launch_cluster(4) as cluster:
        results = cluster.run(cluster.load(program), given).get()
    for rank, result in enumerate(results):
        for output, name in zip(shifted.outputs, VALUES, strict=False):
            expected = shard_of(VALUES[name], output.spec, RING.coordinates(rank))
            assert torch.equal(result[f"result {output.of}"], expected), (rank, name)


def test_shift_is_in_flight_during_computation_and_predicted_so(shifted: Plan) -> None:
    instructions = lower(shifted, None).ranks[0].instructions
    waits = starts_of_waits(instructions)
    for wait, starts in waits.items():
        for start in starts:
            if str(instructions[start].label).startswith("F0 stage 0: shift"):
                assert any(isinstance(i, Call) for i in instructions[start:wait])
    trace = simulate(shifted, None)
    assert shifted.cost.seconds == pytest.approx(trace.seconds, rel=1e-9)
    assert trace.hidden(0) > 0


def test_plan_prints_each_shift_on_one_line(shifted: Plan) -> None:
    assert [(c.key, c.bytes_sent) for c in shifted.collectives] == [("shift@cp", 48)] * 2
    lines = [" ".join(line.split()) for line in str(shifted).splitlines() if "= shift(" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
* k1, v1 = shift(k, v, cp by 1) f32[11@cp:zigzag:shift1,2], i64[5@cp:shift1] 48 B sent
* k3, v3 = shift(k1, v1, cp by 2) f32[11@cp:zigzag:shift3,2], i64[5@cp:shift3] 48 B sent""",
    )
    (_, line, _) = shifted.explain("v3").splitlines()
    assert line.endswith("from i64[5@cp:shift1] to i64[5@cp:shift3], 48 B sent: they travel")


def test_plan_with_wrong_shift_is_refused(shifted: Plan) -> None:
    step = next(s for s in shifted.steps if isinstance(s, Redistribute))
    first, second = step.moves
    cut = second.dst.placement("cp")
    for placement, words in (
        (replace(cut, zigzag=True), "no shift over cp"),
        (replace(cut, shift=2), "one kind, one axis and one distance"),
    ):
        moved = replace(second, dst=second.src.with_placements(cp=placement))
        wrong = replace(step, moves=(first, moved))
        steps = tuple(wrong if s is step else s for s in shifted.steps)
        with pytest.raises(AssertionError, match=words):
            replace(shifted, steps=steps).verify()


def test_roots_of_a_value_are_found_once_for_each_value() -> None:
    """Each part of a ring may share the storage of both results of the part before it."""
    producers: dict[str, Any] = {}
    for part in range(1, 65):
        operands = tuple(f"{name}{part - 1}" for name in ("out", "lse", "out"))
        producers |= {f"{x}{part}": SimpleNamespace(may_share=operands) for x in ("out", "lse")}
    assert roots("out64", producers) == {"out0", "lse0"}
