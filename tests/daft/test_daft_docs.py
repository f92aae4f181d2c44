"""Tests that docs/daft.md and the examples of examples/daft run and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch

from examples.daft import train_and_generate, two_models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "daft.md"


def test_daft_page_prints_shown_output() -> None:
    parts = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [kind for kind, _ in parts] == ["python", "text"] * (len(parts) // 2)
    # As a module, so that classes have one, as those of a script do.
    names: dict[str, Any] = {"__name__": "__main__"}
    for (_, code), (_, wanted) in zip(parts[::2], parts[1::2], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == wanted


def test_two_models_example_gives_output_of_plain_torch() -> None:
    found = two_models.main(steps=2)
    one, other = two_models.Model(16, seed=0), two_models.Model(16, seed=1)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found[1], other.execute(one.execute(x)))


def test_train_and_generate_example_increases_reward() -> None:
    compiled = train_and_generate.main(steps=30)
    assert compiled[0] < 0.3 and compiled[-1] > 0.9
    assert train_and_generate.main(steps=5, compiled=False) == compiled[:5]
