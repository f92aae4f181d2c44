"""The programs of two models under six placements each, to the byte: instructions and code.

What a step plans, and what each actor is given to run, is compared with tests/golden/programs.
After a wanted change, write them anew and read the difference:

    python -m tests.runtime.test_program_goldens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loaded_program import LoadedProgram, programs_of
from dtensor.api.store.session import MeshSession
from tests.models import GPT, MLP, batch, loss_fn, square_loss
from tests.training import MEGATRON, TWO_STAGES

GOLDEN = Path(__file__).parent.parent / "golden" / "programs"

MLP_PINS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    axes: Mapping[str, int]
    stages: Mapping[str, Sequence[Sequence[str]]] | None = None
    zero: Mapping[str, int] | None = None
    recompute: Sequence[str] | None = None
    microbatches: int = 1
    pins: Mapping[str, dict[str, dt.Placement]] = field(default_factory=dict)


def cases(pins: Mapping, stages: Mapping, again: Sequence[str]) -> dict[str, Case]:
    return {
        "tp2": Case(axes=dict(tp=2), pins=pins),
        "dp2": Case(axes=dict(dp=2)),
        "pp2": Case(axes=dict(pp=2), stages=stages, microbatches=2),
        "dp2_zero3": Case(axes=dict(dp=2), zero={"dp": 3}, microbatches=2),
        "recompute": Case(axes=dict(tp=2), pins=pins, recompute=again),
        "tp2pp2": Case(axes=dict(pp=2, tp=2), pins=pins, stages=stages, microbatches=2),
    }


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randn(8, 16)


Model = tuple[
    Callable[[], nn.Module], Callable[..., object], Callable[[], tuple[Tensor, Tensor]], dict
]
MODELS: dict[str, Model] = {
    "mlp": (
        MLP,
        square_loss,
        vectors,
        cases(MLP_PINS, {"pp": [["up.*"], ["down.*"]]}, ["up", "down"]),
    ),
    "gpt": (
        GPT,
        loss_fn,
        batch,
        cases(MEGATRON, TWO_STAGES, ["blocks.*"]),
    ),
}
NAMES = [f"{model}_{case}" for model, (_, _, _, found) in MODELS.items() for case in found]


def text_of(name: str) -> str:
    """The plan and the program; of an MLP also the functions that it calls."""
    kind, _, case_name = name.partition("_")
    make, loss, data, found = MODELS[kind]
    case: Case = found[case_name]
    torch.manual_seed(0)
    module = make()
    model = dt.parallelize(
        module, dt.Mesh(**case.axes), case.pins, stages=case.stages, zero=case.zero
    )
    step = dt.train_step(
        model,
        loss,
        torch.optim.AdamW(module.parameters(), lr=1e-3),
        inputs=dict(dp=dt.Row()) if "dp" in case.axes else None,
        schedule=dt.OneFOneB(microbatches=case.microbatches),
        clip_grad_norm=1.0,
        recompute=case.recompute,
    )
    given = data()
    with dt.launch(model.mesh) as session:
        float(step(*given))
        program = loaded(session).handle.program
        dt.gather_state_dict(model)
    functions = [f"{name}\n{f.source}" for name, f in program.functions if kind == "mlp"]
    return (
        "\n\n".join([step.plan(*given).text(full=True), program.text(), *functions]).rstrip() + "\n"
    )


def loaded(session: MeshSession) -> LoadedProgram:
    [one] = programs_of(session)
    return one


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_as_it_was(name: str) -> None:
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text()


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        (GOLDEN / f"{name}.txt").write_text(text_of(name))


if __name__ == "__main__":
    main()
