"""`launch(local="inductor")`: all backends and modes are bitwise equal, and close to results
without inductor; layers share compiled functions.

Run as a program, it compares the models of tests/models.py at six placements:

    python -m tests.api.test_inductor
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.compiled_code import compiles
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Backend, Function, Mode, Program
from dtensor.daft.errors import DaftError
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.runtime.lower import pieces
from dtensor.runtime.lower.pieces import CompiledPiece
from tests.models import MLP, DropoutGPT, Llama, batch, loss_fn, square_loss
from tests.training import (
    SIX,
    adamw,
    assert_losses_close,
    assert_same_bits,
    batches,
    make_model,
    sgd,
)


def trained(
    name: str,
    local: str,
    backend: Backend = "inprocess",
    mode: Mode = "compiled",
    *,
    make: Callable[[], nn.Module] = make_model,
    zero: Mapping[str, int] | None = None,
    options: Mapping[str, Any] = {},
    size: int = 4,
    pinned: bool = True,
    double: bool = False,
) -> tuple[list[float], dict[str, Any], Program]:
    placed = SIX[name]
    torch.manual_seed(0)
    module = make().double() if double else make()
    pins = placed.pins if pinned else {}
    model = dt.parallelize(module, placed.mesh, pins, stages=placed.stages, zero=zero)
    optimizer = adamw(module)
    step = dt.train_step(model, loss_fn, optimizer, inputs=placed.inputs, **options)
    data = [batch(seed, size=size) for seed in range(3)]
    with dt.launch(placed.mesh, backend, mode=mode, local=local):  # type: ignore[arg-type]
        losses = [float(step(*one)) for one in data]
        state = dt.gather_state_dict(model, optimizer)
        [loaded] = programs_of(session_for(placed.mesh))
        return losses, state, loaded.handle.program


def pieces_of(program: Program) -> dict[int, CompiledPiece]:
    bound = (value for _, function in program.functions for _, value in function.bindings)
    return {id(value): value for value in bound if isinstance(value, CompiledPiece)}


def names_of(program: Program) -> list[str]:
    return sorted({piece.__name__ for piece in pieces_of(program).values()})


def test_compiled_step_matches_generated_step_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, data = dt.Mesh(dp=2), (torch.randn(4, 6), torch.randn(4, 6))
    losses: dict[str, list[float]] = {}
    counts: list[int] = []
    compile_piece = pieces.compile_piece
    monkeypatch.setattr(
        pieces, "compile_piece", lambda *given: counts.append(1) or compile_piece(*given)
    )
    for local in ("generated", "inductor"):
        torch.manual_seed(0)
        module = MLP(6, 8)
        model = dt.parallelize(module, mesh, {})
        step = dt.train_step(model, square_loss, sgd(module), inputs=dict(dp=dt.Row()))
        with dt.launch(mesh, local=local):  # type: ignore[arg-type]
            losses[local] = [float(step(*data))]
            first = len(counts)
            losses[local] += [float(step(*data)) for _ in range(4)]
            [loaded] = programs_of(session_for(mesh))
            assert len(pieces_of(loaded.handle.program)) == first == len(counts)
    assert counts
    assert_losses_close(losses["inductor"], losses["generated"])


def test_boxed_function_frees_input_before_it_returns() -> None:
    freed: list[bool] = []
    watched: list[weakref.ref[Tensor]] = []

    def look(y: Tensor) -> Tensor:
        freed.append(watched[0]() is None)
        return y

    lines = (
        CodeLine("y = x + 1", ("y",), ("x",), drops=("x",)),
        CodeLine("z = look(y)", ("z",), ("y",), "look"),
    )
    body = Body(("x",), lines, ("z",), boxed=True)
    built: Any = Function.straight("f", body, {"look": look}).build()
    values = [torch.ones(2)]
    watched.append(weakref.ref(values[0]))
    assert built.boxed(values)[0].tolist() == [2, 2]
    assert freed == [True] and not values
    x = torch.ones(2)
    watched[0] = weakref.ref(x)
    assert built(x)[0].tolist() == [2, 2]  # the caller still has x
    assert freed == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 12), (dict(schedule=dt.OneFOneB(microbatches=2)), 14)],
)
def test_number_of_compiled_functions_does_not_depend_on_layers(
    options: dict[str, Any], limit: int
) -> None:
    counts: list[int] = []
    for layers in (3, 6):
        make = partial(make_model, layers=layers)
        program = trained("tp2", "inductor", make=make, options=options)[2]
        counts.append(len(pieces_of(program)))
    assert counts[0] == counts[1] <= limit


@pytest.mark.slow
def test_inductor_modes_are_bitwise_equal_and_close_to_plain_codegen() -> None:
    losses, state, program = trained("tp2", "inductor")
    assert any("mm, add" in name for name in names_of(program))
    again, same, _ = trained("tp2", "inductor", mode="interpreted")
    assert losses == again
    assert_same_bits(same, state)
    plain, _, generated = trained("tp2", "generated")
    assert names_of(generated) == []
    assert_losses_close(losses, plain)


@pytest.mark.slow
@pytest.mark.ray
def test_inductor_on_ray_is_bitwise_equal_to_in_process() -> None:
    losses, state, _ = trained("tp2", "inductor")
    there, same, _ = trained("tp2", "inductor", "ray")
    assert losses == there
    assert_same_bits(same, state)


MORE: list[tuple[str, dict[str, Any]]] = [
    ("tp2_pp2", dict(options=dict(schedule=dt.OneFOneB(microbatches=2), clip_grad_norm=1.0))),
    ("dp2", dict(zero={"dp": 3}, size=3)),  # ranks of two rows and of one
    ("dp2", dict(make=Llama, pinned=False)),
    ("single", dict(double=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), MORE)
def test_inductor_losses_match_plain_codegen_for_more_placements(
    name: str, more: dict[str, Any]
) -> None:
    losses, _, program = trained(name, "inductor", **more)
    assert pieces_of(program)
    expected = trained(name, "generated", **more)[0]
    limit = 1e-12 if more.get("double") else 1e-5
    torch.testing.assert_close(losses, expected, rtol=limit, atol=limit)


@pytest.mark.slow
def test_wrong_label_raises_same_error_as_plain_codegen() -> None:
    tokens, targets = batch(0)
    targets[1, 2] = 99
    said: list[str] = []
    for local in ("generated", "inductor"):
        placed = SIX["single"]
        module = make_model()
        step = dt.train_step(dt.parallelize(module, placed.mesh, {}), loss_fn, adamw(module))
        with dt.launch(placed.mesh, local=local):  # type: ignore[arg-type]
            with pytest.raises(DaftError) as caught:
                float(step(tokens, targets))
            said.append(str(caught.value.failure.reason))  # type: ignore[attr-defined]
            float(step(*batch(0)))
    assert said[0] == said[1]


def transposed_relu(self: Tensor) -> Tensor:
    return torch.where(self > 0, self, 0.0).t().contiguous().t()


@pytest.mark.slow
def test_user_kernel_with_other_strides_stays_between_compiled_pieces() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(torch.relu(x @ w + 1) * 2) @ w).sum()

    mesh, x, w = dt.Mesh(), torch.randn(4, 4), torch.randn(4, 4)
    with dt.kernel("aten::relu", "cpu").using(transposed_relu):
        compiled = dt.compile(fn, mesh)
        with dt.launch(mesh, local="inductor"):
            found = compiled(x, w).full_tensor()
            [loaded] = programs_of(session_for(mesh))
    assert len(pieces_of(loaded.handle.program)) == 2
    torch.testing.assert_close(found, fn(x, w))


@pytest.mark.slow
def test_profile_names_compiled_pieces() -> None:
    mesh = dt.Mesh(tp=2)
    f = dt.compile(lambda x, y: ((x * y).relu() + x).sum(), mesh)
    with dt.launch(mesh, local="inductor"):
        x = dt.distribute(torch.randn(8, 6), mesh, tp=dt.Row())
        y = dt.distribute(torch.randn(8, 6), mesh, tp=dt.Row())
        expected = ((x.full_tensor() * y.full_tensor()).relu() + x.full_tensor()).sum()
        found: Tensor = f(x, y).full_tensor()
        kernels = f.profile(1, x, y).ranks[0].kernels
    torch.testing.assert_close(found, expected)
    assert "compiled(mul, relu, add, sum)" in kernels


def test_inductor_rejects_incompatible_options() -> None:
    mesh = dt.Mesh()
    rejected: list[tuple[dict[str, Any], str]] = [
        (dict(local="inducter"), '"auto", "generated" or "inductor"\nfix: local="inductor"$'),
        (dict(local="inductor", device="meta"), "it compiles for CPUs and GPUs"),
    ]
    for wrong, said in rejected:
        with pytest.raises(dt.PlanningError, match=said), dt.launch(mesh, **wrong):
            pass
    model = dt.parallelize(make_model(), mesh, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, loss_fn, optimizer, detect_nan=True)
    said = "detect_nan checks each op"
    with dt.launch(mesh, local="inductor"), pytest.raises(dt.PlanningError, match=said):
        step(*batches(1)[0])


def test_auto_without_compiler_warns_once_and_inductor_raises() -> None:
    def session(local: str) -> Any:
        launch = SimpleNamespace(local=local, has_compiler=None)
        problem = ("Triton, which is not installed", "pip install triton")
        cluster = SimpleNamespace(device=torch.device("cuda"), call_on=lambda *_: problem)
        return SimpleNamespace(launch=launch, cluster=cluster)

    auto = session("auto")
    with pytest.warns(UserWarning, match="local code is not compiled: .* Triton"):
        assert not compiles(auto, False)
    assert not compiles(auto, False)  # a second warning would be an error
    with pytest.raises(dt.PlanningError, match='local="inductor" needs Triton'):
        compiles(session("inductor"), False)


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


def main() -> None:
    """Compare compiled with generated code for each model and placement."""
    models: dict[str, Callable[[], nn.Module]] = dict(
        gpt=make_model, llama=Llama, dropout=DropoutGPT
    )
    for name in SIX:
        for model, make in models.items():
            pinned = model == "gpt"
            if not pinned and SIX[name].stages:
                continue
            for double in (False, True):
                options: Any = dict(make=make, pinned=pinned, double=double)
                found = trained(name, "inductor", **options)[0]
                expected = trained(name, "generated", **options)[0]
                # Llama computes the angles of its rotary positions in float32
                limit = (1e-8 if model == "llama" else 1e-12) if double else 1e-5
                torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
                error = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                print(f"{model:8} {name:8} {'float64' if double else 'float32'} {error:.1e}")


if __name__ == "__main__":
    main()
