"""Saves and the end of a process: the process waits for its saves, its exit status is nonzero if
weights are missing, and it names the failed save. A save blocks if no step could run meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.api.checkpoint.exit_status import STATUS
from dtensor.runtime.checkpoint import Checkpoint, CheckpointError, saving
from tests.api.tied import Net
from tests.extras import missing

ENDS: dict[str, int] = {
    "outside, dcp": 1,
    "outside, hf": 1,
    "in a launch, hf": 1,
    "left at its end": 1,
    "left by sys.exit": STATUS,
    "left by sys.exit(0), after steps": STATUS,
    "left by sys.exit(3)": 3,
    "left by an exception": 1,
    "left by sys.exit, caught": STATUS,
    "left by an error, caught": STATUS,
    "left by an error, caught, then written": 0,
    "never left": STATUS,
    "never left, after steps": STATUS,
    "never left, sys.exit": STATUS,
    "never left, sys.exit(3)": 3,
    "never left, raise SystemExit(3)": 3,
    "never left, words": 1,
    "never left, an exception": 1,
    "never left, late": STATUS,
    "never left, late, sys.exit(3)": 3,
    "never left, late, written": 0,
    "never left, read": 0,
    "objects of others": STATUS,
    "a stderr of one's own": STATUS,
    "no stderr": STATUS,
}
"""The exit status of each case of exits.py."""
SOME = (
    "outside, dcp",
    "left by sys.exit",
    "left by sys.exit(3)",
    "never left, raise SystemExit(3)",
    "never left, late",
    "never left, late, written",
    "objects of others",
    "a stderr of one's own",
)
RAISED = "outside", "in a launch", "left at its end"


@lru_cache(maxsize=3)
def ended(folder: Path, cases: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.api.exits", str(folder), *cases],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=1500,
    )
    assert run.returncode == 0, run.stderr
    told = [json.loads(line) for line in run.stdout.splitlines()]
    return {own["case"]: {**own, "folder": folder / str(i)} for i, own in enumerate(told)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exits")


@pytest.mark.slow
@pytest.mark.sample(*SOME)
@pytest.mark.parametrize("case", ENDS)
def test_no_kind_of_process_exit_hides_failed_save(case: str, folder: Path) -> None:
    some = case in SOME
    cases = SOME if some else tuple(case for case in ENDS if case not in SOME)
    check(case, ENDS[case], ended(folder / ("some" if some else "others"), cases)[case])


def check(case: str, status: int, told: dict[str, Any]) -> None:
    assert told["status"] == status, told
    for handler in ("before", "after"):  # of the user's, registered so to the import: each once
        assert told["out"].count(f"<handler {handler} the import>") == 1, told
    if case == "no stderr":
        return
    printed = told["err"].count("dtensor: a save failed, and its error was not read")
    written, read = case.endswith(" written"), case.endswith(", read")
    assert printed == (not written and not read and not case.startswith(RAISED)), told
    if case == "objects of others":
        assert (told["folder"] / "words").read_text() == "words"
        assert told["out"].count("<deleted>") == 1
        return
    if written:
        assert Checkpoint.open(told["folder"] / "ckpt").tensors.keys() == {
            "model.weight",
            "model.bias",
        }
        return
    assert not [name for name in told["files"] if "ckpt" in name], told
    where = told["out"] if read else told["err"]
    assert "ckpt" in where and "File too large" in where
    if printed:
        assert "exits.py:" in told["err"] and "dt.save(TO, model" in told["err"]
        assert "ckpt was not written" in told["err"]


@pytest.mark.ray
@pytest.mark.slow
def test_no_kind_of_process_exit_hides_failed_save_of_ray_actors(folder: Path) -> None:
    cases = {
        "on Ray, never left": STATUS,
        "on Ray, never left, sys.exit(3)": 3,
        "on Ray, never left, written": 0,
    }
    found = ended(folder / "ray", tuple(cases))
    for case, status in cases.items():
        check(case, status, found[case])


# -- who waits -------------------------------------------------------------------------------------


def model() -> dt.ParallelModule:
    torch.manual_seed(0)
    return dt.parallelize(Net(), dt.Mesh(tp=2))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make writers wait for this event, and fail afterwards if ``fails`` is set."""
    ready = threading.Event()
    ready.fails = False  # type: ignore[attr-defined]

    def waiting(write: Any) -> Any:
        def call(*args: Any) -> Any:
            assert ready.wait(600)
            if ready.fails:  # type: ignore[attr-defined]
                raise CheckpointError("no space left on the device")
            return write(*args)

        return call

    for name in ("write_part", "write_hf_part"):
        monkeypatch.setattr(saving, name, waiting(getattr(saving, name)))
    yield ready
    ready.set()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_save_blocks_unless_steps_can_run_meanwhile(
    format: str, inside: bool, held: Any, tmp_path: Path
) -> None:
    own = model()

    def save(name: str) -> dt.Saved:
        return dt.save(tmp_path / name, own, format=format)

    def check(name: str) -> None:
        if inside and format == "dcp":
            saved = save(name)
            assert not saved.done()
            with pytest.raises(TimeoutError, match="not written after 0 s"):
                saved.wait(timeout=0)
            held.set()
            saved.wait()
        else:
            held.set()
            saved = save(name)
        assert saved.done() and saved.get() == str(tmp_path / name)
        assert Checkpoint.open(tmp_path / name).tensors

    def check_failure(name: str) -> None:
        held.fails = True
        with pytest.raises(CheckpointError, match="no space left") as caught:
            saved = save(name)
            assert inside and format == "dcp"
            saved.wait()
        assert any(f"{name} was not written" in note for note in caught.value.__notes__)
        assert not (tmp_path / name).exists()

    if inside:
        with dt.launch(own.mesh):
            check("1")
            check_failure("2")
    else:
        check("1")
        check_failure("2")
    assert os.listdir(tmp_path) == ["1"]


