"""The saved page of a plan contains what the plan states; and errors for paths that cannot be
written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor.explorer import save_pages
from dtensor.explorer.contents import contents
from dtensor.explorer.times import simulate_run
from dtensor.sharding.spec.placements import intersect, length
from tests.explorer.pages import DOWN, UP, gpt_plan, mlp_plan
from tests.models import GPT, loss_fn


@pytest.mark.slow
def test_steps_on_page_add_up_to_totals_of_plan():
    plan = gpt_plan()
    found = contents(plan)
    works = plan.totals.stages
    assert len(found["steps"]) < len(plan.steps)  # layers that are alike stand once
    for stage in range(plan.num_stages):
        seconds, sent, flops = [0.0, 0.0], 0, 0
        for row in found["steps"]:
            section = found["sections"][row["g"]]
            times = section["times"] * (found["runs"][row["r"]]["x"] if "r" in row else 1)
            if section["stage"] == stage:
                seconds[0] += row.get("z", 0.0) * times
                seconds[1] += row.get("y", 0.0) * times
                sent += row.get("b", 0) * times
                flops += row.get("f", 0) * times
        work = works[stage]
        assert seconds == pytest.approx((work.compute_seconds, work.communication_seconds))
        assert sent == sum(c.bytes_sent * c.times for c in plan.collectives if c.stage == stage)
        assert flops == plan.totals.stages[stage].flops
    assert found["modules"][0]["z"] == pytest.approx(sum(w.compute_seconds for w in works))
    held = [i.held.max_local_nbytes for i in plan.inputs if i.kind == "parameter"]
    assert found["modules"][0]["w"] == sum(held)


@pytest.mark.slow
def test_equal_layers_are_one_node_of_module_tree():
    modules = contents(gpt_plan())["modules"]
    blocks = next(i for i, part in enumerate(modules) if part["l"] == "blocks")
    below = [part for part in modules if part["u"] == blocks]
    assert [(part["l"], part["x"], part["s"]) for part in below] == [
        ("{0..2}", 3, [0]),
        ("{3..5}", 3, [1]),
    ]


@pytest.mark.slow
def test_every_collective_on_page_has_reason_and_users_statement():
    found = contents(gpt_plan())
    rows = [row for row in found["steps"] if row["k"] == "comm"]
    assert {axis for row in rows for axis in row["a"]} == {"pp", "dp", "tp"}
    assert all(row["e"] for row in rows)
    assert all(row.get("p") or row.get("j") for row in rows)
    forward = next(r for r in rows if r["v"] == "all_reduce" and "tp" in r["a"] and r["d"])
    assert "a pending sum" in forward["d"] and set(forward["p"]) & {UP, DOWN, "*qkv.weight"}
    transfer = next(row for row in rows if row["v"] == "transfer")
    assert transfer["j"] == "stages= on pp" and transfer["to"] == [0, 1]


def test_page_shows_only_checked_fixes():
    plain, turned = contents(mlp_plan(turned=True)), contents(mlp_plan(turned=True, hints=True))
    assert not any(row.get("h") for row in plain["steps"])
    removed = [row for row in turned["steps"] if [0, 1] in row.get("h", [])]
    assert removed
    assert turned["hints"][0]["opposite"] == "Shard(0)"
    other = contents(mlp_plan())
    kinds = {(row["v"], row["a"][0]) for row in other["steps"] if row["k"] == "comm"}
    assert kinds == {("all_reduce", "tp")}


@pytest.mark.slow
def test_page_draws_shards_that_each_rank_holds():
    plan = gpt_plan()
    specs = {str(spec): spec for spec in plan.value_specs().values()}
    checked = 0
    for drawn in contents(plan)["specs"]:
        spec = specs.get(drawn["t"])
        if spec is None:
            continue
        for rank in range(spec.mesh.size):
            at = spec.mesh.coordinates(rank)
            shape = list(drawn["s"])
            for dim in range(len(shape)):
                held: tuple[tuple[int, int], ...] = ((0, drawn["s"][dim]),)
                for axis, placed in drawn.get("p", {}).items():
                    if placed[0] == dim:
                        held = intersect(held, tuple(placed[1][at[axis]][0]))
                shape[dim] = length(held)
            assert math.prod(shape) == math.prod(spec.local_shape(at))
            checked += 1
    assert checked > 100


@pytest.mark.slow
def test_memory_over_time_on_page_equals_simulation():
    plan = gpt_plan()
    trace, found = simulate_run(plan), contents(plan)["timeline"]
    assert [own["rank"] for own in found["ranks"]] == list(trace.ranks)
    for own, peak in zip(found["ranks"], trace.peak_bytes, strict=True):
        times = [when for when, _ in own["held"]]
        assert times == sorted(times)
        assert max(held for _, held in own["held"]) == own["peak"] == peak
        assert own["held"][0][1] < peak
    shown = {span[5] for own in found["ranks"] for lane in own["lanes"] for span in lane} - {-1}
    steps = contents(plan)["steps"]
    assert {steps[row]["k"] for row in shown} == {"comm"}
    assert {axis for row in shown for axis in steps[row]["a"]} == {"pp", "dp", "tp"}


def test_page_of_inference_plan_has_times_and_no_optimizer(tmp_path: Path):
    f = dt.compile(lambda x: (x @ x).relu(), dt.Mesh(tp=2))
    plan = f.plan(dt.spec("f32[8@tp,8]", dt.Mesh(tp=2)))
    found = contents(plan)
    assert found["timeline"]["seconds"] > 0 and found["head"]["memory"]["optimizer"] == 0
    assert plan.save(tmp_path / "plan.html").stat().st_size > 10_000


def test_page_is_deterministic_and_escapes_names(tmp_path: Path):
    plan = mlp_plan()
    path = plan.save(str(tmp_path / "plan.html"))
    first = path.read_bytes()
    assert path == tmp_path / "plan.html"
    assert plan.save(path).read_bytes() == first
    evil = save_pages(tmp_path / "evil.HTML", {"</script><img src=x>\u2028": plan})
    text = evil.read_text()
    assert text.count("</script>") == 2 and "<img" not in text and "\u2028" not in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["plans"][0]["label"] == "</script><img src=x>\u2028"
    for word in ("http://", "https://", "fetch(", "eval(", "innerHTML"):
        assert word not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("path", "fact", "fix"),
    [
        ("plan.txt", "does not end in .html", "plan.html"),
        ("plan", "does not end in .html", "plan.html"),
        ("there/is/none/plan.html", "there is no folder", "'plan.html'"),
        (3, "the path of a page is 3", 'plan.save("plan.html")'),
    ],
)
def test_unwritable_path_error_names_reason_and_fix(
    tmp_path: Path, path: object, fact: str, fix: str
):
    where = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(dt.PlanningError) as failed:
        mlp_plan().save(where)  # type: ignore[arg-type]
    assert fact in str(failed.value) and fix in str(failed.value).partition("fix: ")[2]
    assert list(tmp_path.iterdir()) == []


def test_save_pages_rejects_anything_but_named_plans(tmp_path: Path):
    path = tmp_path / "plans.html"
    for given in ({}, {"a": 3}, {3: mlp_plan()}, [mlp_plan()]):
        with pytest.raises(dt.PlanningError, match="fix: save_pages"):
            save_pages(path, given)  # type: ignore[arg-type]
    assert not path.exists()


@pytest.mark.slow
def test_page_explanations_equal_plan_explain():
    """Recomputed values follow the placements of their first computation."""
    model = GPT(layers=2, tied=False)
    parallel = dt.parallelize(model, dt.Mesh(dp=2), {}, recompute=["blocks.*"])
    optimizer = torch.optim.SGD(model.parameters())
    step = dt.train_step(parallel, loss_fn, optimizer, inputs=dict(dp=dt.Row()))
    tokens = torch.zeros(4, 8, dtype=torch.long)
    plan = step.plan(tokens, tokens)
    reasons = {
        row["n"].partition(",")[0]: row["e"] for row in contents(plan)["steps"] if row.get("e")
    }
    values = [name for name in plan.value_specs() if name in reasons]
    assert any(name.endswith("_again") for name in values)
    for name in values:
        lines = plan.explain(name).splitlines()[1:]
        assert reasons[name] == "\n".join(line.strip() for line in lines), name
