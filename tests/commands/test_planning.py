"""`dtensor plan`, `compare`, `simulate` and `search`, run as from a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dtensor as dt
from tests.commands.conftest import Command

TINY = "tiny --batch 4 --length 16"


@pytest.mark.slow
def test_plan_command_plans_model_from_configuration(command: Command):
    ran = command(f"plan {TINY} --mesh tp=2 --summary")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "gpt2: GPT2LMHeadModel, 30.6 k parameters in f32; a batch of 4 x 16 tokens"
    assert lines[1] == "placements over tp derived (5 patterns)"
    assert lines[3] == "plan gpt2     mesh(tp=2)"
    assert any("tp  forward   6 all_reduce" in line for line in lines)


@pytest.mark.slow
def test_plan_command_gives_plan_of_library(command: Command):
    """The expected plan states by hand what the command derives."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ran = command(f"plan {TINY} --mesh pp=2,dp=2,tp=2 --zero dp=2 --microbatches 2 --json")
    found = json.loads(ran.out)
    fields = json.loads(Path("tiny/config.json").read_text())
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**fields, use_cache=False))
        ids = torch.zeros(4, 16, dtype=torch.long)
    placements = dt.placements.for_model(model, (), dict(input_ids=ids, labels=ids), size=2)
    mesh = dt.Mesh(pp=2, dp=2, tp=2)
    placed = dt.parallelize(model, mesh, placements, stages="auto", zero={"dp": 2})
    step = dt.train_step(
        placed,
        lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
        torch.optim.AdamW(model.parameters()),
        inputs=dict(dp=dt.Row()),
        schedule=dt.OneFOneB(microbatches=2),
    )
    plan = step.plan(ids, ids)
    assert found["seconds"] == plan.cost.seconds
    assert [m["total"] for m in found["memory_by_stage"]] == [m.total for m in plan.memory]
    assert [c["name"] for c in found["collectives"]] == [c.name for c in plan.collectives]


@pytest.mark.slow
def test_compare_command_captures_once(command: Command, monkeypatch: pytest.MonkeyPatch):
    from dtensor.api.step import bound_call

    captured: list[object] = []
    plain = bound_call.capture
    monkeypatch.setattr(bound_call, "capture", lambda *a, **k: captured.append(a) or plain(*a, **k))
    ran = command(f"compare {TINY} --mesh tp=2 --mesh dp=2 --zero none --zero dp=3 --json")
    rows = json.loads(ran.out)["strategies"]
    assert [row["name"] for row in rows] == ["tp2", "dp2", "dp2 zero3"]
    assert len(captured) == 1
    assert rows[1]["memory"]["parameters"] > rows[2]["memory"]["parameters"]


def test_plan_command_plans_for_given_device(command: Command):
    """The device need not exist on this machine."""
    Path("cast.py").write_text(
        "import torch\n"
        "from mlp import MLP, loss_fn as loss\n"
        "def loss_fn(model, x):\n"
        "    with torch.autocast(x.device.type, dtype=torch.bfloat16):\n"
        "        return loss(model, x)\n"
        "def make():\n"
        "    return MLP(16), loss_fn, torch.randn(8, 16)\n"
    )
    for device in ("cpu", "cuda"):
        ran = command(f"plan cast.py:make --mesh tp=2 --device {device}")
        assert f"autocast    list of {device}, bf16" in ran.out
    ran = command("plan cast.py:make --mesh tp=2 --device cudda")
    assert ran.status == 2
    assert "--device cudda is none.\nfix: cuda" in ran.err


def test_commands_report_and_fail_if_memory_does_not_fit(command: Command):
    ran = command("compare mlp.py:make --placements none --mesh dp=2 --mesh dp=4 --memory 4KiB")
    assert ran.status == 1
    assert ran.out.count("!") > 2
    ran = command("plan mlp.py:make --mesh dp=2 --memory 4KiB --summary")
    assert ran.status == 1
    assert "It does not fit: the fullest rank needs" in ran.err


def test_plan_command_states_attention_of_the_users_function(command: Command):
    Path("split.py").write_text(
        "import torch\n"
        "import dtensor as dt\n"
        "class Attends(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        q = super().forward(x)[:, None]\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "def make():\n"
        "    return dict(model=Attends(8, 8), loss_fn=lambda model, x: model(x).sum(),\n"
        "                batch=torch.zeros(2, 4, 8), inputs=dict(cp=dt.Zigzag(1)),\n"
        "                attention={'cp': 'ring'}, placements={})\n"
    )
    ran = command("plan split.py:make --mesh cp=2")
    assert "attention  ring on cp, as stated" in ran.out


def test_plan_command_accepts_schedule_without_stages(command: Command):
    line = (
        "compare mlp.py:make --mesh tp=2 --microbatches 2 --schedule gpipe --schedule 1f1b --json"
    )
    gpipe, one_f_one_b = json.loads(command(line).out)["strategies"]
    assert [gpipe["name"], one_f_one_b["name"]] == ["tp2 GPipe(2)", "tp2 OneFOneB(2)"]
    assert [gpipe["schedule"], one_f_one_b["schedule"]] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert gpipe["memory"]["activations"] > one_f_one_b["memory"]["activations"]
    plan = json.loads(command("plan mlp.py:make --mesh tp=2 --microbatches 2 --json").out)
    assert plan["schedule"] == one_f_one_b["schedule"]  # the default