def test_hugging_face_save_keeps_tokenizer_and_refuses_foreign_weights(tmp_path: Path) -> None:
    own, out = model(), tmp_path / "out"

    def weights() -> torch.Tensor:
        return Checkpoint.open(out).read("embed.weight")

    dt.save(out, own, format="hf")
    (out / "tokenizer.json").write_text("{}")
    with dt.launch(own.mesh):
        dt.load(out, own)
        with torch.no_grad():
            own.module.embed.weight.fill_(3)
        dt.save(out, own, format="hf", extra={"epoch": 1})
        assert bool((weights() == 3).all())
        assert dt.load(out, own).extra == {"epoch": 1}
    assert (out / "tokenizer.json").exists() and len(list(out.glob("*.safetensors"))) == 1
    (out / "pytorch_model.bin").touch()
    before = sorted(os.listdir(out))
    with pytest.raises(dt.PlanningError, match="did not save there: pytorch_model.bin"):
        dt.save(out, own, format="hf")
    assert sorted(os.listdir(out)) == before


def test_failed_hugging_face_save_keeps_earlier_contents_of_folder(
    held: Any, tmp_path: Path
) -> None:
    own = dt.parallelize(nn.Linear(2, 2), dt.Mesh(tp=2))
    held.set()
    dt.save(tmp_path / "out", own, format="hf", step=1)
    held.fails = True
    with pytest.raises(CheckpointError, match="no space left") as caught:
        dt.save(tmp_path / "out", own, format="hf", step=2)
    assert caught.value.__notes__ == [f"the earlier contents of {tmp_path}/out are unchanged."]
    assert dt.load(tmp_path / "out", own).step == 1


def test_from_pretrained_reads_model_right_after_save(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=22, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    own, out = dt.parallelize(module, dt.Mesh(tp=2)), tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")

    def check(value: float) -> None:
        with torch.no_grad():
            module.lm_head.weight.fill_(value)
        dt.save(out, own, format="hf")
        read = transformers.AutoModelForCausalLM.from_pretrained(out)
        for (name, a), (other, b) in zip(module.state_dict().items(), read.state_dict().items()):
            assert name == other and torch.equal(a, b)
        assert module.lm_head.weight[0, 0] == value

    check(1.0)
    for value in (2.0, 3.0):  # in the place of what was there
        check(value)
        assert len(list(out.glob("*.safetensors"))) == 1
    read = transformers.AutoModelForCausalLM.from_pretrained(out)
    read.save_pretrained(out)  # which takes ours for shards of its own, and removes them
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    with pytest.raises(dt.PlanningError, match="did not save there: model.safetensors"):
        dt.save(out, own, format="hf")
