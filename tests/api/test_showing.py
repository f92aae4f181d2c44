"""Text and notebook forms of values: one screen of text, a summary, an HTML table, the name of the
hardware."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from expecttest import assert_expected_inline

import dtensor as dt
from dtensor.showing import LINES, WIDTH, html_folded, html_table, html_text, screen
from tests.models import GPT, MLP, batch, loss_fn, square_loss
from tests.plans import MEGATRON, plan_model

PINS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
MESH = dt.Mesh(tp=2)


def mlp_step() -> dt.TrainStep:
    model = dt.parallelize(MLP(), MESH, PINS)
    return dt.train_step(model, square_loss, torch.optim.AdamW(model.parameters()))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randn(8, 16)


def assert_fits(text: str) -> None:
    lines = text.splitlines()
    assert 0 < len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH


class Checker(HTMLParser):
    """Checks that every tag is closed, that none runs code and that none leaves its cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_plain(html: str) -> None:
    found = Checker(html)
    assert found.seen <= {"pre", "table", "tr", "th", "td", "details", "summary"}
    assert found.names <= {"style", "rowspan", "colspan"}
    assert len(html) < 100_000


# -- the words -------------------------------------------------------------------------------------


def test_screen_truncates_long_lines_and_texts() -> None:
    assert screen("a\nb") == "a\nb"
    assert screen("x" * WIDTH) == "x" * WIDTH
    assert screen("x" * (WIDTH + 1)) == "x" * (WIDTH - 4) + " ..."
    assert screen("\n".join("ab" * 20)).splitlines()[-1] == "... and 16 more lines"
    assert_fits(screen("word " * 1000 + "\n" * 1000 + "end"))
    assert screen("") == ""


def test_html_text_and_table_escape_markup() -> None:
    assert html_text("<script>&") == "<pre>&lt;script&gt;&amp;</pre>"
    table = html_table([("<b>", [("a", "<i>"), ("wide",)]), ("none", [])])
    assert_plain(table)
    assert "<b>" not in table and "<i>" not in table and "none" not in table
    assert 'rowspan="2"' in table and 'colspan="2"' in table


def test_html_folded_makes_one_foldable_part_per_paragraph() -> None:
    shown = html_folded("forward   per rank\n  a = <b>\n\n\nend\n" + "line\n" * 1000)
    assert_plain(shown)
    assert shown.startswith("<details><summary>forward, 2 lines</summary><pre>forward   per rank")
    assert "a = &lt;b&gt;" in shown and shown.count("<details>") == 2
    assert "... and 801 more lines" in shown


def cells(html: str) -> list[list[str]]:
    return [re.findall(r">([^<]*)</t[hd]>", row) for row in html.split("</tr>")[:-1]]


def test_mesh_and_spec_show_as_html_tables() -> None:
    mesh = dt.Mesh(pp=2, dp=1, tp=2)
    assert cells(mesh._repr_html_()) == [
        ["mesh(pp=2, dp=1, tp=2)", "tp=0", "tp=1"],
        ["pp=0, dp=0", "rank 0", "rank 1"],
        ["pp=1, dp=0", "rank 2", "rank 3"],
    ]
    assert cells(dt.Mesh()._repr_html_()) == [["mesh()", ""], ["", "rank 0"]]
    large = dt.Mesh(dp=1000, tp=1000)._repr_html_()
    assert_plain(large)
    assert "rank 15015" in large and "rank 16" not in large and large.count("...") == 19
    spec = dt.spec("f32[7@tp,16]{sum@dp}", dt.Mesh(dp=3, tp=2))
    assert_plain(spec._repr_html_())
    assert cells(spec._repr_html_()) == [
        ["f32[7@tp,16]{sum@dp}", "on mesh(dp=3, tp=2)"],
        ["axes", "dp=3", "Partial(&quot;sum&quot;)"],
        ["tp=2", "Shard(0)"],
        ["a rank holds at most", "4x16", "256 of 448 bytes"],
    ]


# -- plans and steps -------------------------------------------------------------------------------


