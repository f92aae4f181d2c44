"""`launch(local="inductor")`: all backends and modes are bitwise equal, and close to results
without inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Backend, Mode, Program
from dtensor.runtime.lower.inductor import FusedChain
from tests.models import Llama, batch, loss_fn
from tests.training import (
    SIX,
    adamw,
    assert_losses_close,
    assert_same_bits,
    batches,
    make_model,
)


def trained(
    name: str,
    local: str,
    backend: Backend = "inprocess",
    mode: Mode = "compiled",
    *,
    llama: bool = False,
    zero: Mapping[str, int] | None = None,
    options: Mapping[str, Any] = {},
    size: int = 4,
) -> tuple[list[float], dict[str, Any], Program]:
    placed = SIX[name]
    torch.manual_seed(0)
    module = Llama() if llama else make_model()
    pins = {} if llama else placed.pins
    model = dt.parallelize(module, placed.mesh, pins, stages=placed.stages, zero=zero)
    optimizer = adamw(module)
    step = dt.train_step(model, loss_fn, optimizer, inputs=placed.inputs, **options)
    data = [batch(seed, size=size) for seed in range(3)]
    with dt.launch(placed.mesh, backend, mode=mode, local=local):  # type: ignore[arg-type]
        losses = [float(step(*one)) for one in data]
        state = dt.gather_state_dict(model, optimizer)
        [loaded] = programs_of(session_for(placed.mesh))
        return losses, state, loaded.handle.program


def kernels_of(program: Program) -> list[str]:
    bound = (value for _, function in program.functions for _, value in function.bindings)
    return sorted({value.__name__ for value in bound if isinstance(value, FusedChain)})


@pytest.mark.slow
def test_inductor_modes_are_bitwise_equal_and_close_to_plain_codegen() -> None:
    losses, state, program = trained("tp2", "inductor")
    assert "fused(add, gelu)" in kernels_of(program)
    assert "fused(add, add, native_layer_norm)" in kernels_of(program)
    again, same, _ = trained("tp2", "inductor", mode="interpreted")
    assert losses == again
    assert_same_bits(same, state)
    plain, _, generated = trained("tp2", "generated")
    assert kernels_of(generated) == []
    assert_losses_close(losses, plain)
    texts = [program.ranks[0].text(), generated.ranks[0].text()]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())  # calls in the same places


@pytest.mark.slow
def test_in_place_bias_add_stays_in_place_beside_fused_chain() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        h = F.linear(x, weight, bias)
        return F.linear(torch.tanh(h) * h, weight, bias)

    mesh, found = dt.Mesh(), list[Tensor]()
    for local in ("generated", "inductor"):
        compiled = dt.compile(fn, mesh)
        with dt.launch(mesh, local=local):  # type: ignore[arg-type]
            found.append(compiled(x, weight, bias).full_tensor())
            [loaded] = programs_of(session_for(mesh))
            sources = [function.source for _, function in loaded.handle.program.functions]
    assert any("fused_" in text and "# add in place" in text for text in sources)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.ray
def test_inductor_on_ray_is_bitwise_equal_to_in_process() -> None:
    losses, state, _ = trained("tp2", "inductor")
    there, same, _ = trained("tp2", "inductor", "ray")
    assert losses == there
    assert_same_bits(same, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("tp2_pp2", dict(options=dict(schedule=dt.OneFOneB(microbatches=2), clip_grad_norm=1.0))),
        ("dp2", dict(zero={"dp": 3}, size=3)),  # ranks of two rows and of one
        ("dp2", dict(llama=True)),
    ],
)
def test_inductor_losses_match_plain_codegen_for_more_placements(
    name: str, more: dict[str, Any]
) -> None:
    losses, _, program = trained(name, "inductor", **more)
    assert kernels_of(program)
    assert_losses_close(losses, trained(name, "generated", **more)[0])


@pytest.mark.slow
def test_profile_names_fused_kernels_of_inductor() -> None:
    mesh = dt.Mesh(tp=2)
    f = dt.compile(lambda x, y: ((x * y).relu() + x).sum(), mesh)
    with dt.launch(mesh, local="inductor"):
        x = dt.distribute(torch.randn(8, 6), mesh, tp=dt.Row())
        y = dt.distribute(torch.randn(8, 6), mesh, tp=dt.Row())
        expected = ((x.full_tensor() * y.full_tensor()).relu() + x.full_tensor()).sum()
        found: Tensor = f(x, y).full_tensor()
        kernels = f.profile(1, x, y).ranks[0].kernels
    torch.testing.assert_close(found, expected)
    assert "fused(mul, relu, add, sum)" in kernels


def test_inductor_rejects_incompatible_options() -> None:
    mesh = dt.Mesh()
    for wrong, said in (
        (dict(local="fast"), 'local=\'fast\': it is "generated" or "inductor"'),
        (dict(local="inductor", device="meta"), "it compiles for CPUs alone"),
    ):
        with pytest.raises(dt.PlanningError, match=said), dt.launch(mesh, **wrong):
            pass
    model = dt.parallelize(make_model(), mesh, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, loss_fn, optimizer, detect_nan=True)
    said = "detect_nan checks each op"
    with dt.launch(mesh, local="inductor"), pytest.raises(dt.PlanningError, match=said):
        step(*batches(1)[0])


@pytest.mark.slow
def test_inductor_launch_without_cpp_compiler_raises_with_fix() -> None:
    code = 'import dtensor as dt\nwith dt.launch(dt.Mesh(), local="inductor"): pass'
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CXX": "/nowhere/g++"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    last = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert any('local="inductor" needs a C++ compiler' in line for line in last), done.stderr
    assert last[-1] == "fix: install g++, or set CXX to a compiler; or leave local out"