def test_simulate_command_draws_pipeline_and_writes_trace(command: Command):
    line = "simulate mlp.py:make --set width=8192 --mesh pp=2 --microbatches 2 --schedule gpipe"
    ran = command(f"{line} --trace out.json")
    assert ran.status == 0
    picture = [text for text in ran.out.splitlines() if text.startswith("rank ")][2:4]
    assert [text.split()[1] for text in picture] == ["0", "1"]
    assert "F" in picture[0] and "." in picture[1]
    events = json.loads(Path("out.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert ran.err == "written to out.json\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plna", "dtensor: plna is no command.\nfix: plan"),
        ("plan tiny --mehs tp=2 --mesh tp=2", "dtensor plan: --mehs is no option.\nfix: --mesh"),
        ("", "usage: dtensor [-h] COMMAND"),
        ("plan tiny", "plan: --mesh is missing.\nfix: dtensor plan tiny --mesh tp=2,pp=2"),
        ("run tiny --mesh tp=2 --backend rai", "--backend rai is none.\nfix: ray"),
        ("plan tiny --mesh tp2", "--mesh: expected AXIS=SIZE, got 'tp2'.\nfix: tp=2"),
        ("plan tiny --mesh pt=2", "the axis 'pt' has no known use"),
        ("plan tiny --mesh tp=2 --zero tp=3,pd=3", "--zero tp=3,pd=3: no mesh has an axis 'pd'"),
        ("plan tiny --mesh pp=2 --schedule 1f1", "'1f1' is no schedule.\nfix: 1f1b"),
        ("plan tiny --mesh tp=2 --schedule zbv", "at least 2.\nfix: --mesh tp=2,pp=2, or"),
        ("plan tiny --mesh tp=2 --dtype bf61", "'bf61' is no dtype of parameters.\nfix: bf16"),
        ("plan tiny --mesh tp=2 --topology h10", "no file of this name.\nfix: h100"),
        ("plan tiny --mesh tp=2 --optimizer Adamm", "none of this name.\nfix: Adam"),
        ("plan tiny --mesh tp=2 --placements atuo", "fix: auto"),
        ("plan gtp2 --mesh tp=2", "is no model type of transformers, and no file.\nfix: gpt2"),
        ("plan meta-llama/Llama-3.2-1B --mesh tp=2", "if it is a model of the hub: nothing is"),
        ("plan tiny --mesh tp=2 --set n_layr=4", "no such field.\nfix: n_layer"),
        ("plan tiny --mesh tp=2 --set n_layer=x", "n_layer"),
        ("plan tiny --mesh tp=2 --length 128", "is more than the 64 positions of gpt2"),
        ("plan tiny --mesh tp=2 --length 8 --head causal", "fix: causal-lm"),
        ("search tiny --ranks 2 --slots 4", "--slots is for a search for tokens a second"),
        ("search tiny --ranks 2 --objective tokens --batch 4", "--batch is for a search for a t"),
        ("search tiny --ranks 2 --objective tokens --length 99", "more than the 64 positions"),
        ("plan mlp.py --mesh tp=2", "mlp.py names no value in it"),
        ("plan mpl.py:make --mesh tp=2", "there is no file mpl.py.\nfix: mlp.py"),
        ("plan mlp.py:mkae --mesh tp=2", "mlp.py has no 'mkae'; it has MLP, loss_fn, make"),
        ("plan mlp.py:make --set widht=4 --mesh tp=2", "takes no such argument.\nfix: width"),
        ("plan mlp.py:broken --mesh tp=2", "AttributeError: 'MLP' object has no attribute"),
        ("plan mlp.py:reads_a_value --mesh tp=2", "fix: --real calls it as it is"),
        ("plan mlp.py:loss_fn --mesh tp=2", "missing 2 required positional arguments"),
        ("plan no.such:make --mesh tp=2", "Python finds no module 'no.such' from here"),
    ],
)  # fmt: skip
def test_planning_commands_name_wrong_argument(command: Command, line: str, said: str):
    ran = command(line)
    assert ran.status == 2
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_users_pattern_without_match_is_named(command: Command):
    pins = 'import dtensor as dt\npins = {"*.upp.weight": dict(ep=dt.Row())}\n'
    Path("pins.py").write_text(pins)
    ran = command("plan mlp.py:make --mesh ep=2 --placements pins.py:pins")
    assert ran.status == 2
    assert 'the pattern "*.upp.weight" of placements matches no parameter' in ran.err


@pytest.mark.slow
def test_search_command_ranks_strategies_and_prints_code(command: Command):
    line = "search mlp.py:make --set width=4096 --ranks 2"
    found = json.loads(command(f"{line} --json").out)["strategies"]
    assert [row["seconds"] for row in found] == sorted(row["seconds"] for row in found)
    code = command(f"{line} --code 1").out
    assert code.rstrip() == found[0]["code"].rstrip()
    compile(code, "code", "exec")
    said = command(f"{line} --memory 1KiB")
    assert said.status == 2 and "fix" in said.err


@pytest.mark.slow
def test_search_command_ranks_by_tokens_per_second(command: Command):
    line = "search tiny --ranks 2 --objective tokens --slots 4 --length 48 --prompt 10"
    ran = command(f"{line} --json")
    assert (ran.status, ran.err) == (0, "")
    said = json.loads(ran.out)
    assert said["model"] == "gpt2: GPT2LMHeadModel, 30.6 k parameters in f32"
    found = said["strategies"]
    assert {row["name"] for row in found} == {"tp2", "dp2", "pp2"}
    for row in found:
        compile(row["code"], "code", "exec")
        assert "gen = dt.generator(\n    parallel,\n    slots=4,\n    length=48," in row["code"]
        tokens = 4 * 38 / (38 * row["seconds"] + 4 * row["prefill_seconds"])
        assert row["tokens_per_second"] == pytest.approx(tokens)