def test_plan_summary_text() -> None:
    plan = plan_model(
        GPT(layers=2), loss_fn, batch(), dt.Mesh(dp=2, tp=2), MEGATRON,
        inputs=dict(dp=dt.Row()), name="gpt",
    )  # fmt: skip
    assert_expected_inline(
        plan.summary(),
        """\
plan gpt      mesh(dp=2, tp=2)
steps         223, of which 12 communicate; AdamW updates 28 parameters
axis dp       opened by tokens
axis tp       opened by *qkv.weight, *up.weight
memory        81.6 KiB: parameters 16.3 KiB, gradients 16.3 KiB, optimizer state 32.6 KiB,
              activations 27.4 KiB, not at once -11.1 KiB
sent          tp  forward    4 all_reduce   4.0 KiB  48.03 us
              tp  backward   4 all_reduce   4.0 KiB  48.03 us
              dp  optimizer  3 all_reduce  16.3 KiB  36.11 us
              dp  forward    1 all_reduce       4 B  12.00 us
longest       mm  models.py:26   x6  15.4 ns
              mm  models.py:28   x6  15.4 ns
              mm  models.py:51   x6  12.3 ns
              mm  models.py:100  x3   7.7 ns
computes      360.19 kFLOP
predicted     7.33 ms a step (H100 SXM bf16, NVLink), host-bound
              compute 193.3 ns, communication 168.17 us, host 7.16 ms""",
    )


