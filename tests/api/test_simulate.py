"""`dt.simulate` predicts bubbles of schedules, messages and memory, also for meshes that do not
exist; `dt.trace` measures a step or the runs of several programs of a launch."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.daft import Label
from dtensor.runtime.schedule import bubble
from dtensor.runtime.simulate.trace import Span
from tests.api.test_schedules import Chain, data, loss_fn, step_of

# compute alone: messages cost nothing
COMPUTE = dt.Topology(
    latency=0.0, bandwidth=float("inf"), flops=1e9, memory_bandwidth=1e9, launch_latency=0.0
)
# messages alone
MESSAGES = dt.Topology(
    latency=1e-3, bandwidth=1e6, flops=1e30, memory_bandwidth=1e30, launch_latency=0.0
)


@pytest.mark.parametrize(
    ("schedule", "v", "p"),
    [
        (dt.GPipe, 1, 2),
        (dt.LoopedBFS, 2, 2),
        (dt.OneFOneB, 1, 3),
        (dt.Interleaved1F1B, 2, 2),
        (dt.ZBH1, 1, 3),
        (dt.ZBH2, 1, 2),
        (dt.ZBV, 2, 2),
        (dt.DualPipeV, 2, 2),
    ],
)
def test_simulated_bubble_equals_bubble_of_schedule_grid(
    schedule: Callable[[int], dt.Schedule], v: int, p: int
) -> None:
    """The grid uses the costs of the stages' actions."""
    step = step_of(v * p, dt.Mesh(pp=p), schedule(6))
    trace = dt.simulate(step, *data(), topology=COMPUTE)
    lasts: dict[tuple[str, int], dict[str, float]] = {}
    for span in trace.spans:
        label = span.label
        if span.track == "compute" and label.stage is not None:
            actions = lasts.setdefault((label.action, label.stage), {})
            actions[label.place] = actions.get(label.place, 0.0) + span.end - span.begin

    def mean(kind: str, stage: int) -> float:
        each = lasts.get((kind, stage), {"": 0.0}).values()
        return sum(each) / len(each)

    stages = range(v * p)
    costs = dt.Costs(
        forward=tuple(mean("F", s) for s in stages),
        input=tuple(mean("I" if ("I", s) in lasts else "B", s) for s in stages),
        weight=tuple(mean("W", s) for s in stages),
    )
    inside = [s for s in trace.spans if s.track == "compute" and " stage " in s.name]
    lasting = max(s.end for s in inside) - min(s.begin for s in inside)
    busy = sum(s.end - s.begin for s in inside)
    found = 1 - busy / (lasting * p)
    # an action sends before it ends: gradients are added up after
    assert bubble(step.grid, costs) - 2e-3 < found <= bubble(step.grid, costs)
    # messages take no time: all waits are for stages
    assert trace.bubble == pytest.approx(found, rel=1e-3)


def test_simulated_bubble_equals_bubble_of_plan() -> None:
    """With messages that take no time, because only the simulation overlaps messages between
    stages."""
    for schedule in (dt.GPipe(6), dt.OneFOneB(6), dt.ZBH1(6)):
        step = step_of(3, dt.Mesh(pp=3), schedule, topology=COMPUTE)
        plan = step.plan(*data())
        assert dt.simulate(step).bubble == pytest.approx(plan.cost.bubble, abs=5e-3)


def test_simulated_wait_for_collective_is_not_bubble() -> None:
    """A rank that waits for other ranks of its stage counts as busy with the action."""
    within = dt.Topology(latency={"pp": 0.0, "tp": 1e-3}, bandwidth=1e9, flops=1e30)
    module = Chain(2)
    pins = {"layers.*.1.weight": dict(tp=dt.Row())}
    for mesh, stages in (
        (dt.Mesh(pp=2, tp=2), {"pp": [["layers.0.*"], ["layers.1.*"]]}),
        (dt.Mesh(tp=2), None),
    ):
        model = dt.parallelize(module, mesh, pins, stages=stages)
        optimizer, schedule = torch.optim.SGD(module.parameters(), lr=0.1), dt.GPipe(2)
        step = dt.train_step(model, loss_fn, optimizer, schedule=schedule, topology=within)
        plan, trace = step.plan(*data()), dt.simulate(step)
        assert trace.bubble == pytest.approx(plan.cost.bubble, abs=0.02)
        assert trace.idle > 0.9 and (trace.bubble > 0.2) == (stages is not None)


