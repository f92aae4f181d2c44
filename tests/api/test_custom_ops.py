"""User-defined ops on Ray, whose actors are other processes: ops defined in the script, ops of a
module that actors cannot import, and ops that cannot be sent."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft.errors import ProgramError

MODULE = '''
"""Ops by torch.library.custom_op and by define and impl, and a function that a localizer names."""
from dataclasses import replace

import torch

import dtensor as dt

FACTOR = 3.0


def helper(x):
    return x * FACTOR


@torch.library.custom_op("far::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


scale.register_fake(torch.empty_like)
scale.register_autograd(lambda ctx, grad: scale(grad))
dt.rule("far::scale", "... -> ...", linear="x")

torch.library.define("far::plus", "(Tensor x, int n) -> Tensor")
torch.library.impl("far::plus", "default", lambda x, n: x + n)
torch.library.register_fake("far::plus", lambda x, n: torch.empty_like(x))
torch.library.register_autograd("far::plus", lambda ctx, grad: (grad, None))
dt.rule("far::plus", "... -> ...")


def made():
    """An op that importing this module does not register."""

    @torch.library.custom_op("far::made", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR

    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: scale(grad))
    dt.rule("far::made", "... -> ...", linear="x")
    return op


def local_rows(x, start):
    return x + torch.arange(start, start + x.shape[0])[:, None]


@torch.library.custom_op("far::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    return local_rows(x, 0)


def localize(call, local):
    ((start, _),) = local.operand_intervals(0, 0)
    return replace(call, target=local_rows, args=(*call.args, start))


rows.register_fake(torch.empty_like)
rows.register_autograd(lambda ctx, grad: grad.clone())
dt.rule("far::rows", "m n -> m n", localize=localize)
'''

SCRIPT = """
import sys

sys.path.insert(0, sys.argv[1])
import far_ops
import numpy as np
import torch
from torch import nn

import dtensor as dt

SHIFT = 2.0
made = far_ops.made()


def inner(x):
    return torch.from_numpy(np.tanh(x.numpy()))


@torch.library.custom_op("mine::act", mutates_args=())
def act(x: torch.Tensor, p: float = 1.0) -> torch.Tensor:
    return inner(x) * p + torch.ops.mine.shift(x) + other(x)


@torch.library.custom_op("mine::act_backward", mutates_args=())
def act_backward(grad: torch.Tensor, x: torch.Tensor, p: float) -> torch.Tensor:
    return grad * ((1 - torch.tanh(x) ** 2) * p + 2)


@torch.library.custom_op("mine::other", mutates_args=())
def other(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


def setup(ctx, inputs, output):
    x, ctx.p = inputs
    ctx.save_for_backward(x)


torch.library.define("mine::shift", "(Tensor x) -> Tensor")
torch.library.impl("mine::shift", "cpu", lambda x: x + SHIFT)
act.register_fake(lambda x, p=1.0: torch.empty_like(x))
act_backward.register_fake(lambda grad, x, p: torch.empty_like(x))
act.register_autograd(
    lambda ctx, grad: (act_backward(grad, *ctx.saved_tensors, ctx.p), None), setup_context=setup
)
dt.rule("mine::act", "... -> ...")
dt.rule("mine::act_backward", "..., ... -> ...")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = torch.ops.far.plus(far_ops.scale(act(self.up(x), 0.5)), 1)
        return far_ops.rows(made(self.down(h)))


def loss_fn(model, x):
    return model(x).square().mean()


def build():
    torch.manual_seed(0)
    return Net()


def train_torch(x):
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


x = torch.randn(4, 8)
mesh = dt.Mesh(dp=2, tp=2)
pins = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
model = dt.parallelize(build(), mesh, pins)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
step = dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()))
text = str(step.plan(x))
assert "16@tp" in text and "far.rows" in text, text
for backend in ("inprocess", "ray"):
    model.module.load_state_dict(build().state_dict())
    with dt.launch(mesh, backend=backend):
        losses = [float(step(x)) for _ in range(3)]
        dt.gather_state_dict(model)
    np.testing.assert_allclose(losses, train_torch(x), rtol=1e-5)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_ops_of_script_and_of_unimportable_module_train_on_ray_as_in_torch(tmp_path: Path) -> None:
    """The script is `__main__`; the module is in a folder that only the script has on its path."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far_ops.py").write_text(textwrap.dedent(MODULE))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(elsewhere)],
        env={**os.environ, "PYTHONPATH": str(Path(dt.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr


class Held:
    """A kernel that is a method; its object cannot leave this process."""

    def run(self, x: Tensor) -> Tensor:
        return x * 2


@torch.library.custom_op("test_custom_ops::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
dt.rule("test_custom_ops::twice", "... -> ...", linear="x")


@pytest.mark.slow
@pytest.mark.ray
def test_op_that_cannot_be_sent_to_actors_raises_before_running(ray_session: None) -> None:
    """The launch survives: the next program, with an op of this test module, runs."""
    torch.library.define("test_custom_ops::method", "(Tensor x) -> Tensor")
    torch.library.impl("test_custom_ops::method", "default", Held().run)
    torch.library.register_fake("test_custom_ops::method", torch.empty_like)
    dt.rule("test_custom_ops::method", "... -> ...")
    mesh = dt.Mesh(tp=2)
    x = torch.arange(4.0)
    lost = dt.compile(lambda x: torch.ops.test_custom_ops.method(x), mesh)
    found = dt.compile(lambda x: twice(x) + 1, mesh)
    with dt.launch(mesh, backend="ray"):
        with pytest.raises(ProgramError, match=r"test_custom_ops::method: (.|\n)*fix: ") as caught:
            lost(x)
        assert "not a plain function" in str(caught.value)
        assert torch.equal(found(x).full_tensor(), x * 2 + 1)


EDITED = """
import torch

FACTOR = {factor}


def scaled(x):
    return x * FACTOR


@torch.library.custom_op("edited::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return scaled(x)


scale.register_fake(torch.empty_like)
scale.register_autograd(lambda ctx, grad: grad * {factor})
"""


@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def test_edited_and_reloaded_op_is_used_from_next_call(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The new kernel, the functions that it calls and its gradient are used."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"edited_{backend}.py"

    def edited(factor: float, module: ModuleType | None = None) -> ModuleType:
        file.write_text(EDITED.format(factor=factor))
        os.utime(file, (factor, factor))  # bytecode that a rank wrote goes by seconds and length
        importlib.invalidate_caches()
        return importlib.reload(module) if module else importlib.import_module(file.stem)

    def op(x: Any) -> Any:
        return torch.ops.edited.scale(x)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return op(model(x)).sum()

    module = edited(2.0)
    dt.rule("edited::scale", "... -> ...")
    mesh, x = dt.Mesh(tp=2), torch.ones(4, 3)
    model = dt.parallelize(nn.Linear(3, 2), mesh, {"weight": dict(tp=dt.Row())})
    step = dt.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    compiled = dt.compile(op, mesh)
    with dt.launch(mesh, backend=backend):  # type: ignore[arg-type]
        first = float(step(x))
        for factor in (2.0, 5.0, 7.0):
            if factor != 2.0:
                edited(factor, module)
            assert float(step(x)) == pytest.approx(first * factor / 2)
            assert torch.equal(step.gradients(x)["bias"], torch.full((2,), 4 * factor))
            assert torch.equal(compiled(x).full_tensor(), x * factor)
            assert torch.equal(op(dt.distribute(x, mesh)).full_tensor(), x * factor)