STAGES = {"pp": [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm.*", "head*"]]}


@pytest.mark.slow
def test_longest_plan_summary_fits_on_screen() -> None:
    """Six axes, stages, ZeRO, recomputation, masters and clipping together."""
    mesh = dt.Mesh(pp=2, dp=2, tp=2, a=1, b=1, c=1, d=1)
    gpt = GPT(layers=2).bfloat16()
    model = dt.parallelize(
        gpt, mesh, MEGATRON, stages=STAGES, zero={"dp": 3}, recompute=["blocks.*"]
    )
    step = dt.train_step(
        model, loss_fn, torch.optim.AdamW(gpt.parameters()), inputs=dict(dp=dt.Row()),
        schedule=dt.OneFOneB(microbatches=2), clip_grad_norm=1.0, master_weights=True,
        topology=dt.topologies.h100(nvlink=("tp",), infiniband=("pp", "dp")),
    )  # fmt: skip
    plan = step.plan(*batch())
    assert_fits(plan.summary())
    assert "others" in plan.summary() and "float32 masters" in plan.summary()
    assert_plain(plan._repr_html_())


def test_summary_rows_add_up_to_totals_of_plan() -> None:
    """For a plan of one stage, the rows of what is sent count each collective once, by axis, phase
    and kind."""
    plan = plan_model(
        GPT(layers=2), loss_fn, batch(), dt.Mesh(dp=2, tp=2), MEGATRON,
        inputs=dict(dp=dt.Row()), microbatches=2, clip_grad_norm=1.0,
    )  # fmt: skip
    rows = re.findall(r"^(?:sent)? +(?:\w+) +(?:\w+) +(\d+) \w+ .*B  .*s$", plan.summary(), re.M)
    assert sum(map(int, rows)) == sum(c.times for c in plan.collectives)
    seconds = plan.cost.communication_seconds
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    texts = re.findall(r"B  +([\d.]+) (\w?s)$", plan.summary(), re.M)
    assert sum(float(n) * scale[unit] for n, unit in texts) == pytest.approx(seconds, rel=0.01)


def test_summary_of_plan_without_steps_says_nothing_is_sent() -> None:
    plan = dt.compile(lambda x: x, MESH).plan(torch.empty(4))
    assert_fits(plan.summary())
    assert "sent          nothing" in plan.summary()
    assert_plain(plan._repr_html_())


def test_repr_of_step_plan_and_parts_is_short() -> None:
    step = mlp_step()
    assert_expected_inline(
        repr(step),
        """\
<step of square_loss: AdamW, GPipe, microbatches: 1, plans: 0
  parallelize(MLP, Mesh(tp=2)): 2 of 4 parameters and buffers placed, 1 stage>""",
    )
    assert_plain(step._repr_html_())
    plan = step.plan(*data())
    assert "plans: 1" in repr(step)
    assert "sent" in step._repr_html_()
    for part in ("inputs", "forward", "backward", "optimizer", "memory per rank"):
        assert f"<details><summary>{part}, " in plan._repr_html_()
    planned = step.plans.latest
    assert planned is not None
    assert_expected_inline(repr(plan), """<plan square_loss on mesh(tp=2), steps: 25>""")
    assert_expected_inline(
        repr(plan.steps[1]), """<compute mm = aten.mm.default(x, permute), forward, stage 0>"""
    )
    for value in (step, plan, planned, planned.graph, planned.request, plan.flow, plan.steps[1]):
        assert_fits(repr(value))
        assert len(repr(value)) < 300


def test_repr_of_compiled_function_counts_plans() -> None:
    f = dt.compile(lambda x: x.relu(), MESH)
    assert repr(f) == "<compiled lambda on mesh(tp=2), plans: 0>"
    f.plan(torch.empty(4))
    assert repr(f) == "<compiled lambda on mesh(tp=2), plans: 1>"
    assert_plain(f._repr_html_())


def test_plan_repr_does_not_visit_steps() -> None:
    """Failing assertions and logs call repr, so it must be cheap."""
    plan = mlp_step().plan(*data())
    broken = replace(plan, steps=(object(),) * 10**6)  # type: ignore[arg-type]
    assert repr(broken) == "<plan square_loss on mesh(tp=2), steps: 1,000,000>"


# -- tensors, traces, programs ---------------------------------------------------------------------


def test_repr_of_large_dtensor_is_cut_to_screen() -> None:
    with dt.launch(MESH):
        x = dt.distribute(torch.arange(900.0).reshape(9, 10, 10), MESH, tp=dt.Row())
        assert_fits(repr(x))
        assert repr(x).endswith("more lines")
        assert_plain(x._repr_html_())
        small = dt.distribute(torch.ones(2), MESH)
        assert repr(small).endswith("[1., 1.])")
    assert "values lost with their launch" in repr(x)


def test_trace_and_comparison_have_short_repr_and_html() -> None:
    step = mlp_step()
    predicted = dt.simulate(step, *data())
    with dt.launch(MESH):
        measured = dt.trace(step, *data())
        program = step._session.cluster._handles[0].program  # type: ignore[union-attr]
        dt.gather_state_dict(step.model, step.optimizer)
    table = dt.compare_traces(predicted, measured)
    found = dt.compare(MLP(), square_loss, {"tp": (MESH, PINS), "one": (dt.Mesh(), {})}, *data())
    for value in (predicted, measured, table, found, program, program.ranks[0]):
        assert_fits(repr(value))
        assert len(repr(value)) < 200
    assert repr(found) == "<comparison of square_loss: tp, one>"
    assert predicted._repr_html_() == predicted._repr_svg_()
    assert_plain(table._repr_html_())
    assert_plain(found._repr_html_())


# -- hardware --------------------------------------------------------------------------------------


def test_topologies_by_name_have_titles_and_bandwidths() -> None:
    both = dt.topologies.h100(nvlink=("tp",), infiniband=["dp"])
    assert both.title == "H100 SXM bf16, NVLink along tp, 400G InfiniBand along dp"
    assert both.bandwidth_of("tp") > 4 * both.bandwidth_of("dp")
    assert dt.topologies.h100() == dt.Topology()
    assert dt.Topology().title == "H100 SXM bf16, NVLink"
    assert dt.topologies.a100(infiniband=("dp",)).title == "A100 SXM bf16, 200G InfiniBand along dp"
    assert dt.topologies.a100().flops < dt.topologies.h100().flops


def test_topology_title_names_changed_fields() -> None:
    laptop = dt.topologies.laptop()
    assert replace(laptop, flops=1e9).title == "a laptop's two cores with flops as stated"
    assert replace(laptop, flops=1e9, name="mine").title == "mine with flops as stated"
    assert pickle.loads(pickle.dumps(replace(laptop, flops=1e9))).title.endswith("flops as stated")
    assert dt.Topology(bandwidth=50e9).title == "H100 SXM bf16, NVLink with bandwidth as stated"
    assert dt.Topology(bandwidth=50e9, name="ours").title == "ours"
    own = dt.Topology(latency=1e-6, bandwidth=1e9, flops=1e9, memory_bandwidth=1e9)
    assert own.title == "hardware as stated"
    assert eval(repr(laptop), {"Topology": dt.Topology}).title == laptop.title


def test_invalid_topologies_are_refused() -> None:
    with pytest.raises(dt.PlanningError, match="nvlink is 'tp' \\(str\\), not a tuple of axes"):
        dt.topologies.h100(nvlink="tp")
    with pytest.raises(dt.PlanningError, match="axis 'tp' is stated twice"):
        dt.topologies.h100(nvlink=("tp",), infiniband=("tp",))
    with pytest.raises(dt.PlanningError, match="name is 3"):
        dt.Topology(name=3)  # type: ignore[arg-type]
    step = mlp_step()
    planning = replace(step.options.planning, topology=dt.topologies.h100(infiniband=("dp",)))
    step.options = replace(step.options, planning=planning)
    with pytest.raises(dt.PlanningError, match="states no \\w+ for axis 'tp'"):
        step.plan(*data())


def test_calibrated_topology_title_names_mesh_and_device() -> None:
    here = dt.calibrate(dt.Mesh(tp=2))
    assert here.title == "calibrated on mesh(tp=2), cpu, each rank alone in this process"