def test_simulate_defaults_to_last_batch_and_accepts_topology() -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.OneFOneB(2))
    expected = dt.simulate(step, *data(), topology=COMPUTE)
    assert dt.simulate(step, COMPUTE) == dt.simulate(step, *data(), COMPUTE) == expected
    assert dt.simulate(step) == dt.simulate(step, *data()) != expected


def test_simulated_message_time_is_that_of_plans_collectives() -> None:
    mesh = dt.Mesh(pp=2, dp=2)
    step = step_of(2, mesh, dt.OneFOneB(2), inputs=dict(dp=dt.Row()), clip_grad_norm=1.0)
    plan = step.plan(*data())
    trace = dt.simulate(step, *data(), topology=MESSAGES)
    spent = sum(s.end - s.begin for s in trace.spans if s.track == "communication")
    expected = 0.0
    for c in plan.collectives:
        num = mesh.axis_size(c.axis)
        kind = "transfer" if c.kind in ("send", "transfer", "send_recv") else c.kind
        each = MESSAGES.collective_seconds(kind, c.axis, num=num, bytes_sent=c.bytes_sent)
        sides = 2 if kind == "transfer" else 1  # a transfer is drawn at both ends
        expected += each * c.times * sides
    assert spent == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_simulate_handles_mesh_of_4096_ranks() -> None:
    mesh = dt.Mesh(pp=16, dp=32, tp=8)
    module = Chain(16)
    model = dt.parallelize(
        module, mesh, {}, stages={"pp": [[f"layers.{n}.*"] for n in range(16)]}, zero={"dp": 1}
    )
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters()),
        schedule=dt.OneFOneB(16),
        inputs=dict(dp=dt.Row()),
    )
    x = torch.empty(16 * 32, 6, device="meta")
    trace = dt.simulate(step, x, x)
    assert (len(trace.ranks), trace.alike) == (16, 256)
    assert 0 < trace.bubble < 1
    # the first stage holds 16 microbatches, the last one
    assert trace.peak_bytes[0] > trace.peak_bytes[-2]


def test_trace_is_saved_printed_and_drawn(tmp_path: Path) -> None:
    trace = dt.simulate(step_of(2, dt.Mesh(pp=2), dt.ZBH1(2)), *data())
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(trace.spans)
    assert {e["pid"] for e in drawn} == {0, 1}
    assert any("test_schedules.py" in e["args"]["source"] for e in drawn)
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(trace.seconds * 1e6)
    text = str(trace).splitlines()
    assert text[0].startswith("trace loss_fn    ") and text[0].endswith("2 ranks")
    assert [line.split("  ")[0] for line in text[2:]] == ["rank 0", "rank 1"]
    drawing = trace._repr_svg_()
    assert drawing.count("<rect") >= 12 and "W1 stage 0" in drawing


