"""Tests that the programs of two models under six placements each equal tests/golden/programs,
byte for byte.

This covers the instructions and the code that each actor runs. After an intended change, rewrite
the files with `python -m tests.runtime.test_program_goldens` and read the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from tests.models import GPT, MLP, batch, square_loss
from tests.training import MEGATRON, TWO_STAGES, Placed, Run

GOLDEN = Path(__file__).parent.parent / "golden" / "programs"

ROWS = dict(dp=dt.Row())
MLP_PINS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}


def cases(pins: Mapping, stages: Mapping, again: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return cases by name: a placement, with a ZeRO level, microbatches and recomputed regions
    if stated."""
    both = Placed(axes=dict(pp=2, tp=2), pins=pins, stages=stages)
    dp2 = Placed(axes=dict(dp=2), inputs=ROWS)
    return {
        "tp2": dict(placed=Placed(axes=dict(tp=2), pins=pins)),
        "dp2": dict(placed=dp2),
        "pp2": dict(placed=Placed(axes=dict(pp=2), stages=stages), microbatches=2),
        "dp2_zero3": dict(placed=dp2, zero={"dp": 3}, microbatches=2),
        "recompute": dict(placed=Placed(axes=dict(tp=2), pins=pins), recompute=again),
        "tp2pp2": dict(placed=both, microbatches=2),
    }


CASES = {
    "mlp": cases(MLP_PINS, {"pp": [["up.*"], ["down.*"]]}, ["up", "down"]),
    "gpt": cases(MEGATRON, TWO_STAGES, ["blocks.*"]),
}
NAMES = [f"{model}_{case}" for model, found in CASES.items() for case in found]


def text_of(name: str) -> str:
    """Return the text of the plan and the program; for an MLP also its functions."""
    kind, _, case = name.partition("_")
    stated = dict(CASES[kind][case])
    torch.manual_seed(0)
    made = dict(module=MLP(), loss=square_loss) if kind == "mlp" else dict(module=GPT())
    given = (torch.randn(8, 16), torch.randn(8, 16)) if kind == "mlp" else batch()
    schedule = dt.OneFOneB(microbatches=stated.pop("microbatches", 1))
    run = Run.of(stated.pop("placed"), schedule=schedule, **made, **stated)
    with dt.launch(run.mesh) as session:
        run.losses([given])
        [loaded] = programs_of(session)
        program = loaded.handle.program
        run.state()
    functions = [f"{name}\n{f.source}" for name, f in program.functions if kind == "mlp"]
    plan = run.step.plan(*given).text(full=True)
    return "\n\n".join([plan, program.text(), *functions]).rstrip() + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_program_text_equals_golden_file(name: str) -> None:
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text()


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        (GOLDEN / f"{name}.txt").write_text(text_of(name))


if __name__ == "__main__":
    main()
