"""Examples: each of examples/parallelisms is short and trains as on one device; the full programs
for pre-training, fine-tuning and reinforcement learning run at a small size."""

from __future__ import annotations

import functools
import importlib
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import daft
from tests.extras import missing
from tests.training import assert_losses_close

HERE = Path(__file__).parent.parent / "examples" / "parallelisms"
EXAMPLES = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "model")
OWN_MODEL = {"experts", "huggingface"}


def run(name: str) -> dict[str, Any]:
    return runpy.run_module(f"examples.parallelisms.{name}")


@functools.cache
def single() -> list[float]:
    return run("single")["losses"]


def test_all_parallelism_examples_exist() -> None:
    wanted = {"single", "tensor", "sequence", "vocabulary", "data", "pipeline", "huggingface"}
    assert wanted <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_parallelism_example_has_fewer_than_30_lines(name: str) -> None:
    assert len((HERE / f"{name}.py").read_text().splitlines()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in {"single", *OWN_MODEL}])
def test_parallelism_example_has_losses_of_one_device(name: str) -> None:
    losses = run(name)["losses"]
    assert_losses_close(losses, single())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_experts_example_has_losses_of_one_device() -> None:
    found = run("experts")
    assert_losses_close(found["losses"], found["whole"])
    assert found["losses"][-1] < found["losses"][0] - 0.1


@pytest.mark.slow
def test_huggingface_example_has_losses_of_torch() -> None:
    pytest.importorskip("transformers", reason=missing("transformers"))
    found = run("huggingface")
    losses: list[float] = found["losses"]
    torch.manual_seed(0)
    model = type(found["model"])(found["model"].config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]] = found["batch"]
    expected: list[float] = []
    for _ in losses:
        loss = model(input_ids=batch()[0], labels=batch()[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert_losses_close(losses, expected, limit=2e-5)  # after steps of AdamW


@pytest.mark.slow
def test_rl_example_trains_and_draws_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE.parent / "rl"))
    example = runpy.run_path(str(HERE.parent / "rl" / "counting.py"))
    task = replace(example["FAST"], steps=5)
    rewards = example["train"](task, 1, "inprocess", tmp_path / "rl.svg")
    assert len(rewards) == 5 and all(0 <= reward <= 1 for reward in rewards)
    picture = (tmp_path / "rl.svg").read_text()
    for words in ("rank 3", "prefill", "decode", "loss_fn", "sync of GPT"):
        assert f">{words}<" in picture


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the full programs, and make their sibling modules importable."""
    monkeypatch.syspath_prepend(str(HERE.parent))
    return HERE.parent


@pytest.mark.slow
def test_pretraining_example_resumes_from_checkpoint(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes under another placement, with the losses of an uninterrupted plain PyTorch run."""
    monkeypatch.setattr(dt, "calibrate", dt.topologies.laptop)  # which takes seconds
    example = runpy.run_path(str(beside / "train_gpt.py"))
    words = "--placements tp2 --batch 4 --context 16 --vocab 300 --steps 2 --more-steps 2"
    args = example["parser"]().parse_args(words.split())
    losses = example["run"](args, tmp_path)
    plain = example["train_on_one_device"](args, range(4), example["load"](args.vocab)[1])
    assert losses == pytest.approx(plain, rel=1e-5)
    assert losses[3] < losses[0]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4"}

    with pytest.raises(SystemExit, match="has checkpoints, to step 4: --resume"):
        example["run"](args, tmp_path)
    args.resume = True
    with pytest.raises(SystemExit, match="has step 4 of 4"):
        example["run"](args, tmp_path)


# peft still reads an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.slow
def test_lora_example_tunes_saves_and_merges_adapters(beside: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    pytest.importorskip("peft", reason=missing("peft"))
    example = runpy.run_path(str(beside / "finetune_lora.py"))
    example["finetune"].__globals__["PROJECTIONS"][:] = ["q_proj", "o_proj", "down_proj"]
    task = example["make"]("inprocess", 2, layers=1)
    tokenizer = example["train_tokenizer"](example["manual"](*example["REST"]), 512)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    task.base.save_pretrained(tmp_path)
    read = example["read"](str(tmp_path))  # --model
    assert torch.equal(read.train, task.train)

    losses = example["finetune"](read, "inprocess", 4, tmp_path / "adapters")
    assert losses["before"] == example["loss_of"](task.base, task.held_out)
    assert losses["adapted"] < losses["before"] - 1e-3
    assert losses["read back"] == losses["adapted"]
    assert losses["merged"] == pytest.approx(losses["adapted"], abs=1e-5)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


DAFT = sorted(path.stem for path in (HERE.parent / "daft").glob("*.py"))
SMALL = [name for name in DAFT if name not in ("run", "train_and_generate", "two_models")]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", SMALL)
def test_daft_example_gives_same_result_on_ray_and_in_process(name: str, ray_session: None) -> None:
    assert len((HERE.parent / "daft" / f"{name}.py").read_text().splitlines()) <= 40
    program = importlib.import_module(f"examples.daft.{name}")
    found: list[Any] = []
    for backend in ("inprocess", "ray"):
        with daft.launch(backend, deadline_s=120.0):  # type: ignore[arg-type]
            found.append(program.run())
    assert found[0] == found[1] and found[0]
