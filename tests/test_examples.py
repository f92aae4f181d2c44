"""Each example of examples/parallelisms is short and trains as one device does; that of RL runs."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.training import assert_losses_close

HERE = Path(__file__).parent.parent / "examples" / "parallelisms"
EXAMPLES = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "model")
OWN_MODEL = {"huggingface"}


def run(name: str) -> dict[str, Any]:
    return runpy.run_module(f"examples.parallelisms.{name}")


@functools.cache
def single() -> list[float]:
    return run("single")["losses"]


def test_all_are_there() -> None:
    wanted = {"single", "tensor", "sequence", "vocabulary", "data", "pipeline", "huggingface"}
    assert wanted <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len((HERE / f"{name}.py").read_text().splitlines()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in {"single", *OWN_MODEL}])
def test_its_losses_are_those_of_one_device(name: str) -> None:
    losses = run(name)["losses"]
    assert_losses_close(losses, single())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_huggingface() -> None:
    pytest.importorskip("transformers")
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
def test_rl_trains_and_draws_its_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE.parent / "rl"))
    train = runpy.run_path(str(HERE.parent / "rl" / "counting.py"))["train"]
    rewards = train(5, 1, "inprocess", tmp_path / "rl.svg")
    assert len(rewards) == 5 and all(0 <= reward <= 1 for reward in rewards)
    picture = (tmp_path / "rl.svg").read_text()
    for words in ("rank 3", "prefill", "decode", "loss_fn", "sync of GPT"):
        assert f">{words}<" in picture