def test_saved_trace_puts_overlapping_messages_on_separate_threads(tmp_path: Path) -> None:
    """Trace viewers nest all events of one thread."""
    trace = made(num_ranks=2, num_spans=50)
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(trace.spans)
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(drawn, key=lambda e: e["ts"]):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-6
        ends[thread] = event["ts"] + event["dur"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert ends.keys() <= named.keys()
    assert {named[0, 2], named[0, 3]} == {"communication", "communication 2"}


# -- the picture -----------------------------------------------------------------------------------


def made(num_ranks: int, num_spans: int) -> dt.Trace:
    """Return a trace with spans of very different lengths and overlapping messages on two
    channels."""
    rng = random.Random(0)
    spans: list[Span] = []
    for rank in range(num_ranks):
        now = 0.0
        for number in range(num_spans):
            update = Label("update")
            track, label = rng.choice(
                [("compute", Label("F", number, rank)), ("compute", update), ("wait", update)]
            )
            end = now + 10 ** rng.uniform(-6, -3)
            begun = dict(rank=rank, begin=now, source=f"model.py:{number}: x = a < b")
            spans.append(Span(track=track, label=label, end=end, **begun))
            if number % 3 == 0:
                label = label.doing("all_reduce", "x", "over tp")
                end += 10 ** rng.uniform(-6, -4)
                spans.append(Span(track="communication", label=label, end=end, **begun))
                spans.append(Span(track="communication", label=label, end=now + 1e-5, **begun))
            now = end + rng.choice([0.0, 1e-6, 1e-4])
    spans.sort(key=lambda s: (s.begin, s.rank, s.end))
    return dt.Trace(
        name="made",
        ranks=tuple(range(num_ranks)),
        alike=1,
        spans=tuple(spans),
        peak_bytes=(1,) * num_ranks,
    )


SVG = "{http://www.w3.org/2000/svg}"


def painted(drawing: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the painted intervals in seconds by rank and legend text, read off the axis ticks."""
    root = ElementTree.fromstring(drawing)
    texts = [(e, "".join(e.itertext())) for e in root.iter(f"{SVG}text")]
    ticks: list[tuple[float, float]] = []
    for element, text in texts:
        if found := re.fullmatch(r"([\d.]+) (s|ms|us|ns)", text):
            unit = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[found[2]]
            ticks.append((float(element.attrib["x"]), float(found[1]) * unit))
    (left, zero), (right, last) = ticks[0], ticks[-1]
    assert zero == 0 and 2 <= len(ticks) <= 11
    scale = (last - zero) / (right - left)
    shown = [e for e in root if e.tag == f"{SVG}path" and e.attrib.get("fill", "").startswith("#")]
    words = [text for element, text in texts if element.attrib["y"] == "38.0"]
    kind = dict(zip([e.attrib["fill"] for e in shown[1:]], words, strict=False))
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for rank in root.iter(f"{SVG}g"):
        for lane in rank if "aria-label" in rank.attrib else ():
            at, _ = re.findall(r"[\d.]+", lane.attrib["transform"])
            offset = (float(at) - left) * scale
            boxes = [
                (e.attrib["fill"], e.attrib["x"], e.attrib["width"])
                for e in lane.findall(f"{SVG}rect")
            ]
            for path in lane.findall(f"{SVG}path"):
                lines = re.findall(r"M([\d.]+) [\d.]+h([\d.e-]+)", path.attrib["d"])
                boxes += [(path.attrib["stroke"], x, width) for x, width in lines]
            for colour, x, width in boxes:
                begin = offset + float(x) * scale
                spans = found.setdefault((rank.attrib["aria-label"], kind[colour]), [])
                spans.append((begin, begin + float(width) * scale))
    return found


COMPUTING = ("forward", "backward", "backward of inputs", "backward of weights", "once a step")


def check_picture(trace: dt.Trace) -> str:
    """Check that painted times equal `spent` and are at the right places."""
    drawing = trace._repr_svg_()
    pixel = trace.seconds / 840
    found = painted(drawing)
    for rank in trace.ranks:
        for track, words in (
            ("compute", COMPUTING),
            ("wait", ("waits",)),
            ("communication", ("messages",)),
        ):
            lane = sorted(s for word in words for s in found.get((f"rank {rank}", word), ()))
            lasting = sum(end - begin for begin, end in lane)
            assert lasting == pytest.approx(trace.spent(rank, track), abs=pixel, rel=1e-3)
        lane = sorted(
            s for word in (*COMPUTING, "waits") for s in found.get((f"rank {rank}", word), ())
        )
        for (_, end), (begin, _) in itertools.pairwise(lane):
            assert begin >= end - 0.1 * pixel  # widths have four digits
        assert lane[-1][1] <= trace.seconds + 0.1 * pixel
        assert f">{100 * trace.spent(rank, 'compute') / trace.seconds:.1f}%</text>" in drawing
    assert f"{100 * trace.idle:.1f}% not computing" in drawing
    assert f"{100 * trace.idle:.1f}% not computing" in str(trace)
    return drawing


def test_pipeline_picture_labels_actions_and_phases() -> None:
    step = step_of(4, dt.Mesh(pp=2), dt.ZBV(4))
    drawing = check_picture(dt.simulate(step, *data(), topology=COMPUTE))
    for text in ("3F0", "0W3", "1I0"):
        assert f">{text}</text>" in drawing
    assert "test_schedules.py:" in drawing and "F1 stage 2\ncomputes " in drawing
    for words in (*COMPUTING[:1], *COMPUTING[2:], "waits"):
        assert f">{words}</text>" in drawing
    assert ">backward</text>" not in drawing  # it stands in halves


@pytest.mark.slow
def test_picture_of_40000_spans_is_small_and_shows_long_spans() -> None:
    trace = made(num_ranks=16, num_spans=2500)
    drawing = check_picture(trace)
    assert len(drawing) < 1e6
    (shorter,) = re.findall(r"spans shorter than ([\d.]+ \w+) are drawn together", drawing)
    # what is longer stands for itself
    (number, unit), scale = shorter.split(), {"ms": 1e-3, "us": 1e-6}
    assert float(number) * scale[unit] > 1.9 * trace.seconds / 840
    long = max((s for s in trace.spans if s.track == "compute"), key=lambda s: s.seconds)
    pixel = trace.seconds / 840
    ends = [
        s for words in COMPUTING for s in painted(drawing).get((f"rank {long.rank}", words), ())
    ]
    assert any(
        begin == pytest.approx(long.begin, abs=pixel) and end == pytest.approx(long.end, abs=pixel)
        for begin, end in ends
    )


def test_picture_gives_title_to_actions_with_too_narrow_spans() -> None:
    step = step_of(4, dt.Mesh(pp=2), dt.ZBV(120))
    topology = dt.Topology(flops=1e9, memory_bandwidth=1e9, launch_latency=0.0)
    trace = dt.simulate(step, *data(), topology=topology)
    drawing = check_picture(trace)
    assert len(trace.spans) > 3000 and len(drawing) < 1e5
    unseen = re.findall(r'<g fill="none" pointer-events="all">(.*?)</g>', drawing, re.DOTALL)
    assert any("<title>F0 stage 3\nwaits " in each for each in unseen)
    assert ", computes " in unseen[0] and "test_schedules.py:" in unseen[0]


def test_picture_has_white_background_and_dark_text() -> None:
    trace = made(num_ranks=1, num_spans=2)
    root = ElementTree.fromstring(trace._repr_svg_())
    ground = root[0].attrib
    assert ground["fill"] == "#ffffff"
    assert ground["d"] == f"M0 0H{root.attrib['width']}V{root.attrib['height']}H0Z"
    for element in root.iter(f"{SVG}text"):
        red, green, blue = (int(element.attrib["fill"][i : i + 2], 16) for i in (1, 3, 5))
        assert 0.3 * red + 0.6 * green + 0.1 * blue < 128
    assert not any("id" in e.attrib or "style" in e.attrib for e in root.iter())


def test_empty_trace_can_be_drawn() -> None:
    nothing = dt.Trace(name="f", ranks=(0,), alike=1, spans=(), peak_bytes=(0,))
    assert "0.0%</text>" in nothing._repr_svg_() and "0 s a step" in nothing._repr_svg_()


def test_simulate_rejects_plain_function() -> None:
    with pytest.raises(dt.PlanningError, match="not function"):
        dt.simulate(loss_fn, torch.empty(2, 2))  # type: ignore[arg-type]


def check_measured(backend: Literal["inprocess", "ray"]) -> None:
    step = step_of(2, dt.Mesh(pp=2), dt.ZBH1(2), clip_grad_norm=1.0)
    predicted = dt.simulate(step, *data())
    with dt.launch(dt.Mesh(pp=2), backend=backend):
        first = float(step(*data()))
        began = time.monotonic()
        found = dt.trace(step, *data())
        seconds = time.monotonic() - began
        third = float(step(*data()))
        dt.gather_state_dict(step.model, step.optimizer)
    again = step_of(2, dt.Mesh(pp=2), dt.ZBH1(2), clip_grad_norm=1.0)
    with dt.launch(dt.Mesh(pp=2)):
        losses = [float(again(*data())) for _ in range(3)]
        dt.gather_state_dict(again.model, again.optimizer)
    assert (first, third) == (losses[0], losses[2])  # a traced step is a step
    for track in ("compute", "communication"):
        named = [
            sorted((s.rank, s.name) for s in t.spans if s.track == track)
            for t in (predicted, found)
        ]
        assert set(named[0]) <= set(named[1])  # predicted: without those that take no time
    assert 0 < found.seconds < seconds
    assert ">once a step</text>" in check_picture(found)
    table = str(dt.compare_traces(predicted, found)).splitlines()
    assert table[0].split() == ["predicted", "measured", "ratio"]
    assert any("W stage 1" in line for line in table)
    assert any("send from stage 0 to 1" in line for line in table)
    assert table[-1].startswith("step")


def test_measured_trace_has_names_of_simulated_trace() -> None:
    check_measured("inprocess")


@pytest.mark.ray
def test_measured_trace_on_ray_has_names_of_simulated_trace(ray_session: None) -> None:
    check_measured("ray")


# -- recordings of a launch ------------------------------------------------------------------------


def double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) * 2


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_timeline_shows_runs_of_several_programs_and_actors(tmp_path: Path) -> None:
    net, mesh, x = nn.Linear(8, 8), dt.Mesh(tp=2), torch.randn(4, 8)
    model = dt.parallelize(net, mesh, {"weight": dict(tp=dt.Column())})
    step = dt.train_step(model, square, torch.optim.SGD(net.parameters(), lr=0.1))
    f = dt.compile(double, mesh)
    with dt.launch(mesh) as session:
        f(model, x)
        with dt.trace() as recording:
            first = time.monotonic()
            for _ in range(3):
                step(x)
            recording.note("judge", "score", first, time.monotonic())
            twice = f(model, x).full_tensor()
            with pytest.raises(RuntimeError, match="before the `with` block has ended"):
                recording.timeline()
        assert session.launch.cluster.recording is None
        step(x)  # is no part of it
        assert torch.allclose(f(model, x).full_tensor(), twice, atol=1) and twice.shape == (4, 8)
    timeline = recording.timeline()
    assert timeline.num_runs == {"square": 3, "double": 1} and timeline.ranks == (0, 1)
    for rank in timeline.ranks:
        own = [span for (_, r), spans in timeline.spans.items() if r == rank for span in spans]
        assert all(0 <= span.begin <= span.end <= timeline.seconds for span in own)
        assert timeline.spent("double", rank) > 0 and timeline.spent("square", rank) > 0
        assert 0 < timeline.busy(rank) < 1
    sent = [s for s in timeline.spans["double", 0] if s.track == "communication"]
    assert len(sent) == 1  # the all_reduce of the product
    assert "square" in str(timeline) and "judge" not in str(timeline)
    picture = timeline._repr_svg_()
    for words in ("rank 0", "rank 1", "judge", "score", "double", "waits"):
        assert f">{words}<" in picture
    timeline.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    places = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert places == ["rank 0", "rank 1", "judge"]
    assert any(e["name"].startswith("double: ") and e["pid"] == 1 for e in events)


def test_timeline_skips_undone_runs() -> None:
    mesh = dt.Mesh(tp=2)
    f = dt.compile(lambda table, i: table[i], mesh)
    table, good, bad = torch.randn(4, 2), torch.tensor([1]), torch.tensor([7])
    with dt.launch(mesh), dt.trace() as recording:
        f(table, good)
        with pytest.raises(dt.daft.TaskError):
            f(table, bad).full_tensor()
    assert recording.timeline().num_runs == {"lambda": 1}


def test_trace_recording_mistakes_raise() -> None:
    with pytest.raises(dt.PlanningError, match="in a launch"):
        dt.trace().__enter__()
    with (
        dt.launch(dt.Mesh()),
        dt.trace(),
        pytest.raises(dt.PlanningError, match="one recording at a time"),
    ):
        dt.trace().__enter__()
    recording = dt.trace()
    with pytest.raises(ValueError, match="mine"), dt.launch(dt.Mesh()), recording:
        raise ValueError("mine")
    with pytest.raises(RuntimeError, match="has ended well"):
        recording.timeline()
